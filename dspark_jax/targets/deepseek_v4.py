"""A small decoder in the manner of DeepSeek-V4: a stand-in that hosts the V4-style drafter in tests and ablations.

Mixture-of-experts MLPs with shared experts behind the first dense layers, and multi-head latent attention: queries through a low
rank, and one compressed latent per position that serves the keys and values of all heads, beside one rotary key. The cache holds
latent and rotary key alone, and scores are taken in the latent's space (DeepSeek-V2, arXiv 2405.04434, section 2.1; V3, arXiv
2412.19437, section 2.1.1). Layers may look back over a window and keep rings.

What of V4 is not here: its attention (compressed and sparse long-range keys beside the window, sinks, grouped output projections),
its residual streams, its hash-routed layers, and its weights: parameters are random or trained on the spot.
"""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.kv_cache import KVCache
from dspark_jax.layers import LLAMA_STYLE, Embedding, Linear, ResidualLayer, RMSNorm, attend, inverse_frequencies, rope_tables, rotate
from dspark_jax.moe import MoE, MoEConfig
from dspark_jax.protocols import FlatTokens, TargetHead, TargetSpec
from dspark_jax.sharding import Initialised
from dspark_jax.targets.query_grid import QueryGrid, query_grid
from dspark_jax.typing import Array, Bool, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class DeepSeekV4Config:
    """Sizes of the stand-in, under the names of DeepSeek's configs.

    Attributes:
      intermediate_size: inner width of the dense layers.
      experts: the mixture of the other layers.
      q_lora_rank: rank of the queries.
      kv_lora_rank: width of the latent that keys and values come from.
      qk_nope_head_dim, qk_rope_head_dim: unrotated and rotated part of a query or key head.
      v_head_dim: width of a value head.
      first_k_dense_replace: layers at the bottom that have no experts.
      sliding_window: positions that a windowed layer sees, the query's own counted; None where all layers see everything.
      full_attention_interval: where there is a window, every such-and-such layer sees everything nevertheless.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    experts: MoEConfig
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    first_k_dense_replace: int = 1
    sliding_window: int | None = None
    full_attention_interval: int = 2
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10_000.0
    architecture: str = "DeepSeekV4StandIn"

    def __post_init__(self) -> None:
        for field in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "q_lora_rank", "kv_lora_rank"),
            *("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"),
        ):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.qk_rope_head_dim % 2:
            raise ValueError(f"qk_rope_head_dim is {self.qk_rope_head_dim}; rotary positions turn pairs, it must be even")
        if not 0 <= self.first_k_dense_replace <= self.num_layers:
            raise ValueError(f"first_k_dense_replace is {self.first_k_dense_replace}; it must be in 0..{self.num_layers} (num_layers)")
        if self.sliding_window is not None and self.sliding_window < 1:
            raise ValueError(f"sliding_window is {self.sliding_window}; it must be at least 1, or None")
        if not 1 <= self.full_attention_interval <= self.num_layers:
            raise ValueError(
                f"full_attention_interval is {self.full_attention_interval}; it must be in 1..{self.num_layers} (num_layers), so that "
                "some layer sees everything"
            )

    def window(self, layer: int) -> int | None:
        """Positions that a layer sees; None for all of them."""
        return None if (layer + 1) % self.full_attention_interval == 0 else self.sliding_window

    @property
    def entry_width(self) -> int:
        """Numbers that a layer keeps of a position: the latent and the rotary key."""
        return self.kv_lora_rank + self.qk_rope_head_dim


class LatentAttention(nn.Module):
    """Projections of multi-head latent attention.

    Keys and values of the heads are never formed: their projections act on the queries and on the mixed latents instead.
    """

    config: DeepSeekV4Config

    def setup(self) -> None:
        config = self.config
        head, heads = config.qk_nope_head_dim + config.qk_rope_head_dim, config.num_heads
        self.q_a_proj = Linear(config.hidden_size, config.q_lora_rank, "embed", "rank")
        self.q_a_layernorm = RMSNorm(config.q_lora_rank, config.rms_norm_eps)
        self.q_b_proj = Linear(config.q_lora_rank, heads * head, "rank", "heads")
        self.kv_a_proj_with_mqa = Linear(config.hidden_size, config.entry_width, "embed", "rank")
        self.kv_a_layernorm = RMSNorm(config.kv_lora_rank, config.rms_norm_eps)
        self.kv_b_proj = Linear(config.kv_lora_rank, heads * (config.qk_nope_head_dim + config.v_head_dim), "rank", "heads")
        self.o_proj = Linear(heads * config.v_head_dim, config.hidden_size, "heads", "embed")

    def _key_value_weights(self) -> tuple[Float[Array, "H E C"], Float[Array, "H V C"]]:
        """What takes a latent to the unrotated keys and to the values of every head."""
        config = self.config
        both = self.kv_b_proj.weight.reshape(config.num_heads, -1, config.kv_lora_rank)
        return both[:, : config.qk_nope_head_dim], both[:, config.qk_nope_head_dim :]

    def queries(self, x: Float[Array, "N D"], cos: Float[Array, "N half"], sin: Float[Array, "N half"]) -> Float[Array, "N H E"]:
        """Query heads in the space of the cached entries, E = latent + rotary."""
        config = self.config
        heads = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x))).reshape(x.shape[0], config.num_heads, -1)
        plain, turning = heads[..., : config.qk_nope_head_dim], heads[..., config.qk_nope_head_dim :]
        in_latent = jnp.einsum("nhe,hec->nhc", plain, self._key_value_weights()[0])
        return jnp.concatenate([in_latent, rotate(turning, cos, sin)], axis=-1)

    def entries(self, x: Float[Array, "N D"], cos: Float[Array, "N half"], sin: Float[Array, "N half"]) -> Float[Array, "N 1 E"]:
        """What is cached of a position: its latent, normed, and its rotated key."""
        rank = self.config.kv_lora_rank
        both = self.kv_a_proj_with_mqa(x)
        return jnp.concatenate([self.kv_a_layernorm(both[:, :rank])[:, None], rotate(both[:, None, rank:], cos, sin)], axis=-1)

    def output(self, mixed: Float[Array, "N H E"]) -> Float[Array, "N D"]:
        """The attention's output from the mixed entries of every head."""
        values = jnp.einsum("nhc,hvc->nhv", mixed[..., : self.config.kv_lora_rank], self._key_value_weights()[1])
        return self.o_proj(values.reshape(values.shape[0], -1))


