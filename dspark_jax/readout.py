"""From prediction sites to logits and what the losses read off them, a chunk of sites at a time.

The gradient of a chunk is taken on the spot, while its logits are there, and only small parts of it are kept: the hidden states' and the
sequential head's. So nothing is computed twice, as recomputation in the backward pass would, and peak memory does not grow with
anchors times vocabulary. What makes it possible is that all denominators are known before any logit: weights do not depend on
parameters. Chunks without a supervised site are skipped.
"""

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from dspark_jax.protocols import Drafter, Sites, TargetHead, TrainBatch
from dspark_jax.sharding import constrain
from dspark_jax.typing import Array, Bool, Float, Int, Params, typed


class _Site(NamedTuple):
    """What is asked of every site: the position whose target distribution it is held to, the label, and the weight."""

    teacher_place: Array
    label: Array
    weight: Array


class Readout(NamedTuple):
    """What the readout says of every site."""

    ce: Array
    l1: Array
    soft_ce: Array
    agree: Array


class Factors(NamedTuple):
    """What the per-site terms are multiplied by; None for a term that is not even computed."""

    ce: Array
    l1: Array
    soft_ce: Array | None


@typed
def label_rows(label: Int[Array, "P"], draft_ids: Int[Array, "Vd"] | None) -> tuple[Int[Array, "P"], Bool[Array, "P"]]:
    """Row of the draft head for every label, and whether the draft vocabulary has it at all (the row is arbitrary where not)."""
    if draft_ids is None:
        return label, jnp.ones(label.shape, jnp.bool_)
    row = jnp.minimum(jnp.searchsorted(draft_ids, label), draft_ids.shape[0] - 1).astype(label.dtype)
    return row, draft_ids[row] == label


@typed
def compare(
    draft_logits: Float[Array, "P Vd"], teacher_logits: Float[Array, "P V"], label: Int[Array, "P"], draft_ids: Int[Array, "Vd"] | None
) -> tuple[Float[Array, "P"], Float[Array, "P"], Float[Array, "P"], Bool[Array, "P"]]:
    """Cross-entropy, L1 distance, soft cross-entropy and greedy agreement of draft and target at every site.

    With a draft vocabulary the draft puts no mass outside it, so that the target's mass there is part of the distance, and
    1 - L1 / 2 equals the sum over the draft ids of min(p, q), p not renormalised. The cross-entropy is 0 for labels outside,
    and the soft cross-entropy sums over the draft ids alone.
    """
    log_q = jax.nn.log_softmax(draft_logits)
    p = jax.lax.stop_gradient(jax.nn.softmax(teacher_logits))
    row, inside = label_rows(label, draft_ids)
    ce = jnp.where(inside, -jnp.take_along_axis(log_q, row[:, None], axis=1)[:, 0], 0.0)
    draft_choice = jnp.argmax(draft_logits, axis=1)
    outside = jnp.zeros_like(ce)
    if draft_ids is not None:
        draft_choice = draft_ids[draft_choice]
        p = p[:, draft_ids]
        outside = jnp.maximum(1.0 - jnp.sum(p, axis=1), 0.0)
    l1 = jnp.sum(jnp.abs(jnp.exp(log_q) - p), axis=1) + outside
    soft_ce = -jnp.sum(p * log_q, axis=1)
    return ce, l1, soft_ce, draft_choice == jnp.argmax(teacher_logits, axis=1)


class _Split(NamedTuple):
    """Which leaves of the parameters the logits depend on (static)."""

    structure: Any
    reached: tuple[bool, ...]

    def split(self, params: Params) -> tuple[list[Array], list[Array]]:
        """The leaves that the logits depend on, and the others."""
        leaves = jax.tree.leaves(params)
        pairs = list(zip(leaves, self.reached, strict=True))
        return [leaf for leaf, reached in pairs if reached], [leaf for leaf, reached in pairs if not reached]

    def merge(self, reached: list[Array], others: list[Array]) -> Params:
        """The inverse of `split`."""
        first, second = iter(reached), iter(others)
        return jax.tree.unflatten(self.structure, [next(first) if flag else next(second) for flag in self.reached])


