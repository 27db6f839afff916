"""The causal forward pass through a cache: many tokens a row at once, or one.

Axes: B rows, T tokens of a chunk, D model width, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array

from modo.config import Routing
from modo.decode.cache import Cache
from modo.decode.checks import CachedAttention, check_call, check_chunk, check_step
from modo.decode.inputs import known, to_int32
from modo.decode.layers import Chunk, prefill_full, prefill_routed, step_full, step_routed
from modo.nn.decoder import Decoder


def prefill(
    model: Decoder,
    cache: Cache,
    tokens_BT: Array,
    lengths_B: Array,
    *,
    routing: Routing = "predictor",
    attention: CachedAttention = "sparse",
    last_only: bool = False,
    fresh: bool | None = None,
) -> tuple[Array, Cache]:
    """Takes the next tokens of each row into the cache: a whole prompt, or a chunk of one.

    Attention is to the cache, in pieces, so that memory does not grow with chunk times cache; where
    all rows are empty, MoBA is `modo.moba_attention`. Routed layers compute about as many tokens
    as they route.

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
      fresh: whether all rows are empty, where the caller knows it under jit, which spares
        compiling for the other case; None: found out.

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
    tokens_BT, lengths_B = to_int32("tokens", tokens_BT), to_int32("lengths", lengths_B)
    check_call(model, cache, routing, attention)
    check_chunk(model, cache, tokens_BT, lengths_B)
    if known(cache.length_B):
        fresh = not np.asarray(cache.length_B).any()
    graphdef, params = nnx.split(model)
    return _prefill(
        graphdef,
        params,
        cache,
        tokens_BT,
        lengths_B,
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
    gathered, up to a number that fewer than one batch in twenty exceeds; beyond it all are
    computed.

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
    tokens_B = to_int32("tokens", tokens_B)
    active_B = jnp.ones(tokens_B.shape, bool) if active_B is None else jnp.asarray(active_B)
    check_call(model, cache, routing, attention)
    check_step(model, cache, tokens_B, active_B)
    graphdef, params = nnx.split(model)
    return _step(
        graphdef,
        params,
        cache,
        tokens_B,
        active_B,
        routing=routing,
        sparse=attention == "sparse",
    )


@functools.partial(jax.jit, static_argnames=("graphdef", "routing", "sparse", "fresh", "last_only"))
def _prefill(graphdef, params, cache, tokens_BT, lengths_B, *, routing, sparse, fresh, last_only):
    model = nnx.merge(graphdef, params)
    length = tokens_BT.shape[1]
    if length == 0:
        shape = (cache.batch, *(() if last_only else (0,)), model.config.vocab_size)
        return jnp.zeros(shape, jnp.float32), cache
    given_BT = jnp.arange(length) < lengths_B[:, None]
    chunk = Chunk(
        position_BT=cache.length_B[:, None] + jnp.arange(length, dtype=jnp.int32),
        added_B=jnp.clip(lengths_B, 0, jnp.minimum(length, cache.max_length - cache.length_B)),
        routing=routing,
        sparse=sparse,
        fresh=fresh if fresh is not None else ~jnp.any(cache.length_B > 0),
    )
    x_BTD = model.embedding(jnp.where(given_BT, tokens_BT, 0))
    layers = []
    for number, layer in enumerate(cache.layers):
        function = prefill_full if layer.wanted_BT is None else prefill_routed
        x_BTD, layer = function(model.block(number), layer, x_BTD, chunk)
        layers.append(layer)
    outside_BT = given_BT & (chunk.position_BT >= cache.max_length)
    cache = Cache(tuple(layers), cache.length_B + chunk.added_B, cache.max_length)
    if not last_only:
        return jnp.where(outside_BT[..., None], jnp.nan, model.logits(x_BTD)), cache
    last_B1 = jnp.clip(lengths_B - 1, 0, length - 1)[:, None]
    x_B1D = jnp.take_along_axis(x_BTD, last_B1[..., None], axis=1)
    outside_B1 = jnp.take_along_axis(outside_BT, last_B1, axis=1)
    return jnp.where(outside_B1, jnp.nan, model.logits(x_B1D)[:, 0]), cache


@functools.partial(jax.jit, static_argnames=("graphdef", "routing", "sparse"))
def _step(graphdef, params, cache, tokens_B, active_B, *, routing, sparse):
    model = nnx.merge(graphdef, params)
    outside_B = active_B & (cache.length_B >= cache.max_length)
    new = Chunk(
        position_BT=cache.length_B[:, None],
        added_B=(active_B & ~outside_B).astype(jnp.int32),
        routing=routing,
        sparse=sparse,
        fresh=False,
    )
    x_B1D = model.embedding(jnp.where(active_B, tokens_B, 0)[:, None])
    layers = []
    for number, layer in enumerate(cache.layers):
        function = step_full if layer.wanted_BT is None else step_routed
        x_B1D, layer = function(model.block(number), layer, x_B1D, new)
        layers.append(layer)
    logits_BV = model.logits(x_B1D)[:, 0]
    cache = Cache(tuple(layers), cache.length_B + new.added_B, cache.max_length)
    return jnp.where(outside_B[:, None], jnp.nan, logits_BV), cache
