"""Generation: prompts go into a cache, then one token a row after another, in one compiled loop.

Axes: B rows, T tokens of the longest prompt, N new tokens, V vocabulary.
"""

import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from modo.config import Routing
from modo.decode.cache import Cache, init_cache
from modo.decode.checks import CachedAttention, check_call
from modo.decode.forward import prefill, step
from modo.decode.sampling import Sampling, draw
from modo.nn.decoder import Decoder


class _State(NamedTuple):
    """Between two tokens.

    Attributes:
      cache: holds all tokens but the last of each row.
      token_B: that one.
      done_B: rows that drew a stop token.
      count: tokens drawn so far.
    """

    cache: Cache
    token_B: Array
    done_B: Array
    count: Array


class _Options(NamedTuple):
    """What is static, beside the model's shape."""

    routing: Routing
    attention: CachedAttention
    sampling: Sampling


def generate(
    model: Decoder,
    prompts_BT: Array,
    lengths_B: Array,
    *,
    max_new_tokens: int,
    routing: Routing = "predictor",
    attention: CachedAttention = "sparse",
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    key: Array | None = None,
    seeds_B: Sequence[int] | None = None,
    bos_token: int | None = None,
    routed_slots: int | None = None,
) -> Array:
    """Continues each prompt, with causal routing, in one compiled program.

    A row comes out the same whatever rows are beside it, sampled or not.

    Args:
      model: a Decoder.
      prompts_BT: int tokens, left-aligned; what stands beyond a row's length is ignored.
      lengths_B: int, tokens of each prompt, 0 .. T.
      max_new_tokens: tokens to add to each row.
      routing: "predictor" or "router"; ignored by a model without routed layers.
      attention: of `modo.decode.prefill`.
      temperature, top_k, top_p, stop_tokens: see `Sampling`. Behind a stop token its row repeats
        it; the loop ends when all rows have one.
      key: for sampling; row b draws with fold_in(key, b).
      seeds_B: for sampling, a seed a row instead of a key: row b draws with key(seeds_B[b]).
      bos_token: what a row of length 0 starts from.
      routed_slots: of `modo.decode.init_cache`. Where a row routes more tokens than that, those
        skip their layer, and a UserWarning says how many did.

    Returns:
      int32 [B, max_new_tokens], the new tokens only.

    Raises:
      ValueError: shapes, lengths, sampling or tokens out of range; routing that is not causal or
        that the model lacks; sampling without a key or seeds, or with both; an empty prompt without
        a bos_token.
    """
    sampling = Sampling(temperature, top_k, top_p, tuple(stop_tokens))
    model, prompts_BT, lengths_B, key_B = _prepare(
        model, prompts_BT, lengths_B, max_new_tokens, sampling, key, seeds_B, bos_token
    )
    graphdef, params = nnx.split(model)
    tokens_BN, dropped_LB = _generate(
        graphdef,
        params,
        prompts_BT,
        lengths_B,
        key_B,
        max_new_tokens=max_new_tokens,
        routed_slots=routed_slots,
        options=_Options(routing, attention, sampling),
    )
    _warn_of_dropped(dropped_LB)
    return tokens_BN


