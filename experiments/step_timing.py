"""Timing primitives: the target's pass layer by layer or whole, drafting, and commits, as medians over interleaved repetitions.

`profile_steps` times the rounds of one request with them, `measure_curves` those of many.
"""

import dataclasses
import functools
import time
from collections.abc import Callable, Hashable, Sequence
from statistics import median
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.protocols import Committed, DraftBlock, Drafter, FlatTokens, Target, TargetHead
from dspark_jax.sampling import Noise, Sampling
from dspark_jax.typing import Array, Params
from pallas_kernels.two_level_draw import greedy_ids

Size = TypeVar("Size", bound=Hashable)

SLOTS_AHEAD = 64
"""Slots of a cache beyond the context that a round starts from."""


@functools.partial(jax.jit, static_argnums=(0, 3), donate_argnums=2)
def layer_pass(target: Target, params: Params, cache: Any, taps: tuple[int, ...], tokens: FlatTokens) -> tuple[Array, Any, FlatTokens]:
    """A target of one layer on flat tokens: hidden states, the cache, and tokens that are ready only when the pass is done."""
    hidden, features, cache = target.forward(params, cache, tokens, taps)
    # The next layer's pass waits for this one through the ids; two programs that share no array might run at the same time.
    ids = jnp.where(jnp.isnan(hidden[:, 0] + features.sum(axis=1)), 0, tokens.ids)
    return hidden, cache, dataclasses.replace(tokens, ids=ids)


@jax.jit
def head_pass(head: TargetHead, hidden: Array) -> Array:
    """The output head, and the id of the largest logit of every flat token."""
    return greedy_ids(head.logits(hidden))


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=3)
def _whole_pass(
    target: Target, params: Params, head: TargetHead, cache: Any, taps: tuple[int, ...], tokens: FlatTokens
) -> tuple[Array, Array, Any]:
    hidden, features, cache = target.forward(params, cache, tokens, taps)
    return greedy_ids(head.logits(hidden)), features, cache


@functools.partial(jax.jit, static_argnums=(0, 6), donate_argnums=3)
def draft_pass(
    drafter: Drafter, params: Params, head: TargetHead, state: Any, anchor: Array, committed: Committed, temperature: float
) -> tuple[DraftBlock, Any]:
    """A proposal for every request, and the commit of a round's tokens."""
    # The temperature is a constant here, so that the branches of other temperatures need not be compiled.
    rounds = jnp.zeros_like(anchor)
    noise = Noise.of_round(0, jnp.arange(anchor.shape[0], dtype=jnp.int32), rounds)
    block = drafter.propose(params, head, state, anchor, noise, Sampling.make(anchor.shape[0], temperature))
    return block, drafter.commit(params, head, state, committed)


@functools.partial(jax.jit, static_argnums=0, donate_argnums=3)
def commit_pass(drafter: Drafter, params: Params, head: TargetHead, state: Any, committed: Committed) -> Any:
    """The commit of a round's tokens alone."""
    return drafter.commit(params, head, state, committed)


