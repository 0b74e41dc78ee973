"""The random bits: the published cipher, the promised intervals, the same numbers inside a kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import triton as plt

from pallas_kernels import noise
from pallas_kernels.noise import Stream


@pytest.mark.parametrize(
    ("key", "counter", "expected"),
    [
        ((0, 0), (0, 0), (0x6B200159, 0x99BA4EFE)),
        ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
        ((0x13198A2E, 0x03707344), (0x243F6A88, 0x85A308D3), (0xC4923A9C, 0x483DF7A0)),
    ],
)
def test_threefry_gives_the_known_answers_of_its_authors(key, counter, expected):
    words = noise.threefry2x32(jnp.array(key, jnp.uint32), *counter)
    assert tuple(int(word) for word in words) == expected


def test_uniform_is_open_symmetric_and_on_its_grid():
    values = np.asarray(noise.uniform(noise.seed_key(7), jnp.arange(512)[:, None], jnp.arange(512)), np.float64)
    units = values * 2**24
    assert np.all(units % 2 == 1) and units.min() > 0 and units.max() < 2**24
    assert abs(values.mean() - 0.5) < 3 * np.sqrt(1 / 12 / values.size)
    assert abs(values.var() - 1 / 12) < 1e-3


@pytest.mark.parametrize(("bits", "uniform"), [(0, 2.0**-24), (0xFFFFFFFF, 1 - 2.0**-24)])
def test_extreme_bits_stay_inside_the_interval_and_finite(monkeypatch, bits, uniform):
    monkeypatch.setattr(noise, "threefry2x32", lambda *_: (jnp.uint32(bits), jnp.uint32(bits)))
    assert float(noise.uniform(noise.seed_key(0), 0, 0)) == uniform
    assert np.isfinite(float(noise.gumbel(noise.seed_key(0), 0, 0)))


def test_gumbel_follows_its_law():
    values = np.sort(np.asarray(noise.gumbel(noise.seed_key(3), 0, jnp.arange(200_000)), np.float64))
    distance = np.abs(np.exp(-np.exp(-values)) - (np.arange(values.size) + 0.5) / values.size).max()
    assert distance < 1.95 / np.sqrt(values.size)  # Kolmogorov-Smirnov at 0.1 %


def test_the_winner_among_many_equal_ids_does_not_tie():
    values = np.asarray(noise.gumbel(noise.seed_key(5), jnp.arange(4096)[:, None], jnp.arange(1024)))
    best_two = np.sort(values, axis=1)[:, -2:]
    assert np.sum(best_two[:, 0] == best_two[:, 1]) <= 1  # on the grid of `uniform` one in some thousand rows would


def test_no_two_sites_share_a_key():
    """[A2] Seed, request, round, stream and position each change the key."""
    keys = {
        tuple(np.asarray(noise.site_key(noise.round_key(seed, request, index), stream, position)).tolist())
        for seed in (0, 1, 2**32, 2**64 - 1)
        for request in range(3)
        for index in range(3)
        for stream in Stream
        for position in range(3)
    }
    assert len(keys) == 4 * 3 * 3 * len(Stream) * 3


def test_keys_broadcast_as_elements_do():
    requests = jnp.arange(4, dtype=jnp.int32)
    together = noise.uniform(noise.round_key(9, requests, requests + 5), 1, 2)
    apart = [float(noise.uniform(noise.round_key(9, int(request), int(request) + 5), 1, 2)) for request in requests]
    assert np.array_equal(np.asarray(together), np.array(apart, np.float32))


def _kernel(key_ref, out_ref):
    words = noise.site_words((key_ref[0], key_ref[1]), Stream.DRAFT_ID, 3)
    index = jax.lax.broadcasted_iota(jnp.int32, (8, 128), 1)
    tile = jax.lax.broadcasted_iota(jnp.int32, (8, 128), 0)
    out_ref[...] = noise.gumbel(words, tile, index) + noise.uniform(words, tile, index)


OUT = jax.ShapeDtypeStruct((8, 128), jnp.float32)


def test_a_kernel_draws_the_same_numbers():
    key = noise.round_key(11, 4, 2)
    inside = pl.pallas_call(_kernel, out_shape=OUT, interpret=True)(key)
    site = noise.site_key(key, Stream.DRAFT_ID, 3)
    tile, index = np.indices((8, 128)).astype(np.int32)
    outside = noise.gumbel(site, jnp.asarray(tile), jnp.asarray(index)) + noise.uniform(site, jnp.asarray(tile), jnp.asarray(index))
    np.testing.assert_allclose(np.asarray(inside), np.asarray(outside), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("platform", "options"),
    [
        ("tpu", {"in_specs": [pl.BlockSpec(memory_space=pltpu.SMEM)]}),
        ("cuda", {"compiler_params": plt.CompilerParams(num_warps=4)}),
    ],
    ids=["tpu", "cuda"],
)
def test_kernels_that_draw_lower_for_both_accelerators(platform, options):
    call = jax.jit(pl.pallas_call(_kernel, out_shape=OUT, **options))
    lowered = call.trace(jax.ShapeDtypeStruct((2,), jnp.uint32)).lower(lowering_platforms=(platform,))
    assert "custom_call" in lowered.as_text()


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match="seed is"):
        noise.seed_key(seed)
