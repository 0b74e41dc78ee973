"""The released drafter, and the parts of the script that makes it."""

import json
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

import dspark_jax
from dspark_jax.calibrate import survival_from_dict
from dspark_jax.evaluate import TextReading
from dspark_jax.protocols import DraftBlock, TargetSpec
from dspark_jax.weights import load_drafter
from experiments.release_drafter import MAX_BYTES, Calibration, Release, calibrate
from experiments.release_readings import load_reading, spread_order, store_reading

ASSET = Path(dspark_jax.__file__).parent / "assets" / "smollm2_dspark"
SMOLLM2 = TargetSpec(vocab_size=49152, width=576, num_layers=30, architecture="LlamaForCausalLM")


def test_the_released_drafter_loads_is_small_and_has_its_card():
    loaded = load_drafter(ASSET, SMOLLM2)
    config = loaded.drafter.config
    assert (config.block_size, config.markov_rank, config.confidence_head) == (7, 64, True)
    vocabulary = config.vocab_size if loaded.draft_ids is None else len(loaded.draft_ids)
    assert loaded.params["markov_head"]["markov_w2"]["weight"].shape == (vocabulary, 64)
    assert loaded.params["markov_head"]["markov_w1"]["weight"].shape == (49152, 64)
    assert sum(file.stat().st_size for file in ASSET.iterdir()) <= MAX_BYTES == 32_000_000
    card = (ASSET / "MODEL_CARD.md").read_text()
    for part in ("2,773 steps", "H200", "python -m experiments.run release", "maths at 0", "chat at 1", "Apache-2.0"):
        assert part in card


def test_the_released_calibration_gives_survival_at_both_temperatures():
    """[F5] The stored model is read back and gives survival that never rises; constants for forecasting stand beside it."""
    stored = json.loads((ASSET / "survival.json").read_text())
    continuation = stored.pop("continuation")
    assert set(continuation) == {"0.0", "1.0"}
    assert all(len(chances) == 7 and all(0 < chance < 1 for chance in chances) for chances in continuation.values())
    # Greedy drafts survive longer than sampled ones.
    assert min(continuation["0.0"][:2]) > max(continuation["1.0"][:2])
    zeros = jnp.zeros((2, 7))
    block = DraftBlock(zeros.astype(jnp.int32), zeros, zeros, zeros, zeros + 1.0, None)
    survival = np.asarray(survival_from_dict(stored).survival(block, jnp.asarray([0.0, 1.0])))
    assert np.all((survival > 0) & (survival < 1)) and np.all(np.diff(survival, axis=1) <= 0)


def test_calibration_is_fitted_on_one_half_and_reported_on_the_other():
    """[F5] An overconfident head: scaling brings its error below the raw one's and its score below a constant's; all three are reported."""
    rng = np.random.default_rng(0)
    cells = {}
    for domain in range(3):
        readings = []
        for row in range(8):
            logits = rng.normal(0.8, 1.2, (60, 3)).astype(np.float32)
            match = rng.random((1, 60, 3)) < 1 / (1 + np.exp(-logits))
            readings.append(TextReading(row, 0, match, match.astype(np.float32), 3 * logits))
        cells[domain, 0] = readings
    result = calibrate(cells, temperature=0, vocabulary=0, block_size=3)
    assert isinstance(result, Calibration)
    mean = result.report["mean"]
    assert result.report["texts_fitted"] == result.report["texts_reported"] == 12 and result.report["kept"] == "calibrated"
    assert mean["calibrated"]["ece"] < 0.6 * mean["raw"]["ece"]
    assert mean["calibrated"]["brier"] < min(mean["raw"]["brier"], mean["constant"]["brier"])
    assert all(1.5 < temperature < 5 for temperature in result.report["temperatures"][:2])


def test_every_beginning_of_the_order_is_spread_over_all_texts():
    order = spread_order(100)
    assert sorted(order.tolist()) == list(range(100))
    for count in (2, 4, 8, 16):
        gaps = np.diff(np.sort(np.append(order[:count], 100)))
        assert gaps.max() <= 2 * 128 / count


def test_readings_on_disk_serve_every_part_of_the_vocabularies_they_were_made_for(tmp_path):
    rng = np.random.default_rng(0)
    reading = TextReading(3, 20, rng.random((3, 5, 2)) < 0.5, rng.random((3, 5, 2)).astype(np.float32), np.zeros((5, 2), np.float32))
    path = tmp_path / "3.npz"
    assert load_reading(path, (8,)) is None
    store_reading(path, reading, (8, 16))
    part = load_reading(path, (16,))
    assert part is not None and (part.row, part.answer_start) == (3, 20)
    np.testing.assert_array_equal(part.accept, reading.accept[[0, 2]])
    assert load_reading(path, (32,)) is None


def test_bad_releases_are_refused():
    with pytest.raises(ValueError, match="texts_per_cell is 3"):
        Release(texts_per_cell=3)
    with pytest.raises(ValueError, match="pilot_per_cell is 9"):
        Release(texts_per_cell=4, pilot_per_cell=9)
    with pytest.raises(ValueError, match="draft_vocab_size is 100"):
        Release(draft_vocab_size=100)
