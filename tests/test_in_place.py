"""Conditionals that leave big arrays where they are: the same values as `jax.lax`, and no copies."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from dspark_jax import in_place

CACHE = jax.ShapeDtypeStruct((1000, 64), jnp.float32)


def _write(value):
    return lambda told: (told[0].at[told[1], :].set(value), told[1] + 1)


WRITES = [_write(value) for value in (1.0, 2.0, 3.0)]


@jax.jit
def _switched(index, told):
    return in_place.switch(index, WRITES, told)


@pytest.mark.parametrize("index", [0, 1, 2])
def test_one_of_several_runs_once(index):
    told = (jnp.zeros((4, 2)), jnp.int32(1))
    cache, place = _switched(jnp.int32(index), told)
    expected, _ = jax.lax.switch(index, WRITES, told)
    np.testing.assert_array_equal(cache, expected)
    assert int(place) == 2


@pytest.mark.parametrize("condition", [False, True])
def test_what_does_not_hold_changes_nothing(condition):
    told = (jnp.zeros((4, 2)), jnp.int32(1))
    cache, place = in_place.when(jnp.bool_(condition), WRITES[0], told)
    assert (float(cache.sum()), int(place)) == ((2.0, 2) if condition else (0.0, 1))


def _copies(function) -> int:
    """Copies of a whole cache in the program of a function that its caches are given up to."""
    scalar = jax.ShapeDtypeStruct((), jnp.int32)
    text = jax.jit(function, donate_argnums=1).lower(scalar, (CACHE, scalar)).compile().as_text() or ""
    return sum("f32[1000,64]" in line.partition("copy(")[0] for line in text.splitlines() if "copy(" in line)


def test_no_cache_is_copied_where_lax_copies_it():
    assert _copies(lambda index, told: in_place.switch(index, WRITES, told)) == 0
    assert _copies(lambda index, told: in_place.when(index > 0, WRITES[0], told)) == 0
    assert _copies(lambda index, told: jax.lax.switch(index, WRITES, told)) > 0
