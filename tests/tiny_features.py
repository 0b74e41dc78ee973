"""A tiny target and fourteen texts, whose features the tests of caches store."""

import dataclasses

import numpy as np
from rich.console import Console

from dspark_jax.data import TokenSequences, offsets_from_lengths
from dspark_jax.feature_cache import FeatureCache
from dspark_jax.feature_samples import FeatureOrigin
from dspark_jax.feature_writer import CacheConfig, write_feature_cache
from dspark_jax.targets.dense import DenseConfig, DenseTarget

TARGET = DenseTarget(DenseConfig(61, 16, 24, num_layers=2, num_heads=2, num_kv_heads=1, head_dim=8))
ORIGIN = FeatureOrigin(target="tiny", taps=(-1, 0), hidden_size=16, template="chatml")
CONFIG = CacheConfig(lengths=(12, 24), batch_size=3, min_loss_tokens=4, features_dtype="float32", hidden_dtype="float32")
# Shards of some three texts, so that twelve texts fill several.
SMALL = dataclasses.replace(CONFIG, shard_bytes=9000)
HALF = dataclasses.replace(SMALL, lengths=(24,), features_dtype="bfloat16", hidden_dtype="bfloat16")
QUARTER = dataclasses.replace(SMALL, lengths=(24,), features_dtype="float8_e4m3fn", hidden_dtype="float8_e4m3fn")
QUIET = Console(quiet=True)
KEPT = [0, 1, 2, 4, 5, 6, 7, 8, 9, 10, 11, 12]
"""The texts that `CONFIG` keeps."""


def fourteen_texts() -> TokenSequences:
    """The fourth and the last have too few answer tokens for `CONFIG`; the sixth is longer than the longest batch."""
    lengths = [20, 9, 12, 8, 24, 30, 11, 16, 10, 22, 13, 24, 18, 5]
    starts = [4, 2, 6, 6, 3, 10, 5, 5, 2, 9, 1, 19, 7, 2]
    rng = np.random.default_rng(0)
    return TokenSequences(
        tokens=rng.integers(1, 61, sum(lengths)).astype(np.uint16),
        offsets=offsets_from_lengths(lengths),
        answer_start=np.asarray(starts, np.int16),
        answer_end=np.asarray(lengths, np.int16),
        finished=np.ones(14, np.bool_),
        domain=np.zeros(14, np.int8),
        temperature=np.zeros(14, np.int8),
        heldout=np.zeros(14, np.int8),
        source=np.arange(14, dtype=np.int32),
    )


def write(folder, texts, target_params, config=SMALL, origin=ORIGIN, **options) -> FeatureCache:
    """The cache in `folder`, written as far as it is missing."""
    write_feature_cache(folder, TARGET, target_params, origin, texts, config, console=QUIET, **options)
    return FeatureCache.open(folder)
