"""Mixture of Block Attention (Lu et al. 2025, arXiv 2502.13189)."""

import functools
import math
import operator

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas.moba import gpu, plan, reference, tpu, xla
from kernels_pallas.moba.xla_layout import layout_flops, make_layout
from kernels_pallas.platform import Kernel, by_platform, on_platform

# Implementations that are kernels: their platform and module.
_KERNELS = {"pallas_tpu": ("tpu", tpu), "pallas_gpu": ("cuda", gpu)}
IMPLEMENTATIONS = ("reference", "xla", *_KERNELS)
_PALLAS_DTYPES = (jnp.float32, jnp.bfloat16)


def _check_blocks(block_size: int, top_k: int) -> None:
    for name, value in (("block_size", block_size), ("top_k", top_k)):
        try:
            operator.index(value)
        except TypeError:
            raise ValueError(f"{name} must be an integer, got {value!r}") from None
    if block_size < 1:
        raise ValueError(f"block_size must be at least 1, got {block_size}")
    if top_k < 1:
        raise ValueError(f"top_k counts a query's own block, so it must be at least 1, got {top_k}")


def _check_fixed(top_k: int, sink_blocks: int, window_blocks: int) -> None:
    for name, value in (("sink_blocks", sink_blocks), ("window_blocks", window_blocks)):
        try:
            negative = operator.index(value) < 0
        except TypeError:
            negative = True
        if negative:
            raise ValueError(f"{name} must be an integer of at least 0, got {value!r}")
    if sink_blocks + window_blocks > top_k - 1:
        raise ValueError(
            f"sink_blocks {sink_blocks} + window_blocks {window_blocks} are more than the "
            f"{top_k - 1} blocks that top_k {top_k} leaves beside a query's own"
        )


def _check_numbers(scale: float, soft_cap: float | None) -> None:
    if not math.isfinite(scale):
        raise ValueError(f"scale must be finite, got {scale}")
    if soft_cap is not None and not 0 < soft_cap < math.inf:
        raise ValueError(f"soft_cap must be positive and finite, got {soft_cap}")


def _check_shapes(query, key, value, segment_ids) -> None:
    shapes = f"query {query.shape}, key {key.shape}, value {value.shape}"
    if not query.ndim == key.ndim == value.ndim == 4:
        raise ValueError(f"query, key and value must have four axes [B, T, heads, width]: {shapes}")
    if not query.shape[:2] == key.shape[:2] == value.shape[:2]:
        raise ValueError(f"batch and length must agree: {shapes}")
    if 0 in (*query.shape, *value.shape):
        raise ValueError(f"no axis may be empty: {shapes}")
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise ValueError(f"{name} must be floating point, got {x.dtype}")
    if key.shape[2] != value.shape[2]:
        raise ValueError(
            f"key and value must have as many heads, got {key.shape[2]} and {value.shape[2]}: "
            f"{shapes}"
        )
    if query.shape[2] % key.shape[2]:
        raise ValueError(
            f"the {key.shape[2]} key heads must divide the {query.shape[2]} query heads: {shapes}"
        )
    if query.shape[3] != key.shape[3]:
        raise ValueError(
            f"query and key must be as wide, got {query.shape[3]} and {key.shape[3]}: {shapes}"
        )
    if segment_ids is None:
        return
    if segment_ids.shape != query.shape[:2]:
        raise ValueError(f"segment_ids must be [B, T] = {query.shape[:2]}, got {segment_ids.shape}")
    if not jnp.issubdtype(segment_ids.dtype, jnp.integer):
        raise ValueError(f"segment_ids must be integers, got {segment_ids.dtype}")


def _without_padding(x_BTNH: jax.Array, segment_ids_BT: jax.Array | None) -> jax.Array:
    if segment_ids_BT is None:
        return x_BTNH
    return jnp.where((segment_ids_BT != 0)[:, :, None, None], x_BTNH, 0)


