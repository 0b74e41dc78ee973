"""How fast the training step is on this machine, and how its memory grows with the anchors.

    python -m experiments.training_speed             # results/training_speed.json; about 6 minutes on 2 cores
    python -m experiments.training_speed --memory    # memory alone
    python -m experiments.training_speed --speed     # speed alone

Two pairs of target and drafter, with random parameters, since speed does not depend on what they say: the sizes of the golden files,
and SmolLM2-135M with its released drafter's sizes (the preset `smollm2_dspark`). Memory: four sequences of 512 tokens of SmolLM2, from
16 to 512 anchors each; the most that a process of its own came to hold, and what the compiler sets aside for the step, beside the same
step with the logits of all prediction sites at once (compiled, not run).
"""

import concurrent.futures
import dataclasses
import functools
import json
import multiprocessing
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.losses import DraftLossConfig
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.train import OptimizerConfig, TrainConfig, init_train_state, train_step
from experiments.command_line import run_command
from experiments.presets import smollm2_dspark
from experiments.result_files import write_json
from experiments.training_costs import memory_bytes

RESULTS = Path(__file__).resolve().parent / "results" / "training_speed.json"
GOLDEN_TARGET = DenseConfig(97, 32, 64, num_layers=6, num_heads=4, num_kv_heads=2, head_dim=16, rope_theta=1e6, qk_norm=True)
GOLDEN_DRAFTER = DSparkConfig(
    vocab_size=97,
    hidden_size=32,
    intermediate_size=64,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    mask_token_id=96,
    taps=(0, 2, 4),
    num_target_layers=6,
    num_layers=2,
    block_size=5,
    markov_rank=8,
)
SMOLLM2 = DenseConfig(49_152, 576, 1_536, num_layers=30, num_heads=9, num_kv_heads=3, head_dim=64, rope_theta=1e5, tie_word_embeddings=True)


@dataclasses.dataclass(frozen=True)
class Pair:
    """A target, a drafter and the batch that is timed.

    Attributes:
      rows: sequences of a step.
      length: tokens of each, all of them answer.
      anchors: per sequence.
      micro_batches: parts that a step is computed in.
      chunk: prediction sites whose logits exist at the same time.
    """

    target: DenseTarget
    drafter: DSparkDrafter
    rows: int
    length: int
    anchors: int
    micro_batches: int = 1
    chunk: int = 1024

    @property
    def config(self) -> TrainConfig:
        """The step's."""
        return TrainConfig(OptimizerConfig(1000), DraftLossConfig(chunk=self.chunk), self.anchors, self.micro_batches)

    @property
    def sites(self) -> int:
        """Tokens that a step predicts."""
        return self.rows * self.anchors * self.drafter.block_size

    def arguments(self) -> tuple[Any, ...]:
        """State, target parameters, ids and loss mask."""
        target_params = jax.jit(self.target.init)(jax.random.key(0))
        state = init_train_state(jax.random.key(1), jax.jit(self.drafter.init)(jax.random.key(2)), self.config.optimizer)
        shape = self.rows, self.length
        ids = jax.random.randint(jax.random.key(3), shape, 0, self.target.config.vocab_size)
        return state, target_params, ids, jnp.ones(shape, bool)


def golden_pair() -> Pair:
    """The sizes of the golden files."""
    return Pair(DenseTarget(GOLDEN_TARGET), DSparkDrafter(GOLDEN_DRAFTER), rows=16, length=128, anchors=32)


def smollm2_pair(rows: int = 4, anchors: int = 64, chunk: int = 1024) -> Pair:
    """SmolLM2 and its released drafter's sizes; by default the released drafter's 64 anchors."""
    return Pair(DenseTarget(SMOLLM2), DSparkDrafter(smollm2_dspark().drafter), rows, 512, anchors, chunk=chunk)


@dataclasses.dataclass(frozen=True)
class SpeedOptions:
    """What to measure; everything unless one of the two is asked for.

    Attributes:
      seconds: time that is spent on steps of each pair, at least; three steps at least.
      anchors: per sequence, of which memory is measured.
    """

    speed: bool = False
    memory: bool = False
    seconds: float = 30.0
    anchors: tuple[int, ...] = (16, 64, 256, 512)
    out: Path = RESULTS

    def __post_init__(self) -> None:
        if not self.seconds > 0:
            raise ValueError(f"seconds is {self.seconds}; allowed: a positive number")
        if not self.anchors or min(self.anchors) < 1:
            raise ValueError(f"anchors is {self.anchors}; allowed: at least one number of at least 1")


