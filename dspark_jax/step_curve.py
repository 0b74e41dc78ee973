"""What a round costs: seconds against the number of tokens that the target runs on, and against how long the requests are."""

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Protocol, runtime_checkable

import jax.numpy as jnp
import numpy as np

from dspark_jax.typing import Array, Bool, Float, Int, typed

FLAT_WITHIN = 0.01


class CurveWarning(UserWarning):
    """A cost curve that can be used and yet deserves a look."""


class FlatCurveWarning(CurveWarning):
    """Every bucket costs about the same: a scheduler then verifies everything, whatever the confidence."""


class NonMonotoneCurveWarning(CurveWarning):
    """Some bucket costs more than a larger one: rounds that need it are better run in the larger one."""


@runtime_checkable
class CostCurve(Protocol):
    """What a policy asks of a cost curve: `StepCurve`, or arrays that stand for many of them in an analysis."""

    @property
    def ladder(self) -> tuple[int, ...]:
        """Buckets, ascending."""
        ...

    @property
    def draft_seconds(self) -> Any:
        """Of the rest of a round with drafts."""
        ...

    def rates(self, max_tokens: int, context: Float[Array, "*rows"]) -> Float[Array, "*rows N"]:
        """Rounds per second on 0..max_tokens tokens at each context."""
        ...


@dataclass(frozen=True)
class StepCurve:
    """Seconds of a round against the number of tokens that the target runs on.

    What was measured is kept as it is. Where a larger bucket is cheaper than a smaller one, the round is taken to run in the
    cheapest bucket that holds its tokens; `ladder` leaves out the buckets that nobody would then run in, so that a loop which
    picks the smallest bucket of that ladder pays what was decided on.

    Attributes:
      tokens: bucket sizes, ascending.
      seconds_per_step: what one step of the target takes at each bucket.
      draft_seconds: what the rest of a round takes (drafting, committing), whatever is verified.
      context: committed tokens per request at which `seconds_per_step` holds; only read where `longer` is given.
      longer: the same at longer contexts: pairs of a context and its seconds per bucket, ascending in the context. Costs in
        between are interpolated; shorter and longer ones take the nearest that was measured.
    """

    tokens: tuple[int, ...]
    seconds_per_step: tuple[float, ...]
    draft_seconds: float = 0.0
    context: int = 0
    longer: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ValueError("tokens is empty; a cost curve needs at least one measured bucket, or everything would be verified")
        if self.tokens[0] < 1 or any(larger <= smaller for smaller, larger in zip(self.tokens, self.tokens[1:], strict=False)):
            raise ValueError(f"tokens is {self.tokens}; allowed are positive bucket sizes in strictly ascending order")
        for name, costs in (
            ("seconds_per_step", self.seconds_per_step),
            *((f"longer at context {at}", costs) for at, costs in self.longer),
        ):
            if len(costs) != len(self.tokens):
                raise ValueError(f"{name} has {len(costs)} values; allowed is one per bucket, of which there are {len(self.tokens)}")
            if not all(math.isfinite(cost) and cost > 0 for cost in costs):
                raise ValueError(f"{name} is {costs}; allowed are finite positive numbers")
        contexts = self._contexts
        if contexts[0] < 0 or any(longer <= shorter for shorter, longer in zip(contexts, contexts[1:], strict=False)):
            raise ValueError(f"context and those of longer are {contexts}; allowed are lengths from 0 on in strictly ascending order")
        if not (math.isfinite(self.draft_seconds) and self.draft_seconds >= 0):
            raise ValueError(f"draft_seconds is {self.draft_seconds}; allowed are finite numbers of at least 0")
        measured = self._measured
        if len(self.tokens) > 1 and np.all(measured.max(axis=1) <= measured.min(axis=1) * (1 + FLAT_WITHIN)):
            warnings.warn(
                f"the cost curve is flat within {FLAT_WITHIN:.0%} from {self.tokens[0]} to {self.tokens[-1]} tokens: "
                "verifying less gains nothing",
                FlatCurveWarning,
                stacklevel=3,
            )
        elif dearer := [bucket for bucket, rises in zip(self.tokens, np.any(measured > _envelope(measured), axis=0), strict=True) if rises]:
            warnings.warn(
                f"the cost curve falls behind {', '.join(map(str, dearer))} tokens: such rounds are taken to run in the cheaper, larger "
                "bucket; run them there (`ladder`), or measure again",
                NonMonotoneCurveWarning,
                stacklevel=3,
            )

    @property
    def _contexts(self) -> tuple[int, ...]:
        return (self.context, *(at for at, _ in self.longer))

    @property
    def _measured(self) -> np.ndarray:
        """[contexts, buckets]"""
        return np.array([self.seconds_per_step, *(costs for _, costs in self.longer)], np.float64)

    @property
    def ladder(self) -> tuple[int, ...]:
        """The buckets worth running in: those that no single larger one undercuts at every context."""
        measured = self._measured
        return tuple(
            bucket for i, bucket in enumerate(self.tokens) if not np.any(np.all(measured[:, i + 1 :] < measured[:, i, None], axis=0))
        )

    def bucket(self, num_tokens: int, context: float | None = None) -> int | None:
        """The bucket in which a round on `num_tokens` tokens is cheapest, the smallest one of several; None where none holds them."""
        costs = self._costs(context)
        fitting = [(cost, bucket) for cost, bucket in zip(costs.tolist(), self.tokens, strict=True) if bucket >= num_tokens]
        return min(fitting)[1] if fitting else None

    def seconds(self, num_tokens: int, context: float | None = None) -> float:
        """Seconds of a round on `num_tokens` tokens, in its cheapest bucket; inf where no bucket holds them.

        Args:
          context: committed tokens per request; None for the shortest measured.
        """
        fitting = [cost for cost, bucket in zip(self._costs(context).tolist(), self.tokens, strict=True) if bucket >= num_tokens]
        return self.draft_seconds + min(fitting) if fitting else math.inf

    def steps_per_second(self, max_tokens: int, context: float | None = None) -> np.ndarray:
        """Rounds per second on 0..max_tokens tokens, float32; 0 beyond the largest bucket."""
        return np.array([1 / self.seconds(num_tokens, context) for num_tokens in range(max_tokens + 1)], np.float32)

    @typed
    def bucket_seconds(self, context: Float[Array, "*rows"]) -> Float[Array, "*rows K"]:
        """Seconds of the target's step that the tokens of each bucket come to, at contexts known on the device only."""
        if not self.longer:
            return jnp.broadcast_to(jnp.asarray(_envelope(self._measured)[0], jnp.float32), (*context.shape, len(self.tokens)))
        contexts, measured = jnp.asarray(self._contexts, jnp.float32), jnp.asarray(self._measured, jnp.float32)
        last = jnp.clip(jnp.searchsorted(contexts, context, side="right"), 1, len(self.longer)).astype(jnp.int32)
        share = jnp.clip((context - contexts[last - 1]) / (contexts[last] - contexts[last - 1]), 0.0, 1.0)[..., None]
        costs = measured[last - 1] * (1 - share) + measured[last] * share
        return jnp.minimum.accumulate(costs[..., ::-1], axis=-1)[..., ::-1]

    @typed
    def rates(self, max_tokens: int, context: Float[Array, "*rows"]) -> Float[Array, "*rows N"]:
        """`steps_per_second` at contexts known on the device only: 0..max_tokens tokens at each of them."""
        if not self.longer:
            rate = jnp.asarray(self.steps_per_second(max_tokens))
            return jnp.broadcast_to(rate, (*context.shape, max_tokens + 1))
        holds = np.searchsorted(self.tokens, np.arange(max_tokens + 1))
        rate = 1 / (self.bucket_seconds(context) + self.draft_seconds)
        rate = jnp.concatenate([rate, jnp.zeros_like(rate[..., :1])], axis=-1)
        return rate[..., holds]

    def _costs(self, context: float | None) -> np.ndarray:
        at = self._contexts[0] if context is None else context
        return np.array([np.interp(at, self._contexts, costs) for costs in self._measured.T])


