"""Release a drafter: cut it to a draft vocabulary, calibrate its confidence, measure it on held-out answers, write it with its card.

Everything is measured by teacher-forced walks along recorded answers (`dspark_jax.evaluate.walk_texts`).
"""

import dataclasses
import functools
import math
import operator
import os
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dspark_jax.calibrate import FITTED_FOR, SurvivalByTemperature, survival_to_dict
from dspark_jax.calibration_choice import CalibratorChoice, choose_calibrator
from dspark_jax.calibration_fit import fit_calibrators, fit_constant
from dspark_jax.calibration_identity import CalibratorIdentity, drafter_fingerprint
from dspark_jax.data import DOMAINS, load_token_sequences
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.evaluate import (
    TextReading,
    WalkRule,
    WalkTotals,
    confidence_rounds,
    walk_texts,
)
from dspark_jax.model_files import read_json
from dspark_jax.protocols import FlatTokens
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.weights import LoadedDrafter, load_drafter, load_target, save_drafter
from experiments.calibration_report import write_report
from experiments.release_card import model_card, plot_results
from experiments.release_readings import CONTEXT, TEMPERATURE_CLASS, Cells, Readings, require_halves
from experiments.result_files import write_json

SHARED = Path("../shared/smollm2")
ASSET = Path(__file__).resolve().parent.parent / "dspark_jax" / "assets" / "smollm2_dspark"
RESULTS = Path(__file__).resolve().parent / "results" / "smollm2_evaluation"
CALIBRATION = RESULTS.parent / "calibration"

CARD_FILE = "MODEL_CARD.md"
MAX_BYTES = 32 * 10**6
FIRST_TOKENS = 128
REFERENCE_LENGTH = 4
"""Drafts per round at which draft vocabularies are compared: the best fixed length on a small CPU."""

SEEDS = 8
"""Walks per text at temperature 1, each with uniforms of its own."""


@dataclasses.dataclass(frozen=True)
class ReleaseFiles:
    """What a release reads and writes.

    Attributes:
      source: folder of the drafter, with `training_curves.json` beside its weights.
      texts: answered texts, held-out ones among them; `frequent_ids`: all ids by falling frequency.
      texts_per_cell: held-out texts per domain and temperature, spread over the first 128; even, since one half calibrates.
      asset: folder of the released drafter.
      results, calibration: folders for the figures of the drafter, and of its calibration.
      work: where readings are kept.
    """

    source: Path = SHARED / "smollm2_dspark_2l_r64"
    texts: Path = SHARED / "smollm2_onpolicy_0.npz"
    frequent_ids: Path = SHARED / "frequent_ids.npy"
    texts_per_cell: int = 24
    target: str = "smollm2"
    asset: Path = ASSET
    results: Path = RESULTS
    calibration: Path = CALIBRATION
    work: Path = Path("out/release")

    def __post_init__(self) -> None:
        require_halves(self.texts_per_cell)

    def open_readings(self, console: Console) -> Readings:
        """The readings on disk, with the models that make those that are missing.

        Raises:
          ValueError: files are missing, or the drafter lacks a head that a released one has.
        """
        if not self.frequent_ids.is_file():
            raise ValueError(f"frequent_ids is {self.frequent_ids}; allowed: an existing .npy file with all ids, the most frequent first")
        target, target_params = load_target(self.target)
        loaded = load_drafter(self.source, target.spec)
        heads = (getattr(loaded.drafter.config, name, None) for name in ("markov_rank", "confidence_head"))
        if not all(heads):
            raise ValueError(f"source is {self.source}; a released drafter has a Markov head and a confidence head")
        sequences = load_token_sequences(self.texts, target.spec.vocab_size)
        by_frequency = np.load(self.frequent_ids).astype(np.int32)
        return Readings(self.work / "readings", sequences, by_frequency, target, target_params, loaded, console)


@dataclasses.dataclass(frozen=True)
class Release(ReleaseFiles):
    """What a release is made from.

    Attributes:
      pilot_per_cell: of the texts, so many on which the draft vocabularies are compared.
      vocabularies: sizes of draft vocabulary to compare with the whole one.
      draft_vocab_size: take this one of them, whatever is measured; None for the fastest, 0 for the whole.
    """

    pilot_per_cell: int = 4
    vocabularies: tuple[int, ...] = (8192, 12288, 16384)
    draft_vocab_size: int | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 1 <= self.pilot_per_cell <= self.texts_per_cell:
            raise ValueError(f"pilot_per_cell is {self.pilot_per_cell}; allowed: 1 to texts_per_cell {self.texts_per_cell}")
        if self.draft_vocab_size not in (None, 0, *self.vocabularies):
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; allowed: one of {self.vocabularies}, 0 for all, or nothing")


