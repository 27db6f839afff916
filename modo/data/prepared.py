"""Prepared tensorflow-datasets sets, read without TensorFlow and without a network."""

import itertools
import os
import pathlib
import re
from collections.abc import Iterator

import numpy as np

from modo.config import CorpusConfig
from modo.data.files import file_identity
from modo.data.held_out import divide_collection
from modo.data.split import SHARD_BYTES, Shard, Split
from modo.errors import UserError

INFO_FILE = "dataset_info.json"  # tfds writes it last, and then moves the directory to its name
_VERSION = re.compile(r"\d+\.\d+\.\d+")


def default_data_dir() -> str:
    """$TFDS_DATA_DIR, or ~/tensorflow_datasets, as of tfds."""
    return os.path.expanduser(os.environ.get("TFDS_DATA_DIR") or "~/tensorflow_datasets")


def find_prepared(name: str | None, data_dir: str | None) -> pathlib.Path:
    """The directory of a prepared set's files.

    Args:
      name: NAME, NAME/CONFIG, or either with :VERSION or /VERSION; None: `data_dir` is that
        directory.
      data_dir: where sets are prepared; None: `default_data_dir()`.

    Raises:
      UserError: it is not there; says what to run, or what there is.
    """
    root = pathlib.Path(os.path.expanduser(data_dir) if data_dir else default_data_dir())
    if name is None:
        if not (root / INFO_FILE).is_file():
            raise UserError(
                f"data.data_dir {root} holds no prepared set ({INFO_FILE} is not there); name the "
                "set by data.name, or the directory of its files, NAME/VERSION"
            )
        return root
    stem, _, version = name.partition(":")
    *parts, last = stem.split("/")
    if not version and parts and _VERSION.fullmatch(last):
        stem, version = "/".join(parts), last
    directory = root / stem
    versions = _versions(directory)
    if not versions and "/" not in stem:
        configs = [path for path in _directories(directory) if _versions(path)]
        if len(configs) > 1:
            there = ", ".join(f"{stem}/{path.name}" for path in configs)
            raise UserError(f"data.name {name} in {root} has several configs: {there}; name one")
        directory = configs[0] if configs else directory
        versions = _versions(directory)
    if version in versions or (versions and not version):
        return directory / (version or versions[-1])
    where = f" --data-dir {data_dir}" if data_dir else ""
    there = versions or [path.name for path in _directories(root) if _is_set(path)]
    raise UserError(
        f"data.name {name} is not prepared in {root}"
        + (f" (there is {', '.join(there[:9])})" if there else "")
        + f"; run: python -m modo.prepare tfds {name}{where}, or, for text of your own, "
        + f"python -m modo.prepare text --name {stem.split('/')[0]} --path PATH{where}"
    )


def _directories(path: pathlib.Path) -> list[pathlib.Path]:
    try:
        return sorted(entry for entry in path.iterdir() if entry.is_dir())
    except OSError:
        return []


def _versions(path: pathlib.Path) -> list[str]:
    """Versions prepared in a directory, the newest last."""
    found = [
        entry.name
        for entry in _directories(path)
        if _VERSION.fullmatch(entry.name) and (entry / INFO_FILE).is_file()
    ]
    return sorted(found, key=lambda name: [int(number) for number in name.split(".")])


def _is_set(path: pathlib.Path) -> bool:
    return bool(_versions(path)) or any(map(_versions, _directories(path)))


def open_prepared(config: CorpusConfig) -> tuple[Split, Split]:
    """(train, validation) of the set that the config names.

    Raises:
      UserError: it is not prepared or not whole, or has no such split or text field. While
        reading: a file is damaged, or a text is not UTF-8.
    """
    prepared = PreparedSet(find_prepared(config.name, config.data_dir), config.text_field)
    train, where = config.train_split, prepared.place(config.train_split)
    validation = config.validation_split or prepared.default_validation(train)
    if validation is None:
        shards = prepared.shards(train)
        return divide_collection(shards, config.validation_fraction, where)
    if prepared.overlap(train, validation):
        raise UserError(
            f"data.train_split {train} and data.validation_split {validation} share examples"
        )
    return (
        Split(prepared.shards(train), f"{where} holds no text"),
        Split(prepared.shards(validation), f"{prepared.place(validation)} holds no text"),
    )


