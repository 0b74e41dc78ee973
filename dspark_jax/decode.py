"""Decoding in rounds: draft, decide how many drafts to verify, verify, commit. Pure functions over `DecodeState`.

Invariants between rounds, for every request: `length` tokens are committed; the last of them, the anchor, has not been run through
the target and its position is in no cache; the target's cache and the drafter's state hold exactly the `length - 1` positions before
it (a drafter may have read the anchor's id, as the token behind the last of them).
"""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.block_verify import verify_block
from dspark_jax.protocols import (
    Committed,
    DraftBlock,
    Drafter,
    StatefulPolicy,
    SurvivalModel,
    Target,
    TargetHead,
    Verdict,
    VerifyPolicy,
    flatten_rounds,
)
from dspark_jax.sampling import Noise, Sampling, draw, logit_floor
from dspark_jax.typing import Array, Bool, Float, Int, Params, UInt32
from dspark_jax.verify import verify_tokens
from pallas_kernels.noise import Stream

VERIFIERS: Mapping[str, Callable[..., Verdict]] = {"token": verify_tokens, "block": verify_block}


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Who decodes, and how: everything about a decoding run that is static under jit.

    Attributes:
      target: the model whose law the output has.
      drafter: None for plain decoding, one token a round.
      policy: how many drafts are verified; only read where there is a drafter. What a stateful one remembers is in the state.
      survival: turns the drafter's confidence into the survival that the policy reads.
      verifier: "token": every draft is judged by itself; "block": the block is judged jointly, which keeps at least as many drafts.
      ladder: ascending numbers N of flat tokens that a verification may run on; None for R x (G + 1) alone.
    """

    target: Target
    drafter: Drafter | None = None
    policy: VerifyPolicy | StatefulPolicy | None = None
    survival: SurvivalModel | None = None
    ladder: tuple[int, ...] | None = None
    verifier: Literal["token", "block"] = "token"

    def __post_init__(self) -> None:
        if self.drafter is not None and (self.policy is None or self.survival is None):
            raise ValueError("policy or survival is None; a plan with a drafter needs both")
        if self.verifier not in VERIFIERS:
            raise ValueError(f"verifier is {self.verifier!r}; allowed: {', '.join(VERIFIERS)}")
        if self.ladder is not None and (not self.ladder or min(self.ladder) < 1 or list(self.ladder) != sorted(set(self.ladder))):
            raise ValueError(f"ladder is {self.ladder}; it must be ascending positive token counts, or None")

    @property
    def block_size(self) -> int:
        """G; 0 for plain decoding."""
        return 0 if self.drafter is None else self.drafter.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.taps

    def buckets(self, num_rows: int) -> tuple[int, ...]:
        """The ladder for `num_rows` requests.

        Raises:
          ValueError: where its largest bucket is too small for all requests with all drafts.
        """
        most = num_rows * (self.block_size + 1)
        if self.ladder is None:
            return (most,)
        if self.ladder[-1] < most:
            raise ValueError(
                f"ladder is {self.ladder}; its last bucket must hold {num_rows} requests x (1 + {self.block_size} drafts) = {most}"
            )
        return self.ladder


@struct.dataclass
class DecodeParams:
    """Parameters of a run. `draft_head` is the target's head restricted to the draft vocabulary; `drafter` is empty without one."""

    target: Params
    head: TargetHead
    drafter: Params
    draft_head: TargetHead

    @classmethod
    def of(
        cls, target: Target, target_params: Params, drafter_params: Params | None = None, draft_ids: Int[Array, "Vd"] | None = None
    ) -> "DecodeParams":
        """Collect the parameters and cut the head to `draft_ids`."""
        head = target.head(target_params)
        return cls(target_params, head, {} if drafter_params is None else drafter_params, head.restrict(draft_ids))


@struct.dataclass
class DecodeState:
    """Attributes:

    ids: committed tokens (prompt and answer) from position 0 on; what lies beyond `length` means nothing.
    length: committed tokens, the anchor counted.
    prompt_length: tokens of the prompt.
    limit: length at which the token budget is used up.
    stop_ids: tokens that end the request, padded with -1.
    finished: the request ended by a stop token or its budget; it takes no part in further rounds.
    request_id, round: what the request's random bits are made from; the round counter is the request's own.
    seed: key of the run's seed.
    policy_state: what a stateful policy remembers of earlier rounds; None for others.
    """

    ids: Int[Array, "R T"]
    length: Int[Array, "R"]
    prompt_length: Int[Array, "R"]
    limit: Int[Array, "R"]
    stop_ids: Int[Array, "R K"]
    finished: Bool[Array, "R"]
    request_id: Int[Array, "R"]
    round: Int[Array, "R"]
    seed: UInt32[Array, "2"]
    sampling: Sampling
    target_cache: Any
    drafter_state: Any
    policy_state: Any = None