def walk_cell(readings: Sequence[TextReading], temperature: int, draft_length: int, **rule: Any) -> WalkTotals:
    """Totals of a cell: one walk at temperature 0, `SEEDS` walks at 1."""
    seeds = range(SEEDS if temperature else 1)
    return functools.reduce(operator.add, (walk_texts(readings, WalkRule(temperature, draft_length, seed=seed, **rule)) for seed in seeds))


def _spread_of(readings: Sequence[TextReading], temperature: int, draft_length: int, **rule: Any) -> float:
    """Standard error of a cell's accepted length from the differences between its texts (ratio estimator)."""
    totals = [walk_cell([reading], temperature, draft_length, **rule) for reading in readings]
    rounds = np.asarray([total.rounds + total.cut_rounds for total in totals], np.float64)
    emitted = np.asarray([total.emitted + total.cut_emitted for total in totals], np.float64)
    residual = emitted - rounds * emitted.sum() / rounds.sum()
    return float(np.sqrt((residual**2).sum() * len(totals) / (len(totals) - 1)) / rounds.sum())


def _seconds(calls: Mapping[str, Callable[[], Any]], repeats: int) -> dict[str, float]:
    """The shortest of several runs of every call, taken in turns: what each costs where nothing else runs."""
    shortest = dict.fromkeys(calls, math.inf)
    for call in calls.values():
        jax.block_until_ready(call())
    for _ in range(repeats):
        for name, call in calls.items():
            begin = time.perf_counter()
            jax.block_until_ready(call())
            shortest[name] = min(shortest[name], time.perf_counter() - begin)
    return shortest


def cut_drafter(loaded: LoadedDrafter, draft_ids: jax.Array | None) -> tuple[DSparkDrafter, Any]:
    """The drafter whose W2 has the rows of `draft_ids` alone; itself where that is None."""
    if draft_ids is None:
        return loaded.drafter, loaded.params
    head = dict(loaded.params["markov_head"])
    head["markov_w2"] = {"weight": head["markov_w2"]["weight"][draft_ids]}
    config = dataclasses.replace(loaded.drafter.config, draft_vocab_size=len(draft_ids))
    return DSparkDrafter(config), {**loaded.params, "markov_head": head}


