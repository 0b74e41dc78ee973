"""The output law of rounds, enumerated: equal to the target's to 1e-6, and unequal for every policy that looks ahead."""

import dataclasses
import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.block_verify import block_outcome_probs
from dspark_jax.exactness import DraftLaw, Text, law_of_logits, law_of_rounds
from dspark_jax.schedule import (
    CapacityState,
    CapacityTopK,
    ConfidenceThreshold,
    DraftHistory,
    DraftPlanner,
    FixedLength,
    ForecastStop,
    Oracle,
    PrefixSchedule,
    StepCurve,
    SurvivalThreshold,
    admit_top_k,
)
from dspark_jax.verify import outcome_probs
from pallas_kernels.noise import seed_key

LOSSLESS = 1e-6
CURVE = StepCurve(tokens=(1, 2, 4, 6), seconds_per_step=(1.0, 1.3, 1.5, 2.4))
POLICIES = {
    "plain": FixedLength(0),
    "fixed": FixedLength(1),
    "full": FixedLength(3),
    "threshold": ConfidenceThreshold(0.5),
    "survival": SurvivalThreshold(0.4),
    "algorithm_1": PrefixSchedule(CURVE),
    "forecast": ForecastStop(CURVE, (0.6, 0.6)),
}

VERIFIERS = {"tokens": outcome_probs, "block": block_outcome_probs}
both_verifiers = pytest.mark.parametrize("verifier", VERIFIERS.values(), ids=VERIFIERS)
OUTCOMES = jax.jit(outcome_probs)


def _random(seed: int, *key) -> np.random.Generator:
    """Numbers that depend on the text alone, so that a law is a function of its prefix."""
    return np.random.default_rng([seed, *(1 + token for part in key for token in (*part, 99))])


@functools.cache
def _target_logits(vocab_size: int, text: Text) -> np.ndarray:
    return 1.5 * _random(1, text).normal(size=vocab_size)


@functools.cache
def _draft_logits(vocab_size: int, text: Text, drafts: Text) -> np.ndarray:
    return 0.7 * _target_logits(vocab_size, text + drafts) + 0.8 * _random(2, text, drafts).normal(size=vocab_size)


def _softmax(logits: np.ndarray) -> np.ndarray:
    return np.exp(logits - logits.max()) / np.exp(logits - logits.max()).sum()


def _target(vocab_size: int):
    return lambda text: _softmax(_target_logits(vocab_size, text))


def _confidence(text: Text, drafts: Text, k: int) -> float:
    return float(_random(3, text, drafts[:k]).uniform(0.2, 1.0))


def _drafter(vocab_size: int, block_size: int) -> DraftLaw:
    return DraftLaw(block_size, lambda text, drafts: _softmax(_draft_logits(vocab_size, text, drafts)), _confidence)


def _one_hot(logits: np.ndarray) -> np.ndarray:
    return np.eye(len(logits))[int(logits.argmax())]


@pytest.mark.parametrize(("vocab_size", "block_size"), [(2, 1), (3, 2), (5, 3)])
@both_verifiers
@pytest.mark.parametrize("policy", [FixedLength(1), FixedLength(2), FixedLength(3), ConfidenceThreshold(0.5)], ids=str)
def test_one_round_of_one_request_is_lossless(vocab_size, block_size, policy, verifier):
    """[A1] Sampled drafts, all lengths, and a length decided by confidence that does not look."""
    assert law_of_rounds(_target(vocab_size), _drafter(vocab_size, block_size), policy, verifier=verifier).deviation < LOSSLESS


@both_verifiers
@pytest.mark.parametrize("name", POLICIES)
def test_three_rounds_of_one_request_are_lossless(name, verifier):
    report = law_of_rounds(_target(2), _drafter(2, 2), POLICIES[name], num_rounds=3, verifier=verifier)
    assert report.law.shape == (2,) * 9 and abs(report.law.sum() - 1) < LOSSLESS
    assert report.deviation < LOSSLESS


@dataclass(frozen=True)
class _TopK:
    """Top-K of the current round; the capacity comes from earlier rounds, and is given."""

    capacity: int

    def lengths(self, survival, active, context, request_id):
        return admit_top_k(survival, active, request_id, self.capacity)


