"""Fitting survival models, scoring them on other rounds, and choosing one."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_jax.calibrate import ConstantSurvival, RawSurvival
from dspark_jax.calibration_choice import choose_calibrator
from dspark_jax.calibration_fit import fit_calibrators, fit_constant, fit_isotonic
from dspark_jax.calibration_metrics import METRICS, auc, bootstrap, brier, ece, reliability, score
from dspark_jax.protocols import DraftBlock

BLOCK = 3
TEXTS = jnp.asarray(np.arange(3000) // 20, jnp.int32)


def rounds_of(rng, num_rounds, distort):
    """Confidence logits and prefix labels; accepted with the chance of the undistorted logit."""
    logits = rng.normal(0.8, 1.2, (num_rounds, BLOCK)).astype(np.float32)
    accepted = rng.random(logits.shape) < 1 / (1 + np.exp(-logits))
    return jnp.asarray(distort(logits), jnp.float32), jnp.asarray(np.cumprod(accepted, axis=1), jnp.int32)


def survival_of(model, logits):
    zeros = jnp.zeros(logits.shape, jnp.float32)
    return model.survival(DraftBlock(zeros.astype(jnp.int32), zeros, zeros, zeros, logits, None), jnp.zeros(logits.shape[0]))


@pytest.fixture(scope="module")
def overconfident():
    """An overconfident head: fitted on one half, scored on the other."""
    logits, labels = rounds_of(np.random.default_rng(0), 6000, lambda c: 3 * c)
    models = fit_calibrators(logits[:3000], labels[:3000])
    return models, logits[3000:], labels[3000:], choose_calibrator(models, logits[3000:], labels[3000:], 0.0, TEXTS, draws=100)


def test_all_models_are_reported_with_intervals_and_the_lowest_brier_score_wins(overconfident):
    """[F5] ECE, Brier and AUC per position of raw, constant, temperature-scaled and isotonic survival, on held-out rounds."""
    models, logits, labels, choice = overconfident
    assert set(choice.scores) == {"raw", "constant", "temperature_scaled", "isotonic"} and choice.rounds == 3000
    for name, scores in choice.scores.items():
        predictions = survival_of(models[name], logits)
        for metric in (ece, brier, auc):
            interval = scores.metrics[metric.__name__]
            expected = [float(metric(predictions[:, k], labels[:, k])) for k in range(BLOCK)]
            np.testing.assert_allclose(interval.value, expected, rtol=1e-5, atol=1e-6)
            assert np.all(interval.low <= interval.high) and np.all(np.isfinite(interval.low))
            if metric is not ece:
                assert np.all(interval.low <= interval.value) and np.all(interval.value <= interval.high)
    briers = {name: float(scores.mean_brier.value[0]) for name, scores in choice.scores.items()}
    assert choice.name == min(briers, key=lambda name: briers[name]) and choice.model is models[choice.name]
    assert choice.name in ("temperature_scaled", "isotonic") and choice.scores[choice.name].brier_over_constant.high[0] < 0
    assert np.mean(choice.scores["temperature_scaled"].metrics["ece"].value) < 0.5 * np.mean(choice.scores["raw"].metrics["ece"].value)
    assert np.all(choice.scores["constant"].metrics["auc"].value == 0.5)
    report = json.loads(json.dumps(choice.report(), allow_nan=False))
    assert report["chosen"] == choice.name and len(report["models"]["isotonic"]["reliability"]["observed"]) == BLOCK


def test_confidence_that_says_nothing_loses_to_the_constant_and_is_reported():
    """[F5] Noise for confidence: raw is worse than the constant beyond its interval, and the report says so."""
    rng = np.random.default_rng(1)
    logits, labels = rounds_of(rng, 6000, lambda c: rng.normal(0.0, 3.0, c.shape))
    models = fit_calibrators(logits[:3000], labels[:3000])
    choice = choose_calibrator(models, logits[3000:], labels[3000:], 0.0, TEXTS, draws=100)
    assert "raw" in choice.worse_than_constant and choice.scores["raw"].brier_over_constant.low[0] > 0
    assert choice.report()["worse_than_constant"] == list(choice.worse_than_constant)
    alone = {"raw": models["raw"], "constant": models["constant"], "again": models["raw"], "and again": models["raw"]}
    only = choose_calibrator(alone, logits[3000:], labels[3000:], 0.0, TEXTS, draws=100)
    assert only.name == "constant" and only.model == models["constant"] and only.worse_than_constant == ("raw", "again", "and again")


def test_isotonic_regression_undoes_any_rising_distortion():
    """Chances squared by the head: survival is within 0.03 of the truth on average, and the raw one is not."""
    rng = np.random.default_rng(2)
    squared = lambda c: -2 * np.log1p(np.exp(-c)) - np.log1p(-1 / (1 + np.exp(-c)) ** 2)  # noqa: E731
    logits, labels = rounds_of(rng, 8000, squared)
    chance = np.sqrt(np.asarray(jax.nn.sigmoid(logits), np.float64))
    truth = np.cumprod(chance, axis=1)
    isotonic = np.abs(np.asarray(survival_of(fit_isotonic(logits, labels), logits)) - truth).mean()
    assert isotonic < 0.03 < np.abs(np.asarray(survival_of(RawSurvival(), logits)) - truth).mean()


@settings(max_examples=20)
@given(st.lists(st.tuples(st.sampled_from([-200.0, -1.0, 0.0, 1.0, 200.0, float("nan")]), st.integers(0, 1)), min_size=6, max_size=6))
def test_isotonic_regression_fits_ties_and_certainties(rounds):
    logits = jnp.asarray([[c, c] for c, _ in rounds], jnp.float32)
    labels = jnp.asarray([[label, 0] for _, label in rounds], jnp.int32)
    survival = np.asarray(survival_of(fit_isotonic(logits, labels, max_knots=4), logits))
    assert np.all((survival >= 0) & (survival <= 1)) and np.all(survival[:, 1] == 0)


def test_constants_are_shares_of_prefixes():
    labels = jnp.asarray([[1, 1, 0], [1, 0, 0], [0, 0, 0], [1, 1, 1]], jnp.int32)
    assert fit_constant(labels) == ConstantSurvival((0.75, 0.5, 0.25))


def test_a_bootstrap_of_one_group_scores_the_data(overconfident):
    """Every draw is the data then: ECE, Brier and AUC within 1e-4."""
    models, logits, labels, _ = overconfident
    predictions = jnp.stack([survival_of(model, logits) for model in models.values()])
    draws = bootstrap(predictions, labels, jnp.zeros(3000, jnp.int32), num_groups=1, draws=2, seed=0)
    expected = np.asarray(score(predictions, labels))
    np.testing.assert_allclose(np.asarray(draws), np.stack([expected] * 2, axis=-1), atol=1e-4)


def test_reliability_bins_add_up_to_the_calibration_error(overconfident):
    models, logits, labels, _ = overconfident
    survival = survival_of(models["raw"], logits)
    diagram = reliability(survival, labels)
    gaps = np.nan_to_num(np.asarray(diagram.rounds) * np.abs(np.asarray(diagram.predicted) - np.asarray(diagram.observed)))
    assert np.all(np.asarray(diagram.rounds).sum(axis=1) == len(logits))
    np.testing.assert_allclose(gaps.sum(axis=1) / len(logits), np.asarray(score(survival[None], labels))[0, 0], atol=1e-5)


def test_the_bootstrap_is_seeded_and_as_wide_as_the_spread_of_groups():
    """Standard error of a Brier score from 200 texts of 10 equal rounds: within 20 % of the formula; single rounds give a third of it."""
    rng = np.random.default_rng(3)
    by_text = rng.integers(0, 2, 200)
    labels = jnp.asarray(np.repeat(by_text, 10)[:, None], jnp.int32)
    predictions = jnp.full((1, 2000, 1), 0.8, jnp.float32)
    texts, alone = (jnp.asarray(np.arange(2000) // size, jnp.int32) for size in (10, 1))
    draws = bootstrap(predictions, labels, texts, num_groups=200, draws=300, seed=0)
    row = METRICS.index("brier")
    expected = np.std((0.8 - by_text) ** 2) / np.sqrt(200)
    spread = np.asarray(draws)[row].std()
    assert abs(spread / expected - 1) < 0.2
    narrow = np.asarray(bootstrap(predictions, labels, alone, num_groups=2000, draws=300, seed=0))[row].std()
    assert narrow < 0.45 * spread
    again = bootstrap(predictions, labels, texts, num_groups=200, draws=300, seed=0)
    other = bootstrap(predictions, labels, texts, num_groups=200, draws=300, seed=1)
    np.testing.assert_array_equal(draws, again)
    assert not np.array_equal(np.asarray(draws)[row], np.asarray(other)[row])


def test_a_figure_that_is_not_defined_is_none_in_the_report():
    """AUC where every draft was accepted."""
    models = {name: ConstantSurvival((0.9, 0.8, 0.7)) for name in ("constant", "a", "b", "c")}
    labels = jnp.ones((3000, BLOCK), jnp.int32)
    choice = choose_calibrator(models, jnp.zeros(labels.shape), labels, 0.0, TEXTS, draws=100)
    assert choice.report()["models"]["constant"]["auc"] == {"value": [None] * 3, "low": [None] * 3, "high": [None] * 3}


def test_bad_choices_are_refused():
    logits, labels = jnp.zeros((2, 1)), jnp.zeros((2, 1), jnp.int32)
    with pytest.raises(ValueError, match="'constant' must be among them"):
        choose_calibrator({"raw": RawSurvival()}, logits, labels, 0.0)
    with pytest.raises(ValueError, match="draws is 1"):
        choose_calibrator({"constant": ConstantSurvival((0.5,))}, logits, labels, 0.0, draws=1)
    with pytest.raises(ValueError, match="has 0 rounds"):
        choose_calibrator({"constant": ConstantSurvival((0.5,))}, logits[:0], labels[:0], 0.0)
    with pytest.raises(ValueError, match="has 0 rounds"):
        fit_isotonic(logits[:0], labels[:0])
    with pytest.raises(ValueError, match="max_knots is 0"):
        fit_isotonic(logits, labels, max_knots=0)
