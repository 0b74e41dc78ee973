"""The exact output law of rounds, by enumeration: the proof that a policy or a verifier is lossless.

Every draft, acceptance and residual outcome is enumerated with its probability. What a round emits has a random length, so every
emission is extended with the target's own conditionals to a common horizon H; the joint law of all requests over V**H texts each
is then compared with the target's. It is the joint law that counts: a policy may leave each request's law right and correlate two
requests that should be independent.

Sizes stay small: one request and round for V <= 5 and G <= 3; at V = 2, G = 2 three rounds of one request or two rounds of two.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias, cast

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.protocols import StatefulPolicy, VerifyPolicy
from dspark_jax.sampling import Sampling, logit_floor
from dspark_jax.typing import Array
from dspark_jax.verify import outcome_probs
from pallas_kernels.two_level_draw import log_normaliser, probs

Text: TypeAlias = tuple[int, ...]
TargetLaw: TypeAlias = Callable[[Text], np.ndarray]
"""From the committed text to the distribution [V] of the next token."""
Verifier: TypeAlias = Callable[[Array, Array, Array, Array], Array]
"""From p [G + 1, V], q [G, V], ids [G] and the verified length to P(num_accepted, next id) [G + 1, V]."""


@dataclass(frozen=True)
class DraftLaw:
    """A drafter as far as its law goes.

    Attributes:
      block_size: G.
      probs: from the committed text and the drafts before k to q_k [V].
      confidence: from the committed text, ALL drafts of the block and k (from 0) to the chance that draft k survives given that
        those before it did. An honest drafter reads the drafts before k only; that others can be written down is how the checker
        is itself checked.
    """

    block_size: int
    probs: Callable[[Text, Text], np.ndarray]
    confidence: Callable[[Text, Text, int], float]


@dataclass(frozen=True)
class LawReport:
    """The law of a number of rounds beside the target's, both [V] * H per request, requests one after another.

    Attributes:
      law: what the rounds give.
      target: what plain sampling from the target gives.
      num_requests: R.
    """

    law: np.ndarray
    target: np.ndarray
    num_requests: int

    @property
    def deviation(self) -> float:
        """The largest difference of the probability of any text; below 1e-6 for a lossless policy."""
        return float(np.abs(self.law - self.target).max())

    @property
    def total_variation(self) -> float:
        """Half the sum of all differences."""
        return float(np.abs(self.law - self.target).sum() / 2)

    def of_request(self, request: int) -> "LawReport":
        """The law of one request alone."""
        horizon = self.law.ndim // self.num_requests
        others = tuple(axis for axis in range(self.law.ndim) if axis // horizon != request)
        return LawReport(law=self.law.sum(others), target=self.target.sum(others), num_requests=1)

    def first_token(self) -> np.ndarray:
        """Law [V] of the first token of the first request."""
        return self.law.sum(tuple(range(1, self.law.ndim)))


def law_of_rounds(
    target: TargetLaw,
    drafter: DraftLaw,
    policy: VerifyPolicy | StatefulPolicy,
    num_rounds: int = 1,
    prompts: tuple[Text, ...] = ((0,),),
    verifier: Verifier = outcome_probs,
    policy_state: Any = None,
) -> LawReport:
    """Enumerate `num_rounds` rounds of the requests `prompts`, all active throughout.

    Args:
      policy: judged by what it does with the survival of the whole batch.
      policy_state: None for a `VerifyPolicy`; for a `StatefulPolicy` what it knows before the first round (such as survival of
        rounds that came before). Its state is enumerated along with the texts.
    """
    block_size, num_requests = drafter.block_size, len(prompts)
    horizon = num_rounds * (block_size + 1)
    request_round = functools.lru_cache(maxsize=None)(functools.partial(_request_round, target, drafter, _batched(verifier)))
    choose = _per_draft(policy, policy_state is not None)
    extension = functools.lru_cache(maxsize=None)(functools.partial(_extension, target))

    # Per text, the policy's possible states with their probabilities; texts share their drafts and outcomes.
    states: dict[tuple[Text, ...], _Remembered] = {((),) * num_requests: _Remembered.certain(policy_state)}
    for number in range(num_rounds):
        is_last = number == num_rounds - 1
        following: dict[tuple[Text, ...], _Remembered] = {}
        for emitted, remembered in states.items():
            texts = [prompt + text for prompt, text in zip(prompts, emitted, strict=True)]
            rounds = [request_round(text) for text in texts]
            drafts = list(itertools.product(*(range(len(each.weight)) for each in rounds)))
            survival = jnp.asarray(
                np.stack([[each.survival[x] for each, x in zip(rounds, joint, strict=True)] for joint in drafts]), jnp.float32
            )
            context = jnp.asarray([len(text) for text in texts], jnp.int32)
            chosen: dict[tuple[int, tuple[int, ...]], _Remembered] = {}
            for state, probability in remembered:
                lengths, next_states = jax.tree.map(
                    np.asarray,
                    choose(state, survival, jnp.ones(num_requests, bool), context, jnp.arange(num_requests, dtype=jnp.int32)),
                )
                for place, joint in enumerate(drafts):
                    weight = probability * np.prod([each.weight[x] for each, x in zip(rounds, joint, strict=True)])
                    if weight > 0:
                        key = (place, tuple(lengths[place].tolist()))
                        next_state = None if is_last else jax.tree.map(lambda leaf, place=place: leaf[place], next_states)
                        chosen.setdefault(key, _Remembered({})).add(next_state, float(weight))
            for (place, length), after in chosen.items():
                outcomes = [each.outcomes(x, n) for each, x, n in zip(rounds, drafts[place], length, strict=True)]
                for combination in itertools.product(*outcomes):
                    text = tuple(text + emission for text, (emission, _) in zip(emitted, combination, strict=True))
                    chance = math.prod(probability for _, probability in combination)
                    into = following.setdefault(text, _Remembered({}))
                    for state, probability in after:
                        into.add(state, probability * chance)
        states = following

    vocab_size = len(target(prompts[0]))
    law = np.zeros((vocab_size,) * (horizon * num_requests))
    for emitted, remembered in states.items():
        index: tuple[int | slice, ...] = ()
        tail = np.ones(())
        for prompt, text in zip(prompts, emitted, strict=True):
            index += text + (slice(None),) * (horizon - len(text))
            tail = np.multiply.outer(tail, extension(prompt + text, horizon - len(text)))
        law[index] += sum(probability for _, probability in remembered) * tail
    of_target = functools.reduce(np.multiply.outer, [extension(prompt, horizon) for prompt in prompts])
    return LawReport(law=law, target=of_target, num_requests=num_requests)


def law_of_logits(logits: np.ndarray, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0) -> np.ndarray:
    """The distribution [V] that the sampler's own code makes of logits [V]; one-hot at temperature 0."""
    sampling = Sampling.make(1, temperature, top_k, top_p)
    return np.asarray(_law_of_logits(jnp.asarray(logits, jnp.float32)[None], sampling)[0], np.float64)


