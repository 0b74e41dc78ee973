"""A cache of features holds what the target says, refuses other uses, and trains as the target itself does."""

import dataclasses
import json
import shutil
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from dspark_jax.anchors import read_batch, sample_anchors
from dspark_jax.batches import TokenBatches
from dspark_jax.data import chatml_template, qwen_template
from dspark_jax.feature_cache import FeatureCache, num_records
from dspark_jax.feature_samples import (
    FeatureStore,
    anchored_batch,
    features_of,
    pad_samples,
    target_fingerprint,
    template_fingerprint,
)
from dspark_jax.losses import DraftLossConfig
from dspark_jax.sharding import make_mesh
from dspark_jax.targets.dense import DenseTarget
from dspark_jax.train import OptimizerConfig, TrainConfig, init_train_state, train_step, train_step_on_features
from tests.linear_drafter import LinearDrafter
from tests.tiny_features import CONFIG, HALF, KEPT, ORIGIN, QUARTER, TARGET, fourteen_texts, write
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


# What is stored


def test_a_sample_is_its_text_and_what_the_target_says_of_it(cache, texts, target_params):
    assert cache.text.tolist() == KEPT and len(cache.manifest.shard_lengths) > 2
    rows = [texts.tokens[texts.offsets[text] : texts.offsets[text + 1]][:24] for text in KEPT]
    ids = jnp.asarray([np.pad(row.astype(np.int32), (0, 24 - len(row))) for row in rows])
    nothing = jnp.zeros((12, 1), jnp.int32)
    said = jax.jit(read_batch, static_argnums=(0, 2))(TARGET, target_params, ORIGIN.taps, ids, ids > 0, nothing, nothing == 0)
    for number, (text, tokens) in enumerate(zip(KEPT, rows, strict=True)):
        sample = cache.read(number)
        features, hidden = said.features[number, : len(tokens)], said.last_hidden[number, : len(tokens)]
        assert sample.ids.tolist() == tokens.tolist() and cache.lengths[number] == len(tokens)
        assert np.flatnonzero(sample.loss_mask).tolist() == list(range(texts.answer_start[text], len(tokens)))
        np.testing.assert_allclose(sample.features, features, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(sample.last_hidden, hidden, rtol=1e-5, atol=1e-6)
    assert isinstance(cache, FeatureStore)


def test_bfloat16_is_the_nearest_number(cache, texts, target_params, tmp_path):
    stored = write(tmp_path, texts, target_params, HALF)
    for number in range(len(cache)):
        for name in ("features", "last_hidden"):
            ours = getattr(stored.read(number), name)
            assert ours.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(ours, getattr(cache.read(number), name).astype(ml_dtypes.bfloat16))


def test_float8_keeps_every_number_to_a_sixteenth_or_to_a_share_of_the_largest(cache, texts, target_params, tmp_path):
    """Scales belong to a position and a tap: three bits of mantissa, and below 2^-6 of the scale steps of 2^-9 of it."""
    stored = write(tmp_path, texts, target_params, QUARTER)
    for number in range(len(cache)):
        for name, taps in (("features", 2), ("last_hidden", 1)):
            exact = getattr(cache.read(number), name).reshape(-1, taps, 16)
            ours = getattr(stored.read(number), name)
            assert ours.dtype == np.float32 and ours.any()
            scale = np.abs(exact).max(axis=-1, keepdims=True) / 448
            error = np.abs(ours.reshape(exact.shape) - exact)
            assert (error <= np.maximum(np.abs(exact) / 16, scale * 2**-10) * 1.001).all()


def test_plain_tfds_reads_the_folder(cache):
    import tensorflow_datasets as tfds

    builder: Any = tfds.builder_from_directory(str(cache.folder))
    source = builder.as_data_source(split="train")
    assert len(source) == builder.info.splits["train"].num_examples == 12
    for number in (0, 5, 11):
        sample = cache.read(number)
        assert int(source[number]["text"]) == KEPT[number]
        np.testing.assert_array_equal(source[number]["ids"], sample.ids)
        np.testing.assert_array_equal(source[number]["features"].reshape(sample.features.shape), sample.features)
    assert json.loads((cache.folder / "metadata.json").read_text())["origin"]["taps"] == [-1, 0]
    assert "a tiny target" in builder.info.description


def test_a_shard_that_is_damaged_is_refused(cache, tmp_path):
    folder = shutil.copytree(cache.folder, tmp_path / "copy")
    path = cache.manifest.shard_path(folder, 1)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match="00001-of-0.* is no whole ArrayRecord file"):
        FeatureCache.open(folder)
    shutil.copy(cache.manifest.shard_path(folder, 0), path)
    (cache.manifest.shard_path(folder, 0)).write_bytes(b"")
    with pytest.raises(ValueError, match="00000-of-0.* is no whole ArrayRecord file"):
        FeatureCache.open(folder)
    with pytest.raises(ValueError, match="absent is no whole ArrayRecord file"):
        num_records(tmp_path / "absent")


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (lambda stored: {**stored, "version": 2}, "version is 2; allowed: 1"),
        (lambda stored: {**stored, "extra": 1}, "extra"),
        (lambda stored: {**stored, "shard_lengths": []}, r"shard_lengths is \(\)"),
        (lambda stored: {name: value for name, value in stored.items() if name != "origin"}, "origin"),
        (lambda stored: {**stored, "shard_lengths": [*stored["shard_lengths"][:-1], 99]}, "records; allowed: 99"),
    ],
)
def test_a_manifest_that_does_not_fit_is_refused(cache, tmp_path, edit, message):
    folder = shutil.copytree(cache.folder, tmp_path / "copy")
    path = folder / "feature_cache.json"
    path.write_text(json.dumps(edit(json.loads(path.read_text()))))
    with pytest.raises(ValueError, match=message):
        FeatureCache.open(folder)


