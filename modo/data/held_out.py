"""What of a corpus is held out: the last part of each document, or documents by their hash."""

import functools
import hashlib
import itertools
import math
from collections.abc import Callable, Iterable, Iterator

from modo.data.split import Shard, Split

FEWEST_HELD_OUT = 10  # documents; where fewer are to be expected, parts of all are held out


def tail_start(text: bytes, fraction: float) -> int:
    """Where the last `fraction` of `text` begins, moved back to a line start or a character.

    A line start is taken if that makes the tail at most half as long again.
    """
    tail = int(len(text) * fraction)
    cut = len(text) - tail
    if tail == 0:
        return cut
    line = text.rfind(b"\n", max(0, cut - 1 - tail // 2), cut) + 1
    if line > 0:
        return line
    while cut > 0 and text[cut] & 0xC0 == 0x80:  # inside a character of several bytes
        cut -= 1
    return cut


def hash_fraction(key: bytes) -> float:
    """A number in [0, 1) that depends on `key` alone, and looks uniform."""
    digest = hashlib.blake2b(key, digest_size=6).digest()  # 48 bits, exact in a float
    return int.from_bytes(digest, "big") / 2**48


def divide(text: bytes, fraction: float, *, by_hash: bool) -> tuple[bytes, bytes]:
    """(what is trained on, what is held out) of a document: either may be empty."""
    if by_hash:
        return (b"", text) if hash_fraction(text) < fraction else (text, b"")
    cut = tail_start(text, fraction)
    return text[:cut], text[cut:]


def enough_to_hash(documents: Iterable[bytes], fraction: float) -> bool:
    """Whether about FEWEST_HELD_OUT documents will be held out if each is by its hash."""
    wanted = math.ceil(FEWEST_HELD_OUT / fraction)
    return sum(1 for _ in itertools.islice(documents, wanted)) == wanted


def divide_shards(
    shards: tuple[Shard, ...], fraction: float, where: str, by_hash: Callable[[], bool]
) -> tuple[Split, Split]:
    """(train, validation): every document, or every byte, of `shards` in one of the two.

    Args:
      shards: whole documents.
      fraction: share that is held out.
      where: what the shards are, for the error where a split is empty.
      by_hash: whether whole documents are held out; asked for when text is first read. Depends on
        nothing but what `shards` and `fraction` are.
    """

    def shard(whole: Shard, held_out: bool) -> Shard:
        def read() -> Iterator[bytes]:
            hashed = by_hash()
            for document in whole.read():
                text = divide(document, fraction, by_hash=hashed)[held_out]
                if text:
                    yield text

        part = "tail" if held_out else "head"
        return Shard(
            lambda: f"{part} {fraction} of {whole.identify()}",
            int(whole.size * (fraction if held_out else 1 - fraction)),
            read,
        )

    def split(held_out: bool) -> Split:
        verb = "holds out nothing" if held_out else "leaves nothing to train on"
        return Split(
            tuple(shard(whole, held_out) for whole in shards),
            f"data.validation_fraction {fraction} {verb} in {where}: too little text; change it "
            "or name what to hold out",
        )

    return split(False), split(True)


def divide_collection(
    shards: tuple[Shard, ...], fraction: float, where: str
) -> tuple[Split, Split]:
    """`divide_shards` by the hash of each document, or, of few documents, the last part of each."""

    @functools.cache
    def by_hash() -> bool:
        documents = itertools.chain.from_iterable(shard.read() for shard in shards)
        return enough_to_hash(documents, fraction)

    return divide_shards(shards, fraction, where, by_hash)
