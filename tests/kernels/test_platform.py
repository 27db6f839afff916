import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec

from kernels_pallas.moba import moba_attention
from kernels_pallas.platform import Kernel, call_kernel
from tests.jaxpr import dot_flops
from tests.kernels.test_moba import FAST_COMPILE, assert_close, inputs


def _double(static, x, y, *, interpret):
    return (static * x + y,)


def _call(x, y):
    out = jax.ShapeDtypeStruct(x.shape, x.dtype)
    return call_kernel(Kernel(_double, (2.0,)), None, (out,), x, y)[0]


@pytest.mark.quick
def test_vmap_folds_into_the_batch():
    """An argument with a batch of 1 stands for every row, mapped or not."""
    x, y = jnp.arange(24.0).reshape(4, 3, 2), jnp.arange(8.0).reshape(4, 1, 2)
    np.testing.assert_array_equal(jax.vmap(_call)(x, y), 2 * x + y)
    np.testing.assert_array_equal(jax.vmap(_call, (0, None))(x, y[0]), 2 * x + y[0])
    np.testing.assert_array_equal(jax.vmap(_call, (None, 0))(x[0], y), 2 * x[0] + y)
    np.testing.assert_array_equal(
        jax.vmap(_call, (2, None))(x[..., None, :], y[:1, 0]),
        jax.vmap(lambda x: 2 * x + y[:1, 0], 2)(x[..., None, :]),
    )
    one = jnp.ones((1, 2))
    np.testing.assert_array_equal(jax.vmap(_call, (0, None))(x[:, :1], one), 2 * x[:, :1] + 1)
    np.testing.assert_array_equal(_call(x, y), 2 * x + y)  # without jit


def _kernels(devices, function, *args, platform):
    """Kernels in the program that is lowered for so many devices of a platform."""
    sharding = NamedSharding(AbstractMesh((devices,), ("x",)), PartitionSpec())
    traced = jax.jit(function, in_shardings=sharding).trace(*args)
    return traced.lower(lowering_platforms=(platform,)).as_text().count("@tpu_custom_call")


@pytest.mark.quick
def test_default_is_the_kernel_of_the_platform_it_is_lowered_for():
    q, k, v, _ = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in inputs(1, 64, 2, 1, 64, 64))
    attention = functools.partial(moba_attention, block_size=16, top_k=2)
    assert _kernels(1, attention, q, k, v, platform="tpu") == 3
    assert _kernels(1, attention, q, k, v, platform="cpu") == 0
    # The compiler cannot cut a kernel over devices.
    assert _kernels(2, attention, q, k, v, platform="tpu") == 0
    # A dtype that the kernels do not take.
    half = [jax.ShapeDtypeStruct(x.shape, jnp.float16) for x in (q, k, v)]
    assert _kernels(1, attention, *half, platform="tpu") == 0


@pytest.mark.quick
def test_kernels_of_other_platforms_are_not_traced():
    q, k, v, _ = inputs(1, 64, 2, 1, 64, 64)
    attention = functools.partial(moba_attention, block_size=16, top_k=2)
    text = str(jax.make_jaxpr(attention)(q, k, v))
    assert "kernel[" in text and "pallas_call" not in text
    in_xla = functools.partial(attention, implementation="xla")
    assert dot_flops(attention, q, k, v) == dot_flops(in_xla, q, k, v) > 0


@pytest.mark.parametrize("implementation", ["pallas_tpu"])
@pytest.mark.parametrize("documents", [False, True])
def test_vmap_of_a_kernel(implementation, documents):
    q, k, v, _ = inputs(4, 40, 2, 1, 8, 8)
    ids = jnp.asarray([[1] * 13 + [2] * 27, [1] * 40] * 2) if documents else None

    def attention(implementation, q, k, v, ids):
        return moba_attention(
            q, k, v, block_size=8, top_k=3, segment_ids=ids, implementation=implementation
        )

    def out_and_gradient(implementation, *args):
        f = functools.partial(attention, implementation)
        return f(*args), jax.grad(lambda *args: jnp.sum(f(*args) ** 2), (0, 1, 2))(*args)

    run = jax.jit(out_and_gradient, static_argnums=0, compiler_options=FAST_COMPILE)
    expected = run("xla", q, k, v, ids)
    two = jax.tree.map(lambda x: x.reshape(2, 2, *x.shape[1:]), (q, k, v, ids))
    mapped = jax.jit(
        jax.vmap(functools.partial(out_and_gradient, implementation)), compiler_options=FAST_COMPILE
    )(*two)
    for a, e in zip(jax.tree.leaves(mapped), jax.tree.leaves(expected), strict=True):
        assert_close(a.reshape(e.shape), e, 2e-6)
