"""Gemma 3 and Gemma 4 as targets: the reference's numbers, with and without a cache, and with keys that are kept in rings."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import kv_cache
from dspark_jax.layers import GEMMA4_STYLE, RopeScaling
from dspark_jax.protocols import FlatTokens, flatten_rounds
from dspark_jax.sharding import make_mesh, parameter_shardings
from dspark_jax.targets.gemma import GemmaTarget
from dspark_jax.targets.gemma_layers import FULL, GEMMA3_STYLE, SLIDING, AttentionKind, GemmaConfig
from dspark_jax.weights import load_target
from tests.tiny_models import random_params

ACTIVATIONS: Any = {"atol": 2e-5, "rtol": 2e-4}
FOLDERS = ["gemma3_target", "gemma4_target", "gemma4_target_vproj", "gemma4_target_ple_kvshare"]
WIDTH = 28
WINDOW = 8

TINY = GemmaConfig(
    31,
    16,
    24,
    num_heads=4,
    layer_types=(SLIDING, FULL),
    style=GEMMA3_STYLE,
    full=AttentionKind(2, 8, 1e6),
    sliding=AttentionKind(2, 8, 1e4, window=3),
)
EVERYTHING = dataclasses.replace(
    TINY,
    layer_types=(SLIDING, FULL, SLIDING),
    style=GEMMA4_STYLE,
    full=AttentionKind(1, 16, 1e6, rotated_share=0.25, k_eq_v=True),
    per_layer_width=4,
    per_layer_vocab_size=31,
    num_kv_shared_layers=1,
    double_wide_mlp=True,
    tie_word_embeddings=False,
    final_softcap=8.0,
)

DRAFTS, TEXT = 3, 48

forward = jax.jit(GemmaTarget.forward, static_argnums=(0, 4))


@functools.cache
def _load(path):
    return load_target(path)


@pytest.fixture(params=FOLDERS)
def reference(request, golden):
    """A golden target, its parameters, and the reference's activations."""
    target, params = _load(golden / request.param)
    return target, params, np.load(golden / request.param / "forward.npz")


@pytest.fixture(scope="module")
def everything():
    """A target with every switch of Gemma 4 on, its parameters, and three texts."""
    target = GemmaTarget(EVERYTHING)
    params = jax.tree.map(lambda leaf: leaf * jnp.float32(0.3), random_params(target))
    return target, params, np.random.default_rng(3).integers(0, EVERYTHING.vocab_size, (3, TEXT)).astype(np.int32)


def _grid(ids, start=0, count=None):
    ids = jnp.asarray(ids, jnp.int32)
    rows = ids.shape[0]
    count = jnp.full((rows,), ids.shape[1], jnp.int32) if count is None else jnp.asarray(count, jnp.int32)
    return FlatTokens.grid(ids, jnp.broadcast_to(jnp.asarray(start, jnp.int32), (rows,)), count)


# --- the reference's numbers


def test_every_layer_the_last_hidden_state_and_the_logits_are_the_references(reference):
    """[D1] [D4] [D5] Norms by w or 1 + w, scaled embeddings, softcap, both kinds of layers; tap -1 is the scaled embedding."""
    target, params, arrays = reference
    layers = target.spec.num_layers
    valid = arrays["attention_mask"].reshape(-1) == 1
    tokens = _grid(arrays["input_ids"], count=arrays["attention_mask"].sum(1))
    hidden, features, cache = forward(target, params, None, tokens, (-1, *range(layers)))
    assert cache is None
    taps = np.asarray(features).reshape(-1, layers + 1, target.spec.width)[valid]
    np.testing.assert_array_equal(taps[:, 0], arrays["embed_output"].reshape(-1, 32)[valid])
    for layer in range(layers):
        expected = arrays["layer_outputs"][layer].reshape(-1, 32)[valid]
        # The raw stream grows to 20, and the reference's own float32 is 6e-5 away from float64 there.
        np.testing.assert_allclose(taps[:, layer + 1], expected, atol=5e-6 * np.abs(expected).max(), rtol=2e-4, err_msg=f"layer {layer}")
    np.testing.assert_allclose(np.asarray(hidden)[valid], arrays["last_hidden_state"].reshape(-1, 32)[valid], **ACTIVATIONS)
    assert np.abs(taps[:, layers] - np.asarray(hidden)[valid]).max() > 0.1, "the last layer's output is not yet normed"
    head = target.head(params)
    np.testing.assert_array_equal(np.asarray(head.embed(tokens.ids))[valid], taps[:, 0])
    logits = head.logits(hidden)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(logits)[valid], arrays["logits"].reshape(-1, 97)[valid], **ACTIVATIONS)


