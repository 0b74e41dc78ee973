"""The Python of the pages in `docs/`: what it prints stands in the pages, and is put there by this command.

    python -m experiments.docs_pages                  # runs every page and names outputs that differ, under a minute on 2 cores
    python -m experiments.docs_pages --write          # puts into the pages what their code printed

The blocks of a page run in order and share their names. A block of text right behind a block of Python is what that printed.
"""

import contextlib
import dataclasses
import io
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from experiments.command_line import run_command
from experiments.result_files import whole

FOLDER = Path(__file__).resolve().parent.parent / "docs"
CELL = re.compile(r"^```python\n(?P<code>.*?)^```\n(?:\n```text\n(?P<shown>.*?)^```\n)?", re.DOTALL | re.MULTILINE)


@dataclasses.dataclass(frozen=True)
class Cell:
    """A block of Python in a page.

    Attributes:
      line: of the page, on which the code begins (from 1).
      shown: the output that the page shows; None where it shows none.
    """

    code: str
    line: int
    shown: str | None


def cells_of(page: str) -> list[Cell]:
    """The blocks of Python in a page, in order."""
    return [Cell(match["code"], 2 + page[: match.start()].count("\n"), match["shown"]) for match in CELL.finditer(page)]


def run_cells(cells: Sequence[Cell], name: str) -> tuple[list[str], dict[str, Any]]:
    """What every block printed, and the names that all of them together have made.

    Args:
      name: of the page, for tracebacks, which count its lines.

    Raises:
      ValueError: a block prints and the page has no block of text behind it.
    """
    names: dict[str, Any] = {"__name__": Path(name).stem}
    printed = []
    # A page may set how arrays are printed, for itself alone.
    with np.printoptions():
        for cell in cells:
            code = compile("\n" * (cell.line - 1) + cell.code, name, "exec", dont_inherit=True)
            with contextlib.redirect_stdout(io.StringIO()) as output:
                exec(code, names)
            printed.append(output.getvalue())
            if printed[-1] and cell.shown is None:
                raise ValueError(f"{name}: the block of Python at line {cell.line} prints; allowed is that with a block of text behind it")
    return printed, names


def with_outputs(page: str, printed: Sequence[str]) -> str:
    """The page with `printed`, one text per block of Python, in its blocks of text."""
    outputs = iter(printed)

    def filled(match: re.Match[str]) -> str:
        output = next(outputs)
        return match[0] if match["shown"] is None else f"```python\n{match['code']}```\n\n```text\n{output}```\n"

    return CELL.sub(filled, page)


@dataclasses.dataclass(frozen=True)
class PagesOptions:
    """Command line.

    Attributes:
      pages: Markdown files; all of `docs/` where none is named.
      write: put the outputs into the pages, in place of what stands there.
    """

    pages: tuple[Path, ...] = ()
    write: bool = False


def run(options: PagesOptions, console: Console) -> None:
    """Run the pages.

    Raises:
      ValueError: outputs differ from what the pages show, and `write` is not given.
    """
    different = []
    for path in options.pages or sorted(FOLDER.glob("*.md")):
        page = path.read_text(encoding="utf-8")
        cells = cells_of(page)
        fresh = with_outputs(page, run_cells(cells, str(path))[0])
        console.print(f"{path.name}: {len(cells)} blocks of Python, {'as shown' if fresh == page else 'other outputs than shown'}")
        if fresh != page and options.write:
            with whole(path) as unfinished:
                unfinished.write_text(fresh, encoding="utf-8")
        elif fresh != page:
            different.append(path.name)
    if different:
        raise ValueError(f"outputs differ in {', '.join(different)}; --write puts the new ones there")


if __name__ == "__main__":
    sys.exit(run_command(PagesOptions, run))
