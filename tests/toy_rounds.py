"""Drafters of one layer behind the toy target: texts that it writes, and proposals behind a place in them."""

import functools
from typing import Any

import jax
import jax.numpy as jnp

from dspark_jax.protocols import Committed, DraftBlock
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.targets.toy import ToyTarget

VOCAB = 16
TARGET = ToyTarget(VOCAB, spread=3.0)
CHAIN: Any = {
    "vocab_size": VOCAB,
    "hidden_size": VOCAB,
    "intermediate_size": 24,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 8,
    "num_target_layers": 2,
    "block_size": 3,
}
BLOCK: Any = CHAIN | {"mask_token_id": VOCAB - 1, "taps": (-1,), "num_layers": 1}


@functools.partial(jax.jit, static_argnums=(1, 2))
def written_texts(target_params, rows, length, number):
    """Texts [rows, length] that the target wrote at temperature 1, others for every `number`."""
    first_key, key = jax.random.split(jax.random.key(number))

    def following(carry, key):
        ids, position = carry
        ids = jax.random.categorical(key, target_params["table"][position % 2, ids]).astype(jnp.int32)
        return (ids, position + 1), ids

    first = jax.random.randint(first_key, (rows,), 0, VOCAB, jnp.int32)
    _, rest = jax.lax.scan(following, (first, jnp.int32(0)), jax.random.split(key, length - 1))
    return jnp.concatenate([first[None], rest]).T


@functools.partial(jax.jit, static_argnums=0)
def propose_behind(drafter, params, target_params, ids, anchors, temperature) -> DraftBlock:
    """A block behind token `anchors[r]` of every text, drawn at `temperature[r]`; every row has its own noise."""
    rows, length = ids.shape
    features = jnp.tile(jax.nn.one_hot(ids, VOCAB, dtype=jnp.float32), (1, 1, len(drafter.taps)))
    hidden = target_params["table"][jnp.arange(length, dtype=jnp.int32) % 2, ids]
    head = TARGET.head(target_params)
    committed = Committed(jnp.pad(ids[:, 1:], ((0, 0), (0, 1))), hidden, features, anchors)
    state = drafter.commit(params, head, drafter.init_state(rows, length + drafter.block_size + 1), committed)
    row = jnp.arange(rows, dtype=jnp.int32)
    sampling = Sampling(temperature, jnp.zeros_like(row), jnp.ones_like(temperature))
    return drafter.propose(params, head, state, ids[row, anchors], Noise.of_round(7, row, jnp.zeros_like(row)), sampling)
