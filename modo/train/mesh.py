"""Devices as a mesh, and where each array lies on it.

The distributed engine is JAX's own: arrays carry shardings, `jax.jit` does the rest.
"""

import math

import jax
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from modo.config import Config, MeshConfig
from modo.errors import UserError

# Logical axes to mesh axes.
MESH_AXES = {
    "batch": ("data", "fsdp"),
    "embed": "fsdp",
    "heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
}

# (module, parameter) to the logical axes of its last dimensions; all else is copied everywhere.
PARAMETER_AXES = {
    ("embedding", "embedding"): ("vocab", "embed"),
    ("head", "kernel"): ("embed", "vocab"),
    ("query", "kernel"): ("embed", "heads"),
    ("key", "kernel"): ("embed", "heads"),
    ("value", "kernel"): ("embed", "heads"),
    ("out", "kernel"): ("heads", "embed"),
    ("gate", "kernel"): ("embed", "mlp"),
    ("up", "kernel"): ("embed", "mlp"),
    ("down", "kernel"): ("mlp", "embed"),
}


def make_mesh(config: MeshConfig, devices: list | None = None) -> Mesh:
    """A mesh with axes data, fsdp, tensor over all devices.

    Raises:
      UserError: the sizes do not multiply to the number of devices.
    """
    devices = jax.devices() if devices is None else devices
    sizes = [config.data, config.fsdp, config.tensor]
    known = math.prod(s for s in sizes if s != -1)
    if -1 in sizes and len(devices) % known == 0:
        sizes[sizes.index(-1)] = len(devices) // known
    if math.prod(sizes) != len(devices):
        raise UserError(
            f"mesh data {config.data} x fsdp {config.fsdp} x tensor {config.tensor} does not fit "
            f"{len(devices)} devices"
        )
    return jax.make_mesh(
        tuple(sizes), ("data", "fsdp", "tensor"), (AxisType.Auto,) * 3, devices=devices
    )


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
    ]
    for size, parts, what, axis in checks:
        if size % parts:
            good = [n for n in range(1, size + 1) if size % n == 0]
            raise UserError(
                f"{what} cannot be cut over mesh axis {axis} of {parts} devices; sizes that "
                f"divide it: {', '.join(map(str, good))}"
            )


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows of a batch over data and fsdp."""
    return NamedSharding(mesh, PartitionSpec(MESH_AXES["batch"]))


def path_names(path) -> tuple[str, ...]:
    """The module and parameter names along a tree path, without nnx's trailing `value`."""
    names = [str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path]
    return tuple(names[:-1] if names[-1] == "value" else names)


def parameter_spec(path, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Where a parameter, or an optimizer's copy of it, lies."""
    axes = PARAMETER_AXES.get(path_names(path)[-2:], ())
    if len(axes) > len(shape):  # a factored or scalar companion of the parameter
        return PartitionSpec()
    spec = [None] * (len(shape) - len(axes))
    for size, axis in zip(shape[len(spec) :], axes, strict=True):
        mesh_axis = MESH_AXES[axis]
        # A vocabulary need not divide: 257 bytes do not. Then it stays whole.
        spec.append(mesh_axis if size % mesh.shape[mesh_axis] == 0 else None)
    return PartitionSpec(*spec)


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
