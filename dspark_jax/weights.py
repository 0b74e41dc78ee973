"""Weights to and from parameter trees: targets from Hugging Face folders and GGUF files, drafters in the DeepSpec layout.

This file holds the one table from architecture names to classes.
"""

import dataclasses
import itertools
import json
import operator
import os
import re
import shutil
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from dspark_jax.calibrate import ConstantSurvival, RawSurvival, identity_from_dict, survival_from_dict
from dspark_jax.calibration_identity import CalibratorIdentity, check_calibrator, drafter_fingerprint
from dspark_jax.chain_configs import eagle3_config, eagle3_json, mtp_config, mtp_json
from dspark_jax.draft_configs import EXTENSION, GEMMA_FROM_TARGET, block_drafter, block_json
from dspark_jax.drafters.dflash import DFlashDrafter
from dspark_jax.drafters.draft_scores import score_of
from dspark_jax.drafters.dspark import DSparkDrafter
from dspark_jax.drafters.eagle3 import Eagle3Drafter
from dspark_jax.drafters.mtp import MTPDrafter
from dspark_jax.gemma_configs import gemma3_config, gemma3_config_from_gguf, gemma4_config
from dspark_jax.gguf_files import gguf_sources, read_gguf
from dspark_jax.model_configs import dense_config, dense_config_from_gguf
from dspark_jax.model_files import locate_model, read_json
from dspark_jax.protocols import SurvivalModel, TargetHead, TargetSpec
from dspark_jax.sampling import Sampling
from dspark_jax.sharding import parameter_shardings
from dspark_jax.targets.dense import DenseTarget
from dspark_jax.targets.gemma import GemmaTarget
from dspark_jax.tensor_files import SINGLE_FILE, TensorSource, checkpoint_tensors, restore, safetensors_sources, tree_name
from dspark_jax.typing import Params

USUAL_CONTINUATION = 0.65
"""Chance that a draft is accepted given that those before it were, for drafters that come without their own numbers."""

RELEASED_DRAFTERS = {"smollm2_dspark": Path(__file__).parent / "assets" / "smollm2_dspark"}
"""Drafters that are part of this package, by name."""

SURVIVAL_FILE = "survival.json"
DRAFT_IDS = "draft_vocab_ids"
TRAINING_OPTIONS = {"loss_decay", "detach_confidence", "step_loss_decay", "supervision", "soft_ce_over_places"}
"""Options that change how a drafter is trained and not what it computes; the reference keeps them elsewhere."""

LENT = ("embed_tokens.weight", "lm_head.weight")
"""Tensors of a reference draft checkpoint that are copies of the target's."""


@dataclasses.dataclass(frozen=True)
class TargetRow:
    """How a target architecture is built: from a `config.json`, and from GGUF metadata under that format's own name.

    Attributes:
      gguf_name, gguf_config: None where GGUF files of the architecture are not read.
      multimodal: tensors outside the language model are left in the file.
    """

    target: Callable[[Any], Any]
    config: Callable[..., Any]
    gguf_name: str | None = None
    gguf_config: Callable[..., Any] | None = None
    multimodal: bool = False


TARGETS: Mapping[str, TargetRow] = {
    "LlamaForCausalLM": TargetRow(DenseTarget, dense_config, "llama", dense_config_from_gguf),
    "Qwen2ForCausalLM": TargetRow(DenseTarget, dense_config, "qwen2", dense_config_from_gguf),
    "Qwen3ForCausalLM": TargetRow(DenseTarget, dense_config, "qwen3", dense_config_from_gguf),
    "Gemma3ForCausalLM": TargetRow(GemmaTarget, gemma3_config, "gemma3", gemma3_config_from_gguf),
    "Gemma3ForConditionalGeneration": TargetRow(GemmaTarget, gemma3_config, multimodal=True),
    "Gemma4ForCausalLM": TargetRow(GemmaTarget, gemma4_config),
    "Gemma4ForConditionalGeneration": TargetRow(GemmaTarget, gemma4_config, multimodal=True),
    "Gemma4UnifiedForConditionalGeneration": TargetRow(GemmaTarget, gemma4_config, multimodal=True),
}

