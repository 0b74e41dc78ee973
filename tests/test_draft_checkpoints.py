"""Drafters in the layout of the reference: read, checked against their target, written back."""

import dataclasses
import json
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from dspark_jax import weights
from dspark_jax.drafters.dflash import DFlashDrafter
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.drafters.mtp import MTPConfig, MTPDrafter
from dspark_jax.moe import MoEConfig
from dspark_jax.protocols import TargetHead, TargetSpec
from dspark_jax.sharding import make_mesh
from dspark_jax.tensor_files import flatten
from dspark_jax.weights import export_for_reference, load_drafter, load_target, save_drafter
from tests.tiny_models import assert_same, edit_json, random_params

QWEN3_SPEC = TargetSpec(97, 32, 6, "Qwen3ForCausalLM")


@pytest.fixture
def draft_folder(golden, tmp_path):
    """A copy of the golden drafter that a test may damage."""
    shutil.copytree(golden / "dspark_qwen3_vanilla", tmp_path / "draft", ignore=shutil.ignore_patterns("*.npz"))
    return tmp_path / "draft"


def cut(loaded: weights.LoadedDrafter, draft_ids) -> tuple[DSparkDrafter, dict]:
    """The drafter with a reduced draft vocabulary."""
    drafter = DSparkDrafter(dataclasses.replace(loaded.drafter.config, draft_vocab_size=len(draft_ids)))
    head = loaded.params["markov_head"]
    w2 = {"weight": head["markov_w2"]["weight"][jnp.asarray(draft_ids)]}
    return drafter, {**loaded.params, "markov_head": {**head, "markov_w2": w2}}


def test_a_reference_draft_checkpoint_loads_without_its_copies_of_the_target(golden):
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC)
    config = loaded.drafter.config
    assert (config.block_size, config.mask_token_id, config.taps, config.num_target_layers) == (5, 96, (0, 2, 4), 6)
    assert (config.markov_rank, config.confidence_head, config.confidence_with_markov) == (8, True, True)
    assert loaded.draft_ids is None and loaded.survival is None
    with safe_open(golden / "dspark_qwen3_vanilla" / "model.safetensors", framework="np") as file:
        for name in file.keys():
            if name not in weights.LENT:
                ours = flatten(loaded.params)[name.replace("layers.", "layers_")]
                np.testing.assert_array_equal(np.asarray(ours), file.get_tensor(name), err_msg=name)
    assert not {"embed_tokens", "lm_head"} & loaded.params.keys()


def test_a_drafter_is_restored_into_a_mesh_with_the_same_numbers(golden):
    plain = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC)
    mesh = make_mesh(fsdp=4, tensor=2)
    sharded = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC, mesh=mesh)
    assert_same(sharded.params, plain.params)
    assert len(sharded.params["fc"]["weight"].sharding.device_set) == 8
    assert not sharded.params["fc"]["weight"].is_fully_replicated


def test_the_drafters_trained_for_smollm2_load(shared):
    spec = TargetSpec(49152, 576, 30, "LlamaForCausalLM")
    drafter = load_drafter(shared / "smollm2" / "smollm2_dspark_2l_r64", spec)
    assert drafter.drafter.config.mask_token_id == 16 and drafter.drafter.config.markov_rank == 64
    plain = load_drafter(shared / "smollm2" / "smollm2_dflash_2l", spec)
    assert isinstance(plain.drafter, DFlashDrafter) and plain.drafter.config.layout == "anchor_first"
    assert not {"markov_head", "confidence_head"} & plain.params.keys()


def test_saving_and_loading_gives_the_same_drafter(golden, tmp_path):
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC)
    survival = {"temperature": [1.0, 1.5], "kind": "sts"}
    save_drafter(tmp_path / "d", loaded.drafter, loaded.params, survival=survival, dtype=jnp.float32)
    again = load_drafter(tmp_path / "d", QWEN3_SPEC)
    assert again.drafter == loaded.drafter and again.survival == survival and again.draft_ids is None
    assert_same(again.params, loaded.params)
    save_drafter(tmp_path / "d", loaded.drafter, loaded.params)
    rounded = load_drafter(tmp_path / "d", QWEN3_SPEC)
    assert rounded.survival is None, "the older calibration does not outlive its drafter"
    assert_same(rounded.params, jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16).astype(jnp.float32), loaded.params))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


