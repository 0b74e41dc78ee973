"""The two passes of `rejection_sample` over a vocabulary in plain JAX: what the kernels are held to, and what runs where there is none.

Axes: N flat rows of target logits, R requests, V ids.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import two_level_draw
from pallas_kernels.rejection_sample.rows import ResidualRows, RowStats, residual_values
from pallas_kernels.two_level_draw import Entry

FOLD = 128
"""Columns that a CPU sums at once."""


def row_stats(
    target_logits: jax.Array, ids: jax.Array, floor: jax.Array, temperature: jax.Array, first_tile: jax.Array, tile_size: int
) -> RowStats:
    """Of `target_logits` [N, V], a part of the vocabulary that begins with tile `first_tile`, and of `ids` [N], counted over all of it."""
    begin = first_tile * min(tile_size, target_logits.shape[1])
    each = functools.partial(_stats_of_row, begin=begin)
    rows = target_logits, ids, floor, temperature
    # On a CPU one row after another: it stays in the cache while its sums are taken.
    return lax.platform_dependent(*rows, cpu=functools.partial(_in_turn, each), default=jax.vmap(each))


def _in_turn(function: Callable[..., Any], *rows: Any) -> Any:
    return lax.map(lambda row: function(*row), rows)


def _stats_of_row(logits: jax.Array, own_id: jax.Array, floor: jax.Array, temperature: jax.Array, begin: jax.Array) -> RowStats:
    vocab_size = logits.shape[0]
    # Sums over the first axis of columns of this width are sums of whole vectors.
    folded = jnp.pad(logits.astype(jnp.float32), (0, -vocab_size % FOLD), constant_values=-jnp.inf).reshape(-1, FOLD)
    top, divisor = jnp.max(jnp.max(folded, axis=0)), jnp.where(temperature == 0, 1.0, temperature)
    shift = jnp.where(jnp.isfinite(top), top / divisor, 0.0)
    total = jnp.sum(jnp.sum(jnp.where(folded >= floor, jnp.exp(folded / divisor - shift), 0.0), axis=0))
    local = own_id - begin
    here = (local >= 0) & (local < vocab_size)
    logit = logits[jnp.where(here, local, 0)].astype(jnp.float32)

    def best() -> jax.Array:
        column = jnp.arange(folded.size, dtype=jnp.int32).reshape(folded.shape)
        first = jnp.min(jnp.min(jnp.where(folded == top, column, folded.size), axis=0))
        return begin + jnp.minimum(first, vocab_size - 1)

    return RowStats(
        log_sum=jnp.where(temperature == 0, top, jnp.log(total) + shift),
        own=jnp.where(here & (logit >= floor), logit / divisor, -jnp.inf),
        best=lax.cond(temperature == 0, best, lambda: jnp.int32(0)),
    )


def residual_draw(
    target_logits: jax.Array,
    draft_logits: jax.Array | None,
    rows: ResidualRows,
    tile_key: jax.Array,
    id_key: jax.Array,
    first_tile: jax.Array,
    tile_size: int,
) -> Entry:
    """A draw per request from p or max(0, p - q), not normalised; `log_sum` of the entry is the log of the mass (p: of the logits).

    Args:
      draft_logits: [R, rows per request, V], or None where q is one-hot.
    """
    column = first_tile * min(tile_size, target_logits.shape[1]) + jnp.arange(target_logits.shape[1], dtype=jnp.int32)

    def of_request(request: jax.Array, rows: ResidualRows) -> jax.Array:
        draft = None if draft_logits is None else draft_logits[request, rows.draft_row]
        return residual_values(target_logits[rows.row].astype(jnp.float32), draft, rows, column)

    requests = jnp.arange(rows.row.shape[0], dtype=jnp.int32)
    # A loop ends where its results are written. Without one a CPU would compute them anew, one by one, for each of their readers.
    in_turn = functools.partial(_in_turn, of_request)
    values = lax.optimization_barrier(lax.platform_dependent(requests, rows, cpu=in_turn, default=jax.vmap(of_request)))
    unfiltered, ones = jnp.full(rows.row.shape, -jnp.inf, jnp.float32), jnp.where(rows.temperature == 0, 0.0, 1.0)
    return two_level_draw.enter(values, unfiltered, ones, tile_key, id_key, first_tile=first_tile, tile_size=tile_size)
