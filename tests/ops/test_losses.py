import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modo.ops import cross_entropy

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
