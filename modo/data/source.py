"""Corpora by their config: the built-in one, local files, tensorflow-datasets sets, pysrc."""

import dataclasses
import importlib.resources
import os
import tarfile
from collections.abc import Iterator

from modo.config import CorpusConfig
from modo.data.files import find_files
from modo.data.held_out import divide_collection, divide_shards
from modo.data.jsonl import jsonl_shards
from modo.data.prepared import open_prepared
from modo.data.pysrc import open_pysrc
from modo.data.split import Shard, Split
from modo.data.text import text_shards
from modo.errors import UserError

HELD_OUT_PLAY = "the-tempest"


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The two splits of a corpus."""

    train: Split
    validation: Split


def open_corpus(config: CorpusConfig) -> Corpus:
    """The documents that the config names; they are read while a split is iterated over.

    Raises:
      UserError: a path names no file, all training files are held out, or a set is not there.
        While reading: text that is missing, damaged or not UTF-8, with its place.
    """
    if config.source == "shakespeare":
        return Corpus(plays_split(held_out=False), plays_split(held_out=True))
    if config.source == "tfds":
        return Corpus(*open_prepared(config))
    if config.source == "pysrc":
        held_out = config.validation_split or "validation"
        return Corpus(
            *(open_pysrc(config.data_dir, split, config.documents) for split in ("train", held_out))
        )
    return _open_files(config)


def _open_files(config: CorpusConfig) -> Corpus:
    def shards(paths: tuple[str, ...]) -> tuple[Shard, ...]:
        if config.source == "jsonl":
            return jsonl_shards(paths, config.text_field)
        return text_shards(paths)

    suffix = ".jsonl" if config.source == "jsonl" else ".txt"
    paths = find_files(config.path, "data.path", suffix)
    if config.validation_path is None:
        where = paths[0] + (f" and {len(paths) - 1} more" if paths[1:] else "")
        if config.source == "jsonl":
            return Corpus(*divide_collection(shards(paths), config.validation_fraction, where))
        return Corpus(
            *divide_shards(shards(paths), config.validation_fraction, where, lambda: False)
        )
    held_out = find_files(config.validation_path, "data.validation_path", suffix)
    # `path` may well be the directory that holds the validation files.
    real = {os.path.realpath(path) for path in held_out}
    paths = tuple(path for path in paths if os.path.realpath(path) not in real)
    if not paths:
        raise UserError(
            f"data.validation_path {config.validation_path} holds out every file of data.path "
            f"{config.path}"
        )
    return Corpus(
        Split(shards(paths), f"data.path {config.path} holds no text"),
        Split(shards(held_out), f"data.validation_path {config.validation_path} holds no text"),
    )


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
