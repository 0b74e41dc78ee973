"""What must be true of every drafter that goes token by token, and how its numbers are held against the reference's."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.calibrate import ConstantSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, answers, step
from dspark_jax.layers import GEMMA4_STYLE
from dspark_jax.prefill import start
from dspark_jax.protocols import Committed, FlatTokens, TargetHead, TrainBatch
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from tests.reference_checks import ACTIVATIONS

SMALL: dict[str, Any] = {
    "vocab_size": 31,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "num_target_layers": 4,
    "block_size": 3,
}
GEMMA: dict[str, Any] = {"style": GEMMA4_STYLE, "k_eq_v": True, "rotated_share": 0.25}
TARGET = DenseTarget(
    DenseConfig(vocab_size=31, hidden_size=16, intermediate_size=24, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=8)
)


@dataclasses.dataclass(frozen=True)
class AtAnchors:
    """A chain drafter whose sites are those behind the anchors of the batch alone, as a block drafter's are."""

    drafter: Any

    @property
    def block_size(self):
        return self.drafter.block_size

    @property
    def taps(self):
        return self.drafter.taps

    def prediction_sites(self, params, head, batch):
        sites = self.drafter.prediction_sites(params, head, batch)
        num_rows, length = batch.ids.shape
        chain = (jnp.arange(num_rows)[:, None] * length + batch.anchors - 1).reshape(-1)

        def pick(x):
            picked = x.reshape(num_rows * length, self.block_size, *x.shape[1:])[chain]
            return picked.reshape(num_rows * self.block_size, *x.shape[1:])

        return jax.tree.map(pick, sites)

    def site_logits(self, params, head, hidden, latent):
        return self.drafter.site_logits(params, head, hidden, latent)


