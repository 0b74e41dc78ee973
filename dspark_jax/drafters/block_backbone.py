"""The parallel backbone: one pass from [anchor, mask, mask, ...] and the target's tapped features to G hidden states.

Features of the committed positions are projected once and become keys and values of every layer ("KV injection"); the block's
own positions see them and each other, in both directions. Context rows are never updated by the layers.
Three options make it the variant that is deployed with DeepSeek-V4: a window over the context, mixture-of-experts MLPs, and several
residual streams.
Two block layouts exist, and a config names its own [D3]. "anchor_first": G slots, the anchor and G - 1 masks, slot k predicts the
token behind its position, as in the DSpark reference. "anchor_plus_masks": G + 1 slots, the anchor and G masks, every mask predicts
the token at its own position and the anchor's slot predicts nothing, as in the original DFlash.
"""

import dataclasses
from typing import Literal

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax import kv_cache
from dspark_jax.hyper_connections import HyperConnection, StreamMerge, expand, reconnect
from dspark_jax.kv_cache import KVCache
from dspark_jax.layers import (
    MASKED,
    QWEN3_STYLE,
    AttentionProjections,
    LayerStyle,
    Linear,
    ResidualLayer,
    RMSNorm,
    in_blocks,
    inverse_frequencies,
    rope_tables,
)
from dspark_jax.moe import MoE, MoEConfig
from dspark_jax.protocols import Committed, TrainBatch
from dspark_jax.sharding import constrain
from dspark_jax.typing import Array, Bool, Float, Int, typed

Layout = Literal["anchor_first", "anchor_plus_masks"]
ANCHORS_AT_ONCE = 64
"""Blocks of a text whose attention scores exist at the same time."""

LAYOUTS: tuple[Layout, ...] = ("anchor_first", "anchor_plus_masks")


@dataclasses.dataclass(frozen=True)
class BackboneConfig:
    """Sizes of the backbone and its block. Defaults are the paper's (block 7, 5 layers).

    Attributes:
      block_size: G, tokens drafted a round.
      mask_token_id: id whose embedding stands at every slot behind the anchor.
      taps: decoder layers of the target whose outputs are injected, -1 for its embedding output.
      num_target_layers: depth of the target that the taps count in.
      style: how the layers are built: QWEN3_STYLE, or GEMMA4_STYLE for drafters of Gemma 4.
      k_eq_v: values are the raw key projections (Gemma 4's full-attention layers where the target has it so).
      rotated_share: share of the rotary pairs that turn (Gemma 4: 0.25).
      layout: which slots a block has and which of them predict; see the head of this file.
      round_rope_to_bf16: repeat the reference's rounding of the rotary frequencies in bf16 training (off: not copied).
      window: positions before the anchor whose features a block sees; None for all of them.
      experts: the mixture that stands in place of every layer's MLP, whose inner widths are its own; None for a plain MLP.
      streams: residual streams (manifold-constrained hyper-connections); 1 for a plain residual.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mask_token_id: int
    taps: tuple[int, ...]
    num_target_layers: int
    num_layers: int = 5
    block_size: int = 7
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    attention_bias: bool = False
    style: LayerStyle = QWEN3_STYLE
    k_eq_v: bool = False
    rotated_share: float = 1.0
    layout: Layout = "anchor_first"
    round_rope_to_bf16: bool = False
    window: int | None = None
    experts: MoEConfig | None = None
    streams: int = 1

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout is {self.layout!r}; allowed: {', '.join(LAYOUTS)}")
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; a block drafts at least 1 token")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.window is not None and self.window < 1:
            raise ValueError(f"window is {self.window}; it must be at least 1 position, or None for the whole context")
        if self.streams < 1:
            raise ValueError(f"streams is {self.streams}; it must be at least 1 (a plain residual)")
        if not isinstance(self.mask_token_id, int) or not 0 <= self.mask_token_id < self.vocab_size:
            raise ValueError(f"mask_token_id is {self.mask_token_id}; it must be a token id in 0..{self.vocab_size - 1}")
        last = self.num_target_layers - 2
        if not self.taps or any(not -1 <= tap <= last for tap in self.taps):
            raise ValueError(
                f"taps is {self.taps}; at least one, each in -1..{last} for a target of {self.num_target_layers} layers "
                "(the last layer's output is already normed)"
            )

    @property
    def num_slots(self) -> int:
        """Places of a block that the backbone runs on: G, and one more where the anchor's own place predicts nothing."""
        return self.block_size + (self.layout == "anchor_plus_masks")


