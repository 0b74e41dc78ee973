"""Train a drafter on texts that a frozen target wrote: one resumable run with progress, metrics, checkpoints and a plot.

Everything a run leaves lies in one folder: `config.json`, `metrics.jsonl` (a line per step), `held_out.jsonl` (a line per
evaluation), `checkpoints/` and, at the end, `drafter/` in the reference's layout. A run that is started again goes on from its
newest checkpoint.
"""

import dataclasses
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark_jax.calibration_identity import drafter_fingerprint
from dspark_jax.checkpoint import restore_checkpoint, save_checkpoint
from dspark_jax.data import TokenBatch, TokenBatches, TokenSequences, load_token_sequences
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.evaluate import AnchorEstimate, estimate_at_anchors
from dspark_jax.protocols import Drafter, Target
from dspark_jax.train import TrainConfig, TrainState, init_train_state, require_finite, train_step
from dspark_jax.typing import Params
from dspark_jax.weights import LoadedDrafter, load_target, save_drafter

HELD_OUT_KINDS = {"greedy": 0, "sampled": 2}
"""Classes of `TokenSequences.temperature` that the two held-out figures are taken on."""


@dataclasses.dataclass(frozen=True)
class TrainRun:
    """What a run is made from.

    Attributes:
      target: folder, GGUF file or name of the frozen target.
      data: .npz files of answered texts (`dspark_jax.data.TokenSequences`).
      drafter: config of the drafter: a `DSparkConfig`, or that of the drafter to go on from.
      train: the optimizer step.
      out: the run's folder.
      batch_size: sequences a step.
      lengths: sequence lengths that a batch may be padded to, ascending.
      stop_step: end here although the schedule goes on; None for the schedule's end.
      held_out_steps: evaluate on held-out texts after these many steps (and at the end).
      held_out_sequences: number of held-out texts (all, where there are fewer), spread evenly over the domains. One half was written at
        temperature 0, and gives the accepted length there; the other at temperature 1, likewise.
      held_out_anchors: anchors drawn per held-out text.
      checkpoint_every: steps between two checkpoints.
      seed: of parameters, anchors and the order of the texts.
    """

    target: str
    data: tuple[Path, ...]
    drafter: Any
    train: TrainConfig
    out: Path
    batch_size: int = 64
    lengths: tuple[int, ...] = (512,)
    stop_step: int | None = None
    held_out_steps: tuple[int, ...] = ()
    held_out_sequences: int = 64
    held_out_anchors: int = 64
    checkpoint_every: int = 10
    seed: int = 0


