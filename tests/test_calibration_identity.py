"""A survival model knows what it was fitted for, and is not used for something else unnoticed."""

import dataclasses
import json
import types
import warnings

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.calibrate import (
    RawSurvival,
    SurvivalByTemperature,
    TemperatureScaled,
    identity_from_dict,
    survival_from_dict,
    survival_to_dict,
)
from dspark_jax.calibration_identity import CalibratorIdentity, CalibratorWarning, check_calibrator, drafter_fingerprint
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.protocols import TargetSpec
from dspark_jax.sampling import Sampling
from dspark_jax.weights import load_drafter, save_drafter

IDENTITY = CalibratorIdentity("abc", (0.0, 1.0), top_k=40, top_p=0.9)
MODEL = SurvivalByTemperature((0.0, 1.0), (TemperatureScaled((0.9, 1.5)), RawSurvival()))


@pytest.mark.parametrize("model", [MODEL, TemperatureScaled((0.9, 1.5))], ids=lambda model: type(model).__name__)
def test_the_identity_is_stored_with_the_model_and_may_be_absent(model):
    stored = json.loads(json.dumps(survival_to_dict(model, IDENTITY)))
    assert survival_from_dict(stored) == model and identity_from_dict(stored) == IDENTITY
    older = json.loads(json.dumps(survival_to_dict(model)))
    assert survival_from_dict(older) == model and identity_from_dict(older) is None


def test_the_fitted_case_passes_in_silence():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        check_calibrator(IDENTITY, "abc", Sampling.make(2, [0.0, 1.0], [0, 40], [1.0, 0.9]))


def test_another_drafter_or_verifier_is_an_error():
    with pytest.raises(ValueError, match="drafter is xyz; allowed is the one .* fitted for, abc"):
        check_calibrator(IDENTITY, "xyz", Sampling.make(1))
    with pytest.raises(ValueError, match="verifier is 'block'; allowed is .* 'token'"):
        check_calibrator(IDENTITY, "abc", Sampling.make(1), "block")
    with pytest.raises(ValueError, match="verifier is 'tree'"):
        check_calibrator(IDENTITY, "abc", Sampling.make(1), "tree")


def test_another_temperature_or_filter_or_no_record_warns():
    with pytest.warns(CalibratorWarning, match=r"requests are drawn at \[0.7\]"):
        check_calibrator(IDENTITY, "abc", Sampling.make(2, [0.0, 0.7], 40, 0.9))
    with pytest.warns(CalibratorWarning, match="requests are drawn at top_k 0 and top_p 0.9"):
        check_calibrator(IDENTITY, "abc", Sampling.make(1, 1.0, 0, 0.9))
    with pytest.warns(CalibratorWarning, match="requests are drawn at top_k 40 and top_p 0.8"):
        check_calibrator(IDENTITY, "abc", Sampling.make(1, 1.0, 40, 0.8))
    with pytest.warns(CalibratorWarning, match="does not say"):
        check_calibrator(None, "abc", Sampling.make(1))


def test_the_fingerprint_is_that_of_the_stored_drafter_and_of_no_other(golden, tmp_path):
    """float32 parameters, saved as bfloat16 and read again: the same; another parameter, config, kind or draft vocabulary: another."""
    spec = TargetSpec(97, 32, 6, "Qwen3ForCausalLM")
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", spec)
    mark = drafter_fingerprint(loaded.drafter, loaded.params)
    save_drafter(tmp_path / "stored", loaded.drafter, loaded.params, config_json=loaded.config_json)
    again = load_drafter(tmp_path / "stored", spec)
    assert mark == drafter_fingerprint(again.drafter, again.params) and len(mark) == 64
    other_params = jax.tree.map(lambda leaf: leaf, loaded.params)
    other_params["fc"]["weight"] = other_params["fc"]["weight"].at[0, 0].add(0.5)
    other_config = DSparkDrafter(dataclasses.replace(loaded.drafter.config, block_size=4))
    others = {
        drafter_fingerprint(loaded.drafter, other_params),
        drafter_fingerprint(other_config, loaded.params),
        drafter_fingerprint(loaded.drafter, loaded.params, jnp.arange(5, dtype=jnp.int32)),
        drafter_fingerprint(loaded.drafter, loaded.params, jnp.arange(1, 6, dtype=jnp.int32)),
    }
    assert len(others | {mark}) == 5


def test_an_option_that_a_later_version_adds_changes_no_fingerprint():
    """At its default, that is; a config inside a config counts in the same way."""
    inner = dataclasses.make_dataclass("Inner", [("width", int), ("bias", bool, False)], frozen=True)
    later_inner = dataclasses.make_dataclass("Inner", [("width", int), ("bias", bool, False), ("scale", float, 1.0)], frozen=True)
    config = dataclasses.make_dataclass("Config", [("size", int), ("experts", object, None)], frozen=True)
    later = dataclasses.make_dataclass("Config", [("size", int), ("experts", object, None), ("score", object, None)], frozen=True)
    marks = [
        drafter_fingerprint(types.SimpleNamespace(config=each), {})  # pyright: ignore[reportArgumentType]
        for each in (
            *(config(3, inner(4)), later(3, later_inner(4))),
            *(later(3, later_inner(4), "entropy"), later(3, later_inner(4, scale=2.0)), later(4, later_inner(4)), config(3)),
        )
    ]
    assert marks[0] == marks[1] and len(set(marks)) == len(marks) - 1


def test_bad_identities_are_refused():
    for changed, match in (
        ({"drafter": ""}, "drafter is empty"),
        ({"temperatures": ()}, "temperatures is"),
        ({"temperatures": (float("nan"),)}, "temperatures is"),
        ({"top_k": -1}, "top_k is -1"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"verifier": "tree"}, "verifier is 'tree'"),
    ):
        with pytest.raises(ValueError, match=match):
            dataclasses.replace(IDENTITY, **changed)
    with pytest.raises(ValueError, match="fitted_for is stored with the fields"):
        CalibratorIdentity.from_dict({"drafter": "abc"})
