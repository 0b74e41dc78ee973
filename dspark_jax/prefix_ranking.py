"""Ranking the drafts of a whole batch by their survival, and taking a prefix of the ranking: by Algorithm 1, by capacity, or the best.

Candidates are pairs (request, position) of active requests, in the order of falling survival; ties go by (request id, position)
and never by slot. Survival never rises along a block, so that a prefix of the ranking is a prefix of every block.
"""

import jax.numpy as jnp
from flax import struct
from jax import lax

from dspark_jax.typing import Array, Bool, Float, Int, typed


@struct.dataclass
class Ranking:
    """All places of a batch [R x G], candidates first, best first.

    Attributes:
      survival: 0 where `is_candidate` is not.
      row: the slot each belongs to.
      position: of the draft in its block, 0 to G - 1.
      is_candidate: False for places of requests that are not active.
    """

    survival: Float[Array, "K"]
    row: Int[Array, "K"]
    position: Int[Array, "K"]
    is_candidate: Bool[Array, "K"]

    def lengths(self, admitted: Bool[Array, "K"], num_rows: int) -> Int[Array, "R"]:
        """Admitted candidates per request."""
        row = jnp.arange(num_rows, dtype=jnp.int32)
        return jnp.sum(((self.row == row[:, None]) & admitted & self.is_candidate).astype(jnp.int32), axis=1)

    def expected_tokens(self, num_active: Int[Array, ""]) -> Float[Array, "K1"]:
        """Expected tokens of a round that verifies the first 0, 1, .. candidates, one free token of every request counted."""
        return num_active.astype(jnp.float32) + jnp.concatenate([jnp.zeros((1,), jnp.float32), jnp.cumsum(self.survival)])


def require_survival(field: str, values: tuple[float, ...]) -> None:
    """Refuse what is no survival per position: numbers from 1 down to 0 that never rise, one per draft."""
    in_order = (1.0, *values, 0.0)
    if not values or any(not later <= earlier for earlier, later in zip(in_order, in_order[1:], strict=False)):
        raise ValueError(f"{field} is {values}; allowed are numbers from 1 down to 0 that never rise, one per draft")


@typed
def cleaned(survival: Float[Array, "R G"]) -> Float[Array, "R G"]:
    """Survival as every decision reads it: from 0 to 1, NaN as 0, never rising along a block."""
    # A rise would rank k+1 before k, and NaN would rank anywhere; both would let the gate look ahead.
    return lax.cummin(jnp.clip(jnp.nan_to_num(survival.astype(jnp.float32), nan=0.0), 0.0, 1.0), axis=1)


@typed
def leading(admit: Bool[Array, "R G"], active: Bool[Array, "R"]) -> Int[Array, "R"]:
    """Drafts before the first one that is not admitted; 0 where not active."""
    count = jnp.sum(jnp.cumprod(admit.astype(jnp.int32), axis=1), axis=1)
    return jnp.where(active, count, 0)


@typed
def rank(survival: Float[Array, "R G"], active: Bool[Array, "R"], request_id: Int[Array, "R"] | None = None) -> Ranking:
    """All candidates by falling survival, then request id (the slot's number where None), then position."""
    num_rows, block_size = survival.shape
    row = jnp.arange(num_rows, dtype=jnp.int32)
    shape = survival.shape
    ranked, _, position, ranked_row = lax.sort(
        (
            jnp.where(active[:, None], -cleaned(survival), jnp.inf).reshape(-1),
            jnp.broadcast_to((row if request_id is None else request_id)[:, None], shape).reshape(-1),
            jnp.broadcast_to(jnp.arange(block_size, dtype=jnp.int32), shape).reshape(-1),
            jnp.broadcast_to(row[:, None], shape).reshape(-1),
        ),
        num_keys=3,
    )
    is_candidate = jnp.isfinite(ranked)
    return Ranking(jnp.where(is_candidate, -ranked, 0.0), ranked_row, position, is_candidate)


