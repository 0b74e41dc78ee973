"""Holds backends against plain JAX: the same tokens, but for ties that rounding decides.

    python -m pallas_kernels.parity --backend triton       # on a GPU; "mosaic_tpu" on a TPU; "interpret" anywhere, with --small

A different id is allowed where, at one of the draw's two levels, the two best scores lie within `NEAR_TIE` of each other, relative to
their size where that is above 1: sums in another order differ in their last bits. What comes behind it in the block is a draw behind
another text and not compared. The verdict allows a difference where a uniform number lies within `NEAR_TIE` of the chance, and where
the draw of the token that follows was a near tie.
"""

import argparse
import dataclasses
import functools
import sys
from collections.abc import Sequence
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import noise
from pallas_kernels.arg_specs import SPECS, MarkovArguments, RejectionArguments, Spec, markov_arguments, rejection_arguments
from pallas_kernels.dispatch import Backend, BackendName
from pallas_kernels.markov_sample import Draft, markov_block
from pallas_kernels.noise import Stream
from pallas_kernels.rejection_sample import DraftRows, Outcome, accept_prob, rejection_sample
from pallas_kernels.two_level_draw import TILE_SIZE, log_sum_exp, tiles_of

NEAR_TIE = 1e-4
CLOSE: Any = {"rtol": 1e-5, "atol": 1e-4}
DRAFT_STREAMS = Stream.DRAFT_TILE, Stream.DRAFT_ID


@dataclasses.dataclass(frozen=True)
class Parity:
    """What a comparison found: draws that were compared, and near ties among them that went the other way."""

    compared: int
    near_ties: int


def margins(
    values: jax.Array, greedy: jax.Array, key: jax.Array, position: jax.Array, streams: tuple[Stream, Stream], tile_size: int = TILE_SIZE
) -> np.ndarray:
    """By how much the draw of each row of `values` [R, V] (logits / temperature) was won, at the level where that was least."""
    tiles = tiles_of(values, tile_size)
    keys = [noise.site_key(key, stream, position)[:, None] for stream in streams]
    scores = log_sum_exp(tiles) + noise.gumbel(keys[0], jnp.arange(tiles.shape[1], dtype=jnp.int32)[None], 0)
    scores = jnp.where(greedy[:, None], tiles.max(axis=2), scores)
    tile = jnp.argmax(scores, axis=1).astype(jnp.int32)
    inside = tiles[jnp.arange(len(values)), tile]
    ids = tile[:, None] * tiles.shape[2] + jnp.arange(tiles.shape[2], dtype=jnp.int32)
    inside = inside + jnp.where(greedy[:, None], 0.0, noise.gumbel(keys[1], tile[:, None], ids))
    return np.minimum(_margin(np.asarray(scores)), _margin(np.asarray(inside)))


def _margin(scores: np.ndarray) -> np.ndarray:
    if scores.shape[1] == 1:
        return np.full(len(scores), np.inf)
    second, best = np.sort(scores, axis=1)[:, -2:].T
    return (best - second) / np.maximum(1.0, np.abs(best))


def compare_blocks(found: Draft, expected: Draft, arguments: MarkovArguments, tile_size: int = TILE_SIZE) -> Parity:
    """Compares two blocks up to each request's first difference; both have logits.

    Raises:
      AssertionError: a difference that is no near tie, or numbers that are not close.
    """
    temperature = jnp.asarray(arguments.temperature)
    alike, compared, ties = np.ones(found.ids.shape[1], bool), 0, 0
    for k in range(found.ids.shape[0]):
        mine, theirs = jax.tree.map(lambda field, k=k: field[k], (found, expected))
        np.testing.assert_allclose(np.asarray(mine.logits)[alike], np.asarray(theirs.logits)[alike], **CLOSE)
        differ = alike & (np.asarray(mine.ids) != np.asarray(theirs.ids))
        compared += int(alike.sum())
        if differ.any():
            values = jnp.asarray(theirs.logits) / jnp.where(temperature == 0, 1.0, temperature)[:, None]
            won_by = margins(values, temperature == 0, arguments.key, jnp.full(len(alike), k, jnp.int32), DRAFT_STREAMS, tile_size)
            assert won_by[differ].max() < NEAR_TIE, f"another id at draft {k}, where the draw was won by {won_by[differ].max():.2g}"
        ties += int(differ.sum())
        alike &= ~differ
        for field in ("log_q", "log_normaliser"):
            np.testing.assert_allclose(
                np.asarray(getattr(mine, field))[alike], np.asarray(getattr(theirs, field))[alike], **CLOSE, err_msg=field
            )
    return Parity(compared, ties)


def drafted(spec: Spec, draft: Draft) -> tuple[RejectionArguments, DraftRows, jax.Array | None]:
    """Arguments of `rejection_sample` for a block with logits, its draft rows, and where the spec filters floors that keep 50 ids."""
    ids, log_q, normaliser, floor, logits = (each.swapaxes(0, 1) for each in draft if each is not None)
    judged = rejection_arguments(spec, logits, ids, log_q)
    floors = jax.lax.top_k(judged.target_logits.astype(jnp.float32), 50)[0][:, -1] if spec.filtered else None
    return judged, DraftRows(logits, normaliser, floor), floors


