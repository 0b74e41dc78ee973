"""Sweeps: named lists of cells, each of which is run once, however often and on however many machines the sweep is started.

    python -m experiments.run sweep smollm2_rivals --shard 0/2      # on one machine
    python -m experiments.run sweep smollm2_rivals --shard 1/2      # on another, or later on the same one

A cell is a configuration (a frozen dataclass) and a function that turns it into plain figures. A finished cell is one line of JSON with
its key (a hash of the configuration), commit, device and seconds, and is passed over when the sweep is started again. Shards append to
files of their own, which `finished_cells` joins; on machines that share no folder, copy the files into one.
A cell that trains does so in a folder of its own, named by the hash of its training run: it goes on where it was interrupted, and
cells that differ only in how a drafter is used share its training. The command does nothing but call `run_sweep`, as launchers and
notebooks can.
"""

import dataclasses
import itertools
import subprocess
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from experiments.overrides import overridden
from experiments.profile_steps import device_text
from experiments.record_lines import append_record, key_of, read_records

SEED = "seed"
"""Axis of repetitions: a report takes the mean over it."""

Changes = Mapping[str, Any]
"""Values of fields by path, as `overrides.overridden` takes them."""


class CellStopped(Exception):
    """A signal ended a cell before it was finished; the same command goes on with it."""


@dataclasses.dataclass(frozen=True)
class Cell:
    """One configuration.

    Attributes:
      axes: what tells it from the other cells of its sweep, in words and numbers: the columns of the report.
      config: a frozen dataclass.
    """

    axes: Mapping[str, str | int | float]
    config: Any

    @property
    def key(self) -> str:
        """A hash of the configuration: its fields, their values, and the classes that they belong to."""
        return key_of(described(self.config))

    @property
    def label(self) -> str:
        """The axes in one line."""
        return ", ".join(f"{name} {value}" for name, value in self.axes.items())


@dataclasses.dataclass(frozen=True)
class Sweep:
    """A list of cells.

    Attributes:
      name: of its files.
      about: what it asks, in a sentence.
      cells: in the order in which they are run.
      run: from a configuration, and the folder that trainings lie in, to figures: plain values.
      measures: figures for tables and plots.
      seed_field: path of the configuration's seed.
      free: paths that differ from machine to machine and have no part in the result, which `here` of `run_sweep` may set.
    """

    name: str
    about: str
    cells: tuple[Cell, ...]
    run: Callable[[Any, Path], Mapping[str, Any]]
    measures: tuple[str, ...]
    seed_field: str = SEED
    free: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        cells: dict[str, str] = {}
        for cell in self.cells:
            if cell.key in cells:
                raise ValueError(f"cells of {self.name}: {cells[cell.key]!r} and {cell.label!r} are the same configuration")
            cells[cell.key] = cell.label
        if not cells:
            raise ValueError(f"cells of {self.name} is empty; at least 1 is needed")

    def changed(self, changes: Changes) -> "Sweep":
        """The sweep with fields changed in all cells, which are other cells then.

        Raises:
          ValueError: a field or value is not allowed, or two cells are no longer different.
        """
        cells = tuple(dataclasses.replace(cell, config=overridden(cell.config, changes)) for cell in self.cells)
        return dataclasses.replace(self, cells=cells)

    def only(self, choices: Mapping[str, Collection[str]]) -> "Sweep":
        """The cells whose values on each of these axes, as text, are among those given.

        Raises:
          ValueError: there is no such axis, or no cell has such a value of it.
        """
        for axis, values in choices.items():
            known = list(dict.fromkeys(str(cell.axes[axis]) for cell in self.cells if axis in cell.axes))
            if not known:
                axes = list(dict.fromkeys(name for cell in self.cells for name in cell.axes))
                raise ValueError(f"only names {axis}; allowed: {', '.join(axes)}")
            if unknown := [value for value in values if value not in known]:
                raise ValueError(f"only names {axis} {', '.join(unknown)}; allowed: {', '.join(known)}")
        cells = tuple(cell for cell in self.cells if all(str(cell.axes[axis]) in values for axis, values in choices.items()))
        return dataclasses.replace(self, cells=cells)

    def repeated(self, seeds: Sequence[int]) -> "Sweep":
        """Every cell once per seed, the first seed of all cells first."""
        if not seeds or len(set(seeds)) != len(seeds):
            raise ValueError(f"seeds is {tuple(seeds)}; allowed: one or more different integers")
        cells = [Cell({**cell.axes, SEED: seed}, overridden(cell.config, {self.seed_field: seed})) for seed in seeds for cell in self.cells]
        return dataclasses.replace(self, cells=tuple(cells))


