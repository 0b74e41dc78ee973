"""The DeepSeek-V4 stand-in and the drafter that is deployed with V4: window rings, latent cache, experts, several streams."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import kv_cache
from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, step
from dspark_jax.drafters.dspark import DSparkDrafter, deepseek_v4_draft_config
from dspark_jax.moe import MoEConfig
from dspark_jax.prefill import start
from dspark_jax.protocols import Committed, FlatTokens, TargetHead, TrainBatch
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.sharding import make_mesh, parameter_shardings
from dspark_jax.targets.deepseek_v4 import DeepSeekV4Config, DeepSeekV4Target
from tests.literal_moe import gated_mlp, literal_moe
from tests.tiny_models import random_params

ACTIVATIONS: Any = {"atol": 2e-5, "rtol": 2e-4}
EXPERTS = MoEConfig(num_experts=4, top_k=2, intermediate_size=8)
WINDOW = 4
TARGET = DeepSeekV4Config(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_layers=2,
    num_heads=2,
    experts=EXPERTS,
    q_lora_rank=6,
    kv_lora_rank=10,
    qk_nope_head_dim=6,
    qk_rope_head_dim=4,
    v_head_dim=5,
    sliding_window=WINDOW,
)
DRAFT = deepseek_v4_draft_config(
    experts=dataclasses.replace(EXPERTS, scoring="sqrtsoftplus"),
    vocab_size=31,
    hidden_size=16,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mask_token_id=30,
    taps=(-1, 0),
    num_target_layers=2,
    num_layers=2,
    window=6,
    streams=2,
    markov_rank=4,
)
SHALLOW = dataclasses.replace(DRAFT, num_layers=1)
WIDTH = 28
BUDGET = 30
FEATURES = 2 * 16

forward = jax.jit(DeepSeekV4Target.forward, static_argnums=(0, 4))


def _scaled(model, scale, seed=0):
    return jax.tree.map(lambda leaf: leaf * jnp.float32(scale), random_params(model, seed))


@pytest.fixture(scope="module")
def models():
    """Target, its parameters, drafter, its parameters."""
    target, drafter = DeepSeekV4Target(TARGET), DSparkDrafter(DRAFT)
    return target, _scaled(target, 0.3), drafter, _scaled(drafter, 0.3, 1)


@pytest.fixture(scope="module")
def shallow(models):
    """The same drafter with one layer, and with the target's final norm, so that some of its greedy drafts are right."""
    kept = {name: leaf for name, leaf in models[3].items() if name != "layers_1"}
    return DSparkDrafter(SHALLOW), kept | {"norm": models[1]["norm"]}


@pytest.fixture(scope="module")
def texts():
    return np.random.default_rng(3).integers(0, 30, (3, WIDTH)).astype(np.int32)


@pytest.fixture(scope="module")
def whole(models, texts):
    """Hidden states and features of the texts, without a cache."""
    hidden, features, cache = forward(models[0], models[1], None, _grid(texts), (-1, 0))
    assert cache is None
    return np.asarray(hidden).reshape(3, WIDTH, -1), np.asarray(features).reshape(3, WIDTH, -1)


def _grid(ids, begin=0, count=None):
    ids = jnp.asarray(ids, jnp.int32)
    rows = ids.shape[0]
    count = jnp.full((rows,), ids.shape[1], jnp.int32) if count is None else jnp.asarray(count, jnp.int32)
    return FlatTokens.grid(ids, jnp.broadcast_to(jnp.asarray(begin, jnp.int32), (rows,)), count)


# --- the target


