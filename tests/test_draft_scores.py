"""Scores that stand in for a confidence head: what they are, that they do not look ahead, and that rounds scheduled by them are exact."""

import dataclasses
import functools
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.anchors import read_batch
from dspark_jax.batches import TokenBatch
from dspark_jax.calibrate import RawSurvival
from dspark_jax.chain_configs import eagle3_config, eagle3_json, mtp_config, mtp_json
from dspark_jax.draft_configs import block_drafter, block_json
from dspark_jax.drafters.dflash import DFlashConfig, DFlashDrafter
from dspark_jax.drafters.draft_scores import CONFIDENCE_SCORES, LIMIT, score_logits
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from dspark_jax.drafters.mtp import MTPConfig, MTPDrafter
from dspark_jax.evaluate import WalkRule, confidence_rounds, read_texts
from dspark_jax.exactness import DraftLaw, Text, law_of_logits, law_of_rounds
from dspark_jax.schedule import (
    CapacityTopK,
    ConfidenceThreshold,
    ForecastStop,
    PrefixSchedule,
    StepCurve,
    SurvivalThreshold,
    admit_top_k,
)
from dspark_jax.weights import LoadedDrafter
from tests.linear_drafter import LinearDrafter
from tests.test_drafter_contract import DRAFTERS
from tests.tiny_models import random_params
from tests.toy_rounds import BLOCK, CHAIN, TARGET, VOCAB, propose_behind, written_texts

both_scores = pytest.mark.parametrize("score", CONFIDENCE_SCORES)
SCORED = {
    "dflash_largest": DFlashDrafter(DFlashConfig(**BLOCK, confidence_score="largest")),
    "dspark_entropy": DSparkDrafter(DSparkConfig(**BLOCK, markov_rank=4, confidence_head=False, confidence_score="entropy")),
    "eagle3_largest": Eagle3Drafter(Eagle3Config(**CHAIN, taps=(0,), confidence_score="largest")),
    "mtp_entropy": MTPDrafter(MTPConfig(**CHAIN, confidence_score="entropy")),
}

score_of_rows = jax.jit(score_logits, static_argnums=1)


# --- the numbers


def literal(logits, score) -> np.ndarray:
    """From the definition, in float64, without a care for p near 1."""
    p = np.exp(logits - logits.max(-1, keepdims=True))
    p = p / p.sum(-1, keepdims=True)
    chance = p.max(-1) if score == "largest" else np.exp((p * np.log(np.where(p > 0, p, 1.0))).sum(-1))
    return np.log(chance) - np.log1p(-chance)


@both_scores
def test_a_score_is_the_logit_of_what_it_says(score):
    rng = np.random.default_rng(0)
    for vocab_size, spread in ((3, 1.0), (2000, 4.0)):
        logits = spread * rng.normal(size=(8, vocab_size)).astype(np.float32)
        logits[1, :2] = logits[1].max() + 1.0
        logits[2, 1:] = -np.inf
        logits[2, 1] = logits[2, 0] - 0.5
        np.testing.assert_allclose(score_of_rows(logits, score), literal(logits.astype(np.float64), score), rtol=2e-5, atol=2e-5)


@both_scores
def test_certain_uniform_and_broken_logits_have_finite_scores(score):
    inf, nan = np.inf, np.nan
    rows = {
        "one_hot": [0.0, -inf, -inf, -inf],
        "huge": [3e38, 0.0, -3e38, -inf],
        "infinite": [inf, 0.0, 1.0, -inf],
        "uniform": [7.0, 7.0, 7.0, 7.0],
        "huge_uniform": [-3e38, -3e38, -3e38, -3e38],
        "two_of_four": [5.0, -inf, 5.0, nan],
        "lower": [1.0, nan, 0.0, -inf],
        "nothing": [-inf, -inf, -inf, -inf],
        "broken": [nan, nan, nan, nan],
    }
    found = dict(zip(rows, np.asarray(score_of_rows(np.asarray(list(rows.values()), np.float32), score)).tolist(), strict=True))
    expected = dict.fromkeys(("one_hot", "huge", "infinite"), LIMIT) | dict.fromkeys(("nothing", "broken"), -LIMIT)
    expected |= {"uniform": -np.log(3.0), "huge_uniform": -np.log(3.0), "two_of_four": 0.0}
    expected["lower"] = float(literal(np.array([1.0, 0.0]), score))
    assert found == pytest.approx(expected, abs=1e-6)
    assert float(score_of_rows(np.zeros(1, np.float32), score)) == LIMIT


