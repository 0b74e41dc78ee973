"""Drafters from their `config.json` and back, in the layout of the reference (DeepSpec).

A reference draft config is its target's text config with overrides, so that much in it says nothing of the drafter; `base` carries
that part through a round trip. What the layout has no field for (an option of ours) goes into one field of our own, `EXTENSION`.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspark_jax.drafters.dflash import DFlashConfig, DFlashDrafter
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.layers import GEMMA4_STYLE, QWEN3_STYLE
from dspark_jax.model_configs import refuse_unless, required, rope_of
from dspark_jax.moe import MoEConfig

EXTENSION = "dspark_jax"
"""Field of a `config.json` with the options that the reference's layout does not know; the reference ignores it."""

DEFAULT_NUM_ANCHORS = 512
"""Anchors per sequence in the reference's training; its model class wants the field in every config."""

GEMMA_FROM_TARGET = ("head_dim", "num_key_value_heads", "sliding_window", "hidden_size_per_layer_input", "enable_moe_block")
"""What the reference's Gemma classes read of the target in a draft config, and a drafter itself does not know."""


def layer_fields(config: Mapping[str, Any], origin: Any) -> dict[str, Any]:
    """Sizes and wiring of a drafter's layers, as keyword arguments of its config: those of Qwen3, or of Gemma 4's full-attention layers.

    Raises:
      ValueError: naming a field that is missing, or set to something that is not supported.
    """
    num_heads = required(config, "num_attention_heads", origin)
    taps = required(config, "target_layer_ids", origin)
    if not isinstance(taps, list) or not all(isinstance(tap, int) for tap in taps):
        raise ValueError(f"{origin}: target_layer_ids is {taps!r}; it must be a list of integers")
    fields: dict[str, Any] = {
        "vocab_size": required(config, "vocab_size", origin),
        "hidden_size": required(config, "hidden_size", origin),
        "intermediate_size": required(config, "intermediate_size", origin),
        "num_heads": num_heads,
        "rms_norm_eps": 1e-6 if config.get("rms_norm_eps") is None else config["rms_norm_eps"],
        "attention_bias": bool(config.get("attention_bias")),
        "taps": tuple(taps),
        "num_target_layers": required(config, "num_target_layers", origin),
    }
    kv_heads = config.get("num_key_value_heads") or num_heads
    if not is_gemma(config):
        refuse_unless(config, "hidden_act", ("silu",), origin)
        theta, scaling = rope_of(config, origin)
        if scaling is not None:
            raise ValueError(f"{origin}: rope_type is {scaling.kind!r}; a drafter supports 'default' alone")
        head_dim = config.get("head_dim") or config["hidden_size"] // num_heads
        return fields | {"num_kv_heads": kv_heads, "head_dim": head_dim, "rope_theta": theta, "style": QWEN3_STYLE}
    refuse_unless(config, "hidden_activation", ("gelu_pytorch_tanh",), origin)
    refuse_unless(config, "enable_moe_block", (False, None), origin)
    refuse_unless(config, "hidden_size_per_layer_input", (0, None), origin)
    refuse_unless(config, "use_double_wide_mlp", (False, None), origin)
    # The keys beside `full_attention` are the target's, or strays of its serialisation: every draft layer is a full-attention layer.
    rope = required(required(config, "rope_parameters", origin), "full_attention", origin)
    refuse_unless(rope, "rope_type", ("proportional", "default"), origin)
    refuse_unless(rope, "factor", (1.0, None), origin)
    k_eq_v = bool(config.get("attention_k_eq_v"))
    share = rope.get("partial_rotary_factor", 0.25) if rope.get("rope_type") == "proportional" else 1.0
    return fields | {
        "num_kv_heads": required(config, "num_global_key_value_heads", origin) if k_eq_v else kv_heads,
        "head_dim": required(config, "global_head_dim", origin),
        "rope_theta": float(required(rope, "rope_theta", origin)),
        "rotated_share": share,
        "style": GEMMA4_STYLE,
        "k_eq_v": k_eq_v,
    }


def is_gemma(config: Mapping[str, Any]) -> bool:
    """Whether a draft config is one of the Gemma 4 family, by the architecture it names."""
    return config["architectures"][0].startswith("Gemma4")


def block_drafter(config: Mapping[str, Any], origin: Any) -> DSparkDrafter | DFlashDrafter:
    """DSpark, or DFlash: the reference gives both one architecture name; DFlash is the one with neither head.

    Raises:
      ValueError: naming a field that is missing, or set to something that is not supported.
    """
    rank = required(config, "markov_rank", origin)
    confidence = bool(required(config, "enable_confidence_head", origin))
    fields = layer_fields(config, origin) | {
        "num_layers": required(config, "num_hidden_layers", origin),
        "block_size": required(config, "block_size", origin),
        "mask_token_id": required(config, "mask_token_id", origin),
        "draft_vocab_size": config.get("draft_vocab_size"),
    }
    if not rank and not confidence:
        return DFlashDrafter(built_config(DFlashConfig, fields, config, origin))
    fields |= {
        "markov_rank": rank,
        "confidence_head": confidence,
        "confidence_with_markov": bool(config.get("confidence_head_with_markov", False)),
    }
    if rank:
        fields["markov_head_type"] = required(config, "markov_head_type", origin)
    return DSparkDrafter(built_config(DSparkConfig, fields, config, origin))


