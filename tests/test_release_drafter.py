"""The released drafter, and the parts of the script that makes it."""

import csv
import dataclasses
import json
import shutil
from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest
from rich.console import Console

import dspark_jax
from dspark_jax.calibrate import survival_from_dict
from dspark_jax.calibration_identity import CalibratorIdentity, CalibratorWarning, drafter_fingerprint
from dspark_jax.data import TokenSequences, load_token_sequences, offsets_from_lengths, save_token_sequences
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.evaluate import TextReading
from dspark_jax.protocols import DraftBlock, TargetSpec
from dspark_jax.sampling import Sampling
from dspark_jax.weights import load_drafter, save_drafter
from experiments.calibrate_drafter import CalibrateDrafter, calibrate_drafter
from experiments.calibration_report import CalibrationSpeed, time_calibration
from experiments.recalibrate import recalibrate
from experiments.release_card import model_card
from experiments.release_drafter import MAX_BYTES, RESULTS, Release, ReleaseFiles, calibrate, cut_drafter, stored_survival
from experiments.release_readings import load_reading, spread_order, store_reading
from tests.tiny_models import LLAMA, TINY_DRAFTER, random_params, write_target

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


def test_the_released_calibration_is_that_of_the_released_drafter(recwarn):
    """The fingerprint in `survival.json` is that of the weights beside it; both temperatures, no filter, token by token."""
    loaded = load_drafter(ASSET, SMOLLM2)
    mark = drafter_fingerprint(loaded.drafter, loaded.params, loaded.draft_ids)
    assert loaded.fitted_for == CalibratorIdentity(mark, (0.0, 1.0), top_k=0, top_p=1.0, verifier="token")
    loaded.check_calibration(Sampling.make(2, [0.0, 1.0]))
    assert not recwarn.list


BLOCK = 3


