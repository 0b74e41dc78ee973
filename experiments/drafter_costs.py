"""What a round costs each drafter at the real dimensions: parameters, floating-point operations and bytes.

    python -m experiments.drafter_costs --presets qwen3_4b gemma4_12b

Nothing is allocated or run: the drafters are traced on abstract arrays, and matrix products are counted in the traced program. A
product's operands are counted as read and its result as written each time it runs, loops included, in bfloat16; caches and elementwise
work are left out. That is what a device moves which keeps nothing on chip between products. `experiments/results/drafter_costs.csv`
has the table.
"""

import dataclasses
import functools
import math
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import tyro
from rich.console import Console
from rich.table import Table

from dspark_jax.protocols import Committed, Drafter, FlatTokens, TargetHead
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.typing import Params
from experiments.model_presets import MODEL_PRESETS, ModelPreset
from experiments.result_files import write_csv

BYTES = 2
"""Of one number, in bfloat16."""


@dataclasses.dataclass(frozen=True)
class Work:
    """Operations and bytes of the matrix products of a program."""

    flops: int = 0
    bytes: int = 0

    def __add__(self, other: "Work") -> "Work":
        return Work(self.flops + other.flops, self.bytes + other.bytes)

    def times(self, count: int) -> "Work":
        """The same work, `count` times."""
        return Work(self.flops * count, self.bytes * count)


