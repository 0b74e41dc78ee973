"""The toy suite: its text, its budgets, what is read off its rounds, and a very small one from end to end."""

import dataclasses
import io
import json

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

from dspark_jax.anchors import valid_anchors
from dspark_jax.drafters.chain import chain_targets
from dspark_jax.drafters.dflash import DFlashConfig
from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.losses import DraftLossConfig
from dspark_jax.protocols import TrainBatch
from experiments.toy_drafters import RIVALS, ToyCell, draft_vocabulary, drafter_config, run_toy_cell, training_texts
from experiments.toy_report import accepted_length, comparison_rows, drafter_rows
from experiments.toy_rounds import CURVE, DecodedPrompts, figures_of, schedule_gain
from experiments.toy_suite import ToySuite, report_again, suite_json, write_suite
from experiments.toy_target import ToyTargetConfig, prepare_target
from experiments.toy_texts import (
    MASK_ID,
    MASK_TOKEN,
    Corpus,
    as_sequences,
    draw_prompts,
    draw_windows,
    encode_files,
    read_corpus,
    train_tokenizer,
    unseen_windows,
)

TINY_TARGET = ToyTargetConfig(
    vocab_size=400,
    hidden_size=16,
    intermediate_size=32,
    num_layers=3,
    num_heads=2,
    num_kv_heads=1,
    head_dim=8,
    text_bytes=600_000,
    steps=3,
    batch_size=2,
    window=24,
    prompt_tokens=12,
    answer_tokens=12,
    training_texts=16,
    held_out_prompts=6,
)
TINY = ToyCell(
    num_layers=1, block_size=3, markov_rank=4, taps=(0, 1), steps=3, batch_size=4, prompts=4, timed_prompts=2, target=TINY_TARGET
)
BUDGET = ("steps", "batch_size", "anchors", "anchors_per_text", "texts", "prompts", "target", "learning_rate")


@pytest.fixture(scope="module")
def modules(tmp_path_factory):
    """Twenty small modules and a file that the build of a Python leaves."""
    folder = tmp_path_factory.mktemp("library")
    for number in range(20):
        lines = [f"def function_{number}_{line}(argument):\n    return argument * {line} + {number}\n" for line in range(30)]
        (folder / f"module_{number:02}.py").write_text("import sys\n\n" + "\n".join(lines))
    (folder / "_sysconfigdata_here.py").write_text("build_time_vars = {}\n")
    return folder


def test_the_split_is_the_same_every_time_and_no_file_is_on_both_sides(modules):
    corpus, again = read_corpus(10**6, modules), read_corpus(10**6, modules)
    assert dataclasses.astuple(corpus) == dataclasses.astuple(again)
    assert len(corpus.training) == 18 and len(corpus.held_out) == 2
    assert not set(corpus.training) & set(corpus.held_out)
    assert not any("build_time_vars" in text for text in corpus.training + corpus.held_out)


def test_another_amount_of_text_has_another_fingerprint(modules):
    assert read_corpus(20_000, modules).fingerprint != read_corpus(10**6, modules).fingerprint


def test_too_few_modules_are_refused(modules):
    with pytest.raises(ValueError, match=r"num_bytes is 100, .*gives 1 modules for it; at least 10"):
        read_corpus(100, modules)


def test_this_python_has_enough_text():
    corpus = read_corpus(ToyTargetConfig().text_bytes)
    assert sum(map(len, corpus.training)) > 2_000_000 and len(corpus.held_out) > 5
    assert not any(MASK_TOKEN in text for text in corpus.training + corpus.held_out)


def test_the_vocabulary_is_the_same_every_time_and_loses_nothing(modules):
    texts = read_corpus(10**6, modules).training
    tokenizer, again = train_tokenizer(texts, 300), train_tokenizer(texts, 300)
    assert tokenizer.to_str() == again.to_str() and tokenizer.get_vocab_size() == 300
    odd = "def déjà_vu():\n\treturn '\u2713'\n"
    (ids,) = encode_files(tokenizer, [odd])
    assert tokenizer.decode(ids.tolist()) == odd and MASK_ID not in ids


