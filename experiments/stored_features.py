"""Training on features that are stored already: what a run wants of a cache, and the cache's samples as the rows of its batches."""

import dataclasses
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from dspark_jax.batches import TokenBatch, TokenBatches
from dspark_jax.data import ChatTemplate, TokenSequences
from dspark_jax.feature_cache import CacheManifest, FeatureCache
from dspark_jax.feature_samples import FeatureOrigin, features_of, target_fingerprint, template_fingerprint
from dspark_jax.model_files import locate_model
from dspark_jax.protocols import Target
from dspark_jax.tokenizers import load_tokenizer
from dspark_jax.typing import Params
from experiments.held_out import spread

MARKED_TEXTS = ChatTemplate(assistant_header="", end_of_turn="")
"""Files of token sequences say themselves which of their tokens are answers, so that no marks are looked for."""

Rows = tuple[Any, ...]
"""A host's part of a batch: ids, loss mask, segment (None where rows are not packed), and where they are stored features and last hidden
states; as numpy arrays."""


def training_texts(texts: TokenSequences, count: int | None = None) -> TokenSequences:
    """The texts that a drafter learns from, and whose features are stored: those that are not held out.

    Args:
      count: so many of them, at even distances; None for all.
    """
    kept = texts.select(texts.heldout == 0)
    return kept if count is None or not len(kept) else spread(kept, count)


def chat_template_of(model: str) -> str | None:
    """Source of a model's chat template; None where it has none, or comes without a tokenizer.

    Raises:
      ValueError: the tokenizer's files are damaged.
    """
    path = locate_model(model)
    return None if path.is_dir() and not (path / "tokenizer.json").exists() else load_tokenizer(model).chat_template


def features_origin(model: str, target: Target, target_params: Params, taps: tuple[int, ...]) -> FeatureOrigin:
    """What features of `model` at `taps` are made from.

    Args:
      model: folder, GGUF file or name that `target` and `target_params` were loaded from.
    """
    fingerprint = target_fingerprint(target, target_params)
    return FeatureOrigin(fingerprint, taps, target.spec.width, template_fingerprint(chat_template_of(model), MARKED_TEXTS))


def stored_taps(folder: Path, taps: tuple[int, ...]) -> tuple[int, ...]:
    """The taps that a cache in `folder` must have for a drafter that reads `taps`: these, or any where it reads none (MTP).

    Raises:
      ValueError: there is no cache.
    """
    return taps or CacheManifest.read(folder).origin.taps


def stored_as(folder: Path) -> CacheManifest:
    """The manifest of the cache in `folder`, as far as the steps of a run depend on it.

    Raises:
      ValueError: there is no cache.
    """
    manifest = CacheManifest.read(folder)
    return dataclasses.replace(manifest, shard_lengths=(sum(manifest.shard_lengths),), note="")


def open_features(folder: Path, wanted: FeatureOrigin, stream: TokenBatches) -> FeatureCache:
    """The cache in `folder`, if it has features of every text of `stream`.

    Raises:
      ValueError: it is not whole, or was made for another target, taps, template, texts or for shorter texts.
    """
    cache = FeatureCache.open(folder, wanted, stream.sequences)
    manifest, longest = cache.manifest, min(stream.lengths[-1], int(stream.sequences.lengths.max()))
    if longest > manifest.max_length:
        raise ValueError(f"lengths is {stream.lengths}; allowed: at most {manifest.max_length}, to which the texts of {folder} were cut")
    if manifest.min_loss_tokens > stream.min_loss_tokens:
        raise ValueError(
            f"{folder} leaves out texts with fewer than {manifest.min_loss_tokens} answer tokens; "
            f"allowed: at most {stream.min_loss_tokens}, as the run takes them"
        )
    return cache


def text_rows(batches: Iterator[tuple[TokenBatch, dict[str, int]]]) -> Iterator[tuple[Rows, Mapping[str, int]]]:
    """The rows of every batch, each with the state of the stream behind it."""
    for batch, position in batches:
        yield (batch.ids, batch.loss_mask, batch.segment), position


def feature_rows(batches: Iterator[tuple[TokenBatch, dict[str, int]]], cache: FeatureCache) -> Iterator[tuple[Rows, Mapping[str, int]]]:
    """`text_rows` with what the cache has of their texts; the next batch is read while a step runs.

    Raises:
      ValueError: a text has no sample, or its sample holds other tokens.
    """

    def following() -> tuple[Rows, dict[str, Any]]:
        batch, position = next(batches)
        stored = features_of(cache.read_texts(batch.rows), batch)
        return (stored.ids, stored.loss_mask, stored.segment, stored.features, stored.last_hidden), position

    with ThreadPoolExecutor(1) as reader:
        ahead = reader.submit(following)
        while True:
            ready, ahead = ahead.result(), reader.submit(following)
            yield ready
