"""Sequential heads: what the previous token adds to the logits that the parallel backbone gives.

A head turns the previous token (and, for richer heads, the hidden state and a carry) into a latent of rank M; the latent times
W2 is the bias on the logits. Splitting it there lets the losses walk over chunks of latents, and lets one kernel serve all heads.
"""

import flax.linen as nn
import jax.numpy as jnp

from dspark_jax.layers import Embedding
from dspark_jax.typing import Array, Float, Int


class VanillaHead(nn.Module):
    """B(x_{k-1}) = W1[x_{k-1}] W2: a low-rank Markov transition (paper section 3.1).

    W1 keeps all V rows, since the anchor may be any token; W2 has a row per token that can be drafted.
    """

    vocab_size: int
    draft_vocab_size: int
    rank: int
    width: int

    def setup(self) -> None:
        self.markov_w1 = Embedding(self.vocab_size, self.rank, "rank")
        self.markov_w2 = Embedding(self.draft_vocab_size, self.rank, "rank")

    def __call__(self, previous: Int[Array, "*batch"], hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch Vd"]:
        """Bias of the first position; reaches every parameter, for `init`."""
        latent, _ = self.step(None, self.embed(previous), hidden)
        return self.bias(latent)

    def embed(self, previous: Int[Array, "*batch"]) -> Float[Array, "*batch M"]:
        """W1 rows of the previous tokens; also a feature of the confidence head."""
        return self.markov_w1(previous)

    def step(
        self, carry: None, embedded: Float[Array, "*batch M"], hidden: Float[Array, "*batch D"]
    ) -> tuple[Float[Array, "*batch M"], None]:
        """Latent of one position, and the carry for the next (None here: the head has no memory beyond the last token)."""
        return embedded, carry

    def block_latents(self, embedded: Float[Array, "*batch G M"], hidden: Float[Array, "*batch G D"]) -> Float[Array, "*batch G M"]:
        """Latents of whole blocks with the true previous tokens, for training."""
        return embedded

    def bias(self, latent: Float[Array, "*batch M"]) -> Float[Array, "*batch Vd"]:
        """Float32 bias on the draft logits."""
        return jnp.einsum("...m,vm->...v", latent, self.markov_w2.weight, preferred_element_type=jnp.float32)


HEADS = {"vanilla": VanillaHead}
"""Sequential heads by their name in a drafter's config."""