def stream(
    model: Decoder,
    prompts_BT: Array,
    lengths_B: Array,
    *,
    max_new_tokens: int,
    chunk: int = 16,
    routing: Routing = "predictor",
    attention: CachedAttention = "sparse",
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    key: Array | None = None,
    seeds_B: Sequence[int] | None = None,
    bos_token: int | None = None,
    routed_slots: int | None = None,
) -> Iterator[tuple[Array, Cache]]:
    """The tokens of `generate` as they come: the first one, then `chunk` at a time.

    Args: as of `generate`, and
      chunk: tokens a row between two looks at them.

    Yields:
      (tokens int32 [B, n], cache). The cache holds all tokens but the last, and lives until the
      next ones are asked for. Ends early when all rows have drawn a stop token.

    Raises:
      ValueError: as `generate`, when it is called; chunk below 1.
    """
    if chunk < 1:
        raise ValueError(f"chunk must be at least 1, got {chunk}")
    sampling = Sampling(temperature, top_k, top_p, tuple(stop_tokens))
    model, prompts_BT, lengths_B, key_B = _prepare(
        model, prompts_BT, lengths_B, max_new_tokens, sampling, key, seeds_B, bos_token
    )
    # Chunks are all of one length, so the last may go beyond what was asked for.
    chunks = -(-(max_new_tokens - 1) // chunk)
    cache = init_cache(
        model,
        prompts_BT.shape[0],
        prompts_BT.shape[1] + chunks * chunk,
        routed_slots=routed_slots,
    )
    check_call(model, cache, routing, attention)
    options = _Options(routing, attention, sampling)
    return _stream(model, cache, prompts_BT, lengths_B, key_B, max_new_tokens, chunk, options)


def _stream(model, cache, prompts_BT, lengths_B, key_B, max_new_tokens, chunk, options):
    graphdef, params = nnx.split(model)
    state = _start(graphdef, params, cache, prompts_BT, lengths_B, key_B, options=options)
    yield state.token_B[:, None], state.cache
    left = max_new_tokens - 1
    while left > 0 and not bool(jnp.all(state.done_B)):
        tokens_BN, state = _continue(
            graphdef, params, state, key_B, new_tokens=chunk, options=options
        )
        yield tokens_BN[:, :left], state.cache
        left -= chunk
    _warn_of_dropped(state.cache.dropped_LB())


def _prepare(model, prompts_BT, lengths_B, max_new_tokens, sampling, key, seeds_B, bos_token):
    """Checks, and: the model layer by layer, prompts with a token at least, lengths, keys."""
    prompts_BT, lengths_B = jnp.asarray(prompts_BT), jnp.asarray(lengths_B)
    _check_prompts(model, prompts_BT, lengths_B, bos_token)
    batch = prompts_BT.shape[0]
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    vocab = model.config.vocab_size
    for token in sampling.stop_tokens:
        if not 0 <= token < vocab:
            raise ValueError(f"stop_tokens must be in [0, {vocab}), got {token}")
    if bos_token is not None:
        # A row of length 0 becomes its start token alone.
        prompts_BT = jnp.pad(prompts_BT, ((0, 0), (0, max(0, 1 - prompts_BT.shape[1]))))
        first_B = jnp.where(lengths_B == 0, bos_token, prompts_BT[:, 0])
        prompts_BT = prompts_BT.at[:, 0].set(first_B)
        lengths_B = jnp.maximum(lengths_B, 1)
    key_B = _row_keys(batch, sampling, key, seeds_B)
    return (
        model.unstacked(),
        prompts_BT.astype(jnp.int32),
        lengths_B.astype(jnp.int32),
        key_B,
    )


def _check_prompts(model, prompts_BT, lengths_B, bos_token):
    if prompts_BT.ndim != 2 or prompts_BT.shape[0] == 0:
        raise ValueError(f"prompts must be [B, T] with B at least 1, got {prompts_BT.shape}")
    if lengths_B.shape != prompts_BT.shape[:1]:
        raise ValueError(f"lengths must be [B] = {prompts_BT.shape[:1]}, got {lengths_B.shape}")
    for name, x in (("prompts", prompts_BT), ("lengths", lengths_B)):
        # What JAX makes of an empty list is float.
        if x.size and not jnp.issubdtype(x.dtype, jnp.integer):
            raise ValueError(f"{name} must be integers, got {x.dtype}")
    shortest, longest = int(lengths_B.min()), int(lengths_B.max())
    if shortest < 0 or longest > prompts_BT.shape[1]:
        raise ValueError(
            f"lengths must be in [0, {prompts_BT.shape[1]}], got {shortest} to {longest}"
        )
    if shortest == 0 and bos_token is None:
        raise ValueError("a prompt of length 0 needs a bos_token")
    vocab = model.config.vocab_size
    if bos_token is not None and not 0 <= bos_token < vocab:
        raise ValueError(f"bos_token must be in [0, {vocab}), got {bos_token}")
    used_BT = jnp.arange(prompts_BT.shape[1]) < lengths_B[:, None]
    bad_BT = used_BT & ((prompts_BT < 0) | (prompts_BT >= vocab))
    if bool(bad_BT.any()):
        raise ValueError(f"tokens must be in [0, {vocab}), got {int(prompts_BT[bad_BT][0])}")


def _row_keys(batch, sampling, key, seeds_B):
    """A key a row; nothing is drawn with them at temperature 0."""
    if key is not None and seeds_B is not None:
        raise ValueError("give a key or seeds, not both")
    if seeds_B is not None:
        seeds_B = np.asarray(seeds_B)
        if seeds_B.shape != (batch,) or not np.issubdtype(seeds_B.dtype, np.integer):
            raise ValueError(
                f"seeds must be integers [B] = ({batch},), got {seeds_B.dtype} {seeds_B.shape}"
            )
        return jax.vmap(jax.random.key)(seeds_B)
    if key is None:
        if sampling.temperature > 0:
            raise ValueError(
                f"temperature {sampling.temperature} samples, which needs a key or seeds"
            )
        key = jax.random.key(0)
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))


