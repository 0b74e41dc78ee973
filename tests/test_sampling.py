"""Floors and draws: exact filters, the right law, and no id that the filters exclude."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from dspark_jax.sampling import Sampling, logit_floor
from pallas_kernels import noise as bits
from pallas_kernels.noise import Stream
from pallas_kernels.two_level_draw import draw, greedy_ids, log_normaliser, log_prob_of, probs, tiles_of

DRAFT = jax.jit(functools.partial(draw, tile_stream=Stream.DRAFT_TILE, id_stream=Stream.DRAFT_ID), static_argnames="tile_size")
FLOOR, NORMALISER, PROBS, LOG_PROB_OF = jax.jit(logit_floor), jax.jit(log_normaliser), jax.jit(probs), jax.jit(log_prob_of)


def _keys(num_rows: int, seed: int = 0) -> jax.Array:
    return bits.round_key(seed, jnp.arange(num_rows, dtype=jnp.int32), jnp.zeros(num_rows, jnp.int32))


def _literal_floor(logits: np.ndarray, top_k: int, top_p: float, temperature: float) -> tuple[float, float]:
    """The floor by sorting, and how far the decisive mass is from its threshold."""
    ordered = np.sort(logits.astype(np.float64))[::-1]
    if 0 < top_k < len(ordered):
        ordered = ordered[ordered >= ordered[top_k - 1]]
    mass = np.cumsum(np.exp((ordered - ordered[0]) / temperature))
    share = mass / mass[-1]
    reached = int(np.argmax(share >= top_p)) if top_p < 1 else len(ordered) - 1
    return float(ordered[reached]), float(np.abs(share - top_p).min()) if top_p < 1 else 1.0


@given(
    logits=st.lists(st.integers(-12, 12), min_size=2, max_size=24),
    top_k=st.integers(0, 30),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.99)),
    temperature=st.sampled_from([0.3, 1.0, 1.7]),
)
def test_the_floor_is_the_one_that_sorting_finds(logits, top_k, top_p, temperature):
    logits = np.array(logits + [-np.inf] * (24 - len(logits)), np.float32) / np.float32(4)
    expected, margin = _literal_floor(logits, top_k, top_p, temperature)
    assume(margin > 1e-5)
    floor = float(FLOOR(jnp.asarray(logits)[None], Sampling.make(1, temperature, top_k, top_p))[0])
    if top_p == 1 and not 0 < top_k < len(logits):
        assert floor == -np.inf
    else:
        assert floor == np.float32(expected)


def test_the_floor_keeps_ties_and_ignores_excluded_ids():
    logits = jnp.array([[0.0, -0.0, 2.0, 0.0, -jnp.inf, -3.0]])
    assert float(FLOOR(logits, Sampling.make(1, 1.0, top_k=2))[0]) == 0.0
    kept = np.asarray(PROBS(logits, jnp.zeros(1), jnp.ones(1), NORMALISER(logits, jnp.zeros(1), jnp.ones(1))))[0] > 0
    assert kept.tolist() == [True, True, True, True, False, False]


def test_rows_that_do_not_filter_have_no_floor():
    logits = jnp.tile(jnp.arange(6, dtype=jnp.float32), (4, 1))
    sampling = Sampling.make(4, temperature=[1.0, 0.0, 1.0, 0.5], top_k=[0, 2, 6, 2], top_p=[1.0, 0.5, 1.0, 1.0])
    assert np.asarray(FLOOR(logits, sampling)).tolist() == [-np.inf, -np.inf, -np.inf, 4.0]


@pytest.mark.parametrize(("tile_size", "top_k", "top_p"), [(2, 0, 1.0), (4, 4, 1.0), (3, 0, 0.8), (2, 5, 0.9), (1024, 5, 0.9)])
def test_the_two_level_draw_follows_the_filtered_law(tile_size, top_k, top_p):
    """[A5] 100,000 draws: each id within 4.5 standard deviations of its probability, none outside the filter, log_prob exact."""
    num = 100_000
    row = np.array([0.5, -jnp.inf, 1.5, -jnp.inf, 0.0, 1.4, 2.0, -1.0, 0.5], np.float32)
    logits = jnp.tile(row, (num, 1))
    sampling = Sampling.make(num, 0.7, top_k, top_p)
    floor = FLOOR(logits[:1], sampling.take(jnp.zeros(1, jnp.int32)))
    drawn = DRAFT(logits, jnp.broadcast_to(floor, (num,)), sampling.temperature, _keys(num), jnp.zeros(num, jnp.int32), tile_size=tile_size)
    scaled = row.astype(np.float64) / np.float64(np.float32(0.7))
    weight = np.where(row >= float(floor[0]), np.exp(scaled), 0.0)
    expected = weight / weight.sum()
    ids = np.asarray(drawn.ids)
    frequency = np.bincount(ids, minlength=len(row)) / num
    assert np.all(np.abs(frequency - expected) <= 4.5 * np.sqrt(expected * (1 - expected) / num))
    np.testing.assert_allclose(np.exp(np.asarray(drawn.log_prob)), expected[ids], rtol=2e-6)
    np.testing.assert_allclose(np.asarray(drawn.log_normaliser), np.log(weight.sum()), rtol=1e-6)


@pytest.mark.parametrize(("size", "tiles_made"), [(16, 3), (5, 8), (3, 16)])
def test_the_draw_is_what_its_two_levels_say(size, tiles_made):
    """Tiles are numbered from 0 whatever their number; beyond eight there are as many as eight devices can share, the last ones empty."""
    rng = np.random.default_rng(1)
    logits, num = jnp.asarray(rng.normal(size=(3, 40)) * 2, jnp.float32), 3
    assert tiles_of(logits, size).shape == (num, tiles_made, size)
    key, position = _keys(num, seed=4), jnp.array([0, 5, 2], jnp.int32)
    drawn = DRAFT(logits, jnp.full(num, -jnp.inf), jnp.ones(num), key, position, tile_size=size)
    for row in range(num):
        tiles = [np.arange(start, min(start + size, 40)) for start in range(0, 40, size)]
        tile_key = bits.site_key(key[row], Stream.DRAFT_TILE, position[row])
        id_key = bits.site_key(key[row], Stream.DRAFT_ID, position[row])
        values = np.asarray(logits[row], np.float64)
        tile = int(np.argmax([np.log(np.exp(values[ids]).sum()) + float(bits.gumbel(tile_key, t, 0)) for t, ids in enumerate(tiles)]))
        scores = [values[i] + float(bits.gumbel(id_key, tile, int(i))) for i in tiles[tile]]
        assert int(drawn.ids[row]) == int(tiles[tile][int(np.argmax(scores))])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_excluded_tiles_and_lone_survivors_give_no_nan(temperature):
    logits = np.full((4, 10), -np.inf, np.float32)
    logits[[0, 1, 2, 3], [0, 9, 5, 7]] = [3.0, -200.0, 0.0, 1e30]
    drawn = DRAFT(jnp.asarray(logits), jnp.full(4, -jnp.inf), jnp.full(4, temperature), _keys(4), jnp.zeros(4, jnp.int32), tile_size=4)
    assert np.asarray(drawn.ids).tolist() == [0, 9, 5, 7]
    assert np.asarray(drawn.log_prob).tolist() == [0.0] * 4
    assert np.all(np.isfinite(np.asarray(drawn.log_normaliser)))


@pytest.mark.parametrize("others", [0.0, 1.0])
def test_temperature_zero_is_argmax_with_ties_to_the_smallest_id(others):
    """[A8] Nothing is divided by a small number: huge logits and exact ties decide as argmax does, alone or beside warm rows."""
    rng = np.random.default_rng(2)
    logits = np.round(rng.normal(size=(64, 50)) * 2).astype(np.float32)
    logits[0] *= 1e30
    temperature = jnp.zeros(64).at[1::2].set(others)
    drawn = DRAFT(jnp.asarray(logits), jnp.full(64, -jnp.inf), temperature, _keys(64), jnp.zeros(64, jnp.int32), tile_size=8)
    greedy = np.asarray(temperature) == 0
    assert np.array_equal(np.asarray(drawn.ids)[greedy], logits.argmax(1)[greedy])
    assert np.all(np.asarray(drawn.log_prob)[greedy] == 0)
    assert np.array_equal(np.asarray(greedy_ids(jnp.asarray(logits))), logits.argmax(1))


def test_a_row_draws_the_same_in_any_slot_and_with_any_padding():
    """[B2] Neither the slot, nor batch-mates, nor padding of the vocabulary change a draw; a small vocabulary is its own tile."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(20, 33)).astype(np.float32)
    key, position = _keys(20, seed=8), jnp.arange(20, dtype=jnp.int32)
    arguments = (jnp.asarray(logits), jnp.full(20, -jnp.inf), jnp.full(20, 0.9), key, position)
    ids = np.asarray(DRAFT(*arguments).ids)
    order = rng.integers(0, 20, 20)
    assert np.array_equal(np.asarray(DRAFT(*(each[order] for each in arguments)).ids), ids[order])
    padded = np.concatenate([logits, np.full((20, 1024 - 33), -np.inf, np.float32)], axis=1)
    assert np.array_equal(np.asarray(DRAFT(jnp.asarray(padded), *arguments[1:]).ids), ids)


