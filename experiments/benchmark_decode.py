"""One cell of the benchmark: a drafter decodes the prompts of a set at a temperature, in batches, over a mesh where one is given."""

import dataclasses
import functools
import hashlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from dspark_jax.calibrate import ConstantSurvival
from dspark_jax.calibration_identity import drafter_fingerprint
from dspark_jax.decode import DecodeParams, DecodePlan, DecodeState, answers, decode_round
from dspark_jax.prefill import start
from dspark_jax.protocols import Target
from dspark_jax.round_stats import Tally
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FixedLength
from dspark_jax.sharding import batch_sharding, make_mesh, replicated
from dspark_jax.tokenizers import Tokenizer
from dspark_jax.typing import Params
from dspark_jax.weights import LoadedDrafter
from experiments.benchmark_sets import ChosenSet, Encode, messages_of

MOST_TURNS, MOST_SAMPLES = 16, 64
"""Of a conversation; request ids are made of the line, the turn and the sample."""

LARGEST_ID = 2**31 - 1


@dataclasses.dataclass(frozen=True)
class DecodeSettings:
    """How prompts are answered.

    Attributes:
      max_new_tokens: of an answer.
      max_prompt: tokens of the longest prompt; conversations that begin with a longer one are dropped, and so is a later turn that grows
        beyond it.
      draft_length: drafts that are verified in every round; None: the whole block of each drafter.
      turns: answer all turns of a conversation, each behind the target's own answers to the earlier ones, or the first alone.
      samples: answers to every prompt, each with random numbers of its own; at temperature 0 there is one.
      batch_size: answers that are decoded together.
      seed: of the random numbers.
    """

    max_new_tokens: int = 256
    max_prompt: int = 512
    draft_length: int | None = None
    turns: str = "all"
    samples: int = 1
    batch_size: int = 16
    seed: int = 0

    def __post_init__(self) -> None:
        for name, least in (("max_new_tokens", 2), ("max_prompt", 1), ("batch_size", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")
        if self.draft_length is not None and self.draft_length < 1:
            raise ValueError(f"draft_length is {self.draft_length}; allowed are positive integers, or None for whole blocks")
        if self.turns not in ("all", "first"):
            raise ValueError(f"turns is {self.turns!r}; allowed: all, first")
        if not 1 <= self.samples <= MOST_SAMPLES:
            raise ValueError(f"samples is {self.samples}; allowed are 1 to {MOST_SAMPLES}")

    @property
    def max_len(self) -> int:
        """Positions of the caches."""
        return self.max_prompt + self.max_new_tokens


def labelled(drafters: Sequence[str]) -> dict[str, str]:
    """Folders or names of drafters by the labels that they have in tables: "LABEL=FOLDER", or the last part of the path.

    Raises:
      ValueError: there is none, two have the same label, or a label has a slash (pairs are written with one).
    """
    found = {}
    for name in drafters:
        label, given, folder = name.partition("=")
        found[label if given else Path(name).name] = folder if given else name
    if not found or len(found) < len(drafters) or any("/" in label or not label for label in found):
        raise ValueError(f"drafters is {tuple(drafters)}; allowed: at least one, each with a label of its own that has no slash")
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Contender:
    """A drafter that takes part, by the name that it has in the tables."""

    label: str
    loaded: LoadedDrafter
    params: DecodeParams

    @classmethod
    def of(cls, label: str, loaded: LoadedDrafter, target: Target, target_params: Params) -> "Contender":
        """Collect its parameters with the target's."""
        return cls(label, loaded, DecodeParams.of(target, target_params, loaded.params, loaded.draft_ids))

    @functools.cached_property
    def fingerprint(self) -> str:
        """The same for the same drafter, wherever it lies."""
        return drafter_fingerprint(self.loaded.drafter, self.loaded.params, self.loaded.draft_ids)

    def length(self, asked: int | None) -> int:
        """Drafts of a round: `asked`, or the whole block where it is shorter."""
        block = self.loaded.drafter.block_size
        return block if asked is None else min(asked, block)

    def plan(self, target: Target, asked: int | None, rows: int) -> DecodePlan:
        """Rounds of `length(asked)` drafts for so many requests; fixed lengths read no survival."""
        drafter, length = self.loaded.drafter, self.length(asked)
        ladder = (rows * (length + 1),) if length == drafter.block_size else (rows * (length + 1), rows * (drafter.block_size + 1))
        return DecodePlan(target, drafter, FixedLength(length), ConstantSurvival((1.0,) * drafter.block_size), ladder)


@dataclasses.dataclass(frozen=True)
class PromptRecord:
    """What was measured on one conversation, over its turns and samples.

    Attributes:
      rounds, emitted: whole rounds of the full draft length, and their tokens.
      cut_rounds, cut_emitted: rounds that a stop token cut short, or that the budget left fewer drafts than the others.
      reached, accepted: by position, see `Tally`.
      tokens: of the answers.
      broken_off: answers without a next turn because its prompt had grown too long.
      answer: hash of the answers' tokens.
    """

    id: str
    rounds: int = 0
    emitted: int = 0
    cut_rounds: int = 0
    cut_emitted: int = 0
    reached: tuple[int, ...] = ()
    accepted: tuple[int, ...] = ()
    tokens: int = 0
    broken_off: int = 0
    answer: str = ""

    def with_answer(self, tally: Tally, row: int, tokens: Sequence[int]) -> "PromptRecord":
        """With the sums of one more answer, row `row` of a batch."""
        sums = {name: getattr(self, name) + int(getattr(tally, name)[row]) for name in ("rounds", "emitted", "cut_rounds", "cut_emitted")}
        for name in ("reached", "accepted"):
            new = np.asarray(getattr(tally, name)[row]).tolist()
            sums[name] = tuple(a + b for a, b in zip(getattr(self, name) or [0] * len(new), new, strict=True))
        digest = hashlib.sha256(f"{self.answer} {list(tokens)}".encode()).hexdigest()[:12]
        return dataclasses.replace(self, **sums, tokens=self.tokens + len(tokens), answer=digest)


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def full_rounds(plan: DecodePlan, params: DecodeParams, state: DecodeState, draft_length: int) -> tuple[DecodeState, Tally]:
    """Rounds until every request is finished; those that the budget leaves fewer than `draft_length` drafts count as cut.

    Whether it does was settled before the round, so that leaving them out favours nobody.
    """

    def body(carry: tuple[DecodeState, Tally]) -> tuple[DecodeState, Tally]:
        state, tally = carry
        state, stats = decode_round(plan, params, state)
        short = stats.active & (stats.verified < draft_length)
        return state, tally.add(dataclasses.replace(stats, cut=stats.cut | short))

    tally = Tally.zeros(state.length.shape[0], plan.block_size)
    return jax.lax.while_loop(lambda carry: ~carry[0].finished.all(), body, (state, tally))


def encoder(tokenizer: Tokenizer) -> Encode:
    """Messages to ids by the chat template, or one user turn as it stands where the model has none."""

    def encode(messages: Any) -> list[int]:
        if tokenizer.chat_template is not None:
            return tokenizer.encode_chat(messages)
        if len(messages) > 1:
            raise ValueError(
                f"turns is 'all', and a conversation has {len(messages)} messages; a target without chat template takes the first"
            )
        return tokenizer.encode(messages[0]["content"], add_special=True)

    return encode


def mesh_of(sizes: tuple[int, int, int] | None, batch_size: int) -> Mesh | None:
    """The first devices as data x fsdp x tensor; None without sizes.

    Raises:
      ValueError: there are not as many devices, or the rows of a batch cannot be split evenly over data x fsdp.
    """
    if sizes is None:
        return None
    data, fsdp, tensor = sizes
    mesh = make_mesh(data, fsdp, tensor, jax.devices()[: data * fsdp * tensor])
    if batch_size % (data * fsdp):
        raise ValueError(f"batch_size is {batch_size}; allowed are multiples of data x fsdp = {data * fsdp} of the mesh")
    return mesh


def over_rows(state: DecodeState, mesh: Mesh) -> DecodeState:
    """The state with its requests split over the data and fsdp axes."""
    rows = dataclasses.replace(state, seed=None)
    placed = jax.device_put(rows, jax.tree.map(lambda _: batch_sharding(mesh), rows))
    return dataclasses.replace(placed, seed=jax.device_put(state.seed, replicated(mesh)))


@dataclasses.dataclass(frozen=True)
class _Request:
    """One answer to be written: to conversation number `place`, behind the answers so far."""

    place: int
    sample: int
    prompt: tuple[int, ...]
    so_far: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True, eq=False)
class BenchmarkCell:
    """A drafter on a set at a temperature.

    Attributes:
      mesh: the rounds of a batch are split over its data and fsdp axes; the prefill runs alike along both.
    """

    target: Target
    tokenizer: Tokenizer
    contender: Contender
    chosen: ChosenSet
    temperature: float
    settings: DecodeSettings
    mesh: Mesh | None = None

    @property
    def samples(self) -> int:
        """Answers to every prompt."""
        return self.settings.samples if self.temperature else 1

    @property
    def turns(self) -> int:
        """Of the longest conversation, as far as they are answered."""
        longest = max(len(conversation.user_turns) for conversation in self.chosen.conversations)
        return longest if self.settings.turns == "all" else 1

    def decode(self, advance: Callable[[], None] = lambda: None) -> list[PromptRecord]:
        """Answer every conversation; a record of each, in their order.

        Args:
          advance: is called behind every batch.

        Raises:
          ValueError: a conversation has more turns than request ids can tell apart.
        """
        if self.turns > MOST_TURNS:
            raise ValueError(f"turns is 'all', and {self.chosen.name} has a conversation of {self.turns}; allowed are {MOST_TURNS}")
        length = self.contender.length(self.settings.draft_length)
        plan = self.contender.plan(self.target, self.settings.draft_length, self.settings.batch_size)
        records = [PromptRecord(conversation.id) for conversation in self.chosen.conversations]
        prompts = enumerate(self.chosen.prompts)
        requests = [_Request(place, sample, tuple(prompt)) for place, prompt in prompts for sample in range(self.samples)]
        for turn in range(self.turns):
            answered = []
            for batch in _batches(requests, self.settings.batch_size):
                state, tally = jax.block_until_ready(full_rounds(plan, self.contender.params, self._begin(plan, batch, turn), length))
                sums = jax.device_get(tally)
                for row, (request, answer) in enumerate(zip(batch, answers(state)[: len(batch)], strict=True)):
                    records[request.place] = records[request.place].with_answer(sums, row, answer)
                    said = self.tokenizer.decode(answer, skip_special=True)
                    answered.append(dataclasses.replace(request, so_far=(*request.so_far, said)))
                advance()
            requests = []
            for request in answered:
                following = self._next_turn(request, turn + 1)
                if following is not None and len(following.prompt) <= self.settings.max_prompt:
                    requests.append(following)
                elif following is not None:
                    record = records[request.place]
                    records[request.place] = dataclasses.replace(record, broken_off=record.broken_off + 1)
        return records

    def _next_turn(self, request: _Request, turn: int) -> _Request | None:
        """The request for the answer to user turn number `turn`; None where there is no such turn, or nobody asked for it."""
        conversation = self.chosen.conversations[request.place]
        if turn >= min(self.turns, len(conversation.user_turns)):
            return None
        prompt = encoder(self.tokenizer)(messages_of(conversation, turn, request.so_far))
        return dataclasses.replace(request, prompt=tuple(prompt))

    def _begin(self, plan: DecodePlan, batch: Sequence[_Request], turn: int) -> DecodeState:
        """The batch behind its prefill, filled up with rows that end with their first token."""
        settings, conversations = self.settings, self.chosen.conversations
        empty = settings.batch_size - len(batch)
        names = [(conversations[request.place].line * MOST_TURNS + turn) * MOST_SAMPLES + request.sample for request in batch]
        state = start(
            plan,
            self.contender.params,
            [request.prompt for request in batch] + [batch[0].prompt] * empty,
            max_new_tokens=[settings.max_new_tokens] * len(batch) + [1] * empty,
            sampling=Sampling.make(settings.batch_size, self.temperature),
            stop_ids=self.tokenizer.stop_ids,
            seed=settings.seed,
            request_ids=names + [LARGEST_ID - row for row in range(empty)],
            max_len=settings.max_len,
        )
        return state if self.mesh is None else over_rows(state, self.mesh)


def _batches(requests: Sequence[_Request], size: int) -> Iterator[list[_Request]]:
    """Prompts of like length together: a batch is read as long as its longest prompt."""
    ordered = sorted(requests, key=lambda request: len(request.prompt))
    for first in range(0, len(ordered), size):
        yield ordered[first : first + size]
