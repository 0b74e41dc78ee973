"""What the schedule costs: every policy's compiled decision beside the target's pass that it decides on, at a large batch.

    python -m experiments.schedule_cost                # about 2 minutes on 2 cores, experiments/results/schedule_cost.json

The policies decide by a recorded family of cost curves (`experiments.measure_curves`) on survival that is drawn around what the
released drafter's drafts usually do. Decisions and the target's passes on the buckets that they ask for are timed here, in turns:
medians over repetitions, each of which times everything once. The pass runs one compiled layer with the weights of every layer, and
the output head. The rest of a round (drafting, verifying, committing) is left out, which makes every share larger than it is.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dspark_jax.model_files import read_json
from dspark_jax.protocols import StatefulPolicy, VerifyPolicy
from dspark_jax.schedule import (
    CapacityTopK,
    ConfidenceThreshold,
    DraftPlanner,
    FixedLength,
    ForecastStop,
    PrefixSchedule,
    SurvivalThreshold,
)
from dspark_jax.typing import Array, Params
from dspark_jax.weights import load_target
from experiments.command_line import run_command
from experiments.profile_steps import RELEASED_DRAFTER, describe_device, device_text
from experiments.result_files import write_json
from experiments.step_curves import RoundCosts, load_curves
from experiments.step_timing import SLOTS_AHEAD, batch_tokens, head_pass, interleaved, layer_pass, split_layers
from pallas_kernels.noise import seed_key

GOAL = 0.01
RESULTS = Path(__file__).resolve().parent / "results"
RUN_LENGTH = 20
"""A decision takes so little that one repetition times so many of them."""
PLANNER, BOTH = "draft planner", "planner and capacity + top-K"


@dataclasses.dataclass(frozen=True)
class CostOptions:
    """Command line.

    Attributes:
      drafter: folder whose `survival.json` says how often drafts are accepted.
      curves: family of cost curves that the policies decide by, with one for `rows` requests.
      out: JSON file to write.
      rows: requests in the batch.
      context: committed tokens per request.
      temperature: whose acceptances are taken from `survival.json`.
      repetitions: timed runs of every pass and every decision.
    """

    target: str = "smollm2"
    drafter: Path = RELEASED_DRAFTER
    curves: Path = RESULTS / "step_curves" / "cpu.json"
    out: Path = RESULTS / "schedule_cost.json"
    rows: int = 256
    context: int = 128
    temperature: float = 1.0
    repetitions: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("rows", "context", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least 1")


@dataclasses.dataclass(frozen=True)
class Decision:
    """A part of the schedule that runs once a round.

    Attributes:
      run: the compiled program, with its arguments.
      verified: drafts that it admits in all; 0 for the planner, which is thus compared with the cheapest pass.
    """

    run: Callable[[], Any]
    verified: int


def drawn_survival(continuation: Sequence[float], num_rows: int, seed: int) -> Array:
    """Survival [R, G] of requests of which some are easier than others: chances scatter around the usual ones, on the logit scale."""
    rng = np.random.default_rng(seed)
    usual = np.log(np.asarray(continuation)) - np.log1p(-np.asarray(continuation))
    scattered = usual + rng.normal(size=(num_rows, 1)) + rng.normal(size=(num_rows, len(continuation)))
    return jnp.asarray(np.cumprod(1 / (1 + np.exp(-scattered)), axis=1), jnp.float32)


def policies_by(costs: RoundCosts, continuation: Sequence[float]) -> dict[str, VerifyPolicy | StatefulPolicy]:
    """All policies that can be deployed."""
    constants = tuple(np.cumprod(continuation).tolist())
    return {
        "fixed length": FixedLength(len(constants) // 2),
        "confidence threshold": ConfidenceThreshold(0.5),
        "survival threshold": SurvivalThreshold(0.5),
        "Algorithm 1": PrefixSchedule(costs.curve),
        "forecast stop": ForecastStop(costs.curve, tuple(continuation)),
        "capacity + top-K": CapacityTopK(costs.curve, constants),
    }


def decisions(costs: RoundCosts, continuation: Sequence[float], survival: Array, context: int, seed: int = 0) -> dict[str, Decision]:
    """Every policy, the draft planner, and all that a large batch runs in a round, each behind two rounds of the same survival."""
    num_rows, block_size = survival.shape
    # A program's arguments and not its constants: a compiler must not work the decision out beforehand.
    asked = (jnp.ones((num_rows,), bool), jnp.full((num_rows,), context, jnp.int32), jnp.arange(num_rows, dtype=jnp.int32))
    planner = DraftPlanner(costs.curve, tuple(np.cumprod(continuation).tolist()), undrafted=costs.undrafted)

    def plan(history: Any, survival: Array, key: Array, active: Array, context: Array, request_id: Array) -> tuple[Any, Any]:
        shown = jnp.int32(block_size)
        return planner.plan(history, active, context, request_id, key), planner.observe(history, survival, shown, active, request_id)

    found: dict[str, Decision] = {}
    planning, key, history = jax.jit(plan), seed_key(seed), planner.init_history(num_rows)
    for _ in range(2):
        history = planning(history, survival, key, *asked)[1]
    found[PLANNER] = Decision(functools.partial(planning, history, survival, key, *asked), 0)
    for name, policy in policies_by(costs, continuation).items():
        if not isinstance(policy, StatefulPolicy):
            run = functools.partial(jax.jit(policy.lengths), survival, *asked)
            found[name] = Decision(run, int(run().sum()))
            continue

        def both(history: Any, state: Any, survival: Array, key: Array, *asked: Array, policy: StatefulPolicy = policy) -> tuple:
            return plan(history, survival, key, *asked), policy.next_lengths(state, survival, *asked)

        next_lengths, state = jax.jit(policy.next_lengths), policy.init_state(num_rows, block_size)
        for _ in range(2):
            state = next_lengths(state, survival, *asked)[1]
        run = functools.partial(next_lengths, state, survival, *asked)
        found[name] = Decision(run, int(run()[0].sum()))
        found[BOTH] = Decision(functools.partial(jax.jit(both), history, state, survival, key, *asked), found[name].verified)
    return found


def time_in_turns(
    target: Any,
    params: Params,
    found: Mapping[str, Decision],
    buckets: Sequence[int],
    block_size: int,
    options: CostOptions,
    progress: Progress,
) -> tuple[dict[str, float], dict[int, float]]:
    """Seconds of every decision, and of the target's pass on every bucket.

    Raises:
      ValueError: the target is no stack of equal layers.
    """
    one_layer, layers = split_layers(target, params)
    head = target.head(params)
    tokens = {bucket: batch_tokens(options.rows, bucket, block_size, options.context) for bucket in buckets}

    def run(what: int | str, cache: Any) -> Any:
        if isinstance(what, str):
            for _ in range(RUN_LENGTH):
                jax.block_until_ready(found[what].run())
            return cache
        hidden, ready = None, tokens[what]
        for layer in layers:
            hidden, cache, ready = layer_pass(one_layer, layer, cache, (), ready)
        jax.block_until_ready(head_pass(head, hidden))
        return cache

    places: list[int | str] = [*buckets, *found]
    task = progress.add_task("decisions and passes", total=(options.repetitions + 1) * len(places))
    # All layers share one cache: it is so large that a processor's own cache keeps nothing of it from layer to layer.
    cache = one_layer.init_cache(options.rows, options.context + SLOTS_AHEAD)
    seconds = interleaved(run, cache, places, options.repetitions, advance=lambda: progress.advance(task))
    return {name: seconds[name] / RUN_LENGTH for name in found}, {bucket: seconds[bucket] for bucket in buckets}


def measure(options: CostOptions, console: Console) -> dict[str, Any]:
    """Measure, show a table, and write the JSON file.

    Raises:
      ValueError: files that are missing or lack what is asked of them, or a target that can't be timed by layer.
    """
    stored = {float(at): chances for at, chances in read_json(options.drafter, "survival.json").get("continuation", {}).items()}
    if options.temperature not in stored:
        raise ValueError(f"temperature is {options.temperature:g}; survival.json has {', '.join(f'{at:g}' for at in stored) or 'none'}")
    curves = load_curves(options.curves)
    if options.rows not in curves:
        raise ValueError(f"rows is {options.rows}; {options.curves.name} has curves of {', '.join(map(str, curves))} requests")
    costs, continuation = curves[options.rows], stored[options.temperature]
    found = decisions(costs, continuation, drawn_survival(continuation, options.rows, options.seed), options.context, options.seed)
    bucket_of = {name: costs.curve.bucket(options.rows + each.verified, options.context) for name, each in found.items()}
    buckets = sorted({bucket for bucket in bucket_of.values() if bucket is not None})
    target, params = load_target(options.target)
    with Progress(console=console) as progress:
        seconds, pass_seconds = time_in_turns(target, params, found, buckets, len(continuation), options, progress)
    rows = []
    for name, each in found.items():
        bucket = bucket_of[name]
        assert bucket is not None, "a family has a bucket for everything"
        share = seconds[name] / (seconds[name] + pass_seconds[bucket])
        rows.append({"schedule": name, "seconds": seconds[name], "verified": each.verified, "tokens": bucket, "share": share})
    content = {
        "device": describe_device(),
        "target": options.target,
        "rows": options.rows,
        "block_size": len(continuation),
        "context": options.context,
        "repetitions": options.repetitions,
        "pass_seconds": pass_seconds,
        "goal": GOAL,
        "schedules": rows,
    }
    table = Table("schedule", "ms", "drafts verified", "flat tokens", "target's pass, ms", "share", title=device_text())
    for row in rows:
        colour = "green" if row["share"] < GOAL else "bold red"
        figures = (str(row["verified"]), str(row["tokens"]), f"{pass_seconds[row['tokens']] * 1e3:.0f}")
        table.add_row(row["schedule"], f"{row['seconds'] * 1e3:.2f}", *figures, f"[{colour}]{row['share']:.3%}")
    console.print(table)
    write_json(options.out, content)
    return content


if __name__ == "__main__":
    sys.exit(run_command(CostOptions, measure))