def _round_tokens(num_tokens: int, block_size: int, max_len: int) -> FlatTokens:
    """What one request sends to the target in the middle of its cache: an anchor, the drafts that fit, and padding."""
    slot = np.minimum(np.arange(num_tokens, dtype=np.int32), block_size)
    zeros = jnp.asarray(np.zeros_like(slot))
    valid = jnp.asarray(np.arange(num_tokens) <= block_size)
    queries_per_row = min(num_tokens, block_size + 1)
    return FlatTokens(zeros, zeros, jnp.asarray(slot), jnp.asarray(max_len // 2 + slot), valid, queries_per_row)


def batch_tokens(rows: int, num_tokens: int, block_size: int, context: int) -> FlatTokens:
    """What `rows` requests with `context` committed tokens each send to the target: `num_tokens` in all, spread evenly.

    Laid out as `protocols.flatten_rounds` lays them out: one request's after another's, in a grid as wide as a round may be.
    """
    if not rows <= num_tokens <= rows * (block_size + 1):
        raise ValueError(f"num_tokens is {num_tokens}; allowed are {rows} to {rows * (block_size + 1)} for {rows} requests")
    count = num_tokens // rows + (np.arange(rows) < num_tokens % rows)
    row = np.repeat(np.arange(rows, dtype=np.int32), count)
    slot = (np.arange(num_tokens) - (np.cumsum(count) - count)[row]).astype(np.int32)
    return FlatTokens(
        ids=jnp.zeros((num_tokens,), jnp.int32),
        row=jnp.asarray(row),
        slot=jnp.asarray(slot),
        position=jnp.asarray(context - 1 + slot),
        valid=jnp.ones((num_tokens,), bool),
        queries_per_row=min(block_size + 1, num_tokens),
    )


def committed_round(drafter: Drafter, rows: int, width: int, dtype: Any) -> Committed:
    """As many committed positions per request as a round may have, the features being zeros.

    Args:
      width: D of the target.
    """
    most = drafter.block_size + 1
    return Committed(
        next_ids=jnp.zeros((rows, most), jnp.int32),
        hidden=jnp.zeros((rows, most, width), dtype),
        features=jnp.zeros((rows, most, width * len(drafter.taps)), dtype),
        count=jnp.zeros((rows,), jnp.int32),
    )


def interleaved(
    run: Callable[[Size, Any], Any],
    state: Any,
    sizes: Sequence[Size],
    repetitions: int,
    *,
    enough_seconds: float | None = None,
    advance: Callable[[], None] | None = None,
) -> dict[Size, float]:
    """Median seconds of `run(size, state) -> state` per size, after one run of each to compile and warm up.

    Args:
      enough_seconds: a size that was timed twice and for so long in all is timed no more.
      advance: called after every run that was timed or might have been.
    """
    seconds: dict[Size, list[float]] = {size: [] for size in sizes}
    for repetition in range(repetitions + 1):
        for size in sizes:
            taken = seconds[size]
            if enough_seconds is None or len(taken) < 2 or sum(taken) < enough_seconds:
                begin = time.perf_counter()
                state = jax.block_until_ready(run(size, state))
                if repetition:
                    taken.append(time.perf_counter() - begin)
            if advance is not None:
                advance()
    return {size: median(taken) for size, taken in seconds.items()}


def has_layers(target: Any, params: Params) -> bool:
    """Whether the target is a stack of equal layers that `time_by_layer` can take apart."""
    layers = getattr(getattr(target, "config", None), "num_layers", 0)
    return layers > 0 and all(f"layers_{index}" in params for index in range(layers))


def split_layers(target: Any, params: Params) -> tuple[Any, list[Params]]:
    """The target with one layer, and its parameters with each layer in that place.

    Raises:
      ValueError: the target is no stack of equal layers.
    """
    if not has_layers(target, params):
        raise ValueError(f"target is {target}; allowed are targets that are a stack of equal layers (num_layers, layers_0, ...)")
    one_layer = dataclasses.replace(target, config=dataclasses.replace(target.config, num_layers=1))
    outside = {name: leaf for name, leaf in params.items() if not name.startswith("layers_")}
    return one_layer, [{**outside, "layers_0": params[f"layers_{index}"]} for index in range(target.config.num_layers)]


def time_by_layer(
    target: Any, params: Params, sizes: Sequence[int], *, block_size: int, max_len: int, repetitions: int = 5
) -> dict[int, float]:
    """Seconds of the target's pass per number of flat tokens, one compiled layer being run with the weights of every layer.

    Args:
      block_size: G; it sets the grid that attention works on.
      max_len: positions of the cache.
    """
    one_layer, per_layer = split_layers(target, params)
    head = target.head(params)

    def run(size: int, caches: tuple) -> tuple:
        tokens = _round_tokens(size, block_size, max_len)
        hidden, used = None, []
        for layer, cache in zip(per_layer, caches, strict=True):
            hidden, cache, tokens = layer_pass(one_layer, layer, cache, (), tokens)
            used.append(cache)
        jax.block_until_ready(head_pass(head, hidden))
        return tuple(used)

    caches = tuple(one_layer.init_cache(1, max_len) for _ in per_layer)
    return interleaved(run, caches, sizes, repetitions)


def time_whole_passes(
    target: Target, params: Params, sizes: Sequence[int], *, taps: tuple[int, ...], block_size: int, max_len: int, repetitions: int = 5
) -> dict[int, float]:
    """Seconds of the target's pass per number of flat tokens, the whole target being compiled for each."""
    head = target.head(params)

    def run(size: int, cache: Any) -> Any:
        ids, features, cache = _whole_pass(target, params, head, cache, taps, _round_tokens(size, block_size, max_len))
        jax.block_until_ready((ids, features))
        return cache

    return interleaved(run, target.init_cache(1, max_len), sizes, repetitions)


def time_drafting(
    drafter: Drafter,
    params: Params,
    head: TargetHead,
    width: int,
    *,
    max_len: int,
    rows: int = 1,
    temperature: float = 0.0,
    repetitions: int = 5,
    enough_seconds: float | None = None,
) -> float:
    """Seconds of one proposal and one commit for `rows` requests.

    Args:
      head: the target's, restricted to the draft vocabulary.
      width: D of the target.
    """
    committed = committed_round(drafter, rows, width, head.embedding.dtype)
    anchor = jnp.zeros((rows,), jnp.int32)

    def run(_: int, state: Any) -> Any:
        drafted, state = draft_pass(drafter, params, head, state, anchor, committed, temperature)
        jax.block_until_ready(drafted)
        return state

    state = drafter.init_state(rows, max_len)
    return interleaved(run, state, (rows,), repetitions, enough_seconds=enough_seconds)[rows]


def time_commit(
    drafter: Drafter,
    params: Params,
    head: TargetHead,
    width: int,
    *,
    max_len: int,
    rows: int = 1,
    repetitions: int = 5,
    enough_seconds: float | None = None,
) -> float:
    """Seconds of committing a round's tokens of `rows` requests to the drafter; arguments as in `time_drafting`."""
    committed = committed_round(drafter, rows, width, head.embedding.dtype)

    def run(_: int, state: Any) -> Any:
        return commit_pass(drafter, params, head, state, committed)

    return interleaved(run, drafter.init_state(rows, max_len), (rows,), repetitions, enough_seconds=enough_seconds)[rows]