def _split_of(drafter: Drafter, params: Params, head: TargetHead, hidden: Array, latent: Array) -> _Split:
    """Read off the traced program: the sums over chunks then hold the sequential head, not a second copy of the whole drafter."""
    leaves, structure = jax.tree.flatten(params)
    traced = jax.make_jaxpr(lambda leaves, *site: drafter.site_logits(jax.tree.unflatten(structure, leaves), head, *site))(
        leaves, hidden, latent
    ).jaxpr
    used = {id(value) for equation in traced.eqns for value in equation.invars} | {id(value) for value in traced.outvars}
    return _Split(structure, tuple(id(value) in used for value in traced.invars[: len(leaves)]))


class _Fixed(NamedTuple):
    """What the readout needs and no gradient flows to."""

    others: list[Array]
    head: TargetHead
    teacher_head: TargetHead
    last_hidden: Array
    factors: Factors


def _chunk_objective(
    drafter: Drafter, split: _Split, reached: list[Array], hidden: Array, latent: Array, site: _Site, fixed: _Fixed
) -> tuple[Array, Readout]:
    """The share of a chunk [B, c] in the terms, and the readout of its sites."""

    def flat(x: Array) -> Array:
        # Not -1: a drafter without a sequential head has latents of width 0.
        return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])

    with jax.named_scope("draft_logits"):
        params = split.merge(reached, fixed.others)
        logits = constrain(drafter.site_logits(params, fixed.head, flat(hidden), flat(latent)).astype(jnp.float32), "batch", "vocab")
    with jax.named_scope("teacher_logits"):
        teacher = jnp.take_along_axis(fixed.last_hidden, site.teacher_place[..., None], axis=1)
        teacher_logits = constrain(jax.lax.stop_gradient(fixed.teacher_head.logits(flat(teacher))), "batch", "vocab")
    ce, l1, soft_ce, agree = compare(logits, teacher_logits, flat(site.label), fixed.head.draft_ids)
    weight = flat(site.weight)
    objective = fixed.factors.ce * jnp.sum(weight * ce) + fixed.factors.l1 * jnp.sum(weight * l1)
    if fixed.factors.soft_ce is None:
        soft_ce = jnp.zeros_like(ce)
    else:
        objective = objective + fixed.factors.soft_ce * jnp.sum(weight * soft_ce)
    readout = Readout(ce, l1, soft_ce, agree.astype(jnp.float32))
    return objective, jax.tree.map(lambda x: x.reshape(site.label.shape), readout)


def _scan_chunks(evaluate: Callable, carry: Any, chunks: tuple[Array, Array, _Site]) -> tuple[Any, Any]:
    """Scan `evaluate(carry, chunk)` over the chunks; those without any weight give zeros and cost nothing."""
    blank = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(evaluate, carry, jax.tree.map(lambda x: x[0], chunks))[1])

    def body(state: Any, chunk: tuple[Array, Array, _Site]) -> tuple[Any, Any]:
        return jax.lax.cond(jnp.any(chunk[2].weight > 0), evaluate, lambda kept, _: (kept, blank), state, chunk)

    return jax.lax.scan(body, carry, chunks)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _readout(
    drafter: Drafter, split: _Split, reached: list[Array], hidden: Array, latent: Array, site: _Site, fixed: _Fixed
) -> tuple[Array, Readout]:
    """Sum over sites [chunks, B, c] of the weighted terms, times `fixed.factors`; and the readout."""

    def evaluate(total: Array, chunk: tuple[Array, Array, _Site]) -> tuple[Array, Readout]:
        share, readout = _chunk_objective(drafter, split, reached, *chunk, fixed)
        return total + share, readout

    return _scan_chunks(evaluate, jnp.zeros((), jnp.float32), (hidden, latent, site))


def _readout_forward(
    drafter: Drafter, split: _Split, reached: list[Array], hidden: Array, latent: Array, site: _Site, fixed: _Fixed
) -> tuple[tuple[Array, Readout], Any]:
    """The same, and the gradient of the sum, taken chunk by chunk while the logits are there."""
    objective = jax.value_and_grad(partial(_chunk_objective, drafter, split), argnums=(0, 1, 2), has_aux=True)

    def evaluate(totals: tuple[Array, list[Array]], chunk: tuple[Array, Array, _Site]) -> tuple[Any, Any]:
        (share, readout), (to_reached, to_hidden, to_latent) = objective(reached, *chunk, fixed)
        gradient = [total + part.astype(jnp.float32) for total, part in zip(totals[1], to_reached, strict=True)]
        return (totals[0] + share, gradient), (readout, to_hidden, to_latent)

    # Sums over chunks stay in float32 where parameters are in bfloat16.
    start = (jnp.zeros((), jnp.float32), [jnp.zeros(leaf.shape, jnp.float32) for leaf in reached])
    (total, gradient), (readout, to_hidden, to_latent) = _scan_chunks(evaluate, start, (hidden, latent, site))
    gradient = [part.astype(leaf.dtype) for part, leaf in zip(gradient, reached, strict=True)]
    return (total, readout), (gradient, to_hidden, to_latent)


