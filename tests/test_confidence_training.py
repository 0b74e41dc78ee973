"""A confidence head trained onto a drafter that exists: the drafter stands still, and the head comes to know what it is asked."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.batches import TokenBatch
from dspark_jax.calibrate import RawSurvival, prefix_confidence
from dspark_jax.calibration_metrics import brier
from dspark_jax.data import FIELD_DTYPES, TokenSequences, offsets_from_lengths, save_token_sequences
from dspark_jax.drafters.confidence_head import with_confidence_head
from dspark_jax.drafters.dflash import DFlashConfig, DFlashDrafter
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter
from dspark_jax.drafters.mtp import MTPConfig, MTPDrafter
from dspark_jax.evaluate import WalkRule, confidence_rounds, read_texts
from dspark_jax.losses import DraftLossConfig
from dspark_jax.train import OptimizerConfig, TrainConfig, init_train_state, train_step
from dspark_jax.weights import load_drafter, save_drafter
from experiments import run as launcher
from tests.tiny_models import assert_same, random_params, write_target
from tests.toy_rounds import BLOCK, CHAIN, TARGET, VOCAB, propose_behind, written_texts

ROWS, LENGTH = 16, 48
WITHOUT_HEAD = {
    "dflash": DFlashDrafter(DFlashConfig(**BLOCK, confidence_score="entropy")),
    "dspark": DSparkDrafter(DSparkConfig(**BLOCK, markov_rank=4, confidence_head=False)),
    "eagle3": Eagle3Drafter(Eagle3Config(**CHAIN, taps=(0,))),
    "mtp": MTPDrafter(MTPConfig(**CHAIN)),
}
WHOLE = TrainConfig(OptimizerConfig(60, learning_rate=0.01), DraftLossConfig(ce=1.0, l1=0.0, chunk=512), num_anchors=24)
HEAD_ALONE = TrainConfig(OptimizerConfig(80, learning_rate=0.1), DraftLossConfig(chunk=512), num_anchors=16, trainable="confidence_head")


@dataclasses.dataclass(frozen=True)
class Case:
    """A drafter before and after its head was trained, and what was reported on the way."""

    target_params: Any
    plain: Any
    plain_params: Any
    drafter: Any
    begin: Any
    params: Any
    metrics: list[dict[str, Any]]


def _texts(target_params, number):
    return written_texts(target_params, ROWS, LENGTH, number), jnp.broadcast_to(jnp.arange(LENGTH) >= 4, (ROWS, LENGTH))


def _trained(target_params, drafter, params, config):
    state = init_train_state(jax.random.key(5), params, config.optimizer, config.trainable)
    metrics = []
    for number in range(config.optimizer.total_steps):
        state, found = train_step(TARGET, drafter, config, state, target_params, *_texts(target_params, 100 + number % 50))
        metrics.append(jax.device_get(found))
    return state.params, metrics


def _case(plain, is_trained) -> Case:
    """Untrained, a drafter of blocks gives the anchor again: right behind some tokens and wrong behind most."""
    target_params = jax.jit(TARGET.init)(jax.random.key(1))
    plain_params = jax.tree_util.tree_map_with_path(
        lambda path, leaf: jnp.ones_like(leaf) if "norm" in jax.tree_util.keystr(path) else 0.02 * leaf, random_params(plain, 2)
    )
    if is_trained:
        plain_params, _ = _trained(target_params, plain, plain_params, WHOLE)
    drafter, begin = with_confidence_head(plain, plain_params, jax.random.key(3))
    # A trained drafter is right nearly as often behind one token as behind another: less to know, and longer to learn.
    config = dataclasses.replace(HEAD_ALONE, optimizer=OptimizerConfig(300, learning_rate=0.05)) if is_trained else HEAD_ALONE
    return Case(target_params, plain, plain_params, drafter, begin, *_trained(target_params, drafter, begin, config))


@pytest.fixture(scope="module", params=[pytest.param(name, marks=[] if name == "dflash" else pytest.mark.slow) for name in WITHOUT_HEAD])
def case(request):
    return _case(WITHOUT_HEAD[request.param], is_trained=request.param != "dflash")


def test_what_is_frozen_comes_out_to_the_bit(case):
    """And the head moves, all of it."""
    head = case.params["confidence_head"]
    assert set(case.params) == {*case.plain_params, "confidence_head"}
    others = {name: leaf for name, leaf in case.params.items() if name != "confidence_head"}
    for ours, given in zip(jax.tree.leaves(others), jax.tree.leaves(case.plain_params), strict=True):
        np.testing.assert_array_equal(ours, given)
    for ours, given in zip(jax.tree.leaves(head), jax.tree.leaves(case.begin["confidence_head"]), strict=True):
        assert np.abs(np.asarray(ours) - np.asarray(given)).min() > 0


def test_proposals_are_those_of_the_drafter_without_the_head(case):
    """[C4] Ids, log q and logits, to the bit; the confidence is new."""
    ids, _ = _texts(case.target_params, 7)
    place = (case.target_params, ids, jnp.full((ROWS,), 10, jnp.int32), jnp.ones((ROWS,)))
    before = propose_behind(case.plain, case.plain_params, *place)
    after = propose_behind(case.drafter, case.params, *place)
    for name in ("ids", "log_q", "log_normaliser", "floor", "logits"):
        np.testing.assert_array_equal(getattr(after, name), getattr(before, name))
    assert after.confidence_logits is not None and float(jnp.std(after.confidence_logits)) > 0.1


def test_the_confidence_loss_falls_and_is_all_of_the_loss(case):
    losses = [float(each["confidence_loss"]) for each in case.metrics]
    assert np.mean(losses[-20:]) < np.mean(losses[:5]) - 0.02
    for each in case.metrics[:5]:
        assert float(each["loss"]) == pytest.approx(float(each["confidence_loss"]), rel=1e-5)
        assert float(each["l1_loss"]) > 0.1, "what the label is made of is reported all the same"


def test_on_held_out_blocks_the_head_beats_the_best_constant(case):
    """[F5] Brier score of predicted survival at the first draft and over all, by more than four standard errors; the constant is the
    held-out mean itself."""
    texts = (tuple(map(np.asarray, _texts(case.target_params, number))) for number in range(32))
    batches = [TokenBatch(ids, mask, np.arange(ROWS)) for ids, mask in texts]
    readings = read_texts(TARGET, case.drafter, case.target_params, case.params, batches)
    logits, labels, *_ = confidence_rounds(readings, WalkRule(temperature=1, draft_length=3))
    survival = prefix_confidence(jnp.asarray(logits))
    ours = np.array([float(brier(survival[:, k], jnp.asarray(labels[:, k]))) for k in range(3)])
    constant = labels.mean(axis=0) * (1 - labels.mean(axis=0))
    assert len(labels) > 1000 and ours[0] < constant[0]
    gain = ((labels - labels.mean(axis=0)) ** 2 - (labels - np.asarray(survival)) ** 2).sum(axis=1)
    assert gain.mean() == pytest.approx(constant.sum() - ours.sum(), rel=1e-3)
    assert gain.mean() > 4 * gain.std() / np.sqrt(len(gain))
    # The trained DSpark is right nearly as often behind every token: 0.8 % is what there is to know.
    most = 0.995 if case.plain == WITHOUT_HEAD["dspark"] else 0.99
    assert ours.sum() < most * constant.sum()


@pytest.mark.slow
def test_nothing_but_the_head_is_differentiated():
    """The optimizer has moments of the head alone, and the program has fewer operations by the drafter's backward pass."""
    plain = WITHOUT_HEAD["dflash"]
    drafter, params = with_confidence_head(plain, random_params(plain), jax.random.key(0))
    target_params = jax.jit(TARGET.init)(jax.random.key(1))
    texts = _texts(target_params, 0)
    operations, moments = {}, {}
    for trainable in ("all", "confidence_head"):
        config = dataclasses.replace(HEAD_ALONE, trainable=trainable)
        state = init_train_state(jax.random.key(5), params, config.optimizer, config.trainable)
        moments[trainable] = sum(leaf.size for leaf in jax.tree.leaves(state.opt_state))
        text = train_step.lower(TARGET, drafter, config, state, target_params, *texts).as_text()
        operations[trainable] = text.count("dot_general")
    assert moments["confidence_head"] < 3 * (VOCAB + 2)
    assert operations["confidence_head"] < 0.6 * operations["all"]


