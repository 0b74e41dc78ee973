"""Conditionals that update big arrays where they are.

XLA copies what goes through a `lax.cond` or `lax.switch`: a round whose target pass is chosen on the device copied every cache once or
twice. What a loop carries stays in place, so that here a loop of at most one turn stands for the condition.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import jax
import jax.numpy as jnp

from dspark_jax.typing import Array, Bool, Int

Operand = TypeVar("Operand")


def when(condition: Bool[Array, ""], function: Callable[[Operand], Operand], operand: Operand) -> Operand:
    """`function(operand)` where the condition holds, else the operand; both of the same structure, shapes and dtypes."""

    def turn(carry: tuple[Array, Operand]) -> tuple[Array, Operand]:
        return jnp.zeros_like(carry[0]), function(carry[1])

    return jax.lax.while_loop(lambda carry: carry[0], turn, (condition, operand))[1]


def switch(index: Int[Array, ""], functions: Sequence[Callable[[Operand], Operand]], operand: Operand) -> Operand:
    """`functions[index](operand)`; all give what is of the operand's structure, shapes and dtypes."""
    if len(functions) == 1:
        return functions[0](operand)
    for place, function in enumerate(functions):
        operand = when(index == place, function, operand)
    return operand


def zeros_of(function: Callable[..., Any], *args: Any) -> Any:
    """Zeros in the shape of what `function(*args)` gives: what an operand holds before there is anything."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function, *args))
