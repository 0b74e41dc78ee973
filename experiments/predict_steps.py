"""What rounds would cost on TPUs that are not here: cost curves predicted from ahead-of-time compilation.

    uv pip install --no-deps "libtpu==0.0.42.*"          # the one that `jax[tpu]` of jax 0.10.2 names
    python -m experiments.predict_steps                  # SmolLM2 on v5e, v5p and v6e, about 12 minutes on 2 cores
    python -m experiments.predict_steps --model qwen3_4b --chips v5p --rows 1 2 4 8 16 32 64 128 256

A round on the target is a layer, L times, and the output head; beside it stand a proposal and a commit of the drafter. Each of the
four programs is compiled for one chip of a topology at a few numbers of requests and tokens. The compiler counts operations, and
`hlo_traffic` reads off the compiled program which bytes cross the memory bus; both are interpolated linearly in between. A program
then takes the longer of operations over peak and bytes over bandwidth (a roofline: what the chip cannot beat), and a round a launch
besides. `experiments/results/step_curves/tpu_*.json` have the curves.
"""

import dataclasses
import functools
import importlib.metadata
import platform
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path

import flax
import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from dspark_jax.step_curve import CurveWarning, StepCurve
from dspark_jax.weights import load_drafter, load_target
from experiments.aot_work import Compiled, Compiler, Pair, compile_all, num_compilations, topology_device
from experiments.command_line import run_command
from experiments.drafter_costs import Work
from experiments.measure_curves import FOLDER, show
from experiments.model_presets import MODEL_PRESETS
from experiments.profile_steps import RELEASED_DRAFTER
from experiments.step_curves import ROWS, CurveFamily, RoundCosts, buckets_of, rounded, write_family
from experiments.step_timing import SLOTS_AHEAD


@dataclasses.dataclass(frozen=True)
class Chip:
    """One chip of a topology: peak of bfloat16 products in operations per second, bandwidth of its main memory in bytes per second."""

    topology: str
    flops_per_second: float
    bytes_per_second: float

    def seconds(self, work: Work) -> float:
        """The longer of computing and moving, which overlap at best."""
        return max(work.flops / self.flops_per_second, work.bytes / self.bytes_per_second)


# Per chip, from Google Cloud's documentation of Cloud TPU, pages "TPU v5e", "TPU v5p" and "TPU v6e" (system architecture).
CHIPS = {
    "v5e": Chip("v5e:2x2", 197e12, 819e9),
    "v5p": Chip("v5p:2x2x1", 459e12, 2765e9),
    "v6e": Chip("v6e:2x2", 918e12, 1640e9),
}


@dataclasses.dataclass(frozen=True)
class PredictOptions:
    """Command line of the prediction.

    Attributes:
      model: "smollm2", or a model of `experiments/model_presets.py` with the DSpark drafter published for it.
      drafter: folder of the drafter, for smollm2.
      chips: to predict for.
      out: folder of the files.
      rows: numbers of requests.
      compiled_rows: those of them for which programs are compiled; the first and last of `rows` are among them in any case.
      contexts: committed tokens per request.
      launch_seconds: what starting a round takes; an assumption.
    """

    model: str = "smollm2"
    drafter: Path = RELEASED_DRAFTER
    chips: tuple[str, ...] = tuple(CHIPS)
    out: Path = FOLDER
    rows: tuple[int, ...] = ROWS
    compiled_rows: tuple[int, ...] = (8, 64, 128)
    contexts: tuple[int, ...] = (128, 512)
    launch_seconds: float = 1e-4

    def __post_init__(self) -> None:
        allowed = ("smollm2", *MODEL_PRESETS)
        if self.model not in allowed:
            raise ValueError(f"model is {self.model!r}; allowed: {', '.join(allowed)}")
        for chip in self.chips:
            if chip not in CHIPS:
                raise ValueError(f"chips holds {chip!r}; allowed: {', '.join(CHIPS)}")
        for field in ("rows", "contexts"):
            values = getattr(self, field)
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise ValueError(f"{field} is {values}; allowed are positive integers in strictly ascending order")
        if not self.launch_seconds >= 0:
            raise ValueError(f"launch_seconds is {self.launch_seconds}; allowed are numbers of at least 0")

    @property
    def corners(self) -> tuple[int, ...]:
        """Numbers of requests for which programs are compiled."""
        inside = (rows for rows in self.compiled_rows if self.rows[0] < rows < self.rows[-1])
        return tuple(sorted({self.rows[0], *inside, self.rows[-1]}))