@both_scores
@pytest.mark.parametrize("gap", [12.0, 20.0, 25.0])
def test_a_score_near_certainty_keeps_its_digits(score, gap):
    """1 - p is 1e-5 to 1e-11 here, at and below what float32 can say of p itself."""
    logits = np.array([gap, 0.0, 0.0], np.float32)
    others = 2.0 * np.exp(-gap)
    expected = -np.log(others if score == "largest" else np.expm1(np.log1p(others) + gap * others / (1 + others)))
    assert float(score_of_rows(logits, score)) == pytest.approx(expected, rel=1e-5)


# --- what drafters report


@pytest.fixture(scope="module")
def target_params():
    return jax.jit(TARGET.init)(jax.random.key(1))


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[] if name == "mtp_entropy" else pytest.mark.slow) for name in SCORED])
def case(request):
    """A drafter with a score, and random parameters."""
    return SCORED[request.param], random_params(SCORED[request.param], 2)


@dataclass(frozen=True)
class _ScoredLinear(LinearDrafter):
    """Next to no network, with a score asked for."""

    config: Any = dataclasses.field(default_factory=lambda: SimpleNamespace(confidence_score="largest"), hash=False)


def test_a_reading_has_the_score_of_the_logits_at_its_sites(target_params):
    """Of the drafter's own vocabulary, where a smaller one is read along."""
    drafter: Any = _ScoredLinear(VOCAB, VOCAB, VOCAB)
    params = jax.jit(drafter.init)(jax.random.key(3))
    ids, mask = written_texts(target_params, 1, 12, 0), jnp.arange(12)[None] >= 4
    cut = jnp.arange(0, VOCAB, 2, dtype=jnp.int32)
    texts = [TokenBatch(np.asarray(ids), np.asarray(mask), np.zeros(1))]
    (reading,) = read_texts(TARGET, drafter, target_params, params, texts, cuts=[cut])
    anchors = jnp.arange(4, 11, dtype=jnp.int32)[None]

    @jax.jit
    def at_sites(ids, mask):
        batch = read_batch(TARGET, target_params, drafter.taps, ids, mask, anchors, anchors > 0)
        head = TARGET.head(target_params)
        sites = drafter.prediction_sites(params, head, batch)
        return score_logits(drafter.site_logits(params, head, sites.hidden, sites.latent), "largest")

    assert reading.confidence_logits is not None and reading.match.shape[0] == 2
    np.testing.assert_allclose(reading.confidence_logits, np.asarray(at_sites(ids, mask)).reshape(7, 3), atol=1e-5)


@pytest.mark.slow
def test_a_proposals_score_is_the_score_of_a_reading_of_what_was_proposed(case, target_params):
    """[C4] Behind anchors of several texts, drafts included: calibrators are fitted on what decoding will see."""
    drafter, params = case
    rows, size = 12, drafter.block_size
    ids, anchors = written_texts(target_params, rows, 14, 0), np.arange(1, 13, dtype=np.int32)
    block = propose_behind(drafter, params, target_params, ids, jnp.asarray(anchors), jnp.ones(rows))
    texts = np.zeros((rows, 14 + size), np.int32)
    mask = np.zeros(texts.shape, bool)
    for row, anchor in enumerate(anchors):
        texts[row, : anchor + 1] = np.asarray(ids)[row, : anchor + 1]
        texts[row, anchor + 1 : anchor + 1 + size] = np.asarray(block.ids)[row]
        mask[row, anchor : anchor + 1 + size] = True
    readings = list(read_texts(TARGET, drafter, target_params, params, [TokenBatch(texts, mask, np.arange(rows))]))
    read = np.stack([reading.confidence_logits[0] for reading in readings if reading.confidence_logits is not None])
    np.testing.assert_allclose(np.asarray(block.confidence_logits), read, atol=1e-4, rtol=1e-4)
    assert (read.std(axis=0) > 0.1).all()
    logits, labels, *_ = confidence_rounds(readings, WalkRule(temperature=1, draft_length=size))
    np.testing.assert_array_equal(logits, read)
    assert labels.shape == logits.shape


