"""SIGTERM, whenever it comes: what was done is saved, and the next run goes on bitwise."""

import os
import signal
import subprocess
import sys
import threading

import pytest

from modo.train import checkpoint, loop, report
from modo.train.loop import run
from modo.train.metrics import MetricsLog, read_metrics
from modo.train.stop import Stopped, stop_on_sigterm
from tests.train.helpers import subprocess_environment
from tests.train.test_resume import assert_same_state, checkpoint_steps, timeless


def _terminate_after(monkeypatch, owner, name: str, call: int) -> None:
    """SIGTERM comes after the call-th call of a function."""
    function, calls = getattr(owner, name), []

    def wrapped(*args, **kwargs):
        result = function(*args, **kwargs)
        calls.append(name)
        if len(calls) == call:
            os.kill(os.getpid(), signal.SIGTERM)
        return result

    monkeypatch.setattr(owner, name, wrapped)


@pytest.mark.parametrize(
    ("owner", "name", "call", "where", "saved", "evaluated"),
    [
        (loop, "open_data", 1, "before its first step", [], []),
        (checkpoint, "restore_newest", 1, "before its first step", [], []),
        (loop, "train_batches", 1, "before its first step", [], []),
        (loop, "place_batch", 1, "at step 1", [1], []),  # the step is compiled after it
        (MetricsLog, "write", 6, "at step 4", [3, 4], [3, 3]),
        (loop, "evaluate", 1, "at step 3", [3], []),
        (loop, "evaluate", 3, "at step 6", [3, 6], [3, 3]),
        (checkpoint, "save", 1, "at step 3", [3], [3, 3]),
        (report, "draw_figures", 1, "at step 6", [3, 6], [3, 3, 6, 6]),
    ],
)
def test_sigterm_saves_and_the_next_run_goes_on(
    finished_run, tmp_path, monkeypatch, capsys, owner, name, call, where, saved, evaluated
):
    config, workdir, state = finished_run
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    with monkeypatch.context() as patch, pytest.raises(Stopped) as stopped:
        _terminate_after(patch, owner, name, call)
        run(config, tmp_path)
    assert stopped.value.code == 0
    assert handlers == [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
    lines = [line for line in capsys.readouterr().out.splitlines() if "SIGTERM" in line]
    assert lines == [f"stopped by SIGTERM {where}; run again to go on"]
    assert checkpoint_steps(tmp_path) == saved
    assert [r["step"] for r in read_metrics(tmp_path) if r["split"] == "eval"] == evaluated
    if call > 1 or name == "evaluate":
        assert_same_state(run(config, tmp_path), state)
        assert timeless(read_metrics(tmp_path)) == timeless(read_metrics(workdir))


@pytest.mark.quick
@pytest.mark.parametrize("second", [signal.SIGTERM, signal.SIGINT])
def test_a_second_signal_ends_at_once(second):
    program = (
        "import os, signal, sys\n"
        "from modo.train.stop import stop_on_sigterm\n"
        "with stop_on_sigterm() as stop, stop.deferred():\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "    print('asked', stop.noted_at(0), flush=True)\n"
        "    os.kill(os.getpid(), int(sys.argv[1]))\n"
        "    print('still here', flush=True)\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", program, str(int(second))],
        env=subprocess_environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == -second
    assert result.stdout == "asked True\n" and result.stderr == ""


@pytest.mark.quick
def test_other_threads_have_no_signals():
    found = []

    def enter():
        with stop_on_sigterm() as stop:
            found.append((signal.getsignal(signal.SIGTERM), stop.noted_at(0)))

    thread = threading.Thread(target=enter)
    thread.start()
    thread.join()
    assert found == [(signal.getsignal(signal.SIGTERM), False)]
