"""Keys and values of committed positions, with a length per request.

Every request has its own length, so that requests which accept different numbers of drafts never share one. Writing past the
committed length and forgetting it again (`roll_back`) is how a verification's rejected drafts disappear: what lies beyond a
query's position is masked, and the next round overwrites it.
"""

import dataclasses
from typing import Any

import jax.numpy as jnp
from flax import struct

from dspark_jax.typing import Array, Bool, Float, Int, typed


@struct.dataclass
class KVCache:
    """Attributes: keys and values, one array per layer; length: positions of each request that hold something valid."""

    keys: tuple[Float[Array, "R K T E"], ...]
    values: tuple[Float[Array, "R K T E"], ...]
    length: Int[Array, "R"]

    @property
    def num_slots(self) -> int:
        """T: positions that fit."""
        return self.keys[0].shape[2]


def empty_cache(num_layers: int, num_rows: int, num_kv_heads: int, num_slots: int, head_dim: int, dtype: Any) -> KVCache:
    """A cache of zeros. Bytes: 2 x layers x rows x kv heads x slots x head_dim x size of dtype."""
    shape = (num_rows, num_kv_heads, num_slots, head_dim)
    return KVCache(
        keys=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        values=tuple(jnp.zeros(shape, dtype) for _ in range(num_layers)),
        length=jnp.zeros((num_rows,), jnp.int32),
    )


@typed
def write(
    cached: Float[Array, "R K T E"],
    new: Float[Array, "N K E"],
    row: Int[Array, "N"],
    position: Int[Array, "N"],
    valid: Bool[Array, "N"],
) -> Float[Array, "R K T E"]:
    """Put every valid token's head vectors at its request's position. Invalid tokens and positions beyond T are dropped."""
    slot = jnp.where(valid, position, cached.shape[2])
    return cached.at[row, :, slot].set(new.astype(cached.dtype), mode="drop")


@typed
def extend_length(length: Int[Array, "R"], row: Int[Array, "N"], position: Int[Array, "N"], valid: Bool[Array, "N"]) -> Int[Array, "R"]:
    """Lengths after the tokens were written."""
    return length.at[row].max(jnp.where(valid, position + 1, 0))


@typed
def roll_back(cache: KVCache, length: Int[Array, "R"]) -> KVCache:
    """Forget everything from position `length[r]` on."""
    return dataclasses.replace(cache, length=jnp.minimum(cache.length, length))
