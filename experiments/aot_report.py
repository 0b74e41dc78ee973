"""What training and serving at the paper's sizes would take on TPUs that are not here: memory, traffic and time per chip.

    uv pip install --no-deps "libtpu==0.0.42.*"        # the one that `jax[tpu]` of jax 0.10.2 names
    python -m experiments.aot_report                   # what is there already is not compiled again
    python -m experiments.aot_report --quick           # a few layers of each target, extended to all of them

A training step takes 9 minutes of a core and 15 GB of memory to compile, a round 3 minutes with all layers and 2 with few. The most wanted
comes first; `--topologies`, `--models` and `--programs` choose.

Every program is compiled ahead of time for all chips of a topology. `experiments/results/aot.json` has a row per program and
`experiments/results/aot.md` a page of them; both are written after every program.

`predicted_seconds` is a bound from below: the longer of operations over peak and, for rounds, bytes over the bandwidth of main memory (a
roofline), and behind it what is sent over the interconnect, as though nothing overlapped.
"""

import dataclasses
import json
import re
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
from rich.console import Console

from experiments.aot_page import page_of
from experiments.aot_programs import TEXT_LENGTH, RoundSize, decoding_round, live_bytes, models, topology_mesh, train_config, training_step
from experiments.command_line import run_command
from experiments.hlo_collectives import collective_bytes, estimated_cycles
from experiments.hlo_traffic import main_memory_bytes
from experiments.model_presets import MODEL_PRESETS
from experiments.predict_steps import CHIPS
from experiments.result_files import whole, write_json
from experiments.training_costs import step_flops


@dataclasses.dataclass(frozen=True)
class Slice:
    """A slice of a TPU pod, and what its chips have beyond `predict_steps.CHIPS`.

    Attributes:
      name: as Google Cloud sells it; the number counts cores of v5p (two a chip), chips of the others.
      chip: key of `CHIPS`.
      hbm_bytes: main memory of a chip.
      sent_per_second: bytes that a chip sends over its interconnect, all links together, one direction.
      hertz: clock, from peak and size of the matrix units; None where the documentation does not settle it.
    """

    name: str
    chip: str
    hbm_bytes: float
    sent_per_second: float
    hertz: float | None


# Google Cloud's documentation of Cloud TPU, pages "TPU v5e", "TPU v5p" and "TPU v6e": memory; interconnect, stated for both directions
# (400, 1200 and 800 GB a second). v5e and v5p have 4 and 8 matrix units of 128 x 128 a chip.
SLICES = {
    "v5e:4x4": Slice("v5e-16", "v5e", 16e9, 200e9, 197e12 / (4 * 2 * 128**2)),
    "v5p:2x2x2": Slice("v5p-16", "v5p", 95e9, 600e9, 459e12 / (8 * 2 * 128**2)),
    "v6e:4x4": Slice("v6e-16", "v6e", 32e9, 400e9, None),
}
MODELS, PROGRAMS = ("qwen3_4b", "qwen3_8b"), ("training", "decoding")
FEW_LAYERS = (2, 4)
IN_FULL = frozenset({"v5e:4x4/qwen3_4b/decoding/8"})
"""Rounds that are compiled with all layers of the target, as every training step is, most of which is the drafter. The others are compiled
with few, at two depths, and lie on the line through both."""


