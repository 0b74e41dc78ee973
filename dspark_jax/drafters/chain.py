"""What drafters that go token by token share (Eagle3, MTP): one decoder layer with a cache of its own, run again on its own output.

The layer reads pairs: what the target knows at position i, and token i + 1. Its output at the last pair, whose token is the anchor, is
the seed: it gives the first draft. Every further draft is one more step of the same layer, from the output before it (in place of what the
target knows) and the token just drafted, at the next position. So step t of the chain behind pair i sees the pairs up to i and its own
steps 1..t.

Training does the same at every position at once ("training-time test" of Eagle3): step t reads token i + 1 + t of the text at rotary
position i + t, sees the pairs j <= i and of the steps 1..t those at i alone. Two sets of scores, [S, S] and [S, t], are all there is
to that pattern; nothing of shape [S, S x t] is built.
"""

import dataclasses
from typing import Any, Literal, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax import kv_cache
from dspark_jax.drafters.draft_scores import ConfidenceScore, require_score
from dspark_jax.layers import (
    MASKED,
    QWEN3_STYLE,
    AttentionProjections,
    LayerStyle,
    ResidualLayer,
    RMSNorm,
    attend,
    inverse_frequencies,
    rope_tables,
)
from dspark_jax.protocols import TrainBatch, positions_in_texts
from dspark_jax.typing import Array, Bool, Float, Int, typed

Supervision = Literal["answer_blocks", "drawn_anchors", "hidden_positions"]
SUPERVISIONS: tuple[Supervision, ...] = ("answer_blocks", "drawn_anchors", "hidden_positions")


