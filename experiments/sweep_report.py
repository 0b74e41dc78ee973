"""What the finished cells of a sweep say: a table, a CSV file and a plot; the mean over seeds, with the range of the seeds beside it.

Where cells keep what was emitted on every answer or prompt, accepted lengths have 95 % intervals over these, and so have their ratios to
the sweep's first row, answer by answer. With several seeds an answer counts with what all of them emitted on it: intervals are of answers,
the range is of seeds.
"""

import itertools
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.bootstrap import Figure, mean_of, ratio_of_sums
from experiments.result_files import save_figure, write_csv
from experiments.result_tables import TextTable, write_marked
from experiments.sweep import SEED, Sweep, finished_cells

MARKS = ("o", "s", "^", "D", "v", "P", "X", "*")


def answers_field(measure: str) -> str:
    """The field beside an accepted length, `accepted_length_*`, that has what was emitted on every answer: `answers_*`."""
    return measure.replace("accepted_length", "answers")


def summed_answers(results: Sequence[Mapping[str, Any]], field: str) -> dict[str, dict[Any, tuple[float, float]]]:
    """By domain and answer: tokens and rounds of the cells of several seeds together; empty where they do not keep them."""
    sums: dict[str, dict[Any, tuple[float, float]]] = {}
    for result in results:
        for domain, answers in result.get(field, {}).items():
            of_domain = sums.setdefault(domain, {})
            for answer, emitted, rounds in answers:
                before = of_domain.get(answer, (0.0, 0.0))
                of_domain[answer] = (before[0] + emitted, before[1] + rounds)
    return sums


def figure_of(results: Sequence[Mapping[str, Any]], measure: str) -> Figure | None:
    """An accepted length over the answers that cells of several seeds walked or decoded, each domain with the same weight.

    None where the cells do not keep them: `answers_*` beside `accepted_length_*`, by domain lists of [answer, emitted, rounds].
    """
    figures = []
    for domain, sums in summed_answers(results, answers_field(measure)).items() if measure.startswith("accepted_length") else ():
        above, below = zip(*(sums[answer] for answer in sorted(sums)), strict=True)
        figures.append(ratio_of_sums(above, below, domain))
    return mean_of(figures) if figures else None


def rows_of(records: Sequence[Mapping[str, Any]], measures: Sequence[str]) -> list[dict[str, Any]]:
    """A row per combination of axes but the seed: every measure's mean, lowest and highest, and how many seeds there are.

    Behind them, where the cells keep their answers, the interval over these and the ratio to the first row with its own. Cells that
    failed, and figures that a cell does not have, are left out.
    """
    groups: dict[tuple[Any, ...], list[Mapping[str, Any]]] = {}
    for record in records:
        axes = {name: value for name, value in record["axes"].items() if name != SEED}
        groups.setdefault(tuple(axes.items()), []).append(record.get("result", {}))
    figures = {measure: [figure_of(results, measure) for results in groups.values()] for measure in measures}
    rows = []
    for place, (axes, results) in enumerate(groups.items()):
        row: dict[str, Any] = dict(axes) | {"seeds": len(results)}
        for measure in measures:
            values = [result[measure] for result in results if result.get(measure) is not None]
            for name, of in (("", statistics.fmean), ("_low", min), ("_high", max)):
                row[measure + name] = of(values) if values else None
            if any(figures[measure]):
                figure, first = figures[measure][place], figures[measure][0]
                ratio = figure.over(first) if place and figure and first and figure.units == first.units else None
                row |= _ends(figure, f"{measure}_interval") | {f"{measure}_over_first": ratio and ratio.value}
                row |= _ends(ratio, f"{measure}_over_first")
        rows.append(row)
    return rows


def _ends(figure: Figure | None, name: str) -> dict[str, float | None]:
    low, high = (None, None) if figure is None else figure.interval
    return {f"{name}_low": low, f"{name}_high": high}


