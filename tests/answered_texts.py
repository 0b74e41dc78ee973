"""Random answered sequences for tests of what reads them."""

import numpy as np

from dspark_jax.data import TokenSequences, offsets_from_lengths


def make_sequences(lengths, answer_lengths=None, seed=0):
    """Random sequences of these lengths whose answers are their last tokens; token 0 never occurs, so that padding shows."""
    rng = np.random.default_rng(seed)
    count = len(lengths)
    answer_lengths = [max(1, length // 2) for length in lengths] if answer_lengths is None else answer_lengths
    return TokenSequences(
        tokens=rng.integers(1, 1000, sum(lengths)).astype(np.uint16),
        offsets=offsets_from_lengths(lengths),
        answer_start=(np.asarray(lengths) - np.asarray(answer_lengths)).astype(np.int16),
        answer_end=np.asarray(lengths, np.int16),
        finished=rng.random(count) < 0.5,
        domain=rng.integers(0, 3, count).astype(np.int8),
        temperature=rng.integers(0, 3, count).astype(np.int8),
        heldout=rng.integers(0, 2, count).astype(np.int8),
        source=rng.integers(-1, 50, count).astype(np.int32),
    )


def random_sequences(count, longest=40, seed=0):
    return make_sequences(np.random.default_rng(seed).integers(2, longest + 1, count).tolist(), seed=seed)
