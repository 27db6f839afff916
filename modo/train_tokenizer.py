"""Trains a byte-level BPE on the training split of one's own data, each document once.

python -m modo.train_tokenizer --config tiny --vocab-size 4096 --output tokenizer.json \
    [--data.source text --data.path 'books/*.txt' ...]
"""

import itertools
import os
import pathlib
import sys
from collections.abc import Iterable, Iterator, Sequence

from tqdm import tqdm

from modo.data.source import open_corpus
from modo.data.split import Split
from modo.data.tokenizer_file import (
    HuggingFaceTokenizer,
    as_bytes,
    line_pieces,
    missing_package,
    write_atomically,
)
from modo.errors import UserError
from modo.train.cli import LineParser, load_config, not_empty, one_line_errors, override

BOS = "<|begin_of_text|>"
LEAST = 257  # a document-start token and every byte
MOST = 1 << 24


def train_bpe(
    documents: Iterable[bytes], vocab_size: int, *, progress: bool = False, total: int | None = None
) -> str:
    """A tokenizer.json: byte-level BPE with GPT-2's pre-tokenizer, and its document-start token.

    The same documents give the same file. Token 0 is the document start, 1 to 256 are the bytes.

    Args:
      documents: UTF-8 texts, iterated over once; bytes that are not UTF-8 are read as U+FFFD.
      vocab_size: tokens, at least 257; there are fewer where the text has not that many pairs.
      progress: show bars on stderr.
      total: bytes of the documents, about, to tell how far it is.

    Raises:
      UserError: the package `tokenizers` is missing, or vocab_size is too small.
    """
    try:
        from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    except ImportError:
        raise UserError(missing_package("tokenizers")) from None
    if not LEAST <= vocab_size <= MOST:
        raise UserError(f"--vocab-size must be in [{LEAST}, {MOST}], got {vocab_size}")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[BOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=progress,
    )
    tokenizer.train_from_iterator(_texts(documents, progress, total), trainer)
    return tokenizer.to_str()


def _texts(documents: Iterable[bytes], progress: bool, total: int | None) -> Iterator[str]:
    """Documents in pieces, which count alike and need less memory."""
    with tqdm(total=total, unit="B", unit_scale=True, desc="reading", disable=not progress) as bar:
        for document in documents:
            for text in line_pieces(document.decode("utf-8", errors="replace")):
                yield text
                bar.update(len(as_bytes(text)))


def main(arguments: Sequence[str]) -> None:
    parser = LineParser(
        prog="python -m modo.train_tokenizer",
        description=__doc__.splitlines()[0],
        epilog="Further arguments, such as --data.path, are fields of the config.",
        allow_abbrev=False,
    )
    parser.add_argument("--config", default="tiny", help="whose data; default: tiny")
    parser.add_argument("--vocab-size", type=int, required=True, help=f"tokens, {LEAST} or more")
    parser.add_argument("--output", type=not_empty, required=True, help="a *.json file")
    parser.add_argument("--force", action="store_true", help="replace the file if there is one")
    options, rest = parser.parse_known_args(arguments)
    config = override(load_config(options.config), rest, parser.prog)
    output = pathlib.Path(options.output).expanduser()
    _check_output(output, options.force)
    corpora = [open_corpus(corpus) for corpus in config.data.corpora]
    next(_documents([corpus.validation for corpus in corpora]))  # raises where nothing is held out
    content = train_bpe(
        _documents([corpus.train for corpus in corpora]),
        options.vocab_size,
        progress=sys.stderr.isatty(),
        total=sum(shard.size for corpus in corpora for shard in corpus.train.shards),
    ).encode()
    try:
        write_atomically(output, content)
    except OSError as error:
        raise UserError(f"--output {output}: {error.strerror}") from None
    tokenizer = HuggingFaceTokenizer(content)
    few = " (the text has no more pairs)" if tokenizer.vocab_size < options.vocab_size else ""
    print(f"{output}: {tokenizer.vocab_size} tokens{few}, document start {BOS}")
    held_out = _documents([corpus.validation for corpus in corpora])
    sizes = [(len(text), len(tokenizer.encode(text))) for text in held_out]
    size, tokens = map(sum, zip(*sizes, strict=True))
    print(f"{size / tokens:.3f} bytes a token on the {size:,} held-out bytes")
    print(f"use it: --data.tokenizer {output} --model.vocab_size {tokenizer.vocab_size}")


def _documents(splits: Sequence[Split]) -> Iterator[bytes]:
    return itertools.chain.from_iterable(split.documents() for split in splits)


def _check_output(path: pathlib.Path, force: bool) -> None:
    """Raises UserError where the file cannot be written, before the time is spent on it."""
    if path.suffix != ".json":
        raise UserError(f"--output {path} must end with .json")
    if path.is_dir():
        raise UserError(f"--output {path} is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--output {path}: its directory does not exist")
    if not os.access(path.absolute().parent, os.W_OK):
        raise UserError(f"--output {path} cannot be written to")
    if path.exists() and not force:
        raise UserError(f"--output {path} exists; give --force to replace it")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
