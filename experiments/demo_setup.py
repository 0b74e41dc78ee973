"""What the demo decides before it answers anything: prompts, models, the fastest plain decoding, the schedule of the rounds."""

import contextlib
import dataclasses
import json
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import jax.numpy as jnp
from rich.console import Console

from dspark_jax.calibration_identity import CalibratorWarning
from dspark_jax.decode import DecodeParams, DecodePlan, DecodeState, step
from dspark_jax.prefill import start
from dspark_jax.protocols import Target
from dspark_jax.sampling import Sampling
from dspark_jax.schedule import FlatCurveWarning, ForecastStop
from dspark_jax.tokenizers import Tokenizer, load_tokenizer
from dspark_jax.weights import USUAL_CONTINUATION, LoadedDrafter, load_drafter, load_target
from experiments.demo_rounds import record, take_row
from experiments.profile_steps import RELEASED_DRAFTER, PlainChoice, StepProfile, choose_plain, device_text, profile
from experiments.prompts import Prompt, code_prompts, maths_prompts
from experiments.result_files import write_json

CHAT_QUESTIONS = (
    "What should I think about before I adopt a dog from a shelter?",
    "Why does bread dough rise, and what happens if I leave it too long?",
    "I have a free weekend and no money to spend. Suggest a few things to do.",
    "How do noise-cancelling headphones work? Explain it to a ten-year-old.",
    "Write a short and polite message to a neighbour whose music is too loud.",
    "What is the difference between weather and climate?",
    "Give me a simple plan to learn the names of the constellations.",
    "My houseplant has yellow leaves. What could be the reason?",
)

TRAINED_ON = ("code-http.cookiejar.CookiePolicy.return_ok", "code-typing.get_args", "code-logging.config.BaseConfigurator.resolve")
"""Functions whose documentation is in the texts that the released drafter was trained on, although held out by our own split."""

PREFILL_ROWS = 16
WARM_UP_ROUNDS = 40
FEWEST_WARM_UP_ROUNDS = 4
CACHE_STEP = 64


