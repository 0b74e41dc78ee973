"""Figures with their 95 % intervals by bootstrap: prompts or texts are drawn anew, each with all that was measured on it."""

import dataclasses
import math
import zlib
from collections.abc import Sequence

import numpy as np

from dspark_jax.typing import Float

RESAMPLES = 2000
LEVEL = (2.5, 97.5)


@dataclasses.dataclass(frozen=True, eq=False)
class Figure:
    """A number over several units, and what it is over as many units drawn from them with repetition.

    Figures of the same units under the same name were drawn alike: what is computed from their draws one by one is a paired comparison.

    Attributes:
      value: over the units themselves; NaN where nothing was measured.
      draws: over each resample.
      units: how many there are.
    """

    value: float
    draws: Float[np.ndarray, "B"]
    units: int

    @property
    def interval(self) -> tuple[float, float]:
        """The middle 95 % of the draws; NaN where fewer than two units leave nothing to draw."""
        drawn = self.draws[np.isfinite(self.draws)]
        if self.units < 2 or not len(drawn):
            return math.nan, math.nan
        low, high = np.percentile(drawn, LEVEL)
        return float(low), float(high)

    def over(self, other: "Figure") -> "Figure":
        """The ratio of this figure to another one of the same units."""
        with np.errstate(divide="ignore", invalid="ignore"):
            draws = self.draws / other.draws
        return Figure(self.value / other.value if other.value else math.nan, draws, min(self.units, other.units))


def ratio_of_sums(above: Sequence[float] | np.ndarray, below: Sequence[float] | np.ndarray, name: str) -> Figure:
    """The sum of one measurement over that of another, units drawn anew for both alike.

    Args:
      above, below: one entry per unit, as tokens and rounds of a prompt.
      name: of the units; the same name and number of units give the same draws.
    """
    if len(above) != len(below):
        raise ValueError(f"above has {len(above)} entries and below {len(below)}; allowed is one of each per unit")
    numerator, denominator = np.asarray(above, np.float64), np.asarray(below, np.float64)
    units = len(numerator)
    if not units:
        return Figure(math.nan, np.full(RESAMPLES, math.nan), 0)
    chosen = np.random.default_rng(zlib.crc32(name.encode())).integers(units, size=(RESAMPLES, units))
    with np.errstate(divide="ignore", invalid="ignore"):
        draws = numerator[chosen].sum(axis=1) / denominator[chosen].sum(axis=1)
        value = numerator.sum() / denominator.sum()
    return Figure(float(value), draws, units)


def mean_of(figures: Sequence[Figure]) -> Figure:
    """The mean of figures of different units, each of which is drawn for itself.

    Raises:
      ValueError: there is none.
    """
    if not figures:
        raise ValueError("figures is empty; allowed: at least one")
    return Figure(
        value=float(np.mean([figure.value for figure in figures])),
        draws=np.mean([figure.draws for figure in figures], axis=0),
        units=sum(figure.units for figure in figures),
    )