def _literal_decoder(config, params, ids):
    """The decoder in float64, with the keys and values of every head formed and no cache."""
    tree = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    half, plain, rank = config.qk_rope_head_dim // 2, config.qk_nope_head_dim, config.kv_lora_rank
    frequencies = config.rope_theta ** (-np.arange(half) / half)

    def norm(x, weights):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.rms_norm_eps) * weights["weight"]

    def turned(head, position):
        cos, sin = np.cos(position * frequencies), np.sin(position * frequencies)
        return np.concatenate([head[:half] * cos - head[half:] * sin, head[half:] * cos + head[:half] * sin])

    x = tree["embed_tokens"]["weight"][ids]
    for i in range(config.num_layers):
        layer = tree[f"layers_{i}"]
        attention = {name: leaf["weight"] for name, leaf in layer["self_attn"].items()}
        normed = norm(x, layer["input_layernorm"])
        low = norm(normed @ attention["q_a_proj"].T, layer["self_attn"]["q_a_layernorm"])
        queries = (low @ attention["q_b_proj"].T).reshape(len(ids), config.num_heads, -1)
        both = normed @ attention["kv_a_proj_with_mqa"].T
        latent = norm(both[:, :rank], layer["self_attn"]["kv_a_layernorm"])
        keys_values = (latent @ attention["kv_b_proj"].T).reshape(len(ids), config.num_heads, -1)
        mixed = np.zeros((len(ids), config.num_heads, config.v_head_dim))
        for t in range(len(ids)):
            window = config.window(i)
            seen = range(0 if window is None else max(0, t - window + 1), t + 1)
            for head in range(config.num_heads):
                query = np.concatenate([queries[t, head, :plain], turned(queries[t, head, plain:], t)])
                keys = np.stack([np.concatenate([keys_values[s, head, :plain], turned(both[s, rank:], s)]) for s in seen])
                scores = keys @ query / np.sqrt(len(query))
                chances = np.exp(scores - scores.max())
                mixed[t, head] = chances @ keys_values[list(seen), head, plain:] / chances.sum()
        x = x + mixed.reshape(len(ids), -1) @ attention["o_proj"].T
        normed = norm(x, layer["post_attention_layernorm"])
        if i < config.first_k_dense_replace:
            weights = [layer["mlp"][f"{name}_proj"]["weight"] for name in ("gate", "up", "down")]
            x = x + np.stack([gated_mlp(token, *weights) for token in normed])
        else:
            x = x + np.stack([literal_moe(token, layer["mlp"], config.experts) for token in normed])
    return norm(x, tree["norm"])


def test_the_decoder_is_what_its_formulas_say(models, texts, whole):
    """Latent attention with the projections pulled into the queries equals keys and values formed head by head, in float64."""
    target, params = models[:2]
    assert [TARGET.window(i) for i in range(2)] == [4, None]
    np.testing.assert_allclose(whole[0][0], _literal_decoder(TARGET, params, texts[0]), **ACTIVATIONS)
    assert set(params["layers_0"]["mlp"]) == {"gate_proj", "up_proj", "down_proj"}
    assert set(params["layers_1"]["mlp"]) == {"gate", "experts", "shared_experts"}
    np.testing.assert_array_equal(np.asarray(target.head(params).lm_head), np.asarray(params["lm_head"]["weight"]))


def test_the_cache_keeps_latents_and_rings(models):
    """[C2] One entry of latent + rotary width per position; windowed layers hold window + writes per pass slots, no more than max_len."""
    target = models[0]
    cache = target.init_cache(2, 50, writes_per_pass=6)
    assert [entries.shape for entries in cache.keys] == [(2, 1, 10, 14), (2, 1, 50, 14)]
    assert cache.values == () and cache.num_slots == 50
    assert {entries.shape[2] for entries in target.init_cache(2, 8, writes_per_pass=6).keys} == {8}


def test_cached_chunks_and_a_crop_equal_the_whole_pass(models, texts, whole):
    """[C2] [B1] Chunks of 1 to 5 tokens through rings that wrap, 3 of them forgotten and written anew on the way."""
    target, params = models[:2]
    cache = target.init_cache(3, WIDTH, writes_per_pass=5)
    wrong = np.random.default_rng(0).integers(0, 30, texts.shape).astype(np.int32)
    position = 0
    for count, kept in ((5, 5), (1, 1), (4, 1), (5, 2), (5, 5), (2, 0), (5, 5), (3, 3), (4, 4)):
        chunk = np.where(np.arange(5) < kept, texts[:, position : position + 5], wrong[:, position : position + 5])
        tokens = _grid(np.pad(chunk, ((0, 0), (0, 5 - chunk.shape[1]))), position, [count] * 3)
        hidden, features, cache = forward(target, params, cache, tokens, (-1, 0))
        for ours, theirs in ((hidden, whole[0]), (features, whole[1])):
            ours = np.asarray(ours).reshape(3, 5, -1)[:, :kept]
            np.testing.assert_allclose(ours, theirs[:, position : position + kept], **ACTIVATIONS)
        position += kept
        cache = target.roll_back(cache, jnp.full((3,), position, jnp.int32))
        assert cache.length.tolist() == [position] * 3
    assert position == 26 > 2 * (WINDOW + 5)


