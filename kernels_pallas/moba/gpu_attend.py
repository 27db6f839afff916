"""Attention of rows that a Triton kernel has loaded, and its gradients.

Axes: see gpu.py.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.moba import plan
from kernels_pallas.moba.gpu_rows import load, load_rows

LOWEST = float(jnp.finfo(jnp.float32).min)
LOG2_E = math.log2(math.e)
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))


def dot(x, y, dimensions):
    """A product with float32 sums; float32 operands are not rounded to TensorFloat-32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x, y, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


@dataclasses.dataclass(frozen=True)
class Scores:
    """From products of queries and keys to powers of their scores.

    A score is kept as the product itself, or its tanh under a soft cap, and multiplied by `unit`
    only after the largest is subtracted: large scores lose nothing by it.
    """

    scale: float
    soft_cap: float | None

    @property
    def factor(self) -> float:
        """The size of the scale; its sign, and 0, are in the queries."""
        return abs(self.scale) or 1.0

    @property
    def unit(self) -> float:
        """What makes a logarithm to base 2 of a score."""
        return LOG2_E * (self.factor if self.soft_cap is None else self.soft_cap)

    def queries(self, q):
        """So far from overflow that no product overflows with bounded keys."""
        q = plan.bounded(q)
        if self.scale > 0:
            return q
        return -q if self.scale else jnp.zeros_like(q)

    def __call__(self, product):
        """Scores, and their slope (None: 1)."""
        if self.soft_cap is None:
            return product, None
        tanh = jnp.tanh(product * (self.factor / self.soft_cap))
        return tanh, 1 - tanh * tanh

    def power(self, s, top):
        """exp of a score less the largest."""
        return jnp.exp2((s - top) * self.unit)


class Part(NamedTuple):
    """Attention of some rows to some of their keys.

    Attributes:
      o: sum of powers of scores times value, [rows, E].
      top: largest score, [rows]; the lowest finite number where there are no keys.
      total: sum of powers of scores, [rows].
    """

    o: jax.Array
    top: jax.Array
    total: jax.Array

    @classmethod
    def empty(cls, rows: int, width: int):
        zeros = jnp.zeros((rows,), jnp.float32)
        return cls(jnp.zeros((rows, width), jnp.float32), zeros + LOWEST, zeros)

    def attend(self, s, v, scores: Scores):
        """With more keys: their scores [rows, keys], -inf where masked, and values."""
        top = jnp.maximum(self.top, jnp.max(s, axis=1))
        p = scores.power(s, top[:, None])
        fade = scores.power(self.top, top)
        o = self.o * fade[:, None] + dot(p.astype(v.dtype), v, NN)
        return Part(o, top, self.total * fade + jnp.sum(p, axis=1))

    def join(self, o, its_top, its_total, scores: Scores):
        """With a normalised output over other keys."""
        top = jnp.maximum(self.top, its_top)
        fade, weight = scores.power(self.top, top), its_total * scores.power(its_top, top)
        return Part(
            self.o * fade[:, None] + o.astype(jnp.float32) * weight[:, None],
            top,
            self.total * fade + weight,
        )

    def normalised(self):
        """The output and 1 / total, both 0 or finite where there are no keys."""
        inverse = 1 / jnp.maximum(self.total, jnp.finfo(jnp.float32).tiny)
        return self.o * inverse[:, None], inverse


class Rows(NamedTuple):
    """Rows of queries in the backward pass, with statistics over everything they attended.

    Attributes:
      q, do: queries, and gradients of their outputs.
      top: largest score.
      inverse: 1 / sum of powers of scores.
      delta: inner product of the output and its gradient.
    """

    q: jax.Array
    do: jax.Array
    top: jax.Array
    inverse: jax.Array
    delta: jax.Array

    def load(self, row, mask, scores: Scores):
        """Some of the rows; where the mask is false, rows that give no gradient to any other."""
        stats = (load(ref, row, mask, 0.0) for ref in (self.top, self.inverse, self.delta))
        q, do = (load_rows(ref, row, mask) for ref in (self.q, self.do))
        return Rows(scores.queries(q), do, *stats)


def query_gradient(rows: Rows, k, v, mask, scores: Scores):
    """Of the rows from these keys, over `scale`. mask: [rows, keys] or None."""
    s, slope = scores(dot(rows.q, k, NT))
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    p = scores.power(s, rows.top[:, None]) * rows.inverse[:, None]
    ds = p * (dot(rows.do, v, NT) - rows.delta[:, None])
    if slope is not None:
        ds = ds * slope
    return dot(ds.astype(k.dtype), k, NN)


def key_gradients(rows: Rows, k, v, mask, scores: Scores):
    """Of keys, over `factor`, and of values, from these rows. mask: [keys, rows] or None."""
    s, slope = scores(dot(k, rows.q, NT))
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    p = scores.power(s, rows.top[None]) * rows.inverse[None]
    ds = p * (dot(v, rows.do, NT) - rows.delta[None])
    if slope is not None:
        ds = ds * slope
    return dot(ds.astype(k.dtype), rows.q, NN), dot(p.astype(v.dtype), rows.do, NN)
