"""How good is the schedule: every policy against the best fixed length chosen in hindsight, at every load and on many cost curves.

    python -m experiments.schedule_regret        # about 10 minutes on 2 cores, experiments/results/

Recorded blocks of the released drafter (`experiments.recorded_rounds`) are replayed for 1 to 512 concurrent requests. The fixed
lengths include 0, plain decoding, which pays for no drafter; all others pay for drafting and committing, and whoever leaves the
drafter out for a while for the later commit. Beside it: the sweep of static thresholds (the paper's Figure 5).
"""

import dataclasses
import functools
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import matplotlib
import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table as RichTable

from dspark_jax.protocols import SurvivalModel
from dspark_jax.schedule import (
    LARGE_BATCH,
    ConfidenceThreshold,
    FixedLength,
    FlatCurveWarning,
    PrefixSchedule,
    StepCurve,
    SurvivalThreshold,
)
from dspark_jax.weights import LoadedDrafter, load_drafter, load_target
from experiments.command_line import run_command
from experiments.profile_steps import RELEASED_DRAFTER
from experiments.recorded_rounds import RECORDED, load_recorded
from experiments.replay import (
    Alone,
    Capacity,
    Costs,
    CurveArrays,
    Forecast,
    Hindsight,
    Planned,
    ReplayPolicy,
    Rounds,
    Same,
    Table,
    replay,
    table_of,
    throughput,
)
from experiments.result_files import save_figure, write_csv
from experiments.step_curves import RoundCosts, buckets_of, load_curves

RESULTS = Path(__file__).resolve().parent / "results"
CURVES = RESULTS / "step_curves"
CONCURRENCY = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
ROUNDS = {1: 7000, 2: 8000, 4: 5000, 8: 3000, 16: 1600, 32: 800, 64: 500, 128: 300, 256: 200, 512: 150}
"""Rounds per concurrency: enough for a passage through all recorded texts several times over."""

THRESHOLDS = tuple(round(0.05 * step, 2) for step in range(20))
DEFAULT = "default"

FIELDS = (
    *("curve", "temperature", "concurrency", "policy", "relative_to_best_fixed", "relative_to_oracle", "relative_to_full_block"),
    *("best_fixed_length", "tokens_per_second", "mean_verified", "drafted_rounds"),
)


@dataclasses.dataclass(frozen=True)
class RegretOptions:
    """Command line.

    Attributes:
      recorded: file of `experiments.recorded_rounds`.
      drafter: folder of the drafter that was recorded, for its calibration.
      curves: folder of curve families; all of them are used.
      concurrency: numbers of requests.
      temperatures: of the recorded answers, 0 and 1.
      rounds_scale: share of the usual number of rounds, for a trial.
      out: folder for CSV and PNG files.
    """

    recorded: Path = RECORDED
    drafter: Path = RELEASED_DRAFTER
    curves: Path = CURVES
    concurrency: tuple[int, ...] = CONCURRENCY
    temperatures: tuple[int, ...] = (0, 1)
    rounds_scale: float = 1.0
    out: Path = RESULTS

    def __post_init__(self) -> None:
        unknown = [each for each in self.concurrency if each not in ROUNDS]
        if unknown or not self.concurrency:
            raise ValueError(f"concurrency is {self.concurrency}; allowed are some of {tuple(ROUNDS)}")
        if not self.curves.is_dir():
            raise ValueError(f"curves is {self.curves}; allowed is a folder of curve families")
        if not 0 < self.rounds_scale <= 1:
            raise ValueError(f"rounds_scale is {self.rounds_scale}; allowed are numbers above 0, up to 1")


