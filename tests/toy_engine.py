"""An engine on models small enough to know everything about; its programs are compiled once for all tests of a module."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, answers, generate
from dspark_jax.engine_config import EngineConfig
from dspark_jax.engine_core import EngineCore
from dspark_jax.prefill import start
from dspark_jax.round_plans import round_plans
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.slot_executor import BatchShape
from dspark_jax.slots import DeviceSlots
from dspark_jax.targets.toy import ToyTarget
from tests.toy_drafter import VOCAB, ToyDrafter

SLOTS = 48
CONFIG = EngineConfig(row_ladder=(2, 6), slot_ladder=(16, SLOTS), prefill_chunk=4, num_stop_ids=2, shrink_after=3, queue_limit=4000)


@dataclasses.dataclass(frozen=True)
class ConfidentDrafter(ToyDrafter):
    """Its confidence in draft k depends on the token before it; where `leaks`, on the draft itself, which no policy may see."""

    leaks: bool = False

    def propose(self, params, head, state, anchor, noise, sampling):
        block = super().propose(params, head, state, anchor, noise, sampling)
        before = jnp.concatenate([anchor[:, None], block.ids[:, :-1]], axis=1)
        told = block.ids if self.leaks else before
        return dataclasses.replace(block, confidence_logits=4.0 * (told.astype(jnp.float32) - 2.0))


def toy_params(seed: int = 0) -> tuple[ToyTarget, DecodeParams]:
    """A target, and a drafter that comes near it."""
    keys = jax.random.split(jax.random.key(seed))
    table = jax.random.normal(keys[0], (2, VOCAB, VOCAB))
    target = ToyTarget(VOCAB)
    return target, DecodeParams.of(target, {"table": table}, {"table": table + 0.7 * jax.random.normal(keys[1], (2, VOCAB, VOCAB))})


class ToyServing:
    """Compiled programs of one policy, and engines that use them one after another."""

    def __init__(self, policy, drafter=None, config=CONFIG, curve=None, calibration=None, **options):
        self.target, self.params = toy_params()
        self.drafter, self.policy, self.config = ConfidentDrafter() if drafter is None else drafter, policy, config
        self.plans = round_plans(
            self.target, self.drafter, config.row_ladder, policy=policy, curve=curve, survival=RawSurvival(), **options
        )
        self.slots = DeviceSlots(
            {rows: each.plan for rows, each in self.plans.items()},
            self.params,
            config.slot_ladder,
            chunk=config.prefill_chunk,
            num_stop_ids=config.num_stop_ids,
            calibration=calibration,
        )
        for _ in self.slots.compile_all():
            pass

    def engine(self, slots: Any = None, tokenizer=None, clock=None, **changes) -> Any:
        """A fresh engine on the compiled programs; `slots` may wrap them."""
        config = dataclasses.replace(self.config, **changes)
        slots = self.slots if slots is None else slots
        slots.reset(BatchShape(config.row_ladder[0], config.slot_ladder[0]))
        return EngineCore(slots, self.plans, config, tokenizer, **({} if clock is None else {"clock": clock}))

    def alone(self, prompt, options, request_id: int = 0) -> tuple[int, ...]:
        """What `generate` answers to a request by itself."""
        drafter = ConfidentDrafter() if isinstance(self.drafter, dict) else self.drafter
        plan = DecodePlan(self.target, drafter, self.policy or FixedLength(2), RawSurvival())
        state = start(
            plan,
            self.params,
            [prompt],
            max_new_tokens=options.max_new_tokens,
            sampling=Sampling.make(1, options.temperature, options.top_k, options.top_p),
            stop_ids=() if options.stop_ids is None else options.stop_ids,
            seed=self.config.seed if options.seed is None else options.seed,
            request_ids=[request_id if options.seed is None else 0],
            max_len=SLOTS,
            prefill_chunk=self.config.prefill_chunk,
        )
        return tuple(answers(generate(plan, self.params, state)[0])[0])


def run_until_idle(engine: EngineCore, most_steps: int = 100_000) -> None:
    """Step until nobody waits for anything."""
    for _ in range(most_steps):
        if not engine.step():
            return
    raise AssertionError(f"the engine is not idle after {most_steps} steps")
