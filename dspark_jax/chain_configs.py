"""Drafters that go token by token from their `config.json` and back: Eagle3 in the layout of the reference, MTP in our own.

The layers are described as those of the block drafters are (`draft_configs.layer_fields`). What the Eagle3 layout has no field for goes
into the field `EXTENSION` there as well.
"""

from collections.abc import Mapping
from typing import Any

from dspark_jax.draft_configs import IN_LAYOUT, built_config, extension_json, layer_fields, layer_json
from dspark_jax.drafters.eagle3 import Eagle3Config
from dspark_jax.drafters.mtp import MTPConfig
from dspark_jax.layers import GEMMA4_STYLE
from dspark_jax.model_configs import refuse_unless, required

CHAIN_IN_LAYOUT = IN_LAYOUT - {"confidence_head"}
"""Neither layout has a field for a confidence head."""

MTP_ARCHITECTURES = ("MTPDraftModel", "Gemma4MTPDraftModel")
"""Layers of Qwen3, and those of Gemma 4's full attention."""


def eagle3_config(config: Mapping[str, Any], origin: Any) -> Eagle3Config:
    """The config of an Eagle3 drafter from its `config.json`.

    Raises:
      ValueError: naming a field that is missing, or set to something that is not supported.
    """
    refuse_unless(config, "num_hidden_layers", (1,), origin)
    refuse_unless(config, "draft_num_hidden_layers", (1,), origin)
    fields = layer_fields(config, origin) | {
        "block_size": required(config, "ttt_length", origin),
        "draft_vocab_size": config.get("draft_vocab_size"),
        "step_loss_decay": config.get("step_loss_decay", Eagle3Config.step_loss_decay),
    }
    return built_config(Eagle3Config, fields, config, origin)


def eagle3_json(config: Eagle3Config, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The inverse of `eagle3_config`, with what the reference's model classes want beside it.

    Args:
      base: the config that the drafter was read with, or its target's text config; Gemma drafts keep fields of it.
    """
    fields = layer_json(config, 1, "Eagle3Model", base or {}) | {
        "draft_num_hidden_layers": 1,
        "ttt_length": config.block_size,
        "step_loss_decay": config.step_loss_decay,
    }
    if config.draft_vocab_size is not None:
        fields["draft_vocab_size"] = config.draft_vocab_size
    return fields | extension_json(config, CHAIN_IN_LAYOUT | {"step_loss_decay"})


def mtp_config(config: Mapping[str, Any], origin: Any) -> MTPConfig:
    """The config of an MTP drafter from its `config.json`, whose `target_layer_ids` is [].

    Raises:
      ValueError: naming a field that is missing, or set to something that is not supported.
    """
    refuse_unless(config, "num_hidden_layers", (1,), origin)
    fields = layer_fields(config, origin) | {
        "block_size": required(config, "block_size", origin),
        "draft_vocab_size": config.get("draft_vocab_size"),
    }
    return built_config(MTPConfig, fields, config, origin)


def mtp_json(config: MTPConfig, base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The inverse of `mtp_config`; `base` as in `eagle3_json`."""
    fields = layer_json(config, 1, "MTPDraftModel", base or {}) | {
        "architectures": [MTP_ARCHITECTURES[config.style == GEMMA4_STYLE]],
        "block_size": config.block_size,
    }
    if config.draft_vocab_size is not None:
        fields["draft_vocab_size"] = config.draft_vocab_size
    return fields | extension_json(config, CHAIN_IN_LAYOUT)
