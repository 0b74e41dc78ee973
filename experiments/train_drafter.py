"""Train a drafter on texts that a frozen target wrote: one resumable run, from one CPU to a pod.

Everything a run leaves lies in one folder: `config.json`, `metrics.jsonl` (a line per step), `held_out.jsonl` (a line per
evaluation), `tensorboard/`, `checkpoints/` and, at the end, `drafter/` in the reference's layout. A run that is started again goes on
from its newest checkpoint, on whatever mesh. SIGTERM and SIGINT let it finish its step, write a checkpoint and end.

Every host of a run executes `train` with the same `TrainRun`, on a folder that all of them see, and reads its own rows of each batch.
"""

import dataclasses
import hashlib
import json
import math
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import Mesh
from rich.console import Console

from dspark_jax.batches import TokenBatches
from dspark_jax.calibration_identity import drafter_fingerprint
from dspark_jax.checkpoint import CheckpointWriter, restore_checkpoint
from dspark_jax.data import DOMAINS, TokenSequences, load_token_sequences, most_frequent_ids
from dspark_jax.decode import DecodeParams
from dspark_jax.drafters.kinds import drafter_from
from dspark_jax.protocols import Target
from dspark_jax.sharded_training import sharded_train_state, sharded_train_step, sharded_train_step_on_features
from dspark_jax.sharding import batch_share, global_batch, make_mesh, on_every_host, place, replicated
from dspark_jax.train import TrainConfig, TrainState, require_finite
from dspark_jax.typing import Params
from dspark_jax.weights import LoadedDrafter, load_target, save_drafter
from experiments.held_out import TEMPERATURES, estimate, held_out_texts, measured_accepted_length, spread
from experiments.stop_signals import StopSignals
from experiments.stored_features import feature_rows, features_origin, open_features, stored_as, stored_taps, text_rows, training_texts
from experiments.training_costs import StepCosts
from experiments.training_log import TrainingLog