def test_texts_and_samples_that_are_not_there_are_refused(cache):
    with pytest.raises(ValueError, match="text 3 has no sample in .*; allowed: texts with at least 4 answer tokens within 24 tokens"):
        cache.read_texts(np.asarray([0, 3]))
    with pytest.raises(ValueError, match="text 13 has no sample"):
        cache.read_texts(np.asarray([13]))
    with pytest.raises(ValueError, match="index is 12; allowed: 0 to 11"):
        cache.read(12)


# What it was made for


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"target": "another"}, "target is 'tiny', the run has 'another'"),
        ({"taps": (0,)}, r"taps is \(-1, 0\), the run has \(0,\)"),
        ({"template": "gemma4"}, "template is 'chatml', the run has 'gemma4'"),
    ],
)
def test_a_cache_made_for_something_else_is_refused_with_the_reason(cache, texts, changes, reason):
    origin = dataclasses.replace(ORIGIN, **changes)
    with pytest.raises(ValueError, match=f"were made for something else: {reason}"):
        FeatureCache.open(cache.folder, origin)
    with pytest.raises(ValueError, match="holds another cache, which it does not go on with: origin is"):
        write(cache.folder, texts, None, origin=origin)


def test_other_texts_are_refused(cache, texts):
    fewer = texts.select(np.arange(14) < 12)
    with pytest.raises(ValueError, match="texts are not those that the features in"):
        FeatureCache.open(cache.folder, ORIGIN, fewer)
    with pytest.raises(ValueError, match="holds another cache.*: texts is"):
        write(cache.folder, fewer, None)


def test_a_fingerprint_is_that_of_the_weights_wherever_they_lie_and_of_no_others(target_params):
    mesh = make_mesh(fsdp=2, tensor=4)
    print_of = target_fingerprint(TARGET, target_params)
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("fsdp"))
    split = jax.tree.map(lambda leaf: jax.device_put(leaf, rows) if leaf.shape[0] % 2 == 0 else leaf, target_params)
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), target_params)
    assert target_fingerprint(TARGET, split) == target_fingerprint(TARGET, half) == print_of
    layer = target_params["layers_1"]
    projection = layer["self_attn"]["q_proj"]["weight"]
    for changed in (
        projection.at[3, 5].add(0.5),
        projection[::-1],
        projection.at[0, 0].set(projection[0, 1]).at[0, 1].set(projection[0, 0]),
    ):
        attention = {**layer["self_attn"], "q_proj": {"weight": changed}}
        assert target_fingerprint(TARGET, {**target_params, "layers_1": {**layer, "self_attn": attention}}) != print_of
    other = DenseTarget(dataclasses.replace(TARGET.config, rope_theta=5e5))
    assert target_fingerprint(other, target_params) != print_of


def test_a_template_is_its_source_and_its_marks():
    assert template_fingerprint("{{ m }}", qwen_template()) == template_fingerprint("{{ m }}", qwen_template())
    assert len({template_fingerprint(source, marks()) for source in ("{{ m }}", None) for marks in (qwen_template, chatml_template)}) == 4


# Training


# With so large an epsilon an update is nearly proportional to the gradient, so that rounding is not blown up to a whole step.
OPTIMIZER = OptimizerConfig(10, learning_rate=0.1, epsilon=1.0)
TRAIN = TrainConfig(OPTIMIZER, DraftLossConfig(chunk=64), num_anchors=4)


def first_batch(texts):
    return next(TokenBatches(texts, batch_size=4, lengths=(24,), min_loss_tokens=4).stream())[0]


