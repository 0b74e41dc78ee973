"""How many tokens to draft: from past rounds alone, probes included."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.schedule import DraftPlanner, StepCurve
from pallas_kernels.noise import seed_key

R, G = 4, 3
# A target that is waiting for memory up to 6 tokens and computes from there on.
CURVE = StepCurve(tokens=tuple(range(1, 17)), seconds_per_step=tuple(1 + 0.25 * max(0, n - 6) for n in range(1, 17)), draft_seconds=0.25)
PLANNER = DraftPlanner(CURVE, (0.75, 0.5, 0.375), probe_share=0.0)
PLAN, OBSERVE = jax.jit(PLANNER.plan), jax.jit(PLANNER.observe)
ALL, CONTEXT, IDS, SEED = jnp.ones(R, bool), jnp.full(R, 10, jnp.int32), jnp.arange(R, dtype=jnp.int32), seed_key(7)
ONE = jnp.array([True, False, False, False])


def _after(survival: np.ndarray, num_rounds: int = 20, draft_length: int = G):
    history = PLANNER.init_history(R)
    for _ in range(num_rounds):
        history = OBSERVE(history, jnp.asarray(survival, jnp.float32), jnp.int32(draft_length), ALL, IDS)
    return history


def test_hard_requests_and_full_load_are_not_drafted_for():
    """The drafter's cost comes back with one easy request, not with one hard one, and not where the target is busy as it is."""
    easy, hard = np.tile([0.9, 0.8, 0.7], (R, 1)), np.tile([0.1, 0.01, 0.0], (R, 1))
    assert int(PLAN(_after(easy), ONE, CONTEXT, IDS, SEED).draft_length) == G
    assert int(PLAN(_after(hard), ONE, CONTEXT, IDS, SEED).draft_length) == 0
    loaded = dataclasses.replace(PLANNER, curve=dataclasses.replace(CURVE, seconds_per_step=tuple(float(n) for n in range(1, 17))))
    assert int(jax.jit(loaded.plan)(_after(easy), ALL, CONTEXT, IDS, SEED).draft_length) == 0


def _best_length(survival: np.ndarray, active: np.ndarray, planner: DraftPlanner) -> float:
    """Throughput of every draft length, listed."""
    num, throughput = int(active.sum()), []
    for length in range(G + 1):
        ranked = sorted(survival[active][:, :length].reshape(-1).tolist(), reverse=True)
        rest = CURVE.draft_seconds + length * planner.seconds_per_draft if length else planner.undrafted_seconds
        throughput.append(
            max((num + sum(ranked[:n])) / (CURVE.seconds(num + n) - CURVE.draft_seconds + rest) for n in range(len(ranked) + 1))
        )
    return next(length for length, value in enumerate(throughput) if value >= max(throughput) * (1 - 1e-5))


COSTLY = dataclasses.replace(PLANNER, seconds_per_draft=0.11, undrafted_seconds=0.013)
COSTLY_PLAN = jax.jit(COSTLY.plan)


@given(
    rows=st.lists(st.lists(st.floats(0, 1, width=16), min_size=G, max_size=G), min_size=R, max_size=R),
    active=st.lists(st.booleans(), min_size=R, max_size=R).map(np.array),
)
def test_the_length_of_the_best_throughput_is_planned(rows, active):
    history = _history(np.minimum.accumulate(np.array(rows, np.float32), axis=1))
    survival = np.asarray(COSTLY.expected_survival(history, IDS), np.float64)
    planned = int(COSTLY_PLAN(history, active, CONTEXT, IDS, SEED).draft_length)
    assert planned == (_best_length(survival, active, COSTLY) if active.any() else 0)


def _history(survival: np.ndarray):
    return dataclasses.replace(PLANNER.init_history(R), survival=jnp.asarray(4 * survival), weight=jnp.full((R, G), 4.0), request_id=IDS)


