"""Prefill: a batch of prompts of any lengths becomes the state that rounds start from."""

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from dspark_jax.calibration_online import OnlineCalibration
from dspark_jax.decode import DecodeParams, DecodePlan, DecodeState, draw_next
from dspark_jax.protocols import Committed, FlatTokens, StatefulPolicy
from dspark_jax.sampling import Sampling
from dspark_jax.typing import Array, Float, Int
from pallas_kernels.noise import seed_key

NO_STOP = -1
"""Padding of the stop ids; no token has this id."""


def start(
    plan: DecodePlan,
    params: DecodeParams,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int | Sequence[int],
    sampling: Sampling | None = None,
    stop_ids: Sequence[int] | Sequence[Sequence[int]] = (),
    seed: int = 0,
    request_ids: Sequence[int] | None = None,
    max_len: int | None = None,
    prefill_chunk: int = 64,
    cache_dtype: Any = jnp.float32,
    calibration: OnlineCalibration | None = None,
) -> DecodeState:
    """Prefill a batch of prompts of any lengths and draw the first token of each.

    Args:
      max_new_tokens: token budget, one for all or per request.
      stop_ids: a request ends with the first of these (kept in its output); one list for all, or one per request.
      request_ids: name each request's random bits; 0, 1, ... where absent. Several samples of one prompt need distinct ones.
      max_len: T, positions that the caches hold; the longest prompt with its budget where absent.
      prefill_chunk: prompt tokens per request that one forward pass of the prefill takes.
      calibration: learns from the rounds and stands in for the plan's survival model; it goes on from what it has seen before.

    Raises:
      ValueError: an empty prompt, a token or stop id outside the vocabulary, a budget below 1, a request that does not fit into
        max_len, request ids that repeat, budgets or sampling settings of another number than the prompts.
    """
    if any(isinstance(prompt, str) or not isinstance(prompt, Sequence | np.ndarray) for prompt in prompts):
        raise ValueError("prompts holds something that is no sequence of token ids; a tokenizer makes them of text")
    if plan.drafter is not None and not params.drafter:
        raise ValueError("params.drafter is empty, and the plan has a drafter; give its parameters to DecodeParams.of")
    num_rows, vocab_size = len(prompts), plan.target.spec.vocab_size
    asked = np.asarray(max_new_tokens, np.int32)
    if asked.ndim and len(asked) != num_rows:
        raise ValueError(f"max_new_tokens has {len(asked)} entries; allowed is one for all, or one per request ({num_rows})")
    budgets = np.broadcast_to(asked, (num_rows,))
    lengths = np.asarray([len(prompt) for prompt in prompts], np.int32)
    if num_rows == 0 or lengths.min() < 1:
        raise ValueError("prompts has no entry, or an empty one; every request needs at least one token")
    if budgets.min() < 1:
        raise ValueError(f"max_new_tokens is {budgets.min()}; it must be at least 1")
    _check_ids("prompts", [token for prompt in prompts for token in prompt], vocab_size)
    stops = _stop_lists(stop_ids, num_rows)
    _check_ids("stop_ids", [token for each in stops for token in each], vocab_size)
    widest = max(1, *(len(each) for each in stops))
    slots = int((lengths + budgets).max()) if max_len is None else max_len
    if int((lengths + budgets).max()) > slots:
        row = int((lengths + budgets).argmax())
        need = f"{lengths[row]} prompt tokens + a budget of {budgets[row]} = {lengths[row] + budgets[row]}"
        raise ValueError(f"max_len is {slots}; request {row} needs {need}")
    names = list(range(num_rows)) if request_ids is None else list(request_ids)
    if len(names) != num_rows or len(set(names)) != num_rows:
        raise ValueError(f"request_ids is {names}; allowed are {num_rows} distinct ids")
    if sampling is not None and sampling.temperature.shape[0] != num_rows:
        raise ValueError(f"sampling has settings for {sampling.temperature.shape[0]} requests; there are {num_rows}")
    ids = np.zeros((num_rows, slots), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    if prefill_chunk < 1:
        raise ValueError(f"prefill_chunk is {prefill_chunk}; it must be at least 1")
    chunk = min(prefill_chunk, slots)
    sizes: dict[str, Any] = {"writes_per_pass": max(chunk, plan.block_size + 1), "dtype": cache_dtype}
    state = DecodeState(
        ids=jnp.asarray(ids),
        length=jnp.asarray(lengths),
        prompt_length=jnp.asarray(lengths),
        limit=jnp.asarray(lengths + budgets),
        stop_ids=jnp.asarray([each + [NO_STOP] * (widest - len(each)) for each in stops], jnp.int32),
        finished=jnp.zeros((num_rows,), bool),
        request_id=jnp.asarray(names, jnp.int32),
        round=jnp.zeros((num_rows,), jnp.int32),
        seed=seed_key(seed),
        sampling=Sampling.make(num_rows) if sampling is None else sampling,
        target_cache=plan.target.init_cache(num_rows, slots, **sizes),
        policy_state=plan.policy.init_state(num_rows, plan.block_size) if isinstance(plan.policy, StatefulPolicy) else None,
        drafter_state=None if plan.drafter is None else plan.drafter.init_state(num_rows, slots, **sizes),
        draft_history=None if plan.planner is None else plan.planner.init_history(num_rows),
        deferred=None if plan.planner is None else nothing_deferred(plan, params, num_rows),
        # The state's buffers are given up round by round; the caller keeps its own.
        calibration=jax.tree.map(jnp.copy, calibration),
    )
    return prefill(plan, params, state, jnp.int32(-(-int(lengths.max()) // chunk)), chunk)


def nothing_deferred(plan: DecodePlan, params: DecodeParams, num_rows: int, block_size: int | None = None) -> Committed:
    """What a state has as `deferred` where every round so far was drafted.

    Args:
      block_size: of the longest blocks, where rounds of other plans follow; None: the plan's own.
    """
    block_size = plan.block_size if block_size is None else block_size
    width, dtype, places = plan.target.spec.width, params.head.embedding.dtype, (num_rows, block_size + 1)
    return Committed(
        next_ids=jnp.zeros(places, jnp.int32),
        hidden=jnp.zeros((*places, width), dtype),
        features=jnp.zeros((*places, width * len(plan.taps)), dtype),
        count=jnp.zeros((num_rows,), jnp.int32),
    )


def _stop_lists(stop_ids: Sequence[int] | Sequence[Sequence[int]], num_rows: int) -> list[list[int]]:
    lists = [list(each) for each in stop_ids if isinstance(each, Sequence)]
    if lists and len(lists) != num_rows:
        raise ValueError(f"stop_ids has {len(lists)} lists; allowed is one list of ids for all, or one per request ({num_rows})")
    return lists or [[token for token in stop_ids if not isinstance(token, Sequence)]] * num_rows


def _check_ids(field: str, ids: Sequence[int], vocab_size: int) -> None:
    wrong = [token for token in ids if not 0 <= token < vocab_size]
    if wrong:
        raise ValueError(f"{field} holds {wrong[0]}; token ids of this target lie in 0..{vocab_size - 1}")


@struct.dataclass
class Reading:
    """How far texts have been read before rounds begin.

    Attributes:
      hidden, features: of the target, behind the last position of each text, once that has been read.
    """

    target_cache: Any
    drafter_state: Any
    hidden: Float[Array, "R D"]
    features: Float[Array, "R F"]

    @classmethod
    def nothing(cls, plan: DecodePlan, params: DecodeParams, target_cache: Any, drafter_state: Any) -> "Reading":
        """Before the first chunk; the caches are empty."""
        num_rows, width, dtype = target_cache.length.shape[0], plan.target.spec.width, params.head.embedding.dtype
        features = jnp.zeros((num_rows, width * len(plan.taps)), dtype)
        return cls(target_cache, drafter_state, jnp.zeros((num_rows, width), dtype), features)


def read_chunk(
    plan: DecodePlan,
    params: DecodeParams,
    reading: Reading,
    ids: Int[Array, "R T"],
    length: Int[Array, "R"],
    index: Int[Array, ""],
    chunk: int,
) -> Reading:
    """Both models read positions `index` x `chunk` and on, `chunk` of them, of texts `ids` that are `length` tokens long."""
    num_rows, num_slots = ids.shape
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    start = jnp.full((num_rows,), index * chunk, jnp.int32)
    place = start[:, None] + jnp.arange(chunk, dtype=jnp.int32)
    tokens = FlatTokens.grid(ids[rows[:, None], jnp.minimum(place, num_slots - 1)], start, jnp.clip(length - start, 0, chunk))
    hidden, features, target_cache = plan.target.forward(params.target, reading.target_cache, tokens, plan.taps)
    hidden, features = hidden.reshape(num_rows, chunk, -1), features.reshape(num_rows, chunk, features.shape[-1])
    drafter_state = reading.drafter_state
    if plan.drafter is not None:
        committed = Committed(
            next_ids=ids[rows[:, None], jnp.minimum(place + 1, num_slots - 1)],
            hidden=hidden,
            features=features,
            count=jnp.clip(length - 1 - start, 0, chunk),
        )
        drafter_state = plan.drafter.commit(params.drafter, params.draft_head, drafter_state, committed)
    last = length - 1 - start
    here = ((last >= 0) & (last < chunk))[:, None]
    last = jnp.clip(last, 0, chunk - 1)
    return Reading(
        target_cache,
        drafter_state,
        hidden=jnp.where(here, hidden[rows, last], reading.hidden),
        features=jnp.where(here, features[rows, last], reading.features),
    )


def begin_rounds(
    plan: DecodePlan,
    params: DecodeParams,
    state: DecodeState,
    reading: Reading,
    length: Int[Array, "R"],
    given: Int[Array, "R"] | None = None,
) -> DecodeState:
    """The state behind texts of `length` tokens that have been read: the token behind each of them is drawn, and is the first anchor.

    The last position of a text is told to the drafter here, since it comes with the token behind it.

    Args:
      given: the token, where it is there already (a request that goes on), and no round is counted for it; -1 where it is to be drawn.
    """
    num_rows = state.length.shape[0]
    rows = jnp.arange(num_rows, dtype=jnp.int32)
    first = draw_next(params.head.logits(reading.hidden), state.sampling, state.noise)
    counted = jnp.ones_like(first)
    if given is not None:
        counted = (given < 0).astype(jnp.int32)
        first = jnp.where(given < 0, first, given)
    drafter_state = reading.drafter_state
    if plan.drafter is not None:
        committed = Committed(first[:, None], reading.hidden[:, None], reading.features[:, None], jnp.ones((num_rows,), jnp.int32))
        drafter_state = plan.drafter.commit(params.drafter, params.draft_head, drafter_state, committed)
    return dataclasses.replace(
        state,
        ids=state.ids.at[rows, length].set(first),
        length=length + 1,
        finished=(first[:, None] == state.stop_ids).any(axis=1) | (length + 1 >= state.limit),
        round=state.round + counted,
        target_cache=reading.target_cache,
        drafter_state=drafter_state,
    )


@functools.partial(jax.jit, static_argnums=(0, 4), donate_argnums=2)
def prefill(plan: DecodePlan, params: DecodeParams, state: DecodeState, num_chunks: Int[Array, ""], chunk: int) -> DecodeState:
    """Run both models over the prompts in `num_chunks` chunks of `chunk` tokens, and draw the first token of every request.

    Only the chunk's size is compiled in, so that prompts of any length share one program.
    """

    def read(index: Array, reading: Reading) -> Reading:
        return read_chunk(plan, params, reading, state.ids, state.prompt_length, index, chunk)

    nothing = Reading.nothing(plan, params, state.target_cache, state.drafter_state)
    reading = jax.lax.fori_loop(0, num_chunks, read, nothing)
    return begin_rounds(plan, params, state, reading, state.prompt_length)
