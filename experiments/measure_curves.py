"""What rounds of 1 to 512 requests cost on this machine: a family of cost curves, measured.

    python -m experiments.measure_curves --name cpu      # 2 quiet cores: about 6 minutes, experiments/results/step_curves/cpu.json

One layer of the target is compiled per number of flat tokens and run with the weights of every layer, then the output head; large
rounds, which arithmetic and not the reading of weights keeps busy, take some of the layers and count for all. Repetitions are
interleaved over all numbers of tokens and both contexts, and costs are medians.
"""

import dataclasses
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from dspark_jax.decode import DecodeParams
from dspark_jax.protocols import Drafter
from dspark_jax.step_curve import CurveWarning, StepCurve
from dspark_jax.typing import Params
from dspark_jax.weights import load_drafter, load_target
from experiments.command_line import run_command
from experiments.profile_steps import RELEASED_DRAFTER, describe_device, device_text
from experiments.step_curves import ROWS, CurveFamily, RoundCosts, buckets_of, rounded, write_family
from experiments.step_timing import SLOTS_AHEAD, batch_tokens, head_pass, interleaved, layer_pass, split_layers, time_commit, time_drafting

FOLDER = Path(__file__).resolve().parent / "results" / "step_curves"
DEFAULT_CONTEXTS = (128, 320)


