"""The scheduler: how many drafts of each request are verified, and whether to draft at all.

Survival a_k is the chance that drafts 1..k are all accepted. It depends on x_1..x_{k-1} and is known before x_k is drawn, so it
may decide whether x_k is verified; a_{k+1} has seen x_k and may not. The parts: what a round costs (`step_curve`), the order in
which drafts are admitted (`prefix_ranking`), rules for one round (`policies`), a capacity from earlier rounds (`capacity`), and
the draft length (`draft_planning`). All names are here.
"""

from dspark_jax.capacity import CapacityState, CapacityTopK, choose_capacity
from dspark_jax.draft_planning import DraftHistory, DraftPlan, DraftPlanner
from dspark_jax.policies import ConfidenceThreshold, FixedLength, ForecastStop, Oracle, PrefixSchedule, SurvivalThreshold
from dspark_jax.prefix_ranking import admit_top_k, best_prefix, select_prefix
from dspark_jax.step_curve import CurveWarning, FlatCurveWarning, NonMonotoneCurveWarning, StepCurve

__all__ = [
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
    "select_prefix",
]
