"""Optimizer state and accumulated gradients in fewer bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from modo.config import OptimizerConfig
from modo.nn.partition import path_names
from modo.train.optimizer import make_optimizer
from tests.train.test_step_routing import batch_of, by_path, experiment, gradients, same, short

PARAMS = {
    "blocks": {"0": {"mlp": {"kernel": jnp.ones((4, 8)) * 0.1}}},
    "head": {"kernel": jnp.ones((8, 5)) * 0.1},
}


def _updated(config: OptimizerConfig, steps: int = 5):
    """(parameters, optimizer state) after some updates."""
    rule = make_optimizer(config, 10)
    params, state = PARAMS, rule.init(PARAMS)

    @jax.jit
    def update(params, state, key):
        grads = jax.tree.map(lambda p: jax.random.normal(key, p.shape), params)
        updates, state = rule.update(grads, state, params)
        return optax.apply_updates(params, updates), state

    for step in range(steps):
        params, state = update(params, state, jax.random.key(step))
    return params, state


def _dtypes(state, field: str) -> set:
    leaves = jax.tree_util.tree_leaves_with_path(state)
    return {str(leaf.dtype) for path, leaf in leaves if field in path_names(path)}


@pytest.mark.quick
@pytest.mark.parametrize("name", ["adamw", "muon"])
@pytest.mark.parametrize("mu", ["float32", "bfloat16"])
@pytest.mark.parametrize("nu", ["float32", "bfloat16"])
def test_moving_averages_keep_their_dtype(name, mu, nu):
    config = OptimizerConfig(name=name, learning_rate=0.01, warmup_steps=1)
    exact, _ = _updated(config)
    ours, state = _updated(dataclasses.replace(config, mu_dtype=mu, nu_dtype=nu))
    assert _dtypes(state, "mu") == {mu} and _dtypes(state, "nu") == {nu}
    shapes = jax.eval_shape(
        make_optimizer(dataclasses.replace(config, mu_dtype=mu, nu_dtype=nu), 10).init, PARAMS
    )
    assert jax.tree.map(lambda a: a.dtype, shapes) == jax.tree.map(lambda a: a.dtype, state)
    pairs = list(zip(jax.tree.leaves(exact), jax.tree.leaves(ours), strict=True))
    for a, b in pairs:
        assert b.dtype == jnp.float32
        np.testing.assert_allclose(a, b, atol=2e-3)  # a step moves by about 1e-2
    assert all(np.array_equal(a, b) for a, b in pairs) == (mu == nu == "float32")


def test_gradients_accumulate_in_their_dtype():
    config = short(experiment(accumulation=4))
    fewer_bits = dataclasses.replace(config.train, accumulation_dtype="bfloat16")
    metrics, exact = gradients(config, batch_of())
    metrics_16, rounded = gradients(dataclasses.replace(config, train=fewer_bits), batch_of())
    assert {str(g.dtype) for g in rounded.values()} == {"float32"}
    assert metrics["loss"] == metrics_16["loss"]
    largest = max(np.abs(g).max() for g in exact.values())
    same(exact, rounded, rtol=0.02, atol=0.02 * largest)
    assert any(not np.array_equal(exact[path], rounded[path]) for path in exact)
    # What was added up has no more bits than it was kept in.
    for grad in rounded.values():
        np.testing.assert_array_equal(grad, grad.astype(jnp.bfloat16).astype(np.float32))


def test_loss_in_chunks_has_the_same_gradients():
    config = short(experiment(z_loss=0.1))
    model = dataclasses.replace(config.model, loss_chunk=5)  # which does not divide the length
    metrics, exact = gradients(config, batch_of())
    metrics_chunked, chunked = gradients(dataclasses.replace(config, model=model), batch_of())
    same(exact, chunked, rtol=1e-4, atol=1e-6)
    same(by_path(metrics), by_path(metrics_chunked), rtol=1e-5)
