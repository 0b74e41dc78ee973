"""Fitting survival models to recorded rounds in which every draft was judged."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from scipy.optimize import isotonic_regression

from dspark_jax.calibrate import ConstantSurvival, IsotonicSurvival, RawSurvival, TemperatureScaled, prefix_confidence
from dspark_jax.calibration_metrics import ece
from dspark_jax.protocols import SurvivalModel
from dspark_jax.typing import Array, Float, Int, typed

GRID = tuple(round(0.1 + 0.05 * step, 2) for step in range(99))
"""Candidate temperatures of the confidence: 0.1 to 5."""

MAX_KNOTS = 64
"""Groups of rounds, of about equal size, between which isotonic regression may rise."""


@jax.jit
@typed
def fit_sequential_temperatures(
    confidence_logits: Float[Array, "K G"], prefix_labels: Int[Array, "K G"], grid: Float[Array, "X"]
) -> tuple[Float[Array, "G"], Float[Array, "G X"]]:
    """Sequential temperature scaling: one temperature per position, left to right, earlier ones fixed.

    Position k takes the first temperature of `grid` that minimises the ECE of the running product against the prefix labels.

    Args:
      confidence_logits: c_k of K rounds.
      prefix_labels: 1 where drafts 1..k were all accepted; every round has a label at every position.
      grid: candidate temperatures, positive.

    Returns:
      the temperatures, and the ECE of every candidate at every position.
    """

    def fit(before: Float[Array, "K"], column: tuple[Float[Array, "K"], Int[Array, "K"]]) -> tuple[Float[Array, "K"], tuple[Array, Array]]:
        logits, labels = column
        errors = lax.map(lambda candidate: ece(before * jax.nn.sigmoid(logits / candidate), labels), grid)
        best = grid[jnp.argmin(errors)]
        return before * jax.nn.sigmoid(logits / best), (best, errors)

    start = jnp.ones(confidence_logits.shape[:1], jnp.float32)
    _, (temperatures, table) = lax.scan(fit, start, (confidence_logits.T, prefix_labels.T))
    return temperatures, table


@typed
def fit_constant(prefix_labels: Int[Array, "K G"]) -> ConstantSurvival:
    """The share of rounds that accepted drafts 1..k; it never rises, because labels of a prefix do not."""
    shares = np.asarray(prefix_labels).mean(axis=0, dtype=np.float64)
    return ConstantSurvival(tuple(float(share) for share in np.minimum.accumulate(shares)))


@typed
def fit_isotonic(confidence_logits: Float[Array, "K G"], prefix_labels: Int[Array, "K G"], max_knots: int = MAX_KNOTS) -> IsotonicSurvival:
    """Isotonic regression of the prefix label on the raw survival, at each position alone.

    Rounds are first put into at most `max_knots` groups of neighbours in raw survival, so that the model stays small enough to be
    stored. The regression is scipy's (pool adjacent violators), on the host.

    Raises:
      ValueError: `max_knots` is less than 1, or there are no rounds.
    """
    if max_knots < 1:
        raise ValueError(f"max_knots is {max_knots}; allowed are integers of at least 1")
    if not confidence_logits.shape[0]:
        raise ValueError("confidence_logits has 0 rounds; allowed is at least 1")
    scores, labels = np.asarray(prefix_confidence(confidence_logits), np.float64), np.asarray(prefix_labels, np.float64)
    columns = [_isotonic_column(scores[:, k], labels[:, k], max_knots) for k in range(scores.shape[1])]
    return IsotonicSurvival(tuple(knots for knots, _ in columns), tuple(values for _, values in columns))


def _isotonic_column(scores: np.ndarray, labels: np.ndarray, max_knots: int) -> tuple[tuple[float, ...], tuple[float, ...]]:
    borders = np.quantile(scores, np.arange(1, max_knots) / max_knots)
    group = np.searchsorted(np.unique(borders), scores, side="right")
    rounds = np.bincount(group).astype(np.float64)
    held = rounds > 0
    # float32 first: of two different groups, the means are different float32 numbers, since the scores were.
    knots = (np.bincount(group, scores)[held] / rounds[held]).astype(np.float32)
    values = np.clip(isotonic_regression(np.bincount(group, labels)[held] / rounds[held], weights=rounds[held]).x, 0.0, 1.0)
    # Between two neighbours of its own value, a knot adds nothing.
    inside = np.zeros(len(values), bool)
    inside[1:-1] = (values[1:-1] == values[:-2]) & (values[1:-1] == values[2:])
    return tuple(knots[~inside].tolist()), tuple(np.round(values[~inside], 6).tolist())


def fit_calibrators(confidence_logits: Float[Array, "K G"], prefix_labels: Int[Array, "K G"]) -> dict[str, SurvivalModel]:
    """All models there are, fitted on the same rounds: raw, constant, temperature_scaled and isotonic."""
    temperatures, _ = fit_sequential_temperatures(confidence_logits, prefix_labels, jnp.asarray(GRID, jnp.float32))
    return {
        "raw": RawSurvival(),
        "constant": fit_constant(prefix_labels),
        "temperature_scaled": TemperatureScaled(tuple(round(float(value), 2) for value in temperatures)),
        "isotonic": fit_isotonic(confidence_logits, prefix_labels),
    }
