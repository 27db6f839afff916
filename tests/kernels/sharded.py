"""MoBA with the batch cut over eight devices; run by test_moba.py as a program."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tests.kernels.test_moba import (
    XLA_PATHS,
    assert_close,
    compiled,
    inputs,
    out_and_gradients,
)


def check(path):
    """The same results on 8 devices, ties included, and none of them holds the whole batch."""
    devices = jax.devices()
    assert len(devices) == 8
    q, k, v, do = inputs(8, 70, 4, 2, 8, 8)
    q, k = jnp.round(q), jnp.round(k)
    ids = np.array([[1] * (9 + b) + [2] * (61 - 2 * b) + [0] * b for b in range(8)], np.int32)
    options = {"block_size": 4, "top_k": 3}
    expected = out_and_gradients(path, q, k, v, do, segment_ids=jnp.asarray(ids), **options)
    rows = NamedSharding(Mesh(np.array(devices), ("data",)), PartitionSpec("data"))
    sharded = jax.device_put((q, k, v, jnp.asarray(ids), do), rows)
    f = compiled(path, True, tuple(sorted(options.items())))
    (_, out), gradients = f(*sharded)
    for a, e in zip((out, *gradients), (expected[0], *expected[1]), strict=True):
        assert_close(a, e, 1e-6)
    text = f.lower(*sharded).compile().as_text()
    assert "all-to-all" not in text and "all-gather" not in text


if __name__ == "__main__":
    for path in XLA_PATHS:
        check(path)
