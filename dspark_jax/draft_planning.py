"""Whether to draft at all, and how many tokens: decided before the drafter runs, from past rounds alone.

Blocks that are written in one pass cost the same whatever their length: of them `decode_round` asks only whether to draft.

Verifying less saves nothing of what drafting costs. On requests that are hard to predict, and under full load, that cost does not
come back; then the round is better run without the drafter. What past rounds say is the calibrated survival that they showed, as it
was: every drafted round shows it for all positions, verified or not, so that it is not censored by the schedule, and a mean of it
would hide that a policy verifies the promising drafts of some rounds and requests and leaves out the others. Whether survival
is calibrated is for the calibration to keep up, which needs outcomes that no schedule has selected. So in a small share of the
rounds, drawn beforehand, the drafter runs whatever was decided (while nothing is drafted nothing is learnt), and one request,
drawn as well, is verified in full.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.prefix_ranking import cleaned, rank, require_survival
from dspark_jax.step_curve import CostCurve, mean_context
from dspark_jax.typing import Array, Bool, Float, Int, UInt32, typed
from pallas_kernels.noise import Stream, round_key, site_key, uniform

# Under an id that no request has: probes share no bits with any draw.
NO_REQUEST = 2**31 - 1
UNKNOWN, NOBODY = -1, -2


@struct.dataclass
class DraftHistory:
    """The last drafted rounds, the newest first: B of them, R requests each.

    Attributes:
      survival: as the rounds showed it; the planner's constants where there was no round yet.
      request_id: whose it was; `UNKNOWN` for the constants, `NOBODY` for requests that were not active.
      round: rounds of the batch so far, drafted or not: what the probe's bits are made from.
    """

    survival: Float[Array, "B R G"]
    request_id: Int[Array, "B R"]
    round: Int[Array, ""]


@struct.dataclass
class DraftPlan:
    """The decision on one round.

    Attributes:
      draft_length: 0..G; 0 leaves the drafter out.
      probe: the request whose drafts are all to be verified, so that its outcome is censored by nothing; at most one, and then
        `draft_length` is G.
    """

    draft_length: Int[Array, ""]
    probe: Bool[Array, "R"]


@dataclass(frozen=True)
class DraftPlanner:
    """The draft length that gains most over plain decoding.

    One number for the batch, because a drafter's pass is over all requests; which request gets how many of the drafts verified is
    the policy's part. With no drafter in a round its commits may wait: the loop keeps the target's features of the tokens emitted
    since, and commits them in one batch before the next drafted round. `undrafted` is what such a round costs.

    Seconds are paid for in tokens, at the rate at which plain decoding would have emitted them: at that price drafting pays if, on
    average over rounds like the last ones, what it adds exceeds what it costs. (A sum of tokens over a sum of seconds is raised by
    a round whose own ratio is below it, if the round has more tokens than its seconds are worth; means of ratios do not say so.)

    Attributes:
      curve: cost of a round; its `draft_seconds` are those of a drafted round whatever its length.
      constants: survival per position, never rising (one per draft): what is expected before anything is known.
      seconds_per_draft: what each drafted position costs more, for loops that draft no more than is planned; 0 elsewhere.
      undrafted: cost of a round in which nothing is drafted: its pass has one token per request, and attention one query; its
        `draft_seconds` are the round's share of later commits. None: what `curve` says of so many tokens, without its `draft_seconds`.
      memory: blocks remembered, at least; always whole rounds.
      foreign: weight of every remembered round, to which the share of its requests that are active is added.
      probe_share: share of the rounds with a probe, in 0..1; less where such a round costs more than two of plain decoding, so that
        probes take no more than this share of the time.
      margin: tokens per active request by which a round with drafts must promise more than one without: at an even balance nothing
        flips from round to round.
    """

    curve: CostCurve
    constants: tuple[float, ...]
    seconds_per_draft: float = 0.0
    undrafted: CostCurve | None = None
    memory: int = 64
    foreign: float = 0.05
    probe_share: float = 0.004
    margin: float = 0.0

    def __post_init__(self) -> None:
        require_survival("constants", self.constants)
        for name in ("foreign", "probe_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are numbers from 0 to 1")
        for name in ("seconds_per_draft", "margin"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are finite numbers of at least 0")
        if self.memory < 1:
            raise ValueError(f"memory is {self.memory}; allowed are integers of at least 1")

    def init_history(self, num_rows: int) -> DraftHistory:
        """Nothing seen."""
        num_rounds = -(-self.memory // num_rows)
        constants = jnp.asarray(self.constants, jnp.float32)
        return DraftHistory(
            survival=jnp.broadcast_to(constants, (num_rounds, num_rows, len(self.constants))),
            request_id=jnp.full((num_rounds, num_rows), UNKNOWN, jnp.int32),
            round=jnp.int32(0),
        )

    @typed
    def plan(
        self,
        history: DraftHistory,
        active: Bool[Array, "R"],
        context: Int[Array, "R"],
        request_id: Int[Array, "R"],
        seed: UInt32[Array, "2"],
    ) -> DraftPlan:
        """How many tokens to draft in the coming round. Reads nothing of that round but who takes part.

        Every remembered round is scaled to as many requests as there are now and given the best number of verified tokens for
        each draft length; rounds count by how many of their requests are still here. The smallest length of the largest gain is
        taken, and 0 unless the gain exceeds `margin`.
        """
        num_rows, block_size = active.shape[0], len(self.constants)
        num_active = jnp.sum(active.astype(jnp.int32))
        at = mean_context(context, active)
        # inf beyond the largest bucket.
        seconds = 1 / self.curve.rates(num_rows * (block_size + 1), at)
        if self.undrafted is None:
            plain_seconds = seconds[num_active] - self.curve.draft_seconds
        else:
            plain_seconds = 1 / self.undrafted.rates(num_rows, at)[num_active]
        price = num_active.astype(jnp.float32) / plain_seconds
        length = jnp.arange(1, block_size + 1, dtype=jnp.int32)
        longer = length.astype(jnp.float32) * self.seconds_per_draft

        def gain(survival: Float[Array, "R G"], was_active: Bool[Array, "R"]) -> Float[Array, "G"]:
            """Tokens of one round like this one, beyond plain decoding and what its seconds are worth, for every draft length from 1 on."""
            ranking = rank(survival, was_active)
            scale = num_active.astype(jnp.float32) / jnp.maximum(jnp.sum(was_active.astype(jnp.float32)), 1.0)
            # One ranking for all draft lengths: those that a shorter block does not have are passed over.
            drafted = ranking.is_candidate & (ranking.position < length[:, None])
            tokens = jnp.ceil(scale * jnp.cumsum(drafted.astype(jnp.float32), axis=1)).astype(jnp.int32)
            tokens = jnp.minimum(num_active + tokens, seconds.shape[0] - 1)
            added = scale * jnp.cumsum(jnp.where(drafted, ranking.survival, 0.0), axis=1)
            best = jnp.maximum(jnp.max(added - price * seconds[tokens], axis=1), -price * seconds[num_active])
            return best + price * (plain_seconds - longer)

        was_active = history.request_id != NOBODY
        here = jnp.any((history.request_id[:, :, None] == request_id) & active, axis=2)
        shares = jnp.sum(here.astype(jnp.float32), axis=1) / jnp.maximum(jnp.sum(was_active.astype(jnp.float32), axis=1), 1.0)
        weight = shares + self.foreign
        # Where strangers count for nothing and nobody is known, all count alike.
        weight = jnp.where(jnp.sum(weight) > 0, weight, 1.0)
        gains = jnp.sum(weight[:, None] * jax.vmap(gain)(history.survival, was_active), axis=0) / jnp.sum(weight)
        best = jnp.argmax(gains).astype(jnp.int32)
        planned = jnp.where(gains[best] > self.margin * num_active.astype(jnp.float32), best + 1, 0)
        probe_key = round_key(seed, NO_REQUEST, history.round)
        # Of a round with a probe: its drafts come on top of a token per request, and their seconds on top of those of plain decoding.
        probe_seconds = seconds[jnp.minimum(num_active + block_size, seconds.shape[0] - 1)] + block_size * self.seconds_per_draft
        share = self.probe_share * jnp.minimum(plain_seconds / jnp.maximum(probe_seconds - plain_seconds, plain_seconds), 1.0)
        is_probe = uniform(site_key(probe_key, Stream.PROBE, 0), 0, 0) < share
        # By the order of ids and not of slots: who is a probe does not depend on where it sits.
        before = jnp.sum((active & (request_id < request_id[:, None])).astype(jnp.int32), axis=1)
        drawn = uniform(site_key(probe_key, Stream.PROBE, 1), 0, 0) * num_active.astype(jnp.float32)
        probe = is_probe & active & (before == drawn.astype(jnp.int32))
        return DraftPlan(draft_length=jnp.where(is_probe, jnp.int32(block_size), planned), probe=probe)

    @typed
    def observe(
        self,
        history: DraftHistory,
        survival: Float[Array, "R G"],
        draft_length: Int[Array, ""],
        active: Bool[Array, "R"],
        request_id: Int[Array, "R"],
    ) -> DraftHistory:
        """The history with one more round, if it was drafted. What lies behind `draft_length` is taken to fall as the constants do."""
        position = jnp.arange(survival.shape[1], dtype=jnp.int32)
        shown, usual = cleaned(survival), jnp.asarray(self.constants, jnp.float32)
        last = jnp.maximum(draft_length - 1, 0)
        fall = jnp.where(usual[last] > 0, usual / jnp.where(usual[last] > 0, usual[last], 1.0), 0.0)
        shown = jnp.where(position < draft_length, shown, shown[:, last, None] * fall)
        ids = jnp.where(active, request_id, NOBODY)
        drafted = draft_length > 0
        return DraftHistory(
            survival=jnp.where(drafted, jnp.concatenate([shown[None], history.survival[:-1]]), history.survival),
            request_id=jnp.where(drafted, jnp.concatenate([ids[None], history.request_id[:-1]]), history.request_id),
            round=history.round + 1,
        )
