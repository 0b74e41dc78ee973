"""The Eagle3 drafter: the reference's activations, losses, gradients and traces, and one function in training and in decoding."""

import dataclasses
import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open

from dspark_jax.anchors import sample_anchors
from dspark_jax.chain_configs import eagle3_config, eagle3_json
from dspark_jax.drafters.block_backbone import block_targets
from dspark_jax.drafters.chain import ChainSteps, attend_chains, chain_targets
from dspark_jax.drafters.eagle3 import Eagle3Config, Eagle3Drafter, Eagle3Network
from dspark_jax.layers import attend
from dspark_jax.losses import DraftLossConfig, loss_metrics
from dspark_jax.protocols import TrainBatch
from dspark_jax.sampling import Sampling
from dspark_jax.weights import export_for_reference, load_drafter, load_target
from tests import chain_checks
from tests.reference_checks import ACTIVATIONS, assert_same_gradients, assert_stochastic_trace, evaluate

SMALL = Eagle3Config(taps=(0, 2), **chain_checks.SMALL)
TARGET_OF = {"eagle3_qwen3": "qwen3_target", "eagle3_gemma4": "gemma4_target"}
SOFT_CE = DraftLossConfig(ce=0.0, l1=0.0, confidence=0.0, soft_ce=1.0, chunk=40)


@dataclasses.dataclass(frozen=True)
class Case:
    """One golden folder: the models in it, and its training batch."""

    folder: Any
    target: Any
    target_params: Any
    loaded: Any
    arrays: Any

    @property
    def head(self):
        return self.target.head(self.target_params)

    @property
    def drafter(self):
        """The drafter with the reference's choice of what is trained."""
        return Eagle3Drafter(dataclasses.replace(self.loaded.drafter.config, supervision="hidden_positions"))

    @property
    def batch(self):
        arrays = self.arrays
        return TrainBatch(
            ids=jnp.asarray(arrays["input_ids"]),
            loss_mask=jnp.asarray(arrays["loss_mask"] == 1),
            features=jnp.asarray(arrays["target_hidden_states"]),
            last_hidden=jnp.asarray(arrays["target_last_hidden_states"]),
            anchors=jnp.zeros((2, 1), jnp.int32),
            keep=jnp.zeros((2, 1), bool),
            length=jnp.asarray(arrays["attention_mask"].sum(1), jnp.int32),
        )

    @property
    def valid(self):
        """[B, S, G]: places that are real in the reference's layout; the others mean nothing."""
        place = np.arange(28)[:, None] + np.arange(4)
        return place < self.arrays["attention_mask"].sum(1)[:, None, None]


def by_step(array):
    """[G, B, S, ...] as the reference stores it to [B, S, G, ...]."""
    return np.moveaxis(array, 0, 2)


@pytest.fixture(scope="module", params=sorted(TARGET_OF))
def case(request, golden):
    folder = golden / request.param
    target, target_params = load_target(golden / TARGET_OF[request.param])
    return Case(folder, target, target_params, load_drafter(folder, target.spec), dict(np.load(folder / "train.npz")))


# --- the reference's numbers


@pytest.fixture(scope="module")
def steps(case):
    """Fused taps, outputs of every step before the final norm, draft and teacher logits [B, S, G, V]."""
    network = Eagle3Network(case.drafter.config)

    @jax.jit
    def run(params, batch):
        variables = {"params": params}
        embeddings = case.head.embed(jnp.pad(batch.ids, ((0, 0), (0, 4))))
        fused = network.apply(variables, batch.features, batch.last_hidden, method="source")
        outputs = network.apply(variables, batch.features, batch.last_hidden, embeddings, method="train_outputs")
        logits = case.head.logits(network.apply(variables, outputs, method="final_norm"))
        place = jnp.minimum(jnp.arange(28)[:, None] + 1 + jnp.arange(4), 27)
        return fused, outputs, logits, case.head.logits(batch.last_hidden[:, place])

    return jax.tree.map(np.asarray, run(case.loaded.params, case.batch))


