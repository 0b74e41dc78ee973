"""Shapes and dtypes that the kernels meet in use: shared by tests, lowering checks and benchmarks."""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.markov_sample import with_int8_w2
from pallas_kernels.noise import round_key
from pallas_kernels.two_level_draw import TILE_SIZE


@dataclasses.dataclass(frozen=True)
class Spec:
    """One call of both ops.

    Attributes:
      name: vocabulary, requests, drafts, rank and dtype in short.
      vocab_size: V.
      num_rows: R.
      block_size: G.
      rank: M.
      dtype: of W1, W2 and the target's logits. U and corrected draft logits are float32.
      filtered: whether rows of target logits have a floor.
      int8: whether W2 is in int8 (`markov_sample.with_int8_w2`).
    """

    vocab_size: int
    num_rows: int
    block_size: int
    rank: int
    dtype: str
    filtered: bool = False
    int8: bool = False

    @property
    def name(self) -> str:
        options = "-int8" * self.int8 + "-filtered" * self.filtered
        return f"V{self.vocab_size}-R{self.num_rows}-G{self.block_size}-M{self.rank}-{self.dtype}{options}"

    @property
    def w2_dtype(self) -> jnp.dtype:
        return jnp.dtype("int8" if self.int8 else self.dtype)

    def scaled_down(self) -> "Spec":
        """The same call on a vocabulary of two tiles and a remainder (odd, so that no block of lanes ends with it), a few requests of it
        and three drafts at most."""
        vocab_size = 2 * TILE_SIZE + self.vocab_size % TILE_SIZE + 77
        return dataclasses.replace(self, vocab_size=vocab_size, num_rows=min(self.num_rows, 9), block_size=min(self.block_size, 3))

    @property
    def num_flat(self) -> int:
        """N: rows of target logits where everything is verified."""
        return self.num_rows * (self.block_size + 1)


SPECS: tuple[Spec, ...] = (
    # Qwen3.
    Spec(151_936, 1, 7, 256, "bfloat16"),
    Spec(151_936, 8, 7, 256, "bfloat16", int8=True),
    Spec(151_936, 16, 7, 256, "bfloat16", filtered=True),
    Spec(151_936, 16, 7, 256, "float32"),
    Spec(151_936, 128, 7, 256, "bfloat16"),
    Spec(151_936, 32, 15, 64, "bfloat16"),
    # DeepSeek-V4.
    Spec(129_280, 1, 5, 256, "bfloat16"),
    Spec(129_280, 256, 5, 256, "bfloat16"),
    Spec(129_280, 8, 5, 64, "float32", filtered=True),
    # Gemma.
    Spec(262_144, 1, 7, 256, "bfloat16"),
    Spec(262_144, 64, 7, 256, "bfloat16"),
    # SmolLM2.
    Spec(49_152, 1, 7, 64, "float32"),
    Spec(49_152, 16, 7, 64, "bfloat16", filtered=True),
    Spec(49_152, 256, 15, 64, "float32"),
)
"""The first of each vocabulary is one request, where reading W2 is nearly all the traffic."""

SMALL = (SPECS[2], SPECS[8], SPECS[11], SPECS[1])
"""Those that every run of the tests goes through."""


class MarkovArguments(NamedTuple):
    """Arguments of `markov_block`, in its order."""

    anchor: jax.Array
    base_logits: jax.Array
    w1: jax.Array
    w2: jax.Array
    key: jax.Array
    temperature: jax.Array


class RejectionArguments(NamedTuple):
    """Arguments of `rejection_sample` that come by position, in its order."""

    target_logits: jax.Array
    row: jax.Array
    first: jax.Array
    ids: jax.Array
    log_q: jax.Array
    lengths: jax.Array
    key: jax.Array
    temperature: jax.Array


def markov_arguments(spec: Spec, seed: int = 0) -> MarkovArguments:
    """Random arguments; every third request is greedy, the others have temperatures from 0.5 to 1.5."""
    rng = jax.random.key(seed)
    rows, dtype = spec.num_rows, jnp.dtype(spec.dtype)
    normal = lambda index, *shape: jax.random.normal(jax.random.fold_in(rng, index), shape, jnp.float32)  # noqa: E731
    w1 = normal(2, spec.vocab_size, spec.rank).astype(dtype)
    w2 = (normal(3, spec.vocab_size, spec.rank) / spec.rank**0.5).astype(dtype)
    if spec.int8:
        w1, w2 = with_int8_w2(w1, w2)
    return MarkovArguments(
        anchor=jax.random.randint(jax.random.fold_in(rng, 0), (rows,), 0, spec.vocab_size, jnp.int32),
        base_logits=2 * normal(1, spec.block_size, rows, spec.vocab_size),
        w1=w1,
        w2=w2,
        key=_keys(rows, seed),
        temperature=_temperatures(rows),
    )


def rejection_arguments(spec: Spec, draft_logits: jax.Array, ids: jax.Array, log_q: jax.Array, seed: int = 1) -> RejectionArguments:
    """Target logits near the drafts' own, so that some are kept and some not; lengths from 0 to G in turn.

    Args:
      draft_logits: float32 [R, G, V], with `ids` and `log_q` [R, G] drawn from them.
    """
    rows, block = spec.num_rows, spec.block_size
    like = jnp.concatenate([draft_logits, draft_logits[:, -1:]], axis=1)
    moved = like + 0.3 * jax.random.normal(jax.random.key(seed), like.shape, jnp.float32)
    return RejectionArguments(
        target_logits=moved.reshape(spec.num_flat, -1).astype(spec.dtype),
        row=jnp.repeat(jnp.arange(rows, dtype=jnp.int32), block + 1),
        first=jnp.arange(rows, dtype=jnp.int32) * (block + 1),
        ids=ids,
        log_q=log_q,
        lengths=(jnp.arange(rows, dtype=jnp.int32) + block) % (block + 1),
        key=_keys(rows, seed),
        temperature=_temperatures(rows),
    )


def _keys(num_rows: int, seed: int) -> jax.Array:
    return round_key(seed, jnp.arange(num_rows, dtype=jnp.int32), jnp.zeros(num_rows, jnp.int32))


def _temperatures(num_rows: int) -> jax.Array:
    row = np.arange(num_rows)
    return jnp.asarray(np.where(row % 3 == 2, 0.0, 0.5 + row % 5 * 0.25), jnp.float32)
