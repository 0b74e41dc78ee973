"""A request inside the engine: its text so far, how far it has been read, and when it ends."""

import dataclasses
from typing import Any

import numpy as np

from dspark_jax.decode_state import OwnNoise
from dspark_jax.engine_config import EngineConfig
from dspark_jax.requests import FinishReason, Handle, RequestMetrics, RequestOptions
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
