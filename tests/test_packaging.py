"""What a stranger's machine depends on: the lock, the declared requirements, the commands of the README, the platform of the tests."""

import ast
import importlib.metadata
import re
import sys
import tomllib
import warnings
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest

ROOT = Path(__file__).resolve().parent.parent
LOCK = (ROOT / "requirements.lock").read_text(encoding="utf-8")
PYPROJECT_TEXT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
PYPROJECT = tomllib.loads(PYPROJECT_TEXT)
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
LOCKED_EXTRAS = ("models", "data", "plots", "dev")


def normalised(requirement: str) -> str:
    """Name of the distribution that `requirement` asks for, as registries compare names."""
    name = re.match(r"[A-Za-z0-9._-]+", requirement)
    assert name, requirement
    return re.sub(r"[-_.]+", "-", name.group()).lower()


def locked() -> set[str]:
    return {normalised(line) for line in LOCK.splitlines() if re.match(r"[A-Za-z0-9]", line)}


def test_lock_names_no_host_and_no_folder():
    traces = [line for line in LOCK.splitlines() if re.search(r"://|(^|[\s@'\"])(/|~)\w|--(index|extra-index|find-links)|file:", line)]
    assert traces == []


def test_every_locked_package_has_a_hash():
    entries = re.split(r"^(?=[A-Za-z0-9])", LOCK, flags=re.MULTILINE)
    assert [entry.splitlines()[0] for entry in entries if entry.strip() and "--hash=sha256:" not in entry] == []


@pytest.mark.parametrize("group", ["runtime", *LOCKED_EXTRAS])
def test_lock_covers_what_is_declared(group):
    declared = PYPROJECT["project"]["dependencies"] if group == "runtime" else EXTRAS[group]
    assert {normalised(requirement) for requirement in declared} <= locked(), "run `make lock`"


def test_lock_leaves_accelerators_and_unused_programs_out():
    """The default model's package asks for llama.cpp and a command-line program; neither is used. Devices are the extras' choice."""
    heavy = re.compile(r"llama-cpp-python|llm|torch.*|tensorflow|tensorflow-cpu|nvidia-.*|jax-cuda.*|libtpu|triton")
    assert {name for name in locked() if heavy.fullmatch(name)} == set()


def test_every_requirement_states_its_reason():
    declared = [*PYPROJECT["build-system"]["requires"], *PYPROJECT["project"]["dependencies"], *sum(EXTRAS.values(), [])]
    bare = [
        line
        for requirement in declared
        for line in PYPROJECT_TEXT.splitlines()
        if f'"{requirement}"' in line and not re.search(r"# \w+.{10,}", line)
    ]
    assert bare == []


def test_every_import_is_declared():
    """A package that comes along with another one today may be gone tomorrow."""
    declared = {normalised(requirement) for requirement in [*PYPROJECT["project"]["dependencies"], *sum(EXTRAS.values(), [])]}
    declared.add("jaxlib")  # the other half of jax
    installed = importlib.metadata.packages_distributions()
    own = {"dspark_jax", "pallas_kernels", "experiments", "tests"}
    undeclared = set()
    for path in [path for top in sorted(own) for path in sorted((ROOT / top).rglob("*.py"))]:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            for top in {name.split(".")[0] for name in names} - own - set(sys.stdlib_module_names):
                if not declared & {normalised(name) for name in installed.get(top, [top])}:
                    undeclared.add(f"{path.relative_to(ROOT)} imports {top}")
    assert undeclared == set()


def test_released_assets_are_no_ignored_files():
    """hatchling ships what git does not ignore, so one pattern too many would empty the wheel."""
    ignored = re.findall(r"^(?!#)\S+", (ROOT / ".gitignore").read_text(encoding="utf-8"), re.MULTILINE)
    assert ignored and not [pattern for pattern in ignored if re.search(r"assets|results|safetensors|json|log|png|npz|^\*$", pattern)]
    assert PYPROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"] == ["dspark_jax", "pallas_kernels", "experiments"]


def test_readme_commands_exist():
    readme = ROOT / "README.md"
    if not readme.exists():
        pytest.skip("no README.md")
    fenced_or_inline = re.findall(r"^```\w*\n(.*?)^```|`([^`\n]+)`", readme.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    code = "\n".join(fenced or inline for fenced, inline in fenced_or_inline)
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    asked = set(re.findall(r"^\$?\s*(?:[A-Z_]+=\S+ +)*make +(?:[A-Z_]+=\S+ +)*([a-z][a-z-]*)", code, re.MULTILINE))
    assert asked <= targets
    modules = set(re.findall(r"python3? -m ((?:dspark_jax|pallas_kernels|experiments)[\w.]*)", code))
    missing = [name for name in modules if not ((path := ROOT / name.replace(".", "/")).is_dir() or path.with_suffix(".py").is_file())]
    assert missing == []


@pytest.mark.parametrize("module", ["dspark_jax", "dspark_jax.decode", "pallas_kernels.noise", "experiments.demo", "tests.test_packaging"])
@pytest.mark.parametrize("category", [DeprecationWarning, UserWarning, FutureWarning])
def test_warnings_of_our_own_code_are_errors(module, category):
    with pytest.raises(category, match="made up"):
        exec("warnings.warn('made up', category)", {"__name__": module, "warnings": warnings, "category": category})


def test_warnings_inside_other_libraries_are_none():
    with warnings.catch_warnings(record=True) as caught:
        for module in ("jax.numpy", "dspark_jaxlike"):
            exec("warnings.warn('made up', UserWarning)", {"__name__": module, "warnings": warnings})
    assert len(caught) == 2


def test_tests_run_on_eight_devices_with_strict_dtypes():
    assert [device.platform for device in jax.devices()] == ["cpu"] * 8
    with pytest.raises(ValueError, match="dtype promotion"):
        jnp.add(jnp.ones(2, jnp.bfloat16), jnp.ones(2, jnp.float32))
