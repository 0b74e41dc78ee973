"""Cost curves: what was measured, what is decided on where it is not monotone, and the length of the context as a second input."""

import json
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark_jax.schedule import FlatCurveWarning, ForecastStop, NonMonotoneCurveWarning, PrefixSchedule, StepCurve
from dspark_jax.step_curve import curve_from_dict, curve_to_dict, mean_context

STAIRCASE = StepCurve(tokens=(1, 5, 8, 15), seconds_per_step=(0.029, 0.042, 0.051, 0.08), draft_seconds=0.007)
# At a context of 1,000 the second draft of two requests costs more than it brings, at 100 it does not.
LONG = StepCurve(
    tokens=(2, 4, 6),
    seconds_per_step=(1.0, 1.1, 1.2),
    draft_seconds=0.5,
    context=100,
    longer=((500, (1.2, 1.5, 2.0)), (1000, (1.5, 3.0, 6.0))),
)


def test_the_cost_of_a_round_is_that_of_its_bucket():
    assert [round(STAIRCASE.seconds(n), 3) for n in (0, 1, 2, 5, 6, 8, 15)] == [0.036, 0.036, 0.049, 0.049, 0.058, 0.058, 0.087]
    assert STAIRCASE.seconds(16) == math.inf
    assert STAIRCASE.steps_per_second(16)[16] == 0
    assert hash(STAIRCASE) == hash(StepCurve(STAIRCASE.tokens, STAIRCASE.seconds_per_step, STAIRCASE.draft_seconds))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((), ()), "tokens is empty"),
        (((1, 2), (1.0,)), "seconds_per_step has 1 values"),
        (((2, 1), (1.0, 2.0)), "ascending"),
        (((0, 1), (1.0, 2.0)), "positive bucket"),
        (((1, 2), (1.0, 0.0)), "positive numbers"),
        (((1, 2), (1.0, math.nan)), "positive numbers"),
        (((1, 2), (1.0, 2.0), -1.0), "draft_seconds is -1"),
        (((1, 2), (1.0, 2.0), 0.0, 100, ((50, (1.0, 2.0)),)), "ascending order"),
        (((1, 2), (1.0, 2.0), 0.0, -1), "lengths from 0 on"),
        (((1, 2), (1.0, 2.0), 0.0, 100, ((200, (1.0,)),)), "longer at context 200 has 1 values"),
    ],
)
def test_a_bad_curve_is_refused(arguments, message):
    """[F1] A missing or meaningless table is an error."""
    with pytest.raises(ValueError, match=message):
        StepCurve(*arguments)


def test_a_cheaper_larger_bucket_is_used_and_said():
    """Costs stay as measured; decisions take the cheapest bucket that holds the tokens, and the ladder holds those buckets alone."""
    with pytest.warns(NonMonotoneCurveWarning, match="falls behind 2, 9 tokens"):
        curve = StepCurve(tokens=(1, 2, 3, 9, 15), seconds_per_step=(1.0, 1.75, 1.25, 4.0, 3.0))
    assert curve.seconds_per_step == (1.0, 1.75, 1.25, 4.0, 3.0)
    assert [curve.seconds(n) for n in (1, 2, 3, 4, 15)] == [1.0, 1.25, 1.25, 3.0, 3.0]
    assert [curve.bucket(n) for n in (1, 2, 3, 4, 15, 16)] == [1, 3, 3, 15, 15, None]
    assert curve.ladder == (1, 3, 15)
    assert np.all(np.diff(curve.steps_per_second(20)) <= 0)


costs = st.lists(st.integers(1, 20).map(lambda value: value / 8), min_size=4, max_size=4).map(tuple)


@pytest.mark.filterwarnings("ignore::dspark_jax.step_curve.CurveWarning")
@given(costs=costs)
def test_the_smallest_bucket_of_the_ladder_is_what_was_decided_on(costs):
    curve = StepCurve(tokens=(1, 3, 4, 8), seconds_per_step=costs)
    for num_tokens in range(9):
        smallest = next(bucket for bucket in curve.ladder if bucket >= num_tokens)
        assert curve.seconds_per_step[curve.tokens.index(smallest)] == curve.seconds(num_tokens)
        assert curve.seconds(num_tokens) == min(cost for bucket, cost in zip(curve.tokens, costs, strict=True) if bucket >= num_tokens)


def test_costs_between_two_contexts_are_interpolated_and_beyond_them_kept():
    assert [LONG.seconds(4, context) for context in (0, 100, 300, 500, 750, 1000, 5000)] == pytest.approx(
        [1.6, 1.6, 1.8, 2.0, 2.75, 3.5, 3.5]
    )
    assert LONG.seconds(4) == LONG.seconds(4, 100)
    assert LONG.seconds(7, 700) == math.inf


