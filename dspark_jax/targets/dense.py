"""One dense decoder for Llama (SmolLM2), Qwen2 and Qwen3: what tells them apart is in the config.

Pre-norm layers, rotary positions, grouped-query attention, gated SiLU MLP. Qwen3 norms its query and key heads, Qwen2 has
biases on q, k and v, small models tie the output head to the embedding.
"""

import dataclasses
import functools
from typing import Any, Literal

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.kv_cache import KVCache
from dspark_jax.layers import (
    LLAMA_STYLE,
    QWEN3_STYLE,
    AttentionProjections,
    Embedding,
    ResidualLayer,
    RMSNorm,
    RopeScaling,
    attend_parts,
    inverse_frequencies,
    rope_tables,
)
from dspark_jax.protocols import FlatTokens, TargetHead, TargetSpec
from dspark_jax.sharding import Initialised, constrain
from dspark_jax.targets.query_grid import QueryGrid, query_grid
from dspark_jax.typing import Array, Bool, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class DenseConfig:
    """Sizes and switches of a dense decoder, under the names of Hugging Face configs where those are clear."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    rope_scaling: RopeScaling | None = None
    qk_norm: bool = False
    attention_bias: bool = False
    output_bias: bool = False
    tie_word_embeddings: bool = False
    max_position_embeddings: int = 8192
    architecture: str = "LlamaForCausalLM"

    def __post_init__(self) -> None:
        for field in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads ({self.num_kv_heads})")


class DenseLayer(ResidualLayer):
    """One decoder layer on flat tokens."""

    config: DenseConfig
    late_writes: bool

    def setup(self) -> None:
        super().setup()
        config = self.config
        self.self_attn = AttentionProjections(
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.rms_norm_eps,
            self.style,
            config.attention_bias,
            config.output_bias,
        )

    def __call__(
        self,
        x: Float[Array, "N D"],
        cos: Float[Array, "N half"],
        sin: Float[Array, "N half"],
        tokens: FlatTokens,
        layout: QueryGrid,
        mask: Bool[Array, "R Q T"],
        cached: tuple[Array, Array] | None,
    ) -> tuple[Float[Array, "N D"], tuple[Array, Array] | None]:
        """The layer's output, and its part of the cache: as it is behind the pass, or what is still to be written to it (`late_writes`).

        `mask` is over the slots of the cache where there is one, and leaves the pass's own tokens out where those are written late.
        """
        queries_per_row, scale = tokens.queries_per_row, self.style.scale(self.config.head_dim)
        normed = self.input_layernorm(x)
        queries = self.self_attn.queries(normed, cos, sin)
        new = self.self_attn.keys_values(normed, cos, sin)
        if cached is not None:
            # What a pass sees of itself is what later ones will see of it.
            new = new[0].astype(cached[0].dtype), new[1].astype(cached[1].dtype)
        if cached is not None and not self.late_writes:
            place = tokens.row, tokens.position, tokens.valid
            new = kv_cache.write(cached[0], new[0], *place), kv_cache.write(cached[1], new[1], *place)
            parts = [(*new, mask)]
        else:
            own = tuple(layout.to_grid(each, queries_per_row).swapaxes(1, 2) for each in new)
            causal = jnp.tril(jnp.ones((queries_per_row, queries_per_row), bool))
            among = mask if cached is None else jnp.broadcast_to(causal, (layout.num_rows, *causal.shape))
            parts = [(*own, among)] if cached is None else [(*cached, mask), (*own, among)]
        with jax.named_scope("attention"):
            grid = layout.to_grid(queries, queries_per_row)
            parts = [(keys.astype(x.dtype), values.astype(x.dtype), seen) for keys, values, seen in parts]
            heads = attend_parts(grid, parts, scale)
        return self.after_attention(x, self.self_attn.output(layout.to_flat(heads))), None if cached is None else new


class DenseDecoder(nn.Module):
    """The network behind `DenseTarget`."""

    config: DenseConfig
    late_writes: bool = False

    def setup(self) -> None:
        config = self.config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        style = QWEN3_STYLE if config.qk_norm else LLAMA_STYLE
        sizes = (config.hidden_size, config.intermediate_size, config.rms_norm_eps)
        self.layers = [DenseLayer(*sizes, style, config, self.late_writes) for _ in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size)

    def __call__(
        self, cache: KVCache | None, tokens: FlatTokens, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "N D"], Float[Array, "N F"], KVCache | None]:
        config = self.config
        if cache is None and not tokens.is_grid:
            raise ValueError("cache is None; a forward pass without a cache takes a grid of tokens (FlatTokens.grid)")
        num_rows = tokens.ids.shape[0] // tokens.queries_per_row if cache is None else cache.length.shape[0]
        layout = query_grid(tokens, num_rows)
        if cache is None:
            mask = tokens.seen_in_grid()
        else:
            position = tokens.position if layout.index is None else tokens.position[layout.index]
            last = position.reshape(num_rows, tokens.queries_per_row, 1)
            if self.late_writes:
                last = jnp.broadcast_to(last[:, :1] - 1, last.shape)
            mask = jnp.arange(cache.num_slots, dtype=jnp.int32) <= last
        cos, sin = rope_tables(tokens.position, inverse_frequencies(config.head_dim, config.rope_theta, config.rope_scaling))

        # Texts are many: each device has whole rows of its own, and fetches a layer's parameters. The tokens of a round are few: every
        # device has all of them, for the parameters that it holds.
        axes = ("batch", None) if cache is None else (None, "embed")
        x = constrain(self.embed_tokens(tokens.ids), *axes)
        outputs = {-1: x}
        keys, values = [], []
        for i, layer in enumerate(self.layers):
            x, new = layer(x, cos, sin, tokens, layout, mask, None if cache is None else (cache.keys[i], cache.values[i]))
            x = constrain(x, *axes)
            if new is not None:
                keys.append(new[0])
                values.append(new[1])
            if i in taps:
                outputs[i] = x
        features = jnp.concatenate([outputs[tap] for tap in taps], axis=-1) if taps else jnp.zeros((x.shape[0], 0), x.dtype)
        if cache is not None:
            place = tokens.row, tokens.position, tokens.valid
            if self.late_writes:
                # The barrier keeps the writes behind the last layer: next to a layer's attention, the compiler for TPUs would write to the
                # copy that is on the chip, and then the whole copy back.
                x, keys, values = jax.lax.optimization_barrier((x, keys, values))
                keys = [kv_cache.write(old, new, *place) for old, new in zip(cache.keys, keys, strict=True)]
                values = [kv_cache.write(old, new, *place) for old, new in zip(cache.values, values, strict=True)]
            cache = KVCache(tuple(keys), tuple(values), kv_cache.extend_length(cache.length, *place))
        return constrain(self.norm(x), *axes), features, cache

    def touch_head(self) -> Array:
        """Reaches the parameters that the forward pass leaves to `TargetHead`, for `init`."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def initialise(self, tokens: FlatTokens) -> None:
        self(None, tokens, ())
        self.touch_head()