@pytest.fixture(scope="module")
def online(texts, target_params):
    """The drafter's parameters, and a step in which the target reads the texts itself."""
    params = jax.jit(LinearDrafter().init)(jax.random.key(4))
    batch = first_batch(texts)
    state = init_train_state(jax.random.key(3), params, OPTIMIZER)
    return params, train_step(TARGET, LinearDrafter(), TRAIN, state, target_params, jnp.asarray(batch.ids), jnp.asarray(batch.loss_mask))


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 1e-2), ("float8_e4m3fn", 0.1)])
def test_a_step_from_a_cache_is_the_step_of_the_target_itself(texts, target_params, online, tmp_path, dtype, tolerance):
    """Same texts in the same order and the same anchors: what differs is the rounding of what is stored, as a share of the update."""
    before, (want, expected) = online
    hidden_dtype = "bfloat16" if dtype == "float8_e4m3fn" else dtype
    config = dataclasses.replace(CONFIG, lengths=(24,), features_dtype=dtype, hidden_dtype=hidden_dtype)
    cache = write(tmp_path, texts, target_params, config, dataclasses.replace(ORIGIN, taps=(0,)))
    batch, state = first_batch(texts), init_train_state(jax.random.key(3), before, OPTIMIZER)
    stored = features_of(cache.read_texts(batch.rows), batch)
    anchored = anchored_batch(stored, jax.random.fold_in(state.rng, state.step), TRAIN.num_anchors)
    have, metrics = train_step_on_features(LinearDrafter(), TRAIN, state, TARGET.head(target_params), anchored)
    assert metrics["blocks"] == expected["blocks"] > 0
    np.testing.assert_allclose(metrics["loss"], expected["loss"], rtol=tolerance)
    for ours, theirs, old in zip(*(jax.tree.leaves(tree) for tree in (have.params, want.params, before)), strict=True):
        ours, theirs, old = np.asarray(ours), np.asarray(theirs), np.asarray(old)
        moved = np.abs(theirs - old).max()
        assert moved > 0 and np.abs(ours - theirs).max() <= tolerance * moved + 1e-7


def test_packed_rows_have_the_features_of_each_of_their_texts(cache, texts, target_params):
    stream = TokenBatches(texts, batch_size=1, lengths=(24,), min_loss_tokens=4, packed=True)
    batch, _ = next(dataclasses.replace(stream, batch_size=stream.num_rows).stream())
    assert batch.segment is not None and batch.segment.max() > 1 and sorted(batch.rows) == KEPT
    stored = features_of(cache.read_texts(batch.rows), batch)
    ids, loss_mask, segment = (jnp.asarray(array) for array in (batch.ids, batch.loss_mask, batch.segment))
    rng = jax.random.key(7)
    anchors, keep = sample_anchors(rng, loss_mask, 4, segment)
    want = jax.jit(read_batch, static_argnums=(0, 2))(TARGET, target_params, ORIGIN.taps, ids, loss_mask, anchors, keep, segment)
    have = anchored_batch(stored, rng, 4)
    real = np.asarray(segment) > 0
    for name in ("ids", "loss_mask", "anchors", "keep", "segment"):
        np.testing.assert_array_equal(getattr(have, name), getattr(want, name))
    for name in ("features", "last_hidden"):
        np.testing.assert_allclose(np.asarray(getattr(have, name))[real], np.asarray(getattr(want, name))[real], rtol=1e-4, atol=1e-6)


def test_features_of_other_tokens_than_the_batch_s_are_refused(cache, texts):
    batch, _ = next(TokenBatches(texts, batch_size=4, lengths=(24,), min_loss_tokens=4).stream())
    samples = cache.read_texts(batch.rows)
    with pytest.raises(ValueError, match=f"ids of text {batch.rows[0]} is not what its features were made from"):
        features_of(samples[::-1], batch)
    with pytest.raises(ValueError, match="3 samples were given for a batch of 4 texts"):
        features_of(samples[1:], batch)
    whole, _ = next(TokenBatches(texts.select(np.arange(14) == 5), batch_size=1, lengths=(30,), min_loss_tokens=4).stream())
    with pytest.raises(ValueError, match="ids of text 0 is not what"):
        features_of(cache.read_texts(np.asarray([5])), whole)


def test_samples_of_several_caches_do_not_make_a_batch_where_they_differ(cache):
    sample = cache.read(0)
    other = dataclasses.replace(sample, features=sample.features.astype(ml_dtypes.bfloat16))
    with pytest.raises(ValueError, match="features of a batch has the shapes and dtypes"):
        pad_samples([sample, other], 24)
    with pytest.raises(ValueError, match="a batch of 0 samples and length 24 is empty"):
        pad_samples([], 24)
