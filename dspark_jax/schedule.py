"""How many drafts of each request to verify: the measured cost of a round, Algorithm 1 of the paper, and the policies.

Survival a_k is the chance that drafts 1..k are all accepted. It depends on x_1..x_{k-1} and is known before x_k is drawn, so it
may decide whether x_k is verified; a_{k+1} has seen x_k and may not. Every policy here admits the drafts of a request in order
and judges each by what ranks at or above it, so that the output law stays the target's (`exactness` shows it by enumeration).
"""

import math
import warnings
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np
from jax import lax

from dspark_jax.typing import Array, Bool, Float, Int, typed

FLAT_WITHIN = 0.01


class FlatCurveWarning(UserWarning):
    """Every bucket costs about the same: a scheduler then verifies everything, whatever the confidence."""


@dataclass(frozen=True)
class StepCurve:
    """Seconds of a round against the number of tokens that the target runs on.

    Attributes:
      tokens: bucket sizes, ascending.
      seconds_per_step: what one step of the target takes at each bucket.
      draft_seconds: what the rest of a round takes (drafting, committing), whatever is verified.
    """

    tokens: tuple[int, ...]
    seconds_per_step: tuple[float, ...]
    draft_seconds: float = 0.0

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("tokens is empty; a cost curve needs at least one measured bucket, or everything would be verified")
        num_buckets, num_costs = len(self.tokens), len(self.seconds_per_step)
        if num_buckets != num_costs:
            raise ValueError(f"seconds_per_step has {num_costs} values; allowed is one per bucket, of which there are {num_buckets}")
        if self.tokens[0] < 1 or any(larger <= smaller for smaller, larger in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ValueError(f"tokens is {self.tokens}; allowed are positive bucket sizes in strictly ascending order")
        if not all(math.isfinite(cost) and cost > 0 for cost in self.seconds_per_step):
            raise ValueError(f"seconds_per_step is {self.seconds_per_step}; allowed are finite positive numbers")
        if not (math.isfinite(self.draft_seconds) and self.draft_seconds >= 0):
            raise ValueError(f"draft_seconds is {self.draft_seconds}; allowed are finite numbers of at least 0")
        if max(self.seconds_per_step) <= min(self.seconds_per_step) * (1 + FLAT_WITHIN):
            warnings.warn(
                f"the cost curve is flat within {FLAT_WITHIN:.0%} from {self.tokens[0]} to {self.tokens[-1]} tokens: "
                "verifying less gains nothing",
                FlatCurveWarning,
                stacklevel=3,
            )

    def seconds(self, num_tokens: int) -> float:
        """Seconds of a round on `num_tokens` tokens: the cost of the smallest bucket that holds them; inf where none does."""
        for bucket, seconds in zip(self.tokens, self.seconds_per_step, strict=True):
            if bucket >= num_tokens:
                return self.draft_seconds + seconds
        return math.inf

    def steps_per_second(self, max_tokens: int) -> np.ndarray:
        """Rounds per second on 0..max_tokens tokens, float32; 0 beyond the largest bucket."""
        return np.array([1 / self.seconds(num_tokens) for num_tokens in range(max_tokens + 1)], np.float32)


@typed
def select_prefix(
    survival: Float[Array, "R G"], active: Bool[Array, "R"], steps_per_second: Float[Array, "N"], request_id: Int[Array, "R"] | None = None
) -> Int[Array, "R"]:
    """Algorithm 1 of the paper, with its break: verified drafts per request.

    Candidates (request, position) of all active requests are taken in the order of falling survival, while the expected tokens
    of the batch times the steps per second strictly improve; the first that does not improve ends it. The break is what keeps the
    output exact: without it a draft would be verified because of a candidate ranked below, which has seen it.

    Args:
      steps_per_second: entry n is the rate at n tokens; at least R * (G + 1) + 1 entries.
      request_id: breaks ties in survival, before the position does; the row's number where None.

    Raises:
      ValueError: too few entries of `steps_per_second`.
    """
    num_rows, block_size = survival.shape
    if steps_per_second.shape[0] < num_rows * (block_size + 1) + 1:
        raise ValueError(
            f"steps_per_second has {steps_per_second.shape[0]} entries; allowed are at least "
            f"{num_rows * (block_size + 1) + 1}, one per number of tokens from 0 on"
        )
    row = jnp.arange(num_rows, dtype=jnp.int32)
    shape = survival.shape
    ranked, _, _, ranked_row = lax.sort(
        (
            jnp.where(active[:, None], -_cleaned(survival), jnp.inf).reshape(-1),
            jnp.broadcast_to((row if request_id is None else request_id)[:, None], shape).reshape(-1),
            jnp.broadcast_to(jnp.arange(block_size, dtype=jnp.int32), shape).reshape(-1),
            jnp.broadcast_to(row[:, None], shape).reshape(-1),
        ),
        num_keys=3,
    )
    is_candidate = jnp.isfinite(ranked)
    num_active = jnp.sum(active.astype(jnp.int32))
    steps = jnp.arange(ranked.shape[0] + 1, dtype=jnp.int32)
    gains = jnp.where(is_candidate, -ranked, 0.0)
    expected = num_active.astype(jnp.float32) + jnp.concatenate([jnp.zeros((1,), jnp.float32), jnp.cumsum(gains)])
    throughput = expected * steps_per_second[jnp.minimum(num_active + steps, steps_per_second.shape[0] - 1)]
    improves = is_candidate & (throughput[1:] > throughput[:-1])
    admitted = jnp.cumprod(improves.astype(jnp.int32))
    return jnp.sum(jnp.where(ranked_row == row[:, None], admitted, 0), axis=1)


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
        if not 0 <= self.threshold <= 1:
            raise ValueError(f"threshold is {self.threshold}; allowed are numbers from 0 to 1")

    @typed
    def lengths(
        self, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"], request_id: Int[Array, "R"]
    ) -> Int[Array, "R"]:
        """Drafts before the first one below the threshold."""
        kept = _cleaned(survival)
        before = jnp.concatenate([jnp.ones_like(kept[:, :1]), kept[:, :-1]], axis=1)
        conditional = jnp.where(before > 0, kept / jnp.where(before > 0, before, 1.0), 0.0)
        return _leading(conditional >= self.threshold, active)


@dataclass(frozen=True)
class PrefixSchedule:
    """Algorithm 1 over the whole batch."""

    curve: StepCurve

    @typed
    def lengths(
        self, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"], request_id: Int[Array, "R"]
    ) -> Int[Array, "R"]:
        """`select_prefix` on the measured curve."""
        rate = jnp.asarray(self.curve.steps_per_second(survival.shape[0] * (survival.shape[1] + 1)))
        return select_prefix(survival, active, rate, request_id)


@dataclass(frozen=True)
class ForecastStop:
    """Admit draft k while going on promises more tokens per second than stopping; every request is judged as if it were alone.

    On a staircase Algorithm 1 stops at the first edge, because one more draft does not pay although three more would. Here going on
    is judged by the best of all longer prefixes, whose survival is forecast from a_k and from what drafts usually do.

    Attributes:
      curve: cost of a round.
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
        kept = _cleaned(survival)
        rate = jnp.asarray(self.curve.steps_per_second(block_size + 1))
        expected = 1 + jnp.cumsum(kept, axis=1)
        stop = jnp.concatenate([jnp.ones_like(expected[:, :1]), expected[:, :-1]], axis=1) * rate[1:-1]
        forecast = expected[:, :, None] + kept[:, :, None] * jnp.asarray(self._further_tokens())
        reachable = jnp.arange(block_size)[:, None] <= jnp.arange(block_size)[None]
        go = jnp.max(jnp.where(reachable, forecast * rate[2:], -jnp.inf), axis=2)
        return _leading(go > stop, active)

    def _further_tokens(self) -> np.ndarray:
        """[k, j]: expected tokens of drafts k+1..j given that draft k is accepted."""
        block_size = len(self.continuation)
        further = np.zeros((block_size, block_size), np.float32)
        for k in range(block_size):
            further[k, k + 1 :] = np.cumsum(np.cumprod(self.continuation[k + 1 :]))
        return further


def _cleaned(survival: Float[Array, "R G"]) -> Float[Array, "R G"]:
    # A rise would rank k+1 before k, and NaN would rank anywhere; both would let the gate look ahead.
    return lax.cummin(jnp.clip(jnp.nan_to_num(survival.astype(jnp.float32), nan=0.0), 0.0, 1.0), axis=1)


def _leading(admit: Bool[Array, "R G"], active: Bool[Array, "R"]) -> Int[Array, "R"]:
    count = jnp.sum(jnp.cumprod(admit.astype(jnp.int32), axis=1), axis=1)
    return jnp.where(active, count, 0)
