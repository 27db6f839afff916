"""Generation: every new token runs the model over the whole row again."""

import functools

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from modo.config import Routing
from modo.nn.decoder import Decoder


def generate(
    model: Decoder,
    prompts_BT: Array,
    lengths_B: Array,
    *,
    max_new_tokens: int,
    routing: Routing = "predictor",
    temperature: float = 0.0,
    key: Array | None = None,
    bos_token: int | None = None,
) -> Array:
    """Continues each prompt, with causal routing, in one compiled loop.

    Args:
      model: a Decoder.
      prompts_BT: int tokens, left-aligned; what stands beyond a row's length is ignored.
      lengths_B: int, tokens of each prompt, 0 .. T.
      max_new_tokens: tokens to add to each row.
      routing: "predictor" or "router"; ignored by a model without routed layers.
      temperature: 0 takes the likeliest token (ties to the lowest), else samples.
      key: for sampling.
      bos_token: what a row of length 0 starts from.

    Returns:
      int32 [B, max_new_tokens], the new tokens only.

    Raises:
      ValueError: shapes, lengths or temperature out of range; tokens out of range; routing that is
        not causal; sampling without a key; an empty prompt without a bos_token.
    """
    prompts_BT, lengths_B = jnp.asarray(prompts_BT), jnp.asarray(lengths_B)
    _check(model, prompts_BT, lengths_B, max_new_tokens, routing, temperature, key, bos_token)
    if bos_token is not None:
        # A row of length 0 becomes its start token alone.
        prompts_BT = jnp.pad(prompts_BT, ((0, 0), (0, max(0, 1 - prompts_BT.shape[1]))))
        first_B = jnp.where(lengths_B == 0, bos_token, prompts_BT[:, 0])
        prompts_BT = prompts_BT.at[:, 0].set(first_B)
        lengths_B = jnp.maximum(lengths_B, 1)
    graphdef, params = nnx.split(model)
    return _generate(
        graphdef,
        params,
        prompts_BT.astype(jnp.int32),
        lengths_B.astype(jnp.int32),
        jnp.asarray(temperature, jnp.float32),
        jax.random.key(0) if key is None else key,
        max_new_tokens=max_new_tokens,
        routing=routing,
        greedy=temperature == 0,
    )


def _check(model, prompts_BT, lengths_B, max_new_tokens, routing, temperature, key, bos_token):
    if prompts_BT.ndim != 2 or prompts_BT.shape[0] == 0:
        raise ValueError(f"prompts must be [B, T] with B at least 1, got {prompts_BT.shape}")
    if lengths_B.shape != prompts_BT.shape[:1]:
        raise ValueError(f"lengths must be [B] = {prompts_BT.shape[:1]}, got {lengths_B.shape}")
    if max_new_tokens < 1:
        raise ValueError(f"max_new_tokens must be at least 1, got {max_new_tokens}")
    if routing not in ("predictor", "router"):
        raise ValueError(f"routing must be causal, predictor or router, got {routing!r}")
    if not temperature >= 0:
        raise ValueError(f"temperature must not be negative, got {temperature}")
    if temperature > 0 and key is None:
        raise ValueError(f"temperature {temperature} samples, which needs a key")
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


@functools.partial(jax.jit, static_argnames=("graphdef", "max_new_tokens", "routing", "greedy"))
def _generate(
    graphdef, params, prompts_BT, lengths_B, temperature, key, *, max_new_tokens, routing, greedy
):
    model = nnx.merge(graphdef, params)
    batch, prompt_length = prompts_BT.shape
    total = prompt_length + max_new_tokens
    tokens_BT = jnp.pad(prompts_BT, ((0, 0), (0, max_new_tokens)))

    def add_token(i, tokens_BT):
        known_B = lengths_B + i
        segment_ids_BT = (jnp.arange(total) < known_B[:, None]).astype(jnp.int32)
        logits_BTV, _ = model(tokens_BT, segment_ids_BT=segment_ids_BT, routing=routing)
        logits_BV = jax.vmap(lambda logits_TV, n: logits_TV[n - 1])(logits_BTV, known_B)
        if greedy:
            next_B = jnp.argmax(logits_BV, axis=-1)
        else:
            step_key = jax.random.fold_in(key, i)
            next_B = jax.random.categorical(step_key, logits_BV / temperature, axis=-1)
        return jax.vmap(lambda row_T, n, token: row_T.at[n].set(token))(
            tokens_BT, known_B, next_B.astype(jnp.int32)
        )

    tokens_BT = lax.fori_loop(0, max_new_tokens, add_token, tokens_BT)
    index_BN = lengths_B[:, None] + jnp.arange(max_new_tokens)
    return jnp.take_along_axis(tokens_BT, index_BN, axis=1)
