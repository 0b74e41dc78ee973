"""A function with its loops written out and its known branches taken, so that a compiler counts what a run of it does.

`aot_work.unrolled` does so for outermost loops alone. Here loops inside of other functions are written out too, and a branch whose
condition depends on no argument is chosen while tracing: a program for one temperature has no trace of the others.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.core
import jax.numpy as jnp
from jax.extend import core
from jax.sharding import Mesh

FEW_NUMBERS = 4096
"""Arrays up to this size are computed while tracing; larger ones would become constants of the program."""


def written_out(function: Callable[..., Any], mesh: Mesh, *args: Any) -> Callable[..., Any]:
    """`function` on arguments of the shapes of `args`, traced over `mesh`. Loops of unknown length stay."""
    with jax.set_mesh(mesh):
        program, shape = jax.make_jaxpr(function, return_shape=True)(*args)
    # Outside the mesh: what is known is computed here and now, on no device of it.
    known: Any = jax.make_jaxpr(lambda *flat: _run(program, flat))(*jax.tree.leaves(args))

    def call(*args: Any) -> Any:
        return jax.tree.unflatten(jax.tree.structure(shape), core.jaxpr_as_fun(known)(*jax.tree.leaves(args)))

    return call


def _run(program: Any, args: Sequence[Any]) -> list[Any]:
    """The equations of a traced program one after another; those whose inputs are numbers are evaluated at once."""
    jaxpr = program.jaxpr
    values = dict(zip([*jaxpr.constvars, *jaxpr.invars], [*program.consts, *args], strict=True))

    def read(variable: Any) -> Any:
        return variable.val if isinstance(variable, core.Literal) else values[variable]

    for equation in jaxpr.eqns:
        inputs = [read(variable) for variable in equation.invars]
        name, params = equation.primitive.name, equation.params
        if name in ("jit", "pjit"):
            outputs = _run(params["jaxpr"], inputs)
        elif name == "cond" and _is_known(inputs[:1]):
            outputs = _run(params["branches"][int(inputs[0])], inputs[1:])
        elif name == "platform_index":
            # Its last branch is the one for platforms without one of their own, TPUs among them.
            outputs = [len(params["platforms"]) - 1]
        elif name == "scan":
            outputs = _scan(params, inputs)
        else:
            outputs = _apply(program, equation, values)
        values.update(zip(equation.outvars, outputs, strict=True))
    return [read(variable) for variable in jaxpr.outvars]


def _scan(params: Any, inputs: list[Any]) -> list[Any]:
    """Every pass of a scan."""
    num_consts, num_carry = params["num_consts"], params["num_carry"]
    consts, carry, rows = inputs[:num_consts], inputs[num_consts : num_consts + num_carry], inputs[num_consts + num_carry :]
    passes = range(params["length"])
    given = []
    for place in reversed(passes) if params["reverse"] else passes:
        outputs = _run(params["jaxpr"], [*consts, *carry, *(row[place] for row in rows)])
        carry = outputs[:num_carry]
        given.append(outputs[num_carry:])
    return [*carry, *(jnp.stack(each) for each in zip(*(given[::-1] if params["reverse"] else given), strict=True))]


def _apply(program: Any, equation: Any, values: dict[Any, Any]) -> list[Any]:
    """One equation, as a program of its own."""
    inputs = list(dict.fromkeys(each for each in equation.invars if not isinstance(each, core.Literal)))
    kept = [each for each in equation.outvars if type(each).__name__ != "DropVar"]
    alone = program.jaxpr.replace(eqns=[equation], constvars=[], invars=inputs, outvars=kept)
    function = core.jaxpr_as_fun(program.replace(jaxpr=alone, consts=[]))
    given = [values[each] for each in inputs]
    if _is_known(given) and all(each.aval.size <= FEW_NUMBERS for each in equation.outvars):
        with jax.ensure_compile_time_eval():
            outputs = iter(function(*given))
    else:
        outputs = iter(function(*given))
    return [next(outputs) if each in kept else None for each in equation.outvars]


def _is_known(values: Sequence[Any]) -> bool:
    return not any(isinstance(value, jax.core.Tracer) for value in values)
