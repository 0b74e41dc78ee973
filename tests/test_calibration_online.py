"""Survival learned while serving, where a policy decides what is seen."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import lax

from dspark_jax.calibrate import ConstantSurvival, RawSurvival, SurvivalByTemperature, TemperatureScaled
from dspark_jax.calibration_online import EDGES, OnlineCalibration
from dspark_jax.protocols import DraftBlock

BLOCK = 4
ROWS = 512
ROUNDS = 200
PROBE_SHARE = 0.2
LEVELS = np.asarray([-1.75, -0.25, 1.25, 2.75], np.float32)
"""Confidence logits of the simulation: bin centres, so that each bin has one chance."""

CHANCES = {"before": (0.2, 0.5, 0.8, 0.95), "after": (0.1, 0.3, 0.5, 0.9)}
"""Of acceptance at each level, before and after the drift."""

STAY = 0.7
"""Share of drafts with the level of the draft before: hard requests stay hard."""


update = jax.jit(OnlineCalibration.update)


def block_of(logits) -> DraftBlock:
    zeros = jnp.zeros(logits.shape, jnp.float32)
    return DraftBlock(zeros.astype(jnp.int32), zeros, zeros, zeros, logits, None)


def fresh(half_life=20_000.0, at=(0.0,), model=None):
    return OnlineCalibration.create(model or RawSurvival(), [[0.6] * BLOCK] * len(at), at, half_life=half_life)


def served(key, chances):
    """Rounds of a batch: the levels of confidence, lengths of a policy that stops at low confidence, probes, and what was accepted."""
    keys = jax.random.split(key, 5)
    fresh_level = jax.random.randint(keys[0], (BLOCK, ROWS), 0, len(LEVELS))
    stays = jax.random.uniform(keys[1], (BLOCK, ROWS)) < STAY

    def follow(level, drawn):
        level = jnp.where(drawn[1], level, drawn[0])
        return level, level

    level = lax.scan(follow, fresh_level[0], (fresh_level, stays))[1].T
    accepted = jnp.cumprod((jax.random.uniform(keys[2], (ROWS, BLOCK)) < chances[level]).astype(jnp.int32), axis=1)
    probe = jax.random.uniform(keys[3], (ROWS,)) < PROBE_SHARE
    eager = jnp.cumprod((level >= 2).astype(jnp.int32), axis=1).sum(axis=1)
    verified = jnp.where(probe, BLOCK, eager).astype(jnp.int32)
    return jnp.asarray(LEVELS)[level], verified, jnp.minimum(accepted.sum(axis=1), verified).astype(jnp.int32), probe


@jax.jit
def serve(state, key, chances):
    """`ROUNDS` batches; beside the state, what naive counting of prefix labels gives, over all rounds and over those verified so far."""

    def one(carry, key):
        state, prefix, seen = carry
        logits, verified, num_accepted, probe = served(key, chances)
        active = jnp.ones(ROWS, bool)
        state = state.update(logits, verified, num_accepted, active, jnp.zeros(ROWS), probe)
        place = jnp.arange(BLOCK, dtype=jnp.int32)
        prefix += (place < num_accepted[:, None]).sum(axis=0).astype(jnp.float32)
        return (state, prefix, seen + (place < verified[:, None]).sum(axis=0).astype(jnp.float32)), None

    zeros = jnp.zeros(BLOCK)
    (state, prefix, seen), _ = lax.scan(one, (state, zeros, zeros), jax.random.split(key, ROUNDS))
    return state, prefix / (ROWS * ROUNDS), prefix / seen


def true_survival(chances):
    """Chance of each prefix, by the levels' Markov chain."""
    accept = np.asarray(chances)
    moves = STAY * np.eye(4) + (1 - STAY) / 4
    mass, survival = np.full(4, 0.25), []
    for _ in range(BLOCK):
        mass = mass * accept
        survival.append(mass.sum())
        mass = mass @ moves
    return np.asarray(survival)