def table_of(sweep: Sweep, rows: Sequence[Mapping[str, Any]]) -> TextTable:
    """The rows as texts: a mean with its interval in brackets, or where there is none with the range of the seeds."""
    axes = [name for name in sweep.cells[0].axes if name != SEED]
    header, lines = [*axes, "seeds"], [[str(row[name]) for name in (*axes, "seeds")] for row in rows]
    for measure in sweep.measures:
        paired = any(f"{measure}_over_first" in row for row in rows)
        header += [measure.replace("_", " ")] + (["over the first row"] if paired else [])
        for line, row in zip(lines, rows, strict=True):
            line.append(_shown(row, measure))
            if paired:
                line.append(_bracketed(row, f"{measure}_over_first", f"{measure}_over_first"))
    return TextTable(f"{sweep.name}: {sweep.about}", tuple(header), tuple(map(tuple, lines)))


def report(sweep: Sweep, out: Path, to: Path, console: Console | None = None, page: Path | None = None) -> list[dict[str, Any]]:
    """Show the table of a sweep, and write it and its plot as `to/NAME.csv` and `to/NAME.png`.

    Args:
      page: file with the markers `<!-- NAME -->`, between which the table is put; None for no page.

    Raises:
      ValueError: no cell is finished, or the page has not its markers.
    """
    console = console or Console()
    records = finished_cells(sweep, out)
    if not records:
        raise ValueError(f"out is {out}; a folder with finished cells of {sweep.name} is needed: run the sweep first")
    rows, finished = rows_of(records, sweep.measures), f"{len(records)} of {len(sweep.cells)} cells finished"
    table = table_of(sweep, rows)
    console.print(table.rich())
    console.print(finished, highlight=False)
    write_csv(to / f"{sweep.name}.csv", [{name: _short(value) for name, value in row.items()} for row in rows])
    _plot(sweep, [name for name in sweep.cells[0].axes if name != SEED], rows, to / f"{sweep.name}.png")
    if page is not None:
        devices = " / ".join(sorted({record["device"] for record in records}))
        write_marked(page, sweep.name, f"{table.markdown()}\n\n{finished}; {devices}.")
    return rows


def _short(value: Any) -> Any:
    return f"{value:.6g}" if isinstance(value, float) else value


def _bracketed(row: Mapping[str, Any], name: str, ends: str) -> str:
    """A number of a row with two others in brackets; a dash where it is missing."""
    if row.get(name) is None:
        return "-"
    return f"{row[name]:.2f} ({row[f'{ends}_low']:.2f} to {row[f'{ends}_high']:.2f})"


def _shown(row: Mapping[str, Any], measure: str) -> str:
    if row.get(f"{measure}_interval_low") is not None:
        return _bracketed(row, measure, f"{measure}_interval")
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
            bars = [measure if row.get(f"{measure}_interval_low") is None else f"{measure}_interval" for row in line]
            # The mean over seeds may lie outside of an interval that is about all of their answers at once.
            below = [max(0.0, row[measure] - row[f"{bar}_low"]) for row, bar in zip(line, bars, strict=True)]
            ends = [below, [max(0.0, row[f"{bar}_high"] - row[measure]) for row, bar in zip(line, bars, strict=True)]]
            style = "-" if numeric else ""
            panel.errorbar([place[row[axis]] for row in line], means, yerr=ends, fmt=mark + style, capsize=3, label=", ".join(name))
        panel.set(xlabel=axis.replace("_", " "), ylabel=measure.replace("_", " "))
        if not numeric:
            panel.set_xticks(list(place.values()), [str(value) for value in values], rotation=20, ha="right")
        if others and known:
            panel.legend(title=", ".join(others), fontsize="small")
    save_figure(figure, path)
    pyplot.close(figure)


__all__ = ["answers_field", "figure_of", "report", "rows_of", "summed_answers", "table_of"]
