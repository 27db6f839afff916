"""Attention to windows of keys in plain XLA: the own block, or everything on the dense path.

Axes: see plan.py; E value width, Q queries and L keys of a window.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from kernels_pallas.moba import plan
from kernels_pallas.moba.xla_attend import (
    Mask,
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
    # With a bit for the last block, which is no candidate.
    words = blocks.start_BS.shape[1] // 32 + 1
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


def _reached(x, axis, windows, queries: int, offset, value=0):
    """The part of the row that windows reach, from `front` tokens before the first query on."""
    front, end = _bounds(windows)
    x = _pad(x, axis, front, end - queries, value)
    return x if front + end == x.shape[axis] else _slice(x, offset, front + end, axis)


def _from_reached(x, axis, windows, queries: int, length: int, offset):
    """The transpose of `_reached`."""
    if queries < length:
        full = (*x.shape[:axis], x.shape[axis] + length - queries, *x.shape[axis + 1 :])
        x = lax.dynamic_update_slice_in_dim(jnp.zeros(full, x.dtype), x, offset, axis)
    return _slice(x, _bounds(windows)[0], length, axis)


def _bounds(windows: tuple[Windows, ...]) -> tuple[int, int]:
    """Keys reached before the first query, and one beyond the last query and key."""
    return max(w.front for w in windows), max(w.end for w in windows)


def _reached_mask(mask: WindowMask, windows, queries: int, offset) -> WindowMask:
    # Ids of queries and keys are padded alike, but padding before the row has an id of its own.
    id_BT, slot_BT = (
        _reached(x, 1, windows, queries, offset, -1) for x in (mask.id_BT, mask.slot_BT)
    )
    bits = mask.bits_BKGTw
    bits = None if bits is None else _pad(bits, 3, 0, _bounds(windows)[1] - queries)
    return WindowMask(id_BT, bits, slot_BT)


def _mask(
    mask: WindowMask, windows: Windows, front: int, block_size: int, row, start, groups: int
) -> Mask:
    """Of the window whose queries begin at `row`, and keys at `start`."""
    pairs = blocks = None
    if windows.check == "all":
        pairs = _member(mask, windows, front, row, start)
    elif windows.check in ("diagonal", "own", "causal"):
        t = np.arange(windows.rows)
        earlier = t[:, None] >= t
        if windows.check == "own":
            earlier &= t[:, None] // block_size == t // block_size
        pairs = jnp.asarray(earlier)[None, None, None]
    if windows.check in ("diagonal", "blocks"):
        blocks = _member_blocks(mask, windows, block_size, row, start)

    def of_groups(x):
        x = jnp.broadcast_to(x, (*x.shape[:2], groups, *x.shape[3:]))
        x = x.reshape(*x.shape[:2], groups * windows.rows, x.shape[4])
        # Or it is computed again at every use.
        return lax.optimization_barrier(x)

    return jax.tree.map(of_groups, Mask(pairs, blocks))


def _member(mask: WindowMask, windows: Windows, front: int, row, start):
    """Every query and key, [B, K, G, Q, L]."""
    q_id = _slice(mask.id_BT, row + front, windows.rows, 1)[:, :, None]
    k_id = _slice(mask.id_BT, start + front, windows.keys, 1)[:, None, :]
    q_t = row + jnp.arange(windows.rows, dtype=jnp.int32)[:, None]
    k_t = start + jnp.arange(windows.keys, dtype=jnp.int32)
    member = (q_id == k_id)[:, None, None]
    if mask.bits_BKGTw is not None:
        bits = _slice(mask.bits_BKGTw, row, windows.rows, 3)
        slot = _slice(mask.slot_BT, start + front, windows.keys, 1)[:, None, None, None, :]
        for word in range(bits.shape[-1]):
            shift = (slot - 32 * word).astype(jnp.uint32)
            shifted = lax.shift_right_logical(*jnp.broadcast_arrays(bits[..., word, None], shift))
            member = member | ((shifted & 1) == 1)
    return member & ((q_t >= k_t) & (q_id >= 0))[:, None, None]


def _member_blocks(mask: WindowMask, windows: Windows, block_size: int, row, start):
    """Every query and block, [B, K, G, Q, blocks]; keys are whole blocks, or a part of one."""
    blocks = max(1, windows.keys // block_size)
    number = start // block_size + jnp.arange(blocks, dtype=jnp.int32)
    own = _slice(mask.id_BT, row, windows.rows, 1)[:, None, None, :, None] == number * block_size
    if mask.bits_BKGTw is None:
        return own
    words = jnp.take(_slice(mask.bits_BKGTw, row, windows.rows, 3), number // 32, axis=-1)
    shift = jnp.broadcast_to((number % 32).astype(jnp.uint32), words.shape)
    return own | ((lax.shift_right_logical(words, shift) & 1) == 1)


def _queries_of(x_BKGTX, windows: Windows, row):
    """The queries of a window, [B, K, G * Q, X]."""
    x = _slice(x_BKGTX, row, windows.rows, 3)
    return x.reshape(*x.shape[:2], -1, *x.shape[4:])


def _put_queries(x_BKGTX, part, row):
    B, K, G, _, *width = x_BKGTX.shape
    return lax.dynamic_update_slice_in_dim(x_BKGTX, part.reshape(B, K, G, -1, *width), row, 3)


def window_forward(layout: Layout, q_BKGTH, k_BKTH, v_BKTE, mask, factor, soft_cap, offset) -> Part:
    """Attention of all queries to the keys of their windows."""
    B, K, G, T, _ = q_BKGTH.shape
    front, end = _bounds(layout.windows)
    q = _pad(q_BKGTH, 3, 0, end - T)
    k, v = (_reached(x, 2, layout.windows, T, offset) for x in (k_BKTH, v_BKTE))
    mask = _reached_mask(mask, layout.windows, T, offset)

    def add(windows, total: Part, pair):
        row, start = pair
        k_, v_ = (_slice(x, start + front, windows.keys, 2) for x in (k, v))
        part = attend(
            _queries_of(q, windows, row),
            k_,
            v_,
            _mask(mask, windows, front, layout.block_size, row, start, G),
            factor,
            soft_cap,
        )
        part = merge(jax.tree.map(lambda x: _queries_of(x, windows, row), total), part)
        return jax.tree.map(lambda x, y: _put_queries(x, y, row), total, part), None

    total = no_part((B, K, G, end), v.shape[3], accumulator(v.dtype))
    for windows in layout.windows:
        step = functools.partial(add, windows)
        total, _ = lax.scan(step, total, (windows.row_P, windows.start_P))
    return jax.tree.map(lambda x: x[:, :, :, :T], total)


def window_backward(
    layout: Layout, q_BKGTH, k_BKTH, v_BKTE, mask, saved_BKGT: Rows, factor, soft_cap, offset
):
    """Gradients of queries, and of all keys and values, from the windows."""
    T = q_BKGTH.shape[3]
    front, end = _bounds(layout.windows)
    q, saved = jax.tree.map(lambda x: _pad(x, 3, 0, end - T), (q_BKGTH, saved_BKGT))
    k, v = (_reached(x, 2, layout.windows, T, offset) for x in (k_BKTH, v_BKTE))
    mask = _reached_mask(mask, layout.windows, T, offset)

    def add(windows, sums, pair):
        row, start = pair
        q_, saved_, dq = jax.tree.map(lambda x: _queries_of(x, windows, row), (q, saved, sums[0]))
        k_, v_, dk, dv = (_slice(x, start + front, windows.keys, 2) for x in (k, v, *sums[1:]))
        part = attend_gradients(
            q_,
            k_,
            v_,
            _mask(mask, windows, front, layout.block_size, row, start, q.shape[2]),
            saved_,
            factor,
            soft_cap,
        )
        dq = _put_queries(sums[0], dq + part[0], row)
        dk, dv = (
            lax.dynamic_update_slice_in_dim(x, y + z, start + front, 2)
            for x, y, z in zip(sums[1:], (dk, dv), part[1:], strict=True)
        )
        return (dq, dk, dv), None

    sums = tuple(jnp.zeros(x.shape, accumulator(x.dtype)) for x in (q, k, v))
    for windows in layout.windows:
        step = functools.partial(add, windows)
        sums, _ = lax.scan(step, sums, (windows.row_P, windows.start_P))
    dq, dk, dv = sums
    dk, dv = (_from_reached(x, 2, layout.windows, T, k_BKTH.shape[2], offset) for x in (dk, dv))
    return dq[:, :, :, :T], dk, dv