@typed
def mean_context(context: Int[Array, "R"], active: Bool[Array, "R"]) -> Float[Array, ""]:
    """Mean committed tokens of the active requests, 0 where there is none: the context at which a batch is judged.

    The mean and not each request's own, because a round's attention reads every request's cache once and so costs what the sum
    of their lengths costs. Summed as integers: the order of the slots then makes no difference.
    """
    total = jnp.sum(jnp.where(active, context, 0))
    return total.astype(jnp.float32) / jnp.maximum(jnp.sum(active.astype(jnp.int32)), 1).astype(jnp.float32)


def _envelope(costs: np.ndarray) -> np.ndarray:
    return np.minimum.accumulate(costs[:, ::-1], axis=1)[:, ::-1]


def curve_to_dict(curve: StepCurve) -> dict[str, Any]:
    """The curve as JSON takes it: every field of `StepCurve` by its name, tuples as lists."""
    return {
        "tokens": list(curve.tokens),
        "context": curve.context,
        "seconds_per_step": list(curve.seconds_per_step),
        "longer": [[at, list(costs)] for at, costs in curve.longer],
        "draft_seconds": curve.draft_seconds,
    }


def curve_from_dict(content: Mapping[str, Any]) -> StepCurve:
    """The curve that `curve_to_dict` wrote; `draft_seconds`, `context` and `longer` may be absent, as in `StepCurve`.

    Warns as `StepCurve` does.

    Raises:
      ValueError: a field is missing, unknown, of another kind, or one that `StepCurve` refuses.
    """
    known = [field.name for field in fields(StepCurve)]
    if not isinstance(content, Mapping):
        raise ValueError(f"curve is {content!r}; allowed is an object with {', '.join(known)}")
    for name in ("tokens", "seconds_per_step"):
        if name not in content:
            raise ValueError(f"{name} is missing; a cost curve needs it")
    for name in content:
        if name not in known:
            raise ValueError(f"{name} is no field of a cost curve; allowed: {', '.join(known)}")
    longer = content.get("longer", [])
    if not isinstance(longer, list | tuple) or any(not isinstance(pair, list | tuple) or len(pair) != 2 for pair in longer):
        raise ValueError(f"longer is {longer!r}; allowed are pairs of a context and its seconds per bucket")
    return StepCurve(
        tokens=tuple(_whole(bucket, "tokens") for bucket in _list(content["tokens"], "tokens")),
        seconds_per_step=_seconds(content["seconds_per_step"], "seconds_per_step"),
        draft_seconds=_number(content.get("draft_seconds", 0.0), "draft_seconds"),
        context=_whole(content.get("context", 0), "context"),
        longer=tuple((_whole(at, "longer"), _seconds(costs, f"longer at context {at}")) for at, costs in longer),
    )


def _list(value: Any, field: str) -> list[Any] | tuple[Any, ...]:
    if not isinstance(value, list | tuple):
        raise ValueError(f"{field} is {value!r}; allowed is a list")
    return value


def _seconds(value: Any, field: str) -> tuple[float, ...]:
    return tuple(_number(each, field) for each in _list(value, field))


def _number(value: Any, field: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f"{field} has {value!r}; allowed are numbers")
    return float(value)


def _whole(value: Any, field: str) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{field} has {value!r}; allowed are whole numbers")
    return value
