"""The DSpark drafter: the reference's activations, and one and the same function in training and in decoding."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, step
from dspark_jax.drafters.block_backbone import BlockBackbone, BlockLayer, block_ids, block_targets
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.prefill import start
from dspark_jax.protocols import Committed, FlatTokens, TargetHead, TrainBatch
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.weights import load_drafter, load_target

ACTIVATIONS: Any = {"atol": 2e-5, "rtol": 2e-4}
SMALL = DSparkConfig(
    vocab_size=31,
    hidden_size=16,
    intermediate_size=24,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    mask_token_id=30,
    taps=(-1, 2),
    num_target_layers=4,
    num_layers=1,
    block_size=2,
    markov_rank=4,
)


@dataclasses.dataclass(frozen=True)
class Models:
    """The golden target and its drafter."""

    target: Any
    target_params: Any
    drafter: DSparkDrafter
    params: Any
    head: Any


@pytest.fixture(scope="module")
def models(golden):
    target, target_params = load_target(golden / "qwen3_target")
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", target.spec)
    return Models(target, target_params, loaded.drafter, loaded.params, target.head(target_params))


@pytest.fixture(scope="module")
def arrays(golden):
    return dict(np.load(golden / "dspark_qwen3_vanilla" / "train.npz"))


def _batch(arrays, **changes):
    fields = {
        "ids": arrays["input_ids"],
        "loss_mask": arrays["loss_mask"] == 1,
        "features": arrays["target_hidden_states"],
        "last_hidden": arrays["target_last_hidden_states"],
        "anchors": arrays["anchor_positions"],
        "keep": arrays["block_keep_mask"],
    }
    return TrainBatch(**{name: jnp.asarray(value) for name, value in (fields | changes).items()})


@functools.partial(jax.jit, static_argnums=0)
def _sites(drafter, params, head, batch):
    """Sites of a batch, with base and corrected logits."""
    sites = drafter.prediction_sites(params, head, batch)
    return sites, head.logits(sites.hidden), drafter.site_logits(params, head, sites.hidden, sites.latent)


@functools.partial(jax.jit, static_argnums=0)
def _propose(drafter, params, head, state, anchor, sampling):
    rows = jnp.arange(anchor.shape[0], dtype=jnp.int32)
    return drafter.propose(params, head, state, anchor, Noise.of_round(7, rows, jnp.zeros_like(rows)), sampling)


@functools.partial(jax.jit, static_argnums=0)
def _commit(drafter, params, head, state, features, count):
    next_ids = jnp.zeros(features.shape[:2], jnp.int32)
    hidden = jnp.zeros((*features.shape[:2], drafter.config.hidden_size), jnp.float32)
    return drafter.commit(params, head, state, Committed(next_ids, hidden, features, count))


def _random(drafter, seed=0):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32), drafter.abstract_params())


# --- the reference's numbers


def test_context_features_and_every_layer_are_the_references(models, arrays):
    """Golden `train`: fc, its norm, both draft layers and the final norm; dropped blocks included, their attention being 0."""
    backbone, config = BlockBackbone(models.drafter.config), models.drafter.config
    variables, batch = {"params": models.params}, _batch(arrays)

    @jax.jit
    def run(variables, batch):
        fc_out = backbone.apply(variables, batch.features, method=lambda module, features: module.fc(features))
        context = backbone.apply(variables, batch.features, method="inject")
        embeddings = models.head.embed(block_ids(batch, config.block_size, config.mask_token_id))
        hidden, captured = backbone.apply(
            variables,
            embeddings,
            batch,
            method="train_hidden",
            capture_intermediates=lambda module, name: isinstance(module, BlockLayer) and name == "__call__",
            mutable=["intermediates"],
        )
        return fc_out, context, embeddings, hidden, captured["intermediates"]

    fc_out, context, embeddings, hidden, layers = run(variables, batch)
    np.testing.assert_allclose(np.asarray(fc_out), arrays["fc_out"], **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(context), arrays["ctx_features"], **ACTIVATIONS)
    np.testing.assert_array_equal(np.asarray(embeddings).reshape(2, 30, 32), arrays["noise_embedding"])
    for i in range(config.num_layers):
        (output,) = layers[f"layers_{i}"]["__call__"]
        np.testing.assert_allclose(
            np.asarray(output).reshape(2, 30, 32), arrays[f"draft_layer{i}_out"], **ACTIVATIONS, err_msg=f"layer {i}"
        )
    np.testing.assert_allclose(np.asarray(hidden), arrays["draft_hidden"], **ACTIVATIONS)


def test_logits_and_confidence_at_every_site_are_the_references(models, arrays):
    """[D3] [D4] Golden `train`: hidden states, base, corrected and confidence logits; the teacher's logits stand at teacher_index."""
    sites, base, corrected = _sites(models.drafter, models.params, models.head, _batch(arrays))
    shape = arrays["target_ids"].shape
    np.testing.assert_allclose(np.asarray(sites.hidden).reshape(*shape, 32), arrays["draft_hidden"], **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(base).reshape(*shape, 97), arrays["base_logits"], **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(corrected).reshape(*shape, 97), arrays["draft_logits"], **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(sites.confidence_logits).reshape(shape), arrays["confidence_logits"], **ACTIVATIONS)
    last_hidden = arrays["target_last_hidden_states"].reshape(-1, 32)[np.asarray(sites.teacher_index)]
    teacher = np.asarray(jax.jit(models.head.logits)(last_hidden)).reshape(*shape, 97)
    np.testing.assert_allclose(teacher, arrays["aligned_target_logits"], **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(sites.weight).reshape(shape), arrays["loss_weight"], rtol=1e-6)
    np.testing.assert_array_equal(np.asarray(sites.label).reshape(shape), arrays["target_ids"])
    assert np.asarray(sites.step).reshape(shape)[1, 2].tolist() == [0, 1, 2, 3, 4]


