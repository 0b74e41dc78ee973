"""The prompt sets of the paper's Table 1: their groups, where they come from, and which of their prompts are answered."""

import dataclasses
import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import track

from dspark_jax.prompt_dataset import load_prompt_dataset
from dspark_jax.prompt_files import Conversation, Message, read_conversations

GROUPS: Mapping[str, tuple[str, ...]] = {
    "maths": ("gsm8k", "math500", "aime25"),
    "code": ("mbpp", "humaneval", "livecodebench"),
    "chat": ("mt-bench", "alpaca", "arena-hard-v2"),
}
"""The paper's nine sets in its order; each group has an average."""

OTHER = "other"
"""Group of every other set, which counts in no average."""

TITLES = {
    "gsm8k": "GSM8K",
    "math500": "MATH500",
    "aime25": "AIME25",
    "aime24": "AIME24",
    "mbpp": "MBPP",
    "humaneval": "HumanEval",
    "livecodebench": "LiveCodeBench",
    "mt-bench": "MT-Bench",
    "alpaca": "Alpaca",
    "arena-hard-v2": "Arena-Hard v2",
}

TFDS, HUB = "tfds:", "hf:"

Encode = Callable[[Sequence[Mapping[str, str]]], list[int]]
"""From messages to the ids of a prompt."""


def group_of(name: str) -> str:
    """The group of a set."""
    return next((group for group, names in GROUPS.items() if name in names), OTHER)


def in_order(names: Sequence[str]) -> list[str]:
    """Sets in the paper's order, and then the others by name."""
    paper = [name for names_of_group in GROUPS.values() for name in names_of_group]
    return [name for name in paper if name in names] + sorted(set(names) - set(paper))


@dataclasses.dataclass(frozen=True)
class ChosenSet:
    """The conversations of a set that are held.

    Attributes:
      prompts: ids of the first turn of each.
      available: conversations of the whole set.
      too_long: those of them that were dropped for the length of their first prompt.
    """

    name: str
    conversations: tuple[Conversation, ...]
    prompts: tuple[list[int], ...]
    available: int
    too_long: int

    @property
    def group(self) -> str:
        """Of the paper's table."""
        return group_of(self.name)


def messages_of(conversation: Conversation, turn: int, answers: Sequence[str]) -> list[dict[str, str]]:
    """What the target reads before its answer to user turn number `turn`, its own earlier `answers` in their places."""
    messages = [{"role": "system", "content": message.content} for message in conversation.system]
    for number, text in enumerate(conversation.user_turns[: turn + 1]):
        messages.append({"role": "user", "content": text})
        if number < turn:
            messages.append({"role": "assistant", "content": answers[number]})
    return messages


def choose(name: str, conversations: Sequence[Conversation], encode: Encode, max_prompt: int, count: int | None) -> ChosenSet:
    """`count` conversations at even distances among those whose first prompt has at most `max_prompt` tokens; all of them for None.

    Raises:
      ValueError: every first prompt is too long.
    """
    prompts = [encode(messages_of(conversation, 0, ())) for conversation in conversations]
    fitting = [place for place, prompt in enumerate(prompts) if len(prompt) <= max_prompt]
    if not fitting:
        raise ValueError(f"max_prompt is {max_prompt}; the shortest prompt of {name} has {min(map(len, prompts))} tokens")
    taken = len(fitting) if count is None else min(count, len(fitting))
    spread = np.linspace(0, len(fitting) - 1, taken).round().astype(int)
    kept = [fitting[place] for place in spread]
    return ChosenSet(
        name=name,
        conversations=tuple(conversations[place] for place in kept),
        prompts=tuple(prompts[place] for place in kept),
        available=len(conversations),
        too_long=len(prompts) - len(fitting),
    )


