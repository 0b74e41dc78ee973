"""Numbers by which arrays are known again, computed where the arrays lie."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from dspark_jax.typing import Array, PyTree


def _weighted_sum(x: Array) -> Array:
    """Sum over the words of an array of word x (2 i + 1) modulo 2^32, i being the word's place: any change of one word changes it."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    if x.dtype == jnp.bool_:
        x = x.astype(jnp.uint8)
    words = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * min(x.dtype.itemsize, 4)}")).astype(jnp.uint32)
    place, stride = jnp.zeros(words.shape, jnp.uint32), 1
    for axis in reversed(range(words.ndim)):
        place = place + jax.lax.broadcasted_iota(jnp.uint32, words.shape, axis) * jnp.uint32(stride % 2**32)
        stride *= words.shape[axis]
    return jnp.sum(words * (2 * place + 1), dtype=jnp.uint32)


@functools.partial(jax.jit, static_argnames="floats_as")
def _weighted_sums(leaves: list[Array], floats_as: Any) -> Array:
    def converted(x: Array) -> Array:
        return x.astype(floats_as) if floats_as is not None and jnp.issubdtype(x.dtype, jnp.floating) else x

    return jnp.stack([_weighted_sum(converted(leaf)) for leaf in leaves])


def checksums(tree: PyTree, floats_as: Any = None) -> dict[str, int]:
    """A number for every array of a tree, by its path; the same however the array is split over devices and hosts, none of it gathered.

    Args:
      floats_as: dtype that floating-point arrays count as; None for their own.
    """
    paths, leaves = zip(*jax.tree_util.tree_flatten_with_path(tree)[0], strict=True)
    sums = np.asarray(_weighted_sums(list(leaves), floats_as))
    return {jax.tree_util.keystr(path): int(total) for path, total in zip(paths, sums, strict=True)}


__all__ = ["checksums"]