def test_blocks_hold_the_anchor_first_and_predict_what_follows_it(arrays):
    """[D3] Golden `train`: G inputs, the anchor and G - 1 masks, predict G tokens; labels, previous tokens and supervision."""
    batch = _batch(arrays)
    np.testing.assert_array_equal(np.asarray(block_ids(batch, 5, 96)).reshape(2, 30), arrays["noise_ids"])
    targets = block_targets(batch, 5)
    np.testing.assert_array_equal(np.asarray(targets.labels), arrays["target_ids"])
    np.testing.assert_array_equal(np.asarray(targets.previous), arrays["prev_token_ids"])
    np.testing.assert_array_equal(np.asarray(targets.supervised), arrays["eval_mask"])


# --- training is decoding


def test_the_training_forward_is_the_decoding_forward_at_every_anchor(models, arrays):
    """[C4] [E1] A proposal behind n committed tokens has the logits and confidence of the training block at anchor n.

    One request per anchor 1..26; the texts are continued by what was drafted, so that the previous tokens are the same too.
    """
    drafter, params, head = models.drafter, models.params, models.head
    anchors = np.arange(1, 27, dtype=np.int32)
    num, ids = len(anchors), arrays["input_ids"][0]
    features = jnp.broadcast_to(arrays["target_hidden_states"][0], (num, 28, 96))
    state = _commit(drafter, params, head, drafter.init_state(num, 30), features, jnp.asarray(anchors))
    assert state.length.tolist() == anchors.tolist()
    block = _propose(drafter, params, head, state, jnp.asarray(ids[anchors]), Sampling.make(num))

    width = 28 + drafter.block_size
    texts = np.zeros((num, width), np.int32)
    texts[:, :28] = ids
    for row, anchor in enumerate(anchors):
        texts[row, anchor + 1 : anchor + 6] = np.asarray(block.ids)[row]
    batch = TrainBatch(
        ids=jnp.asarray(texts),
        loss_mask=jnp.ones((num, width), bool),
        features=jnp.pad(features, ((0, 0), (0, 5), (0, 0)), constant_values=9.0),
        last_hidden=jnp.zeros((num, width, 32)),
        anchors=jnp.asarray(anchors)[:, None],
        keep=jnp.ones((num, 1), bool),
    )
    sites, _, corrected = _sites(drafter, params, head, batch)
    np.testing.assert_allclose(np.asarray(block.logits), np.asarray(corrected).reshape(num, 5, 97), **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(block.confidence_logits), np.asarray(sites.confidence_logits).reshape(num, 5), **ACTIVATIONS)
    np.testing.assert_array_equal(np.asarray(block.ids), np.asarray(block.logits).argmax(-1))
    assert len(np.unique(np.asarray(block.ids), axis=0)) > 10


