"""MoBA for TPUs: intervals of keys for the own block, tiles of queries for the chosen ones.

Short rows take the dense path, tpu_dense: everything in one kernel under the exact choice, without
a gather. `tpu_costs` says which rows are short.

Long rows are taken a group of query heads at a time, and in the group a chunk of tokens at a time,
so that what is gathered stays small beside the inputs.

Queries may be a chunk of a row whose keys are all here. The interval kernels then get the keys from
a few tiles before the chunk's first token to its end.

Axes: see plan.py; A key heads of all batch rows of a group, X a gathered row with its statistics.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.layout import Layout as DeviceLayout
from jax.experimental.layout import with_layout_constraint

from kernels_pallas.moba import plan, tpu_choose, tpu_costs, tpu_dense, tpu_interval, tpu_tiles
from kernels_pallas.moba.tpu_tiles import LANES

_WINDOW = tpu_costs.WINDOW
_TILE = tpu_costs.TILE
_CHOOSE_TILE = 512
# Where an interval begins that no query reaches.
_NOWHERE = 1 << 30
# Pairs of a query and a block that are gathered and attended at once: it bounds the memory.
_CHUNK_PAIRS = 1 << 20


@dataclasses.dataclass(frozen=True)
class Layout:
    """Everything static about one call.

    Attributes:
      heads: query heads of a group: all of them, or some of one key head's.
      length: queries, padded to whole tiles and chunks.
      window: tokens of a tile of the interval kernels.
      reach: tiles of keys that a tile of queries reaches.
      front: tiles of keys before the first query.
      tokens: of a chunk.
      tile: queries of a tile that chose the same block.
      tiles: of a chunk.
      dense: whether one kernel attends to everything.
      aligned: whether all blocks begin at multiples of their size, counted from the first key that
        intervals reach.
    """

    heads: int
    length: int
    window: int
    reach: int
    front: int
    tokens: int
    tile: int = 0
    tiles: int = 0
    dense: bool = False
    aligned: bool = False


def _chunk_windows(windows: int, most: int) -> int:
    """Windows of a chunk: a divisor of all of them, or `most` if none is near."""
    if windows <= most:
        return windows
    divisor = max(d for d in range(1, most + 1) if windows % d == 0)
    return divisor if 2 * divisor > most else most


def make_layout(
    call: plan.Call,
    B: int,
    T: int,
    N: int,
    K: int,
    length: int | None = None,
    *,
    dense: bool = False,
) -> Layout:
    """The layout of a call of T queries from its static shapes; length: tokens if T are a chunk."""
    M, J, G = call.block_size, call.choices, N // K
    length = T if length is None else length
    # A chunk of whole blocks begins where a block does.
    aligned = call.aligned and (length == T or T % M == 0)
    window = min(_WINDOW, -(-T // LANES) * LANES)
    windows = -(-T // window)
    before = -(-(length - T) // window)
    if dense:
        aligned = call.aligned and length == T if call.everything else aligned
        tokens = windows * window
        return Layout(
            N, tokens, window, before + windows, before, tokens, dense=True, aligned=aligned
        )
    if call.everything:
        reach, front = before + windows, before
    elif aligned and (M % window == 0 or window % M == 0):
        reach, front = max(1, M // window), 0
    else:
        front = -(-(M - 1) // window)
        reach, front = front + 1, min(front, before)
    reach = min(reach, front + windows)
    if not J:
        return Layout(N, windows * window, window, reach, front, windows * window)
    # A tile that its block's queries fill seldom is wasted; a block has J * G * M of all the row's
    # on average.
    tile = _TILE
    while tile > 16 and tile > J * G * M * T // length // 2:
        tile //= 2
    # Every block has a tile of its own in every chunk, so that few chunks waste few.
    most = max(_CHUNK_PAIRS, 4 * tile * call.candidates)
    heads, chunk = N, windows
    if most < B * N * T * J:
        heads = math.gcd(G, max(1, most // (B * T * J)))
        chunk = _chunk_windows(windows, max(1, most // (B * heads * J * window)))
    tokens = chunk * window
    rows = B * heads * tokens
    return Layout(
        heads,
        -(-windows // chunk) * tokens,
        window,
        reach,
        front,
        tokens,
        tile,
        rows * J // tile + B * max(1, heads // G) * call.candidates,
    )


def _merge_heads(x):
    return x.reshape(x.shape[0] * x.shape[1], *x.shape[2:])


def _pad_tokens(x, axis, length, value=0):
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, length - x.shape[axis])
    return jnp.pad(x, widths, constant_values=value)


def _low(call: plan.Call, blocks: plan.Blocks, layout: Layout, queries: int, offset):
    """`plan.intervals` of padded rows, counted from the first of the keys that `_reached` gives."""
    front = layout.front * layout.window
    low_BT = plan.intervals(call, blocks, queries, offset) + (front - offset)
    behind_T = jnp.arange(queries, layout.length, dtype=jnp.int32) + (front + 1)
    padding = jnp.broadcast_to(behind_T, (low_BT.shape[0], layout.length - queries))
    return jnp.concatenate([low_BT, padding], axis=1)


def _reached(x_ALX, layout: Layout, queries: int, offset):
    """The tokens of queries, padded, and those before them that intervals may reach."""
    front, length = layout.front * layout.window, x_ALX.shape[1]
    x_ALX = jnp.pad(x_ALX, ((0, 0), (front, layout.length - queries), (0, 0)))
    if queries == length:
        return x_ALX
    return lax.dynamic_slice_in_dim(x_ALX, offset, front + layout.length, 1)


def _starts(call: plan.Call, blocks: plan.Blocks, layout: Layout, low_BT, chosen_BNJT, K, offset):
    """Where the intervals of keys begin that each query attends to, [A, G, 1 + J, length].

    The first is the own block, or all of the query's document.
    """
    B, N, J, T = chosen_BNJT.shape
    start_BNJT = jnp.full((B, N, J, T), _NOWHERE, jnp.int32)
    if J:
        shift = layout.front * layout.window - (offset if blocks.own_BT.shape[1] > T else 0)
        if call.aligned:
            start_BNJT = chosen_BNJT * call.block_size
        else:
            # Not a gather, which takes longer than to look at all blocks.
            number_S = jnp.arange(call.candidates, dtype=jnp.int32)
            start_BNJT = jnp.sum(
                jnp.where(
                    chosen_BNJT[..., None] == number_S, blocks.start_BS[:, None, None, None], 0
                ),
                axis=-1,
            )
        start_BNJT = jnp.where(chosen_BNJT < 0, _NOWHERE, start_BNJT + shift)
    start_BNJT = _pad_tokens(start_BNJT, 3, layout.length, _NOWHERE)
    low_BN1T = jnp.broadcast_to(low_BT[:, None, None], (B, N, 1, layout.length))
    start_BNJT = jnp.concatenate([low_BN1T, start_BNJT], axis=2)
    return start_BNJT.reshape(B * K, N // K, 1 + J, layout.length)


def _dense_kernels(call: plan.Call, layout: Layout, blocks, low_BT, chosen_BNJT, K, offset):
    """The dense path's forward and backward kernel, given what every query attends to."""
    W, front = layout.window, layout.front
    size = front * W + layout.length if call.everything else call.block_size
    start_AGJT = _starts(call, blocks, layout, low_BT, chosen_BNJT, K, offset)
    by_row, by_column, used = tpu_dense.pair_tables(start_AGJT, W, size, front)
    options = {"W": W, "size": size, "aligned": layout.aligned, "soft_cap": call.soft_cap}
    return (
        functools.partial(tpu_dense.forward, by_row, used, start_AGJT, **options),
        functools.partial(tpu_dense.backward, by_column, used, start_AGJT, **options),
    )


