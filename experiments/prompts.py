"""Prompts that the project makes itself: word problems, tasks about the standard library, and user turns written by the target.

Whether a prompt is held out is a keyed hash of what it is about, so that a prompt can't be in both splits, however many are made.
"""

import dataclasses
import hashlib
import importlib
import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from random import Random
from types import ModuleType
from typing import Any

from dspark_jax.data import DOMAINS, ChatTemplate, complete_chat
from dspark_jax.typing import typed
from experiments.word_problems import word_problem

SPLITS = ("train", "heldout")

MODULES = (
    *("abc", "array", "ast", "asyncio", "base64", "bdb", "binascii", "bisect", "builtins", "bz2", "calendar", "cmath", "cmd"),
    *("code", "codecs", "collections", "compileall", "concurrent.futures", "configparser", "contextlib"),
    *("contextvars", "copy", "copyreg", "csv", "dataclasses", "datetime", "decimal", "difflib", "dis", "doctest"),
    *("email.charset", "email.encoders", "email.generator", "email.header", "email.headerregistry", "email.message", "email.parser"),
    *("email.policy", "email.utils", "enum", "filecmp", "fileinput", "fnmatch", "fractions", "ftplib", "functools", "gc"),
    *("genericpath", "getpass", "glob", "graphlib", "gzip", "hashlib", "heapq", "hmac", "html", "html.parser"),
    *("http.client", "http.cookiejar", "http.cookies", "http.server", "imaplib", "importlib.metadata", "importlib.resources"),
    *("importlib.util", "inspect", "io", "ipaddress", "itertools", "json", "json.encoder", "linecache"),
    *("locale", "logging", "logging.config", "logging.handlers", "lzma", "mailbox", "marshal", "math", "mimetypes", "modulefinder"),
    *("multiprocessing.shared_memory", "netrc", "numbers", "operator", "optparse", "os", "os.path"),
    *("pathlib", "pdb", "pickle", "pickletools", "pkgutil", "platform", "poplib", "pprint", "profile", "pstats"),
    *("py_compile", "pyclbr", "queue", "quopri", "random", "re", "reprlib", "runpy", "sched", "secrets", "selectors"),
    *("shelve", "shlex", "shutil", "signal", "site", "smtplib", "socket", "socketserver", "sqlite3", "ssl", "statistics"),
    *("struct", "subprocess", "symtable", "sysconfig", "tarfile", "tempfile", "textwrap"),
    *("threading", "timeit", "tokenize", "trace", "traceback", "tracemalloc", "types", "typing", "unicodedata"),
    *("unittest", "unittest.mock", "urllib.parse", "urllib.request", "urllib.robotparser", "uuid", "venv"),
    *("warnings", "weakref", "webbrowser", "wsgiref.handlers", "wsgiref.util", "wsgiref.validate", "xml.dom.minidom"),
    *("xml.etree.ElementTree", "xml.sax.handler", "xml.sax.saxutils", "xmlrpc.server", "zipapp", "zipfile", "zipimport"),
    *("zlib", "zoneinfo"),
)
"""Modules of the standard library that import without side effects; one that a platform lacks is passed over. `sys` is
not among them, because whoever runs a program (test runners, notebooks) replaces some of its functions."""

CODE_WORDINGS = (
    "Write a Python function with the signature `{call}`. It should do this: {summary}",
    'Complete this Python function and add a short example of its use.\n\n```python\ndef {definition}:\n    """{summary}"""\n```',
    'The Python standard library has `{module}.{call}`, documented as: "{summary}" Show three examples of how to use it.',
    "Write unit tests for `{call}` from Python's `{module}` module. Its description is: {summary}",
    "Explain what `{call}` of the Python module `{module}` does, in plain words and with code. Its documentation says: {summary}",
)


@dataclasses.dataclass(frozen=True)
class Prompt:
    """A user turn.

    Attributes:
      domain: one of `dspark_jax.data.DOMAINS`.
      text: what the user says.
      split: "train" or "heldout".
      key: its name, unique among all prompts of one seed.
    """

    domain: str
    text: str
    split: str
    key: str

    def __post_init__(self):
        for field, allowed in (("domain", DOMAINS), ("split", SPLITS)):
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} is {getattr(self, field)!r}; allowed: {', '.join(allowed)}")


def _fraction(subject: str, seed: int) -> float:
    """A number in [0, 1) that belongs to seed and subject, the same in every process."""
    return int.from_bytes(hashlib.blake2b(f"{seed}\0{subject}".encode(), digest_size=6).digest(), "big") / 2**48


@typed
def split_of(subject: str, seed: int, heldout_share: float) -> str:
    """The split of everything that is about `subject`: a hash of seed and subject, below `heldout_share` of its range or not."""
    if not 0 < heldout_share < 1:
        raise ValueError(f"heldout_share is {heldout_share}; allowed: above 0 and below 1")
    return "heldout" if _fraction(subject, seed) < heldout_share else "train"


