"""Writing a cache of features: its size is known first, a run that is stopped goes on, every process writes its own shards."""

import dataclasses
import io
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from rich.console import Console

from dspark_jax import feature_writer
from dspark_jax.data import TokenSequences, offsets_from_lengths
from dspark_jax.feature_cache import FeatureCache, cache_bytes
from dspark_jax.feature_samples import FeatureOrigin, FeatureSample
from dspark_jax.feature_writer import CacheConfig, plan_cache, write_feature_cache
from tests.tiny_features import CONFIG, HALF, KEPT, ORIGIN, QUARTER, QUIET, SMALL, TARGET, fourteen_texts, write
from tests.training_host import quick_compilation

pytest.importorskip("tensorflow_datasets", reason="needs the extra `data`")


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    with quick_compilation():
        yield


@pytest.fixture(scope="module")
def target_params():
    return jax.jit(TARGET.init)(jax.random.key(2))


@pytest.fixture(scope="module")
def texts():
    return fourteen_texts()


@pytest.fixture(scope="module")
def cache(texts, target_params, tmp_path_factory):
    return write(tmp_path_factory.mktemp("cache"), texts, target_params, note="a tiny target")


def same_samples(left, right):
    names = [field.name for field in dataclasses.fields(FeatureSample)]
    return len(left) == len(right) and all(
        np.array_equal(getattr(left.read(number), name), getattr(right.read(number), name)) for number in range(len(left)) for name in names
    )


def one_text(length):
    """A text that is an answer from its first token on."""
    end, nothing = np.asarray([length], np.int16), np.zeros(1, np.int8)
    return TokenSequences(
        tokens=np.ones(length, np.uint16),
        offsets=offsets_from_lengths([length]),
        answer_start=np.zeros(1, np.int16),
        answer_end=end,
        finished=end > 0,
        domain=nothing,
        temperature=nothing,
        heldout=nothing,
        source=np.zeros(1, np.int32),
    )


# Size


@pytest.mark.parametrize("config", [SMALL, HALF, QUARTER], ids=["float32", "bfloat16", "float8"])
def test_the_size_that_is_computed_holds_what_is_written(texts, target_params, tmp_path, config):
    plan = plan_cache(ORIGIN, texts, config)
    write(tmp_path, texts, target_params, config)
    sizes = [plan.manifest.shard_path(tmp_path, shard).stat().st_size for shard in range(len(plan.manifest.shard_lengths))]
    assert all(size <= plan.shard_bytes(shard) for shard, size in enumerate(sizes))
    assert sum(sizes) <= plan.bytes == sum(plan.shard_bytes(shard) for shard in range(len(sizes)))


def test_shards_have_about_the_size_asked_for_and_hold_every_sample_once(texts):
    plan = plan_cache(ORIGIN, texts, SMALL)
    samples = [number for shard in range(len(plan.manifest.shard_lengths)) for number in plan.shard_samples(shard)]
    assert samples == list(range(len(KEPT)))
    largest = int(plan.manifest.sample_bytes(np.asarray([24]))[0])
    payload = [plan.shard_bytes(shard) - 2**17 for shard in range(len(plan.manifest.shard_lengths))]
    assert max(payload) <= SMALL.shard_bytes + largest


def test_the_size_per_token_is_that_of_the_arrays():
    """Qwen3-4B with five taps: 2 D (m + 1) bytes of hidden states, four of the id and one of the mask; float8 takes half and its scales."""
    origin = FeatureOrigin("target", (1, 9, 17, 25, 33), 2560, "template")
    manifest = plan_cache(origin, one_text(4096), CacheConfig(lengths=(4096,))).manifest
    length = np.asarray([4096] * 1000)
    assert cache_bytes(manifest, length) == pytest.approx(4096 * 1000 * (5 + 2 * 2560 * 6), rel=1e-3)
    manifest = dataclasses.replace(manifest, features_dtype="float8_e4m3fn", hidden_dtype="float8_e4m3fn")
    assert cache_bytes(manifest, length) == pytest.approx(4096 * 1000 * (5 + 6 * (2560 + 4)), rel=1e-3)


def test_a_disk_without_room_is_refused_with_both_numbers_before_the_target_reads(texts, tmp_path, monkeypatch):
    plan = plan_cache(ORIGIN, texts, SMALL)
    monkeypatch.setattr(feature_writer.shutil, "disk_usage", lambda path: SimpleNamespace(free=plan.bytes - 1))
    with pytest.raises(ValueError, match=f"has {plan.bytes - 1} bytes free; {plan.bytes} are needed for the"):
        write(tmp_path, texts, None)
    assert not list(tmp_path.glob("*array_record*"))


