"""Attention to chosen blocks in plain XLA, in tiles of pairs that share one.

All key heads of all batch rows share one table: row r of head a is row a * G * T + r, and its block
s is block a * S + s. Steps at the end of the table that have no pairs are not computed.

Axes: see plan.py; W tiles of a step, R rows and S blocks of all heads, E value width.
"""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.moba import plan
from kernels_pallas.moba.xla_attend import Rows, accumulator, attend, attend_gradients
from kernels_pallas.moba.xla_layout import Layout


def dispatch(call: plan.Call, layout: Layout, chosen_BKJGT):
    """The table of tiles; and of each choice [J, B, K, G, T] its slot, and whether it is one."""
    B, K, J, G, T = chosen_BKJGT.shape
    chosen_JBKGT = jnp.moveaxis(chosen_BKJGT, 2, 0)
    first_BK = jnp.arange(B * K, dtype=jnp.int32).reshape(B, K) * call.candidates
    block_JBKGT = jnp.where(chosen_JBKGT < 0, -1, first_BK[:, :, None, None] + chosen_JBKGT)
    tiles = plan.dispatch(
        block_JBKGT.reshape(1, 1, -1),
        B * K * G * T,
        B * K * call.candidates,
        layout.steps * layout.step_tiles,
        layout.tile,
    )
    tiles = plan.Tiles(*(x[0, 0] for x in tiles))
    return tiles, (tiles.slot_BKP.reshape(chosen_JBKGT.shape), chosen_JBKGT >= 0)


def _steps(tiles: plan.Tiles, layout: Layout):
    """Of each step: whether it is used, its blocks [W] and its rows [W, U]."""
    block, row = (
        x.reshape(layout.steps, layout.step_tiles, *x.shape[1:])
        for x in (tiles.block_BKZ, tiles.row_BKZU)
    )
    used = jnp.arange(layout.steps, dtype=jnp.int32) * layout.step_tiles < tiles.used_BK
    return used, block, row


def _with_empty_row(x_RX):
    """Zeros for the row beyond the last, which empty slots name."""
    return jnp.pad(x_RX, ((0, 1), *[(0, 0)] * (x_RX.ndim - 1)))


def take(x, index):
    return x.at[index].get(mode="promise_in_bounds")


def _zeros_of(function):
    """A function that returns zeros for what the other would."""

    def zeros(*args):
        shapes = jax.eval_shape(function, *args)
        return jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    return zeros


def chosen_forward(layout, tiles, q_RH, k_SMH, v_SME, factor, soft_cap):
    """Attention of every slot [Z * U, ...], over one block of keys."""
    q_RH = _with_empty_row(q_RH)

    def one_step(block, row):
        q, k, v = take(q_RH, row), take(k_SMH, block), take(v_SME, block)
        return attend(q, k, v, None, factor, soft_cap)

    def step(tables):
        used, block, row = tables
        return lax.cond(used, one_step, _zeros_of(one_step), block, row)

    parts = lax.map(step, _steps(tiles, layout))
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[3:]), parts)


def chosen_backward(layout, tiles, q_RH, k_SMH, v_SME, rows_R: Rows, factor, soft_cap):
    """Gradients of every slot's query [Z * U, H], and of all blocks' keys and values."""
    S, W = k_SMH.shape[0], layout.step_tiles
    # Empty slots get probability 0 by their `inverse`.
    q_RH, rows_R = jax.tree.map(_with_empty_row, (q_RH, rows_R))

    def gradients(block, row):
        return attend_gradients(
            take(q_RH, row),
            take(k_SMH, block),
            take(v_SME, block),
            None,
            jax.tree.map(lambda x: take(x, row), rows_R),
            factor,
            soft_cap,
        )

    def add(sums, block, row):
        dq, *parts = gradients(block, row)
        # Tiles of one block are summed into the first of them, so that no two updates of a scatter
        # meet: their order would be the device's.
        same = block[:, None] == block[None]
        first = ~jnp.any(same & jnp.tril(jnp.ones((W, W), bool), -1), axis=1)
        at = jnp.where(first, block, S + jnp.arange(W, dtype=jnp.int32))
        parts = [
            jnp.einsum("wx,xmh->wmh", same.astype(x.dtype), x, precision=lax.Precision.HIGHEST)
            for x in parts
        ]
        sums = tuple(
            x.at[at].add(part, mode="drop", unique_indices=True)
            for x, part in zip(sums, parts, strict=True)
        )
        return sums, dq

    def skip(sums, block, row):
        return sums, _zeros_of(gradients)(block, row)[0]

    def step(sums, tables):
        used, block, row = tables
        return lax.cond(used, add, skip, sums, block, row)

    sums = tuple(jnp.zeros(x.shape, accumulator(x.dtype)) for x in (k_SMH, v_SME))
    (dk, dv), dq = lax.scan(step, sums, _steps(tiles, layout))
    return dq.reshape(-1, dq.shape[-1]), dk, dv