@dataclasses.dataclass(frozen=True)
class TrainRun:
    """What a run is made from.

    Attributes:
      target: folder, GGUF file or name of the frozen target.
      data: .npz files of answered texts (`dspark_jax.data.TokenSequences`).
      drafter: config of the drafter, of any kind in `drafters.kinds`; or that of the drafter to go on from.
      train: the optimizer step.
      out: the run's folder; all hosts of a run see the same.
      draft_vocabulary: .npy file with target ids, the most frequent first. A random start drafts from the first
        `drafter.draft_vocab_size` of them; None: from so many that are the most frequent in the texts to learn from.
      domains: texts of these domains are learnt from and evaluated on.
      num_texts: texts to learn from, spread evenly over those that there are; None for all of them.
      batch_size: sequences a step, over all hosts.
      lengths: sequence lengths that a batch may be padded to, ascending.
      packed: several sequences in a row of the one length, as many as fit; `batch_size` then counts rows.
      features: folder of a cache of this target's features of these texts (`write_feature_cache`); None where the target reads the
        texts in the step itself. Held-out texts are always read by the target.
      stop_step: end here although the schedule goes on; None for the schedule's end.
      held_out_steps: evaluate on held-out texts after these many steps (and at the end).
      held_out_sequences: number of held-out texts (all, where there are fewer), spread evenly over the domains. One half was written at
        temperature 0, and gives the accepted length there; the other at temperature 1, likewise.
      held_out_anchors: anchors drawn per held-out text.
      measure_every: evaluate after every so many steps as well, and decode held-out prompts then and at the end; 0 for never.
      measure_prompts: prompts that are decoded, at each of both temperatures.
      measure_tokens: new tokens of each.
      checkpoint_every: steps between two checkpoints.
      keep: newest checkpoints that stay.
      mesh: devices along data x fsdp x tensor. None: along data alone, as many as can share the rows of a micro-batch.
      seed: of parameters, anchors and the order of the texts.
    """

    target: str
    data: tuple[Path, ...]
    drafter: Any
    train: TrainConfig
    out: Path
    draft_vocabulary: Path | None = None
    domains: tuple[str, ...] = DOMAINS
    num_texts: int | None = None
    batch_size: int = 64
    lengths: tuple[int, ...] = (512,)
    packed: bool = False
    features: Path | None = None
    stop_step: int | None = None
    held_out_steps: tuple[int, ...] = ()
    held_out_sequences: int = 64
    held_out_anchors: int = 64
    measure_every: int = 0
    measure_prompts: int = 4
    measure_tokens: int = 64
    checkpoint_every: int = 10
    keep: int = 3
    mesh: tuple[int, int, int] | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        for name, lowest in (("measure_every", 0), ("measure_prompts", 1), ("measure_tokens", 1), ("checkpoint_every", 1), ("keep", 1)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} is {getattr(self, name)}; at least {lowest} is needed")
        if not self.domains or not set(self.domains) <= set(DOMAINS):
            raise ValueError(f"domains is {self.domains}; allowed: one or more of {', '.join(DOMAINS)}")
        if self.num_texts is not None and self.num_texts < 1:
            raise ValueError(f"num_texts is {self.num_texts}; at least 1 is needed, or None for all")

    def texts(self, vocab_size: int) -> TokenSequences:
        """The texts of `data` in the run's domains, held-out ones among them.

        Raises:
          ValueError: a file is missing, damaged, or holds ids outside the vocabulary.
        """
        texts = load_token_sequences(self.data, vocab_size)
        return texts.select(np.isin(texts.domain, [DOMAINS.index(name) for name in self.domains]))

    def draft_ids(self, texts: TokenSequences) -> np.ndarray | None:
        """The target ids that a random start drafts from, ascending; None for all.

        Args:
          texts: those to learn from.

        Raises:
          ValueError: `draft_vocabulary` is missing, not asked for, or holds too few ids.
        """
        size = self.drafter.draft_vocab_size
        given = f"draft_vocabulary is {self.draft_vocabulary}"
        if self.draft_vocabulary is None:
            return None if size is None else most_frequent_ids(texts, size, self.drafter.vocab_size)
        if size is None:
            raise ValueError(f"{given} and drafter.draft_vocab_size is None; allowed: a size, or no file")
        if not self.draft_vocabulary.is_file():
            raise ValueError(f"{given}; allowed: an existing .npy file of ids, the most frequent first")
        ids = np.unique(np.load(self.draft_vocabulary)[:size]).astype(np.int32)
        if len(ids) != size or ids[-1] >= self.drafter.vocab_size:
            raise ValueError(f"{given}; allowed: a file whose first {size} entries are different ids below {self.drafter.vocab_size}")
        return ids


MEASURED = ("held_out_steps", "measure_every", "measure_prompts", "measure_tokens")
FREE = (*MEASURED, "out", "draft_vocabulary", "features", "stop_step", "checkpoint_every", "keep", "mesh")
"""Fields that may change from one start of a run to the next. The others are in `config.json`, with what a cache of features and a file of
draft ids hold."""


def as_json(value: Any) -> Any:
    """A configuration in JSON values."""
    if dataclasses.is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def run_mesh(run: TrainRun) -> Mesh:
    """The mesh that a run asks for. A single host may leave devices out; several use all that they have.

    Raises:
      ValueError: the sizes do not fit the devices, or the rows of a micro-batch cannot be split evenly over data x fsdp.
    """
    devices, rows = jax.devices(), run.batch_size // run.train.micro_batches
    alone = jax.process_count() == 1
    data, fsdp, tensor = run.mesh or (math.gcd(len(devices), rows) if alone else len(devices), 1, 1)
    if rows * run.train.micro_batches != run.batch_size or rows % (data * fsdp):
        raise ValueError(
            f"batch_size is {run.batch_size} in {run.train.micro_batches} micro_batches; "
            f"allowed are micro-batches of a multiple of data x fsdp = {data * fsdp} rows"
        )
    return make_mesh(data, fsdp, tensor, devices[: data * fsdp * tensor] if alone else None)


