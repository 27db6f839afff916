"""The TPU kernels, interpreted; tests/kernels/test_moba.py compares them with the others."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from kernels_pallas import moba
from kernels_pallas.moba import plan, tpu, tpu_costs, tpu_dense, tpu_tiles
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
GROUPED = functools.partial(plan.make_call, path="grouped")


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
    small = mock.patch.multiple(tpu, **SMALL | {"_TILE": tile, "_CHUNK_PAIRS": pairs})
    with small, mock.patch.object(plan, "make_call", GROUPED):
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


# T, query heads, key heads, H, Hv, block_size, top_k, path, options
RACES = {
    "grouped heads": (256, 4, 2, 8, 16, 100, 2, "grouped", {"soft_cap": 2.0}),
    "grouped documents": (300, 2, 1, 16, 8, 100, 3, "grouped", {"segment_ids": True}),
    "grouped long blocks": (520, 1, 1, 8, 8, 256, 2, "grouped", {}),
    "dense heads": (384, 4, 2, 8, 16, 128, 2, "dense", {"soft_cap": 2.0}),
    "dense documents": (300, 2, 1, 16, 8, 100, 3, "dense", {"segment_ids": True}),
    "dense window": (640, 1, 1, 8, 8, 100, 3, "dense", {"sinks": 1, "window": 1}),
    "dense long blocks": (520, 1, 1, 8, 8, 256, 2, "dense", {}),
    "dense everything": (300, 2, 1, 8, 8, 64, 9, "dense", {"segment_ids": True}),
}


@pytest.mark.parametrize("name", RACES)
def test_no_race(capfd, name):
    """Each kernel under the interpreter that watches memory, and twice the same bits."""
    T, N, K, H, E, M, top_k, path, options = RACES[name]
    q, k, v, do = inputs(1, T, N, K, H, E)
    options = dict(options)
    ids = None
    if options.pop("segment_ids", False):
        ids = jnp.asarray([[1] * (T - 60) + [2] * 60], jnp.int32)
    call = plan.make_call(T, M, top_k, ids is None, H**-0.5, path=path, **options)
    blocks = plan.find_blocks(T, M, ids)
    c_BKSH = plan.centroids(plan.cut_blocks(jnp.swapaxes(k, 1, 2), blocks, M, ids is None))
    params = pltpu.InterpretParams(detect_races=True)

    def attend(q, k, v, do):
        chosen = jnp.zeros((1, N, 0, T), jnp.int32)
        if call.choices:
            chosen = tpu.choose(call, q, c_BKSH, blocks, interpret=params)
        saved = tpu.forward(call, q, k, v, chosen, blocks, interpret=params)
        gradients = tpu.backward(call, q, k, v, chosen, blocks, *saved, do, interpret=params)
        return saved[0], *gradients

    with mock.patch.multiple(tpu, **SMALL | {"_TILE": 64}):
        compiled = jax.jit(attend, compiler_options=FAST_COMPILE)
        results = [jax.block_until_ready(compiled(q, k, v, do)) for _ in range(2)]
    assert "RACE" not in capfd.readouterr().out
    fixed = {"sink_blocks": call.sinks, "window_blocks": call.window}
    out, gradients = out_and_gradients(
        *("reference", q, k, v, do),
        segment_ids=ids,
        block_size=M,
        top_k=top_k,
        soft_cap=call.soft_cap,
        **fixed,
    )
    for first, second, e in zip(*results, (out, *gradients), strict=True):
        assert bits(first) == bits(second)
        assert_close(first, e, 2e-6)


def test_only_needed_pairs_of_tiles():
    """The dense path's tables hold the tiles that some query attends to, and every own tile."""
    start_AGJT = np.full((1, 1, 2, 512), 1 << 30, np.int32)
    start_AGJT[0, 0, 0] = np.arange(512) // 128 * 128
    start_AGJT[0, 0, 1, 300] = 0
    start_AGJT[0, 0, 1, 400] = 250
    by_row, by_column, used = jax.jit(
        functools.partial(tpu_dense.pair_tables, W=128, size=128, front=0)
    )(start_AGJT)
    pairs = [(0, 0), (1, 1), (2, 0), (2, 2), (3, 1), (3, 2), (3, 3)]
    assert int(used) == len(pairs)
    for table, expected in ((by_row, pairs), (by_column, sorted(pair[::-1] for pair in pairs))):
        actual = [(int(x) >> 16, int(x) & 0xFFFF) for x in table[0, : len(pairs)]]
        assert actual == expected
        assert np.all(table[0, len(pairs) :] == ~table[0, len(pairs) - 1])


def test_dense_where_it_pays():
    """By the generation's numbers: few tokens or a fixed window; never what does not fit."""

    def dense(T, M, top_k, kind, itemsize=2, **fixed):
        return tpu_costs.is_dense(
            plan.make_call(T, M, top_k, True, **fixed),
            **dict(queries=T, length=T, groups=1, rows=8, key_width=128, value_width=128),
            itemsize=itemsize,
            device_kind=kind,
        )

    for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x", None):
        assert dense(4096, 512, 3, kind) and not dense(32768, 512, 3, kind)
        assert dense(16384, 128, 8, kind) and not dense(65536, 128, 8, kind)
        assert dense(32768, 512, 3, kind, window=1, sinks=1)
        assert dense(16384, 4096, 4, kind) and not dense(1 << 20, 1 << 18, 4, kind)
        assert not dense(16384, 512, 1, kind)
    assert dense(16384, 512, 3, "TPU7x") and not dense(16384, 512, 3, "TPU v5 lite")
    assert not dense(16384, 128, 8, "TPU v5 lite", itemsize=4)


def test_other_dtypes():
    """Half precision runs by default, and is refused where it cannot."""
    q, k, v, _ = inputs(1, 40, 2, 1, 8, 8, dtype=jnp.float16)
    options = {"block_size": 8, "top_k": 3}
    out = jax.jit(functools.partial(moba.moba_attention, **options))(q, k, v)
    assert out.dtype == jnp.float16
    assert_close(out, moba.moba_attention(q, k, v, implementation="reference", **options), 2e-3)
    with pytest.raises(ValueError, match="float16"):
        moba.moba_attention(q, k, v, implementation="pallas_tpu", **options)
