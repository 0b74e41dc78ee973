"""Cells that train and measure, on a tiny target: a training is shared, an interrupted one is gone on with, figures are of the drafter."""

import dataclasses
import json
from types import SimpleNamespace

import numpy as np
import pytest

from dspark_jax.data import TokenSequences, offsets_from_lengths, save_token_sequences
from dspark_jax.drafters.eagle3 import Eagle3Config
from experiments import smollm2_cells
from experiments.smollm2_cells import SmolLM2Cell, run_smollm2_cell, training_folder
from experiments.sweep import CellStopped
from tests.test_presets import CHAIN
from tests.tiny_models import write_target
from tests.training_host import quick_compilation, tiny_run


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target, and texts of which every domain has held-out ones at both temperatures."""
    path = tmp_path_factory.mktemp("smollm2_cells")
    write_target(path / "target")
    rng = np.random.default_rng(0)
    kinds = np.arange(48)
    lengths = rng.integers(24, 33, 48)
    texts = TokenSequences(
        tokens=rng.integers(3, 64, lengths.sum()).astype(np.uint16),
        offsets=offsets_from_lengths(lengths),
        answer_start=rng.integers(2, 8, 48).astype(np.int16),
        answer_end=lengths.astype(np.int16),
        finished=np.zeros(48, bool),
        domain=(kinds % 3).astype(np.int8),
        temperature=np.where(kinds // 3 % 2, 2, 0).astype(np.int8),
        heldout=(kinds >= 24).astype(np.int8),
        source=kinds.astype(np.int32),
    )
    save_token_sequences(path / "texts.npz", texts)
    with quick_compilation():
        yield path


def cell_of(folder, **changes) -> SmolLM2Cell:
    return SmolLM2Cell(tiny_run(folder, "tiny"), texts_per_cell=2, first_tokens=12, **changes)


@pytest.mark.slow
def test_a_cell_trains_and_says_what_its_drafter_is_worth(folder, monkeypatch):
    found = run_smollm2_cell(cell_of(folder), folder / "out")
    assert found["steps"] == 3 and found["anchors"] == 3 * 16 * 4 and found["parameters"] > 0
    for name in ("greedy", "sampled"):
        low, high = found[f"accepted_length_{name}_interval"]
        assert 1.0 <= low <= found[f"accepted_length_{name}"] <= high <= 4.0
        assert set(found[f"domains_{name}"]) == {"maths", "code", "chat"}
        assert len(found[f"conditional_acceptance_{name}"]) == 3
        for domain, answers in json.loads(json.dumps(found[f"answers_{name}"])).items():
            assert len({row for row, _, _ in answers}) == 2
            emitted, rounds = (sum(answer[place] for answer in answers) for place in (1, 2))
            assert found[f"domains_{name}"][domain][0] == pytest.approx(emitted / rounds, abs=1e-4)
        assert [step for step, _ in found["estimates"][name]] == [3]
    assert (folder / "out" / found["drafter"] / "model.safetensors").is_file()

    def never(run):
        raise AssertionError("trained again")

    monkeypatch.setattr(smollm2_cells, "train", never)
    judged = run_smollm2_cell(cell_of(folder, draft_length=1, joint_rounds=2, joint_prompts=2), folder / "out")
    assert 1.0 <= judged["accepted_length_greedy"] <= 2.0 and len(judged["conditional_acceptance_greedy"]) == 1
    assert 1.0 <= judged["accepted_length_by_token"] <= judged["accepted_length_by_block"] <= 4.0


@pytest.mark.slow
def test_a_chain_drafter_is_measured_by_the_same_walks(folder):
    drafter = Eagle3Config(**CHAIN, taps=(0,), block_size=3, supervision="drawn_anchors")
    cell = cell_of(folder)
    cell = dataclasses.replace(cell, run=dataclasses.replace(cell.run, drafter=drafter, domains=("code",), batch_size=8))
    found = run_smollm2_cell(cell, folder / "out")
    assert 1.0 <= found["accepted_length_sampled"] <= 4.0 and set(found["domains_sampled"]) == {"code"}


def test_a_training_that_a_signal_ended_ends_the_cell(folder, monkeypatch, tmp_path):
    monkeypatch.setattr(smollm2_cells, "train", lambda run: SimpleNamespace(step=2))
    with pytest.raises(CellStopped, match="stopped behind step 2"):
        run_smollm2_cell(cell_of(folder), tmp_path)


def test_a_cell_names_what_does_not_fit(folder):
    for changes, message in (
        ({"draft_length": 4}, "draft_length is 4; allowed: 1 to block_size 3, or None"),
        ({"joint_prompts": 1}, "joint_prompts is 1; at least 2 is needed"),
    ):
        with pytest.raises(ValueError, match=message):
            cell_of(folder, **changes)
    run = tiny_run(folder, "tiny")
    assert training_folder(run, folder).name.startswith("tiny-")
