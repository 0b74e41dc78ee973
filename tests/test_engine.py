"""The engine on a toy target: the same tokens as alone, the target's law under a schedule, nothing lost, nothing compiled again."""

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2, ncx2

from dspark_jax.calibrate import RawSurvival, TemperatureScaled
from dspark_jax.calibration_online import OnlineCalibration
from dspark_jax.engine import Engine
from dspark_jax.engine_config import EngineBusy, EngineConfig
from dspark_jax.protocols import DraftBlock
from dspark_jax.requests import FINISH_REASONS, RequestOptions
from dspark_jax.round_plans import FirstPositions
from dspark_jax.schedule import FixedLength, PrefixSchedule, StepCurve
from dspark_jax.slot_executor import BatchShape
from experiments.answers import Ask
from experiments.served_answers import served
from tests.toy_drafter import VOCAB
from tests.toy_engine import CONFIG, SLOTS, ConfidentDrafter, ToyServing, run_until_idle, toy_params

CURVE = StepCurve(tokens=(2, 4, 6, 12, 24), seconds_per_step=(1.0, 1.1, 1.4, 2.5, 4.5), draft_seconds=0.3)
SMOOTH = StepCurve(tokens=tuple(range(1, 25)), seconds_per_step=tuple(1 + 0.1 * size for size in range(1, 25)))


@pytest.fixture(scope="module")
def fixed():
    """Fixed lengths, and a calibration that learns meanwhile."""
    return ToyServing(FixedLength(2), calibration=OnlineCalibration.create(RawSurvival(), [(0.6, 0.5, 0.5)], prior_rounds=1.0))


def _mixed_requests(rng, count):
    """Prompts and options of all kinds; those of every fourth request are as long as the cache allows."""
    for number in range(count):
        length = int(rng.integers(1, 12))
        budget = SLOTS - length if number % 4 == 0 else int(rng.integers(1, 12))
        yield (
            tuple(rng.integers(0, VOCAB, length).tolist()),
            RequestOptions(
                max_new_tokens=budget,
                temperature=float(rng.choice([0.0, 0.7, 1.0])),
                top_k=int(rng.choice([0, 3])),
                top_p=float(rng.choice([1.0, 0.8])),
                seed=None if number % 3 else int(rng.integers(0, 2**40)),
                stop_ids=tuple(rng.integers(0, VOCAB, int(rng.integers(0, 3))).tolist()) if number % 2 else (),
            ),
        )


def _serve_at_random(engine, rng, count, now):
    """`count` mixed requests arrive, and some are cancelled or late, while the engine steps; gives all handles once it is idle."""
    requests, handles = list(_mixed_requests(rng, count)), []
    while requests or not engine.idle:
        for _ in range(min(int(rng.poisson(1.0)), len(requests))):
            prompt, options = requests.pop()
            deadline = None if rng.random() < 0.9 else float(rng.uniform(0.5, 30))
            handles.append(engine.submit(prompt, options, deadline=deadline))
        if handles and rng.random() < 0.1:
            handles[int(rng.integers(len(handles)))].cancel()
        now[0] += 1.0
        engine.step()
    return handles


def _require_nothing_left(engine, count):
    metrics, state = engine.metrics, engine._executor._state
    assert (metrics.waiting, metrics.reading, metrics.decoding) == (0, 0, 0)
    assert metrics.submitted == count == sum(metrics.finished.values())
    assert engine._rows == [None] * engine._executor.shape.rows and not engine._in_flight
    assert np.asarray(state.finished | (state.request_id == -3)).all()


