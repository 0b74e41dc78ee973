"""Replays of recorded blocks: what a policy decides there is what it decides in rounds, and what it costs is counted in full."""

import csv
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import ConstantSurvival
from dspark_jax.data import DOMAINS
from dspark_jax.schedule import FixedLength, StepCurve, SurvivalThreshold, default_schedule
from experiments.recorded_rounds import RECORDED, RecordedBlocks, load_recorded
from experiments.replay import Alone, Costs, CurveArrays, Forecast, Hindsight, Planned, Same, replay, table_of, throughput
from experiments.result_files import write_csv
from experiments.schedule_regret import CONCURRENCY, RegretOptions, curves_at, made_up, policies, rows_of

G = 3
CURVE = StepCurve((1, 2, 3, 4), (1.0, 1.25, 1.5, 1.75), draft_seconds=0.5)
PLAIN = StepCurve((1,), (0.75,))


def _blocks(num_texts: int = 3, num_anchors: int = 11) -> RecordedBlocks:
    rng = np.random.default_rng(0)
    shape = (num_texts, num_anchors, G)
    anchors = np.array([num_anchors, 7, 5][:num_texts])
    return RecordedBlocks(rng.normal(size=shape), rng.random(shape) < 0.6, anchors, np.array([4, 9, 2]), np.zeros(3, np.int32))


def _costs(*curves: StepCurve, plain: StepCurve = PLAIN) -> Costs:
    each = [Costs(CurveArrays.of(curve, curve.tokens), CurveArrays.of(plain, plain.tokens)) for curve in curves]
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *each)


@pytest.mark.parametrize("length", [0, 1, G])
def test_a_fixed_length_walks_as_written_down_by_hand(length):
    """One request through every text once: tokens, rounds and seconds by a loop."""
    blocks = _blocks()
    table = table_of(blocks, ConstantSurvival((0.6, 0.36, 0.2)), 0.0)
    rounds = replay(Alone(Same(FixedLength(length))), _costs(CURVE), table, 1, 30, 1)
    emitted, seconds = 0, 0.0
    for kept, anchors in zip(blocks.kept, blocks.anchors, strict=True):
        anchor = 0
        while anchor < anchors:
            run = 0
            while run < min(length, anchors - anchor) and kept[anchor, run]:
                run += 1
            emitted += min(run + 1, anchors - anchor)
            seconds += (1.0, 1.25, 1.5, 1.75)[length] + 0.5 if length else 0.75
            anchor += run + 1
    assert int(np.asarray(rounds.emitted).sum()) == emitted == int(blocks.anchors.sum())
    np.testing.assert_allclose(throughput(rounds), [emitted / seconds], rtol=1e-6)


def test_curves_are_judged_apart_and_a_planner_leaves_the_drafter_out_where_it_does_not_pay():
    table = table_of(_blocks(), ConstantSurvival((0.6, 0.36, 0.2)), 0.0)
    cheap, dear = (
        StepCurve((2, 4, 8), costs, draft_seconds=drafting) for costs, drafting in (((1.0, 1.1, 1.2), 0.2), ((2.0, 4.0, 8.0), 2.0))
    )
    costs = _costs(cheap, dear, plain=StepCurve((2,), (0.9,), draft_seconds=0.125))
    rounds = jax.device_get(replay(Planned(Forecast((0.6, 0.6, 0.6)), (0.6, 0.36, 0.2), probe_share=0.0), costs, table, 2, 40))
    assert rounds.runs[0].all() and not rounds.runs[1].any()
    np.testing.assert_allclose(rounds.seconds[1], 0.9 + 0.125)
    assert rounds.verified[0].any() and not rounds.verified[1].any()


def test_hindsight_bounds_every_policy():
    table = table_of(_blocks(), ConstantSurvival((0.6, 0.36, 0.2)), 0.0)
    curves = _costs(CURVE)
    bound = throughput(replay(Hindsight(), curves, table, 1, 30, 1))
    for policy in (*(FixedLength(length) for length in range(G + 1)), SurvivalThreshold(0.3)):
        assert throughput(replay(Alone(Same(policy)), curves, table, 1, 30, 1))[0] <= bound[0] * (1 + 1e-6)