@pytest.mark.parametrize("shuffle", [False, True])
def test_flat_tokens_of_several_rows_equal_each_row_alone(models, texts, whole, shuffle):
    """[B2] [C3] Rows of other cached lengths and token counts in one flat batch, with padding, in any order."""
    target, params = models[:2]
    lengths, counts, bucket = [13, 0, 6], [4, 1, 2], 10
    cache = target.init_cache(3, WIDTH, writes_per_pass=5)
    for begin in range(0, 13, 5):
        ids = np.pad(texts, ((0, 0), (0, 5)))[:, begin : begin + 5]
        _, _, cache = forward(target, params, cache, _grid(ids, begin, np.clip(np.array(lengths) - begin, 0, 5)), (-1, 0))
    assert cache.length.tolist() == lengths
    flat = [(row, slot) for row, count in enumerate(counts) for slot in range(count)]
    order = np.random.default_rng(1).permutation(bucket) if shuffle else np.arange(bucket)
    row, slot = np.array(flat + (bucket - len(flat)) * [(2, 4)], np.int32)[order].T
    position = np.asarray(lengths, np.int32)[row] + slot
    real = order < len(flat)
    tokens = FlatTokens(*(jnp.asarray(x) for x in (texts[row, position], row, slot, position, real)), queries_per_row=5)
    hidden, features, after = forward(target, params, cache, tokens, (-1, 0))
    np.testing.assert_allclose(np.asarray(hidden)[real], whole[0][row, position][real], **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(features)[real], whole[1][row, position][real], **ACTIVATIONS)
    assert after.length.tolist() == [17, 1, 8]
    for layer, (old, new) in enumerate(zip(cache.keys, after.keys, strict=True)):
        written = np.any(np.asarray(old) != np.asarray(new), axis=(1, 3))
        slots = [sorted(p % new.shape[2] for p in range(n, n + count)) for n, count in zip(lengths, counts, strict=True)]
        assert [np.flatnonzero(row).tolist() for row in written] == slots, f"layer {layer}: padding leaves no trace"


def test_parameters_spread_over_a_mesh_and_give_the_same_numbers(models, texts, whole):
    """Experts over "tensor", widths over "fsdp"; no parameter asks for one mesh axis twice."""
    target, params = models[:2]
    shardings = parameter_shardings(make_mesh(data=2, fsdp=2, tensor=2), target)
    assert tuple(shardings["layers_1"]["mlp"]["experts"]["up_proj"].spec) == ("tensor", None, "fsdp")
    hidden, _, _ = jax.block_until_ready(forward(target, jax.device_put(params, shardings), None, _grid(texts), (-1, 0)))
    np.testing.assert_allclose(np.asarray(hidden).reshape(3, WIDTH, -1), whole[0], **ACTIVATIONS)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"kv_lora_rank": 0}, "kv_lora_rank is 0; it must be at least 1"),
        ({"qk_rope_head_dim": 3}, "qk_rope_head_dim is 3; .* even"),
        ({"first_k_dense_replace": 3}, r"first_k_dense_replace is 3; it must be in 0\.\.2"),
        ({"sliding_window": 0}, "sliding_window is 0; it must be at least 1, or None"),
        ({"full_attention_interval": 3}, r"full_attention_interval is 3; it must be in 1\.\.2"),
    ],
)
def test_a_target_that_cannot_be_is_refused_by_field(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(TARGET, **changes)


def test_more_queries_than_the_rings_were_made_for_are_refused(models, texts):
    """[C2]"""
    target, params = models[:2]
    cache = target.init_cache(3, WIDTH, writes_per_pass=5)
    with pytest.raises(ValueError, match="queries_per_row is 6; a ring of 9 slots behind a window of 4 takes at most 5"):
        target.forward(params, cache, _grid(texts[:, :6]))
    with pytest.raises(ValueError, match=r"taps is \(2,\); each must be in -1\.\.1"):
        target.forward(params, None, _grid(texts), (2,))


# --- the drafter


@functools.partial(jax.jit, static_argnums=0)
def _sites(drafter, params, head, batch):
    sites = drafter.prediction_sites(params, head, batch)
    return sites, drafter.site_logits(params, head, sites.hidden, sites.latent)


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, params, head, state, anchor, noise, sampling):
    return drafter.propose(params, head, state, anchor, noise, sampling)


