import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from kernels_pallas.moba import sharded
from tests.kernels.tpu_compilation import MILLION, cases_of, check_case

BF16, F32 = jnp.bfloat16, jnp.float32
CASES = [
    *cases_of(("v5e", "v5p")),
    ("v5e", 8192, 2, 1, 256, 512, 3, F32, False),
    ("v5p", 16384, 1, 1, 128, 4096, 3, F32, True),
    ("v5e", 1100, 2, 1, 64, 100, 3, F32, True),
    ("v5e", MILLION, 8, 1, 128, 512, 4, BF16, False),
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:7])))
def test_compiles(case):
    check_case(*case)


def test_gradients_of_keys_are_scattered():
    """Not summed in full on every device, and not in bfloat16."""
    devices = np.array(topologies.get_topology_desc("v5e:2x4", "tpu").devices)
    axes = sharded._Axes(
        Mesh(devices.reshape(1, 8), ("data", "context")), ("data",), None, "context"
    )

    def scatter(x_BTKH):
        return axes.scatter(x_BTKH * 2).astype(BF16)

    x = jax.ShapeDtypeStruct((2, 4096, 2, 128), F32, sharding=NamedSharding(axes.mesh, axes.row))
    text = jax.jit(axes.map(scatter, axes.row, axes.tokens)).lower(x).compile().as_text()
    assert "f32[2048,128]" in text and " reduce-scatter(" in text and " all-reduce(" not in text
