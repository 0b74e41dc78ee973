"""Gemma 3 and Gemma 4 (text) as targets.

Layers that look back over a window keep their keys as rings of a few slots more than the window, the others keep all of them.
Embeddings are multiplied by sqrt(D), rounded to the dtype of the weights; tap -1 is what comes out of that.
"""

import dataclasses
import functools
import math
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.kv_cache import KVCache, LayerSlots
from dspark_jax.layers import Embedding, Linear, RMSNorm
from dspark_jax.protocols import FlatTokens, TargetHead, TargetSpec
from dspark_jax.sharding import Initialised
from dspark_jax.targets.gemma_layers import SLIDING, AttentionPass, GemmaConfig, GemmaLayer, KeysValues, LayerType
from dspark_jax.targets.query_grid import QueryGrid, query_grid
from dspark_jax.typing import Array, Float, Int, Params


class GemmaDecoder(nn.Module):
    """The network behind `GemmaTarget`."""

    config: GemmaConfig

    def setup(self) -> None:
        config = self.config
        self.embed_tokens = Embedding(config.vocab_size, config.hidden_size)
        self.layers = [
            GemmaLayer(config.hidden_size, config.mlp_width(i), config.rms_norm_eps, config.style, config, config.kind_of(layer_type))
            for i, layer_type in enumerate(config.layer_types)
        ]
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.style.norm)
        if not config.tie_word_embeddings:
            self.lm_head = Embedding(config.vocab_size, config.hidden_size)
        if config.per_layer_width:
            all_layers = config.num_layers * config.per_layer_width
            self.embed_tokens_per_layer = Embedding(config.per_layer_vocab_size, all_layers, "features")
            self.per_layer_model_projection = Linear(config.hidden_size, all_layers, "embed", "features")
            self.per_layer_projection_norm = RMSNorm(config.per_layer_width, config.rms_norm_eps, config.style.norm)

    def __call__(
        self, cache: KVCache | None, tokens: FlatTokens, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "N D"], Float[Array, "N F"], KVCache | None]:
        config = self.config
        num_rows = tokens.ids.shape[0] // tokens.queries_per_row if cache is None else cache.length.shape[0]
        layout = query_grid(tokens, num_rows)
        x = _scaled(self.embed_tokens(tokens.ids), math.sqrt(config.hidden_size))
        per_layer = self._per_layer_inputs(tokens.ids, x)
        outputs = {-1: x}
        passes = {}
        read: dict[int, KeysValues] = {}
        for i, layer in enumerate(self.layers):
            layer_type, source = config.layer_types[i], config.key_layer(i)
            cached = None if cache is None or source != i else (cache.keys[i], cache.values[i])
            if layer_type not in passes:
                num_slots = None if cached is None else cached[0].shape[2]
                passes[layer_type] = self._attention_pass(layer_type, tokens, layout, num_slots)
            x, read[i] = layer(x, passes[layer_type], tokens, layout, cached, read.get(source), None if per_layer is None else per_layer[i])
            if i in taps:
                outputs[i] = x
        features = jnp.concatenate([outputs[tap] for tap in taps], axis=-1) if taps else jnp.zeros((x.shape[0], 0), x.dtype)
        if cache is not None:
            length = kv_cache.extend_length(cache.length, tokens.row, tokens.position, tokens.valid)
            own = [read[i] for i in range(len(cache.keys))]
            cache = KVCache(tuple(keys for keys, _ in own), tuple(values for _, values in own), length)
        return self.norm(x), features, cache

    def _attention_pass(self, layer_type: LayerType, tokens: FlatTokens, layout: QueryGrid, num_slots: int | None) -> AttentionPass:
        """`num_slots` is T of the layers of this kind; None without a cache."""
        kind = self.config.kind_of(layer_type)
        query = tokens.position if layout.index is None else tokens.position[layout.index]
        query = query.reshape(layout.num_rows, tokens.queries_per_row)
        if num_slots is None:
            key = query
        elif kind.window is None:
            key = jnp.arange(num_slots, dtype=jnp.int32)[None]
        else:
            newest = kv_cache.newest_positions(tokens.row, tokens.position, tokens.valid, layout.num_rows)
            key = kv_cache.key_positions(newest, num_slots)
        mask = kind.mask(query, key)
        if num_slots is None:
            mask = mask & tokens.seen_in_grid()
        return AttentionPass(*kind.rope(tokens.position), mask)

    def _per_layer_inputs(self, ids: Int[Array, "N"], embedded: Float[Array, "N D"]) -> list[Float[Array, "N E"]] | None:
        """What every layer gets of every token beside the residual stream: a row of its own table, mixed with the embedding's share."""
        config = self.config
        if not config.per_layer_width:
            return None
        shape = (ids.shape[0], config.num_layers, config.per_layer_width)
        rows = _scaled(self.embed_tokens_per_layer(ids), math.sqrt(config.per_layer_width)).reshape(shape)
        projected = _scaled(self.per_layer_model_projection(embedded), config.hidden_size**-0.5).reshape(shape)
        mixed = _scaled(self.per_layer_projection_norm(projected) + rows, 2**-0.5)
        return [mixed[:, i] for i in range(config.num_layers)]

    def touch_head(self) -> Array:
        """Reaches the parameters that the forward pass leaves to `TargetHead`, for `init`."""
        return self.embed_tokens.weight if self.config.tie_word_embeddings else self.lm_head.weight

    def initialise(self, tokens: FlatTokens) -> None:
        self(None, tokens, ())
        self.touch_head()


