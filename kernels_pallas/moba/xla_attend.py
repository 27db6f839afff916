"""Attention of some queries to some keys in plain XLA, and its gradients.

Axes: Q queries, L keys, H head width, E value width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def accumulator(dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(x.dtype, y.dtype)
    return jnp.einsum(
        spec, x.astype(dtype), y.astype(dtype), preferred_element_type=accumulator(dtype)
    )


def scores(q, k, factor, soft_cap):
    """Scores [..., Q, L] in float32, and their derivative in the product of q and k."""
    s = dot("...qh,...lh->...ql", q, k)
    if factor != 1:
        s = s * factor
    slope = factor
    if soft_cap is not None:
        tanh = jnp.tanh(s / soft_cap)
        s, slope = soft_cap * tanh, factor * (1 - tanh * tanh)
    return s, slope


class Part(NamedTuple):
    """Attention over some of the keys.

    The maximum and the sum stay apart: at scores of 1e4 their log-sum-exp in float32 would round
    away 1e-3 of every probability.

    Attributes:
      o: sum of exp(score - top) times value, [..., Q, E].
      top: largest score, [..., Q]; the lowest finite number where all is masked.
      total: sum of exp(score - top).
    """

    o: jax.Array
    top: jax.Array
    total: jax.Array


class Mask(NamedTuple):
    """Which keys queries attend to; None: all.

    Attributes:
      pairs: of every query and key, [..., Q, L].
      blocks: of every query and block of consecutive keys, [..., Q, blocks].
    """

    pairs: jax.Array | None = None
    blocks: jax.Array | None = None


def _masked_scores(q, k, mask: Mask, factor, soft_cap):
    """Scores, -inf where the mask of pairs is false, and their derivative."""
    s, slope = scores(q, k, factor, soft_cap)
    return s if mask.pairs is None else jnp.where(mask.pairs, s, -jnp.inf), slope


def _largest(s, mask: Mask):
    """Of each query the largest score that is not masked; the lowest finite number if all are."""
    if mask.blocks is None:
        top = jnp.max(s, axis=-1)
    else:
        of_blocks = jnp.max(s.reshape(*s.shape[:-1], mask.blocks.shape[-1], -1), axis=-1)
        top = jnp.max(jnp.where(mask.blocks, of_blocks, -jnp.inf), axis=-1)
    return jnp.maximum(top, jnp.finfo(s.dtype).min)


def _exponentials(s, top, mask: Mask):
    """exp(score - top), and 0 where masked."""
    if mask.blocks is None:
        return jnp.exp(s - top[..., None])
    of_blocks = (s - top[..., None]).reshape(*s.shape[:-1], mask.blocks.shape[-1], -1)
    return jnp.exp(jnp.where(mask.blocks[..., None], of_blocks, -jnp.inf)).reshape(s.shape)


def attend(q, k, v, mask: Mask, factor, soft_cap) -> Part:
    s, _ = _masked_scores(q, k, mask, factor, soft_cap)
    top = _largest(s, mask)
    p = _exponentials(s, top, mask)
    return Part(dot("...ql,...le->...qe", p.astype(v.dtype), v), top, jnp.sum(p, -1))


def no_part(shape: tuple[int, ...], width: int, dtype) -> Part:
    """Attention of queries of this shape to no keys."""
    return Part(
        jnp.zeros((*shape, width), dtype),
        jnp.full(shape, jnp.finfo(dtype).min, dtype),
        jnp.zeros(shape, dtype),
    )


def merge(a: Part, b: Part) -> Part:
    """Attention over the keys of both."""
    top = jnp.maximum(a.top, b.top)
    x, y = jnp.exp(a.top - top), jnp.exp(b.top - top)
    return Part(x[..., None] * a.o + y[..., None] * b.o, top, x * a.total + y * b.total)


class Rows(NamedTuple):
    """What the backward pass needs of each query, over all keys that it attended.

    Attributes:
      top: largest score.
      inverse: 1 / sum of exp(score - top).
      do: gradient of the output.
      delta: inner product of `do` and the output.
    """

    top: jax.Array
    inverse: jax.Array
    do: jax.Array
    delta: jax.Array


def attend_gradients(q, k, v, mask: Mask, rows: Rows, factor, soft_cap):
    """Gradients of q, k and v from these keys."""
    s, slope = _masked_scores(q, k, mask, factor, soft_cap)
    p = _exponentials(s, rows.top, mask) * rows.inverse[..., None]
    dv = dot("...ql,...qe->...le", p.astype(rows.do.dtype), rows.do)
    dp = dot("...qe,...le->...ql", rows.do, v)
    ds = (p * (dp - rows.delta[..., None]) * slope).astype(q.dtype)
    return dot("...ql,...lh->...qh", ds, k), dot("...ql,...qh->...lh", ds, q), dv
