"""Files of results: they are there whole or not at all."""

import csv
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any


@contextmanager
def whole(path: Path) -> Iterator[Path]:
    """A file of another name to write to, which takes the place of `path` once it is written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.with_name(f".{os.getpid()}.{path.name}")
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """A JSON file with two spaces a level."""
    with whole(path) as unfinished:
        unfinished.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def write_csv(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """Rows of equal columns, named in the first line."""
    with whole(path) as unfinished, unfinished.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def read_csv(path: Path, field: str) -> list[dict[str, str]]:
    """The rows of a CSV file, by the names in its first line.

    Args:
      field: that the path was given as, for the message.

    Raises:
      ValueError: the file is missing.
    """
    if not path.is_file():
        raise ValueError(f"{field} is {path}; allowed are existing CSV files, such as `python -m experiments.benchmark_report` writes")
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def save_figure(figure: Any, path: Path) -> None:
    """A matplotlib figure as PNG."""
    with whole(path) as unfinished:
        figure.savefig(unfinished, dpi=110)
