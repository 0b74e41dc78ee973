"""Answers that the target writes itself, on file as they are made: the text a drafter is trained on.

The same machinery samples the user turns of chat prompts: they are what the target writes behind a user header.
"""

import dataclasses
import json
import os
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dspark_jax.data import DOMAINS, TokenSequences, offsets_from_lengths
from dspark_jax.typing import typed
from experiments.prompts import Prompt

RECOMMENDED_TEMPERATURE = 0.2
RECOMMENDED_TOP_P = 0.9
"""How the makers of SmolLM2's instruct models recommend to sample from them."""


@dataclasses.dataclass(frozen=True)
class Answer:
    """One answered request: `tokens` holds the prompt and, from `answer_start` to its end, the answer.

    Attributes:
      finished: the answer came to its end; False where it was cut.
      temperature: it was sampled at.
      source: number of the prompt in its origin; -1 where it has none.
    """

    id: str
    tokens: tuple[int, ...]
    answer_start: int
    finished: bool
    domain: str
    temperature: float
    heldout: bool
    source: int

    def __post_init__(self):
        if not 0 <= self.answer_start < len(self.tokens):
            raise ValueError(f"answer_start of {self.id} is {self.answer_start}; allowed: 0 to {len(self.tokens) - 1}, its last token")
        if self.domain not in DOMAINS:
            raise ValueError(f"domain of {self.id} is {self.domain!r}; allowed: {', '.join(DOMAINS)}")
        temperature_class(self.temperature)


@typed
def temperature_class(temperature: float) -> int:
    """The class that `TokenSequences` stores: 0 greedy, 1 low (up to 0.5), 2 higher."""
    if not temperature >= 0:
        raise ValueError(f"temperature is {temperature}; allowed: at least 0")
    return 0 if temperature == 0 else 1 if temperature <= 0.5 else 2


@typed
def sequences_from_answers(answers: Sequence[Answer]) -> TokenSequences:
    """Answers in the form that training reads, in their order.

    Raises:
      ValueError: there is none, an id occurs twice, or a token is outside 0..2^32 - 1.
    """
    if not answers:
        raise ValueError("answers is empty; allowed: at least one answer")
    ids = [answer.id for answer in answers]
    if repeated := len(ids) - len(set(ids)):
        raise ValueError(f"answers repeat {repeated} of their ids; allowed: each id once")
    lengths = [len(answer.tokens) for answer in answers]
    tokens = np.concatenate([np.asarray(answer.tokens, np.int64) for answer in answers])
    if tokens.min() < 0 or tokens.max() > np.iinfo(np.uint32).max:
        raise ValueError(f"tokens run from {tokens.min()} to {tokens.max()}; allowed: 0 to {np.iinfo(np.uint32).max}")
    position_dtype = np.int16 if max(lengths) <= np.iinfo(np.int16).max else np.int32
    return TokenSequences(
        tokens=tokens.astype(np.uint16 if tokens.max() <= np.iinfo(np.uint16).max else np.uint32),
        offsets=offsets_from_lengths(lengths),
        answer_start=np.asarray([answer.answer_start for answer in answers], position_dtype),
        answer_end=np.asarray(lengths, position_dtype),
        finished=np.asarray([answer.finished for answer in answers], np.bool_),
        domain=np.asarray([DOMAINS.index(answer.domain) for answer in answers], np.int8),
        temperature=np.asarray([temperature_class(answer.temperature) for answer in answers], np.int8),
        heldout=np.asarray([answer.heldout for answer in answers], np.int8),
        source=np.asarray([answer.source for answer in answers], np.int32),
    )


def _parse(path: Path, number: int, line: bytes) -> Answer:
    names = [field.name for field in dataclasses.fields(Answer)]
    try:
        fields = json.loads(line)
        if sorted(fields) != sorted(names):
            raise ValueError(f"its fields are {sorted(fields)}")
        return Answer(**{**fields, "tokens": tuple(fields["tokens"])})
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}, line {number} is no answer ({error}); allowed: an object with {', '.join(names)}") from error


