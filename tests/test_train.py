"""The optimizer step is the reference's where it should be, and the same however a batch is split or spread."""

import dataclasses
import math
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from dspark_jax.anchors import read_batch
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.losses import DraftLossConfig
from dspark_jax.protocols import TrainBatch
from dspark_jax.sharding import batch_sharding, make_mesh, replicated
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.train import (
    OptimizerConfig,
    TrainConfig,
    init_train_state,
    learning_rate,
    make_optimizer,
    require_finite,
    train_step,
    train_step_on_features,
)
from dspark_jax.weights import load_drafter, load_target
from tests.linear_drafter import LinearDrafter


def rates(config, steps):
    return np.asarray(jax.vmap(learning_rate(config))(jnp.arange(steps)), np.float64)


def schedule_case(golden, case, **changes):
    units = np.load(golden / "units" / "lr_schedule.npz")
    total_steps, warmup_ratio, base = (units[f"case{case}_{name}"] for name in ("total_steps", "warmup_ratio", "base_lr"))
    config = OptimizerConfig(int(total_steps), learning_rate=float(base), warmup_ratio=float(warmup_ratio), **changes)
    return config, units[f"case{case}_lr"]


@pytest.mark.parametrize("case", range(5))
def test_with_its_overshoot_the_schedule_is_the_references(golden, case):
    config, want = schedule_case(golden, case, reference_overshoot=True)
    np.testing.assert_allclose(rates(config, len(want)), want, rtol=1e-6, atol=1e-6 * config.learning_rate)


@pytest.mark.parametrize("case", range(5))
def test_without_the_overshoot_the_cosine_begins_at_the_peak_and_ends_at_zero(golden, case):
    config, reference = schedule_case(golden, case)
    ours = rates(config, len(reference))
    warmup, total = config.warmup_steps, config.total_steps
    factor = (1 + np.cos(np.pi / (total - warmup))) / 2
    np.testing.assert_allclose(ours[:warmup], reference[:warmup], rtol=1e-6)
    np.testing.assert_allclose(ours[warmup:total], reference[warmup:total] * factor, rtol=1e-5, atol=1e-6 * config.learning_rate)
    np.testing.assert_allclose(ours[warmup], config.learning_rate, rtol=1e-6)
    np.testing.assert_allclose(ours[total:], 0.0, atol=1e-12)
    assert ours.max() <= config.learning_rate * (1 + 1e-6)


def test_a_warm_up_can_start_and_a_cosine_end_at_a_fraction_of_the_peak():
    config = OptimizerConfig(20, learning_rate=1.0, warmup_ratio=0.25, init_learning_rate=0.2, final_learning_rate=0.1)
    ours = rates(config, 25)
    np.testing.assert_allclose(ours[:5], [0.36, 0.52, 0.68, 0.84, 1.0], rtol=1e-6)
    np.testing.assert_allclose(ours[20:], 0.1, rtol=1e-6)


def test_clipped_adamw_is_the_references(golden):
    units = np.load(golden / "units" / "adamw_clip.npz")
    config = OptimizerConfig(12, learning_rate=6e-4, warmup_ratio=0.25, weight_decay=float(units["weight_decay"]), reference_overshoot=True)
    np.testing.assert_allclose(rates(config, 12), units["lr"], rtol=1e-5)
    optimizer = make_optimizer(config)
    params: Any = {"weight": jnp.asarray(units["init_weight"]), "bias": jnp.asarray(units["init_bias"])}
    state = optimizer.init(params)
    for step in range(12):
        gradient = {name: jnp.asarray(units[f"grad_{name}"][step]) for name in params}
        norm = np.sqrt(sum(float(jnp.sum(x**2)) for x in gradient.values()))
        np.testing.assert_allclose(norm, units["grad_norm"][step], rtol=1e-6)
        updates, state = optimizer.update(gradient, state, params)
        params = optax.apply_updates(params, updates)
        for name in params:
            np.testing.assert_allclose(params[name], units[name][step], rtol=1e-5, atol=1e-7)


def test_muon_orthogonalises_projections_and_leaves_the_rest_to_adamw():
    """All singular values of a projection's update are near each other and its size is AdamW's; other parameters move as with NAdamW."""
    rng = np.random.default_rng(0)
    shapes = {"fc": (16, 48), "q_proj": (24, 16), "markov_w1": (31, 4), "lone": (7,)}
    params: Any = {name: {"weight": jnp.zeros(shape)} for name, shape in shapes.items()}
    gradient = jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), params)
    optimizer = make_optimizer(OptimizerConfig(10, warmup_ratio=0.0, algorithm="muon", max_grad_norm=math.inf))
    moved = jax.jit(optimizer.update)(gradient, optimizer.init(params), params)[0]
    with jax.numpy_dtype_promotion("standard"):
        other = optax.nadamw(6e-4, weight_decay=0.0)
        expected: Any = other.update(gradient, other.init(params), params)[0]
    for name in ("fc", "q_proj"):
        update = np.asarray(moved[name]["weight"])
        singular = np.linalg.svd(update, compute_uv=False)
        raw = np.linalg.svd(gradient[name]["weight"], compute_uv=False)
        assert singular.min() > 0.5 * singular.max() and raw.min() < 0.5 * raw.max()
        assert 0.1 * 6e-4 < np.sqrt(np.mean(update**2)) < 0.3 * 6e-4
    for name in ("markov_w1", "lone"):
        np.testing.assert_allclose(moved[name]["weight"], expected[name]["weight"], rtol=1e-5)


