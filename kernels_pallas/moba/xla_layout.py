"""What is static about a call of MoBA in plain XLA: its path, windows and tiles, and their FLOPs.

Axes: see plan.py; L keys of a window, W tiles of a step, Q rows of a step.
"""

import dataclasses
from typing import Literal

import numpy as np

from kernels_pallas.moba import plan

# What a pair of a query and a chosen block costs beside its products, for gathering and merging:
# as much as products with this many keys. Measured with benchmarks.moba_cpu at blocks of 128 and
# 512, where the grouped path takes 2 and 1.25 times as long as its products alone.
_PAIR_COST = 160
# Queries and keys of a tile of the dense path.
_DENSE_TILE = 512
# Queries of a window of the own block: as many as the block has, of these.
_ROWS = (512, 256, 128)
# Most queries of a tile that chose the same block; half as many where blocks are shorter.
_TILE = 256
# Scores of a step of the grouped path, which takes several tiles when they are small.
_STEP_ELEMENTS = 1 << 19
_MAX_STEP_TILES = 64


@dataclasses.dataclass(frozen=True, eq=False)
class Windows:
    """Tiles of queries, each against some windows of keys.

    Attributes:
      rows, keys: of a window.
      row_P, start_P: of each window its first query and its first key, both counted from the first
        query.
      check: which pairs of a query and a key are looked at before they are taken. "all": every
        pair; "blocks": pairs of a query and a block of keys, in rows without segment ids;
        "diagonal": these, and which come earlier; "own": which come earlier and are of the same
        block, the same in every window; "causal": which come earlier; "none": all are taken.
    """

    rows: int
    keys: int
    row_P: np.ndarray
    start_P: np.ndarray
    check: Literal["all", "blocks", "diagonal", "own", "causal", "none"]

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
    dense: bool
    everything: bool
    candidates: int
    choices: int
    scored: bool
    windows: tuple[Windows, ...]
    tile: int = 0
    step_tiles: int = 0
    steps: int = 0


def _triangle(tiles: int, rows: int, diagonal: bool) -> tuple[np.ndarray, np.ndarray]:
    """First tokens of pairs of tiles: of each with itself, or with those before it."""
    i = np.arange(tiles)
    i, j = (i, i) if diagonal else np.tril_indices(tiles, -1)
    return i.astype(np.int32) * rows, j.astype(np.int32) * rows


def _dense_windows(call: plan.Call, length: int, front: int) -> tuple[Windows, ...]:
    """All that `length` queries with `front` tokens before them may attend to."""
    M = call.block_size
    tiles = -(-length // _DENSE_TILE)
    rows = -(-length // tiles)
    if not call.aligned or front:
        before = -(-front // rows)
        i, j = np.tril_indices(tiles, before, before + tiles)
        row_P, start_P = ((x * rows).astype(np.int32) for x in (i, j - before))
        return (Windows(rows, rows, row_P, start_P, "all"),)
    if call.everything:
        checks = ("causal", "none")
    elif M >= _DENSE_TILE:
        rows = _DENSE_TILE
        checks = ("causal", "blocks") if M % rows == 0 else ("all", "all")
    else:
        rows = max(1, rows // M) * M
        checks = ("diagonal", "blocks")
    tiles = -(-length // rows)
    windows = (
        Windows(rows, rows, *_triangle(tiles, rows, diagonal), check)
        for diagonal, check in zip((True, False), checks, strict=True)
    )
    return tuple(w for w in windows if len(w.row_P))


def _own_windows(length: int, block_size: int, aligned: bool) -> tuple[Windows, ...]:
    rows = next((n for n in _ROWS if block_size >= n), _ROWS[-1])
    if aligned and block_size <= rows:
        rows = rows // block_size * block_size
        row_P = np.arange(0, length, rows, dtype=np.int32)
        return (Windows(rows, rows, row_P, row_P, "own" if block_size < rows else "causal"),)
    if aligned and block_size % rows == 0:
        first = np.arange(0, length, block_size, dtype=np.int32)[:, None]
        windows = []
        for diagonal, check in ((True, "causal"), (False, "none")):
            row_P, start_P = (
                (first + x).reshape(-1) for x in _triangle(block_size // rows, rows, diagonal)
            )
            inside = row_P < length
            if inside.any():
                windows.append(Windows(rows, rows, row_P[inside], start_P[inside], check))
        return tuple(windows)
    row_P, reach = np.arange(0, length, rows, dtype=np.int32), block_size - 1
    return (Windows(rows, reach + rows, row_P, row_P - reach, "all"),)


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
    windows = _dense_windows(call, queries, front=length - queries)
    dense = Layout(M, True, call.everything, S, J, scored, windows)
    pairs = kv_heads * groups * plan.max_chunk_pairs(length, queries, M, J)
    tile = 8
    most = _TILE if M >= _TILE else _TILE // 2
    while 2 * tile <= most and 8 * tile * length <= M * J * groups * queries:
        tile *= 2
    tiles = pairs // tile + kv_heads * S if J else 0
    together = _STEP_ELEMENTS // (batch * tile * M)
    together = max(1, min(together, _MAX_STEP_TILES, tiles))
    grouped = Layout(
        M,
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
    if call.everything:
        return dense
    sizes = (batch, queries, kv_heads, groups, key_width, value_width)
    costs = [sum(layout_flops(layout, *sizes)) for layout in (grouped, dense)]
    # Five products of two widths in both passes, see `layout_flops`.
    gathering = 2 * pairs * batch * _PAIR_COST * (4 * key_width + 3 * value_width)
    return grouped if costs[0] + gathering < costs[1] else dense


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
    tile = layout.steps * layout.step_tiles * layout.tile * layout.block_size * batch
    gather = layout.steps * layout.step_tiles**2 * layout.block_size * batch
    # All steps count, though those at the end may have no pairs and then are not computed.
    forward = choice + (window + tile) * (key_width + value_width)
    backward = (window + tile) * (3 * key_width + 2 * value_width)
    backward += gather * (key_width + value_width)
    return 2 * forward, 2 * backward
