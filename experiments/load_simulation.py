"""Serving under load, simulated: the engine's own loop and policies on a virtual clock, up to 512 requests at a time.

    python -m experiments.load_simulation                              # the released drafter on the CPU's measured curves
    python -m experiments.load_simulation --setting paper              # 5 drafts against MTP-1, Qwen3-8B on an H200 by a roofline
    python -m experiments.load_simulation --curves experiments/results/step_curves/tpu_v5e.json --arrival-rates 20 80 320
    python -m experiments.load_simulation --validate experiments/results/load_curve.csv

A round takes what a cost curve says, and accepts what is on record; no model runs. Closed loops hold so many requests at all times,
and arrivals come at random times at a rate. `--validate` simulates the rows of a measured load curve on the measured family, as
`experiments.load_curve` serves them, and writes how far off each figure is. Results land in `experiments/results/serving/`.
"""

import csv
import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table as RichTable

from experiments.command_line import run_command
from experiments.load_frontier import gains, plot_load
from experiments.load_settings import MTP, PaperSetting, RecordedSetting, Setting
from experiments.profile_steps import RELEASED_DRAFTER
from experiments.recorded_rounds import RECORDED
from experiments.result_files import write_csv
from experiments.serving_policies import SCHEDULER
from experiments.simulated_load import ClosedLoop, Load, LoadResult, PoissonArrivals, engine_of, simulate
from experiments.step_curves import ROWS, write_family
from experiments.step_timing import SLOTS_AHEAD

RESULTS = Path(__file__).resolve().parent / "results"
COMPARED = ("throughput", "per_user", "mean_verified", "accepted_length")
"""Figures that a measured load curve has as well."""

ERRORS_SHOWN = ("policy", "concurrency", "throughput_measured", "throughput_simulated", "throughput_error", "per_user_error")
SHOWN = ("policy", "concurrency", "arrival_rate", *COMPARED, "time_to_first_token_p95")

WARM_UP_SHARE = 0.2
"""Of the arrivals at random times, the first of which meet an empty engine."""


