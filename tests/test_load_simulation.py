"""Simulated serving: the engine's own loop on a clock that knows what rounds cost; every figure follows from curve and record."""

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dspark_jax.engine_config import EngineConfig
from dspark_jax.engine_core import EngineCore
from dspark_jax.schedule import FixedLength, ForecastStop, StepCurve
from dspark_jax.slot_executor import BatchShape
from experiments.load_frontier import gains
from experiments.load_settings import PaperSetting, RecordedSetting
from experiments.load_simulation import COMPARED, SimulationOptions, run
from experiments.made_up_acceptance import (
    MadeUp,
    conditional_acceptance,
    expected_accepted_length,
    level_continuation,
    make_up,
    paper_continuation,
)
from experiments.model_presets import qwen3_8b
from experiments.profile_steps import RELEASED_DRAFTER
from experiments.recorded_rounds import RECORDED
from experiments.replay import Table
from experiments.result_files import write_csv
from experiments.roofline_curves import H200, dspark_costs, mtp_costs, roofline_family
from experiments.short_blocks import chunk_seconds, with_block_size
from experiments.simulated_load import ClosedLoop, Load, PoissonArrivals, Serving, engine_of, simulate
from experiments.simulated_slots import ReadingCosts, SimulatedSlots, VirtualClock, decide, new_schedule
from experiments.step_curves import RoundCosts, load_curves
from tests.scripted_slots import BLOCK, prompt, scripted_engine
from tests.toy_engine import run_until_idle

G = 3
OPTIONS = SimulationOptions()


def _costs(rows=(1, 2, 4), step=1.0, token=0.25, drafting=0.5, plain=0.75):
    """A round costs `step`, `token` for every flat token, and `drafting`; one without drafts `plain` + `token` per request."""
    found = {}
    for size in rows:
        tokens = tuple(size * (1 + length) for length in range(G + 1))
        curve = StepCurve(tokens, tuple(step + token * each for each in tokens), drafting)
        found[size] = RoundCosts(size, curve, StepCurve((size,), (plain + token * size,), 0.125), 0.25)
    return found


def _arrays(*arrays: Any) -> Table:
    return Table(*arrays)


def _table(num_texts=4, anchors=20, context=6, chance=0.6, seed=0):
    rng = np.random.default_rng(seed)
    shape = (num_texts, anchors)
    survival = np.broadcast_to(chance ** np.arange(1, G + 1), (*shape, G)).astype(np.float32)
    accepted = np.cumprod(rng.random((*shape, G)) < chance, axis=2).sum(axis=2).astype(np.int32)
    return _arrays(survival, accepted, np.full(num_texts, anchors, np.int32), np.full(num_texts, context, np.int32))


def _serving(**changes):
    return Serving(**{"table": _table(), "costs": _costs(), "continuation": (0.6,) * G} | changes)


def _simulate(serving, concurrency, total=20, warm_up=None, chunk=64, **engine):
    core, device = engine_of(serving, concurrency, chunk, **engine)
    warm_up = concurrency if warm_up is None else warm_up
    return simulate(core, device, serving.table, Load(ClosedLoop(concurrency), warm_up, total))


# --- time


def test_time_goes_by_as_written_down_by_hand():
    """Plain decoding of one request at a time: a prompt of 5 tokens in chunks of 4, 2 s each, and 3 rounds of 1 s; then the next."""
    serving = _serving(table=_table(anchors=3), drafts=False, reading=ReadingCosts(2.0))
    core, device = engine_of(serving, 1, chunk=4)
    ended = []
    simulate(core, device, serving.table, Load(ClosedLoop(1), 0, 3), ended.append)
    assert [each.metrics.submitted for each in ended] == [0.0, 7.0, 14.0]
    assert [each.metrics.first_token for each in ended] == [4.0, 11.0, 18.0]
    assert [each.metrics.finished for each in ended] == [7.0, 14.0, 21.0]
    assert device.chunks == 6 and device.rounds == 9


