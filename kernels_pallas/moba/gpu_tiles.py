"""Triton kernels for tiles of queries that chose the same block of keys.

Axes: see gpu.py.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.moba.gpu_attend import NT, Part, Rows, dot, key_gradients, query_gradient
from kernels_pallas.moba.gpu_rows import (
    Sizes,
    launch,
    load_rows,
    padded,
    shapes_of,
    sizes_of,
    store_rows,
)


class Tables(NamedTuple):
    """Pairs of a group in tiles; a pair's partial result is in its slot.

    Attributes:
      row_V: the row of queries in each slot, -1 where it is empty; the full slots of a tile are
        its first.
      key_Z: the row of the first key of each tile's block.
      key_S: the row of the first key of each block.
      edge_S: the first tile of each block, and one beyond the last.
      slot_P: the slot of each pair, -1 where there is no pair; p = ((j * B + b) * T + t) * n + h
        with n heads in the group.
    """

    row_V: jax.Array
    key_Z: jax.Array
    key_S: jax.Array
    edge_S: jax.Array
    slot_P: jax.Array


def _step_keys(sizes: Sizes, M: int) -> int:
    return min(sizes.keys, max(16, pl.next_power_of_2(M)))


def _block_keys(first, i, L, M, K):
    """Rows of some keys of a block, and which of them it has (None: all)."""
    m = i * L + jnp.arange(L, dtype=jnp.int32)
    return first + m * K, None if M % L == 0 else m < M


def _tiles_forward_kernel(
    key_ref, row_ref, q_ref, k_ref, v_ref, o_ref, top_ref, total_ref, *, U, L, M, K, scores
):
    z = pl.program_id(0)

    @pl.when(row_ref[z * U] >= 0)
    def _():
        slot = z * U + jnp.arange(U, dtype=jnp.int32)
        row = row_ref[pl.ds(z * U, U)]
        q = scores.queries(load_rows(q_ref, row, row >= 0))
        first = key_ref[z]

        def step(i, part):
            key, inside = _block_keys(first, i, L, M, K)
            k, v = (load_rows(ref, key, inside) for ref in (k_ref, v_ref))
            s, _ = scores(dot(q, k, NT))
            if inside is not None:
                s = jnp.where(inside[None], s, -jnp.inf)
            return part.attend(s, v, scores)

        part = lax.fori_loop(0, pl.cdiv(M, L), step, Part.empty(U, padded(v_ref.shape[1])))
        store_rows(o_ref, slot, part.normalised()[0])
        top_ref[pl.ds(z * U, U)] = part.top
        total_ref[pl.ds(z * U, U)] = part.total


def forward(tables: Tables, q_RH, k_YH, v_YE, *, tile, M, K, scores, interpret):
    """Attention of every pair: o_VE, the largest score and the sum of powers of scores.

    Tiles without a pair hold rubbish.
    """
    E, V = v_YE.shape[1], tables.row_V.shape[0]
    sizes = sizes_of("forward", max(q_RH.shape[1], E), q_RH.dtype)
    L = _step_keys(sizes, M)
    stat = jax.ShapeDtypeStruct((V,), jnp.float32)
    return launch(
        functools.partial(_tiles_forward_kernel, U=tile, L=L, M=M, K=K, scores=scores),
        f"moba_tiles_forward_{tile}x{M}",
        (V // tile,),
        [jax.ShapeDtypeStruct((V, E), v_YE.dtype), stat, stat],
        sizes,
        interpret,
        (tables.key_Z, tables.row_V, q_RH, k_YH, v_YE),
    )


def _tiles_dq_kernel(key_ref, row_ref, k_ref, v_ref, row_refs, dq_ref, *, U, L, M, K, scores):
    z = pl.program_id(0)

    @pl.when(row_ref[z * U] >= 0)
    def _():
        slot = z * U + jnp.arange(U, dtype=jnp.int32)
        row = row_ref[pl.ds(z * U, U)]
        rows = row_refs.load(row, row >= 0, scores)
        first = key_ref[z]

        def step(i, dq):
            key, inside = _block_keys(first, i, L, M, K)
            k, v = (load_rows(ref, key, inside) for ref in (k_ref, v_ref))
            mask = None if inside is None else inside[None]
            return dq + query_gradient(rows, k, v, mask, scores)

        dq = jnp.zeros((U, padded(dq_ref.shape[1])), jnp.float32)
        dq = lax.fori_loop(0, pl.cdiv(M, L), step, dq)
        store_rows(dq_ref, slot, dq * scores.scale)


def backward_dq(tables: Tables, k_YH, v_YE, rows: Rows, *, tile, M, K, scores, interpret):
    """Gradient of every pair's query, dq_VH. Tiles without a pair hold rubbish."""
    H, V = k_YH.shape[1], tables.row_V.shape[0]
    sizes = sizes_of("dq", max(H, v_YE.shape[1]), k_YH.dtype)
    L = _step_keys(sizes, M)
    return launch(
        functools.partial(_tiles_dq_kernel, U=tile, L=L, M=M, K=K, scores=scores),
        f"moba_tiles_dq_{tile}x{M}",
        (V // tile,),
        [jax.ShapeDtypeStruct((V, H), k_YH.dtype)],
        sizes,
        interpret,
        (tables.key_Z, tables.row_V, k_YH, v_YE, rows),
    )[0]


def _tiles_dkv_kernel(
    key_ref, edge_ref, row_ref, k_ref, v_ref, row_refs, dk_in, dv_in, dk_ref, dv_ref,
    *, U, L, M, K, scores,
):  # fmt: skip
    s, i = pl.program_id(0), pl.program_id(1)
    first, end = edge_ref[s], edge_ref[s + 1]

    # A block that nobody chose has one tile, which is empty.
    @pl.when(row_ref[first * U] >= 0)
    def _():
        key, inside = _block_keys(key_ref[s], i, L, M, K)
        k, v = (load_rows(ref, key, inside) for ref in (k_ref, v_ref))

        def step(z, sums):
            row = row_ref[pl.ds(z * U, U)]
            dk, dv = key_gradients(row_refs.load(row, row >= 0, scores), k, v, None, scores)
            return sums[0] + dk, sums[1] + dv

        dk, dv = (jnp.zeros((L, x.shape[1]), jnp.float32) for x in (k, v))
        dk, dv = lax.fori_loop(first, end, step, (dk, dv))
        store_rows(dk_ref, key, load_rows(dk_in, key, inside) + dk * scores.factor, inside)
        store_rows(dv_ref, key, load_rows(dv_in, key, inside) + dv, inside)


def backward_dkv(
    tables: Tables, k_YH, v_YE, rows: Rows, dk_YH, dv_YE, *, tile, M, K, scores, interpret
):
    """Adds to the gradients of keys and values, float32, whose memory is given to the results."""
    sizes = sizes_of("dkv", max(k_YH.shape[1], v_YE.shape[1]), k_YH.dtype)
    L = _step_keys(sizes, M)
    return launch(
        functools.partial(_tiles_dkv_kernel, U=tile, L=L, M=M, K=K, scores=scores),
        f"moba_tiles_dkv_{tile}x{M}",
        (tables.key_S.shape[0], pl.cdiv(M, L)),
        shapes_of(dk_YH, dv_YE),
        sizes,
        interpret,
        (tables.key_S, tables.edge_S, tables.row_V, k_YH, v_YE, rows),
        (dk_YH, dv_YE),
    )
