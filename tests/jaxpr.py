"""Counts the matrix products that a function would execute, from its jaxpr."""

import math

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr


def _sub_jaxprs(value):
    if isinstance(value, ClosedJaxpr):
        yield value.jaxpr
    elif isinstance(value, Jaxpr):
        yield value
    elif isinstance(value, (tuple, list)):
        for inner in value:
            yield from _sub_jaxprs(inner)


def _dot_general_flops(eqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    width = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return 2 * width * math.prod(eqn.outvars[0].aval.shape)


def _count(jaxpr) -> int:
    total = 0
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            total += _dot_general_flops(eqn)
            continue
        inner = [_count(sub) for value in eqn.params.values() for sub in _sub_jaxprs(value)]
        if eqn.primitive.name == "scan":
            total += eqn.params["length"] * sum(inner)
        elif eqn.primitive.name == "cond":
            assert len(set(inner)) == 1, f"branches cost {inner}"
            total += inner[0]
        else:
            assert eqn.primitive.name != "while" or not any(inner), "a loop of unknown length"
            total += sum(inner)
    return total


def dot_flops(function, *args) -> int:
    """2 M N K of every dot_general, a scan's body as often as it runs."""
    return _count(jax.make_jaxpr(function)(*args).jaxpr)
