"""What a training step costs: floating-point operations, the share of the device's peak that they come to, and memory."""

import functools
import resource
import sys
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from dspark_jax.anchors import read_batch
from dspark_jax.losses import draft_loss
from dspark_jax.protocols import TrainBatch
from dspark_jax.train import TrainConfig
from dspark_jax.typing import Params
from experiments.drafter_costs import work_of

PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,
    "TPU v5e": 197e12,
    "TPU v5": 459e12,
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,
    "TPU v6e": 918e12,
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 80GB HBM3": 989e12,
    "NVIDIA H200": 989e12,
}
"""Operations a second of one device in bfloat16, dense, as its maker states them; by `jax.Device.device_kind`."""


def peak_flops(device: Any) -> float | None:
    """Of one device, in bfloat16; None where it is not in the table, as CPUs are."""
    return PEAK_FLOPS.get(device.device_kind)


class StepCosts:
    """Speed, utilisation and memory of the steps of a run; operations are counted once for every length of its batches."""

    def __init__(
        self, mesh: Mesh, target: Any, drafter: Any, config: TrainConfig, batch_size: int, draft_ids: Any = None, online: bool = True
    ):
        peak = peak_flops(mesh.devices.flat[0])
        self._peak = None if peak is None else peak * mesh.size
        self._flops = functools.cache(lambda length: step_flops(target, drafter, config, batch_size, length, draft_ids, online))

    def of(self, seconds: float, tokens: int, length: int) -> dict[str, Any]:
        """Numbers of one step, over all devices.

        Args:
          seconds: that it took.
          tokens: of its texts, padding not counted.
          length: that its texts were padded to.

        Returns:
          `seconds`, `tokens_per_second`, `tflops_per_second`, `flops_utilisation` (None on a device without a known peak), and
          `memory_bytes` with `memory_of`, see `memory_bytes`.
        """
        flops_per_second = self._flops(length) / seconds
        measured, memory = memory_bytes()
        return {
            "seconds": round(seconds, 3),
            "tokens_per_second": round(tokens / seconds, 1),
            "tflops_per_second": round(flops_per_second / 1e12, 6),
            "flops_utilisation": None if self._peak is None else round(flops_per_second / self._peak, 4),
            "memory_bytes": memory,
            "memory_of": measured,
        }


def step_flops(
    target: Any, drafter: Any, config: TrainConfig, batch_size: int, length: int, draft_ids: Any = None, online: bool = True
) -> int:
    """Floating-point operations in the matrix products of one step on `batch_size` texts of `length` tokens, over all devices.

    Counted in the traced program, by `drafter_costs.work_of`: the target's forward pass (some 2 x its parameters per token), the
    drafter's forward and backward (some 6 x), attention, and both heads over the vocabulary at every prediction site. Padding and
    places without an anchor count like the rest, so that a utilisation made from it is that of the device, not of the data.

    Args:
      online: the target reads the texts in the step; where their features are stored it has no part in it but its head.
    """
    rows = batch_size // config.micro_batches
    shape, anchors = (rows, length), (rows, config.num_anchors)

    def part(params: Params, target_params: Params, ids_of_drafts: Any, rows: tuple[Any, ...], said: tuple[Any, ...]) -> Any:
        if online:
            batch = read_batch(target, target_params, drafter.taps, *rows)
        else:
            batch = TrainBatch(*rows[:2], *said, *rows[2:])
        head = target.head(target_params)
        moving = params if config.trainable == "all" else {config.trainable: params[config.trainable]}

        def loss(moving: Params) -> Any:
            return draft_loss(drafter, {**params, **moving}, head.restrict(ids_of_drafts), head, batch, config.step_loss)[0]

        return jax.grad(loss)(moving)

    width = target.spec.width
    texts = ((shape, jnp.int32), (shape, jnp.bool_), (anchors, jnp.int32), (anchors, jnp.bool_))
    stored = ((*shape, width * len(drafter.taps)), jnp.float32), ((*shape, width), jnp.float32)
    batch = (tuple(jax.ShapeDtypeStruct(*each) for each in arrays) for arrays in (texts, () if online else stored))
    return config.micro_batches * work_of(part, drafter.abstract_params(), target.abstract_params(), draft_ids, *batch).flops


def memory_bytes() -> tuple[str, int]:
    """The most memory that was in use so far: of this host's fullest device, or of the process where devices do not say.

    Returns:
      what was measured, "device" or "process", and its bytes.
    """
    peaks = [(device.memory_stats() or {}).get("peak_bytes_in_use") for device in jax.local_devices()]
    known = [peak for peak in peaks if peak is not None]
    if known:
        return "device", max(known)
    # Linux counts in KiB, macOS in bytes.
    return "process", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
