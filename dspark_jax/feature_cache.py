"""A cache of target features: ArrayRecord shards that are a TFDS data set, read by number.

A folder holds `feature_cache.json` (what it was made from, and how many samples each shard has), `samples.npz` (which text each sample
is), the shards, and once it is complete the metadata by which `tfds.builder_from_directory` reads it like any data set (in a process
that has imported jax or ml_dtypes, without which numpy knows no bfloat16). Hidden states are stored as they are in float32 or
bfloat16, or in float8 with a scale per position and layer. `feature_writer` writes it.
"""

import dataclasses
import functools
import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.data import TokenSequences
from dspark_jax.feature_samples import FeatureOrigin, FeatureSample
from dspark_jax.model_files import read_json, require
from dspark_jax.typing import Int, typed

VERSION = 1
MANIFEST_FILE = "feature_cache.json"
SAMPLES_FILE = "samples.npz"
DATASET, SPLIT = "features", "train"

DTYPES: Mapping[str, np.dtype] = {
    "float32": np.dtype(np.float32),
    "bfloat16": np.dtype(ml_dtypes.bfloat16),
    "float8_e4m3fn": np.dtype(ml_dtypes.float8_e4m3fn),
}
"""How hidden states may be stored."""

SCALED = "float8_e4m3fn"
"""The dtype that needs scales: its largest number is 448."""

RECORD_BYTES, SHARD_BYTES = 384, 2**17
"""Upper bounds of what a record and a shard take besides the arrays: names of fields, frames, the index at the end."""


@dataclasses.dataclass(frozen=True)
class CacheManifest:
    """What a cache is, apart from its samples.

    Attributes:
      origin: target, taps, hidden size and template.
      texts: `texts_fingerprint` of what the target read.
      features_dtype, hidden_dtype: of the tapped features and of the last hidden states, names in `DTYPES`.
      max_length: texts were cut to it.
      min_loss_tokens: texts with fewer answer tokens were left out.
      shard_lengths: samples in each shard.
      note: for people: where target and texts came from.
    """

    origin: FeatureOrigin
    texts: str
    features_dtype: str
    hidden_dtype: str
    max_length: int
    min_loss_tokens: int
    shard_lengths: tuple[int, ...]
    note: str = ""
    version: int = VERSION

    def __post_init__(self) -> None:
        if self.version != VERSION:
            raise ValueError(f"version is {self.version!r}; allowed: {VERSION}")
        for name in ("features_dtype", "hidden_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(DTYPES)}")
        if not self.shard_lengths or min(self.shard_lengths) < 1:
            raise ValueError(f"shard_lengths is {self.shard_lengths}; allowed: at least 1 sample in each of at least 1 shard")

    @classmethod
    def read(cls, folder: Path) -> "CacheManifest":
        """The manifest of the cache in `folder`.

        Raises:
          ValueError: there is none, or a field is missing, unknown or out of range.
        """
        stored = read_json(folder, MANIFEST_FILE)
        try:
            origin = FeatureOrigin(**{**stored["origin"], "taps": tuple(stored["origin"]["taps"])})
            return cls(**{**stored, "origin": origin, "shard_lengths": tuple(stored["shard_lengths"])})
        except (KeyError, TypeError, ValueError) as error:
            raise ValueError(f"{folder / MANIFEST_FILE} is no manifest of version {VERSION}: {error}") from error

    def shard_path(self, folder: Path, shard: int) -> Path:
        """The file of a shard, named as TFDS names the shards of a split."""
        return folder / f"{DATASET}-{SPLIT}.array_record-{shard:05d}-of-{len(self.shard_lengths):05d}"

    def features(self) -> Any:
        """The TFDS features of a record: `text` (its number), `ids`, `loss_mask`, `features`, `last_hidden`, and scales of float8."""
        tensor = functools.partial(_tfds().features.Tensor, encoding="bytes")
        taps, size = len(self.origin.taps), self.origin.hidden_size
        fields = {
            "text": tensor(shape=(), dtype=np.dtype(np.int64)),
            "ids": tensor(shape=(None,), dtype=np.dtype(np.int32)),
            "loss_mask": tensor(shape=(None,), dtype=np.dtype(np.bool_)),
            "features": tensor(shape=(None, taps, size), dtype=DTYPES[self.features_dtype]),
            "last_hidden": tensor(shape=(None, size), dtype=DTYPES[self.hidden_dtype]),
        }
        if self.features_dtype == SCALED:
            fields["features_scale"] = tensor(shape=(None, taps), dtype=np.dtype(np.float32))
        if self.hidden_dtype == SCALED:
            fields["last_hidden_scale"] = tensor(shape=(None,), dtype=np.dtype(np.float32))
        return _tfds().features.FeaturesDict(fields)

    def sample_bytes(self, lengths: Int[np.ndarray, "n"]) -> Int[np.ndarray, "n"]:
        """Bytes that samples of these lengths take on disk, at most."""
        taps, size = len(self.origin.taps), self.origin.hidden_size
        features = taps * (size * DTYPES[self.features_dtype].itemsize + 4 * (self.features_dtype == SCALED))
        hidden = size * DTYPES[self.hidden_dtype].itemsize + 4 * (self.hidden_dtype == SCALED)
        arrays = np.asarray(lengths, np.int64) * (4 + 1 + features + hidden)
        # Every 64 KiB of a shard begin with a header of 24 bytes.
        return arrays + arrays // 2048 + RECORD_BYTES


