"""What a drafter is worth: estimates at drawn anchors, and rounds walked along recorded texts."""

import dataclasses
import functools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.anchors import read_batch, sample_anchors
from dspark_jax.batches import TokenBatch
from dspark_jax.drafters.draft_scores import score_logits, score_of
from dspark_jax.losses import DraftLossConfig, LossTerms, draft_loss
from dspark_jax.protocols import Drafter, Sites, Target, TargetHead, TrainBatch
from dspark_jax.readout import label_rows
from dspark_jax.typing import Array, Bool, Int, Params, typed


@dataclasses.dataclass(frozen=True)
class AnchorEstimate:
    """Means over blocks at uniformly drawn anchors of held-out texts, the true tokens given to the drafter.

    Attributes:
      accepted_length_greedy: 1 + sum_k prod_{i<=k} [likeliest draft = likeliest target token]: temperature 0.
      accepted_length_sampled: 1 + sum_k prod_{i<=k} (1 - TV_i): temperature 1.
      agreement, accept_rate: the factors of these products, per position.
    """

    accepted_length_greedy: float
    accepted_length_sampled: float
    agreement: tuple[float, ...]
    accept_rate: tuple[float, ...]
    confidence_abs_error: float
    blocks: int


@functools.partial(jax.jit, static_argnums=(0, 1, 7))
def _anchor_terms(
    target: Target,
    drafter: Drafter,
    target_params: Params,
    params: Params,
    ids: Array,
    loss_mask: Array,
    rng: Array,
    num_anchors: int,
    draft_ids: Array | None,
) -> LossTerms:
    anchors, keep = sample_anchors(rng, loss_mask, num_anchors)
    batch = read_batch(target, target_params, drafter.taps, ids, loss_mask, anchors, keep)
    head = target.head(target_params)
    return draft_loss(drafter, params, head.restrict(draft_ids), head, batch, DraftLossConfig(chunk=1024))[1]


def estimate_at_anchors(
    target: Target,
    drafter: Drafter,
    target_params: Params,
    params: Params,
    batches: Iterable[TokenBatch],
    num_anchors: int,
    seed: int = 0,
    draft_ids: Any = None,
) -> AnchorEstimate:
    """Estimate the accepted length on `batches`, `num_anchors` drawn per text (fewer where an answer is shorter)."""
    total = None
    for index, batch in enumerate(batches):
        rng = jax.random.fold_in(jax.random.key(seed), index)
        terms = _anchor_terms(target, drafter, target_params, params, batch.ids, batch.loss_mask, rng, num_anchors, draft_ids)
        total = terms if total is None else jax.tree.map(jnp.add, total, terms)
    if total is None:
        raise ValueError("batches is empty; at least one text is needed")
    blocks, count = float(total.blocks), np.maximum(np.asarray(total.count), 1.0)
    return AnchorEstimate(
        accepted_length_greedy=float(total.greedy_accepted_length) / blocks,
        accepted_length_sampled=float(total.accepted_length) / blocks,
        agreement=tuple((np.asarray(total.agree) / count).tolist()),
        accept_rate=tuple((np.asarray(total.accept) / count).tolist()),
        confidence_abs_error=float(total.confidence_abs_error) / max(float(total.denominators.confidence), 1e-6),
        blocks=int(blocks),
    )


@dataclasses.dataclass(frozen=True)
class TextReading:
    """What a drafter would have done at every position of one recorded answer.

    Anchor i is answer token i; its block proposes the answer tokens i + 1, i + 2, ... from the recorded ones before them. The last
    answer token is no anchor. Entries whose label lies behind the answer are False and 0.

    Attributes:
      row: number of the text in its collection.
      answer_start: absolute position of anchor 0.
      match: [U, A, G], the likeliest draft is the recorded token. While all slots before matched, so did the drafted chain.
      accept: [U, A, G], min(1, q / p) of the recorded token at temperature 1.
      confidence_logits: [A, G], of the head or of the score that stands in for it, which reads the drafter's own vocabulary; None
        without either.

    U counts draft vocabularies: the drafter's own, then those it was cut to.
    """

    row: int
    answer_start: int
    match: np.ndarray
    accept: np.ndarray
    confidence_logits: np.ndarray | None


