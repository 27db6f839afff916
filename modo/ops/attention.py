"""Full causal attention."""

import jax
import jax.numpy as jnp
from jax import Array


def causal_attention(
    query: Array,
    key: Array,
    value: Array,
    *,
    segment_ids: Array | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Softmax attention to earlier tokens of the same document, scaled by H^-0.5.

    Args:
      query: [B, T, N, H].
      key: [B, T, K, H], K divides N.
      value: [B, T, K, H].
      segment_ids: int [B, T], documents as runs of equal values numbered apart (see
        `modo.ops.document_runs`); 0 is padding, which no document attends to.
      soft_cap: scores become c tanh(scores / c).

    Returns:
      [B, T, N, H] in query's dtype; the softmax is float32. Rows of padding are finite.
    """
    mask = None
    if segment_ids is not None:
        mask = (segment_ids[:, :, None] == segment_ids[:, None, :])[:, None]
    if soft_cap is None:
        return jax.nn.dot_product_attention(query, key, value, mask=mask, is_causal=True)
    return _capped_attention(query, key, value, mask, soft_cap)


def _capped_attention(q_BTNH, k_BTKH, v_BTKH, mask_B1TT, soft_cap):
    """The same with capped scores, which jax.nn.dot_product_attention does not offer."""
    length, heads, kv_heads = q_BTNH.shape[1], q_BTNH.shape[2], k_BTKH.shape[2]
    q_BTKGH = q_BTNH.reshape(*q_BTNH.shape[:2], kv_heads, heads // kv_heads, -1)
    scores_BKGTS = jnp.einsum(
        "btkgh,bskh->bkgts", q_BTKGH, k_BTKH, preferred_element_type=jnp.float32
    )
    scores_BKGTS = soft_cap * jnp.tanh(scores_BKGTS * (q_BTNH.shape[-1] ** -0.5 / soft_cap))
    visible = jnp.tril(jnp.ones((length, length), bool))
    if mask_B1TT is not None:
        visible = visible & mask_B1TT[:, :, None]
    weights_BKGTS = jax.nn.softmax(jnp.where(visible, scores_BKGTS, -jnp.inf), axis=-1)
    out_BTKGH = jnp.einsum("bkgts,bskh->btkgh", weights_BKGTS.astype(v_BTKH.dtype), v_BTKH)
    return out_BTKGH.reshape(*q_BTNH.shape[:3], -1)
