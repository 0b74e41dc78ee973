"""What a frozen target said of texts, kept for later: one sample per text, whatever file it comes from, and batches to train on.

A drafter that learns from stored features learns exactly what it would learn online, as long as the features come from its target,
its taps and its chat template. Every store says what it was made from, and `FeatureOrigin.require` refuses another one.
"""

import dataclasses
import hashlib
import json
from collections.abc import Sequence
from typing import Any, Protocol, cast, runtime_checkable

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PRNGKeyArray

from dspark_jax.anchors import sample_anchors
from dspark_jax.batches import TokenBatch
from dspark_jax.calibration_identity import drafter_fingerprint
from dspark_jax.checksums import checksums
from dspark_jax.data import ChatTemplate
from dspark_jax.protocols import Target, TrainBatch
from dspark_jax.typing import Array, Bool, Float, Int, Params, typed


@dataclasses.dataclass(frozen=True)
class FeatureOrigin:
    """What stored features were made from; training on them needs the same.

    Attributes:
      target: `target_fingerprint`, or the name that a cache of the reference goes by.
      taps: layers whose outputs are the features, in the order in which they are concatenated.
      hidden_size: D.
      template: `template_fingerprint`, or the name that a cache of the reference goes by.
    """

    target: str
    taps: tuple[int, ...]
    hidden_size: int
    template: str

    def __post_init__(self) -> None:
        if not self.target:
            raise ValueError("target is empty; allowed: a fingerprint or a name")
        if not self.taps or len(set(self.taps)) != len(self.taps) or min(self.taps) < -1:
            raise ValueError(f"taps is {self.taps}; allowed: one or more different layers, -1 for the embedding")
        if self.hidden_size < 1:
            raise ValueError(f"hidden_size is {self.hidden_size}; at least 1 is needed")

    @property
    def features_size(self) -> int:
        """F, features per position."""
        return len(self.taps) * self.hidden_size

    def require(self, wanted: "FeatureOrigin", where: str) -> None:
        """Refuse features that were made for something else.

        Args:
          wanted: what the run has.
          where: what the error calls the features: their folder.

        Raises:
          ValueError: naming every field that differs, with both values.
        """
        names = [field.name for field in dataclasses.fields(self) if getattr(self, field.name) != getattr(wanted, field.name)]
        if names:
            differences = "; ".join(f"{name} is {getattr(self, name)!r}, the run has {getattr(wanted, name)!r}" for name in names)
            raise ValueError(f"the features in {where} were made for something else: {differences}")


def target_fingerprint(target: Target, params: Params) -> str:
    """SHA-256 (hexadecimal) of a target: its kind, its config and checksums of its parameters.

    Parameters count as bfloat16, so that a target has one fingerprint in whichever of the usual dtypes it runs. They may be spread over
    devices and hosts: no parameter is gathered.
    """
    shapes = {jax.tree_util.keystr(path): list(leaf.shape) for path, leaf in jax.tree_util.tree_leaves_with_path(params)}
    sums = {name: [shapes[name], total] for name, total in checksums(params, jnp.bfloat16).items()}
    # Without parameters this hashes a kind and a config, be it a drafter's or a target's.
    kind = drafter_fingerprint(cast(Any, target), {})
    return hashlib.sha256(json.dumps([kind, sums], sort_keys=True).encode()).hexdigest()


def template_fingerprint(source: str | None, template: ChatTemplate) -> str:
    """SHA-256 (hexadecimal) of how chats become text and which of it is in the loss.

    Args:
      source: the tokenizer's template (`Tokenizer.chat_template`).
    """
    return hashlib.sha256(json.dumps([source, dataclasses.asdict(template)], sort_keys=True).encode()).hexdigest()


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureSample:
    """One text, as a target read it.

    Attributes:
      loss_mask: True on the tokens that the target wrote.
      features: outputs of the tapped layers, bfloat16 or float32.
      last_hidden: hidden states after the final norm, bfloat16 or float32.
    """

    ids: Int[np.ndarray, "S"]
    loss_mask: Bool[np.ndarray, "S"]
    features: Float[np.ndarray, "S F"]
    last_hidden: Float[np.ndarray, "S D"]


@runtime_checkable
class FeatureStore(Protocol):
    """Samples by number, from 0 to `len - 1`, in any order and as often as wanted."""

    @property
    def origin(self) -> FeatureOrigin: ...

    def __len__(self) -> int: ...

    def read(self, index: int) -> FeatureSample: ...


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureBatch:
    """Samples of one batch, with zeros where there is no token. `segment` is that of `TokenBatch`: None where rows are not packed.

    Arrays of the host, or of devices once they are there.
    """

    ids: Int[np.ndarray | Array, "B S"]
    loss_mask: Bool[np.ndarray | Array, "B S"]
    features: Float[np.ndarray | Array, "B S F"]
    last_hidden: Float[np.ndarray | Array, "B S D"]
    segment: Int[np.ndarray | Array, "B S"] | None = None