def read_sets(folder: Path, names: Sequence[str]) -> Iterator[tuple[str, list[Conversation]]]:
    """Name and conversations of each set.

    Args:
      folder: of the JSONL files.
      names: file names without their ending, all files where empty; or data sets:
        "tfds:FOLDER", one that `prompt_dataset.build_prompt_dataset` wrote; "tfds:NAME:SPLIT:FIELD", one of the catalogue, `FIELD`
        being the user's turn; "hf:NAME:SPLIT:FIELD" or "hf:NAME:CONFIG:SPLIT:FIELD", one of the Hugging Face hub.

    Raises:
      ValueError: the folder or a file of it is not there, or a name is in none of these forms.
      ImportError: a data set is named whose library is not installed.
    """
    files = [name for name in names if not name.startswith((TFDS, HUB))]
    if (files or not names) and not folder.is_dir():
        raise ValueError(f"prompts is {folder}, which is no folder; allowed: a folder of JSONL files, a prompt with `turns` on each line")
    there = sorted(path.stem for path in folder.glob("*.jsonl")) if folder.is_dir() else []
    missing = sorted(set(files) - set(there))
    if missing or not (names or there):
        raise ValueError(f"sets has {missing}; {folder} has: {', '.join(there) or 'no JSONL file'}")
    for name in names or in_order(there):
        if name.startswith(TFDS):
            yield _tfds_set(name.removeprefix(TFDS))
        elif name.startswith(HUB):
            yield _hub_set(name.removeprefix(HUB))
        else:
            yield name, read_conversations([folder / f"{name}.jsonl"])


def choose_sets(folder: Path, names: Sequence[str], encode: Encode, max_prompt: int, count: int | None, console: Any) -> list[ChosenSet]:
    """`choose` on each of the sets that `read_sets` gives, in the paper's order."""
    sets = list(read_sets(folder, names))
    chosen = {
        name: choose(name, conversations, encode, max_prompt, count)
        for name, conversations in track(sets, "reading prompts", console=console, transient=True)
    }
    if len(chosen) < len(sets):
        raise ValueError(f"sets is {tuple(names)}; allowed: each set once (they are called {', '.join(name for name, _ in sets)})")
    return [chosen[name] for name in in_order(list(chosen))]


def _tfds_set(source: str) -> tuple[str, list[Conversation]]:
    if (Path(source) / "dataset_info.json").is_file():
        # .../NAME/CONFIG/VERSION, of which the config is a hash of the content.
        return Path(source).resolve().parent.parent.name, load_prompt_dataset(source)
    name, split, field = _parts(TFDS, source, (3,))
    library = _library("tensorflow_datasets", "a data set of TFDS", "tensorflow-datasets")
    rows = library.data_source(name, split=split)
    return name.split("/")[0], _turns(name, (row[field] for row in rows))


def _hub_set(source: str) -> tuple[str, list[Conversation]]:
    name, *config, split, field = _parts(HUB, source, (3, 4))
    library = _library("datasets", "a data set of the Hugging Face hub", "datasets")
    rows = library.load_dataset(name, *config, split=split)
    return name.split("/")[-1], _turns(name, (row[field] for row in rows))


def _parts(kind: str, source: str, allowed: tuple[int, ...]) -> list[str]:
    parts = source.split(":")
    if len(parts) not in allowed or not all(parts):
        raise ValueError(f"sets has {kind + source!r}; allowed: {kind}NAME:SPLIT:FIELD" + (" or with :CONFIG behind NAME" * (4 in allowed)))
    return parts


def _library(module: str, purpose: str, package: str) -> Any:
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        raise ImportError(f"{purpose} needs the package {package!r}, which is not installed: pip install {package}") from error


def _turns(source: str, rows: Iterable[Any]) -> list[Conversation]:
    """A conversation per row: a text is its one turn, a list of texts its turns; bytes are UTF-8."""
    conversations = []
    for line, row in enumerate(rows, start=1):
        turns = [text.decode() if isinstance(text, bytes) else text for text in ([row] if isinstance(row, str | bytes) else row)]
        if not turns or not all(isinstance(text, str) and text.strip() for text in turns):
            raise ValueError(f"{source}, row {line}: the field is {row!r:.200}; allowed: a text that is not blank, or a list of them")
        conversations.append(Conversation(str(line), tuple(Message("user", text) for text in turns), source, line))
    return conversations
