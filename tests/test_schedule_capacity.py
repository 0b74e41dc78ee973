"""Capacity from rounds that are two back, and what fills it: the current round's ranking and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.schedule import CapacityState, CapacityTopK, StepCurve, admit_top_k, choose_capacity

R, G = 3, 3
CURVE = StepCurve(tokens=(2, 3, 5, 8, 12), seconds_per_step=(1.0, 1.1, 1.7, 2.2, 3.0), draft_seconds=0.2)
CONSTANTS = (0.75, 0.5, 0.25)
POLICY = CapacityTopK(CURVE, CONSTANTS)
ADMIT, NEXT = jax.jit(admit_top_k), jax.jit(POLICY.next_lengths)
OF_STATE = jax.jit(POLICY.capacity)
CAPACITY = jax.jit(lambda survival, ids, active, request_id: choose_capacity(survival, ids, active, request_id, CURVE, CONSTANTS))
ALL, CONTEXT, IDS = jnp.ones(R, bool), jnp.full(R, 10, jnp.int32), jnp.arange(R, dtype=jnp.int32)

eighths = st.integers(0, 8).map(lambda value: value / 8)
blocks = st.lists(st.lists(eighths, min_size=G, max_size=G), min_size=R, max_size=R).map(
    lambda rows: np.minimum.accumulate(np.array(rows, np.float32), axis=1)
)
masks = st.lists(st.booleans(), min_size=R, max_size=R).map(np.array)
orders = st.permutations(range(R)).map(lambda order: np.array(order, np.int32))


@given(survival=blocks, active=masks, capacity=st.integers(0, R * (G + 1) + 2), request_id=orders)
def test_places_go_down_the_ranking_of_the_current_round(survival, active, capacity, request_id):
    """[F2] [F6] Against a sorted list; everybody keeps the token of the anchor, and the round fills its capacity where it can."""
    ranked = sorted((-survival[r, k], request_id[r], k, r) for r in range(R) for k in range(G) if active[r])
    expected = [0] * R
    for _, _, _, row in ranked[: max(capacity - int(active.sum()), 0)]:
        expected[row] += 1
    lengths = np.asarray(ADMIT(survival, active, request_id, jnp.int32(capacity)))
    assert lengths.tolist() == expected
    num_active = int(active.sum())
    assert num_active + lengths.sum() == max(min(capacity, num_active * (G + 1)), num_active)


def test_overload_gives_nobody_a_draft_and_idleness_gives_all():
    survival = jnp.full((R, G), 0.9).at[1].set(jnp.nan)
    assert np.asarray(ADMIT(survival, ALL, IDS, jnp.int32(R - 1))).tolist() == [0, 0, 0]
    assert np.asarray(ADMIT(survival, ALL, IDS, jnp.int32(R * (G + 1)))).tolist() == [G, G, G]
    assert np.asarray(ADMIT(survival, ALL, IDS, jnp.int32(R + 2 * G))).tolist() == [G, 0, G]


def _best_bucket(survival: np.ndarray, active: np.ndarray) -> int:
    num_active = int(active.sum())
    ranked = sorted(survival[active].reshape(-1).tolist(), reverse=True)
    throughput = [(num_active + sum(ranked[:n])) / CURVE.seconds(num_active + n) for n in range(len(ranked) + 1)]
    # Multiples of 1/8 over these costs: what is equal beyond rounding lies in one bucket.
    best = next(n for n, value in enumerate(throughput) if value >= max(throughput) * (1 - 1e-6))
    return next(bucket for bucket in CURVE.tokens if bucket >= num_active + best)


@given(survival=blocks, active=masks, stale_ids=st.lists(st.sampled_from([-1, 0, 1, 2, 7]), min_size=R, max_size=R), request_id=orders)
def test_the_capacity_is_the_bucket_of_the_best_throughput(survival, active, stale_ids, request_id):
    """The global maximum, without a break; a slot that remembers somebody else, or nobody, counts as the constants say."""
    remembered = np.array(stale_ids) == request_id
    believed = np.where(remembered[:, None], survival, np.array(CONSTANTS, np.float32))
    capacity = int(CAPACITY(survival, jnp.asarray(stale_ids, jnp.int32), active, request_id))
    assert capacity == _best_bucket(believed, active) >= active.sum()


def test_the_capacity_is_never_below_the_requests_that_decode():
    curve = StepCurve(tokens=(1, 2), seconds_per_step=(1.0, 1.5))
    assert int(jax.jit(lambda survival: choose_capacity(survival, IDS, ALL, IDS, curve, CONSTANTS))(jnp.zeros((R, G)))) == R


def _fresh_rounds(num_rounds: int, seed: int) -> np.ndarray:
    return np.cumprod(np.random.default_rng(seed).uniform(0, 1, (num_rounds, R, G)), axis=2).astype(np.float32)


def test_a_round_uses_the_survival_of_two_rounds_before():
    """[F3] The first two rounds go by the constants; later capacities are those of the round before the last."""
    state = POLICY.init_state(R, G)
    rounds = _fresh_rounds(8, seed=1)
    seen = []
    for t, survival in enumerate(rounds):
        believed = np.tile(np.array(CONSTANTS, np.float32), (R, 1)) if t < 2 else rounds[t - 2]
        capacity = int(OF_STATE(state, ALL, CONTEXT, IDS))
        assert capacity == _best_bucket(believed, np.ones(R, bool))
        lengths, state = NEXT(state, survival, ALL, CONTEXT, IDS)
        assert R + int(lengths.sum()) == capacity
        seen.append(capacity)
    assert len(set(seen)) > 1


@given(older=blocks, younger=blocks, survival=blocks, other=blocks)
def test_neither_the_current_nor_the_last_round_moves_the_capacity(older, younger, survival, other):
    """[F3] The number of verified drafts is the same whatever the current and the last round say."""
    ids = np.stack([np.arange(R, dtype=np.int32)] * 2)
    states = [CapacityState(jnp.asarray(np.stack([older, last])), jnp.asarray(ids)) for last in (younger, other)]
    totals = [int(NEXT(state, now, ALL, CONTEXT, IDS)[0].sum()) for state, now in zip(states, (survival, other), strict=True)]
    assert totals[0] == totals[1]


@given(stale=blocks, survival=blocks, row=st.integers(0, R - 1), k=st.integers(0, G - 1), other=st.lists(eighths, min_size=G, max_size=G))
def test_later_confidence_does_not_decide(stale, survival, row, k, other):
    """[A6] Changing a_{k+1..} never changes whether draft k (from 0) is verified."""
    changed = survival.copy()
    changed[row, k + 1 :] = np.minimum(np.minimum.accumulate(np.array(other, np.float32)), survival[row, k])[k + 1 :]
    state = CapacityState(jnp.asarray(np.stack([stale, stale])), jnp.stack([IDS, IDS]))
    before, after = (int(NEXT(state, each, ALL, CONTEXT, IDS)[0][row]) for each in (survival, changed))
    assert (before > k) == (after > k)


@given(stale=blocks, survival=blocks, order=orders, active=masks)
def test_slots_make_no_difference(stale, survival, order, active):
    """[B2] Requests that have always been in other slots get the same lengths, ties included; NaN counts as 0."""
    state = CapacityState(jnp.asarray(np.stack([stale, stale])), jnp.stack([IDS, IDS]))
    moved_state = jax.tree.map(lambda leaf: leaf[:, order], state)
    lengths = np.asarray(NEXT(state, survival, active, CONTEXT, IDS)[0])
    with_nan = np.where(survival[order] == 0, np.nan, survival[order]).astype(np.float32)
    moved = np.asarray(NEXT(moved_state, with_nan, active[order], CONTEXT, jnp.asarray(order))[0])
    assert moved.tolist() == lengths[order].tolist()


def test_what_a_slot_remembers_of_another_request_is_dropped():
    """A request that leaves and one that arrives in its slot: the newcomer counts as the constants say, for two rounds."""
    hopeless, hopeful = jnp.zeros((R, G)), jnp.ones((R, G))
    state = POLICY.init_state(R, G)
    for _ in range(2):
        _, state = NEXT(state, hopeless, ALL, CONTEXT, IDS)
    assert int(OF_STATE(state, ALL, CONTEXT, IDS)) == R
    new = IDS + R
    at_first = int(OF_STATE(POLICY.init_state(R, G), ALL, CONTEXT, IDS))
    assert at_first > R
    for _ in range(2):
        assert int(OF_STATE(state, ALL, CONTEXT, new)) == at_first
        _, state = NEXT(state, hopeful, ALL, CONTEXT, new)
    assert int(OF_STATE(state, ALL, CONTEXT, new)) == R * (G + 1)
    _, idle = NEXT(state, hopeful, ~ALL, CONTEXT, new)
    assert np.all(np.asarray(idle.request_id[1]) == -1)


def test_bad_constants_are_refused():
    with pytest.raises(ValueError, match="constants is"):
        CapacityTopK(CURVE, (0.5, 0.6))
    with pytest.raises(ValueError, match="constants has 2 entries"):
        choose_capacity(jnp.zeros((R, G)), IDS, ALL, IDS, CURVE, (0.5, 0.4))
