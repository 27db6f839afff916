import os
import pathlib
import subprocess
import sys

import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh

from kernels_pallas.moba import sharded
from modo.ops import sharded_moba_attention

# Parts of about the same time; tests/kernels/mesh.py has the cases by name.
PARTS = [
    ("all axes", "documents", "dense", "long dense", "no context", "dense kernels",
     "dense kernel blocks", "dense kernel everything"),
    ("blocks across devices", "longer than a chunk", "own block", "everything", "kernels",
     "long blocks", "choice"),
]  # fmt: skip


@pytest.mark.parametrize("names", PARTS, ids=lambda names: names[0])
def test_equal_to_one_device(names):
    """In a process of its own, where the CPU counts as eight devices."""
    flags = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8"
    environment = {**os.environ, "XLA_FLAGS": flags}
    command = [sys.executable, "-m", "tests.kernels.mesh", *names]
    subprocess.run(command, env=environment, cwd=pathlib.Path(__file__).parents[2], check=True)


def test_every_case_is_run():
    from tests.kernels import mesh

    names = [name for part in PARTS for name in part]
    assert sorted(names) == sorted([*mesh.CASES, "choice"])


def test_public_name():
    assert sharded_moba_attention is sharded.sharded_moba_attention


@pytest.mark.quick
def test_errors():
    mesh = AbstractMesh((2, 3, 4), ("data", "tensor", "context"))
    query, key = jnp.zeros((4, 16, 6, 8)), jnp.zeros((4, 16, 3, 8))

    def check(message, query=query, key=key, **options):
        options = {"batch_axes": "data", "block_size": 4, "top_k": 2} | options
        with pytest.raises(ValueError, match=message):
            sharded_moba_attention(query, key, key, mesh=mesh, **options)

    check("'fsdp' is none of the mesh's 'data', 'tensor', 'context'", batch_axes=("data", "fsdp"))
    check("'tensor' .* 2 times", context_axis="tensor")
    check("3 batch rows .* 2 devices .* 'data'.*: 1, 3", query=query[:3], key=key[:3])
    check("4 batch rows .* 8 devices .* 'data' x 'context'", batch_axes=("data", "context"),
          context_axis=None)  # fmt: skip
    check("2 key heads .* 3 devices .* 'tensor'.*: 1, 2", key=key[:, :, :2])
    check(
        "14 tokens .* 4 devices .* 'context'.*: 1, 2, 7, 14", query=query[:, :14], key=key[:, :14]
    )
    check("top_k .* 0", top_k=0)
    check("'reference' has no sharded form", implementation="reference")
