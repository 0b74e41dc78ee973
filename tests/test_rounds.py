"""Rounds of models small enough to know everything about: what they run, what they count, and the law of what they write."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.stats import chi2, ncx2

from dspark_jax import block_verify, verify
from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams, DecodePlan, RoundStats, Tally, answers, decode_round, generate, step
from dspark_jax.exactness import law_of_logits
from dspark_jax.prefill import start
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import CapacityTopK, DraftPlanner, StepCurve
from dspark_jax.targets.toy import ToyTarget
from pallas_kernels import noise
from pallas_kernels.noise import Stream
from pallas_kernels.rejection_sample import rejection_sample
from pallas_kernels.two_level_draw import draw
from tests.toy_drafter import BLOCK, VOCAB, ToyDrafter

LADDER = (2, 5, 16)


@dataclasses.dataclass(frozen=True)
class CycledLengths:
    """0 to G drafts, by the request's id and the length of its text: known before the round."""

    def lengths(self, survival, active, context, request_id):
        return jnp.where(active, (request_id + context) % (survival.shape[1] + 1), 0)


class CountingTarget:
    """A target that reports every pass: the tokens it ran on, and how many of them were real."""

    def __init__(self, target):
        self._target, self.spec, self.passes = target, target.spec, []

    def __getattr__(self, name):
        return getattr(self._target, name)

    def forward(self, params, cache, tokens, taps):
        num_tokens = tokens.ids.shape[0]
        jax.debug.callback(lambda valid: self.passes.append((num_tokens, int(valid))), tokens.valid.sum())
        return self._target.forward(params, cache, tokens, taps)


def _toy(seed=0, target=None):
    target = ToyTarget(VOCAB) if target is None else target
    keys = jax.random.split(jax.random.key(seed))
    params = {"table": jax.random.normal(keys[0], (2, VOCAB, VOCAB))}
    drafts = {"table": params["table"] + 0.7 * jax.random.normal(keys[1], (2, VOCAB, VOCAB))}
    plan = DecodePlan(target, ToyDrafter(), CycledLengths(), RawSurvival(), ladder=LADDER)
    return plan, DecodeParams.of(target, params, drafts)


SETTINGS: Any = {
    "prompts": [[1], [2, 3, 4], [0, 1], [3]],
    "max_new_tokens": [30, 6, 13, 1],
    "max_len": 40,
    "stop_ids": (),
    "seed": 5,
}


def _begin(plan, params, **changes):
    settings: Any = SETTINGS | {"sampling": Sampling.make(4, [1.0, 0.0, 0.7, 1.0], [0, 0, 3, 0])} | changes
    prompts = settings.pop("prompts")
    return start(plan, params, prompts, **settings)


def _host(stats):
    return jax.tree.map(np.asarray, stats)


@pytest.fixture(scope="module")
def counted():
    """A whole run step by step: the plan, its parameters, the passes of the target, states' lengths, and every round's statistics."""
    target = CountingTarget(ToyTarget(VOCAB))
    plan, params = _toy(target=target)
    state = _begin(plan, params)
    jax.effects_barrier()
    target.passes.clear()
    lengths, rounds = [np.asarray(state.length)], []
    while not bool(state.finished.all()):
        state, stats = step(plan, params, state)
        rounds.append(_host(stats))
        lengths.append(np.asarray(state.length))
        assert len(rounds) < 40
    written = answers(state)
    before = jax.tree.map(np.asarray, state)
    state, stats = step(plan, params, state)
    jax.effects_barrier()
    return {
        "plan": plan,
        "params": params,
        "passes": list(target.passes),
        "lengths": lengths,
        "rounds": rounds,
        "answers": written,
        "idle": (before, jax.tree.map(np.asarray, state), _host(stats)),
    }


def test_the_target_runs_on_the_scheduled_tokens_up_to_their_bucket(counted):
    """[F2] Every pass has sum(1 + length) real tokens in the smallest bucket that holds them; the idle pass has none."""
    expected = []
    for stats in (*counted["rounds"], counted["idle"][2]):
        needed = int(np.where(stats.active, 1 + stats.verified, 0).sum())
        expected.append((min(bucket for bucket in LADDER if bucket >= needed), needed))
    assert counted["passes"] == expected
    assert {bucket for bucket, _ in expected} == set(LADDER), "every bucket was in use"


