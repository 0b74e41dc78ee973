"""What a round does at every number of requests: the `DecodePlan`s of an engine, and what each of their rounds should cost."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp

from dspark_jax.decode import DecodePlan
from dspark_jax.protocols import DraftBlock, Drafter, StatefulPolicy, SurvivalModel, Target, VerifyPolicy
from dspark_jax.schedule import default_schedule
from dspark_jax.step_curve import StepCurve
from dspark_jax.typing import Array, Float

Policy = VerifyPolicy | StatefulPolicy
Curves = StepCurve | Mapping[int, StepCurve]


@dataclasses.dataclass(frozen=True)
class FirstPositions:
    """The survival of blocks that are shorter than those a model was fitted on: it is shown what is missing as hopeless.

    Attributes:
      model: of blocks of `block_size` drafts.
    """

    model: SurvivalModel
    block_size: int

    def survival(self, block: DraftBlock, temperature: Float[Array, "R"]) -> Float[Array, "R G"]:
        """See `SurvivalModel`."""
        size = block.ids.shape[1]
        if size == self.block_size:
            return self.model.survival(block, temperature)

        def padded(x: Array) -> Array:
            return jnp.pad(x, ((0, 0), (0, self.block_size - size)))

        confidence = None if block.confidence_logits is None else padded(block.confidence_logits)
        longer = DraftBlock(
            ids=padded(block.ids),
            log_q=padded(block.log_q),
            log_normaliser=padded(block.log_normaliser),
            floor=padded(block.floor),
            confidence_logits=confidence,
            logits=None,
        )
        return self.model.survival(longer, temperature)[:, :size]


@dataclasses.dataclass(frozen=True)
class RoundPlan:
    """A round of up to so many requests.

    Attributes:
      ladder: buckets of flat tokens, ascending.
      curve: cost of a round against its bucket; None where nobody said.
      undrafted: the same of a round without drafts.
    """

    plan: DecodePlan
    ladder: tuple[int, ...]
    curve: StepCurve | None = None
    undrafted: StepCurve | None = None

    def bucket(self, rows: int, num_tokens: int, drafted: bool) -> int:
        """Flat tokens that a round on `num_tokens` tokens runs on, as `decode_round` chooses it."""
        if not drafted:
            return rows
        return next(size for size in self.ladder if size >= num_tokens)

    def seconds(self, bucket: int, drafted: bool) -> float | None:
        """What the curve says of a round."""
        if not drafted and self.undrafted is not None:
            return self.undrafted.seconds(min(bucket, self.undrafted.tokens[-1]))
        return None if self.curve is None else self.curve.seconds(bucket)


def round_plans(
    target: Target,
    drafter: Drafter | Mapping[int, Drafter] | None,
    row_ladder: Sequence[int],
    *,
    policy: Policy | Callable[[int], Policy] | None = None,
    curve: Curves | None = None,
    undrafted: Curves | None = None,
    ladder: Callable[[int], tuple[int, ...]] | None = None,
    survival: SurvivalModel | None = None,
    continuation: tuple[float, ...] | None = None,
    **options: Any,
) -> dict[int, RoundPlan]:
    """A plan for every number of rows.

    Args:
      drafter: one for all, or by the number of rows: the same drafter with shorter blocks where there are many requests, say. What blocks
        share with those of other rows is the drafter's state. None for plain decoding.
      policy: how many drafts are verified, one for all or from the number of rows; None: `default_schedule` on the curves, with its
        planner, from `continuation`.
      survival: of blocks of different lengths it has to be one that fits them all, such as `FirstPositions`.
      continuation: of the longest blocks; shorter ones take its first entries.
      curve, undrafted: cost of a round with and without drafts, one for all or by the number of rows.
      ladder: from the number of rows to the buckets of flat tokens; None: those of the curve that are worth running in, and without one
        1, 2, 4 and 1 + G tokens per row.
      options: further fields of `DecodePlan`.

    Raises:
      ValueError: something that the policy needs is missing, or a curve has no bucket for all drafts of its rows.
    """
    plans = {}
    for rows in row_ladder:
        own, plain = _curve_of(curve, rows, "curve"), _curve_of(undrafted, rows, "undrafted")
        if drafter is None:
            plans[rows] = RoundPlan(DecodePlan(target, **options), (rows,), own, plain)
            continue
        drafting: Drafter = drafter[rows] if isinstance(drafter, Mapping) else drafter
        most = rows * (drafting.block_size + 1)
        if ladder is not None:
            buckets = ladder(rows)
        else:
            buckets = _ladder(rows, most) if own is None else _ladder_of(own, rows, most)
        planner = None
        if policy is None:
            if own is None or continuation is None:
                missing = "curve" if own is None else "continuation"
                raise ValueError(f"{missing} is None; without a policy of yours the default one needs curve and continuation")
            scheduled, planner = default_schedule(own, continuation[: drafting.block_size], rows, plain)
        else:
            scheduled = policy(rows) if callable(policy) else policy
        plan = DecodePlan(target, drafting, scheduled, survival, buckets, planner=planner, **options)
        plans[rows] = RoundPlan(plan, plan.buckets(rows), own, plain)
    return plans


def _curve_of(curves: Curves | None, rows: int, field: str) -> StepCurve | None:
    if curves is None or isinstance(curves, StepCurve):
        return curves
    if rows not in curves:
        raise ValueError(f"{field} has none for {rows} rows; it has {', '.join(map(str, sorted(curves)))}")
    return curves[rows]


def _ladder(rows: int, most: int) -> tuple[int, ...]:
    return tuple(sorted({size for size in (rows, 2 * rows, 4 * rows) if size < most} | {most}))


def _ladder_of(curve: StepCurve, rows: int, most: int) -> tuple[int, ...]:
    holding = [size for size in curve.ladder if size >= rows]
    if not holding or holding[-1] < most:
        raise ValueError(f"curve ends at {curve.tokens[-1]} tokens; all drafts of {rows} rows are {most}")
    return tuple(size for size in holding if size < most) + (next(size for size in holding if size >= most),)
