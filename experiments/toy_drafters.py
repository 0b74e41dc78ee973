"""Drafters for the toy target: one cell is one drafter, trained, decoded, calibrated, and its figures.

A cell is plain data, so that sweeps vary any field of it; `run_toy_cell` gives a record of plain numbers. All cells of a budget are
trained on the same texts for as many steps, every anchor of every text being used: block drafters draw all of them, and drafters that
go token by token have no others.
"""

import dataclasses
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from rich.console import Console

from dspark_jax.batches import TokenBatches
from dspark_jax.data import TokenSequences, most_frequent_ids
from dspark_jax.drafters.dflash import DFlashConfig
from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.kinds import drafter_from
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.losses import DraftLossConfig
from dspark_jax.targets.dense import DenseConfig
from dspark_jax.train import OptimizerConfig, TrainConfig, init_train_state, require_finite, train_step
from dspark_jax.typing import Params
from experiments.toy_rounds import decode_prompts, figures_of
from experiments.toy_target import PreparedTarget, ToyTargetConfig, prepare_target
from experiments.toy_texts import MASK_ID

WORK = Path("out/toy_suite")
"""Where targets are kept; git ignores it."""

Kind = Literal["dspark", "dflash", "eagle3", "mtp"]
Confidence = Literal["head", "largest", "entropy", "none"]

FULL_LOSS = DraftLossConfig(ce=0.1, l1=0.9, confidence=1.0)
LOSSES: Mapping[str, DraftLossConfig] = {
    "dspark": FULL_LOSS,
    "dflash": DraftLossConfig(ce=1.0, l1=0.0, confidence=0.0),
    "eagle3": DraftLossConfig(ce=0.0, l1=0.0, confidence=0.0, soft_ce=1.0),
    "mtp": FULL_LOSS,
}
"""What each kind is trained with where a cell does not say: as the reference trains it, and MTP, which it has not, as DSpark."""


@dataclasses.dataclass(frozen=True)
class ToyCell:
    """One drafter on one toy target, and how it is measured.

    Attributes:
      drafter: its kind.
      num_layers: of the parallel backbone (DSpark, DFlash); the others have one layer.
      block_size: G.
      markov_rank, markov_head_type: of DSpark's sequential head; rank 0 for none.
      confidence: where the chance of a draft to survive is read: a trained head (DSpark), the drafter's own distribution (see
        `draft_scores`), or nowhere. None: the head for DSpark, "largest" for the others.
      detach_confidence: keep the confidence loss away from the rest of DSpark.
      loss: weights of the loss; None for what `LOSSES` has for the kind.
      loss_decay: position weights exp(-k / loss_decay) of the parallel backbone; None for equal ones.
      step_loss_decay: weight of step t of Eagle3 and MTP is step_loss_decay^t; None for the kind's own.
      taps: layers of the target that are read (MTP reads its last hidden state).
      draft_vocab_size: so many tokens, the most frequent of the training texts, can be drafted; None for all.
      texts: "on_policy": the target's own answers; "off_policy": the same windows as they stand in the files.
      verifier: as in `DecodePlan`.
      steps, batch_size, learning_rate, algorithm: optimizer steps on so many texts, as in `OptimizerConfig`; Muon, since the steps are
        few.
      prompts: held-out prompts that are decoded, at temperature 0 and at 1; timed_prompts: of them, so many also plainly, for speed.
      seed: of parameters, order of the texts, anchors and decoding.
    """

    drafter: Kind = "dspark"
    num_layers: int = 2
    block_size: int = 7
    markov_rank: int = 64
    markov_head_type: str = "vanilla"
    confidence: Confidence | None = None
    detach_confidence: bool = False
    loss: DraftLossConfig | None = None
    loss_decay: float | None = 4.0
    step_loss_decay: float | None = None
    taps: tuple[int, ...] = (0, 1, 2)
    draft_vocab_size: int | None = None
    texts: Literal["on_policy", "off_policy"] = "on_policy"
    verifier: Literal["token", "block"] = "token"
    steps: int = 100
    batch_size: int = 4
    learning_rate: float = 8e-3
    algorithm: Literal["adamw", "muon"] = "muon"
    prompts: int = 48
    timed_prompts: int = 12
    seed: int = 0
    target: ToyTargetConfig = ToyTargetConfig()

    def __post_init__(self) -> None:
        for name, lowest in (("num_layers", 1), ("block_size", 1), ("steps", 1), ("batch_size", 1), ("prompts", 2), ("timed_prompts", 2)):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are integers of at least {lowest}")
        choices: Mapping[str, tuple[Any, ...]] = {
            "drafter": tuple(LOSSES),
            "confidence": (None, "head", "largest", "entropy", "none"),
            "texts": ("on_policy", "off_policy"),
        }
        for name, allowed in choices.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} is {getattr(self, name)!r}; allowed: {', '.join(map(str, allowed))}")
        if self.confidence == "head" and self.drafter != "dspark":
            raise ValueError(f"confidence is 'head' with drafter {self.drafter!r}; allowed there: largest, entropy, none")
        if self.prompts > self.target.held_out_prompts:
            raise ValueError(f"prompts is {self.prompts}; the target has {self.target.held_out_prompts} (target.held_out_prompts)")
        if self.timed_prompts > self.prompts:
            raise ValueError(f"timed_prompts is {self.timed_prompts}; allowed are 2 to {self.prompts}, the number of prompts")
        if self.block_size > self.target.answer_tokens - 2:
            room = f"allowed are 1 to {self.target.answer_tokens - 2}"
            raise ValueError(f"block_size is {self.block_size}; {room}, so that a round fits into an answer (target.answer_tokens)")
        # A cell that can't be built is refused where it is written down.
        drafter_config(self)

    @property
    def train(self) -> TrainConfig:
        """The optimizer step."""
        return TrainConfig(
            optimizer=OptimizerConfig(self.steps, self.learning_rate, warmup_ratio=0.1, algorithm=self.algorithm),
            loss=dataclasses.replace(self.loss or LOSSES[self.drafter], chunk=1024),
            num_anchors=self.anchors_per_text,
        )

    @property
    def anchors_per_text(self) -> int:
        """All positions of an answer but its last."""
        return self.target.answer_tokens - 1

    @property
    def anchors(self) -> int:
        """Blocks that the whole training learns from; every drafter with these texts, steps and batches has as many."""
        return self.steps * self.batch_size * self.anchors_per_text


