"""Attention to chosen blocks in plain XLA, in tiles of pairs that share one.

All heads of a batch row share a table: row r of key head k is row k * G * T + r, and its block s is
block k * S + s. Batch rows have tables of their own, so that the compiler can cut the batch over
devices. Steps at the end of the tables that have no pairs in any are not computed.

Axes: see plan.py; W tiles of a step, R rows and S blocks of all heads, P slots of a table, E value
width.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.moba import plan
from kernels_pallas.moba.xla_attend import Mask, Part, Rows, accumulator, attend, attend_gradients
from kernels_pallas.moba.xla_layout import Layout


def dispatch(call: plan.Call, layout: Layout, chosen_BKJGT):
    """Tables of tiles, [B, ...]; and of each choice [J, B, K, G, T] its slot, and if it is one."""
    B, K, J, G, T = chosen_BKJGT.shape
    chosen_BJKGT = jnp.swapaxes(chosen_BKJGT, 1, 2)
    first_K = jnp.arange(K, dtype=jnp.int32) * call.candidates
    block_BJKGT = jnp.where(chosen_BJKGT < 0, -1, first_K[:, None, None] + chosen_BJKGT)

    def tables(block_P):
        num_tiles = layout.steps * layout.step_tiles
        return plan.dispatch(block_P, K * G * T, K * call.candidates, num_tiles, layout.tile)

    tiles = jax.vmap(tables)(block_BJKGT.reshape(B, -1))
    slot_BJKGT = tiles.slot_P.reshape(chosen_BJKGT.shape)
    return tiles, tuple(jnp.swapaxes(x, 0, 1) for x in (slot_BJKGT, chosen_BJKGT >= 0))


def take(x_BP, index_B):
    """Of each batch row the items with these numbers."""
    return jax.vmap(lambda x, i: x.at[i].get(mode="promise_in_bounds"))(x_BP, index_B)


def _steps(tiles: plan.Tiles, layout: Layout):
    """Of each step: whether it is used, its blocks [B, W] and its rows [B, W, U]."""
    block, row = (
        jnp.moveaxis(x.reshape(x.shape[0], layout.steps, layout.step_tiles, *x.shape[2:]), 1, 0)
        for x in (tiles.block_Z, tiles.row_ZU)
    )
    first = jnp.arange(layout.steps, dtype=jnp.int32) * layout.step_tiles
    return first < jnp.max(tiles.used), block, row


def _slots(x):
    """Results of steps [steps, B, W, U, ...] as [B, P, ...]."""
    x = jnp.moveaxis(x, 0, 1)
    return x.reshape(x.shape[0], -1, *x.shape[4:])


def _with_empty_row(x_BR):
    """Zeros for the row beyond the last, which empty slots name."""
    return jnp.pad(x_BR, ((0, 0), (0, 1), *[(0, 0)] * (x_BR.ndim - 2)))


def _zeros_of(function, *args):
    return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), jax.eval_shape(function, *args))


def chosen_forward(layout, tiles, q_BRH, k_BSMH, v_BSME, factor, soft_cap) -> Part:
    """Attention of every slot [B, P], over one block of keys."""
    q_BRH = _with_empty_row(q_BRH)

    def compute(block, row):
        q, k, v = take(q_BRH, row), take(k_BSMH, block), take(v_BSME, block)
        return attend(q, k, v, Mask(), factor, soft_cap)

    def step(tables):
        used, *tables = tables
        return lax.cond(used, compute, lambda *x: _zeros_of(compute, *x), *tables)

    return jax.tree.map(_slots, lax.map(step, _steps(tiles, layout)))


def chosen_backward(layout, tiles, q_BRH, k_BSMH, v_BSME, rows_BR: Rows, factor, soft_cap):
    """Gradients of every slot's query [B, P, H], and of all blocks' keys and values."""
    # Empty slots get probability 0 by their `inverse`.
    q_BRH, rows_BR = jax.tree.map(_with_empty_row, (q_BRH, rows_BR))

    def compute(block, row):
        return attend_gradients(
            take(q_BRH, row),
            take(k_BSMH, block),
            take(v_BSME, block),
            Mask(),
            jax.tree.map(lambda x: take(x, row), rows_BR),
            factor,
            soft_cap,
        )

    def add(sums, block, row):
        dq, *parts = compute(block, row)
        sums = tuple(_add_tiles(x, y, block) for x, y in zip(sums, parts, strict=True))
        return sums, dq

    def skip(sums, block, row):
        return sums, _zeros_of(compute, block, row)[0]

    def step(sums, tables):
        used, *tables = tables
        return lax.cond(used, add, skip, sums, *tables)

    sums = tuple(jnp.zeros(x.shape, accumulator(x.dtype)) for x in (k_BSMH, v_BSME))
    (dk, dv), dq = lax.scan(step, sums, _steps(tiles, layout))
    return _slots(dq), dk, dv


def _add_tiles(sum_BSMX, tiles_BWMX, block_BW):
    """Adds each tile to its block.

    Tiles of one block are summed into the first of them, so that no two updates of a scatter meet:
    their order would be the device's.
    """
    S, W = sum_BSMX.shape[1], block_BW.shape[1]
    same_BWW = block_BW[:, :, None] == block_BW[:, None]
    first_BW = ~jnp.any(same_BWW & jnp.tril(jnp.ones((W, W), bool), -1), axis=2)
    at_BW = jnp.where(first_BW, block_BW, S + jnp.arange(W, dtype=jnp.int32))
    tiles_BWMX = jnp.einsum(
        "bwv,bvmx->bwmx",
        same_BWW.astype(tiles_BWMX.dtype),
        tiles_BWMX,
        precision=lax.Precision.HIGHEST,
    )
    add = jax.vmap(lambda x, at, y: x.at[at].add(y, mode="drop", unique_indices=True))
    return add(sum_BSMX, at_BW, tiles_BWMX)