def moba_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    block_size: int,
    top_k: int,
    scale: float | None = None,
    segment_ids: jax.Array | None = None,
    soft_cap: float | None = None,
    sink_blocks: int = 0,
    window_blocks: int = 0,
    implementation: str | None = None,
) -> jax.Array:
    """Causal attention to a query's own block of keys and to its best few earlier blocks.

    A block's score for a query (one head, one token) is the query times the mean of the block's
    keys. The own block is always attended, causally; of the blocks wholly before it the best
    top_k - 1 are attended in full, under one softmax. Of equal scores the earliest block wins. The
    choice is not differentiated, and neither scale nor soft_cap changes it.

    Under `jax.checkpoint` the policy `jax.checkpoint_policies.save_only_these_names(
    "moba_chosen_blocks")` keeps the choice, so that it is not made again.

    `kernels_pallas.moba.sharded.sharded_moba_attention`, which is also
    `modo.ops.sharded_moba_attention`, has it for several devices.

    Args:
      query: [B, T, N, H], float.
      key: [B, T, K, H], where K divides N: query head n uses key head n // (N / K).
      value: [B, T, K, Hv].
      block_size: keys a block. Any block_size works with any T.
      top_k: blocks a query attends to, its own included: 1 is block-diagonal causal attention, and
        as many as there are is full causal attention.
      scale: multiplies the scores of attention, a number; None: H ** -0.5.
      segment_ids: [B, T], integers. Runs of equal values are documents, which do not see each
        other; blocks count from a run's first token. 0 is padding: it selects nothing, is never
        selected and yields zeros, whatever its query, key and value hold.
      soft_cap: scores of attention become soft_cap * tanh(scores / soft_cap), after scale; a
        number.
      sink_blocks: of the top_k - 1 chosen blocks, so many are the first of the query's document,
        whatever their scores.
      window_blocks: so many are the last before the query's own. With sink_blocks +
        window_blocks = top_k - 1 nothing is scored: attention to a sliding window of blocks, with
        sinks (the paper's section 2.2 has both as fixed gates).
      implementation: "xla"; "pallas_tpu" or "pallas_gpu" (NVIDIA), interpreted where there is no
        such device; "reference", a dense mask for tests, with memory for T x T; None: the kernels
        of the platform that the code is lowered for where it has some, in float32 and bfloat16, and
        "xla" elsewhere and where the compiler cuts the program over devices by itself.

    Returns:
      [B, T, N, Hv] in query's dtype. Softmax and sums are in float32 at least.

    Raises:
      ValueError: block_size or top_k below 1 or no integer, more sink_blocks and window_blocks
        than top_k leaves, scale or soft_cap not finite, soft_cap
        not positive, shapes that disagree or are empty, an unknown implementation, or a dtype that
        it does not take.

    References:
      Lu et al. 2025, "MoBA: Mixture of Block Attention for Long-Context LLMs", arXiv 2502.13189,
      Eq. 2 to 8 and Algorithm 1.
    """
    call, q_BTNH, k_BTKH, v_BTKE = _prepare(
        query,
        key,
        value,
        segment_ids,
        implementation,
        block_size=block_size,
        top_k=top_k,
        scale=scale,
        soft_cap=soft_cap,
        sink_blocks=sink_blocks,
        window_blocks=window_blocks,
    )
    if implementation == "reference":
        out = reference.attention(
            q_BTNH,
            k_BTKH,
            v_BTKE,
            block_size=call.block_size,
            top_k=min(top_k, query.shape[1]),
            scale=call.scale,
            segment_ids_BT=segment_ids,
            soft_cap=soft_cap,
            sinks=sink_blocks,
            window=window_blocks,
        )
    else:
        out = _attend(implementation, call, q_BTNH, k_BTKH, v_BTKE, segment_ids)
    return _without_padding(out.astype(query.dtype), segment_ids)


def _prepare(
    query,
    key,
    value,
    segment_ids,
    implementation,
    *,
    block_size,
    top_k,
    scale=None,
    soft_cap=None,
    sink_blocks=0,
    window_blocks=0,
) -> tuple[plan.Call, jax.Array, jax.Array, jax.Array]:
    """Checks all arguments; the call, and its arrays of one dtype without what padding holds."""
    _check_blocks(block_size, top_k)
    _check_fixed(top_k, sink_blocks, window_blocks)
    _check_shapes(query, key, value, segment_ids)
    if implementation is not None and implementation not in IMPLEMENTATIONS:
        raise ValueError(
            f"implementation {implementation!r} is none of {', '.join(map(repr, IMPLEMENTATIONS))}"
        )
    scale = query.shape[3] ** -0.5 if scale is None else float(scale)
    _check_numbers(scale, soft_cap)
    dtype = jnp.result_type(query, key, value)
    if implementation in _KERNELS and dtype not in _PALLAS_DTYPES:
        raise ValueError(f"{implementation} takes float32 and bfloat16, got {dtype}")
    # Blocks longer than the row, and more of them than tokens, are no different from these.
    T = query.shape[1]
    call = plan.make_call(
        T,
        min(block_size, T),
        min(top_k, T),
        segment_ids is None,
        scale,
        soft_cap,
        sinks=sink_blocks,
        window=window_blocks,
    )
    return call, *(_without_padding(x, segment_ids).astype(dtype) for x in (query, key, value))


