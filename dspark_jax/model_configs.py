"""Configs of targets from `config.json` and from GGUF metadata.

Whatever would change the computation and is not built is refused by name: a config that is read is a config that is obeyed.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from dspark_jax.gguf_files import ROPE_FACTORS, GGUFFile, read_tensor
from dspark_jax.layers import RopeScaling, inverse_frequencies
from dspark_jax.targets.dense import DenseConfig

LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT = 1.0, 4.0, 8192
"""What every released Llama 3.1 and later uses; GGUF files hold the resulting divisors and not these numbers."""


def required(config: Mapping[str, Any], field: str, origin: Any) -> Any:
    """`config[field]`.

    Raises:
      ValueError: where it is absent or null, naming the field and the file.
    """
    if config.get(field) is None:
        raise ValueError(f"{origin}: the field {field!r} is missing")
    return config[field]


def refuse_unless(config: Mapping[str, Any], field: str, allowed: tuple[Any, ...], origin: Any) -> None:
    """Raise a ValueError where a field that is present has another value than the `allowed` ones."""
    if field in config and config[field] not in allowed:
        raise ValueError(f"{origin}: {field} is {config[field]!r}; supported: {', '.join(map(repr, allowed))}")


def rope_of(config: Mapping[str, Any], origin: Any) -> tuple[float, RopeScaling | None]:
    """Rotary base and scaling, from `rope_parameters` or from the older `rope_theta` with `rope_scaling`.

    Raises:
      ValueError: for a kind of scaling other than default, linear and llama3.
    """
    parameters = config.get("rope_parameters") or {}
    scaling = config.get("rope_scaling") or parameters
    theta = float(parameters.get("rope_theta") or config.get("rope_theta") or 10_000.0)
    kind = scaling.get("rope_type") or scaling.get("type") or "default"
    match kind:
        case "default":
            return theta, None
        case "linear":
            return theta, RopeScaling("linear", float(required(scaling, "factor", origin)))
        case "llama3":
            return theta, RopeScaling(
                "llama3",
                float(required(scaling, "factor", origin)),
                float(required(scaling, "low_freq_factor", origin)),
                float(required(scaling, "high_freq_factor", origin)),
                int(required(scaling, "original_max_position_embeddings", origin)),
            )
    raise ValueError(f"{origin}: rope_type is {kind!r}; supported: default, linear, llama3")


def dense_config(config: Mapping[str, Any], architecture: str, origin: Any) -> DenseConfig:
    """The config of a Llama, Qwen2 or Qwen3 model from its `config.json`.

    Raises:
      ValueError: naming a field that is missing, or set to something that is not supported.
    """
    for field, allowed in (
        ("hidden_act", ("silu",)),
        ("mlp_bias", (False, None)),
        ("use_sliding_window", (False, None)),
        ("quantization_config", (None,)),
    ):
        refuse_unless(config, field, allowed, origin)
    if any(kind != "full_attention" for kind in config.get("layer_types") or ()):
        raise ValueError(f"{origin}: layer_types is {config['layer_types']}; supported: 'full_attention' alone")
    num_heads = required(config, "num_attention_heads", origin)
    hidden_size = required(config, "hidden_size", origin)
    theta, scaling = rope_of(config, origin)
    qwen2 = architecture == "Qwen2ForCausalLM"
    bias = qwen2 or bool(config.get("attention_bias"))
    return DenseConfig(
        vocab_size=required(config, "vocab_size", origin),
        hidden_size=hidden_size,
        intermediate_size=required(config, "intermediate_size", origin),
        num_layers=required(config, "num_hidden_layers", origin),
        num_heads=num_heads,
        num_kv_heads=config.get("num_key_value_heads") or num_heads,
        head_dim=config.get("head_dim") or hidden_size // num_heads,
        rms_norm_eps=config.get("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm=architecture == "Qwen3ForCausalLM",
        attention_bias=bias,
        output_bias=bias and not qwen2,
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        max_position_embeddings=config.get("max_position_embeddings", 8192),
        architecture=architecture,
    )


def dense_config_from_gguf(file: GGUFFile, architecture: str) -> DenseConfig:
    """The config of a Llama, Qwen2 or Qwen3 model from the metadata and the tensor names of a GGUF file.

    Raises:
      ValueError: naming a key that is missing, or set to something that is not supported.
    """
    prefix = file.metadata["general.architecture"] + "."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    refuse_unless(values, "expert_count", (0,), file.path)
    refuse_unless(values, "rope.scaling.type", ("none", "linear"), file.path)
    num_heads = required(values, "attention.head_count", file.path)
    num_kv_heads = values.get("attention.head_count_kv", num_heads)
    if not isinstance(num_heads, int) or not isinstance(num_kv_heads, int):
        raise ValueError(f"{file.path}: attention.head_count and head_count_kv differ from layer to layer; supported: one number each")
    hidden_size = required(values, "embedding_length", file.path)
    head_dim = values.get("attention.key_length", hidden_size // num_heads)
    for field in ("rope.dimension_count", "attention.value_length"):
        refuse_unless(values, field, (head_dim,), file.path)
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor token_embd.weight")
    theta = float(values.get("rope.freq_base", 10_000.0))
    scaling = None
    if values.get("rope.scaling.type") == "linear":
        scaling = RopeScaling("linear", float(required(values, "rope.scaling.factor", file.path)))
    elif ROPE_FACTORS in file.tensors:
        scaling = _llama3_scaling(file, head_dim, theta)
    return DenseConfig(
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=required(values, "feed_forward_length", file.path),
        num_layers=required(values, "block_count", file.path),
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        rms_norm_eps=shortest(required(values, "attention.layer_norm_rms_epsilon", file.path)),
        rope_theta=theta,
        rope_scaling=scaling,
        qk_norm="blk.0.attn_q_norm.weight" in file.tensors,
        attention_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        tie_word_embeddings="output.weight" not in file.tensors,
        max_position_embeddings=values.get("context_length", 8192),
        architecture=architecture,
    )


def shortest(value: float) -> float:
    """The shortest decimal that is the same float32: 9.999999747378752e-06 -> 1e-05."""
    return float(str(np.float32(value)))


def _llama3_scaling(file: GGUFFile, head_dim: int, theta: float) -> RopeScaling:
    divisors = read_tensor(file, ROPE_FACTORS)
    scaling = RopeScaling("llama3", float(divisors.max()), LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_CONTEXT)
    expected = np.asarray(inverse_frequencies(head_dim, theta) / inverse_frequencies(head_dim, theta, scaling))
    if divisors.shape != expected.shape or not np.allclose(divisors, expected, rtol=1e-3):
        raise ValueError(f"{file.path}: {ROPE_FACTORS} are not those of Llama 3.1 scaling, the only kind supported in GGUF files")
    return scaling