@struct.dataclass
class RoundStats:
    """What happened in one round; only the rows that are `active` mean something.

    `emitted` counts tokens after stop and budget cuts; `cut` marks rounds that these shortened.
    """

    active: Bool[Array, "R"]
    anchor: Int[Array, "R"]
    drafts: Int[Array, "R G"]
    confidence_logits: Float[Array, "R G"]
    verified: Int[Array, "R"]
    num_accepted: Int[Array, "R"]
    next_id: Int[Array, "R"]
    emitted: Int[Array, "R"]
    cut: Bool[Array, "R"]


@struct.dataclass
class Tally:
    """Sums over rounds, per request. Rounds cut short by a stop token or the budget are counted apart.

    Accepted length = emitted / rounds. Conditional acceptance at k = accepted[k] / reached[k].

    Attributes:
      reached: rounds whose verified length is at least k and that accepted the k - 1 drafts before.
      accepted: those of them that accepted draft k as well.
      verified: drafts sent to the target.
    """

    rounds: Int[Array, "R"]
    emitted: Int[Array, "R"]
    cut_rounds: Int[Array, "R"]
    cut_emitted: Int[Array, "R"]
    verified: Int[Array, "R"]
    reached: Int[Array, "R G"]
    accepted: Int[Array, "R G"]

    @classmethod
    def zeros(cls, num_rows: int, block_size: int) -> "Tally":
        row, block = jnp.zeros((num_rows,), jnp.int32), jnp.zeros((num_rows, block_size), jnp.int32)
        return cls(row, row, row, row, row, block, block)

    def add(self, stats: RoundStats) -> "Tally":
        """The sums with one more round."""
        whole = stats.active & ~stats.cut
        place = jnp.arange(stats.drafts.shape[1], dtype=jnp.int32)
        reached = whole[:, None] & (place < stats.verified[:, None]) & (place <= stats.num_accepted[:, None])
        return Tally(
            rounds=self.rounds + whole.astype(jnp.int32),
            emitted=self.emitted + jnp.where(whole, stats.emitted, 0),
            cut_rounds=self.cut_rounds + stats.cut.astype(jnp.int32),
            cut_emitted=self.cut_emitted + jnp.where(stats.cut, stats.emitted, 0),
            verified=self.verified + jnp.where(stats.active, stats.verified, 0),
            reached=self.reached + reached.astype(jnp.int32),
            accepted=self.accepted + (reached & (place < stats.num_accepted[:, None])).astype(jnp.int32),
        )


def draw_next(logits: Float[Array, "R V"], sampling: Sampling, noise: Noise) -> Int[Array, "R"]:
    """A token from the target's own distribution: the first one of a request, and every one of plain decoding."""
    return draw(
        logits,
        logit_floor(logits, sampling),
        sampling.temperature,
        noise.key,
        jnp.zeros(logits.shape[:1], jnp.int32),
        tile_stream=Stream.RESIDUAL_TILE,
        id_stream=Stream.RESIDUAL_ID,
    ).ids


def _empty_block(num_rows: int) -> DraftBlock:
    nothing = jnp.zeros((num_rows, 0), jnp.float32)
    return DraftBlock(jnp.zeros((num_rows, 0), jnp.int32), nothing, nothing, nothing, nothing, None)


def _verify_bucket(
    plan: DecodePlan, params: DecodeParams, state: DecodeState, block: DraftBlock, lengths: Array, noise: Noise, bucket: int
) -> tuple[Verdict, Array, Array, Any]:
    """The target's pass over `bucket` flat tokens, and the verdict; hidden states and features come back by request."""
    num_rows = state.length.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    active = ~state.finished
    anchor = state.ids[rows, state.length - 1]
    tokens, first = flatten_rounds(anchor, block.ids, state.length - 1, lengths, active, bucket)
    with jax.named_scope("target_forward"):
        hidden, features, cache = plan.target.forward(params.target, state.target_cache, tokens, plan.taps)
    with jax.named_scope("target_logits"):
        logits = params.head.logits(hidden)
    if plan.block_size == 0:
        next_id = draw_next(logits[jnp.minimum(first, bucket - 1)], state.sampling, noise)
        verdict = Verdict(num_accepted=jnp.zeros((num_rows,), jnp.int32), next_id=next_id)
    else:
        draft_ids = params.draft_head.draft_ids
        verdict = VERIFIERS[plan.verifier](logits, tokens.row, first, block, lengths, state.sampling, noise, draft_ids)
    index = jnp.minimum(first[:, None] + jnp.arange(plan.block_size + 1, dtype=jnp.int32), bucket - 1)
    return verdict, hidden[index], features[index], cache


