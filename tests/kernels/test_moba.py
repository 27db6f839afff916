import functools
import os
import pathlib
import subprocess
import sys
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from kernels_pallas import moba
from kernels_pallas.moba import plan, xla_layout
from tests.jaxpr import dot_flops, equations
from tests.kernels import moba_numpy

# Short rows take the TPU's dense path.
IMPLEMENTATIONS = ("reference", "dense", "grouped", "pallas_tpu", "pallas_tpu grouped")
XLA_PATHS = ("dense", "grouped")
# Code for tiny shapes takes longer to optimise than to run.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def traced(name, *args, **options):
    """moba_attention by one implementation, those with two paths also on one of them."""
    implementation, _, path = (f"xla {name}" if name in XLA_PATHS else name).partition(" ")
    forced = functools.partial(plan.make_call, path=path or None)
    with mock.patch.object(plan, "make_call", forced):
        return moba.moba_attention(*args, implementation=implementation, **options)


@functools.cache
def compiled(name, with_gradients, static):
    """One compilation for every test with the same shapes and options."""

    def out(q, k, v, segment_ids):
        return traced(name, q, k, v, segment_ids=segment_ids, **dict(static))

    def loss(q, k, v, segment_ids, do):
        o = out(q, k, v, segment_ids)
        return jnp.sum(o.astype(jnp.float32) * do.astype(jnp.float32)), o

    f = jax.value_and_grad(loss, (0, 1, 2), has_aux=True) if with_gradients else out
    return jax.jit(f, compiler_options=FAST_COMPILE)


def attention(name, q, k, v, *, segment_ids=None, **static):
    return compiled(name, False, tuple(sorted(static.items())))(q, k, v, segment_ids)


def out_and_gradients(name, q, k, v, do, *, segment_ids=None, **static):
    """The output, and the gradients of its product with `do`."""
    f = compiled(name, True, tuple(sorted(static.items())))
    (_, out), gradients = f(q, k, v, segment_ids, do)
    return out, gradients


choose_blocks = jax.jit(
    moba.choose_blocks,
    static_argnames=("block_size", "top_k", "sink_blocks", "window_blocks"),
    compiler_options=FAST_COMPILE,
)


def inputs(B, T, N, K, H, E, seed=0, dtype=jnp.float32):
    """query, key, value and the gradient of the output."""
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, E), (B, T, N, E))
    return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)


def assert_close(actual, expected, tolerance):
    """Equal to `tolerance` of the largest value."""
    actual, expected = (np.asarray(x).astype(np.float64) for x in (actual, expected))
    assert actual.shape == expected.shape
    error = np.max(np.abs(actual - expected), initial=0)
    # A NaN must fail, so the comparison asks for what is wanted.
    assert error <= tolerance * max(np.max(np.abs(expected), initial=0), 1e-3), error


def bits(x):
    return np.asarray(x).tobytes()


SEGMENTS = {
    # Boundaries off the block grid, padding on both sides and inside, documents of length 1, a
    # value that comes back as another document, and an empty row.
    "packed": lambda B, T: np.stack(
        [
            np.array(([0] * 3 + [1] * 20 + [2] + [3] * 18 + [0] * 2 + [1] * 13 + [3] * T)[:T]),
            np.zeros(T, int),
            np.array([5] * (T - 7) + [0] * 7),
        ][:B]
    ),
    "left": lambda B, T: np.array([[0] * (5 + 6 * b) + [1] * (T - 5 - 6 * b) for b in range(B)]),
}

# B, T, N, K, H, E, block_size, top_k, options
CASES = {
    "grouped queries": (2, 64, 4, 2, 32, 32, 8, 3, {}),
    "value width": (1, 67, 2, 1, 8, 20, 8, 4, {"scale": 0.7}),
    "soft cap": (1, 61, 3, 3, 16, 16, 8, 2, {"soft_cap": 1.5}),
    "documents": (3, 70, 4, 2, 8, 12, 4, 3, {"segment_ids": "packed", "soft_cap": 4.0}),
    "left padding": (2, 60, 2, 2, 8, 8, 16, 2, {"segment_ids": "left"}),
    "top_k 1": (1, 40, 2, 2, 8, 8, 8, 1, {"segment_ids": "left"}),
    "more than there are": (1, 43, 2, 2, 8, 8, 8, 9, {}),
    "blocks of 1": (1, 33, 2, 1, 8, 8, 1, 4, {}),
    "many blocks": (1, 90, 1, 1, 8, 8, 2, 6, {"segment_ids": "packed"}),
    "head of 256": (1, 50, 1, 1, 256, 256, 12, 2, {}),
    "several tiles": (1, 300, 2, 1, 64, 64, 48, 3, {}),
    "wide blocks": (1, 300, 1, 1, 16, 16, 140, 2, {}),
    "sink and window": (1, 75, 4, 2, 8, 8, 4, 5, {"sink_blocks": 1, "window_blocks": 2}),
    "fixed gate": (
        *(3, 70, 2, 1, 8, 12, 4, 4),
        {"segment_ids": "packed", "sink_blocks": 1, "window_blocks": 2},
    ),
    "bfloat16": (1, 67, 4, 2, 32, 32, 16, 3, {"dtype": jnp.bfloat16}),
}


