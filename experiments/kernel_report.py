"""What the compilers for TPUs and for an H200 make of the kernels, without any such device.

    python -m experiments.kernel_report --tpu v5e v5p v6e     # extra `aot`; about 7 minutes
    python -m experiments.kernel_report --cuda                # jax-cuda12-plugin, jax-cuda12-pjrt and nvidia-cuda-nvcc-cu12; a minute

Every spec of `pallas_kernels.arg_specs` is compiled in full for one chip. For TPUs the report says how much fast memory (VMEM) the block
kernel asks for and every kernel takes, and how many bytes the compiled program moves through main memory by its text (`hlo_traffic`),
kernels included. For the H200, registers and spills of every kernel, from `ptxas`. Results are added to `results/kernels_ahead.json`.
"""

import dataclasses
import functools
import importlib.util
import json
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding
from rich.console import Console
from rich.progress import track

from experiments.aot_work import topology_device
from experiments.command_line import run_command
from experiments.hlo_traffic import main_memory_bytes
from experiments.result_files import write_json
from pallas_kernels.arg_specs import SPECS, MarkovArguments, Spec, markov_arguments, rejection_arguments
from pallas_kernels.bench import markov_floor, rejection_floor
from pallas_kernels.dispatch import AheadOfTime
from pallas_kernels.markov_sample import markov_block, mosaic_tpu
from pallas_kernels.rejection_sample import DraftRows, rejection_sample
from pallas_kernels.two_level_draw import TILE_SIZE

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2"}
VMEM_BYTES = {"v5e": 128 << 20, "v5p": 64 << 20, "v6e": 128 << 20}
"""Fast memory of a core, as jax has it in its table of chips."""

