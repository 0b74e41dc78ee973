"""Results that are appended one by one to a JSONL file, so that an interrupted run goes on behind the last whole one."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def key_of(settings: Mapping[str, Any]) -> str:
    """A short name for `settings`, whatever the order of their fields: equal settings have equal names."""
    return hashlib.sha256(json.dumps(settings, sort_keys=True).encode()).hexdigest()[:16]


def append_record(path: Path, record: Mapping[str, Any]) -> None:
    """One more line. A last line that an interruption cut off is closed first, and stays unreadable."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, 2)
            torn = file.read(1) != b"\n"
            file.write(b"\n" if torn else b"")
        file.write(json.dumps(record, ensure_ascii=False).encode() + b"\n")


def read_records(paths: Sequence[Path]) -> list[dict[str, Any]]:
    """The whole records of all files that are there, in order; of several with one `key` the last counts.

    Raises:
      ValueError: a whole record has no key.
    """
    found: dict[str, dict[str, Any]] = {}
    for path in paths:
        for number, line in enumerate(path.read_bytes().split(b"\n") if path.is_file() else (), start=1):
            try:
                record = json.loads(line)
            except ValueError:
                continue
            if not isinstance(record, dict) or "key" not in record:
                raise ValueError(f"{path}, line {number} has no key; allowed are records that `append_record` wrote with one")
            found[record["key"]] = record
    return list(found.values())
