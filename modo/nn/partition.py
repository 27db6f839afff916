"""Where arrays lie on a mesh of devices: one table from what a dimension is to the mesh's axes.

Arrays carry shardings and the compiler cuts the program; attention alone is cut by hand, for the
compiler cannot cut a kernel (see `modo.ops.sharded_moba_attention`).
"""

import functools

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

# What a dimension is, and the axes of the mesh that it is cut over.
MESH_AXES = {
    "batch": ("data", "fsdp"),
    "length": ("context",),
    "embed": ("fsdp",),
    "heads": ("tensor",),
    "mlp": ("tensor",),
    "vocab": ("tensor",),
}

# (module, parameter) to its last dimensions; all else is copied everywhere.
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


def path_names(path) -> tuple[str, ...]:
    """The module and parameter names along a tree path, without nnx's trailing `value`."""
    names = [str(getattr(p, "key", getattr(p, "name", getattr(p, "idx", p)))) for p in path]
    return tuple(names[:-1] if names[-1] == "value" else names)


def partition_spec(mesh: Mesh, shape: tuple[int, ...], axes: tuple[str | None, ...]):
    """The spec of an array whose last dimensions are `axes`; the others are whole.

    A dimension that its axes do not divide, as a vocabulary of 257 bytes, is whole too.
    """
    spec = [None] * (len(shape) - len(axes))
    for size, axis in zip(shape[len(spec) :], axes, strict=True):
        mesh_axes = MESH_AXES[axis] if axis is not None else ()
        divides = bool(mesh_axes) and size % _devices(mesh, mesh_axes) == 0
        spec.append(mesh_axes if divides else None)
    return PartitionSpec(*spec)


def spec_axes(part: str | tuple[str, ...] | None) -> tuple[str, ...]:
    """One entry of a PartitionSpec as a tuple of axes: a tuple of one is kept as a string."""
    return (part,) if isinstance(part, str) else tuple(part or ())


def _devices(mesh: Mesh, axes: tuple[str, ...]) -> int:
    number = 1
    for axis in axes:
        number *= mesh.shape[axis]
    return number


def dividing_axes(mesh: Mesh, size: int, axis: str) -> tuple[str, ...]:
    """The mesh's axes for a dimension; none where they do not divide its size."""
    axes = MESH_AXES[axis]
    return axes if size % _devices(mesh, axes) == 0 else ()


def parameter_spec(path, shape: tuple[int, ...], mesh: Mesh) -> PartitionSpec:
    """Where a parameter, or an optimizer's copy of it, lies."""
    axes = PARAMETER_AXES.get(path_names(path)[-2:], ())
    if len(axes) > len(shape):  # a factored or scalar companion of the parameter
        return PartitionSpec()
    return partition_spec(mesh, shape, axes)


def constrain(x: Array, mesh: Mesh | None, *axes: str | None) -> Array:
    """`x`, cut by what its dimensions are; without a mesh as it is."""
    if mesh is None:
        return x
    return lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(mesh, x.shape, axes)))


def gather_parameters(params, mesh: Mesh | None, dtype):
    """Matrices as a computation in `dtype` needs them: whole along "embed".

    They are converted first, so that fewer bytes travel. The gradient of each is summed over
    devices in `dtype` and left where the parameter lies, every device with its part.

    Args:
      params: a tree whose paths end in module and parameter names.
      mesh: None: nothing is done.
      dtype: of the computation; for the matrices that PARAMETER_AXES names.
    """
    if mesh is None:
        return params
    return jax.tree_util.tree_map_with_path(
        lambda path, leaf: gather_parameter(leaf, path_names(path)[-2:], mesh, dtype), params
    )


def gather_parameter(x: Array, names: tuple[str, str], mesh: Mesh | None, dtype) -> Array:
    """One parameter of (module, parameter) `names`; see `gather_parameters`."""
    axes = PARAMETER_AXES.get(names)
    if mesh is None or axes is None:
        return x
    whole = tuple(None if axis == "embed" else axis for axis in axes)
    whole, cut = (
        NamedSharding(mesh, partition_spec(mesh, x.shape, axes)) for axes in (whole, axes)
    )
    return _gather(x, jnp.dtype(dtype), whole, cut)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def _gather(x, dtype, whole, cut):
    return lax.with_sharding_constraint(x.astype(dtype), whole)


def _gather_forward(x, dtype, whole, cut):
    return _gather(x, dtype, whole, cut), jnp.zeros((), x.dtype)


def _gather_backward(dtype, whole, cut, like, grad):
    return (lax.with_sharding_constraint(grad, cut).astype(like.dtype),)


_gather.defvjp(_gather_forward, _gather_backward)