def made_up(num_rows: int, block_size: int) -> dict[str, RoundCosts]:
    """Curves by formula; the step of few tokens takes about a second.

    smooth: waiting for memory up to about 64 tokens, computing from there on. staircase: a step per doubling. flat: all the same.
    linear: every token costs the same again, as on a device that is busy with one.
    """
    tokens = buckets_of(num_rows, block_size)
    count = np.array(tokens, float)
    doubled = 2 ** np.ceil(np.log2(count))
    families = {
        "smooth": (np.hypot(1, count / 64), 0.12 * np.hypot(1, num_rows / 64)),
        "staircase": (1 + doubled / 32, 0.12 * (1 + num_rows / 32)),
        "flat": (np.ones(len(tokens)) * (1 + 1e-6 * count), 0.1),
        "linear": (0.2 + count / 8, 0.1 * num_rows / 8),
    }
    with warnings.catch_warnings():
        # One of them is meant to be flat.
        warnings.simplefilter("ignore", FlatCurveWarning)
        return {
            name: RoundCosts(
                num_rows,
                StepCurve(tokens, tuple(seconds.tolist()), float(drafting)),
                StepCurve(tokens[:1], (float(seconds[0]),), float(0.03 * drafting)),
                float(0.24 * drafting),
            )
            for name, (seconds, drafting) in families.items()
        }


def curves_at(folder: Path | None, num_rows: int, block_size: int) -> tuple[list[str], Costs]:
    """Names and costs of all curves for so many requests: those of the folder if there is one, and the made-up ones."""
    found: dict[str, RoundCosts] = {}
    for path in sorted(folder.glob("*.json")) if folder is not None else ():
        known = load_curves(path)
        if num_rows in known:
            found[path.stem] = known[num_rows]
    found |= made_up(num_rows, block_size)
    # One place per fixed length, so that none is charged for a bucket that the others have no use for.
    tokens = sorted({*buckets_of(num_rows, block_size), *(num_rows * (1 + length) for length in range(block_size + 1))})
    arrays = [Costs(CurveArrays.of(each.curve, tokens), CurveArrays.of(each.undrafted, (num_rows,))) for each in found.values()]
    return list(found), jax.tree.map(lambda *leaves: jnp.stack(leaves), *arrays)


@functools.cache
def fixed(length: int) -> ReplayPolicy:
    """A fixed length; 0 is plain decoding."""
    return Alone(Same(FixedLength(length)))


def policies(continuation: tuple[float, ...], num_rows: int) -> dict[str, ReplayPolicy]:
    """The policies that are compared, by name. The default is that of `schedule.default_schedule`."""
    constants = tuple(np.cumprod(continuation).tolist())
    forecast, capacity = Forecast(continuation), Capacity(constants)
    return {
        "threshold_0.5": Alone(Same(ConfidenceThreshold(0.5))),
        "survival_0.3": Alone(Same(SurvivalThreshold(0.3))),
        "algorithm_1": Alone(PrefixSchedule),
        "forecast_stop": Alone(forecast),
        "capacity_top_k": Alone(capacity),
        DEFAULT: Planned(capacity if num_rows >= LARGE_BATCH else forecast, constants),
        "oracle": Hindsight(),
    }


def survival_of(loaded: LoadedDrafter, temperature: int) -> tuple[SurvivalModel, tuple[float, ...]]:
    """The calibration stored with the drafter, and the usual chance per position that a draft is accepted."""
    stored = (loaded.survival or {}).get("continuation", {})
    if str(float(temperature)) not in stored:
        raise ValueError(f"drafter has continuation for {sorted(stored)}; a replay at temperature {temperature} needs its own")
    return loaded.survival_model(), tuple(stored[str(float(temperature))])


def rows_of(names: Sequence[str], temperature: int, num_rows: int, runs: Mapping[str, Rounds], block_size: int) -> list[dict[str, Any]]:
    """CSV rows of one temperature and concurrency."""
    rates = {name: throughput(rounds) for name, rounds in runs.items()}
    lengths = np.stack([rates[f"fixed_{length}"] for length in range(block_size + 1)])
    rows = []
    for place, curve in enumerate(names):
        for name, rounds in runs.items():
            rate, took_part = rates[name][place], np.asarray(rounds.tokens)[place] > 0
            values = (
                *(curve, temperature, num_rows, name, rate / lengths[:, place].max(), rate / rates["oracle"][place]),
                *(rate / lengths[-1, place], int(lengths[:, place].argmax()), rate),
                float(np.asarray(rounds.verified)[place][took_part].mean() / num_rows),
                float(np.asarray(rounds.runs)[place][took_part].mean()),
            )
            rows.append(dict(zip(FIELDS, values, strict=True)))
    return rows


