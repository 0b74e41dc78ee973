"""A GGUF file gives the target that the Hugging Face folder gives."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import gguf_files, model_files, weights
from dspark_jax.layers import RopeScaling, inverse_frequencies
from dspark_jax.protocols import FlatTokens
from dspark_jax.tokenizers import load_tokenizer
from dspark_jax.weights import load_target
from tests.tiny_models import assert_same, needs_gguf, needs_smollm2, write_gguf, write_target


@needs_gguf
@pytest.mark.parametrize(
    ("architecture", "name", "changes"),
    [
        ("LlamaForCausalLM", "llama", {}),
        ("LlamaForCausalLM", "llama", {"attention_bias": True, "tie_word_embeddings": False}),
        ("Qwen2ForCausalLM", "qwen2", {}),
        ("Qwen3ForCausalLM", "qwen3", {"head_dim": 16}),
    ],
)
def test_a_gguf_file_gives_what_the_hugging_face_folder_gives(tmp_path, architecture, name, changes):
    target, params = write_target(tmp_path / "m", architectures=[architecture], **changes)
    write_gguf(tmp_path / "m.gguf", target, params, name)
    loaded_target, loaded = load_target(tmp_path / "m.gguf")
    assert loaded_target == target
    assert_same(loaded, params)


@needs_gguf
def test_tensors_are_dequantised_as_the_reference_reader_does_it_whole_and_by_rows(tmp_path):
    import gguf

    kinds = [gguf.GGMLQuantizationType[k] for k in ("F32", "F16", "BF16", "Q4_0", "Q4_1", "Q5_1", "Q8_0", "Q4_K", "Q5_K", "Q6_K")]
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_array("some.strings", ["a", "ä", ""])
    writer.add_array("some.numbers", [3, 1, 2])
    writer.add_array("some.flags", [True, False])
    writer.add_float64("some.number", 0.1)
    for kind in kinds:
        elements, size = gguf.GGML_QUANT_SIZES[kind]
        raw = rng.integers(0, 60, (6, 512 // elements * size), np.uint8)  # small bytes: scales are finite
        raw = raw.view({"F32": np.float32, "F16": np.float16}.get(kind.name, np.uint8))
        writer.add_tensor(f"{kind.name}.weight", raw, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    file = gguf_files.read_gguf(tmp_path / "m.gguf")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    fields = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    assert file.metadata == fields
    rows = np.array([4, 0, 5])
    for tensor in reader.tensors:
        expected = gguf.dequantize(tensor.data, tensor.tensor_type).reshape(6, 512)
        np.testing.assert_array_equal(gguf_files.read_tensor(file, tensor.name), expected, err_msg=tensor.name)
        np.testing.assert_array_equal(gguf_files.read_tensor(file, tensor.name, rows), expected[rows], err_msg=tensor.name)
        np.testing.assert_array_equal(gguf_files.read_tensor(file, tensor.name, slice(2, 4)), expected[2:4], err_msg=tensor.name)


@needs_gguf
def test_quantised_rows_of_q_and_k_are_put_in_order_too(tmp_path):
    import gguf

    target, params = write_target(tmp_path / "m")
    kinds = dict.fromkeys(("attn_q", "attn_k", "attn_v"), gguf.GGMLQuantizationType.Q8_0)
    write_gguf(tmp_path / "m.gguf", target, params, kinds=kinds)
    _, loaded = load_target(tmp_path / "m.gguf")
    for name in ("q_proj", "k_proj", "v_proj"):
        exact = params["layers_1"]["self_attn"][name]["weight"]
        np.testing.assert_allclose(loaded["layers_1"]["self_attn"][name]["weight"], exact, atol=0.03)


@needs_gguf
def test_llama3_scaling_is_recognised_by_its_divisors_and_others_are_refused(tmp_path):
    target, params = write_target(tmp_path / "m", rope_theta=500_000.0)
    scaling = RopeScaling("llama3", 32.0)
    divisors = np.asarray(inverse_frequencies(8, 500_000.0) / inverse_frequencies(8, 500_000.0, scaling))
    assert divisors[0] == 1.0 and divisors[-1] == 32.0
    write_gguf(tmp_path / "m.gguf", target, params, extra={"rope_freqs.weight": divisors})
    assert load_target(tmp_path / "m.gguf")[0].config == dataclasses.replace(target.config, rope_scaling=scaling)
    write_gguf(tmp_path / "other.gguf", target, params, extra={"rope_freqs.weight": np.array([1, 2, 3, 4], np.float32)})
    with pytest.raises(ValueError, match="rope_freqs.weight are not those of Llama 3.1 scaling"):
        load_target(tmp_path / "other.gguf")
    write_gguf(tmp_path / "linear.gguf", target, params, keys={"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0})
    assert load_target(tmp_path / "linear.gguf")[0].config.rope_scaling == RopeScaling("linear", 4.0)


@needs_gguf
@pytest.mark.parametrize(
    ("name", "keys", "extra", "complaint"),
    [
        ("bert", {}, {}, "general.architecture is 'bert'; supported: llama, qwen2, qwen3"),
        ("llama", {"llama.expert_count": 8}, {}, "expert_count is 8"),
        ("llama", {"llama.rope.scaling.type": "yarn"}, {}, "rope.scaling.type is 'yarn'"),
        ("llama", {"llama.rope.dimension_count": 4}, {}, "rope.dimension_count is 4; supported: 8"),
        ("llama", {"split.count": 3}, {}, "is one of 3 parts"),
        ("llama", {}, {"blk.0.attn_sinks.weight": np.zeros(4, np.float32)}, "unexpected: blk.0.attn_sinks.weight"),
    ],
)
def test_a_gguf_file_that_is_not_supported_is_refused_by_name(tmp_path, name, keys, extra, complaint):
    target, params = write_target(tmp_path / "m")
    write_gguf(tmp_path / "m.gguf", target, params, name, extra, keys)
    with pytest.raises(ValueError, match=complaint):
        load_target(tmp_path / "m.gguf")


@needs_gguf
def test_a_damaged_gguf_file_is_refused_by_name(tmp_path):
    target, params = write_target(tmp_path / "m")
    path = tmp_path / "m.gguf"
    write_gguf(path, target, params)
    content = path.read_bytes()
    for damaged, complaint in (
        (b"GGUF", "it has 4 bytes"),
        (b"GGML" + content[4:], "does not begin with 'GGUF'"),
        (content[:4] + b"\x01" + content[5:], "has GGUF version 1; supported"),
        (content[:200], "damaged GGUF header"),
        (content[:-1000], "is cut short"),
    ):
        path.write_bytes(damaged)
        with pytest.raises(ValueError, match=complaint):
            load_target(path)


@needs_gguf
@needs_smollm2
def test_the_packaged_smollm2_is_the_model_it_says():
    """Read from the header alone."""
    file = gguf_files.read_gguf(model_files.locate_model("smollm2"))
    read = weights.TARGETS["LlamaForCausalLM"].gguf_config
    assert read is not None
    config = read(file, "LlamaForCausalLM")
    assert (config.num_layers, config.hidden_size, config.vocab_size, config.num_heads, config.num_kv_heads) == (30, 576, 49152, 9, 3)
    assert (config.head_dim, config.rope_theta, config.rms_norm_eps, config.tie_word_embeddings) == (64, 100_000.0, 1e-5, True)


@pytest.mark.slow
@needs_gguf
@needs_smollm2
def test_smollm2_reads_english():
    """Its surprise at plain text is low with q and k rows in the order of Hugging Face, and far higher in the order of the file."""
    tokenizer = load_tokenizer("smollm2")
    text = tokenizer.encode(
        "Water is a chemical compound made of two hydrogen atoms and one oxygen atom. It covers most of the surface of the Earth, "
        "and all known forms of life depend on it. When it is heated to one hundred degrees Celsius it boils and turns into steam."
    )
    target, params = load_target("smollm2")
    config = target.config

    def surprise(params) -> float:
        tokens = FlatTokens.grid(jnp.asarray([text], jnp.int32), jnp.zeros(1, jnp.int32), jnp.full(1, len(text), jnp.int32))
        hidden, _, _ = target.forward(params, None, tokens, ())
        log_p = jax.nn.log_softmax(target.head(params).logits(hidden))[:-1]
        return -float(log_p[jnp.arange(len(text) - 1), jnp.asarray(text[1:])].mean())

    in_order = surprise(params)
    for i in range(config.num_layers):
        for name, heads in (("q_proj", config.num_heads), ("k_proj", config.num_kv_heads)):
            back = np.argsort(gguf_files.interleaved_rows(heads, config.head_dim))
            leaf = params[f"layers_{i}"]["self_attn"][name]
            leaf["weight"] = leaf["weight"][back]
    assert in_order < 2.5
    assert surprise(params) > in_order + 1.0
