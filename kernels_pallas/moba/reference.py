"""MoBA with a dense mask: quadratic memory, for tests and for pictures of short rows."""

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.moba import plan


def attention_mask(
    q_BTNH, k_BTKH, *, block_size, top_k, segment_ids_BT=None, sinks=0, window=0
) -> jax.Array:
    """What each query attends to: bool [B, K, G, T, T]."""
    B, T, N, _ = q_BTNH.shape
    K = k_BTKH.shape[2]
    blocks = plan.find_blocks(T, block_size, segment_ids_BT)
    causal_TT = jnp.tril(jnp.ones((T, T), bool))
    same_BTT = (blocks.own_BT[:, :, None] == blocks.own_BT[:, None, :]) & causal_TT
    mask = jnp.broadcast_to(
        (same_BTT & (blocks.own_BT >= 0)[:, :, None])[:, None, None], (B, K, N // K, T, T)
    )
    S = blocks.start_BS.shape[1]
    if S == 0 or top_k == 1:
        return mask
    q_BKGTH = plan.group_heads(q_BTNH, K)
    k_BKSMH = plan.cut_blocks(
        jnp.swapaxes(k_BTKH, 1, 2), blocks, block_size, segment_ids_BT is None
    )
    score = plan.gate_scores(plan.centroids(k_BKSMH), q_BKGTH)
    score_BKGTS = jnp.transpose(score, (0, 1, 3, 4, 2))
    number_S = jnp.arange(S)
    first_BT1, end_BT1 = blocks.first_BT[:, :, None], blocks.end_BT[:, :, None]
    allowed_BTS = ((number_S >= first_BT1) & (number_S < end_BT1))[:, None, None]
    forced_BTS = (number_S < first_BT1 + sinks) | (number_S >= end_BT1 - window)
    score_BKGTS = jnp.where(forced_BTS[:, None, None], jnp.inf, score_BKGTS)
    order = jnp.argsort(jnp.where(allowed_BTS, -score_BKGTS, jnp.inf), axis=-1, stable=True)
    rank = jnp.argsort(order, axis=-1)
    chosen_BKGTS = (rank < top_k - 1) & allowed_BTS
    part_BST = blocks.slot_BT[:, None, :] == number_S[:, None]
    return mask | jnp.any(chosen_BKGTS[..., None] & part_BST[:, None, None, None], axis=-2)


def attention(
    q_BTNH, k_BTKH, v_BTKE, *, block_size, top_k, scale, segment_ids_BT=None, soft_cap=None,
    sinks=0, window=0,
) -> jax.Array:  # fmt: skip
    """MoBA of checked arguments, [B, T, N, E] in float32 at least."""
    B, T, N, H = q_BTNH.shape
    K, E = v_BTKE.shape[2:]
    dtype = jnp.promote_types(q_BTNH.dtype, jnp.float32)
    mask = attention_mask(
        lax.stop_gradient(q_BTNH),
        lax.stop_gradient(k_BTKH),
        block_size=block_size,
        top_k=top_k,
        segment_ids_BT=segment_ids_BT,
        sinks=sinks,
        window=window,
    )
    q_BTKGH = q_BTNH.reshape(B, T, K, N // K, H).astype(dtype) * scale
    highest = lax.Precision.HIGHEST
    s = jnp.einsum("btkgh,blkh->bkgtl", q_BTKGH, k_BTKH.astype(dtype), precision=highest)
    if soft_cap is not None:
        s = soft_cap * jnp.tanh(s / soft_cap)
    limit = jnp.finfo(dtype).max
    s = jnp.where(mask, jnp.clip(s, -limit, limit), -jnp.inf)
    # A row of padding attends to nothing; its maximum is -inf.
    p = jnp.exp(s - jnp.maximum(jnp.max(s, axis=-1, keepdims=True), -limit))
    p = p / jnp.maximum(jnp.sum(p, axis=-1, keepdims=True), jnp.finfo(dtype).tiny)
    o = jnp.einsum("bkgtl,blke->btkge", p, v_BTKE.astype(dtype), precision=highest)
    return o.reshape(B, T, N, E)
