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
from dspark_jax.engine_metrics import EngineMetrics, record_of
from dspark_jax.engine_requests import ActiveRequest, checked_request
from dspark_jax.requests import Completion, FinishReason, Handle, RequestMetrics, RequestOptions
from dspark_jax.round_plans import RoundPlan
from dspark_jax.slot_executor import BatchShape, SlotExecutor, Ticket
from dspark_jax.tokenizers import Messages, Tokenizer

log = logging.getLogger(__name__)

ALONE = 2
"""Failed rounds in a row behind which a request is tried again by itself; behind fewer, with the others."""


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
        self._next_id = 1
        self._inbox: collections.deque[ActiveRequest] = collections.deque()
        self._cancelled: set[int] = set()
        self._cancel_all = False
        self._waiting: collections.deque[ActiveRequest] = collections.deque()
        self._reading: ActiveRequest | None = None
        self._ready: collections.deque[ActiveRequest] = collections.deque()
        self._rows: list[ActiveRequest | None] = [None] * executor.shape.rows
        self._release: set[int] = set()
        self._in_flight: collections.deque[_First | _Round] = collections.deque()
        self._failed: _First | _Round | None = None
        self._placing: ActiveRequest | None = None
        self._barren_recoveries = 0
        self._interrupted = False
        self._spare_rounds = 0
        self._device_free = 0.0
        # Of what comes from other threads; and of the loop, which whoever waits may run.
        self._doors, self._stepping = threading.Lock(), threading.Lock()

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
            vocab_size = next(iter(self.plans.values())).plan.target.spec.vocab_size
            ids, stop_ids = checked_request(prompt, options, self.config, vocab_size, self.tokenizer)
            with self._doors:
                if len(self._inbox) + len(self._waiting) >= self.config.queue_limit:
                    raise EngineBusy(f"{self.config.queue_limit} requests are waiting, which is the limit")
                request_id, self._next_id = self._next_id, self._next_id + 1
                handle = Handle(request_id, self.cancel, self._advance, self._is_served, self.tokenizer, options.stop_texts)
                request = ActiveRequest(request_id, ids, stop_ids, options, handle, self.tokenizer, RequestMetrics(self._clock()))
                self._inbox.append(request)
                self.metrics.submitted += 1
        except (ValueError, EngineBusy):
            with self._doors:
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
            self._cancel_all = True
        self._wake()

    def _wake(self) -> None:
        """Something has come in."""

    def _is_served(self) -> bool:
        """Whether somebody else runs the loop."""
        return False

    def _advance(self) -> bool:
        """What a waiting handle does; whether there was anything to do."""
        return not self._is_served() and self.step()

    # --- the loop

    @property
    def idle(self) -> bool:
        """Nobody waits for anything."""
        return not (self._inbox or self._waiting or self._reading or self._ready or self._in_flight or any(self._rows))

    def step(self) -> bool:
        """Read, place, launch, look: see the top of the file. Gives whether there was anything to do."""
        with self._stepping:
            if self.idle:
                return False
            began, computed = self._clock(), time.thread_time()
            try:
                self._go_on()
            except Exception as error:
                self._recover(error)
            except BaseException:
                # What was half done is done again.
                self._interrupted = True
                raise
            computed = time.thread_time() - computed
            self.metrics.host_seconds += computed
            self.metrics.waited_seconds += max(self._clock() - began - computed, 0.0)
            self.metrics.waiting, self.metrics.reading = len(self._waiting), int(self._reading is not None) + len(self._ready)
            self.metrics.decoding = sum(row is not None for row in self._rows)
        return True

    def _go_on(self) -> None:
        if self._interrupted:
            self._interrupted = False
            self._begin_again()
        self._take_in()
        self._read()
        self._place()
        # At most so many rounds are launched and not looked at, this one included.
        self._look_until(self.config.rounds_in_flight - 1)
        if not self._launch():
            self._look_until(max(sum(isinstance(each, _Round) for each in self._in_flight) - 1, 0), firsts=True)

    def settle(self) -> None:
        """Wait until the device has done what it was given, and look at all of it: for measurements."""
        with self._stepping:
            try:
                self._look_until(0, firsts=True)
            except Exception as error:
                self._recover(error)

    def _everybody(self) -> list[ActiveRequest]:
        held = [*self._ready, *(row for row in self._rows if row is not None)]
        return [*self._waiting, *([] if self._reading is None else [self._reading]), *held]

    def _take_in(self) -> None:
        with self._doors:
            self._waiting += self._inbox
            self._inbox.clear()
            cancelled, self._cancelled = self._cancelled, set()
            everybody, self._cancel_all = self._cancel_all, False
        now = self._clock()
        for request in self._everybody():
            if everybody or request.id in cancelled:
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
            # At once, so that no more than one request is ready and not in its row.
            self._place()
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
            self._placing = request
            self._executor.insert(request.row_state, slot)
            self._placing = None
            self._ready.popleft()
            request.row_state = None
            self._rows[slot] = request
            self._release.discard(slot)

    def _smallest_shape(self) -> BatchShape:
        held = [*self._ready, *(row for row in self._rows if row is not None)]
        rows = next(size for size in self.config.row_ladder if size >= len(held))
        return BatchShape(rows, next(size for size in self.config.slot_ladder if size >= max((each.num_slots for each in held), default=0)))

    def _wanted_shape(self) -> BatchShape:
        """The smallest shape that holds everybody; a smaller one than now only after some rounds with room to spare."""
        now, least = self._executor.shape, self._smallest_shape()
        if self._spare_rounds < self.config.shrink_after:
            return BatchShape(max(least.rows, now.rows), max(least.slots, now.slots))
        return least

    def _launch(self) -> bool:
        placed = tuple((slot, request) for slot, request in enumerate(self._rows) if request is not None)
        if not placed:
            return False
        release = np.zeros((self._executor.shape.rows,), bool)
        release[list(self._release)] = True
        self._release.clear()
        self._in_flight.append(_Round(self._executor.launch(release), placed, self._executor.shape, self._clock()))
        least, now = self._smallest_shape(), self._executor.shape
        self._spare_rounds = self._spare_rounds + 1 if least.rows < now.rows or least.slots < now.slots else 0
        return True

    # --- what has come back

    def _look_until(self, rounds_left: int, firsts: bool = False) -> None:
        """Look at what is in flight, oldest first, until at most so many rounds are left (and, if asked, no first tokens before them)."""
        rounds = sum(isinstance(each, _Round) for each in self._in_flight)
        while self._in_flight and (rounds > rounds_left or (firsts and isinstance(self._in_flight[0], _First))):
            entry = self._in_flight.popleft()
            rounds -= isinstance(entry, _Round)
            self._look_at(entry)

    def _look_at(self, entry: _First | _Round) -> None:
        try:
            value = entry.ticket.get()
        except Exception:
            self._failed = entry
            raise
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
        self.metrics.first_tokens += 1
        self._add(request, [token], of_round=False)

    def _take_round(self, entry: _Round, stats: Any) -> None:
        now = self._clock()
        plan, emitted = self.plans[entry.shape.rows], 0
        took_part = [(slot, request) for slot, request in entry.placed if stats.active[slot]]
        for slot, request in took_part:
            if request.ended:
                continue
            request.strikes = 0
            request.rounds += 1
            request.metrics.rounds += 1
            request.metrics.verified += int(stats.verified[slot])
            kept = [*stats.drafts[slot, : int(stats.num_accepted[slot])].tolist(), int(stats.next_id[slot])]
            emitted += self._add(request, kept[: int(stats.emitted[slot])])
        for slot, request in entry.placed:
            if not stats.active[slot] and not request.ended:
                self._end(request, "error", RuntimeError("the device has ended the request, and nothing that it said was an end"))
        self._barren_recoveries = 0 if emitted else self._barren_recoveries
        seconds = now - max(entry.launched, self._device_free)
        self._device_free = now
        self.metrics.add_round(record_of(plan, entry.shape, stats, emitted, seconds))

    def _add(self, request: ActiveRequest, ids: list[int], of_round: bool = True) -> int:
        """Tokens of a request, which may end with them; gives how many counted."""
        try:
            count, reason = request.add(ids)
        except Exception as unreadable:
            self._end(request, "error", unreadable)
            return 0
        if of_round:
            request.metrics.emitted += count
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
        completion = Completion(request.id, tuple(request.answer), text, reason, dataclasses.replace(request.metrics), said)
        self.metrics.add_completion(completion)
        request.handle.end(completion)

    # --- errors

    def _recover(self, error: Exception) -> None:
        """Behind an error: whom it concerns ends with it, the others are prefilled again from what they have.

        A first token concerns its request, and so does putting it into its row, if that fails again and again. Of a round, or of a change
        of the batch's shape, it is not known whom it concerns: everybody is tried again, first together, and where that fails as well, one
        by one; who fails alone is the one.
        """
        log.warning("requests are prefilled again behind an error: %s: %s", type(error).__name__, error)
        self.metrics.recoveries += 1
        self._barren_recoveries += 1
        failed, placing = self._failed, self._placing
        self._failed = self._placing = None
        involved = [*self._ready, *(request for request in self._rows if request is not None)] if placing is None else [placing]
        if isinstance(failed, _First):
            self._end(failed.request, "error", error)
        elif len(involved) == 1 and involved[0].strikes >= ALONE:
            self._end(involved[0], "error", error)
        else:
            for request in involved:
                request.strikes += 1
        if self._barren_recoveries > (ALONE + 2) * (len(self._everybody()) + 1):
            self._give_up(error)
        self._begin_again()

    def _begin_again(self) -> None:
        """An empty batch; whoever was in the old one, or on its way there, waits again, before those who came later."""
        again = [each for each in self._everybody() if not each.ended and each not in self._waiting]
        for request in sorted(again, key=lambda each: each.id, reverse=True):
            request.forget_reading()
            self._waiting.appendleft(request)
        self._in_flight.clear()
        self._ready.clear()
        self._release.clear()
        self._reading = None
        shape = BatchShape(self.config.row_ladder[0], self.config.slot_ladder[0])
        self._rows = [None] * shape.rows
        self._spare_rounds = 0
        try:
            self._executor.reset(shape)
        except Exception as worse:
            self._give_up(worse)
            raise

    def _give_up(self, error: Exception) -> None:
        """Nothing can go on: everybody ends with the error."""
        with self._doors:
            self._waiting += self._inbox
            self._inbox.clear()
        for request in self._everybody():
            self._end(request, "error", error)
        self._waiting.clear()