@dataclasses.dataclass(frozen=True)
class DenseTarget(Initialised):
    """A dense decoder as a `protocols.Target`. Computes in the dtype of its parameters.

    Attributes:
      cache_writes: when a pass writes its keys and values: "early", each layer before its attention, which then reads the cache alone;
        "late", all layers at the end, and attention reads cache and pass as two arrays; "auto": late on TPUs, where a cache that is
        written beside its attention is written back whole (`experiments/results/aot.md`), early elsewhere.
    """

    config: DenseConfig
    cache_writes: Literal["auto", "early", "late"] = "auto"

    def __post_init__(self) -> None:
        if self.cache_writes not in ("auto", "early", "late"):
            raise ValueError(f"cache_writes is {self.cache_writes!r}; allowed: auto, early, late")

    @property
    def spec(self) -> TargetSpec:
        return TargetSpec(self.config.vocab_size, self.config.hidden_size, self.config.num_layers, self.config.architecture)

    @functools.cached_property
    def _network(self) -> DenseDecoder:
        late = self.cache_writes == "late" or (self.cache_writes == "auto" and jax.default_backend() == "tpu")
        return DenseDecoder(self.config, late)

    def _boxed_init(self, rng: jax.Array) -> Any:
        one = jnp.zeros((1, 1), jnp.int32)
        tokens = FlatTokens.grid(one, one[0], one[0] + 1)
        return self._network.init(rng, tokens, method="initialise")["params"]

    def init_cache(self, num_rows: int, max_len: int, *, writes_per_pass: int | None = None, dtype: Any = jnp.float32) -> KVCache:
        """An empty cache of max_len slots per request; there is no window, so `writes_per_pass` changes nothing."""
        config = self.config
        return kv_cache.empty_cache(config.num_layers, num_rows, config.num_kv_heads, max_len, config.head_dim, dtype)

    def head(self, params: Params) -> TargetHead:
        """Embedding and output head."""
        embedding = params["embed_tokens"]["weight"]
        return TargetHead(embedding=embedding, lm_head=embedding if self.config.tie_word_embeddings else params["lm_head"]["weight"])

    def forward(
        self, params: Params, cache: KVCache | None, tokens: FlatTokens, taps: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "N D"], Float[Array, "N F"], KVCache | None]:
        """See `protocols.Target.forward`."""
        if any(not -1 <= tap < self.config.num_layers for tap in taps):
            raise ValueError(
                f"taps is {taps}; each must be in -1..{self.config.num_layers - 1} for a target of {self.config.num_layers} layers"
            )
        out: Any = self._network.apply({"params": params}, cache, tokens, taps)
        return out

    def roll_back(self, cache: KVCache, length: Int[Array, "R"]) -> KVCache:
        """See `protocols.Target.roll_back`."""
        return kv_cache.roll_back(cache, length)
