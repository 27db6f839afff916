"""Attention of new tokens to keys and values that a cache holds, full or block-sparse.

Axes: R rows of the batch that are computed, C new tokens a row, S slots, Z slots of a tile, M of a
block, J blocks, K key heads, G query heads a key head. A slot holds one token, in order; what
stands in slots that were never written may be anything.
"""

import jax
import jax.numpy as jnp
from jax import Array, lax

from kernels_pallas.moba import plan

# Slots that are looked at together.
_TILE = 512
# Elements of the scores of a piece of queries against a tile.
_PIECE_ELEMENTS = 1 << 22


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
        k_BKnMH = k_BKSH.reshape(B, K, blocks, block, H)
        k_BKJMH = jax.vmap(lambda k_KnMH, i_J: k_KnMH.at[:, i_J].get(mode="clip"))(
            k_BKnMH, number_BJ
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

    Only the slots that are in use, up to the next tile, are read.

    Args:
      q_RCNH: queries.
      k_BKSH, v_BKSH: the cache.
      slot_RC: int, the slots of the queries' own tokens.
      own: key [R, 1, K, H] and value of the queries' own tokens where C is 1 and the cache does not
        hold them yet.
      rows_R: int, the rows of the cache that the queries belong to; None: all, in order.
      chosen_RNJC: what `choose_cached_blocks` returned: only these blocks and the own one.
      block: M, where there are chosen blocks.
      soft_cap: scores become c tanh(scores / c).

    Returns:
      [R, C, N, Hv] in the query's dtype; the softmax is float32.
    """
    R, C, N, H = q_RCNH.shape
    K = k_BKSH.shape[1]
    q_RKGCH = plan.group_heads(q_RCNH, K)
    state = _start(q_RKGCH, own, v_BKSH.shape[3], soft_cap)
    seen_RC = slot_RC if own is not None else slot_RC + 1
    if chosen_RNJC is not None and C == 1:
        number_RKGJ = jnp.concatenate(
            [
                chosen_RNJC[..., 0].reshape(R, K, N // K, -1),
                jnp.broadcast_to((slot_RC // block)[:, :, None, None], (R, K, N // K, 1)),
            ],
            axis=3,
        )
        state = _gather_blocks(
            state, q_RKGCH, k_BKSH, v_BKSH, seen_RC[:, 0], number_RKGJ, rows_R, block, soft_cap
        )
        return _finish(state, q_RCNH.dtype)
    own_RC = slot_RC // block if chosen_RNJC is not None else None
    tile = min(_TILE, k_BKSH.shape[2])
    piece = max(1, min(C, _PIECE_ELEMENTS // (R * N * tile)))
    pieces = -(-C // piece)

    def attend(i):
        def cut(x, axis):
            return None if x is None else lax.dynamic_slice_in_dim(x, i * piece, piece, axis)

        return _finish(
            _scan_tiles(
                [cut(x, 3) for x in state],
                cut(q_RKGCH, 3),
                k_BKSH,
                v_BKSH,
                cut(seen_RC, 1),
                cut(chosen_RNJC, 3),
                cut(own_RC, 1),
                rows_R,
                block,
                tile,
                soft_cap,
            ),
            q_RCNH.dtype,
        )

    if pieces == 1:
        return attend(0)

    def pad(x, axis):
        if x is None:
            return None
        widths = [(0, 0)] * x.ndim
        widths[axis] = (0, pieces * piece - C)
        return jnp.pad(x, widths)

    q_RKGCH, state = pad(q_RKGCH, 3), [pad(x, 3) for x in state]
    seen_RC, own_RC, chosen_RNJC = pad(seen_RC, 1), pad(own_RC, 1), pad(chosen_RNJC, 3)
    y_PRCNH = lax.map(attend, jnp.arange(pieces, dtype=jnp.int32))
    return jnp.moveaxis(y_PRCNH, 0, 1).reshape(R, pieces * piece, N, -1)[:, :C]


def _start(q_RKGCH, own, width, soft_cap):
    """(largest score, sum of exponentials, sum of weighted values), float32, of the own tokens."""
    shape = q_RKGCH.shape[:4]
    if own is None:
        lowest = jnp.finfo(jnp.float32).min
        return (
            jnp.full(shape, lowest, jnp.float32),
            jnp.zeros(shape, jnp.float32),
            jnp.zeros((*shape, width), jnp.float32),
        )
    k_RKCH, v_RKCH = (jnp.swapaxes(x, 1, 2) for x in own)
    score = _scores(q_RKGCH, k_RKCH, soft_cap)[..., 0]
    value = jnp.broadcast_to(v_RKCH[:, :, None].astype(jnp.float32), (*shape, width))
    return score, jnp.ones(shape, jnp.float32), value


def _scores(q_RKGCH, k_RKZH, soft_cap):
    """Finite scores [R, K, G, C, Z]."""
    scores = jnp.einsum(
        "rkgch,rkzh->rkgcz", q_RKGCH, k_RKZH, preferred_element_type=jnp.float32
    ) * (q_RKGCH.shape[-1] ** -0.5)
    if soft_cap is not None:
        scores = soft_cap * jnp.tanh(scores / soft_cap)
    limit = jnp.finfo(jnp.float32).max
    return jnp.clip(scores, -limit, limit)


def _add(state, q_RKGCH, k_RKZH, v_RKZH, visible, held_RKZ, soft_cap):
    """Takes slots into the softmax; `held`: whether a slot was ever written."""
    top, total, value = state
    scores = jnp.where(visible, _scores(q_RKGCH, k_RKZH, soft_cap), -jnp.inf)
    new_top = jnp.maximum(top, jnp.max(scores, axis=-1))
    weights = jnp.exp(scores - new_top[..., None])
    factor = jnp.exp(top - new_top)
    # A weight of 0 does not silence a NaN.
    v_RKZH = jnp.where(held_RKZ[..., None], v_RKZH, 0)
    added = jnp.einsum(
        "rkgcz,rkzh->rkgch",
        weights.astype(v_RKZH.dtype),
        v_RKZH,
        preferred_element_type=jnp.float32,
    )
    total = factor * total + jnp.sum(weights, axis=-1)
    return new_top, total, factor[..., None] * value + added


def _finish(state, dtype):
    """[R, C, N, Hv]."""
    _, total, value = state
    R, K, G, C, width = value.shape
    # Padding has seen nothing.
    y_RKGCH = (value / jnp.maximum(total, jnp.finfo(jnp.float32).tiny)[..., None]).astype(dtype)
    return jnp.transpose(y_RKGCH, (0, 3, 1, 2, 4)).reshape(R, C, K * G, width)


def _scan_tiles(
    state, q_RKGCH, k_BKSH, v_BKSH, seen_RC, chosen_RNJC, own_RC, rows_R, block, tile, soft_cap
):
    """Attention tile by tile over all slots that any query sees, under a mask."""
    R, K, G, C, _ = q_RKGCH.shape
    slots = k_BKSH.shape[2]
    last_R = jnp.max(seen_RC, axis=1)

    def cut(x_BKSH, start):
        if rows_R is None:
            return lax.dynamic_slice_in_dim(x_BKSH, start, tile, 2)
        sizes = (1, K, tile, x_BKSH.shape[3])
        return jax.vmap(lambda row: lax.dynamic_slice(x_BKSH, (row, 0, start, 0), sizes)[0])(rows_R)

    def step(i, state):
        start = jnp.minimum(i * tile, slots - tile)
        slot_Z = start + jnp.arange(tile, dtype=jnp.int32)
        # The last tile may begin before its time, to end with the slots.
        fresh_Z = slot_Z >= i * tile
        visible = (fresh_Z & (slot_Z < seen_RC[..., None]))[:, None, None]
        if chosen_RNJC is not None:
            number_Z = slot_Z // block
            attended_RNCZ = jnp.any(chosen_RNJC[..., None] == number_Z, axis=2)
            attended_RNCZ |= (own_RC[..., None] == number_Z)[:, None]
            visible = visible & attended_RNCZ.reshape(R, K, G, C, tile)
        held_R1Z = (slot_Z < last_R[:, None])[:, None]
        return _add(
            state, q_RKGCH, cut(k_BKSH, start), cut(v_BKSH, start), visible, held_R1Z, soft_cap
        )

    if slots == tile:
        return step(0, tuple(state))
    tiles = (jnp.max(last_R) + tile - 1) // tile
    return lax.fori_loop(0, tiles, step, tuple(state))


def _gather_blocks(state, q_RKG1H, k_BKSH, v_BKSH, seen_R, number_RKGJ, rows_R, block, soft_cap):
    """Attention of one token a row to the blocks of the given numbers, -1 for none."""
    R, K, G, J = number_RKGJ.shape
    N = K * G

    def cut(x_BKSH):
        B, _, S, H = x_BKSH.shape
        x_BKnMH = x_BKSH.reshape(B, K, S // block, block, H)
        number = jnp.maximum(number_RKGJ, 0)
        if rows_R is None:
            x = jax.vmap(jax.vmap(lambda x_nMH, i_GJ: x_nMH[i_GJ]))(x_BKnMH, number)
        else:
            head_K11 = jnp.arange(K)[:, None, None]
            x = x_BKnMH[rows_R[:, None, None, None], head_K11, number]
        return x.reshape(R, N, J * block, H)

    slot = number_RKGJ[..., None] * block + jnp.arange(block, dtype=jnp.int32)
    held = (slot >= 0) & (number_RKGJ >= 0)[..., None] & (slot < seen_R[:, None, None, None, None])
    held_RNZ = held.reshape(R, N, J * block)

    def by_head(x):
        return x.reshape(R, N, 1, *x.shape[3:])

    state = _add(
        tuple(map(by_head, state)),
        by_head(q_RKG1H),
        cut(k_BKSH),
        cut(v_BKSH),
        held_RNZ[:, :, None, None],
        held_RNZ,
        soft_cap,
    )
    return tuple(x.reshape(R, K, G, *x.shape[3:]) for x in state)