@dataclasses.dataclass(frozen=True)
class AnswerLog:
    """A JSONL file of answers that grows while they are generated and outlives an interruption at any byte.

    A line counts once its newline is written; what an interrupted write left behind the last newline is cut off at opening.
    One process at a time may write.

    Attributes:
      finished: ids that the file holds.
    """

    path: Path
    finished: frozenset[str]

    @classmethod
    def open(cls, path: str | Path) -> "AnswerLog":
        """The log at `path`, which need not exist yet.

        Raises:
          ValueError: a whole line is no answer, or an id occurs twice.
        """
        log = cls(Path(path), frozenset())
        ids = [answer.id for answer in log.read()]
        if repeated := len(ids) - len(set(ids)):
            raise ValueError(f"{path} repeats {repeated} of its ids; allowed: each id once")
        if log.path.exists():
            os.truncate(log.path, log.path.read_bytes().rfind(b"\n") + 1)
        return cls(log.path, frozenset(ids))

    def read(self) -> list[Answer]:
        """All finished answers, in the order in which they were appended."""
        if not self.path.exists():
            return []
        lines = self.path.read_bytes().split(b"\n")[:-1]
        return [_parse(self.path, number, line) for number, line in enumerate(lines, start=1)]

    def append(self, answers: Iterable[Answer]) -> "AnswerLog":
        """The log with `answers` behind its last; they are on disk when this returns.

        Raises:
          ValueError: an id is in the log already, or occurs twice.
        """
        answers = list(answers)
        finished = set(self.finished)
        for answer in answers:
            if answer.id in finished:
                raise ValueError(f"id is {answer.id!r}, which {self.path} holds already; allowed: each id once")
            finished.add(answer.id)
        with open(self.path, "ab") as file:
            file.write(b"".join(json.dumps(dataclasses.asdict(answer)).encode() + b"\n" for answer in answers))
            file.flush()
            os.fsync(file.fileno())
        return AnswerLog(self.path, frozenset(finished))


@dataclasses.dataclass(frozen=True)
class Ask:
    """A continuation to be sampled.

    Attributes:
      prompt_ids: the text so far.
      max_new_tokens: of the continuation.
      seed: of its random bits: the same ask has the same answer, whatever else is asked.
    """

    prompt_ids: tuple[int, ...]
    temperature: float
    max_new_tokens: int
    seed: int


@runtime_checkable
class Serve(Protocol):
    """Samples a continuation of every ask, and gives them as they end: the number of the ask, and its new tokens alone, a closing stop
    token included where there was one."""

    def __call__(self, asks: Sequence[Ask]) -> Iterable[tuple[int, list[int]]]: ...


@dataclasses.dataclass(frozen=True)
class AnswerConfig:
    """How answers are sampled. The nucleus (`RECOMMENDED_TOP_P`) belongs to whoever serves.

    Attributes:
      max_length: tokens of prompt and answer together; what is longer is cut there.
      max_new_tokens: of an answer.
      stop_ids: the first of these ends an answer. SmolLM2: end of text, header, end of turn; a header in an answer would open another turn.
      closing_id: stands for whichever of `stop_ids` was sampled, so that all answers close as the chat template does.
      seed: of all answers.
    """

    temperature: float = RECOMMENDED_TEMPERATURE
    max_length: int = 512
    max_new_tokens: int = 480
    stop_ids: tuple[int, ...] = (0, 1, 2)
    closing_id: int = 2
    seed: int = 0

    def __post_init__(self):
        for field, lowest in (("temperature", 0), ("max_length", 2), ("max_new_tokens", 1), ("seed", 0)):
            if not getattr(self, field) >= lowest:
                raise ValueError(f"{field} is {getattr(self, field)}; allowed: at least {lowest}")


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt in tokens, and what its answer's record says of it."""

    id: str
    prompt_ids: tuple[int, ...]
    domain: str
    heldout: bool
    source: int


@typed
def answer_requests(
    prompts: Sequence[Prompt], encode: Callable[[str], Sequence[int]], max_prompt_tokens: int = 224, samples: int = 1
) -> list[Request]:
    """Requests for prompts of at most `max_prompt_tokens` tokens, each `samples` times; longer prompts are dropped.

    Args:
      encode: what the user says to the ids of the chat up to and including the header of the answer.
    """
    if samples < 1:
        raise ValueError(f"samples is {samples}; allowed: at least 1")
    requests = []
    for number, prompt in enumerate(prompts):
        ids = tuple(encode(prompt.text))
        if len(ids) <= max_prompt_tokens:
            source = -1 if prompt.domain == "chat" else number
            requests += [
                Request(f"{prompt.key}/{sample}", ids, prompt.domain, prompt.split == "heldout", source) for sample in range(samples)
            ]
    return requests