def _from_reached(x_ALX, layout: Layout, queries: int, length: int, offset):
    """The transpose of `_reached`."""
    front = layout.front * layout.window
    if queries < length:
        A, L, X = x_ALX.shape
        row_ALX = jnp.zeros((A, L + length - queries, X), x_ALX.dtype)
        x_ALX = lax.dynamic_update_slice_in_dim(row_ALX, x_ALX, offset, 1)
    return x_ALX[:, front : front + length]


# --- Groups of heads and chunks of tokens ---------------------------------------------------------


def _row_major(x):
    """Keeps the compiler from turning whole arrays round because a loop wants slices turned."""
    return with_layout_constraint(x, DeviceLayout(tuple(range(x.ndim))))


def _group_of(x, axis: int, start, heads: int):
    """Some of the heads; all of them are left as they are."""
    if heads == x.shape[axis]:
        return x
    return _row_major(lax.dynamic_slice_in_dim(x, start, heads, axis))


def _put_group(x, part, axis: int, start):
    return lax.dynamic_update_slice_in_dim(x, _row_major(part), start, axis)


def _queries(layout, x_BTNX, start, heads: int, key_heads: int):
    """Some query heads, [A, G, length, X]."""
    x_BKGTX = plan.group_heads(_group_of(x_BTNX, 2, start, heads), key_heads)
    return _pad_tokens(_merge_heads(x_BKGTX), 2, layout.length)


