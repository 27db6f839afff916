"""Pallas TPU kernels over tiles of queries that chose the same block of keys.

No masks and no online softmax: a tile's queries attend to every key of its block. Scores are
logarithms to base 2: queries arrive multiplied by `query_multiplier`.

A gather of rows costs a TPU the same whatever the rows' width, so a query's statistics travel in
the same row as its vectors, behind them, as numbers that the row's dtype holds exactly.

Axes: Z tiles, U rows of a tile, S blocks of all key heads and batch rows, M keys of a block,
H head width, E value width.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.moba import plan

LANES = 128
# Rows of a tile whose softmax is one piece of work for the scheduler.
_ROWS = 256
LOG2_E = math.log2(math.e)
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))
TN = (((0,), (0,)), ((), ()))


def dot(x, y, dimensions):
    """A product with float32 sums; float32 operands are not rounded to bfloat16."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x, y, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


def query_multiplier(scale: float, soft_cap: float | None) -> float:
    """What queries are multiplied by before they come here."""
    return scale * LOG2_E if soft_cap is None else scale / soft_cap


def key_gradient_factor(soft_cap: float | None) -> float:
    """What the gradient of keys is multiplied by, the queries having been multiplied already."""
    return 1 / LOG2_E if soft_cap is None else soft_cap


def cap_scores(s, soft_cap: float | None):
    """Scores to base 2, and their slope (None: 1) in the product they come from."""
    if soft_cap is None:
        return s, None
    tanh = jnp.tanh(s)
    return (soft_cap * LOG2_E) * tanh, 1 - tanh * tanh


# --- Two float32 numbers in the lanes behind a row ----------------------------------------------


def _pieces(dtype) -> int:
    """Numbers of `dtype` that hold a float32 exactly: bfloat16 has 8 of its 24 bits."""
    return 1 if dtype == jnp.float32 else 3


def to_lanes(x, y, dtype):
    """Columns x and y, float32 [..., 1], as [..., LANES] of `dtype`."""
    pieces = _pieces(dtype)
    lane = lax.broadcasted_iota(jnp.int32, (*x.shape[:-1], LANES), x.ndim - 1)
    both = jnp.where(lane < pieces, x, y)
    if pieces > 1:
        high = plan.high_bits(both)
        rest = both - high
        middle = plan.high_bits(rest)
        piece = jnp.where(lane < pieces, lane, lane - pieces)
        both = jnp.where(piece == 0, high, jnp.where(piece == 1, middle, rest - middle))
    return both.astype(dtype)


def from_lanes(lanes, axis: int = -1):
    """The two float32 numbers that `to_lanes` put along `axis`, which stays with length 1."""
    pieces = _pieces(lanes.dtype)
    lanes = lanes.astype(jnp.float32)

    def at(i):
        return lax.slice_in_dim(lanes, i, i + 1, axis=axis % lanes.ndim)

    return tuple(sum(at(i + n * pieces) for i in range(1, pieces)) + at(n * pieces) for n in (0, 1))


# --- The kernels ----------------------------------------------------------------------------------


def _step(M: int) -> int:
    """Keys scored at once: all of a block, unless the scores would crowd the registers out."""
    return 512 if M > 1024 and M % 512 == 0 else M


