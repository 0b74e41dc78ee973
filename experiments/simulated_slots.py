"""A device that only keeps time: the rounds of an engine from recorded blocks and a cost curve, on a clock of its own.

`SimulatedSlots` stands where `DeviceSlots` stands. The loop above it is the engine's own, the lengths are decided by the policy and the
planner of the engine's own plans, compiled; what of them is accepted is on record, and the plans' cost curves say how long a round
takes. Requests are rows of arrays: Python works on one only when it arrives or leaves.
"""

import dataclasses
import functools
from collections.abc import Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode_state import DecodePlan
from dspark_jax.protocols import StatefulPolicy
from dspark_jax.round_plans import RoundPlan
from dspark_jax.round_stats import RoundStats
from dspark_jax.slot_executor import EMPTY, BatchShape, NewRow
from dspark_jax.slots import history_of
from dspark_jax.typing import Array
from experiments.replay import Table
from pallas_kernels.noise import seed_key


class VirtualClock:
    """Seconds that pass only while somebody waits: for the device, or for the next request. Call it for the time."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def wait_until(self, moment: float) -> None:
        """Later or now, never back."""
        self.now = max(self.now, moment)

    @contextmanager
    def at(self, moment: float) -> Any:
        """What happened at `moment` while the host was waiting for something else."""
        now, self.now = self.now, min(moment, self.now)
        try:
            yield
        finally:
            self.now = now


@dataclasses.dataclass(frozen=True)
class Finished:
    """A `Ticket` for what the device has done at `moment`."""

    clock: VirtualClock
    moment: float
    value: Any

    def get(self) -> Any:
        """The value, not before `moment`."""
        self.clock.wait_until(self.moment)
        return self.value


@dataclasses.dataclass(frozen=True)
class ReadingCosts:
    """What prefill takes of the device.

    Attributes:
      chunk_seconds: per chunk of a text.
      elsewhere: other devices read; rounds wait for nothing.
    """

    chunk_seconds: float = 0.0
    elsewhere: bool = False


class Schedule(NamedTuple):
    """What policy and planner remember from round to round."""

    policy_state: Any
    history: Any


class Decision(NamedTuple):
    """Verified drafts and probes per request, and whether the drafter runs."""

    lengths: Array
    probe: Array
    runs: Array


def new_schedule(plan: DecodePlan, num_rows: int) -> Schedule:
    """Nothing remembered."""
    policy_state = plan.policy.init_state(num_rows, plan.block_size) if isinstance(plan.policy, StatefulPolicy) else None
    return Schedule(policy_state, None if plan.planner is None else plan.planner.init_history(num_rows))


@functools.partial(jax.jit, static_argnums=(0, 6))
def decide(
    plan: DecodePlan,
    schedule: Schedule,
    survival: Array,
    active: Array,
    length: Array,
    request_id: Array,
    seed: int,
    limit: Array,
) -> tuple[Decision, Schedule]:
    """The lengths of a round, as `decode_round` finds them: planner, then policy on what would be drafted, then probe and budget."""
    policy, planner, block_size = plan.policy, plan.planner, plan.block_size
    assert policy is not None
    runs, probe, history = jnp.bool_(True), jnp.zeros_like(active), schedule.history
    if planner is not None:
        planned = planner.plan(history, active, length, request_id, seed_key(seed))
        runs, probe = planned.draft_length > 0, planned.probe
        survival = jnp.where(runs, survival, 0.0)
        history = planner.observe(history, survival, jnp.where(runs, block_size, 0), active, request_id)
    asked, policy_state = (survival, active & runs, length, request_id), schedule.policy_state
    if isinstance(policy, StatefulPolicy):
        lengths, policy_state = policy.next_lengths(policy_state, *asked)
    else:
        lengths = policy.lengths(*asked)
    lengths = jnp.where(probe, block_size, lengths)
    lengths = jnp.where(active, jnp.minimum(lengths, limit - length - 1), 0)
    return Decision(lengths, probe, runs), Schedule(policy_state, history)


@dataclasses.dataclass
class Rows:
    """Requests in a batch, an array entry each.

    Attributes:
      text: row of the table that the request walks along.
      length, limit, request_id, finished: as in `DecodeState`.
    """

    text: np.ndarray
    length: np.ndarray
    limit: np.ndarray
    request_id: np.ndarray
    finished: np.ndarray

    @classmethod
    def empty(cls, num_rows: int) -> "Rows":
        """Nobody."""
        nothing = functools.partial(np.zeros, (num_rows,), np.int32)
        # A length of 1 and a limit of 2: what the policies are shown of a row without a request is harmless.
        return cls(nothing(), nothing() + 1, nothing() + 2, np.full((num_rows,), EMPTY, np.int32), np.ones((num_rows,), bool))

    def put(self, slot: int, source: "Rows", place: int = 0) -> None:
        """Row `place` of another batch into `slot`."""
        for field in dataclasses.fields(self):
            getattr(self, field.name)[slot] = getattr(source, field.name)[place]


class SimulatedSlots:
    """A `SlotExecutor` on recorded blocks. A prompt's first token is the row of the table that answers it.

    Attributes:
      shape: of the batch.
      clock: the engine's too.
      rounds, drafted_rounds, chunks: launched ones with requests in them, those of them that drafted, and chunks read.
      emitted: tokens of launched rounds.
    """

    def __init__(
        self,
        plans: Mapping[int, RoundPlan],
        table: Table,
        shape: BatchShape,
        clock: VirtualClock,
        reading: ReadingCosts | None = None,
        slots_ahead: int | None = None,
        seed: int = 0,
    ) -> None:
        """Args:
        plans: the engine's; their curves say what a round takes.
        table: numpy arrays; see `replay.table_of`.
        slots_ahead: where attention reads every slot of a cache, used or not: slots that the curve's caches had beyond their context.
          None: it reads what is committed.
        """
        self.shape, self.clock, self._plans, self._table = shape, clock, plans, table
        self._reading, self._slots_ahead, self._seed = ReadingCosts() if reading is None else reading, slots_ahead, seed
        self._free = 0.0
        self.rounds = self.drafted_rounds = self.chunks = self.emitted = 0
        self.reset(shape)

    @property
    def _plan(self) -> RoundPlan:
        return self._plans[self.shape.rows]

    def reset(self, shape: BatchShape) -> None:
        """See `SlotExecutor`."""
        self.shape, self._rows = shape, Rows.empty(shape.rows)
        self._schedule = new_schedule(self._plan.plan, shape.rows)

    def _busy(self, seconds: float) -> float:
        """The device works on something next; gives when it will have done so."""
        self._free = max(self._free, self.clock.now) + seconds
        return self._free

    def read(self, row: NewRow, reading: Any, index: int) -> Any:
        """See `SlotExecutor`."""
        self.chunks += 1
        if not self._reading.elsewhere:
            self._busy(self._reading.chunk_seconds)
        return index

    def begin(self, row: NewRow, reading: Any) -> tuple[Any, Finished]:
        """See `SlotExecutor`. The first token comes with the last chunk."""
        state, given = Rows.empty(1), int(row.given[0])
        state.text[0], state.length[0] = row.ids[0, 0], int(row.length[0]) + 1
        state.limit[0], state.request_id[0] = row.limit[0], row.request_id[0]
        state.finished[0] = state.length[0] >= state.limit[0]
        done = self.clock.now if self._reading.elsewhere else self._busy(0.0)
        return state, Finished(self.clock, done, max(given, 0))

    def insert(self, row_state: Any, slot: int) -> None:
        """See `SlotExecutor`."""
        self._rows.put(slot, row_state)

    def resize(self, kept: Sequence[int], shape: BatchShape) -> None:
        """See `SlotExecutor`. The planner's history goes along, what a policy remembers does not, as in `DeviceSlots`."""
        old, history = self._rows, self._schedule.history
        self.reset(shape)
        for slot, place in enumerate(kept):
            self._rows.put(slot, old, place)
        if history is not None:
            place = np.zeros((shape.rows,), np.int32)
            place[: len(kept)] = kept
            there = jnp.asarray(np.arange(shape.rows) < len(kept))
            history = history_of(history, self._schedule.history, jnp.asarray(place), there)
            self._schedule = self._schedule._replace(history=history)

    def launch(self, release: np.ndarray) -> Finished:
        """See `SlotExecutor`."""
        rows, table, plan = self._rows, self._table, self._plan.plan
        rows.finished |= release
        rows.request_id[release] = EMPTY
        active = ~rows.finished
        if not active.any():
            return Finished(self.clock, self._busy(0.0), _stats(active, plan.block_size))
        at = np.where(active, rows.length - table.context[rows.text], 0)
        if plan.block_size:
            seen = (table.survival[rows.text, at, : plan.block_size], active, rows.length, rows.request_id)
            decision, self._schedule = decide(plan, self._schedule, *seen, self._seed, rows.limit)
            lengths, probe, drafted = np.asarray(decision.lengths), np.asarray(decision.probe), bool(decision.runs)
            accepted = np.where(active, np.minimum(table.accepted[rows.text, at], lengths), 0)
        else:
            lengths, probe, drafted, accepted = np.zeros_like(at), np.zeros_like(active), False, np.zeros_like(at)
        # Never more than the budget allows, since no draft beyond it is verified.
        emitted = np.where(active, accepted + 1, 0)
        done = self._busy(self._seconds(active, lengths, drafted))
        stats = _stats(active, plan.block_size, lengths, accepted, emitted, probe, drafted)
        # Arrays that are in flight stay as they are.
        rows.length = (rows.length + emitted).astype(np.int32)
        rows.finished = rows.finished | (rows.length >= rows.limit)
        self.rounds, self.drafted_rounds, self.emitted = self.rounds + 1, self.drafted_rounds + drafted, self.emitted + int(emitted.sum())
        return Finished(self.clock, done, stats)

    def _seconds(self, active: np.ndarray, lengths: np.ndarray, drafted: bool) -> float:
        """What the plan's curve says of the round, at the bucket it runs in and the batch's mean context."""
        plan, live = self._plan, int(active.sum())
        context = float(self._rows.length[active].mean())
        if self._slots_ahead is not None:
            context = float(self.shape.slots - self._slots_ahead)
        bucket = plan.bucket(self.shape.rows, live + int(lengths.sum()), drafted)
        curve = plan.curve if drafted or plan.undrafted is None else plan.undrafted
        assert curve is not None
        return curve.seconds(bucket, context)


def _stats(
    active: np.ndarray,
    block_size: int,
    verified: np.ndarray | None = None,
    accepted: np.ndarray | None = None,
    emitted: np.ndarray | None = None,
    probe: np.ndarray | None = None,
    drafted: bool = False,
) -> RoundStats:
    """`RoundStats` in numpy; every token is a 0, and what is left out is zeros."""
    size = active.shape[0]
    nothing, block = np.zeros((size,), np.int32), np.zeros((size, block_size), np.int32)
    accepted, emitted = nothing if accepted is None else accepted, nothing if emitted is None else emitted
    fields: dict[str, Any] = {
        "active": active,
        "anchor": nothing,
        "drafts": block,
        "confidence_logits": block,
        "verified": nothing if verified is None else verified,
        "num_accepted": accepted,
        "next_id": nothing,
        "emitted": emitted,
        "cut": np.zeros_like(active),
        "probe": np.zeros_like(active) if probe is None else probe,
        "drafted": np.bool_(drafted),
    }
    return RoundStats(**fields)
