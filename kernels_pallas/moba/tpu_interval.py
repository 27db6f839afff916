"""Pallas TPU kernels for attention to an interval of keys that ends with the query itself.

Query t attends to the keys low_t <= s <= t. That is a query's own block, a document's causal
attention, or a sliding window; `low` never falls from one token to the next. Tiles of keys that no
query of a tile reaches are neither fetched nor computed.

Keys may begin before the first query, by `front` tiles. Positions, `low` among them, count from the
first key, and so do the numbers of tiles: the queries of grid index i are tile front + i.

Keys lie on sublanes and queries on lanes, so that a query's statistics broadcast along sublanes.
Scores are logarithms to base 2, as in tpu_tiles.

Axes: A key heads of all batch rows, G query heads a key head, T queries and L keys (whole tiles),
H head width, E value width, I tiles of W queries.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.moba.tpu_tiles import LANES, NN, NT, TN, cap_scores, dot


def _mask(low_row, row, column, W):
    """[keys, queries] of the tile of queries `row` and of keys `column`."""
    k_t = column * W + lax.broadcasted_iota(jnp.int32, (W, W), 0)
    q_t = row * W + lax.broadcasted_iota(jnp.int32, (W, W), 1)
    return (k_t >= low_row) & (k_t <= q_t)


def _masked_scores(q, k, low_row, row, column, soft_cap):
    s, slope = cap_scores(dot(k, q, NT), soft_cap)
    return jnp.where(_mask(low_row, row, column, q.shape[0]), s, -jnp.inf), slope


def _forward_kernel(
    first_ref, low_ref, q_ref, k_ref, v_ref, o_ref, top_ref, total_ref, sum_ref,
    *, heads, front, soft_cap,
):  # fmt: skip
    a, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    row, column = front + i, first_ref[lax.div(a, heads) * pl.num_programs(2) + i] + j

    @pl.when(j == 0)
    def _():
        top_ref[...] = jnp.full_like(top_ref, jnp.finfo(jnp.float32).min)
        total_ref[...] = jnp.zeros_like(total_ref)
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(column <= row)
    def _():
        v = v_ref[...]
        s, _ = _masked_scores(q_ref[...], k_ref[...], low_ref[...], row, column, soft_cap)
        top = jnp.maximum(top_ref[...], jnp.max(s, axis=0, keepdims=True))
        p = jnp.exp2(s - top)
        fade = jnp.exp2(top_ref[...] - top)
        total_ref[...] = total_ref[...] * fade + jnp.sum(p, axis=0, keepdims=True)
        sum_ref[...] = sum_ref[...] * fade + dot(v, p.astype(v.dtype), TN)
        top_ref[...] = top

    @pl.when(column == row)
    def _():
        o_ref[...] = sum_ref[...].T.astype(o_ref.dtype)


def _gradients(q, k, v, do, top, delta, low, row, column, soft_cap):
    """p and the scores' gradient, [keys, queries]."""
    s, slope = _masked_scores(q, k, low, row, column, soft_cap)
    p = jnp.exp2(s - top)
    ds = p * (dot(v, do, NT) - delta)
    if slope is not None:
        ds = ds * slope
    return p.astype(do.dtype), ds.astype(q.dtype)


def _dq_kernel(
    first_ref, low_ref, q_ref, k_ref, v_ref, do_ref, top_ref, delta_ref, dq_ref, sum_ref,
    *, heads, front, soft_cap,
):  # fmt: skip
    a, i, j = pl.program_id(0), pl.program_id(2), pl.program_id(3)
    row, column = front + i, first_ref[lax.div(a, heads) * pl.num_programs(2) + i] + j

    @pl.when(j == 0)
    def _():
        sum_ref[...] = jnp.zeros_like(sum_ref)

    @pl.when(column <= row)
    def _():
        k = k_ref[...]
        _, ds = _gradients(
            q_ref[...], k, v_ref[...], do_ref[...], top_ref[...], delta_ref[...], low_ref[...],
            row, column, soft_cap,
        )  # fmt: skip
        sum_ref[...] += dot(k, ds, TN)

    @pl.when(column == row)
    def _():
        dq_ref[...] = sum_ref[...].T.astype(dq_ref.dtype)


