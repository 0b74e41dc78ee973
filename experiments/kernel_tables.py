"""The tables of `results/kernels.md`, from the files that the benchmark and the compilers left.

python -m experiments.kernel_tables       # writes them between the page's marks `<!-- NAME -->` and `<!-- end -->`; seconds
"""

import dataclasses
import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.command_line import run_command
from experiments.result_files import whole
from pallas_kernels.bench import roofline

RESULTS = Path(__file__).resolve().parent / "results"
TPUS = ("v5e", "v5p", "v6e")


@dataclasses.dataclass(frozen=True)
class TableOptions:
    """The page and the files that it is made from."""

    page: Path = RESULTS / "kernels.md"
    measured: Path = RESULTS / "kernels.json"
    compiled: Path = RESULTS / "kernels_ahead.json"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table."""
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, ["---"] * len(head), *rows))


def megabytes(count: float) -> str:
    """Whole megabytes."""
    return f"{count / 1e6:.0f}"


def measured_table(measured: dict[str, Any]) -> str:
    """Every call that was timed."""
    rows = [
        [
            row["op"],
            row["spec"],
            megabytes(row["bytes"]),
            megabytes(row["compiler_bytes"]),
            f"{row['seconds'] * 1e3:.1f}",
            f"{row['ratio']:.1f}",
        ]
        for row in measured["specs"]
    ]
    return table(["op", "spec", "floor, MB", "compiler, MB", "ms", "times the floor"], rows)


def comparison_table(measured: dict[str, Any]) -> str:
    """Ours against plain formulations."""
    rows = [
        [each["op"], each["against"], f"{each['seconds'] * 1e3:.1f}", f"{each['plain'] * 1e3:.0f}", f"{each['times_faster']:.1f}"]
        for each in measured["comparisons"]
    ]
    return table(["op", "against", "ms", "plain, ms", "times faster"], rows)


def tpu_table(compiled: dict[str, Any]) -> str:
    """Every program that was compiled for TPUs, the three chips side by side."""
    rows = []
    for chips in zip(*(compiled[f"tpu_{name}"]["rows"] for name in TPUS), strict=True):
        kept = ", ".join("yes" if chip["keeps_w2"] else "no" for chip in chips) if "keeps_w2" in chips[0] else ""
        used = [max(chip["vmem_used"].values()) / 1e6 for chip in chips]
        moved = [chip["moved_bytes"] for chip in chips]
        floors = [chip["floor_bytes"] for chip in chips]
        ratios = [f"{bytes_moved / floor:.1f}" for bytes_moved, floor in zip(moved, floors, strict=True)]
        cells = [", ".join(f"{each:.1f}" for each in used), kept, ", ".join(map(megabytes, floors)), ", ".join(map(megabytes, moved))]
        rows.append([chips[0]["op"], chips[0]["spec"], *cells, ", ".join(ratios)])
    return table(["op", "spec", "VMEM used, MB", "W2 stays on chip", "floor, MB", "moved, MB", "times the floor"], rows)


def register_table(compiled: dict[str, Any]) -> str:
    """Registers and spills of the GPU kernels over all programs."""
    found: dict[str, list[tuple[int, int]]] = {}
    for row in compiled["h200"]["rows"]:
        for kernel in row["kernels"]:
            found.setdefault(kernel["kernel"], []).append((kernel["registers"], kernel["spilled_bytes"]))
    rows = []
    for name, numbers in sorted(found.items()):
        registers, spilled = zip(*numbers, strict=True)
        rows.append([f"`{name}`", f"{min(registers)} to {max(registers)}", str(max(spilled))])
    return table(["kernel", "registers per thread", "bytes spilled"], rows)


def filled(page: str, tables: dict[str, str]) -> str:
    """The page with every table in its place.

    Raises:
      ValueError: a mark is missing.
    """
    for name, text in tables.items():
        page, count = re.subn(
            rf"(<!-- {name} -->\n).*?(\n<!-- end -->)", lambda found, text=text: found[1] + text + found[2], page, flags=re.S
        )
        if count != 1:
            raise ValueError(f"page has {count} marks {name!r}; allowed is one <!-- {name} --> with an <!-- end --> behind it")
    return page


def run(options: TableOptions, console: Console) -> None:
    """Fill the page."""
    measured, compiled = (json.loads(path.read_text(encoding="utf-8")) for path in (options.measured, options.compiled))
    tables = {
        "roofline": roofline(),
        "comparisons": comparison_table(measured),
        "measured": measured_table(measured),
        "tpu": tpu_table(compiled),
        "registers": register_table(compiled),
    }
    page = filled(options.page.read_text(encoding="utf-8"), tables)
    with whole(options.page) as unfinished:
        unfinished.write_text(page, encoding="utf-8")
    console.print(f"wrote {options.page.name}: {', '.join(tables)}", highlight=False)


if __name__ == "__main__":
    sys.exit(run_command(TableOptions, run))