@typed
def turn_requests(header_ids: Sequence[int], count: int) -> list[Request]:
    """`count` requests for user turns: every one the text of `experiments.prompts.user_header`."""
    return [Request(f"turn-{number}", tuple(header_ids), "chat", False, -1) for number in range(count)]


@typed
def sampled_turns(answers: Sequence[Answer]) -> list[list[int]]:
    """What the target wrote, without the prompts, in the order of the requests' numbers: input of `chat_prompts`."""
    ordered = sorted(answers, key=lambda answer: int(answer.id.partition("@")[0].rpartition("-")[2]))
    return [list(answer.tokens[answer.answer_start :]) for answer in ordered]


def _answer(name: str, request: Request, sampled: Sequence[int], config: AnswerConfig) -> Answer:
    stop = next((place for place, token in enumerate(sampled) if token in config.stop_ids), None)
    words = list(sampled) if stop is None else [*sampled[:stop], config.closing_id]
    tokens = (*request.prompt_ids, *words)
    return Answer(
        id=name,
        tokens=tokens[: config.max_length],
        answer_start=len(request.prompt_ids),
        finished=stop is not None and len(tokens) <= config.max_length,
        domain=request.domain,
        temperature=config.temperature,
        heldout=request.heldout,
        source=request.source,
    )


APPENDED_TOGETHER = 16
"""Answers that are written to a log at a time: what a run that is killed loses at the most. One that is interrupted loses none."""


def _seed(config: AnswerConfig, name: str) -> int:
    return int(np.random.SeedSequence((config.seed, *name.encode())).generate_state(1)[0]) % 2**31


@typed
def fill_answers(log: AnswerLog, requests: Sequence[Request], serve: Serve, config: AnswerConfig, progress: bool = True) -> AnswerLog:
    """The log with an answer to every request; those it holds already are not sampled again.

    The seed of an answer comes from its name alone, so that stopping and resuming changes no token. Answers are appended as they end, and
    named request@temperature: one log can hold several temperatures.

    Args:
      serve: gets what is missing.
      progress: show a bar.

    Raises:
      ValueError: a prompt leaves no room for an answer, ids of requests repeat, or `serve` gives an empty answer, none, or one twice.
    """
    for request in requests:
        if not 0 < len(request.prompt_ids) < config.max_length:
            raise ValueError(f"length of prompt {request.id} is {len(request.prompt_ids)}; allowed: 1 to {config.max_length - 1}")
    names = [f"{request.id}@{config.temperature:g}" for request in requests]
    if len(set(names)) != len(names):
        raise ValueError("ids of requests repeat; allowed: each id once")
    missing = [(name, request) for name, request in zip(names, requests, strict=True) if name not in log.finished]
    if not missing:
        return log
    asks = [
        Ask(
            request.prompt_ids,
            config.temperature,
            min(config.max_new_tokens, config.max_length - len(request.prompt_ids)),
            _seed(config, name),
        )
        for name, request in missing
    ]
    ended: set[int] = set()
    fresh: list[Answer] = []
    columns = (TextColumn("answers"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    with Progress(*columns, disable=not progress) as bar:
        task = bar.add_task("answers", total=len(names), completed=len(names) - len(missing))
        try:
            for number, sampled in serve(asks):
                if number in ended or not sampled:
                    raise ValueError(f"serve gave {len(sampled)} tokens for request {missing[number][1].id}; allowed: at least 1, and once")
                ended.add(number)
                fresh.append(_answer(*missing[number], sampled, config))
                bar.advance(task)
                if len(fresh) == APPENDED_TOGETHER:
                    log, fresh = log.append(fresh), []
        finally:
            log = log.append(fresh)
    if len(ended) != len(missing):
        raise ValueError(f"serve gave {len(ended)} answers; allowed: one for each of {len(missing)} requests")
    return log
