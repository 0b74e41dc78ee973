"""The README's headline table, from `experiments/results/results.csv`: never written by hand.

python -m experiments.headline            # writes the table between <!-- headline --> and <!-- /headline --> of README.md
python -m experiments.headline --check    # fails where it is another one
"""

import dataclasses
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console

from experiments.command_line import run_command
from experiments.result_files import read_csv
from experiments.result_tables import TextTable, marked, number, write_marked

MARKER = "headline"
TEXTS = "benchmark prompts"
NEEDED = ("drafter", "domain", "temperature", "texts", "accepted_length", "parameters", "tokens_per_second", "over_plain")


@dataclasses.dataclass(frozen=True)
class HeadlineOptions:
    """Command line.

    Attributes:
      results: what `experiments.benchmark_report` wrote.
      readme: page with the markers.
      check: change nothing, and fail where the page has another table.
    """

    results: Path = Path("experiments/results/results.csv")
    readme: Path = Path("README.md")
    check: bool = False


def read_results(path: Path) -> list[dict[str, str]]:
    """The rows of the results.

    Raises:
      ValueError: the file is missing, empty, or lacks a column.
    """
    rows = read_csv(path, "results")
    missing = [name for name in NEEDED if not rows or name not in rows[0]]
    if missing:
        raise ValueError(f"results is {path} without {', '.join(missing)}; allowed are results with {', '.join(NEEDED)}")
    return rows


def headline_table(rows: Sequence[Mapping[str, str]]) -> TextTable:
    """Accepted length by domain, and speed over plain decoding, of every drafter at every temperature, on benchmark prompts alone."""
    rows = [row for row in rows if row["texts"] == TEXTS]
    domains = list(dict.fromkeys(row["domain"] for row in rows))
    temperatures = sorted({row["temperature"] for row in rows}, key=float)
    found = {(row["drafter"], row["domain"], row["temperature"]): row for row in rows}
    header = ["drafter", "temperature", *domains, "speed over plain decoding"]
    lines = []
    for drafter in dict.fromkeys(row["drafter"] for row in rows):
        for temperature in temperatures:
            own = [found.get((drafter, domain, temperature), {}) for domain in domains]
            lengths = [_number(row.get("accepted_length")) for row in own]
            lines.append((drafter, f"{float(temperature):g}", *lengths, _number(own[-1].get("over_plain"))))
    return TextTable("Accepted length (tokens a round)", tuple(header), tuple(lines))


def _number(text: str | None) -> str:
    return number(float(text)) if text else "-"


def write_headline(options: HeadlineOptions, console: Console) -> None:
    """Write the table, or check it.

    Raises:
      ValueError: the results or the markers are missing, or the page has another table.
    """
    table = headline_table(read_results(options.results)).markdown(with_title=False)
    if not options.check:
        write_marked(options.readme, MARKER, table)
        console.print(f"written: the headline of {options.readme}")
    elif marked(options.readme.read_text(encoding="utf-8"), MARKER, options.readme.name) != table:
        raise ValueError(f"readme is {options.readme}, whose headline is not that of {options.results}: run python -m experiments.headline")
    else:
        console.print(f"the headline of {options.readme} is that of {options.results}")


if __name__ == "__main__":
    sys.exit(run_command(HeadlineOptions, write_headline))
