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
import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

from kernels_pallas.moba import plan

# Pairs of a query and a block whose partial results are kept at once.
_CHUNK_PAIRS = 1 << 23
_LOWEST = float(jnp.finfo(jnp.float32).min)
LOG2_E = math.log2(math.e)
NT = (((1,), (1,)), ((), ()))
NN = (((1,), (0,)), ((), ()))


class Sizes(NamedTuple):
    """Of a kernel: rows of queries and keys of a product, warps, and loads in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def _sizes(kernel: str, width: int, dtype) -> Sizes:
    """What fits the registers, and the 99 KiB of shared memory of the smallest GPU."""
    wide = width > 128
    if jnp.dtype(dtype).itemsize == 4:
        return Sizes(16, 16, 8, 1) if wide else Sizes(32, 32, 8, 1)
    if kernel == "dq":
        return Sizes(64, 32, 8, 1) if wide else Sizes(64, 64, 4, 2)
    if kernel == "dkv":
        return Sizes(32, 32, 8, 1) if wide else Sizes(64, 64, 8, 2)
    return Sizes(64, 32, 8, 2) if wide else Sizes(128, 64, 8, 2)


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


# --- Parts of kernels -----------------------------------------------------------------------------


def _padded(width: int) -> int:
    return max(16, pl.next_power_of_2(width))


def _row_access(ref, row, mask):
    """References to rows over the power of two next to their width, and the mask of that."""
    width = ref.shape[1]
    column = jnp.arange(_padded(width), dtype=jnp.int32)[None]
    mask = None if mask is None else mask[:, None]
    if _padded(width) != width:
        inside = column < width
        mask = inside if mask is None else mask & inside
    return ref.at[row[:, None], column], mask


def _load_rows(ref, row, mask=None):
    """[rows, padded width]; 0 where there is none."""
    at, mask = _row_access(ref, row, mask)
    return plgpu.load(at, mask=mask, other=None if mask is None else 0.0)


def _store_rows(ref, row, x, mask=None):
    at, mask = _row_access(ref, row, mask)
    plgpu.store(at, x.astype(ref.dtype), mask=mask)


def _load(ref, index, mask, other):
    return plgpu.load(ref.at[index], mask=mask, other=other)


def _dot(x, y, dimensions):
    """A product with float32 sums; float32 operands are not rounded to TensorFloat-32."""
    precision = lax.Precision.HIGHEST if x.dtype == jnp.float32 else lax.Precision.DEFAULT
    return lax.dot_general(
        x, y, dimensions, precision=precision, preferred_element_type=jnp.float32
    )


@dataclasses.dataclass(frozen=True)
class _Scores:
    """From products of queries and keys to powers of their scores.

    A score is kept as the product itself, or its tanh under a soft cap, and multiplied by `unit`
    only after the largest is subtracted: large scores lose nothing by it.
    """

    scale: float
    soft_cap: float | None

    @property
    def factor(self) -> float:
        """The size of the scale; its sign, and 0, are in the queries."""
        return abs(self.scale) or 1.0

    @property
    def unit(self) -> float:
        """What makes a logarithm to base 2 of a score."""
        return LOG2_E * (self.factor if self.soft_cap is None else self.soft_cap)

    def queries(self, q):
        """So far from overflow that no product overflows with bounded keys."""
        q = plan.bounded(q)
        if self.scale > 0:
            return q
        return -q if self.scale else jnp.zeros_like(q)

    def __call__(self, product):
        """Scores, and their slope (None: 1)."""
        if self.soft_cap is None:
            return product, None
        tanh = jnp.tanh(product * (self.factor / self.soft_cap))
        return tanh, 1 - tanh * tanh

    def power(self, s, top):
        """exp of a score less the largest."""
        return jnp.exp2((s - top) * self.unit)


class _Part(NamedTuple):
    """Attention of some rows to some of their keys.

    Attributes:
      o: sum of powers of scores times value, [rows, E].
      top: largest score, [rows]; the lowest finite number where there are no keys.
      total: sum of powers of scores, [rows].
    """

    o: jax.Array
    top: jax.Array
    total: jax.Array

    @classmethod
    def empty(cls, rows: int, width: int):
        zeros = jnp.zeros((rows,), jnp.float32)
        return cls(jnp.zeros((rows, width), jnp.float32), zeros + _LOWEST, zeros)

    def attend(self, s, v, scores: _Scores):
        """With more keys: their scores [rows, keys], -inf where masked, and values."""
        top = jnp.maximum(self.top, jnp.max(s, axis=1))
        p = scores.power(s, top[:, None])
        fade = scores.power(self.top, top)
        o = self.o * fade[:, None] + _dot(p.astype(v.dtype), v, NN)
        return _Part(o, top, self.total * fade + jnp.sum(p, axis=1))

    def join(self, o, its_top, its_total, scores: _Scores):
        """With a normalised output over other keys."""
        top = jnp.maximum(self.top, its_top)
        fade, weight = scores.power(self.top, top), its_total * scores.power(its_top, top)
        return _Part(
            self.o * fade[:, None] + o.astype(jnp.float32) * weight[:, None],
            top,
            self.total * fade + weight,
        )

    def normalised(self):
        """The output and 1 / total, both 0 or finite where there are no keys."""
        inverse = 1 / jnp.maximum(self.total, jnp.finfo(jnp.float32).tiny)
        return self.o * inverse[:, None], inverse


class Rows(NamedTuple):
    """Rows of queries in the backward pass, with statistics over everything they attended.

    Attributes:
      q, do: queries, and gradients of their outputs.
      top: largest score.
      inverse: 1 / sum of powers of scores.
      delta: inner product of the output and its gradient.
    """

    q: jax.Array
    do: jax.Array
    top: jax.Array
    inverse: jax.Array
    delta: jax.Array

    def load(self, row, mask, scores: _Scores):
        """Some of the rows; where the mask is false, rows that give no gradient to any other."""
        stats = (_load(ref, row, mask, 0.0) for ref in (self.top, self.inverse, self.delta))
        q, do = (_load_rows(ref, row, mask) for ref in (self.q, self.do))
        return Rows(scores.queries(q), do, *stats)


def _query_gradient(rows: Rows, k, v, mask, scores: _Scores):
    """Of the rows from these keys, over `scale`. mask: [rows, keys] or None."""
    s, slope = scores(_dot(rows.q, k, NT))
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    p = scores.power(s, rows.top[:, None]) * rows.inverse[:, None]
    ds = p * (_dot(rows.do, v, NT) - rows.delta[:, None])
    if slope is not None:
        ds = ds * slope
    return _dot(ds.astype(k.dtype), k, NN)


def _key_gradients(rows: Rows, k, v, mask, scores: _Scores):
    """Of keys, over `factor`, and of values, from these rows. mask: [keys, rows] or None."""
    s, slope = scores(_dot(k, rows.q, NT))
    if mask is not None:
        s = jnp.where(mask, s, -jnp.inf)
    p = scores.power(s, rows.top[None]) * rows.inverse[None]
    ds = p * (_dot(v, rows.do, NT) - rows.delta[None])
    if slope is not None:
        ds = ds * slope
    return _dot(ds.astype(k.dtype), rows.q, NN), _dot(p.astype(v.dtype), rows.do, NN)


def _call(kernel, name, grid, out_shape, sizes: Sizes, interpret, args, put_in=()):
    """Runs a kernel that sees whole arrays; it writes into `put_in`, which are returned so."""
    given = len(jax.tree.leaves(args))
    return pl.pallas_call(
        kernel,
        grid=grid,
        in_specs=jax.tree.map(lambda _: pl.BlockSpec(memory_space=pl.ANY), (*args, *put_in)),
        out_specs=[pl.BlockSpec(memory_space=pl.ANY) for _ in out_shape],
        out_shape=out_shape,
        input_output_aliases={given + i: i for i in range(len(put_in))},
        compiler_params=plgpu.CompilerParams(num_warps=sizes.warps, num_stages=sizes.stages),
        interpret=interpret,
        name=name,
    )(*args, *put_in)


def _shapes_of(*arrays):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


# --- Tiles of queries that chose the same block ---------------------------------------------------


class Tables(NamedTuple):
    """Pairs of a group in tiles; a pair's partial result is in its slot.

    Attributes:
      row_V: the row of queries in each slot, -1 where it is empty; the full slots of a tile are
        its first.
      key_Z: the row of the first key of each tile's block.
      key_S: the row of the first key of each block.
      edge_S: the first tile of each block, and one beyond the last.
      slot_P: the slot of each pair, -1 where there is no pair; p = ((j * B + b) * T + t) * n + h
        with n heads in the group.
    """

    row_V: jax.Array
    key_Z: jax.Array
    key_S: jax.Array
    edge_S: jax.Array
    slot_P: jax.Array


def make_tables(call, layout: Layout, chosen_BNJT, blocks, length, K, start) -> Tables:
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
    tiles = plan.dispatch(block_P[None, None], rows, num_blocks, layout.tiles, layout.tile)
    block_Z, row_ZU, slot_P, used = (x[0, 0] for x in tiles)

    start_BS = jnp.broadcast_to(blocks.start_BS, (B, S))
    head_k = start // G + jnp.arange(key_heads, dtype=jnp.int32)[:, None]
    key_S = ((b_B11 * length + start_BS[:, None]) * K + head_k).reshape(-1)
    row_V = row_ZU.reshape(-1)
    row_V = jnp.where(row_V < rows, row_V // heads * N + start + row_V % heads, -1)
    edge_S = jnp.searchsorted(block_Z, jnp.arange(num_blocks + 1, dtype=jnp.int32))
    edge_S = jnp.minimum(edge_S.astype(jnp.int32), used)
    return Tables(row_V, key_S[block_Z], key_S, edge_S, jnp.where(block_P < 0, -1, slot_P))


def _step_keys(sizes: Sizes, M: int) -> int:
    return min(sizes.keys, max(16, pl.next_power_of_2(M)))


def _block_keys(first, i, L, M, K):
    """Rows of some keys of a block, and which of them it has (None: all)."""
    m = i * L + jnp.arange(L, dtype=jnp.int32)
    return first + m * K, None if M % L == 0 else m < M


def _tiles_forward_kernel(
    key_ref, row_ref, q_ref, k_ref, v_ref, o_ref, top_ref, total_ref, *, U, L, M, K, scores
):
    z = pl.program_id(0)

    @pl.when(row_ref[z * U] >= 0)
    def _():
        slot = z * U + jnp.arange(U, dtype=jnp.int32)
        row = row_ref[pl.ds(z * U, U)]
        q = scores.queries(_load_rows(q_ref, row, row >= 0))
        first = key_ref[z]

        def step(i, part):
            key, inside = _block_keys(first, i, L, M, K)
            k, v = (_load_rows(ref, key, inside) for ref in (k_ref, v_ref))
            s, _ = scores(_dot(q, k, NT))
            if inside is not None:
                s = jnp.where(inside[None], s, -jnp.inf)
            return part.attend(s, v, scores)

        part = lax.fori_loop(0, pl.cdiv(M, L), step, _Part.empty(U, _padded(v_ref.shape[1])))
        _store_rows(o_ref, slot, part.normalised()[0])
        top_ref[pl.ds(z * U, U)] = part.top
        total_ref[pl.ds(z * U, U)] = part.total


def tiles_forward(tables: Tables, q_RH, k_YH, v_YE, *, tile, M, K, scores, interpret):
    """Attention of every pair: o_VE, the largest score and the sum of powers of scores.

    Tiles without a pair hold rubbish.
    """
    E, V = v_YE.shape[1], tables.row_V.shape[0]
    sizes = _sizes("forward", max(q_RH.shape[1], E), q_RH.dtype)
    L = _step_keys(sizes, M)
    stat = jax.ShapeDtypeStruct((V,), jnp.float32)
    return _call(
        functools.partial(_tiles_forward_kernel, U=tile, L=L, M=M, K=K, scores=scores),
        f"moba_tiles_forward_{tile}x{M}",
        (V // tile,),
        [jax.ShapeDtypeStruct((V, E), v_YE.dtype), stat, stat],
        sizes,
        interpret,
        (tables.key_Z, tables.row_V, q_RH, k_YH, v_YE),
    )


def _tiles_dq_kernel(key_ref, row_ref, k_ref, v_ref, row_refs, dq_ref, *, U, L, M, K, scores):
    z = pl.program_id(0)

    @pl.when(row_ref[z * U] >= 0)
    def _():
        slot = z * U + jnp.arange(U, dtype=jnp.int32)
        row = row_ref[pl.ds(z * U, U)]
        rows = row_refs.load(row, row >= 0, scores)
        first = key_ref[z]

        def step(i, dq):
            key, inside = _block_keys(first, i, L, M, K)
            k, v = (_load_rows(ref, key, inside) for ref in (k_ref, v_ref))
            mask = None if inside is None else inside[None]
            return dq + _query_gradient(rows, k, v, mask, scores)

        dq = jnp.zeros((U, _padded(dq_ref.shape[1])), jnp.float32)
        dq = lax.fori_loop(0, pl.cdiv(M, L), step, dq)
        _store_rows(dq_ref, slot, dq * scores.scale)


def tiles_dq(tables: Tables, k_YH, v_YE, rows: Rows, *, tile, M, K, scores, interpret):
    """Gradient of every pair's query, dq_VH. Tiles without a pair hold rubbish."""
    H, V = k_YH.shape[1], tables.row_V.shape[0]
    sizes = _sizes("dq", max(H, v_YE.shape[1]), k_YH.dtype)
    L = _step_keys(sizes, M)
    return _call(
        functools.partial(_tiles_dq_kernel, U=tile, L=L, M=M, K=K, scores=scores),
        f"moba_tiles_dq_{tile}x{M}",
        (V // tile,),
        [jax.ShapeDtypeStruct((V, H), k_YH.dtype)],
        sizes,
        interpret,
        (tables.key_Z, tables.row_V, k_YH, v_YE, rows),
    )[0]


def _tiles_dkv_kernel(
    key_ref, edge_ref, row_ref, k_ref, v_ref, row_refs, dk_in, dv_in, dk_ref, dv_ref,
    *, U, L, M, K, scores,
):  # fmt: skip
    s, i = pl.program_id(0), pl.program_id(1)
    first, end = edge_ref[s], edge_ref[s + 1]

    # A block that nobody chose has one tile, which is empty.
    @pl.when(row_ref[first * U] >= 0)
    def _():
        key, inside = _block_keys(key_ref[s], i, L, M, K)
        k, v = (_load_rows(ref, key, inside) for ref in (k_ref, v_ref))

        def step(z, sums):
            row = row_ref[pl.ds(z * U, U)]
            dk, dv = _key_gradients(row_refs.load(row, row >= 0, scores), k, v, None, scores)
            return sums[0] + dk, sums[1] + dv

        dk, dv = (jnp.zeros((L, x.shape[1]), jnp.float32) for x in (k, v))
        dk, dv = lax.fori_loop(first, end, step, (dk, dv))
        _store_rows(dk_ref, key, _load_rows(dk_in, key, inside) + dk * scores.factor, inside)
        _store_rows(dv_ref, key, _load_rows(dv_in, key, inside) + dv, inside)


def tiles_dkv(
    tables: Tables, k_YH, v_YE, rows: Rows, dk_YH, dv_YE, *, tile, M, K, scores, interpret
):
    """Adds to the gradients of keys and values, float32, whose memory is given to the results."""
    sizes = _sizes("dkv", max(k_YH.shape[1], v_YE.shape[1]), k_YH.dtype)
    L = _step_keys(sizes, M)
    return _call(
        functools.partial(_tiles_dkv_kernel, U=tile, L=L, M=M, K=K, scores=scores),
        f"moba_tiles_dkv_{tile}x{M}",
        (tables.key_S.shape[0], pl.cdiv(M, L)),
        _shapes_of(dk_YH, dv_YE),
        sizes,
        interpret,
        (tables.key_S, tables.edge_S, tables.row_V, k_YH, v_YE, rows),
        (dk_YH, dv_YE),
    )


# --- Intervals of keys that end with the query itself ---------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Shape:
    """Of the arrays that rows are rows of, and of a group of query heads.

    Attributes:
      length: tokens of keys; T are those of queries.
      heads: query heads of the group.
      choices: J.
      lows: rows of the batch whose intervals are told apart: B or 1.
    """

    B: int
    T: int
    length: int
    N: int
    K: int
    heads: int
    choices: int
    lows: int

    def low_row(self, b):
        return (b if self.lows > 1 else 0) * self.T

    def load_low(self, low_ref, b, t, inside):
        """Where each query's interval begins: behind it if there is none."""
        return _load(low_ref, self.low_row(b) + t, inside, self.length)


class _QueryTile(NamedTuple):
    """A tile of queries of one head, and the keys it reaches.

    Attributes:
      b, n, h: row of the batch, query head, and its number in the group.
      t, inside: queries of the row, and which of them there are.
      position: their tokens.
      row: rows of the queries.
      low: where each token's interval begins.
      first, steps: the first key that any of them reaches, and how many steps it takes from there.
    """

    b: jax.Array
    n: jax.Array
    h: jax.Array
    t: jax.Array
    inside: jax.Array
    position: jax.Array
    row: jax.Array
    low: jax.Array
    first: jax.Array
    steps: jax.Array

    @classmethod
    def of_program(cls, shape: _Shape, start_ref, low_ref, W: int, L: int):
        x, begin = pl.program_id(0), pl.program_id(1) * W
        b, h = lax.div(x, shape.heads), lax.rem(x, shape.heads)
        n, offset = start_ref[0] + h, start_ref[1]
        t = begin + jnp.arange(W, dtype=jnp.int32)
        inside = t < shape.T
        low = shape.load_low(low_ref, b, t, inside)
        first = low_ref[shape.low_row(b) + begin]
        reach = offset + jnp.minimum(begin + W, shape.T) - first
        steps = lax.div(jnp.maximum(reach, 0) + (L - 1), L)
        row = (b * shape.T + t) * shape.N + n
        return cls(b, n, h, t, inside, offset + t, row, low, first, steps)

    def keys(self, shape: _Shape, i, L: int):
        """Rows of the keys of a step, which of them there are, and the mask [queries, keys]."""
        t = self.first + i * L + jnp.arange(L, dtype=jnp.int32)
        row = (self.b * shape.length + t) * shape.K + lax.div(self.n, shape.N // shape.K)
        mask = (t[None] >= self.low[:, None]) & (t[None] <= self.position[:, None])
        return row, t < shape.length, mask

    def slots(self, shape: _Shape, slot_ref, j):
        """Slots of the queries' pairs with their choice j, and where there is one."""
        pair = ((j * shape.B + self.b) * shape.T + self.t) * shape.heads + self.h
        slot = _load(slot_ref, pair, self.inside, -1)
        return slot, slot >= 0


def _interval_forward_kernel(
    start_ref, low_ref, q_ref, k_ref, v_ref, pair_refs, o_in, top_in, inverse_in,
    o_ref, top_ref, inverse_ref, *, W, L, shape, scores,
):  # fmt: skip
    tile = _QueryTile.of_program(shape, start_ref, low_ref, W, L)
    q = scores.queries(_load_rows(q_ref, tile.row, tile.inside))

    def add(j, part):
        slot_ref, its_o_ref, its_top_ref, its_total_ref = pair_refs
        slot, valid = tile.slots(shape, slot_ref, j)
        return part.join(
            _load_rows(its_o_ref, slot, valid),
            _load(its_top_ref, slot, valid, _LOWEST),
            _load(its_total_ref, slot, valid, 0.0),
            scores,
        )

    def step(i, part):
        key, there, mask = tile.keys(shape, i, L)
        k, v = (_load_rows(ref, key, there) for ref in (k_ref, v_ref))
        s, _ = scores(_dot(q, k, NT))
        return part.attend(jnp.where(mask, s, -jnp.inf), v, scores)

    part = _Part.empty(W, _padded(v_ref.shape[1]))
    if shape.choices:
        part = lax.fori_loop(0, shape.choices, add, part)
    part = lax.fori_loop(0, tile.steps, step, part)
    o, inverse = part.normalised()
    _store_rows(o_ref, tile.row, o, tile.inside)
    stat = (tile.b * shape.N + tile.n) * shape.T + tile.t
    plgpu.store(top_ref.at[stat], part.top, mask=tile.inside)
    plgpu.store(inverse_ref.at[stat], inverse, mask=tile.inside)


def interval_forward(
    start_2, low_T, q_RH, k_YH, v_YE, pairs, out, *, shape: _Shape, scores, interpret
):
    """Attention of some query heads to their intervals and to the blocks that they chose.

    Args:
      start_2: the first query head, and the token of the first query, int32 [2].
      low_T: where each query's interval begins, of one row of the batch or of all; it does not
        fall from one token of a row to the next.
      pairs: slot_P and what `tiles_forward` returned, or nothing.
      out: o_RE, top [B * N * T] and inverse, whose memory is given to the results.

    Returns:
      `out` with the results of these heads.
    """
    sizes = _sizes("forward", max(q_RH.shape[1], v_YE.shape[1]), q_RH.dtype)
    W, L = sizes.rows, sizes.keys
    return _call(
        functools.partial(_interval_forward_kernel, W=W, L=L, shape=shape, scores=scores),
        f"moba_interval_forward_{W}x{L}",
        (shape.B * shape.heads, pl.cdiv(shape.T, W)),
        _shapes_of(*out),
        sizes,
        interpret,
        (start_2, low_T, q_RH, k_YH, v_YE, pairs),
        out,
    )


def _interval_dq_kernel(
    start_ref, low_ref, k_ref, v_ref, row_refs, pair_refs, dq_in, dq_ref, *, W, L, shape, scores
):
    tile = _QueryTile.of_program(shape, start_ref, low_ref, W, L)
    rows = row_refs.load(tile.row, tile.inside, scores)

    def step(i, dq):
        key, there, mask = tile.keys(shape, i, L)
        k, v = (_load_rows(ref, key, there) for ref in (k_ref, v_ref))
        return dq + _query_gradient(rows, k, v, mask, scores)

    def add(j, dq):
        slot_ref, its_dq_ref = pair_refs
        slot, valid = tile.slots(shape, slot_ref, j)
        return dq + _load_rows(its_dq_ref, slot, valid).astype(jnp.float32)

    dq = jnp.zeros((W, _padded(dq_ref.shape[1])), jnp.float32)
    dq = lax.fori_loop(0, tile.steps, step, dq) * scores.scale
    if shape.choices:
        dq = lax.fori_loop(0, shape.choices, add, dq)
    _store_rows(dq_ref, tile.row, dq, tile.inside)


def interval_dq(
    start_2, low_T, k_YH, v_YE, rows: Rows, pairs, dq_RH, *, shape: _Shape, scores, interpret
):
    """Gradient of some query heads, from their intervals and the blocks that they chose.

    Args: as for `interval_forward`; pairs: slot_P and what `tiles_dq` returned, or nothing; dq_RH:
      gives its memory to the result.

    Returns:
      dq_RH with the gradients of these heads.
    """
    sizes = _sizes("dq", max(k_YH.shape[1], v_YE.shape[1]), k_YH.dtype)
    W, L = sizes.rows, sizes.keys
    return _call(
        functools.partial(_interval_dq_kernel, W=W, L=L, shape=shape, scores=scores),
        f"moba_interval_dq_{W}x{L}",
        (shape.B * shape.heads, pl.cdiv(shape.T, W)),
        _shapes_of(dq_RH),
        sizes,
        interpret,
        (start_2, low_T, k_YH, v_YE, rows, pairs),
        (dq_RH,),
    )[0]


def _interval_dkv_kernel(
    offset_ref, end_ref, low_ref, k_ref, v_ref, row_refs, dk_ref, dv_ref, *, W, L, shape, scores
):
    x, i = pl.program_id(0), pl.program_id(1)
    b, head = lax.div(x, shape.K), lax.rem(x, shape.K)
    G = shape.N // shape.K
    key_t = i * L + jnp.arange(L, dtype=jnp.int32)
    key, there = (b * shape.length + key_t) * shape.K + head, key_t < shape.length
    k, v = (_load_rows(ref, key, there) for ref in (k_ref, v_ref))
    offset = offset_ref[0]
    begin = jnp.maximum(i * L - offset, 0)
    end = end_ref[(b if shape.lows > 1 else 0) * pl.cdiv(shape.length, L) + i]
    steps = lax.div(jnp.maximum(end - begin, 0) + (W - 1), W)

    def step(j, sums):
        t = begin + lax.div(j, G) * W + jnp.arange(W, dtype=jnp.int32)
        inside = t < shape.T
        low = shape.load_low(low_ref, b, t, inside)
        rows = row_refs.load((b * shape.T + t) * shape.N + head * G + lax.rem(j, G), inside, scores)
        mask = (key_t[:, None] >= low[None]) & (key_t[:, None] <= offset + t[None])
        dk, dv = _key_gradients(rows, k, v, mask, scores)
        return sums[0] + dk, sums[1] + dv

    dk, dv = (jnp.zeros((L, x.shape[1]), jnp.float32) for x in (k, v))
    dk, dv = lax.fori_loop(0, steps * G, step, (dk, dv))
    _store_rows(dk_ref, key, dk * scores.factor, there)
    _store_rows(dv_ref, key, dv, there)


def interval_dkv(offset, low_T, k_YH, v_YE, rows: Rows, *, shape: _Shape, scores, interpret):
    """Gradients of keys and values, float32, from all queries whose intervals they are in."""
    sizes = _sizes("dkv", max(k_YH.shape[1], v_YE.shape[1]), k_YH.dtype)
    W, L = sizes.rows, sizes.keys
    tiles = pl.cdiv(shape.length, L)
    # One beyond the last query that reaches a tile of keys: where intervals begin never falls.
    last_I = jnp.arange(1, tiles + 1, dtype=jnp.int32) * L - 1
    end_BI = jax.vmap(lambda low_T: jnp.searchsorted(low_T, last_I, side="right"))(
        low_T.reshape(shape.lows, shape.T)
    )
    return _call(
        functools.partial(_interval_dkv_kernel, W=W, L=L, shape=shape, scores=scores),
        f"moba_interval_dkv_{W}x{L}",
        (shape.B * shape.K, tiles),
        [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in (k_YH, v_YE)],
        sizes,
        interpret,
        (offset[None], end_BI.astype(jnp.int32).reshape(-1), low_T, k_YH, v_YE, rows),
    )


# --- The two passes -------------------------------------------------------------------------------


def _rows_of(x):
    return x.reshape(-1, x.shape[-1])


def _make_shape(call, layout: Layout, q_BTNH, k_BTKH, blocks) -> _Shape:
    B, T, N, _ = q_BTNH.shape
    return _Shape(
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
    layout = make_layout(call, B, T, N, K, length, _sizes("forward", max(H, E), q_BTNH.dtype).rows)
    shape = _make_shape(call, layout, q_BTNH, k_BTKH, blocks)
    common = {"scores": _Scores(call.scale, call.soft_cap), "interpret": interpret}
    q_RH, k_YH, v_YE = (_rows_of(x) for x in (q_BTNH, plan.bounded(k_BTKH), v_BTKE))
    low_T = plan.intervals(call, blocks, T, offset).reshape(-1)

    def group(out, start):
        pairs = ()
        if call.choices:
            tables = make_tables(call, layout, chosen_BNJT, blocks, length, K, start)
            parts = tiles_forward(
                tables, q_RH, k_YH, v_YE, tile=layout.tile, M=call.block_size, K=K, **common
            )
            pairs = (tables.slot_P, *parts)
        return tuple(
            interval_forward(
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
    layout = make_layout(call, B, T, N, K, length, _sizes("dkv", max(H, E), q_BTNH.dtype).rows)
    shape = _make_shape(call, layout, q_BTNH, k_BTKH, blocks)
    common = {"scores": _Scores(call.scale, call.soft_cap), "interpret": interpret}
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
            pairs = (tables.slot_P, tiles_dq(tables, k_YH, v_YE, rows, **tiles))
            dk_YH, dv_YE = tiles_dkv(tables, k_YH, v_YE, rows, dk_YH, dv_YE, **tiles)
        dq_RH = interval_dq(
            jnp.stack([start, offset]), low_T, k_YH, v_YE, rows, pairs, dq_RH, shape=shape, **common
        )
        return dq_RH, dk_YH, dv_YE

    dk_YH, dv_YE = interval_dkv(offset, low_T, k_YH, v_YE, rows, shape=shape, **common)
    sums = jnp.empty((B * T * N, H), q_BTNH.dtype), dk_YH, dv_YE
    dq_RH, dk_YH, dv_YE = plan.over_groups(group, layout.heads, N, sums)
    return dq_RH.reshape(q_BTNH.shape), dk_YH.reshape(k_BTKH.shape), dv_YE.reshape(v_BTKE.shape)


# --- The choice -----------------------------------------------------------------------------------


def _choose_kernel(first_ref, end_ref, q_ref, c_refs, out_ref, *, U, C, S, call, shape):
    """The best few so far are in no order; the worst of them makes way for a better block."""
    x = pl.program_id(0)
    b, n = lax.div(x, shape.N), lax.rem(x, shape.N)
    t = pl.program_id(1) * U + jnp.arange(U, dtype=jnp.int32)
    inside = t < shape.T
    q = _load_rows(q_ref, (b * shape.T + t) * shape.N + n, inside)
    first, end = (_load(ref, shape.low_row(b) + t, inside, 0) for ref in (first_ref, end_ref))
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
            score += _dot(q, _load_rows(c_ref, base + number, there), NT)
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
        plgpu.store(out_ref.at[row], jnp.where(value == -jnp.inf, -1, number), mask=inside)
        return jnp.where(index == number[:, None], -jnp.inf, best)

    lax.fori_loop(0, call.choices, put, best)


def choose(call: plan.Call, q_BTNH, c_BKSH, blocks: plan.Blocks, *, interpret: bool):
    """`plan.choose` in one pass over the blocks, without a buffer of scores."""
    B, T, N, H = q_BTNH.shape
    K, S, J = *c_BKSH.shape[1:3], call.choices
    sizes = _sizes("choose", H, q_BTNH.dtype)
    shape = _Shape(B, T, T, N, K, N, J, blocks.own_BT.shape[0])
    return _call(
        functools.partial(_choose_kernel, U=sizes.rows, C=sizes.keys, S=S, call=call, shape=shape),
        f"moba_choose_{J}_of_{S}",
        (B * N, pl.cdiv(T, sizes.rows)),
        [jax.ShapeDtypeStruct((B * N * J * T,), jnp.int32)],
        sizes,
        interpret,
        (
            blocks.first_BT.reshape(-1),
            blocks.end_BT.reshape(-1),
            _rows_of(q_BTNH),
            plan.split(_rows_of(c_BKSH), q_BTNH.dtype),
        ),
    )[0].reshape(B, N, J, T)
