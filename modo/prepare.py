"""Makes data sets for training: public tfds sets, local text as one, and the corpus pysrc.

python -m modo.prepare text --name books --path 'books/*.txt'
python -m modo.prepare tfds tiny_shakespeare
python -m modo.prepare pysrc
"""

import argparse
import contextlib
import difflib
import importlib.util
import io
import pathlib
import re
import sys
import tempfile
from collections.abc import Iterator, Sequence

from modo.data import pysrc
from modo.data.files import find_files, text_size
from modo.data.prepared import default_data_dir, find_prepared
from modo.errors import UserError
from modo.train.cli import LineParser, not_empty, one_line_errors

# tfds keeps so much of a split in memory, and needs TensorFlow to write the rest to disk.
MOST_TEXT_BYTES = 900 << 20


def main(arguments: Sequence[str]) -> None:
    parser = LineParser(prog="python -m modo.prepare", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(
        dest="command", required=True, metavar="{text,tfds,pysrc}", parser_class=LineParser
    )
    what = "local text or JSON lines as a tfds set"
    text = commands.add_parser("text", help=what, description=what)
    text.add_argument("--name", type=not_empty, required=True, help="of the set, such as my_books")
    text.add_argument(
        "--path", type=not_empty, required=True, help="a file, directory or glob; .gz is read too"
    )
    text.add_argument("--jsonl", action="store_true", help="a JSON object a line, not text files")
    text.add_argument("--text-field", type=not_empty, help="of each object; default: text")
    text.add_argument("--validation-fraction", type=float, default=0.05, help="default: 0.05")
    what = "a public tfds set; needs the extra prepare"
    public = commands.add_parser("tfds", help=what, description=what)
    public.add_argument("name", type=not_empty, help="NAME, NAME/CONFIG, or either with :VERSION")
    for command in (text, public):
        command.add_argument(
            "--data-dir", type=not_empty, help="default: $TFDS_DATA_DIR or ~/tensorflow_datasets"
        )
    what = "153 MB of Python source; downloads 105 MB"
    code = commands.add_parser("pysrc", help=what, description=what)
    code.add_argument("--data-dir", type=not_empty, help="default: where token files are kept")
    for command in (text, code):
        command.add_argument("--overwrite", action="store_true", help="replace what is there")
    options = parser.parse_args(arguments)
    if options.command == "text":
        prepare_text(options)
    elif options.command == "tfds":
        prepare_tfds(options.name, options.data_dir)
    else:
        prepare_pysrc(options.data_dir, overwrite=options.overwrite)


def prepare_text(options: argparse.Namespace) -> None:
    """Makes a tfds set of local text.

    Raises:
      UserError: the name, fraction or path is bad, the text is, or there is such a set.
    """
    if not re.fullmatch(r"[a-z][a-z0-9_]*", options.name):
        raise UserError(
            f"--name {options.name} must be of small letters, digits and _, a letter first"
        )
    if not 0 < options.validation_fraction < 1:
        raise UserError(
            f"--validation-fraction must be in (0, 1), got {options.validation_fraction}"
        )
    if options.text_field and not options.jsonl:
        raise UserError("--text-field is of JSON lines; add --jsonl")
    paths = find_files(options.path, "--path", ".jsonl" if options.jsonl else ".txt")
    size = sum(map(text_size, paths))
    if size > MOST_TEXT_BYTES and not _is_installed("tensorflow"):
        source = "jsonl" if options.jsonl else "text"
        raise UserError(
            f"--path {options.path} is {size / 1e9:.1f} GB of text, and tfds needs TensorFlow for "
            f"more than {MOST_TEXT_BYTES / 1e9:.1f} (pip install 'modo[prepare]'); or train from "
            f"it as it is, --data.source {source}"
        )
    # Slow to import, and a bad argument need not wait.
    from modo.data.tfds_text import LocalText

    within = pathlib.Path(options.name, str(LocalText.VERSION))
    target = _root(options.data_dir) / within
    with _made_in_place(target, overwrite=options.overwrite) as scratch:
        _quietly_prepare(
            LocalText(
                name=options.name,
                paths=paths,
                text_field=(options.text_field or "text") if options.jsonl else None,
                validation_fraction=options.validation_fraction,
                data_dir=str(scratch.parent / "tfds"),
                file_format="array_record",
            )
        )
        (scratch.parent / "tfds" / within).rename(scratch)
    _report(target)
    where = f" --data.data_dir {options.data_dir}" if options.data_dir else ""
    print(f"train from it with: --data.source tfds --data.name {options.name}{where}")


def prepare_tfds(name: str, data_dir: str | None) -> None:
    """Downloads and prepares a public tfds set in array_record files.

    Raises:
      UserError: there is no such set, the extra is missing, or tfds fails.
    """
    with contextlib.suppress(UserError):
        print(f"already prepared: {find_prepared(name, data_dir)}")
        return
    import tensorflow_datasets as tfds

    known = tfds.list_builders(with_community_datasets=False)
    stem = re.split("[/:]", name)[0]
    if stem not in known:
        near = difflib.get_close_matches(stem, known, 3)
        raise UserError(
            f"tfds has no set {stem}"
            + (f"; perhaps you meant {' or '.join(near)}" if near else "")
            + ". For local text there is: python -m modo.prepare text"
        )
    if not _is_installed("tensorflow"):
        raise UserError(
            f"preparing {name} needs TensorFlow: in an environment of its own, pip install "
            "'modo[prepare]', and run this there; training goes on without"
        )
    try:
        builder = tfds.builder(name, data_dir=str(_root(data_dir)), file_format="array_record")
        builder.download_and_prepare()
    except ImportError as error:
        raise UserError(
            f"preparing {name} needs {error.name}: pip install 'modo[prepare]'"
        ) from None
    except Exception as error:  # of many kinds
        raise UserError(f"cannot prepare {name}: {_line(error)}") from None
    _report(pathlib.Path(builder.data_dir))


def prepare_pysrc(data_dir: str | None, *, overwrite: bool = False) -> None:
    """Downloads and makes the corpus pysrc.

    Raises:
      UserError: a wheel cannot be had, or what they hold is not what it was.
    """
    target = pysrc.pysrc_dir(data_dir)
    if (target / pysrc.INFO_FILE).is_file() and not overwrite:
        print(f"already made: {target}")
        return
    with _made_in_place(target, overwrite=overwrite) as scratch:
        wheels = scratch.parent / "wheels"
        wheels.mkdir()
        print(f"downloading {len(pysrc.WHEELS)} wheels", flush=True)
        sources = pysrc.extract(pysrc.download(str(wheels)))
        found = pysrc.digest(sources)
        if found != pysrc.SHA256:
            raise UserError(
                f"the wheels hold other sources than pysrc is made of: SHA-256 {found}, not "
                f"{pysrc.SHA256}"
            )
        scratch.mkdir()
        about = pysrc.write_corpus(sources, scratch)
    print(f"made {target}")
    for split, counts in about["splits"].items():
        numbers = (f"{counts[what]:,} {what}" for what in ("files", "directories", "bytes"))
        print(f"  {split}: {', '.join(numbers)}")


def _root(data_dir: str | None) -> pathlib.Path:
    return pathlib.Path(data_dir or default_data_dir()).expanduser()


def _is_installed(module: str) -> bool:
    return importlib.util.find_spec(module) is not None


@contextlib.contextmanager
def _made_in_place(target: pathlib.Path, *, overwrite: bool = False) -> Iterator[pathlib.Path]:
    """A path to make a directory at, which becomes `target` at the end, whole or not at all.

    Raises:
      UserError: `target` is there and may not be replaced, or the disk is full or read only.
    """
    if target.exists() and not overwrite:
        raise UserError(f"{target} is there already; --overwrite replaces it")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix=".modo-", dir=target.parent) as scratch:
            made, old = pathlib.Path(scratch) / "made", pathlib.Path(scratch) / "old"
            yield made
            if overwrite and target.exists():
                target.rename(old)
            made.rename(target)  # fails where another process made it meanwhile
    except OSError as error:
        raise UserError(f"cannot make {target}: {error.strerror or error}") from None


def _quietly_prepare(builder) -> None:
    """Prepares a set with nothing but progress bars, on a terminal.

    Raises:
      UserError: the text cannot be read, or tfds cannot write.
    """
    import tensorflow_datasets as tfds

    if not sys.stderr.isatty():
        tfds.disable_progress_bar()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            builder.download_and_prepare()
    except (UserError, OSError):
        raise
    except Exception as error:  # of many kinds
        raise UserError(f"cannot prepare {builder.name}: {_line(error)}") from None


def _line(error: Exception) -> str:
    return " ".join([f"{type(error).__name__}:", *str(error).splitlines()[:1]])


def _report(directory: pathlib.Path) -> None:
    import tensorflow_datasets as tfds

    splits = tfds.builder_from_directory(str(directory)).info.splits
    counts = ", ".join(f"{name} {split.num_examples:,}" for name, split in splits.items())
    print(f"prepared {directory}: {counts} documents")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