def test_the_language_model_of_a_multimodal_checkpoint_is_the_plain_one(golden):
    """Nested config, names under `model.language_model`; the reference's logits."""
    target, params = load_target(golden / "gemma4_unified_target")
    plain, same = _load(golden / "gemma4_target")
    architecture = "Gemma4UnifiedForConditionalGeneration"
    assert target.config == dataclasses.replace(plain.config, architecture=architecture)
    jax.tree.map(np.testing.assert_array_equal, params, same)
    arrays = np.load(golden / "gemma4_unified_target" / "forward.npz")
    valid = arrays["attention_mask"].reshape(-1) == 1
    hidden, _, _ = forward(plain, params, None, _grid(arrays["input_ids"], count=arrays["attention_mask"].sum(1)), (-1, *range(6)))
    np.testing.assert_allclose(
        np.asarray(target.head(params).logits(hidden))[valid], arrays["logits"].reshape(-1, 97)[valid], **ACTIVATIONS
    )


@pytest.mark.parametrize(
    ("reference", "writes_per_pass"), [*((folder, 12) for folder in FOLDERS), (FOLDERS[-1], None)], indirect=["reference"]
)
def test_cached_chunks_and_a_crop_give_the_references_logits(reference, writes_per_pass):
    """[C2] Tokens 0..11, then 12..16, then 14..17 after the cache was cut back to 14; in all slots, and in rings of 8 + 12."""
    target, params, arrays = reference
    ids, head = arrays["input_ids"][:1], target.head(params)
    cache = target.init_cache(1, WIDTH, writes_per_pass=writes_per_pass)
    slots = [keys.shape[2] for keys in cache.keys]
    assert max(slots) == WIDTH == cache.num_slots and min(slots) == (WIDTH if writes_per_pass is None else WINDOW + 12)
    for begin, end, name in ((0, 12, "cache_prefill_logits"), (12, 17, "cache_chunk5_logits"), (14, 18, "cache_after_crop_chunk4_logits")):
        cache = target.roll_back(cache, jnp.array([begin], jnp.int32))
        chunk = _grid(ids[:, begin : begin + 12], begin, [end - begin])
        hidden, _, cache = forward(target, params, cache, chunk, ())
        np.testing.assert_allclose(np.asarray(head.logits(hidden))[: end - begin], arrays[name][0], **ACTIVATIONS, err_msg=name)
        assert cache.length.tolist() == [end]


# --- rings


def test_rings_equal_a_full_cache_with_a_window_mask_over_a_long_decode(everything):
    """[C2] [C3] Three rows, staggered acceptance, every rejected draft written and rolled back; rings of window + drafts + 1 slots."""
    target, params, texts = everything
    rng = np.random.default_rng(5)
    ring, full = target.init_cache(3, TEXT, writes_per_pass=DRAFTS + 1), target.init_cache(3, TEXT)
    assert [keys.shape[2] for keys in ring.keys] == [7, TEXT] and [keys.shape[2] for keys in full.keys] == [TEXT, TEXT]
    alone, features, _ = forward(target, params, None, _grid(texts), (0, 2))
    alone, features = (np.asarray(array).reshape(3, TEXT, -1) for array in (alone, features))
    head = target.head(params)
    length = np.zeros(3, np.int32)
    rejections = 0
    while length.max() + DRAFTS + 1 < TEXT:
        accepted = rng.integers(0, DRAFTS + 1, 3)
        chain = np.stack([text[begin : begin + DRAFTS + 1] for text, begin in zip(texts, length, strict=True)])
        for row, kept in enumerate(accepted):
            chain[row, 1 + kept :] = rng.integers(0, EVERYTHING.vocab_size, DRAFTS - kept)
        tokens, first = flatten_rounds(
            jnp.asarray(chain[:, 0]),
            jnp.asarray(chain[:, 1:]),
            jnp.asarray(length),
            jnp.full((3,), DRAFTS, jnp.int32),
            jnp.ones((3,), bool),
            12,
        )
        hidden, taps, ring = forward(target, params, ring, tokens, (0, 2))
        same, _, full = forward(target, params, full, tokens, (0, 2))
        logits = head.logits(hidden)
        np.testing.assert_allclose(np.asarray(logits), np.asarray(head.logits(same)), **ACTIVATIONS)
        assert np.array_equal(np.argmax(logits, -1), np.argmax(head.logits(same), -1))
        for row, kept in enumerate(accepted):
            mine, there = int(first[row]) + np.arange(1 + kept), length[row] + np.arange(1 + kept)
            np.testing.assert_allclose(np.asarray(hidden)[mine], alone[row, there], **ACTIVATIONS)
            np.testing.assert_allclose(np.asarray(taps)[mine], features[row, there], **ACTIVATIONS)
        rejections += int((DRAFTS - accepted).sum())
        length = length + 1 + accepted.astype(np.int32)
        ring, full = (target.roll_back(cache, jnp.asarray(length)) for cache in (ring, full))
        assert ring.length.tolist() == full.length.tolist() == length.tolist()
    assert rejections > 20 and length.min() > 3 * 7, "every ring was gone round several times"


