"""MoBA for NVIDIA GPUs: Pallas kernels on the Triton backend.

Nothing is gathered, transposed or cut before a kernel: kernels read the rows of queries, keys and
values that their tables name from the arrays as they were given. A tile of queries that chose the
same block of keys writes one partial result a pair; the kernel of the own block begins with the sum
of its rows' partial results, and ends with the result. No atomics: two runs give the same bits.

Triton wants every shape a power of two. What lies beyond a width, a block or a row is masked.
Long rows are taken some heads at a time, so that partial results stay small beside the inputs.

Axes: see plan.py. R rows of queries, of one array or a group (r = (b * T + t) * N + n), Y rows of
keys (y = (b * T + t) * K + k), E value width, I tiles of W tokens, L keys of a step, S blocks of
all key heads of a group, V slots (Z * U).
"""

import dataclasses

import jax.numpy as jnp
from jax import lax

from kernels_pallas.moba import gpu_choose, gpu_interval, gpu_tiles, plan
from kernels_pallas.moba.gpu_attend import Rows, Scores
from kernels_pallas.moba.gpu_rows import Shape, sizes_of

# Pairs of a query and a block whose partial results are kept at once.
_CHUNK_PAIRS = 1 << 23


@dataclasses.dataclass(frozen=True)
class Layout:
    """Everything static about the pairs of one pass.

    Attributes:
      heads: query heads of a group.
      tile: queries of a tile that chose the same block.
      tiles: of a group.
    """

    heads: int
    tile: int
    tiles: int


