"""A stand-in for a drafter: the prediction sites of blocks and next to no network, so that tests of losses and training compile fast."""

import dataclasses

import jax
import jax.numpy as jnp

from dspark_jax.drafters.block_backbone import block_targets
from dspark_jax.protocols import Sites


@dataclasses.dataclass(frozen=True)
class LinearDrafter:
    """Hidden states are tanh(mix x feature before the anchor + offset of the step); the confidence logit is their sum."""

    vocab_size: int = 61
    draft_vocab_size: int = 61
    width: int = 16
    rank: int = 4
    block_size: int = 3
    taps: tuple[int, ...] = (0,)

    def init(self, rng):
        keys = jax.random.split(rng, 4)
        return {
            "mix": jax.random.normal(keys[0], (self.width, self.width)),
            "steps": jax.random.normal(keys[1], (self.block_size, self.width)),
            "w1": jax.random.normal(keys[2], (self.vocab_size, self.rank)),
            "w2": jax.random.normal(keys[3], (self.draft_vocab_size, self.rank)),
        }

    def prediction_sites(self, params, head, batch):
        targets = block_targets(batch, self.block_size)
        rows = jnp.arange(batch.ids.shape[0])[:, None]
        context = batch.features[rows, jnp.maximum(batch.anchors - 1, 0)] @ params["mix"]
        hidden = jnp.tanh(context[:, :, None] + params["steps"])
        step = jnp.broadcast_to(jnp.arange(self.block_size), targets.labels.shape)
        return Sites(
            hidden=hidden.reshape(-1, self.width),
            latent=params["w1"][targets.previous].reshape(-1, self.rank),
            anchor=jnp.repeat(batch.anchors.reshape(-1), self.block_size),
            label=targets.labels.reshape(-1),
            teacher_index=(rows[:, :, None] * batch.ids.shape[1] + targets.teacher_position).reshape(-1),
            weight=jnp.where(targets.supervised, 0.8 ** step.astype(jnp.float32), 0.0).reshape(-1),
            step=step.reshape(-1),
            confidence_logits=hidden.sum(-1).reshape(-1),
        )

    def site_logits(self, params, head, hidden, latent):
        return head.logits(hidden) + latent @ params["w2"].T
