"""Acceptance, residual and the token that follows: the reference's decisions, and the law of what comes out."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax.block_verify import block_outcome_probs, verify_block
from dspark_jax.exactness import law_of_logits
from dspark_jax.protocols import DraftBlock, Verdict
from dspark_jax.sampling import Noise, Sampling, logit_floor
from dspark_jax.verify import accept_probs, outcome_probs, residual_probs, verify_tokens
from pallas_kernels.noise import Stream, round_key
from pallas_kernels.rejection_sample import accept_prob
from pallas_kernels.two_level_draw import draw

FLOOR = jax.jit(logit_floor)
VERIFIERS = {
    "tokens": (jax.jit(verify_tokens), jax.jit(outcome_probs)),
    "block": (jax.jit(verify_block), jax.jit(block_outcome_probs)),
}
DRAFT = jax.jit(functools.partial(draw, tile_stream=Stream.DRAFT_TILE, id_stream=Stream.DRAFT_ID))
PLAIN = jax.jit(functools.partial(draw, tile_stream=Stream.RESIDUAL_TILE, id_stream=Stream.RESIDUAL_ID))
NUM = 40_000
both_verifiers = pytest.mark.parametrize("verifier", VERIFIERS)


def _noise(num_rows: int, seed: int = 0) -> Noise:
    return Noise(key=round_key(seed, jnp.arange(num_rows, dtype=jnp.int32), jnp.zeros(num_rows, jnp.int32)))


@functools.partial(jax.jit, static_argnames="deterministic")
def _drafted(logits: jax.Array, sampling: Sampling, noise: Noise, draft_ids=None, deterministic: bool = False) -> DraftBlock:
    """Drafts from fixed logits [G, Vd], the same for all requests, as a drafter without a sequential head draws them."""
    num_rows, steps = noise.key.shape[0], []
    for k, row in enumerate(logits):
        tiled = jnp.broadcast_to(row, (num_rows, row.shape[0]))
        # A deterministic draft is a one-hot q: a filter that keeps the largest logit alone.
        floor = tiled.max(1) if deterministic else logit_floor(tiled, sampling)
        position = jnp.full(num_rows, k, jnp.int32)
        streams = {"tile_stream": Stream.DRAFT_TILE, "id_stream": Stream.DRAFT_ID}
        drawn = draw(tiled, floor, sampling.temperature, noise.key, position, **streams, tile_size=2)
        steps.append((drawn.ids if draft_ids is None else draft_ids[drawn.ids], drawn.log_prob, drawn.log_normaliser, floor))
    ids, log_q, normaliser, floor = (jnp.stack(each, axis=1) for each in zip(*steps, strict=True))
    return DraftBlock(ids, log_q, normaliser, floor, None, jnp.broadcast_to(logits, (num_rows, *logits.shape)))


def _grid(logits: jax.Array, num_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The same target logits [G + 1, V] for every request: flat rows, their requests, and the anchors' rows."""
    queries = logits.shape[0]
    row = jnp.repeat(jnp.arange(num_rows, dtype=jnp.int32), queries)
    return jnp.tile(logits, (num_rows, 1)), row, jnp.arange(num_rows, dtype=jnp.int32) * queries


def _assert_follows(verdict: Verdict, block: DraftBlock, law: np.ndarray) -> None:
    """Frequencies of (drafts, num_accepted, next id) lie within 4.5 standard deviations of their probabilities."""
    num_rows, (num_outcomes, vocab_size) = block.ids.shape[0], law.shape[-2:]
    code = np.zeros(num_rows, np.int64)
    for column in np.asarray(block.ids).T:
        code = code * vocab_size + column
    code = (code * num_outcomes + np.asarray(verdict.num_accepted)) * vocab_size + np.asarray(verdict.next_id)
    frequency = np.bincount(code, minlength=law.size) / num_rows
    expected = law.reshape(-1)
    allowed = 4.5 * np.sqrt(expected * (1 - expected) / num_rows) + 1e-6
    assert np.all(np.abs(frequency - expected) <= allowed)


