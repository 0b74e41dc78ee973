"""`markov_sample` in plain JAX: what the kernels are held to, and what runs where there is none."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import two_level_draw
from pallas_kernels.two_level_draw import Entry


def sweep(
    latent: jax.Array,
    base_logits: jax.Array,
    w2: jax.Array,
    tile_key: jax.Array,
    id_key: jax.Array,
    temperature: jax.Array,
    first_tile: jax.Array,
    tile_size: int,
    floor_of: Callable[[jax.Array], jax.Array] | None = None,
) -> tuple[Entry, jax.Array, jax.Array]:
    """One draw per row from softmax of (`base_logits` [R, V] + `latent` [R, M] W2) / `temperature`, those logits, and their floors.

    Args:
      w2: [V, M], a row per id, as embeddings and checkpoints have it.
      tile_key, id_key: uint32 [R, 2], of the two levels of the draw.
      first_tile: int32, number of the first tile of this part of the vocabulary.
      floor_of: gives the logit that an entry of each row must reach to be kept; None: all are.
    """
    bias = two_level_draw.low_rank_bias(latent, w2)
    # The floor, the draw and the logits that the verifier reads must come from the same bits, not from three fusions.
    logits = lax.optimization_barrier(base_logits.astype(jnp.float32) + bias)
    floor = jnp.full(temperature.shape, -jnp.inf, jnp.float32) if floor_of is None else floor_of(logits)
    entry = two_level_draw.enter(logits, floor, temperature, tile_key, id_key, first_tile=first_tile, tile_size=tile_size)
    return entry, logits, floor