def compare_outcomes(
    found: Outcome, expected: Outcome, judged: RejectionArguments, draft: DraftRows, floors: jax.Array | None, tile_size: int = TILE_SIZE
) -> Parity:
    """Compares two verdicts on the same drafts.

    Raises:
      AssertionError: a difference that is no near tie.
    """
    count, other = np.asarray(expected.num_accepted), np.asarray(found.num_accepted)
    another_count = count != other
    another_id = ~another_count & (np.asarray(found.next_id) != np.asarray(expected.next_id))
    if another_count.any() or another_id.any():
        by_chance, by_draw = _verdict_margins(expected, judged, draft, floors, tile_size)
        first = np.minimum(count, other)[another_count]
        assert (by_chance[another_count, first] < NEAR_TIE).all(), f"{another_count.sum()} requests keep another number of drafts"
        assert (by_draw[another_id] < NEAR_TIE).all(), f"{another_id.sum()} requests go on with another id"
    return Parity(len(count), int(another_count.sum() + another_id.sum()))


def _verdict_margins(
    expected: Outcome, judged: RejectionArguments, draft: DraftRows, floors: jax.Array | None, tile_size: int
) -> tuple[np.ndarray, np.ndarray]:
    """How near each uniform number is to its chance [R, G], and by how much the draw behind the kept drafts was won [R].

    Infinite for greedy requests, whose verdict compares logits as they are.
    """
    temperature, greedy = judged.temperature, judged.temperature == 0
    divisor = jnp.where(greedy, 1.0, temperature)
    requests, step = jnp.arange(len(greedy), dtype=jnp.int32), jnp.arange(judged.ids.shape[1], dtype=jnp.int32)

    def log_p(row: jax.Array) -> jax.Array:
        logits = judged.target_logits[row].astype(jnp.float32)
        values = (
            logits / divisor[:, None] if floors is None else jnp.where(logits >= floors[row][:, None], logits / divisor[:, None], -jnp.inf)
        )
        return values - log_sum_exp(values)[:, None]

    def chance(k: jax.Array) -> jax.Array:
        own = jnp.take_along_axis(log_p(judged.first + jnp.minimum(k, judged.lengths)), judged.ids[:, k][:, None], axis=1)[:, 0]
        return accept_prob(own, judged.log_q[:, k])

    uniform = noise.uniform(noise.site_key(judged.key[:, None], Stream.ACCEPT, step), 0, 0)
    by_chance = jnp.where(greedy[:, None], jnp.inf, jnp.abs(uniform - jax.lax.map(chance, step).T))
    count = expected.num_accepted
    rejected = jnp.minimum(count, len(step) - 1)
    logits, floor, normaliser = (field[requests, rejected] for field in (draft.logits, draft.floor, draft.log_normaliser))
    q = jnp.where(logits >= floor[:, None], jnp.exp(logits / divisor[:, None] - normaliser[:, None]), 0.0)
    p = log_p(judged.first + count)
    values = jnp.where((count == judged.lengths)[:, None], p, jnp.log(jnp.maximum(jnp.exp(p) - q, 0.0)))
    by_draw = margins(values, greedy, judged.key, count, (Stream.RESIDUAL_TILE, Stream.RESIDUAL_ID), tile_size)
    return np.asarray(by_chance), np.where(np.asarray(greedy), np.inf, by_draw)


def check(spec: Spec, backend: Backend) -> tuple[Parity, Parity]:
    """Both ops on one spec by `backend` and by plain JAX."""
    arguments = jax.jit(markov_arguments, static_argnums=0)(spec)
    block = functools.partial(markov_block, return_logits=True)
    found, expected = (jax.jit(functools.partial(block, backend=each))(*arguments) for each in (backend, "xla"))
    blocks = compare_blocks(found, expected, arguments)
    judged, draft, floors = jax.jit(drafted, static_argnums=0)(spec, expected)
    found, expected = (
        jax.jit(functools.partial(rejection_sample, backend=each))(*judged, draft=draft, floor=floors) for each in (backend, "xla")
    )
    return blocks, compare_outcomes(found, expected, judged, draft, floors)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check every spec, at full size unless told otherwise."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--backend", required=True, choices=get_args(BackendName), help="who is held against plain JAX")
    parser.add_argument("--small", action="store_true", help="scaled-down vocabularies and few requests")
    parser.add_argument("--most-rows", type=int, default=128, help="leave out specs of more requests (default: 128)")
    options = parser.parse_args(arguments)
    for spec in SPECS:
        if spec.num_rows <= options.most_rows:
            spec = spec.scaled_down() if options.small else spec
            parities = check(spec, options.backend)
            drawn, judged = (f"{each.compared} ({each.near_ties} near ties)" for each in parities)
            print(f"{spec.name:<40} draws: {drawn}, verdicts: {judged}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
