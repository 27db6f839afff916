"""The rows of a Mixture-of-Depths block (Raposo et al. 2024, arXiv 2404.02258): out and back in.

MB that XLA's form and the TPU kernel move between HBM and the core, by benchmarks.mod_routing (jax
0.10.2; B 8, T 2048, D 2048, C 256; the least is 17 and 25 in bfloat16, 34 and 50 in float32):

                  v5e        v5p        v6e        tpu7x
dispatch bf16     75 / 25    42 / 25    75 / 25     42 / 25
dispatch f32      34 / 34    67 / 34    34 / 34     67 / 34
combine bf16     143 / 42   143 / 42   143 / 42   143 / 42
combine f32      285 / 50   285 / 50   285 / 50   285 / 50

XLA gathers by row DMAs as well; it loses only where it passes over the rows once more to clear
unfilled slots, or brings all of x into VMEM first, so dispatch is left to it. Its scatter moves all
of x in and out, so on a TPU combine is the kernel. Of GPUs nothing was counted.
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array

from kernels_pallas.mod import gpu, tpu, xla
from kernels_pallas.platform import Kernel, by_platform, on_platform

# Implementations that are kernels: their platform and module.
_KERNELS = {"pallas_tpu": ("tpu", tpu), "pallas_gpu": ("cuda", gpu)}
IMPLEMENTATIONS = ("xla", *_KERNELS)
_PALLAS_DTYPES = (jnp.float32, jnp.bfloat16)


def dispatch(
    x_BTD: Array,
    index_BC: Array,
    filled_BC: Array,
    *,
    norm_scale_D: Array | None = None,
    eps: float = 1e-6,
    implementation: str | None = None,
) -> Array:
    """Gathers the chosen rows.

    Args:
      x_BTD: float.
      index_BC: int32, positions of the chosen rows of each batch row, each once, in ascending
        order.
      filled_BC: bool, which slots hold one; the unfilled ones come last.
      norm_scale_D: of an RMSNorm of the rows, computed in float32 as flax's nnx.RMSNorm with x's
        dtype does; None: no norm.
      eps: of the norm.
      implementation: "xla"; "pallas_tpu", interpreted where there is no TPU; "pallas_gpu", likewise
        for CUDA; None: "xla".

    Returns:
      [B, C, D] in x's dtype; unfilled slots are zeros. Without a norm all implementations agree
      bitwise.

    Raises:
      ValueError: shapes that disagree or are empty, an unknown implementation, or a dtype that it
        does not take.
    """
    _check_implementation(implementation, x_BTD)
    _check_slots(x_BTD, index_BC, filled_BC)
    if norm_scale_D is not None and norm_scale_D.shape != x_BTD.shape[2:]:
        raise ValueError(f"norm_scale_D must be {x_BTD.shape[2:]}, got {norm_scale_D.shape}")
    if implementation in (None, "xla"):
        return xla.dispatch(x_BTD, index_BC, filled_BC, norm_scale_D, eps=eps)
    static = implementation, float(eps), x_BTD.shape[1]
    return _dispatch(static, x_BTD, norm_scale_D, index_BC, filled_BC)


def combine(
    x_BTD: Array,
    delta_BCD: Array,
    gate_BC: Array | None,
    index_BC: Array,
    filled_BC: Array,
    *,
    implementation: str | None = None,
) -> Array:
    """Adds gate * delta to the chosen rows; the others come back bitwise, whatever they hold.

    The product is in float32 and rounded to x's dtype before it is added. Where x is donated, or
    not used again, it is updated in place.

    Args:
      x_BTD: float.
      delta_BCD: float; unfilled slots may hold anything.
      gate_BC: float32, or None: 1.
      index_BC, filled_BC: as for `dispatch`.
      implementation: likewise, but None is the kernel in float32 and bfloat16 where the code is
        lowered for a TPU and the compiler does not cut the program over devices by itself.

    Returns:
      [B, T, D] in x's dtype. All implementations agree bitwise, but that a compiler may contract
      float32's product and sum: one rounding of the product.

    Raises:
      ValueError: as `dispatch`.
    """
    _check_implementation(implementation, x_BTD)
    _check_slots(x_BTD, index_BC, filled_BC)
    slots = (*index_BC.shape, x_BTD.shape[2])
    if delta_BCD.shape != slots:
        raise ValueError(f"delta_BCD must be {slots}, got {delta_BCD.shape}")
    if gate_BC is not None and gate_BC.shape != index_BC.shape:
        raise ValueError(f"gate_BC must be {index_BC.shape}, got {gate_BC.shape}")
    if implementation == "xla" or x_BTD.dtype not in _PALLAS_DTYPES:
        return xla.combine(x_BTD, delta_BCD, gate_BC, index_BC, filled_BC)
    return _combine(implementation, x_BTD, delta_BCD, gate_BC, index_BC, filled_BC)


def _check_implementation(implementation: str | None, x_BTD: Array) -> None:
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation {implementation!r} is none of {', '.join(map(repr, IMPLEMENTATIONS))}"
        )
    if implementation in _KERNELS and x_BTD.dtype not in _PALLAS_DTYPES:
        raise ValueError(f"{implementation} takes float32 and bfloat16, got {x_BTD.dtype}")


def _check_slots(x_BTD, index_BC, filled_BC) -> None:
    shapes = f"x {x_BTD.shape}, index {index_BC.shape}, filled {filled_BC.shape}"
    if x_BTD.ndim != 3 or index_BC.ndim != 2 or index_BC.shape[0] != x_BTD.shape[0]:
        raise ValueError(f"x must be [B, T, D] and index [B, C]: {shapes}")
    if filled_BC.shape != index_BC.shape:
        raise ValueError(f"index and filled must have the same shape: {shapes}")
    if 0 in (*x_BTD.shape, *index_BC.shape):
        raise ValueError(f"no axis may be empty: {shapes}")


def _tpu_combine(x_BTD, delta_BCD, gate_BC, index_BC, filled_BC, *, interpret):
    gate_BC = _float_gate(gate_BC, index_BC)
    return tpu.combine(x_BTD, delta_BCD, gate_BC, index_BC, filled_BC, interpret=interpret)


def _float_gate(gate_BC, index_BC) -> Array:
    return jnp.ones(index_BC.shape, jnp.float32) if gate_BC is None else gate_BC.astype(jnp.float32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _dispatch(static, x_BTD, norm_scale_D, index_BC, filled_BC):
    implementation, eps, _ = static
    if implementation is None:
        return xla.dispatch(x_BTD, index_BC, filled_BC, norm_scale_D, eps=eps)
    platform, module = _KERNELS[implementation]
    out = jax.ShapeDtypeStruct((*index_BC.shape, x_BTD.shape[2]), x_BTD.dtype)
    scale_1D = None if norm_scale_D is None else norm_scale_D[None]
    kernel = Kernel(module.dispatch, (eps,))
    return on_platform(platform, kernel, out, x_BTD, index_BC, filled_BC, scale_1D)


def _dispatch_forward(static, x_BTD, norm_scale_D, index_BC, filled_BC):
    saved = None if norm_scale_D is None else (x_BTD, norm_scale_D)
    return _dispatch(static, x_BTD, norm_scale_D, index_BC, filled_BC), (saved, index_BC, filled_BC)


def _dispatch_backward(static, saved, dy_BCD):
    implementation, eps, length = static
    normed, index_BC, filled_BC = saved
    d_scale = None
    if normed is not None:
        x_BTD, scale_D = normed
        x_BCD = _dispatch(static, x_BTD, None, index_BC, filled_BC)
        norm = functools.partial(xla.normalise, filled_BC=filled_BC, eps=eps)
        dy_BCD, d_scale = jax.vjp(norm, x_BCD, scale_D)[1](dy_BCD)
    zeros = jnp.zeros((dy_BCD.shape[0], length, dy_BCD.shape[2]), dy_BCD.dtype)
    dx_BTD = _combine(implementation, zeros, dy_BCD, None, index_BC, filled_BC)
    return dx_BTD, d_scale, None, None


_dispatch.defvjp(_dispatch_forward, _dispatch_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _combine(implementation, x_BTD, delta_BCD, gate_BC, index_BC, filled_BC):
    out = jax.ShapeDtypeStruct(x_BTD.shape, x_BTD.dtype)
    if implementation is None:
        args = x_BTD, delta_BCD, gate_BC, index_BC, filled_BC
        return by_platform({"tpu": Kernel(_tpu_combine)}, xla.combine, out, *args)
    platform, module = _KERNELS[implementation]
    args = x_BTD, delta_BCD, _float_gate(gate_BC, index_BC), index_BC, filled_BC
    return on_platform(platform, Kernel(module.combine), out, *args)


def _combine_forward(implementation, x_BTD, delta_BCD, gate_BC, index_BC, filled_BC):
    out_BTD = _combine(implementation, x_BTD, delta_BCD, gate_BC, index_BC, filled_BC)
    return out_BTD, (delta_BCD, gate_BC, index_BC, filled_BC)


def _combine_backward(implementation, saved, dy_BTD):
    delta_BCD, gate_BC, index_BC, filled_BC = saved
    static = implementation, 0.0, dy_BTD.shape[1]
    d_delta = _dispatch(static, dy_BTD, None, index_BC, filled_BC).astype(jnp.float32)
    d_gate = None
    if gate_BC is not None:
        d_gate = jnp.sum(d_delta * delta_BCD.astype(jnp.float32), axis=-1)
        d_gate = jnp.where(filled_BC, d_gate, 0).astype(gate_BC.dtype)
        d_delta = gate_BC.astype(jnp.float32)[..., None] * d_delta
    return dy_BTD, d_delta.astype(delta_BCD.dtype), d_gate, None, None


_combine.defvjp(_combine_forward, _combine_backward)
