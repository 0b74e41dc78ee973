"""Sweeps: every cell is run once, whichever machine runs it and however often it was interrupted, and is known again by what it is."""

import csv
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from experiments import ablations
from experiments import sweep as sweeps
from experiments.ablations import find_sweep, named_sweeps
from experiments.smollm2_cells import training_folder
from experiments.sweep import Cell, CellStopped, Sweep, described, finished_cells, grid, parse_only, parse_shard, run_sweep, shard_of
from experiments.sweep_report import figure_of, report, rows_of


@dataclasses.dataclass(frozen=True)
class Loss:
    ce: float = 0.1
    l1: float = 0.9


@dataclasses.dataclass(frozen=True)
class Setting:
    layers: int = 2
    loss: Loss = Loss()
    taps: tuple[int, ...] = (1, 2)
    folder: Path = Path("somewhere")
    features: Path | None = None
    seed: int = 0


@dataclasses.dataclass(frozen=True)
class Twin(Setting):
    """The same fields by another name."""


AXES = {"layers": {n: {"layers": n} for n in (1, 2, 3)}, "loss": {"paper": {}, "ce": {"loss.ce": 1.0, "loss.l1": 0.0}}}
QUIET = Console(quiet=True)


@pytest.fixture(autouse=True)
def no_look_at_the_checkout(monkeypatch):
    """Commit and device as on a machine that never was; each is asked for in a test of its own."""
    monkeypatch.setattr(sweeps, "commit_id", lambda: "0123abcd")
    monkeypatch.setattr(sweeps, "device_text", lambda: "an abacus")


class Runner:
    """Figures that follow from the setting, and a list of what was run."""

    def __init__(self, stop_at: int | None = None, fail: type[Exception] = FloatingPointError, failing: int | None = None):
        self.ran, self.stop_at, self.fail, self.failing = [], stop_at, fail, failing

    def __call__(self, setting: Setting, out: Path) -> dict[str, Any]:
        if len(self.ran) == self.stop_at:
            raise CellStopped("stopped behind step 3")
        self.ran.append(setting)
        if setting.layers == self.failing:
            raise self.fail("loss is nan at step 7")
        return {"length": setting.layers + setting.loss.ce + setting.seed / 10, "text": "kept"}


def sweep_of(run, **changes) -> Sweep:
    fields = {"name": "toy", "about": "layers and loss", "cells": grid(Setting(), AXES), "run": run, "measures": ("length",)}
    return Sweep(**fields | changes)


def test_a_grid_has_a_cell_for_every_combination_and_each_its_own_key():
    cells = grid(Setting(), AXES)
    assert [tuple(cell.axes.values()) for cell in cells] == [(n, name) for n in (1, 2, 3) for name in ("paper", "ce")]
    assert cells[1].config == Setting(layers=1, loss=Loss(1.0, 0.0)) and cells[2].config == Setting()
    assert len({cell.key for cell in cells}) == 6


def test_the_key_is_of_the_configuration_alone_and_changes_with_any_field_of_it():
    key = Cell({"layers": 2}, Setting()).key
    assert key == Cell({"other": "words"}, Setting(features=None, layers=2)).key
    changes = ({"layers": 3}, {"loss": Loss(l1=0.8)}, {"taps": (2, 1)}, {"folder": Path("elsewhere")}, {"features": Path("f")}, {"seed": 1})
    keys = [Cell({}, dataclasses.replace(Setting(), **change)).key for change in changes]
    assert len({key, *keys}) == len(changes) + 1
    assert Cell({}, Twin()).key != key, "the same fields in another class are another configuration"


def test_the_key_does_not_depend_on_the_order_of_fields():
    names = [field.name for field in dataclasses.fields(Setting)]
    turned = dataclasses.make_dataclass("Setting", [(name, object) for name in reversed(names)], frozen=True)
    assert Cell({}, turned(**{name: getattr(Setting(), name) for name in names})).key == Cell({}, Setting()).key


