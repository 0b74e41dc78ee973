"""Calibrate a drafter of one's own: `python -m experiments.run calibrate FOLDER --data TEXTS.npz`.

Every survival model is fitted on one half of held-out answers and judged on the other, and the one of the lowest Brier score is kept, for
each temperature of the sampler; see `release_drafter.calibrate`. `survival.json` then lies beside the weights, which stay as they are:
`load_drafter` reads it, and schedules and engines use it.
"""

import dataclasses
from pathlib import Path
from typing import Any

import tyro
from rich.console import Console
from rich.progress import track

from dspark_jax.calibration_identity import drafter_fingerprint
from dspark_jax.data import DOMAINS, load_token_sequences
from dspark_jax.weights import SURVIVAL_FILE, load_drafter, load_target
from experiments.release_drafter import calibrate, say_choices, stored_survival
from experiments.release_readings import TEMPERATURE_CLASS, Cells, cell_rows, read_rows, require_halves
from experiments.result_files import write_json


@dataclasses.dataclass(frozen=True)
class CalibrateDrafter:
    """What is calibrated, and on what.

    Attributes:
      drafter: folder of a drafter with a confidence head or a `confidence_score`, such as `OUT/drafter` of a training run.
      data: .npz files of answered texts with held-out ones, as for `train`.
      target: folder, GGUF file or name of the target.
      texts_per_cell: held-out answers per domain and temperature (all, where there are fewer); one half of them is fitted on.
    """

    drafter: tyro.conf.Positional[Path]
    data: tuple[Path, ...]
    target: str = "smollm2"
    texts_per_cell: int = 24

    def __post_init__(self) -> None:
        require_halves(self.texts_per_cell)


def calibrate_drafter(options: CalibrateDrafter, console: Console | None = None) -> dict[str, Any]:
    """Fit, choose and store; gives what `survival.json` holds now. Temperatures without two held-out answers of a domain are left out.

    Raises:
      ValueError: models or texts are missing or do not fit each other, no held-out answers are there, or the drafter has nothing to
        calibrate.
    """
    console = console or Console()
    target, target_params = load_target(options.target)
    loaded = load_drafter(options.drafter, target.spec)
    sequences = load_token_sequences(options.data, target.spec.vocab_size)
    cells: Cells = {}
    for temperature in TEMPERATURE_CLASS:
        for domain, name in enumerate(DOMAINS):
            rows = cell_rows(sequences, domain, temperature)[: options.texts_per_cell]
            rows = rows[: len(rows) // 2 * 2]
            if not len(rows):
                continue
            readings = read_rows(target, target_params, loaded, sequences, rows)
            about = f"{name}, temperature {temperature}"
            cells[domain, temperature] = list(track(readings, about, total=len(rows), console=console))
    temperatures = [temperature for temperature in TEMPERATURE_CLASS if any(at == temperature for _, at in cells)]
    if not temperatures:
        files = ", ".join(map(str, options.data))
        raise ValueError(f"data is {files}; allowed are texts with two or more held-out answers of a domain, at temperature 0 or 1")
    fitted = {temperature: calibrate(cells, temperature, 0, loaded.drafter.block_size) for temperature in temperatures}
    survival = stored_survival(fitted, drafter_fingerprint(loaded.drafter, loaded.params, loaded.draft_ids))
    write_json(options.drafter / SURVIVAL_FILE, survival)
    say_choices(fitted, console)
    console.print(f"wrote {options.drafter / SURVIVAL_FILE}")
    return survival
