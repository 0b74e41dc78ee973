"""Rounds of many requests replayed from recorded blocks: what a policy decides, what it costs, and what comes of it.

No model runs. R requests walk along recorded answers; in every round the policy reads the calibrated survival of their blocks, the
record says how many of the verified drafts are accepted, and a cost curve how long the round takes. One compiled program replays a
policy on many cost curves at once. When an answer ends, the slot goes on with another one, as under full load.
"""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.protocols import DraftBlock, StatefulPolicy, SurvivalModel
from dspark_jax.schedule import CapacityTopK, DraftPlanner, FixedLength, ForecastStop, Oracle, StepCurve
from dspark_jax.step_curve import mean_context
from dspark_jax.typing import Array
from experiments.recorded_rounds import RecordedBlocks
from pallas_kernels.noise import seed_key


@struct.dataclass
class CurveArrays:
    """A `StepCurve` whose costs are arrays. Costs of a bucket are those of the cheapest that holds as many tokens.

    Attributes:
      contexts: [C], ascending, at least two.
      seconds: [C, K], of the target's step.
      draft_seconds: of the rest of a round.
      ladder: K buckets, ascending (static).
    """

    contexts: Array
    seconds: Array
    draft_seconds: Array
    ladder: tuple[int, ...] = struct.field(pytree_node=False)

    @classmethod
    def of(cls, curve: StepCurve, tokens: Sequence[int]) -> "CurveArrays":
        """The curve at the buckets `tokens`, straight lines between its own; one context counts for all."""
        contexts = [curve.context, *(at for at, _ in curve.longer)]
        costs = [np.interp(tokens, curve.tokens, each) for each in (curve.seconds_per_step, *(each for _, each in curve.longer))]
        if len(contexts) == 1:
            contexts, costs = [contexts[0], contexts[0] + 1], costs * 2
        envelope = np.minimum.accumulate(np.array(costs)[:, ::-1], axis=1)[:, ::-1]
        at, seconds = jnp.asarray(contexts, jnp.float32), jnp.asarray(envelope, jnp.float32)
        return cls(at, seconds, jnp.float32(curve.draft_seconds), tuple(tokens))

    def bucket_seconds(self, context: Array) -> Array:
        """[..., K], of the target's step at contexts [...]."""
        columns = [jnp.interp(context, self.contexts, column) for column in self.seconds.T]
        return jnp.stack(columns, axis=-1)

    def rates(self, max_tokens: int, context: Array) -> Array:
        """As `StepCurve.rates`."""
        rate = 1 / (self.bucket_seconds(context) + self.draft_seconds)
        rate = jnp.concatenate([rate, jnp.zeros_like(rate[..., :1])], axis=-1)
        return rate[..., np.searchsorted(self.ladder, np.arange(max_tokens + 1))]

    def step_seconds(self, num_tokens: Array, context: Array) -> Array:
        """Of the target's step on so many tokens of all requests together."""
        return self.bucket_seconds(context)[jnp.searchsorted(jnp.asarray(self.ladder, jnp.int32), num_tokens)]


class Costs(NamedTuple):
    """What rounds cost with and without drafts; the `draft_seconds` of `undrafted` are a planned round's share of later commits."""

    drafted: CurveArrays
    undrafted: CurveArrays

    def plain_seconds(self, context: Array) -> Array:
        """Of the target's step without drafts."""
        return self.undrafted.bucket_seconds(context)[0]


class View(NamedTuple):
    """What there is to know in a round: all but `accepted` before it is verified."""

    survival: Array
    active: Array
    context: Array
    request_id: Array
    accepted: Array


class Decision(NamedTuple):
    """Whether the drafter runs, and how many drafts of each request are verified."""

    runs: Array
    lengths: Array


class ReplayPolicy(Protocol):
    """How rounds are decided; hashable."""

    def init(self, num_rows: int, block_size: int) -> Any:
        """State before the first round."""
        ...

    def decide(self, costs: Costs, state: Any, view: View) -> tuple[Decision, Any]:
        """The round's decision and the next state."""
        ...