@jax.jit
def _law_of_logits(logits: Array, sampling: Sampling) -> Array:
    floor = logit_floor(logits, sampling)
    return probs(logits, floor, sampling.temperature, log_normaliser(logits, floor, sampling.temperature))


@dataclass(frozen=True)
class _RequestRound:
    """One round of one request: per draft block its ids, probability, survival, and the outcomes for every verified length."""

    ids: np.ndarray
    weight: np.ndarray
    survival: np.ndarray
    outcome: np.ndarray

    def outcomes(self, x: int, length: int) -> list[tuple[Text, float]]:
        """Emissions of block `x` verified to `length`, with their probabilities."""
        table = self.outcome[x, length]
        kept = tuple(int(token) for token in self.ids[x])
        return [(kept[:accepted] + (int(token),), table[accepted, token]) for accepted, token in zip(*np.nonzero(table), strict=True)]


@dataclass(frozen=True)
class _Remembered:
    """States of a policy with their probabilities, equal ones merged."""

    by_content: dict[tuple[bytes, ...], tuple[Any, float]]

    @classmethod
    def certain(cls, state: Any) -> "_Remembered":
        remembered = cls({})
        remembered.add(jax.tree.map(np.asarray, state), 1.0)
        return remembered

    def add(self, state: Any, probability: float) -> None:
        key = tuple(leaf.tobytes() for leaf in jax.tree.leaves(state))
        _, before = self.by_content.get(key, (state, 0.0))
        self.by_content[key] = (state, before + probability)

    def __iter__(self) -> Iterator[tuple[Any, float]]:
        return iter(self.by_content.values())


@functools.lru_cache(maxsize=64)
def _per_draft(policy: VerifyPolicy | StatefulPolicy, is_stateful: bool) -> Callable[..., tuple[Array, Any]]:
    """From a state and the survival of every draft to the lengths and the next states."""

    def choose(state: Any, survival: Array, active: Array, context: Array, request_id: Array) -> tuple[Array, Any]:
        if is_stateful:
            return cast(StatefulPolicy, policy).next_lengths(state, survival, active, context, request_id)
        return cast(VerifyPolicy, policy).lengths(survival, active, context, request_id), None

    return jax.jit(jax.vmap(choose, in_axes=(None, 0, None, None, None)))


@functools.lru_cache(maxsize=64)
def _batched(verifier: Verifier) -> Callable[[Array, Array, Array, Array], Array]:
    per_length = jax.vmap(verifier, in_axes=(None, None, None, 0))
    return jax.jit(jax.vmap(per_length, in_axes=(0, 0, 0, None)))


def _request_round(
    target: TargetLaw, drafter: DraftLaw, verify: Callable[[Array, Array, Array, Array], Array], text: Text
) -> _RequestRound:
    vocab_size, block_size = len(target(text)), drafter.block_size
    blocks = list(itertools.product(range(vocab_size), repeat=block_size))
    q = np.stack([[drafter.probs(text, block[:k]) for k in range(block_size)] for block in blocks])
    p = np.stack([[target(text + block[:k]) for k in range(block_size + 1)] for block in blocks])
    confidence = np.array([[drafter.confidence(text, block, k) for k in range(block_size)] for block in blocks])
    ids = np.array(blocks)
    outcome = verify(
        jnp.asarray(p, jnp.float32),
        jnp.asarray(q, jnp.float32),
        jnp.asarray(ids, jnp.int32),
        jnp.arange(block_size + 1, dtype=jnp.int32),
    )
    weight = np.take_along_axis(q, ids[:, :, None], axis=2)[:, :, 0].prod(1)
    return _RequestRound(ids=ids, weight=weight, survival=np.cumprod(confidence, axis=1), outcome=np.asarray(outcome, np.float64))


def _extension(target: TargetLaw, text: Text, length: int) -> np.ndarray:
    """Law [V] * length of the next `length` tokens of the target behind `text`."""
    if length == 0:
        return np.ones(())
    first = np.asarray(target(text), np.float64)
    return np.stack([chance * _extension(target, (*text, token), length - 1) for token, chance in enumerate(first)])
