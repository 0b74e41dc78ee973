"""Block verification: the drafts of a request are accepted jointly, which keeps at least as many of them, at the same exact law.

Token by token, draft k is kept with min(1, p_k / q_k), and what an unlikely first draft loses is lost even where the drafts
behind it are likelier under the target than under the drafter. Here the ratios are carried along the block, w_k = min(1, w_{k-1}
p_k / q_k), and w_k is the chance that at least k drafts are kept. For this, each step k before the last has a stop of its own,
passed with chance h_k = S_k / (S_k + 1 - w_k), S_k = sum of max(0, w_k p_{k+1} - q_{k+1}), and the longest prefix whose stop is
passed is kept; behind it comes a draw from norm(max(0, w_k p_{k+1} - q_{k+1})). The last step has h = w and the bonus token.

The last step is where the schedule ends a request's block, not G. A schedule that does not look ahead ends it by what the drafts
before the end say, and S_k reads nothing behind draft k, so that the law stays the target's under every such schedule.
Source: Sun et al. 2024, "Block verification accelerates speculative decoding", Algorithm 2.
"""

import jax.numpy as jnp
from jax import lax

from dspark_jax.protocols import DraftBlock, Verdict
from dspark_jax.sampling import Noise, Sampling, logit_floor
from dspark_jax.typing import Array, Bool, Float, Int, typed
from pallas_kernels.noise import Stream, site_key, uniform
from pallas_kernels.rejection_sample import MIN_RESIDUAL_MASS, greedy_outcome
from pallas_kernels.two_level_draw import draw, log_normaliser, log_prob_of, probs


@typed
def joint_weights(log_ratio: Float[Array, "*batch G"]) -> Float[Array, "*batch K"]:
    """w_0..w_G (K = G + 1) from log p_k / q_k: the chance that at least k drafts are kept given drafts 1..k, whatever is drafted behind.

    It is the same at every verified length of at least k, so that w_1 + .. + w_n has the mean of the accepted drafts at length n.
    """
    log_weight = [jnp.zeros_like(log_ratio[..., 0])]
    for k in range(log_ratio.shape[-1]):
        log_weight.append(jnp.minimum(log_weight[-1] + log_ratio[..., k], 0.0))
    return jnp.exp(jnp.stack(log_weight, axis=-1))


@typed
def block_outcome_probs(
    p: Float[Array, "K V"], q: Float[Array, "G V"], ids: Int[Array, "G"], length: Int[Array, ""] | int
) -> Float[Array, "K V"]:
    """P(num_accepted = a, next id = v | drafts `ids`), a over the rows (K = G + 1); arguments as of `verify.outcome_probs`."""
    p_id = jnp.take_along_axis(p[:-1], ids[:, None], axis=1)[:, 0]
    q_id = jnp.take_along_axis(q, ids[:, None], axis=1)[:, 0]
    carried = joint_weights(jnp.log(jnp.where(q_id > 0, p_id / jnp.where(q_id > 0, q_id, 1.0), 0.0)))
    excess = jnp.maximum(carried[:-1, None] * p[:-1] - q, 0.0)
    mass = jnp.sum(excess, axis=1)
    step = jnp.arange(p.shape[0], dtype=jnp.int32)
    passed = jnp.concatenate([_stop_chance(mass, carried[:-1]), carried[-1:]])
    passed = jnp.where(step < length, passed, jnp.where(step == length, carried, 0.0))
    # Of the stops behind each step none is passed.
    later = jnp.cumprod((1 - passed)[::-1])[::-1]
    kept = passed * jnp.concatenate([later[1:], jnp.ones_like(later[:1])])
    residual = jnp.concatenate([_normalised(excess, mass, p[:-1]), p[-1:]])
    return kept[:, None] * jnp.where((step < length)[:, None], residual, p)


