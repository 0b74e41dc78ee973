"""`rejection_sample`: the verdict on the drafts of every request, by whichever backend `dispatch` chooses.

Draft k of a request, drawn from q_k, is kept with probability min(1, p_k / q_k) given that the drafts before it were. The first
rejected one is replaced by a draw from norm(max(0, p_k - q_k)); behind the last verified draft comes a token from the target's own
distribution. Source: Leviathan et al. 2023 and Chen et al. 2023; the paper's section 2.

Two passes over a vocabulary: the first reads every row of target logits once, for its normaliser and the logit of the draft that it
judges; the second reads one row of target and one of draft logits per request, at the position that decides. Kernels
write no probabilities. Axes: R requests, G drafted tokens, N flat rows of target logits, V ids, Vd ids that can be drafted, M rank of
the bias.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import dispatch, noise
from pallas_kernels.dispatch import Backend
from pallas_kernels.noise import Stream
from pallas_kernels.rejection_sample import mosaic_tpu, reference, triton
from pallas_kernels.rejection_sample.rows import ResidualRows, RowStats
from pallas_kernels.two_level_draw import TILE_SIZE, greedy_ids, log_sum_exp, low_rank_bias

MIN_RESIDUAL_MASS = 1e-8
"""Where max(0, p - q) has less, p == q but for rounding, which alone can have rejected: the draft stays, being a draw from p."""


class Outcome(NamedTuple):
    """Drafts 1..num_accepted (int32 [R]) are kept and `next_id` (int32 [R]) follows them."""

    num_accepted: jax.Array
    next_id: jax.Array


class DraftRows(NamedTuple):
    """The drafts' distributions as logits.

    Attributes:
      logits: [R, G, Vd], before temperature.
      log_normaliser: float32 [R, G], log-sum-exp of the kept entries of `logits / temperature`, as the sampler made it.
      floor: float32 [R, G]; entries below it have probability 0.
    """

    logits: jax.Array
    log_normaliser: jax.Array
    floor: jax.Array


class RecomputedRows(NamedTuple):
    """The drafts' distributions as what their logits were made of, U + latent W2: computed again for the one row that is needed.

    Matrix products that add up in another order give logits that differ from the sampler's by up to some e. Acceptance reads the
    sampler's own numbers, so that only the residual differs: at each draft by at most exp(2 e / temperature) - 1 in total variation of
    the law of what follows (q's distance, twice over; the residual counts with the chance of a rejection, which is its mass), and in a
    round by at most G times that.

    Attributes:
      base_logits: U, [R, G, Vd].
      latent: [R, G, M].
      w2: [Vd, M].
      log_normaliser: float32 [R, G], as of `DraftRows`. Nothing is filtered.
    """

    base_logits: jax.Array
    latent: jax.Array
    w2: jax.Array
    log_normaliser: jax.Array


def rejection_sample(
    target_logits: jax.Array,
    row: jax.Array,
    first: jax.Array,
    ids: jax.Array,
    log_q: jax.Array,
    lengths: jax.Array,
    key: jax.Array,
    temperature: jax.Array,
    *,
    draft: DraftRows | RecomputedRows | None,
    floor: jax.Array | None = None,
    draft_ids: jax.Array | None = None,
    axis_name: str | None = None,
    tile_size: int = TILE_SIZE,
    backend: Backend = "auto",
) -> Outcome:
    """Judge the first `lengths[r]` drafts of every request.

    Request r owns the flat rows first[r] .. first[r] + lengths[r]: the first judges draft 0, and so on; the last gives the bonus
    token. Other rows are padding and are not looked at. Of a draft whose normaliser is not finite, q counts as 0.

    Args:
      target_logits: [N, V], before temperature.
      row: int32 [N], the request of every flat row.
      first: int32 [R]; anything for requests of length 0 that nobody reads.
      ids: int32 [R, G], drafted tokens as ids of the target.
      log_q: float32 [R, G], log-probability with which each was drawn, as the sampler made it.
      lengths: int32 [R], 0..G (what lies outside counts as the nearer end).
      key: uint32 [R, 2], keys of the round (`noise.round_key`).
      temperature: float32 [R]; 0 takes the largest logit.
      draft: what the residual subtracts; None where drafts are certain (one-hot q, `log_q` 0).
      floor: float32 [N], the logit that an entry of a row must reach to be kept (top-k, top-p); None: nothing is filtered.
      draft_ids: int32 [Vd], target id of each column of the draft logits; None where these are all ids.
      axis_name: inside `shard_map`, the mesh axis along which the columns of target and draft logits (and the rows of `w2`) are cut
        into consecutive parts of equal size, a multiple of `tile_size` ids (pad with -inf).
      backend: see `dispatch`.

    Raises:
      ValueError: shapes that do not fit together, or a backend that cannot run here.
    """
    per_request = {"first": first, "lengths": lengths, "key": key, "temperature": temperature}
    _require(target_logits, ids, {"row": row, "floor": floor}, per_request, {"log_q": log_q}, draft, draft_ids, axis_name)
    choice = dispatch.choose(backend)
    kernels = {"xla": reference, "mosaic_tpu": mosaic_tpu, "triton": triton}[choice.kernels]
    options = {} if choice.kernels == "xla" else {"interpret": choice.interpret}
    first_tile = jnp.int32(0)
    if axis_name is not None:
        if target_logits.shape[1] % tile_size:
            raise ValueError(
                f"target_logits has {target_logits.shape[1]} columns per device; allowed are multiples of {tile_size} (tile_size)"
            )
        first_tile = lax.axis_index(axis_name).astype(jnp.int32) * (target_logits.shape[1] // tile_size)
    # One set of bits for all that follows: computed anew in another fusion, the logit on the floor could fall below it.
    target_logits = lax.optimization_barrier(target_logits)
    num_flat, block_size = target_logits.shape[0], ids.shape[1]
    requests, step = jnp.arange(ids.shape[0], dtype=jnp.int32), jnp.arange(block_size, dtype=jnp.int32)
    first, lengths = jnp.clip(first, 0, num_flat - 1), jnp.clip(lengths, 0, block_size)
    judged_by = jnp.minimum(first[:, None] + step, num_flat - 1)
    scheduled = step < lengths[:, None]
    greedy = temperature == 0

    def some_random() -> Outcome:
        floors = jnp.full((num_flat,), -jnp.inf, jnp.float32) if floor is None else floor
        judged = ids[row, jnp.clip(jnp.arange(num_flat, dtype=jnp.int32) - first[row], 0, block_size - 1)]
        stats = kernels.row_stats(target_logits, judged, floors, temperature[row], first_tile, tile_size, **options)
        if axis_name is not None:
            stats = _across(stats, axis_name, temperature[row])
        log_p = jnp.minimum(stats.own - stats.log_sum, 0.0)[judged_by]
        chance = accept_prob(log_p, log_q)
        accepted = noise.uniform(noise.site_key(key[:, None], Stream.ACCEPT, step), 0, 0) < chance
        accepted = jnp.where(greedy[:, None], stats.best[judged_by] == ids, accepted)
        num_accepted = _leading(scheduled & accepted)

        decides = jnp.minimum(first + num_accepted, num_flat - 1)
        rejected = jnp.minimum(num_accepted, block_size - 1)
        draft_logits, draft_row, draft_normaliser, draft_floor = _draft_rows(draft, requests, rejected, draft_ids, target_logits.shape[1])
        rows = ResidualRows(
            row=decides,
            floor=floors[decides],
            normaliser=stats.log_sum[decides],
            plain=(num_accepted == lengths) | greedy | ~jnp.isfinite(draft_normaliser),
            temperature=temperature,
            draft_row=draft_row,
            draft_floor=draft_floor,
            draft_normaliser=draft_normaliser,
            draft_id=ids[requests, rejected],
        )
        keys = noise.site_key(key, Stream.RESIDUAL_TILE, num_accepted), noise.site_key(key, Stream.RESIDUAL_ID, num_accepted)

        entry = kernels.residual_draw(target_logits, draft_logits, rows, *keys, first_tile, tile_size, **options)
        entry = entry if axis_name is None else entry.across(axis_name, temperature)
        massless = ~rows.plain & (entry.log_sum < jnp.log(MIN_RESIDUAL_MASS))
        next_id = jnp.where(massless, rows.draft_id, entry.ids)
        if draft is None:
            # A residual cannot be formed for a draft that was not certain, without its distribution.
            next_id = jnp.where((log_q[requests, rejected] != 0) & ~rows.plain, -1, next_id)
        return Outcome(num_accepted, next_id)

    # A kernel that walks the rows for their normalisers finds the largest logits on the way.
    if axis_name is not None or choice.kernels != "xla":
        return some_random()
    return lax.cond(jnp.all(greedy), lambda: greedy_outcome(target_logits, first, ids, lengths), some_random)


def greedy_outcome(target_logits: jax.Array, first: jax.Array, ids: jax.Array, lengths: jax.Array) -> Outcome:
    """The verdict where all requests are greedy: drafts are kept while they are what argmax would have written."""
    last, step = target_logits.shape[0] - 1, jnp.arange(ids.shape[1], dtype=jnp.int32)
    best = greedy_ids(target_logits)
    num_accepted = _leading((step < lengths[:, None]) & (best[jnp.minimum(first[:, None] + step, last)] == ids))
    return Outcome(num_accepted, best[jnp.minimum(first + num_accepted, last)])


def accept_prob(log_p: jax.Array, log_q: jax.Array) -> jax.Array:
    """min(1, p / q) of drawn ids; `log_q` is finite, because an id of probability 0 is never drawn."""
    return jnp.exp(jnp.minimum(log_p - log_q, 0.0))


def _draft_rows(
    draft: DraftRows | RecomputedRows | None, requests: jax.Array, rejected: jax.Array, draft_ids: jax.Array | None, vocab_size: int
) -> tuple[jax.Array | None, jax.Array, jax.Array, jax.Array]:
    """Draft logits over all ids [R, rows per request, V], and each request's row of them, its normaliser and its floor."""
    unfiltered = jnp.full(requests.shape, -jnp.inf, jnp.float32)
    only = jnp.zeros_like(requests)
    if draft is None:
        return None, only, jnp.zeros_like(unfiltered), unfiltered
    normaliser = draft.log_normaliser[requests, rejected]
    if isinstance(draft, RecomputedRows):
        bias = low_rank_bias(draft.latent[requests, rejected], draft.w2)
        logits, index, floor = (draft.base_logits[requests, rejected] + bias)[:, None], only, unfiltered
    else:
        logits, index, floor = draft.logits, rejected, draft.floor[requests, rejected]
    if draft_ids is not None:
        # One scatter of columns for all requests: scatters are slow on a CPU.
        columns = jnp.full((vocab_size, requests.shape[0]), -jnp.inf, logits.dtype)
        logits, index = columns.at[draft_ids].set(logits[requests, index].T, unique_indices=True).T[:, None], only
        # -inf passes no floor but that of rows without one.
        floor = jnp.maximum(floor, jnp.finfo(jnp.float32).min)
    return logits, index, normaliser, floor


def _across(stats: RowStats, axis_name: str, temperature: jax.Array) -> RowStats:
    """Statistics of whole rows from those of their parts on the devices along `axis_name`."""
    log_sum, best = lax.all_gather(stats.log_sum, axis_name), lax.all_gather(stats.best, axis_name)
    # At temperature 0 log_sum is the largest logit, and argmax takes the first of equals: the smallest ids.
    best = jnp.take_along_axis(best, jnp.argmax(log_sum, axis=0)[None], axis=0)[0]
    log_sum = jnp.where(temperature == 0, jnp.max(log_sum, axis=0), log_sum_exp(log_sum.T))
    return RowStats(log_sum, lax.pmax(stats.own, axis_name), best)


def _leading(kept: jax.Array) -> jax.Array:
    return jnp.sum(jnp.cumprod(kept.astype(jnp.int32), axis=1), axis=1)


def _require(
    target_logits: jax.Array,
    ids: jax.Array,
    per_row: dict[str, jax.Array | None],
    per_request: dict[str, jax.Array],
    per_draft: dict[str, jax.Array],
    draft: DraftRows | RecomputedRows | None,
    draft_ids: jax.Array | None,
    axis_name: str | None,
) -> None:
    for field, value, axes in (("target_logits", target_logits, "[N, V]"), ("ids", ids, "[R, G]")):
        if jnp.ndim(value) != 2:
            raise ValueError(f"{field} has shape {jnp.shape(value)}; allowed are two axes, {axes}")
    num_rows, block_size = ids.shape
    wanted: dict[str, tuple[Any, tuple[int, ...]]] = {field: (value, target_logits.shape[:1]) for field, value in per_row.items()}
    wanted |= {field: (value, (num_rows,)) for field, value in per_request.items()}
    wanted["key"] = per_request["key"], (num_rows, 2)
    wanted |= {field: (value, ids.shape) for field, value in per_draft.items()}
    if draft is not None:
        logits = "base_logits" if isinstance(draft, RecomputedRows) else "logits"
        columns = target_logits.shape[1] if draft_ids is None else draft_ids.shape[0]
        wanted[f"draft.{logits}"] = getattr(draft, logits), (num_rows, block_size, columns)
        wanted |= {f"draft.{name}": (getattr(draft, name), ids.shape) for name in ("log_normaliser", "floor") if hasattr(draft, name)}
    for field, (value, shape) in wanted.items():
        if value is not None and jnp.shape(value) != shape:
            given = f"ids having shape {ids.shape} and target_logits {target_logits.shape}"
            raise ValueError(f"{field} has shape {jnp.shape(value)}; allowed is {shape}, {given}")
    if draft_ids is not None and axis_name is not None:
        raise ValueError("draft_ids is given with axis_name; a vocabulary that is cut over devices must be the same for drafts and target")
