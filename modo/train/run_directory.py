"""A run's directory: its config, and who may write to it."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pathlib
from collections.abc import Iterator

import jax

from modo import config as config_lib
from modo.config import Config, CorpusConfig
from modo.data.files import absolute_path
from modo.errors import UserError

CONFIG_FILE, DATA_FILE, LOCK_FILE = "config.json", "data.json", ".lock"
DIRECTORIES = ("checkpoints", "figures", "tensorboard", "profile")
# Fields that may change while a run goes on: none decides what is trained.
FREE_FIELDS = (
    "train.steps",
    "train.eval_every",
    "train.eval_batch_size",
    "train.eval_rows",
    "train.eval_routings",
    "train.checkpoint_every",
    "train.keep_checkpoints",
    "train.log_every",
    "train.tensorboard",
    "train.profile_start",
    "train.profile_steps",
    "mesh.data",
    "mesh.fsdp",
    "mesh.tensor",
    "mesh.context",
    "data.cache_dir",
    "data.tokenizer",  # what the file holds may not: run_tokenizer.check_same_tokenizer
    "model.moba.implementation",
    "model.remat",
    "model.loss_chunk",
)
# Where data are, which data.json makes free: the text is known by its digest.
PLACE_FIELDS = ("path", "validation_path", "data_dir")


def write_atomically(path: pathlib.Path, text: str) -> None:
    """Writes a small file so that a reader, or a kill, finds the old one or the new one.

    Raises:
      UserError: it cannot be written, as on a full disk; the old one is there still.
    """
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with temporary.open("w") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"{path}: {error.strerror}") from None


def make_workdir(workdir: pathlib.Path) -> None:
    """Makes the directory where there is none, and checks that a run can write into it.

    Raises:
      UserError: it cannot be made, or what it holds stands in a run's way.
    """
    if "[" in str(workdir.absolute()):
        raise UserError(
            f"workdir {workdir.absolute()} has a '[' in its path, where Orbax loses what it saves; "
            "use another workdir"
        )
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        for name in DIRECTORIES:
            path = workdir / name
            if path.exists() and not path.is_dir():
                raise UserError(f"{path} is not a directory; move it away or use another workdir")
        for path in (workdir, *(workdir / name for name in DIRECTORIES)):
            if path.exists() and not os.access(path, os.W_OK | os.X_OK):
                raise UserError(f"{path} cannot be written to")
    except OSError as error:
        raise UserError(f"workdir {workdir}: {error.strerror}") from None


@contextlib.contextmanager
def locked(workdir: pathlib.Path) -> Iterator[None]:
    """Keeps every other run out of workdir; the system drops the lock when the process ends.

    Raises:
      UserError: another run has it, or the lock cannot be made.
    """
    if jax.process_index() != 0:  # the processes of one run share it
        yield
        return
    with contextlib.ExitStack() as stack:
        path = workdir / LOCK_FILE
        try:
            file = stack.enter_context(path.open("a"))
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UserError(
                f"another run is writing to workdir {workdir}; wait for it or use another workdir"
            ) from None
        except OSError as error:
            raise UserError(f"workdir {workdir}: cannot lock {path}: {error.strerror}") from None
        yield


def with_absolute_paths(config: Config) -> Config:
    """The config with data paths that mean the same from any directory."""
    data, paths = config.data, _absolute_paths(config.data)
    paths["mixture"] = tuple(
        dataclasses.replace(corpus, **_absolute_paths(corpus)) for corpus in data.mixture
    )
    if data.tokenizer != "bytes":
        paths["tokenizer"] = _absolute(data.tokenizer)
    if data.cache_dir:
        paths["cache_dir"] = _absolute(data.cache_dir)
    return dataclasses.replace(config, data=dataclasses.replace(data, **paths))


def _absolute_paths(corpus: CorpusConfig) -> dict[str, str]:
    paths = {
        name: absolute_path(getattr(corpus, name))
        for name in ("path", "validation_path")
        if getattr(corpus, name)
    }
    return paths | ({"data_dir": _absolute(corpus.data_dir)} if corpus.data_dir else {})


def _absolute(path: str) -> str:
    return str(pathlib.Path(path).expanduser().absolute())


def read_config(workdir: pathlib.Path) -> Config:
    """The config that a run was started with.

    Raises:
      UserError: there is no run in workdir, or its config cannot be read.
    """
    path = workdir / CONFIG_FILE
    try:
        return config_lib.from_json(path.read_bytes().decode())
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{workdir} holds no run: {path} does not exist") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 text: byte {error.start} is no character") from None
    except UserError as error:
        raise UserError(f"{path}: {error}") from None


def check_same_training(workdir: pathlib.Path, config: Config) -> None:
    """Raises UserError, naming each field, where the run in workdir trains something else."""
    if not (workdir / CONFIG_FILE).exists():
        return
    # Workdirs of earlier versions hold relative paths.
    old = with_absolute_paths(read_config(workdir))
    old, new = (json.loads(config_lib.to_json(c)) for c in (old, config))
    known_by_digest = (workdir / DATA_FILE).exists()
    differences = [
        f"{name} was {before!r}, now {after!r}"
        for name, before, after in _differences(old, new, "")
        if name not in FREE_FIELDS
        and not (known_by_digest and name.startswith("data.") and name.endswith(PLACE_FIELDS))
    ]
    if differences:
        raise UserError(
            f"workdir {workdir} holds another run: {'; '.join(differences)}; use another workdir"
        )


def check_same_data(workdir: pathlib.Path, digests: dict[str, str]) -> None:
    """Checks data.json, what the run in workdir was begun on; a run of earlier versions has none.

    Args:
      workdir: of the run.
      digests: of the contents of each split, by name.

    Raises:
      UserError: the run was begun on other data, or data.json cannot be read.
    """
    path = workdir / DATA_FILE
    try:
        old = json.loads(path.read_bytes().decode())
    except FileNotFoundError:
        return
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    except ValueError:  # neither UTF-8 nor JSON
        old = None
    if not isinstance(old, dict):
        raise UserError(
            f"{path} is damaged: it is not a JSON object; if the data are still those that the run "
            "was begun on, remove it"
        )
    changed = [name for name, _, _ in _differences(old, digests, "")]
    if changed:
        raise UserError(
            f"the data changed since the run in workdir {workdir} was begun: {', '.join(changed)} "
            f"of {path}; put the old data back or use another workdir"
        )


def write_data(workdir: pathlib.Path, digests: dict[str, str]) -> None:
    """Writes data.json, where there is none; only for a run that has passed every check."""
    path = workdir / DATA_FILE
    if jax.process_index() == 0 and not path.exists():
        write_atomically(path, json.dumps(digests, indent=2) + "\n")


def _differences(old, new, prefix: str):
    if old and new and _is_of_objects(old) and _is_of_objects(new):
        old, new = ({str(i): item for i, item in enumerate(items)} for items in (old, new))
    if not (isinstance(old, dict) and isinstance(new, dict)):
        if old != new:
            yield prefix.rstrip("."), old, new
        return
    for name in sorted(set(old) | set(new)):
        yield from _differences(old.get(name), new.get(name), f"{prefix}{name}.")


def _is_of_objects(value) -> bool:
    return isinstance(value, list) and all(isinstance(item, dict) for item in value)


def write_config(workdir: pathlib.Path, config: Config) -> None:
    """Writes config.json; only for a run that has passed every check."""
    if jax.process_index() == 0:
        write_atomically(workdir / CONFIG_FILE, config_lib.to_json(config))
