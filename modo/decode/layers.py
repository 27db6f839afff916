"""One layer's work on new tokens, against its cache.

Axes: B rows, T tokens of a chunk, R rows and P slots that a routed layer computes, K key heads,
S slots of the cache, H head width, D model width.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array, lax

from modo.decode.cache import LayerCache, default_routed_slots
from modo.nn.attention import Attention
from modo.nn.decoder import Block
from modo.nn.depth import MixtureOfDepths, apply_gate
from modo.ops import routing as ops
from modo.ops.cached_attention import (
    cached_attention,
    choose_cached_blocks,
    completed_block_sums,
)

# Of the batches that a routed layer sees, at most so many have more routed rows than planned.
_OVERFLOW = 0.05


@dataclasses.dataclass(frozen=True)
class Chunk:
    """What all layers are told about new tokens.

    Attributes:
      position_BT: the tokens' positions.
      added_B: tokens of each row that the cache takes, the first ones.
      routing: "predictor" or "router".
      sparse: whether MoBA layers choose blocks.
      fresh: whether all rows are empty: bool, or a traced scalar.
    """

    position_BT: Array
    added_B: Array
    routing: str
    sparse: bool
    fresh: bool | Array


def prefill_full(block: Block, layer: LayerCache, x_BTD, chunk: Chunk):
    """A layer that computes every token: (x_BTD, layer)."""
    count_B = chunk.position_BT[:, 0]
    k_BTKH, v_BTKH, raw_BTKH = _project(block, layer, x_BTD, chunk.position_BT, count_B)
    layer = _append(layer, count_B, chunk.added_B, k_BTKH, v_BTKH, raw_BTKH)
    delta_BTD = _finish(
        block, layer, x_BTD, chunk.position_BT, count_B, chunk.added_B, k_BTKH, v_BTKH, None, chunk
    )
    return x_BTD + delta_BTD, layer


def prefill_routed(mod: MixtureOfDepths, layer: LayerCache, x_BTD, chunk: Chunk):
    """A layer that computes the tokens it routes: (x_BTD, layer)."""
    batch, length, _ = x_BTD.shape
    valid_BT = jnp.arange(length) < chunk.added_B[:, None]
    logits_BT, wanted_BT = _decide(mod, x_BTD, chunk.routing)
    wanted_BT &= valid_BT
    taken_BT = wanted_BT & (layer.count_B[:, None] + jnp.cumsum(wanted_BT, axis=1) <= layer.slots)
    route = ops.route_where(taken_BT, logits_BT)
    added_B = jnp.sum(taken_BT, axis=1, dtype=jnp.int32)
    gate_BT = jnp.where(route.filled_BC, apply_gate(mod.gate, route.weight_BC), 0.0)
    position_BT = jnp.take_along_axis(chunk.position_BT, route.index_BC, axis=1)

    def first(slots):
        """The route of the first slots alone."""
        return dataclasses.replace(
            route,
            index_BC=route.index_BC[:, :slots],
            weight_BC=route.weight_BC[:, :slots],
            filled_BC=route.filled_BC[:, :slots],
        )

    def project(slots):
        x_BPD = ops.dispatch(x_BTD, first(slots))
        new = _project(mod.block, layer, x_BPD, position_BT[:, :slots], layer.count_B)
        rest = ((0, 0), (0, length - slots), (0, 0), (0, 0))
        return jax.tree.map(lambda x: jnp.pad(x, rest), new)

    planned = default_routed_slots(mod.capacity, length)
    fits = jnp.max(added_B) <= planned

    def in_slots(function):
        """Of the planned slots, or of all where more are taken."""
        if planned == length:
            return function(length)
        return lax.cond(fits, lambda: function(planned), lambda: function(length))

    new_BTKH = in_slots(project)
    layer = _append(layer, layer.count_B, added_B, *new_BTKH)

    def finish(slots):
        route = first(slots)
        x_BPD = ops.dispatch(x_BTD, route)
        gate_BP = gate_BT[:, :slots]
        on_mlp = mod.gate_on == "mlp"
        delta_BPD = _finish(
            mod.block,
            layer,
            x_BPD,
            position_BT[:, :slots],
            layer.count_B,
            added_B,
            *(x[:, :slots] for x in new_BTKH[:2]),
            gate_BP if on_mlp else None,
            chunk,
        )
        return ops.combine(x_BTD, delta_BPD, route, gate_BC=None if on_mlp else gate_BP)

    x_BTD = in_slots(finish)
    return x_BTD, _note(layer, added_B, chunk, wanted_BT)


def _step(
    block: Block,
    layer: LayerCache,
    x_B1D,
    position_B,
    count_B,
    taken_B,
    planned,
    sparse,
    gate_B1=None,
):
    """Computes the rows that are taken: (update [B, 1, D], layer).

    The cache is only read inside of the branches, and written where they are done: XLA would copy
    it otherwise.
    """
    batch = x_B1D.shape[0]

    def rows(rows_R):
        """Of the given rows, or of all."""
        x_R1D, position_R, count_R, gate_R1 = (
            a if rows_R is None or a is None else a[rows_R]
            for a in (x_B1D, position_B, count_B, gate_B1)
        )
        return _token(block, layer, x_R1D, position_R, count_R, sparse, gate_R1, rows_R)

    def every_row():
        return rows(None)

    def no_row():
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(every_row))

    def planned_rows():
        rows_R = jnp.argsort(~taken_B, stable=True)[:planned]
        return jax.tree.map(
            lambda none, some: none.at[rows_R].set(some, unique_indices=True),
            no_row(),
            rows(rows_R),
        )

    taken = jnp.sum(taken_B)
    if planned < batch:
        branch = (taken > 0).astype(jnp.int32) + (taken > planned)
        delta_B1D, *new_B1KH = lax.switch(branch, (no_row, planned_rows, every_row))
    else:
        delta_B1D, *new_B1KH = lax.cond(taken > 0, every_row, no_row)
    return delta_B1D, _append(layer, count_B, taken_B.astype(jnp.int32), *new_B1KH)


def step_full(block: Block, layer: LayerCache, x_B1D, new: Chunk):
    """A layer that computes every token, one a row: (x_B1D, layer)."""
    length_B, batch = new.position_BT[:, 0], x_B1D.shape[0]
    delta_B1D, layer = _step(
        block, layer, x_B1D, length_B, length_B, new.added_B > 0, batch, new.sparse
    )
    return x_B1D + delta_B1D, layer


def step_routed(mod: MixtureOfDepths, layer: LayerCache, x_B1D, new: Chunk):
    """A layer that computes the tokens it routes, one a row at most: (x_B1D, layer)."""
    batch = x_B1D.shape[0]
    length_B, active_B = new.position_BT[:, 0], new.added_B > 0
    logits_B1, wanted_B1 = _decide(mod, x_B1D, new.routing)
    wanted_B = wanted_B1[:, 0] & active_B
    taken_B = wanted_B & (layer.count_B < layer.slots)
    gate_B1 = apply_gate(mod.gate, logits_B1)
    on_mlp = mod.gate_on == "mlp"
    delta_B1D, layer = _step(
        mod.block,
        layer,
        x_B1D,
        length_B,
        layer.count_B,
        taken_B,
        most_rows(batch, mod.capacity),
        new.sparse,
        gate_B1 if on_mlp else None,
    )
    index_B1 = jnp.zeros((batch, 1), jnp.int32)
    route = ops.Route(index_B1, logits_B1, taken_B[:, None], taken_B[:, None])
    x_B1D = ops.combine(x_B1D, delta_B1D, route, gate_BC=None if on_mlp else gate_B1)
    return x_B1D, _note(layer, taken_B.astype(jnp.int32), new, wanted_B1)


def most_rows(batch: int, capacity: float) -> int:
    """Rows that a routed layer computes at once: rarely do more route their token.

    The least number that at most 5 % of batches exceed, if each row routes a share `capacity` of
    its tokens, independently.
    """
    within = 0.0
    for rows in range(batch):
        ways = math.lgamma(batch + 1) - math.lgamma(rows + 1) - math.lgamma(batch - rows + 1)
        rest = math.log1p(-capacity) if capacity < 1 else -math.inf
        within += math.exp(ways + rows * math.log(capacity) + (batch - rows) * rest)
        if within >= 1 - _OVERFLOW:
            return max(rows, 1)
    return batch


def _decide(mod: MixtureOfDepths, x_BTD, routing):
    """The router's logits [B, T], and the tokens that are to be computed."""
    logits_BT, predictor_BT = mod.scores(x_BTD)
    return logits_BT, (predictor_BT if routing == "predictor" else logits_BT) > 0