@dataclasses.dataclass(frozen=True)
class AotOptions:
    """What to compile.

    Attributes:
      topologies: slices of pods.
      models: of `experiments/model_presets.py`, with the DSpark drafters published for them.
      programs: the training step, the decode round.
      rows: requests of a round.
      context: committed tokens of each.
      tokens_per_request: flat tokens of the target's pass, over the requests: the ladder of buckets. On all topologies but the first the
        ends alone.
      quick: nothing in full, and of the ladder the ends alone.
      again: whether to compile what the results have already.
      out: folder of the results.
    """

    topologies: tuple[str, ...] = tuple(SLICES)
    models: tuple[str, ...] = MODELS
    programs: tuple[str, ...] = PROGRAMS
    rows: int = 64
    context: int = 4096
    tokens_per_request: tuple[int, ...] = (1, 2, 4, 8)
    quick: bool = False
    again: bool = False
    out: Path = Path(__file__).resolve().parent / "results"

    def __post_init__(self) -> None:
        for field, known in (("topologies", tuple(SLICES)), ("models", MODELS), ("programs", PROGRAMS)):
            for value in getattr(self, field):
                if value not in known:
                    raise ValueError(f"{field} holds {value!r}; allowed: {', '.join(known)}")
        for field in ("rows", "context"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed are integers of at least 1")
        each = self.tokens_per_request
        if not each or list(each) != sorted(set(each)) or not 1 <= each[0] <= each[-1] <= 8:
            raise ValueError(f"tokens_per_request is {each}; allowed are integers of 1 to 8 in strictly ascending order")


@dataclasses.dataclass(frozen=True)
class Case:
    """One row of the report. `tokens` are those per request of a round, 0 for a training step."""

    topology: str
    model: str
    program: str
    tokens: int = 0

    @property
    def key(self) -> str:
        """How the results tell it from the others."""
        return "/".join((self.topology, self.model, self.program, *([f"{self.tokens}"] if self.tokens else [])))


def cases_of(options: AotOptions) -> list[Case]:
    """What is compiled, the most wanted first."""
    places = [(topology, model) for topology in options.topologies for model in options.models]
    ladder = options.tokens_per_request
    ends = sorted({ladder[0], ladder[-1]})
    training = [Case(*place, "training") for place in places]
    decoding = [
        Case(*place, "decoding", tokens)
        for place in places
        for tokens in reversed(ends if options.quick or place[0] != options.topologies[0] else ladder)
    ]
    return [case for case in training + decoding if case.program in options.programs]


def mesh_sizes(case: Case) -> dict[str, int]:
    """Texts and parameters are split over all chips in training; in a round parameters stay where they are, key heads over 8 chips."""
    chips = {"v5e:4x4": 16, "v5p:2x2x2": 8, "v6e:4x4": 16}[case.topology]
    return {"data": 1, "fsdp": chips, "tensor": 1} if case.program == "training" else {"data": 1, "fsdp": chips // 8, "tensor": 8}


def compiled_numbers(case: Case, options: AotOptions, num_layers: int | None) -> dict[str, float]:
    """What the compiler says of a case with so many layers in the target (None: all of them), per chip."""
    mesh = topology_mesh(case.topology, **mesh_sizes(case))
    target, drafter = models(MODEL_PRESETS[case.model](), num_layers)
    numbers: dict[str, float] = {}
    began = time.monotonic()
    if case.program == "training":
        program = training_step(target, drafter, mesh)
        texts = mesh.shape["data"] * mesh.shape["fsdp"]
        numbers["operations"] = step_flops(target, drafter, train_config(mesh), texts, TEXT_LENGTH) / mesh.size
    else:
        size = RoundSize(options.rows, options.context, options.rows * case.tokens)
        program = decoding_round(target, drafter, mesh, size)
        numbers["live_bytes"] = live_bytes(target, drafter, size) / mesh.size
    compiled = program.compile()
    memory, counted, text = compiled.memory_analysis(), compiled.cost_analysis() or {}, compiled.as_text()
    numbers |= {
        "arguments": memory.argument_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "results": memory.output_size_in_bytes - memory.alias_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
        "cycles": estimated_cycles(text),
        **{f"sent by {kind}": sent for kind, sent in collective_bytes(text).items()},
    }
    if case.program == "decoding":
        numbers |= {"operations": counted["flops"], "main_memory": main_memory_bytes(text), "cost_analysis": counted["bytes accessed"]}
    return numbers | {"compile_seconds": round(time.monotonic() - began, 1)}


def extended(few: Sequence[Mapping[str, float]], depths: Sequence[int], num_layers: int) -> dict[str, float]:
    """Numbers at `num_layers` layers, on the line through those at two `depths`; seconds of compilation are summed."""
    share = (num_layers - depths[0]) / (depths[1] - depths[0])
    names = dict.fromkeys([*few[0], *few[1]])
    line = {name: few[0].get(name, 0.0) + share * (few[1].get(name, 0.0) - few[0].get(name, 0.0)) for name in names}
    return line | {"compile_seconds": round(sum(each["compile_seconds"] for each in few), 1)}


def row_of(case: Case, options: AotOptions, numbers: Mapping[str, float], depths: Sequence[int]) -> dict[str, Any]:
    """A row of the results. Bytes and operations are those of one chip."""
    place, chip = SLICES[case.topology], CHIPS[SLICES[case.topology].chip]
    used = sum(numbers[part] for part in ("arguments", "temporaries", "results", "code"))
    sent = {name.removeprefix("sent by "): round(value) for name, value in numbers.items() if name.startswith("sent by ")}
    seconds = {
        "computing": numbers["operations"] / chip.flops_per_second,
        "main_memory": numbers["main_memory"] / chip.bytes_per_second if "main_memory" in numbers else None,
        "interconnect": sum(sent.values()) / place.sent_per_second,
        "compiler": numbers["cycles"] / place.hertz if place.hertz else None,
    }
    row: dict[str, Any] = {
        "topology": case.topology,
        "slice": place.name,
        "program": case.program,
        "model": case.model,
        "mesh": mesh_sizes(case),
        "compiled_layers": list(depths),
        "settings": _settings(case, options),
        "bytes_per_chip": round(used),
        "arguments_per_chip": round(numbers["arguments"]),
        "temporaries_per_chip": round(numbers["temporaries"]),
        "hbm_per_chip": round(place.hbm_bytes),
        "fits": used <= place.hbm_bytes,
        "collective_bytes": sent,
        "operations_per_chip": round(numbers["operations"]),
        "seconds": {name: None if value is None else float(f"{value:.4g}") for name, value in seconds.items()},
        "predicted_seconds": float(f"{max(seconds['computing'], seconds['main_memory'] or 0.0) + seconds['interconnect']:.4g}"),
        "compile_seconds": numbers["compile_seconds"],
    }
    if "live_bytes" in numbers:
        live = numbers["live_bytes"]
        row |= {
            "live_bytes_per_chip": round(live),
            "main_memory_bytes": round(numbers["main_memory"]),
            "cost_analysis_bytes": round(numbers["cost_analysis"]),
            "accessed_over_live": round(numbers["main_memory"] / live, 3),
            "cost_analysis_over_live": round(numbers["cost_analysis"] / live, 3),
        }
    return row


def _settings(case: Case, options: AotOptions) -> dict[str, int]:
    if case.program == "decoding":
        return {"requests": options.rows, "context": options.context, "bucket": options.rows * case.tokens}
    sizes = mesh_sizes(case)
    return {"texts": sizes["data"] * sizes["fsdp"], "tokens": TEXT_LENGTH, "micro_batches": 1}


def failed_row(case: Case, options: AotOptions, said: str) -> dict[str, Any]:
    """The row of a program that the compiler refused for its memory; `bytes_per_chip` is what it says of the temporaries alone."""
    wanted = re.search(r"\(([\d.]+)([GM])\) exceeds available HBM", said)
    used = round(float(wanted[1]) * {"G": 2**30, "M": 2**20}[wanted[2]]) if wanted else None
    place = SLICES[case.topology]
    row = {"topology": case.topology, "slice": place.name, "program": case.program, "model": case.model, "mesh": mesh_sizes(case)}
    return row | {
        "settings": _settings(case, options),
        "bytes_per_chip": used,
        "hbm_per_chip": round(place.hbm_bytes),
        "fits": False,
        "predicted_seconds": None,
    }


def run(options: AotOptions, console: Console) -> dict[str, Any]:
    """Compile what is not there yet, and write results and page after every program."""
    path = options.out / "aot.json"
    content = _read(path)
    for case in cases_of(options):
        if case.key in content["rows"] and not options.again:
            console.print(f"{case.key}: there already", style="dim", highlight=False)
            continue
        full = MODEL_PRESETS[case.model]().target.config.num_layers
        in_full = case.program == "training" or case.key in IN_FULL
        depths = FEW_LAYERS if options.quick or not in_full else (full,)
        try:
            found = [compiled_numbers(case, options, None if depth == full else depth) for depth in depths]
            row = row_of(case, options, found[0] if len(found) == 1 else extended(found, depths, full), depths)
        except jax.errors.JaxRuntimeError as error:
            if "RESOURCE_EXHAUSTED" not in str(error):
                raise
            row = failed_row(case, options, str(error))
        # Another report may have written rows of its own meanwhile.
        content = _read(path)
        content["rows"][case.key] = row
        write_json(path, content)
        with whole(options.out / "aot.md") as unfinished:
            unfinished.write_text(page_of(content), encoding="utf-8")
        said = "does not fit" if not row["fits"] else f"{row['bytes_per_chip'] / 1e9:.2f} GB a chip"
        console.print(f"{case.key}: {said}", highlight=False)
    return content


def _read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else {"jax": jax.__version__, "rows": {}}


if __name__ == "__main__":
    # With libtpu installed jax would look for a TPU first.
    jax.config.update("jax_platforms", "cpu")
    sys.exit(run_command(AotOptions, run))