def random_drafter_params(drafter, seed=0):
    """Parameters in which no two tensors are alike and norms are not 1."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32), drafter.abstract_params())


def random_head(seed=5, **extra):
    embedding, lm_head = np.random.default_rng(seed).normal(size=(2, 31, 16)).astype(np.float32)
    return TargetHead(embedding=jnp.asarray(embedding), lm_head=jnp.asarray(lm_head), **extra)


def random_batch(drafter, num_rows=10, width=15, seed=3, **changes):
    """Texts whose features and hidden states are noise; all of it carries loss."""
    rng = np.random.default_rng(seed)
    fields: dict[str, Any] = {
        "ids": jnp.asarray(rng.integers(0, 31, (num_rows, width)), jnp.int32),
        "loss_mask": jnp.ones((num_rows, width), bool),
        "features": jnp.asarray(rng.normal(size=(num_rows, width, 16 * len(drafter.taps))), jnp.float32),
        "last_hidden": jnp.asarray(rng.normal(size=(num_rows, width, 16)), jnp.float32),
        "anchors": jnp.zeros((num_rows, 1), jnp.int32),
        "keep": jnp.ones((num_rows, 1), bool),
    }
    return TrainBatch(**(fields | changes))


@functools.partial(jax.jit, static_argnums=0)
def sites_of(drafter, params, head, batch):
    """Sites of a batch, and their draft logits [B, S, G, Vd]."""
    sites = drafter.prediction_sites(params, head, batch)
    logits = drafter.site_logits(params, head, sites.hidden, sites.latent)
    return sites, logits.reshape(*batch.ids.shape, drafter.block_size, -1)


@functools.partial(jax.jit, static_argnums=0)
def commit(drafter, params, head, state, committed):
    return drafter.commit(params, head, state, committed)


@functools.partial(jax.jit, static_argnums=0)
def propose(drafter, params, head, state, anchor, sampling):
    rows = jnp.arange(anchor.shape[0], dtype=jnp.int32)
    return drafter.propose(params, head, state, anchor, Noise.of_round(7, rows, jnp.zeros_like(rows)), sampling)


def pairs_of(batch, begin, count, width):
    """`count[r]` positions from `begin[r]` on as `Committed`; what pads them is NaN."""
    rows, place = np.arange(len(begin))[:, None], begin[:, None] + np.arange(width)
    real = np.arange(width) < count[:, None]
    inside = np.minimum(place, batch.ids.shape[1] - 2)
    hidden, features = (np.where(real[:, :, None], np.asarray(x)[rows, inside], np.nan) for x in (batch.last_hidden, batch.features))
    next_ids = jnp.asarray(np.asarray(batch.ids)[rows, inside + 1])
    return Committed(next_ids, jnp.asarray(hidden), jnp.asarray(features), jnp.asarray(count, jnp.int32))


def assert_training_is_decoding(drafter, params, head):
    """A greedy proposal behind n pairs has the logits of the training chain at anchor n, whose text it continues; for n = 1..10."""
    anchors, rows = np.arange(1, 11), np.arange(10)
    text = jax.tree.map(lambda x: jnp.repeat(x[:1], 10, axis=0), random_batch(drafter))
    state = commit(drafter, params, head, drafter.init_state(10, 16), pairs_of(text, 0 * anchors, anchors, 11))
    assert state.length.tolist() == anchors.tolist()
    block = propose(drafter, params, head, state, text.ids[rows, anchors], Sampling.make(10))
    assert block.confidence_logits is None and block.ids.shape == (10, drafter.block_size)
    ids = np.array(text.ids)
    for row, anchor in enumerate(anchors):
        ids[row, anchor + 1 : anchor + 1 + drafter.block_size] = np.asarray(block.ids)[row]
    # What the target knows at the anchor and beyond is not there yet when a block is drafted.
    unknown = np.arange(15) >= anchors[:, None]
    known = {name: jnp.where(unknown[:, :, None], 9.0, getattr(text, name)) for name in ("features", "last_hidden")}
    _, logits = sites_of(drafter, params, head, dataclasses.replace(text, ids=jnp.asarray(ids), **known))
    np.testing.assert_allclose(np.asarray(block.logits), np.asarray(logits)[rows, anchors - 1], **ACTIVATIONS)
    drafted = np.asarray(block.logits).argmax(-1)
    np.testing.assert_array_equal(np.asarray(block.ids), drafted if head.draft_ids is None else np.asarray(head.draft_ids)[drafted])
    assert len(np.unique(np.asarray(block.ids), axis=0)) > 5


def assert_no_leak(drafter, params, head):
    """Chain (i, t) reads tokens up to i + 1 + t and what the target knows up to i: later ones leave it unmoved, these move it."""
    batch = random_batch(drafter)
    before = np.asarray(sites_of(drafter, params, head, batch)[1])
    newest = np.arange(15)[:, None] + 1 + np.arange(drafter.block_size)
    for t in (1, 5, 14):
        ids = batch.ids.at[:, t].set((batch.ids[:, t] + 1) % 31)
        moved = np.abs(np.asarray(sites_of(drafter, params, head, dataclasses.replace(batch, ids=ids))[1]) - before).max((0, 3))
        assert np.all(moved[newest < t] < 1e-5) and np.all(moved[newest >= t] > 1e-4)
        later = {"features": batch.features.at[:, t:].add(1.0), "last_hidden": batch.last_hidden.at[:, t:].multiply(-1.0)}
        moved = np.abs(np.asarray(sites_of(drafter, params, head, dataclasses.replace(batch, **later))[1]) - before).max((0, 3))
        assert np.all(moved[:t] < 1e-5) and np.all(moved[t:] > 1e-4)


def assert_padding_does_not_matter(drafter, params, head):
    """What is supervised of a text is the same whatever stands behind its end."""
    mask = jnp.broadcast_to(jnp.arange(15) < 10, (10, 15))
    batch = random_batch(drafter, loss_mask=mask)
    noise = random_batch(drafter, seed=4)
    other = {name: getattr(batch, name).at[:, 10:].set(getattr(noise, name)[:, 10:]) for name in ("ids", "features", "last_hidden")}
    (ours, logits), (theirs, moved) = (sites_of(drafter, params, head, each) for each in (batch, dataclasses.replace(batch, **other)))
    counted = np.asarray(ours.weight) > 0
    assert counted.sum() == 10 * sum(min(drafter.block_size, 8 - i) for i in range(8))
    np.testing.assert_array_equal(np.asarray(ours.weight), np.asarray(theirs.weight))
    np.testing.assert_array_equal(np.asarray(ours.label)[counted], np.asarray(theirs.label)[counted])
    assert np.all(np.asarray(ours.teacher_index)[counted] % 15 < 9)
    same = counted.reshape(logits.shape[:3])
    np.testing.assert_allclose(np.asarray(logits)[same], np.asarray(moved)[same], atol=1e-5)


def assert_chunks_do_not_matter(drafter, params, head):
    """Pairs committed in chunks of 0 to 4 that differ from request to request, padded with NaN, leave what one chunk leaves."""
    batch = random_batch(drafter)
    total = np.array([9, 4, 11, 1, 2, 3, 5, 6, 7, 8])
    whole = commit(drafter, params, head, drafter.init_state(10, 16), pairs_of(batch, 0 * total, total, 11))
    state, done = drafter.init_state(10, 16), np.zeros(10, int)
    for index in range(9):
        count = np.minimum((np.arange(10) + 3 * index) % 5, total - done)
        hidden = np.asarray(state.hidden)
        state = commit(drafter, params, head, state, pairs_of(batch, done, count, 11))
        np.testing.assert_array_equal(np.asarray(state.hidden)[count == 0], hidden[count == 0])
        done += count
    assert state.length.tolist() == whole.length.tolist() == done.tolist() == total.tolist()
    np.testing.assert_allclose(np.asarray(state.hidden), np.asarray(whole.hidden), **ACTIVATIONS)
    for ours, theirs in ((state.keys, whole.keys), (state.values, whole.values)):
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), **ACTIVATIONS)
        for row, length in enumerate(total):
            assert not np.asarray(ours)[row, :, length:].any(), "padding and later positions are untouched"


def decoding(target, target_params, drafter, params, prompts, budget, **settings):
    """A plan that verifies every draft, its parameters, and the state after prefill."""
    survival = ConstantSurvival((1.0,) * drafter.block_size)
    plan = DecodePlan(target, drafter, FixedLength(drafter.block_size), survival)
    decode_params = DecodeParams.of(target, target_params, params)
    merged: Any = {"max_new_tokens": budget, "max_len": 64} | settings
    return plan, decode_params, start(plan, decode_params, prompts, **merged)


def assert_greedy_output_is_the_targets(target, target_params, drafter, params, prompts):
    """Whatever is drafted, every token is the target's likeliest after those before it."""
    plan, decode_params, state = decoding(target, target_params, drafter, params, prompts, 16)
    accepted = 0
    while not bool(state.finished.all()):
        state, stats = step(plan, decode_params, state)
        accepted += int(stats.num_accepted.sum())
    assert accepted > 0 and [len(answer) for answer in answers(state)] == [16] * len(prompts)
    tokens = FlatTokens.grid(state.ids, jnp.zeros_like(state.length), state.length)
    likeliest = jax.jit(lambda: decode_params.head.logits(target.forward(target_params, None, tokens, ())[0]).argmax(-1))()
    for row, answer in enumerate(answers(state)):
        begin = len(prompts[row]) - 1
        assert np.asarray(likeliest).reshape(state.ids.shape)[row, begin : begin + 16].tolist() == answer


