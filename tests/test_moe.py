"""Mixtures of experts: what every token gets by the formulas, whoever else is in the batch; and loads that become balanced."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.moe import MoE, MoEConfig, expert_loads, rebalanced, route, sequence_balance_loss, updated_bias
from tests.literal_moe import choices, literal_moe

ACTIVATIONS: Any = {"atol": 2e-5, "rtol": 2e-4}
WIDTH, TOKENS = 12, 20
CONFIG = MoEConfig(num_experts=6, top_k=2, intermediate_size=8)


@functools.partial(jax.jit, static_argnums=0)
def _run(config, params, x):
    """Output and routing of one pass."""
    output, state = MoE(WIDTH, config).apply({"params": params}, x, mutable=["intermediates"])
    return output, state["intermediates"]["routing"][0]


def _params(config, seed=0):
    boxed = jax.eval_shape(lambda: MoE(WIDTH, config).init(jax.random.key(0), jnp.zeros((1, WIDTH)))["params"])
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.5 * rng.normal(size=leaf.shape), jnp.float32), nn.meta.unbox(boxed))


def _tokens(seed=1, count=TOKENS):
    return jnp.asarray(np.random.default_rng(seed).normal(size=(count, WIDTH)), jnp.float32)


def _literal(config, params, x):
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    return np.stack([literal_moe(token, wide, config) for token in np.asarray(x, np.float64)])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"scoring": "sqrtsoftplus", "routed_scaling_factor": 1.5, "num_shared_experts": 2},
        {"normalise_gates": False, "num_shared_experts": 0, "top_k": 6},
    ],
    ids=["V3", "V4, two shared", "every expert, raw gates"],
)
def test_every_token_gets_what_the_formulas_say(changes):
    """Affinity + bias chooses, affinity alone weighs; against float64 loops over tokens and experts."""
    config = dataclasses.replace(CONFIG, **changes)
    params, x = _params(config), _tokens()
    output, routing = _run(config, params, x)
    np.testing.assert_allclose(np.asarray(output), _literal(config, params, x), **ACTIVATIONS)
    wide = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    for token, chosen in zip(np.asarray(x, np.float64), np.asarray(routing.chosen), strict=True):
        np.testing.assert_array_equal(chosen, choices(token, wide, config)[1])
    assert ("shared_experts" in params) == (config.num_shared_experts > 0)


def test_no_token_is_dropped_where_all_want_one_expert():
    """A bias that sends every token to expert 3: each of them still gets it whole."""
    params = _params(CONFIG)
    bias = jnp.zeros(6).at[3].set(100.0)
    params = params | {"gate": params["gate"] | {"e_score_correction_bias": bias}}
    x = _tokens()
    output, routing = _run(CONFIG, params, x)
    loads = expert_loads(routing.chosen, jnp.ones(TOKENS, bool), 6)
    assert loads[3] == TOKENS and loads.sum() == 2 * TOKENS
    np.testing.assert_allclose(np.asarray(output), _literal(CONFIG, params, x), **ACTIVATIONS)


def test_a_token_does_not_depend_on_its_batch_mates():
    """[B2] Permuted tokens give permuted outputs; rows of padding, however large, change nobody else and count for no expert."""
    params, x = _params(CONFIG), _tokens()
    output, routing = _run(CONFIG, params, x)
    order = np.random.default_rng(2).permutation(TOKENS)
    permuted, _ = _run(CONFIG, params, x[order])
    np.testing.assert_allclose(np.asarray(permuted), np.asarray(output)[order], atol=1e-6)
    real = np.arange(TOKENS) % 3 > 0
    padded, with_padding = _run(CONFIG, params, jnp.where(real[:, None], x, 1e6))
    np.testing.assert_allclose(np.asarray(padded)[real], np.asarray(output)[real], atol=1e-6)
    np.testing.assert_array_equal(
        np.asarray(expert_loads(with_padding.chosen, jnp.asarray(real), 6)),
        np.bincount(np.asarray(routing.chosen)[real].reshape(-1), minlength=6),
    )
    rows = x.reshape(4, 5, WIDTH)
    np.testing.assert_allclose(np.asarray(_run(CONFIG, params, rows)[0]).reshape(TOKENS, WIDTH), np.asarray(output), atol=1e-6)


def test_no_gradient_reaches_the_bias_and_every_other_parameter_gets_one():
    params, x = _params(CONFIG), _tokens()
    gradient = jax.jit(jax.grad(lambda params: jnp.square(_run(CONFIG, params, x)[0]).sum()))(params)
    assert not np.any(gradient["gate"].pop("e_score_correction_bias"))
    unused = [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0] if not np.any(leaf)]
    assert not unused and np.all([np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradient)])


def test_the_bias_moves_against_the_load_by_its_sign():
    """DeepSeek-V3, section 2.1.2: down where loaded above the mean, up where below, still at the mean."""
    bias = updated_bias(jnp.array([0.0, 1.0, -1.0, 0.5]), jnp.array([9, 4, 0, 3], jnp.int32), speed=0.01)
    np.testing.assert_allclose(np.asarray(bias), [-0.01, 1.0, -0.99, 0.51], atol=1e-7)


def test_loads_become_balanced_under_the_bias_rule():
    """Tokens with a common direction, so that two experts get nearly everything; 400 steps later all get their share within 20 %."""
    config = MoEConfig(num_experts=8, top_k=2, intermediate_size=4, num_shared_experts=0)
    params = _params(config, seed=3)
    direction = params["gate"]["weight"][1] + params["gate"]["weight"][5]
    params = params | {"gate": params["gate"] | {"e_score_correction_bias": jnp.zeros(8)}}
    counted = jnp.ones(256, bool)

    @jax.jit
    def step(params, key):
        x = direction + 0.5 * jax.random.normal(key, (256, WIDTH))
        state: Any = MoE(WIDTH, config).apply({"params": params}, x, mutable=["intermediates"])[1]
        loads = expert_loads(state["intermediates"]["routing"][0].chosen, counted, 8)
        return rebalanced(params, state["intermediates"], counted, speed=2e-3), loads

    def share(params, keys):
        _, loads = jax.lax.scan(lambda _, key: (None, step(params, key)[1]), None, keys)
        return np.asarray(loads.sum(axis=0)) / (256 * 2 * len(keys) / 8)

    keys = jax.random.split(jax.random.key(0), 416)
    before = share(params, keys[:16])
    trained, _ = jax.jit(lambda params: jax.lax.scan(step, params, keys[16:]))(params)
    after = share(trained, keys[:16])
    assert before.max() > 2.5 and before.min() < 0.2
    assert after.max() < 1.2 and after.min() > 0.8
    for name in ("gate_proj", "up_proj", "down_proj"):
        np.testing.assert_array_equal(np.asarray(trained["experts"][name]), np.asarray(params["experts"][name]))
    np.testing.assert_array_equal(np.asarray(trained["gate"]["weight"]), np.asarray(params["gate"]["weight"]))


def test_the_sequence_balance_loss_is_the_published_sum():
    """V3, equations 17 to 20, against loops over sequences, experts and tokens; padding takes no part."""
    rng = np.random.default_rng(4)
    routing = route(jnp.asarray(rng.normal(size=(3, 7, 6)), jnp.float32), jnp.zeros(6), CONFIG)
    counted = np.arange(7) < np.array([7, 4, 1])[:, None]
    loss = sequence_balance_loss(routing.affinities, routing.chosen, jnp.asarray(counted))
    affinities, chosen = np.asarray(routing.affinities, np.float64), np.asarray(routing.chosen)
    expected = 0.0
    for row in range(3):
        tokens = counted[row].sum()
        for expert in range(6):
            frequency = 6 / (2 * tokens) * sum(expert in chosen[row, t] for t in range(tokens))
            chance = sum(affinities[row, t, expert] / affinities[row, t].sum() for t in range(tokens)) / tokens
            expected += frequency * chance / 3
    assert float(loss) == pytest.approx(expected, rel=1e-5)


def test_the_sequence_balance_loss_is_one_where_balanced_and_its_gradient_lowers_the_crowded_expert():
    even = jnp.tile(jnp.arange(6, dtype=jnp.int32).reshape(1, 3, 2), (1, 2, 1))
    counted = jnp.ones((1, 6), bool)
    assert float(sequence_balance_loss(jnp.full((1, 6, 6), 0.5), even, counted)) == pytest.approx(1.0, abs=1e-6)
    crowded = even.at[:, :, 0].set(2)
    gradient = np.asarray(jax.grad(sequence_balance_loss)(jnp.full((1, 6, 6), 0.5), crowded, counted)).sum((0, 1))
    assert gradient.argmax() == 2 and gradient[2] > 0 > gradient.min()


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_experts": 0}, "num_experts is 0; it must be at least 1"),
        ({"top_k": 0}, r"top_k is 0; it must be in 1\.\.6"),
        ({"top_k": 7}, r"top_k is 7; it must be in 1\.\.6"),
        ({"intermediate_size": 0}, "intermediate_size is 0"),
        ({"num_shared_experts": -1}, "num_shared_experts is -1; it must be at least 0"),
        ({"scoring": "softmax"}, "scoring is 'softmax'; allowed: sigmoid, sqrtsoftplus"),
        ({"routed_scaling_factor": 0.0}, "routed_scaling_factor is 0.0; it must be positive"),
    ],
)
def test_a_mixture_that_cannot_be_is_refused_by_field(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(CONFIG, **changes)
