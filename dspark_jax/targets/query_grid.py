"""Flat tokens for everything that works token by token, a grid of queries for attention: the way there and back, for all targets."""

import dataclasses

import jax.numpy as jnp

from dspark_jax.protocols import FlatTokens
from dspark_jax.typing import Array, Float


@dataclasses.dataclass(frozen=True)
class QueryGrid:
    """How flat tokens lie in the [R, queries_per_row] grid that attention works on; computed once a forward pass."""

    num_rows: int
    index: Array | None
    row: Array
    slot: Array

    def to_grid(self, flat: Float[Array, "N H E"], queries_per_row: int) -> Float[Array, "R Q H E"]:
        """Head vectors by request and slot; places without a token hold something arbitrary."""
        grid = flat if self.index is None else flat[self.index]
        return grid.reshape(self.num_rows, queries_per_row, *flat.shape[1:])

    def to_flat(self, grid: Float[Array, "R Q H E"]) -> Float[Array, "N H E"]:
        """The inverse of `to_grid`."""
        return grid.reshape(-1, *grid.shape[2:]) if self.index is None else grid[self.row, self.slot]


def query_grid(tokens: FlatTokens, num_rows: int) -> QueryGrid:
    """Where the tokens of a pass stand in the grid."""
    index = None
    if not tokens.is_grid:
        flat = jnp.arange(tokens.ids.shape[0], dtype=jnp.int32)
        row = jnp.where(tokens.valid, tokens.row, num_rows)
        index = jnp.zeros((num_rows, tokens.queries_per_row), jnp.int32).at[row, tokens.slot].set(flat, mode="drop").reshape(-1)
    return QueryGrid(num_rows, index, tokens.row, tokens.slot)