def test_every_active_request_advances_and_a_budget_is_never_overrun(counted):
    """[F6] Also with no draft verified; and no draft is verified that the budget would cut off."""
    limits = np.array([31, 9, 15, 2])
    for before, after, stats in zip(counted["lengths"][:-1], counted["lengths"][1:], counted["rounds"], strict=True):
        np.testing.assert_array_equal(after - before, stats.emitted)
        assert np.all((stats.emitted >= 1) == stats.active)
        assert np.all(after <= limits)
        assert np.all(stats.verified[stats.active] <= (limits - before - 1)[stats.active])
        assert not stats.cut.any()
    assert any((stats.active & (stats.verified == 0)).any() for stats in counted["rounds"])
    assert [len(answer) for answer in counted["answers"]] == SETTINGS["max_new_tokens"]


def test_one_live_request_and_none_at_all_run(counted):
    """[F4] Requests end one after another; a round of a batch that is finished changes nothing."""
    assert [int(stats.active.sum()) for stats in counted["rounds"]][-1] == 1
    before, after, stats = counted["idle"]
    assert not stats.active.any() and stats.emitted.tolist() == stats.verified.tolist() == [0] * 4
    for left, right in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(left, right)


def test_a_bucket_that_the_caller_chose_gives_what_the_ladder_gives(counted):
    """[B2] The largest bucket for every round, and no ladder at all."""
    plan, params = _toy()
    state = _begin(plan, params)
    for stats in counted["rounds"]:
        state, ours = step(plan, params, state, LADDER[-1])
        assert bool(ours.drafted) and bool(stats.drafted)
        rows = [jax.tree.leaves(dataclasses.replace(_host(each), drafted=None)) for each in (ours, stats)]
        for left, right in zip(*rows, strict=True):
            np.testing.assert_array_equal(left[stats.active], right[stats.active])
    assert answers(state) == counted["answers"]


def test_the_compiled_loop_is_its_steps_and_tallies_them(counted):
    """`generate` on the device equals steps from the host; accepted length and conditional acceptance by a recount."""
    plan, params = _toy()
    stop = counted["answers"][0][9]
    state, tally = generate(plan, params, _begin(plan, params))
    assert answers(state) == counted["answers"]
    tally = jax.tree.map(np.asarray, tally)
    for row in range(4):
        mine = [stats for stats in counted["rounds"] if stats.active[row]]
        assert tally.rounds[row] == len(mine) and tally.cut_rounds[row] == tally.cut_emitted[row] == 0
        assert tally.emitted[row] == SETTINGS["max_new_tokens"][row] - 1
        assert tally.verified[row] == sum(stats.verified[row] for stats in mine)
        for k in range(BLOCK):
            reached = [stats for stats in mine if stats.verified[row] > k and stats.num_accepted[row] >= k]
            assert tally.reached[row, k] == len(reached)
            assert tally.accepted[row, k] == sum(stats.num_accepted[row] > k for stats in reached)
    # A stop token cuts the answer behind its first occurrence, and a round that it shortens is counted apart.
    state, tally = generate(plan, params, _begin(plan, params, stop_ids=(stop,)))
    for row, (ours, whole) in enumerate(zip(answers(state), counted["answers"], strict=True)):
        end = whole.index(stop) + 1 if stop in whole else len(whole)
        assert ours == whole[:end]
        assert int(tally.emitted[row] + tally.cut_emitted[row]) == end - 1 and int(tally.cut_rounds[row]) <= 1


def test_rounds_that_a_stop_token_shortens_are_counted_apart():
    """A round of two requests: four tokens in full, and one of four."""
    row = jnp.array([True, True])
    stats = RoundStats(
        active=row,
        anchor=jnp.zeros(2, jnp.int32),
        drafts=jnp.zeros((2, 3), jnp.int32),
        confidence_logits=jnp.zeros((2, 3)),
        verified=jnp.array([3, 3], jnp.int32),
        num_accepted=jnp.array([2, 3], jnp.int32),
        next_id=jnp.zeros(2, jnp.int32),
        emitted=jnp.array([3, 1], jnp.int32),
        cut=jnp.array([False, True]),
        probe=jnp.array([False, False]),
        drafted=jnp.bool_(True),
    )
    tally = jax.tree.map(np.asarray, Tally.zeros(2, 3).add(stats))
    assert tally.rounds.tolist() == [1, 0] and tally.emitted.tolist() == [3, 0]
    assert tally.cut_rounds.tolist() == [0, 1] and tally.cut_emitted.tolist() == [0, 1]
    assert tally.reached.tolist() == [[1, 1, 1], [0, 0, 0]] and tally.accepted.tolist() == [[1, 1, 0], [0, 0, 0]]


