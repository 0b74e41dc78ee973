"""What a drafter says at every position of held-out answers, read once and kept on disk: a run with more texts goes on."""

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import track

from dspark_jax.batches import TokenBatch, TokenBatches
from dspark_jax.data import DOMAINS, TokenSequences
from dspark_jax.evaluate import TextReading, WalkRule, WalkTotals, read_texts, walk_texts
from dspark_jax.weights import LoadedDrafter

TEMPERATURE_CLASS = {0: 0, 1: 2}
"""Temperature of a walk -> class of `TokenSequences.temperature` that it is walked on."""

CARD_POOL = 128
"""The given drafter's card was measured on the first so many held-out texts of every domain and temperature."""

CONTEXT = 512
"""Texts were cut there; the card counts no round whose drafts and bonus token might lie behind it."""

WALKS = {0: 1, 1: 8}
"""By temperature: walks along each text, at temperature 1 each with uniforms of its own."""

Cells = dict[tuple[int, int], list[TextReading]]
"""Readings by domain and temperature."""


def spread_order(count: int) -> np.ndarray:
    """0..count-1 in an order whose every beginning lies evenly among them (bit reversal)."""
    bits = max(1, (count - 1).bit_length())
    reversed_bits = np.asarray([int(f"{number:0{bits}b}"[::-1], 2) for number in range(2**bits)])
    return reversed_bits[reversed_bits < count]


def cell_rows(sequences: TokenSequences, domain: int, temperature: int) -> np.ndarray:
    """Rows of the card's texts of one cell, in an order whose every beginning is spread evenly."""
    held_out = (sequences.heldout == 1) & (sequences.domain == domain)
    rows = np.flatnonzero(held_out & (sequences.temperature == TEMPERATURE_CLASS[temperature]))[:CARD_POOL]
    return rows[spread_order(len(rows))]


def one_by_one(sequences: TokenSequences, rows: np.ndarray) -> Iterator[TokenBatch]:
    """The texts `rows`, each alone in the shortest padding of three that holds it."""
    rows = np.sort(rows)
    if not len(rows):
        return
    mask = np.zeros(len(sequences), bool)
    mask[rows] = True
    stream = TokenBatches(sequences.select(mask), batch_size=1, lengths=(256, 384, CONTEXT), min_loss_tokens=2)
    for batch, state in stream.stream():
        yield dataclasses.replace(batch, rows=rows[batch.rows])
        if state["epoch"]:
            return


def read_rows(target: Any, target_params: Any, loaded: LoadedDrafter, sequences: TokenSequences, rows: np.ndarray) -> Iterator[TextReading]:
    """What a drafter says along the texts `rows`, one after another, from the ids that it drafts."""
    batches = one_by_one(sequences, rows)
    return read_texts(target, loaded.drafter, target_params, loaded.params, batches, draft_ids=loaded.draft_ids)


def require_halves(texts_per_cell: int) -> None:
    """Texts of a cell of which one half is fitted on and the other judged.

    Raises:
      ValueError: it is no even number from 2 to `CARD_POOL`.
    """
    if not 2 <= texts_per_cell <= CARD_POOL or texts_per_cell % 2:
        raise ValueError(f"texts_per_cell is {texts_per_cell}; allowed are even numbers from 2 to {CARD_POOL}")


def walk_answer(reading: TextReading, temperature: int, draft_length: int, first_tokens: int | None) -> WalkTotals:
    """The rounds of all `WALKS` along one answer, or along its first tokens."""
    rules = [WalkRule(temperature, draft_length, first_tokens=first_tokens, seed=seed) for seed in range(WALKS[temperature])]
    walks = [walk_texts([reading], rule) for rule in rules]
    return sum(walks[1:], start=walks[0])


def load_reading(path: Path, sizes: Sequence[int]) -> TextReading | None:
    """The reading on disk for the whole vocabulary and those of `sizes`; None where it has not been made for all of them."""
    if not path.exists():
        return None
    with np.load(path) as stored:
        known = stored["sizes"].tolist()
        if not set(sizes) <= set(known):
            return None
        places = [known.index(size) for size in (0, *sizes)]
        return TextReading(
            row=int(stored["row"]),
            answer_start=int(stored["answer_start"]),
            match=stored["match"][places],
            accept=stored["accept"][places],
            confidence_logits=stored["confidence_logits"],
        )


def store_reading(path: Path, reading: TextReading, sizes: Sequence[int]) -> None:
    """Keep a reading for the whole vocabulary and those of `sizes`."""
    unfinished = path.with_suffix(".unfinished")
    with unfinished.open("wb") as file:
        np.savez_compressed(file, sizes=np.asarray((0, *sizes)), **dataclasses.asdict(reading))
    unfinished.replace(path)


@dataclasses.dataclass(frozen=True, eq=False)
class Readings:
    """What a drafter of the whole vocabulary says along texts, from disk where it was read before.

    Attributes:
      folder: where readings are kept; it must be another one for another drafter.
      by_frequency: all ids, the most frequent first.
    """

    folder: Path
    sequences: TokenSequences
    by_frequency: np.ndarray
    target: Any
    target_params: Any
    loaded: LoadedDrafter
    console: Console

    def cut(self, size: int) -> jax.Array:
        """The `size` most frequent ids, ascending."""
        return jnp.asarray(np.sort(self.by_frequency[:size]))

    def cells(self, sizes: Sequence[int], per_cell: int) -> Cells:
        """Readings of `per_cell` texts of every domain and temperature, for the whole vocabulary and those of `sizes`."""
        self.folder.mkdir(parents=True, exist_ok=True)
        rows = {(d, t): cell_rows(self.sequences, d, t)[:per_cell] for t in TEMPERATURE_CLASS for d in range(len(DOMAINS))}

        def stored(row: int) -> TextReading | None:
            return load_reading(self.folder / f"{row}.npz", sizes)

        missing = np.asarray([row for cell in rows.values() for row in cell if stored(row) is None], np.int64)
        batches = track(one_by_one(self.sequences, missing), f"texts for {sizes}", total=len(missing), console=self.console)
        models = (self.target, self.loaded.drafter, self.target_params, self.loaded.params)
        for reading in read_texts(*models, batches, cuts=[self.cut(size) for size in sizes]):
            store_reading(self.folder / f"{reading.row}.npz", reading, sizes)
        return {cell: [reading for row in chosen if (reading := stored(row)) is not None] for cell, chosen in rows.items()}