@pytest.mark.parametrize("count", [1, 2, 4, 7])
def test_shards_share_all_cells_out_and_none_twice(count):
    cells = grid(Setting(), AXES)
    shares = [shard_of(cells, place, count) for place in range(count)]
    assert sorted(cell.key for share in shares for cell in share) == sorted(cell.key for cell in cells)
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.parametrize("text", ["", "1", "2/2", "-1/2", "a/b", "0/0", "1/2/3"])
def test_a_shard_that_is_none_is_refused(text):
    assert parse_shard("1/2") == (1, 2)
    with pytest.raises(ValueError, match=r"shard is .*; allowed: place/number"):
        parse_shard(text)


def test_a_finished_cell_is_passed_over_and_its_record_says_what_it_was(tmp_path):
    runner = Runner()
    records = run_sweep(sweep_of(runner), tmp_path, console=QUIET)
    assert len(runner.ran) == len(records) == 6
    assert run_sweep(sweep_of(runner), tmp_path, console=QUIET) == records and len(runner.ran) == 6
    first = json.loads((tmp_path / "toy.shard-0-of-1.jsonl").read_text().splitlines()[0])
    assert first == records[0]
    assert first["axes"] == {"layers": 1, "loss": "paper"} and first["result"] == {"length": 1.1, "text": "kept"}
    assert first["config"] == described(Setting(layers=1)) and first["config"]["loss"] == {"class": "Loss", "ce": 0.1, "l1": 0.9}
    assert (first["commit"], first["device"]) == ("0123abcd", "an abacus") and first["seconds"] >= 0


def test_shards_write_files_of_their_own_and_see_what_others_have_finished(tmp_path):
    first, second = Runner(), Runner()
    assert len(run_sweep(sweep_of(first), tmp_path, (0, 2), QUIET)) == 3
    assert len(run_sweep(sweep_of(second), tmp_path, (1, 2), QUIET)) == 6
    assert not set(first.ran) & set(second.ran)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["toy.shard-0-of-2.jsonl", "toy.shard-1-of-2.jsonl"]
    third = Runner()
    run_sweep(sweep_of(third), tmp_path, (0, 1), QUIET)
    assert not third.ran, "another way of sharing finds everything done"


def test_an_interrupted_sweep_goes_on_with_the_cell_that_was_interrupted(tmp_path):
    runner = Runner(stop_at=2)
    assert len(run_sweep(sweep_of(runner), tmp_path, console=QUIET)) == 2
    again = Runner()
    assert len(run_sweep(sweep_of(again), tmp_path, console=QUIET)) == 6
    assert [setting.layers for setting in again.ran] == [2, 2, 3, 3]


def test_a_torn_last_line_costs_its_own_cell_and_no_other(tmp_path):
    run_sweep(sweep_of(Runner()), tmp_path, console=QUIET)
    file = tmp_path / "toy.shard-0-of-1.jsonl"
    file.write_bytes(file.read_bytes()[:-20])
    again = Runner()
    assert len(run_sweep(sweep_of(again), tmp_path, console=QUIET)) == 6
    assert [setting.layers for setting in again.ran] == [3]
    assert len(finished_cells(sweep_of(again), tmp_path)) == 6


def test_a_training_that_diverges_is_on_record_and_the_others_are_run(tmp_path):
    records = run_sweep(sweep_of(Runner(failing=2)), tmp_path, console=QUIET)
    assert [record.get("failed") for record in records] == [None, None, "loss is nan at step 7", "loss is nan at step 7", None, None]
    again = Runner()
    run_sweep(sweep_of(again), tmp_path, console=QUIET)
    assert not again.ran
    with pytest.raises(ValueError, match="nan"):
        run_sweep(sweep_of(Runner(failing=1, fail=ValueError)), tmp_path / "other", console=QUIET)


def test_what_differs_between_machines_reaches_the_cell_and_leaves_its_key(tmp_path):
    runner = Runner()
    free = sweep_of(runner, free=("features",))
    run_sweep(free, tmp_path, console=QUIET, here={"features": tmp_path / "cache"})
    assert runner.ran[0].features == tmp_path / "cache"
    assert len(run_sweep(free, tmp_path, console=QUIET)) == 6 and len(runner.ran) == 6
    with pytest.raises(ValueError, match="here names seed; allowed: features, which have no part in the result"):
        run_sweep(free, tmp_path, console=QUIET, here={"seed": 1})


