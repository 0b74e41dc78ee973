"""The engine's loop: which request is read, placed, decoded and looked at when. It knows the device through `SlotExecutor` alone.

Requests arrive and leave at any time. A step of the engine reads a bit of the next request's text (prefill in chunks), puts requests
that are ready into free rows of the batch, launches a round, and looks at the round before the last one: the host never waits for a
round in order to launch the next. What is verified is decided on the device, by the plan's policy. A row that ended in a round that
the host has not seen yet takes no part in the next one, and a round in which nobody takes part costs next to nothing.
"""

import collections
import dataclasses
import logging
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dspark_jax.engine_config import EngineBusy, EngineConfig
from dspark_jax.engine_metrics import EngineMetrics, RoundRecord
from dspark_jax.engine_requests import ActiveRequest
from dspark_jax.requests import Completion, FinishReason, Handle, RequestMetrics, RequestOptions
from dspark_jax.round_plans import RoundPlan
from dspark_jax.slot_executor import BatchShape, SlotExecutor, Ticket
from dspark_jax.tokenizers import Messages, Tokenizer

log = logging.getLogger(__name__)

TOGETHER, ALONE = 1, 2
"""Failed rounds in a row behind which a request is tried again with the others, and by itself."""


@dataclasses.dataclass(frozen=True)
class _First:
    """A request's first token, on its way."""

    request: ActiveRequest
    ticket: Ticket


@dataclasses.dataclass(frozen=True)
class _Round:
    """A launched round, and who was in which row."""

    ticket: Ticket
    placed: tuple[tuple[int, ActiveRequest], ...]
    shape: BatchShape
    launched: float


