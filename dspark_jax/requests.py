"""What is asked of the engine, and what comes back."""

import asyncio
import dataclasses
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, Literal, get_args

from dspark_jax.sampling import Sampling
from dspark_jax.stop_texts import StopTexts
from dspark_jax.tokenizers import Tokenizer

FinishReason = Literal["stop_id", "stop_text", "budget", "cancelled", "deadline", "error"]
"""How a request ends: by a stop token, by a stop text, with its budget used up, by `cancel`, late, or by an error."""

FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)


@dataclasses.dataclass(frozen=True)
class RequestOptions:
    """How a request is to be answered.

    Attributes:
      max_new_tokens: token budget.
      temperature, top_k, top_p: as in `Sampling`.
      seed: of its random bits, which are then the same whenever the request is repeated; None: from the engine's seed and the
        request's number.
      stop_ids: tokens that end it, kept in its answer; None: those of the tokenizer.
      stop_texts: texts that end it, not kept in its text; they need a tokenizer.
      deadline: seconds after which it is given up, from when it was submitted; None: never.
    """

    max_new_tokens: int = 256
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop_ids: tuple[int, ...] | None = None
    stop_texts: tuple[str, ...] = ()
    deadline: float | None = None

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; allowed are integers from 0 to 2**64 - 1")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline is {self.deadline}; allowed are seconds above 0, or None")
        if isinstance(self.stop_texts, str):
            raise ValueError(f"stop_texts is the text {self.stop_texts!r}; allowed is a tuple of texts")
        StopTexts(self.stop_texts)
        Sampling.make(1, self.temperature, self.top_k, self.top_p)


@dataclasses.dataclass
class RequestMetrics:
    """Times in seconds on the engine's clock, and counts; what has not happened is None.

    Attributes:
      submitted, started, first_token, finished: when it came, was taken up, had its first token (from prefill), and ended.
      rounds, emitted, verified: as in `Tally`, all rounds counted, the first token not.
    """

    submitted: float
    started: float | None = None
    first_token: float | None = None
    finished: float | None = None
    rounds: int = 0
    emitted: int = 0
    verified: int = 0

    @property
    def time_to_first_token(self) -> float | None:
        """Seconds from submission to the first token."""
        return None if self.first_token is None else self.first_token - self.submitted

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens behind the first one per second since that; None before the end, or where there was no time in between."""
        if self.first_token is None or self.finished is None or self.finished <= self.first_token:
            return None
        return self.emitted / (self.finished - self.first_token)

    @property
    def accepted_length(self) -> float | None:
        """Tokens a round, the bonus token counted."""
        return self.emitted / self.rounds if self.rounds else None


@dataclasses.dataclass(frozen=True)
class Completion:
    """A request that has ended.

    Attributes:
      ids: its answer, a closing stop token included.
      text: of the answer without special tokens, up to a stop text; None without a tokenizer.
      error: what went wrong, where `reason` is "error".
    """

    request_id: int
    ids: tuple[int, ...]
    text: str | None
    reason: FinishReason
    metrics: RequestMetrics
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class Piece:
    """What has been added to an answer: tokens, and the whole characters that they complete."""

    ids: tuple[int, ...]
    text: str


class Handle:
    """A submitted request: iterate over it (or `async for`) for its pieces, `result` (or `await`) for all of it, `cancel` it.

    Where no thread runs the engine, waiting for a handle runs it.
    """

    def __init__(
        self,
        request_id: int,
        cancel: Callable[[int], None],
        advance: Callable[[], bool],
        tokenizer: Tokenizer | None = None,
        stop_texts: tuple[str, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.completion: Completion | None = None
        self._cancel, self._advance, self._tokenizer, self._stop_texts = cancel, advance, tokenizer, stop_texts
        self._ids: list[int] = []
        self._changed = threading.Condition()

    # --- for the engine

    def add(self, ids: Sequence[int]) -> None:
        """Tokens that have been decided on."""
        with self._changed:
            self._ids += ids
            self._changed.notify_all()

    def end(self, completion: Completion) -> None:
        """The request has ended."""
        with self._changed:
            self.completion = completion
            self._changed.notify_all()

    # --- for everybody

    @property
    def ids(self) -> tuple[int, ...]:
        """Tokens of the answer so far."""
        return tuple(self._ids)

    def cancel(self) -> None:
        """End it with what it has; nothing happens where it has ended."""
        self._cancel(self.request_id)

    def result(self, timeout: float | None = None) -> Completion:
        """The finished request.

        Raises:
          TimeoutError: it has not ended within `timeout` seconds (the request goes on).
        """
        self._wait(lambda: self.completion is not None, timeout)
        assert self.completion is not None
        return self.completion

    def __iter__(self) -> Iterator[Piece]:
        stream, stops = None if self._tokenizer is None else self._tokenizer.stream(skip_special=True), StopTexts(self._stop_texts)
        given, text = 0, ""
        while True:
            self._wait(lambda known=given: len(self._ids) > known or self.completion is not None)
            # The end is looked at first: no token comes behind it.
            ended = self.completion
            ids = tuple(self._ids[given:])
            given += len(ids)
            if ended is not None and ended.text is not None:
                piece = ended.text[len(text) :]
            elif stream is not None:
                stream, piece = stream.push(ids)
                stops, piece = stops.push(piece)
            else:
                piece = ""
            text += piece
            if ids or piece:
                yield Piece(ids, piece)
            if ended is not None:
                return

    async def __aiter__(self) -> AsyncIterator[Piece]:
        pieces, end = iter(self), object()
        while (piece := await asyncio.to_thread(next, pieces, end)) is not end:
            yield piece  # pyright: ignore[reportReturnType]

    def __await__(self) -> Generator[Any, None, Completion]:
        return asyncio.to_thread(self.result).__await__()

    def _wait(self, there: Callable[[], bool], timeout: float | None = None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        while not there() and (until is None or time.monotonic() < until) and self._advance():
            pass
        with self._changed:
            if not self._changed.wait_for(there, None if until is None else max(until - time.monotonic(), 0)):
                raise TimeoutError(f"request {self.request_id} has not ended within {timeout} seconds")
