"""`rejection_sample` as GPU kernels, by way of Triton: each program walks a few thousand ids of one row.

A GPU has no order among its programs: each writes largest value and sum of exponentials per tile, plain JAX chooses the tile from
these, and draws inside it from the few values of that tile, which are computed again.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from pallas_kernels import two_level_draw
from pallas_kernels.rejection_sample.rows import ResidualRows, RowStats, residual_values
from pallas_kernels.two_level_draw import Entry, shift_of

TILES_EACH = 8
"""Tiles per program of `row_stats`."""
NO_ID = jnp.iinfo(jnp.int32).max


def row_stats(
    target_logits: jax.Array,
    ids: jax.Array,
    floor: jax.Array,
    temperature: jax.Array,
    first_tile: jax.Array,
    tile_size: int,
    *,
    interpret: Any,
) -> RowStats:
    """As `reference.row_stats`."""
    num_rows, vocab_size = target_logits.shape
    width = min(tile_size, vocab_size)
    step = pl.next_power_of_2(width)
    num_tiles = pl.cdiv(vocab_size, width)
    num_parts = pl.cdiv(num_tiles, TILES_EACH)

    def kernel(logits, ids, floor, temperature, first, largest_out, total_out, own_out, top_out, best_out):
        row, part = pl.program_id(0), pl.program_id(1)
        own_id, least, divisor = ids[row] - first[0] * width, floor[row], temperature[row]
        divisor = jnp.where(divisor == 0, 1.0, divisor)
        offsets = jnp.arange(step)

        def walk(index: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            largest, total, own, top, best = carry
            columns = (part * TILES_EACH + index) * width + offsets
            here = (columns < vocab_size) & (offsets < width)
            raw = plgpu.load(logits.at[row, columns], mask=here, other=-jnp.inf).astype(jnp.float32)
            values = jnp.where(raw >= least, raw / divisor, -jnp.inf)
            own = jnp.maximum(own, jnp.max(jnp.where(here & (columns == own_id), values, -jnp.inf), axis=0))
            tile_top = jnp.max(raw, axis=0)
            where_top = jnp.min(jnp.where(here & (raw == tile_top), columns, NO_ID), axis=0)
            best = jnp.where(tile_top > top, where_top, best)
            new = jnp.maximum(largest, jnp.max(values, axis=0))
            shift = shift_of(new)
            total = total * jnp.exp(largest - shift) + jnp.sum(jnp.exp(values - shift), axis=0)
            return new, total, own, jnp.maximum(top, tile_top), best

        none = jnp.float32(-jnp.inf)
        largest, total, own, top, best = lax.fori_loop(0, TILES_EACH, walk, (none, jnp.float32(0), none, none, jnp.int32(0)))
        largest_out[row, part], total_out[row, part], own_out[row, part] = largest, total, own
        top_out[row, part], best_out[row, part] = top, best

    shape = (num_rows, num_parts)
    largest, total, own, top, best = pl.pallas_call(
        kernel,
        grid=shape,
        out_shape=[jax.ShapeDtypeStruct(shape, kind) for kind in (*[jnp.float32] * 4, jnp.int32)],
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=3),
        name="row_stats",
    )(target_logits, ids, floor, temperature, jnp.reshape(first_tile, 1))
    log_sum = two_level_draw.log_sum_exp(jnp.log(total) + shift_of(largest))
    best = first_tile * width + jnp.take_along_axis(best, jnp.argmax(top, axis=1)[:, None], axis=1)[:, 0]
    return RowStats(jnp.where(temperature == 0, jnp.max(top, axis=1), log_sum), jnp.max(own, axis=1), best)


def residual_draw(
    target_logits: jax.Array,
    draft_logits: jax.Array | None,
    rows: ResidualRows,
    tile_key: jax.Array,
    id_key: jax.Array,
    first_tile: jax.Array,
    tile_size: int,
    *,
    interpret: Any,
) -> Entry:
    """As `reference.residual_draw`."""
    num_rows, vocab_size = rows.row.shape[0], target_logits.shape[1]
    width = min(tile_size, vocab_size)
    step, num_tiles = pl.next_power_of_2(width), pl.cdiv(vocab_size, width)

    def kernel(target, *refs):
        draft, refs = (refs[0], refs[1:]) if draft_logits is not None else (None, refs)
        *given, first, largest_out, total_out = refs
        row, tile = pl.program_id(0), pl.program_id(1)
        fields = ResidualRows(*(ref[row] for ref in given))
        fields = fields._replace(plain=fields.plain != 0)
        offsets = jnp.arange(step)
        columns = tile * width + offsets
        here = (columns < vocab_size) & (offsets < width)
        logits = plgpu.load(target.at[fields.row, columns], mask=here, other=-jnp.inf).astype(jnp.float32)
        found = None if draft is None else plgpu.load(draft.at[row, fields.draft_row, columns], mask=here, other=-jnp.inf)
        values = jnp.where(here, residual_values(logits, found, fields, first[0] * width + columns), -jnp.inf)
        largest = jnp.max(values, axis=0)
        largest_out[row, tile] = largest
        total_out[row, tile] = jnp.sum(jnp.exp(values - shift_of(largest)), axis=0)

    shape = (num_rows, num_tiles)
    given = rows._replace(plain=rows.plain.astype(jnp.int32))
    inputs = [target_logits, *([] if draft_logits is None else [draft_logits]), *given, jnp.reshape(first_tile, 1)]
    largest, total = pl.pallas_call(
        kernel,
        grid=shape,
        out_shape=[jax.ShapeDtypeStruct(shape, jnp.float32)] * 2,
        interpret=interpret,
        compiler_params=plgpu.CompilerParams(num_warps=4, num_stages=1),
        name="residual_sums",
    )(*inputs)
    tile_sum = jnp.log(total) + shift_of(largest)
    chosen = two_level_draw.choose_tile(tile_sum, largest, rows.temperature, tile_key, first_tile)

    columns = (chosen.tile - first_tile)[:, None] * width + jnp.arange(width, dtype=jnp.int32)[None]
    inside = jnp.minimum(columns, vocab_size - 1)
    logits = jnp.where(columns < vocab_size, target_logits[rows.row[:, None], inside].astype(jnp.float32), -jnp.inf)
    draft = None if draft_logits is None else draft_logits[jnp.arange(num_rows, dtype=jnp.int32)[:, None], rows.draft_row[:, None], inside]
    values = residual_values(logits, draft, jax.tree.map(lambda each: each[:, None], rows), first_tile * width + columns)
    values = jnp.where(columns < vocab_size, values, -jnp.inf)
    return two_level_draw.draw_inside(chosen, values, rows.temperature, id_key)
