"""What a run of the benchmark left behind, and the figures that follow: accepted length, its comparison, acceptance by position, speed."""

import dataclasses
import functools
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from experiments.benchmark_sets import GROUPS, in_order
from experiments.benchmark_speed import PLAIN
from experiments.bootstrap import Figure, mean_of, ratio_of_sums
from experiments.record_lines import read_records

CELLS, DRAFTERS_FILE, SPEED_FILE = "cells", "drafters.jsonl", "speed.jsonl"

ALL = "all"
"""The mean of the groups."""


def cells_files(folder: Path) -> list[Path]:
    """The files of all shards."""
    return sorted(folder.glob(f"{CELLS}*.jsonl"))


@dataclasses.dataclass(frozen=True, eq=False)
class Measured:
    """All that was measured.

    Attributes:
      cells: by drafter, set and temperature.
      drafters: what each is, by its label, in the order in which they were first measured.
      timed: prompts that were timed, those of the last list of drafters.
    """

    cells: Mapping[tuple[str, str, float], Mapping[str, Any]]
    drafters: Mapping[str, Mapping[str, Any]]
    timed: Sequence[Mapping[str, Any]]

    @classmethod
    def timings(cls, folder: Path) -> "Measured":
        """What was timed, by the last list of drafters, and nothing else that a folder holds."""
        timed = read_records([folder / SPEED_FILE])
        timed = [record for record in timed if record["taken"].keys() == timed[-1]["taken"].keys()]
        described = {record["drafter"]: record for record in read_records([folder / DRAFTERS_FILE])}
        there = {label for record in timed for label in record["taken"]}
        return cls({}, {label: what for label, what in described.items() if label in there}, timed)

    @classmethod
    def read(cls, folder: Path) -> "Measured":
        """What a folder holds; of cells that were measured twice, on other prompts, the last.

        Raises:
          ValueError: it has no cell, or cells that were decoded with different settings.
        """
        records = read_records(cells_files(folder))
        if not records:
            raise ValueError(
                f"measured is {folder}; allowed is a folder with {CELLS}*.jsonl, which `python -m experiments.benchmark` writes"
            )
        cells = {(record["drafter"], record["set"], record["temperature"]): record for record in records}
        settings = {str((record["settings"]["target"], record["settings"]["decoding"])) for record in cells.values()}
        if len(settings) > 1:
            raise ValueError(f"measured is {folder}, with cells of different settings: {'; '.join(sorted(settings))}; allowed: the same")
        described = {record["drafter"]: record for record in read_records([folder / DRAFTERS_FILE])}
        labels = dict.fromkeys([*described, *(drafter for drafter, _, _ in cells)])
        there = {drafter for drafter, _, _ in cells}
        return cls(cells, {label: described.get(label, {}) for label in labels if label in there}, cls.timings(folder).timed)

    @property
    def sets(self) -> list[str]:
        """In the paper's order."""
        return in_order(sorted({name for _, name, _ in self.cells}))

    @property
    def temperatures(self) -> list[float]:
        """Ascending: those of the cells, or where there are none those that were timed."""
        return sorted({temperature for _, _, temperature in self.cells} or {record["temperature"] for record in self.timed})

    @functools.cached_property
    def domains(self) -> tuple[str, ...]:
        """The groups of which a set was measured, and their mean."""
        return (*(group for group, names in GROUPS.items() if set(names) & set(self.sets)), ALL)

    def prompts(self, drafter: str, name: str, temperature: float, with_other: str | None = None) -> list[Mapping[str, Any]]:
        """The prompts of a cell in the order of their ids; those alone that another drafter answered as well, where one is given."""
        cell = self.cells.get((drafter, name, temperature))
        if cell is None:
            return []
        prompts = {prompt["id"]: prompt for prompt in cell["prompts"]}
        if with_other is not None:
            other = {prompt["id"] for prompt in self.prompts(with_other, name, temperature)}
            prompts = {id: prompt for id, prompt in prompts.items() if id in other}
        return [prompts[id] for id in sorted(prompts)]

    def accepted_length(self, drafter: str, where: str, temperature: float, with_other: str | None = None) -> Figure | None:
        """Tokens per round on a set, or the mean over the sets of a domain; None where nothing was measured.

        Args:
          where: a set, a group, or `ALL`.
          with_other: only prompts that this drafter answered as well.
        """
        if where == ALL or where in GROUPS:
            parts = (
                [part for part in self.domains if part != ALL] if where == ALL else [name for name in GROUPS[where] if name in self.sets]
            )
            figures = [self.accepted_length(drafter, part, temperature, with_other) for part in parts]
            there = [figure for figure in figures if figure is not None]
            # A mean over other sets than the others' would not be comparable.
            return mean_of(there) if there and len(there) == len(figures) else None
        prompts = self.prompts(drafter, where, temperature, with_other)
        if not prompts:
            return None
        return ratio_of_sums([prompt["emitted"] for prompt in prompts], [prompt["rounds"] for prompt in prompts], where)

    def ratio(self, drafter: str, other: str, where: str, temperature: float) -> Figure | None:
        """Accepted length of one drafter over that of another, on the prompts that both answered, drawn alike for both."""
        above = self.accepted_length(drafter, where, temperature, other)
        below = self.accepted_length(other, where, temperature, drafter)
        return above.over(below) if above is not None and below is not None else None

    def conditional_acceptance(self, drafter: str, domain: str, temperature: float) -> list[Figure]:
        """By position: of the rounds that accepted all drafts before, the share that accepted this one. Prompts of a domain together."""
        prompts = self._prompts_of(drafter, domain, temperature)
        if not prompts:
            return []
        by_position = ([*zip(*(prompt[field] for prompt in prompts), strict=True)] for field in ("accepted", "reached"))
        return [ratio_of_sums(above, below, domain) for above, below in zip(*by_position, strict=True)]

    def reached(self, drafter: str, domain: str, temperature: float) -> list[int]:
        """By position: rounds that accepted all drafts before."""
        columns = zip(*(prompt["reached"] for prompt in self._prompts_of(drafter, domain, temperature)), strict=True)
        return [sum(column) for column in columns]

    def speed(self, label: str, domain: str, temperature: float) -> Figure | None:
        """Tokens per second of a drafter, or of `PLAIN`, with one request; None where it was not timed."""
        groups = GROUPS if domain == ALL else (domain,)
        timed = [record for record in self.timed if record["temperature"] == temperature and record["group"] in groups]
        taken = [record["taken"][label] for record in timed if label in record["taken"]]
        if not taken:
            return None
        return ratio_of_sums([each["tokens"] for each in taken], [each["seconds"] for each in taken], f"timed {domain}")

    def speed_ratio(self, label: str, domain: str, temperature: float) -> Figure | None:
        """Tokens per second over those of plain decoding on the same prompts."""
        own, plain = self.speed(label, domain, temperature), self.speed(PLAIN, domain, temperature)
        return own.over(plain) if own is not None and plain is not None else None

    def same_greedy_answers(self) -> tuple[int, int]:
        """Conversations at temperature 0 that all drafters answered with the same tokens, and all that several answered."""
        answers: dict[tuple[str, str], list[str]] = {}
        for (_, name, temperature), cell in self.cells.items():
            for prompt in cell["prompts"] if temperature == 0 else ():
                answers.setdefault((name, prompt["id"]), []).append(prompt["answer"])
        several = [each for each in answers.values() if len(each) > 1]
        return sum(len(set(each)) == 1 for each in several), len(several)

    def rounds(self, drafter: str, domain: str, temperature: float) -> dict[str, int]:
        """Sums over the prompts of a domain."""
        return total(self._prompts_of(drafter, domain, temperature))

    def _prompts_of(self, drafter: str, domain: str, temperature: float) -> list[Mapping[str, Any]]:
        return [prompt for name in self._sets_of(domain) for prompt in self.prompts(drafter, name, temperature)]

    def _sets_of(self, domain: str) -> list[str]:
        groups = GROUPS if domain == ALL else (domain,)
        return [name for group in groups for name in GROUPS[group] if name in self.sets]


def total(prompts: Iterable[Mapping[str, Any]]) -> dict[str, int]:
    """Prompts and their rounds and tokens, summed."""
    listed = list(prompts)
    sums = {name: sum(prompt[name] for prompt in listed) for name in ("rounds", "emitted", "cut_rounds", "cut_emitted", "tokens")}
    return {"prompts": len(listed), **sums}
