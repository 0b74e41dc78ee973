"""Train a confidence head onto a drafter that has none, everything else in it frozen: `python -m experiments.run add-confidence`.

What it drafts stays as it was, to the bit. The run's folder is that of any training run (`train_drafter`): the drafter with its head
lies in `drafter/` at the end, not yet calibrated.
"""

import dataclasses
from pathlib import Path

import jax
import tyro
from rich.console import Console

from dspark_jax.drafters.confidence_head import with_confidence_head
from dspark_jax.losses import DraftLossConfig
from dspark_jax.train import OptimizerConfig, TrainConfig, TrainState
from dspark_jax.weights import load_drafter, load_target
from experiments.train_drafter import TrainRun, train


@dataclasses.dataclass(frozen=True)
class AddConfidence:
    """What a head is trained from.

    Attributes:
      drafter: folder or name of a drafter without a confidence head.
      data: .npz files of texts that the target wrote, as for `train`.
      out: the run's folder.
      target: folder, GGUF file or name of the target.
      steps: optimizer steps. A head has a few hundred numbers and is soon done.
      learning_rate: at the end of the warm-up; far above that of a whole drafter.
      batch_size: sequences a step.
      micro_batches: parts that a batch is computed in.
      num_anchors: blocks drawn per sequence.
      lengths: sequence lengths that a batch may be padded to, ascending.
      held_out_sequences: held-out texts that are evaluated at the end.
      checkpoint_every: steps between two checkpoints.
      seed: of the head, the anchors and the order of the texts.
    """

    drafter: tyro.conf.Positional[str]
    data: tuple[Path, ...]
    out: Path = Path("out/add_confidence")
    target: str = "smollm2"
    steps: int = 200
    learning_rate: float = 0.01
    batch_size: int = 16
    micro_batches: int = 4
    num_anchors: int = 32
    lengths: tuple[int, ...] = (320, 416, 512)
    held_out_sequences: int = 32
    checkpoint_every: int = 20
    seed: int = 0


def add_confidence(options: AddConfidence, console: Console | None = None) -> TrainState:
    """Load the drafter, give it a head and train that.

    Raises:
      ValueError: the drafter has a confidence head, or a field does not fit the data or the models.
    """
    target, _ = load_target(options.target)
    given = load_drafter(options.drafter, target.spec)
    drafter, params = with_confidence_head(given.drafter, given.params, jax.random.key(options.seed))
    config = TrainConfig(
        optimizer=OptimizerConfig(total_steps=options.steps, learning_rate=options.learning_rate),
        loss=DraftLossConfig(chunk=1024),
        num_anchors=options.num_anchors,
        micro_batches=options.micro_batches,
        trainable="confidence_head",
    )
    run = TrainRun(
        target=options.target,
        data=options.data,
        drafter=drafter.config,
        train=config,
        out=options.out,
        batch_size=options.batch_size,
        lengths=options.lengths,
        held_out_sequences=options.held_out_sequences,
        checkpoint_every=options.checkpoint_every,
        seed=options.seed,
    )
    return train(run, console, dataclasses.replace(given, drafter=drafter, params=params, survival=None))
