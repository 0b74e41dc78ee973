"""The dense target: the reference's numbers, and the same numbers however its tokens are laid out, chunked and cached."""

import dataclasses
import functools
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.layers import FEW_ROWS, RopeScaling, inverse_frequencies, matmul_rows
from dspark_jax.protocols import FlatTokens, flatten_rounds
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.weights import load_target
from tests.tiny_models import random_params

ACTIVATIONS: Any = {"atol": 2e-5, "rtol": 2e-4}
FOLDERS = ["qwen3_target", "qwen3_target_tied"]
WIDTH = 28
TINY = DenseConfig(31, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8, rms_norm_eps=1e-5)

forward = jax.jit(DenseTarget.forward, static_argnums=(0, 4))


@functools.cache
def _load(path):
    return load_target(path)


@pytest.fixture(params=FOLDERS)
def reference(request, golden):
    """A golden target, its parameters, and the reference's activations."""
    target, params = _load(golden / request.param)
    return target, params, np.load(golden / request.param / "forward.npz")


@pytest.fixture(scope="module")
def tiny():
    """A target of two layers, its parameters, and three texts."""
    target = DenseTarget(TINY)
    params = jax.tree.map(lambda leaf: leaf * jnp.float32(0.3), random_params(target))
    return target, params, np.random.default_rng(3).integers(0, TINY.vocab_size, (3, WIDTH)).astype(np.int32)


def _grid(ids, start=0, count=None):
    ids = jnp.asarray(ids, jnp.int32)
    rows = ids.shape[0]
    count = jnp.full((rows,), ids.shape[1], jnp.int32) if count is None else jnp.asarray(count, jnp.int32)
    return FlatTokens.grid(ids, jnp.broadcast_to(jnp.asarray(start, jnp.int32), (rows,)), count)


def _alone(target, params, ids, taps=()):
    """Hidden states and features of one text without a cache, at one width for all lengths."""
    padded = np.pad(ids, (0, WIDTH - len(ids)))
    hidden, features, _ = forward(target, params, None, _grid([padded], count=[len(ids)]), taps)
    return np.asarray(hidden)[: len(ids)], np.asarray(features)[: len(ids)]


# --- the reference's numbers


def test_every_layer_the_last_hidden_state_and_the_logits_are_the_references(reference):
    """[D1] [D4] [D5] Tap i is the raw output of layer i and -1 the embedding; the head reads the state after the final norm, once."""
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
        np.testing.assert_allclose(taps[:, layer + 1], expected, **ACTIVATIONS, err_msg=f"layer {layer}")
    np.testing.assert_allclose(np.asarray(hidden)[valid], arrays["last_hidden_state"].reshape(-1, 32)[valid], **ACTIVATIONS)
    assert np.abs(taps[:, layers] - np.asarray(hidden)[valid]).max() > 0.1, "the last layer's output is not yet normed"
    logits = target.head(params).logits(hidden)
    assert logits.dtype == jnp.float32
    np.testing.assert_allclose(np.asarray(logits)[valid], arrays["logits"].reshape(-1, 97)[valid], **ACTIVATIONS)


def test_taps_come_side_by_side_in_the_order_asked_for(tiny):
    """[D1]"""
    target, params, texts = tiny
    _, all_taps = _alone(target, params, texts[0], (-1, 0, 1))
    _, some = _alone(target, params, texts[0], (1, -1))
    np.testing.assert_allclose(some, np.concatenate([all_taps[:, 32:], all_taps[:, :16]], axis=1), **ACTIVATIONS)
    _, none = _alone(target, params, texts[0])
    assert none.shape == (WIDTH, 0)


