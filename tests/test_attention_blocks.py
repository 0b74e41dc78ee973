"""Attention whose scores exist for some places at a time is the attention of all of them; and where a mesh splits activations."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import layers
from dspark_jax.drafters import block_backbone
from dspark_jax.drafters.block_backbone import BlockContext, attend_blocks
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.layers import attend
from dspark_jax.protocols import Committed, FlatTokens
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.sharding import constrain, make_mesh, parameter_shardings
from dspark_jax.targets.dense import DenseConfig, DenseTarget


def normal(seed, *shape):
    return jax.random.normal(jax.random.key(seed), shape)


@pytest.mark.parametrize("at_once", [8, 5], ids=["a remainder of 4", "no remainder"])
def test_queries_in_blocks_attend_as_all_at_once(monkeypatch, at_once):
    queries, keys, values = normal(0, 2, 20, 4, 8), normal(1, 2, 2, 20, 8), normal(2, 2, 2, 20, 8)
    # Of one row the first query sees nothing at all.
    mask = jnp.tril(jnp.ones((2, 20, 20), bool)).at[1, 0].set(False)
    whole = attend(queries, keys, values, mask, 0.3)
    monkeypatch.setattr(layers, "QUERIES_AT_ONCE", at_once)
    np.testing.assert_allclose(attend(queries, keys, values, mask, 0.3), whole, rtol=1e-6, atol=1e-6)
    assert not whole[1, 0].any() and whole[0, 0].any()


@pytest.mark.parametrize(("dtype", "tolerance"), [(jnp.float32, 1e-5), (jnp.bfloat16, 3e-2)], ids=["float32", "bfloat16"])
def test_anchors_in_parts_attend_and_learn_as_all_at_once(monkeypatch, dtype, tolerance):
    """Gradients too, of what each block has for itself and of what all of them see."""
    queries, keys, values = normal(0, 2, 5, 3, 4, 8), normal(1, 2, 5, 3, 2, 8), normal(2, 2, 5, 3, 2, 8)
    seen = normal(3, 2, 2, 12, 8), normal(4, 2, 2, 12, 8)
    mask = jnp.arange(12) < jnp.asarray([[0, 3, 5, 8, 11]] * 2)[:, :, None]
    keep = jnp.asarray([[True] * 5, [True, True, True, False, False]])
    arrays = jax.tree.map(lambda x: x.astype(dtype), (queries, keys, values, *seen))

    def loss(queries, keys, values, seen_keys, seen_values):
        mixed = attend_blocks(queries, keys, values, BlockContext(seen_keys, seen_values, mask), keep, 0.3)
        return jnp.sum(jnp.sin(mixed.astype(jnp.float32))), mixed

    compare = jax.value_and_grad(loss, argnums=(0, 1, 2, 3, 4), has_aux=True)
    (_, whole), gradients = compare(*arrays)
    monkeypatch.setattr(block_backbone, "ANCHORS_AT_ONCE", 2)
    (_, parts), gradients_of_parts = compare(*arrays)
    for ours, expected in zip((parts, *gradients_of_parts), (whole, *gradients), strict=True):
        assert ours.dtype == dtype
        np.testing.assert_allclose(ours.astype(np.float32), expected.astype(np.float32), rtol=tolerance, atol=tolerance)


def test_activations_are_split_by_the_rules_of_the_mesh_that_is_set():
    x = normal(0, 8, 6, 16)
    assert constrain(x, "batch", None, "mlp") is x, "without a mesh nothing is done"
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    with jax.set_mesh(mesh):
        split = jax.jit(lambda x: constrain(x, "batch", None, "mlp"))(x)
        odd = jax.jit(lambda x: constrain(x, None, "mlp", "kv_heads"))(x[:, :5])
    assert split.sharding.spec == jax.P(("data", "fsdp"), None, "tensor")
    assert odd.sharding.spec == jax.P(None, None, "tensor"), "an axis that does not divide stays whole"
    np.testing.assert_array_equal(split, x)


SIZES: Any = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_heads": 8, "num_kv_heads": 4, "head_dim": 4}
TARGET = DenseTarget(DenseConfig(**SIZES, num_layers=2, qk_norm=True))
DRAFTER = DSparkDrafter(
    DSparkConfig(**SIZES, mask_token_id=63, taps=(0,), num_target_layers=2, num_layers=1, block_size=2, markov_rank=4), backend="xla"
)


def random_params(model, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32), model.abstract_params())


def two_passes_and_a_draft(params, drafter_params):
    """A prompt, a pass of single tokens behind it, and the logits of a drafted block."""
    ids = jnp.arange(12, dtype=jnp.int32).reshape(4, 3)
    start = jnp.zeros(4, jnp.int32)
    prompt = FlatTokens.grid(ids, start, start + 3)
    cache: Any
    cache: Any = TARGET.init_cache(4, 8)
    _, features, cache = TARGET.forward(params, cache, prompt, DRAFTER.taps)
    state = DRAFTER.init_state(4, 8)
    committed = Committed(ids, jnp.zeros((4, 3, 32)), features.reshape(4, 3, -1), start + 3)
    state = DRAFTER.commit(drafter_params, TARGET.head(params), state, committed)
    hidden, _, cache = TARGET.forward(params, cache, FlatTokens.grid(ids[:, :1], start + 3, start + 1), ())
    noise = Noise.of_round(0, jnp.arange(4, dtype=jnp.int32), start)
    block = DRAFTER.propose(drafter_params, TARGET.head(params), state, ids[:, 0], noise, Sampling.make(4, 0.0))
    return hidden, cache.keys, cache.length, block.logits


def test_rounds_over_a_mesh_that_is_set_compute_what_one_device_does():
    """Parameters stay where they are, activations are split by width: the same numbers."""
    params, drafter_params = random_params(TARGET, 0), random_params(DRAFTER, 1)
    alone = jax.jit(two_passes_and_a_draft)(params, drafter_params)
    mesh = make_mesh(fsdp=2, tensor=4)
    placed = (jax.device_put(each, parameter_shardings(mesh, model)) for each, model in ((params, TARGET), (drafter_params, DRAFTER)))
    with jax.set_mesh(mesh):
        spread = jax.block_until_ready(jax.jit(two_passes_and_a_draft)(*placed))
    for ours, expected in zip(jax.tree.leaves(spread), jax.tree.leaves(alone), strict=True):
        np.testing.assert_allclose(ours, expected, rtol=2e-4, atol=2e-5)


def test_a_pass_over_a_cache_is_the_pass_over_the_whole_text():
    """Wherever the text is cut."""
    params, ids = random_params(TARGET, 0), jax.random.randint(jax.random.key(1), (2, 9), 0, 64)
    zero = jnp.zeros(2, jnp.int32)
    cache: Any
    whole, _, _ = TARGET.forward(params, None, FlatTokens.grid(ids, zero, zero + 9))
    for begin in (1, 4, 8):
        cache: Any = TARGET.init_cache(2, 12)
        _, _, cache = TARGET.forward(params, cache, FlatTokens.grid(ids[:, :begin], zero, zero + begin))
        rest, _, cache = TARGET.forward(params, cache, FlatTokens.grid(ids[:, begin:], zero + begin, zero + 9 - begin))
        np.testing.assert_allclose(rest.reshape(2, 9 - begin, -1), whole.reshape(2, 9, -1)[:, begin:], rtol=1e-4, atol=1e-5)
        np.testing.assert_array_equal(cache.length, [9, 9])