def _law_of_round(verifier: str, p: np.ndarray, q: np.ndarray, length: int) -> np.ndarray:
    vocab_size = p.shape[1]
    law = np.zeros((vocab_size, vocab_size, p.shape[0], vocab_size))
    outcomes = VERIFIERS[verifier][1]
    for ids in np.ndindex(vocab_size, vocab_size):
        table = outcomes(jnp.asarray(p, jnp.float32), jnp.asarray(q, jnp.float32), jnp.asarray(ids, jnp.int32), jnp.int32(length))
        law[ids] = q[0, ids[0]] * q[1, ids[1]] * np.asarray(table)
    return law


def test_decisions_and_residuals_are_those_of_the_reference(golden):
    """Golden `verify_cases`: with the reference's uniforms, the same drafts are accepted and the same residual is drawn from."""
    cases = np.load(golden / "units" / "verify_cases.npz")
    checked = 0
    for i in range(len(cases["temperature"])):
        count, temperature = int(cases["draft_count"][i]), float(cases["temperature"][i])
        accepted = 0
        if count:
            p = np.stack([law_of_logits(row, temperature) for row in cases["target_logits"][i, :count]]).astype(np.float32)
            q = np.stack([law_of_logits(row, temperature) for row in cases["draft_logits"][i, :count]]).astype(np.float32)
            chance = accept_probs(jnp.asarray(p), jnp.asarray(q), jnp.asarray(cases["tokens"][i, :count]))
            accepted = int(np.cumprod(cases["uniforms"][i, :count] < np.asarray(chance)).sum())
            if accepted < count and np.all(np.isfinite(cases["residual"][i])):
                residual = residual_probs(jnp.asarray(p[accepted]), jnp.asarray(q[accepted]))
                np.testing.assert_allclose(np.asarray(residual), cases["residual"][i], atol=2e-6)
                checked += 1
        # A stop token among the accepted drafts ends the reference's count there; that is decided after verification here.
        assert accepted == cases["accepted"][i] or (cases["terminated"][i] and accepted >= cases["accepted"][i])
    assert checked >= 10


def test_greedy_cases_of_the_reference_come_out_of_verify_tokens(golden):
    """Golden `verify_cases` at temperature 0, through the whole function: acceptance and next token."""
    cases = np.load(golden / "units" / "verify_cases.npz")
    chosen = np.flatnonzero((cases["temperature"] == 0) & ~cases["terminated"])
    num, block_size = len(chosen), cases["tokens"].shape[1]
    zeros = jnp.zeros((num, block_size))
    block = DraftBlock(jnp.asarray(np.maximum(cases["tokens"][chosen], 0)), zeros, zeros, zeros, None, None)
    row = jnp.repeat(jnp.arange(num, dtype=jnp.int32), block_size + 1)
    first = jnp.arange(num, dtype=jnp.int32) * (block_size + 1)
    logits = jnp.asarray(cases["target_logits"][chosen]).reshape(num * (block_size + 1), -1)
    verdict = VERIFIERS["tokens"][0](logits, row, first, block, jnp.asarray(cases["draft_count"][chosen]), Sampling.make(num), _noise(num))
    assert np.array_equal(np.asarray(verdict.num_accepted), cases["accepted"][chosen])
    assert np.array_equal(np.asarray(verdict.next_id), cases["next_token"][chosen])


def test_the_chance_to_accept_is_one_minus_total_variation():
    """[A3] Acceptance against the sampler's q keeps 1 - TV(p, q) of the drafts; comparing with a target sample would keep fewer."""
    rng = np.random.default_rng(0)
    p, q = rng.dirichlet(np.ones(6), size=2).astype(np.float32)
    chance = accept_probs(jnp.tile(p, (6, 1)), jnp.tile(q, (6, 1)), jnp.arange(6, dtype=jnp.int32))
    assert abs(float((q * np.asarray(chance)).sum()) - (1 - 0.5 * np.abs(p - q).sum())) < 1e-6
    assert float((q * np.asarray(chance)).sum()) > float((p * q).sum())
    np.testing.assert_allclose(np.asarray(accept_prob(jnp.log(p), jnp.log(q))), np.asarray(chance), atol=1e-6)


