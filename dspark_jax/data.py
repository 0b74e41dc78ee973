"""Text for training a drafter: loss masks of chats, and answered sequences on disk. `batches.py` makes batches of them."""

import dataclasses
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

import numpy as np

from dspark_jax.typing import Bool, Int, typed

DOMAINS = ("maths", "code", "chat")
"""Domains of prompts; the index is the code that is stored."""

FIELD_DTYPES = {
    "tokens": ("uint16", "uint32"),
    "offsets": ("int64",),
    "answer_start": ("int16", "int32"),
    "answer_end": ("int16", "int32"),
    "finished": ("bool",),
    "domain": ("int8",),
    "temperature": ("int8",),
    "heldout": ("int8",),
    "source": ("int32",),
}
"""The arrays of a file of token sequences, and the dtypes each may have."""


def _reject(field: str, value: object, allowed: object) -> NoReturn:
    raise ValueError(f"{field} is {value!r}; allowed: {allowed}")


@dataclasses.dataclass(frozen=True)
class ChatTemplate:
    """How a chat template marks the turns of the assistant.

    Attributes:
      assistant_header: text that opens such a turn.
      end_of_turn: text that closes it, part of the loss.
      default_system: system turn put in front of a chat that has none; None for no such turn.
      excluded_prefix: put in front of the assistant's words where absent, and kept out of the loss.
    """

    assistant_header: str
    end_of_turn: str
    default_system: str | None = None
    excluded_prefix: str = ""


def qwen_template() -> ChatTemplate:
    """Qwen 2 and 3. As in the reference, what a template inserts behind the header (an empty think block) is in the loss."""
    return ChatTemplate("<|im_start|>assistant\n", "<|im_end|>\n", default_system="You are a helpful assistant.")


def chatml_template(default_system: str = "You are a helpful AI assistant named SmolLM, trained by Hugging Face") -> ChatTemplate:
    """ChatML as SmolLM2 has it; the newline behind the closing mark is the template's, never the model's, and so not in the loss."""
    return ChatTemplate("<|im_start|>assistant\n", "<|im_end|>", default_system=default_system)


def gemma4_template() -> ChatTemplate:
    """Gemma 4 with an empty thought channel in front of every answer."""
    return ChatTemplate("<|turn>model\n", "<turn|>\n", excluded_prefix="<|channel>thought\n<channel|>")


@typed
def complete_chat(messages: Sequence[Mapping[str, str]], template: ChatTemplate) -> list[dict[str, str]]:
    """The chat as it is rendered: default system turn first where there is none, excluded prefix before every answer."""
    chat = [dict(message) for message in messages]
    for number, message in enumerate(chat):
        if message.get("role") not in ("system", "user", "assistant"):
            _reject(f"messages[{number}]['role']", message.get("role"), "system, user, assistant")
        if "content" not in message:
            _reject(f"messages[{number}]['content']", None, "a string")
        if message["role"] == "assistant" and not message["content"].startswith(template.excluded_prefix):
            message["content"] = template.excluded_prefix + message["content"]
    if template.default_system is not None and (not chat or chat[0]["role"] != "system"):
        chat.insert(0, {"role": "system", "content": template.default_system})
    return chat


def _assistant_spans(text: str, template: ChatTemplate) -> Iterator[tuple[int, int]]:
    """Character ranges of the assistant's words, each with its end of turn (or up to the end of the text)."""
    header = text.find(template.assistant_header)
    while header >= 0:
        start = header + len(template.assistant_header)
        if text.startswith(template.excluded_prefix, start):
            start += len(template.excluded_prefix)
        end = text.find(template.end_of_turn, start)
        end = len(text) if end < 0 else end + len(template.end_of_turn)
        yield start, end
        header = text.find(template.assistant_header, end)


@typed
def loss_mask(
    text: str, tokenize: Callable[[str], Sequence[int]], template: ChatTemplate, max_length: int
) -> tuple[Int[np.ndarray, "S"], Bool[np.ndarray, "S"]]:
    """Token ids of a rendered chat, and which of them the assistant wrote.

    A character range becomes a token range by tokenizing the text before it and the text up to its end (reference facts 4.2), so
    that it needs no offsets from the tokenizer.

    Args:
      tokenize: text to ids, adding no special tokens of its own.
      max_length: ids beyond it are cut off, at least 1.
    """
    if max_length < 1:
        _reject("max_length", max_length, "at least 1")
    ids = np.asarray(tokenize(text)[:max_length], np.int32)
    mask = np.zeros(ids.shape, np.bool_)
    for start, end in _assistant_spans(text, template):
        mask[len(tokenize(text[:start])) : len(tokenize(text[:end]))] = True
    return ids, mask


