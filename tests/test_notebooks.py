"""The notebooks: each is its script, says first what the reader will learn, and runs from top to bottom, here at its smallest scale."""

import os
import re
import subprocess
import sys
import types

import jupytext
import pytest

from tests.conftest import ROOT
from tests.tiny_models import needs_gguf, needs_smollm2

FOLDER = ROOT / "notebooks"
NAMES = ("kernel_lab", "quickstart", "scheduler_explorer", "train_a_drafter")
CLONE = ["git", "clone", "--quiet", "--depth", "1"]


def cells(file, kind=None):
    """Cells of a notebook or a script, all or those of one kind."""
    return [cell for cell in jupytext.read(FOLDER / file).cells if kind in (None, cell.cell_type)]


def run(name):
    """What a notebook prints at the smallest scale, on a single device."""
    given = {key: value for key, value in os.environ.items() if key != "XLA_FLAGS"}
    given |= {
        "DSPARK_NOTEBOOK_SCALE": "tiny",
        "MPLBACKEND": "Agg",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "error::UserWarning:__main__",
    }
    done = subprocess.run([sys.executable, FOLDER / f"{name}.py"], cwd=ROOT, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_every_notebook_is_tested():
    assert {file.stem for file in FOLDER.iterdir() if file.suffix in (".py", ".ipynb")} == set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_its_script_and_holds_no_outputs(name):
    """`jupytext --sync notebooks/*.py` makes them the same."""
    script, notebook = cells(f"{name}.py"), cells(f"{name}.ipynb")
    assert [(cell.cell_type, cell.source) for cell in notebook] == [(cell.cell_type, cell.source) for cell in script]
    assert [cell for cell in cells(f"{name}.ipynb", "code") if cell.outputs or cell.execution_count] == []


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_opens_with_what_the_reader_will_learn(name):
    first = cells(f"{name}.py")[0]
    assert first.cell_type == "markdown"
    assert re.match(r"# [^\n]+\n\n\*\*What you will learn\*\*\n\n(- [^\n]+\n( [^\n]+\n)*){3,}", first.source)
    assert "two CPU cores" in first.source, "and with the time that it takes"


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_names_both_axes(name):
    code = "\n".join(cell.source for cell in cells(f"{name}.py", "code"))
    assert code.count("xlabel") >= code.count("pyplot.show()") > 0
    assert code.count("ylabel") >= code.count("pyplot.show()")


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("on_colab", [False, True])
def test_the_first_code_installs_the_project_on_colab_and_nothing_elsewhere(name, on_colab, monkeypatch, tmp_path):
    calls = []
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(subprocess, "run", lambda command, check: calls.append(command))
    monkeypatch.setattr(sys, "path", list(sys.path))
    if on_colab:
        monkeypatch.setitem(sys.modules, "google.colab", types.ModuleType("google.colab"))
    found = {}
    exec(cells(f"{name}.py", "code")[0].source, found)
    if not on_colab:
        assert calls == []
        return
    assert calls[0] == [*CLONE, found["REPOSITORY"], "dspark"] and " " in found["REPOSITORY"], "one constant, which the reader sets"
    assert all(command[:4] == [sys.executable, "-m", "pip", "install"] for command in calls[1:]) and "--editable" in calls[1]
    assert sys.path[0] == "dspark", "an editable install is found by interpreters that start after it"


def test_scheduler_explorer_runs_and_no_policy_beats_hindsight():
    said = run("scheduler_explorer")
    rows = re.findall(r"│ ([\w -]+?) +│ (\d\.\d\d) +│ (\d\.\d\d) +│", said)
    found = {policy: [float(each) for each in throughput] for policy, *throughput in rows}
    best = found.pop("best in hindsight")
    assert set(found) == {"Algorithm 1", "forecast stop", "capacity and top-K", "always 2", "always 7"}
    assert all(ours <= bound + 0.01 for throughput in found.values() for ours, bound in zip(throughput, best, strict=True))


@needs_gguf
@needs_smollm2
@pytest.mark.slow
def test_quickstart_runs_and_its_round_by_hand_is_that_of_the_library():
    said = run("quickstart")
    assert "the same drafts are accepted, and the same token follows: True" in said
    assert "greedy text is that of plain decoding, token for token: True" in said


@pytest.mark.slow
def test_train_a_drafter_runs():
    said = run("train_a_drafter")
    assert len(re.findall(r"estimated accepted length (\d\.\d\d)", said)) == 2
    assert len(re.findall(r"total variation distance to the table 0\.\d+", said)) == 4


@pytest.mark.slow
def test_kernel_lab_runs_and_the_kernels_give_the_tokens_of_plain_jax():
    said = run("kernel_lab")
    assert re.search(r"TPU kernels: \d+ draws and 3 verdicts compared, \d near ties", said)
    assert "custom calls: tpu_custom_call" in said
