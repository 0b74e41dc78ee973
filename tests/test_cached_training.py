"""Training from a cache of features is training online, and a cache that is not the run's own is refused before anything is written."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import pytest

from dspark_jax.batches import TokenBatches
from dspark_jax.data import load_token_sequences, save_token_sequences
from dspark_jax.feature_cache import FeatureCache
from dspark_jax.weights import load_target
from experiments import feature_precision, write_feature_cache
from experiments import run as launcher
from experiments.stored_features import feature_rows, features_origin, text_rows, training_texts
from experiments.train_drafter import train
from experiments.training_log import read_lines
from experiments.write_feature_cache import WriteFeatureCache, write_features
from tests.test_tokenizers import write_folder
from tests.tiny_models import edit_json
from tests.training_host import quick_compilation, tiny_run, write_run_inputs

pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """The inputs of a tiny run, and a cache of its features in `float32`."""
    path = tmp_path_factory.mktemp("cached_training")
    write_run_inputs(path)
    with quick_compilation(), pytest.MonkeyPatch.context() as patch:
        patch.setitem(write_feature_cache.PRESETS, "tiny", lambda: tiny_run(path, "preset"))
        write_features(cache_of("float32", path))
        yield path


def cache_of(dtype, folder, **changes):
    """What writes a cache in `folder / dtype`, in shards of some six texts."""
    return WriteFeatureCache("tiny", folder / dtype, features_dtype=dtype, hidden_dtype=dtype, shard_bytes=50_000, **changes)


def arrays(state):
    return [np.asarray(leaf) for leaf in jax.tree.leaves((state.params, state.opt_state))]


def run_in(folder, out, **changes):
    return dataclasses.replace(tiny_run(folder, out), **changes)


def test_a_float32_cache_trains_as_the_target_itself(folder):
    """Parameters and moments behind three steps; the finished run is found again with its cache elsewhere, but not with another one."""
    online = train(run_in(folder, "online"))
    run = run_in(folder, "cached", features=folder / "float32")
    for ours, theirs in zip(arrays(train(run)), arrays(online), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    have, want = (read_lines(folder / out / "metrics.jsonl") for out in ("cached", "online"))
    for mine, other in zip(have, want, strict=True):
        assert mine["blocks"] == other["blocks"] > 0
        np.testing.assert_allclose(mine["loss"], other["loss"], rtol=1e-5)

    moved = shutil.copytree(folder / "float32", folder / "moved")
    assert int(train(dataclasses.replace(run, features=moved)).step) == 3
    edit_json(moved / "feature_cache.json", hidden_dtype="bfloat16")
    for features in (moved, None):
        with pytest.raises(ValueError, match="another configuration"):
            train(dataclasses.replace(run, features=features))


@pytest.mark.parametrize("packed", [False, True])
def test_stored_rows_are_those_of_the_stream_from_any_position_on(folder, packed):
    """Each with the position behind itself, although the next batch is read ahead."""
    texts = training_texts(load_token_sequences(folder / "texts.npz"))
    stream = TokenBatches(texts, batch_size=3, lengths=(64,), packed=packed)
    cache = FeatureCache.open(folder / "float32", None, texts)
    begin = None
    for _ in range(2):
        plain, stored = text_rows(stream.stream(begin)), feature_rows(stream.stream(begin), cache)
        for _ in range(stream.batches_per_epoch - 1):
            (want, position), ((*have, features, last_hidden), begin) = next(plain), next(stored)
            assert begin == position
            jax.tree.map(np.testing.assert_array_equal, tuple(have), want)
            assert (features.shape, last_hidden.shape) == ((3, 64, 64), (3, 64, 32)) and features[want[0] > 0].any(axis=-1).all()


def test_features_go_through_a_dtype_as_through_a_cache(folder):
    """What `feature_precision` judges is what a cache of that dtype gives back."""
    write_features(cache_of("float8_e4m3fn", folder))
    exact, stored = (FeatureCache.open(folder / dtype).read(3) for dtype in ("float32", "float8_e4m3fn"))
    for name, taps in (("features", 2), ("last_hidden", 1)):
        have = feature_precision.through(getattr(exact, name)[None], taps, "float8_e4m3fn")[0]
        np.testing.assert_allclose(have, getattr(stored, name), rtol=1e-5, atol=1e-6)
        assert np.abs(have - getattr(exact, name)).max() > 1e-4


def test_a_difference_has_the_standard_error_of_its_groups():
    """Three groups of ten blocks; the difference of each is exactly known."""
    exact, other = (np.asarray([[length, 10.0] for length in lengths]) for lengths in ((20, 30, 25), (21, 30, 29)))
    found = feature_precision.compared(other, exact)
    assert found["accepted_length"] == pytest.approx(80 / 30, abs=1e-4) and found["difference"] == pytest.approx(5 / 30, abs=1e-5)
    assert found["standard_error"] == pytest.approx(np.std([0.1, 0.0, 0.4], ddof=1) / np.sqrt(3), abs=1e-5)


@pytest.mark.slow
def test_packed_rows_over_a_mesh_train_as_the_target_itself(folder):
    """Rows of several texts, split over devices: features are those of each text by itself."""
    packed = {"packed": True, "lengths": (128,), "batch_size": 4, "stop_step": 2}
    online = train(run_in(folder, "packed_online", **packed))
    cached = train(run_in(folder, "packed_cached", **packed | {"features": folder / "float32", "mesh": (1, 2, 4)}))
    for ours, theirs in zip(arrays(cached), arrays(online), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-3, atol=1e-5)


def other_target(folder):
    copy = shutil.copytree(folder / "target", folder / "other_target")
    edit_json(copy / "config.json", rope_theta=20000.0)
    return {"target": str(copy)}


def other_template(folder):
    """The same model with a tokenizer, whose chats are written otherwise."""
    copy = shutil.copytree(folder / "target", folder / "other_template")
    write_folder(folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        shutil.copy(file, copy / file.name) if not (copy / file.name).exists() else None
    return {"target": str(copy)}


def other_texts(folder):
    texts = load_token_sequences(folder / "texts.npz")
    tokens = texts.tokens.copy()
    tokens[9] = tokens[9] % 60 + 3
    save_token_sequences(folder / "other_texts.npz", dataclasses.replace(texts, tokens=tokens))
    return {"data": (folder / "other_texts.npz",)}


def other_taps(folder):
    return {"drafter": dataclasses.replace(tiny_run(folder, "").drafter, taps=(0,))}


def shorter_texts(folder):
    write_features(cache_of("bfloat16", folder, lengths=(24,)))
    return {"features": folder / "bfloat16"}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (other_target, "float32 were made for something else: target is '.*', the run has '[^;]*$"),
        (other_template, "float32 were made for something else: template is '.*', the run has '[^;]*$"),
        (other_taps, r"float32 were made for something else: taps is \(-1, 0\), the run has \(0,\)$"),
        (other_texts, "texts are not those that the features in .*float32 were made from"),
        (shorter_texts, r"lengths is \(32,\); allowed: at most 24, to which the texts of .*bfloat16 were cut"),
        (lambda folder: {"features": folder / "nothing"}, "nothing has no file feature_cache.json"),
    ],
)
def test_a_cache_of_something_else_is_refused_before_anything_is_written(folder, changes, reason):
    run = run_in(folder, "refused", **{"features": folder / "float32"} | changes(folder))
    with pytest.raises(ValueError, match=reason):
        train(run)
    assert not run.out.exists()


def test_a_cache_without_texts_that_the_run_takes_is_refused(folder):
    copy = shutil.copytree(folder / "float32", folder / "few")
    edit_json(copy / "feature_cache.json", min_loss_tokens=15)
    with pytest.raises(ValueError, match="leaves out texts with fewer than 15 answer tokens; allowed: at most 14"):
        train(run_in(folder, "refused", features=copy))


def test_the_command_writes_what_a_run_of_its_preset_reads(folder, monkeypatch, capsys):
    """Two hosts that do not talk to each other, the target split over two devices; held-out texts are left out."""
    options = ["--out", str(folder / "by_command"), "--features-dtype", "float32", "--hidden-dtype", "float8_e4m3fn", "--num-hosts", "2"]
    for host in ("0", "1"):
        monkeypatch.setattr("sys.argv", ["run", "cache", "tiny", *options, "--tensor", "2", "--host", host])
        assert launcher.main() == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "features of 16 texts" in printed and "are free in" in printed and "16 texts; train on them with --features" in printed
    first, second = (write_feature_cache.CacheManifest.read(folder / name) for name in ("by_command", "float32"))
    assert first == dataclasses.replace(
        second, hidden_dtype="float8_e4m3fn", shard_lengths=first.shard_lengths, note="Target target, texts texts.npz."
    )
    assert len(first.shard_lengths) == 2 and json.loads((folder / "by_command" / "dataset_info.json").read_text())["name"] == "features"


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["nothing"], "preset is 'nothing'; known: small_dflash, "),
        (["tiny", "--tensor", "9"], "tensor is 9; allowed: 1 to 8, the devices of this host"),
        (["tiny", "--host", "2", "--num-hosts", "2"], "process_index is 2; allowed: 0 to 1"),
        (["tiny", "--multi-host", "--host", "1"], "num_hosts is 1 and host 1; allowed with multi_host: neither, it finds them out"),
        (["tiny", "--taps", "0", "2"], r"taps is \(0, 2\); allowed: -1 to 1, the target's layers"),
    ],
)
def test_the_command_says_what_is_wrong_in_one_line(folder, monkeypatch, capsys, options, reason):
    monkeypatch.setattr("sys.argv", ["run", "cache", *options, "--out", str(folder / "unwritten")])
    assert launcher.main() == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"error: {reason.replace(chr(92), '')}")
    assert not (folder / "unwritten").exists()


def test_a_target_without_a_tokenizer_has_no_template(folder):
    """Its weights alone tell it from another one, wherever the folder lies."""
    target, params = load_target(folder / "target")
    copy = shutil.copytree(folder / "target", folder / "elsewhere")
    origins = [features_origin(str(path), target, params, (-1, 0)) for path in (folder / "target", copy)]
    assert origins[0] == origins[1] and origins[0].taps == (-1, 0) and origins[0].hidden_size == 32
