"""How good predicted survival is: calibration error, Brier score, ranking, reliability, and bootstrap intervals of the first three.

Axes beside the legend: K rounds, E models that are compared, J groups of rounds, X draws of the bootstrap or bins.
"""

import functools

import jax
import jax.numpy as jnp
from flax import struct
from jax import lax

from dspark_jax.typing import Array, Float, Int, typed

ECE_BINS = 20
AUC_BINS = 1000
METRICS = ("ece", "brier", "auc")
"""The order in which `score` and `bootstrap` give them."""


@typed
def ece(predictions: Float[Array, "K"], labels: Int[Array, "K"]) -> Float[Array, ""]:
    """Expected calibration error over 20 equal bins: sum over bins of |sum of predictions - sum of labels|, divided by K."""
    clipped = _clipped(predictions)
    gap = clipped - labels.astype(jnp.float32)
    edges = jnp.arange(ECE_BINS, dtype=jnp.int32)
    in_bin = _bin(clipped, ECE_BINS) == edges[:, None]
    return jnp.sum(jnp.abs(jnp.sum(jnp.where(in_bin, gap, 0.0), axis=1))) / predictions.shape[0]


@typed
def brier(predictions: Float[Array, "K"], labels: Int[Array, "K"]) -> Float[Array, ""]:
    """Mean squared difference of predictions and labels."""
    return jnp.mean((_clipped(predictions) - labels.astype(jnp.float32)) ** 2)


@typed
def auc(predictions: Float[Array, "K"], labels: Int[Array, "K"]) -> Float[Array, ""]:
    """Area under the ROC curve from a histogram of 1,000 bins, ties counting half; NaN where a class is empty."""
    bins = _bin(_clipped(predictions), AUC_BINS)
    positive = jnp.zeros(AUC_BINS, jnp.float32).at[bins].add(labels.astype(jnp.float32))
    negative = jnp.zeros(AUC_BINS, jnp.float32).at[bins].add(1 - labels.astype(jnp.float32))
    num_positive, num_negative = jnp.sum(positive), jnp.sum(negative)
    negative_below = jnp.cumsum(negative) - negative
    return jnp.sum(positive / num_positive * (negative_below + 0.5 * negative)) / num_negative


@struct.dataclass
class Reliability:
    """A reliability diagram: equal bins of the predicted survival, at every position.

    Attributes:
      rounds: rounds in the bin.
      predicted, observed: mean prediction and share of labels that are 1; NaN in an empty bin.
    """

    rounds: Int[Array, "G X"]
    predicted: Float[Array, "G X"]
    observed: Float[Array, "G X"]


@functools.partial(jax.jit, static_argnames="num_bins")
@typed
def reliability(predictions: Float[Array, "K G"], prefix_labels: Int[Array, "K G"], num_bins: int = ECE_BINS) -> Reliability:
    """The diagram of `num_bins` bins, over the same ones as `ece` where there are 20."""

    def column(of: tuple[Float[Array, "K"], Int[Array, "K"]]) -> Reliability:
        clipped = _clipped(of[0])
        bins = _bin(clipped, num_bins)
        rounds = jnp.zeros(num_bins, jnp.int32).at[bins].add(1)
        predicted = jnp.zeros(num_bins, jnp.float32).at[bins].add(clipped)
        observed = jnp.zeros(num_bins, jnp.int32).at[bins].add(of[1].astype(jnp.int32)).astype(jnp.float32)
        return Reliability(rounds, predicted / rounds.astype(jnp.float32), observed / rounds.astype(jnp.float32))

    return lax.map(column, (predictions.T, prefix_labels.T))


@jax.jit
@typed
def score(predictions: Float[Array, "E K G"], prefix_labels: Int[Array, "K G"]) -> Float[Array, "3 E G"]:
    """`METRICS` of every model at every position."""

    def column(of: tuple[Float[Array, "K"], Int[Array, "K"]]) -> Float[Array, "3"]:
        return jnp.stack([metric(*of) for metric in (ece, brier, auc)])

    by_model = lax.map(lambda of_model: lax.map(column, (of_model.T, prefix_labels.T)), predictions)
    return jnp.moveaxis(by_model, -1, 0)


@functools.partial(jax.jit, static_argnames=("num_groups", "draws"))
@typed
def bootstrap(
    predictions: Float[Array, "E K G"],
    prefix_labels: Int[Array, "K G"],
    group: Int[Array, "K"],
    num_groups: int,
    draws: int,
    seed: int | Int[Array, ""],
) -> Float[Array, "3 E G X"]:
    """`METRICS` on `draws` resamplings of the data, with replacement; one resampling is the same for all models and positions.

    Whole groups are drawn, because the rounds of one text resemble each other: intervals from single rounds would be too narrow.
    The ECE of a resampling lies above that of the data where there are few rounds per bin, as the ECE itself lies above the truth.
    Rounds of the same label and the same of 1,000 bins count as equal, which moves a figure by far less than the draws differ.

    Args:
      group: 0..num_groups-1, the text of every round; no group may be left out.
    """

    def picks(key: Array) -> Float[Array, "J"]:
        return jnp.zeros(num_groups, jnp.float32).at[jax.random.randint(key, (num_groups,), 0, num_groups)].add(1.0)

    times = lax.map(picks, jax.random.split(jax.random.key(seed), draws)).T[group]

    def column(of: tuple[Float[Array, "K"], Int[Array, "K"]]) -> Float[Array, "3 X"]:
        clipped, label = _clipped(of[0]), of[1].astype(jnp.float32)
        cell = 2 * _bin(clipped, AUC_BINS) + of[1].astype(jnp.int32)
        # One pass over the rounds serves all draws: a row of `times` is added at once.
        counts = jnp.zeros((2 * AUC_BINS, draws), jnp.float32).at[cell].add(times)
        size = jnp.maximum(jnp.zeros(2 * AUC_BINS, jnp.float32).at[cell].add(1.0), 1.0)
        gap = jnp.zeros(2 * AUC_BINS, jnp.float32).at[cell].add(clipped - label) / size
        square = jnp.zeros(2 * AUC_BINS, jnp.float32).at[cell].add((clipped - label) ** 2) / size
        total = jnp.sum(times, axis=0)
        errors = jnp.abs((counts * gap[:, None]).reshape(ECE_BINS, -1, draws).sum(axis=1)).sum(axis=0) / total
        negative, positive = counts[0::2], counts[1::2]
        below = jnp.cumsum(negative, axis=0) - 0.5 * negative
        area = jnp.sum(positive * below, axis=0) / (jnp.sum(positive, axis=0) * jnp.sum(negative, axis=0))
        return jnp.stack([errors, square @ counts / total, area])

    by_model = lax.map(lambda of_model: lax.map(column, (of_model.T, prefix_labels.T)), predictions)
    return jnp.moveaxis(by_model, 2, 0)


def _clipped(predictions: Array) -> Array:
    # The upper end is the float32 next below 1: with 1 - 1e-8 it would be 1, and fall into a bin that is none.
    return jnp.clip(predictions, 1e-8, 1 - 2.0**-24)


def _bin(predictions: Array, num_bins: int) -> Array:
    return jnp.minimum(jnp.floor(predictions * num_bins).astype(jnp.int32), num_bins - 1)
