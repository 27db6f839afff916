"""Generation: prompts go into a cache, then one token a row after another, in one compiled loop.

Axes: B rows, T tokens of the longest prompt, N new tokens, V vocabulary.
"""

import dataclasses
import functools
import warnings
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array, lax

from modo.config import MAX_SEED, Routing
from modo.decode.cache import Cache, init_cache
from modo.decode.checks import CachedAttention, check_call
from modo.decode.forward import prefill, step
from modo.decode.inputs import check_count, to_int32
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


class _Noise(NamedTuple):
    """What may change without another compilation.

    Attributes:
      key_B: a key a row.
      temperature: what logits are divided by.
    """

    key_B: Array
    temperature: Array


class _Options(NamedTuple):
    """What is static, beside the model's shape; the temperature is 0 or, whatever it is, 1."""

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
      temperature, top_k, top_p, stop_tokens: see `modo.decode.Sampling`. Behind a stop token
        its row repeats it; the loop ends when all rows have one.
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
    sampling = Sampling(temperature, top_k, top_p, tuple(map(int, stop_tokens)))
    model, prompts_BT, lengths_B, noise = _prepare(
        model, prompts_BT, lengths_B, max_new_tokens, sampling, key, seeds_B, bos_token
    )
    graphdef, params = nnx.split(model)
    tokens_BN, dropped_LB = _generate(
        graphdef,
        params,
        prompts_BT,
        lengths_B,
        noise,
        max_new_tokens=max_new_tokens,
        routed_slots=routed_slots,
        options=_options(routing, attention, sampling),
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
    check_count("chunk", chunk)
    sampling = Sampling(temperature, top_k, top_p, tuple(map(int, stop_tokens)))
    model, prompts_BT, lengths_B, noise = _prepare(
        model, prompts_BT, lengths_B, max_new_tokens, sampling, key, seeds_B, bos_token
    )
    batch, length = prompts_BT.shape
    cache = init_cache(model, batch, length + max_new_tokens - 1, routed_slots=routed_slots)
    check_call(model, cache, routing, attention)
    options = _options(routing, attention, sampling)
    return _stream(model, cache, prompts_BT, lengths_B, noise, max_new_tokens, chunk, options)


def _stream(model, cache, prompts_BT, lengths_B, noise, max_new_tokens, chunk, options):
    graphdef, params = nnx.split(model)
    state = _start(graphdef, params, cache, prompts_BT, lengths_B, noise, options=options)
    yield state.token_B[:, None], state.cache
    left = max_new_tokens - 1
    while left > 0 and not bool(jnp.all(state.done_B)):
        tokens_BN, state = _continue(
            graphdef, params, state, noise, max_new_tokens, new_tokens=chunk, options=options
        )
        yield tokens_BN[:, :left], state.cache
        left -= chunk
    _warn_of_dropped(state.cache.dropped_LB())


def _prepare(model, prompts_BT, lengths_B, max_new_tokens, sampling, key, seeds_B, bos_token):
    """Checks, and: the model layer by layer, prompts with a token at least, lengths, noise."""
    prompts_BT, lengths_B = to_int32("prompts", prompts_BT), to_int32("lengths", lengths_B)
    _check_prompts(model, prompts_BT, lengths_B, bos_token)
    batch = prompts_BT.shape[0]
    check_count("max_new_tokens", max_new_tokens)
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
    noise = _Noise(key_B, jnp.asarray(sampling.temperature or 1.0, jnp.float32))
    return (
        model.unstacked(),
        prompts_BT,
        lengths_B,
        noise,
    )


def _check_prompts(model, prompts_BT, lengths_B, bos_token):
    if prompts_BT.ndim != 2 or prompts_BT.shape[0] == 0:
        raise ValueError(f"prompts must be [B, T] with B at least 1, got {prompts_BT.shape}")
    if lengths_B.shape != prompts_BT.shape[:1]:
        raise ValueError(f"lengths must be [B] = {prompts_BT.shape[:1]}, got {lengths_B.shape}")
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
        least, most = int(seeds_B.min()), int(seeds_B.max())
        if least < 0 or most > MAX_SEED:
            raise ValueError(f"seeds must be in [0, {MAX_SEED}], got {least} to {most}")
        return jax.vmap(jax.random.key)(seeds_B.astype(np.uint32))
    if key is None:
        if sampling.temperature > 0:
            raise ValueError(
                f"temperature {sampling.temperature} samples, which needs a key or seeds"
            )
        key = jax.random.key(0)
    if not jnp.issubdtype(jnp.asarray(key).dtype, jax.dtypes.prng_key) and (
        jnp.shape(key) != (2,) or jnp.asarray(key).dtype != jnp.uint32
    ):
        raise ValueError(f"key must come from jax.random.key, got an array {jnp.shape(key)}")
    return jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(batch))


