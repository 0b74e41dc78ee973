"""Training runs by name. A preset is a function that gives a `TrainRun`; its docstring has the command, the result and the time."""

from collections.abc import Callable
from pathlib import Path

from dspark_jax.drafters.dspark import DSparkConfig
from dspark_jax.losses import DraftLossConfig
from dspark_jax.train import OptimizerConfig, TrainConfig
from experiments.train_drafter import TrainRun

SMOLLM2_TEXTS = (Path("../shared/smollm2/smollm2_onpolicy_0.npz"), Path("../shared/smollm2/smollm2_onpolicy_1.npz"))


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
        drafter=DSparkConfig(
            vocab_size=49_152,
            hidden_size=576,
            intermediate_size=1_536,
            num_heads=9,
            num_kv_heads=3,
            head_dim=64,
            mask_token_id=16,
            taps=(1, 8, 15, 22, 27),
            num_target_layers=30,
            num_layers=2,
            block_size=7,
            rms_norm_eps=1e-5,
            rope_theta=1e5,
            markov_rank=64,
        ),
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


PRESETS: dict[str, Callable[[], TrainRun]] = {"smollm2_dspark": smollm2_dspark}