def between(at: float, known: Mapping[int, Work]) -> Work:
    """Work at `at`, interpolated linearly between the nearest that are known."""
    places = sorted(known)
    flops, moved = (np.interp(at, places, [getattr(known[place], name) for place in places]) for name in ("flops", "bytes"))
    return Work(round(float(flops)), round(float(moved)))


def layer_work(found: Compiled, context: int, rows: int, num_tokens: int) -> Work:
    """Work of a layer, interpolated in the tokens per request and in the requests."""
    most = max(each for _, _, each in found.layer)
    corners = sorted({each for _, each, _ in found.layer})
    by_rows = {each: between(num_tokens / rows, {share: found.layer[context, each, share] for share in (1, most)}) for each in corners}
    return between(rows, by_rows)


def round_costs(found: Compiled, chip: Chip, options: PredictOptions, rows: int, num_layers: int, block_size: int) -> RoundCosts:
    """Roofline of a round of `rows` requests. Warns as `StepCurve` does."""
    buckets = buckets_of(rows, block_size)

    def seconds(layer: Work, num_tokens: int) -> float:
        return rounded(options.launch_seconds + num_layers * chip.seconds(layer) + chip.seconds(between(num_tokens, found.head)))

    def step_seconds(context: int) -> tuple[float, ...]:
        return tuple(seconds(layer_work(found, context, rows, bucket), bucket) for bucket in buckets)

    def plain_seconds(context: int) -> tuple[float]:
        corners = {each: work for (at, each), work in found.plain_layer.items() if at == context}
        return (seconds(between(rows, corners), rows),)

    def curve_of(tokens: tuple[int, ...], costs: Callable[[int], tuple[float, ...]], rest: float) -> StepCurve:
        first, *longer = [(context, costs(context)) for context in options.contexts]
        return StepCurve(tokens, first[1], rounded(rest), first[0], tuple(longer))

    propose, commit = (chip.seconds(between(rows, known)) for known in (found.propose, found.commit))
    undrafted = curve_of((rows,), plain_seconds, commit / (block_size + 1))
    return RoundCosts(rows, curve_of(buckets, step_seconds, propose + commit), undrafted, rounded(commit))


def family_of(name: str, pair: Pair, chip: Chip, found: Compiled, options: PredictOptions) -> CurveFamily:
    """The predicted family of one chip."""
    block, num_layers = pair.drafter.block_size, pair.target.config.num_layers
    versions = {"python": platform.python_version(), "jax": jax.__version__, "flax": flax.__version__, "libtpu": _libtpu_version()}
    device = {"platform": "tpu", **dataclasses.asdict(chip), "chips": 1, "versions": versions}
    with warnings.catch_warnings():
        # Weights alone keep a chip busy in small rounds, whose curves are flat then: what is to be shown.
        warnings.simplefilter("ignore", CurveWarning)
        curves = tuple(round_costs(found, chip, options, rows, num_layers, block) for rows in options.rows)
    return CurveFamily(name, "predicted", device, pair.target_name, pair.drafter_name, block, notes_of(found, options, block), curves)