def test_no_anchor_sees_its_own_or_later_features(models, arrays):
    """[E1] Features from position t on leave every anchor up to t unmoved, and move every later one; so do tokens."""
    drafter, params, head = models.drafter, models.params, models.head
    anchors = jnp.broadcast_to(jnp.arange(1, 27, dtype=jnp.int32), (2, 26))
    keep = jnp.ones((2, 26), bool)
    batch = _batch(arrays, anchors=anchors, keep=keep)
    before = np.asarray(_sites(drafter, params, head, batch)[0].hidden).reshape(2, 26, -1)
    for t in (1, 9, 26):
        features = jnp.asarray(arrays["target_hidden_states"]).at[:, t:].add(1.0)
        moved = np.asarray(_sites(drafter, params, head, dataclasses.replace(batch, features=features))[0].hidden).reshape(2, 26, -1)
        np.testing.assert_allclose(moved[:, :t], before[:, :t], atol=1e-6)
        assert np.all(np.abs(moved - before)[:, t:].max(-1) > 1e-4)
        ids = batch.ids.at[:, t].set((batch.ids[:, t] + 1) % 96)
        changed = np.asarray(_sites(drafter, params, head, dataclasses.replace(batch, ids=ids))[0].hidden).reshape(2, 26, -1)
        others = np.arange(1, 27) != t
        np.testing.assert_allclose(changed[:, others], before[:, others], atol=1e-6)
        assert np.all(np.abs(changed - before)[:, t - 1].max(-1) > 1e-4), "its own anchor token is the one that a block reads"


def test_blocks_of_other_anchors_do_not_matter(models, arrays):
    """[E1] A block has the same hidden states alone, among all anchors, and beside blocks that are not kept."""
    drafter, params, head = models.drafter, models.params, models.head
    anchors = jnp.broadcast_to(jnp.arange(1, 27, dtype=jnp.int32), (2, 26))
    everyone = _batch(arrays, anchors=anchors, keep=jnp.ones((2, 26), bool))
    together = np.asarray(_sites(drafter, params, head, everyone)[0].hidden).reshape(2, 26, -1)
    only = dataclasses.replace(everyone, keep=anchors == 9)
    alone = np.asarray(_sites(drafter, params, head, only)[0].hidden).reshape(2, 26, -1)
    np.testing.assert_allclose(alone[:, 8], together[:, 8], atol=1e-6)


# --- the drafter's state


def _decoding(models, prompts, budget=16, **settings):
    plan = DecodePlan(models.target, models.drafter, FixedLength(models.drafter.block_size), RawSurvival())
    params = DecodeParams.of(models.target, models.target_params, models.params)
    merged: Any = {"max_new_tokens": budget, "max_len": 40} | settings
    return plan, params, start(plan, params, prompts, **merged)


@pytest.fixture(scope="module")
def prompts(golden):
    """Three prompts of different lengths, whose greedy answers accept different numbers of drafts."""
    ids = np.load(golden / "qwen3_target" / "forward.npz")["input_ids"]
    trace = np.load(golden / "dspark_qwen3_vanilla" / "decode_greedy.npz")["prompt_ids"][0]
    return [trace.tolist(), ids[0, :13].tolist(), ids[1, :1].tolist()]


