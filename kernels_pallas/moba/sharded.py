"""MoBA over a mesh of devices: each attends for its own batch rows, key heads and tokens.

Batch rows and key heads, with their query heads, need no communication. Where rows are cut along
the context axis, a device has the queries of consecutive tokens. The keys, values and segment ids
of the whole row are gathered, so that blocks may cross from one device to the next; centroids come
from gathered keys by the same sums as on one device. The backward pass gathers again, rather than
keep whole rows, and sums the gradients of keys and values over devices in float32.

Axes: see plan.py; C tokens of a device, T of the row.
"""

import dataclasses
import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P

from kernels_pallas import moba
from kernels_pallas.moba import plan


@dataclasses.dataclass(frozen=True)
class _Axes:
    """Axes of a mesh; context None: rows are whole.

    Attributes:
      tokens, row: specs of [B, C, heads, width] and, with all tokens, [B, T, heads, width].
      ids, ids_row: of [B, C] and [B, T].
      stats, chosen: of [B, N, C] and [B, N, J, C].
    """

    mesh: Mesh | AbstractMesh
    batch: tuple[str, ...]
    head: str | None
    context: str | None

    @property
    def tokens(self) -> P:
        return P(self.batch, self.context, self.head, None)

    @property
    def row(self) -> P:
        return P(self.batch, None, self.head, None)

    @property
    def ids(self) -> P:
        return P(self.batch, self.context)

    @property
    def ids_row(self) -> P:
        return P(self.batch, None)

    @property
    def stats(self) -> P:
        return P(self.batch, self.head, self.context)

    @property
    def chosen(self) -> P:
        return P(self.batch, self.head, None, self.context)

    def map(self, function, in_specs, out_specs):
        """The function on every device.

        The check of what varies along which axis is off: results of Pallas kernels and zeros that
        loops begin with would have to name their axes. Nothing is differentiated through a map, so
        the check would guard only out_specs.
        """
        return jax.shard_map(
            function, mesh=self.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
        )

    def gather(self, x):
        """Whole rows of [B, C, ...]."""
        if self.context is None or x is None:
            return x
        return lax.all_gather(x, self.context, axis=1, tiled=True)

    def scatter(self, x_BTKH):
        """The sum of [B, T, K, H] over devices, of which each keeps its tokens."""
        if self.context is None:
            return x_BTKH
        B, T, K, H = x_BTKH.shape
        parts = self.mesh.shape[self.context]
        x_BPCKH = x_BTKH.reshape(B, parts, T // parts, K, H)
        # Rows cut along their first axis: a TPU sums others in full and sends all to every device.
        x_RH = jnp.transpose(x_BPCKH, (1, 0, 3, 2, 4)).reshape(-1, H)
        x_RH = lax.psum_scatter(x_RH, self.context, scatter_dimension=0, tiled=True)
        return jnp.swapaxes(x_RH.reshape(B, K, T // parts, H), 1, 2)

    def offset(self, length: int):
        """The first of the device's `length` tokens."""
        return 0 if self.context is None else lax.axis_index(self.context) * length


def _check_divides(mesh: Mesh, axes: Sequence[str], size: int, what: str) -> None:
    parts = 1
    for axis in axes:
        parts *= mesh.shape[axis]
    if size % parts:
        good = ", ".join(str(n) for n in range(1, size + 1) if size % n == 0)
        names = " x ".join(map(repr, axes))
        raise ValueError(
            f"{what} cannot be cut over {parts} devices of mesh axis {names}; sizes that divide "
            f"them: {good}"
        )


def _make_axes(mesh: Mesh, batch_axes, head_axis, context_axis, query, key) -> _Axes:
    batch = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes or ())
    used = [*batch, *(axis for axis in (head_axis, context_axis) if axis is not None)]
    for axis in used:
        if axis not in mesh.shape:
            raise ValueError(
                f"axis {axis!r} is none of the mesh's {', '.join(map(repr, mesh.shape))}; "
                "None cuts nothing"
            )
        if used.count(axis) > 1:
            raise ValueError(f"axis {axis!r} of the mesh is named {used.count(axis)} times: {used}")
    (B, T), K = query.shape[:2], key.shape[2]
    _check_divides(mesh, batch, B, f"{B} batch rows")
    if head_axis is not None:
        _check_divides(mesh, (head_axis,), K, f"{K} key heads")
    if context_axis is not None:
        _check_divides(mesh, (context_axis,), T, f"{T} tokens")
        if mesh.shape[context_axis] == 1:
            context_axis = None
    return _Axes(mesh, batch, head_axis, context_axis)


def sharded_moba_attention(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mesh: Mesh | AbstractMesh,
    batch_axes: str | Sequence[str] | None = ("data", "fsdp"),
    head_axis: str | None = "tensor",
    context_axis: str | None = "context",
    segment_ids: jax.Array | None = None,
    implementation: str | None = None,
    **options: int | float | None,
) -> jax.Array:
    """`moba_attention` with each device of a mesh computing its own part of the result.

    Batch and heads may be cut without any communication. Along the context axis every device has
    T / devices consecutive tokens; keys and values of whole rows are gathered over it, twice in a
    training step, and the gradients of both are summed and scattered in float32. Documents and
    blocks may begin and end anywhere. Blocks are numbered, scored and chosen as on one device.

    Call it under `jax.jit`. Arrays that lie on the mesh otherwise are moved first.

    Args:
      query, key, value, segment_ids: as for `moba_attention`.
      implementation: likewise, except "reference", which has no sharded form.
      mesh: the devices.
      batch_axes: axes of the mesh over which B is cut; None: none.
      head_axis: axis over which key heads, and query heads with the key head they use, are cut;
        None: none.
      context_axis: axis over which T is cut, in the order of its devices; None: none.
      options: block_size, top_k, scale, soft_cap, sink_blocks and window_blocks, as for
        `moba_attention`.

    Returns:
      [B, T, N, Hv] in query's dtype, cut as its queries are.

    Raises:
      ValueError: as `moba_attention` does, an axis that the mesh lacks or that is named twice, or
        sizes that the axes do not divide.
    """
    call, q_BTNH, k_BTKH, v_BTKE = moba._prepare(
        query, key, value, segment_ids, implementation, **options
    )
    if implementation == "reference":
        raise ValueError("implementation 'reference' has no sharded form")
    axes = _make_axes(mesh, batch_axes, head_axis, context_axis, query, key)
    out = _attend(axes, implementation, call, q_BTNH, k_BTKH, v_BTKE, segment_ids)
    return moba._without_padding(out.astype(query.dtype), segment_ids)


def _attend(axes: _Axes, implementation, call: plan.Call, q_BTNH, k_BTKH, v_BTKE, segment_ids_BT):
    B, T, N, _ = q_BTNH.shape
    row_BTKH, ids_BT = _gather(axes, lax.stop_gradient(k_BTKH), segment_ids_BT)
    chosen_BNJT = jnp.zeros((B, N, 0, T), jnp.int32)
    if call.choices:
        q = lax.stop_gradient(q_BTNH)
        chosen_BNJT = _choose(axes, implementation, call, q, row_BTKH, ids_BT)
        chosen_BNJT = checkpoint_name(chosen_BNJT, "moba_chosen_blocks")
    return _attention(
        axes, implementation, call, q_BTNH, k_BTKH, v_BTKE, row_BTKH, ids_BT, chosen_BNJT
    )


def _gather(axes: _Axes, k_BTKH, segment_ids_BT):
    """Keys and segment ids with whole rows on every device of the context axis."""

    def gather(k_BCKH, ids_BC):
        return axes.gather(k_BCKH), axes.gather(ids_BC)

    whole = axes.map(gather, (axes.tokens, axes.ids), (axes.row, axes.ids_row))
    return whole(k_BTKH, segment_ids_BT)


def _choose(axes: _Axes, implementation, call: plan.Call, q_BTNH, row_BTKH, ids_BT):
    """The choice of every query, [B, N, J, T], by the device that has it."""
    B, T, N, _ = q_BTNH.shape
    call = dataclasses.replace(call, chunk=plan.choice_chunk(B, N, T, call.candidates))

    def choose(q_BCNH, k_BTKH, ids_BT):
        length = q_BCNH.shape[1]
        blocks = plan.find_blocks(k_BTKH.shape[1], call.block_size, ids_BT)
        queries = plan.of_queries(blocks, axes.offset(length), length)
        return moba._choose(implementation, call, q_BCNH, k_BTKH, queries)

    return axes.map(choose, (axes.tokens, axes.row, axes.ids_row), axes.chosen)(
        q_BTNH, row_BTKH, ids_BT
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention(axes, implementation, call, q_BTNH, k_BTKH, v_BTKE, row_BTKH, ids_BT, chosen_BNJT):
    """`row_BTKH` is `k_BTKH` gathered already."""
    return _forward(
        axes, implementation, call, q_BTNH, k_BTKH, v_BTKE, row_BTKH, ids_BT, chosen_BNJT
    )[0]


def _forward(axes, implementation, call, q_BTNH, k_BTKH, v_BTKE, row_BTKH, ids_BT, chosen_BNJT):
    def attend(q_BCNH, k_BTKH, v_BCKE, ids_BT, chosen_BNJC):
        return moba._run_forward(
            implementation,
            call,
            q_BCNH,
            k_BTKH,
            axes.gather(v_BCKE),
            chosen_BNJC,
            plan.find_blocks(k_BTKH.shape[1], call.block_size, ids_BT),
            axes.offset(q_BCNH.shape[1]),
        )

    o, top, inverse = axes.map(
        attend,
        (axes.tokens, axes.row, axes.tokens, axes.ids_row, axes.chosen),
        (axes.tokens, axes.stats, axes.stats),
    )(q_BTNH, row_BTKH, v_BTKE, ids_BT, chosen_BNJT)
    return o, (q_BTNH, k_BTKH, v_BTKE, ids_BT, chosen_BNJT, o, top, inverse)


def _backward(axes, implementation, call, saved, do_BTNE):
    def gradients(q_BCNH, k_BCKH, v_BCKE, ids_BT, chosen_BNJC, o, top, inverse, do_BCNE):
        # Or the compiler sees that these were gathered before, and keeps them until now.
        k_BCKH, v_BCKE, do_BCNE = lax.optimization_barrier((k_BCKH, v_BCKE, do_BCNE))
        k_BTKH, v_BTKE = axes.gather(k_BCKH), axes.gather(v_BCKE)
        dq, dk, dv = moba._run_backward(
            implementation,
            call,
            q_BCNH,
            k_BTKH,
            v_BTKE,
            chosen_BNJC,
            plan.find_blocks(k_BTKH.shape[1], call.block_size, ids_BT),
            o,
            top,
            inverse,
            do_BCNE,
            axes.offset(q_BCNH.shape[1]),
        )
        return dq, axes.scatter(dk).astype(k_BCKH.dtype), axes.scatter(dv).astype(v_BCKE.dtype)

    tokens = axes.tokens
    statistics = (tokens, axes.stats, axes.stats)
    dq, dk, dv = axes.map(
        gradients,
        (tokens, tokens, tokens, axes.ids_row, axes.chosen, *statistics, tokens),
        (tokens, tokens, tokens),
    )(*saved, do_BTNE)
    return dq, dk, dv, None, None, None


_attention.defvjp(_forward, _backward)