def compare(options: RegretOptions, tables: Mapping[int, tuple[Table, tuple[float, ...]]], progress: Progress) -> list[dict[str, Any]]:
    """All rows: every policy on every curve at every load."""
    block_size = next(iter(tables.values()))[0].survival.shape[2]
    names = [*(f"fixed_{length}" for length in range(block_size + 1)), *policies((0.5,) * block_size, 1)]
    task = progress.add_task("replaying", total=len(options.temperatures) * len(options.concurrency) * len(names))
    rows = []
    for num_rows in options.concurrency:
        curve_names, curves = curves_at(options.curves, num_rows, block_size)
        num_rounds = max(20, round(ROUNDS[num_rows] * options.rounds_scale))
        # Alone, a request reads all texts once and stops: every policy writes the very same tokens.
        passes = 1 if num_rows == 1 and options.rounds_scale == 1 else 0
        for temperature in options.temperatures:
            table, continuation = tables[temperature]
            runs: dict[str, Rounds] = {}
            for name, policy in {
                **{f"fixed_{length}": fixed(length) for length in range(block_size + 1)},
                **policies(continuation, num_rows),
            }.items():
                runs[name] = jax.device_get(replay(policy, curves, table, num_rows, num_rounds, passes))
                progress.advance(task)
            rows += rows_of(curve_names, temperature, num_rows, runs, block_size)
    return rows


def sweep(tables: Mapping[int, tuple[Table, tuple[float, ...]]], num_rounds: int) -> list[dict[str, Any]]:
    """The paper's Figure 5: verified tokens and what becomes of them under static thresholds, per step and cumulative."""
    rows = []
    for temperature, (table, _) in tables.items():
        # Costs play no part in a threshold's decisions.
        _, curves = curves_at(None, 1, table.survival.shape[2])
        curves = jax.tree.map(lambda leaf: leaf[:1], curves)
        for name, rule in (("per step", ConfidenceThreshold), ("cumulative", SurvivalThreshold)):
            for threshold in THRESHOLDS:
                rounds = jax.device_get(replay(Alone(Same(rule(threshold))), curves, table, 1, num_rounds, 1))
                took_part = rounds.tokens[0] > 0
                verified, emitted = rounds.verified[0][took_part], rounds.emitted[0][took_part]
                accepted = (emitted - 1).sum()
                rows.append(
                    {
                        "temperature": temperature,
                        "rule": name,
                        "threshold": threshold,
                        "mean_verified": float(verified.mean()),
                        "accepted_length": float(emitted.mean()),
                        "acceptance_rate": float(accepted / max(verified.sum(), 1)),
                    }
                )
    return rows


def rounded(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Numbers with six digits, as they are written."""
    return [{name: f"{value:.6g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows]


def plot_regret(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Throughput relative to the best fixed length against concurrency: a panel per curve and temperature."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 behind the choice of the backend

    curves, temperatures = list(dict.fromkeys(row["curve"] for row in rows)), sorted({row["temperature"] for row in rows})
    shown = ["fixed_0", "fixed_7", "threshold_0.5", "algorithm_1", "forecast_stop", "capacity_top_k", DEFAULT, "oracle"]
    grid: Any = plt.subplots(len(temperatures), len(curves), figsize=(3 * len(curves), 3.2 * len(temperatures)), sharey=True, squeeze=False)
    figure, axes = grid
    for (row, temperature), (column, curve) in ((a, b) for a in enumerate(temperatures) for b in enumerate(curves)):
        axis = axes[row][column]
        for name in shown:
            points = [r for r in rows if r["curve"] == curve and r["temperature"] == temperature and r["policy"] == name]
            style = {"color": "black", "linewidth": 2} if name == DEFAULT else {"linewidth": 1, "alpha": 0.8}
            axis.plot([p["concurrency"] for p in points], [p["relative_to_best_fixed"] for p in points], label=name, **style)
        axis.axhline(0.99, color="grey", linewidth=0.6, linestyle=":")
        axis.set_xscale("log", base=2)
        axis.set_ylim(0.5, 1.4)
        axis.set_title(f"{curve}, temperature {temperature}", fontsize=9)
        if row == len(temperatures) - 1:
            axis.set_xlabel("concurrent requests")
        if column == 0:
            axis.set_ylabel("throughput / best fixed length")
    axes[0][0].legend(fontsize=6)
    figure.tight_layout()
    save_figure(figure, path)
    plt.close(figure)


def plot_sweep(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Acceptance rate and accepted length against verified drafts, along the thresholds."""
    matplotlib.use("Agg")
    from matplotlib import pyplot as plt  # noqa: PLC0415 behind the choice of the backend

    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8))
    for temperature, rule in dict.fromkeys((row["temperature"], row["rule"]) for row in rows):
        points = [row for row in rows if (row["temperature"], row["rule"]) == (temperature, rule)]
        label, line = f"temperature {temperature}, {rule}", "-" if rule == "cumulative" else "--"
        for axis, x, y in (
            (axes[0], "threshold", "acceptance_rate"),
            (axes[1], "threshold", "mean_verified"),
            (axes[2], "mean_verified", "accepted_length"),
        ):
            axis.plot([p[x] for p in points], [p[y] for p in points], line, color=f"C{temperature}", marker=".", label=label)
            axis.set_xlabel(x.replace("_", " "))
            axis.set_ylabel(y.replace("_", " "))
    axes[0].legend(fontsize=7)
    figure.tight_layout()
    save_figure(figure, path)
    plt.close(figure)