def test_a_score_does_not_move_with_the_token_it_is_asked_about(case, target_params):
    """[A6] One text, many draws: score k is one number for all rows that share the drafts before k, whatever they drew at k."""
    drafter, params = case
    rows = 12
    ids = jnp.broadcast_to(written_texts(target_params, rows, 14, 0)[:1], (rows, 14))

    def propose(temperature):
        anchors = jnp.full((rows,), 9, jnp.int32)
        return propose_behind(drafter, params, target_params, ids, anchors, jnp.full((rows,), temperature, jnp.float32))

    block = propose(2.0)
    drafts, scores = np.asarray(block.ids), np.asarray(block.confidence_logits)
    asked = []
    for k in range(2):
        for before in {tuple(row[:k]) for row in drafts.tolist()}:
            same = (drafts[:, :k] == np.asarray(before, np.int32)).all(axis=1)
            asked.append(len(set(drafts[same, k].tolist())))
            np.testing.assert_allclose(scores[same, k], scores[same, k][0], atol=1e-5)
    assert asked[0] > 1 and max(asked[1:]) > 1, "the tokens asked about differ"
    # Nor with how it will be drawn: the first score is that of the same q_1.
    for temperature in (0.0, 0.5):
        np.testing.assert_allclose(np.asarray(propose(temperature).confidence_logits)[:, 0], scores[0, 0], atol=1e-5)


# --- the law


def _random(seed: int, *key) -> np.random.Generator:
    """Numbers that depend on the text alone, so that a law is a function of its prefix."""
    return np.random.default_rng([seed, *(1 + token for part in key for token in (*part, 99))])


@functools.cache
def _target(vocab_size: int, text: Text) -> np.ndarray:
    return law_of_logits(1.5 * _random(1, text).normal(size=vocab_size))


@functools.cache
def _draft_logits(vocab_size: int, text: Text, drafts: Text) -> np.ndarray:
    return 1.5 * _random(2, text, drafts).normal(size=vocab_size)


@functools.cache
def _chance(vocab_size: int, score: Any, text: Text, drafts: Text) -> float:
    logits = _draft_logits(vocab_size, text, drafts).astype(np.float32)
    return float(1 / (1 + np.exp(-np.asarray(score_of_rows(logits, score), np.float64))))


def _drafter(vocab_size: int, block_size: int, score: Any, temperature: float = 1.0) -> DraftLaw:
    """Drafts drawn at the sampler's temperature; confidence from q_k at temperature 1."""
    return DraftLaw(
        block_size,
        lambda text, drafts: law_of_logits(_draft_logits(vocab_size, text, drafts), temperature),
        lambda text, drafts, k: _chance(vocab_size, score, text, drafts[:k]),
    )


@dataclass(frozen=True)
class _TopK:
    """Top-K of the current round; the capacity comes from earlier rounds, and is given."""

    capacity: int

    def lengths(self, survival, active, context, request_id):
        return admit_top_k(survival, active, request_id, self.capacity)


CURVE = StepCurve(tokens=(1, 2, 4, 6), seconds_per_step=(1.0, 1.6, 2.1, 3.0))
POLICIES = {
    "threshold": ConfidenceThreshold(0.7),
    "survival": SurvivalThreshold(0.5),
    "algorithm_1": PrefixSchedule(CURVE),
    "forecast": ForecastStop(CURVE, (0.6, 0.6)),
    "top_2": _TopK(3),
}


@both_scores
@pytest.mark.parametrize("name", POLICIES)
def test_two_requests_scheduled_by_a_score_have_the_targets_joint_law(name, score):
    """[A6] Two rounds of two requests, and the policy does act on the score."""
    policy = POLICIES[name]
    report = law_of_rounds(functools.partial(_target, 2), _drafter(2, 2, score), policy, num_rounds=2, prompts=((0,), (1,)))
    assert report.law.shape == (2,) * 12 and abs(report.law.sum() - 1) < 1e-6
    assert report.deviation < 1e-6
    chances = [[_chance(2, score, text, drafts) for drafts in ((), (0,))] for text in ((0,), (1,), (0, 1), (1, 0), (0, 0), (1, 1))]
    survival = jnp.asarray(np.cumprod(chances, axis=1), jnp.float32)
    rows = jnp.arange(2, dtype=jnp.int32)
    choose = jax.jit(jax.vmap(policy.lengths, in_axes=(0, None, None, None)))
    assert len(set(np.asarray(choose(survival.reshape(3, 2, 2), jnp.ones(2, bool), rows + 1, rows)).ravel().tolist())) > 1


