"""What a round costs on this machine: seconds of the target's pass against the number of flat tokens, and of drafting.

    python -m experiments.profile_steps                # whole passes, about 4 minutes on 2 cores, out/profile_steps.json

Two ways of measuring the target. `time_whole_passes` compiles it once per number of tokens, which takes seconds each.
`time_by_layer` compiles a single layer and the head per number of tokens and runs every layer's own weights through them: all the
memory traffic of a pass for a thirtieth of the compilation. The demo measures in this way when it starts.

All numbers are medians over interleaved repetitions: every repetition times every size once, so that a disturbance hits all alike.
"""

import dataclasses
import functools
import itertools
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from dspark_jax.decode import DecodeParams
from dspark_jax.protocols import Drafter
from dspark_jax.schedule import StepCurve
from dspark_jax.typing import Params
from dspark_jax.weights import load_drafter, load_target
from experiments.command_line import run_command
from experiments.result_files import write_json
from experiments.step_timing import has_layers, interleaved, time_by_layer, time_drafting, time_whole_passes

RELEASED_DRAFTER = Path(__file__).resolve().parent.parent / "dspark_jax" / "assets" / "smollm2_dspark"

CORES = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


@dataclasses.dataclass(frozen=True)
class StepProfile:
    """Measured costs of one request's round.

    Attributes:
      tokens: numbers of flat tokens, ascending; the last one is 1 + G.
      target_seconds: of the target's pass with its output head, at each.
      draft_seconds: of proposing a block and committing to the drafter.
    """

    tokens: tuple[int, ...]
    target_seconds: tuple[float, ...]
    draft_seconds: float

    def at(self, num_tokens: int) -> float:
        """Seconds of the target's pass at a measured number of tokens."""
        return self.target_seconds[self.tokens.index(num_tokens)]

    def curve(self, ladder: Sequence[int]) -> StepCurve:
        """The costs at the buckets of a ladder, all of which were measured."""
        return StepCurve(tuple(ladder), tuple(self.at(bucket) for bucket in ladder), self.draft_seconds)

    def ladder(self, max_buckets: int = 3, min_gain: float = 0.02) -> tuple[int, ...]:
        """The buckets worth compiling: those that lose least by rounding up, averaged over every need from 1 to the largest.

        Args:
          max_buckets: at most so many.
          min_gain: share of the mean cost of a round that a further bucket must save.
        """
        if max_buckets < 1:
            raise ValueError(f"max_buckets is {max_buckets}; allowed are integers of at least 1")
        *smaller, largest = self.tokens
        best, best_cost = (largest,), self._mean_cost((largest,))
        for size in range(1, max_buckets):
            candidates = [(*chosen, largest) for chosen in itertools.combinations(smaller, size)]
            if not candidates:
                break
            candidate = min(candidates, key=self._mean_cost)
            if (cost := self._mean_cost(candidate)) < best_cost * (1 - min_gain):
                best, best_cost = candidate, cost
        return best

    def _mean_cost(self, ladder: Sequence[int]) -> float:
        needs = range(1, self.tokens[-1] + 1)
        return sum(self.draft_seconds + self.at(next(bucket for bucket in ladder if bucket >= need)) for need in needs) / len(needs)

    def agrees_with(self, other: "StepProfile", tolerance: float) -> bool:
        """Whether both say the same of relative costs: every ratio to the pass on the fewest tokens is within `tolerance`."""
        if self.tokens != other.tokens:
            return False
        mine, theirs = ((*profile.target_seconds, profile.draft_seconds) for profile in (self, other))
        return all(abs((a / mine[0]) / (b / theirs[0]) - 1) <= tolerance for a, b in zip(mine, theirs, strict=True))


@dataclasses.dataclass(frozen=True)
class PlainChoice:
    """How plain decoding is fastest.

    Attributes:
      dtype: of the parameters.
      tokens: flat tokens of a step, 1 or 2 (one of them padding).
      seconds: what each way took, by dtype and number of tokens.
    """

    dtype: str
    tokens: int
    seconds: Mapping[str, Mapping[int, float]]