class DeepSeekV4Layer(ResidualLayer):
    """One decoder layer on flat tokens."""

    config: DeepSeekV4Config
    index: int

    def setup(self) -> None:
        super().setup()
        self.self_attn = LatentAttention(self.config)

    def make_mlp(self) -> nn.Module:
        """Experts, except at the bottom."""
        config = self.config
        return super().make_mlp() if self.index < config.first_k_dense_replace else MoE(config.hidden_size, config.experts)

    def __call__(
        self,
        x: Float[Array, "N D"],
        rope: tuple[Array, Array],
        tokens: FlatTokens,
        layout: QueryGrid,
        mask: Bool[Array, "R Q T"],
        cached: Float[Array, "R 1 T E"] | None,
    ) -> tuple[Float[Array, "N D"], Float[Array, "R 1 T E"] | None]:
        config = self.config
        normed = self.input_layernorm(x)
        queries, entries = self.self_attn.queries(normed, *rope), self.self_attn.entries(normed, *rope)
        if cached is None:
            seen = layout.to_grid(entries, tokens.queries_per_row).swapaxes(1, 2)
        else:
            ring = config.window(self.index) is not None
            cached = seen = kv_cache.write(cached, entries, tokens.row, tokens.position, tokens.valid, ring)
        with jax.named_scope("attention"):
            grid, seen = layout.to_grid(queries, tokens.queries_per_row), seen.astype(x.dtype)
            mixed = attend(grid, seen, seen, mask, (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5)
        return self.after_attention(x, self.self_attn.output(layout.to_flat(mixed))), cached


class DeepSeekV4Decoder(nn.Module):
    """The network behind `DeepSeekV4Target`."""

    config: DeepSeekV4Config

    def setup(self) -> None:
        config = self.config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        sizes = (config.hidden_size, config.intermediate_size, config.rms_norm_eps, LLAMA_STYLE)
        self.layers = [DeepSeekV4Layer(*sizes, config, i) for i in range(config.num_layers)]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = Embedding(config.vocab_size, config.hidden_size)

    def _mask(self, layer: int, cache: KVCache | None, tokens: FlatTokens, layout: QueryGrid) -> Bool[Array, "R Q T"]:
        """Which keys of a layer every query sees: those up to its own position, inside the layer's window."""
        window = self.config.window(layer)
        position = tokens.position if layout.index is None else tokens.position[layout.index]
        query = position.reshape(layout.num_rows, tokens.queries_per_row, 1)
        if cache is None:
            key = query.swapaxes(1, 2)
        elif window is None:
            key = jnp.arange(cache.num_slots, dtype=jnp.int32)[None, None]
        else:
            newest = kv_cache.newest_positions(tokens.row, tokens.position, tokens.valid, layout.num_rows)
            key = kv_cache.key_positions(newest, cache.keys[layer].shape[2])[:, None]
        seen = (key >= 0) & (key <= query)
        if cache is None:
            seen = seen & tokens.seen_in_grid()
        return seen if window is None else seen & (query - key < window)

    def __call__(
        self, cache: KVCache | None, tokens: FlatTokens, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "N D"], Float[Array, "N F"], KVCache | None]:
        config = self.config
        num_rows = tokens.ids.shape[0] // tokens.queries_per_row if cache is None else cache.length.shape[0]
        layout = query_grid(tokens, num_rows)
        rope = rope_tables(tokens.position, inverse_frequencies(config.qk_rope_head_dim, config.rope_theta))
        masks = {config.window(i): self._mask(i, cache, tokens, layout) for i in range(config.num_layers)}
        x = self.embed_tokens(tokens.ids)
        outputs = {-1: x}
        entries = []
        for i, layer in enumerate(self.layers):
            x, new = layer(x, rope, tokens, layout, masks[config.window(i)], None if cache is None else cache.keys[i])
            entries.append(new)
            if i in taps:
                outputs[i] = x
        features = jnp.concatenate([outputs[tap] for tap in taps], axis=-1) if taps else jnp.zeros((x.shape[0], 0), x.dtype)
        if cache is not None:
            length = kv_cache.extend_length(cache.length, tokens.row, tokens.position, tokens.valid)
            cache = KVCache(tuple(entries), (), length)
        return self.norm(x), features, cache

    def initialise(self, tokens: FlatTokens) -> None:
        """Reaches every parameter, for `init`: the head's too, which the forward pass leaves to `TargetHead`."""
        self(None, tokens, ())
        self.lm_head(tokens.ids)


