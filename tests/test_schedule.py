"""Cost curves and policies: Algorithm 1 as written, forecasts that pay, and no decision that looks ahead."""

import functools
import itertools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.schedule import (
    CapacityTopK,
    ConfidenceThreshold,
    FixedLength,
    FlatCurveWarning,
    ForecastStop,
    NonMonotoneCurveWarning,
    Oracle,
    PrefixSchedule,
    StepCurve,
    SurvivalThreshold,
    admit_top_k,
    best_prefix,
    default_schedule,
    select_prefix,
)

R, G = 3, 4
STAIRCASE = StepCurve(tokens=(1, 5, 8, 15), seconds_per_step=(0.029, 0.042, 0.051, 0.08), draft_seconds=0.007)
with pytest.warns(NonMonotoneCurveWarning):
    JAGGED = StepCurve(tokens=(1, 2, 3, 4, 6, 9, 15), seconds_per_step=(1.0, 1.75, 1.25, 2.0, 1.5, 4.0, 3.0))
LINEAR = StepCurve(tokens=tuple(range(1, 16)), seconds_per_step=tuple(1 + 0.25 * n for n in range(1, 16)))
CONTINUATION = (0.75, 0.5, 0.875, 0.25)


class _TopK:
    """Top-K with a capacity of 7 tokens, as if earlier rounds had said so."""

    def lengths(self, survival, active, context, request_id):
        return admit_top_k(survival, active, request_id, 7)


POLICIES = {
    "fixed": FixedLength(2),
    "threshold": ConfidenceThreshold(0.5),
    "survival": SurvivalThreshold(0.5),
    "algorithm_1": PrefixSchedule(JAGGED),
    "forecast": ForecastStop(STAIRCASE, CONTINUATION),
    "top_k": _TopK(),
}
SELECT, BEST = jax.jit(select_prefix), jax.jit(best_prefix)
LENGTHS = {name: jax.jit(policy.lengths) for name, policy in POLICIES.items()}
ALL, CONTEXT, IDS = jnp.ones(R, bool), jnp.full(R, 10, jnp.int32), jnp.arange(R, dtype=jnp.int32)

# Multiples of 1/8: sums and products with the rates below are exact in float32, so that ties are ties for both sides.
eighths = st.integers(0, 8).map(lambda value: value / 8)
confidences = st.lists(st.lists(eighths, min_size=G, max_size=G), min_size=R, max_size=R)
rates = st.lists(st.integers(0, 16).map(lambda value: value / 16), min_size=R * (G + 1) + 1, max_size=R * (G + 1) + 1)


def _survival(confidence) -> np.ndarray:
    return np.minimum.accumulate(np.array(confidence, np.float32), axis=1)


def _algorithm_1(survival: np.ndarray, active: np.ndarray, rate: np.ndarray, request_id: np.ndarray) -> list[int]:
    """The paper's listing, line by line."""
    candidates = sorted((-survival[r, k], request_id[r], k, r) for r in range(R) for k in range(G) if active[r])
    lengths, tokens, expected = [0] * R, int(active.sum()), float(active.sum())
    best = expected * rate[tokens]
    for negative, _, _, row in candidates:
        value = (expected - negative) * rate[tokens + 1]
        if not value > best:
            break
        expected, tokens, best = expected - negative, tokens + 1, value
        lengths[row] += 1
    return lengths


@given(confidence=confidences, rate=rates, active=st.lists(st.booleans(), min_size=R, max_size=R), order=st.permutations(range(R)))
def test_select_prefix_is_algorithm_1(confidence, rate, active, order):
    survival, active, rate, request_id = _survival(confidence), np.array(active), np.array(rate, np.float32), np.array(order, np.int32)
    lengths = SELECT(jnp.asarray(survival), jnp.asarray(active), jnp.asarray(rate), jnp.asarray(request_id))
    assert np.asarray(lengths).tolist() == _algorithm_1(survival, active, rate, request_id)


@pytest.mark.parametrize("name", POLICIES)
@given(confidence=confidences, order=st.permutations(range(R)))
def test_ties_go_by_request_and_not_by_slot(name, confidence, order):
    """[B2] Requests in other slots get the same lengths."""
    survival, index = _survival(confidence), np.array(order, np.int32)
    context = jnp.asarray(10 + index)
    lengths = np.asarray(LENGTHS[name](jnp.asarray(survival), ALL, jnp.arange(10, 10 + R, dtype=jnp.int32), IDS))
    moved = np.asarray(LENGTHS[name](jnp.asarray(survival[index]), ALL, context, jnp.asarray(index)))
    assert moved.tolist() == lengths[index].tolist()


