"""Pallas TPU kernels that move the chosen rows alone, each by a DMA of its own.

x stays in HBM in the layout that XLA gives it, so nothing is copied to call these kernels. A DMA
moves 32-bit rows: a row of float32, or of bfloat16 the pair of rows (2 i, 2 i + 1) that share
their 32-bit words. `combine` therefore writes a pair once, even where both rows are chosen.

Slots go by chunks. Rows of the next chunk are fetched while one is computed, and `combine` writes
the one before in the meantime.

Axes: B batch, T tokens, C slots, D width, Z chunks of all batch rows, S slots of a chunk.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

# Bytes of a chunk's rows in float32; several such buffers are in VMEM at once.
_CHUNK_BYTES = 1 << 21
_MAX_SLOTS = 128
# Rows computed at a time: whole tiles of bfloat16.
_GROUP = 16
# Slots that a loop starts DMAs for in one turn.
_UNROLL = 8
# Rows of the table `lanes`: a slot's gate, whether its row is the upper of a pair, and whether the
# slot before holds the lower.
_LANES = 128
_GATE, _UPPER, _BOTH = range(3)


def _chunk_slots(C: int, D: int) -> int:
    S = max(_GROUP, min(_MAX_SLOTS, _CHUNK_BYTES // (4 * D) // _GROUP * _GROUP))
    return min(S, -(-C // _GROUP) * _GROUP)


def _rows_of_a_word(dtype) -> int:
    """Rows that share 32-bit words."""
    return 4 // jnp.dtype(dtype).itemsize


def _chunks(x_BC, S: int):
    """[Z, S], zeros behind the last slot."""
    x_BC = jnp.pad(x_BC, ((0, 0), (0, -x_BC.shape[1] % S)))
    return x_BC.reshape(-1, S)


def _tables(index_BC, filled_BC, gate_BC, S: int, dtype):
    """What the kernels know of each chunk.

    Returns:
      filled_Z: int32, filled slots.
      written_Z: int32, rows, or pairs of rows, that `combine` writes.
      row_ZS: int32, the 32-bit row to fetch, complemented (~) where `combine` leaves the writing to
        the next slot.
      lanes: float32 [Z, 8, 128], see above.
    """
    words = _rows_of_a_word(dtype)
    row_BC = index_BC // words
    again_BC = jnp.zeros_like(filled_BC)
    if words > 1:
        same = (row_BC[:, 1:] == row_BC[:, :-1]) & filled_BC[:, 1:]
        again_BC = again_BC.at[:, 1:].set(same)
    left_BC = jnp.pad(again_BC[:, 1:], ((0, 0), (0, 1)))
    filled_ZS, left_ZS = _chunks(filled_BC, S), _chunks(left_BC, S)
    rows = jnp.stack(
        [_chunks(x_BC.astype(jnp.float32), S) for x_BC in (gate_BC, index_BC % words, again_BC)],
        axis=1,
    )
    return (
        jnp.sum(filled_ZS, axis=1, dtype=jnp.int32),
        jnp.sum(filled_ZS & ~left_ZS, axis=1, dtype=jnp.int32),
        _chunks(jnp.where(left_BC, ~row_BC, row_BC), S),
        jnp.pad(rows, ((0, 0), (0, 5), (0, _LANES - S))),
    )


def _words(x_ref):
    """x in HBM, in rows of 32-bit words."""
    return x_ref if x_ref.dtype.itemsize == 4 else x_ref.bitcast(jnp.uint32)


def _row_index(row):
    return jnp.where(row < 0, ~row, row)


def _each(start, stop, body) -> None:
    """body(c) of every slot; unrolled, or a loop's own overhead would be most of the work."""

    def some(i, _):
        for j in range(_UNROLL):
            body(start + i * _UNROLL + j)

    whole = lax.div(stop - start, _UNROLL)
    lax.fori_loop(0, whole, some, None)
    lax.fori_loop(start + whole * _UNROLL, stop, lambda c, _: body(c), None)


