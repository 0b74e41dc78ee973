"""Text to token ids and back, with the model's own chat template.

A tokenizer comes from a Hugging Face folder (`tokenizer.json`) or from the vocabulary inside a GGUF file. Both run on the
`tokenizers` library, so that the same ids come out.
"""

import dataclasses
import datetime
import functools
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from dspark_jax.gguf_files import GGUFFile, read_gguf
from dspark_jax.model_files import locate_model, read_json, require

REPLACEMENT = "\ufffd"

WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
"""Pre-tokenizer of Qwen2 and Llama 3; they differ in how many digits stay together."""

CONTROL, USER_DEFINED, BYTE = 3, 4, 6
"""Kinds of tokens in `tokenizer.ggml.token_type`; the first two are matched in the text as they stand."""

SPACE = "\u2581"
"""How SentencePiece writes a space."""

GEMMA_TURNS = ("<start_of_turn>", "<end_of_turn>")
GEMMA_TEMPLATE = (
    "{{ bos_token }}{% set ns = namespace(system='') %}{% for message in messages %}"
    "{% if message['role'] == 'system' and loop.first %}{% set ns.system = message['content'] + '\n\n' %}{% else %}"
    "{% set role = 'model' if message['role'] == 'assistant' else message['role'] %}"
    "{% if role not in ('user', 'model') %}"
    "{{ raise_exception('role is ' + role + '; allowed: system (first), user, assistant') }}{% endif %}"
    "{{ '<start_of_turn>' + role + '\n' + ns.system + message['content'] | trim + '<end_of_turn>\n' }}"
    "{% set ns.system = '' %}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<start_of_turn>model\n' }}{% endif %}"
)
"""Gemma's turns, for files of its vocabulary that come without a template: a system text opens the first user turn."""

Messages = Sequence[Mapping[str, Any]]


@dataclasses.dataclass(frozen=True, eq=False)
class Tokenizer:
    """Text to ids and back.

    Attributes:
      backend: the tokenizer of the `tokenizers` library.
      chat_template: Jinja source; None where the model has none.
      stop_ids: ids that end an answer.
      special_tokens: named tokens that the template may use (`bos_token`, `eos_token`, ...).
    """

    backend: Any
    chat_template: str | None
    stop_ids: tuple[int, ...]
    special_tokens: Mapping[str, str]

    @property
    def vocab_size(self) -> int:
        """Number of tokens that have a text. The model's vocabulary may be larger (padded)."""
        return self.backend.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, add_special: bool = False) -> list[int]:
        """Token ids of `text`. Special tokens that are spelt out in it are recognised.

        Args:
          add_special: also add what the model wants around a text (a begin token, where it has one). A chat template brings its own.
        """
        return self.backend.encode(text, add_special_tokens=add_special).ids

    def decode(self, ids: Sequence[int], skip_special: bool = False) -> str:
        """Text of `ids`; bytes that are no UTF-8 become U+FFFD.

        Raises:
          ValueError: for an id that the tokenizer does not have.
        """
        ids = [int(i) for i in ids]
        unknown = [i for i in ids if i < 0 or self.backend.id_to_token(i) is None]
        if unknown:
            raise ValueError(f"ids holds {unknown[0]}, which is no token; allowed: 0..{self.vocab_size - 1}")
        return self.backend.decode(ids, skip_special_tokens=skip_special)

    def id_of(self, token: str) -> int:
        """Id of a token by its text.

        Raises:
          ValueError: where there is no such token.
        """
        found = self.backend.token_to_id(token)
        if found is None:
            raise ValueError(f"token {token!r} is not in the vocabulary of {self.vocab_size} tokens")
        return found

    def apply_chat_template(self, messages: Messages, add_generation_prompt: bool = True, **options: Any) -> str:
        """The conversation as the text that the model was trained on.

        Args:
          messages: dicts with "role" and "content".
          add_generation_prompt: end with the header of the answer.
          options: further variables of the template (`enable_thinking`, `tools`, ...).

        Raises:
          ValueError: where the model has no chat template, or the template refuses the messages.
        """
        if self.chat_template is None:
            raise ValueError("chat_template is None: this model has none; encode plain text instead")
        jinja2 = require("jinja2", "models", "a chat template")
        variables = {**self.special_tokens, "tools": None, "documents": None, **options}
        try:
            return _compiled(self.chat_template).render(messages=messages, add_generation_prompt=add_generation_prompt, **variables)
        except (jinja2.TemplateError, TypeError) as error:
            raise ValueError(f"the chat template refuses these messages: {error}") from error

    def encode_chat(self, messages: Messages, add_generation_prompt: bool = True, **options: Any) -> list[int]:
        """Token ids of a conversation; see `apply_chat_template`."""
        return self.encode(self.apply_chat_template(messages, add_generation_prompt, **options))

    def stream(self, skip_special: bool = False) -> "TextStream":
        """An empty stream of text."""
        return TextStream(self, skip_special)


