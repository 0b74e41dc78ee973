"""Serving under load, measured: throughput, speed of each user and verified drafts against the number of users, for every policy.

    python -m experiments.load_curve                       # closed loops of 1 to 64 users, about 45 minutes on 2 cores
    python -m experiments.load_curve --concurrency 1 8 --window 4 --windows 3
    python -m experiments.load_curve --arrival-rates 0.5 1 # requests at random times as well

All engines of a number of users live in one process, and windows of serving take turns: plain, one draft, fixed lengths, the
scheduler, again and again. Comparisons are of windows side by side, and their intervals come from drawing turns with replacement.
Needs no data beyond the package of the model. Results land in `experiments/results/` as each number of users is done; what is there
already is not measured again unless `--again`.
"""

import dataclasses
import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from dspark_jax.engine import EngineConfig
from experiments.command_line import run_command
from experiments.load_frontier import plot_load
from experiments.load_report import findings, read_rows
from experiments.profile_steps import RELEASED_DRAFTER, describe_device
from experiments.result_files import write_csv, write_json
from experiments.serving_load import ClosedLoop, Window, asks, serve_arrivals
from experiments.serving_policies import BASELINE, PLAIN, POLICIES, SCHEDULER, Models, load_models, serving_engine

RESULTS = Path(__file__).resolve().parent / "results"
LEVEL = 0.95


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """Command line.

    Attributes:
      target, drafter: names or folders.
      curves: family of cost curves that the scheduler goes by.
      policies: of `serving_policies.POLICIES`.
      concurrency: numbers of users.
      arrival_rates: requests a second, for runs at random times; the most rows are then the largest concurrency.
      arrivals: requests of such a run.
      arrival_policies: those that serve them.
      temperature: of all requests.
      budgets: least and most tokens of an answer.
      slots: tokens of a request, prompt and answer.
      window: seconds of a turn; it ends with a round.
      windows: turns of every policy.
      again: whether to measure what the results have already.
      out: folder of the results.
    """

    target: str = "smollm2"
    drafter: str = str(RELEASED_DRAFTER)
    curves: Path = RESULTS / "step_curves" / "cpu.json"
    policies: tuple[str, ...] = POLICIES
    concurrency: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    arrival_rates: tuple[float, ...] = ()
    arrivals: int = 48
    arrival_policies: tuple[str, ...] = (PLAIN, BASELINE, SCHEDULER)
    temperature: float = 0.0
    budgets: tuple[int, int] = (32, 96)
    slots: int = 256
    window: float = 6.0
    windows: int = 10
    seed: int = 0
    again: bool = False
    out: Path = RESULTS

    def __post_init__(self) -> None:
        for field in ("policies", "arrival_policies"):
            for policy in getattr(self, field):
                if policy not in POLICIES:
                    raise ValueError(f"{field} holds {policy!r}; allowed: {', '.join(POLICIES)}")
        if not self.concurrency or min(self.concurrency) < 1:
            raise ValueError(f"concurrency is {self.concurrency}; allowed are positive integers")
        if not 1 <= self.budgets[0] <= self.budgets[1] < self.slots:
            raise ValueError(f"budgets is {self.budgets}; allowed are two integers, ascending, from 1 to slots - 1 ({self.slots - 1})")
        for field in ("windows", "arrivals"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if not self.window > 0 or any(not rate > 0 for rate in self.arrival_rates):
            raise ValueError(f"window is {self.window} and arrival_rates {self.arrival_rates}; allowed are positive numbers")


def measure(options: LoadOptions, models: Models, users: int, console: Console) -> dict[str, list[Window]]:
    """Windows of every policy at a number of users, in turns."""
    config = EngineConfig(row_ladder=(users,), slot_ladder=(options.slots,), queue_limit=2 * users)
    loops = {}
    for policy in options.policies:
        console.print(f"{users} users: compiling {policy}")
        engine = serving_engine(policy, models, config, options.temperature, console)
        workload = asks(models.tokenizer, options.temperature, options.seed, options.budgets, options.slots - options.budgets[1])
        loops[policy] = ClosedLoop(engine, workload, users, options.seed)
    windows: dict[str, list[Window]] = {policy: [] for policy in loops}
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task(f"{users} users", total=len(loops) * (options.windows + 1))
        for turn in range(options.windows + 1):
            # Who goes after whom changes from turn to turn.
            order = list(loops)
            for policy in order[turn % len(order) :] + order[: turn % len(order)]:
                if turn == 0:
                    loops[policy].fill()
                else:
                    windows[policy].append(loops[policy].window(options.window))
                progress.advance(bar)
    return windows


def row_of(policy: str, users: int, windows: Mapping[str, Sequence[Window]], seed: int = 0) -> dict[str, Any]:
    """Figures of a policy, and its throughput over that of plain decoding and of one draft with intervals."""
    own = windows[policy]
    row: dict[str, Any] = {
        "policy": policy,
        "concurrency": users,
        "throughput": _rate(own),
        "per_user": sum(each.emitted - each.first for each in own) / sum(each.request_seconds for each in own),
        "mean_verified": sum(each.verified for each in own) / sum(each.rounds for each in own),
        "accepted_length": sum(each.emitted - each.first for each in own) / sum(each.rounds for each in own),
    }
    for name in (PLAIN, BASELINE):
        ratio, low, high = _paired(own, windows[name], seed) if name in windows else (None, None, None)
        row |= {f"over_{name}": ratio, f"over_{name}_low": low, f"over_{name}_high": high}
    return row | {"host_share": sum(each.host_seconds for each in own) / sum(each.seconds for each in own)}


def _rate(windows: Sequence[Window]) -> float:
    return sum(each.emitted for each in windows) / sum(each.seconds for each in windows)


def _paired(own: Sequence[Window], other: Sequence[Window], seed: int, draws: int = 2000) -> tuple[float, float, float]:
    """Ratio of two throughputs, and its bootstrap interval over turns."""
    turns = np.random.default_rng(seed).integers(0, len(own), (draws, len(own)))

    def rates(windows: Sequence[Window]) -> np.ndarray:
        emitted, seconds = (np.array([getattr(each, field) for each in windows], float)[turns].sum(1) for field in ("emitted", "seconds"))
        return emitted / seconds

    low, high = np.quantile(rates(own) / rates(other), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return _rate(own) / _rate(other), float(low), float(high)


def run(options: LoadOptions, console: Console) -> None:
    """Measure what is not there yet; every file is written whole after each number of users."""
    models = load_models(options.target, options.drafter, options.curves)
    note_file = options.out / "load_curve.json"
    rows = [] if options.again else read_rows(options.out / "load_curve.csv")
    if rows and note_file.is_file() and json.loads(note_file.read_text())["options"] != as_plain(options):
        raise ValueError(f"out is {options.out}, which holds a load curve of other options; --again measures it anew")
    for users in options.concurrency:
        if any(row["concurrency"] == users for row in rows):
            console.print(f"{users} users: there already")
            continue
        windows = measure(options, models, users, console)
        rows += [row_of(policy, users, windows, options.seed) for policy in options.policies]
        rows.sort(key=lambda row: (row["concurrency"], POLICIES.index(str(row["policy"]))))
        save(rows, options)
    save(rows, options)
    show(rows, console)
    if options.arrival_rates:
        write_csv(options.out / "load_arrivals.csv", measure_arrivals(options, models, console))


def save(rows: Sequence[Mapping[str, Any]], options: LoadOptions) -> None:
    """The table, what it says of the goals, and the figure."""
    write_csv(options.out / "load_curve.csv", rows)
    note = {"device": describe_device(), "options": as_plain(options), **findings(rows)}
    write_json(options.out / "load_curve.json", note)
    plot_load(rows, options.out / "load_curve.png", "measured")


def measure_arrivals(options: LoadOptions, models: Models, console: Console) -> list[dict[str, Any]]:
    """A row per policy and rate."""
    ladder = tuple(sorted(options.concurrency))
    config = EngineConfig(row_ladder=ladder, slot_ladder=(options.slots,), queue_limit=options.arrivals)
    rows = []
    for policy in options.arrival_policies:
        engine = serving_engine(policy, models, config, options.temperature, console)
        for rate in options.arrival_rates:
            workload = asks(models.tokenizer, options.temperature, options.seed, options.budgets, options.slots - options.budgets[1])
            found = serve_arrivals(engine, workload, rate, options.arrivals, options.seed)
            median, late = found.first_token
            row = {"policy": policy, "arrival_rate": rate, "throughput": found.throughput, "per_user": found.per_user}
            row |= {"first_token_median": median, "first_token_95": late}
            rows.append(row | {"mean_verified": found.mean_verified, "accepted_length": found.accepted_length})
            console.print(row)
    return rows


def as_plain(options: LoadOptions) -> dict[str, Any]:
    """The options as JSON takes them, without places on this machine."""
    content = dataclasses.asdict(options)
    varying = ("out", "again", "curves", "drafter", "concurrency", "arrival_rates", "arrivals", "arrival_policies")
    # As JSON gives it back.
    content = {name: list(value) if isinstance(value, tuple) else value for name, value in content.items() if name not in varying}
    return content | {
        "curves": options.curves.stem,
        "drafter": Path(options.drafter).name,
    }


def show(rows: Sequence[Mapping[str, Any]], console: Console) -> None:
    """The table."""
    table = Table(title="tokens a second, of all users and of each")
    for column in ("users", "policy", "all", "each", "verified", "accepted", "over plain", f"over {BASELINE}"):
        table.add_column(column, justify="left" if column == "policy" else "right")
    for row in rows:
        ratios = [_interval(*(row[f"over_{name}{end}"] for end in ("", "_low", "_high"))) for name in (PLAIN, BASELINE)]
        figures = [f"{row[name]:.2f}" for name in ("throughput", "per_user", "mean_verified", "accepted_length")]
        table.add_row(str(row["concurrency"]), str(row["policy"]), *figures, *ratios)
    console.print(table)


def _interval(ratio: float | None, low: float, high: float) -> str:
    return "-" if ratio is None else f"{ratio:.2f} ({low:.2f} to {high:.2f})"


if __name__ == "__main__":
    sys.exit(run_command(LoadOptions, run))
