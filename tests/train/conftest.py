"""A model and corpus small enough that a whole run takes seconds."""

import logging
import sys
import warnings

import numpy as np
import pytest

from modo.config import (
    Config,
    DataConfig,
    DepthConfig,
    MobaConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from modo.train.loop import run


@pytest.fixture(scope="session")
def small_config(tmp_path_factory) -> Config:
    """Six steps of a MoD + MoBA model with router noise on two short documents."""
    directory = tmp_path_factory.mktemp("corpus")
    # Random letters: in text that repeats, router logits tie, and rounding decides who is routed.
    rng = np.random.default_rng(0)
    for name in ("a", "b"):
        letters = rng.choice(list("abcdefgh \n"), size=4000)
        (directory / f"{name}.txt").write_text("".join(letters))
    return Config(
        model=ModelConfig(
            vocab_size=257,
            d_model=16,
            num_layers=4,
            num_heads=2,
            d_ff=32,
            depth=DepthConfig(capacity=0.25, noise=0.1),
            moba=MobaConfig(block_size=8, top_k=2),
            scan_layers=True,
        ),
        data=DataConfig(source="text", path=str(directory), cache_dir=str(directory / "cache")),
        optimizer=OptimizerConfig(learning_rate=0.01, warmup_steps=2),
        train=TrainConfig(
            steps=6, batch_size=4, length=32, eval_every=3, checkpoint_every=3, log_every=1
        ),
    )


@pytest.fixture(scope="session")
def finished_run(small_config, tmp_path_factory):
    """(config, workdir, final state) of an uninterrupted run; tests must not change it."""
    workdir = tmp_path_factory.mktemp("run")
    return small_config, workdir, run(small_config, workdir)


@pytest.fixture
def as_a_program(monkeypatch):
    """Logs what a program logs; undoes what `one_line_errors` sets for the whole process."""
    loggers = [logging.getLogger(name) for name in ("absl", "asyncio")]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    monkeypatch.setattr(sys, "unraisablehook", sys.unraisablehook)
    with warnings.catch_warnings():
        yield
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)