@both_verifiers
@pytest.mark.parametrize("policy", [*POLICIES.values(), _TopK(3), _TopK(5)], ids=[*POLICIES, "top_1", "top_3"])
def test_the_joint_law_of_two_requests_over_two_rounds_is_the_product_of_both(policy, verifier):
    """[F3] Given the survival of earlier rounds, ranking by the current round keeps requests independent."""
    report = law_of_rounds(_target(2), _drafter(2, 2), policy, num_rounds=2, prompts=((0,), (1,)), verifier=verifier)
    assert report.law.shape == (2,) * 12
    assert report.deviation < LOSSLESS


# One draft pays for itself from a survival of 0.5 on, so that the capacity follows what was seen two rounds before.
CAPACITY = CapacityTopK(StepCurve(tokens=(1, 2, 3, 4, 5, 6), seconds_per_step=(1.0, 1.5, 2.0, 2.5, 3.0, 3.5)), constants=(0.6, 0.2))


@both_verifiers
def test_capacity_from_survival_two_rounds_old_is_lossless_over_three_rounds(verifier):
    """[F3] The state is enumerated along: the third round's capacity depends on the drafts of the first."""
    empty = CAPACITY.init_state(1, 2)
    report = law_of_rounds(_target(2), _drafter(2, 2), CAPACITY, num_rounds=3, verifier=verifier, policy_state=empty)
    assert report.deviation < LOSSLESS
    capacity = jax.jit(CAPACITY.capacity)
    one = (jnp.ones(1, bool), jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32))
    seen = [CapacityState(jnp.full((2, 1, 2), value), jnp.zeros((2, 1), jnp.int32)) for value in (0.2, 0.9)]
    assert int(capacity(seen[0], *one)) < int(capacity(seen[1], *one))


@both_verifiers
def test_capacity_from_given_survival_keeps_two_requests_independent_over_two_rounds(verifier):
    """[F3] The joint law; the second round's capacity is that of other survival than the first's."""
    stale = jnp.array([[[0.9, 0.8], [0.3, 0.2]], [[0.2, 0.1], [0.7, 0.4]]])
    state = CapacityState(stale, jnp.array([[0, 1], [0, 1]], jnp.int32))
    prompts = ((0,), (1,))
    report = law_of_rounds(_target(2), _drafter(2, 2), CAPACITY, 2, prompts, verifier, state)
    assert report.deviation < LOSSLESS


@dataclass(frozen=True)
class _Planned:
    """Drafts as many as the planner says, all of them in probes, and verifies those above a threshold."""

    planner: DraftPlanner

    def init_state(self, num_rows: int, block_size: int) -> DraftHistory:
        return self.planner.init_history(num_rows)

    def next_lengths(self, state, survival, active, context, request_id):
        plan = self.planner.plan(state, active, context, request_id, seed_key(3))
        kept = ConfidenceThreshold(0.5).lengths(survival, active, context, request_id)
        lengths = jnp.where(plan.probe, plan.draft_length, jnp.minimum(kept, plan.draft_length))
        return lengths, self.planner.observe(state, survival, plan.draft_length, active, request_id)


def test_a_draft_length_from_past_rounds_is_lossless():
    """[F3] What is drafted in the third round depends on the confidence seen in the first two, that of discarded drafts included."""
    curve = StepCurve(tokens=(1, 2, 3), seconds_per_step=(1.0, 1.1, 1.2), draft_seconds=0.6)
    policy = _Planned(DraftPlanner(curve, (0.7, 0.3), memory=3, foreign=0.5, probe_share=0.3))
    report = law_of_rounds(_target(2), _drafter(2, 2), policy, num_rounds=3, policy_state=policy.init_state(1, 2))
    assert report.deviation < LOSSLESS
    one = (jnp.ones(1, bool), jnp.ones(1, jnp.int32), jnp.zeros(1, jnp.int32))
    shown = [policy.next_lengths(policy.init_state(1, 2), jnp.array([pair]), *one)[1] for pair in ((0.3, 0.1), (0.9, 0.8))]
    unprobed = dataclasses.replace(policy.planner, probe_share=0.0)
    assert [int(unprobed.plan(history, *one, seed_key(3)).draft_length) for history in shown] == [0, 2]


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.6}, {"top_k": 2}, {"top_p": 0.7}, {"temperature": 1.4, "top_k": 3, "top_p": 0.8}, {"temperature": 0.0}],
    ids=str,
)
@both_verifiers
def test_filtered_sampling_gives_the_filtered_law(sampling, verifier):
    """[A5] [A8] Both sides through the sampler's own floor: the law equals filtered p, and nothing else has any probability."""
    logits_of = functools.cache(lambda text: law_of_logits(_target_logits(4, text), **sampling))
    drafter = DraftLaw(2, lambda text, drafts: law_of_logits(_draft_logits(4, text, drafts), **sampling), _confidence)
    report = law_of_rounds(logits_of, drafter, ConfidenceThreshold(0.5), verifier=verifier)
    assert report.deviation < LOSSLESS
    assert np.all(report.law[report.target == 0] == 0)
    assert (report.target == 0).any() or sampling == {"temperature": 0.6}


