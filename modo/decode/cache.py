"""Caches of static shape: what decoding keeps of the tokens it has seen.

A full layer holds every token, a routed one only those that it computed. Slots are filled in
order; how many are is all that is known of them, so rolling back is to count less, and nothing is
ever cleared.

Axes: B rows, K key heads, S slots or blocks, H head width, T tokens up to `max_length`, L routed
layers.
"""

import dataclasses
import math

import jax
import jax.numpy as jnp
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from modo.decode.inputs import check_count, known, to_int32
from modo.nn.decoder import Decoder, LayerKind, layer_kinds
from modo.ops.cached_attention import block_slots

# A routed layer's slots over the share of tokens that it means to route, and their least number.
SLACK = 1.5
LEAST_SLOTS = 16


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class LayerCache:
    """One layer's part.

    Attributes:
      k_BKSH: keys as they meet queries; a token's slot is its number among those held.
      v_BKSH: values.
      count_B: int32, slots in use; None: as many as the row has tokens.
      wanted_BT: bool, of a routed layer: the tokens that it meant to compute. The first S of them
        are those that are held; for those after them there was no slot, and they skipped the block.
        None: not routed.
      key_sums_BKSH: float32, of a MoBA layer: the sum of each full block's keys, taken when its
        last key came. None: full attention.
      raw_keys_BKSH: of a layer with a key convolution: the keys before it. None: without.
      block: slots of a block of MoBA. None: full attention.
    """

    k_BKSH: Array
    v_BKSH: Array
    count_B: Array | None
    wanted_BT: Array | None
    key_sums_BKSH: Array | None
    raw_keys_BKSH: Array | None
    block: int | None = dataclasses.field(metadata={"static": True})

    @property
    def slots(self) -> int:
        return self.k_BKSH.shape[2]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Cache:
    """What decoding keeps: a pytree in which every array's first axis is the batch.

    Attributes:
      layers: one a layer, from the input up.
      length_B: int32, tokens of each row.
      max_length: most tokens of a row.
    """

    layers: tuple[LayerCache, ...]
    length_B: Array
    max_length: int = dataclasses.field(metadata={"static": True})

    @property
    def batch(self) -> int:
        return self.length_B.shape[0]

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays."""
        return sum(math.prod(x.shape) * x.dtype.itemsize for x in jax.tree.leaves(self))

    def wanted_LBT(self) -> Array:
        """The tokens that each routed layer meant to compute, bool; L from the input up."""
        held_BT = jnp.arange(self.max_length) < self.length_B[:, None]
        wanted = [layer.wanted_BT & held_BT for layer in self._routed()]
        return jnp.stack(wanted) if wanted else jnp.zeros((0, *held_BT.shape), bool)

    def routed_LBT(self) -> Array:
        """The tokens that each routed layer computed: `wanted_LBT` as long as slots lasted."""
        wanted_LBT = self.wanted_LBT()
        slots_L11 = jnp.asarray([layer.slots for layer in self._routed()], jnp.int32)[:, None, None]
        return wanted_LBT & (jnp.cumsum(wanted_LBT, axis=2) <= slots_L11)

    def dropped_LB(self) -> Array:
        """Tokens that skipped a routed layer because it had no slot left for them, int32."""
        return jnp.sum(self.wanted_LBT() & ~self.routed_LBT(), axis=2)

    def _routed(self) -> list[LayerCache]:
        return [layer for layer in self.layers if layer.wanted_BT is not None]


def default_routed_slots(capacity: float, max_length: int) -> int:
    """Slots of a routed layer: half as many again as its capacity, and at least 16."""
    slots = max(LEAST_SLOTS, math.ceil(SLACK * capacity * max_length))
    return min(max_length, slots)


def init_cache(
    model: Decoder, batch: int, max_length: int, *, routed_slots: int | None = None
) -> Cache:
    """An empty cache.

    Args:
      model: a Decoder.
      batch: rows.
      max_length: most tokens of a row.
      routed_slots: tokens that a routed layer holds of a row, at most max_length; None:
        ceil(1.5 * capacity * max_length), at least 16. A token that a layer means to compute after
        they are full skips that layer, and is counted (`Cache.dropped_LB`).

    MoBA layers round their slots up to whole blocks.

    Raises:
      ValueError: batch, max_length or routed_slots below 1, or more routed_slots than max_length.
    """
    check_count("batch", batch)
    check_count("max_length", max_length)
    if routed_slots is not None:
        check_count("routed_slots", routed_slots)
        if routed_slots > max_length:
            raise ValueError(
                f"routed_slots must be in [1, max_length {max_length}], got {routed_slots}"
            )
    layers = tuple(
        _init_layer(model, kind, batch, max_length, routed_slots)
        for kind in layer_kinds(model.config)
    )
    return Cache(layers, jnp.zeros(batch, jnp.int32), max_length)


def _init_layer(
    model: Decoder, kind: LayerKind, batch: int, max_length: int, routed_slots: int | None
) -> LayerCache:
    config = model.config
    slots, block = max_length, None
    routed = kind.capacity is not None
    if routed:
        slots = routed_slots or default_routed_slots(kind.capacity, max_length)
    if kind.moba:
        slots, block = block_slots(slots, config.moba.block_size)
    shape = (batch, config.kv_heads, slots, config.head_width)
    dtype = jnp.dtype(config.compute_dtype)
    sums_shape = (batch, config.kv_heads, slots // block, config.head_width) if kind.moba else None
    convolves = kind.moba and config.moba.key_convolution is not None
    return LayerCache(
        k_BKSH=jnp.zeros(shape, dtype),
        v_BKSH=jnp.zeros(shape, dtype),
        count_B=jnp.zeros(batch, jnp.int32) if routed else None,
        wanted_BT=jnp.zeros((batch, max_length), bool) if routed else None,
        key_sums_BKSH=jnp.zeros(sums_shape, jnp.float32) if kind.moba else None,
        raw_keys_BKSH=jnp.zeros(shape, dtype) if convolves else None,
        block=block,
    )


def roll_back(cache: Cache, lengths_B: Array) -> Cache:
    """The cache as it was when its rows had `lengths_B` tokens.

    `lengths_B` are counted from the rows' beginning, not from the last chunk's. A row that has no
    more than that stays as it is. No key is touched.

    Raises:
      ValueError: lengths of another shape or type, or negative where they are known outside of jit.
    """
    lengths_B = to_int32("lengths", lengths_B)
    if lengths_B.shape != cache.length_B.shape:
        raise ValueError(f"lengths must be [B] = {cache.length_B.shape}, got {lengths_B.shape}")
    if known(lengths_B) and int(lengths_B.min()) < 0:
        raise ValueError(f"lengths must not be negative, got {int(lengths_B.min())}")
    length_B = jnp.clip(lengths_B, 0, cache.length_B)
    kept_BT = jnp.arange(cache.max_length) < length_B[:, None]

    def roll_back_layer(layer: LayerCache) -> LayerCache:
        if layer.wanted_BT is None:
            return layer
        wanted_B = jnp.sum(layer.wanted_BT & kept_BT, axis=1, dtype=jnp.int32)
        return dataclasses.replace(layer, count_B=jnp.minimum(wanted_B, layer.slots))

    layers = tuple(map(roll_back_layer, cache.layers))
    return dataclasses.replace(cache, layers=layers, length_B=length_B)


def reset(cache: Cache, rows_B: Array | None = None) -> Cache:
    """The cache with the rows where `rows_B` is true, or all, empty."""
    empty_B = jnp.zeros_like(cache.length_B)
    if rows_B is not None:
        rows_B = jnp.asarray(rows_B)
        if rows_B.shape != empty_B.shape or rows_B.dtype != bool:
            raise ValueError(
                f"rows must be bool [B] = {empty_B.shape}, got {rows_B.dtype} {rows_B.shape}"
            )
        empty_B = jnp.where(rows_B, 0, cache.length_B)
    return roll_back(cache, empty_B)


def take_rows(cache: Cache, index_B: Array) -> Cache:
    """A cache of the rows `index_B`, in that order, each as often as it is named: for beams.

    Raises:
      ValueError: index_B is not a list of integers, or, where they are known, names other rows.
    """
    index_B = to_int32("rows", index_B)
    if index_B.ndim != 1 or index_B.shape[0] == 0:
        raise ValueError(f"rows must be [B] with B at least 1, got {index_B.shape}")
    if known(index_B) and not 0 <= int(index_B.min()) <= int(index_B.max()) < cache.batch:
        raise ValueError(
            f"rows must be in [0, {cache.batch}), got {int(index_B.min())} to {int(index_B.max())}"
        )
    return jax.tree.map(lambda x: x[index_B], cache)


def cache_shardings(
    cache: Cache,
    mesh: Mesh,
    *,
    batch_axes: str | tuple[str, ...] | None = ("data", "fsdp"),
    head_axis: str | None = "tensor",
):
    """A tree like the cache of where each array lies: rows over batch_axes, heads over head_axis.

    An axis that does not divide, or that the mesh lacks, leaves the dimension whole, as None does.
    """
    batch_axes = (batch_axes,) if isinstance(batch_axes, str) else tuple(batch_axes or ())
    batch_axes = tuple(axis for axis in batch_axes if axis in mesh.shape)
    head_axes = (head_axis,) if head_axis in mesh.shape else ()

    def part(axes, size):
        return axes if axes and size % math.prod(mesh.shape[a] for a in axes) == 0 else None

    def sharding(x):
        spec = [part(batch_axes, x.shape[0])]
        if x.ndim == 4:
            spec.append(part(head_axes, x.shape[1]))
        return NamedSharding(mesh, PartitionSpec(*spec))

    return jax.tree.map(sharding, cache)
