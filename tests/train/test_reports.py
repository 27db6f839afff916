"""What a run reports beside metrics.jsonl: TensorBoard's event files and a profile."""

import importlib.util
import os
import signal
import struct
import subprocess
import sys
import types

import pytest

from modo.config import TrainConfig
from modo.errors import UserError
from modo.train import checkpoint, loop, profiling
from modo.train.loop import run
from modo.train.metrics import MetricsLog, read_metrics, select
from modo.train.stop import Stopped
from tests.train.helpers import subprocess_environment, with_train


def shown(directory) -> dict[str, list[int]]:
    """The steps of every tag as TensorBoard shows them: a START drops what is at or after it."""
    from tensorboardX.proto import event_pb2

    points = []
    for path in sorted(directory.iterdir(), key=lambda path: path.stat().st_mtime_ns):
        data = path.read_bytes()
        while data:
            (length,) = struct.unpack("Q", data[:8])
            event = event_pb2.Event.FromString(data[12 : 12 + length])
            data = data[16 + length :]
            if event.session_log.status == event_pb2.SessionLog.START:
                points = [(step, tag) for step, tag in points if step < event.step]
            points += [(event.step, value.tag) for value in event.summary.value]
    return {tag: [s for s, t in points if t == tag] for tag in dict.fromkeys(t for _, t in points)}


def test_tensorboard_shows_each_step_once(small_config, tmp_path, monkeypatch):
    config = with_train(small_config, tensorboard=True)
    write = MetricsLog.write

    def write_and_fail(self, record):
        write(self, record)
        if record["step"] == 5:
            raise RuntimeError("a crash after the checkpoint of step 3")

    with monkeypatch.context() as patch, pytest.raises(RuntimeError, match="a crash"):
        patch.setattr(MetricsLog, "write", write_and_fail)
        run(config, tmp_path)
    tags = shown(tmp_path / "tensorboard")
    assert tags["train/loss"] == [1, 2, 3, 4, 5] and tags["eval/top_k/loss"] == [3]
    run(config, tmp_path)
    tags = shown(tmp_path / "tensorboard")
    assert tags["train/loss"] == [1, 2, 3, 4, 5, 6]
    assert tags["eval/top_k/loss"] == tags["eval/predictor/fraction"] == [3, 6]
    train = [r for r in read_metrics(tmp_path) if r["split"] == "train"]
    assert {f"train/{name}" for name in train[0]} - set(tags) == {"train/step", "train/split"}


@pytest.mark.quick
def test_tensorboard_that_is_not_installed(small_config, tmp_path, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"pip install 'modo\[tensorboard\]'"):
        run(with_train(small_config, tensorboard=True), tmp_path / "run")
    assert not (tmp_path / "run").exists()


@pytest.mark.quick
def test_tensorboard_without_tensorflow(tmp_path):
    program = (
        "import pathlib, sys\n"
        "from modo.train.tensorboard import EventLog\n"
        "log = EventLog(pathlib.Path(sys.argv[1]), start_step=0)\n"
        "log.write({'step': 1, 'split': 'train', 'loss': 2.5})\n"
        "log.close()\n"
        "heavy = {'tensorflow', 'torch', 'tensorboard'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    subprocess.run(command, env=subprocess_environment(), check=True)
    assert shown(tmp_path) == {"train/loss": [1]}


def test_profiling_window(small_config, tmp_path, monkeypatch, capsys):
    """Is traced where the run passes it, once, and closed where the run stops inside it."""
    calls, now = [], iter(range(10**9))
    monkeypatch.setattr(
        profiling.jax.profiler, "start_trace", lambda path: calls.append(("start", path))
    )
    monkeypatch.setattr(profiling.jax.profiler, "stop_trace", lambda: calls.append("stop"))
    # Every look at the clock is one later; what the trace itself takes is counted to no step.
    clock = types.SimpleNamespace(perf_counter=lambda: next(now) + 1e6 * len(calls))
    monkeypatch.setattr(loop, "time", clock)
    config = with_train(small_config, profile_start=3, profile_steps=2, eval_every=0)
    save = checkpoint.save

    def save_and_stop(*args):
        save(*args)
        os.kill(os.getpid(), signal.SIGTERM)

    with monkeypatch.context() as patch, pytest.raises(Stopped):
        patch.setattr(checkpoint, "save", save_and_stop)
        run(config, tmp_path)
    window = ("start", str(tmp_path / "profile"))
    assert calls == [window, "stop"]
    run(config, tmp_path)
    assert calls == [window, "stop"] and "profile of steps" not in capsys.readouterr().out
    run(with_train(config, steps=9, profile_start=8), tmp_path)
    assert calls == [window, "stop", window, "stop"]
    seconds = [r["step_seconds"] for r in select(read_metrics(tmp_path), "train")]
    assert len(seconds) == 9 and max(seconds) < 1e6
    assert f"profile of steps 8 to 9: {tmp_path / 'profile'}" in capsys.readouterr().out


@pytest.mark.quick
def test_a_profile_is_written(tmp_path):
    said = []
    window = profiling.ProfilingWindow(tmp_path / "profile", 2, 1, said.append)
    for step in (1, 2, 3):
        window.before(step, step)
        window.after(step, step)
        window.close()
    assert len(list((tmp_path / "profile").rglob("*.xplane.pb"))) == 1
    assert said == [f"profile of steps 2 to 2: {tmp_path / 'profile'}"]


@pytest.mark.quick
def test_windows_outside_of_the_run():
    with pytest.raises(UserError, match="profile_start 8 and profile_steps 3 end at step 10, past"):
        TrainConfig(steps=9, profile_start=8)
    with pytest.raises(UserError, match="profile_start must be .*at least 1, got 0"):
        TrainConfig(steps=9, profile_start=0)
    TrainConfig(steps=10, profile_start=8)
