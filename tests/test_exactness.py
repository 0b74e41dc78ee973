"""The output law of rounds, enumerated: equal to the target's to 1e-6, and unequal for every policy that looks ahead."""

import functools
from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.exactness import DraftLaw, Text, law_of_logits, law_of_rounds
from dspark_jax.schedule import ConfidenceThreshold, FixedLength, ForecastStop, PrefixSchedule, StepCurve
from dspark_jax.verify import outcome_probs

LOSSLESS = 1e-6
CURVE = StepCurve(tokens=(1, 2, 4, 6), seconds_per_step=(1.0, 1.3, 1.5, 2.4))
POLICIES = {
    "plain": FixedLength(0),
    "fixed": FixedLength(1),
    "full": FixedLength(3),
    "threshold": ConfidenceThreshold(0.5),
    "algorithm_1": PrefixSchedule(CURVE),
    "forecast": ForecastStop(CURVE, (0.6, 0.6)),
}


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


@pytest.mark.parametrize(("vocab_size", "block_size"), [(2, 1), (2, 3), (3, 2), (5, 3)])
@pytest.mark.parametrize("policy", [FixedLength(0), FixedLength(1), FixedLength(3), ConfidenceThreshold(0.5)], ids=str)
def test_one_round_of_one_request_is_lossless(vocab_size, block_size, policy):
    """[A1] Sampled drafts, all lengths, and a length decided by confidence that does not look."""
    assert law_of_rounds(_target(vocab_size), _drafter(vocab_size, block_size), policy).deviation < LOSSLESS


@pytest.mark.parametrize("name", POLICIES)
def test_three_rounds_of_one_request_are_lossless(name):
    report = law_of_rounds(_target(2), _drafter(2, 2), POLICIES[name], num_rounds=3)
    assert report.law.shape == (2,) * 9 and abs(report.law.sum() - 1) < LOSSLESS
    assert report.deviation < LOSSLESS


@dataclass(frozen=True)
class _TopK:
    """The `capacity` candidates of highest survival in the whole batch; the capacity comes from earlier rounds, and is given."""

    capacity: int

    def lengths(self, survival, active, context, request_id):
        order = jnp.argsort(-survival.reshape(-1), stable=True)
        rank = jnp.zeros(order.shape, jnp.int32).at[order].set(jnp.arange(order.size, dtype=jnp.int32))
        return jnp.sum((rank.reshape(survival.shape) < self.capacity).astype(jnp.int32), axis=1)


@pytest.mark.parametrize("policy", [*POLICIES.values(), _TopK(1), _TopK(3)], ids=[*POLICIES, "top_1", "top_3"])
def test_the_joint_law_of_two_requests_over_two_rounds_is_the_product_of_both(policy):
    """[F3] Given the survival of earlier rounds, ranking by the current round keeps requests independent."""
    report = law_of_rounds(_target(2), _drafter(2, 2), policy, num_rounds=2, prompts=((0,), (1,)))
    assert report.law.shape == (2,) * 12
    assert report.deviation < LOSSLESS


@pytest.mark.parametrize(
    "sampling",
    [{"temperature": 0.6}, {"top_k": 2}, {"top_p": 0.7}, {"temperature": 1.4, "top_k": 3, "top_p": 0.8}, {"temperature": 0.0}],
    ids=str,
)
def test_filtered_sampling_gives_the_filtered_law(sampling):
    """[A5] [A8] Both sides through the sampler's own floor: the law equals filtered p, and nothing else has any probability."""
    logits_of = functools.cache(lambda text: law_of_logits(_target_logits(4, text), **sampling))
    drafter = DraftLaw(2, lambda text, drafts: law_of_logits(_draft_logits(4, text, drafts), **sampling), _confidence)
    report = law_of_rounds(logits_of, drafter, ConfidenceThreshold(0.5))
    assert report.deviation < LOSSLESS
    assert np.all(report.law[report.target == 0] == 0)
    assert (report.target == 0).any() or sampling == {"temperature": 0.6}


@pytest.mark.parametrize("policy", [FixedLength(2), ConfidenceThreshold(0.5)], ids=str)
def test_deterministic_drafts_are_verified_as_one_hot(policy):
    """[A3] Argmax drafts with their one-hot q are lossless for a sampled target; with their softmax as q they are not."""
    greedy = DraftLaw(2, lambda text, drafts: _one_hot(_draft_logits(3, text, drafts)), _confidence)
    assert law_of_rounds(_target(3), greedy, policy, num_rounds=1).deviation < LOSSLESS

    def with_softmax(p, q, ids, length):
        texts = [_softmax(_draft_logits(3, (0,), ()))] * 2
        return outcome_probs(p, jnp.asarray(np.stack(texts), jnp.float32), ids, length)

    assert law_of_rounds(_target(3), greedy, FixedLength(2), verifier=with_softmax).deviation > 0.01


