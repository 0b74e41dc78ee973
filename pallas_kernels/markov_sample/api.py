"""`markov_sample`: tokens from U + W1[x] W2, one per request or a block of them, by whichever backend `dispatch` chooses.

Source: the paper's section 3.1 (semi-autoregressive drafts) for the bias, DESIGN section 5 for the draw. Axes: R requests, G drafted
tokens, V ids that can be drafted, M rank of the bias.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch, noise
from pallas_kernels.dispatch import Backend
from pallas_kernels.markov_sample import mosaic_tpu, reference, triton
from pallas_kernels.noise import Stream
from pallas_kernels.two_level_draw import TILE_SIZE, Entry


class Draft(NamedTuple):
    """Drafted tokens and the sampler's own numbers.

    Attributes:
      ids: int32 [R] (a block: [G, R]), columns of the logits.
      log_q: float32, log-probability with which the id was drawn; 0 at temperature 0.
      log_normaliser: float32, log-sum-exp of `logits / temperature`; at temperature 0 the largest logit.
      floor: float32, the logit that an entry had to reach to be drawn; -inf where nothing is filtered.
      logits: float32 [R, V] ([G, R, V]), corrected by the bias and before temperature; None where not asked for.
    """

    ids: jax.Array
    log_q: jax.Array
    log_normaliser: jax.Array
    floor: jax.Array
    logits: jax.Array | None


class Filter(NamedTuple):
    """Top-k, top-p and their like, as one floor per row that is read from the corrected logits.

    A floor needs the whole row before anything can be drawn: where `active` holds, plain JAX computes.

    Attributes:
      active: bool [], whether any row is filtered.
      floor: from corrected logits float32 [R, V] to floors [R], each one of the row's own logits, or -inf.
    """

    active: jax.Array
    floor: Callable[[jax.Array], jax.Array]


def markov_sample(
    prev_ids: jax.Array,
    base_logits: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    key: jax.Array,
    position: jax.Array | int,
    temperature: jax.Array,
    *,
    filters: Filter | None = None,
    return_logits: bool = False,
    axis_name: str | None = None,
    tile_size: int = TILE_SIZE,
    backend: Backend = "auto",
) -> Draft:
    """One token per request from softmax of (U + W1[prev_ids] W2) / temperature.

    Args:
      prev_ids: int32 [R], rows of `w1`.
      base_logits: U, [R, V].
      w1: [V', M], a row per token that may stand before.
      w2: [V, M], a row per token that can be drafted: the transpose of W2, as embeddings and checkpoints have it. In int8, too
        (`with_int8_w2`).
      key: uint32 [R, 2], keys of the round (`noise.round_key`).
      position: of the token in its block, from 0; int32 [R] or one for all.
      temperature: float32 [R]; 0 takes the largest logit.
      filters: what is kept of each row; None: everything.
      return_logits: whether the corrected logits are wanted; they are as large as `base_logits`.
      axis_name: inside `shard_map`, the mesh axis along which `base_logits` (columns), `w1` and `w2` (rows) are cut into consecutive
        parts of equal size, a multiple of `tile_size` ids (pad U with -inf).
      tile_size: ids of a logical tile.
      backend: see `dispatch`.

    Raises:
      ValueError: shapes that do not fit together, or a backend that cannot run here.
    """
    _require_rows("prev_ids", prev_ids, base_logits.shape[:1])
    latent = _rows_of(w1, prev_ids, axis_name)
    return latent_sample(
        latent,
        base_logits,
        w2,
        key,
        position,
        temperature,
        filters=filters,
        return_logits=return_logits,
        axis_name=axis_name,
        tile_size=tile_size,
        backend=backend,
    )


def latent_sample(
    latent: jax.Array,
    base_logits: jax.Array,
    w2: jax.Array,
    key: jax.Array,
    position: jax.Array | int,
    temperature: jax.Array,
    *,
    filters: Filter | None = None,
    return_logits: bool = False,
    axis_name: str | None = None,
    tile_size: int = TILE_SIZE,
    backend: Backend = "auto",
) -> Draft:
    """As `markov_sample`, from a latent [R, M] in the place of W1[prev_ids]: for heads that compute one, gated or recurrent."""
    num_rows = base_logits.shape[0]
    _require_bias(latent, base_logits, w2)
    _require_rows("latent", latent, (num_rows, w2.shape[1]))
    _require_rows("temperature", temperature, (num_rows,))
    _require_rows("key", key, (num_rows, 2))
    position = jnp.broadcast_to(jnp.asarray(position, jnp.int32), (num_rows,))
    keys = noise.site_key(key, Stream.DRAFT_TILE, position), noise.site_key(key, Stream.DRAFT_ID, position)
    run = _Run(filters, return_logits, axis_name, tile_size, dispatch.choose(backend))
    return run.filtered(lambda run: _draft(*run.sweep(latent, base_logits, w2, *keys, temperature), temperature))


def markov_block(
    anchor: jax.Array,
    base_logits: jax.Array,
    w1: jax.Array,
    w2: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    draft_ids: jax.Array | None = None,
    filters: Filter | None = None,
    return_logits: bool = False,
    keep_w2: bool | None = None,
    axis_name: str | None = None,
    tile_size: int = TILE_SIZE,
    backend: Backend = "auto",
) -> Draft:
    """A block of G tokens per request, left to right, each from softmax of (U_k + W1[x_{k-1}] W2) / temperature.

    Args:
      anchor: int32 [R], x_0: the token before the block.
      base_logits: [G, R, V]: tokens first, since they are drawn one after another.
      draft_ids: int32 [V], row of `w1` of each column, where not all tokens can be drafted; `ids` are columns all the same. Whole on
        every device where the vocabulary is cut.
      keep_w2: on a TPU, whether W2 stays on chip between tokens; None: where it fits (see `mosaic_tpu.bytes_on_chip`).
      others: as `markov_sample` has them.

    Raises:
      ValueError: shapes that do not fit together, or a backend that cannot run here.
    """
    block_size, num_rows, vocab_size = base_logits.shape
    _require_rows("anchor", anchor, (num_rows,))
    _require_rows("temperature", temperature, (num_rows,))
    _require_rows("key", key, (num_rows, 2))
    _require_bias(w1, base_logits, w2)
    if draft_ids is None and w1.shape[0] < vocab_size:
        raise ValueError(
            f"w1 has {w1.shape[0]} rows; without draft_ids it must have one for each of the {vocab_size} columns of base_logits"
        )
    places = jnp.arange(block_size, dtype=jnp.int32)[:, None]
    tile_key, id_key = noise.site_key(key[None], Stream.DRAFT_TILE, places), noise.site_key(key[None], Stream.DRAFT_ID, places)

    def one_by_one(run: "_Run") -> Draft:
        def step(previous: jax.Array, inputs: tuple[jax.Array, ...]) -> tuple[jax.Array, tuple]:
            base, tile_key, id_key = inputs
            entry, logits, floor = run.sweep(_rows_of(w1, previous, axis_name), base, w2, tile_key, id_key, temperature)
            return entry.ids if draft_ids is None else draft_ids[entry.ids], (entry, logits, floor)

        # A loop of G steps on the device rather than G copies of its body: a seventh of the program to compile.
        _, (entry, logits, floor) = lax.scan(step, anchor, (base_logits, tile_key, id_key))
        return _draft(entry, logits, floor, temperature)

    def at_once(run: "_Run") -> Draft:
        if run.choice.kernels == "xla" or axis_name is not None:
            return one_by_one(run)
        options: dict[str, Any] = {"return_logits": return_logits, "interpret": run.choice.interpret}
        if run.choice.kernels == "triton":
            inputs = (anchor, base_logits, w1, w2, draft_ids, tile_key, id_key, temperature, tile_size)
            entry, logits = triton.block(*inputs, **options)
        else:
            keep = mosaic_tpu.fits_on_chip(base_logits, w2, tile_size, return_logits) if keep_w2 is None else keep_w2
            table = w1 if draft_ids is None else w1[draft_ids]
            table = jnp.pad(table, ((0, -table.shape[0] % mosaic_tpu.ROWS_PER_COPY), (0, 0)))
            arguments = (w1[anchor], base_logits, table, w2, tile_key, id_key, temperature, tile_size)
            entry, logits = mosaic_tpu.block(*arguments, keep_w2=keep, **options)
        return _draft(entry, logits, jnp.full(entry.score.shape, -jnp.inf, jnp.float32), temperature)

    return _Run(filters, return_logits, axis_name, tile_size, dispatch.choose(backend)).filtered(at_once, one_by_one)


def _draft(entry: Entry, logits: jax.Array | None, floor: jax.Array, temperature: jax.Array) -> Draft:
    drawn = entry.drawn(temperature)
    return Draft(drawn.ids, drawn.log_prob, drawn.log_normaliser, floor, logits)


class _Run(NamedTuple):
    """What a call settles for all of its draws."""

    filters: Filter | None
    return_logits: bool
    axis_name: str | None
    tile_size: int
    choice: dispatch.Choice

    def filtered(self, draft: Callable[["_Run"], Draft], in_plain_jax: Callable[["_Run"], Draft] | None = None) -> Draft:
        """`draft` where nothing is filtered, or filters are what it computes; where they are not, `in_plain_jax`."""
        if self.filters is None or self.choice.kernels == "xla":
            return draft(self)
        plain = self._replace(choice=dispatch.Choice("xla"))
        unfiltered = self._replace(filters=None)
        return lax.cond(self.filters.active, lambda: (in_plain_jax or draft)(plain), lambda: draft(unfiltered))

    def sweep(
        self, latent: jax.Array, base_logits: jax.Array, w2: jax.Array, tile_key: jax.Array, id_key: jax.Array, temperature: jax.Array
    ) -> tuple[Entry, jax.Array | None, jax.Array]:
        """One draw per request, the corrected logits where asked for, and the floors."""
        first_tile = jnp.int32(0)
        if self.axis_name is not None:
            columns = base_logits.shape[1]
            if columns % self.tile_size:
                raise ValueError(f"base_logits has {columns} columns per device; allowed are multiples of {self.tile_size} (tile_size)")
            if self.filters is not None:
                raise ValueError("filters is given with axis_name; a floor needs the whole row, which no device has")
            first_tile = lax.axis_index(self.axis_name).astype(jnp.int32) * (columns // self.tile_size)
        arguments = (latent, base_logits, w2, tile_key, id_key, temperature, first_tile, self.tile_size)
        if self.choice.kernels == "xla":
            entry, logits, floor = reference.sweep(*arguments, None if self.filters is None else self.filters.floor)
        else:
            kernels = mosaic_tpu if self.choice.kernels == "mosaic_tpu" else triton
            entry, logits = kernels.sweep(*arguments, return_logits=self.return_logits, interpret=self.choice.interpret)
            floor = jnp.full(temperature.shape, -jnp.inf, jnp.float32)
        entry = entry if self.axis_name is None else entry.across(self.axis_name, temperature)
        return entry, logits if self.return_logits else None, floor


def _rows_of(table: jax.Array, ids: jax.Array, axis_name: str | None) -> jax.Array:
    """Rows of a table that may be cut along its rows over `axis_name`."""
    if axis_name is None:
        return table[ids]
    local = ids - lax.axis_index(axis_name).astype(jnp.int32) * table.shape[0]
    here = (local >= 0) & (local < table.shape[0])
    return lax.psum(jnp.where(here[:, None], table[jnp.where(here, local, 0)], 0), axis_name)


def _require_rows(field: str, value: jax.Array, shape: tuple[int, ...]) -> None:
    if jnp.shape(value) != shape:
        raise ValueError(f"{field} has shape {jnp.shape(value)}; allowed is {shape}, base_logits having {shape[0]} requests")


def _require_bias(left: jax.Array, base_logits: jax.Array, w2: jax.Array) -> None:
    if w2.shape != (base_logits.shape[-1], left.shape[-1]):
        raise ValueError(
            f"w2 has shape {w2.shape}; with {base_logits.shape[-1]} columns of base_logits and rank {left.shape[-1]} "
            f"allowed is {(base_logits.shape[-1], left.shape[-1])}"
        )