@pytest.fixture(scope="module")
def drifted():
    """The state before and after the drift, one that never forgets, and the naive counts after it."""
    keys = jax.random.split(jax.random.key(0), 2)
    chances = [jnp.asarray(CHANCES[name], jnp.float32) for name in ("before", "after")]
    before, *_ = serve(fresh(), keys[0], chances[0])
    after, of_all, of_verified = serve(before, keys[1], chances[1])
    stubborn, *_ = serve(serve(fresh(float("inf")), keys[0], chances[0])[0], keys[1], chances[1])
    return before, after, stubborn, np.asarray(of_all), np.asarray(of_verified)


@pytest.mark.parametrize("when", ["before", "after"])
def test_chances_given_the_confidence_are_unbiased_under_censoring(drifted, when):
    """Within 0.04 (3 standard errors of the rarest bin, and what the prior and rounds before the drift still weigh), at every position."""
    state = drifted[0] if when == "before" else drifted[1]
    logits = jnp.broadcast_to(jnp.asarray(LEVELS)[:, None], (4, BLOCK))
    survival = np.asarray(jax.jit(lambda state: state.survival(block_of(logits), jnp.zeros(4)))(state))
    expected = np.cumprod(np.repeat(np.asarray(CHANCES[when])[:, None], BLOCK, axis=1), axis=1)
    np.testing.assert_allclose(survival, expected, atol=0.04)


@pytest.mark.parametrize("when", ["before", "after"])
def test_usual_survival_is_unbiased_under_censoring(drifted, when):
    state = drifted[0] if when == "before" else drifted[1]
    survival = np.asarray(state.usual_survival(jnp.zeros(1)))[0]
    np.testing.assert_allclose(survival, true_survival(CHANCES[when]), atol=0.03)


def test_counting_prefix_labels_is_biased(drifted):
    """What was not verified is no rejection, and what was verified was chosen: one count is too low, the other too high."""
    _, _, stubborn, of_all, of_verified = drifted
    truth = true_survival(CHANCES["after"])
    assert np.all(of_all[:2] < 0.9 * truth[:2]) and np.all(of_verified[:3] > truth[:3] + 0.1)
    kept = np.asarray(stubborn.usual_survival(jnp.zeros(1)))[0]
    assert kept[0] > truth[0] + 0.05


def test_each_temperature_learns_from_its_own_requests():
    logits, temperature = jnp.zeros((400, BLOCK)), jnp.tile(jnp.asarray([0.0, 0.1, 1.0, 1.0]), 100)
    everything, always = jnp.full(400, BLOCK, jnp.int32), jnp.ones(400, bool)
    num_accepted = jnp.where(temperature < 0.5, everything, 0)
    state = update(fresh(float("inf"), at=(0.0, 1.0)), logits, everything, num_accepted, always, temperature, always)
    survival = np.asarray(state.survival(block_of(logits), temperature))
    assert np.all(survival[::4] > 0.9) and np.all(survival[1::4] > 0.9) and np.all(survival[2::4] < 0.05)
    np.testing.assert_array_equal(np.asarray(state.probe_reached), [[200.0] * 4, [200.0, 0.0, 0.0, 0.0]])
    np.testing.assert_allclose(np.asarray(state.continuation[0]), (200 + 4 * 0.6) / 204, rtol=1e-6)


def test_only_what_was_verified_and_asked_for_counts():
    """Rows: nothing verified; stopped at place 1 by a token; inactive; a NaN confidence, which counts for probes alone."""
    logits = jnp.zeros((4, BLOCK)).at[3, 1].set(jnp.nan)
    state = update(
        fresh(float("inf")),
        logits,
        jnp.asarray([0, 4, 4, 4], jnp.int32),
        jnp.asarray([0, 4, 4, 2], jnp.int32),
        jnp.asarray([True, True, False, True]),
        jnp.zeros(4),
        jnp.asarray([True, True, True, True]),
        jnp.asarray([1, 2, 0, 3], jnp.int32),
    )
    np.testing.assert_array_equal(np.asarray(state.reached.sum(axis=2)), [[2.0, 1.0, 1.0, 0.0]])
    np.testing.assert_array_equal(np.asarray(state.accepted.sum(axis=2)), [[2.0, 1.0, 0.0, 0.0]])
    np.testing.assert_array_equal(np.asarray(state.probe_reached), [[2.0, 2.0, 1.0, 0.0]])