def _optimum(survival: np.ndarray, rate: np.ndarray) -> float:
    """Expected tokens per second of the best of all (G + 1) ** R choices of lengths."""
    gained = np.concatenate([np.zeros((R, 1)), np.cumsum(survival.astype(float), axis=1)], axis=1)
    return max(
        (R + sum(gained[r, n] for r, n in enumerate(lengths))) * rate[R + sum(lengths)]
        for lengths in itertools.product(range(G + 1), repeat=R)
    )


def _achieved(survival: np.ndarray, lengths: np.ndarray, rate: np.ndarray) -> float:
    return float((R + sum(survival[r, :n].astype(float).sum() for r, n in enumerate(lengths))) * rate[R + lengths.sum()])


@given(confidence=confidences, curve=st.sampled_from([STAIRCASE, JAGGED, LINEAR]))
def test_the_best_prefix_of_the_ranking_is_the_best_of_all_lengths(confidence, curve):
    """What the oracle gives, against all 125 choices; Algorithm 1 never beats it, and reaches it where every token costs the same."""
    survival = _survival(confidence)
    rate = curve.steps_per_second(R * (G + 1))
    best, chosen = (np.asarray(select(jnp.asarray(survival), ALL, jnp.asarray(rate), IDS)) for select in (BEST, SELECT))
    optimum = _optimum(survival, rate)
    assert _achieved(survival, best, rate) == pytest.approx(optimum, rel=1e-6)
    assert _achieved(survival, chosen, rate) <= optimum * (1 + 1e-6)
    if curve is LINEAR:
        assert _achieved(survival, chosen, rate) == pytest.approx(optimum, rel=1e-6)


@pytest.mark.parametrize(("curve", "most"), [(LINEAR, 1e-6), (STAIRCASE, 0.25), (JAGGED, 0.25)], ids=["linear", "staircase", "jagged"])
def test_the_gap_of_algorithm_1_to_the_optimum(curve, most, record_property):
    """Mean share of the optimal throughput that the break gives away, over 60 random batches: nothing without steps in the curve."""
    rate = curve.steps_per_second(R * (G + 1))
    gaps = []
    for seed in range(60):
        survival = np.cumprod(np.random.default_rng(seed).uniform(0.3, 1, (R, G)), axis=1).astype(np.float32)
        lengths = np.asarray(SELECT(jnp.asarray(survival), ALL, jnp.asarray(rate), IDS))
        gaps.append(1 - _achieved(survival, lengths, rate) / _optimum(survival, rate))
    record_property("mean_gap", float(np.mean(gaps)))
    record_property("largest_gap", float(np.max(gaps)))
    assert -1e-6 < np.mean(gaps) <= most
    assert (np.mean(gaps) > 1e-3) == (curve is not LINEAR)


def test_an_oracle_given_outcomes_verifies_what_will_be_accepted_and_no_more():
    outcome = np.array([[1, 1, 0, 0], [0, 0, 0, 0], [1, 1, 1, 1]], np.float32)
    cheap = StepCurve(tokens=tuple(range(1, 16)), seconds_per_step=tuple(1 + 0.01 * n for n in range(1, 16)))
    assert np.asarray(jax.jit(Oracle(cheap).lengths)(jnp.asarray(outcome), ALL, CONTEXT, IDS)).tolist() == [2, 0, 4]


def _forecast_stop(survival: np.ndarray, active: np.ndarray, curve: StepCurve, continuation: tuple[float, ...]) -> list[int]:
    """Bucket by bucket down the ranking, each judged by all larger ones."""
    ranked = sorted((-survival[r, k], r, k) for r in range(R) for k in range(G) if active[r])
    live = int(active.sum())
    usual = np.log(np.cumprod(continuation))
    fall = [math.exp(np.interp((place + 0.5) / live - 0.5, np.arange(G), usual)) for place in range(len(ranked))]
    buckets = [(min(bucket - live, len(ranked)), 1 / curve.seconds(bucket)) for bucket in curve.ladder if bucket >= live]
    taken = 0
    for number, (taken, rate) in enumerate(buckets):
        expected = live + sum(-each[0] for each in ranked[:taken])
        promises = []
        for end, rate_there in buckets[number + 1 :]:
            first = -ranked[taken][0] if taken < len(ranked) else 0.0
            forecast = sum(first * fall[place] / fall[taken] for place in range(taken, end))
            promises.append((expected + forecast) * rate_there)
        if not any(promise > expected * rate * (1 + 1e-6) for promise in promises):
            break
    lengths = [0] * R
    for _, row, _ in ranked[:taken]:
        lengths[row] += 1
    return lengths


