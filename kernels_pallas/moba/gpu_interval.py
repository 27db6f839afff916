"""Triton kernels for intervals of keys that end with the query itself.

Axes: see gpu.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.moba.gpu_attend import (
    LOWEST,
    NT,
    Part,
    Rows,
    dot,
    key_gradients,
    query_gradient,
)
from kernels_pallas.moba.gpu_rows import (
    Shape,
    launch,
    load,
    load_rows,
    padded,
    shapes_of,
    sizes_of,
    store,
    store_rows,
)


class _QueryTile(NamedTuple):
    """A tile of queries of one head, and the keys it reaches.

    Attributes:
      b, n, h: row of the batch, query head, and its number in the group.
      t, inside: queries of the row, and which of them there are.
      position: their tokens.
      row: rows of the queries.
      low: where each token's interval begins.
      first, steps: the first key that any of them reaches, and how many steps it takes from there.
    """

    b: jax.Array
    n: jax.Array
    h: jax.Array
    t: jax.Array
    inside: jax.Array
    position: jax.Array
    row: jax.Array
    low: jax.Array
    first: jax.Array
    steps: jax.Array

    @classmethod
    def of_program(cls, shape: Shape, start_ref, low_ref, W: int, L: int):
        x, begin = pl.program_id(0), pl.program_id(1) * W
        b, h = lax.div(x, shape.heads), lax.rem(x, shape.heads)
        n, offset = start_ref[0] + h, start_ref[1]
        t = begin + jnp.arange(W, dtype=jnp.int32)
        inside = t < shape.T
        low = shape.load_low(low_ref, b, t, inside)
        first = low_ref[shape.low_row(b) + begin]
        reach = offset + jnp.minimum(begin + W, shape.T) - first
        steps = lax.div(jnp.maximum(reach, 0) + (L - 1), L)
        row = (b * shape.T + t) * shape.N + n
        return cls(b, n, h, t, inside, offset + t, row, low, first, steps)

    def keys(self, shape: Shape, i, L: int):
        """Rows of the keys of a step, which of them there are, and the mask [queries, keys]."""
        t = self.first + i * L + jnp.arange(L, dtype=jnp.int32)
        row = (self.b * shape.length + t) * shape.K + lax.div(self.n, shape.N // shape.K)
        mask = (t[None] >= self.low[:, None]) & (t[None] <= self.position[:, None])
        return row, t < shape.length, mask

    def slots(self, shape: Shape, slot_ref, j):
        """Slots of the queries' pairs with their choice j, and where there is one."""
        pair = ((j * shape.B + self.b) * shape.T + self.t) * shape.heads + self.h
        slot = load(slot_ref, pair, self.inside, -1)
        return slot, slot >= 0


def _interval_forward_kernel(
    start_ref, low_ref, q_ref, k_ref, v_ref, pair_refs, o_in, top_in, inverse_in,
    o_ref, top_ref, inverse_ref, *, W, L, shape, scores,
):  # fmt: skip
    tile = _QueryTile.of_program(shape, start_ref, low_ref, W, L)
    q = scores.queries(load_rows(q_ref, tile.row, tile.inside))

    def add(j, part):
        slot_ref, its_o_ref, its_top_ref, its_total_ref = pair_refs
        slot, valid = tile.slots(shape, slot_ref, j)
        return part.join(
            load_rows(its_o_ref, slot, valid),
            load(its_top_ref, slot, valid, LOWEST),
            load(its_total_ref, slot, valid, 0.0),
            scores,
        )

    def step(i, part):
        key, there, mask = tile.keys(shape, i, L)
        k, v = (load_rows(ref, key, there) for ref in (k_ref, v_ref))
        s, _ = scores(dot(q, k, NT))
        return part.attend(jnp.where(mask, s, -jnp.inf), v, scores)

    part = Part.empty(W, padded(v_ref.shape[1]))
    if shape.choices:
        part = lax.fori_loop(0, shape.choices, add, part)
    part = lax.fori_loop(0, tile.steps, step, part)
    o, inverse = part.normalised()
    store_rows(o_ref, tile.row, o, tile.inside)
    stat = (tile.b * shape.N + tile.n) * shape.T + tile.t
    store(top_ref, stat, part.top, tile.inside)
    store(inverse_ref, stat, inverse, tile.inside)


def forward(start_2, low_T, q_RH, k_YH, v_YE, pairs, out, *, shape: Shape, scores, interpret):
    """Attention of some query heads to their intervals and to the blocks that they chose.

    Args:
      start_2: the first query head, and the token of the first query, int32 [2].
      low_T: where each query's interval begins, of one row of the batch or of all; it does not
        fall from one token of a row to the next.
      pairs: slot_P and what `gpu_tiles.forward` returned, or nothing.
      out: o_RE, top [B * N * T] and inverse, whose memory is given to the results.

    Returns:
      `out` with the results of these heads.
    """
    sizes = sizes_of("forward", max(q_RH.shape[1], v_YE.shape[1]), q_RH.dtype)
    W, L = sizes.rows, sizes.keys
    return launch(
        functools.partial(_interval_forward_kernel, W=W, L=L, shape=shape, scores=scores),
        f"moba_interval_forward_{W}x{L}",
        (shape.B * shape.heads, pl.cdiv(shape.T, W)),
        shapes_of(*out),
        sizes,
        interpret,
        (start_2, low_T, q_RH, k_YH, v_YE, pairs),
        out,
    )


