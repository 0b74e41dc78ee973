"""The serving engine: continuous batching around `decode_round`, compiled ahead, on a thread of its own or step by step.

    engine = Engine(target, loaded.drafter, params, curve=curves, continuation=..., survival=..., tokenizer=tokenizer)
    with engine:                                            # a thread runs it
        handle = engine.submit("Why is the sky blue?", max_new_tokens=64)
        for piece in handle:
            print(piece.text, end="", flush=True)

Without the `with`, whoever waits for a handle runs the engine. Its loop is `engine_core.EngineCore`.
"""

import threading
import time
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from rich.console import Console
from rich.progress import Progress

from dspark_jax.calibration_online import OnlineCalibration
from dspark_jax.decode import DecodeParams
from dspark_jax.engine_config import EngineBusy, EngineConfig
from dspark_jax.engine_core import EngineCore
from dspark_jax.engine_metrics import EngineMetrics, PrometheusMetrics, RoundRecord
from dspark_jax.protocols import Drafter, SurvivalModel, Target
from dspark_jax.requests import Completion, Handle, Piece, RequestOptions
from dspark_jax.round_plans import Curves, Policy, RoundPlan, round_plans
from dspark_jax.slot_executor import BatchShape, SlotExecutor
from dspark_jax.slots import DeviceSlots
from dspark_jax.tokenizers import Tokenizer

IDLE_SECONDS = 0.05
"""How long the thread sleeps at a time when there is nothing to do: a new request wakes it, a deadline does not."""


class ThreadedEngine(EngineCore):
    """The loop on a thread of its own, as a context; without the context, whoever waits for a handle runs it."""

    def __init__(
        self,
        executor: SlotExecutor,
        plans: Mapping[int, RoundPlan],
        config: EngineConfig,
        tokenizer: Tokenizer | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        super().__init__(executor, plans, config, tokenizer, clock)
        self._arrived, self._closing = threading.Event(), False
        self._thread: threading.Thread | None = None

    def __enter__(self) -> "ThreadedEngine":
        if not self._is_served():
            self._closing = False
            self._thread = threading.Thread(target=self._run, name="dspark-engine", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close(drain=kind is None)

    def close(self, drain: bool = True) -> None:
        """Stop the thread, once everything that was submitted has ended (`drain`), or as soon as the rest is cancelled."""
        if self._thread is None:
            return
        if not drain:
            self.cancel_all()
        self._closing = True
        self._wake()
        self._thread.join()
        self._thread = None
        # What came while the thread was going.
        while self.step():
            pass

    def _run(self) -> None:
        try:
            while True:
                self._arrived.clear()
                if not self.step():
                    if self._closing:
                        return
                    self._arrived.wait(IDLE_SECONDS)
        except Exception as error:
            self._give_up(error)
            raise

    def _wake(self) -> None:
        self._arrived.set()

    def _is_served(self) -> bool:
        return self._thread is not None and self._thread.is_alive()


class Engine(ThreadedEngine):
    """Serves requests with a target and, where there is one, a drafter.

    Args:
      drafter: one, or by the number of rows, see `round_plans.round_plans`; None for plain decoding.
      params: of both, see `DecodeParams.of`; sharded ones together with `mesh`.
      policy, curve, undrafted, survival, continuation: how many drafts are verified, see `round_plans.round_plans`.
      tokenizer: for prompts that are texts, for answers as texts, and for stop texts.
      calibration: learns while serving and is used in the place of `survival`, which still has to be given; an error sets it back.
      mesh: what parameters and caches are split over.
      console: shows the progress of compiling.
      plan_options: further fields of `DecodePlan`.

    Raises:
      ValueError: what `round_plans` refuses, or a memory limit that the largest batch does not keep.
    """

    def __init__(
        self,
        target: Target,
        drafter: Drafter | Mapping[int, Drafter] | None,
        params: DecodeParams,
        *,
        policy: Policy | Callable[[int], Policy] | None = None,
        curve: Curves | None = None,
        undrafted: Curves | None = None,
        survival: SurvivalModel | None = None,
        continuation: tuple[float, ...] | None = None,
        config: EngineConfig | None = None,
        tokenizer: Tokenizer | None = None,
        mesh: Mesh | None = None,
        cache_dtype: Any = jnp.float32,
        calibration: OnlineCalibration | None = None,
        clock: Callable[[], float] = time.monotonic,
        console: Console | None = None,
        **plan_options: Any,
    ) -> None:
        config = EngineConfig() if config is None else config
        costs: dict[str, Any] = {"curve": curve, "undrafted": undrafted, "continuation": continuation}
        plans = round_plans(target, drafter, config.row_ladder, policy=policy, survival=survival, **costs, **plan_options)
        executor = DeviceSlots(
            {rows: each.plan for rows, each in plans.items()},
            params,
            config.slot_ladder,
            chunk=config.prefill_chunk,
            num_stop_ids=config.num_stop_ids,
            seed=config.seed,
            cache_dtype=cache_dtype,
            calibration=calibration,
            mesh=mesh,
        )
        self._keep_limit(executor, config)
        with Progress(console=console, transient=True, disable=console is None) as progress:
            bar = progress.add_task("compiling", total=None)
            for done, total in executor.compile_all():
                progress.update(bar, completed=done, total=total)
        super().__init__(executor, plans, config, tokenizer, clock)

    @staticmethod
    def _keep_limit(executor: DeviceSlots, config: EngineConfig) -> None:
        limit = free_bytes(executor.mesh) if config.memory_limit is None else config.memory_limit
        if limit is None:
            return
        fits = [shape for shape in executor.shapes if executor.peak_bytes(shape) <= limit]
        largest = BatchShape(config.row_ladder[-1], config.slot_ladder[-1])
        if largest not in fits:
            best = f"up to {max(fits).rows} rows of {max(fits).slots} would fit" if fits else "not even the smallest batch fits"
            raise ValueError(
                f"memory_limit is {limit}; {largest.rows} rows of {largest.slots} slots need "
                f"{executor.peak_bytes(largest)} bytes at the most; {best}"
            )


def free_bytes(mesh: Mesh | None) -> int | None:
    """Memory that all devices together have left; None where one of them does not say."""
    stats = [device.memory_stats() for device in ([jax.devices()[0]] if mesh is None else mesh.devices.flat)]
    if any(not each or "bytes_limit" not in each for each in stats):
        return None
    return sum(each["bytes_limit"] - each["bytes_in_use"] for each in stats if each)


__all__ = [
    "Completion",
    "Engine",
    "EngineBusy",
    "EngineConfig",
    "EngineMetrics",
    "Handle",
    "Piece",
    "PrometheusMetrics",
    "RequestOptions",
    "RoundRecord",
    "ThreadedEngine",
]
