"""One draw of drafted tokens, the same for every drafter: the numbers that the verifier reads are those that the token came from."""

from typing import NamedTuple

import jax

from dspark_jax.protocols import TargetHead
from dspark_jax.sampling import Sampling, draw, logit_floor
from dspark_jax.typing import Array, Float, Int, UInt32
from pallas_kernels.noise import Stream


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
