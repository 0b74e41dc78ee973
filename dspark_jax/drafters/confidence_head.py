"""The confidence head: will draft k survive, given that the drafts before it did?"""

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.layers import Linear
from dspark_jax.typing import Array, Float


class ConfidenceHead(nn.Module):
    """c_k = sigmoid(w . [h_k ; W1[x_{k-1}]] + b) (paper section 3.2); gives the logit, float32.

    It reads x_{k-1} and never x_k, so that a policy may act on it before x_k is drawn. `detach` stops its loss from reaching the
    backbone and W1 [E4].
    """

    width: int
    rank: int
    detach: bool = False

    def setup(self) -> None:
        self.proj = Linear(self.width + self.rank, 1, "norm", "norm", use_bias=True)

    def __call__(self, hidden: Float[Array, "*batch D"], embedded: Float[Array, "*batch M"] | None) -> Float[Array, "*batch"]:
        inputs = hidden if embedded is None else jnp.concatenate([hidden, embedded], axis=-1)
        if self.detach:
            inputs = jax.lax.stop_gradient(inputs)
        return self.proj(inputs)[..., 0].astype(jnp.float32)
