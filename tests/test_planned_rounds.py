"""Rounds whose drafter runs only when the planner says so: nothing that it has to know is lost, and no token changes."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import struct

from dspark_jax.calibrate import RawSurvival
from dspark_jax.calibration_online import OnlineCalibration
from dspark_jax.decode import DecodeParams, DecodePlan, answers, generate, step
from dspark_jax.prefill import start
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import DraftPlanner, FixedLength, StepCurve, SurvivalThreshold
from dspark_jax.targets.toy import ToyTarget
from tests.toy_drafter import BLOCK, VOCAB, ToyDrafter

ROWS = 4
# Verifying costs little here and drafting half a step: it pays where about every second request or more may expect something of it.
CURVE = StepCurve(tokens=(15, 16), seconds_per_step=(1.0, 1.1), draft_seconds=0.5)
# The last drafted round alone counts.
PLANNER = DraftPlanner(CURVE, (0.5, 0.25, 0.125), probe_share=0.3, memory=1)


@struct.dataclass
class Told:
    """What the drafter was told: the id at every position and the one behind it, and how many positions."""

    ids: Any
    next_ids: Any
    length: Any


@dataclasses.dataclass(frozen=True)
class RecordingDrafter(ToyDrafter):
    """Writes down every commit. Its confidence depends on the text: it is high behind even positions and low behind odd ones."""

    def init_state(self, num_rows, max_len, *, writes_per_pass=None, dtype=jnp.float32):
        nothing = jnp.full((2, num_rows, max_len), -1, jnp.int32)
        return Told(nothing[0], nothing[1], jnp.zeros((num_rows,), jnp.int32))

    def commit(self, params, head, state, committed):
        num_rows, count = committed.next_ids.shape
        place = state.length[:, None] + jnp.arange(count, dtype=jnp.int32)
        place = jnp.where(jnp.arange(count) < committed.count[:, None], place, state.ids.shape[1])
        at = (jnp.arange(num_rows)[:, None], place)
        own = jnp.argmax(committed.features, axis=2).astype(jnp.int32)
        return Told(
            state.ids.at[at].set(own, mode="drop"),
            state.next_ids.at[at].set(committed.next_ids, mode="drop"),
            state.length + committed.count,
        )

    def propose(self, params, head, state, anchor, noise, sampling):
        block = super().propose(params, head, state, anchor, noise, sampling)
        high = ((state.length + state.next_ids[jnp.arange(anchor.shape[0]), state.length - 1]) % 2 == 0)[:, None]
        return dataclasses.replace(block, confidence_logits=jnp.where(high, 3.0, -3.0) * jnp.ones((1, self.block_size)))


def _plan(**changes: Any) -> tuple[DecodePlan, DecodeParams]:
    target = ToyTarget(VOCAB)
    params = {"table": 2 * jax.random.normal(jax.random.key(0), (2, VOCAB, VOCAB))}
    drafts = {"table": params["table"] + jax.random.normal(jax.random.key(1), (2, VOCAB, VOCAB))}
    settings: dict[str, Any] = {"planner": PLANNER, "ladder": (2, 5, 16)} | changes
    plan = DecodePlan(target, RecordingDrafter(), settings.pop("policy", SurvivalThreshold(0.4)), RawSurvival(), **settings)
    return plan, DecodeParams.of(target, params, drafts)


def _begin(plan: DecodePlan, params: DecodeParams, temperature: float = 0.0, **settings: Any):
    prompts = [[1], [2, 3, 4], [0, 1], [3]]
    merged: Any = {"max_new_tokens": [60, 45, 33, 60], "max_len": 70, "seed": 3, "sampling": Sampling.make(ROWS, temperature)} | settings
    return start(plan, params, prompts, **merged)


@pytest.fixture(scope="module")
def run():
    """A greedy run round by round: the state behind every round, and its statistics."""
    plan, params = _plan()
    state = _begin(plan, params)
    rounds = []
    while not bool(state.finished.all()):
        state, stats = step(plan, params, state)
        rounds.append(jax.tree.map(np.asarray, (state, stats)))
        assert len(rounds) < 100
    return plan, params, rounds


def test_what_the_drafter_was_told_and_what_waits_is_the_text(run):
    """[C1] [C3] Every committed position once and in order, its own token and the next, whatever was drafted, deferred or flushed."""
    _, _, rounds = run
    longest = 0
    for state, _ in rounds:
        told, deferred = state.drafter_state, state.deferred
        for row in range(ROWS):
            waiting = int(deferred.count[row])
            longest = max(longest, waiting)
            own = [*told.ids[row, : told.length[row]], *deferred.features[row, :waiting].argmax(axis=1)]
            following = [*told.next_ids[row, : told.length[row]], *deferred.next_ids[row, :waiting]]
            assert own == state.ids[row, : state.length[row] - 1].tolist()
            assert following == state.ids[row, 1 : state.length[row]].tolist()
    assert longest == BLOCK, "the buffer of a round was in use up to the entry that flushes it"


def test_without_drafts_a_round_is_one_of_plain_decoding(run):
    """Nothing drafted, nothing verified, a token each; behind it the drafter is told before it runs again."""
    _, _, rounds = run
    ran = [bool(stats.drafted) for _, stats in rounds]
    assert 10 < sum(ran) < len(ran) - 10
    for state, stats in rounds:
        if stats.drafted:
            assert not state.deferred.count.any()
        else:
            assert not stats.verified.any() and not stats.drafts.any() and not stats.probe.any()
            assert np.array_equal(stats.emitted, stats.active.astype(np.int32))


def test_a_probe_is_verified_in_full_whatever_its_confidence(run):
    """[F3] One live request of a drafted round; its budget alone makes it shorter."""
    _, _, rounds = run
    seen = 0
    for before, (_, stats) in zip([None, *(state for state, _ in rounds)], rounds, strict=False):
        for row in np.flatnonzero(stats.probe):
            assert stats.drafted and stats.active[row] and stats.probe.sum() == 1
            room = BLOCK if before is None else before.limit[row] - before.length[row] - 1
            assert stats.verified[row] == min(BLOCK, room)
            seen += 1
    assert seen > 3


def test_greedy_text_is_that_of_plain_decoding_and_of_the_compiled_loop(run):
    """[B1] [F4] [F6]"""
    plan, params, rounds = run
    plain = DecodePlan(plan.target)
    alone = answers(generate(plain, params, dataclasses.replace(_begin(plain, params), drafter_state=None))[0])
    assert answers(rounds[-1][0]) == alone
    finished, tally = generate(plan, params, _begin(plan, params))
    assert answers(finished) == alone
    assert int(tally.rounds.sum()) == sum(int(stats.active.sum()) for _, stats in rounds)


def test_where_drafting_never_pays_it_is_plain_decoding_and_always_where_it_always_does():
    plan, params = _plan(policy=FixedLength(BLOCK))
    for seconds, ran in ((1e6, False), (0.0, True)):
        planner = dataclasses.replace(PLANNER, curve=dataclasses.replace(CURVE, draft_seconds=seconds), probe_share=0.0)
        state = _begin(plan, params, temperature=1.0)
        planned = dataclasses.replace(plan, planner=planner)
        for _ in range(6):
            state, stats = step(planned, params, state)
            assert bool(stats.drafted) == ran and np.array_equal(np.asarray(stats.verified), [BLOCK * ran] * ROWS)


def test_a_calibration_in_the_state_learns_from_the_rounds_and_schedules_them():
    """From past rounds alone: what it says in a round is what the rounds before have taught, and the policy follows it."""
    plan, params = _plan(planner=dataclasses.replace(PLANNER, curve=dataclasses.replace(CURVE, draft_seconds=0.0)))
    calibration = OnlineCalibration.create(RawSurvival(), [[0.5] * BLOCK], half_life=50.0, prior_rounds=1.0)
    state = _begin(plan, params, temperature=1.0, calibration=calibration)
    for _ in range(15):
        temperature = jnp.ones(ROWS)
        known, limit, length = calibration, np.asarray(state.limit), np.asarray(state.length)
        state, stats = step(plan, params, state)
        bins = (np.asarray(stats.confidence_logits)[:, :, None] >= np.asarray(known.edges)).sum(axis=2)
        survival = np.cumprod(np.asarray(known.conditional)[0][np.arange(BLOCK), bins], axis=1)
        lengths = np.where(np.asarray(stats.probe), BLOCK, (survival >= np.float32(0.4)).cumprod(axis=1).sum(axis=1))
        lengths = np.where(np.asarray(stats.active), np.minimum(lengths, limit - length - 1), 0)
        assert np.array_equal(np.asarray(stats.verified), lengths)
        calibration = known.update(
            stats.confidence_logits, stats.verified, stats.num_accepted, stats.active, temperature, stats.probe, stats.emitted
        )
        for ours, theirs in zip(jax.tree.leaves(state.calibration), jax.tree.leaves(calibration), strict=True):
            np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-6)
    assert float(calibration.reached.sum()) > 30


def test_a_probe_takes_what_the_others_leave_of_a_bucket_that_the_caller_chose():
    """[F2] Four requests with a draft each are eight tokens; in a bucket of nine, the probe has one more."""
    plan, params = _plan(policy=FixedLength(1), planner=dataclasses.replace(PLANNER, probe_share=1.0))
    _, stats = step(plan, params, _begin(plan, params), 9)
    assert bool(stats.drafted) and np.array_equal(np.asarray(stats.verified), 1 + np.asarray(stats.probe))


def test_bad_plans_are_refused():
    with pytest.raises(ValueError, match="drafter is None; a plan with a planner needs one"):
        DecodePlan(ToyTarget(VOCAB), planner=PLANNER)
    with pytest.raises(ValueError, match="planner has 2 constants; allowed is one per draft, of which there are 3"):
        _plan(planner=dataclasses.replace(PLANNER, constants=(0.5, 0.25)))
    plan, params = _plan()
    unplanned = _begin(dataclasses.replace(plan, planner=None), params)
    with pytest.raises(ValueError, match="draft_history or deferred is None"):
        step(plan, params, unplanned)
