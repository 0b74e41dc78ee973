"""What the demo found: figures by their definitions, a table, a picture and `demo.json`."""

import dataclasses
import html
import importlib.util
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.table import Table

from experiments.demo_rounds import Difference, Recording, tally_of
from experiments.profile_steps import StepProfile

ALL = "all"


@dataclasses.dataclass(frozen=True)
class Answered:
    """One prompt, answered by plain and by speculative decoding.

    Attributes:
      difference: where the two answers part; None where they do not, or where they were sampled.
    """

    domain: str
    temperature: float
    plain: Recording
    speculative: Recording
    difference: Difference | None = None


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a set of answers comes to; None where nothing was there to measure.

    Attributes:
      accepted_length: emitted tokens / rounds, the bonus token counted, the first token of an answer not, and without the rounds
        that a stop token or the budget cut.
      conditional_acceptance: at k, of the rounds that verified at least k drafts and accepted k - 1, the share that accepted k.
      verified: drafts sent to the target per round, cut rounds included.
      ratio: speculative / plain tokens per second.
    """

    answers: int
    rounds: int
    cut_rounds: int
    accepted_length: float | None
    conditional_acceptance: tuple[float | None, ...]
    verified: float | None
    tokens_per_second_plain: float | None
    tokens_per_second_speculative: float | None
    ratio: float | None


def _share(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def figures_of(answered: Sequence[Answered], block_size: int) -> Figures:
    """Sums over all answers, divided once: long answers count more than short ones."""
    tally = tally_of([one.speculative for one in answered], block_size)
    rounds, cut = int(np.sum(tally.rounds)), int(np.sum(tally.cut_rounds))
    accepted, reached = np.sum(tally.accepted, axis=0), np.sum(tally.reached, axis=0)

    def rate(recordings: Sequence[Recording]) -> float | None:
        return _share(sum(each.decoded for each in recordings), sum(sum(each.seconds) for each in recordings))

    plain, speculative = rate([one.plain for one in answered]), rate([one.speculative for one in answered])
    return Figures(
        answers=len(answered),
        rounds=rounds,
        cut_rounds=cut,
        accepted_length=_share(int(np.sum(tally.emitted)), rounds),
        conditional_acceptance=tuple(_share(int(a), int(r)) for a, r in zip(accepted, reached, strict=True)),
        verified=_share(int(np.sum(tally.verified)), rounds + cut),
        tokens_per_second_plain=plain,
        tokens_per_second_speculative=speculative,
        ratio=speculative / plain if plain and speculative else None,
    )


def figures_by_domain(answered: Sequence[Answered], block_size: int) -> dict[float, dict[str, Figures]]:
    """Figures per temperature (ascending) and domain, and of all domains together."""
    found = {}
    for temperature in sorted({one.temperature for one in answered}):
        here = [one for one in answered if one.temperature == temperature]
        domains = dict.fromkeys(one.domain for one in here)
        found[temperature] = {domain: figures_of([one for one in here if one.domain == domain], block_size) for domain in domains}
        found[temperature][ALL] = figures_of(here, block_size)
    return found


def greedy_identical(answered: Sequence[Answered]) -> bool | None:
    """Whether every answer at temperature 0 is that of plain decoding, token for token; None where there is none."""
    greedy = [one for one in answered if one.temperature == 0]
    return all(one.plain.ids == one.speculative.ids for one in greedy) if greedy else None


def time_of_rounds(answered: Sequence[Answered], profile: StepProfile, ladder: Sequence[int]) -> dict[str, Any]:
    """Where the time goes, in milliseconds: what was measured at the start, and what the timed rounds took by bucket (medians)."""
    taken: dict[int, list[float]] = {bucket: [] for bucket in ladder}
    for one in answered:
        for stats, seconds in zip(one.speculative.rounds, one.speculative.seconds, strict=True):
            taken[next(bucket for bucket in ladder if bucket >= 1 + int(stats.verified[0]))].append(seconds)
    steps = [seconds for one in answered for seconds in one.plain.seconds]
    return {
        "plain_step_ms": statistics.median(steps) * 1e3 if steps else None,
        "draft_ms": profile.draft_seconds * 1e3,
        "target_ms": {str(bucket): profile.at(bucket) * 1e3 for bucket in ladder},
        "round_ms": {str(bucket): statistics.median(seconds) * 1e3 for bucket, seconds in taken.items() if seconds},
        "rounds": {str(bucket): len(seconds) for bucket, seconds in taken.items()},
    }


def report_json(
    answered: Sequence[Answered], profile: StepProfile, ladder: Sequence[int], block_size: int, **context: Any
) -> dict[str, Any]:
    """The content of `demo.json`. The figures at its top are those of the lowest temperature, all domains together.

    Args:
      context: further entries (device, dtype, what was asked for).
    """
    if not answered:
        raise ValueError("answered is empty; a report needs at least one answer")
    by_temperature = figures_by_domain(answered, block_size)
    lowest = by_temperature[min(by_temperature)]
    domains = [domain for domain in lowest if domain != ALL]
    parted = [
        {"domain": one.domain, "answer": number, **dataclasses.asdict(one.difference)}
        for number, one in enumerate(answered)
        if one.difference is not None
    ]
    return {
        "accepted_length": {domain: lowest[domain].accepted_length for domain in domains},
        "conditional_acceptance": {domain: list(lowest[domain].conditional_acceptance) for domain in domains},
        "tokens_per_second_plain": lowest[ALL].tokens_per_second_plain,
        "tokens_per_second_speculative": lowest[ALL].tokens_per_second_speculative,
        "ratio": lowest[ALL].ratio,
        "greedy_identical": greedy_identical(answered),
        "first_differences": parted,
        "by_temperature": {
            f"{temperature:g}": {domain: dataclasses.asdict(figures) for domain, figures in rows.items()}
            for temperature, rows in by_temperature.items()
        },
        "time": time_of_rounds(answered, profile, ladder),
        "ladder": list(ladder),
        "profile": dataclasses.asdict(profile),
        **context,
    }


HEADER = ("T", "domain", "accepted length", "acceptance by position, %", "plain tokens/s", "speculative tokens/s", "ratio")


def _number(value: float | None, digits: int) -> str:
    return "-" if value is None else f"{value:.{digits}f}"


def table_rows(report: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """The table's rows as text, under `HEADER`."""
    return [
        (
            temperature,
            domain,
            _number(row["accepted_length"], 2),
            " ".join("-" if share is None else f"{share:.0%}".rstrip("%") for share in row["conditional_acceptance"]),
            _number(row["tokens_per_second_plain"], 1),
            _number(row["tokens_per_second_speculative"], 1),
            _number(row["ratio"], 2),
        )
        for temperature, rows in report["by_temperature"].items()
        for domain, row in rows.items()
        if domain != ALL or len(rows) > 2
    ]