def _tfds() -> Any:
    return require("tensorflow_datasets", "data", "a cache of features")


def array_records() -> Any:
    """The module of ArrayRecord's reader and writer."""
    require("array_record", "data", "a cache of features")
    return require("array_record.python.array_record_module", "data", "a cache of features")


@typed
def cache_bytes(manifest: CacheManifest, lengths: Int[np.ndarray, "n"]) -> int:
    """Bytes on disk of the cache of `manifest`, at most, for texts of these lengths (cut already).

    Compression, of which nothing is promised, takes off about a fifth of bfloat16 and a seventh of float8.
    """
    return int(manifest.sample_bytes(lengths).sum()) + SHARD_BYTES * len(manifest.shard_lengths)


@typed
def texts_fingerprint(texts: TokenSequences) -> str:
    """SHA-256 (hexadecimal) of the tokens of texts and of what in them is an answer."""
    digest = hashlib.sha256()
    for values in (texts.tokens.astype(np.uint32), texts.offsets, texts.answer_start.astype(np.int64), texts.answer_end.astype(np.int64)):
        digest.update(np.ascontiguousarray(values).tobytes())
    return digest.hexdigest()


def num_records(path: Path) -> int:
    """Records in an ArrayRecord file.

    Raises:
      ValueError: the file is missing, damaged or cut short.
    """
    try:
        reader = array_records().ArrayRecordReader(str(path))
        try:
            return reader.num_records()
        finally:
            reader.close()
    except (RuntimeError, ValueError, OSError) as error:
        raise ValueError(f"{path} is no whole ArrayRecord file: {error}") from error


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureCache:
    """A `FeatureStore` over a folder that `feature_writer` wrote.

    Attributes:
      text: number of the text that each sample is made from, ascending.
      lengths: tokens of each sample.
      source: the serialised records, by number.
      features: what they are.
    """

    folder: Path
    manifest: CacheManifest
    text: np.ndarray
    lengths: np.ndarray
    source: Any
    features: Any

    @classmethod
    def open(cls, folder: str | Path, wanted: FeatureOrigin | None = None, texts: TokenSequences | None = None) -> "FeatureCache":
        """The cache in `folder`.

        Args:
          wanted: what the run has; None to read whatever is there.
          texts: what the run trains on; None where the numbers of samples are all that is needed.

        Raises:
          ValueError: a shard is missing or damaged, or the cache was made for another target, other taps, another template or other texts.
        """
        folder = Path(folder)
        manifest = CacheManifest.read(folder)
        if wanted is not None:
            manifest.origin.require(wanted, str(folder))
        if texts is not None and texts_fingerprint(texts) != manifest.texts:
            raise ValueError(f"texts are not those that the features in {folder} were made from; allowed: the same texts in the same order")
        paths = [manifest.shard_path(folder, shard) for shard in range(len(manifest.shard_lengths))]
        missing = [path.name for path in paths if not path.is_file()]
        if missing:
            raise ValueError(f"{folder} lacks {len(missing)} of {len(paths)} shards, {missing[0]} first: its writing was not finished")
        for path, length in zip(paths, manifest.shard_lengths, strict=True):
            if (found := num_records(path)) != length:
                raise ValueError(f"{path} has {found} records; allowed: {length}, as the manifest says")
        text, lengths = read_samples(folder, manifest)
        sources = require("array_record.python.array_record_data_source", "data", "a cache of features")
        spans = [f"{path}[0:{length}]" for path, length in zip(paths, manifest.shard_lengths, strict=True)]
        return cls(folder, manifest, text, lengths, sources.ArrayRecordDataSource(spans), manifest.features())

    @property
    def origin(self) -> FeatureOrigin:
        """What the cache was made from."""
        return self.manifest.origin

    def __len__(self) -> int:
        return len(self.text)

    def read(self, index: int) -> FeatureSample:
        """Sample `index`; hidden states come in the dtype that they are stored in, those of float8 in float32."""
        return self.read_many([index])[0]

    def read_many(self, indices: Sequence[int]) -> list[FeatureSample]:
        """Samples by number, read in parallel where they lie in several shards.

        Raises:
          ValueError: there is no such sample.
        """
        for index in indices:
            if not 0 <= index < len(self):
                raise ValueError(f"index is {index}; allowed: 0 to {len(self) - 1}")
        records = self.source.__getitems__([int(index) for index in indices])
        return [self._sample(self.features.deserialize_example_np(record)) for record in records]

    @typed
    def read_texts(self, rows: Int[np.ndarray, "B"]) -> list[FeatureSample]:
        """The samples of texts by their numbers, as `TokenBatch.rows` has them.

        Raises:
          ValueError: a text has no sample: it has too few answer tokens, or the cache was made from fewer texts.
        """
        places = np.searchsorted(self.text, rows)
        found = self.text[np.minimum(places, len(self) - 1)] == rows
        if not found.all():
            row = int(rows[int(np.argmin(found))])
            raise ValueError(
                f"text {row} has no sample in {self.folder}; allowed: texts with at least {self.manifest.min_loss_tokens} answer tokens "
                f"within {self.manifest.max_length} tokens"
            )
        return self.read_many(places.tolist())

    def _sample(self, record: Mapping[str, Any]) -> FeatureSample:
        features, last_hidden = record["features"], record["last_hidden"]
        if "features_scale" in record:
            features = features.astype(np.float32) * record["features_scale"][..., None]
        if "last_hidden_scale" in record:
            last_hidden = last_hidden.astype(np.float32) * record["last_hidden_scale"][:, None]
        return FeatureSample(record["ids"], record["loss_mask"], features.reshape(len(features), -1), last_hidden)


def read_samples(folder: Path, manifest: CacheManifest) -> tuple[np.ndarray, np.ndarray]:
    """Number of the text, and length, of every sample.

    Raises:
      ValueError: the file is missing or does not fit the manifest.
    """
    path = folder / SAMPLES_FILE
    if not path.is_file():
        raise ValueError(f"{folder} has no {SAMPLES_FILE}; allowed: the folder of a cache of features")
    with np.load(path, allow_pickle=False) as archive:
        text, lengths = archive["text"], archive["length"]
    if not len(text) == len(lengths) == sum(manifest.shard_lengths):
        raise ValueError(f"{path} has {len(text)} samples; allowed: {sum(manifest.shard_lengths)}, as the manifest says")
    return text, lengths


__all__ = ["CacheManifest", "FeatureCache", "array_records", "cache_bytes", "num_records", "read_samples", "texts_fingerprint"]
