"""Tables of results: for the terminal, and for a page, where they stand between two markers and the words around them stay."""

import dataclasses
import math
import re
from pathlib import Path

from rich.table import Table

from experiments.bootstrap import Figure
from experiments.result_files import whole


@dataclasses.dataclass(frozen=True)
class TextTable:
    """A table of texts; the first column says what a row is about."""

    title: str
    header: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]

    def rich(self) -> Table:
        """For a console."""
        table = Table(title=self.title, title_justify="left")
        for place, name in enumerate(self.header):
            table.add_column(name, justify="right" if place else "left")
        for row in self.rows:
            table.add_row(*row)
        return table

    def markdown(self, with_title: bool = True) -> str:
        """For a page."""
        lines = [self.header, ("---", *("---:" for _ in self.header[1:])), *self.rows]
        table = "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)
        return f"**{self.title}**\n\n{table}" if with_title else table


def number(value: float | None, digits: int = 2) -> str:
    """A number, or a dash where there is none."""
    return "-" if value is None or not math.isfinite(value) else f"{value:,.{digits}f}"


def with_interval(figure: Figure | None, digits: int = 2) -> str:
    """A figure with its interval in brackets, where it has one."""
    if figure is None:
        return "-"
    low, high = figure.interval
    ends = f" ({number(low, digits)} to {number(high, digits)})" if math.isfinite(low) else ""
    return number(figure.value, digits) + ends


def columns(figure: Figure | None, name: str, digits: int = 4) -> dict[str, float | str]:
    """Value and interval of a figure as fields of a CSV row, empty where there is none."""
    low, high = (math.nan, math.nan) if figure is None else figure.interval
    values = {name: math.nan if figure is None else figure.value, f"{name}_low": low, f"{name}_high": high}
    return {field: round(value, digits) if math.isfinite(value) else "" for field, value in values.items()}


def marked(text: str, name: str, where: str) -> str:
    """What stands between the markers `<!-- name -->` and `<!-- /name -->` of a page.

    Args:
      where: the page, for the message.

    Raises:
      ValueError: the page has not exactly one pair of them.
    """
    found = re.findall(_between(name), text, flags=re.DOTALL)
    if len(found) != 1 or text.count(f"<!-- {name} -->") != 1:
        raise ValueError(f"{where} has {len(found)} parts between <!-- {name} --> and <!-- /{name} -->; allowed: exactly one")
    return found[0].strip("\n")


def with_marked(text: str, name: str, content: str, where: str) -> str:
    """The page with `content` between its markers. Raises as `marked` does."""
    marked(text, name, where)
    return re.sub(_between(name), lambda _: f"<!-- {name} -->\n\n{content}\n\n<!-- /{name} -->", text, flags=re.DOTALL)


def write_marked(page: Path, name: str, content: str) -> None:
    """Put `content` between the markers of a file. Raises as `marked` does."""
    text = with_marked(page.read_text(encoding="utf-8"), name, content, page.name)
    with whole(page) as unfinished:
        unfinished.write_text(text, encoding="utf-8")


def _between(name: str) -> str:
    return rf"<!-- {re.escape(name)} -->(.*?)<!-- /{re.escape(name)} -->"