def time_steps(pair: Pair, seconds: float) -> dict[str, Any]:
    """Median seconds of a step and what that comes to."""
    state, *rest = pair.arguments()
    step = functools.partial(train_step, pair.target, pair.drafter, pair.config)
    state, _ = jax.block_until_ready(step(state, *rest))
    taken: list[float] = []
    while len(taken) < 3 or sum(taken) < seconds:
        began = time.perf_counter()
        state, _ = jax.block_until_ready(step(state, *rest))
        taken.append(time.perf_counter() - began)
    median = statistics.median(taken)
    sizes = {"sequences": pair.rows, "tokens": pair.rows * pair.length, "anchors": pair.rows * pair.anchors, "sites": pair.sites}
    return sizes | {
        "steps": len(taken),
        "seconds_per_step": median,
        "tokens_per_second": pair.rows * pair.length / median,
        "sequences_per_second": pair.rows / median,
        "anchors_per_second": pair.rows * pair.anchors / median,
    }


def compiled_bytes(pair: Pair) -> int:
    """What the compiler sets aside for a step beside its arguments and results."""
    arguments = jax.eval_shape(pair.arguments)
    memory: Any = train_step.lower(pair.target, pair.drafter, pair.config, *arguments).compile().memory_analysis()
    return int(memory.temp_size_in_bytes)


def peak_bytes(pair: Pair) -> int:
    """The most memory that this process came to hold, one step taken; for a process that does nothing else."""
    jax.block_until_ready(train_step(pair.target, pair.drafter, pair.config, *pair.arguments()))
    return memory_bytes()[1]


def measure_memory(anchors: int) -> dict[str, Any]:
    """One row: ours and all logits at once."""
    ours, dense = smollm2_pair(anchors=anchors), smollm2_pair(anchors=anchors)
    dense = dataclasses.replace(dense, chunk=dense.sites)
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        peak = pool.submit(peak_bytes, ours).result()
    return {
        "anchors": anchors,
        "sequences": ours.rows,
        "sites": ours.sites,
        "peak_bytes": peak,
        "compiled_bytes": compiled_bytes(ours),
        "compiled_bytes_of_all_logits": compiled_bytes(dense),
    }


def run(options: SpeedOptions, console: Console) -> dict[str, Any]:
    """Measure, show and write; of what is not measured the file keeps what it has."""
    everything = options.speed == options.memory
    versions = {"python": platform.python_version(), "jax": jax.__version__, "numpy": np.__version__}
    content: dict[str, Any] = json.loads(options.out.read_text(encoding="utf-8")) if options.out.exists() else {}
    content |= {"device": jax.devices()[0].device_kind, "platform": jax.default_backend(), "versions": versions}
    if everything or options.speed:
        content["speed"] = {}
        for name, pair in (("golden", golden_pair()), ("smollm2", smollm2_pair())):
            content["speed"][name] = found = time_steps(pair, options.seconds)
            console.print(
                f"{name}: {found['tokens_per_second']:.0f} tokens/s, {found['sequences_per_second']:.2f} sequences/s, "
                f"{found['seconds_per_step']:.2f} s a step of {found['sites']} sites",
                highlight=False,
            )
            write_json(options.out, content)
    if everything or options.memory:
        content["memory"] = []
        for anchors in options.anchors:
            row = measure_memory(anchors)
            content["memory"].append(row)
            held, ours, dense = (row[name] / 1e9 for name in ("peak_bytes", "compiled_bytes", "compiled_bytes_of_all_logits"))
            said = f"{held:.2f} GB held, {ours:.2f} GB set aside; with all logits at once {dense:.2f} GB"
            console.print(f"{anchors} anchors x {row['sequences']} sequences: {said}", highlight=False)
            write_json(options.out, content)
    return content


if __name__ == "__main__":
    sys.exit(run_command(SpeedOptions, run))