def decode_round(plan: DecodePlan, params: DecodeParams, state: DecodeState, bucket: int | None = None) -> tuple[DecodeState, RoundStats]:
    """One round of every request that is not finished; each of them emits at least one token.

    Args:
      bucket: flat tokens of the target's pass, chosen by the caller and large enough; None lets the program choose the smallest
        bucket of the plan's ladder on the device.
    """
    num_rows = state.length.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    active = ~state.finished
    anchor = state.ids[rows, state.length - 1]
    noise = Noise.of_round(state.seed, state.request_id, state.round)
    if plan.drafter is None or plan.policy is None or plan.survival is None:
        block, lengths = _empty_block(num_rows), jnp.zeros((num_rows,), jnp.int32)
    else:
        block = plan.drafter.propose(params.drafter, params.draft_head, state.drafter_state, anchor, noise, state.sampling)
        survival = plan.survival.survival(block, state.sampling.temperature)
        asked = (survival, active, state.length, state.request_id)
        if isinstance(plan.policy, StatefulPolicy):
            lengths, policy_state = plan.policy.next_lengths(state.policy_state, *asked)
            state = dataclasses.replace(state, policy_state=policy_state)
        else:
            lengths = plan.policy.lengths(*asked)
        # A draft that the budget would cut off again is not worth verifying; the budget was fixed before the round.
        lengths = jnp.where(active, jnp.minimum(lengths, state.limit - state.length - 1), 0)

    verify = functools.partial(_verify_bucket, plan, params, state, block, lengths, noise)
    buckets = plan.buckets(num_rows) if bucket is None else (bucket,)
    if len(buckets) == 1:
        verdict, hidden, features, cache = verify(buckets[0])
    else:
        needed = jnp.where(active, 1 + lengths, 0).sum()
        choice = jnp.searchsorted(jnp.asarray(buckets, jnp.int32), needed).astype(jnp.int32)
        verdict, hidden, features, cache = jax.lax.switch(choice, [functools.partial(verify, size) for size in buckets])

    place = jnp.arange(plan.block_size + 1, dtype=jnp.int32)
    chain = jnp.concatenate([block.ids, jnp.zeros((num_rows, 1), jnp.int32)], axis=1)
    chain = jnp.where(place == verdict.num_accepted[:, None], verdict.next_id[:, None], chain)
    count = verdict.num_accepted + 1
    is_stop = (chain[:, :, None] == state.stop_ids[:, None, :]).any(axis=-1) & (place < count[:, None])
    stopped = is_stop.any(axis=1)
    emitted = jnp.where(stopped, jnp.argmax(is_stop, axis=1).astype(jnp.int32) + 1, count)
    emitted = jnp.where(active, jnp.minimum(emitted, state.limit - state.length), 0)
    length = state.length + emitted
    slot = jnp.where(place < emitted[:, None], state.length[:, None] + place, state.ids.shape[1])
    drafter_state = state.drafter_state
    if plan.drafter is not None:
        drafter_state = plan.drafter.commit(params.drafter, params.draft_head, drafter_state, Committed(chain, hidden, features, emitted))
    stats = RoundStats(
        active=active,
        anchor=anchor,
        drafts=block.ids,
        confidence_logits=jnp.zeros(block.ids.shape) if block.confidence_logits is None else block.confidence_logits,
        verified=lengths,
        num_accepted=jnp.where(active, verdict.num_accepted, 0),
        next_id=verdict.next_id,
        emitted=emitted,
        cut=active & (emitted < count),
    )
    state = dataclasses.replace(
        state,
        ids=state.ids.at[rows[:, None], slot].set(chain, mode="drop"),
        length=length,
        finished=state.finished | stopped | (length >= state.limit),
        round=state.round + active.astype(jnp.int32),
        target_cache=plan.target.roll_back(cache, length - 1),
        drafter_state=drafter_state,
    )
    return state, stats


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def step(plan: DecodePlan, params: DecodeParams, state: DecodeState, bucket: int | None = None) -> tuple[DecodeState, RoundStats]:
    """`decode_round`, compiled; the state's buffers are given up to the new one."""
    return decode_round(plan, params, state, bucket)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=2)
def generate(plan: DecodePlan, params: DecodeParams, state: DecodeState) -> tuple[DecodeState, Tally]:
    """Rounds until every request is finished, in one compiled loop; the state's buffers are given up, as in `step`."""

    def body(carry: tuple[DecodeState, Tally]) -> tuple[DecodeState, Tally]:
        state, tally = carry
        state, stats = decode_round(plan, params, state)
        return state, tally.add(stats)

    tally = Tally.zeros(state.length.shape[0], plan.block_size)
    return jax.lax.while_loop(lambda carry: ~carry[0].finished.all(), body, (state, tally))


def answers(state: DecodeState) -> list[list[int]]:
    """The tokens emitted so far for every request, the first one and a closing stop token included."""
    ids, begins, ends = np.asarray(state.ids), np.asarray(state.prompt_length), np.asarray(state.length)
    return [row[begin:end].tolist() for row, begin, end in zip(ids, begins, ends, strict=True)]
