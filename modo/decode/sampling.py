"""The next token, from its logits.

Axes: B rows, V vocabulary.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array

from modo.decode.inputs import check_count

# Logits divided by less, or by more, may overflow or all become 0 in float32.
_LEAST, _MOST = 1e-30, 1e30


@dataclasses.dataclass(frozen=True)
class Sampling:
    """How tokens are drawn.

    Attributes:
      temperature: 0 takes the likeliest token, ties to the lowest; else logits are divided by it,
        which must be from 1e-30 to 1e30.
      top_k: draw from the k likeliest tokens, after the temperature; None: from all.
      top_p: draw from the fewest likeliest tokens whose probability comes to top_p, after top_k;
        None: from all.
      stop_tokens: a row ends with the first of these that it draws.

    Raises:
      ValueError: a value out of range.
    """

    temperature: float = 0.0
    top_k: int | None = None
    top_p: float | None = None
    stop_tokens: tuple[int, ...] = ()

    def __post_init__(self):
        if not 0 <= self.temperature < math.inf:
            raise ValueError(f"temperature must be finite and not negative, got {self.temperature}")
        if self.temperature and not _LEAST <= self.temperature <= _MOST:
            raise ValueError(
                f"temperature must be 0 or in [{_LEAST}, {_MOST}], got {self.temperature}"
            )
        if self.top_k is not None:
            check_count("top_k", self.top_k)
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")


def draw(logits_BV: Array, key_B: Array, sampling: Sampling) -> Array:
    """One token a row, int32 [B]; every row draws with its own key, whatever the others do."""
    if sampling.temperature == 0:
        return jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)
    logits_BV = logits_BV / sampling.temperature
    if sampling.top_k is None and sampling.top_p is None:
        return jax.vmap(jax.random.categorical)(key_B, logits_BV).astype(jnp.int32)
    # Likeliest first, of equals the lowest.
    token_BV = jnp.argsort(-logits_BV, axis=-1, stable=True)
    logits_BV = jnp.take_along_axis(logits_BV, token_BV, axis=-1)
    if sampling.top_k is not None:
        logits_BV = jnp.where(jnp.arange(logits_BV.shape[1]) < sampling.top_k, logits_BV, -jnp.inf)
    if sampling.top_p is not None:
        p_BV = jax.nn.softmax(logits_BV, axis=-1)
        before_BV = jnp.cumsum(p_BV, axis=-1) - p_BV
        # Rounding must not lose the likeliest.
        kept_BV = (before_BV < sampling.top_p).at[:, 0].set(True)
        logits_BV = jnp.where(kept_BV, logits_BV, -jnp.inf)
    rank_B = jax.vmap(jax.random.categorical)(key_B, logits_BV)
    return jnp.take_along_axis(token_BV, rank_B[:, None], axis=-1)[:, 0].astype(jnp.int32)
