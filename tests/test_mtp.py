"""The MTP drafter: one function in training and in decoding, no reader of the future, and something that learns. It has no reference."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.chain_configs import mtp_config, mtp_json
from dspark_jax.drafters.mtp import MTPConfig, MTPDrafter, MTPNetwork
from dspark_jax.layers import rms_normalise
from dspark_jax.losses import DraftLossConfig
from dspark_jax.tensor_files import flatten
from dspark_jax.train import OptimizerConfig, TrainConfig, init_train_state, train_step
from tests import chain_checks
from tests.chain_checks import TARGET

SMALL = MTPConfig(**chain_checks.SMALL)
PROMPTS = [[1, 2, 3, 4, 5, 6, 7, 8, 9], [10, 11], [12]]


@pytest.fixture(scope="module")
def small():
    """A random drafter with its head."""
    drafter = MTPDrafter(SMALL)
    return drafter, chain_checks.random_drafter_params(drafter), chain_checks.random_head()


def test_the_training_forward_is_the_decoding_forward_at_every_anchor(small):
    """[C4] [E1]"""
    chain_checks.assert_training_is_decoding(*small)


def test_no_chain_sees_what_comes_later(small):
    """[E1]"""
    chain_checks.assert_no_leak(*small)


def test_padding_does_not_matter(small):
    """[E2]"""
    chain_checks.assert_padding_does_not_matter(*small)


def test_commits_in_chunks_of_any_count_leave_the_same_state(small):
    """[C3] [C5] Padding leaves no trace, and a request without news keeps its seed."""
    chain_checks.assert_chunks_do_not_matter(*small)


def test_the_module_joins_the_embedding_with_the_hidden_state_in_that_order():
    """[D5] The first half of `eh_proj` reads the normed embedding, the second the normed hidden state; states are fed back normed."""
    drafter = MTPDrafter(SMALL)
    params, (hidden, embedding) = chain_checks.random_drafter_params(drafter), np.random.default_rng(0).normal(size=(2, 5, 16)) + 0.5
    hidden, embedding = jnp.asarray(hidden, jnp.float32), jnp.asarray(embedding, jnp.float32)
    network, variables = MTPNetwork(SMALL), {"params": params}
    joined, _ = network.apply(variables, hidden, embedding, method="read")
    normed = {name: np.asarray(params[name]["weight"] * rms_normalise(x, 1e-6)) for name, x in (("enorm", embedding), ("hnorm", hidden))}
    weight = np.asarray(params["eh_proj"]["weight"])
    np.testing.assert_allclose(
        np.asarray(joined), normed["enorm"] @ weight[:, :16].T + normed["hnorm"] @ weight[:, 16:].T, rtol=1e-4, atol=1e-5
    )
    fed_back, to_head = (network.apply(variables, hidden, method=name) for name in ("feed_back", "final_norm"))
    np.testing.assert_array_equal(np.asarray(fed_back), np.asarray(to_head))
    assert drafter.taps == () and set(params) == {"enorm", "hnorm", "eh_proj", "layers_0", "norm"}


# --- training, and decoding with what was trained


@pytest.fixture(scope="module")
def trained():
    """A random target with firm opinions, a drafter after 40 steps on noise that the target has read, and the losses on the way."""
    drafter = MTPDrafter(SMALL)
    target_params = chain_checks.random_drafter_params(TARGET)
    target_params["lm_head"] = {"weight": 8.0 * target_params["lm_head"]["weight"]}
    ids = jnp.asarray(np.random.default_rng(1).integers(0, 31, (16, 12)), jnp.int32)
    config = TrainConfig(
        OptimizerConfig(40, learning_rate=2e-2), loss=DraftLossConfig(ce=0.0, l1=0.5, confidence=0.0, soft_ce=1.0), num_anchors=1
    )
    state = init_train_state(jax.random.key(2), drafter.init(jax.random.key(3)), config.optimizer)
    before, losses = jax.tree.map(np.asarray, state.params), []
    for _ in range(40):
        state, metrics = train_step(TARGET, drafter, config, state, target_params, ids, jnp.ones(ids.shape, bool))
        losses.append(float(metrics["loss"]))
    return target_params, drafter, before, state.params, losses


def test_a_few_steps_lower_the_loss_and_move_every_parameter(trained):
    """[E3] Norms included."""
    _, _, before, after, losses = trained
    assert np.isfinite(losses).all() and np.mean(losses[-5:]) < 0.9 * np.mean(losses[:3])
    for name, leaf in flatten(after).items():
        assert np.abs(np.asarray(leaf) - flatten(before)[name]).max() > 1e-3, name


def test_greedy_output_is_the_targets(trained):
    """[B1] Without taps: features of width 0 go through prefill and rounds."""
    target_params, drafter, _, params, _ = trained
    chain_checks.assert_greedy_output_is_the_targets(TARGET, target_params, drafter, params, PROMPTS)


# --- files


@pytest.mark.parametrize("changes", [{}, chain_checks.GEMMA, {"draft_vocab_size": 9, "step_loss_decay": 0.5, "block_size": 1}])
def test_a_config_written_and_read_back_is_the_same(changes):
    config = dataclasses.replace(SMALL, **changes)
    written = mtp_json(config)
    assert written["architectures"] == ["Gemma4MTPDraftModel" if "style" in changes else "MTPDraftModel"]
    assert mtp_config(written, "file") == config
    with pytest.raises(ValueError, match="file: the field 'block_size' is missing"):
        mtp_config(written | {"block_size": None}, "file")
    with pytest.raises(ValueError, match="num_hidden_layers is 2; supported: 1"):
        mtp_config(written | {"num_hidden_layers": 2}, "file")


def test_taps_are_refused():
    with pytest.raises(ValueError, match=r"taps is \(0,\); MTP reads the target's last hidden state"):
        dataclasses.replace(SMALL, taps=(0,))
