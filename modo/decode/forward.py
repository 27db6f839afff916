"""The causal forward pass through a cache: many tokens a row at once, or one.

Axes: B rows, T tokens of a chunk, R rows and P slots that a routed layer computes, K key heads,
S slots of the cache, H head width, D model width, V vocabulary.
"""

import dataclasses
import functools
import math
from typing import Literal, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from modo.config import Routing
from modo.decode.cache import Cache, LayerCache, default_routed_slots
from modo.nn.attention import Attention
from modo.nn.decoder import Block, Decoder, layer_kinds
from modo.nn.depth import MixtureOfDepths, apply_gate
from modo.ops import routing as ops
from modo.ops.attention import causal_attention
from modo.ops.cached_attention import (
    block_slots,
    cached_attention,
    choose_cached_blocks,
    completed_block_sums,
)

CachedAttention = Literal["sparse", "full"]

# Of the batches that a routed layer sees, at most so many have more routed rows than planned.
_OVERFLOW = 0.05


def prefill(
    model: Decoder,
    cache: Cache,
    tokens_BT: Array,
    lengths_B: Array,
    *,
    routing: Routing = "predictor",
    attention: CachedAttention = "sparse",
    last_only: bool = False,
) -> tuple[Array, Cache]:
    """Takes the next tokens of each row into the cache: a whole prompt, or a chunk of one.

    Where all rows are empty, attention is the parallel one of the modules; it is against the cache
    otherwise, in pieces, so that memory does not grow with chunk times cache.

    Args:
      model: a Decoder; one with scanned layers is faster after `Decoder.unstacked`.
      cache: from `init_cache`, or what the last call returned. Under `jax.jit` donate it, and it is
        updated in place.
      tokens_BT: int, in [0, vocab_size), left-aligned; what stands beyond a row's length is
        ignored.
      lengths_B: int, tokens of each row in this chunk, 0 .. T.
      routing: "predictor" or "router"; ignored by a model without routed layers.
      attention: "sparse": MoBA layers attend to the blocks that each token chooses, as in training;
        "full": to everything (the paper's way with generated tokens).
      last_only: return the logits of each row's last token of the chunk alone.

    Returns:
      (float32 logits [B, T, V], or [B, V] with last_only, cache). Logits beyond a row's length
      mean nothing. A token that comes after max_length tokens changes nothing, and its logits are
      NaN (outside of jit it is an error).

    Raises:
      ValueError: shapes or dtypes that disagree with the cache or with each other, a cache of
        another model, routing that is not causal or that the model lacks; and outside of jit,
        where values are known: tokens out of range, lengths out of range, more tokens than the
        cache holds.
    """
    tokens_BT, lengths_B = jnp.asarray(tokens_BT), jnp.asarray(lengths_B)
    _check_call(model, cache, routing, attention)
    _check_chunk(model, cache, tokens_BT, lengths_B)
    fresh = None
    if _known(cache.length_B):
        fresh = not bool(jnp.any(cache.length_B))
    graphdef, params = nnx.split(model)
    return _prefill(
        graphdef,
        params,
        cache,
        tokens_BT.astype(jnp.int32),
        lengths_B.astype(jnp.int32),
        routing=routing,
        sparse=attention == "sparse",
        fresh=fresh,
        last_only=last_only,
    )


def step(
    model: Decoder,
    cache: Cache,
    tokens_B: Array,
    *,
    routing: Routing = "predictor",
    attention: CachedAttention = "sparse",
    active_B: Array | None = None,
) -> tuple[Array, Cache]:
    """Takes one token of each row into the cache.

    A routed layer is skipped where no row routes its token. Of several rows those that do are
    gathered, as long as they are not more than planned; all are computed otherwise.

    Args:
      model, cache, routing, attention: as for `prefill`.
      tokens_B: int, in [0, vocab_size).
      active_B: bool, rows that take part; the others' cache does not change and their logits mean
        nothing. None: all.

    Returns:
      (float32 logits [B, V], cache). A row that holds max_length tokens stays as it is, and its
      logits are NaN (outside of jit it is an error).

    Raises:
      ValueError: as `prefill`.
    """
    tokens_B = jnp.asarray(tokens_B)
    active_B = jnp.ones(tokens_B.shape, bool) if active_B is None else jnp.asarray(active_B)
    _check_call(model, cache, routing, attention)
    _check_step(model, cache, tokens_B, active_B)
    graphdef, params = nnx.split(model)
    return _step(
        graphdef,
        params,
        cache,
        tokens_B.astype(jnp.int32),
        active_B,
        routing=routing,
        sparse=attention == "sparse",
    )


