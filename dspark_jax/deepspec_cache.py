"""Target caches that DeepSpec wrote (format version 2): manifest, index and shards, read sample by sample.

The format is plain: `manifest.json` says what was cached, `samples.idx` has a record of 56 bytes per sample, and the shards hold the
arrays of every sample one behind another. Samples of a cache of terabytes are read from mapped files, where they lie.
Source: DeepSpec's target cache, version 2.
"""

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from dspark_jax.feature_samples import FeatureOrigin, FeatureSample
from dspark_jax.model_files import read_json

VERSION = 2
RECORD = np.dtype([("sample_id", "<u8"), ("shard_id", "<u4"), ("seq_len", "<u4"), ("offsets", "<u8", (5,))])
"""A sample in `samples.idx`; its offsets are those of `FIELDS`, in bytes from the beginning of its shard."""

FIELDS = ("input_ids", "attention_mask", "loss_mask", "target_hidden_states", "target_last_hidden_states")

FIXED = {
    "version": VERSION,
    "index_record_size": RECORD.itemsize,
    "hidden_dtype": "bfloat16",
    "token_dtype": "int32",
    "mask_dtype": "uint8",
}
"""Fields of the manifest that have one value in this version of the format."""

MANIFEST_FIELDS: Mapping[str, type] = {
    **{name: type(value) for name, value in FIXED.items()},
    "num_samples": int,
    "num_shards": int,
    "hidden_size": int,
    "max_length": int,
    "target_layer_ids": list,
    "shards": list,
    "target_model_name_or_path": str,
    "chat_template": str,
}
"""Fields of the manifest that are read, and their types in JSON."""