LANGUAGE_MODEL = re.compile(r"(?:model\.language_model|language_model\.model)\.|(?:language_model\.)?(?=lm_head\.)")
"""What the names of a multimodal checkpoint's text tensors begin with, in the layouts that are around."""


def _eagle3(config: Mapping[str, Any], origin: Any) -> Eagle3Drafter:
    return Eagle3Drafter(eagle3_config(config, origin))


def _mtp(config: Mapping[str, Any], origin: Any) -> MTPDrafter:
    return MTPDrafter(mtp_config(config, origin))


DRAFTERS: Mapping[str, Callable[[Mapping[str, Any], Any], Any]] = {
    "Qwen3DSparkModel": block_drafter,
    "Gemma4DSparkModel": block_drafter,
    "Qwen3Eagle3Model": _eagle3,
    "Gemma4Eagle3Model": _eagle3,
    "Eagle3DraftModel": _eagle3,
    "MTPDraftModel": _mtp,
    "Gemma4MTPDraftModel": _mtp,
}
"""From `config.json` and its path, for messages, to the drafter."""

REFERENCE_DRAFTERS = ("Qwen3DSparkModel", "Gemma4DSparkModel", "Qwen3Eagle3Model", "Gemma4Eagle3Model", "Eagle3DraftModel")
"""Those that the reference has classes for."""

DRAFTER_CONFIGS: Mapping[type, Callable[[Any, Mapping[str, Any]], dict[str, Any]]] = {
    DSparkDrafter: lambda drafter, base: block_json(drafter, base),
    DFlashDrafter: lambda drafter, base: block_json(drafter, base),
    Eagle3Drafter: lambda drafter, base: eagle3_json(drafter.config, base),
    MTPDrafter: lambda drafter, base: mtp_json(drafter.config, base),
}
"""And back; the second argument has the fields that stand unless the drafter has a say in them."""


@dataclasses.dataclass(frozen=True)
class LoadedDrafter:
    """A drafter and what lies beside its weights.

    Attributes:
      draft_ids: target ids that can be drafted, ascending; None for the whole vocabulary.
      survival: calibration of the confidence head; None where none was stored.
      config_json: the `config.json` that it was read from, for `save_drafter`.
    """

    drafter: Any
    params: Params
    draft_ids: jax.Array | None
    survival: dict[str, Any] | None
    config_json: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def survival_model(self, continuation: Sequence[float] | None = None) -> SurvivalModel:
        """The calibration stored with the drafter, else its confidence as it is, else constants where it has neither a head nor a score.

        Args:
          continuation: for the constants, one per draft: the chance that a draft is accepted given that those before it were;
            `USUAL_CONTINUATION` where absent.
        """
        stored = {name: value for name, value in (self.survival or {}).items() if name != "continuation"}
        if stored:
            return survival_from_dict(stored)
        if getattr(self.drafter.config, "confidence_head", False) or score_of(self.drafter):
            return RawSurvival()
        chances = [USUAL_CONTINUATION] * self.drafter.block_size if continuation is None else continuation
        return ConstantSurvival(tuple(itertools.accumulate(chances, operator.mul)))

    @property
    def fitted_for(self) -> CalibratorIdentity | None:
        """What the stored calibration holds for; None where none is stored, or nobody recorded it."""
        return identity_from_dict(self.survival or {})

    def check_calibration(self, sampling: Sampling, verifier: str = "token") -> None:
        """`check_calibrator` for the calibration stored with the drafter, to be called once per run; where none is, nothing is checked."""
        if self.survival:
            check_calibrator(self.fitted_for, drafter_fingerprint(self.drafter, self.params, self.draft_ids), sampling, verifier)


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
    stored = {name: source for name, source in safetensors_sources(folder).items() if not name.endswith("rotary_emb.inv_freq")}
    if row.multimodal:
        stored = {name[match.end() :]: source for name, source in stored.items() if (match := LANGUAGE_MODEL.match(name))}
    sources = {tree_name(name): source for name, source in stored.items()}
    if target.config.tie_word_embeddings:
        # Some writers store the tied head a second time.
        sources.pop("lm_head.weight", None)
    return target, sources