def _layer(target: DenseConfig) -> dict[str, Any]:
    """A draft layer is one of the target's."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim", "rms_norm_eps", "rope_theta")
    return {name: getattr(target, name) for name in names} | {"num_target_layers": target.num_layers}


def drafter_config(cell: ToyCell) -> Any:
    """The config of a cell's drafter.

    Raises:
      ValueError: naming the field of the drafter's config that does not fit.
    """
    fields = _layer(cell.target.network.config)
    fields |= {"block_size": cell.block_size, "draft_vocab_size": cell.draft_vocab_size}
    confidence = cell.confidence or ("head" if cell.drafter == "dspark" else "largest")
    score = confidence if confidence in ("largest", "entropy") else None
    if cell.drafter in ("dspark", "dflash"):
        fields |= {"num_layers": cell.num_layers, "mask_token_id": MASK_ID, "loss_decay": cell.loss_decay}
    elif cell.step_loss_decay is not None:
        fields |= {"step_loss_decay": cell.step_loss_decay}
    if cell.drafter != "mtp":
        fields |= {"taps": cell.taps}
    fields |= {"confidence_score": score}
    if cell.drafter == "dspark":
        return DSparkConfig(
            markov_rank=cell.markov_rank,
            markov_head_type=cell.markov_head_type,
            confidence_head=confidence == "head",
            confidence_with_markov=confidence == "head" and cell.markov_rank > 0,
            detach_confidence=cell.detach_confidence,
            **fields,
        )
    kinds = {"dflash": DFlashConfig, "eagle3": Eagle3Config, "mtp": MTPConfig}
    return kinds[cell.drafter](**fields)


RIVALS: Mapping[str, ToyCell] = {
    "dspark": ToyCell(),
    "dspark_gated": ToyCell(markov_head_type="gated"),
    "dspark_rnn": ToyCell(markov_head_type="rnn"),
    "dflash_full_loss": ToyCell(drafter="dflash", loss=dataclasses.replace(FULL_LOSS, confidence=0.0)),
    "dflash": ToyCell(drafter="dflash"),
    "eagle3": ToyCell(drafter="eagle3"),
    "mtp": ToyCell(drafter="mtp", block_size=1),
}
"""Drafters by name: DSpark with each sequential head, DFlash with DSpark's loss (that is DSpark without heads) and with cross-entropy alone
as in the reference, Eagle3, MTP-1."""


def training_texts(cell: ToyCell, prepared: PreparedTarget) -> TokenSequences:
    """The texts that a cell learns from; none of a held-out file is among them."""
    texts = prepared.on_policy if cell.texts == "on_policy" else prepared.off_policy
    return texts.select(texts.heldout == 0)


def draft_vocabulary(cell: ToyCell, texts: TokenSequences) -> jax.Array | None:
    """The most frequent ids of the texts, ascending; None where all can be drafted."""
    if cell.draft_vocab_size is None:
        return None
    return jnp.asarray(most_frequent_ids(texts, cell.draft_vocab_size, cell.target.vocab_size))


@dataclasses.dataclass(frozen=True, eq=False)
class TrainedDrafter:
    """A drafter behind its training.

    Attributes:
      losses: of every step.
      seconds: of the whole training, compilation included; step_seconds: of a step in the middle.
    """

    drafter: Any
    params: Params
    draft_ids: jax.Array | None
    losses: tuple[float, ...]
    seconds: float
    step_seconds: float


def train_toy_drafter(cell: ToyCell, prepared: PreparedTarget) -> TrainedDrafter:
    """Train the cell's drafter from random parameters.

    Raises:
      ValueError: the texts do not fill a batch.
      FloatingPointError: the loss is no longer a number.
    """
    began = time.perf_counter()
    drafter, texts = drafter_from(drafter_config(cell)), training_texts(cell, prepared)
    draft_ids = draft_vocabulary(cell, texts)
    params_rng, anchor_rng = jax.random.split(jax.random.key(cell.seed))
    state = init_train_state(anchor_rng, jax.jit(drafter.init)(params_rng), cell.train.optimizer)
    stream = TokenBatches(texts, cell.batch_size, (cell.target.text_tokens,), cell.seed, min_loss_tokens=2)
    losses, seconds = [], []
    for number in range(cell.steps):
        batch, begin = stream[number], time.perf_counter()
        state, metrics = train_step(
            prepared.target, drafter, cell.train, state, prepared.params, jnp.asarray(batch.ids), jnp.asarray(batch.loss_mask), draft_ids
        )
        metrics = jax.device_get(metrics)
        require_finite(metrics, number + 1, batch.rows.tolist())
        losses.append(float(metrics["loss"]))
        seconds.append(time.perf_counter() - begin)
    return TrainedDrafter(
        drafter, state.params, draft_ids, tuple(losses), time.perf_counter() - began, float(np.median(seconds[1:] or seconds))
    )


def run_toy_cell(cell: ToyCell, work: Path = WORK, console: Console | None = None) -> dict[str, Any]:
    """Train the cell's drafter, decode held-out prompts with it, calibrate its confidence, and give figures as JSON values.

    Args:
      work: the target is taken from its folder `targets`, or made and kept there.

    Returns:
      what the cell was (`cell`, `target`), what its training was (`parameters`, `anchors`, `training`), and by temperature ("0", "1")
      the figures of `toy_rounds.figures_of`.
    """
    console = console or Console(quiet=True)
    prepared = prepare_target(cell.target, work / "targets", console)
    trained = train_toy_drafter(cell, prepared)
    began = time.perf_counter()
    prompts = prepared.held_out_prompts()[: cell.prompts]
    decoded = decode_prompts(
        prepared.target,
        prepared.params,
        trained.drafter,
        trained.params,
        trained.draft_ids,
        prompts,
        new_tokens=cell.target.answer_tokens,
        timed_prompts=cell.timed_prompts,
        verifier=cell.verifier,
        seed=cell.seed,
    )
    by_temperature = {f"{temperature:g}": figures_of(rounds) for temperature, rounds in decoded.items()}
    return {
        "cell": dataclasses.asdict(cell),
        "target": prepared.identity,
        "parameters": sum(leaf.size for leaf in jax.tree.leaves(trained.params)),
        "anchors": cell.anchors,
        "training": {
            "first_loss": trained.losses[0],
            "last_loss": float(np.mean(trained.losses[-10:])),
            "seconds": trained.seconds,
            "step_seconds": trained.step_seconds,
        },
        "measuring_seconds": time.perf_counter() - began,
        "temperatures": by_temperature,
    }
