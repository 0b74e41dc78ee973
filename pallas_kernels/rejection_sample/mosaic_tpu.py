"""`rejection_sample` as TPU kernels: each of its two passes walks the tiles of the vocabulary for a block of rows.

The first pass streams all rows of target logits. The second copies from main memory what decides and nothing else: each request's row
of draft logits, and its row of target logits where those are float32. Memory is laid out in groups of eight rows, of which a row of
16-bit numbers cannot be copied alone, so that there the whole group is.
"""

import math
from collections.abc import Callable, Iterator
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
"""Rows of a block of the first pass: as many as keep the streamed tiles within the few MiB that a kernel has without asking."""

GROUP = 8
"""Rows that lie together in memory, and requests of a block of the second pass."""

LANES = 128
"""Numbers of a row that lie together in memory: copies begin and end between them."""

TILES_PER_COPY = 8
"""Tiles of a row that are copied at once: 128 KiB of a group of 16-bit rows."""


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
        cost_estimate=tile_race.cost(num_rows * vocab_size, target_logits.dtype.itemsize),
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

    Logits are padded first where the vocabulary is no multiple of `LANES`, or 16-bit rows none of `GROUP`.
    """
    num_rows, vocab_size = rows.row.shape[0], target_logits.shape[1]
    width, rows_each = min(tile_size, vocab_size), min(GROUP, num_rows)
    in_groups = target_logits.dtype != jnp.float32
    sources = [_padded(target_logits, GROUP if in_groups else 1)]
    if draft_logits is not None:
        # Tokens first, as they were drawn: there the rows of eight requests lie together.
        sources.append(_padded(draft_logits.astype(jnp.float32).swapaxes(0, 1), 1))

    unit = math.lcm(width, LANES)
    chunk_size, padded_size = unit * max(1, TILES_PER_COPY * width // unit), sources[0].shape[-1]
    num_blocks, num_chunks = pl.cdiv(num_rows, rows_each), pl.cdiv(padded_size, chunk_size)
    bytes_each = (GROUP if in_groups else 1) * target_logits.dtype.itemsize + (len(sources) - 1) * 4
    num_tiles, tiles_per_chunk = pl.cdiv(vocab_size, width), chunk_size // width
    # The last chunk is shorter, and the size of a copy is a part of the program.
    last_size = padded_size - (num_chunks - 1) * chunk_size
    sizes = [last_size] if num_chunks == 1 else [chunk_size, last_size]
    room = max(sizes[0], min(tiles_per_chunk, num_tiles) * width)

    def kernel(first, target_row, draft_row, *refs):
        in_memory, refs = refs[: len(sources)], refs[len(sources) :]
        given, refs = ResidualRows(*refs[: len(rows)]), refs[len(rows) :]
        (tile_key_0, tile_key_1, id_key_0, id_key_1, *outputs), refs = refs[:8], refs[8:]
        race, copied, semaphore = Race(*refs[: len(Race._fields)]), refs[len(Race._fields) : -1], refs[-1]
        block, chunk = pl.program_id(0), pl.program_id(1)
        step = block * num_chunks + chunk

        def request(block: jax.Array, each: int) -> jax.Array:
            return jnp.minimum(block * rows_each + each, num_rows - 1)

        def copies(step: jax.Array, size: int) -> Iterator[Any]:
            """What brings the rows of a block, `size` columns of them."""
            block, slot = lax.div(step, num_chunks), step & 1
            columns, to = pl.ds(pl.multiple_of(lax.rem(step, num_chunks) * chunk_size, LANES), size), pl.ds(0, size)
            for each in range(rows_each):
                row = target_row[request(block, each)]
                if in_groups:
                    group = pl.ds(pl.multiple_of(row & -GROUP, GROUP), GROUP)
                    source, destination = in_memory[0].at[group, columns], copied[0].at[slot, each, :, to]
                else:
                    source, destination = in_memory[0].at[pl.ds(row, 1), columns], copied[0].at[slot, pl.ds(each, 1), to]
                yield pltpu.make_async_copy(source, destination, semaphore.at[slot])
                if draft_logits is not None:
                    own = request(block, each)
                    source = in_memory[1].at[draft_row[own], pl.ds(own, 1), columns]
                    yield pltpu.make_async_copy(source, copied[1].at[slot, pl.ds(each, 1), to], semaphore.at[slot])

        def with_copies(step: jax.Array, do: Callable[[Any], None]) -> None:
            is_last = lax.rem(step, num_chunks) == num_chunks - 1
            for size, holds in zip(reversed(sizes), (is_last, ~is_last), strict=False):

                @pl.when(holds)
                def _(size: int = size) -> None:
                    for copy in copies(step, size):
                        do(copy)

        @pl.when(step == 0)
        def _() -> None:
            with_copies(step, lambda copy: copy.start())

        @pl.when(step + 1 < num_blocks * num_chunks)
        def _() -> None:
            with_copies(step + 1, lambda copy: copy.start())

        @pl.when(chunk == 0)
        def _() -> None:
            tile_race.start(race)

        with_copies(step, lambda copy: copy.wait())
        slot = step & 1

        def target_tile(columns: Any) -> jax.Array:
            if not in_groups:
                return copied[0][slot, :, columns]
            found = []
            for each in range(rows_each):
                group = copied[0][slot, each, :, columns].astype(jnp.float32)
                wanted = lax.broadcasted_iota(jnp.int32, group.shape, 0) == (target_row[request(block, each)] & (GROUP - 1))
                found.append(jnp.sum(jnp.where(wanted, group, 0.0), axis=0, keepdims=True))
            return jnp.concatenate(found, axis=0)

        def enter(index: jax.Array, _: None) -> None:
            tile = chunk * tiles_per_chunk + index
            columns = pl.ds(pl.multiple_of(index * width, width), width)
            target = target_tile(columns)
            draft = None if draft_logits is None else copied[1][slot, :, columns]
            offset = lax.broadcasted_iota(jnp.int32, target.shape, 1)
            fields = ResidualRows(*(ref[:] for ref in given))._replace(plain=given.plain[:] != 0)
            values = residual_values(target, draft, fields, (first[0] + tile) * width + offset)
            # Behind the end of the vocabulary a tile holds whatever was there.
            values = jnp.where(tile * width + offset < vocab_size, values, -jnp.inf)
            tile_race.enter(race, values, first[0] + tile, (tile_key_0[:], tile_key_1[:]), given.temperature[:] == 0)

        lax.fori_loop(0, jnp.minimum(tiles_per_chunk, num_tiles - chunk * tiles_per_chunk), enter, None)

        @pl.when(chunk == num_chunks - 1)
        def _() -> None:
            tile_race.finish(race, (id_key_0, id_key_1), given.temperature, tuple(outputs))

    column = pl.BlockSpec((rows_each, 1), lambda n, t, *scalars: (n, 0))
    columns = [*rows._replace(plain=rows.plain.astype(jnp.int32)), tile_key[:, 0], tile_key[:, 1], id_key[:, 0], id_key[:, 1]]
    copied = [pltpu.VMEM((2, rows_each, GROUP, room) if in_groups else (2, rows_each, room), target_logits.dtype)]
    if draft_logits is not None:
        copied.append(pltpu.VMEM((2, rows_each, room), jnp.float32))
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=3,
        grid=(num_blocks, num_chunks),
        in_specs=[pl.BlockSpec(memory_space=pl.ANY)] * len(sources) + [column] * len(columns),
        out_specs=[column] * 4,
        scratch_shapes=[*tile_race.scratch(rows_each, width), *copied, pltpu.SemaphoreType.DMA((2,))],
    )
    kinds = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    outputs = pl.pallas_call(
        kernel,
        grid_spec=grid_spec,
        out_shape=[jax.ShapeDtypeStruct((num_rows, 1), kind) for kind in kinds],
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary", "arbitrary")),
        cost_estimate=tile_race.cost(num_rows * vocab_size, bytes_each),
        name="residual_draw",
    )(jnp.reshape(first_tile, 1), rows.row, rows.draft_row, *sources, *(each[:, None] for each in columns))
    return Entry(*(each[:, 0] for each in outputs))


def _padded(logits: jax.Array, rows: int) -> jax.Array:
    """Logits [..., N, V] whose rows and columns are multiples of `rows` and of `LANES`, where they were not."""
    extra = -logits.shape[-2] % rows, -logits.shape[-1] % LANES
    return jnp.pad(logits, [(0, 0)] * (logits.ndim - 2) + [(0, each) for each in extra]) if any(extra) else logits
