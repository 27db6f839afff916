"""Devices as a mesh, and where a run's arrays lie on it.

The distributed engine is JAX's own: arrays carry shardings, `jax.jit` does the rest.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from modo.config import Config, MeshConfig
from modo.errors import UserError
from modo.nn.partition import MESH_AXES, parameter_spec

AXES = ("data", "fsdp", "tensor", "context")


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """A mesh with the axes AXES over all devices.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, axis) for axis in AXES]
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        wanted = " x ".join(f"{axis} {getattr(config, axis)}" for axis in AXES)
        raise UserError(f"mesh {wanted} does not fit {len(devices)} devices")
    return jax.make_mesh(tuple(sizes), AXES, (AxisType.Auto,) * len(AXES), devices=devices)


def check_divides(config: Config, mesh: Mesh) -> None:
    """Raises UserError, with the sizes that work, where the mesh cannot cut the model or batch."""
    model, train = config.model, config.train
    rows = mesh.shape["data"] * mesh.shape["fsdp"]
    micro = train.batch_size // train.accumulation
    checks = [
        (micro, rows, f"a microbatch of {micro} rows", "data x fsdp"),
        (model.d_model, mesh.shape["fsdp"], f"d_model {model.d_model}", "fsdp"),
        (model.num_heads, mesh.shape["tensor"], f"num_heads {model.num_heads}", "tensor"),
        (model.kv_heads, mesh.shape["tensor"], f"num_kv_heads {model.kv_heads}", "tensor"),
        (model.ff_width, mesh.shape["tensor"], f"d_ff {model.ff_width}", "tensor"),
        (train.length, mesh.shape["context"], f"rows of {train.length} tokens", "context"),
    ]
    for size, parts, what, axis in checks:
        if size % parts:
            good = [n for n in range(1, size + 1) if size % n == 0]
            raise UserError(
                f"{what} cannot be cut over mesh axis {axis} of {parts} devices; sizes that "
                f"divide it: {', '.join(map(str, good))}"
            )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over data and fsdp, their tokens over context."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES["batch"], MESH_AXES["length"]))


def state_shardings(state, mesh: Mesh):
    """Shardings for any tree whose paths end in module and parameter names."""
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: NamedSharding(mesh, parameter_spec(path, leaf.shape, mesh)), state
    )


def place_batch(batch: dict[str, np.ndarray], sharding: NamedSharding) -> dict[str, jax.Array]:
    """Global arrays from this process's rows."""
    return {
        name: jax.make_array_from_process_local_data(sharding, rows) for name, rows in batch.items()
    }
