"""One draw of drafted tokens, the same for every drafter: the numbers that the verifier reads are those that the token came from."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.protocols import TargetHead
from dspark_jax.sampling import Noise, Sampling, logit_floor
from dspark_jax.typing import Array, Float, Int, UInt32
from pallas_kernels.markov_sample import Draft, Filter
from pallas_kernels.noise import Stream
from pallas_kernels.two_level_draw import draw


class DraftDraw(NamedTuple):
    """Ids as the target counts them, and what `DraftBlock` reports of them."""

    ids: Array
    log_q: Array
    log_normaliser: Array
    floor: Array
    logits: Array


def draw_drafts(
    logits: Float[Array, "N Vd"], head: TargetHead, sampling: Sampling, key: UInt32[Array, "N 2"], place: Int[Array, "N"]
) -> DraftDraw:
    """One token per row from corrected draft logits.

    Args:
      sampling, key: one entry per row; keys are those of the round.
      place: of the token in its block, 0 to G - 1.
    """
    # The floor, the draw and the logits that the verifier reads must come from the same bits, not from three fusions.
    logits = jax.lax.optimization_barrier(logits)
    floor = logit_floor(logits, sampling)
    drawn = draw(logits, floor, sampling.temperature, key, place, tile_stream=Stream.DRAFT_TILE, id_stream=Stream.DRAFT_ID)
    ids = drawn.ids if head.draft_ids is None else head.draft_ids[drawn.ids]
    return DraftDraw(ids, drawn.log_prob, drawn.log_normaliser, floor, logits)


def draw_independent(logits: Float[Array, "R G Vd"], head: TargetHead, sampling: Sampling, noise: Noise) -> DraftDraw:
    """A block of tokens that do not depend on each other; fields [R, G]."""
    num_rows, block_size, width = logits.shape
    row = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), block_size)
    place = jnp.tile(jnp.arange(block_size, dtype=jnp.int32), num_rows)
    drafts = draw_drafts(logits.reshape(-1, width), head, sampling.take(row), noise.take(row).key, place)
    return DraftDraw(*(each.reshape(num_rows, block_size, *each.shape[1:]) for each in drafts))


def filters_of(sampling: Sampling) -> Filter:
    """Top-k and top-p of all requests, as the kernels want them."""
    active = jnp.any((sampling.temperature > 0) & ((sampling.top_k > 0) | (sampling.top_p < 1)))
    return Filter(active, lambda logits: logit_floor(logits, sampling))


def as_block(draft: Draft, head: TargetHead) -> DraftDraw:
    """Fields [R, G] of a draft whose fields are [G, R], with ids as the target counts them."""
    ids, log_q, log_normaliser, floor, logits = (each.swapaxes(0, 1) for each in draft if each is not None)
    return DraftDraw(ids if head.draft_ids is None else head.draft_ids[ids], log_q, log_normaliser, floor, logits)