@dataclasses.dataclass(frozen=True)
class Alone:
    """A policy without a planner: the drafter always runs, except for a fixed length of 0, which is plain decoding.

    Attributes:
      make: from the curve to the policy.
    """

    make: Any

    def init(self, num_rows: int, block_size: int) -> Any:
        """Of the policy, where it has one. What it knows before the first round does not depend on the curve."""
        policy = self.make(StepCurve((1, 2), (1.0, 2.0)))
        return policy.init_state(num_rows, block_size) if isinstance(policy, StatefulPolicy) else ()

    def decide(self, costs: Costs, state: Any, view: View) -> tuple[Decision, Any]:
        """The policy's lengths."""
        policy = self.make(costs.drafted)
        lengths, state = _lengths(policy, state, view)
        return Decision(jnp.bool_(not (isinstance(policy, FixedLength) and policy.length == 0)), lengths), state


@dataclasses.dataclass(frozen=True)
class Planned:
    """A policy behind a `DraftPlanner`, as `decode_round` runs them.

    Attributes:
      make: from the curve to the policy.
      constants: survival per position that nothing is known of.
      probe_share: of the planner.
    """

    make: Any
    constants: tuple[float, ...]
    probe_share: float = DraftPlanner.probe_share

    def _planner(self, curve: Any, undrafted: Any = None) -> DraftPlanner:
        return DraftPlanner(curve, self.constants, undrafted=undrafted, probe_share=self.probe_share)

    def init(self, num_rows: int, block_size: int) -> Any:
        """Of both."""
        return self._planner(StepCurve((1, 2), (1.0, 2.0))).init_history(num_rows), Alone(self.make).init(num_rows, block_size)

    def decide(self, costs: Costs, state: Any, view: View) -> tuple[Decision, Any]:
        """No drafts where the planner says so; a probe is verified in full."""
        history, policy_state = state
        planner = self._planner(*costs)
        plan = planner.plan(history, view.active, view.context, view.request_id, seed_key(0))
        runs, block_size = plan.draft_length > 0, view.survival.shape[1]
        history = planner.observe(history, view.survival, jnp.where(runs, block_size, 0), view.active, view.request_id)
        lengths, policy_state = _lengths(self.make(costs.drafted), policy_state, view._replace(active=view.active & runs))
        return Decision(runs, jnp.where(plan.probe, block_size, lengths)), (history, policy_state)


@dataclasses.dataclass(frozen=True)
class Hindsight:
    """Verifies what will be accepted as far as that pays in the round, and drafts only where that pays: the bound, not a policy."""

    def init(self, num_rows: int, block_size: int) -> Any:
        """Nothing to remember."""
        return ()

    def decide(self, costs: Costs, state: Any, view: View) -> tuple[Decision, Any]:
        """The best of all lengths given the outcomes, 0 without any drafting cost included."""
        block_size = view.survival.shape[1]
        outcome = (jnp.arange(block_size) < view.accepted[:, None]).astype(jnp.float32)
        oracle: Any = Oracle(costs.drafted)  # pyright: ignore[reportArgumentType]
        lengths = oracle.lengths(outcome, view.active, view.context, view.request_id)
        live = jnp.sum(view.active.astype(jnp.int32))
        tokens, at = live + jnp.sum(lengths), mean_context(view.context, view.active)
        drafted = tokens.astype(jnp.float32) / (costs.drafted.step_seconds(tokens, at) + costs.drafted.draft_seconds)
        runs = drafted > live.astype(jnp.float32) / costs.plain_seconds(at)
        return Decision(runs, jnp.where(runs, lengths, 0)), state


def _lengths(policy: Any, state: Any, view: View) -> tuple[Array, Any]:
    asked = (view.survival, view.active, view.context, view.request_id)
    if isinstance(policy, StatefulPolicy):
        return policy.next_lengths(state, *asked)
    return policy.lengths(*asked), state


class Rounds(NamedTuple):
    """What happened, per round (and curve): emitted and verified tokens, seconds, flat tokens, and whether the drafter ran."""

    emitted: Array
    verified: Array
    seconds: Array
    tokens: Array
    runs: Array


class Table(NamedTuple):
    """Recorded blocks on the device, in the order in which they are walked."""

    survival: Array
    accepted: Array
    anchors: Array
    context: Array


