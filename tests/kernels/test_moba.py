import functools
import zlib
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas import moba
from kernels_pallas.moba import plan, xla
from tests.kernels import moba_numpy

IMPLEMENTATIONS = ("reference", "dense", "grouped")
XLA_PATHS = ("dense", "grouped")
# Code for tiny shapes takes longer to optimise than to run.
FAST_COMPILE = {"xla_backend_optimization_level": 0}


def attention(name, *args, **options):
    """moba_attention by one implementation, "xla" on the named one of its two paths."""
    if name == "reference":
        return moba.moba_attention(*args, implementation="reference", **options)
    forced = {"xla": functools.partial(xla.attention, path=name)}
    with mock.patch.dict(moba._IMPLEMENTATIONS, forced):
        return moba.moba_attention(*args, implementation="xla", **options)


def inputs(B, T, N, K, H, E, seed=0, dtype=jnp.float32):
    """query, key, value and the gradient of the output."""
    rng = np.random.default_rng(seed)
    shapes = ((B, T, N, H), (B, T, K, H), (B, T, K, E), (B, T, N, E))
    return tuple(jnp.asarray(rng.normal(size=s), dtype) for s in shapes)


def out_and_gradients(f, q, k, v, do, **static):
    """The output of f(q, k, v) and gradients of its product with `do`, compiled."""

    def loss(q, k, v, do):
        out = f(q, k, v)
        return jnp.sum(out.astype(jnp.float32) * do.astype(jnp.float32)), out

    g = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True), compiler_options=FAST_COMPILE)
    (_, out), gradients = g(q, k, v, do)
    return out, gradients


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
            np.array(([5] * (T - 7) + [0] * 7)),
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
    actual, actual_gradients = out_and_gradients(
        lambda *x: attention(implementation, *x, **options), q, k, v, do
    )
    assert actual.dtype == q.dtype
    tolerance = 2e-5 if q.dtype == jnp.float32 else 1e-2
    assert_close(np.where(clear[..., None], actual, 0), np.where(clear[..., None], out, 0), tolerance)
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
    actual, actual_gradients = out_and_gradients(
        lambda *x: moba.moba_attention(*x, **options), q, k, v, do
    )
    assert_close(actual, out, 2e-5)
    for a, e in zip(actual_gradients, gradients, strict=True):
        assert_close(a, e, 2e-5)


