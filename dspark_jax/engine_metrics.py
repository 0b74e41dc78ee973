"""What the engine counts: a record per round, and sums since its start, also in the form that Prometheus reads."""

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from dspark_jax.requests import FINISH_REASONS, Completion
from dspark_jax.round_plans import RoundPlan
from dspark_jax.slot_executor import BatchShape

REMEMBERED = 1000
"""Finished requests and rounds that are remembered one by one."""


@dataclasses.dataclass(frozen=True)
class RoundRecord:
    """One round.

    Attributes:
      rows, slots: shape of the batch.
      active: requests that took part.
      verified: drafts of all of them that were verified.
      bucket: flat tokens of the target's pass that `active` + `verified` tokens ran in: the round's capacity.
      drafted: whether the drafter ran.
      emitted: tokens.
      predicted_seconds: what the cost curve says of it; None without one.
      seconds: from when the device could begin with it (launch, or the end of the round before) to when its end was seen; with the
        chunks of prompts that it read before the round, which `predicted_seconds` leaves out.
    """

    rows: int
    slots: int
    active: int
    verified: int
    bucket: int
    drafted: bool
    emitted: int
    predicted_seconds: float | None
    seconds: float


def record_of(plan: RoundPlan, shape: BatchShape, stats: Any, emitted: int, seconds: float) -> RoundRecord:
    """The record of a round from its `RoundStats` in numpy arrays; `emitted` are the tokens that counted."""
    active, drafted = int(stats.active.sum()), bool(stats.drafted)
    verified = int(stats.verified[stats.active].sum())
    bucket = plan.bucket(shape.rows, active + verified, drafted) if active else 0
    predicted = plan.seconds(bucket, drafted) if active else None
    return RoundRecord(shape.rows, shape.slots, active, verified, bucket, drafted, emitted, predicted, seconds)


@dataclasses.dataclass
class EngineMetrics:
    """Sums since the start of an engine; seconds on its clock.

    Attributes:
      submitted, refused: requests; the refused ones never got in.
      finished: by reason.
      waiting, reading, decoding: requests that are queued, in prefill, in rounds, at the moment.
      prefill_tokens, emitted_tokens, first_tokens, verified_tokens, pass_tokens: tokens read, tokens of answers, those of them that came
        from prefill, drafts verified, and flat tokens of the target's passes, padding included.
      rounds, empty_rounds: rounds with requests; and launched ones that found everybody finished.
      request_rounds: requests of all rounds.
      recoveries: times that all requests were prefilled again behind an error.
      host_seconds: in which the thread of the loop computed (of the processor, whatever the engine's clock is).
      waited_seconds: the rest of the loop's time: for a round to end, or for the device to take another program.
      latest: the last rounds.
      completions: the last finished requests.
    """

    submitted: int = 0
    refused: int = 0
    finished: dict[str, int] = dataclasses.field(default_factory=lambda: dict.fromkeys(FINISH_REASONS, 0))
    waiting: int = 0
    reading: int = 0
    decoding: int = 0
    prefill_tokens: int = 0
    emitted_tokens: int = 0
    first_tokens: int = 0
    verified_tokens: int = 0
    pass_tokens: int = 0
    rounds: int = 0
    empty_rounds: int = 0
    request_rounds: int = 0
    recoveries: int = 0
    host_seconds: float = 0.0
    waited_seconds: float = 0.0
    latest: collections.deque[RoundRecord] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=REMEMBERED))
    completions: collections.deque[Completion] = dataclasses.field(default_factory=lambda: collections.deque(maxlen=REMEMBERED))

    def add_round(self, record: RoundRecord) -> None:
        """Count a round; one in which nobody took part is counted apart."""
        if not record.active:
            self.empty_rounds += 1
            return
        self.rounds += 1
        self.request_rounds += record.active
        self.emitted_tokens += record.emitted
        self.verified_tokens += record.verified
        self.pass_tokens += record.bucket
        self.latest.append(record)

    def add_completion(self, completion: Completion) -> None:
        """Count a finished request."""
        self.finished[completion.reason] += 1
        self.completions.append(completion)

    @property
    def host_share(self) -> float:
        """Share of the loop's time in which the host computed."""
        total = self.host_seconds + self.waited_seconds
        return self.host_seconds / total if total else 0.0

    def counters(self) -> Mapping[str, int | float]:
        """Everything that only grows, by name; the reasons of finished requests are named `finished_REASON`."""
        requests, rounds = ("submitted", "refused"), ("rounds", "empty_rounds", "request_rounds", "recoveries")
        tokens = ("prefill_tokens", "emitted_tokens", "first_tokens", "verified_tokens", "pass_tokens")
        sums = {name: getattr(self, name) for name in (*requests, *tokens, *rounds, "host_seconds", "waited_seconds")}
        return sums | {f"finished_{reason}": count for reason, count in self.finished.items()}

    def gauges(self) -> Mapping[str, int]:
        """What goes up and down."""
        return {name: getattr(self, name) for name in ("waiting", "reading", "decoding")}


class PrometheusMetrics:
    """An engine's metrics as a collector of `prometheus_client` (extra `serve`): register it, and every scrape reads them afresh.

    Counters are called dspark_NAME_total, finished requests dspark_finished_total{reason=...}, gauges dspark_NAME.
    """

    def __init__(self, metrics: EngineMetrics) -> None:
        self._metrics = metrics

    def collect(self) -> Iterable[Any]:
        """What the registry asks for."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        for name, value in self._metrics.counters().items():
            if not name.startswith("finished_"):
                yield CounterMetricFamily(f"dspark_{name}", f"Engine: {name.replace('_', ' ')}", value=value)
        finished = CounterMetricFamily("dspark_finished", "Engine: finished requests by reason", labels=["reason"])
        for reason, count in self._metrics.finished.items():
            finished.add_metric([reason], count)
        yield finished
        for name, value in self._metrics.gauges().items():
            yield GaugeMetricFamily(f"dspark_{name}", f"Engine: requests {name}", value=value)