def _first_wrong_key(num_slots: int, window: int, writes: int, seed: int) -> str | None:
    """What a query would first see wrongly in a ring whose keys are their positions, or None after many rounds of random lengths."""
    rng = np.random.default_rng(seed)
    held = np.full(num_slots, -1)
    start = 0
    for _ in range(60):
        written = rng.integers(1, writes + 1)
        for position in range(start, start + written):
            held[position % num_slots] = position
        newest = start + written - 1
        claimed = newest - (newest - np.arange(num_slots)) % num_slots
        for query in range(start, start + written):
            seen = (claimed >= 0) & (claimed <= query) & (query - claimed < window)
            if not np.array_equal(held[seen], claimed[seen]) or seen.sum() != min(window, query + 1):
                return f"query {query} of window {window} sees {held[seen]}"
        start += rng.integers(1, written + 1)
    return None


@pytest.mark.parametrize(("window", "writes"), [(1, 1), (1, 4), (3, 2), (8, 4), (5, 9)])
def test_a_ring_holds_what_its_queries_see_and_a_shorter_one_does_not(window, writes):
    """[C2] Any number of writes up to the promised one, any number of them kept."""
    enough = kv_cache.ring_slots(window, writes, 10_000)
    for seed in range(20):
        assert _first_wrong_key(enough, window, writes, seed) is None
        assert _first_wrong_key(window + writes - 1, window, writes, seed) is None, "the least that is enough"
    short = window + writes - 2
    assert short < 1 or any(_first_wrong_key(short, window, writes, seed) for seed in range(20))


def test_slots_of_a_ring_know_their_positions():
    """Rows of other lengths; a slot that was never written is negative, and without a wrap the position is the slot."""
    found = kv_cache.key_positions(jnp.array([6, 1, 3], jnp.int32), 4)
    assert found.tolist() == [[4, 5, 6, 3], [0, 1, -2, -1], [0, 1, 2, 3]]
    row, position = jnp.array([0, 0, 2, 1], jnp.int32), jnp.array([5, 6, 3, 1], jnp.int32)
    newest = kv_cache.newest_positions(row, position, jnp.array([True, True, True, False]), 3)
    assert newest.tolist() == [6, -1, 3]


def test_a_pass_that_a_ring_is_too_short_for_is_refused():
    """[C2] At the boundary; rings that hold every position take any pass."""
    target = GemmaTarget(TINY)
    params = jax.eval_shape(target.init, jax.random.key(0))

    def run(cache, queries):
        return jax.eval_shape(functools.partial(target.forward, taps=()), params, cache, _grid(np.zeros((2, queries))))

    cache = target.init_cache(2, 20, writes_per_pass=4)
    assert [keys.shape[2] for keys in cache.keys] == [7, 20]
    run(cache, 4)
    with pytest.raises(ValueError, match="queries_per_row is 5; a ring of 7 slots behind a window of 3 takes at most 4"):
        run(cache, 5)
    for whole in (target.init_cache(2, 9), target.init_cache(2, 6, writes_per_pass=4)):
        assert len({keys.shape[2] for keys in whole.keys}) == 1
        run(whole, 9)


# --- parameters, dtypes and bad input


