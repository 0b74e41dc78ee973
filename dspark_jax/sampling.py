"""Temperature, top-k and top-p as one floor per row, and the two-level draw that sampler and verifier share.

The distribution of a row is softmax of `logits / temperature` over the logits that reach the row's floor; everything else has
probability 0. The floor is one of the row's own logits, before temperature: a division may round differently in another fusion,
and then sampler and verifier would disagree about the very entry on the floor. At temperature 0 the distribution is one-hot at
the largest logit, ties going to the smallest id. There is one function for the floor and one for the draw, so that the q a
drafter reports is the q it sampled from.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from dspark_jax.typing import Array, Bool, Float, Int, UInt32, typed
from pallas_kernels import noise as bits
from pallas_kernels.noise import Stream

TILE_SIZE = 1024
MIN_TEMPERATURE = 1e-5


@struct.dataclass
class Sampling:
    """How each request wants its tokens drawn.

    Attributes:
      temperature: 0 for greedy decoding.
      top_k: only the `top_k` largest logits (ties kept); 0 for all.
      top_p: of those, the smallest set of largest logits whose share of the probability reaches `top_p` (ties kept); 1 for all.
    """

    temperature: Float[Array, "R"]
    top_k: Int[Array, "R"]
    top_p: Float[Array, "R"]

    @classmethod
    def make(
        cls,
        num_rows: int,
        temperature: float | Sequence[float] = 0.0,
        top_k: int | Sequence[int] = 0,
        top_p: float | Sequence[float] = 1.0,
    ) -> "Sampling":
        """Settings of `num_rows` requests, each given once for all or per request.

        Raises:
          ValueError: a value outside its range, or a sequence of another length than `num_rows`.
        """
        temperatures = _per_row("temperature", temperature, num_rows, np.float32)
        top_ks = _per_row("top_k", top_k, num_rows, np.int32)
        top_ps = _per_row("top_p", top_p, num_rows, np.float32)
        greedy_or_warm = (temperatures == 0) | ((temperatures >= MIN_TEMPERATURE) & np.isfinite(temperatures))
        _require("temperature", temperatures, greedy_or_warm, f"0 (greedy) or a finite number of at least {MIN_TEMPERATURE}")
        _require("top_k", top_ks, top_ks >= 0, "0 (off) or a positive integer")
        _require("top_p", top_ps, (top_ps > 0) & (top_ps <= 1), "a number in (0, 1], 1 being off")
        return cls(temperature=jnp.asarray(temperatures), top_k=jnp.asarray(top_ks), top_p=jnp.asarray(top_ps))

    def take(self, rows: Int[Array, "N"]) -> "Sampling":
        """The settings of `rows`, repeated and reordered as they come."""
        return Sampling(temperature=self.temperature[rows], top_k=self.top_k[rows], top_p=self.top_p[rows])


@struct.dataclass
class Noise:
    """The key of the current round of every request; `dspark_jax` draws nothing that does not come from it."""

    key: UInt32[Array, "R 2"]

    @classmethod
    def of_round(cls, seed: int | UInt32[Array, "2"], request_id: Int[Array, "R"], round_index: Int[Array, "R"]) -> "Noise":
        """Keys from the seed, the request's id and the number of rounds that this request has behind it."""
        return cls(key=bits.round_key(seed, request_id, round_index))

    def take(self, rows: Int[Array, "N"]) -> "Noise":
        """The keys of `rows`."""
        return Noise(key=self.key[rows])


@struct.dataclass
class Drawn:
    """Drawn ids with the numbers of the distribution they were drawn from.

    Attributes:
      ids: never an id of probability 0.
      log_prob: log-probability of the id (0 at temperature 0).
      log_normaliser: log-sum-exp of the kept entries of `logits / temperature`; at temperature 0 the largest logit.
    """

    ids: Int[Array, "N"]
    log_prob: Float[Array, "N"]
    log_normaliser: Float[Array, "N"]