def test_a_ticket_waits_for_what_was_asked_for_before_it():
    """Chunks and rounds queue up on one device; who looks at the second of two rounds sees it when both are done."""
    serving, clock = _serving(policy=FixedLength(G), reading=ReadingCosts(2.0)), VirtualClock()
    device = SimulatedSlots(serving.plans((1,)), serving.table, BatchShape(1, 32), clock, serving.reading)
    core = EngineCore(device, serving.plans((1,)), EngineConfig(row_ladder=(1,), slot_ladder=(32,)), clock=clock)
    core.submit([0] * 5, max_new_tokens=21)
    core.step()
    tickets: list[Any] = [entry.ticket for entry in core._in_flight]
    first, second = tickets
    assert (first.moment, second.moment) == (2.0, 2.0 + 1.0 + 0.25 * 4 + 0.5) and clock.now == 0.0
    second.get()
    first.get()
    assert clock.now == 4.5


def test_requests_that_came_while_the_host_waited_have_waited_since_then():
    clock = VirtualClock()
    clock.wait_until(9.0)
    with clock.at(4.0):
        assert clock() == 4.0
    assert clock() == 9.0
    clock.wait_until(3.0)
    assert clock() == 9.0


@pytest.mark.parametrize("rows", [1, 4])
def test_without_drafts_a_full_batch_has_as_many_tokens_a_second_as_the_curve_says(rows):
    serving = _serving(drafts=False, reading=ReadingCosts(elsewhere=True))
    core, device = engine_of(serving, rows, 64, rows=(rows,))
    simulate(core, device, serving.table, Load(ClosedLoop(rows), rows, 8 * rows))
    full = [record for record in core.metrics.latest if record.active == rows]
    assert len(full) > 20
    for record in full:
        assert record.emitted / record.seconds == pytest.approx(rows / (0.75 + 0.25 * rows), rel=1e-9)
        assert record.predicted_seconds == pytest.approx(record.seconds, rel=1e-9)
    if rows == 1:
        assert _simulate(serving, 1, rows=(1,)).per_user == pytest.approx(1.0, rel=1e-9)


def test_a_cache_that_is_read_whole_costs_the_same_however_full_it_is():
    curve = StepCurve((1, 2, 3, 4), (1.0, 1.1, 1.2, 1.3), context=10, longer=((100, (2.0, 2.1, 2.2, 2.3)),))
    costs = {1: RoundCosts(1, curve, StepCurve((1,), (1.0,), context=10, longer=((100, (2.0,)),)), 0.0)}
    for slots, ahead, seconds in ((100, 90, 1.0), (100, 0, 2.0), (100, 45, 1.5)):
        serving = _serving(costs=costs, drafts=False, slots_ahead=ahead, reading=ReadingCosts(elsewhere=True))
        result = _simulate(serving, 1, rows=(1,), slots=(slots,), total=4)
        assert result.per_user == pytest.approx(1 / seconds)


# --- the same rounds


def test_the_rounds_are_those_of_a_scripted_device_of_the_same_acceptance():
    """The script gives a number of drafts by request and round; on record is what that comes to at each anchor."""
    budget, count, length = 17, 9, 6
    script = np.ones((count, 5), int).tolist()
    engine, slots = scripted_engine(script)
    accepted = np.zeros((count, budget), np.int32)
    for name in range(count):
        anchor, number = 0, 1
        while anchor < budget:
            # Requests are numbered from 1.
            accepted[name, anchor] = ((name + 1) * 3 + number * 5) % (BLOCK + 1)
            anchor, number = anchor + int(accepted[name, anchor]) + 1, number + 1
    table = _arrays(
        np.ones((count, budget, BLOCK), np.float32), accepted, np.full(count, budget - 1, np.int32), np.full(count, length + 1, np.int32)
    )
    serving = _serving(table=table, policy=FixedLength(BLOCK), costs=_costs((1, 2, 4)))
    clock, plans = VirtualClock(), serving.plans(engine.config.row_ladder)
    device = SimulatedSlots(plans, table, slots.shape, clock)
    simulated = EngineCore(device, plans, engine.config, clock=clock)
    for core, prompts in ((engine, prompt), (simulated, lambda number, size: [number] + [0] * (size - 1))):
        handles = []
        for number in range(count):
            handles.append(core.submit(prompts(number, length), max_new_tokens=budget))
            for _ in range(number % 4):
                core.step()
        run_until_idle(core)
        assert {handle.completion.reason for handle in handles} == {"budget"}
    names = ("rows", "slots", "active", "emitted", "drafted")
    rounds, others = ([[getattr(record, name) for name in names] for record in core.metrics.latest] for core in (engine, simulated))
    assert rounds == others and len(rounds) > 20
    assert engine.metrics.empty_rounds == simulated.metrics.empty_rounds


