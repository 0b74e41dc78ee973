"""Tables of drafters at equal budgets: from the records of a sweep, answer by answer, seeds together."""

import csv
from pathlib import Path

import pytest
from rich.console import Console

from experiments.ablations import find_sweep
from experiments.benchmark_records import DRAFTERS_FILE, SPEED_FILE
from experiments.benchmark_speed import PLAIN
from experiments.record_lines import append_record
from experiments.result_tables import marked
from experiments.rivals_report import MARKER, RivalsOptions, name_of, readings_of, report
from experiments.sweep import Cell, Sweep, records_file
from tests.conftest import ROOT


def quiet() -> Console:
    return Console(quiet=True)


def result(emitted: float) -> dict:
    """Four answers a domain of 10 rounds each, later answers with more tokens."""
    answers = {domain: [[row, emitted + row, 10.0] for row in range(4)] for domain in ("maths", "code", "chat")}
    counted = {"steps": 800, "anchors": 102_400, "parameters": 8_740_000, "seconds_per_step": 1.25}
    return counted | {"answers_greedy": answers, "answers_sampled": answers}


def write_records(sweep: Sweep, cells: list[Cell], emitted: list[float], folder: Path) -> None:
    for cell, tokens in zip(cells, emitted, strict=True):
        about = {"key": cell.key, "axes": dict(cell.axes), "config": {"first_tokens": 128}, "device": "a device"}
        append_record(records_file(folder, sweep.name, 0, 1), about | {"result": result(tokens)})


def test_the_first_drafter_is_compared_with_each_other_one(tmp_path):
    sweep = find_sweep("small_rivals")
    write_records(sweep, list(sweep.cells[:3]), [22.0, 18.0, 20.0], tmp_path)
    page = tmp_path / "page.md"
    page.write_text(f"before\n<!-- {MARKER} -->\n<!-- /{MARKER} -->\nbehind\n")
    rows = report(RivalsOptions(records=tmp_path, page=page), quiet())
    assert {row["drafter"] for row in rows} == {"DSpark", "DFlash, cross-entropy alone", "DFlash, DSpark's loss"}
    dflash = [row for row in rows if row["drafter"] == "DFlash, cross-entropy alone" and row["domain"] == "all"]
    assert [row["temperature"] for row in dflash] == [0, 1]
    for row in dflash:
        assert row["accepted_length"] == pytest.approx(1.95)
        assert row["first_over_this"] == pytest.approx(2.35 / 1.95, abs=1e-3)
        assert row["first_over_this_low"] < row["first_over_this"] < row["first_over_this_high"]
    assert (tmp_path / "small_rivals.csv").read_text().count("\n") == 1 + 3 * 4 * 2
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("behind\n")
    shown = marked(text, MARKER, "page")
    assert "| DSpark | 800 | 102,400 | 8.74 | 1 | 1.25 |" in shown and "DSpark over DFlash, DSpark's loss" in shown
    assert "12 answers at each temperature; a device." in shown and "tokens/s" not in shown
    with (tmp_path / "results.csv").open() as file:
        results = list(csv.DictReader(file))
    assert len(results) == 3 * 4 * 2
    assert results[0]["texts"] == "held-out answers, first 128 tokens" and results[0]["tokens_per_second"] == ""
    assert (results[-1]["domain"], results[-1]["prompts"], results[-1]["rounds"]) == ("all", "12", "120")


def test_speeds_that_were_timed_stand_beside(tmp_path):
    sweep = find_sweep("small_rivals")
    write_records(sweep, list(sweep.cells[:1]), [22.0], tmp_path)
    append_record(
        tmp_path / DRAFTERS_FILE, {"key": "k", "drafter": "DSpark", "parameters": 12, "draft_vocabulary": 8, "proposal_gflop": 0.5}
    )
    for temperature in (0.0, 1.0):
        taken = {PLAIN: {"tokens": 20, "seconds": 1.0}, "DSpark": {"tokens": 20, "seconds": 0.5}}
        about = {"key": str(temperature), "group": "maths", "set": "gsm8k", "id": "p", "temperature": temperature, "draft_length": 4}
        append_record(tmp_path / SPEED_FILE, about | {"taken": taken})
    page = tmp_path / "page.md"
    page.write_text(f"<!-- {MARKER} --><!-- /{MARKER} -->")
    report(RivalsOptions(records=tmp_path, page=page), quiet())
    assert "| DSpark | 0.00 | 8 | 0.500 | - | 40.0 | 2.00 | 40.0 | 2.00 |" in page.read_text()
    with (tmp_path / "results.csv").open() as file:
        (maths,) = [row for row in csv.DictReader(file) if (row["domain"], row["temperature"]) == ("maths", "1.0")]
    assert (maths["parameters"], maths["tokens_per_second"], maths["over_plain"]) == ("12", "40.0", "2.0")


def test_seeds_are_summed_answer_by_answer(tmp_path):
    sweep = find_sweep("small_rivals").repeated((0, 1))
    cells = [cell for cell in sweep.cells if cell.axes["drafter"] in ("dspark", "dflash")]
    write_records(sweep, cells, [20.0, 10.0, 22.0, 12.0], tmp_path)
    rows = report(RivalsOptions(records=tmp_path, seeds=(0, 1), to=tmp_path / "to"), quiet())
    overall = {row["drafter"]: row for row in rows if row["domain"] == "all" and row["temperature"] == 0}
    assert overall["DSpark"]["accepted_length"] == pytest.approx(2.25) and overall["DSpark"]["texts"] == 12
    assert overall["DFlash, cross-entropy alone"]["accepted_length"] == pytest.approx(1.25)
    assert (tmp_path / "to" / "small_rivals.csv").is_file()


def test_what_is_no_record_of_answers_is_refused(tmp_path):
    with pytest.raises(ValueError, match="with finished cells of small_rivals is needed"):
        report(RivalsOptions(records=tmp_path), quiet())
    toy = find_sweep("toy_depth")
    append_record(
        records_file(tmp_path, toy.name, 0, 1),
        {"key": toy.cells[0].key, "axes": {}, "config": {}, "result": {"accepted_length_greedy": 2.0}},
    )
    with pytest.raises(ValueError, match="sweep is toy_depth; allowed are sweeps on SmolLM2"):
        report(RivalsOptions(sweep="toy_depth", records=tmp_path), quiet())


def test_cells_of_any_sweep_have_names():
    assert name_of({"drafter": "no_heads", "seed": 2}) == "DFlash, DSpark's loss"
    assert name_of({"drafter": "dspark", "layers": 3}) == "DSpark, 3"
    assert readings_of([]) == []


def test_the_committed_page_is_that_of_the_committed_records(tmp_path):
    results = ROOT / "experiments" / "results"
    page = tmp_path / "rivals.md"
    page.write_bytes((results / "rivals.md").read_bytes())
    rows = report(RivalsOptions(records=results / "rivals", to=tmp_path, page=page), quiet())
    assert page.read_text() == (results / "rivals.md").read_text()
    for name in ("small_rivals.csv", "results.csv"):
        assert (tmp_path / name).read_text() == (results / "rivals" / name).read_text()
    assert {row["drafter"] for row in rows} >= {"DSpark", "DFlash, cross-entropy alone", "DFlash, DSpark's loss", "Eagle3", "MTP-1"}
