"""Caches that DeepSpec wrote are read bit for bit, and whatever is wrong with one is said before a number of it is used."""

import json
import shutil

import ml_dtypes
import numpy as np
import pytest

from dspark_jax.deepspec_cache import FIELDS, RECORD, DeepSpecCache
from dspark_jax.feature_samples import FeatureOrigin, FeatureStore, pad_samples
from tests.tiny_models import edit_json

ORIGIN = FeatureOrigin(target="tiny", taps=(0, 2, 4), hidden_size=32, template="qwen")


@pytest.fixture
def folder(golden, tmp_path):
    """A copy of the golden cache, to be damaged."""
    return shutil.copytree(golden / "target_cache_tiny", tmp_path / "cache")


def edit_index(folder, record, field, value):
    index = np.fromfile(folder / "samples.idx", RECORD)
    if field in FIELDS:
        index["offsets"][record, FIELDS.index(field)] = value
    else:
        index[field][record] = value
    index.tofile(folder / "samples.idx")


def edit_shard(folder, place, value, shard=0):
    path = folder / f"shard-{shard:05d}.bin"
    content = bytearray(path.read_bytes())
    content[place] = value
    path.write_bytes(content)


def test_every_sample_is_the_reference_s_bit_for_bit(golden):
    cache = DeepSpecCache.open(golden / "target_cache_tiny", ORIGIN)
    expected = np.load(golden / "target_cache_tiny" / "expected.npz")
    assert (len(cache), cache.lengths.tolist(), cache.origin, cache.max_length) == (4, [20, 13, 17, 9], ORIGIN, 4096)
    for number in range(4):
        sample = cache.read(number)
        assert (sample.ids.dtype, sample.loss_mask.dtype) == (np.int32, np.bool_)
        np.testing.assert_array_equal(sample.ids, expected[f"s{number}_input_ids"])
        np.testing.assert_array_equal(sample.loss_mask, expected[f"s{number}_loss_mask"] == 1)
        for ours, theirs in (("features", "target_hidden_states"), ("last_hidden", "target_last_hidden_states")):
            values, want = getattr(sample, ours), expected[f"s{number}_{theirs}"]
            assert values.dtype == ml_dtypes.bfloat16
            # The stored bits are the upper half of the float32's.
            np.testing.assert_array_equal(values.view(np.uint16), want.view(np.uint32) >> 16)
            assert not (want.view(np.uint32) & 0xFFFF).any()
    assert isinstance(cache, FeatureStore)


def test_a_batch_of_samples_is_padded_as_the_reference_pads_it(golden):
    cache = DeepSpecCache.open(golden / "target_cache_tiny")
    expected = np.load(golden / "target_cache_tiny" / "expected.npz")
    batch = pad_samples([cache.read(number) for number in range(4)], 20)
    np.testing.assert_array_equal(batch.ids, expected["batch_input_ids"])
    np.testing.assert_array_equal(batch.loss_mask, expected["batch_loss_mask"] == 1)
    np.testing.assert_array_equal(batch.features.astype(np.float32), expected["batch_target_hidden_states"])
    np.testing.assert_array_equal(batch.last_hidden.astype(np.float32), expected["batch_target_last_hidden_states"])


@pytest.mark.parametrize(
    ("wanted", "reason"),
    [
        ({"target": "other/model"}, "target is 'tiny', the run has 'other/model'"),
        ({"taps": (0, 2)}, r"taps is \(0, 2, 4\), the run has \(0, 2\)"),
        ({"taps": (4, 2, 0)}, r"taps is \(0, 2, 4\), the run has \(4, 2, 0\)"),
        ({"template": "gemma4"}, "template is 'qwen', the run has 'gemma4'"),
        ({"hidden_size": 64, "target": "x"}, "target is 'tiny', the run has 'x'; hidden_size is 32, the run has 64"),
    ],
)
def test_a_cache_made_for_something_else_is_refused_with_the_reason(golden, wanted, reason):
    run = FeatureOrigin(**{"target": "tiny", "taps": (0, 2, 4), "hidden_size": 32, "template": "qwen", **wanted})
    with pytest.raises(ValueError, match=f"target_cache_tiny were made for something else: {reason}"):
        DeepSpecCache.open(golden / "target_cache_tiny", run)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"version": 1}, "version is 1; allowed: 2"),
        ({"version": None}, "version is None; allowed: a value of type int"),
        ({"version": True}, "version is True; allowed: a value of type int"),
        ({"index_record_size": 48}, "index_record_size is 48; allowed: 56"),
        ({"hidden_dtype": "float16"}, "hidden_dtype is 'float16'; allowed: 'bfloat16'"),
        ({"token_dtype": "int64"}, "token_dtype is 'int64'; allowed: 'int32'"),
        ({"mask_dtype": "bool"}, "mask_dtype is 'bool'; allowed: 'uint8'"),
        ({"hidden_size": 0}, "hidden_size is 0; allowed: at least 1"),
        ({"hidden_size": "32"}, "hidden_size is '32'; allowed: a value of type int"),
        ({"hidden_size": 16}, "target_last_hidden_states of sample 0 is at byte 3960; allowed: 2040"),
        ({"target_layer_ids": [0, 2, 4, 5]}, "sample 0 takes 5240 bytes|target_last_hidden_states|sample 0 takes 6520"),
        ({"target_layer_ids": [0, "2"]}, "target_layer_ids is .*; allowed: a list of integers"),
        ({"chat_template": None}, "chat_template is None"),
        ({"num_samples": 5}, "samples.idx has 224 bytes; allowed: 280, 56 for each of 5 samples"),
        ({"num_samples": -1}, "num_samples is -1; allowed: at least 0"),
        ({"num_shards": 4}, "shards has 3 entries; allowed: num_shards, 4"),
        ({"num_shards": 1, "shards": [{"shard_id": 1, "file_name": "shard-00000.bin"}]}, r"shard_id of shards\[0\] is 1"),
        ({"num_shards": 1, "shards": [{"shard_id": 0, "file_name": "../shard-00000.bin"}]}, r"file_name of shards\[0\] is '../shard"),
        ({"num_shards": 1, "shards": [{"shard_id": 0, "file_name": "absent.bin"}]}, "absent.bin is missing"),
        ({"num_shards": 1, "shards": [{"shard_id": 0, "file_name": "shard-00000.bin"}]}, "shard_id of record 1 is 1; allowed: 0 to 0"),
        ({"max_length": 19}, "seq_len of record 0 is 20; allowed: 1 to 19"),
    ],
)
def test_a_manifest_that_does_not_fit_the_format_or_the_files_is_refused(folder, changes, reason):
    edit_json(folder / "manifest.json", **changes)
    with pytest.raises(ValueError, match=reason):
        DeepSpecCache.open(folder)