def test_lengths_are_the_policys_up_to_the_budget():
    plan = _serving(costs=_costs(token=0.05, drafting=0.1)).plans((4,))[4].plan
    assert isinstance(plan.policy, ForecastStop)
    survival = jnp.asarray(np.random.default_rng(0).random((4, G)).cumprod(axis=1), jnp.float32)
    active, length = jnp.array([True, True, False, True]), jnp.array([7, 9, 1, 8], jnp.int32)
    ids, limit = jnp.arange(4, dtype=jnp.int32), jnp.array([30, 11, 2, 9], jnp.int32)
    decision, schedule = decide(plan, new_schedule(plan, 4), survival, active, length, ids, 0, limit)
    asked = plan.policy.lengths(survival, active & decision.runs, length, ids)
    np.testing.assert_array_equal(decision.lengths, jnp.where(active, jnp.minimum(asked, limit - length - 1), 0))
    assert decision.runs and asked[3] > 0 and decision.lengths[3] == 0 and int(schedule.history.round) == 1


# --- loads


def test_a_seed_decides_everything():
    serving = _serving(policy=FixedLength(G))

    def arrivals(seed):
        core, device = engine_of(serving, 4, 64)
        load = Load(PoissonArrivals.at_rate(0.1, 40, seed), 5, 40)
        return dataclasses.replace(simulate(core, device, serving.table, load), real_seconds=0.0)

    assert arrivals(1) == arrivals(1) != arrivals(2)


def test_arrivals_that_are_too_many_wait_and_few_do_not():
    serving = _serving(drafts=False)
    waits = []
    for rate in (0.01, 10.0):
        core, device = engine_of(serving, 2, 64)
        result = simulate(core, device, serving.table, Load(PoissonArrivals.at_rate(rate, 40), 0, 40, to_the_end=True))
        waits.append(result.time_to_first_token_p95)
        assert result.reasons["budget"] == sum(result.reasons.values()) == 40
    assert waits[0] < 5 and waits[1] > 100


def test_everything_ends_with_a_reason_and_the_load_is_held():
    result = _simulate(_serving(policy=FixedLength(1)), 4, total=30)
    assert result.reasons["budget"] == sum(result.reasons.values()) == 30
    assert result.mean_requests == pytest.approx(4.0)
    assert 1 <= result.accepted_length <= 2 and result.mean_verified <= 1


def test_mean_verified_falls_with_load_under_the_scheduler():
    """Tokens are cheap until there are about 8 of them, and dear from then on."""
    rows = (2, 16)
    costs = {}
    for size in rows:
        tokens = tuple(size * (1 + length) for length in range(G + 1))
        curve = StepCurve(tokens, tuple(1.0 + 0.005 * each + max(0.0, 0.2 * (each - 8)) for each in tokens), 0.05)
        costs[size] = RoundCosts(size, curve, StepCurve((size,), (1.0 + max(0.0, 0.2 * (size - 8)),)), 0.0)
    blocks = make_up(MadeUp(G, {"maths": (0.8,) * G}, num_texts=12, prompts=(4, 8), answers=(20, 40)), seed=1)
    chance = 1 / (1 + np.exp(-blocks.confidence_logits))
    table = _arrays(np.cumprod(chance, axis=2).astype(np.float32), blocks.accepted.astype(np.int32), blocks.anchors, blocks.context)
    serving = Serving(table, costs, conditional_acceptance(blocks), reading=ReadingCosts(elsewhere=True))
    verified = [_simulate(serving, size, total=5 * size + 5, rows=(size,)).mean_verified for size in rows]
    assert verified[0] > 1.5 * verified[1] > 0


