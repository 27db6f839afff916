"""Local text files, each a document."""

from modo.data.files import file_identity, open_file, text_size
from modo.data.split import Shard, grouped
from modo.errors import UserError


def text_shards(paths: tuple[str, ...]) -> tuple[Shard, ...]:
    """The files, read one at a time while a shard is iterated over."""

    def shard(paths: list[str]) -> Shard:
        return Shard(
            lambda: f"text {[file_identity(path) for path in paths]}",
            sum(map(text_size, paths)),
            lambda: map(read_text, paths),
        )

    return tuple(shard(run) for run in grouped((path, text_size(path)) for path in paths))


def read_text(path: str) -> bytes:
    """The bytes of a UTF-8 file, decompressed where its name ends in .gz.

    Raises:
      UserError: it cannot be read, is not UTF-8, or holds nothing but white space.
    """
    with open_file(path) as file:
        text = file.read()
    try:
        text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{path} is not UTF-8 text: byte 0x{text[error.start]:02x} at offset {error.start}"
        ) from None
    if not text.strip():
        raise UserError(
            f"{path} is empty" if not text else f"{path} holds only white space ({len(text)} bytes)"
        )
    return text
