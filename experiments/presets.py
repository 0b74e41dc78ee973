"""Training runs by name. A preset is a function that gives a `TrainRun`; its docstring has the command, the result and the time.

    python -m experiments.run train PRESET --data out/smollm2_texts/texts.npz

`smollm2_*` are one drafter each for SmolLM2-135M-Instruct, all with the data, anchors, steps and optimizer of the first. What
differs is the drafter and the loss that it is trained with in its own reference. `small_*` are the same drafters in a size for CPUs.
"""

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

from dspark_jax.drafters.dflash import DFlashConfig
from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.losses import DraftLossConfig
from dspark_jax.train import OptimizerConfig, TrainConfig
from experiments.train_drafter import TrainRun

SMOLLM2 = Path("../shared/smollm2")
SMOLLM2_TEXTS = (SMOLLM2 / "smollm2_onpolicy_0.npz", SMOLLM2 / "smollm2_onpolicy_1.npz")
FREQUENT_IDS = SMOLLM2 / "frequent_ids.npy"

SMOLLM2_LAYER: dict[str, Any] = {
    "vocab_size": 49_152,
    "hidden_size": 576,
    "intermediate_size": 1_536,
    "num_heads": 9,
    "num_kv_heads": 3,
    "head_dim": 64,
    "num_target_layers": 30,
    "rms_norm_eps": 1e-5,
    "rope_theta": 1e5,
}
"""Sizes of a draft layer: those of the target's own."""

SMOLLM2_TAPS = (1, 8, 15, 22, 27)
SMOLLM2_BLOCK: dict[str, Any] = SMOLLM2_LAYER | {"mask_token_id": 16, "taps": SMOLLM2_TAPS, "num_layers": 2, "block_size": 7}

CHAIN_LOSS = DraftLossConfig(ce=0.0, l1=0.0, confidence=0.0, soft_ce=1.0, chunk=1024)
BACKBONE_LOSS = DraftLossConfig(ce=0.1, l1=0.9, confidence=0.0, chunk=1024)


def smollm2_dspark() -> TrainRun:
    """The released drafter for SmolLM2-135M-Instruct: 2 layers, Markov rank 64, block 7, 2,773 steps of 64 sequences x 64 anchors.

        python -m experiments.run train smollm2_dspark --data out/smollm2_texts/texts.npz

    190 seconds on one H200 for the original run, to a held-out accepted length of 3.46 at temperature 0 and 2.12 at 1 (uniform
    anchors). Some 190 core-seconds a step on a CPU: give `--stop-step 33` there.
    The original run measured its schedule in seconds, start-up included: its learning rate rose from 2.6e-4 to 1e-3 over the
    first 60 steps, which `init_learning_rate` and `warmup_ratio` repeat.
    """
    total_steps = 2773
    return TrainRun(
        target="smollm2",
        data=SMOLLM2_TEXTS,
        drafter=DSparkConfig(**SMOLLM2_BLOCK, markov_rank=64),
        train=TrainConfig(
            optimizer=OptimizerConfig(
                total_steps=total_steps, learning_rate=1e-3, init_learning_rate=2.6e-4, warmup_ratio=60.5 / total_steps
            ),
            loss=DraftLossConfig(ce=0.1, l1=0.9, confidence=1.0, chunk=1024),
            num_anchors=64,
            micro_batches=16,
        ),
        out=Path("out/smollm2_dspark"),
        lengths=(320, 416, 512),
        held_out_steps=(20, 33, 53, 85, 137, 220, 353, 565, 905, 1449, 2319),
    )


def _rival(name: str, drafter: Any, loss: DraftLossConfig | None = None) -> TrainRun:
    """The run of `smollm2_dspark` with another drafter, and where given another loss."""
    run = smollm2_dspark()
    step = run.train if loss is None else dataclasses.replace(run.train, loss=loss)
    return dataclasses.replace(run, drafter=drafter, train=step, out=Path("out") / name)


