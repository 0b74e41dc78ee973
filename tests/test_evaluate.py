"""Evaluation: rounds walked along recorded texts, and estimates at drawn anchors."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.anchors import read_batch
from dspark_jax.batches import TokenBatch
from dspark_jax.data import DOMAINS, load_token_sequences
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.evaluate import (
    TextReading,
    WalkRule,
    confidence_rounds,
    estimate_at_anchors,
    read_texts,
    walk_rounds,
    walk_texts,
)
from dspark_jax.weights import load_drafter, load_target
from experiments.release_drafter import cut_drafter
from experiments.release_readings import cell_rows, one_by_one
from tests.tiny_models import needs_smollm2


def _reading(match, accept=None, confidence=None, row=0, answer_start=10) -> TextReading:
    match = np.asarray(match, bool)
    accept = match.astype(np.float32) if accept is None else np.asarray(accept, np.float32)
    return TextReading(row, answer_start, match[None], accept[None], confidence)


def _literal_walk(kept, stop):
    """The walk one token at a time: the text has A tokens behind anchor 0."""
    rounds, position = [], 0
    while position < min(stop, len(kept)):
        anchor, accepted = position, 0
        for slot in range(kept.shape[1]):
            if anchor + slot >= len(kept) or not kept[anchor, slot]:
                break
            accepted += 1
            position += 1
        position += 1
        rounds.append((anchor, accepted))
    return rounds


@given(st.integers(1, 25), st.integers(1, 7), st.floats(0, 1), st.integers(0, 30), st.integers(0, 10_000))
def test_the_walk_is_a_literal_loop_over_tokens(anchors, block_size, share, stop, seed):
    kept = np.random.default_rng(seed).random((anchors, block_size)) < share
    visited, accepted = walk_rounds(kept, stop)
    assert list(zip(visited.tolist(), accepted.tolist(), strict=True)) == _literal_walk(kept, stop)


FULL, NONE = [1, 1, 1], [0, 0, 0]
SIX = [[1, 0, 1], NONE, [1, 1, 0], FULL, [1, 1, 0], [1, 0, 0]]
"""Anchors 0..5: two tokens, then a round of three, and at anchor 5 the last token alone is left."""


def test_accepted_length_and_conditional_acceptance_by_their_definitions():
    """Anchor 0 accepts 1 of 3, anchor 2 accepts 2, anchor 5 accepts the last token and is cut: no bonus token is on record."""
    total = walk_texts([_reading(SIX)], WalkRule(temperature=0, draft_length=3))
    assert (total.rounds, total.emitted, total.cut_rounds, total.cut_emitted) == (2, 5, 1, 1)
    assert total.accepted_length == 2.5 and total.accepted_length_with_cut == 2.0
    np.testing.assert_array_equal(total.reached, [2, 2, 1])
    np.testing.assert_allclose(total.conditional_acceptance, [1.0, 0.5, 0.0])


def test_every_token_behind_the_first_is_emitted_once():
    """Whatever is accepted, the rounds of a text emit its tokens: fewer of them where more is accepted."""
    rng = np.random.default_rng(1)
    texts = [_reading(rng.random((40, 7)) < 0.7, row=row) for row in range(5)]
    for length in range(1, 8):
        total = walk_texts(texts, WalkRule(temperature=0, draft_length=length))
        assert total.emitted + total.cut_emitted == 5 * 40
        assert total.rounds + total.accepted.sum() == total.emitted


def test_rounds_can_be_limited_to_the_first_tokens_and_to_a_context():
    def rounds(**limits) -> int:
        total = walk_texts([_reading(SIX)], WalkRule(temperature=0, draft_length=3, **limits))
        return total.rounds + total.cut_rounds

    assert rounds(first_tokens=2) == 1 and rounds(first_tokens=3) == 2 and rounds(first_tokens=99) == 3
    # Anchor 2 stands at position 12: its three drafts and the bonus token end at position 16.
    assert rounds(context_limit=16) == 1 and rounds(context_limit=17) == 2


def test_sampled_walks_accept_with_the_given_probability_and_repeat_with_their_seed():
    accept = np.full((4000, 2), 0.3, np.float32)
    reading = _reading(np.zeros((4000, 2), bool), accept)
    total = walk_texts([reading], WalkRule(temperature=1, draft_length=2))
    # 2,600 rounds: three standard errors are 0.027.
    assert abs(total.conditional_acceptance[0] - 0.3) < 0.027
    assert total.rounds == walk_texts([reading], WalkRule(temperature=1, draft_length=2)).rounds
    others = {walk_texts([reading], WalkRule(temperature=1, draft_length=2, seed=seed)).rounds for seed in range(5)}
    assert len(others) > 1


def test_totals_add_up_over_texts_and_bad_rules_are_refused():
    one, two = _reading(SIX), _reading(SIX[2:], row=1)
    rule = WalkRule(temperature=0, draft_length=2)
    both, parts = walk_texts([one, two], rule), walk_texts([one], rule) + walk_texts([two], rule)
    assert both.rounds == parts.rounds and both.emitted == parts.emitted
    np.testing.assert_array_equal(both.accepted, parts.accepted)
    with pytest.raises(ValueError, match="temperature is 2"):
        WalkRule(temperature=2, draft_length=1)
    with pytest.raises(ValueError, match="draft_length is 0"):
        WalkRule(temperature=0, draft_length=0)
    with pytest.raises(ValueError, match="draft_length is 4; this drafter gives at most 3"):
        walk_texts([one], WalkRule(temperature=0, draft_length=4))
    with pytest.raises(ValueError, match="readings is empty"):
        walk_texts([], rule)


def test_confidence_rounds_hold_prefix_labels_of_rounds_with_a_whole_block():
    """Of the rounds at anchors 0, 2 and 5 the last has one token behind it, and no label for slots 2 and 3; each knows its text."""
    confidence = np.arange(18, dtype=np.float32).reshape(6, 3)
    rule = WalkRule(temperature=0, draft_length=3)
    logits, labels, rows = confidence_rounds([_reading(SIX, confidence=confidence, row=row) for row in (4, 2)], rule)
    np.testing.assert_array_equal(logits, confidence[[0, 2, 0, 2]])
    np.testing.assert_array_equal(labels, [[1, 0, 0], [1, 1, 0]] * 2)
    np.testing.assert_array_equal(rows, [4, 4, 2, 2])
    with pytest.raises(ValueError, match="confidence_logits is None"):
        confidence_rounds([_reading(SIX)], rule)


@pytest.fixture(scope="module")
def tiny(golden):
    """The golden target and drafter, and the reference's eight greedy answers as one batch."""
    target, target_params = load_target(golden / "qwen3_target")
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", target.spec)
    metrics = json.loads((golden / "dspark_qwen3_vanilla" / "eval_metrics.json").read_text())
    ids = np.asarray([response["output_ids"] for response in metrics["per_response"]], np.int32)
    mask = np.broadcast_to(np.arange(ids.shape[1]) >= len(metrics["prompts"][0]), ids.shape)
    batch = TokenBatch(ids, mask, np.arange(len(ids)))
    return target, target_params, loaded, batch, metrics


