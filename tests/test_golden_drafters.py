"""Every block drafter of the reference: activations, losses, gradients, decoding traces and files, folder by folder."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from dspark_jax.calibrate import ConstantSurvival, RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, answers, step
from dspark_jax.drafters.dflash import DFlashDrafter
from dspark_jax.losses import DraftLossConfig, loss_metrics
from dspark_jax.prefill import start
from dspark_jax.schedule import ConfidenceThreshold
from dspark_jax.weights import export_for_reference, load_drafter, load_target
from tests.reference_checks import (
    ACTIVATIONS,
    assert_round,
    assert_same_gradients,
    assert_stochastic_trace,
    batch_of,
    check_metrics,
    evaluate,
)

TARGET_OF = {
    "dspark_qwen3_gated": "qwen3_target",
    "dspark_qwen3_rnn": "qwen3_target",
    "dspark_qwen3_conf_nomarkovfeat": "qwen3_target",
    "dflash_qwen3": "qwen3_target",
    "dspark_gemma4_vanilla": "gemma4_target",
    "dspark_gemma4_vproj_vanilla": "gemma4_target_vproj",
    "dflash_gemma4": "gemma4_target",
}


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden folder with the models in it."""

    name: str
    folder: Any
    target: Any
    target_params: Any
    loaded: Any

    def trace(self, name):
        """A recorded run."""
        return dict(np.load(self.folder / f"decode_{name}.npz"))


@pytest.fixture(scope="module", params=sorted(TARGET_OF))
def case(request, golden):
    target, target_params = load_target(golden / TARGET_OF[request.param])
    folder = golden / request.param
    return Case(request.param, folder, target, target_params, load_drafter(folder, target.spec))


@pytest.fixture(scope="module")
def trained(case):
    """What the losses say of the folder's training batch."""
    arrays = np.load(case.folder / "train.npz")
    ce, l1, confidence = (float(x) for x in arrays["alphas"])
    config = DraftLossConfig(ce, l1, confidence, chunk=7)
    head = case.target.head(case.target_params)
    return arrays, config, evaluate(case.loaded.drafter, case.loaded.params, head, head, batch_of(arrays), config)


def test_hidden_states_logits_and_confidence_are_the_references(case):
    """[D3] [D4] [D5] Golden `train`: post-norm hidden states, base, corrected and confidence logits at every site."""
    arrays = np.load(case.folder / "train.npz")
    drafter, params, head = case.loaded.drafter, case.loaded.params, case.target.head(case.target_params)

    @jax.jit
    def run(params, batch):
        sites = drafter.prediction_sites(params, head, batch)
        return sites, head.logits(sites.hidden), drafter.site_logits(params, head, sites.hidden, sites.latent)

    sites, base, corrected = run(params, batch_of(arrays))
    shape = arrays["target_ids"].shape
    np.testing.assert_allclose(np.asarray(sites.hidden).reshape(*shape, 32), arrays["draft_hidden"], **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(base).reshape(*shape, 97), arrays["base_logits"], **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(corrected).reshape(*shape, 97), arrays["draft_logits"], **ACTIVATIONS)
    np.testing.assert_array_equal(np.asarray(sites.anchor).reshape(shape), np.repeat(arrays["anchor_positions"][..., None], shape[2], 2))
    teacher = arrays["target_last_hidden_states"].reshape(-1, 32)[np.asarray(sites.teacher_index)]
    np.testing.assert_allclose(np.asarray(head.logits(teacher)).reshape(*shape, 97), arrays["aligned_target_logits"], **ACTIVATIONS)
    if "confidence_logits" in arrays:
        np.testing.assert_allclose(np.asarray(sites.confidence_logits).reshape(shape), arrays["confidence_logits"], **ACTIVATIONS)
    else:
        assert sites.confidence_logits is None and isinstance(drafter, DFlashDrafter)


