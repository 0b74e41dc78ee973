"""Cells on SmolLM2: train a drafter, then walk it along held-out answers of the target.

A training lies in a folder of its own, NAME-KEY, the name being that of its preset and the key a hash of the run, so that cells of all
sweeps that ask for the same training share it. A trained drafter is read anew from its folder, as any other drafter would be.
"""

import dataclasses
import statistics
from pathlib import Path
from typing import Any

import jax
import numpy as np

from dspark_jax.calibrate import ConstantSurvival
from dspark_jax.data import DOMAINS, TokenSequences
from dspark_jax.decode import VERIFIERS, DecodeParams, DecodePlan
from dspark_jax.evaluate import WalkTotals
from dspark_jax.schedule import FixedLength
from dspark_jax.weights import LoadedDrafter, load_drafter, load_target
from experiments.bootstrap import Figure, mean_of, ratio_of_sums
from experiments.held_out import KINDS, TEMPERATURES
from experiments.record_lines import key_of
from experiments.release_readings import cell_rows, read_rows, walk_answer
from experiments.sweep import CellStopped, described
from experiments.train_drafter import TrainRun, train
from experiments.training_log import read_lines
from experiments.verifier_gain import heldout_prompts, walk

FREE_PATHS = tuple(f"run.{name}" for name in ("features", "mesh", "checkpoint_every", "keep"))
"""What differs from machine to machine and not in the result."""


@dataclasses.dataclass(frozen=True)
class SmolLM2Cell:
    """A training and how its drafter is measured.

    Attributes:
      run: the training. The last part of `out` names its folder.
      texts_per_cell: held-out answers per domain and temperature that it is walked along.
      first_tokens: rounds whose anchor is among so many first tokens of an answer; the target's greedy answers often end in loops,
        which flatter every drafter.
      draft_length: drafts verified a round; None for whole blocks.
      joint_rounds: rounds of real answers, per prompt, in which both verifiers are measured on the same blocks at temperature 1; 0 for
        none.
      joint_prompts: such prompts per domain.
    """

    run: TrainRun
    texts_per_cell: int = 12
    first_tokens: int = 128
    draft_length: int | None = None
    joint_rounds: int = 0
    joint_prompts: int = 8

    def __post_init__(self) -> None:
        for name, lowest in (("texts_per_cell", 2), ("first_tokens", 1), ("joint_rounds", 0), ("joint_prompts", 2)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} is {getattr(self, name)}; at least {lowest} is needed")
        if self.draft_length is not None and not 1 <= self.draft_length <= self.run.drafter.block_size:
            raise ValueError(f"draft_length is {self.draft_length}; allowed: 1 to block_size {self.run.drafter.block_size}, or None")


def training_folder(run: TrainRun, out: Path) -> Path:
    """Where the training of `run` lies under `out`, whatever machine runs it."""
    same = dataclasses.replace(run, features=None, mesh=None, checkpoint_every=1, keep=1, out=Path(run.out.name))
    return out / f"{run.out.name}-{key_of(described(same))}"


def run_smollm2_cell(cell: SmolLM2Cell, out: Path) -> dict[str, Any]:
    """Train, where that is not done yet, and measure.

    Raises:
      CellStopped: a signal ended the training.
      ValueError: texts or models are missing or do not fit each other.
    """
    run = dataclasses.replace(cell.run, out=training_folder(cell.run, out))
    if not (run.out / "drafter" / "config.json").is_file():
        state = train(run)
        if not (run.out / "drafter" / "config.json").is_file():
            raise CellStopped(f"stopped behind step {int(state.step)}")
    target, target_params = load_target(run.target)
    loaded = load_drafter(run.out / "drafter", target.spec)
    steps, evaluations = read_lines(run.out / "metrics.jsonl"), read_lines(run.out / "held_out.jsonl")
    figures: dict[str, Any] = {
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(loaded.params)),
        "steps": steps[-1]["step"],
        "anchors": int(steps[-1]["anchors"]),
        "seconds_per_step": statistics.median(step["seconds"] for step in steps),
        "estimates": {name: [[line["step"], line[name][f"accepted_length_{name}"]] for line in evaluations] for name in KINDS},
        "drafter": str(run.out.relative_to(out) / "drafter"),
    }
    texts = run.texts(target.spec.vocab_size)
    figures |= walked(cell, target, target_params, loaded, texts)
    if cell.joint_rounds:
        figures |= jointly_verified(cell, target, target_params, loaded, texts)
    return figures