@pytest.fixture(scope="module")
def readings(tiny):
    """The drafter at every position of the eight answers."""
    target, target_params, loaded, batch, _ = tiny
    return list(read_texts(target, loaded.drafter, target_params, loaded.params, [batch]))


def test_walks_along_greedy_answers_are_the_references_decoding_rounds(tiny, readings):
    """Golden `eval_metrics`: accepted drafts of every round of all eight answers.

    The reference's last round may go beyond the recorded answer, and starts even where nothing is left of it.
    """
    metrics = tiny[-1]
    assert [reading.row for reading in readings] == list(range(8))
    for reading, response in zip(readings, metrics["per_response"], strict=True):
        anchors, accepted = walk_rounds(reading.match[0], len(reading.match[0]))
        expected = response["accepted_draft_lengths"]
        left = len(reading.match[0]) - anchors[-1]
        assert accepted[:-1].tolist() == expected[: len(accepted) - 1]
        assert accepted[-1] == min(expected[len(accepted) - 1], left)
        assert len(expected) - len(accepted) == (accepted[-1] == left - 1)


def test_the_estimate_at_all_anchors_is_the_mean_of_the_walks_blocks(tiny, readings):
    """On greedy answers the recorded tokens are the target's choice, so that both count the same agreements."""
    target, target_params, loaded, batch, _ = tiny
    blocks = np.concatenate([reading.match[0] for reading in readings])
    estimate = estimate_at_anchors(target, loaded.drafter, target_params, loaded.params, [batch], num_anchors=29)
    assert estimate.blocks == len(blocks)
    assert estimate.accepted_length_greedy == pytest.approx(1 + np.cumprod(blocks, axis=1).sum(axis=1).mean(), abs=1e-5)


