"""Rounds of one request, one at a time: timed apart from whatever shows them, and each token told by how it came about."""

import dataclasses
import enum
import functools
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.decode import DecodeParams, DecodePlan, DecodeState, RoundStats, Tally, answers, step
from dspark_jax.protocols import FlatTokens, Target, TargetHead
from dspark_jax.typing import Array, Int, Params


class Kind(enum.Enum):
    """How a token of an answer came about."""

    FIRST = "first token, from the prompt"
    ACCEPTED = "accepted draft"
    CORRECTION = "correction of a rejected draft"
    BONUS = "the target's own, behind accepted drafts"


def round_kinds(stats: RoundStats, row: int = 0) -> list[tuple[int, Kind]]:
    """The tokens that a request emitted in a round, in order.

    A round ends with a correction where a verified draft was rejected, and with a bonus token where none was (none verified
    included); a stop token or the budget may have cut it before that.
    """
    accepted, verified = int(stats.num_accepted[row]), int(stats.verified[row])
    last = (int(stats.next_id[row]), Kind.CORRECTION if accepted < verified else Kind.BONUS)
    tokens = [(int(token), Kind.ACCEPTED) for token in np.asarray(stats.drafts[row])[:accepted]]
    return [*tokens, last][: int(stats.emitted[row])]


@dataclasses.dataclass(frozen=True)
class Recording:
    """One answer.

    Attributes:
      ids: its tokens, the first one (drawn by the prefill) and a closing stop token included.
      rounds: what happened in each round, one row each.
      seconds: what each round took.
    """

    ids: tuple[int, ...]
    rounds: tuple[RoundStats, ...]
    seconds: tuple[float, ...]

    @property
    def decoded(self) -> int:
        """Tokens that rounds emitted: all but the first."""
        return len(self.ids) - 1


def record(plan: DecodePlan, params: DecodeParams, state: DecodeState, show: Callable[[RoundStats], None] | None = None) -> Recording:
    """Decode one request to its end; `state` is used up.

    Only the compiled round and the wait for it are timed; `show` is called in between.
    """
    rounds, seconds = [], []
    finished = bool(np.asarray(state.finished).all())
    while not finished:
        begin = time.perf_counter()
        state, stats = step(plan, params, state)
        finished = bool(np.asarray(state.finished).all())
        seconds.append(time.perf_counter() - begin)
        rounds.append(jax.device_get(stats))
        if show is not None:
            show(rounds[-1])
    return Recording(tuple(answers(state)[0]), tuple(rounds), tuple(seconds))


@jax.jit
def take_row(state: DecodeState, row: Int[Array, ""]) -> DecodeState:
    """One request of a batch as a batch of its own."""

    def take(leaf: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(leaf, row, 1)

    rows = jax.tree.map(take, dataclasses.replace(state, seed=None))
    return dataclasses.replace(rows, seed=state.seed)


@jax.jit
def _add(tally: Tally, stats: RoundStats) -> Tally:
    return tally.add(stats)


def tally_of(recordings: Sequence[Recording], block_size: int) -> Tally:
    """The sums over all rounds of some answers."""
    return functools.reduce(_add, (stats for recording in recordings for stats in recording.rounds), Tally.zeros(1, block_size))


@functools.partial(jax.jit, static_argnums=0)
def _top_two(target: Target, params: Params, head: TargetHead, ids: Int[Array, "1 S"], length: Int[Array, "1"]) -> Array:
    hidden, _, _ = target.forward(params, None, FlatTokens.grid(ids, jnp.zeros_like(length), length), ())
    return jax.lax.top_k(head.logits(hidden[length - 1]), 2)[0]


@dataclasses.dataclass(frozen=True)
class Difference:
    """Where two answers part.

    Attributes:
      position: tokens of the answer that they share.
      top_two_gap: between the target's two largest logits there; a small one lets rounding decide.
    """

    position: int
    top_two_gap: float


def first_difference(
    target: Target, params: DecodeParams, prompt: Sequence[int], one: Sequence[int], other: Sequence[int], max_len: int
) -> Difference | None:
    """Where two answers to a prompt part, if they do. The text is padded to `max_len` tokens, so that one program serves all."""
    if tuple(one) == tuple(other):
        return None
    shared = next((place for place, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    text = [*prompt, *one[:shared]]
    ids = np.zeros((1, max_len), np.int32)
    ids[0, : len(text)] = text
    largest = np.asarray(_top_two(target, params.target, params.head, jnp.asarray(ids), jnp.asarray([len(text)], jnp.int32)))[0]
    return Difference(shared, float(largest[0] - largest[1]))
