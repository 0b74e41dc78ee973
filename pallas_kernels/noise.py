"""Counter-based random bits: Threefry-2x32 with 20 rounds, in adds, xors and rotates, the same bits in every backend.

A random number is a pure function of where it is used, never of when: seed, request, the request's own round, stream, position,
logical tile and id. So tokens do not depend on slots, batch-mates, padding, meshes or kernels. Everything here is elementwise
and broadcasts, without gathers or dynamic shapes, and so runs inside a Pallas kernel too.

A key is a uint32 array [..., 2], or the pair of its words, as kernels hold it. Source of the cipher: Salmon, Moraes, Dror and
Shaw, "Parallel random numbers: as easy as 1, 2, 3", SC 2011.
"""

import enum
import functools
from typing import TypeAlias

import jax
import jax.numpy as jnp
from jax import lax

Key: TypeAlias = jax.Array | tuple[jax.Array, jax.Array]

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = 0x1BD11BDA


class Stream(enum.IntEnum):
    """What a random number is for. The two levels of a draw (tile, then id in the tile) have a stream each.

    `PROBE` chooses rounds, and requests in them, that are verified in full to learn from; it decides about no token.
    """

    DRAFT_TILE = 0
    DRAFT_ID = 1
    ACCEPT = 2
    RESIDUAL_TILE = 3
    RESIDUAL_ID = 4
    PROBE = 5


def threefry2x32(key: Key, counter_0: jax.Array | int, counter_1: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """The two uint32 words of Threefry-2x32-20 under `key` at a counter; keys and counters broadcast."""
    return _cipher(*_words(key), _as_uint32(counter_0), _as_uint32(counter_1))


def seed_key(seed: int) -> jax.Array:
    """The key [2] of a seed.

    Raises:
      ValueError: the seed is not in 0..2**64 - 1.
    """
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed is {seed}; allowed are integers from 0 to 2**64 - 1")
    return jnp.array([seed & 0xFFFFFFFF, seed >> 32], dtype=jnp.uint32)


def round_key(seed: int | jax.Array, request_id: jax.Array | int, round_index: jax.Array | int) -> jax.Array:
    """The key [..., 2] of one round of one request; `seed` is an integer or what `seed_key` made of it."""
    root = seed_key(seed) if isinstance(seed, int) else seed
    return jnp.stack(threefry2x32(root, request_id, round_index), axis=-1)


def site_words(key: Key, stream: Stream, position: jax.Array | int) -> tuple[jax.Array, jax.Array]:
    """The two words of the key of one place in a round: what a kernel uses instead of `site_key`."""
    return threefry2x32(key, int(stream), position)


def site_key(key: Key, stream: Stream, position: jax.Array | int) -> jax.Array:
    """The key [..., 2] of one place in a round: `position` counts the tokens of the round (drafts from 0)."""
    return jnp.stack(site_words(key, stream, position), axis=-1)


def uniform(key: Key, tile: jax.Array | int, index: jax.Array | int) -> jax.Array:
    """Float32 from the open interval (0, 1): a multiple of 2**-23 plus 2**-24, so that neither end is ever reached."""
    bits, _ = threefry2x32(key, tile, index)
    return (_to_float(bits >> jnp.uint32(9)) + 0.5) * 2.0**-23


def gumbel(key: Key, tile: jax.Array | int, index: jax.Array | int) -> jax.Array:
    """Standard Gumbel float32, between -2.9 and 22.9.

    All 32 bits count: the winners of a race come from the end where the exponential is small, and on the grid of `uniform` the
    winners among a tile of a thousand equal ids would tie once in some thousand draws.
    """
    bits, _ = threefry2x32(key, tile, index)
    coarse = _to_float(bits >> jnp.uint32(9)) * 2.0**-23
    fine = (_to_float(bits & jnp.uint32(511)) + 0.5) * 2.0**-32
    share = jnp.minimum(coarse + fine, 1.0 - 2.0**-24)
    # -log1p(-share) by a logarithm that every backend has to the last bits: the error of 1 - share is divided out again.
    rest = 1.0 - share
    exponential = jnp.where(rest == 1.0, share, -jnp.log(rest) * (share / jnp.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -jnp.log(exponential)


# Compiled as a whole where it is called outside of any trace, where a hundred little operations would be compiled one by one.
@functools.partial(jax.jit, inline=True)
def _cipher(key_0: jax.Array, key_1: jax.Array, counter_0: jax.Array, counter_1: jax.Array) -> tuple[jax.Array, jax.Array]:
    schedule = (key_0, key_1, key_0 ^ key_1 ^ jnp.uint32(_PARITY))
    x_0, x_1 = counter_0 + key_0, counter_1 + key_1
    for group in range(5):
        for distance in _ROTATIONS[group % 2]:
            x_0 = x_0 + x_1
            x_1 = ((x_1 << jnp.uint32(distance)) | (x_1 >> jnp.uint32(32 - distance))) ^ x_0
        x_0 = x_0 + schedule[(group + 1) % 3]
        x_1 = x_1 + schedule[(group + 2) % 3] + jnp.uint32(group + 1)
    return x_0, x_1


def _words(key: Key) -> tuple[jax.Array, jax.Array]:
    if isinstance(key, tuple):
        return _as_uint32(key[0]), _as_uint32(key[1])
    return lax.index_in_dim(key, 0, axis=-1, keepdims=False), lax.index_in_dim(key, 1, axis=-1, keepdims=False)


def _as_uint32(value: jax.Array | int) -> jax.Array:
    return jnp.uint32(value) if isinstance(value, int) else jnp.asarray(value).astype(jnp.uint32)


def _to_float(bits: jax.Array) -> jax.Array:
    # By way of int32: the TPU has no conversion from uint32, and every value here is below 2**23.
    return bits.astype(jnp.int32).astype(jnp.float32)