def as_json(value: Any) -> Any:
    """A configuration in JSON values."""
    if dataclasses.is_dataclass(value):
        return {field.name: as_json(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, tuple):
        return [as_json(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def spread(sequences: TokenSequences, count: int) -> TokenSequences:
    """`count` sequences, or all where there are fewer, at even distances: all domains and temperatures in their shares."""
    if not len(sequences):
        raise ValueError("data has no held-out text of a temperature; both 0 and 1 are needed, as `experiments.run texts` writes them")
    count = min(count, len(sequences))
    mask = np.zeros(len(sequences), bool)
    mask[np.linspace(0, len(sequences) - 1, count).round().astype(int)] = True
    return sequences.select(mask)


def held_out_batches(sequences: TokenSequences, length: int, batch_size: int) -> Iterator[TokenBatch]:
    """Every sequence once."""
    stream = TokenBatches(sequences, batch_size=batch_size, lengths=(length,), min_loss_tokens=2)
    for batch, state in stream.stream():
        yield batch
        if state["epoch"]:
            return


def _estimate(
    run: TrainRun, target: Target, drafter: Drafter, target_params: Params, params: Params, texts: TokenSequences, draft_ids: Any
) -> AnchorEstimate:
    batches = held_out_batches(texts, run.lengths[-1], min(8, len(texts)))
    return estimate_at_anchors(target, drafter, target_params, params, batches, run.held_out_anchors, seed=run.seed, draft_ids=draft_ids)


def _append(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("a") as file:
        file.write(json.dumps(record) + "\n")


def _drop_from(path: Path, step: int) -> None:
    """Forget the records behind a checkpoint, which a resumed run writes again."""
    if path.exists():
        kept = [line for line in path.read_text().splitlines() if line and json.loads(line)["step"] <= step]
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_text("".join(line + "\n" for line in kept))
        unfinished.replace(path)


def _rounded(metrics: Mapping[str, Any]) -> dict[str, Any]:
    return {name: np.round(np.asarray(value, np.float64), 6).tolist() for name, value in metrics.items()}


def train(run: TrainRun, console: Console | None = None, given: LoadedDrafter | None = None) -> TrainState:
    """Run to `stop_step` and return the last state.

    Args:
      given: the drafter to go on from, written in the dtype that it came in; None for a DSpark with random parameters.

    Raises:
      ValueError: the folder holds a run with another configuration, or a field of `run` does not fit the data or the target.
    """
    console = console or Console()
    run.out.mkdir(parents=True, exist_ok=True)
    config = as_json(dataclasses.replace(run, stop_step=None, held_out_steps=(), out=Path("."), checkpoint_every=1))
    if given is not None:
        config["given"] = drafter_fingerprint(given.drafter, given.params, given.draft_ids)
    config_file = run.out / "config.json"
    if config_file.exists() and json.loads(config_file.read_text()) != config:
        raise ValueError(f"out is {run.out}; it holds a run with another configuration: choose another folder or remove it")

    target, target_params = load_target(run.target)
    drafter = DSparkDrafter(run.drafter) if given is None else given.drafter
    draft_ids = None if given is None else given.draft_ids
    texts = load_token_sequences(run.data, target.spec.vocab_size)
    held_out = {
        name: spread(texts.select((texts.heldout == 1) & (texts.temperature == kind)), run.held_out_sequences // 2)
        for name, kind in HELD_OUT_KINDS.items()
    }
    stream = TokenBatches(texts.select(texts.heldout == 0), batch_size=run.batch_size, lengths=run.lengths, seed=run.seed)
    # Only a run that can start leaves its configuration behind.
    config_file.write_text(json.dumps(config, indent=1) + "\n")
    params_rng, anchor_rng = jax.random.split(jax.random.key(run.seed))
    params = drafter.init(params_rng) if given is None else given.params
    state = init_train_state(anchor_rng, params, run.train.optimizer, run.train.trainable)
    position = None
    checkpoint = restore_checkpoint(run.out / "checkpoints", state)
    if checkpoint is not None:
        state, position = checkpoint.state, checkpoint.position
        console.print(f"resumed from step {checkpoint.step}")
    metrics_file, held_out_file = run.out / "metrics.jsonl", run.out / "held_out.jsonl"
    for file in (metrics_file, held_out_file):
        _drop_from(file, int(state.step))
    last = min(run.stop_step or run.train.optimizer.total_steps, run.train.optimizer.total_steps)
    lines = metrics_file.read_text().splitlines() if metrics_file.exists() else []
    anchors = sum(json.loads(line)["blocks"] for line in lines)

    columns = (
        TextColumn("train"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.fields[note]}"),
    )
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("train", total=last, completed=int(state.step), note="")
        batches = stream.stream(position)
        while int(state.step) < last:
            batch, position = next(batches)
            begin = time.perf_counter()
            state, metrics = train_step(target, drafter, run.train, state, target_params, batch.ids, batch.loss_mask, draft_ids)
            metrics = jax.device_get(metrics)
            seconds = time.perf_counter() - begin
            step = int(state.step)
            require_finite(metrics, step, batch.rows.tolist())
            anchors += float(metrics["blocks"])
            tokens = int((batch.ids != 0).sum())
            record = {"step": step, "anchors": anchors, "seconds": round(seconds, 3), "tokens_per_second": round(tokens / seconds, 1)}
            _append(metrics_file, record | _rounded(metrics))
            rates = " ".join(f"{rate:.2f}" for rate in metrics["accept_rate"])
            note = f"loss {metrics['loss']:.3f}  accept {rates}  accepted length ~{metrics['accepted_length']:.2f}  {seconds:.0f} s"
            progress.update(task, completed=step, note=note)
            if not console.is_terminal:
                console.print(f"step {step}/{last}  {note}")
            if step % run.checkpoint_every == 0 or step == last:
                save_checkpoint(run.out / "checkpoints", step, state, position, config)
            if step in run.held_out_steps or step == last:
                models = (target, drafter, target_params, state.params)
                estimates = {name: _estimate(run, *models, texts, draft_ids) for name, texts in held_out.items()}
                record = {name: dataclasses.asdict(estimate) for name, estimate in estimates.items()}
                _append(held_out_file, {"step": step, "anchors": anchors} | record)
                greedy, sampled = estimates["greedy"].accepted_length_greedy, estimates["sampled"].accepted_length_sampled
                note = f"accepted length {greedy:.3f} at temperature 0, {sampled:.3f} at 1"
                console.print(f"held out after {step} steps, {anchors / 1e6:.2f} M anchors: {note}")
    fields = {"dtype": "bfloat16"} if given is None else given.config_json
    dtype = jnp.dtype(fields.get("dtype") or fields.get("torch_dtype") or "float32")
    save_drafter(run.out / "drafter", drafter, state.params, config_json=fields, draft_ids=draft_ids, dtype=dtype)
    return state
