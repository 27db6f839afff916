"""Every TPU kernel compiled, by libtpu, for each generation of TPU: no TPU is needed."""

import concurrent.futures
import os

os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-8")
os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
# Or libtpu waits for the metadata server of a machine in the cloud.
os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from kernels_pallas import moba

TOPOLOGIES = {"v5e": "v5e:2x2", "v5p": "v5p:2x2x1", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}
BF16, F32 = jnp.bfloat16, jnp.float32
MILLION = 1 << 20

# generation, T, query heads, key heads, head width, block_size, top_k, dtype, documents
CASES = [
    *[(g, 8192, 4, 1, 128, 512, 3, BF16, False) for g in TOPOLOGIES],
    *[(g, 8192, 2, 1, 64, 128, 8, F32, True) for g in TOPOLOGIES],
    *[(g, 8192, 2, 2, 256, 512, 3, BF16, True) for g in TOPOLOGIES],
    *[(g, 32768, 1, 1, 128, 4096, 3, BF16, False) for g in TOPOLOGIES],
    ("v5e", 8192, 2, 1, 256, 512, 3, F32, False),
    ("v6e", 16384, 2, 1, 128, 128, 8, BF16, False),
    ("tpu7x", 16384, 2, 1, 64, 512, 3, BF16, False),
    ("v5p", 16384, 1, 1, 128, 4096, 3, F32, True),
    ("v5e", 1100, 2, 1, 64, 100, 3, F32, True),
    ("v5p", 131072, 2, 1, 128, 512, 4, BF16, False),
    ("v5e", MILLION, 8, 1, 128, 512, 4, BF16, False),
    ("v5p", MILLION, 8, 1, 128, 4096, 12, BF16, False),
]


def compile_case(generation, T, N, K, H, block_size, top_k, dtype, documents):
    """The forward and backward pass compiled for one chip."""
    devices = topologies.get_topology_desc(
        platform="tpu", topology_name=TOPOLOGIES[generation]
    ).devices
    sharding = NamedSharding(Mesh(np.array(devices[:1]), ("x",)), PartitionSpec())

    def both(q, k, v, do, segment_ids):
        def f(q, k, v):
            return moba.moba_attention(
                q, k, v, block_size=block_size, top_k=top_k, segment_ids=segment_ids
            )

        out, vjp = jax.vjp(f, q, k, v)
        return out, vjp(do)

    q, k = (jax.ShapeDtypeStruct((1, T, heads, H), dtype) for heads in (N, K))
    ids = jax.ShapeDtypeStruct((1, T), jnp.int32) if documents else None
    jitted = jax.jit(both, in_shardings=sharding, out_shardings=sharding)
    return jitted.lower(q, k, k, q, ids).compile()


@pytest.fixture(scope="module")
def compiled():
    """All cases; the compiler leaves Python's lock, so two threads keep two cores busy."""
    with concurrent.futures.ThreadPoolExecutor(2) as pool:
        yield {case: pool.submit(compile_case, *case) for case in CASES}


@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(map(str, case[:7])))
def test_compiles(compiled, case):
    executable = compiled[case].result()
    T, top_k, block_size = case[1], case[6], case[5]
    text = executable.as_text()
    for kernel in ("interval_forward", "interval_backward", "choose", "tiles_forward"):
        assert f"moba_{kernel}" in text
    assert f"[{T},{T}]" not in text
    memory = executable.memory_analysis()
    if T == MILLION:
        size = memory.argument_size_in_bytes + memory.output_size_in_bytes
        assert memory.temp_size_in_bytes < 2 * size
    assert top_k * block_size < T
