"""The policies that decide from one round's survival how many drafts of each request are verified.

Every policy here but `Oracle` admits the drafts of a request in order and judges each by what ranks at or above it, so that the
output law stays the target's (`exactness` shows it by enumeration, and shows that it does not under `Oracle`).
"""

from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

from dspark_jax.prefix_ranking import best_prefix, cleaned, leading, select_prefix
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
    """Admit draft k while going on promises more tokens per second than stopping; every request is judged as if it were alone.

    On a staircase Algorithm 1 stops at the first edge, because one more draft does not pay although three more would. Here going on
    is judged by the best of all longer prefixes, whose survival is forecast from a_k and from what drafts usually do.

    Attributes:
      curve: cost of a round; where it has several contexts, each request is judged at its own.
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
        """The first draft whose going on does not promise more ends the prefix. The decision on k reads a_1..a_k alone.

        Raises:
          ValueError: `continuation` is not of length G.
        """
        block_size = survival.shape[1]
        if len(self.continuation) != block_size:
            raise ValueError(
                f"continuation has {len(self.continuation)} entries; allowed is one per draft, of which there are {block_size}"
            )
        kept = cleaned(survival)
        rate = self.curve.rates(block_size + 1, context.astype(jnp.float32))
        expected = 1 + jnp.cumsum(kept, axis=1)
        stop = jnp.concatenate([jnp.ones_like(expected[:, :1]), expected[:, :-1]], axis=1) * rate[:, 1:-1]
        forecast = expected[:, :, None] + kept[:, :, None] * jnp.asarray(self._further_tokens())
        reachable = jnp.arange(block_size)[:, None] <= jnp.arange(block_size)[None]
        go = jnp.max(jnp.where(reachable, forecast * rate[:, None, 2:], -jnp.inf), axis=2)
        return leading(go > stop, active)

    def _further_tokens(self) -> np.ndarray:
        """[k, j]: expected tokens of drafts k+1..j given that draft k is accepted."""
        block_size = len(self.continuation)
        further = np.zeros((block_size, block_size), np.float32)
        for k in range(block_size):
            further[k, k + 1 :] = np.cumsum(np.cumprod(self.continuation[k + 1 :]))
        return further


def _batch_rates(curve: StepCurve, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"]) -> Float[Array, "N"]:
    return curve.rates(survival.shape[0] * (survival.shape[1] + 1), mean_context(context, active))


def _require_threshold(threshold: float) -> None:
    if not 0 <= threshold <= 1:
        raise ValueError(f"threshold is {threshold}; allowed are numbers from 0 to 1")
