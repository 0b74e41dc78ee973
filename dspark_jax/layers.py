"""Flax Linen layers that targets and drafters share: linear, RMSNorm, rotary positions, attention, gated MLP.

Weights keep the orientation of the checkpoints they come from: (out, in). All softmax arithmetic is float32.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax.typing import Array, Bool, Float, Int, typed

MASKED = -1e30
"""Score of a forbidden key: finite, so that a row without any key gives 0 instead of NaN."""

QUERIES_AT_ONCE = 512
"""Queries of a request whose attention scores exist at the same time."""

FEW_ROWS = 64
"""Up to this many rows a matrix product reads far more weight than it computes; it is then written as weight x activations."""


def parameter(module: nn.Module, name: str, init: nn.initializers.Initializer, shape: tuple[int, ...], axes: tuple[str, ...]) -> Any:
    """A float32 parameter of `module` whose axes have logical names; inside `setup` alone."""
    return module.param(name, nn.with_logical_partitioning(init, axes), shape, jnp.float32)


class Linear(nn.Module):
    """y = x W^T (+ b), W stored as (out, in)."""

    in_features: int
    out_features: int
    in_axis: str
    out_axis: str
    use_bias: bool = False
    init_std: float = 0.02

    def setup(self) -> None:
        init = nn.initializers.normal(self.init_std)
        self.weight = parameter(self, "weight", init, (self.out_features, self.in_features), (self.out_axis, self.in_axis))
        if self.use_bias:
            self.bias = parameter(self, "bias", nn.initializers.zeros, (self.out_features,), (self.out_axis,))

    def __call__(self, x: Float[Array, "*batch I"]) -> Float[Array, "*batch O"]:
        y = matmul_rows(x, self.weight)
        return y + self.bias if self.use_bias else y


@typed
def matmul_rows(x: Float[Array, "*batch I"], weight: Float[Array, "O I"]) -> Float[Array, "*batch O"]:
    """x W^T in the dtype of `x`.

    With few rows the weight stands on the left: on XLA's CPU backend that took up to 30 % less time at 4 to 8 rows, and at worst 5 %
    more, by the shape of the weight (`experiments/results/profile_steps.json`); other backends see the same product.
    """
    if math.prod(x.shape[:-1]) > FEW_ROWS:
        return jax.lax.dot_general(x, weight, (((x.ndim - 1,), (1,)), ((), ())))
    rows = x.reshape(-1, x.shape[-1])
    return jax.lax.dot_general(weight, rows, (((1,), (1,)), ((), ()))).T.reshape(*x.shape[:-1], weight.shape[0])


NormStyle = Literal["llama", "gemma3", "gemma4"]
"""How a family writes RMSNorm: "llama" casts to the input's dtype and then multiplies by w; "gemma4" multiplies first, in float32;
"gemma3" does so by 1 + w."""


@typed
def rms_normalise(x: Float[Array, "*batch E"], eps: float) -> Float[Array, "*batch E"]:
    """x / rms(x) in float32."""
    wide = x.astype(jnp.float32)
    return wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)


class RMSNorm(nn.Module):
    """x / rms(x) with a weight per feature, as `style` has it: statistics in float32, the result in the input's dtype."""

    features: int
    eps: float
    style: NormStyle = "llama"

    def setup(self) -> None:
        init = nn.initializers.zeros if self.style == "gemma3" else nn.initializers.ones
        self.weight = parameter(self, "weight", init, (self.features,), ("norm",))

    def __call__(self, x: Float[Array, "*batch E"]) -> Float[Array, "*batch E"]:
        normed = rms_normalise(x, self.eps)
        if self.style == "llama":
            return self.weight.astype(x.dtype) * normed.astype(x.dtype)
        weight = self.weight.astype(jnp.float32)
        return (normed * (1.0 + weight if self.style == "gemma3" else weight)).astype(x.dtype)


