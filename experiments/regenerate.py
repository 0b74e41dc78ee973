"""Let the target answer the prompts of files itself, turn by turn: `python -m experiments.regenerate --prompts FILE ... --out FOLDER`.

A drafter learns what its target writes, so every assistant turn is written anew and the answers that the target gave are the context
of the next turn. The log has an answer per conversation, turn and temperature, and outlives an interruption; `texts.npz` is made of it
at the end, one sequence per answer, for `experiments.run train --data`.
"""

import dataclasses
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

from rich.console import Console

from dspark_jax.data import DOMAINS, ChatTemplate, chatml_template, complete_chat, gemma4_template, qwen_template, save_token_sequences
from dspark_jax.prompt_files import Conversation, read_conversations
from dspark_jax.tokenizers import Tokenizer, load_tokenizer
from experiments.answers import (
    RECOMMENDED_TEMPERATURE,
    RECOMMENDED_TOP_P,
    Answer,
    AnswerConfig,
    AnswerLog,
    Request,
    Serve,
    fill_answers,
    sequences_from_answers,
)
from experiments.command_line import run_command
from experiments.prompts import split_of
from experiments.result_files import write_json
from experiments.served_answers import serve_with

TEMPLATES: Mapping[str, Callable[[], ChatTemplate]] = {"chatml": chatml_template, "qwen": qwen_template, "gemma4": gemma4_template}


@dataclasses.dataclass(frozen=True)
class Regenerate:
    """Whose answers, to what, and how they are sampled.

    Attributes:
      prompts: JSONL files and folders of them, with `turns` or `messages` in every line.
      target: folder, GGUF file or name of the model that answers.
      out: the run's folder; `texts.npz` in it is what `train --data` takes.
      template: how the target's chat template marks the turns.
      temperatures: every conversation is led once at each of them.
      top_p: share of the probability that is sampled from, at temperatures below 1.
      max_length: tokens of context and answer; a conversation ends before the turn that leaves no room.
      max_new_tokens: of an answer.
      batch_size: requests answered at a time, by the serving engine.
      drafter: name or folder of a drafter for the target, which makes it faster and changes no answer's law; None: none.
      domain: of conversations whose category `domains` does not name.
      domains: categories of the files and the domain that stands for each, as `--domains math maths coding code`.
      heldout_share: share of the conversations that is kept out of training, by a hash of their ids.
    """

    prompts: tuple[Path, ...]
    target: str = "smollm2"
    out: Path = Path("out/regenerated")
    template: Literal["chatml", "qwen", "gemma4"] = "chatml"
    temperatures: tuple[float, ...] = (RECOMMENDED_TEMPERATURE, 0.0, 1.0)
    top_p: float = RECOMMENDED_TOP_P
    max_length: int = 512
    max_new_tokens: int = 480
    batch_size: int = 32
    drafter: str | None = None
    domain: Literal["maths", "code", "chat"] = "chat"
    domains: dict[str, str] = dataclasses.field(default_factory=dict)
    heldout_share: float = 1 / 16
    seed: int = 0

    def __post_init__(self) -> None:
        if self.template not in TEMPLATES:
            raise ValueError(f"template is {self.template!r}; allowed: {', '.join(TEMPLATES)}")
        for name in (self.domain, *self.domains.values()):
            if name not in DOMAINS:
                raise ValueError(f"domain is {name!r}; allowed: {', '.join(DOMAINS)}")
        if not self.temperatures or len(set(self.temperatures)) != len(self.temperatures):
            raise ValueError(f"temperatures is {self.temperatures}; allowed: one or more, each once")

    def domain_of(self, category: str) -> str:
        """The domain that stands for a category of the files; a category that is a domain stands for itself."""
        return self.domains.get(category, category if category in DOMAINS else self.domain)

    @property
    def sampling(self) -> dict[str, object]:
        """What the log depends on besides the prompts, as JSON values; more prompts may come later."""
        names = ("target", "template", "top_p", "max_length", "max_new_tokens", "seed", "heldout_share")
        return {name: getattr(self, name) for name in names}


@dataclasses.dataclass(frozen=True)
class Turns:
    """How a conversation becomes tokens and an answer becomes text again.

    Attributes:
      encode: messages to the ids of the chat up to and including the header of the next answer.
      decode: ids of an answer, without its closing mark, to text.
    """

    encode: Callable[[Sequence[Mapping[str, str]]], Sequence[int]]
    decode: Callable[[Sequence[int]], str]


def chat_turns(tokenizer: Tokenizer, template: ChatTemplate) -> Turns:
    """The turns of a model with a chat template."""

    def encode(messages: Sequence[Mapping[str, str]]) -> list[int]:
        text = tokenizer.apply_chat_template(complete_chat(messages, template))
        # What stands in front of every answer and is not in the loss is given to the model, not asked of it.
        return tokenizer.encode(text if text.endswith(template.excluded_prefix) else text + template.excluded_prefix)

    return Turns(encode, tokenizer.decode)


def turn_id(conversation: Conversation, turn: int) -> str:
    """The id of a request; `fill_answers` adds the temperature."""
    return f"{conversation.id}#{turn}"


def _said(answer: Answer, config: AnswerConfig) -> tuple[int, ...]:
    words = answer.tokens[answer.answer_start :]
    return words[:-1] if words[-1] == config.closing_id else words


