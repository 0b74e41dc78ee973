"""A small Qwen3-shaped target, trained from nothing on the standard library's source, and what it writes itself.

Both are made once per configuration and kept: `<folder>/<identity>/` is a Hugging Face folder (`load_target` reads it) with the
tokenizer and two files of texts beside the weights, `on_policy.npz` (prompts of training files, answered by the target, one half
greedily and one half at temperature 1, and held-out prompts answered at both) and `off_policy.npz` (the same windows as they stand in
the files).
"""

import dataclasses
import functools
import hashlib
import json
import shutil
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from safetensors.numpy import save_file

from dspark_jax.data import TokenSequences, load_token_sequences, save_token_sequences
from dspark_jax.decode import DecodeParams, DecodePlan, generate
from dspark_jax.model_files import read_json
from dspark_jax.prefill import start
from dspark_jax.protocols import FlatTokens
from dspark_jax.sampling import Sampling
from dspark_jax.targets.dense import DenseConfig, DenseTarget
from dspark_jax.tensor_files import SINGLE_FILE, checkpoint_tensors
from dspark_jax.train import OptimizerConfig, make_optimizer
from dspark_jax.typing import Array, Int, Params
from dspark_jax.weights import load_target
from experiments.toy_texts import (
    END_ID,
    Corpus,
    as_sequences,
    draw_prompts,
    draw_windows,
    encode_files,
    read_corpus,
    train_tokenizer,
    unseen_windows,
)

ARCHITECTURE = "Qwen3ForCausalLM"
REPORT_FILE = "toy.json"
ON_POLICY, OFF_POLICY = "on_policy.npz", "off_policy.npz"

ANSWERS_AT_ONCE = 128
"""Prompts that the target answers in one batch."""

TEMPERATURES = (0.0, 1.0)
"""At which the target answers."""


@dataclasses.dataclass(frozen=True)
class ToyTargetConfig:
    """Everything that a toy target and its texts are made from.

    Attributes:
      text_bytes: of the standard library, held-out files included.
      steps, batch_size, window: training: optimizer steps (Muon) on so many windows of so many tokens.
      prompt_tokens, answer_tokens: of the texts that the target writes.
      training_texts: texts to train drafters on; held_out_prompts: prompts from held-out files.
      seed: of the parameters, the windows and the answers.
    """

    vocab_size: int = 1024
    hidden_size: int = 128
    intermediate_size: int = 384
    num_layers: int = 4
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    text_bytes: int = 3_000_000
    steps: int = 300
    batch_size: int = 8
    window: int = 128
    learning_rate: float = 8e-3
    prompt_tokens: int = 16
    answer_tokens: int = 48
    training_texts: int = 1536
    held_out_prompts: int = 64
    seed: int = 0

    def __post_init__(self) -> None:
        for name, lowest in (
            ("num_layers", 2),
            ("text_bytes", 1),
            ("steps", 1),
            ("batch_size", 1),
            ("window", 2),
            ("prompt_tokens", 1),
            ("answer_tokens", 2),
            ("training_texts", 1),
            ("held_out_prompts", 1),
            ("seed", 0),
        ):
            if getattr(self, name) < lowest:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are integers of at least {lowest}")
        if self.training_texts % len(TEMPERATURES):
            raise ValueError(f"training_texts is {self.training_texts}; allowed are even numbers, for one half is written at temperature 0")

    @property
    def text_tokens(self) -> int:
        """Tokens of a text, prompt and answer."""
        return self.prompt_tokens + self.answer_tokens

    @property
    def network(self) -> DenseTarget:
        """The target, without parameters."""
        return DenseTarget(
            DenseConfig(
                vocab_size=self.vocab_size,
                hidden_size=self.hidden_size,
                intermediate_size=self.intermediate_size,
                num_layers=self.num_layers,
                num_heads=self.num_heads,
                num_kv_heads=self.num_kv_heads,
                head_dim=self.head_dim,
                qk_norm=True,
                tie_word_embeddings=True,
                max_position_embeddings=max(self.window, self.text_tokens),
                architecture=ARCHITECTURE,
            )
        )

    def identity(self, corpus: Corpus) -> str:
        """Twelve hexadecimal digits that no other configuration and no other text has."""
        content = json.dumps([dataclasses.asdict(self), corpus.fingerprint], sort_keys=True)
        return hashlib.sha256(content.encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True, eq=False)
