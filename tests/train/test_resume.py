"""A run that stops, however it stops, goes on as if it had not."""

import dataclasses
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest

from modo import config as config_lib
from modo.config import MobaConfig
from modo.data import open_data, train_batches
from modo.errors import UserError
from modo.evaluate import evaluate_run
from modo.train import checkpoint, loop
from modo.train.loop import run
from modo.train.mesh import batch_sharding, make_mesh, place_batch
from modo.train.metrics import read_metrics
from modo.train.run_directory import locked, read_config
from modo.train.step import init_state, make_state, make_train_step
from tests.train.helpers import contents, subprocess_environment, with_train


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


def _with(config, section: str, **fields):
    return dataclasses.replace(
        config, **{section: dataclasses.replace(getattr(config, section), **fields)}
    )


@pytest.mark.parametrize(
    ("section", "fields", "message"),
    [
        ("train", {"steps": 5}, "at step 6, past train.steps 5"),
        ("train", {"batch_size": 8}, "train.batch_size was 4, now 8"),
        ("train", {"length": 16}, "train.length was 32, now 16"),
        ("train", {"accumulation": 2}, "train.accumulation was 1, now 2"),
        ("train", {"seed": 1}, "train.seed was 0, now 1"),
        ("train", {"routing": "random"}, "train.routing was 'top_k', now 'random'"),
        ("train", {"z_loss": 0.1}, "train.z_loss was 0.0, now 0.1"),
        ("optimizer", {"name": "muon"}, "optimizer.name was 'adamw', now 'muon'"),
        ("optimizer", {"b1": 0.5}, "optimizer.b1 was 0.9, now 0.5"),
        ("data", {"mask_documents": False}, "data.mask_documents was True, now False"),
        ("data", {"source": "shakespeare", "path": None}, "data.source was 'text', now 'sha"),
        ("model", {"compute_dtype": "bfloat16"}, "model.compute_dtype was 'float32'"),
        ("model", {"moba": MobaConfig(block_size=8, top_k=3)}, "model.moba.top_k was 2, now 3"),
    ],
)
def test_a_refused_run_changes_nothing(finished_run, section, fields, message):
    config, workdir, _ = finished_run
    before = contents(workdir)
    with pytest.raises(UserError, match=message) as caught:
        run(_with(config, section, **fields), workdir)
    assert "\n" not in str(caught.value) and contents(workdir) == before


def test_what_does_not_change_the_training_may_change(finished_run, tmp_path):
    config, workdir, _ = finished_run
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    fields = {"eval_batch_size": 3, "eval_every": 1, "log_every": 2, "checkpoint_every": 1}
    other = with_train(config, steps=8, keep_checkpoints=1, eval_routings=("router",), **fields)
    moba = dataclasses.replace(config.model.moba, implementation="reference")
    other = _with(_with(other, "model", moba=moba), "mesh", data=1)
    other = _with(other, "data", cache_dir=str(tmp_path / "cache"))
    assert int(run(other, tmp_path).step) == 8
    assert read_config(tmp_path) == other
    assert checkpoint_steps(tmp_path)[-1] == 8


def test_a_workdir_with_a_relative_path_of_an_earlier_version_goes_on(
    finished_run, tmp_path, monkeypatch
):
    config, workdir, _ = finished_run
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    corpus = pathlib.Path(config.data.path)
    monkeypatch.chdir(corpus.parent)
    relative = _with(config, "data", path=corpus.name)
    (tmp_path / "config.json").write_text(config_lib.to_json(relative))
    assert int(run(relative, tmp_path).step) == 6
    assert read_config(tmp_path).data.path == str(corpus)


@pytest.mark.quick
def test_a_second_run_in_a_workdir_is_refused(finished_run):
    config, workdir, _ = finished_run
    before = contents(workdir)
    with locked(workdir), pytest.raises(UserError, match="another run is writing to workdir"):
        run(config, workdir)
    assert contents(workdir) == before


@pytest.mark.quick
def test_the_lock_goes_with_its_process(tmp_path):
    program = (
        "import pathlib, sys, time\n"
        "from modo.train.run_directory import locked\n"
        "with locked(pathlib.Path(sys.argv[1])):\n"
        "    print('locked', flush=True)\n"
        "    time.sleep(600)\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path)],
        env=subprocess_environment(),
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout.readline() == "locked\n"
        with pytest.raises(UserError, match="another run"), locked(tmp_path):
            pass
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    with locked(tmp_path):
        pass


@pytest.mark.parametrize("missing", ["rest", "params"])
def test_a_step_with_a_part_missing_is_set_aside(finished_run, tmp_path, missing, capsys):
    config, workdir, state = finished_run
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    broken = tmp_path / "checkpoints" / "6"
    shutil.rmtree(broken / missing)
    (tmp_path / "checkpoints" / "6.broken-1").mkdir()
    left = {path.name for path in broken.iterdir()}
    assert_same_state(run(config, tmp_path), state)
    aside = tmp_path / "checkpoints" / "6.broken-2"
    assert {path.name for path in aside.iterdir()} == left
    assert f"checkpoint {broken} lacks {missing}/: set aside as {aside}" in capsys.readouterr().out
    assert checkpoint_steps(tmp_path) == [3, 6]


@pytest.mark.parametrize("item", ["params", "rest"])
def test_a_damaged_checkpoint_is_one_line_that_says_what_to_do(finished_run, tmp_path, item):
    config, workdir, state = finished_run
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    newest = tmp_path / "checkpoints" / "6"
    _truncate_largest(newest / item / "ocdbt.process_0" / "d")
    before = contents(tmp_path)
    message = rf"{newest} cannot be read \(.*\); to go on from step 3, move {newest} away"
    with pytest.raises(UserError, match=message):
        run(config, tmp_path)
    assert contents(tmp_path) == before
    newest.rename(tmp_path / "checkpoints" / "6.mine")
    assert_same_state(run(config, tmp_path), state)


@pytest.mark.quick
def test_an_older_step_that_was_being_deleted_is_left_to_retention(finished_run, tmp_path, capsys):
    """A kill can come while Orbax deletes it: that is no damage to speak of."""
    config, workdir, _ = finished_run
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "3" / "rest")
    assert checkpoint.set_aside_broken_steps(tmp_path) == []
    run(with_train(config, steps=8, keep_checkpoints=1, checkpoint_every=1), tmp_path)
    assert checkpoint_steps(tmp_path)[-1] == 8
    assert not (tmp_path / "checkpoints" / "3").exists()