def test_a_perfect_drafter_is_always_kept():
    """[A4] p == q: lossless, and every draft is accepted."""
    perfect = DraftLaw(2, lambda text, drafts: _target(3)(text + drafts), _confidence)
    assert law_of_rounds(_target(3), perfect, FixedLength(2)).deviation < LOSSLESS
    p = jnp.asarray(np.stack([_target(3)((0,) * n) for n in (1, 2, 3)]), jnp.float32)
    kept = outcome_probs(p, p[:2], jnp.array([0, 0], jnp.int32), jnp.int32(2)).sum(axis=1)
    np.testing.assert_allclose(np.asarray(kept), [0, 0, 1], atol=1e-7)


def test_a_draft_vocabulary_smaller_than_the_targets_is_lossless():
    """[A7] q is zero on two of five ids, p is not renormalised."""

    def probs(text: Text, drafts: Text) -> np.ndarray:
        kept = np.array([0, 1, 0, 1, 1]) * np.exp(_draft_logits(5, text, drafts))
        return kept / kept.sum()

    assert law_of_rounds(_target(5), DraftLaw(2, probs, _confidence), FixedLength(2)).deviation < LOSSLESS


def test_the_chance_to_keep_the_first_draft_is_one_minus_total_variation():
    """[A3] In the enumerated law too."""
    p, q = _target(4)((0,)), _softmax(_draft_logits(4, (0,), ()))
    rows = (jnp.asarray(np.stack([p, p]), jnp.float32), jnp.asarray(q[None], jnp.float32))
    kept = sum(q[x] * float(outcome_probs(*rows, jnp.array([x], jnp.int32), jnp.int32(1))[1].sum()) for x in range(4))
    assert abs(kept - (1 - 0.5 * np.abs(p - q).sum())) < LOSSLESS


@dataclass(frozen=True)
class _WithoutBreak:
    """Algorithm 1 without its break: the length of the best throughput, found by looking at all of the realised survival."""

    curve: StepCurve

    def lengths(self, survival, active, context, request_id):
        rate = jnp.asarray(self.curve.steps_per_second(survival.shape[1] + 1))[1:]
        expected = jnp.concatenate([jnp.ones_like(survival[:, :1]), 1 + jnp.cumsum(survival, axis=1)], axis=1)
        return jnp.argmax(expected * rate, axis=1).astype(jnp.int32)


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
    looking = law_of_rounds(_seven_to_three, TELLTALE, _WithoutBreak(curve))
    np.testing.assert_allclose(looking.first_token(), [0.85, 0.15], atol=LOSSLESS)
    assert looking.deviation > 0.01
    for honest in (PrefixSchedule(curve), ForecastStop(curve, (0.8, 0.5))):
        assert law_of_rounds(_seven_to_three, TELLTALE, honest).deviation < LOSSLESS


def test_a_confidence_that_sees_its_own_draft_is_caught():
    """[A6] The chance of the drafted token is no confidence: it has looked at x_k."""
    looks = DraftLaw(1, lambda *_: np.array([0.5, 0.5]), lambda text, drafts, k: 0.9 if drafts[k] == 0 else 0.1)
    report = law_of_rounds(_seven_to_three, looks, ConfidenceThreshold(0.5))
    np.testing.assert_allclose(report.first_token(), [0.85, 0.15], atol=LOSSLESS)


@dataclass(frozen=True)
class _Mutual:
    """Verifies the first draft of each request where the OTHER request's second confidence is high."""

    def lengths(self, survival, active, context, request_id):
        return (survival[::-1, 1] > 0.5).astype(jnp.int32)


def test_two_requests_that_look_at_each_other_are_caught_by_the_joint_law_alone():
    """[A6] Each request's own law is right; the requests are no longer independent."""
    report = law_of_rounds(_seven_to_three, TELLTALE, _Mutual(), prompts=((0,), (0,)))
    assert report.of_request(0).deviation < LOSSLESS and report.of_request(1).deviation < LOSSLESS
    assert report.deviation > 1e-3 and report.total_variation > 0.02
    first_tokens = report.law.sum(axis=(1, 2, 4, 5))
    # Drafts (0,0), (0,1), (1,0), (1,1), a quarter each: both verified, one verified and it is the 1, twice, none.
    assert abs(first_tokens[0, 0] - (1 + 2 * 0.7 * 0.4 + 0.7**2) / 4) < LOSSLESS


def test_a_wrong_verifier_is_caught():
    """[A2] [A4] Drawing the replacement from p instead of from the residual, though each part looks plausible."""

    def from_p(p, q, ids, length):
        table = outcome_probs(p, q, ids, length)
        return table.sum(axis=1, keepdims=True) * p

    assert law_of_rounds(_target(3), _drafter(3, 2), FixedLength(2), verifier=jax.jit(from_p)).deviation > 1e-3