def _interval_dq_kernel(
    start_ref, low_ref, k_ref, v_ref, row_refs, pair_refs, dq_in, dq_ref, *, W, L, shape, scores
):
    tile = _QueryTile.of_program(shape, start_ref, low_ref, W, L)
    rows = row_refs.load(tile.row, tile.inside, scores)

    def step(i, dq):
        key, there, mask = tile.keys(shape, i, L)
        k, v = (load_rows(ref, key, there) for ref in (k_ref, v_ref))
        return dq + query_gradient(rows, k, v, mask, scores)

    def add(j, dq):
        slot_ref, its_dq_ref = pair_refs
        slot, valid = tile.slots(shape, slot_ref, j)
        return dq + load_rows(its_dq_ref, slot, valid).astype(jnp.float32)

    dq = jnp.zeros((W, padded(dq_ref.shape[1])), jnp.float32)
    dq = lax.fori_loop(0, tile.steps, step, dq) * scores.scale
    if shape.choices:
        dq = lax.fori_loop(0, shape.choices, add, dq)
    store_rows(dq_ref, tile.row, dq, tile.inside)


def backward_dq(
    start_2, low_T, k_YH, v_YE, rows: Rows, pairs, dq_RH, *, shape: Shape, scores, interpret
):
    """Gradient of some query heads, from their intervals and the blocks that they chose.

    Args: as for `forward`, and
      pairs: slot_P and what `gpu_tiles.backward_dq` returned, or nothing.
      dq_RH: gives its memory to the result.

    Returns:
      dq_RH with the gradients of these heads.
    """
    sizes = sizes_of("dq", max(k_YH.shape[1], v_YE.shape[1]), k_YH.dtype)
    W, L = sizes.rows, sizes.keys
    return launch(
        functools.partial(_interval_dq_kernel, W=W, L=L, shape=shape, scores=scores),
        f"moba_interval_dq_{W}x{L}",
        (shape.B * shape.heads, pl.cdiv(shape.T, W)),
        shapes_of(dq_RH),
        sizes,
        interpret,
        (start_2, low_T, k_YH, v_YE, rows, pairs),
        (dq_RH,),
    )[0]


def _interval_dkv_kernel(
    offset_ref, end_ref, low_ref, k_ref, v_ref, row_refs, dk_ref, dv_ref, *, W, L, shape, scores
):
    x, i = pl.program_id(0), pl.program_id(1)
    b, head = lax.div(x, shape.K), lax.rem(x, shape.K)
    G = shape.N // shape.K
    key_t = i * L + jnp.arange(L, dtype=jnp.int32)
    key, there = (b * shape.length + key_t) * shape.K + head, key_t < shape.length
    k, v = (load_rows(ref, key, there) for ref in (k_ref, v_ref))
    offset = offset_ref[0]
    begin = jnp.maximum(i * L - offset, 0)
    end = end_ref[(b if shape.lows > 1 else 0) * pl.cdiv(shape.length, L) + i]
    steps = lax.div(jnp.maximum(end - begin, 0) + (W - 1), W)

    def step(j, sums):
        t = begin + lax.div(j, G) * W + jnp.arange(W, dtype=jnp.int32)
        inside = t < shape.T
        low = shape.load_low(low_ref, b, t, inside)
        rows = row_refs.load((b * shape.T + t) * shape.N + head * G + lax.rem(j, G), inside, scores)
        mask = (key_t[:, None] >= low[None]) & (key_t[:, None] <= offset + t[None])
        dk, dv = key_gradients(rows, k, v, mask, scores)
        return sums[0] + dk, sums[1] + dv

    dk, dv = (jnp.zeros((L, x.shape[1]), jnp.float32) for x in (k, v))
    dk, dv = lax.fori_loop(0, steps * G, step, (dk, dv))
    store_rows(dk_ref, key, dk * scores.factor, there)
    store_rows(dv_ref, key, dv, there)


def backward_dkv(offset, low_T, k_YH, v_YE, rows: Rows, *, shape: Shape, scores, interpret):
    """Gradients of keys and values, float32, from all queries whose intervals they are in."""
    sizes = sizes_of("dkv", max(k_YH.shape[1], v_YE.shape[1]), k_YH.dtype)
    W, L = sizes.rows, sizes.keys
    tiles = pl.cdiv(shape.length, L)
    # One beyond the last query that reaches a tile of keys: where intervals begin never falls.
    last_I = jnp.arange(1, tiles + 1, dtype=jnp.int32) * L - 1
    end_BI = jax.vmap(lambda low_T: jnp.searchsorted(low_T, last_I, side="right"))(
        low_T.reshape(shape.lows, shape.T)
    )
    return launch(
        functools.partial(_interval_dkv_kernel, W=W, L=L, shape=shape, scores=scores),
        f"moba_interval_dkv_{W}x{L}",
        (shape.B * shape.K, tiles),
        [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (k_YH, v_YE)],
        sizes,
        interpret,
        (offset[None], end_BI.astype(jnp.int32).reshape(-1), low_T, k_YH, v_YE, rows),
    )
