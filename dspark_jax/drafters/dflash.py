"""The DFlash drafter: the parallel backbone alone, every token drawn independently of the others (one of DSpark's rivals).

Two layouts are called DFlash. The DSpark reference compares against "anchor_first" (G slots predict G tokens, as in DSpark itself),
the original work has "anchor_plus_masks" (G + 1 slots); the config's `layout` says which, and a drafter of one is not the other.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.drafters.block_drafter import BlockConfig, BlockDrafter, compute_dtype
from dspark_jax.drafters.draft_draw import draw_independent
from dspark_jax.drafters.draft_scores import score_logits
from dspark_jax.drafters.dspark import DSparkConfig, DSparkDrafter
from dspark_jax.kv_cache import KVCache
from dspark_jax.protocols import DraftBlock, Sites, TargetHead, TrainBatch
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.typing import Array, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class DFlashConfig(BlockConfig):
    """Backbone sizes; there are no heads. Train it with `DraftLossConfig(ce=1, l1=0, confidence=0)`, as the reference does."""


@dataclasses.dataclass(frozen=True)
class DFlashDrafter(BlockDrafter):
    """DFlash as a `protocols.Drafter`."""

    config: DFlashConfig

    def with_confidence(self) -> DSparkDrafter:
        """The same backbone with a confidence head: a DSpark without a sequential head."""
        fields: dict[str, Any] = {field.name: getattr(self.config, field.name) for field in dataclasses.fields(BlockConfig)}
        fields |= {"markov_rank": 0, "confidence_with_markov": False, "confidence_score": None}
        return DSparkDrafter(DSparkConfig(**fields))

    def propose(
        self, params: Params, head: TargetHead, state: KVCache, anchor: Int[Array, "R"], noise: Noise, sampling: Sampling
    ) -> DraftBlock:
        """One backbone pass, then all G tokens at once."""
        hidden = self._block_hidden(params, head, state, anchor)
        with jax.named_scope("draft_base_logits"):
            logits = head.logits(hidden)
        with jax.named_scope("draft_tokens"):
            ids, log_q, normaliser, floor, logits = draw_independent(logits, head, sampling, noise)
        score = self.config.confidence_score
        confidence = None if score is None else score_logits(logits, score)
        return DraftBlock(ids, log_q, normaliser, floor, confidence, logits)

    def prediction_sites(self, params: Params, head: TargetHead, batch: TrainBatch) -> Sites:
        """All blocks of a batch in one pass."""
        hidden, targets = self._train_hidden(params, head, batch)
        latent = jnp.zeros((*targets.labels.shape, 0), compute_dtype(params))
        return self._sites(batch, hidden, targets, latent, None)

    def site_logits(
        self, params: Params, head: TargetHead, hidden: Float[Array, "P D"], latent: Float[Array, "P M"]
    ) -> Float[Array, "P Vd"]:
        """Draft logits of a chunk of sites, float32."""
        return head.logits(hidden)
