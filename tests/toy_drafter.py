"""A drafter small enough to know everything about."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from dspark_jax.protocols import DraftBlock
from dspark_jax.sampling import logit_floor
from pallas_kernels.noise import Stream
from pallas_kernels.two_level_draw import draw

VOCAB, BLOCK = 5, 3


@struct.dataclass
class Count:
    """Committed positions of each request."""

    length: Any


@dataclasses.dataclass(frozen=True)
class ToyDrafter:
    """Drafts from a table by the token before and the parity of its position; counts what is committed to it."""

    block_size: int = BLOCK
    taps: tuple[int, ...] = (0,)

    def init(self, rng):
        return {"table": jax.random.normal(rng, (2, VOCAB, VOCAB))}

    def prediction_sites(self, params, head, batch):
        raise NotImplementedError("a toy is not trained")

    def site_logits(self, params, head, hidden, latent):
        raise NotImplementedError("a toy is not trained")

    def init_state(self, num_rows, max_len, *, writes_per_pass=None, dtype=jnp.float32):
        return Count(jnp.zeros((num_rows,), jnp.int32))

    def commit(self, params, head, state, committed):
        return Count(state.length + committed.count)

    def propose(self, params, head, state, anchor, noise, sampling):
        drafts, previous = [], anchor
        for k in range(self.block_size):
            logits = params["table"][(state.length + k) % 2, previous]
            floor = logit_floor(logits, sampling)
            place = jnp.full(anchor.shape, k, jnp.int32)
            streams = {"tile_stream": Stream.DRAFT_TILE, "id_stream": Stream.DRAFT_ID}
            drawn = draw(logits, floor, sampling.temperature, noise.key, place, **streams, tile_size=2)
            drafts.append((drawn.ids, drawn.log_prob, drawn.log_normaliser, floor, logits))
            previous = drawn.ids
        ids, log_q, normaliser, floors, logits = (jnp.stack(column, axis=1) for column in zip(*drafts, strict=True))
        return DraftBlock(ids, log_q, normaliser, floors, jnp.zeros(ids.shape), logits)
