"""Documents in a row: runs of equal segment ids, where 0 is padding."""

import jax.numpy as jnp
from jax import Array


def document_runs(segment_ids_BT: Array) -> Array:
    """Numbers each run of equal ids, so that documents stay apart once tokens between are gone.

    Args:
      segment_ids_BT: int; 0 is padding.

    Returns:
      int32 [B, T]: 1, 2, ... from run to run, 0 at padding: [1, 1, 2, 2, 1, 1] becomes
      [1, 1, 2, 2, 3, 3].
    """
    previous_BT = jnp.pad(segment_ids_BT[:, :-1], ((0, 0), (1, 0)))
    starts_BT = (segment_ids_BT != previous_BT) & (segment_ids_BT != 0)
    runs_BT = jnp.cumsum(starts_BT, axis=1, dtype=jnp.int32)
    return jnp.where(segment_ids_BT != 0, runs_BT, 0)
