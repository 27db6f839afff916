import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modo import Decoder, DepthConfig, MobaConfig, ModelConfig
from modo.nn import Attention, KeyConvolution
from modo.ops import document_runs

T, K, H = 11, 2, 4


def convolution(width, seed=0, **options):
    module = KeyConvolution(K, H, width, **options)
    module.taps_WKH[...] = jax.random.normal(jax.random.key(seed), (width, K, H))
    return module


def keys(seed=1, length=T):
    return jax.random.normal(jax.random.key(seed), (2, length, K, H))


@pytest.mark.quick
@pytest.mark.parametrize("width", [1, 3, 5, 20])
def test_equals_the_formula(width):
    module, k_BTKH = convolution(width), keys()
    taps, k = np.asarray(module.taps_WKH[...], np.float64), np.asarray(k_BTKH, np.float64)
    expected = np.zeros_like(k)
    for t in range(T):
        total = sum(taps[lag] * k[:, t - lag] for lag in range(min(width, t + 1)))
        expected[:, t] = k[:, t] + total / (1 + np.exp(-total))
    np.testing.assert_allclose(module(k_BTKH), expected, rtol=1e-5, atol=1e-6)


def test_documents_do_not_meet_and_rubbish_in_padding_stays_there():
    module = convolution(5)
    ids_BT = document_runs(jnp.asarray([[1, 1, 2, 2, 1, 1, 1, 0, 0, 4, 4]] * 2))
    k_BTKH = keys()
    together = module(jnp.where((ids_BT == 0)[..., None, None], jnp.nan, k_BTKH), ids_BT)
    for start, end in ((0, 2), (2, 4), (4, 7), (9, 11)):
        alone = module(k_BTKH[:, start:end])
        np.testing.assert_allclose(together[:, start:end], alone, rtol=1e-6, atol=1e-7)


def test_starts_as_no_convolution_and_learns():
    k_BTKH = keys()
    module = KeyConvolution(K, H, 3)
    np.testing.assert_array_equal(module(k_BTKH), k_BTKH)
    gradient = nnx.grad(lambda m: jnp.sum(m(k_BTKH) ** 2))(module)
    assert np.all(np.asarray(gradient["taps_WKH"][...]) != 0)
    with pytest.raises(ValueError, match="0"):
        KeyConvolution(K, H, 0)


def test_blocks_are_chosen_by_the_convolved_keys():
    """The keys that are attended are the keys that are pooled."""
    attention = Attention(
        16, num_heads=2, block_size=4, top_k=2, key_convolution=3, qk_norm=True, rngs=nnx.Rngs(0)
    )
    attention.key_convolution.taps_WKH[...] = jax.random.normal(jax.random.key(0), (3, 2, 8))
    x_BTD, positions_BT = jax.random.normal(jax.random.key(2), (1, 24, 16)), jnp.arange(24)[None]
    plain = Attention(16, num_heads=2, block_size=4, top_k=2, qk_norm=True, rngs=nnx.Rngs(0))
    (q, k), (q_plain, k_plain) = (
        module.queries_and_keys(x_BTD, positions_BT, None) for module in (attention, plain)
    )
    np.testing.assert_array_equal(q, q_plain)
    assert not np.allclose(k, k_plain)
    # Relative positions alone count: shifting all of them leaves every score as it was.
    q_far, k_far = attention.queries_and_keys(x_BTD, positions_BT + 1000, None)
    scores, far = (jnp.einsum("btnh,bsnh->bnts", *x) for x in ((q, k), (q_far, k_far)))
    np.testing.assert_allclose(scores, far, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("scan", [False, True])
def test_model_with_key_convolution_sinks_and_window(scan):
    config = ModelConfig(
        vocab_size=32,
        d_model=16,
        num_layers=4,
        num_heads=2,
        d_ff=24,
        depth=DepthConfig(capacity=0.5),
        moba=MobaConfig(block_size=2, top_k=4, sink_blocks=1, window_blocks=1, key_convolution=3),
        scan_layers=scan,
    )
    moba = dataclasses.replace(config.moba, key_convolution=None)
    without = dataclasses.replace(config, moba=moba)
    tokens_BT = jax.random.randint(jax.random.key(0), (2, 16), 0, 32)
    model, plain = (Decoder(c, rngs=nnx.Rngs(0)) for c in (config, without))
    logits, expected = (nnx.jit(lambda m: m(tokens_BT)[0])(m) for m in (model, plain))
    np.testing.assert_array_equal(logits, expected)
    taps = [x for path, x in nnx.to_flat_state(nnx.state(model)) if path[-1] == "taps_WKH"]
    assert sum(x[...].size for x in taps) == 4 * 3 * 16
    grads = nnx.jit(nnx.grad(lambda m: jnp.mean(m(tokens_BT)[0] ** 2)))(model)
    taps = [x for path, x in nnx.to_flat_state(grads) if path[-1] == "taps_WKH"]
    assert taps and all(np.any(np.asarray(x[...]) != 0) for x in taps)
