"""From confidence logits to calibrated survival, and how good the calibration is.

Survival a_k is the chance that drafts 1..k are all accepted. Raw, it is the running product of sigmoid(c_k); sequential temperature
scaling (the paper's section 3.2.1) divides each logit by a temperature of its position first; a constant per position is the
baseline that any use of the confidence has to beat. What a model was fitted on is what it holds for: a temperature of
the sampler, a drafter, a filter.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.protocols import DraftBlock, SurvivalModel
from dspark_jax.typing import Array, Float, Int, typed

ECE_BINS = 20
AUC_BINS = 1000


@dataclass(frozen=True)
class RawSurvival:
    """The running product of the confidences as they are."""

    @typed
    def survival(self, block: DraftBlock, temperature: Float[Array, "R"]) -> Float[Array, "R G"]:
        """Not calibrated. Raises ValueError for a block without confidence logits."""
        return _running_product(_confidence_logits(block))


@dataclass(frozen=True)
class ConstantSurvival:
    """The same survival in every round: what is left where a drafter has no confidence head.

    Attributes:
      per_position: a_1..a_G, non-increasing, from 0 to 1.
    """

    per_position: tuple[float, ...]

    def __post_init__(self) -> None:
        in_order = (1.0, *self.per_position, 0.0)
        if not self.per_position or any(not later <= earlier for earlier, later in zip(in_order, in_order[1:], strict=False)):
            raise ValueError(f"per_position is {self.per_position}; allowed are numbers from 1 down to 0 that never rise, one per draft")

    @property
    def continuation(self) -> tuple[float, ...]:
        """Per position, the chance that a draft is accepted given that those before it were."""
        before = (1.0, *self.per_position[:-1])
        return tuple(now / previous if previous > 0 else 0.0 for now, previous in zip(self.per_position, before, strict=True))

    @typed
    def survival(self, block: DraftBlock, temperature: Float[Array, "R"]) -> Float[Array, "R G"]:
        """The constants, for every row. Raises ValueError where their number is not G."""
        _require_block_size("per_position", len(self.per_position), block)
        return jnp.broadcast_to(jnp.asarray(self.per_position, jnp.float32), block.ids.shape)


@dataclass(frozen=True)
class TemperatureScaled:
    """The running product of sigmoid(c_k / temperatures[k]).

    Attributes:
      temperatures: positive, one per draft; `fit_sequential_temperatures` finds them. They have nothing to do with the sampler's.
    """

    temperatures: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.temperatures or not all(0 < value < float("inf") for value in self.temperatures):
            raise ValueError(f"temperatures is {self.temperatures}; allowed are finite positive numbers, one per draft")

    @typed
    def survival(self, block: DraftBlock, temperature: Float[Array, "R"]) -> Float[Array, "R G"]:
        """Calibrated survival. Raises ValueError without confidence logits, or where the number of temperatures is not G."""
        _require_block_size("temperatures", len(self.temperatures), block)
        return _running_product(_confidence_logits(block) / jnp.asarray(self.temperatures, jnp.float32))


@dataclass(frozen=True)
class SurvivalByTemperature:
    """A model per temperature of the sampler; every row uses the one fitted at the nearest (the lower one, half-way).

    Attributes:
      at: temperatures of the sampler, ascending.
      models: the model fitted at each.
    """

    at: tuple[float, ...]
    models: tuple[SurvivalModel, ...]

    def __post_init__(self) -> None:
        if not self.at or any(later <= earlier for earlier, later in zip((-1.0, *self.at), self.at, strict=False)) or self.at[0] < 0:
            raise ValueError(f"at is {self.at}; allowed are sampler temperatures of at least 0 in strictly ascending order")
        if len(self.models) != len(self.at):
            raise ValueError(f"models has {len(self.models)} entries; allowed is one per temperature, of which there are {len(self.at)}")

    @typed
    def survival(self, block: DraftBlock, temperature: Float[Array, "R"]) -> Float[Array, "R G"]:
        """Each row by its own temperature."""
        nearest = jnp.argmin(jnp.abs(temperature[:, None] - jnp.asarray(self.at, jnp.float32)), axis=1)
        of_all = jnp.stack([model.survival(block, temperature) for model in self.models], axis=1)
        return jnp.take_along_axis(of_all, nearest[:, None, None], axis=1)[:, 0]


_KINDS = {kind.__name__: kind for kind in (RawSurvival, ConstantSurvival, TemperatureScaled)}


def survival_to_dict(model: SurvivalModel) -> dict[str, Any]:
    """What JSON can hold of a model of this file. Raises ValueError for a model from elsewhere."""
    if isinstance(model, SurvivalByTemperature):
        return {"kind": "SurvivalByTemperature", "at": list(model.at), "models": [survival_to_dict(each) for each in model.models]}
    kind = type(model).__name__
    if _KINDS.get(kind) is not type(model):
        raise ValueError(f"model is of kind {kind}; allowed are {sorted([*_KINDS, 'SurvivalByTemperature'])}")
    return {"kind": kind, **{name: list(value) for name, value in asdict(model).items()}}  # pyright: ignore[reportArgumentType]


def survival_from_dict(stored: Mapping[str, Any]) -> SurvivalModel:
    """The model that `survival_to_dict` stored. Raises ValueError for an unknown kind or field."""
    fields = dict(stored)
    kind = fields.pop("kind", None)
    if kind == "SurvivalByTemperature":
        return SurvivalByTemperature(at=tuple(fields["at"]), models=tuple(survival_from_dict(each) for each in fields["models"]))
    if kind not in _KINDS:
        raise ValueError(f"kind is {kind!r}; allowed are {sorted([*_KINDS, 'SurvivalByTemperature'])}")
    expected = set(_KINDS[kind].__dataclass_fields__)
    if set(fields) != expected:
        raise ValueError(f"{kind} is stored with the fields {sorted(fields)}; allowed are {sorted(expected)}")
    return _KINDS[kind](**{name: tuple(value) for name, value in fields.items()})


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
def ece(predictions: Float[Array, "K"], labels: Int[Array, "K"]) -> Float[Array, ""]:
    """Expected calibration error over 20 equal bins: sum over bins of |sum of predictions - sum of labels|, divided by K."""
    clipped = _clipped(predictions)
    gap = clipped - labels.astype(jnp.float32)
    edges = jnp.arange(ECE_BINS, dtype=jnp.int32)
    in_bin = _bin(clipped, ECE_BINS) == edges[:, None]
    return jnp.sum(jnp.abs(jnp.sum(jnp.where(in_bin, gap, 0.0), axis=1))) / predictions.shape[0]


@typed
def brier(predictions: Float[Array, "K"], labels: Int[Array, "K"]) -> Float[Array, ""]:
    """Mean squared difference of predictions and labels."""
    return jnp.mean((_clipped(predictions) - labels.astype(jnp.float32)) ** 2)


@typed
def auc(predictions: Float[Array, "K"], labels: Int[Array, "K"]) -> Float[Array, ""]:
    """Area under the ROC curve from a histogram of 1,000 bins, ties counting half; NaN where a class is empty."""
    bins = _bin(_clipped(predictions), AUC_BINS)
    positive = jnp.zeros(AUC_BINS, jnp.float32).at[bins].add(labels.astype(jnp.float32))
    negative = jnp.zeros(AUC_BINS, jnp.float32).at[bins].add(1 - labels.astype(jnp.float32))
    num_positive, num_negative = jnp.sum(positive), jnp.sum(negative)
    negative_below = jnp.cumsum(negative) - negative
    return jnp.sum(positive / num_positive * (negative_below + 0.5 * negative)) / num_negative


def _clipped(predictions: Array) -> Array:
    # The upper end is the float32 next below 1: with 1 - 1e-8 it would be 1, and fall into a bin that is none.
    return jnp.clip(predictions, 1e-8, 1 - 2.0**-24)


def _bin(predictions: Array, num_bins: int) -> Array:
    return jnp.minimum(jnp.floor(predictions * num_bins).astype(jnp.int32), num_bins - 1)


def _running_product(logits: Float[Array, "R G"]) -> Float[Array, "R G"]:
    return jnp.cumprod(jnp.nan_to_num(jax.nn.sigmoid(logits.astype(jnp.float32)), nan=0.0), axis=1)


def _confidence_logits(block: DraftBlock) -> Float[Array, "R G"]:
    if block.confidence_logits is None:
        raise ValueError("confidence_logits is None: this drafter has no confidence head; allowed is ConstantSurvival")
    return block.confidence_logits


def _require_block_size(field: str, count: int, block: DraftBlock) -> None:
    if count != block.ids.shape[1]:
        raise ValueError(f"{field} has {count} entries; allowed is one per draft, of which there are {block.ids.shape[1]}")