def rich_table(report: Mapping[str, Any]) -> Table:
    """The table for the terminal."""
    table = Table(title=f"{report['device']}, {report['dtype']}")
    for index, name in enumerate(HEADER):
        # Headers may wrap in a narrow terminal, figures may not.
        table.add_column(name, justify="left" if index == 1 else "right", min_width=max(len(row[index]) for row in table_rows(report)))
    for row in table_rows(report):
        table.add_row(*row, style="bold" if row[1] == ALL else "", end_section=row[1] == ALL)
    return table


def check_line(report: Mapping[str, Any]) -> str:
    """What the comparison with plain decoding says, in a sentence."""
    if report["greedy_identical"] is None:
        return "no answer at temperature 0: nothing to compare with plain decoding"
    count = report["by_temperature"]["0"][ALL]["answers"]
    if report["greedy_identical"]:
        return f"greedy output is identical to plain decoding in {count} of {count} answers ({report['dtype']})"
    parted = report["first_differences"]
    gaps = ", ".join(f"{each['domain']} at token {each['position']} (top-2 gap {each['top_two_gap']:.2g})" for each in parted)
    return f"greedy output differs from plain decoding in {len(parted)} of {count} answers ({report['dtype']}): {gaps}"


def write_picture(report: Mapping[str, Any], folder: Path) -> Path:
    """`demo.png` in `folder`, or `demo.html` where matplotlib (the extra `plots`) is not installed."""
    folder.mkdir(parents=True, exist_ok=True)
    if importlib.util.find_spec("matplotlib") is None:
        path = folder / "demo.html"
        path.write_text(_html(report), encoding="utf-8")
    else:
        path = folder / "demo.png"
        _draw(report).savefig(path, dpi=120)
    return path