def test_rates_on_the_device_are_those_of_the_host():
    contexts = np.array([0, 100, 137, 300, 500, 901, 1000, 5000], np.float32)
    expected = np.stack([LONG.steps_per_second(8, float(context)) for context in contexts])
    np.testing.assert_allclose(np.asarray(jax.jit(lambda at: LONG.rates(8, at))(jnp.asarray(contexts))), expected, rtol=1e-5)
    assert np.array_equal(np.asarray(STAIRCASE.rates(16, jnp.zeros(()))), STAIRCASE.steps_per_second(16))


def test_a_larger_bucket_that_is_cheaper_at_some_contexts_stays_in_the_ladder():
    with pytest.warns(NonMonotoneCurveWarning, match="behind 2 tokens"):
        curve = StepCurve(tokens=(1, 2, 4), seconds_per_step=(1.0, 1.2, 1.5), context=10, longer=((20, (1.0, 2.0, 1.5)),))
    assert curve.ladder == (1, 2, 4)
    assert (curve.bucket(2, 10), curve.bucket(2, 20)) == (2, 4)
    assert float(jax.jit(lambda at: curve.rates(2, at))(jnp.float32(20))[2]) == pytest.approx(1 / 1.5)


def test_a_curve_that_is_flat_at_short_contexts_alone_is_no_flat_curve(recwarn):
    StepCurve(tokens=(1, 4), seconds_per_step=(1.0, 1.0), context=10, longer=((1000, (1.0, 2.0)),))
    assert not [warning for warning in recwarn if issubclass(warning.category, FlatCurveWarning)]


def test_a_batch_is_judged_at_the_mean_context_of_its_active_requests():
    context, active = jnp.array([10, 99, 30], jnp.int32), jnp.array([True, False, True])
    assert float(mean_context(context, active)) == 20
    assert float(mean_context(context, jnp.zeros(3, bool))) == 0
    lengths = jax.jit(PrefixSchedule(LONG).lengths)
    survival, ids, both = jnp.full((2, 2), 0.8), jnp.arange(2, dtype=jnp.int32), jnp.ones(2, bool)
    total = [
        int(lengths(survival, both, jnp.array(contexts, jnp.int32), ids).sum()) for contexts in ([100, 100], [1000, 1000], [100, 1900])
    ]
    assert total == [4, 0, 0]


def test_a_request_in_a_batch_of_its_own_is_judged_at_its_context():
    curve = StepCurve(tokens=(1, 2, 3), seconds_per_step=(1.0, 1.1, 1.2), context=100, longer=((1000, (1.0, 2.5, 4.0)),))
    lengths = jax.jit(ForecastStop(curve, (0.8, 0.8)).lengths)
    survival, one = jnp.array([[0.8, 0.64]]), jnp.ones(1, bool)
    found = [int(lengths(survival, one, jnp.array([context], jnp.int32), jnp.zeros(1, jnp.int32))[0]) for context in (100, 1000)]
    assert found == [2, 0]


@pytest.mark.parametrize("curve", [STAIRCASE, LONG])
def test_a_curve_comes_back_from_json(curve):
    assert curve_from_dict(json.loads(json.dumps(curve_to_dict(curve)))) == curve


def test_what_a_curve_may_leave_out_may_be_left_out():
    assert curve_from_dict({"tokens": [1, 2], "seconds_per_step": [1, 2.5]}) == StepCurve((1, 2), (1.0, 2.5))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ([], r"curve is \[\]"),
        ({"tokens": [1]}, "seconds_per_step is missing"),
        ({"seconds_per_step": [1.0]}, "tokens is missing"),
        ({"tokens": [1, 2], "seconds_per_step": [1.0, 2.0], "colour": 1}, "colour is no field of a cost curve; allowed: tokens"),
        ({"tokens": 1, "seconds_per_step": [1.0]}, "tokens is 1; allowed is a list"),
        ({"tokens": [1.5], "seconds_per_step": [1.0]}, "tokens has 1.5; allowed are whole numbers"),
        ({"tokens": [True], "seconds_per_step": [1.0]}, "tokens has True"),
        ({"tokens": [1, 2], "seconds_per_step": [1.0, "2"]}, "seconds_per_step has '2'; allowed are numbers"),
        ({"tokens": [1, 2], "seconds_per_step": [1.0, 2.0], "draft_seconds": None}, "draft_seconds has None"),
        ({"tokens": [1, 2], "seconds_per_step": [1.0, 2.0], "context": "long"}, "context has 'long'"),
        ({"tokens": [1, 2], "seconds_per_step": [1.0, 2.0], "longer": [[1, [1.0, 2.0], 3]]}, "longer is .*; allowed are pairs"),
        ({"tokens": [1, 2], "seconds_per_step": [1.0, 2.0], "longer": [["x", [1.0, 2.0]]]}, "longer has 'x'"),
        ({"tokens": [1, 2], "seconds_per_step": [1.0, 2.0], "longer": [[9, [1.0, None]]]}, "longer at context 9 has None"),
        ({"tokens": [1, 2], "seconds_per_step": [1.0]}, "seconds_per_step has 1 values"),
    ],
)
def test_a_bad_record_of_a_curve_is_refused(content, message):
    """[F1]"""
    with pytest.raises(ValueError, match=message):
        curve_from_dict(content)