# --- Checks --------------------------------------------------------------------------------------


def _known(x: Array) -> bool:
    """Whether values can be looked at: outside of jit."""
    return not isinstance(x, jax.core.Tracer)


def _check_call(model: Decoder, cache: Cache, routing: str, attention: str) -> None:
    if routing not in ("predictor", "router"):
        raise ValueError(f"routing must be causal, predictor or router, got {routing!r}")
    if attention not in get_args(CachedAttention):
        raise ValueError(f"attention must be sparse or full, got {attention!r}")
    config, kinds = model.config, layer_kinds(model.config)
    depth = config.depth
    if routing == "predictor" and config.routed_layers and not depth.predictor:
        raise ValueError("routing 'predictor' needs a model with DepthConfig.predictor")
    if len(cache.layers) != len(kinds):
        raise ValueError(f"the cache has {len(cache.layers)} layers, the model has {len(kinds)}")
    heads = (config.kv_heads, config.head_width)
    for number, (layer, kind) in enumerate(zip(cache.layers, kinds, strict=True)):
        shape = layer.k_BKSH.shape
        if (shape[1], shape[3]) != heads:
            raise ValueError(
                f"layer {number} has {heads[0]} key heads of width {heads[1]}, but its cache is "
                f"for {shape[1]} of width {shape[3]}"
            )
        if (layer.wanted_BT is not None) != (kind.capacity is not None):
            raise ValueError(f"of layer {number}, only one of cache and model is routed")
        block = block_slots(layer.slots, config.moba.block_size)[1] if kind.moba else None
        if block != layer.block:
            raise ValueError(
                f"layer {number} attends in blocks of {block}, but its cache has blocks of "
                f"{layer.block}"
            )


def _check_chunk(model: Decoder, cache: Cache, tokens_BT: Array, lengths_B: Array) -> None:
    batch = cache.batch
    if tokens_BT.ndim != 2 or tokens_BT.shape[0] != batch:
        raise ValueError(f"tokens must be [B, T] with B {batch}, got {tokens_BT.shape}")
    if lengths_B.shape != (batch,):
        raise ValueError(f"lengths must be [B] = ({batch},), got {lengths_B.shape}")
    _check_integers(tokens=tokens_BT, lengths=lengths_B)
    if not _known(lengths_B):
        return
    length = tokens_BT.shape[1]
    shortest, longest = int(lengths_B.min()), int(lengths_B.max())
    if shortest < 0 or longest > length:
        raise ValueError(f"lengths must be in [0, {length}], got {shortest} to {longest}")
    _check_room(cache, lengths_B)
    _check_tokens(model, tokens_BT, jnp.arange(length) < lengths_B[:, None])


def _check_step(model: Decoder, cache: Cache, tokens_B: Array, active_B: Array) -> None:
    batch = cache.batch
    if tokens_B.shape != (batch,):
        raise ValueError(f"tokens must be [B] = ({batch},), got {tokens_B.shape}")
    if active_B.shape != (batch,) or active_B.dtype != bool:
        raise ValueError(
            f"active must be bool [B] = ({batch},), got {active_B.dtype} {active_B.shape}"
        )
    _check_integers(tokens=tokens_B)
    if _known(active_B):
        _check_room(cache, active_B.astype(jnp.int32))
        _check_tokens(model, tokens_B, active_B)


def _check_integers(**arrays: Array) -> None:
    for name, x in arrays.items():
        if not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers, got {x.dtype}")


def _check_room(cache: Cache, added_B: Array) -> None:
    if not _known(cache.length_B):
        return
    total_B = cache.length_B + added_B
    row = int(total_B.argmax())
    if total_B[row] > cache.max_length:
        raise ValueError(
            f"row {row} has {int(cache.length_B[row])} tokens and {int(added_B[row])} more, but "
            f"the cache holds {cache.max_length}"
        )


def _check_tokens(model: Decoder, tokens: Array, used: Array) -> None:
    if not _known(tokens):
        return
    vocab = model.config.vocab_size
    bad = used & ((tokens < 0) | (tokens >= vocab))
    if bool(bad.any()):
        raise ValueError(f"tokens must be in [0, {vocab}), got {int(tokens[bad][0])}")


