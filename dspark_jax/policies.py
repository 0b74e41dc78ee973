"""The policies that decide from one round's survival how many drafts of each request are verified.

Every policy here but `Oracle` admits the drafts of a request in order and judges each by what ranks at or above it, so that the
output law stays the target's (`exactness` shows it by enumeration, and shows that it does not under `Oracle`).
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from dspark_jax.prefix_ranking import best_prefix, cleaned, leading, rank, select_prefix
from dspark_jax.step_curve import StepCurve, mean_context
from dspark_jax.typing import Array, Bool, Float, Int, typed


@dataclass(frozen=True)
class FixedLength:
    """The same number of drafts for every request and round; 0 is plain decoding."""

    length: int

    def __post_init__(self) -> None:
        if self.length < 0:
            raise ValueError(f"length is {self.length}; allowed are integers of at least 0")

    @typed
    def lengths(
        self, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"], request_id: Int[Array, "R"]
    ) -> Int[Array, "R"]:
        """`length` where active, at most G."""
        return jnp.where(active, jnp.int32(min(self.length, survival.shape[1])), jnp.int32(0))


@dataclass(frozen=True)
class ConfidenceThreshold:
    """Verify up to the first draft whose chance to survive, given that those before it did, lies below `threshold`.

    This is the static rule of the reference: per step, not cumulative; a threshold of 0 verifies everything.
    """

    threshold: float

    def __post_init__(self) -> None:
        _require_threshold(self.threshold)

    @typed
    def lengths(
        self, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"], request_id: Int[Array, "R"]
    ) -> Int[Array, "R"]:
        """Drafts before the first one below the threshold."""
        kept = cleaned(survival)
        before = jnp.concatenate([jnp.ones_like(kept[:, :1]), kept[:, :-1]], axis=1)
        conditional = jnp.where(before > 0, kept / jnp.where(before > 0, before, 1.0), 0.0)
        return leading(conditional >= self.threshold, active)


@dataclass(frozen=True)
class SurvivalThreshold:
    """Verify the drafts whose survival, the chance that they and all before them are accepted, is at least `threshold`.

    The cumulative rule: what Algorithm 1 comes to where every further token costs the same. A threshold of 0 verifies everything.
    """

    threshold: float

    def __post_init__(self) -> None:
        _require_threshold(self.threshold)

    @typed
    def lengths(
        self, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"], request_id: Int[Array, "R"]
    ) -> Int[Array, "R"]:
        """Drafts before the first one whose survival is below the threshold."""
        return leading(cleaned(survival) >= self.threshold, active)


@dataclass(frozen=True)
class PrefixSchedule:
    """Algorithm 1 over the whole batch."""

    curve: StepCurve

    @typed
    def lengths(
        self, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"], request_id: Int[Array, "R"]
    ) -> Int[Array, "R"]:
        """`select_prefix` on the measured curve, at the mean context of the active requests."""
        return select_prefix(survival, active, _batch_rates(self.curve, survival, active, context), request_id)


@dataclass(frozen=True)
class Oracle:
    """The lengths of the highest throughput in hindsight. For analysis only: NOT lossless, and refused by `exactness`.

    Given outcomes in place of survival (1 for every draft of the prefix that verification will accept, 0 behind it), it verifies
    what will be accepted as far as that pays: the bound that every policy is measured against. Given survival, it gives the best
    expected throughput of all lengths, found by looking at all confidences of the round.
    """

    curve: StepCurve

    @typed
    def lengths(
        self, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"], request_id: Int[Array, "R"]
    ) -> Int[Array, "R"]:
        """`best_prefix` on the measured curve, at the mean context of the active requests."""
        return best_prefix(survival, active, _batch_rates(self.curve, survival, active, context), request_id)


@dataclass(frozen=True)
class ForecastStop:
    """Go down the ranking bucket by bucket while going on promises more tokens per second than stopping.

    On a staircase Algorithm 1 stops at the first edge, because one more draft does not pay although three more would. Here going on
    from one bucket is judged by the best of all larger ones. What the drafts that would fill them are worth is a forecast: from the
    survival of the first of them, and from how survival usually falls along the ranking. Every bucket is filled, since its places
    are paid for. With one request, the ranking is its block.

    Attributes:
      curve: cost of a round, at the mean context of the active requests.
      continuation: per position, the chance that a draft is accepted given that those before it were (one per draft, G in all).
    """

    curve: StepCurve
    continuation: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.continuation or not all(0 <= chance <= 1 for chance in self.continuation):
            raise ValueError(f"continuation is {self.continuation}; allowed is one number from 0 to 1 per draft")

    @typed
    def lengths(
        self, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"], request_id: Int[Array, "R"]
    ) -> Int[Array, "R"]:
        """The first bucket from which going on does not promise more. Whether a draft is in it reads what ranks at or above it.

        Raises:
          ValueError: `continuation` is not of length G.
        """
        num_rows, block_size = survival.shape
        if len(self.continuation) != block_size:
            raise ValueError(
                f"continuation has {len(self.continuation)} entries; allowed is one per draft, of which there are {block_size}"
            )
        ranking = rank(survival, active, request_id)
        num_active = jnp.sum(active.astype(jnp.int32))
        ladder = jnp.asarray(self.curve.ladder, jnp.int32)
        rate = self.curve.rates(num_rows * (block_size + 1), mean_context(context, active))
        rate = jnp.where(ladder >= num_active, rate[jnp.minimum(ladder, rate.shape[0] - 1)], 0.0)
        # Drafts that each bucket has place for: a bucket's last place is where a round may end.
        ends = jnp.clip(ladder - num_active, 0, num_active * block_size)
        expected = ranking.expected_tokens(num_active)[ends]
        usual = self._usual_fall(num_active, num_rows)
        total = jnp.concatenate([jnp.zeros((1,), jnp.float32), jnp.cumsum(usual)])[ends]
        following = jnp.minimum(ends, usual.shape[0] - 1)
        first = jnp.where(ends < num_active * block_size, ranking.survival[following] / usual[following], 0.0)
        forecast = expected[:, None] + first[:, None] * (total - total[:, None])
        larger = ladder > ladder[:, None]
        promise = jnp.max(jnp.where(larger, forecast * rate, -jnp.inf), axis=1)
        stops = (ladder >= num_active) & ~(promise > expected * rate)
        # The largest bucket always stops; where not even that one holds the requests, nothing is verified.
        chosen = jnp.where(jnp.any(stops), ends[jnp.argmax(stops)], 0)
        return ranking.lengths(jnp.arange(usual.shape[0]) < chosen, num_rows)

    def _usual_fall(self, num_active: Int[Array, ""], num_rows: int) -> Float[Array, "K"]:
        """Survival down the ranking of a usual batch: straight lines between the logarithms at the middle of each position's share.

        One block falls from position to position; of many blocks some are promising and some are not, so that their ranking has
        no steps.
        """
        # Hopeless positions keep a trace, so that a ratio to them exists.
        log_survival = jnp.asarray(np.log(np.maximum(np.cumprod(self.continuation), 1e-6)), jnp.float32)
        place = jnp.arange(num_rows * len(self.continuation), dtype=jnp.float32) + 0.5
        position = place / jnp.maximum(num_active, 1).astype(jnp.float32) - 0.5
        return jnp.exp(jnp.interp(position, jnp.arange(len(self.continuation), dtype=jnp.float32), log_survival))


def _batch_rates(curve: StepCurve, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"]) -> Float[Array, "N"]:
    return curve.rates(survival.shape[0] * (survival.shape[1] + 1), mean_context(context, active))


def _require_threshold(threshold: float) -> None:
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}; allowed are numbers from 0 to 1")
