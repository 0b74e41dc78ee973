"""Changes by path: each value has the type of its field, and only their result has to be a valid configuration."""

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest

from experiments.overrides import overridden, parsed_overrides
from experiments.presets import smollm2_dspark


@dataclasses.dataclass(frozen=True)
class Inner:
    rank: int = 64
    head: bool = True
    style: Literal["plain", "gated"] = "plain"

    def __post_init__(self) -> None:
        if self.head and not self.rank:
            raise ValueError(f"rank is {self.rank}; a head needs at least 1")


@dataclasses.dataclass(frozen=True)
class Outer:
    inner: Any = Inner()
    rate: float = 1e-3
    decay: float | None = 4.0
    taps: tuple[int, ...] = (1, 2)
    mesh: tuple[int, int, int] | None = None
    folder: Path = Path("out")
    name: str | None = None
    count: int | None = None


def test_texts_become_values_of_the_fields_types():
    texts = [
        *("inner.rank=8", "inner.head=false", "inner.style=gated", "rate=2", "decay=None", "taps=1,8,15", "mesh=1,2,4"),
        *("folder=a/b", "name=x=y", "count=7"),
    ]
    changes = parsed_overrides(Outer(), texts)
    assert changes == {
        **{"inner.rank": 8, "inner.head": False, "inner.style": "gated", "rate": 2.0, "decay": None, "taps": (1, 8, 15)},
        **{"mesh": (1, 2, 4), "folder": Path("a/b"), "name": "x=y", "count": 7},
    }
    assert overridden(Outer(), changes) == Outer(Inner(8, False, "gated"), 2.0, None, (1, 8, 15), (1, 2, 4), Path("a/b"), "x=y", 7)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("inner.rank=many", r"^inner.rank is 'many'; allowed: an integer$"),
        ("inner.rank=1.5", r"^inner.rank is '1.5'; allowed: an integer$"),
        ("inner.head=1", r"^inner.head is '1'; allowed: true or false$"),
        ("inner.style=round", r"^inner.style is 'round'; allowed: plain, gated$"),
        ("decay=often", r"^decay is 'often'; allowed: a number or None$"),
        ("taps=1,b", r"^taps is '1,b'; allowed: values separated by commas, each an integer$"),
        ("mesh=1,2", r"^mesh is '1,2'; allowed: 3 values separated by commas or None$"),
        ("inner.rnak=1", r"^inner.rnak names no field; fields of Inner: rank, head, style$"),
        ("rate.ce=1", r"^rate.ce names no field: rate is 0.001$"),
        ("inner=3", r"^inner is a Inner; set one of its fields: rank, head, style$"),
        ("rate", r"^set is 'rate'; allowed: path=value"),
    ],
)
def test_what_cannot_be_set_is_refused_with_the_field_the_value_and_what_is_allowed(text, message):
    with pytest.raises(ValueError, match=message):
        parsed_overrides(Outer(), [text])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"inner.rank": 2.0}, "inner.rank is 2.0; allowed: an integer"),
        ({"inner.rank": True}, "inner.rank is True; allowed: an integer"),
        ({"taps": [1, 2]}, r"taps is \[1, 2\]; allowed: values separated by commas"),
        ({"taps": (1, "b")}, "taps is"),
        ({"mesh": (1, 2)}, r"mesh is \(1, 2\); allowed: 3 values separated by commas or None"),
        ({"folder": "out"}, "folder is 'out'; allowed: a path"),
        ({"inner.style": "round"}, "inner.style is 'round'; allowed: plain, gated"),
    ],
)
def test_values_from_python_are_held_to_the_same_types(changes, message):
    with pytest.raises(ValueError, match=message):
        overridden(Outer(), changes)


def test_changes_are_made_at_once_and_a_configuration_has_the_last_word():
    assert overridden(Outer(), {"inner.rank": 0, "inner.head": False}).inner == Inner(0, False)
    with pytest.raises(ValueError, match="rank is 0; a head needs at least 1"):
        overridden(Outer(), {"inner.rank": 0})


def test_a_whole_part_is_replaced_before_fields_in_it_are_changed():
    assert overridden(Outer(), {"inner.rank": 5, "inner": Inner(1, False)}).inner == Inner(5, False)
    assert overridden(Outer(), {}) == Outer()


def test_integers_for_numbers_are_written_as_numbers():
    changed = overridden(Outer(), {"rate": 1, "decay": 7, "count": 3})
    assert [type(value) for value in (changed.rate, changed.decay, changed.count)] == [float, float, int]


def test_a_training_run_is_changed_anywhere_in_its_tree():
    run = smollm2_dspark()
    changed = overridden(run, parsed_overrides(run, ["drafter.num_layers=3", "train.loss.ce=1.0", "domains=maths,code", "num_texts=9"]))
    assert (changed.drafter.num_layers, changed.train.loss.ce, changed.domains, changed.num_texts) == (3, 1.0, ("maths", "code"), 9)
    assert changed.train.optimizer == run.train.optimizer
    with pytest.raises(ValueError, match="domains is .*'latin'.*; allowed: one or more of maths, code, chat"):
        overridden(run, {"domains": ("latin",)})
