"""Pallas TPU kernel that chooses every query's best blocks, streaming over blocks.

Scores of a tile of queries against a tile of blocks stay on chip, and the best few so far with
them. Blocks that no query of the tile may choose are neither fetched nor scored.

Axes: A key heads of all batch rows, R rows (query head and token), T tokens, S blocks, J choices,
H head width, U queries of a tile, C blocks of a tile.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas.moba import plan
from kernels_pallas.moba.tpu_tiles import NT, dot

_BLOCKS = 256
_NO_BLOCK = jnp.iinfo(jnp.int32).max


def _scores(c, q):
    """[C, U], as exact as float32 products with float32 sums."""
    # bfloat16 queries: three products with the three parts of float32 centroids are exact.
    *parts, last = plan.split(c, q.dtype)
    score = dot(last, q, NT)
    for part in reversed(parts):
        score += dot(part, q, NT)
    return score


def _kernel(most_ref, range_ref, q_ref, c_ref, out_ref, best_ref, *, heads, call):
    a, i, j = (pl.program_id(axis) for axis in (0, 2, 3))
    most = most_ref[lax.div(a, heads) * pl.num_programs(2) + i]
    C = c_ref.shape[0]

    @pl.when(j == 0)
    def _():
        best_ref[...] = jnp.full_like(best_ref, -jnp.inf)
        out_ref[...] = jnp.full_like(out_ref, -1)

    @pl.when(j * C < most)
    def _():
        limit = jnp.finfo(jnp.float32).max
        s = _scores(c_ref[...], q_ref[...])
        s = jnp.where(jnp.isnan(s), -limit, jnp.clip(s, -limit, limit))
        number = j * C + lax.broadcasted_iota(jnp.int32, s.shape, 0)
        first, end = range_ref[0:1], range_ref[1:2]
        allowed = (number >= first) & (number < end)
        if call.sinks or call.window:
            s = jnp.where(plan.forced(call, number, first, end), jnp.inf, s)
        s = jnp.where(allowed, s, -jnp.inf)
        for _ in range(call.choices):
            value = jnp.max(s, axis=0, keepdims=True)
            index = jnp.min(jnp.where(s == value, number, _NO_BLOCK), 0, keepdims=True)
            s = jnp.where(number == index, -jnp.inf, s)
            # Into the sorted list; of equal scores the earlier tile's, which is the lower number.
            for n in range(call.choices):
                held, held_index = best_ref[n : n + 1], out_ref[n : n + 1]
                better = value > held
                best_ref[n : n + 1] = jnp.where(better, value, held)
                out_ref[n : n + 1] = jnp.where(better, index, held_index)
                value = jnp.where(better, held, value)
                index = jnp.where(better, held_index, index)


def choose(call: plan.Call, first_BT, end_BT, q_AGTH, c_ASH, *, tile: int, interpret: bool):
    """Numbers of the best blocks of every query, best first; -1 where there are no more.

    Args:
      first_BT, end_BT: int32; a token may choose the blocks first <= s < end. A is B times the
        key heads.
      q_AGTH: queries, not multiplied by anything; T is a multiple of `tile`.
      c_ASH: centroids, float32.

    Returns:
      int32 [A, G, choices, T].
    """
    A, G, T, H = q_AGTH.shape
    S, choices = c_ASH.shape[1], call.choices
    B, I = first_BT.shape[0], T // tile
    heads = A // B
    C = min(_BLOCKS, -(-S // 8) * 8)
    c_ASH = jnp.pad(c_ASH, ((0, 0), (0, -S % C), (0, 0)))
    most_BI = jnp.max(end_BT.reshape(B, I, tile), axis=2)
    range_B2T = jnp.stack([first_BT, end_BT], axis=1)

    def blocks(a, g, i, j, most):
        last = lax.div(jnp.maximum(most[lax.div(a, heads) * I + i] - 1, 0), C)
        return a, jnp.minimum(j, last), 0

    return pl.pallas_call(
        functools.partial(_kernel, heads=heads, call=call),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(A, G, I, c_ASH.shape[1] // C),
            in_specs=[
                pl.BlockSpec((None, 2, tile), lambda a, g, i, j, _: (lax.div(a, heads), 0, i)),
                pl.BlockSpec((None, None, tile, H), lambda a, g, i, j, _: (a, g, i, 0)),
                pl.BlockSpec((None, C, H), blocks),
            ],
            out_specs=pl.BlockSpec((None, None, choices, tile), lambda a, g, i, j, _: (a, g, 0, i)),
            scratch_shapes=[pltpu.VMEM((choices, tile), jnp.float32)],
        ),
        out_shape=jax.ShapeDtypeStruct((A, G, choices, T), jnp.int32),
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "parallel", "parallel", "arbitrary")
        ),
        cost_estimate=pl.CostEstimate(
            flops=2 * A * G * T * S * H,
            transcendentals=0,
            bytes_accessed=A * G * (T * H * q_AGTH.dtype.itemsize + I * S * H * 4),
        ),
        interpret=interpret,
        name=f"moba_choose_{choices}_of_{S}",
    )(most_BI.reshape(-1), range_B2T, q_AGTH, c_ASH)
