"""Rejection sampling of a drafted block: which drafts are kept, and what follows them. The output law is the target's, exactly.

Draft k of a request, drawn from q_k, is accepted with probability min(1, p_k / q_k) given that the drafts before it were. The
first rejected one is replaced by a draw from norm(max(0, p_k - q_k)); behind the last verified draft comes a bonus token from the
target's own distribution. Source: Leviathan et al. 2023 and Chen et al. 2023; the paper's section 2.
"""

import jax.numpy as jnp
from jax import lax

from dspark_jax.protocols import DraftBlock, Verdict
from dspark_jax.sampling import Noise, Sampling, logit_floor
from dspark_jax.typing import Array, Float, Int, typed
from pallas_kernels.dispatch import Backend
from pallas_kernels.rejection_sample import MIN_RESIDUAL_MASS, DraftRows, rejection_sample


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
    backend: Backend = "auto",
) -> Verdict:
    """Judge the first `lengths[r]` drafts of every request: `pallas_kernels.rejection_sample` with the floors of the target's rows.

    Request r owns the flat rows first[r] .. first[r] + lengths[r]: the anchor's row judges draft 0, and so on; the last gives
    the bonus token. Other rows are padding and are not looked at. The draft probabilities are the sampler's own, from `block`.

    Args:
      target_logits: before temperature.
      row: the request of every flat row.
      first: flat row of each request's anchor; anything for requests that are not active (they have length 0).
      lengths: 0..G.
      noise: keys of this round. Acceptance and residual have their own streams.
      draft_ids: target id of each column of `block.logits`; None where these are all ids. q is 0 outside.
      backend: see `pallas_kernels.dispatch`.

    A block without `logits` must have one-hot q (greedy or deterministic drafts, `log_q` 0); for other rows without them the next
    id after a rejection is -1.
    """
    # One set of bits for the floor and for what is held against it.
    target_logits = lax.optimization_barrier(target_logits)
    outcome = rejection_sample(
        target_logits,
        row,
        first,
        block.ids,
        block.log_q,
        lengths,
        noise.key,
        sampling.temperature,
        draft=None if block.logits is None else DraftRows(block.logits, block.log_normaliser, block.floor),
        floor=logit_floor(target_logits, sampling.take(row)),
        draft_ids=draft_ids,
        backend=backend,
    )
    return Verdict(num_accepted=outcome.num_accepted, next_id=outcome.next_id)
