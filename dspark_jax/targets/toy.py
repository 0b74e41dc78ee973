"""A target small enough to enumerate: the next token depends on the last one and on whether its position is even, by a table.

Width equals vocabulary and the head is the identity, so that hidden states are logits and every law is known in closed form.
"""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import PRNGKeyArray

from dspark_jax.protocols import FlatTokens, TargetHead, TargetSpec
from dspark_jax.typing import Array, Float, Int, Params


@struct.dataclass
class ToyCache:
    """Nothing but how many tokens of each request have been processed."""

    length: Int[Array, "R"]


@dataclass(frozen=True)
class ToyTarget:
    """Next-token logits `table[position % 2, id]`; the taps all give the one-hot of the token.

    Attributes:
      vocab_size: V, which is also D; each tap is V wide.
      spread: standard deviation of random logits.
    """

    vocab_size: int
    spread: float = 1.0

    @property
    def spec(self) -> TargetSpec:
        """Width and vocabulary are the same number."""
        return TargetSpec(vocab_size=self.vocab_size, width=self.vocab_size, num_layers=1, architecture="toy")

    def init(self, rng: PRNGKeyArray) -> Params:
        """A random table [2, V, V]."""
        return {"table": self.spread * jax.random.normal(rng, (2, self.vocab_size, self.vocab_size), jnp.float32)}

    def init_cache(self, num_rows: int, max_len: int, *, writes_per_pass: int | None = None, dtype: Any = jnp.float32) -> ToyCache:
        """Lengths of 0; a table remembers nothing, so no argument bounds anything."""
        return ToyCache(length=jnp.zeros((num_rows,), jnp.int32))

    def head(self, params: Params) -> TargetHead:
        """Identity in both directions."""
        identity = jnp.eye(self.vocab_size, dtype=jnp.float32)
        return TargetHead(embedding=identity, lm_head=identity)

    def forward(
        self, params: Params, cache: ToyCache | None, tokens: FlatTokens, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "N D"], Float[Array, "N F"], ToyCache | None]:
        """Rows of the table, one-hot features, and the lengths that the valid tokens reach."""
        hidden = params["table"][tokens.position % 2, tokens.ids]
        one_hot = jax.nn.one_hot(tokens.ids, self.vocab_size, dtype=jnp.float32)
        features = jnp.tile(one_hot, (1, len(taps)))
        if cache is None:
            return hidden, features, None
        reached = jnp.where(tokens.valid, tokens.position + 1, 0)
        return hidden, features, ToyCache(length=cache.length.at[tokens.row].max(reached))

    def roll_back(self, cache: ToyCache, length: Int[Array, "R"]) -> ToyCache:
        """Forget everything from position `length[r]` on."""
        return ToyCache(length=jnp.minimum(cache.length, length))