class Embedding(nn.Module):
    """A table of (entries, features), read by row."""

    entries: int
    features: int
    feature_axis: str = "embed"
    init_std: float = 0.02

    def setup(self) -> None:
        init = nn.initializers.normal(self.init_std)
        self.weight = parameter(self, "weight", init, (self.entries, self.features), ("vocab", self.feature_axis))

    def __call__(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch E"]:
        return self.weight[ids]


Activation = Literal["silu", "gelu_tanh"]


class GatedMLP(nn.Module):
    """down(activation(gate(x)) * up(x))."""

    width: int
    inner: int
    activation: Activation = "silu"

    def setup(self) -> None:
        self.gate_proj = Linear(self.width, self.inner, "embed", "mlp")
        self.up_proj = Linear(self.width, self.inner, "embed", "mlp")
        self.down_proj = Linear(self.inner, self.width, "mlp", "embed")

    def __call__(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        gate = self.gate_proj(x)
        gate = nn.silu(gate) if self.activation == "silu" else nn.gelu(gate, approximate=True)
        return self.down_proj(gate * self.up_proj(x))


@dataclasses.dataclass(frozen=True)
class RopeScaling:
    """A change of the rotary frequencies: "linear" divides all of them, "llama3" only the slow ones.

    Attributes:
      factor: divisor of the (slow) frequencies.
      low_freq_factor, high_freq_factor: wavelengths above original_max_position / low are divided in full, those below
        original_max_position / high not at all, the rest is blended ("llama3" alone).
      original_max_position: context length before scaling ("llama3" alone).
    """

    kind: Literal["linear", "llama3"]
    factor: float
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position: int = 8192


def inverse_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None = None, round_to_bf16: bool = False, rotated_share: float = 1.0
) -> Float[Array, "half"]:
    """Rotary frequencies theta^(-2i / head_dim), in radians per position.

    Of the head_dim / 2 pairs the first int(rotated_share x head_dim / 2) turn and the others have frequency 0 (Gemma 4's
    "proportional" rotary positions, where the share is 0.25).

    `round_to_bf16` repeats what the reference does in bfloat16 training, where a cast of the whole model rounds this buffer too
    (an error of up to 0.37 % at head size 128); off by default.
    """
    frequencies = 1.0 / theta ** (jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim)
    if scaling is not None and scaling.kind == "linear":
        frequencies = frequencies / scaling.factor
    elif scaling is not None:
        wavelength = 2 * math.pi / frequencies
        low = scaling.original_max_position / scaling.low_freq_factor
        high = scaling.original_max_position / scaling.high_freq_factor
        blend = (scaling.original_max_position / wavelength - scaling.low_freq_factor) / (
            scaling.high_freq_factor - scaling.low_freq_factor
        )
        blended = (1 - blend) * frequencies / scaling.factor + blend * frequencies
        frequencies = jnp.where(wavelength > low, frequencies / scaling.factor, jnp.where(wavelength < high, frequencies, blended))
    if rotated_share != 1.0:
        frequencies = jnp.where(jnp.arange(head_dim // 2) < int(rotated_share * head_dim // 2), frequencies, 0.0)
    return frequencies.astype(jnp.bfloat16).astype(jnp.float32) if round_to_bf16 else frequencies


@typed
def rope_tables(
    positions: Int[Array, "*batch"], frequencies: Float[Array, "half"]
) -> tuple[Float[Array, "*batch half"], Float[Array, "*batch half"]]:
    """Cosine and sine of every position's angles."""
    angles = positions[..., None].astype(jnp.float32) * frequencies
    return jnp.cos(angles), jnp.sin(angles)


@typed
def rotate(x: Float[Array, "*batch H E"], cos: Float[Array, "*batch half"], sin: Float[Array, "*batch half"]) -> Float[Array, "*batch H E"]:
    """Rotate the pairs (i, i + E/2) of every head ("rotate-half")."""
    first, second = jnp.split(x, 2, axis=-1)
    c, s = cos[..., None, :].astype(x.dtype), sin[..., None, :].astype(x.dtype)
    return jnp.concatenate([first * c - second * s, second * c + first * s], axis=-1)


@dataclasses.dataclass(frozen=True)
class LayerStyle:
    """What a model family fixes about its layers, beyond sizes.

    Attributes:
      norm: kind of every RMSNorm in the layer.
      activation: of the gated MLP.
      qk_norm: query and key heads are normed before they are rotated.
      v_norm: value heads are normed too, without a weight.
      attention_scale: factor on the scores; None for head_dim^-0.5.
      sandwich: attention and MLP outputs are normed as well, before they join the residual stream.
      layer_scalar: the layer's output is multiplied by a stored number, which is never trained.
    """

    norm: NormStyle = "llama"
    activation: Activation = "silu"
    qk_norm: bool = False
    v_norm: bool = False
    attention_scale: float | None = None
    sandwich: bool = False
    layer_scalar: bool = False

    def scale(self, head_dim: int) -> float:
        """Factor on the attention scores."""
        return head_dim**-0.5 if self.attention_scale is None else self.attention_scale


LLAMA_STYLE = LayerStyle()
QWEN3_STYLE = LayerStyle(qk_norm=True)
GEMMA4_STYLE = LayerStyle(
    norm="gemma4", activation="gelu_tanh", qk_norm=True, v_norm=True, attention_scale=1.0, sandwich=True, layer_scalar=True
)


class AttentionProjections(nn.Module):
    """Query, key, value and output projections of one layer, with the optional norms on their heads.

    Attributes:
      width: of the layer, and of its input unless `input_width` is given.
      k_eq_v: no value projection: values are the raw key projections (normed where the style norms values).
    """

    width: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float
    style: LayerStyle = LLAMA_STYLE
    use_bias: bool = False
    output_bias: bool = False
    k_eq_v: bool = False
    input_width: int | None = None

    def setup(self) -> None:
        width = self.width if self.input_width is None else self.input_width
        self.q_proj = Linear(width, self.num_heads * self.head_dim, "embed", "heads", self.use_bias)
        self.k_proj = Linear(width, self.num_kv_heads * self.head_dim, "embed", "kv_heads", self.use_bias)
        if not self.k_eq_v:
            self.v_proj = Linear(width, self.num_kv_heads * self.head_dim, "embed", "kv_heads", self.use_bias)
        self.o_proj = Linear(self.num_heads * self.head_dim, self.width, "heads", "embed", self.output_bias)
        if self.style.qk_norm:
            self.q_norm = RMSNorm(self.head_dim, self.eps, self.style.norm)
            self.k_norm = RMSNorm(self.head_dim, self.eps, self.style.norm)

    def queries(
        self, x: Float[Array, "*batch D"], cos: Float[Array, "*batch half"], sin: Float[Array, "*batch half"]
    ) -> Float[Array, "*batch H E"]:
        heads = self.q_proj(x).reshape(*x.shape[:-1], self.num_heads, self.head_dim)
        return rotate(self.q_norm(heads) if self.style.qk_norm else heads, cos, sin)

    def keys_values(
        self, x: Float[Array, "*batch D"], cos: Float[Array, "*batch half"], sin: Float[Array, "*batch half"]
    ) -> tuple[Float[Array, "*batch K E"], Float[Array, "*batch K E"]]:
        keys = self.k_proj(x).reshape(*x.shape[:-1], self.num_kv_heads, self.head_dim)
        values = keys if self.k_eq_v else self.v_proj(x).reshape(*x.shape[:-1], self.num_kv_heads, self.head_dim)
        if self.style.v_norm:
            values = rms_normalise(values, self.eps).astype(x.dtype)
        return rotate(self.k_norm(keys) if self.style.qk_norm else keys, cos, sin), values

    def output(self, heads: Float[Array, "*batch H E"]) -> Float[Array, "*batch D"]:
        return self.o_proj(heads.reshape(*heads.shape[:-2], self.num_heads * self.head_dim))


class ResidualLayer(nn.Module):
    """What stands around the attention of a layer: norms, residuals and MLP, wired as `style` has it.

    A subclass adds `self_attn`, calls `super().setup()`, feeds its attention from `input_layernorm` and hands the result to
    `after_attention`. One whose MLP is no gated MLP overrides `make_mlp`; one with several residual streams joins
    `attention_update` and `mlp_update` to them itself.
    """

    width: int
    inner: int
    eps: float
    style: LayerStyle

    def setup(self) -> None:
        self.input_layernorm = self._norm()
        self.post_attention_layernorm = self._norm()
        if self.style.sandwich:
            self.pre_feedforward_layernorm = self._norm()
            self.post_feedforward_layernorm = self._norm()
        if self.style.layer_scalar:
            self.layer_scalar = parameter(self, "layer_scalar", nn.initializers.ones, (1,), ("norm",))
        self.mlp = self.make_mlp()

    def _norm(self) -> RMSNorm:
        return RMSNorm(self.width, self.eps, self.style.norm)

    def make_mlp(self) -> nn.Module:
        """The layer's MLP, from width to width."""
        return GatedMLP(self.width, self.inner, self.style.activation)

    def attention_update(self, attended: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """What the attention (output projection included) adds to the residual stream."""
        return self.post_attention_layernorm(attended) if self.style.sandwich else attended

    def mlp_update(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """What the MLP adds to the residual stream `x`."""
        mlp: Any = self.mlp
        if not self.style.sandwich:
            return mlp(self.post_attention_layernorm(x))
        return self.post_feedforward_layernorm(mlp(self.pre_feedforward_layernorm(x)))

    def scaled(self, x: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """The layer's output, times its scalar where it has one: a buffer in the reference, stored and applied, never trained."""
        return x * jax.lax.stop_gradient(self.layer_scalar).astype(x.dtype) if self.style.layer_scalar else x

    def after_attention(self, x: Float[Array, "*batch D"], attended: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """The layer's output from its input and what its attention (output projection included) gave."""
        x = x + self.attention_update(attended)
        return self.scaled(x + self.mlp_update(x))


def in_blocks(function: Callable[..., Array], size: int, *arrays: Array) -> Array:
    """`function(*arrays)`, which treats the places of axis 1 alike: `size` of them are computed at a time, one block after another."""
    rows, length = arrays[0].shape[:2]
    if length <= size:
        return function(*arrays)
    whole = length - length % size

    def split(x: Array) -> Array:
        return x[:, :whole].reshape(rows, whole // size, size, *x.shape[2:]).swapaxes(0, 1)

    blocks = jax.lax.map(lambda parts: function(*parts), tuple(map(split, arrays)))
    done = blocks.swapaxes(0, 1).reshape(rows, whole, *blocks.shape[3:])
    return done if whole == length else jnp.concatenate([done, function(*(x[:, whole:] for x in arrays))], axis=1)


@typed
def attend(
    queries: Float[Array, "R Q H E"],
    keys: Float[Array, "R K T E"],
    values: Float[Array, "R K T E"],
    mask: Bool[Array, "R Q T"],
    scale: float,
) -> Float[Array, "R Q H E"]:
    """Grouped-query attention; heads of one group share a key head. Rows that may see nothing give 0.

    Of many queries the scores exist for a block at a time: of a text of 4,096 tokens and 32 heads all of them would be 2 GiB.
    """
    return attend_parts(queries, ((keys, values, mask),), scale)


@typed
def attend_parts(
    queries: Float[Array, "R Q H E"],
    parts: Sequence[tuple[Float[Array, "R K _ E"], Float[Array, "R K _ E"], Bool[Array, "R Q _"]]],
    scale: float,
) -> Float[Array, "R Q H E"]:
    """`attend` where keys, values and their mask lie in several arrays, which are never joined; the softmax is over all of them."""
    keys, values, masks = zip(*parts, strict=True)

    def block(queries: Array, *masks: Array) -> Array:
        return _attend(queries, keys, values, masks, scale)

    return in_blocks(block, QUERIES_AT_ONCE, queries, *masks)


def _attend(queries: Array, keys: Sequence[Array], values: Sequence[Array], masks: Sequence[Array], scale: float) -> Array:
    num_rows, num_queries, num_heads, head_dim = queries.shape
    kv_heads = keys[0].shape[1]
    grouped = queries.reshape(num_rows, num_queries, kv_heads, num_heads // kv_heads, head_dim)
    allowed = [mask[:, None, None] for mask in masks]
    scores = [jnp.einsum("rqkge,rkte->rkgqt", grouped, part, preferred_element_type=jnp.float32) * scale for part in keys]
    scores = [jnp.where(seen, part, MASKED) for seen, part in zip(allowed, scores, strict=True)]
    peak = functools.reduce(jnp.maximum, [part.max(axis=-1, keepdims=True) for part in scores])
    weights = [jnp.where(seen, jnp.exp(part - peak), 0.0) for seen, part in zip(allowed, scores, strict=True)]
    total = jnp.maximum(functools.reduce(jnp.add, [part.sum(axis=-1, keepdims=True) for part in weights]), 1e-30)
    mixed = [
        jnp.einsum("rkgqt,rkte->rqkge", (weight / total).astype(part.dtype), part) for weight, part in zip(weights, values, strict=True)
    ]
    return functools.reduce(jnp.add, mixed).reshape(num_rows, num_queries, num_heads, head_dim)
