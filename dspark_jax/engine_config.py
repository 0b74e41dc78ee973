"""Limits of an engine."""

import dataclasses


class EngineBusy(RuntimeError):
    """The queue is full; try again later."""


@dataclasses.dataclass(frozen=True)
class EngineConfig:
    """Limits of an engine.

    Attributes:
      row_ladder: numbers of rows that a batch may have, ascending; the last is the most requests in rounds at a time.
      slot_ladder: tokens that a request may have, prompt and budget together, ascending: a batch has the first that all of its
        requests fit into.
      queue_limit: requests that may wait.
      prefill_chunk: tokens of a text that are read at once.
      chunks_per_round: chunks that are read between two rounds; None: one, and one more for every eight requests in rounds, which
        keeps up with answers of some 60 tokens to prompts of two chunks.
      rounds_in_flight: rounds that are launched before the first of them is looked at.
      num_stop_ids: stop tokens that a request may have.
      shrink_after: launched rounds with room to spare behind which the batch is made smaller.
      memory_limit: bytes, over all devices, that caches and states may take at the most, a change of shape included; None: what the
        devices say they have left, where they do (CPUs do not).
      seed: random bits of requests without a seed of their own.
    """

    row_ladder: tuple[int, ...] = (1, 2, 4, 8)
    slot_ladder: tuple[int, ...] = (1024,)
    queue_limit: int = 256
    prefill_chunk: int = 64
    chunks_per_round: int | None = None
    rounds_in_flight: int = 2
    num_stop_ids: int = 4
    shrink_after: int = 16
    memory_limit: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for field in ("row_ladder", "slot_ladder"):
            ladder = getattr(self, field)
            if not ladder or ladder[0] < 1 or list(ladder) != sorted(set(ladder)):
                raise ValueError(f"{field} is {ladder}; allowed are positive integers in strictly ascending order")
        for field in ("queue_limit", "prefill_chunk", "rounds_in_flight", "num_stop_ids", "shrink_after"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")
        if self.chunks_per_round is not None and self.chunks_per_round < 1:
            raise ValueError(f"chunks_per_round is {self.chunks_per_round}; it must be at least 1, or None")