@both_verifiers
@pytest.mark.parametrize("policy", [FixedLength(2), ConfidenceThreshold(0.5)], ids=str)
def test_deterministic_drafts_are_verified_as_one_hot(policy, verifier):
    """[A3] Argmax drafts with their one-hot q are lossless for a sampled target; with their softmax as q they are not."""
    greedy = DraftLaw(2, lambda text, drafts: _one_hot(_draft_logits(3, text, drafts)), _confidence)
    assert law_of_rounds(_target(3), greedy, policy, verifier=verifier).deviation < LOSSLESS

    def with_softmax(p, q, ids, length):
        texts = [_softmax(_draft_logits(3, (0,), ()))] * 2
        return verifier(p, jnp.asarray(np.stack(texts), jnp.float32), ids, length)

    assert law_of_rounds(_target(3), greedy, FixedLength(2), verifier=with_softmax).deviation > 0.01


@both_verifiers
def test_a_perfect_drafter_is_always_kept(verifier):
    """[A4] p == q: lossless, and every draft is accepted."""
    perfect = DraftLaw(2, lambda text, drafts: _target(3)(text + drafts), _confidence)
    assert law_of_rounds(_target(3), perfect, FixedLength(2), verifier=verifier).deviation < LOSSLESS
    p = jnp.asarray(np.stack([_target(3)((0,) * n) for n in (1, 2, 3)]), jnp.float32)
    kept = jax.jit(verifier)(p, p[:2], jnp.array([0, 0], jnp.int32), jnp.int32(2)).sum(axis=1)
    np.testing.assert_allclose(np.asarray(kept), [0, 0, 1], atol=1e-7)


@both_verifiers
def test_a_draft_vocabulary_smaller_than_the_targets_is_lossless(verifier):
    """[A7] q is zero on two of five ids, p is not renormalised."""

    def probs(text: Text, drafts: Text) -> np.ndarray:
        kept = np.array([0, 1, 0, 1, 1]) * np.exp(_draft_logits(5, text, drafts))
        return kept / kept.sum()

    assert law_of_rounds(_target(5), DraftLaw(2, probs, _confidence), FixedLength(2), verifier=verifier).deviation < LOSSLESS


def test_the_chance_to_keep_the_first_draft_is_one_minus_total_variation():
    """[A3] In the enumerated law too."""
    p, q = _target(4)((0,)), _softmax(_draft_logits(4, (0,), ()))
    rows = (jnp.asarray(np.stack([p, p]), jnp.float32), jnp.asarray(q[None], jnp.float32))
    kept = sum(q[x] * float(OUTCOMES(*rows, jnp.array([x], jnp.int32), jnp.int32(1))[1].sum()) for x in range(4))
    assert abs(kept - (1 - 0.5 * np.abs(p - q).sum())) < LOSSLESS


# The second confidence tells which token was drafted first: certain behind a 0, hopeless behind a 1.
TELLTALE = DraftLaw(2, lambda *_: np.array([0.5, 0.5]), lambda text, drafts, k: 0.8 if k == 0 else float(drafts[0] == 0))


def _seven_to_three(text: Text) -> np.ndarray:
    return np.array([0.7, 0.3])


def test_scheduling_without_the_break_makes_85_to_15_of_70_to_30():
    """[A6] The paper's appendix. The target says (0.7, 0.3), the drafter (0.5, 0.5), and 1 - TV = 0.8 is its true confidence.

    On a curve on which one draft does not pay (1.8 tokens in twice the time) and two do if the second is certain, the best length is
    2 behind a drafted 0 and 0 behind a drafted 1. A verified 0 is always kept, an unverified round draws from the target:
    P(0) = 0.5 * 1 + 0.5 * 0.7 = 0.85. With the break the first draft is never verified, and the law is right.
    """
    curve = StepCurve(tokens=(1, 3), seconds_per_step=(1.0, 2.0))
    looking = law_of_rounds(_seven_to_three, TELLTALE, Oracle(curve))
    np.testing.assert_allclose(looking.first_token(), [0.85, 0.15], atol=LOSSLESS)
    assert looking.deviation > 0.01
    for honest in (PrefixSchedule(curve), ForecastStop(curve, (0.8, 0.5))):
        assert law_of_rounds(_seven_to_three, TELLTALE, honest).deviation < LOSSLESS