def grid(base: Any, axes: Mapping[str, Mapping[Any, Changes]]) -> tuple[Cell, ...]:
    """A cell for every combination of the values of all axes, each value being some changes to `base`."""
    cells = []
    for values in itertools.product(*axes.values()):
        changes = {path: value for axis, name in zip(axes.values(), values, strict=True) for path, value in axis[name].items()}
        cells.append(Cell(dict(zip(axes, values, strict=True)), overridden(base, changes)))
    return tuple(cells)


def described(value: Any) -> Any:
    """A configuration in JSON values, with the classes of its parts."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: described(getattr(value, field.name)) for field in dataclasses.fields(value)}
        return {"class": type(value).__name__, **fields}
    if isinstance(value, tuple | list):
        return [described(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def parse_shard(text: str) -> tuple[int, int]:
    """Place and number of shards from "0/2".

    Raises:
      ValueError: it is no such text, or there is no such place.
    """
    place, slash, count = text.partition("/")
    if not (slash and place.isdecimal() and count.isdecimal() and int(place) < int(count)):
        raise ValueError(f"shard is {text!r}; allowed: place/number, such as 0/2 or 1/2")
    return int(place), int(count)


def parse_only(texts: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Choices of `Sweep.only` from "AXIS=VALUE,VALUE"; a value that has a comma in it can't be chosen so.

    Raises:
      ValueError: a text is no such choice, or an axis is there twice.
    """
    found: dict[str, tuple[str, ...]] = {}
    for text in texts:
        axis, _, values = text.partition("=")
        if not axis or not values or axis in found:
            raise ValueError(f"only is {text!r}; allowed: AXIS=VALUE,VALUE, such as drafter=dspark,dflash, each axis once")
        found[axis] = tuple(values.split(","))
    return found


def shard_of(cells: Sequence[Cell], place: int, count: int) -> tuple[Cell, ...]:
    """The cells that are this shard's: every `count`-th one, from `place` on."""
    return tuple(cells[place::count])


def records_file(out: Path, name: str, place: int, count: int) -> Path:
    """Where a shard of a sweep keeps its finished cells."""
    return out / f"{name}.shard-{place}-of-{count}.jsonl"


def finished_cells(sweep: Sweep, out: Path) -> list[dict[str, Any]]:
    """The records of the sweep's cells that any shard has finished, in the order of the cells, with the axes that they have now."""
    found = {record["key"]: record for record in read_records(sorted(out.glob(f"{sweep.name}.shard-*.jsonl")))}
    return [found[cell.key] | {"axes": dict(cell.axes)} for cell in sweep.cells if cell.key in found]


def commit_id() -> str | None:
    """The commit of the code that runs, with "+" behind it where files differ from it; None outside of a checkout."""
    folder = Path(__file__).resolve().parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout.strip()

    try:
        return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain", "--untracked-files=no") else "")
    except (OSError, subprocess.CalledProcessError):
        return None


def run_sweep(
    sweep: Sweep, out: Path, shard: tuple[int, int] = (0, 1), console: Console | None = None, here: Changes | None = None
) -> list[dict[str, Any]]:
    """Run the cells of a shard that no shard has finished, and give the records of all finished cells.

    A cell whose loss is no longer a number is recorded with `failed` in place of figures, and counts as finished.

    Args:
      out: folder of the records, and of the trainings.
      shard: place and number of shards.
      here: values of `sweep.free` fields for this machine; a cell is the same cell with or without them.

    Raises:
      ValueError: `here` names another field, or a configuration does not fit its data or models.
    """
    console, here = console or Console(), here or {}
    for path in here:
        if path not in sweep.free:
            raise ValueError(f"here names {path}; allowed: {', '.join(sweep.free) or 'nothing'}, which have no part in the result")
    own = shard_of(sweep.cells, *shard)
    for number, cell in enumerate(own, start=1):
        title = f"{sweep.name} {number}/{len(own)}: {cell.label}"
        if any(record["key"] == cell.key for record in finished_cells(sweep, out)):
            console.print(f"{title} is finished", highlight=False)
            continue
        console.print(title, highlight=False)
        begin = time.perf_counter()
        try:
            outcome = {"result": dict(sweep.run(overridden(cell.config, here), out))}
        except FloatingPointError as error:
            outcome = {"failed": str(error)}
        except CellStopped as stopped:
            console.print(f"{title}: {stopped}; the same command goes on", highlight=False)
            break
        about = {"sweep": sweep.name, "axes": dict(cell.axes), "config": described(cell.config)}
        where = {"commit": commit_id(), "device": device_text(), "seconds": round(time.perf_counter() - begin, 1)}
        append_record(records_file(out, sweep.name, *shard), {"key": cell.key, **about, **where, **outcome})
    return finished_cells(sweep, out)


__all__ = [
    "SEED",
    "Cell",
    "CellStopped",
    "Sweep",
    "commit_id",
    "described",
    "finished_cells",
    "grid",
    "parse_only",
    "parse_shard",
    "records_file",
    "run_sweep",
    "shard_of",
]
