"""The DSpark drafter: parallel backbone, sequential head, confidence head (DeepSeek and Peking University, 2026)."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.drafters.block_backbone import BackboneConfig, BlockBackbone, block_ids, block_targets
from dspark_jax.drafters.confidence_head import ConfidenceHead
from dspark_jax.drafters.sequential_heads import HEADS
from dspark_jax.kv_cache import KVCache
from dspark_jax.protocols import Committed, DraftBlock, Sites, TargetHead, TrainBatch
from dspark_jax.sampling import Noise, Sampling, draw, logit_floor
from dspark_jax.sharding import Initialised
from dspark_jax.typing import Array, Float, Int, Params
from pallas_kernels.noise import Stream


@dataclasses.dataclass(frozen=True)
class DSparkConfig(BackboneConfig):
    """Backbone sizes and the two heads. Defaults are the paper's.

    Attributes:
      markov_rank: M; 0 for no sequential head (tokens are then drafted independently).
      markov_head_type: name of the sequential head.
      confidence_head: whether there is one.
      confidence_with_markov: whether it also reads W1[x_{k-1}].
      detach_confidence: keep the confidence loss away from the backbone and W1.
      draft_vocab_size: number of tokens that can be drafted; None for all.
      loss_decay: position weights exp(-k / loss_decay) in training; None for equal weights.
    """

    markov_rank: int = 256
    markov_head_type: str = "vanilla"
    confidence_head: bool = True
    confidence_with_markov: bool = True
    detach_confidence: bool = False
    draft_vocab_size: int | None = None
    loss_decay: float | None = 4.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.markov_rank < 0:
            raise ValueError(f"markov_rank is {self.markov_rank}; it must be 0 (no sequential head) or more")
        if self.markov_rank and self.markov_head_type not in HEADS:
            raise ValueError(f"markov_head_type is {self.markov_head_type!r}; known: {', '.join(sorted(HEADS))}")
        if self.confidence_head and self.confidence_with_markov and not self.markov_rank:
            raise ValueError("confidence_with_markov is True and markov_rank is 0; without a sequential head there is no Markov feature")
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; it must be in 1..{self.vocab_size}, or None for all")


@dataclasses.dataclass(frozen=True)
class DSparkDrafter(Initialised):
    """DSpark as a `protocols.Drafter`: three modules that know nothing of each other, composed by pure functions.

    Its state is the key-value cache of the injected context: positions below the anchor.
    """

    config: DSparkConfig

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @functools.cached_property
    def _backbone(self) -> BlockBackbone:
        return BlockBackbone(self.config)

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
        hidden = jnp.zeros((1, config.hidden_size))
        params = dict(
            self._backbone.init(
                backbone_rng,
                jnp.zeros((1, 1, config.block_size, config.hidden_size)),
                TrainBatch(
                    ids=jnp.zeros((1, 1), jnp.int32),
                    loss_mask=jnp.zeros((1, 1), bool),
                    features=jnp.zeros((1, 1, len(config.taps) * config.hidden_size)),
                    last_hidden=jnp.zeros((1, 1, config.hidden_size)),
                    anchors=jnp.zeros((1, 1), jnp.int32),
                    keep=jnp.ones((1, 1), bool),
                ),
                method="initialise",
            )["params"]
        )
        if self._markov is not None:
            params["markov_head"] = self._markov.init(markov_rng, jnp.zeros((1,), jnp.int32), hidden)["params"]
        if self._confidence is not None:
            embedded = jnp.zeros((1, config.markov_rank)) if config.confidence_with_markov else None
            params["confidence_head"] = self._confidence.init(confidence_rng, hidden, embedded)["params"]
        return params

    def init_state(self, num_rows: int, max_len: int, dtype: Any = jnp.float32) -> KVCache:
        """An empty context cache of `max_len` slots per request."""
        config = self.config
        return kv_cache.empty_cache(config.num_layers, num_rows, config.num_kv_heads, max_len, config.head_dim, dtype)

    def commit(self, params: Params, head: TargetHead, state: KVCache, committed: Committed) -> KVCache:
        """Inject the features of committed positions."""
        features = committed.features.astype(_dtype(params))
        return _apply(self._backbone, params, state, dataclasses.replace(committed, features=features), method="append_context")

    def _heads_step(self, params: Params, carry: Any, previous: Array, hidden: Array) -> tuple[Array | None, Array | None, Any]:
        """Latent of the sequential head, confidence logit and carry at one position."""
        latent, embedded = None, None
        if self._markov is not None:
            embedded = _apply(self._markov, params["markov_head"], previous, method="embed")
            latent, carry = _apply(self._markov, params["markov_head"], carry, embedded, hidden, method="step")
        confidence = None
        if self._confidence is not None:
            feature = embedded if self.config.confidence_with_markov else None
            confidence = _apply(self._confidence, params["confidence_head"], hidden, feature)
        return latent, confidence, carry

    def propose(
        self, params: Params, head: TargetHead, state: KVCache, anchor: Int[Array, "R"], noise: Noise, sampling: Sampling
    ) -> DraftBlock:
        """One backbone pass, then the tokens left to right from U_k + B(x_{k-1}) (paper section 3.1)."""
        config = self.config
        num_rows = anchor.shape[0]
        ids = jnp.full((num_rows, config.block_size), config.mask_token_id, jnp.int32).at[:, 0].set(anchor)
        with jax.named_scope("draft_backbone"):
            embeddings = head.embed(ids).astype(_dtype(params))
            hidden = _apply(self._backbone, params, embeddings, state, method="cached_hidden")
        with jax.named_scope("draft_base_logits"):
            base = head.logits(hidden)

        def draft_token(carry: tuple[Array, Any], position: tuple[Array, Array, Array]) -> tuple[tuple[Array, Any], tuple]:
            previous, head_carry = carry
            hidden_k, corrected, place = position
            latent, confidence, head_carry = self._heads_step(params, head_carry, previous, hidden_k)
            if self._markov is not None:
                corrected = corrected + _apply(self._markov, params["markov_head"], latent, method="bias")
            # The floor, the draw and the logits that the verifier reads must come from the same bits, not from three fusions.
            corrected = jax.lax.optimization_barrier(corrected)
            floor = logit_floor(corrected, sampling)
            draft = draw(
                corrected,
                floor,
                sampling.temperature,
                noise.key,
                jnp.full((num_rows,), place, jnp.int32),
                tile_stream=Stream.DRAFT_TILE,
                id_stream=Stream.DRAFT_ID,
            )
            token = draft.ids if head.draft_ids is None else head.draft_ids[draft.ids]
            return (token, head_carry), (token, draft.log_prob, draft.log_normaliser, floor, confidence, corrected)

        # A loop of G steps on the device rather than G copies of its body: a seventh of the program to compile.
        steps = (hidden.swapaxes(0, 1), base.swapaxes(0, 1), jnp.arange(config.block_size, dtype=jnp.int32))
        with jax.named_scope("draft_tokens"):
            _, columns = jax.lax.scan(draft_token, (anchor, None), steps)
        ids, log_q, log_normaliser, floor, confidence, logits = jax.tree.map(lambda column: column.swapaxes(0, 1), columns)
        return DraftBlock(ids, log_q, log_normaliser, floor, confidence, logits)

    def prediction_sites(self, params: Params, head: TargetHead, batch: TrainBatch) -> Sites:
        """All blocks of a batch in one pass, with the true previous tokens, as the reference trains."""
        config = self.config
        num_rows, length = batch.ids.shape
        dtype = _dtype(params)
        embeddings = head.embed(block_ids(batch, config.block_size, config.mask_token_id)).astype(dtype)
        batch = dataclasses.replace(batch, features=batch.features.astype(dtype))
        hidden = _apply(self._backbone, params, embeddings, batch, method="train_hidden")
        targets = block_targets(batch, config.block_size)
        latent, embedded = jnp.zeros((*targets.labels.shape, 0), dtype), None
        if self._markov is not None:
            embedded = _apply(self._markov, params["markov_head"], targets.previous, method="embed")
            latent = _apply(self._markov, params["markov_head"], embedded, hidden, method="block_latents")
        confidence = None
        if self._confidence is not None:
            feature = embedded if config.confidence_with_markov else None
            confidence = _apply(self._confidence, params["confidence_head"], hidden, feature).reshape(-1)
        step = jnp.broadcast_to(jnp.arange(config.block_size, dtype=jnp.int32), targets.labels.shape)
        decay = jnp.ones(step.shape) if config.loss_decay is None else jnp.exp(-step.astype(jnp.float32) / config.loss_decay)
        rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None, None]
        return Sites(
            hidden=hidden.reshape(-1, config.hidden_size),
            latent=latent.reshape(targets.labels.size, latent.shape[-1]),
            label=targets.labels.reshape(-1),
            teacher_index=(rows * length + targets.teacher_position).reshape(-1),
            weight=jnp.where(targets.supervised, decay, 0.0).reshape(-1),
            step=step.reshape(-1),
            confidence_logits=confidence,
        )

    def site_logits(
        self, params: Params, head: TargetHead, hidden: Float[Array, "P D"], latent: Float[Array, "P M"]
    ) -> Float[Array, "P Vd"]:
        """U + B for a chunk of sites, float32."""
        logits = head.logits(hidden)
        if self._markov is None:
            return logits
        return logits + _apply(self._markov, params["markov_head"], latent, method="bias")


def _apply(module: nn.Module, params: Params, *args: Any, method: str | None = None) -> Any:
    return module.apply({"params": params}, *args, method=method)


def _dtype(params: Params) -> Any:
    """Compute dtype of a drafter: that of its parameters."""
    return params["fc"]["weight"].dtype
