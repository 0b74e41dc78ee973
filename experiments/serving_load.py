"""Load for an engine, and what it did under it: a closed loop of so many users, or arrivals at random times."""

import dataclasses
import math
import time
from collections.abc import Iterator, Sequence

import numpy as np

from dspark_jax.engine_core import EngineCore
from dspark_jax.requests import Handle
from dspark_jax.tokenizers import Tokenizer
from experiments.demo_setup import demo_prompts, encode


@dataclasses.dataclass(frozen=True)
class Ask:
    """A request of a workload."""

    prompt: tuple[int, ...]
    budget: int
    temperature: float
    seed: int


def asks(
    tokenizer: Tokenizer, temperature: float, seed: int, budgets: tuple[int, int], longest: int, per_domain: int = 16
) -> Iterator[Ask]:
    """Requests without end: held-out prompts of all domains in random order, with budgets between two numbers of tokens.

    Every policy is given the same ones.

    Args:
      longest: prompts with more tokens are left out.
    """
    rng = np.random.default_rng(seed)
    prompts = [tuple(encode(tokenizer, prompt.text)) for prompt in demo_prompts(per_domain)]
    prompts = [prompt for prompt in prompts if len(prompt) <= longest]
    if not prompts:
        raise ValueError(f"longest is {longest}; no prompt is as short as that")
    for number in range(2**31):
        if number % len(prompts) == 0:
            order = rng.permutation(len(prompts))
        budget = int(rng.integers(budgets[0], budgets[1] + 1))
        yield Ask(prompts[order[number % len(prompts)]], budget, temperature, seed=number)


@dataclasses.dataclass(frozen=True)
class Window:
    """What happened in a stretch of time.

    Attributes:
      seconds: its length.
      emitted: tokens of answers, first ones included.
      first: first tokens, which come from prefill.
      rounds: of requests, one for each that took part in a round.
      verified: drafts of all of them.
      request_seconds: seconds that requests spent in rounds and between them, summed over requests.
      host_seconds: in which the thread of the engine's loop computed.
    """

    seconds: float
    emitted: int
    first: int
    rounds: int
    verified: int
    request_seconds: float
    host_seconds: float = 0.0


def submit(engine: EngineCore, ask: Ask, budget: int | None = None) -> Handle:
    """Hand a request in."""
    budget = ask.budget if budget is None else budget
    return engine.submit(ask.prompt, max_new_tokens=budget, temperature=ask.temperature, seed=ask.seed)


class ClosedLoop:
    """So many users, each of whom asks anew when answered. At the start they are spread over all stages of an answer.

    Time spent between windows, when another engine has its turn, does not count.
    """

    def __init__(self, engine: EngineCore, workload: Iterator[Ask], users: int, seed: int = 0) -> None:
        self.engine, self._workload, self.users = engine, workload, users
        rng = np.random.default_rng(seed)
        # The first answers are cut, so that they do not all end at the same time.
        firsts = [next(workload) for _ in range(users)]
        self._handles = [submit(engine, ask, max(1, int(ask.budget * rng.uniform(0.1, 1.0)))) for ask in firsts]

    def _step(self) -> None:
        self.engine.step()
        for place, handle in enumerate(self._handles):
            if handle.completion is not None:
                if handle.completion.error is not None:
                    raise RuntimeError(f"a request ended with an error: {handle.completion.error}")
                self._handles[place] = submit(self.engine, next(self._workload))

    def fill(self) -> None:
        """Until nearly everybody is being answered: 19 of 20."""
        while self.engine.metrics.decoding < math.ceil(0.95 * self.users):
            self._step()

    def window(self, seconds: float) -> Window:
        """Serve for at least so long, and until the device has done what it was given, so that nothing runs beside the next one's turn."""
        metrics, names = self.engine.metrics, ("emitted_tokens", "first_tokens", "request_rounds", "verified_tokens")
        self.engine.settle()
        before, hosted = [getattr(metrics, name) for name in names], metrics.host_seconds
        began = last = time.monotonic()
        asked = 0.0
        while last - began < seconds or metrics.request_rounds == before[2]:
            self._step()
            now = time.monotonic()
            asked += metrics.decoding * (now - last)
            last = now
        self.engine.settle()
        now = time.monotonic()
        asked += metrics.decoding * (now - last)
        emitted, first, rounds, verified = (getattr(metrics, name) - old for name, old in zip(names, before, strict=True))
        return Window(now - began, emitted, first, rounds, verified, asked, metrics.host_seconds - hosted)


@dataclasses.dataclass(frozen=True)
class Arrivals:
    """What came of arrivals at random times.

    Attributes:
      throughput: tokens a second, from the first arrival to the last end.
      per_user: median over requests of tokens a second behind the first token.
      first_token: medians and 95 % quantiles of seconds to the first token.
    """

    throughput: float
    per_user: float
    first_token: tuple[float, float]
    mean_verified: float
    accepted_length: float


def serve_arrivals(engine: EngineCore, workload: Iterator[Ask], rate: float, count: int, seed: int = 0) -> Arrivals:
    """`count` requests that arrive as a Poisson process of `rate` a second."""
    times = np.cumsum(np.random.default_rng(seed).exponential(1 / rate, count))
    began, handles = time.monotonic(), []
    while len(handles) < count or not engine.idle:
        while len(handles) < count and time.monotonic() - began >= times[len(handles)]:
            handles.append(submit(engine, next(workload)))
        if not engine.step() and len(handles) < count:
            time.sleep(max(0.0, min(0.01, times[len(handles)] - (time.monotonic() - began))))
    elapsed = time.monotonic() - began - float(times[0])
    return summary_of(handles, elapsed)


def summary_of(handles: Sequence[Handle], seconds: float) -> Arrivals:
    """Figures of requests that have ended, `seconds` being the time they took together."""
    done = [handle.completion for handle in handles if handle.completion is not None]
    failed = [completion.error for completion in done if completion.error is not None]
    if failed:
        raise RuntimeError(f"{len(failed)} requests ended with an error: {failed[0]}")
    metrics = [completion.metrics for completion in done]
    waits = [each.time_to_first_token for each in metrics if each.time_to_first_token is not None]
    speeds = [each.tokens_per_second for each in metrics if each.tokens_per_second is not None]
    rounds = sum(each.rounds for each in metrics)
    return Arrivals(
        throughput=sum(len(completion.ids) for completion in done) / seconds,
        per_user=float(np.median(speeds)),
        first_token=(float(np.median(waits)), float(np.quantile(waits, 0.95))),
        mean_verified=sum(each.verified for each in metrics) / rounds,
        accepted_length=sum(each.emitted for each in metrics) / rounds,
    )
