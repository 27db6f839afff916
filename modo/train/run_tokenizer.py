"""A run's own copy of its tokenizer file, so that it means the same when that file has gone."""

import dataclasses
import os
import pathlib

import jax

from modo.config import DataConfig
from modo.data.tokenizer import Tokenizer
from modo.data.tokenizer_file import write_atomically
from modo.errors import UserError
from modo.train.run_directory import CONFIG_FILE, read_config


def own_tokenizer(workdir: pathlib.Path, data: DataConfig) -> DataConfig:
    """A run's `data` with the tokenizer that its workdir keeps."""
    if data.tokenizer == "bytes":
        return data
    return dataclasses.replace(data, tokenizer=str(_copy(workdir, data.tokenizer)))


def check_same_tokenizer(workdir: pathlib.Path, name: str, tokenizer: Tokenizer) -> None:
    """Raises UserError where workdir keeps another tokenizer than the one read from `name`."""
    started = (workdir / CONFIG_FILE).exists()
    old = read_config(workdir).data.tokenizer if started else name
    if "bytes" in (old, name):
        if old != name:
            raise UserError(
                f"workdir {workdir} holds another run: data.tokenizer was {old!r}, now {name!r}; "
                "use another workdir"
            )
        return
    path = _copy(workdir, old)
    try:
        content = path.read_bytes()
    except FileNotFoundError:
        if not started:
            return
        raise UserError(f"{path}, the run's copy of its tokenizer {old}, is missing") from None
    except OSError as error:
        raise UserError(f"{path}: {error.strerror}") from None
    if content != tokenizer.content:
        raise UserError(
            f"data.tokenizer {name} differs from {path}, which "
            + ("this run was started with" if started else "no run has put there")
            + "; use another workdir"
        )


def write_tokenizer(workdir: pathlib.Path, tokenizer: Tokenizer) -> None:
    """Keeps a copy of the tokenizer's file; only for a run that has passed every check."""
    if tokenizer.file_name is None or jax.process_index() != 0:
        return
    path = workdir / tokenizer.file_name
    if not path.exists():
        write_atomically(path, tokenizer.content)


def _copy(workdir: pathlib.Path, name: str) -> pathlib.Path:
    return workdir / ("tokenizer" + os.path.splitext(name)[1])
