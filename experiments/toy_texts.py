"""The source of Python's standard library as text for toy models: training and held-out files, a small vocabulary, windows of tokens.

It is on every machine that runs this project, it is real text (names, indentation and idioms come back), and nothing is downloaded. Its
content depends on the version of Python, so that figures are compared between runs of the same one (`Corpus.fingerprint`).
"""

import dataclasses
import hashlib
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark_jax.data import DOMAINS, TokenSequences, offsets_from_lengths
from dspark_jax.model_files import require
from dspark_jax.typing import Int
from experiments.answers import temperature_class

END_TOKEN, MASK_TOKEN = "<|end|>", "<|mask|>"
END_ID, MASK_ID = 0, 1
"""End of a file, and what stands at the places of a block that are to be drafted; no text holds the second one."""

SMALLEST_VOCABULARY = 258
"""All bytes and the two tokens above."""

HELD_OUT_EVERY = 10
"""Of the files in their shuffled order, every tenth is held out."""


@dataclasses.dataclass(frozen=True, eq=False)
class Corpus:
    """Modules of the standard library.

    Attributes:
      training, held_out: texts of the files.
      fingerprint: of all of them, in their order.
    """

    training: tuple[str, ...]
    held_out: tuple[str, ...]
    fingerprint: str


def read_corpus(num_bytes: int, folder: Path | None = None) -> Corpus:
    """The modules at the top of the standard library, in an order shuffled once and for all, until they have `num_bytes` or end.

    Args:
      folder: where the modules are; None for this Python's own.

    Raises:
      ValueError: there are fewer than `HELD_OUT_EVERY` modules, so that none would be held out.
    """
    folder = Path(sysconfig.get_path("stdlib")) if folder is None else folder
    # What the build of this Python wrote is no text that another machine has.
    paths = [path for path in sorted(folder.glob("*.py")) if not path.name.startswith("_sysconfigdata")]
    texts: list[str] = []
    size, digest = 0, hashlib.sha256()
    for place in np.random.default_rng(0).permutation(len(paths)):
        if size >= num_bytes:
            break
        content = paths[place].read_bytes()
        size += len(content)
        digest.update(content)
        texts.append(content.decode("utf-8", errors="replace"))
    if len(texts) < HELD_OUT_EVERY:
        raise ValueError(
            f"num_bytes is {num_bytes}, and {folder} gives {len(texts)} modules for it; at least {HELD_OUT_EVERY} are needed, "
            "one of which is held out"
        )
    held_out = tuple(texts[HELD_OUT_EVERY - 1 :: HELD_OUT_EVERY])
    training = tuple(text for place, text in enumerate(texts) if place % HELD_OUT_EVERY != HELD_OUT_EVERY - 1)
    return Corpus(training, held_out, digest.hexdigest()[:12])


def train_tokenizer(texts: Sequence[str], vocab_size: int) -> Any:
    """A byte-level byte-pair tokenizer (of the library `tokenizers`) of exactly `vocab_size` tokens, `END_ID` and `MASK_ID` first.

    Raises:
      ValueError: fewer tokens than bytes, or more than the texts give.
    """
    if vocab_size < SMALLEST_VOCABULARY:
        raise ValueError(f"vocab_size is {vocab_size}; allowed are integers of at least {SMALLEST_VOCABULARY}")
    library = require("tokenizers", "models", "the vocabulary of the toy models")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_TOKEN, MASK_TOKEN],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    if tokenizer.get_vocab_size() != vocab_size:
        raise ValueError(f"vocab_size is {vocab_size}; these texts give {tokenizer.get_vocab_size()}")
    return tokenizer


def encode_files(tokenizer: Any, texts: Sequence[str]) -> list[Int[np.ndarray, "tokens"]]:
    """Token ids of every text."""
    return [np.asarray(encoding.ids, np.int32) for encoding in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


def draw_windows(files: Sequence[Int[np.ndarray, "tokens"]], length: int, seed: int) -> Int[np.ndarray, "windows {length}"]:
    """All windows of `length` tokens that lie one behind the other in the files, in a random order."""
    cut = [file[: len(file) // length * length].reshape(-1, length) for file in files]
    windows = np.concatenate(cut)
    return windows[np.random.default_rng(seed).permutation(len(windows))]


def draw_prompts(windows: Int[np.ndarray, "windows length"], count: int, field: str) -> Int[np.ndarray, "{count} length"]:
    """The first `count` windows.

    Raises:
      ValueError: there are fewer; `field` is what the error calls the count.
    """
    if not 1 <= count <= len(windows):
        raise ValueError(f"{field} is {count}; allowed are 1 to {len(windows)}, for there is no more text")
    return windows[:count]


def unseen_windows(
    windows: Int[np.ndarray, "windows length"], prompt_tokens: int, tokenizer: Any, corpus: Corpus
) -> Int[np.ndarray, "unseen length"]:
    """The windows whose first `prompt_tokens` tokens, as text, stand in no training file: licences and idioms recur in many modules."""
    texts = tokenizer.decode_batch(windows[:, :prompt_tokens].tolist())
    unseen = [not any(text in file for file in corpus.training) for text in texts]
    return windows[np.asarray(unseen, bool)]


def as_sequences(
    tokens: Int[np.ndarray, "n S"], prompt_tokens: int, temperature: np.ndarray, heldout: np.ndarray, source: np.ndarray
) -> TokenSequences:
    """Texts of one length, of which all but the prompt is an answer, in the form that training reads.

    Args:
      temperature: of the sampler, per text.
      heldout, source: as in `TokenSequences`, per text.
    """
    count, length = tokens.shape
    return TokenSequences(
        tokens=tokens.reshape(-1).astype(np.uint16),
        offsets=offsets_from_lengths([length] * count),
        answer_start=np.full(count, prompt_tokens, np.int16),
        answer_end=np.full(count, length, np.int16),
        finished=np.zeros(count, np.bool_),
        domain=np.full(count, DOMAINS.index("code"), np.int8),
        temperature=np.asarray([temperature_class(float(each)) for each in temperature], np.int8),
        heldout=heldout.astype(np.int8),
        source=source.astype(np.int32),
    ).checked("texts")
