"""How near the two ops come to the memory floor, and how far they leave plain formulations behind.

    python -m pallas_kernels.bench                 # make bench; about 4 minutes on 2 cores

For every spec of `arg_specs`: bytes that must move, bytes that the compiler says move, seconds, and the ratio to the floor at the
bandwidth of a copy that is measured in the same run. Then comparisons with plain formulations, both sides in turn.
Times are medians. Results go to experiments/results/kernels.json.
"""

import argparse
import dataclasses
import functools
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import jax
import jax.numpy as jnp

from pallas_kernels import plain
from pallas_kernels.arg_specs import SPECS, MarkovArguments, RejectionArguments, Spec, markov_arguments
from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.markov_sample import markov_block
from pallas_kernels.noise import Stream
from pallas_kernels.parity import drafted
from pallas_kernels.rejection_sample import DraftRows, rejection_sample
from pallas_kernels.two_level_draw import draw

RESULTS = Path(__file__).resolve().parent.parent / "experiments" / "results" / "kernels.json"
COMPARED = {"cpu": Spec(151_936, 16, 7, 256, "float32")}
"""Shape of the comparisons with plain formulations, by platform."""
COMPARED_ELSEWHERE = Spec(151_936, 128, 7, 256, "bfloat16")


def compared() -> Spec:
    """Shape of the comparisons on this platform."""
    return COMPARED.get(jax.default_backend(), COMPARED_ELSEWHERE)


@dataclasses.dataclass(frozen=True)
class Floor:
    """What an op cannot do without.

    Attributes:
      bytes: read from memory, each operand once (W2 once per token where it does not stay on chip).
      flops: of matrix products.
    """

    bytes: int
    flops: int


def markov_floor(spec: Spec, *, keeps_w2: bool = False, returns_logits: bool = False) -> Floor:
    """U once, and W2 once per drafted token, or once where it stays on chip; the corrected logits, where they are wanted, once more."""
    logits = spec.block_size * spec.num_rows * spec.vocab_size * 4 * (1 + returns_logits)
    w2 = spec.vocab_size * spec.rank * spec.w2_dtype.itemsize
    return Floor(logits + w2 * (1 if keeps_w2 else spec.block_size), 2 * spec.block_size * spec.num_rows * spec.vocab_size * spec.rank)


def rejection_floor(spec: Spec) -> Floor:
    """Every row of target logits once, and for each request the row that decides once more, with its row of draft logits (float32)."""
    size = jnp.dtype(spec.dtype).itemsize
    return Floor(spec.num_flat * spec.vocab_size * size + spec.num_rows * spec.vocab_size * (size + 4), 0)


CHIPS = {
    "H200": (4.8e12, 989e12, 0),
    "v5e": (819e9, 197e12, 128 << 20),
    "v5p": (2765e9, 459e12, 64 << 20),
    "v6e": (1640e9, 918e12, 128 << 20),
}
"""Bytes per second of main memory, bfloat16 operations per second (data sheets), and bytes of fast memory in which W2 may stay."""


def roofline() -> str:
    """A Markdown table: bytes and operations of every spec, and the microseconds below which a chip cannot be."""
    head = ["op", "spec", "MB", "MB, W2 kept", "GFLOP", *(f"{chip}, us" for chip in CHIPS)]
    lines = [f"| {' | '.join(head)} |", f"|{'---|' * len(head)}"]
    for spec in SPECS:
        # Rows of fast memory are 128 numbers wide; some MiB are for what is streamed.
        size = spec.vocab_size * max(spec.rank, 128) * spec.w2_dtype.itemsize + (12 << 20)
        streamed, kept = markov_floor(spec), markov_floor(spec, keeps_w2=True)
        ops = {"markov_block": (streamed, kept), "rejection_sample": (rejection_floor(spec),) * 2}
        for op, (anew, once) in ops.items():
            cells = [op, spec.name, f"{anew.bytes / 1e6:.0f}", f"{once.bytes / 1e6:.0f}" if once != anew else "", f"{anew.flops / 1e9:.1f}"]
            for bandwidth, peak, fast_memory in CHIPS.values():
                floor = once if size <= fast_memory else anew
                # Matrix units are counted for bfloat16 alone.
                busy = floor.flops / peak if spec.dtype == "bfloat16" else 0.0
                cells.append(f"{max(floor.bytes / bandwidth, busy) * 1e6:.0f}")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def calls_of(spec: Spec, backend: Backend) -> Iterator[tuple[str, Floor, Callable[..., Any], tuple[Any, ...]]]:
    """Name, floor, function and arguments of both ops."""
    keeps = jax.default_backend() == "tpu"
    arguments = jax.block_until_ready(jax.jit(markov_arguments, static_argnums=0)(spec))
    block = jax.jit(functools.partial(markov_block, backend=backend))
    yield "markov_block", markov_floor(spec, keeps_w2=keeps), block, tuple(arguments)
    judged = jax.block_until_ready(judged_by(spec, arguments, backend))
    del arguments
    yield "rejection_sample", rejection_floor(spec), jax.jit(functools.partial(_reject, backend=backend)), judged


