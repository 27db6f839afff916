"""MoBA in plain XLA: no T x T buffer, no atomics, and the same bits in every run.

Two paths give the same result. The dense path takes tiles of queries against all keys under the
exact mask; it is for short rows. The grouped path attends to the own block in windows of keys, and
to chosen blocks in tiles of queries that chose the same one, and merges what they give.

Queries may be a chunk of a row whose keys are all here. Windows are then laid out from the chunk's
first token, which may be known only when the program runs.

Axes: see plan.py; L keys of a window, E value width, W tiles of a step, Q rows of a step.
"""

import dataclasses
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.moba import plan

# Rows up to this length take the dense path: the tables of the grouped path would cost more.
_DENSE_LENGTH = 1024
# What a product costs on the grouped path, with all its gathering, against one on the dense path.
_GROUPED_COST = 1.6
# The dense path computes rows up to this length in parts that end their keys where they end. Each
# is compiled by itself, so longer ones are cut into two parts of tiles that one loop goes through.
_UNROLLED_LENGTH = 4096
# Rows of a product: with long blocks more of them are faster, with short ones they are wasted.
_SHORT_ROWS, _LONG_ROWS = 128, 256
# Scores of a step of the grouped path, which takes several tiles when they are small.
_STEP_ELEMENTS = 1 << 19
_MAX_STEP_TILES = 64


