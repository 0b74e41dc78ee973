"""Sequential heads: what the previous token adds to the logits that the parallel backbone gives.

A head turns the previous token (and, for richer heads, the hidden state and a carry) into a latent of rank M; the latent times
W2 is the bias on the logits. Splitting it there lets the losses walk over chunks of latents, and lets one kernel serve all heads.
"""

from typing import Any, ClassVar

import flax.linen as nn
import jax.numpy as jnp

from dspark_jax.layers import Embedding, Linear
from dspark_jax.typing import Array, Float, Int


class VanillaHead(nn.Module):
    """B(x_{k-1}) = W1[x_{k-1}] W2: a low-rank Markov transition (paper section 3.1).

    W1 keeps all V rows, since the anchor may be any token; W2 has a row per token that can be drafted.

    Attributes:
      reads_last_token_alone: whether latents are rows of W1, so that one kernel can draw a whole block.
    """

    reads_last_token_alone: ClassVar[bool] = True

    vocab_size: int
    draft_vocab_size: int
    rank: int
    width: int

    def setup(self) -> None:
        self.markov_w1 = Embedding(self.vocab_size, self.rank, "rank")
        self.markov_w2 = Embedding(self.draft_vocab_size, self.rank, "rank")

    def __call__(self, previous: Int[Array, "*batch"], hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch Vd"]:
        """Bias of the first position; reaches every parameter, for `init`."""
        latent, _ = self.step(self.first_carry(hidden), self.embed(previous), hidden)
        return self.bias(latent)

    def embed(self, previous: Int[Array, "*batch"]) -> Float[Array, "*batch M"]:
        """W1 rows of the previous tokens; also a feature of the confidence head."""
        return self.markov_w1(previous)

    def first_carry(self, hidden: Float[Array, "*batch D"]) -> Any:
        """What the first position's step is given; None here: the head has no memory beyond the last token."""
        return None

    def step(
        self, carry: Any, embedded: Float[Array, "*batch M"], hidden: Float[Array, "*batch D"]
    ) -> tuple[Float[Array, "*batch M"], Any]:
        """Latent of one position, and the carry for the next."""
        return embedded, carry

    def block_latents(self, embedded: Float[Array, "*batch G M"], hidden: Float[Array, "*batch G D"]) -> Float[Array, "*batch G M"]:
        """Latents of whole blocks with the true previous tokens, for training."""
        return embedded

    def bias(self, latent: Float[Array, "*batch M"]) -> Float[Array, "*batch Vd"]:
        """Float32 bias on the draft logits."""
        return jnp.einsum("...m,vm->...v", latent, self.markov_w2.weight, preferred_element_type=jnp.float32)


class GatedHead(VanillaHead):
    """B = (sigmoid(g) * W1[x_{k-1}]) W2, with g read from the hidden state and W1[x_{k-1}].

    An option of the reference; the paper has no such head.
    """

    reads_last_token_alone = False

    def setup(self) -> None:
        super().setup()
        self.gate_proj = Linear(self.width + self.rank, self.rank, "embed", "rank", use_bias=True)

    def step(
        self, carry: Any, embedded: Float[Array, "*batch M"], hidden: Float[Array, "*batch D"]
    ) -> tuple[Float[Array, "*batch M"], Any]:
        """See `VanillaHead.step`."""
        return self.block_latents(embedded, hidden), carry

    def block_latents(self, embedded: Float[Array, "*batch M"], hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch M"]:
        """See `VanillaHead.block_latents`; positions do not depend on each other."""
        return nn.sigmoid(self.gate_proj(jnp.concatenate([hidden, embedded], axis=-1))) * embedded


class RNNHead(VanillaHead):
    """A recurrent head: B = tanh(o) W2, s' = sig(g) s + (1 - sig(g)) tanh(c), where (g, c, o) is linear in [s ; W1[x_{k-1}] ; h_k].

    The state s is 0 at the start of a block; the output of a position reads the state before its update.
    """

    reads_last_token_alone = False

    def setup(self) -> None:
        super().setup()
        self.joint_proj = Linear(2 * self.rank + self.width, 3 * self.rank, "embed", "rank", use_bias=True)

    def first_carry(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch M"]:
        """The state of an empty block."""
        return jnp.zeros((*hidden.shape[:-1], self.rank), hidden.dtype)

    def step(
        self, carry: Float[Array, "*batch M"], embedded: Float[Array, "*batch M"], hidden: Float[Array, "*batch D"]
    ) -> tuple[Float[Array, "*batch M"], Float[Array, "*batch M"]]:
        """See `VanillaHead.step`; the carry is the recurrent state."""
        joint = self.joint_proj(jnp.concatenate([carry, embedded, hidden], axis=-1))
        gate, candidate, output = jnp.split(joint, 3, axis=-1)
        gate = nn.sigmoid(gate)
        return jnp.tanh(output), gate * carry + (1.0 - gate) * jnp.tanh(candidate)

    def block_latents(self, embedded: Float[Array, "*batch G M"], hidden: Float[Array, "*batch G D"]) -> Float[Array, "*batch G M"]:
        """See `VanillaHead.block_latents`; walks the block left to right."""
        carry = self.first_carry(hidden[..., 0, :])
        latents = []
        # G is small and the body is two products: unrolled, XLA fuses it with what surrounds it.
        for k in range(hidden.shape[-2]):
            latent, carry = self.step(carry, embedded[..., k, :], hidden[..., k, :])
            latents.append(latent)
        return jnp.stack(latents, axis=-2)


HEADS = {"vanilla": VanillaHead, "gated": GatedHead, "rnn": RNNHead}
"""Sequential heads by their name in a drafter's config."""
