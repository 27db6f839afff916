"""The TPU kernels, interpreted; tests/kernels/test_moba.py compares them with the others."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import moba
from kernels_pallas.moba import plan, tpu, tpu_tiles
from tests.kernels.test_moba import (
    FAST_COMPILE,
    SEGMENTS,
    assert_close,
    bits,
    inputs,
    out_and_gradients,
)

# Tiles so small that a short row has several of each kind.
SMALL = {"_WINDOW": 128, "_TILE": 16, "_CHOOSE_TILE": 128}


def run(args, **options):
    """The output and all gradients, compiled anew."""
    q, k, v, do = args

    def f(q, k, v):
        return moba.moba_attention(q, k, v, implementation="pallas_tpu", **options)

    def both(q, k, v):
        out, vjp = jax.vjp(f, q, k, v)
        return out, *vjp(do)

    return jax.jit(both, compiler_options=FAST_COMPILE)(q, k, v)


@pytest.mark.parametrize(
    ("pairs", "tile", "groups", "chunks"),
    [(1 << 20, 16, 1, 1), (1200, 16, 2, 2), (1, 16, 4, 1), (1, 8, 4, 3)],
)
@pytest.mark.parametrize("documents", [False, True])
def test_groups_and_chunks_change_nothing(documents, pairs, tile, groups, chunks):
    """All at once, some query heads at a time, and some of their tokens at a time."""
    B, T, N, K = 1, 300, 4, 2
    args = inputs(B, T, N, K, 8, 12)
    options = {"block_size": 24, "top_k": 3}
    if documents:
        options["segment_ids"] = jnp.asarray(SEGMENTS["packed"](B, T), jnp.int32)
    with mock.patch.multiple(tpu, **SMALL | {"_TILE": tile, "_CHUNK_PAIRS": pairs}):
        layout = tpu.make_layout(plan.make_call(T, 24, 3, not documents), B, T, N, K)
        assert (N // layout.heads, layout.length // layout.tokens) == (groups, chunks)
        assert layout.reach > 1
        actual = run(args, **options)
    out, gradients = out_and_gradients("reference", *args, **options)
    for a, e in zip(actual, (out, *gradients), strict=True):
        assert_close(a, e, 2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_statistics_survive_the_lanes(dtype):
    """Two float32 numbers go through a row of bfloat16 without losing a bit."""
    rng = np.random.default_rng(0)
    x, y = rng.normal(size=(2, 50, 1)).astype(np.float32) * 10.0 ** rng.integers(-9, 9, (50, 1))
    x[0] = np.finfo(np.float32).min
    lanes = jax.jit(tpu_tiles.to_lanes, static_argnums=2)(x, y, dtype)
    assert lanes.shape == (50, 128) and lanes.dtype == dtype
    for actual, expected in zip(jax.jit(tpu_tiles.from_lanes)(lanes), (x, y), strict=True):
        assert np.array_equal(actual, expected.astype(np.float32))


def test_no_race(capfd):
    """Each kernel under the interpreter that watches memory, and twice the same bits."""
    B, T, N, K, H = 1, 260, 2, 1, 8
    q, k, v, do = inputs(B, T, N, K, H, H)
    expected = run((q, k, v, do), block_size=64, top_k=3)
    call = plan.make_call(T, 64, 3, True, H**-0.5)
    blocks = plan.find_blocks(T, 64, None)
    c_BKSH = plan.centroids(plan.cut_blocks(jnp.swapaxes(k, 1, 2), blocks, 64, True))
    params = pltpu.InterpretParams(detect_races=True)
    results = []
    with mock.patch.multiple(tpu, **SMALL | {"_TILE": 64}):
        for _ in range(2):
            chosen = tpu.choose(call, q, c_BKSH, blocks, interpret=params)
            saved = tpu.forward(call, q, k, v, chosen, blocks, interpret=params)
            gradients = tpu.backward(call, q, k, v, chosen, blocks, *saved, do, interpret=params)
            results.append((saved[0], *gradients))
    assert "RACE" not in capfd.readouterr().out
    for first, second, e in zip(*results, expected, strict=True):
        assert bits(first) == bits(second)
        assert_close(first, e, 1e-6)


def test_other_dtypes():
    """Half precision runs by default, and is refused where it cannot."""
    q, k, v, _ = inputs(1, 40, 2, 1, 8, 8, dtype=jnp.float16)
    options = {"block_size": 8, "top_k": 3}
    out = jax.jit(functools.partial(moba.moba_attention, **options))(q, k, v)
    assert out.dtype == jnp.float16
    assert_close(out, moba.moba_attention(q, k, v, implementation="reference", **options), 2e-3)
    with pytest.raises(ValueError, match="float16"):
        moba.moba_attention(q, k, v, implementation="pallas_tpu", **options)
