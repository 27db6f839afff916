"""Devices as a mesh, and where a run's arrays lie on it.

The distributed engine is JAX's own: arrays carry shardings, `jax.jit` does the rest.
"""

import math

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from modo.config import Config, MeshConfig
from modo.errors import UserError
from modo.nn.partition import MESH_AXES, parameter_spec

AXES = ("data", "fsdp", "tensor", "context")


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """A mesh with the axes AXES over all devices, linked along each axis where that can be.

    Where the devices are those of several TPU slices, the data axis goes across slices, whose links
    are the slowest.

    Raises:
      UserError: the sizes do not multiply to the number of devices, or JAX cannot lay such a mesh
        out over their links.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [getattr(config, axis) for axis in AXES]
    wanted = _describe(sizes)
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        raise UserError(f"mesh {wanted} does not fit {len(devices)} devices")
    slices = len({getattr(device, "slice_index", 0) for device in devices})
    if sizes[0] % slices:
        raise UserError(f"mesh data {sizes[0]} cannot be cut over {slices} slices of TPUs")
    try:
        # jax.make_mesh cannot split an axis of a torus on v5p: 4 of its 8 chips, twice.
        if slices > 1:
            across = (slices, *(1 for _ in sizes[1:]))
            within = (sizes[0] // slices, *sizes[1:])
            grid = mesh_utils.create_hybrid_device_mesh(
                within, across, devices, allow_split_physical_axes=True
            )
        else:
            grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    except (NotImplementedError, ValueError) as error:
        raise UserError(f"mesh {_describe(sizes)}: {error}") from None
    return Mesh(grid, AXES, axis_types=(AxisType.Auto,) * len(AXES))


def _describe(sizes) -> str:
    return " x ".join(f"{axis} {size}" for axis, size in zip(AXES, sizes, strict=True))


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
