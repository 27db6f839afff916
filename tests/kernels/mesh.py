"""MoBA over meshes of eight devices; run by test_sharded.py as a program, with what to check."""

import functools
import math
import re
import sys
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding

from kernels_pallas import moba
from kernels_pallas.moba import plan, sharded, tpu
from tests.kernels.test_moba import FAST_COMPILE, SEGMENTS, XLA_PATHS, assert_close, inputs

AXES = {"batch_axes": "data", "head_axis": "tensor", "context_axis": "context"}
# Tiles so small that a device has several.
SMALL_TILES = {"_WINDOW": 128, "_TILE": 16, "_CHOOSE_TILE": 128}

# data, tensor, context; B, T, N, K, H, Hv; block_size, top_k, implementation, options
CASES = {
    "all axes": ((2, 2, 2), (2, 64, 4, 2, 8, 12), 8, 3, "grouped", {}),
    "documents": ((1, 1, 4), (2, 64, 4, 2, 8, 8), 4, 3, "grouped", {"segment_ids": "packed"}),
    "blocks across devices": ((1, 1, 4), (1, 60, 2, 1, 8, 8), 6, 3, "grouped", {"soft_cap": 2.0}),
    "longer than a chunk": ((1, 1, 8), (1, 72, 2, 1, 8, 8), 20, 2, "grouped", {"sink_blocks": 1}),
    "dense": ((1, 1, 8), (2, 64, 4, 2, 8, 12), 6, 3, "dense", {"segment_ids": "packed"}),
    "long dense": ((1, 1, 2), (1, 320, 1, 1, 4, 4), 24, 3, "dense", {"window_blocks": 1}),
    "own block": ((1, 2, 4), (1, 64, 2, 2, 8, 8), 8, 1, "xla", {"segment_ids": "packed"}),
    "everything": ((2, 1, 4), (2, 64, 2, 1, 8, 8), 8, 9, "xla", {"segment_ids": "packed"}),
    "no context": ((4, 2, 1), (4, 50, 4, 2, 8, 8), 8, 3, "xla", {"dtype": jnp.bfloat16}),
    "kernels": (
        *((1, 2, 2), (1, 320, 4, 2, 8, 12), 24, 3, "pallas_tpu grouped"),
        {"segment_ids": "packed"},
    ),
    "long blocks": ((1, 1, 2), (1, 768, 1, 1, 8, 8), 256, 2, "pallas_tpu grouped", {}),
    "dense kernels": (
        *((1, 2, 2), (1, 320, 4, 2, 8, 12), 24, 3, "pallas_tpu"),
        {"segment_ids": "packed"},
    ),
    "dense kernel blocks": ((1, 1, 2), (1, 512, 1, 1, 8, 8), 64, 3, "pallas_tpu", {}),
    "dense kernel everything": ((1, 1, 2), (1, 320, 1, 1, 8, 8), 64, 9, "pallas_tpu", {}),
}


def make_mesh(sizes):
    devices = jax.devices()[: int(np.prod(sizes))]
    return jax.make_mesh(
        sizes, ("data", "tensor", "context"), (AxisType.Auto,) * 3, devices=devices
    )


def out_and_gradients(attention):
    def f(q, k, v, do, segment_ids):
        out, vjp = jax.vjp(lambda q, k, v: attention(q, k, v, segment_ids=segment_ids), q, k, v)
        return out, *vjp(do)

    return jax.jit(f, compiler_options=FAST_COMPILE)


def place(axes, q, k, v, do, segment_ids):
    """The arguments as they lie on the mesh."""
    specs = (axes.tokens,) * 4 + (axes.ids,)
    return jax.tree.map(
        lambda x, spec: None if x is None else jax.device_put(x, NamedSharding(axes.mesh, spec)),
        (q, k, v, do, segment_ids),
        specs,
        is_leaf=lambda x: x is None,
    )


def arguments(name):
    sizes, shape, block_size, top_k, implementation, options = CASES[name]
    options = dict(options)
    args = inputs(*shape, dtype=options.pop("dtype", jnp.float32))
    segments = options.pop("segment_ids", None)
    if segments is not None:
        segments = np.resize(SEGMENTS[segments](3, shape[1])[::2], shape[:2])
        segments = jnp.asarray(segments, jnp.int32)
    options |= {"block_size": block_size, "top_k": top_k}
    return make_mesh(sizes), (*args, segments), implementation, options


