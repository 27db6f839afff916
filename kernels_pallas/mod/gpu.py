"""Pallas GPU kernels (Triton backend): a program gathers, or adds to, a row by its pointer.

Axes: B batch, T tokens, C slots, D width.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu

# Elements of a row that one program moves, unless it needs the whole row.
_BLOCK = 1024


def _position(position_ref):
    return position_ref[pl.program_id(0), pl.program_id(1)]


def _columns(D: int, block: int):
    """Where this program's part of a row begins, and which of its elements the row has."""
    start = pl.program_id(2) * block
    return pl.ds(start, block), start + jnp.arange(block) < D


def _gather_kernel(position_ref, *refs, block: int, eps: float | None):
    *scale_ref, x_ref, out_ref = refs
    D = x_ref.shape[2]
    b, c, t = pl.program_id(0), pl.program_id(1), _position(position_ref)
    at, inside = _columns(D, block)
    x = plgpu.load(x_ref.at[b, jnp.maximum(t, 0), at], mask=inside & (t >= 0), other=0.0)
    if eps is not None:
        x = x.astype(jnp.float32)
        row = lax.rem(b, scale_ref[0].shape[0])
        scale = plgpu.load(scale_ref[0].at[row, at], mask=inside, other=0.0)
        x = x * (lax.rsqrt(jnp.sum(x * x) / D + eps) * scale)
    plgpu.store(out_ref.at[b, c, at], x.astype(out_ref.dtype), mask=inside)


def _scatter_kernel(position_ref, gate_ref, delta_ref, x_ref, out_ref, *, block: int):
    b, c, t = pl.program_id(0), pl.program_id(1), _position(position_ref)
    at, inside = _columns(x_ref.shape[2], block)
    mask = inside & (t >= 0)
    delta = plgpu.load(delta_ref.at[b, c, at], mask=mask, other=0.0).astype(jnp.float32)
    delta = (gate_ref[b, c] * delta).astype(x_ref.dtype)
    row = (b, jnp.maximum(t, 0), at)
    x = plgpu.load(x_ref.at[row], mask=mask, other=0.0).astype(jnp.float32)
    plgpu.store(out_ref.at[row], (x + delta.astype(jnp.float32)).astype(x_ref.dtype), mask=mask)


def _params(block: int):
    return plgpu.CompilerParams(num_warps=max(1, min(8, block // 256)), num_stages=1)


def dispatch(eps: float, x_BTD, index_BC, filled_BC, norm_scale_XD, *, interpret):
    """The chosen rows [B, C, D], normalised if there is a scale; unfilled slots are zeros.

    norm_scale_XD: of each batch row, or one of all.
    """
    (B, _, D), C = x_BTD.shape, index_BC.shape[1]
    block = pl.next_power_of_2(D)
    scale = []
    if norm_scale_XD is None:
        block = min(block, _BLOCK)
    else:
        scale = [norm_scale_XD.astype(x_BTD.dtype).astype(jnp.float32)]
    return pl.pallas_call(
        functools.partial(_gather_kernel, block=block, eps=eps if scale else None),
        grid=(B, C, pl.cdiv(D, block)),
        out_shape=jax.ShapeDtypeStruct((B, C, D), x_BTD.dtype),
        compiler_params=_params(block),
        interpret=interpret,
        name="mod_dispatch",
    )(jnp.where(filled_BC, index_BC, -1), *scale, x_BTD)


def combine(x_BTD, delta_BCD, gate_BC, index_BC, filled_BC, *, interpret):
    """x with gate * delta added to the chosen rows, in place."""
    (B, _, D), C = x_BTD.shape, index_BC.shape[1]
    block = min(pl.next_power_of_2(D), _BLOCK)
    return pl.pallas_call(
        functools.partial(_scatter_kernel, block=block),
        grid=(B, C, pl.cdiv(D, block)),
        out_shape=jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype),
        input_output_aliases={3: 0},
        compiler_params=_params(block),
        interpret=interpret,
        name="mod_combine",
    )(jnp.where(filled_BC, index_BC, -1), gate_BC, delta_BCD, x_BTD)