def _dkv_kernel(
    last_ref, low_ref, q_ref, k_ref, v_ref, do_ref, top_ref, delta_ref, *out_refs,
    heads, front, soft_cap,
):  # fmt: skip
    a, column, g, i = (pl.program_id(axis) for axis in range(4))
    row = jnp.maximum(column, front) + i
    dk_ref, dv_ref, *dq_ref = out_refs

    @pl.when((g == 0) & (i == 0))
    def _():
        dk_ref[...] = jnp.zeros_like(dk_ref)
        dv_ref[...] = jnp.zeros_like(dv_ref)

    @pl.when(row <= last_ref[lax.div(a, heads) * pl.num_programs(1) + column])
    def _():
        q, k, do = q_ref[...], k_ref[...], do_ref[...]
        p, ds = _gradients(
            q, k, v_ref[...], do, top_ref[...], delta_ref[...], low_ref[...], row, column, soft_cap
        )
        dv_ref[...] += dot(p, do, NN)
        dk_ref[...] += dot(ds, q, NN)
        if dq_ref:
            dq_ref[0][...] = dot(k, ds, TN).T.astype(dq_ref[0].dtype)


def _params(W: int, H: int, E: int, *semantics):
    scores = 8 * 4 * W * W
    blocks = 2 * 4 * 6 * W * (max(H, LANES) + max(E, LANES))
    limit = min(max(2 * (scores + blocks), 16 << 20), 60 << 20)
    return pltpu.CompilerParams(dimension_semantics=semantics, vmem_limit_bytes=limit)


def _cost(A, G, I, reach, W, H, E, products, dtype):
    pairs = A * G * I * reach * W * W
    return pl.CostEstimate(
        flops=2 * pairs * products,
        transcendentals=pairs,
        bytes_accessed=A * (G * I * (1 + reach)) * W * (H + E) * dtype.itemsize,
    )


