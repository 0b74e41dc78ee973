"""Which survival model to keep: all of them side by side on rounds that none was fitted on, and the best by Brier score."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax.numpy as jnp
import numpy as np

from dspark_jax.calibration_metrics import METRICS, Reliability, bootstrap, reliability, score
from dspark_jax.protocols import DraftBlock, SurvivalModel
from dspark_jax.typing import Array, Float, Int

CONSTANT = "constant"
"""Name of the baseline that any use of the confidence has to beat."""

COVERAGE = 0.95


@dataclass(frozen=True, eq=False)
class Interval:
    """A figure per position with the ends of its bootstrap interval (of 95 %); NaN where the figure is not defined."""

    value: np.ndarray
    low: np.ndarray
    high: np.ndarray

    def as_dict(self) -> dict[str, list[float | None]]:
        """Lists for JSON, which has no NaN: None stands for it."""
        return {name: _numbers(getattr(self, name)) for name in ("value", "low", "high")}


@dataclass(frozen=True, eq=False)
class ModelScores:
    """How one model did.

    Attributes:
      metrics: ece, brier and auc per position.
      mean_brier: over positions; one entry each.
      brier_over_constant: its mean Brier score minus the constant's on the same resamplings: above 0 it is worse than a constant.
      reliability: its diagram.
    """

    metrics: Mapping[str, Interval]
    mean_brier: Interval
    brier_over_constant: Interval
    reliability: Reliability


@dataclass(frozen=True, eq=False)
class CalibratorChoice:
    """The model of the lowest mean Brier score on held-out rounds, and what all of them scored [F5].

    Attributes:
      worse_than_constant: the models whose mean Brier score is above the constant's.
    """

    name: str
    model: SurvivalModel
    rounds: int
    scores: Mapping[str, ModelScores]
    worse_than_constant: tuple[str, ...]

    def report(self) -> dict[str, Any]:
        """Everything but the model, as JSON values."""
        models = {
            name: {
                **{metric: interval.as_dict() for metric, interval in of.metrics.items()},
                "mean_brier": of.mean_brier.as_dict(),
                "brier_over_constant": of.brier_over_constant.as_dict(),
                "reliability": {
                    field: [_numbers(row) for row in np.asarray(getattr(of.reliability, field))]
                    for field in ("rounds", "predicted", "observed")
                },
            }
            for name, of in self.scores.items()
        }
        return {"chosen": self.name, "rounds": self.rounds, "worse_than_constant": list(self.worse_than_constant), "models": models}


def choose_calibrator(
    models: Mapping[str, SurvivalModel],
    confidence_logits: Float[Array, "K G"],
    prefix_labels: Int[Array, "K G"],
    temperature: float,
    text: Int[Array, "K"] | None = None,
    draws: int = 200,
    seed: int = 0,
) -> CalibratorChoice:
    """Score `models` on rounds that none of them was fitted on, and take the one of the lowest Brier score, averaged over positions.

    The constant takes part: where it wins, the confidence is worth nothing and is better left alone.

    Args:
      models: by name; "constant" must be among them (`calibration_fit.fit_calibrators` gives them all).
      temperature: of the sampler, at which the rounds were recorded.
      text: of every round, any integer; rounds of a text are resampled together. Where None, each round stands alone.

    Raises:
      ValueError: no "constant", no rounds, or fewer than 2 draws.
    """
    if CONSTANT not in models:
        raise ValueError(f"models has {sorted(models)}; {CONSTANT!r} must be among them, or nothing says what the confidence is worth")
    num_rounds = confidence_logits.shape[0]
    if not num_rounds:
        raise ValueError("confidence_logits has 0 rounds; allowed is at least 1")
    if draws < 2:
        raise ValueError(f"draws is {draws}; allowed are integers of at least 2")
    zeros = jnp.zeros(confidence_logits.shape, jnp.float32)
    block = DraftBlock(zeros.astype(jnp.int32), zeros, zeros, zeros, confidence_logits, None)
    at = jnp.full((num_rounds,), temperature, jnp.float32)
    predictions = jnp.stack([model.survival(block, at) for model in models.values()])
    group = np.arange(num_rounds) if text is None else np.unique(np.asarray(text), return_inverse=True)[1]
    of_data = np.asarray(score(predictions, prefix_labels))
    of_draws = np.asarray(
        bootstrap(predictions, prefix_labels, jnp.asarray(group, jnp.int32), num_groups=int(group.max()) + 1, draws=draws, seed=seed)
    )
    place = {metric: row for row, metric in enumerate(METRICS)}
    mean_brier, drawn_brier = of_data[place["brier"]].mean(axis=1), of_draws[place["brier"]].mean(axis=1)
    base = list(models).index(CONSTANT)
    scores = {
        name: ModelScores(
            metrics={metric: _interval(of_data[row, m], of_draws[row, m]) for metric, row in place.items()},
            mean_brier=_interval(mean_brier[m, None], drawn_brier[m, None]),
            brier_over_constant=_interval((mean_brier[m] - mean_brier[base])[None], (drawn_brier[m] - drawn_brier[base])[None]),
            reliability=reliability(predictions[m], prefix_labels),
        )
        for m, name in enumerate(models)
    }
    chosen = list(models)[int(np.argmin(mean_brier))]
    worse = tuple(name for m, name in enumerate(models) if mean_brier[m] > mean_brier[base])
    return CalibratorChoice(chosen, models[chosen], num_rounds, scores, worse)


def _interval(value: np.ndarray, drawn: np.ndarray) -> Interval:
    # A resampling without a class has no AUC: it is left out, and a figure that is never defined stays NaN.
    defined = np.isfinite(drawn).any(axis=1)
    ends = np.full((2, *value.shape), np.nan)
    ends[:, defined] = np.nanquantile(drawn[defined], [(1 - COVERAGE) / 2, (1 + COVERAGE) / 2], axis=1)
    return Interval(value.astype(np.float64), *ends)


def _numbers(values: np.ndarray) -> list[float | None]:
    return [number if np.isfinite(number) else None for number in values.tolist()]
