"""The pages of `docs/`: their code runs and prints what they show, and what they name exists."""

import ast
import functools
import re
import shlex
import tomllib
from pathlib import Path

import pytest

from experiments.ablations import named_sweeps
from experiments.docs_pages import FOLDER, cells_of, run_cells, with_outputs
from experiments.presets import PRESETS
from tests import test_drafter_contract as drafter_contract
from tests import test_target_contract as target_contract
from tests.conftest import ROOT

PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.md"))}
FENCED = re.compile(r"^```(\w+)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
TOP = ("dspark_jax/", "pallas_kernels/", "experiments/", "tests/", "notebooks/")
every_page = pytest.mark.parametrize("name", PAGES)


def _ran(name, blocks=None):
    """What the code of a page prints, and its names; of the first so many blocks alone."""
    return run_cells(cells_of(PAGES[name])[:blocks], f"docs/{name}.md")


def _prose(page):
    return FENCED.sub("", page)


def _quoted(page):
    """What stands in backticks outside of blocks of code."""
    return re.findall(r"`([^`\n]+)`", _prose(page))


def _commands(page):
    """Command lines, in blocks and in backticks."""
    blocks = [body for language, body in FENCED.findall(page) if language == "bash"]
    lines = [line for block in blocks for line in block.replace("\\\n", " ").splitlines() if line.strip()]
    return [*lines, *(each for each in _quoted(page) if each.split()[0] in ("python", "make", "bash", "uv") and " " in each)]


SLOW = ("adding_a_drafter", "adding_a_target")
"""They run for longer; the drafter and the target on them are tested below in every run."""


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] if name in SLOW else []) for name, page in PAGES.items() if cells_of(page)]
)
def test_the_code_of_a_page_prints_what_the_page_shows(name):
    assert with_outputs(PAGES[name], _ran(name)[0]) == PAGES[name], "python -m experiments.docs_pages --write"


def test_every_number_of_the_worked_example_is_in_its_code_or_printed_by_it():
    page = PAGES["how_a_round_works"]
    shown = "".join(body for _, body in FENCED.findall(page))
    known = {float(number) for number in re.findall(r"\d+\.\d+", shown)}
    prose = re.findall(r"(?<![\d.])\d+\.\d+(?![\d.])", _prose(page))
    assert prose and [number for number in prose if float(number) not in known] == []


def test_the_index_has_every_page():
    assert set(re.findall(r"\((\w+)\.md\)", PAGES["README"])) == set(PAGES) - {"README"}


@every_page
def test_links_lead_somewhere(name):
    for link in re.findall(r"\]\(([^)#]+)\)", _prose(PAGES[name])):
        assert (FOLDER / link).is_file(), link


@functools.cache
def _parsed(path):
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def _definitions(path):
    """Names that a module defines, those inside of classes as CLASS.NAME."""

    def names(body, prefix=""):
        for node in body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                yield prefix + node.name
                yield from names(node.body, f"{prefix}{node.name}.") if isinstance(node, ast.ClassDef) else ()
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                yield from (prefix + target.id for target in targets if isinstance(target, ast.Name))

    return set(names(_parsed(path).body))


@every_page
def test_files_and_what_is_named_in_them_exist(name):
    for quoted in _quoted(PAGES[name]):
        path, _, member = quoted.partition("::")
        if not path.startswith(TOP) or " " in quoted or "NAME" in path:
            continue
        assert (ROOT / path).exists(), quoted
        assert not member or member in _definitions(ROOT / path), quoted


def test_what_can_be_checked_is_found():
    """A test of the tests above."""
    assert _quoted("`a` b\n```python\n`c`\n```\n`d`") == ["a", "d"]
    assert _commands("```bash\nmake demo\n```\n`python -m x` `make`") == ["make demo", "python -m x"]
    assert {"PAGES", "test_links_lead_somewhere"} <= _definitions(Path(__file__))
    assert sum("::" in quoted for page in PAGES.values() for quoted in _quoted(page)) > 100


@functools.cache
def _known_options():
    """Fields and arguments with an annotation, of all scripts: options on the command line are named after them."""
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "experiments").glob("*.py")]
    return {name for source in sources for name in re.findall(r"^    (\w+): ", source, flags=re.MULTILINE)}


