"""Local text as a tensorflow-datasets set in array_record files, without TensorFlow."""

import os
from collections.abc import Iterator

import tensorflow_datasets as tfds

from modo.data.held_out import divide, enough_to_hash
from modo.data.jsonl import read_lines
from modo.data.text import read_text
from modo.errors import UserError


class LocalText(tfds.core.GeneratorBasedBuilder, skip_registration=True):
    """Documents of text files or JSON lines, in the splits train and validation.

    What is held out is what `modo.data` holds out of the same files: the last part of each text
    file; whole JSON lines by the hash of their text, or, where they are few, the last part of each.
    Features: text, and name: the file's path, of a line with its byte offset.

    Args:
      name: of the set.
      paths: the files; those whose names end in .gz are decompressed.
      text_field: of each line's object, the text; None: the files are text.
      validation_fraction: share that is held out.
      options: of tfds: data_dir, file_format.
    """

    VERSION = tfds.core.Version("1.0.0")
    RELEASE_NOTES = {"1.0.0": "Made by modo.prepare."}

    def __init__(
        self,
        *,
        name: str,
        paths: tuple[str, ...],
        text_field: str | None,
        validation_fraction: float,
        **options,
    ):
        self.name = name
        self._paths, self._text_field = paths, text_field
        self._fraction = validation_fraction
        super().__init__(**options)

    def _info(self) -> tfds.core.DatasetInfo:
        text = tfds.features.Text()
        features = tfds.features.FeaturesDict({"text": text, "name": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        by_hash = self._text_field is not None and enough_to_hash(
            (text for _, text in self._documents()), self._fraction
        )
        return {
            "train": self._generate_examples(by_hash, held_out=False),
            "validation": self._generate_examples(by_hash, held_out=True),
        }

    def _generate_examples(self, by_hash: bool, held_out: bool):
        empty = True
        # Numbers as keys: the order, by a hash of the key, is the same wherever the files are.
        for number, (name, document) in enumerate(self._documents()):
            text = divide(document, self._fraction, by_hash=by_hash)[held_out]
            if text:
                empty = False
                yield number, {"text": text, "name": name}
        if empty:
            verb = "holds out nothing" if held_out else "leaves nothing to train on"
            raise UserError(f"--validation-fraction {self._fraction} {verb}: too little text")

    def _documents(self) -> Iterator[tuple[bytes, bytes]]:
        for path in self._paths:
            if self._text_field is None:
                yield os.fsencode(path), read_text(path)
            else:
                for offset, text in read_lines((path, 0, None), self._text_field):
                    yield os.fsencode(f"{path}:{offset}"), text
