"""Rounds of a toy drafter on held-out prompts, and what is read off them: accepted length, speed, calibration, what a schedule gains.

Prompts are answered one at a time by the loop that the demo times, plain decoding and the drafter in turns. Every round verifies the whole
block, so that each has a label at every position; rounds near the end of an answer, where the budget leaves less room than a block, count
for speed alone.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.calibrate import ConstantSurvival, RawSurvival, prefix_confidence
from dspark_jax.calibration_fit import GRID, fit_sequential_temperatures
from dspark_jax.calibration_metrics import METRICS, score
from dspark_jax.decode import DecodeParams, DecodePlan
from dspark_jax.drafters.draft_scores import score_of
from dspark_jax.prefill import start
from dspark_jax.protocols import Drafter, Target
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FixedLength, ForecastStop, StepCurve
from dspark_jax.typing import Params
from experiments.bootstrap import Figure, ratio_of_sums
from experiments.demo_rounds import Recording, record
from experiments.toy_target import TEMPERATURES

PROMPTS, TIMED_PROMPTS = "toy prompts", "timed toy prompts"
"""What figures are resampled over (`bootstrap.ratio_of_sums`): the same prompts for all drafters."""

ROUNDS_AT_ONCE = 128
"""Calibration takes a multiple of so many rounds, where there are as many, so that drafters share its compiled programs."""

FEWEST_ROUNDS = 16
"""With fewer rounds on either side, nothing is calibrated."""

CURVE = StepCurve(tokens=(1, 5, 8), seconds_per_step=(0.0480, 0.0635, 0.0715), draft_seconds=0.0083)
"""What a round of SmolLM2-135M and its released drafter costs on 2 CPU cores (`results/profile_steps.json`). A toy target is too small for
its own costs to say anything about a schedule."""


@dataclasses.dataclass(frozen=True, eq=False)
class DecodedPrompts:
    """The answers to R prompts at one temperature: K rounds in which the whole block was verified.

    Attributes:
      prompt: [K], number of the prompt.
      accepted: [K]
      confidence_logits: [K, G]; None for a drafter that has no confidence.
      block_size: G
      num_prompts: R
      seconds, tokens: [S, 2], of the prompts that were timed: plain decoding, then the drafter; the first token counts for nothing.
      identical: of the prompts that were timed, those whose two answers are the same.
    """

    prompt: np.ndarray
    accepted: np.ndarray
    confidence_logits: np.ndarray | None
    block_size: int
    num_prompts: int
    seconds: np.ndarray
    tokens: np.ndarray
    identical: int

    def per_prompt(self) -> np.ndarray:
        """[2, R], emitted tokens and rounds of every prompt."""
        rounds = np.bincount(self.prompt, minlength=self.num_prompts)
        return np.stack([rounds + np.bincount(self.prompt, self.accepted, self.num_prompts), rounds])


def decode_prompts(
    target: Target,
    target_params: Params,
    drafter: Drafter,
    params: Params,
    draft_ids: jax.Array | None,
    prompts: Sequence[Sequence[int]],
    *,
    new_tokens: int,
    timed_prompts: int,
    verifier: Any = "token",
    seed: int = 0,
) -> dict[float, DecodedPrompts]:
    """Answer all prompts at each of `TEMPERATURES`, the first `timed_prompts` of them plainly as well."""
    block_size = drafter.block_size
    confident = getattr(getattr(drafter, "config", None), "confidence_head", False) or score_of(drafter) is not None
    # Fixed lengths read no survival, but a plan has one.
    survival = RawSurvival() if confident else ConstantSurvival((1.0,) * block_size)
    plan = DecodePlan(target, drafter, FixedLength(block_size), survival, verifier=verifier)
    ways = (
        (DecodePlan(target), DecodeParams.of(target, target_params)),
        (plan, DecodeParams.of(target, target_params, params, draft_ids)),
    )

    def answer(way: int, number: int, temperature: float) -> Recording:
        plan, parameters = ways[way]
        prompt = prompts[number]
        state = start(
            plan,
            parameters,
            [prompt],
            max_new_tokens=new_tokens,
            sampling=Sampling.make(1, temperature),
            seed=seed,
            request_ids=[number],
            prefill_chunk=len(prompt),
        )
        return record(plan, parameters, state)

    for way in range(len(ways)):
        answer(way, 0, 0.0)  # compiles
    decoded = {}
    for temperature in TEMPERATURES:
        answers, times, tokens, identical = [], [], [], 0
        for number in range(len(prompts)):
            if number < timed_prompts:
                first = number % 2
                pair = {way: answer(way, number, temperature) for way in (first, 1 - first)}
                times.append([sum(pair[way].seconds) for way in (0, 1)])
                tokens.append([pair[way].decoded for way in (0, 1)])
                identical += pair[0].ids == pair[1].ids
                answers.append(pair[1])
            else:
                answers.append(answer(1, number, temperature))
        rounds = [(number, stats) for number, each in enumerate(answers) for stats in each.rounds if stats.verified[0] == block_size]
        decoded[temperature] = DecodedPrompts(
            prompt=np.asarray([number for number, _ in rounds]),
            accepted=np.asarray([stats.num_accepted[0] for _, stats in rounds]),
            confidence_logits=np.stack([stats.confidence_logits[0] for _, stats in rounds]) if confident else None,
            block_size=block_size,
            num_prompts=len(prompts),
            seconds=np.asarray(times),
            tokens=np.asarray(tokens),
            identical=identical,
        )
    return decoded


def figures_of(decoded: DecodedPrompts) -> dict[str, Any]:
    """Figures of the answers at one temperature, as JSON values.

    `accepted_length` and `speed` have intervals of 95 % from resampled prompts; `emitted` and `rounds` are sums per prompt, for paired
    comparisons. Calibration is fitted on the prompts of even number and judged on the others.
    """
    emitted, rounds = decoded.per_prompt()
    place = np.arange(decoded.block_size)
    reached = (decoded.accepted[:, None] >= place).sum(axis=0)
    kept = (decoded.accepted[:, None] > place).sum(axis=0)
    conditional = [round(float(k / r), 4) if r else None for k, r in zip(kept, reached, strict=True)]
    return {
        "accepted_length": with_interval(ratio_of_sums(emitted.tolist(), rounds.tolist(), PROMPTS)),
        "conditional_acceptance": conditional,
        "rounds_reached": reached.tolist(),
        "speed": _speed(decoded),
        "calibration": calibrate(decoded),
        "emitted": emitted.astype(int).tolist(),
        "rounds": rounds.astype(int).tolist(),
    }


def with_interval(figure: Figure) -> dict[str, float]:
    """A figure and the ends of its interval of 95 %, as JSON values."""
    low, high = figure.interval
    return {"value": round(figure.value, 4), "low": round(low, 4), "high": round(high, 4)}


def _speed(decoded: DecodedPrompts) -> dict[str, Any]:
    """Tokens per second of both ways, and their ratio with its interval."""
    plain, drafted = (ratio_of_sums(decoded.tokens[:, way].tolist(), decoded.seconds[:, way].tolist(), TIMED_PROMPTS) for way in (0, 1))
    return {
        "plain_tokens_per_second": round(plain.value, 2),
        "tokens_per_second": round(drafted.value, 2),
        "ratio": with_interval(drafted.over(plain)),
        "prompts": drafted.units,
        "identical_answers": decoded.identical,
    }


def calibrate(decoded: DecodedPrompts) -> dict[str, Any] | None:
    """Sequential temperature scaling, its calibration error before and after, and what a schedule makes of it; None without confidence.

    Errors are over 20 bins of the survival at every position; from some hundred rounds they lie above the truth.
    """
    if decoded.confidence_logits is None:
        return None
    labels = (np.arange(decoded.block_size) < decoded.accepted[:, None]).astype(np.int32)
    halves = [_multiple(decoded.prompt % 2 == parity) for parity in (0, 1)]
    if min(map(len, halves)) < FEWEST_ROUNDS:
        return None
    (logits, kept), (other_logits, other_kept) = (
        (jnp.asarray(decoded.confidence_logits[half], jnp.float32), jnp.asarray(labels[half])) for half in halves
    )
    temperatures, _ = fit_sequential_temperatures(logits, kept, jnp.asarray(GRID, jnp.float32))
    survival = jnp.stack([prefix_confidence(other_logits), prefix_confidence(other_logits / temperatures)])
    metrics = dict(zip(METRICS, np.asarray(score(survival, other_kept)), strict=True))
    return {
        "rounds_fitted": len(halves[0]),
        "rounds_judged": len(halves[1]),
        "temperatures": [round(float(each), 2) for each in temperatures],
        **{
            name: {kind: [round(float(each), 4) for each in row] for kind, row in zip(("raw", "scaled"), metrics[name], strict=True)}
            for name in ("ece", "brier")
        },
        "schedule": schedule_gain(np.asarray(survival[1]), decoded.accepted[halves[1]], np.asarray(kept), CURVE),
    }


def _multiple(mask: np.ndarray) -> np.ndarray:
    """Indices where `mask` is True, cut to a multiple of `ROUNDS_AT_ONCE` where there are so many."""
    found = np.flatnonzero(mask)
    return found[: len(found) // ROUNDS_AT_ONCE * ROUNDS_AT_ONCE or len(found)]


def schedule_gain(survival: np.ndarray, accepted: np.ndarray, fitted_labels: np.ndarray, curve: StepCurve) -> Mapping[str, Any]:
    """Tokens per second of one request on a cost curve, relative to plain decoding: forecast stop, and the best fixed length in hindsight.

    Recorded rounds are taken as they come: a shorter verification would have led to other anchors.

    Args:
      survival: [K, G], calibrated, of the rounds that are judged; `accepted`: [K], their accepted drafts.
      fitted_labels: prefix labels of other rounds, from which the usual chances of acceptance are taken.
    """
    share = fitted_labels.mean(axis=0)
    before = np.concatenate([[1.0], share[:-1]])
    usual = tuple(np.where(before > 0, share / np.maximum(before, 1e-9), 0.0).tolist())
    policy = ForecastStop(curve, usual)
    one, zero = jnp.ones((1,), bool), jnp.zeros((1,), jnp.int32)
    lengths = np.asarray(jax.vmap(lambda row: policy.lengths(row[None], one, zero, zero)[0])(jnp.asarray(survival, jnp.float32)))
    costs = np.asarray(curve.seconds_per_step)
    plain = 1.0 / costs[0]

    def rate(verified: np.ndarray) -> float:
        seconds = costs[np.searchsorted(curve.tokens, 1 + verified)] + curve.draft_seconds
        return float((1 + np.minimum(accepted, verified)).sum() / seconds.sum() / plain)

    longest = min(survival.shape[1], curve.tokens[-1] - 1)
    fixed = {length: rate(np.full(len(accepted), length)) for length in range(1, longest + 1)}
    best = max(fixed, key=lambda length: fixed[length])
    return {
        "scheduled": round(rate(lengths), 4),
        "best_fixed": round(fixed[best], 4),
        "best_fixed_length": best,
        "whole_blocks": round(fixed[longest], 4),
        "mean_verified": round(float(lengths.mean()), 3),
    }
