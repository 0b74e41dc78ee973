"""Does our evaluator give the original card's accepted lengths? On all answers that the card used in some cells, so that nothing is
left to the choice of texts: `python -m experiments.run agreement`. Results in `card_agreement.json` beside the evaluation's.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import track

from dspark_jax.data import DOMAINS, load_token_sequences
from dspark_jax.evaluate import read_texts
from dspark_jax.model_files import read_json
from dspark_jax.weights import load_drafter, load_target
from experiments.presets import SMOLLM2_TEXTS
from experiments.profile_steps import device_text
from experiments.release_drafter import CONTEXT, walk_cell
from experiments.release_readings import cell_rows, one_by_one
from experiments.result_files import write_json


@dataclasses.dataclass(frozen=True)
class Agreement:
    """What is compared.

    Attributes:
      target: name, folder or GGUF file of the target.
      source: folder of the drafter with its card's figures in `training_curves.json`.
      texts: answered texts with held-out ones.
      cells: domain and temperature (0 or 1) of each cell.
      per_cell: answers of each cell, at most the card's 128.
      out: JSON file to write.
    """

    target: str = "smollm2"
    source: Path = Path("../shared/smollm2/smollm2_dspark_2l_r64")
    texts: tuple[Path, ...] = SMOLLM2_TEXTS
    cells: tuple[tuple[str, int], ...] = (("code", 0), ("maths", 0))
    per_cell: int = 128
    out: Path = Path("experiments/results/smollm2_evaluation/card_agreement.json")

    def __post_init__(self) -> None:
        for domain, temperature in self.cells:
            if domain not in DOMAINS or temperature not in (0, 1):
                raise ValueError(f"cells has ({domain}, {temperature}); allowed are {', '.join(DOMAINS)} at 0 or 1")
        if not 2 <= self.per_cell <= 128:
            raise ValueError(f"per_cell is {self.per_cell}; allowed are 2 to 128")


def compare_with_card(config: Agreement, console: Console | None = None) -> dict[str, Any]:
    """Read the answers, walk them as the card did, and write both figures for every number of drafts."""
    console = console or Console()
    card = read_json(config.source, "training_curves.json")["a"]["eval"]
    target, target_params = load_target(config.target)
    loaded = load_drafter(config.source, target.spec)
    sequences = load_token_sequences(config.texts, target.spec.vocab_size)
    lengths = range(1, loaded.drafter.block_size + 1)
    report: dict[str, Any] = {"device": device_text(), "answers_per_cell": config.per_cell, "cells": {}}
    for domain, temperature in config.cells:
        rows = cell_rows(sequences, DOMAINS.index(domain), temperature)[: config.per_cell]
        batches = track(one_by_one(sequences, rows), f"{domain} at {temperature}", total=len(rows), console=console)
        readings = list(read_texts(target, loaded.drafter, target_params, loaded.params, batches))
        ours = [walk_cell(readings, temperature, length, context_limit=CONTEXT).accepted_length_with_cut for length in lengths]
        theirs = [card[f"{DOMAINS.index(domain)}_T{temperature}"][f"G{length}"]["tau"] for length in lengths]
        difference = float(np.abs(np.subtract(ours, theirs)).max())
        report["cells"][f"{domain} at {temperature}"] = {"ours": ours, "card": theirs, "largest_difference": difference}
        console.print(
            f"{domain} at {temperature}: ours {np.round(ours, 3)}, card {np.round(theirs, 3)}, largest difference {difference:.3f}"
        )
        write_json(config.out, report)
    return report
