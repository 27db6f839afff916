"""The corpus pysrc: Python sources of eleven pinned wheels, licensed BSD, MIT or Apache 2.0.

A directory holds train-0.jsonl.gz and so on, and likewise validation and test: a file of source
a line, with text and name, those of a directory one after another. About 2 % of the
directories are held out for each of the two, by a hash of their names. pysrc.json is written last.
"""

import gzip
import hashlib
import itertools
import json
import os
import pathlib
import posixpath
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from typing import Literal

from modo.data.files import file_identity, open_file, text_size
from modo.data.held_out import hash_fraction
from modo.data.split import SHARD_BYTES, Shard, Split, grouped
from modo.data.token_file import default_cache_dir
from modo.errors import UserError

WHEELS = (
    "astropy==8.0.2",
    "django==5.2.19",
    "jax==0.10.2",
    "networkx==3.6.1",
    "nltk==3.10.4",
    "pandas==3.1.1",
    "scikit-learn==1.9.1",
    "scipy==1.17.1",
    "sqlalchemy==2.1.9",
    "statsmodels==0.15.0",
    "sympy==1.14.0",
)
SHA256 = "14456cda565e694d9f68a4599b06a03df3bdb0089b2eb211a6428da86899c884"
FEWEST_BYTES = 512  # of a file
HELD_OUT = 0.02  # of the directories, for validation and again for test
INFO_FILE = "pysrc.json"
# Written when a wheel is built, not by people; some of it varies with the platform.
_GENERATED = ("__config__.py", "_version.py", "lextab.py", "parsetab.py")
# The same wheels for every machine and version of Python that builds the corpus.
_PYTHON = "3.12"
_PLATFORMS = ("manylinux_2_28_x86_64", "manylinux_2_27_x86_64", "manylinux2014_x86_64")
_AGAIN = "make it again: python -m modo.prepare pysrc --overwrite"

Source = tuple[str, bytes]  # name, text
SplitName = Literal["train", "validation", "test"]


def pysrc_dir(data_dir: str | None) -> pathlib.Path:
    """Where the corpus is kept."""
    root = os.path.expanduser(data_dir) if data_dir else default_cache_dir()
    return pathlib.Path(root) / f"pysrc-{SHA256[:8]}"


def open_pysrc(
    data_dir: str | None, split: SplitName, documents: Literal["files", "directories"]
) -> Split:
    """A split of the corpus.

    Raises:
      UserError: it was not built there. While reading: a file of it is damaged.
    """
    directory = pysrc_dir(data_dir)
    if not (directory / INFO_FILE).is_file():
        where = f" --data-dir {data_dir}" if data_dir else ""
        raise UserError(
            f"pysrc is not in {directory.parent}; run: python -m modo.prepare pysrc{where}"
        )

    try:
        about = json.loads((directory / INFO_FILE).read_text())
        paths = [str(directory / name) for name in about["splits"][split]["parts"]]
    except (OSError, ValueError, KeyError, TypeError):
        raise UserError(f"{directory / INFO_FILE} is damaged; {_AGAIN}") from None

    def shard(path: str) -> Shard:
        def read() -> Iterator[bytes]:
            sources = read_sources(path)
            if documents == "files":
                return (text for _, text in sources)
            return (b"".join(texts) for _, texts in by_directory(sources))

        return Shard(lambda: f"pysrc {documents} {file_identity(path)}", text_size(path), read)

    return Split(tuple(map(shard, paths)), f"{directory} holds no {split}; {_AGAIN}")


def read_sources(path: str) -> Iterator[Source]:
    """(name, text) of every line of a file of the corpus.

    Raises:
      UserError: it is damaged.
    """
    with open_file(path) as file:
        for line in file:
            try:
                values = json.loads(line)
                source = values["name"], values["text"].encode()
            except (ValueError, KeyError, TypeError):
                raise UserError(f"{path} is damaged; {_AGAIN}") from None
            yield source