@pytest.mark.parametrize("cache_writes", ["early", "late"])
def test_cached_chunks_and_a_crop_give_the_references_logits(reference, cache_writes):
    """Tokens 0..11, then 12..16, then 14..17 after the cache was cut back to 14."""
    target, params, arrays = reference
    target = dataclasses.replace(target, cache_writes=cache_writes)
    ids, head = arrays["input_ids"][:1], target.head(params)
    cache = target.init_cache(1, WIDTH)
    for begin, end, name in ((0, 12, "cache_prefill_logits"), (12, 17, "cache_chunk5_logits"), (14, 18, "cache_after_crop_chunk4_logits")):
        cache = target.roll_back(cache, jnp.array([begin], jnp.int32))
        chunk = _grid(ids[:, begin : begin + 12], begin, [end - begin])
        hidden, _, cache = forward(target, params, cache, chunk, ())
        np.testing.assert_allclose(np.asarray(head.logits(hidden))[: end - begin], arrays[name][0], **ACTIVATIONS, err_msg=name)
        assert cache.length.tolist() == [end]


# --- flat tokens and per-row caches


def _cached_prefixes(target, params, texts, lengths):
    """A cache in which row r holds the first lengths[r] tokens of texts[r]."""
    cache = target.init_cache(len(texts), WIDTH)
    _, _, cache = forward(target, params, cache, _grid(texts[:, :9], 0, lengths), ())
    return target.roll_back(cache, jnp.asarray(lengths, jnp.int32))


@pytest.mark.parametrize(("bucket", "shuffle", "cache_writes"), [(7, False, "early"), (10, True, "early"), (10, True, "late")])
def test_flat_tokens_of_several_rows_equal_each_row_alone(tiny, bucket, shuffle, cache_writes):
    """[B1] [C3] Rows of other cached lengths and token counts in one flat batch, padded or not, in any order."""
    target, params, texts = tiny
    target = dataclasses.replace(target, cache_writes=cache_writes)
    rng = np.random.default_rng(bucket)
    lengths, counts = [9, 0, 4], [4, 1, 2]
    cache = _cached_prefixes(target, params, texts, lengths)
    flat = [(row, slot) for row, count in enumerate(counts) for slot in range(count)]
    order = rng.permutation(bucket) if shuffle else np.arange(bucket)
    padding = (bucket - len(flat)) * [(2, 4)]
    row, slot = np.array(flat + padding, np.int32)[order].T
    position = np.asarray(lengths, np.int32)[row] + slot
    tokens = FlatTokens(
        ids=jnp.asarray(texts[row, position]),
        row=jnp.asarray(row),
        slot=jnp.asarray(slot),
        position=jnp.asarray(position),
        valid=jnp.asarray(order < len(flat)),
        queries_per_row=5,
    )
    hidden, features, after = forward(target, params, cache, tokens, (0, 1))
    for r, (length, count) in enumerate(zip(lengths, counts, strict=True)):
        alone, alone_features = _alone(target, params, texts[r][: length + count], (0, 1))
        mine = np.flatnonzero((row == r) & (order < len(flat)))
        mine = mine[np.argsort(slot[mine])]
        np.testing.assert_allclose(np.asarray(hidden)[mine], alone[length:], **ACTIVATIONS)
        np.testing.assert_allclose(np.asarray(features)[mine], alone_features[length:], **ACTIVATIONS)
    assert after.length.tolist() == [13, 1, 6]
    for old, new in zip((*cache.keys, *cache.values), (*after.keys, *after.values), strict=True):
        written = np.any(np.asarray(old) != np.asarray(new), axis=(1, 3))
        assert [np.flatnonzero(slots).tolist() for slots in written] == [[9, 10, 11, 12], [0], [4, 5]], "padding leaves no trace"