@typed
def logit_floor(logits: Float[Array, "N V"], sampling: Sampling) -> Float[Array, "N"]:
    """The logit that an entry must reach to be kept: top-k first, then top-p over its survivors at the row's temperature.

    `sampling` has one entry per row of `logits`. -inf where a row does not filter or is greedy. The floor is one of the row's
    own logits (before temperature), found by bisection over the bit patterns of float32, which are ordered as the numbers are:
    exact, without a sort. Nothing is computed when no row filters.
    """
    greedy = sampling.temperature == 0
    cuts_count = (sampling.top_k > 0) & (sampling.top_k < logits.shape[1]) & ~greedy
    cuts_mass = (sampling.top_p < 1) & ~greedy

    def search(_: None) -> Float[Array, "N"]:
        image = _ordered(logits.astype(jnp.float32))
        lowest, highest = jnp.min(image, axis=1), jnp.max(image, axis=1)

        def enough_ids(floor: Int[Array, "N"]) -> Bool[Array, "N"]:
            return jnp.sum((image >= floor[:, None]).astype(jnp.int32), axis=1) >= sampling.top_k

        bottom = lax.cond(jnp.any(cuts_count), lambda: _last_true(enough_ids, lowest, highest), lambda: lowest)
        bottom = jnp.where(cuts_count, bottom, lowest)

        def filter_mass() -> Int[Array, "N"]:
            scaled = _scale(logits, sampling.temperature)
            weight = jnp.exp(scaled - jnp.max(scaled, axis=1, keepdims=True))

            def mass(floor: Int[Array, "N"]) -> Float[Array, "N"]:
                return jnp.sum(jnp.where(image >= floor[:, None], weight, 0.0), axis=1)

            needed = sampling.top_p * mass(bottom)
            return jnp.where(cuts_mass, _last_true(lambda floor: mass(floor) >= needed, bottom, highest), bottom)

        found = lax.cond(jnp.any(cuts_mass), filter_mass, lambda: bottom)
        return jnp.where(cuts_count | cuts_mass, _unordered(found), -jnp.inf)

    def skip(_: None) -> Float[Array, "N"]:
        return jnp.full(logits.shape[:1], -jnp.inf, jnp.float32)

    return lax.cond(jnp.any(cuts_count | cuts_mass), search, skip, None)


@typed
def greedy_ids(logits: Float[Array, "N V"]) -> Int[Array, "N"]:
    """Ids of the largest logits, ties going to the smallest id."""
    return _greedy(_tiles(logits, TILE_SIZE))[0]


@typed
def draw(
    logits: Float[Array, "N V"],
    floor: Float[Array, "N"],
    temperature: Float[Array, "N"],
    key: UInt32[Array, "N 2"],
    position: Int[Array, "N"],
    *,
    tile_stream: Stream,
    id_stream: Stream,
    tile_size: int = TILE_SIZE,
) -> Drawn:
    """One id per row from softmax of `logits / temperature` over the logits that reach the floor, in two levels (DESIGN section 5).

    The vocabulary is cut into logical tiles of `tile_size` ids. A Gumbel variable per tile, at counter (tile, 0) of the first
    stream, on the tile's log-sum-exp picks the tile; one per id of that tile, at counter (tile, id) of the second stream, picks
    the id. Rows of temperature 0 take the largest logit; where all rows do, nothing random is computed.

    Args:
      key: the round's key of the request that each row belongs to.
      position: place of the draw in its round.
    """
    tiles = _tiles(logits, tile_size)
    greedy_id, largest = _greedy(tiles)
    greedy = temperature == 0
    certain = Drawn(ids=greedy_id, log_prob=jnp.zeros_like(largest), log_normaliser=largest)

    def random(_: None) -> Drawn:
        scaled = _kept(tiles, floor, temperature)
        tile_lse = _log_sum_exp(scaled)
        tile_ids = jnp.arange(tiles.shape[1], dtype=jnp.int32)[None]
        tile_key = bits.site_key(key, tile_stream, position)[:, None]
        tile = jnp.argmax(tile_lse + bits.gumbel(tile_key, tile_ids, 0), axis=1).astype(jnp.int32)
        inside = jnp.take_along_axis(scaled, tile[:, None, None], axis=1)[:, 0]
        ids = tile[:, None] * tiles.shape[2] + jnp.arange(tiles.shape[2], dtype=jnp.int32)[None]
        id_key = bits.site_key(key, id_stream, position)[:, None]
        offset = jnp.argmax(inside + bits.gumbel(id_key, tile[:, None], ids), axis=1).astype(jnp.int32)
        normaliser = _log_sum_exp(tile_lse)
        log_prob = jnp.take_along_axis(inside, offset[:, None], axis=1)[:, 0] - normaliser
        drawn_id = jnp.take_along_axis(ids, offset[:, None], axis=1)[:, 0]
        return Drawn(
            ids=jnp.where(greedy, greedy_id, drawn_id),
            log_prob=jnp.where(greedy, 0.0, jnp.minimum(log_prob, 0.0)),
            log_normaliser=jnp.where(greedy, largest, normaliser),
        )

    return lax.cond(jnp.all(greedy), lambda _: certain, random, None)