@pytest.mark.parametrize("verifier", ["token", "block"])
def test_a_policy_that_remembers_keeps_its_bucket_and_changes_no_greedy_token(verifier):
    """[F3] Capacity from rounds up to t - 2 bounds what a round verifies; its memory travels in the state, through the compiled loop.

    Greedy requests of one batch, by the whole loop and by steps, against plain decoding.
    """
    plan, params = _toy(seed=1)
    curve = StepCurve(tokens=LADDER, seconds_per_step=(1.0, 1.1, 1.9), draft_seconds=0.1)
    policy = CapacityTopK(curve, (0.7, 0.5, 0.3))
    remembering = dataclasses.replace(plan, policy=policy, verifier=verifier)

    def begin(plan):
        return _begin(plan, params, sampling=Sampling.make(4))

    finished, _ = generate(remembering, params, begin(remembering))
    plain = DecodePlan(plan.target)
    assert answers(finished) == answers(generate(plain, params, begin(plain))[0])
    state = begin(remembering)
    verified = []
    while not bool(state.finished.all()):
        active = ~state.finished
        capacity = int(policy.capacity(state.policy_state, active, state.length, state.request_id))
        state, stats = step(remembering, params, state)
        used = int((stats.verified + 1)[stats.active].sum())
        assert used <= capacity
        verified.append(used)
    assert answers(state) == answers(finished) and len(set(verified)) > 1
    assert state.policy_state.request_id.shape == (2, 4)


def test_an_unknown_verifier_is_refused_by_name():
    with pytest.raises(ValueError, match="verifier is 'oracle'; allowed: token, block"):
        DecodePlan(ToyTarget(VOCAB), verifier="oracle")  # pyright: ignore[reportArgumentType]


# --- the law of a million rounds

REQUESTS = 10_000
TOP_P = 0.8


def _simulate(plan, params, num_rounds):
    """Transitions (filtered?, slot in the round, parity of the position, token before, token) of many requests, counted."""
    half = REQUESTS // 2
    sampling = Sampling.make(REQUESTS, 1.0, 0, [1.0] * half + [TOP_P] * (REQUESTS - half))
    prompts = [[row % VOCAB] for row in range(REQUESTS)]
    state = start(plan, params, prompts, max_new_tokens=num_rounds * (BLOCK + 1) + 1, sampling=sampling, seed=2024)
    begin = np.asarray(state.length)

    @jax.jit
    def run(state):
        return jax.lax.scan(lambda state, _: decode_round(plan, params, state, REQUESTS * (BLOCK + 1)), state, None, length=num_rounds)[1]

    stats = _host(run(state))
    assert stats.active.all() and not stats.cut.any()
    slot = np.arange(BLOCK + 1)
    emitted = np.concatenate([stats.drafts, np.zeros_like(stats.drafts[..., :1])], axis=-1)
    emitted = np.where(slot == stats.num_accepted[..., None], stats.next_id[..., None], emitted)
    before = np.concatenate([stats.anchor[..., None], emitted[..., :-1]], axis=-1)
    anchor_position = begin - 1 + np.cumsum(stats.emitted, axis=0) - stats.emitted
    parity = (anchor_position[..., None] + slot) % 2
    real = slot < stats.emitted[..., None]
    filtered = np.broadcast_to((np.arange(REQUESTS) >= half)[None, :, None], real.shape)
    shape = (2, BLOCK + 1, 2, VOCAB, VOCAB)
    columns = (filtered, np.broadcast_to(slot, real.shape), parity, before, emitted)
    flat = np.ravel_multi_index(tuple(column[real].astype(np.int64) for column in columns), shape)
    return np.bincount(flat, minlength=int(np.prod(shape))).reshape(shape)