@dataclasses.dataclass(frozen=True, eq=False)
class DeepSpecCache:
    """A `FeatureStore` over a folder of DeepSpec's.

    Attributes:
      origin: its `target` and `template` are the names that the cache was made with.
      max_length: texts were cut to it.
      index: one record per sample.
      shards: mapped bytes of every shard.
    """

    folder: Path
    origin: FeatureOrigin
    max_length: int
    index: np.ndarray
    shards: tuple[np.ndarray, ...]

    @classmethod
    def open(cls, folder: str | Path, wanted: FeatureOrigin | None = None) -> "DeepSpecCache":
        """The cache in `folder`, its manifest, index and sizes checked; what the samples hold is checked when they are read.

        Args:
          wanted: what the run has; target and template by the names of the cache. None to read whatever is there.

        Raises:
          ValueError: a file is missing, damaged, cut short or of another version, or the cache was made for something else.
        """
        folder = Path(folder)
        manifest = _read_manifest(folder)
        origin = FeatureOrigin(
            target=manifest["target_model_name_or_path"],
            taps=tuple(manifest["target_layer_ids"]),
            hidden_size=manifest["hidden_size"],
            template=manifest["chat_template"],
        )
        if wanted is not None:
            origin.require(wanted, str(folder))
        shards = tuple(_map(folder / name) for name in _shard_names(folder, manifest))
        index = _read_index(folder / "samples.idx", manifest)
        _check_places(folder, index, shards, origin)
        return cls(folder, origin, manifest["max_length"], index, shards)

    def __len__(self) -> int:
        return len(self.index)

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of every sample, [n] int64."""
        return self.index["seq_len"].astype(np.int64)

    def read(self, index: int) -> FeatureSample:
        """Sample `index`, with hidden states in bfloat16 as they were stored.

        Raises:
          ValueError: there is no such sample, a mask is neither 0 nor 1, a token is negative, or the attention mask leaves a token out.
        """
        if not 0 <= index < len(self):
            raise ValueError(f"index is {index}; allowed: 0 to {len(self) - 1}")
        record = self.index[index]
        shard, length = self.shards[record["shard_id"]], int(record["seq_len"])
        stored: dict[str, Any] = {}
        for name, offset, (dtype, width) in zip(FIELDS, record["offsets"].tolist(), _layout(self.origin).values(), strict=True):
            raw = shard[offset : offset + length * width * dtype.itemsize]
            stored[name] = np.frombuffer(raw, dtype).reshape((length, width) if width > 1 else length)
        for name, lowest, highest in (("input_ids", 0, 2**31 - 1), ("attention_mask", 1, 1), ("loss_mask", 0, 1)):
            bad = (stored[name] < lowest) | (stored[name] > highest)
            if bad.any():
                at = int(np.argmax(bad))
                value = f"{name}[{at}] of sample {index} is {stored[name][at]}"
                raise ValueError(f"{self.folder}: {value}; allowed: {lowest} to {highest}")
        size = self.origin.hidden_size
        return FeatureSample(
            ids=stored["input_ids"].astype(np.int32),
            loss_mask=stored["loss_mask"].astype(np.bool_),
            features=stored["target_hidden_states"].reshape(length, -1).view(ml_dtypes.bfloat16),
            last_hidden=stored["target_last_hidden_states"].reshape(length, size).view(ml_dtypes.bfloat16),
        )


def _layout(origin: FeatureOrigin) -> dict[str, tuple[np.dtype, int]]:
    """Dtype and values per token of every field; hidden states as the bits of bfloat16."""
    widths = (("<i4", 1), ("u1", 1), ("u1", 1), ("<u2", origin.features_size), ("<u2", origin.hidden_size))
    return {name: (np.dtype(dtype), width) for name, (dtype, width) in zip(FIELDS, widths, strict=True)}


def _read_manifest(folder: Path) -> dict[str, Any]:
    manifest, path = read_json(folder, "manifest.json"), folder / "manifest.json"
    # The version comes first: with another one, no other field need mean the same.
    for name, kind in MANIFEST_FIELDS.items():
        value = manifest.get(name)
        if not isinstance(value, kind) or isinstance(value, bool):
            raise ValueError(f"{path}: {name} is {value!r}; allowed: a value of type {kind.__name__}")
        if name in FIXED and value != FIXED[name]:
            raise ValueError(f"{path}: {name} is {value!r}; allowed: {FIXED[name]!r}")
        if isinstance(value, int) and value < (0 if name == "num_samples" else 1):
            raise ValueError(f"{path}: {name} is {value}; allowed: at least {0 if name == 'num_samples' else 1}")
    if not all(type(layer) is int for layer in manifest["target_layer_ids"]):
        raise ValueError(f"{path}: target_layer_ids is {manifest['target_layer_ids']}; allowed: a list of integers")
    return manifest


def _shard_names(folder: Path, manifest: Mapping[str, Any]) -> list[str]:
    """Files of the shards by id."""
    shards, count = manifest["shards"], manifest["num_shards"]
    if len(shards) != count:
        raise ValueError(f"{folder}: shards has {len(shards)} entries; allowed: num_shards, {count}")
    names: dict[int, str] = {}
    for place, shard in enumerate(shards):
        number, name = (shard.get("shard_id"), shard.get("file_name")) if isinstance(shard, dict) else (None, None)
        if type(number) is not int or not 0 <= number < count or number in names:
            raise ValueError(f"{folder}: shard_id of shards[{place}] is {number!r}; allowed: each of 0 to {count - 1} once")
        if not isinstance(name, str) or not name or Path(name).name != name:
            raise ValueError(f"{folder}: file_name of shards[{place}] is {name!r}; allowed: the name of a file in the folder")
        names[number] = name
    return [names[number] for number in range(count)]


def _map(path: Path) -> np.ndarray:
    if not path.is_file():
        raise ValueError(f"{path} is missing; allowed: all shards that the manifest names")
    # An empty file cannot be mapped.
    return np.memmap(path, np.uint8, "r") if path.stat().st_size else np.zeros(0, np.uint8)


def _read_index(path: Path, manifest: Mapping[str, Any]) -> np.ndarray:
    if not path.is_file():
        raise ValueError(f"{path} is missing; allowed: an index of {RECORD.itemsize} bytes a sample")
    size, count = path.stat().st_size, manifest["num_samples"]
    if size != count * RECORD.itemsize:
        raise ValueError(f"{path} has {size} bytes; allowed: {count * RECORD.itemsize}, {RECORD.itemsize} for each of {count} samples")
    index = np.fromfile(path, RECORD)
    checks = (("sample_id", np.arange(count), np.arange(count)), ("shard_id", 0, manifest["num_shards"] - 1))
    for name, low, high in (*checks, ("seq_len", 1, manifest["max_length"])):
        values = index[name].astype(np.uint64)
        low, high = (np.broadcast_to(np.asarray(bound, np.uint64), values.shape) for bound in (low, high))
        bad = np.flatnonzero((values < low) | (values > high))
        if len(bad):
            at = int(bad[0])
            raise ValueError(f"{path}: {name} of record {at} is {values[at]}; allowed: {low[at]} to {high[at]}")
    return index


def _check_places(folder: Path, index: np.ndarray, shards: tuple[np.ndarray, ...], origin: FeatureOrigin) -> None:
    """Every sample lies inside its shard, its fields in order and without gaps."""
    lengths = index["seq_len"].astype(np.uint64)
    widths = [dtype.itemsize * width for dtype, width in _layout(origin).values()]
    sizes = np.asarray([len(shard) for shard in shards], np.uint64)[index["shard_id"]]
    needed, room = lengths * np.uint64(sum(widths)), index["offsets"][:, 0]
    # Offsets are unsigned and may be anything: adding to them could wrap around.
    bad = np.flatnonzero((needed > sizes) | (room > sizes - np.minimum(needed, sizes)))
    if len(bad):
        at = int(bad[0])
        raise ValueError(
            f"{folder}: sample {at} takes {needed[at]} bytes from byte {room[at]} of shard {index['shard_id'][at]}, "
            f"which has {sizes[at]}; allowed: samples inside their shards (the shard may be cut short)"
        )
    for field in range(1, len(FIELDS)):
        expected = room + lengths * np.uint64(sum(widths[:field]))
        bad = np.flatnonzero(index["offsets"][:, field] != expected)
        if len(bad):
            at = int(bad[0])
            found = index["offsets"][at, field]
            raise ValueError(
                f"{folder}: {FIELDS[field]} of sample {at} is at byte {found}; allowed: {expected[at]}, behind the field before"
            )


__all__ = ["DeepSpecCache"]