@dataclasses.dataclass(frozen=True)
class CostOptions:
    """Options of the command line.

    Attributes:
      presets: models of `experiments/model_presets.py`.
      rows: requests that draft together.
      context: committed tokens of each.
      out: where the table goes as CSV; none where absent.
    """

    presets: tuple[str, ...] = ("qwen3_4b", "qwen3_8b", "qwen3_14b", "gemma4_12b")
    rows: int = 1
    context: int = 1024
    out: Path | None = None

    def __post_init__(self) -> None:
        for name in self.presets:
            if name not in MODEL_PRESETS:
                raise ValueError(f"presets holds {name!r}; known: {', '.join(MODEL_PRESETS)}")
        for field in ("rows", "context"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; it must be at least 1")


def work_of(function: Any, *args: Any) -> Work:
    """Work of all matrix products that `function` does on arguments of these shapes."""
    return _work(jax.make_jaxpr(function)(*args).jaxpr)


def _work(jaxpr: Any) -> Work:
    total = Work()
    for equation in jaxpr.eqns:
        if equation.primitive.name in ("dot_general", "ragged_dot", "ragged_dot_general"):
            total += _product(equation)
            continue
        inner = [_work(each) for each in _inner(equation.params)]
        if equation.primitive.name == "scan":
            total += sum(inner, Work()).times(equation.params["length"])
        elif equation.primitive.name == "cond":
            # Branches without a product are the ones that skip work; the others differ in random numbers alone.
            total += max(inner, key=lambda work: work.flops, default=Work())
        else:
            total += sum(inner, Work())
    return total


def _inner(params: Any) -> list[Any]:
    """The programs inside an equation, whatever their parameter is called."""
    found = []
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            program = getattr(each, "jaxpr", each)
            if hasattr(program, "eqns"):
                found.append(program)
    return found


def _product(equation: Any) -> Work:
    left, right = (operand.aval for operand in equation.invars[:2])
    (result,) = (output.aval for output in equation.outvars)
    if equation.primitive.name == "dot_general":
        contracted = math.prod(left.shape[axis] for axis in equation.params["dimension_numbers"][0][0])
    else:
        contracted = left.shape[-1]
    return Work(2 * result.size * contracted, BYTES * (left.size + right.size + result.size))


def _abstract(function: Any, *args: Any) -> Any:
    return jax.eval_shape(function, *args)


def _parameters(tree: Any) -> int:
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def drafters_of(preset: ModelPreset) -> dict[str, Any]:
    """The drafters that the paper compares, for one target."""
    return {
        "DSpark": preset.dspark(),
        "DSpark, RNN head": preset.dspark(markov_head_type="rnn"),
        "DFlash": preset.dflash(),
        "Eagle3": preset.eagle3(),
        "MTP-1": preset.mtp(),
        "MTP, 7 steps": preset.mtp(block_size=7),
    }


def proposal_work(drafter: Drafter, params: Params, head: TargetHead, rows: int, context: int) -> Work:
    """Work of one proposal for `rows` requests behind `context` tokens; parameters and head may be abstract.

    Args:
      head: the target's, cut to the draft vocabulary where the drafter has one of its own.
    """
    state = _abstract(lambda: drafter.init_state(rows, context, dtype=jnp.float32))

    def propose(params: Params, head: TargetHead, state: Any, ids: Any) -> Any:
        row = jnp.arange(rows, dtype=jnp.int32)
        return drafter.propose(params, head, state, ids, Noise.of_round(0, row, row), Sampling.make(rows, 1.0))

    return work_of(propose, params, head, state, jax.ShapeDtypeStruct((rows,), jnp.int32))


def cost_rows(preset: ModelPreset, rows: int, context: int) -> list[dict[str, Any]]:
    """One row for the target's own step and one per drafter.

    Columns: `parameters` (the drafter's own: embedding and head are the target's), `flops` and `bytes` of a proposal, those of
    committing one position, and `byte_share` of a proposal in a plain step of the target.
    """
    target = preset.target
    target_params = target.abstract_params()
    head: TargetHead = _abstract(target.head, target_params)
    ids = jax.ShapeDtypeStruct((rows,), jnp.int32)
    cache = _abstract(lambda: target.init_cache(rows, context, writes_per_pass=16, dtype=jnp.float32))

    def plain_step(params: Any, head: TargetHead, cache: Any, ids: Any) -> Any:
        tokens = FlatTokens.grid(ids[:, None], jnp.full((rows,), context - 1, jnp.int32), jnp.ones((rows,), jnp.int32))
        hidden, _, _ = target.forward(params, cache, tokens, ())
        return head.logits(hidden)

    step = work_of(plain_step, target_params, head, cache, ids)
    table = [_row(preset.name, "target, plain step", 1, _parameters(target_params), step, Work(), step)]
    for name, drafter in drafters_of(preset).items():
        params = drafter.abstract_params()
        state = _abstract(lambda drafter=drafter: drafter.init_state(rows, context, dtype=jnp.float32))

        def commit(params: Any, head: TargetHead, state: Any, committed: Committed, drafter: Any = drafter) -> Any:
            return drafter.commit(params, head, state, committed)

        committed = _abstract(functools.partial(_one_position, rows, target.spec.width, len(drafter.taps)))
        proposal = proposal_work(drafter, params, head, rows, context)
        table.append(
            _row(
                preset.name,
                name,
                drafter.block_size,
                _parameters(params),
                proposal,
                work_of(commit, params, head, state, committed),
                step,
            )
        )
    return table


def _one_position(rows: int, width: int, taps: int) -> Committed:
    count = jnp.ones((rows,), jnp.int32)
    return Committed(count[:, None], jnp.zeros((rows, 1, width)), jnp.zeros((rows, 1, width * taps)), count)


def _row(model: str, name: str, drafts: int, parameters: int, proposal: Work, commit: Work, step: Work) -> dict[str, Any]:
    return {
        "model": model,
        "drafter": name,
        "drafts": drafts,
        "parameters": parameters,
        "flops": proposal.flops,
        "bytes": proposal.bytes,
        "commit_flops": commit.flops,
        "commit_bytes": commit.bytes,
        "byte_share": round(proposal.bytes / step.bytes, 4),
    }


def print_costs(options: CostOptions, console: Console) -> list[dict[str, Any]]:
    """Print one table per model; all rows come back, and go into a CSV file where one is asked for."""
    everything = []
    for name in options.presets:
        rows = cost_rows(MODEL_PRESETS[name](), options.rows, options.context)
        everything += rows
        table = Table(title=f"{name}: one proposal for {options.rows} request(s) behind {options.context} tokens, bfloat16")
        for column in ("drafter", "drafts", "parameters", "GFLOP", "GB", "of a plain step's bytes", "commit, GFLOP"):
            table.add_column(column, justify="left" if column == "drafter" else "right")
        for row in rows:
            table.add_row(
                row["drafter"],
                str(row["drafts"]),
                f"{row['parameters'] / 1e6:,.0f} M",
                f"{row['flops'] / 1e9:.2f}",
                f"{row['bytes'] / 1e9:.3f}",
                f"{row['byte_share']:.1%}",
                f"{row['commit_flops'] / 1e9:.2f}",
            )
        console.print(table)
    if options.out is not None:
        write_csv(options.out, everything)
    return everything


def main() -> int:
    """The command line."""
    try:
        print_costs(tyro.cli(CostOptions), Console())
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
