"""Language-modelling loss in float32."""

import jax
import jax.numpy as jnp
from jax import Array


def cross_entropy(logits_BTV: Array, targets_BT: Array) -> tuple[Array, Array]:
    """Cross-entropy of each token and its log-partition.

    The target's logit is a masked sum rather than a gather, so a vocabulary that is cut over
    devices needs only a sum across them.

    Args:
      logits_BTV: any float dtype; computed in float32.
      targets_BT: int, in [0, V).

    Returns:
      (nats [B, T], log-partition [B, T]), float32.
    """
    logits_BTV = logits_BTV.astype(jnp.float32)
    log_z_BT = jax.nn.logsumexp(logits_BTV, axis=-1)
    is_target_BTV = targets_BT[..., None] == jnp.arange(logits_BTV.shape[-1])
    target_BT = jnp.sum(jnp.where(is_target_BTV, logits_BTV, 0.0), axis=-1)
    return log_z_BT - target_BT, log_z_BT
