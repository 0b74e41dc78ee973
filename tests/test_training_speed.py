"""The script that measures speed and memory of the training step."""

import json

import pytest
from rich.console import Console

from dspark_jax.weights import load_drafter, load_target
from experiments import training_speed
from experiments.training_speed import SpeedOptions, golden_pair, smollm2_pair


def test_the_golden_pair_has_the_sizes_of_the_golden_files(golden):
    target, _ = load_target(golden / "qwen3_target")
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", target.spec)
    pair = golden_pair()
    sizes = ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads", "head_dim")
    for ours, theirs in ((pair.target.config, target.config), (pair.drafter.config, loaded.drafter.config)):
        assert [getattr(ours, name) for name in sizes] == [getattr(theirs, name) for name in sizes]
    for name in ("taps", "block_size", "markov_rank"):
        assert getattr(pair.drafter.config, name) == getattr(loaded.drafter.config, name)
    assert smollm2_pair(anchors=512).sites == 4 * 512 * 7


@pytest.mark.parametrize(
    ("options", "complaint"),
    [({"seconds": 0.0}, "seconds is 0.0; allowed: a positive number"), ({"anchors": ()}, r"anchors is \(\); allowed: at least one")],
)
def test_options_out_of_range_are_refused_by_field(options, complaint):
    with pytest.raises(ValueError, match=complaint):
        SpeedOptions(**options)


@pytest.mark.slow
def test_speed_is_measured_and_what_was_known_of_memory_stays(tmp_path, monkeypatch):
    out = tmp_path / "speed.json"
    out.write_text(json.dumps({"memory": [{"anchors": 1}]}))
    monkeypatch.setattr(training_speed, "smollm2_pair", golden_pair)
    found = training_speed.run(SpeedOptions(speed=True, seconds=0.01, out=out), Console(quiet=True))
    assert json.loads(out.read_text()) == found and found["memory"] == [{"anchors": 1}]
    speed = found["speed"]["golden"]
    assert speed["steps"] >= 3 and speed["tokens_per_second"] == pytest.approx(speed["tokens"] / speed["seconds_per_step"])