# --- what is made up, and what it costs


def test_level_acceptance_gives_the_accepted_length_it_was_made_from():
    for wanted in (1.0, 2.5, 5.65, 8.0):
        chance = level_continuation(wanted, 7)
        assert expected_accepted_length((chance,) * 7) == pytest.approx(wanted, abs=1e-9)
    assert {name: round(chance, 2) for name, chance in paper_continuation().items()} == {"maths": 0.90, "code": 0.88, "chat": 0.74}
    with pytest.raises(ValueError, match="accepted_length is 9"):
        level_continuation(9.0, 7)


def test_made_up_blocks_accept_as_asked_and_their_confidence_is_calibrated():
    asked = {"maths": (0.9, 0.8), "chat": (0.7, 0.5)}
    blocks = make_up(MadeUp(2, asked, num_texts=60))
    there = np.arange(blocks.kept.shape[1]) < blocks.anchors[:, None]
    for domain, (first, _) in zip((0, 2), asked.values(), strict=True):
        own = there & (blocks.domain == domain)[:, None]
        assert blocks.kept[own][:, 0].mean() == pytest.approx(first, abs=0.02)
    chance = 1 / (1 + np.exp(-blocks.confidence_logits[there]))
    for low in np.arange(0, 1, 0.2):
        inside = (chance >= low) & (chance < low + 0.2)
        assert blocks.kept[there][inside].mean() == pytest.approx(chance[inside].mean(), abs=0.03)
    first, second = conditional_acceptance(blocks)
    assert first == pytest.approx(0.8, abs=0.03) and 0.6 < second < 0.75
    shorter = make_up(MadeUp(1, {name: each[:1] for name, each in asked.items()}, num_texts=60))
    np.testing.assert_array_equal(shorter.kept[:, :, 0], blocks.kept[:, :, 0])


def test_a_roofline_is_bandwidth_for_few_tokens_and_arithmetic_for_many():
    preset = qwen3_8b()
    family = roofline_family(H200, preset, dspark_costs(preset, 5), rows=(1, 512))
    weights = 36 * 4096 * (80 * 128 + 3 * 12288) + 4096 * 151936
    one, many = (each.curve for each in family.curves)
    cache = 36 * 4 * 8 * 128 * 256 / 4.8e12
    assert one.seconds_per_step[0] == pytest.approx(1e-4 + 2 * weights / 4.8e12 + cache, rel=1e-3)
    assert one.seconds_per_step[-1] == one.seconds_per_step[0]
    tokens = 512 * 6
    attention = 36 * max(4 * 32 * 128 * 256 * tokens / 989e12, 4 * 8 * 128 * 256 * 512 / 4.8e12)
    assert many.seconds_per_step[-1] == pytest.approx(1e-4 + 2 * weights * tokens / 989e12 + attention, rel=1e-3)
    single = roofline_family(H200, preset, mtp_costs(preset), rows=(1, 512))
    assert all(a.curve.draft_seconds < b.curve.draft_seconds for a, b in zip(single.curves, family.curves, strict=True))


def test_shorter_blocks_cost_as_many_positions_of_fewer_requests_do():
    costs = load_curves(OPTIONS.curves)
    same, short = with_block_size(costs, 7, 7), with_block_size(costs, 3, 7)
    for size, each in costs.items():
        assert same[size].curve.draft_seconds == pytest.approx(each.curve.draft_seconds)
        assert same[size].curve.seconds_per_step == pytest.approx((each.curve.seconds_per_step[0], each.curve.seconds_per_step[-1]))
        assert short[size].curve.draft_seconds <= each.curve.draft_seconds
    # 2 requests of 7 drafts have as many positions to propose as 14/3 of 3; 4 of 1 + 3 to commit as 2 of 1 + 7.
    assert short[4].commit_seconds == pytest.approx(costs[2].commit_seconds)
    with pytest.raises(ValueError, match="block_size is 8"):
        with_block_size(costs, 8, 7)
    eight = costs[8].curve
    assert chunk_seconds(costs, 64, True) == pytest.approx(eight.seconds(64) - eight.draft_seconds + costs[8].commit_seconds)
    with pytest.raises(ValueError, match="prefill_chunk is 9999"):
        chunk_seconds(costs, 9999, True)


