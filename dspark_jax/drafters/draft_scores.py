"""A confidence from q_k before x_k is drawn, for drafters without a trained confidence head.

How sure a drafter is of its next token says something about whether that token will survive; a calibrator turns it into a chance. The
score reads the whole distribution and never the token drawn from it: admitting x_k by its own probability would look at x_k, and the
output would no longer have the target's law (`exactness`).
"""

from typing import Any, Literal

import jax.numpy as jnp

from dspark_jax.typing import Array, Float, typed

ConfidenceScore = Literal["largest", "entropy"]
CONFIDENCE_SCORES: tuple[ConfidenceScore, ...] = ("largest", "entropy")

LIMIT = 30.0
"""Scores are cut to [-LIMIT, LIMIT]: 1e-13 from certainty, and finite."""


@typed
def score_logits(logits: Float[Array, "*batch Vd"], score: ConfidenceScore) -> Float[Array, "*batch"]:
    """The logit of a number in (0, 1) that is large where the distribution of the next draft is sharp.

    "largest" is the largest probability, "entropy" is exp(-entropy); both are 1 / n where n tokens share the mass equally. The
    distribution is softmax(logits), whatever the sampler's temperature and filters are: at temperature 0 the sampler's own is one-hot
    and says nothing. A NaN among the logits counts as probability 0; where there is no token at all the score is -LIMIT.

    Args:
      logits: corrected draft logits, before temperature.
    """
    logits = logits.astype(jnp.float32)
    logits = jnp.where(jnp.isnan(logits), -jnp.inf, logits)
    largest = jnp.max(logits, axis=-1, keepdims=True)
    # The odds of the likeliest token are 1 / others, with the mass of the others summed apart from its own 1: p near 1 costs no digits.
    below = (logits < largest) & (logits > -jnp.inf)
    gap = jnp.where(below, largest - logits, 0.0)
    weight = jnp.where(below, jnp.exp(-gap), 0.0)
    ties = jnp.sum((logits == largest).astype(jnp.float32), axis=-1)
    others = ties - 1.0 + jnp.sum(weight, axis=-1)
    if score == "largest":
        odds_against = others
    else:
        # A gap that is infinite (below a +inf) has weight 0, and 0 x inf is no number.
        entropy = jnp.log1p(others) + jnp.sum(jnp.where(weight > 0, gap * weight, 0.0), axis=-1) / (1.0 + others)
        odds_against = jnp.expm1(entropy)
    exists = largest[..., 0] > -jnp.inf
    return jnp.where(exists, jnp.clip(-jnp.log(odds_against), -LIMIT, LIMIT), -LIMIT)


def require_score(score: Any, confidence_head: bool = False) -> None:
    """Refuse a config's `confidence_score` that is unknown, or that stands beside a trained head.

    Raises:
      ValueError: in either case.
    """
    if score is None:
        return
    if score not in CONFIDENCE_SCORES:
        raise ValueError(f"confidence_score is {score!r}; allowed: {', '.join(CONFIDENCE_SCORES)}, or None for none")
    if confidence_head:
        raise ValueError(f"confidence_score is {score!r} and confidence_head is True; a drafter has one confidence: allowed is None")


def score_of(drafter: Any) -> ConfidenceScore | None:
    """The score that a drafter's config asks for; None where it asks for none or has no such field."""
    return getattr(getattr(drafter, "config", None), "confidence_score", None)


__all__ = ["CONFIDENCE_SCORES", "LIMIT", "ConfidenceScore", "require_score", "score_logits", "score_of"]
