"""Decoding over eight devices; run by test_cache.py as a program."""

import math
import re

import jax
import numpy as np
from flax import nnx

from modo import decode
from modo.config import MeshConfig
from modo.train.mesh import make_mesh, state_shardings
from tests.decode.models import CONFIGS, forward, make_model, some_tokens

B, T, MAX = 8, 9, 24


def main():
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    tokens_BT = some_tokens(B, T + 3)
    model = make_model(CONFIGS["both"])
    expected, routed_LBT = forward(model, tokens_BT)
    graphdef, params = nnx.split(model)
    params = jax.device_put(params, state_shardings(params, mesh))
    model = nnx.merge(graphdef, params)
    cache = decode.init_cache(model, B, MAX)
    shardings = decode.cache_shardings(cache, mesh)
    cache = jax.device_put(cache, shardings)
    assert cache.layers[0].k_BKSH.addressable_shards[0].data.shape == (2, 1, MAX, 8)
    step = jax.jit(
        lambda p, cache, t: decode.step(nnx.merge(graphdef, p), cache, t),
        donate_argnums=1,
        out_shardings=(None, shardings),
    )
    lengths_B = np.asarray([T, 1, 0, 4, T, T, 2, 3])
    logits_BTV, cache = decode.prefill(model, cache, tokens_BT[:, :T], lengths_B)
    for b, n in enumerate(lengths_B):
        np.testing.assert_allclose(logits_BTV[b, :n], expected[b, :n], atol=1e-4)
    cache = jax.device_put(cache, shardings)
    compiled = step.lower(params, cache, tokens_BT[:, 0]).compile()
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= \w+\[([\d,]*)\]\S* (?:{kinds})\(", compiled.as_text())
    sizes = [math.prod(int(n) for n in shape.split(",") if n) for shape in found]
    # No cache travels, not even of a routed layer's rows.
    assert sizes and max(sizes) < cache.layers[0].k_BKSH.size // 8, sizes
    for i in range(3):
        rows = np.arange(B)
        logits_BV, cache = step(params, cache, tokens_BT[rows, lengths_B + i])
        np.testing.assert_allclose(logits_BV, expected[rows, lengths_B + i], atol=1e-4)
    for x, sharding in zip(jax.tree.leaves(cache), jax.tree.leaves(shardings), strict=True):
        assert x.sharding.is_equivalent_to(sharding, x.ndim)
    held_BT = np.arange(MAX) < np.asarray(cache.length_B)[:, None]
    known = np.pad(routed_LBT, ((0, 0), (0, 0), (0, MAX - T - 3)))
    np.testing.assert_array_equal(cache.routed_LBT(), known & held_BT)


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    main()
