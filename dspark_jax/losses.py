"""The loss of a drafter: cross-entropy, L1 distance to the target's distribution, and confidence, over all prediction sites.

Source: section 4.1 of the DSpark paper; the soft cross-entropy is what Eagle3 trains with. Every term is a
weighted mean over the sites, and numerators and denominators stay apart, so that micro-batches and data-parallel runs can divide by
the sums over the whole batch.

Logits over the vocabulary exist for one chunk of sites at a time (`readout.py`).
"""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import struct

from dspark_jax.protocols import Drafter, Sites, TargetHead, TrainBatch
from dspark_jax.readout import Factors, Readout, label_rows, read_sites
from dspark_jax.typing import Array, Float, Int, Params, typed

EPSILON = 1e-6
"""Added to every denominator, as the reference does."""


@dataclasses.dataclass(frozen=True)
class DraftLossConfig:
    """Weights of the three terms, and how many sites have logits at once.

    Attributes:
      ce: factor on the cross-entropy with the next token of the text.
      l1: factor on sum_v |p_draft - p_target|, twice the total-variation distance.
      confidence: factor on the binary cross-entropy of the confidence head; without such a head it has no effect.
      soft_ce: factor on the cross-entropy with the target's whole distribution, -sum_v p_target log p_draft.
      chunk: prediction sites, over the whole batch, whose logits exist at the same time; memory is some five times chunk x V floats.
    """

    ce: float = 0.1
    l1: float = 0.9
    confidence: float = 1.0
    soft_ce: float = 0.0
    chunk: int = 512

    def __post_init__(self) -> None:
        for name in ("ce", "l1", "confidence", "soft_ce"):
            value = getattr(self, name)
            if not 0.0 <= value < float("inf"):
                raise ValueError(f"{name} is {value}; a loss weight is a finite number of at least 0")
        if self.chunk < 1:
            raise ValueError(f"chunk is {self.chunk}; at least 1 site is needed")


@struct.dataclass
class Denominators:
    """Sums of weights that the numerators are divided by."""

    ce: Float[Array, ""]
    l1: Float[Array, ""]
    confidence: Float[Array, ""]
    soft_ce: Float[Array, ""]


@struct.dataclass
class LossTerms:
    """Sums over sites and blocks; adding those of two batches gives those of their union.

    Attributes:
      ce, l1, confidence, soft_ce: numerators of the loss terms (soft_ce is 0 where the config does not ask for it).
      denominators: what they are divided by.
      accept: acceptance probability 1 - TV(p_draft, p_target), summed per step over the supervised sites.
      agree: 1 where the draft's and the target's likeliest tokens agree, summed likewise.
      count: supervised sites per step.
      accepted_length: 1 + sum_k prod_{i<=k} accept_i, summed over the blocks whose first site is supervised.
      greedy_accepted_length: the same with agreement in place of acceptance: temperature 0.
      blocks: number of such blocks.
      confidence_abs_error: weight x |confidence - accept|, summed over sites.
      confidence_bias: weight x (confidence - accept), summed over sites.
      survival_bias: the same difference between running products over the block.
    """

    ce: Float[Array, ""]
    l1: Float[Array, ""]
    confidence: Float[Array, ""]
    soft_ce: Float[Array, ""]
    denominators: Denominators
    accept: Float[Array, "G"]
    agree: Float[Array, "G"]
    count: Float[Array, "G"]
    accepted_length: Float[Array, ""]
    greedy_accepted_length: Float[Array, ""]
    blocks: Float[Array, ""]
    confidence_abs_error: Float[Array, ""]
    confidence_bias: Float[Array, ""]
    survival_bias: Float[Array, ""]


@typed
def draft_denominators(sites: Sites, draft_ids: Int[Array, "Vd"] | None) -> Denominators:
    """Sums of the weights of the terms. Labels outside the draft vocabulary count for L1 and confidence, not for CE."""
    _, inside = label_rows(sites.label, draft_ids)
    total = jnp.sum(sites.weight)
    return Denominators(
        ce=jnp.sum(jnp.where(inside, sites.weight, 0.0)),
        l1=total,
        confidence=jnp.zeros_like(total) if sites.confidence_logits is None else total,
        soft_ce=total if sites.soft_ce_places is None else jnp.full_like(total, sites.soft_ce_places),
    )


@typed
def total_loss(terms: LossTerms, config: DraftLossConfig, denominators: Denominators | None = None) -> Float[Array, ""]:
    """The weighted sum of the means; `denominators` are those of a larger batch, or None for the terms' own."""
    below = terms.denominators if denominators is None else denominators
    return (
        config.ce * terms.ce / (below.ce + EPSILON)
        + config.l1 * terms.l1 / (below.l1 + EPSILON)
        + config.confidence * terms.confidence / (below.confidence + EPSILON)
        + config.soft_ce * terms.soft_ce / (below.soft_ce + EPSILON)
    )


