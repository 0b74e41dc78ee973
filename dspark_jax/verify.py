"""Rejection sampling of a drafted block: which drafts are kept, and what follows them. The output law is the target's, exactly.

Draft k of a request, drawn from q_k, is accepted with probability min(1, p_k / q_k) given that the drafts before it were. The
first rejected one is replaced by a draw from norm(max(0, p_k - q_k)); behind the last verified draft comes a bonus token from the
target's own distribution. Source: Leviathan et al. 2023 and Chen et al. 2023; the paper's section 2.
"""

import jax.numpy as jnp
from jax import lax

from dspark_jax.protocols import DraftBlock, Verdict
from dspark_jax.sampling import Noise, Sampling, draw, greedy_ids, log_normaliser, log_prob_of, logit_floor, probs
from dspark_jax.typing import Array, Bool, Float, Int, typed
from pallas_kernels.noise import Stream, site_key, uniform

MIN_RESIDUAL_MASS = 1e-8


@typed
def accept_prob(log_p: Float[Array, "*batch"], log_q: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """min(1, p / q) of drawn ids; `log_q` is finite, because an id of probability 0 is never drawn."""
    return jnp.exp(jnp.minimum(log_p - log_q, 0.0))


@typed
def accept_probs(p: Float[Array, "K V"], q: Float[Array, "K V"], ids: Int[Array, "K"]) -> Float[Array, "K"]:
    """min(1, p / q) of one id per row; 0 for ids that q never draws."""
    p_id = jnp.take_along_axis(p, ids[:, None], axis=1)[:, 0]
    q_id = jnp.take_along_axis(q, ids[:, None], axis=1)[:, 0]
    return jnp.where(q_id > 0, jnp.minimum(p_id / jnp.where(q_id > 0, q_id, 1.0), 1.0), 0.0)


@typed
def residual_probs(p: Float[Array, "*batch V"], q: Float[Array, "*batch V"]) -> Float[Array, "*batch V"]:
    """norm(max(0, p - q)): what replaces a rejected draft. Where that has no mass (p == q), no draft is rejected, and p stands in."""
    excess = jnp.maximum(p - q, 0.0)
    mass = jnp.sum(excess, axis=-1, keepdims=True)
    return jnp.where(mass > MIN_RESIDUAL_MASS, excess / jnp.maximum(mass, MIN_RESIDUAL_MASS), p)


@typed
def outcome_probs(
    p: Float[Array, "K V"], q: Float[Array, "G V"], ids: Int[Array, "G"], length: Int[Array, ""] | int
) -> Float[Array, "K V"]:
    """P(num_accepted = a, next id = v | drafts `ids`), a over the rows (K = G + 1): what `exactness` enumerates.

    Args:
      p: the target's distributions: row k judges draft k, row `length` gives the bonus token.
      length: verified drafts, 0..G.
    """
    accept = accept_probs(p[:-1], q, ids)
    step = jnp.arange(p.shape[0], dtype=jnp.int32)
    reached = jnp.concatenate([jnp.ones_like(accept[:1]), jnp.cumprod(accept)])
    rejected = jnp.concatenate([1 - accept, jnp.zeros_like(accept[:1])])
    rejected = jnp.where(step < length, rejected, jnp.where(step == length, 1.0, 0.0))
    residual = jnp.concatenate([residual_probs(p[:-1], q), p[-1:]])
    next_probs = jnp.where((step < length)[:, None], residual, p)
    return (reached * rejected)[:, None] * next_probs


@typed
def verify_tokens(
    target_logits: Float[Array, "N V"],
    row: Int[Array, "N"],
    first: Int[Array, "R"],
    block: DraftBlock,
    lengths: Int[Array, "R"],
    sampling: Sampling,
    noise: Noise,
    draft_ids: Int[Array, "Vd"] | None = None,
) -> Verdict:
    """Judge the first `lengths[r]` drafts of every request.

    Request r owns the flat rows first[r] .. first[r] + lengths[r]: the anchor's row judges draft 0, and so on; the last gives
    the bonus token. Other rows are padding and are not looked at. The draft probabilities are the sampler's own, from `block`.
    One residual distribution per request is formed, at the row that decides. Where all requests are greedy, nothing random and
    no probability is computed.

    Args:
      target_logits: before temperature.
      row: the request of every flat row.
      first: flat row of each request's anchor; anything for requests that are not active (they have length 0).
      lengths: 0..G.
      noise: keys of this round. Acceptance and residual have their own streams.
      draft_ids: target id of each column of `block.logits`; None where these are all ids. q is 0 outside.

    A block without `logits` must have one-hot q (greedy or deterministic drafts, `log_q` 0); for other rows without them the next
    id after a rejection is -1.
    """
    # One set of bits for all that follows: computed anew in another fusion, the logit on the floor could fall below it.
    target_logits = lax.optimization_barrier(target_logits)
    num_flat, block_size = target_logits.shape[0], block.ids.shape[1]
    step = jnp.arange(block_size, dtype=jnp.int32)
    judged_by = jnp.minimum(first[:, None] + step, num_flat - 1)
    scheduled = step < lengths[:, None]

    def greedy(_: None) -> Verdict:
        return greedy_verdict(target_logits, first, block, lengths)

    def stochastic(_: None) -> Verdict:
        temperature = sampling.temperature[row]
        floor = logit_floor(target_logits, sampling.take(row))
        normaliser = log_normaliser(target_logits, floor, temperature)
        slot = jnp.clip(jnp.arange(num_flat, dtype=jnp.int32) - first[row], 0, block_size - 1)
        log_p = log_prob_of(target_logits, block.ids[row, slot], floor, temperature, normaliser)[judged_by]
        accept_key = site_key(noise.key[:, None], Stream.ACCEPT, step)
        accepted = uniform(accept_key, 0, 0) < accept_prob(log_p, block.log_q)
        num_accepted = _leading(scheduled & accepted)

        decides = jnp.minimum(first + num_accepted, num_flat - 1)
        logits = target_logits[decides].astype(jnp.float32)
        p = probs(logits, floor[decides], sampling.temperature, normaliser[decides])
        rejected_step = jnp.minimum(num_accepted, block_size - 1)
        rows = jnp.arange(num_accepted.shape[0], dtype=jnp.int32)
        residual = residual_probs(p, draft_probs(block, rows, rejected_step, sampling, draft_ids, logits.shape[1]))
        own = (num_accepted == lengths) | (sampling.temperature == 0)
        next_id = draw_following(logits, floor[decides], residual, own, num_accepted, sampling, noise)
        if block.logits is None:
            unknown_q = jnp.take_along_axis(block.log_q, rejected_step[:, None], axis=1)[:, 0] != 0
            next_id = jnp.where(unknown_q & ~own, -1, next_id)
        return Verdict(num_accepted=num_accepted, next_id=next_id)

    return lax.cond(jnp.all(sampling.temperature == 0), greedy, stochastic, None)


@typed
def greedy_verdict(target_logits: Float[Array, "N V"], first: Int[Array, "R"], block: DraftBlock, lengths: Int[Array, "R"]) -> Verdict:
    """The verdict where all requests are greedy: drafts are kept while they are what argmax would have written."""
    best = greedy_ids(target_logits)
    step = jnp.arange(block.ids.shape[1], dtype=jnp.int32)
    judged_by = jnp.minimum(first[:, None] + step, target_logits.shape[0] - 1)
    num_accepted = _leading((step < lengths[:, None]) & (best[judged_by] == block.ids))
    return Verdict(num_accepted=num_accepted, next_id=best[jnp.minimum(first + num_accepted, target_logits.shape[0] - 1)])


@typed
def draw_following(
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


@typed
def draft_probs(
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


def _leading(kept: Array) -> Int[Array, "R"]:
    return jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1)