@pytest.mark.parametrize(
    ("record", "field", "value", "reason"),
    [
        (2, "sample_id", 7, "sample_id of record 2 is 7; allowed: 2 to 2"),
        (3, "shard_id", 3, "shard_id of record 3 is 3; allowed: 0 to 2"),
        (1, "seq_len", 0, "seq_len of record 1 is 0; allowed: 1 to 4096"),
        (1, "seq_len", 14, "sample 1 takes 3668 bytes from byte 0 of shard 1, which has 3406"),
        (1, "seq_len", 12, "attention_mask of sample 1 is at byte 52; allowed: 48"),
        (3, "input_ids", 4455, "sample 3 takes 2358 bytes from byte 4455 of shard 2, which has 6812"),
        (3, "input_ids", 2**64 - 8, "sample 3 takes 2358 bytes from byte 18446744073709551608"),
        (3, "input_ids", 4453, "attention_mask of sample 3 is at byte 4490; allowed: 4489"),
        (0, "target_hidden_states", 2**63, "target_hidden_states of sample 0 is at byte 9223372036854775808; allowed: 120"),
        (0, "loss_mask", 101, "loss_mask of sample 0 is at byte 101; allowed: 100"),
    ],
)
def test_a_record_that_points_to_the_wrong_place_is_refused(folder, record, field, value, reason):
    edit_index(folder, record, field, value)
    with pytest.raises(ValueError, match=reason):
        DeepSpecCache.open(folder)


@pytest.mark.parametrize("kept", [0, 1, 6811])
def test_a_shard_that_was_cut_short_is_refused(folder, kept):
    path = folder / "shard-00002.bin"
    path.write_bytes(path.read_bytes()[:kept])
    with pytest.raises(ValueError, match=f"of shard 2, which has {kept}; allowed: samples inside their shards .the shard may be cut short"):
        DeepSpecCache.open(folder)


def test_an_index_that_was_cut_short_is_refused(folder):
    path = folder / "samples.idx"
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(ValueError, match="samples.idx has 221 bytes; allowed: 224"):
        DeepSpecCache.open(folder)


@pytest.mark.parametrize(
    ("place", "value", "reason"),
    [
        (3, 0x80, r"input_ids\[0\] of sample 0 is -\d+; allowed: 0 to"),
        (82, 0, r"attention_mask\[2\] of sample 0 is 0; allowed: 1 to 1"),
        (105, 2, r"loss_mask\[5\] of sample 0 is 2; allowed: 0 to 1"),
    ],
)
def test_ids_and_masks_that_can_not_be_are_refused_when_their_sample_is_read(folder, place, value, reason):
    edit_shard(folder, place, value)
    cache = DeepSpecCache.open(folder)
    with pytest.raises(ValueError, match=reason):
        cache.read(0)
    assert cache.read(1).ids.shape == (13,)


@pytest.mark.parametrize("index", [-1, 4])
def test_a_sample_that_is_not_there_is_refused(golden, index):
    with pytest.raises(ValueError, match=f"index is {index}; allowed: 0 to 3"):
        DeepSpecCache.open(golden / "target_cache_tiny").read(index)


def test_files_that_are_missing_or_something_else_are_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="elsewhere has no .*manifest.json"):
        DeepSpecCache.open(tmp_path / "elsewhere")
    (folder / "samples.idx").unlink()
    with pytest.raises(ValueError, match="samples.idx is missing"):
        DeepSpecCache.open(folder)
    for content, reason in (("{", "manifest.json is n"), (json.dumps([1]), "manifest.json holds a list")):
        (folder / "manifest.json").write_text(content)
        with pytest.raises(ValueError, match=reason):
            DeepSpecCache.open(folder)


def test_a_cache_of_no_samples_is_empty(folder):
    edit_json(folder / "manifest.json", num_samples=0)
    (folder / "samples.idx").write_bytes(b"")
    assert len(DeepSpecCache.open(folder)) == 0