@dataclasses.dataclass(frozen=True)
class _Models:
    """What a run computes with, apart from the state that it trains."""

    target: Target
    target_params: Params
    drafter: Any
    draft_ids: Any
    held_out: Mapping[str, TokenSequences]

    def evaluate(self, run: TrainRun, params: Params, measure: bool) -> dict[str, Any]:
        """Figures of the held-out texts; with `measure`, their prompts are decoded as well."""
        models = (self.target, self.drafter, self.target_params, params)
        rest = (run.lengths[-1], run.held_out_anchors, run.seed, self.draft_ids)
        record: dict[str, Any] = {name: dataclasses.asdict(estimate(*models, texts, *rest)) for name, texts in self.held_out.items()}
        if measure:
            decoding = DecodeParams.of(self.target, self.target_params, params, self.draft_ids)
            record["measured"] = {
                name: measured_accepted_length(
                    self.target,
                    self.drafter,
                    decoding,
                    spread(texts, run.measure_prompts),
                    TEMPERATURES[name],
                    run.measure_tokens,
                    run.seed,
                )
                for name, texts in self.held_out.items()
            }
        return record


def _over_hosts(stop: str | None, own_ids: np.ndarray, num_shares: int) -> tuple[bool, int]:
    """What all hosts must see alike: whether any of them is to stop, and the tokens of the whole batch."""
    told = multihost_utils.process_allgather(np.asarray([stop is not None, (own_ids != 0).sum()], np.int32)).reshape(-1, 2)
    # Hosts that differ along the tensor axis alone have read the same rows.
    return bool(told[:, 0].any()), int(told[:, 1].sum()) * num_shares // len(told)


def _require_finite(metrics: Mapping[str, Any], step: int, stream: TokenBatches, position: Mapping[str, int] | None) -> None:
    """`train.require_finite` with the texts that all hosts had in the batch at `position`."""
    if not np.isfinite([metrics["loss"], metrics["grad_norm"]]).all():
        batch, _ = next(dataclasses.replace(stream, shard_index=0, shard_count=1).stream(position))
        require_finite(metrics, step, batch.rows.tolist())


def _configuration(run: TrainRun, given: LoadedDrafter | None, ids: Any) -> dict[str, Any]:
    """What a run that is started again must have in common with the run that it goes on with."""
    config = {name: value for name, value in as_json(run).items() if name not in FREE}
    if run.features is not None:
        config["features"] = as_json(stored_as(run.features))
    if given is None:
        return config if ids is None else config | {"draft_ids": hashlib.sha256(ids.tobytes()).hexdigest()}
    if run.draft_vocabulary is not None:
        raise ValueError(f"draft_vocabulary is {run.draft_vocabulary}; allowed where a drafter is gone on with: None, it has its own")
    return config | {"given": drafter_fingerprint(given.drafter, given.params, given.draft_ids)}