def make_layout(call: plan.Call, B: int, T: int, N: int, K: int, length: int, tile: int) -> Layout:
    """The layout of a pass of T queries a row of `length` tokens from its static shapes."""
    J, G = call.choices, N // K
    groups = (n for n in range(N, 0, -1) if N % n == 0 and (n % G == 0 or G % n == 0))
    heads = next((n for n in groups if B * n * T * J <= _CHUNK_PAIRS), 1)
    # A tile that its block's queries fill seldom is wasted; a block has J * G * M of all the row's
    # on average.
    while tile > 16 and tile > J * G * call.block_size * T // length // 2:
        tile //= 2
    blocks = B * max(1, heads // G) * call.candidates
    return Layout(heads, tile, B * heads * T * J // tile + blocks)


def make_tables(call, layout: Layout, chosen_BNJT, blocks, length, K, start) -> gpu_tiles.Tables:
    """Of the query heads from `start` on; length: tokens of keys."""
    B, N, _, T = chosen_BNJT.shape
    G, heads, S = N // K, layout.heads, call.candidates
    key_heads = max(1, heads // G)
    chosen_BnJT = lax.dynamic_slice_in_dim(chosen_BNJT, start, heads, 1)
    chosen_JBTn = jnp.transpose(chosen_BnJT, (2, 0, 3, 1))
    b_B11 = jnp.arange(B, dtype=jnp.int32)[:, None, None]
    head_n = jnp.arange(heads, dtype=jnp.int32) // G
    block_JBTn = jnp.where(chosen_JBTn < 0, -1, (b_B11 * key_heads + head_n) * S + chosen_JBTn)
    block_P = block_JBTn.reshape(-1)
    rows, num_blocks = B * T * heads, B * key_heads * S
    block_Z, row_ZU, slot_P, used = plan.dispatch(
        block_P, rows, num_blocks, layout.tiles, layout.tile
    )

    start_BS = jnp.broadcast_to(blocks.start_BS, (B, S))
    head_k = start // G + jnp.arange(key_heads, dtype=jnp.int32)[:, None]
    key_S = ((b_B11 * length + start_BS[:, None]) * K + head_k).reshape(-1)
    row_V = row_ZU.reshape(-1)
    row_V = jnp.where(row_V < rows, row_V // heads * N + start + row_V % heads, -1)
    edge_S = jnp.searchsorted(block_Z, jnp.arange(num_blocks + 1, dtype=jnp.int32))
    edge_S = jnp.minimum(edge_S.astype(jnp.int32), used)
    return gpu_tiles.Tables(
        row_V, key_S[block_Z], key_S, edge_S, jnp.where(block_P < 0, -1, slot_P)
    )


def _rows_of(x):
    return x.reshape(-1, x.shape[-1])


def _make_shape(call, layout: Layout, q_BTNH, k_BTKH, blocks) -> Shape:
    B, T, N, _ = q_BTNH.shape
    return Shape(
        B,
        T,
        k_BTKH.shape[1],
        N,
        k_BTKH.shape[2],
        layout.heads,
        call.choices,
        blocks.own_BT.shape[0],
    )


def forward(
    call: plan.Call, q_BTNH, k_BTKH, v_BTKE, chosen_BNJT, blocks, offset=0, *, interpret: bool
):
    """Attention, and of each query the largest score and 1 / the sum of powers of its scores.

    Args:
      q_BTNH, chosen_BNJT: of all tokens, or of consecutive ones that begin at `offset`.
      blocks: of all tokens.

    Returns:
      o_BTNE in the dtype of queries, top_BNT, inverse_BNT float32.
    """
    B, T, N, H = q_BTNH.shape
    length, K, E = v_BTKE.shape[1:]
    offset = jnp.int32(offset)
    layout = make_layout(
        call, B, T, N, K, length, sizes_of("forward", max(H, E), q_BTNH.dtype).rows
    )
    shape = _make_shape(call, layout, q_BTNH, k_BTKH, blocks)
    common = {"scores": Scores(call.scale, call.soft_cap), "interpret": interpret}
    q_RH, k_YH, v_YE = (_rows_of(x) for x in (q_BTNH, plan.bounded(k_BTKH), v_BTKE))
    low_T = plan.intervals(call, blocks, T, offset).reshape(-1)

    def group(out, start):
        pairs = ()
        if call.choices:
            tables = make_tables(call, layout, chosen_BNJT, blocks, length, K, start)
            parts = gpu_tiles.forward(
                tables, q_RH, k_YH, v_YE, tile=layout.tile, M=call.block_size, K=K, **common
            )
            pairs = (tables.slot_P, *parts)
        return tuple(
            gpu_interval.forward(
                jnp.stack([start, offset]),
                low_T,
                q_RH,
                k_YH,
                v_YE,
                pairs,
                out,
                shape=shape,
                **common,
            )
        )

    out = (
        jnp.empty((B * T * N, E), q_BTNH.dtype),
        jnp.empty((B * N * T,), jnp.float32),
        jnp.empty((B * N * T,), jnp.float32),
    )
    o, top, inverse = plan.over_groups(group, layout.heads, N, out)
    return o.reshape(B, T, N, E), top.reshape(B, N, T), inverse.reshape(B, N, T)


def backward(
    call: plan.Call, q_BTNH, k_BTKH, v_BTKE, chosen_BNJT, blocks, o, top, inverse, do_BTNE,
    offset=0, *, interpret: bool,
):  # fmt: skip
    """Gradients of queries in their dtype, and of keys and values in float32.

    Args: as for `forward`, and
      o, top, inverse: what `forward` returned.
    """
    B, T, N, H = q_BTNH.shape
    length, K, E = v_BTKE.shape[1:]
    offset = jnp.int32(offset)
    layout = make_layout(call, B, T, N, K, length, sizes_of("dkv", max(H, E), q_BTNH.dtype).rows)
    shape = _make_shape(call, layout, q_BTNH, k_BTKH, blocks)
    common = {"scores": Scores(call.scale, call.soft_cap), "interpret": interpret}
    k_YH, v_YE = (_rows_of(x) for x in (plan.bounded(k_BTKH), v_BTKE))
    do_BTNE = do_BTNE.astype(v_BTKE.dtype)
    delta_BTN = jnp.sum(do_BTNE.astype(jnp.float32) * o.astype(jnp.float32), axis=-1)
    stats = (jnp.swapaxes(top, 1, 2), jnp.swapaxes(inverse, 1, 2), delta_BTN)
    rows = Rows(_rows_of(q_BTNH), _rows_of(do_BTNE), *(x.reshape(-1) for x in stats))
    low_T = plan.intervals(call, blocks, T, offset).reshape(-1)

    def group(sums, start):
        dq_RH, dk_YH, dv_YE = sums
        pairs = ()
        if call.choices:
            tables = make_tables(call, layout, chosen_BNJT, blocks, length, K, start)
            tiles = common | {"tile": layout.tile, "M": call.block_size, "K": K}
            pairs = (tables.slot_P, gpu_tiles.backward_dq(tables, k_YH, v_YE, rows, **tiles))
            dk_YH, dv_YE = gpu_tiles.backward_dkv(tables, k_YH, v_YE, rows, dk_YH, dv_YE, **tiles)
        dq_RH = gpu_interval.backward_dq(
            jnp.stack([start, offset]), low_T, k_YH, v_YE, rows, pairs, dq_RH, shape=shape, **common
        )
        return dq_RH, dk_YH, dv_YE

    dk_YH, dv_YE = gpu_interval.backward_dkv(offset, low_T, k_YH, v_YE, rows, shape=shape, **common)
    sums = jnp.empty((B * T * N, H), q_BTNH.dtype), dk_YH, dv_YE
    dq_RH, dk_YH, dv_YE = plan.over_groups(group, layout.heads, N, sums)
    return dq_RH.reshape(q_BTNH.shape), dk_YH.reshape(k_BTKH.shape), dv_YE.reshape(v_BTKE.shape)


def choose(call: plan.Call, q_BTNH, c_BKSH, blocks: plan.Blocks, *, interpret: bool):
    """`plan.choose` in one pass over the blocks, without a buffer of scores."""
    B, T, N, _ = q_BTNH.shape
    K, S = c_BKSH.shape[1:3]
    chosen = gpu_choose.choose(
        call,
        blocks.first_BT.reshape(-1),
        blocks.end_BT.reshape(-1),
        _rows_of(q_BTNH),
        plan.split(_rows_of(c_BKSH), q_BTNH.dtype),
        S,
        shape=Shape(B, T, T, N, K, N, call.choices, blocks.own_BT.shape[0]),
        interpret=interpret,
    )
    return chosen.reshape(B, N, call.choices, T)
