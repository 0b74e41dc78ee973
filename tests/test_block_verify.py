"""Block verification: the algorithm as written, and what it gains over verifying token by token."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.block_verify import block_outcome_probs, joint_weights
from dspark_jax.verify import outcome_probs

V, G = 5, 3
EVERY_BLOCK = np.stack(np.meshgrid(*[np.arange(V)] * G, indexing="ij"), axis=-1).reshape(-1, G)


@functools.cache
def _tables(outcomes):
    """Of every block of a case, verified to every length: [V ** G, G + 1, G + 1, V]."""
    per_length = jax.vmap(outcomes, in_axes=(None, None, None, 0))
    return jax.jit(jax.vmap(per_length, in_axes=(0, 0, 0, None)))


def _case(seed: int) -> tuple[np.ndarray, np.ndarray]:
    """p and q of every block, a function of the drafts before, p [V ** G, G + 1, V] and q [V ** G, G, V]."""
    rng = np.random.default_rng(seed)
    p, q = (rng.dirichlet(np.full(V, 0.7), size=(G + 1, V**G)).astype(np.float32) for _ in range(2))
    # Drafts 0..k-1 of a block decide row k: blocks that agree on them share it.
    same = np.stack([np.ravel_multi_index([*EVERY_BLOCK.T[:k], *[np.zeros(V**G, int)] * (G - k)], (V,) * G) for k in range(G + 1)])
    return np.stack([p[k][same[k]] for k in range(G + 1)], axis=1), np.stack([q[k][same[k]] for k in range(G)], axis=1)


def _literal(p: np.ndarray, q: np.ndarray, ids: np.ndarray, length: int) -> np.ndarray:
    """Algorithm 2 of the paper for one block, with the chance of every branch instead of its random numbers."""
    carried, pass_chance, residual = [1.0], [], []
    for i in range(length):
        carried.append(min(carried[-1] * p[i, ids[i]] / q[i, ids[i]], 1.0))
    for i in range(length):
        excess = np.maximum(carried[i] * p[i] - q[i], 0)
        pass_chance.append(excess.sum() / (excess.sum() + 1 - carried[i]))
        residual.append(excess / max(excess.sum(), 1e-30))
    pass_chance.append(carried[length])
    residual.append(p[length])
    table = np.zeros(p.shape)
    for kept in range(length + 1):
        table[kept] = pass_chance[kept] * np.prod([1 - chance for chance in pass_chance[kept + 1 :]]) * residual[kept]
    return table


@pytest.mark.parametrize("seed", range(2))
def test_outcomes_are_those_of_the_algorithm_as_written(seed):
    p, q = _case(seed)
    tables = np.asarray(_tables(block_outcome_probs)(p, q, EVERY_BLOCK.astype(np.int32), jnp.arange(G + 1, dtype=jnp.int32)))
    for block in range(0, V**G, 7):
        for length in range(G + 1):
            expected = _literal(p[block].astype(float), q[block].astype(float), EVERY_BLOCK[block], length)
            np.testing.assert_allclose(tables[block, length], expected, atol=2e-6)


@pytest.mark.parametrize("seed", range(3))
def test_at_least_as_many_drafts_are_accepted_as_token_by_token(seed, record_property):
    """In expectation over all blocks and outcomes, at every verified length; strictly more from two drafts on."""
    p, q = _case(seed)
    chance = np.take_along_axis(q, EVERY_BLOCK[:, :, None], axis=2)[:, :, 0].prod(1)
    arguments = (p, q, EVERY_BLOCK.astype(np.int32), jnp.arange(G + 1, dtype=jnp.int32))
    by_token, by_block = (
        np.einsum("b,blkv,k->l", chance, np.asarray(_tables(outcomes)(*arguments)), np.arange(G + 1.0))
        for outcomes in (outcome_probs, block_outcome_probs)
    )
    record_property("accepted_by_token", by_token.tolist())
    record_property("accepted_by_block", by_block.tolist())
    np.testing.assert_allclose(by_block[:2], by_token[:2], atol=1e-5)
    assert np.all(by_block[2:] > by_token[2:] + 1e-3)


@pytest.mark.parametrize("seed", range(2))
def test_weights_are_the_chances_to_keep_so_many_drafts(seed):
    """P(num_accepted >= k | drafts 1..k), averaged over the drafts behind, is w_k at every verified length of at least k."""
    p, q = _case(seed)
    q_id, p_id = (np.take_along_axis(law[:, :G], EVERY_BLOCK[:, :, None], axis=2)[:, :, 0] for law in (q, p))
    weight = np.asarray(joint_weights(jnp.log(jnp.asarray(p_id / q_id))))
    assert np.all(weight[:, 0] == 1)
    arguments = (p, q, EVERY_BLOCK.astype(np.int32), jnp.arange(G + 1, dtype=jnp.int32))
    kept = np.asarray(_tables(block_outcome_probs)(*arguments)).sum(axis=3)
    for k in range(1, G + 1):
        behind = q_id[:, k:].prod(axis=1).reshape(V**k, -1)
        for length in range(k, G + 1):
            at_least = (kept[:, length, k:].sum(axis=1).reshape(V**k, -1) * behind).sum(axis=1)
            np.testing.assert_allclose(at_least, weight[:: V ** (G - k), k], atol=1e-5)


def test_one_hot_rows_are_verified_alike_by_both():
    """[A8] At temperature 0 both keep the drafts up to the first that argmax would not have written."""
    best = np.array([3, 1, 4, 0])
    p, ids = np.eye(V, dtype=np.float32)[best], EVERY_BLOCK.astype(np.int32)
    q = np.eye(V, dtype=np.float32)[ids]
    arguments = (np.broadcast_to(p, (len(ids), *p.shape)), q, ids, jnp.arange(G + 1, dtype=jnp.int32))
    by_token, by_block = (np.asarray(_tables(outcomes)(*arguments)) for outcomes in (outcome_probs, block_outcome_probs))
    assert np.array_equal(by_block, by_token)
    assert np.all(by_block.max(axis=(2, 3)) == 1)