def test_the_size_is_shown_before_writing(texts, target_params, tmp_path):
    console = Console(record=True, width=200, file=io.StringIO())
    write_feature_cache(tmp_path, TARGET, target_params, ORIGIN, texts, CONFIG, console=console)
    first = console.export_text().splitlines()[0]
    assert first.startswith("features of 12 texts, 203 tokens: 1") and "kB in 1 shards" in first and "are free" in first


# Interruption and several processes


@pytest.mark.parametrize("batches", [0, 1, 3, 4])
def test_a_run_that_is_stopped_goes_on_without_losing_or_repeating_a_sample(cache, texts, target_params, tmp_path, monkeypatch, batches):
    read, left = feature_writer._read, iter(range(batches))

    def interrupted(*args):
        if next(left, None) is None:
            raise KeyboardInterrupt
        return read(*args)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(feature_writer, "_read", interrupted)
        write(tmp_path, texts, target_params)
    with pytest.raises(ValueError, match="lacks . of . shards, .* first: its writing was not finished"):
        FeatureCache.open(tmp_path)
    assert not list(tmp_path.glob("*.unfinished")) and not list(tmp_path.glob(".*"))
    done = {path: path.stat().st_mtime_ns for path in tmp_path.glob("*array_record*")}
    assert same_samples(write(tmp_path, texts, target_params), cache)
    assert all(path.stat().st_mtime_ns == when for path, when in done.items())


def test_a_cache_that_is_complete_is_not_written_again(cache, texts):
    assert same_samples(write(cache.folder, texts, None), cache)


def test_every_process_writes_its_own_shards_and_the_last_one_describes_them(cache, texts, target_params, tmp_path):
    for index in (2, 0, 1):
        assert not (tmp_path / "dataset_info.json").exists()
        write_feature_cache(tmp_path, TARGET, target_params, ORIGIN, texts, CONFIG, process_index=index, process_count=3, console=QUIET)
    assert (tmp_path / "dataset_info.json").exists()
    stored = FeatureCache.open(tmp_path, ORIGIN, texts)
    assert len(stored.manifest.shard_lengths) == 3
    assert stored.text.tolist() == cache.text.tolist()
    for number in range(12):
        np.testing.assert_array_equal(stored.read(number).ids, cache.read(number).ids)
        np.testing.assert_allclose(stored.read(number).features, cache.read(number).features, rtol=1e-5, atol=1e-6)


# What is not begun or gone on with


@pytest.mark.parametrize("changes", [{"lengths": (12, 20)}, {"min_loss_tokens": 3}, {"hidden_dtype": "bfloat16"}])
def test_a_cache_is_not_continued_with_other_settings(cache, texts, changes):
    name = {"lengths": "max_length"}.get(next(iter(changes)), next(iter(changes)))
    with pytest.raises(ValueError, match=f"holds another cache.*: {name} is"):
        write(cache.folder, texts, None, dataclasses.replace(SMALL, **changes))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: CacheConfig(lengths=()), r"lengths is \(\)"),
        (lambda: CacheConfig(batch_size=0), "batch_size is 0"),
        (lambda: CacheConfig(hidden_dtype="int8"), "hidden_dtype is 'int8'; allowed: float32, bfloat16, float8_e4m3fn"),
        (lambda: FeatureOrigin("", (0,), 16, "x"), "target is empty"),
        (lambda: FeatureOrigin("x", (0, 0), 16, "x"), r"taps is \(0, 0\)"),
        (lambda: FeatureOrigin("x", (0,), 0, "x"), "hidden_size is 0"),
        (lambda: plan_cache(ORIGIN, one_text(9), CacheConfig()), "texts has no text with at least 14 answer tokens within 512 tokens"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("changes", "options", "message"),
    [
        ({"hidden_size": 8}, {}, "hidden_size is 8; allowed: 16, the target's"),
        ({"taps": (0, 2)}, {}, r"taps is \(0, 2\); allowed: -1 to 1, the target's layers"),
        ({}, {"process_index": 2, "process_count": 2}, "process_index is 2; allowed: 0 to 1"),
    ],
)
def test_a_cache_that_does_not_fit_the_target_is_refused(texts, tmp_path, changes, options, message):
    with pytest.raises(ValueError, match=message):
        write(tmp_path, texts, None, origin=dataclasses.replace(ORIGIN, **changes), **options)
    assert not list(tmp_path.iterdir())


def test_a_token_that_the_target_does_not_have_is_refused(texts, tmp_path):
    tokens = texts.tokens.copy()
    tokens[2] = 61
    with pytest.raises(ValueError, match=r"texts: tokens\[2\] is 61; allowed: 0 to 60"):
        write(tmp_path, dataclasses.replace(texts, tokens=tokens), None)
