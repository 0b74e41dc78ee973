"""From confidence logits to calibrated survival: the models, and how they are stored.

Survival a_k is the chance that drafts 1..k are all accepted. Raw, it is the running product of sigmoid(c_k); sequential temperature
scaling (the paper's section 3.2.1) divides each logit by a temperature of its position first; isotonic regression maps the raw survival
of each position by a rising function; a constant per position is the baseline that any use of the confidence has to beat.
No survival rises over positions: ranking would take draft k+1 before draft k, and the decision on k would look ahead.
What a model was fitted on is what it holds for (`calibration_identity`); fitting and choosing are in `calibration_fit` and
`calibration_choice`, learning while serving in `calibration_online`.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from dspark_jax.calibration_identity import CalibratorIdentity
from dspark_jax.prefix_ranking import require_survival
from dspark_jax.protocols import DraftBlock, SurvivalModel
from dspark_jax.typing import Array, Float, typed

FITTED_FOR = "fitted_for"
"""Where a stored model holds its identity."""


@dataclass(frozen=True)
class RawSurvival:
    """The running product of the confidences as they are."""

    @typed
    def survival(self, block: DraftBlock, temperature: Float[Array, "R"]) -> Float[Array, "R G"]:
        """Not calibrated. Raises ValueError for a block without confidence logits."""
        return prefix_confidence(_confidence_logits(block))


@dataclass(frozen=True)
class ConstantSurvival:
    """The same survival in every round: what is left where a drafter has no confidence head.

    Attributes:
      per_position: a_1..a_G, non-increasing, from 0 to 1.
    """

    per_position: tuple[float, ...]

    def __post_init__(self) -> None:
        require_survival("per_position", self.per_position)

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
        return prefix_confidence(_confidence_logits(block) / jnp.asarray(self.temperatures, jnp.float32))


@dataclass(frozen=True)
class IsotonicSurvival:
    """A function per position that never falls, of the raw survival: straight lines between knots, level outside of them.

    The positions are fitted apart; where one would lie above the one before, the lower value holds (a cumulative minimum).

    Attributes:
      knots: raw survival, strictly ascending; one tuple per draft.
      values: survival at the knots, never falling, from 0 to 1; `calibration_fit.fit_isotonic` finds both.
    """

    knots: tuple[tuple[float, ...], ...]
    values: tuple[tuple[float, ...], ...]

    def __post_init__(self) -> None:
        sizes, num_values = [len(each) for each in self.knots], [len(each) for each in self.values]
        if not sizes or 0 in sizes or sizes != num_values:
            raise ValueError(f"values has {num_values} entries; allowed are as many as knots, of which there are {sizes}, one or more each")
        if any(not later > earlier for each in self.knots for earlier, later in zip(each, each[1:], strict=False)):
            raise ValueError(f"knots is {self.knots}; allowed are numbers in strictly ascending order")
        if any(not later >= earlier for each in self.values for earlier, later in zip((0.0, *each), (*each, 1.0), strict=True)):
            raise ValueError(f"values is {self.values}; allowed are numbers from 0 up to 1 that never fall")

    @typed
    def survival(self, block: DraftBlock, temperature: Float[Array, "R"]) -> Float[Array, "R G"]:
        """Calibrated survival; 0 from a NaN on. Raises ValueError without confidence logits, or where the number of functions is not G."""
        _require_block_size("knots", len(self.knots), block)
        logits = _confidence_logits(block)
        raw = prefix_confidence(logits)
        columns = [
            jnp.interp(raw[:, k], jnp.asarray(knots, jnp.float32), jnp.asarray(values, jnp.float32))
            for k, (knots, values) in enumerate(zip(self.knots, self.values, strict=True))
        ]
        return lax.cummin(jnp.where(jnp.isnan(logits), 0.0, jnp.stack(columns, axis=1)), axis=1)


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


_KINDS = {kind.__name__: kind for kind in (RawSurvival, ConstantSurvival, TemperatureScaled, IsotonicSurvival)}


def survival_to_dict(model: SurvivalModel, fitted_for: CalibratorIdentity | None = None) -> dict[str, Any]:
    """What JSON can hold of a model of this file, and what it was fitted for. Raises ValueError for a model from elsewhere."""
    identity = {} if fitted_for is None else {FITTED_FOR: fitted_for.as_dict()}
    if isinstance(model, SurvivalByTemperature):
        models = [survival_to_dict(each) for each in model.models]
        return {"kind": "SurvivalByTemperature", "at": list(model.at), "models": models, **identity}
    kind = type(model).__name__
    if _KINDS.get(kind) is not type(model):
        raise ValueError(f"model is of kind {kind}; allowed are {sorted([*_KINDS, 'SurvivalByTemperature'])}")
    return {"kind": kind, **{name: _lists(value) for name, value in asdict(model).items()}, **identity}  # pyright: ignore[reportArgumentType]


def survival_from_dict(stored: Mapping[str, Any]) -> SurvivalModel:
    """The model that `survival_to_dict` stored. Raises ValueError for an unknown kind or field."""
    fields = {name: value for name, value in stored.items() if name != FITTED_FOR}
    kind = fields.pop("kind", None)
    if kind == "SurvivalByTemperature":
        return SurvivalByTemperature(at=tuple(fields["at"]), models=tuple(survival_from_dict(each) for each in fields["models"]))
    if kind not in _KINDS:
        raise ValueError(f"kind is {kind!r}; allowed are {sorted([*_KINDS, 'SurvivalByTemperature'])}")
    expected = set(_KINDS[kind].__dataclass_fields__)
    if set(fields) != expected:
        raise ValueError(f"{kind} is stored with the fields {sorted(fields)}; allowed are {sorted(expected)}")
    return _KINDS[kind](**{name: _tuples(value) for name, value in fields.items()})


def identity_from_dict(stored: Mapping[str, Any]) -> CalibratorIdentity | None:
    """What a stored model was fitted for; None where that was not recorded."""
    return CalibratorIdentity.from_dict(stored[FITTED_FOR]) if FITTED_FOR in stored else None


@typed
def prefix_confidence(confidence_logits: Float[Array, "R G"]) -> Float[Array, "R G"]:
    """Raw survival: the running product of sigmoid(c_k); 0 from a NaN on."""
    return jnp.cumprod(jnp.nan_to_num(jax.nn.sigmoid(confidence_logits.astype(jnp.float32)), nan=0.0), axis=1)


def _confidence_logits(block: DraftBlock) -> Float[Array, "R G"]:
    if block.confidence_logits is None:
        raise ValueError("confidence_logits is None: this drafter has neither head nor score; allowed is ConstantSurvival")
    return block.confidence_logits


def _require_block_size(field: str, count: int, block: DraftBlock) -> None:
    if count != block.ids.shape[1]:
        raise ValueError(f"{field} has {count} entries; allowed is one per draft, of which there are {block.ids.shape[1]}")


def _lists(value: Any) -> Any:
    return [_lists(each) for each in value] if isinstance(value, tuple) else value


def _tuples(value: Any) -> Any:
    return tuple(_tuples(each) for each in value) if isinstance(value, list) else value
