"""Load on the engine, simulated: requests that come one behind another or at random times, and what they see.

The loop is `EngineCore` itself on `SimulatedSlots` and a virtual clock. The host's own work takes no time.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodePlan
from dspark_jax.engine_config import EngineConfig
from dspark_jax.engine_core import EngineCore
from dspark_jax.requests import Completion
from dspark_jax.round_plans import Policy, RoundPlan, round_plans
from dspark_jax.slot_executor import BatchShape
from dspark_jax.targets.toy import ToyTarget
from experiments.replay import Table
from experiments.simulated_slots import ReadingCosts, SimulatedSlots, VirtualClock
from experiments.step_curves import RoundCosts


@dataclasses.dataclass(frozen=True)
class RecordedDrafter:
    """Stands for a drafter whose blocks are on record: all that plans ask of one."""

    block_size: int
    taps: tuple[int, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class Serving:
    """A way to serve: what decides, what it costs, and what of a block would be accepted.

    Attributes:
      table: recorded blocks in numpy arrays; a text that ends counts as a request whose budget is used up.
      costs: of rounds, by number of requests.
      continuation: as in `default_schedule`.
      policy: of `round_plans`; None: the default schedule with its planner.
      drafts: False for plain decoding, which has no drafter to tell of anything.
      reading: what prefill takes.
      slots_ahead: see `SimulatedSlots`.
      block_sizes: length of blocks by number of requests, with `costs` of such; None: those of the table.
    """

    table: Table
    costs: Mapping[int, RoundCosts]
    continuation: tuple[float, ...]
    policy: Policy | None = None
    drafts: bool = True
    reading: ReadingCosts = dataclasses.field(default_factory=ReadingCosts)
    slots_ahead: int | None = None
    block_sizes: Mapping[int, int] | None = None

    def plans(self, row_ladder: tuple[int, ...]) -> dict[int, RoundPlan]:
        """What `Engine` would make of it.

        Raises:
          ValueError: costs are missing for a number of rows.
        """
        target: Any = ToyTarget(max(len(self.table.anchors), 2))
        missing = [rows for rows in row_ladder if rows not in self.costs]
        if missing:
            raise ValueError(f"rows {missing} are not in the cost curves, which have {sorted(self.costs)}")
        undrafted = {rows: self.costs[rows].undrafted for rows in row_ladder}
        if not self.drafts:
            plain = {rows: dataclasses.replace(curve, draft_seconds=0.0) for rows, curve in undrafted.items()}
            return {rows: RoundPlan(DecodePlan(target), (rows,), plain[rows], plain[rows]) for rows in row_ladder}
        drafter: Any = RecordedDrafter(self.table.survival.shape[2])
        if self.block_sizes is not None:
            drafter = {rows: RecordedDrafter(self.block_sizes[rows]) for rows in row_ladder}
        return round_plans(
            target,
            drafter,
            row_ladder,
            policy=self.policy,
            curve={rows: self.costs[rows].curve for rows in row_ladder},
            undrafted=undrafted,
            continuation=self.continuation,
            survival=RawSurvival(),
        )


class Arrivals(Protocol):
    """When requests come. Asked with a time and how many requests have come and ended until then."""

    def due(self, now: float, submitted: int, ended: int) -> list[float]:
        """Moments up to now at which requests came that have not been submitted yet."""
        ...

    def following(self, submitted: int) -> float | None:
        """When the next one comes, whatever ends until then; None where nobody knows."""
        ...


@dataclasses.dataclass(frozen=True)
class ClosedLoop:
    """So many requests at all times: when one ends, the next one comes."""

    concurrency: int

    def __post_init__(self) -> None:
        if self.concurrency < 1:
            raise ValueError(f"concurrency is {self.concurrency}; it must be at least 1")

    def due(self, now: float, submitted: int, ended: int) -> list[float]:
        """See `Arrivals`."""
        return [now] * (self.concurrency - (submitted - ended))

    def following(self, submitted: int) -> float | None:
        """See `Arrivals`."""
        return None


@dataclasses.dataclass(frozen=True)
class PoissonArrivals:
    """So many requests a second, at times that know nothing of each other or of the engine."""

    moments: tuple[float, ...]

    @classmethod
    def at_rate(cls, rate: float, count: int, seed: int = 0) -> "PoissonArrivals":
        """`count` requests at `rate` a second."""
        if not rate > 0:
            raise ValueError(f"rate is {rate}; allowed are requests a second above 0")
        return cls(tuple(np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count)).tolist()))

    def due(self, now: float, submitted: int, ended: int) -> list[float]:
        """See `Arrivals`."""
        return list(self.moments[submitted : int(np.searchsorted(self.moments, now, side="right"))])

    def following(self, submitted: int) -> float | None:
        """See `Arrivals`."""
        return self.moments[submitted] if submitted < len(self.moments) else None


@dataclasses.dataclass(frozen=True)
class Load:
    """What is asked of the engine: requests, of which the first ones are not counted.

    Attributes:
      arrivals: when they come.
      warm_up: requests that have to have ended before anything is counted; it is counted until the last one has come.
      total: requests.
      budgets: least and most tokens of an answer, all as likely, drawn from `seed`; None: every answer is as long as it is on record.
      to_the_end: count until the last one has ended instead: a queue that grows empties again.
    """

    arrivals: Arrivals
    warm_up: int
    total: int
    budgets: tuple[int, int] | None = None
    seed: int = 0
    to_the_end: bool = False

    def budgets_of(self, table: Table) -> np.ndarray:
        """Of all requests, first tokens counted; what is not on record cannot be asked for."""
        recorded = np.asarray(table.anchors)[np.arange(self.total) % len(table.anchors)] + 1
        if self.budgets is None:
            return recorded
        return np.minimum(np.random.default_rng(self.seed).integers(self.budgets[0], self.budgets[1] + 1, self.total), recorded)

    def __post_init__(self) -> None:
        if self.budgets is not None and not 1 <= self.budgets[0] <= self.budgets[1]:
            raise ValueError(f"budgets is {self.budgets}; allowed are a least and a most number of tokens, 1 or more")
        if not 0 <= self.warm_up < self.total:
            raise ValueError(f"warm_up is {self.warm_up}; allowed are requests from 0 to below total, {self.total}")


@dataclasses.dataclass(frozen=True)
class LoadResult:
    """What came of it while it was counted; rates in tokens per second.

    Attributes:
      throughput: of all requests together, first tokens not counted.
      per_user: of a request behind its first token.
      mean_verified, accepted_length: drafts and emitted tokens per request and round.
      time_to_first_token_p50, time_to_first_token_p95: seconds.
      mean_requests: in the engine at a time, waiting or not.
      drafted_rounds: share.
      seconds: simulated, all of it. real_seconds: what that took.
      rounds: with requests, all of them.
      reasons: how requests ended, all of them.
    """

    throughput: float
    per_user: float
    mean_verified: float
    accepted_length: float
    time_to_first_token_p50: float
    time_to_first_token_p95: float
    mean_requests: float
    drafted_rounds: float
    seconds: float
    real_seconds: float
    rounds: int
    reasons: Mapping[str, int]


def engine_of(
    serving: Serving, most: int, chunk: int, slots: tuple[int, ...] | None = None, seed: int = 0, rows: tuple[int, ...] | None = None
) -> tuple[EngineCore, SimulatedSlots]:
    """An engine for up to `most` requests at a time on a simulated device.

    Args:
      chunk: tokens of a prompt that are read at once.
      slots: values of T; None: one that holds every request.
      rows: numbers of rows of a batch; None: those of the costs, up to the first that holds `most`.
    """
    table = serving.table
    if rows is None:
        known = sorted(serving.costs)
        rows = tuple(each for each in known if each < most) + tuple(each for each in known if each >= most)[:1]
    longest = int((np.asarray(table.context) + np.asarray(table.anchors)).max())
    config = EngineConfig(
        row_ladder=rows, slot_ladder=(longest,) if slots is None else slots, queue_limit=2**31, prefill_chunk=chunk, seed=seed
    )
    clock, plans = VirtualClock(), serving.plans(rows)
    shape = BatchShape(config.row_ladder[0], config.slot_ladder[0])
    device = SimulatedSlots(plans, table, shape, clock, serving.reading, serving.slots_ahead, seed)
    return EngineCore(device, plans, config, clock=clock), device


def submit(engine: EngineCore, table: Table, number: int, budget: int) -> None:
    """Request `number`: the answer that is on record for its text, from the first token on."""
    text = number % len(table.anchors)
    prompt = [text] + [0] * (int(table.context[text]) - 2)
    engine.submit(prompt, max_new_tokens=budget)


def simulate(
    engine: EngineCore, device: SimulatedSlots, table: Table, load: Load, watch: Callable[[Completion], None] | None = None
) -> LoadResult:
    """Run a load until everybody has ended.

    Args:
      watch: shown every request that ends.
    """
    clock, metrics, began = device.clock, engine.metrics, time.monotonic()
    counted, budgets = list[Completion](), load.budgets_of(table)
    submitted = ended = 0
    first = last = None
    area, before = 0.0, 0.0
    while True:
        for moment in load.arrivals.due(clock.now, submitted, ended)[: load.total - submitted]:
            with clock.at(moment):
                submit(engine, table, submitted, int(budgets[submitted]))
            submitted += 1
        here = _Reading.of(device, area)
        first = here if first is None and ended >= load.warm_up else first
        last = here if last is None and submitted == load.total and not load.to_the_end else last
        if not engine.step():
            following = load.arrivals.following(submitted)
            if following is None or submitted == load.total:
                break
            clock.wait_until(following)
        area, before = area + (submitted - ended) * (clock.now - before), clock.now
        finished = sum(metrics.finished.values())
        for completion in list(metrics.completions)[len(metrics.completions) - (finished - ended) :]:
            if watch is not None:
                watch(completion)
            if first is not None and last is None:
                counted.append(completion)
        ended = finished
    end = _Reading.of(device, area) if last is None else last
    return _result(end if first is None else first, end, counted, device, metrics.finished, time.monotonic() - began)


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Of the clock, of what the device has done, and of requests times seconds."""

    moment: float
    tokens: int
    rounds: int
    drafted_rounds: int
    area: float

    @classmethod
    def of(cls, device: SimulatedSlots, area: float) -> "_Reading":
        return cls(device.clock.now, device.emitted, device.rounds, device.drafted_rounds, area)


