"""A tiny training run, and a program that is one host of it: `python -m tests.training_host TASK.json`."""

import contextlib
import functools
import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils
from jax.sharding import NamedSharding, PartitionSpec

from dspark_jax.data import TokenSequences, offsets_from_lengths, save_token_sequences
from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.sharding import MESH_AXES, make_mesh, place, start_multi_host
from dspark_jax.train import OptimizerConfig, TrainConfig
from experiments import train_drafter
from experiments.train_drafter import TrainRun, train
from tests.tiny_models import TINY_DRAFTER, write_target

TIMEOUT = 400.0
"""Seconds after which a host that has not ended is ended; one takes some ten."""


@contextlib.contextmanager
def quick_compilation() -> Iterator[None]:
    """Programs that run for milliseconds need not be made fast; the hosts that `start_host` starts compile in the same way."""
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", False)


def write_run_inputs(folder: Path) -> None:
    """A tiny target in `target` and 20 texts in `texts.npz`: sixteen to train on, the others held out, two of each temperature."""
    write_target(folder / "target")
    rng = np.random.default_rng(0)
    lengths = rng.integers(24, 33, 20)
    kinds = np.arange(20)
    texts = TokenSequences(
        tokens=rng.integers(3, 64, lengths.sum()).astype(np.uint16),
        offsets=offsets_from_lengths(lengths),
        answer_start=rng.integers(2, 8, 20).astype(np.int16),
        answer_end=lengths.astype(np.int16),
        finished=np.zeros(20, bool),
        domain=(kinds % 3).astype(np.int8),
        temperature=np.where(kinds % 2, 2, 0).astype(np.int8),
        heldout=(kinds >= 16).astype(np.int8),
        source=kinds.astype(np.int32),
    )
    save_token_sequences(folder / "texts.npz", texts)


def tiny_run(folder: Path, out: str, mesh: tuple[int, int, int] = (1, 1, 1), total_steps: int = 3, **changes) -> TrainRun:
    """A run on what `write_run_inputs` wrote, in `folder / out`."""
    return TrainRun(
        target=str(folder / "target"),
        data=(folder / "texts.npz",),
        drafter=DSparkConfig(**TINY_DRAFTER, block_size=3),
        train=TrainConfig(OptimizerConfig(total_steps, learning_rate=1e-2, epsilon=1e-3), num_anchors=4, micro_batches=2),
        out=folder / out,
        batch_size=16,
        lengths=(32,),
        held_out_sequences=4,
        held_out_anchors=4,
        checkpoint_every=2,
        mesh=mesh,
        **changes,
    )


def start_host(task: dict, task_file: Path, num_devices: int) -> subprocess.Popen:
    """Start this program on virtual devices of its own; it reads `task` from `task_file`."""
    task_file.write_text(json.dumps(task))
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        # The last two: how long a host waits in a collective for one that is late, which is half a minute otherwise.
        "XLA_FLAGS": f"--xla_force_host_platform_device_count={num_devices} "
        f"--xla_cpu_collective_timeout_seconds={TIMEOUT:.0f} --xla_cpu_collective_call_terminate_timeout_seconds={TIMEOUT:.0f}",
        "NPROC": "32",
        "JAX_NUMPY_DTYPE_PROMOTION": "strict",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "true",
    }
    command = [sys.executable, "-m", "tests.training_host", str(task_file)]
    root = Path(__file__).resolve().parent.parent
    return subprocess.Popen(
        command, cwd=root, env=environment, text=True, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )


def connect(sizes: tuple[int, int, int]) -> None:
    """Join the devices of all hosts, in every group in which programs over a mesh of `sizes` let them talk.

    A group is joined when a program first uses it, and then hosts give each other half a minute, which nothing can change. Here they come
    from a barrier that waits longer; later on, when one of them may compile for a while, the group is there.
    """
    mesh = make_mesh(*sizes)

    def barrier(name: str) -> None:
        ocp.multihost.get_barrier_sync_fn()(key=name, timeout_ms=int(1000 * TIMEOUT))

    numbers = place(jnp.arange(mesh.size).reshape(sizes), NamedSharding(mesh, PartitionSpec(*MESH_AXES)))
    for axes in [axes for count in (1, 2, 3) for axes in itertools.combinations(MESH_AXES, count)]:
        left = PartitionSpec(*(None if axis in axes else axis for axis in MESH_AXES))
        summed = jax.jit(
            jax.shard_map(functools.partial(jax.lax.psum, axis_name=axes), mesh=mesh, in_specs=numbers.sharding.spec, out_specs=left)
        )
        program = summed.lower(numbers).compile()
        barrier("-".join(axes))
        jax.block_until_ready(program(numbers))
    barrier("hosts")
    multihost_utils.process_allgather(np.zeros(1, np.int32))


def main() -> None:
    """Run the task; what every batch looked like to this host goes into `seen`, and step `wait_in` waits for a line of input."""
    task_file = Path(sys.argv[1])
    task = json.loads(task_file.read_text())
    if task["coordinator"] is not None:
        start_multi_host(task["coordinator"], task["num_hosts"], task["host"])
        connect(tuple(task["mesh"]))
    seen: list[list[list[int]]] = []
    whole_batch = train_drafter.global_batch

    def watched(mesh, batch_size, share):
        seen.append(share[0].tolist())
        if len(seen) == task["wait_in"]:
            print("waiting", flush=True)
            sys.stdin.readline()
        return whole_batch(mesh, batch_size, share)

    train_drafter.global_batch = watched
    folder = task_file.parent
    train(tiny_run(folder, task["out"], tuple(task["mesh"]), task["total_steps"], **task["changes"]))
    Path(task["seen"]).write_text(json.dumps(seen))


if __name__ == "__main__":
    main()
