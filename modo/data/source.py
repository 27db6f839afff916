"""Documents: the built-in corpus and local text files, as UTF-8 bytes."""

import dataclasses
import glob
import importlib.resources
import os
import pathlib
import tarfile
from collections.abc import Iterator
from typing import Literal

from modo.config import DataConfig
from modo.data.split import Shard, Split, grouped
from modo.errors import UserError

HELD_OUT_PLAY = "the-tempest"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The two splits of a corpus."""

    train: Split
    validation: Split


def open_corpus(config: DataConfig) -> Corpus:
    """The documents that `config.source`, `path` and the validation fields name.

    Local files are read while their split is iterated over, one at a time.

    Raises:
      UserError: a path names no file, or all training files are held out. While reading: a
        file is unreadable, empty, or not UTF-8.
    """
    if config.source == "shakespeare":
        return Corpus(plays_split(held_out=False), plays_split(held_out=True))
    paths = find_files(config.path, "data.path")
    if config.validation_path is None:
        fraction = config.validation_fraction
        return Corpus(text_split(paths, "head", fraction), text_split(paths, "tail", fraction))
    held_out = find_files(config.validation_path, "data.validation_path")
    # `path` may well be the directory that holds the validation files.
    real = {os.path.realpath(path) for path in held_out}
    paths = tuple(path for path in paths if os.path.realpath(path) not in real)
    if not paths:
        raise UserError(
            f"data.validation_path {config.validation_path} holds out every file of data.path "
            f"{config.path}"
        )
    return Corpus(text_split(paths), text_split(held_out))


def plays_split(held_out: bool) -> Split:
    """The built-in corpus, all but HELD_OUT_PLAY or that alone."""

    def read() -> Iterator[bytes]:
        return (text for name, text in read_plays().items() if (name == HELD_OUT_PLAY) == held_out)

    size = 96_240 if held_out else 4_873_746
    return Split((Shard(lambda: f"shakespeare 1, {held_out}", size, read),), "no play")


def read_plays() -> dict[str, bytes]:
    """The 38 plays of the built-in corpus by name, in alphabetical order."""
    archive = importlib.resources.files("modo.data") / "shakespeare.tar.xz"
    plays = {}
    with archive.open("rb") as file, tarfile.open(fileobj=file, mode="r:xz") as tar:
        for member in tar:
            if member.isfile():
                name = os.path.basename(member.name).removesuffix(".txt")
                plays[name] = tar.extractfile(member).read()
    return dict(sorted(plays.items()))


def find_files(path: str, field: str) -> tuple[str, ...]:
    """The files that `path` names: itself, a directory's *.txt recursively, or a glob's matches.

    Args:
      path: a file, directory or glob; "~" is the home directory and "**" any depth.
      field: what error messages call it.

    Returns:
      Sorted paths, at least one.

    Raises:
      UserError: there is no such file, no match, or no *.txt in the directory.
    """
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return (expanded,)
    if os.path.isdir(expanded):
        pattern = os.path.join(glob.escape(expanded), "**", "*.txt")
        problem = f"{field} {path} is a directory without *.txt files"
    elif glob.has_magic(expanded):
        pattern = expanded
        problem = f"{field} {path} matches no files"
    elif os.path.lexists(expanded):
        raise UserError(f"{field} {path} is not a file or directory that can be read")
    else:
        raise UserError(f"{field} {path} does not exist")
    paths = tuple(sorted(p for p in glob.glob(pattern, recursive=True) if os.path.isfile(p)))
    if not paths:
        raise UserError(problem)
    return paths


def absolute_path(path: str) -> str:
    """What `find_files` takes, made to name the same files from any directory."""
    expanded = os.path.expanduser(path)
    here = os.getcwd()
    if not os.path.exists(expanded):  # then it is a glob, and where we are is not part of it
        here = glob.escape(here)
    return str(pathlib.PurePath(here, expanded))


def text_split(
    paths: tuple[str, ...], part: Literal["whole", "head", "tail"] = "whole", fraction: float = 0.0
) -> Split:
    """Files as documents, whole or without (or only) the last part of each.

    Args:
      paths: the files.
      part: "whole", "head" (all but the last `fraction`) or "tail" (that rest); a file too short
        to be cut is all head.
      fraction: share of a document that is its tail.
    """

    def shard(paths: list[str]) -> Shard:
        return Shard(
            lambda: f"text {part} {fraction} {[file_identity(path) for path in paths]}",
            sum(os.path.getsize(path) for path in paths),
            lambda: read_parts(paths),
        )

    def read_parts(paths: list[str]) -> Iterator[bytes]:
        for path in paths:
            text = read_text(path)
            if part != "whole":
                cut = tail_start(text, fraction)
                text = text[:cut] if part == "head" else text[cut:]
            if text:
                yield text

    verb = "leaves nothing to train on" if part == "head" else "holds out nothing"
    where = paths[0] + (f" and {len(paths) - 1} more" if paths[1:] else "")
    return Split(
        tuple(shard(run) for run in grouped((p, os.path.getsize(p)) for p in paths)),
        f"data.validation_fraction {fraction} {verb} in {where}: too little text; change it or "
        "set data.validation_path",
    )


def file_identity(path: str) -> tuple:
    """What changes when a file does: any write sets the last of it.

    Raises:
      UserError: the file is gone.
    """
    try:
        stat = os.stat(path)
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
    return os.path.realpath(path), stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns


def read_text(path: str) -> bytes:
    """The bytes of a UTF-8 file.

    Raises:
      UserError: it cannot be read, is not UTF-8, or holds nothing but white space.
    """
    try:
        with open(path, "rb") as file:
            text = file.read()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
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