def _as_heads(x_AGTX, B: int, T: int):
    """The transpose of `_queries`, [B, T, heads, X]."""
    A, G, _, X = x_AGTX.shape
    x_BKGTX = x_AGTX[:, :, :T].reshape(B, A // B, G, T, X)
    return jnp.transpose(x_BKGTX, (0, 3, 1, 2, 4)).reshape(B, T, A // B * G, X)


def _multiplied(call, q):
    multiplier = tpu_tiles.query_multiplier(call.scale, call.soft_cap)
    return plan.bounded(q.astype(jnp.float32) * multiplier).astype(q.dtype)


def _keys(x_BTKX, start, key_heads: int):
    """Some key heads, [B, K, T, X]."""
    return jnp.swapaxes(_group_of(x_BTKX, 2, start, key_heads), 1, 2)


def _cut(call, blocks, x_BKTX):
    return _merge_heads(plan.cut_blocks(x_BKTX, blocks, call.block_size, call.aligned))


def _choice(layout, chosen_BNJT, start, heads: int, key_heads: int):
    """[A, J * G, length], so that the tokens are on axis 2, and no axis of a few is the last."""
    chosen_BnJT = _group_of(chosen_BNJT, 1, start, heads)
    B, _, J, T = chosen_BnJT.shape
    chosen_BKJGT = jnp.swapaxes(chosen_BnJT.reshape(B, key_heads, -1, J, T), 2, 3)
    return _pad_tokens(chosen_BKJGT.reshape(B * key_heads, -1, T), 2, layout.length, -1)


def _over_tokens(function, layout: Layout, sums, tokens, constants):
    """Runs function(sums, tokens, constants) -> (sums, tokens) on one chunk after another.

    `tokens` are arrays [A, ..., length] or [A, ..., length, width] with the tokens on axis 2,
    updated in place; `constants` are read only.
    """
    chunks = layout.length // layout.tokens
    if chunks == 1:
        return function(sums, tokens, constants)

    def body(i, carry):
        sums, tokens = carry

        def at(x):
            return lax.dynamic_slice_in_dim(x, i * layout.tokens, layout.tokens, 2)

        sums, new = function(sums, jax.tree.map(at, tokens), jax.tree.map(at, constants))

        def put(x, part):
            return lax.dynamic_update_slice_in_dim(x, part, i * layout.tokens, 2)

        return sums, jax.tree.map(put, tokens, new)

    return lax.fori_loop(0, chunks, body, (sums, tokens))


def _dispatch(call, layout, chosen_APt):
    """Tables of the pairs of a chunk, over the rows and blocks of all of its heads."""
    A, J = chosen_APt.shape[0], call.choices
    chosen_JAR = jnp.swapaxes(chosen_APt.reshape(A, J, -1), 0, 1)
    first_A = jnp.arange(A, dtype=jnp.int32)[:, None] * call.candidates
    block_JAR = jnp.where(chosen_JAR < 0, -1, first_A + chosen_JAR)
    rows = A * chosen_JAR.shape[2]
    tiles = plan.dispatch(
        block_JAR.reshape(-1), rows, A * call.candidates, layout.tiles, layout.tile
    )
    pairs = tiles.slot_P.reshape(J, rows), (chosen_JAR >= 0).reshape(J, rows)
    return tiles.block_Z, tiles.used, tiles.row_ZU, pairs


def _gather(x_AGtX, row_ZU):
    """Rows of all heads, and one of zeros behind them for empty slots."""
    x_RX = jnp.pad(x_AGtX.reshape(-1, x_AGtX.shape[3]), ((0, 8), (0, 0)))
    return x_RX.at[row_ZU].get(mode="promise_in_bounds")


# --- Forward --------------------------------------------------------------------------------------


def _forward_chunk(call, layout, interpret, k_ASMH, v_ASME, part, q_AGtH, chosen_APt):
    """Adds the chosen blocks to `part`: o, top and total, [A, G, t, ...]."""
    A, G, t, _ = q_AGtH.shape
    E = v_ASME.shape[3]
    block_Z, used, row_ZU, pairs = _dispatch(call, layout, chosen_APt)
    packed = tpu_tiles.forward(
        block_Z,
        used,
        _gather(q_AGtH, row_ZU),
        _merge_heads(k_ASMH),
        _merge_heads(v_ASME),
        soft_cap=call.soft_cap,
        interpret=interpret,
    )
    packed = packed.reshape(-1, E + LANES)

    def merge(part, pair):
        slot_R, valid_R = pair
        o, top, total = part
        row = jnp.where(valid_R[..., None], packed[slot_R], 0)
        its_top, its_total = (x[..., 0] for x in tpu_tiles.from_lanes(row[..., E:]))
        new = jnp.maximum(top, jnp.where(valid_R, its_top, -jnp.inf))
        mine = jnp.exp2(top - new)
        its = jnp.where(valid_R, jnp.exp2(its_top - new), 0)
        o = mine[..., None] * o + its[..., None] * row[..., :E].astype(o.dtype)
        return (o, new, mine * total + its * its_total), None

    o, top, total = (x.reshape(A * G * t, *x.shape[3:]) for x in part)
    part, _ = lax.scan(merge, (o.astype(jnp.float32), top, total), pairs)
    return tuple(x.reshape(A, G, t, *x.shape[1:]) for x in part)


def _normalise(o, top, total, dtype):
    inverse = 1 / jnp.maximum(total, jnp.finfo(total.dtype).tiny)
    return (o.astype(jnp.float32) * inverse[..., None]).astype(dtype), top, inverse


def _layout(call: plan.Call, q_BTNH, v_BTKE, device_kind) -> Layout:
    B, T, N, H = q_BTNH.shape
    length, K, E = v_BTKE.shape[1:]
    dense = tpu_costs.is_dense(
        call,
        queries=T,
        length=length,
        groups=N // K,
        rows=B * K,
        key_width=H,
        value_width=E,
        itemsize=q_BTNH.dtype.itemsize,
        device_kind=device_kind,
    )
    return make_layout(call, B, T, N, K, length, dense=dense)


def forward(
    call: plan.Call, q_BTNH, k_BTKH, v_BTKE, chosen_BNJT, blocks, offset=0,
    *, interpret: bool, device_kind: str | None = None,
):  # fmt: skip
    """Attention, and of each query the largest score to base 2 and 1 / sum of exp2(score - it).

    Args:
      q_BTNH, chosen_BNJT: of all tokens, or of consecutive ones that begin at `offset`.
      blocks: of all tokens.
      device_kind: what the code is for; None: unknown.

    Returns:
      o_BTNE in the dtype of queries, top_BNT, inverse_BNT float32.
    """
    B, T, N, _ = q_BTNH.shape
    K, E = v_BTKE.shape[2:]
    dtype = q_BTNH.dtype
    layout = _layout(call, q_BTNH, v_BTKE, device_kind)
    heads, key_heads = layout.heads, max(1, layout.heads * K // N)
    low_BT = _low(call, blocks, layout, T, offset)
    if layout.dense:
        attend, _ = _dense_kernels(call, layout, blocks, low_BT, chosen_BNJT, K, offset)
    else:
        attend = functools.partial(
            tpu_interval.forward,
            low_BT,
            W=layout.window,
            reach=layout.reach,
            soft_cap=call.soft_cap,
        )

    def group(out, start):
        key_start = start // (N // K)
        q_AGTH = _multiplied(call, _queries(layout, q_BTNH, start, heads, key_heads))
        k_BKTH, v_BKTE = (_keys(x, key_start, key_heads) for x in (plan.bounded(k_BTKH), v_BTKE))
        part = attend(
            q_AGTH,
            *(_reached(_merge_heads(x), layout, T, offset) for x in (k_BKTH, v_BKTE)),
            interpret=interpret,
        )
        if layout.dense or not call.choices:
            part = _normalise(*part, dtype)
        else:
            k_ASMH, v_ASME = (_cut(call, blocks, x) for x in (k_BKTH, v_BKTE))

            def chunk(sums, part, constants):
                part = _forward_chunk(call, layout, interpret, k_ASMH, v_ASME, part, *constants)
                return sums, _normalise(*part, dtype)

            constants = q_AGTH, _choice(layout, chosen_BNJT, start, heads, key_heads)
            _, part = _over_tokens(chunk, layout, (), part, constants)
        o, *stats = part
        parts = _as_heads(o, B, T), *(x.reshape(B, heads, -1)[:, :, :T] for x in stats)
        if heads == N:
            return parts
        return tuple(
            _put_group(x, part, axis, start)
            for x, part, axis in zip(out, parts, (2, 1, 1), strict=True)
        )

    out = (
        jnp.zeros((B, T, N, E), dtype),
        jnp.zeros((B, N, T), jnp.float32),
        jnp.zeros((B, N, T), jnp.float32),
    )
    return plan.over_groups(group, heads, N, out)


# --- Backward -------------------------------------------------------------------------------------


def _backward_chunk(
    call, layout, interpret, k_ASMH, v_ASME, sums, dq_AGtH, q_AGtH, do_AGtE, stats, chosen_APt
):
    """Adds the chosen blocks to the gradients of all keys and values and of these queries."""
    A, G, t, H = q_AGtH.shape
    block_Z, used, row_ZU, pairs = _dispatch(call, layout, chosen_APt)
    lanes = tpu_tiles.to_lanes(*(x[..., None] for x in stats), q_AGtH.dtype)
    dq, *new = tpu_tiles.backward(
        block_Z,
        used,
        _gather(jnp.concatenate([q_AGtH, do_AGtE, lanes], axis=-1), row_ZU),
        *(_merge_heads(x) for x in (k_ASMH, v_ASME, *sums)),
        soft_cap=call.soft_cap,
        interpret=interpret,
    )
    dq = dq.reshape(-1, H)

    def add(total, pair):
        slot_R, valid_R = pair
        return total + jnp.where(valid_R[..., None], dq[slot_R], 0).astype(total.dtype), None

    total = dq_AGtH.reshape(A * G * t, H).astype(jnp.float32)
    total, _ = lax.scan(add, total, pairs)
    sums = tuple(x.reshape(y.shape) for x, y in zip(new, sums, strict=True))
    return sums, total.reshape(dq_AGtH.shape).astype(dq_AGtH.dtype)


def backward(
    call: plan.Call, q_BTNH, k_BTKH, v_BTKE, chosen_BNJT, blocks, o, top, inverse, do_BTNE,
    offset=0, *, interpret: bool, device_kind: str | None = None,
):  # fmt: skip
    """Gradients of queries in their dtype, and of keys and values in float32.

    Args: as for `forward`, and
      o, top, inverse: what `forward` returned.
    """
    B, T, N, H = q_BTNH.shape
    length, K, E = v_BTKE.shape[1:]
    layout = _layout(call, q_BTNH, v_BTKE, device_kind)
    heads, key_heads = layout.heads, max(1, layout.heads * K // N)
    low_BT = _low(call, blocks, layout, T, offset)
    if layout.dense:
        _, attend = _dense_kernels(call, layout, blocks, low_BT, chosen_BNJT, K, offset)
    else:
        attend = functools.partial(
            tpu_interval.backward,
            low_BT,
            W=layout.window,
            reach=layout.reach,
            soft_cap=call.soft_cap,
        )

    def stat(x_BNT, start):
        x_AGT = _group_of(x_BNT, 1, start, heads).reshape(B * key_heads, -1, T)
        return _pad_tokens(x_AGT, 2, layout.length)

    def group(sums, start):
        key_start = start // (N // K)

        def queries(x):
            return _queries(layout, x, start, heads, key_heads)

        q_AGTH = _multiplied(call, queries(q_BTNH))
        k_BKTH, v_BKTE = (_keys(x, key_start, key_heads) for x in (plan.bounded(k_BTKH), v_BTKE))
        top_AGT, inverse_AGT = (stat(x, start) for x in (top, inverse))
        do_AGTE = queries(do_BTNE).astype(jnp.float32) * inverse_AGT[..., None]
        delta_AGT = jnp.sum(do_AGTE * queries(o).astype(jnp.float32), axis=-1)
        do_AGTE = do_AGTE.astype(v_BTKE.dtype)
        dq_AGTH, dk_ATH, dv_ATE = attend(
            q_AGTH,
            *(_reached(_merge_heads(x), layout, T, offset) for x in (k_BKTH, v_BKTE)),
            do_AGTE,
            top_AGT,
            delta_AGT,
            interpret=interpret,
        )
        own = (_from_reached(x, layout, T, length, offset) for x in (dk_ATH, dv_ATE))
        own = tuple(x.reshape(B, key_heads, *x.shape[1:]) for x in own)
        if call.choices and not layout.dense:
            k_ASMH, v_ASME = (_cut(call, blocks, x) for x in (k_BKTH, v_BKTE))

            def chunk(sums, dq_AGtH, constants):
                return _backward_chunk(
                    call, layout, interpret, k_ASMH, v_ASME, sums, dq_AGtH, *constants
                )

            chosen_APT = _choice(layout, chosen_BNJT, start, heads, key_heads)
            constants = q_AGTH, do_AGTE, (top_AGT, delta_AGT), chosen_APT
            # The sums of chosen blocks begin with what their own queries gave.
            chosen = tuple(_cut(call, blocks, x) for x in own)
            chosen, dq_AGTH = _over_tokens(chunk, layout, chosen, dq_AGTH, constants)
            part = (blocks.slot_BT >= 0)[:, None, :, None]
            chosen = (x.reshape(B, key_heads, *x.shape[1:]) for x in chosen)
            own = tuple(
                jnp.where(part, plan.paste_blocks(x, blocks, length, call.aligned), y)
                for x, y in zip(chosen, own, strict=True)
            )
        dq = _as_heads((dq_AGTH.astype(jnp.float32) * call.scale).astype(q_BTNH.dtype), B, T)
        dk, dv = (jnp.swapaxes(x, 1, 2) for x in own)
        if heads == N:
            return dq, dk, dv
        dq = _put_group(sums[0], dq, 2, start)
        return dq, *(
            _put_group(x, _group_of(x, 2, key_start, key_heads) + part, 2, key_start)
            for x, part in zip(sums[1:], (dk, dv), strict=True)
        )

    sums = (
        jnp.zeros((B, T, N, H), q_BTNH.dtype),
        jnp.zeros((B, length, K, H), jnp.float32),
        jnp.zeros((B, length, K, E), jnp.float32),
    )
    dq, dk, dv = plan.over_groups(group, heads, N, sums)
    return dq, dk * tpu_tiles.key_gradient_factor(call.soft_cap), dv


# --- The choice -----------------------------------------------------------------------------------


def choose(call: plan.Call, q_BTNH, c_BKSH, blocks: plan.Blocks, *, interpret: bool):
    """`plan.choose` in one pass over the blocks, without a buffer of scores."""
    B, T, N, _ = q_BTNH.shape
    tile = min(_CHOOSE_TILE, -(-T // LANES) * LANES)
    length = -(-T // tile) * tile
    q_BKGTH = plan.group_heads(q_BTNH, c_BKSH.shape[1])
    chosen_AGJT = tpu_choose.choose(
        call,
        _pad_tokens(blocks.first_BT, 1, length),
        _pad_tokens(blocks.end_BT, 1, length),
        _pad_tokens(_merge_heads(q_BKGTH), 2, length),
        _merge_heads(c_BKSH),
        tile=tile,
        interpret=interpret,
    )
    return chosen_AGJT.reshape(B, N, call.choices, length)[..., :T]