def test_a_reduced_draft_vocabulary_is_stored_with_its_ids(golden, tmp_path):
    """[A7] The table from draft rows to target ids travels with W2, whose rows are in its order."""
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC)
    draft_ids = np.array([1, 5, 6, 40, 96])
    drafter, params = cut(loaded, draft_ids)
    save_drafter(tmp_path / "d", drafter, params, draft_ids=jnp.asarray(draft_ids, jnp.int32), dtype=jnp.float32)
    again = load_drafter(tmp_path / "d", QWEN3_SPEC)
    assert again.drafter == drafter
    assert again.draft_ids is not None and again.draft_ids.dtype == jnp.int32
    np.testing.assert_array_equal(again.draft_ids, draft_ids)
    w2 = again.params["markov_head"]["markov_w2"]["weight"]
    np.testing.assert_array_equal(w2, loaded.params["markov_head"]["markov_w2"]["weight"][draft_ids])


@pytest.mark.parametrize("draft_ids", [None, [1, 2], [2, 1, 3], [1, 1, 3], [-1, 0, 1], [1, 2, 97]])
def test_draft_ids_that_do_not_fit_are_not_saved(golden, tmp_path, draft_ids):
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC)
    drafter, params = cut(loaded, [1, 2, 3])
    with pytest.raises(ValueError, match="draft_ids"):
        save_drafter(tmp_path / "d", drafter, params, draft_ids=None if draft_ids is None else np.array(draft_ids))
    assert not (tmp_path / "d").exists()


def test_a_reduced_vocabulary_in_a_file_must_be_complete(golden, tmp_path):
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC)
    drafter, params = cut(loaded, [1, 2, 3])
    save_drafter(tmp_path / "d", drafter, params, draft_ids=np.array([1, 2, 3]))
    edit_json(tmp_path / "d" / "config.json", draft_vocab_size=4)
    with pytest.raises(ValueError, match=r"draft_vocab_size is 4, and tensor draft_vocab_ids is of shape \(3,\)"):
        load_drafter(tmp_path / "d", QWEN3_SPEC)
    edit_json(tmp_path / "d" / "config.json", draft_vocab_size=None)
    with pytest.raises(ValueError, match="draft_vocab_size is None, and tensor draft_vocab_ids is of shape"):
        load_drafter(tmp_path / "d", QWEN3_SPEC)


def test_the_export_has_exactly_the_tensors_and_fields_of_the_reference(golden, tmp_path):
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC)
    target, params = load_target(golden / "qwen3_target")
    export_for_reference(tmp_path / "d", loaded.drafter, loaded.params, target.head(params), dtype=jnp.float32)
    with (
        safe_open(tmp_path / "d" / "model.safetensors", framework="np") as ours,
        safe_open(golden / "dspark_qwen3_vanilla" / "model.safetensors", framework="np") as theirs,
    ):
        assert sorted(ours.keys()) == sorted(theirs.keys())
        for name in theirs.keys():
            np.testing.assert_array_equal(ours.get_tensor(name), theirs.get_tensor(name), err_msg=name)
    written = json.loads((tmp_path / "d" / "config.json").read_text())
    reference = json.loads((golden / "dspark_qwen3_vanilla" / "config.json").read_text())
    differing = {name for name in written if written[name] != reference.get(name)}
    assert differing == {"num_anchors"}, "the one field that a drafter does not know; it matters in training alone"
    assert load_drafter(tmp_path / "d", QWEN3_SPEC).drafter == loaded.drafter


def test_a_reduced_vocabulary_is_not_exported(golden, tmp_path):
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC)
    target, params = load_target(golden / "qwen3_target")
    head: TargetHead = target.head(params)
    drafter, cut_params = cut(loaded, [1, 2, 3])
    with pytest.raises(ValueError, match="draft_vocab_size is 3: the reference draws drafts from the whole vocabulary"):
        export_for_reference(tmp_path / "d", drafter, cut_params, head)
    with pytest.raises(ValueError, match="without embedding and lm_head"):
        save_drafter(tmp_path / "d", drafter, cut_params, draft_ids=np.array([1, 2, 3]), lm_head=head.lm_head)
    with pytest.raises(ValueError, match=r"lm_head.weight has shape \(5, 32\)"):
        save_drafter(tmp_path / "d", loaded.drafter, loaded.params, lm_head=head.lm_head[:5])


