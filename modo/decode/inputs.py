"""Numbers that come from outside."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from modo.config import MAX_INT32


def known(x: Array) -> bool:
    """Whether values can be looked at: outside of jit."""
    return not isinstance(x, jax.core.Tracer)


def to_int32(name: str, x) -> Array:
    """Any array or list of integers as int32: JAX by itself would wrap what does not fit.

    Raises:
      ValueError: another type, or, where values are known, numbers beyond 32 bits.
    """
    if not isinstance(x, Array):
        x = np.asarray(x)
    # NumPy makes float of an empty list.
    if x.size and not jnp.issubdtype(x.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers, got {x.dtype}")
    if known(x) and x.size and not -MAX_INT32 <= int(x.min()) <= int(x.max()) <= MAX_INT32:
        raise ValueError(f"{name} must fit in 32 bits, got {int(x.min())} to {int(x.max())}")
    return jnp.asarray(x).astype(jnp.int32)


def check_count(name: str, value: int) -> None:
    """Refuses what is not a whole number, 1 at least."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise ValueError(f"{name} must be a whole number, got {value!r}")
    if value < 1:
        raise ValueError(f"{name} must be at least 1, got {value}")
    if value > MAX_INT32:
        raise ValueError(f"{name} must be at most {MAX_INT32}, got {value}")
