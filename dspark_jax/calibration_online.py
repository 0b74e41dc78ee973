"""Survival learned while serving, from past rounds alone, with exponential forgetting and without the bias of censoring.

A round shows whether draft k survives only where its verified length reached k: what was not verified was not rejected. Two estimates
are kept, both built from conditional acceptances (the product-limit estimator of Kaplan and Meier, 1958):

- given the confidence, in bins: all rounds that reached k count. A policy that stops at low confidence chooses between bins (and a
  bin is narrow), so within a bin the verified drafts are like the others;
- whatever the confidence: only probe rounds count, whose length was fixed before drafting. Rounds that such a policy let go on are
  the promising ones, and their mean would be too high.

Axes beside the legend: E temperatures of the sampler, X bins of the confidence.
"""

from collections.abc import Sequence

import jax.numpy as jnp
from flax import struct

from dspark_jax.protocols import DraftBlock, SurvivalModel
from dspark_jax.typing import Array, Bool, Float, Int, typed

EDGES = tuple(-5.0 + 0.5 * step for step in range(21))
"""Default borders between the bins of confidence logits."""


@struct.dataclass
class OnlineCalibration:
    """What past rounds showed, per sampler temperature; a SurvivalModel itself, to be handed to jitted functions as an array value.

    Attributes:
      at: temperatures of the sampler, ascending; each request counts for, and uses, the nearest (the lower one, half-way).
      edges: borders between the bins, ascending; a logit on a border belongs to the bin above.
      prior, usual: chances before any round was seen: that a draft is accepted given its confidence, or whatever its confidence,
        and given that the drafts before it were accepted.
      reached, accepted: rounds whose verified length reached k with all drafts before k accepted, and those of them that accepted k,
        by the bin of c_k; forgotten exponentially.
      probe_reached, probe_accepted: the same of probe rounds, whatever their confidence.
      half_life: rounds of requests of a temperature after which an earlier one of that temperature counts half; inf: no forgetting.
      prior_rounds: so many rounds does a prior count for, in each bin. It is the only bias towards the prior.
    """

    at: Float[Array, "E"]
    edges: Float[Array, "X-1"]
    prior: Float[Array, "E G X"]
    usual: Float[Array, "E G"]
    reached: Float[Array, "E G X"]
    accepted: Float[Array, "E G X"]
    probe_reached: Float[Array, "E G"]
    probe_accepted: Float[Array, "E G"]
    half_life: Float[Array, ""]
    prior_rounds: Float[Array, ""]

    @classmethod
    def create(
        cls,
        model: SurvivalModel,
        continuation: Sequence[Sequence[float]],
        at: Sequence[float] = (0.0,),
        half_life: float = 20_000.0,
        prior_rounds: float = 4.0,
        edges: Sequence[float] = EDGES,
    ) -> "OnlineCalibration":
        """Nothing seen yet: survival is that of `model`, fitted before, at the middle of every bin.

        Args:
          continuation: for every temperature, the usual chance per position that a draft is accepted given that those before it were.

        Raises:
          ValueError: a value outside its range, or numbers of entries that do not agree.
        """
        if not at or any(later <= earlier for earlier, later in zip((-1.0, *at), at, strict=False)) or at[0] < 0:
            raise ValueError(f"at is {tuple(at)}; allowed are sampler temperatures of at least 0 in strictly ascending order")
        if len(continuation) != len(at) or len({len(chances) for chances in continuation}) != 1 or not continuation[0]:
            sizes = [len(chances) for chances in continuation]
            raise ValueError(f"continuation has {sizes} entries; allowed is one per draft for each of the {len(at)} temperatures")
        if not all(0 <= chance <= 1 for chances in continuation for chance in chances):
            raise ValueError(f"continuation is {continuation}; allowed are numbers from 0 to 1")
        if not half_life > 0:
            raise ValueError(f"half_life is {half_life}; allowed are numbers above 0, inf included")
        if not 0 < prior_rounds < float("inf"):
            raise ValueError(f"prior_rounds is {prior_rounds}; allowed are finite numbers above 0")
        if not edges or any(later <= earlier for earlier, later in zip(edges, edges[1:], strict=False)):
            raise ValueError(f"edges is {tuple(edges)}; allowed are borders in strictly ascending order, one or more")
        block_size, num_bins = len(continuation[0]), len(edges) + 1
        borders = jnp.asarray([edges[0] - 1.0, *edges, edges[-1] + 1.0], jnp.float32)
        logits = jnp.broadcast_to(((borders[1:] + borders[:-1]) / 2)[:, None], (num_bins, block_size))
        zeros = jnp.zeros((num_bins, block_size), jnp.float32)
        block = DraftBlock(zeros.astype(jnp.int32), zeros, zeros, zeros, logits, None)
        prior = jnp.stack([_conditional(model.survival(block, jnp.full((num_bins,), each, jnp.float32))).T for each in at])
        bins, places = jnp.zeros(prior.shape, jnp.float32), jnp.zeros(prior.shape[:2], jnp.float32)
        return cls(
            at=jnp.asarray(at, jnp.float32),
            edges=jnp.asarray(edges, jnp.float32),
            prior=prior,
            usual=jnp.asarray(continuation, jnp.float32),
            reached=bins,
            accepted=bins,
            probe_reached=places,
            probe_accepted=places,
            half_life=jnp.float32(half_life),
            prior_rounds=jnp.float32(prior_rounds),
        )

    @typed
    def update(
        self,
        confidence_logits: Float[Array, "R G"],
        verified: Int[Array, "R"],
        num_accepted: Int[Array, "R"],
        active: Bool[Array, "R"],
        temperature: Float[Array, "R"],
        probe: Bool[Array, "R"] | None = None,
        emitted: Int[Array, "R"] | None = None,
    ) -> "OnlineCalibration":
        """The state with one more round of every active request (the fields of `RoundStats`).

        Args:
          probe: rounds whose length was chosen at random before drafting, whatever the request's past and the confidence;
            none where None.
          emitted: tokens after cuts: drafts behind a stop token are text that nobody asked for, and do not count. Where None, no
            round was cut.
        """
        row_class = self._nearest(temperature)
        place = jnp.arange(confidence_logits.shape[1], dtype=jnp.int32)
        reached = active[:, None] & (place < verified[:, None]) & (place <= num_accepted[:, None])
        if emitted is not None:
            reached &= place < emitted[:, None]
        accepted = (reached & (place < num_accepted[:, None])).astype(jnp.float32)
        reached = reached.astype(jnp.float32)
        by_bin = (row_class[:, None], place, self._bin(confidence_logits))
        scored = (~jnp.isnan(confidence_logits)).astype(jnp.float32)
        of_class = (row_class == jnp.arange(self.at.shape[0], dtype=jnp.int32)[:, None]).astype(jnp.float32)
        keep = 0.5 ** (of_class @ active.astype(jnp.float32) / self.half_life)
        from_probe = jnp.zeros_like(reached) if probe is None else jnp.broadcast_to(probe[:, None].astype(jnp.float32), reached.shape)
        return self.replace(  # pyright: ignore[reportAttributeAccessIssue]
            reached=(self.reached * keep[:, None, None]).at[by_bin].add(reached * scored),
            accepted=(self.accepted * keep[:, None, None]).at[by_bin].add(accepted * scored),
            probe_reached=self.probe_reached * keep[:, None] + of_class @ (reached * from_probe),
            probe_accepted=self.probe_accepted * keep[:, None] + of_class @ (accepted * from_probe),
        )

    @property
    def conditional(self) -> Float[Array, "E G X"]:
        """Per bin of c_k, the chance that draft k is accepted given that those before it were."""
        return (self.accepted + self.prior_rounds * self.prior) / (self.reached + self.prior_rounds)

    @property
    def continuation(self) -> Float[Array, "E G"]:
        """Per position, the chance that a draft is accepted given that those before it were, whatever their confidence."""
        return (self.probe_accepted + self.prior_rounds * self.usual) / (self.probe_reached + self.prior_rounds)

    @typed
    def survival(self, block: DraftBlock, temperature: Float[Array, "R"]) -> Float[Array, "R G"]:
        """The product of the conditional chances at the confidence of each draft; 0 from a NaN on.

        Raises:
          ValueError: the block has no confidence logits (then `usual_survival` is what is known), or not as many drafts.
        """
        logits = block.confidence_logits
        if logits is None:
            raise ValueError("confidence_logits is None: this drafter has neither head nor score; allowed is usual_survival")
        if logits.shape[1] != self.prior.shape[1]:
            raise ValueError(
                f"the block has {logits.shape[1]} drafts; allowed are as many as the state was made for, {self.prior.shape[1]}"
            )
        place = jnp.arange(logits.shape[1], dtype=jnp.int32)
        chances = self.conditional[self._nearest(temperature)[:, None], place, self._bin(logits)]
        return jnp.cumprod(jnp.where(jnp.isnan(logits), 0.0, chances), axis=1)

    @typed
    def usual_survival(self, temperature: Float[Array, "R"]) -> Float[Array, "R G"]:
        """Survival whatever the confidence, of the temperature of each row: the running product of `continuation`."""
        return jnp.cumprod(self.continuation, axis=1)[self._nearest(temperature)]

    def _nearest(self, temperature: Float[Array, "R"]) -> Int[Array, "R"]:
        return jnp.argmin(jnp.abs(temperature[:, None] - self.at), axis=1).astype(jnp.int32)

    def _bin(self, logits: Float[Array, "R G"]) -> Int[Array, "R G"]:
        # NaN falls into some bin and is masked by whoever asks.
        return jnp.sum((logits[:, :, None] >= self.edges).astype(jnp.int32), axis=2)


def _conditional(survival: Float[Array, "R G"]) -> Float[Array, "R G"]:
    before = jnp.concatenate([jnp.ones_like(survival[:, :1]), survival[:, :-1]], axis=1)
    return jnp.where(before > 0, survival / jnp.where(before > 0, before, 1.0), 0.0)