@struct.dataclass
class BlockContext:
    """Injected keys and values of one layer, and which of them each block may see."""

    keys: Float[Array, "B K S E"]
    values: Float[Array, "B K S E"]
    mask: Bool[Array, "B A S"]


@typed
def attend_blocks(
    queries: Float[Array, "B A G H E"],
    keys: Float[Array, "B A G K E"],
    values: Float[Array, "B A G K E"],
    context: BlockContext,
    keep: Bool[Array, "B A"],
    scale: float,
) -> Float[Array, "B A G H E"]:
    """Attention of A blocks per row: each sees the context that its mask allows and its own block, never another block.

    Nothing of shape [A x G, S + A x G] is built. Blocks that are not kept give 0. Of many blocks the scores exist for some at a time, and
    are computed again for the gradient.
    """
    if queries.shape[1] <= ANCHORS_AT_ONCE:
        return _attend_blocks(queries, keys, values, context, keep, scale)
    # The gradients of what all blocks see are sums over the parts, which would lose digits in bfloat16.
    seen_keys, seen_values = context.keys.astype(jnp.float32), context.values.astype(jnp.float32)

    @jax.checkpoint
    def part(queries: Array, keys: Array, values: Array, mask: Array, keep: Array) -> Array:
        seen = BlockContext(seen_keys.astype(queries.dtype), seen_values.astype(queries.dtype), mask)
        return _attend_blocks(queries, keys, values, seen, keep, scale)

    return in_blocks(part, ANCHORS_AT_ONCE, queries, keys, values, context.mask, keep)


def _attend_blocks(queries: Array, keys: Array, values: Array, context: BlockContext, keep: Array, scale: float) -> Array:
    batch, anchors, block, num_heads, head_dim = queries.shape
    kv_heads = keys.shape[3]
    grouped = queries.reshape(batch, anchors, block, kv_heads, num_heads // kv_heads, head_dim)
    to_context = jnp.einsum("bagkqe,bkse->bkqags", grouped, context.keys, preferred_element_type=jnp.float32) * scale
    to_block = jnp.einsum("bagkqe,bajke->bkqagj", grouped, keys, preferred_element_type=jnp.float32) * scale
    allowed = context.mask[:, None, None, :, None, :]
    to_context = jnp.where(allowed, to_context, MASKED)
    peak = jnp.maximum(to_context.max(axis=-1, keepdims=True), to_block.max(axis=-1, keepdims=True))
    from_context = jnp.where(allowed, jnp.exp(to_context - peak), 0.0)
    from_block = jnp.exp(to_block - peak)
    total = from_context.sum(axis=-1, keepdims=True) + from_block.sum(axis=-1, keepdims=True)
    dtype = values.dtype
    mixed = jnp.einsum("bkqags,bkse->bagkqe", (from_context / total).astype(dtype), context.values) + jnp.einsum(
        "bkqagj,bajke->bagkqe", (from_block / total).astype(dtype), values
    )
    mixed = mixed.reshape(batch, anchors, block, num_heads, head_dim)
    return jnp.where(keep[:, :, None, None, None], mixed, 0)


class BlockLayer(ResidualLayer):
    """One layer over blocks; context enters as keys and values alone.

    With several residual streams its input and output have them as the axis before the last.
    """

    config: BackboneConfig
    index: int

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
            k_eq_v=config.k_eq_v,
        )
        if config.streams > 1:
            self.attn_hc, self.ffn_hc = (
                HyperConnection(config.streams, config.hidden_size, config.rms_norm_eps, 2 * self.index + place) for place in (0, 1)
            )

    def make_mlp(self) -> nn.Module:
        """A mixture of experts where the config has one."""
        config = self.config
        return super().make_mlp() if config.experts is None else MoE(config.hidden_size, config.experts, self.style.activation)

    def _attended(
        self, x: Float[Array, "B A G D"], rope: tuple[Array, Array], context: BlockContext, keep: Bool[Array, "B A"]
    ) -> Float[Array, "B A G D"]:
        normed = self.input_layernorm(x)
        queries = self.self_attn.queries(normed, *rope)
        keys, values = self.self_attn.keys_values(normed, *rope)
        heads = attend_blocks(queries, keys, values, context, keep, self.style.scale(self.config.head_dim))
        return self.self_attn.output(heads)

    def __call__(
        self,
        x: Float[Array, "B A G *streams D"],
        cos: Float[Array, "B A G half"],
        sin: Float[Array, "B A G half"],
        context: BlockContext,
        keep: Bool[Array, "B A"],
    ) -> Float[Array, "B A G *streams D"]:
        if self.config.streams == 1:
            return self.after_attention(x, self._attended(x, (cos, sin), context, keep))
        read, connection = self.attn_hc(x)
        x = reconnect(x, connection, self.attention_update(self._attended(read, (cos, sin), context, keep)))
        read, connection = self.ffn_hc(x)
        return self.scaled(reconnect(x, connection, self.mlp_update(read)))