@dataclasses.dataclass(frozen=True)
class SimulationOptions:
    """Command line.

    Attributes:
      setting: "recorded": blocks of the released drafter on `curves`; "paper": see `load_settings.PaperSetting`.
      curves: family of cost curves.
      recorded: file of `experiments.recorded_rounds`.
      drafter: folder of the drafter that was recorded, for its calibration.
      temperature: of the recorded answers, 0 or 1.
      policies: plain, fixed_N, scheduler, and in the paper's setting mtp_1; none: those that the setting compares.
      concurrency: numbers of requests of the closed loops.
      arrival_rates: requests a second.
      arrivals: requests of a run at a rate.
      requests: that are counted in a closed loop, at least; and twice its concurrency.
      budgets: least and most tokens of an answer; none: as recorded.
      prefill_chunk: tokens of a prompt that are read at once.
      validate: a measured load curve, CSV.
      slots: tokens of a request that it was measured with; every one of them is read.
      out: folder of the results.
    """

    setting: Literal["recorded", "paper"] = "recorded"
    curves: Path = RESULTS / "step_curves" / "cpu.json"
    recorded: Path = RECORDED
    drafter: Path = RELEASED_DRAFTER
    temperature: int = 0
    policies: tuple[str, ...] = ()
    concurrency: tuple[int, ...] = ROWS
    arrival_rates: tuple[float, ...] = ()
    arrivals: int = 600
    requests: int = 64
    budgets: tuple[int, int] | None = None
    prefill_chunk: int = 64
    validate: Path | None = None
    slots: int = 256
    seed: int = 0
    out: Path = RESULTS / "serving"

    def __post_init__(self) -> None:
        if not self.concurrency or min(self.concurrency) < 1:
            raise ValueError(f"concurrency is {self.concurrency}; allowed are positive integers, at least one")
        if any(not rate > 0 for rate in self.arrival_rates):
            raise ValueError(f"arrival_rates is {self.arrival_rates}; allowed are requests a second above 0")
        for field in ("requests", "arrivals", "prefill_chunk", "slots"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.validate is not None and not self.validate.is_file():
            raise ValueError(f"validate is {self.validate}; allowed is an existing CSV file")

    def made(self) -> Setting:
        """The setting."""
        if self.setting == "paper":
            return PaperSetting.make(seed=self.seed)
        return RecordedSetting.read(self.curves, self.recorded, self.drafter, self.temperature, self.prefill_chunk)


def closed_loop(setting: Setting, policy: str, concurrency: int, options: SimulationOptions, *shape: Any) -> LoadResult:
    """A policy with so many requests at all times.

    Args:
      shape: rows and slots of the batch, where they are not to change.
    """
    serving, counted = setting.serving(policy), max(options.requests, 2 * concurrency)
    rows, slots = shape if shape else (None, None)
    engine, device = engine_of(serving, concurrency, _chunk(setting, options), slots, options.seed, rows)
    load = Load(ClosedLoop(concurrency), concurrency, counted + 2 * concurrency, options.budgets, options.seed)
    return simulate(engine, device, serving.table, load)


def at_rate(setting: Setting, policy: str, rate: float, options: SimulationOptions) -> LoadResult:
    """A policy with requests at random times."""
    serving = setting.serving(policy)
    engine, device = engine_of(serving, max(options.concurrency), _chunk(setting, options), None, options.seed)
    arrivals = PoissonArrivals.at_rate(rate, options.arrivals, options.seed)
    load = Load(arrivals, int(WARM_UP_SHARE * options.arrivals), options.arrivals, options.budgets, options.seed, to_the_end=True)
    return simulate(engine, device, serving.table, load)


def _chunk(setting: Setting, options: SimulationOptions) -> int:
    # Where other devices read, a prompt is there in one piece.
    return 2**20 if isinstance(setting, PaperSetting) else options.prefill_chunk


def row_of(policy: str, result: LoadResult, concurrency: int | str = "", rate: float | str = "") -> dict[str, Any]:
    """A CSV row; what did not take place is empty."""
    figures = ("time_to_first_token_p50", "time_to_first_token_p95", "mean_requests", "drafted_rounds", "seconds", "rounds")
    row: dict[str, Any] = {"policy": policy, "concurrency": concurrency, "arrival_rate": rate}
    return row | {name: getattr(result, name) for name in (*COMPARED, *figures)}


def simulate_all(setting: Setting, options: SimulationOptions, console: Console) -> list[dict[str, Any]]:
    """A row for every policy and load; says what it took."""
    policies = options.policies or setting.policies
    runs: list[tuple[dict[str, Any], Callable[[], LoadResult]]] = []
    for policy in policies:
        for size in options.concurrency:
            runs.append(({"policy": policy, "concurrency": size}, functools.partial(closed_loop, setting, policy, size, options)))
        for rate in options.arrival_rates:
            runs.append(({"policy": policy, "rate": rate}, functools.partial(at_rate, setting, policy, rate, options)))
    rows, simulated, real, rounds = [], 0.0, 0.0, 0
    with _bar(console) as progress:
        task = progress.add_task(f"simulating {setting.name}", total=len(runs))
        for names, run_it in runs:
            result = run_it()
            rows.append(row_of(result=result, **names))
            simulated, real, rounds = simulated + result.seconds, real + result.real_seconds, rounds + result.rounds
            progress.advance(task)
    console.print(f"{simulated:.0f} s simulated in {real:.0f} s: {rounds} rounds, {1e3 * real / rounds:.2f} ms each", highlight=False)
    return rows


def validation(options: SimulationOptions, console: Console) -> list[dict[str, Any]]:
    """A row for every one of the measured load curve: what was measured, what is simulated, and the relative error.

    Raises:
      ValueError: a column is missing, or a policy or concurrency cannot be simulated.
    """
    assert options.validate is not None
    with options.validate.open(encoding="utf-8") as file:
        measured = list(csv.DictReader(file))
    for name in ("policy", "concurrency", *COMPARED):
        if not measured or name not in measured[0]:
            raise ValueError(
                f"validate is {options.validate}; allowed is a CSV file with rows and the columns policy, concurrency, {COMPARED}"
            )
    setting = RecordedSetting.read(
        options.curves, options.recorded, options.drafter, options.temperature, options.prefill_chunk, SLOTS_AHEAD
    )
    options = options if options.budgets is not None else dataclasses.replace(options, budgets=(32, 96))
    assert options.budgets is not None
    setting = setting.without_long_prompts(options.slots - options.budgets[1])
    rows = []
    with _bar(console) as progress:
        task = progress.add_task("simulating what was measured", total=len(measured))
        for given in measured:
            size = int(given["concurrency"])
            result = closed_loop(setting, given["policy"], size, options, (size,), (options.slots,))
            row: dict[str, Any] = {"policy": given["policy"], "concurrency": size}
            for name in COMPARED:
                was, now = float(given[name]), float(getattr(result, name))
                row |= {f"{name}_measured": was, f"{name}_simulated": now, f"{name}_error": now / was - 1 if was else now - was}
            rows.append(row)
            progress.advance(task)
    return rows


def _bar(console: Console) -> Progress:
    return Progress(TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), console=console)


def rounded(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Numbers with five digits, as they are written."""
    return [{name: f"{value:.5g}" if isinstance(value, float) else value for name, value in row.items()} for row in rows]


def show(rows: Sequence[Mapping[str, Any]], title: str, columns: Sequence[str] = ()) -> RichTable:
    """Rows as a table, some columns of them or all."""
    columns = columns or list(rows[0])
    table = RichTable(*columns, title=title)
    for row in rows:
        table.add_row(*(f"{row[name]:.4g}" if isinstance(row[name], float) else str(row[name]) for name in columns))
    return table


def run(options: SimulationOptions, console: Console) -> list[dict[str, Any]]:
    """Simulate, write CSV and PNG files whole, and show the rows."""
    if options.validate is not None:
        rows = validation(options, console)
        write_csv(options.out / "validation.csv", rounded(rows))
        console.print(show(rows, "tokens a second, measured and simulated", ERRORS_SHOWN))
        return rows
    setting = options.made()
    rows = simulate_all(setting, options, console)
    write_csv(options.out / f"{setting.name}.csv", rounded(rows))
    paper = isinstance(setting, PaperSetting)
    plot_load(rows, options.out / f"{setting.name}.png", f"simulated: {setting.name}", paper)
    console.print(show(rows, setting.name, SHOWN))
    over = MTP if paper else "fixed_1"
    if {SCHEDULER, over} <= {row["policy"] for row in rows}:
        compared = gains(rows, SCHEDULER, over)
        write_csv(options.out / f"{setting.name}_gains.csv", rounded(compared))
        console.print(show(compared, f"{SCHEDULER} against {over}"))
    if isinstance(setting, PaperSetting):
        for policy in (SCHEDULER, MTP):
            write_family(options.out, setting.family(policy))
    console.print(f"wrote {options.out}")
    return rows


if __name__ == "__main__":
    sys.exit(run_command(SimulationOptions, run))
