"""Losses and their gradients are the reference's, however the sites are chunked and however a batch is split."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.losses import DraftLossConfig, draft_denominators, loss_metrics, total_loss
from dspark_jax.protocols import TargetHead, TrainBatch
from dspark_jax.readout import compare
from dspark_jax.weights import load_drafter, load_target
from tests.linear_drafter import LinearDrafter
from tests.reference_checks import ACTIVATIONS, assert_same_gradients, batch_of, check_metrics, evaluate, reference_names


@pytest.fixture(scope="module")
def reference(golden):
    """The reference's drafter, its parameters, and its target's head."""
    target, target_params = load_target(golden / "qwen3_target")
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", target.spec)
    return loaded.drafter, loaded.params, target.head(target_params)


@pytest.fixture(scope="module")
def reference_batch(golden, reference):
    """The reference's training batch and what our losses say of it, in chunks that do not divide the sites."""
    arrays = np.load(golden / "dspark_qwen3_vanilla" / "train.npz")
    drafter, params, head = reference
    ce, l1, confidence = (float(x) for x in arrays["alphas"])
    config = DraftLossConfig(ce, l1, confidence, chunk=7)
    return arrays, config, evaluate(drafter, params, head, head, batch_of(arrays), config)


def test_every_term_and_every_gradient_is_the_references(reference_batch):
    arrays, config, (loss, terms, gradients) = reference_batch
    for name in ("ce", "l1", "confidence"):
        np.testing.assert_allclose(getattr(terms, name), arrays[f"{name}_loss_num"], **ACTIVATIONS)
        np.testing.assert_allclose(getattr(terms.denominators, name), arrays[f"{name}_loss_den"], **ACTIVATIONS)
    np.testing.assert_allclose(loss, arrays["total_loss"], **ACTIVATIONS)
    np.testing.assert_allclose(total_loss(terms, config), loss, rtol=1e-6)
    norm = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradients)))
    np.testing.assert_allclose(norm, arrays["grad_norm"], rtol=1e-4)
    assert_same_gradients(gradients, arrays, "grad/")


def test_metrics_are_the_references(golden, reference_batch):
    _, config, (_, terms, _) = reference_batch
    check_metrics(loss_metrics(terms, config), golden / "dspark_qwen3_vanilla" / "train_metrics.json", with_loss=True)


def test_two_ranks_that_divide_by_the_sums_over_both_add_up_to_one_batch(golden, reference):
    folder = golden / "dspark_qwen3_vanilla"
    ranks = [np.load(folder / f"ws2_rank{rank}.npz") for rank in range(2)]
    drafter, params, head = reference
    config = DraftLossConfig()
    batches = [batch_of(arrays, length=28) for arrays in ranks]
    weights = jax.jit(lambda batch: draft_denominators(drafter.prediction_sites(params, head, batch), None))
    together = jax.tree.map(jnp.add, *(weights(batch) for batch in batches))
    results = [evaluate(drafter, params, head, head, batch, config, together) for batch in batches]
    for (loss, terms, _), arrays in zip(results, ranks, strict=True):
        # The reference multiplies by the number of ranks, since its gradient reduction divides by it.
        np.testing.assert_allclose(2 * loss, arrays["backward_loss"], **ACTIVATIONS)
        np.testing.assert_allclose(total_loss(terms, config, together), loss, rtol=1e-6)
    assert_same_gradients(jax.tree.map(jnp.add, results[0][2], results[1][2]), ranks[0], "grad_mean/")
    terms = jax.tree.map(jnp.add, results[0][1], results[1][1])
    # The reference reports rank 0's local loss, so that one is left out.
    check_metrics(loss_metrics(terms, config), folder / "ws2_metrics.json", with_loss=False)