def notes_of(found: Compiled, options: PredictOptions, block_size: int) -> tuple[str, ...]:
    """What a reader of the file has to know."""

    def spread(kind: str, index: int) -> str:
        values = [ratio[index] for ratio in found.ratios[kind]]
        return f"{kind} {min(values):.2f} to {max(values):.2f}"

    kinds = [kind for kind, ratios in found.ratios.items() if ratios]
    return (
        "Predicted, not measured: a roofline from ahead-of-time compilation for one chip, parameters and caches in bfloat16. A program "
        "takes the longer of operations over peak and bytes over bandwidth. Latencies of single kernels are left out: small rounds come "
        "out too fast.",
        f"A round has {options.launch_seconds * 1e6:g} microseconds for its launch in seconds_per_step, which are an assumption.",
        f"Compiled at {', '.join(map(str, options.corners))} requests with 1 and {block_size + 1} tokens each; operations and bytes "
        "are interpolated linearly in between.",
        "One layer, times the number of layers, and the output head; the drafter's loop over positions is written out. "
        f"The grid of attention has {block_size + 1} queries per request, without drafts (undrafted) one; a cache has {SLOTS_AHEAD} slots "
        "more than the context, all of which are read; the drafter's caches are those of the longest context.",
        "Bytes are those of the compiled program's operands and results in main memory, whole tiles counted; the compiler's own `bytes "
        "accessed` also counts on-chip copies. Weights lie in the layouts that the compiler chose; the few rows that are looked up in "
        "embeddings are left out.",
        f"Operations over those of the traced program's matrix products: {', '.join(spread(kind, 0) for kind in kinds)}. "
        f"Bytes over weights, caches read once and activations in and out: {', '.join(spread(kind, 1) for kind in kinds)}; what is beyond "
        "1 are scores and logits that do not fit on the chip.",
        "Caches count as read once and written where they are updated. At some sizes the compiler also copies whole caches into another "
        f"layout and back around its scatters: with these copies the same ratios are {', '.join(spread(kind, 2) for kind in kinds)}.",
        f"draft_seconds: a proposal of {block_size} tokens at temperature 0 and the commit of a round's tokens; commit_seconds: "
        f"{block_size + 1} positions per request; the draft_seconds of undrafted: that over {block_size + 1}.",
    )


def load_pair(options: PredictOptions) -> Pair:
    """The models named on the command line; of a preset's no parameters exist."""
    if options.model == "smollm2":
        target, _ = load_target("smollm2")
        loaded = load_drafter(options.drafter, target.spec)
        num_draft_ids = None if loaded.draft_ids is None else loaded.draft_ids.shape[0]
        return Pair("smollm2", options.drafter.name, target, loaded.drafter, num_draft_ids)
    preset = MODEL_PRESETS[options.model]()
    return Pair(preset.name, f"{preset.name}_dspark", preset.target, preset.dspark())


def run(options: PredictOptions, console: Console) -> list[CurveFamily]:
    """Predict for every chip, write the files, and show what they say."""
    devices = {name: topology_device(CHIPS[name].topology) for name in options.chips}
    pair, families, corners = load_pair(options), [], (options.corners, options.contexts)
    for chip_name, device in devices.items():
        began, chip = time.monotonic(), CHIPS[chip_name]
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        with Progress(*columns, console=console) as progress:
            task = progress.add_task(f"compiling for {chip.topology}", total=num_compilations(*corners, pair.drafter.block_size))
            found = compile_all(Compiler(pair, device), *corners, functools.partial(progress.advance, task))
        name = f"tpu_{chip_name}" if options.model == "smollm2" else f"{options.model}_{chip_name}"
        families.append(family_of(name, pair, chip, found, options))
        path = write_family(options.out, families[-1])
        show(families[-1], f"one chip of {chip.topology}", console)
        console.print(f"{path}: {time.monotonic() - began:.0f} s", style="dim", highlight=False)
    return families


def _libtpu_version() -> str | None:
    try:
        return importlib.metadata.version("libtpu")
    except importlib.metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    # With libtpu installed jax would look for a TPU first.
    jax.config.update("jax_platforms", "cpu")
    sys.exit(run_command(PredictOptions, run))