# --- results


def test_gains_are_read_between_the_loads_of_the_faster_policy():
    points = {"mtp_1": [(1, 100.0, 100.0), (4, 200.0, 50.0)], "scheduler": [(1, 150.0, 150.0), (4, 350.0, 90.0), (16, 400.0, 30.0)]}
    rows = [
        {"policy": policy, "concurrency": size, "throughput": throughput, "per_user": speed, "mean_verified": 0.0}
        for policy, line in points.items()
        for size, throughput, speed in line
    ]
    slow, fast = gains(rows, "scheduler", "mtp_1")[::-1]
    assert fast["throughput_gain_at_its_speed"] == pytest.approx((150 + 200 * 50 / 60) / 100 - 1)
    assert fast["speed_gain_at_its_throughput"] == ""
    assert slow["throughput_gain_at_its_speed"] == pytest.approx((350 + 50 * 40 / 60) / 200 - 1)
    assert slow["speed_gain_at_its_throughput"] == pytest.approx((150 - 60 * 50 / 200) / 50 - 1)


def test_a_measured_load_curve_is_held_against_the_simulation(tmp_path):
    measured = [{"policy": policy, "concurrency": 2} | dict.fromkeys(COMPARED, 2.0) for policy in ("plain", "fixed_1")]
    write_csv(tmp_path / "load_curve.csv", measured)
    rows = run(SimulationOptions(validate=tmp_path / "load_curve.csv", requests=6, out=tmp_path), Console(quiet=True))
    assert [row["policy"] for row in rows] == ["plain", "fixed_1"] and (tmp_path / "validation.csv").is_file()
    plain = rows[0]
    assert plain["accepted_length_simulated"] == 1.0 and plain["accepted_length_error"] == -0.5
    # Two requests on the measured curve between its contexts: a round without drafts takes 64 to 77 ms, and prefill comes on top.
    assert 20 < plain["throughput_simulated"] < 2 / 0.064
    assert 1 < rows[1]["accepted_length_simulated"] < 2


def test_results_of_the_papers_setting_are_written_whole(tmp_path):
    options = SimulationOptions(setting="paper", policies=("plain", "mtp_1"), concurrency=(1, 2), requests=4, arrival_rates=(2.0,))
    rows = run(dataclasses.replace(options, arrivals=12, budgets=(8, 16), out=tmp_path), Console(quiet=True))
    assert [row["concurrency"] for row in rows] == [1, 2, "", 1, 2, ""]
    assert all(row["throughput"] > 0 and row["per_user"] > 0 for row in rows)
    assert {path.name for path in tmp_path.iterdir()} >= {"h200_qwen3_8b.csv", "h200_qwen3_8b.png", "h200_qwen3_8b_mtp.json"}
    assert load_curves(tmp_path / "h200_qwen3_8b_mtp.json")[1].curve.tokens == (1, 2)


def test_what_cannot_be_simulated_is_refused(tmp_path):
    for field, value in {"concurrency": (0,), "arrival_rates": (0.0,), "requests": 0, "validate": tmp_path / "none.csv"}.items():
        with pytest.raises(ValueError, match=f"{field} is"):
            SimulationOptions(**{field: value})
    setting = RecordedSetting.read(OPTIONS.curves, RECORDED, RELEASED_DRAFTER, 0)
    for policy in ("fixed_8", "fixed_", "mtp_1", "eagle"):
        with pytest.raises(ValueError, match=f"policy is '{policy}'"):
            setting.serving(policy)
    with pytest.raises(ValueError, match="policy is 'fixed_6'"):
        PaperSetting.make(num_texts=3).serving("fixed_6")
    with pytest.raises(ValueError, match="rows \\[8\\] are not in the cost curves"):
        _serving().plans((4, 8))
    with pytest.raises(ValueError, match="warm_up is 3"):
        Load(ClosedLoop(1), 3, 3)