def test_what_the_new_head_reads():
    """W1[x_{k-1}] where there is a sequential head, else the hidden state alone; a score that stood in for it is gone."""
    rng = jax.random.key(0)
    widths = {"dspark": VOCAB + 4, "mtp": VOCAB}
    for name in ("dspark", "mtp"):
        plain = WITHOUT_HEAD[name]
        params = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), random_params(plain))
        drafter, extended = with_confidence_head(plain, params, rng)
        head = extended["confidence_head"]["proj"]
        assert head["weight"].shape == (1, widths[name]) and head["weight"].dtype == head["bias"].dtype == jnp.bfloat16
        assert drafter.config.confidence_head and drafter.config.confidence_score is None
        assert jax.tree.structure(extended) == jax.tree.structure(drafter.abstract_params())
        with pytest.raises(ValueError, match="confidence_head is True; allowed is a drafter without"):
            with_confidence_head(drafter, extended, rng)


def test_settings_that_train_nothing_are_refused():
    plain = WITHOUT_HEAD["dflash"]
    with pytest.raises(ValueError, match="trainable is 'confidence_head'; the drafter has none: its parameters are fc, "):
        init_train_state(jax.random.key(0), random_params(plain), HEAD_ALONE.optimizer, "confidence_head")
    with pytest.raises(ValueError, match="trainable is 'heads'; allowed: all, confidence_head"):
        dataclasses.replace(HEAD_ALONE, trainable="heads")
    with pytest.raises(ValueError, match="a trainable 'confidence_head' needs a positive weight"):
        dataclasses.replace(HEAD_ALONE, loss=DraftLossConfig(confidence=0.0))


