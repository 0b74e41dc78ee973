"""Weights to and from parameter trees: targets from Hugging Face folders and GGUF files, drafters in the DeepSpec layout.

This file holds the one table from architecture names to classes.
"""

import dataclasses
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.gguf_files import gguf_sources, read_gguf
from dspark_jax.model_configs import dense_config, dense_config_from_gguf, refuse_unless, required, rope_of
from dspark_jax.model_files import locate_model, read_json
from dspark_jax.protocols import TargetHead, TargetSpec
from dspark_jax.sharding import parameter_shardings
from dspark_jax.targets.dense import DenseTarget
from dspark_jax.tensor_files import SINGLE_FILE, TensorSource, checkpoint_tensors, restore, safetensors_sources, tree_name
from dspark_jax.typing import Params

SURVIVAL_FILE = "survival.json"
DRAFT_IDS = "draft_vocab_ids"
LENT = ("embed_tokens.weight", "lm_head.weight")
"""Tensors of a reference draft checkpoint that are copies of the target's."""

DEFAULT_NUM_ANCHORS = 512
"""Anchors per sequence in the reference's training; its model class wants the field in every config."""


@dataclasses.dataclass(frozen=True)
class TargetRow:
    """How a target architecture is built: from a `config.json`, and from GGUF metadata under that format's own name."""

    target: Callable[[Any], Any]
    config: Callable[..., Any]
    gguf_name: str
    gguf_config: Callable[..., Any]


TARGETS: Mapping[str, TargetRow] = {
    "LlamaForCausalLM": TargetRow(DenseTarget, dense_config, "llama", dense_config_from_gguf),
    "Qwen2ForCausalLM": TargetRow(DenseTarget, dense_config, "qwen2", dense_config_from_gguf),
    "Qwen3ForCausalLM": TargetRow(DenseTarget, dense_config, "qwen3", dense_config_from_gguf),
}