def by_directory(sources: Iterator[Source]) -> Iterator[tuple[str, Iterator[bytes]]]:
    """(directory, texts) of sources whose directories follow each other."""
    for directory, group in itertools.groupby(sources, lambda s: posixpath.dirname(s[0])):
        yield directory, (text for _, text in group)


def split_of(directory: str) -> SplitName:
    """The split of a directory's files."""
    place = hash_fraction(directory.encode())
    if place < HELD_OUT:
        return "validation"
    return "test" if place < 2 * HELD_OUT else "train"


def download(directory: str) -> list[str]:
    """Fetches the pinned wheels with pip; returns their paths.

    Raises:
      UserError: pip failed.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
    command += ["--disable-pip-version-check", "--only-binary=:all:", "--dest", directory]
    command += ["--implementation", "cp", "--python-version", _PYTHON]
    command += [f"--abi={abi}" for abi in ("cp" + _PYTHON.replace(".", ""), "abi3", "none")]
    command += [f"--platform={platform}" for platform in _PLATFORMS]
    result = subprocess.run([*command, *WHEELS], capture_output=True, text=True)
    if result.returncode:
        said = [line for line in result.stderr.splitlines() if line.startswith("ERROR")]
        raise UserError(f"pip download failed: {(said or [result.stderr or 'no reason'])[0]}")
    return sorted(os.path.join(directory, name) for name in os.listdir(directory))


def extract(wheels: list[str]) -> list[Source]:
    """The Python sources in wheels, in order of directory and name, each text once.

    Left out are short files, generated ones and those that are not UTF-8.

    Raises:
      UserError: a wheel is damaged.
    """
    sources = {}
    for wheel in wheels:
        try:
            with zipfile.ZipFile(wheel) as archive:
                for info in archive.infolist():
                    if _is_wanted(info.filename) and info.file_size >= FEWEST_BYTES:
                        sources[info.filename] = archive.read(info)
        except (OSError, zipfile.BadZipFile) as error:
            raise UserError(f"cannot read {wheel}: {error}") from None
    seen, kept = set(), []
    for name in sorted(sources, key=posixpath.split):
        text = sources[name]
        if text not in seen and _is_utf8(text):
            seen.add(text)
            kept.append((name, text))
    return kept


def _is_wanted(name: str) -> bool:
    return name.endswith(".py") and not name.endswith(_GENERATED) and "/_antlr/" not in name


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def digest(sources: list[Source]) -> str:
    """SHA-256 of names and texts, in hexadecimal."""
    hasher = hashlib.sha256()
    for name, text in sources:
        hasher.update(f"{name}\0{len(text)}\0".encode())
        hasher.update(text)
    return hasher.hexdigest()


def write_corpus(sources: list[Source], directory: pathlib.Path) -> dict:
    """Writes the corpus into an empty directory; returns documents and bytes of each split."""
    splits = {"train": [], "validation": [], "test": []}
    for name, group in itertools.groupby(sources, lambda s: posixpath.dirname(s[0])):
        splits[split_of(name)].append(list(group))
    about = {"sha256": digest(sources), "splits": {}}
    for split, directories in splits.items():
        sizes = [sum(len(text) for _, text in group) for group in directories]
        files = list(grouped(zip(directories, sizes, strict=True), SHARD_BYTES))
        parts = [f"{split}-{number}.jsonl.gz" for number in range(len(files))]
        for name, groups in zip(parts, files, strict=True):
            _write_sources(itertools.chain(*groups), directory / name)
        about["splits"][split] = {
            "parts": parts,
            "files": sum(map(len, directories)),
            "directories": len(directories),
            "bytes": sum(sizes),
        }
    (directory / INFO_FILE).write_text(json.dumps(about, indent=2) + "\n")
    return about


def _write_sources(sources: Iterator[Source], path: pathlib.Path) -> None:
    with open(path, "xb") as raw, gzip.GzipFile("", "wb", fileobj=raw, mtime=0) as file:
        for name, text in sources:
            line = json.dumps({"name": name, "text": text.decode()}, ensure_ascii=False)
            file.write(line.encode() + b"\n")
        file.flush()
    with open(path, "rb") as raw:
        os.fsync(raw.fileno())
