"""What a function would execute, from its jaxpr."""

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


def equations(jaxpr, times=1):
    """Every equation, and how often it runs; of the branches of a cond, the costliest."""
    for eqn in jaxpr.eqns:
        yield eqn, times
        inner = [sub for value in eqn.params.values() for sub in _sub_jaxprs(value)]
        if eqn.primitive.name == "cond":
            inner = [max(inner, key=_count)]
        elif eqn.primitive.name == "while":
            assert not any(map(_count, inner)), "matrix products in a loop of unknown length"
        repeats = eqn.params["length"] if eqn.primitive.name == "scan" else 1
        for sub in inner:
            yield from equations(sub, times * repeats)


def _dot_general_flops(eqn) -> int:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    width = math.prod(eqn.invars[0].aval.shape[axis] for axis in contracted)
    return 2 * width * math.prod(eqn.outvars[0].aval.shape)


def _count(jaxpr) -> int:
    return sum(
        times * _dot_general_flops(eqn)
        for eqn, times in equations(jaxpr)
        if eqn.primitive.name == "dot_general"
    )


def dot_flops(function, *args) -> int:
    """2 M N K of every dot_general, a scan's body as often as it runs."""
    return _count(jax.make_jaxpr(function)(*args).jaxpr)
