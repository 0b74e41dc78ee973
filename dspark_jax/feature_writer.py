"""Writing a cache of target features: the target reads texts once, every process writes its own shards.

What goes into which shard is decided before the first is written, from the lengths of the texts alone. A shard is there whole or not at
all, so a run that was stopped goes on with the first shard that is missing and neither loses nor repeats a sample.
"""

import dataclasses
import functools
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.filesize import decimal
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark_jax.anchors import read_batch
from dspark_jax.data import TokenSequences
from dspark_jax.feature_cache import (
    DATASET,
    DTYPES,
    MANIFEST_FILE,
    SAMPLES_FILE,
    SCALED,
    SHARD_BYTES,
    SPLIT,
    CacheManifest,
    array_records,
    cache_bytes,
    num_records,
    read_samples,
    texts_fingerprint,
)
from dspark_jax.feature_samples import FeatureOrigin
from dspark_jax.model_files import require
from dspark_jax.protocols import Target
from dspark_jax.typing import Array, Int, Params

WRITER_OPTIONS = "group_size:1"
"""One record a group, for random access. ArrayRecord's own compression takes a fifth off bfloat16, for a thousandth of a second a MB."""


@dataclasses.dataclass(frozen=True)
class CacheConfig:
    """How a cache is written.

    Attributes:
      lengths: lengths that batches are padded to while the target reads, ascending; texts are cut to the last.
      batch_size: texts that the target reads at once.
      min_loss_tokens: texts with fewer answer tokens are left out (the reference's 14).
      features_dtype: "float32", "bfloat16" or "float8_e4m3fn", the last with a scale per position and tap.
      hidden_dtype: likewise of the last hidden states, from which the teacher's distributions are made: float8 shows there.
      shard_bytes: size that shards have, about.
    """

    lengths: tuple[int, ...] = (512,)
    batch_size: int = 8
    min_loss_tokens: int = 14
    features_dtype: str = "bfloat16"
    hidden_dtype: str = "bfloat16"
    shard_bytes: int = 2**30

    def __post_init__(self) -> None:
        if not self.lengths or self.lengths[0] < 1 or list(self.lengths) != sorted(set(self.lengths)):
            raise ValueError(f"lengths is {self.lengths}; allowed: ascending positive lengths")
        for name in ("batch_size", "min_loss_tokens", "shard_bytes"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} is {getattr(self, name)}; at least 1 is needed")
        for name in ("features_dtype", "hidden_dtype"):
            if getattr(self, name) not in DTYPES:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(DTYPES)}")


@dataclasses.dataclass(frozen=True, eq=False)
class CachePlan:
    """Everything about a cache that is known before the target has read a text.

    Attributes:
      text: number of the text of every sample, ascending.
      length: its tokens, cut.
    """

    manifest: CacheManifest
    text: Int[np.ndarray, "n"]
    length: Int[np.ndarray, "n"]

    @property
    def bytes(self) -> int:
        """Size on disk, at most."""
        return cache_bytes(self.manifest, self.length)

    def shard_samples(self, shard: int) -> range:
        """Numbers of the samples of a shard."""
        start = sum(self.manifest.shard_lengths[:shard])
        return range(start, start + self.manifest.shard_lengths[shard])

    def shard_bytes(self, shard: int) -> int:
        """Size of a shard on disk, at most."""
        samples = self.shard_samples(shard)
        return int(self.manifest.sample_bytes(self.length[samples.start : samples.stop]).sum()) + SHARD_BYTES


