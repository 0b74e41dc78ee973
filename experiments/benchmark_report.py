"""The benchmark's tables, files and plot, from what `experiments.benchmark` measured.

    python -m experiments.benchmark_report            # of experiments/results/benchmark; a few seconds

Writes `results.csv` (accepted length by drafter, domain and temperature, with size and speed), `sets.csv`, `comparisons.csv` and
`acceptance.csv` with its plot beside the measurements, and the tables of `results.md` between its markers.
"""

import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from dspark_jax.model_files import require
from experiments.benchmark_records import ALL, Measured, total
from experiments.benchmark_sets import GROUPS, TITLES, group_of
from experiments.benchmark_speed import PLAIN
from experiments.command_line import run_command
from experiments.result_files import read_csv, save_figure, write_csv
from experiments.result_tables import TextTable, columns, number, with_interval, write_marked

MARKER = "benchmark"

FEWEST_ROUNDS = 20
"""A position that fewer rounds reached is left out of the plot."""


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """Command line.

    Attributes:
      measured: folder that the benchmark wrote.
      pairs: comparisons of the page, "LABEL/LABEL"; the first drafter over each of the others where empty. All are in `comparisons.csv`.
      csv: file of the main results.
      page: file with the markers `<!-- benchmark -->`; None: no page.
      also: CSV files of the same columns, such as `rivals_report` writes, whose rows stand in `csv` too.
    """

    measured: Path = Path("experiments/results/benchmark")
    pairs: tuple[str, ...] = ()
    csv: Path = Path("experiments/results/results.csv")
    page: Path | None = Path("experiments/results/results.md")
    also: tuple[Path, ...] = ()


def main_table(measured: Measured, temperature: float) -> TextTable:
    """The layout of the paper's Table 1: drafters down, sets by group across, an average behind each group with its interval."""
    extra = [name for name in measured.sets if group_of(name) not in GROUPS]
    header, places = ["drafter"], []
    for group, names in GROUPS.items():
        header += [*(TITLES[name] for name in names), f"{group}, average"]
        places += [*names, group]
    header += [*(TITLES.get(name, name) for name in extra), "all groups"]
    places += [*extra, ALL]
    rows = []
    for drafter in measured.drafters:
        cells = []
        for place in places:
            # The average of a group of which no set is there is none.
            figure = measured.accepted_length(drafter, place, temperature) if place in (*measured.sets, *measured.domains) else None
            cells.append(with_interval(figure) if place in (*GROUPS, ALL) else number(None if figure is None else figure.value))
        rows.append((drafter, *cells))
    return TextTable(f"Accepted length at temperature {temperature:g}", tuple(header), tuple(rows))


def comparison_rows(measured: Measured) -> list[dict[str, Any]]:
    """Every drafter over every other one, by domain and temperature."""
    rows = []
    for temperature in measured.temperatures:
        for drafter in measured.drafters:
            for other in measured.drafters:
                for domain in measured.domains if other != drafter else ():
                    ratio = measured.ratio(drafter, other, domain, temperature)
                    if ratio is not None:
                        about = {"drafter": drafter, "over": other, "domain": domain, "temperature": temperature}
                        rows.append({**about, **columns(ratio, "ratio"), "prompts": ratio.units})
    return rows


def comparison_table(measured: Measured, pairs: Sequence[str] = ()) -> TextTable | None:
    """Ratios of pairs of drafters; None where there is no pair.

    Args:
      pairs: "LABEL/LABEL"; where empty, the first drafter over each of the others.

    Raises:
      ValueError: a pair is none, or names a drafter that was not measured.
    """
    first, *others = measured.drafters
    rows = []
    for pair in pairs or [f"{first}/{other}" for other in others]:
        above, _, below = pair.partition("/")
        if not {above, below} <= set(measured.drafters):
            raise ValueError(f"pairs has {pair!r}; allowed: two of {', '.join(measured.drafters)} with / between them")
        for temperature in measured.temperatures:
            ratios = [measured.ratio(above, below, domain, temperature) for domain in measured.domains]
            rows.append((f"{above} over {below}, temperature {temperature:g}", *(with_interval(ratio, 3) for ratio in ratios)))
    title = "Ratio of accepted lengths on the same prompts (95 % interval over prompts)"
    return TextTable(title, ("", *measured.domains), tuple(rows)) if rows else None


