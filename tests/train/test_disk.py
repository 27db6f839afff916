"""A disk that takes no more: one line, the last checkpoint is there still, and space mends it.

The disk is full here because files may not grow past a limit: the system then refuses the writes
of every library, Orbax's threads included.
"""

import contextlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from modo.errors import UserError
from modo.train import checkpoint, loop, report
from modo.train.loop import run
from modo.train.metrics import MetricsLog, read_metrics
from modo.train.run_directory import write_atomically
from tests.train.helpers import ROOT, full_disk, subprocess_environment, with_train
from tests.train.test_resume import assert_same_state, checkpoint_steps, timeless

pytestmark = pytest.mark.usefixtures("as_a_program")


def _full_from(stack, monkeypatch, owner, name: str, call: int, limit: int) -> None:
    """The disk is full from the call-th call of a function on."""
    function, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        calls.append(name)
        if len(calls) == call:
            stack.enter_context(full_disk(limit))
        return function(*args, **kwargs)

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize(
    ("owner", "name", "call", "limit", "message", "saved"),
    [
        (checkpoint, "save", 2, 2000, "earlier ones are kept: mend it and run again", [3]),
        (MetricsLog, "write", 6, 0, "metrics.jsonl: File too large", [3]),
        (report, "draw_figures", 1, 100, "figures cannot be written to .*: File too", [3, 6]),
        (loop, "init_state", 1, 0, "checkpoint could not be saved|metrics.jsonl: File", []),
    ],
)
def test_a_full_disk_in_a_run(
    finished_run, tmp_path, monkeypatch, capsys, owner, name, call, limit, message, saved
):
    config, workdir, state = finished_run
    with contextlib.ExitStack() as stack, pytest.raises(UserError, match=message) as caught:
        patch = stack.enter_context(monkeypatch.context())
        patch.setattr(checkpoint, "check", checkpoint.wait)  # no earlier save is under way
        _full_from(stack, patch, owner, name, call, limit)
        run(config, tmp_path)
    assert "\n" not in str(caught.value)
    assert checkpoint_steps(tmp_path) == saved
    assert_same_state(run(config, tmp_path), state)
    assert checkpoint_steps(tmp_path) == [3, 6]
    assert timeless(read_metrics(tmp_path)) == timeless(read_metrics(workdir))


def test_a_save_that_fails_ends_the_run_at_the_next_step(finished_run, tmp_path, monkeypatch):
    """Orbax writes in a thread: the error is raised neither later nor at the end alone."""
    config, _, _ = finished_run
    config = with_train(config, steps=1000, eval_every=0, log_every=1000)
    steps = []

    def check(manager, check=checkpoint.check):
        steps.append(len(steps) + 1)
        while steps[-1] == 4 and manager.is_saving_in_progress():
            pass
        check(manager)

    monkeypatch.setattr(checkpoint, "check", check)
    with contextlib.ExitStack() as stack, pytest.raises(UserError, match="could not be saved"):
        _full_from(stack, monkeypatch, checkpoint, "save", 1, 2000)
        run(config, tmp_path)
    assert steps[-1] <= 4


@pytest.mark.quick
def test_retention_deletes_nothing_before_the_new_checkpoint_is_whole(tmp_path):
    @contextlib.contextmanager
    def opened(keep):
        with checkpoint.saving(tmp_path, keep=keep, best_metric="loss") as manager:
            yield manager

    def save(manager, step, loss):
        array = jax.random.normal(jax.random.key(step), (5000,))
        state = loop.TrainState(jnp.int32(step), {"w": array}, {"m": array})
        checkpoint.save(manager, state, {"loss": loss})

    with opened(1) as manager:
        save(manager, 1, 1.0)
        save(manager, 2, 2.0)
        save(manager, 3, float("nan"))  # as earlier versions saved: worse than any number
    assert checkpoint_steps(tmp_path) == [1, 3]  # the best and the newest
    with opened(1) as manager:
        save(manager, 4, 0.5)
        checkpoint.wait(manager)
        assert checkpoint_steps(tmp_path) == [4]
        save(manager, 5, 0.7)
    with pytest.raises(UserError, match="File too large"), full_disk(10_000), opened(1) as manager:
        save(manager, 6, 0.1)
    assert checkpoint_steps(tmp_path) == [4, 5]


@pytest.mark.quick
def test_a_small_file_that_cannot_be_written_is_the_old_one(tmp_path):
    path = tmp_path / "config.json"
    path.write_text("old")
    with full_disk(2), pytest.raises(UserError, match="config.json: File too large"):
        write_atomically(path, "new and longer")
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


@pytest.mark.quick
def test_output_onto_a_full_disk():
    with open("/dev/full", "w") as full:
        result = subprocess.run(
            [sys.executable, str(ROOT / "train.py"), "--config", "tiny", "--help"],
            env=subprocess_environment(),
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
        )
    assert result.returncode == 2
    assert result.stderr == "error: cannot write output: No space left on device\n"
