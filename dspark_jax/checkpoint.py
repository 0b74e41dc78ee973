"""Checkpoints of a training run: state, position in the data and configuration, written whole or not at all.

Orbax writes every step into a temporary folder and renames it at the end, and every host writes its own shards. What is added
here: a step that cannot be read, or whose arrays are not those that were written, is passed over with a message, and the one before
it is used.
"""

import dataclasses
import logging
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp

from dspark_jax.typing import PyTree

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What one step of a run left behind; `position` and `config` are JSON values."""

    step: int
    state: PyTree
    position: Mapping[str, Any]
    config: Mapping[str, Any]


def _manager(folder: Path | str, keep: int | None) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(max_to_keep=keep, enable_async_checkpointing=False, cleanup_tmp_directories=keep is not None)
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)


def _checksum(state: PyTree) -> int | None:
    """CRC of all bytes of the state, in the order of its leaves; None where other hosts hold parts of it."""
    total = 0
    for leaf in jax.tree.leaves(state):
        if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
            return None
        if isinstance(leaf, jax.Array) and jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            leaf = jax.random.key_data(leaf)
        total = zlib.crc32(np.ascontiguousarray(leaf).tobytes(), total)
    return total


def _layout(state: PyTree) -> dict[str, str]:
    """Dtype and shape of every array, by its path in the state."""
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in jax.tree_util.tree_flatten_with_path(state)[0]}


def save_checkpoint(
    folder: Path | str, step: int, state: PyTree, position: Mapping[str, Any], config: Mapping[str, Any], keep: int = 3
) -> None:
    """Write one step and forget all but the last `keep`. Every host of a run calls it. A step that is there already is replaced.

    Args:
      state: arrays and PRNG keys, sharded or not.
      position: where the stream of data stands behind this step, as JSON values.
      config: what the run was started with, as JSON values.

    Raises:
      ValueError: `keep` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep is {keep}; at least the newest checkpoint must stay")
    notes = {"position": dict(position), "config": dict(config), "layout": _layout(state), "checksum": _checksum(state)}
    with _manager(folder, keep) as manager:
        if step in manager.all_steps():
            manager.delete(step)
        manager.save(step, args=ocp.args.Composite(state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes)))


def saved_steps(folder: Path | str) -> list[int]:
    """Steps with a finished checkpoint, ascending; empty where the folder is not there."""
    if not Path(folder).is_dir():
        return []
    with _manager(folder, None) as manager:
        return sorted(manager.all_steps())


def restore_checkpoint(folder: Path | str, like: PyTree) -> Checkpoint | None:
    """The newest checkpoint that is whole, or None where there is none at all.

    Args:
      like: a state of the same structure, concrete or abstract; its shapes, dtypes and shardings are those of the result.

    Raises:
      ValueError: there are checkpoints, but none can be read; the message gives the reason for each.
    """
    steps = saved_steps(folder)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    reasons = []
    for step in reversed(steps):
        try:
            return _restore_step(folder, step, abstract)
        except (ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            log.warning("checkpoint of step %d in %s cannot be used, trying the one before it: %s", step, folder, reason)
            reasons.append(f"step {step}: {reason}")
    if reasons:
        raise ValueError(f"folder {str(folder)!r} has no checkpoint that can be read into this state; " + "; ".join(reasons))
    return None


def _restore_step(folder: Path | str, step: int, abstract: PyTree) -> Checkpoint:
    with _manager(folder, None) as manager:
        notes = manager.restore(step, args=ocp.args.Composite(notes=ocp.args.JsonRestore())).notes
        want = _layout(abstract)
        have = notes["layout"]
        for path in sorted(have.keys() | want.keys()):
            if have.get(path) != want.get(path):
                raise ValueError(f"array {path} is {have.get(path, 'absent')}, and {want.get(path, 'absent')} is wanted")
        state = manager.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(abstract))).state
    if notes["checksum"] is not None and _checksum(state) not in (notes["checksum"], None):
        raise ValueError("checksum differs: the arrays are not those that were written")
    return Checkpoint(step=step, state=state, position=notes["position"], config=notes["config"])


__all__ = ["Checkpoint", "restore_checkpoint", "save_checkpoint", "saved_steps"]