def _scaled(x: Float[Array, "*batch E"], factor: float) -> Float[Array, "*batch E"]:
    """`x` times `factor`, which is rounded to the dtype of `x` first."""
    return x * jnp.asarray(factor, x.dtype)


@dataclasses.dataclass(frozen=True)
class GemmaTarget(Initialised):
    """A Gemma decoder as a `protocols.Target`. Computes in the dtype of its parameters."""

    config: GemmaConfig

    @property
    def spec(self) -> TargetSpec:
        return TargetSpec(self.config.vocab_size, self.config.hidden_size, self.config.num_layers, self.config.architecture)

    @functools.cached_property
    def _network(self) -> GemmaDecoder:
        return GemmaDecoder(self.config)

    def _boxed_init(self, rng: jax.Array) -> Any:
        one = jnp.zeros((1, 1), jnp.int32)
        tokens = FlatTokens.grid(one, one[0], one[0] + 1)
        return self._network.init(rng, tokens, method="initialise")["params"]

    def init_cache(self, num_rows: int, max_len: int, *, writes_per_pass: int | None = None, dtype: Any = jnp.float32) -> KVCache:
        """An empty cache: max_len slots for the layers that look back over everything, window + writes_per_pass for the others.

        Layers that read another layer's keys hold none.
        """
        config = self.config
        writes = max_len if writes_per_pass is None else writes_per_pass
        layers = []
        for layer_type in config.layer_types[: config.num_layers - config.num_kv_shared_layers]:
            kind = config.kind_of(layer_type)
            num_slots = max_len if kind.window is None else kv_cache.ring_slots(kind.window, writes, max_len)
            layers.append(LayerSlots(kind.num_kv_heads, num_slots, kind.head_dim))
        return kv_cache.empty_layers(num_rows, layers, dtype)

    def head(self, params: Params) -> TargetHead:
        """Embedding and output head."""
        embedding = params["embed_tokens"]["weight"]
        return TargetHead(
            embedding=embedding,
            lm_head=embedding if self.config.tie_word_embeddings else params["lm_head"]["weight"],
            embed_scale=math.sqrt(self.config.hidden_size),
            softcap=self.config.final_softcap,
        )

    def forward(
        self, params: Params, cache: KVCache | None, tokens: FlatTokens, taps: tuple[int, ...] = ()
    ) -> tuple[Float[Array, "N D"], Float[Array, "N F"], KVCache | None]:
        """See `protocols.Target.forward`.

        Raises:
          ValueError: for a tap that is no layer, tokens that are no grid where there is no cache, or more tokens of a request than
            the rings were made for.
        """
        if any(not -1 <= tap < self.config.num_layers for tap in taps):
            raise ValueError(
                f"taps is {taps}; each must be in -1..{self.config.num_layers - 1} for a target of {self.config.num_layers} layers"
            )
        if cache is None and not tokens.is_grid:
            raise ValueError("cache is None; a forward pass without a cache takes a grid of tokens (FlatTokens.grid)")
        if cache is not None:
            self._check_rings(cache, tokens.queries_per_row)
        out: Any = self._network.apply({"params": params}, cache, tokens, taps)
        return out

    def _check_rings(self, cache: KVCache, queries: int) -> None:
        window = self.config.sliding.window
        rings = [keys.shape[2] for keys, kind in zip(cache.keys, self.config.layer_types, strict=False) if kind == SLIDING]
        if window is not None and rings and min(rings) < min(window + queries, cache.num_slots):
            raise ValueError(
                f"queries_per_row is {queries}; a ring of {min(rings)} slots behind a window of {window} takes at most "
                f"{min(rings) - window} (init_cache: writes_per_pass)"
            )

    def roll_back(self, cache: KVCache, length: Int[Array, "R"]) -> KVCache:
        """See `protocols.Target.roll_back`. No further than what the last pass wrote, where rings are shorter than the text."""
        return kv_cache.roll_back(cache, length)
