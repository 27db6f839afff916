"""Rows of whole arrays that Triton kernels load and store, and how such a kernel is run.

Axes: see gpu.py.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu


class Sizes(NamedTuple):
    """Of a kernel: rows of queries and keys of a product, warps, and loads in flight."""

    rows: int
    keys: int
    warps: int
    stages: int


def sizes_of(kernel: str, width: int, dtype) -> Sizes:
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
class Shape:
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
        return load(low_ref, self.low_row(b) + t, inside, self.length)


def padded(width: int) -> int:
    return max(16, pl.next_power_of_2(width))


def _row_access(ref, row, mask):
    """References to rows over the power of two next to their width, and the mask of that."""
    width = ref.shape[1]
    column = jnp.arange(padded(width), dtype=jnp.int32)[None]
    mask = None if mask is None else mask[:, None]
    if padded(width) != width:
        inside = column < width
        mask = inside if mask is None else mask & inside
    return ref.at[row[:, None], column], mask


def load_rows(ref, row, mask=None):
    """[rows, padded width]; 0 where there is none."""
    at, mask = _row_access(ref, row, mask)
    return plgpu.load(at, mask=mask, other=None if mask is None else 0.0)


def store_rows(ref, row, x, mask=None):
    at, mask = _row_access(ref, row, mask)
    plgpu.store(at, x.astype(ref.dtype), mask=mask)


def load(ref, index, mask, other):
    return plgpu.load(ref.at[index], mask=mask, other=other)


def store(ref, index, x, mask):
    plgpu.store(ref.at[index], x, mask=mask)


def launch(kernel, name, grid, out_shape, sizes: Sizes, interpret, args, put_in=()):
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


def shapes_of(*arrays):
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]
