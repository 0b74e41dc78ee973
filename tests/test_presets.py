"""Presets of all drafters: they fit their target, have equal budgets, and a run of every kind of drafter trains and is read back."""

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from dspark_jax.drafters.dflash import DFlashConfig
from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.kinds import DRAFTER_KINDS, drafter_from
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.losses import DraftLossConfig
from dspark_jax.weights import DRAFTER_CONFIGS, load_drafter, load_target
from experiments import write_feature_cache
from experiments.presets import PRESETS, SMALL_PRESETS, SMOLLM2_PRESETS
from experiments.train_drafter import train
from experiments.training_log import read_lines
from experiments.training_speed import SMOLLM2
from experiments.write_feature_cache import WriteFeatureCache, write_features
from tests.tiny_models import TINY_DRAFTER
from tests.training_host import quick_compilation, tiny_run, write_run_inputs

BLOCK: dict[str, Any] = {name: value for name, value in TINY_DRAFTER.items() if name != "markov_rank"}
CHAIN = {name: value for name, value in BLOCK.items() if name not in ("mask_token_id", "num_layers", "taps")}
TINY_CONFIGS = {
    "dspark": DSparkConfig(**BLOCK, markov_rank=4, markov_head_type="rnn", block_size=3, draft_vocab_size=24),
    "dflash": DFlashConfig(**BLOCK, block_size=3, draft_vocab_size=24),
    "eagle3": Eagle3Config(**CHAIN, taps=(0,), block_size=3, draft_vocab_size=24, supervision="drawn_anchors"),
    "mtp": MTPConfig(**CHAIN, draft_vocab_size=24, supervision="drawn_anchors"),
}
LOSSES = {"eagle3": DraftLossConfig(ce=0.0, l1=0.0, confidence=0.0, soft_ce=1.0)}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A tiny target, its texts, and all of its ids by falling frequency."""
    path = tmp_path_factory.mktemp("presets")
    write_run_inputs(path)
    np.save(path / "frequent_ids.npy", np.random.default_rng(0).permutation(64).astype(np.uint16))
    with quick_compilation():
        yield path


def run_of(folder, kind, **changes):
    """Three steps of a drafter of some kind with a draft vocabulary."""
    run = tiny_run(folder, changes.pop("out", kind))
    step = dataclasses.replace(run.train, loss=LOSSES.get(kind, run.train.loss))
    own = {"drafter": TINY_CONFIGS[kind], "train": step, "draft_vocabulary": folder / "frequent_ids.npy"}
    return dataclasses.replace(run, **own | changes)


@pytest.mark.parametrize("name", PRESETS)
def test_a_presets_drafter_fits_its_target(name):
    run = PRESETS[name]()
    config = run.drafter
    for field in ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rope_theta"):
        assert getattr(config, field) == getattr(SMOLLM2, field), field
    assert config.num_target_layers == SMOLLM2.num_layers and run.out.name == name
    assert drafter_from(config).config is config
    assert (run.draft_vocabulary is None) == (config.draft_vocab_size is None)


@pytest.mark.parametrize("presets", [SMOLLM2_PRESETS, SMALL_PRESETS])
def test_all_drafters_of_a_size_have_the_same_texts_anchors_and_steps(presets):
    """What differs is the drafter, its loss and where it is written; chains learn behind the drawn anchors, as blocks do."""
    runs = [preset() for preset in presets.values()]
    steps = [dataclasses.replace(run.train, loss=runs[0].train.loss) for run in runs]
    same = [dataclasses.replace(run, drafter=None, out=runs[0].out, train=step) for run, step in zip(runs, steps, strict=True)]
    assert len(runs) == 7 and all(run == same[0] for run in same)
    assert {getattr(run.drafter, "supervision", "drawn_anchors") for run in runs} == {"drawn_anchors"}


def test_rivals_have_the_loss_of_their_reference():
    weights = {
        name.removeprefix("smollm2_"): [getattr(preset().train.loss, term) for term in ("ce", "l1", "confidence", "soft_ce")]
        for name, preset in SMOLLM2_PRESETS.items()
    }
    full, backbone = [0.1, 0.9, 1.0, 0.0], [0.1, 0.9, 0.0, 0.0]
    assert [weights[name] for name in ("dspark", "dspark_rnn", "dspark_gated")] == [full] * 3
    assert [weights[name] for name in ("no_heads", "mtp")] == [backbone] * 2
    assert weights["dflash"] == [1.0, 0.0, 0.0, 0.0] and weights["eagle3"] == [0.0, 0.0, 0.0, 1.0]


def test_every_kind_of_config_has_its_drafter_and_every_drafter_its_file_format():
    assert set(DRAFTER_KINDS.values()) == set(DRAFTER_CONFIGS)
    with pytest.raises(ValueError, match="drafter is a int; allowed: DSparkConfig, DFlashConfig, Eagle3Config, MTPConfig"):
        drafter_from(3)


@pytest.mark.parametrize("kind", ["dflash", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("dspark", "eagle3"))])
def test_a_run_of_any_kind_trains_and_is_read_back_with_its_draft_vocabulary(folder, kind):
    """The draft ids are the most frequent ones, ascending; all drafters learn behind the same anchors."""
    run = run_of(folder, kind)
    assert int(train(run).step) == 3
    target, _ = load_target(run.target)
    loaded = load_drafter(run.out / "drafter", target.spec)
    assert loaded.drafter.config == run.drafter
    expected = np.sort(np.load(folder / "frequent_ids.npy")[:24])
    np.testing.assert_array_equal(np.asarray(loaded.draft_ids), expected)
    steps = read_lines(run.out / "metrics.jsonl")
    assert [step["blocks"] for step in steps] == [64.0] * 3, "16 texts x 4 anchors"
    assert np.isfinite([step["loss"] for step in steps]).all()


@pytest.mark.slow
def test_a_drafter_that_taps_no_layer_learns_from_any_cache_of_its_target(folder, monkeypatch):
    """MTP reads the last hidden state, which every cache has; the steps are those that it takes online."""
    pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")
    monkeypatch.setitem(write_feature_cache.PRESETS, "tiny", lambda: tiny_run(folder, "preset"))
    write_features(WriteFeatureCache("tiny", folder / "features", features_dtype="float32", hidden_dtype="float32"))
    train(run_of(folder, "mtp"))
    train(run_of(folder, "mtp", out="mtp_cached", features=folder / "features"))
    online, cached = (read_lines(folder / name / "metrics.jsonl") for name in ("mtp", "mtp_cached"))
    np.testing.assert_allclose([step["loss"] for step in cached], [step["loss"] for step in online], rtol=1e-5)


def test_a_run_takes_the_texts_that_it_is_told_to(folder):
    run = run_of(folder, "dflash", domains=("code", "chat"), num_texts=4)
    texts = run.texts(64)
    assert set(texts.domain.tolist()) == {1, 2} and 0 < texts.heldout.sum() < len(texts)
    assert len(write_feature_cache.training_texts(texts, run.num_texts)) == 4
    assert len(write_feature_cache.training_texts(texts, None)) == (texts.heldout == 0).sum() > 4
    for field, value, allowed in (("domains", (), "one or more of maths, code, chat"), ("num_texts", 0, "at least 1 is needed")):
        with pytest.raises(ValueError, match=allowed):
            dataclasses.replace(run, **{field: value})


@pytest.mark.parametrize(
    ("ids", "size", "message"),
    [
        ([0, 1], None, r"wrong.npy and drafter.draft_vocab_size is None; allowed: a size, or no file"),
        ([1, 1, 2], 3, "wrong.npy; allowed: a file whose first 3 entries are different ids below 64"),
        ([1, 2], 3, "wrong.npy; allowed: a file whose first 3 entries"),
        ([1, 2, 64], 3, "wrong.npy; allowed: a file whose first 3 entries"),
        ("absent", 3, "wrong.npy; allowed: an existing .npy file of ids"),
    ],
)
def test_a_draft_vocabulary_that_does_not_fit_is_refused(folder, tmp_path, ids, size, message):
    path = tmp_path / "wrong.npy"
    if isinstance(ids, list):
        np.save(path, np.asarray(ids, np.int32))
    drafter = dataclasses.replace(TINY_CONFIGS["dflash"], draft_vocab_size=size)
    run = dataclasses.replace(run_of(folder, "dflash", out="wrong"), drafter=drafter, draft_vocabulary=path)
    with pytest.raises(ValueError, match=message):
        train(run)
    assert not run.out.exists()


def test_without_a_file_the_most_frequent_ids_of_the_texts_are_drafted(folder):
    run = dataclasses.replace(run_of(folder, "dflash", out="counted"), draft_vocabulary=None)
    learnt = write_feature_cache.training_texts(run.texts(64), None)
    ids = run.draft_ids(learnt)
    assert ids is not None and len(ids) == run.drafter.draft_vocab_size and ids.dtype == np.int32 and (np.diff(ids) > 0).all()
    counts = np.bincount(learnt.tokens, minlength=64)
    assert counts[ids].min() >= np.delete(counts, ids).max() and 0 not in counts[ids]
    whole = dataclasses.replace(run, drafter=dataclasses.replace(run.drafter, draft_vocab_size=None))
    assert whole.draft_ids(learnt) is None


@pytest.mark.slow
def test_a_run_is_known_by_its_draft_ids_and_not_by_their_file(folder, tmp_path):
    run = run_of(folder, "dflash", out="known", stop_step=1)
    train(run)
    stored = json.loads((run.out / "config.json").read_text())
    assert len(stored["draft_ids"]) == 64 and "draft_vocabulary" not in stored
    ids = np.load(folder / "frequent_ids.npy")
    np.save(tmp_path / "moved.npy", ids)
    assert int(train(dataclasses.replace(run, draft_vocabulary=tmp_path / "moved.npy")).step) == 1
    np.save(tmp_path / "other.npy", ids[::-1])
    with pytest.raises(ValueError, match="another configuration"):
        train(dataclasses.replace(run, draft_vocabulary=tmp_path / "other.npy"))
