"""Engines that differ in one thing: how many drafts they verify. What the load experiments compare."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams
from dspark_jax.engine import Engine, EngineConfig
from dspark_jax.round_plans import FirstPositions
from dspark_jax.schedule import FixedLength
from dspark_jax.tokenizers import Tokenizer, load_tokenizer
from dspark_jax.weights import LoadedDrafter, load_drafter, load_target
from experiments.demo_setup import continuation_of
from experiments.short_blocks import best_block_sizes, with_block_size
from experiments.step_curves import RoundCosts, load_curves

PLAIN, SCHEDULER = "plain", "scheduler"
FIXED = {"fixed_1": 1, "fixed_4": 4, "fixed_7": 7}
"""Verified drafts of every request and round. The drafter drafts that many and no more, so that one draft costs what one draft costs.

The scheduler chooses how long blocks are by the number of requests, whether to draft at all round by round, and how many drafts are
verified by their confidence."""

POLICIES = (PLAIN, *FIXED, SCHEDULER)
BASELINE = "fixed_1"
"""One draft a round, as multi-token prediction of one token has it."""


@dataclasses.dataclass(frozen=True)
class Models:
    """What is served."""

    target: Any
    target_params: Any
    loaded: LoadedDrafter
    tokenizer: Tokenizer
    costs: Mapping[int, RoundCosts]


def load_models(target: str, drafter: str, curves: Path) -> Models:
    """Target, drafter, tokenizer, and the cost curves that the scheduler goes by. Errors as of the readers."""
    model, params = load_target(target)
    return Models(model, params, load_drafter(drafter, model.spec), load_tokenizer(target), load_curves(curves))


def serving_engine(policy: str, models: Models, config: EngineConfig, temperature: float, console: Console | None = None) -> Engine:
    """The engine of a policy of `POLICIES`.

    Raises:
      ValueError: an unknown policy, or rows that the curves have none for.
    """
    loaded, drafter = models.loaded, models.loaded.drafter
    common: dict[str, Any] = {"config": config, "tokenizer": models.tokenizer, "console": console}
    params = DecodeParams.of(models.target, models.target_params, loaded.params, loaded.draft_ids)
    missing = [rows for rows in config.row_ladder if rows not in models.costs]
    if missing:
        raise ValueError(f"row_ladder has {missing[0]}; the cost curves have {', '.join(map(str, models.costs))}")
    undrafted = {rows: models.costs[rows].undrafted for rows in config.row_ladder}
    if policy == PLAIN:
        return Engine(models.target, None, params, curve=undrafted, undrafted=undrafted, **common)
    if policy in FIXED:
        count = min(FIXED[policy], drafter.block_size)
        short = _shorter(drafter, count)
        fixed: dict[str, Any] = {"policy": FixedLength(count), "survival": RawSurvival()}
        return Engine(models.target, short, params, ladder=lambda rows: (rows, rows * (count + 1)), **fixed, **common)
    if policy != SCHEDULER:
        raise ValueError(f"policy is {policy!r}; allowed: {', '.join(POLICIES)}")
    continuation = continuation_of(loaded, [temperature])
    sizes = best_block_sizes(models.costs, continuation)
    costs = {rows: with_block_size(models.costs, sizes[rows], drafter.block_size, in_between=True)[rows] for rows in config.row_ladder}
    return Engine(
        models.target,
        {rows: _shorter(drafter, sizes[rows]) for rows in config.row_ladder},
        params,
        curve={rows: each.curve for rows, each in costs.items()},
        undrafted={rows: each.undrafted for rows, each in costs.items()},
        survival=FirstPositions(loaded.survival_model(), drafter.block_size),
        continuation=continuation,
        **common,
    )


def _shorter(drafter: Any, block_size: int) -> Any:
    """The drafter with blocks of another length: its parameters are the same, and its proposals cost less."""
    return dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, block_size=block_size))