@functools.partial(jax.jit, static_argnums=(0, 2))
def _read_target(target: Target, target_params: Params, taps: tuple[int, ...], ids: Array) -> tuple[Array, Array, Array]:
    """Features, last hidden states, and the log-probability of every token but the first, at temperature 1."""
    nothing = jnp.zeros((ids.shape[0], 1), jnp.int32)
    batch = read_batch(target, target_params, taps, ids, jnp.ones(ids.shape, bool), nothing, nothing == 0)
    head = target.head(target_params)

    def log_prob(row: tuple[Array, Array]) -> Array:
        hidden, following = row
        logits = head.logits(hidden)
        return jnp.take_along_axis(logits, following[:, None], axis=1)[:, 0] - jax.nn.logsumexp(logits, axis=1)

    return batch.features, batch.last_hidden, jax.lax.map(log_prob, (batch.last_hidden[:, :-1], ids[:, 1:]))


def _behind_anchors(sites: Sites, batch: TrainBatch, block_size: int) -> Sites:
    """The sites behind the anchors of the batch; drafters that go token by token predict behind every position."""
    num_rows = batch.ids.shape[0]
    anchor = sites.anchor.reshape(num_rows, -1, block_size)[:, None, :, 0]
    index = jnp.argmax(anchor == batch.anchors[:, :, None], axis=-1)
    rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None]

    def picked(x: Array) -> Array:
        blocks = x.reshape(num_rows, anchor.shape[2], block_size, *x.shape[1:])[rows, index]
        return blocks.reshape(index.size * block_size, *x.shape[1:])

    return jax.tree.map(picked, sites)


@functools.partial(jax.jit, static_argnums=0)
def _read_blocks(
    drafter: Drafter, params: Params, head: TargetHead, batch: TrainBatch, cuts: tuple[Array, ...]
) -> tuple[Array, Array, Array | None]:
    """Of the blocks at `batch.anchors`: match and log q [U, B, A, G], and the confidence logits [B, A, G]."""
    sites = _behind_anchors(drafter.prediction_sites(params, head, batch), batch, drafter.block_size)
    logits = drafter.site_logits(params, head, sites.hidden, sites.latent).astype(jnp.float32)
    shape = (*batch.anchors.shape, drafter.block_size)
    matches, log_qs = [], []
    for ids in (head.draft_ids, *cuts):
        own = ids is head.draft_ids
        kept = logits if own else logits[:, ids]
        row, inside = label_rows(sites.label, ids)
        logit = jnp.take_along_axis(kept, row[:, None], axis=1)[:, 0]
        # Half the time of an argmax on a CPU; the label of an exact tie counts as a match whatever its id.
        matches.append((inside & (logit >= jnp.max(kept, axis=1))).reshape(shape))
        log_qs.append(jnp.where(inside, logit - jax.nn.logsumexp(kept, axis=1), -jnp.inf).reshape(shape))
    confidence, score = sites.confidence_logits, score_of(drafter)
    if score is not None:
        confidence = score_logits(logits, score)
    confidence = None if confidence is None else confidence.reshape(shape)
    return jnp.stack(matches), jnp.stack(log_qs), confidence