@pytest.mark.parametrize("path", XLA_PATHS)
@pytest.mark.parametrize("block_size", [1, 16, 24, 100])
def test_any_length(block_size, path):
    for T in sorted({1, max(1, block_size - 1), block_size, block_size + 1, 7 * block_size + 3}):
        q, k, v, do = inputs(1, T, 2, 1, 4, 4, seed=T)
        options = {"block_size": block_size, "top_k": 3}
        out = jax.jit(
            lambda *x, o=options: attention(path, *x, **o), compiler_options=FAST_COMPILE
        )(q, k, v)
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
            out_and_gradients(lambda *x, i=i: attention(i, *x, **options), q, k, v, do)
            for i in (path, "reference")
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
    if implementation == "xla":
        f = functools.partial(moba.moba_attention, implementation="xla")
    q, k, v, _ = inputs(1, 43, 2, 2, 8, 8)
    diagonal = [full_attention(*(x[:, s : s + 8] for x in (q, k, v)), 8**-0.5) for s in range(0, 43, 8)]
    assert_close(f(q, k, v, block_size=8, top_k=1), np.concatenate(diagonal, 1), 2e-5)
    for top_k in (6, 7, 100):
        assert_close(f(q, k, v, block_size=8, top_k=top_k), full_attention(q, k, v, 8**-0.5), 2e-5)
    # One block fewer is another function.
    assert np.max(np.abs(f(q, k, v, block_size=8, top_k=5) - full_attention(q, k, v, 8**-0.5))) > 1e-3
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
    start, valid = moba.choose_blocks(q, k, block_size=M, top_k=3)
    for b in range(B):
        for t in range(T):
            for n in range(2):
                score = [q[b, t, n] @ k[b, s : s + M, 0].mean(0) for s in range(0, t // M * M, M)]
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
        return attention(path, q, k, v, block_size=4, top_k=3, segment_ids=segments)

    for boundary in (10, 23):
        segments = jnp.asarray([[1] * boundary + [2] * (50 - boundary)], jnp.int32)
        expected = attention(
            "reference", q, k, v, block_size=4, top_k=3, segment_ids=segments
        )
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
    expected, expected_gradients = out_and_gradients(
        lambda *x: attention(implementation, *x, **options), q, k, v, do
    )
    for front, back, rubbish in ((pad, 0, jnp.nan), (0, pad, jnp.inf)):
        widths = ((0, 0), (front, back), (0, 0), (0, 0))
        padded = [jnp.pad(x, widths, constant_values=rubbish) for x in (q, k, v)]
        segments = jnp.pad(jnp.ones((1, T), jnp.int32), widths[:2])
        out, gradients = out_and_gradients(
            lambda *x, s=segments: attention(implementation, *x, segment_ids=s, **options),
            *padded,
            # Only the rows that count: NaN times 0 in the test's own loss would be its own fault.
            jnp.pad(do, widths),
        )
        for a, e in zip((out, *gradients), (expected, *expected_gradients), strict=True):
            assert not np.any(a[:, :front]) and not np.any(a[:, T + front :])
            assert_close(a[:, front : T + front], e, 2e-6)


@pytest.mark.parametrize("path", XLA_PATHS)
def test_gradient_of_padding_is_ignored(path):
    q, k, v, do = inputs(1, 40, 2, 2, 8, 8)
    segments = jnp.asarray([[1] * 30 + [0] * 10], jnp.int32)
    f = functools.partial(attention, path, block_size=8, top_k=3, segment_ids=segments)
    _, pull = jax.vjp(f, q, k, v)
    for actual, expected in zip(
        pull(do.at[:, 30:].set(jnp.nan)), pull(do.at[:, 30:].set(0)), strict=True
    ):
        assert bits(actual) == bits(expected)


@pytest.mark.parametrize("path", XLA_PATHS)
def test_grouped_queries_equal_repeated_keys(path):
    q, k, v, do = inputs(1, 50, 6, 2, 8, 8)
    f = functools.partial(attention, path, block_size=8, top_k=3)
    out, (dq, dk, dv) = out_and_gradients(f, q, k, v, do)
    repeated, gradients = out_and_gradients(
        f, q, jnp.repeat(k, 3, 2), jnp.repeat(v, 3, 2), do
    )
    assert_close(out, repeated, 2e-6)
    assert_close(dq, gradients[0], 5e-6)
    for a, e in zip((dk, dv), gradients[1:], strict=True):
        assert_close(a, e.reshape(1, 50, 2, 3, 8).sum(3), 5e-6)


def test_heads_choose_separately():
    q, k, _, _ = inputs(1, 64, 4, 1, 8, 8)
    start, valid = moba.choose_blocks(q, k, block_size=8, top_k=3)
    alone = [moba.choose_blocks(q[:, :, n : n + 1], k, block_size=8, top_k=3)[0] for n in range(4)]
    assert np.array_equal(start, np.concatenate(alone, 2))
    assert len({bits(start[:, :, n]) for n in range(4)}) == 4
    assert np.all(valid[:, 16:]) and not np.any(valid[:, :8])


@pytest.mark.parametrize("name", ["grouped queries", "documents", "many blocks", "blocks of 1"])
def test_choose_blocks_equals_float64(name):
    (q, k, *_), options, _, _, chosen, clear = case(name)
    J = options["top_k"] - 1
    start, valid = moba.choose_blocks(
        q, k, **{n: options[n] for n in ("block_size", "top_k", "segment_ids") if n in options}
    )
    assert start.shape == valid.shape == (*q.shape[:3], J) and start.dtype == jnp.int32
    for (b, t, n), expected in chosen.items():
        # The last chosen is clear of the first left out; the order of the rest may be near a tie.
        if clear[b, t, n]:
            assert sorted(start[b, t, n][valid[b, t, n]].tolist()) == sorted(expected)
    assert not np.any(np.asarray(start)[~np.asarray(valid)])


def test_choose_blocks_where_there_are_fewer():
    q, k, *_ = inputs(1, 20, 2, 2, 8, 8)
    for top_k in (1, 2, 9):
        start, valid = moba.choose_blocks(q, k, block_size=8, top_k=top_k)
        assert start.shape == (1, 20, 2, top_k - 1)
        assert np.array_equal(
            valid.sum(-1)[0, :, 0], np.minimum(np.arange(20) // 8, top_k - 1)
        )


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
def test_one_block_for_all_and_blocks_for_none(path):
    """Every query that can chooses block 1; blocks 2 and 3 are nobody's but their own queries'."""
    T, M = 64, 16
    q, k, v, do = inputs(1, T, 2, 1, 8, 8)
    q = q.at[..., 0].set(4.0)
    k = k.at[..., 0].set(-3.0).at[:, M : 2 * M, :, 0].set(3.0)
    options = {"block_size": M, "top_k": 2}
    out, gradients = out_and_gradients(lambda *x: attention(path, *x, **options), q, k, v, do)
    truth, expected, chosen, _ = moba_numpy.moba(q, k, v, do, scale=8**-0.5, **options)
    assert all(chosen[0, t, n] == [M] for t in range(2 * M, T) for n in range(2))
    assert_close(out, truth, 2e-5)
    for a, e in zip(gradients, expected, strict=True):
        assert_close(a, e, 2e-5)
    # Queries of block 3 alone have a say: block 2 was chosen by none of them.
    _, gradients = out_and_gradients(
        lambda *x: attention(path, *x, **options), q, k, v, do.at[:, : 3 * M].set(0)
    )
    for x in gradients[1:]:
        assert not np.any(x[:, 2 * M : 3 * M]) and np.any(x[:, M : 2 * M])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_large_scores(implementation):
    q, k, v, do = inputs(1, 50, 2, 2, 8, 8)
    f = functools.partial(attention, implementation, block_size=8, top_k=3)
    options = {"block_size": 8, "top_k": 3, "scale": 8**-0.5}
    big = (200 * q, 200 * k, v)
    out, gradients = out_and_gradients(f, *big, do)
    truth, expected, *_ = moba_numpy.moba(*big, do, **options)
    assert np.abs(200.0**2 * np.asarray(q) @ np.asarray(k[0, 0, 0])).max() > 1e4
    assert_close(out, truth, 2e-5)
    # Scores of 1e5 leave 1e-2 of absolute precision in float32.
    for a, e in zip(gradients, expected, strict=True):
        assert_close(a, e, 2e-2)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("size", [1e20, -1e20, 3e38])
def test_overflowing_scores_keep_the_own_block(implementation, size):
    T, M = 32, 8
    q = jnp.full((1, T, 1, 4), 1e20)
    k = jnp.full((1, T, 1, 4), size)
    v = jnp.broadcast_to(jax.nn.one_hot(jnp.arange(T), T)[None, :, None], (1, T, 1, T))
    out, gradients = out_and_gradients(
        lambda *x: attention(implementation, *x, block_size=M, top_k=2), q, k, v, v
    )
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
    f = functools.partial(attention, implementation, block_size=M, top_k=2)
    out = f(q, k.at[:, M].set(jnp.nan), v)
    left_out = f(q, k.at[:, M : 2 * M].set(-100 * q.mean(1, keepdims=True)), v)
    assert np.all(np.isfinite(out[:, 2 * M :])) and np.all(np.isfinite(out[:, :M]))
    assert left_out.shape == out.shape
    start, _ = moba.choose_blocks(q, k.at[:, M].set(jnp.nan), block_size=M, top_k=2)
    assert not np.any(start[0, 2 * M :, 0, 0] == M)


@pytest.mark.parametrize("path", XLA_PATHS)
@pytest.mark.parametrize("segmented", [False, True])
def test_future_never_leaks(path, segmented):
    """Earlier rows are bitwise the same whatever later keys hold, and equal the prefix's."""
    T, M = 60, 8
    q, k, v, _ = inputs(1, T, 2, 1, 8, 8)
    segments = jnp.asarray([[1] * 7 + [2] * (T - 7)], jnp.int32) if segmented else None
    # Own keys score below -1e5, so that a finite mask value would beat them.
    q, k = jnp.abs(q) * 300, -jnp.abs(k) * 1000
    f = jax.jit(
        functools.partial(attention, path, block_size=M, top_k=3, segment_ids=segments),
        compiler_options=FAST_COMPILE,
    )
    out = f(q, k, v)
    for cut in (5, 24, 25, 31, 59):
        for key, value in ((jnp.inf, jnp.nan), (1e3, 1e3), (-1e6, 7.0)):
            changed = f(q, k.at[:, cut:].set(key), v.at[:, cut:].set(value))
            # NaN values are multiplied by probability 0 in a shared product, as in any attention.
            if np.isnan(value):
                continue
            assert bits(changed[:, :cut]) == bits(out[:, :cut])
        prefix = attention(
            path,
            *(x[:, :cut] for x in (q, k, v)),
            block_size=M,
            top_k=3,
            segment_ids=None if segments is None else segments[:, :cut],
        )
        assert_close(prefix, out[:, :cut], 1e-6)


@pytest.mark.parametrize("path", XLA_PATHS)
def test_repeats_are_bitwise_equal(path):
    (q, k, v, do), options, *_ = case("documents")
    _, pull = jax.vjp(functools.partial(attention, path, **options), q, k, v)
    f = jax.jit(lambda *x: (attention(path, *x[:3], **options), pull(x[3])))
    first = [bits(x) for x in jax.tree.leaves(f(q, k, v, do))]
    for _ in range(200):
        assert [bits(x) for x in jax.tree.leaves(f(q, k, v, do))] == first
