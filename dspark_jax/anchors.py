"""Training batches: texts as the frozen target reads them, and anchors where blocks begin.

Anchors are drawn uniformly, without replacement, among the positions that a drafter would meet as anchors. A position is a valid
anchor where it and the token behind it both carry loss: the target wrote both, the anchor and the first token to predict. The first
answer token is therefore an anchor at most, never a label. Source: section 4.1 of the DSpark paper (random anchor blocks).
"""

import jax
import jax.numpy as jnp
from jaxtyping import PRNGKeyArray

from dspark_jax.protocols import FlatTokens, Target, TrainBatch
from dspark_jax.typing import Array, Bool, Float, Int, Params, typed


@typed
def valid_anchors(loss_mask: Bool[Array, "B S"], segment: Int[Array, "B S"] | None = None) -> Bool[Array, "B S-1"]:
    """The positions 0..S-2 at which a block may begin: they and their successors carry loss, in the same text."""
    both = loss_mask[:, :-1] & loss_mask[:, 1:]
    return both if segment is None else both & (segment[:, :-1] == segment[:, 1:])


@typed
def select_anchors(
    loss_mask: Bool[Array, "B S"], uniforms: Float[Array, "B S-1"], num_anchors: int, segment: Int[Array, "B S"] | None = None
) -> tuple[Int[Array, "B {num_anchors}"], Bool[Array, "B {num_anchors}"]]:
    """The valid positions with the smallest uniforms: a uniform choice of `num_anchors` without replacement, per sequence.

    Args:
      loss_mask: True on the tokens to learn from.
      uniforms: one number in [0, 1) per candidate position.
      num_anchors: A, at least 1; where a sequence has fewer valid positions, all of them are taken.
      segment: as of `TrainBatch`; the anchors of a row are then drawn among all of its texts.

    Returns:
      anchors, ascending, 0 where not kept; and keep, which of the A places hold an anchor (always a prefix).

    Raises:
      ValueError: `num_anchors` is less than 1.
    """
    if num_anchors < 1:
        raise ValueError(f"num_anchors is {num_anchors}; at least 1 anchor per sequence is needed")
    num_rows, length = loss_mask.shape
    valid = valid_anchors(loss_mask, segment)
    num_taken = min(num_anchors, length - 1)
    _, order = jax.lax.top_k(-jnp.where(valid, uniforms, 2.0), num_taken)
    order = jnp.pad(order.astype(jnp.int32), ((0, 0), (0, num_anchors - num_taken)))
    num_kept = jnp.minimum(jnp.sum(valid, axis=1, dtype=jnp.int32), num_anchors)
    keep = jnp.arange(num_anchors, dtype=jnp.int32) < num_kept[:, None]
    ascending = jnp.sort(jnp.where(keep, order, length), axis=1)
    return jnp.where(keep, ascending, 0), keep


@typed
def sample_anchors(
    rng: PRNGKeyArray, loss_mask: Bool[Array, "B S"], num_anchors: int, segment: Int[Array, "B S"] | None = None
) -> tuple[Int[Array, "B {num_anchors}"], Bool[Array, "B {num_anchors}"]]:
    """`select_anchors` with uniforms drawn from `rng`; the whole batch draws at once, so that devices never share a stream."""
    num_rows, length = loss_mask.shape
    return select_anchors(loss_mask, jax.random.uniform(rng, (num_rows, length - 1), jnp.float32), num_anchors, segment)


def read_batch(
    target: Target,
    target_params: Params,
    taps: tuple[int, ...],
    ids: Int[Array, "B S"],
    loss_mask: Bool[Array, "B S"],
    anchors: Int[Array, "B A"],
    keep: Bool[Array, "B A"],
    segment: Int[Array, "B S"] | None = None,
) -> TrainBatch:
    """A training batch from texts: the frozen target reads them once, and no gradient flows into what it says."""
    num_rows, length = ids.shape
    start = jnp.zeros(num_rows, jnp.int32)
    # Padding stands behind the text, where a causal target and the blocks never look, so it is read like the rest.
    tokens = FlatTokens.grid(ids, start, start + length) if segment is None else FlatTokens.packed(ids, segment)
    with jax.named_scope("target"):
        last_hidden, features, _ = target.forward(jax.lax.stop_gradient(target_params), None, tokens, taps)
    return TrainBatch(
        ids=ids,
        loss_mask=loss_mask,
        features=jax.lax.stop_gradient(features.reshape(num_rows, length, features.shape[-1])),
        last_hidden=jax.lax.stop_gradient(last_hidden.reshape(num_rows, length, -1)),
        anchors=anchors,
        keep=keep,
        segment=segment,
    )


__all__ = ["read_batch", "sample_anchors", "select_anchors", "valid_anchors"]
