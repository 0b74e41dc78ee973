"""What every drafter on the parallel backbone shares: its state, its block's hidden states, its prediction sites."""

import dataclasses
import functools
from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from dspark_jax import kv_cache
from dspark_jax.drafters.block_backbone import BackboneConfig, BlockBackbone, BlockTargets, block_ids, block_targets
from dspark_jax.drafters.draft_scores import ConfidenceScore, require_score
from dspark_jax.kv_cache import KVCache
from dspark_jax.moe import BALANCE_SPEED, rebalanced
from dspark_jax.protocols import Committed, Sites, TargetHead, TrainBatch
from dspark_jax.sharding import Initialised
from dspark_jax.typing import Array, Float, Int, Params


@dataclasses.dataclass(frozen=True)
class BlockConfig(BackboneConfig):
    """Backbone sizes, the draft vocabulary and the weights of the positions in training.

    Attributes:
      draft_vocab_size: number of tokens that can be drafted; None for all.
      loss_decay: position weights exp(-k / loss_decay) in training; None for equal weights.
      confidence_score: what stands in for a trained confidence head, see `draft_scores.score_logits`; None for no confidence.
    """

    draft_vocab_size: int | None = None
    loss_decay: float | None = 4.0
    confidence_score: ConfidenceScore | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.draft_vocab_size is not None and not 1 <= self.draft_vocab_size <= self.vocab_size:
            raise ValueError(f"draft_vocab_size is {self.draft_vocab_size}; it must be in 1..{self.vocab_size}, or None for all")
        require_score(self.confidence_score)


@dataclasses.dataclass(frozen=True)
class BlockDrafter(Initialised):
    """The part of a `protocols.Drafter` that the backbone settles; subclasses add how tokens are drawn from its hidden states.

    The state is the key-value cache of the injected context: positions below the anchor.
    """

    config: BlockConfig

    @property
    def block_size(self) -> int:
        return self.config.block_size

    @property
    def taps(self) -> tuple[int, ...]:
        return self.config.taps

    @functools.cached_property
    def _backbone(self) -> BlockBackbone:
        return BlockBackbone(self.config)

    def _boxed_init(self, rng: jax.Array) -> Any:
        config = self.config
        batch = TrainBatch(
            ids=jnp.zeros((1, 1), jnp.int32),
            loss_mask=jnp.zeros((1, 1), bool),
            features=jnp.zeros((1, 1, len(config.taps) * config.hidden_size)),
            last_hidden=jnp.zeros((1, 1, config.hidden_size)),
            anchors=jnp.zeros((1, 1), jnp.int32),
            keep=jnp.ones((1, 1), bool),
        )
        embeddings = jnp.zeros((1, 1, config.num_slots, config.hidden_size))
        return dict(self._backbone.init(rng, embeddings, batch, method="initialise")["params"])

    def init_state(self, num_rows: int, max_len: int, *, writes_per_pass: int | None = None, dtype: Any = jnp.float32) -> KVCache:
        """An empty context cache per request: `max_len` slots, or under a window a ring of as many as a pass needs."""
        config = self.config
        slots = max_len
        if config.window is not None and writes_per_pass is not None:
            slots = kv_cache.ring_slots(config.window, writes_per_pass, max_len)
        return kv_cache.empty_cache(config.num_layers, num_rows, config.num_kv_heads, slots, config.head_dim, dtype)

    def commit(self, params: Params, head: TargetHead, state: KVCache, committed: Committed) -> KVCache:
        """Inject the features of committed positions."""
        features = committed.features.astype(compute_dtype(params))
        return apply(self._backbone, params, state, dataclasses.replace(committed, features=features), method="append_context")

    def _block_hidden(self, params: Params, head: TargetHead, state: KVCache, anchor: Int[Array, "R"]) -> Float[Array, "R G D"]:
        """Hidden states of the block behind every request's anchor."""
        config = self.config
        ids = jnp.full((anchor.shape[0], config.num_slots), config.mask_token_id, jnp.int32).at[:, 0].set(anchor)
        with jax.named_scope("draft_backbone"):
            embeddings = head.embed(ids).astype(compute_dtype(params))
            return apply(self._backbone, params, embeddings, state, method="cached_hidden")

    def _train_inputs(self, params: Params, head: TargetHead, batch: TrainBatch) -> tuple[Float[Array, "B A slots D"], TrainBatch]:
        """Embeddings of the blocks at all anchors of a batch, and the batch, in the compute dtype."""
        config = self.config
        dtype = compute_dtype(params)
        embeddings = head.embed(block_ids(batch, config.num_slots, config.mask_token_id)).astype(dtype)
        return embeddings, dataclasses.replace(batch, features=batch.features.astype(dtype))

    def _train_hidden(self, params: Params, head: TargetHead, batch: TrainBatch) -> tuple[Float[Array, "B A G D"], BlockTargets]:
        """Hidden states of the blocks at all anchors of a batch in one pass, and what they are to predict."""
        inputs = self._train_inputs(params, head, batch)
        return apply(self._backbone, params, *inputs, method="train_hidden"), block_targets(batch, self.config.block_size)

    def rebalanced(self, params: Params, head: TargetHead, batch: TrainBatch, speed: float = BALANCE_SPEED) -> Params:
        """`params` with the balance biases of its mixtures of experts moved one step against the loads of `batch`.

        For a training loop behind the optimiser's step (of which no gradient moves these biases, and whose weight decay should
        leave them alone). It runs the backbone once more; blocks that are not kept do not count.
        """
        inputs = self._train_inputs(params, head, batch)
        sown: Any = self._backbone.apply({"params": params}, *inputs, method="train_hidden", mutable=["intermediates"])[1]
        counted = jnp.broadcast_to(batch.keep[:, :, None], inputs[0].shape[:-1])
        return rebalanced(params, sown.get("intermediates", {}), counted, speed)

    def _sites(
        self,
        batch: TrainBatch,
        hidden: Float[Array, "B A G D"],
        targets: BlockTargets,
        latent: Float[Array, "B A G M"],
        confidence: Float[Array, "B A G"] | None,
    ) -> Sites:
        """Prediction sites in the order (b, a, k)."""
        config = self.config
        num_rows, length = batch.ids.shape
        shape = targets.labels.shape
        step = jnp.broadcast_to(jnp.arange(config.block_size, dtype=jnp.int32), shape)
        decay = jnp.ones(shape) if config.loss_decay is None else jnp.exp(-step.astype(jnp.float32) / config.loss_decay)
        rows = jnp.arange(num_rows, dtype=jnp.int32)[:, None, None]
        return Sites(
            hidden=hidden.reshape(-1, config.hidden_size),
            latent=latent.reshape(targets.labels.size, latent.shape[-1]),
            anchor=jnp.broadcast_to(batch.anchors[:, :, None], shape).reshape(-1),
            label=targets.labels.reshape(-1),
            teacher_index=(rows * length + targets.teacher_position).reshape(-1),
            weight=jnp.where(targets.supervised, decay, 0.0).reshape(-1),
            step=step.reshape(-1),
            confidence_logits=None if confidence is None else confidence.reshape(-1),
        )


def apply(module: nn.Module, params: Params, *args: Any, method: str | None = None) -> Any:
    """`module` with `params`, without the variable collections around them."""
    return module.apply({"params": params}, *args, method=method)


def compute_dtype(params: Params) -> Any:
    """Compute dtype of a drafter: that of its parameters."""
    return params["fc"]["weight"].dtype
