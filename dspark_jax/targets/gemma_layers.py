"""Configs and decoder layers of Gemma 3 and Gemma 4 (text): what tells the families, and the two kinds of layers, apart.

A layer looks back over a window ("sliding_attention") or over everything ("full_attention"); the kinds differ in rotary base, and in
Gemma 4 in the size of their heads as well.
"""

import dataclasses
import functools
from typing import Literal

import flax.linen as nn
import jax
from flax import struct

from dspark_jax import kv_cache
from dspark_jax.layers import (
    AttentionProjections,
    LayerStyle,
    Linear,
    ResidualLayer,
    RMSNorm,
    RopeScaling,
    attend,
    inverse_frequencies,
    rope_tables,
)
from dspark_jax.protocols import FlatTokens
from dspark_jax.targets.query_grid import QueryGrid
from dspark_jax.typing import Array, Bool, Float, Int

LayerType = Literal["sliding_attention", "full_attention"]
SLIDING: LayerType = "sliding_attention"
FULL: LayerType = "full_attention"

GEMMA3_STYLE = LayerStyle(norm="gemma3", activation="gelu_tanh", qk_norm=True, sandwich=True)
"""`attention_scale` is query_pre_attn_scalar^-0.5, of the model's own config."""


@dataclasses.dataclass(frozen=True)
class AttentionKind:
    """Sizes and positions that all layers of one kind share.

    Attributes:
      window: positions that a query sees, its own counted; None for all before it.
      rotated_share: share of the rotary pairs that turn (Gemma 4's full layers: 0.25).
      k_eq_v: no value projection: values are the raw key projections.
    """

    num_kv_heads: int
    head_dim: int
    rope_theta: float
    window: int | None = None
    rope_scaling: RopeScaling | None = None
    rotated_share: float = 1.0
    k_eq_v: bool = False

    def __post_init__(self) -> None:
        for field in ("num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.window is not None and self.window < 1:
            raise ValueError(f"sliding_window is {self.window}; it must be at least 1, or None")

    def rope(self, positions: Int[Array, "N"]) -> tuple[Float[Array, "N half"], Float[Array, "N half"]]:
        """Cosine and sine of every position's angles."""
        return rope_tables(
            positions, inverse_frequencies(self.head_dim, self.rope_theta, self.rope_scaling, rotated_share=self.rotated_share)
        )

    def mask(self, query: Int[Array, "R Q"], key: Int[Array, "#R T"]) -> Bool[Array, "R Q T"]:
        """Which keys each query sees, by their positions; negative ones hold nothing."""
        query, key = query[:, :, None], key[:, None, :]
        seen = (key >= 0) & (key <= query)
        return seen if self.window is None else seen & (query - key < self.window)


@dataclasses.dataclass(frozen=True)
class GemmaConfig:
    """Sizes and switches of a Gemma decoder.

    Attributes:
      layer_types: kind of every layer; at least one looks back over everything.
      style: GEMMA3_STYLE with its attention scale, or GEMMA4_STYLE.
      full, sliding: what the layers of either kind share.
      final_softcap: bound of the logits, tanh(x / c) c; None for none.
      per_layer_width: features that every layer gets of every token from a table of its own (Gemma 4, "PLE"); 0 for none.
      per_layer_vocab_size: rows of that table.
      num_kv_shared_layers: last layers that have no keys and values and read those of the last layer of their kind that has.
      double_wide_mlp: their MLPs are twice as wide.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    layer_types: tuple[LayerType, ...]
    style: LayerStyle
    full: AttentionKind
    sliding: AttentionKind
    rms_norm_eps: float = 1e-6
    attention_bias: bool = False
    final_softcap: float | None = None
    per_layer_width: int = 0
    per_layer_vocab_size: int = 0
    num_kv_shared_layers: int = 0
    double_wide_mlp: bool = False
    tie_word_embeddings: bool = True
    max_position_embeddings: int = 8192
    architecture: str = "Gemma3ForCausalLM"

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_heads"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        for kind in {self.kind_of(each) for each in self.layer_types}:
            if self.num_heads % kind.num_kv_heads:
                raise ValueError(f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads ({kind.num_kv_heads})")
        own = self.num_layers - self.num_kv_shared_layers
        if not 0 <= self.num_kv_shared_layers < self.num_layers or not set(self.layer_types[own:]) <= set(self.layer_types[:own]):
            raise ValueError(
                f"num_kv_shared_layers is {self.num_kv_shared_layers} of {self.num_layers} layers; before the layers that share keys "
                "there must be one of every kind that they need"
            )
        if FULL not in self.layer_types[:own]:
            raise ValueError(f"layer_types is {self.layer_types}; at least one layer with keys of its own must be {FULL!r}")
        if (self.sliding.window is None) or (self.full.window is not None):
            raise ValueError(
                f"window is {self.sliding.window} of the sliding and {self.full.window} of the full layers; the former alone have one"
            )
        if self.per_layer_width < 0 or (self.per_layer_width > 0) != (self.per_layer_vocab_size > 0):
            raise ValueError(
                f"per_layer_width is {self.per_layer_width} and per_layer_vocab_size {self.per_layer_vocab_size}; both positive, or both 0"
            )

    @property
    def num_layers(self) -> int:
        return len(self.layer_types)

    def kind_of(self, layer_type: LayerType) -> AttentionKind:
        """What the layers of `layer_type` share.

        Raises:
          ValueError: for a kind that does not exist.
        """
        if layer_type not in (SLIDING, FULL):
            raise ValueError(f"layer_types holds {layer_type!r}; allowed: {SLIDING!r}, {FULL!r}")
        return self.full if layer_type == FULL else self.sliding

    def key_layer(self, layer: int) -> int:
        """The layer whose keys and values `layer` reads: itself, or the last one of its kind that has some."""
        own = self.num_layers - self.num_kv_shared_layers
        return layer if layer < own else max(i for i in range(own) if self.layer_types[i] == self.layer_types[layer])

    def mlp_width(self, layer: int) -> int:
        """Inner width of the MLP of `layer`."""
        return self.intermediate_size * (2 if self.double_wide_mlp and self.key_layer(layer) != layer else 1)


@struct.dataclass
class AttentionPass:
    """What all layers of one kind need of a forward pass.

    Attributes:
      mask: which keys, cached or of the pass itself, every query sees.
    """

    cos: Float[Array, "N half"]
    sin: Float[Array, "N half"]
    mask: Bool[Array, "R Q T"]


KeysValues = tuple[Float[Array, "R K T E"], Float[Array, "R K T E"]]


class GemmaLayer(ResidualLayer):
    """One decoder layer on flat tokens."""

    config: GemmaConfig
    kind: AttentionKind

    def setup(self) -> None:
        super().setup()
        config, kind = self.config, self.kind
        self.self_attn = AttentionProjections(
            config.hidden_size,
            config.num_heads,
            kind.num_kv_heads,
            kind.head_dim,
            config.rms_norm_eps,
            self.style,
            config.attention_bias,
            config.attention_bias,
            k_eq_v=kind.k_eq_v,
        )
        if config.per_layer_width:
            self.per_layer_input_gate = Linear(config.hidden_size, config.per_layer_width, "embed", "features")
            self.per_layer_projection = Linear(config.per_layer_width, config.hidden_size, "features", "embed")
            self.post_per_layer_input_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, self.style.norm)

    def __call__(
        self,
        x: Float[Array, "N D"],
        state: AttentionPass,
        tokens: FlatTokens,
        layout: QueryGrid,
        cached: KeysValues | None,
        lent: KeysValues | None,
        per_layer_input: Float[Array, "N E"] | None,
    ) -> tuple[Float[Array, "N D"], KeysValues]:
        """The layer's output, and the keys and values that it read.

        `cached` are its own of earlier passes (None without a cache), `lent` another layer's, of this pass included (None where this
        layer has its own).
        """
        normed = self.input_layernorm(x)
        queries = self.self_attn.queries(normed, state.cos, state.sin)
        keys, values = self._keys_values(normed, state, tokens, layout, cached) if lent is None else lent
        with jax.named_scope("attention"):
            grid = layout.to_grid(queries, tokens.queries_per_row)
            heads = attend(grid, keys.astype(x.dtype), values.astype(x.dtype), state.mask, self.style.scale(self.kind.head_dim))
        x = x + self.attention_update(self.self_attn.output(layout.to_flat(heads)))
        x = x + self.mlp_update(x)
        if per_layer_input is not None:
            gate = nn.gelu(self.per_layer_input_gate(x), approximate=True)
            x = x + self.post_per_layer_input_norm(self.per_layer_projection(gate * per_layer_input))
        return self.scaled(x), (keys, values)

    def _keys_values(
        self,
        normed: Float[Array, "N D"],
        state: AttentionPass,
        tokens: FlatTokens,
        layout: QueryGrid,
        cached: KeysValues | None,
    ) -> KeysValues:
        keys, values = self.self_attn.keys_values(normed, state.cos, state.sin)
        if cached is None:
            keys, values = (layout.to_grid(new, tokens.queries_per_row).swapaxes(1, 2) for new in (keys, values))
            return keys, values
        write = functools.partial(
            kv_cache.write, row=tokens.row, position=tokens.position, valid=tokens.valid, ring=self.kind.window is not None
        )
        return write(cached[0], keys), write(cached[1], values)