def _placed(samples: Sequence[FeatureSample], spans: Sequence[tuple[int, int, int]], shape: tuple[int, int]) -> FeatureBatch:
    """Samples put into rows: each at (row, begin, end), cut where it is longer."""
    arrays = {}
    for name in ("ids", "loss_mask", "features", "last_hidden"):
        parts = [getattr(sample, name) for sample in samples]
        kinds = {(part.shape[1:], part.dtype) for part in parts}
        if len(kinds) > 1:
            raise ValueError(f"{name} of a batch has the shapes and dtypes {sorted(map(str, kinds))}; allowed: one")
        arrays[name] = np.zeros((*shape, *parts[0].shape[1:]), parts[0].dtype)
        for part, (row, begin, end) in zip(parts, spans, strict=True):
            arrays[name][row, begin : min(end, begin + len(part))] = part[: end - begin]
    return FeatureBatch(**arrays)


@typed
def pad_samples(samples: Sequence[FeatureSample], length: int) -> FeatureBatch:
    """A batch of S = `length` positions, a sample a row; longer samples are cut.

    Raises:
      ValueError: there is no sample, `length` is below 1, or the samples do not have the same F, D and dtypes.
    """
    if not samples or length < 1:
        raise ValueError(f"a batch of {len(samples)} samples and length {length} is empty; at least 1 of both is needed")
    return _placed(samples, [(row, 0, length) for row in range(len(samples))], (len(samples), length))


def _spans(batch: TokenBatch) -> list[tuple[int, int, int]]:
    """Row, begin and end of every text of a batch, in the order of `batch.rows`."""
    num_rows, length = batch.ids.shape
    if batch.segment is None:
        return [(row, 0, length) for row in range(num_rows)]
    spans = []
    for row in range(num_rows):
        numbers, begins, counts = np.unique(batch.segment[row], return_index=True, return_counts=True)
        spans += [(row, int(b), int(b + count)) for number, b, count in zip(numbers, begins, counts, strict=True) if number > 0]
    return spans


@typed
def features_of(samples: Sequence[FeatureSample], batch: TokenBatch) -> FeatureBatch:
    """The stored samples of a batch of texts, placed as the batch places them: one stream of texts serves a store and online training.

    Args:
      samples: of `batch.rows`, in that order.

    Raises:
      ValueError: a sample holds other tokens, or other tokens in the loss, than the batch has in its place.
    """
    spans = _spans(batch)
    if not len(samples) == len(batch.rows) == len(spans):
        raise ValueError(f"{len(samples)} samples were given for a batch of {len(batch.rows)} texts; allowed: one for each")
    placed = dataclasses.replace(_placed(samples, spans, batch.ids.shape), segment=batch.segment)
    for name in ("ids", "loss_mask"):
        differ = getattr(placed, name) != getattr(batch, name)
        for text, (row, begin, end) in zip(batch.rows, spans, strict=True):
            if differ[row, begin:end].any():
                raise ValueError(
                    f"{name} of text {text} is not what its features were made from; allowed: the texts and lengths of the cache"
                )
    return placed


@typed
def anchored_batch(batch: FeatureBatch, rng: PRNGKeyArray, num_anchors: int, dtype: Any = jnp.float32) -> TrainBatch:
    """The batch that `train.train_step_on_features` takes, with anchors drawn.

    Args:
      rng: `jax.random.fold_in(state.rng, state.step)` draws the anchors that `train.train_step` would draw for these texts.
      num_anchors: A.
      dtype: of features and hidden states on the device: that of the target's head.
    """
    loss_mask = jnp.asarray(batch.loss_mask)
    segment = None if batch.segment is None else jnp.asarray(batch.segment)
    anchors, keep = sample_anchors(rng, loss_mask, num_anchors, segment)
    return TrainBatch(
        ids=jnp.asarray(batch.ids),
        loss_mask=loss_mask,
        features=jnp.asarray(batch.features).astype(dtype),
        last_hidden=jnp.asarray(batch.last_hidden).astype(dtype),
        anchors=anchors,
        keep=keep,
        segment=segment,
    )


__all__ = [
    "FeatureBatch",
    "FeatureOrigin",
    "FeatureSample",
    "FeatureStore",
    "anchored_batch",
    "features_of",
    "pad_samples",
    "target_fingerprint",
    "template_fingerprint",
]
