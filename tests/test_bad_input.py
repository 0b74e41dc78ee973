"""What cannot be decoded is refused where it is asked for, by field, value and what is allowed."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.prefill import NO_STOP, start
from dspark_jax.protocols import FlatTokens
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.sharding import Initialised, make_mesh, parameter_shardings
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.targets.toy import ToyTarget

CONFIG = DenseConfig(31, 16, 24, num_layers=2, num_heads=4, num_kv_heads=2, head_dim=8)
DRAFTER = DSparkDrafter(DSparkConfig(31, 16, 24, 4, 2, 8, 30, (0,), 2, num_layers=1, block_size=3, markov_rank=4))
PLAIN = DecodePlan(ToyTarget(5))
PARAMS = DecodeParams.of(ToyTarget(5), {"table": np.zeros((2, 5, 5), np.float32)})


@pytest.mark.parametrize(
    ("prompts", "changes", "complaint"),
    [
        ([], {}, "prompts has no entry"),
        ([[1], []], {}, "prompts has no entry, or an empty one; every request needs at least one token"),
        ([[1, 5]], {}, r"prompts holds 5; token ids of this target lie in 0\.\.4"),
        ([[-1]], {}, r"prompts holds -1; token ids of this target lie in 0\.\.4"),
        ([[1]], {"stop_ids": (2, 7)}, r"stop_ids holds 7; token ids of this target lie in 0\.\.4"),
        ([[1]], {"max_new_tokens": 0}, "max_new_tokens is 0; it must be at least 1"),
        ([[1], [2]], {"max_new_tokens": [3, -1]}, "max_new_tokens is -1; it must be at least 1"),
        ([[1], [2]], {"max_new_tokens": [3, 3, 3]}, r"max_new_tokens has 3 entries; allowed is one for all, or one per request \(2\)"),
        ([[1], [2, 3, 4]], {"max_len": 6}, r"max_len is 6; request 1 needs 3 prompt tokens \+ a budget of 4 = 7"),
        ([[1], [2]], {"request_ids": [3, 3]}, r"request_ids is \[3, 3\]; allowed are 2 distinct ids"),
        ([[1], [2]], {"request_ids": [3]}, r"request_ids is \[3\]; allowed are 2 distinct ids"),
        ([[1]], {"prefill_chunk": 0}, "prefill_chunk is 0; it must be at least 1"),
        ([[1], [2]], {"sampling": Sampling.make(3)}, "sampling has settings for 3 requests; there are 2"),
        ([[1]], {"seed": -1}, "seed is -1"),
        ([1, 2], {}, "prompts holds something that is no sequence of token ids"),
        (["Why?"], {}, "prompts holds something that is no sequence of token ids; a tokenizer makes them of text"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused_by_field(prompts, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        start(PLAIN, PARAMS, prompts, **({"max_new_tokens": 4} | changes))


def test_parameters_without_those_of_the_drafter_are_refused():
    plan = DecodePlan(PLAIN.target, DRAFTER, FixedLength(1), RawSurvival())
    with pytest.raises(ValueError, match="params.drafter is empty, and the plan has a drafter"):
        start(plan, PARAMS, [[1]], max_new_tokens=4)


@pytest.mark.parametrize(
    ("fields", "complaint"),
    [
        ({"policy": None}, "policy or survival is None; a plan with a drafter needs both"),
        ({"survival": None}, "policy or survival is None; a plan with a drafter needs both"),
        ({"ladder": ()}, r"ladder is \(\); it must be ascending positive token counts, or None"),
        ({"ladder": (4, 2)}, r"ladder is \(4, 2\); it must be ascending"),
        ({"ladder": (2, 2)}, r"ladder is \(2, 2\); it must be ascending"),
        ({"ladder": (0, 4)}, r"ladder is \(0, 4\); it must be ascending positive"),
    ],
)
def test_a_plan_that_cannot_run_is_refused_by_field(fields, complaint):
    with pytest.raises(ValueError, match=complaint):
        DecodePlan(**({"target": DenseTarget(CONFIG), "drafter": DRAFTER, "policy": FixedLength(3), "survival": RawSurvival()} | fields))


def test_a_ladder_must_hold_all_requests_with_all_their_drafts():
    plan = DecodePlan(DenseTarget(CONFIG), DRAFTER, FixedLength(3), RawSurvival(), ladder=(2, 8))
    assert plan.buckets(2) == (2, 8)
    with pytest.raises(ValueError, match=r"ladder is \(2, 8\); its last bucket must hold 3 requests x \(1 \+ 3 drafts\) = 12"):
        plan.buckets(3)
    assert dataclasses.replace(plan, ladder=None).buckets(3) == (12,)
    assert DecodePlan(DenseTarget(CONFIG)).buckets(3) == (3,)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"vocab_size": 0}, "vocab_size is 0; it must be at least 1"),
        ({"num_layers": 0}, "num_layers is 0; it must be at least 1"),
        ({"num_heads": 3}, r"num_heads is 3; it must be a multiple of num_kv_heads \(2\)"),
    ],
)
def test_a_dense_config_that_cannot_be_is_refused_by_field(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(CONFIG, **changes)


@pytest.mark.parametrize("taps", [(2,), (0, -2)])
def test_a_tap_outside_the_target_is_refused(taps):
    """[D1] -1 is the embedding output, and the last layer is num_layers - 1; nothing wraps around."""
    target = DenseTarget(CONFIG)
    one = jnp.zeros((1, 1), jnp.int32)
    tokens = FlatTokens.grid(one, one[0], one[0] + 1)
    with pytest.raises(ValueError, match=r"taps is .*; each must be in -1\.\.1 for a target of 2 layers"):
        target.forward({}, None, tokens, taps)


def test_a_pass_without_a_cache_takes_a_grid():
    target = DenseTarget(CONFIG)
    one = jnp.zeros((1,), jnp.int32)
    tokens = FlatTokens(ids=one, row=one, slot=one, position=one, valid=one == 0, queries_per_row=1)
    with pytest.raises(ValueError, match="cache is None; a forward pass without a cache takes a grid of tokens"):
        target.forward(jax.tree.map(lambda leaf: jnp.zeros(leaf.shape), target.abstract_params()), None, tokens, ())


@pytest.mark.parametrize("sizes", [{}, {"data": 3}, {"data": 2, "fsdp": 2}, {"tensor": 0}, {"data": -2, "fsdp": -2, "tensor": 2}])
def test_a_mesh_that_does_not_fit_the_devices_is_refused(sizes):
    with pytest.raises(ValueError, match="mesh data x fsdp x tensor = .* does not fit 8 devices: the product must equal it"):
        make_mesh(**sizes)


def test_a_logical_axis_without_a_rule_is_refused():
    import flax.linen as nn

    class Odd(Initialised):
        def boxed_params(self):
            return {"weight": nn.LogicallyPartitioned(jax.ShapeDtypeStruct((8, 8), jnp.float32), ("embed", "sideways"))}

    with pytest.raises(ValueError, match="logical axis 'sideways' has no rule; known axes: batch, embed, "):
        parameter_shardings(make_mesh(tensor=8), Odd())


def test_stop_ids_are_one_list_for_all_or_one_per_request():
    def stop_ids(given) -> list[list[int]]:
        return start(PLAIN, PARAMS, [[1], [2]], max_new_tokens=4, stop_ids=given).stop_ids.tolist()

    assert stop_ids([[3, 4], [0]]) == [[3, 4], [0, NO_STOP]]
    assert stop_ids([3]) == [[3], [3]]
    assert stop_ids([]) == [[NO_STOP], [NO_STOP]]
    with pytest.raises(ValueError, match="stop_ids has 1 lists"):
        stop_ids([[3]])
    with pytest.raises(ValueError, match="stop_ids holds -1"):
        stop_ids([[3], [-1]])
