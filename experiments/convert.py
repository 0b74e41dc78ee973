"""Models from folders of safetensors to Orbax and back.

    python -m experiments.run import FOLDER OUT         # target or drafter, told apart by the architecture it names
    python -m experiments.run export OUT ANOTHER

An Orbax folder holds `params`, written by Orbax, beside `config.json` and whatever else the model came with. It restores straight into
a sharding, shard by shard, on every host. Exported folders have the tensors and the config that the original had, but for a drafter's
copies of its target's embedding and head, which this project leaves out (`weights.export_for_reference` puts them in).
"""

import dataclasses
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from safetensors.numpy import save_file

from dspark_jax.model_files import locate_model, read_json
from dspark_jax.protocols import TargetSpec
from dspark_jax.tensor_files import SINGLE_FILE, checkpoint_tensors, safetensors_sources
from dspark_jax.weights import DRAFTERS, SURVIVAL_FILE, TARGETS, drafter_of, load_drafter, load_target, save_drafter

DTYPES = ("float32", "bfloat16", "float16")
PARAMS, IDS_FILE, NOTES_FILE = "params", "draft_vocab_ids.npy", "dspark_jax.json"
BESIDE = (
    "tokenizer.json",
    "tokenizer_config.json",
    "generation_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "MODEL_CARD.md",
)
"""Files that travel with the weights where a folder has them."""

FIRST_NORM = "layers.0.input_layernorm.weight"


@dataclasses.dataclass(frozen=True)
class Imported:
    """What an Orbax folder holds."""

    model: Any
    params: Any
    is_drafter: bool


@contextmanager
def _whole(out: Path) -> Iterator[Path]:
    """A folder that takes the name `out` once everything is in it."""
    if out.exists():
        raise ValueError(f"out is {out}, which exists; give a name that is free")
    partial = out.with_name(f".{out.name}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        yield partial
        partial.rename(out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _is_drafter(config: dict[str, Any], folder: Path) -> bool:
    architecture = (config.get("architectures") or [None])[0]
    if architecture not in DRAFTERS and architecture not in TARGETS:
        known = ", ".join([*TARGETS, *DRAFTERS])
        raise ValueError(f"{folder}: architectures is {config.get('architectures')}; supported: {known}")
    return architecture in DRAFTERS


def import_model(source: str, out: Path, dtype: str = "float32") -> Path:
    """Write the model in `source` as an Orbax folder.

    Args:
      source: a folder of a target or a drafter, or a hub name.
      dtype: of the stored parameters.

    Raises:
      ValueError: `source` is no model that this project reads, or `out` exists.
    """
    if dtype not in DTYPES:
        raise ValueError(f"dtype is {dtype!r}; allowed: {', '.join(DTYPES)}")
    folder = locate_model(source)
    if folder.is_file():
        raise ValueError(f"source is {source}, a single file; an import wants a folder with a config.json")
    config = read_json(folder, "config.json")
    notes: dict[str, Any] = {"dtype": dtype}
    if _is_drafter(config, folder):
        described = drafter_of(config, folder).config
        own = TargetSpec(described.vocab_size, described.hidden_size, described.num_target_layers, "of the drafter itself")
        loaded = load_drafter(folder, own, dtype=jnp.dtype(dtype))
        params, draft_ids = loaded.params, loaded.draft_ids
    else:
        (_, params), draft_ids = load_target(folder, dtype=jnp.dtype(dtype)), None
        notes["prefix"] = next(name for name in safetensors_sources(folder) if name.endswith(FIRST_NORM)).removesuffix(FIRST_NORM)
    with _whole(Path(out).absolute()) as partial:
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(partial / PARAMS, params)
        (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        (partial / NOTES_FILE).write_text(json.dumps(notes, indent=2) + "\n", encoding="utf-8")
        if draft_ids is not None:
            np.save(partial / IDS_FILE, np.asarray(draft_ids))
        _copy_beside(folder, partial, (*BESIDE, SURVIVAL_FILE))
    return Path(out)


def read_imported(folder: Path, shardings: Any | None = None) -> Imported:
    """The model in an Orbax folder, every parameter in the sharding asked for (whole on the default device where None).

    Raises:
      ValueError: the folder was not written by `import_model`.
    """
    folder = Path(folder).absolute()
    config, notes = read_json(folder, "config.json"), read_json(folder, NOTES_FILE)
    is_drafter = _is_drafter(config, folder)
    if is_drafter:
        model: Any = drafter_of(config, folder)
    else:
        architecture = config["architectures"][0]
        row = TARGETS[architecture]
        model = row.target(row.config(config, architecture, folder / "config.json"))
    if shardings is None:
        here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
        shardings = jax.tree.map(lambda _: here, model.abstract_params())
    abstract = jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, jnp.dtype(notes["dtype"]), sharding=sharding),
        model.abstract_params(),
        shardings,
    )
    with ocp.StandardCheckpointer() as checkpointer:
        params = checkpointer.restore(folder / PARAMS, abstract)
    return Imported(model, params, is_drafter)


def export_model(source: Path, out: Path) -> Path:
    """Write an Orbax folder as a folder of safetensors again, with the names and the config that the original had.

    Raises:
      ValueError: `source` was not written by `import_model`, or `out` exists.
    """
    source = Path(source).absolute()
    imported, notes = read_imported(source), read_json(source, NOTES_FILE)
    config = read_json(source, "config.json")
    dtype = np.dtype(jnp.dtype(notes["dtype"]))
    with _whole(Path(out).absolute()) as partial:
        if imported.is_drafter:
            ids = np.load(source / IDS_FILE) if (source / IDS_FILE).exists() else None
            survival = read_json(source, SURVIVAL_FILE) if (source / SURVIVAL_FILE).exists() else None
            save_drafter(partial, imported.model, imported.params, config_json=config, draft_ids=ids, survival=survival, dtype=dtype)
        else:
            tensors = {
                name if name == "lm_head.weight" else notes["prefix"] + name: np.ascontiguousarray(tensor)
                for name, tensor in checkpoint_tensors(imported.params, dtype).items()
            }
            save_file(tensors, partial / SINGLE_FILE, {"format": "pt"})
            (partial / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _copy_beside(source, partial, BESIDE)
    return Path(out)


def _copy_beside(folder: Path, to: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if (folder / name).is_file():
            shutil.copy2(folder / name, to / name)