def _html(report: Mapping[str, Any]) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells) + "</tr>"

    body = "\n".join([row(HEADER, "th"), *(row(cells, "td") for cells in table_rows(report))])
    lines = "".join(f"<p>{html.escape(line)}</p>\n" for line in (f"{report['device']}, {report['dtype']}", check_line(report)))
    style = "body { font-family: sans-serif } td, th { padding: 0.2em 0.8em; text-align: right }"
    head = f'<!doctype html>\n<meta charset="utf-8">\n<title>dspark_jax demo</title>\n<style>{style}</style>\n'
    return f"{head}{lines}<table>\n{body}\n</table>\n"


def _draw(report: Mapping[str, Any]) -> Any:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 7.5), layout="constrained")
    grid = figure.add_gridspec(2, 3, height_ratios=(1.5, 1))
    _draw_speed(figure.add_subplot(grid[0, 0]), report)
    _draw_acceptance(figure.add_subplot(grid[0, 1]), report)
    _draw_time(figure.add_subplot(grid[0, 2]), report["time"])
    below = figure.add_subplot(grid[1, :])
    below.axis("off")
    widths = (0.05, 0.1, 0.13, 0.3, 0.13, 0.16, 0.08)
    table = below.table(table_rows(report), colLabels=HEADER, colWidths=widths, cellLoc="right", loc="center")
    table.auto_set_font_size(False)
    table.set_fontsize(10)
    figure.suptitle(f"{report['device']}, {report['dtype']}\n{check_line(report)}", fontsize=11)
    return figure


def _draw_speed(axes: Any, report: Mapping[str, Any]) -> None:
    rows = [(temperature, domain, row) for temperature, rows in report["by_temperature"].items() for domain, row in rows.items()]
    places = np.arange(len(rows))
    for offset, name, color in ((-0.2, "plain", "tab:gray"), (0.2, "speculative", "tab:green")):
        rates = [row[f"tokens_per_second_{name}"] or 0.0 for _, _, row in rows]
        axes.bar(places + offset, rates, 0.4, label=name, color=color)
    axes.set_xticks(places, [f"{domain}\nT={temperature}" for temperature, domain, _ in rows], fontsize=8)
    axes.set_ylabel("tokens per second")
    axes.legend()


def _draw_acceptance(axes: Any, report: Mapping[str, Any]) -> None:
    styles = ("-", "--", ":", "-.")
    for index, (temperature, rows) in enumerate(report["by_temperature"].items()):
        for number, (domain, row) in enumerate(each for each in rows.items() if each[0] != ALL):
            shares = [np.nan if share is None else share for share in row["conditional_acceptance"]]
            label = f"{domain}, T={temperature}"
            places, style = range(1, len(shares) + 1), styles[index % len(styles)]
            axes.plot(places, shares, style, marker="o", markersize=3, color=f"C{number}", label=label)
    axes.set_xlabel("draft position")
    axes.set_ylabel("conditional acceptance")
    axes.set_ylim(0, 1)
    axes.legend(fontsize=8)


def _draw_time(axes: Any, times: Mapping[str, Any]) -> None:
    buckets = list(times["target_ms"])
    names = ["plain\nstep", *(f"{bucket} tokens\n{times['rounds'][bucket]} rounds" for bucket in buckets)]
    target = [times["plain_step_ms"] or 0.0, *(times["target_ms"][bucket] for bucket in buckets)]
    draft = [0.0, *(times["draft_ms"] for _ in buckets)]
    measured = [times["round_ms"].get(bucket) for bucket in buckets]
    axes.bar(names, target, color="tab:blue", label="target")
    axes.bar(names, draft, bottom=target, color="tab:orange", label="draft")
    for place, value in enumerate(measured, start=1):
        if value is not None:
            label = "timed round (median)" if place == 1 else None
            axes.plot([place - 0.4, place + 0.4], [value, value], color="black", label=label)
    axes.set_ylabel("milliseconds")
    axes.legend(fontsize=8)