def table_of(blocks: RecordedBlocks, model: SurvivalModel, temperature: float, seed: int = 0) -> Table:
    """The blocks with their calibrated survival, texts in a random order."""
    num_texts, num_anchors, block_size = blocks.kept.shape
    logits = jnp.asarray(blocks.confidence_logits.reshape(-1, block_size))
    zeros = jnp.zeros(logits.shape, jnp.float32)
    block = DraftBlock(zeros.astype(jnp.int32), zeros, zeros, zeros, logits, None)
    survival = model.survival(block, jnp.full((len(logits),), temperature, jnp.float32)).reshape(num_texts, num_anchors, block_size)
    order = np.random.default_rng(seed).permutation(num_texts)
    arrays = (blocks.accepted[order], blocks.anchors[order], blocks.context[order])
    return Table(survival[jnp.asarray(order)], *(jnp.asarray(each, jnp.int32) for each in arrays))


@functools.partial(jax.jit, static_argnums=(0, 3, 4, 5))
def replay(policy: ReplayPolicy, costs: Costs, table: Table, num_rows: int, num_rounds: int, passes: int = 0) -> Rounds:
    """`num_rounds` rounds of `num_rows` requests on every curve (leading axis of `costs`).

    Args:
      passes: where not 0, each slot stops behind so many passes over all texts, and rounds without requests cost nothing. Every
        policy then writes the very same texts.
    """
    num_texts, _, block_size = table.survival.shape
    slots = jnp.arange(num_rows, dtype=jnp.int32)
    start = slots * num_texts // num_rows if num_rows <= num_texts else slots % num_texts

    def on(costs: Costs) -> Rounds:
        def one(carry: Any, _: None) -> tuple[Any, Rounds]:
            answered, anchor, state = carry
            text = (start + answered) % num_texts
            active = jnp.ones((num_rows,), bool) if not passes else answered < passes * num_texts
            context = table.context[text] + anchor
            accepted = table.accepted[text, anchor]
            view = View(table.survival[text, anchor], active, context, slots + num_rows * answered, accepted)
            decision, state = policy.decide(costs, state, view)
            lengths = jnp.where(active & decision.runs, decision.lengths, 0)
            # The last token of a text is emitted whatever follows it.
            emitted = jnp.where(active, jnp.minimum(1 + jnp.minimum(accepted, lengths), table.anchors[text] - anchor), 0)
            tokens = jnp.sum(jnp.where(active, 1 + lengths, 0))
            at = mean_context(context, active)
            with_drafts = costs.drafted.step_seconds(tokens, at) + costs.drafted.draft_seconds
            # A planner's drafter has to be told later; plain decoding and hindsight have nobody to tell.
            without = costs.plain_seconds(at) + (costs.undrafted.draft_seconds if isinstance(policy, Planned) else 0.0)
            seconds = jnp.where(tokens > 0, jnp.where(decision.runs, with_drafts, without), 0.0)
            ended = anchor + emitted >= table.anchors[text]
            carry = (answered + ended.astype(jnp.int32), jnp.where(ended, 0, anchor + emitted), state)
            return carry, Rounds(jnp.sum(emitted), jnp.sum(lengths), seconds, tokens, decision.runs)

        nothing = jnp.zeros((num_rows,), jnp.int32)
        return jax.lax.scan(one, (nothing, nothing, policy.init(num_rows, block_size)), None, length=num_rounds)[1]

    return jax.vmap(on)(costs)


def throughput(rounds: Rounds) -> np.ndarray:
    """Tokens per second on every curve."""
    return np.asarray(rounds.emitted, np.float64).sum(axis=-1) / np.asarray(rounds.seconds, np.float64).sum(axis=-1)


@dataclasses.dataclass(frozen=True)
class Forecast:
    """Makes `ForecastStop` of a curve."""

    continuation: tuple[float, ...]

    def __call__(self, curve: Any) -> Any:
        """The policy."""
        return ForecastStop(curve, self.continuation)


@dataclasses.dataclass(frozen=True)
class Capacity:
    """Makes `CapacityTopK` of a curve."""

    constants: tuple[float, ...]

    def __call__(self, curve: Any) -> Any:
        """The policy."""
        return CapacityTopK(curve, self.constants)


@dataclasses.dataclass(frozen=True)
class Same:
    """Makes one and the same policy of every curve."""

    policy: Any

    def __call__(self, curve: Any) -> Any:
        """The policy."""
        return self.policy