def _attend(implementation, call: plan.Call, q_BTNH, k_BTKH, v_BTKE, segment_ids_BT) -> jax.Array:
    """MoBA of checked arguments, [B, T, N, E]."""
    B, T, N, _ = q_BTNH.shape
    blocks = plan.find_blocks(T, call.block_size, segment_ids_BT)
    chosen_BNJT = jnp.zeros((B, N, 0, T), jnp.int32)
    if call.choices:
        chosen_BNJT = _choose(implementation, call, q_BTNH, k_BTKH, blocks)
        # Named where remat policies see it: the backward pass must use the very same blocks.
        chosen_BNJT = checkpoint_name(chosen_BNJT, "moba_chosen_blocks")
    return _attention(implementation, call, q_BTNH, k_BTKH, v_BTKE, chosen_BNJT, blocks)


def _kernel(module, name: str, call: plan.Call) -> Kernel:
    # How a TPU attends depends on its generation.
    by_device = module is tpu and name != "choose"
    return Kernel(getattr(module, name), (call,), by_device=by_device)


def _run(implementation, name: str, call: plan.Call, out_shapes, *args):
    """What the implementation's function `name` makes of the arguments."""
    in_xla = functools.partial(getattr(plan if name == "choose" else xla, name), call)
    if implementation == "xla" or args[0].dtype not in _PALLAS_DTYPES:
        return in_xla(*args)
    if implementation is None:
        kernels = {platform: _kernel(module, name, call) for platform, module in _KERNELS.values()}
        return by_platform(kernels, in_xla, out_shapes, *args)
    platform, module = _KERNELS[implementation]
    return on_platform(platform, _kernel(module, name, call), out_shapes, *args)


def _choose(implementation, call: plan.Call, q_BTNH, k_BTKH, blocks: plan.Blocks) -> jax.Array:
    """Numbers of the chosen blocks, [B, N, J, T]; -1 where there are no more."""
    if call.fixed:
        return plan.fixed_choice(call, q_BTNH.shape[0], q_BTNH.shape[2], blocks)
    q_BTNH, k_BTKH = lax.stop_gradient((q_BTNH, k_BTKH))
    k_BKTH = jnp.swapaxes(k_BTKH, 1, 2)
    c_BKSH = plan.centroids(plan.cut_blocks(k_BKTH, blocks, call.block_size, call.aligned))
    B, T, N, _ = q_BTNH.shape
    chosen = jax.ShapeDtypeStruct((B, N, call.choices, T), jnp.int32)
    return _run(implementation, "choose", call, chosen, q_BTNH, c_BKSH, blocks)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attention(implementation, call, q_BTNH, k_BTKH, v_BTKE, chosen_BNJT, blocks):
    return _forward(implementation, call, q_BTNH, k_BTKH, v_BTKE, chosen_BNJT, blocks)[0]


def _forward(implementation, call, *inputs):
    o, top, inverse = _run_forward(implementation, call, *inputs)
    return o, (*inputs, o, top, inverse)


def _run_forward(implementation, call, q_BTNH, k_BTKH, v_BTKE, *rest):
    """What `xla.forward` returns."""
    B, T, N, _ = q_BTNH.shape
    stat = jax.ShapeDtypeStruct((B, N, T), jnp.promote_types(q_BTNH.dtype, jnp.float32))
    out = jax.ShapeDtypeStruct((B, T, N, v_BTKE.shape[3]), q_BTNH.dtype)
    return _run(implementation, "forward", call, (out, stat, stat), q_BTNH, k_BTKH, v_BTKE, *rest)


def _backward(implementation, call, saved, do_BTNE):
    _, k, v, *_ = saved
    dq, dk, dv = _run_backward(implementation, call, *saved, do_BTNE)
    return dq, dk.astype(k.dtype), dv.astype(v.dtype), None, None