@pytest.mark.quick
def test_a_damaged_metadata_file_does_no_harm(finished_run, tmp_path, as_a_program, capfd):
    config, workdir, state = finished_run
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    (tmp_path / "checkpoints" / "6" / "_CHECKPOINT_METADATA").write_text("{")
    _, abstract_state = make_state(config, make_mesh(config.mesh))
    assert_same_state(checkpoint.restore_newest(tmp_path, abstract_state), state)
    assert capfd.readouterr().err == ""


def _truncate_largest(directory: pathlib.Path) -> None:
    largest = max(directory.iterdir(), key=lambda path: path.stat().st_size)
    os.truncate(largest, 100)


def test_a_damaged_checkpoint_in_a_program(finished_run, tmp_path):
    """TensorStore's threads stay silent too; without an earlier step there is no advice."""
    _, workdir, _ = finished_run
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    shutil.rmtree(tmp_path / "checkpoints" / "3")
    _truncate_largest(tmp_path / "checkpoints" / "6" / "params" / "d")
    result = subprocess.run(
        [sys.executable, "-m", "modo.evaluate", "--workdir", str(tmp_path)],
        env=subprocess_environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and result.stderr.count("\n") == 1
    assert "6 cannot be read (" in result.stderr and "there is no earlier step" in result.stderr


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
    # A run that goes on remembers what was the best, also if it evaluates other routings.
    for step, metric, kept in ((7, "predictor", [2, 6, 7]), (8, "top_k", [2, 7, 8])):
        with checkpoint.open_manager(tmp_path, keep=2, best_metric="predictor") as manager:
            state = dataclasses.replace(state, step=jax.numpy.int32(step))
            checkpoint.save(manager, state, {metric: 2.0})
            manager.wait_until_finished()
        assert checkpoint_steps(tmp_path) == kept


def test_a_loss_that_is_not_finite_stops_and_keeps_the_checkpoint(finished_run, tmp_path):
    config, _, _ = finished_run
    optimizer = dataclasses.replace(config.optimizer, learning_rate=1e30, clip_norm=None)
    config = with_train(config, eval_every=0, checkpoint_every=1)
    with pytest.raises(UserError, match="not finite at step 2 .* in another workdir"):
        run(dataclasses.replace(config, optimizer=optimizer), tmp_path)
    assert checkpoint_steps(tmp_path) == [1]


def test_a_run_does_not_go_on_with_other_text(small_config, tmp_path):
    text = tmp_path / "text"
    shutil.copytree(small_config.data.path, text, ignore=shutil.ignore_patterns("cache"))
    config = dataclasses.replace(
        small_config, data=dataclasses.replace(small_config.data, path=str(text))
    )
    workdir = tmp_path / "run"
    run(with_train(config, steps=1), workdir)
    before = (text / "a.txt").read_text()
    (text / "a.txt").write_text(before.upper())
    about = (workdir / "data.json").read_bytes()
    with pytest.raises(UserError, match="the data changed since the run .*: train, validation of "):
        run(with_train(config, steps=2), workdir)
    with pytest.raises(UserError, match="the data changed since the run .*: train, validation of "):
        evaluate_run(workdir, ["top_k"])
    assert (workdir / "data.json").read_bytes() == about and checkpoint_steps(workdir) == [1]
    (text / "a.txt").write_text(before)
    assert int(run(with_train(config, steps=2), workdir).step) == 2


def test_a_held_out_loss_that_is_not_finite_stops_before_the_save(
    finished_run, tmp_path, monkeypatch
):
    config, _, _ = finished_run

    def evaluate(*args, evaluate=loop.evaluate, **kwargs):
        result = evaluate(*args, **kwargs)
        late = (tmp_path / "checkpoints" / "3").exists()
        return dataclasses.replace(result, loss=float("nan")) if late else result

    monkeypatch.setattr(loop, "evaluate", evaluate)
    monkeypatch.setattr(checkpoint, "check", checkpoint.wait)
    with pytest.raises(UserError, match="held-out loss is not finite at step 6, routing predictor"):
        run(config, tmp_path)
    assert checkpoint_steps(tmp_path) == [3]
    assert all(np.isfinite(r["loss"]) for r in read_metrics(tmp_path))


def test_parameters_that_are_not_finite_are_never_saved(finished_run, tmp_path):
    """The update overflows although the loss and the gradients of the step are finite."""
    config, _, _ = finished_run
    config = with_train(config, steps=1, eval_every=0)
    config = _with(config, "optimizer", learning_rate=3e38, warmup_steps=0, weight_decay=100.0)
    with pytest.raises(UserError, match="(parameters|held-out loss).* not finite .*step 1"):
        run(config, tmp_path)
    assert checkpoint_steps(tmp_path) == []
    with pytest.raises(UserError, match="parameters .* not finite after step 1; the last"):
        run(with_train(config, steps=2, checkpoint_every=1), tmp_path)
    assert checkpoint_steps(tmp_path) == []