def _write_once(file: Path, config: Mapping[str, Any]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    if jax.process_index() == 0 and not file.exists():
        unfinished = file.with_suffix(".unfinished")
        unfinished.write_text(json.dumps(config, indent=1) + "\n")
        unfinished.replace(file)


def train(run: TrainRun, console: Console | None = None, given: LoadedDrafter | None = None) -> TrainState:
    """Run to `stop_step`, or until a signal asks to stop, and return the last state.

    Args:
      given: the drafter to go on from, written in the dtype that it came in; None for random parameters.

    Raises:
      ValueError: the folder holds a run with another configuration, a field of `run` does not fit the data, the target or the devices, or
        the features that it names were made from something else.
      FloatingPointError: the loss is no longer a number; names the texts of the batch.
    """
    first_host = jax.process_index() == 0
    console = console or Console(quiet=not first_host)
    texts = run.texts(run.drafter.vocab_size)
    learnt = training_texts(texts, run.num_texts)
    ids = run.draft_ids(learnt) if given is None else given.draft_ids
    config, config_file = _configuration(run, given, ids), run.out / "config.json"
    if config_file.exists() and json.loads(config_file.read_text()) != config:
        raise ValueError(f"out is {run.out}; it holds a run with another configuration: choose another folder or remove it")
    with StopSignals() as signals:
        mesh = run_mesh(run)
        target, target_params = load_target(run.target, mesh=mesh)
        drafter = drafter_from(run.drafter) if given is None else given.drafter
        draft_ids = None if ids is None else place(ids, replicated(mesh))
        models = _Models(target, target_params, drafter, draft_ids, held_out_texts(texts, run.held_out_sequences))
        share, num_shares = batch_share(mesh, run.batch_size)
        stream = TokenBatches(
            learnt,
            run.batch_size,
            run.lengths,
            run.seed,
            shard_index=share,
            shard_count=num_shares,
            packed=run.packed,
        )
        cache = None
        if run.features is not None:
            taps = stored_taps(run.features, tuple(drafter.taps))
            cache = open_features(run.features, features_origin(run.target, target, target_params, taps), stream)
        # Only a run that can start leaves its configuration behind.
        _write_once(config_file, config)

        state = sharded_train_state(mesh, drafter, run.train, run.seed, None if given is None else given.params)
        calibration, position = None if given is None else given.survival, None
        checkpoint = restore_checkpoint(run.out / "checkpoints", state)
        if checkpoint is not None:
            state, position, calibration = checkpoint.state, checkpoint.position, checkpoint.calibration
            console.print(f"resumed from step {checkpoint.step}")
        step = int(state.step)
        last = min(run.stop_step or run.train.optimizer.total_steps, run.train.optimizer.total_steps)
        console.print(f"mesh data x fsdp x tensor: {' x '.join(map(str, mesh.devices.shape))} of {jax.device_count()} devices")
        compiled = sharded_train_step if cache is None else sharded_train_step_on_features
        take_step = compiled(mesh, target, drafter, run.train)
        costs = StepCosts(mesh, target, drafter, run.train, run.batch_size, draft_ids, online=cache is None)
        stopping = False
        with (
            CheckpointWriter(run.out / "checkpoints", run.keep) as writer,
            TrainingLog(run.out, console, step, last, writes=first_host) as log,
        ):
            batches = text_rows(stream.stream(position)) if cache is None else feature_rows(stream.stream(position), cache)
            while step < last and not stopping:
                before = position
                rows, position = next(batches)
                begin = time.perf_counter()
                ids, loss_mask, segment, *features = global_batch(mesh, run.batch_size, rows)
                state, metrics = take_step(state, target_params, ids, loss_mask, draft_ids, segment, *features)
                metrics = jax.device_get(metrics)
                seconds = time.perf_counter() - begin
                step += 1
                _require_finite(metrics, step, stream, before)
                stopping, tokens = _over_hosts(signals.received, rows[0], num_shares)
                log.step(step, metrics | costs.of(seconds, tokens, ids.shape[1]))
                if step % run.checkpoint_every == 0 or step == last or stopping:
                    writer.save(step, state, position, config, calibration)
                measure = run.measure_every > 0 and (step % run.measure_every == 0 or step == last)
                if (measure or step in run.held_out_steps or step == last) and (step == last or not stopping):
                    log.held_out(step, models.evaluate(run, state.params, measure))
            if step < last:
                writer.wait()
                how = "its checkpoint is written, and the same command goes on from it"
                log.say(f"{signals.received or 'a signal'} came: stopped after step {step} of {last}; {how}")
                return state
        params = on_every_host(state.params)
    if first_host:
        fields = {"dtype": "bfloat16"} if given is None else given.config_json
        dtype = jnp.dtype(fields.get("dtype") or fields.get("torch_dtype") or "float32")
        save_drafter(run.out / "drafter", drafter, params, config_json=fields, draft_ids=draft_ids, dtype=dtype)
    return state
