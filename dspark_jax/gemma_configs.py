"""Configs of Gemma targets from `config.json` and from GGUF metadata.

Whatever would change the computation and is not built is refused by name. Multimodal checkpoints are read for their text part.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.gguf_files import GGUFFile
from dspark_jax.layers import GEMMA4_STYLE, RopeScaling
from dspark_jax.model_configs import refuse_unless, required, rope_of, shortest
from dspark_jax.targets.gemma_layers import FULL, GEMMA3_STYLE, SLIDING, AttentionKind, GemmaConfig, LayerType

PATTERN = 6
"""In Gemma 3 every sixth layer looks back over everything, unless the file says otherwise."""

GEMMA3_DEFAULTS: dict[str, Any] = {
    "vocab_size": 262_208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 131_072,
}
"""What the fields mean that released multimodal Gemma 3 configs leave out (Hugging Face's Gemma3TextConfig)."""

LOCAL_THETA = 10_000.0
FULL_THETA = 1e6
LAYERS_OF_27B = 62
"""GGUF files do not hold query_pre_attn_scalar; it is head_dim, but in the model of this depth hidden_size / num_heads."""


def text_config(config: Mapping[str, Any], origin: Any) -> Mapping[str, Any]:
    """The part of a config that describes the language model: `text_config` where there is one, else all of it.

    Raises:
      ValueError: where `text_config` is no object.
    """
    text = config.get("text_config", config)
    if not isinstance(text, Mapping):
        raise ValueError(f"{origin}: text_config is {text!r}; it must be an object")
    return text


def gemma3_config(config: Mapping[str, Any], architecture: str, origin: Any) -> GemmaConfig:
    """The config of the text part of a Gemma 3 model from its `config.json`.

    Raises:
      ValueError: naming a field that is missing, or set to something that is not supported.
    """
    stated = text_config(config, origin)
    text = GEMMA3_DEFAULTS | {name: value for name, value in stated.items() if value is not None}
    _refuse_what_is_not_built(config, text, origin, bidirectional=(False,))
    full_theta, full_scaling, local_theta = _gemma3_rope(text, origin)
    return _checked(
        origin,
        **_common_fields(text, origin),
        layer_types=_layer_types(text, origin),
        style=dataclasses.replace(GEMMA3_STYLE, attention_scale=text["query_pre_attn_scalar"] ** -0.5),
        full=lambda: AttentionKind(text["num_key_value_heads"], text["head_dim"], full_theta, rope_scaling=full_scaling),
        sliding=lambda: AttentionKind(text["num_key_value_heads"], text["head_dim"], local_theta, text["sliding_window"]),
        tie_word_embeddings=_tied(config, text),
        architecture=architecture,
    )


def gemma4_config(config: Mapping[str, Any], architecture: str, origin: Any) -> GemmaConfig:
    """The config of the text part of a Gemma 4 model from its `config.json`.

    Raises:
      ValueError: naming a field that is missing, or set to something that is not supported (mixtures of experts).
    """
    text = text_config(config, origin)
    _refuse_what_is_not_built(config, text, origin, bidirectional=(False, None, "vision"))
    refuse_unless(text, "enable_moe_block", (False, None), origin)
    rope = required(text, "rope_parameters", origin)
    full_rope, local_rope = (required(rope, kind, f"{origin}: rope_parameters") for kind in (FULL, SLIDING))
    refuse_unless(full_rope, "rope_type", ("proportional",), f"{origin}: rope_parameters.{FULL}")
    refuse_unless(local_rope, "rope_type", ("default",), f"{origin}: rope_parameters.{SLIDING}")
    factor = float(full_rope.get("factor") or 1.0)
    k_eq_v = bool(text.get("attention_k_eq_v"))
    kv_heads = required(text, "num_key_value_heads", origin)
    head_dim = required(text, "head_dim", origin)
    width = text.get("hidden_size_per_layer_input") or 0
    window = required(text, "sliding_window", origin)
    full_heads = required(text, "num_global_key_value_heads", origin) if k_eq_v else kv_heads
    return _checked(
        origin,
        **_common_fields(text, origin),
        layer_types=_layer_types(text, origin),
        style=GEMMA4_STYLE,
        full=lambda: AttentionKind(
            full_heads,
            text.get("global_head_dim") or head_dim,
            float(required(full_rope, "rope_theta", origin)),
            rope_scaling=None if factor == 1.0 else RopeScaling("linear", factor),
            rotated_share=float(full_rope.get("partial_rotary_factor", 1.0)),
            k_eq_v=k_eq_v,
        ),
        sliding=lambda: AttentionKind(kv_heads, head_dim, float(required(local_rope, "rope_theta", origin)), window),
        per_layer_width=width,
        per_layer_vocab_size=required(text, "vocab_size_per_layer_input", origin) if width else 0,
        num_kv_shared_layers=text.get("num_kv_shared_layers") or 0,
        double_wide_mlp=bool(text.get("use_double_wide_mlp")),
        tie_word_embeddings=_tied(config, text),
        architecture=architecture,
    )


def gemma3_config_from_gguf(file: GGUFFile, architecture: str) -> GemmaConfig:
    """The config of a Gemma 3 model from the metadata of a GGUF file.

    Raises:
      ValueError: naming a key that is missing, or set to something that is not supported.
    """
    prefix = "gemma3."
    values = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    refuse_unless(values, "rope.scaling.type", ("none", "linear"), file.path)
    refuse_unless(values, "attn_logit_softcapping", (0.0,), file.path)
    hidden_size = required(values, "embedding_length", file.path)
    num_layers = required(values, "block_count", file.path)
    num_heads = required(values, "attention.head_count", file.path)
    kv_heads = required(values, "attention.head_count_kv", file.path)
    head_dim = required(values, "attention.key_length", file.path)
    refuse_unless(values, "attention.value_length", (head_dim,), file.path)
    window = required(values, "attention.sliding_window", file.path)
    pattern = values.get("attention.sliding_window_pattern", PATTERN)
    if not isinstance(pattern, int):
        raise ValueError(f"{file.path}: attention.sliding_window_pattern is {pattern}; supported: one number")
    if "token_embd.weight" not in file.tensors:
        raise ValueError(f"{file.path} has no tensor token_embd.weight")
    scaling = None
    if values.get("rope.scaling.type") == "linear":
        scaling = RopeScaling("linear", float(required(values, "rope.scaling.factor", file.path)))
    scalar = hidden_size / num_heads if num_layers == LAYERS_OF_27B else head_dim
    return _checked(
        file.path,
        vocab_size=file.tensors["token_embd.weight"].shape[0],
        hidden_size=hidden_size,
        intermediate_size=required(values, "feed_forward_length", file.path),
        num_heads=num_heads,
        layer_types=_every(pattern, num_layers),
        style=dataclasses.replace(GEMMA3_STYLE, attention_scale=scalar**-0.5),
        full=lambda: AttentionKind(kv_heads, head_dim, float(values.get("rope.freq_base", FULL_THETA)), rope_scaling=scaling),
        sliding=lambda: AttentionKind(kv_heads, head_dim, float(values.get("rope.freq_base_swa", LOCAL_THETA)), window),
        rms_norm_eps=shortest(required(values, "attention.layer_norm_rms_epsilon", file.path)),
        final_softcap=values.get("final_logit_softcapping") or None,
        tie_word_embeddings="output.weight" not in file.tensors,
        max_position_embeddings=values.get("context_length", GEMMA3_DEFAULTS["max_position_embeddings"]),
        architecture=architecture,
    )


def _checked(origin: Any, **fields: Any) -> GemmaConfig:
    """A config whose own complaints name the file; the two kinds of attention come as functions, for theirs to be caught as well."""
    try:
        return GemmaConfig(**fields | {kind: fields[kind]() for kind in ("full", "sliding")})
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _refuse_what_is_not_built(config: Mapping[str, Any], text: Mapping[str, Any], origin: Any, bidirectional: tuple[Any, ...]) -> None:
    for field, allowed in (
        ("hidden_activation", ("gelu_pytorch_tanh",)),
        ("attn_logit_softcapping", (None,)),
        ("use_bidirectional_attention", bidirectional),
    ):
        refuse_unless(text, field, allowed, origin)
    for part in (config, text):
        refuse_unless(part, "quantization_config", (None,), origin)


def _common_fields(text: Mapping[str, Any], origin: Any) -> dict[str, Any]:
    return {
        "vocab_size": required(text, "vocab_size", origin),
        "hidden_size": required(text, "hidden_size", origin),
        "intermediate_size": required(text, "intermediate_size", origin),
        "num_heads": required(text, "num_attention_heads", origin),
        "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
        "attention_bias": bool(text.get("attention_bias")),
        "final_softcap": text.get("final_logit_softcapping"),
        "max_position_embeddings": text.get("max_position_embeddings", GEMMA3_DEFAULTS["max_position_embeddings"]),
    }


def _tied(config: Mapping[str, Any], text: Mapping[str, Any]) -> bool:
    """A multimodal config says it in its outer part; both families tie where nothing is said."""
    return bool(config.get("tie_word_embeddings", text.get("tie_word_embeddings", True)))


def _layer_types(text: Mapping[str, Any], origin: Any) -> tuple[LayerType, ...]:
    num_layers = required(text, "num_hidden_layers", origin)
    stated = text.get("layer_types")
    if stated is None:
        return _every(text.get("sliding_window_pattern") or text.get("_sliding_window_pattern") or PATTERN, num_layers)
    if len(stated) != num_layers:
        raise ValueError(f"{origin}: layer_types has {len(stated)} entries; num_hidden_layers is {num_layers}")
    return tuple(stated)


def _every(pattern: int, num_layers: int) -> tuple[LayerType, ...]:
    """Every layer slides but those whose number, counted from 1, is a multiple of `pattern`."""
    return tuple(FULL if (i + 1) % pattern == 0 else SLIDING for i in range(num_layers))


def _gemma3_rope(text: Mapping[str, Any], origin: Any) -> tuple[float, RopeScaling | None, float]:
    """Base and scaling of the full layers, base of the sliding ones: by kind of layer, or in the older fields."""
    parameters = text.get("rope_parameters") or {}
    if FULL not in parameters:
        theta, scaling = rope_of({"rope_theta": FULL_THETA} | dict(text), origin)
        local = float(text.get("rope_local_base_freq") or LOCAL_THETA)
    else:
        theta, scaling = rope_of({"rope_parameters": parameters[FULL]}, origin)
        local, local_scaling = rope_of({"rope_parameters": required(parameters, SLIDING, origin)}, origin)
        if local_scaling is not None:
            raise ValueError(f"{origin}: rope_parameters.{SLIDING} has rope_type {local_scaling.kind!r}; supported: 'default'")
    if scaling is not None and scaling.kind != "linear":
        raise ValueError(f"{origin}: rope_type is {scaling.kind!r}; Gemma 3 supports 'default' and 'linear'")
    return theta, scaling, local
