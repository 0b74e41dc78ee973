"""The contracts between targets, drafters, verifiers and policies, and the structs that pass between them.

`decode`, `train` and `engine` know targets and drafters only through this file. Every implementation is a frozen, hashable
dataclass, so that it can be a static argument of `jax.jit`; every state is a `flax.struct.dataclass`, so that it is a pytree.
"""

import dataclasses
from typing import Any, Protocol, runtime_checkable

import jax
import jax.numpy as jnp
from flax import struct
from jaxtyping import PRNGKeyArray

from dspark_jax.sampling import Noise, Sampling
from dspark_jax.typing import Array, Bool, Float, Int, Params, typed


@struct.dataclass
class FlatTokens:
    """The tokens that one forward pass of the target runs on: those of all requests, flattened and padded to a bucket.

    Attributes:
      ids: token ids.
      row: the request each token belongs to, 0..R-1.
      slot: the token's place among its request's queries, 0..queries_per_row-1.
      position: absolute position in the sequence; the key and value are cached there.
      valid: False for padding; such tokens leave no trace in the cache, and their outputs mean nothing.
      queries_per_row: the largest number of queries one request may have (static).
      segment: number of the text that each token belongs to, where several stand in a row and see nothing of each other (training,
        without a cache); None where a row is one text.
      is_grid: the tokens are row-major [R, queries_per_row], so that flattening is a reshape (static).
    """

    ids: Int[Array, "N"]
    row: Int[Array, "N"]
    slot: Int[Array, "N"]
    position: Int[Array, "N"]
    valid: Bool[Array, "N"]
    queries_per_row: int = struct.field(pytree_node=False)
    is_grid: bool = struct.field(pytree_node=False, default=False)
    segment: Int[Array, "N"] | None = None

    @classmethod
    def grid(cls, ids: Int[Array, "R Q"], start: Int[Array, "R"], count: Int[Array, "R"]) -> "FlatTokens":
        """`count[r]` tokens of every request from position `start[r]` on: prefill chunks and training batches."""
        num_rows, queries = ids.shape
        slot = jnp.broadcast_to(jnp.arange(queries, dtype=jnp.int32), ids.shape)
        row = jnp.broadcast_to(jnp.arange(num_rows, dtype=jnp.int32)[:, None], ids.shape)
        return cls(
            ids=ids.reshape(-1),
            row=row.reshape(-1),
            slot=slot.reshape(-1),
            position=(start[:, None] + slot).reshape(-1),
            valid=(slot < count[:, None]).reshape(-1),
            queries_per_row=queries,
            is_grid=True,
        )

    @classmethod
    def packed(cls, ids: Int[Array, "R Q"], segment: Int[Array, "R Q"]) -> "FlatTokens":
        """Rows of several texts each, which are numbered by `segment` and have positions from 0 on."""
        rows = jnp.zeros(ids.shape[0], jnp.int32)
        grid = cls.grid(ids, rows, rows + ids.shape[1])
        return dataclasses.replace(grid, position=positions_in_texts(segment).reshape(-1), segment=segment.reshape(-1))

    def seen_in_grid(self) -> Bool[Array, "R Q Q"]:
        """Which tokens of its row each token of a grid may look at where there is no cache: itself and those before it in its text."""
        place = jnp.arange(self.queries_per_row, dtype=jnp.int32)
        before = (place <= place[:, None])[None]
        if self.segment is None:
            return jnp.broadcast_to(before, (self.ids.shape[0] // self.queries_per_row, *before.shape[1:]))
        segment = self.segment.reshape(-1, self.queries_per_row)
        return before & (segment[:, :, None] == segment[:, None])


@typed
def positions_in_texts(segment: Int[Array, "B S"]) -> Int[Array, "B S"]:
    """Position of every token in its own text, from 0, where rows hold several texts: runs of equal numbers in `segment`."""
    place = jnp.broadcast_to(jnp.arange(segment.shape[1], dtype=jnp.int32), segment.shape)
    begins = jnp.pad(segment[:, 1:] != segment[:, :-1], ((0, 0), (1, 0)), constant_values=True)
    return place - jax.lax.cummax(jnp.where(begins, place, 0), axis=1)


@struct.dataclass
class TargetHead:
    """The frozen embedding and output head of a target, lent to its drafters and never copied into their parameters.

    Attributes:
      embedding: input embedding, all V rows.
      lm_head: output head; the rows of `draft_ids` alone where the draft vocabulary is smaller.
      draft_ids: target id of every row of `lm_head`, ascending; None where it is the whole vocabulary.
      embed_scale: factor on the embedding (Gemma), static.
      softcap: `tanh(x / softcap) * softcap` on the logits, static; None for none.
    """

    embedding: Float[Array, "V D"]
    lm_head: Float[Array, "Vd D"]
    draft_ids: Int[Array, "Vd"] | None = None
    embed_scale: float = struct.field(pytree_node=False, default=1.0)
    softcap: float | None = struct.field(pytree_node=False, default=None)

    def embed(self, ids: Int[Array, "*batch"]) -> Float[Array, "*batch D"]:
        """Input embeddings of target ids."""
        rows = self.embedding[ids]
        return rows if self.embed_scale == 1.0 else rows * jnp.asarray(self.embed_scale, rows.dtype)

    def logits(self, hidden: Float[Array, "*batch D"]) -> Float[Array, "*batch Vd"]:
        """Float32 logits of hidden states that are already normed."""
        logits = jnp.einsum("...d,vd->...v", hidden.astype(self.lm_head.dtype), self.lm_head, preferred_element_type=jnp.float32)
        return logits if self.softcap is None else jnp.tanh(logits / self.softcap) * self.softcap

    def restrict(self, draft_ids: Int[Array, "Vd"] | None) -> "TargetHead":
        """The same head with the rows of `draft_ids` alone; itself where `draft_ids` is None."""
        if draft_ids is None:
            return self
        return dataclasses.replace(self, lm_head=self.lm_head[draft_ids], draft_ids=draft_ids)


@struct.dataclass
class Committed:
    """What a drafter may learn of newly committed positions: `count[r]` of them per request, the rest is padding.

    Entry i describes the i-th newly processed position: the target's hidden state and tapped features there, and the id of the
    token that FOLLOWS it (`next_ids`), so that feature i comes with token i + 1 (Eagle3 and MTP pair them).
    """

    next_ids: Int[Array, "R K"]
    hidden: Float[Array, "R K D"]
    features: Float[Array, "R K F"]
    count: Int[Array, "R"]


@struct.dataclass
class DraftBlock:
    """The proposal of one round, with the sampler's own numbers: the verifier never recomputes them.

    Attributes:
      ids: drafted tokens, as ids of the target.
      log_q: log-probability with which each id was drawn (0 at temperature 0, where q is one-hot).
      log_normaliser: log-sum-exp over the kept entries of `logits / temperature`.
      floor: entries of `logits` below it have probability 0 (-inf where nothing is filtered).
      confidence_logits: logit of the chance that token k survives given that the tokens before it did; None without a head or score.
      logits: corrected draft logits over the draft vocabulary, before temperature; None where nobody asked for them.
    """

    ids: Int[Array, "R G"]
    log_q: Float[Array, "R G"]
    log_normaliser: Float[Array, "R G"]
    floor: Float[Array, "R G"]
    confidence_logits: Float[Array, "R G"] | None
    logits: Float[Array, "R G Vd"] | None


@struct.dataclass
class Verdict:
    """Outcome of a round: drafts 1..num_accepted are kept and `next_id` follows them (a correction or the bonus token)."""

    num_accepted: Int[Array, "R"]
    next_id: Int[Array, "R"]


@struct.dataclass
class TargetSpec:
    """What a drafter must know of its target in order to be built or checked."""

    vocab_size: int = struct.field(pytree_node=False)
    width: int = struct.field(pytree_node=False)
    num_layers: int = struct.field(pytree_node=False)
    architecture: str = struct.field(pytree_node=False)


@struct.dataclass
class TrainBatch:
    """One batch of a drafter's training: texts, what the frozen target says of them, and the anchors that were drawn.

    Attributes:
      ids: tokens, zero-padded at the right.
      loss_mask: 1 on the tokens that the target wrote (answers), 0 on prompts and padding.
      features: tapped features of the target at every position.
      last_hidden: the target's hidden state after its final norm at every position.
      anchors: anchor positions, ascending; 0 where not kept.
      keep: which anchors are real.
      length: tokens of every text, padding not counted; None where a text is taken to end with its last answer token.
      segment: number of the text that each position belongs to, where rows hold several (packing); None where a row is one text.
    """

    ids: Int[Array, "B S"]
    loss_mask: Bool[Array, "B S"]
    features: Float[Array, "B S F"]
    last_hidden: Float[Array, "B S D"]
    anchors: Int[Array, "B A"]
    keep: Bool[Array, "B A"]
    length: Int[Array, "B"] | None = None
    segment: Int[Array, "B S"] | None = None

    def positions(self) -> Int[Array, "B S"]:
        """Position of every token in its text."""
        if self.segment is not None:
            return positions_in_texts(self.segment)
        return jnp.broadcast_to(jnp.arange(self.ids.shape[1], dtype=jnp.int32), self.ids.shape)


@struct.dataclass
class Sites:
    """Everything the losses need of the P = B x A x G places where the drafter predicts a token, in order (b, a, k).

    Block drafters predict behind the anchors of the batch, drafters that go token by token behind every position (A = S).

    Losses walk over chunks of P, so that no full-vocabulary tensor of all sites ever exists.

    Attributes:
      hidden: drafter hidden state that goes to the LM head.
      latent: what the sequential head multiplies with W2 (M = 0 without such a head).
      anchor: position of the anchor behind which the site's block stands.
      label: the token to predict, as a target id.
      teacher_index: row of `last_hidden.reshape(B * S, D)` whose logits are the target's distribution of the label.
      weight: loss weight: 0 where unsupervised, else the position's decay.
      step: position k of the site in its block (or training-time-test step), for per-position metrics.
      confidence_logits: None without a confidence head (a score is read off the logits).
      soft_ce_places: what the soft cross-entropy is divided by where that is not the sum of weights (Eagle3: all B x S positions,
        padding included); static.
    """

    hidden: Float[Array, "P D"]
    latent: Float[Array, "P M"]
    anchor: Int[Array, "P"]
    label: Int[Array, "P"]
    teacher_index: Int[Array, "P"]
    weight: Float[Array, "P"]
    step: Int[Array, "P"]
    confidence_logits: Float[Array, "P"] | None
    soft_ce_places: int | None = struct.field(pytree_node=False, default=None)


class Target(Protocol):
    """A frozen language model."""

    @property
    def spec(self) -> TargetSpec: ...

    def init(self, rng: PRNGKeyArray) -> Params:
        """Random parameters (unboxed)."""
        ...

    def init_cache(self, num_rows: int, max_len: int, *, writes_per_pass: int | None = None, dtype: Any = jnp.float32) -> Any:
        """An empty cache for `num_rows` requests of up to `max_len` tokens.

        `writes_per_pass` is the largest number of positions that one pass writes for a request, kept or rolled back: layers that
        look back over a window alone hold their window and that many more. None: `max_len`, nothing is saved.
        """
        ...

    def head(self, params: Params) -> TargetHead:
        """The embedding and output head, as views of `params`."""
        ...

    def forward(
        self, params: Params, cache: Any, tokens: FlatTokens, taps: tuple[int, ...]
    ) -> tuple[Float[Array, "N D"], Float[Array, "N F"], Any]:
        """Run on `tokens`: hidden states after the final norm, the outputs of the layers `taps` side by side, the new cache.

        Tap i is the output of decoder layer i in the residual stream, before the final norm; -1 is the embedding output.
        `cache` None means that `tokens` is a grid that starts at position 0 and sees itself alone (training); None comes back.
        """
        ...

    def roll_back(self, cache: Any, length: Int[Array, "R"]) -> Any:
        """Forget everything from position `length[r]` on."""
        ...


class Drafter(Protocol):
    """A model that proposes `block_size` tokens a round."""

    @property
    def block_size(self) -> int: ...

    @property
    def taps(self) -> tuple[int, ...]: ...

    def init(self, rng: PRNGKeyArray) -> Params:
        """Random parameters (unboxed). The target's embedding and head are not among them."""
        ...

    def init_state(self, num_rows: int, max_len: int, *, writes_per_pass: int | None = None, dtype: Any = jnp.float32) -> Any:
        """The empty decoding state for `num_rows` requests of up to `max_len` tokens; arguments as in `Target.init_cache`."""
        ...

    def commit(self, params: Params, head: TargetHead, state: Any, committed: Committed) -> Any:
        """Learn of committed positions (prefill and every later round); the anchor's own position is not among them."""
        ...

    def propose(
        self, params: Params, head: TargetHead, state: Any, anchor: Int[Array, "R"], noise: Noise, sampling: Sampling
    ) -> DraftBlock:
        """Draft a block behind the anchor. The state is left alone: there is nothing to undo."""
        ...

    def prediction_sites(self, params: Params, head: TargetHead, batch: TrainBatch) -> Sites:
        """The training forward pass, up to the LM head."""
        ...

    def site_logits(
        self, params: Params, head: TargetHead, hidden: Float[Array, "P D"], latent: Float[Array, "P M"]
    ) -> Float[Array, "P Vd"]:
        """Corrected draft logits of a chunk of sites."""
        ...


class SurvivalModel(Protocol):
    """Confidence to calibrated survival."""

    def survival(self, block: DraftBlock, temperature: Float[Array, "R"]) -> Float[Array, "R G"]:
        """a_k = chance that drafts 1..k are all accepted; non-increasing over k; NaN never comes out."""
        ...


class VerifyPolicy(Protocol):
    """How many drafts of each request are verified."""

    def lengths(
        self, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"], request_id: Int[Array, "R"]
    ) -> Int[Array, "R"]:
        """Verified drafts per request, 0..G; 0 where not active. Whether draft k is verified must not depend on x_k.

        `context` is the number of committed tokens.
        """
        ...


@runtime_checkable
class StatefulPolicy(Protocol):
    """A policy that remembers earlier rounds: its state goes in and comes out, carried by whoever runs the rounds."""

    def init_state(self, num_rows: int, block_size: int) -> Any:
        """What it knows before the first round."""
        ...

    def next_lengths(
        self, state: Any, survival: Float[Array, "R G"], active: Bool[Array, "R"], context: Int[Array, "R"], request_id: Int[Array, "R"]
    ) -> tuple[Int[Array, "R"], Any]:
        """As `VerifyPolicy.lengths`, with the state in and the new state out. The state holds past rounds alone."""
        ...


@typed
def flatten_rounds(
    anchor: Int[Array, "R"],
    drafts: Int[Array, "R G"],
    start: Int[Array, "R"],
    lengths: Int[Array, "R"],
    active: Bool[Array, "R"],
    bucket: int,
) -> tuple[FlatTokens, Int[Array, "R"]]:
    """Lay out [anchor, draft 1..lengths[r]] of every active request one after another, padded to `bucket` tokens.

    Args:
      start: position of the anchor.
      bucket: N, at least the sum of 1 + lengths over the active requests; tokens beyond it would be lost.

    Returns:
      the tokens, and the flat index of every request's anchor.
    """
    num_rows, block_size = drafts.shape
    count = jnp.where(active, 1 + lengths, 0)
    ends = jnp.cumsum(count)
    first = ends - count
    flat = jnp.arange(bucket, dtype=jnp.int32)
    row = jnp.minimum(jnp.searchsorted(ends, flat, side="right").astype(jnp.int32), num_rows - 1)
    valid = flat < ends[-1]
    # No request can have more queries than the bucket has tokens, and attention pays for every place in its grid.
    queries_per_row = min(block_size + 1, bucket)
    slot = jnp.clip(flat - first[row], 0, queries_per_row - 1)
    chain = jnp.concatenate([anchor[:, None], drafts], axis=1)
    tokens = FlatTokens(
        ids=chain[row, slot],
        row=row,
        slot=slot,
        position=start[row] + slot,
        valid=valid,
        queries_per_row=queries_per_row,
    )
    return tokens, first.astype(jnp.int32)
