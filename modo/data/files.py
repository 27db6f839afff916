"""Local files by path, directory or glob, gzip or not."""

import contextlib
import glob
import gzip
import os
import pathlib
import zlib
from collections.abc import Iterator
from typing import BinaryIO

from modo.errors import UserError


def find_files(path: str, field: str, suffix: str = ".txt") -> tuple[str, ...]:
    """The files that `path` names: itself, those of a directory, or the matches of a glob.

    Args:
      path: a file, directory or glob; "~" is the home directory and "**" any depth.
      field: what error messages call it.
      suffix: of the files taken from a directory, recursively, with .gz after it or without.

    Returns:
      Sorted paths, at least one.

    Raises:
      UserError: there is no such file, no match, or none with the suffix in the directory.
    """
    expanded = os.path.expanduser(path)
    if os.path.isfile(expanded):
        return (expanded,)
    if os.path.isdir(expanded):
        matches = _files_within(expanded, (suffix, suffix + ".gz"))
        problem = f"{field} {path} is a directory without *{suffix} or *{suffix}.gz files"
    elif glob.has_magic(expanded):
        matches = glob.iglob(expanded, recursive=True)
        problem = f"{field} {path} matches no files"
    elif os.path.lexists(expanded):
        raise UserError(f"{field} {path} is not a file or directory that can be read")
    else:
        raise UserError(f"{field} {path} does not exist")
    paths = tuple(sorted({match for match in matches if os.path.isfile(match)}))
    if not paths:
        raise UserError(problem)
    return paths


def _files_within(directory: str, suffixes: tuple[str, ...]) -> Iterator[str]:
    """Files of a directory and those below, links to directories followed, hidden ones left out."""
    seen = set()  # links may lead back up
    for root, directories, names in os.walk(directory, followlinks=True):
        real = os.path.realpath(root)
        if real in seen:
            directories.clear()
            continue
        seen.add(real)
        directories[:] = sorted(name for name in directories if not name.startswith("."))
        for name in names:
            if name.endswith(suffixes) and not name.startswith("."):
                yield os.path.join(root, name)


def absolute_path(path: str) -> str:
    """What `find_files` takes, made to name the same files from any directory."""
    expanded = os.path.expanduser(path)
    here = os.getcwd()
    if not os.path.exists(expanded):  # then it is a glob, and where we are is not part of it
        here = glob.escape(here)
    return str(pathlib.PurePath(here, expanded))


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


@contextlib.contextmanager
def open_file(path: str) -> Iterator[BinaryIO]:
    """The file's bytes, decompressed where its name ends in .gz.

    Raises:
      UserError: it cannot be read, or is not whole; also while it is read in the `with` block.
    """
    try:
        with gzip.open(path) if path.endswith(".gz") else open(path, "rb") as file:
            yield file
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise UserError(f"cannot read {path}: not a whole gzip file ({error})") from None
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None


def text_size(path: str) -> int:
    """Bytes of text in a file, about; of a .gz file what its last bytes say.

    Raises:
      UserError: the file is gone.
    """
    try:
        size = os.path.getsize(path)
        if not path.endswith(".gz") or size < 4:
            return size
        with open(path, "rb") as file:
            file.seek(-4, os.SEEK_END)
            return max(size, int.from_bytes(file.read(4), "little"))
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror}") from None
