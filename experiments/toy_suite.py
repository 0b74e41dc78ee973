"""The paper's main comparisons on a toy target, with no download: the smoke test of every research idea.

    python -m experiments.toy_suite                        # 5 minutes at most on 2 cores, compilation included; writes out/toy_suite
    python -m experiments.toy_suite --seeds 0 1 2          # three seeds of every drafter
    python -m experiments.toy_suite --drafters dspark dspark_rnn dflash_full_loss

A small Qwen3-shaped target is trained on the source of Python's standard library, every drafter on the target's own answers with
equal texts, steps and anchors; each then drafts for held-out prompts in the real decoding loop. What a target of a million parameters says
about large ones is in `experiments/results/toy_suite.md`. The target and compiled programs are kept, so that a second run is shorter.
"""

import dataclasses
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from dspark_jax.model_files import read_json
from experiments.command_line import run_command
from experiments.profile_steps import describe_device
from experiments.result_files import whole, write_csv, write_json
from experiments.toy_drafters import RIVALS, WORK, ToyCell, run_toy_cell
from experiments.toy_report import comparison_rows, drafter_rows, plot_suite, show_suite, suite_markdown
from experiments.toy_target import prepare_target

SUITE_FILE, CELLS_FILE = "toy_suite.json", "cells.json"
"""The figures of the suite; and everything that was measured of every cell, from which they are made."""

WIDTH = 140


@dataclasses.dataclass(frozen=True)
class ToySuite:
    """Command line.

    Attributes:
      drafters: names in `toy_drafters.RIVALS`; the first is compared with each of the others.
      seeds: every drafter is trained and measured once per seed; the target stays the same.
      steps: of every drafter's training; None for the cells' own number.
      prompts: held-out prompts that are decoded; None for the cells' own number.
      target_steps: of the target's training; None for its own number.
      out: folder of the tables, the figures and the plot.
      work: folder where the target and compiled programs are kept.
      report: folder of an earlier run, of which tables and plot are made again from what was measured, in place; nothing else is run.
    """

    drafters: tuple[str, ...] = ("dspark", "dflash_full_loss", "dflash", "eagle3", "mtp")
    seeds: tuple[int, ...] = (0,)
    steps: int | None = None
    prompts: int | None = None
    target_steps: int | None = None
    out: Path = WORK
    work: Path = WORK
    report: Path | None = None

    def __post_init__(self) -> None:
        unknown = [name for name in self.drafters if name not in RIVALS]
        if unknown or not self.drafters or len(set(self.drafters)) != len(self.drafters):
            raise ValueError(f"drafters is {self.drafters}; allowed are different names of {', '.join(RIVALS)}")
        if not self.seeds or len(set(self.seeds)) != len(self.seeds) or min(self.seeds) < 0:
            raise ValueError(f"seeds is {self.seeds}; allowed are different integers of at least 0")

    def cells(self) -> list[tuple[str, ToyCell]]:
        """Names and cells in the order in which they run: all drafters of a seed, then those of the next."""
        return [(name, self._changed(RIVALS[name], seed)) for seed in self.seeds for name in self.drafters]

    def _changed(self, cell: ToyCell, seed: int) -> ToyCell:
        target = cell.target if self.target_steps is None else dataclasses.replace(cell.target, steps=self.target_steps)
        prompts = cell.prompts if self.prompts is None else self.prompts
        return dataclasses.replace(
            cell,
            steps=cell.steps if self.steps is None else self.steps,
            prompts=prompts,
            timed_prompts=min(cell.timed_prompts, prompts),
            seed=seed,
            target=target,
        )


def run(options: ToySuite, console: Console) -> dict[str, Any]:
    """Run all cells and report; returns what `toy_suite.json` holds.

    Raises:
      ValueError: for bad input.
    """
    if not console.is_terminal:
        console.width = WIDTH  # A file or a pipe has none of its own.
    if options.report is not None:
        return report_again(options.report, console)
    began, cpu_began = time.perf_counter(), time.process_time()
    if "JAX_COMPILATION_CACHE_DIR" not in os.environ:
        jax.config.update("jax_compilation_cache_dir", str((options.work / ".jax_cache").resolve()))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)
    cells = options.cells()
    prepared = prepare_target(cells[0][1].target, options.work / "targets", console)
    seconds_target = time.perf_counter() - began
    records: list[dict[str, Any]] = []
    for name, cell in cells:
        begin = time.perf_counter()
        record = run_toy_cell(cell, options.work, console)
        records.append({"name": name, "seed": cell.seed, "seconds": time.perf_counter() - begin, **record})
        console.print(_line(records[-1]), highlight=False)
        # What is done is kept where the rest is interrupted.
        write_json(options.out / CELLS_FILE, {"cells": records})
    seconds = {"target": seconds_target, "all": time.perf_counter() - began, "cpu": time.process_time() - cpu_began}
    content = suite_json(records, options.drafters[0], prepared.report, seconds)
    show_suite(content, console)
    write_suite(options.out, content, records)
    all_of_it = f"{seconds['all']:.0f} s in all, {seconds_target:.0f} s of them for the target; {seconds['cpu']:.0f} core-seconds"
    console.print(f"written to {options.out}; {all_of_it}", style="dim", highlight=False)
    return content


def report_again(folder: Path, console: Console) -> dict[str, Any]:
    """Tables and plot of an earlier run from its measurements."""
    stored, records = read_json(folder, SUITE_FILE), read_json(folder, CELLS_FILE)["cells"]
    content = suite_json(records, records[0]["name"], stored["target"], stored["seconds"]) | {"device": stored["device"]}
    show_suite(content, console)
    write_suite(folder, content, records)
    return content


def suite_json(
    records: Sequence[Mapping[str, Any]], first: str, target_report: Mapping[str, Any], seconds: Mapping[str, float]
) -> dict[str, Any]:
    """Device, target, every drafter's figures and the comparisons of `first` with the others.

    Args:
      seconds: of the target and of all of it by the clock, and core-seconds, which say more where a machine is shared.
    """
    return {
        "device": describe_device(),
        "target": dict(target_report),
        "seconds": dict(seconds),
        "seeds": sorted({record["seed"] for record in records}),
        "drafters": drafter_rows(records),
        "comparisons": comparison_rows(records, first),
    }


def write_suite(out: Path, content: Mapping[str, Any], records: Sequence[Mapping[str, Any]]) -> None:
    """`toy_suite.json`, `cells.json`, `drafters.csv`, `comparisons.csv`, `tables.md` and `toy_suite.png`."""
    write_json(out / SUITE_FILE, content)
    write_json(out / CELLS_FILE, {"cells": list(records)})
    write_csv(out / "drafters.csv", content["drafters"])
    if content["comparisons"]:
        write_csv(out / "comparisons.csv", content["comparisons"])
    with whole(out / "tables.md") as unfinished:
        unfinished.write_text(suite_markdown(content), encoding="utf-8")
    plot_suite(records, out / "toy_suite.png")


def _line(record: Mapping[str, Any]) -> str:
    lengths = ", ".join(f"{each['accepted_length']['value']:.2f}" for each in record["temperatures"].values())
    at, training = ", ".join(record["temperatures"]), record["training"]
    return (
        f"{record['name']}, seed {record['seed']}: accepted length {lengths} (temperature {at}); "
        f"trained in {training['seconds']:.0f} s ({1000 * training['step_seconds']:.0f} ms a step), {record['seconds']:.0f} s in all"
    )


if __name__ == "__main__":
    sys.exit(run_command(ToySuite, run))