H200 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 150754820096
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H200"
"""
"""The device as XLA describes it to itself: figures of the public data sheet."""


@dataclasses.dataclass(frozen=True)
class ReportOptions:
    """What to compile for.

    Attributes:
      tpu: TPUs.
      cuda: whether for an H200 too.
      out: where the results go; what it says of other devices stays.
    """

    tpu: tuple[Literal["v5e", "v5p", "v6e"], ...] = ()
    cuda: bool = False
    out: Path = Path(__file__).resolve().parent / "results" / "kernels_ahead.json"

    def __post_init__(self) -> None:
        if not self.tpu and not self.cuda:
            raise ValueError("tpu is empty and cuda is False; allowed is at least one device to compile for: --tpu v5e v5p v6e, --cuda")


def programs(spec: Spec, backend: AheadOfTime, keep_w2: bool) -> Iterator[tuple[str, int, Any, tuple[Any, ...]]]:
    """Name, memory floor in bytes, jitted function and abstract arguments of both ops, the block with and without its logits kept."""
    arguments: MarkovArguments = jax.eval_shape(functools.partial(markov_arguments, spec))
    for name, keeps_logits in (("markov_block", False), ("markov_block, logits kept", True)):
        block = jax.jit(functools.partial(markov_block, return_logits=keeps_logits, keep_w2=keep_w2, backend=backend))
        yield name, markov_floor(spec, keeps_w2=keep_w2, returns_logits=keeps_logits).bytes, block, tuple(arguments)
    shape = spec.num_rows, spec.block_size
    number: Any = jax.ShapeDtypeStruct(shape, jnp.float32)
    ids = jax.ShapeDtypeStruct(shape, jnp.int32)
    logits: Any = jax.ShapeDtypeStruct((*shape, spec.vocab_size), jnp.float32)
    judged = jax.eval_shape(functools.partial(rejection_arguments, spec), logits, ids, number)
    floors = jax.ShapeDtypeStruct((spec.num_flat,), jnp.float32) if spec.filtered else None

    def reject(judged: Any, draft: Any, floors: Any) -> Any:
        return rejection_sample(*judged, draft=draft, floor=floors, backend=backend)

    yield "rejection_sample", rejection_floor(spec).bytes, jax.jit(reject), (judged, DraftRows(logits, number, number), floors)


def on_device(tree: Any, device: Any) -> Any:
    """Abstract arrays as arguments on `device`."""
    sharding = SingleDeviceSharding(device)
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding), tree)


def moved_bytes(program: str) -> int | None:
    """Bytes that a compiled program moves through main memory; None where it has loops, whose passes its text does not number."""
    try:
        return main_memory_bytes(program)
    except ValueError:
        return None


def vmem_used(program: str) -> dict[str, int]:
    """Bytes of fast memory that each of our kernels takes, as the compiler counts it."""
    used: dict[str, int] = {}
    for line in program.splitlines():
        kernel = re.search(r"%(markov_\w+|row_stats|residual_draw)[.\d]* = .*tpu_custom_call", line)
        taken = re.search(r'"used_scoped_memory_configs":\[\{[^]]*?"size":"(\d+)"', line)
        if kernel and taken:
            used[kernel[1]] = max(int(taken[1]), used.get(kernel[1], 0))
    return used


def tpu_rows(name: str, console: Console) -> list[dict[str, Any]]:
    """A row per op and spec for one TPU."""
    device, rows = topology_device(TOPOLOGIES[name]), []
    for spec in track(SPECS, f"compiling for {TOPOLOGIES[name]}", console=console):
        base = jax.ShapeDtypeStruct((spec.block_size, spec.num_rows, spec.vocab_size), jnp.float32)
        w2 = jax.ShapeDtypeStruct((spec.vocab_size, spec.rank), spec.w2_dtype)
        asked = mosaic_tpu.bytes_on_chip(base, w2, TILE_SIZE, keep_w2=True, return_logits=True)
        keeps = asked <= VMEM_BYTES[name]
        for op, floor, function, arguments in programs(spec, AheadOfTime("mosaic_tpu"), keeps):
            began = time.monotonic()
            compiled = function.lower(*on_device(arguments, device)).compile()
            row = {"op": op, "spec": spec.name, "floor_bytes": floor, "moved_bytes": moved_bytes(compiled.as_text())}
            row["vmem_used"] = vmem_used(compiled.as_text())
            if op != "rejection_sample":
                row |= {"keeps_w2": keeps, "vmem_asked": mosaic_tpu.bytes_on_chip(base, w2, TILE_SIZE, keep_w2=keeps, return_logits=True)}
            row |= {"temporary_bytes": compiled.memory_analysis().temp_size_in_bytes, "compile_seconds": round(time.monotonic() - began, 1)}
            rows.append(row)
    return rows


def cuda_device() -> Any:
    """An H200 for compilation alone.

    Raises:
      ValueError: the CUDA plugin is not there.
    """
    if importlib.util.find_spec("jax_plugins") is None or importlib.util.find_spec("jax_plugins.xla_cuda12") is None:
        raise ValueError(
            "jax_plugins.xla_cuda12 is not installed; allowed are environments with jax-cuda12-plugin and jax-cuda12-pjrt of jax's "
            "version, installed without their dependencies"
        )
    # Without a CUDA runtime the plugin wants to be told that no CUDA is to be run.
    jax.config.update("jax_platforms", "cpu")
    jax.devices()
    return topologies.get_topology_desc(platform="cuda", topology_name="", topology="1x1x1", target_config=H200).devices[0]


def ptxas() -> str:
    """The assembler, from the path or from the package nvidia-cuda-nvcc-cu12.

    Raises:
      ValueError: it is in neither.
    """
    found = importlib.util.find_spec("nvidia")
    folders = list(found.submodule_search_locations or []) if found else []
    candidates = [shutil.which("ptxas"), *(str(Path(folder) / "cuda_nvcc" / "bin" / "ptxas") for folder in folders)]
    for candidate in candidates:
        if candidate and Path(candidate).exists():
            return candidate
    raise ValueError("ptxas is not there; allowed are a CUDA toolkit on the path or the package nvidia-cuda-nvcc-cu12")


def kernels_in(folder: Path, assembler: str) -> list[dict[str, Any]]:
    """Registers and spilled bytes of each of our kernels in the PTX files of a folder."""
    found = []
    for path in sorted(folder.glob("*.ptx")):
        named = re.search(r"\.entry (markov_\w+|row_stats\w*|residual_\w+)", path.read_text(encoding="utf-8"))
        if named is None:
            continue
        said = subprocess.run(
            [assembler, "-v", "-arch", "sm_90a", str(path), "-o", "/dev/null"], capture_output=True, text=True, check=True
        ).stderr
        registers = re.search(r"Used (\d+) registers", said)
        spills = re.findall(r"(\d+) bytes spill", said)
        if registers is None or not spills:
            raise ValueError(f"ptxas says nothing of registers or spills of {named[1]}: {said}")
        found.append({"kernel": named[1], "registers": int(registers[1]), "spilled_bytes": sum(map(int, spills))})
    return found


def cuda_rows(console: Console) -> list[dict[str, Any]]:
    """A row per op and spec for an H200."""
    device, assembler, rows = cuda_device(), ptxas(), []
    for spec in track(SPECS, "compiling for an H200", console=console):
        for op, floor, function, arguments in programs(spec, AheadOfTime("triton"), False):
            with tempfile.TemporaryDirectory() as folder:
                began = time.monotonic()
                options = {"xla_dump_to": folder}
                compiled = function.lower(*on_device(arguments, device)).compile(compiler_options=options)
                row = {"op": op, "spec": spec.name, "floor_bytes": floor, "temporary_bytes": compiled.memory_analysis().temp_size_in_bytes}
                rows.append(row | {"compile_seconds": round(time.monotonic() - began, 1), "kernels": kernels_in(Path(folder), assembler)})
    return rows


def run(options: ReportOptions, console: Console) -> dict[str, Any]:
    """Compile, and add what was found to the results."""
    content = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    makers: dict[str, Callable[[], list[dict[str, Any]]]] = {
        f"tpu_{name}": functools.partial(tpu_rows, name, console) for name in options.tpu
    }
    if options.cuda:
        makers["h200"] = functools.partial(cuda_rows, console)
    for name, make in makers.items():
        content[name] = {"jax": jax.__version__, "rows": make()}
        write_json(options.out, content)
    console.print(f"wrote {options.out.name}: {', '.join(content)}", highlight=False)
    return content


if __name__ == "__main__":
    sys.exit(run_command(ReportOptions, run))
