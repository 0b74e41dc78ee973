"""Answers from the serving engine: as many at a time as it has rows, a new one as soon as one has ended."""

from collections.abc import Callable, Generator, Sequence
from functools import cache
from typing import Any

from dspark_jax.calibrate import RawSurvival
from dspark_jax.decode import DecodeParams
from dspark_jax.engine import Engine, EngineConfig
from dspark_jax.schedule import FixedLength
from dspark_jax.weights import load_drafter, load_target
from experiments.answers import Ask, Serve

DRAFT_LENGTH = 4
"""Drafts that are verified a round, where there is a drafter that gives as many. With a fixed length an answer depends on its ask alone."""


def serve_with(
    target_name: str, stop_ids: tuple[int, ...], max_length: int, top_p: float, rows: int, drafter_name: str | None = None
) -> Serve:
    """An engine that answers as `fill_answers` asks; it is made when it is first asked for something.

    Args:
      stop_ids: tokens that end an answer.
      max_length: tokens of prompt and answer.
      top_p: share of the probability that is sampled from, at temperatures below 1.
      rows: answers at a time.
    """

    @cache
    def engine() -> Engine:
        target, target_params = load_target(target_name)
        ladder = tuple(sorted({max(1, rows // 4), rows}))
        config = EngineConfig(row_ladder=ladder, slot_ladder=(max_length,), queue_limit=2 * rows, num_stop_ids=len(stop_ids))
        if drafter_name is None:
            return Engine(target, None, DecodeParams.of(target, target_params), config=config)
        loaded = load_drafter(drafter_name, target.spec)
        count = min(DRAFT_LENGTH, loaded.drafter.block_size)
        return Engine(
            target,
            loaded.drafter,
            DecodeParams.of(target, target_params, loaded.params, loaded.draft_ids),
            policy=FixedLength(count),
            survival=RawSurvival(),
            ladder=lambda size: (size, size * (count + 1)),
            config=config,
        )

    return lambda asks: served(engine, asks, stop_ids, top_p, rows)


def served(
    engine: Callable[[], Any], asks: Sequence[Ask], stop_ids: tuple[int, ...], top_p: float, rows: int
) -> Generator[tuple[int, list[int]], None, None]:
    """Numbers and new tokens of `asks`, as they end. What was not taken from the iterator is cancelled when it is closed.

    Raises:
      RuntimeError: an answer ended with an error.
    """
    waiting, handles = iter(enumerate(asks)), {}
    try:
        while True:
            while len(handles) < 2 * rows and (following := next(waiting, None)) is not None:
                number, ask = following
                handles[number] = engine().submit(
                    ask.prompt_ids,
                    max_new_tokens=ask.max_new_tokens,
                    temperature=ask.temperature,
                    top_p=1.0 if ask.temperature >= 1 else top_p,
                    seed=ask.seed,
                    stop_ids=stop_ids,
                )
            if not handles:
                return
            engine().step()
            for number in [number for number, handle in handles.items() if handle.completion is not None]:
                completion = handles.pop(number).completion
                if completion.reason == "error":
                    raise RuntimeError(f"answer {number} of {len(asks)} ended with an error: {completion.error}")
                yield number, list(completion.ids)
    finally:
        for handle in handles.values():
            handle.cancel()
        while handles and engine().step():
            pass
