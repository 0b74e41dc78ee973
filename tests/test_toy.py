"""The toy target: a table, its lengths, and nothing else."""

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.protocols import FlatTokens
from dspark_jax.targets.toy import ToyTarget


def test_logits_are_the_table_and_the_cache_its_lengths():
    target = ToyTarget(vocab_size=5)
    params = jax.jit(target.init)(jax.random.key(0))
    head = target.head(params)
    ids, start, count = jnp.array([[1, 2, 3], [4, 0, 0]], jnp.int32), jnp.array([3, 0], jnp.int32), jnp.array([3, 1], jnp.int32)
    tokens = FlatTokens.grid(ids, start, count)
    hidden, features, cache = target.forward(params, target.init_cache(2, 16), tokens, (0, 1))
    table = np.asarray(params["table"])
    expected = [table[1, 1], table[0, 2], table[1, 3], table[0, 4]]
    np.testing.assert_allclose(np.asarray(head.logits(hidden))[:4], np.stack(expected), rtol=1e-6)
    assert features.shape == (6, 10) and np.asarray(features[3]).nonzero()[0].tolist() == [4, 9]
    assert cache is not None and np.asarray(cache.length).tolist() == [6, 1]
    assert np.asarray(target.roll_back(cache, jnp.array([4, 4], jnp.int32)).length).tolist() == [4, 1]


def test_training_needs_no_cache():
    target = ToyTarget(vocab_size=3)
    params = jax.jit(target.init)(jax.random.key(1))
    tokens = FlatTokens.grid(jnp.zeros((1, 4), jnp.int32), jnp.zeros(1, jnp.int32), jnp.full(1, 4, jnp.int32))
    hidden, features, cache = target.forward(params, None, tokens, ())
    assert hidden.shape == (4, 3) and features.shape == (4, 0) and cache is None
