"""Local files with a JSON object a line, each a document."""

import json
from collections.abc import Iterator

from modo.data.files import file_identity, open_file, text_size
from modo.data.split import SHARD_BYTES, Shard, grouped
from modo.errors import UserError

Range = tuple[str, int, int | None]  # of a file: the lines that start in [begin, end)


def jsonl_shards(paths: tuple[str, ...], field: str) -> tuple[Shard, ...]:
    """The lines of the files: small files together, large ones cut where they are not compressed.

    Args:
      paths: the files.
      field: of each line's object, the text.
    """

    def shard(ranges: list[Range]) -> Shard:
        size = sum(_range_size(range_) for range_ in ranges)

        def identify() -> str:
            return f"jsonl {field} {[(file_identity(path), *cut) for path, *cut in ranges]}"

        def read() -> Iterator[bytes]:
            for range_ in ranges:
                for _, text in read_lines(range_, field):
                    yield text

        return Shard(identify, size, read)

    ranges = [range_ for path in paths for range_ in _cut(path)]
    return tuple(shard(run) for run in grouped((r, _range_size(r)) for r in ranges))


def _cut(path: str) -> list[Range]:
    size = text_size(path)
    if path.endswith(".gz") or size <= SHARD_BYTES:
        return [(path, 0, None)]
    return [(path, begin, begin + SHARD_BYTES) for begin in range(0, size, SHARD_BYTES)]


def _range_size(range_: Range) -> int:
    path, begin, end = range_
    return text_size(path) if end is None else min(end, text_size(path)) - begin


def read_lines(range_: Range, field: str) -> Iterator[tuple[int, bytes]]:
    """(offset of the line, UTF-8 text) of every line in a range that holds any text.

    Blank lines are passed over, and so are texts of white space alone: public sets have them.

    Raises:
      UserError: the file cannot be read, or a line is not an object with such a text.
    """
    path, begin, end = range_
    with open_file(path) as file:
        if begin:
            file.seek(begin - 1)
            begin += len(file.readline()) - 1  # the line before, or its end
        offset = begin
        while end is None or offset < end:
            line = file.readline()
            if not line:
                break
            if not line.isspace():
                try:
                    text = parse_line(line, field)
                except ValueError as error:
                    number = _line_number(path, offset)
                    raise UserError(f"{path} line {number}: {error}") from None
                if text.strip():
                    yield offset, text
            offset += len(line)


def parse_line(line: bytes, field: str) -> bytes:
    """The text of a line, UTF-8.

    Raises:
      ValueError: says why there is none.
    """
    try:
        values = json.loads(line.rstrip(b"\r\n").decode("utf-8"))
    except UnicodeDecodeError as error:
        raise ValueError(
            f"not UTF-8: byte 0x{line[error.start]:02x} at offset {error.start} of the line"
        ) from None
    except json.JSONDecodeError as error:
        raise ValueError(f"not JSON: {error.msg} at character {error.pos}") from None
    except RecursionError:
        raise ValueError("not JSON that can be read: nested too deeply") from None
    if not isinstance(values, dict):
        raise ValueError(f"not a JSON object but {_kind(values)}")
    if field not in values:
        raise ValueError(f"no field {field!r} (data.text_field); there are {_names(values)}")
    text = values[field]
    if not isinstance(text, str):
        raise ValueError(f"field {field!r} is not a string but {_kind(text)}")
    try:
        return text.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ValueError(
            f"field {field!r} has a lone surrogate \\u{ord(text[error.start]):04x} at character "
            f"{error.start}"
        ) from None


def _kind(value) -> str:
    if value is None:
        return "null"
    names = {dict: "an object", list: "an array", str: "a string", bool: "a boolean"}
    return names.get(type(value), "a number")


def _names(values: dict) -> str:
    names = [repr(name) for name in list(values)[:8]]
    return ", ".join(names + ["..."] * (len(values) > 8)) or "none"


def _line_number(path: str, offset: int) -> int:
    """Which line starts at `offset`, counting from 1."""
    number, left = 1, offset
    with open_file(path) as file:
        while left and (piece := file.read(min(left, 1 << 22))):
            number += piece.count(b"\n")
            left -= len(piece)
    return number
