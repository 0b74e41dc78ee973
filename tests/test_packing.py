"""[E2] Several texts in a row: what the target says of each, and the losses of their blocks, are those of rows of their own."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.anchors import read_batch, sample_anchors, valid_anchors
from dspark_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from dspark_jax.losses import Denominators, DraftLossConfig, draft_loss
from dspark_jax.protocols import FlatTokens, positions_in_texts
from dspark_jax.targets.deepseek_v4 import DeepSeekV4Target
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.train import OptimizerConfig, TrainConfig, init_train_state, train_step
from dspark_jax.weights import load_target
from tests.linear_drafter import LinearDrafter
from tests.test_deepseek_v4 import TARGET as V4_CONFIG
from tests.test_drafter_contract import CHAIN, DRAFTERS, LAYERS, SIZES, VOCAB

LENGTHS = (7, 5, 9)
ANSWERS = (3, 0, 4)
"""First answer token of each text: the second is all answer, so that nothing but the segments keeps it apart from the first."""
WIDTH = 24
QUICK = ("dspark_vanilla", "eagle3_entropy")
"""One drafter of blocks and one chain in every run, all in `make test-all`."""
TARGET = DenseTarget(DenseConfig(**SIZES, num_layers=LAYERS, qk_norm=True))


def random_params(model, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.4 * rng.normal(size=leaf.shape), jnp.float32), model.abstract_params())


def texts(vocab_size=VOCAB, answers=ANSWERS):
    """The texts as rows of their own, and all in the first of as many rows: ids, loss mask and segment of both."""
    rng = np.random.default_rng(0)
    shape = len(LENGTHS), WIDTH
    apart, packed = ((np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, np.int32)) for _ in range(2))
    begin = 0
    for row, (length, answer) in enumerate(zip(LENGTHS, answers, strict=True)):
        ids = rng.integers(1, vocab_size, length)
        for (all_ids, mask, segment), at, first in ((apart, row, 0), (packed, 0, begin)):
            all_ids[at, first : first + length] = ids
            mask[at, first + answer : first + length] = True
            segment[at, first : first + length] = row + 1
        begin += length
    return tuple(map(jnp.asarray, apart)), tuple(map(jnp.asarray, packed))


def test_positions_begin_anew_with_every_text():
    segment = jnp.asarray([[1, 1, 1, 2, 2, 3, 0, 0], [4, 4, 4, 4, 4, 4, 4, 4]])
    assert positions_in_texts(segment).tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], list(range(8))]


@pytest.mark.parametrize("name", ["dense", "gemma3", "gemma4", "deepseek_v4"])
def test_a_target_reads_packed_texts_as_it_reads_each_alone(name, golden):
    if name == "dense":
        target, params = TARGET, random_params(TARGET, 1)
    elif name == "deepseek_v4":
        target = DeepSeekV4Target(V4_CONFIG)
        params = random_params(target, 1)
    else:
        target, params = load_target(golden / f"{name}_target")
    (ids, _, _), (packed_ids, _, segment) = texts(min(target.spec.vocab_size, VOCAB))
    forward = functools.partial(jax.jit(target.forward, static_argnums=3), params, None)
    zeros = jnp.zeros(len(LENGTHS), jnp.int32)
    alone = forward(FlatTokens.grid(ids, zeros, zeros + WIDTH), (-1, 0))[:2]
    packed = forward(FlatTokens.packed(packed_ids, segment), (-1, 0))[:2]
    for ours, theirs in zip(packed, alone, strict=True):
        theirs = np.concatenate([np.asarray(theirs).reshape(len(LENGTHS), WIDTH, -1)[row, :n] for row, n in enumerate(LENGTHS)])
        np.testing.assert_allclose(np.asarray(ours)[: sum(LENGTHS)], theirs, atol=2e-5 * np.abs(theirs).max())


@functools.partial(jax.jit, static_argnums=0)
def _sums(drafter, params, target_params, *rows):
    """Numerators and denominators of a batch's losses and metrics, and gradients of the weighted sum of the numerators."""
    head = TARGET.head(target_params)
    batch = read_batch(TARGET, target_params, drafter.taps, *rows)
    below = Denominators(*[jnp.ones(())] * 4)

    def loss(params):
        return draft_loss(drafter, params, head, head, batch, DraftLossConfig(ce=0.3, chunk=64), below)

    (_, terms), gradients = jax.value_and_grad(loss, has_aux=True)(params)
    return terms, gradients


