"""Whether to draft at all, and how many tokens: decided before the drafter runs, from past rounds alone.

Verifying less saves nothing of what drafting costs. On requests that are hard to predict, and under full load, that cost does not
come back; then the round is better run without the drafter. What past rounds say is the calibrated survival that they showed:
every drafted round shows it for all positions, verified or not, so that the average is not censored by the schedule (whether it is
calibrated is for the calibration to keep up, and needs the outcomes of probe rounds). While nothing is drafted nothing is
learnt; a small share of probe rounds drafts in full whatever was decided.
"""

from dataclasses import dataclass

import jax.numpy as jnp
from flax import struct

from dspark_jax.prefix_ranking import cleaned, rank
from dspark_jax.step_curve import StepCurve, mean_context
from dspark_jax.typing import Array, Bool, Float, Int, UInt32, typed
from pallas_kernels.noise import Stream, round_key, threefry2x32, uniform

# Behind the streams of a request's own draws, and under an id that no request has: probes share no bits with any draw.
PROBE_STREAM = max(Stream) + 1
NO_REQUEST = 2**31 - 1


@struct.dataclass
class DraftHistory:
    """What past rounds showed, per slot and position, older rounds weighing less.

    Attributes:
      survival: weighted sum of the survival of the rounds that drafted the position.
      weight: sum of the weights of those rounds.
      request_id: whom the slot's numbers are of; -1 for nobody.
      round: rounds of the batch so far, drafted or not: what the probe's bits are made from.
    """

    survival: Float[Array, "R G"]
    weight: Float[Array, "R G"]
    request_id: Int[Array, "R"]
    round: Int[Array, ""]


@struct.dataclass
class DraftPlan:
    """The decision on one round.

    Attributes:
      draft_length: 0..G; 0 leaves the drafter out.
      is_probe: the round drafts in full to learn; verified in full as well, its outcomes are censored by nothing.
    """

    draft_length: Int[Array, ""]
    is_probe: Bool[Array, ""]