def test_older_rounds_count_half_after_the_half_life():
    state = fresh(half_life=8.0)
    one = (jnp.zeros((2, BLOCK)), jnp.full(2, BLOCK, jnp.int32), jnp.full(2, BLOCK, jnp.int32), jnp.ones(2, bool), jnp.zeros(2))
    none = (*one[:3], jnp.zeros(2, bool), one[4])
    state = update(state, *one)
    assert float(state.reached[0, 0].sum()) == 2.0 and float(update(state, *none).reached[0, 0].sum()) == 2.0
    for _ in range(4):
        state = update(state, *one)
    np.testing.assert_allclose(float(state.reached[0, 0].sum()), 2 * sum(0.5 ** (age / 4) for age in range(5)), rtol=1e-5)


def test_before_any_round_survival_is_the_prior_models():
    """At bin centres; the model of each temperature, and any kind of model."""
    model = SurvivalByTemperature((0.0, 1.0), (TemperatureScaled((0.9, 1.5, 2.0, 1.0)), ConstantSurvival((0.7, 0.4, 0.1, 0.0))))
    state = fresh(at=(0.0, 1.0), model=model)
    block, temperature = block_of(jnp.full((2, BLOCK), 0.75)), jnp.asarray([0.0, 1.0])
    np.testing.assert_allclose(state.survival(block, temperature), model.survival(block, temperature), rtol=1e-5)
    np.testing.assert_allclose(np.asarray(state.usual_survival(temperature))[0], 0.6 ** np.arange(1, BLOCK + 1), rtol=1e-5)


@settings(max_examples=30)
@given(
    st.lists(st.floats(width=32), min_size=2 * BLOCK, max_size=2 * BLOCK),
    st.lists(st.tuples(st.integers(0, BLOCK), st.integers(0, BLOCK)), min_size=2, max_size=2),
)
def test_survival_never_rises_and_is_never_nan(logits, lengths):
    logits = jnp.asarray(logits, jnp.float32).reshape(2, BLOCK)
    verified = jnp.asarray([most for most, _ in lengths], jnp.int32)
    num_accepted = jnp.asarray([min(pair) for pair in lengths], jnp.int32)
    state = update(fresh(half_life=4.0), logits, verified, num_accepted, jnp.ones(2, bool), jnp.zeros(2))
    survival = np.asarray(state.survival(block_of(logits), jnp.zeros(2)))
    assert np.all((survival >= 0) & (survival <= 1)) and np.all(np.diff(survival, axis=1) <= 0)


def test_bad_states_are_refused():
    usual = [[0.6] * BLOCK]
    for arguments, match in (
        ({"at": (1.0, 0.0), "continuation": usual * 2}, "at is"),
        ({"at": (0.0, 1.0), "continuation": usual}, "continuation has"),
        ({"continuation": [[1.5]]}, "continuation is"),
        ({"continuation": usual, "half_life": 0.0}, "half_life is 0.0"),
        ({"continuation": usual, "prior_rounds": 0.0}, "prior_rounds is 0.0"),
        ({"continuation": usual, "edges": EDGES[:2] + EDGES[:1]}, "edges is"),
    ):
        with pytest.raises(ValueError, match=match):
            OnlineCalibration.create(RawSurvival(), **arguments)  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="confidence_logits is None"):
        fresh().survival(dataclasses.replace(block_of(jnp.zeros((1, BLOCK))), confidence_logits=None), jnp.zeros(1))
    with pytest.raises(ValueError, match="the block has 2 drafts"):
        fresh().survival(block_of(jnp.zeros((1, 2))), jnp.zeros(1))