def replay_greedy_trace(trace, target, target_params, drafter, params):
    """A trace's rounds by our own decoding, draft by draft; gives prompt and answer at the trace's budget.

    The reference stops drafting at a stop token, and drops everything behind it.
    """
    prompt, stops = trace["prompt_ids"][0].tolist(), trace["stop_token_ids"].reshape(-1).tolist()
    plan, decode_params, state = decoding(target, target_params, drafter, params, [prompt] * 3, 64 - len(prompt), stop_ids=stops)
    for index in range(len(trace["start"])):
        before = int(state.length[0])
        state, stats = step(plan, decode_params, state)
        count = trace["draft_token_count"][index]
        assert before - 1 == trace["start"][index] and stats.anchor[0] == trace["anchor_token"][index]
        np.testing.assert_array_equal(np.asarray(stats.drafts)[0, :count], trace["verify_draft_tokens"][index, :count])
        committed = trace["committed_tokens"][index]
        committed = committed[committed >= 0]
        if trace["terminated_by_stop"][index]:
            assert bool(state.finished[0]) and int(stats.num_accepted[0]) >= trace["accepted"][index]
            committed = committed[: committed.tolist().index(stops[0]) + 1]
        else:
            assert stats.num_accepted[0] == trace["accepted"][index] and stats.next_id[0] == trace["next_token"][index]
            assert stats.emitted[0] == len(committed)
        np.testing.assert_array_equal(np.asarray(state.ids)[0, before : before + len(committed)], committed)
    budget = int(trace["max_new_tokens"])
    _, _, state = decoding(target, target_params, drafter, params, [prompt] * 3, budget, stop_ids=stops)
    while not bool(state.finished.all()):
        state, _ = step(plan, decode_params, state)
    return prompt + answers(state)[0]
