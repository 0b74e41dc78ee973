"""What a calibration is worth, as tables and reliability diagrams (the paper's Figure 6), and what it costs to fit one.

`python -m experiments.run calibration-speed` times the fit; the rest is written by `release` and `recalibrate`.
"""

import dataclasses
import math
import os
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dspark_jax.calibration_choice import CONSTANT, CalibratorChoice, Interval
from dspark_jax.calibration_fit import GRID, fit_sequential_temperatures
from dspark_jax.model_files import require
from experiments.profile_steps import describe_device
from experiments.result_files import write_csv, write_json

FEWEST_ROUNDS = 20
FEWEST_SHARE = 0.005
"""Bins with fewer rounds, or a smaller share of them, are left out of the diagrams; the table has them."""

COLOURS = {"raw": "C7", "temperature_scaled": "C0", "isotonic": "C3"}

Choices = Mapping[int, CalibratorChoice]
"""By temperature of the sampler."""


def write_report(folder: Path, choices: Choices, summary: Mapping[str, Any]) -> None:
    """`metrics.csv`, `reliability.csv`, `reliability.png`, and `calibration.json` with `summary`; each whole or not at all."""
    write_json(folder / "calibration.json", {"device": describe_device(), **summary})
    metric_names = ("temperature", "position", "model", "metric", "value", "low", "high")
    write_csv(folder / "metrics.csv", [dict(zip(metric_names, row, strict=True)) for row in metric_rows(choices)])
    header = ("temperature", "position", "model", "bin_low", "bin_high", "rounds", "predicted", "observed")
    write_csv(folder / "reliability.csv", [dict(zip(header, row, strict=True)) for row in reliability_rows(choices)])
    plot_reliability(choices, folder / "reliability.png")


def metric_rows(choices: Choices) -> Iterator[tuple[Any, ...]]:
    """Every figure with its 95 % interval, position by position, then means over positions; empty where it is not defined."""
    for temperature, choice in choices.items():
        for name, scores in choice.scores.items():
            for metric, interval in scores.metrics.items():
                for place, figures in enumerate(_figures(interval)):
                    yield (temperature, place + 1, name, metric, *figures)
            for metric, interval in (("brier", scores.mean_brier), ("brier_minus_constant", scores.brier_over_constant)):
                yield (temperature, "mean", name, metric, *next(_figures(interval)))


def reliability_rows(choices: Choices) -> Iterator[tuple[Any, ...]]:
    """Every bin that holds a round."""
    for temperature, choice in choices.items():
        for name, scores in choice.scores.items():
            rounds, predicted, observed = _diagram(scores.reliability)
            for place, index in np.argwhere(rounds).tolist():
                edges = (_figure(index / rounds.shape[1]), _figure((index + 1) / rounds.shape[1]))
                held = (_figure(predicted[place, index]), _figure(observed[place, index]))
                yield (temperature, place + 1, name, *edges, int(rounds[place, index]), *held)