def summarise(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Per curve, temperature and policy: the lowest and highest throughput relative to the best fixed length, and that at full load."""
    found = []
    for curve, temperature, policy in dict.fromkeys((row["curve"], row["temperature"], row["policy"]) for row in rows):
        mine = [row for row in rows if (row["curve"], row["temperature"], row["policy"]) == (curve, temperature, policy)]
        lowest, highest = (pick(mine, key=lambda row: row["relative_to_best_fixed"]) for pick in (min, max))
        busiest = max(mine, key=lambda row: row["concurrency"])
        found.append(
            {
                "curve": curve,
                "temperature": temperature,
                "policy": policy,
                "lowest": lowest["relative_to_best_fixed"],
                "lowest_at": lowest["concurrency"],
                "highest": highest["relative_to_best_fixed"],
                "highest_at": highest["concurrency"],
                "full_load": busiest["concurrency"],
                "relative_to_full_block_at_full_load": busiest["relative_to_full_block"],
            }
        )
    return found


def show(summary: Sequence[Mapping[str, Any]]) -> RichTable:
    """The lowest throughput of every policy, and the default's gain over full blocks at full load."""
    names = [name for name in dict.fromkeys(row["policy"] for row in summary) if not name.startswith("fixed")]
    table = RichTable("curve", "T", *names, "gain", title="lowest throughput over all loads, relative to the best fixed length")
    for curve, temperature in dict.fromkeys((row["curve"], row["temperature"]) for row in summary):
        mine = {row["policy"]: row for row in summary if (row["curve"], row["temperature"]) == (curve, temperature)}
        gain = mine[DEFAULT]["relative_to_full_block_at_full_load"]
        table.add_row(curve, str(temperature), *(f"{mine[name]['lowest']:.3f}" for name in names), f"{gain:.2f}")
    return table


def run(options: RegretOptions, console: Console) -> list[dict[str, Any]]:
    """Replay, write CSV and PNG files, and show a summary."""
    target, _ = load_target("smollm2")
    loaded = load_drafter(options.drafter, target.spec)
    tables = {}
    for temperature in options.temperatures:
        model, continuation = survival_of(loaded, temperature)
        tables[temperature] = (table_of(load_recorded(options.recorded, temperature), model, float(temperature)), continuation)
    with Progress(console=console) as progress:
        rows = compare(options, tables, progress)
    write_csv(options.out / "schedule_regret.csv", rounded(rows))
    plot_regret(rows, options.out / "schedule_regret.png")
    swept = sweep(tables, max(20, round(ROUNDS[1] * options.rounds_scale)))
    write_csv(options.out / "threshold_sweep.csv", rounded(swept))
    plot_sweep(swept, options.out / "threshold_sweep.png")
    summary = summarise(rows)
    write_csv(options.out / "schedule_regret_summary.csv", rounded(summary))
    console.print(show(summary))
    console.print("gain: the default's throughput over that of full blocks at the highest load")
    console.print(f"wrote {options.out}")
    return rows


if __name__ == "__main__":
    sys.exit(run_command(RegretOptions, run))