def answers(domain: int, first_row: int, texts: int = 8, sharpness: float = 3.0) -> list[TextReading]:
    """Made-up readings of an overconfident head, whose logits are `sharpness` times what they should be; two vocabularies alike."""
    rng = np.random.default_rng((domain, first_row))
    readings = []
    for row in range(first_row, first_row + texts):
        logits = rng.normal(0.8, 1.2, (60, BLOCK)).astype(np.float32)
        match = np.repeat(rng.random((1, 60, BLOCK)) < 1 / (1 + np.exp(-logits)), 2, axis=0)
        readings.append(TextReading(row, 0, match, match.astype(np.float32), sharpness * logits))
    return readings


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All that a recalibration reads, tiny: a target, a drafter, the same cut to 8 ids as the asset, texts, and readings of them."""
    path = tmp_path_factory.mktemp("release")
    write_target(path / "target")
    config = DSparkConfig(block_size=BLOCK, **TINY_DRAFTER)
    save_drafter(path / "source", DSparkDrafter(config), random_params(DSparkDrafter(config), seed=1))
    by_frequency = np.random.default_rng(0).permutation(LLAMA["vocab_size"])
    np.save(path / "frequent_ids.npy", by_frequency)
    loaded = load_drafter(path / "source", TargetSpec(LLAMA["vocab_size"], 32, 2, "LlamaForCausalLM"))
    draft_ids = jnp.asarray(np.sort(by_frequency[:8]), jnp.int32)
    save_drafter(path / "asset", *cut_drafter(loaded, draft_ids), draft_ids=draft_ids, survival={"kind": "RawSurvival"})
    (path / "asset" / "MODEL_CARD.md").write_text("old")
    readings = [reading for cell in range(6) for reading in answers(cell // 2, 8 * cell)]
    (path / "work" / "readings").mkdir(parents=True)
    for reading in readings:
        store_reading(path / "work" / "readings" / f"{reading.row}.npz", reading, (8,))
    count = len(readings)
    lengths = np.full(count, 62)
    sequences = TokenSequences(
        tokens=np.ones(lengths.sum(), np.uint16),
        offsets=offsets_from_lengths(lengths),
        answer_start=np.ones(count, np.int16),
        answer_end=np.full(count, 62, np.int16),
        finished=np.ones(count, bool),
        domain=(np.arange(count) // 16).astype(np.int8),
        temperature=(2 * (np.arange(count) // 8 % 2)).astype(np.int8),
        heldout=np.ones(count, np.int8),
        source=np.full(count, -1, np.int32),
    )
    save_token_sequences(path / "texts.npz", sequences)
    (path / "results").mkdir()
    shutil.copy(RESULTS / "results.json", path / "results")
    return path


@pytest.fixture(scope="module")
def files(folder) -> ReleaseFiles:
    return ReleaseFiles(
        source=folder / "source",
        texts=folder / "texts.npz",
        frequent_ids=folder / "frequent_ids.npy",
        texts_per_cell=8,
        target=str(folder / "target"),
        asset=folder / "asset",
        results=folder / "results",
        calibration=folder / "calibration",
        work=folder / "work",
    )


@pytest.fixture(scope="module")
def recalibrated(folder, files):
    """The asset as it was before, and after."""
    before = {file.name: file.read_bytes() for file in files.asset.iterdir()}
    survival = recalibrate(files, Console(quiet=True))
    return before, survival, load_drafter(files.asset, TargetSpec(LLAMA["vocab_size"], 32, 2, "LlamaForCausalLM"))


def test_recalibrating_rewrites_survival_and_card_and_leaves_the_drafter(files, recalibrated):
    before, survival, loaded = recalibrated
    after = {file.name: file.read_bytes() for file in files.asset.iterdir()}
    assert set(after) == set(before) and {name for name in after if after[name] != before[name]} == {"survival.json", "MODEL_CARD.md"}
    assert json.loads(after["survival.json"]) == json.loads(json.dumps(survival)) == loaded.survival
    results = json.loads((files.results / "results.json").read_text())
    card = after["MODEL_CARD.md"].decode()
    for temperature, model in zip(("0", "1"), survival["models"], strict=True):
        report = results["calibration"][temperature]
        assert model["kind"] == {"temperature_scaled": "TemperatureScaled", "isotonic": "IsotonicSurvival"}[report["chosen"]]
        (row,) = [line for line in card.splitlines() if line.startswith(f"| {temperature} | {report['chosen'].replace('_', ' ')} |")]
        assert row.endswith("| yes |") and f"| {report['models'][report['chosen']]['mean_brier']['value'][0]:.4f} (" in row
        assert survival["continuation"][f"{temperature}.0"] == report["continuation"]
    assert "recalibrate --texts-per-cell 8" in card


def test_a_drafter_of_ones_own_is_calibrated_and_its_weights_stay(folder, tmp_path):
    """[F5] Fitted on one half of the held-out answers, judged on the other, and stored for this drafter alone."""
    own = tmp_path / "drafter"
    shutil.copytree(folder / "source", own)
    options = CalibrateDrafter(own, (folder / "texts.npz",), str(folder / "target"), texts_per_cell=4)
    survival = calibrate_drafter(options, Console(quiet=True))
    spec = TargetSpec(LLAMA["vocab_size"], 32, 2, "LlamaForCausalLM")
    loaded = load_drafter(own, spec)
    assert loaded.survival == json.loads(json.dumps(survival)) and set(survival["continuation"]) == {"0.0", "1.0"}
    mark = drafter_fingerprint(loaded.drafter, loaded.params, loaded.draft_ids)
    assert loaded.fitted_for == CalibratorIdentity(mark, (0.0, 1.0)), "of the drafter that was read"
    weights = "model.safetensors"
    assert (own / weights).read_bytes() == (folder / "source" / weights).read_bytes()
    zeros = jnp.zeros((2, BLOCK))
    block = DraftBlock(zeros.astype(jnp.int32), zeros, zeros, zeros, zeros + 1.0, None)
    chances = np.asarray(loaded.survival_model().survival(block, jnp.asarray([0.0, 1.0])))
    assert ((chances >= 0) & (chances <= 1)).all() and (np.diff(chances, axis=1) <= 0).all()


def test_what_cannot_be_calibrated_is_refused(folder, tmp_path):
    with pytest.raises(ValueError, match="texts_per_cell is 3; allowed are even numbers"):
        CalibrateDrafter(tmp_path, (folder / "texts.npz",), texts_per_cell=3)
    learnt = load_token_sequences(folder / "texts.npz", LLAMA["vocab_size"])
    save_token_sequences(tmp_path / "learnt.npz", dataclasses.replace(learnt, heldout=np.zeros_like(learnt.heldout)))
    options = CalibrateDrafter(folder / "source", (tmp_path / "learnt.npz",), str(folder / "target"))
    with pytest.raises(ValueError, match="learnt.npz; allowed are texts with two or more held-out answers"):
        calibrate_drafter(options, Console(quiet=True))
    assert not (folder / "source" / "survival.json").exists()


def test_a_stored_calibration_knows_its_drafter_and_sampler(recalibrated, recwarn):
    """Fitted temperatures pass in silence; another temperature warns; another drafter or verifier is an error."""
    _, _, loaded = recalibrated
    mark = drafter_fingerprint(loaded.drafter, loaded.params, loaded.draft_ids)
    assert loaded.fitted_for == CalibratorIdentity(mark, (0.0, 1.0))
    loaded.check_calibration(Sampling.make(2, [0.0, 1.0]))
    assert not recwarn.list
    with pytest.warns(CalibratorWarning, match=r"drawn at \[0.5\]"):
        loaded.check_calibration(Sampling.make(1, 0.5))
    with pytest.raises(ValueError, match="verifier is 'block'"):
        loaded.check_calibration(Sampling.make(1), "block")
    other = dataclasses.replace(loaded, draft_ids=loaded.draft_ids + 1)
    with pytest.raises(ValueError, match=f"drafter is .* fitted for, {mark}"):
        other.check_calibration(Sampling.make(1))
    older = {name: value for name, value in loaded.survival.items() if name != "fitted_for"}
    with pytest.warns(CalibratorWarning, match="does not say"):
        dataclasses.replace(loaded, survival=older).check_calibration(Sampling.make(1))
    without = dataclasses.replace(loaded, survival=None)
    without.check_calibration(Sampling.make(1, 0.5))
    assert without.fitted_for is None


def test_the_figures_of_a_calibration_hold_every_model_and_position(files, recalibrated):
    with (files.calibration / "metrics.csv").open() as file:
        metrics = list(csv.DictReader(file))
    models, positions = ("raw", "constant", "temperature_scaled", "isotonic"), [str(place + 1) for place in range(BLOCK)]
    expected = {(t, k, m, metric) for t in "01" for k in positions for m in models for metric in ("ece", "brier", "auc")}
    expected |= {(t, "mean", m, metric) for t in "01" for m in models for metric in ("brier", "brier_minus_constant")}
    assert {(row["temperature"], row["position"], row["model"], row["metric"]) for row in metrics} == expected and len(metrics) == len(
        expected
    )
    assert all(float(row["low"]) <= float(row["value"]) <= float(row["high"]) for row in metrics if row["metric"] == "brier")
    summary = json.loads((files.calibration / "calibration.json").read_text())
    assert summary["fitted_for"]["temperatures"] == [0.0, 1.0] and summary["device"]["platform"] == "cpu"
    with (files.calibration / "reliability.csv").open() as file:
        bins = list(csv.DictReader(file))
    for temperature in "01":
        for model in models:
            rows = [row for row in bins if (row["temperature"], row["model"], row["position"]) == (temperature, model, "2")]
            assert sum(int(row["rounds"]) for row in rows) == summary["by_temperature"][temperature]["rounds"]
            assert all(float(row["bin_low"]) <= float(row["predicted"]) <= float(row["bin_high"]) for row in rows)
    assert (files.calibration / "reliability.png").read_bytes().startswith(b"\x89PNG")


def test_readings_of_another_drafter_calibrate_nothing(folder, files, recalibrated, tmp_path):
    shutil.copytree(files.asset, tmp_path / "asset")
    spec = TargetSpec(LLAMA["vocab_size"], 32, 2, "LlamaForCausalLM")
    loaded = load_drafter(files.asset, spec)
    save_drafter(tmp_path / "asset", loaded.drafter, random_params(loaded.drafter, seed=2), draft_ids=loaded.draft_ids)
    with pytest.raises(ValueError, match="asset is another drafter than source"):
        recalibrate(dataclasses.replace(files, asset=tmp_path / "asset"), Console(quiet=True))
    np.save(tmp_path / "ids.npy", np.load(folder / "frequent_ids.npy")[::-1])
    with pytest.raises(ValueError, match="asset drafts from 8 ids; allowed are those that are first"):
        recalibrate(dataclasses.replace(files, frequent_ids=tmp_path / "ids.npy"), Console(quiet=True))


def test_calibration_is_fitted_on_one_half_and_reported_on_the_other(files, recalibrated):
    """[F5] An overconfident head: scaling brings its error below the raw one's and its score below a constant's; all are reported."""
    report = json.loads((files.results / "results.json").read_text())["calibration"]["0"]
    error, score = ({name: np.mean(of[metric]["value"]) for name, of in report["models"].items()} for metric in ("ece", "brier"))
    assert report["texts_fitted"] == report["texts_reported"] == 12 and report["chosen"] in ("temperature_scaled", "isotonic")
    assert error["temperature_scaled"] < 0.6 * error["raw"]
    assert score[report["chosen"]] == min(score.values()) < score["constant"]
    assert all(1.5 < temperature < 5 for temperature in report["temperatures"][:2])


def test_confidence_that_says_nothing_is_left_alone_and_the_card_says_so(recalibrated):
    """[F5] Noise for confidence: the constant is stored, by name."""
    rng = np.random.default_rng(0)
    cells = {}
    for domain in range(3):
        # The texts of the fixture in its order: rounds of the same number need no other compiled programs.
        texts = [answers(domain, 16 * domain)[place] for place in spread_order(8)]
        cells[domain, 0] = [dataclasses.replace(text, confidence_logits=rng.normal(0, 3, (60, BLOCK)).astype(np.float32)) for text in texts]
    calibration = calibrate(cells, 0, vocabulary=1, block_size=BLOCK)
    assert calibration.choice.name == "constant" and "raw" in calibration.report["worse_than_constant"]
    survival = stored_survival({0: calibration}, "abc")
    assert survival["models"][0]["kind"] == "ConstantSurvival" and survival["fitted_for"]["temperatures"] == [0.0]
    results = json.loads((RESULTS / "results.json").read_text())
    card = model_card({**results, "calibration": {"0": calibration.report}})
    assert "the constant is stored" in card and "raw" in card.split("At temperature 0, ")[1].split(" did worse")[0]


def test_the_time_of_a_fit_is_written_with_its_device(tmp_path):
    found = time_calibration(CalibrationSpeed(rounds=200, positions=2, repetitions=2, out=tmp_path / "speed.json"), Console(quiet=True))
    assert json.loads((tmp_path / "speed.json").read_text()) == found
    assert len(found["seconds"]) == 2 and found["device"]["platform"] == "cpu" and found["candidates"] == 99
    with pytest.raises(ValueError, match="rounds is 0"):
        CalibrationSpeed(rounds=0)


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