def _fetch(x_ref, row_ref, rows_ref, sem, batch, count):
    """Starts fetching the rows of a chunk."""

    def body(c):
        row = _row_index(row_ref[0, 0, c])
        pltpu.make_async_copy(
            _words(x_ref).at[batch, pl.ds(row, 1)], rows_ref.at[pl.ds(c, 1)], sem
        ).start()

    _each(0, count, body)


def _wait(rows_ref, sem, count):
    """Waits for so many rows, whichever come first, in either direction: all are as large."""
    rows = 1
    while rows <= rows_ref.shape[0]:
        some = rows_ref.at[pl.ds(0, rows)]
        pl.when((count & rows) != 0)(pltpu.make_async_copy(some, some, sem).wait)
        rows *= 2


def _float(words):
    return lax.bitcast_convert_type(words, jnp.float32)


def _halves(words):
    """The two rows that a row of words holds, in float32: the first in the low bits."""
    return _float(words << 16), _float(words & jnp.uint32(0xFFFF0000))


def _rounded(x):
    """Float32 rounded to bfloat16, to nearest even, as the upper bits of a word."""
    bits = lax.bitcast_convert_type(x, jnp.uint32)
    nearest = bits + 0x7FFF + ((bits >> 16) & 1)
    return jnp.where(x == x, nearest, bits | 0x400000) & jnp.uint32(0xFFFF0000)


