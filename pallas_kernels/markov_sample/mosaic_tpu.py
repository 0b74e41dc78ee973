"""`markov_sample` as TPU kernels: one walk over the tiles of the vocabulary per drafted token.

`sweep` draws one token per request. `block` draws G of them, one after another, in one kernel: the row of W1 that a drawn token
asks for is fetched inside, and W2 stays on chip behind the first token, where it fits. At one request reading W2 is nearly all
the traffic, so that a block of seven costs little more than one token.

Per tile: bias [R, M] x [M, S] on the matrix unit, logits, and `tile_race.enter`. Nothing of size [R, V] is written unless asked for.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import tile_race
from pallas_kernels.tile_race import Race
from pallas_kernels.two_level_draw import Entry, low_rank_bias

ROWS_PER_COPY = 16
"""Rows of W1 that are fetched together, a power of two: memory is laid out in groups of rows, of which a part cannot be addressed."""

USUAL_BYTES = 128 << 20
"""Fast memory of a core of TPU v5e and v6e."""

NUM_RACE = len(Race._fields)


def _values(logits: jax.Array, temperature: jax.Array, offset: jax.Array | int, vocab_size: int) -> jax.Array:
    """`logits / temperature` of a tile that begins at column `offset`; -inf behind the end of the vocabulary and for NaN."""
    column = offset + lax.broadcasted_iota(jnp.int32, logits.shape, 1)
    divisor = jnp.where(temperature == 0, 1.0, temperature)
    return jnp.where((column < vocab_size) & (logits >= -jnp.inf), logits / divisor, -jnp.inf)


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
    num_rows, vocab_size = base_logits.shape
    width = min(tile_size, vocab_size)
    num_tiles = pl.cdiv(vocab_size, width)

    def kernel(first, latent, base, w2, tile_key_0, tile_key_1, id_key_0, id_key_1, temperature, *refs):
        outputs, race = refs[:4], Race(*refs[-NUM_RACE:])
        tile = pl.program_id(0)

        @pl.when(tile == 0)
        def _() -> None:
            tile_race.start(race)

        logits = base[:].astype(jnp.float32) + low_rank_bias(latent[:], w2[:])
        if return_logits:
            refs[4][:] = logits
        values = _values(logits, temperature[:], tile * width, vocab_size)
        tile_race.enter(race, values, first[0] + tile, (tile_key_0[:], tile_key_1[:]), temperature[:] == 0)

        @pl.when(tile == num_tiles - 1)
        def _() -> None:
            tile_race.finish(race, (id_key_0, id_key_1), temperature, outputs)

    column = pl.BlockSpec((num_rows, 1), lambda t, first: (0, 0))
    wide = pl.BlockSpec((num_rows, width), lambda t, first: (0, t))
    kinds = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    out_shape = [jax.ShapeDtypeStruct((num_rows, 1), kind) for kind in kinds]
    out_specs = [column] * 4
    if return_logits:
        out_shape.append(jax.ShapeDtypeStruct((num_rows, vocab_size), jnp.float32))
        out_specs.append(wide)
    grid_spec = pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=1,
        grid=(num_tiles,),
        in_specs=[
            pl.BlockSpec(latent.shape, lambda t, first: (0, 0)),
            wide,
            pl.BlockSpec((width, w2.shape[1]), lambda t, first: (t, 0)),
            *([column] * 5),
        ],
        out_specs=out_specs,
        scratch_shapes=tile_race.scratch(num_rows, width),
    )
    score, ids, value, log_sum, *logits = pl.pallas_call(
        kernel,
        grid_spec=grid_spec,
        out_shape=out_shape,
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(dimension_semantics=("arbitrary",)),
        cost_estimate=tile_race.cost(
            num_rows * vocab_size,
            base_logits.dtype.itemsize + 4 * return_logits,
            more_bytes=w2.size * w2.dtype.itemsize,
            flops=2 * num_rows * w2.size,
        ),
        name="markov_sweep",
    )(jnp.reshape(first_tile, 1), latent, base_logits, w2, *_words(tile_key), *_words(id_key), temperature[:, None])
    return Entry(*(each[:, 0] for each in (score, ids, value, log_sum))), logits[0] if return_logits else None


def block(
    first_latent: jax.Array,
    base_logits: jax.Array,
    table: jax.Array,
    w2: jax.Array,
    tile_key: jax.Array,
    id_key: jax.Array,
    temperature: jax.Array,
    tile_size: int,
    *,
    keep_w2: bool,
    return_logits: bool,
    interpret: Any,
) -> tuple[Entry, jax.Array | None]:
    """G draws per request, left to right; token k + 1 has the latent `table[ids[k]]`.

    Args:
      first_latent: [R, M], of the anchors.
      base_logits: [G, R, V].
      table: W1's rows [at least V, M] in the order of the columns of `base_logits`, as many as a multiple of `ROWS_PER_COPY`.
      tile_key, id_key: uint32 [G, R, 2].
      keep_w2: whether W2 stays on chip; see `bytes_on_chip`.
    """
    block_size, num_rows, vocab_size = base_logits.shape
    width = min(tile_size, vocab_size)
    num_tiles = pl.cdiv(vocab_size, width)
    rank = w2.shape[1]

    def kernel(first, base, w2, table, tile_key_0, tile_key_1, id_key_0, id_key_1, temperature, *refs):
        outputs, logits_out = refs[:4], refs[4] if return_logits else None
        race, latent, fetched, on_chip, chosen, ids, semaphore = Race(*refs[-NUM_RACE - 6 : -6]), *refs[-6:]
        step, tile = pl.program_id(0), pl.program_id(1)

        @pl.when((step == 0) & (tile == 0))
        def _() -> None:
            latent[:] = first[:].astype(jnp.float32)

        @pl.when(tile == 0)
        def _() -> None:
            tile_race.start(race)

        if keep_w2:

            @pl.when(step == 0)
            def _() -> None:
                on_chip[tile] = w2[:]

        w2_tile = on_chip[tile] if keep_w2 else w2[:]
        logits = base[:].astype(jnp.float32) + low_rank_bias(latent[:], w2_tile)
        if logits_out is not None:
            logits_out[:] = logits
        values = _values(logits, temperature[:], tile * width, vocab_size)
        tile_race.enter(race, values, tile, (tile_key_0[:], tile_key_1[:]), temperature[:] == 0)

        @pl.when(tile == num_tiles - 1)
        def _() -> None:
            tile_race.finish(race, (id_key_0, id_key_1), temperature, outputs)

        @pl.when((tile == num_tiles - 1) & (step < block_size - 1))
        def _() -> None:
            chosen[:] = outputs[1][:]
            _fetch(chosen, table, latent, fetched, ids, semaphore)

    column = pl.BlockSpec((num_rows, 1), lambda k, t: (0, 0))
    columns = pl.BlockSpec((None, num_rows, 1), lambda k, t: (k, 0, 0))
    wide = pl.BlockSpec((None, num_rows, width), lambda k, t: (k, 0, t))
    # Behind the first token the index stands still, and nothing is copied.
    w2_index = (lambda k, t: (jnp.where(k == 0, t, num_tiles - 1), 0)) if keep_w2 else (lambda k, t: (t, 0))
    kinds = (jnp.float32, jnp.int32, jnp.float32, jnp.float32)
    out_shape = [jax.ShapeDtypeStruct((block_size, num_rows, 1), kind) for kind in kinds]
    out_specs = [columns] * 4
    if return_logits:
        out_shape.append(jax.ShapeDtypeStruct((block_size, num_rows, vocab_size), jnp.float32))
        out_specs.append(wide)
    score, drawn, value, log_sum, *logits = pl.pallas_call(
        kernel,
        grid=(block_size, num_tiles),
        in_specs=[
            pl.BlockSpec(first_latent.shape, lambda k, t: (0, 0)),
            wide,
            pl.BlockSpec((width, rank), w2_index),
            pl.BlockSpec(memory_space=pl.ANY),
            *([columns] * 4),
            column,
        ],
        out_specs=out_specs,
        out_shape=out_shape,
        scratch_shapes=[
            *tile_race.scratch(num_rows, width),
            pltpu.VMEM((num_rows, rank), jnp.float32),
            pltpu.VMEM((num_rows, ROWS_PER_COPY, rank), table.dtype),
            pltpu.VMEM((num_tiles, width, rank) if keep_w2 else (1, 8, 128), w2.dtype),
            pltpu.VMEM((num_rows, 1), jnp.int32),
            pltpu.SMEM((num_rows, 1), jnp.int32),
            pltpu.SemaphoreType.DMA(()),
        ],
        interpret=interpret,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("arbitrary", "arbitrary"),
            vmem_limit_bytes=bytes_on_chip(base_logits, w2, tile_size, keep_w2=keep_w2, return_logits=return_logits),
        ),
        cost_estimate=tile_race.cost(
            base_logits.size,
            base_logits.dtype.itemsize + 4 * return_logits,
            more_bytes=(1 if keep_w2 else block_size) * w2.size * w2.dtype.itemsize
            + (block_size - 1) * num_rows * ROWS_PER_COPY * rank * table.dtype.itemsize,
            flops=2 * block_size * num_rows * w2.size,
        ),
        name="markov_block",
    )(first_latent, base_logits, w2, table, *_words(tile_key), *_words(id_key), temperature[:, None])
    return Entry(*(each[..., 0] for each in (score, drawn, value, log_sum))), logits[0] if return_logits else None


def _fetch(drawn: Any, table: Any, latent: Any, fetched: Any, ids: Any, semaphore: Any) -> None:
    """Copy the rows `drawn` [R, 1] of `table` into `latent`: whole groups of rows at once from memory, of which one row each is kept."""
    num_rows = latent.shape[0]
    to_scalars = pltpu.make_async_copy(drawn, ids, semaphore)
    to_scalars.start()
    to_scalars.wait()

    def copy(row: jax.Array) -> Any:
        begin = pl.multiple_of(ids[row, 0] & -ROWS_PER_COPY, ROWS_PER_COPY)
        return pltpu.make_async_copy(table.at[pl.ds(begin, ROWS_PER_COPY), :], fetched.at[row], semaphore)

    def begin(row: jax.Array, _: None) -> None:
        copy(row).start()

    def take(row: jax.Array, _: None) -> None:
        group = fetched[row].astype(jnp.float32)
        wanted = lax.broadcasted_iota(jnp.int32, group.shape, 0) == (ids[row, 0] & (ROWS_PER_COPY - 1))
        latent[pl.ds(row, 1), :] = jnp.sum(jnp.where(wanted, group, 0.0), axis=0, keepdims=True)

    def end(row: jax.Array, _: None) -> None:
        copy(row).wait()

    lax.fori_loop(0, num_rows, begin, None)
    lax.fori_loop(0, num_rows, end, None)
    lax.fori_loop(0, num_rows, take, None)


def bytes_on_chip(base_logits: Any, w2: Any, tile_size: int, *, keep_w2: bool, return_logits: bool) -> int:
    """Fast memory that `block` asks for, bytes: its buffers, two of each that is streamed, and room for values under way."""
    num_rows, vocab_size = base_logits.shape[-2:]
    width = min(tile_size, vocab_size)
    # Rows of memory on chip are 128 numbers wide, columns of one number too.
    rank = pl.cdiv(w2.shape[1], 128) * 128
    w2_tile = width * rank * w2.dtype.itemsize
    streamed = 2 * (num_rows * width * base_logits.dtype.itemsize + w2_tile) + 2 * return_logits * num_rows * width * 4
    columns = (5 + 2 * 8 + 3) * max(num_rows, 8) * 128 * 4
    own = num_rows * width * 4 + num_rows * rank * 4 * (1 + ROWS_PER_COPY)
    under_way = 4 * num_rows * width * 4 + (w2.dtype == jnp.int8) * width * rank * 6
    kept = pl.cdiv(vocab_size, width) * w2_tile if keep_w2 else 0
    return kept + streamed + columns + own + under_way + (2 << 20)


def fits_on_chip(base_logits: Any, w2: Any, tile_size: int, return_logits: bool) -> bool:
    """Whether `block` can keep W2 on the chip at hand; without one, on a chip of `USUAL_BYTES`."""
    capacity = pltpu.get_tpu_info().vmem_capacity_bytes if pltpu.is_tpu_device() else USUAL_BYTES
    return bytes_on_chip(base_logits, w2, tile_size, keep_w2=True, return_logits=return_logits) <= capacity


def _words(key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two words of keys [..., N, 2] as columns [..., N, 1]."""
    return key[..., :1], key[..., 1:]