def judged_by(spec: Spec, arguments: MarkovArguments, backend: Backend) -> tuple[RejectionArguments, DraftRows, jax.Array | None]:
    """Arguments of `_reject` for drafts that were drawn from `arguments`."""
    return jax.jit(lambda given: drafted(spec, markov_block(*given, return_logits=True, backend=backend)))(arguments)


def _reject(arguments: RejectionArguments, draft: DraftRows, floor: jax.Array | None, backend: Backend) -> Any:
    return rejection_sample(*arguments, draft=draft, floor=floor, backend=backend)


def medians(calls: Sequence[Callable[[], Any]], seconds: float) -> list[float]:
    """Median seconds of each call, one after another in turn until `seconds` have passed, at least three times."""
    for call in calls:
        jax.block_until_ready(call())
    times: list[list[float]] = [[] for _ in calls]
    began = time.perf_counter()
    while len(times[0]) < 3 or time.perf_counter() - began < seconds:
        for call, taken in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call())
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def copy_bandwidth(megabytes: int = 512) -> float:
    """Bytes per second that a copy reads and writes together."""
    source = jnp.ones((megabytes << 20) // 4, jnp.float32)
    copy = jax.jit(lambda values: values + 1)
    (seconds,) = medians([lambda: copy(source)], 1.0)
    return 2 * source.nbytes / seconds


def compiled_bytes(function: Any, arguments: tuple[Any, ...]) -> float | None:
    """`bytes accessed` of the compiled program, where the backend says."""
    analysis = function.lower(*arguments).compile().cost_analysis() or {}
    return analysis.get("bytes accessed")


def compare_rejection(backend: Backend, seconds: float) -> dict[str, Any]:
    """`rejection_sample` against the plain formulation."""
    spec = compared()
    judged, draft, floor = judged_by(spec, jax.jit(markov_arguments, static_argnums=0)(spec), backend)
    ours = jax.jit(functools.partial(_reject, backend=backend))
    theirs = jax.jit(plain.rejection_sample)
    given = (judged.target_logits, draft.logits, judged.ids, judged.lengths, judged.key, judged.temperature)
    fast, slow = medians([lambda: ours(judged, draft, floor), lambda: theirs(*given)], seconds)
    return {
        "op": "rejection_sample",
        "against": "probabilities of all G + 1 rows, a residual drawn at each",
        "seconds": fast,
        "plain": slow,
    }


def compare_draw(seconds: float) -> dict[str, Any]:
    """The two-level draw against Gumbel-max over all ids with a log-sum-exp."""
    arguments = jax.jit(markov_arguments, static_argnums=0)(compared())
    rows = compared().num_rows
    logits, warm = arguments.base_logits[0], jnp.ones(rows)
    floor, place = jnp.full(rows, -jnp.inf), jnp.zeros(rows, jnp.int32)
    ours = jax.jit(functools.partial(draw, tile_stream=Stream.DRAFT_TILE, id_stream=Stream.DRAFT_ID))
    theirs = jax.jit(functools.partial(plain.draw, stream=Stream.DRAFT_ID))
    calls = [lambda: ours(logits, floor, warm, arguments.key, place), lambda: theirs(logits, warm, arguments.key, position=place)]
    fast, slow = medians(calls, seconds)
    return {"op": "two-level draw", "against": "Gumbel-max over all ids and log-sum-exp", "seconds": fast, "plain": slow}


def compare_markov(backend: Backend, seconds: float) -> dict[str, Any]:
    """`markov_block` against the plain formulation."""
    arguments = jax.jit(markov_arguments, static_argnums=0)(compared())
    ours, theirs = jax.jit(functools.partial(markov_block, backend=backend)), jax.jit(plain.markov_block)
    fast, slow = medians([lambda: ours(*arguments), lambda: theirs(*arguments)], seconds)
    return {"op": "markov_block", "against": "Gumbel-max over all ids and log-sum-exp", "seconds": fast, "plain": slow}


def memory_of(spec: Spec) -> int:
    """Bytes of the largest set of arguments of a spec, with what makes them."""
    per_row = spec.vocab_size * 4
    return spec.num_rows * per_row * (2 * spec.block_size + 3 * (spec.block_size + 1)) + 8 * spec.vocab_size * spec.rank


def main(arguments: Sequence[str] | None = None) -> int:
    """Run, print and write."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", default="auto", choices=get_args(BackendName), help="who computes (default: the device's kernels)")
    parser.add_argument("--gib", type=float, default=6.0, help="skip specs that need more memory (default: 6)")
    parser.add_argument("--seconds", type=float, default=1.0, help="per measurement, at least (default: 1)")
    parser.add_argument("--out", type=Path, default=RESULTS, help="where the results go, as JSON (default: the committed file)")
    parser.add_argument("--roofline", action="store_true", help="print the table of floors and measure nothing")
    options = parser.parse_args(arguments)
    if options.roofline:
        print(roofline())
        return 0
    bandwidth = copy_bandwidth()
    device = f"{jax.devices()[0].device_kind} ({jax.default_backend()}, {os.cpu_count()} CPU cores)"
    print(f"{device}: a copy moves {bandwidth / 1e9:.1f} GB/s")
    print(f"{'op':<18}{'spec':<38}{'floor, MB':>11}{'compiler, MB':>14}{'ms':>10}{'of floor':>10}")
    rows = []
    for spec in SPECS:
        if memory_of(spec) > options.gib * 2**30:
            print(f"{'(skipped)':<18}{spec.name:<38}needs {memory_of(spec) / 2**30:.1f} GiB")
            continue
        for name, floor, function, given in calls_of(spec, options.backend):
            (seconds,) = medians([functools.partial(function, *given)], options.seconds)
            moved = compiled_bytes(function, given)
            ratio = seconds / (floor.bytes / bandwidth)
            rows.append(
                {"op": name, "spec": spec.name, **dataclasses.asdict(floor), "compiler_bytes": moved, "seconds": seconds, "ratio": ratio}
            )
            said = "" if moved is None else f"{moved / 1e6:.0f}"
            print(f"{name:<18}{spec.name:<38}{floor.bytes / 1e6:>11.0f}{said:>14}{seconds * 1e3:>10.2f}{ratio:>10.2f}")
    comparisons = [compare_rejection(options.backend, 4 * options.seconds), compare_draw(4 * options.seconds)]
    comparisons.append(compare_markov(options.backend, 4 * options.seconds))
    for each in comparisons:
        each["times_faster"] = each["plain"] / each["seconds"]
        print(f"{each['op']} at {compared().name}: {each['times_faster']:.1f} times faster than {each['against']}")
    versions = {"python": platform.python_version(), "jax": jax.__version__}
    content = {"device": device, "versions": versions, "backend": options.backend, "copy_bytes_per_second": bandwidth}
    options.out.parent.mkdir(parents=True, exist_ok=True)
    unfinished = options.out.with_name(f".{os.getpid()}.{options.out.name}")
    unfinished.write_text(json.dumps(content | {"specs": rows, "comparisons": comparisons}, indent=2) + "\n", encoding="utf-8")
    unfinished.replace(options.out)
    print(options.out)
    return 0


if __name__ == "__main__":
    sys.exit(main())