@functools.cache
def case(name):
    """Arguments of a case, its options, and what NumPy makes of them."""
    B, T, N, K, H, E, block_size, top_k, options = CASES[name]
    options = dict(options)
    dtype = options.pop("dtype", jnp.float32)
    q, k, v, do = inputs(B, T, N, K, H, E, seed=zlib.crc32(name.encode()), dtype=dtype)
    segments = options.get("segment_ids")
    if segments is not None:
        segments = options["segment_ids"] = jnp.asarray(SEGMENTS[segments](B, T), jnp.int32)
    options |= {"block_size": block_size, "top_k": top_k}
    truth = functools.partial(
        moba_numpy.moba,
        block_size=block_size,
        top_k=top_k,
        scale=options.get("scale", H**-0.5),
        segments=segments,
        soft_cap=options.get("soft_cap"),
        sinks=options.get("sink_blocks", 0),
        window=options.get("window_blocks", 0),
    )
    out, _, chosen, gap = truth(q, k, v, do)
    # Rows whose choice hangs on rounding are left out, with all gradients that they would give.
    clear = gap > 1e-5
    assert clear.mean() > 0.98
    do = jnp.where(jnp.asarray(clear)[..., None], do, 0)
    return (q, k, v, do), options, out, truth(q, k, v, do)[1], chosen, clear


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("name", CASES)
def test_equals_float64(name, implementation):
    (q, k, v, do), options, out, gradients, _, clear = case(name)
    actual, actual_gradients = out_and_gradients(implementation, q, k, v, do, **options)
    assert actual.dtype == q.dtype
    tolerance = 2e-5 if q.dtype == jnp.float32 else 1e-2
    assert_close(
        np.where(clear[..., None], actual, 0), np.where(clear[..., None], out, 0), tolerance
    )
    for x, a, e in zip((q, k, v), actual_gradients, gradients, strict=True):
        assert a.dtype == x.dtype
        assert_close(a, e, tolerance)
    if "segment_ids" in options:
        padding = np.asarray(options["segment_ids"]) == 0
        for x in (actual, *actual_gradients):
            assert not np.any(np.asarray(x)[padding])


@pytest.mark.quick
@pytest.mark.parametrize("name", ["grouped queries", "documents"])
def test_default_equals_float64(name):
    (q, k, v, do), options, out, gradients, *_ = case(name)
    actual, actual_gradients = out_and_gradients("xla", q, k, v, do, **options)
    assert_close(actual, out, 2e-5)
    for a, e in zip(actual_gradients, gradients, strict=True):
        assert_close(a, e, 2e-5)


@pytest.mark.parametrize("path", XLA_PATHS)
@pytest.mark.parametrize("block_size", [1, 16, 24, 100])
def test_any_length(block_size, path):
    for T in sorted({1, max(1, block_size - 1), block_size, block_size + 1, 7 * block_size + 3}):
        q, k, v, do = inputs(1, T, 2, 1, 4, 4, seed=T)
        options = {"block_size": block_size, "top_k": 3}
        out = attention(path, q, k, v, **options)
        truth, *_, gap = moba_numpy.moba(q, k, v, do, scale=0.5, **options)
        clear = (gap > 1e-5)[..., None]
        assert_close(np.where(clear, out, 0), np.where(clear, truth, 0), 2e-5)


@pytest.mark.parametrize("path", XLA_PATHS)
def test_float64_paths_agree_to_rounding(path):
    """In float64 no choice is near-tied, and an error anywhere stands out of 1e-12."""
    with jax.enable_x64(True):
        q, k, v, do = inputs(2, 130, 4, 2, 8, 12, dtype=jnp.float64)
        segments = jnp.asarray(SEGMENTS["packed"](2, 130)[::-1].copy(), jnp.int32)
        options = {"block_size": 8, "top_k": 4, "segment_ids": segments, "soft_cap": 3.0}
        actual, expected = (
            out_and_gradients(i, q, k, v, do, **options) for i in (path, "reference")
        )
        for a, e in zip(jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True):
            assert a.dtype == jnp.float64
            assert_close(a, e, 1e-12)


def full_attention(q, k, v, scale):
    """Causal attention of one document, in float64."""
    q, k, v = (np.asarray(x).astype(np.float64) for x in (q, k, v))
    s = np.einsum("btnh,blnh->bntl", q, k) * scale
    s = np.where(np.tril(np.ones(s.shape[-2:], bool)), s, -np.inf)
    p = np.exp(s - s.max(-1, keepdims=True))
    return np.einsum("bntl,blnh->btnh", p / p.sum(-1, keepdims=True), v)