# --- Many tokens ---------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("graphdef", "routing", "sparse", "fresh", "last_only"))
def _prefill(graphdef, params, cache, tokens_BT, lengths_B, *, routing, sparse, fresh, last_only):
    model = nnx.merge(graphdef, params)
    length = tokens_BT.shape[1]
    if length == 0:
        shape = (cache.batch, *(() if last_only else (0,)), model.config.vocab_size)
        return jnp.zeros(shape, jnp.float32), cache
    given_BT = jnp.arange(length) < lengths_B[:, None]
    chunk = _Chunk(
        position_BT=cache.length_B[:, None] + jnp.arange(length, dtype=jnp.int32),
        added_B=jnp.clip(lengths_B, 0, cache.max_length - cache.length_B),
        routing=routing,
        sparse=sparse,
        fresh=fresh if fresh is not None else ~jnp.any(cache.length_B > 0),
    )
    x_BTD = model.embedding(jnp.where(given_BT, tokens_BT, 0))
    layers = []
    for number, layer in enumerate(cache.layers):
        block = model.block(number)
        function = _prefill_routed if layer.wanted_BT is not None else _prefill_full
        x_BTD, layer = function(block, layer, x_BTD, chunk)
        layers.append(layer)
    outside_BT = given_BT & (chunk.position_BT >= cache.max_length)
    cache = Cache(tuple(layers), cache.length_B + chunk.added_B, cache.max_length)
    if not last_only:
        return jnp.where(outside_BT[..., None], jnp.nan, model.logits(x_BTD)), cache
    last_B1 = jnp.clip(lengths_B - 1, 0, length - 1)[:, None]
    x_B1D = jnp.take_along_axis(x_BTD, last_B1[..., None], axis=1)
    outside_B1 = jnp.take_along_axis(outside_BT, last_B1, axis=1)
    return jnp.where(outside_B1, jnp.nan, model.logits(x_B1D)[:, 0]), cache


@dataclasses.dataclass(frozen=True)
class _Chunk:
    """What all layers are told about a chunk of tokens.

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


def _prefill_full(block: Block, layer: LayerCache, x_BTD, chunk: _Chunk):
    """A layer that computes every token: (x_BTD, layer)."""
    count_B = chunk.position_BT[:, 0]
    k_BTKH, v_BTKH, raw_BTKH = _project(block, layer, x_BTD, chunk.position_BT, count_B)
    layer = _append(layer, count_B, chunk.added_B, k_BTKH, v_BTKH, raw_BTKH)
    delta_BTD = _finish(
        block, layer, x_BTD, chunk.position_BT, count_B, chunk.added_B, k_BTKH, v_BTKH, None, chunk
    )
    return x_BTD + delta_BTD, layer


def _prefill_routed(mod: MixtureOfDepths, layer: LayerCache, x_BTD, chunk: _Chunk):
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
    max_length = layer.wanted_BT.shape[1]
    index_BT = jnp.where(valid_BT, chunk.position_BT, max_length)
    return x_BTD, dataclasses.replace(
        layer,
        count_B=layer.count_B + added_B,
        wanted_BT=jax.vmap(lambda w, i, new: w.at[i].set(new, mode="drop"))(
            layer.wanted_BT, index_BT, wanted_BT
        ),
    )


def _decide(mod: MixtureOfDepths, x_BTD, routing):
    """The router's logits [B, T], and the tokens that are to be computed."""
    logits_BT, predictor_BT = mod.scores(x_BTD)
    return logits_BT, (predictor_BT if routing == "predictor" else logits_BT) > 0


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
    chunk: _Chunk,
):
    """The update [B, P, D] of tokens that the cache holds, behind `count_B` others."""
    attention = block.attention
    q_BPNH = attention.queries(block.attention_norm(x_BPD), position_BP)
    p_P = jnp.arange(x_BPD.shape[1], dtype=jnp.int32)
    # Padding sees nothing.
    slot_BP = jnp.where(p_P < added_B[:, None], count_B[:, None] + p_P, -1)

    def parallel():
        if attention.block_size is not None and not chunk.sparse:
            return causal_attention(q_BPNH, k_BPKH, v_BPKH, soft_cap=attention.soft_cap)
        return attention.attend(q_BPNH, k_BPKH, v_BPKH)

    def cached():
        return _attend_cache(attention, layer, q_BPNH, slot_BP, chunk.sparse)

    if isinstance(chunk.fresh, bool):
        y_BPNH = parallel() if chunk.fresh else cached()
    else:
        y_BPNH = lax.cond(chunk.fresh, parallel, cached)
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