@dataclasses.dataclass(frozen=True)
class CurveOptions:
    """Command line of the measurement.

    Attributes:
      name: of the family and its file.
      target: name or folder of the target.
      drafter: folder of the drafter.
      out: folder of the file.
      rows: numbers of requests.
      contexts: committed tokens per request at which to measure, ascending.
      repetitions: timed runs of each number of tokens, at most.
      enough_seconds: what was timed twice and for so long is timed no more.
      all_layers_up_to: rounds of more flat tokens than these time `some_layers` of the layers and count for all.
      some_layers: see there.
      cache_gib: memory for the caches of one context; where the layers' own caches need more, layers take turns with fewer.
      note: a remark for the file.
    """

    name: str = "cpu"
    target: str = "smollm2"
    drafter: Path = RELEASED_DRAFTER
    out: Path = FOLDER
    rows: tuple[int, ...] = ROWS
    contexts: tuple[int, ...] = DEFAULT_CONTEXTS
    repetitions: int = 9
    enough_seconds: float = 0.4
    all_layers_up_to: int = 64
    some_layers: int = 4
    cache_gib: float = 2.0
    note: str | None = None

    def __post_init__(self) -> None:
        if not self.rows or list(self.rows) != sorted(set(self.rows)) or self.rows[0] < 1:
            raise ValueError(f"rows is {self.rows}; allowed are positive integers in strictly ascending order")
        if not self.contexts or list(self.contexts) != sorted(set(self.contexts)) or self.contexts[0] < 1:
            raise ValueError(f"contexts is {self.contexts}; allowed are positive integers in strictly ascending order")
        for field in ("repetitions", "some_layers"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed are integers of at least 1")
        if self.all_layers_up_to < 0:
            raise ValueError(f"all_layers_up_to is {self.all_layers_up_to}; allowed are integers of at least 0")
        for field in ("enough_seconds", "cache_gib"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed are positive numbers")


class LayerTimer:
    """Times passes of a target that is a stack of equal layers, from one compiled layer per shape.

    Holds the parameters by layer; caches live for one number of requests only.
    """

    def __init__(self, target: Any, params: Params, options: CurveOptions) -> None:
        self.target, self.options = target, options
        self.one_layer, self.layers = split_layers(target, params)
        self.num_layers = len(self.layers)
        self.head = target.head(params)

    def seconds(self, rows: int, block_size: int, advance: Callable[[], None]) -> dict[tuple[int, int], float]:
        """Seconds of the pass with its head by (context, flat tokens)."""
        options, buckets = self.options, buckets_of(rows, block_size)
        places = [(context, bucket) for context in options.contexts for bucket in buckets]
        tokens = {place: batch_tokens(rows, place[1], block_size, place[0]) for place in places}
        caches = {context: self._caches(rows, context) for context in options.contexts}
        hidden = jnp.ones((buckets[-1], self.target.spec.width), self.head.embedding.dtype)
        inputs = {bucket: hidden[:bucket] for bucket in buckets}

        def run_layers(place: tuple[int, int], state: dict[int, list]) -> dict[int, list]:
            ready, used = tokens[place], list(state[place[0]])
            for index, layer in enumerate(self._chosen(place[1])):
                turn = index % len(used)
                _, used[turn], ready = layer_pass(self.one_layer, layer, used[turn], (), ready)
            return {**state, place[0]: used}

        def run_head(bucket: int, _: None) -> None:
            jax.block_until_ready(head_pass(self.head, inputs[bucket]))

        timing: dict[str, Any] = {"enough_seconds": options.enough_seconds, "advance": advance}
        in_layers = interleaved(run_layers, caches, places, options.repetitions, **timing)
        in_head = interleaved(run_head, None, buckets, options.repetitions, **timing)
        scale = {bucket: self.num_layers / len(self._chosen(bucket)) for bucket in buckets}
        return {place: in_layers[place] * scale[place[1]] + in_head[place[1]] for place in places}

    def runs(self, rows: int, block_size: int) -> int:
        """How often `seconds` calls `advance`."""
        return (self.options.repetitions + 1) * len(buckets_of(rows, block_size)) * (len(self.options.contexts) + 1)

    def _chosen(self, num_tokens: int) -> list[Params]:
        count = self.num_layers if num_tokens <= self.options.all_layers_up_to else min(self.options.some_layers, self.num_layers)
        return [self.layers[index * self.num_layers // count] for index in range(count)]

    def _caches(self, rows: int, context: int) -> list[Any]:
        one = self.one_layer.init_cache(rows, context + SLOTS_AHEAD)
        size = sum(leaf.nbytes for leaf in jax.tree.leaves(one))
        count = max(1, min(self.num_layers, int(self.options.cache_gib * 2**30 / size)))
        return [one, *(self.one_layer.init_cache(rows, context + SLOTS_AHEAD) for _ in range(count - 1))]


def measure_round(timer: LayerTimer, params: DecodeParams, drafter: Drafter, rows: int, advance: Callable[[], None]) -> RoundCosts:
    """Costs of rounds of `rows` requests. Warns as `StepCurve` does."""
    options, block = timer.options, drafter.block_size
    found, plain = timer.seconds(rows, block, advance), timer.seconds(rows, 0, advance)
    buckets = buckets_of(rows, block)

    def curve_of(seconds: Mapping[tuple[int, int], float], buckets: Sequence[int], rest: float) -> StepCurve:
        first, *longer = [(context, tuple(rounded(seconds[context, bucket]) for bucket in buckets)) for context in options.contexts]
        return StepCurve(tuple(buckets), first[1], rounded(rest), first[0], tuple(longer))

    max_len = options.contexts[-1] + SLOTS_AHEAD
    timing: dict[str, Any] = {"max_len": max_len, "rows": rows, "repetitions": options.repetitions}
    models = (drafter, params.drafter, params.draft_head, timer.target.spec.width)
    drafting = time_drafting(*models, **timing, enough_seconds=options.enough_seconds)
    commit = time_commit(*models, **timing, enough_seconds=options.enough_seconds)
    undrafted = curve_of(plain, (rows,), commit / (block + 1))
    return RoundCosts(rows, curve_of(found, buckets, drafting), undrafted, rounded(commit))


def notes_of(options: CurveOptions, block_size: int) -> tuple[str, ...]:
    """What a reader of the file has to know."""
    return (
        *((options.note,) if options.note else ()),
        "Medians of interleaved repetitions after a warm-up; one compiled layer run with every layer's own weights, and the output head.",
        f"Rounds of more than {options.all_layers_up_to} flat tokens time {options.some_layers} layers of the stack, which count for all.",
        f"A round's tokens are spread evenly over its requests; attention works on a grid of 1 + G = {block_size + 1} queries per request, "
        "without drafts (undrafted) of one.",
        "Attention reads every slot of a cache, used or not: a context's costs are those in a cache of just enough slots, "
        f"{', '.join(f'{context + SLOTS_AHEAD} for {context}' for context in options.contexts)} committed tokens per request.",
        f"Layers have caches of their own, float32, up to {options.cache_gib:g} GiB per context; beyond it they take turns with fewer.",
        f"draft_seconds: a proposal of G = {block_size} tokens at temperature 0 and the commit of a round's tokens, "
        f"the drafter's caches having {options.contexts[-1] + SLOTS_AHEAD} slots.",
        f"commit_seconds: {block_size + 1} positions per request; the draft_seconds of undrafted: that over {block_size + 1}, the share of "
        "one token in a later commit of that width.",
        "Not counted: the schedule itself, acceptance and bookkeeping.",
    )


def run(options: CurveOptions, console: Console) -> CurveFamily:
    """Measure, write the file, and show what it says."""
    target, target_params = load_target(options.target)
    loaded = load_drafter(options.drafter, target.spec)
    params = DecodeParams.of(target, target_params, loaded.params, loaded.draft_ids)
    timer, block = LayerTimer(target, target_params, options), loaded.drafter.block_size
    device, notes = describe_device(), notes_of(options, block)
    began, curves = time.monotonic(), []

    def family() -> CurveFamily:
        return CurveFamily(options.name, "measured", device, options.target, options.drafter.name, block, notes, tuple(curves))

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as progress, warnings.catch_warnings():
        # Measured curves have their dents; they are recorded here and judged where one of them is used.
        warnings.simplefilter("ignore", CurveWarning)
        task = progress.add_task("timing rounds", total=sum(timer.runs(rows, block) + timer.runs(rows, 0) for rows in options.rows))
        for rows in options.rows:
            progress.update(task, description=f"timing rounds of {rows} request{'s'[: rows > 1]}")
            curves.append(measure_round(timer, params, loaded.drafter, rows, lambda: progress.advance(task)))
            # After every number of requests, so that a run which is cut short leaves what it has.
            path = write_family(options.out, family())
    show(family(), device_text(), console)
    console.print(f"{path}: {time.monotonic() - began:.0f} s", style="dim", highlight=False)
    return family()


def show(family: CurveFamily, title: str, console: Console) -> None:
    """A table of the family: milliseconds at both ends of every curve."""
    table = Table(
        "requests",
        "plain, ms",
        "nothing verified, ms",
        "everything verified, ms",
        "drafting, ms",
        "commit, ms",
        title=f"{family.name}: {title}",
    )
    for costs in family.curves:
        seconds = (
            costs.undrafted.seconds_per_step[0],
            costs.curve.seconds_per_step[0],
            costs.curve.seconds_per_step[-1],
            costs.curve.draft_seconds,
            costs.commit_seconds,
        )
        table.add_row(str(costs.rows), *(f"{each * 1e3:.3g}" for each in seconds))
    console.print(table)


if __name__ == "__main__":
    sys.exit(run_command(CurveOptions, run))