def _laws(params):
    """[filtered, parity, token before, token]: the target's conditionals, in closed form."""
    table = np.asarray(params.target["table"])
    return np.array([[[law_of_logits(row, 1.0, 0, top_p) for row in rows] for rows in table] for top_p in (1.0, TOP_P)])


def _statistic(counts, laws):
    """Pearson's statistic of every conditional at every slot, and its degrees of freedom. Nothing impossible may have come out."""
    law = np.broadcast_to(laws[:, None], counts.shape)
    total = np.broadcast_to(counts.sum(-1, keepdims=True), counts.shape)
    assert counts[law == 0].sum() == 0, "[A5] only what the filter keeps comes out"
    seen = (law > 0) & (total > 0)
    value = float((((counts - total * law) ** 2)[seen] / (total * law)[seen]).sum())
    return value, int(seen.sum() - (total[..., 0] > 0).sum())


def _two_small_tiles(monkeypatch):
    """Draws of the residual streams go through three tiles of two ids as well."""
    monkeypatch.setattr(verify, "rejection_sample", functools.partial(rejection_sample, tile_size=2))
    monkeypatch.setattr(block_verify, "draw", functools.partial(draw, tile_size=2))


def _shifted(laws, total_variation):
    """The laws with that much mass moved from each one's likeliest token to its next."""
    moved = laws.copy()
    order = laws.argsort(-1)
    np.put_along_axis(moved, order[..., -1:], np.take_along_axis(laws, order[..., -1:], -1) - total_variation, -1)
    np.put_along_axis(moved, order[..., -2:-1], np.take_along_axis(laws, order[..., -2:-1], -1) + total_variation, -1)
    return moved


# Of ten thousand requests only a probe is drafted for, or everybody: the draft length is one for the batch.
PLANNER = DraftPlanner(StepCurve((1, 10**6), (1.0, 2.0)), (0.0,) * BLOCK, probe_share=0.5)


@pytest.mark.parametrize(
    ("verifier", "planner", "backend"),
    [
        ("token", None, "xla"),
        *(
            pytest.param(*case, marks=pytest.mark.slow)
            for case in (
                ("block", None, "xla"),
                ("token", PLANNER, "xla"),
                ("token", None, "interpret"),
                ("token", None, "interpret_triton"),
            )
        ),
    ],
)
def test_a_million_rounds_follow_the_target_s_law(monkeypatch, verifier, planner, backend):
    """[A1] [A2] [A5] 10,000 requests x 100 rounds through `decode_round`, half of them with top-p, 0 to 3 drafts verified.

    Each token's law given the token before it, its position and its slot in the round is the target's (filtered) one: Pearson's
    test at a level of 1e-4. Moving 0.004 of the mass of every such law would be seen with a chance above 0.999.
    """
    _two_small_tiles(monkeypatch)
    plan, params = _toy(seed=3)
    plan = dataclasses.replace(plan, verifier=verifier, planner=planner, backend=backend)
    counts, laws = _simulate(plan, params, 100), _laws(params)
    assert counts.sum() > 1_000_000 and counts.sum((0, 2, 3, 4)).min() > 20_000
    value, freedom = _statistic(counts, laws)
    threshold = chi2.isf(1e-4, freedom)
    assert value < threshold, f"{value:.0f} against {threshold:.0f} with {freedom} degrees of freedom"
    law, other = (np.broadcast_to(each[:, None], counts.shape) for each in (laws, _shifted(laws, 0.004)))
    possible = law > 0
    noncentrality = float((counts.sum(-1, keepdims=True) * (other - law) ** 2 / np.where(possible, law, 1))[possible].sum())
    assert ncx2.sf(threshold, freedom, noncentrality) > 0.999


def test_shared_random_bits_are_seen_by_the_same_test(monkeypatch):
    """[A2] A test of the test: acceptance on the bits that drew the draft is caught in 200,000 rounds."""
    _two_small_tiles(monkeypatch)
    original = noise.site_key

    def shared_bits(key, stream, place):
        return original(key, Stream.DRAFT_ID if stream is Stream.ACCEPT else stream, place)

    monkeypatch.setattr(noise, "site_key", shared_bits)
    plan, params = _toy(seed=3)
    value, freedom = _statistic(_simulate(plan, params, 20), _laws(params))
    assert value > 2 * chi2.isf(1e-4, freedom)
