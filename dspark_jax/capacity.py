"""Capacity from survival two rounds old, admission by the current round: the schedule for larger batches (the paper's section 5.2).

How many tokens the next round may verify has to be known before its drafts are, where the host prepares rounds ahead of the
device. So the capacity is a function of rounds up to t - 2; being settled, it may be the best over all realised confidences of
those rounds, without a break. Which drafts fill it is ranked by the current round alone.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import struct

from dspark_jax.prefix_ranking import admit_top_k, cleaned, rank, require_survival
from dspark_jax.step_curve import CostCurve, StepCurve, mean_context
from dspark_jax.typing import Array, Bool, Float, Int, typed

NOBODY = -1


@typed
def choose_capacity(
    stale_survival: Float[Array, "R G"],
    stale_ids: Int[Array, "R"],
    active: Bool[Array, "R"],
    request_id: Int[Array, "R"],
    curve: CostCurve,
    constants: tuple[float, ...],
    context: Int[Array, "R"] | None = None,
) -> Int[Array, ""]:
    """Flat tokens of the coming round: the bucket of the best throughput, were the stale survival that of the coming round.

    Args:
      stale_survival: of round t - 2, by slot.
      stale_ids: the request that each slot had then, `NOBODY` (-1) where none was drafting. What a slot remembers of another
        request is dropped.
      active, request_id: of the coming round.
      constants: survival per position of requests without a memory: arrivals, and everybody in the first two rounds.
      context: committed tokens; only read where the curve has several contexts, the mean of the active requests counts.

    Returns:
      a bucket of `curve.ladder`, or the number of active requests where that is larger than any of them: never less than the
      requests that decode.

    Raises:
      ValueError: `constants` are not one per draft.
    """
    num_rows, block_size = stale_survival.shape
    if len(constants) != block_size:
        raise ValueError(f"constants has {len(constants)} entries; allowed is one per draft, of which there are {block_size}")
    remembered = (stale_ids == request_id) & (request_id != NOBODY)
    survival = jnp.where(remembered[:, None], cleaned(stale_survival), jnp.asarray(constants, jnp.float32))
    num_active = jnp.sum(active.astype(jnp.int32))
    ranking = rank(survival, active, request_id)
    expected = ranking.expected_tokens(num_active)
    tokens = num_active + jnp.arange(expected.shape[0], dtype=jnp.int32)
    at = jnp.zeros(()) if context is None else mean_context(context, active)
    rate = curve.rates(num_rows * (block_size + 1), at)
    exists = jnp.concatenate([jnp.ones((1,), bool), ranking.is_candidate])
    best = jnp.argmax(jnp.where(exists, expected * rate[jnp.minimum(tokens, rate.shape[0] - 1)], -jnp.inf))
    ladder = jnp.asarray(curve.ladder, jnp.int32)
    holds = jnp.minimum(jnp.searchsorted(ladder, tokens[best]), len(curve.ladder) - 1)
    return jnp.maximum(ladder[holds], num_active)


@struct.dataclass
class CapacityState:
    """What the two rounds before the coming one left behind, the older first.

    Attributes:
      survival: NaN counts as 0, as everywhere.
      request_id: the request of each slot then; `NOBODY` where it was not active.
    """

    survival: Float[Array, "2 R G"]
    request_id: Int[Array, "2 R"]


@dataclass(frozen=True)
class CapacityTopK:
    """`choose_capacity` on survival two rounds old, then `admit_top_k` on the current one. A `StatefulPolicy`: state in, state out.

    A decode loop keeps the state beside the caches: it asks `next_lengths` once a round, after drafting. A host that launches a
    program per bucket may ask `capacity` before the round is drafted: of that round it reads who takes part, and gives what
    `next_lengths` uses.

    Attributes:
      curve: cost of a round; its buckets are the capacities.
      constants: survival per position (one per draft) of requests that nothing is remembered of; never rising.
    """

    curve: StepCurve
    constants: tuple[float, ...]

    def __post_init__(self) -> None:
        require_survival("constants", self.constants)

    def init_state(self, num_rows: int, block_size: int) -> CapacityState:
        """Nothing remembered."""
        return CapacityState(
            survival=jnp.zeros((2, num_rows, block_size), jnp.float32), request_id=jnp.full((2, num_rows), NOBODY, jnp.int32)
        )

    @typed
    def capacity(
        self, state: CapacityState, active: Bool[Array, "R"], context: Int[Array, "R"], request_id: Int[Array, "R"]
    ) -> Int[Array, ""]:
        """Flat tokens of the coming round, from rounds up to t - 2."""
        return choose_capacity(state.survival[0], state.request_id[0], active, request_id, self.curve, self.constants, context)

    @typed
    def next_lengths(
        self,
        state: CapacityState,
        survival: Float[Array, "R G"],
        active: Bool[Array, "R"],
        context: Int[Array, "R"],
        request_id: Int[Array, "R"],
    ) -> tuple[Int[Array, "R"], CapacityState]:
        """Verified drafts per request, and the state with this round as its younger half."""
        lengths = admit_top_k(survival, active, request_id, self.capacity(state, active, context, request_id))
        ids = jnp.where(active, request_id, NOBODY)
        return lengths, CapacityState(
            survival=jnp.stack([state.survival[1], survival.astype(jnp.float32)]), request_id=jnp.stack([state.request_id[1], ids])
        )
