"""One direction of imports: what a module may build on is decided once, in the table below, and read from the sources here."""

import ast
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent

# From the bottom to the top. A module imports from lower levels, and from its own as long as no cycle arises. `name.*` stands for
# every module of a folder; the file `__init__` of a package has the package's name.
LEVELS: tuple[tuple[str, ...], ...] = (
    ("pallas_kernels", "pallas_kernels.*"),
    ("dspark_jax", "dspark_jax.typing", "dspark_jax.sharding"),
    (
        *("dspark_jax.layers", "dspark_jax.kv_cache", "dspark_jax.sampling", "dspark_jax.tokenizers"),
        *("dspark_jax.in_place", "dspark_jax.moe", "dspark_jax.hyper_connections"),
        *("dspark_jax.model_files", "dspark_jax.tensor_files", "dspark_jax.gguf_files"),
    ),
    ("dspark_jax.protocols",),
    (
        *("dspark_jax.targets", "dspark_jax.targets.*", "dspark_jax.drafters", "dspark_jax.drafters.*"),
        *("dspark_jax.verify", "dspark_jax.block_verify", "dspark_jax.calibrate"),
        *("dspark_jax.schedule", "dspark_jax.step_curve", "dspark_jax.prefix_ranking", "dspark_jax.policies", "dspark_jax.capacity"),
        "dspark_jax.draft_planning",
        *("dspark_jax.calibration_metrics", "dspark_jax.calibration_fit", "dspark_jax.calibration_choice"),
        *("dspark_jax.calibration_identity", "dspark_jax.calibration_online"),
    ),
    (
        *("dspark_jax.round_stats", "dspark_jax.decode_state", "dspark_jax.decode", "dspark_jax.prefill"),
        *("dspark_jax.losses", "dspark_jax.readout"),
        *("dspark_jax.anchors", "dspark_jax.checksums", "dspark_jax.data", "dspark_jax.batches"),
        *("dspark_jax.checkpoint", "dspark_jax.exactness", "dspark_jax.model_configs", "dspark_jax.draft_configs", "dspark_jax.weights"),
        *("dspark_jax.gemma_configs", "dspark_jax.chain_configs"),
        *("dspark_jax.prompt_files", "dspark_jax.prompt_dataset"),
        *("dspark_jax.feature_samples", "dspark_jax.feature_cache", "dspark_jax.feature_writer", "dspark_jax.deepspec_cache"),
    ),
    ("dspark_jax.evaluate",),
    (
        *("dspark_jax.train", "dspark_jax.sharded_training"),
        *("dspark_jax.engine", "dspark_jax.engine_core", "dspark_jax.engine_config", "dspark_jax.engine_metrics"),
        *("dspark_jax.engine_requests", "dspark_jax.requests", "dspark_jax.stop_texts", "dspark_jax.round_plans"),
        *("dspark_jax.slots", "dspark_jax.slot_executor"),
    ),
    ("experiments", "experiments.*"),
    ("notebooks", "notebooks.*"),
)

# Pairs of prefixes (importer, imported) that the levels alone would let through.
FORBIDDEN: tuple[tuple[str, str, str], ...] = (
    ("dspark_jax.targets", "dspark_jax.drafters", "targets know nothing of drafters"),
    ("dspark_jax.drafters", "dspark_jax.targets", "drafters know their target through protocols.TargetHead and TargetSpec alone"),
    *(
        (f"dspark_jax.{module}", f"dspark_jax.{folder}", f"{module} knows targets and drafters through protocols alone")
        for module in ("decode", "train", "engine")
        for folder in ("targets", "drafters")
    ),
)

Edges = dict[str, dict[str, int]]
"""importer -> imported module -> line"""


def within(module: str, prefix: str) -> bool:
    """Whether `module` is `prefix` or lies inside it."""
    return module == prefix or module.startswith(prefix + ".")


def level(module: str) -> int:
    """The level of `module` in the table; KeyError where nobody has placed it."""
    for height, members in enumerate(LEVELS):
        if any(module == name or (name.endswith(".*") and module.startswith(name[:-1])) for name in members):
            return height
    raise KeyError(module)