@pytest.mark.parametrize("name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in DRAFTERS])
def test_losses_and_gradients_of_packed_texts_are_the_sums_over_the_texts(name):
    drafter = DRAFTERS[name]
    # A draft vocabulary is another matter, and so is a mean over all places, whose number packing changes by its very purpose.
    changes = {"draft_vocab_size": None} | ({"soft_ce_over_places": False} if hasattr(drafter.config, "soft_ce_over_places") else {})
    drafter = type(drafter)(dataclasses.replace(drafter.config, **changes))
    params, target_params = random_params(drafter, 3), random_params(TARGET, 1)
    (ids, mask, own), (packed_ids, packed_mask, segment) = texts()
    anchors, keep = map(np.asarray, sample_anchors(jax.random.key(0), mask, WIDTH))
    begins = np.concatenate([[0], np.cumsum(LENGTHS)[:-1]])[:, None]
    together = (anchors + begins)[keep]
    assert together.tolist() == np.flatnonzero(valid_anchors(packed_mask, segment)[0]).tolist()
    packed_anchors, packed_keep = np.zeros_like(anchors), np.zeros_like(keep)
    packed_anchors[0, : len(together)], packed_keep[0, : len(together)] = together, True
    sums = functools.partial(_sums, drafter, params, target_params)
    ours = sums(packed_ids, packed_mask, jnp.asarray(packed_anchors), jnp.asarray(packed_keep), segment)
    theirs = sums(ids, mask, jnp.asarray(anchors), jnp.asarray(keep), own)
    for mine, other in zip(jax.tree.leaves(ours), jax.tree.leaves(theirs), strict=True):
        np.testing.assert_allclose(mine, other, rtol=2e-4, atol=2e-5 * max(1.0, float(jnp.abs(other).max())))


def test_a_training_step_takes_packed_rows():
    """[E2] The step on packed rows moves the parameters as the step on rows of their own, where all anchors are taken."""
    (ids, mask, _), packed = texts(answers=(3, 2, 4))
    drafter, target_params = LinearDrafter(vocab_size=VOCAB, draft_vocab_size=VOCAB, width=SIZES["hidden_size"]), random_params(TARGET, 1)
    drafter_params = jax.jit(drafter.init)(jax.random.key(4))
    config = TrainConfig(OptimizerConfig(10, learning_rate=0.1, epsilon=1.0), DraftLossConfig(chunk=32), num_anchors=WIDTH)

    def after(*texts):
        state = init_train_state(jax.random.key(3), drafter_params, config.optimizer)
        return train_step(TARGET, drafter, config, state, target_params, *texts)[0].params

    for ours, theirs in zip(jax.tree.leaves(after(*packed[:2], None, packed[2])), jax.tree.leaves(after(ids, mask)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def test_supervision_by_hidden_positions_refuses_packed_rows():
    ids, mask, segment = texts()[1]
    drafter = Eagle3Drafter(Eagle3Config(**CHAIN, taps=(0, 1), supervision="hidden_positions"))
    params, target_params = random_params(drafter, 3), random_params(TARGET, 1)

    def sites(params, target_params):
        batch = read_batch(TARGET, target_params, drafter.taps, ids, mask, *sample_anchors(jax.random.key(0), mask, 4), segment)
        batch = dataclasses.replace(batch, length=jnp.full(len(ids), WIDTH))
        return drafter.prediction_sites(params, TARGET.head(target_params), batch)

    with pytest.raises(ValueError, match="segment is given; supervision 'hidden_positions' takes rows of one text each"):
        jax.eval_shape(sites, params, target_params)
