"""Attention to windows of keys in plain XLA: the own block, or everything on the dense path.

Axes: see plan.py; E value width, Q queries and L keys of a window.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.moba import plan
from kernels_pallas.moba.xla_attend import (
    Part,
    Rows,
    accumulator,
    attend,
    attend_gradients,
    merge,
    no_part,
)
from kernels_pallas.moba.xla_layout import Layout, Windows


class WindowMask(NamedTuple):
    """A query attends to earlier keys of the same id, and of blocks in its set.

    Attributes:
      id_BT: runs or own blocks; padding has -1.
      bits_BKGTw: sets of candidates, 32 a word; None: no blocks but those of the same id.
      slot_BT: the candidate that each key is part of, or -1.
    """

    id_BT: jax.Array
    bits_BKGTw: jax.Array | None
    slot_BT: jax.Array


def window_mask(layout: Layout, blocks: plan.Blocks, chosen_BKJGT) -> WindowMask:
    if layout.everything:
        return WindowMask(blocks.run_BT, None, blocks.slot_BT)
    if not layout.dense or not layout.choices:
        return WindowMask(blocks.own_BT, None, blocks.slot_BT)
    words = -(-blocks.start_BS.shape[1] // 32)
    base_w = jnp.arange(words, dtype=jnp.int32) * 32
    # A shift by less than 0, which is a huge unsigned number, or by more than 31 gives 0.
    shift = (chosen_BKJGT[..., None] - base_w).astype(jnp.uint32)
    bits = lax.shift_left(jnp.ones_like(shift), shift)
    return WindowMask(blocks.own_BT, jnp.sum(bits, axis=2, dtype=jnp.uint32), blocks.slot_BT)


def _slice(x, start, size, axis):
    return lax.dynamic_slice_in_dim(x, start, size, axis)


def _pad(x, axis, front, back, value=0):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (front, back)
    return jnp.pad(x, widths, constant_values=value)


def _reached(x, axis, windows: Windows, queries: int, offset, value=0):
    """The part of the row that windows reach, from `front` tokens before the first query on."""
    x = _pad(x, axis, windows.front, windows.end - queries, value)
    size = windows.front + windows.end
    return x if size == x.shape[axis] else _slice(x, offset, size, axis)


def _from_reached(x, axis, windows: Windows, queries: int, length: int, offset):
    """The transpose of `_reached`."""
    if queries < length:
        full = (*x.shape[:axis], x.shape[axis] + length - queries, *x.shape[axis + 1 :])
        x = lax.dynamic_update_slice_in_dim(jnp.zeros(full, x.dtype), x, offset, axis)
    return _slice(x, windows.front, length, axis)


def _reached_mask(mask: WindowMask, windows: Windows, queries: int, offset) -> WindowMask:
    # Ids of queries and keys are padded alike, but padding before the row has an id of its own.
    id_BT, slot_BT = (
        _reached(x, 1, windows, queries, offset, -1) for x in (mask.id_BT, mask.slot_BT)
    )
    bits = mask.bits_BKGTw
    bits = None if bits is None else _pad(bits, 3, 0, windows.end - queries)
    return WindowMask(id_BT, bits, slot_BT)


def _mask(mask: WindowMask, windows: Windows, row, start, heads: tuple[int, int, int]):
    """[B, K, G * Q, L] of the window whose queries begin at `row`, and keys at `start`."""
    q_id = _slice(mask.id_BT, row + windows.front, windows.rows, 1)[:, :, None]
    k_id = _slice(mask.id_BT, start + windows.front, windows.keys, 1)[:, None, :]
    q_t = row + jnp.arange(windows.rows, dtype=jnp.int32)[:, None]
    k_t = start + jnp.arange(windows.keys, dtype=jnp.int32)
    member = (q_id == k_id)[:, None, None]
    if mask.bits_BKGTw is not None:
        bits = _slice(mask.bits_BKGTw, row, windows.rows, 3)
        slot = _slice(mask.slot_BT, start + windows.front, windows.keys, 1)[:, None, None, None, :]
        for word in range(bits.shape[-1]):
            shift = (slot - 32 * word).astype(jnp.uint32)
            shifted = lax.shift_right_logical(*jnp.broadcast_arrays(bits[..., word, None], shift))
            member = member | ((shifted & 1) == 1)
    member = member & ((q_t >= k_t) & (q_id >= 0))[:, None, None]
    member = jnp.broadcast_to(member, (*heads, windows.rows, windows.keys))
    return member.reshape(*heads[:2], -1, windows.keys)


def _queries_of(x_BKGTX, windows: Windows, row):
    """The queries of a window, [B, K, G * Q, X]."""
    x = _slice(x_BKGTX, row, windows.rows, 3)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _put_queries(x_BKGTX, part, row):
    B, K, G, _, *width = x_BKGTX.shape
    return lax.dynamic_update_slice_in_dim(x_BKGTX, part.reshape(B, K, G, -1, *width), row, 3)


def window_forward(windows, q_BKGTH, k_BKTH, v_BKTE, mask, factor, soft_cap, offset) -> Part:
    """Attention of all queries to the keys of their windows."""
    B, K, G, T, _ = q_BKGTH.shape
    q = _pad(q_BKGTH, 3, 0, windows.end - T)
    k, v = (_reached(x, 2, windows, T, offset) for x in (k_BKTH, v_BKTE))
    mask = _reached_mask(mask, windows, T, offset)

    def add(total: Part, pair):
        row, start = pair
        k_, v_ = (_slice(x, start + windows.front, windows.keys, 2) for x in (k, v))
        part = attend(
            _queries_of(q, windows, row),
            k_,
            v_,
            _mask(mask, windows, row, start, (B, K, G)),
            factor,
            soft_cap,
        )
        part = merge(jax.tree.map(lambda x: _queries_of(x, windows, row), total), part)
        return jax.tree.map(lambda x, y: _put_queries(x, y, row), total, part), None

    nothing = no_part((B, K, G, windows.end), v.shape[3], accumulator(v.dtype))
    total, _ = lax.scan(add, nothing, (windows.row_P, windows.start_P))
    return jax.tree.map(lambda x: x[:, :, :, :T], total)


def window_backward(
    windows, q_BKGTH, k_BKTH, v_BKTE, mask, saved_BKGT: Rows, factor, soft_cap, offset
):
    """Gradients of queries, and of all keys and values, from the windows."""
    B, K, G, T, _ = q_BKGTH.shape
    q, saved = jax.tree.map(lambda x: _pad(x, 3, 0, windows.end - T), (q_BKGTH, saved_BKGT))
    k, v = (_reached(x, 2, windows, T, offset) for x in (k_BKTH, v_BKTE))
    mask = _reached_mask(mask, windows, T, offset)

    def add(sums, pair):
        row, start = pair
        first = start + windows.front
        q_, saved_, dq = jax.tree.map(lambda x: _queries_of(x, windows, row), (q, saved, sums[0]))
        k_, v_, dk, dv = (_slice(x, first, windows.keys, 2) for x in (k, v, *sums[1:]))
        part = attend_gradients(
            q_, k_, v_, _mask(mask, windows, row, start, (B, K, G)), saved_, factor, soft_cap
        )
        dq = _put_queries(sums[0], dq + part[0], row)
        dk, dv = (
            lax.dynamic_update_slice_in_dim(x, y + z, first, 2)
            for x, y, z in zip(sums[1:], (dk, dv), part[1:], strict=True)
        )
        return (dq, dk, dv), None

    sums = tuple(jnp.zeros(x.shape, accumulator(x.dtype)) for x in (q, k, v))
    (dq, dk, dv), _ = lax.scan(add, sums, (windows.row_P, windows.start_P))
    dk, dv = (_from_reached(x, 2, windows, T, k_BKTH.shape[2], offset) for x in (dk, dv))
    return dq[:, :, :, :T], dk, dv