@functools.partial(jax.jit, static_argnums=0)
def _commit(drafter, params, head, state, features, count):
    next_ids = jnp.zeros(features.shape[:2], jnp.int32)
    return drafter.commit(params, head, state, Committed(next_ids, jnp.zeros((*features.shape[:2], 16)), features, count))


@pytest.fixture(scope="module")
def at_every_anchor(models):
    """Proposals behind 1..20 committed tokens, and the training batch with the same anchors and what was drafted behind them.

    The rings are filled by chunks of 5 features.
    """
    target, target_params, drafter, params = models
    head = target.head(target_params)
    rng = np.random.default_rng(6)
    anchors = np.arange(1, 21, dtype=np.int32)
    num, length = len(anchors), 20
    ids, features = rng.integers(0, 30, length + 1).astype(np.int32), rng.normal(size=(length, FEATURES)).astype(np.float32)
    state = drafter.init_state(num, 30, writes_per_pass=5)
    assert state.num_slots == 6 + 5
    for begin in range(0, length, 5):
        chunk = jnp.broadcast_to(features[begin : begin + 5], (num, 5, FEATURES))
        state = _commit(drafter, params, head, state, chunk, jnp.asarray(np.clip(anchors - begin, 0, 5)))
    assert state.length.tolist() == anchors.tolist()
    rows = jnp.arange(num, dtype=jnp.int32)
    noise = Noise.of_round(7, rows, jnp.zeros_like(rows))
    block = _propose(drafter, params, head, state, jnp.asarray(ids[anchors]), noise, Sampling.make(num))
    texts = np.zeros((num, length + 6), np.int32)
    texts[:, : length + 1] = ids
    for row, anchor in enumerate(anchors):
        texts[row, anchor + 1 : anchor + 6] = np.asarray(block.ids)[row]
    batch = TrainBatch(
        ids=jnp.asarray(texts),
        loss_mask=jnp.ones(texts.shape, bool),
        features=jnp.pad(jnp.broadcast_to(features, (num, length, FEATURES)), ((0, 0), (0, 6), (0, 0)), constant_values=9.0),
        last_hidden=jnp.zeros((*texts.shape, 16)),
        anchors=jnp.asarray(anchors)[:, None],
        keep=jnp.ones((num, 1), bool),
    )
    return head, state, block, batch


def test_the_training_forward_is_the_decoding_forward_at_every_anchor(models, at_every_anchor):
    """[C2] [C4] [E1] With window, experts and streams; the context lies in a ring that wrapped, and in one that was filled at once."""
    drafter, params = models[2:]
    head, state, block, batch = at_every_anchor
    num, size = block.ids.shape
    sites, corrected = _sites(drafter, params, head, batch)
    np.testing.assert_allclose(np.asarray(block.logits), np.asarray(corrected).reshape(num, size, -1), **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(block.confidence_logits), np.asarray(sites.confidence_logits).reshape(num, size), **ACTIVATIONS)
    assert len(np.unique(np.asarray(block.ids), axis=0)) > 10
    at_once = _commit(
        drafter, params, head, drafter.init_state(num, 30, writes_per_pass=5), batch.features[:, :20], jnp.arange(1, 21, dtype=jnp.int32)
    )
    for ours, theirs in zip((*state.keys, *state.values), (*at_once.keys, *at_once.values), strict=True):
        position = np.asarray(kv_cache.key_positions(state.length - 1, state.num_slots))
        live = (position >= 0) & (position >= np.asarray(state.length)[:, None] - 6)
        np.testing.assert_allclose(np.asarray(ours).swapaxes(1, 2)[live], np.asarray(theirs).swapaxes(1, 2)[live], atol=1e-5, rtol=1e-4)