def plan_cache(origin: FeatureOrigin, texts: TokenSequences, config: CacheConfig, process_count: int = 1, note: str = "") -> CachePlan:
    """The samples and shards of a cache of `texts`; one shard a process or more, where there are enough samples.

    Raises:
      ValueError: no text has enough answer tokens.
    """
    longest = config.lengths[-1]
    enough = np.minimum(texts.answer_end, longest) - texts.answer_start.astype(np.int64) >= config.min_loss_tokens
    text = np.flatnonzero(enough)
    if not len(text):
        raise ValueError(f"texts has no text with at least {config.min_loss_tokens} answer tokens within {longest} tokens; 1 is needed")
    length = np.minimum(texts.lengths[text], longest)
    draft = CacheManifest(
        origin=origin,
        texts=texts_fingerprint(texts),
        features_dtype=config.features_dtype,
        hidden_dtype=config.hidden_dtype,
        max_length=longest,
        min_loss_tokens=config.min_loss_tokens,
        shard_lengths=(len(text),),
        note=note,
    )
    sizes = draft.sample_bytes(length)
    count = max(process_count, -(-int(sizes.sum()) // config.shard_bytes))
    # A sample belongs to the shard in which its middle lies when the whole is cut into equal parts; a part may have none.
    shard = ((np.cumsum(sizes) - sizes // 2) * count // sizes.sum()).astype(np.int64)
    shard_lengths = np.bincount(shard)
    return CachePlan(dataclasses.replace(draft, shard_lengths=tuple(shard_lengths[shard_lengths > 0].tolist())), text, length)


@functools.partial(jax.jit, static_argnames=("target", "taps", "features_dtype", "hidden_dtype"))
def _read(
    target: Target, target_params: Params, taps: tuple[int, ...], ids: Array, features_dtype: str, hidden_dtype: str
) -> dict[str, Array]:
    """What the target says of a batch, in the dtypes of the cache, [B, S, ...] each."""
    nothing = jnp.zeros((ids.shape[0], 1), jnp.int32)
    batch = read_batch(target, target_params, taps, ids, jnp.ones(ids.shape, bool), nothing, nothing == 0)
    features = batch.features.reshape(*ids.shape, len(taps), -1)
    return stored("features", features, features_dtype) | stored("last_hidden", batch.last_hidden, hidden_dtype)


def stored(name: str, values: Array, dtype: str) -> dict[str, Array]:
    """Hidden states as a record has them: in a dtype of `DTYPES`, those of float8 with a scale for all along the last axis."""
    if dtype != SCALED:
        return {name: values.astype(DTYPES[dtype])}
    values = values.astype(jnp.float32)
    largest = jnp.max(jnp.abs(values), axis=-1)
    scale = jnp.where(largest > 0, largest / float(jnp.finfo(DTYPES[SCALED]).max), 1.0)
    return {name: (values / scale[..., None]).astype(DTYPES[SCALED]), f"{name}_scale": scale}


def _examples(
    target: Target, target_params: Params, texts: TokenSequences, plan: CachePlan, config: CacheConfig, samples: range
) -> Iterator[dict[str, Any]]:
    """The records of a shard, in order."""
    manifest = plan.manifest
    for start in range(samples.start, samples.stop, config.batch_size):
        batch = range(start, min(start + config.batch_size, samples.stop))
        rung = int(np.searchsorted(config.lengths, plan.length[batch.start : batch.stop].max()))
        # A batch that is not full repeats padding, so that one program serves all batches of a length.
        ids = np.zeros((config.batch_size, config.lengths[rung]), np.int32)
        for row, sample in enumerate(batch):
            first = texts.offsets[plan.text[sample]]
            ids[row, : plan.length[sample]] = texts.tokens[first : first + plan.length[sample]]
        said = jax.device_get(
            _read(target, target_params, manifest.origin.taps, jnp.asarray(ids), manifest.features_dtype, manifest.hidden_dtype)
        )
        for row, sample in enumerate(batch):
            text, length = int(plan.text[sample]), int(plan.length[sample])
            place = np.arange(length)
            yield {
                "text": np.asarray(text, np.int64),
                "ids": ids[row, :length],
                "loss_mask": (place >= texts.answer_start[text]) & (place < texts.answer_end[text]),
                **{name: values[row, :length] for name, values in said.items()},
            }


def _settle(path: Path, unfinished: Path) -> None:
    """Give a file that is written its name, once its bytes are on disk."""
    with open(unfinished, "rb+") as file:
        os.fsync(file.fileno())
    os.replace(unfinished, path)


def _write_shard(path: Path, records: Iterable[bytes], length: int, advance: Callable[[], None]) -> None:
    unfinished = path.with_name(f".{path.name}.unfinished")
    try:
        writer = array_records().ArrayRecordWriter(str(unfinished), WRITER_OPTIONS)
        try:
            for record in records:
                writer.write(record)
                advance()
        finally:
            writer.close()
        if (written := num_records(unfinished)) != length:
            raise ValueError(f"{unfinished} has {written} records; allowed: {length}")
        _settle(path, unfinished)
    finally:
        unfinished.unlink(missing_ok=True)


def _write_plan(folder: Path, plan: CachePlan, process_index: int) -> CachePlan:
    """The plan that the folder has, or `plan`, which it then has."""
    if (folder / MANIFEST_FILE).exists():
        found = CacheManifest.read(folder)
        names = [field.name for field in dataclasses.fields(found) if field.name not in ("shard_lengths", "note")]
        differ = [name for name in names if getattr(found, name) != getattr(plan.manifest, name)]
        if differ:
            values = "; ".join(f"{name} is {getattr(found, name)!r}, now {getattr(plan.manifest, name)!r}" for name in differ)
            raise ValueError(f"{folder} holds another cache, which it does not go on with: {values}")
        text, length = read_samples(folder, found)
        return CachePlan(found, text, length)
    # Several processes may write the same two files: each under a name of its own, and the manifest, which says that both are there, last.
    own = f".{process_index}.unfinished"
    unfinished = folder / (SAMPLES_FILE + own)
    with open(unfinished, "wb") as file:
        np.savez(file, text=plan.text, length=plan.length)
    _settle(folder / SAMPLES_FILE, unfinished)
    unfinished = folder / (MANIFEST_FILE + own)
    unfinished.write_text(json.dumps(dataclasses.asdict(plan.manifest), indent=1) + "\n", encoding="utf-8")
    _settle(folder / MANIFEST_FILE, unfinished)
    return plan


def write_feature_cache(
    folder: str | Path,
    target: Target,
    target_params: Params,
    origin: FeatureOrigin,
    texts: TokenSequences,
    config: CacheConfig = CacheConfig(),
    *,
    process_index: int = 0,
    process_count: int = 1,
    note: str = "",
    console: Console | None = None,
) -> CacheManifest:
    """Write this process's shards, as far as they are missing; whoever writes the last one describes the cache.

    Args:
      target_params: on devices of this process alone, in the dtype that the target is to run in; processes do not wait for each other.
      origin: its taps are what is read; its target and template say what the features are good for.
      process_index, process_count: shard i is written by process i modulo `process_count`. The folder is the same for all processes.
      note: for people: where target and texts came from.
      console: where size and progress are shown.

    Raises:
      ValueError: the disk has less room than the missing shards take, `folder` holds another cache, or `origin` or a token of `texts`
        does not fit the target.
    """
    folder, console = Path(folder), console or Console()
    if not 0 <= process_index < process_count:
        raise ValueError(f"process_index is {process_index}; allowed: 0 to {process_count - 1}")
    if origin.hidden_size != target.spec.width:
        raise ValueError(f"hidden_size is {origin.hidden_size}; allowed: {target.spec.width}, the target's")
    if max(origin.taps) >= target.spec.num_layers:
        raise ValueError(f"taps is {origin.taps}; allowed: -1 to {target.spec.num_layers - 1}, the target's layers")
    texts.checked("texts", target.spec.vocab_size)
    folder.mkdir(parents=True, exist_ok=True)
    plan = _write_plan(folder, plan_cache(origin, texts, config, process_count, note), process_index)
    manifest = plan.manifest
    paths = [manifest.shard_path(folder, shard) for shard in range(len(manifest.shard_lengths))]
    missing = [shard for shard, path in enumerate(paths) if not path.exists()]
    needed, free = sum(plan.shard_bytes(shard) for shard in missing), shutil.disk_usage(folder).free
    console.print(
        f"features of {len(plan.text):,} texts, {int(plan.length.sum()):,} tokens: {decimal(plan.bytes)} in {len(paths)} shards, "
        f"{decimal(needed)} of it to be written; {decimal(free)} are free in {folder}"
    )
    if needed > free:
        raise ValueError(f"{folder} has {free} bytes free; {needed} are needed for the {len(missing)} shards that are missing")
    features = manifest.features()
    own = [shard for shard in missing if shard % process_count == process_index]
    columns = (TextColumn("features"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("features", total=sum(manifest.shard_lengths[shard] for shard in own))
        for shard in own:
            examples = _examples(target, target_params, texts, plan, config, plan.shard_samples(shard))
            records = (features.serialize_example(example) for example in examples)
            _write_shard(paths[shard], records, manifest.shard_lengths[shard], lambda: bar.advance(task))
    if all(path.exists() for path in paths):
        _describe(folder, plan, sum(path.stat().st_size for path in paths))
    return manifest


def _describe(folder: Path, plan: CachePlan, size: int) -> None:
    """Metadata by which TFDS reads the folder: written once all shards are there, the same by whoever writes it."""
    tfds = require("tensorflow_datasets", "data", "a cache of features")
    template = tfds.core.naming.ShardedFileTemplate(
        data_dir=folder,
        dataset_name=DATASET,
        split=SPLIT,
        filetype_suffix="array_record",
        template=tfds.core.naming.DEFAULT_FILENAME_TEMPLATE,
    )
    manifest = plan.manifest
    split = tfds.core.SplitInfo(name=SPLIT, shard_lengths=list(manifest.shard_lengths), num_bytes=size, filename_template=template)
    tfds.folder_dataset.write_metadata(
        data_dir=folder,
        features=manifest.features(),
        split_infos=[split],
        version="1.0.0",
        filename_template=template,
        # The check would read with TensorFlow.
        check_data=False,
        description=f"Features of a frozen target, for training a drafter. {manifest.note}".strip(),
        metadata=tfds.core.MetadataDict(dataclasses.asdict(manifest)),
        disable_shuffling=True,
    )


__all__ = ["CacheConfig", "CachePlan", "plan_cache", "stored", "write_feature_cache"]
