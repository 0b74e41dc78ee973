"""Checkpoints of a training run: state, position in the data, calibration and configuration, written whole or not at all.

Orbax writes every step into a temporary folder and renames it at the end, while the run goes on; every host writes its own shards.
What is added here: a step that cannot be read, or whose arrays are not those that were written, is passed over with a message, and
the one before it is used.
"""

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from jax.experimental import multihost_utils

from dspark_jax.checksums import checksums
from dspark_jax.typing import PyTree

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """What one step of a run left behind; `position`, `config` and `calibration` (None where the run has none) are JSON values."""

    step: int
    state: PyTree
    position: Mapping[str, Any]
    config: Mapping[str, Any]
    calibration: Mapping[str, Any] | None = None


def _manager(folder: Path | str, keep: int | None, in_background: bool = False) -> ocp.CheckpointManager:
    options = ocp.CheckpointManagerOptions(
        max_to_keep=keep, enable_async_checkpointing=in_background, cleanup_tmp_directories=keep is not None
    )
    return ocp.CheckpointManager(Path(folder).absolute(), options=options)


def _layout(state: PyTree) -> dict[str, str]:
    """Dtype and shape of every array, by its path in the state."""
    return {jax.tree_util.keystr(path): f"{x.dtype}{list(x.shape)}" for path, x in jax.tree_util.tree_flatten_with_path(state)[0]}


class CheckpointWriter:
    """Writes the checkpoints of a run in the background, as a context. Every host of the run has one, on a folder that all share.

    The state's arrays may be given away as soon as `save` returns. A write that fails raises its error at the next `save` or at the
    end of the context, which waits for the last write.

    Attributes:
      keep: newest steps that stay, at least 1.
    """

    def __init__(self, folder: Path | str, keep: int = 3):
        if keep < 1:
            raise ValueError(f"keep is {keep}; at least the newest checkpoint must stay")
        self.keep = keep
        self._manager = _manager(folder, keep, in_background=True)

    def __enter__(self) -> "CheckpointWriter":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._manager.close()

    def save(
        self,
        step: int,
        state: PyTree,
        position: Mapping[str, Any],
        config: Mapping[str, Any],
        calibration: Mapping[str, Any] | None = None,
    ) -> None:
        """Begin to write one step, once the one before it is written. Steps from this one on that are there already are replaced.

        Args:
          state: arrays and PRNG keys, sharded or not.
          position: where the stream of data stands behind this step, as JSON values.
          config: what the run was started with, as JSON values.
          calibration: record of the drafter's survival model, as JSON values.
        """
        notes = {
            "position": dict(position),
            "config": dict(config),
            "calibration": None if calibration is None else dict(calibration),
            "layout": _layout(state),
            "checksums": checksums(state),
        }
        self._manager.wait_until_finished()
        # Later steps are those of a run that could not go on from them.
        for old in [old for old in self._manager.all_steps() if old >= step]:
            self._manager.delete(old)
        args = ocp.args.Composite(state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes))
        self._manager.save(step, args=args, force=True)

    def wait(self) -> None:
        """Until the last step is written."""
        self._manager.wait_until_finished()


def save_checkpoint(
    folder: Path | str,
    step: int,
    state: PyTree,
    position: Mapping[str, Any],
    config: Mapping[str, Any],
    keep: int = 3,
    calibration: Mapping[str, Any] | None = None,
) -> None:
    """Write one step and wait until it is there: `CheckpointWriter.save` for a single checkpoint.

    Raises:
      ValueError: `keep` is less than 1.
    """
    with CheckpointWriter(folder, keep) as writer:
        writer.save(step, state, position, config, calibration)


def saved_steps(folder: Path | str) -> list[int]:
    """Steps with a finished checkpoint, ascending; empty where the folder is not there. Every host of a run calls it."""
    # A host that came late would find the folder that another one has just made, and wait for it in Orbax where nobody is.
    if not multihost_utils.process_allgather(np.asarray(Path(folder).is_dir())).all():
        return []
    with _manager(folder, None) as manager:
        return sorted(manager.all_steps())


def restore_checkpoint(folder: Path | str, like: PyTree) -> Checkpoint | None:
    """The newest checkpoint that is whole, on every host of a run, or None where there is none at all.

    Args:
      like: a state of the same structure, concrete or abstract; its shapes, dtypes and shardings are those of the result.

    Raises:
      ValueError: there are checkpoints, but none can be read; the message gives the reason for each.
    """
    steps = saved_steps(folder)
    abstract = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), like)
    reasons = []
    for step in reversed(steps):
        found, reason = None, "another host of the run cannot read it"
        try:
            found = _restore_step(folder, step, abstract)
        except (ValueError, TypeError, KeyError, OSError, RuntimeError) as error:
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        if multihost_utils.process_allgather(np.asarray(found is not None)).all() and found is not None:
            return found
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
    found = checksums(state)
    changed = [path for path, total in found.items() if notes["checksums"].get(path) != total]
    if changed:
        raise ValueError(f"checksum differs: array {changed[0]} is not the one that was written")
    return Checkpoint(step, state, notes["position"], notes["config"], notes["calibration"])


__all__ = ["Checkpoint", "CheckpointWriter", "restore_checkpoint", "save_checkpoint", "saved_steps"]
