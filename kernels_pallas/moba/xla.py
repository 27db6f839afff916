"""MoBA in plain XLA: no T x T buffer, no atomics, and the same bits in every run.

Two paths give the same result. The dense path takes tiles of queries against all keys under the
exact mask; it is for short rows. The grouped path attends to the own block in windows of keys, and
to chosen blocks in tiles of queries that chose the same one, and merges what they give.

Queries may be a chunk of a row whose keys are all here. Windows are then laid out from the chunk's
first token, which may be known only when the program runs.

Axes: see plan.py; L keys of a window, E value width, W tiles of a step, Q rows of a step.
"""

import math

import jax
import jax.numpy as jnp
from jax import lax

from kernels_pallas.moba import plan
from kernels_pallas.moba.xla_attend import Part, Rows, merge
from kernels_pallas.moba.xla_layout import Layout, make_layout
from kernels_pallas.moba.xla_tiles import chosen_backward, chosen_forward, dispatch, take
from kernels_pallas.moba.xla_windows import window_backward, window_forward, window_mask


def _split_scale(scale, dtype) -> tuple[float, float]:
    """The scale as a multiplier of queries and a factor of scores."""
    if jnp.finfo(dtype).bits >= 32:
        return scale, 1.0
    # A power of two loses nothing in a narrow type.
    factor, exponent = math.frexp(scale)
    return 2.0**exponent, factor


def _layout_of(call: plan.Call, q_BKGTH, v_BKTE) -> Layout:
    B, K, G, T, H = q_BKGTH.shape
    return make_layout(
        call,
        batch=B,
        length=v_BKTE.shape[2],
        kv_heads=K,
        groups=G,
        key_width=H,
        value_width=v_BKTE.shape[3],
        queries=T,
    )


def _cut(call: plan.Call, blocks: plan.Blocks, x_BKTH):
    """The candidate blocks of all heads, [B, K * S, M, H]."""
    x_BKSMH = plan.cut_blocks(x_BKTH, blocks, call.block_size, call.aligned)
    return x_BKSMH.reshape(x_BKSMH.shape[0], -1, *x_BKSMH.shape[3:])


def _paste(call: plan.Call, blocks: plan.Blocks, x_BSMH, like_BKTH):
    """The transpose of `_cut`."""
    B, K, T, _ = like_BKTH.shape
    x_BKSMH = x_BSMH.reshape(B, K, -1, *x_BSMH.shape[2:])
    return plan.paste_blocks(x_BKSMH, blocks, T, call.aligned)


def _ungroup_heads(x_BKGTX):
    B, K, G, T, X = x_BKGTX.shape
    return jnp.transpose(x_BKGTX, (0, 3, 1, 2, 4)).reshape(B, T, K * G, X)


def _group_choice(chosen_BNJT, K: int):
    """[B, K, J, G, T]."""
    B, N, J, T = chosen_BNJT.shape
    return jnp.swapaxes(chosen_BNJT.reshape(B, K, N // K, J, T), 2, 3)


def forward(call: plan.Call, q_BTNH, k_BTKH, v_BTKE, chosen_BNJT, blocks: plan.Blocks, offset=0):
    """Attention, and of each query the largest score and 1 / sum of exp(score - it).

    Args:
      q_BTNH, chosen_BNJT: of all tokens, or of consecutive ones that begin at `offset`.
      blocks: of all tokens.

    Returns:
      o_BTNE in the dtype of queries, top_BNT, inverse_BNT float32 at least.
    """
    K = k_BTKH.shape[2]
    q_BKGTH, chosen_BKJGT = plan.group_heads(q_BTNH, K), _group_choice(chosen_BNJT, K)
    k_BKTH, v_BKTE = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKE))
    layout = _layout_of(call, q_BKGTH, v_BKTE)
    B, K, G, T, H = q_BKGTH.shape
    dtype = q_BKGTH.dtype
    multiplier, factor = _split_scale(call.scale, dtype)
    q_BKGTH, k_BKTH = plan.bounded(q_BKGTH * multiplier), plan.bounded(k_BKTH)
    mask = window_mask(layout, blocks, chosen_BKJGT)
    part = window_forward(layout, q_BKGTH, k_BKTH, v_BKTE, mask, factor, call.soft_cap, offset)
    if not layout.dense and layout.choices:
        tiles, pairs = dispatch(call, layout, chosen_BKJGT)
        k_BSMH, v_BSME = (_cut(call, blocks, x) for x in (k_BKTH, v_BKTE))
        chosen = chosen_forward(
            layout, tiles, q_BKGTH.reshape(B, -1, H), k_BSMH, v_BSME, factor, call.soft_cap
        )

        def add(part, pair):
            slot_BKGT, valid_BKGT = pair
            other = jax.tree.map(lambda x: take(x, slot_BKGT), chosen)
            # Not a product with 0: what another query attended to may be infinite.
            o = jnp.where(valid_BKGT[..., None], other.o, 0)
            top = jnp.where(valid_BKGT, other.top, -jnp.inf)
            return merge(part, Part(o, top, other.total)), None

        part = lax.scan(add, part, pairs)[0]
    inverse_BKGT = 1 / jnp.maximum(part.total, jnp.finfo(part.total.dtype).tiny)
    o_BTNE = _ungroup_heads((part.o * inverse_BKGT[..., None]).astype(dtype))
    return o_BTNE, *(x.reshape(B, K * G, T) for x in (part.top, inverse_BKGT))


