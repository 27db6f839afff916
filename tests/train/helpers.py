"""Shared by the tests of training."""

import contextlib
import dataclasses
import os
import pathlib
import resource
from collections.abc import Iterator

from modo.config import Config

ROOT = pathlib.Path(__file__).parents[2]


def subprocess_environment() -> dict[str, str]:
    """For programs of this checkout, installed or not."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def with_train(config: Config, **fields) -> Config:
    """The config with other TrainConfig fields."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))


@contextlib.contextmanager
def full_disk(limit: int) -> Iterator[None]:
    """While it is open, writing past `limit` bytes of a file fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def contents(directory: pathlib.Path) -> dict:
    """Every file and directory there and below, with what it holds."""
    return {p: p.is_file() and p.read_bytes() for p in (directory, *directory.rglob("*"))}