# --- One token -----------------------------------------------------------------------------------


@functools.partial(jax.jit, static_argnames=("graphdef", "routing", "sparse"))
def _step(graphdef, params, cache, tokens_B, active_B, *, routing, sparse):
    model = nnx.merge(graphdef, params)
    outside_B = active_B & (cache.length_B >= cache.max_length)
    added_B = active_B & ~outside_B
    x_B1D = model.embedding(jnp.where(active_B, tokens_B, 0)[:, None])
    layers = []
    for number, layer in enumerate(cache.layers):
        block = model.block(number)
        if layer.wanted_BT is None:
            delta_B1D, *new = _token(block, layer, x_B1D, cache.length_B, cache.length_B, sparse)
            layer = _append(layer, cache.length_B, added_B.astype(jnp.int32), *new)
            x_B1D += delta_B1D
        else:
            x_B1D, layer = _step_routed(
                block, layer, x_B1D, cache.length_B, added_B, routing, sparse
            )
        layers.append(layer)
    logits_BV = model.logits(x_B1D)[:, 0]
    cache = Cache(tuple(layers), cache.length_B + added_B, cache.max_length)
    return jnp.where(outside_B[:, None], jnp.nan, logits_BV), cache


def _token(block: Block, layer, x_R1D, position_R, count_R, sparse, *, gate_R1=None, rows_R=None):
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


def _step_routed(mod: MixtureOfDepths, layer, x_B1D, length_B, active_B, routing, sparse):
    """A routed layer: (x_B1D, layer). The cache is only read inside of the branches."""
    batch = x_B1D.shape[0]
    logits_B1, wanted_B1 = _decide(mod, x_B1D, routing)
    wanted_B = wanted_B1[:, 0] & active_B
    taken_B = wanted_B & (layer.count_B < layer.slots)
    gate_B1 = apply_gate(mod.gate, logits_B1)
    on_mlp = mod.gate_on == "mlp"

    def rows(rows_R):
        """Of the given rows, or of all."""
        x, position, count, gate = (
            a if rows_R is None else a[rows_R] for a in (x_B1D, length_B, layer.count_B, gate_B1)
        )
        return _token(
            mod.block,
            layer,
            x,
            position,
            count,
            sparse,
            gate_R1=gate if on_mlp else None,
            rows_R=rows_R,
        )

    def every_row():
        return rows(None)

    def no_row():
        return jax.tree.map(lambda a: jnp.zeros(a.shape, a.dtype), jax.eval_shape(every_row))

    planned = planned_rows(batch, mod.capacity)

    def planned_row():
        rows_R = jnp.argsort(~taken_B, stable=True)[:planned]
        return jax.tree.map(
            lambda none, some: none.at[rows_R].set(some, unique_indices=True),
            no_row(),
            rows(rows_R),
        )

    taken = jnp.sum(taken_B)
    if planned < batch:
        branch = (taken > 0).astype(jnp.int32) + (taken > planned)
        new = lax.switch(branch, (no_row, planned_row, every_row))
    else:
        new = lax.cond(taken > 0, every_row, no_row)
    delta_B1D, *new_B1KH = new
    layer = _append(layer, layer.count_B, taken_B.astype(jnp.int32), *new_B1KH)
    route = ops.Route(
        jnp.zeros((batch, 1), jnp.int32), logits_B1, taken_B[:, None], taken_B[:, None]
    )
    x_B1D = ops.combine(x_B1D, delta_B1D, route, gate_BC=None if on_mlp else gate_B1)
    index_B = jnp.where(active_B, length_B, layer.wanted_BT.shape[1])
    return x_B1D, dataclasses.replace(
        layer,
        count_B=layer.count_B + taken_B,
        wanted_BT=layer.wanted_BT.at[jnp.arange(batch), index_B].set(wanted_B, mode="drop"),
    )


def planned_rows(batch: int, capacity: float) -> int:
    """Rows that a routed layer computes at once: rarely do more route their token.

    The least number that at most 5 % of batches exceed, if each row routes a share `capacity` of
    its tokens, independently.
    """
    within = 0.0
    for rows in range(batch + 1):
        within += math.comb(batch, rows) * capacity**rows * (1 - capacity) ** (batch - rows)
        if within >= 1 - _OVERFLOW:
            return max(rows, 1)
    return batch
