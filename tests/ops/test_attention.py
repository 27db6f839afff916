import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modo.ops import causal_attention

attend = jax.jit(causal_attention, static_argnames="soft_cap")

SEGMENTS = np.asarray([[1, 1, 1, 2, 2, 3, 3, 3], [0, 0, 1, 1, 0, 2, 2, 0]])


def reference(q_BTNH, k_BTKH, v_BTKH, segments_BT, soft_cap):
    """Token by token, head by head, in float64; rows of padding stay NaN."""
    B, T, N, H = q_BTNH.shape
    out_BTNH = np.full((B, T, N, H), np.nan)
    q_BTNH, k_BTKH, v_BTKH = (np.asarray(x, np.float64) for x in (q_BTNH, k_BTKH, v_BTKH))
    for b in range(B):
        for t in range(T):
            seen = [s for s in range(t + 1) if segments_BT[b, s] == segments_BT[b, t] != 0]
            for n in range(N if seen else 0):
                kv = n // (N // k_BTKH.shape[2])
                score_S = k_BTKH[b, seen, kv] @ q_BTNH[b, t, n] / np.sqrt(H)
                if soft_cap is not None:
                    score_S = soft_cap * np.tanh(score_S / soft_cap)
                p_S = np.exp(score_S - score_S.max())
                out_BTNH[b, t, n] = p_S / p_S.sum() @ v_BTKH[b, seen, kv]
    return out_BTNH


def qkv(seed=0, *, kv_heads=2, dtype=jnp.float32, length=8):
    keys = jax.random.split(jax.random.key(seed), 3)
    shapes = [(2, length, heads, 6) for heads in (4, kv_heads, kv_heads)]
    return [2 * jax.random.normal(key, s, dtype) for key, s in zip(keys, shapes, strict=True)]


@pytest.mark.parametrize(
    ("soft_cap", "kv_heads", "documents"),
    [(None, 4, False), (None, 2, True), (None, 1, True), (1.5, 2, False), (1.5, 1, True)],
)
def test_equals_the_sum_over_earlier_tokens(soft_cap, kv_heads, documents):
    q, k, v = qkv(kv_heads=kv_heads)
    segments_BT = SEGMENTS if documents else np.ones_like(SEGMENTS)
    out = attend(q, k, v, segment_ids=segments_BT if documents else None, soft_cap=soft_cap)
    real_BT = segments_BT != 0
    expected = reference(q, k, v, segments_BT, soft_cap)
    np.testing.assert_allclose(np.asarray(out)[real_BT], expected[real_BT], rtol=1e-4, atol=1e-5)
    assert np.isfinite(out).all()


@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_one_document_of_ids_is_no_ids(soft_cap):
    q, k, v = qkv()
    np.testing.assert_allclose(
        attend(q, k, v, segment_ids=jnp.ones((2, 8), jnp.int32), soft_cap=soft_cap),
        attend(q, k, v, soft_cap=soft_cap),
        rtol=1e-5,
        atol=1e-6,
    )


def test_a_wide_cap_is_no_cap():
    q, k, v = qkv()
    np.testing.assert_allclose(attend(q, k, v, soft_cap=1e4), attend(q, k, v), atol=1e-5)


@pytest.mark.quick
@pytest.mark.parametrize("soft_cap", [None, 1.5])
def test_gradient_comes_from_earlier_tokens_of_the_document(soft_cap):
    q, k, v = qkv()

    def out_T(shift_T):
        moved = (x + shift_T[:, None, None] for x in (q, k, v))
        out = causal_attention(*moved, segment_ids=jnp.asarray(SEGMENTS), soft_cap=soft_cap)
        return jnp.sum(jnp.sin(out), axis=(2, 3))

    gradient_BTS = np.asarray(jax.jit(jax.jacobian(out_T))(jnp.zeros(8)))
    for b, segments_T in enumerate(SEGMENTS):
        for t in np.flatnonzero(segments_T):
            sees_T = (segments_T == segments_T[t]) & (np.arange(8) <= t)
            np.testing.assert_array_equal(gradient_BTS[b, t] != 0, sees_T)
    assert np.isfinite(gradient_BTS).all()


@pytest.mark.parametrize("soft_cap", [None, 5.0])
def test_bfloat16_keeps_its_dtype_and_huge_scores_stay_finite(soft_cap):
    q, k, v = qkv(dtype=jnp.bfloat16)
    out = attend(q, k, v, segment_ids=SEGMENTS, soft_cap=soft_cap)
    assert out.dtype == jnp.bfloat16
    out, expected = np.asarray(out.astype(jnp.float32)), reference(q, k, v, SEGMENTS, soft_cap)
    np.testing.assert_allclose(out[SEGMENTS != 0], expected[SEGMENTS != 0], atol=0.05)
    out = attend(q * 1e3, k * 1e3, v, segment_ids=SEGMENTS, soft_cap=soft_cap)
    assert np.isfinite(out.astype(jnp.float32)).all()
