"""Pallas TPU kernels over tiles of queries that chose the same block of keys.

No masks and no online softmax: a tile's queries attend to every key of its block. Scores are
logarithms to base 2: queries arrive multiplied by `query_multiplier`.

A gather of rows costs a TPU the same whatever the rows' width, so a query's statistics travel in
the same row as its vectors, behind them, as numbers that the row's dtype holds exactly.

Axes: A key heads of all batch rows, Z tiles, U rows of a tile, S blocks, M keys of a block,
H head width, E value width.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

LANES = 128
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


def _high_bits(x):
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits & jnp.int32(-1 << 16), jnp.float32)


def to_lanes(x, y, dtype):
    """Columns x and y, float32 [..., 1], as [..., LANES] of `dtype`."""
    pieces = _pieces(dtype)
    lane = lax.broadcasted_iota(jnp.int32, (*x.shape[:-1], LANES), x.ndim - 1)
    both = jnp.where(lane < pieces, x, y)
    if pieces > 1:
        high = _high_bits(both)
        rest = both - high
        middle = _high_bits(rest)
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


def _forward_kernel(_, used_ref, q_ref, k_ref, v_ref, o_ref, *, soft_cap):
    @pl.when(pl.program_id(1) < used_ref[pl.program_id(0)])
    def _():
        v = v_ref[...]
        s, _ = cap_scores(dot(q_ref[...], k_ref[...], NT), soft_cap)
        top = jnp.max(s, axis=1, keepdims=True)
        p = jnp.exp2(s - top)
        total = jnp.sum(p, axis=1, keepdims=True)
        E = v.shape[1]
        o_ref[:, :E] = dot(p.astype(v.dtype), v, NN).astype(o_ref.dtype)
        o_ref[:, E:] = to_lanes(top, total, o_ref.dtype)


def _backward_kernel(
    block_ref, used_ref, row_ref, k_ref, v_ref, dk_in, dv_in, dq_ref, dk_ref, dv_ref, *, soft_cap
):
    a, z = pl.program_id(0), pl.program_id(1)
    at = a * pl.num_programs(1) + z
    first = (z == 0) | (block_ref[at] != block_ref[jnp.maximum(at - 1, 0)])

    @pl.when(z < used_ref[a])
    def _():
        k, v = k_ref[...], v_ref[...]
        H, E = k.shape[1], v.shape[1]
        q, do = row_ref[:, :H], row_ref[:, H : H + E]
        # Keys lie on sublanes, so that a query's statistics broadcast along them.
        top, delta = from_lanes(row_ref[:, H + E :].T, axis=0)
        s, slope = cap_scores(dot(k, q, NT), soft_cap)
        p = jnp.exp2(s - top)
        dv = dot(p.astype(do.dtype), do, NN)
        ds = p * (dot(v, do, NT) - delta)
        if slope is not None:
            ds = ds * slope
        ds = ds.astype(q.dtype)
        dk = dot(ds, q, NN)
        dk_ref[...] = jnp.where(first, dk_in[...], dk_ref[...]) + dk
        dv_ref[...] = jnp.where(first, dv_in[...], dv_ref[...]) + dv
        dq_ref[...] = dot(k, ds, TN).T.astype(dq_ref.dtype)


def _vmem_limit(U: int, M: int, H: int, E: int) -> int:
    """Bytes of VMEM to ask for: several float32 arrays of scores, and blocks held twice."""
    scores = 6 * 4 * U * max(M, LANES)
    blocks = 2 * 4 * (2 * U + 3 * M) * (max(H, LANES) + max(E, LANES))
    return min(max(2 * (scores + blocks), 16 << 20), 60 << 20)


def _tile(a, z, *_):
    return a, z, 0, 0


def forward(block_AZ, used_A, q_AZUH, k_ASMH, v_ASME, *, soft_cap, interpret):
    """Attention of every tile over its block.

    Args:
      block_AZ: the block of each tile, int32.
      used_A: tiles from this one on are left alone: their results are rubbish.

    Returns:
      [A, Z, U, E + LANES] in the dtype of values: the sum of exp2(score - top) times value, and,
      as `from_lanes` reads them, top, the largest score, and the sum of exp2(score - top).
    """
    A, Z, U, H = q_AZUH.shape
    S, M, E = v_ASME.shape[1:]
    itemsize = q_AZUH.dtype.itemsize

    def block(a, z, block_AZ, _):
        return a, block_AZ[a * Z + z], 0, 0

    return pl.pallas_call(
        functools.partial(_forward_kernel, soft_cap=soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(A, Z),
            in_specs=[
                pl.BlockSpec((None, None, U, H), _tile),
                pl.BlockSpec((None, None, M, H), block),
                pl.BlockSpec((None, None, M, E), block),
            ],
            out_specs=pl.BlockSpec((None, None, U, E + LANES), _tile),
        ),
        out_shape=jax.ShapeDtypeStruct((A, Z, U, E + LANES), v_ASME.dtype),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_vmem_limit(U, M, H, E)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * A * Z * U * M * (H + E),
            transcendentals=A * Z * U * M,
            bytes_accessed=(A * Z * U * (H + E + LANES) + A * S * M * (H + E)) * itemsize,
        ),
        interpret=interpret,
        name=f"moba_tiles_forward_{U}x{M}",
    )(block_AZ.reshape(-1), used_A, q_AZUH, k_ASMH, v_ASME)


def backward(block_AZ, used_A, row_AZUX, k_ASMH, v_ASME, dk_ASMH, dv_ASME, *, soft_cap, interpret):
    """Gradients of every tile's queries, and of all blocks' keys and values added to what is given.

    Tiles of one block must be consecutive, and every block must have one.

    Args:
      row_AZUX: [A, Z, U, H + E + LANES]: the query; the gradient of its output; and, as `to_lanes`
        makes them, its largest score over everything it attended and the inner product of that
        gradient with the output. The gradient and the product are divided by the query's sum of
        exp2(score - top). Empty slots are 0.
      dk_ASMH, dv_ASME: float32; their memory is given to the results.

    Returns:
      dq_AZUH in the dtype of queries, without the scale; dk_ASMH without `key_gradient_factor`;
      dv_ASME.
    """
    A, Z, U, X = row_AZUX.shape
    S, M, E = v_ASME.shape[1:]
    H = k_ASMH.shape[3]
    itemsize = row_AZUX.dtype.itemsize

    def block(a, z, block_AZ, _):
        return a, block_AZ[a * Z + z], 0, 0

    keys = [pl.BlockSpec((None, None, M, H), block), pl.BlockSpec((None, None, M, E), block)]
    return pl.pallas_call(
        functools.partial(_backward_kernel, soft_cap=soft_cap),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(A, Z),
            in_specs=[pl.BlockSpec((None, None, U, X), _tile), *keys, *keys],
            out_specs=[pl.BlockSpec((None, None, U, H), _tile), *keys],
        ),
        out_shape=[
            jax.ShapeDtypeStruct((A, Z, U, H), row_AZUX.dtype),
            jax.ShapeDtypeStruct((A, S, M, H), jnp.float32),
            jax.ShapeDtypeStruct((A, S, M, E), jnp.float32),
        ],
        input_output_aliases={5: 1, 6: 2},
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary"), vmem_limit_bytes=_vmem_limit(U, M, H, E)
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * A * Z * U * M * (3 * H + 2 * E),
            transcendentals=A * Z * U * M,
            bytes_accessed=A * Z * U * (X + H) * itemsize + A * S * M * (H + E) * (8 + itemsize),
        ),
        interpret=interpret,
        name=f"moba_tiles_backward_{U}x{M}",
    )(block_AZ.reshape(-1), used_A, row_AZUX, k_ASMH, v_ASME, dk_ASMH, dv_ASME)