def describe_device() -> dict[str, Any]:
    """The device and the versions that a measurement holds for."""
    processor = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.is_file():
        names = [line.partition(":")[2].strip() for line in info.read_text().splitlines() if line.startswith("model name")]
        processor = names[0] if names else processor
    device = jax.devices()[0]
    kind = processor if device.platform == "cpu" else device.device_kind
    versions = {"python": platform.python_version(), "jax": jax.__version__, "flax": flax.__version__}
    return {"platform": device.platform, "kind": kind, "cpu_cores": CORES, "versions": versions}


def device_text() -> str:
    """The device in a few words."""
    device = describe_device()
    cores = f", {device['cpu_cores']} cores" if device["platform"] == "cpu" else ""
    return f"{device['platform']}: {device['kind']}{cores}"


def choose_plain(target: Any, params: Params, *, max_len: int, repetitions: int = 3, dtypes: Sequence[str] = ("bfloat16",)) -> PlainChoice:
    """Time one step of plain decoding on one token and padded to two, in the parameters' own dtype and in `dtypes`.

    A dtype in which the backend cannot run the target is passed over.
    """
    own = str(target.head(params).embedding.dtype)
    seconds: dict[str, dict[int, float]] = {}
    for dtype in dict.fromkeys((own, *dtypes)):
        cast = params if dtype == own else jax.tree.map(lambda leaf, to=dtype: leaf.astype(to), params)
        try:
            if has_layers(target, params):
                seconds[dtype] = time_by_layer(target, cast, (1, 2), block_size=0, max_len=max_len, repetitions=repetitions)
            else:
                options = {"taps": (), "block_size": 0, "max_len": max_len, "repetitions": repetitions}
                seconds[dtype] = time_whole_passes(target, cast, (1, 2), **options)
        except jax.errors.JaxRuntimeError:
            if dtype == own:
                raise
    _, dtype, tokens = min((taken, dtype, size) for dtype, sizes in seconds.items() for size, taken in sizes.items())
    return PlainChoice(dtype, tokens, seconds)


def profile(
    target: Any,
    params: DecodeParams,
    drafter: Drafter,
    *,
    max_len: int,
    sizes: Sequence[int] | None = None,
    temperature: float = 0.0,
    repetitions: int = 5,
    by_layer: bool = True,
) -> StepProfile:
    """Measure the rounds of one request.

    Args:
      params: of target and drafter, with their heads.
      sizes: numbers of flat tokens; 1 .. G + 1 where absent. G + 1 is measured in any case.
      temperature: at which drafts are drawn.
      by_layer: measure the target layer by layer, where it is a stack of layers.
    """
    block = drafter.block_size
    sizes = sorted({*(sizes or range(1, block + 2)), block + 1})
    timing = {"block_size": block, "max_len": max_len, "repetitions": repetitions}
    if by_layer and has_layers(target, params.target):
        seconds = time_by_layer(target, params.target, sizes, **timing)
    else:
        seconds = time_whole_passes(target, params.target, sizes, taps=drafter.taps, **timing)
    if params.drafter is None or params.draft_head is None:
        raise ValueError("params.drafter is None; a profile of drafting needs the drafter's parameters")
    width = target.spec.width
    drafting = time_drafting(
        drafter, params.drafter, params.draft_head, width, max_len=max_len, temperature=temperature, repetitions=2 * repetitions
    )
    return StepProfile(tuple(sizes), tuple(seconds[size] for size in sizes), drafting)


