"""Splits of a corpus, in shards that can be read at the same time and one by one after a break."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

from modo.errors import UserError

T = TypeVar("T")
SHARD_BYTES = 1 << 25  # about so much text is read, tokenised and kept as one piece of work


@dataclasses.dataclass(frozen=True)
class Shard:
    """Some documents that follow each other.

    Attributes:
      identify: says which text it is without reading it: other text, another string.
      size: bytes of it, about, to tell how far the work is.
      read: makes an iterator over the documents, UTF-8 bytes; may be called any number of times,
        in any thread. It raises UserError where text cannot be read.
    """

    identify: Callable[[], str]
    size: int
    read: Callable[[], Iterator[bytes]]


@dataclasses.dataclass(frozen=True)
class Split:
    """What is trained on, or what is held out.

    Attributes:
      shards: in order.
      when_empty: the error where no shard holds a document.
    """

    shards: tuple[Shard, ...]
    when_empty: str

    def documents(self) -> Iterator[bytes]:
        """All documents in order.

        Raises:
          UserError: there is none, or one cannot be read.
        """
        empty = True
        for shard in self.shards:
            for document in shard.read():
                empty = False
                yield document
        if empty:
            raise UserError(self.when_empty)


def grouped(items: Iterable[tuple[T, int]], most: int = SHARD_BYTES) -> Iterator[list[T]]:
    """Cuts (item, bytes) pairs into runs of about `most` bytes."""
    run, size = [], 0
    for item, bytes_ in items:
        run.append(item)
        size += bytes_
        if size >= most:
            yield run
            run, size = [], 0
    if run:
        yield run
