"""What is static about a call of MoBA in plain XLA: its path, windows and tiles, and their FLOPs.

Axes: see plan.py; L keys of a window, W tiles of a step, Q rows of a step.
"""

import dataclasses

from kernels_pallas.moba import plan

# Rows up to this length take the dense path: the tables of the grouped path would cost more.
_DENSE_LENGTH = 1024
# What a product costs on the grouped path, with all its gathering, against one on the dense path.
_GROUPED_COST = 1.6
# The dense path computes rows up to this length in parts that end their keys where they end. Each
# is compiled by itself, so longer ones are cut into two parts of tiles that one loop goes through.
_UNROLLED_LENGTH = 4096
# Rows of a product: with long blocks more of them are faster, with short ones they are wasted.
_SHORT_ROWS, _LONG_ROWS = 128, 256
# Scores of a step of the grouped path, which takes several tiles when they are small.
_STEP_ELEMENTS = 1 << 19
_MAX_STEP_TILES = 64


@dataclasses.dataclass(frozen=True)
class Windows:
    """Consecutive tiles of queries, each against a window of `length` keys.

    The window of the tile that begins at token t begins at t // align * align - front; tokens count
    from the first query. A tile is computed in `parts` of its rows; with several, each ends its
    keys where its rows end.
    """

    first: int
    tiles: int
    rows: int
    length: int
    front: int
    align: int
    parts: int = 1

    def part_rows(self) -> list[tuple[int, int, int]]:
        """First row, one beyond the last, and keys of each part."""
        step = -(-self.rows // self.parts)
        edges = [(start, min(start + step, self.rows)) for start in range(0, self.rows, step)]
        return [
            (start, end, self.front + end if self.parts > 1 else self.length)
            for start, end in edges
        ]

    def products(self) -> int:
        """Pairs of a row and a key in all tiles."""
        return self.tiles * sum((end - start) * keys for start, end, keys in self.part_rows())


@dataclasses.dataclass(frozen=True)
class Layout:
    """Everything static about one call.

    Attributes:
      dense: whether the windows hold all keys.
      everything: whether all candidates are attended, without a choice.
      candidates: S.
      choices: blocks to choose a query.
      scored: whether the choice needs scores.
      windows: they cover the queries together.
      tile, step_tiles, steps: the grouped path takes steps * step_tiles tiles of `tile` rows.
    """

    block_size: int
    aligned: bool
    dense: bool
    everything: bool
    candidates: int
    choices: int
    scored: bool
    windows: tuple[Windows, ...]
    tile: int = 0
    step_tiles: int = 0
    steps: int = 0


def _dense_windows(length: int, front: int) -> tuple[Windows, ...]:
    """Of `length` queries with `front` tokens before them."""
    if length <= _UNROLLED_LENGTH:
        rows = _LONG_ROWS if length >= 2 * _LONG_ROWS else _SHORT_ROWS
        parts = -(-length // rows)
        return (Windows(0, 1, length, front + length, front, align=length, parts=parts),)
    rows = _LONG_ROWS
    tiles = -(-length // rows)
    half = tiles // 2
    align = tiles * rows
    return (
        Windows(0, half, rows, front + half * rows, front, align),
        Windows(half * rows, tiles - half, rows, front + align, front, align),
    )


def _product_rows(block_size: int) -> int:
    return _LONG_ROWS if block_size >= _LONG_ROWS else _SHORT_ROWS


def _own_windows(length: int, block_size: int, aligned: bool) -> tuple[Windows, ...]:
    rows = _product_rows(block_size)
    if aligned and block_size <= rows:
        rows = rows // block_size * block_size
        window = Windows(0, -(-length // rows), rows, rows, front=0, align=rows)
    elif aligned and block_size % rows == 0:
        parts = block_size // rows
        window = Windows(0, -(-length // block_size), block_size, block_size, 0, block_size, parts)
    else:
        reach = rows + block_size - 1
        window = Windows(0, -(-length // rows), rows, reach, front=block_size - 1, align=1)
    return (window,)


def make_layout(
    call: plan.Call,
    *,
    batch: int,
    length: int,
    kv_heads: int,
    groups: int,
    key_width: int,
    value_width: int,
    queries: int | None = None,
) -> Layout:
    """The layout of a call from its static shapes; queries: tokens of a chunk of the row."""
    M, S, J = call.block_size, call.candidates, call.choices
    scored = not call.fixed
    queries = length if queries is None else queries
    windows = _dense_windows(queries, front=length - queries)
    dense = Layout(M, call.aligned, True, call.everything, S, J, scored, windows)
    heads = batch * kv_heads
    pairs = heads * groups * plan.max_chunk_pairs(length, queries, M, J)
    tile = 8
    while 2 * tile <= _product_rows(M) and 8 * tile * length <= M * J * groups * queries:
        tile *= 2
    tiles = pairs // tile + heads * S if J else 0
    together = _STEP_ELEMENTS // (tile * M)
    together = max(1, min(together, _MAX_STEP_TILES, tiles))
    grouped = Layout(
        M,
        call.aligned,
        False,
        False,
        S,
        J,
        scored,
        # A chunk of whole blocks begins where a block does.
        _own_windows(queries, M, call.aligned and (queries == length or queries % M == 0)),
        tile,
        together,
        -(-tiles // together),
    )
    if call.path is not None:
        return dense if call.path == "dense" else grouped
    if call.everything or (J and length <= _DENSE_LENGTH):
        return dense
    sizes = (batch, queries, kv_heads, groups, key_width, value_width)
    costs = [sum(layout_flops(layout, *sizes)) for layout in (grouped, dense)]
    return grouped if _GROUPED_COST * costs[0] < costs[1] else dense


def layout_flops(
    layout: Layout,
    batch: int,
    length: int,
    kv_heads: int,
    groups: int,
    key_width: int,
    value_width: int,
) -> tuple[int, int]:
    """FLOPs of matrix products, 2 M N K each: of the forward and of the backward pass.

    `length` counts queries.
    """
    heads, S = kv_heads * groups, layout.candidates
    choice = 0
    if layout.scored:
        chunk = plan.choice_chunk(batch, heads, length, S)
        choice = -(-length // chunk) * chunk * batch * heads * S * key_width
    window = sum(w.products() for w in layout.windows) * batch * heads
    tile = layout.steps * layout.step_tiles * layout.tile * layout.block_size
    gather = layout.steps * layout.step_tiles**2 * layout.block_size
    # All steps count, though those at the end may have no pairs and then are not computed.
    forward = choice + (window + tile) * (key_width + value_width)
    backward = (window + tile) * (3 * key_width + 2 * value_width)
    backward += gather * (key_width + value_width)
    return 2 * forward, 2 * backward
