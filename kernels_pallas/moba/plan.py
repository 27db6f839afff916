"""What MoBA attends to: candidate blocks, their centroids, the choice, and tables of tiles.

Everything here is plain jax.numpy on small arrays, and is not differentiated.

Axes: B batch, T tokens, K key heads, G query heads a key head, H head width, S candidate blocks,
M tokens of a block, J choices (top_k - 1), R rows (one a query head and token, r = g * T + t),
P pairs of a row and a block it chose (p = j * R + r), Z tiles, U rows of a tile.
"""

import dataclasses
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Elements of the scores of one chunk of queries against all blocks.
_CHOICE_ELEMENTS = 1 << 18
_MIN_CHUNK = 128


@dataclasses.dataclass(frozen=True)
class Call:
    """What is static about a call, beside the shapes.

    Attributes:
      block_size: M.
      candidates: S.
      choices: J, blocks to choose a query; 0 if `everything`.
      everything: whether every candidate is attended, without a choice.
      aligned: whether all rows are one document that begins at their first token.
      scale: multiplies the scores of attention.
      soft_cap: of the scores of attention.
      path: of implementations "xla" and "pallas_tpu"; None: the cheaper.
      sinks, window: of the choices, so many are a document's first blocks, and the last blocks
        before the query's own, whatever their scores.
      chunk: of queries that choose at once on implementation "xla"; None: by their number. It may
        change the rounding of scores, so a device with a part of the queries takes that of all.
    """

    block_size: int
    candidates: int
    choices: int
    everything: bool
    aligned: bool
    scale: float
    soft_cap: float | None
    path: Literal["dense", "grouped"] | None = None
    sinks: int = 0
    window: int = 0
    chunk: int | None = None

    @property
    def fixed(self) -> bool:
        """Whether no choice depends on a score."""
        return self.sinks + self.window == self.choices


def make_call(
    length, block_size, top_k, aligned, scale=1.0, soft_cap=None, path=None, sinks=0, window=0
) -> Call:
    """The static part of a call of `moba_attention` with checked arguments."""
    candidates = num_candidates(length, block_size)
    everything = top_k - 1 >= candidates
    choices = 0 if everything and path != "grouped" else min(top_k - 1, candidates)
    sinks = min(sinks, choices)
    return Call(
        block_size,
        candidates,
        choices,
        everything and not choices,
        aligned,
        scale,
        soft_cap,
        path,
        sinks,
        min(window, choices - sinks),
    )