class BlockBackbone(nn.Module):
    """Features and block embeddings in, post-norm hidden states of the block out."""

    config: BackboneConfig

    def setup(self) -> None:
        config = self.config
        self.fc = Linear(len(config.taps) * config.hidden_size, config.hidden_size, "features", "embed")
        sizes = (config.hidden_size, config.intermediate_size, config.rms_norm_eps, config.style)
        self.hidden_norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.style.norm)
        self.layers = [BlockLayer(*sizes, config, i) for i in range(config.num_layers)]
        if config.streams > 1:
            self.hc_head = StreamMerge(config.streams, config.hidden_size, config.rms_norm_eps)
        self.norm = RMSNorm(config.hidden_size, config.rms_norm_eps, config.style.norm)

    def _rope(self, positions: Int[Array, "*batch"]) -> tuple[Array, Array]:
        config = self.config
        frequencies = inverse_frequencies(
            config.head_dim, config.rope_theta, round_to_bf16=config.round_rope_to_bf16, rotated_share=config.rotated_share
        )
        return rope_tables(positions, frequencies)

    def inject(self, features: Float[Array, "*batch F"]) -> Float[Array, "*batch D"]:
        """Context features c = norm(fc(features)); no layer norms them again."""
        return self.hidden_norm(self.fc(features))

    def context_keys_values(self, features: Float[Array, "*batch F"], positions: Int[Array, "*batch"]) -> list[tuple[Array, Array]]:
        """Keys and values of committed positions, [*batch, K, E] for every layer."""
        injected = self.inject(features)
        cos, sin = self._rope(positions)
        return [layer.self_attn.keys_values(injected, cos, sin) for layer in self.layers]

    def hidden(
        self,
        embeddings: Float[Array, "B A slots D"],
        anchors: Int[Array, "B A"],
        contexts: list[BlockContext],
        keep: Bool[Array, "B A"],
        by_row: bool,
    ) -> Float[Array, "B A G D"]:
        """Hidden states of the slots that predict, after the final norm; `anchors` are absolute positions.

        `by_row`: over a mesh each device has rows of its own, and fetches a layer's parameters; else it has part of all rows' widths,
        which suits few rows.
        """

        def split(x: Array) -> Array:
            return constrain(x, "batch" if by_row else None, *[None] * (x.ndim - 2), None if by_row else "embed")

        positions = anchors[..., None] + jnp.arange(embeddings.shape[2], dtype=jnp.int32)
        cos, sin = self._rope(positions)
        streams = self.config.streams
        x = split(embeddings if streams == 1 else expand(embeddings, streams))
        for layer, context in zip(self.layers, contexts, strict=True):
            x = split(layer(x, cos, sin, context, keep))
        x = x[:, :, self.config.num_slots - self.config.block_size :]
        return split(self.norm(x if streams == 1 else self.hc_head(x)))

    def _visible(self, positions: Int[Array, "B S"], anchors: Int[Array, "B A"]) -> Bool[Array, "B A S"]:
        """Which context positions a block at an anchor sees: those below it, the last `window` of them where there is one.

        Negative positions stand for nothing.
        """
        position, anchor = positions[:, None, :], anchors[:, :, None]
        below = (position < anchor) & (position >= 0)
        return below if self.config.window is None else below & (position >= anchor - self.config.window)

    def train_hidden(self, embeddings: Float[Array, "B A slots D"], batch: TrainBatch) -> Float[Array, "B A G D"]:
        """Hidden states of the blocks at all anchors of a batch; a block at anchor a sees features of positions below a."""
        positions, rows = batch.positions(), jnp.arange(batch.ids.shape[0], dtype=jnp.int32)[:, None]
        anchors = positions[rows, batch.anchors]
        mask = self._visible(positions, anchors) & batch.keep[:, :, None]
        if batch.segment is not None:
            mask = mask & (batch.segment[:, None] == batch.segment[rows, batch.anchors][:, :, None])
        contexts = [
            BlockContext(keys.swapaxes(1, 2), values.swapaxes(1, 2), mask)
            for keys, values in self.context_keys_values(batch.features, positions)
        ]
        return self.hidden(embeddings, anchors, contexts, batch.keep, by_row=True)

    def append_context(self, cache: KVCache, committed: Committed) -> KVCache:
        """Add the committed positions' keys and values behind the cache's length.

        Under a window the slots are a ring, of which the last T of the positions are enough.
        """
        num_rows, width = committed.next_ids.shape
        slot = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (num_rows, width))
        position = cache.length[:, None] + slot
        ring = self.config.window is not None
        valid = slot < committed.count[:, None]
        if ring:
            valid = valid & (slot >= committed.count[:, None] - cache.num_slots)
        row = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32)[:, None], (num_rows, width))
        new = self.context_keys_values(committed.features, position)

        def written(old: Array, flat: Array) -> Array:
            flat = flat.reshape(-1, *flat.shape[2:])
            return kv_cache.write(old, flat, row.reshape(-1), position.reshape(-1), valid.reshape(-1), ring)

        return KVCache(
            keys=tuple(written(old, keys) for old, (keys, _) in zip(cache.keys, new, strict=True)),
            values=tuple(written(old, values) for old, (_, values) in zip(cache.values, new, strict=True)),
            length=cache.length + committed.count,
        )

    def cached_hidden(self, embeddings: Float[Array, "R slots D"], cache: KVCache) -> Float[Array, "R G D"]:
        """Hidden states of one block per request behind its cache. The block's own keys and values are not kept [C1]."""
        mask = self._visible(kv_cache.key_positions(cache.length - 1, cache.num_slots), cache.length[:, None])
        dtype = embeddings.dtype
        contexts = [
            BlockContext(keys.astype(dtype), values.astype(dtype), mask) for keys, values in zip(cache.keys, cache.values, strict=True)
        ]
        keep = jnp.ones((embeddings.shape[0], 1), bool)
        return self.hidden(embeddings[:, None], cache.length[:, None], contexts, keep, by_row=False)[:, 0]

    def initialise(self, embeddings: Float[Array, "B A slots D"], batch: TrainBatch) -> None:
        """Reaches every parameter, for `init`."""
        self.train_hidden(embeddings, batch)