def test_a_block_sees_the_last_window_positions_and_no_other(models, at_every_anchor):
    """[E1] Changing position t moves the blocks at anchors t + 1 .. t + window alone."""
    drafter, params = models[2:]
    head, _, _, batch = at_every_anchor
    before = np.asarray(_sites(drafter, params, head, batch)[0].hidden).reshape(20, -1)
    for t in (0, 7):
        features = batch.features.at[:, t].add(1.0)
        after = np.asarray(_sites(drafter, params, head, dataclasses.replace(batch, features=features))[0].hidden).reshape(20, -1)
        moved = np.abs(after - before).max(axis=1) > 1e-4
        assert (np.flatnonzero(moved) + 1).tolist() == list(range(t + 1, t + 7))


def test_rebalancing_moves_the_biases_against_the_load_and_nothing_else(shallow, at_every_anchor):
    """[E4] No gradient moves them; blocks that are not kept do not count."""
    drafter, params = shallow
    head, _, _, batch = at_every_anchor
    some = dataclasses.replace(batch, keep=jnp.arange(20)[:, None] < 8)
    rebalanced = jax.jit(functools.partial(drafter.rebalanced, speed=0.01))
    moved = rebalanced(params, head, some)
    again = rebalanced(params, head, dataclasses.replace(some, features=some.features.at[8:].add(1.0)))
    for (path, new), old, other in zip(
        jax.tree_util.tree_flatten_with_path(moved)[0], jax.tree.leaves(params), jax.tree.leaves(again), strict=True
    ):
        np.testing.assert_array_equal(np.asarray(new), np.asarray(other))
        if "e_score_correction_bias" in jax.tree_util.keystr(path):
            change = np.asarray(new - old)
            assert np.abs(change).max() > 0 and set(np.round(change, 5).tolist()) <= {np.float32(x).item() for x in (-0.01, 0, 0.01)}
        else:
            np.testing.assert_array_equal(np.asarray(new), np.asarray(old))

    def loss(params):
        sites = drafter.prediction_sites(params, head, batch)
        return jnp.square(sites.hidden).mean() + jnp.square(sites.confidence_logits).mean()

    gradient = jax.jit(jax.grad(loss))(params)
    for path, leaf in jax.tree_util.tree_flatten_with_path(gradient)[0]:
        name = jax.tree_util.keystr(path)
        assert np.isfinite(np.asarray(leaf)).all()
        if "markov_w2" not in name:
            assert np.any(np.asarray(leaf)) != ("e_score_correction_bias" in name), name