def _stored(path, target_params):
    """Texts of the toy's, as files of texts are; the last four are held out, at both temperatures."""
    ids, mask = map(np.asarray, _texts(target_params, 0))
    number = np.arange(ROWS)
    fields = {
        "answer_start": np.full(ROWS, mask[0].argmax()),
        "answer_end": np.full(ROWS, LENGTH),
        "finished": np.ones(ROWS),
        "domain": np.zeros(ROWS),
        "temperature": np.where(number % 2, 2, 0),
        "heldout": number >= ROWS - 4,
        "source": np.full(ROWS, -1),
    }
    fields = {name: values.astype(FIELD_DTYPES[name][0]) for name, values in fields.items()}
    tokens = ids.reshape(-1).astype(FIELD_DTYPES["tokens"][0])
    save_token_sequences(path, TokenSequences(tokens, offsets_from_lengths(np.full(ROWS, LENGTH)), **fields))
    return path


@pytest.mark.slow
def test_the_command_writes_the_drafter_with_its_head_and_nothing_else_changed(tmp_path, monkeypatch, capsys):
    """A DFlash in bfloat16 with a reduced draft vocabulary, behind a target in the files that real ones come in."""
    target, _ = write_target(tmp_path / "target", vocab_size=VOCAB, hidden_size=VOCAB, num_hidden_layers=2)
    plain = DFlashDrafter(DFlashConfig(**BLOCK, draft_vocab_size=12))
    draft_ids = np.arange(12, dtype=np.int32)
    save_drafter(tmp_path / "plain", plain, random_params(plain, 2), draft_ids=draft_ids, dtype=jnp.bfloat16)
    data = _stored(tmp_path / "texts.npz", TARGET.init(jax.random.key(1)))
    options = ["--data", str(data), "--target", str(tmp_path / "target"), "--out", str(tmp_path / "run"), "--steps", "3"]
    sizes = ["--batch-size", "4", "--micro-batches", "1", "--num-anchors", "4", "--lengths", str(LENGTH)]
    monkeypatch.setattr("sys.argv", ["run", "add-confidence", str(tmp_path / "plain"), *options, *sizes])
    assert launcher.main() == 0
    before, after = (load_drafter(folder, target.spec) for folder in (tmp_path / "plain", tmp_path / "run" / "drafter"))
    assert after.drafter.config.confidence_head and isinstance(after.survival_model(), RawSurvival)
    np.testing.assert_array_equal(after.draft_ids, draft_ids)
    assert_same({name: leaf for name, leaf in after.params.items() if name != "confidence_head"}, before.params)
    monkeypatch.setattr("sys.argv", ["run", "add-confidence", str(tmp_path / "run" / "drafter"), *options])
    assert launcher.main() == 2
    assert "confidence_head is True" in capsys.readouterr().err
