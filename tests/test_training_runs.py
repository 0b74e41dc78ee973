"""The runs of `experiments`: a tiny target writes its own texts, a drafter learns from them, and a stopped run goes on where it was."""

import dataclasses
import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from dspark_jax.data import load_token_sequences
from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.train import OptimizerConfig, TrainConfig
from dspark_jax.weights import load_drafter, load_target
from experiments import run as launcher
from experiments.held_out import spread
from experiments.plot_training import plot_training, read_curve
from experiments.presets import PRESETS
from experiments.train_drafter import TrainRun, train
from experiments.write_texts import WriteTexts, summary, write_texts
from tests.test_tokenizers import write_folder
from tests.tiny_models import write_target


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> Path:
    """A tiny target with a tokenizer and a chat template, as a Hugging Face folder."""
    root = tmp_path_factory.mktemp("model")
    write_target(root / "target", vocab_size=400)
    write_folder(root / "tokenizer")
    for file in (root / "tokenizer").iterdir():
        shutil.copy(file, root / "target" / file.name)
    return root / "target"


@pytest.fixture(scope="module")
def texts(model, tmp_path_factory) -> Path:
    """Texts that the tiny target wrote."""
    config = WriteTexts(
        target=str(model),
        out=tmp_path_factory.mktemp("texts"),
        prompts_per_domain=3,
        temperatures=(0.0, 1.0),
        max_length=300,
        max_turn_tokens=24,
        batch_size=4,
    )
    return write_texts(config)


def small_run(model: Path, texts: Path, out: Path) -> TrainRun:
    drafter = DSparkConfig(
        vocab_size=400,
        hidden_size=32,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        mask_token_id=399,
        taps=(-1, 0),
        num_target_layers=2,
        num_layers=1,
        block_size=3,
        markov_rank=4,
    )
    config = TrainConfig(OptimizerConfig(total_steps=4, learning_rate=1e-2), num_anchors=4, micro_batches=2)
    return TrainRun(
        target=str(model),
        data=(texts,),
        drafter=drafter,
        train=config,
        out=out,
        batch_size=4,
        lengths=(300,),
        held_out_sequences=4,
        held_out_anchors=4,
        checkpoint_every=2,
        mesh=(1, 1, 1),
    )


def test_the_target_writes_texts_of_all_domains_with_held_out_prompts(texts):
    """Both temperatures answer the same prompts; a text begins with its prompt and the answer follows it."""
    sequences = load_token_sequences(texts, vocab_size=400)
    assert set(sequences.temperature.tolist()) == {0, 2}
    assert {0, 1} <= set(sequences.domain.tolist())
    assert 0 < sequences.heldout.sum() < len(sequences)
    assert (sequences.answer_end > sequences.answer_start).all() and sequences.lengths.max() <= 300
    assert summary(texts)["sequences"] == len(sequences)


def test_writing_texts_again_changes_nothing(model, texts):
    before = texts.read_bytes(), (texts.parent / "answers.jsonl").read_bytes()
    config = WriteTexts(
        target=str(model),
        out=texts.parent,
        prompts_per_domain=3,
        temperatures=(0.0, 1.0),
        max_length=300,
        max_turn_tokens=24,
        batch_size=4,
    )
    path = write_texts(config)
    assert (texts.parent / "answers.jsonl").read_bytes() == before[1]
    assert load_token_sequences(path).tokens.tolist() == load_token_sequences(texts).tokens.tolist()


