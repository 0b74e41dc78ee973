"""Calibrate the released drafter anew, its weights untouched: `python -m experiments.run recalibrate`.

Reads what the drafter says on held-out answers (from disk, as far as it was read before), fits and chooses as a release does, and
rewrites `survival.json`, the card and the figures.
"""

from typing import Any

import numpy as np
from rich.console import Console

from dspark_jax.calibration_identity import drafter_fingerprint
from dspark_jax.model_files import read_json
from dspark_jax.weights import SURVIVAL_FILE, LoadedDrafter, load_drafter
from experiments.release_card import model_card
from experiments.release_drafter import CARD_FILE, ReleaseFiles, calibrate, cut_drafter, say_choices, stored_survival, write_results
from experiments.release_readings import TEMPERATURE_CLASS, Readings
from experiments.result_files import write_json


def fingerprint_of(asset: LoadedDrafter, readings: Readings) -> str:
    """Of the released drafter, once it is certain that the readings are its own.

    Raises:
      ValueError: it is not the drafter that was read, cut to its most frequent ids.
    """
    if asset.draft_ids is not None and not np.array_equal(asset.draft_ids, readings.cut(len(asset.draft_ids))):
        raise ValueError(f"asset drafts from {len(asset.draft_ids)} ids; allowed are those that are first in frequent_ids")
    mark = drafter_fingerprint(asset.drafter, asset.params, asset.draft_ids)
    if mark != drafter_fingerprint(*cut_drafter(readings.loaded, asset.draft_ids), asset.draft_ids):
        raise ValueError("asset is another drafter than source is when it is cut to the same ids; allowed is the one released from it")
    return mark


def recalibrate(files: ReleaseFiles, console: Console | None = None) -> dict[str, Any]:
    """Fit, choose and store; gives what `survival.json` holds now."""
    console = console or Console()
    results = read_json(files.results, "results.json")
    readings = files.open_readings(console)
    asset = load_drafter(files.asset, readings.target.spec)
    fingerprint = fingerprint_of(asset, readings)
    config = asset.drafter.config
    cells = readings.cells((config.draft_vocab_size or config.vocab_size,), files.texts_per_cell)
    calibrations = {temperature: calibrate(cells, temperature, 1, config.block_size) for temperature in TEMPERATURE_CLASS}
    survival = stored_survival(calibrations, fingerprint)
    results["calibration"] = {str(temperature): each.report for temperature, each in calibrations.items()}
    card = model_card(results)
    write_json(files.asset / SURVIVAL_FILE, survival)
    unfinished = files.asset / f".{CARD_FILE}"
    unfinished.write_text(card, encoding="utf-8")
    unfinished.replace(files.asset / CARD_FILE)
    write_results(files, results, calibrations, survival)
    say_choices(calibrations, console)
    console.print(f"wrote {files.asset / SURVIVAL_FILE}, {files.results} and {files.calibration}")
    return survival