@dataclasses.dataclass(frozen=True, eq=False)
class TokenSequences:
    """Answered prompts: n token sequences one after another, and what is known of each.

    Attributes:
      tokens: ids of all sequences, prompt and answer.
      offsets: sequence i is `tokens[offsets[i]:offsets[i + 1]]`; n + 1 entries.
      answer_start: first position of the answer inside its sequence.
      answer_end: position behind its last token, the closing mark included.
      finished: the answer came to its end; False where it was cut.
      domain: index into `DOMAINS`.
      temperature: class of the answer's temperature, see `temperature_class`.
      heldout: 1 where the prompt is kept out of training.
      source: number of the prompt in its origin; -1 where it has none.
    """

    tokens: np.ndarray
    offsets: np.ndarray
    answer_start: np.ndarray
    answer_end: np.ndarray
    finished: np.ndarray
    domain: np.ndarray
    temperature: np.ndarray
    heldout: np.ndarray
    source: np.ndarray

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Int[np.ndarray, "n"]:
        """Tokens of every sequence."""
        return np.diff(self.offsets)

    @typed
    def select(self, mask: Bool[np.ndarray, "n"]) -> "TokenSequences":
        """The sequences where `mask` is True, in their order."""
        if len(mask) != len(self):
            _reject("mask's length", len(mask), len(self))
        rows = {name: getattr(self, name)[mask] for name in FIELD_DTYPES if name not in ("tokens", "offsets")}
        lengths = self.lengths
        return TokenSequences(tokens=self.tokens[np.repeat(mask, lengths)], offsets=offsets_from_lengths(lengths[mask]), **rows)

    def checked(self, where: str, vocab_size: int = 2**32) -> "TokenSequences":
        """Itself, if every field is as it should be.

        Args:
          where: what the error calls the data: the file's name.
          vocab_size: ids must be below it.

        Raises:
          ValueError: naming `where`, the field, its value and what is allowed.
        """
        for field, dtypes in FIELD_DTYPES.items():
            values = getattr(self, field)
            if str(values.dtype) not in dtypes:
                _reject(f"{where}: dtype of {field}", str(values.dtype), " or ".join(dtypes))
            if values.ndim != 1:
                _reject(f"{where}: number of axes of {field}", values.ndim, 1)
        ends = (int(self.offsets[0]), int(self.offsets[-1])) if len(self.offsets) else ()
        if ends != (0, len(self.tokens)):
            _reject(f"{where}: first and last of offsets", ends, (0, len(self.tokens)))
        for field in FIELD_DTYPES:
            if field not in ("tokens", "offsets") and len(getattr(self, field)) != len(self):
                _reject(f"{where}: length of {field}", len(getattr(self, field)), f"{len(self)}, one per sequence")
        _check_range(where, "lengths by offsets", self.lengths, 1, len(self.tokens))
        _check_range(where, "tokens", self.tokens, 0, vocab_size - 1)
        _check_range(where, "answer_end", self.answer_end, 1, self.lengths)
        _check_range(where, "answer_start", self.answer_start, 0, self.answer_end - 1)
        _check_range(where, "domain", self.domain, 0, len(DOMAINS) - 1)
        _check_range(where, "temperature", self.temperature, 0, 2)
        _check_range(where, "heldout", self.heldout, 0, 1)
        _check_range(where, "source", self.source, -1, np.iinfo(np.int32).max)
        return self


@typed
def offsets_from_lengths(lengths: Sequence[int] | Int[np.ndarray, "n"]) -> Int[np.ndarray, "ends"]:
    """Where sequences of these lengths begin when they lie one after another, and where the last one ends."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])


def _check_range(where: str, field: str, values: np.ndarray, low: int | np.ndarray, high: int | np.ndarray) -> None:
    bad = np.flatnonzero((values < low) | (values > high))
    if len(bad):
        at = int(bad[0])
        lowest, highest = (int(np.broadcast_to(bound, values.shape)[at]) for bound in (low, high))
        _reject(f"{where}: {field}[{at}]", int(values[at]), f"{lowest} to {highest}")


@typed
def most_frequent_ids(sequences: TokenSequences, count: int, vocab_size: int) -> Int[np.ndarray, "count"]:
    """The `count` ids that stand most often in the texts, prompts included, ascending; of equally frequent ones the lowest."""
    if not 1 <= count <= vocab_size:
        raise ValueError(f"count is {count}; allowed: 1 to vocab_size {vocab_size}")
    occurrences = np.bincount(sequences.tokens, minlength=vocab_size)
    return np.sort(np.argsort(-occurrences, kind="stable")[:count]).astype(np.int32)


@typed
def load_token_sequences(paths: str | Path | Sequence[str | Path], vocab_size: int = 2**32) -> TokenSequences:
    """The sequences of one or several .npz files, one file after another, every field of every file checked.

    Args:
      vocab_size: ids must be below it. On an accelerator an id beyond the embedding is clamped without a word, so give the target's.

    Raises:
      ValueError: naming the file, the field, its value and what is allowed.
    """
    paths = [paths] if isinstance(paths, str | Path) else paths
    if not paths:
        _reject("paths", [], "at least one file")
    parts = []
    for path in paths:
        if not Path(path).is_file():
            _reject("paths", str(path), "existing .npz files")
        try:
            with open(path, "rb") as file, np.load(file, allow_pickle=False) as archive:
                arrays = {field: archive[field] for field in FIELD_DTYPES}
        except (zipfile.BadZipFile, ValueError, TypeError, KeyError, EOFError) as error:
            raise ValueError(f"{path} cannot be read: {error}; allowed: an .npz file with {', '.join(FIELD_DTYPES)}") from error
        parts.append(TokenSequences(**arrays).checked(str(path), vocab_size))
    rows = {name: np.concatenate([getattr(part, name) for part in parts]) for name in FIELD_DTYPES if name != "offsets"}
    return TokenSequences(offsets=offsets_from_lengths(np.concatenate([part.lengths for part in parts])), **rows)


@typed
def save_token_sequences(path: str | Path, sequences: TokenSequences) -> None:
    """Write an .npz file that is either whole or not there: under another name first, renamed at the end."""
    sequences.checked("sequences")
    unfinished = Path(path).with_name(Path(path).name + ".unfinished")
    try:
        with open(unfinished, "wb") as file:
            np.savez_compressed(file, **{field: getattr(sequences, field) for field in FIELD_DTYPES})
            file.flush()
            os.fsync(file.fileno())
        os.replace(unfinished, path)
    finally:
        unfinished.unlink(missing_ok=True)