def _options(routing, attention, sampling: Sampling) -> _Options:
    sampling = dataclasses.replace(sampling, temperature=float(sampling.temperature > 0))
    return _Options(routing, attention, sampling)


def _draw(logits_BV, count, noise: _Noise, sampling: Sampling):
    key_B = jax.vmap(lambda key: jax.random.fold_in(key, count))(noise.key_B)
    token_B = draw(logits_BV / noise.temperature, key_B, sampling)
    stop_tokens = jnp.asarray(sampling.stop_tokens, jnp.int32)
    return token_B, jnp.any(token_B[:, None] == stop_tokens, axis=1)


def _first(model, cache, prompts_BT, lengths_B, noise, options: _Options) -> _State:
    logits_BV, cache = prefill(
        model,
        cache,
        prompts_BT,
        lengths_B,
        routing=options.routing,
        attention=options.attention,
        last_only=True,
        fresh=True,
    )
    token_B, done_B = _draw(logits_BV, 0, noise, options.sampling)
    return _State(cache, token_B, done_B, jnp.asarray(1, jnp.int32))


def _more(model, state: _State, noise, total, new_tokens: int, options: _Options):
    """The next tokens [B, new_tokens], and the state behind them; `total`: where drawing ends."""
    batch, first = state.token_B.shape[0], state.count
    if new_tokens == 0:
        return jnp.zeros((batch, 0), jnp.int32), state
    last = jnp.minimum(first + new_tokens, total)

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
        token_B, stopped_B = _draw(logits_BV, state.count, noise, options.sampling)
        token_B = jnp.where(state.done_B, state.token_B, token_B)
        tokens_BN = lax.dynamic_update_slice_in_dim(
            tokens_BN, token_B[:, None], state.count - first, 1
        )
        return _State(cache, token_B, state.done_B | stopped_B, state.count + 1), tokens_BN

    empty_BN = jnp.zeros((batch, new_tokens), jnp.int32)
    state, tokens_BN = lax.while_loop(unfinished, add_token, (state, empty_BN))
    # Rows that are done go on with what they ended with.
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
    noise,
    *,
    max_new_tokens,
    routed_slots,
    options: _Options,
):
    model = nnx.merge(graphdef, params)
    batch, length = prompts_BT.shape
    cache = init_cache(model, batch, length + max_new_tokens - 1, routed_slots=routed_slots)
    state = _first(model, cache, prompts_BT, lengths_B, noise, options)
    first_B1 = state.token_B[:, None]
    tokens_BN, state = _more(model, state, noise, max_new_tokens, max_new_tokens - 1, options)
    return jnp.concatenate([first_B1, tokens_BN], axis=1), state.cache.dropped_LB()


@functools.partial(jax.jit, static_argnames=_STATIC, donate_argnames="cache")
def _start(graphdef, params, cache, prompts_BT, lengths_B, noise, *, options: _Options):
    return _first(nnx.merge(graphdef, params), cache, prompts_BT, lengths_B, noise, options)


@functools.partial(jax.jit, static_argnames=(*_STATIC, "new_tokens"), donate_argnames="state")
def _continue(graphdef, params, state, noise, total, *, new_tokens, options: _Options):
    return _more(nnx.merge(graphdef, params), state, noise, total, new_tokens, options)


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
