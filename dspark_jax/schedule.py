"""The scheduler: how many drafts of each request are verified, and whether to draft at all.

Survival a_k is the chance that drafts 1..k are all accepted. It depends on x_1..x_{k-1} and is known before x_k is drawn, so it
may decide whether x_k is verified; a_{k+1} has seen x_k and may not. The parts: what a round costs (`step_curve`), the order in
which drafts are admitted (`prefix_ranking`), rules for one round (`policies`), a capacity from earlier rounds (`capacity`), and
the draft length (`draft_planning`). All names are here.
"""

import itertools
import operator

from dspark_jax.capacity import CapacityState, CapacityTopK, choose_capacity
from dspark_jax.draft_planning import DraftHistory, DraftPlan, DraftPlanner
from dspark_jax.policies import ConfidenceThreshold, FixedLength, ForecastStop, Oracle, PrefixSchedule, SurvivalThreshold
from dspark_jax.prefix_ranking import admit_top_k, best_prefix, select_prefix
from dspark_jax.step_curve import CurveWarning, FlatCurveWarning, NonMonotoneCurveWarning, StepCurve

LARGE_BATCH = 64
"""Requests from which on the capacity of a round is settled before its drafts are."""

__all__ = [
    "LARGE_BATCH",
    "CapacityState",
    "CapacityTopK",
    "ConfidenceThreshold",
    "CurveWarning",
    "DraftHistory",
    "DraftPlan",
    "DraftPlanner",
    "FixedLength",
    "FlatCurveWarning",
    "ForecastStop",
    "NonMonotoneCurveWarning",
    "Oracle",
    "PrefixSchedule",
    "StepCurve",
    "SurvivalThreshold",
    "admit_top_k",
    "best_prefix",
    "choose_capacity",
    "default_schedule",
    "select_prefix",
]


def default_schedule(
    curve: StepCurve, continuation: tuple[float, ...], num_rows: int, undrafted: StepCurve | None = None
) -> tuple[ForecastStop | CapacityTopK, DraftPlanner]:
    """The policy and the planner to use where nothing speaks for others: fields `policy` and `planner` of a `DecodePlan`.

    Forecast stop for small batches. From `LARGE_BATCH` requests on capacity and top-K, which come to the same in throughput
    (`experiments/results/scheduling.md`), and whose bucket is known before the round is drafted.

    Args:
      curve: cost of a round of so many requests; give the plan its `ladder` too.
      continuation: per position, the chance that a draft is accepted given that those before it were, at the temperature of the
        requests: `survival["continuation"]` of a `LoadedDrafter`.
      undrafted: cost of a round in which nothing is drafted, as `DraftPlanner` has it.

    Raises:
      ValueError: `num_rows` below 1, or a value that policy or planner refuse.
    """
    if num_rows < 1:
        raise ValueError(f"num_rows is {num_rows}; allowed are integers of at least 1")
    if not continuation or not all(0 <= chance <= 1 for chance in continuation):
        raise ValueError(f"continuation is {continuation}; allowed is one number from 0 to 1 per draft")
    if curve.tokens[-1] < num_rows:
        raise ValueError(f"curve has no bucket for num_rows {num_rows}; its largest is {curve.tokens[-1]}")
    constants = tuple(itertools.accumulate(continuation, operator.mul))
    planner = DraftPlanner(curve, constants, undrafted=undrafted)
    return (CapacityTopK(curve, constants) if num_rows >= LARGE_BATCH else ForecastStop(curve, continuation)), planner
