"""What the finished cells of a sweep say: a table, a CSV file and a plot; the mean over seeds, with the range of the seeds beside it."""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from experiments.result_files import save_figure, write_csv
from experiments.sweep import SEED, Sweep, finished_cells

MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def rows_of(records: Sequence[Mapping[str, Any]], measures: Sequence[str]) -> list[dict[str, Any]]:
    """A row per combination of axes but the seed: every measure's mean, lowest and highest, and how many seeds there are.

    Cells that failed, and figures that a cell does not have, are left out.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        axes = {name: value for name, value in record["axes"].items() if name != SEED}
        groups.setdefault(tuple(axes.items()), []).append(record.get("result", {}))
    rows = []
    for axes, results in groups.items():
        row: dict[str, Any] = dict(axes) | {"seeds": len(results)}
        for measure in measures:
            values = [result[measure] for result in results if result.get(measure) is not None]
            for name, of in (("", statistics.fmean), ("_low", min), ("_high", max)):
                row[measure + name] = of(values) if values else None
        rows.append(row)
    return rows


def report(sweep: Sweep, out: Path, to: Path, console: Console | None = None) -> list[dict[str, Any]]:
    """Show the table of a sweep, and write it and its plot as `to/NAME.csv` and `to/NAME.png`.

    Raises:
      ValueError: no cell is finished.
    """
    console = console or Console()
    records = finished_cells(sweep, out)
    if not records:
        raise ValueError(f"out is {out}; a folder with finished cells of {sweep.name} is needed: run the sweep first")
    rows = rows_of(records, sweep.measures)
    axes = [name for name in sweep.cells[0].axes if name != SEED]
    table = Table(title=f"{sweep.name}: {sweep.about}", caption=f"{len(records)} of {len(sweep.cells)} cells finished")
    for name in (*axes, "seeds", *sweep.measures):
        table.add_column(name, justify="left" if name in axes else "right")
    for row in rows:
        table.add_row(*(str(row[name]) for name in (*axes, "seeds")), *(_shown(row, measure) for measure in sweep.measures))
    console.print(table)
    write_csv(to / f"{sweep.name}.csv", [{name: _short(value) for name, value in row.items()} for row in rows])
    _plot(sweep, axes, rows, to / f"{sweep.name}.png")
    return rows


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _shown(row: Mapping[str, Any], measure: str) -> str:
    if row[measure] is None:
        return "-"
    text = f"{row[measure]:.4g}"
    return text if row["seeds"] == 1 else f"{text} ({row[f'{measure}_low']:.4g} to {row[f'{measure}_high']:.4g})"


def _plot(sweep: Sweep, axes: Sequence[str], rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """A panel per measure: the last axis to the right, a line per value of the others; numbers to scale, words side by side."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    axis, others = axes[-1], list(axes[:-1])
    values = list(dict.fromkeys(row[axis] for row in rows))
    numeric = all(isinstance(value, int | float) for value in values)
    place = {value: value if numeric else index for index, value in enumerate(values)}
    figure, panels = pyplot.subplots(1, len(sweep.measures), figsize=(4.6 * len(sweep.measures), 3.8), layout="constrained", squeeze=False)
    for panel, measure in zip(panels[0], sweep.measures, strict=True):
        known = [row for row in rows if row[measure] is not None]

        def line_of(row: Mapping[str, Any]) -> tuple[str, ...]:
            return tuple(str(row[name]) for name in others)

        lines = {name: [row for row in known if line_of(row) == name] for name in dict.fromkeys(map(line_of, known))}
        for (name, line), mark in zip(lines.items(), itertools.cycle(MARKS)):
            means = [row[measure] for row in line]
            ends = [[row[measure] - row[f"{measure}_low"] for row in line], [row[f"{measure}_high"] - row[measure] for row in line]]
            style = "-" if numeric else ""
            panel.errorbar([place[row[axis]] for row in line], means, yerr=ends, fmt=mark + style, capsize=3, label=", ".join(name))
        panel.set(xlabel=axis.replace("_", " "), ylabel=measure.replace("_", " "))
        if not numeric:
            panel.set_xticks(list(place.values()), [str(value) for value in values], rotation=20, ha="right")
        if others and known:
            panel.legend(title=", ".join(others), fontsize="small")
    save_figure(figure, path)
    pyplot.close(figure)


__all__ = ["report", "rows_of"]