def smollm2_dspark_rnn() -> TrainRun:
    """DSpark with the recurrent head. Not run at this size; `small_dspark_rnn` is."""
    return _rival("smollm2_dspark_rnn", DSparkConfig(**SMOLLM2_BLOCK, markov_rank=64, markov_head_type="rnn"))


def smollm2_dspark_gated() -> TrainRun:
    """DSpark with the gated head. Not run, nor is `small_dspark_gated`."""
    return _rival("smollm2_dspark_gated", DSparkConfig(**SMOLLM2_BLOCK, markov_rank=64, markov_head_type="gated"))


def smollm2_no_heads() -> TrainRun:
    """DSpark's backbone without its heads, at DSpark's loss: DFlash with the full loss. Not run at this size; `small_no_heads` is."""
    return _rival("smollm2_no_heads", DFlashConfig(**SMOLLM2_BLOCK), BACKBONE_LOSS)


def smollm2_dflash() -> TrainRun:
    """DFlash as the reference trains it, with cross-entropy alone. Not run at this size; `small_dflash` is."""
    return _rival("smollm2_dflash", DFlashConfig(**SMOLLM2_BLOCK), DraftLossConfig(ce=1.0, l1=0.0, confidence=0.0, chunk=1024))


def smollm2_eagle3() -> TrainRun:
    """Eagle3 with its own loss, on the chains behind the drawn anchors alone, as many as the others have.

    Its reference learns from every position of a text; that is `--set drafter.supervision=answer_blocks`. Not run at this size;
    `small_eagle3` is.
    """
    drafter = Eagle3Config(**SMOLLM2_LAYER, taps=SMOLLM2_TAPS, supervision="drawn_anchors", soft_ce_over_places=False)
    return _rival("smollm2_eagle3", drafter, CHAIN_LOSS)


def smollm2_mtp() -> TrainRun:
    """MTP-1, the baseline of one draft a round, at the loss of `smollm2_no_heads`, on the drawn anchors.

    Not run at this size; `small_mtp` is.
    """
    return _rival("smollm2_mtp", MTPConfig(**SMOLLM2_LAYER, supervision="drawn_anchors"), BACKBONE_LOSS)


def small(run: TrainRun) -> TrainRun:
    """A run of the same drafter for CPUs: 1,200 texts cut to 256 tokens, 8,192 tokens to draft, 800 steps of 2 texts x 32 anchors.

    At small budgets steps teach more than anchors do, so that batches are small. Held-out texts are read at the end alone. With the
    target's features stored once for all drafters, a step takes 1 to 3 seconds on one core:

        python -m experiments.run cache small_dspark --out out/small_features
        python -m experiments.run train small_dspark --features out/small_features
    """
    return dataclasses.replace(
        run,
        drafter=dataclasses.replace(run.drafter, draft_vocab_size=8192),
        draft_vocabulary=FREQUENT_IDS,
        train=dataclasses.replace(
            run.train,
            optimizer=OptimizerConfig(total_steps=800, learning_rate=1e-3),
            loss=dataclasses.replace(run.train.loss, chunk=448),
            num_anchors=32,
            micro_batches=1,
        ),
        out=run.out.with_name(run.out.name.replace("smollm2", "small")),
        num_texts=1200,
        batch_size=2,
        lengths=(256,),
        held_out_steps=(),
        held_out_sequences=48,
        held_out_anchors=32,
        checkpoint_every=50,
        keep=2,
    )


def _small(preset: Callable[[], TrainRun]) -> Callable[[], TrainRun]:
    return lambda: small(preset())


SMOLLM2_PRESETS: dict[str, Callable[[], TrainRun]] = {
    preset.__name__: preset
    for preset in (
        smollm2_dspark,
        smollm2_dspark_rnn,
        smollm2_dspark_gated,
        smollm2_no_heads,
        smollm2_dflash,
        smollm2_eagle3,
        smollm2_mtp,
    )
}
SMALL_PRESETS = {name.replace("smollm2", "small"): _small(preset) for name, preset in SMOLLM2_PRESETS.items()}
PRESETS: dict[str, Callable[[], TrainRun]] = SMOLLM2_PRESETS | SMALL_PRESETS