@both_verifiers
def test_equal_distributions_accept_always_and_leave_no_nan(verifier):
    """[A4] p == q: acceptance 1, and a residual that is finite (p itself)."""
    p = jnp.asarray(np.random.default_rng(1).dirichlet(np.ones(5)), jnp.float32)
    assert np.array_equal(np.asarray(residual_probs(p, p)), np.asarray(p))
    logits = jnp.log(p)[None]
    sampling, noise = Sampling.make(NUM, 1.0), _noise(NUM)
    block = _drafted(jnp.tile(logits, (2, 1)), sampling, noise)
    flat, row, first = _grid(jnp.tile(logits, (3, 1)), NUM)
    verdict = VERIFIERS[verifier][0](flat, row, first, block, jnp.full(NUM, 2, jnp.int32), sampling, noise)
    assert np.all(np.asarray(verdict.num_accepted) == 2)
    assert np.all((np.asarray(verdict.next_id) >= 0) & (np.asarray(verdict.next_id) < 5))


@both_verifiers
@pytest.mark.parametrize("length", [0, 1, 2])
@pytest.mark.parametrize("deterministic", [False, True])
def test_a_round_follows_its_enumerated_law(verifier, length, deterministic):
    """[A1] [A2] [A3] Draft, acceptance and residual draws from one round's key, 40,000 rounds: the joint law of all of them."""
    rng = np.random.default_rng(3)
    target, drafts = rng.normal(size=(3, 5)).astype(np.float32), rng.normal(size=(2, 5)).astype(np.float32)
    sampling, noise = Sampling.make(NUM, 0.8), _noise(NUM)
    block = _drafted(jnp.asarray(drafts), sampling, noise, deterministic=deterministic)
    flat, row, first = _grid(jnp.asarray(target), NUM)
    verdict = VERIFIERS[verifier][0](flat, row, first, block, jnp.full(NUM, length, jnp.int32), sampling, noise)
    p = np.stack([law_of_logits(each, 0.8) for each in target])
    q = np.stack([law_of_logits(each, 0.0 if deterministic else 0.8) for each in drafts])
    _assert_follows(verdict, block, _law_of_round(verifier, p, q, length))


@both_verifiers
def test_filters_hold_on_both_sides_and_bound_the_output(verifier):
    """[A5] With top-k and top-p, q is the filtered q, p the filtered p, and nothing outside the filtered support comes out."""
    rng = np.random.default_rng(4)
    target, drafts = 2 * rng.normal(size=(3, 5)).astype(np.float32), 2 * rng.normal(size=(2, 5)).astype(np.float32)
    sampling, noise = Sampling.make(NUM, 0.9, 3, 0.85), _noise(NUM)
    block = _drafted(jnp.asarray(drafts), sampling, noise)
    flat, row, first = _grid(jnp.asarray(target), NUM)
    verdict = VERIFIERS[verifier][0](flat, row, first, block, jnp.full(NUM, 2, jnp.int32), sampling, noise)
    p, q = (np.stack([law_of_logits(each, 0.9, 3, 0.85) for each in rows]) for rows in (target, drafts))
    assert (p == 0).any() and (q == 0).any()
    _assert_follows(verdict, block, _law_of_round(verifier, p, q, 2))
    assert np.all(p[np.asarray(verdict.num_accepted), np.asarray(verdict.next_id)] > 0)


