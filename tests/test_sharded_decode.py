"""Decoding over a mesh of eight devices: the tokens of one device, and the same on every device."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, answers, generate
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.engine import Engine, EngineConfig
from dspark_jax.prefill import start
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.sharding import batch_sharding, make_mesh, parameter_shardings, replicated
from dspark_jax.slot_executor import BatchShape
from dspark_jax.targets.dense import DenseConfig, DenseTarget

# All axes that the rules split are multiples of eight: vocabulary, heads, key heads, MLP and width.
TARGET = DenseTarget(DenseConfig(64, 32, 48, num_layers=1, num_heads=8, num_kv_heads=8, head_dim=4, qk_norm=True))
DRAFTER = DSparkDrafter(DSparkConfig(64, 32, 48, 8, 8, 4, 63, (-1,), 1, num_layers=1, block_size=2, markov_rank=4))
PROMPTS = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11]]
BUDGETS = [12, 9, 12, 4]


def _random(model, seed):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(0.3 * rng.normal(size=leaf.shape), jnp.float32), model.abstract_params())


def _begin(plan, params):
    # Warm requests accept many of these untrained drafts, both laws being nearly uniform at a temperature of 4.
    sampling = Sampling.make(4, [0.0, 4.0, 1.0, 4.0], [0, 0, 12, 0])
    settings = {"sampling": sampling, "stop_ids": (40,), "seed": 3, "request_ids": [1, 2, 3, 4], "max_len": 24}
    state = start(plan, params, PROMPTS, max_new_tokens=BUDGETS, **settings)
    return jax.block_until_ready(state)


@pytest.fixture(scope="module")
def one_device():
    """The plan, the parameters of both models, and what one device writes."""
    plan = DecodePlan(TARGET, DRAFTER, FixedLength(2), RawSurvival())
    target_params, drafter_params = _random(TARGET, 0), _random(DRAFTER, 1)
    params = DecodeParams.of(TARGET, target_params, drafter_params)
    state, tally = jax.block_until_ready(generate(plan, params, _begin(plan, params)))
    return plan, target_params, drafter_params, state, tally


def _place_rows(state, mesh, rows):
    """Every array with a leading axis of requests placed by `rows`; the seed on every device."""
    placed = jax.tree.map(lambda leaf: jax.device_put(leaf, rows), dataclasses.replace(state, seed=jnp.zeros((4,), jnp.uint32)))
    return dataclasses.replace(placed, seed=jax.device_put(state.seed, replicated(mesh)))


@pytest.mark.parametrize(
    ("sizes", "by_rows"),
    [({"data": 2, "fsdp": 2, "tensor": 2}, True), ({"tensor": 8}, False)],
    ids=["data 2 x fsdp 2 x tensor 2, rows split", "tensor 8, rows replicated"],
)
def test_a_mesh_of_eight_devices_writes_the_tokens_of_one(one_device, sizes, by_rows):
    """[B2] [B3] Greedy and sampled requests with a split vocabulary: what each device holds of the tokens is what one device wrote."""
    plan, target_params, drafter_params, alone, alone_tally = one_device
    mesh, on_one = make_mesh(**sizes), (target_params, drafter_params)
    target_params = jax.device_put(target_params, parameter_shardings(mesh, TARGET))
    drafter_params = jax.device_put(drafter_params, parameter_shardings(mesh, DRAFTER))
    for tree, path in ((target_params, "lm_head"), (target_params, "embed_tokens"), (drafter_params["markov_head"], "markov_w2")):
        assert not tree[path]["weight"].is_fully_replicated, "the vocabulary is split"
    params = DecodeParams.of(TARGET, target_params, drafter_params)
    # Prefilled over the mesh where it is all tensor-parallel; on one device, and then spread, where rows are split.
    begun = _begin(plan, DecodeParams.of(TARGET, *on_one) if by_rows else params)
    state = jax.block_until_ready(_place_rows(begun, mesh, batch_sharding(mesh) if by_rows else replicated(mesh)))
    assert len(state.ids.sharding.device_set) == 8 and state.ids.is_fully_replicated != by_rows
    state, tally = jax.block_until_ready(generate(plan, params, state))

    assert answers(state) == answers(alone)
    for ours, expected in ((state.ids, alone.ids), (state.length, alone.length), (tally.accepted, alone_tally.accepted)):
        devices = set()
        for shard in ours.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), np.asarray(expected)[shard.index])
            devices.add(shard.device)
        assert len(devices) == 8
    accepted = np.asarray(tally.accepted).sum(1)
    assert accepted[1] > 0 and accepted[3] > 0


def _engine(params, config, mesh=None) -> Any:
    how = {"policy": FixedLength(2), "survival": RawSurvival(), "ladder": lambda rows: (3 * rows,)}
    return Engine(TARGET, DRAFTER, params, config=config, mesh=mesh, **how)


def _ask(engine, *last):
    """The requests of `_begin`, one after another, and then another one."""
    handles = []
    for prompt, budget, temperature, top_k in zip(PROMPTS, BUDGETS, [0.0, 4.0, 1.0, 4.0], [0, 0, 12, 0], strict=True):
        handles.append(engine.submit(prompt, max_new_tokens=budget, temperature=temperature, top_k=top_k, stop_ids=(40,)))
        engine.step()
    for prompt, budget in last:
        engine.submit(prompt, max_new_tokens=budget)
    return [list(handle.result().ids) for handle in handles], [handle.completion.metrics for handle in handles]


def test_the_engine_over_a_mesh_writes_them_too(one_device):
    """[B2] [B3] Rows of the batch over data and fsdp, heads and vocabulary over tensor; requests come one after another."""
    _, target_params, drafter_params, alone, _ = one_device
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    placed = (
        jax.device_put(params, parameter_shardings(mesh, model)) for model, params in ((TARGET, target_params), (DRAFTER, drafter_params))
    )
    config = EngineConfig(row_ladder=(4,), slot_ladder=(24,), prefill_chunk=4, seed=3)
    engine = _engine(DecodeParams.of(TARGET, *placed), config, mesh)
    assert _ask(engine)[0] == answers(alone)
    state = engine._executor._state
    caches = [leaf for leaf in jax.tree.leaves(state) if leaf.ndim == 4]
    assert caches and all(leaf.sharding.spec == PartitionSpec(("data", "fsdp"), "tensor") for leaf in caches)
    on_all = sum(shard.data.nbytes for leaf in jax.tree.leaves(state) for shard in leaf.addressable_shards)
    assert engine._executor.cache_bytes(BatchShape(4, 24)) == on_all


def test_caches_move_along_where_the_batch_changes_its_shape(one_device):
    """[B2] From one row of 16 slots to four, and to 24 slots under way: the same tokens and the same drafts accepted as in one batch."""
    _, target_params, drafter_params, alone, tally = one_device
    config = EngineConfig(row_ladder=(1, 4), slot_ladder=(16, 24), prefill_chunk=4, seed=3, shrink_after=1)
    engine = _engine(DecodeParams.of(TARGET, target_params, drafter_params), config)
    ids, metrics = _ask(engine, ([7], 23))
    assert ids == answers(alone)
    # A round that a stop token or the budget cut short is counted apart there.
    assert [each.rounds for each in metrics] == (np.asarray(tally.rounds) + np.asarray(tally.cut_rounds)).tolist()
    assert [each.verified for each in metrics] == np.asarray(tally.verified).tolist()
    assert {(record.rows, record.slots) for record in engine.metrics.latest} >= {(1, 16), (4, 16), (4, 24)}
    assert max(record.active for record in engine.metrics.latest if record.slots == 24) > 1


def test_the_one_device_answers_are_complete(one_device):
    """What the meshes are compared with: every request used its budget or ended with the stop token."""
    _, _, _, state, _ = one_device
    for answer, budget in zip(answers(state), BUDGETS, strict=True):
        assert len(answer) == budget or answer[-1] == 40
    assert state.finished.all()


def test_axes_that_do_not_divide_are_left_whole():
    """A vocabulary of 61 and 3 key heads of 4 are not split over tensor 8; the rest is."""
    config = dataclasses.replace(TARGET.config, vocab_size=61, num_kv_heads=1)
    shardings = parameter_shardings(make_mesh(tensor=8), DenseTarget(config))
    assert shardings["lm_head"]["weight"].is_fully_replicated
    assert shardings["layers_0"]["self_attn"]["k_proj"]["weight"].is_fully_replicated
    assert not shardings["layers_0"]["self_attn"]["q_proj"]["weight"].is_fully_replicated