def test_a_request_has_the_tokens_it_has_alone(fixed):
    """[B2] Whenever it arrives, wherever it sits, whoever sits beside it: at any temperature, under a policy of fixed lengths."""
    rng = np.random.default_rng(0)
    requests = list(_mixed_requests(rng, 16))
    engine, handles = fixed.engine(), []
    for number, (prompt, options) in enumerate(requests):
        handles.append(engine.submit(prompt, options))
        for _ in range(number % 5):
            engine.step()
    run_until_idle(engine)
    for handle, (prompt, options) in zip(handles, requests, strict=True):
        assert handle.completion.ids == fixed.alone(prompt, options, handle.request_id), options
        assert handle.completion.reason == ("stop_id" if handle.ids[-1] in options.stop_ids else "budget")


def test_a_seed_gives_the_same_answer_again(fixed):
    engine = fixed.engine()
    options = RequestOptions(max_new_tokens=20, temperature=1.0, seed=7)
    first, other, again = (engine.submit([1, 2], options, seed=seed).result().ids for seed in (7, 8, 7))
    assert first == again != other


def test_a_seed_of_one_s_own_shares_no_bits_with_requests_that_have_none(fixed):
    """Not even the engine's own seed, by which the others are told apart by their numbers."""
    engine = fixed.engine()
    handles = [engine.submit([1, 2], max_new_tokens=30, temperature=1.0, seed=seed) for seed in (None, CONFIG.seed, None, 1)]
    assert len({handle.result().ids for handle in handles}) == 4


def test_texts_to_train_on_are_the_same_in_any_order_and_behind_any_interruption(fixed):
    """What `experiments.regenerate` asks the engine for; who stops listening leaves nothing behind."""
    engine, rng = fixed.engine(), np.random.default_rng(3)
    asks = [Ask(tuple(rng.integers(0, VOCAB, size).tolist()), size % 2, 12, seed=size) for size in range(1, 21)]
    whole = dict(served(lambda: engine, asks, stop_ids=(0,), top_p=0.9, rows=3))
    assert sorted(whole) == list(range(20)) and engine.idle
    assert all(ids[-1] == 0 or len(ids) == 12 for ids in whole.values())
    backwards = dict(served(lambda: engine, asks[::-1], stop_ids=(0,), top_p=0.9, rows=3))
    assert {19 - number: ids for number, ids in backwards.items()} == whole
    interrupted = served(lambda: engine, asks, stop_ids=(0,), top_p=0.9, rows=3)
    assert all(whole[number] == ids for number, ids in itertools.islice(interrupted, 2))
    interrupted.close()
    assert engine.idle and engine.metrics.finished["cancelled"] > 0


def _law(params, prompt_token: int, length: int) -> np.ndarray:
    """The chance of every text of `length` tokens behind a prompt of one token, [V, ..., V]."""
    table = np.asarray(jax.nn.softmax(params.target["table"], axis=-1), np.float64)
    law = table[0, prompt_token]
    for position in range(1, length):
        law = law[..., None] * table[position % 2]
    return law