@struct.dataclass
class BlockTargets:
    """What every block of a batch is to predict, as the reference lays it out."""

    labels: Int[Array, "B A G"]
    previous: Int[Array, "B A G"]
    supervised: Bool[Array, "B A G"]
    teacher_position: Int[Array, "B A G"]


@typed
def block_targets(batch: TrainBatch, block_size: int) -> BlockTargets:
    """Draft k = 0, 1, ... of the block at anchor a predicts token a + 1 + k from the true token before it.

    Supervision of a block ends at its first label outside the answer or its text, or behind the sequence; the teacher's distribution of a
    label stands one position before it.
    """
    length = batch.ids.shape[1]
    place = batch.anchors[:, :, None] + 1 + jnp.arange(block_size, dtype=jnp.int32)
    safe = jnp.where(batch.keep[:, :, None], jnp.minimum(place, length - 1), 0)
    rows = jnp.arange(batch.ids.shape[0], dtype=jnp.int32)[:, None, None]
    labels = batch.ids[rows, safe]
    anchor_ids = batch.ids[rows[:, :, 0], batch.anchors]
    answered = (place < length) & batch.loss_mask[rows, safe] & batch.keep[:, :, None]
    if batch.segment is not None:
        answered = answered & (batch.segment[rows, safe] == batch.segment[rows, batch.anchors[:, :, None]])
    return BlockTargets(
        labels=labels,
        previous=jnp.concatenate([anchor_ids[:, :, None], labels[:, :, :-1]], axis=-1),
        supervised=jnp.cumprod(answered.astype(jnp.int32), axis=-1).astype(bool),
        teacher_position=jnp.maximum(safe - 1, 0),
    )


@typed
def block_ids(batch: TrainBatch, num_slots: int, mask_token_id: int) -> Int[Array, "B A {num_slots}"]:
    """Token ids at the blocks' slots: the anchor (a mask where the block is not kept), then masks."""
    rows = jnp.arange(batch.ids.shape[0], dtype=jnp.int32)[:, None]
    anchor = jnp.where(batch.keep, batch.ids[rows, batch.anchors], mask_token_id)
    return jnp.full((*anchor.shape, num_slots), mask_token_id, batch.ids.dtype).at[:, :, 0].set(anchor)
