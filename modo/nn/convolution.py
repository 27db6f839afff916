"""Short causal convolution of keys."""

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array


class KeyConvolution(nnx.Module):
    """k'_t = k_t + silu(sum over l < W of w_l k_(t - l)), each channel by itself.

    FlashMoBA's key convolution (arXiv 2511.11571): it draws the keys of a block together, so that
    their mean says more about them. Its weights begin at zero, where keys are left as they are.

    Args:
      num_heads: key heads, K.
      head_dim: width of a head, H.
      width: keys that are seen, the token's own included: W.
      dtype: of the result; weights are float32, as is the sum.
    """

    def __init__(self, num_heads: int, head_dim: int, width: int, *, dtype=jnp.float32):
        if width < 1:
            raise ValueError(f"width counts a token's own key, so it must be at least 1: {width}")
        self.width, self.dtype = width, dtype
        self.taps_WKH = nnx.Param(jnp.zeros((width, num_heads, head_dim), jnp.float32))

    def __call__(
        self,
        k_BTKH: Array,
        segment_ids_BT: Array | None = None,
        before_BLKH: Array | None = None,
    ) -> Array:
        """Keys [B, T, K, H]; those of other documents (ids, numbered apart) are not seen.

        `before_BLKH`: the W - 1 keys before the first, zeros where there are none; None: none.
        """
        k_BTKH = k_BTKH.astype(jnp.float32)
        total_BTKH = jnp.zeros_like(k_BTKH)
        for lag, tap_KH in enumerate(self.taps_WKH[...]):
            total_BTKH += tap_KH * _earlier(k_BTKH, segment_ids_BT, before_BLKH, lag)
        return (k_BTKH + jax.nn.silu(total_BTKH)).astype(self.dtype)


def _earlier(k_BTKH: Array, segment_ids_BT: Array | None, before_BLKH, lag: int) -> Array:
    """The keys `lag` tokens before; zeros where the document has none."""
    if lag == 0:
        return k_BTKH
    T = k_BTKH.shape[1]
    if before_BLKH is None:
        earlier_BTKH = jnp.pad(k_BTKH, ((0, 0), (lag, 0), (0, 0), (0, 0)))[:, :T]
    else:
        last_BLKH = before_BLKH[:, before_BLKH.shape[1] - lag :].astype(k_BTKH.dtype)
        earlier_BTKH = jnp.concatenate([last_BLKH, k_BTKH], axis=1)[:, :T]
    if segment_ids_BT is None:
        return earlier_BTKH
    earlier_BT = jnp.pad(segment_ids_BT, ((0, 0), (lag, 0)))[:, :T]
    return jnp.where((earlier_BT == segment_ids_BT)[..., None, None], earlier_BTKH, 0)