@dataclasses.dataclass(frozen=True)
class TextStream:
    """Text of ids that arrive bit by bit, in whole characters: a character whose bytes are not all there yet is held back.

    The pieces and the final `rest` together are `tokenizer.decode` of all ids.
    """

    tokenizer: Tokenizer
    skip_special: bool = False
    window: tuple[int, ...] = ()
    given: str = ""
    """Text of `window` that has been given out."""

    def push(self, ids: Sequence[int]) -> tuple["TextStream", str]:
        """The stream after `ids`, and the text that they complete."""
        if not len(ids):
            return self, ""
        window = (*self.window, *(int(i) for i in ids))
        text = self._text(window)
        whole = text.rstrip(REPLACEMENT)
        piece = whole[len(self.given) :]
        given = self.given + piece
        if whole == text:
            # A clean boundary: what lies before the newest ids can't change any more. They stay, since some decoders treat the
            # first token of a text in their own way, and with them the bytes that complete their first character, since some decode
            # a run of bytes as a whole or not at all.
            start = len(window) - len(ids)
            while start > 0 and REPLACEMENT in self._text(window[start:]):
                start -= 1
            window = window[start:]
            given = self._text(window)
        return dataclasses.replace(self, window=window, given=given), piece

    @property
    def rest(self) -> str:
        """What is still held back, with U+FFFD for incomplete characters; for the end of a text."""
        return self._text(self.window)[len(self.given) :]

    def _text(self, window: tuple[int, ...]) -> str:
        return self.tokenizer.decode(window, self.skip_special)


@functools.lru_cache(maxsize=8)
def _compiled(source: str) -> Any:
    """A chat template in a sandbox: it comes with the weights and is as trustworthy as they are."""
    require("jinja2", "models", "a chat template")
    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def refuse(message: str) -> None:
        raise TemplateError(message)

    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"])
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = refuse
    environment.globals["strftime_now"] = lambda code: datetime.datetime.now().strftime(code)
    try:
        return environment.from_string(source)
    except TemplateError as error:
        raise ValueError(f"chat_template is not valid Jinja: {error}") from error


def load_tokenizer(model: str | os.PathLike[str]) -> Tokenizer:
    """The tokenizer of a model, named as for `weights.load_target`.

    Raises:
      ValueError: where the files are missing or damaged, or the kind of tokenizer is not supported.
    """
    path = locate_model(model)
    return _from_gguf(read_gguf(path)) if path.is_file() else _from_folder(path)


def _from_folder(folder: Path) -> Tokenizer:
    library = require("tokenizers", "models", "a tokenizer")
    file = folder / "tokenizer.json"
    if not file.is_file():
        raise ValueError(f"{folder} has no tokenizer.json; other tokenizer files are not supported")
    try:
        backend = library.Tokenizer.from_file(str(file))
    except Exception as error:  # The library raises no narrower class.
        raise ValueError(f"{file} is no tokenizer: {error}") from error
    config = _optional_json(folder, "tokenizer_config.json")
    special_tokens = {}
    for name, value in config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            special_tokens[name] = text
    return Tokenizer(backend, _template_of(folder, config), _stop_ids_of(folder, backend, special_tokens), special_tokens)


def _optional_json(folder: Path, name: str) -> dict[str, Any]:
    return read_json(folder, name) if (folder / name).is_file() else {}


def _template_of(folder: Path, config: Mapping[str, Any]) -> str | None:
    if (folder / "chat_template.jinja").is_file():
        return (folder / "chat_template.jinja").read_text(encoding="utf-8")
    template = config.get("chat_template")
    if isinstance(template, list):
        return next((named["template"] for named in template if named["name"] == "default"), None)
    return template


def _stop_ids_of(folder: Path, backend: Any, special_tokens: Mapping[str, str]) -> tuple[int, ...]:
    """The generation config decides; else the tokenizer's end token, else the model config."""
    for stated in (
        _optional_json(folder, "generation_config.json").get("eos_token_id"),
        backend.token_to_id(special_tokens.get("eos_token", "")),
        _optional_json(folder, "config.json").get("eos_token_id"),
    ):
        if stated is not None:
            return tuple(stated) if isinstance(stated, list) else (stated,)
    return ()