@dataclasses.dataclass(frozen=True)
class Windows:
    """Consecutive tiles of queries, each against a window of `length` keys.

    The window of the tile that begins at token t begins at t // align * align - front; tokens count
    from the first query. A tile is computed in `parts` of its rows; with several, each ends its
    keys where its rows end.
    """

    first: int
    tiles: int
    rows: int
    length: int
    front: int
    align: int
    parts: int = 1

    def part_rows(self) -> list[tuple[int, int, int]]:
        """First row, one beyond the last, and keys of each part."""
        step = -(-self.rows // self.parts)
        edges = [(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]
        return [
            (start, end, self.front + end if self.parts > 1 else self.length)
            for start, end in edges
        ]

    def products(self) -> int:
        """Pairs of a row and a key in all tiles."""
        return self.tiles * sum((end - start) * keys for start, end, keys in self.part_rows())


@dataclasses.dataclass(frozen=True)
class Layout:
    """Everything static about one call.

    Attributes:
      dense: whether the windows hold all keys.
      everything: whether all candidates are attended, without a choice.
      candidates: S.
      choices: blocks to choose a query.
      scored: whether the choice needs scores.
      windows: they cover the queries together.
      tile, step_tiles, steps: the grouped path takes steps * step_tiles tiles of `tile` rows.
    """

    block_size: int
    aligned: bool
    dense: bool
    everything: bool
    candidates: int
    choices: int
    scored: bool
    windows: tuple[Windows, ...]
    tile: int = 0
    step_tiles: int = 0
    steps: int = 0


def _dense_windows(length: int, front: int) -> tuple[Windows, ...]:
    """Of `length` queries with `front` tokens before them."""
    if length <= _UNROLLED_LENGTH:
        rows = _LONG_ROWS if length >= 2 * _LONG_ROWS else _SHORT_ROWS
        parts = -(-length // rows)
        return (Windows(0, 1, length, front + length, front, align=length, parts=parts),)
    rows = _LONG_ROWS
    tiles = -(-length // rows)
    half = tiles // 2
    align = tiles * rows
    return (
        Windows(0, half, rows, front + half * rows, front, align),
        Windows(half * rows, tiles - half, rows, front + align, front, align),
    )


def _product_rows(block_size: int) -> int:
    return _LONG_ROWS if block_size >= _LONG_ROWS else _SHORT_ROWS


def _own_windows(length: int, block_size: int, aligned: bool) -> tuple[Windows, ...]:
    rows = _product_rows(block_size)
    if aligned and block_size <= rows:
        rows = rows // block_size * block_size
        window = Windows(0, -(-length // rows), rows, rows, front=0, align=rows)
    elif aligned and block_size % rows == 0:
        parts = block_size // rows
        window = Windows(0, -(-length // block_size), block_size, block_size, 0, block_size, parts)
    else:
        reach = rows + block_size - 1
        window = Windows(0, -(-length // rows), rows, reach, front=block_size - 1, align=1)
    return (window,)


def make_layout(
    call: plan.Call,
    *,
    batch: int,
    length: int,
    kv_heads: int,
    groups: int,
    key_width: int,
    value_width: int,
    queries: int | None = None,
) -> Layout:
    """The layout of a call from its static shapes; queries: tokens of a chunk of the row."""
    M, S, J = call.block_size, call.candidates, call.choices
    scored = not call.fixed
    queries = length if queries is None else queries
    windows = _dense_windows(queries, front=length - queries)
    dense = Layout(M, call.aligned, True, call.everything, S, J, scored, windows)
    pairs = groups * plan.max_chunk_pairs(length, queries, M, J)
    tile = 8
    while 2 * tile <= _product_rows(M) and 8 * tile * length <= M * J * groups * queries:
        tile *= 2
    tiles = pairs // tile + S if J else 0
    together = _STEP_ELEMENTS // (batch * kv_heads * tile * M)
    together = max(1, min(together, _MAX_STEP_TILES, tiles))
    grouped = Layout(
        M,
        call.aligned,
        False,
        False,
        S,
        J,
        scored,
        # A chunk of whole blocks begins where a block does.
        _own_windows(queries, M, call.aligned and (queries == length or queries % M == 0)),
        tile,
        together,
        -(-tiles // together),
    )
    if call.path is not None:
        return dense if call.path == "dense" else grouped
    if call.everything or (J and length <= _DENSE_LENGTH):
        return dense
    sizes = (batch, queries, kv_heads, groups, key_width, value_width)
    costs = [sum(layout_flops(layout, *sizes)) for layout in (grouped, dense)]
    return grouped if _GROUPED_COST * costs[0] < costs[1] else dense


def layout_flops(
    layout: Layout,
    batch: int,
    length: int,
    kv_heads: int,
    groups: int,
    key_width: int,
    value_width: int,
) -> tuple[int, int]:
    """FLOPs of matrix products, 2 M N K each: of the forward and of the backward pass.

    `length` counts queries.
    """
    heads, S = kv_heads * groups, layout.candidates
    choice = 0
    if layout.scored:
        chunk = plan.choice_chunk(batch, heads, length, S)
        choice = -(-length // chunk) * chunk * batch * heads * S * key_width
    window = sum(w.products() for w in layout.windows) * batch * heads
    tile = layout.steps * layout.step_tiles * layout.tile * layout.block_size * batch * kv_heads
    gather = 0
    if layout.step_tiles > 1:
        gather = layout.steps * layout.step_tiles**2 * layout.block_size * batch * kv_heads
    forward = choice + (window + tile) * (key_width + value_width)
    backward = (window + tile) * (3 * key_width + 2 * value_width)
    backward += gather * (key_width + value_width)
    return 2 * forward, 2 * backward


# --- One tile of queries against one window of keys -------------------------------------------


def _accumulator(dtype) -> jnp.dtype:
    return jnp.promote_types(dtype, jnp.float32)


def _dot(spec: str, x: jax.Array, y: jax.Array) -> jax.Array:
    dtype = jnp.promote_types(x.dtype, y.dtype)
    return jnp.einsum(
        spec, x.astype(dtype), y.astype(dtype), preferred_element_type=_accumulator(dtype)
    )


def _scores(q, k, factor, soft_cap):
    """Scores [..., Q, L] in float32, and their derivative in the product of q and k."""
    s = _dot("...qh,...lh->...ql", q, k)
    if factor != 1:
        s = s * factor
    slope = factor
    if soft_cap is not None:
        tanh = jnp.tanh(s / soft_cap)
        s, slope = soft_cap * tanh, factor * (1 - tanh * tanh)
    return s, slope


class _Part(NamedTuple):
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


def _attend(q, k, v, mask, factor, soft_cap) -> _Part:
    s, _ = _scores(q, k, factor, soft_cap)
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    top = jnp.maximum(jnp.max(s, axis=-1, keepdims=True), jnp.finfo(s.dtype).min)
    p = jnp.exp(s - top)
    return _Part(_dot("...ql,...le->...qe", p.astype(v.dtype), v), top[..., 0], jnp.sum(p, -1))


class _Rows(NamedTuple):
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


def _attend_gradients(q, k, v, mask, rows: _Rows, factor, soft_cap):
    """Gradients of q, k and v from these keys."""
    s, slope = _scores(q, k, factor, soft_cap)
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    p = jnp.exp(s - rows.top[..., None]) * rows.inverse[..., None]
    dv = _dot("...ql,...qe->...le", p.astype(rows.do.dtype), rows.do)
    dp = _dot("...qe,...le->...ql", rows.do, v)
    ds = (p * (dp - rows.delta[..., None]) * slope).astype(q.dtype)
    return _dot("...ql,...lh->...qh", ds, k), _dot("...ql,...qh->...lh", ds, q), dv


# --- Windows of keys: the own block, or everything on the dense path ---------------------------


class _WindowMask(NamedTuple):
    """A query attends to earlier keys of the same id, and of blocks in its set.

    Attributes:
      id_BT: runs or own blocks; padding has -1.
      bits_BKGTw: sets of candidates, 32 a word; None: no blocks but those of the same id.
      slot_BT: the candidate that each key is part of, or -1.
    """

    id_BT: jax.Array
    bits_BKGTw: jax.Array | None
    slot_BT: jax.Array


def _window_mask(layout: Layout, blocks: plan.Blocks, chosen_BKJGT) -> _WindowMask:
    if layout.everything:
        return _WindowMask(blocks.run_BT, None, blocks.slot_BT)
    if not layout.dense or not layout.choices:
        return _WindowMask(blocks.own_BT, None, blocks.slot_BT)
    words = -(-blocks.start_BS.shape[1] // 32)
    base_w = jnp.arange(words, dtype=jnp.int32) * 32
    # A shift by less than 0, which is a huge unsigned number, or by more than 31 gives 0.
    shift = (chosen_BKJGT[..., None] - base_w).astype(jnp.uint32)
    bits = lax.shift_left(jnp.ones_like(shift), shift)
    return _WindowMask(blocks.own_BT, jnp.sum(bits, axis=2, dtype=jnp.uint32), blocks.slot_BT)


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


def _reached_mask(mask: _WindowMask, windows: Windows, queries, back, offset) -> _WindowMask:
    # Ids of queries and keys are padded alike, but padding before the row has an id of its own.
    id_BT, slot_BT = (
        _reached(x, 1, windows, queries, back, offset, -1) for x in (mask.id_BT, mask.slot_BT)
    )
    bits = mask.bits_BKGTw
    return _WindowMask(id_BT, None if bits is None else _pad(bits, 3, 0, back), slot_BT)


def _mask(mask: _WindowMask, front: int, row, rows: int, start, keys: int):
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


def _part_mask(mask: _WindowMask, windows: Windows, heads: tuple[int, int, int]):
    """A function to the mask [B, K, G * rows, keys] of a part of a tile."""

    def part_mask(row, start, begin, end, keys):
        full = _mask(mask, windows.front, row + begin, end - begin, start, keys)
        full = jnp.broadcast_to(full, (*heads, end - begin, keys))
        return full.reshape(*heads[:2], -1, keys)

    return part_mask


def _window_forward(windows, q_BKGTH, k_BKTH, v_BKTE, mask, factor, soft_cap, offset):
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
            _attend(
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


def _window_backward(
    windows, q_BKGTH, k_BKTH, v_BKTE, mask, saved_BKGT: _Rows, factor, soft_cap, offset
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
            part = _attend_gradients(
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

    sums = tuple(jnp.zeros(x.shape, _accumulator(x.dtype)) for x in (k, v))
    (dk, dv), dq = lax.scan(tile, sums, jnp.arange(windows.tiles, dtype=jnp.int32))
    dk, dv = (_from_reached(x, 2, windows, T, k_BKTH.shape[2], offset) for x in (dk, dv))
    return _join_tiles(dq), dk, dv


# --- Chosen blocks, in tiles of pairs that share one --------------------------------------------


def _steps(x_BKZ, layout: Layout):
    """Tables of tiles [B, K, Z, ...] as steps [steps, B, K, W, ...]."""
    B, K, _, *rest = x_BKZ.shape
    return jnp.moveaxis(x_BKZ.reshape(B, K, layout.steps, layout.step_tiles, *rest), 2, 0)


def _rows(x_BKR, row):
    """Rows of every batch row and key head; zeros for the row beyond the last."""
    return jax.vmap(jax.vmap(lambda x, i: x.at[i].get(mode="fill", fill_value=0)))(x_BKR, row)


def _blocks(x_BKS, block):
    return jax.vmap(jax.vmap(lambda x, i: x[i]))(x_BKS, block)


def _pair_values(x, slot_BKR, layout: Layout):
    """Results [steps, B, K, W, U, ...] of the pairs in the given slots, [B, K, R, ...]."""
    per_step = layout.step_tiles * layout.tile
    x = x.reshape(*x.shape[:3], per_step, *x.shape[5:])

    def take(x, slot):
        return x[slot // per_step, slot % per_step]

    return jax.vmap(jax.vmap(take, in_axes=(1, 0)), in_axes=(1, 0))(x, slot_BKR)


def _chosen_forward(layout, tiles, q_BKRH, k_BKSMH, v_BKSME, factor, soft_cap):
    """Attention of every slot, over one block of keys."""

    def step(tables):
        block, row = tables
        q, k, v = _rows(q_BKRH, row), _blocks(k_BKSMH, block), _blocks(v_BKSME, block)
        return _attend(q, k, v, None, factor, soft_cap)

    return lax.map(step, (_steps(tiles.block_BKZ, layout), _steps(tiles.row_BKZU, layout)))


def _chosen_backward(layout, tiles, q_BKRH, k_BKSMH, v_BKSME, saved_BKR: _Rows, factor, soft_cap):
    """Gradients of every slot's query, and of all blocks' keys and values."""
    S = k_BKSMH.shape[2]
    W = layout.step_tiles

    def step(sums, tables):
        block, row = tables
        dq, *parts = _attend_gradients(
            _rows(q_BKRH, row),
            _blocks(k_BKSMH, block),
            _blocks(v_BKSME, block),
            None,
            # Empty slots get probability 0 by their `inverse`.
            jax.tree.map(lambda x: _rows(x, row), saved_BKR),
            factor,
            soft_cap,
        )
        at = block
        if W > 1:
            # Tiles of one block are summed into the first of them, so that no two updates of a
            # scatter meet: their order would be the device's.
            same = block[..., :, None] == block[..., None, :]
            earlier = jnp.tril(jnp.ones((W, W), bool), -1)
            first = ~jnp.any(same & earlier, axis=-1)
            at = jnp.where(first, block, S + jnp.arange(W, dtype=jnp.int32))
            parts = [
                jnp.einsum(
                    "bkwx,bkxmh->bkwmh",
                    same.astype(part.dtype),
                    part,
                    precision=lax.Precision.HIGHEST,
                )
                for part in parts
            ]
        add = jax.vmap(
            jax.vmap(lambda x, i, part: x.at[i].add(part, mode="drop", unique_indices=True))
        )
        return tuple(add(x, at, part) for x, part in zip(sums, parts, strict=True)), dq

    sums = tuple(jnp.zeros(x.shape, _accumulator(x.dtype)) for x in (k_BKSMH, v_BKSME))
    tables = (_steps(tiles.block_BKZ, layout), _steps(tiles.row_BKZU, layout))
    (dk, dv), dq = lax.scan(step, sums, tables)
    return dq, dk, dv


# --- Forward and backward --------------------------------------------------------------------


def _split_scale(scale, dtype) -> tuple[float, float]:
    """The scale as a multiplier of queries and a factor of scores."""
    if jnp.finfo(dtype).bits >= 32:
        return scale, 1.0
    # A power of two loses nothing in a narrow type.
    factor, exponent = math.frexp(scale)
    return 2.0**exponent, factor


def _layout_of(call: plan.Call, q_BKGTH, v_BKTE) -> Layout:
    B, K, G, T, H = q_BKGTH.shape
    return make_layout(
        call,
        batch=B,
        length=v_BKTE.shape[2],
        kv_heads=K,
        groups=G,
        key_width=H,
        value_width=v_BKTE.shape[3],
        queries=T,
    )


def _dispatch(call: plan.Call, layout: Layout, chosen_BKJGT) -> plan.Tiles:
    B, K, J, G, T = chosen_BKJGT.shape
    return plan.dispatch(
        chosen_BKJGT.reshape(B, K, J * G * T),
        G * T,
        call.candidates,
        layout.steps * layout.step_tiles,
        layout.tile,
    )


def _ungroup_heads(x_BKGTX):
    B, K, G, T, X = x_BKGTX.shape
    return jnp.transpose(x_BKGTX, (0, 3, 1, 2, 4)).reshape(B, T, K * G, X)


def _group_choice(chosen_BNJT, K: int):
    """[B, K, J, G, T]."""
    B, N, J, T = chosen_BNJT.shape
    return jnp.swapaxes(chosen_BNJT.reshape(B, K, N // K, J, T), 2, 3)


def forward(call: plan.Call, q_BTNH, k_BTKH, v_BTKE, chosen_BNJT, blocks: plan.Blocks, offset=0):
    """Attention, and of each query the largest score and 1 / sum of exp(score - it).

    Args:
      q_BTNH, chosen_BNJT: of all tokens, or of consecutive ones that begin at `offset`.
      blocks: of all tokens.

    Returns:
      o_BTNE in the dtype of queries, top_BNT, inverse_BNT float32 at least.
    """
    K = k_BTKH.shape[2]
    q_BKGTH, chosen_BKJGT = plan.group_heads(q_BTNH, K), _group_choice(chosen_BNJT, K)
    k_BKTH, v_BKTE = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKE))
    layout = _layout_of(call, q_BKGTH, v_BKTE)
    B, K, G, T, H = q_BKGTH.shape
    dtype = q_BKGTH.dtype
    multiplier, factor = _split_scale(call.scale, dtype)
    q_BKGTH, k_BKTH = plan.bounded(q_BKGTH * multiplier), plan.bounded(k_BKTH)
    mask = _window_mask(layout, blocks, chosen_BKJGT)
    parts = [
        _window_forward(w, q_BKGTH, k_BKTH, v_BKTE, mask, factor, call.soft_cap, offset)
        for w in layout.windows
    ]
    part = jax.tree.map(lambda *x: jnp.concatenate(x, axis=3)[:, :, :, :T], *parts)
    if not layout.dense and layout.choices:
        tiles = _dispatch(call, layout, chosen_BKJGT)
        k_BKSMH, v_BKSME = (
            plan.cut_blocks(x, blocks, layout.block_size, layout.aligned) for x in (k_BKTH, v_BKTE)
        )
        chosen = _chosen_forward(
            layout, tiles, q_BKGTH.reshape(B, K, G * T, H), k_BKSMH, v_BKSME, factor, call.soft_cap
        )
        slot_JBKR = jnp.moveaxis(tiles.slot_BKP.reshape(B, K, layout.choices, G * T), 2, 0)
        valid_JBKGT = jnp.moveaxis(chosen_BKJGT >= 0, 2, 0)

        def merge(part, pair):
            slot_BKR, valid_BKGT = pair
            other = _Part(*(_pair_values(x, slot_BKR, layout) for x in chosen))
            other = _Part(*(x.reshape(y.shape) for x, y in zip(other, part, strict=True)))
            top = jnp.maximum(part.top, jnp.where(valid_BKGT, other.top, -jnp.inf))
            mine = jnp.exp(part.top - top)
            its = jnp.where(valid_BKGT, jnp.exp(other.top - top), 0)
            o = mine[..., None] * part.o + its[..., None] * other.o
            return _Part(o, top, mine * part.total + its * other.total), None

        part = lax.scan(merge, part, (slot_JBKR, valid_JBKGT))[0]
    inverse_BKGT = 1 / jnp.maximum(part.total, jnp.finfo(part.total.dtype).tiny)
    o_BTNE = _ungroup_heads((part.o * inverse_BKGT[..., None]).astype(dtype))
    return o_BTNE, *(x.reshape(B, K * G, T) for x in (part.top, inverse_BKGT))


def backward(
    call: plan.Call, q_BTNH, k_BTKH, v_BTKE, chosen_BNJT, blocks, o, top, inverse, do_BTNE, offset=0
):
    """Gradients of queries in their dtype, and of keys and values in float32 at least.

    Args: as for `forward`, and
      o, top, inverse: what `forward` returned.
    """
    K = k_BTKH.shape[2]
    q_BKGTH, o, do_BKGTE = (plan.group_heads(x, K) for x in (q_BTNH, o, do_BTNE))
    chosen_BKJGT = _group_choice(chosen_BNJT, K)
    k_BKTH, v_BKTE = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKE))
    layout = _layout_of(call, q_BKGTH, v_BKTE)
    B, K, G, T, H = q_BKGTH.shape
    top, inverse = (x.reshape(B, K, G, T) for x in (top, inverse))
    dtype = q_BKGTH.dtype
    multiplier, factor = _split_scale(call.scale, dtype)
    q_BKGTH, k_BKTH = plan.bounded(q_BKGTH * multiplier), plan.bounded(k_BKTH)
    do_BKGTE = do_BKGTE.astype(top.dtype)
    delta_BKGT = jnp.sum(do_BKGTE * o, axis=-1)
    rows = _Rows(top, inverse, do_BKGTE.astype(v_BKTE.dtype), delta_BKGT)
    mask = _window_mask(layout, blocks, chosen_BKJGT)
    dq, dk, dv = [], 0, 0
    for w in layout.windows:
        part = _window_backward(
            w, q_BKGTH, k_BKTH, v_BKTE, mask, rows, factor, call.soft_cap, offset
        )
        dq.append(part[0])
        dk, dv = dk + part[1], dv + part[2]
    dq = jnp.concatenate(dq, axis=3)[:, :, :, :T]

    if not layout.dense and layout.choices:
        tiles = _dispatch(call, layout, chosen_BKJGT)
        k_BKSMH, v_BKSME = (
            plan.cut_blocks(x, blocks, layout.block_size, layout.aligned) for x in (k_BKTH, v_BKTE)
        )
        rows = _Rows(*(x.reshape(B, K, G * T, *x.shape[4:]) for x in rows))
        part, dk_BKSMH, dv_BKSME = _chosen_backward(
            layout,
            tiles,
            q_BKGTH.reshape(B, K, G * T, H),
            k_BKSMH,
            v_BKSME,
            rows,
            factor,
            call.soft_cap,
        )
        length = k_BKTH.shape[2]
        dk = dk + plan.paste_blocks(dk_BKSMH, blocks, length, layout.aligned)
        dv = dv + plan.paste_blocks(dv_BKSME, blocks, length, layout.aligned)

        def add(dq, pair):
            slot, chosen = pair
            value = _pair_values(part, slot, layout).reshape(dq.shape)
            return dq + jnp.where((chosen >= 0)[..., None], value, 0), None

        slot_BKJR = tiles.slot_BKP.reshape(B, K, layout.choices, G * T)
        dq, _ = lax.scan(add, dq, (jnp.moveaxis(slot_BKJR, 2, 0), jnp.moveaxis(chosen_BKJGT, 2, 0)))
    dq = _ungroup_heads((dq * multiplier).astype(dtype))
    return dq, jnp.swapaxes(dk, 1, 2), jnp.swapaxes(dv, 1, 2)
