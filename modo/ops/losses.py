"""Language-modelling loss in float32."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import Array, lax


def cross_entropy(
    logits_BTV: Array, targets_BT: Array, *, vocab_axes: tuple[str, ...] = ()
) -> tuple[Array, Array]:
    """Cross-entropy of each token and its log-partition.

    The target's logit is a masked sum rather than a gather, so a vocabulary that is cut over
    devices needs only a sum across them.

    Args:
      logits_BTV: any float dtype; computed in float32.
      targets_BT: int, in [0, V).
      vocab_axes: under `jax.shard_map`, mesh axes over which V is cut.

    Returns:
      (nats [B, T], log-partition [B, T]), float32.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    first = 0
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    if vocab_axes:
        first = lax.axis_index(vocab_axes) * logits_BTV.shape[-1]
        top_BT = lax.pmax(lax.stop_gradient(log_z_BT), vocab_axes)
        log_z_BT = top_BT + jnp.log(lax.psum(jnp.exp(log_z_BT - top_BT), vocab_axes))
    is_target_BTV = targets_BT[..., None] - first == jnp.arange(logits_BTV.shape[-1])
    target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    if vocab_axes:
        target_BT = lax.psum(target_BT, vocab_axes)
    return log_z_BT - target_BT, log_z_BT


def chunked_cross_entropy(
    logits: Callable[[Array], Array],
    x_BTD: Array,
    targets_BT: Array,
    chunk: int | None,
    *,
    vocab_axes: tuple[str, ...] = (),
) -> tuple[Array, Array]:
    """`cross_entropy` of `logits(x_BTD)`, with the logits of `chunk` tokens a row at once.

    The backward pass computes the logits again.

    Args:
      logits: [B, chunk, D] to [B, chunk, V], each token by itself.
      x_BTD: what it is given.
      targets_BT: int, in [0, V).
      chunk: None: all tokens at once.
      vocab_axes: of `cross_entropy`.

    Returns:
      (nats [B, T], log-partition [B, T]), float32.
    """
    B, T, D = x_BTD.shape
    if chunk is None or chunk >= T:
        return cross_entropy(logits(x_BTD), targets_BT, vocab_axes=vocab_axes)
    number = -(-T // chunk)
    padding = ((0, 0), (0, -T % number))
    x_BcnD = jnp.pad(x_BTD, (*padding, (0, 0))).reshape(B, -1, number, D)
    targets_Bcn = jnp.pad(targets_BT, padding).reshape(B, -1, number)

    @jax.checkpoint
    def of_chunk(inputs):
        x_BcD, targets_Bc = inputs
        return cross_entropy(logits(x_BcD), targets_Bc, vocab_axes=vocab_axes)

    losses_nBc = lax.map(of_chunk, (jnp.moveaxis(x_BcnD, 2, 0), jnp.moveaxis(targets_Bcn, 2, 0)))
    return tuple(jnp.moveaxis(x, 0, 2).reshape(B, -1)[:, :T] for x in losses_nBc)