class PreparedSet:
    """A set in array_record or tfrecord files.

    Args:
      directory: of the files.
      field: the feature that is the text.

    Raises:
      UserError: a file is missing or damaged, the format is another, or there is no such text.
    """

    def __init__(self, directory: pathlib.Path, field: str):
        # Half a second, which other sources need not wait.
        import tensorflow_datasets as tfds

        self._directory, self._field = directory, field
        try:
            self._builder = tfds.builder_from_directory(str(directory))
            self._format = self._builder.info.file_format.value
        except Exception as error:  # of many kinds
            raise UserError(f"{directory} is not a whole tfds set: {_line(error)}") from None
        if self._format not in ("array_record", "tfrecord"):
            raise UserError(
                f"{directory} is in {self._format} files; array_record and tfrecord can be read"
            )
        features = self._builder.info.features
        texts = [
            name
            for name, feature in features.items()
            if isinstance(feature, tfds.features.Tensor)
            and np.dtype(feature.np_dtype) == np.dtype(object)
            and feature.shape == ()
        ]
        if field not in texts:
            problem = f"is not text but {features[field]}" if field in features else "is not there"
            raise UserError(
                f"data.text_field {field!r} {problem} in {directory}; texts are "
                f"{', '.join(map(repr, texts)) or 'none'}"
            )
        # Other features, which may be large, are not decoded.
        self._features = tfds.features.FeaturesDict({field: features[field]})

    def place(self, split: str) -> str:
        """What messages call a split."""
        return f"split {split} of {self._directory}"

    def _files(self, split: str) -> list:
        """(filename, skip, take, examples_in_shard) of every file of a split."""
        try:
            files = self._builder.info.splits[split].file_instructions
        except (ValueError, KeyError, AssertionError) as error:
            there = ", ".join(self._builder.info.splits) or "none"
            raise UserError(
                f"{self._directory} has no split {split!r} ({_line(error)}); there are {there}"
            ) from None
        if not files:
            raise UserError(f"{self.place(split)} holds no examples")
        for file in files:
            if not os.path.isfile(file.filename) or not os.path.getsize(file.filename):
                raise UserError(
                    f"{self._directory} is not whole: {os.path.basename(file.filename)} is missing "
                    "or empty; prepare the set again"
                )
        return files

    def default_validation(self, train: str) -> str | None:
        """ "validation", else "test", else None."""
        for name in ("validation", "test"):
            if name in self._builder.info.splits and not self.overlap(train, name):
                return name
        return None

    def overlap(self, one: str, other: str) -> bool:
        """Whether two splits share an example."""
        return any(
            a.filename == b.filename and max(a.skip, b.skip) < min(a.skip + a.take, b.skip + b.take)
            for a, b in itertools.product(self._files(one), self._files(other))
        )

    def shards(self, split: str) -> tuple[Shard, ...]:
        """All documents with any text: ranges of an array_record split, or a tfrecord's files."""
        files = self._files(split)
        ends = list(itertools.accumulate(file.take for file in files))
        sizes = [
            os.path.getsize(file.filename) * file.take // file.examples_in_shard for file in files
        ]
        if self._format == "tfrecord":
            cuts = [0, *ends]
        else:
            many = max(1, ends[-1] * SHARD_BYTES // max(sum(sizes), 1))
            cuts = [*range(0, ends[-1], many), ends[-1]]

        def shard(begin: int, end: int) -> Shard:
            within = [
                file
                for file, last in zip(files, ends, strict=True)
                if begin < last and last - file.take < end
            ]
            key = [self._field, split, begin, end]
            return Shard(
                lambda: f"tfds {[file_identity(file.filename) for file in within]} {key}",
                sum(sizes) * (end - begin) // ends[-1],
                lambda: self._texts(split, begin, self._records(split, begin, end, within)),
            )

        return tuple(shard(begin, end) for begin, end in itertools.pairwise(cuts))

    def _records(self, split: str, begin: int, end: int, files: list) -> Iterator[bytes]:
        """Serialised examples [begin, end) of a split."""
        if self._format == "array_record":
            import tensorflow_datasets as tfds

            raw = tfds.decode.DeserializeMethod.RAW_BYTES
            source = self._builder.as_data_source(split=split, deserialize_method=raw)
            yield from map(source.__getitem__, range(begin, end))
        else:
            import grain

            (file,) = files
            records = iter(grain.experimental.TFRecordIterDataset(file.filename))
            found = 0
            for record in itertools.islice(records, file.skip, file.skip + file.take):
                found += 1
                yield record
            if found < file.take:
                name = os.path.basename(file.filename)
                raise ValueError(f"{name} ends {file.take - found} examples early")

    def _texts(self, split: str, begin: int, records: Iterator[bytes]) -> Iterator[bytes]:
        for number in itertools.count(begin):
            where = f"example {number} in {self.place(split)}"
            try:
                record = next(records, None)
                if record is None:
                    return
                text = self._features.deserialize_example_np(record)[self._field]
            except Exception as error:  # of the readers, in many kinds
                raise UserError(f"{where} cannot be read: {_line(error)}") from None
            try:
                text.decode("utf-8")
            except UnicodeDecodeError as error:
                raise UserError(
                    f"{where} is not UTF-8: byte 0x{text[error.start]:02x} at offset {error.start}"
                ) from None
            if text.strip():
                yield text


def _line(error: Exception) -> str:
    return next(iter(str(error).splitlines()), "") or type(error).__name__
