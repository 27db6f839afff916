"""Rows of T tokens by number, from a token file.

`rows[i]` is a dict of arrays [T]; `rows[indices_B]` the same for many rows at once, [B, T]:
  tokens: int32, what the model reads.
  targets: int32, the token after each.
  weights: float32, 1 where the target counts, else 0.
  positions: int32, from the first token of the document, or of its part in this row.
  segment_ids: int32, documents of the row numbered from 1; 0 is padding.
A document's last target is the document-start token: it says that the document ends.
"""

import dataclasses
import functools

import numpy as np

from modo.data.token_file import TokenFile
from modo.errors import UserError


def _check_indices(indices, num_rows: int) -> np.ndarray:
    indices = np.asarray(indices, np.int64)
    outside = indices[(indices < 0) | (indices >= num_rows)]
    if outside.size:
        raise IndexError(f"row {outside.flat[0]} of {num_rows}")
    return indices


@dataclasses.dataclass(frozen=True, eq=False)
class StreamRows:
    """All documents end to end, cut every `length` tokens.

    Row i reads tokens [i * length, (i + 1) * length) and its targets are one further, so every
    token but the first is a target once.

    Attributes:
      file: the split.
      length: tokens a row, T.
      mask_documents: number the documents of a row and start positions at 0 in each; otherwise
        a row is one segment.
      keep_remainder: whether the tokens left at the end make a last row, padded; otherwise they
        are left out.
    """

    file: TokenFile
    length: int
    mask_documents: bool
    keep_remainder: bool

    @property
    def num_targets(self) -> int:
        """Tokens of the split but the first."""
        return self.file.num_tokens - 1

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return self.file.num_bytes

    def __len__(self) -> int:
        targets = self.num_targets
        return -(-targets // self.length) if self.keep_remainder else targets // self.length

    def __getitem__(self, indices) -> dict[str, np.ndarray]:
        indices = _check_indices(indices, len(self))
        time_T = np.arange(self.length, dtype=np.int64)
        source_BT = indices[..., None] * self.length + time_T
        last = self.file.num_tokens - 1
        valid_BT = source_BT < last
        tokens_BT = self.file.tokens[np.minimum(source_BT, last)].astype(np.int32)
        targets_BT = self.file.tokens[np.minimum(source_BT + 1, last)].astype(np.int32)
        segment_ids_BT = np.ones_like(tokens_BT)
        positions_BT = np.broadcast_to(time_T.astype(np.int32), tokens_BT.shape)
        if self.mask_documents:
            starts_BT = tokens_BT == self.file.bos_token
            starts_BT[..., 0] = True
            segment_ids_BT = np.cumsum(starts_BT, axis=-1, dtype=np.int32)
            first_BT = np.maximum.accumulate(np.where(starts_BT, positions_BT, 0), axis=-1)
            positions_BT = positions_BT - first_BT
        return {
            "tokens": tokens_BT * valid_BT,
            "targets": targets_BT * valid_BT,
            "weights": valid_BT.astype(np.float32),
            "positions": positions_BT * valid_BT,
            "segment_ids": segment_ids_BT * valid_BT,
        }


@dataclasses.dataclass(frozen=True, eq=False)
class PackedRows:
    """Whole documents packed into rows, the rest of each row padding.

    A document longer than `length` is cut into pieces of `length` and a shorter last one, each a
    segment of its own. Every token of the split is read once, and every target counts.

    Attributes:
      file: the split.
      length: tokens a row, T.
      starts: int64 [pieces], where each piece begins in the file, grouped by row.
      lengths: int64 [pieces].
      first_piece: int64 [rows + 1], where each row's pieces begin in `starts`.
    """

    file: TokenFile
    length: int
    starts: np.ndarray
    lengths: np.ndarray
    first_piece: np.ndarray

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return self.file.num_bytes

    def __len__(self) -> int:
        return len(self.first_piece) - 1

    def __getitem__(self, indices) -> dict[str, np.ndarray]:
        indices = _check_indices(indices, len(self))
        rows_B = indices.reshape(-1)
        pieces_B = self.first_piece[rows_B + 1] - self.first_piece[rows_B]
        # The pieces of all rows, one after another.
        number_P = _count_within(pieces_B)
        piece_P = np.repeat(self.first_piece[rows_B], pieces_B) + number_P
        length_P = self.lengths[piece_P]
        # The tokens of all pieces, one after another.
        position = _count_within(length_P)
        source = np.repeat(self.starts[piece_P], length_P) + position
        row = np.repeat(np.repeat(np.arange(rows_B.size), pieces_B), length_P)
        tokens_B = np.bincount(row, minlength=rows_B.size)
        place = row * self.length + _count_within(tokens_B)
        # The token after the last of the split ends its document.
        target = self.file.tokens[np.minimum(source + 1, self.file.num_tokens - 1)]
        target = np.where(source + 1 == self.file.num_tokens, self.file.bos_token, target)
        values = {
            "tokens": self.file.tokens[source],
            "targets": target,
            "weights": np.float32(1),
            "positions": position,
            "segment_ids": np.repeat(number_P + 1, length_P),
        }
        shape = (*indices.shape, self.length)
        batch = {}
        for name, value in values.items():
            flat = np.zeros(
                rows_B.size * self.length, np.float32 if name == "weights" else np.int32
            )
            flat[place] = value
            batch[name] = flat.reshape(shape)
        return batch


def _count_within(sizes: np.ndarray) -> np.ndarray:
    """0..size-1 for every size, joined."""
    ends = np.cumsum(sizes)
    total = ends[-1] if len(ends) else 0
    return np.arange(total) - np.repeat(ends - sizes, sizes)


def pack(file: TokenFile, length: int) -> PackedRows:
    """Packs the documents of `file` into rows of `length`; depends on their lengths alone."""
    sizes = np.diff(file.offsets)
    pieces = -(-sizes // length)
    number = _count_within(pieces)
    starts = np.repeat(file.offsets[:-1], pieces) + number * length
    lengths = np.minimum(np.repeat(file.offsets[1:], pieces) - starts, length)
    order, first_piece = plan_rows(lengths, length)
    return PackedRows(file, length, starts[order], lengths[order], first_piece)


def plan_rows(lengths: np.ndarray, capacity: int) -> tuple[np.ndarray, np.ndarray]:
    """First-fit decreasing: fills row after row with the longest piece that still fits.

    Rows are filled from a histogram of lengths, so the work grows with the number of different
    ways to fill a row, not with the number of pieces.

    Args:
      lengths: int64 [pieces], each in 1..capacity.
      capacity: tokens a row.

    Returns:
      order: int64 [pieces], the pieces grouped by row.
      first_piece: int64 [rows + 1], where each row begins in `order`.
    """
    by_length = np.argsort(lengths, kind="stable")
    left = np.bincount(lengths, minlength=capacity + 1).tolist()
    next_piece = (np.cumsum(left) - left).tolist()  # of each length, in `by_length`
    # below[l] < l, with no piece left of the lengths in between.
    below = list(range(-1, capacity))

    def longest(space: int) -> int:
        """The longest length <= space of which a piece is left, else 0."""
        found = space
        while found and not left[found]:
            found = below[found]
        while space != found:  # shorten the way for the next call
            below[space], space = found, below[space]
        return found

    order, row_sizes = [], []
    while longest(capacity):
        # One way to fill a row: (length, how many), repeated while there are enough of each.
        fill, space, limit = [], capacity, capacity
        while length := longest(min(space, limit)):
            many = min(space // length, left[length])
            fill.append((length, many))
            space, limit = space - many * length, length - 1
        rows = min(left[length] // many for length, many in fill)
        taken = []
        for length, many in fill:
            begin, count = next_piece[length], rows * many
            taken.append(by_length[begin : begin + count].reshape(rows, many))
            next_piece[length] += count
            left[length] -= count
        block = np.concatenate(taken, axis=1)
        order.append(block.reshape(-1))
        row_sizes.append(np.full(rows, block.shape[1]))
    order = np.concatenate(order) if order else np.zeros(0, np.int64)
    sizes = np.concatenate(row_sizes) if row_sizes else np.zeros(0, np.int64)
    return order, np.concatenate([[0], np.cumsum(sizes)])


@dataclasses.dataclass(frozen=True, eq=False)
class JoinedRows:
    """The rows of several corpora, one corpus after another.

    Attributes:
      parts: their rows, of the same length.
    """

    parts: tuple[StreamRows | PackedRows, ...]

    @property
    def length(self) -> int:
        return self.parts[0].length

    @property
    def num_bytes(self) -> int:
        """UTF-8 bytes of the text."""
        return sum(part.num_bytes for part in self.parts)

    @property
    def num_targets(self) -> int:
        return sum(part.num_targets for part in self.parts)

    @functools.cached_property
    def first_row(self) -> np.ndarray:
        """int64 [parts + 1], where each part begins, then the number of rows."""
        return np.cumsum([0, *map(len, self.parts)])

    def __len__(self) -> int:
        return int(self.first_row[-1])

    def __getitem__(self, indices) -> dict[str, np.ndarray]:
        indices = _check_indices(indices, len(self))
        part_of = np.searchsorted(self.first_row, indices, side="right") - 1
        batch = {}
        for number, part in enumerate(self.parts):
            here = part_of == number
            if not here.any():
                continue
            for name, array in part[indices[here] - self.first_row[number]].items():
                shape = (*indices.shape, self.length)
                batch.setdefault(name, np.empty(shape, array.dtype))[here] = array
        return batch


def train_rows(
    file: TokenFile, length: int, *, packing: str, mask_documents: bool
) -> StreamRows | PackedRows:
    """Rows to train on.

    Raises:
      UserError: the split is too short for one stream row.
    """
    if packing == "documents":
        return pack(file, length)
    if file.num_tokens < length + 1:
        raise UserError(
            f"training text has {file.num_tokens} tokens, a row of train.length {length} needs "
            f"{length + 1}"
        )
    return StreamRows(file, length, mask_documents, keep_remainder=False)