def speed_table(measured: Measured) -> TextTable:
    """Size, work and speed of each drafter."""
    header = ["drafter", "parameters, million", "draft vocabulary", "GFLOP of a proposal", "MB of a proposal, bfloat16"]
    for temperature in measured.temperatures:
        header += [f"tokens/s, temperature {temperature:g}", f"over plain decoding, {temperature:g}"]
    rows = []
    for label, what in measured.drafters.items():
        parameters = what.get("parameters")
        row = [label, number(parameters and parameters / 1e6), number(what.get("draft_vocabulary"), 0)]
        row += [number(what.get("proposal_gflop"), 3), number(what.get("proposal_bfloat16_mb"), 1)]
        rows.append((*row, *_speeds(measured, label)))
    rows.append((PLAIN, "-", "-", "-", "-", *_speeds(measured, PLAIN)))
    return TextTable("Size, work of one proposal, and speed of one request", tuple(header), tuple(rows))


def _speeds(measured: Measured, label: str) -> list[str]:
    cells = []
    for temperature in measured.temperatures:
        speed, ratio = measured.speed(label, ALL, temperature), measured.speed_ratio(label, ALL, temperature)
        cells += [number(None if speed is None else speed.value, 1), with_interval(ratio) if label != PLAIN else "-"]
    return cells


def notes(measured: Measured) -> str:
    """What the tables were measured on, in sentences."""
    cell = next(iter(measured.cells.values()))
    decoding = cell["settings"]["decoding"]
    counts = []
    for name in measured.sets:
        of_set = max((each for (_, where, _), each in measured.cells.items() if where == name), key=lambda each: len(each["prompts"]))
        too_long = f", {of_set['too_long']} too long" if of_set["too_long"] else ""
        counts.append(f"{TITLES.get(name, name)} {len(of_set['prompts'])} of {of_set['available']}{too_long}")
    missing = [TITLES[name] for names in GROUPS.values() for name in names if name not in measured.sets]
    text = f"Prompts: {'; '.join(counts)}. Prompts of at most {decoding['max_prompt']} tokens, answers of at most"
    text += f" {decoding['max_new_tokens']}, {decoding['turns']} turns; {cell['device']}."
    text += f" Not there: {', '.join(missing)}." if missing else ""
    same, several = measured.same_greedy_answers()
    if several:
        text += f" At temperature 0, {same} of {several} conversations have the same tokens under all drafters."
    timed = {(record["set"], record["id"]) for record in measured.timed}
    if timed:
        text += f" Speed: {len(timed)} prompts, {measured.timed[-1]['draft_length']} drafts a round, one request, all in one run."
    return text


def set_rows(measured: Measured) -> list[dict[str, Any]]:
    """A row per cell."""
    rows = []
    for temperature in measured.temperatures:
        for name in measured.sets:
            for drafter in measured.drafters:
                cell = measured.cells.get((drafter, name, temperature))
                if cell is not None:
                    about = {"drafter": drafter, "set": name, "domain": group_of(name), "temperature": temperature}
                    counts = {field: cell[field] for field in ("draft_length", "samples", "available", "too_long")}
                    length = columns(measured.accepted_length(drafter, name, temperature), "accepted_length")
                    rows.append({**about, **length, **total(cell["prompts"]), **counts})
    return rows


def result_rows(measured: Measured) -> list[dict[str, Any]]:
    """The main results: a row per drafter, domain and temperature, with the texts and the number of sets that the figures are of."""
    rows = []
    for drafter in measured.drafters:
        for domain in measured.domains:
            for temperature in measured.temperatures:
                sets = sum(group_of(name) in GROUPS and domain in (ALL, group_of(name)) for name in measured.sets)
                about = {"drafter": drafter, "domain": domain, "temperature": temperature, "texts": "benchmark prompts", "sets": sets}
                length = columns(measured.accepted_length(drafter, domain, temperature), "accepted_length")
                counts = measured.rounds(drafter, domain, temperature)
                rows.append({**about, **length, **counts, **speed_columns(measured, drafter, domain, temperature)})
    return rows


