"""Recorded blocks of a drafter: what it would have drafted, and with which confidence, behind every token of real answers.

    python -m experiments.recorded_rounds      # from the readings of the release, a minute; the larger shared material is needed

The file beside the results holds the held-out answers of the calibration that no calibrator was fitted on. Schedules are replayed
on it without any model (`experiments.schedule_regret`): a policy decides how many tokens each block verifies, what is on record
decides how many of them are accepted.
"""

import dataclasses
import sys
from pathlib import Path

import numpy as np
from rich.console import Console

from dspark_jax.data import DOMAINS, load_token_sequences
from dspark_jax.weights import load_drafter, load_target
from experiments.command_line import run_command
from experiments.release_drafter import FIRST_TOKENS, Release
from experiments.release_readings import Cells, Readings
from experiments.result_files import whole

RECORDED = Path(__file__).resolve().parent / "results" / "scheduling" / "recorded_blocks.npz"


@dataclasses.dataclass(frozen=True, eq=False)
class RecordedBlocks:
    """Blocks behind the tokens of answers at one temperature. Text i has the anchors 0 .. `anchors[i]` - 1; the rest is padding.

    Attributes:
      confidence_logits: [T, A, G]
      kept: [T, A, G], whether draft k of the block is accepted if it is reached.
      anchors: [T]
      context: [T], tokens committed at anchor 0, the anchor counted.
      domain: [T], index into `data.DOMAINS`.
    """

    confidence_logits: np.ndarray
    kept: np.ndarray
    anchors: np.ndarray
    context: np.ndarray
    domain: np.ndarray

    @property
    def block_size(self) -> int:
        """G."""
        return self.kept.shape[2]

    @property
    def accepted(self) -> np.ndarray:
        """[T, A], drafts that are accepted where the whole block is verified; at the end of a text as many as are on record."""
        leading = np.cumprod(self.kept, axis=2).sum(axis=2)
        return np.minimum(leading, np.maximum(self.anchors[:, None] - np.arange(self.kept.shape[1]), 0))


def record(cells: Cells, temperature: int, vocabulary: int, first_tokens: int = FIRST_TOKENS) -> dict[str, np.ndarray]:
    """Arrays of every second reading, those that calibration reports on, cut behind their first tokens."""
    held = [(domain, each) for (domain, at), readings in sorted(cells.items()) if at == temperature for each in readings[1::2]]
    anchors = np.array([min(first_tokens, each.match.shape[1]) for _, each in held])
    block_size = held[0][1].match.shape[2]
    shape = (len(held), int(anchors.max()), block_size)
    confidence, match, accept = np.zeros(shape, np.float16), np.zeros(shape, bool), np.zeros(shape, np.float16)
    for place, (_, each) in enumerate(held):
        count = anchors[place]
        if each.confidence_logits is None:
            raise ValueError("confidence_logits is None; this drafter has no confidence to replay")
        confidence[place, :count] = each.confidence_logits[:count]
        match[place, :count] = each.match[vocabulary, :count]
        accept[place, :count] = each.accept[vocabulary, :count]
    return {
        "confidence_logits": confidence,
        "match": match,
        "accept": accept,
        "anchors": anchors.astype(np.int32),
        "context": np.array([each.answer_start + 1 for _, each in held], np.int32),
        "domain": np.array([domain for domain, _ in held], np.int32),
        "row": np.array([each.row for _, each in held], np.int32),
    }


def load_recorded(path: Path, temperature: int, seed: int = 0) -> RecordedBlocks:
    """The blocks of one temperature. At 1, a draft is accepted by a uniform number of its own, drawn once from `seed`.

    Raises:
      ValueError: no such file, or a temperature that is not in it.
    """
    if not path.is_file():
        raise ValueError(f"recorded is {path}; allowed is a file that experiments.recorded_rounds wrote")
    with np.load(path) as stored:
        known = sorted({int(name.rpartition("_")[2]) for name in stored.files})
        if temperature not in known:
            raise ValueError(f"temperature is {temperature}; recorded are {known}")
        of = {name.rpartition("_")[0]: stored[name] for name in stored.files if name.endswith(f"_{temperature}")}
    uniforms = np.random.default_rng(seed).random(of["accept"].shape)
    kept = of["match"] if temperature == 0 else uniforms < of["accept"]
    return RecordedBlocks(of["confidence_logits"].astype(np.float32), kept, of["anchors"], of["context"], of["domain"])


@dataclasses.dataclass(frozen=True)
class RecordOptions:
    """Command line.

    Attributes:
      release: where texts, drafter and readings lie.
      texts_per_cell: readings per domain and temperature; every second one is recorded, the others calibrate.
      draft_vocab_size: of the released drafter.
      out: file to write.
    """

    release: Release = dataclasses.field(default_factory=Release)
    texts_per_cell: int = 32
    draft_vocab_size: int = 12288
    out: Path = RECORDED


def run(options: RecordOptions, console: Console) -> None:
    """Read what has not been read before, and write the file whole or not at all."""
    release = options.release
    target, target_params = load_target(release.target)
    loaded = load_drafter(release.source, target.spec)
    sequences = load_token_sequences(release.texts, target.spec.vocab_size)
    by_frequency = np.load(release.frequent_ids).astype(np.int32)
    readings = Readings(release.work / "readings", sequences, by_frequency, target, target_params, loaded, console)
    cells = readings.cells((options.draft_vocab_size,), options.texts_per_cell)
    arrays = {f"{name}_{temperature}": value for temperature in (0, 1) for name, value in record(cells, temperature, 1).items()}
    with whole(options.out) as unfinished, unfinished.open("wb") as file:
        np.savez_compressed(file, **arrays)  # pyright: ignore[reportArgumentType]
    for temperature in (0, 1):
        blocks = load_recorded(options.out, temperature)
        domains = {DOMAINS[each]: int((blocks.domain == each).sum()) for each in np.unique(blocks.domain)}
        console.print(f"temperature {temperature}: {len(blocks.anchors)} texts {domains}, {int(blocks.anchors.sum())} blocks")
    console.print(f"wrote {options.out} ({options.out.stat().st_size / 1e6:.2f} MB)")


if __name__ == "__main__":
    sys.exit(run_command(RecordOptions, run))