def walked(cell: SmolLM2Cell, target: Any, target_params: Any, loaded: LoadedDrafter, texts: TokenSequences) -> dict[str, Any]:
    """Accepted lengths along held-out answers with their 95 % intervals over answers, and the conditional acceptance by position.

    The overall figure of a temperature is the mean of its domains'. `answers_*` has every answer's row, emitted tokens and rounds, in the
    order in which the intervals draw them: two cells that walked the same answers can be compared answer by answer.
    """
    found: dict[str, Any] = {}
    length = cell.draft_length or cell.run.drafter.block_size
    for name, temperature in TEMPERATURES.items():
        by_domain: dict[str, Figure] = {}
        answers: dict[str, list[list[float]]] = {}
        everything: list[WalkTotals] = []
        for domain in cell.run.domains:
            rows = cell_rows(texts, DOMAINS.index(domain), int(temperature))[: cell.texts_per_cell]
            readings = list(read_rows(target, target_params, loaded, texts, rows))
            totals = [walk_answer(reading, int(temperature), length, cell.first_tokens) for reading in readings]
            emitted, rounds = ([float(getattr(total, what)) for total in totals] for what in ("emitted", "rounds"))
            by_domain[domain] = ratio_of_sums(emitted, rounds, f"{domain} {name}")
            answers[domain] = [list(each) for each in zip((reading.row for reading in readings), emitted, rounds, strict=True)]
            everything += totals
        reached, accepted = (np.sum([getattr(total, what) for total in everything], axis=0) for what in ("reached", "accepted"))
        overall = mean_of(list(by_domain.values()))
        found |= {
            f"accepted_length_{name}": round(overall.value, 4),
            f"accepted_length_{name}_interval": [round(end, 4) for end in overall.interval],
            f"domains_{name}": {
                domain: [round(value, 4) for value in (figure.value, *figure.interval)] for domain, figure in by_domain.items()
            },
            f"answers_{name}": answers,
            f"conditional_acceptance_{name}": np.round(accepted / np.maximum(reached, 1), 4).tolist(),
        }
    return found


def jointly_verified(cell: SmolLM2Cell, target: Any, target_params: Any, loaded: LoadedDrafter, texts: TokenSequences) -> dict[str, Any]:
    """Accepted lengths that both verifiers would have on the same rounds of real answers at temperature 1 (see `verifier_gain`)."""
    prompts, _ = heldout_prompts(texts, cell.joint_prompts)
    size = loaded.drafter.block_size
    plan = DecodePlan(target, loaded.drafter, FixedLength(size), ConstantSurvival((1.0,) * size))
    params = DecodeParams.of(target, target_params, loaded.params, loaded.draft_ids)
    max_len = max(map(len, prompts)) + (cell.joint_rounds + 1) * (size + 1)
    found: dict[str, Any] = {}
    rounds = walk(plan, params, prompts, 1.0, cell.joint_rounds, seed=cell.run.seed, max_len=max_len)
    for verifier in VERIFIERS:
        emitted = rounds.rounds + rounds.sums(verifier)[:, -1]
        figure = ratio_of_sums(emitted.tolist(), rounds.rounds.astype(float).tolist(), "joint prompts")
        found |= {
            f"accepted_length_by_{verifier}": round(figure.value, 4),
            f"accepted_length_by_{verifier}_interval": list(figure.interval),
        }
    return found


__all__ = ["FREE_PATHS", "SmolLM2Cell", "run_smollm2_cell", "training_folder"]
