"""Triton kernel that chooses every query's best blocks, in one pass over them.

Axes: see gpu.py; U queries of a tile, C blocks of a step, S blocks of a key head.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from kernels_pallas.moba import plan
from kernels_pallas.moba.gpu_attend import NT, dot
from kernels_pallas.moba.gpu_rows import Shape, launch, load, load_rows, sizes_of, store


def _choose_kernel(first_ref, end_ref, q_ref, c_refs, out_ref, *, U, C, S, call, shape):
    """The best few so far are in no order; the worst of them makes way for a better block."""
    x = pl.program_id(0)
    b, n = lax.div(x, shape.N), lax.rem(x, shape.N)
    t = pl.program_id(1) * U + jnp.arange(U, dtype=jnp.int32)
    inside = t < shape.T
    q = load_rows(q_ref, (b * shape.T + t) * shape.N + n, inside)
    first, end = (load(ref, shape.low_row(b) + t, inside, 0) for ref in (first_ref, end_ref))
    base = (b * shape.K + lax.div(n, shape.N // shape.K)) * S
    places = pl.next_power_of_2(call.choices)
    place = jnp.arange(places, dtype=jnp.int32)[None]
    nothing = jnp.iinfo(jnp.int32).max

    def worst_of(best, index):
        """The lowest score held; of equal ones that with the highest number."""
        value = jnp.min(best, axis=1)
        number = jnp.max(jnp.where(best == value[:, None], index, -1), axis=1)
        return value, number

    def chunk(i, held):
        number = i * C + jnp.arange(C, dtype=jnp.int32)
        there = number < S
        score = jnp.zeros((U, C), jnp.float32)
        for c_ref in reversed(c_refs):
            score += dot(q, load_rows(c_ref, base + number, there), NT)
        limit = float(jnp.finfo(jnp.float32).max)
        score = jnp.where(score != score, -limit, jnp.clip(score, -limit, limit))
        allowed = (number[None] >= first[:, None]) & (number[None] < end[:, None])
        if call.sinks or call.window:
            must = plan.forced(call, number[None], first[:, None], end[:, None])
            score = jnp.where(must, jnp.inf, score)
        score = jnp.where(allowed, score, -jnp.inf)

        def better(state):
            score, _, _, worst, _ = state
            return jnp.max((jnp.max(score, axis=1) > worst).astype(jnp.int32)) > 0

        def insert(state):
            score, best, index, worst, worst_number = state
            value = jnp.max(score, axis=1)
            its = jnp.min(jnp.where(score == value[:, None], number[None], nothing), axis=1)
            score = jnp.where(number[None] == its[:, None], -jnp.inf, score)
            there = (index == worst_number[:, None]) & (value > worst)[:, None]
            best = jnp.where(there, value[:, None], best)
            index = jnp.where(there, its[:, None], index)
            return score, best, index, *worst_of(best, index)

        return lax.while_loop(better, insert, (score, *held))[1:]

    # Empty places have numbers of their own, so that one makes way at a time; places that are no
    # choices hold what no score is better than.
    best = jnp.full((U, places), jnp.where(place < call.choices, -jnp.inf, jnp.inf), jnp.float32)
    index = jnp.zeros((U, places), jnp.int32) + (S + place)
    begin = jnp.min(jnp.where(end > first, first, S))
    steps_end = lax.div(jnp.max(end) + (C - 1), C)
    held = (best, index, *worst_of(best, index))
    best, index, *_ = lax.fori_loop(lax.div(begin, C), steps_end, chunk, held)
    best = jnp.where(place < call.choices, best, -jnp.inf)

    def put(j, best):
        value = jnp.max(best, axis=1)
        number = jnp.min(jnp.where(best == value[:, None], index, nothing), axis=1)
        row = (x * call.choices + j) * shape.T + t
        store(out_ref, row, jnp.where(value == -jnp.inf, -1, number), inside)
        return jnp.where(index == number[:, None], -jnp.inf, best)

    lax.fori_loop(0, call.choices, put, best)


def choose(call: plan.Call, first_T, end_T, q_RH, parts, S: int, *, shape: Shape, interpret):
    """Numbers of the best blocks of every query, best first; -1 where there are no more.

    Args:
      first_T, end_T: a token may choose the blocks first <= s < end, of one row of the batch or of
        all.
      parts: arrays whose sum are the centroids, rows of S a key head, in the dtype of queries.

    Returns:
      int32 [B * N * choices * T].
    """
    sizes = sizes_of("choose", q_RH.shape[1], q_RH.dtype)
    return launch(
        functools.partial(_choose_kernel, U=sizes.rows, C=sizes.keys, S=S, call=call, shape=shape),
        f"moba_choose_{call.choices}_of_{S}",
        (shape.B * shape.N, pl.cdiv(shape.T, sizes.rows)),
        [jax.ShapeDtypeStruct((shape.B * shape.N * call.choices * shape.T,), jnp.int32)],
        sizes,
        interpret,
        (first_T, end_T, q_RH, parts),
    )[0]