def _draw(logits_BV, count, key_B, sampling: Sampling):
    key_B = jax.vmap(lambda key: jax.random.fold_in(key, count))(key_B)
    token_B = draw(logits_BV, key_B, sampling)
    stop_tokens = jnp.asarray(sampling.stop_tokens, jnp.int32)
    return token_B, jnp.any(token_B[:, None] == stop_tokens, axis=1)


def _first(model, cache, prompts_BT, lengths_B, key_B, options: _Options) -> _State:
    logits_BV, cache = prefill(
        model,
        cache,
        prompts_BT,
        lengths_B,
        routing=options.routing,
        attention=options.attention,
        last_only=True,
    )
    token_B, done_B = _draw(logits_BV, 0, key_B, options.sampling)
    return _State(cache, token_B, done_B, jnp.asarray(1, jnp.int32))


def _more(model, state: _State, key_B, new_tokens: int, options: _Options):
    """The next tokens [B, new_tokens], and the state behind them."""
    batch, first = state.token_B.shape[0], state.count
    if new_tokens == 0:
        return jnp.zeros((batch, 0), jnp.int32), state
    last = first + new_tokens

    def unfinished(carry):
        state, _ = carry
        return (state.count < last) & ~jnp.all(state.done_B)

    def add_token(carry):
        state, tokens_BN = carry
        logits_BV, cache = step(
            model,
            state.cache,
            state.token_B,
            routing=options.routing,
            attention=options.attention,
            active_B=~state.done_B,
        )
        token_B, stopped_B = _draw(logits_BV, state.count, key_B, options.sampling)
        token_B = jnp.where(state.done_B, state.token_B, token_B)
        tokens_BN = lax.dynamic_update_slice_in_dim(
            tokens_BN, token_B[:, None], state.count - first, 1
        )
        return _State(cache, token_B, state.done_B | stopped_B, state.count + 1), tokens_BN

    empty_BN = jnp.zeros((batch, new_tokens), jnp.int32)
    state, tokens_BN = lax.while_loop(unfinished, add_token, (state, empty_BN))
    # All rows are done, and go on with what they ended with.
    drawn_N = first + jnp.arange(new_tokens) < state.count
    tokens_BN = jnp.where(drawn_N, tokens_BN, state.token_B[:, None])
    return tokens_BN, state._replace(count=last)


_STATIC = ("graphdef", "options")


@functools.partial(jax.jit, static_argnames=(*_STATIC, "max_new_tokens", "routed_slots"))
def _generate(
    graphdef,
    params,
    prompts_BT,
    lengths_B,
    key_B,
    *,
    max_new_tokens,
    routed_slots,
    options: _Options,
):
    model = nnx.merge(graphdef, params)
    batch, length = prompts_BT.shape
    cache = init_cache(model, batch, length + max_new_tokens - 1, routed_slots=routed_slots)
    state = _first(model, cache, prompts_BT, lengths_B, key_B, options)
    first_B1 = state.token_B[:, None]
    tokens_BN, state = _more(model, state, key_B, max_new_tokens - 1, options)
    return jnp.concatenate([first_B1, tokens_BN], axis=1), state.cache.dropped_LB()


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="cache")
def _start(graphdef, params, cache, prompts_BT, lengths_B, key_B, *, options: _Options):
    return _first(nnx.merge(graphdef, params), cache, prompts_BT, lengths_B, key_B, options)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "new_tokens"), donate_argnames="state")
def _continue(graphdef, params, state, key_B, *, new_tokens, options: _Options):
    return _more(nnx.merge(graphdef, params), state, key_B, new_tokens, options)


def _warn_of_dropped(dropped_LB) -> None:
    dropped_LB = np.asarray(dropped_LB)
    if dropped_LB.any():
        layer, row = np.argwhere(dropped_LB)[0]
        warnings.warn(
            f"{dropped_LB.sum()} tokens skipped a routed layer whose slots were full (row {row}: "
            f"{dropped_LB[layer, row]} in routed layer {layer}); raise routed_slots to compute "
            "them",
            stacklevel=3,
        )