def test_only_a_drafter_is_overwritten_and_what_lies_beside_it_stays(golden, tmp_path):
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC)
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter1.txt").write_text("years of work")
    with pytest.raises(ValueError, match="thesis is not empty and holds no drafter; it will not be overwritten"):
        save_drafter(tmp_path / "thesis", loaded.drafter, loaded.params)
    assert (tmp_path / "thesis" / "chapter1.txt").read_text() == "years of work"
    with pytest.raises(ValueError, match="chapter1.txt is a file"):
        save_drafter(tmp_path / "thesis" / "chapter1.txt", loaded.drafter, loaded.params)
    (tmp_path / "empty").mkdir()
    save_drafter(tmp_path / "empty", loaded.drafter, loaded.params)
    (tmp_path / "empty" / "MODEL_CARD.md").write_text("a card")
    (tmp_path / "empty" / "curves").mkdir()
    save_drafter(tmp_path / "empty", loaded.drafter, loaded.params)
    names = sorted(path.name for path in (tmp_path / "empty").iterdir())
    assert names == ["MODEL_CARD.md", "config.json", "curves", "model.safetensors"]


def test_a_write_that_fails_leaves_the_old_drafter_whole(golden, tmp_path, monkeypatch):
    loaded = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC)
    save_drafter(tmp_path / "d", loaded.drafter, loaded.params, dtype=jnp.float32)

    def disk_full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(weights, "save_file", disk_full)
    with pytest.raises(OSError, match="no space left"):
        save_drafter(tmp_path / "d", loaded.drafter, loaded.params)
    assert_same(load_drafter(tmp_path / "d", QWEN3_SPEC).params, loaded.params)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["Qwen3MedusaModel"]}, r"architectures is \['Qwen3MedusaModel'\]; supported: Qwen3DSparkModel"),
        ({"mask_token_id": None}, "the field 'mask_token_id' is missing"),
        ({"mask_token_id": 97}, r"mask_token_id is 97; it must be a token id in 0..96"),
        ({"block_size": 0}, "block_size is 0; a block drafts at least 1 token"),
        ({"block_size": None}, "the field 'block_size' is missing"),
        ({"target_layer_ids": [0, 2, 5]}, r"taps is \(0, 2, 5\); .*in -1..4 for a target of 6 layers"),
        ({"target_layer_ids": [-2, 2, 4]}, r"taps is \(-2, 2, 4\)"),
        ({"target_layer_ids": []}, r"taps is \(\); at least one"),
        ({"target_layer_ids": [0, 2]}, r"wrong shape: fc.weight \(32, 96\) instead of \(32, 64\)"),
        ({"markov_head_type": "telepathic"}, "markov_head_type is 'telepathic'; known: .*vanilla"),
        ({"markov_rank": 4}, r"wrong shape: .*markov_w1.weight \(97, 8\) instead of \(97, 4\)"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type is 'linear'; a drafter supports 'default' alone"),
        ({"num_hidden_layers": 3}, "missing: layers_2"),
        ({"num_attention_heads": 3}, r"num_heads is 3; it must be a multiple of num_kv_heads \(2\)"),
        ({"target_layer_ids": 5}, "target_layer_ids is 5; it must be a list of integers"),
        ({"block_size": "7"}, "block_size is '7'; it must be an integer"),
        ({"dspark_jax": 3}, "dspark_jax is 3; it must be an object of options"),
    ],
)
def test_a_draft_checkpoint_that_is_wrong_is_refused_by_name(draft_folder, changes, complaint):
    """[D2] In particular no other token stands in for an absent mask token."""
    edit_json(draft_folder / "config.json", **changes)
    with pytest.raises(ValueError, match=complaint):
        load_drafter(draft_folder, QWEN3_SPEC)


@pytest.mark.parametrize(
    ("spec", "complaint"),
    [
        (TargetSpec(100, 32, 6, "X"), "vocab_size is 97, and the target's vocabulary is 100"),
        (TargetSpec(97, 64, 6, "X"), "hidden_size is 32, and the target's width is 64"),
        (TargetSpec(97, 32, 4, "X"), "num_target_layers is 6, and the target's number of layers is 4"),
    ],
)
def test_a_drafter_made_for_another_target_is_refused(golden, spec, complaint):
    with pytest.raises(ValueError, match=f"the drafter was made for another target: {complaint}"):
        load_drafter(golden / "dspark_qwen3_vanilla", spec)