def test_a_sweep_is_changed_and_repeated_as_a_whole():
    changed = sweep_of(Runner()).changed({"taps": (0,)})
    assert {cell.config.taps for cell in changed.cells} == {(0,)}
    assert not {cell.key for cell in changed.cells} & {cell.key for cell in sweep_of(Runner()).cells}
    repeated = changed.repeated((0, 5))
    assert [cell.axes["seed"] for cell in repeated.cells] == [0] * 6 + [5] * 6
    assert [cell.config.seed for cell in repeated.cells] == [0] * 6 + [5] * 6
    with pytest.raises(ValueError, match="'layers 1, loss paper' and 'layers 2, loss paper' are the same configuration"):
        changed.changed({"layers": 4})
    with pytest.raises(ValueError, match=r"seeds is \(1, 1\); allowed: one or more different integers"):
        changed.repeated((1, 1))


def test_a_sweep_is_cut_to_some_values_of_its_axes():
    sweep = sweep_of(Runner())
    assert len(sweep.only({}).cells) == 6
    chosen = sweep.only(parse_only(["layers=1,3", "loss=ce"]))
    assert [dict(cell.axes) for cell in chosen.cells] == [{"layers": 1, "loss": "ce"}, {"layers": 3, "loss": "ce"}]
    assert [cell.key for cell in chosen.cells] == [sweep.cells[1].key, sweep.cells[5].key]
    for texts, message in (
        (["depth=1"], "only names depth; allowed: layers, loss"),
        (["layers=1,4"], "only names layers 4; allowed: 1, 2, 3"),
        (["layers"], "only is 'layers'; allowed: AXIS=VALUE,VALUE"),
        (["layers=1", "layers=2"], "each axis once"),
    ):
        with pytest.raises(ValueError, match=message):
            sweep.only(parse_only(texts))


