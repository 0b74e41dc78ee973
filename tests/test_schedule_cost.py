"""The measurement of what the schedule costs, at the smallest size: what it runs and what it writes, not how long that takes."""

import json

import numpy as np
import pytest
from rich.console import Console

from dspark_jax.schedule import StepCurve
from experiments.schedule_cost import BOTH, PLANNER, CostOptions, decisions, drawn_survival, measure
from experiments.step_curves import CurveFamily, RoundCosts, write_family
from tests.tiny_models import write_target

ROWS, BLOCK = 4, 3
CONTINUATION = (0.7, 0.6, 0.5)
COSTS = RoundCosts(ROWS, StepCurve((4, 8, 16), (1.0, 1.1, 1.5), 0.2, 8), StepCurve((4,), (0.9,), 0.05), 0.1)


def test_survival_is_drawn_around_the_usual_one():
    survival = np.asarray(drawn_survival(CONTINUATION, 2000, seed=0))
    assert survival.shape == (2000, 3) and np.all(np.diff(survival, axis=1) <= 0)
    np.testing.assert_allclose(np.median(survival[:, 0]), 0.7, atol=0.03)


def test_every_part_of_the_schedule_is_there_and_decides():
    found = decisions(COSTS, CONTINUATION, drawn_survival(CONTINUATION, ROWS, seed=0), context=8)
    assert {PLANNER, BOTH, "Algorithm 1", "forecast stop", "capacity + top-K", "survival threshold"} <= set(found)
    assert found[PLANNER].verified == 0 and found["fixed length"].verified == ROWS
    assert found[BOTH].verified == found["capacity + top-K"].verified in (0, 4, 12)
    assert all(0 <= each.verified <= ROWS * BLOCK for each in found.values())


def test_the_file_has_every_share(tmp_path):
    """A pass that the policy asks for stands behind each share, and only such passes are timed."""
    write_target(tmp_path / "target")
    (tmp_path / "drafter").mkdir()
    (tmp_path / "drafter" / "survival.json").write_text(json.dumps({"continuation": {"1.0": CONTINUATION}}))
    curves = write_family(tmp_path, CurveFamily("tiny", "measured", {}, "tiny", "tiny", BLOCK, (), (COSTS,)))
    options = CostOptions(str(tmp_path / "target"), tmp_path / "drafter", curves, tmp_path / "cost.json", ROWS, 8, 1.0, 1)
    measure(options, Console(quiet=True))
    content = json.loads((tmp_path / "cost.json").read_text())
    assert content["rows"] == ROWS and content["block_size"] == BLOCK and "versions" in content["device"]
    assert {str(row["tokens"]) for row in content["schedules"]} == set(content["pass_seconds"])
    for row in content["schedules"]:
        assert 0 < row["share"] < 1 and row["seconds"] > 0
        assert row["tokens"] >= ROWS + row["verified"]
        assert row["share"] == pytest.approx(row["seconds"] / (row["seconds"] + content["pass_seconds"][str(row["tokens"])]))
    with pytest.raises(ValueError, match="temperature is 0.5; survival.json has 1"):
        measure(CostOptions(options.target, options.drafter, curves, temperature=0.5), Console(quiet=True))
    with pytest.raises(ValueError, match="rows is 9; tiny.json has curves of 4"):
        measure(CostOptions(options.target, options.drafter, curves, rows=9), Console(quiet=True))
