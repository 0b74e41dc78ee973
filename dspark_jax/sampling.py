"""How each request wants its tokens drawn: temperature, and top-k and top-p as one floor per row; and the keys of its randomness.

There is one function for the floor, here, and one for the draw (`pallas_kernels.two_level_draw`), which sampler and verifier
share, so that the q a drafter reports is the q it sampled from.
"""

from collections.abc import Callable, Sequence

import jax.numpy as jnp
import numpy as np
from flax import struct
from jax import lax

from dspark_jax.typing import Array, Bool, Float, Int, UInt32, typed
from pallas_kernels import noise as bits
from pallas_kernels.two_level_draw import scale

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
        return cls(*(jnp.asarray(each) for each in cls.checked(num_rows, temperature, top_k, top_p)))

    @staticmethod
    def checked(
        num_rows: int, temperature: float | Sequence[float], top_k: int | Sequence[int], top_p: float | Sequence[float]
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """The fields of `make` on the host, without a word to the device. Errors as there."""
        temperatures = _per_row("temperature", temperature, num_rows, np.float32)
        top_ks = _per_row("top_k", top_k, num_rows, np.int32)
        top_ps = _per_row("top_p", top_p, num_rows, np.float32)
        greedy_or_warm = (temperatures == 0) | ((temperatures >= MIN_TEMPERATURE) & np.isfinite(temperatures))
        _require("temperature", temperatures, greedy_or_warm, f"0 (greedy) or a finite number of at least {MIN_TEMPERATURE}")
        _require("top_k", top_ks, top_ks >= 0, "0 (off) or a positive integer")
        _require("top_p", top_ps, (top_ps > 0) & (top_ps <= 1), "a number in (0, 1], 1 being off")
        return temperatures, top_ks, top_ps

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
            scaled = scale(logits, sampling.temperature)
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