def built_config(kind: type, fields: Mapping[str, Any], config: Mapping[str, Any], origin: Any) -> Any:
    """A drafter's config of class `kind` from the layout's fields and our extensions in `config`; messages begin with `origin`."""
    extension = config.get(EXTENSION) or {}
    if not isinstance(extension, Mapping):
        raise ValueError(f"{origin}: {EXTENSION} is {extension!r}; it must be an object of options")
    known = {field.name for field in dataclasses.fields(kind)} - set(fields)
    unknown = sorted(set(extension) - known)
    if unknown:
        raise ValueError(f"{origin}: {EXTENSION} holds {unknown[0]!r}; known there: {', '.join(sorted(known))}")
    try:
        numbers = {field.name: field.type for field in dataclasses.fields(kind) if field.type in (int, float)}
        for name, value in {**fields, **extension}.items():
            if name in numbers and (isinstance(value, bool) or not isinstance(value, int if numbers[name] is int else int | float)):
                raise ValueError(f"{name} is {value!r}; it must be {'an integer' if numbers[name] is int else 'a number'}")
        if extension.get("experts") is not None:
            extension = {**extension, "experts": MoEConfig(**extension["experts"])}
        return kind(**fields, **extension)
    except (ValueError, TypeError) as error:
        raise ValueError(f"{origin}: {error}") from error


def _plain(value: Any) -> Any:
    """A config's value as JSON has it."""
    return dataclasses.asdict(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else value


def block_json(drafter: DSparkDrafter | DFlashDrafter, base: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a block drafter; see `drafter_json`."""
    config = drafter.config
    fields = layer_json(config, config.num_layers, "DSparkModel", base) | {
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_anchors": base.get("num_anchors", DEFAULT_NUM_ANCHORS),
        "markov_rank": 0,
        "enable_confidence_head": False,
    }
    if isinstance(config, DSparkConfig):
        fields |= {"markov_rank": config.markov_rank, "enable_confidence_head": config.confidence_head}
        if config.markov_rank:
            fields["markov_head_type"] = config.markov_head_type
        if config.confidence_head:
            fields["confidence_head_with_markov"] = config.confidence_with_markov
    if config.draft_vocab_size is not None:
        fields["draft_vocab_size"] = config.draft_vocab_size
    return fields | extension_json(config)


def layer_json(config: Any, num_layers: int, model: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """The inverse of `layer_fields`, with what the reference's model classes want beside it; `model` ends the architecture's name."""
    gemma = config.style == GEMMA4_STYLE
    fields: dict[str, Any] = {
        "architectures": [("Gemma4" if gemma else "Qwen3") + model],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": num_layers,
        "num_attention_heads": config.num_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * num_layers,
        "tie_word_embeddings": False,
        "target_layer_ids": list(config.taps),
        "num_target_layers": config.num_target_layers,
    }
    if not gemma:
        return fields | {
            "model_type": "qwen3",
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "hidden_act": "silu",
            "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
            "use_sliding_window": False,
            "sliding_window": None,
        }
    rope = {"rope_theta": config.rope_theta, "rope_type": "default"}
    if config.rotated_share != 1.0:
        rope |= {"rope_type": "proportional", "partial_rotary_factor": config.rotated_share}
    return fields | {
        "model_type": base.get("model_type", "gemma4_text"),
        "hidden_activation": "gelu_pytorch_tanh",
        "global_head_dim": config.head_dim,
        "attention_k_eq_v": config.k_eq_v,
        ("num_global_key_value_heads" if config.k_eq_v else "num_key_value_heads"): config.num_kv_heads,
        "rope_parameters": dict(base.get("rope_parameters") or {}) | {"full_attention": rope},
        "target_model_type": base.get("target_model_type", "gemma4"),
        "target_text_model_type": base.get("target_text_model_type", "gemma4_text"),
    }


IN_LAYOUT = {"style", "k_eq_v", "rotated_share", "num_layers", "num_heads", "num_kv_heads", "head_dim", "taps", "num_target_layers"} | {
    *("vocab_size", "hidden_size", "intermediate_size", "rms_norm_eps", "rope_theta", "attention_bias", "block_size", "mask_token_id"),
    *("markov_rank", "markov_head_type", "confidence_head", "confidence_with_markov", "draft_vocab_size"),
}
"""Config fields that the reference's layout has under names of its own."""


def extension_json(config: Any, in_layout: set[str] = IN_LAYOUT) -> dict[str, Any]:
    """The options that the reference's layout has no field for, where they differ from their defaults."""
    ours = {
        field.name: _plain(getattr(config, field.name))
        for field in dataclasses.fields(config)
        if field.name not in in_layout and getattr(config, field.name) != field.default
    }
    return {EXTENSION: ours} if ours else {}
