"""Prompts and chats from JSONL files: a conversation a line, every line checked where it enters.

A line has `turns`, what the user says turn by turn, or `messages`, a chat with roles. Other fields are left alone, apart from a name
(`id`, `question_id`) and a kind (`category`, `domain`).
"""

import dataclasses
import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from dspark_jax.typing import typed

ROLES = ("system", "user", "assistant")
ID_FIELDS = ("id", "question_id")
CATEGORY_FIELDS = ("category", "domain")


@dataclasses.dataclass(frozen=True)
class Message:
    """What one side says."""

    role: str
    content: str


@dataclasses.dataclass(frozen=True)
class Conversation:
    """A chat: perhaps a system turn, then user and assistant in turn, or user turns alone.

    Attributes:
      id: from the file, or a hash of the messages; no two conversations of one reading have the same.
      source: name of the file, relative to the folder that was read.
      line: in it, from 1.
      category: as the file names it; empty where it does not.
    """

    id: str
    messages: tuple[Message, ...]
    source: str
    line: int
    category: str = ""

    @property
    def system(self) -> tuple[Message, ...]:
        """The system turn, or nothing."""
        return self.messages[:1] if self.messages[0].role == "system" else ()

    @property
    def user_turns(self) -> tuple[str, ...]:
        """What the user says, turn by turn."""
        return tuple(message.content for message in self.messages if message.role == "user")


@typed
def check_messages(messages: Sequence[Message]) -> str | None:
    """What is wrong with the order of `messages`, as field and reason; None where nothing is.

    Allowed: a system turn first or none, then a user turn, and after every user turn at most one assistant turn.
    """
    previous = None
    for number, message in enumerate(messages):
        if message.role not in ROLES:
            return f"messages[{number}].role is {message.role!r}; allowed: {', '.join(ROLES)}"
        if message.role == "system" and number:
            return f"messages[{number}].role is 'system'; allowed: a system turn first"
        if message.role == "assistant" and previous != "user":
            return f"messages[{number}].role is 'assistant'; allowed: an assistant turn behind a user turn"
        previous = message.role
    if not any(message.role == "user" for message in messages):
        return f"messages has {len(messages)} turns; allowed: at least one of them by the user"
    return None


def _text(value: Any, field: str, reject: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        reject(field, value, "a text that is not blank")
    return value


def _messages(record: Mapping[str, Any], reject: Any) -> tuple[Message, ...]:
    present = [name for name in ("turns", "messages") if name in record]
    if len(present) != 1:
        reject("its fields", sorted(record), "one of turns and messages")
    turns = record[present[0]]
    if not isinstance(turns, list) or not turns:
        reject(present[0], turns, "a list that is not empty")
    if present == ["turns"]:
        return tuple(Message("user", _text(turn, f"turns[{number}]", reject)) for number, turn in enumerate(turns))
    messages = []
    for number, turn in enumerate(turns):
        if not isinstance(turn, dict):
            reject(f"messages[{number}]", turn, "an object with role and content")
        if turn.get("role") not in ROLES:
            reject(f"messages[{number}].role", turn.get("role"), ", ".join(ROLES))
        messages.append(Message(turn["role"], _text(turn.get("content"), f"messages[{number}].content", reject)))
    return tuple(messages)


def _first(record: Mapping[str, Any], fields: Sequence[str], reject: Any) -> str | None:
    for field in fields:
        if record.get(field) is not None:
            value = record[field]
            if isinstance(value, bool) or not isinstance(value, str | int) or value == "":
                reject(field, value, "a name or a number")
            return str(value)
    return None


def _parse(line: bytes, source: str, number: int) -> tuple[Conversation, bool]:
    """The conversation of a line, and whether the line names it; where it does not, its id is a hash of what is said."""

    def reject(field: str, value: object, allowed: str) -> NoReturn:
        raise ValueError(f"{source}, line {number}: {field} is {value!r:.200}; allowed: {allowed}")

    try:
        record = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{source}, line {number} is no JSON: {error}") from error
    if not isinstance(record, dict):
        reject("the line", record, "an object")
    messages = _messages(record, reject)
    if (problem := check_messages(messages)) is not None:
        raise ValueError(f"{source}, line {number}: {problem}")
    said = json.dumps([dataclasses.astuple(message) for message in messages])
    name = _first(record, ID_FIELDS, reject)
    given = name or hashlib.sha256(said.encode()).hexdigest()[:16]
    return Conversation(given, messages, source, number, _first(record, CATEGORY_FIELDS, reject) or ""), name is not None


def jsonl_files(paths: Sequence[str | Path]) -> list[tuple[Path, str]]:
    """The files that `paths` mean, each with its name: files as they are, and the *.jsonl files inside folders, sorted.

    Raises:
      ValueError: there is nothing at a path, or no such file in a folder.
    """
    if not paths:
        raise ValueError("paths is empty; allowed: at least one file or folder")
    found = []
    for path in map(Path, paths):
        inside = sorted(path.rglob("*.jsonl")) if path.is_dir() else [path]
        if not inside or not all(file.is_file() for file in inside):
            raise ValueError(f"paths holds {str(path)!r}; allowed: a file, or a folder with *.jsonl files")
        found += [(file, file.relative_to(path).as_posix() if path.is_dir() else file.name) for file in inside]
    return found


@typed
def read_conversations(paths: Sequence[str | Path]) -> list[Conversation]:
    """The conversations of files and folders, in order; blank lines are passed over.

    What is said twice is two conversations: without a name of its own, the second has "-2" behind its id.

    Raises:
      ValueError: naming file, line and field of the first bad line; or two lines have the same name; or there is nothing to read.
    """
    lines = (
        _parse(line, source, number)
        for file, source in jsonl_files(paths)
        for number, line in enumerate(file.read_bytes().split(b"\n"), start=1)
        if line.strip()
    )
    conversations, places, repeats = [], {}, Counter()
    for conversation, named in lines:
        if not named:
            repeats[conversation.id] += 1
            if repeats[conversation.id] > 1:
                conversation = dataclasses.replace(conversation, id=f"{conversation.id}-{repeats[conversation.id]}")
        place = f"{conversation.source}, line {conversation.line}"
        if conversation.id in places:
            raise ValueError(f"{place}: id is {conversation.id!r}, which {places[conversation.id]} has already; allowed: each id once")
        places[conversation.id] = place
        conversations.append(conversation)
    if not conversations:
        raise ValueError(f"paths is {[str(path) for path in paths]}; allowed: files with at least one conversation")
    return conversations


__all__ = ["Conversation", "Message", "check_messages", "jsonl_files", "read_conversations"]
