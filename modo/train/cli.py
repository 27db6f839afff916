"""Command lines: configs by name or path, overrides, and errors as one line."""

import argparse
import contextlib
import errno
import importlib.util
import io
import itertools
import logging
import os
import pathlib
import re
import sys
import warnings
from collections.abc import Iterator, Sequence

import tyro

import modo
from modo.config import Config
from modo.errors import UserError

# What the checks of a config call its fields, and what the command line does.
SECTIONS = {
    "ModelConfig": "--model.",
    "DepthConfig": "--model.depth.",
    "MobaConfig": "--model.moba.",
    "DataConfig": "--data.",
    "CorpusConfig": "a corpus of --data.mixture: ",
    "OptimizerConfig": "--optimizer.",
    "MeshConfig": "--mesh.",
    "TrainConfig": "--train.",
}


def _quiet_about_closed_loops(unraisable) -> None:
    if str(unraisable.exc_value) != "Event loop is closed":
        sys.__unraisablehook__(unraisable)


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Prints a UserError as one line and exits with status 2; Ctrl-C exits with 130.

    A reader of our output that leaves, such as `head`, ends the program without a word. Kept off
    the screen: Orbax's remarks on its own options, its log of errors that it raises as well, and
    the tracebacks of TensorStore's threads, whose reads may fail after a first failure was raised
    here already.
    """
    sys.unraisablehook = _quiet_about_closed_loops
    for name in ("absl", "asyncio"):
        logging.getLogger(name).setLevel(logging.CRITICAL)
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    if sys.stdout is not None:  # as it is after `>&-`
        sys.stdout.reconfigure(errors="replace")  # what an ASCII terminal cannot show
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except UserError as error:
        print(f"error: {' '.join(str(error).split())}", file=sys.stderr)
        raise SystemExit(2) from None
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        raise SystemExit(130) from None
    except BrokenPipeError:
        _drop_output()
        raise SystemExit(1) from None
    except OSError as error:
        # Every file of a run is named where it is written: this one is the output, as in > FILE.
        if error.errno not in (errno.ENOSPC, errno.EDQUOT) or error.filename is not None:
            raise
        _drop_output()
        print(f"error: cannot write output: {error.strerror}", file=sys.stderr)
        raise SystemExit(2) from None


def _drop_output() -> None:
    """Python flushes stdout once more as it exits, and would complain then."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def not_empty(value: str) -> str:
    """An argument that names a file or directory: "" would mean the current directory."""
    if not value:
        raise argparse.ArgumentTypeError("is empty")
    return value


def check_writable(path: pathlib.Path) -> None:
    """Raises UserError where a file cannot be written, before the time is spent on its contents."""
    if path.is_dir():
        raise UserError(f"--json {path} is a directory; name a file")
    if not path.absolute().parent.is_dir():
        raise UserError(f"--json {path}: its directory does not exist")
    existed = path.exists()
    try:  # permissions do not tell: root has them all, and some file systems take nothing
        path.open("a").close()
        if not existed:
            path.unlink()
    except OSError as error:
        raise UserError(f"--json {path} cannot be written to: {error.strerror}") from None


def _config_directories() -> list[pathlib.Path]:
    """configs/ beside the package in a checkout, inside it once installed."""
    package = pathlib.Path(modo.__file__).parent
    return [d for d in (package.parent / "configs", package / "configs") if d.is_dir()]


def config_names() -> list[str]:
    """Names that --config takes."""
    return sorted(
        {p.stem for d in _config_directories() for p in d.glob("*.py") if p.stem != "__init__"}
    )


def load_config(name: str) -> Config:
    """The Config of configs/NAME.py, or of the .py file at a path.

    Raises:
      UserError: there is none, or the file does not define get_config() -> Config.
    """
    if name.endswith(".py"):
        path = pathlib.Path(name)
        if not path.is_file():
            raise UserError(f"config file {name} does not exist")
    else:
        found = [d / f"{name}.py" for d in _config_directories() if (d / f"{name}.py").is_file()]
        if not found or name == "__init__":
            raise UserError(
                f"no config {name!r}; there are {', '.join(config_names())}, or give a path to a "
                ".py file"
            )
        path = found[0]
    spec = importlib.util.spec_from_file_location(f"modo_config_{path.stem}", path)
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except UserError as error:
        raise UserError(f"config {path}: {error}") from None
    except Exception as error:
        raise UserError(f"config {path}: {type(error).__name__}: {error}") from error
    if not isinstance(config, Config):
        raise UserError(f"config {path}: get_config() returned {type(config).__name__}")
    return config