def test_missing_draft_files_are_refused_by_name(draft_folder):
    with pytest.raises(ValueError, match="is no file or folder"):
        load_drafter(draft_folder / "nowhere", QWEN3_SPEC)
    (draft_folder / "survival.json").write_text("[")
    with pytest.raises(ValueError, match="survival.json is not valid JSON"):
        load_drafter(draft_folder, QWEN3_SPEC)
    (draft_folder / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="has neither model.safetensors nor"):
        load_drafter(draft_folder, QWEN3_SPEC)
    (draft_folder / "config.json").unlink()
    with pytest.raises(ValueError, match="has no file config.json"):
        load_drafter(draft_folder, QWEN3_SPEC)


def test_a_lent_tensor_of_another_size_is_refused(draft_folder):
    with safe_open(draft_folder / "model.safetensors", framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    save_file(tensors | {"lm_head.weight": np.zeros((50, 32), np.float32)}, draft_folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"lm_head.weight is \(50, 32\); it must be the target's, \(97, 32\)"):
        load_drafter(draft_folder, QWEN3_SPEC)


@pytest.mark.parametrize(
    "changes",
    [
        {"layout": "anchor_plus_masks"},
        {"window": 8, "streams": 2, "experts": MoEConfig(num_experts=4, top_k=2, intermediate_size=12)},
        {"detach_confidence": True, "loss_decay": None},
    ],
)
def test_options_that_the_layout_does_not_know_come_back_too(golden, tmp_path, changes):
    """[D3] In a field of our own, which the reference ignores; what would change the computation there is not exported to it."""
    given = load_drafter(golden / "dspark_qwen3_vanilla", QWEN3_SPEC).drafter.config
    drafter = DSparkDrafter(dataclasses.replace(given, **changes))
    params = random_params(drafter)
    save_drafter(tmp_path / "d", drafter, params, dtype=jnp.float32)
    again = load_drafter(tmp_path / "d", QWEN3_SPEC)
    assert again.drafter == drafter
    assert_same(again.params, params)
    target, target_params = load_target(golden / "qwen3_target")
    if "layout" in changes or "window" in changes:
        with pytest.raises(ValueError, match="options that the reference does not know"):
            export_for_reference(tmp_path / "e", drafter, params, target.head(target_params))
    edit_json(tmp_path / "d" / "config.json", dspark_jax={"telepathy": True})
    with pytest.raises(ValueError, match="dspark_jax holds 'telepathy'; known there: "):
        load_drafter(tmp_path / "d", QWEN3_SPEC)


def test_a_gemma_drafter_is_exported_with_its_targets_config(golden, tmp_path):
    """The reference's Gemma classes read fields of the target that a drafter does not have."""
    spec = TargetSpec(97, 32, 6, "Gemma4ForCausalLM")
    loaded = load_drafter(golden / "dspark_gemma4_vanilla", spec)
    embedding = jnp.zeros((97, 32))
    with pytest.raises(ValueError, match="config_json lacks head_dim, num_key_value_heads, sliding_window"):
        export_for_reference(tmp_path / "d", loaded.drafter, loaded.params, TargetHead(embedding, embedding))


def test_a_drafter_that_the_reference_has_no_class_for_is_not_exported(tmp_path):
    drafter = MTPDrafter(MTPConfig(31, 16, 24, 4, 2, 8, num_target_layers=4))
    embedding = jnp.zeros((31, 16))
    with pytest.raises(ValueError, match=r"architectures is \['MTPDraftModel'\]: the reference knows Qwen3DSparkModel"):
        export_for_reference(tmp_path / "d", drafter, random_params(drafter), TargetHead(embedding, embedding))


def test_the_released_drafter_has_a_name():
    spec = TargetSpec(49152, 576, 30, "LlamaForCausalLM")
    with pytest.raises(ValueError, match="model 'smollm2_dspak' is no file or folder; .* of drafters also smollm2_dspark"):
        load_drafter("smollm2_dspak", spec)
    assert load_drafter("smollm2_dspark", spec).draft_ids is not None
