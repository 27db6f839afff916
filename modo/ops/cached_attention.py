"""Attention of new tokens to keys and values that a cache holds, full or block-sparse.

Axes: R rows of the batch that are computed, C new tokens a row, S slots, Z slots of a tile, M of a
block, X blocks of a row, J chosen ones, K key heads, G query heads a key head. A slot holds one
token, in order; what stands in slots that were never written may be anything.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.moba import plan

# Slots that are looked at together.
_TILE = 512
# Elements of the scores of a piece of queries against a tile.
_PIECE_ELEMENTS = 1 << 20


def block_slots(slots: int, block_size: int) -> tuple[int, int]:
    """(slots, M): whole blocks that hold `slots` tokens; one block need not be larger than them."""
    block = min(block_size, slots)
    return -(-slots // block) * block, block


def completed_block_sums(k_BKSH: Array, block: int, count_B: Array, added_B: Array, most: int):
    """Sums of the keys of the blocks that were filled when `added_B` tokens came to `count_B`.

    Each is one sum over the block's keys, so it does not depend on how they came.

    Args:
      k_BKSH: the keys, the added ones among them.
      block: M.
      count_B: tokens before.
      added_B: tokens added.
      most: largest value that added_B can have.

    Returns:
      (number_BJ, sum_BKJH): numbers of blocks, S / M for none, and float32 sums.
    """
    B, K, S, H = k_BKSH.shape
    blocks = S // block
    number_BJ = count_B[:, None] // block + jnp.arange(-(-most // block), dtype=jnp.int32)
    end_BJ = (number_BJ + 1) * block
    complete_BJ = (end_BJ > count_B[:, None]) & (end_BJ <= (count_B + added_B)[:, None])

    def sums():
        k_BKXMH = k_BKSH.reshape(B, K, blocks, block, H)
        k_BKJMH = jax.vmap(lambda k_KXMH, i_J: k_KXMH.at[:, i_J].get(mode="clip"))(
            k_BKXMH, number_BJ
        )
        return jnp.sum(k_BKJMH.astype(jnp.float32), axis=3)

    def none():
        return jnp.zeros((B, K, number_BJ.shape[1], H), jnp.float32)

    return jnp.where(complete_BJ, number_BJ, blocks), lax.cond(jnp.any(complete_BJ), sums, none)


def choose_cached_blocks(
    q_RCNH: Array,
    key_sums_RKSH: Array,
    slot_RC: Array,
    *,
    slots: int,
    block: int,
    top_k: int,
    sink_blocks: int = 0,
    window_blocks: int = 0,
) -> Array | None:
    """The earlier blocks that MoBA attends to, as `modo.moba_attention` chooses them.

    Args:
      q_RCNH: queries.
      key_sums_RKSH: float32 sums of each block's keys; those of blocks that are not full are not
        looked at.
      slot_RC: int, the slots of the queries' own tokens.
      slots: S of the cache.
      block: M.
      top_k, sink_blocks, window_blocks: of `modo.moba_attention`.

    Returns:
      int32 [R, N, J, C], -1 where there are no more blocks; None: all are attended to.
    """
    call = plan.make_call(
        slots, block, min(top_k, slots), True, sinks=sink_blocks, window=window_blocks
    )
    if call.everything:
        return None
    R, C, N, _ = q_RCNH.shape
    if call.choices == 0:
        return jnp.zeros((R, N, 0, C), jnp.int32)
    first_RC = jnp.zeros_like(slot_RC)
    blocks = plan.Blocks(None, first_RC, slot_RC // block, None, None, None)
    if call.fixed:
        return plan.fixed_choice(call, R, N, blocks)
    return plan.choose(call, q_RCNH, key_sums_RKSH / block, blocks)


def cached_attention(
    q_RCNH: Array,
    k_BKSH: Array,
    v_BKSH: Array,
    slot_RC: Array,
    *,
    own: tuple[Array, Array] | None = None,
    rows_R: Array | None = None,
    chosen_RNJC: Array | None = None,
    block: int | None = None,
    soft_cap: float | None = None,
) -> Array:
    """Softmax attention of each query to the slots up to its own, scaled by H^-0.5.

    One token a row reads the blocks that it chose, or all slots; many read those that are in use.

    Args:
      q_RCNH: queries.
      k_BKSH, v_BKSH: the cache.
      slot_RC: int, the slots of the queries' own tokens.
      own: key [R, 1, K, H] and value of the queries' own tokens where C is 1 and the cache does not
        hold them yet.
      rows_R: int, the rows of the cache that the queries belong to, where C is 1; None: all.
      chosen_RNJC: what `choose_cached_blocks` returned: only these blocks and the own one.
      block: M, where there are chosen blocks.
      soft_cap: scores become c tanh(scores / c).

    Returns:
      [R, C, N, Hv] in the query's dtype; the softmax is float32.
    """
    C = q_RCNH.shape[1]
    if C > 1:
        return _attend_chunk(q_RCNH, k_BKSH, v_BKSH, slot_RC, chosen_RNJC, block, soft_cap)
    seen_R = slot_RC[:, 0] + (own is None)
    chosen_RNJ = None
    if chosen_RNJC is not None:
        own_RN1 = jnp.broadcast_to((slot_RC // block)[:, None], (*chosen_RNJC.shape[:2], 1))
        chosen_RNJ = jnp.concatenate([chosen_RNJC[..., 0], own_RN1], axis=2)
    return _attend_token(q_RCNH, k_BKSH, v_BKSH, seen_R, own, rows_R, chosen_RNJ, block, soft_cap)


# --- One token a row -----------------------------------------------------------------------------


def _attend_token(q_R1NH, k_BKSH, v_BKSH, seen_R, own, rows_R, chosen_RNJ, block, soft_cap):
    """Attention to the first `seen` slots, or to those in the blocks of the given numbers."""
    R, _, N, H = q_R1NH.shape
    K, S = k_BKSH.shape[1:3]
    if chosen_RNJ is not None:
        # Every head has keys of its own now.
        k_RKZH, v_RKZH = (_gather_blocks(x, chosen_RNJ, rows_R, block) for x in (k_BKSH, v_BKSH))
        slot_RKZ = chosen_RNJ[..., None] * block + jnp.arange(block, dtype=jnp.int32)
        slot_RKZ = jnp.where((chosen_RNJ >= 0)[..., None], slot_RKZ, S).reshape(R, N, -1)
        if own is not None:
            own = tuple(jnp.repeat(x, N // K, axis=2) for x in own)
        K = N
    else:
        k_RKZH, v_RKZH = (x if rows_R is None else x[rows_R] for x in (k_BKSH, v_BKSH))
        slot_RKZ = jnp.arange(S, dtype=jnp.int32)[None, None]
    held_RKZ = slot_RKZ < seen_R[:, None, None]
    q_RKGH = q_R1NH.reshape(R, K, N // K, H)
    # Keys first: as the other operand XLA would copy and transpose them.
    scores_RKZG = _finite(
        jnp.einsum("rkzh,rkgh->rkzg", k_RKZH, q_RKGH, preferred_element_type=jnp.float32),
        H,
        soft_cap,
    )
    scores_RKZG = jnp.where(held_RKZ[..., None], scores_RKZG, -jnp.inf)
    top_RKG = jnp.maximum(jnp.max(scores_RKZG, axis=2), jnp.finfo(jnp.float32).min)
    if own is not None:
        k_RKH, v_RKH = (x[:, 0] for x in own)
        score_RKG = _finite(
            jnp.einsum("rkh,rkgh->rkg", k_RKH, q_RKGH, preferred_element_type=jnp.float32),
            H,
            soft_cap,
        )
        top_RKG = jnp.maximum(top_RKG, score_RKG)
    weight_RKZG = jnp.exp(scores_RKZG - top_RKG[:, :, None])
    total_RKG = jnp.sum(weight_RKZG, axis=2)

    def values(v_RKZH):
        return jnp.einsum(
            "rkzg,rkzh->rkgh",
            weight_RKZG.astype(v_RKZH.dtype),
            v_RKZH,
            preferred_element_type=jnp.float32,
        )

    def without_rubbish():
        return values(jnp.where(held_RKZ[..., None], v_RKZH, 0))

    if chosen_RNJ is not None:
        y_RKGH = without_rubbish()
    else:
        # A weight of 0 does not silence a NaN, but a copy of all values would cost as much again.
        y_RKGH = values(v_RKZH)
        y_RKGH = lax.cond(jnp.all(jnp.isfinite(y_RKGH)), lambda: y_RKGH, without_rubbish)
    if own is not None:
        weight_RKG = jnp.exp(score_RKG - top_RKG)
        total_RKG += weight_RKG
        y_RKGH += weight_RKG[..., None] * v_RKH[:, :, None].astype(jnp.float32)
    y_RKGH = y_RKGH / _positive(total_RKG)[..., None]
    return y_RKGH.reshape(R, 1, N, -1).astype(q_R1NH.dtype)


def _gather_blocks(x_BKSH, number_RNJ, rows_R, block):
    """The slots of the blocks that each query head chose, [R, N, J M, H]; any where it is -1."""
    B, K, S, H = x_BKSH.shape
    R, N, J = number_RNJ.shape
    x_BKXMH = x_BKSH.reshape(B, K, S // block, block, H)
    number_RKGJ = jnp.maximum(number_RNJ, 0).reshape(R, K, N // K, J)
    if rows_R is None:
        x = jax.vmap(jax.vmap(lambda x_XMH, i_GJ: x_XMH[i_GJ]))(x_BKXMH, number_RKGJ)
    else:
        x = x_BKXMH[rows_R[:, None, None, None], jnp.arange(K)[:, None, None], number_RKGJ]
    return x.reshape(R, N, J * block, H)


def _finite(scores, width, soft_cap):
    scores = scores * width**-0.5
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    limit = jnp.finfo(jnp.float32).max
    return jnp.clip(scores, -limit, limit)


def _positive(total):
    """Padding has seen nothing, and is to be zeros."""
    return jnp.maximum(total, jnp.finfo(jnp.float32).tiny)


# --- Many tokens a row ---------------------------------------------------------------------------


def _attend_chunk(q_BCNH, k_BKSH, v_BKSH, slot_BC, chosen_BNJC, block, soft_cap):
    """Attention of pieces of queries to tiles of slots, so that memory is bounded."""
    B, C, N, _ = q_BCNH.shape
    K, S = k_BKSH.shape[1:3]
    tile = min(_TILE, S)
    piece = max(1, min(C, _PIECE_ELEMENTS // (B * N * tile)))
    pieces = -(-C // piece)

    def cut(x, axis):
        """Pieces [pieces, ...] of the queries along an axis; what is added sees nothing."""
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, pieces * piece - C)
        x = jnp.pad(x, widths, constant_values=-1)
        shape = (*x.shape[:axis], pieces, piece, *x.shape[axis + 1 :])
        return jnp.moveaxis(x.reshape(shape), axis, 0)

    def attend(queries):
        q_BKGCH, slot_BC, chosen_BNJC = queries
        last_B = jnp.max(slot_BC, axis=1)

        def add_tile(i, state):
            start = jnp.minimum(i * tile, S - tile)
            slot_Z = start + jnp.arange(tile, dtype=jnp.int32)
            # The last tile may begin before its time, to end with the slots.
            seen_BCZ = (slot_Z >= i * tile) & (slot_Z <= slot_BC[..., None])
            visible = seen_BCZ[:, None, None]
            if chosen_BNJC is not None:
                number_Z = slot_Z // block
                chosen_BNCZ = jnp.any(chosen_BNJC[..., None] == number_Z, axis=2)
                chosen_BNCZ |= ((slot_BC // block)[..., None] == number_Z)[:, None]
                visible = visible & chosen_BNCZ.reshape(*q_BKGCH.shape[:4], tile)
            k_BKZH, v_BKZH = (lax.dynamic_slice_in_dim(x, start, tile, 2) for x in (k_BKSH, v_BKSH))
            # A weight of 0 does not silence a NaN.
            v_BKZH = jnp.where((slot_Z <= last_B[:, None])[:, None, :, None], v_BKZH, 0)
            return _add_tile(state, q_BKGCH, k_BKZH, v_BKZH, visible, soft_cap)

        shape = q_BKGCH.shape[:4]
        state = (
            jnp.full(shape, jnp.finfo(jnp.float32).min),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, v_BKSH.shape[3]), jnp.float32),
        )
        tiles = jnp.max(last_B) // tile + 1
        _, total, value = lax.fori_loop(0, tiles, add_tile, state)
        return (value / _positive(total)[..., None]).astype(q_BCNH.dtype)

    chosen = None if chosen_BNJC is None else cut(chosen_BNJC, 3)
    queries = cut(plan.group_heads(q_BCNH, K), 3), cut(slot_BC, 1), chosen
    y_PBKGCH = lax.map(attend, queries)
    y_BPCKGH = jnp.transpose(y_PBKGCH, (1, 0, 4, 2, 3, 5))
    return y_BPCKGH.reshape(B, pieces * piece, N, -1)[:, :C]


def _add_tile(state, q_BKGCH, k_BKZH, v_BKZH, visible, soft_cap):
    """One more tile in the softmax: (largest score, sum of weights, weighted sum of values)."""
    top, total, value = state
    scores = jnp.einsum("bkgch,bkzh->bkgcz", q_BKGCH, k_BKZH, preferred_element_type=jnp.float32)
    scores = jnp.where(visible, _finite(scores, q_BKGCH.shape[4], soft_cap), -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_top[..., None])
    added = jnp.einsum(
        "bkgcz,bkzh->bkgch",
        weights.astype(v_BKZH.dtype),
        v_BKZH,
        preferred_element_type=jnp.float32,
    )
    factor = jnp.exp(top - new_top)
    total = factor * total + jnp.sum(weights, axis=-1)
    return new_top, total, factor[..., None] * value + added
