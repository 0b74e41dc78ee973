"""The confidence head: will draft k survive, given that the drafts before it did?"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.layers import Linear
from dspark_jax.typing import Array, Float, Params


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


def with_confidence_head(drafter: Any, params: Params, rng: jax.Array) -> tuple[Any, Params]:
    """A drafter that has no confidence head with a new one, to be trained while everything else stands (`train.TrainConfig.trainable`).

    A score that stood in for the head goes. What it drafts is unchanged; of DFlash it becomes a DSpark without a sequential head.

    Returns:
      the drafter, and its parameters: those given, and random ones of the head in their dtype.

    Raises:
      ValueError: it has a confidence head.
    """
    if getattr(drafter.config, "confidence_head", False):
        raise ValueError("confidence_head is True; allowed is a drafter without a confidence head")
    extended = drafter.with_confidence()
    head = jax.jit(lambda rng: extended.init(rng)["confidence_head"])(rng)
    dtype = jax.tree.leaves(params)[0].dtype
    return extended, {**params, "confidence_head": jax.tree.map(lambda leaf: leaf.astype(dtype), head)}