def _target_in_gguf(path: Path) -> tuple[Any, dict[str, TensorSource]]:
    file = read_gguf(path)
    name = file.metadata.get("general.architecture")
    for architecture, row in TARGETS.items():
        if row.gguf_config is not None and row.gguf_name == name:
            config = row.gguf_config(file, architecture)
            return row.target(config), gguf_sources(file, config)
    known = ", ".join(row.gguf_name for row in TARGETS.values() if row.gguf_name)
    raise ValueError(f"{path}: general.architecture is {name!r}; supported: {known}")


def _architecture(config: Mapping[str, Any], table: Mapping[str, Any], folder: Path) -> str:
    for name in (config.get("architectures") or [])[:1]:
        if name in table:
            return name
    raise ValueError(f"{folder}: architectures is {config.get('architectures')}; supported: {', '.join(table)}")


def load_drafter(
    model: str | os.PathLike[str], target_spec: TargetSpec, *, mesh: Mesh | None = None, dtype: Any = jnp.float32
) -> LoadedDrafter:
    """A drafter in the DeepSpec layout, checked against the target it shall draft for.

    `model` is a folder, a hub name, or "smollm2_dspark", the drafter that comes with this package.

    The embedding and output head in the file, if any, are the target's: their shapes are checked and they are left out.
    Tensor `draft_vocab_ids` with config field `draft_vocab_size` (a reduced draft vocabulary) and `survival.json` are
    extensions of the layout.

    Raises:
      ValueError: where files are missing or damaged, the architecture is unknown, a field is missing (`mask_token_id` above all:
        no other token stands in for it), or the drafter was made for a target of another vocabulary, width or depth.
    """
    if not isinstance(target_spec, TargetSpec):
        raise ValueError(f"target_spec is a {type(target_spec).__name__}; give the target's `spec`")
    try:
        folder = RELEASED_DRAFTERS.get(os.fspath(model)) or locate_model(model)
    except ValueError as error:
        raise ValueError(f"{error}; of drafters also {', '.join(RELEASED_DRAFTERS)}") from error
    config_file = read_json(folder, "config.json")
    drafter = drafter_of(config_file, folder)
    config = drafter.config
    _check_fits(config, target_spec, folder)
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
    return LoadedDrafter(drafter, params, draft_ids, survival, config_file)


def drafter_of(config: Mapping[str, Any], folder: Path) -> Any:
    """The drafter that a `config.json` describes; `folder` is for messages.

    Raises:
      ValueError: an unknown architecture, or naming a field that is missing or set to something that is not supported.
    """
    return DRAFTERS[_architecture(config, DRAFTERS, folder)](config, folder / "config.json")


def drafter_json(drafter: Any, dtype: str, base: Mapping[str, Any]) -> dict[str, Any]:
    """The `config.json` of a drafter.

    Args:
      base: fields that stand unless the drafter has a say in them: the config that it was read with, or its target's text config.
    """
    kept = {name: value for name, value in base.items() if name not in (EXTENSION, "draft_vocab_size", "torch_dtype")}
    return kept | {"dtype": dtype} | DRAFTER_CONFIGS[type(drafter)](drafter, base)


def _check_fits(config: Any, spec: TargetSpec, folder: Path) -> None:
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


def _draft_ids(source: TensorSource | None, config: Any, folder: Path) -> jax.Array | None:
    size = config.draft_vocab_size
    if source is None and size is None:
        return None
    if source is None or source.shape != (size,):
        held = "absent" if source is None else f"of shape {source.shape}"
        raise ValueError(f"{folder}: draft_vocab_size is {size}, and tensor {DRAFT_IDS} is {held}; both or neither, and they must agree")
    ids = source.read((slice(None),))
    _check_draft_ids(ids, config, f"{folder}: tensor {DRAFT_IDS}")
    return jnp.asarray(ids, jnp.int32)