def _terms(drafter: Drafter, sites: Sites, readout: Readout, denominators: Denominators) -> LossTerms:
    """Sums of everything that is reported, from the per-site numbers. Gradients flow to the confidence numerator alone."""
    steps = drafter.block_size
    weight = sites.weight
    mask = (weight > 0).astype(jnp.float32)
    accept = jnp.clip(1.0 - readout.l1 / 2.0, 0.0, 1.0) * mask
    agree = readout.agree * mask
    zero = jnp.zeros((), jnp.float32)

    def survival(x: Array) -> Array:
        return jnp.cumprod(x.reshape(-1, steps), axis=1)

    has_sites = mask.reshape(-1, steps)[:, 0]

    def accepted_length(x: Array) -> Array:
        return jnp.sum(has_sites * (1.0 + jnp.sum(survival(x), axis=1)))

    def per_step(x: Array) -> Array:
        return jnp.zeros(steps, jnp.float32).at[sites.step].add(x)

    confidence = confidence_abs_error = confidence_bias = survival_bias = zero
    if sites.confidence_logits is not None:
        logits = sites.confidence_logits.astype(jnp.float32)
        confidence = jnp.sum(weight * optax.sigmoid_binary_cross_entropy(logits, accept))
        chance = jax.lax.stop_gradient(jax.nn.sigmoid(logits))
        confidence_abs_error = jnp.sum(weight * jnp.abs(chance - accept))
        confidence_bias = jnp.sum(weight * (chance - accept))
        survival_bias = jnp.sum(weight * (survival(chance) - survival(accept)).reshape(-1))
    return LossTerms(
        ce=jnp.sum(weight * readout.ce),
        l1=jnp.sum(weight * readout.l1),
        confidence=confidence,
        soft_ce=jnp.sum(weight * readout.soft_ce),
        denominators=denominators,
        accept=per_step(accept),
        agree=per_step(agree),
        count=per_step(mask),
        accepted_length=accepted_length(accept),
        greedy_accepted_length=accepted_length(agree),
        blocks=jnp.sum(has_sites),
        confidence_abs_error=confidence_abs_error,
        confidence_bias=confidence_bias,
        survival_bias=survival_bias,
    )


def draft_loss(
    drafter: Drafter,
    params: Params,
    head: TargetHead,
    teacher_head: TargetHead,
    batch: TrainBatch,
    config: DraftLossConfig,
    denominators: Denominators | None = None,
) -> tuple[Float[Array, ""], LossTerms]:
    """The loss of one batch and everything that is reported of it; gradients flow to `params` alone.

    Args:
      head: the target's head that the drafter predicts through, cut to the draft vocabulary where there is one.
      teacher_head: the target's head over the whole vocabulary.
      denominators: sums of weights of the batch that this one is a part of; None: of this one.

    Raises:
      ValueError: the drafter's sites do not divide evenly among sequences and steps.
    """
    sites = drafter.prediction_sites(params, head, batch)
    if sites.label.shape[0] % drafter.block_size:
        raise ValueError(f"prediction_sites gave {sites.label.shape[0]} sites; a multiple of block_size {drafter.block_size} is needed")
    own = draft_denominators(sites, head.draft_ids)
    below = own if denominators is None else denominators
    factors = Factors(
        ce=config.ce / (below.ce + EPSILON),
        l1=config.l1 / (below.l1 + EPSILON),
        soft_ce=config.soft_ce / (below.soft_ce + EPSILON) if config.soft_ce else None,
    )
    objective, readout = read_sites(drafter, params, head, teacher_head, batch, sites, config.chunk, factors)
    terms = _terms(drafter, sites, readout, own)
    return objective + config.confidence * terms.confidence / (below.confidence + EPSILON), terms


@typed
def loss_metrics(terms: LossTerms, config: DraftLossConfig) -> dict[str, Array]:
    """Means for people to read: scalars, and one entry per step of the block for `accept_rate` and `agreement`.

    `accepted_length` estimates the tokens per round at temperature 1 and `greedy_accepted_length` those at temperature 0, both
    on the text's own prefixes and with the bonus token counted.
    """
    blocks = jnp.maximum(terms.blocks, 1.0)
    count = jnp.maximum(terms.count, 1.0)
    below = terms.denominators
    return {
        "loss": total_loss(terms, config),
        "ce_loss": terms.ce / (below.ce + EPSILON),
        "l1_loss": terms.l1 / (below.l1 + EPSILON),
        "confidence_loss": terms.confidence / (below.confidence + EPSILON),
        "soft_ce_loss": terms.soft_ce / (below.soft_ce + EPSILON),
        "accept_rate": terms.accept / count,
        "agreement": terms.agree / count,
        "accepted_length": terms.accepted_length / blocks,
        "greedy_accepted_length": terms.greedy_accepted_length / blocks,
        "confidence_abs_error": terms.confidence_abs_error / (below.confidence + EPSILON),
        "confidence_bias": terms.confidence_bias / (below.confidence + EPSILON),
        "survival_bias": terms.survival_bias / (below.confidence + EPSILON),
        "blocks": terms.blocks,
        "supervised_sites": jnp.sum(terms.count),
    }


__all__ = [
    "Denominators",
    "DraftLossConfig",
    "LossTerms",
    "draft_denominators",
    "draft_loss",
    "loss_metrics",
    "total_loss",
]
