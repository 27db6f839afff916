"""A run that stops, however it stops, goes on as if it had not."""

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from modo import config as config_lib
from modo.data import open_data, train_batches
from modo.errors import UserError
from modo.train import checkpoint
from modo.train.loop import run
from modo.train.mesh import batch_sharding, make_mesh, place_batch
from modo.train.metrics import read_metrics
from modo.train.step import init_state, make_state, make_train_step
from tests.train.helpers import subprocess_environment, with_train


def assert_same_state(a, b):
    for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
        np.testing.assert_array_equal(np.asarray(x), np.asarray(y))


def timeless(records: list[dict]) -> list[dict]:
    """Metrics without what depends on the clock."""
    clock = ("step_seconds", "tokens_per_second")
    return [{k: v for k, v in record.items() if k not in clock} for record in records]


def test_three_steps_and_three_more_equal_six(finished_run, tmp_path):
    config, workdir, state = finished_run
    # The schedule is that of the whole run, so the first half must stop, not be a run of three.
    _run_until(config, tmp_path, 3)
    assert checkpoint_steps(tmp_path) == [3]
    resumed = run(config, tmp_path)
    assert int(resumed.step) == 6
    assert_same_state(resumed, state)
    assert timeless(read_metrics(tmp_path)) == timeless(read_metrics(workdir))


def checkpoint_steps(workdir):
    if not (workdir / "checkpoints").is_dir():
        return []
    with checkpoint.open_manager(workdir, read_only=True) as manager:
        return checkpoint.complete_steps(manager)


class _Stop(Exception):
    pass


def _run_until(config, workdir, last):
    """Runs in this process and stops right after the checkpoint of step `last`."""
    save = checkpoint.save

    def save_and_stop(manager, state, metrics):
        save(manager, state, metrics)
        if int(state.step) == last:
            manager.wait_until_finished()
            raise _Stop

    checkpoint.save = save_and_stop
    try:
        with pytest.raises(_Stop):
            run(config, workdir)
    finally:
        checkpoint.save = save


def test_killed_run_resumes_bitwise(finished_run, tmp_path):
    config, workdir, state = finished_run
    # Held back by a slow step, so that the kill lands between the checkpoints of steps 3 and 6.
    program = (
        "import sys, time, pathlib\n"
        "from modo import config\n"
        "from modo.train import loop, metrics\n"
        "write = metrics.MetricsLog.write\n"
        "def slow(self, record):\n"
        "    write(self, record)\n"
        "    if record['step'] == 5:\n"
        "        time.sleep(600)\n"
        "if sys.argv[3] == 'slow':\n"
        "    metrics.MetricsLog.write = slow\n"
        "loop.run(config.from_json(pathlib.Path(sys.argv[1]).read_text()), sys.argv[2])\n"
    )
    config_file, run_dir = tmp_path / "config.json", tmp_path / "run"
    config_file.write_text(config_lib.to_json(config))
    command = [sys.executable, "-c", program, str(config_file), str(run_dir)]
    process = subprocess.Popen([*command, "slow"], env=subprocess_environment())
    try:
        deadline = time.time() + 300
        while checkpoint_steps(run_dir) != [3] or read_metrics(run_dir)[-1]["step"] != 5:
            assert process.poll() is None and time.time() < deadline
            time.sleep(0.1)
    finally:
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    assert checkpoint_steps(run_dir) == [3]
    subprocess.run([*command, "fast"], env=subprocess_environment(), check=True)
    with checkpoint.open_manager(run_dir, read_only=True) as manager:
        _, abstract_state = make_state(config, make_mesh(config.mesh))
        assert_same_state(checkpoint.restore(manager, 6, abstract_state), state)
    records = read_metrics(run_dir)
    assert [r["step"] for r in records if r["split"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert timeless(records) == timeless(read_metrics(workdir))


def test_half_written_files_are_passed_over(finished_run, tmp_path):
    config, workdir, state = finished_run
    _run_until(config, tmp_path, 3)
    # What a kill can leave: a temporary checkpoint, a step without contents, half a metrics line.
    (tmp_path / "checkpoints" / "5.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "checkpoints" / "6").mkdir()
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"step": 4, "split": "train", "loss": 5.')
    assert_same_state(run(config, tmp_path), state)
    assert timeless(read_metrics(tmp_path)) == timeless(read_metrics(workdir))


@pytest.mark.quick
def test_step_compiles_once_after_a_restore_too(finished_run):
    config, workdir, _ = finished_run
    mesh = make_mesh(config.mesh)
    data = open_data(config.data, config.train.length)
    graphdef, abstract_state = make_state(config, mesh)
    step = make_train_step(graphdef, config, mesh, abstract_state)
    state = init_state(config, abstract_state)
    batches = train_batches(data.train, seed=0, batch_size=config.train.batch_size)
    for _ in range(3):
        state, _ = step(state, place_batch(next(batches), batch_sharding(mesh)))
    with checkpoint.open_manager(workdir, read_only=True) as manager:
        state = checkpoint.restore(manager, 3, abstract_state)
    assert int(state.step) == 3
    state, _ = step(state, place_batch(next(batches), batch_sharding(mesh)))
    batches.close()
    assert step._cache_size() == 1


def test_more_steps_extend_a_finished_run(finished_run, tmp_path):
    config, _, _ = finished_run
    run(with_train(config, steps=3), tmp_path)
    state = run(with_train(config, steps=5), tmp_path)
    assert int(state.step) == 5
    steps = [r["step"] for r in read_metrics(tmp_path) if r["split"] == "train"]
    assert steps == [1, 2, 3, 4, 5]
    with pytest.raises(UserError, match="at step 5, past train.steps 4"):
        run(with_train(config, steps=4), tmp_path)


def test_another_model_is_refused_with_the_difference(finished_run):
    config, workdir, _ = finished_run
    before = (workdir / "config.json").read_text()
    moba = dataclasses.replace(config.model.moba, top_k=3)
    other = dataclasses.replace(config, model=dataclasses.replace(config.model, moba=moba))
    with pytest.raises(UserError, match="model.moba.top_k was 2, now 3"):
        run(other, workdir)
    assert (workdir / "config.json").read_text() == before
    assert json.loads(before)["model"]["moba"]["top_k"] == 2


def test_best_checkpoint_is_kept(finished_run, tmp_path):
    config, _, _ = finished_run
    mesh = make_mesh(config.mesh)
    _, abstract_state = make_state(config, mesh)
    state = init_state(config, abstract_state)
    losses = {1: 3.0, 2: 1.0, 3: None, 4: 2.0, 5: None, 6: None}
    with checkpoint.open_manager(tmp_path, keep=2, best_metric="predictor") as manager:
        for step, loss in losses.items():
            state = dataclasses.replace(state, step=jax.numpy.int32(step))
            checkpoint.save(manager, state, None if loss is None else {"predictor": loss})
        manager.wait_until_finished()
    assert checkpoint_steps(tmp_path) == [2, 5, 6]


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(finished_run, tmp_path):
    config, _, _ = finished_run
    _run_until(config, tmp_path, 3)
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1e30, clip_norm=None)
    with pytest.raises(UserError, match="not finite at step [45]"):
        run(dataclasses.replace(config, optimizer=optimizer), tmp_path)
    assert checkpoint_steps(tmp_path) == [3]
