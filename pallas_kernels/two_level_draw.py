"""The two-level draw: one Gumbel variable per tile of the vocabulary picks the tile, one per id of that tile picks the id.

It is exact: a tile wins with its share of the probability, an id inside it with its share of the tile's. Few random numbers are
made, the log-normaliser comes along, and tiles can be walked one after another (the kernels) or lie on several devices (an `Entry`
per device, then `across`). Everything here is plain JAX, and the reference that the kernels are held to.

The distribution of a row is softmax of `logits / temperature` over the logits that reach the row's floor, everything else having
probability 0; at temperature 0 it is one-hot at the largest logit, ties going to the smallest id. The floor is one of the row's own
logits, before temperature: a division may round differently in another fusion, and then sampler and verifier would disagree about
the very entry on the floor.

Axes: N rows, V ids of the vocabulary, K tiles of S ids. Temperatures, floors, logs and values are float32 [N]; keys uint32 [N, 2].
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise
from pallas_kernels.noise import Stream

TILE_SIZE = 1024
"""Ids of a logical tile: part of what a random number depends on, and so of every sampled token."""

TILE_GROUP = 8
"""Devices over which a vocabulary's tiles can be split evenly: they would be gathered first otherwise. No tile's number depends on it."""


class Drawn(NamedTuple):
    """Drawn ids with the numbers of the distribution they were drawn from.

    Attributes:
      ids: int32 [N]; never an id of probability 0.
      log_prob: log-probability of the id (0 at temperature 0).
      log_normaliser: log-sum-exp of the kept entries of `logits / temperature`; at temperature 0 the largest logit.
    """

    ids: jax.Array
    log_prob: jax.Array
    log_normaliser: jax.Array


class Entry(NamedTuple):
    """The best that a part of the vocabulary has to offer in a draw; the best of all parts is the draw.

    Attributes:
      score: of the part's best tile, its Gumbel variable included; at temperature 0 the largest logit.
      ids: int32 [N], the id drawn inside that tile, counted over the whole vocabulary.
      value: `logits / temperature` of that id.
      log_sum: log-sum-exp of the part's kept entries of `logits / temperature`; at temperature 0 the largest logit.
    """

    score: jax.Array
    ids: jax.Array
    value: jax.Array
    log_sum: jax.Array

    def across(self, axis_name: str, temperature: jax.Array) -> "Entry":
        """The best of all devices along `axis_name`, which hold consecutive parts of the vocabulary, on every one of them."""
        every = jax.tree.map(lambda leaf: lax.all_gather(leaf, axis_name), self)
        # argmax takes the first of equals: the smallest ids.
        best = jnp.argmax(every.score, axis=0)[None]
        score, ids, value = (jnp.take_along_axis(leaf, best, axis=0)[0] for leaf in every[:3])
        log_sum = jnp.where(temperature == 0, score, log_sum_exp(every.log_sum.T))
        return Entry(score, ids, value, log_sum)

    def drawn(self, temperature: jax.Array) -> Drawn:
        """The draw, where this entry is the best there is."""
        log_prob = jnp.where(temperature == 0, 0.0, jnp.minimum(self.value - self.log_sum, 0.0))
        return Drawn(self.ids, log_prob, self.log_sum)


def draw(
    logits: jax.Array,
    floor: jax.Array,
    temperature: jax.Array,
    key: jax.Array,
    position: jax.Array,
    *,
    tile_stream: Stream,
    id_stream: Stream,
    tile_size: int = TILE_SIZE,
) -> Drawn:
    """One id per row of `logits` [N, V] (DESIGN section 5).

    Args:
      floor: -inf where nothing is filtered.
      key: the round's key of the request that each row belongs to.
      position: int32 [N], place of the draw in its round.
      tile_stream, id_stream: of the two levels. A tile's variable is at counter (tile, 0), an id's at (tile, id).
    """
    keys = noise.site_key(key, tile_stream, position), noise.site_key(key, id_stream, position)
    return enter(logits, floor, temperature, *keys, tile_size=tile_size).drawn(temperature)


def enter(
    logits: jax.Array,
    floor: jax.Array,
    temperature: jax.Array,
    tile_key: jax.Array,
    id_key: jax.Array,
    *,
    first_tile: jax.Array | int = 0,
    tile_size: int = TILE_SIZE,
) -> Entry:
    """The entry of a part of the vocabulary, which begins with tile `first_tile`. Where all rows are greedy nothing random is made."""
    tiles = tiles_of(logits, tile_size)
    width = tiles.shape[2]
    first_tile = jnp.asarray(first_tile, jnp.int32)

    def certain(_: None) -> Entry:
        greedy_id, largest = _greedy(tiles)
        return Entry(largest, first_tile * width + greedy_id, largest, largest)

    def random(_: None) -> Entry:
        scaled = kept(tiles, floor, temperature)
        chosen = choose_tile(log_sum_exp(scaled), jnp.max(scaled, axis=2), temperature, tile_key, first_tile)
        values = jnp.take_along_axis(scaled, (chosen.tile - first_tile)[:, None, None], axis=1)[:, 0]
        return draw_inside(chosen, values, temperature, id_key)

    return lax.cond(jnp.all(temperature == 0), certain, random, None)


class ChosenTile(NamedTuple):
    """The first level of a draw: int32 [N] number of the tile, and `score` and `log_sum` as an `Entry` has them."""

    tile: jax.Array
    score: jax.Array
    log_sum: jax.Array


def choose_tile(
    tile_sum: jax.Array, tile_max: jax.Array, temperature: jax.Array, tile_key: jax.Array, first_tile: jax.Array | int = 0
) -> ChosenTile:
    """A tile per row from log-sum-exp and largest of the values in every tile, float32 [N, K]."""
    greedy = temperature == 0
    number = first_tile + jnp.arange(tile_sum.shape[1], dtype=jnp.int32)[None]
    scores = jnp.where(greedy[:, None], tile_max, tile_sum + noise.gumbel(tile_key[:, None], number, 0))
    best = jnp.argmax(scores, axis=1).astype(jnp.int32)
    log_sum = jnp.where(greedy, jnp.max(tile_max, axis=1), log_sum_exp(tile_sum))
    return ChosenTile(first_tile + best, jnp.take_along_axis(scores, best[:, None], axis=1)[:, 0], log_sum)


def draw_inside(chosen: ChosenTile, values: jax.Array, temperature: jax.Array, id_key: jax.Array) -> Entry:
    """The second level: an id per row from the values [N, S] of its tile."""
    ids = chosen.tile[:, None] * values.shape[1] + jnp.arange(values.shape[1], dtype=jnp.int32)[None]
    variable = jnp.where(temperature[:, None] == 0, 0.0, noise.gumbel(id_key[:, None], chosen.tile[:, None], ids))
    offset = jnp.argmax(values + variable, axis=1)[:, None]
    drawn, value = (jnp.take_along_axis(each, offset, axis=1)[:, 0] for each in (ids, values))
    return Entry(chosen.score, drawn, value, chosen.log_sum)


def greedy_ids(logits: jax.Array) -> jax.Array:
    """Ids int32 [N] of the largest logits [N, V], ties going to the smallest id."""
    return _greedy(tiles_of(logits, TILE_SIZE))[0]


def log_normaliser(logits: jax.Array, floor: jax.Array, temperature: jax.Array) -> jax.Array:
    """Log-sum-exp of the kept entries of `logits / temperature`; at temperature 0 the largest logit, as `draw` reports it."""
    tiles = tiles_of(logits, TILE_SIZE)
    return jnp.where(temperature == 0, jnp.max(tiles, axis=(1, 2)), log_sum_exp(log_sum_exp(kept(tiles, floor, temperature))))


def log_prob_of(logits: jax.Array, ids: jax.Array, floor: jax.Array, temperature: jax.Array, normaliser: jax.Array) -> jax.Array:
    """Log-probability of one id per row; -inf where it is filtered out, or at temperature 0 is not the greedy id."""
    own = jnp.take_along_axis(logits, ids[:, None], axis=1)
    log_prob = jnp.minimum(kept(own, floor, temperature)[:, 0] - normaliser, 0.0)
    greedy = temperature == 0
    if_greedy = lax.cond(jnp.any(greedy), lambda: jnp.where(greedy_ids(logits) == ids, 0.0, -jnp.inf), lambda: jnp.zeros_like(log_prob))
    return jnp.where(greedy, if_greedy, log_prob)


def probs(logits: jax.Array, floor: jax.Array, temperature: jax.Array, normaliser: jax.Array) -> jax.Array:
    """The whole distribution of every row, float32 [N, V]."""
    warm = jnp.exp(kept(logits.astype(jnp.float32), floor, temperature) - normaliser[:, None])
    greedy = temperature == 0

    def with_greedy() -> jax.Array:
        one_hot = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] == greedy_ids(logits)[:, None]
        return jnp.where(greedy[:, None], one_hot.astype(jnp.float32), warm)

    return lax.cond(jnp.any(greedy), with_greedy, lambda: warm)


def scale(logits: jax.Array, temperature: jax.Array) -> jax.Array:
    """Float32 `logits / temperature`, rows first; as they are where the temperature is 0."""
    divisor = jnp.where(temperature == 0, 1.0, temperature)
    return logits.astype(jnp.float32) / jnp.expand_dims(divisor, tuple(range(divisor.ndim, logits.ndim)))


def kept(logits: jax.Array, floor: jax.Array, temperature: jax.Array) -> jax.Array:
    """Float32 `logits / temperature`, rows first, with -inf for entries below the floor."""
    reaches = logits.astype(jnp.float32) >= jnp.expand_dims(floor, tuple(range(floor.ndim, logits.ndim)))
    return jnp.where(reaches, scale(logits, temperature), -jnp.inf)


def low_rank_bias(latent: jax.Array, w2: jax.Array) -> jax.Array:
    """latent [N, M] times W2, given as [V, M]: float32 [N, V], of float32 weights to float32's precision on every device.

    W2 in int8 is multiplied as bfloat16, which holds it exactly.
    """
    if w2.dtype == jnp.int8:
        w2 = w2.astype(jnp.float32).astype(jnp.bfloat16)
    precision = lax.Precision.HIGHEST if w2.dtype == jnp.float32 else None
    dimensions = (((1,), (1,)), ((), ()))
    return lax.dot_general(latent.astype(w2.dtype), w2, dimensions, precision=precision, preferred_element_type=jnp.float32)


def tiles_of(logits: jax.Array, tile_size: int) -> jax.Array:
    """Rows [N, V] as float32 tiles [N, K, S], padded with -inf; beyond `TILE_GROUP` tiles K is a multiple of that."""
    num_rows, vocab_size = logits.shape
    # A narrower vocabulary is its own single tile: counters, and so draws, are the same as with padding.
    width = min(tile_size, vocab_size)
    size = width * TILE_GROUP if vocab_size > width * TILE_GROUP else width
    padding = -vocab_size % size
    logits = logits.astype(jnp.float32)
    if padding:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return logits.reshape(num_rows, -1, width)


def log_sum_exp(values: jax.Array) -> jax.Array:
    """Log-sum-exp over the last axis; -inf, and not NaN, where all of it is -inf."""
    largest = jnp.max(values, axis=-1)
    shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return jnp.log(jnp.sum(jnp.exp(values - shift[..., None]), axis=-1)) + shift


def shift_of(largest: jax.Array) -> jax.Array:
    """What to subtract from values before they are exponentiated: their largest, and 0 where all are -inf (-inf - (-inf) is NaN)."""
    return jnp.where(largest > -jnp.inf, largest, 0.0)


def _greedy(tiles: jax.Array) -> tuple[jax.Array, jax.Array]:
    # NaN counts as excluded, as it does where floors are compared. A maximum per tile vectorises, an argmax over all does not.
    tiles = jnp.where(tiles >= -jnp.inf, tiles, -jnp.inf)
    tile_max = jnp.max(tiles, axis=2)
    tile = jnp.argmax(tile_max, axis=1).astype(jnp.int32)
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    offset = jnp.argmax(inside, axis=1).astype(jnp.int32)
    return tile * tiles.shape[2] + offset, jnp.max(tile_max, axis=1)