@dataclasses.dataclass(frozen=True)
class DeepSeekV4Target(Initialised):
    """The stand-in as a `protocols.Target`. Computes in the dtype of its parameters.

    Its cache keeps one entry per position and layer, latent and rotary key, in the place of keys; there are no values beside it.
    """

    config: DeepSeekV4Config

    @property
    def spec(self) -> TargetSpec:
        return TargetSpec(self.config.vocab_size, self.config.hidden_size, self.config.num_layers, self.config.architecture)

    @functools.cached_property
    def _network(self) -> DeepSeekV4Decoder:
        return DeepSeekV4Decoder(self.config)

    def _boxed_init(self, rng: jax.Array) -> Any:
        one = jnp.zeros((1, 1), jnp.int32)
        return self._network.init(rng, FlatTokens.grid(one, one[0], one[0] + 1), method="initialise")["params"]

    def init_cache(self, num_rows: int, max_len: int, *, writes_per_pass: int | None = None, dtype: Any = jnp.float32) -> KVCache:
        """An empty cache: max_len slots for the layers that see everything, window + writes_per_pass for the others."""
        writes = max_len if writes_per_pass is None else writes_per_pass
        windows = [self.config.window(i) for i in range(self.config.num_layers)]
        slots = [max_len if window is None else kv_cache.ring_slots(window, writes, max_len) for window in windows]
        entries = tuple(jnp.zeros((num_rows, 1, size, self.config.entry_width), dtype) for size in slots)
        return KVCache(keys=entries, values=(), length=jnp.zeros((num_rows,), jnp.int32))

    def head(self, params: Params) -> TargetHead:
        """Embedding and output head."""
        return TargetHead(embedding=params["embed_tokens"]["weight"], lm_head=params["lm_head"]["weight"])

    def forward(
        self, params: Params, cache: KVCache | None, tokens: FlatTokens, taps: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "N D"], Float[Array, "N F"], KVCache | None]:
        """See `protocols.Target.forward`.

        Raises:
          ValueError: for taps that the target lacks, for tokens without a cache that are no grid, and for more queries a request
            than the rings were made for.
        """
        layers = self.config.num_layers
        if any(not -1 <= tap < layers for tap in taps):
            raise ValueError(f"taps is {taps}; each must be in -1..{layers - 1} for a target of {layers} layers")
        if cache is None and not tokens.is_grid:
            raise ValueError("cache is None; a forward pass without a cache takes a grid of tokens (FlatTokens.grid)")
        if cache is not None:
            self._check_rings(cache, tokens.queries_per_row)
        out: Any = self._network.apply({"params": params}, cache, tokens, taps)
        return out

    def _check_rings(self, cache: KVCache, queries: int) -> None:
        for layer, entries in enumerate(cache.keys):
            window, slots = self.config.window(layer), entries.shape[2]
            if window is not None and slots < kv_cache.ring_slots(window, queries, cache.num_slots):
                raise ValueError(
                    f"queries_per_row is {queries}; a ring of {slots} slots behind a window of {window} takes at most {slots - window} "
                    "(init_cache: writes_per_pass)"
                )

    def roll_back(self, cache: KVCache, length: Int[Array, "R"]) -> KVCache:
        """See `protocols.Target.roll_back`. No further than what the last pass wrote, where rings are shorter than the text."""
        return kv_cache.roll_back(cache, length)