@given(
    confidence=confidences,
    curve=st.sampled_from([STAIRCASE, JAGGED, LINEAR]),
    active=st.lists(st.booleans(), min_size=R, max_size=R).filter(any).map(np.array),
)
def test_forecast_stop_is_the_sequential_rule(confidence, curve, active):
    survival = _survival(np.array(confidence) * 0.99)
    # An irregular constant keeps throughputs apart by more than rounding.
    continuation = (0.7512, 0.5077, 0.8731, 0.2539)
    lengths = np.asarray(_forecast_lengths(curve, continuation)(jnp.asarray(survival), active, CONTEXT, IDS))
    assert lengths.tolist() == _forecast_stop(survival.astype(float), active, curve, continuation)


@functools.cache
def _forecast_lengths(curve: StepCurve, continuation: tuple[float, ...]):
    return jax.jit(ForecastStop(curve, continuation).lengths)


def _throughput(survival: np.ndarray, curve: StepCurve) -> list[float]:
    return [(1 + survival[:n].sum()) / curve.seconds(1 + n) for n in range(G + 1)]


@pytest.mark.parametrize("curve", [STAIRCASE, JAGGED])
@pytest.mark.parametrize("continuation", [CONTINUATION, (0.9, 0.9, 0.9, 0.9), (0.3, 0.95, 0.9, 0.2), (0.05, 0.1, 0.1, 0.1)])
def test_forecast_stop_finds_the_best_length_where_the_forecast_is_right(curve, continuation):
    """One request whose survival falls as usual; on a staircase too, where Algorithm 1 stops at the first edge."""
    survival = np.cumprod(np.float32(continuation))
    one = jnp.array([True, False, False])
    length = int(_forecast_lengths(curve, continuation)(jnp.tile(jnp.asarray(survival), (R, 1)), one, CONTEXT, IDS)[0])
    throughput = [(1 + survival[:n].sum()) / curve.seconds(1 + n) for n in range(G + 1)]
    assert throughput[length] >= max(throughput) * (1 - 1e-6)


def test_algorithm_1_stops_at_an_edge_that_the_forecast_crosses():
    survival = jnp.tile(jnp.cumprod(jnp.full(G, 0.9))[None], (1, 1))
    one = (jnp.ones(1, bool), jnp.full(1, 10, jnp.int32), jnp.zeros(1, jnp.int32))
    curve = StepCurve(tokens=(1, 5), seconds_per_step=(1.0, 2.0))
    assert int(jax.jit(PrefixSchedule(curve).lengths)(survival, *one)[0]) == 0
    assert int(jax.jit(ForecastStop(curve, (0.9,) * G).lengths)(survival, *one)[0]) == G


def test_survival_threshold_is_cumulative():
    survival = jnp.asarray(np.cumprod(np.array([[0.7, 0.7, 0.5, 0.9]], np.float32), axis=1))
    one = (jnp.ones(1, bool), jnp.full(1, 10, jnp.int32), jnp.zeros(1, jnp.int32))
    assert [int(SurvivalThreshold(t).lengths(survival, *one)[0]) for t in (0.0, 0.2, 0.3, 0.45, 0.6, 0.75)] == [4, 4, 2, 2, 1, 0]


@pytest.mark.parametrize("name", POLICIES)
@given(confidence=confidences, row=st.integers(0, R - 1), k=st.integers(0, G - 1), other=st.lists(eighths, min_size=G, max_size=G))
def test_no_policy_lets_later_confidence_decide(name, confidence, row, k, other):
    """[A6] Changing c_{k+1..} never changes whether draft k (from 0) is verified."""
    before = np.cumprod(np.array(confidence, np.float32), axis=1)
    changed = np.array(confidence, np.float32)
    changed[row, k + 1 :] = other[k + 1 :]
    after = np.cumprod(changed, axis=1)
    lengths = [int(LENGTHS[name](jnp.asarray(each), ALL, CONTEXT, IDS)[row]) for each in (before, after)]
    assert (lengths[0] > k) == (lengths[1] > k)


@pytest.mark.parametrize("name", [name for name in POLICIES if name != "fixed"])
def test_nan_confidence_counts_as_zero_and_idle_rows_get_nothing(name):
    survival = np.full((R, G), 0.9, np.float32)
    with_nan, with_zero = survival.copy(), survival.copy()
    with_nan[1, 1:], with_zero[1, 1:] = np.nan, 0.0
    active = jnp.array([True, True, False])
    lengths = [np.asarray(LENGTHS[name](jnp.asarray(each), active, CONTEXT, IDS)).tolist() for each in (with_nan, with_zero)]
    assert lengths[0] == lengths[1]
    assert lengths[0][2] == 0
    # Forecast stop runs the largest bucket here, and fills it.
    assert lengths[0][1] <= 1 or name == "forecast"


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_runs_on_hopeless_and_on_finished_batches(name):
    """[F4] No confidence at all gives lengths within range; nobody active gives none."""
    hopeless = np.asarray(LENGTHS[name](jnp.zeros((R, G)), ALL, CONTEXT, IDS))
    # Places of a bucket that is paid for are filled even so.
    assert hopeless.tolist() == {"fixed": [2, 2, 2], "top_k": [4, 0, 0], "forecast": [2, 0, 0]}.get(name, [0, 0, 0])
    assert not np.any(np.asarray(LENGTHS[name](jnp.ones((R, G)), ~ALL, CONTEXT, IDS)))


