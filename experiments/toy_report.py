"""Tables and the plot of the toy suite, from the records of its cells alone.

A record is what `toy_drafters.run_toy_cell` gives, with the drafter's `name` and its `seed`. Intervals are of 95 %, from prompts drawn with
replacement, the same ones for both sides of a comparison; where there are several seeds, they are drawn too.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from dspark_jax.model_files import require
from experiments.bootstrap import RESAMPLES, Figure
from experiments.result_files import save_figure
from experiments.toy_rounds import with_interval

Record = Mapping[str, Any]

FEWEST_REACHED = 20
"""Rounds, of all seeds together, below which a share is not shown."""


def by_name(records: Sequence[Record]) -> dict[str, list[Record]]:
    """Records of every drafter, by seed, in the order in which the drafters first come."""
    names = dict.fromkeys(record["name"] for record in records)
    return {name: sorted((each for each in records if each["name"] == name), key=lambda each: each["seed"]) for name in names}


def _sums(records: Sequence[Record], temperature: str) -> np.ndarray:
    """[2, seeds, prompts], emitted tokens and rounds."""
    figures = [record["temperatures"][temperature] for record in records]
    return np.asarray([[each[name] for each in figures] for name in ("emitted", "rounds")], np.float64)


def accepted_length(records: Sequence[Record], temperature: str) -> Figure:
    """Over all seeds and prompts of a drafter; drafters with as many seeds and prompts are resampled alike."""
    sums = _sums(records, temperature)
    seeds, prompts = sums.shape[1:]
    rng = np.random.default_rng(0)
    prompt_picks = rng.integers(prompts, size=(RESAMPLES, 1, prompts))
    seed_picks = rng.integers(seeds, size=(RESAMPLES, seeds, 1))
    drawn = sums[:, seed_picks, prompt_picks].sum(axis=(2, 3))
    emitted, rounds = sums.sum(axis=(1, 2))
    return Figure(float(emitted / rounds), drawn[0] / drawn[1], prompts)


def drafter_rows(records: Sequence[Record]) -> list[dict[str, Any]]:
    """A row per drafter and temperature. Of several seeds, speed has the mean, the smallest and the largest, other figures their mean."""
    rows = []
    for name, cells in by_name(records).items():
        for temperature in cells[0]["temperatures"]:
            figures = [cell["temperatures"][temperature] for cell in cells]
            length = with_interval(accepted_length(cells, temperature))
            rows.append(
                {
                    "drafter": name,
                    "temperature": float(temperature),
                    "seeds": len(cells),
                    "accepted_length": length["value"],
                    "low": length["low"],
                    "high": length["high"],
                    **_speed([each["speed"] for each in figures]),
                    **_calibration([each["calibration"] for each in figures]),
                    "parameters": cells[0]["parameters"],
                    "anchors": cells[0]["anchors"],
                    "training_seconds": round(float(np.mean([cell["training"]["seconds"] for cell in cells])), 2),
                    "step_seconds": round(float(np.mean([cell["training"]["step_seconds"] for cell in cells])), 4),
                    "conditional_acceptance": " ".join(map(str, conditional_acceptance(figures))),
                }
            )
    return rows


def conditional_acceptance(figures: Sequence[Mapping[str, Any]]) -> list[float | str]:
    """Per position, the share of rounds that came so far and accepted the draft; "-" where fewer than `FEWEST_REACHED` came."""
    reached = np.sum([each["rounds_reached"] for each in figures], axis=0)
    kept = np.sum(
        [[(k or 0.0) * r for k, r in zip(each["conditional_acceptance"], each["rounds_reached"], strict=True)] for each in figures], 0
    )
    return [round(float(k / r), 3) if r >= FEWEST_REACHED else "-" for k, r in zip(kept, reached, strict=True)]


def _speed(speeds: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    ratios = [each["ratio"] for each in speeds]
    values = [each["value"] for each in ratios]
    low, high = (ratios[0]["low"], ratios[0]["high"]) if len(ratios) == 1 else (min(values), max(values))
    return {
        "plain_tokens_per_second": round(float(np.mean([each["plain_tokens_per_second"] for each in speeds])), 1),
        "tokens_per_second": round(float(np.mean([each["tokens_per_second"] for each in speeds])), 1),
        "speed": round(float(np.mean(values)), 3),
        "speed_low": low,
        "speed_high": high,
    }


def _calibration(calibrations: Sequence[Mapping[str, Any] | None]) -> dict[str, Any]:
    """Means over positions and seeds; empty where a drafter has no confidence."""
    found = [each for each in calibrations if each is not None]
    names = ("ece_raw", "ece_scaled", "schedule_over_fixed")
    if not found:
        return dict.fromkeys(names, "")
    values = (
        np.mean([each["ece"]["raw"] for each in found]),
        np.mean([each["ece"]["scaled"] for each in found]),
        np.mean([each["schedule"]["scheduled"] / each["schedule"]["best_fixed"] for each in found]),
    )
    return {name: round(float(value), 4) for name, value in zip(names, values, strict=True)}


def comparison_rows(records: Sequence[Record], first: str) -> list[dict[str, Any]]:
    """The accepted length of `first` over that of every other drafter, on the same prompts and seeds."""
    cells = by_name(records)
    rows = []
    for name, others in cells.items():
        for temperature in others[0]["temperatures"] if name != first else ():
            pair = cells[first], others
            own, other = (accepted_length(each, temperature) for each in pair)
            by_seed = [each[0].sum(axis=1) / each[1].sum(axis=1) for each in (_sums(each, temperature) for each in pair)]
            ratio = with_interval(own.over(other))
            rows.append(
                {
                    "drafter": first,
                    "over": name,
                    "temperature": float(temperature),
                    "ratio": ratio["value"],
                    "low": ratio["low"],
                    "high": ratio["high"],
                    "by_seed": " ".join(f"{value:.3f}" for value in by_seed[0] / by_seed[1]),
                }
            )
    return rows


def show_suite(content: Mapping[str, Any], console: Console) -> None:
    """The drafters, their acceptance by position, and the comparisons."""
    seeds = len(content["seeds"])
    table = Table(
        title=f"toy target, {seeds} seed{'s' if seeds > 1 else ''}: tokens a round (accepted length), speed beside plain decoding"
    )
    for column in ("drafter", "T", "accepted length", "95 %", "tokens/s", "x plain", "interval", "ECE raw", "scaled", "schedule", "params"):
        table.add_column(column, justify="left" if column == "drafter" else "right")
    for row in content["drafters"]:
        table.add_row(
            row["drafter"],
            f"{row['temperature']:g}",
            f"{row['accepted_length']:.2f}",
            f"{row['low']:.2f} to {row['high']:.2f}",
            f"{row['tokens_per_second']:.0f}",
            f"{row['speed']:.2f}",
            f"{row['speed_low']:.2f} to {row['speed_high']:.2f}",
            *(f"{row[name]:.3f}" if row[name] != "" else "-" for name in ("ece_raw", "ece_scaled", "schedule_over_fixed")),
            f"{row['parameters'] / 1e6:.2f} M",
        )
    console.print(table)
    table = Table(
        "drafter", "T", "conditional acceptance of draft 1, 2, ...", title="of the rounds that came to a draft, the share that kept it"
    )
    for row in content["drafters"]:
        table.add_row(row["drafter"], f"{row['temperature']:g}", row["conditional_acceptance"])
    console.print(table)
    if content["comparisons"]:
        table = Table("drafter", "over", "T", "ratio of accepted lengths", "95 %", "by seed", title="comparisons, on the same prompts")
        for row in content["comparisons"]:
            span = f"{row['low']:.3f} to {row['high']:.3f}"
            table.add_row(row["drafter"], row["over"], f"{row['temperature']:g}", f"{row['ratio']:.3f}", span, row["by_seed"])
        console.print(table)
    console.print(
        "schedule: tokens/s of the forecast stop over those of the best fixed length in hindsight, on the recorded rounds and the cost "
        "curve of SmolLM2 on a CPU",
        style="dim",
    )


def suite_markdown(content: Mapping[str, Any]) -> str:
    """The same tables for a page: speed beside plain decoding, schedule beside the best fixed length."""
    names = "drafter | temperature | accepted length | 95 % | speed | interval | ECE raw, scaled | schedule | parameters"
    lengths = [f"| {names} |", "|---|---|---|---|---|---|---|---|---|"]
    positions = ["| drafter | temperature | conditional acceptance of draft 1, 2, ... |", "|---|---|---|"]
    for row in content["drafters"]:
        errors = "-" if row["ece_raw"] == "" else f"{row['ece_raw']:.3f}, {row['ece_scaled']:.3f}"
        schedule = "-" if row["schedule_over_fixed"] == "" else f"{row['schedule_over_fixed']:.3f}"
        lengths.append(
            f"| {row['drafter']} | {row['temperature']:g} | {row['accepted_length']:.2f} | {row['low']:.2f} to {row['high']:.2f} | "
            f"{row['speed']:.2f} | {row['speed_low']:.2f} to {row['speed_high']:.2f} | {errors} | {schedule} | {row['parameters']:,} |"
        )
        positions.append(f"| {row['drafter']} | {row['temperature']:g} | {row['conditional_acceptance']} |")
    ratios = ["| drafter | over | temperature | ratio of accepted lengths | 95 % | by seed |", "|---|---|---|---|---|---|"]
    for row in content["comparisons"]:
        span = f"{row['low']:.3f} to {row['high']:.3f}"
        ratios.append(f"| {row['drafter']} | {row['over']} | {row['temperature']:g} | {row['ratio']:.3f} | {span} | {row['by_seed']} |")
    return "\n\n".join("\n".join(lines) for lines in (lengths, positions, ratios)) + "\n"


def plot_suite(records: Sequence[Record], path: Path) -> None:
    """Accepted length of every drafter on the left, acceptance by position at each temperature beside it."""
    cells = by_name(records)
    temperatures = list(next(iter(cells.values()))[0]["temperatures"])
    figure = require("matplotlib.figure", "plots", "the plot").Figure(figsize=(5.0 * (1 + len(temperatures)), 4.2), layout="constrained")
    bars, *lines = figure.subplots(1, 1 + len(temperatures))
    width = 0.8 / len(temperatures)
    for place, temperature in enumerate(temperatures):
        found = [with_interval(accepted_length(each, temperature)) for each in cells.values()]
        value, low, high = (np.asarray([each[name] for each in found]) for name in ("value", "low", "high"))
        at = np.arange(len(cells)) + (place - (len(temperatures) - 1) / 2) * width
        bars.bar(at, value, width, yerr=(value - low, high - value), capsize=3, label=f"temperature {temperature}")
    bars.set_xticks(np.arange(len(cells)), [name.replace("_", "\n") for name in cells], fontsize=8)
    bars.set(ylabel="accepted length (95 %)", ylim=(1, None))
    bars.legend(fontsize=8)
    for axis, temperature in zip(lines, temperatures, strict=True):
        for name, each in cells.items():
            shares = conditional_acceptance([cell["temperatures"][temperature] for cell in each])
            known = [(place + 1, share) for place, share in enumerate(shares) if isinstance(share, float)]
            axis.plot(*zip(*known, strict=True), "o-", markersize=3, label=name)
        axis.set(title=f"temperature {temperature}", xlabel="draft", ylabel="conditional acceptance", ylim=(0, 1))
        axis.legend(fontsize=8)
    save_figure(figure, path)