def _check_draft_ids(ids: np.ndarray, config: Any, origin: str) -> None:
    if config.draft_vocab_size is None:
        raise ValueError(f"{origin} is given, and the drafter's draft_vocab_size is None: it drafts from the whole vocabulary")
    if ids.shape != (config.draft_vocab_size,):
        raise ValueError(f"{origin} has shape {ids.shape}; the drafter's draft_vocab_size asks for ({config.draft_vocab_size},)")
    wide = ids.astype(np.int64)
    if np.any(np.diff(wide) <= 0) or wide[0] < 0 or wide[-1] >= config.vocab_size:
        raise ValueError(f"{origin} must be ascending, without repetition, and in 0..{config.vocab_size - 1}")


def save_drafter(
    folder: str | os.PathLike[str],
    drafter: Any,
    params: Params,
    *,
    config_json: Mapping[str, Any] | None = None,
    draft_ids: Any | None = None,
    survival: Mapping[str, Any] | None = None,
    embedding: Any | None = None,
    lm_head: Any | None = None,
    dtype: Any = jnp.bfloat16,
) -> None:
    """Write a drafter as a folder with `config.json` and `model.safetensors`, in the DeepSpec layout.

    The folder appears whole or not at all. An older drafter there is replaced; files beside it (a model card) stay.

    Args:
      config_json: fields of `config.json` that the drafter has no say in: the config that it was loaded with.
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
        (partial / "config.json").write_text(
            json.dumps(drafter_json(drafter, np.dtype(dtype).name, config_json or {}), indent=2) + "\n", encoding="utf-8"
        )
        save_file({name: np.ascontiguousarray(tensor) for name, tensor in sorted(tensors.items())}, partial / SINGLE_FILE, {"format": "pt"})
        if survival is not None:
            (partial / SURVIVAL_FILE).write_text(json.dumps(survival, indent=2) + "\n", encoding="utf-8")
        _swap(partial, folder)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def export_for_reference(
    folder: str | os.PathLike[str],
    drafter: Any,
    params: Params,
    head: TargetHead,
    *,
    config_json: Mapping[str, Any] | None = None,
    dtype: Any = jnp.bfloat16,
) -> None:
    """Write a drafter for the PyTorch reference, which wants the target's embedding and output head in the file.

    Args:
      config_json: the config that the drafter was loaded with, or its target's text config, which the reference's draft configs extend.

    Raises:
      ValueError: for a reduced draft vocabulary or another option that the reference does not know; and where it wants fields of a
        Gemma target that `config_json` lacks.
    """
    base = config_json or {}
    written = drafter_json(drafter, np.dtype(dtype).name, base)
    if written["architectures"][0] not in REFERENCE_DRAFTERS:
        raise ValueError(f"architectures is {written['architectures']}: the reference knows {', '.join(REFERENCE_DRAFTERS)}")
    unknown = set(written.get(EXTENSION, ())) - TRAINING_OPTIONS
    if unknown:
        raise ValueError(f"{', '.join(sorted(unknown))}: options that the reference does not know; export a drafter without them")
    absent = [name for name in GEMMA_FROM_TARGET if name not in written] if written["architectures"][0].startswith("Gemma4") else []
    if absent:
        raise ValueError(f"config_json lacks {', '.join(absent)}: the reference reads them of the target; give the target's text config")
    if drafter.config.draft_vocab_size is not None or head.draft_ids is not None:
        raise ValueError(
            f"draft_vocab_size is {drafter.config.draft_vocab_size}: the reference draws drafts from the whole vocabulary and has no table "
            f"from draft ids to target ids; export a drafter whose markov_w2 has all {drafter.config.vocab_size} rows"
        )
    save_drafter(folder, drafter, params, config_json=base, embedding=head.embedding, lm_head=head.lm_head, dtype=dtype)


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
