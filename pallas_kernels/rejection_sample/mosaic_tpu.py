"""`rejection_sample` as TPU kernels: each of its two passes walks the tiles of the vocabulary for a block of rows."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tile_race
from pallas_kernels.rejection_sample.rows import ResidualRows, RowStats, residual_values
from pallas_kernels.tile_race import Race
from pallas_kernels.two_level_draw import Entry, shift_of

MOST_ROWS = 256
"""Rows of a block: as many as keep the streamed tiles within the few MiB that a kernel has without asking."""


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
    num_tiles, rows_each = pl.cdiv(vocab_size, width), min(MOST_ROWS, num_rows)

    def kernel(first, logits, ids, floor, temperature, log_sum_out, own_out, best_out, largest, total, top):
        tile = pl.program_id(1)

        @pl.when(tile == 0)
        def _() -> None:
            for ref in (largest, top, own_out):
                ref[:] = jnp.full(ref.shape, -jnp.inf, jnp.float32)
            total[:] = jnp.zeros(total.shape, jnp.float32)
            best_out[:] = jnp.zeros(best_out.shape, jnp.int32)

        offset = lax.broadcasted_iota(jnp.int32, logits.shape, 1)
        # Behind the end of the vocabulary a tile holds whatever was there.
        raw = jnp.where(tile * width + offset < vocab_size, logits[:].astype(jnp.float32), -jnp.inf)
        column = (first[0] + tile) * width + offset
        divisor = jnp.where(temperature[:] == 0, 1.0, temperature[:])
        values = jnp.where(raw >= floor[:], raw / divisor, -jnp.inf)
        own_out[:] = jnp.maximum(own_out[:], jnp.max(jnp.where(column == ids[:], values, -jnp.inf), axis=1, keepdims=True))

        tile_top = jnp.max(raw, axis=1, keepdims=True)
        where_top = jnp.min(jnp.where(raw == tile_top, column, jnp.iinfo(jnp.int32).max), axis=1, keepdims=True)
        best_out[:] = jnp.where(tile_top > top[:], where_top, best_out[:])
        top[:] = jnp.maximum(top[:], tile_top)

        tile_max = jnp.max(values, axis=1, keepdims=True)
        new = jnp.maximum(largest[:], tile_max)
        shift = shift_of(new)
        total[:] = total[:] * jnp.exp(largest[:] - shift) + jnp.sum(jnp.exp(values - shift), axis=1, keepdims=True)
        largest[:] = new

        @pl.when(tile == num_tiles - 1)
        def _() -> None:
            log_sum_out[:] = jnp.where(temperature[:] == 0, top[:], jnp.log(total[:]) + shift)

    column = pl.BlockSpec((rows_each, 1), lambda n, t, first: (n, 0))
    scratch = pltpu.VMEM((rows_each, 1), jnp.float32)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(pl.cdiv(num_rows, rows_each), num_tiles),
        in_specs=[pl.BlockSpec((rows_each, width), lambda n, t, first: (n, t)), column, column, column],
        out_specs=[column] * 3,
        scratch_shapes=[scratch] * 3,
    )
    outputs = pl.pallas_call(
        kernel,
        grid_spec=grid_spec,
        out_shape=[jax.ShapeDtypeStruct((num_rows, 1), kind) for kind in (jnp.float32, jnp.float32, jnp.int32)],
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="row_stats",
    )(jnp.reshape(first_tile, 1), target_logits, ids[:, None], floor[:, None], temperature[:, None])
    return RowStats(*(each[:, 0] for each in outputs))


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
    """As `reference.residual_draw`.

    The rows that decide are gathered before: memory is laid out in groups of rows, of which a block cannot pick single ones.
    """
    num_rows, vocab_size = rows.row.shape[0], target_logits.shape[1]
    width = min(tile_size, vocab_size)
    num_tiles, rows_each = pl.cdiv(vocab_size, width), min(MOST_ROWS, num_rows)
    num_columns = len(ResidualRows._fields)

    def kernel(first, target, *refs):
        draft, refs = (refs[0], refs[1:]) if draft_logits is not None else (None, refs)
        given = ResidualRows(*refs[:num_columns])
        tile_key_0, tile_key_1, id_key_0, id_key_1, *outputs = refs[num_columns : num_columns + 8]
        race = Race(*refs[-len(Race._fields) :])
        tile = pl.program_id(1)

        @pl.when(tile == 0)
        def _() -> None:
            tile_race.start(race)

        offset = lax.broadcasted_iota(jnp.int32, target.shape, 1)
        number = first[0] + tile
        fields = ResidualRows(*(ref[:] for ref in given))._replace(plain=given.plain[:] != 0)
        values = residual_values(target[:].astype(jnp.float32), None if draft is None else draft[:], fields, number * width + offset)
        # Behind the end of the vocabulary a tile holds whatever was there.
        values = jnp.where(tile * width + offset < vocab_size, values, -jnp.inf)
        tile_race.enter(race, values, number, (tile_key_0[:], tile_key_1[:]), given.temperature[:] == 0)

        @pl.when(tile == num_tiles - 1)
        def _() -> None:
            tile_race.finish(race, (id_key_0, id_key_1), given.temperature, tuple(outputs))

    column = pl.BlockSpec((rows_each, 1), lambda n, t, first: (n, 0))
    wide = pl.BlockSpec((rows_each, width), lambda n, t, first: (n, t))
    given = rows._replace(plain=rows.plain.astype(jnp.int32))
    inputs = [target_logits[rows.row]]
    if draft_logits is not None:
        inputs.append(draft_logits[jnp.arange(num_rows, dtype=jnp.int32), rows.draft_row])
    columns = [*given, tile_key[:, 0], tile_key[:, 1], id_key[:, 0], id_key[:, 1]]
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(pl.cdiv(num_rows, rows_each), num_tiles),
        in_specs=[wide] * len(inputs) + [column] * len(columns),
        out_specs=[column] * 4,
        scratch_shapes=tile_race.scratch(rows_each, width),
    )
    kinds = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    outputs = pl.pallas_call(
        kernel,
        grid_spec=grid_spec,
        out_shape=[jax.ShapeDtypeStruct((num_rows, 1), kind) for kind in kinds],
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("parallel", "arbitrary")),
        name="residual_draw",
    )(jnp.reshape(first_tile, 1), *inputs, *(each[:, None] for each in columns))
    return Entry(*(each[:, 0] for each in outputs))