def _note(layer: LayerCache, taken_B, new: Chunk, wanted_BT) -> LayerCache:
    """Counts the tokens taken, and keeps which ones were wanted."""
    valid_BT = jnp.arange(wanted_BT.shape[1]) < new.added_B[:, None]
    index_BT = jnp.where(valid_BT, new.position_BT, layer.wanted_BT.shape[1])
    wanted_BT = jax.vmap(lambda old_T, i_T, new_T: old_T.at[i_T].set(new_T, mode="drop"))(
        layer.wanted_BT, index_BT, wanted_BT
    )
    return dataclasses.replace(layer, count_B=layer.count_B + taken_B, wanted_BT=wanted_BT)


def _token(block: Block, layer, x_R1D, position_R, count_R, sparse, gate_R1, rows_R):
    """One new token a row: (update [R, 1, D], key, value, raw key)."""
    attention = block.attention
    position_R1 = position_R[:, None]
    k_R1KH, v_R1KH, raw_R1KH = _project(block, layer, x_R1D, position_R1, count_R, rows_R)
    q_R1NH = attention.queries(block.attention_norm(x_R1D), position_R1)
    y_R1NH = _attend_cache(
        attention, layer, q_R1NH, count_R[:, None], sparse, (k_R1KH, v_R1KH), rows_R
    )
    delta_R1D = block.after_attention(x_R1D, attention.output(y_R1NH), gate_R1)
    return delta_R1D, k_R1KH, v_R1KH, raw_R1KH