def _result(
    first: _Reading, last: _Reading, counted: list[Completion], device: SimulatedSlots, finished: Mapping[str, int], real: float
) -> LoadResult:
    measured = [each.metrics for each in counted if each.metrics.first_token is not None and each.metrics.finished is not None]
    rounds, seconds = sum(each.rounds for each in measured), last.moment - first.moment
    if not measured or not seconds > 0 or not rounds:
        raise ValueError("total is too small: no request ended between the warm-up and the arrival of the last one")
    waits = [each.time_to_first_token for each in measured]
    decoding = sum((each.finished or 0.0) - (each.first_token or 0.0) for each in measured)
    middle, late = np.quantile(np.array(waits, np.float64), (0.5, 0.95))
    return LoadResult(
        throughput=(last.tokens - first.tokens) / seconds,
        per_user=sum(each.emitted for each in measured) / decoding,
        mean_verified=sum(each.verified for each in measured) / rounds,
        accepted_length=sum(each.emitted for each in measured) / rounds,
        time_to_first_token_p50=float(middle),
        time_to_first_token_p95=float(late),
        mean_requests=(last.area - first.area) / seconds,
        drafted_rounds=(last.drafted_rounds - first.drafted_rounds) / max(last.rounds - first.rounds, 1),
        seconds=device.clock.now,
        real_seconds=real,
        rounds=device.rounds,
        reasons=dict(finished),
    )
