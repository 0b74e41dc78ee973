"""Let a target read the training texts once and keep what it says: a cache that any number of training runs read.

Which texts those are, and at which layers the target is tapped, is what the training run of a preset would have. A cache that was
begun is gone on with; its size is shown, and must fit the disk, before anything is written.
"""

import dataclasses
from pathlib import Path
from typing import Literal

import jax
import tyro
from rich.console import Console

from dspark_jax.feature_cache import CacheManifest
from dspark_jax.feature_writer import CacheConfig, write_feature_cache
from dspark_jax.sharding import make_mesh, start_multi_host
from dspark_jax.weights import load_target
from experiments.presets import PRESETS
from experiments.stored_features import features_origin, training_texts

Stored = Literal["float32", "bfloat16", "float8_e4m3fn"]


@dataclasses.dataclass(frozen=True)
class WriteFeatureCache:
    """What is read, and how it is stored; what is None is as the preset's training run has it.

    Attributes:
      preset: of `experiments/presets.py`.
      out: folder of the cache, the same for all hosts.
      target: folder, GGUF file or name of the target.
      data: .npz files of answered texts, as for `train`; held-out texts are left out.
      taps: layers whose outputs are stored, in the drafter's order; -1 for the embedding.
      lengths: tokens that texts are padded to while the target reads, ascending; texts are cut to the last.
      batch_size: texts that the target reads at once.
      features_dtype: of the tapped layers; float8 has a scale per position and layer.
      hidden_dtype: of the last hidden states, from which the target's distributions are made.
      shard_bytes: size that shards have, about.
      tensor: devices of this host that the target is split over.
      multi_host: this is one of several hosts that execute the same command, on a TPU pod or under SLURM; each writes its own shards.
      num_hosts: the same elsewhere, with the number of this `host`, from 0: hosts do not talk to each other.
    """

    preset: tyro.conf.Positional[str]
    out: Path = Path("out/features")
    target: str | None = None
    data: tuple[Path, ...] | None = None
    taps: tuple[int, ...] | None = None
    lengths: tuple[int, ...] | None = None
    batch_size: int = 8
    features_dtype: Stored = "bfloat16"
    hidden_dtype: Stored = "bfloat16"
    shard_bytes: int = 2**30
    tensor: int = 1
    multi_host: bool = False
    num_hosts: int = 1
    host: int = 0


def write_features(config: WriteFeatureCache, console: Console | None = None) -> CacheManifest:
    """Write this host's part of the cache, as far as it is missing.

    Raises:
      ValueError: the folder holds another cache, the disk has too little room, or a field does not fit the data, the target or the devices.
    """
    console = console or Console()
    if config.preset not in PRESETS:
        raise ValueError(f"preset is {config.preset!r}; known: {', '.join(sorted(PRESETS))}")
    if config.multi_host:
        if (config.num_hosts, config.host) != (1, 0):
            raise ValueError(f"num_hosts is {config.num_hosts} and host {config.host}; allowed with multi_host: neither, it finds them out")
        start_multi_host()
        config = dataclasses.replace(config, multi_host=False, num_hosts=jax.process_count(), host=jax.process_index())
    run = PRESETS[config.preset]()
    model, data = config.target or run.target, config.data or run.data
    local = jax.local_devices()
    if not 1 <= config.tensor <= len(local):
        raise ValueError(f"tensor is {config.tensor}; allowed: 1 to {len(local)}, the devices of this host")
    target, target_params = load_target(model, mesh=make_mesh(tensor=config.tensor, devices=local[: config.tensor]))
    texts = training_texts(dataclasses.replace(run, data=data).texts(target.spec.vocab_size), run.num_texts)
    stored = CacheConfig(
        lengths=config.lengths or run.lengths,
        batch_size=config.batch_size,
        features_dtype=config.features_dtype,
        hidden_dtype=config.hidden_dtype,
        shard_bytes=config.shard_bytes,
    )
    return write_feature_cache(
        config.out,
        target,
        target_params,
        features_origin(model, target, target_params, config.taps or tuple(run.drafter.taps)),
        texts,
        stored,
        process_index=config.host,
        process_count=config.num_hosts,
        note=f"Target {Path(model).name}, texts {', '.join(path.name for path in data)}.",
        console=console,
    )
