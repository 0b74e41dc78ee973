"""Tensors in files, and their restoration into parameter trees: only the slices that a device asks for are read."""

import dataclasses
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax import traverse_util
from safetensors import SafetensorError, safe_open

from dspark_jax.model_files import read_json
from dspark_jax.typing import Params

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True)
class TensorSource:
    """A tensor in a file: its shape, and a function that reads one rectangular piece of it."""

    shape: tuple[int, ...]
    read: Callable[[tuple[slice, ...]], np.ndarray]


def tree_name(name: str) -> str:
    """Dotted tree path of a tensor of a checkpoint: "model.layers.3.norm.weight" -> "layers_3.norm.weight"."""
    return re.sub(r"\blayers\.(\d+)\b", r"layers_\1", name.removeprefix("model."))


def flatten(tree: Params) -> dict[str, Any]:
    """Leaves of a parameter tree by dotted path."""
    return traverse_util.flatten_dict(dict(tree), sep=".")


def checkpoint_tensors(params: Params, dtype: Any) -> dict[str, np.ndarray]:
    """Host copies of the parameters under the names of the reference's checkpoints."""
    return {
        re.sub(r"\blayers_(\d+)\b", r"layers.\1", name): np.asarray(jax.device_get(leaf)).astype(dtype)
        for name, leaf in flatten(params).items()
    }


def safetensors_sources(folder: Path) -> dict[str, TensorSource]:
    """The tensors of a Hugging Face folder by their name in the checkpoint: one safetensors file, or shards with an index.

    Raises:
      ValueError: where a file is missing, damaged, or lacks a tensor that the index promises.
    """
    if (folder / SINGLE_FILE).is_file():
        return _opened(folder / SINGLE_FILE)
    if not (folder / INDEX_FILE).is_file():
        raise ValueError(f"{folder} has neither {SINGLE_FILE} nor {INDEX_FILE}; weights in other formats must be converted to safetensors")
    shard_of = read_json(folder, INDEX_FILE).get("weight_map")
    if not isinstance(shard_of, dict):
        raise ValueError(f"{folder / INDEX_FILE} has no weight_map; it must map every tensor to its file")
    shards = {shard: _opened(folder / shard) for shard in sorted(set(shard_of.values()))}
    absent = [name for name, shard in shard_of.items() if name not in shards[shard]]
    if absent:
        raise ValueError(f"{folder}: {INDEX_FILE} lists tensors that their files lack: {_some(absent)}")
    return {name: shards[shard][name] for name, shard in shard_of.items()}


def _opened(path: Path) -> dict[str, TensorSource]:
    if not path.is_file():
        raise ValueError(f"{path.parent} has no file {path.name}")
    try:
        file = safe_open(path, framework="np")
    except SafetensorError as error:
        raise ValueError(f"{path} is no safetensors file: {error}") from error

    def source(name: str) -> TensorSource:
        piece = file.get_slice(name)
        return TensorSource(tuple(piece.get_shape()), lambda index: piece[index] if index else file.get_tensor(name))

    return {name: source(name) for name in file.keys()}


def restore(
    abstract: Params,
    sources: Mapping[str, TensorSource],
    dtype: Any,
    shardings: Params | None,
    origin: str | os.PathLike[str],
) -> Params:
    """Fill a parameter tree from files, every leaf in the sharding asked for.

    Args:
      abstract: tree of `jax.ShapeDtypeStruct`, of which the shapes count.
      sources: by dotted tree path; exactly the leaves of `abstract`.
      dtype: of every restored leaf.
      shardings: tree of shardings like `abstract`; None puts every leaf whole on the default device.
      origin: what error messages call the checkpoint.

    Raises:
      ValueError: naming missing, unexpected or wrongly shaped tensors.
    """
    leaves = flatten(abstract)
    missing = sorted(leaves.keys() - sources.keys())
    unexpected = sorted(sources.keys() - leaves.keys())
    misshaped = [
        f"{name} {sources[name].shape} instead of {leaf.shape}"
        for name, leaf in leaves.items()
        if name in sources and sources[name].shape != leaf.shape
    ]
    problems = [
        f"{what}: {_some(names)}" for what, names in (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshaped)) if names
    ]
    if problems:
        raise ValueError(f"{origin} does not hold the tensors of its config; {'; '.join(problems)}")
    flat_shardings = {} if shardings is None else flatten(shardings)
    return traverse_util.unflatten_dict(
        {name: _restored(sources[name], np.dtype(dtype), flat_shardings.get(name)) for name in leaves}, sep="."
    )


def _restored(source: TensorSource, dtype: np.dtype, sharding: jax.sharding.Sharding | None) -> jax.Array:
    pieces: dict[tuple[tuple[int, int], ...], np.ndarray] = {}

    def read(index: Any) -> np.ndarray:
        # Devices that hold the same piece ask for it one after another.
        bounds = tuple(piece.indices(size)[:2] for piece, size in zip(index, source.shape, strict=True))
        if bounds not in pieces:
            pieces[bounds] = source.read(tuple(slice(*bound) for bound in bounds)).astype(dtype, copy=False)
        return pieces[bounds]

    if sharding is None:
        return jax.device_put(read((slice(None),) * len(source.shape)))
    return jax.make_array_from_callback(source.shape, sharding, read)


def _some(names: Iterable[str], limit: int = 8) -> str:
    listed = list(names)
    return ", ".join(listed[:limit]) + (f" and {len(listed) - limit} more" if len(listed) > limit else "")