def backward(
    call: plan.Call, q_BTNH, k_BTKH, v_BTKE, chosen_BNJT, blocks, o, top, inverse, do_BTNE, offset=0
):
    """Gradients of queries in their dtype, and of keys and values in float32 at least.

    Args: as for `forward`, and
      o, top, inverse: what `forward` returned.
    """
    K = k_BTKH.shape[2]
    q_BKGTH, o, do_BKGTE = (plan.group_heads(x, K) for x in (q_BTNH, o, do_BTNE))
    chosen_BKJGT = _group_choice(chosen_BNJT, K)
    k_BKTH, v_BKTE = (jnp.swapaxes(x, 1, 2) for x in (k_BTKH, v_BTKE))
    layout = _layout_of(call, q_BKGTH, v_BKTE)
    B, K, G, T, H = q_BKGTH.shape
    top, inverse = (x.reshape(B, K, G, T) for x in (top, inverse))
    dtype = q_BKGTH.dtype
    multiplier, factor = _split_scale(call.scale, dtype)
    q_BKGTH, k_BKTH = plan.bounded(q_BKGTH * multiplier), plan.bounded(k_BKTH)
    do_BKGTE = do_BKGTE.astype(top.dtype)
    delta_BKGT = jnp.sum(do_BKGTE * o, axis=-1)
    rows = Rows(top, inverse, do_BKGTE.astype(v_BKTE.dtype), delta_BKGT)
    mask = window_mask(layout, blocks, chosen_BKJGT)
    dq, dk, dv = window_backward(
        layout, q_BKGTH, k_BKTH, v_BKTE, mask, rows, factor, call.soft_cap, offset
    )
    if not layout.dense and layout.choices:
        tiles, pairs = dispatch(call, layout, chosen_BKJGT)
        k_BSMH, v_BSME = (_cut(call, blocks, x) for x in (k_BKTH, v_BKTE))
        rows = Rows(*(x.reshape(B, -1, *x.shape[4:]) for x in rows))
        part, dk_BSMH, dv_BSME = chosen_backward(
            layout, tiles, q_BKGTH.reshape(B, -1, H), k_BSMH, v_BSME, rows, factor, call.soft_cap
        )
        dk = dk + _paste(call, blocks, dk_BSMH, k_BKTH)
        dv = dv + _paste(call, blocks, dv_BSME, v_BKTE)

        def add(dq, pair):
            slot_BKGT, valid_BKGT = pair
            return dq + jnp.where(valid_BKGT[..., None], take(part, slot_BKGT), 0), None

        dq, _ = lax.scan(add, dq, pairs)
    dq = _ungroup_heads((dq * multiplier).astype(dtype))
    return dq, jnp.swapaxes(dk, 1, 2), jnp.swapaxes(dv, 1, 2)