DRAFTERS: Mapping[str, type[DSparkDrafter]] = {"Qwen3DSparkModel": DSparkDrafter}


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter and what lies beside its weights.

    Attributes:
      draft_ids: target ids that can be drafted, ascending; None for the whole vocabulary.
      survival: calibration of the confidence head; None where none was stored.
    """

    drafter: DSparkDrafter
    params: Params
    draft_ids: jax.Array | None
    survival: dict[str, Any] | None


def load_target(model: str | os.PathLike[str], *, mesh: Mesh | None = None, dtype: Any = jnp.float32) -> tuple[Any, Params]:
    """A target and its parameters.

    Args:
      model: a Hugging Face folder, a .gguf file, the name of a packaged model ("smollm2"), or a hub name.
      mesh: read every parameter straight into its sharding over this mesh; None for whole arrays on the default device.
      dtype: of every parameter.

    Raises:
      ValueError: where the files are missing or damaged, the architecture is unknown, the config asks for something that is not
        supported, or the tensors are not those of the config.
    """
    path = locate_model(model)
    if path.is_file():
        target, sources = _target_in_gguf(path)
    else:
        target, sources = _target_in_folder(path)
    shardings = None if mesh is None else parameter_shardings(mesh, target)
    return target, restore(target.abstract_params(), sources, dtype, shardings, path)


def _target_in_folder(folder: Path) -> tuple[Any, dict[str, TensorSource]]:
    config = read_json(folder, "config.json")
    architecture = _architecture(config, TARGETS, folder)
    row = TARGETS[architecture]
    target = row.target(row.config(config, architecture, folder / "config.json"))
    sources = {tree_name(name): source for name, source in safetensors_sources(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    if target.config.tie_word_embeddings:
        # Some writers store the tied head a second time.
        sources.pop("lm_head.weight", None)
    return target, sources


def _target_in_gguf(path: Path) -> tuple[Any, dict[str, TensorSource]]:
    file = read_gguf(path)
    name = file.metadata.get("general.architecture")
    architecture = next((known for known, row in TARGETS.items() if row.gguf_name == name), None)
    if architecture is None:
        known = ", ".join(row.gguf_name for row in TARGETS.values())
        raise ValueError(f"{path}: general.architecture is {name!r}; supported: {known}")
    row = TARGETS[architecture]
    config = row.gguf_config(file, architecture)
    return row.target(config), gguf_sources(file, config.num_heads, config.num_kv_heads, config.head_dim)


def _architecture(config: Mapping[str, Any], table: Mapping[str, Any], folder: Path) -> str:
    for name in (config.get("architectures") or [])[:1]:
        if name in table:
            return name
    raise ValueError(f"{folder}: architectures is {config.get('architectures')}; supported: {', '.join(table)}")


def load_drafter(
    model: str | os.PathLike[str], target_spec: TargetSpec, *, mesh: Mesh | None = None, dtype: Any = jnp.float32
) -> LoadedDrafter:
    """A drafter in the DeepSpec layout, checked against the target it shall draft for.

    The embedding and output head in the file, if any, are the target's: their shapes are checked and they are left out.
    Tensor `draft_vocab_ids` with config field `draft_vocab_size` (a reduced draft vocabulary) and `survival.json` are
    extensions of the layout.

    Raises:
      ValueError: where files are missing or damaged, the architecture is unknown, a field is missing (`mask_token_id` above all:
        no other token stands in for it), or the drafter was made for a target of another vocabulary, width or depth.
    """
    folder = locate_model(model)
    config_file = read_json(folder, "config.json")
    architecture = _architecture(config_file, DRAFTERS, folder)
    config = _drafter_config(config_file, folder / "config.json")
    _check_fits(config, target_spec, folder)
    drafter = DRAFTERS[architecture](config)
    stored = safetensors_sources(folder)
    sources = {tree_name(name): source for name, source in stored.items()}
    for name in LENT:
        lent = sources.pop(name, None)
        if lent is not None and lent.shape != (config.vocab_size, config.hidden_size):
            raise ValueError(f"{folder}: {name} is {lent.shape}; it must be the target's, {(config.vocab_size, config.hidden_size)}")
    draft_ids = _draft_ids(sources.pop(DRAFT_IDS, None), config, folder)
    shardings = None if mesh is None else parameter_shardings(mesh, drafter)
    params = restore(drafter.abstract_params(), sources, dtype, shardings, folder)
    survival = read_json(folder, SURVIVAL_FILE) if (folder / SURVIVAL_FILE).exists() else None
    return LoadedDrafter(drafter, params, draft_ids, survival)


def _drafter_config(config: Mapping[str, Any], origin: Path) -> DSparkConfig:
    refuse_unless(config, "hidden_act", ("silu",), origin)
    theta, scaling = rope_of(config, origin)
    if scaling is not None:
        raise ValueError(f"{origin}: rope_type is {scaling.kind!r}; a drafter supports 'default' alone")
    num_heads = required(config, "num_attention_heads", origin)
    rank = required(config, "markov_rank", origin)
    fields: dict[str, Any] = {
        "vocab_size": required(config, "vocab_size", origin),
        "hidden_size": required(config, "hidden_size", origin),
        "intermediate_size": required(config, "intermediate_size", origin),
        "num_layers": required(config, "num_hidden_layers", origin),
        "num_heads": num_heads,
        "num_kv_heads": config.get("num_key_value_heads") or num_heads,
        "head_dim": config.get("head_dim") or config["hidden_size"] // num_heads,
        "rms_norm_eps": config.get("rms_norm_eps", 1e-6),
        "rope_theta": theta,
        "attention_bias": bool(config.get("attention_bias")),
        "block_size": required(config, "block_size", origin),
        "mask_token_id": required(config, "mask_token_id", origin),
        "taps": tuple(required(config, "target_layer_ids", origin)),
        "num_target_layers": required(config, "num_target_layers", origin),
        "markov_rank": rank,
        "confidence_head": bool(required(config, "enable_confidence_head", origin)),
        "confidence_with_markov": bool(config.get("confidence_head_with_markov", False)),
        "draft_vocab_size": config.get("draft_vocab_size"),
    }
    if rank:
        fields["markov_head_type"] = required(config, "markov_head_type", origin)
    try:
        return DSparkConfig(**fields)
    except ValueError as error:
        raise ValueError(f"{origin}: {error}") from error


def _check_fits(config: DSparkConfig, spec: TargetSpec, folder: Path) -> None:
    for what, field, ours, theirs in (
        ("vocabulary", "vocab_size", config.vocab_size, spec.vocab_size),
        ("width", "hidden_size", config.hidden_size, spec.width),
        ("number of layers", "num_target_layers", config.num_target_layers, spec.num_layers),
    ):
        if ours != theirs:
            raise ValueError(
                f"{folder}: the drafter was made for another target: {field} is {ours}, and the target's {what} is {theirs} "
                f"({spec.architecture}); give the drafter of this target, or the target of this drafter"
            )


def _draft_ids(source: TensorSource | None, config: DSparkConfig, folder: Path) -> jax.Array | None:
    size = config.draft_vocab_size
    if source is None and size is None:
        return None
    if source is None or source.shape != (size,):
        held = "absent" if source is None else f"of shape {source.shape}"
        raise ValueError(f"{folder}: draft_vocab_size is {size}, and tensor {DRAFT_IDS} is {held}; both or neither, and they must agree")
    ids = source.read((slice(None),))
    _check_draft_ids(ids, config, f"{folder}: tensor {DRAFT_IDS}")
    return jnp.asarray(ids, jnp.int32)


def _check_draft_ids(ids: np.ndarray, config: DSparkConfig, origin: str) -> None:
    if ids.shape != (config.draft_vocab_size,):
        raise ValueError(f"{origin} has shape {ids.shape}; the drafter's draft_vocab_size asks for ({config.draft_vocab_size},)")
    wide = ids.astype(np.int64)
    if np.any(np.diff(wide) <= 0) or wide[0] < 0 or wide[-1] >= config.vocab_size:
        raise ValueError(f"{origin} must be ascending, without repetition, and in 0..{config.vocab_size - 1}")


def save_drafter(
    folder: str | os.PathLike[str],
    drafter: DSparkDrafter,
    params: Params,
    *,
    draft_ids: Any | None = None,
    survival: Mapping[str, Any] | None = None,
    embedding: Any | None = None,
    lm_head: Any | None = None,
    dtype: Any = jnp.bfloat16,
) -> None:
    """Write a drafter as a folder with `config.json` and `model.safetensors`, in the DeepSpec layout.

    The folder appears whole or not at all. An older drafter there is replaced; files beside it (a model card) stay. Training options
    (loss decay, detached confidence) are no part of the layout.

    Args:
      draft_ids: target ids that can be drafted, where the drafter has a reduced draft vocabulary.
      survival: calibration of the confidence head, as JSON values.
      embedding, lm_head: the target's, "V D"; the reference wants them in the file (`export_for_reference`), we do not.
      dtype: of the stored parameters.

    Raises:
      ValueError: where `folder` holds something that is no drafter, or the draft ids do not fit the drafter.
    """
    folder = Path(folder).resolve()
    config = drafter.config
    _check_replaceable(folder)
    tensors = checkpoint_tensors(params, np.dtype(dtype))
    if config.draft_vocab_size is not None or draft_ids is not None:
        if draft_ids is None or embedding is not None or lm_head is not None:
            raise ValueError(f"draft_vocab_size is {config.draft_vocab_size}: save it with draft_ids, and without embedding and lm_head")
        ids = np.asarray(jax.device_get(draft_ids))
        _check_draft_ids(ids, config, "draft_ids")
        tensors[DRAFT_IDS] = ids.astype(np.int32)
    for name, lent in zip(LENT, (embedding, lm_head), strict=True):
        if lent is not None:
            if lent.shape != (config.vocab_size, config.hidden_size):
                raise ValueError(f"{name} has shape {lent.shape}; the drafter asks for {(config.vocab_size, config.hidden_size)}")
            tensors[name] = np.asarray(jax.device_get(lent)).astype(np.dtype(dtype))
    partial = folder.with_name(f".{folder.name}.{os.getpid()}.partial")
    partial.mkdir(parents=True)
    try:
        for kept in folder.iterdir() if folder.is_dir() else ():
            if kept.name not in ("config.json", SINGLE_FILE, SURVIVAL_FILE):
                (shutil.copytree if kept.is_dir() else shutil.copy2)(kept, partial / kept.name)
        (partial / "config.json").write_text(json.dumps(_drafter_json(drafter, np.dtype(dtype)), indent=2) + "\n", encoding="utf-8")
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in sorted(tensors.items())}, partial / SINGLE_FILE, {"format": "pt"})
        if survival is not None:
            (partial / SURVIVAL_FILE).write_text(json.dumps(survival, indent=2) + "\n", encoding="utf-8")
        _swap(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def export_for_reference(
    folder: str | os.PathLike[str], drafter: DSparkDrafter, params: Params, head: TargetHead, *, dtype: Any = jnp.bfloat16
) -> None:
    """Write a drafter for the PyTorch reference, which wants the target's embedding and output head in the file.

    Raises:
      ValueError: for a reduced draft vocabulary, which the reference does not know.
    """
    if drafter.config.draft_vocab_size is not None or head.draft_ids is not None:
        raise ValueError(
            f"draft_vocab_size is {drafter.config.draft_vocab_size}: the reference draws drafts from the whole vocabulary and has no table "
            f"from draft ids to target ids; export a drafter whose markov_w2 has all {drafter.config.vocab_size} rows"
        )
    save_drafter(folder, drafter, params, embedding=head.embedding, lm_head=head.lm_head, dtype=dtype)


def _check_replaceable(folder: Path) -> None:
    if not folder.exists():
        return
    if not folder.is_dir():
        raise ValueError(f"{folder} is a file; a drafter is written as a folder")
    if any(folder.iterdir()):
        try:
            _architecture(read_json(folder, "config.json"), DRAFTERS, folder)
        except ValueError as error:
            raise ValueError(f"{folder} is not empty and holds no drafter; it will not be overwritten ({error})") from error


def _swap(new: Path, folder: Path) -> None:
    """Put `new` in the place of `folder`."""
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    if folder.exists():
        folder.rename(old)
    new.rename(folder)
    shutil.rmtree(old, ignore_errors=True)


def _drafter_json(drafter: DSparkDrafter, dtype: np.dtype) -> dict[str, Any]:
    config = drafter.config
    architecture = next(name for name, kind in DRAFTERS.items() if isinstance(drafter, kind))
    fields: dict[str, Any] = {
        "architectures": [architecture],
        "model_type": "qwen3",
        "dtype": dtype.name,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": config.rms_norm_eps,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "attention_bias": config.attention_bias,
        "attention_dropout": 0.0,
        "initializer_range": 0.02,
        "layer_types": ["full_attention"] * config.num_layers,
        "use_sliding_window": False,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "block_size": config.block_size,
        "mask_token_id": config.mask_token_id,
        "num_anchors": DEFAULT_NUM_ANCHORS,
        "target_layer_ids": list(config.taps),
        "num_target_layers": config.num_target_layers,
        "markov_rank": config.markov_rank,
        "enable_confidence_head": config.confidence_head,
    }
    if config.markov_rank:
        fields["markov_head_type"] = config.markov_head_type
    if config.confidence_head:
        fields["confidence_head_with_markov"] = config.confidence_with_markov
    if config.draft_vocab_size is not None:
        fields["draft_vocab_size"] = config.draft_vocab_size
    return fields
