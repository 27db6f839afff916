"""From local text to a prepared set to a run that stops and goes on."""

import dataclasses
import sys

import jax
import numpy as np
import pytest

from modo import prepare
from modo.config import DataConfig
from modo.train import checkpoint
from modo.train.loop import run
from tests.train.helpers import with_train


class _Stop(Exception):
    pass


def test_a_run_on_a_prepared_set_goes_on_bitwise(small_config, tmp_path, monkeypatch):
    sets = str(tmp_path / "sets")
    path = small_config.data.path
    prepare.main(["text", "--name", "letters", "--path", path, "--data-dir", sets])
    data = DataConfig(
        source="tfds", name="letters", data_dir=sets, cache_dir=str(tmp_path / "cache")
    )
    config = dataclasses.replace(small_config, data=data)
    config = with_train(config, eval_every=0, eval_routings=("predictor",))
    at_once = run(config, tmp_path / "at_once")
    save = checkpoint.save

    def save_and_stop(manager, *rest):
        save(manager, *rest)
        manager.wait_until_finished()
        raise _Stop

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save", save_and_stop)
        with pytest.raises(_Stop):
            run(config, tmp_path / "in_two")
    with checkpoint.open_manager(tmp_path / "in_two", read_only=True) as manager:
        assert checkpoint.complete_steps(manager) == [3]
    in_two = run(config, tmp_path / "in_two")
    assert int(in_two.step) == 6 and "tensorflow" not in sys.modules
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(in_two), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