@typed
def log_normaliser(logits: Float[Array, "N V"], floor: Float[Array, "N"], temperature: Float[Array, "N"]) -> Float[Array, "N"]:
    """Log-sum-exp of the kept entries of `logits / temperature`; at temperature 0 the largest logit, as `draw` reports it."""
    tiles = _tiles(logits, TILE_SIZE)
    lse = _log_sum_exp(_log_sum_exp(_kept(tiles, floor, temperature)))
    return jnp.where(temperature == 0, jnp.max(tiles, axis=(1, 2)), lse)


@typed
def log_prob_of(
    logits: Float[Array, "N V"],
    ids: Int[Array, "N"],
    floor: Float[Array, "N"],
    temperature: Float[Array, "N"],
    normaliser: Float[Array, "N"],
) -> Float[Array, "N"]:
    """Log-probability of one id per row; -inf where it is filtered out, or at temperature 0 is not the greedy id."""
    own = jnp.take_along_axis(logits, ids[:, None], axis=1)
    log_prob = jnp.minimum(_kept(own, floor, temperature)[:, 0] - normaliser, 0.0)
    greedy = temperature == 0
    if_greedy = lax.cond(jnp.any(greedy), lambda: jnp.where(greedy_ids(logits) == ids, 0.0, -jnp.inf), lambda: jnp.zeros_like(log_prob))
    return jnp.where(greedy, if_greedy, log_prob)


@typed
def probs(
    logits: Float[Array, "N V"], floor: Float[Array, "N"], temperature: Float[Array, "N"], normaliser: Float[Array, "N"]
) -> Float[Array, "N V"]:
    """The whole distribution of every row."""
    kept = _kept(logits.astype(jnp.float32), floor, temperature)
    warm = jnp.exp(kept - normaliser[:, None])
    greedy = temperature == 0

    def with_greedy() -> Float[Array, "N V"]:
        one_hot = jnp.arange(logits.shape[1], dtype=jnp.int32)[None] == greedy_ids(logits)[:, None]
        return jnp.where(greedy[:, None], one_hot.astype(jnp.float32), warm)

    return lax.cond(jnp.any(greedy), with_greedy, lambda: warm)


def _scale(logits: Float[Array, "N *rest"], temperature: Float[Array, "N"]) -> Float[Array, "N *rest"]:
    divisor = jnp.where(temperature == 0, 1.0, temperature)
    return logits.astype(jnp.float32) / jnp.expand_dims(divisor, tuple(range(1, logits.ndim)))


def _kept(logits: Float[Array, "N *rest"], floor: Float[Array, "N"], temperature: Float[Array, "N"]) -> Float[Array, "N *rest"]:
    reaches = logits.astype(jnp.float32) >= jnp.expand_dims(floor, tuple(range(1, logits.ndim)))
    return jnp.where(reaches, _scale(logits, temperature), -jnp.inf)