def test_caches_after_rounds_equal_those_rebuilt_from_the_committed_tokens(models, prompts):
    """[C1] [C3] Neither mask tokens nor rejected drafts nor the anchor stay behind, whatever each request accepted."""
    plan, params, state = _decoding(models, prompts)
    accepted = []
    for _ in range(4):
        state, stats = step(plan, params, state)
        accepted.append(np.asarray(stats.num_accepted))
    assert len({tuple(column) for column in np.stack(accepted).T}) > 1, "the requests accept different numbers of drafts"

    below = state.length - 1
    np.testing.assert_array_equal(np.asarray(state.drafter_state.length), np.asarray(below))
    np.testing.assert_array_equal(np.asarray(state.target_cache.length), np.asarray(below))
    tokens = FlatTokens.grid(state.ids, jnp.zeros((3,), jnp.int32), below)
    taps = models.drafter.taps
    forward = jax.jit(lambda cache, tokens: models.target.forward(models.target_params, cache, tokens, taps))
    _, features, target_cache = forward(models.target.init_cache(3, 40), tokens)
    empty = models.drafter.init_state(3, 40)
    rebuilt = _commit(models.drafter, models.params, models.head, empty, features.reshape(3, 40, -1), below)
    for ours, fresh in ((state.drafter_state, rebuilt), (state.target_cache, target_cache)):
        for left, right in zip((*ours.keys, *ours.values), (*fresh.keys, *fresh.values), strict=True):
            for row, length in enumerate(np.asarray(below)):
                np.testing.assert_allclose(np.asarray(left)[row, :, :length], np.asarray(right)[row, :, :length], atol=5e-5, rtol=2e-4)

    anchor = state.ids[jnp.arange(3), state.length - 1]
    kept = _propose(models.drafter, models.params, models.head, state.drafter_state, anchor, Sampling.make(3))
    fresh = _propose(models.drafter, models.params, models.head, rebuilt, anchor, Sampling.make(3))
    np.testing.assert_array_equal(np.asarray(kept.ids), np.asarray(fresh.ids))
    np.testing.assert_allclose(np.asarray(kept.logits), np.asarray(fresh.logits), atol=1e-4, rtol=1e-3)


def test_a_prompt_prefilled_in_chunks_of_any_size_drafts_the_same(models, prompts):
    """[C5] Chunks of 1, 7, and the whole prompt, greedy and at temperature 1: the same first tokens, drafts and verdicts."""
    rounds = {}
    for chunk in (1, 7, 64):
        plan, params, state = _decoding(models, prompts, sampling=Sampling.make(3, [0.0, 1.0, 1.0]), prefill_chunk=chunk)
        seen = [np.asarray(state.ids)[np.arange(3), np.asarray(state.prompt_length)]]
        assert state.drafter_state.length.tolist() == [len(prompt) for prompt in prompts]
        for _ in range(2):
            state, stats = step(plan, params, state)
            seen += [np.asarray(stats.drafts), np.asarray(stats.num_accepted), np.asarray(stats.next_id)]
        rounds[chunk] = seen
    for chunk in (1, 7):
        for ours, whole in zip(rounds[chunk], rounds[64], strict=True):
            np.testing.assert_array_equal(ours, whole)


# --- variants


def test_a_drafter_without_heads_proposes_from_its_base_logits(arrays):
    """Rank 0: tokens are drafted independently, there is no confidence, and latents have width 0."""
    drafter = DSparkDrafter(dataclasses.replace(SMALL, markov_rank=0, confidence_head=False, confidence_with_markov=False))
    params = _random(drafter)
    assert not {"markov_head", "confidence_head"} & params.keys()
    head = _small_head()
    block = _propose(drafter, params, head, drafter.init_state(2, 8), jnp.array([3, 4], jnp.int32), Sampling.make(2))
    assert block.confidence_logits is None
    sites, base, corrected = _sites(drafter, params, head, _small_batch(block))
    assert sites.latent.shape == (4, 0) and sites.confidence_logits is None
    np.testing.assert_array_equal(np.asarray(base), np.asarray(corrected))
    np.testing.assert_allclose(np.asarray(block.logits).reshape(4, -1), np.asarray(base), **ACTIVATIONS)


