"""What is static about a call of MoBA in plain XLA: its path, windows and tiles, and their FLOPs.

Axes: see plan.py; L keys of a window, W tiles of a step, Q rows of a step.
"""

import dataclasses

import numpy as np

from kernels_pallas.moba import plan

# Rows up to this length take the dense path: the tables of the grouped path would cost more.
_DENSE_LENGTH = 1024
# What a product costs on the grouped path, with all its gathering, against one on the dense path.
_GROUPED_COST = 1.6
# Queries and keys of a tile of the dense path.
_DENSE_TILE = 512
# Rows of a product: with long blocks more of them are faster, with short ones they are wasted.
_SHORT_ROWS, _LONG_ROWS = 128, 256
# Scores of a step of the grouped path, which takes several tiles when they are small.
_STEP_ELEMENTS = 1 << 19
_MAX_STEP_TILES = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Tiles of queries, each against some windows of keys.

    Attributes:
      rows, keys: of a window.
      row_P, start_P: of each window its first query and its first key, both counted from the first
        query. All queries are in one at least.
    """

    rows: int
    keys: int
    row_P: np.ndarray
    start_P: np.ndarray

    @property
    def front(self) -> int:
        """Keys that are reached before the first query."""
        return max(0, -int(self.start_P.min()))

    @property
    def end(self) -> int:
        """One beyond the last query and key of any window."""
        return int(max(self.row_P.max() + self.rows, self.start_P.max() + self.keys))

    def products(self) -> int:
        """Pairs of a query and a key in all windows."""
        return len(self.row_P) * self.rows * self.keys


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
    windows: Windows
    tile: int = 0
    step_tiles: int = 0
    steps: int = 0


def _dense_windows(length: int, front: int) -> Windows:
    """All that `length` queries with `front` tokens before them may attend to."""
    tiles = -(-length // _DENSE_TILE)
    rows = -(-length // tiles)
    before = -(-front // rows)
    i, j = (x.astype(np.int32) * rows for x in np.tril_indices(tiles, before, before + tiles))
    return Windows(rows, rows, i, j - before * rows)


def _product_rows(block_size: int) -> int:
    return _LONG_ROWS if block_size >= _LONG_ROWS else _SHORT_ROWS


def _own_windows(length: int, block_size: int, aligned: bool) -> Windows:
    rows = _product_rows(block_size)
    if aligned and block_size <= rows:
        rows = rows // block_size * block_size
    row_P = np.arange(0, length, rows, dtype=np.int32)
    if aligned and rows % block_size == 0:
        return Windows(rows, rows, row_P, row_P)
    if aligned and block_size % rows == 0:
        # Of tile i of a block, tiles 0 to i of its keys.
        i, j = np.tril_indices(block_size // rows)
        first = np.arange(0, length, block_size)[:, None]
        row_P, start_P = ((first + rows * x).reshape(-1).astype(np.int32) for x in (i, j))
        inside = row_P < length
        return Windows(rows, rows, row_P[inside], start_P[inside])
    reach = block_size - 1
    return Windows(rows, reach + rows, row_P, row_P - reach)


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
    pairs = kv_heads * groups * plan.max_chunk_pairs(length, queries, M, J)
    tile = 8
    while 2 * tile <= _product_rows(M) and 8 * tile * length <= M * J * groups * queries:
        tile *= 2
    tiles = pairs // tile + kv_heads * S if J else 0
    together = _STEP_ELEMENTS // (batch * tile * M)
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
    window = layout.windows.products() * batch * heads
    tile = layout.steps * layout.step_tiles * layout.tile * layout.block_size * batch
    gather = layout.steps * layout.step_tiles**2 * layout.block_size * batch
    # All steps count, though those at the end may have no pairs and then are not computed.
    forward = choice + (window + tile) * (key_width + value_width)
    backward = (window + tile) * (3 * key_width + 2 * value_width)
    backward += gather * (key_width + value_width)
    return 2 * forward, 2 * backward
