"""The page of `experiments/aot_report.py`: its rows as tables, the cost curves that follow from them, and what a reader has to know."""

import warnings
from collections.abc import Mapping, Sequence
from typing import Any

from dspark_jax.step_curve import CurveWarning, StepCurve

NAMES = {"qwen3_4b": "Qwen3-4B", "qwen3_8b": "Qwen3-8B"}


def page_of(content: Mapping[str, Any]) -> str:
    """The results as Markdown."""
    rows = list(content["rows"].values())
    training, decoding = ([row for row in rows if row["program"] == program] for program in ("training", "decoding"))
    parts = [HEAD.format(jax=content["jax"])]
    if training:
        parts += [TRAINING, _table(TRAINING_COLUMNS, map(_training_line, training))]
    if decoding:
        parts += [DECODING.format(**decoding[0]["settings"]), _table(DECODING_COLUMNS, map(_decoding_line, decoding))]
        curves = list(_curve_lines(decoding))
        parts += [CURVES, _table(("slice", "target", "requests", "tokens of the pass", "milliseconds"), curves)] if curves else []
    return "\n".join((*parts, METHOD))


def curves_of(rows: Sequence[Mapping[str, Any]]) -> dict[tuple[str, str], StepCurve]:
    """Predicted cost of a whole round, drafting and commit included, against the flat tokens of the target's pass; by slice and model.

    Rounds that do not fit have no cost.
    """
    found: dict[tuple[str, str], StepCurve] = {}
    for place in dict.fromkeys((row["topology"], row["model"]) for row in rows):
        own = [row for row in rows if (row["topology"], row["model"]) == place and row["fits"]]
        own.sort(key=lambda row: row["settings"]["bucket"])
        if own:
            with warnings.catch_warnings():
                # What memory bounds is flat: that is to be shown.
                warnings.simplefilter("ignore", CurveWarning)
                tokens, seconds = (tuple(row["settings"]["bucket"] for row in own), tuple(row["predicted_seconds"] for row in own))
                found[place] = StepCurve(tokens, seconds, 0.0, own[0]["settings"]["context"])
    return found


TRAINING_COLUMNS = (
    *("slice", "target", "mesh", "texts", "GB a chip", "of which state and parameters", "HBM", "fits"),
    *("computing", "interconnect", "compiler", "predicted"),
)
DECODING_COLUMNS = (
    *("slice", "target", "bucket", "GB a chip", "fits", "live GB", "read and written GB", "over live", "`cost_analysis` over live"),
    *("sent MB", "predicted"),
)


def _training_line(row: Mapping[str, Any]) -> tuple[str, ...]:
    start = (row["slice"], NAMES[row["model"]], _mesh(row), str(row["settings"]["texts"]))
    if "seconds" not in row:
        return (*start, _gigabytes(row["bytes_per_chip"]), "", _gigabytes(row["hbm_per_chip"]), "no", "", "", "", "")
    seconds = row["seconds"]
    memory = (_gigabytes(row["bytes_per_chip"]), _gigabytes(row["arguments_per_chip"]), _gigabytes(row["hbm_per_chip"]))
    times = (seconds["computing"], seconds["interconnect"], seconds["compiler"], row["predicted_seconds"])
    return (*start, *memory, "yes" if row["fits"] else "no", *map(_milliseconds, times))


def _decoding_line(row: Mapping[str, Any]) -> tuple[str, ...]:
    start = (row["slice"], NAMES[row["model"]], str(row["settings"]["bucket"]), _gigabytes(row["bytes_per_chip"]))
    if "seconds" not in row:
        return (*start, "no", "", "", "", "", "", "")
    bytes_moved = (_gigabytes(row["live_bytes_per_chip"]), _gigabytes(row["main_memory_bytes"]))
    ratios = (f"{row['accessed_over_live']:.2f}", f"{row['cost_analysis_over_live']:.2f}")
    sent = f"{sum(row['collective_bytes'].values()) / 1e6:.0f}"
    return (*start, "yes" if row["fits"] else "no", *bytes_moved, *ratios, sent, _milliseconds(row["predicted_seconds"]))


def _curve_lines(rows: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    slices = {row["topology"]: row["slice"] for row in rows}
    requests = rows[0]["settings"]["requests"]
    return [
        (
            slices[topology],
            NAMES[model],
            str(requests),
            ", ".join(map(str, curve.tokens)),
            ", ".join(f"{seconds * 1e3:.2f}" for seconds in curve.seconds_per_step),
        )
        for (topology, model), curve in curves_of(rows).items()
    ]


def _mesh(row: Mapping[str, Any]) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in row["mesh"].items() if size > 1)


def _gigabytes(size: float | None) -> str:
    return "" if size is None else f"{size / 1e9:.2f}"


def _milliseconds(seconds: float | None) -> str:
    return "" if seconds is None else f"{seconds * 1e3:.1f} ms"


def _table(columns: Sequence[str], lines: Any) -> str:
    return "\n".join(f"| {' | '.join(line)} |" for line in (columns, ["---"] * len(columns), *lines)) + "\n"


HEAD = """# Training and serving at the paper's sizes, compiled ahead of time

Nothing here was run: every program was compiled for the chips of a slice by libtpu (jax {jax}), and the numbers are the compiler's or
read off its program. Written by `experiments/aot_report.py`; `aot.json` has the same rows with all their parts.
"""

TRAINING = """## The training step

The target reads 4,096 tokens of every text in bfloat16 inside the step; the drafter (5 layers, block 7, 512 anchors a text, rank 256)
has float32 masters and Adam moments and computes in bfloat16. One text a chip; texts and parameters are split over all chips.
"""

DECODING = """## A decode round

Drafting, verification and commit of {requests} requests with {context:,} committed tokens each, at temperature 1. *Live* is what a round
cannot do without: all parameters of target and drafter and the keys and values of committed tokens, over the chips. *Read and written*
is what crosses the bus between main memory and chip, loops written out.
"""

CURVES = """## Predicted cost curves

Whole rounds, drafting and commit included, against the flat tokens of the target's pass.
"""

METHOD = """## How to read it

- GB are 10^9 bytes. A program needs its arguments (parameters, moments, caches), its temporaries, its code, and results that do not
  take an argument's place. HBM is the documented capacity.
- *Computing* is the operations of the matrix products over the documented peak; *interconnect* the bytes that a chip sends, by ring
  algorithms, over the documented bandwidth of all its links in one direction (200, 600 and 400 GB/s for v5e, v5p and v6e); *predicted*
  the longer of computing and, for rounds, main memory, and the interconnect behind it. It is a bound from below: launches, waits between
  chips and main memory in training are left out. *Compiler* is what its own cost model expects of the kernels, one after another.
- `cost_analysis` counts every operand and result of every instruction, those in on-chip memory included, and a weight that is fetched
  ahead twice: it says more than what crosses the bus.
- A round that reads and writes more than is live reads the output head twice (drafting and verifying) and W2 once a draft, and at some
  sizes writes whole caches back that were updated on the chip. That was 1.68 times with 512 tokens of Qwen3-4B on v5e-16 while every
  layer wrote its cache before its attention; targets now write behind the last layer on TPUs (`DenseTarget.cache_writes`).
- Rows with two numbers in `compiled_layers` were compiled with so few layers of the target, twice, and lie on the line through both. That
  is an estimate: which caches the compiler keeps on the chip changes with the depth. The others were compiled in full.
"""
