"""Wall-clock speed of one request: plain decoding and every drafter on the same prompts, one after another in one run.

Only compiled rounds are timed, round by round, as in the demo; prefill and compilation are not. The order of the contenders rotates from
prompt to prompt, so that none is always the one behind a pause.
"""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax

from dspark_jax.decode import DecodeParams, DecodePlan
from dspark_jax.prefill import start
from dspark_jax.protocols import Target
from dspark_jax.sampling import Sampling
from dspark_jax.tokenizers import Tokenizer
from experiments.benchmark_decode import Contender
from experiments.benchmark_sets import GROUPS, ChosenSet
from experiments.demo_rounds import Recording, record

PLAIN = "plain decoding"
CACHE_STEP = 64
WARM_UP_TOKENS = 16


@dataclasses.dataclass(frozen=True)
class SpeedSettings:
    """What is timed.

    Attributes:
      timed_prompts: of each group of sets, at each temperature; 0 times nothing.
      timed_tokens: of an answer.
      timed_length: drafts that are verified in a round.
    """

    timed_prompts: int = 2
    timed_tokens: int = 64
    timed_length: int = 4

    def __post_init__(self) -> None:
        for name, least in (("timed_prompts", 0), ("timed_tokens", 2), ("timed_length", 1)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}; it must be at least {least}")


@dataclasses.dataclass(frozen=True)
class TimedPrompt:
    """A prompt and where it comes from."""

    group: str
    set: str
    id: str
    prompt: tuple[int, ...]


def timed_prompts(sets: Sequence[ChosenSet], per_group: int) -> list[TimedPrompt]:
    """`per_group` prompts of each group of the paper's table: the shortest of each of its sets, then the second shortest, and so on."""
    found = []
    for group in GROUPS:
        ranked = []
        for order, chosen in enumerate(each for each in sets if each.group == group):
            by_length = sorted(range(len(chosen.prompts)), key=lambda place, of=chosen: len(of.prompts[place]))
            for rank, place in enumerate(by_length):
                ranked.append((rank, order, TimedPrompt(group, chosen.name, chosen.conversations[place].id, tuple(chosen.prompts[place]))))
        found += [prompt for _, _, prompt in sorted(ranked, key=lambda each: each[:2])[:per_group]]
    return found


@dataclasses.dataclass(frozen=True, eq=False)
class Timing:
    """Everything that times one prompt after another.

    Attributes:
      max_len: positions of the caches, the same for all prompts, so that one program serves all.
    """

    target: Target
    tokenizer: Tokenizer
    contenders: tuple[Contender, ...]
    settings: SpeedSettings
    max_len: int
    seed: int = 0

    @classmethod
    def of(
        cls,
        target: Target,
        tokenizer: Tokenizer,
        contenders: Sequence[Contender],
        settings: SpeedSettings,
        prompts: Sequence[TimedPrompt],
        seed: int = 0,
    ) -> "Timing":
        """With caches for the longest of `prompts`."""
        longest = max(len(prompt.prompt) for prompt in prompts) + settings.timed_tokens
        return cls(target, tokenizer, tuple(contenders), settings, -(-longest // CACHE_STEP) * CACHE_STEP, seed)

    def warm_up(self, prompt: Sequence[int], temperatures: Sequence[float]) -> None:
        """Compile everything, and run it once at each temperature: the first run of a branch costs more than later ones."""
        for temperature in temperatures:
            for _, run in self._runs():
                run(prompt, temperature, min(WARM_UP_TOKENS, self.settings.timed_tokens))

    def measure(self, prompt: Sequence[int], temperature: float, turn: int) -> dict[str, dict[str, Any]]:
        """Tokens, seconds and rounds of each contender and of plain decoding, by label; the first token of an answer is not counted.

        Args:
          turn: who is first; counts the prompts.
        """
        runs = list(self._runs())
        first = turn % len(runs)
        taken = {label: run(prompt, temperature, self.settings.timed_tokens) for label, run in runs[first:] + runs[:first]}
        plain = taken[PLAIN]
        return {
            label: {
                "tokens": taken[label].decoded,
                "seconds": round(sum(taken[label].seconds), 4),
                "rounds": len(taken[label].rounds),
                # At temperature 0 a speculative answer is that of plain decoding.
                **({"as_plain": taken[label].ids == plain.ids} if temperature == 0 else {}),
            }
            for label, _ in runs
        }

    def _runs(self) -> Iterator[tuple[str, Callable[[Sequence[int], float, int], Recording]]]:
        plain = DecodePlan(self.target, ladder=(1,))
        target_only = DecodeParams.of(self.target, self.contenders[0].params.target)
        yield PLAIN, lambda *asked: self._answer(plain, target_only, *asked)
        for contender in self.contenders:
            plan = contender.plan(self.target, self.settings.timed_length, 1)
            yield contender.label, lambda *asked, plan=plan, params=contender.params: self._answer(plan, params, *asked)

    def _answer(self, plan: DecodePlan, params: DecodeParams, prompt: Sequence[int], temperature: float, budget: int) -> Recording:
        state = start(
            plan,
            params,
            [list(prompt)],
            max_new_tokens=budget,
            sampling=Sampling.make(1, temperature),
            stop_ids=self.tokenizer.stop_ids,
            seed=self.seed,
            max_len=self.max_len,
        )
        return record(plan, params, jax.block_until_ready(state))