@pytest.mark.parametrize("cache_writes", ["early", "late"])
def test_rows_that_keep_different_numbers_of_tokens_do_not_share_a_length(tiny, cache_writes):
    """[C3] Rejected drafts are written and forgotten, row by row; what follows equals each row run alone."""
    target, params, texts = tiny
    target = dataclasses.replace(target, cache_writes=cache_writes)
    rng = np.random.default_rng(0)
    length = np.array([3, 6, 2], np.int32)
    cache = _cached_prefixes(target, params, texts, length.tolist())
    for accepted in ([0, 3, 1], [2, 0, 3], [1, 1, 0]):
        chain = np.stack([text[begin : begin + 4] for text, begin in zip(texts, length, strict=True)])
        for row, kept in enumerate(accepted):
            chain[row, 1 + kept :] = rng.integers(0, TINY.vocab_size, 3 - kept)
        tokens, first = flatten_rounds(
            jnp.asarray(chain[:, 0]),
            jnp.asarray(chain[:, 1:]),
            jnp.asarray(length),
            jnp.full((3,), 3, jnp.int32),
            jnp.ones((3,), bool),
            12,
        )
        hidden, _, cache = forward(target, params, cache, tokens, (0, 1))
        for row, kept in enumerate(accepted):
            begin, index = int(length[row]), int(first[row])
            alone, _ = _alone(target, params, texts[row][: begin + 1 + kept], (0, 1))
            np.testing.assert_allclose(np.asarray(hidden)[index : index + 1 + kept], alone[begin:], **ACTIVATIONS)
        length = length + 1 + np.array(accepted, np.int32)
        cache = target.roll_back(cache, jnp.asarray(length))
        assert cache.length.tolist() == length.tolist()


def test_flattened_rounds_hold_every_scheduled_token_once():
    """[F2] [F4] Active requests alone, anchors first; the rest of the bucket is padding, and a batch without any is all padding."""
    drafts = jnp.arange(10, 22, dtype=jnp.int32).reshape(4, 3)
    lengths, start = jnp.array([2, 3, 0, 1], jnp.int32), jnp.array([5, 0, 7, 2], jnp.int32)
    active = jnp.array([True, False, True, True])
    tokens, first = flatten_rounds(jnp.arange(4, dtype=jnp.int32), drafts, start, lengths, active, 8)
    valid = np.asarray(tokens.valid)
    assert valid.tolist() == [True] * 6 + [False] * 2
    table = np.stack([tokens.ids, tokens.row, tokens.slot, tokens.position], axis=1)[valid]
    assert table.tolist() == [[0, 0, 0, 5], [10, 0, 1, 6], [11, 0, 2, 7], [2, 2, 0, 7], [3, 3, 0, 2], [19, 3, 1, 3]]
    assert np.asarray(first)[[0, 2, 3]].tolist() == [0, 3, 4]
    nobody, _ = flatten_rounds(jnp.arange(4, dtype=jnp.int32), drafts, start, lengths, jnp.zeros(4, bool), 1)
    assert not nobody.valid.any()


# --- what tells the families apart, against the formulas written down


def _literal_norm(x, weight, eps):
    return x / np.sqrt((x**2).mean(-1, keepdims=True) + eps) * weight


