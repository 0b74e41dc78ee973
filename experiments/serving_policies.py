"""Engines that differ in one thing: how many drafts they verify. What the load experiments compare."""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams
from dspark_jax.engine import Engine, EngineConfig
from dspark_jax.schedule import FixedLength
from dspark_jax.tokenizers import Tokenizer, load_tokenizer
from dspark_jax.weights import LoadedDrafter, load_drafter, load_target
from experiments.demo_setup import continuation_of
from experiments.step_curves import RoundCosts, load_curves

PLAIN, SCHEDULER = "plain", "scheduler"
FIXED = {"fixed_1": 1, "fixed_4": 4, "fixed_7": 7}
"""Verified drafts of every request and round. The drafter drafts that many and no more, so that one draft costs what one draft costs."""

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
        short = dataclasses.replace(drafter, config=dataclasses.replace(drafter.config, block_size=count))
        fixed: dict[str, Any] = {"policy": FixedLength(count), "survival": RawSurvival()}
        return Engine(models.target, short, params, ladder=lambda rows: (rows, rows * (count + 1)), **fixed, **common)
    if policy != SCHEDULER:
        raise ValueError(f"policy is {policy!r}; allowed: {', '.join(POLICIES)}")
    return Engine(
        models.target,
        drafter,
        params,
        curve={rows: models.costs[rows].curve for rows in config.row_ladder},
        undrafted=undrafted,
        survival=loaded.survival_model(),
        continuation=continuation_of(loaded, [temperature]),
        **common,
    )