def test_fusion_and_every_step_are_the_references(case, steps):
    """[D1] [D5] Golden `train`: fc, outputs of all steps before the final norm, and logits."""
    fused, outputs, logits, _ = steps
    valid = case.valid
    np.testing.assert_allclose(fused, case.arrays["fc_out"], **ACTIVATIONS)
    np.testing.assert_allclose(outputs[valid], by_step(case.arrays["step_hidden"])[valid], **ACTIVATIONS)
    np.testing.assert_allclose(logits[valid], by_step(case.arrays["step_logits"])[valid], **ACTIVATIONS)


def test_places_labels_and_teachers_are_the_references(case, steps):
    """[D4] Golden `train`: which places count, the token each step reads and predicts, and the target's distribution it is held to."""
    batch, arrays = case.batch, case.arrays
    # Without the hidden states nothing of the network is compiled.
    sites = jax.jit(
        lambda: dataclasses.replace(case.drafter.prediction_sites(case.loaded.params, case.head, batch), hidden=jnp.zeros(()))
    )()
    shape = (2, 28, 4)
    mask = by_step(arrays["step_position_mask"])
    decay = float(arrays["step_loss_decay"]) ** np.arange(4)
    np.testing.assert_allclose(np.asarray(sites.weight).reshape(shape), mask * decay, rtol=1e-6)
    assert sites.soft_ce_places == arrays["loss_normalizer"]
    place = np.arange(2)[:, None, None] * 28 + np.minimum(np.arange(28)[:, None] + 1 + np.arange(4), 27)
    np.testing.assert_array_equal(np.asarray(sites.teacher_index).reshape(shape), place)
    probs = np.asarray(jax.nn.softmax(steps[3]))
    np.testing.assert_allclose(probs[mask > 0], by_step(arrays["step_target_probs"])[mask > 0], **ACTIVATIONS)
    anchors, step_index = (np.asarray(x).reshape(shape) for x in (sites.anchor, sites.step))
    assert np.all(step_index == np.arange(4)) and np.all(anchors == np.arange(1, 29)[:, None])
    ids, rows = np.asarray(batch.ids), np.arange(2)[:, None, None]
    place = np.minimum(anchors + step_index, 27)
    read = by_step(arrays["step_input_ids"])
    np.testing.assert_array_equal(ids[rows, place][:, :24], read[:, :24])
    np.testing.assert_array_equal(np.asarray(sites.label).reshape(shape)[:, :-1], ids[rows, np.minimum(place + 1, 27)][:, :-1])


@jax.jit
def _in_two_parts(queries, keys, values, step):
    """Step `step` of the chains; chunks of keys [B, chunk, S, ...] are the pairs and then the steps."""
    causal = jnp.broadcast_to(jnp.tril(jnp.ones((28, 28), bool)), (2, 28, 28))
    steps = ChainSteps(keys.swapaxes(1, 2), values.swapaxes(1, 2))
    return attend_chains(queries, keys[:, 0].swapaxes(1, 2), values[:, 0].swapaxes(1, 2), causal, steps, steps.taken(step), 0.3)


@jax.jit
def _dense(queries, keys, values, mask):
    keys, values = (x.reshape(2, 4 * 28, 2, 8).swapaxes(1, 2) for x in (keys, values))
    return attend(queries, keys, values, mask, 0.3)


def test_the_attention_pattern_is_the_references_dense_mask(case):
    """Golden `attention_mask_dense_step*`: attention in two parts equals dense attention under the mask, at every real place."""
    rng = np.random.default_rng(0)
    queries = jnp.asarray(rng.normal(size=(2, 28, 4, 8)), jnp.float32)
    keys, values = (jnp.asarray(rng.normal(size=(2, 4, 28, 2, 8)), jnp.float32) for _ in range(2))
    for t in range(4):
        mask = np.pad(case.arrays[f"attention_mask_dense_step{t}"], ((0, 0), (0, 0), (0, 28 * (3 - t))))
        ours, dense = _in_two_parts(queries, keys, values, jnp.int32(t)), _dense(queries, keys, values, mask)
        valid = case.valid[:, :, t]
        np.testing.assert_allclose(np.asarray(ours)[valid], np.asarray(dense)[valid], **ACTIVATIONS)


