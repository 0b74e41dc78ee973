"""What is asked of the engine, and what comes back."""

import asyncio
import dataclasses
import operator
import threading
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator, Sequence
from typing import Any, Literal, get_args

import numpy as np

from dspark_jax.sampling import Sampling
from dspark_jax.stop_texts import StopTexts
from dspark_jax.tokenizers import Tokenizer

FinishReason = Literal["stop_id", "stop_text", "budget", "cancelled", "deadline", "error"]
"""How a request ends: by a stop token, by a stop text, with its budget used up, by `cancel`, late, or by an error."""

FINISH_REASONS: tuple[str, ...] = get_args(FinishReason)


def whole_numbers(field: str, values: Any) -> tuple[int, ...]:
    """`values` as integers.

    Raises:
      ValueError: no sequence, or something in it that is no integer.
    """
    if isinstance(values, str) or not isinstance(values, Sequence | np.ndarray):
        raise ValueError(f"{field} is {values!r}; allowed is a sequence of integers")
    try:
        return tuple(operator.index(each) for each in values)
    except TypeError:
        wrong = next(each for each in values if not hasattr(each, "__index__"))
        raise ValueError(f"{field} has {wrong!r}; allowed are integers") from None


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
        whole_numbers("max_new_tokens", (self.max_new_tokens,))
        whole_numbers("top_k", (self.top_k,))
        if self.stop_ids is not None:
            whole_numbers("stop_ids", self.stop_ids)
        if self.seed is not None:
            whole_numbers("seed", (self.seed,))
        if self.top_k >= 2**31:
            raise ValueError(f"top_k is {self.top_k}; allowed are integers below 2**31")
        if self.max_new_tokens < 1:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; it must be at least 1")
        if self.seed is not None and not 0 <= self.seed < 2**64:
            raise ValueError(f"seed is {self.seed}; allowed are integers from 0 to 2**64 - 1")
        if self.deadline is not None and not self.deadline > 0:
            raise ValueError(f"deadline is {self.deadline}; allowed are seconds above 0, or None")
        if isinstance(self.stop_texts, str):
            raise ValueError(f"stop_texts is the text {self.stop_texts!r}; allowed is a tuple of texts")
        StopTexts(self.stop_texts)
        # Checked, not made: who asks must not wait for a device that is busy with rounds.
        Sampling.checked(1, self.temperature, self.top_k, self.top_p)


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
        is_served: Callable[[], bool],
        tokenizer: Tokenizer | None = None,
        stop_texts: tuple[str, ...] = (),
    ) -> None:
        self.request_id = request_id
        self.completion: Completion | None = None
        self._cancel, self._advance, self._is_served = cancel, advance, is_served
        self._tokenizer, self._stop_texts = tokenizer, stop_texts
        self._watchers: list[Callable[[], None]] = []
        self._ids: list[int] = []
        self._changed = threading.Condition()

    # --- for the engine

    def add(self, ids: Sequence[int]) -> None:
        """Tokens that have been decided on."""
        with self._changed:
            self._ids += ids
            self._tell()

    def end(self, completion: Completion) -> None:
        """The request has ended."""
        with self._changed:
            self.completion = completion
            self._tell()

    def _tell(self) -> None:
        self._changed.notify_all()
        for watcher in self._watchers:
            watcher()

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
        reader = _Reader(self._tokenizer, self._stop_texts)
        while not reader.ended:
            self._wait(lambda: self._has_more(reader))
            completion = self.completion
            if (piece := reader.read(self._ids, completion)) is not None:
                yield piece

    async def __aiter__(self) -> AsyncIterator[Piece]:
        reader = _Reader(self._tokenizer, self._stop_texts)
        while not reader.ended:
            await self._wait_in_loop(lambda: self._has_more(reader))
            completion = self.completion
            if (piece := reader.read(self._ids, completion)) is not None:
                yield piece

    def __await__(self) -> Generator[Any, None, Completion]:
        return self._completed().__await__()

    async def _completed(self) -> Completion:
        await self._wait_in_loop(lambda: self.completion is not None)
        assert self.completion is not None
        return self.completion

    def _has_more(self, reader: "_Reader") -> bool:
        return len(self._ids) > reader.given or self.completion is not None

    async def _wait_in_loop(self, there: Callable[[], bool]) -> None:
        """As `_wait`, without holding a thread for it: the engine's own says when there is something new."""
        loop, changed = asyncio.get_running_loop(), asyncio.Event()

        def tell() -> None:
            loop.call_soon_threadsafe(changed.set)

        with self._changed:
            self._watchers.append(tell)
        try:
            while not there():
                if self._is_served():
                    await changed.wait()
                    changed.clear()
                else:
                    await asyncio.to_thread(self._advance)
        finally:
            with self._changed:
                self._watchers.remove(tell)

    def _wait(self, there: Callable[[], bool], timeout: float | None = None) -> None:
        until = None if timeout is None else time.monotonic() + timeout
        while not there() and (until is None or time.monotonic() < until) and self._advance():
            pass
        with self._changed:
            if not self._changed.wait_for(there, None if until is None else max(until - time.monotonic(), 0)):
                raise TimeoutError(f"request {self.request_id} has not ended within {timeout} seconds")


class _Reader:
    """Turns the tokens of a handle into pieces."""

    def __init__(self, tokenizer: Tokenizer | None, stop_texts: tuple[str, ...]) -> None:
        self.given, self.ended = 0, False
        self._stream = None if tokenizer is None else tokenizer.stream(skip_special=True)
        self._stops, self._text = StopTexts(stop_texts), ""

    def read(self, ids: Sequence[int], completion: Completion | None) -> Piece | None:
        """What is new; None where that is nothing. `completion` was looked at before `ids`: no token comes behind it."""
        new = tuple(ids[self.given :])
        self.given += len(new)
        self.ended = completion is not None
        if completion is not None and completion.text is not None:
            text = completion.text[len(self._text) :]
        else:
            text = self._shown(new)
        self._text += text
        return Piece(new, text) if new or text else None

    def _shown(self, ids: tuple[int, ...]) -> str:
        if self._stream is None:
            return ""
        try:
            self._stream, text = self._stream.push(ids)
        except ValueError:
            # An id that the tokenizer does not know; the request ends with the same error.
            self._stream = None
            return ""
        self._stops, text = self._stops.push(text)
        return text