def test_losses_metrics_and_all_gradients_are_the_references(case, trained):
    """Golden `train` and `train_metrics`."""
    arrays, config, (loss, terms, gradients) = trained
    np.testing.assert_allclose(loss, arrays["total_loss"], **ACTIVATIONS)
    norm = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradients)))
    np.testing.assert_allclose(norm, arrays["grad_norm"], rtol=1e-4)
    assert_same_gradients(gradients, arrays, "grad/")
    check_metrics(loss_metrics(terms, config), case.folder / "train_metrics.json", with_loss=True)


@dataclasses.dataclass(frozen=True)
class ByRequest:
    """Request 2 stops at a confidence threshold, the others verify whole blocks: one program for all traces."""

    threshold: float

    def lengths(self, survival, active, context, request_id):
        whole = jnp.where(active, survival.shape[1], 0)
        cautious = ConfidenceThreshold(self.threshold).lengths(survival, active, context, request_id)
        return jnp.where(request_id == 2, cautious, whole)


@pytest.mark.parametrize("backend", ["auto", *(pytest.param(name, marks=pytest.mark.slow) for name in ("interpret", "interpret_triton"))])
def test_greedy_traces_come_out_round_by_round(case, backend):
    """[B1] [B2] Golden `decode_*`, token for token: greedy, with a stop token, and with a confidence threshold where there is a head.

    The traces are requests of one batch. After its trace a request goes on, or waits finished for the others.
    """
    drafter = case.loaded.drafter
    if backend != "auto" and hasattr(drafter, "backend"):
        drafter = dataclasses.replace(drafter, backend=backend)
    has_confidence = (case.folder / "decode_conf_threshold.npz").exists()
    assert has_confidence is not isinstance(drafter, DFlashDrafter)
    traces = [case.trace(name) for name in ("greedy", "stop", *(["conf_threshold"] if has_confidence else []))]
    policy = ByRequest(float(traces[-1]["confidence_threshold"]))
    survival = RawSurvival() if has_confidence else ConstantSurvival((1.0,) * drafter.block_size)
    plan = DecodePlan(case.target, drafter, policy, survival, backend=backend)
    params = DecodeParams.of(case.target, case.target_params, case.loaded.params)
    prompts = [trace["prompt_ids"][0].tolist() for trace in traces]
    stops = [trace["stop_token_ids"].reshape(-1).tolist() for trace in traces]

    def begin(budgets):
        return start(plan, params, prompts, max_new_tokens=budgets, stop_ids=stops, max_len=64)

    state = begin([64 - len(prompt) for prompt in prompts])
    for index in range(max(len(trace["start"]) for trace in traces)):
        before = np.asarray(state.length)
        state, device_stats = step(plan, params, state)
        stats = jax.tree.map(np.asarray, device_stats)
        for row, trace in enumerate(traces):
            if index < len(trace["start"]):
                assert_round(trace, index, row, before, state, stats)
    state = begin([int(trace["max_new_tokens"]) for trace in traces])
    while not bool(state.finished.all()):
        state, _ = step(plan, params, state)
    for row, trace in enumerate(traces):
        assert prompts[row] + answers(state)[row] == trace["output_ids"][0].tolist()


@pytest.mark.slow
def test_the_stochastic_trace_follows_from_our_probabilities(case):
    """[A1] Golden `decode_temp1`."""
    assert_stochastic_trace(case.trace("temp1"), case.target, case.target_params, case.loaded.drafter, case.loaded.params)


def test_a_checkpoint_read_and_written_back_is_the_same_checkpoint(case, tmp_path):
    """Every tensor bit for bit, every field of the config."""
    export_for_reference(
        tmp_path / "d",
        case.loaded.drafter,
        case.loaded.params,
        case.target.head(case.target_params),
        config_json=case.loaded.config_json,
        dtype=jnp.float32,
    )
    with (
        safe_open(tmp_path / "d" / "model.safetensors", framework="np") as ours,
        safe_open(case.folder / "model.safetensors", framework="np") as theirs,
    ):
        assert sorted(ours.keys()) == sorted(theirs.keys())
        for name in theirs.keys():
            np.testing.assert_array_equal(ours.get_tensor(name), theirs.get_tensor(name), err_msg=name)
    written, reference = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "d", case.folder))
    assert written == reference
