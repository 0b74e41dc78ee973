"""Anchors are the reference's, a uniform choice without replacement, and the target's reading of a batch is frozen."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.anchors import read_batch, sample_anchors, select_anchors, valid_anchors
from dspark_jax.protocols import FlatTokens
from dspark_jax.targets.dense import DenseConfig, DenseTarget


@pytest.mark.parametrize("case", range(5))
def test_given_the_same_uniforms_anchors_are_those_of_the_reference(golden, case):
    units = np.load(golden / "units" / "anchor_sampling.npz")
    get = {name: units[f"case{case}_{name}"] for name in ("loss_mask", "rand", "num_anchors", "anchors", "keep")}
    anchors, keep = select_anchors(jnp.asarray(get["loss_mask"] == 1), jnp.asarray(get["rand"]), int(get["num_anchors"]))
    np.testing.assert_array_equal(anchors, get["anchors"])
    np.testing.assert_array_equal(keep, get["keep"])


def test_every_valid_position_is_drawn_equally_often_and_no_other_ever():
    mask = jnp.asarray([[0, 1, 1, 0, 1, 1, 1, 1, 0, 1, 1, 1]], bool)
    draws, num_anchors = 2000, 3
    keys = jax.random.split(jax.random.key(5), draws)
    anchors, keep = jax.jit(jax.vmap(lambda key: sample_anchors(key, mask, num_anchors)))(keys)
    assert bool(keep.all()) and bool((jnp.diff(anchors, axis=-1) > 0).all())
    counts = np.bincount(np.asarray(anchors).ravel(), minlength=12)
    valid = np.append(np.asarray(valid_anchors(mask))[0], False)
    share = num_anchors / valid.sum()
    assert (counts[~valid] == 0).all()
    np.testing.assert_allclose(counts[valid], draws * share, atol=5 * np.sqrt(draws * share * (1 - share)))


@pytest.mark.parametrize("mask", [[[True]], [[False, False, False]], [[True, False, True]], [[False, False, True]]])
def test_a_sequence_without_two_answer_tokens_in_a_row_keeps_no_anchor(mask):
    anchors, keep = sample_anchors(jax.random.key(0), jnp.asarray(mask), 4)
    assert not keep.any() and not anchors.any()


def test_no_anchors_at_all_are_refused():
    with pytest.raises(ValueError, match="num_anchors is 0"):
        sample_anchors(jax.random.key(0), jnp.ones((1, 4), bool), 0)


def test_a_batch_holds_what_the_target_says_at_every_position_and_lets_no_gradient_through():
    target = DenseTarget(DenseConfig(19, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8))
    params = target.init(jax.random.key(0))
    ids = jax.random.randint(jax.random.key(1), (2, 7), 0, 19)
    anchors, keep = jnp.zeros((2, 1), jnp.int32), jnp.ones((2, 1), bool)

    @jax.jit
    def read(params):
        return read_batch(target, params, (-1, 0), ids, ids > 4, anchors, keep)

    batch = read(params)
    start = jnp.zeros(1, jnp.int32)
    forward = jax.jit(lambda row_ids: target.forward(params, None, FlatTokens.grid(row_ids, start, start + 7), (-1, 0))[:2])
    for row in range(2):
        hidden, features = forward(ids[row : row + 1])
        np.testing.assert_allclose(batch.last_hidden[row], hidden, atol=2e-5, rtol=2e-4)
        np.testing.assert_allclose(batch.features[row], features, atol=2e-5, rtol=2e-4)
    gradient = jax.grad(lambda params: jnp.sum(read(params).features) + jnp.sum(read(params).last_hidden))(params)
    assert all(not leaf.any() for leaf in jax.tree.leaves(gradient))