@pytest.mark.parametrize("leaks", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_answers_under_a_schedule_have_the_target_s_law(leaks):
    """[A6] Algorithm 1 over whoever is in the batch: the first three tokens of 4,000 answers, by Pearson's test at a level of 1e-4.

    A tenth of the mass moved to other texts would be seen with a chance above 0.999. A drafter whose confidence in a draft betrays the
    draft makes the same engine fail the test.
    """
    config = dataclasses.replace(CONFIG, row_ladder=(6,), slot_ladder=(16,))
    engine = ToyServing(PrefixSchedule(SMOOTH), ConfidentDrafter(leaks=leaks), config).engine()
    number, length = 4000, 3
    handles = [engine.submit([1], max_new_tokens=length + 2, temperature=1.0) for _ in range(number)]
    run_until_idle(engine)
    counts = np.zeros((VOCAB,) * length)
    for handle in handles:
        counts[handle.ids[:length]] += 1
    verified = [record.verified for record in engine.metrics.latest]
    assert min(verified) < max(verified) and 0 < np.mean(verified) < 15, "the schedule decides"
    law = _law(toy_params()[1], 1, length)
    expected = number * law
    value, threshold = ((counts - expected) ** 2 / expected).sum(), chi2.isf(1e-4, law.size - 1)
    if leaks:
        assert value > threshold
        return
    assert value < threshold, f"{value:.0f} against {threshold:.0f}"
    moved = 0.9 * law + 0.1 * np.roll(law, 1, axis=-1)
    assert ncx2.sf(threshold, law.size - 1, (number * (moved - law) ** 2 / law).sum()) > 0.999


def test_the_default_schedule_drafts_or_not_and_greedy_text_stays_the_same():
    """Forecast stop with its planner, and shorter blocks for more requests: what is deferred and remembered moves along with the rows."""
    config = dataclasses.replace(CONFIG, slot_ladder=(SLOTS,))
    # With two requests a draft is worth its time, with six it is not.
    drafters = {2: ConfidentDrafter(), 6: ConfidentDrafter(block_size=2)}
    serving = ToyServing(None, drafters, config, CURVE, continuation=(0.6, 0.5, 0.5))
    engine, rng, handles = serving.engine(), np.random.default_rng(3), []
    for number in range(24):
        prompt = tuple(rng.integers(0, VOCAB, int(rng.integers(1, 9))).tolist())
        handles.append((prompt, engine.submit(prompt, max_new_tokens=int(rng.integers(1, 30)))))
        for _ in range(number % 4):
            engine.step()
    run_until_idle(engine)
    for prompt, handle in handles:
        assert handle.completion.ids == serving.alone(prompt, RequestOptions(max_new_tokens=len(handle.ids)))
    records = engine.metrics.latest
    assert {record.drafted for record in records} == {False, True} and {record.rows for record in records} == {2, 6}
    assert all(record.bucket == record.rows and not record.verified for record in records if not record.drafted)
    assert all(record.predicted_seconds > 0 for record in records)
    assert serving.plans[6].ladder[-1] >= 18 > 12 and serving.plans[6].plan.block_size == 2
    # Rounds without drafts, with few and with many verified ones, under a random load: nothing stalls, nothing leaks.
    now = [0.0]
    engine = serving.engine(clock=lambda: now[0])
    reasons = {handle.completion.reason for handle in _serve_at_random(engine, rng, 600, now)}
    assert {"budget", "cancelled"} <= reasons and "error" not in reasons
    _require_nothing_left(engine, 600)
    assert {(record.drafted, record.verified == 0) for record in engine.metrics.latest} >= {(False, True), (True, False)}


def test_no_commit_is_lost_where_blocks_become_shorter():
    """The drafter is told every position, whatever was deferred when the rows changed: it counts what the text has, but for the anchor."""
    config = dataclasses.replace(CONFIG, slot_ladder=(SLOTS,))
    drafters = {2: ConfidentDrafter(), 6: ConfidentDrafter(block_size=1)}
    never = StepCurve(tokens=(8, 12), seconds_per_step=(1.0, 1.02), draft_seconds=9.0)
    serving = ToyServing(None, drafters, config, never, continuation=(0.6, 0.5, 0.5))
    engine = serving.engine()
    handles = [engine.submit([1, 2], max_new_tokens=40) for _ in range(2)]
    while min(len(handle.ids) for handle in handles) < 4:
        engine.step()
    handles += [engine.submit([1, 2], max_new_tokens=30) for _ in range(4)]
    while engine.metrics.latest[-1].rows != 6 or min(len(handle.ids) for handle in handles) < 6:
        engine.step()
    state = serving.slots._state
    told = np.asarray(state.drafter_state.length) + np.asarray(state.deferred.count)
    np.testing.assert_array_equal(told, np.asarray(state.length) - 1)
    assert state.deferred.next_ids.shape == (6, 4)
    run_until_idle(engine)
    assert {handle.completion.ids[:30] for handle in handles} == {serving.alone((1, 2), RequestOptions(max_new_tokens=30))}


def test_shorter_blocks_have_the_survival_of_their_positions():
    zeros = jnp.zeros((2, 2))
    block = DraftBlock(zeros.astype(jnp.int32), zeros, zeros, zeros, jnp.array([[1.0, -1.0], [0.0, 2.0]]), None)
    model = TemperatureScaled((1.0, 2.0, 4.0))
    found = FirstPositions(model, 3).survival(block, jnp.zeros(2))
    expected = np.cumprod(1 / (1 + np.exp(-np.array([[1.0, -0.5], [0.0, 1.0]]))), axis=1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_thousands_of_requests_leave_nothing_behind(fixed):
    """Random arrivals, cancellations and deadlines: each ends with a reason, every row is free again, and nothing is compiled."""
    rng = np.random.default_rng(1)
    now = [0.0]
    engine, compiled = fixed.engine(clock=lambda: now[0]), []

    def listen(event: str, duration_secs: float, **kwargs: str | int) -> None:
        if "backend_compile" in event:
            compiled.append(event)

    jax.monitoring.register_event_duration_secs_listener(listen)
    try:
        handles = _serve_at_random(engine, rng, 2000, now)
    finally:
        jax.monitoring.clear_event_listeners()
    assert not compiled
    reasons = [handle.completion.reason for handle in handles]
    assert len(reasons) == 2000 and {"stop_id", "budget", "cancelled", "deadline"} == set(reasons) <= set(FINISH_REASONS)
    for handle in handles:
        assert handle.ids == handle.completion.ids
        if handle.completion.reason in ("stop_id", "budget"):
            assert handle.ids
    _require_nothing_left(engine, 2000)


def test_a_budget_may_end_anywhere_in_a_block_and_a_stop_token_too(fixed):
    engine = fixed.engine()
    whole = fixed.alone((3, 1), RequestOptions(max_new_tokens=12))
    handles = [engine.submit((3, 1), max_new_tokens=budget) for budget in range(1, 13)]
    handles += [engine.submit((3, 1), max_new_tokens=12, stop_ids=(token,)) for token in set(whole)]
    run_until_idle(engine)
    for budget, handle in enumerate(handles[:12], start=1):
        assert handle.completion.ids == whole[:budget] and handle.completion.reason == "budget"
    for token, handle in zip(set(whole), handles[12:], strict=True):
        assert handle.completion.ids == whole[: whole.index(token) + 1] and handle.completion.reason == "stop_id"


def test_the_target_runs_on_the_scheduled_tokens_up_to_the_bucket(fixed):
    """[F2] [F4] Flat tokens of every pass are the smallest bucket that holds an anchor and the verified drafts of each request."""
    engine = fixed.engine()
    engine.submit([1], max_new_tokens=5).result()
    for prompt, options in _mixed_requests(np.random.default_rng(2), 12):
        engine.submit(prompt, options)
    run_until_idle(engine)
    records = list(engine.metrics.latest)
    for record in records:
        ladder = fixed.plans[record.rows].ladder
        assert record.active <= record.rows and record.verified <= 2 * record.active
        assert record.bucket == min(size for size in ladder if size >= record.active + record.verified)
    assert engine.metrics.pass_tokens == sum(record.bucket for record in records)
    learned = fixed.slots._state.calibration
    assert 0 < float(learned.accepted.sum()) < float(learned.reached.sum())
    assert {record.rows for record in records} == {2, 6} and {record.slots for record in records} == {16, 48}


def test_the_host_launches_a_round_before_it_has_seen_the_last_one(fixed):
    """Rounds up to t - 2 are all that the host knows when it launches round t."""
    seen, launched, gaps = [0], [0], []

    class Watched:
        def __getattr__(self, name):
            return getattr(fixed.slots, name)

        def launch(self, release):
            gaps.append(launched[0] - seen[0])
            launched[0] += 1
            ticket = fixed.slots.launch(release)

            class Ticket:
                def get(self):
                    seen[0] += 1
                    return ticket.get()

            return Ticket()

    engine = fixed.engine(Watched())
    engine.submit([1, 2, 3], max_new_tokens=40)
    run_until_idle(engine)
    assert gaps[0] == 0 and set(gaps[1:]) == {1}


@pytest.mark.parametrize(
    ("prompt", "fields", "message"),
    [
        ([], {}, "prompt is empty"),
        ([VOCAB], {}, f"prompt holds {VOCAB}; token ids of this target lie in 0..{VOCAB - 1}"),
        ([1], {"max_new_tokens": 0}, "max_new_tokens is 0"),
        ([1], {"max_new_tokens": SLOTS}, f"= {SLOTS + 1}, and the engine has room for {SLOTS}"),
        ([1], {"stop_ids": (1, 2, 3)}, "stop_ids has 3 tokens; the engine's num_stop_ids allows 2"),
        ([1], {"stop_ids": (-1,)}, "stop_ids holds -1"),
        ([1], {"temperature": -1.0}, "temperature"),
        ([1], {"top_p": 0.0}, "top_p"),
        ([1], {"seed": -1}, "seed is -1"),
        ([1], {"deadline": 0.0}, "deadline is 0.0"),
        ([1], {"stop_texts": ("end",)}, "no tokenizer"),
        ([1], {"stop_texts": ("",)}, "stop_texts holds an empty text"),
        ("why?", {}, "no tokenizer"),
        (7, {}, "prompt is 7"),
        ([1.5], {}, "prompt has 1.5; allowed are integers"),
        ([1], {"max_new_tokens": 5.5}, "max_new_tokens has 5.5; allowed are integers"),
        ([1], {"seed": 1.5}, "seed has 1.5"),
        ([1], {"top_k": 2**40}, "top_k is 1099511627776"),
        ([1], {"stop_ids": 5}, "stop_ids is 5; allowed is a sequence of integers"),
    ],
)
def test_bad_requests_are_refused_and_disturb_nobody(fixed, prompt, fields, message):
    engine = fixed.engine()
    other = engine.submit([2, 1], max_new_tokens=9)
    engine.step()
    with pytest.raises(ValueError, match=message):
        engine.submit(prompt, **{"max_new_tokens": 5} | fields)
    assert other.result().ids == fixed.alone((2, 1), RequestOptions(max_new_tokens=9)) and engine.metrics.refused == 1


def test_penalties_and_the_like_are_unknown_fields(fixed):
    with pytest.raises(TypeError, match="repetition_penalty"):
        fixed.engine().submit([1], repetition_penalty=1.1)


def test_a_full_queue_refuses_and_takes_again(fixed):
    engine = fixed.engine(queue_limit=3)
    handles = [engine.submit([1], max_new_tokens=2) for _ in range(3)]
    with pytest.raises(EngineBusy, match="3 requests are waiting"):
        engine.submit([1], max_new_tokens=2)
    handles[0].result()
    assert engine.submit([1], max_new_tokens=2).result().reason == "budget"


def test_cancelling_ends_a_request_with_what_it_has(fixed):
    engine = fixed.engine()
    long, waiting = engine.submit([1], max_new_tokens=40), engine.submit([2], max_new_tokens=40)
    waiting.cancel()
    while len(long.ids) < 5:
        engine.step()
    long.cancel()
    long.cancel()
    run_until_idle(engine)
    assert long.completion.reason == waiting.completion.reason == "cancelled"
    assert 5 <= len(long.ids) < 40 and long.ids == fixed.alone((1,), RequestOptions(max_new_tokens=40))[: len(long.ids)]
    assert waiting.ids == ()


def test_a_deadline_counts_from_the_submission(fixed):
    now = [0.0]
    engine = fixed.engine(clock=lambda: now[0])
    handle = engine.submit([1], max_new_tokens=40, deadline=2.5)
    for _ in range(8):
        engine.step()
        now[0] += 1.0
    run_until_idle(engine)
    assert handle.completion.reason == "deadline" and handle.completion.metrics.finished == 3.0


def test_metrics_of_a_request_add_up(fixed):
    now = [0.0]
    engine = fixed.engine(clock=lambda: now[0])
    handle = engine.submit([1, 2, 3, 4, 0, 1], max_new_tokens=30)
    while not engine.idle:
        engine.step()
        now[0] += 1.0
    metrics = handle.completion.metrics
    assert metrics.emitted == 29 and metrics.rounds == engine.metrics.rounds and metrics.verified == engine.metrics.verified_tokens
    assert metrics.accepted_length == 29 / metrics.rounds > 1
    assert metrics.time_to_first_token > 0 and metrics.tokens_per_second == 29 / (metrics.finished - metrics.first_token)
    assert engine.metrics.emitted_tokens == 30 and engine.metrics.prefill_tokens == 6


def test_memory_is_accounted_for_before_anything_is_made(fixed):
    shapes = {shape: fixed.slots.cache_bytes(shape) for shape in fixed.slots.shapes}
    for shape, size in shapes.items():
        fixed.slots.reset(shape)
        assert size == sum(leaf.nbytes for leaf in jax.tree.leaves(fixed.slots._state))
    assert fixed.slots.peak_bytes(BatchShape(6, 48)) >= shapes[BatchShape(6, 48)] + shapes[BatchShape(6, 16)]


def test_an_engine_that_would_not_fit_is_refused_before_it_is_compiled(fixed):
    largest, smaller = BatchShape(6, 48), BatchShape(2, 48)
    limit = fixed.slots.peak_bytes(largest) - 1
    assert fixed.slots.peak_bytes(smaller) <= limit
    config = dataclasses.replace(CONFIG, memory_limit=limit)
    with pytest.raises(ValueError, match=f"memory_limit is {limit}; 6 rows of 48 slots need {limit + 1} bytes at the most; up to"):
        Engine(
            fixed.target,
            fixed.drafter,
            fixed.params,
            policy=FixedLength(2),
            survival=RawSurvival(),
            config=config,
            calibration=fixed.slots._calibration,
        )


@pytest.mark.parametrize(
    "fields",
    [
        {"row_ladder": ()},
        {"row_ladder": (4, 2)},
        {"slot_ladder": (0,)},
        {"queue_limit": 0},
        {"prefill_chunk": 0},
        {"chunks_per_round": 0},
        {"rounds_in_flight": 0},
    ],
)
def test_limits_that_cannot_be_are_refused(fields):
    with pytest.raises(ValueError, match=next(iter(fields))):
        EngineConfig(**fields)


def test_a_curve_that_ends_too_early_is_refused():
    with pytest.raises(ValueError, match="curve ends at 24 tokens; all drafts of 8 rows are 32"):
        ToyServing(FixedLength(1), config=dataclasses.replace(CONFIG, row_ladder=(8,)), curve=CURVE)


def test_the_toy_is_what_it_is_taken_for():
    """The law by which answers are judged is that of the toy's own formula, written a second time."""
    _, params = toy_params()
    law = _law(params, 1, 2)
    table = np.exp(np.asarray(params.target["table"], np.float64))
    expected = table[0, 1] / table[0, 1].sum()
    assert law.shape == (VOCAB, VOCAB) and np.isclose(law.sum(), 1)
    np.testing.assert_allclose(law.sum(axis=1), expected, rtol=1e-6)


def test_who_asks_does_not_wait_for_the_device(fixed, monkeypatch):
    """A request is checked and taken in without an array being made: the device may be busy with two rounds."""

    def busy(*_, **__):
        raise AssertionError("an array was made")

    engine = fixed.engine()
    with monkeypatch.context() as patched:
        patched.setattr(jnp, "asarray", busy)
        handle = engine.submit([1, 2], max_new_tokens=3, temperature=0.7, top_k=2, top_p=0.9)
    assert len(handle.result().ids) == 3
    assert 0 < engine.metrics.host_share < 1
