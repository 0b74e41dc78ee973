"""Calibration: the golden temperatures and metrics, and models that survive being stored."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.calibrate import (
    ConstantSurvival,
    IsotonicSurvival,
    RawSurvival,
    SurvivalByTemperature,
    TemperatureScaled,
    survival_from_dict,
    survival_to_dict,
)
from dspark_jax.calibration_fit import fit_sequential_temperatures
from dspark_jax.calibration_metrics import auc, brier, ece
from dspark_jax.protocols import DraftBlock

MODELS = [
    RawSurvival(),
    ConstantSurvival((0.8, 0.5, 0.5)),
    TemperatureScaled((0.9, 1.5, 2.0)),
    IsotonicSurvival(((0.2, 0.6, 0.9), (0.3,), (0.1, 0.8)), ((0.1, 0.1, 0.7), (0.4,), (0.0, 1.0))),
    SurvivalByTemperature((0.0, 1.0), (TemperatureScaled((0.9, 1.5, 2.0)), ConstantSurvival((0.7, 0.4, 0.1)))),
]


def _block(confidence_logits) -> DraftBlock:
    zeros = jnp.zeros((2, 3))
    return DraftBlock(zeros.astype(jnp.int32), zeros, zeros, zeros, confidence_logits, None)


def test_sequential_temperature_scaling_finds_the_golden_temperatures(golden):
    """Golden `sts_calibration`: every temperature on its grid, the whole table of errors within 1e-5."""
    data = np.load(golden / "units" / "sts_calibration.npz")
    logits, labels = jnp.asarray(data["confidence_logits"]), jnp.asarray(data["prefix_labels"])
    temperatures, table = fit_sequential_temperatures(logits, labels, jnp.asarray(data["grid"], jnp.float32))
    np.testing.assert_allclose(np.asarray(temperatures), data["temperatures"], atol=1e-6)
    np.testing.assert_allclose(np.asarray(table), data["ece_table"], atol=1e-5)


@pytest.mark.parametrize("which", ["before", "after"])
def test_metrics_are_the_references(golden, which):
    """Golden `sts_calibration`: ECE, Brier and AUC per position, before and after scaling."""
    data = np.load(golden / "units" / "sts_calibration.npz")
    logits = data["confidence_logits"] if which == "before" else data["calibrated_logits"]
    predictions = jnp.cumprod(jax.nn.sigmoid(jnp.asarray(logits)), axis=1)
    labels = jnp.asarray(data["prefix_labels"])
    for metric, name in ((ece, "ece"), (brier, "brier"), (auc, "auc")):
        values = [float(metric(predictions[:, k], labels[:, k])) for k in range(predictions.shape[1])]
        # A prediction within rounding of a bin's edge may change bins.
        np.testing.assert_allclose(values, data[f"{name}_{which}"], atol=2e-5)


def test_scaling_beats_the_raw_confidence_on_the_golden_rounds(golden):
    """[F5] ECE per position of raw, calibrated and constant survival, fitted on one half and measured on the other."""
    data = np.load(golden / "units" / "sts_calibration.npz")
    logits, labels = jnp.asarray(data["confidence_logits"]), jnp.asarray(data["prefix_labels"])
    temperatures, _ = fit_sequential_temperatures(logits[:2000], labels[:2000], jnp.asarray(data["grid"], jnp.float32))
    raw = jnp.cumprod(jax.nn.sigmoid(logits[2000:]), axis=1)
    scaled = jnp.cumprod(jax.nn.sigmoid(logits[2000:] / temperatures), axis=1)
    constant = jnp.broadcast_to(labels[:2000].astype(jnp.float32).mean(0), raw.shape)
    held_out = labels[2000:]
    errors = {
        (name, metric.__name__): np.mean([float(metric(each[:, k], held_out[:, k])) for k in range(7)])
        for name, each in (("raw", raw), ("scaled", scaled), ("constant", constant))
        for metric in (ece, brier)
    }
    assert errors["scaled", "ece"] < 0.5 * errors["raw", "ece"]
    assert errors["scaled", "brier"] < min(errors["raw", "brier"], errors["constant", "brier"])


def test_auc_counts_ties_half_and_needs_both_classes():
    labels = jnp.array([0, 1, 0, 1], jnp.int32)
    assert float(auc(jnp.array([0.1, 0.9, 0.2, 0.8]), labels)) == 1.0
    assert float(auc(jnp.array([0.5, 0.5, 0.5, 0.5]), labels)) == 0.5
    assert np.isnan(float(auc(jnp.array([0.5, 0.5, 0.5, 0.5]), jnp.ones(4, jnp.int32))))


def test_certain_predictions_stay_inside_the_bins():
    predictions, labels = jnp.array([0.0, 1.0, 1.0]), jnp.array([0, 1, 1], jnp.int32)
    assert float(ece(predictions, labels)) < 1e-6 and float(brier(predictions, labels)) < 1e-6
    assert float(auc(predictions, labels)) == 1.0


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_survival_never_rises_and_nan_counts_as_zero(model):
    block = _block(jnp.array([[3.0, jnp.nan, 5.0], [-2.0, 40.0, 0.5]]))
    survival = np.asarray(model.survival(block, jnp.array([0.0, 0.9])))
    assert survival.shape == (2, 3) and np.all(np.isfinite(survival))
    assert np.all((survival >= 0) & (survival <= 1)) and np.all(np.diff(survival, axis=1) <= 0)


def test_each_row_uses_the_model_of_its_temperature():
    block = _block(jnp.array([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]))
    model = MODELS[-1]
    survival = np.asarray(model.survival(block, jnp.array([0.2, 0.8])))
    expected = np.cumprod(1 / (1 + np.exp(-np.array([1, 2, 3]) / np.array([0.9, 1.5, 2.0]))))
    np.testing.assert_allclose(survival, np.stack([expected, np.array([0.7, 0.4, 0.1])]), rtol=1e-6)


def _falling(numbers):
    return tuple(sorted(numbers, reverse=True))


CHANCE = st.floats(0, 1, width=32)
ANY_MODEL = st.one_of(
    st.just(RawSurvival()),
    st.lists(CHANCE, min_size=3, max_size=3).map(lambda numbers: ConstantSurvival(_falling(numbers))),
    st.tuples(*[st.floats(0.05, 20)] * 3).map(TemperatureScaled),
    st.tuples(*[st.lists(CHANCE, min_size=4, max_size=4, unique=True)] * 3, *[st.lists(CHANCE, min_size=4, max_size=4)] * 3).map(
        lambda drawn: IsotonicSurvival(tuple(tuple(sorted(k)) for k in drawn[:3]), tuple(tuple(sorted(v)) for v in drawn[3:]))
    ),
)
ANY_MODEL_BY_TEMPERATURE = st.one_of(ANY_MODEL, st.tuples(ANY_MODEL, ANY_MODEL).map(lambda pair: SurvivalByTemperature((0.0, 1.0), pair)))


@given(ANY_MODEL_BY_TEMPERATURE, st.lists(st.floats(width=32), min_size=6, max_size=6))
def test_no_model_rises_over_positions_or_gives_nan(model, logits):
    """[F5] Any parameters, any logits, infinite and NaN ones included; and every such model survives JSON."""
    block = _block(jnp.asarray(logits, jnp.float32).reshape(2, 3))
    survival = np.asarray(model.survival(block, jnp.array([0.0, 0.9])))
    assert np.all((survival >= 0) & (survival <= 1)) and np.all(np.diff(survival, axis=1) <= 0)
    assert survival_from_dict(json.loads(json.dumps(survival_to_dict(model)))) == model


def test_isotonic_survival_follows_its_lines_and_never_rises():
    block = _block(jnp.array([[0.0, 0.0, 40.0], [40.0, 40.0, jnp.nan]]))
    survival = np.asarray(MODELS[3].survival(block, jnp.zeros(2)))
    # Row 0: raw 0.5, 0.25, 0.25; the first function gives 0.1, and neither 0.4 nor 0.15/0.7 may lie above it.
    np.testing.assert_allclose(survival, [[0.1, 0.1, 0.1], [0.7, 0.4, 0.0]], rtol=1e-6)


@pytest.mark.parametrize("model", MODELS, ids=lambda model: type(model).__name__)
def test_models_survive_json(model):
    assert survival_from_dict(json.loads(json.dumps(survival_to_dict(model)))) == model


def test_continuation_is_the_conditional_of_the_constants():
    np.testing.assert_allclose(ConstantSurvival((0.8, 0.4, 0.0, 0.0)).continuation, (0.8, 0.5, 0.0, 0.0))


def test_bad_models_are_refused():
    with pytest.raises(ValueError, match="per_position is"):
        ConstantSurvival((0.5, 0.6))
    with pytest.raises(ValueError, match="temperatures is"):
        TemperatureScaled((1.0, 0.0))
    with pytest.raises(ValueError, match="at is"):
        SurvivalByTemperature((1.0, 0.0), (RawSurvival(), RawSurvival()))
    with pytest.raises(ValueError, match="models has 1"):
        SurvivalByTemperature((0.0, 1.0), (RawSurvival(),))
    with pytest.raises(ValueError, match="confidence_logits is None"):
        RawSurvival().survival(_block(None), jnp.zeros(2))
    with pytest.raises(ValueError, match="temperatures has 2 entries"):
        TemperatureScaled((1.0, 1.0)).survival(_block(jnp.zeros((2, 3))), jnp.zeros(2))
    with pytest.raises(ValueError, match=r"values has \[1\] entries"):
        IsotonicSurvival(((0.1, 0.2),), ((0.5,),))
    with pytest.raises(ValueError, match="knots is"):
        IsotonicSurvival(((0.2, 0.2),), ((0.5, 0.6),))
    with pytest.raises(ValueError, match="values is"):
        IsotonicSurvival(((0.1, 0.2),), ((0.5, 0.4),))
    with pytest.raises(ValueError, match="knots has 1 entries"):
        IsotonicSurvival(((0.1,),), ((0.5,),)).survival(_block(jnp.zeros((2, 3))), jnp.zeros(2))
    with pytest.raises(ValueError, match="kind is 'Platt'"):
        survival_from_dict({"kind": "Platt"})
    with pytest.raises(ValueError, match="stored with the fields"):
        survival_from_dict({"kind": "RawSurvival", "temperatures": [1.0]})