def _next_requests(
    led: Mapping[str, list[dict[str, str]]], conversations: Sequence[Conversation], turn: int, turns: Turns, run: Regenerate
) -> list[Request]:
    """Requests for turn `turn` of the conversations that have it and that go on so far; those without room are left out."""
    requests = []
    for number, conversation in enumerate(conversations):
        if conversation.id in led and turn < len(conversation.user_turns):
            prompt = tuple(turns.encode([*led[conversation.id], {"role": "user", "content": conversation.user_turns[turn]}]))
            if len(prompt) < run.max_length:
                # Without held-out texts a share of 0 is asked for, which is no share to a split.
                heldout = run.heldout_share > 0 and split_of(conversation.id, run.seed, run.heldout_share) == "heldout"
                domain = run.domain_of(conversation.category)
                requests.append(Request(turn_id(conversation, turn), prompt, domain, heldout, number))
    return requests


def regenerate(
    log: AnswerLog,
    conversations: Sequence[Conversation],
    turns: Turns,
    serve: Serve,
    config: AnswerConfig,
    run: Regenerate,
    progress: bool = True,
) -> AnswerLog:
    """The log with an answer to every user turn of every conversation, at the temperature of `config`.

    The answers to one turn of all conversations are asked for together, then those to the next. A conversation ends early where an answer
    did not come to its end, or where the next turn leaves no room for one.

    Raises:
      ValueError: the log has an answer to another context than the conversation has now, or what `fill_answers` refuses.
    """
    led: dict[str, list[dict[str, str]]] = {
        conversation.id: [dataclasses.asdict(message) for message in conversation.system] for conversation in conversations
    }
    for turn in range(max(len(conversation.user_turns) for conversation in conversations)):
        requests = _next_requests(led, conversations, turn, turns, run)
        log = fill_answers(log, requests, serve, config, progress)
        answers = {answer.id: answer for answer in log.read()}
        after = {}
        for request in requests:
            answer = answers[f"{request.id}@{config.temperature:g}"]
            if answer.tokens[: answer.answer_start] != request.prompt_ids:
                raise ValueError(
                    f"{log.path} has an answer {answer.id} to other words than the prompts now have; allowed: prompts as they were"
                )
            conversation = conversations[request.source]
            if answer.finished:
                user = {"role": "user", "content": conversation.user_turns[turn]}
                assistant = {"role": "assistant", "content": turns.decode(_said(answer, config))}
                after[conversation.id] = [*led[conversation.id], user, assistant]
        led = after
    return log


def require_same_sampling(run: Regenerate) -> None:
    """Leave in the folder what its answers depend on.

    Raises:
      ValueError: the folder holds answers of another target, template or sampling.
    """
    path = run.out / "config.json"
    if path.exists() and (found := json.loads(path.read_text(encoding="utf-8"))) != run.sampling:
        names = [name for name, value in run.sampling.items() if found.get(name) != value]
        raise ValueError(f"out is {run.out}; its answers were sampled with another {', '.join(names)}: choose another folder or remove it")
    write_json(path, run.sampling)


def stop_ids_of(tokenizer: Tokenizer, template: ChatTemplate) -> tuple[tuple[int, ...], int]:
    """Ids at which an answer ends (a header or a special token would be no part of one), and the one that stands for all of them."""
    closing = tokenizer.encode(template.end_of_turn.strip())[0]
    special = [tokenizer.id_of(token) for token in tokenizer.special_tokens.values()]
    return tuple(sorted({*tokenizer.stop_ids, *special, closing, tokenizer.encode(template.assistant_header)[0]})), closing


def main(run: Regenerate, console: Console) -> None:
    """Answer all turns and write `texts.npz`."""
    conversations = read_conversations(run.prompts)
    run.out.mkdir(parents=True, exist_ok=True)
    require_same_sampling(run)
    template, tokenizer = TEMPLATES[run.template](), load_tokenizer(run.target)
    stop_ids, closing_id = stop_ids_of(tokenizer, template)
    serve = serve_with(run.target, stop_ids, run.max_length, run.top_p, run.batch_size, run.drafter)
    log = AnswerLog.open(run.out / "answers.jsonl")
    asked = sum(len(conversation.user_turns) for conversation in conversations)
    for temperature in run.temperatures:
        console.print(f"{len(conversations)} conversations of {asked} turns at temperature {temperature:g}")
        config = AnswerConfig(temperature, run.max_length, run.max_new_tokens, stop_ids, closing_id, run.seed)
        log = regenerate(log, conversations, chat_turns(tokenizer, template), serve, config, run)
    # Prompts that were taken away since may still have answers in the log.
    present = {conversation.id for conversation in conversations}
    names = {f"@{temperature:g}" for temperature in run.temperatures}
    answers = [
        answer
        for answer in sorted(log.read(), key=lambda each: each.id)
        if answer.id.rpartition("#")[0] in present and "@" + answer.id.rpartition("@")[2] in names
    ]
    save_token_sequences(run.out / "texts.npz", sequences_from_answers(answers))
    without = asked * len(run.temperatures) - len(answers)
    console.print(f"{run.out / 'texts.npz'}: {len(answers)} answers, {without} turns without one (no room, or the answer before was cut)")


if __name__ == "__main__":
    sys.exit(run_command(Regenerate, main))