class PreparedTarget:
    """A trained toy target and its texts.

    Attributes:
      identity: of its configuration and of the text it was trained on.
      on_policy, off_policy: texts, held-out ones among them; see the head of this file.
      report: how it was made: losses and seconds.
    """

    config: ToyTargetConfig
    identity: str
    target: DenseTarget
    params: Params
    on_policy: TokenSequences
    off_policy: TokenSequences
    report: Mapping[str, Any]

    def held_out_prompts(self) -> list[list[int]]:
        """Prompts from files that neither the target nor a drafter was trained on, each once."""
        texts = self.on_policy.select((self.on_policy.heldout == 1) & (self.on_policy.temperature == 0))
        length = self.config.prompt_tokens
        return [texts.tokens[begin : begin + length].tolist() for begin in texts.offsets[:-1]]


def prepare_target(config: ToyTargetConfig, folder: Path, console: Console | None = None) -> PreparedTarget:
    """The target from `folder`, where it was made before, or else made now (about a minute on 2 cores).

    Raises:
      ValueError: the standard library has too little text for the configuration.
    """
    console = console or Console(quiet=True)
    corpus = read_corpus(config.text_bytes)
    identity = config.identity(corpus)
    place = folder / identity
    if not (place / REPORT_FILE).is_file():
        _make(config, corpus, identity, place, console)
    target, params = load_target(place)
    on_policy, off_policy = (load_token_sequences(place / name, config.vocab_size) for name in (ON_POLICY, OFF_POLICY))
    return PreparedTarget(config, identity, target, params, on_policy, off_policy, read_json(place, REPORT_FILE))