def _forward_kernel(_, q_ref, k_ref, v_ref, o_ref, *, soft_cap):
    U, (M, E) = q_ref.shape[0], v_ref.shape
    rows, step = min(U, _ROWS), _step(M)

    def scores(row, i):
        s = dot(q_ref[pl.ds(row, rows)], k_ref[pl.ds(i * step, step)], NT)
        return cap_scores(s, soft_cap)[0]

    def attend(s, i):
        v = v_ref[pl.ds(i * step, step)]
        top = jnp.max(s, axis=1, keepdims=True)
        p = jnp.exp2(s - top)
        return dot(p.astype(v.dtype), v, NN), top, jnp.sum(p, axis=1, keepdims=True)

    def finish(row, s):
        def add(i, part):
            o, top, total = part
            its_o, its_top, its_total = attend(scores(row, i), i)
            new = jnp.maximum(top, its_top)
            mine, its = jnp.exp2(top - new), jnp.exp2(its_top - new)
            return mine * o + its * its_o, new, mine * total + its * its_total

        o, top, total = lax.fori_loop(1, M // step, add, attend(s, 0))
        o_ref[pl.ds(row, rows), :E] = o.astype(o_ref.dtype)
        o_ref[pl.ds(row, rows), E:] = to_lanes(top, total, o_ref.dtype)

    # All rows are scored before any softmax: the units then work side by side.
    for row, s in [(row, scores(row, 0)) for row in range(0, U, rows)]:
        finish(row, s)


def _backward_kernel(
    block_ref, row_ref, k_ref, v_ref, dk_in, dv_in, dq_ref, dk_ref, dv_ref, *, soft_cap
):
    z = pl.program_id(0)
    first = (z == 0) | (block_ref[z] != block_ref[jnp.maximum(z - 1, 0)])

    (M, H), E = k_ref.shape, v_ref.shape[1]
    step = _step(M)
    q, do = row_ref[:, :H], row_ref[:, H : H + E]
    # Keys lie on sublanes, so that a query's statistics broadcast along them.
    top, delta = from_lanes(row_ref[:, H + E :].T, axis=0)

    def attend(i):
        """Adds to the gradients of some keys; returns that of the queries, [H, U]."""
        keys = pl.ds(i * step, step)
        k, v = k_ref[keys], v_ref[keys]
        s, slope = cap_scores(dot(k, q, NT), soft_cap)
        p = jnp.exp2(s - top)
        dv = dot(p.astype(do.dtype), do, NN)
        ds = p * (dot(v, do, NT) - delta)
        if slope is not None:
            ds = ds * slope
        ds = ds.astype(q.dtype)
        dk = dot(ds, q, NN)
        dk_ref[keys] = jnp.where(first, dk_in[keys], dk_ref[keys]) + dk
        dv_ref[keys] = jnp.where(first, dv_in[keys], dv_ref[keys]) + dv
        return dot(k, ds, TN)

    dq = lax.fori_loop(1, M // step, lambda i, dq: dq + attend(i), attend(0))
    dq_ref[...] = dq.T.astype(dq_ref.dtype)


def _vmem_limit(U: int, M: int, H: int, E: int) -> int:
    """Bytes of VMEM to ask for: several float32 arrays of scores, and blocks held twice."""
    scores = 6 * 4 * U * max(M, LANES)
    blocks = 2 * 4 * (2 * U + 3 * M) * (max(H, LANES) + max(E, LANES))
    return min(max(2 * (scores + blocks), 16 << 20), 60 << 20)


def _tile(z, _):
    return z, 0, 0


def _block(z, block_Z):
    return block_Z[z], 0, 0


def _params(U: int, M: int, H: int, E: int):
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",), vmem_limit_bytes=_vmem_limit(U, M, H, E)
    )


def forward(block_Z, used, q_ZUH, k_SMH, v_SME, *, soft_cap, interpret):
    """Attention of every tile over its block.

    Args:
      block_Z: the block of each tile, int32.
      used: how many tiles to compute; the results of the others are rubbish.

    Returns:
      [Z, U, E + LANES] in the dtype of values: the sum of exp2(score - top) times value, and, as
      `from_lanes` reads them, top, the largest score, and the sum of exp2(score - top).
    """
    Z, U, H = q_ZUH.shape
    S, M, E = v_SME.shape
    return pl.pallas_call(
        functools.partial(_forward_kernel, soft_cap=soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(used,),
            in_specs=[
                pl.BlockSpec((None, U, H), _tile),
                pl.BlockSpec((None, M, H), _block),
                pl.BlockSpec((None, M, E), _block),
            ],
            out_specs=pl.BlockSpec((None, U, E + LANES), _tile),
        ),
        out_shape=jax.ShapeDtypeStruct((Z, U, E + LANES), v_SME.dtype),
        compiler_params=_params(U, M, H, E),
        cost_estimate=pl.CostEstimate(
            flops=2 * Z * U * M * (H + E),
            transcendentals=Z * U * M,
            bytes_accessed=(Z * U * (H + E + LANES) + S * M * (H + E)) * q_ZUH.dtype.itemsize,
        ),
        interpret=interpret,
        name=f"moba_tiles_forward_{U}x{M}",
    )(block_Z, q_ZUH, k_SMH, v_SME)


def backward(block_Z, used, row_ZUX, k_SMH, v_SME, dk_SMH, dv_SME, *, soft_cap, interpret):
    """Gradients of every tile's queries, and of all blocks' keys and values added to what is given.

    Tiles of one block must be consecutive, and every block must have one.

    Args:
      row_ZUX: [Z, U, H + E + LANES]: the query; the gradient of its output; and, as `to_lanes`
        makes them, its largest score over everything it attended and the inner product of that
        gradient with the output. The gradient and the product are divided by the query's sum of
        exp2(score - top). Empty slots are 0.
      dk_SMH, dv_SME: float32; their memory is given to the results.

    Returns:
      dq_ZUH in the dtype of queries, without the scale; dk_SMH without `key_gradient_factor`;
      dv_SME.
    """
    Z, U, X = row_ZUX.shape
    S, M, E = v_SME.shape
    H = k_SMH.shape[2]
    itemsize = row_ZUX.dtype.itemsize
    keys = [pl.BlockSpec((None, M, H), _block), pl.BlockSpec((None, M, E), _block)]
    return pl.pallas_call(
        functools.partial(_backward_kernel, soft_cap=soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(used,),
            in_specs=[pl.BlockSpec((None, U, X), _tile), *keys, *keys],
            out_specs=[pl.BlockSpec((None, U, H), _tile), *keys],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((Z, U, H), row_ZUX.dtype),
            jax.ShapeDtypeStruct((S, M, H), jnp.float32),
            jax.ShapeDtypeStruct((S, M, E), jnp.float32),
        ],
        input_output_aliases={4: 1, 5: 2},
        compiler_params=_params(U, M, H, E),
        cost_estimate=pl.CostEstimate(
            flops=2 * Z * U * M * (3 * H + 2 * E),
            transcendentals=Z * U * M,
            bytes_accessed=Z * U * (X + H) * itemsize + S * M * (H + E) * (8 + itemsize),
        ),
        interpret=interpret,
        name=f"moba_tiles_backward_{U}x{M}",
    )(block_Z, row_ZUX, k_SMH, v_SME, dk_SMH, dv_SME)
