"""W2 in int8: half the bytes of bfloat16, so that it stays on more chips (V = 151,936 at rank 256: 39 MB, also on TPU v5p)."""

import jax
import jax.numpy as jnp


def with_int8_w2(w1: jax.Array, w2: jax.Array) -> tuple[jax.Array, jax.Array]:
    """W1 [V', M] and W2 [V, M] of nearly the same bias, W2 as int8: one scale per rank, which W1 takes over.

    The draws know what they are drawn from, so that the output law stays the target's: only how often drafts are accepted can change.
    A head that makes its latent otherwise than by looking up W1 must multiply it by the scales itself: `w1` of ones gives them.
    """
    largest = jnp.max(jnp.abs(w2.astype(jnp.float32)), axis=0)
    scale = jnp.where(largest > 0, largest, 1.0) / 127
    return (w1.astype(jnp.float32) * scale).astype(w1.dtype), jnp.round(w2.astype(jnp.float32) / scale).astype(jnp.int8)
