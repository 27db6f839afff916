"""Documents: the built-in corpus and local text files, as UTF-8 bytes."""

import dataclasses
import glob
import importlib.resources
import os
import pathlib
import tarfile
from collections.abc import Iterable, Iterator
from typing import Literal

from modo.config import DataConfig
from modo.errors import UserError

HELD_OUT_PLAY = "the-tempest"


@dataclasses.dataclass(frozen=True)
class Documents:
    """The two splits of a corpus; each can be iterated over any number of times."""

    train: Iterable[bytes]
    validation: Iterable[bytes]


def open_documents(config: DataConfig) -> Documents:
    """The documents that `config.source`, `path` and the validation fields name.

    Local files are read while their split is iterated over, one at a time.

    Raises:
      UserError: a path names no file, or all training files are held out. While iterating: a
        file is unreadable, empty, or not UTF-8.
    """
    if config.source == "shakespeare":
        plays = read_plays()
        held_out = plays.pop(HELD_OUT_PLAY)
        return Documents(train=list(plays.values()), validation=[held_out])
    paths = find_files(config.path, "data.path")
    if config.validation_path is None:
        fraction = config.validation_fraction
        return Documents(TextFiles(paths, "head", fraction), TextFiles(paths, "tail", fraction))
    held_out = find_files(config.validation_path, "data.validation_path")
    # `path` may well be the directory that holds the validation files.
    real = {os.path.realpath(path) for path in held_out}
    paths = tuple(path for path in paths if os.path.realpath(path) not in real)
    if not paths:
        raise UserError(
            f"data.validation_path {config.validation_path} holds out every file of data.path "
            f"{config.path}"
        )
    return Documents(TextFiles(paths, "whole"), TextFiles(held_out, "whole"))


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


@dataclasses.dataclass(frozen=True)
class TextFiles:
    """Iterates over files as documents, whole or without (or only) the last part of each.

    Attributes:
      paths: the files.
      part: "whole", "head" (all but the last `fraction`) or "tail" (that rest); a file too short
        to be cut is all head.
      fraction: share of a document that is its tail.

    Raises:
      UserError: those of `read_text`, or the cut leaves no text in any file.
    """

    paths: tuple[str, ...]
    part: Literal["whole", "head", "tail"]
    fraction: float = 0.0

    def __iter__(self) -> Iterator[bytes]:
        found = False
        for path in self.paths:
            text = read_text(path)
            if self.part != "whole":
                cut = tail_start(text, self.fraction)
                text = text[:cut] if self.part == "head" else text[cut:]
            if text:
                found = True
                yield text
        if not found:
            verb = "leaves nothing to train on" if self.part == "head" else "holds out nothing"
            where = self.paths[0] + (f" and {len(self.paths) - 1} more" if self.paths[1:] else "")
            raise UserError(
                f"data.validation_fraction {self.fraction} {verb} in {where}: too little text; "
                "change it or set data.validation_path"
            )


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