@both_scores
@pytest.mark.parametrize("temperature", [0.0, 0.6, 1.0])
def test_the_samplers_temperature_changes_the_drafts_and_not_the_law(temperature, score):
    """[A3] [A5] Drafts from a sharper q than the score reads, and argmax drafts, over a vocabulary of three."""
    report = law_of_rounds(functools.partial(_target, 3), _drafter(3, 2, score, temperature), ConfidenceThreshold(0.6))
    assert report.deviation < 1e-6


@both_scores
def test_capacity_from_scores_two_rounds_old_is_lossless(score):
    """[F3] The state, in which scores of past rounds are kept, is enumerated along."""
    policy = CapacityTopK(StepCurve(tokens=(1, 2, 3), seconds_per_step=(1.0, 1.6, 2.2)), constants=(0.6, 0.2))
    report = law_of_rounds(functools.partial(_target, 2), _drafter(2, 2, score), policy, 3, policy_state=policy.init_state(1, 2))
    assert report.deviation < 1e-6


@pytest.mark.parametrize("name", ["threshold", "survival"])
def test_the_probability_of_the_drawn_token_is_no_score(name):
    """[A6] It would be the natural mistake, and the checker has to see it: admitting x_k by q_k(x_k) looks at x_k."""

    def probs(text: Text, drafts: Text) -> np.ndarray:
        return law_of_logits(_draft_logits(2, text, drafts))

    looks = DraftLaw(2, probs, lambda text, drafts, k: float(probs(text, drafts[:k])[drafts[k]]))
    report = law_of_rounds(functools.partial(_target, 2), looks, POLICIES[name], prompts=((0,), (1,)))
    assert report.deviation > 1e-3 and report.total_variation > 0.02


# --- configs


@pytest.mark.parametrize("name", ["dspark_without_confidence", "dflash", "eagle3", "mtp"])
def test_a_score_is_an_option_of_every_drafter_without_a_head(name):
    """It goes through `config.json`, and gives a drafter without calibration its own survival in place of constants."""
    plain = DRAFTERS[name]
    written = {
        "dspark_without_confidence": lambda drafter: block_drafter(block_json(drafter, {}), "file"),
        "dflash": lambda drafter: block_drafter(block_json(drafter, {}), "file"),
        "eagle3": lambda drafter: type(drafter)(eagle3_config(eagle3_json(drafter.config), "file")),
        "mtp": lambda drafter: type(drafter)(mtp_config(mtp_json(drafter.config), "file")),
    }[name]
    for score in CONFIDENCE_SCORES:
        scored = type(plain)(dataclasses.replace(plain.config, confidence_score=score))
        again = written(scored)
        assert again.config.confidence_score == score and written(plain).config.confidence_score is None
        assert isinstance(LoadedDrafter(again, {}, None, None).survival_model(), RawSurvival)
        assert not isinstance(LoadedDrafter(plain, {}, None, None).survival_model(), RawSurvival)
    with pytest.raises(ValueError, match="confidence_score is 'drawn'; allowed: largest, entropy, or None"):
        dataclasses.replace(plain.config, confidence_score=cast(Any, "drawn"))


@pytest.mark.parametrize("name", ["dspark_vanilla", "mtp_confidence_head"])
def test_a_trained_head_and_a_score_exclude_each_other(name):
    with pytest.raises(ValueError, match="confidence_score is 'entropy' and confidence_head is True"):
        dataclasses.replace(DRAFTERS[name].config, confidence_score="entropy")


def test_a_chains_confidence_head_goes_through_its_config():
    for config, again in (
        (DRAFTERS["mtp_confidence_head"].config, lambda config: mtp_config(mtp_json(config), "file")),
        (DRAFTERS["eagle3"].with_confidence().config, lambda config: eagle3_config(eagle3_json(config), "file")),
    ):
        assert config.confidence_head and again(config) == config