@both_verifiers
def test_a_reduced_draft_vocabulary_keeps_the_law(verifier):
    """[A7] q lives on four of six ids, in another numbering; p is not renormalised; the law is that of q scattered."""
    rng = np.random.default_rng(5)
    draft_ids = np.array([0, 2, 3, 5], np.int32)
    target, drafts = rng.normal(size=(3, 6)).astype(np.float32), rng.normal(size=(2, 4)).astype(np.float32)
    sampling, noise = Sampling.make(NUM, 1.0), _noise(NUM)
    block = _drafted(jnp.asarray(drafts), sampling, noise, jnp.asarray(draft_ids))
    assert set(np.unique(np.asarray(block.ids))) == set(draft_ids.tolist())
    flat, row, first = _grid(jnp.asarray(target), NUM)
    verdict = VERIFIERS[verifier][0](flat, row, first, block, jnp.full(NUM, 2, jnp.int32), sampling, noise, jnp.asarray(draft_ids))
    q = np.zeros((2, 6))
    q[:, draft_ids] = np.stack([law_of_logits(each) for each in drafts])
    _assert_follows(verdict, block, _law_of_round(verifier, np.stack([law_of_logits(each) for each in target]), q, 2))


# One shape for all batches below, so that they are one compiled program: requests, drafts, ids, flat rows.
REQUESTS, STEPS, IDS, ROWS = 6, 3, 9, 26