class LineParser(argparse.ArgumentParser):
    """argparse that reports a mistake as one line."""

    def error(self, message: str):
        raise UserError(message)


def parse_train_arguments(arguments: Sequence[str], prog: str = "train.py"):
    """(Config, workdir) from `--config NAME --workdir DIR [--train.steps 200 ...]`.

    Raises:
      UserError: an unknown config, field or value.
      SystemExit: after --help.
    """
    parser = LineParser(
        prog=prog,
        add_help=False,
        allow_abbrev=False,
        usage=f"python {prog} --config NAME --workdir DIR [--train.steps 200 ...]",
        description="Train a model. Running it again in the same workdir resumes. SIGTERM saves a "
        "checkpoint and ends it with status 0, a second one at once; so does Ctrl-C, without "
        "saving, with status 130.",
    )
    parser.add_argument("--config", help=f"one of {', '.join(config_names())}, or a .py file")
    parser.add_argument("--workdir", type=not_empty, help="where the run keeps its files")
    parser.add_argument("-h", "--help", action="store_true", help="this; with --config, all fields")
    known, rest = parser.parse_known_args(arguments)
    if known.help and known.config is None:
        parser.print_help()
        raise SystemExit(0)
    if known.config is None:
        raise UserError(f"--config is needed: one of {', '.join(config_names())}, or a .py file")
    if known.workdir is None and not known.help:
        raise UserError("--workdir is needed: a directory for the run's files")
    config = load_config(known.config)
    return override(config, [*rest, *(["--help"] if known.help else [])], prog), known.workdir


def override(config: Config, arguments: Sequence[str], prog: str) -> Config:
    """Applies `--section.field value` arguments.

    Raises:
      UserError: an unknown field, or a value of the wrong type or range.
    """
    errors = io.StringIO()
    is_help = not {"-h", "--help"}.isdisjoint(arguments)
    try:
        with contextlib.redirect_stderr(errors), _terminal_width(None if is_help else "10000"):
            return tyro.cli(
                Config,
                prog=prog,
                default=config,
                args=list(arguments),
                config=(tyro.conf.AvoidSubcommands, tyro.conf.FlagConversionOff),
            )
    except SystemExit as stop:
        if not stop.code:
            raise
        complaint = _first_complaint(errors.getvalue())
        unknown = complaint.partition("Unrecognized options: ")[2].split(", ")
        if any(map(os.path.exists, unknown)):
            complaint += "; put a glob in quotes, or the shell makes many arguments of it"
        # Checks of the config name its classes.
        raise UserError(
            re.sub(r"([\w.]+: )?\b([A-Z]\w+Config)\.", lambda match: SECTIONS[match[2]], complaint)
        ) from None


@contextlib.contextmanager
def _terminal_width(columns: str | None) -> Iterator[None]:
    """Makes tyro believe in a terminal that wide: it breaks lines amid a path. None: leaves it."""
    before = os.environ.get("COLUMNS")
    if columns is not None:
        os.environ["COLUMNS"] = columns
    try:
        yield
    finally:
        if columns is not None:
            del os.environ["COLUMNS"]
            os.environ.update({} if before is None else {"COLUMNS": before})


def _first_complaint(text: str) -> str:
    """The first paragraph of tyro's boxed message, and what it suggests, in one line."""
    # The title is in the box's upper edge or, on a terminal of ASCII alone, above a line of "-".
    lines = [line.strip(" │╭╮╰╯") for line in text.splitlines()][1:]
    paragraphs = itertools.groupby(lines, lambda line: not line.strip("─-"))
    texts = (" ".join(paragraph) for is_edge, paragraph in paragraphs if not is_edge)
    complaint = next(texts, "arguments were not understood")
    complaint = complaint.removeprefix("Error parsing ")  # "error: " stands before it
    if "Perhaps you meant:" in lines:
        suggestion = lines[lines.index("Perhaps you meant:") + 1].split()[0]
        complaint += f"; perhaps you meant {suggestion}"
    return complaint
