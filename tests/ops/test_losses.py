import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modo.ops import chunked_cross_entropy, cross_entropy
from tests.jaxpr import equations

loss = jax.jit(cross_entropy)


@pytest.mark.quick
@pytest.mark.parametrize("scale", [1.0, 1e3])
def test_nats_and_log_partition(scale):
    rng = np.random.default_rng(0)
    logits_BTV = (rng.normal(size=(2, 5, 7)) * scale).astype(np.float32)
    targets_BT = rng.integers(0, 7, (2, 5))
    exact_BTV = logits_BTV.astype(np.float64)
    top_BT = exact_BTV.max(-1)
    log_z_BT = top_BT + np.log(np.exp(exact_BTV - top_BT[..., None]).sum(-1))
    picked_BT = np.take_along_axis(exact_BTV, targets_BT[..., None], -1)[..., 0]
    nats_BT, partition_BT = loss(logits_BTV, targets_BT)
    np.testing.assert_allclose(partition_BT, log_z_BT, rtol=1e-6)
    np.testing.assert_allclose(nats_BT, log_z_BT - picked_BT, rtol=1e-5, atol=1e-6 * scale)


def test_bfloat16_logits_are_computed_in_float32():
    logits_BTV = jax.random.normal(jax.random.key(0), (2, 5, 300)).astype(jnp.bfloat16)
    targets_BT = jnp.zeros((2, 5), jnp.int32)
    ours, exact = loss(logits_BTV, targets_BT), loss(logits_BTV.astype(jnp.float32), targets_BT)
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == jnp.float32
        np.testing.assert_array_equal(a, b)


def test_gradient_is_softmax_less_target():
    logits_BTV = jax.random.normal(jax.random.key(1), (2, 3, 5))
    targets_BT = jnp.asarray([[0, 1, 2], [4, 4, 3]])
    total = jax.jit(jax.grad(lambda l_BTV: jnp.sum(cross_entropy(l_BTV, targets_BT)[0])))
    gradient_BTV = total(logits_BTV)
    p_BTV = np.exp(np.asarray(logits_BTV, np.float64))
    p_BTV /= p_BTV.sum(-1, keepdims=True)
    np.testing.assert_allclose(gradient_BTV, p_BTV - np.eye(5)[targets_BT], atol=1e-6)


def test_uniform_logits_cost_log_v():
    nats_BT, log_z_BT = loss(jnp.zeros((1, 2, 257)), jnp.asarray([[0, 256]]))
    np.testing.assert_allclose(nats_BT, np.log(257), rtol=1e-6)
    np.testing.assert_allclose(log_z_BT, np.log(257), rtol=1e-6)


def _chunked(chunk, soft_cap=None):
    """Nats and log-partition of a linear head, weighted so that every token's gradient differs."""

    def total(x_BTD, weight_DV, targets_BT):
        nats_BT, log_z_BT = chunked_cross_entropy(
            lambda x_BTD: x_BTD @ weight_DV, x_BTD, targets_BT, chunk
        )
        scale_BT = jnp.arange(1.0, nats_BT.size + 1).reshape(nats_BT.shape)
        return jnp.sum(scale_BT * (nats_BT + 0.1 * log_z_BT**2)), (nats_BT, log_z_BT)

    return jax.value_and_grad(total, argnums=(0, 1), has_aux=True)


@pytest.mark.quick
@pytest.mark.parametrize("chunk", [1, 4, 5, 11, 12])
def test_chunks_change_nothing(chunk):
    key = jax.random.key(2)
    x_BTD = jax.random.normal(key, (2, 11, 8))
    weight_DV = jax.random.normal(jax.random.fold_in(key, 1), (8, 33))
    targets_BT = jax.random.randint(jax.random.fold_in(key, 2), (2, 11), 0, 33)
    whole = jax.jit(_chunked(None))(x_BTD, weight_DV, targets_BT)
    cut = jax.jit(_chunked(chunk))(x_BTD, weight_DV, targets_BT)
    for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(cut), strict=True):
        assert a.shape == b.shape
        np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)


def test_chunks_bound_the_logits_that_are_held():
    B, T, D, V, chunk = 2, 12, 4, 100, 3
    shapes = (
        jax.ShapeDtypeStruct((B, T, D), jnp.bfloat16),
        jax.ShapeDtypeStruct((D, V), jnp.bfloat16),
        jax.ShapeDtypeStruct((B, T), jnp.int32),
    )

    def largest(chunk):
        sizes = [
            math.prod(variable.aval.shape)
            for equation, _ in equations(jax.make_jaxpr(_chunked(chunk))(*shapes).jaxpr)
            for variable in equation.outvars
        ]
        return max(sizes)

    assert largest(None) == B * T * V
    assert largest(chunk) == B * chunk * V