@pytest.mark.parametrize("size", [257, 30_000])
def test_a_vocabulary_that_the_text_does_not_give_is_refused(modules, size):
    with pytest.raises(ValueError, match=f"vocab_size is {size}; "):
        train_tokenizer(read_corpus(10**6, modules).training, size)


def test_windows_are_pieces_of_files_and_none_overlaps():
    files = [np.arange(100, 123), np.arange(200, 211)]
    windows = draw_windows(files, 5, seed=3)
    assert sorted(windows[:, 0].tolist()) == [100, 105, 110, 115, 200, 205]
    assert (np.diff(windows, axis=1) == 1).all()
    np.testing.assert_array_equal(windows, draw_windows(files, 5, seed=3))
    with pytest.raises(ValueError, match="training_texts is 7; allowed are 1 to 6"):
        draw_prompts(windows, 7, "training_texts")


def test_a_prompt_that_stands_in_a_training_file_is_not_held_out():
    corpus = Corpus(training=("import sys\nimport os\n",) * 9, held_out=("import os\nmine = 1\n",), fingerprint="")
    tokenizer = train_tokenizer(corpus.training, 258)
    (ids,) = encode_files(tokenizer, corpus.held_out)
    windows = np.stack([ids[:10], ids[9:19]])
    np.testing.assert_array_equal(unseen_windows(windows, 9, tokenizer, corpus), windows[1:])


def test_every_field_of_a_target_tells_it_apart():
    corpus = Corpus((), (), "text")
    own = TINY_TARGET.identity(corpus)
    assert own == dataclasses.replace(TINY_TARGET).identity(corpus)
    names = [field.name for field in dataclasses.fields(ToyTargetConfig)]
    others = {dataclasses.replace(TINY_TARGET, **{name: getattr(TINY_TARGET, name) * 2 or 1}).identity(corpus) for name in names}
    assert len(others) == len(names) and own not in others
    assert TINY_TARGET.identity(Corpus((), (), "other text")) != own


@pytest.mark.parametrize("name", sorted(RIVALS))
def test_all_drafters_have_one_budget(name):
    assert [getattr(RIVALS[name], field) for field in BUDGET] == [getattr(RIVALS["dspark"], field) for field in BUDGET]