def _from_gguf(file: GGUFFile) -> Tokenizer:
    """A tokenizer from the metadata of a GGUF file."""
    library = require("tokenizers", "models", "a tokenizer")
    prefix = "tokenizer.ggml."
    stored = {key.removeprefix(prefix): value for key, value in file.metadata.items() if key.startswith(prefix)}
    model = str(stored.get("model"))
    if model not in MODELS:
        known = ", ".join(f"{name!r} ({what})" for name, (what, _) in MODELS.items())
        raise ValueError(f"{file.path}: tokenizer.ggml.model is {stored.get('model')!r}; supported: {known}")
    backend = MODELS[model][1](library, stored, file.path)
    tokens: list[str] = stored["tokens"]
    kinds = stored.get("token_type", [])
    for special in (True, False):
        chosen = CONTROL if special else USER_DEFINED
        # The vocabulary of SentencePiece spells spaces its own way, and so does the text once it is normalised.
        normalized = model == "llama" and not special
        added = [library.AddedToken(tokens[i], normalized=normalized, special=special) for i, k in enumerate(kinds) if k == chosen]
        (backend.add_special_tokens if special else backend.add_tokens)(added)
    names = ("bos", "eos", "unknown", "padding", "eot")
    ids: dict[str, int] = {name: stored[f"{name}_token_id"] for name in names if f"{name}_token_id" in stored}
    if stored.get("add_bos_token", model == "llama" or stored.get("pre") == "llama-bpe") and "bos" in ids:
        begin = tokens[ids["bos"]]
        backend.post_processor = library.processors.TemplateProcessing(single=[begin, "$A"], special_tokens=[(begin, ids["bos"])])
    template_names = {"bos": "bos_token", "eos": "eos_token", "unknown": "unk_token", "padding": "pad_token"}
    special_tokens = {template_names[name]: tokens[i] for name, i in ids.items() if name in template_names}
    stops = [ids[name] for name in ("eos", "eot") if name in ids]
    template = file.metadata.get("tokenizer.chat_template")
    turns = [backend.token_to_id(token) for token in GEMMA_TURNS]
    if None not in turns:
        stops.append(turns[-1])
        template = template or GEMMA_TEMPLATE
    return Tokenizer(backend, template, tuple(dict.fromkeys(stops)), special_tokens)


def _byte_level(library: Any, stored: Mapping[str, Any], origin: Path) -> Any:
    """Byte-level BPE, with its merges in the file."""
    kind = stored.get("pre", "")
    if kind not in PRE_TOKENIZERS:
        raise ValueError(f"{origin}: tokenizer.ggml.pre is {kind!r}; supported: {', '.join(map(repr, PRE_TOKENIZERS))}")
    _need(stored, ("tokens", "merges"), origin)
    vocabulary = {token: i for i, token in enumerate(stored["tokens"])}
    merges = [tuple(merge.split(" ")) for merge in stored["merges"]]
    backend = library.Tokenizer(library.models.BPE(vocabulary, merges, ignore_merges=kind == "llama-bpe"))
    if kind == "qwen2":
        backend.normalizer = library.normalizers.NFC()
    backend.pre_tokenizer = PRE_TOKENIZERS[kind](library.pre_tokenizers)
    backend.decoder = library.decoders.ByteLevel()
    return backend


def _sentencepiece(library: Any, stored: Mapping[str, Any], origin: Path) -> Any:
    """SentencePiece's BPE: of all neighbours that form a token, the pair with the highest score is merged; what is no token is spelt
    in bytes. A space is a character like any other."""
    _need(stored, ("tokens", "scores", "token_type"), origin)
    if stored.get("add_space_prefix", True):
        raise ValueError(f"{origin}: tokenizer.ggml.add_space_prefix is true or absent; supported: false (as Gemma's files have it)")
    tokens: list[str] = stored["tokens"]
    vocabulary = {token: i for i, token in enumerate(tokens)}
    mergeable = {token: i for token, i in vocabulary.items() if stored["token_type"][i] not in (CONTROL, BYTE)}
    ranked = []
    for token, i in mergeable.items():
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in mergeable and right in mergeable:
                ranked.append((-stored["scores"][i], -cut, left, right))
    ranked.sort()
    merges = [(left, right) for _, _, left, right in ranked]
    unknown = stored.get("unknown_token_id")
    unk_token = None if unknown is None else tokens[unknown]
    backend = library.Tokenizer(library.models.BPE(vocabulary, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=True))
    backend.normalizer = library.normalizers.Replace(" ", SPACE)
    decoders = library.decoders
    backend.decoder = decoders.Sequence([decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()])
    return backend


def _need(stored: Mapping[str, Any], keys: tuple[str, ...], origin: Path) -> None:
    for key in keys:
        if key not in stored:
            raise ValueError(f"{origin} has no tokenizer.ggml.{key}")


MODELS: Mapping[str, tuple[str, Callable[[Any, Mapping[str, Any], Path], Any]]] = {
    "gpt2": ("byte-level BPE", _byte_level),
    "llama": ("SentencePiece BPE", _sentencepiece),
}
"""Kinds of vocabularies by `tokenizer.ggml.model`: what they are called, and how they are built."""


def _gpt2(library: Any) -> Any:
    return library.ByteLevel(add_prefix_space=False, use_regex=True)


def _single_digits(library: Any) -> Any:
    return library.Sequence([library.Digits(individual_digits=True), _gpt2(library)])


def _words(digits: str) -> Callable[[Any], Any]:
    def build(library: Any) -> Any:
        from tokenizers import Regex

        split = library.Split(Regex(WORDS % digits), behavior="isolated")
        return library.Sequence([split, library.ByteLevel(add_prefix_space=False, use_regex=False)])

    return build


PRE_TOKENIZERS: Mapping[str, Callable[[Any], Any]] = {
    "smollm": _single_digits,
    "qwen2": _words(r"\p{N}"),
    "llama-bpe": _words(r"\p{N}{1,3}"),
    "gpt-2": _gpt2,
    "default": _gpt2,
}
"""How text is cut before merging, by `tokenizer.ggml.pre`."""
