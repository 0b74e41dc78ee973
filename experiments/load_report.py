"""What a measured load curve says of the goals."""

import csv
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from experiments.load_frontier import Frontier
from experiments.serving_policies import BASELINE, PLAIN, SCHEDULER

NUMBERS = frozenset({"concurrency"})


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
    scheduler, baseline = Frontier.of(SCHEDULER, rows), Frontier.of(BASELINE, rows)
    own = [row for row in rows if row["policy"] == SCHEDULER]
    matched = []
    for row in sorted(own, key=lambda row: row["concurrency"]):
        users, throughput, speed = row["concurrency"], row["throughput"], row["per_user"]
        other = baseline.speed_at(throughput)
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