def sources_of_the_project() -> dict[str, str]:
    """Module name -> source, of everything that the rules hold for; tests may import whatever they test."""
    sources = {}
    for top in ("pallas_kernels", "dspark_jax", "experiments", "notebooks"):
        for path in sorted((ROOT / top).rglob("*.py")):
            parts = path.relative_to(ROOT).with_suffix("").parts
            sources[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path.read_text(encoding="utf-8")
    return sources


def imports(module: str, source: str, known: set[str]) -> dict[str, int]:
    """Imported modules with their lines, those inside functions and under TYPE_CHECKING included.

    `from package import name` is an import of `package.name` where that is a module, and of `package` otherwise.
    """
    is_package = any(name.startswith(module + ".") for name in known)
    found: dict[str, int] = {}
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            found |= {alias.name: node.lineno for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            parts = module.split(".")
            anchor = parts[: len(parts) - node.level + is_package] if node.level else []
            base = ".".join([*anchor, *([node.module] if node.module else [])])
            for alias in node.names:
                name = f"{base}.{alias.name}"
                found[name if name in known else base] = node.lineno
    return found


def edges_of(sources: dict[str, str]) -> Edges:
    """Who imports whom, at which line."""
    return {module: imports(module, source, set(sources)) for module, source in sources.items()}


def cycle(edges: Edges) -> list[str] | None:
    """Some cycle among the modules of `edges`, as the path that closes it; None where there is none."""
    finished: set[str] = set()

    def visit(module: str, path: list[str]) -> list[str] | None:
        if module in path:
            return [*path[path.index(module) :], module]
        if module in finished:
            return None
        for imported in edges.get(module, {}):
            if imported in edges and (found := visit(imported, [*path, module])):
                return found
        finished.add(module)
        return None

    return next((found for module in edges if (found := visit(module, []))), None)


def violations(sources: dict[str, str]) -> list[str]:
    """Every broken rule as one sentence; empty where the sources are in order."""
    ours = {name.split(".")[0] for members in LEVELS for name in members}
    edges = edges_of(sources)
    problems = []
    for module, imported in edges.items():
        for name, line in {module: 1, **imported}.items():
            if name.split(".")[0] not in ours:
                continue
            try:
                height, own = level(name), level(module)
            except KeyError:
                if name == module:
                    problems.append(f"{module}: not in the table of levels; place it in LEVELS of tests/test_imports.py")
                elif name not in sources:
                    problems.append(f"{module}:{line} imports {name}, which is no module")
                continue
            if height > own:
                problems.append(f"{module}:{line} imports {name}, which stands above it")
            problems += [
                f"{module}:{line} imports {name}: {reason}"
                for importer, target, reason in FORBIDDEN
                if within(module, importer) and within(name, target)
            ]
    if found := cycle(edges):
        problems.append(f"cycle: {' -> '.join(found)}")
    return problems


def test_imports_run_in_one_direction():
    sources = sources_of_the_project()
    assert len(sources) > 3, f"found hardly any module under {ROOT.name}/: {sorted(sources)}"
    assert not violations(sources), "\n" + "\n".join(violations(sources))


def test_kernels_import_jax_and_nothing_else():
    allowed = {"jax", "numpy", "pallas_kernels", *sys.stdlib_module_names}
    foreign = [
        f"{module}:{line} imports {name}"
        for module, imported in edges_of(sources_of_the_project()).items()
        for name, line in imported.items()
        if within(module, "pallas_kernels") and name.split(".")[0] not in allowed
    ]
    assert not foreign, "\n" + "\n".join(foreign)


def test_nothing_reaches_into_private_jax():
    """`jax._src` and `pjit` are not the same on the versions of jax that are supported."""
    private = [
        f"{module}:{line} imports {name}"
        for module, imported in edges_of(sources_of_the_project()).items()
        for name, line in imported.items()
        if within(name, "jax._src") or within(name, "jax.experimental.pjit")
    ]
    assert not private, "\n" + "\n".join(private)


@pytest.mark.parametrize(
    ("sources", "complaint"),
    [
        ({"pallas_kernels.noise": "import dspark_jax.typing"}, "pallas_kernels.noise:1 imports dspark_jax.typing, which stands above it"),
        ({"dspark_jax.layers": "\nfrom dspark_jax.protocols import Target"}, "dspark_jax.layers:2 imports dspark_jax.protocols"),
        ({"dspark_jax.verify": "def f():\n  from .decode import generate", "dspark_jax.decode": ""}, "dspark_jax.verify:2 imports"),
        ({"dspark_jax.targets.dense": "from dspark_jax.drafters import dspark", "dspark_jax.drafters.dspark": ""}, "know nothing of"),
        ({"dspark_jax.drafters.dspark": "from ..targets.dense import Dense", "dspark_jax.targets.dense": ""}, "drafters know their target"),
        ({"dspark_jax.engine": "import dspark_jax.drafters.eagle3"}, "engine knows targets and drafters through protocols alone"),
        ({"dspark_jax.data": "from dspark_jax import losses", "dspark_jax.losses": "import dspark_jax.data"}, "cycle: "),
        ({"dspark_jax.odds_and_ends": ""}, "dspark_jax.odds_and_ends: not in the table of levels; place it"),
        ({"dspark_jax": "from dspark_jax.engine import Engine", "dspark_jax.engine": ""}, "dspark_jax:1 imports dspark_jax.engine"),
        ({"dspark_jax.train": "import dspark_jax.gone"}, "dspark_jax.train:1 imports dspark_jax.gone, which is no module"),
    ],
)
def test_made_up_violations_are_caught(sources, complaint):
    found = violations(sources)
    assert any(complaint in problem for problem in found), found


def test_made_up_sources_in_order_pass():
    sources = {
        "pallas_kernels": "",
        "pallas_kernels.noise": "import jax",
        "dspark_jax": "",
        "dspark_jax.sampling": "from pallas_kernels import noise",
        "dspark_jax.protocols": "from dspark_jax.sampling import Noise",
        "dspark_jax.targets.dense": "from dspark_jax import protocols",
        "dspark_jax.weights": "from dspark_jax.targets.dense import Dense",
        "experiments.run": "from dspark_jax.weights import load\nimport numpy",
    }
    assert violations(sources) == []
    assert edges_of(sources)["dspark_jax.sampling"] == {"pallas_kernels.noise": 1}