class EngineCore:
    """The loop, without threads: requests in, completions out, over any `SlotExecutor`. `Engine` is what users make.

    Attributes:
      metrics: see `EngineMetrics`.
    """

    def __init__(
        self,
        executor: SlotExecutor,
        plans: Mapping[int, RoundPlan],
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config, self.tokenizer, self.plans, self.metrics = config, tokenizer, plans, EngineMetrics()
        self._executor, self._clock = executor, clock
        self._next_id = 0
        self._inbox: collections.deque[ActiveRequest] = collections.deque()
        self._cancelled: set[int] = set()
        self._waiting: collections.deque[ActiveRequest] = collections.deque()
        self._reading: ActiveRequest | None = None
        self._ready: collections.deque[ActiveRequest] = collections.deque()
        self._rows: list[ActiveRequest | None] = [None] * executor.shape.rows
        self._release: set[int] = set()
        self._in_flight: collections.deque[_First | _Round] = collections.deque()
        self._failed: _First | _Round | None = None
        self._spare_rounds = 0
        self._device_free = 0.0
        self._doors = threading.Lock()

    # --- from outside, on any thread

    def submit(self, prompt: Sequence[int] | str | Messages, options: RequestOptions | None = None, **fields: Any) -> Handle:
        """Ask for an answer.

        Args:
          prompt: token ids; a text, taken as it stands; or the messages of a conversation, for the tokenizer's chat template.
          options: or its fields by name.

        Raises:
          ValueError: a prompt or an option that cannot be, or a request that no batch has room for.
          EngineBusy: the queue is full.
        """
        try:
            options = RequestOptions(**fields) if options is None else dataclasses.replace(options, **fields)
            ids, stop_ids = self._checked(prompt, options)
            with self._doors:
                if len(self._inbox) + len(self._waiting) >= self.config.queue_limit:
                    raise EngineBusy(f"{self.config.queue_limit} requests are waiting, which is the limit")
                request_id, self._next_id = self._next_id, self._next_id + 1
                handle = Handle(request_id, self.cancel, self._advance, self.tokenizer, options.stop_texts)
                request = ActiveRequest(request_id, ids, stop_ids, options, handle, self.tokenizer, RequestMetrics(self._clock()))
                self._inbox.append(request)
                self.metrics.submitted += 1
        except (ValueError, EngineBusy):
            self.metrics.refused += 1
            raise
        self._wake()
        return handle

    def cancel(self, request_id: int) -> None:
        """End a request with what it has."""
        with self._doors:
            self._cancelled.add(request_id)
        self._wake()

    def cancel_all(self) -> None:
        """End every request with what it has."""
        with self._doors:
            self._cancelled |= {request.id for request in (*self._everybody(), *self._inbox)}
        self._wake()

    def _wake(self) -> None:
        """Something has come in."""

    def _advance(self) -> bool:
        """What a waiting handle does; whether there was anything to do."""
        return self.step()

    def _checked(self, prompt: Any, options: RequestOptions) -> tuple[tuple[int, ...], tuple[int, ...]]:
        tokenizer = self.tokenizer
        if isinstance(prompt, str) or (isinstance(prompt, Sequence) and len(prompt) and isinstance(prompt[0], Mapping)):
            if tokenizer is None:
                raise ValueError("prompt is a text, and the engine has no tokenizer; allowed are token ids")
            prompt = tokenizer.encode(prompt) if isinstance(prompt, str) else tokenizer.encode_chat(prompt)
        if not isinstance(prompt, Sequence | np.ndarray):
            raise ValueError(f"prompt is {prompt!r}; allowed are token ids, a text, or messages")
        ids = tuple(int(each) for each in prompt)
        vocab_size = next(iter(self.plans.values())).plan.target.spec.vocab_size
        if options.stop_texts and tokenizer is None:
            raise ValueError(f"stop_texts is {options.stop_texts}, and the engine has no tokenizer to find them with")
        stop_ids = options.stop_ids if options.stop_ids is not None else () if tokenizer is None else tokenizer.stop_ids
        for field, values in (("prompt", ids), ("stop_ids", stop_ids)):
            wrong = [token for token in values if not 0 <= token < vocab_size]
            if wrong:
                raise ValueError(f"{field} holds {wrong[0]}; token ids of this target lie in 0..{vocab_size - 1}")
        if not ids:
            raise ValueError("prompt is empty; every request needs at least one token")
        if len(stop_ids) > self.config.num_stop_ids:
            raise ValueError(f"stop_ids has {len(stop_ids)} tokens; the engine's num_stop_ids allows {self.config.num_stop_ids}")
        room = self.config.slot_ladder[-1]
        if len(ids) + options.max_new_tokens > room:
            need = f"{len(ids)} prompt tokens + a budget of {options.max_new_tokens} = {len(ids) + options.max_new_tokens}"
            raise ValueError(f"max_new_tokens is {options.max_new_tokens}; the request needs {need}, and the engine has room for {room}")
        return ids, stop_ids

    # --- the loop

    @property
    def idle(self) -> bool:
        """Nobody waits for anything."""
        return not (self._inbox or self._waiting or self._reading or self._ready or self._in_flight or any(self._rows))

    def step(self) -> bool:
        """Read, place, launch, look: see the top of the file. Gives whether there was anything to do."""
        if self.idle:
            return False
        began, waited = self._clock(), self.metrics.waited_seconds
        try:
            self._take_in()
            self._read()
            self._place()
            # At most so many rounds are launched and not looked at, this one included.
            self._look_until(self.config.rounds_in_flight - 1)
            if not self._launch():
                self._look_until(max(sum(isinstance(each, _Round) for each in self._in_flight) - 1, 0), firsts=True)
        except Exception as error:
            self._recover(error)
        self.metrics.host_seconds += self._clock() - began - (self.metrics.waited_seconds - waited)
        self.metrics.waiting, self.metrics.reading = len(self._waiting), int(self._reading is not None) + len(self._ready)
        self.metrics.decoding = sum(row is not None for row in self._rows)
        return True

    def _everybody(self) -> list[ActiveRequest]:
        held = [*self._ready, *(row for row in self._rows if row is not None)]
        return [*self._waiting, *([] if self._reading is None else [self._reading]), *held]

    def _take_in(self) -> None:
        with self._doors:
            self._waiting += self._inbox
            self._inbox.clear()
            cancelled, self._cancelled = self._cancelled, set()
        now = self._clock()
        for request in self._everybody():
            if request.id in cancelled:
                self._end(request, "cancelled")
            elif request.options.deadline is not None and now - request.metrics.submitted >= request.options.deadline:
                self._end(request, "deadline")
        self._waiting = collections.deque(each for each in self._waiting if not each.ended)

    # --- prefill

    def _read(self) -> None:
        decoding = sum(row is not None for row in self._rows)
        chunks = self.config.chunks_per_round or 1 + decoding // 8
        while chunks and (request := self._next_to_read()) is not None:
            try:
                if request.row is None:
                    request.row = request.new_row(self.config)
                    request.metrics.started = request.metrics.started or self._clock()
                request.reading = self._executor.read(request.row, request.reading, request.chunks_read)
                request.chunks_read += 1
                chunks -= 1
                if request.chunks_read * self.config.prefill_chunk < request.num_to_read:
                    continue
                request.row_state, ticket = self._executor.begin(request.row, request.reading)
            except Exception as error:
                # Nothing of the others was touched.
                self._end(request, "error", error)
                continue
            self.metrics.prefill_tokens += request.num_to_read
            request.row = request.reading = self._reading = None
            self._ready.append(request)
            self._in_flight.append(_First(request, ticket))
            if not decoding:
                return

    def _next_to_read(self) -> ActiveRequest | None:
        if self._reading is not None and not self._reading.ended:
            return self._reading
        self._reading = None
        held = len(self._ready) + sum(row is not None for row in self._rows)
        alone = any(each.strikes >= ALONE for each in (*self._waiting, *self._ready, *self._rows) if each is not None)
        if self._waiting and held < (1 if alone else self.config.row_ladder[-1]):
            self._reading = self._waiting.popleft()
        return self._reading

    # --- rows

    def _place(self) -> None:
        self._ready = collections.deque(each for each in self._ready if not each.ended)
        wanted = self._wanted_shape()
        if wanted != self._executor.shape:
            kept = [slot for slot, request in enumerate(self._rows) if request is not None]
            self._executor.resize(kept, wanted)
            self._rows = [self._rows[slot] for slot in kept] + [None] * (wanted.rows - len(kept))
            self._release.clear()
            self._spare_rounds = 0
        while self._ready:
            request, slot = self._ready[0], self._rows.index(None)
            self._executor.insert(request.row_state, slot)
            self._ready.popleft()
            request.row_state = None
            self._rows[slot] = request
            self._release.discard(slot)

    def _wanted_shape(self) -> BatchShape:
        """The smallest shape that holds everybody; a smaller one than now only after some rounds with room to spare."""
        held = [*self._ready, *(row for row in self._rows if row is not None)]
        rows = next(size for size in self.config.row_ladder if size >= len(held))
        slots = next(size for size in self.config.slot_ladder if size >= max((each.num_slots for each in held), default=0))
        now = self._executor.shape
        if rows < now.rows or slots < now.slots:
            self._spare_rounds += 1
            if self._spare_rounds <= self.config.shrink_after:
                return BatchShape(max(rows, now.rows), max(slots, now.slots))
        else:
            self._spare_rounds = 0
        return BatchShape(rows, slots)

    def _launch(self) -> bool:
        placed = tuple((slot, request) for slot, request in enumerate(self._rows) if request is not None)
        if not placed:
            return False
        release = np.zeros((self._executor.shape.rows,), bool)
        release[list(self._release)] = True
        self._release.clear()
        self._in_flight.append(_Round(self._executor.launch(release), placed, self._executor.shape, self._clock()))
        return True

    # --- what has come back

    def _look_until(self, rounds_left: int, firsts: bool = False) -> None:
        """Look at what is in flight, oldest first, until at most so many rounds are left (and, if asked, no first tokens before them)."""
        rounds = sum(isinstance(each, _Round) for each in self._in_flight)
        while self._in_flight and (rounds > rounds_left or (firsts and isinstance(self._in_flight[0], _First))):
            entry = self._in_flight[0]
            rounds -= isinstance(entry, _Round)
            self._look_at(entry)
            self._in_flight.popleft()

    def _look_at(self, entry: _First | _Round) -> None:
        began = self._clock()
        try:
            value = entry.ticket.get()
        except Exception:
            self._failed = entry
            raise
        finally:
            self.metrics.waited_seconds += self._clock() - began
        if isinstance(entry, _First):
            self._take_first(entry.request, int(value))
        else:
            self._take_round(entry, value)

    def _take_first(self, request: ActiveRequest, token: int) -> None:
        if request.ended or request.answer:
            # Prefilled again: its tokens are known.
            return
        request.metrics.first_token = self._clock()
        request.rounds = 1
        self.metrics.emitted_tokens += 1
        self._add(request, [token])

    def _take_round(self, entry: _Round, stats: Any) -> None:
        now = self._clock()
        plan, emitted = self.plans[entry.shape.rows], 0
        took_part = [(slot, request) for slot, request in entry.placed if stats.active[slot]]
        for slot, request in took_part:
            if request.ended:
                continue
            request.strikes = 0
            request.rounds += 1
            count = int(stats.emitted[slot])
            request.metrics.rounds += 1
            request.metrics.verified += int(stats.verified[slot])
            kept = [*stats.drafts[slot, : int(stats.num_accepted[slot])].tolist(), int(stats.next_id[slot])]
            counted = self._add(request, kept[:count])
            request.metrics.emitted += counted
            emitted += counted
        slots = [slot for slot, _ in took_part]
        verified, drafted = int(stats.verified[slots].sum()), bool(stats.drafted)
        bucket = plan.bucket(entry.shape.rows, len(took_part) + verified, drafted) if took_part else 0
        record = RoundRecord(
            rows=entry.shape.rows,
            slots=entry.shape.slots,
            active=len(took_part),
            verified=verified,
            bucket=bucket,
            drafted=drafted,
            emitted=emitted,
            predicted_seconds=plan.seconds(bucket, drafted) if took_part else None,
            seconds=now - max(entry.launched, self._device_free),
        )
        self._device_free = now
        self.metrics.add_round(record)

    def _add(self, request: ActiveRequest, ids: list[int]) -> int:
        """Tokens of a request, which may end with them; gives how many counted."""
        count, reason = request.add(ids)
        if reason is not None:
            self._end(request, reason)
        return count

    def _end(self, request: ActiveRequest, reason: FinishReason, error: Exception | None = None) -> None:
        if request.ended:
            return
        request.ended = True
        request.row = request.reading = request.row_state = None
        request.metrics.finished = self._clock()
        if self._reading is request:
            self._reading = None
        if request in self._rows:
            slot = self._rows.index(request)
            self._rows[slot] = None
            self._release.add(slot)
        try:
            text = request.text
        except Exception as unreadable:
            text, reason, error = None, "error", unreadable
        said = None if error is None else f"{type(error).__name__}: {error}"
        completion = Completion(request.id, tuple(request.answer), text, reason, request.metrics, said)
        self.metrics.add_completion(completion)
        request.handle.end(completion)

    # --- errors

    def _recover(self, error: Exception) -> None:
        """Behind an error of the device: whom it concerns ends with it, the others are prefilled again from what they have.

        A first token concerns its request. Of a round it is not known whom it concerns: everybody is tried again, first together, and
        where that fails as well, one by one; who fails alone is the one.
        """
        log.warning("the device reported an error, and requests are prefilled again: %s: %s", type(error).__name__, error)
        self.metrics.recoveries += 1
        failed, self._failed = self._failed, None
        involved = [request for request in self._rows if request is not None]
        if isinstance(failed, _First):
            self._end(failed.request, "error", error)
        elif len(involved) == 1 and involved[0].strikes >= ALONE:
            self._end(involved[0], "error", error)
        else:
            for request in involved:
                request.strikes += 1
        again = [each for each in self._everybody() if not each.ended and each not in self._waiting]
        for request in sorted(again, key=lambda each: each.id, reverse=True):
            request.forget_reading()
            self._waiting.appendleft(request)
        self._in_flight.clear()
        self._ready.clear()
        self._release.clear()
        self._reading = None
        shape = BatchShape(self.config.row_ladder[0], self.config.slot_ladder[0])
        try:
            self._executor.reset(shape)
        except Exception as worse:
            self._give_up(worse)
            raise
        self._rows = [None] * shape.rows
        self._spare_rounds = 0

    def _give_up(self, error: Exception) -> None:
        """Nothing can go on: everybody ends with the error."""
        for request in (*self._everybody(), *self._inbox):
            self._end(request, "error", error)
        self._waiting.clear()
        self._inbox.clear()
