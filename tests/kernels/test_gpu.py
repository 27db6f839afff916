"""The GPU kernels: interpreted, and lowered for CUDA."""

import functools
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.mesh import AbstractDevice
from jax.sharding import AbstractMesh

from kernels_pallas import moba
from kernels_pallas.moba import gpu, plan
from tests.kernels import moba_numpy
from tests.kernels.test_moba import (
    FAST_COMPILE,
    SEGMENTS,
    assert_close,
    attention,
    bits,
    case,
    inputs,
    out_and_gradients,
)

attend = functools.partial(attention, "pallas_gpu")
# Odd lengths and widths; documents; several steps of keys in a block, the last not full; no choice.
CASES = ("documents", "wide blocks", "more than there are", "bfloat16")


@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name):
    (q, k, v, do), options, out, gradients, _, clear = case(name)
    actual, actual_gradients = out_and_gradients("pallas_gpu", q, k, v, do, **options)
    assert actual.dtype == q.dtype
    tolerance = 2e-5 if q.dtype == jnp.float32 else 1e-2
    clear = clear[..., None]
    assert_close(np.where(clear, actual, 0), np.where(clear, out, 0), tolerance)
    for x, a, e in zip((q, k, v), actual_gradients, gradients, strict=True):
        assert a.dtype == x.dtype
        assert_close(a, e, tolerance)


def test_rubbish_in_padding_and_repeats():
    """What padding holds changes no bit, nor does running it again."""
    (q, k, v, do), options, *_ = case("documents")
    padding = (options["segment_ids"] == 0)[:, :, None, None]
    f = functools.partial(out_and_gradients, "pallas_gpu", **options)
    expected = [bits(x) for x in jax.tree.leaves(f(q, k, v, do))]
    for rubbish in (jnp.nan, jnp.inf, 0):
        args = (jnp.where(padding, rubbish, x) for x in (q, k, v, do))
        assert [bits(x) for x in jax.tree.leaves(f(*args))] == expected
    for _ in range(50):
        assert [bits(x) for x in jax.tree.leaves(f(q, k, v, do))] == expected


@pytest.mark.parametrize(("T", "scale"), [(1, 0.5), (24, 0.0), (25, 0.5), (171, -0.5)])
def test_any_length_and_scale(T, scale):
    q, k, v, do = inputs(1, T, 2, 1, 4, 4, seed=T)
    options = {"block_size": 24, "top_k": 3, "scale": scale}
    truth, *_, gap = moba_numpy.moba(q, k, v, do, **options)
    clear = (gap > 1e-5)[..., None]
    assert_close(np.where(clear, attend(q, k, v, **options), 0), np.where(clear, truth, 0), 2e-5)


@pytest.mark.parametrize(("documents", "pairs", "groups"), [(False, 1200, 2), (True, 600, 4)])
def test_groups_of_heads_change_nothing(documents, pairs, groups):
    """The heads of one key head at a time, and some of them."""
    B, T, N, K = 1, 300, 4, 2
    args = inputs(B, T, N, K, 8, 12)
    options = {"block_size": 24, "top_k": 3}
    if documents:
        options["segment_ids"] = jnp.asarray(SEGMENTS["packed"](B, T), jnp.int32)
    q, k, v, do = args

    def both(q, k, v):
        out, vjp = jax.vjp(
            lambda *x: moba.moba_attention(*x, implementation="pallas_gpu", **options), q, k, v
        )
        return out, *vjp(do)

    with mock.patch.object(gpu, "_CHUNK_PAIRS", pairs):
        layout = gpu.make_layout(plan.make_call(T, 24, 3, not documents), B, T, N, K, T, 32)
        assert N // layout.heads == groups
        actual = jax.jit(both, compiler_options=FAST_COMPILE)(q, k, v)
    out, gradients = out_and_gradients("reference", *args, **options)
    for a, e in zip(actual, (out, *gradients), strict=True):
        assert_close(a, e, 2e-6)


def test_chunks_of_queries_equal_all():
    """Halves of a row that no block ends at; gradients of keys and values are their sum."""
    B, T, N, K = 3, 150, 2, 1
    q, k, v, do = inputs(B, T, N, K, 8, 12)
    ids = jnp.asarray(SEGMENTS["packed"](B, T), jnp.int32)
    q, k, v, do = (jnp.where((ids == 0)[:, :, None, None], 0, x) for x in (q, k, v, do))
    options = {"block_size": 8, "top_k": 3, "segment_ids": ids}
    out, gradients = out_and_gradients("reference", q, k, v, do, **options)
    call = plan.make_call(T, 8, 3, False, scale=8**-0.5)
    compiled = functools.partial(jax.jit, compiler_options=FAST_COMPILE)

    @compiled
    def choice():
        blocks = plan.find_blocks(T, 8, ids)
        c = plan.centroids(plan.cut_blocks(jnp.swapaxes(k, 1, 2), blocks, 8, False))
        return plan.choose(call, q, c, blocks), blocks

    @compiled
    def both(q, do, chosen, blocks, offset):
        saved = gpu.forward(call, q, k, v, chosen, blocks, offset, interpret=True)
        return saved[0], *gpu.backward(
            call, q, k, v, chosen, blocks, *saved, do, offset, interpret=True
        )

    chosen, blocks = choice()
    half = T // 2
    parts = [
        both(q[:, at : at + half], do[:, at : at + half], chosen[..., at : at + half], blocks, at)
        for at in (0, half)
    ]
    joined = [
        *(jnp.concatenate(x, axis=1) for x in list(zip(*parts, strict=True))[:2]),
        *(sum(x) for x in list(zip(*parts, strict=True))[2:]),
    ]
    for a, e in zip(joined, (out, *gradients), strict=True):
        assert_close(a, e, 2e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("documents", "sinks", "window"), [(False, 0, 0), (True, 1, 1)])
