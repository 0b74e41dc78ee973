"""Training over a mesh of eight devices, of every shape: the steps of one device, with no array where it need not be."""

import dataclasses
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dspark_jax.anchors import read_batch
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.losses import DraftLossConfig
from dspark_jax.moe import MoEConfig
from dspark_jax.sharded_training import (
    sharded_train_state,
    sharded_train_step,
    sharded_train_step_on_features,
    train_state_shardings,
)
from dspark_jax.sharding import batch_share, global_batch, make_mesh, parameter_shardings, place
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.train import OptimizerConfig, TrainConfig, init_train_state, train_step
from tests.training_host import quick_compilation

# All axes that the rules split are multiples of eight: vocabulary, heads, key heads, MLP and width.
TARGET = DenseTarget(DenseConfig(64, 32, 48, num_layers=1, num_heads=8, num_kv_heads=8, head_dim=4))
DRAFTER = DSparkDrafter(DSparkConfig(64, 32, 48, 8, 8, 4, 63, (-1,), 1, num_layers=1, block_size=2, markov_rank=4))
# With so large an epsilon an update is nearly proportional to the gradient, so that rounding is not blown up to a whole step.
CONFIG = TrainConfig(OptimizerConfig(10, learning_rate=0.1, epsilon=1.0), DraftLossConfig(chunk=64), num_anchors=4, micro_batches=2)
SHAPES = [(data, fsdp, 8 // data // fsdp) for data in (1, 2, 4, 8) for fsdp in (1, 2, 4, 8) if data * fsdp <= 8]
QUICK = {(8, 1, 1), (1, 8, 1), (2, 2, 2)}


@pytest.fixture(scope="module", autouse=True)
def compiled_quickly():
    with quick_compilation():
        yield


def random_params(model, seed):
    """Parameters large enough that the losses differ from site to site."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.2 * rng.normal(size=leaf.shape), jnp.float32), model.abstract_params())


@pytest.fixture(scope="module")
def texts():
    """Two batches of 48 texts of 20 tokens, whose answers begin at different places."""
    ids = np.random.default_rng(1).integers(0, 64, (2, 48, 20), np.int32)
    return ids, np.broadcast_to(np.arange(20) >= 2 + np.arange(48)[:, None] % 16, ids.shape)


@pytest.fixture(scope="module")
def target_params():
    return random_params(TARGET, 2)


@pytest.fixture(scope="module")
def initial():
    return random_params(DRAFTER, 4)


@pytest.fixture(scope="module")
def one_device(texts, target_params, initial):
    """State and metrics of both steps on one device."""
    state, metrics = init_train_state(jax.random.split(jax.random.key(3))[1], initial, CONFIG.optimizer), []
    for ids, mask in zip(*texts, strict=True):
        state, each = train_step(TARGET, DRAFTER, CONFIG, state, target_params, jnp.asarray(ids), jnp.asarray(mask))
        metrics.append(each)
    return jax.device_get((state.params, state.opt_state, metrics))


class HeadAlone(DenseTarget):
    """A target that cannot read texts."""

    def forward(self, *args):
        raise AssertionError("features are stored, and the target need not read")


def test_stored_features_over_a_mesh_take_the_steps_of_the_target_on_one_device(one_device, texts, target_params, initial):
    """Without a forward pass of the target, and with the anchors that are drawn online."""
    mesh = make_mesh(2, 2, 2)
    state = sharded_train_state(mesh, DRAFTER, CONFIG, seed=3, params=initial)
    frozen = jax.block_until_ready(place(target_params, parameter_shardings(mesh, TARGET)))
    reads_nothing: Any = HeadAlone(TARGET.config)
    step = sharded_train_step_on_features(mesh, reads_nothing, DRAFTER, CONFIG)
    nothing = jnp.zeros((48, 1), jnp.int32)
    for ids, mask in zip(*texts, strict=True):
        said = jax.jit(read_batch, static_argnums=(0, 2))(TARGET, target_params, DRAFTER.taps, ids, mask, nothing, nothing == 0)
        rows = global_batch(mesh, 48, (ids, mask, np.asarray(said.features), np.asarray(said.last_hidden)))
        state, metrics = jax.block_until_ready(step(state, frozen, *rows[:2], None, None, *rows[2:]))
    have = jax.device_get((state.params, state.opt_state, metrics))
    for ours, theirs in zip(jax.tree.leaves(have), jax.tree.leaves((*one_device[:2], one_device[2][-1])), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)


def share_on_one_device(tree) -> float:
    """Bytes of a tree that lie on the first device, over those of all."""
    leaves = jax.tree.leaves(tree)
    return sum(leaf.addressable_shards[0].data.nbytes for leaf in leaves) / sum(leaf.nbytes for leaf in leaves)


@pytest.mark.parametrize("shape", [pytest.param(shape, marks=[] if shape in QUICK else pytest.mark.slow) for shape in SHAPES], ids=str)
def test_every_mesh_takes_the_steps_of_one_device(shape, one_device, texts, target_params, initial):
    """Two steps with accumulation: parameters, moments and all metrics to float32 reduction tolerance, every array in its place."""
    mesh = make_mesh(*shape)
    wanted = train_state_shardings(mesh, DRAFTER, CONFIG)
    state = sharded_train_state(mesh, DRAFTER, CONFIG, seed=3, params=initial)
    frozen = jax.block_until_ready(place(target_params, parameter_shardings(mesh, TARGET)))
    batches = [global_batch(mesh, 48, rows) for rows in zip(*texts, strict=True)]
    step: Any = sharded_train_step(mesh, TARGET, DRAFTER, CONFIG)
    step = step.lower(state, frozen, *batches[0]).compile()
    metrics = []
    for rows in batches:
        state, each = jax.block_until_ready(step(state, frozen, *rows))
        metrics.append(each)

    have = jax.device_get((state.params, state.opt_state, metrics))
    for (path, ours), theirs in zip(jax.tree_util.tree_flatten_with_path(have)[0], jax.tree.leaves(one_device), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6, err_msg=jax.tree_util.keystr(path))
    for leaf, sharding in zip(jax.tree.leaves(state), jax.tree.leaves(wanted), strict=True):
        assert leaf.sharding.is_equivalent_to(sharding, leaf.ndim)
    if shape[2] < 8:
        assert {shard.data.shape[0] for shard in batches[0][0].addressable_shards} == {48 // (shape[0] * shape[1])}
        assert not re.findall(r"f32\[(?:24,20|480),\d+", step.as_text()), "no device has activations of all 24 rows of a micro-batch"
    parts = shape[1] * shape[2]
    for tree in (state.params, state.opt_state, frozen):
        assert share_on_one_device(tree) == 1 if parts == 1 else share_on_one_device(tree) < 0.8


def test_moments_lie_where_their_parameters_lie():
    mesh = make_mesh(data=1, fsdp=4, tensor=2)
    of_parameters = parameter_shardings(mesh, DRAFTER)
    shardings = train_state_shardings(mesh, DRAFTER, CONFIG)
    adam = shardings.opt_state[1][0]
    assert adam.mu == adam.nu == shardings.params == of_parameters
    assert adam.mu["layers_0"]["self_attn"]["q_proj"]["weight"].spec == PartitionSpec("tensor", "fsdp")
    assert adam.count.is_fully_replicated and shardings.step.is_fully_replicated and shardings.rng.is_fully_replicated


def test_moments_of_what_alone_is_trained_have_their_places():
    mesh, config = make_mesh(fsdp=8), dataclasses.replace(CONFIG, trainable="confidence_head")
    shardings = train_state_shardings(mesh, DRAFTER, config)
    assert shardings.opt_state[1][0].mu == {"confidence_head": parameter_shardings(mesh, DRAFTER)["confidence_head"]}
    assert shardings.params == parameter_shardings(mesh, DRAFTER)


def test_random_parameters_do_not_depend_on_the_mesh():
    meshes = make_mesh(devices=jax.devices()[:1]), make_mesh(2, 2, 2)
    one, eight = (sharded_train_state(mesh, DRAFTER, CONFIG, seed=5) for mesh in meshes)
    for first, second in zip(jax.tree.leaves(one.params), jax.tree.leaves(eight.params), strict=True):
        np.testing.assert_allclose(first, second, rtol=1e-6, atol=1e-9)


@pytest.mark.slow
def test_experts_are_rebalanced_behind_every_step(texts, target_params):
    """No gradient moves these biases, so that a loop which forgot them would leave them at 0."""
    experts = MoEConfig(num_experts=4, top_k=2, intermediate_size=16)
    drafter = DSparkDrafter(dataclasses.replace(DRAFTER.config, experts=experts))
    mesh = make_mesh(devices=jax.devices()[:1])
    state = sharded_train_state(mesh, drafter, CONFIG, seed=3)

    def biases(state):
        paths = jax.tree_util.tree_flatten_with_path(state.params)[0]
        return np.concatenate([np.asarray(leaf) for path, leaf in paths if "e_score_correction_bias" in jax.tree_util.keystr(path)])

    assert (biases(state) == 0).all()
    state, _ = sharded_train_step(mesh, TARGET, drafter, CONFIG)(state, target_params, texts[0][0], texts[1][0])
    moved = biases(state)
    assert (moved != 0).any() and np.abs(moved).max() == pytest.approx(1e-3)


def test_rows_that_a_mesh_cannot_split_are_refused():
    with pytest.raises(ValueError, match="batch_size is 12; allowed are multiples of data x fsdp = 8"):
        batch_share(make_mesh(data=4, fsdp=2), 12)
    assert batch_share(make_mesh(data=4, fsdp=2), 16) == (0, 1)
