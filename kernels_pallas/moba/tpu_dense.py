"""Pallas TPU kernels for short rows: tiles of queries and keys, under the exact choice.

Which keys a query attends to is a few intervals, each `size` keys long: one begins with the query's
own block, the others with the blocks it chose. What lies behind the query is left out. Pairs of
tiles that no query of a key head needs are neither fetched nor computed. No row is gathered.

Where blocks divide the tiles or the tiles blocks, an interval covers pieces of a tile in full or
not at all. The mask is then found for pieces, not for keys.

The backward pass is one: the gradients of a whole row stay on chip, in float32.

Positions count from the first key; there may be tiles of keys before the first query. Keys lie on
sublanes and queries on lanes. Scores are logarithms to base 2, as in tpu_tiles.

Axes: A key heads of all batch rows, G query heads a key head, T queries and L keys (whole tiles),
J intervals of a query, H head width, E value width, I tiles of W queries, C tiles of W keys, Z
pairs of tiles, N pieces of a tile.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.moba.tpu_tiles import LANES, NN, NT, TN, cap_scores, dot

# A pair of tiles is one number of a table: the outer tile's above the inner one's.
_SHIFT = 16
_INNER = (1 << _SHIFT) - 1


def pieces(W: int, size: int, aligned: bool) -> int:
    """Pieces of a tile of keys, each wholly in one block; aligned: blocks begin at multiples."""
    if aligned and size % W == 0:
        return 1
    return W // size if aligned and W % size == 0 and size % 8 == 0 else W


def num_pairs(I: int, front: int) -> int:
    return I * (I + 1) // 2 + I * front


def pair_tables(start_AGJT, W: int, size: int, front: int):
    """Pairs of tiles that some query of a key head needs, and every query tile's own.

    Args:
      start_AGJT: int32, where each interval begins.

    Returns:
      by_row_AZ, by_column_AZ: int32, in order of the tiles of queries, or of keys; what follows the
        last pair is its complement.
      used: most pairs of a key head.
    """
    A, _, _, T = start_AGJT.shape
    I = T // W
    C = front + I
    start_AXIW = start_AGJT.reshape(A, -1, I, W)
    first, last = start_AXIW // W, (start_AXIW + (size - 1)) // W
    column_C = jnp.arange(C, dtype=jnp.int32)
    meets = (first[..., None] <= column_C) & (column_C <= last[..., None])
    own_I1 = jnp.arange(front, C, dtype=jnp.int32)[:, None]
    needed_AIC = jnp.any(meets, axis=(1, 3)) & (column_C < own_I1) | (column_C == own_I1)
    outer, inner = jnp.arange(I, dtype=jnp.int32)[:, None], column_C
    count_A = jnp.sum(needed_AIC, axis=(1, 2), dtype=jnp.int32)

    def table(pair_IC):
        pair_AIC = jnp.where(needed_AIC, pair_IC, jnp.iinfo(jnp.int32).max)
        pair_AZ = jnp.sort(pair_AIC.reshape(A, -1), axis=1)[:, : num_pairs(I, front)]
        last_A1 = jnp.take_along_axis(pair_AZ, count_A[:, None] - 1, axis=1)
        return jnp.where(jnp.arange(pair_AZ.shape[1]) < count_A[:, None], pair_AZ, ~last_A1)

    by_row, by_column = table(outer << _SHIFT | inner), table(inner << _SHIFT | outer)
    return by_row, by_column, jnp.max(count_A)


def _split(pair):
    """The outer and the inner tile of a pair or of its complement."""
    pair = jnp.maximum(pair, ~pair)
    return pair >> _SHIFT, pair & _INNER


def _masked(s_WW, allowed_NW):
    """Scores; -inf in pieces that are not allowed."""
    N, W = allowed_NW.shape
    if N in (1, W):
        return jnp.where(allowed_NW, s_WW, -jnp.inf)
    s_NXW = s_WW.reshape(N, W // N, W)
    return jnp.where(allowed_NW[:, None], s_NXW, -jnp.inf).reshape(W, W)


def _allowed(start_ref, column, N: int, size: int):
    """Which pieces of a tile of keys each query attends to, [N, queries]."""
    J, W = start_ref.shape
    key_NW = column * W + (W // N) * lax.broadcasted_iota(jnp.int32, (N, W), 0)
    allowed = None
    for j in range(J):
        start = start_ref[j : j + 1]
        inside = (key_NW >= start) & (key_NW < start + size)
        allowed = inside if allowed is None else allowed | inside
    return allowed


def _causal(s_WW):
    """Scores of a tile of queries with its own keys."""
    key, query = (lax.broadcasted_iota(jnp.int32, s_WW.shape, axis) for axis in (0, 1))
    return jnp.where(key <= query, s_WW, -jnp.inf)


def _forward_kernel(
    pair_ref, start_ref, q_ref, k_ref, v_ref, o_ref, top_ref, total_ref, sum_ref,
    *, front, N, size, soft_cap,
):  # fmt: skip
    a, z = pl.program_id(0), pl.program_id(2)
    pair = pair_ref[a, z]
    i, column = _split(pair)
    before, _ = _split(pair_ref[a, jnp.maximum(z - 1, 0)])

    @pl.when((z == 0) | (i != before))
    def _():
        top_ref[...] = jnp.full_like(top_ref, jnp.finfo(jnp.float32).min)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    def attend(mask):
        v = v_ref[...]
        s, _ = cap_scores(dot(k_ref[...], q_ref[...], NT), soft_cap)
        s = mask(_masked(s, _allowed(start_ref, column, N, size)))
        top = jnp.maximum(top_ref[...], jnp.max(s, axis=0, keepdims=True))
        p = jnp.exp2(s - top)
        fade = jnp.exp2(top_ref[...] - top)
        total_ref[...] = total_ref[...] * fade + jnp.sum(p, axis=0, keepdims=True)
        sum_ref[...] = sum_ref[...] * fade + dot(v, p.astype(v.dtype), TN)
        top_ref[...] = top

    @pl.when((pair >= 0) & (column < front + i))
    def _():
        attend(lambda s: s)

    @pl.when((pair >= 0) & (column == front + i))
    def _():
        attend(_causal)
        o_ref[...] = sum_ref[...].T.astype(o_ref.dtype)


def _clear(ref):
    @pl.loop(0, ref.shape[0])
    def _(i):
        ref[i] = jnp.zeros(ref.shape[1:], ref.dtype)


def _backward_kernel(
    pair_ref, start_ref, q_ref, k_ref, v_ref, do_ref, top_ref, delta_ref, dq_ref, dk_ref, dv_ref,
    dq_sum, dk_sum, dv_sum, *, front, N, size, soft_cap,
):  # fmt: skip
    a, g, z = (pl.program_id(axis) for axis in range(3))
    pair = pair_ref[a, z]
    column, i = _split(pair)

    @pl.when((g == 0) & (z == 0))
    def _():
        _clear(dk_sum)
        _clear(dv_sum)

    @pl.when(z == 0)
    def _():
        _clear(dq_sum)

    def attend(mask):
        q, k, v, do = q_ref[...], k_ref[...], v_ref[...], do_ref[...]
        s, slope = cap_scores(dot(k, q, NT), soft_cap)
        s = mask(_masked(s, _allowed(start_ref, column, N, size)))
        p = jnp.exp2(s - top_ref[...])
        ds = p * (dot(v, do, NT) - delta_ref[...])
        if slope is not None:
            ds = ds * slope
        ds = ds.astype(q.dtype)
        dv_sum[column] += dot(p.astype(do.dtype), do, NN)
        dk_sum[column] += dot(ds, q, NN)
        dq_sum[i] += dot(k, ds, TN)

    @pl.when((pair >= 0) & (column < front + i))
    def _():
        attend(lambda s: s)

    @pl.when((pair >= 0) & (column == front + i))
    def _():
        attend(_causal)

    last = z == pl.num_programs(2) - 1

    @pl.when(last)
    def _():
        pltpu.sync_copy(dq_sum, dq_ref.at[a, g])

    @pl.when(last & (g == pl.num_programs(1) - 1))
    def _():
        pltpu.sync_copy(dk_sum, dk_ref.at[a])
        pltpu.sync_copy(dv_sum, dv_ref.at[a])


def _wide(width: int) -> int:
    return -(-width // LANES) * LANES


def _tile_bytes(W: int, H: int, E: int) -> int:
    """VMEM of a pair of tiles: float32 arrays of scores, and blocks held twice."""
    return 6 * 4 * W * W + 2 * 4 * 6 * W * (_wide(H) + _wide(E))


def row_bytes(T: int, L: int, H: int, E: int) -> int:
    """VMEM of the gradients of a whole row."""
    return 4 * (T * -(-H // 8) * 8 + L * (_wide(H) + _wide(E)))


def _cost(A, G, Z, W, products, bytes_accessed):
    """Of all pairs of tiles that there may be."""
    scores = A * G * Z * W * W
    return pl.CostEstimate(
        flops=2 * scores * products, transcendentals=scores, bytes_accessed=bytes_accessed
    )


def _specs(J: int, W: int, H: int, E: int, tiles):
    """Of starts, queries, keys, values, gradients and statistics; tiles(pair) -> (row, column)."""

    def row(a, g, z, pair):
        return a, g, tiles(pair[a, z])[0], 0

    def stat(a, g, z, pair):
        return a, g, 0, tiles(pair[a, z])[0]

    def key(a, g, z, pair):
        return a, tiles(pair[a, z])[1], 0

    return {
        "start": pl.BlockSpec((None, None, J, W), stat),
        "q": pl.BlockSpec((None, None, W, H), row),
        "k": pl.BlockSpec((None, W, H), key),
        "v": pl.BlockSpec((None, W, E), key),
        "o": pl.BlockSpec((None, None, W, E), row),
        "stat": pl.BlockSpec((None, None, 1, W), stat),
    }


def forward(
    pair_AZ, used, start_AGJT, q_AGTH, k_ALH, v_ALE, *, W, size, aligned, soft_cap, interpret
):
    """Attention over each query's intervals.

    Args:
      pair_AZ, used: by row, of `pair_tables`.
      start_AGJT: int32, where each interval begins.
      k_ALH, v_ALE: L - T is a multiple of W.
      W: tokens of a tile; T is a multiple.
      size: keys of an interval.
      aligned: whether every interval that reaches a key begins at a multiple of `size`.

    Returns:
      o_AGTE: sum of exp2(score - top) times value, in the dtype of values.
      top_AGT, total_AGT: float32; the lowest finite number and 0 where nothing is attended.
    """
    A, G, T, H = q_AGTH.shape
    L, E = v_ALE.shape[1:]
    J, Z = start_AGJT.shape[2], pair_AZ.shape[1]
    specs = _specs(J, W, H, E, _split)
    o, top, total = pl.pallas_call(
        functools.partial(
            _forward_kernel,
            front=(L - T) // W,
            N=pieces(W, size, aligned),
            size=size,
            soft_cap=soft_cap,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(A, G, used),
            in_specs=[specs[name] for name in ("start", "q", "k", "v")],
            out_specs=[specs[name] for name in ("o", "stat", "stat")],
            scratch_shapes=[pltpu.VMEM((E, W), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((A, G, T, E), v_ALE.dtype),
            jax.ShapeDtypeStruct((A, G, 1, T), jnp.float32),
            jax.ShapeDtypeStruct((A, G, 1, T), jnp.float32),
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "arbitrary"),
            vmem_limit_bytes=max(2 * _tile_bytes(W, H, E), 16 << 20),
        ),
        # Queries and results once, keys and values for every pair.
        cost_estimate=_cost(
            *(A, G, Z, W, H + E), A * G * (T + Z * W) * (H + E) * q_AGTH.dtype.itemsize
        ),
        interpret=interpret,
        name=f"moba_dense_forward_{W}",
    )(pair_AZ, start_AGJT, q_AGTH, k_ALH, v_ALE)
    return o, top[:, :, 0], total[:, :, 0]


def backward(
    pair_AZ, used, start_AGJT, q_AGTH, k_ALH, v_ALE, do_AGTE, top_AGT, delta_AGT,
    *, W, size, aligned, soft_cap, interpret,
):  # fmt: skip
    """Gradients, with statistics over everything that a query attended.

    Args: as for `forward` and `tpu_tiles.backward`, and
      pair_AZ, used: by column, of `pair_tables`.

    Returns:
      dq_AGTH, without the scale; dk_ALH, without `key_gradient_factor`; dv_ALE; all float32.
    """
    A, G, T, H = q_AGTH.shape
    L, E = v_ALE.shape[1:]
    J, Z, C = start_AGJT.shape[2], pair_AZ.shape[1], L // W
    sums = (T // W, H, W), (C, W, H), (C, W, E)
    statistics = top_AGT[:, :, None], delta_AGT[:, :, None]
    specs = _specs(J, W, H, E, lambda pair: _split(pair)[::-1])
    dq, dk, dv = pl.pallas_call(
        functools.partial(
            _backward_kernel,
            front=(L - T) // W,
            N=pieces(W, size, aligned),
            size=size,
            soft_cap=soft_cap,
        ),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(A, G, used),
            in_specs=[specs[name] for name in ("start", "q", "k", "v", "o", "stat", "stat")],
            out_specs=[pl.BlockSpec(memory_space=pl.ANY)] * 3,
            scratch_shapes=[pltpu.VMEM(shape, jnp.float32) for shape in sums],
        ),
        out_shape=[
            jax.ShapeDtypeStruct(shape, jnp.float32)
            for shape in ((A, G, *sums[0]), (A, *sums[1]), (A, *sums[2]))
        ],
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"),
            vmem_limit_bytes=row_bytes(T, L, H, E) + max(2 * _tile_bytes(W, H, E), 16 << 20),
        ),
        # Keys and values once a head, queries and gradients of outputs for every pair.
        cost_estimate=_cost(
            *(A, G, Z, W, 3 * H + 2 * E),
            A * G * (L + Z * W) * (H + E) * q_AGTH.dtype.itemsize
            + 4 * A * (G * T * H + L * (H + E)),
        ),
        interpret=interpret,
        name=f"moba_dense_backward_{W}",
    )(pair_AZ, start_AGJT, q_AGTH, k_ALH, v_ALE, do_AGTE, *statistics)
    dq_AGTH = jnp.swapaxes(dq, 3, 4).reshape(A, G, T, H)
    return dq_AGTH, dk.reshape(A, L, H), dv.reshape(A, L, E)