def _readout_backward(drafter: Drafter, split: _Split, gradients: Any, cotangent: tuple[Array, Readout]) -> tuple[Any, ...]:
    """Scale the gradients that the forward pass has taken. The readout is for metrics: no gradient flows through it."""
    return (*jax.tree.map(lambda x: x * cotangent[0].astype(x.dtype), gradients), None, None)


_readout.defvjp(_readout_forward, _readout_backward)


def _supervised_first(weight: Float[Array, "B Q"]) -> tuple[Int[Array, "B Q"], Int[Array, "B Q"]]:
    """A permutation of every sequence's sites that puts those with weight first, and its inverse."""
    order = jnp.argsort(weight <= 0, axis=1, stable=True)
    return order, jnp.argsort(order, axis=1)


def _pick(x: Array, order: Int[Array, "B Q"]) -> Array:
    return jnp.take_along_axis(x, order.reshape(order.shape + (1,) * (x.ndim - 2)), axis=1)


def _gathered(head: TargetHead) -> TargetHead:
    """The head with whole rows on every device of a mesh, fetched once: inside the loop it would be fetched for every chunk."""
    return dataclasses.replace(head, lm_head=constrain(head.lm_head, "vocab", None))


def read_sites(
    drafter: Drafter,
    params: Params,
    head: TargetHead,
    teacher_head: TargetHead,
    batch: TrainBatch,
    sites: Sites,
    chunk: int,
    factors: Factors,
) -> tuple[Float[Array, ""], Readout]:
    """The sum over terms of factor x sum over sites of weight x term, and the readout [P] behind it.

    Gradients of the first flow to `params` and `sites.hidden` and `sites.latent`; none flow through the readout.

    Args:
      head: the target's head that the drafter predicts through, cut to the draft vocabulary where there is one.
      teacher_head: the target's head over the whole vocabulary.
      chunk: sites whose logits exist at once. Every sequence gives equally many of them, so that all devices of a data-parallel mesh
        have work in each chunk; supervised sites come first.

    Raises:
      ValueError: the sites do not divide evenly among the sequences.
    """
    num_rows, length, _ = batch.last_hidden.shape
    num_sites = sites.label.shape[0]
    if num_sites % num_rows:
        raise ValueError(f"prediction_sites gave {num_sites} sites for {num_rows} sequences; every sequence must have equally many")
    per_row = num_sites // num_rows
    size = min(per_row, max(1, chunk // num_rows))
    num_chunks = -(-per_row // size)
    order, inverse = _supervised_first(sites.weight.reshape(num_rows, per_row))

    def in_chunks(x: Array) -> Array:
        rows = _pick(x.reshape(num_rows, per_row, *x.shape[1:]), order)
        rows = jnp.pad(rows, [(0, 0), (0, num_chunks * size - per_row)] + [(0, 0)] * (rows.ndim - 2))
        return jnp.moveaxis(rows.reshape(num_rows, num_chunks, size, *rows.shape[2:]), 1, 0)

    site = _Site(in_chunks(sites.teacher_index % length), in_chunks(sites.label), in_chunks(sites.weight))
    split = _split_of(drafter, params, head, sites.hidden[:1], sites.latent[:1])
    reached, others = split.split(params)
    fixed = jax.lax.stop_gradient(_Fixed(others, _gathered(head), _gathered(teacher_head), batch.last_hidden, factors))
    result: Any = _readout(drafter, split, reached, in_chunks(sites.hidden), in_chunks(sites.latent), site, fixed)
    objective, readout = result

    def in_order(x: Array) -> Array:
        rows = jnp.moveaxis(x, 0, 1).reshape(num_rows, num_chunks * size)[:, :per_row]
        return _pick(rows, inverse).reshape(-1)

    return objective, jax.lax.stop_gradient(jax.tree.map(in_order, readout))


__all__ = ["Factors", "Readout", "compare", "label_rows", "read_sites"]