def test_a_confidence_head_may_read_the_hidden_state_alone():
    drafter = DSparkDrafter(dataclasses.replace(SMALL, confidence_with_markov=False))
    params = _random(drafter)
    assert params["confidence_head"]["proj"]["weight"].shape == (1, 16)
    head = _small_head()
    block = _propose(drafter, params, head, drafter.init_state(2, 8), jnp.array([3, 4], jnp.int32), Sampling.make(2))
    sites, _, corrected = _sites(drafter, params, head, _small_batch(block))
    expected = np.asarray(sites.hidden) @ np.asarray(params["confidence_head"]["proj"]["weight"])[0]
    expected = expected + np.asarray(params["confidence_head"]["proj"]["bias"])
    np.testing.assert_allclose(np.asarray(sites.confidence_logits), expected, **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(block.confidence_logits).reshape(-1), expected, **ACTIVATIONS)
    np.testing.assert_allclose(np.asarray(block.logits).reshape(4, -1), np.asarray(corrected), **ACTIVATIONS)


def test_a_reduced_draft_vocabulary_drafts_the_best_of_its_ids(models, arrays):
    """[A7] Logits are the full ones at the columns that are left; ids come back as the target's."""
    draft_ids = np.sort(np.random.default_rng(0).permutation(97)[:40]).astype(np.int32)
    narrow = DSparkDrafter(dataclasses.replace(models.drafter.config, draft_vocab_size=40))
    params = dict(models.params)
    w2 = params["markov_head"]["markov_w2"]["weight"][draft_ids]
    params["markov_head"] = {"markov_w1": params["markov_head"]["markov_w1"], "markov_w2": {"weight": w2}}
    head = models.head.restrict(jnp.asarray(draft_ids))
    batch = _batch(arrays)
    _, _, full = _sites(models.drafter, models.params, models.head, batch)
    _, _, cut = _sites(narrow, params, head, batch)
    np.testing.assert_allclose(np.asarray(cut), np.asarray(full)[:, draft_ids], **ACTIVATIONS)
    outside = int(np.setdiff1d(np.arange(97), draft_ids)[0])
    anchor = jnp.array([outside, 5], jnp.int32)
    block = _propose(narrow, params, head, narrow.init_state(2, 8), anchor, Sampling.make(2))
    assert block.logits.shape == (2, 5, 40)
    np.testing.assert_array_equal(np.asarray(block.ids), draft_ids[np.asarray(block.logits).argmax(-1)])


def _small_head():
    rng = np.random.default_rng(5)
    embedding, lm_head = rng.normal(size=(2, 31, 16)).astype(np.float32)
    return TargetHead(embedding=jnp.asarray(embedding), lm_head=jnp.asarray(lm_head))


def _small_batch(block):
    """What was drafted behind anchors 3 and 4 of two empty caches, as texts whose anchor stands at position 0."""
    ids = jnp.concatenate([jnp.array([[3], [4]], jnp.int32), block.ids], axis=1)
    return TrainBatch(
        ids=ids,
        loss_mask=jnp.ones((2, 3), bool),
        features=jnp.ones((2, 3, 32)),
        last_hidden=jnp.zeros((2, 3, 16)),
        anchors=jnp.zeros((2, 1), jnp.int32),
        keep=jnp.ones((2, 1), bool),
    )


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"mask_token_id": None}, "mask_token_id is None; it must be a token id in 0..30"),
        ({"mask_token_id": 31}, "mask_token_id is 31; it must be a token id in 0..30"),
        ({"mask_token_id": -1}, "mask_token_id is -1; it must be a token id in 0..30"),
        ({"block_size": 0}, "block_size is 0; a block drafts at least 1 token"),
        ({"taps": (3,)}, r"taps is \(3,\); at least one, each in -1..2"),
        ({"taps": ()}, r"taps is \(\); at least one"),
        ({"markov_rank": -1}, "markov_rank is -1"),
        ({"markov_rank": 0}, "confidence_with_markov is True and markov_rank is 0"),
        ({"markov_head_type": "oracle"}, "markov_head_type is 'oracle'; known: .*vanilla"),
        ({"draft_vocab_size": 0}, "draft_vocab_size is 0; it must be in 1..31"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32; it must be in 1..31"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_by_field(changes, complaint):
    """[D2] No other token stands in for a mask token that is absent or outside the vocabulary."""
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(SMALL, **changes)