def test_costs_between_two_contexts_are_those_of_the_curve():
    curve = StepCurve((1, 2, 3), (1.0, 1.1, 1.2), context=100, longer=((300, (1.0, 2.0, 4.0)),), draft_seconds=0.25)
    arrays = CurveArrays.of(curve, curve.tokens)
    for context in (50.0, 100.0, 160.0, 300.0, 900.0):
        np.testing.assert_allclose(
            np.asarray(arrays.rates(4, jnp.float32(context))), np.asarray(curve.rates(4, jnp.float32(context))), rtol=1e-6
        )
        assert float(arrays.step_seconds(jnp.int32(2), jnp.float32(context))) == pytest.approx(curve.seconds(2, context) - 0.25, rel=1e-6)


def test_the_committed_record_is_walked_as_the_evaluation_walked_its_texts():
    """Accepted length of whole blocks per domain: half of the evaluation's texts, within a tenth."""
    evaluated = json.loads((RECORDED.parent.parent / "smollm2_evaluation" / "results.json").read_text())["cells"]
    for temperature in (0, 1):
        blocks = load_recorded(RECORDED, temperature)
        assert blocks.block_size == 7 and blocks.accepted.max() == 7
        for number, domain in enumerate(DOMAINS):
            rounds = emitted = 0
            for text in np.flatnonzero(blocks.domain == number):
                anchor = 0
                while anchor < blocks.anchors[text]:
                    rounds, emitted = rounds + 1, emitted + blocks.accepted[text, anchor] + 1
                    anchor += blocks.accepted[text, anchor] + 1
            expected = evaluated[f"{domain} at {temperature}"]["released"]["accepted_length_first"][-1]
            assert abs(emitted / rounds / expected - 1) < 0.1, (domain, temperature, emitted / rounds, expected)
    with pytest.raises(ValueError, match="temperature is 2; recorded are"):
        load_recorded(RECORDED, 2)
    with pytest.raises(ValueError, match="recorded is nowhere.npz"):
        load_recorded(Path("nowhere.npz"), 0)


def test_rows_say_what_every_policy_did_relative_to_the_best_length(tmp_path):
    table = table_of(_blocks(), ConstantSurvival((0.6, 0.36, 0.2)), 0.0)
    names, curves = curves_at(tmp_path, 2, G)
    runs = {
        **{f"fixed_{length}": jax.device_get(replay(Alone(Same(FixedLength(length))), curves, table, 2, 20)) for length in range(G + 1)},
        "oracle": jax.device_get(replay(Hindsight(), curves, table, 2, 20)),
    }
    rows = rows_of(names, 0, 2, runs, G)
    assert set(names) == set(made_up(2, G)) and len(rows) == len(names) * len(runs)
    for curve in names:
        mine = [row for row in rows if row["curve"] == curve]
        fixed = [row["relative_to_best_fixed"] for row in mine if row["policy"].startswith("fixed")]
        assert max(fixed) == 1 and fixed.index(1) == mine[0]["best_fixed_length"]
        assert next(row["relative_to_oracle"] for row in mine if row["policy"] == "oracle") == 1
    write_csv(tmp_path / "rows.csv", rows)
    with (tmp_path / "rows.csv").open() as file:
        assert len(list(csv.DictReader(file))) == len(rows)


@pytest.mark.parametrize("num_rows", CONCURRENCY)
def test_the_default_of_the_replay_is_that_of_the_library(num_rows):
    continuation = (0.6, 0.5, 0.4, 0.5, 0.6, 0.5, 0.4)
    curve = StepCurve((num_rows, 8 * num_rows), (1.0, 2.0))
    policy, planner = default_schedule(curve, continuation, num_rows)
    replayed = policies(continuation, num_rows)["default"]
    assert isinstance(replayed, Planned) and replayed.make(curve) == policy
    assert (replayed.constants, replayed.probe_share) == (pytest.approx(planner.constants), planner.probe_share)


def test_bad_options_are_refused():
    with pytest.raises(ValueError, match="concurrency is"):
        RegretOptions(concurrency=(3,))
    with pytest.raises(ValueError, match="rounds_scale is 0"):
        RegretOptions(rounds_scale=0)
