"""Changes to a tree of frozen dataclasses by path, typed by the fields: `drafter.num_layers=3 train.loss.ce=1.0`.

From Python the values come as they are, from a command line as text; both are held to the type of the field, and all changes are made
at once, so that only the result has to be a valid configuration.
"""

import dataclasses
import types
import typing
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, Union

Config = TypeVar("Config")

TRUTH = {"true": True, "false": False}


def overridden(config: Config, changes: Mapping[str, Any]) -> Config:
    """`config` with the fields at some paths changed.

    Raises:
      ValueError: a path names no field, or a value is not of the field's type or not one that the configuration takes.
    """
    return _overridden(config, changes, "")


def parsed_overrides(config: Any, texts: Sequence[str]) -> dict[str, Any]:
    """The changes that `path=value` texts ask for, in the types of the fields of `config`.

    A tuple is written with commas (`drafter.taps=1,8,15`), `None` as such.

    Raises:
      ValueError: a text has no "=", names no field, or its value cannot be read as the field's type.
    """
    changes: dict[str, Any] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        if not equals or not path:
            raise ValueError(f"set is {text!r}; allowed: path=value, such as train.loss.ce=1.0")
        changes[path] = _read(value, field_type(config, path), path)
    return changes


def field_type(config: Any, path: str) -> Any:
    """Annotation of the field at a path.

    Raises:
      ValueError: there is no such field, or it is itself a configuration, of which only fields can be set.
    """
    *parents, name = path.split(".")
    where = ""
    for parent in parents:
        _require_field(config, parent, where)
        config, where = getattr(config, parent), f"{where}{parent}."
    _require_field(config, name, where)
    value = getattr(config, name)
    if dataclasses.is_dataclass(value):
        raise ValueError(f"{path} is a {type(value).__name__}; set one of its fields: {', '.join(_names(value))}")
    return typing.get_type_hints(type(config))[name]


def _names(config: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(config)]


def _require_field(config: Any, name: str, where: str) -> None:
    if not dataclasses.is_dataclass(config):
        raise ValueError(f"{where}{name} names no field: {where.rstrip('.')} is {config!r}")
    if name not in _names(config):
        raise ValueError(f"{where}{name} names no field; fields of {type(config).__name__}: {', '.join(_names(config))}")


def _overridden(config: Any, changes: Mapping[str, Any], where: str) -> Any:
    here: dict[str, Any] = {}
    inside: dict[str, dict[str, Any]] = {}
    for path, value in changes.items():
        name, dot, rest = path.partition(".")
        _require_field(config, name, where)
        if dot:
            inside.setdefault(name, {})[rest] = value
        else:
            annotation = field_type(config, name) if not dataclasses.is_dataclass(value) else Any
            if not _fits(value, annotation):
                raise ValueError(f"{where}{name} is {value!r}; allowed: {_said(annotation)}")
            here[name] = _as_number(value, annotation)
    for name, rest in inside.items():
        here[name] = _overridden(here.get(name, getattr(config, name)), rest, f"{where}{name}.")
    return dataclasses.replace(config, **here)


def _as_number(value: Any, annotation: Any) -> Any:
    """An integer as the float that a field asks for, so that equal configurations are written alike."""
    choices = _choices(annotation)
    return float(value) if type(value) is int and float in choices and int not in choices else value


def _choices(annotation: Any) -> tuple[Any, ...]:
    """The members of a union; the annotation itself where it is none."""
    return typing.get_args(annotation) if typing.get_origin(annotation) in (Union, types.UnionType) else (annotation,)


def _fits(value: Any, annotation: Any) -> bool:
    """Whether a value is of a field's type; integers pass for numbers, and nothing but True and False for truth."""
    if annotation is Any:
        return True
    if len(choices := _choices(annotation)) > 1:
        return any(_fits(value, choice) for choice in choices)
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if origin is Literal:
        return any(value == allowed and type(value) is type(allowed) for allowed in arguments)
    if origin is tuple:
        kinds = _item_types(arguments, len(value)) if isinstance(value, tuple) else None
        return kinds is not None and all(_fits(item, kind) for item, kind in zip(value, kinds, strict=True))
    if annotation in (None, types.NoneType):
        return value is None
    if annotation is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if annotation is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, origin or annotation)


def _item_types(arguments: Sequence[Any], length: int) -> Sequence[Any] | None:
    """Types of the items of a tuple of this length; None where it cannot have it."""
    if len(arguments) == 2 and arguments[1] is Ellipsis:
        return (arguments[0],) * length
    return arguments if len(arguments) == length else None


def _read(text: str, annotation: Any, path: str) -> Any:
    for choice in sorted(_choices(annotation), key=lambda each: each is str):
        try:
            return _value(text, choice)
        except ValueError:
            continue
    raise ValueError(f"{path} is {text!r}; allowed: {_said(annotation)}")


def _value(text: str, annotation: Any) -> Any:
    """A text as a value of one type; ValueError where it is none."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if annotation is types.NoneType:
        if text != "None":
            raise ValueError(text)
        return None
    if annotation is bool:
        if text.lower() not in TRUTH:
            raise ValueError(text)
        return TRUTH[text.lower()]
    if origin is Literal:
        found = [allowed for allowed in arguments if str(allowed) == text]
        return found[0] if found else _refuse(text)
    if origin is tuple:
        items = [item.strip() for item in text.split(",") if item.strip()]
        kinds = _item_types(arguments, len(items))
        return tuple(_value(item, kind) for item, kind in zip(items, kinds, strict=True)) if kinds is not None else _refuse(text)
    if annotation in (int, float, str, Path):
        return annotation(text)
    return _refuse(text)


def _refuse(text: str) -> typing.NoReturn:
    raise ValueError(text)


def _said(annotation: Any) -> str:
    """A type in words."""
    origin, arguments = typing.get_origin(annotation), typing.get_args(annotation)
    if len(choices := _choices(annotation)) > 1:
        return " or ".join(_said(choice) for choice in choices)
    if origin is Literal:
        return ", ".join(map(str, arguments))
    if origin is tuple:
        several = len(arguments) == 2 and arguments[1] is Ellipsis
        return f"values separated by commas, each {_said(arguments[0])}" if several else f"{len(arguments)} values separated by commas"
    words = {int: "an integer", float: "a number", bool: "true or false", str: "text", Path: "a path", types.NoneType: "None"}
    return words.get(annotation, str(annotation))


__all__ = ["field_type", "overridden", "parsed_overrides"]