def test_a_capacity_is_never_exceeded():
    """[F2] Beyond the largest bucket the rate is 0, so that the scheduled tokens fit into it."""
    curve = StepCurve(tokens=(3, 7), seconds_per_step=(1.0, 1.02))
    lengths = np.asarray(PrefixSchedule(curve).lengths(jnp.full((R, G), 0.95), ALL, CONTEXT, IDS))
    assert R + lengths.sum() == 7


def test_confidence_threshold_is_per_step():
    """The reference's rule: the third step's own confidence is below 0.6, though the second's product already is."""
    survival = jnp.asarray(np.cumprod(np.array([[0.7, 0.7, 0.5, 0.9]], np.float32), axis=1))
    one = (jnp.ones(1, bool), jnp.full(1, 10, jnp.int32), jnp.zeros(1, jnp.int32))
    assert [int(ConfidenceThreshold(t).lengths(survival, *one)[0]) for t in (0.0, 0.45, 0.6, 0.75)] == [4, 4, 2, 0]


def test_falling_rates_trim_and_rising_ones_verify_everything():
    """[F1] A curve that falls steeply trims, one that hardly costs anything does not."""
    survival = jnp.asarray(np.tile(np.cumprod(np.full(G, 0.6, np.float32)), (R, 1)))
    steep = StepCurve(tokens=tuple(range(1, 16)), seconds_per_step=tuple(float(n) for n in range(1, 16)))
    cheap = StepCurve(tokens=tuple(range(1, 16)), seconds_per_step=tuple(1 + 0.001 * n for n in range(1, 16)), draft_seconds=1.0)
    assert not np.any(np.asarray(PrefixSchedule(steep).lengths(survival, ALL, CONTEXT, IDS)))
    with pytest.warns(FlatCurveWarning):
        flat = StepCurve(tokens=(3, 15), seconds_per_step=(1.0, 1.0))
    for curve in (cheap, flat):
        assert np.all(np.asarray(PrefixSchedule(curve).lengths(survival, ALL, CONTEXT, IDS)) == G)


def test_the_default_changes_with_the_batch_and_refuses_what_it_cannot_serve():
    large = StepCurve(tokens=(128, 640), seconds_per_step=(1.0, 2.0))
    assert isinstance(default_schedule(STAIRCASE, CONTINUATION, 1)[0], ForecastStop)
    undrafted = StepCurve((128,), (0.9,), draft_seconds=0.01)
    policy, planner = default_schedule(large, CONTINUATION, 128, undrafted)
    assert isinstance(policy, CapacityTopK) and planner.constants == policy.constants == tuple(np.cumprod(CONTINUATION).tolist())
    assert planner.undrafted == undrafted
    for arguments, message in (
        ((STAIRCASE, CONTINUATION, 0), "num_rows is 0"),
        ((STAIRCASE, CONTINUATION, 16), "curve has no bucket for num_rows 16; its largest is 15"),
        ((STAIRCASE, (1.2, 0.5), 1), r"continuation is \(1.2, 0.5\)"),
        ((STAIRCASE, (), 1), r"continuation is \(\)"),
    ):
        with pytest.raises(ValueError, match=message):
            default_schedule(*arguments)


def test_bad_policies_are_refused():
    with pytest.raises(ValueError, match="length is -1"):
        FixedLength(-1)
    with pytest.raises(ValueError, match="threshold is 1.5"):
        ConfidenceThreshold(1.5)
    with pytest.raises(ValueError, match="threshold is -0.5"):
        SurvivalThreshold(-0.5)
    with pytest.raises(ValueError, match="continuation is"):
        ForecastStop(STAIRCASE, (0.5, 1.5))
    with pytest.raises(ValueError, match="continuation has 2 entries"):
        ForecastStop(STAIRCASE, (0.5, 0.5)).lengths(jnp.ones((R, G)), ALL, CONTEXT, IDS)
    with pytest.raises(ValueError, match="steps_per_second has 3 entries"):
        select_prefix(jnp.ones((R, G)), ALL, jnp.ones(3))