@functools.partial(jax.jit, static_argnames=("drafter", "num_anchors"))
def small_case(drafter, num_anchors=5):
    """Random parameters, head and batch: two rows, of which the second has a shorter answer and two anchors fewer."""
    num_rows, length = 2, 12
    keys = jax.random.split(jax.random.key(0), 6)
    place = jnp.arange(num_anchors) % (length - 7) + 6
    kept = jnp.arange(num_anchors) < jnp.asarray([[num_anchors], [num_anchors - 2]])
    batch = TrainBatch(
        ids=jax.random.randint(keys[0], (num_rows, length), 0, drafter.vocab_size),
        loss_mask=jnp.arange(length) >= jnp.asarray([[3], [6]]),
        features=jax.random.normal(keys[1], (num_rows, length, drafter.width)),
        last_hidden=jax.random.normal(keys[2], (num_rows, length, drafter.width)),
        anchors=jnp.where(kept, place, 0),
        keep=kept,
    )
    embedding, lm_head = (jax.random.normal(key, (drafter.vocab_size, drafter.width)) for key in keys[3:5])
    return drafter.init(keys[5]), TargetHead(embedding, lm_head), batch


def dense_loss(drafter, params, head, teacher_head, batch, config):
    """The loss written down with all logits at once, for comparison."""
    sites = drafter.prediction_sites(params, head, batch)
    log_q = jax.nn.log_softmax(drafter.site_logits(params, head, sites.hidden, sites.latent))
    teacher = teacher_head.logits(batch.last_hidden.reshape(-1, batch.last_hidden.shape[-1])[sites.teacher_index])
    p = jax.nn.softmax(teacher)
    q = jnp.exp(log_q)
    ids = jnp.arange(p.shape[1]) if head.draft_ids is None else head.draft_ids
    q_everywhere = jnp.zeros_like(p).at[:, ids].set(q)
    l1 = jnp.abs(q_everywhere - p).sum(-1)
    hit = sites.label[:, None] == ids
    ce = -jnp.sum(jnp.where(hit, log_q, 0.0), axis=-1)
    accept = jax.lax.stop_gradient(jnp.minimum(q_everywhere, p).sum(-1))
    c = jax.nn.sigmoid(sites.confidence_logits)
    bce = -accept * jnp.log(c) - (1 - accept) * jnp.log(1 - c)
    w, w_ce = sites.weight, sites.weight * hit.any(-1).astype(jnp.float32)
    total = jnp.sum(w)
    return config.ce * jnp.sum(w_ce * ce) / w_ce.sum() + config.l1 * jnp.sum(w * l1) / total + config.confidence * jnp.sum(w * bce) / total


@pytest.mark.parametrize(("chunk", "draft_vocab_size"), [(4, None), (1000, 20)])
def test_chunks_give_the_loss_and_gradients_of_all_logits_at_once(chunk, draft_vocab_size):
    """[E5]"""
    drafter = LinearDrafter(draft_vocab_size=draft_vocab_size or 61)
    params, teacher_head, batch = small_case(drafter)
    draft_ids = None if draft_vocab_size is None else jnp.arange(draft_vocab_size) * 3
    head = teacher_head.restrict(draft_ids)
    config = DraftLossConfig(chunk=chunk)
    want, want_gradients = jax.jit(jax.value_and_grad(lambda p: dense_loss(drafter, p, head, teacher_head, batch, config)))(params)
    loss, _, gradients = evaluate(drafter, params, head, teacher_head, batch, config)
    np.testing.assert_allclose(loss, want, rtol=1e-5)
    for have, expected in zip(jax.tree.leaves(gradients), jax.tree.leaves(want_gradients), strict=True):
        assert np.linalg.norm(have - expected) <= 1e-4 * np.linalg.norm(expected) + 1e-6


def test_memory_does_not_grow_with_anchors_times_vocabulary():
    """[E5] Four times the anchors may add the sites' small vectors, and not one more chunk of logits."""
    vocab_size, chunk = 20_000, 32
    drafter = LinearDrafter(vocab_size=vocab_size, draft_vocab_size=vocab_size)

    def temporary_bytes(num_anchors):
        params, head, batch = jax.eval_shape(functools.partial(small_case, drafter, num_anchors))
        compiled = evaluate.lower(drafter, params, head, head, batch, DraftLossConfig(chunk=chunk)).compile()
        memory = compiled.memory_analysis()
        assert memory is not None
        return memory.temp_size_in_bytes

    few, many = temporary_bytes(32), temporary_bytes(128)
    one_chunk = chunk * vocab_size * 4
    assert few < 10 * one_chunk
    assert many - few < one_chunk