# The chance of the drafted token is no confidence: it has looked at x_k.
LOOKS = DraftLaw(1, lambda *_: np.array([0.5, 0.5]), lambda text, drafts, k: 0.9 if drafts[k] == 0 else 0.1)
# What verification will do with the draft: kept for certain, or with chance 0.3 / 0.5.
OUTCOME = DraftLaw(1, lambda *_: np.array([0.5, 0.5]), lambda text, drafts, k: 1.0 if drafts[k] == 0 else 0.6)


@dataclass(frozen=True)
class _LooksAhead:
    """Verifies the first draft where the second confidence, which has seen it, is high."""

    def lengths(self, survival, active, context, request_id):
        return (survival[:, 1] > 0.5).astype(jnp.int32)


@both_verifiers
@pytest.mark.parametrize(
    ("drafter", "policy"),
    [
        (LOOKS, ConfidenceThreshold(0.5)),
        (TELLTALE, _LooksAhead()),
        (OUTCOME, Oracle(StepCurve(tokens=(1, 2), seconds_per_step=(1.0, 1.7)))),
    ],
    ids=["looks_at_the_draft", "looks_at_the_next_confidence", "oracle"],
)
def test_policies_that_look_ahead_are_caught(drafter, policy, verifier):
    """[A6] Each verifies a drafted 0 alone: P(0) = 0.5 + 0.5 * 0.7."""
    report = law_of_rounds(_seven_to_three, drafter, policy, verifier=verifier)
    np.testing.assert_allclose(report.first_token(), [0.85, 0.15], atol=LOSSLESS)
    assert report.deviation > 0.01


@dataclass(frozen=True)
class _Mutual:
    """Verifies the first draft of each request where the OTHER's second confidence is high: (1, 1) by x_{2,1}, (2, 1) by x_{1,1}."""

    def lengths(self, survival, active, context, request_id):
        return (survival[::-1, 1] > 0.5).astype(jnp.int32)


@both_verifiers
def test_two_requests_that_look_at_each_other_are_caught_by_the_joint_law_alone(verifier):
    """[A6] Each request's own law is right; the requests are no longer independent."""
    report = law_of_rounds(_seven_to_three, TELLTALE, _Mutual(), prompts=((0,), (0,)), verifier=verifier)
    assert report.of_request(0).deviation < LOSSLESS and report.of_request(1).deviation < LOSSLESS
    assert report.deviation > 1e-3 and report.total_variation > 0.02
    first_tokens = report.law.sum(axis=(1, 2, 4, 5))
    # Drafts (0,0), (0,1), (1,0), (1,1), a quarter each: both verified, one verified and it is the 1, twice, none.
    assert abs(first_tokens[0, 0] - (1 + 2 * 0.7 * 0.4 + 0.7**2) / 4) < LOSSLESS


@both_verifiers
def test_a_wrong_verifier_is_caught(verifier):
    """[A2] [A4] Drawing the replacement from p instead of from the residual, though each part looks plausible."""

    def from_p(p, q, ids, length):
        table = verifier(p, q, ids, length)
        return table.sum(axis=1, keepdims=True) * p

    assert law_of_rounds(_target(3), _drafter(3, 2), FixedLength(2), verifier=from_p).deviation > 1e-3


def test_block_verification_that_draws_from_the_residual_of_one_token_is_caught():
    """[A2] What follows jointly accepted drafts is not what follows drafts that were accepted one by one."""

    def of_one_token(p, q, ids, length):
        accepted = block_outcome_probs(p, q, ids, length).sum(axis=1, keepdims=True)
        alone = outcome_probs(p, q, ids, length)
        return accepted * alone / jnp.maximum(alone.sum(axis=1, keepdims=True), 1e-9)

    assert law_of_rounds(_target(4), _drafter(4, 3), FixedLength(3), verifier=of_one_token).deviation > 1e-3
