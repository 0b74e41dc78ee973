"""Keys and values of committed positions, with a length per request.

Every request has its own length, so that requests which accept different numbers of drafts never share one. Writing past the
committed length and forgetting it again (`roll_back`) is how a verification's rejected drafts disappear: what lies beyond a
query's position is masked, and the next round overwrites it.

A layer that looks back over a window alone may keep its slots as a ring: position p lies in slot p mod T. T must be at least
window + the positions that one pass may write - 1 (`ring_slots`), or a rejected draft would lie where a live key should [C2].
A ring can be rolled back by what the last pass wrote, and no further: what lay there before is overwritten.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from flax import struct

from dspark_jax.typing import Array, Bool, Float, Int, typed


@struct.dataclass
class KVCache:
    """Keys and values, one array for every layer that keeps its own; their heads and slots may differ from layer to layer.

    Attributes:
      length: positions of each request that hold something valid.
    """

    keys: tuple[Float[Array, "R K T E"], ...]
    values: tuple[Float[Array, "R K T E"], ...]
    length: Int[Array, "R"]

    @property
    def num_slots(self) -> int:
        """T: positions that fit. That is what the layers that look back over everything hold; rings hold no more."""
        return max(keys.shape[2] for keys in self.keys)


@dataclasses.dataclass(frozen=True)
class LayerSlots:
    """Sizes of one layer's keys and values: its key heads, the slots of each, and their width."""

    num_kv_heads: int
    num_slots: int
    head_dim: int


def empty_layers(num_rows: int, layers: Sequence[LayerSlots], dtype: Any) -> KVCache:
    """A cache of zeros. Bytes: 2 x rows x size of dtype x the sum over layers of kv heads x slots x head_dim."""

    def zeros() -> tuple[Array, ...]:
        return tuple(jnp.zeros((num_rows, layer.num_kv_heads, layer.num_slots, layer.head_dim), dtype) for layer in layers)

    return KVCache(keys=zeros(), values=zeros(), length=jnp.zeros((num_rows,), jnp.int32))


def empty_cache(num_layers: int, num_rows: int, num_kv_heads: int, num_slots: int, head_dim: int, dtype: Any) -> KVCache:
    """A cache of zeros whose layers are all alike."""
    return empty_layers(num_rows, [LayerSlots(num_kv_heads, num_slots, head_dim)] * num_layers, dtype)


@typed
def write(
    cached: Float[Array, "R K T E"],
    new: Float[Array, "N K E"],
    row: Int[Array, "N"],
    position: Int[Array, "N"],
    valid: Bool[Array, "N"],
    ring: bool = False,
) -> Float[Array, "R K T E"]:
    """Put every valid token's head vectors at its request's position. Invalid tokens are dropped.

    So are positions beyond T, unless the slots are a `ring`. In one pass no request may write more than T positions.
    """
    num_slots = cached.shape[2]
    slot = jnp.where(valid, position % num_slots if ring else position, num_slots)
    return cached.at[row, :, slot].set(new.astype(cached.dtype), mode="drop")


def ring_slots(window: int, writes_per_pass: int, max_len: int) -> int:
    """T of a ring: enough that nothing a pass writes, kept or rolled back, lies on a key that a query of it or of the next may see."""
    return min(window + writes_per_pass, max_len)


@typed
def key_positions(newest: Int[Array, "R"], num_slots: int) -> Int[Array, "R {num_slots}"]:
    """The position whose key each slot of a ring holds, once position `newest[r]` is written; negative where it holds none.

    It is the largest position up to `newest` that falls on the slot. Without a wrap (T above every position) it is the slot itself.
    """
    slot = jnp.arange(num_slots, dtype=jnp.int32)
    return newest[:, None] - (newest[:, None] - slot) % num_slots


@typed
def newest_positions(row: Int[Array, "N"], position: Int[Array, "N"], valid: Bool[Array, "N"], num_rows: int) -> Int[Array, "{num_rows}"]:
    """The last position that a pass writes for each request; -1 where it writes none."""
    return jnp.full((num_rows,), -1, jnp.int32).at[row].max(jnp.where(valid, position, -1))


@typed
def extend_length(length: Int[Array, "R"], row: Int[Array, "N"], position: Int[Array, "N"], valid: Bool[Array, "N"]) -> Int[Array, "R"]:
    """Lengths after the tokens were written."""
    return length.at[row].max(jnp.where(valid, position + 1, 0))


@typed
def roll_back(cache: KVCache, length: Int[Array, "R"]) -> KVCache:
    """Forget everything from position `length[r]` on."""
    return dataclasses.replace(cache, length=jnp.minimum(cache.length, length))
