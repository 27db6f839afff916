"""SIGTERM, whenever it comes: what was done is saved, and the next run goes on bitwise."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from modo.train import checkpoint, loop
from modo.train.loop import run
from modo.train.metrics import MetricsLog, read_metrics
from modo.train.stop import Stopped, stop_on_sigterm
from tests.train.helpers import subprocess_environment
from tests.train.test_resume import assert_same_state, checkpoint_steps, timeless


def _terminate(*_):
    os.kill(os.getpid(), signal.SIGTERM)


def _after(function, condition=lambda *_: True):
    """The function, with SIGTERM after its first call of which the condition holds."""
    done = []

    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        if not done and condition(*args):
            done.append(True)
            _terminate()
        return result

    return wrapped


def _interrupt(monkeypatch, moment: str) -> None:
    if moment == "opening data":
        monkeypatch.setattr(loop, "open_data", _after(loop.open_data))
    elif moment == "restoring":
        monkeypatch.setattr(checkpoint, "restore_newest", _after(checkpoint.restore_newest))
    elif moment == "before the first step":
        monkeypatch.setattr(loop, "train_batches", _after(loop.train_batches))
    elif moment == "compiling":
        make = loop.make_train_step
        monkeypatch.setattr(loop, "make_train_step", lambda *args: _after(make(*args)))
    elif moment == "between checkpoints":
        late = _after(MetricsLog.write, lambda log, record: record["step"] == 4)
        monkeypatch.setattr(MetricsLog, "write", late)
    elif moment == "evaluating":
        monkeypatch.setattr(loop, "evaluate", _after(loop.evaluate))
    elif moment == "evaluating at the end":
        late = _after(loop.evaluate, lambda graphdef, params, *_: len(checkpoints()) == 1)
        checkpoints = lambda: []  # noqa: E731
        monkeypatch.setattr(loop, "evaluate", late)
    elif moment == "saving":
        monkeypatch.setattr(checkpoint, "save", _after(checkpoint.save))