def test_block_drafters_and_chains_have_the_same_anchors():
    """Block drafters draw all anchors of a text, and a chain begins behind as many: 11 of an answer of 12 tokens."""
    texts = as_sequences(np.ones((2, 24), int), 12, np.zeros(2), np.zeros(2), np.arange(2))
    position = np.arange(24)
    answer = (position >= texts.answer_start[:, None]) & (position < texts.answer_end[:, None])
    mask = jnp.asarray(answer)
    nothing = jnp.zeros((2, 24, 1))
    batch = TrainBatch(jnp.ones((2, 24), jnp.int32), mask, nothing, nothing, jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), bool))
    anchors = valid_anchors(mask).sum(axis=1)
    chains = chain_targets(batch, 3, "answer_blocks").supervised[:, :, 0].sum(axis=1)
    assert anchors.tolist() == chains.tolist() == [TINY.anchors_per_text] * 2 == [11, 11]
    assert TINY.anchors == TINY.steps * TINY.batch_size * 11 and TINY.train.num_anchors == 11


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"drafter": "medusa"}, "drafter is 'medusa'; allowed: dspark, dflash, eagle3, mtp"),
        ({"texts": "web"}, "texts is 'web'; allowed: on_policy, off_policy"),
        ({"confidence": "guess"}, "confidence is 'guess'; allowed: None, head"),
        ({"confidence": "head", "drafter": "eagle3"}, "confidence is 'head' with drafter 'eagle3'"),
        ({"steps": 0}, "steps is 0; "),
        ({"prompts": 7}, "prompts is 7; the target has 6"),
        ({"timed_prompts": 5}, "timed_prompts is 5; allowed are 2 to 4"),
        ({"block_size": 11}, "block_size is 11; allowed are 1 to 10"),
        ({"taps": (2,)}, "taps is"),
        ({"markov_head_type": "gru"}, "markov_head_type is 'gru'"),
        ({"draft_vocab_size": 401}, "draft_vocab_size is 401"),
    ],
)
def test_a_cell_that_cannot_be_run_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(TINY, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [({"held_out_prompts": 0}, "held_out_prompts is 0"), ({"training_texts": 5}, "training_texts is 5"), ({"window": 1}, "window is 1")],
)
def test_a_target_that_cannot_be_made_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(TINY_TARGET, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"drafters": ("dspark", "medusa")}, "drafters is .*medusa.*allowed are different names"),
        ({"drafters": ()}, "drafters is"),
        ({"seeds": (1, 1)}, "seeds is"),
    ],
)
def test_a_suite_of_unknown_or_repeated_cells_is_refused(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        ToySuite(**changes)


def test_a_cell_says_everything_about_its_drafter():
    dspark = drafter_config(dataclasses.replace(TINY, markov_head_type="rnn", detach_confidence=True, loss_decay=7.0, draft_vocab_size=100))
    assert isinstance(dspark, DSparkConfig) and dspark.confidence_head and dspark.confidence_score is None
    assert (dspark.markov_head_type, dspark.detach_confidence, dspark.loss_decay, dspark.draft_vocab_size) == ("rnn", True, 7.0, 100)
    headless = drafter_config(dataclasses.replace(TINY, markov_rank=0))
    assert headless.confidence_head and not headless.confidence_with_markov
    dflash = drafter_config(dataclasses.replace(TINY, drafter="dflash"))
    assert isinstance(dflash, DFlashConfig) and dflash.confidence_score == "largest" and dflash.mask_token_id == MASK_ID
    eagle3 = drafter_config(dataclasses.replace(TINY, drafter="eagle3", step_loss_decay=0.5, confidence="entropy"))
    assert isinstance(eagle3, Eagle3Config) and (eagle3.step_loss_decay, eagle3.confidence_score) == (0.5, "entropy")
    mtp = drafter_config(dataclasses.replace(TINY, drafter="mtp", block_size=1, confidence="none"))
    assert isinstance(mtp, MTPConfig) and mtp.taps == () and mtp.confidence_score is None


def test_drafters_are_trained_with_the_losses_of_the_reference():
    assert RIVALS["dspark"].train.loss == DraftLossConfig(ce=0.1, l1=0.9, confidence=1.0, chunk=1024)
    assert RIVALS["dflash"].train.loss == DraftLossConfig(ce=1.0, l1=0.0, confidence=0.0, chunk=1024)
    assert RIVALS["dflash_full_loss"].train.loss == DraftLossConfig(ce=0.1, l1=0.9, confidence=0.0, chunk=1024)
    assert RIVALS["eagle3"].train.loss == DraftLossConfig(ce=0.0, l1=0.0, confidence=0.0, soft_ce=1.0, chunk=1024)


def test_the_draft_vocabulary_is_what_the_texts_use_most():
    texts = as_sequences(np.asarray([[5, 5, 5, 9, 9, 2], [5, 7, 7, 7, 2, 2]]), 2, np.zeros(2), np.zeros(2), np.arange(2))
    ids = draft_vocabulary(dataclasses.replace(TINY, draft_vocab_size=3), texts)
    assert ids is not None and ids.tolist() == [2, 5, 7]
    assert draft_vocabulary(TINY, texts) is None


def made_up(accepted, confidence=None, prompts=4, seed=0):
    """Rounds of as many prompts in turns, block 3."""
    rng = np.random.default_rng(seed)
    seconds = 1.0 + rng.random((prompts, 2))
    return DecodedPrompts(
        prompt=np.arange(len(accepted)) % prompts,
        accepted=np.asarray(accepted),
        confidence_logits=confidence,
        block_size=3,
        num_prompts=prompts,
        seconds=seconds,
        tokens=np.full((prompts, 2), 10),
        identical=prompts,
    )


def test_figures_are_read_off_the_rounds():
    figures = figures_of(made_up([0, 3, 1, 2, 0, 3, 1, 2]))
    assert figures["accepted_length"]["value"] == 2.5
    assert figures["accepted_length"]["low"] < 2.5 < figures["accepted_length"]["high"]
    assert figures["conditional_acceptance"] == [0.75, 0.6667, 0.5] and figures["rounds_reached"] == [8, 6, 4]
    assert (figures["emitted"], figures["rounds"]) == ([2, 8, 4, 6], [2, 2, 2, 2])
    assert figures["calibration"] is None
    ratio = figures["speed"]["ratio"]
    assert ratio["low"] <= ratio["value"] <= ratio["high"]
    assert ratio["value"] == pytest.approx(figures["speed"]["tokens_per_second"] / figures["speed"]["plain_tokens_per_second"], abs=0.01)


def test_a_position_that_no_round_reached_has_no_figure():
    assert figures_of(made_up([0, 0, 0, 0]))["conditional_acceptance"] == [0.0, None, None]


def test_calibration_brings_overconfident_drafts_down_on_prompts_it_was_not_fitted_on():
    rng = np.random.default_rng(0)
    logits = rng.normal(1.0, 1.5, (512, 3))
    kept = np.cumprod(rng.random(logits.shape) < 1 / (1 + np.exp(-logits / 3)), axis=1)
    calibration = figures_of(made_up(kept.sum(axis=1), logits.astype(np.float32)))["calibration"]
    assert calibration["rounds_fitted"] == calibration["rounds_judged"] == 256
    assert np.mean(calibration["ece"]["scaled"]) < 0.6 * np.mean(calibration["ece"]["raw"])
    assert np.mean(calibration["temperatures"]) > 1.5


@pytest.mark.parametrize(("chance", "accepted", "length"), [(0.999, 7, 7), (0.001, 0, 0)])
def test_a_schedule_that_knows_the_outcome_is_no_worse_than_any_fixed_length(chance, accepted, length):
    labels = (np.arange(7) < accepted).astype(np.int32)[None].repeat(8, axis=0)
    survival = np.cumprod(np.full((8, 7), chance), axis=1)
    gain = schedule_gain(survival, np.full(8, accepted), labels, CURVE)
    assert gain["mean_verified"] == length
    assert gain["scheduled"] >= gain["best_fixed"] >= gain["whole_blocks"]


def record_of(name, seed, emitted, rounds):
    """A record with as much as the reports read."""
    figures = {
        "emitted": emitted,
        "rounds": rounds,
        "rounds_reached": [40, 20, 2],
        "conditional_acceptance": [0.5, 0.25, 1.0],
        "speed": {"plain_tokens_per_second": 10.0, "tokens_per_second": 20.0, "ratio": {"value": 2.0, "low": 1.9, "high": 2.1}},
        "calibration": None,
    }
    training = {"seconds": 1.0, "step_seconds": 0.1}
    return {"name": name, "seed": seed, "parameters": 7, "anchors": 9, "training": training, "temperatures": {"0": figures, "1": figures}}


def test_a_drafter_that_equals_another_has_a_ratio_of_one_in_every_resampling():
    records = [record_of(name, seed, [4, 6, 9], [2, 3, 3]) for name in ("one", "other") for seed in (0, 1)]
    rows = comparison_rows(records, "one")
    assert [(row["over"], row["ratio"], row["low"], row["high"]) for row in rows] == [("other", 1.0, 1.0, 1.0)] * 2
    assert rows[0]["by_seed"] == "1.000 1.000"


def test_a_comparison_is_paired_by_prompt():
    """Half as many rounds on every prompt: a ratio of two without any width, however different the prompts are."""
    records = [record_of("one", 0, [8, 90], [2, 3]), record_of("other", 0, [8, 90], [4, 6])]
    assert {(row["ratio"], row["low"], row["high"]) for row in comparison_rows(records, "one")} == {(2.0, 2.0, 2.0)}
    figure = accepted_length([records[0]], "0")
    assert figure.value == 19.6 and figure.draws.min() == 4.0 and figure.draws.max() == 30.0


def test_the_rows_of_a_drafter_pool_its_seeds():
    records = [record_of("one", 0, [4, 4], [2, 2]), record_of("one", 1, [8, 8], [2, 2])]
    row = drafter_rows(records)[0]
    assert row["accepted_length"] == 3.0 and (row["low"], row["high"]) == (2.0, 4.0) and row["seeds"] == 2
    assert row["conditional_acceptance"] == "0.5 0.25 -"


def test_a_suite_runs_every_drafter_with_every_seed():
    cells = ToySuite(seeds=(3, 5), steps=7, prompts=4, target_steps=2).cells()
    assert [(name, cell.seed) for name, cell in cells] == [(name, seed) for seed in (3, 5) for name in ToySuite().drafters]
    assert {(cell.steps, cell.prompts, cell.timed_prompts, cell.target.steps) for _, cell in cells} == {(7, 4, 4, 2)}


@pytest.mark.slow
def test_a_very_small_suite_from_end_to_end(tmp_path):
    """Greedy answers are those of plain decoding, a second run of a cell gives the same rounds, and everything is written."""
    cells = {
        "dspark": TINY,
        "dflash": dataclasses.replace(TINY, drafter="dflash", draft_vocab_size=200, texts="off_policy"),
        "eagle3": dataclasses.replace(TINY, drafter="eagle3", verifier="block"),
        "mtp": dataclasses.replace(TINY, drafter="mtp", block_size=1),
    }
    records = [{"name": name, "seed": 0, "seconds": 0.0, **run_toy_cell(cell, tmp_path)} for name, cell in cells.items()]
    for record in records:
        greedy = record["temperatures"]["0"]
        assert greedy["speed"]["identical_answers"] == greedy["speed"]["prompts"] == 2
        assert 1.0 <= greedy["accepted_length"]["value"] <= record["cell"]["block_size"] + 1
        assert record["anchors"] == TINY.anchors and record["training"]["last_loss"] > 0
    again = run_toy_cell(TINY, tmp_path)
    for temperature, figures in again["temperatures"].items():
        assert figures["emitted"] == records[0]["temperatures"][temperature]["emitted"]

    prepared = prepare_target(TINY_TARGET, tmp_path / "targets")
    assert len(list((tmp_path / "targets").iterdir())) == 1 and prepared.identity == again["target"]
    held_out = {tuple(prompt) for prompt in prepared.held_out_prompts()}
    assert len(held_out) == TINY_TARGET.held_out_prompts
    for cell in (TINY, cells["dflash"]):
        texts = training_texts(cell, prepared)
        windows = np.lib.stride_tricks.sliding_window_view(texts.tokens.reshape(len(texts), -1), TINY_TARGET.prompt_tokens, axis=1)
        learnt = {tuple(window) for window in windows.reshape(-1, TINY_TARGET.prompt_tokens).tolist()}
        assert len(texts) == TINY_TARGET.training_texts and not learnt & held_out
    prompts = [texts.tokens.reshape(-1, 24)[texts.heldout == 0, :12].tolist() for texts in (prepared.on_policy, prepared.off_policy)]
    assert prompts[0] == prompts[1]

    content = suite_json(records, "dspark", prepared.report, {})
    write_suite(tmp_path / "report", content, records)
    names = {path.name for path in (tmp_path / "report").iterdir()}
    assert names == {"toy_suite.json", "cells.json", "drafters.csv", "comparisons.csv", "tables.md", "toy_suite.png"}
    stored = json.loads((tmp_path / "report" / "toy_suite.json").read_text())
    assert [row["over"] for row in stored["comparisons"]] == ["dflash", "dflash", "eagle3", "eagle3", "mtp", "mtp"]
    console = Console(record=True, width=200, file=io.StringIO())
    assert report_again(tmp_path / "report", console) == stored
    shown = console.export_text()
    assert all(shown.count(name) >= 4 for name in cells)
