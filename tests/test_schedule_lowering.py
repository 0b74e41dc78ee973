"""All that decides on a round lowers for TPU and CUDA at 256 requests and 7 drafts; nothing is compiled or run."""

import jax
import jax.numpy as jnp
import pytest

from dspark_jax.prefix_ranking import best_prefix
from dspark_jax.protocols import StatefulPolicy
from dspark_jax.schedule import DraftPlanner, Oracle, StepCurve, choose_capacity
from experiments.schedule_cost import policies_by
from experiments.step_curves import RoundCosts

R, G = 256, 7
TOKENS = (256, 512, 1024, 2048)
CONTINUATION = (0.8, 0.7, 0.6, 0.6, 0.5, 0.5, 0.4)
CONSTANTS = (0.8, 0.7, 0.6, 0.5, 0.4, 0.3, 0.2)
# Several contexts: costs are then interpolated on the device.
CURVE = StepCurve(TOKENS, (1.0, 1.2, 1.6, 2.4), 0.3, 128, ((512, (1.5, 1.7, 2.1, 2.9)),))
UNDRAFTED = StepCurve((R,), (0.8,), 0.01)
SURVIVAL = jax.ShapeDtypeStruct((R, G), jnp.float32)
ACTIVE, INTEGERS, SEED = (jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in (((R,), bool), ((R,), jnp.int32), ((2,), jnp.uint32)))
ASKED = (SURVIVAL, ACTIVE, INTEGERS, INTEGERS)
POLICIES = {**policies_by(RoundCosts(R, CURVE, UNDRAFTED, 0.0), CONTINUATION), "oracle": Oracle(CURVE)}
RANKS = {"Algorithm 1", "capacity + top-K", "oracle"}


def _lowered(function, *arguments) -> list[str]:
    traced = jax.jit(function).trace(*arguments)
    return [traced.lower(lowering_platforms=(platform,)).as_text() for platform in ("tpu", "cuda")]


@pytest.mark.parametrize("name", POLICIES)
def test_every_policy_lowers_for_accelerators(name):
    """One program for the device alone, with a sort where the drafts of all requests are ranked."""
    policy = POLICIES[name]
    if isinstance(policy, StatefulPolicy):
        texts = _lowered(policy.next_lengths, policy.init_state(R, G), *ASKED)
    else:
        texts = _lowered(policy.lengths, *ASKED)
    for text in texts:
        assert "stablehlo.sort" in text or name not in RANKS
        assert "custom_call" not in text, "no call into a host library"


def test_the_draft_planner_lowers_for_accelerators():
    planner = DraftPlanner(CURVE, CONSTANTS, undrafted=UNDRAFTED)
    history = planner.init_history(R)
    length = jax.ShapeDtypeStruct((), jnp.int32)
    texts = _lowered(planner.plan, history, ACTIVE, INTEGERS, INTEGERS, SEED)
    assert all("stablehlo.sort" in text for text in texts)
    texts += _lowered(planner.observe, history, SURVIVAL, length, ACTIVE, INTEGERS)
    assert not any("custom_call" in text for text in texts)


def test_the_functions_under_the_policies_lower_for_accelerators():
    rates = jax.ShapeDtypeStruct((R * (G + 1) + 1,), jnp.float32)

    def capacity(survival, ids, active, request_id, context):
        return choose_capacity(survival, ids, active, request_id, CURVE, CONSTANTS, context)

    for texts in (_lowered(best_prefix, SURVIVAL, ACTIVE, rates, INTEGERS), _lowered(capacity, SURVIVAL, INTEGERS, *ASKED[1:3], INTEGERS)):
        assert all("stablehlo.sort" in text for text in texts)
