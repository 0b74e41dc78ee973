"""Decoding in rounds: draft, decide how many drafts to verify, verify, commit. Pure functions over `DecodeState`.

Invariants between rounds, for every request: `length` tokens are committed; the last of them, the anchor, has not been run through
the target and its position is in no cache; the target's cache and the drafter's state hold exactly the `length - 1` positions before
it (a drafter may have read the anchor's id, as the token behind the last of them).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax import in_place
from dspark_jax.decode_state import VERIFIERS, DecodeParams, DecodePlan, DecodeState
from dspark_jax.protocols import Committed, DraftBlock, Drafter, StatefulPolicy, Verdict, flatten_rounds
from dspark_jax.round_stats import RoundStats, Tally
from dspark_jax.sampling import Noise, Sampling, logit_floor
from dspark_jax.typing import Array, Bool, Float, Int
from pallas_kernels.noise import Stream
from pallas_kernels.two_level_draw import draw


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
    plan: DecodePlan,
    params: DecodeParams,
    state: DecodeState,
    block: DraftBlock,
    lengths: Array,
    noise: Noise,
    bucket: int,
    most: int,
    cache: Any,
) -> tuple[Verdict, Array, Array, Any]:
    """The target's pass over `bucket` flat tokens, and the verdict; hidden states and features come back by request.

    No request has more than `most` drafts verified: attention pays for as many queries of every request, whoever has them.
    """
    num_rows = state.length.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    active = ~state.finished
    anchor = state.ids[rows, state.length - 1]
    tokens, first = flatten_rounds(anchor, block.ids[:, :most], state.length - 1, lengths, active, bucket)
    with jax.named_scope("target_forward"):
        hidden, features, cache = plan.target.forward(params.target, cache, tokens, plan.taps)
    with jax.named_scope("target_logits"):
        logits = params.head.logits(hidden)
    if plan.block_size == 0:
        next_id = draw_next(logits[jnp.minimum(first, bucket - 1)], state.sampling, noise)
        verdict = Verdict(num_accepted=jnp.zeros((num_rows,), jnp.int32), next_id=next_id)
    else:
        draft_ids = params.draft_head.draft_ids
        backend = {"backend": plan.backend} if plan.verifier == "token" else {}
        verdict = VERIFIERS[plan.verifier](logits, tokens.row, first, block, lengths, state.sampling, noise, draft_ids, **backend)
    index = jnp.minimum(first[:, None] + jnp.arange(plan.block_size + 1, dtype=jnp.int32), bucket - 1)
    return verdict, hidden[index], features[index], cache


def _replaced(verify: Callable[[Any], tuple], before: tuple) -> tuple:
    """A pass as a function of what is there before it, of which the cache alone counts."""
    return verify(before[-1])


@struct.dataclass
class _Drafted:
    """What a round is to verify.

    Attributes:
      lengths: verified drafts per request; 0 where not active.
      probe: requests that are verified in full to learn.
      runs: whether the drafter ran; where not, the block is zeros.
    """

    block: DraftBlock
    lengths: Int[Array, "R"]
    probe: Bool[Array, "R"]
    runs: Bool[Array, ""]


def _draft(
    plan: DecodePlan, params: DecodeParams, state: DecodeState, anchor: Int[Array, "R"], noise: Noise, bucket: int | None
) -> tuple[_Drafted, DecodeState]:
    """Propose and schedule, where the plan has a drafter and its planner lets it run; gives the state behind it."""
    active = ~state.finished
    nobody, nothing = jnp.zeros_like(active), jnp.zeros(active.shape, jnp.int32)
    drafter, policy, planner = plan.drafter, plan.policy, plan.planner
    if drafter is None or policy is None or plan.survival is None:
        return _Drafted(_empty_block(active.shape[0]), nothing, nobody, jnp.bool_(False)), state
    survival_model = plan.survival if state.calibration is None else state.calibration

    def propose(drafter_state: Any) -> tuple[DraftBlock, Array]:
        block = drafter.propose(params.drafter, params.draft_head, drafter_state, anchor, noise, state.sampling)
        return block, survival_model.survival(block, state.sampling.temperature)

    if planner is None:
        (block, survival), runs, probe = propose(state.drafter_state), jnp.bool_(True), nobody
    else:
        history, deferred = state.draft_history, state.deferred
        if history is None or deferred is None:
            raise ValueError(
                "draft_history or deferred is None; a state for a plan with a planner comes from `prefill.start` with that plan"
            )
        decision = planner.plan(history, active, state.length, state.request_id, state.seed)
        runs, probe = decision.draft_length > 0, decision.probe

        def catch_up(before: tuple[Any, Committed, Any]) -> tuple[Any, Committed, Any]:
            drafter_state, deferred = _flush(drafter, params, before[:2])
            return drafter_state, deferred, propose(drafter_state)

        before = (state.drafter_state, deferred, in_place.zeros_of(propose, state.drafter_state))
        drafter_state, deferred, (block, survival) = in_place.when(runs, catch_up, before)
        # A block is written as a whole: what is planned beyond whether to draft is left to the policy, which has seen the confidence.
        shown = jnp.where(runs, plan.block_size, 0)
        history = planner.observe(history, survival, shown, active, state.request_id)
        state = dataclasses.replace(state, drafter_state=drafter_state, deferred=deferred, draft_history=history)

    asked = (survival, active & runs, state.length, state.request_id)
    if isinstance(policy, StatefulPolicy):
        lengths, policy_state = policy.next_lengths(state.policy_state, *asked)
        state = dataclasses.replace(state, policy_state=policy_state)
    else:
        lengths = policy.lengths(*asked)
    # A probe takes what the others leave of a bucket that is settled.
    room = plan.block_size if bucket is None else jnp.maximum(bucket - jnp.where(active, 1 + lengths, 0).sum(), 0)
    lengths = jnp.where(probe, jnp.minimum(lengths + room, plan.block_size), lengths)
    # A draft that the budget would cut off again is not worth verifying; the budget was fixed before the round.
    lengths = jnp.where(active, jnp.minimum(lengths, state.limit - state.length - 1), 0)
    return _Drafted(block, lengths, probe, runs), state


def _flush(drafter: Drafter, params: DecodeParams, told: tuple[Any, Committed]) -> tuple[Any, Committed]:
    """Tell the drafter what was deferred, if anything was."""

    def commit(told: tuple[Any, Committed]) -> tuple[Any, Committed]:
        drafter_state, deferred = told
        drafter_state = drafter.commit(params.drafter, params.draft_head, drafter_state, deferred)
        return drafter_state, dataclasses.replace(deferred, count=jnp.zeros_like(deferred.count))

    return in_place.when(jnp.any(told[1].count > 0), commit, told)


def _commit(
    plan: DecodePlan, params: DecodeParams, state: DecodeState, committed: Committed, runs: Bool[Array, ""]
) -> tuple[Any, Committed | None]:
    """Tell the drafter of a round's tokens: at once behind a drafted round, else once there are as many as such a round may have."""
    drafter, deferred = plan.drafter, state.deferred
    if drafter is None:
        return state.drafter_state, None
    if plan.planner is None or deferred is None:
        return drafter.commit(params.drafter, params.draft_head, state.drafter_state, committed), deferred

    def at_once(told: tuple[Any, Committed]) -> tuple[Any, Committed]:
        return drafter.commit(params.drafter, params.draft_head, told[0], committed), told[1]

    def later(told: tuple[Any, Committed]) -> tuple[Any, Committed]:
        drafter_state, deferred = told
        rows = jnp.arange(deferred.count.shape[0], dtype=jnp.int32)
        place = jnp.where(committed.count > 0, deferred.count, deferred.next_ids.shape[1])

        def append(kept: Array, new: Array) -> Array:
            return kept.at[rows, place].set(new[:, 0].astype(kept.dtype), mode="drop")

        deferred = Committed(
            next_ids=append(deferred.next_ids, committed.next_ids),
            hidden=append(deferred.hidden, committed.hidden),
            features=append(deferred.features, committed.features),
            count=deferred.count + committed.count,
        )
        full = jnp.any(deferred.count > plan.block_size)
        return in_place.when(full, functools.partial(_flush, drafter, params), (drafter_state, deferred))

    return in_place.switch(runs.astype(jnp.int32), (later, at_once), (state.drafter_state, deferred))


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
    noise = state.noise
    drafted, state = _draft(plan, params, state, anchor, noise, bucket)
    block, lengths = drafted.block, drafted.lengths

    buckets = plan.buckets(num_rows) if bucket is None else (bucket,)
    needed = jnp.where(active, 1 + lengths, 0).sum()
    sizes = [(size, plan.block_size) for size in buckets]
    choice = jnp.searchsorted(jnp.asarray(buckets, jnp.int32), needed).astype(jnp.int32)
    if plan.planner is not None:
        # Without drafts the pass is that of plain decoding: a token each, and attention for no more than that.
        sizes.append((num_rows, 0))
        choice = jnp.where(drafted.runs, choice, len(buckets)).astype(jnp.int32)
    verify = functools.partial(_verify_bucket, plan, params, state, block, lengths, noise)
    passes = [functools.partial(_replaced, functools.partial(verify, *each)) for each in sizes]
    nothing = in_place.zeros_of(functools.partial(verify, *sizes[0]), state.target_cache)
    verdict, hidden, features, cache = in_place.switch(choice, passes, (*nothing[:-1], state.target_cache))

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
    drafter_state, deferred = _commit(plan, params, state, Committed(chain, hidden, features, emitted), drafted.runs)
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
        probe=drafted.probe,
        drafted=drafted.runs,
    )
    calibration = state.calibration
    if calibration is not None:
        judged = (stats.confidence_logits, stats.verified, stats.num_accepted, active & drafted.runs, state.sampling.temperature)
        calibration = calibration.update(*judged, stats.probe, stats.emitted)
    state = dataclasses.replace(
        state,
        ids=state.ids.at[rows[:, None], slot].set(chain, mode="drop"),
        length=length,
        finished=state.finished | stopped | (length >= state.limit),
        round=state.round + active.astype(jnp.int32),
        target_cache=plan.target.roll_back(cache, length - 1),
        drafter_state=drafter_state,
        deferred=deferred,
        calibration=calibration,
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