def test_a_report_takes_the_mean_over_seeds_and_names_their_range(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib (extra `plots`)")
    seeded = sweep_of(Runner(failing=3)).repeated((0, 1))
    run_sweep(seeded, tmp_path, console=QUIET)
    report(seeded, tmp_path, tmp_path / "report", QUIET)
    with (tmp_path / "report" / "toy.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [row["layers"] for row in rows] == ["1", "1", "2", "2", "3", "3"] and rows[0]["seeds"] == "2"
    assert [rows[0][f"length{end}"] for end in ("", "_low", "_high")] == ["1.15", "1.1", "1.2"]
    assert rows[4]["length"] == "", "a cell that failed has no figure"
    assert (tmp_path / "report" / "toy.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="a folder with finished cells of toy is needed"):
        report(seeded, tmp_path / "nothing", tmp_path, QUIET)
    assert rows_of([{"axes": {"a": 1, "seed": 0}, "result": {}}], ("length",)) == [
        {"a": 1, "seeds": 1, "length": None, "length_low": None, "length_high": None}
    ]


class AnswerRunner(Runner):
    """Accepted lengths of four prompts in 10 rounds each: 2 with one layer, half a token more with every other one, a tenth with a seed."""

    def __call__(self, setting: Setting, out: Path) -> dict[str, Any]:
        super().__call__(setting, out)
        length = 1.5 + setting.layers / 2 + setting.seed / 10
        answers = {"prompts": [[place, 10 * length + (place - 1.5) * 4, 10] for place in range(4)]}
        return {"accepted_length_greedy": length, "answers_greedy": answers}


def test_a_report_compares_cells_answer_by_answer(tmp_path):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib (extra `plots`)")
    axes = {"layers": AXES["layers"]}
    seeded = sweep_of(AnswerRunner(), cells=grid(Setting(), axes), measures=("accepted_length_greedy",)).repeated((0, 1))
    run_sweep(seeded, tmp_path, console=QUIET)
    page = tmp_path / "page.md"
    page.write_text("<!-- toy -->\n<!-- /toy -->\n")
    one, two, three = report(seeded, tmp_path, tmp_path, QUIET, page)
    assert one["accepted_length_greedy"] == pytest.approx(2.05) and one["accepted_length_greedy_over_first"] is None
    assert (one["accepted_length_greedy_low"], one["accepted_length_greedy_high"]) == pytest.approx((2.0, 2.1)), "the range of the seeds"
    assert one["accepted_length_greedy_interval_low"] < 2.0 < 2.1 < one["accepted_length_greedy_interval_high"], "over prompts"
    for row, length in ((two, 2.55), (three, 3.05)):
        ends = [row[f"accepted_length_greedy_over_first{end}"] for end in ("_low", "", "_high")]
        assert ends[1] == pytest.approx(length / 2.05) and ends[0] < ends[1] < ends[2]
        assert ends[0] > 1, "the same prompts are easy for both, so that the ratio is surer than either length"
    shown = page.read_text()
    assert "| 2 | 2 | 2.55 (" in shown and "over the first row" in shown and "6 of 6 cells finished; an abacus." in shown
    page.write_text("a page without markers")
    with pytest.raises(ValueError, match="page.md has 0 parts between <!-- toy -->"):
        report(seeded, tmp_path, tmp_path, QUIET, page)


def test_commit_and_device_of_this_machine(monkeypatch):
    monkeypatch.undo()
    commit = sweeps.commit_id()
    assert commit is None or len(commit.rstrip("+")) == 40
    assert sweeps.device_text().startswith("cpu: ")
    monkeypatch.setenv("PATH", "")
    assert sweeps.commit_id() is None, "a machine without git"


def test_named_sweeps_are_at_three_scales_and_every_cell_of_them_can_be_built():
    names = set(named_sweeps())
    asked = {"rivals", "depth", "proposal", "loss", "decay", "taps", "rank", "detach", "vocabulary", "verification"}
    assert {f"{scale}_{name}" for scale in ("toy", "small", "smollm2") for name in asked} <= names
    assert {"toy_texts", "toy_budget"} <= names
    with pytest.raises(ValueError, match=r"sweep is 'nothing'; known: small_chains, small_decay, .*toy_vocabulary$"):
        find_sweep("nothing")


def test_a_toy_cell_keeps_what_was_emitted_for_every_prompt(monkeypatch, tmp_path):
    measured = {"accepted_length": {"value": 1.5, "low": 1.4, "high": 1.6}, "emitted": [3, 6], "rounds": [2, 4]}
    monkeypatch.setattr(ablations, "run_toy_cell", lambda cell, work: {"temperatures": {"0": measured, "1": measured}})
    found = find_sweep("toy_depth").run(find_sweep("toy_depth").cells[0].config, tmp_path)
    assert found["accepted_length_greedy"] == 1.5 and found["answers_sampled"] == {"prompts": [[0, 3, 2], [1, 6, 4]]}
    figure = figure_of([found, found], "accepted_length_sampled")
    assert figure is not None and (figure.value, figure.units) == (1.5, 2)


def test_cells_that_ask_for_one_training_share_it(tmp_path):
    """The first cell of these sweeps is the same run: of the depth sweep the one with two layers."""
    rivals, depth, judged = (find_sweep(f"small_{name}") for name in ("rivals", "depth", "verification"))
    (two_layers,) = [cell for cell in depth.cells if cell.axes == {"drafter": "dspark", "layers": 2}]
    folders = {training_folder(cell.config.run, tmp_path) for cell in (rivals.cells[0], two_layers, judged.cells[0])}
    assert len(folders) == 1 and folders.pop().name.startswith("small_dspark-")
    assert judged.cells[0].key != rivals.cells[0].key
    run = rivals.cells[0].config.run
    elsewhere = dataclasses.replace(run, features=tmp_path, mesh=(1, 1, 1), keep=9)
    assert training_folder(elsewhere, tmp_path) == training_folder(run, tmp_path)
    assert training_folder(dataclasses.replace(run, seed=1), tmp_path) != training_folder(run, tmp_path)