@every_page
def test_commands_exist_with_their_options(name):
    options, makefile = _known_options(), (ROOT / "Makefile").read_text(encoding="utf-8")
    launcher = (ROOT / "experiments" / "run.py").read_text(encoding="utf-8")
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for command in _commands(PAGES[name]):
        words = shlex.split(command, comments=True)
        assert {word[2:].replace("-", "_") for word in words if word.startswith("--")} <= options | {"help"}, command
        match words:
            case ["export", *settings]:
                assert settings and all(re.fullmatch(r"[A-Z_]+=\S+", setting) for setting in settings), command
            case ["make", target]:
                assert f"\n{target}:" in makefile, command
            case ["bash", script, *_]:
                assert (ROOT / script).is_file(), command
            case ["uv", "pip", "install", "-e", extra]:
                assert set(extra.strip(".[]").split(",")) <= set(extras), command
            case ["python", "-m", "experiments.run", sub, *rest]:
                assert f'"{sub}": ' in launcher, command
                assert sub not in ("train", "cache") or not rest or rest[0] in PRESETS, command
                assert sub not in ("sweep", "sweep-report") or rest[0] in named_sweeps(), command
            case ["python", "-m", module, *_]:
                assert (ROOT / (module.replace(".", "/") + ".py")).is_file(), command
            case _:
                pytest.fail(f"no such command is known: {command}")


def test_every_fault_has_a_test_that_is_marked_with_it():
    rows = dict(re.findall(r"^\| ([A-F]\d) \|(.*)$", PAGES["differences"], flags=re.MULTILINE))
    assert list(rows) == [
        f"{part}{number}" for part, most in zip("ABCDEF", (8, 3, 5, 5, 7, 6), strict=True) for number in range(1, most + 1)
    ]
    for fault, row in rows.items():
        for file, test in re.findall(r"`(tests/\w+\.py)::(\w+)`", row):
            (function,) = (node for node in _parsed(ROOT / file).body if isinstance(node, ast.FunctionDef) and node.name == test)
            assert f"[{fault}]" in (ast.get_docstring(function) or ""), f"{fault}: {file}::{test}"


@pytest.fixture(scope="module")
def drafter():
    names = _ran("adding_a_drafter", 1)[1]
    config = names["BigramConfig"](drafter_contract.VOCAB, drafter_contract.WIDTH, drafter_contract.LAYERS, taps=(0, 2), block_size=3)
    return names["BigramDrafter"](config)


@pytest.fixture(scope="module")
def case(drafter):
    return drafter_contract._case(drafter)


def test_the_drafter_of_its_page_trains_as_it_decodes(case):
    drafter_contract.test_the_training_forward_is_the_decoding_forward_at_every_anchor(case, 0.0)


@pytest.mark.slow
def test_the_drafter_of_its_page_keeps_the_rest_of_the_contract(case):
    drafter_contract.test_the_training_forward_is_the_decoding_forward_at_every_anchor(case, 1.0)
    drafter_contract.test_proposals_lie_in_the_vocabulary(case)
    drafter_contract.test_sites_see_nothing_that_decoding_would_not_know(case)
    drafter_contract.test_prefill_in_chunks_is_prefill_at_once(case, 5)
    drafter_contract.test_the_state_after_rounds_is_the_state_rebuilt_from_the_committed_text(case)


@pytest.mark.slow
@pytest.mark.parametrize("cut", [None, 2])
def test_rounds_with_the_drafter_of_its_page_have_the_targets_law(monkeypatch, drafter, cut):
    monkeypatch.setitem(drafter_contract.DRAFTERS, "of_the_page", drafter)
    drafter_contract.test_rounds_with_its_drafts_have_the_targets_law("of_the_page", cut)


@pytest.fixture(scope="module")
def target_case():
    names = _ran("adding_a_target", 1)[1]
    return target_contract.case_of(names["AverageTarget"](names["AverageConfig"](target_contract.VOCAB, 8)))


def test_the_target_of_its_page_keeps_the_contract(target_case):
    case = target_case
    target_contract.test_shapes_are_those_of_the_spec(case)
    target_contract.test_a_token_sees_what_stands_before_it_and_itself(case)
    target_contract.test_taps_come_side_by_side_in_the_order_asked_for(case)
    target_contract.test_passes_over_a_cache_are_the_pass_over_the_whole_text(case)
    target_contract.test_flat_tokens_of_several_requests_are_each_request_alone(case)


@pytest.mark.slow
def test_greedy_text_of_the_target_of_its_page_is_that_of_plain_decoding(target_case):
    target_contract.test_greedy_text_is_that_of_plain_decoding_where_some_drafts_are_wrong(target_case)