@typed
def select_prefix(
    survival: Float[Array, "R G"], active: Bool[Array, "R"], steps_per_second: Float[Array, "N"], request_id: Int[Array, "R"] | None = None
) -> Int[Array, "R"]:
    """Algorithm 1 of the paper, with its break: verified drafts per request.

    Candidates are taken in the order of the ranking while the expected tokens of the batch times the steps per second strictly
    improve; the first that does not improve ends it. The break is what keeps the output exact: without it a draft would be
    verified because of a candidate ranked below, which has seen it.

    Args:
      steps_per_second: entry n is the rate at n tokens; at least R * (G + 1) + 1 entries.
      request_id: breaks ties in survival, before the position does; the row's number where None.

    Raises:
      ValueError: too few entries of `steps_per_second`.
    """
    num_rows = survival.shape[0]
    _require_rates(steps_per_second, survival)
    ranking = rank(survival, active, request_id)
    throughput = _throughput(ranking, active, steps_per_second)
    improves = ranking.is_candidate & (throughput[1:] > throughput[:-1])
    return ranking.lengths(jnp.cumprod(improves.astype(jnp.int32)) == 1, num_rows)


@typed
def best_prefix(
    survival: Float[Array, "R G"], active: Bool[Array, "R"], steps_per_second: Float[Array, "N"], request_id: Int[Array, "R"] | None = None
) -> Int[Array, "R"]:
    """The lengths of the highest throughput of all, the shortest of several: the optimum that Algorithm 1 approaches.

    For analysis and for survival of earlier rounds. On the survival of the current round it LOOKS AHEAD: whether a draft is
    verified depends on confidences that have seen it. Arguments and errors as for `select_prefix`.
    """
    _require_rates(steps_per_second, survival)
    ranking = rank(survival, active, request_id)
    exists = jnp.concatenate([jnp.ones((1,), bool), ranking.is_candidate])
    best = jnp.argmax(jnp.where(exists, _throughput(ranking, active, steps_per_second), -jnp.inf))
    return ranking.lengths(jnp.arange(ranking.row.shape[0]) < best, survival.shape[0])


@typed
def admit_top_k(
    survival: Float[Array, "R G"], active: Bool[Array, "R"], request_id: Int[Array, "R"], capacity: Int[Array, ""] | int
) -> Int[Array, "R"]:
    """Verified drafts per request such that the round fills `capacity` flat tokens: the best candidates of the current round.

    Every active request has one token, its anchor's, whatever the capacity (a floor, so that each of them advances); the places
    that are left go to the candidates by rank, down to those of survival 0: a free place costs nothing. Under overload, with no
    more capacity than requests, nobody gets a draft; with room for all drafts, everybody gets all.

    Args:
      capacity: chosen without looking at this round (`choose_capacity`); whether a draft is admitted then depends only on
        candidates that rank at or above it.
    """
    ranking = rank(survival, active, request_id)
    places = jnp.asarray(capacity, jnp.int32) - jnp.sum(active.astype(jnp.int32))
    return ranking.lengths(jnp.arange(ranking.row.shape[0]) < places, survival.shape[0])


def _throughput(ranking: Ranking, active: Bool[Array, "R"], steps_per_second: Float[Array, "N"]) -> Float[Array, "K1"]:
    """Tokens per second of verifying the first 0, 1, .. candidates."""
    num_active = jnp.sum(active.astype(jnp.int32))
    expected = ranking.expected_tokens(num_active)
    steps = jnp.arange(expected.shape[0], dtype=jnp.int32)
    return expected * steps_per_second[jnp.minimum(num_active + steps, steps_per_second.shape[0] - 1)]


def _require_rates(steps_per_second: Float[Array, "N"], survival: Float[Array, "R G"]) -> None:
    needed = survival.shape[0] * (survival.shape[1] + 1) + 1
    if steps_per_second.shape[0] < needed:
        raise ValueError(
            f"steps_per_second has {steps_per_second.shape[0]} entries; allowed are at least {needed}, one per number of tokens from 0 on"
        )