def group_heads(x_BTNX: jax.Array, K: int) -> jax.Array:
    """Query heads by the key head that they use, [B, K, G, T, X]."""
    B, T, N, X = x_BTNX.shape
    return jnp.transpose(x_BTNX.reshape(B, T, K, N // K, X), (0, 2, 3, 1, 4))


def bounded(x: jax.Array) -> jax.Array:
    """So far from overflow that no score overflows, which would make NaN of inf - inf.

    512 products of these powers of two stay below the largest sum, and are exact.
    """
    largest = jnp.finfo(x.dtype).max
    if x.dtype != jnp.float16:  # Its products are summed in float32.
        largest = 2.0 ** (jnp.finfo(x.dtype).maxexp // 2 - 5)
    return jnp.clip(x, -largest, largest)


def high_bits(x: jax.Array) -> jax.Array:
    """float32 without the bits that a bfloat16 has no place for."""
    bits = lax.bitcast_convert_type(x, jnp.int32)
    return lax.bitcast_convert_type(bits & jnp.int32(-1 << 16), jnp.float32)


def split(x: jax.Array, dtype) -> tuple[jax.Array, ...]:
    """Arrays of `dtype` whose sum is x, float32: one of float32, three of bfloat16."""
    parts = []
    while dtype == jnp.bfloat16 and len(parts) < 2:
        parts.append(high_bits(x))
        x = x - parts[-1]
    return tuple(part.astype(dtype) for part in (*parts, x))


class Blocks(NamedTuple):
    """Blocks of each row of the batch. Without segment ids all rows agree and B is 1.

    A block is a candidate if it is full and its run of equal segment ids goes on behind it: only
    such blocks are ever chosen. Candidates are numbered in order of position.

    Attributes:
      start_BS: first token of each candidate; any token for numbers that no candidate has.
      first_BT, end_BT: a token may choose the candidates first <= s < end.
      own_BT: first token of the token's own block; padding has -1.
      run_BT: number of the token's run; padding has -1.
      slot_BT: the candidate that the token is part of, or -1.
    """

    start_BS: jax.Array
    first_BT: jax.Array
    end_BT: jax.Array
    own_BT: jax.Array
    run_BT: jax.Array
    slot_BT: jax.Array


def num_candidates(length: int, block_size: int) -> int:
    """Most candidate blocks in a row, whatever its segments: the last token's block is none."""
    return (length - 1) // block_size


def find_blocks(length: int, block_size: int, segment_ids_BT: jax.Array | None) -> Blocks:
    """Blocks counted from the first token of every run of equal segment ids."""
    S = num_candidates(length, block_size)
    t_BT = jnp.arange(length, dtype=jnp.int32)[None]
    if segment_ids_BT is None:
        number_BT = t_BT // block_size
        return Blocks(
            start_BS=jnp.arange(S, dtype=jnp.int32)[None] * block_size,
            first_BT=jnp.zeros_like(t_BT),
            end_BT=number_BT,
            own_BT=number_BT * block_size,
            run_BT=jnp.zeros_like(t_BT),
            slot_BT=jnp.where(number_BT < S, number_BT, -1),
        )
    new_BT = segment_ids_BT[:, 1:] != segment_ids_BT[:, :-1]
    new_BT = jnp.pad(new_BT, ((0, 0), (1, 0)), constant_values=True)
    valid_BT = segment_ids_BT != 0
    run_BT = jnp.where(valid_BT, jnp.cumsum(new_BT, axis=1, dtype=jnp.int32), -1)
    begin_BT = lax.cummax(jnp.where(new_BT, t_BT, 0), axis=1)
    number_BT = (t_BT - begin_BT) // block_size
    own_BT = begin_BT + number_BT * block_size
    # The block is a candidate if the token right behind it is of the same run.
    behind_BT = jnp.take_along_axis(run_BT, jnp.minimum(own_BT + block_size, length - 1), axis=1)
    candidate_BT = valid_BT & (own_BT + block_size < length) & (behind_BT == run_BT)
    starts_BT = candidate_BT & (own_BT == t_BT)
    before_BT = jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32) - starts_BT
    first_BT = jnp.take_along_axis(before_BT, begin_BT, axis=1)
    end_BT = first_BT + number_BT
    start_BS = jnp.sort(jnp.where(starts_BT, t_BT, length - block_size), axis=1)[:, :S]
    return Blocks(
        start_BS=start_BS,
        first_BT=jnp.where(valid_BT, first_BT, 0),
        end_BT=jnp.where(valid_BT, end_BT, 0),
        own_BT=jnp.where(valid_BT, own_BT, -1),
        run_BT=run_BT,
        slot_BT=jnp.where(candidate_BT, end_BT, -1),
    )


def of_queries(blocks: Blocks, offset: jax.Array, length: int) -> Blocks:
    """The same blocks, with the tokens from `offset` on, `length` of them."""
    candidates, *tokens = blocks
    return Blocks(candidates, *(lax.dynamic_slice_in_dim(x, offset, length, 1) for x in tokens))


def intervals(call: Call, blocks: Blocks, queries: int, offset) -> jax.Array:
    """First token of the keys that each query attends to without a choice, up to itself.

    Args:
      queries: of each row, from the token `offset` on.

    Returns:
      int32 [B, queries], or B 1 for all rows; behind the query if it is padding.
    """
    if queries < blocks.own_BT.shape[1]:
        blocks = of_queries(blocks, offset, queries)
    low_BT = blocks.own_BT
    if call.everything:
        low_BT = low_BT - (blocks.end_BT - blocks.first_BT) * call.block_size
    behind_T = jnp.arange(queries, dtype=jnp.int32) + (offset + 1)
    return jnp.where(blocks.own_BT < 0, behind_T, low_BT)


def cut_blocks(x_BKTH: jax.Array, blocks: Blocks, block_size: int, aligned: bool) -> jax.Array:
    """The tokens of the candidate blocks, [B, K, S, M, H]; aligned: without segment ids."""
    B, K, _, H = x_BKTH.shape
    S = blocks.start_BS.shape[1]
    if aligned:
        return x_BKTH[:, :, : S * block_size].reshape(B, K, S, block_size, H)
    index_BSM = blocks.start_BS[:, :, None] + jnp.arange(block_size, dtype=jnp.int32)
    return jax.vmap(lambda x_KTH, i_SM: x_KTH[:, i_SM])(x_BKTH, index_BSM)


def paste_blocks(x_BKSMH: jax.Array, blocks: Blocks, length: int, aligned: bool) -> jax.Array:
    """The transpose of `cut_blocks`, [B, K, T, H]. Candidates share no token, so it is a gather."""
    B, K, S, M, H = x_BKSMH.shape
    x_BKTH = x_BKSMH.reshape(B, K, S * M, H)
    if aligned:
        return jnp.pad(x_BKTH, ((0, 0), (0, 0), (0, length - S * M), (0, 0)))
    t_BT = jnp.arange(length, dtype=jnp.int32)[None]
    index_BT = jnp.maximum(blocks.slot_BT * M + t_BT - blocks.own_BT, 0)
    gathered_BKTH = jax.vmap(lambda x_KTH, i_T: x_KTH[:, i_T])(x_BKTH, index_BT)
    return jnp.where((blocks.slot_BT >= 0)[:, None, :, None], gathered_BKTH, 0)


def centroids(k_BKSMH: jax.Array) -> jax.Array:
    """Mean of each block's keys, [B, K, S, H], in float32 at least."""
    return jnp.mean(k_BKSMH.astype(jnp.promote_types(k_BKSMH.dtype, jnp.float32)), axis=3)


def gate_scores(c_BKSH: jax.Array, q_BKGTH: jax.Array) -> jax.Array:
    """Finite scores of blocks, [B, K, S, G, T]; the scale of attention has no part in them."""
    score = jnp.einsum(
        "bksh,bkgth->bksgt",
        c_BKSH,
        q_BKGTH.astype(c_BKSH.dtype),
        # The default precision of accelerators would let bfloat16 rounding decide the choice.
        precision=lax.Precision.HIGHEST,
    )
    # -inf is left for forbidden blocks alone, so an overflow cannot make one look allowed.
    limit = jnp.finfo(score.dtype).max
    return jnp.where(jnp.isnan(score), -limit, jnp.clip(score, -limit, limit))


def forced(call: Call, number, first, end):
    """Whether a candidate is chosen whatever its score; first <= number < end holds."""
    return (number < first + call.sinks) | (number >= end - call.window)


def fixed_choice(call: Call, batch: int, heads: int, blocks: Blocks) -> jax.Array:
    """What `choose` returns where no choice depends on a score, int32 [B, N, J, T]."""
    first_BJT, end_BJT = blocks.first_BT[:, None], blocks.end_BT[:, None]
    j_J1 = jnp.arange(call.choices, dtype=jnp.int32)[:, None]
    # The last ones, unless they are the sinks or there are too few.
    late_BJT = jnp.maximum(end_BJT - call.choices, first_BJT) + j_J1
    number_BJT = jnp.where(j_J1 < call.sinks, first_BJT + j_J1, late_BJT)
    number_BJT = jnp.where(number_BJT < end_BJT, number_BJT, -1)
    _, J, T = number_BJT.shape
    return jnp.broadcast_to(number_BJT[:, None], (batch, heads, J, T))


def over_groups(function, heads: int, N: int, carry):
    """function(carry, first query head) -> carry, for one group of `heads` after another."""
    if heads == N:
        return function(carry, 0)
    return lax.fori_loop(0, N // heads, lambda i, carry: function(carry, i * heads), carry)


def choice_chunk(batch: int, heads: int, length: int, blocks: int) -> int:
    """Queries that choose at once."""
    chunk = max(_MIN_CHUNK, _CHOICE_ELEMENTS // (batch * heads * blocks))
    chunks = -(-length // chunk)
    return -(-length // chunks)


def choose(call: Call, q_BTNH: jax.Array, c_BKSH: jax.Array, blocks: Blocks) -> jax.Array:
    """Numbers of the best candidates of every query, best first; -1 where there are no more.

    Of equal scores the lowest number wins.

    Returns:
      int32 [B, N, J, T].
    """
    B, T, N, _ = q_BTNH.shape
    K = c_BKSH.shape[1]
    G = N // K
    q_BKGTH = group_heads(q_BTNH, K)
    S = c_BKSH.shape[2]
    chunk = choice_chunk(B, K * G, T, S) if call.chunk is None else call.chunk
    steps = -(-T // chunk)
    pad = steps * chunk - T
    q_BKGTH = jnp.pad(q_BKGTH, ((0, 0), (0, 0), (0, 0), (0, pad), (0, 0)))
    first_BT = jnp.pad(blocks.first_BT, ((0, 0), (0, pad)))
    end_BT = jnp.pad(blocks.end_BT, ((0, 0), (0, pad)))
    number_S = jnp.arange(S, dtype=jnp.int32)[:, None, None]

    def choose_chunk(i):
        first_BT_, end_BT_ = (
            lax.dynamic_slice_in_dim(x, i * chunk, chunk, 1)[:, None, None, None, :]
            for x in (first_BT, end_BT)
        )
        score_BKSGT = gate_scores(c_BKSH, lax.dynamic_slice_in_dim(q_BKGTH, i * chunk, chunk, 3))
        allowed = (number_S >= first_BT_) & (number_S < end_BT_)

        def best(score_BKSGT, _):
            top = jnp.max(score_BKSGT, axis=2, keepdims=True)
            index = jnp.min(jnp.where(score_BKSGT == top, number_S, S), axis=2, keepdims=True)
            rest = jnp.where(number_S == index, -jnp.inf, score_BKSGT)
            return rest, jnp.where(top == -jnp.inf, -1, index)[:, :, 0]

        if call.sinks or call.window:
            score_BKSGT = jnp.where(
                forced(call, number_S, first_BT_, end_BT_), jnp.inf, score_BKSGT
            )
        score_BKSGT = jnp.where(allowed, score_BKSGT, -jnp.inf)
        return lax.scan(best, score_BKSGT, length=call.choices)[1]

    chosen = lax.map(choose_chunk, jnp.arange(steps, dtype=jnp.int32))
    chosen = jnp.transpose(chosen, (2, 3, 4, 1, 0, 5)).reshape(B, N, call.choices, steps * chunk)
    return chosen[..., :T]


class Tiles(NamedTuple):
    """Pairs sorted by block, every block's pairs padded to whole tiles.

    Attributes:
      block_Z: the block of each tile; tiles beyond the last pair have any.
      row_ZU: the row in each slot of each tile, or R, one beyond the last, where it is empty.
      slot_P: the slot z * U + u of each pair; any where the pair is none.
      used: tiles; those from this one on are beyond the last pair.
    """

    block_Z: jax.Array
    row_ZU: jax.Array
    slot_P: jax.Array
    used: jax.Array


def max_pairs(length: int, block_size: int, choices: int) -> int:
    """Most pairs of one query head, whatever the segments: token t has t // block_size at most."""
    whole, rest = divmod(length, block_size)
    few = min(choices, whole)
    return block_size * (few * (few - 1) // 2 + choices * (whole - few)) + rest * min(
        choices, whole
    )


def max_chunk_pairs(length: int, queries: int, block_size: int, choices: int) -> int:
    """The same of any `queries` consecutive tokens: the last of a row have the most."""
    before = max_pairs(length - queries, block_size, choices)
    return max_pairs(length, block_size, choices) - before


def _sort(key_P, pair_P, largest: int):
    """Keys in order, up to `largest`, and their pairs in order under each key."""
    bits = max(1, (pair_P.shape[0] - 1).bit_length())
    if (largest + 1) << bits > 1 << 32:
        return lax.platform_dependent(
            key_P,
            pair_P,
            # XLA has a radix sort for GPUs, which takes one key and one value.
            cuda=lambda *both: tuple(lax.sort(both, num_keys=1, is_stable=True)),
            default=lambda *both: tuple(lax.sort(both, num_keys=2, is_stable=False)),
        )
    # Both in one number: a sort of one array is faster, and compiles in a third of the time.
    both_P = (key_P.astype(jnp.uint32) << bits) | pair_P.astype(jnp.uint32)
    both_P = lax.sort(both_P, is_stable=False)
    pair_P = both_P & jnp.uint32((1 << bits) - 1)
    return (both_P >> bits).astype(jnp.int32), pair_P.astype(jnp.int32)


def dispatch(block_P: jax.Array, rows: int, blocks: int, num_tiles: int, tile: int) -> Tiles:
    """Sorts pairs by block into tiles of `tile` rows; a block that nobody chose has an empty one.

    Args:
      block_P: the block of each pair; -1 where it is none.
      num_tiles: at least floor(pairs / tile) + blocks.
    """

    P = block_P.shape[0]
    pair_P = jnp.arange(P, dtype=jnp.int32)
    sorted_P, order_P = _sort(jnp.where(block_P < 0, blocks, block_P), pair_P, blocks)
    edge_S = jnp.searchsorted(sorted_P, jnp.arange(blocks + 1, dtype=jnp.int32))
    edge_S = edge_S.astype(jnp.int32)
    count_S = edge_S[1:] - edge_S[:-1]
    tiles_S = jnp.maximum((count_S + tile - 1) // tile, 1)
    last_S = jnp.cumsum(tiles_S, dtype=jnp.int32)
    first_S = last_S - tiles_S

    z_Z = jnp.arange(num_tiles, dtype=jnp.int32)
    block_Z = jnp.searchsorted(last_S, z_Z, side="right").astype(jnp.int32)
    block_Z = jnp.minimum(block_Z, blocks - 1)
    rank_ZU = ((z_Z - first_S[block_Z]) * tile)[:, None] + jnp.arange(tile, dtype=jnp.int32)
    filled_ZU = rank_ZU < count_S[block_Z][:, None]
    at_ZU = jnp.where(filled_ZU, edge_S[block_Z][:, None] + rank_ZU, 0)
    row_ZU = jnp.where(filled_ZU, order_P[at_ZU] % rows, rows)

    first_P = jnp.pad(first_S * tile - edge_S[:-1], (0, 1))[sorted_P]
    slot_P = jnp.where(sorted_P < blocks, first_P + pair_P, 0)
    slot_P = jnp.zeros_like(slot_P).at[order_P].set(slot_P, unique_indices=True)
    return Tiles(block_Z, row_ZU, slot_P, last_S[-1])