def speed_columns(measured: Measured, drafter: str, domain: str, temperature: float) -> dict[str, Any]:
    """Size, work and speed of a drafter as fields of a row, empty where they were not measured."""
    what = measured.drafters.get(drafter, {})
    speed, plain = measured.speed(drafter, domain, temperature), measured.speed(PLAIN, domain, temperature)
    return {
        **{name: what.get(name, "") for name in ("parameters", "draft_vocabulary", "proposal_gflop")},
        "tokens_per_second": "" if speed is None else round(speed.value, 2),
        "plain_tokens_per_second": "" if plain is None else round(plain.value, 2),
        **columns(measured.speed_ratio(drafter, domain, temperature), "over_plain"),
    }


def acceptance_rows(measured: Measured) -> list[dict[str, Any]]:
    """Conditional acceptance by position: the paper's Figure 2."""
    rows = []
    for drafter in measured.drafters:
        for domain in measured.domains:
            for temperature in measured.temperatures:
                reached = measured.reached(drafter, domain, temperature)
                for place, figure in enumerate(measured.conditional_acceptance(drafter, domain, temperature)):
                    about = {"drafter": drafter, "domain": domain, "temperature": temperature, "position": place + 1}
                    rows.append({**about, **columns(figure, "conditional_acceptance"), "reached": reached[place]})
    return rows


def plot_acceptance(measured: Measured, path: Path) -> None:
    """Conditional acceptance by position with its intervals, where enough rounds came that far: rows by temperature, columns by domain."""
    rows, places = measured.temperatures, [domain for domain in measured.domains if domain != ALL] or [ALL]
    size = (3.6 * len(places), 3.0 * len(rows))
    figure = require("matplotlib.figure", "plots", "the plot").Figure(figsize=size, layout="constrained")
    panels = figure.subplots(len(rows), len(places), squeeze=False, sharex=True, sharey=True)
    for line, temperature in zip(panels, rows, strict=True):
        for axis, domain in zip(line, places, strict=True):
            for drafter in measured.drafters:
                values = measured.conditional_acceptance(drafter, domain, temperature)
                rounds = measured.reached(drafter, domain, temperature)
                shown = [(place + 1, each) for place, each in enumerate(values) if rounds[place] >= FEWEST_ROUNDS]
                heights = [each.value for _, each in shown]
                spread = [[abs(each.value - each.interval[end]) for _, each in shown] for end in (0, 1)]
                axis.errorbar([place for place, _ in shown], heights, yerr=spread, marker="o", markersize=3, capsize=2, label=drafter)
            axis.set(ylim=(0, 1), title=f"{domain}, temperature {temperature:g}")
            axis.grid(alpha=0.3)
        line[0].set_ylabel("accepted, given those before")
    for axis in panels[-1]:
        axis.set_xlabel("position of the draft")
    panels[0][0].legend(fontsize=7)
    save_figure(figure, path)


def tables_of(measured: Measured, pairs: Sequence[str] = ()) -> list[TextTable]:
    """All tables, in order."""
    tables = [main_table(measured, temperature) for temperature in measured.temperatures]
    comparison = comparison_table(measured, pairs)
    return [*tables, *([] if comparison is None else [comparison]), speed_table(measured)]


def print_report(folder: Path, console: Console, pairs: Sequence[str] = ()) -> Measured:
    """The tables of what a folder holds."""
    measured = Measured.read(folder)
    for table in tables_of(measured, pairs):
        console.print(table.rich())
    console.print(notes(measured), style="dim", markup=False, highlight=False)
    return measured


def write_report(options: ReportOptions, console: Console) -> Measured:
    """Print, and write the files.

    Raises:
      ValueError: nothing was measured, a file of `also` is missing, or the page has not its markers.
    """
    measured = print_report(options.measured, console, options.pairs)
    write_csv(options.csv, result_rows(measured) + [row for path in options.also for row in read_csv(path, "also")])
    write_csv(options.measured / "sets.csv", set_rows(measured))
    write_csv(options.measured / "acceptance.csv", acceptance_rows(measured))
    plot_acceptance(measured, options.measured / "acceptance.png")
    if comparisons := comparison_rows(measured):
        write_csv(options.measured / "comparisons.csv", comparisons)
    if options.page is not None:
        parts = [table.markdown() for table in tables_of(measured, options.pairs)]
        write_marked(options.page, MARKER, "\n\n".join([*parts, notes(measured)]))
    return measured


if __name__ == "__main__":
    sys.exit(run_command(ReportOptions, write_report))
