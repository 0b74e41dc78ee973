"""A device that answers from a script: what the engine does with rounds, errors and texts, without a model and without compiling."""

import dataclasses
from typing import Any

import numpy as np

from dspark_jax.decode import DecodePlan
from dspark_jax.engine import EngineConfig, ThreadedEngine
from dspark_jax.round_plans import RoundPlan
from dspark_jax.round_stats import RoundStats
from dspark_jax.slot_executor import BatchShape
from dspark_jax.targets.toy import ToyTarget
from dspark_jax.tokenizers import Tokenizer

VOCAB, BLOCK = 256, 3
CONFIG = EngineConfig(row_ladder=(1, 2, 4), slot_ladder=(64, 256), prefill_chunk=4, shrink_after=2)


class Bytes:
    """Every token is a byte, one of them unknown."""

    def __init__(self, unknown=None):
        self.unknown = unknown

    def decode(self, ids, skip_special_tokens=False):
        return bytes(ids).decode("utf-8", errors="replace")

    def id_to_token(self, token):
        return None if token == self.unknown else str(token)

    def encode(self, text, add_special_tokens=False):
        raise AssertionError("these prompts are ids")

    def get_vocab_size(self, with_added_tokens=True):
        return 256


TOKENIZER = Tokenizer(Bytes(), None, (3,), {})
TEXT = "Grüße, 東京! Ünï→cødé €5. "
SCRIPT = [list(TEXT.encode()), list(b"one two three four five six ")]


@dataclasses.dataclass
class Row:
    """A request in the batch: how many of its tokens are there, and which may come."""

    name: int
    text: list[int]
    length: int
    limit: int
    stop_ids: set[int]
    round: int
    finished: bool


@dataclasses.dataclass
class Ready:
    """Something that is there already, or raises."""

    value: object

    def get(self):
        if isinstance(self.value, Exception):
            raise self.value
        return self.value


class ScriptedSlots:
    """Answers the prompt (p, ...) with `script[p]`, over and over; a round gives 1 to 1 + `BLOCK` tokens, by request and round.

    Attributes:
      errors: what raises instead: ("read" | "begin" | "first" | "insert" | "resize" | "launch" | "round" | "reset", request id or None
        for any) -> how many times more.
    """

    def __init__(self, script):
        self.script, self.errors = script, {}
        self.shape = BatchShape(1, 64)
        self.rows: list[Any] = [None]
        self.rounds, self.read_chunks, self.shapes = 0, [], []

    def _fail(self, where, *names):
        for name in (*names, None):
            if self.errors.get((where, name), 0):
                self.errors[where, name] -= 1
                return RuntimeError(f"{where} of {name} failed")
        return None

    def _raise(self, where, *names):
        error = self._fail(where, *names)
        if error is not None:
            raise error

    def reset(self, shape):
        self._raise("reset")
        self.shape, self.rows = shape, [None] * shape.rows

    def read(self, row, reading, index):
        self._raise("read", int(row.request_id[0]))
        assert index == (0 if reading is None else reading + 1)
        self.read_chunks.append(int(row.request_id[0]))
        return index

    def begin(self, row, reading):
        name, prompt = int(row.request_id[0]), int(row.ids[0, 0])
        self._raise("begin", name)
        length, limit, given = int(row.length[0]), int(row.limit[0]), int(row.given[0])
        # Where the answer begins is known from the limit: these tests give every request the same budget beyond its prompt.
        text = list(np.resize(self.script[prompt], limit))
        begun = length - self._prompt_length(row)
        token = given if given >= 0 else text[begun]
        state = Row(name, text, begun + 1, limit - self._prompt_length(row), set(row.stop_ids[0].tolist()), int(row.round[0]), False)
        state.round += given < 0
        state.finished = token in state.stop_ids or state.length >= state.limit
        return state, Ready(self._fail("first", name) or token)

    def _prompt_length(self, row):
        # Prompts are (number, length, 0, 0, ...).
        return int(row.ids[0, 1])

    def insert(self, row_state, slot):
        self._raise("insert", row_state.name)
        assert self.rows[slot] is None or self.rows[slot].finished
        self.rows[slot] = dataclasses.replace(row_state)

    def resize(self, kept, shape):
        self._raise("resize")
        assert len(kept) <= shape.rows
        self.rows = [self.rows[slot] for slot in kept] + [None] * (shape.rows - len(kept))
        self.shape = shape
        self.shapes.append(shape)

    def launch(self, release):
        self._raise("launch", *(row.name for row in self.rows if row is not None and not row.finished))
        self.rounds += 1
        for row, gone in zip(self.rows, release, strict=True):
            if row is not None and gone:
                row.finished = True
        size = len(self.rows)
        active = np.array([row is not None and not row.finished for row in self.rows])
        error = self._fail("round", *(row.name for row, there in zip(self.rows, active, strict=True) if there))
        drafts, counts = np.zeros((size, BLOCK), np.int32), {name: np.zeros(size, np.int32) for name in ("accepted", "next", "emitted")}
        for slot in np.flatnonzero(active):
            row = self.rows[slot]
            accepted = (row.name * 3 + row.round * 5) % (BLOCK + 1)
            coming = (row.text[row.length :] + [0] * (BLOCK + 1))[: accepted + 1]
            stop = next((place for place, token in enumerate(coming) if token in row.stop_ids), len(coming))
            emitted = min(stop + 1, len(coming), row.limit - row.length)
            drafts[slot, :accepted], counts["next"][slot] = coming[:accepted], coming[accepted]
            counts["accepted"][slot], counts["emitted"][slot] = accepted, emitted
            row.length += emitted
            row.round += 1
            row.finished = stop < emitted or row.length >= row.limit
        fields: dict[str, Any] = {
            "active": active,
            "anchor": np.zeros(size, np.int32),
            "drafts": drafts,
            "confidence_logits": np.zeros((size, BLOCK), np.float32),
            "verified": np.where(active, BLOCK, 0).astype(np.int32),
            "num_accepted": counts["accepted"],
            "next_id": counts["next"],
            "emitted": counts["emitted"],
            "cut": counts["emitted"] < counts["accepted"] + 1,
            "probe": np.zeros(size, bool),
            "drafted": np.bool_(True),
        }
        return Ready(error or RoundStats(**fields))


def scripted_engine(script, tokenizer=None, **changes) -> tuple[Any, Any]:
    """An engine over `ScriptedSlots`; gives both. Prompts are made by `prompt`."""
    config = dataclasses.replace(CONFIG, **changes)
    slots = ScriptedSlots(script)
    plan = DecodePlan(ToyTarget(VOCAB))
    plans = {rows: RoundPlan(plan, (rows, rows * (BLOCK + 1))) for rows in config.row_ladder}
    return ThreadedEngine(slots, plans, config, tokenizer), slots


def prompt(number, length=2):
    """The prompt that is answered by script `number`, of so many tokens."""
    return [number, length, *[0] * (length - 2)]


def expected(script, number, budget, stop_ids=()):
    """The answer to `prompt(number)`."""
    text = list(np.resize(script[number], budget))
    return tuple(text[: next((place + 1 for place, token in enumerate(text) if token in stop_ids), budget)])