def _project(block: Block, layer: LayerCache, x_BTD, position_BT, count_B, rows_B=None):
    """What the cache takes of tokens: keys, values, and raw keys or None, [B, T, K, H]."""
    attention = block.attention
    h_BTD = block.attention_norm(x_BTD)
    raw_BTKH = attention.raw_keys(h_BTD)
    if layer.raw_keys_BKSH is None:
        k_BTKH = attention.finish_keys(raw_BTKH, position_BT)
        return k_BTKH, attention.values(h_BTD), None
    before_BLKH = _last_raw_keys(
        layer.raw_keys_BKSH, count_B, attention.key_convolution.width - 1, rows_B
    )
    k_BTKH = attention.finish_keys(raw_BTKH, position_BT, before_BLKH=before_BLKH)
    return k_BTKH, attention.values(h_BTD), raw_BTKH


def _last_raw_keys(raw_BKSH, count_B, number: int, rows_B):
    """The last raw keys [B, L, K, H] of each row, zeros where there are none."""
    if rows_B is None:
        rows_B = jnp.arange(raw_BKSH.shape[0])
    slot_BL = count_B[:, None] + jnp.arange(-number, 0)
    raw_BLKH = raw_BKSH[rows_B[:, None], :, jnp.maximum(slot_BL, 0)]
    return jnp.where((slot_BL >= 0)[..., None, None], raw_BLKH, 0)


def _append(layer: LayerCache, count_B, added_B, k_BTKH, v_BTKH, raw_BTKH) -> LayerCache:
    """Writes each row's first `added_B` tokens behind its `count_B`; count_B is the caller's."""
    t_T = jnp.arange(k_BTKH.shape[1], dtype=jnp.int32)
    slot_BT = jnp.where(t_T < added_B[:, None], count_B[:, None] + t_T, layer.slots)

    def write(x_BKSH, new_BTKH):
        return jax.vmap(lambda x_KSH, i, new: x_KSH.at[:, i].set(new, mode="drop"))(
            x_BKSH, slot_BT, jnp.swapaxes(new_BTKH, 1, 2)
        )

    k_BKSH = write(layer.k_BKSH, k_BTKH)
    key_sums_BKSH = layer.key_sums_BKSH
    if layer.block is not None:
        number_BJ, sums_BKJH = completed_block_sums(
            k_BKSH, layer.block, count_B, added_B, k_BTKH.shape[1]
        )
        key_sums_BKSH = jax.vmap(lambda x_KSH, i, new: x_KSH.at[:, i].set(new, mode="drop"))(
            key_sums_BKSH, number_BJ, sums_BKJH
        )
    raw_keys = layer.raw_keys_BKSH
    return dataclasses.replace(
        layer,
        k_BKSH=k_BKSH,
        v_BKSH=write(layer.v_BKSH, v_BTKH),
        key_sums_BKSH=key_sums_BKSH,
        raw_keys_BKSH=None if raw_keys is None else write(raw_keys, raw_BTKH),
    )


def _finish(
    block: Block,
    layer: LayerCache,
    x_BPD,
    position_BP,
    count_B,
    added_B,
    k_BPKH,
    v_BPKH,
    gate_BP,
    chunk: Chunk,
):
    """The update [B, P, D] of tokens that the cache holds, behind `count_B` others."""
    attention = block.attention
    q_BPNH = attention.queries(block.attention_norm(x_BPD), position_BP)
    p_P = jnp.arange(x_BPD.shape[1], dtype=jnp.int32)
    # Padding sees nothing.
    slot_BP = jnp.where(p_P < added_B[:, None], count_B[:, None] + p_P, -1)

    def parallel():
        return attention.attend(q_BPNH, k_BPKH, v_BPKH)

    def cached():
        return _attend_cache(attention, layer, q_BPNH, slot_BP, chunk.sparse)

    fresh = chunk.fresh if layer.block is not None and chunk.sparse else False
    if isinstance(fresh, bool):
        y_BPNH = parallel() if fresh else cached()
    else:
        y_BPNH = lax.cond(fresh, parallel, cached)
    return block.after_attention(x_BPD, attention.output(y_BPNH), gate_BP)


def _attend_cache(
    attention: Attention, layer: LayerCache, q_RCNH, slot_RC, sparse, own=None, rows_R=None
):
    """Attention of new tokens to the cache."""
    chosen_RNJC = None
    if layer.block is not None and sparse:
        sums = layer.key_sums_BKSH
        chosen_RNJC = choose_cached_blocks(
            q_RCNH,
            sums if rows_R is None else sums[rows_R],
            slot_RC,
            slots=layer.slots,
            block=layer.block,
            top_k=attention.top_k,
            sink_blocks=attention.sink_blocks,
            window_blocks=attention.window_blocks,
        )
    return cached_attention(
        q_RCNH,
        layer.k_BKSH,
        layer.v_BKSH,
        slot_RC,
        own=own,
        rows_R=rows_R,
        chosen_RNJC=chosen_RNJC,
        block=layer.block,
        soft_cap=attention.soft_cap,
    )