def _make(config: ToyTargetConfig, corpus: Corpus, identity: str, place: Path, console: Console) -> None:
    began = time.perf_counter()
    tokenizer = train_tokenizer(corpus.training, config.vocab_size)
    files, held_out = (encode_files(tokenizer, texts) for texts in (corpus.training, corpus.held_out))
    windows = draw_prompts(draw_windows(files, config.text_tokens, config.seed), config.training_texts, "training_texts")
    unseen = unseen_windows(draw_windows(held_out, config.text_tokens, config.seed), config.prompt_tokens, tokenizer, corpus)
    unseen = draw_prompts(unseen, config.held_out_prompts, "held_out_prompts")
    seconds_text = time.perf_counter() - began
    console.print(
        f"text: {sum(map(len, files)):,} tokens of {len(corpus.training)} modules, {len(corpus.held_out)} held out ({seconds_text:.0f} s)",
        highlight=False,
    )
    target = config.network
    began = time.perf_counter()
    params, losses = train_target(config, target, files)
    seconds_training = time.perf_counter() - began
    held_out_loss = mean_loss(target, params, unseen)
    console.print(
        f"target: {sum(leaf.size for leaf in jax.tree.leaves(params)):,} parameters, {config.steps} steps, loss {losses[0]:.2f} to "
        f"{np.mean(losses[-10:]):.2f}, {held_out_loss:.2f} on held-out files ({seconds_training:.0f} s)",
        highlight=False,
    )
    began = time.perf_counter()
    # Training prompts take the temperatures in turns; a held-out prompt is answered at each of them.
    rows = np.concatenate([windows, *[unseen] * len(TEMPERATURES)])
    temperature = np.concatenate([np.resize(TEMPERATURES, len(windows)), np.repeat(TEMPERATURES, len(unseen))])
    heldout = np.arange(len(rows)) >= len(windows)
    source = np.concatenate([np.arange(len(windows)), *[len(windows) + np.arange(len(unseen))] * len(TEMPERATURES)])
    answered = answer(target, params, rows[:, : config.prompt_tokens], temperature, config.answer_tokens, config.seed)
    seconds_texts = time.perf_counter() - began
    console.print(f"texts: {len(rows):,} answers of {config.answer_tokens} tokens ({seconds_texts:.0f} s)", highlight=False)

    partial = place.with_name(f".{identity}.partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    tensors = {f"model.{name}": np.ascontiguousarray(tensor) for name, tensor in checkpoint_tensors(params, np.float32).items()}
    save_file(tensors, partial / SINGLE_FILE, {"format": "pt"})
    (partial / "config.json").write_text(json.dumps(hugging_face_config(target.config), indent=2) + "\n", encoding="utf-8")
    tokenizer.save(str(partial / "tokenizer.json"))
    marks = (config.prompt_tokens, temperature, heldout, source)
    save_token_sequences(partial / ON_POLICY, as_sequences(answered, *marks))
    save_token_sequences(partial / OFF_POLICY, as_sequences(rows, *marks))
    report = {
        "config": dataclasses.asdict(config),
        "text": corpus.fingerprint,
        "training_tokens": config.steps * config.batch_size * config.window,
        "first_loss": losses[0],
        "last_loss": float(np.mean(losses[-10:])),
        "held_out_loss": held_out_loss,
        "seconds": {"text": seconds_text, "training": seconds_training, "texts": seconds_texts},
    }
    (partial / REPORT_FILE).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(place, ignore_errors=True)
    partial.rename(place)


def hugging_face_config(config: DenseConfig) -> dict[str, Any]:
    """The `config.json` of a Qwen3-shaped target."""
    return {
        "architectures": [config.architecture],
        "hidden_act": "silu",
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "tie_word_embeddings": config.tie_word_embeddings,
        "max_position_embeddings": config.max_position_embeddings,
        "eos_token_id": END_ID,
    }


def next_token_loss(target: DenseTarget, params: Params, ids: Int[Array, "B S"]) -> Array:
    """Mean cross-entropy, in nats, of every token but the first of a row."""
    num_rows, length = ids.shape
    start_at = jnp.zeros(num_rows, jnp.int32)
    tokens = FlatTokens.grid(ids[:, :-1], start_at, start_at + length - 1)
    hidden, _, _ = target.forward(params, None, tokens, ())
    return optax.softmax_cross_entropy_with_integer_labels(target.head(params).logits(hidden), ids[:, 1:].reshape(-1)).mean()


def mean_loss(target: DenseTarget, params: Params, rows: Int[np.ndarray, "n S"]) -> float:
    """`next_token_loss` over all rows."""
    return float(jax.jit(next_token_loss, static_argnums=0)(target, params, jnp.asarray(rows)))


@functools.partial(jax.jit, static_argnums=(0, 1), donate_argnums=(2, 3))
def _step(target: DenseTarget, config: OptimizerConfig, params: Params, moments: Any, ids: Int[Array, "B S"]) -> tuple:
    loss, gradients = jax.value_and_grad(next_token_loss, argnums=1)(target, params, ids)
    updates, moments = make_optimizer(config).update(gradients, moments, params)
    moved: Any = optax.apply_updates(params, updates)  # pyright: ignore[reportArgumentType]
    return moved, moments, loss


def train_target(config: ToyTargetConfig, target: DenseTarget, files: Sequence[Int[np.ndarray, "tokens"]]) -> tuple[Params, list[float]]:
    """Parameters after `config.steps` steps on random windows of the files, and the loss of every step."""
    stream = np.concatenate([np.concatenate([file, np.asarray([END_ID], np.int32)]) for file in files])
    if len(stream) <= config.window:
        raise ValueError(f"window is {config.window}; allowed are fewer tokens than the {len(stream)} of the training files")
    # In 150 such steps Muon came from 6.9 to 4.2 and AdamW, at the same rate, to 5.7.
    optimizer = OptimizerConfig(config.steps, config.learning_rate, warmup_ratio=0.05, beta2=0.98, weight_decay=0.1, algorithm="muon")
    params = jax.jit(target.init)(jax.random.key(config.seed))
    moments = make_optimizer(optimizer).init(params)
    rng = np.random.default_rng((config.seed, 1))
    losses = []
    for _ in range(config.steps):
        begins = rng.integers(len(stream) - config.window, size=(config.batch_size, 1))
        ids = jnp.asarray(stream[begins + np.arange(config.window)])
        params, moments, loss = _step(target, optimizer, params, moments, ids)
        losses.append(loss)
    numbers = [float(loss) for loss in losses]
    if not np.isfinite(numbers).all():
        raise FloatingPointError(f"the loss of the toy target is no longer a number; learning_rate is {config.learning_rate}")
    return params, numbers


def answer(
    target: DenseTarget,
    params: Params,
    prompts: Int[np.ndarray, "n L"],
    temperature: np.ndarray,
    new_tokens: int,
    seed: int,
) -> Int[np.ndarray, "n S"]:
    """Prompts and the `new_tokens` tokens that the target writes behind each, decoded plainly in batches of one size.

    Args:
      temperature: per prompt.
    """
    plan, parameters = DecodePlan(target), DecodeParams.of(target, params)
    count, length = prompts.shape
    batch = min(ANSWERS_AT_ONCE, count)
    texts = []
    for first in range(0, count, batch):
        # The last batch is filled up with prompts from the beginning.
        rows = np.arange(first, first + batch) % count
        state = start(
            plan,
            parameters,
            prompts[rows].tolist(),
            max_new_tokens=new_tokens,
            sampling=Sampling.make(batch, temperature[rows].tolist()),
            seed=seed,
            request_ids=rows.tolist(),
            prefill_chunk=length,
        )
        state, _ = generate(plan, parameters, state)
        texts.append(np.asarray(state.ids))
    return np.concatenate(texts)[:count]