@dataclasses.dataclass(frozen=True)
class DemoOptions:
    """Command line of the demo.

    Attributes:
      prompt: answer this instead of the demo's own prompts.
      prompts: files of prompts instead, JSONL with `turns`, of which the first is asked; every file is a domain of its own.
      temperature: only at this temperature; 0 and 1 where absent (0 alone for a prompt of your own).
      target: name, folder or GGUF file of the target.
      drafter: folder of the drafter.
      max_new_tokens: budget of an answer, its first token included; at temperature 1 half of it where both temperatures are shown.
      out: folder for demo.json and demo.png, and for the cache of compiled programs.
      prompts_per_domain: at temperature 0; half of them are answered at temperature 1 as well.
      quick: one prompt per domain, at most 48 tokens.
      time_limit: seconds after which no further prompt is begun.
      seed: of everything that is drawn.
    """

    prompt: str | None = None
    prompts: tuple[Path, ...] = ()
    temperature: float | None = None
    target: str = "smollm2"
    drafter: Path = RELEASED_DRAFTER
    max_new_tokens: int = 128
    out: Path = Path("out")
    prompts_per_domain: int = 2
    quick: bool = False
    time_limit: float = 160.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.prompt is not None and not self.prompt.strip():
            raise ValueError("prompt is empty; allowed is any text with a character in it")
        if self.max_new_tokens < 2:
            raise ValueError(f"max_new_tokens is {self.max_new_tokens}; allowed are integers of at least 2")
        if self.temperature is not None:
            Sampling.make(1, self.temperature)
        if not 1 <= self.prompts_per_domain <= len(CHAT_QUESTIONS):
            raise ValueError(f"prompts_per_domain is {self.prompts_per_domain}; allowed are 1 to {len(CHAT_QUESTIONS)}")

    @property
    def budget(self) -> int:
        """Tokens of an answer."""
        return min(self.max_new_tokens, 48) if self.quick else self.max_new_tokens

    def budget_of(self, job: "Job") -> int:
        """Tokens of one job's answer."""
        shows_both = self.temperature is None and self.prompt is None
        return -(-self.budget // 2) if shows_both and job.temperature > 0 else self.budget


@dataclasses.dataclass(frozen=True)
class Job:
    """A prompt to answer at a temperature."""

    domain: str
    text: str
    temperature: float


def demo_prompts(per_domain: int) -> list[Prompt]:
    """Held-out prompts of the project's generators, no two about the same function, and fixed questions."""
    by_function = {prompt.key.rpartition("-")[0]: prompt for prompt in reversed(code_prompts("heldout"))}
    unseen = [prompt for function, prompt in reversed(by_function.items()) if function not in TRAINED_ON]
    return [
        *maths_prompts(per_domain, "heldout"),
        *unseen[:per_domain],
        *(Prompt("chat", text, "heldout", f"chat-{number}") for number, text in enumerate(CHAT_QUESTIONS[:per_domain])),
    ]


def file_prompts(file: Path, count: int) -> list[tuple[str, str]]:
    """Domain (the name of the file) and text of the first turns of the first `count` lines of a JSONL file.

    Raises:
      ValueError: the file is missing or too short, or a line has no `turns`.
    """
    if not file.is_file():
        raise ValueError(f"prompts has {file}; allowed are existing JSONL files")
    lines = file.read_text(encoding="utf-8").splitlines()[:count]
    if len(lines) < count:
        raise ValueError(f"prompts has {file} with {len(lines)} lines; prompts_per_domain asks for {count}")
    prompts = []
    for number, line in enumerate(lines):
        try:
            turns = json.loads(line)["turns"]
        except (json.JSONDecodeError, KeyError, TypeError):
            turns = None
        if not isinstance(turns, list) or not turns or not isinstance(turns[0], str):
            raise ValueError(f"prompts has {file}, line {number + 1} without `turns`; allowed is a list of texts")
        prompts.append((file.stem, turns[0]))
    return prompts


def jobs_of(options: DemoOptions) -> list[Job]:
    """What to answer, in order: one prompt of each domain at each temperature first, so that a short run has seen everything."""
    if options.prompt is not None:
        return [Job("prompt", options.prompt, options.temperature or 0.0)]
    per_domain = 1 if options.quick else options.prompts_per_domain
    temperatures = (0.0, 1.0) if options.temperature is None else (options.temperature,)
    prompts = [prompt for file in options.prompts for prompt in file_prompts(file, per_domain)]
    prompts = prompts or [(prompt.domain, prompt.text) for prompt in demo_prompts(per_domain)]
    jobs = []
    for number in range(per_domain):
        for index, temperature in enumerate(temperatures):
            if index == 0 or number < -(-per_domain // 2):
                jobs += [Job(domain, text, temperature) for domain, text in prompts[number::per_domain]]
    return jobs


def encode(tokenizer: Tokenizer, text: str) -> list[int]:
    """The prompt as the model wants it: by its chat template, where it has one."""
    if tokenizer.chat_template is None:
        return tokenizer.encode(text, add_special=True)
    return tokenizer.encode_chat([{"role": "user", "content": text}])


def check_length(prompt: Sequence[int], budget: int, target: Target) -> None:
    """Refuse a prompt that the target has no positions for."""
    most = getattr(getattr(target, "config", None), "max_position_embeddings", None)
    if most is not None and len(prompt) + budget > most:
        raise ValueError(f"prompt has {len(prompt)} tokens; with a budget of {budget} allowed are at most {most - budget}")


def continuation_of(loaded: LoadedDrafter, temperatures: Sequence[float]) -> tuple[float, ...]:
    """Per position, the chance that a draft is accepted given that those before it were.

    From the drafter's `survival.json`: `continuation` maps temperatures to lists; the mean over those nearest to `temperatures`.
    """
    block = loaded.drafter.block_size
    stored = (loaded.survival or {}).get("continuation")
    if not stored:
        return (USUAL_CONTINUATION,) * block
    by_temperature = {float(at): [float(chance) for chance in chances] for at, chances in stored.items()}
    nearest = [by_temperature[min(by_temperature, key=lambda at, to=temperature: abs(at - to))] for temperature in temperatures]
    if any(len(chances) != block for chances in nearest):
        raise ValueError(f"continuation in survival.json has {len(nearest[0])} entries; allowed is one per draft, {block} in all")
    # Rounded, because the numbers become part of a compiled program that is kept on disk.
    return tuple(round(sum(column) / len(column), 3) for column in zip(*nearest, strict=True))


def calibration_notes(loaded: LoadedDrafter, temperatures: Sequence[float]) -> tuple[str, ...]:
    """What a reader should know of the calibration at these temperatures of the sampler: why the numbers of the schedule need not hold.

    Raises:
      ValueError: it was fitted for another drafter.
    """
    if not loaded.survival:
        return ("the drafter comes without calibration: survival is its confidence as it is, or a usual value where it has none",)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", CalibratorWarning)
        loaded.check_calibration(Sampling.make(len(temperatures), temperatures))
    return tuple(str(warning.message) for warning in caught)


def settled(measured: StepProfile, file: Path, key: str, tolerance: float = 0.15) -> StepProfile:
    """The profile that an earlier run stored under `key`, as long as `measured` agrees with it; else `measured`, which is stored.

    Costs become constants of the compiled round. Taking the very same ones again lets the cache of compiled programs serve.
    """
    stored = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    if key in stored:
        old = StepProfile(tuple(stored[key]["tokens"]), tuple(stored[key]["target_seconds"]), stored[key]["draft_seconds"])
        if measured.agrees_with(old, tolerance):
            return old
    write_json(file, {**stored, key: dataclasses.asdict(measured)})
    return measured


@contextlib.contextmanager
def stage(console: Console, text: str) -> Iterator[None]:
    """A spinner while something is prepared, and a line with its seconds afterwards."""
    begin = time.monotonic()
    with console.status(text):
        yield
    console.print(f"  {text}: {time.monotonic() - begin:.1f} s", style="dim", highlight=False)


@dataclasses.dataclass(frozen=True)
class Prepared:
    """Everything that is decided before the first prompt is answered.

    Attributes:
      jobs, prompts: what to answer, as text and as ids.
      params: of both; plain decoding reads the target's part.
      notes: remarks for the reader.
    """

    jobs: tuple[Job, ...]
    prompts: tuple[list[int], ...]
    tokenizer: Tokenizer
    speculative: DecodePlan
    plain: DecodePlan
    params: DecodeParams
    plain_choice: PlainChoice
    profile: StepProfile
    continuation: tuple[float, ...]
    max_len: int
    notes: tuple[str, ...]

    @property
    def plain_params(self) -> DecodeParams:
        """The target's part of the parameters."""
        return DecodeParams.of(self.plain.target, self.params.target)


def prepare(options: DemoOptions, jobs: Sequence[Job], console: Console) -> Prepared:
    """Load, measure and decide.

    Raises:
      ValueError: for models that are missing or do not fit each other, and prompts that are too long.
    """
    with stage(console, f"loading {options.target} and its drafter"):
        target, target_params = load_target(options.target)
        loaded = load_drafter(options.drafter, target.spec)
        tokenizer = load_tokenizer(options.target)
    temperatures = sorted({job.temperature for job in jobs})
    notes = calibration_notes(loaded, temperatures)
    prompts = tuple(encode(tokenizer, job.text) for job in jobs)
    for prompt in prompts:
        check_length(prompt, options.budget, target)
    max_len = -(-(max(map(len, prompts)) + options.budget) // CACHE_STEP) * CACHE_STEP
    repetitions = 3 if options.quick else 7
    with stage(console, "finding the fastest plain decoding"):
        choice = choose_plain(target, target_params, max_len=max_len)
    if choice.dtype != str(target.head(target_params).embedding.dtype):
        target_params = jax.tree.map(lambda leaf: leaf.astype(choice.dtype), target_params)
        loaded = dataclasses.replace(loaded, params=jax.tree.map(lambda leaf: leaf.astype(choice.dtype), loaded.params))
    params = DecodeParams.of(target, target_params, loaded.params, loaded.draft_ids)
    with stage(console, "measuring what a round costs"):
        measured = profile(
            target,
            params,
            loaded.drafter,
            max_len=max_len,
            temperature=temperatures[0],
            repetitions=repetitions,
            by_layer=jax.default_backend() == "cpu",
        )
    key = f"{device_text()} {options.target} {options.drafter} {choice.dtype} {max_len} {temperatures[0]:g}"
    measured = settled(measured, options.out / ".jax_cache" / "rounds.json", key)
    ladder = measured.ladder()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", FlatCurveWarning)
        curve = measured.curve(ladder)
    continuation = continuation_of(loaded, temperatures)
    speculative = DecodePlan(target, loaded.drafter, ForecastStop(curve, continuation), loaded.survival_model(continuation), ladder)
    plain = DecodePlan(target, ladder=(choice.tokens,))
    notes += tuple(str(warning.message) for warning in caught if len(ladder) > 1)
    return Prepared(tuple(jobs), prompts, tokenizer, speculative, plain, params, choice, measured, continuation, max_len, notes)


def prefilled(prepared: Prepared, options: DemoOptions) -> Iterator[Callable[[], tuple[DecodeState, DecodeState]]]:
    """For every job a function that gives fresh states for plain and speculative decoding, both behind the same prefill.

    Prompts are prefilled in batches, so that one compiled program serves all of them.
    """
    jobs = prepared.jobs
    rows = min(PREFILL_ROWS, len(jobs))
    for first in range(0, len(jobs), rows):
        chosen = [min(first + row, len(jobs) - 1) for row in range(rows)]
        states = start(
            prepared.speculative,
            prepared.params,
            [prepared.prompts[index] for index in chosen],
            max_new_tokens=[options.budget_of(jobs[index]) for index in chosen],
            sampling=Sampling.make(rows, [jobs[index].temperature for index in chosen]),
            stop_ids=prepared.tokenizer.stop_ids,
            seed=options.seed,
            request_ids=range(first, first + rows),
            max_len=prepared.max_len,
        )
        jax.block_until_ready(states)
        for row in range(min(rows, len(jobs) - first)):

            def fresh(states: DecodeState = states, row: int = row) -> tuple[DecodeState, DecodeState]:
                one, other = (take_row(states, jnp.int32(row)) for _ in range(2))
                return dataclasses.replace(one, drafter_state=None), other

            yield fresh


def warm_up(prepared: Prepared, fresh: Callable[[], tuple[DecodeState, DecodeState]]) -> None:
    """Compile and run both decoders on one prompt, side by side: tracing keeps one core busy, compiling all."""
    plain, speculative = fresh()
    # Two tokens more at most: one round each, and the states are thrown away.
    plain, speculative = (dataclasses.replace(state, limit=state.length + 1) for state in (plain, speculative))
    with ThreadPoolExecutor(2) as pool:
        waiting = [
            pool.submit(record, prepared.plain, prepared.plain_params, plain),
            pool.submit(record, prepared.speculative, prepared.params, speculative),
        ]
        for each in waiting:
            each.result()
    run_branches(prepared, fresh)


def run_branches(prepared: Prepared, fresh: Callable[[], tuple[DecodeState, DecodeState]]) -> None:
    """Throw-away rounds until every bucket has run, greedy and drawn.

    The first run of each branch of a compiled round costs up to a second more than all later ones; drawn tokens have branches of
    their own. A prompt may never need the largest bucket, so that there is an end to it.
    """
    ladder = prepared.speculative.buckets(1)
    unused = set(ladder)
    for temperature in sorted({job.temperature for job in prepared.jobs}):
        plain, state = (_at_temperature(each, temperature) for each in fresh())
        for number in range(WARM_UP_ROUNDS):
            if bool(state.finished.all()) or (number >= FEWEST_WARM_UP_ROUNDS and not unused):
                break
            if number < FEWEST_WARM_UP_ROUNDS and not bool(plain.finished.all()):
                plain, _ = step(prepared.plain, prepared.plain_params, plain)
            state, stats = step(prepared.speculative, prepared.params, state)
            unused.discard(next(bucket for bucket in ladder if bucket > int(stats.verified[0])))


def _at_temperature(state: DecodeState, temperature: float) -> DecodeState:
    sampling = dataclasses.replace(state.sampling, temperature=jnp.full_like(state.sampling.temperature, temperature))
    return dataclasses.replace(state, sampling=sampling)