def plot_reliability(choices: Choices, path: Path) -> None:
    """Predicted against observed survival: a row per temperature, a column for each of some positions.

    The area of a point grows with its rounds; a constant predicts one number for all rounds, and is a cross.
    """
    block_size = len(next(iter(choices.values())).scores[CONSTANT].metrics["ece"].value)
    places = sorted({0, 1, block_size // 2, block_size - 1} & set(range(block_size)))
    figure = require("matplotlib.figure", "plots", "the diagrams of a calibration").Figure(
        figsize=(3.5 * len(places), 3.6 * len(choices)), layout="constrained"
    )
    panels = figure.subplots(len(choices), len(places), squeeze=False, sharex=True, sharey=True)
    for row, (temperature, choice) in zip(panels, choices.items(), strict=True):
        for axis, place in zip(row, places, strict=True):
            _draw_panel(axis, choice, place)
            axis.set_title(
                f"temperature {temperature}, drafts 1..{place + 1}" if place else f"temperature {temperature}, draft 1", fontsize=10
            )
        row[0].set_ylabel("observed survival")
    for axis in panels[-1]:
        axis.set_xlabel("predicted survival")
    figure.suptitle(
        f"Reliability on held-out answers, ECE in brackets; bins of at least {FEWEST_ROUNDS} rounds and {FEWEST_SHARE:.1%} of all",
        fontsize=11,
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    figure.savefig(unfinished, dpi=110, format="png")
    unfinished.replace(path)


def _draw_panel(axis: Any, choice: CalibratorChoice, place: int) -> None:
    axis.plot([0, 1], [0, 1], color="0.8", linewidth=1, zorder=0)
    for name, scores in choice.scores.items():
        rounds, predicted, observed = (values[place] for values in _diagram(scores.reliability))
        shown = rounds >= max(FEWEST_ROUNDS, FEWEST_SHARE * rounds.sum())
        label = f"{name.replace('_', ' ')}{' (kept)' if name == choice.name else ''} [{scores.metrics['ece'].value[place]:.3f}]"
        if name == CONSTANT:
            axis.scatter(predicted[shown], observed[shown], marker="x", s=60, color="black", zorder=3, label=label)
            continue
        colour = COLOURS.get(name, "C2")
        axis.plot(predicted[shown], observed[shown], color=colour, linewidth=1.2, label=label)
        axis.scatter(predicted[shown], observed[shown], s=3 + 120 * rounds[shown] / rounds.sum(), color=colour, alpha=0.7)
    axis.set(xlim=(-0.02, 1.02), ylim=(-0.02, 1.02), aspect="equal")
    axis.legend(fontsize=7, loc="upper left")


def _diagram(reliability: Any) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    return np.asarray(reliability.rounds), np.asarray(reliability.predicted), np.asarray(reliability.observed)


def _figures(interval: Interval) -> Iterator[tuple[float | str, ...]]:
    for ends in zip(interval.value, interval.low, interval.high, strict=True):
        yield tuple(_figure(number) for number in ends)


def _figure(number: float) -> float | str:
    return round(float(number), 6) if math.isfinite(number) else ""


@dataclasses.dataclass(frozen=True)
class CalibrationSpeed:
    """Time sequential temperature scaling on made-up rounds.

    Attributes:
      rounds, positions: size of the data.
      repetitions: timed runs, of which the median counts.
      out: JSON file to write.
    """

    rounds: int = 100_000
    positions: int = 15
    repetitions: int = 3
    out: Path = Path("experiments/results/calibration/speed.json")

    def __post_init__(self) -> None:
        for name in ("rounds", "positions", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are integers of at least 1")


def time_calibration(options: CalibrationSpeed, console: Console | None = None) -> dict[str, Any]:
    """Seconds of compiling the fit, and of a run of what was compiled."""
    rng = np.random.default_rng(0)
    logits = rng.normal(1.0, 1.5, (options.rounds, options.positions)).astype(np.float32)
    accepted = rng.random(logits.shape) < 1 / (1 + np.exp(-logits / 1.5))
    arguments = (jnp.asarray(logits), jnp.asarray(np.cumprod(accepted, axis=1), jnp.int32), jnp.asarray(GRID, jnp.float32))
    begin = time.perf_counter()
    compiled = fit_sequential_temperatures.lower(*arguments).compile()
    seconds_compile = time.perf_counter() - begin
    runs = []
    for _ in range(options.repetitions):
        begin = time.perf_counter()
        temperatures, _ = jax.block_until_ready(compiled(*arguments))
        runs.append(time.perf_counter() - begin)
    content = {
        "device": describe_device(),
        "rounds": options.rounds,
        "positions": options.positions,
        "candidates": len(GRID),
        "seconds_compile": round(seconds_compile, 3),
        "seconds": [round(seconds, 3) for seconds in runs],
        "seconds_median": round(median(runs), 3),
        "temperatures": [round(float(value), 2) for value in temperatures],
    }
    write_json(options.out, content)
    (console or Console()).print(
        f"{options.rounds} rounds x {options.positions} positions x {len(GRID)} candidates: compiled in {seconds_compile:.1f} s, "
        f"fitted in {median(runs):.1f} s (median of {options.repetitions}); wrote {options.out}"
    )
    return content
