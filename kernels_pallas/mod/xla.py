"""Rows gathered and scattered by XLA.

Axes: B batch, T tokens, C slots, D width.
"""

import jax
import jax.numpy as jnp
from jax import lax


def _slots_or_outside(index_BC, filled_BC, length: int):
    """Positions to gather from or scatter to: distinct, ascending, unfilled slots out of range."""
    slots = index_BC.shape[1]
    return jnp.where(filled_BC, index_BC, length + jnp.arange(slots, dtype=jnp.int32))


def normalise(x_BCD, scale_D, filled_BC, *, eps: float):
    """RMSNorm of each row in float32, as flax's; unfilled slots are zeros."""
    rows_BCD = x_BCD.astype(jnp.float32)
    square_BC1 = jnp.mean(rows_BCD * rows_BCD, axis=-1, keepdims=True)
    factor_BCD = lax.rsqrt(square_BC1 + eps) * scale_D.astype(x_BCD.dtype).astype(jnp.float32)
    rows_BCD = jnp.where(filled_BC[..., None], rows_BCD * factor_BCD, 0)
    return rows_BCD.astype(x_BCD.dtype)


def dispatch(x_BTD, index_BC, filled_BC, norm_scale_D=None, *, eps: float = 0.0):
    """The chosen rows [B, C, D], normalised if there is a scale; unfilled slots are zeros."""

    def row(x_TD, i_C):
        return x_TD.at[i_C].get(
            mode="fill", fill_value=0, unique_indices=True, indices_are_sorted=True
        )

    x_BCD = jax.vmap(row)(x_BTD, _slots_or_outside(index_BC, filled_BC, x_BTD.shape[1]))
    return x_BCD if norm_scale_D is None else normalise(x_BCD, norm_scale_D, filled_BC, eps=eps)


def combine(x_BTD, delta_BCD, gate_BC, index_BC, filled_BC):
    """x with gate * delta added to the chosen rows; gate_BC None: 1."""
    if gate_BC is not None:
        delta_BCD = gate_BC.astype(jnp.float32)[..., None] * delta_BCD.astype(jnp.float32)

    def row(x_TD, i_C, delta_CD):
        return x_TD.at[i_C].add(delta_CD, mode="drop", unique_indices=True, indices_are_sorted=True)

    position_BC = _slots_or_outside(index_BC, filled_BC, x_BTD.shape[1])
    return jax.vmap(row)(x_BTD, position_BC, delta_BCD.astype(x_BTD.dtype))