@typed
def verify_block(
    target_logits: Float[Array, "N V"],
    row: Int[Array, "N"],
    first: Int[Array, "R"],
    block: DraftBlock,
    lengths: Int[Array, "R"],
    sampling: Sampling,
    noise: Noise,
    draft_ids: Int[Array, "Vd"] | None = None,
) -> Verdict:
    """Judge the first `lengths[r]` drafts of every request jointly; everything as for `verify.verify_tokens`, in whose place it goes.

    The same streams are used at the same places: one uniform number per draft, one draw behind what is kept. Greedy requests get
    the same verdict from both. Unlike there, p and q are compared over the whole vocabulary at every verified token.

    A block without `logits` must have one-hot q (`log_q` 0); of other rows without them nothing is kept, and the next id is -1.
    """
    # As in `verify_tokens`: one set of bits for all that follows.
    target_logits = lax.optimization_barrier(target_logits)
    num_flat, block_size = target_logits.shape[0], block.ids.shape[1]
    step = jnp.arange(block_size, dtype=jnp.int32)
    judged_by = jnp.minimum(first[:, None] + step, num_flat - 1)
    scheduled = step < lengths[:, None]

    def greedy(_: None) -> Verdict:
        outcome = greedy_outcome(target_logits, first, block.ids, lengths)
        return Verdict(num_accepted=outcome.num_accepted, next_id=outcome.next_id)

    def stochastic(_: None) -> Verdict:
        temperature = sampling.temperature[row]
        floor = logit_floor(target_logits, sampling.take(row))
        normaliser = log_normaliser(target_logits, floor, temperature)
        slot = jnp.clip(jnp.arange(num_flat, dtype=jnp.int32) - first[row], 0, block_size - 1)
        log_p = log_prob_of(target_logits, block.ids[row, slot], floor, temperature, normaliser)[judged_by]
        # Rows of padding may be NaN; of what is not scheduled nothing may reach the numbers of what is.
        weight = joint_weights(jnp.where(scheduled, log_p - block.log_q, 0.0))

        p = probs(target_logits, floor, temperature, normaliser)
        q = _draft_probs(block, row, slot, sampling, draft_ids, p.shape[1])
        excess = jnp.maximum(weight[row, slot][:, None] * p - q, 0.0)
        mass = jnp.sum(excess, axis=1)
        # Stop k is passed by the number of draft k: the stop behind all drafts before k + 1, so that stop 0 needs none.
        chance = jnp.where(step + 1 < lengths[:, None], _stop_chance(jnp.roll(mass[judged_by], -1, axis=1), weight[:, 1:]), weight[:, 1:])
        passed = scheduled & (uniform(site_key(noise.key[:, None], Stream.ACCEPT, step), 0, 0) < chance)
        num_accepted = jnp.max(jnp.where(passed, step + 1, 0), axis=1)

        decides = jnp.minimum(first + num_accepted, num_flat - 1)
        own = (num_accepted == lengths) | (sampling.temperature == 0)
        residual = _normalised(excess[decides], mass[decides], p[decides])
        next_id = _draw_following(target_logits[decides].astype(jnp.float32), floor[decides], residual, own, num_accepted, sampling, noise)
        if block.logits is None:
            unknown_q = jnp.any(scheduled & (block.log_q != 0), axis=1)
            num_accepted, next_id = jnp.where(unknown_q, 0, num_accepted), jnp.where(unknown_q, -1, next_id)
        return Verdict(num_accepted=num_accepted, next_id=next_id)

    return lax.cond(jnp.all(sampling.temperature == 0), greedy, stochastic, None)


def _draw_following(
    logits: Float[Array, "R V"],
    floor: Float[Array, "R"],
    residual: Float[Array, "R V"],
    own: Bool[Array, "R"],
    num_accepted: Int[Array, "R"],
    sampling: Sampling,
    noise: Noise,
) -> Int[Array, "R"]:
    """The token behind the accepted drafts: from the target's own logits where `own`, from the residual elsewhere."""
    # A bonus token is drawn from the logits as they are, so that it is the token that plain decoding would draw.
    return draw(
        jnp.where(own[:, None], logits, jnp.log(residual)),
        jnp.where(own, floor, -jnp.inf),
        jnp.where(own, sampling.temperature, 1.0),
        noise.key,
        num_accepted,
        tile_stream=Stream.RESIDUAL_TILE,
        id_stream=Stream.RESIDUAL_ID,
    ).ids


def _draft_probs(
    block: DraftBlock,
    row: Int[Array, "K"],
    step: Int[Array, "K"],
    sampling: Sampling,
    draft_ids: Int[Array, "Vd"] | None,
    vocab_size: int,
) -> Float[Array, "K V"]:
    """q of the drafts at (request, step) over all ids; one-hot where the block has no logits."""
    if block.logits is None:
        one_hot = block.ids[row, step][:, None] == jnp.arange(vocab_size, dtype=jnp.int32)
        return one_hot.astype(jnp.float32)
    q = probs(block.logits[row, step], block.floor[row, step], sampling.temperature[row], block.log_normaliser[row, step])
    if draft_ids is None:
        return q
    # One scatter of columns for all requests: scatters are slow on a CPU.
    return jnp.zeros((vocab_size, q.shape[0]), q.dtype).at[draft_ids].set(q.T, unique_indices=True).T


def _stop_chance(mass: Float[Array, "*batch"], weight: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """S / (S + 1 - w); where both S and 1 - w are 0, the drafts behind are kept for certain, and 1 will do."""
    total = mass + (1 - weight)
    return jnp.where(total > 0, mass / jnp.where(total > 0, total, 1.0), 1.0)


def _normalised(excess: Float[Array, "*batch V"], mass: Float[Array, "*batch"], p: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
    # Where the excess has no mass, this stop is not the one that is taken, and p stands in.
    return jnp.where((mass > MIN_RESIDUAL_MASS)[..., None], excess / jnp.maximum(mass, MIN_RESIDUAL_MASS)[..., None], p)