def test_step_losses_total_and_all_gradients_are_the_references(case, steps):
    """Golden `train` and `train_metrics`; the divisor is all places of the batch."""
    arrays = case.arrays
    loss, terms, gradients = evaluate(case.drafter, case.loaded.params, case.head, case.head, case.batch, SOFT_CE)
    np.testing.assert_allclose(loss, arrays["total_loss"], **ACTIVATIONS)
    norm = np.sqrt(sum(float(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(gradients)))
    np.testing.assert_allclose(norm, arrays["grad_norm"], rtol=1e-4)
    layer = gradients["layers_0"]
    if "layer_scalar" in layer:
        assert not layer["layer_scalar"].any(), "a buffer of the reference, never trained"
        gradients = {**gradients, "layers_0": {name: leaf for name, leaf in layer.items() if name != "layer_scalar"}}
    assert_same_gradients(gradients, arrays, "grad/")

    _, _, logits, teacher = steps
    soft_ce = -np.sum(np.asarray(jax.nn.softmax(teacher) * jax.nn.log_softmax(logits)), axis=-1)
    counted = by_step(arrays["step_position_mask"])
    np.testing.assert_allclose(np.sum(soft_ce * counted, axis=(0, 1)) / 56, arrays["step_loss"], **ACTIVATIONS)

    wanted = json.loads((case.folder / "train_metrics.json").read_text())
    metrics = loss_metrics(terms, SOFT_CE)
    for ours, theirs in (("loss", "loss"), ("accepted_length", "tau_probabilistic"), ("greedy_accepted_length", "tau_greedy")):
        np.testing.assert_allclose(metrics[ours], wanted[f"train/{theirs}"], err_msg=ours, **ACTIVATIONS)
    for ours, theirs in (("accept_rate", "accept_rate"), ("agreement", "accuracy")):
        np.testing.assert_allclose(metrics[ours], [wanted[f"train/{theirs}@{t}"] for t in range(4)], err_msg=ours, **ACTIVATIONS)


@pytest.mark.parametrize("name", ["greedy", "stop"])
def test_greedy_traces_come_out_round_by_round(case, name):
    """[B1] Golden `decode_*`, token for token."""
    trace = dict(np.load(case.folder / f"decode_{name}.npz"))
    written = chain_checks.replay_greedy_trace(trace, case.target, case.target_params, case.loaded.drafter, case.loaded.params)
    assert written == trace["output_ids"][0].tolist()


def test_the_stochastic_trace_follows_from_our_probabilities(case):
    """Golden `decode_temp1`: both models give its logits on its prefixes, and its uniforms decide with them as they did there."""
    trace = dict(np.load(case.folder / "decode_temp1.npz"))
    assert_stochastic_trace(trace, case.target, case.target_params, chain_checks.AtAnchors(case.loaded.drafter), case.loaded.params)


def test_a_checkpoint_read_and_written_back_is_the_same_checkpoint(case, tmp_path):
    """Every tensor bit for bit, every field of the config."""
    loaded = case.loaded
    export_for_reference(tmp_path / "d", loaded.drafter, loaded.params, case.head, config_json=loaded.config_json, dtype=jnp.float32)
    with (
        safe_open(tmp_path / "d" / "model.safetensors", framework="np") as ours,
        safe_open(case.folder / "model.safetensors", framework="np") as theirs,
    ):
        assert sorted(ours.keys()) == sorted(theirs.keys())
        for name in theirs.keys():
            np.testing.assert_array_equal(ours.get_tensor(name), theirs.get_tensor(name), err_msg=name)
    written, reference = (json.loads((folder / "config.json").read_text()) for folder in (tmp_path / "d", case.folder))
    assert written == reference


def test_what_a_config_says_is_read(case):
    """Golden `config.json`; an older name of the architecture, and options of ours."""
    file, config = case.loaded.config_json, case.loaded.drafter.config
    assert (config.block_size, config.taps, config.step_loss_decay, config.num_target_layers) == (4, (0, 1, 2, 3, 4), 0.8, 6)
    if file["architectures"] == ["Qwen3Eagle3Model"]:
        assert eagle3_config(file | {"architectures": ["Eagle3DraftModel"]}, "old") == config
    else:
        assert (config.head_dim, config.num_kv_heads, config.k_eq_v, config.rotated_share) == (32, 1, True, 0.25)
    ours = dataclasses.replace(config, supervision="hidden_positions", draft_vocab_size=40, soft_ce_over_places=False)
    assert eagle3_config(eagle3_json(ours, file), "again") == ours


# --- training is decoding


@pytest.fixture(scope="module")
def small():
    """A random drafter with layers of Gemma 4 that drafts from 12 of the 31 tokens, and its head."""
    drafter = Eagle3Drafter(dataclasses.replace(SMALL, draft_vocab_size=12, **chain_checks.GEMMA))
    draft_ids = jnp.asarray(np.sort(np.random.default_rng(0).permutation(31)[:12]), jnp.int32)
    head = chain_checks.random_head(embed_scale=4.0, softcap=8.0).restrict(draft_ids)
    return drafter, chain_checks.random_drafter_params(drafter), head


def test_the_training_forward_is_the_decoding_forward_at_every_anchor(small):
    """[A7] [C4] [E1] Of a reduced vocabulary: ids come back as the target's and are read as such by the next step."""
    chain_checks.assert_training_is_decoding(*small)


def test_no_chain_sees_what_comes_later(small):
    """[E1]"""
    chain_checks.assert_no_leak(*small)


def test_padding_does_not_matter(small):
    """[E2]"""
    chain_checks.assert_padding_does_not_matter(*small)


def test_commits_in_chunks_of_any_count_leave_the_same_state(small):
    """[C3] [C5] Padding leaves no trace, and a request without news keeps its seed."""
    chain_checks.assert_chunks_do_not_matter(*small)


def test_warm_drafts_follow_their_reported_numbers(small):
    """[A1] log q, normaliser and floor are those of the logits that are given along, filters included; row 9 is greedy."""
    drafter, params, head = small
    temperature = [1.0, 0.7] * 4 + [1.0, 0.0]
    sampling = Sampling.make(10, temperature, [0, 5] * 5, [1.0, 1.0, 0.6, 1.0, 1.0] * 2)
    block = chain_checks.propose(drafter, params, head, drafter.init_state(10, 16), jnp.zeros(10, jnp.int32), sampling)
    logits, floor = np.asarray(block.logits, np.float64), np.asarray(block.floor)[..., None]
    kept = np.where(logits >= floor, logits / np.where(np.array(temperature) == 0, 1.0, temperature)[:, None, None], -np.inf)
    normaliser = np.log(np.exp(kept).sum(-1))
    rows = np.asarray(block.ids) if head.draft_ids is None else np.searchsorted(np.asarray(head.draft_ids), np.asarray(block.ids))
    drawn = np.take_along_axis(kept, rows[..., None], -1)[..., 0]
    np.testing.assert_allclose(np.asarray(block.log_normaliser)[:9], normaliser[:9], rtol=1e-5)
    np.testing.assert_allclose(np.asarray(block.log_q)[:9], (drawn - normaliser)[:9], atol=1e-5)
    assert np.all(np.asarray(block.log_q)[9] == 0) and np.array_equal(rows[9], logits[9].argmax(-1))


# --- what is trained


def test_drawn_anchors_are_trained_where_blocks_would_be():
    """Places (anchor, step) of the chains are those of a block drafter on the same batch, with the same labels and teachers."""
    rng = np.random.default_rng(0)
    mask = np.zeros((3, 14), bool)
    mask[0, [3, 4, 5, 6, 9, 10]], mask[1, 2:], mask[2, 5:9] = True, True, True
    anchors, keep = sample_anchors(jax.random.key(1), jnp.asarray(mask), 4)
    drawn: Any = {"anchors": anchors, "keep": keep, "ids": jnp.asarray(rng.integers(0, 31, (3, 14)), jnp.int32)}
    batch = chain_checks.random_batch(Eagle3Drafter(SMALL), num_rows=3, width=14, loss_mask=jnp.asarray(mask), **drawn)
    chains, blocks = chain_targets(batch, 3, "drawn_anchors"), block_targets(batch, 3)
    everything = np.asarray(chain_targets(batch, 3, "answer_blocks").supervised)

    def sites(targets, anchor):
        kept = np.asarray(targets.supervised)
        places = np.broadcast_to(np.asarray(anchor)[..., None], kept.shape)[kept]
        rows, steps = np.argwhere(kept)[:, 0], np.argwhere(kept)[:, 2]
        return sorted(zip(rows, places, steps, np.asarray(targets.labels)[kept], np.asarray(targets.teacher_position)[kept], strict=True))

    behind = np.broadcast_to(np.arange(1, 15), (3, 14))
    assert sites(chains, behind) == sites(blocks, anchors)
    assert 0 < np.asarray(chains.supervised).sum() < everything.sum() and not (np.asarray(chains.supervised) & ~everything).any()


def test_answer_blocks_hold_what_decoding_meets():
    """The first round's chain, whose pair holds the last prompt token, is trained; supervision ends with the answer.

    Two turns: prompt 0..2, answer 3..6, header 7..8, answer 9..10, padding.
    """
    answer = [3, 4, 5, 6, 9, 10]
    mask = np.zeros((1, 14), bool)
    mask[0, answer] = True
    batch = chain_checks.random_batch(
        Eagle3Drafter(SMALL), num_rows=1, width=14, loss_mask=jnp.asarray(mask), length=jnp.array([11], jnp.int32)
    )
    supervised = np.asarray(chain_targets(batch, 3, "answer_blocks").supervised)[0]
    for i in range(14):
        chain = [i + 1 + t for t in range(4)]
        assert supervised[i].tolist() == [all(token in answer for token in chain[: t + 2]) for t in range(3)]
    assert supervised.sum(1).tolist() == [0, 0, 3, 2, 1, 0, 0, 0, 1, 0, 0, 0, 0, 0]

    theirs = np.asarray(chain_targets(batch, 3, "hidden_positions").supervised)[0]
    assert not theirs[2, 0] and theirs[2, 1] and theirs[6, 0], "the first round is left out, and a header of the next turn is a label"
    with pytest.raises(ValueError, match="length is None; supervision 'hidden_positions' needs to know where each text ends"):
        chain_targets(dataclasses.replace(batch, length=None), 3, "hidden_positions")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"taps": ()}, r"taps is \(\); at least one, ascending, each in 0..2"),
        ({"taps": (-1, 2)}, r"taps is \(-1, 2\)"),
        ({"taps": (0, 3)}, r"taps is \(0, 3\)"),
        ({"taps": (2, 0)}, r"taps is \(2, 0\)"),
        ({"block_size": 0}, "block_size is 0; a round drafts at least 1 token"),
        ({"num_kv_heads": 3}, r"num_heads is 4; it must be a multiple of num_kv_heads \(3\)"),
        ({"draft_vocab_size": 32}, "draft_vocab_size is 32; it must be in 1..31"),
        ({"step_loss_decay": 0.0}, r"step_loss_decay is 0.0; it must be in \(0, 1\]"),
        ({"supervision": "all"}, "supervision is 'all'; allowed: answer_blocks, drawn_anchors, hidden_positions"),
    ],
)
def test_a_drafter_that_cannot_be_is_refused_by_field(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        dataclasses.replace(SMALL, **changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"num_hidden_layers": 2}, "num_hidden_layers is 2; supported: 1"),
        ({"ttt_length": None}, "the field 'ttt_length' is missing"),
        ({"target_layer_ids": [4, 2]}, r"file: taps is \(4, 2\); at least one, ascending"),
        ({"dspark_jax": {"colour": 1}}, "dspark_jax holds 'colour'; known there: .*supervision"),
    ],
)
def test_a_config_that_is_wrong_is_refused_by_name(golden, changes, complaint):
    file = json.loads((golden / "eagle3_qwen3" / "config.json").read_text())
    with pytest.raises(ValueError, match=complaint):
        eagle3_config(file | changes, "file")
