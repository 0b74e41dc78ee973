"""`markov_sample` as GPU kernels, by way of Triton: the sums of all tiles in one pass over U and W2, then a draw inside one tile.

A GPU has no order among its programs, so that the race of the TPU kernel is two steps: `_sums` writes largest value and sum of
exponentials per `COLUMNS` ids, plain JAX chooses each request's tile from these (a thousandth of the data), and `_pick` computes
the values of that tile again and draws the id. Where the logits are kept, `_pick` reads them.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import noise, two_level_draw
from pallas_kernels.two_level_draw import Entry, shift_of

COLUMNS = 128
"""Ids per program."""
MOST_ROWS = 128
"""Requests per program at most; at least 16, which is what the matrix units take."""


def _rank_padded(rank: int) -> int:
    return max(16, pl.next_power_of_2(rank))


def sweep(
    latent: jax.Array,
    base_logits: jax.Array,
    w2: jax.Array,
    tile_key: jax.Array,
    id_key: jax.Array,
    temperature: jax.Array,
    first_tile: jax.Array,
    tile_size: int,
    *,
    return_logits: bool,
    interpret: Any,
) -> tuple[Entry, jax.Array | None]:
    """As `reference.sweep`; logits only where asked for."""
    logits = jnp.zeros((1, *base_logits.shape), jnp.float32) if return_logits else None
    arguments = (latent, base_logits[None], w2, tile_key, id_key, temperature, first_tile)
    entry, logits = _token(jnp.int32(0), logits, *arguments, tile_size, interpret=interpret)
    return entry, None if logits is None else logits[0]


def block(
    anchor: jax.Array,
    base_logits: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    draft_ids: jax.Array | None,
    tile_key: jax.Array,
    id_key: jax.Array,
    temperature: jax.Array,
    tile_size: int,
    *,
    return_logits: bool,
    interpret: Any,
) -> tuple[Entry, jax.Array | None]:
    """G draws per request, left to right; arguments and results as of `api.markov_block`.

    Every step is given all of U and where in it to read, and writes its logits to their place: slices would be copies.
    """

    def step(carry: tuple[jax.Array, jax.Array | None], inputs: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, jax.Array | None], Entry]:
        previous, logits = carry
        place, tile_key, id_key = inputs
        arguments = (w1[previous], base_logits, w2, tile_key, id_key, temperature, jnp.int32(0), tile_size)
        entry, logits = _token(place, logits, *arguments, interpret=interpret)
        return (entry.ids if draft_ids is None else draft_ids[entry.ids], logits), entry

    places = jnp.arange(base_logits.shape[0], dtype=jnp.int32)
    start = anchor, jnp.zeros(base_logits.shape, jnp.float32) if return_logits else None
    (_, logits), entry = lax.scan(step, start, (places, tile_key, id_key))
    return entry, logits


def _token(
    place: jax.Array,
    logits: jax.Array | None,
    latent: jax.Array,
    base_logits: jax.Array,
    w2: jax.Array,
    tile_key: jax.Array,
    id_key: jax.Array,
    temperature: jax.Array,
    first_tile: jax.Array,
    tile_size: int,
    *,
    interpret: Any,
) -> tuple[Entry, jax.Array | None]:
    """A draw from `base_logits[place]` and its bias; `logits`, if there are any, with what was drawn from at `place`."""
    vocab_size = base_logits.shape[2]
    width = min(tile_size, vocab_size)
    if width % COLUMNS and vocab_size > width:
        raise ValueError(f"tile_size is {tile_size}; for GPU kernels allowed are multiples of {COLUMNS}, or one tile for all ids")
    largest, total, logits = _sums(place, logits, latent, base_logits, w2, temperature, interpret=interpret)
    tile_max, tile_sum = tiles_of_sums(largest, total, min(pl.cdiv(width, COLUMNS), largest.shape[1]))
    chosen = two_level_draw.choose_tile(tile_sum, tile_max, temperature, tile_key, first_tile)
    tiles = chosen.tile, chosen.tile - first_tile
    score, ids, value = _pick(place, logits, latent, base_logits, w2, *tiles, id_key, temperature, width, interpret=interpret)
    best = jnp.argmax(score, axis=1)[:, None]
    ids, value = (jnp.take_along_axis(each, best, axis=1)[:, 0] for each in (ids, value))
    return Entry(chosen.score, ids, value, chosen.log_sum), logits


def tiles_of_sums(largest: jax.Array, total: jax.Array, per_tile: int) -> tuple[jax.Array, jax.Array]:
    """Largest value and log-sum-exp per tile from those of its parts, of which there are `per_tile`."""
    padding = ((0, 0), (0, -largest.shape[1] % per_tile))
    largest = jnp.pad(largest, padding, constant_values=-jnp.inf).reshape(largest.shape[0], -1, per_tile)
    log_sum = jnp.log(jnp.pad(total, padding)).reshape(largest.shape) + shift_of(largest)
    return jnp.max(largest, axis=2), two_level_draw.log_sum_exp(log_sum)


def _sums(
    place: jax.Array,
    logits: jax.Array | None,
    latent: jax.Array,
    base_logits: jax.Array,
    w2: jax.Array,
    temperature: jax.Array,
    *,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Largest value and sum of exponentials relative to it, float32 [R, parts of `COLUMNS` ids]; logits are written in place."""
    _, num_rows, vocab_size = base_logits.shape
    rank = w2.shape[1]
    rows_each, rank_padded = min(MOST_ROWS, max(16, pl.next_power_of_2(num_rows))), _rank_padded(rank)
    # Float32 has no matrix units: its products are written out, and with all ranks at once there are not registers enough.
    ranks_each = min(rank_padded, 16) if w2.dtype == jnp.float32 else rank_padded
    num_parts = pl.cdiv(vocab_size, COLUMNS)
    keeps = logits is not None

    def kernel(place, latent, base, w2, temperature, *refs):
        largest_out, total_out = refs[keeps : keeps + 2]
        part, row_block = pl.program_id(0), pl.program_id(1)
        rows, columns = row_block * rows_each + jnp.arange(rows_each), part * COLUMNS + jnp.arange(COLUMNS)
        in_rows, in_columns = rows < num_rows, columns < vocab_size
        here = in_rows[:, None] & in_columns[None, :]

        def product(index: jax.Array, total: jax.Array) -> jax.Array:
            ranks = index * ranks_each + jnp.arange(ranks_each)
            in_ranks = ranks < rank
            weights = plgpu.load(w2.at[columns[:, None], ranks[None, :]], mask=in_columns[:, None] & in_ranks[None, :], other=0)
            inputs = plgpu.load(latent.at[rows[:, None], ranks[None, :]], mask=in_rows[:, None] & in_ranks[None, :], other=0.0)
            return total + two_level_draw.low_rank_bias(inputs, weights)

        bias = lax.fori_loop(0, rank_padded // ranks_each, product, jnp.zeros((rows_each, COLUMNS), jnp.float32))
        u = plgpu.load(base.at[place[0], rows[:, None], columns[None, :]], mask=here, other=0.0, eviction_policy="evict_first")
        found = u.astype(jnp.float32) + bias
        if keeps:
            plgpu.store(refs[-1].at[place[0], rows[:, None], columns[None, :]], found, mask=here)
        divisor = plgpu.load(temperature.at[rows], mask=in_rows, other=1.0)
        divisor = jnp.where(divisor == 0, 1.0, divisor)
        values = jnp.where(in_columns[None, :] & (found >= -jnp.inf), found / divisor[:, None], -jnp.inf)
        largest = jnp.max(values, axis=1)
        shift = shift_of(largest)
        total = jnp.sum(jnp.exp(values - shift[:, None]), axis=1)
        plgpu.store(largest_out.at[rows, part], largest, mask=in_rows)
        plgpu.store(total_out.at[rows, part], total, mask=in_rows)

    sums = jax.ShapeDtypeStruct((num_rows, num_parts), jnp.float32)
    kept = [] if logits is None else [logits]
    largest, total, *kept = pl.pallas_call(
        kernel,
        grid=(num_parts, pl.cdiv(num_rows, rows_each)),
        out_shape=[sums, sums, *(jax.ShapeDtypeStruct(each.shape, each.dtype) for each in kept)],
        input_output_aliases={5: 2} if keeps else {},
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=8 if rows_each > 32 else 4, num_stages=1),
        name="markov_sums",
    )(place[None], latent, base_logits, w2, temperature, *kept)
    return largest, total, kept[0] if kept else None


