"""Two policies compared along their loads: throughput at the same speed, speed at the same throughput; and the figures of it."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.result_files import save_figure

PAPER_BUDGET = (4, 6)
"""Target tokens per request and round that the paper's scheduler takes at moderate load (section 5.4, Figure 8), the anchor counted."""

PAPER_SPEED_GAIN, PAPER_THROUGHPUT_GAIN = (0.60, 0.85), 0.51
"""Of DSpark-5 over MTP-1 on V4-Flash: speed at matched throughput, throughput at the moderate 80 tokens/s per user (Figure 7)."""


@dataclasses.dataclass(frozen=True)
class Frontier:
    """A policy at growing concurrency. Rates in tokens per second."""

    policy: str
    concurrency: np.ndarray
    throughput: np.ndarray
    per_user: np.ndarray
    mean_verified: np.ndarray

    @classmethod
    def of(cls, policy: str, rows: Sequence[Mapping[str, Any]]) -> "Frontier":
        """The closed-loop rows of a policy.

        Raises:
          ValueError: there are none.
        """
        own = sorted((row for row in rows if row["policy"] == policy and row["concurrency"]), key=lambda row: row["concurrency"])
        if not own:
            raise ValueError(f"policy is {policy!r}; there are rows of {', '.join(dict.fromkeys(row['policy'] for row in rows))}")
        names = ("concurrency", "throughput", "per_user", "mean_verified")
        return cls(policy, *(np.array([float(row[name]) for row in own]) for name in names))

    def speed_at(self, throughput: float) -> float | None:
        """The fastest a user can be while all together have so much; straight lines between loads; None where no load has it."""
        return _highest(self.throughput, self.per_user, throughput)

    def throughput_at(self, speed: float) -> float | None:
        """The most that all together can have while every user has so much; None where no load has it."""
        return _highest(self.per_user, self.throughput, speed)


def _highest(at: np.ndarray, values: np.ndarray, wanted: float) -> float | None:
    found = []
    for left, right in zip(range(len(at)), range(1, len(at)), strict=False):
        low, high = sorted((at[left], at[right]))
        if low <= wanted <= high:
            share = 0.0 if high == low else (wanted - at[left]) / (at[right] - at[left])
            found.append(float(values[left] + share * (values[right] - values[left])))
    return max(found, default=None)


def gains(rows: Sequence[Mapping[str, Any]], policy: str, over: str) -> list[dict[str, Any]]:
    """At every load of `over`: how much more throughput `policy` has at the same speed, and how much more speed at the same throughput.

    Empty where `policy` never has that speed or throughput.
    """
    own, other = Frontier.of(policy, rows), Frontier.of(over, rows)
    found = []
    for number, throughput, speed in zip(other.concurrency, other.throughput, other.per_user, strict=True):
        more, faster = own.throughput_at(speed), own.speed_at(throughput)
        found.append(
            {
                "over": over,
                "its_concurrency": int(number),
                "its_per_user": float(speed),
                "its_throughput": float(throughput),
                "throughput_gain_at_its_speed": "" if more is None else more / float(throughput) - 1,
                "speed_gain_at_its_throughput": "" if faster is None else faster / float(speed) - 1,
            }
        )
    return found


def plot_load(rows: Sequence[Mapping[str, Any]], path: Path, title: str, paper: bool = False) -> None:
    """Throughput against speed (the paper's Figure 7); throughput and verified tokens against concurrency (its Figure 8).

    Args:
      paper: say beside it what the paper reports.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullFormatter

    grid: Any = plt.subplots(1, 3, figsize=(15, 4.6))
    figure, (left, middle, right) = grid
    for policy in dict.fromkeys(row["policy"] for row in rows if row["concurrency"]):
        line = Frontier.of(policy, rows)
        style: dict[str, Any] = {"label": policy, "marker": "o", "markersize": 3, "linewidth": 1.2}
        if policy == "scheduler":
            style |= {"color": "black", "linewidth": 2.2}
        left.plot(line.per_user, line.throughput, **style)
        middle.plot(line.concurrency, line.throughput, **style)
        right.plot(line.concurrency, 1 + line.mean_verified, **style)
    left.set(xlabel="tokens/s of each user", ylabel="tokens/s of all users", title="as Figure 7", xscale="log", yscale="log")
    middle.set(xlabel="concurrent requests", ylabel="tokens/s of all users", title="as Figure 8, top", xscale="log", yscale="log")
    right.set(xlabel="concurrent requests", ylabel="target tokens per request", title="as Figure 8, bottom", xscale="log")
    left.xaxis.set_minor_formatter(NullFormatter())
    for axis in (middle, right):
        axis.set_xscale("log", base=2)
    if paper:
        low, high = PAPER_SPEED_GAIN
        title += f"\nthe paper, V4-Flash, DSpark-5 over MTP-1: {low:.0%} to {high:.0%} faster at matched throughput, "
        title += f"{PAPER_THROUGHPUT_GAIN:.0%} more throughput at 80 tokens/s per user"
        right.axhspan(*PAPER_BUDGET, color="grey", alpha=0.15, label="paper, scheduler, moderate load")
        right.axhline(2, color="grey", linewidth=0.8, linestyle=":", label="paper, MTP-1")
    left.legend(fontsize=7, loc="lower left")
    right.legend(fontsize=7, loc="best")
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    save_figure(figure, path)
    plt.close(figure)