def test_acceptance_is_the_ratio_of_draft_and_target_probability_of_the_recorded_token(tiny, readings):
    """Two blocks of the first answer, from the full logits of both models, slot by slot."""
    target, target_params, loaded, batch, _ = tiny
    ids, mask = jnp.asarray(batch.ids[:1]), jnp.asarray(batch.loss_mask[:1])
    anchors, keep = jnp.asarray([[6, 20]], jnp.int32), jnp.ones((1, 2), bool)

    @jax.jit
    def log_probs(target_params, params):
        texts = read_batch(target, target_params, loaded.drafter.taps, ids, mask, anchors, keep)
        head = target.head(target_params)
        sites = loaded.drafter.prediction_sites(params, head, texts)
        logits = loaded.drafter.site_logits(params, head, sites.hidden, sites.latent)
        return jax.nn.log_softmax(head.logits(texts.last_hidden[0])), jax.nn.log_softmax(logits).reshape(2, 5, -1)

    log_p, log_q = (np.asarray(each) for each in log_probs(target_params, loaded.params))
    for place, anchor in enumerate((6, 20)):
        for slot in range(5):
            token = batch.ids[0, anchor + 1 + slot]
            expected = min(1.0, np.exp(log_q[place, slot, token] - log_p[anchor + slot, token]))
            assert readings[0].accept[0, anchor - 6, slot] == pytest.approx(expected, abs=1e-5)
            assert readings[0].match[0, anchor - 6, slot] == (log_q[place, slot].argmax() == token)


def test_readings_do_not_depend_on_the_chunking_and_end_with_the_answer(tiny, readings):
    target, target_params, loaded, batch, _ = tiny
    for small, whole in zip(
        read_texts(target, loaded.drafter, target_params, loaded.params, [batch], sites_at_once=1), readings, strict=True
    ):
        np.testing.assert_allclose(small.accept, whole.accept, atol=1e-5)
        np.testing.assert_array_equal(small.match, whole.match)
        np.testing.assert_allclose(np.asarray(small.confidence_logits), np.asarray(whole.confidence_logits), atol=1e-4)
        assert not whole.match[0, -1, 1:].any() and not whole.accept[0, -1, 1:].any()


def test_a_cut_vocabulary_never_matches_outside_and_equals_the_cut_drafter(tiny):
    """[A7] Labels outside the draft vocabulary: no match and q = 0. Cutting the logits is cutting W2 and the head."""
    target, target_params, loaded, batch, _ = tiny
    ids = jnp.arange(0, 97, 2, dtype=jnp.int32)
    of_whole = list(read_texts(target, loaded.drafter, target_params, loaded.params, [batch], cuts=[ids]))
    drafter, params = cut_drafter(loaded, ids)
    assert isinstance(drafter, DSparkDrafter) and drafter.config.draft_vocab_size == len(ids)
    of_cut = list(read_texts(target, drafter, target_params, params, [batch], draft_ids=ids))
    for whole, cut, text in zip(of_whole, of_cut, batch.ids, strict=True):
        np.testing.assert_array_equal(whole.match[1], cut.match[0])
        np.testing.assert_allclose(whole.accept[1], cut.accept[0], atol=1e-5)
        labels = text[np.minimum(whole.answer_start + 1 + np.add.outer(np.arange(23), np.arange(5)), len(text) - 1)]
        assert not cut.match[0][labels % 2 == 1].any() and not cut.accept[0][labels % 2 == 1].any()
    with pytest.raises(ValueError, match="cuts are given with draft_ids"):
        next(read_texts(target, drafter, target_params, params, [batch], draft_ids=ids, cuts=[ids]))


def test_answers_must_be_one_run_of_tokens(tiny):
    target, target_params, loaded, batch, _ = tiny
    holes = batch.loss_mask.copy()
    holes[2, 15] = False
    with pytest.raises(ValueError, match="text 2 of a batch marks 23 tokens"):
        next(read_texts(target, loaded.drafter, target_params, loaded.params, [TokenBatch(batch.ids, holes, batch.rows)]))
    with pytest.raises(ValueError, match="batches is empty"):
        estimate_at_anchors(target, loaded.drafter, target_params, loaded.params, [], num_anchors=4)


@pytest.mark.slow
@needs_smollm2
def test_the_given_drafter_walks_as_its_card_says(shared):
    """Two held-out answers per domain at temperature 1, drafts of 1 and 2; the card's means are over 128 of them."""
    folder = shared / "smollm2"
    card = json.loads((folder / "smollm2_dspark_2l_r64" / "training_curves.json").read_text())["a"]["eval"]
    sequences = load_token_sequences(folder / "smollm2_onpolicy_0.npz")
    target, target_params = load_target("smollm2")
    loaded = load_drafter(folder / "smollm2_dspark_2l_r64", target.spec)
    for domain in range(len(DOMAINS)):
        batches = one_by_one(sequences, cell_rows(sequences, domain, 1)[:2])
        readings = list(read_texts(target, loaded.drafter, target_params, loaded.params, batches))
        for length, tolerance in ((1, 0.1), (2, 0.2)):
            total = walk_texts(readings, WalkRule(temperature=1, draft_length=length, context_limit=512))
            assert total.accepted_length_with_cut == pytest.approx(card[f"{domain}_T1"][f"G{length}"]["tau"], abs=tolerance)