def test_choices_are_those_of_the_plan(dtype, documents, sinks, window):
    """In the same order; where scores are equal, the lowest number; over several tiles of blocks.

    Whole numbers make every score exact, and most of them tie.
    """
    B, T, N, K, M, J = 2, 300, 2, 1, 2, 5
    rng = np.random.default_rng(0)
    q, k = (jnp.asarray(rng.integers(-1, 2, (B, T, heads, 8)), dtype) for heads in (N, K))
    ids = jnp.asarray(SEGMENTS["packed"](B, T), jnp.int32) if documents else None
    call = plan.make_call(T, M, J + 1, ids is None, sinks=sinks, window=window)
    blocks = plan.find_blocks(T, M, ids)
    c = plan.centroids(plan.cut_blocks(jnp.swapaxes(k, 1, 2), blocks, M, ids is None))
    expected = jax.jit(functools.partial(plan.choose, call))(q, c, blocks)
    actual = jax.jit(functools.partial(gpu.choose, call, interpret=True))(q, c, blocks)
    assert np.array_equal(actual, expected)
    assert len(np.unique(expected)) > 64


def test_split_is_exact():
    c = jnp.asarray(np.random.default_rng(0).normal(size=(50, 8)), jnp.float32)
    parts = plan.split(c, jnp.bfloat16)
    assert len(parts) == 3 and all(x.dtype == jnp.bfloat16 for x in parts)
    assert np.array_equal(sum(np.asarray(x, np.float64) for x in parts), np.float64(c))
    assert plan.split(c, jnp.float32) == (c,)


def test_exact_at_large_scores():
    """Whole numbers make scores of 3e5 exact, and then probabilities are."""
    T, M = 45, 8
    rng = np.random.default_rng(0)
    q = jnp.full((1, T, 4, 8), 2.0**9)
    k = jnp.asarray(rng.integers(0, 3, (1, T, 2, 8)) / 2**9 + 2**6 * 1.5, jnp.float32)
    v, do = inputs(1, T, 4, 2, 8, 8)[2:]
    options = {"block_size": M, "top_k": 3, "scale": 1.0}
    truth, *_, gap = moba_numpy.moba(q, k, v, do, **options)
    clear = (gap > 0.01)[..., None]
    out = np.asarray(attend(q, k, v, **options))
    assert_close(np.where(clear, out, 0), np.where(clear, truth, 0), 2e-5)


@pytest.mark.parametrize("size", [1e20, -1e20, 3e38])
def test_overflowing_scores_keep_the_own_block(size):
    T, M = 32, 8
    q = jnp.full((1, T, 1, 4), 1e20)
    k = jnp.full((1, T, 1, 4), size)
    v = jnp.broadcast_to(jax.nn.one_hot(jnp.arange(T), T)[None, :, None], (1, T, 1, T))
    out = attend(q, k, v, block_size=M, top_k=2, scale=3.0)
    for t in range(T):
        keys = {*range(M if t >= M else 0), *range(t // M * M, t + 1)}
        assert set(np.flatnonzero(out[0, t, 0])) == keys
    assert np.all(np.isfinite(out))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("T", "dtype", "documents"), [(2100, jnp.float32, True), (1 << 20, jnp.bfloat16, False)]
)
def test_lowers_for_cuda(T, dtype, documents):
    """All kernels, with no GPU and no CUDA installed, also for a million tokens."""

    def both(q, k, v, do, segment_ids):
        def f(*x):
            return moba.moba_attention(
                *x,
                block_size=500,
                top_k=4,
                segment_ids=segment_ids,
                implementation="pallas_gpu",
            )

        out, vjp = jax.vjp(f, q, k, v)
        return out, vjp(do)

    q, k = (jax.ShapeDtypeStruct((1, T, heads, 96), dtype) for heads in (32, 4))
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32) if documents else None
    device = AbstractDevice(device_kind="NVIDIA H200", num_cores=132, platform="gpu")
    with jax.sharding.use_abstract_mesh(AbstractMesh((1,), ("x",), abstract_device=device)):
        lowered = jax.jit(both).trace(q, k, k, q, ids).lower(lowering_platforms=("cuda",))
    text = lowered.as_text()
    for kernel in ("interval_forward", "interval_dq", "interval_dkv", "choose"):
        assert f"moba_{kernel}" in text
    for kernel in ("forward", "dq", "dkv"):
        assert f"moba_tiles_{kernel}" in text