def _ragged(seed: int, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Target logits, the request of every flat row, and the anchors' rows, for requests of different lengths; the rest is padding."""
    first = np.concatenate([[0], np.cumsum(1 + lengths)[:-1]]).astype(np.int32)
    row = np.full(ROWS, REQUESTS - 1, np.int32)
    row[: int((1 + lengths).sum())] = np.repeat(np.arange(REQUESTS), 1 + lengths)
    return np.random.default_rng(seed).normal(size=(ROWS, IDS)).astype(np.float32), row, first


def _drafted_each(logits: jax.Array, sampling: Sampling, noise: Noise) -> DraftBlock:
    """Drafts from logits [R, G, V]."""
    shape = (REQUESTS, STEPS)
    request, step = (jnp.asarray(index.reshape(-1), jnp.int32) for index in np.indices(shape))
    no_floor = jnp.full(REQUESTS * STEPS, -jnp.inf)
    drawn = DRAFT(logits.reshape(-1, IDS), no_floor, sampling.temperature[request], noise.key[request], step)
    return DraftBlock(
        drawn.ids.reshape(shape), drawn.log_prob.reshape(shape), drawn.log_normaliser.reshape(shape), no_floor.reshape(shape), None, logits
    )


@both_verifiers
def test_padding_slots_and_batch_mates_change_nothing(verifier):
    """[B2] [F4] Requests of all temperatures and lengths: padding (even NaN), the slot, and who else is there are all the same."""
    lengths = np.array([3, 0, 2, 1, 3, 3], np.int32)
    logits, row, first = _ragged(6, lengths)
    drafts = jnp.asarray(np.random.default_rng(60).normal(size=(REQUESTS, STEPS, IDS)), jnp.float32)
    sampling, noise = Sampling.make(REQUESTS, [0.0, 1.0, 0.7, 0.0, 1.0, 1.3]), _noise(REQUESTS, seed=2)
    block = _drafted_each(drafts, sampling, noise)
    verdict = VERIFIERS[verifier][0](
        jnp.asarray(logits), jnp.asarray(row), jnp.asarray(first), block, jnp.asarray(lengths), sampling, noise
    )

    # The even requests in other slots, beside copies of request 1, behind other flat rows, and NaN as padding.
    order = np.array([4, 1, 2, 1, 1, 0])
    moved_logits, moved_row, moved_first = _ragged(61, lengths[order])
    moved_logits[int((1 + lengths[order]).sum()) :] = np.nan
    for slot, request in enumerate(order):
        own = np.arange(1 + int(lengths[request]))
        moved_logits[moved_first[slot] + own] = logits[first[request] + own]
    index = jnp.asarray(order, jnp.int32)
    moved = VERIFIERS[verifier][0](
        jnp.asarray(moved_logits),
        jnp.asarray(moved_row),
        jnp.asarray(moved_first),
        jax.tree.map(lambda leaf: leaf[index], block),
        jnp.asarray(lengths[order]),
        sampling.take(index),
        noise.take(index),
    )
    assert np.array_equal(np.asarray(moved.num_accepted), np.asarray(verdict.num_accepted)[order])
    assert np.array_equal(np.asarray(moved.next_id), np.asarray(verdict.next_id)[order])
    assert 0 < np.asarray(verdict.num_accepted).sum() < lengths.sum()


@both_verifiers
def test_temperature_zero_keeps_the_drafts_that_argmax_would_have_written(verifier):
    """[A8] Ties in the target's logits go to the smallest id, in all-greedy batches and beside warm requests."""
    lengths = np.array([3, 2, 3, 0, 1, 2], np.int32)
    logits, row, first = _ragged(7, lengths)
    logits = np.round(logits)
    best = logits.argmax(1)
    ids = best[np.minimum(first[:, None] + np.arange(STEPS), ROWS - 1)].astype(np.int32)
    ids[2, 1:] = (ids[2, 1:] + 1) % IDS
    zeros = jnp.zeros((REQUESTS, STEPS))
    block = DraftBlock(jnp.asarray(ids), zeros, zeros, zeros - jnp.inf, None, jnp.zeros((REQUESTS, STEPS, IDS)))
    expected = np.array([3, 2, 1, 0, 1])
    for last in (0.0, 1.0):
        sampling = Sampling.make(REQUESTS, [0.0] * 5 + [last])
        verdict = VERIFIERS[verifier][0](
            jnp.asarray(logits), jnp.asarray(row), jnp.asarray(first), block, jnp.asarray(lengths), sampling, _noise(REQUESTS)
        )
        assert np.array_equal(np.asarray(verdict.num_accepted)[:5], expected)
        assert np.array_equal(np.asarray(verdict.next_id)[:5], best[first[:5] + expected])


@both_verifiers
def test_a_round_without_drafts_is_a_plain_draw(verifier):
    """A request of length 0 gets the token that drawing from the residual streams at position 0 gives: plain decoding."""
    lengths = np.zeros(REQUESTS, np.int32)
    logits, row, first = (jnp.asarray(each) for each in _ragged(8, lengths))
    sampling, noise = Sampling.make(REQUESTS, 0.8, 4), _noise(REQUESTS)
    zeros = jnp.zeros((REQUESTS, STEPS))
    block = DraftBlock(zeros.astype(jnp.int32), zeros, zeros, zeros, None, jnp.zeros((REQUESTS, STEPS, IDS)))
    verdict = VERIFIERS[verifier][0](logits, row, first, block, jnp.asarray(lengths), sampling, noise)
    own = logits[:REQUESTS]
    plain = PLAIN(own, FLOOR(own, sampling), sampling.temperature, noise.key, jnp.zeros(REQUESTS, jnp.int32))
    assert not np.any(np.asarray(verdict.num_accepted))
    assert np.array_equal(np.asarray(verdict.next_id), np.asarray(plain.ids))


@both_verifiers
def test_sampled_drafts_without_their_logits_are_not_guessed_at(verifier):
    """[A1] Where q is needed and nobody kept it, the next id is -1 instead of a token from a wrong residual."""
    logits = jnp.asarray(np.array([[8.0, 0.0, 0.0], [0.0, 8.0, 0.0]], np.float32))
    block = DraftBlock(jnp.array([[2]], jnp.int32), jnp.full((1, 1), -0.1), jnp.ones((1, 1)), jnp.full((1, 1), -jnp.inf), None, None)
    zero = jnp.zeros(2, jnp.int32)
    verdict = VERIFIERS[verifier][0](logits, zero, zero[:1], block, jnp.ones(1, jnp.int32), Sampling.make(1, 1.0), _noise(1))
    assert int(verdict.num_accepted[0]) == 0 and int(verdict.next_id[0]) == -1
