"""The DSpark drafter: parallel backbone, sequential head, confidence head (DeepSeek and Peking University, 2026)."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.drafters.block_drafter import BlockConfig, BlockDrafter, apply, compute_dtype
from dspark_jax.drafters.confidence_head import ConfidenceHead
from dspark_jax.drafters.draft_draw import as_block, draw_independent, filters_of
from dspark_jax.drafters.draft_scores import require_score, score_logits
from dspark_jax.drafters.sequential_heads import HEADS
from dspark_jax.kv_cache import KVCache
from dspark_jax.moe import MoEConfig
from dspark_jax.protocols import DraftBlock, Sites, TargetHead, TrainBatch
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.typing import Array, Float, Int, Params
from pallas_kernels.dispatch import Backend
from pallas_kernels.markov_sample import Draft, latent_sample, markov_block


@dataclasses.dataclass(frozen=True)
class DSparkConfig(BlockConfig):
    """Backbone sizes and the two heads. Defaults are the paper's.

    Attributes:
      markov_rank: M; 0 for no sequential head (tokens are then drafted independently).
      markov_head_type: name of the sequential head.
      confidence_head: whether there is one.
      confidence_with_markov: whether it also reads W1[x_{k-1}].
      detach_confidence: keep the confidence loss away from the backbone and W1.
    """

    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    confidence_head: bool = True
    confidence_with_markov: bool = True
    detach_confidence: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_score(self.confidence_score, self.confidence_head)
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank is {self.markov_rank}; it must be 0 (no sequential head) or more")
        if self.markov_rank and self.markov_head_type not in HEADS:
            raise ValueError(f"markov_head_type is {self.markov_head_type!r}; known: {', '.join(sorted(HEADS))}")
        if self.confidence_head and self.confidence_with_markov and not self.markov_rank:
            raise ValueError("confidence_with_markov is True and markov_rank is 0; without a sequential head there is no Markov feature")


def deepseek_v4_draft_config(*, experts: MoEConfig, **fields: Any) -> DSparkConfig:
    """The variant deployed with DeepSeek-V4: 3 layers of experts, block 5, the last 128 positions as context, 4 residual streams.

    Attention is the backbone's own (V4's shared key-value latent, sinks and grouped output projection are not reproduced).

    Args:
      experts: the mixture of every layer.
      fields: of `DSparkConfig`: sizes, taps and mask token of the target, and what shall differ from the variant.
    """
    variant: dict[str, Any] = {"num_layers": 3, "block_size": 5, "window": 128, "streams": 4}
    given: dict[str, Any] = variant | {"intermediate_size": experts.intermediate_size} | fields
    return DSparkConfig(experts=experts, **given)


@dataclasses.dataclass(frozen=True)
class DSparkDrafter(BlockDrafter):
    """DSpark as a `protocols.Drafter`: three modules that know nothing of each other, composed by pure functions.

    Attributes:
      backend: who draws the tokens behind a sequential head, see `pallas_kernels.dispatch`.
    """

    config: DSparkConfig
    backend: Backend = "auto"

    @functools.cached_property
    def _markov(self) -> Any:
        config = self.config
        if not config.markov_rank:
            return None
        draft_vocab_size = config.draft_vocab_size or config.vocab_size
        return HEADS[config.markov_head_type](config.vocab_size, draft_vocab_size, config.markov_rank, config.hidden_size)

    @functools.cached_property
    def _confidence(self) -> ConfidenceHead | None:
        config = self.config
        if not config.confidence_head:
            return None
        rank = config.markov_rank if config.confidence_with_markov else 0
        return ConfidenceHead(config.hidden_size, rank, config.detach_confidence)

    def _boxed_init(self, rng: jax.Array) -> Any:
        config = self.config
        backbone_rng, markov_rng, confidence_rng = jax.random.split(rng, 3)
        params = super()._boxed_init(backbone_rng)
        hidden = jnp.zeros((1, config.hidden_size))
        if self._markov is not None:
            params["markov_head"] = self._markov.init(markov_rng, jnp.zeros((1,), jnp.int32), hidden)["params"]
        if self._confidence is not None:
            embedded = jnp.zeros((1, config.markov_rank)) if config.confidence_with_markov else None
            params["confidence_head"] = self._confidence.init(confidence_rng, hidden, embedded)["params"]
        return params

    def with_confidence(self) -> "DSparkDrafter":
        """The same drafter with a confidence head, which reads W1[x_{k-1}] too where there is a sequential head."""
        head = {"confidence_head": True, "confidence_with_markov": bool(self.config.markov_rank), "confidence_score": None}
        return dataclasses.replace(self, config=dataclasses.replace(self.config, **head))

    def propose(
        self, params: Params, head: TargetHead, state: KVCache, anchor: Int[Array, "R"], noise: Noise, sampling: Sampling
    ) -> DraftBlock:
        """One backbone pass, then the tokens left to right from U_k + B(x_{k-1}) (paper section 3.1)."""
        config = self.config
        hidden = self._block_hidden(params, head, state, anchor)
        # Tokens first where they are drawn one after another.
        with jax.named_scope("draft_base_logits"):
            base = head.logits(hidden if self._markov is None else hidden.swapaxes(0, 1))
        with jax.named_scope("draft_tokens"):
            if self._markov is None:
                draft = draw_independent(base, head, sampling, noise)
            else:
                draft = as_block(self._draw_tokens(params, head, anchor, hidden, base, noise, sampling), head)
        confidence = None
        if self._confidence is not None:
            embedded = None
            if self._markov is not None and config.confidence_with_markov:
                previous = jnp.concatenate([anchor[:, None], draft.ids[:, :-1]], axis=1)
                embedded = apply(self._markov, params["markov_head"], previous, method="embed")
            confidence = apply(self._confidence, params["confidence_head"], hidden, embedded)
        elif config.confidence_score is not None:
            confidence = score_logits(draft.logits, config.confidence_score)
        return DraftBlock(draft.ids, draft.log_q, draft.log_normaliser, draft.floor, confidence, draft.logits)

    def _draw_tokens(
        self,
        params: Params,
        head: TargetHead,
        anchor: Int[Array, "R"],
        hidden: Float[Array, "R G D"],
        base: Float[Array, "G R Vd"],
        noise: Noise,
        sampling: Sampling,
    ) -> Draft:
        """The tokens of a block left to right; fields [G, R], ids as columns."""
        markov, own = self._markov, params["markov_head"]
        w1, w2 = own["markov_w1"]["weight"], own["markov_w2"]["weight"]
        options: dict[str, Any] = {"filters": filters_of(sampling), "return_logits": True, "backend": self.backend}
        if markov.reads_last_token_alone:
            return markov_block(anchor, base, w1, w2, noise.key, sampling.temperature, draft_ids=head.draft_ids, **options)

        def draft_token(carry: tuple[Array, Any], position: tuple[Array, Array, Array]) -> tuple[tuple[Array, Any], Draft]:
            previous, head_carry = carry
            hidden_k, base_k, place = position
            embedded = apply(markov, own, previous, method="embed")
            latent, head_carry = apply(markov, own, head_carry, embedded, hidden_k, method="step")
            draft = latent_sample(latent, base_k, w2, noise.key, place, sampling.temperature, **options)
            return (draft.ids if head.draft_ids is None else head.draft_ids[draft.ids], head_carry), draft

        start = anchor, apply(markov, own, hidden[:, 0], method="first_carry")
        places = jnp.arange(self.config.block_size, dtype=jnp.int32)
        return jax.lax.scan(draft_token, start, (hidden.swapaxes(0, 1), base, places))[1]

    def prediction_sites(self, params: Params, head: TargetHead, batch: TrainBatch) -> Sites:
        """All blocks of a batch in one pass, with the true previous tokens, as the reference trains."""
        config = self.config
        hidden, targets = self._train_hidden(params, head, batch)
        latent, embedded = jnp.zeros((*targets.labels.shape, 0), compute_dtype(params)), None
        if self._markov is not None:
            embedded = apply(self._markov, params["markov_head"], targets.previous, method="embed")
            latent = apply(self._markov, params["markov_head"], embedded, hidden, method="block_latents")
        confidence = None
        if self._confidence is not None:
            feature = embedded if config.confidence_with_markov else None
            confidence = apply(self._confidence, params["confidence_head"], hidden, feature)
        return self._sites(batch, hidden, targets, latent, confidence)

    def site_logits(
        self, params: Params, head: TargetHead, hidden: Float[Array, "P D"], latent: Float[Array, "P M"]
    ) -> Float[Array, "P Vd"]:
        """U + B for a chunk of sites, float32."""
        logits = head.logits(hidden)
        if self._markov is None:
            return logits
        return logits + apply(self._markov, params["markov_head"], latent, method="bias")