@dataclass(frozen=True)
class DraftPlanner:
    """The draft length of the best expected throughput of the whole batch.

    One number for the batch, because a drafter's pass is over all requests; which request gets how many of the drafts verified is
    the policy's part. With no drafter in a round its commits may wait: the loop keeps the target's features of the tokens emitted
    since, and commits them in one batch before the next drafted round. What that costs per round is `undrafted_seconds`.

    Attributes:
      curve: cost of a round; its `draft_seconds` are those of a drafted round whatever its length.
      constants: survival per position, never rising (one per draft): what is expected of a request before anything is known of it.
      seconds_per_draft: what each drafted position costs more; 0 for drafters that write their block in one pass.
      undrafted_seconds: of a round beside the target's step where nothing is drafted.
      decay: weight of a drafted round against the one after it, in 0..1.
      prior_weight: drafted rounds that `constants` count for.
      probe_share: share of the rounds that are probes, in 0..1.
      margin: by how much a round with drafts must promise more than one without: at an even balance nothing flips from round to round.
    """

    curve: StepCurve
    constants: tuple[float, ...]
    seconds_per_draft: float = 0.0
    undrafted_seconds: float = 0.0
    decay: float = 0.95
    prior_weight: float = 1.0
    probe_share: float = 0.02
    margin: float = 0.0

    def __post_init__(self) -> None:
        in_order = (1.0, *self.constants, 0.0)
        if not self.constants or any(not later <= earlier for earlier, later in zip(in_order, in_order[1:], strict=False)):
            raise ValueError(f"constants is {self.constants}; allowed are numbers from 1 down to 0 that never rise, one per draft")
        for name in ("decay", "probe_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are numbers from 0 to 1")
        for name in ("seconds_per_draft", "undrafted_seconds", "margin"):
            if not 0 <= getattr(self, name) < float("inf"):
                raise ValueError(f"{name} is {getattr(self, name)}; allowed are finite numbers of at least 0")
        if not 0 < self.prior_weight < float("inf"):
            raise ValueError(f"prior_weight is {self.prior_weight}; allowed are finite positive numbers")

    def init_history(self, num_rows: int) -> DraftHistory:
        """Nothing seen."""
        return DraftHistory(
            survival=jnp.zeros((num_rows, len(self.constants)), jnp.float32),
            weight=jnp.zeros((num_rows, len(self.constants)), jnp.float32),
            request_id=jnp.full((num_rows,), -1, jnp.int32),
            round=jnp.int32(0),
        )

    @typed
    def expected_survival(self, history: DraftHistory, request_id: Int[Array, "R"]) -> Float[Array, "R G"]:
        """Survival to be expected of every request: what it showed, drawn towards `constants`; these alone for newcomers."""
        shown, weight = _of_request(history, request_id)
        return (shown + self.prior_weight * jnp.asarray(self.constants, jnp.float32)) / (weight + self.prior_weight)

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

        For every draft length d the throughput of the best number of verified tokens among positions 1..d, drafting cost
        included; the smallest best d is taken, and 0 unless the gain over it exceeds `margin`.
        """
        num_rows, block_size = active.shape[0], len(self.constants)
        survival = self.expected_survival(history, request_id)
        position = jnp.arange(block_size, dtype=jnp.int32)
        num_active = jnp.sum(active.astype(jnp.int32))
        at = mean_context(context, active)
        rate = self.curve.rates(num_rows * (block_size + 1), at)
        # inf beyond the largest bucket; the drafting of the curve is taken out, to be put in for drafted lengths alone.
        seconds = 1 / rate - self.curve.draft_seconds
        throughput = []
        for length in range(block_size + 1):
            expected = rank(jnp.where(position < length, survival, 0.0), active, request_id).expected_tokens(num_active)
            tokens = jnp.minimum(num_active + jnp.arange(expected.shape[0], dtype=jnp.int32), rate.shape[0] - 1)
            rest = self.curve.draft_seconds + length * self.seconds_per_draft if length else self.undrafted_seconds
            throughput.append(jnp.max(expected / (seconds[tokens] + rest)))
        plain, best = throughput[0], jnp.argmax(jnp.stack(throughput)).astype(jnp.int32)
        pays = jnp.stack(throughput)[best] > plain * (1 + self.margin)
        probe_key = round_key(seed, NO_REQUEST, history.round)
        is_probe = uniform(threefry2x32(probe_key, PROBE_STREAM, 0), 0, 0) < self.probe_share
        planned = jnp.where(pays, best, 0)
        return DraftPlan(draft_length=jnp.where(is_probe, jnp.int32(block_size), planned), is_probe=is_probe)

    @typed
    def observe(
        self,
        history: DraftHistory,
        survival: Float[Array, "R G"],
        draft_length: Int[Array, ""],
        active: Bool[Array, "R"],
        request_id: Int[Array, "R"],
    ) -> DraftHistory:
        """The history with one more round: of positions behind `draft_length`, nothing was seen and nothing is forgotten."""
        position = jnp.arange(survival.shape[1], dtype=jnp.int32)
        seen = active[:, None] & (position < draft_length)
        shown, weight = _of_request(history, request_id)
        return DraftHistory(
            survival=jnp.where(seen, self.decay * shown + cleaned(survival), shown),
            weight=jnp.where(seen, self.decay * weight + 1.0, weight),
            request_id=request_id,
            round=history.round + 1,
        )


def _of_request(history: DraftHistory, request_id: Int[Array, "R"]) -> tuple[Float[Array, "R G"], Float[Array, "R G"]]:
    """Survival and weight of the requests that are now in the slots; zeros of those that were not there before."""
    known = (history.request_id == request_id)[:, None]
    return jnp.where(known, history.survival, 0.0), jnp.where(known, history.weight, 0.0)
