"""Errors of the device: they end the requests that they concern, and the others answer as though nothing had been."""

import time

import numpy as np
import pytest

from tests.scripted_slots import expected, prompt, scripted_engine
from tests.toy_engine import run_until_idle

SCRIPT = np.random.default_rng(0).integers(1, 200, (8, 11)).tolist()
BUDGET = 23


def _serve(errors, count=5, length=9):
    engine, slots = scripted_engine(SCRIPT)
    slots.errors = errors
    handles = [engine.submit(prompt(number, length), max_new_tokens=BUDGET) for number in range(count)]
    run_until_idle(engine, 2000)
    return engine, handles


def _assert_answered(handles):
    for number, handle in handles:
        assert handle.completion.reason == "budget", handle.completion
        assert handle.completion.ids == expected(SCRIPT, number, BUDGET)


@pytest.mark.parametrize("where", ["insert", "resize", "launch", "round"])
@pytest.mark.parametrize("times", [1, 2])
def test_an_error_that_passes_costs_nobody_a_token(where, times):
    """Everybody is prefilled again from the tokens that were seen, and goes on."""
    engine, handles = _serve({(where, None): times})
    _assert_answered(enumerate(handles))
    assert 1 <= engine.metrics.recoveries <= times and engine.metrics.finished["error"] == 0


def test_rounds_go_on_counting_behind_an_error():
    """What random bits are made from is the request's own round, so that a request that goes on answers as if nothing had happened."""
    undisturbed, _ = scripted_engine(SCRIPT)
    plain = undisturbed.submit(prompt(0), max_new_tokens=BUDGET).result()
    engine, slots = scripted_engine(SCRIPT)
    handle = engine.submit(prompt(0), max_new_tokens=BUDGET)
    while len(handle.ids) < 8:
        engine.step()
    slots.errors = {("round", handle.request_id): 1}
    disturbed = handle.result()
    assert disturbed.ids == plain.ids and engine.metrics.recoveries == 1
    # The script gives as many tokens in a round as the request's id and round counter say.
    assert disturbed.metrics.rounds == plain.metrics.rounds


@pytest.mark.parametrize("where", ["read", "begin", "first", "insert", "launch", "round"])
def test_who_always_fails_ends_with_the_error_and_nobody_else_does(where):
    """Of a failed round it is not known whose it is: who fails alone is the one. Requests are numbered from 1."""
    _, handles = _serve({(where, 3): 10**6})
    assert handles[2].completion.reason == "error" and f"{where} of 3 failed" in handles[2].completion.error
    _assert_answered([(number, handle) for number, handle in enumerate(handles) if number != 2])


def test_a_shape_that_can_never_be_had_ends_those_who_need_it():
    """No room for more slots, say: short requests are served one by one in the smallest batch, long ones end."""
    engine, slots = scripted_engine(SCRIPT)
    slots.errors = {("resize", None): 10**6}
    handles = [engine.submit(prompt(number, 4 + 60 * (number == 1)), max_new_tokens=BUDGET) for number in range(4)]
    run_until_idle(engine, 2000)
    assert handles[1].completion.reason == "error" and "resize" in handles[1].completion.error
    _assert_answered([(number, handle) for number, handle in enumerate(handles) if number != 1])


def test_nothing_that_works_ends_everybody_in_the_end():
    engine, handles = _serve({("launch", None): 10**6})
    assert {handle.completion.reason for handle in handles} == {"error"} and engine.idle


def test_an_interrupt_costs_no_token():
    """Ctrl-C while waiting, wherever the loop is: whoever waits again gets the whole answer, and nothing twice."""
    for where in ("_look_at", "_launch", "_place", "_read"):
        engine, _ = scripted_engine(SCRIPT)
        handle = engine.submit(prompt(0), max_new_tokens=BUDGET)
        while len(handle.ids) < 8:
            engine.step()
        original = getattr(engine, where)

        def interrupted(*args, original=original):
            original(*args)
            raise KeyboardInterrupt

        setattr(engine, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            handle.result()
        setattr(engine, where, original)
        assert handle.result().ids == expected(SCRIPT, 0, BUDGET), where


def test_a_device_that_is_gone_ends_everybody_with_the_error():
    engine, slots = scripted_engine(SCRIPT)
    handles = [engine.submit(prompt(number), max_new_tokens=BUDGET) for number in range(5)]
    slots.errors = {("launch", None): 1, ("reset", None): 1}
    with pytest.raises(RuntimeError, match="reset of None failed"):
        run_until_idle(engine)
    assert [handle.completion.reason for handle in handles] == ["error"] * 5 and engine.idle
    assert engine.submit(prompt(6), max_new_tokens=3).result().ids == expected(SCRIPT, 6, 3)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_thread_that_died_leaves_nobody_waiting():
    engine, slots = scripted_engine(SCRIPT)
    with engine:
        slots.errors = {("launch", None): 1, ("reset", None): 1}
        assert engine.submit(prompt(1), max_new_tokens=BUDGET).result(timeout=60).reason == "error"
        while engine._is_served():
            time.sleep(0.001)
        # Nobody serves any more: who waits does it.
        assert engine.submit(prompt(2), max_new_tokens=5).result(timeout=60).ids == expected(SCRIPT, 2, 5)
    with engine:
        assert engine.submit(prompt(3), max_new_tokens=5).result(timeout=60).ids == expected(SCRIPT, 3, 5)


def test_errors_at_random_lose_nothing():
    rng = np.random.default_rng(1)
    engine, slots = scripted_engine(SCRIPT)
    handles = []
    for step in range(3000):
        if step < 1000 and rng.random() < 0.2:
            handles.append((number := int(rng.integers(8)), engine.submit(prompt(number, int(rng.integers(2, 12))), max_new_tokens=BUDGET)))
        if rng.random() < 0.02:
            slots.errors = {(str(rng.choice(["insert", "launch", "round", "resize"])), None): 1}
        engine.step()
    slots.errors = {}
    run_until_idle(engine)
    failed = [handle for _, handle in handles if handle.completion.reason == "error"]
    # Two errors in a row that meet a request alone look like its own.
    assert len(failed) <= len(handles) // 20 and engine.metrics.recoveries > 10
    _assert_answered([(number, handle) for number, handle in handles if handle not in failed])