def _gather_kernel(
    filled_ref, row_ref, next_ref, lanes_ref, *refs, batch_chunks: int, eps: float | None
):
    *scale_ref, x_ref, out_ref, rows_ref, column_ref, sem = refs
    k, last = pl.program_id(0), pl.num_programs(0) - 1
    S = out_ref.shape[1]

    def fetch(chunk, table_ref):
        slot = lax.rem(chunk, 2)
        batch = lax.div(chunk, batch_chunks)
        _fetch(x_ref, table_ref, rows_ref.at[slot], sem.at[slot], batch, filled_ref[chunk])

    pl.when(k == 0)(lambda: fetch(k, row_ref))
    pl.when(k < last)(lambda: fetch(k + 1, next_ref))
    slot, count = lax.rem(k, 2), filled_ref[k]
    _wait(rows_ref.at[slot], sem.at[slot], count)
    column_ref[...] = lanes_ref[0].T

    def group(i, _):
        at = pl.ds(pl.multiple_of(i * _GROUP, _GROUP), _GROUP)
        x = rows_ref[slot, at]
        if x.dtype == jnp.uint32:
            low, high = _halves(x)
            x = jnp.where(column_ref[at, _UPPER : _UPPER + 1] > 0, high, low)
        filled = i * _GROUP + lax.broadcasted_iota(jnp.int32, (_GROUP, 1), 0) < count
        x = jnp.where(filled, x, 0.0)
        if eps is not None:
            square = jnp.mean(x * x, axis=1, keepdims=True)
            x = x * (lax.rsqrt(square + eps) * scale_ref[0][...])
        out_ref[0, at] = x.astype(out_ref.dtype)

    lax.fori_loop(0, S // _GROUP, group, None)


def _scatter_kernel(
    filled_ref, written_ref, row_ref, next_ref, lanes_ref, delta_ref, _, x_ref, rows_ref,
    column_ref, *refs, batch_chunks: int,
):  # fmt: skip
    *before_ref, fetch_sem, write_sem = refs
    k, last = pl.program_id(0), pl.num_programs(0) - 1
    S = delta_ref.shape[1]

    def wait_written(chunk):
        slot = lax.rem(chunk, 3)
        _wait(rows_ref.at[slot], write_sem.at[slot], written_ref[chunk])

    def fetch(chunk, table_ref):
        slot = lax.rem(chunk, 3)
        batch = lax.div(chunk, batch_chunks)
        _fetch(x_ref, table_ref, rows_ref.at[slot], fetch_sem.at[slot], batch, filled_ref[chunk])

    pl.when(k >= 2)(lambda: wait_written(k - 2))
    pl.when(k == 0)(lambda: fetch(k, row_ref))
    pl.when(k < last)(lambda: fetch(k + 1, next_ref))
    slot, count = lax.rem(k, 3), filled_ref[k]
    _wait(rows_ref.at[slot], fetch_sem.at[slot], count)
    batch = lax.div(k, batch_chunks)
    column_ref[...] = lanes_ref[0].T

    def group(i, _):
        start = pl.multiple_of(i * _GROUP, _GROUP)
        at = pl.ds(start, _GROUP)

        def column(name):
            return column_ref[at, name : name + 1]

        d = column(_GATE) * delta_ref[0, at].astype(jnp.float32)
        x = rows_ref[slot, at]
        if not before_ref:
            rows_ref[slot, at] = x + d
        else:
            # The slot before, maybe of the chunk before, may have left its writing to this one.
            d = _float(_rounded(d))
            first = lax.broadcasted_iota(jnp.int32, (_GROUP, 1), 0) == 0
            before = jnp.where(first, before_ref[0][...], pltpu.roll(d, 1, 0))
            before_ref[0][...] = d[_GROUP - 1 :]
            upper, both = column(_UPPER) > 0, column(_BOTH) > 0
            low, high = _halves(x)
            low = jnp.where(upper, before, d) + low
            low = jnp.where(upper & ~both, x & 0xFFFF, _rounded(low) >> 16)
            high = jnp.where(upper, _rounded(d + high), x & jnp.uint32(0xFFFF0000))
            rows_ref[slot, at] = low | high

        def write(c):
            row = row_ref[0, 0, c]

            @pl.when(row >= 0)
            def _():
                pltpu.make_async_copy(
                    rows_ref.at[slot, pl.ds(c, 1)],
                    _words(x_ref).at[batch, pl.ds(row, 1)],
                    write_sem.at[slot],
                ).start()

        _each(start, jnp.minimum(start + _GROUP, count), write)

    lax.fori_loop(0, S // _GROUP, group, None)

    @pl.when(k == last)
    def _():
        pl.when(k >= 1)(lambda: wait_written(k - 1))
        wait_written(k)


def _specs(S: int, D: int, last: int, batch_chunks: int):
    """Block specs of a chunk's rows in SMEM, the next chunk's, its lanes, and its slots of D."""
    table = functools.partial(pl.BlockSpec, (1, 1, S), memory_space=pltpu.SMEM)
    return (
        table(lambda k, *_: (k, 0, 0)),
        table(lambda k, *_: (jnp.minimum(k + 1, last), 0, 0)),
        pl.BlockSpec((1, 8, _LANES), lambda k, *_: (k, 0, 0)),
        pl.BlockSpec(
            (1, S, D), lambda k, *_: (lax.div(k, batch_chunks), lax.rem(k, batch_chunks), 0)
        ),
    )


def _params(S: int, D: int):
    # Rows, deltas and what lies between them, all in float32.
    width = -(-D // _LANES) * _LANES
    return pltpu.CompilerParams(
        dimension_semantics=("arbitrary",),
        vmem_limit_bytes=(8 << 20) + 12 * 4 * S * width,
        # Two of them for each row, and every position is within x by its making.
        disable_bounds_checks=True,
    )


def _row_dtype(dtype):
    return jnp.float32 if _rows_of_a_word(dtype) == 1 else jnp.uint32


def _as_operand(x_BTD, interpret):
    """bfloat16 rows in whole pairs: a copy if there is an odd number.

    The interpreters cannot see an array in HBM as words, so they get words.
    """
    words = _rows_of_a_word(x_BTD.dtype)
    x_BTD = jnp.pad(x_BTD, ((0, 0), (0, -x_BTD.shape[1] % words), (0, 0)))
    if words == 1 or not interpret:
        return x_BTD
    B, T, D = x_BTD.shape
    pairs = jnp.swapaxes(x_BTD.reshape(B, T // words, words, D), 2, 3)
    return lax.bitcast_convert_type(pairs, jnp.uint32)


def _from_operand(x, T: int, dtype):
    """The transpose of `_as_operand`, [B, T, D]."""
    if x.dtype != dtype:
        x = jnp.swapaxes(lax.bitcast_convert_type(x, dtype), 2, 3)
        x = x.reshape(x.shape[0], -1, x.shape[3])
    return x[:, :T]


def dispatch(eps: float, x_BTD, index_BC, filled_BC, norm_scale_XD, *, interpret):
    """The chosen rows [B, C, D], normalised if there is a scale; unfilled slots are zeros.

    norm_scale_XD: of each batch row, or one of all.
    """
    (B, _, D), C = x_BTD.shape, index_BC.shape[1]
    S = _chunk_slots(C, D)
    filled_Z, _, row_ZS, lanes = _tables(index_BC, filled_BC, filled_BC, S, x_BTD.dtype)
    row_ZS = _row_index(row_ZS)[:, None]
    Z = filled_Z.shape[0]
    table, next_table, lanes_spec, slots = _specs(S, D, Z - 1, Z // B)
    scale = []
    if norm_scale_XD is not None:
        scale = [norm_scale_XD.astype(x_BTD.dtype).astype(jnp.float32)[:, None]]

    def scale_row(k, *_):
        return lax.rem(lax.div(k, Z // B), norm_scale_XD.shape[0]), 0, 0

    row_bytes = D * x_BTD.dtype.itemsize
    return pl.pallas_call(
        functools.partial(_gather_kernel, batch_chunks=Z // B, eps=eps if scale else None),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(Z,),
            in_specs=[
                table,
                next_table,
                lanes_spec,
                *(pl.BlockSpec((None, 1, D), scale_row) for _ in scale),
                pl.BlockSpec(memory_space=pltpu.HBM),
            ],
            out_specs=slots,
            scratch_shapes=[
                pltpu.VMEM((2, S, D), _row_dtype(x_BTD.dtype)),
                pltpu.VMEM((_LANES, 8), jnp.float32),
                pltpu.SemaphoreType.DMA((2,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct((B, C, D), x_BTD.dtype),
        cost_estimate=pl.CostEstimate(
            flops=4 * B * C * D,
            transcendentals=0,
            bytes_accessed=B * C * row_bytes * (1 + _rows_of_a_word(x_BTD.dtype)),
        ),
        compiler_params=_params(S, D),
        interpret=interpret,
        name="mod_dispatch",
    )(filled_Z, row_ZS, row_ZS, lanes, *scale, _as_operand(x_BTD, interpret))


def combine(x_BTD, delta_BCD, gate_BC, index_BC, filled_BC, *, interpret):
    """x with gate * delta added to the chosen rows, in place."""
    (B, T, D), C = x_BTD.shape, index_BC.shape[1]
    S = _chunk_slots(C, D)
    filled_Z, written_Z, row_ZS, lanes = _tables(index_BC, filled_BC, gate_BC, S, x_BTD.dtype)
    row_ZS, Z = row_ZS[:, None], filled_Z.shape[0]
    table, next_table, lanes_spec, slots = _specs(S, D, Z - 1, Z // B)
    x = _as_operand(x_BTD, interpret)
    words = _rows_of_a_word(x_BTD.dtype)
    out = pl.pallas_call(
        functools.partial(_scatter_kernel, batch_chunks=Z // B),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(Z,),
            in_specs=[table, next_table, lanes_spec, slots, pl.BlockSpec(memory_space=pltpu.HBM)],
            out_specs=pl.BlockSpec(memory_space=pltpu.HBM),
            scratch_shapes=[
                pltpu.VMEM((3, S, D), _row_dtype(x_BTD.dtype)),
                pltpu.VMEM((_LANES, 8), jnp.float32),
                *([pltpu.VMEM((1, D), jnp.float32)] if words > 1 else []),
                pltpu.SemaphoreType.DMA((3,)),
                pltpu.SemaphoreType.DMA((3,)),
            ],
        ),
        out_shape=jax.ShapeDtypeStruct(x.shape, x.dtype),
        input_output_aliases={6: 0},
        cost_estimate=pl.CostEstimate(
            flops=2 * B * C * D,
            transcendentals=0,
            bytes_accessed=B
            * C
            * D
            * (2 * words * x_BTD.dtype.itemsize + delta_BCD.dtype.itemsize),
        ),
        compiler_params=_params(S, D),
        interpret=interpret,
        name="mod_combine",
    )(filled_Z, written_Z, row_ZS, row_ZS, lanes, delta_BCD, x)
    return _from_operand(out, T, x_BTD.dtype)