def test_three_steps_of_two_micro_batches_are_the_references(golden):
    arrays = np.load(golden / "dspark_qwen3_vanilla" / "optim3.npz")
    target, target_params = load_target(golden / "qwen3_target")
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", target.spec)
    optimizer = OptimizerConfig(10, learning_rate=6e-3, warmup_ratio=0.2, reference_overshoot=True)
    config = TrainConfig(optimizer, DraftLossConfig(chunk=60), num_anchors=6, micro_batches=2, normalise="micro")
    state = init_train_state(jax.random.key(0), loaded.params, optimizer)

    def interleaved(first, second):
        """Rows of the two micro-batches in turn, the shorter one padded."""
        widths = [(0, 0), (0, first.shape[1] - second.shape[1])] + [(0, 0)] * (first.ndim - 2)
        return jnp.stack([jnp.asarray(first), jnp.pad(jnp.asarray(second), widths)], axis=1).reshape(4, *first.shape[1:])

    def both(name):
        return interleaved(*(arrays[f"micro{micro}_{name}"] for micro in range(2)))

    for step in range(3):
        batch = TrainBatch(
            ids=both("input_ids"),
            loss_mask=both("loss_mask") == 1,
            features=both("target_hidden_states"),
            last_hidden=both("target_last_hidden_states"),
            anchors=interleaved(*arrays["anchor_positions"][step]),
            keep=interleaved(*arrays["block_keep_mask"][step]),
        )
        state, metrics = train_step_on_features(loaded.drafter, config, state, target.head(target_params), batch)
        np.testing.assert_allclose(metrics["loss"], arrays["micro_loss"][step].mean(), rtol=2e-4, atol=2e-5)
        np.testing.assert_allclose(metrics["grad_norm"], arrays["grad_norm"][step], rtol=1e-3)
        np.testing.assert_allclose(metrics["learning_rate"], arrays["lr"][step], rtol=1e-6)
    paths = jax.tree_util.tree_flatten_with_path(state.params)[0]
    named = {".".join(key.key for key in path).replace("layers_", "layers."): leaf for path, leaf in paths}
    assert named.keys() == {name[len("param/") :] for name in arrays if name.startswith("param/")}
    for name, leaf in named.items():
        np.testing.assert_allclose(leaf, arrays[f"param/{name}"], rtol=2e-4, atol=2e-5, err_msg=name)


TARGET = DenseTarget(DenseConfig(61, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8))
# With so large an epsilon an update is nearly proportional to the gradient, so that rounding is not blown up to a whole step.
OPTIMIZER = OptimizerConfig(10, learning_rate=0.1, epsilon=1.0)
CONFIG = TrainConfig(OPTIMIZER, DraftLossConfig(chunk=64), num_anchors=4)


@pytest.fixture(scope="module")
def texts():
    ids = jax.random.randint(jax.random.key(1), (8, 20), 0, 61)
    answers = jnp.arange(20) >= jnp.arange(3, 19, 2)[:, None]
    return ids, answers


@pytest.fixture(scope="module")
def target_params():
    return jax.jit(TARGET.init)(jax.random.key(2))


def new_state(drafter, optimizer=OPTIMIZER):
    return init_train_state(jax.random.key(3), jax.jit(drafter.init)(jax.random.key(4)), optimizer)


@pytest.fixture(scope="module")
def whole(texts, target_params):
    """One step on the whole batch at once, on one device."""
    return train_step(TARGET, LinearDrafter(), CONFIG, new_state(LinearDrafter()), target_params, *texts)


def assert_same_step(have, want):
    for ours, theirs in zip(jax.tree.leaves((have[0].params, have[1])), jax.tree.leaves((want[0].params, want[1])), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-4, atol=1e-6)
    assert int(have[0].step) == int(want[0].step) == 1


def test_accumulated_micro_batches_equal_one_large_batch(texts, target_params, whole):
    config = dataclasses.replace(CONFIG, micro_batches=4)
    assert_same_step(train_step(TARGET, LinearDrafter(), config, new_state(LinearDrafter()), target_params, *texts), whole)


def test_eight_devices_take_the_step_of_one(texts, target_params, whole):
    mesh = make_mesh(data=8)
    state, frozen = jax.device_put((new_state(LinearDrafter()), target_params), replicated(mesh))
    spread = jax.device_put(texts, batch_sharding(mesh))
    assert_same_step(jax.block_until_ready(train_step(TARGET, LinearDrafter(), CONFIG, state, frozen, *spread)), whole)


