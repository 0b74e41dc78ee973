"""The formulations that one would write down first, with whole probability tensors: baselines of the benchmark, used by nothing else."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import noise
from pallas_kernels.markov_sample import Draft
from pallas_kernels.noise import Stream
from pallas_kernels.rejection_sample import Outcome
from pallas_kernels.two_level_draw import low_rank_bias


def draw(logits: jax.Array, temperature: jax.Array, key: jax.Array, stream: Stream, position: jax.Array) -> tuple[jax.Array, ...]:
    """Gumbel-max over all of [N, V]: ids, log-probabilities and log-normalisers, as of `two_level_draw.Drawn`."""
    scaled = logits.astype(jnp.float32) / jnp.where(temperature == 0, 1.0, temperature)[:, None]
    column = jnp.arange(logits.shape[1], dtype=jnp.int32)[None]
    variable = noise.gumbel(noise.site_key(key, stream, position)[:, None], 0, column)
    ids = jnp.argmax(scaled + jnp.where(temperature[:, None] == 0, 0.0, variable), axis=1).astype(jnp.int32)
    normaliser = jax.nn.logsumexp(scaled, axis=1)
    return ids, jnp.take_along_axis(scaled, ids[:, None], axis=1)[:, 0] - normaliser, normaliser


def markov_block(anchor: jax.Array, base_logits: jax.Array, w1: jax.Array, w2: jax.Array, key: jax.Array, temperature: jax.Array) -> Draft:
    """`markov_sample.markov_block` by Gumbel-max over the whole vocabulary."""

    def step(previous: jax.Array, inputs: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, tuple[jax.Array, ...]]:
        base, place = inputs
        logits = base + low_rank_bias(w1[previous], w2)
        ids, log_q, normaliser = draw(logits, temperature, key, Stream.DRAFT_ID, place)
        return ids, (ids, log_q, normaliser)

    places = jnp.arange(base_logits.shape[0], dtype=jnp.int32)
    _, (ids, log_q, normaliser) = lax.scan(step, anchor, (base_logits, places))
    return Draft(ids, log_q, normaliser, jnp.full(ids.shape, -jnp.inf, jnp.float32), None)


def rejection_sample(
    target_logits: jax.Array, draft_logits: jax.Array, ids: jax.Array, lengths: jax.Array, key: jax.Array, temperature: jax.Array
) -> Outcome:
    """`rejection_sample.rejection_sample` with p, q and a residual for every row, [R, G + 1, V], and a draw at each of them."""
    num_rows, block_size, vocab_size = draft_logits.shape
    divisor = jnp.where(temperature == 0, 1.0, temperature)[:, None, None]
    p = jax.nn.softmax(target_logits.reshape(num_rows, block_size + 1, vocab_size).astype(jnp.float32) / divisor, axis=-1)
    q = jax.nn.softmax(draft_logits.astype(jnp.float32) / divisor, axis=-1)
    step = jnp.arange(block_size, dtype=jnp.int32)
    chance = jnp.take_along_axis(p[:, :-1], ids[:, :, None], axis=2) / jnp.take_along_axis(q, ids[:, :, None], axis=2)
    accepted = noise.uniform(noise.site_key(key[:, None], Stream.ACCEPT, step), 0, 0) < jnp.minimum(chance[:, :, 0], 1.0)
    num_accepted = jnp.sum(jnp.cumprod((accepted & (step < lengths[:, None])).astype(jnp.int32), axis=1), axis=1)
    excess = jnp.concatenate([jnp.maximum(p[:, :-1] - q, 0.0), p[:, -1:]], axis=1)
    excess = jnp.where((jnp.arange(block_size + 1) == lengths[:, None])[:, :, None], p, excess)
    places = jnp.tile(jnp.arange(block_size + 1, dtype=jnp.int32), num_rows)
    keys = jnp.repeat(key, block_size + 1, axis=0)
    flat = jnp.log(excess / jnp.sum(excess, axis=-1, keepdims=True)).reshape(-1, vocab_size)
    drawn, _, _ = draw(flat, jnp.ones(flat.shape[0]), keys, Stream.RESIDUAL_ID, places)
    return Outcome(num_accepted, jnp.take_along_axis(drawn.reshape(num_rows, -1), num_accepted[:, None], axis=1)[:, 0])
