"""What a run writes of itself: JSON lines that a resumed run goes on with, TensorBoard's scalars, operations and memory."""

import json

import jax
import numpy as np
import pytest
from rich.console import Console

from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.losses import DraftLossConfig
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.train import OptimizerConfig, TrainConfig
from experiments.training_costs import memory_bytes, peak_flops, step_flops
from experiments.training_log import TrainingLog, read_lines, scalars

RECORD = {
    "loss": np.float32(2.5),
    "accept_rate": np.asarray([0.5, 0.25]),
    "accepted_length": 1.6,
    "blocks": 8.0,
    "seconds": 0.5,
    "tokens_per_second": 1024.0,
    "flops_utilisation": None,
    "memory_bytes": 123_456_789,
    "memory_of": "process",
}
HELD_OUT = {"greedy": {"accepted_length_greedy": 1.5}, "sampled": {"accepted_length_sampled": 1.25}}


def write(folder, steps, done, writes=True, **changes) -> str:
    console = Console(width=200, record=True, file=(folder / "console.txt").open("a"))
    with TrainingLog(folder, console, done, last=9, writes=writes) as log:
        for step in steps:
            log.step(step, RECORD | changes)
    return console.export_text()


def test_a_resumed_log_forgets_what_lies_behind_its_checkpoint(tmp_path):
    write(tmp_path, (1, 2, 3), done=0)
    write(tmp_path, (3, 4), done=2, loss=2.0)
    records = read_lines(tmp_path / "metrics.jsonl")
    assert [(record["step"], record["loss"], record["anchors"]) for record in records] == [
        (1, 2.5, 8),
        (2, 2.5, 16),
        (3, 2.0, 24),
        (4, 2.0, 32),
    ]
    assert records[0]["accept_rate"] == [0.5, 0.25] and records[0]["memory_bytes"] == 123_456_789
    assert "flops_utilisation" not in records[0], "unknown on a CPU, and so left out"


def test_the_terminal_shows_rates_speed_and_utilisation(tmp_path):
    assert "step 1/9" in (text := write(tmp_path, (1,), done=0, flops_utilisation=0.41)) and "accept 0.50 0.25" in text
    assert "1,024 tokens/s" in text and "41% of the peak" in text


def test_other_hosts_write_and_print_nothing(tmp_path):
    assert "step" not in write(tmp_path, (1,), done=0, writes=False)
    assert not (tmp_path / "metrics.jsonl").exists()


def test_records_become_scalars_by_name():
    assert dict(scalars({"step": 3, "memory_of": "device", "held": {"rate": [0.5, 0.25]}})) == {
        "step": 3,
        "held/rate/1": 0.5,
        "held/rate/2": 0.25,
    }


def test_tensorboard_gets_every_number(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the package tensorboardX (extra `plots`)")
    with TrainingLog(tmp_path, Console(quiet=True), 0, last=9) as log:
        log.step(1, RECORD)
        log.held_out(1, HELD_OUT | {"measured": {"greedy": 1.4, "sampled": 1.3}})
    (events,) = (tmp_path / "tensorboard").iterdir()
    for name in (b"metrics/accept_rate/2", b"metrics/tokens_per_second", b"held_out/measured/greedy"):
        assert name in events.read_bytes()
    assert json.loads((tmp_path / "held_out.jsonl").read_text())["measured"] == {"greedy": 1.4, "sampled": 1.3}


def test_operations_of_a_step_are_two_per_target_weight_and_six_per_drafter_weight():
    """With nothing but matrices and next to no attention: one block per text, a vocabulary that outweighs nothing."""
    target = DenseTarget(DenseConfig(8, 64, 256, num_layers=2, num_heads=1, num_kv_heads=1, head_dim=4))
    drafter = DSparkDrafter(DSparkConfig(8, 64, 256, 1, 1, 4, 7, (0,), 2, num_layers=1, block_size=2, markov_rank=1))
    config = TrainConfig(OptimizerConfig(1), DraftLossConfig(chunk=64), num_anchors=16, micro_batches=2)
    tokens, slots = 4 * 32, 4 * 16 * 2

    def weights(model, inside) -> int:
        paths = jax.tree_util.tree_flatten_with_path(model.abstract_params())[0]
        return sum(leaf.size for path, leaf in paths if leaf.ndim == 2 and inside in jax.tree_util.keystr(path))

    expected = 2 * weights(target, "layers_") * tokens + 6 * weights(drafter, "mlp") * slots
    assert step_flops(target, drafter, config, 4, 32) == pytest.approx(expected, rel=0.25)
    assert step_flops(target, drafter, config, 4, 32) > expected
    assert step_flops(target, drafter, config, 8, 32) == 2 * step_flops(target, drafter, config, 4, 32)
    # Where features are stored, the target has no forward pass.
    less = step_flops(target, drafter, config, 4, 32) - step_flops(target, drafter, config, 4, 32, online=False)
    assert less == pytest.approx(2 * weights(target, "layers_") * tokens, rel=0.1)


def test_a_cpu_has_no_known_peak_and_reports_the_memory_of_the_process():
    assert peak_flops(jax.devices()[0]) is None
    kind, used = memory_bytes()
    assert kind == "process" and 10**8 < used < 10**12