def _literal_decoder(config, params, ids, frequencies):
    """A decoder in float64, one head and one position at a time."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    half = config.head_dim // 2

    def linear(x, weights):
        return x @ weights["weight"].T + weights.get("bias", 0.0)

    def turned(head, position):
        angle = position * frequencies
        return np.concatenate(
            [
                head[:half] * np.cos(angle) - head[half:] * np.sin(angle),
                head[half:] * np.cos(angle) + head[:half] * np.sin(angle),
            ]
        )

    x = tree["embed_tokens"]["weight"][ids]
    for i in range(config.num_layers):
        layer = tree[f"layers_{i}"]
        attention = layer["self_attn"]
        normed = _literal_norm(x, layer["input_layernorm"]["weight"], config.rms_norm_eps)
        heads = {}
        for name, count in (("q", config.num_heads), ("k", config.num_kv_heads), ("v", config.num_kv_heads)):
            heads[name] = linear(normed, attention[f"{name}_proj"]).reshape(len(ids), count, config.head_dim)
            if name != "v":
                if config.qk_norm:
                    heads[name] = _literal_norm(heads[name], attention[f"{name}_norm"]["weight"], config.rms_norm_eps)
                heads[name] = np.stack([[turned(head, t) for head in row] for t, row in enumerate(heads[name])])
        mixed = np.zeros_like(heads["q"])
        for head in range(config.num_heads):
            group = head // (config.num_heads // config.num_kv_heads)
            for t in range(len(ids)):
                scores = heads["k"][: t + 1, group] @ heads["q"][t, head] / np.sqrt(config.head_dim)
                chances = np.exp(scores - scores.max())
                mixed[t, head] = chances @ heads["v"][: t + 1, group] / chances.sum()
        x = x + linear(mixed.reshape(len(ids), -1), attention["o_proj"])
        normed = _literal_norm(x, layer["post_attention_layernorm"]["weight"], config.rms_norm_eps)
        gate = linear(normed, layer["mlp"]["gate_proj"])
        x = x + linear(gate / (1 + np.exp(-gate)) * linear(normed, layer["mlp"]["up_proj"]), layer["mlp"]["down_proj"])
    return _literal_norm(x, tree["norm"]["weight"], config.rms_norm_eps)


def _last_square(target, params, tokens):
    hidden, _, _ = target.forward(params, None, tokens)
    return jnp.square(hidden[-1]).sum(), hidden


def _literal_frequencies(config):
    """The published rule of each scaling, frequency by frequency."""
    scaling, found = config.rope_scaling, []
    for i in range(config.head_dim // 2):
        frequency = config.rope_theta ** (-2 * i / config.head_dim)
        if scaling is not None and scaling.kind == "linear":
            frequency /= scaling.factor
        elif scaling is not None:
            turns = scaling.original_max_position * frequency / (2 * np.pi)
            if turns < scaling.low_freq_factor:
                frequency /= scaling.factor
            elif turns <= scaling.high_freq_factor:
                smooth = (turns - scaling.low_freq_factor) / (scaling.high_freq_factor - scaling.low_freq_factor)
                frequency *= (1 - smooth) / scaling.factor + smooth
        found.append(frequency)
    return np.array(found)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_word_embeddings": True, "attention_bias": True, "output_bias": True},
        {"attention_bias": True, "architecture": "Qwen2ForCausalLM"},
        {"qk_norm": True, "rope_theta": 1e6, "head_dim": 12, "architecture": "Qwen3ForCausalLM"},
        {"rope_scaling": RopeScaling("linear", 4.0)},
        {"rope_scaling": RopeScaling("llama3", 8.0, 1.0, 4.0, 64)},
    ],
    ids=["llama", "llama with biases", "qwen2", "qwen3", "linear rope", "llama3 rope"],
)
def test_every_family_is_what_its_formulas_say(changes):
    """[D5] Biases, head norms, shared key heads and rotary scalings against float64 loops; every parameter matters."""
    config = dataclasses.replace(TINY, **changes)
    target = DenseTarget(config)
    params = jax.tree.map(lambda leaf: leaf * jnp.float32(0.3), random_params(target))
    ids = np.random.default_rng(1).integers(0, config.vocab_size, 12)
    gradient, hidden = jax.jit(jax.grad(_last_square, argnums=1, has_aux=True), static_argnums=0)(target, params, _grid([ids]))
    expected = _literal_decoder(config, params, ids, _literal_frequencies(config))
    np.testing.assert_allclose(np.asarray(hidden), expected, **ACTIVATIONS)
    names = {"/".join(key.key for key in path) for path, _ in jax.tree_util.tree_flatten_with_path(params)[0]}
    assert ("layers_0/self_attn/q_proj/bias" in names) == config.attention_bias
    assert ("layers_0/self_attn/o_proj/bias" in names) == config.output_bias
    assert ("layers_0/self_attn/q_norm/weight" in names) == config.qk_norm
    unused = [jax.tree_util.keystr(path) for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0] if not np.abs(leaf).max() > 0]
    assert unused == ([] if config.tie_word_embeddings else ["['lm_head']['weight']"])


@pytest.mark.parametrize(
    "scaling", [None, RopeScaling("linear", 4.0), RopeScaling("llama3", 8.0, 1.0, 4.0, 8192), RopeScaling("llama3", 32.0, 1.0, 4.0, 2048)]
)
def test_rotary_frequencies_are_the_published_rules(scaling):
    """Head size 128, theta 500,000: with "llama3" some frequencies are left alone, some blended, some divided in full."""
    config = dataclasses.replace(TINY, head_dim=128, rope_theta=5e5, rope_scaling=scaling)
    found = np.asarray(inverse_frequencies(128, 5e5, scaling), np.float64)
    np.testing.assert_allclose(found, _literal_frequencies(config), rtol=2e-5)
    ratio = np.asarray(inverse_frequencies(128, 5e5), np.float64) / found
    if scaling is not None and scaling.kind == "llama3":
        between = (ratio > 1.001) & (ratio < scaling.factor * 0.999)
        assert np.isclose(ratio[0], 1) and np.isclose(ratio[-1], scaling.factor) and between.any()


def test_rotary_frequencies_are_rounded_as_the_reference_rounds_them(golden):
    """Golden `rope_inv_freq`: exact by default; the rounding to bfloat16 is an option."""
    arrays = np.load(golden / "units" / "rope_inv_freq.npz")
    exact, rounded = sorted(arrays.files, key=lambda name: "bf16" in name)
    np.testing.assert_allclose(np.asarray(inverse_frequencies(128, 1e6)), arrays[exact], rtol=2e-6)
    np.testing.assert_allclose(np.asarray(inverse_frequencies(128, 1e6, round_to_bf16=True)), arrays[rounded], rtol=1e-7)


# --- dtypes and shapes


def test_a_bfloat16_target_computes_in_bfloat16_and_stays_near(tiny):
    """With a cache in either dtype; logits are float32."""
    target, params, ids = tiny
    narrow = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    exact, _, _ = forward(target, params, None, _grid(ids), ())
    for cache in (target.init_cache(3, WIDTH), target.init_cache(3, WIDTH, dtype=jnp.bfloat16)):
        hidden, features, _ = forward(target, narrow, cache, _grid(ids), (1,))
        assert hidden.dtype == features.dtype == jnp.bfloat16
        assert target.head(narrow).logits(hidden).dtype == jnp.float32
        error = np.linalg.norm(np.asarray(hidden, np.float32) - np.asarray(exact)) / np.linalg.norm(np.asarray(exact))
        assert error < 0.03


@pytest.mark.parametrize("rows", [1, FEW_ROWS, FEW_ROWS + 1])
def test_few_and_many_rows_have_the_same_product(rows):
    """[B1] The two ways of writing it differ in speed alone."""
    rng = np.random.default_rng(rows)
    x, weight = rng.normal(size=(rows, 24)).astype(np.float32), rng.normal(size=(9, 24)).astype(np.float32)
    np.testing.assert_allclose(np.asarray(matmul_rows(jnp.asarray(x), jnp.asarray(weight))), x @ weight.T, atol=1e-5, rtol=1e-5)


def test_only_known_ways_of_writing_the_cache_are_taken():
    with pytest.raises(ValueError, match="cache_writes is 'never'; allowed: auto, early, late"):
        DenseTarget(TINY, cast(Any, "never"))


def test_parameters_that_are_drawn_have_the_scale_and_shapes_of_a_fresh_model():
    target = DenseTarget(TINY)
    params = jax.jit(target.init)(jax.random.key(0))
    assert jax.tree.map(lambda leaf: (leaf.shape, leaf.dtype), params) == jax.tree.map(
        lambda leaf: (leaf.shape, leaf.dtype), dict(target.abstract_params())
    )
    assert abs(float(jnp.std(params["lm_head"]["weight"])) - 0.02) < 0.002
    assert np.all(np.asarray(params["norm"]["weight"]) == 1)
    cache = target.init_cache(3, 12, dtype=jnp.bfloat16)
    assert cache.num_slots == 12 and cache.keys[1].shape == (3, 2, 12, 8) and cache.values[0].dtype == jnp.bfloat16