@pytest.mark.slow
def test_a_stopped_run_goes_on_bit_for_bit(model, texts, tmp_path):
    """[E7] 2 + 2 steps equal 4: parameters, moments, metrics and held-out figures."""
    whole = train(small_run(model, texts, tmp_path / "whole"))
    parts = small_run(model, texts, tmp_path / "parts")
    train(dataclasses.replace(parts, stop_step=2))
    resumed = train(parts)
    plain, again = (jax.tree.leaves(dataclasses.replace(state, rng=jax.random.key_data(state.rng))) for state in (whole, resumed))
    for first, second in zip(plain, again, strict=True):
        np.testing.assert_array_equal(first, second)

    def records(folder: str, name: str) -> list[dict]:
        lines = [json.loads(line) for line in (tmp_path / folder / name).read_text().splitlines()]
        return [{key: value for key, value in line.items() if "second" not in key and "memory" not in key} for line in lines]

    assert records("parts", "metrics.jsonl") == records("whole", "metrics.jsonl")
    assert [line["step"] for line in records("whole", "metrics.jsonl")] == [1, 2, 3, 4]
    assert records("parts", "held_out.jsonl")[-1] == records("whole", "held_out.jsonl")[-1]
    target, _ = load_target(str(model))
    loaded = load_drafter(tmp_path / "whole" / "drafter", target.spec)
    assert loaded.drafter.config == small_run(model, texts, tmp_path).drafter


def test_a_folder_with_another_run_is_left_alone(model, texts, tmp_path):
    run = dataclasses.replace(small_run(model, texts, tmp_path / "run"), stop_step=1)
    train(run)
    with pytest.raises(ValueError, match="another configuration"):
        train(dataclasses.replace(run, seed=1))


def test_a_run_takes_the_held_out_texts_that_there_are(texts):
    sequences = load_token_sequences(texts)
    assert len(spread(sequences, len(sequences) + 1)) == len(sequences)
    assert len(spread(sequences, 2)) == 2
    with pytest.raises(ValueError, match="no held-out text"):
        spread(sequences.select(sequences.heldout == 2), 2)


def test_a_run_that_cannot_start_leaves_no_configuration(model, tmp_path, texts):
    run = small_run(model, tmp_path / "missing.npz", tmp_path / "run")
    with pytest.raises(ValueError, match="missing.npz"):
        train(run)
    train(dataclasses.replace(run, data=(texts,), stop_step=1))


def test_the_launcher_says_what_is_wrong_in_one_line(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["run", "train", "nothing"])
    assert launcher.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: preset is 'nothing'; known: ") and "smollm2_dspark, " in line


def test_the_launcher_changes_what_it_is_told_to_and_leaves_the_rest_to_the_preset(monkeypatch):
    runs = []
    monkeypatch.setattr(launcher, "train", runs.append)
    launcher.train_command("smollm2_dspark", packed=True, lengths=(1024,), algorithm="muon", micro_batches=4, mesh=(1, 1, 1))
    preset = PRESETS["smollm2_dspark"]()
    optimizer = dataclasses.replace(preset.train.optimizer, algorithm="muon")
    step = dataclasses.replace(preset.train, micro_batches=4, optimizer=optimizer)
    assert runs == [dataclasses.replace(preset, packed=True, lengths=(1024,), mesh=(1, 1, 1), train=step)]


def test_presets_describe_the_released_drafters():
    """The released drafter's settings, as its model card states them."""
    run = PRESETS["smollm2_dspark"]()
    assert (run.batch_size, run.train.num_anchors, run.train.optimizer.total_steps) == (64, 64, 2773)
    assert (run.train.loss.ce, run.train.loss.l1, run.train.loss.confidence) == (0.1, 0.9, 1.0)
    assert (run.drafter.num_layers, run.drafter.markov_rank, run.drafter.block_size) == (2, 64, 7)
    assert run.train.optimizer.warmup_steps == 60


def test_a_run_is_drawn_beside_the_released_one(model, texts, tmp_path):
    pytest.importorskip("matplotlib", reason="needs the package matplotlib (extra `plots`)")
    run = dataclasses.replace(small_run(model, texts, tmp_path / "run"), stop_step=1)
    train(run)
    ((anchors, greedy, sampled),) = read_curve(run.out)
    assert anchors > 0 and 1.0 <= greedy <= 4.0 and 1.0 <= sampled <= 4.0
    plot_training(run.out, tmp_path / "curve.png")
    assert (tmp_path / "curve.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="held_out.jsonl"):
        plot_training(tmp_path / "nothing", tmp_path / "curve.png")
