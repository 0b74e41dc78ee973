"""The paper's comparisons and ablations as sweeps, each at three scales.

    python -m experiments.run sweep toy_depth --seeds 0 1 2             # a toy target, no download: half a minute a cell on 2 cores
    python -m experiments.run sweep small_rivals                        # SmolLM2-135M with the `small_*` presets: CPUs
    python -m experiments.run sweep smollm2_rivals                      # the `smollm2_*` presets: GPUs
    python -m experiments.run sweep-report toy_depth

Cells of SmolLM2 share a cache of the target's features where one is given: `--here run.features=out/small_features` (the sweep over taps
needs other features in every cell, and reads the texts anew). No off-policy texts of SmolLM2 are at hand, so that the sweep over them
has the toy scale alone.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.losses import DraftLossConfig
from experiments.overrides import parsed_overrides
from experiments.presets import SMALL_PRESETS, SMOLLM2_PRESETS
from experiments.smollm2_cells import FREE_PATHS, SmolLM2Cell, run_smollm2_cell
from experiments.sweep import Cell, Changes, Sweep, grid, parse_only
from experiments.sweep_report import answers_field
from experiments.toy_drafters import RIVALS, ToyCell, run_toy_cell

MEASURES = ("accepted_length_greedy", "accepted_length_sampled")
"""Accepted length at temperature 0 and 1."""

DEPTHS = (1, 2, 3, 4, 5)
LENGTHS = (4, 6, 8, 12, 16)
BUDGETS = (50, 100, 200, 400, 800)
HEADS = ("vanilla", "rnn", "gated", "none")
DECAYS: Mapping[str, float | None] = {"4": 4.0, "7": 7.0, "none": None}
LOSSES = {
    "0.1 CE + 0.9 L1": DraftLossConfig(ce=0.1, l1=0.9),
    "0.5 CE + 0.5 L1": DraftLossConfig(ce=0.5, l1=0.5),
    "CE": DraftLossConfig(ce=1.0, l1=0.0),
    "L1": DraftLossConfig(ce=0.0, l1=1.0),
}
"""Weights of the cross-entropy and of the L1 distance; that of the confidence loss is 1 throughout."""


def run_toy(cell: ToyCell, out: Path) -> dict[str, Any]:
    """`run_toy_cell` with the accepted lengths, and what was emitted for every prompt, where reports look for them."""
    record = run_toy_cell(cell, out / "toy")
    found: dict[str, Any] = {}
    for name, place in zip(MEASURES, ("0", "1"), strict=True):
        measured = record["temperatures"][place]
        prompts = zip(range(len(measured["rounds"])), measured["emitted"], measured["rounds"], strict=True)
        found |= {
            name: measured["accepted_length"]["value"],
            answers_field(name): {"prompts": [list(prompt) for prompt in prompts]},
        }
    return found | record


def _toy(name: str, about: str, axes: Mapping[str, Mapping[Any, Changes]]) -> Sweep:
    return Sweep(f"toy_{name}", about, grid(ToyCell(), axes), run_toy, MEASURES)


def toy_sweeps() -> dict[str, Sweep]:
    """All sweeps on the toy target, by name."""
    no_heads: Changes = {"markov_rank": 0}
    heads = {head: no_heads if head == "none" else {"markov_head_type": head} for head in HEADS}
    kinds: Mapping[str, Changes] = {"dspark": {}, "dflash": {"drafter": "dflash"}}
    trained: Mapping[str, Changes] = {
        "dspark": {},
        "dflash_full_loss": {"drafter": "dflash", "loss": RIVALS["dflash_full_loss"].loss},
        "eagle3": {"drafter": "eagle3"},
    }
    verifiers = {verifier: {"verifier": verifier} for verifier in ("token", "block")}
    losses = {name: {"loss": loss} for name, loss in LOSSES.items()}
    detached = {name: {"detach_confidence": on} for name, on in (("no", False), ("yes", True))}
    lengths = {length: {"block_size": length} for length in LENGTHS}
    taps = {"0, 1, 2": (0, 1, 2), "embedding, 0, 1, 2": (-1, 0, 1, 2), "0": (0,), "1": (1,), "2": (2,)}
    sweeps = (
        _toy("depth", "drafter depth (Figure 3)", {"drafter": kinds, "layers": {n: {"num_layers": n} for n in DEPTHS}}),
        _toy("proposal", "proposal length and sequential head (Figure 4)", {"head": heads, "length": lengths}),
        _toy("loss", "weights of the loss", {"loss": losses}),
        _toy("decay", "position weights exp(-k / decay)", {"decay": {name: {"loss_decay": decay} for name, decay in DECAYS.items()}}),
        _toy("taps", "layers of the target that are read", {"taps": {name: {"taps": layers} for name, layers in taps.items()}}),
        _toy("rank", "Markov rank", {"rank": {rank: {"markov_rank": rank} for rank in (0, 16, 32, 64, 128)}}),
        _toy("detach", "confidence loss kept from the backbone", {"detached": detached}),
        _toy("texts", "texts of the target or of others", {"texts": {name: {"texts": name} for name in ("on_policy", "off_policy")}}),
        _toy("vocabulary", "tokens that can be drafted", {"tokens": {str(n): {"draft_vocab_size": n} for n in (256, 512, None)}}),
        _toy("verification", "drafts judged one by one or jointly", {"drafter": kinds, "verifier": verifiers}),
        _toy("budget", "optimizer steps, and who leads when", {"drafter": trained, "steps": {n: {"steps": n} for n in BUDGETS}}),
    )
    cells = tuple(Cell({"drafter": name}, cell) for name, cell in RIVALS.items())
    rivals = Sweep("toy_rivals", "all drafters at equal budgets", cells, run_toy, MEASURES)
    return {sweep.name: sweep for sweep in (rivals, *sweeps)}


def smollm2_sweeps(scale: str, presets: Mapping[str, Callable[[], Any]]) -> dict[str, Sweep]:
    """All sweeps on SmolLM2 at one scale, by name.

    Args:
      scale: what names of sweeps and presets begin with.
    """
    runs = {name.removeprefix(f"{scale}_"): preset() for name, preset in presets.items()}
    base = SmolLM2Cell(runs["dspark"])

    def sweep(name: str, about: str, cells: tuple[Cell, ...], measures: tuple[str, ...] = MEASURES) -> Sweep:
        return Sweep(f"{scale}_{name}", about, cells, run_smollm2_cell, measures, seed_field="run.seed", free=FREE_PATHS)

    def over(name: str, about: str, axes: Mapping[str, Mapping[Any, Changes]]) -> Sweep:
        return sweep(name, about, grid(base, axes))

    def drafters(*names: str) -> dict[str, Changes]:
        return {name: {"run": runs[name]} for name in names}

    def drafter_field(field: str, values: Mapping[Any, Any]) -> dict[Any, Changes]:
        return {name: {f"run.drafter.{field}": value} for name, value in values.items()}

    heads = {head: drafter_field("markov_head_type", {head: head})[head] for head in HEADS if head != "none"}
    heads["none"] = {"run.drafter.markov_rank": 0, "run.drafter.confidence_with_markov": False}
    taps = {"1, 8, 15, 22, 27": (1, 8, 15, 22, 27), "1, 15, 27": (1, 15, 27), "1": (1,), "15": (15,), "27": (27,)}
    detached = drafter_field("detach_confidence", {"no": False, "yes": True})
    chunk = base.run.train.loss.chunk
    losses = {name: {"run.train.loss": dataclasses.replace(loss, chunk=chunk)} for name, loss in LOSSES.items()}
    ids = runs["dspark"].draft_vocabulary or runs["dspark"].data[0].with_name("frequent_ids.npy")
    vocabularies: dict[str, Changes] = {
        str(size): {"run.drafter.draft_vocab_size": size, "run.draft_vocabulary": size and ids} for size in (4096, 8192, 16_384, None)
    }
    order = ("dspark", "dflash", "no_heads", "eagle3", "mtp", "dspark_rnn", "dspark_gated")
    judged = grid(dataclasses.replace(base, joint_rounds=20), {"drafter": drafters("dspark", "no_heads", "eagle3")})
    sweeps = (
        over("rivals", "all drafters at equal texts, anchors and steps", {"drafter": drafters(*order)}),
        over(
            "depth",
            "drafter depth (Figure 3)",
            {"drafter": drafters("dspark", "dflash"), "layers": drafter_field("num_layers", {n: n for n in DEPTHS})},
        ),
        over(
            "proposal",
            "proposal length and sequential head (Figure 4)",
            {"head": heads, "length": drafter_field("block_size", {n: n for n in LENGTHS})},
        ),
        over("loss", "weights of the loss", {"loss": losses}),
        over("decay", "position weights exp(-k / decay)", {"decay": drafter_field("loss_decay", DECAYS)}),
        over("taps", "layers of the target that are read", {"taps": drafter_field("taps", taps)}),
        over("rank", "Markov rank", {"rank": drafter_field("markov_rank", {rank: rank for rank in (16, 32, 64, 128)})}),
        over("detach", "confidence loss kept from the backbone", {"detached": detached}),
        over("vocabulary", "tokens that can be drafted", {"tokens": vocabularies}),
        sweep(
            "verification",
            "drafts judged one by one or jointly",
            judged,
            tuple(f"accepted_length_by_{verifier}" for verifier in ("token", "block")),
        ),
        over(
            "chains",
            "Eagle3 behind the drawn anchors or every position",
            {
                "supervision": {
                    name: {"run": runs["eagle3"], "run.drafter.supervision": name} for name in ("drawn_anchors", "answer_blocks")
                }
            },
        ),
    )
    return {each.name: each for each in sweeps}


def named_sweeps() -> dict[str, Sweep]:
    """All sweeps by name."""
    return toy_sweeps() | smollm2_sweeps("small", SMALL_PRESETS) | smollm2_sweeps("smollm2", SMOLLM2_PRESETS)


def find_sweep(name: str) -> Sweep:
    """The sweep of that name.

    Raises:
      ValueError: there is none.
    """
    sweeps = named_sweeps()
    if name not in sweeps:
        raise ValueError(f"sweep is {name!r}; known: {', '.join(sorted(sweeps))}")
    return sweeps[name]


def chosen_sweep(name: str, settings: Sequence[str] = (), only: Sequence[str] = (), seeds: Sequence[int] = ()) -> Sweep:
    """A sweep as a command line asks for it: fields changed, cut to some cells, and these repeated with several seeds.

    Args:
      settings: fields of all cells, "path=value".
      only: axes and their values, "AXIS=VALUE,VALUE".

    Raises:
      ValueError: a name, path, axis or value is not allowed.
    """
    sweep = find_sweep(name)
    sweep = sweep.changed(parsed_overrides(sweep.cells[0].config, settings)) if settings else sweep
    sweep = sweep.only(parse_only(only))
    return sweep.repeated(seeds) if seeds else sweep


__all__ = ["chosen_sweep", "find_sweep", "named_sweeps"]
