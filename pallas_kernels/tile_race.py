"""The two-level draw inside a TPU kernel that walks the tiles of the vocabulary one after another.

What `two_level_draw.enter` does over a whole row, in one pass and with one tile on chip: the race remembers the values of the best
tile so far, and draws the id from them when the last tile has passed, so that random numbers for ids are made for one tile only.

Axes: N rows of a block, S ids of a tile. Everything about a row is a column [N, 1], as the vector unit has it.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import noise
from pallas_kernels.two_level_draw import shift_of

ROWS_AT_ONCE = 8


class Race(NamedTuple):
    """Refs of a race under way.

    Attributes:
      score: float32 [N, 1], best of the tiles so far, as of `two_level_draw.Entry`.
      tile: int32 [N, 1], that tile.
      values: float32 [N, S], the values of its ids.
      largest, total: float32 [N, 1]; `largest + log(total)` is the log-sum-exp of the tiles so far.
    """

    score: Any
    tile: Any
    values: Any
    largest: Any
    total: Any


def scratch(num_rows: int, width: int) -> list[Any]:
    """Scratch shapes of a `Race`, in its order."""
    column = pltpu.VMEM((num_rows, 1), jnp.float32)
    return [column, pltpu.VMEM((num_rows, 1), jnp.int32), pltpu.VMEM((num_rows, width), jnp.float32), column, column]


def cost(num_values: int, bytes_each: int, *, more_bytes: int = 0, flops: int = 0) -> pl.CostEstimate:
    """What a walk over `num_values` costs, for which `bytes_each` are moved: the compiler cannot look into a kernel."""
    return pl.CostEstimate(
        flops=8 * num_values + flops, bytes_accessed=bytes_each * num_values + more_bytes, transcendentals=2 * num_values
    )


def start(race: Race) -> None:
    """Before the first tile."""
    race.score[:] = jnp.full(race.score.shape, -jnp.inf, jnp.float32)
    race.tile[:] = jnp.zeros(race.tile.shape, jnp.int32)
    race.values[:] = jnp.full(race.values.shape, -jnp.inf, jnp.float32)
    race.largest[:] = jnp.full(race.largest.shape, -jnp.inf, jnp.float32)
    race.total[:] = jnp.zeros(race.total.shape, jnp.float32)


def enter(race: Race, values: jax.Array, tile: jax.Array, tile_key: noise.Key, greedy: jax.Array) -> None:
    """One tile: `values` [N, S] of its ids, its number in the whole vocabulary, and each row's key of the first level."""
    tile_max = jnp.max(values, axis=1, keepdims=True)
    tile_total = jnp.sum(jnp.exp(values - shift_of(tile_max)), axis=1, keepdims=True)
    tile_sum = jnp.log(tile_total) + shift_of(tile_max)
    score = jnp.where(greedy, tile_max, tile_sum + noise.gumbel(tile_key, tile, 0))
    better = score > race.score[:]
    race.score[:] = jnp.where(better, score, race.score[:])
    race.tile[:] = jnp.where(better, tile, race.tile[:])
    race.values[:] = jnp.where(better, values, race.values[:])
    largest = jnp.maximum(race.largest[:], tile_max)
    rescaled = race.total[:] * jnp.exp(race.largest[:] - shift_of(largest))
    # A tile without anything kept adds nothing, whatever the exponential of its shift would be.
    race.total[:] = rescaled + jnp.where(tile_max > -jnp.inf, tile_total * jnp.exp(tile_max - shift_of(largest)), 0.0)
    race.largest[:] = largest


def finish(race: Race, id_key: tuple[Any, Any], temperature: Any, outputs: tuple[Any, Any, Any, Any]) -> None:
    """Draw the ids and write an `Entry` to `outputs`: refs [N, 1] of score, id, value and log-sum.

    Args:
      id_key: refs uint32 [N, 1] of the two words of each row's key of the second level.
      temperature: ref [N, 1], read for who is greedy alone.
    """
    score_out, id_out, value_out, log_sum_out = outputs
    num_rows, width = race.values.shape
    score_out[:] = race.score[:]
    log_sum_out[:] = jnp.where(temperature[:] == 0, race.largest[:], jnp.log(race.total[:]) + shift_of(race.largest[:]))

    def draw(rows: Any) -> None:
        values, tile = race.values[rows], race.tile[rows]
        offset = lax.broadcasted_iota(jnp.int32, values.shape, 1)
        ids = tile * width + offset
        variable = noise.gumbel((id_key[0][rows], id_key[1][rows]), tile, ids)
        inside = values + jnp.where(temperature[rows] == 0, 0.0, variable)
        best = jnp.max(inside, axis=1, keepdims=True)
        won = jnp.min(jnp.where(inside == best, offset, width - 1), axis=1, keepdims=True)
        id_out[rows] = tile * width + won
        value_out[rows] = jnp.max(jnp.where(offset == won, values, -jnp.inf), axis=1, keepdims=True)

    # A few rows at a time: the hundred operations of a random number on a whole block would not fit in registers.
    whole, rest = divmod(num_rows, ROWS_AT_ONCE)

    def some(index: jax.Array, _: None) -> None:
        draw(pl.ds(pl.multiple_of(index * ROWS_AT_ONCE, ROWS_AT_ONCE), ROWS_AT_ONCE))

    if whole:
        lax.fori_loop(0, whole, some, None)
    if rest:
        draw(pl.ds(whole * ROWS_AT_ONCE, rest))
