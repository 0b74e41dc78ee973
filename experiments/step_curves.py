"""Families of cost curves: what rounds of 1, 2, 4, ... 512 requests cost on one device, as JSON files.

`experiments/results/step_curves/NAME.json` holds one family, measured by `experiments/measure_curves.py` or predicted by
`experiments/predict_steps.py`. How a policy fares at every load is replayed from such a file without the device.
"""

import dataclasses
import json
import math
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.step_curve import CurveWarning, StepCurve, curve_from_dict, curve_to_dict
from experiments.result_files import write_json

SOURCES = ("measured", "predicted")
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512)
TOKENS_PER_REQUEST = (1, 1.25, 1.5, 2, 3, 4, 6)


@dataclasses.dataclass(frozen=True)
class RoundCosts:
    """What a round of `rows` requests costs.

    Attributes:
      rows: R, requests that decode together.
      curve: seconds of the target's pass with its output head against the flat tokens of all requests; its `draft_seconds` are
        what proposing for them and committing a round's tokens to the drafter take.
      undrafted: what a round without a drafter costs: the target's pass on one token of each, attention having one query per request
        (a curve of one bucket), and as `draft_seconds` its share of a later, batched commit.
      commit_seconds: what committing a round's tokens takes; a part of `draft_seconds`.
    """

    rows: int
    curve: StepCurve
    undrafted: StepCurve
    commit_seconds: float

    def __post_init__(self) -> None:
        if self.rows < 1:
            raise ValueError(f"rows is {self.rows}; allowed are integers of at least 1")
        if self.curve.tokens[0] < self.rows:
            raise ValueError(f"tokens begins with {self.curve.tokens[0]}; a round of rows {self.rows} runs on at least one token each")
        if self.undrafted.tokens != (self.rows,):
            raise ValueError(
                f"undrafted has tokens {self.undrafted.tokens}; a round of rows {self.rows} without drafts runs on one token each"
            )
        if not (math.isfinite(self.commit_seconds) and self.commit_seconds >= 0):
            raise ValueError(f"commit_seconds is {self.commit_seconds}; allowed are finite numbers of at least 0")


@dataclasses.dataclass(frozen=True)
class CurveFamily:
    """The rounds of one target and drafter on one device.

    Attributes:
      name: of the family; its file is called the same.
      source: "measured" or "predicted".
      device: what it holds for, with versions.
      target, drafter: names of the models.
      block_size: G.
      notes: how the numbers came about, in sentences.
      curves: one entry per number of requests, ascending.
    """

    name: str
    source: str
    device: Mapping[str, Any]
    target: str
    drafter: str
    block_size: int
    notes: tuple[str, ...]
    curves: tuple[RoundCosts, ...]

    def __post_init__(self) -> None:
        if self.source not in SOURCES:
            raise ValueError(f"source is {self.source!r}; allowed: {', '.join(SOURCES)}")
        rows = [costs.rows for costs in self.curves]
        if not rows or rows != sorted(set(rows)):
            raise ValueError(f"curves has rows {rows}; allowed is at least one number of requests, in strictly ascending order")


def buckets_of(rows: int, block_size: int) -> tuple[int, ...]:
    """The numbers of flat tokens at which a round of `rows` requests is costed, from nothing verified to everything.

    One request takes every number; more take 1, 1.25, 1.5, 2, 3, 4, 6 and 1 + G tokens per request.
    """
    most = rows * (block_size + 1)
    if rows == 1:
        return tuple(range(1, most + 1))
    return tuple(sorted({*(math.floor(rows * share + 0.5) for share in TOKENS_PER_REQUEST if rows * share < most), most}))


def rounded(seconds: float) -> float:
    """Five digits, as costs are written."""
    return float(f"{seconds:.5g}")


def write_family(folder: Path, family: CurveFamily) -> Path:
    """Write `folder`/NAME.json, whole or not at all; gives the file."""
    content = dataclasses.asdict(family) | {"notes": list(family.notes)}
    content["curves"] = [
        {"rows": costs.rows, **curve_to_dict(costs.curve)}
        | {"undrafted": curve_to_dict(costs.undrafted), "commit_seconds": costs.commit_seconds}
        for costs in family.curves
    ]
    path = folder / f"{family.name}.json"
    write_json(path, content)
    return path


def read_family(path: Path) -> CurveFamily:
    """The family that `write_family` wrote.

    Reading does not warn of flat and jagged curves: a family is a record, and its curves are compared rather than trusted.

    Raises:
      ValueError: there is no such file, it is no JSON, or one of its fields is missing, unknown or out of range.
    """
    if not path.is_file():
        raise ValueError(f"path is {path}; allowed are existing files")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"path is {path}, which is no JSON: {error}") from None
    fields = _fields(content, [field.name for field in dataclasses.fields(CurveFamily)], str(path))
    for name, kind in (("name", str), ("source", str), ("target", str), ("drafter", str), ("block_size", int), ("device", dict)):
        if not isinstance(fields[name], kind):
            raise ValueError(f"{name} is {fields[name]!r} in {path}; allowed is a value of type {kind.__name__}")
    for name in ("notes", "curves"):
        if not isinstance(fields[name], list):
            raise ValueError(f"{name} is {fields[name]!r} in {path}; allowed is a list")
    try:
        costs = tuple(_costs(each) for each in fields["curves"])
        return CurveFamily(**fields | {"notes": tuple(map(str, fields["notes"])), "curves": costs})
    except ValueError as error:
        raise ValueError(f"{error} (in {path})") from None


def load_curves(path: Path) -> dict[int, RoundCosts]:
    """The costs of a family by number of requests; errors as in `read_family`."""
    return {costs.rows: costs for costs in read_family(path).curves}


def _fields(content: Any, names: Sequence[str], where: str) -> dict[str, Any]:
    if not isinstance(content, dict):
        raise ValueError(f"{where} holds {type(content).__name__}; allowed is an object with {', '.join(names)}")
    for name in names:
        if name not in content:
            raise ValueError(f"{name} is missing in {where}")
    for name in content:
        if name not in names:
            raise ValueError(f"{name} in {where} is unknown; allowed: {', '.join(names)}")
    return content


def _costs(entry: Any) -> RoundCosts:
    own = ("rows", "undrafted", "commit_seconds")
    if not isinstance(entry, dict):
        raise ValueError(f"curves holds {entry!r}; allowed are objects")
    for name, kind in (("rows", int), ("commit_seconds", int | float)):
        value = entry.get(name)
        if isinstance(value, bool) or not isinstance(value, kind):
            raise ValueError(f"{name} is {value!r} in an entry of curves; allowed is a number")
    if "undrafted" not in entry:
        raise ValueError("undrafted is missing in an entry of curves")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", CurveWarning)
        try:
            curve = curve_from_dict({name: value for name, value in entry.items() if name not in own})
            undrafted = curve_from_dict(entry["undrafted"])
        except ValueError as error:
            raise ValueError(f"{error}, at rows {entry['rows']}") from None
    return RoundCosts(entry["rows"], curve, undrafted, float(entry["commit_seconds"]))
