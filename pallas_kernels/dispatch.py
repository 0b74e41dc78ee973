"""The one place that chooses who computes an op: plain JAX, or a kernel for the device at hand.

==================  ===========================================================================================================
backend             what runs
==================  ===========================================================================================================
"auto"              the kernel of the platform that jax runs on; plain JAX where there is none, where the GPU is too old for it
                    (`OLDEST_GPU`), or where jax has several devices, over which it can split plain JAX but no kernel (a note is
                    logged, once)
"xla"               the reference: plain JAX, everywhere
"mosaic_tpu"        the Pallas kernels for TPUs
"triton"            the Pallas kernels for NVIDIA GPUs
"interpret"         the TPU kernels in Pallas' interpreter, everywhere
"simulate_tpu"      the TPU kernels with memories, copies and semaphores simulated and races looked for; slow
"interpret_triton"  the GPU kernels in Pallas' interpreter, everywhere
==================  ===========================================================================================================
"""

import dataclasses
import functools
import logging
from typing import Any, Literal, TypeAlias, get_args

import jax
from jax.experimental.pallas import tpu as pltpu

BackendName: TypeAlias = Literal["auto", "xla", "mosaic_tpu", "triton", "interpret", "simulate_tpu", "interpret_triton"]

PLATFORM_OF = {"mosaic_tpu": "tpu", "triton": "gpu"}
"""The platforms that the kernels for devices need, as `jax.default_backend` names them."""


OLDEST_GPU = 8
"""Major compute capability from which on XLA takes Triton kernels: a T4 (7.5) has none."""


@dataclasses.dataclass(frozen=True)
class AheadOfTime:
    """Kernels for a device that is not here ("mosaic_tpu" or "triton"): to be lowered or compiled ahead of time, not to be run."""

    name: str

    def __post_init__(self) -> None:
        if self.name not in PLATFORM_OF:
            raise ValueError(f"name is {self.name!r}; kernels for devices are {', '.join(PLATFORM_OF)}")


Backend: TypeAlias = BackendName | AheadOfTime


@dataclasses.dataclass(frozen=True)
class Choice:
    """Who computes.

    Attributes:
      kernels: "xla", "mosaic_tpu" or "triton".
      interpret: the argument of `pallas_call` by this name.
    """

    kernels: str
    interpret: Any = False


def choose(backend: Backend) -> Choice:
    """Who computes an op that is asked for by `backend`.

    Raises:
      ValueError: an unknown backend, or a kernel for a device that jax does not run on here.
    """
    if isinstance(backend, AheadOfTime):
        return Choice(backend.name)
    if backend not in get_args(BackendName):
        raise ValueError(f"backend is {backend!r}; allowed: {', '.join(get_args(BackendName))}")
    platform = jax.default_backend()
    if backend == "auto":
        return _automatic(platform, jax.device_count(), _runs_kernels(jax.devices()[0]))
    if backend in PLATFORM_OF and platform != PLATFORM_OF[backend]:
        raise ValueError(
            f"backend is {backend!r}, which needs the platform {PLATFORM_OF[backend]}; jax runs on {platform} here. "
            f"Allowed here: auto, xla, interpret, simulate_tpu, interpret_triton"
        )
    return {
        "interpret": Choice("mosaic_tpu", True),
        "simulate_tpu": Choice("mosaic_tpu", pltpu.InterpretParams(detect_races=True)),
        "interpret_triton": Choice("triton", True),
    }.get(backend, Choice(backend))


def _runs_kernels(device: Any) -> bool:
    """Whether the device can run the kernels of its platform; False for NVIDIA GPUs that are too old."""
    major = str(getattr(device, "compute_capability", "")).partition(".")[0]
    return not major.isdigit() or int(major) >= OLDEST_GPU


@functools.cache
def _automatic(platform: str, num_devices: int, runs_kernels: bool) -> Choice:
    # Cached, so that the note is logged once.
    kernels = next((name for name, needed in PLATFORM_OF.items() if needed == platform), None)
    if kernels is not None and num_devices == 1 and runs_kernels:
        return Choice(kernels)
    if kernels is None:
        why = f"no kernels for the platform {platform}"
    elif not runs_kernels:
        why = f"kernels need a GPU of compute capability {OLDEST_GPU}.0 or more"
    else:
        why = f"{num_devices} devices, and no kernel is split by itself"
    logging.getLogger(__name__).info("plain JAX computes: %s", why)
    return Choice("xla")