def test_bfloat16_logits_are_drawn_from_in_float32():
    """[A1] The reported probability is that of the rounded logits in float32 arithmetic."""
    logits = jnp.asarray(np.random.default_rng(6).normal(size=(20, 33)), jnp.bfloat16)
    arguments = (jnp.full(20, -jnp.inf), jnp.full(20, 0.8), _keys(20), jnp.zeros(20, jnp.int32))
    low, full = DRAFT(logits, *arguments), DRAFT(logits.astype(jnp.float32), *arguments)
    assert np.array_equal(np.asarray(low.ids), np.asarray(full.ids))
    assert np.array_equal(np.asarray(low.log_prob), np.asarray(full.log_prob))


def test_probabilities_of_ids_rows_and_draws_agree():
    """[A5] The sampler's log_prob and log_normaliser are those that a verifier finds with the same floor."""
    num = 60
    logits = jnp.asarray(np.random.default_rng(7).normal(size=(num, 24)) * 2, jnp.float32)
    sampling = Sampling.make(num, [0.0, 0.6, 1.3] * 20, [0, 5, 0, 3, 0] * 12, [1.0, 0.7, 0.95, 1.0] * 15)
    floor = FLOOR(logits, sampling)
    normaliser = NORMALISER(logits, floor, sampling.temperature)
    drawn = DRAFT(logits, floor, sampling.temperature, _keys(num), jnp.zeros(num, jnp.int32), tile_size=5)
    table = np.asarray(PROBS(logits, floor, sampling.temperature, normaliser))
    np.testing.assert_allclose(table.sum(1), 1, atol=2e-6)
    np.testing.assert_allclose(np.asarray(drawn.log_normaliser), np.asarray(normaliser), atol=2e-6)
    again = np.asarray(LOG_PROB_OF(logits, drawn.ids, floor, sampling.temperature, normaliser))
    np.testing.assert_allclose(np.asarray(drawn.log_prob), again, atol=4e-6)
    assert np.all(table[np.arange(num), np.asarray(drawn.ids)] > 0)
    for id_ in range(24):
        each = LOG_PROB_OF(logits, jnp.full(num, id_, jnp.int32), floor, sampling.temperature, normaliser)
        np.testing.assert_allclose(np.exp(np.asarray(each)), table[:, id_], atol=1e-6)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", -0.1),
        ("temperature", 1e-9),
        ("temperature", float("nan")),
        ("temperature", [1.0, 1.0, 1.0]),
        ("top_k", -1),
        ("top_k", 2.5),
        ("top_p", 0.0),
        ("top_p", 1.5),
    ],
)
def test_settings_out_of_range_are_refused(field, value):
    with pytest.raises(ValueError, match=f"{field} (is|has)"):
        Sampling.make(2, **{field: value})
