"""The stream of training batches: which sequences come together and in which order, for every process of a run alike.

What a batch holds is a function of its number, so that a position in the stream is a number, and grain (`read_ahead`) can make the
next batches while a step runs. A corpus of ten million tokens is some 20 MB and lives in memory.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import numpy as np

from dspark_jax.data import TokenSequences
from dspark_jax.typing import Bool, Int, typed

MOST_BATCHES = 2**31 - 1


def _reject(field: str, value: object, allowed: object) -> NoReturn:
    raise ValueError(f"{field} is {value!r}; allowed: {allowed}")


@typed
def packed_rows(lengths: Int[np.ndarray, "n"], row_length: int, open_rows: int = 64) -> list[np.ndarray]:
    """Sequences that share a row of `row_length` tokens, as indices into `lengths`: each goes, in the order given, into the fullest
    of the last `open_rows` rows that has room for it ("best fit").

    Raises:
      ValueError: a sequence is longer than a row.
    """
    if len(lengths) and int(lengths.max()) > row_length:
        _reject("lengths", int(lengths.max()), f"at most row_length {row_length}")
    rows: list[list[int]] = []
    room: dict[int, int] = {}
    for index, length in enumerate(lengths.tolist()):
        fitting = [row for row, left in room.items() if left >= length]
        if fitting:
            row = min(fitting, key=lambda row: room[row])
        else:
            row = len(rows)
            rows.append([])
            room[row] = row_length
            if len(room) > open_rows:
                del room[min(room)]
        rows[row].append(index)
        room[row] -= length
    return [np.asarray(row) for row in rows]


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """One batch of token ids.

    Attributes:
      ids: padded with zeros at the right.
      loss_mask: which of them are answer tokens.
      rows: numbers of its sequences, in their order; one per row, or more where rows are packed.
      segment: where rows are packed, which of the row's sequences a token belongs to, from 1 on; 0 for padding. Else None.
    """

    ids: Int[np.ndarray, "B S"]
    loss_mask: Bool[np.ndarray, "B S"]
    rows: Int[np.ndarray, "n"]
    segment: Int[np.ndarray, "B S"] | None = None


@dataclasses.dataclass(frozen=True, eq=False)
class TokenBatches:
    """An endless, seeded and resumable stream of batches: epochs of permutations, each cut to whole batches.

    Every process builds the same plan and takes its own rows of each batch, so that all see the same S at the same step.

    Attributes:
      batch_size: rows per batch over all shards: sequences, or several in a row where they are packed.
      lengths: the lengths S a batch may have, ascending; longer sequences are cut to the last. With several, sequences of similar
        length come together inside windows of `window` batches, and a batch takes the shortest S that holds it.
      min_loss_tokens: sequences with fewer answer tokens are dropped (the reference's 14).
      window: batches within which sequences are sorted; small windows keep batches mixed, large ones save padding.
      shard_index: this process's share of every batch, below `shard_count`, which divides `batch_size`.
      packed: put several sequences into a row of the one length S, as many as fit (`packed_rows`); which ones come together is
        the same in every epoch.
    """

    sequences: TokenSequences
    batch_size: int
    lengths: tuple[int, ...] = (512,)
    seed: int = 0
    min_loss_tokens: int = 14
    window: int = 32
    shard_index: int = 0
    shard_count: int = 1
    packed: bool = False

    def __post_init__(self):
        for field, lowest in (("batch_size", 1), ("seed", 0), ("min_loss_tokens", 1), ("window", 1), ("shard_count", 1)):
            if getattr(self, field) < lowest:
                _reject(field, getattr(self, field), f"at least {lowest}")
        if not self.lengths or self.lengths[0] < 1 or list(self.lengths) != sorted(set(self.lengths)):
            _reject("lengths", self.lengths, "ascending positive lengths")
        if self.packed and len(self.lengths) != 1:
            _reject("lengths", self.lengths, "one length, since rows are packed")
        if self.batch_size % self.shard_count:
            _reject("shard_count", self.shard_count, f"divisors of batch_size {self.batch_size}")
        if not 0 <= self.shard_index < self.shard_count:
            _reject("shard_index", self.shard_index, f"0 to {self.shard_count - 1}")
        if self.batches_per_epoch == 0:
            rows = f" in {self.num_rows} rows" if self.packed else ""
            at_most = f"at most the {len(self._usable())} sequences{rows} with at least {self.min_loss_tokens} answer tokens"
            _reject("batch_size", self.batch_size, at_most)

    @functools.cached_property
    def _members(self) -> list[np.ndarray] | None:
        """Sequences of every packed row; None where every sequence is a row of its own."""
        if not self.packed:
            return None
        usable = np.random.default_rng((self.seed, 0)).permutation(self._usable())
        rows = packed_rows(np.minimum(self.sequences.lengths[usable], self.lengths[0]), self.lengths[0])
        return [usable[row] for row in rows]

    @property
    def num_rows(self) -> int:
        """Rows of one pass over the usable sequences."""
        return len(self._usable()) if self._members is None else len(self._members)

    @property
    def batches_per_epoch(self) -> int:
        """Whole batches in one pass over the usable sequences; which ones are left over differs from epoch to epoch."""
        return self.num_rows // self.batch_size

    def _usable(self) -> np.ndarray:
        end = np.minimum(self.sequences.answer_end, self.lengths[-1])
        return np.flatnonzero(end - self.sequences.answer_start >= self.min_loss_tokens)

    def _rungs(self, rows: np.ndarray) -> np.ndarray:
        """Index of the shortest S that holds each row."""
        return np.minimum(np.searchsorted(self.lengths, self.sequences.lengths[rows]), len(self.lengths) - 1)

    def _plan(self, epoch: int) -> np.ndarray:
        """Rows of every batch of an epoch, [batches, batch_size]."""
        rng = np.random.default_rng((self.seed, epoch))
        rows = rng.permutation(self._usable() if self._members is None else self.num_rows)[: self.batches_per_epoch * self.batch_size]
        if len(self.lengths) == 1:
            return rows.reshape(-1, self.batch_size)
        windows = []
        for start in range(0, len(rows), self.window * self.batch_size):
            part = rows[start : start + self.window * self.batch_size]
            part = part[np.argsort(self._rungs(part), kind="stable")].reshape(-1, self.batch_size)
            windows.append(rng.permutation(part))
        return np.concatenate(windows)

    def _batch(self, rows: np.ndarray) -> TokenBatch:
        length = self.lengths[0 if self.packed else int(self._rungs(rows).max())]
        share = self.batch_size // self.shard_count
        rows = rows[self.shard_index * share : (self.shard_index + 1) * share]
        if self._members is not None:
            return self._packed_batch([self._members[row] for row in rows], length)
        ids = np.zeros((share, length), np.int32)
        for place, row in enumerate(rows):
            tokens = self.sequences.tokens[self.sequences.offsets[row] : self.sequences.offsets[row + 1]][:length]
            ids[place, : len(tokens)] = tokens
        position = np.arange(length)
        answer_start, answer_end = self.sequences.answer_start[rows, None], self.sequences.answer_end[rows, None]
        return TokenBatch(ids, (position >= answer_start) & (position < answer_end), rows)

    def _packed_batch(self, rows: list[np.ndarray], length: int) -> TokenBatch:
        texts = self.sequences
        ids, segment = np.zeros((2, len(rows), length), np.int32)
        loss_mask = np.zeros(ids.shape, np.bool_)
        for place, row in enumerate(rows):
            begin = 0
            for number, text in enumerate(row, start=1):
                tokens = texts.tokens[texts.offsets[text] : texts.offsets[text + 1]][:length]
                end = begin + len(tokens)
                ids[place, begin:end], segment[place, begin:end] = tokens, number
                loss_mask[place, begin + int(texts.answer_start[text]) : min(begin + int(texts.answer_end[text]), end)] = True
                begin = end
        return TokenBatch(ids, loss_mask, np.concatenate(rows), segment)

    def __len__(self) -> int:
        """As many batches as can be numbered: the stream has no end."""
        return MOST_BATCHES

    def __getitem__(self, number: int) -> TokenBatch:
        """Batch `number` of the stream, from 0."""
        epoch, index = divmod(number, self.batches_per_epoch)
        return self._batch(self._plan_of(epoch)[index])

    @functools.cached_property
    def _plan_of(self) -> Callable[[int], np.ndarray]:
        return functools.lru_cache(maxsize=2)(self._plan)

    @typed
    def stream(self, state: Mapping[str, int] | None = None) -> Iterator[tuple[TokenBatch, dict[str, int]]]:
        """Batches from `state` on, without end, each with the state that leads to the next one.

        Args:
          state: what came with the last batch that was used, {"epoch", "index"}; None for the beginning.
        """
        state = {"epoch": 0, "index": 0} if state is None else state
        if set(state) != {"epoch", "index"} or state["epoch"] < 0 or not 0 <= state["index"] < self.batches_per_epoch:
            _reject("state", dict(state), f"epoch at least 0 and index 0 to {self.batches_per_epoch - 1}")
        return self._stream(state["epoch"], state["index"])

    def _stream(self, epoch: int, index: int) -> Iterator[tuple[TokenBatch, dict[str, int]]]:
        while True:
            plan = self._plan(epoch)
            for number in range(index, len(plan)):
                last = number + 1 == len(plan)
                yield self._batch(plan[number]), {"epoch": epoch + last, "index": 0 if last else number + 1}
            epoch, index = epoch + 1, 0


def read_ahead(batches: TokenBatches, batches_ahead: int = 2) -> Any:
    """The stream as a `grain.IterDataset` (extra `data`) that makes the next batches on a thread.

    Its iterator's state is the number of the next batch; Orbax saves it through `grain.checkpoint.CheckpointSave`, or by hand
    through `get_state` and `set_state`.
    """
    import grain

    source: Any = batches
    return grain.MapDataset.source(source).to_iter_dataset(grain.ReadOptions(num_threads=1, prefetch_buffer_size=batches_ahead))