def test_a_bfloat16_target_computes_in_bfloat16_and_rounds_the_embedding_factor(everything):
    """[D5] sqrt(24) is 4.90625 in bfloat16; the drafter's embeddings are the target's."""
    target, params, ids = everything
    cache = jax.eval_shape(functools.partial(target.init_cache, 3, 24, writes_per_pass=6, dtype=jnp.bfloat16))
    narrow = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16), params)
    hidden, features, after = jax.eval_shape(functools.partial(target.forward, taps=(0, 2)), narrow, cache, _grid(ids[:, :6]))
    assert hidden.dtype == features.dtype == after.keys[0].dtype == jnp.bfloat16

    target = GemmaTarget(dataclasses.replace(TINY, hidden_size=24, layer_types=(FULL,)))
    params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_params(target))
    hidden, features, _ = forward(target, params, None, _grid(ids[:, :6]), (-1,))
    flat = ids[:, :6].reshape(-1)
    rows = np.asarray(params["embed_tokens"]["weight"], np.float32)[flat]
    np.testing.assert_array_equal(np.asarray(features), (rows * np.float32(4.90625)).astype(jnp.bfloat16))
    head = target.head(params)
    np.testing.assert_array_equal(np.asarray(features), np.asarray(head.embed(jnp.asarray(flat))))
    assert head.logits(hidden).dtype == jnp.float32


def test_each_layer_has_the_parameters_of_its_kind():
    """Layers that read others' keys have none and, by choice, a wider MLP; every axis can be sharded."""
    target = GemmaTarget(EVERYTHING)
    params = target.abstract_params()
    own = [[f"{name}_proj" in params[f"layers_{i}"]["self_attn"] for name in "qkvo"] for i in range(3)]
    assert own == [[True] * 4, [True, True, False, True], [True, False, False, True]]
    assert ["k_norm" in params[f"layers_{i}"]["self_attn"] for i in range(3)] == [True, True, False]
    assert [params[f"layers_{i}"]["mlp"]["up_proj"]["weight"].shape[0] for i in range(3)] == [24, 24, 48]
    assert params["embed_tokens_per_layer"]["weight"].shape == (31, 12)
    shardings = parameter_shardings(make_mesh(1, 2, 4), target)
    assert jax.tree.structure(shardings) == jax.tree.structure(dict(params))
    cache = target.init_cache(3, 30, writes_per_pass=5, dtype=jnp.bfloat16)
    assert [keys.shape for keys in cache.keys] == [values.shape for values in cache.values] == [(3, 2, 8, 8), (3, 1, 30, 16)]
    assert cache.values[0].dtype == jnp.bfloat16 and cache.num_slots == 30


def test_parameters_that_are_drawn_are_those_of_a_fresh_model():
    """[D5] A norm that multiplies by 1 + w begins at w = 0."""
    params = jax.jit(GemmaTarget(dataclasses.replace(TINY, layer_types=(FULL,))).init)(jax.random.key(0))
    assert not np.any(params["norm"]["weight"])
    assert abs(float(jnp.std(params["embed_tokens"]["weight"])) - 0.02) < 0.002
    assert "lm_head" not in params and "layer_scalar" not in params["layers_0"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_heads": 0}, "num_heads is 0"),
        ({"num_heads": 3}, r"num_heads is 3; it must be a multiple of num_kv_heads \(2\)"),
        ({"layer_types": (SLIDING, "chunked_attention")}, "layer_types holds 'chunked_attention'; allowed"),
        ({"layer_types": (SLIDING, SLIDING)}, "at least one layer with keys of its own must be 'full_attention'"),
        ({"num_kv_shared_layers": 1}, "num_kv_shared_layers is 1 of 2 layers"),
        ({"per_layer_width": 4}, "per_layer_width is 4 and per_layer_vocab_size 0"),
        ({"sliding": AttentionKind(2, 8, 1e4)}, "window is None of the sliding"),
    ],
)
def test_a_config_that_makes_no_decoder_is_refused_by_name(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(TINY, **changes)


def test_kinds_taps_and_tokens_that_do_not_exist_are_refused_by_name():
    """[D1]"""
    with pytest.raises(ValueError, match="sliding_window is 0; it must be at least 1"):
        AttentionKind(2, 8, 1e4, window=0)
    with pytest.raises(ValueError, match="head_dim is 0"):
        AttentionKind(2, 0, 1e4, rope_scaling=RopeScaling("linear", 2.0))
    target = GemmaTarget(TINY)
    for taps in ((0, 2), (-2,)):
        with pytest.raises(ValueError, match=r"each must be in -1..1 for a target of 2 layers"):
            target.forward({}, None, _grid([[1, 2]]), taps)
    flat = dataclasses.replace(_grid([[1, 2]]), is_grid=False)
    with pytest.raises(ValueError, match="cache is None; a forward pass without a cache takes a grid"):
        target.forward({}, None, flat, ())
