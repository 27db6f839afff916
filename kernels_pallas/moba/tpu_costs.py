"""Which rows take the dense path on a TPU: those where its kernels should take less time.

The numbers are bundles of the compiler's schedule, about cycles, forward and backward together, for
heads of 128, as `python -m benchmarks.tpu_static --costs` counts them. What a gathered row costs is
assumed. No TPU has been timed.
"""

from typing import NamedTuple

from kernels_pallas.moba import plan, tpu_dense
from kernels_pallas.moba.tpu_tiles import LANES

# Cycles a nanosecond.
CLOCK = {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 1.9}
GATHER_NS = 4
# Tokens of a tile of the dense and interval kernels, and queries of a tile that chose one block.
WINDOW = 512
TILE = 256


class Bundles(NamedTuple):
    """Of one grid step, forward and backward.

    Attributes:
      dense: of the dense kernels, 512 x 512, where blocks divide tiles or tiles blocks.
      dense_any: the same, where blocks begin and end anywhere.
      tile_128, tile_512: of 256 queries with the block of 128 and 512 keys that they chose.
      own: of the interval kernels, 512 x 512.
    """

    dense: float
    dense_any: float
    tile_128: float
    tile_512: float
    own: float


# By generation and bytes of a number.
BUNDLES = {
    ("v5e", 2): Bundles(4327, 5579.5, 1476, 2422, 4614),
    ("v5e", 4): Bundles(21654.5, 22001, 3447, 11004, 22367),
    ("v5p", 2): Bundles(4421, 5753, 1617, 2569, 4788),
    ("v5p", 4): Bundles(21624, 22132, 3561, 11292, 22660),
    ("v6e", 2): Bundles(2842, 4663, 1413, 1993, 3415),
    ("v6e", 4): Bundles(11687, 13246, 3036, 6583, 12430),
    ("tpu7x", 2): Bundles(2382, 4379.5, 1089, 1750, 2813),
    ("tpu7x", 4): Bundles(9918.5, 11631.5, 2635, 7024, 11055),
}
_GENERATIONS = {
    "TPU v5e": "v5e",
    "TPU v5 lite": "v5e",
    "TPU v5": "v5p",
    "TPU v5p": "v5p",
    "TPU v6e": "v6e",
    "TPU v6 lite": "v6e",
    "TPU7": "tpu7x",
    "TPU7x": "tpu7x",
}
# For any other: with the slowest arithmetic the dense path is taken least, so it pays on all.
_FALLBACK = "v5e"
# Bytes on chip for the gradients of a row, and for the tables of tiles. Every generation has 64 MiB
# and 1 MiB at least.
_ROW_BYTES = 48 << 20
_TABLE_BYTES = 512 << 10


def generation_of(device_kind: str | None) -> str:
    """The generation whose numbers a kind of device takes; None: it is unknown."""
    return _GENERATIONS.get(device_kind, _FALLBACK)


def dense_pairs(call: plan.Call, queries: int, length: int) -> int:
    """Most pairs of tiles that the dense path attends to, for a query head of a row's end."""
    I, C = -(-queries // WINDOW), -(-length // WINDOW)
    causal = tpu_dense.num_pairs(I, C - I)
    if not call.fixed or call.everything:
        return causal

    def tiles(blocks):
        """That so many consecutive blocks touch."""
        return -(-blocks * call.block_size // WINDOW) + (not call.aligned) if blocks else 0

    return min(causal, I * (tiles(call.sinks) + tiles(call.window + 1) + 1))


def dense_ns(call: plan.Call, queries: int, length: int, generation: str, itemsize: int) -> float:
    """Of a query head of 128, forward and backward."""
    bundles = BUNDLES[generation, itemsize]
    whole = tpu_dense.pieces(WINDOW, call.block_size, call.aligned) < WINDOW
    step = bundles.dense if whole else bundles.dense_any
    return dense_pairs(call, queries, length) * step / CLOCK[generation]


def grouped_ns(
    call: plan.Call, queries: int, groups: int, generation: str, itemsize: int
) -> tuple[float, float]:
    """The same of tiles and own blocks, and of gathers."""
    bundles = BUNDLES[generation, itemsize]
    pairs = queries * call.choices
    # Half a tile of each block is empty.
    tiles = pairs / TILE + call.candidates / groups / 2
    slope = (bundles.tile_512 - bundles.tile_128) / (512 - 128)
    tile = max(bundles.tile_512 + slope * (call.block_size - 512), bundles.tile_128 / 2)
    own = queries / WINDOW * max(1, call.block_size // WINDOW) * bundles.own
    # Queries to tiles and results back, in either pass.
    gathered = 2 * (tiles * TILE + pairs)
    return (tiles * tile + own) / CLOCK[generation], gathered * GATHER_NS


def is_dense(
    call: plan.Call,
    *,
    queries: int,
    length: int,
    groups: int,
    rows: int,
    key_width: int,
    value_width: int,
    itemsize: int,
    device_kind: str | None,
) -> bool:
    """Whether a call takes the dense path.

    Args:
      queries, length: tokens of queries, the last of a row, and of keys.
      groups: query heads a key head.
      rows: key heads of all batch rows.
      device_kind: what the code is for; None: unknown.
    """
    if call.path is not None:
        return call.path == "dense"
    I = -(-queries // WINDOW)
    front = -(-(length - queries) // WINDOW)
    table = 4 * rows * tpu_dense.num_pairs(I, front)
    padded = I * WINDOW, (front + I) * WINDOW
    on_chip = tpu_dense.row_bytes(*padded, key_width, value_width)
    if on_chip > _ROW_BYTES or table > _TABLE_BYTES:
        return False
    if not call.choices:
        return call.everything
    generation = generation_of(device_kind)
    arithmetic, gathers = grouped_ns(call, queries, groups, generation, itemsize)
    # Arithmetic grows with the width, and gathers do not.
    width = sum(-(-x // LANES) for x in (key_width, value_width)) / 2
    dense = dense_ns(call, queries, length, generation, itemsize)
    return width * dense < width * arithmetic + gathers