@dataclasses.dataclass(frozen=True)
class ChainConfig:
    """Sizes of the layer and its chain, and how the chain is trained.

    Attributes:
      num_target_layers: depth of the target that the taps count in.
      taps: decoder layers of the target whose outputs the pairs hold; () where they hold its last hidden state.
      block_size: G, tokens drafted a round and steps of the chain in training (`ttt_length` of the reference).
      style: how the layer is built: QWEN3_STYLE, or GEMMA4_STYLE for drafters of Gemma 4.
      k_eq_v: values are the raw key projections (Gemma 4's full-attention layers where the target has it so).
      rotated_share: share of the rotary pairs that turn (Gemma 4: 0.25).
      draft_vocab_size: number of tokens that can be drafted; None for all.
      step_loss_decay: weight of step t in training is step_loss_decay^t.
      supervision: which places are trained, see `chain_targets`.
      soft_ce_over_places: divide the soft cross-entropy by all B x S places, prompts and padding included, as the Eagle3 reference
        does; texts with long prompts then weigh less. Otherwise it is a mean over what is supervised.
      confidence_score: what stands in for a trained confidence head, see `draft_scores.score_logits`; None for no confidence.
      confidence_head: whether there is a trained one, on the hidden state that predicts x_k. Its loss never reaches the layer [E4].
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_target_layers: int
    taps: tuple[int, ...] = ()
    block_size: int = 7
    rms_norm_eps: float = 1e-6
    rope_theta: float = 1e6
    attention_bias: bool = False
    style: LayerStyle = QWEN3_STYLE
    k_eq_v: bool = False
    rotated_share: float = 1.0
    draft_vocab_size: int | None = None
    step_loss_decay: float = 1.0
    supervision: Supervision = "answer_blocks"
    soft_ce_over_places: bool = False
    confidence_score: ConfidenceScore | None = None
    confidence_head: bool = False

    def __post_init__(self) -> None:
        if self.block_size < 1:
            raise ValueError(f"block_size is {self.block_size}; a round drafts at least 1 token")
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            raise ValueError(f"num_heads is {self.num_heads}; it must be a multiple of num_kv_heads ({self.num_kv_heads})")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; it must be in 1..{self.vocab_size}, or None for all")
        if not 0.0 < self.step_loss_decay <= 1.0:
            raise ValueError(f"step_loss_decay is {self.step_loss_decay}; it must be in (0, 1]")
        if self.supervision not in SUPERVISIONS:
            raise ValueError(f"supervision is {self.supervision!r}; allowed: {', '.join(SUPERVISIONS)}")
        require_score(self.confidence_score, self.confidence_head)


@struct.dataclass
class ChainState:
    """Decoding state: the pairs of all positions below the anchor.

    Attributes:
      keys, values: of the pairs, by position.
      length: number of pairs.
      hidden: the layer's output at the last pair, before the final norm; float32 whatever the cache is. The seed of the next proposal.
    """

    keys: Float[Array, "R K T E"]
    values: Float[Array, "R K T E"]
    length: Int[Array, "R"]
    hidden: Float[Array, "R D"]


@struct.dataclass
class ChainSteps:
    """Keys and values of a chain's own steps, Q chains per row; slot t holds step t. Step 0, the pair itself, lies elsewhere."""

    keys: Float[Array, "B Q G K E"]
    values: Float[Array, "B Q G K E"]

    @classmethod
    def empty(cls, num_rows: int, num_chains: int, config: ChainConfig, dtype: Any) -> "ChainSteps":
        shape = (num_rows, num_chains, config.block_size, config.num_kv_heads, config.head_dim)
        return cls(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def put(self, step: Int[Array, ""], keys: Float[Array, "B Q K E"], values: Float[Array, "B Q K E"]) -> "ChainSteps":
        """With those of one more step."""
        return ChainSteps(self.keys.at[:, :, step].set(keys), self.values.at[:, :, step].set(values))

    def taken(self, step: Int[Array, ""]) -> Bool[Array, "G"]:
        """The slots that step `step` sees: steps 1..step."""
        place = jnp.arange(self.keys.shape[2], dtype=jnp.int32)
        return (place >= 1) & (place <= step)


class Projected(NamedTuple):
    """What the layer's attention works on, by head."""

    queries: Array
    keys: Array
    values: Array


@typed
def attend_chains(
    queries: Float[Array, "B Q H E"],
    keys: Float[Array, "B K T E"],
    values: Float[Array, "B K T E"],
    mask: Bool[Array, "B Q T"],
    steps: ChainSteps,
    taken: Bool[Array, "G"],
    scale: float,
) -> Float[Array, "B Q H E"]:
    """Attention of one step of Q chains per row: chain q sees the pairs that its mask allows, and those of its own steps that are taken."""
    batch, chains, num_heads, head_dim = queries.shape
    kv_heads = keys.shape[1]
    grouped = queries.reshape(batch, chains, kv_heads, num_heads // kv_heads, head_dim)
    to_pairs = jnp.einsum("bqkge,bkte->bkgqt", grouped, keys, preferred_element_type=jnp.float32) * scale
    to_steps = jnp.einsum("bqkge,bqjke->bkgqj", grouped, steps.keys, preferred_element_type=jnp.float32) * scale
    allowed = mask[:, None, None]
    to_pairs = jnp.where(allowed, to_pairs, MASKED)
    to_steps = jnp.where(taken, to_steps, MASKED)
    peak = jnp.maximum(to_pairs.max(axis=-1, keepdims=True), to_steps.max(axis=-1, keepdims=True))
    from_pairs = jnp.where(allowed, jnp.exp(to_pairs - peak), 0.0)
    from_steps = jnp.where(taken, jnp.exp(to_steps - peak), 0.0)
    total = from_pairs.sum(axis=-1, keepdims=True) + from_steps.sum(axis=-1, keepdims=True)
    dtype = values.dtype
    mixed = jnp.einsum("bkgqt,bkte->bqkge", (from_pairs / total).astype(dtype), values) + jnp.einsum(
        "bkgqj,bqjke->bqkge", (from_steps / total).astype(dtype), steps.values
    )
    return mixed.reshape(batch, chains, num_heads, head_dim)


class ChainLayer(ResidualLayer):
    """The layer of a chain; `input_width` is what its attention reads."""

    config: ChainConfig
    input_width: int

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
            input_width=self.input_width,
        )

    def output(self, residual: Float[Array, "*batch D"], heads: Float[Array, "*batch H E"]) -> Float[Array, "*batch D"]:
        """The layer's output from its residual input and what its attention gave by head."""
        return self.after_attention(residual, self.self_attn.output(heads))


class ChainNetwork(nn.Module):
    """The chain's layer and final norm. A subclass adds `layers` (one `ChainLayer`) and says what a pair is and how it is read."""

    config: ChainConfig

    def setup(self) -> None:
        self.norm = RMSNorm(self.config.hidden_size, self.config.rms_norm_eps, self.config.style.norm)

    def source(self, features: Float[Array, "*batch F"], hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """What the target knows at a position, from its tapped features and its last hidden state there."""
        raise NotImplementedError

    def read(
        self, hidden: Float[Array, "*batch D"], embeddings: Float[Array, "*batch D"]
    ) -> tuple[Float[Array, "*batch D"], Float[Array, "*batch I"]]:
        """The residual input of the layer and the input of its attention, from a hidden state and the token that follows it."""
        raise NotImplementedError

    def feed_back(self, output: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """The hidden state that the next step reads, from the output of the layer."""
        return output

    def _sizes(self) -> tuple[int, int, float, LayerStyle]:
        config = self.config
        return config.hidden_size, config.intermediate_size, config.rms_norm_eps, config.style

    def _rope(self, positions: Int[Array, "*batch"]) -> tuple[Array, Array]:
        config = self.config
        return rope_tables(positions, inverse_frequencies(config.head_dim, config.rope_theta, rotated_share=config.rotated_share))

    @property
    def _scale(self) -> float:
        return self.config.style.scale(self.config.head_dim)

    def final_norm(self, output: Float[Array, "*batch D"]) -> Float[Array, "*batch D"]:
        """What goes to the LM head."""
        return self.norm(output)

    def _projected(
        self, hidden: Float[Array, "*batch D"], embeddings: Float[Array, "*batch D"], positions: Int[Array, "*batch"]
    ) -> tuple[Float[Array, "*batch D"], Projected]:
        """The residual input of the layer, and its attention's projections."""
        residual, read = self.read(hidden, embeddings)
        cos, sin = self._rope(positions)
        attention = self.layers[0].self_attn
        return residual, Projected(attention.queries(read, cos, sin), *attention.keys_values(read, cos, sin))

    def train_outputs(
        self,
        features: Float[Array, "B S F"],
        last_hidden: Float[Array, "B S D"],
        embeddings: Float[Array, "B text D"],
        segment: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S G D"]:
        """Outputs of the layer, before the final norm, at every position and step; `embeddings` are those of S + G tokens.

        Pairs of other texts (`segment`, as of `TrainBatch`) are not seen. Rows beyond a text's end mean nothing; nothing before it depends
        on them.
        """
        config = self.config
        batch, length = last_hidden.shape[:2]
        positions = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        mask = positions[:, None, :] <= positions[:, :, None]
        if segment is not None:
            positions, mask = positions_in_texts(segment), mask & (segment[:, :, None] == segment[:, None])
        residual, pair = self._projected(self.source(features, last_hidden), embeddings[:, 1 : 1 + length], positions)
        pairs = pair.keys.swapaxes(1, 2), pair.values.swapaxes(1, 2)
        first = self.layers[0].output(residual, attend(pair.queries, *pairs, mask, self._scale))
        # Scores of all steps would be G times [S, S] until the backward pass; the products that give them are cheap.
        attend_again = jax.checkpoint(attend_chains, static_argnums=6, prevent_cse=False)

        def one_more(carry: tuple[Array, ChainSteps], step: Array) -> tuple[tuple[Array, ChainSteps], Array]:
            output, steps = carry
            following = jax.lax.dynamic_slice_in_dim(embeddings, step + 1, length, axis=1)
            residual, own = self._projected(self.feed_back(output), following, positions + step)
            steps = steps.put(step, own.keys, own.values)
            output = self.layers[0].output(residual, attend_again(own.queries, *pairs, mask, steps, steps.taken(step), self._scale))
            return (output, steps), output

        empty = ChainSteps.empty(batch, length, config, first.dtype)
        places = jnp.arange(1, config.block_size, dtype=jnp.int32)
        _, outputs = jax.lax.scan(one_more, (first, empty), places)
        return jnp.concatenate([first[:, :, None], jnp.moveaxis(outputs, 0, 2)], axis=2)

    def train_hidden(
        self,
        features: Float[Array, "B S F"],
        last_hidden: Float[Array, "B S D"],
        embeddings: Float[Array, "B text D"],
        segment: Int[Array, "B S"] | None = None,
    ) -> Float[Array, "B S G D"]:
        """What goes to the LM head at every position and step."""
        return self.norm(self.train_outputs(features, last_hidden, embeddings, segment))

    def initialise(
        self, features: Float[Array, "B S F"], last_hidden: Float[Array, "B S D"], embeddings: Float[Array, "B S D"]
    ) -> Float[Array, "B S D"]:
        """Reaches every parameter, for `init`, and outside of any loop, where Linen may create none."""
        positions = jnp.zeros(embeddings.shape[:2], jnp.int32)
        residual, own = self._projected(self.source(features, last_hidden), embeddings, positions)
        return self.norm(self.layers[0].output(residual, own.queries))

    def commit(
        self,
        state: ChainState,
        features: Float[Array, "R C F"],
        last_hidden: Float[Array, "R C D"],
        embeddings: Float[Array, "R C D"],
        count: Int[Array, "R"],
    ) -> ChainState:
        """Add `count[r]` pairs per request behind those of the state; `embeddings` are those of the tokens that follow.

        With one layer, keys and values depend on the pairs alone, so that its attention runs at the last real pair and nowhere else.
        """
        num_rows, width = embeddings.shape[:2]
        slot = jnp.broadcast_to(jnp.arange(width, dtype=jnp.int32), (num_rows, width))
        row = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32)[:, None], (num_rows, width))
        position = state.length[:, None] + slot
        residual, new = self._projected(self.source(features, last_hidden), embeddings, position)
        where = (row.reshape(-1), position.reshape(-1), (slot < count[:, None]).reshape(-1))
        keys, values = (
            kv_cache.write(old, each.reshape(-1, *each.shape[2:]), *where)
            for old, each in ((state.keys, new.keys), (state.values, new.values))
        )
        length = state.length + count
        last = jnp.maximum(count - 1, 0)[:, None]
        queries, residual = (x[row[:, :1], last] for x in (new.queries, residual))
        mask = jnp.arange(keys.shape[2], dtype=jnp.int32) < length[:, None, None]
        heads = attend(queries, keys.astype(queries.dtype), values.astype(queries.dtype), mask, self._scale)
        output = self.layers[0].output(residual, heads)[:, 0].astype(state.hidden.dtype)
        return ChainState(keys, values, length, jnp.where(count[:, None] > 0, output, state.hidden))

    def decode_step(
        self,
        state: ChainState,
        steps: ChainSteps,
        step: Int[Array, ""],
        output: Float[Array, "R D"],
        embedding: Float[Array, "R D"],
    ) -> tuple[Float[Array, "R D"], ChainSteps]:
        """Step `step` (1, 2, ...) of every request's chain, from the output of the step before and the token drafted from it.

        The cache is in the compute dtype. The steps' keys and values are the proposal's own and go with it [C1].
        """
        residual, own = self._projected(self.feed_back(output)[:, None], embedding[:, None], (state.length - 1 + step)[:, None])
        steps = steps.put(step, own.keys, own.values)
        mask = jnp.arange(state.keys.shape[2], dtype=jnp.int32) < state.length[:, None, None]
        heads = attend_chains(own.queries, state.keys, state.values, mask, steps, steps.taken(step), self._scale)
        return self.layers[0].output(residual, heads)[:, 0], steps


@struct.dataclass
class ChainTargets:
    """What the chain behind every pair of a batch is to predict."""

    labels: Int[Array, "B S G"]
    teacher_position: Int[Array, "B S G"]
    supervised: Bool[Array, "B S G"]


@typed
def chain_targets(batch: TrainBatch, block_size: int, supervision: Supervision) -> ChainTargets:
    """Step t of the chain behind pair i predicts token i + 2 + t, held to the target's distribution at position i + 1 + t.

    Its anchor is token i + 1. "answer_blocks" supervises what decoding meets: chains whose anchor is an answer token (the first one
    included: that is the first round, and its pair holds the last prompt token), up to their first label outside the answer.
    "drawn_anchors" takes of these the chains whose anchor the batch drew: what block drafters learn from, for equal budgets.
    "hidden_positions" is the Eagle3 reference's choice, kept for comparison: place (i, t) counts where position i + t carries loss and is
    not the text's last. It leaves out the first round, and holds the last steps of an inner turn to the header of the next.

    Raises:
      ValueError: "hidden_positions" without `batch.length`, or with several texts a row.
    """
    num_rows, length = batch.ids.shape
    place = jnp.arange(length, dtype=jnp.int32)[:, None] + jnp.arange(block_size, dtype=jnp.int32)
    behind = ((0, 0), (0, block_size + 1))
    if supervision != "hidden_positions":
        answer = jnp.pad(batch.loss_mask, behind)
        labelled = answer[:, 1 : length + 1, None] & answer[:, place + 2]
        if batch.segment is not None:
            text = jnp.pad(batch.segment, behind, constant_values=-1)
            labelled = labelled & (text[:, :length, None] == text[:, place + 2])
        if supervision == "drawn_anchors":
            rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]
            drawn = jnp.zeros((num_rows, length + 1), bool).at[rows, batch.anchors].max(batch.keep)
            labelled = labelled & drawn[:, 1:, None]
        supervised = jnp.cumprod(labelled.astype(jnp.int32), axis=-1).astype(bool)
    else:
        if batch.length is None:
            raise ValueError("length is None; supervision 'hidden_positions' needs to know where each text ends")
        if batch.segment is not None:
            raise ValueError("segment is given; supervision 'hidden_positions' takes rows of one text each")
        inside = jnp.arange(length, dtype=jnp.int32) < batch.length[:, None] - 1
        supervised = jnp.pad(batch.loss_mask & inside, behind)[:, place]
    return ChainTargets(
        labels=batch.ids[:, jnp.minimum(place + 2, length - 1)],
        teacher_position=jnp.broadcast_to(jnp.minimum(place + 1, length - 1), (num_rows, *place.shape)),
        supervised=supervised,
    )
