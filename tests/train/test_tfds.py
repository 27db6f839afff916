"""From local text to a prepared set to a run that stops and goes on."""

import sys

import jax
import numpy as np

from modo import prepare
from modo.config import Config, DataConfig, ModelConfig, OptimizerConfig, TrainConfig
from modo.train.loop import run
from tests.train.helpers import with_train


def test_a_run_on_a_prepared_set_goes_on_bitwise(tmp_path):
    sets = str(tmp_path / "sets")
    book = tmp_path / "book.txt"
    book.write_text("".join(np.random.default_rng(0).choice(list("abcdefgh \n"), 2000)))
    prepare.main(["text", "--name", "book", "--path", str(book), "--data-dir", sets])
    data = DataConfig(source="tfds", name="book", data_dir=sets, cache_dir=str(tmp_path / "cache"))
    # A constant learning rate: then a run that is extended is as one that was as long at once.
    config = Config(
        model=ModelConfig(vocab_size=257, d_model=8, num_layers=1, num_heads=1),
        data=data,
        optimizer=OptimizerConfig(warmup_steps=0, final_fraction=1.0),
        train=TrainConfig(steps=6, batch_size=2, length=16, eval_routings=("predictor",)),
    )
    at_once = run(config, tmp_path / "at_once")
    first = run(with_train(config, steps=3), tmp_path / "in_two")
    assert int(first.step) == 3
    in_two = run(config, tmp_path / "in_two")
    assert int(in_two.step) == 6 and "tensorflow" not in sys.modules
    for a, b in zip(jax.tree.leaves(at_once), jax.tree.leaves(in_two), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