def test_the_deployed_variant():
    """Three layers of experts, block 5, a window of 128, several streams; hashable, so that it can be a static argument."""
    experts = MoEConfig(8, 2, 32)
    sizes: Any = {"vocab_size": 31, "hidden_size": 16, "num_heads": 4, "num_kv_heads": 2, "head_dim": 8}
    config = deepseek_v4_draft_config(experts=experts, mask_token_id=30, taps=(0,), num_target_layers=3, **sizes)
    assert (config.num_layers, config.block_size, config.window, config.streams) == (3, 5, 128, 4)
    assert config.experts == experts and hash(config) == hash(dataclasses.replace(config))
    shapes = DSparkDrafter(config).abstract_params()
    assert shapes["layers_2"]["mlp"]["experts"]["up_proj"].shape == (8, 32, 16)
    assert shapes["layers_2"]["ffn_hc"]["fn"].shape == (24, 64) and shapes["hc_head"]["fn"].shape == (4, 64)
    assert DSparkDrafter(config).init_state(2, 1000, writes_per_pass=64).num_slots == 192


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"window": 0}, "window is 0; it must be at least 1 position, or None"),
        ({"streams": 0}, "streams is 0; it must be at least 1"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_by_field(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(DRAFT, **changes)


# --- both together


@dataclasses.dataclass(frozen=True)
class Decoded:
    """Rounds of both models with rings, two requests at temperature 0 and one at 1, and the state behind them."""

    begin: Any
    end: Any
    lengths: list
    rounds: list


@pytest.fixture(scope="module")
def decoded(models, shallow, texts):
    plan = DecodePlan(models[0], shallow[0], FixedLength(DRAFT.block_size), RawSurvival())
    params = DecodeParams.of(models[0], models[1], shallow[1])
    prompts = [texts[0, :11].tolist(), texts[1, :3].tolist(), texts[2, :1].tolist()]
    sampling = Sampling.make(3, [0.0, 1.0, 0.0])
    state = start(plan, params, prompts, max_new_tokens=BUDGET, sampling=sampling, seed=5, prefill_chunk=4)
    begin, lengths, rounds = jax.eval_shape(lambda state: state, state), [], []
    while not state.finished.all():
        lengths.append(np.asarray(state.length))
        state, stats = step(plan, params, state)
        rounds.append(jax.tree.map(np.asarray, stats))
    return Decoded(begin, state, lengths, rounds)


@pytest.fixture(scope="module")
def afterwards(models, decoded):
    """Hidden states and features of what was decoded, in one pass under window masks and without a cache."""
    hidden, features, _ = forward(models[0], models[1], None, _grid(decoded.end.ids), (-1, 0))
    rows, length = decoded.end.ids.shape
    return hidden.reshape(rows, length, -1), features.reshape(rows, length, -1)


def test_a_drafter_with_a_ring_drafts_as_with_all_of_the_context(models, shallow, decoded, afterwards):
    """[C2] [C3] Every round, with rejections and acceptances, until the rings have wrapped twice; full caches under a window mask."""
    drafter, params = shallow
    slots = {entries.shape[2] for entries in decoded.begin.target_cache.keys}
    assert slots == {WINDOW + 6, 11 + BUDGET} and decoded.begin.drafter_state.num_slots == 6 + 6
    assert min(decoded.end.length.tolist()) > 2 * (6 + 6)
    counts = np.stack([np.where(stats.active, stats.num_accepted, -1) for stats in decoded.rounds])
    assert {0, 1, 2} <= set(counts.reshape(-1).tolist()), "rejections and acceptances of several lengths"
    assert len({tuple(column) for column in counts.T}) == 3, "requests accept different numbers of drafts"

    turn, row = np.nonzero(np.stack([stats.active for stats in decoded.rounds]))
    length = jnp.asarray(np.stack(decoded.lengths)[turn, row])
    state = drafter.init_state(len(turn), 11 + BUDGET)
    assert state.num_slots == 11 + BUDGET
    head = models[0].head(models[1])
    state = _commit(drafter, params, head, state, afterwards[1][row], length - 1)
    anchor = decoded.end.ids[row, length - 1]
    noise = Noise.of_round(decoded.end.seed, jnp.asarray(row, jnp.int32), jnp.asarray(turn, jnp.int32) + 1)
    block = _propose(drafter, params, head, state, anchor, noise, Sampling.make(len(turn), [[0.0, 1.0, 0.0][r] for r in row]))
    drafts, confidence = (np.stack([getattr(stats, name) for stats in decoded.rounds]) for name in ("drafts", "confidence_logits"))
    np.testing.assert_array_equal(np.asarray(block.ids), drafts[turn, row])
    np.testing.assert_allclose(np.asarray(block.confidence_logits), confidence[turn, row], atol=1e-4, rtol=1e-3)


def test_greedy_decoding_with_the_drafter_is_plain_greedy_decoding(models, decoded, afterwards):
    """[B1] [A8] [C2] Every token is the best one of a pass without a cache behind the tokens before it, whatever was drafted."""
    logits = np.asarray(jax.jit(models[0].head(models[1]).logits)(afterwards[0]))
    for row, prompt in ((0, 11), (2, 1)):
        ours = np.asarray(decoded.end.ids)[row, prompt : prompt + BUDGET]
        np.testing.assert_array_equal(ours, logits[row, prompt - 1 : prompt - 1 + BUDGET].argmax(-1))
        top = np.sort(logits[row, prompt - 1 : prompt - 1 + BUDGET], axis=-1)
        assert np.min(top[:, -1] - top[:, -2]) > 2e-5, "no tie within the tolerance decides"
        assert len(set(ours.tolist())) > 2
        assert sum(stats.active[row] for stats in decoded.rounds) < BUDGET - 1, "some drafts are accepted"


def test_parameters_in_bf16_compute_in_bf16(shallow, at_every_anchor):
    """Parameters in bf16 give a bf16 pass: routing and mixing weights stay float32 inside and mix no dtypes outside."""
    drafter, params = shallow
    head, _, _, batch = at_every_anchor
    half = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    narrow = TargetHead(embedding=head.embedding.astype(jnp.bfloat16), lm_head=head.lm_head.astype(jnp.bfloat16))
    sites, _ = jax.eval_shape(functools.partial(_sites, drafter), half, narrow, batch)
    assert sites.hidden.dtype == jnp.bfloat16