def _tiles(logits: Float[Array, "N V"], tile_size: int) -> Float[Array, "N K S"]:
    num_rows, vocab_size = logits.shape
    # A narrower vocabulary is its own single tile: counters, and so draws, are the same as with padding.
    width = min(tile_size, vocab_size)
    padding = -vocab_size % width
    logits = logits.astype(jnp.float32)
    if padding:
        logits = jnp.pad(logits, ((0, 0), (0, padding)), constant_values=-jnp.inf)
    return logits.reshape(num_rows, -1, width)


def _greedy(tiles: Float[Array, "N K S"]) -> tuple[Int[Array, "N"], Float[Array, "N"]]:
    # A maximum per tile vectorises; an argmax over the whole vocabulary does not.
    tile_max = jnp.max(tiles, axis=2)
    tile = jnp.argmax(tile_max, axis=1).astype(jnp.int32)
    inside = jnp.take_along_axis(tiles, tile[:, None, None], axis=1)[:, 0]
    offset = jnp.argmax(inside, axis=1).astype(jnp.int32)
    return tile * tiles.shape[2] + offset, jnp.max(tile_max, axis=1)


def _log_sum_exp(values: Float[Array, "*batch K"]) -> Float[Array, "*batch"]:
    largest = jnp.max(values, axis=-1)
    # Rows that are -inf throughout must give -inf, not -inf - (-inf).
    shift = jnp.where(jnp.isfinite(largest), largest, 0.0)
    return jnp.log(jnp.sum(jnp.exp(values - shift[..., None]), axis=-1)) + shift


def _ordered(values: Float[Array, "*batch"]) -> Int[Array, "*batch"]:
    """Integers that are ordered as the numbers are, -0 and 0 being one."""
    pattern = lax.bitcast_convert_type(jnp.where(values == 0, 0.0, values), jnp.int32)
    return pattern ^ ((pattern >> 31) & 0x7FFFFFFF)


def _unordered(image: Int[Array, "*batch"]) -> Float[Array, "*batch"]:
    return lax.bitcast_convert_type(image ^ ((image >> 31) & 0x7FFFFFFF), jnp.float32)


def _last_true(predicate: Callable[[Int[Array, "N"]], Bool[Array, "N"]], low: Int[Array, "N"], high: Int[Array, "N"]) -> Int[Array, "N"]:
    """The largest integer in [low, high] that satisfies a predicate that holds at `low` and never returns once lost."""

    def halve(_: Int[Array, ""], bounds: tuple[Int[Array, "N"], Int[Array, "N"]]) -> tuple[Int[Array, "N"], Int[Array, "N"]]:
        low, high = bounds
        # The mean rounded up, without the overflow of low + high.
        middle = (low | high) - ((low ^ high) >> 1)
        holds = predicate(middle)
        return jnp.where(holds, middle, low), jnp.where(holds, high, jnp.maximum(middle - 1, low))

    return lax.fori_loop(0, 32, halve, (low, high))[0]


def _per_row(field: str, value: float | Sequence[float], num_rows: int, dtype: type) -> np.ndarray:
    values = np.asarray(value)
    if np.issubdtype(dtype, np.integer) and not np.issubdtype(values.dtype, np.integer):
        raise ValueError(f"{field} is {value}; allowed are integers")
    if values.ndim > 1 or (values.ndim == 1 and values.shape[0] != num_rows):
        raise ValueError(f"{field} has shape {values.shape}; allowed are one value, or {num_rows} of them, one per request")
    return np.broadcast_to(values.astype(dtype), (num_rows,))


def _require(field: str, values: np.ndarray, allowed: np.ndarray, description: str) -> None:
    if not np.all(allowed):
        raise ValueError(f"{field} is {values[~allowed][0]}; allowed is {description}")