def test_anchors_that_are_not_kept_change_nothing():
    drafter = LinearDrafter()
    params, head, batch = small_case(drafter)
    padded = batch.replace(
        anchors=jnp.pad(batch.anchors, ((0, 0), (0, 4))), keep=jnp.pad(batch.keep, ((0, 0), (0, 4)), constant_values=False)
    )
    config = DraftLossConfig(chunk=4)
    loss, terms, gradients = evaluate(drafter, params, head, head, batch, config)
    more_loss, more_terms, more_gradients = evaluate(drafter, params, head, head, padded, config)
    for have, want in zip(jax.tree.leaves((more_loss, more_terms, more_gradients)), jax.tree.leaves((loss, terms, gradients)), strict=True):
        np.testing.assert_allclose(have, want, rtol=1e-5, atol=1e-6)


def test_a_batch_without_any_supervised_site_has_loss_and_gradients_zero():
    drafter = LinearDrafter()
    params, head, batch = small_case(drafter)
    loss, terms, gradients = evaluate(drafter, params, head, head, batch.replace(keep=jnp.zeros_like(batch.keep)), DraftLossConfig(chunk=4))
    assert loss == 0 and all(not leaf.any() for leaf in jax.tree.leaves(gradients))
    assert all(bool(jnp.isfinite(value).all()) for value in loss_metrics(terms, DraftLossConfig()).values())


def test_a_draft_vocabulary_accepts_the_mass_it_shares_with_the_target():
    draft_ids = jnp.asarray([1, 4, 5])
    draft = jnp.log(jnp.asarray([[0.5, 0.3, 0.2], [0.2, 0.2, 0.6]]))
    teacher = jnp.log(jnp.asarray([[0.1, 0.3, 0.1, 0.1, 0.35, 0.05], [0.02, 0.08, 0.1, 0.1, 0.1, 0.6]]))
    ce, l1, soft_ce, agree = compare(draft, teacher, jnp.asarray([4, 2]), draft_ids)
    np.testing.assert_allclose(1 - l1 / 2, [0.3 + 0.3 + 0.05, 0.08 + 0.1 + 0.6], rtol=1e-5)
    np.testing.assert_allclose(ce, [-np.log(0.3), 0.0], rtol=1e-5)
    np.testing.assert_array_equal(agree, [False, True])


@pytest.mark.parametrize("detach", [False, True])
def test_the_confidence_loss_reaches_the_backbone_unless_detached(golden, reference, detach):
    """[E4]"""
    given, params, head = reference
    drafter = DSparkDrafter(dataclasses.replace(given.config, detach_confidence=detach))
    batch = batch_of(np.load(golden / "dspark_qwen3_vanilla" / "train.npz"))

    def objective(params):
        sites = drafter.prediction_sites(params, head, batch)
        assert sites.confidence_logits is not None
        return jnp.sum(sites.weight * jax.nn.softplus(sites.confidence_logits))

    named = reference_names(jax.jit(jax.grad(objective))(params))
    own = {name: bool(leaf.any()) for name, leaf in named.items() if name.startswith("confidence_head.")}
    beyond = {name: bool(leaf.any()) for name, leaf in named.items() if not name.startswith(("confidence_head.", "markov_head.markov_w2"))}
    assert len(own) == 2 and all(own.values())
    assert len(beyond) == 26 and all(moved is not detach for moved in beyond.values()), beyond


@pytest.mark.parametrize(("field", "value"), [("ce", -0.1), ("l1", float("nan")), ("confidence", float("inf")), ("chunk", 0)])
def test_a_loss_weight_out_of_range_is_refused_by_name(field, value):
    with pytest.raises(ValueError, match=f"{field} is {value}"):
        DraftLossConfig(**{field: value})
