"""Talk to a model in the terminal, served by the engine: answers appear as they are written, with what drafting did for them.

    python -m experiments.chat
    python -m experiments.chat --temperature 0.8 --target ../models/qwen3 --drafter out/qwen3_dspark/drafter

/new begins anew, /quit (or Ctrl-D) ends; Ctrl-C cuts an answer short. The first start compiles for about a minute.
"""

import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console
from rich.text import Text

from dspark_jax.decode import DecodeParams
from dspark_jax.engine import Engine, EngineConfig
from dspark_jax.requests import Completion, RequestOptions
from dspark_jax.schedule import FixedLength
from dspark_jax.tokenizers import Tokenizer, load_tokenizer
from dspark_jax.weights import load_drafter, load_target
from experiments.command_line import run_command
from experiments.demo_setup import check_length
from experiments.profile_steps import RELEASED_DRAFTER

CHUNK = 64


@dataclasses.dataclass(frozen=True)
class ChatOptions:
    """Command line.

    Attributes:
      target, drafter: names or folders.
      drafts: drafts that are verified a round.
      temperature, top_p, seed: of the answers; None: another seed for every answer.
      max_new_tokens: of an answer.
      slots: tokens of the whole conversation; its oldest turns are dropped beyond that.
    """

    target: str = "smollm2"
    drafter: str = str(RELEASED_DRAFTER)
    drafts: int = 4
    temperature: float = 0.0
    top_p: float = 1.0
    seed: int | None = None
    max_new_tokens: int = 256
    slots: int = 1024

    def __post_init__(self) -> None:
        if self.drafts < 0:
            raise ValueError(f"drafts is {self.drafts}; allowed are integers of at least 0")
        if not 1 <= self.max_new_tokens < self.slots:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; allowed are integers from 1 to slots - 1 ({self.slots - 1})")


def fitting(tokenizer: Tokenizer, turns: list[dict[str, str]], room: int) -> list[int] | None:
    """Token ids of a conversation, from whose beginning as many question-answer pairs are taken as do not fit; None where nothing fits."""
    for begin in range(0, len(turns), 2):
        ids = tokenizer.encode_chat(turns[begin:])
        if len(ids) <= room:
            return ids
    return None


def converse(engine: Engine, tokenizer: Tokenizer, options: ChatOptions, lines: Iterator[str], console: Console) -> None:
    """Answer every line, until one says /quit or there are no more."""
    turns: list[dict[str, str]] = []
    settings = RequestOptions(options.max_new_tokens, options.temperature, top_p=options.top_p, seed=options.seed)
    for line in lines:
        if line.strip() == "/quit":
            return
        if line.strip() == "/new":
            turns = []
            continue
        if not line.strip():
            continue
        turns.append({"role": "user", "content": line})
        prompt = fitting(tokenizer, turns, options.slots - options.max_new_tokens)
        if prompt is None:
            console.print("that is longer than the conversation may be; --slots makes room", style="yellow")
            turns.pop()
            continue
        handle = engine.submit(prompt, settings)
        try:
            for piece in handle:
                console.print(Text(piece.text), end="")
        except KeyboardInterrupt:
            handle.cancel()
        completion = handle.result()
        console.print()
        console.print(Text(note_of(completion), style="dim"))
        turns.append({"role": "assistant", "content": completion.text or ""})


def note_of(completion: Completion) -> str:
    """What a reader may want to know of an answer."""
    metrics, parts = completion.metrics, [f"{len(completion.ids)} tokens"]
    if metrics.tokens_per_second is not None:
        parts.append(f"{metrics.tokens_per_second:.1f} a second")
    if metrics.accepted_length is not None:
        parts.append(f"{metrics.accepted_length:.2f} a round")
    if metrics.time_to_first_token is not None:
        parts.append(f"first after {metrics.time_to_first_token:.2f} s")
    if completion.reason != "stop_id":
        parts.append(f"ended by {completion.reason.replace('_', ' ')}" + (f": {completion.error}" if completion.error else ""))
    return " · ".join(parts)


def typed_lines(console: Console) -> Iterator[str]:
    """What is typed, until the end of the input."""
    while True:
        try:
            yield console.input("[bold]> [/bold]")
        except (EOFError, KeyboardInterrupt):
            console.print()
            return


def run(options: ChatOptions, console: Console) -> None:
    """Load, compile, talk."""
    target, params = load_target(options.target)
    loaded, tokenizer = load_drafter(options.drafter, target.spec), load_tokenizer(options.target)
    check_length([], options.slots, target)
    block = loaded.drafter.block_size
    drafts = min(options.drafts, block)
    config = EngineConfig(row_ladder=(1,), slot_ladder=(options.slots,), prefill_chunk=min(CHUNK, options.slots), rounds_in_flight=1)
    engine = Engine(
        target,
        loaded.drafter if drafts else None,
        DecodeParams.of(target, params, loaded.params, loaded.draft_ids),
        policy=FixedLength(drafts),
        ladder=lambda rows: tuple(sorted({rows * (drafts + 1), rows * (block + 1)})),
        survival=loaded.survival_model(),
        config=config,
        tokenizer=tokenizer,
        console=console,
    )
    console.print(f"{Path(options.target).name}: ask something; /new begins anew, /quit ends", style="dim")
    converse(engine, tokenizer, options, typed_lines(console), console)


if __name__ == "__main__":
    sys.exit(run_command(ChatOptions, run))