def measure_times(readings: Readings, sizes: Sequence[int], repeats: int = 100) -> dict[str, float]:
    """Seconds of one draft by size of the vocabulary, and of one verification of `REFERENCE_LENGTH` drafts: "verify"."""
    target, target_params, loaded = readings.target, readings.target_params, readings.loaded
    rows = REFERENCE_LENGTH + 1
    cache = target.init_cache(1, CONTEXT)
    tokens = FlatTokens.grid(jnp.ones((1, rows), jnp.int32), jnp.full((1,), CONTEXT // 2, jnp.int32), jnp.full((1,), rows, jnp.int32))
    anchor, noise, sampling = (
        jnp.ones((1,), jnp.int32),
        Noise.of_round(0, jnp.zeros(1, jnp.int32), jnp.zeros(1, jnp.int32)),
        Sampling.make(1),
    )

    @jax.jit
    def verify(target_params: Any) -> jax.Array:
        hidden, _, _ = target.forward(target_params, cache, tokens, loaded.drafter.taps)
        return jnp.argmax(target.head(target_params).logits(hidden), axis=1)

    calls: dict[str, Callable[[], Any]] = {"verify": lambda: verify(target_params)}
    for size in (0, *sizes):
        ids = readings.cut(size) if size else None
        cut, cut_params = cut_drafter(loaded, ids)
        propose = jax.jit(lambda params, head, state, cut=cut: cut.propose(params, head, state, anchor, noise, sampling).ids)
        arguments = (cut_params, target.head(target_params).restrict(ids), cut.init_state(1, CONTEXT))
        calls[str(size)] = functools.partial(propose, *arguments)
    return _seconds(calls, repeats)


def compare_vocabularies(cells: Cells, sizes: Sequence[int], seconds: Mapping[str, float]) -> list[dict[str, Any]]:
    """Accepted length on the first tokens, time of a draft, and tokens per second that follow, for every draft vocabulary."""
    rows = []
    for place, size in enumerate((0, *sizes)):
        lengths = {
            _cell_name(cell): walk_cell(readings, cell[1], REFERENCE_LENGTH, vocabulary=place, first_tokens=FIRST_TOKENS).accepted_length
            for cell, readings in cells.items()
        }
        draft = seconds[str(size)]
        mean = float(np.mean(list(lengths.values())))
        rows.append(
            {
                "draft_vocab_size": size,
                "accepted_length": lengths,
                "mean_accepted_length": mean,
                "seconds_draft": draft,
                "seconds_verify": seconds["verify"],
                "tokens_per_second": mean / (draft + seconds["verify"]),
            }
        )
    return rows


def _cell_name(cell: tuple[int, int]) -> str:
    return f"{DOMAINS[cell[0]]} at {cell[1]}"


@dataclasses.dataclass(frozen=True, eq=False)
class Calibration:
    """What was fitted at one temperature.

    Attributes:
      choice: the survival model that is kept, and how all of them did on the texts that they were not fitted on.
      continuation: in the fitted rounds, the share of drafts at each position that were accepted, given that those before it were.
      report: figures as JSON values, for the card.
    """

    choice: CalibratorChoice
    continuation: tuple[float, ...]
    report: dict[str, Any]


def calibrate(cells: Cells, temperature: int, vocabulary: int, block_size: int) -> Calibration:
    """Fit every survival model on every second text of each domain, and keep the one of the lowest Brier score on the others [F5].

    On the first tokens of the answers alone: loops would make the drafter look surer of itself than it is on fresh text.
    """
    halves: list[list[TextReading]] = [[], []]
    for (_, at), readings in cells.items():
        if at == temperature:
            for half in (0, 1):
                halves[half] += readings[half::2]
    seeds = range(SEEDS if temperature else 1)
    rules = [WalkRule(temperature, block_size, vocabulary, first_tokens=FIRST_TOKENS, seed=seed) for seed in seeds]
    data = []
    for half in halves:
        parts = [confidence_rounds(half, rule) for rule in rules]
        data.append([jnp.asarray(np.concatenate(part)) for part in zip(*parts, strict=True)])
    (logits, labels, _), (other_logits, other_labels, other_texts) = data
    models = fit_calibrators(logits, labels)
    continuation = tuple(round(chance, 6) for chance in fit_constant(labels).continuation)
    choice = choose_calibrator(models, other_logits, other_labels, float(temperature), other_texts)
    scores = choice.report()
    for of_model in scores["models"].values():
        del of_model["reliability"]  # It has a file of its own.
    report = {
        "texts_fitted": len(halves[0]),
        "texts_reported": len(halves[1]),
        "rounds_fitted": len(logits),
        "temperatures": survival_to_dict(models["temperature_scaled"])["temperatures"],
        "continuation": list(continuation),
        **scores,
    }
    return Calibration(choice, continuation, report)


def stored_survival(calibrations: Mapping[int, Calibration], fingerprint: str) -> dict[str, Any]:
    """What `survival.json` holds: the kept model of each temperature of the sampler, what they were fitted for, and constants."""
    at = tuple(float(temperature) for temperature in calibrations)
    model = SurvivalByTemperature(at, tuple(each.choice.model for each in calibrations.values()))
    usual = {str(temperature): list(each.continuation) for temperature, each in zip(at, calibrations.values(), strict=True)}
    return {**survival_to_dict(model, CalibratorIdentity(fingerprint, at)), "continuation": usual}


def say_choices(calibrations: Mapping[int, Calibration], console: Console) -> None:
    """The kept model of every temperature and the Brier scores of all, for the terminal."""
    for temperature, each in calibrations.items():
        scores = each.choice.scores
        briers = ", ".join(f"{name} {scores[name].mean_brier.value[0]:.4f}" for name in scores)
        console.print(f"temperature {temperature}: {each.choice.name} is kept; Brier scores: {briers}")
        if each.choice.name == "constant":
            console.print(f"temperature {temperature}: no use of the confidence beats a constant, which is stored", style="yellow")


def write_results(
    files: ReleaseFiles, results: Mapping[str, Any], calibrations: Mapping[int, Calibration], survival: Mapping[str, Any]
) -> None:
    """The figures of a release and of its calibration, each whole or not at all."""
    write_json(files.results / "results.json", results)
    plot_results(results, files.results / "evaluation.png")
    summary = {
        "texts_per_cell": files.texts_per_cell,
        "first_tokens": FIRST_TOKENS,
        "walks_at_temperature_1": SEEDS,
        "fitted_for": survival[FITTED_FOR],
        "by_temperature": results["calibration"],
    }
    write_report(files.calibration, {temperature: each.choice for temperature, each in calibrations.items()}, summary)


def evaluate_cell(readings: Sequence[TextReading], temperature: int, block_size: int, card: Mapping[str, Any]) -> dict[str, Any]:
    """Figures of one domain and temperature: as the card counts, on whole answers, and on their first tokens; whole and cut vocabulary."""
    result: dict[str, Any] = {"texts": len(readings), "rows": [reading.row for reading in readings]}
    for place, name in enumerate(("given", "released")):
        lengths = range(1, block_size + 1)
        whole = [walk_cell(readings, temperature, length, vocabulary=place) for length in lengths]
        first = [walk_cell(readings, temperature, length, vocabulary=place, first_tokens=FIRST_TOKENS) for length in lengths]
        walks = SEEDS if temperature else 1
        result[name] = {
            "accepted_length": [total.accepted_length for total in whole],
            "accepted_length_first": [total.accepted_length for total in first],
            "conditional_acceptance": whole[-1].conditional_acceptance.tolist(),
            "conditional_acceptance_first": first[-1].conditional_acceptance.tolist(),
            "rounds": whole[-1].rounds / walks,
            "cut_rounds": whole[-1].cut_rounds / walks,
            "rounds_first": first[-1].rounds / walks,
            "standard_error": _spread_of(readings, temperature, block_size, vocabulary=place),
            "standard_error_first": _spread_of(readings, temperature, block_size, vocabulary=place, first_tokens=FIRST_TOKENS),
        }
    as_card = [walk_cell(readings, temperature, length, context_limit=CONTEXT) for length in range(1, block_size + 1)]
    result["as_card"] = [total.accepted_length_with_cut for total in as_card]
    result["card"] = [card[f"G{length}"]["tau"] for length in range(1, block_size + 1)]
    return result


def write_asset(release: Release, loaded: LoadedDrafter, draft_ids: jax.Array | None, survival: dict[str, Any], card: str) -> int:
    """The drafter's folder with its card, whole or not at all; gives its size in bytes.

    Raises:
      ValueError: it would be larger than allowed; what was there stays.
    """
    drafter, params = cut_drafter(loaded, draft_ids)
    release.asset.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=release.asset.parent, prefix=".release") as scratch:
        new = Path(scratch) / "new"
        save_drafter(new, drafter, params, draft_ids=draft_ids, survival=survival)
        (new / CARD_FILE).write_text(card, encoding="utf-8")
        for file in new.iterdir():
            file.chmod(0o644)
        size = sum(file.stat().st_size for file in new.iterdir())
        if size > MAX_BYTES:
            raise ValueError(f"the drafter takes {size} bytes; allowed: {MAX_BYTES}. Choose a smaller draft_vocab_size")
        old = Path(scratch) / "old"
        if release.asset.exists():
            release.asset.rename(old)
        try:
            new.rename(release.asset)
        except OSError:
            if old.exists():
                old.rename(release.asset)
            raise
    return size


def release_drafter(release: Release, console: Console | None = None) -> dict[str, Any]:
    """Measure, choose, cut, calibrate and write; gives the figures that were written."""
    console = console or Console()
    curves = read_json(release.source, "training_curves.json")["a"]
    readings = release.open_readings(console)
    loaded = readings.loaded
    block_size = loaded.drafter.block_size

    seconds = measure_times(readings, release.vocabularies)
    pilot = readings.cells(release.vocabularies, release.pilot_per_cell)
    comparison = compare_vocabularies(pilot, release.vocabularies, seconds)
    fastest = max(comparison, key=lambda row: row["tokens_per_second"])["draft_vocab_size"]
    chosen = fastest if release.draft_vocab_size is None else release.draft_vocab_size
    for row in comparison:
        console.print(
            f"draft vocabulary {row['draft_vocab_size'] or 'whole'}: accepted length {row['mean_accepted_length']:.3f}, draft "
            f"{1e3 * row['seconds_draft']:.1f} ms, verify {1e3 * row['seconds_verify']:.1f} ms, {row['tokens_per_second']:.1f} tokens/s"
        )
    cells = readings.cells((chosen,) if chosen else (loaded.drafter.config.vocab_size,), release.texts_per_cell)
    results: dict[str, Any] = {
        "training": {name: curves[name] for name in ("steps", "anchors", "wall")},
        "device": f"{jax.devices()[0].device_kind}, {os.cpu_count()} cores",
        "vocabularies": {"texts_per_cell": release.pilot_per_cell, "draft_length": REFERENCE_LENGTH, "compared": comparison},
        "draft_vocab_size": chosen,
        "first_tokens": FIRST_TOKENS,
        "walks_at_temperature_1": SEEDS,
        "cells": {
            _cell_name(cell): evaluate_cell(of_cell, cell[1], block_size, curves["eval"][f"{cell[0]}_T{cell[1]}"])
            for cell, of_cell in cells.items()
        },
    }
    calibrations = {temperature: calibrate(cells, temperature, 1, block_size) for temperature in TEMPERATURE_CLASS}
    results["calibration"] = {str(temperature): each.report for temperature, each in calibrations.items()}
    draft_ids = readings.cut(chosen) if chosen else None
    fingerprint = drafter_fingerprint(*cut_drafter(loaded, draft_ids), draft_ids)
    survival = stored_survival(calibrations, fingerprint)
    size = write_asset(release, loaded, draft_ids, survival, model_card(results))
    write_results(release, results, calibrations, survival)
    console.print(f"wrote {release.asset} ({size / 1e6:.1f} MB), {release.results} and {release.calibration}")
    return results
