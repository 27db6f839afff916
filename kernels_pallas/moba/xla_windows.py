"""Attention to windows of keys in plain XLA: the own block, or everything on the dense path.

Axes: see plan.py; E value width.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.moba import plan
from kernels_pallas.moba.xla_attend import Rows, accumulator, attend, attend_gradients
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


def _end(windows: Windows, length: int) -> int:
    """One beyond the last key that any window may reach."""
    last = windows.first + (windows.tiles - 1) * windows.rows
    start = last // windows.align * windows.align - windows.front
    return max(start + windows.length, last + windows.rows, length)


def _reached(x, axis, windows: Windows, queries: int, back: int, offset, value=0):
    """The part of the row that windows may reach: `front` tokens, those of queries, `back` more."""
    x = _pad(x, axis, windows.front, back, value)
    size = windows.front + queries + back
    return x if size == x.shape[axis] else _slice(x, offset, size, axis)


def _from_reached(x, axis, windows: Windows, queries: int, length: int, offset):
    """The transpose of `_reached`."""
    if queries < length:
        full = (*x.shape[:axis], x.shape[axis] + length - queries, *x.shape[axis + 1 :])
        x = lax.dynamic_update_slice_in_dim(jnp.zeros(full, x.dtype), x, offset, axis)
    return _slice(x, windows.front, length, axis)


def _reached_mask(mask: WindowMask, windows: Windows, queries, back, offset) -> WindowMask:
    # Ids of queries and keys are padded alike, but padding before the row has an id of its own.
    id_BT, slot_BT = (
        _reached(x, 1, windows, queries, back, offset, -1) for x in (mask.id_BT, mask.slot_BT)
    )
    bits = mask.bits_BKGTw
    return WindowMask(id_BT, None if bits is None else _pad(bits, 3, 0, back), slot_BT)


def _mask(mask: WindowMask, front: int, row, rows: int, start, keys: int):
    """[B, K, G, rows, keys], where B, K and G may be 1; `start` counts from the padding."""
    q_id = _slice(mask.id_BT, row + front, rows, 1)[:, :, None]
    k_id = _slice(mask.id_BT, start, keys, 1)[:, None, :]
    q_t = row + jnp.arange(rows, dtype=jnp.int32)[:, None]
    k_t = start - front + jnp.arange(keys, dtype=jnp.int32)
    member = (q_id == k_id)[:, None, None]
    if mask.bits_BKGTw is not None:
        bits = _slice(mask.bits_BKGTw, row, rows, 3)
        slot = _slice(mask.slot_BT, start, keys, 1)[:, None, None, None, :]
        for word in range(bits.shape[-1]):
            shift = (slot - 32 * word).astype(jnp.uint32)
            shifted = lax.shift_right_logical(*jnp.broadcast_arrays(bits[..., word, None], shift))
            member = member | ((shifted & 1) == 1)
    return member & ((q_t >= k_t) & (q_id >= 0))[:, None, None]


def _part_mask(mask: WindowMask, windows: Windows, heads: tuple[int, int, int]):
    """A function to the mask [B, K, G * rows, keys] of a part of a tile."""

    def part_mask(row, start, begin, end, keys):
        full = _mask(mask, windows.front, row + begin, end - begin, start, keys)
        full = jnp.broadcast_to(full, (*heads, end - begin, keys))
        return full.reshape(*heads[:2], -1, keys)

    return part_mask


def window_forward(windows, q_BKGTH, k_BKTH, v_BKTE, mask, factor, soft_cap, offset):
    """Attention of the tiles of `windows`, a part [B, K, G, rows of all, ...]."""
    B, K, G, T, H = q_BKGTH.shape
    back = _end(windows, T) - T
    q = _pad(q_BKGTH, 3, 0, back)
    k, v = (_reached(x, 2, windows, T, back, offset) for x in (k_BKTH, v_BKTE))
    mask = _reached_mask(mask, windows, T, back, offset)
    part_mask = _part_mask(mask, windows, (B, K, G))
    rows = windows.rows

    def tile(i):
        row = windows.first + i * rows
        start = row // windows.align * windows.align
        q_ = _slice(q, row, rows, 3)
        k_, v_ = (_slice(x, start, windows.length, 2) for x in (k, v))
        parts = [
            attend(
                q_[:, :, :, begin:end].reshape(B, K, -1, H),
                k_[:, :, :keys],
                v_[:, :, :keys],
                part_mask(row, start, begin, end, keys),
                factor,
                soft_cap,
            )
            for begin, end, keys in windows.part_rows()
        ]
        return jax.tree.map(lambda *x: _join_parts(x, G), *parts)

    parts = lax.map(tile, jnp.arange(windows.tiles, dtype=jnp.int32))
    return jax.tree.map(_join_tiles, parts)


def _join_parts(parts, groups):
    """Parts [B, K, G * rows, ...] of a tile as [B, K, G, all rows, ...]."""
    parts = [x.reshape(*x.shape[:2], groups, -1, *x.shape[3:]) for x in parts]
    return parts[0] if len(parts) == 1 else jnp.concatenate(parts, axis=3)


def _join_tiles(x):
    """[tiles, B, K, G, rows, ...] to [B, K, G, tiles * rows, ...]."""
    n, B, K, G, rows, *rest = x.shape
    return jnp.moveaxis(x, 0, 3).reshape(B, K, G, n * rows, *rest)


def window_backward(
    windows, q_BKGTH, k_BKTH, v_BKTE, mask, saved_BKGT: Rows, factor, soft_cap, offset
):
    """Gradients of the rows of `windows`, and of all keys and values from them."""
    B, K, G, T, H = q_BKGTH.shape
    back = _end(windows, T) - T
    rows, length = windows.rows, windows.length
    q, saved = jax.tree.map(lambda x: _pad(x, 3, 0, back), (q_BKGTH, saved_BKGT))
    k, v = (_reached(x, 2, windows, T, back, offset) for x in (k_BKTH, v_BKTE))
    mask = _reached_mask(mask, windows, T, back, offset)
    part_mask = _part_mask(mask, windows, (B, K, G))

    def tile(sums, i):
        row = windows.first + i * rows
        start = row // windows.align * windows.align
        q_, saved_ = jax.tree.map(lambda x: _slice(x, row, rows, 3), (q, saved))
        k_, v_, dk, dv = (_slice(x, start, length, 2) for x in (k, v, *sums))
        dq = []
        for begin, end, keys in windows.part_rows():
            q_part, saved_part = jax.tree.map(
                lambda x, begin=begin, end=end: x[:, :, :, begin:end].reshape(
                    B, K, -1, *x.shape[4:]
                ),
                (q_, saved_),
            )
            part = attend_gradients(
                q_part,
                k_[:, :, :keys],
                v_[:, :, :keys],
                part_mask(row, start, begin, end, keys),
                saved_part,
                factor,
                soft_cap,
            )
            dq.append(part[0])
            dk, dv = (x.at[:, :, :keys].add(y) for x, y in zip((dk, dv), part[1:], strict=True))
        sums = tuple(
            lax.dynamic_update_slice_in_dim(x, part, start, 2)
            for x, part in zip(sums, (dk, dv), strict=True)
        )
        return sums, _join_parts(dq, G)

    sums = tuple(jnp.zeros(x.shape, accumulator(x.dtype)) for x in (k, v))
    (dk, dv), dq = lax.scan(tile, sums, jnp.arange(windows.tiles, dtype=jnp.int32))
    dk, dv = (_from_reached(x, 2, windows, T, k_BKTH.shape[2], offset) for x in (dk, dv))
    return _join_tiles(dq), dk, dv
