"""One function, with kernels of its own on some platforms.

A kernel stands in a jaxpr as one primitive. So a program for a CPU is neither slowed by tracing
kernels that it will not use, nor do their products count among its own.
"""

import dataclasses
import functools
from collections.abc import Callable, Hashable

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import Primitive
from jax.interpreters import batching, mlir


@dataclasses.dataclass(frozen=True)
class Kernel:
    """function(*static, *arrays, interpret=interpret), hashable.

    Attributes:
      interpret: False: compiled; else as for pallas_call.
      by_device: whether the function also takes device_kind, the kind of device that the code is
        lowered for; None: it is unknown.
    """

    function: Callable
    static: tuple[Hashable, ...] = ()
    interpret: bool = False
    by_device: bool = False

    def __call__(self, *args, device_kind: str | None = None):
        options = {"device_kind": device_kind} if self.by_device else {}
        return self.function(*self.static, *args, interpret=self.interpret, **options)


def by_platform(kernels: dict[str, Kernel], elsewhere: Callable, out_shapes, *args):
    """What the platform's kernel makes of the arguments; elsewhere(*args) where it has none.

    The platform is the one that the code is lowered for. A program that the compiler cuts over
    several devices by itself takes `elsewhere`, for it cannot cut a kernel; under `jax.shard_map`
    every device runs the kernel.

    Args:
      kernels: by platform, "tpu" or "cuda".
      out_shapes: a tree of jax.ShapeDtypeStruct, the results of either.
      args: arrays, or trees of them. Batch is the first axis of all, and of all results; an
        argument may have it of size 1, or be a scalar.
    """

    branches = {
        platform: functools.partial(call_kernel, kernel, elsewhere, out_shapes)
        for platform, kernel in kernels.items()
    }
    return lax.platform_dependent(*args, default=elsewhere, **branches)


def on_platform(platform: str, kernel: Kernel, out_shapes, *args):
    """What the kernel makes of the arguments, interpreted on any other platform than its own.

    Args: as for `by_platform`.
    """
    compiled, interpreted = (
        functools.partial(
            call_kernel, dataclasses.replace(kernel, interpret=interpret), None, out_shapes
        )
        for interpret in (False, True)
    )
    return lax.platform_dependent(*args, default=interpreted, **{platform: compiled})


def call_kernel(kernel: Kernel, elsewhere: Callable | None, out_shapes, *args):
    """kernel(*args) as one primitive; see `by_platform`. `elsewhere` None: always the kernel."""
    leaves, tree = jax.tree.flatten(args)
    out_shapes, out_tree = jax.tree.flatten(out_shapes)
    out = _kernel_p.bind(
        *leaves, kernel=kernel, elsewhere=elsewhere, tree=tree, out_shapes=tuple(out_shapes)
    )
    return jax.tree.unflatten(out_tree, out)


_kernel_p = Primitive("kernel")
_kernel_p.multiple_results = True


@_kernel_p.def_abstract_eval
def _abstract(*_, out_shapes, **__):
    return [jax.core.ShapedArray(x.shape, x.dtype) for x in out_shapes]


@_kernel_p.def_impl
def _run(*leaves, **params):
    return jax.jit(lambda *leaves: _kernel_p.bind(*leaves, **params))(*leaves)


def _cut_by_compiler(axis_context) -> bool:
    """Whether GSPMD will cut the program, or a part of the mesh's axes of it."""
    if hasattr(axis_context, "num_devices"):
        return axis_context.num_devices != 1
    manual = getattr(axis_context, "manual_axes", frozenset())
    if not manual:
        return False
    return manual | set(axis_context.mesh.manual_axes) != set(axis_context.mesh.axis_names)


def _device_kind(module_context) -> str | None:
    """The kind of device that a program is lowered for, which need not be here; None: unknown."""
    device = getattr(getattr(module_context.axis_context, "mesh", None), "abstract_device", None)
    if device is None and module_context.backend is not None:
        # None where it is not the one that the code is lowered for.
        backend = module_context.get_backend(optional=True)
        device = None if backend is None else backend.devices()[0]
    return None if device is None else device.device_kind


def _lower(ctx, *leaves, kernel, elsewhere, tree, out_shapes):
    if elsewhere is not None and _cut_by_compiler(ctx.module_context.axis_context):
        run = elsewhere
    else:
        device_kind = _device_kind(ctx.module_context)
        run = functools.partial(kernel, device_kind=device_kind)

    def flat(*leaves):
        return jax.tree.leaves(run(*jax.tree.unflatten(tree, leaves)))

    return mlir.lower_fun(flat, multiple_results=True)(ctx, *leaves)


mlir.register_lowering(_kernel_p, _lower)


def _batch(leaves, axes, *, kernel, elsewhere, tree, out_shapes):
    """The mapped axis becomes a part of the batch."""
    size = next(x.shape[a] for x, a in zip(leaves, axes, strict=True) if a is not None)
    batch = out_shapes[0].shape[0]

    def fold(x, axis):
        if axis is None and (x.ndim == 0 or x.shape[0] < batch):
            return x
        x = jnp.broadcast_to(x, (size, *x.shape)) if axis is None else jnp.moveaxis(x, axis, 0)
        x = jnp.broadcast_to(x, (size, batch, *x.shape[2:]))
        return x.reshape(size * batch, *x.shape[2:])

    folded = [fold(x, axis) for x, axis in zip(leaves, axes, strict=True)]
    shapes = tuple(jax.ShapeDtypeStruct((size * batch, *x.shape[1:]), x.dtype) for x in out_shapes)
    out = _kernel_p.bind(*folded, kernel=kernel, elsewhere=elsewhere, tree=tree, out_shapes=shapes)
    return [x.reshape(size, batch, *x.shape[1:]) for x in out], [0] * len(out)


batching.primitive_batchers[_kernel_p] = _batch