def _pick(
    place: jax.Array,
    logits: jax.Array | None,
    latent: jax.Array,
    base_logits: jax.Array,
    w2: jax.Array,
    tile: jax.Array,
    local_tile: jax.Array,
    id_key: jax.Array,
    temperature: jax.Array,
    width: int,
    *,
    interpret: Any,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Score, id and value of the best of every part of each request's tile, [R, parts]."""
    _, num_rows, vocab_size = base_logits.shape
    rank, rank_padded, num_parts = w2.shape[1], _rank_padded(w2.shape[1]), pl.cdiv(width, COLUMNS)
    source = base_logits if logits is None else logits

    def kernel(place, latent, source, w2, tile, local, key, temperature, score_out, id_out, value_out):
        row, part = pl.program_id(0), pl.program_id(1)
        offsets, ranks = part * COLUMNS + jnp.arange(COLUMNS), jnp.arange(rank_padded)
        columns = local[row] * width + offsets
        here = (columns < vocab_size) & (offsets < width)
        found = plgpu.load(source.at[place[0], row, columns], mask=here, other=0.0).astype(jnp.float32)
        if logits is None:
            in_ranks = ranks < rank
            weights = plgpu.load(w2.at[columns[:, None], ranks[None, :]], mask=here[:, None] & in_ranks[None, :], other=0)
            one = plgpu.load(latent.at[row, ranks], mask=in_ranks, other=0.0)
            one = one.astype(jnp.bfloat16 if w2.dtype == jnp.int8 else w2.dtype)
            found = found + jnp.sum(weights.astype(jnp.float32) * one.astype(jnp.float32)[None, :], axis=1)
        divisor = temperature[row]
        greedy = divisor == 0
        values = jnp.where(here & (found >= -jnp.inf), found / jnp.where(greedy, 1.0, divisor), -jnp.inf)
        ids = tile[row] * width + offsets
        variable = noise.gumbel((key[row, 0], key[row, 1]), tile[row], ids)
        inside = values + jnp.where(greedy, 0.0, variable)
        best = jnp.max(inside, axis=0)
        won = jnp.min(jnp.where(inside == best, offsets, width - 1), axis=0)
        score_out[row, part] = best
        id_out[row, part] = tile[row] * width + won
        value_out[row, part] = jnp.max(jnp.where(offsets == won, values, -jnp.inf), axis=0)

    shape = (num_rows, num_parts)
    return pl.pallas_call(
        kernel,
        grid=shape,
        out_shape=[jax.ShapeDtypeStruct(shape, kind) for kind in (jnp.float32, jnp.int32, jnp.float32)],
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=8, num_stages=1),
        name="markov_pick",
    )(place[None], latent, source, w2, tile, local_tile, id_key, temperature)
