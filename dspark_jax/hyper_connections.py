"""Manifold-constrained hyper-connections: n residual streams where a plain layer has one.

A sub-layer F (attention or MLP) reads a mixture of the streams and writes its output back to all of them:

    x_{l+1} = H_res x_l + H_post F(H_pre x_l),   x "n D", H_pre "n", H_post "n", H_res "n n"

H_pre = sigmoid(.) and H_post = 2 sigmoid(.) are non-negative; H_res is doubly stochastic, so that the mean over the streams passes
unchanged however deep the network. Each has a static part and one that depends on the streams through a small learned gate.

Source: "mHC: Manifold-Constrained Hyper-Connections" (DeepSeek, arXiv 2512.24880), as DeepSeek-V4 uses it; parameters are named as
in its checkpoints (`fn`, `base`, `scale`, each in the order pre, post, residual). The start is our own choice: `fn` 0
(as in the original hyper-connections, arXiv 2409.19606), gates 0.01, and static parts that make the network equal to one with plain
residuals as long as nothing is trained, although every sub-layer prefers another stream (equal streams would stay equal for ever).
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.layers import parameter, rms_normalise
from dspark_jax.typing import Array, Float, typed

SINKHORN_STEPS = 20
GATE_AT_START = 0.01
KEPT_AT_START = 3.0
"""Logit by which a stream prefers itself in the static part of H_res: 0.87 of each of four streams stay where they are."""


@typed
def sinkhorn(logits: Float[Array, "*batch n n"], steps: int = SINKHORN_STEPS) -> Float[Array, "*batch n n"]:
    """The doubly stochastic matrix that normalising columns and rows of exp(logits) in turn leads to; float32.

    Worked out on logarithms, so that no row of large negative logits vanishes. The rows come last: they sum to 1 exactly, and the
    columns as far as `steps` reach.
    """

    def step(_: Array, scores: Array) -> Array:
        scores = scores - jax.nn.logsumexp(scores, axis=-2, keepdims=True)
        return scores - jax.nn.logsumexp(scores, axis=-1, keepdims=True)

    return jnp.exp(jax.lax.fori_loop(0, steps, step, logits.astype(jnp.float32)))


@struct.dataclass
class Connection:
    """How one sub-layer's output joins the streams: `write` is H_post, `mix` is H_res."""

    write: Float[Array, "*batch n"]
    mix: Float[Array, "*batch n n"]


def _logit(weight: np.ndarray) -> np.ndarray:
    """The number whose sigmoid is `weight`."""
    return np.log(weight) - np.log1p(-weight)


def _constant(values: np.ndarray) -> nn.initializers.Initializer:
    """An initialiser that gives `values`, whatever the key."""
    return lambda key, shape, dtype=jnp.float32: jnp.asarray(values, dtype).reshape(shape)


def _logits(module: Any, streams: Array, eps: float) -> Array:
    """Dynamic projections of the streams, all of them normed together (without a weight), float32."""
    flat = rms_normalise(streams.reshape(*streams.shape[:-2], -1), eps)
    return jnp.einsum("...f,of->...o", flat, module.fn.astype(jnp.float32))


class HyperConnection(nn.Module):
    """The three mappings around one sub-layer.

    Attributes:
      num_streams: n, at least 2.
      index: of the sub-layer; stream index mod n is the one it reads most at the start.
    """

    num_streams: int
    width: int
    eps: float
    index: int

    def setup(self) -> None:
        n = self.num_streams
        size = (2 + n) * n
        # Readings sum to 1, half of them from one stream and half from all; writes are 1; streams stay mostly unmixed.
        reading = np.full(n, 0.5 / n)
        reading[self.index % n] += 0.5
        base = np.concatenate([_logit(reading), np.zeros(n), KEPT_AT_START * np.eye(n).reshape(-1)])
        self.fn = parameter(self, "fn", nn.initializers.zeros, (size, n * self.width), ("streams", "features"))
        self.base = parameter(self, "base", _constant(base), (size,), ("streams",))
        self.scale = parameter(self, "scale", nn.initializers.constant(GATE_AT_START), (3,), ("streams",))

    def __call__(self, streams: Float[Array, "*batch n D"]) -> tuple[Float[Array, "*batch D"], Connection]:
        """What the sub-layer reads, and how its output is to be joined (`reconnect`)."""
        n = self.num_streams
        gates = self.scale.astype(jnp.float32)[np.repeat(np.arange(3), (n, n, n * n))]
        logits = _logits(self, streams, self.eps) * gates + self.base.astype(jnp.float32)
        read = nn.sigmoid(logits[..., :n]).astype(streams.dtype)
        write = 2 * nn.sigmoid(logits[..., n : 2 * n])
        mix = sinkhorn(logits[..., 2 * n :].reshape(*logits.shape[:-1], n, n))
        return jnp.einsum("...n,...nd->...d", read, streams), Connection(write, mix)


class StreamMerge(nn.Module):
    """One stream out of n, before the final norm: a learned reading, their mean at the start."""

    num_streams: int
    width: int
    eps: float

    def setup(self) -> None:
        n = self.num_streams
        self.fn = parameter(self, "fn", nn.initializers.zeros, (n, n * self.width), ("streams", "features"))
        self.base = parameter(self, "base", _constant(_logit(np.full(n, 1 / n))), (n,), ("streams",))
        self.scale = parameter(self, "scale", nn.initializers.constant(GATE_AT_START), (1,), ("streams",))

    def __call__(self, streams: Float[Array, "*batch n D"]) -> Float[Array, "*batch D"]:
        logits = _logits(self, streams, self.eps) * self.scale.astype(jnp.float32) + self.base.astype(jnp.float32)
        return jnp.einsum("...n,...nd->...d", nn.sigmoid(logits).astype(streams.dtype), streams)


@typed
def expand(x: Float[Array, "*batch D"], num_streams: int) -> Float[Array, "*batch {num_streams} D"]:
    """The streams at the beginning: the embedding in each of them."""
    return jnp.broadcast_to(x[..., None, :], (*x.shape[:-1], num_streams, x.shape[-1]))


@typed
def reconnect(streams: Float[Array, "*batch n D"], connection: Connection, output: Float[Array, "*batch D"]) -> Float[Array, "*batch n D"]:
    """The streams behind a sub-layer: mixed among themselves, and its output added to each with its weight."""
    mixed = jnp.einsum("...mn,...nd->...md", connection.mix.astype(streams.dtype), streams)
    return mixed + connection.write.astype(streams.dtype)[..., None] * output[..., None, :]