def collectives(text):
    """Elements of the result of each in a compiled program, by kind."""
    kinds = "all-gather|all-reduce|reduce-scatter|all-to-all|collective-permute"
    found = re.findall(rf"= \w+\[([\d,]*)\]\S* ({kinds})\(", text)
    assert len(found) == len(re.findall(rf" (?:{kinds})[\w-]*\(", text))
    sizes = {}
    for shape, kind in found:
        sizes.setdefault(kind, []).append(math.prod(map(int, shape.split(","))))
    return sizes


def check_collectives(text, mesh, args):
    """None without a context axis; over it, keys and values there and their gradients back."""
    _, k, v, _, segment_ids = args
    data, heads, context = mesh.devices.shape
    found = collectives(text)
    if context == 1:
        assert not found
        return
    assert set(found) == {"all-gather", "reduce-scatter"}
    rows = [k.size // data // heads, v.size // data // heads]
    assert sorted(found["reduce-scatter"]) == sorted(size // context for size in rows)
    ids = [] if segment_ids is None else [segment_ids.size // data]
    # For the backward pass again, unless the compiler has kept them.
    assert sorted(found["all-gather"]) in (sorted(rows + ids), sorted(2 * rows + ids))


def check_equal(name):
    """Output and gradients equal those of one device, and lie on the mesh as the inputs do."""
    mesh, args, implementation, options = arguments(name)
    one_device = functools.partial(moba.moba_attention, implementation="reference", **options)
    expected = out_and_gradients(one_device)(*args)
    if implementation in XLA_PATHS:
        implementation = f"xla {implementation}"
    implementation, _, path = implementation.partition(" ")
    attention = functools.partial(
        sharded.sharded_moba_attention,
        mesh=mesh,
        implementation=implementation,
        **AXES,
        **options,
    )
    placed = place(sharded._make_axes(mesh, *AXES.values(), *args[:2]), *args)
    forced = functools.partial(plan.make_call, path=path or None)
    with mock.patch.object(plan, "make_call", forced), mock.patch.multiple(tpu, **SMALL_TILES):
        program = out_and_gradients(attention).lower(*placed).compile()
    tolerance = 1e-5 if args[0].dtype == jnp.float32 else 1e-2
    for a, e in zip(program(*placed), expected, strict=True):
        assert a.dtype == e.dtype
        assert a.sharding.is_equivalent_to(placed[0].sharding, 4)
        assert_close(a, e, tolerance)
    check_collectives(program.as_text(), mesh, args)


def check_choice():
    """Scores that differ by rounding alone give the same choice on any number of devices."""
    B, T, N, K, H, M, J = 2, 64, 4, 2, 8, 8, 3
    q, k, *_ = inputs(B, T, N, K, H, H)
    # Every block has the same keys in another order.
    rng = np.random.default_rng(0)
    order = np.concatenate([rng.permutation(M) for _ in range(T // M)])
    k = k[:, order]
    for segments in (None, np.resize(SEGMENTS["packed"](1, T), (B, T))):
        ids = None if segments is None else jnp.asarray(segments, jnp.int32)
        call = plan.make_call(T, M, J + 1, ids is None, path="grouped")

        def one(q, k, ids, call=call):
            return moba._choose("xla", call, q, k, plan.find_blocks(T, M, ids))

        expected = jax.jit(one, compiler_options=FAST_COMPILE)(q, k, ids)
        for sizes in ((2, 2, 2), (1, 1, 8)):
            axes = sharded._make_axes(make_mesh(sizes), *AXES.values(), q, k)

            def many(q, k, ids, axes=axes, call=call):
                return sharded._choose(axes, "xla", call, q, *sharded._gather(axes, k, ids))

            actual = jax.jit(many, compiler_options=FAST_COMPILE)(q, k, ids)
            assert np.array_equal(actual, expected), sizes


if __name__ == "__main__":
    assert len(jax.devices()) == 8
    for name in sys.argv[1:]:
        print(name, flush=True)
        check_choice() if name == "choice" else check_equal(name)
