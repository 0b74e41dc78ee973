"""The axis legend, and the decorator that checks shapes and dtypes of every public function.

One letter, one meaning, in every signature, docstring and einsum of this project:

====  =======================================================================
axis  meaning
====  =======================================================================
R     requests (rows of a batch that is being decoded)
G     drafted tokens of a round; the anchor is never counted
N     flat tokens sent to the target: the scheduled tokens of all requests
V     vocabulary (``Vd``: the draft vocabulary, where it is smaller)
D     model width
F     concatenated tapped features of the target (number of taps x D)
M     rank of the Markov head
T     cache slots
L     prompt length
B     training batch
S     sequence length
A     anchors per sequence
P     prediction sites of a training batch (B x A x G)
====  =======================================================================

Lengths count tokens, positions are absolute and zero-based, probabilities are float32 and times are seconds.
"""

from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeAlias, TypeVar

from beartype import beartype
from jaxtyping import Array, Bool, Float, Int, PyTree, Shaped, UInt32, jaxtyped

Arguments = ParamSpec("Arguments")
Result = TypeVar("Result")

Params: TypeAlias = Mapping[str, Any]
"""A tree of parameters: nested dicts of arrays, named as the reference names them (``layers_0/self_attn/q_proj/weight``)."""


def typed(function: Callable[Arguments, Result]) -> Callable[Arguments, Result]:
    """Check the jaxtyping annotations of `function` at every call (under `jax.jit`: at every trace)."""
    return jaxtyped(typechecker=beartype)(function)


__all__ = ["Array", "Bool", "Float", "Int", "Params", "PyTree", "Shaped", "UInt32", "typed"]