def tile_tables(low_BT, W: int, front: int = 0):
    """First tile of keys of every tile of queries, and last tile of queries of every tile of keys.

    Args:
      low_BT: int32, not falling along T; larger than a query's position where it attends nothing.

    Returns:
      first_BI, last_BJ: int32, where J is front + I; last < front where no query reaches the keys.
    """
    I = low_BT.shape[1] // W
    number_J = jnp.arange(front + I, dtype=jnp.int32)
    first_BI = jnp.minimum(low_BT[:, ::W] // W, number_J[front:])
    last_BJ = jax.vmap(lambda f: jnp.searchsorted(f, number_J, side="right"))(first_BI)
    return first_BI, last_BJ.astype(jnp.int32) + (front - 1)


def forward(low_BT, q_AGTH, k_ALH, v_ALE, *, W, reach, soft_cap, interpret):
    """Attention over each query's interval.

    Args:
      low_BT: see `tile_tables`. A is B times the key heads.
      k_ALH, v_ALE: L - T is a multiple of W.
      W: tokens of a tile; T is a multiple.
      reach: most tiles of keys that a tile of queries reaches.

    Returns:
      o_AGTE: sum of exp2(score - top) times value, in the dtype of values.
      top_AGT, total_AGT: float32; the lowest finite number and 0 where nothing is attended.
    """
    A, G, T, H = q_AGTH.shape
    E = v_ALE.shape[2]
    B, I, front = low_BT.shape[0], T // W, (v_ALE.shape[1] - T) // W
    heads = A // B
    first_BI, _ = tile_tables(low_BT, W, front)

    def query(a, g, i, j, _):
        return a, g, i, 0

    def stat(a, g, i, j, _):
        return a, g, 0, i

    def key(a, g, i, j, first):
        return a, jnp.minimum(first[lax.div(a, heads) * I + i] + j, front + i), 0

    o, top, total = pl.pallas_call(
        functools.partial(_forward_kernel, heads=heads, front=front, soft_cap=soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(A, G, I, reach),
            in_specs=[
                pl.BlockSpec((None, 1, W), lambda a, g, i, j, _: (lax.div(a, heads), 0, i)),
                pl.BlockSpec((None, None, W, H), query),
                pl.BlockSpec((None, W, H), key),
                pl.BlockSpec((None, W, E), key),
            ],
            out_specs=[
                pl.BlockSpec((None, None, W, E), query),
                pl.BlockSpec((None, None, 1, W), stat),
                pl.BlockSpec((None, None, 1, W), stat),
            ],
            scratch_shapes=[pltpu.VMEM((E, W), jnp.float32)],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((A, G, T, E), v_ALE.dtype),
            jax.ShapeDtypeStruct((A, G, 1, T), jnp.float32),
            jax.ShapeDtypeStruct((A, G, 1, T), jnp.float32),
        ],
        compiler_params=_params(W, H, E, "parallel", "parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(A, G, I, reach, W, H, E, H + E, q_AGTH.dtype),
        interpret=interpret,
        name=f"moba_interval_forward_{W}",
    )(first_BI.reshape(-1), low_BT[:, None], q_AGTH, k_ALH, v_ALE)
    return o, top[:, :, 0], total[:, :, 0]


def backward(
    low_BT, q_AGTH, k_ALH, v_ALE, do_AGTE, top_AGT, delta_AGT, *, W, reach, soft_cap, interpret
):
    """Gradients, with statistics over everything that a query attended.

    Args: as for `forward` and `tpu_tiles.backward`.

    Returns:
      dq_AGTH in the dtype of queries, without the scale; dk_ALH, float32, without
      `key_gradient_factor`; dv_ALE, float32.
    """
    A, G, T, H = q_AGTH.shape
    L, E = v_ALE.shape[1:]
    B, I, J, front = low_BT.shape[0], T // W, L // W, (L - T) // W
    heads = A // B
    first_BI, last_BJ = tile_tables(low_BT, W, front)
    inputs = (
        low_BT[:, None], q_AGTH, k_ALH, v_ALE, do_AGTE, top_AGT[:, :, None], delta_AGT[:, :, None]
    )  # fmt: skip
    dq_shape = jax.ShapeDtypeStruct((A, G, T, H), q_AGTH.dtype)

    def specs(order, query_tile, key_tile):
        """Of the inputs, for a grid whose axes `order` names (a, g, query tile, key tile)."""

        def named(make):
            return lambda *grid: make(*order(*grid[:4]), grid[4])

        row = named(lambda a, g, i, j, table: (a, g, query_tile(a, i, j, table), 0))
        stat = named(lambda a, g, i, j, table: (a, g, 0, query_tile(a, i, j, table)))
        low = named(lambda a, g, i, j, table: (lax.div(a, heads), 0, query_tile(a, i, j, table)))
        key = named(lambda a, g, i, j, table: (a, key_tile(a, i, j, table), 0))
        return (
            [
                pl.BlockSpec((None, 1, W), low),
                pl.BlockSpec((None, None, W, H), row),
                pl.BlockSpec((None, W, H), key),
                pl.BlockSpec((None, W, E), key),
                pl.BlockSpec((None, None, W, E), row),
                pl.BlockSpec((None, None, 1, W), stat),
                pl.BlockSpec((None, None, 1, W), stat),
            ],
            row,
            key,
        )

    in_specs, row, key = specs(
        lambda a, j, g, i: (a, g, i, j),
        lambda a, i, j, last: jnp.maximum(
            jnp.minimum(jnp.maximum(j, front) + i, last[lax.div(a, heads) * J + j]) - front, 0
        ),
        lambda a, i, j, last: j,
    )
    # If a tile of keys meets one tile of queries only, that one's gradient is whole.
    whole = reach == 1 and front == 0
    dk, dv, *dq = pl.pallas_call(
        functools.partial(_dkv_kernel, heads=heads, front=front, soft_cap=soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(A, J, G, reach),
            in_specs=in_specs,
            out_specs=[
                pl.BlockSpec((None, W, H), key),
                pl.BlockSpec((None, W, E), key),
                *([pl.BlockSpec((None, None, W, H), row)] if whole else []),
            ],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((A, L, H), jnp.float32),
            jax.ShapeDtypeStruct((A, L, E), jnp.float32),
            *([dq_shape] if whole else []),
        ],
        compiler_params=_params(W, H, E, "parallel", "parallel", "arbitrary", "arbitrary"),
        cost_estimate=_cost(A, G, I, reach, W, H, E, 2 * (H + E) + whole * H, q_AGTH.dtype),
        interpret=interpret,
        name=f"moba_interval_backward_{W}" if whole else f"moba_interval_backward_dkv_{W}",
    )(last_BJ.reshape(-1), *inputs)
    if whole:
        return dq[0], dk, dv
    in_specs, row, _ = specs(
        lambda a, g, i, j: (a, g, i, j),
        lambda a, i, j, first: i,
        lambda a, i, j, first: jnp.minimum(first[lax.div(a, heads) * I + i] + j, front + i),
    )
    dq = pl.pallas_call(
        functools.partial(_dq_kernel, heads=heads, front=front, soft_cap=soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(A, G, I, reach),
            in_specs=in_specs,
            out_specs=pl.BlockSpec((None, None, W, H), row),
            scratch_shapes=[pltpu.VMEM((H, W), jnp.float32)],
        ),
        out_shape=dq_shape,
        compiler_params=_params(W, H, E, "parallel", "parallel", "parallel", "arbitrary"),
        cost_estimate=_cost(A, G, I, reach, W, H, E, 2 * H + E, q_AGTH.dtype),
        interpret=interpret,
        name=f"moba_interval_backward_dq_{W}",
    )(first_BI.reshape(-1), *inputs)
    return dq, dk, dv
