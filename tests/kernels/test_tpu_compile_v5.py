import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from kernels_pallas import tpu_topology
from kernels_pallas.moba import sharded
from tests.kernels.tpu_compilation import MILLION, make_tests

BF16, F32 = jnp.bfloat16, jnp.float32

test_compiles, test_mod_compiles = make_tests(
    ("v5e", "v5p"),
    [
        ("v5e", 8192, 2, 1, 256, 512, 3, F32, False, "grouped"),
        ("v5p", 16384, 1, 1, 128, 4096, 3, F32, True, None),
        ("v5e", 1100, 2, 1, 64, 100, 3, F32, True, None),
        ("v5e", MILLION, 8, 1, 128, 512, 4, BF16, False, "grouped"),
    ],
)


def test_gradients_of_keys_are_scattered():
    """Not summed in full on every device, and not in bfloat16."""
    devices = np.array(tpu_topology.devices("v5e:2x4"))
    axes = sharded._Axes(
        Mesh(devices.reshape(1, 8), ("data", "context")), ("data",), None, "context"
    )

    def scatter(x_BTKH):
        return axes.scatter(x_BTKH * 2).astype(BF16)

    x = jax.ShapeDtypeStruct((2, 4096, 2, 128), F32, sharding=NamedSharding(axes.mesh, axes.row))
    text = jax.jit(axes.map(scatter, axes.row, axes.tokens)).lower(x).compile().as_text()
    assert "f32[2048,128]" in text and " reduce-scatter(" in text and " all-reduce(" not in text


@pytest.mark.parametrize("name", ["v9", "v5e:3x7"])
def test_unknown_topologies(name):
    with pytest.raises(ValueError, match=f"'{name}' is neither a generation of TPU .*v6e, tpu7x"):
        tpu_topology.devices(name)
