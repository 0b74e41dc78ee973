"""A request inside the engine: its text so far, how far it has been read, and when it ends."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dspark_jax.decode_state import OwnNoise
from dspark_jax.engine_config import EngineConfig
from dspark_jax.requests import FinishReason, Handle, RequestMetrics, RequestOptions, whole_numbers
from dspark_jax.sampling import Sampling
from dspark_jax.slot_executor import NewRow, blank_row
from dspark_jax.stop_texts import StopTexts
from dspark_jax.tokenizers import Tokenizer


@dataclasses.dataclass(eq=False)
class ActiveRequest:
    """A request from its submission to its end.

    Attributes:
      id: names it, and its random bits where it has no seed.
      answer: tokens that the host has seen.
      rounds: of those, the rounds they came from, the first token's counted: what random bits of the next one are made from.
      row, reading, chunks_read, row_state: of its prefill.
      strikes: failed rounds since the last good one.
    """

    id: int
    prompt: tuple[int, ...]
    stop_ids: tuple[int, ...]
    options: RequestOptions
    handle: Handle
    tokenizer: Tokenizer | None
    metrics: RequestMetrics
    answer: list[int] = dataclasses.field(default_factory=list)
    rounds: int = 0
    ended: bool = False
    row: NewRow | None = None
    reading: Any = None
    chunks_read: int = 0
    row_state: Any = None
    strikes: int = 0

    def __post_init__(self) -> None:
        self._stops = StopTexts(self.options.stop_texts)
        self._stream = self.tokenizer.stream(skip_special=True) if self.tokenizer is not None and self.options.stop_texts else None
        self._text = ""

    @property
    def num_slots(self) -> int:
        """Tokens that it may come to."""
        return len(self.prompt) + self.options.max_new_tokens

    @property
    def num_to_read(self) -> int:
        """Tokens that prefill reads: the prompt, and of an answer that goes on all but the anchor."""
        return len(self.prompt) + max(len(self.answer) - 1, 0)

    @property
    def text(self) -> str | None:
        """Of the answer, without special tokens, up to a stop text."""
        if self.tokenizer is None:
            return None
        return self._text if self._stops.found else self.tokenizer.decode(self.answer, skip_special=True)

    def add(self, ids: list[int]) -> tuple[int, FinishReason | None]:
        """More tokens: how many of them counted, and why the request ends with them, if it does."""
        count, reason = len(ids), None
        if self._stream is not None:
            for place, token in enumerate(ids):
                self._stream, piece = self._stream.push([token])
                self._stops, shown = self._stops.push(piece)
                self._text += shown
                if self._stops.found:
                    count, reason = place + 1, "stop_text"
                    break
        self.answer += ids[:count]
        self.handle.add(ids[:count])
        if reason is None and self.answer[-1] in self.stop_ids:
            reason = "stop_id"
        elif reason is None and len(self.answer) == self.options.max_new_tokens:
            reason = "budget"
        return count, reason

    def forget_reading(self) -> None:
        """To be prefilled again from the start."""
        self.row = self.reading = self.row_state = None
        self.chunks_read = 0

    def new_row(self, config: EngineConfig) -> NewRow:
        """What enters the batch: the text so far, with the settings of the request."""
        row, options = blank_row(config.slot_ladder[-1], config.num_stop_ids), self.options
        text = (*self.prompt, *self.answer)
        ids, stop_ids = np.asarray(row.ids), np.full((1, config.num_stop_ids), -1, np.int32)
        ids[0, : len(text)] = text
        stop_ids[0, : len(self.stop_ids)] = self.stop_ids
        # Requests are numbered from 1: nobody else has the bits of a seed of one's own.
        seed, sample = (config.seed, self.id) if options.seed is None else (options.seed, 0)

        def one(value: float, dtype: Any = np.int32) -> Any:
            return np.array([value], dtype)

        return NewRow(
            ids=ids,  # pyright: ignore[reportArgumentType]
            length=one(self.num_to_read),
            given=one(self.answer[-1] if self.answer else -1),
            limit=one(self.num_slots),
            stop_ids=stop_ids,  # pyright: ignore[reportArgumentType]
            request_id=one(self.id),
            round=one(self.rounds),
            sampling=Sampling(one(options.temperature, np.float32), one(options.top_k), one(options.top_p, np.float32)),
            own_noise=OwnNoise(np.array([[seed & 0xFFFFFFFF, seed >> 32]], np.uint32), one(sample)),  # pyright: ignore[reportArgumentType]
        )


def checked_request(
    prompt: Any, options: RequestOptions, config: EngineConfig, vocab_size: int, tokenizer: Tokenizer | None
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Ids of a prompt and of the stop tokens.

    Args:
      prompt: see `EngineCore.submit`.

    Raises:
      ValueError: something that is not there or not possible, or a request that no batch has room for.
    """
    if isinstance(prompt, str) or (isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping)):
        if tokenizer is None:
            raise ValueError("prompt is a text, and the engine has no tokenizer; allowed are token ids")
        prompt = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
    ids = whole_numbers("prompt", prompt)
    if options.stop_texts and tokenizer is None:
        raise ValueError(f"stop_texts is {options.stop_texts}, and the engine has no tokenizer to find them with")
    stop_ids = options.stop_ids
    if stop_ids is None:
        stop_ids = () if tokenizer is None else tokenizer.stop_ids
    for field, values in (("prompt", ids), ("stop_ids", stop_ids)):
        wrong = [token for token in values if not 0 <= token < vocab_size]
        if wrong:
            raise ValueError(f"{field} holds {wrong[0]}; token ids of this target lie in 0..{vocab_size - 1}")
    if not ids:
        raise ValueError("prompt is empty; every request needs at least one token")
    if len(stop_ids) > config.num_stop_ids:
        raise ValueError(f"stop_ids has {len(stop_ids)} tokens; the engine's num_stop_ids allows {config.num_stop_ids}")
    room = config.slot_ladder[-1]
    if len(ids) + options.max_new_tokens > room:
        need = f"{len(ids)} prompt tokens + a budget of {options.max_new_tokens} = {len(ids) + options.max_new_tokens}"
        raise ValueError(f"max_new_tokens is {options.max_new_tokens}; the request needs {need}, and the engine has room for {room}")
    return ids, tuple(stop_ids)
