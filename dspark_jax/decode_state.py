"""What decoding works on: the plan of a run, its parameters, and the state that rounds hand on."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

from flax import struct

from dspark_jax.block_verify import verify_block
from dspark_jax.calibration_online import OnlineCalibration
from dspark_jax.draft_planning import DraftHistory, DraftPlanner
from dspark_jax.protocols import (
    Committed,
    Drafter,
    StatefulPolicy,
    SurvivalModel,
    Target,
    TargetHead,
    Verdict,
    VerifyPolicy,
)
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.typing import Array, Bool, Int, Params, UInt32
from dspark_jax.verify import verify_tokens
from pallas_kernels.dispatch import Backend

VERIFIERS: Mapping[str, Callable[..., Verdict]] = {"token": verify_tokens, "block": verify_block}


@dataclasses.dataclass(frozen=True)
class DecodePlan:
    """Who decodes, and how: everything about a decoding run that is static under jit.

    Attributes:
      target: the model whose law the output has.
      drafter: None for plain decoding, one token a round.
      policy: how many drafts are verified; only read where there is a drafter. What a stateful one remembers is in the state.
      survival: turns the drafter's confidence into the survival that the policy reads.
      verifier: "token": every draft is judged by itself; "block": the block is judged jointly, which keeps at least as many drafts.
      planner: decides before each round whether the drafter runs at all; None: it always does.
      backend: who judges drafts token by token, see `pallas_kernels.dispatch`; block verification is plain JAX.
      ladder: ascending numbers N of flat tokens that a verification may run on; None for R x (G + 1) alone.
    """

    target: Target
    drafter: Drafter | None = None
    policy: VerifyPolicy | StatefulPolicy | None = None
    survival: SurvivalModel | None = None
    ladder: tuple[int, ...] | None = None
    verifier: Literal["token", "block"] = "token"
    planner: DraftPlanner | None = None
    backend: Backend = "auto"

    def __post_init__(self) -> None:
        if self.drafter is not None and (self.policy is None or self.survival is None):
            raise ValueError("policy or survival is None; a plan with a drafter needs both")
        if self.verifier not in VERIFIERS:
            raise ValueError(f"verifier is {self.verifier!r}; allowed: {', '.join(VERIFIERS)}")
        if self.verifier == "block" and self.backend not in ("auto", "xla"):
            raise ValueError(
                f"backend is {self.backend!r} with verifier 'block'; allowed are auto and xla, for there are no kernels for it"
            )
        if self.planner is not None and self.drafter is None:
            raise ValueError("drafter is None; a plan with a planner needs one")
        if self.planner is not None and len(self.planner.constants) != self.block_size:
            raise ValueError(
                f"planner has {len(self.planner.constants)} constants; allowed is one per draft, of which there are {self.block_size}"
            )
        if self.ladder is not None and (not self.ladder or min(self.ladder) < 1 or list(self.ladder) != sorted(set(self.ladder))):
            raise ValueError(f"ladder is {self.ladder}; it must be ascending positive token counts, or None")

    @property
    def block_size(self) -> int:
        """G; 0 for plain decoding."""
        return 0 if self.drafter is None else self.drafter.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        return () if self.drafter is None else self.drafter.taps

    def buckets(self, num_rows: int) -> tuple[int, ...]:
        """The ladder for `num_rows` requests.

        Raises:
          ValueError: where its largest bucket is too small for all requests with all drafts.
        """
        most = num_rows * (self.block_size + 1)
        if self.ladder is None:
            return (most,)
        if self.ladder[-1] < most:
            raise ValueError(
                f"ladder is {self.ladder}; its last bucket must hold {num_rows} requests x (1 + {self.block_size} drafts) = {most}"
            )
        return self.ladder


@struct.dataclass
class DecodeParams:
    """Parameters of a run. `draft_head` is the target's head restricted to the draft vocabulary; `drafter` is empty without one."""

    target: Params
    head: TargetHead
    drafter: Params
    draft_head: TargetHead

    @classmethod
    def of(
        cls, target: Target, target_params: Params, drafter_params: Params | None = None, draft_ids: Int[Array, "Vd"] | None = None
    ) -> "DecodeParams":
        """Collect the parameters and cut the head to `draft_ids`."""
        head = target.head(target_params)
        return cls(target_params, head, {} if drafter_params is None else drafter_params, head.restrict(draft_ids))


@struct.dataclass
class OwnNoise:
    """What the random bits of requests are made from, where each brings a seed of its own.

    Attributes:
      seed: keys, as `pallas_kernels.noise.seed_key` makes them.
      sample: tells apart requests of one seed.
    """

    seed: UInt32[Array, "R 2"]
    sample: Int[Array, "R"]


@struct.dataclass
class DecodeState:
    """All requests of a batch between two rounds.

    Attributes:
      ids: committed tokens (prompt and answer) from position 0 on; what lies beyond `length` means nothing.
      length: committed tokens, the anchor counted.
      prompt_length: tokens of the prompt.
      limit: length at which the token budget is used up.
      stop_ids: tokens that end the request, padded with -1.
      finished: the request ended by a stop token or its budget; it takes no part in further rounds.
      request_id, round: what the request's random bits are made from; the round counter is the request's own.
      seed: key of the run's seed.
      sampling: settings of every request.
      target_cache, drafter_state: what both models keep of the text; see the top of `decode.py`.
      policy_state: what a stateful policy remembers of earlier rounds; None for others.
      draft_history: what the plan's `planner` remembers of earlier rounds; None without one.
      deferred: what rounds without drafts committed and the drafter has not been told yet; None without a planner.
      own_noise: stands in for `seed` and `request_id` where random bits are made; None: those are used.
      calibration: learned from the rounds and used in the place of the plan's `survival`; None: not.
    """

    ids: Int[Array, "R T"]
    length: Int[Array, "R"]
    prompt_length: Int[Array, "R"]
    limit: Int[Array, "R"]
    stop_ids: Int[Array, "R K"]
    finished: Bool[Array, "R"]
    request_id: Int[Array, "R"]
    round: Int[Array, "R"]
    seed: UInt32[Array, "2"]
    sampling: Sampling
    target_cache: Any
    drafter_state: Any
    policy_state: Any = None
    draft_history: DraftHistory | None = None
    deferred: Committed | None = None
    calibration: OnlineCalibration | None = None
    own_noise: OwnNoise | None = None

    @property
    def noise(self) -> Noise:
        """Keys of the coming round of every request."""
        own = self.own_noise
        root, name = (self.seed, self.request_id) if own is None else (own.seed, own.sample)
        return Noise.of_round(root, name, self.round)