def time_products(shapes: Sequence[tuple[int, int]], rows: Sequence[int], copies: int = 30, repetitions: int = 5) -> list[dict[str, Any]]:
    """Seconds per matrix product with weights (out, in): activations on the left, and weight on the left.

    Every shape has `copies` different weights that are used in turn, so that they come from memory, as in a model.
    """
    row_left = jax.jit(lambda x, w: jax.lax.dot_general(x, w, (((1,), (1,)), ((), ()))))
    weight_left = jax.jit(lambda x, w: jax.lax.dot_general(w, x, (((1,), (1,)), ((), ()))).T)
    found = []
    for out, inner in shapes:
        weights = [jnp.full((out, inner), 0.01 * (index + 1), jnp.float32) for index in range(copies)]
        for name, product in (("activations_left", row_left), ("weight_left", weight_left)):

            def run(size: int, _: None, weights: list = weights, product: Any = product) -> None:
                x = jnp.ones((size, weights[0].shape[1]), jnp.float32)
                for weight in weights:
                    jax.block_until_ready(product(x, weight))

            taken = interleaved(run, None, rows, repetitions)
            found.append({"out": out, "in": inner, "form": name, "seconds": {size: taken[size] / copies for size in rows}})
    return found


@dataclasses.dataclass(frozen=True)
class ProfileOptions:
    """Command line of the profile.

    Attributes:
      target: name or folder of the target.
      drafter: folder of the drafter.
      out: JSON file to write.
      max_len: positions of the caches.
      repetitions: timed runs of each size.
      whole: also compile and time the whole target for every number of tokens.
      products: also time single matrix products in both orientations.
      bf16: also time plain decoding in bfloat16.
    """

    target: str = "smollm2"
    drafter: Path = RELEASED_DRAFTER
    out: Path = Path("out/profile_steps.json")
    max_len: int = 384
    repetitions: int = 10
    whole: bool = True
    products: bool = True
    bf16: bool = True


def run(options: ProfileOptions, console: Console) -> dict[str, Any]:
    """Measure, show a table, and write the JSON file."""
    target, target_params = load_target(options.target)
    loaded = load_drafter(options.drafter, target.spec)
    params = DecodeParams.of(target, target_params, loaded.params, loaded.draft_ids)
    measure = functools.partial(profile, target, params, loaded.drafter, max_len=options.max_len, repetitions=options.repetitions)
    content: dict[str, Any] = {"device": describe_device(), "target": options.target, "max_len": options.max_len}
    found = {}
    for name, by_layer in (("by_layer", True), *((("whole", False),) if options.whole else ())):
        with console.status(f"timing rounds, {name.replace('_', ' ')}"):
            found[name] = measure(by_layer=by_layer)
        content[name] = dataclasses.asdict(found[name])
    best = found.get("whole", found["by_layer"])
    content["ladder"] = best.ladder()
    with console.status("timing drafts at temperature 1"):
        content["draft_seconds_at_temperature_1"] = time_drafting(
            loaded.drafter, loaded.params, params.draft_head or params.head, target.spec.width, max_len=options.max_len, temperature=1.0
        )
    with console.status("timing plain decoding"):
        plain = choose_plain(target, target_params, max_len=options.max_len, dtypes=("bfloat16",) if options.bf16 else ())
    content["plain"] = dataclasses.asdict(plain)
    if options.products:
        shapes = sorted({leaf.shape for leaf in jax.tree.leaves(target_params.get("layers_0", {})) if leaf.ndim == 2})
        with console.status("timing matrix products"):
            content["products"] = time_products(shapes, best.tokens, repetitions=options.repetitions)
    table = Table("flat tokens", *map(str, best.tokens), title=device_text())
    for name, measured in found.items():
        table.add_row(f"target, {name.replace('_', ' ')}, ms", *(f"{seconds * 1e3:.1f}" for seconds in measured.target_seconds))
    console.print(table)
    console.print(f"drafting {best.draft_seconds * 1e3:.1f} ms; ladder {best.ladder()}; plain: {plain.dtype}, {plain.tokens} token(s)")
    write_json(options.out, content)
    return content


if __name__ == "__main__":
    sys.exit(run_command(ProfileOptions, run))
