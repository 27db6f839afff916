"""Rotary position embedding (Su et al. 2021, arXiv 2104.09864), half-split as in Llama."""

import jax.numpy as jnp
from jax import Array


def rotary_embedding(x_BTNH: Array, positions_BT: Array, theta: float) -> Array:
    """Rotates each pair (x[h], x[h + H / 2]) by positions * theta^(-2 h / H).

    Args:
      x_BTNH: queries or keys, H even.
      positions_BT: int, the tokens' true positions.
      theta: base of the frequencies.

    Returns:
      [B, T, N, H] in x's dtype; angles and products are float32.
    """
    half = x_BTNH.shape[-1] // 2
    frequency_H = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angle_BT1H = positions_BT[:, :, None, None].astype(jnp.float32) * frequency_H
    cos, sin = jnp.cos(angle_BT1H), jnp.sin(angle_BT1H)
    a, b = jnp.split(x_BTNH.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_BTNH.dtype)
