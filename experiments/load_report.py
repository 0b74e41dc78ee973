"""What load curves say: the paper's Figures 7 and 8, speed at matched throughput, and the goals."""

import csv
import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.result_files import save_figure
from experiments.serving_policies import BASELINE, PLAIN, SCHEDULER

NUMBERS = frozenset({"concurrency"})


@dataclasses.dataclass(frozen=True)
class Curve:
    """A policy at every number of users, ascending. Rates in tokens a second."""

    policy: str
    concurrency: tuple[int, ...]
    throughput: tuple[float, ...]
    per_user: tuple[float, ...]
    mean_verified: tuple[float, ...]

    @classmethod
    def of(cls, policy: str, rows: Sequence[Mapping[str, Any]]) -> "Curve":
        """The rows of a policy."""
        own = sorted((row for row in rows if row["policy"] == policy), key=lambda row: row["concurrency"])
        names = ("concurrency", "throughput", "per_user", "mean_verified")
        return cls(policy, *(tuple(row[name] for row in own) for name in names))

    def per_user_at(self, throughput: float) -> float | None:
        """Speed of a user where all users together have so much, between measured points; None where it was not seen.

        Where several loads have it, the fastest counts.
        """
        speeds = []
        pairs = list(zip(self.throughput, self.per_user, strict=True))
        for (left, fast), (right, slow) in zip(pairs, pairs[1:], strict=False):
            if min(left, right) <= throughput <= max(left, right):
                share = 0.0 if left == right else (throughput - left) / (right - left)
                speeds.append(fast + share * (slow - fast))
        return max(speeds, default=None)


def read_rows(path: Path) -> list[dict[str, Any]]:
    """Rows of a CSV file that `load_curve` wrote; none where there is no such file."""
    if not path.is_file():
        return []
    with path.open(encoding="utf-8") as file:
        return [{name: _value(name, text) for name, text in row.items()} for row in csv.DictReader(file)]


def _value(name: str, text: str) -> Any:
    if name == "policy":
        return text
    if text == "":
        return None
    return int(text) if name in NUMBERS else float(text)


def findings(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The goals: never much below plain decoding, faster than one draft at matched throughput, fewer drafts at higher load."""
    rows = [row for row in rows if row["over_plain"] is not None]
    if not {PLAIN, BASELINE, SCHEDULER} <= {row["policy"] for row in rows}:
        return {}
    scheduler, baseline = Curve.of(SCHEDULER, rows), Curve.of(BASELINE, rows)
    own = [row for row in rows if row["policy"] == SCHEDULER]
    matched = []
    for users, throughput, speed in zip(scheduler.concurrency, scheduler.throughput, scheduler.per_user, strict=True):
        other = baseline.per_user_at(throughput)
        matched.append(
            {"concurrency": users, "throughput": throughput, "per_user": speed, BASELINE: other, "ratio": other and speed / other}
        )
    worst = min(own, key=lambda row: row["over_plain"])
    falls = bool(np.all(np.diff(scheduler.mean_verified) <= 0.05))
    return {
        "lowest_over_plain": {name: worst[name] for name in ("concurrency", "over_plain", "over_plain_low", "over_plain_high")},
        "at_matched_throughput": matched,
        "mean_verified_falls_with_load": falls,
    }


def draw_curves(path: Path, curves: Sequence[Curve]) -> None:
    """Throughput against each user's speed (Figure 7); throughput and verified drafts against users (Figure 8)."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(15, 4.4), constrained_layout=True)
    for curve in curves:
        style: dict[str, Any] = {
            "label": curve.policy,
            "marker": "o",
            "markersize": 4,
            "linewidth": 2.5 if curve.policy == SCHEDULER else 1.2,
        }
        left.plot(curve.per_user, curve.throughput, **style)
        middle.plot(curve.concurrency, curve.throughput, **style)
        right.plot(curve.concurrency, curve.mean_verified, **style)
    left.set(xlabel="tokens a second of each user", ylabel="tokens a second of all users", title="speed against throughput")
    middle.set(xlabel="users", ylabel="tokens a second of all users", title="throughput under load", xscale="log")
    right.set(xlabel="users", ylabel="verified drafts per request and round", title="verified drafts under load", xscale="log")
    for axes in (middle, right):
        ticks = sorted({users for curve in curves for users in curve.concurrency})
        axes.set_xticks(ticks, [str(users) for users in ticks])
        axes.minorticks_off()
    left.legend()
    save_figure(figure, path)
    plt.close(figure)
