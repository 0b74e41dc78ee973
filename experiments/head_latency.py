"""What the sequential head costs: seconds of a proposal with and without it, by block size (the latency share in Figure 4).

    python -m experiments.head_latency                # SmolLM2's sizes, about 6 minutes on 2 cores, results/head_latency.csv and .png

Drafters differ in the head alone: none, vanilla (Markov), gated and recurrent, on the same backbone with random weights, since time does
not depend on them. All are timed in turns in one run, so that a disturbance hits all alike; a time is the median over the repetitions.
The target's pass over a block and its anchor is timed in the same turns: layer by layer, each with weights of its own.

`share_of_proposal` is what the head adds, over the proposal with it; `share_of_round` the same over proposal plus the target's pass.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from rich.console import Console
from rich.table import Table

from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.protocols import FlatTokens, TargetHead
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.typing import Array, Params
from dspark_jax.weights import load_target
from experiments.command_line import run_command
from experiments.presets import SMOLLM2_BLOCK
from experiments.profile_steps import device_text
from experiments.result_files import save_figure, write_csv
from experiments.step_timing import batch_tokens, head_pass, interleaved, layer_pass, split_layers

HEADS = ("none", "vanilla", "gated", "rnn")


@dataclasses.dataclass(frozen=True)
class LatencyOptions:
    """Command line.

    Attributes:
      target: whose head the drafts go through, and whose pass is timed.
      block_sizes: G, drafts of a proposal.
      vocabularies: numbers of tokens that can be drafted.
      markov_rank: M of every head.
      rows: requests that draft together; context: committed tokens of each.
      temperature: of the draws; all branches for others are compiled away.
      repetitions: timed turns.
      out: the CSV file; the plot lies beside it.
    """

    target: str = "smollm2"
    block_sizes: tuple[int, ...] = (4, 6, 8, 12, 16)
    vocabularies: tuple[int, ...] = (12_288, 49_152)
    markov_rank: int = 64
    rows: int = 1
    context: int = 512
    temperature: float = 0.0
    repetitions: int = 30
    out: Path = Path("experiments/results/head_latency.csv")

    def __post_init__(self) -> None:
        for name in ("block_sizes", "vocabularies"):
            values = getattr(self, name)
            if not values or list(values) != sorted(set(values)) or values[0] < 1:
                raise ValueError(f"{name} is {values}; allowed: one or more ascending integers of at least 1")
        if self.vocabularies[-1] > SMOLLM2_BLOCK["vocab_size"]:
            raise ValueError(f"vocabularies is {self.vocabularies}; allowed: up to {SMOLLM2_BLOCK['vocab_size']}, the target's own")
        for name in ("markov_rank", "rows", "context", "repetitions"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")


def drafter_with(head: str, block_size: int, vocabulary: int, markov_rank: int) -> DSparkDrafter:
    """A drafter without a confidence head that has the sequential head of that name, or none."""
    fields = SMOLLM2_BLOCK | {"block_size": block_size, "draft_vocab_size": vocabulary, "confidence_head": False}
    kind: dict[str, Any] = {"markov_rank": 0} if head == "none" else {"markov_rank": markov_rank, "markov_head_type": head}
    return DSparkDrafter(DSparkConfig(**fields, **kind, confidence_with_markov=False))


@functools.partial(jax.jit, static_argnums=(0, 5))
def _propose(
    drafter: DSparkDrafter, params: Params, head: TargetHead, state: Any, anchor: Array, temperature: float
) -> tuple[Array, Array]:
    rows = anchor.shape[0]
    noise = Noise.of_round(0, jnp.arange(rows, dtype=jnp.int32), jnp.zeros_like(anchor))
    block = drafter.propose(params, head, state, anchor, noise, Sampling.make(rows, temperature))
    return block.ids, block.log_q


def _target_pass(target: Any, params: Params, options: LatencyOptions, block_size: int) -> Callable[[], Any]:
    """A call that sends a block and its anchor of every request through the target, layer by layer, and its output head."""
    one_layer, layers = split_layers(target, params)
    width = block_size + 1
    tokens: FlatTokens = batch_tokens(options.rows, options.rows * width, block_size, options.context)
    caches = [one_layer.init_cache(options.rows, options.context + width) for _ in layers]
    head = target.head(params)

    def call() -> Any:
        flat, hidden = tokens, None
        for place, layer in enumerate(layers):
            hidden, caches[place], flat = layer_pass(one_layer, layer, caches[place], (), flat)
        return head_pass(head, hidden)

    return call


def calls_of(options: LatencyOptions) -> dict[tuple[Any, ...], Callable[[], Any]]:
    """Everything that is timed: ("target", G), and (head, vocabulary, G) for the proposals."""
    target, target_params = load_target(options.target)
    whole = target.head(target_params)
    anchor = jnp.ones((options.rows,), jnp.int32)
    calls: dict[tuple[Any, ...], Callable[[], Any]] = {}
    for size in options.block_sizes:
        calls["target", size] = _target_pass(target, target_params, options, size)
        for vocabulary in options.vocabularies:
            cut = whole.restrict(jnp.arange(vocabulary, dtype=jnp.int32))
            for head in HEADS:
                drafter = drafter_with(head, size, vocabulary, options.markov_rank)
                params = jax.jit(drafter.init)(jax.random.key(0))
                empty = drafter.init_state(options.rows, options.context)
                state = dataclasses.replace(empty, length=jnp.full_like(empty.length, options.context))
                calls[head, vocabulary, size] = functools.partial(_propose, drafter, params, cut, state, anchor, options.temperature)
    return calls


def rows_of(seconds: Mapping[tuple[Any, ...], float], options: LatencyOptions) -> list[dict[str, Any]]:
    """A row per head, vocabulary and block size."""
    rows = []
    for vocabulary in options.vocabularies:
        for head in HEADS:
            for size in options.block_sizes:
                proposal, without, target = seconds[head, vocabulary, size], seconds["none", vocabulary, size], seconds["target", size]
                added = proposal - without
                rows.append(
                    {
                        "head": head,
                        "draft_vocabulary": vocabulary,
                        "block_size": size,
                        "proposal_ms": round(1e3 * proposal, 3),
                        "head_ms": round(1e3 * added, 3),
                        "target_ms": round(1e3 * target, 3),
                        "share_of_proposal": round(added / proposal, 4),
                        "share_of_round": round(added / (proposal + target), 4),
                    }
                )
    return rows


def plot(rows: Sequence[Mapping[str, Any]], options: LatencyOptions, path: Path) -> None:
    """The two shares by block size: a line per head, a column of panels per vocabulary."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shares = {"share_of_proposal": "of a proposal, %", "share_of_round": "of a round, %"}
    columns = len(options.vocabularies)
    figure, panels = pyplot.subplots(len(shares), columns, figsize=(4.6 * columns, 6.4), layout="constrained", squeeze=False, sharex=True)
    for line, (share, label) in zip(panels, shares.items(), strict=True):
        for panel, vocabulary in zip(line, options.vocabularies, strict=True):
            for head, mark in zip(HEADS[1:], "os^", strict=True):
                chosen = [row for row in rows if row["head"] == head and row["draft_vocabulary"] == vocabulary]
                panel.plot([row["block_size"] for row in chosen], [100 * row[share] for row in chosen], f"{mark}-", label=head)
            panel.set(
                xlabel="drafts in a block",
                ylabel=f"sequential head, share {label}",
                title=f"{vocabulary:,} tokens to draft",
                ylim=(0, None),
            )
            panel.legend()
    save_figure(figure, path)
    pyplot.close(figure)


def run(options: LatencyOptions, console: Console) -> list[dict[str, Any]]:
    """Time everything in turns, show, and write."""
    calls = calls_of(options)
    console.print(f"{len(calls)} programs, timed in {options.repetitions} turns on {device_text()}", highlight=False)

    def one(name: tuple[Any, ...], _: Any) -> Any:
        return calls[name]()

    rows = rows_of(interleaved(one, None, list(calls), options.repetitions), options)
    table = Table(*rows[0], title=f"sequential head of rank {options.markov_rank}, {options.rows} request, context {options.context}")
    for row in rows:
        table.add_row(*map(str, row.values()))
    console.print(table)
    write_csv(options.out, [row | {"device": device_text()} for row in rows])
    plot(rows, options, options.out.with_suffix(".png"))
    return rows


if __name__ == "__main__":
    sys.exit(run_command(LatencyOptions, run))