def _answer_ranges(loss_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """First position of each answer, and the position behind its last."""
    start = loss_mask.argmax(axis=1)
    count = loss_mask.sum(axis=1)
    for row, (first, tokens) in enumerate(zip(start, count, strict=True)):
        if tokens < 2 or not loss_mask[row, first : first + tokens].all():
            raise ValueError(f"loss_mask of text {row} of a batch marks {tokens} tokens; an answer is one run of at least 2 tokens")
    return start, start + count


def read_texts(
    target: Target,
    drafter: Drafter,
    target_params: Params,
    params: Params,
    batches: Iterable[TokenBatch],
    draft_ids: Array | None = None,
    cuts: Sequence[Array] = (),
    sites_at_once: int = 448,
) -> Iterator[TextReading]:
    """Run the drafter at every answer position of recorded texts, the recorded tokens before a slot given to it.

    Args:
      draft_ids: draft vocabulary that `params` are cut to; None for the whole.
      cuts: smaller draft vocabularies to compare, ascending target ids; only for a drafter of the whole vocabulary.
      sites_at_once: slots whose logits exist at the same time.

    Raises:
      ValueError: an answer is not one run of at least two tokens, or `cuts` come with `draft_ids`.
    """
    if draft_ids is not None and cuts:
        raise ValueError("cuts are given with draft_ids; a drafter that is already cut is not cut again")
    head = target.head(target_params).restrict(draft_ids)
    for batch in batches:
        start, end = _answer_ranges(batch.loss_mask)
        features, last_hidden, log_p = _read_target(target, target_params, drafter.taps, jnp.asarray(batch.ids))
        log_p = np.asarray(log_p)
        size = max(1, sites_at_once // (len(start) * drafter.block_size))
        parts = []
        for first in range(0, int((end - start).max()) - 1, size):
            anchors = start[:, None] + first + np.arange(size)
            keep = anchors < end[:, None] - 1
            blocks = TrainBatch(
                ids=jnp.asarray(batch.ids),
                loss_mask=jnp.asarray(batch.loss_mask),
                features=features,
                last_hidden=last_hidden,
                anchors=jnp.asarray(np.where(keep, anchors, 0), jnp.int32),
                keep=jnp.asarray(keep),
            )
            parts.append(jax.device_get(_read_blocks(drafter, params, head, blocks, tuple(cuts))))
        match, log_q = (np.concatenate([part[i] for part in parts], axis=2) for i in (0, 1))
        confidence = None if parts[0][2] is None else np.concatenate([part[2] for part in parts], axis=1)
        for place, row in enumerate(batch.rows):
            anchors = end[place] - start[place] - 1
            label = np.arange(anchors)[:, None] + np.arange(drafter.block_size)
            inside = label < anchors
            log_p_label = log_p[place, start[place] + np.minimum(label, anchors - 1)]
            accept = np.exp(np.minimum(log_q[:, place, :anchors] - log_p_label, 0.0))
            yield TextReading(
                row=int(row),
                answer_start=int(start[place]),
                match=match[:, place, :anchors] & inside,
                accept=np.where(inside, accept, 0.0).astype(np.float32),
                confidence_logits=None if confidence is None else confidence[place, :anchors],
            )


@dataclasses.dataclass(frozen=True)
class WalkTotals:
    """Rounds walked along recorded texts. Rounds that the end of a text cut short are counted apart.

    Attributes:
      rounds, emitted: whole rounds and their tokens, correction or bonus counted.
      cut_rounds, cut_emitted: rounds in which every token up to the end of the text was accepted, so that no correction or bonus
        token is on record, and the tokens they gave.
      reached: [G] whole rounds that accepted the k - 1 drafts before; `accepted`: those of them that accepted draft k too.
    """

    rounds: int
    emitted: int
    cut_rounds: int
    cut_emitted: int
    reached: np.ndarray
    accepted: np.ndarray

    @property
    def accepted_length(self) -> float:
        """Emitted tokens / rounds over the whole rounds; NaN without any."""
        return self.emitted / self.rounds if self.rounds else math.nan

    @property
    def accepted_length_with_cut(self) -> float:
        """The same with the rounds that the end of a text cut short."""
        rounds = self.rounds + self.cut_rounds
        return (self.emitted + self.cut_emitted) / rounds if rounds else math.nan

    @property
    def conditional_acceptance(self) -> np.ndarray:
        """Per position, the share of `reached` that was accepted; NaN where no round came that far."""
        return np.where(self.reached > 0, self.accepted / np.maximum(self.reached, 1), np.nan)

    def __add__(self, other: "WalkTotals") -> "WalkTotals":
        return WalkTotals(*(getattr(self, field.name) + getattr(other, field.name) for field in dataclasses.fields(self)))


@dataclasses.dataclass(frozen=True)
class WalkRule:
    """How rounds are walked along a text.

    Attributes:
      temperature: 0 accepts a draft that is the recorded token, for texts that were written greedily. 1 accepts the recorded token with
        probability min(1, q / p), for texts sampled from the target at temperature 1.
      draft_length: drafts per round, 1..G.
      vocabulary: index of the draft vocabulary, see `TextReading`.
      first_tokens: only rounds whose anchor is among that many first answer tokens; None for all.
      context_limit: only rounds whose anchor, drafts and bonus token lie below this absolute position; None for all.
      seed: of the uniforms at temperature 1.
    """

    temperature: int
    draft_length: int
    vocabulary: int = 0
    first_tokens: int | None = None
    context_limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        if self.temperature not in (0, 1):
            raise ValueError(f"temperature is {self.temperature}; texts are walked at 0 or 1")
        if self.draft_length < 1:
            raise ValueError(f"draft_length is {self.draft_length}; a round drafts at least 1 token")


@typed
def walk_rounds(kept: Bool[np.ndarray, "A G"], stop: int) -> tuple[Int[np.ndarray, "rounds"], Int[np.ndarray, "rounds"]]:
    """Anchors of the rounds that follow each other along a text, and how many drafts each accepts.

    Args:
      kept: whether slot k of the block at anchor i is accepted if reached; anchor i is followed by A - i recorded tokens.
      stop: only anchors below it.
    """
    anchors = np.arange(len(kept))
    leading = np.minimum(np.cumprod(kept, axis=1).sum(axis=1), len(kept) - anchors)
    visited = []
    anchor = 0
    while anchor < min(stop, len(kept)):
        visited.append(anchor)
        anchor += int(leading[anchor]) + 1
    chosen = np.asarray(visited, np.int64)
    return chosen, leading[chosen]


def _walk(reading: TextReading, rule: WalkRule) -> tuple[np.ndarray, np.ndarray]:
    block_size = reading.match.shape[2]
    if rule.draft_length > block_size:
        raise ValueError(f"draft_length is {rule.draft_length}; this drafter gives at most {block_size}")
    if rule.temperature == 0:
        kept = reading.match[rule.vocabulary]
    else:
        # Each entry of the table is asked for at most once, so that drawing all of them has the law of drawing round by round.
        uniforms = np.random.default_rng((rule.seed, reading.row)).random(reading.accept.shape[1:])
        kept = uniforms < reading.accept[rule.vocabulary]
    stop = len(kept) if rule.first_tokens is None else rule.first_tokens
    if rule.context_limit is not None:
        stop = min(stop, rule.context_limit - 1 - rule.draft_length - reading.answer_start)
    return walk_rounds(kept[:, : rule.draft_length], stop)


def walk_texts(readings: Iterable[TextReading], rule: WalkRule) -> WalkTotals:
    """Walk rounds along recorded texts: what speculative decoding would have done to write them.

    Every round starts at the token behind the last one's. At temperature 0 this is what a decoding loop would do on the recorded text;
    at temperature 1 the text is a sample of the target, and accepting its own token with min(1, q / p) has the law of
    speculative sampling. The first anchor is the first answer token (it comes from the prefill and counts for nothing).

    Raises:
      ValueError: no text, or a draft length above the block size.
    """
    total = None
    for reading in readings:
        anchors, accepted = _walk(reading, rule)
        cut = accepted == reading.match.shape[1] - anchors
        whole = accepted[~cut]
        place = np.arange(rule.draft_length)
        one = WalkTotals(
            rounds=len(whole),
            emitted=int((whole + 1).sum()),
            cut_rounds=int(cut.sum()),
            cut_emitted=int(accepted[cut].sum()),
            reached=(place <= whole[:, None]).sum(axis=0),
            accepted=(place < whole[:, None]).sum(axis=0),
        )
        total = one if total is None else total + one
    if total is None:
        raise ValueError("readings is empty; at least one text is needed")
    return total


def confidence_rounds(readings: Iterable[TextReading], rule: WalkRule) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Confidence logits [K, G] of the walked rounds, prefix labels [K, G] (drafts 1..k were all accepted), and the text's row [K].

    Rounds nearer to the end of their text than a whole block are left out: every round has a label at every position. Confidence is
    that of the recorded previous tokens: up to the first rejected draft it is what a decoding loop would see, behind it (where
    every label is 0) a loop would read W1 of the rejected draft instead.

    Raises:
      ValueError: the drafter has neither a confidence head nor a score, or no round is whole.
    """
    logits, labels, rows = [], [], []
    for reading in readings:
        if reading.confidence_logits is None:
            raise ValueError("confidence_logits is None; this drafter has no confidence head, and no confidence_score, to calibrate")
        anchors, accepted = _walk(reading, rule)
        inside = anchors + rule.draft_length <= reading.match.shape[1]
        logits.append(reading.confidence_logits[anchors[inside], : rule.draft_length])
        labels.append((np.arange(rule.draft_length) < accepted[inside, None]).astype(np.int32))
        rows.append(np.full(inside.sum(), reading.row, np.int32))
    if not sum(map(len, labels)):
        raise ValueError("readings give no round with a whole block behind it; longer texts are needed")
    return np.concatenate(logits), np.concatenate(labels), np.concatenate(rows)