def test_a_batch_that_micro_batches_do_not_divide_is_refused(texts, target_params):
    config = dataclasses.replace(CONFIG, micro_batches=3)
    with pytest.raises(ValueError, match="micro_batches is 3; it must divide the batch size 8"):
        train_step(TARGET, LinearDrafter(), config, new_state(LinearDrafter()), target_params, *texts)


def test_a_drafter_learns_and_all_its_parameters_move_in_bfloat16(texts, target_params):
    """[E3] Masters and moments are float32 whatever is computed in, so that even norms leave 1."""
    drafter = DSparkDrafter(
        DSparkConfig(
            vocab_size=61,
            hidden_size=16,
            intermediate_size=24,
            num_heads=2,
            num_kv_heads=1,
            head_dim=8,
            mask_token_id=60,
            taps=(0,),
            num_target_layers=2,
            num_layers=1,
            block_size=3,
            markov_rank=4,
        )
    )
    optimizer = OptimizerConfig(200)
    config = TrainConfig(optimizer, DraftLossConfig(chunk=256), num_anchors=4, compute_dtype="bfloat16")
    state = new_state(drafter, optimizer)
    losses = []
    for _ in range(200):
        state, metrics = train_step(TARGET, drafter, config, state, target_params, *texts)
        losses.append(float(metrics["loss"]))
    assert np.mean(losses[-20:]) < np.mean(losses[:20]) - 0.01
    floats = [leaf for leaf in jax.tree.leaves((state.params, state.opt_state)) if jnp.issubdtype(leaf.dtype, jnp.floating)]
    assert all(leaf.dtype == jnp.float32 for leaf in floats)
    norms = [leaf for path, leaf in jax.tree_util.tree_flatten_with_path(state.params)[0] if "norm" in jax.tree_util.keystr(path)]
    assert len(norms) == 6 and all(bool((leaf != 1.0).any()) for leaf in norms)


def test_blocks_see_nothing_at_or_behind_their_anchor_and_nothing_of_each_other(golden):
    """[E1]"""
    target, target_params = load_target(golden / "qwen3_target")
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", target.spec)
    arrays = np.load(golden / "dspark_qwen3_vanilla" / "train.npz")
    ids, mask = jnp.asarray(arrays["input_ids"][:1]), jnp.asarray(arrays["loss_mask"][:1] == 1)
    anchors, keep = jnp.asarray([[3, 8, 9, 14, 20]]), jnp.ones((1, 5), bool)

    @jax.jit
    def hidden(ids, anchors):
        batch = read_batch(target, target_params, loaded.drafter.taps, ids, mask, anchors, keep)
        return loaded.drafter.prediction_sites(loaded.params, target.head(target_params), batch).hidden.reshape(5, 5, -1)

    before = np.asarray(hidden(ids, anchors))
    for place in (8, 12, 21):
        after = np.asarray(hidden(ids.at[0, place].set((ids[0, place] + 7) % 96), anchors))
        moved = np.abs(after - before).max(axis=(1, 2)) > 0
        # The token at its own anchor is a block's first input; everything else at or behind the anchor is invisible.
        np.testing.assert_array_equal(moved, np.asarray(anchors[0]) >= place)
    moved = np.abs(np.asarray(hidden(ids, anchors.at[0, 2].set(11))) - before).max(axis=(1, 2)) > 0
    np.testing.assert_array_equal(moved, [False, False, True, False, False])


def test_a_loss_that_is_no_number_stops_the_run_and_names_step_and_samples(texts, target_params):
    state = new_state(LinearDrafter())
    state = dataclasses.replace(state, params={**state.params, "mix": state.params["mix"].at[0, 0].set(jnp.nan)})
    _, metrics = train_step(TARGET, LinearDrafter(), CONFIG, state, target_params, *texts)
    with pytest.raises(FloatingPointError, match="loss is nan at step 12; samples of the batch: 4, 7"):
        require_finite(metrics, 12, [4, 7])
    require_finite({"loss": jnp.ones(()), "grad_norm": 0.5}, 12, [4, 7])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: OptimizerConfig(0), "total_steps is 0"),
        (lambda: OptimizerConfig(10, warmup_ratio=1.0), "warmup_ratio is 1.0"),
        (lambda: OptimizerConfig(10, learning_rate=float("nan")), "learning_rate is nan"),
        (lambda: OptimizerConfig(10, max_grad_norm=0.0), "max_grad_norm is 0.0"),
        (lambda: OptimizerConfig(1, reference_overshoot=True), "reference_overshoot needs at least 2 steps"),
        (lambda: TrainConfig(OPTIMIZER, num_anchors=0), "num_anchors is 0"),
        (lambda: TrainConfig(OPTIMIZER, micro_batches=0), "micro_batches is 0"),
        (lambda: TrainConfig(OPTIMIZER, normalise=cast(Any, "mean")), "normalise is 'mean'; allowed: global, micro"),
        (lambda: TrainConfig(OPTIMIZER, compute_dtype=cast(Any, "float16")), "compute_dtype is 'float16'; allowed: float32, bfloat16"),
    ],
)
def test_settings_out_of_range_are_refused_by_name(make, message):
    with pytest.raises(ValueError, match=message):
        make()