def test_expectations_start_at_the_constants_and_follow_what_was_shown():
    constants = np.array(PLANNER.constants, np.float32)
    assert np.array_equal(np.asarray(PLANNER.expected_survival(PLANNER.init_history(R), IDS)), np.tile(constants, (R, 1)))
    shown = np.tile(np.array([0.25, 0.125, 0.0], np.float32), (R, 1))
    once = np.asarray(PLANNER.expected_survival(_after(shown, 1), IDS))
    np.testing.assert_allclose(once, (shown + constants) / 2, atol=1e-6)
    # Decay 0.95 sums to twenty rounds, beside one of the constants.
    np.testing.assert_allclose(np.asarray(PLANNER.expected_survival(_after(shown, 200), IDS)), (20 * shown + constants) / 21, atol=1e-4)


def test_a_newcomer_in_a_slot_starts_at_the_constants():
    history = _after(np.zeros((R, G)))
    newcomers = jnp.array([0, 1, 2, 9], jnp.int32)
    expected = np.asarray(PLANNER.expected_survival(history, newcomers))
    assert np.array_equal(expected[3], np.array(PLANNER.constants, np.float32)) and np.all(expected[:3] < 0.1)
    after = OBSERVE(history, jnp.ones((R, G)), jnp.int32(G), ALL, newcomers)
    np.testing.assert_allclose(np.asarray(after.weight)[3], 1.0)


def test_a_round_without_drafts_teaches_nothing_and_a_short_one_nothing_of_its_end():
    history = _after(np.tile([0.5, 0.25, 0.125], (R, 1)))
    undrafted = OBSERVE(history, jnp.ones((R, G)), jnp.int32(0), ALL, IDS)
    assert np.array_equal(np.asarray(undrafted.survival), np.asarray(history.survival)) and int(undrafted.round) == int(history.round) + 1
    before, short = (np.asarray(PLANNER.expected_survival(each, IDS)) for each in (history, _short(history)))
    assert np.all(short[:, 0] > before[:, 0]) and np.array_equal(short[:, 1:], before[:, 1:])


def _short(history):
    return OBSERVE(history, jnp.ones((R, G)), jnp.int32(1), ALL, IDS)


def test_slots_make_no_difference_to_the_plan():
    """[B2]"""
    survival = np.minimum.accumulate(np.random.default_rng(0).uniform(0, 1, (R, G)), axis=1).astype(np.float32)
    order = np.array([2, 0, 3, 1])
    moved = dataclasses.replace(_history(survival[order]), request_id=IDS[order])
    here, there = PLAN(_history(survival), ALL, CONTEXT, IDS, SEED), PLAN(moved, ALL, CONTEXT, IDS[order], SEED)
    assert int(here.draft_length) == int(there.draft_length)


def test_probes_come_at_their_share_whatever_the_history_and_draft_in_full():
    """Bits of the batch's own round counter: known before anything is drafted, the same again with the same seed."""
    planner = dataclasses.replace(PLANNER, probe_share=0.1)

    def plans(history, seed):
        each = lambda number: planner.plan(dataclasses.replace(history, round=number), ONE, CONTEXT, IDS, seed)  # noqa: E731
        return jax.jit(jax.vmap(each))(jnp.arange(4000, dtype=jnp.int32))

    hard, easy = (plans(_after(np.full((R, G), value)), SEED) for value in (0.0, 0.9))
    probes = np.asarray(hard.is_probe)
    assert abs(probes.mean() - 0.1) < 4 * np.sqrt(0.09 / 4000)
    assert np.array_equal(probes, np.asarray(easy.is_probe))
    assert np.array_equal(np.asarray(hard.draft_length), np.where(probes, G, 0))
    assert not np.array_equal(probes, np.asarray(plans(_after(np.zeros((R, G))), seed_key(8)).is_probe))


def test_a_margin_keeps_plain_decoding_at_an_even_balance():
    history = _after(np.tile([0.5, 0.3, 0.2], (R, 1)))
    assert int(PLAN(history, ONE, CONTEXT, IDS, SEED).draft_length) > 0
    assert int(jax.jit(dataclasses.replace(PLANNER, margin=2.0).plan)(history, ONE, CONTEXT, IDS, SEED).draft_length) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        *(("constants", ()), ("constants", (0.5, 0.6)), ("decay", 1.5), ("probe_share", -0.1), ("margin", -1.0)),
        *(("seconds_per_draft", float("inf")), ("undrafted_seconds", -1.0), ("prior_weight", 0.0)),
    ],
)
def test_bad_planners_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} is"):
        dataclasses.replace(PLANNER, **{field: value})