@typed
def maths_prompts(count: int, split: str, seed: int = 0, heldout_share: float = 1 / 16) -> list[Prompt]:
    """The first `count` different word problems of a split; a larger count only adds to the end."""
    if count < 0:
        raise ValueError(f"count is {count}; allowed: at least 0")
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed: {', '.join(SPLITS)}")
    rng = Random(f"maths {seed}")
    texts: dict[str, int] = {}
    number = 0
    while len(texts) < count:
        text = word_problem(rng).text
        if split_of(text, seed, heldout_share) == split:
            texts.setdefault(text, number)
        number += 1
    return [Prompt("maths", text, split, f"maths-{seed}-{number}") for text, number in texts.items()]


@dataclasses.dataclass(frozen=True)
class LibraryFunction:
    """A function or method of the standard library: where it is, how it is called, and the first paragraph of its docstring."""

    module: str
    name: str
    signature: str
    summary: str


def _callables(module: ModuleType) -> Iterator[tuple[str, Any]]:
    """Public functions of a module and public methods of its public classes, by qualified name."""
    listed = getattr(module, "__all__", None)
    for name, value in sorted(vars(module).items()):
        defined_here = getattr(value, "__module__", None) in (module.__name__, f"_{module.__name__}")
        if name.startswith("_") or not (name in listed if listed is not None else defined_here):
            continue
        if inspect.isclass(value):
            for method in sorted(vars(value)):
                if not method.startswith("_") and inspect.isroutine(inspect.getattr_static(value, method)):
                    yield f"{name}.{method}", getattr(value, method)
        elif inspect.isroutine(value):
            yield name, value


@typed
def library_functions(modules: Sequence[str] = MODULES) -> list[LibraryFunction]:
    """What this Python's standard library documents of `modules`, in a fixed order, every summary once.

    Left out: what has no signature, no sentence of documentation, or a signature whose text differs from run to run (addresses of
    default values, sets).
    """
    found: dict[str, LibraryFunction] = {}
    for module_name in modules:
        try:
            module = importlib.import_module(module_name)
        except ImportError:
            continue
        for name, function in _callables(module):
            try:
                signature = str(inspect.signature(function))
            except (TypeError, ValueError):
                continue
            documentation = inspect.getdoc(function) or ""
            summary = re.sub(r"\s+", " ", documentation.split("\n\n")[0]).strip()
            if (
                25 <= len(summary) <= 400
                and len(signature) <= 200
                and not re.search(r'->|[`"]', summary)
                and not re.search("[<{]", signature)
            ):
                found.setdefault(summary, LibraryFunction(module_name, name, signature, summary))
    return list(found.values())


@typed
def code_prompts(split: str, seed: int = 0, heldout_share: float = 1 / 16, modules: Sequence[str] = MODULES) -> list[Prompt]:
    """All tasks of a split, every function in every wording; all tasks about one function share its split.

    The order is seeded and that of the keys' hashes, so that a function which another Python lacks moves no other task.

    Raises:
      ValueError: `split` is no split.
    """
    if split not in SPLITS:
        raise ValueError(f"split is {split!r}; allowed: {', '.join(SPLITS)}")
    prompts = []
    for function in library_functions(modules):
        if split_of(function.summary, seed, heldout_share) != split:
            continue
        values = {
            "call": function.name + function.signature,
            "definition": function.name.rpartition(".")[2] + function.signature,
            "module": function.module,
            "summary": function.summary,
        }
        for number, wording in enumerate(CODE_WORDINGS):
            prompts.append(Prompt("code", wording.format(**values), split, f"code-{function.module}.{function.name}-{number}"))
    return sorted(prompts, key=lambda prompt: _fraction(prompt.key, seed))


@typed
def user_header(render: Callable[[list[dict[str, str]]], str], template: ChatTemplate) -> str:
    """The text of a chat up to the point where the user speaks: system turn, if the template has one, and user header.

    Given only this, an instruct model writes what a user might ask.

    Args:
      render: a chat template, applied without a generation prompt.
    """
    mark = "\N{BLACK SQUARE}"
    before, found, _ = render(complete_chat([{"role": "user", "content": mark}], template)).partition(mark)
    if not found:
        raise ValueError("render drops the user's words; allowed: a chat template that contains them unchanged")
    return before


@typed
def chat_prompts(
    turns: Sequence[Sequence[int]],
    decode: Callable[[Sequence[int]], str],
    end_ids: Sequence[int],
    seed: int = 0,
    heldout_share: float = 1 / 16,
    min_tokens: int = 3,
) -> list[Prompt]:
    """The prompts in user turns that the target wrote, of both splits, every text once.

    Turns shorter than `min_tokens` tokens and blank ones are dropped.

    Args:
      turns: sampled ids, in the order of sampling; the first of `end_ids` and all behind it are cut off. A turn that never ends is
        kept as it is, so a prompt may break off.
      end_ids: ids that end a turn, or that can't be part of one (headers).
    """
    texts: dict[str, int] = {}
    for number, turn in enumerate(turns):
        ends = [position for position, token in enumerate(turn) if token in end_ids]
        words = turn[: ends[0]] if ends else turn
        text = decode(words).strip()
        if len(words) >= min_tokens and text:
            texts.setdefault(text, number)
    return [Prompt("chat", text, split_of(text, seed, heldout_share), f"chat-{seed}-{number}") for text, number in texts.items()]
