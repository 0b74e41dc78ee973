"""Drafters that a sweep trained on SmolLM2 at equal budgets: budgets, accepted length by domain, and ratios answer by answer.

    python -m experiments.rivals_report --records out/sweeps --to out/rivals      # a second
    python -m experiments.rivals_report --page experiments/results/rivals.md      # of the committed records

All cells of a sweep walk along the same held-out answers, so that the ratio of two of them has an interval over these answers. With
several seeds an answer counts with what all seeds emitted on it: intervals are of answers, not of seeds. Any sweep of
`experiments/ablations.py` on SmolLM2 can be given; its first cell is compared with each of the others.

Where `python -m experiments.benchmark --no-decode --out RECORDS` has timed these drafters, under the names of the tables, their speeds
stand beside.
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.ablations import chosen_sweep
from experiments.benchmark_records import ALL, Measured
from experiments.benchmark_report import speed_columns, speed_table
from experiments.command_line import run_command
from experiments.held_out import TEMPERATURES
from experiments.held_out_report import rows_of, tables_of
from experiments.result_files import write_csv
from experiments.result_tables import TextTable, number, write_marked
from experiments.sweep import SEED, finished_cells
from experiments.sweep_report import summed_answers

MARKER = "rivals"

NAMES: Mapping[str, str] = {
    "dspark": "DSpark",
    "dflash": "DFlash, cross-entropy alone",
    "no_heads": "DFlash, DSpark's loss",
    "eagle3": "Eagle3",
    "mtp": "MTP-1",
    "dspark_rnn": "DSpark, recurrent head",
    "dspark_gated": "DSpark, gated head",
}
"""What cells of `small_rivals` and `smollm2_rivals` are called in tables."""


@dataclasses.dataclass(frozen=True)
class RivalsOptions:
    """Command line.

    Attributes:
      sweep: a sweep on SmolLM2.
      seeds, only, set: as they were given to the sweep.
      records: folder of its records.
      to: folder of the CSV files, `results.csv` with the columns of the benchmark's among them; None: beside the records.
      page: file with the markers `<!-- rivals -->`; None: no page.
    """

    sweep: str = "small_rivals"
    seeds: tuple[int, ...] = ()
    only: tuple[str, ...] = ()
    set: tuple[str, ...] = ()
    records: Path = Path("experiments/results/rivals")
    to: Path | None = None
    page: Path | None = None


def name_of(axes: Mapping[str, Any]) -> str:
    """What a cell is called, whatever its seed."""
    values = [str(value) for name, value in axes.items() if name != SEED]
    return ", ".join(NAMES.get(value, value) for value in values)


def readings_of(records: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The answers of all cells in the records of `held_out_report`: a drafter's sums over its seeds on each answer."""
    cells: dict[str, list[Mapping[str, Any]]] = {}
    for record in records:
        cells.setdefault(name_of(record["axes"]), []).append(record["result"])
    part = f"first {records[0]['config']['first_tokens']} tokens" if records else ""
    return [
        {"drafter": drafter, "domain": domain, "temperature": int(temperature), "row": row, part: {"emitted": emitted, "rounds": rounds}}
        for drafter, results in cells.items()
        for name, temperature in TEMPERATURES.items()
        for domain, sums in summed_answers(results, f"answers_{name}").items()
        for row, (emitted, rounds) in sums.items()
    ]


def budget_table(records: Sequence[Mapping[str, Any]]) -> TextTable:
    """What every drafter was given: steps, anchors, parameters, seeds, and how long its steps took."""
    rows = {}
    for record in records:
        result, name = record["result"], name_of(record["axes"])
        seeds = sum(name_of(other["axes"]) == name for other in records)
        counted = (f"{result['steps']:,}", f"{result['anchors']:,}", number(result["parameters"] / 1e6))
        rows[name] = (name, *counted, str(seeds), number(result["seconds_per_step"]))
    header = ("drafter", "steps", "training anchors", "parameters, million", "seeds", "seconds a step")
    return TextTable("Budgets", header, tuple(rows.values()))


def result_rows(readings: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]], timed: Measured) -> list[dict[str, Any]]:
    """The rows as `benchmark_report` has them, with what was timed. A count that the walks do not keep is empty."""
    found = []
    for row in rows:
        drafter, domain, temperature = row["drafter"], row["domain"], row["temperature"]
        sums = [
            reading[row["part"]]
            for reading in readings
            if reading["drafter"] == drafter and reading["temperature"] == temperature and domain in (ALL, reading["domain"])
        ]
        texts = {"texts": f"held-out answers, {row['part']}", "sets": ""}
        about = {"drafter": drafter, "domain": domain, "temperature": float(temperature), **texts}
        length = {name: row[name] for name in ("accepted_length", "accepted_length_low", "accepted_length_high")}
        counts = {"prompts": len(sums), **{name: round(sum(each[name] for each in sums)) for name in ("rounds", "emitted")}}
        empty = dict.fromkeys(("cut_rounds", "cut_emitted", "tokens"), "")
        found.append({**about, **length, **counts, **empty, **speed_columns(timed, drafter, domain, float(temperature))})
    return found


def report(options: RivalsOptions, console: Console) -> list[dict[str, Any]]:
    """Print the tables, and write the CSV files and the page; the rows of the first file.

    Raises:
      ValueError: the sweep is unknown or not on SmolLM2, no cell of it is finished, or the page has not its markers.
    """
    sweep = chosen_sweep(options.sweep, options.set, options.only, options.seeds)
    records = [record for record in finished_cells(sweep, options.records) if "result" in record]
    if not records:
        raise ValueError(f"records is {options.records}; a folder with finished cells of {sweep.name} is needed: run the sweep first")
    if any("first_tokens" not in record["config"] for record in records):
        raise ValueError(f"sweep is {sweep.name}; allowed are sweeps on SmolLM2, whose cells keep what they emitted on every answer")
    readings = readings_of(records)
    tables = [budget_table(records), *tables_of(readings)]
    timed = Measured.timings(options.records)
    tables += [speed_table(timed)] if timed.timed else []
    for table in tables:
        console.print(table.rich())
    rows = rows_of(readings)
    write_csv((options.to or options.records) / f"{sweep.name}.csv", rows)
    write_csv((options.to or options.records) / "results.csv", result_rows(readings, rows, timed))
    if options.page is not None:
        answers = max(sum(len(of) for of in record["result"]["answers_greedy"].values()) for record in records)
        about = f"{answers} answers at each temperature; {' / '.join(sorted({record['device'] for record in records}))}."
        write_marked(options.page, MARKER, "\n\n".join([*(table.markdown() for table in tables), about]))
    return rows


if __name__ == "__main__":
    sys.exit(run_command(RivalsOptions, report))
