"""Shared by the tests of training."""

import dataclasses
import os
import pathlib

from modo.config import Config

ROOT = pathlib.Path(__file__).parents[2]


def subprocess_environment() -> dict[str, str]:
    """For programs of this checkout, installed or not."""
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}


def with_train(config: Config, **fields) -> Config:
    """The config with other TrainConfig fields."""
    return dataclasses.replace(config, train=dataclasses.replace(config.train, **fields))
