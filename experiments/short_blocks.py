"""What rounds would cost with a drafter of shorter blocks, estimated from the curves of longer ones.

A family of cost curves was measured with blocks of G drafts. For N of them it says no more than this: proposing and committing go by
the positions of all requests together (R N, and R (1 + N)), of which other numbers of requests have been measured; and the grid of
attention has 1 + N queries per request, between the 1 of `undrafted` and the 1 + G of `curve`.
"""

import dataclasses
import warnings
from collections.abc import Mapping, Sequence

import numpy as np

from dspark_jax.step_curve import CurveWarning, StepCurve
from experiments.step_curves import RoundCosts


def with_block_size(costs: Mapping[int, RoundCosts], block_size: int, measured: int, in_between: bool = False) -> dict[int, RoundCosts]:
    """Costs of rounds with blocks of `block_size` drafts, of which nothing or everything is verified.

    Args:
      measured: G of `costs`. Fewer positions than were measured cost what the fewest did.
      in_between: also with buckets between nothing and everything, those that were measured.

    Raises:
      ValueError: longer blocks than were measured.
    """
    if not 1 <= block_size <= measured:
        raise ValueError(f"block_size is {block_size}; allowed are integers from 1 to {measured}, with which the curves were measured")
    rows = sorted(costs)
    proposing = [costs[each].curve.draft_seconds - costs[each].commit_seconds for each in rows]
    committing = [costs[each].commit_seconds for each in rows]

    def shorter(each: RoundCosts) -> RoundCosts:
        commit = float(np.interp(each.rows * (1 + block_size), [size * (1 + measured) for size in rows], committing))
        propose = float(np.interp(each.rows * block_size, [size * measured for size in rows], proposing))
        curve, most = each.curve, each.rows * (1 + block_size)
        between = [size for size in each.curve.tokens if each.rows < size < most] if in_between else []
        tokens = (each.rows, *between, most)
        plain = np.array([each.undrafted.seconds(each.rows, at) - each.undrafted.draft_seconds for at in _contexts(curve)])
        full = np.array([curve.seconds_per_step, *(seconds for _, seconds in curve.longer)])
        grid = (full[:, 0] - plain) * (measured - block_size) / measured
        at = [tuple((np.interp(tokens, curve.tokens, line) - off).tolist()) for line, off in zip(full, grid, strict=True)]
        longer = tuple(zip(_contexts(curve)[1:], at[1:], strict=True))
        undrafted = dataclasses.replace(each.undrafted, draft_seconds=commit / (1 + block_size))
        return RoundCosts(each.rows, StepCurve(tokens, at[0], propose + commit, curve.context, longer), undrafted, commit)

    with warnings.catch_warnings():
        # Of two buckets, either may be the cheaper one where few requests wait for the weights.
        warnings.simplefilter("ignore", CurveWarning)
        return {size: shorter(costs[size]) for size in rows}


def best_block_sizes(costs: Mapping[int, RoundCosts], continuation: Sequence[float]) -> dict[int, int]:
    """By the number of requests, the length of blocks of which verifying everything promises the most tokens a second.

    Args:
      costs: measured with blocks of as many drafts as `continuation` has entries.
      continuation: per position, the chance that a draft is accepted given that those before it were.
    """
    measured, survival = len(continuation), np.cumprod(continuation)
    best: dict[int, tuple[float, int]] = {}
    for size in range(1, measured + 1):
        for rows, each in with_block_size(costs, size, measured).items():
            rate = rows * (1 + survival[:size].sum()) / each.curve.seconds(rows * (1 + size))
            best[rows] = max(best.get(rows, (0.0, 0)), (rate, size))
    return {rows: size for rows, (_, size) in best.items()}


def _contexts(curve: StepCurve) -> list[int]:
    return [curve.context, *(at for at, _ in curve.longer)]


def chunk_seconds(costs: Mapping[int, RoundCosts], chunk: int, commits: bool) -> float:
    """Of prefilling a chunk: the target's pass on as many flat tokens, of the fewest requests that have them, and their commit.

    Raises:
      ValueError: a chunk of more tokens than any round has.
    """
    holding = [size for size in sorted(costs) if costs[size].curve.tokens[-1] >= chunk]
    if not holding:
        raise ValueError(f"prefill_chunk is {chunk}; the largest round in the cost curves has {costs[max(costs)].curve.tokens[-1]} tokens")
    found = costs[holding[0]]
    return found.curve.seconds(chunk) - found.curve.draft_seconds + (found.commit_seconds if commits else 0.0)