def _run_backward(implementation, call, q_BTNH, k_BTKH, v_BTKE, *rest):
    """What `xla.backward` returns."""
    dq = jax.ShapeDtypeStruct(q_BTNH.shape, q_BTNH.dtype)
    dk, dv = (
        jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32))
        for x in (k_BTKH, v_BTKE)
    )
    return _run(implementation, "backward", call, (dq, dk, dv), q_BTNH, k_BTKH, v_BTKE, *rest)


_attention.defvjp(_forward, _backward)


def choose_blocks(
    query: jax.Array,
    key: jax.Array,
    *,
    block_size: int,
    top_k: int,
    segment_ids: jax.Array | None = None,
    sink_blocks: int = 0,
    window_blocks: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """The earlier blocks that `moba_attention` attends to, for pictures and statistics.

    Args: as for `moba_attention`.

    Returns:
      start_BTNJ: int32, the first token of each of the J = top_k - 1 chosen blocks, best first; the
        own block is not among them. 0 where a query has fewer earlier blocks than J.
      valid_BTNJ: bool, where there is a block.

    Raises:
      ValueError: block_size or top_k below 1, or shapes that disagree.
    """
    _check_blocks(block_size, top_k)
    _check_fixed(top_k, sink_blocks, window_blocks)
    _check_shapes(query, key, key, segment_ids)
    B, T, N, _ = query.shape
    J = top_k - 1
    block_size, top_k = min(block_size, T), min(top_k, T)
    call = plan.make_call(
        T,
        block_size,
        top_k,
        segment_ids is None,
        path="grouped",
        sinks=sink_blocks,
        window=window_blocks,
    )
    if call.choices == 0:
        return jnp.zeros((B, T, N, J), jnp.int32), jnp.zeros((B, T, N, J), bool)
    query, key = (_without_padding(x, segment_ids) for x in (query, key))
    blocks = plan.find_blocks(T, block_size, segment_ids)
    chosen_BTNJ = jnp.transpose(_choose(None, call, query, key, blocks), (0, 3, 1, 2))
    chosen_BTNJ = jnp.pad(
        chosen_BTNJ, ((0, 0), (0, 0), (0, 0), (0, J - call.choices)), constant_values=-1
    )
    start_BS = jnp.broadcast_to(blocks.start_BS, (B, call.candidates))
    start_BTNJ = jax.vmap(lambda start_S, i: start_S[i])(start_BS, jnp.maximum(chosen_BTNJ, 0))
    valid_BTNJ = chosen_BTNJ >= 0
    return jnp.where(valid_BTNJ, start_BTNJ, 0), valid_BTNJ


def dot_flops(
    *,
    batch: int,
    length: int,
    heads: int,
    kv_heads: int,
    head_width: int,
    value_width: int | None = None,
    block_size: int,
    top_k: int,
    sink_blocks: int = 0,
    window_blocks: int = 0,
    segments: bool = False,
) -> tuple[int, int]:
    """FLOPs of the matrix products that implementation "xla" executes, 2 M N K each.

    Scoring of blocks, padding of tiles and masked products count, for they are executed.

    Args:
      batch, length, heads, kv_heads, head_width, value_width: B, T, N, K, H and Hv of
        `moba_attention`; value_width None: head_width.
      block_size, top_k, sink_blocks, window_blocks: as for `moba_attention`.
      segments: whether segment_ids are given.

    Returns:
      (forward, forward and backward).

    Raises:
      ValueError: sizes that are not positive, or kv_heads that do not divide heads.
    """
    _check_blocks(block_size, top_k)
    _check_fixed(top_k, sink_blocks, window_blocks)
    value_width = head_width if value_width is None else value_width
    shape = (batch, length, heads, kv_heads, head_width, value_width)
    if min(shape) < 1 or heads % kv_heads:
        raise ValueError(
            "batch, length, heads, kv_heads, head_width and value_width must be positive, and "
            f"kv_heads divide heads, got {shape}"
        )
    block_size, top_k = min(block_size, length), min(top_k, length)
    sizes = {
        "batch": batch,
        "length": length,
        "kv_heads": kv_heads,
        "groups": heads // kv_heads,
        "key_width": head_width,
        "value_width": value_width,
    }
    call = plan.make_call(
        length, block_size, top_k, not segments, sinks=sink_blocks, window=window_blocks
    )
    forward, backward = layout_flops(make_layout(call, **sizes), **sizes)
    return forward, forward + backward