@pytest.mark.parametrize("implementation", [*IMPLEMENTATIONS, "xla"])
def test_top_k_counts_the_own_block(implementation):
    """1 is the block diagonal, as many as there are is everything, and 0 is an error."""
    f = functools.partial(attention, implementation)
    q, k, v, _ = inputs(1, 43, 2, 2, 8, 8)
    diagonal = [
        full_attention(*(x[:, s : s + 8] for x in (q, k, v)), 8**-0.5) for s in range(0, 43, 8)
    ]
    assert_close(f(q, k, v, block_size=8, top_k=1), np.concatenate(diagonal, 1), 2e-5)
    for top_k in (6, 7, 100):
        assert_close(f(q, k, v, block_size=8, top_k=top_k), full_attention(q, k, v, 8**-0.5), 2e-5)
    # One block fewer is another function.
    assert (
        np.max(np.abs(f(q, k, v, block_size=8, top_k=5) - full_attention(q, k, v, 8**-0.5))) > 1e-3
    )
    with pytest.raises(ValueError, match="0"):
        f(q, k, v, block_size=8, top_k=0)


@pytest.mark.quick
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_ties_go_to_the_lowest_block(implementation):
    B, T, M = 2, 80, 8
    q, k, v, _ = inputs(B, T, 2, 1, 8, 8)
    # The very same block of keys everywhere, then one whose score is lower for half of the queries.
    k = jnp.tile(k[:, :M], (1, T // M, 1, 1))
    k = k.at[:, 2 * M : 3 * M].multiply(-1)
    start, valid = choose_blocks(q, k, block_size=M, top_k=3)
    q_, k_, start, valid = (np.asarray(x) for x in (q, k, start, valid))
    for b in range(B):
        for t in range(T):
            for n in range(2):
                score = [q_[b, t, n] @ k_[b, s : s + M, 0].mean(0) for s in range(0, t // M * M, M)]
                lower = score and score[0] < 0
                order = sorted(range(len(score)), key=lambda i: (i != 2) if lower else (i == 2))
                assert [s // M for s in start[b, t, n][valid[b, t, n]]] == order[:2]
    # All-zero queries tie exactly: blocks 0 and 1 and the own one.
    out = attention(implementation, jnp.zeros_like(q), k, v, block_size=M, top_k=3)
    v_ = np.asarray(v, np.float64)[:, :, 0]
    for t in range(2 * M, T):
        keys = [*range(2 * M), *range(t // M * M, t + 1)]
        np.testing.assert_allclose(out[:, t, 0], v_[:, keys].mean(1), atol=1e-5)


@pytest.mark.parametrize("path", XLA_PATHS)
def test_new_segments_under_one_compilation(path):
    q, k, v, _ = inputs(1, 50, 2, 2, 8, 8)
    traces = []

    @jax.jit
    def f(q, k, v, segments):
        traces.append(1)
        return traced(path, q, k, v, block_size=4, top_k=3, segment_ids=segments)

    for boundary in (10, 23):
        segments = jnp.asarray([[1] * boundary + [2] * (50 - boundary)], jnp.int32)
        expected = attention("reference", q, k, v, block_size=4, top_k=3, segment_ids=segments)
        assert_close(f(q, k, v, segments), expected, 2e-5)
    assert len(traces) == 1


@pytest.mark.parametrize("path", XLA_PATHS)
def test_packed_equals_separate(path):
    lengths = (1, 13, 22, 9)
    q, k, v, _ = inputs(1, sum(lengths), 4, 2, 8, 8)
    ids = np.repeat([1, 2, 1, 7], lengths)
    f = functools.partial(attention, path, block_size=4, top_k=3)
    packed = f(q, k, v, segment_ids=jnp.asarray(ids[None]))
    edge = 0
    for length in lengths:
        alone = f(*(x[:, edge : edge + length] for x in (q, k, v)))
        assert_close(packed[:, edge : edge + length], alone, 2e-6)
        edge += length


@pytest.mark.quick
@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_padding_is_invisible(implementation):
    """Left or right padding equals none, and rubbish in it reaches neither result nor gradient."""
    T, pad = 45, 9
    q, k, v, do = inputs(1, T, 4, 2, 8, 8)
    options = {"block_size": 8, "top_k": 3}
    expected, expected_gradients = out_and_gradients(implementation, q, k, v, do, **options)
    for front, back, rubbish in ((pad, 0, jnp.nan), (0, pad, jnp.inf)):
        widths = ((0, 0), (front, back), (0, 0), (0, 0))
        padded = [jnp.pad(x, widths, constant_values=rubbish) for x in (q, k, v)]
        segments = jnp.pad(jnp.ones((1, T), jnp.int32), widths[:2])
        out, gradients = out_and_gradients(
            implementation, *padded, jnp.pad(do, widths), segment_ids=segments, **options
        )
        for a, e in zip((out, *gradients), (expected, *expected_gradients), strict=True):
            assert not np.any(a[:, :front]) and not np.any(a[:, T + front :])
            assert_close(a[:, front : T + front], e, 2e-6)


@pytest.mark.parametrize("path", XLA_PATHS)
def test_gradient_of_padding_is_ignored(path):
    q, k, v, do = inputs(1, 40, 2, 2, 8, 8)
    segments = jnp.asarray([[1] * 30 + [0] * 10], jnp.int32)
    f = functools.partial(
        out_and_gradients, path, q, k, v, segment_ids=segments, block_size=8, top_k=3
    )
    for actual, expected in zip(
        f(do.at[:, 30:].set(jnp.nan))[1], f(do.at[:, 30:].set(0))[1], strict=True
    ):
        assert bits(actual) == bits(expected)


@pytest.mark.parametrize("path", XLA_PATHS)
def test_grouped_queries_equal_repeated_keys(path):
    q, k, v, do = inputs(1, 50, 6, 2, 8, 8)
    f = functools.partial(out_and_gradients, path, block_size=8, top_k=3)
    out, (dq, dk, dv) = f(q, k, v, do)
    repeated, gradients = f(q, jnp.repeat(k, 3, 2), jnp.repeat(v, 3, 2), do)
    assert_close(out, repeated, 2e-6)
    assert_close(dq, gradients[0], 5e-6)
    for a, e in zip((dk, dv), gradients[1:], strict=True):
        assert_close(a, e.reshape(1, 50, 2, 3, 8).sum(3), 5e-6)


def test_heads_choose_separately():
    q, k, _, _ = inputs(1, 64, 4, 1, 8, 8)
    start, valid = choose_blocks(q, k, block_size=8, top_k=3)
    alone = [choose_blocks(q[:, :, n : n + 1], k, block_size=8, top_k=3)[0] for n in range(4)]
    assert np.array_equal(start, np.concatenate(alone, 2))
    assert len({bits(start[:, :, n]) for n in range(4)}) == 4
    assert np.all(valid[:, 16:]) and not np.any(valid[:, :8])


@pytest.mark.parametrize(
    "name",
    [
        *("grouped queries", "documents", "many blocks", "blocks of 1"),
        *("sink and window", "fixed gate"),
    ],
)
def test_choose_blocks_equals_float64(name):
    (q, k, *_), options, _, _, chosen, clear = case(name)
    J = options["top_k"] - 1
    start, valid = choose_blocks(
        q, k, **{name: x for name, x in options.items() if name not in ("scale", "soft_cap")}
    )
    assert start.shape == valid.shape == (*q.shape[:3], J) and start.dtype == jnp.int32
    for (b, t, n), expected in chosen.items():
        # The last chosen is clear of the first left out; the order of the rest may be near a tie.
        if clear[b, t, n]:
            assert sorted(start[b, t, n][valid[b, t, n]].tolist()) == sorted(expected)
    assert not np.any(np.asarray(start)[~np.asarray(valid)])


def test_fixed_gate_is_a_window_with_sinks():
    """Own block, the first, and the two before the own, whatever queries and keys are."""
    q, k, *_ = inputs(1, 48, 2, 1, 8, 8)
    options = {"block_size": 8, "top_k": 4, "sink_blocks": 1, "window_blocks": 2}
    start, valid = choose_blocks(q, k, **options)
    expected = {0: [], 1: [0], 2: [0, 8], 3: [0, 8, 16], 4: [0, 16, 24], 5: [0, 24, 32]}
    for t in range(48):
        assert start[0, t, 1][valid[0, t, 1]].tolist() == expected[t // 8]
    assert dot_flops(functools.partial(moba.choose_blocks, **options), q, k) == 0


def test_choose_blocks_where_there_are_fewer():
    q, k, *_ = inputs(1, 20, 2, 2, 8, 8)
    for top_k in (1, 2, 9):
        start, valid = choose_blocks(q, k, block_size=8, top_k=top_k)
        assert start.shape == (1, 20, 2, top_k - 1)
        assert np.array_equal(valid.sum(-1)[0, :, 0], np.minimum(np.arange(20) // 8, top_k - 1))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_scale_does_not_change_the_choice(implementation):
    """Values that name their block show which were attended."""
    T, M = 64, 8
    q, k, _, _ = inputs(1, T, 2, 2, 8, 8)
    v = jnp.broadcast_to(jax.nn.one_hot(jnp.arange(T) // M, T // M)[None, :, None], (1, T, 2, 8))
    outs = [
        attention(implementation, q, k, v, block_size=M, top_k=3, scale=scale)
        for scale in (-0.3, 1e-3, 0.5)
    ]
    outs.append(attention(implementation, q, k, v, block_size=M, top_k=3, soft_cap=0.5))
    attended = [np.asarray(out) > 1e-12 for out in outs]
    assert all(np.array_equal(a, attended[0]) for a in attended)
    assert np.all(attended[0].sum(-1)[0, 2 * M :] == 3)
    assert np.max(np.abs(outs[0] - outs[2])) > 0.01


@pytest.mark.parametrize("path", XLA_PATHS)
def test_exact_at_large_scores(path):
    """Whole numbers make scores of 3e5 exact, and then probabilities and gradients are."""
    T, M = 45, 8
    rng = np.random.default_rng(0)
    q = jnp.full((1, T, 4, 8), 2.0**9)
    k = jnp.asarray(rng.integers(0, 3, (1, T, 2, 8)) / 2**9 + 2**6 * 1.5, jnp.float32)
    v, do = inputs(1, T, 4, 2, 8, 8)[2:]
    options = {"block_size": M, "top_k": 3, "scale": 1.0}
    *_, gap = moba_numpy.moba(q, k, v, do, **options)
    do = jnp.where(jnp.asarray(gap > 0.01)[..., None], do, 0)
    truth, expected, _, gap = moba_numpy.moba(q, k, v, do, **options)
    clear = (gap > 0.01)[..., None]
    out, gradients = out_and_gradients(path, q, k, v, do, **options)
    assert_close(np.where(clear, out, 0), np.where(clear, truth, 0), 2e-5)
    # dk is a sum of products with 2 ** 9 and cancels; v's gradient is the probabilities alone.
    assert_close(gradients[2], expected[2], 2e-5)


@pytest.mark.parametrize("path", XLA_PATHS)
def test_one_block_for_all_and_blocks_for_none(path):
    """Every query that can chooses block 1; blocks 2 and 3 are nobody's but their own queries'."""
    T, M = 64, 16
    q, k, v, do = inputs(1, T, 2, 1, 8, 8)
    q = q.at[..., 0].set(4.0)
    k = k.at[..., 0].set(-3.0).at[:, M : 2 * M, :, 0].set(3.0)
    options = {"block_size": M, "top_k": 2}
    out, gradients = out_and_gradients(path, q, k, v, do, **options)
    truth, expected, chosen, _ = moba_numpy.moba(q, k, v, do, scale=8**-0.5, **options)
    assert all(chosen[0, t, n] == [M] for t in range(2 * M, T) for n in range(2))
    assert_close(out, truth, 2e-5)
    for a, e in zip(gradients, expected, strict=True):
        assert_close(a, e, 2e-5)
    # Queries of block 3 alone have a say: block 2 was chosen by none of them.
    _, gradients = out_and_gradients(path, q, k, v, do.at[:, : 3 * M].set(0), **options)
    for x in gradients[1:]:
        assert not np.any(x[:, 2 * M : 3 * M]) and np.any(x[:, M : 2 * M])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores(implementation):
    q, k, v, do = inputs(1, 45, 4, 2, 8, 8)
    options = {"block_size": 8, "top_k": 3}
    big = (200 * q, 200 * k, v)
    out, gradients = out_and_gradients(implementation, *big, do, **options)
    truth, expected, *_ = moba_numpy.moba(*big, do, scale=8**-0.5, **options)
    assert np.abs(np.einsum("bnh,bnh->bn", big[0][:, :, 0], big[1][:, :, 0])).max() > 1e4
    assert_close(out, truth, 2e-5)
    # Softmax is saturated; what is left are products of rounding errors with keys of 1e2.
    for a, e in zip(gradients, expected, strict=True):
        np.testing.assert_allclose(a, e, atol=2e-3)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [1e20, -1e20, 3e38])
def test_overflowing_scores_keep_the_own_block(implementation, size):
    T, M = 32, 8
    q = jnp.full((1, T, 1, 4), 1e20)
    k = jnp.full((1, T, 1, 4), size)
    v = jnp.broadcast_to(jax.nn.one_hot(jnp.arange(T), T)[None, :, None], (1, T, 1, T))
    out = attention(implementation, q, k, v, block_size=M, top_k=2)
    # All scores are the same, whatever they overflow to: block 0 and the own one.
    for t in range(T):
        keys = {*range(M if t >= M else 0), *range(t // M * M, t + 1)}
        assert set(np.flatnonzero(out[0, t, 0])) == keys
        np.testing.assert_allclose(out[0, t, 0].sum(), 1, rtol=1e-6)
    assert np.all(np.isfinite(out))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_nan_scores_lose(implementation):
    """A block whose score is NaN is chosen last, and does not spoil queries that left it."""
    T, M = 40, 8
    q, k, v, _ = inputs(1, T, 1, 1, 8, 8)
    k = k.at[:, M].set(jnp.nan)
    out = np.asarray(attention(implementation, q, k, v, block_size=M, top_k=2))
    assert np.all(np.isfinite(out[:, 2 * M :])) and np.all(np.isfinite(out[:, :M]))
    start, valid = (np.asarray(x)[0, :, 0, 0] for x in choose_blocks(q, k, block_size=M, top_k=2))
    q, k = np.asarray(q)[0, :, 0], np.asarray(k)[0, :, 0]
    for t in range(M, T):
        starts = [s for s in range(0, t // M * M, M) if s != M]
        best = max(starts, key=lambda s: q[t] @ k[s : s + M].mean(0))
        assert valid[t] and start[t] == best


@pytest.mark.parametrize("path", XLA_PATHS)
@pytest.mark.parametrize("segmented", [False, True])
def test_future_never_leaks(path, segmented):
    """Earlier rows are bitwise the same whatever later keys hold, and equal the prefix's."""
    T, M = 60, 8
    q, k, v, _ = inputs(1, T, 2, 1, 8, 8)
    segments = jnp.asarray([[1] * 7 + [2] * (T - 7)], jnp.int32) if segmented else None
    # Own keys score below -1e5, so that a finite mask value would beat them.
    q, k = jnp.abs(q) * 300, -jnp.abs(k) * 1000
    f = functools.partial(attention, path, block_size=M, top_k=3)
    out = f(q, k, v, segment_ids=segments)
    for cut in (5, 24, 31, 59):
        for key, value in ((jnp.inf, 7.0), (1e3, 1e3), (-1e6, 7.0)):
            changed = f(q, k.at[:, cut:].set(key), v.at[:, cut:].set(value), segment_ids=segments)
            assert bits(changed[:, :cut]) == bits(out[:, :cut])
    for cut in (24, 31):
        ids = None if segments is None else segments[:, :cut]
        prefix = f(*(x[:, :cut] for x in (q, k, v)), segment_ids=ids)
        assert_close(prefix, out[:, :cut], 1e-6)


@pytest.mark.parametrize("path", XLA_PATHS)
def test_repeats_are_bitwise_equal(path):
    (q, k, v, do), options, *_ = case("documents")
    f = functools.partial(out_and_gradients, path, q, k, v, do, **options)
    first = [bits(x) for x in jax.tree.leaves(f())]
    for _ in range(200):
        assert [bits(x) for x in jax.tree.leaves(f())] == first


def test_batch_sharded_over_devices():
    """In a process of its own, where the CPU counts as eight devices."""
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    command = [sys.executable, "-m", "tests.kernels.sharded"]
    subprocess.run(command, env=environment, cwd=pathlib.Path(__file__).parents[2], check=True)


def shapes(B, T, N, K, H, E, dtype=jnp.float32):
    return tuple(jax.ShapeDtypeStruct(s, dtype) for s in ((B, T, N, H), (B, T, K, H), (B, T, K, E)))


FLOP_SHAPES = {
    # B, T, N, K, H, E, block_size, top_k, segments
    "dense": (8, 256, 4, 4, 32, 32, 32, 3, False),
    "dense, documents": (2, 700, 4, 2, 16, 24, 64, 3, True),
    "everything": (1, 3000, 2, 1, 16, 16, 512, 6, False),
    "own block": (2, 1500, 4, 2, 16, 24, 100, 1, False),
    "grouped": (1, 8192, 4, 2, 64, 32, 128, 4, False),
    "grouped, documents": (3, 5000, 4, 1, 16, 24, 24, 4, True),
    "one token": (1, 1, 1, 1, 4, 4, 8, 2, False),
}


@pytest.mark.parametrize("name", FLOP_SHAPES)
def test_dot_flops_counts_what_is_executed(name):
    B, T, N, K, H, E, block_size, top_k, segments = FLOP_SHAPES[name]
    ids = jnp.ones((B, T), jnp.int32) if segments else None

    def f(q, k, v):
        return moba.moba_attention(
            q, k, v, block_size=block_size, top_k=top_k, segment_ids=ids, implementation="xla"
        )

    def loss(*x):
        return f(*x).sum()

    args = shapes(B, T, N, K, H, E)
    forward, both = moba.dot_flops(
        batch=B,
        length=T,
        heads=N,
        kv_heads=K,
        head_width=H,
        value_width=E,
        block_size=block_size,
        top_k=top_k,
        segments=segments,
    )
    assert dot_flops(f, *args) == forward
    assert dot_flops(jax.grad(loss, (0, 1, 2)), *args) == both


def grouped_gradient(block_size, top_k, segments):
    def loss(q, k, v):
        ids = jnp.ones(q.shape[:2], jnp.int32) if segments else None
        return traced("grouped", q, k, v, block_size=block_size, top_k=top_k, segment_ids=ids).sum()

    return jax.grad(loss, (0, 1, 2))


@pytest.mark.parametrize("segments", [False, True])
def test_no_buffer_of_queries_by_blocks(segments):
    """On the grouped path no array holds T x T, nor T x blocks for all heads."""
    T, N, H, block_size, top_k = 1 << 15, 8, 64, 32, 3
    f = grouped_gradient(block_size, top_k, segments)
    jaxpr = jax.make_jaxpr(f)(*shapes(1, T, N, 2, H, H)).jaxpr
    largest = max(v.aval.size for eqn, _ in equations(jaxpr) for v in eqn.outvars)
    # Partial results of all pairs, with their padding.
    assert largest <= N * T * (top_k - 1) * H * 1.3
    assert largest < T * N * (T // block_size) / 6


@pytest.mark.parametrize("segments", [False, True])
def test_memory_grows_with_pairs(segments):
    sizes = {}
    for T in (8192, 16384) if segments else (4096, 8192, 16384):
        f = jax.jit(grouped_gradient(64, 3, segments), compiler_options=FAST_COMPILE)
        memory = f.lower(*shapes(1, T, 2, 1, 32, 32)).compile().memory_analysis()
        sizes[T] = memory.temp_size_in_bytes
    assert all(size < 2.3 * sizes.get(T // 2, size) for T, size in sizes.items())
    # Eight float32 arrays of all pairs' partial gradients; scores of T x T would be 2 GiB.
    assert sizes[16384] < 8 * 2 * 16384 * 2 * 32 * 4


def test_a_million_tokens_lower():
    """Every index fits int32: no axis of an index table reaches 2 ** 31, and nothing wraps."""
    f = grouped_gradient(512, 4, True)
    args = shapes(1, 1 << 20, 32, 4, 128, 128, jnp.bfloat16)
    jax.jit(f).trace(*args).lower(lowering_platforms=("tpu",))
    for eqn, _ in equations(jax.make_jaxpr(f)(*args).jaxpr):
        if eqn.primitive.name == "iota":
            assert eqn.outvars[0].aval.size < 2**31
    layout = xla_layout.make_layout(
        plan.make_call(1 << 20, 512, 4, aligned=False),
        batch=1,
        length=1 << 20,
        kv_heads=4,
        groups=8,
        key_width=128,
        value_width=128,
    )
    assert not layout.dense
    assert 8 * (1 << 20) * 3 < layout.steps * layout.step_tiles * layout.tile < 2**31


@pytest.mark.parametrize("path", XLA_PATHS)
def test_remat_keeps_the_choice(path):
    """Kept by name, the choice is made once; the results are those without remat."""
    (q, k, v, do), options, *_ = case("documents")

    def f(q, k, v):
        return traced(path, q, k, v, **options)

    keep = jax.checkpoint_policies.save_only_these_names("moba_chosen_blocks")

    def gradient(f):
        return jax.grad(lambda *x: jnp.sum(f(*x) * do), (0, 1, 2))

    def choices(f):
        jaxpr = jax.make_jaxpr(gradient(f))(q, k, v).jaxpr
        highest = (jax.lax.Precision.HIGHEST,) * 2
        # Of the products with this precision, only that of the choice has the candidates for rows.
        blocks = plan.num_candidates(q.shape[1], options["block_size"])
        return sum(
            eqn.primitive.name == "dot_general"
            and eqn.params["precision"] == highest
            and eqn.outvars[0].aval.shape[2] == blocks
            for eqn, _ in equations(jaxpr)
        )

    assert choices(f) == 1
    assert choices(jax.checkpoint(f)) == 2
    assert choices(jax.checkpoint(f, policy=keep)) == 1
    expected = out_and_gradients(path, q, k, v, do, **options)[1]
    remat = jax.checkpoint(f, policy=keep)
    actual = jax.jit(gradient(remat), compiler_options=FAST_COMPILE)(q, k, v)
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, 1e-6)


def test_scan_over_layers():
    """One scanned layer after another equals calling them one by one."""
    q, k, v, do = inputs(1, 40, 2, 2, 8, 8)

    def layer(x, weight):
        return traced("grouped", x, k * weight, v, block_size=8, top_k=3) + x

    def scanned(x, weights):
        step = jax.checkpoint(lambda x, w: (layer(x, w), None))
        return jnp.sum(jax.lax.scan(step, x, weights)[0] * do)

    def unrolled(x, weights):
        for weight in weights:
            x = layer(x, weight)
        return jnp.sum(x * do)

    weights = jnp.array([0.5, 1.5])
    actual, expected = (
        jax.jit(jax.grad(f, (0, 1)), compiler_options=FAST_COMPILE)(q, weights)
        for f in (scanned, unrolled)
    )
    for a, e in zip(actual, expected, strict=True):
        assert_close(a, e, 1e-5)


@pytest.mark.parametrize("seed", range(3))
def test_dispatch_tables(seed):
    """Each pair has a slot of its own, in a tile of its block, that names its row."""
    rng = np.random.default_rng(seed)
    rows, S, tile, J = 37, 6, 4, 3
    chosen = np.stack([rng.permutation(S)[:J] for _ in range(rows)], 1)
    chosen[rng.random(chosen.shape) < 0.3] = -1
    chosen[chosen == 2] = -1
    num_tiles = rows * J // tile + S
    dispatch = jax.jit(plan.dispatch, static_argnums=(1, 2, 3, 4))
    tiles = dispatch(jnp.asarray(chosen.reshape(-1)), rows, S, num_tiles, tile)
    block, row, slot, used = (np.asarray(x) for x in tiles)
    valid = chosen.reshape(-1) >= 0
    assert len(set(slot[valid])) == valid.sum()
    for p in np.flatnonzero(valid):
        assert block[slot[p] // tile] == chosen.reshape(-1)[p]
        assert row.reshape(-1)[slot[p]] == p % rows
    assert (row < rows).sum() == valid.sum() and np.all(row <= rows)
    # Tiles of one block follow each other, and a block that nobody chose has one too.
    assert np.all(np.diff(block) >= 0)
    assert set(block[:used]) == set(range(S))
    assert np.all(row[used:] == rows) and slot[valid].max() < used * tile


def test_both_sorts_agree():
    """Pairs too many for one number are sorted by two."""
    rng = np.random.default_rng(0)
    keys = jnp.asarray(rng.integers(0, 9, 300), jnp.int32)
    pairs = jnp.arange(300, dtype=jnp.int32)
    one, two = (plan._sort(keys, pairs, largest) for largest in (8, 1 << 24))
    order = np.argsort(np.asarray(keys), kind="stable")
    for sort in (one, two):
        assert np.array_equal(sort[0], np.asarray(keys)[order])
        assert np.array_equal(sort[1], order)


@pytest.mark.parametrize("block_size", [1, 3, 8])
def test_candidates_of_random_documents(block_size):
    rng = np.random.default_rng(block_size)
    T = 41
    ids = rng.integers(0, 3, (6, T))
    ids[3:] = np.repeat(ids[3:, :6], 7, axis=1)[:, :T]
    find_blocks = jax.jit(plan.find_blocks, static_argnums=(0, 1))
    blocks = jax.tree.map(np.asarray, find_blocks(T, block_size, jnp.asarray(ids)))
    keys = jnp.arange(T, dtype=jnp.float32)[None, None, :, None]
    for b in range(6):
        bounds = moba_numpy.block_bounds(ids[b], block_size)
        for t, (begin, own) in enumerate(bounds):
            first, end = blocks.first_BT[b, t], blocks.end_BT[b, t]
            expected = list(range(begin, own, block_size)) if ids[b, t] else []
            assert blocks.start_BS[b, first:end].tolist() == expected
            assert blocks.own_BT[b, t] == (own if ids[b, t] else -1)
    keys = jnp.broadcast_to(keys, (6, 1, T, 1))
    cut = plan.cut_blocks(keys, blocks, block_size, aligned=False)
    pasted = np.asarray(plan.paste_blocks(cut, blocks, T, aligned=False))[:, 0, :, 0]
    assert np.array_equal(pasted, np.where(blocks.slot_BT >= 0, np.arange(T), 0))
    assert np.any(pasted)


@pytest.mark.parametrize("choices", [0, 1, 3, 9])
def test_max_pairs(choices):
    for length in (1, 7, 8, 9, 50):
        expected = sum(min(choices, t // 8) for t in range(length))
        assert plan.max_pairs(length, 8, choices) == expected


@pytest.mark.quick
def test_errors():
    x = jnp.zeros((2, 8, 4, 6))
    good = {"block_size": 4, "top_k": 2}

    def check(message, *args, error=ValueError, **options):
        with pytest.raises(error, match=message):
            moba.moba_attention(*args, **{**good, **options})

    check("top_k .* 0", x, x, x, top_k=0)
    check("block_size .* -1", x, x, x, block_size=-1)
    check(r"\(2, 8, 6\)", x, x[:, :, 0], x)
    check(r"\(2, 7, 4, 6\)", x, x[:, :7], x)
    check(r"\(1, 8, 4, 6\)", x, x, x[:1])
    check("4 and 2", x, x, x[:, :, :2])
    check("3 key heads .* 4 query heads", x, x[:, :, :3], x[:, :, :3])
    check("6 and 5", x, x[..., :5], x)
    check(r"\(2, 8\), got \(2, 7\)", x, x, x, segment_ids=jnp.ones((2, 7), jnp.int32))
    check("integers, got float32", x, x, x, segment_ids=jnp.ones((2, 8)))
    check("soft_cap .* -1", x, x, x, soft_cap=-1.0)
    check("soft_cap .* inf", x, x, x, soft_cap=float("inf"))
    check("scale .* nan", x, x, x, scale=float("nan"))
    check("top_k .* 2.5", x, x, x, top_k=2.5)
    check("block_size .* 4.0", x, x, x, block_size=4.0)
    check("sink_blocks 1 .* window_blocks 1 .* 1 blocks", x, x, x, sink_blocks=1, window_blocks=1)
    check("sink_blocks .* -1", x, x, x, sink_blocks=-1)
    check("window_blocks .* 0.5", x, x, x, window_blocks=0.5)
    check(r"empty: query \(0,", x[:0], x[:0], x[:0])
    check(r"empty: query \(2, 0,", x[:, :0], x[:, :0], x[:, :0])
    check("empty", x[:, :, :0], x[:, :, :0], x[:, :, :0])
    check("empty", x[..., :0], x[..., :0], x)
    check("key .* int32", x, x.astype(jnp.int32), x)
    check("'xla'", x, x, x, implementation="cuda")
    with pytest.raises(ValueError, match="top_k"):
        moba.choose_blocks(x, x, block_size=4, top_k=0)
    with pytest.raises(ValueError, match="empty"):
        moba.choose_blocks(x[:0], x[:0], block_size=4, top_k=2)
    sizes = {"batch": 1, "length": 8, "heads": 3, "kv_heads": 2, "head_width": 4}
    for bad in ({}, {"batch": 0, "kv_heads": 1}, {"length": 0, "kv_heads": 3}):
        with pytest.raises(ValueError, match="kv_heads"):
            moba.dot_flops(**sizes | bad, **good)


@pytest.mark.parametrize("implementation", ("reference", "xla"))
def test_huge_numbers_mean_everything(implementation):
    q, k, v, _ = inputs(1, 20, 2, 1, 8, 8)
    expected = full_attention(q, np.repeat(k, 2, 2), np.repeat(v, 2, 2), 8**-0.5)
    for block_size, top_k in ((10**12, 2), (4, 10**12)):
        out = attention(implementation, q, k, v, block_size=block_size, top_k=top_k)
        assert_close(out, expected, 2e-5)


def test_public_name():
    from modo.ops import moba as ops

    assert ops.moba_attention is moba.moba_attention
    assert ops.choose_blocks is moba.choose_blocks
