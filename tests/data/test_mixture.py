"""Rows of several corpora by weight."""

import dataclasses
from itertools import islice

import numpy as np
import pytest

from modo import config as config_lib
from modo.config import Config, CorpusConfig, DataConfig, ModelConfig
from modo.data import eval_batches, open_data, train_batches
from modo.data.rows import JoinedRows
from modo.errors import UserError

LENGTH = 8


@pytest.fixture
def mixture(tmp_path) -> DataConfig:
    """29 rows of small letters, 10 of capitals, 3 of digits."""
    texts = {"small": "abcdefgh" * 30, "capitals": "ABCDEFGH" * 11, "digits": "01234567" * 4}
    for name, text in texts.items():
        for number, part in enumerate((text[:-8], text[-8:])):
            directory = tmp_path / name / ("train", "held_out")[number]
            directory.mkdir(parents=True)
            (directory / "text.txt").write_text(part)

    def corpus(name, **fields):
        path, held_out = (str(tmp_path / name / part) for part in ("train", "held_out"))
        return dict(source="text", path=path, validation_path=held_out, **fields)

    return DataConfig(
        **corpus("small", weight=3.0),
        mixture=(
            CorpusConfig(**corpus("capitals", weight=4.0)),
            CorpusConfig(**corpus("digits")),
        ),
        cache_dir=str(tmp_path / "cache"),
    )


def take(number, data, **arguments):
    batches = train_batches(
        data.train, weights=data.weights, **{"seed": 0, "batch_size": 8, **arguments}
    )
    taken = list(islice(batches, number))
    batches.close()
    return taken


def corpus_of(batch) -> np.ndarray:
    """Of each row: 0 small letters, 1 capitals, 2 digits."""
    tokens_BT = batch["tokens_BT"]
    byte_B = np.where(tokens_BT == 256, 0, tokens_BT).max(axis=1)
    return np.select([byte_B >= ord("a"), byte_B >= ord("A")], [0, 1], 2)


@pytest.mark.quick
@pytest.mark.parametrize("packing", ["stream", "documents"])
def test_rows_come_by_weight_and_each_corpus_is_gone_through_in_turn(mixture, packing):
    data = open_data(dataclasses.replace(mixture, packing=packing), LENGTH)
    sizes = [len(part) for part in data.train.parts]
    batches = take(40, data)
    corpus = np.concatenate([corpus_of(batch) for batch in batches])
    assert np.bincount(corpus).tolist() == pytest.approx([120, 160, 40], abs=2)
    # Not only in the end: in any batch as well.
    assert all(np.bincount(corpus_of(b), minlength=3).min() >= 0.5 for b in batches)
    rows = np.concatenate([batch["positions_BT"] + batch["tokens_BT"] * 1000 for batch in batches])
    for number, size in enumerate(sizes):
        seen = [tuple(row) for row in rows[corpus == number].tolist()]
        every = data.train.parts[number][np.arange(size)]
        wanted = sorted(map(tuple, (every["positions"] + every["tokens"] * 1000).tolist()))
        for epoch in range(len(seen) // size):
            assert sorted(seen[epoch * size : (epoch + 1) * size]) == wanted


@pytest.mark.quick
@pytest.mark.parametrize("start", [0, 1, 30, 10**6])
def test_a_mixture_goes_on_from_any_step_on_any_number_of_processes(mixture, start):
    data = open_data(mixture, LENGTH)
    wanted = take(5, data, start_step=start)
    if start < 100:
        for a, b in zip(wanted, take(start + 5, data)[start:], strict=True):
            assert all(np.array_equal(a[name], b[name]) for name in a)
    shares = [take(5, data, start_step=start, process_index=p, process_count=4) for p in range(4)]
    for step, batch in enumerate(wanted):
        for name in batch:
            share = np.concatenate([taken[step][name] for taken in shares])
            np.testing.assert_array_equal(share, batch[name])


@pytest.mark.quick
def test_all_that_is_held_out_is_evaluated_once(mixture):
    data = open_data(mixture, LENGTH)
    assert data.validation.num_bytes == 24
    counted = [
        batch["targets_BT"][batch["weights_BT"] == 1]
        for batch in eval_batches(data.validation, batch_size=2)
    ]
    assert bytes(np.concatenate(counted).tolist()) == b"abcdefghABCDEFGH01234567"
    assert len(set(data.digests.values())) == len(data.digests) == 6


@pytest.mark.quick
def test_joined_rows_are_those_of_the_parts(mixture):
    parts = open_data(mixture, LENGTH).train.parts
    rows = JoinedRows(parts)
    flat = [part[i] for part in parts for i in range(len(part))]
    assert len(rows) == len(flat) and rows.length == LENGTH
    order = np.random.default_rng(0).permutation(len(flat))
    for indices in (order, order[:1], order[:12].reshape(3, 4), np.arange(0)):
        batch = rows[indices]
        for name in batch:
            wanted = [flat[i][name] for i in indices.reshape(-1)]
            np.testing.assert_array_equal(batch[name].reshape(-1, LENGTH), wanted)
    for index in (0, len(flat) - 1):
        assert all(np.array_equal(rows[index][name], flat[index][name]) for name in flat[index])
    for index in (-1, len(flat)):
        with pytest.raises(IndexError, match=f"row {index} of {len(flat)}"):
            rows[index]


@pytest.mark.quick
def test_a_mixture_survives_config_json(mixture):
    model = ModelConfig(vocab_size=257, d_model=8, num_layers=1, num_heads=1)
    config = Config(model, data=mixture)
    assert config_lib.from_json(config_lib.to_json(config)) == config


@pytest.mark.quick
@pytest.mark.parametrize("weight", [0.0, -1.0, float("inf"), float("nan")])
def test_a_weight_is_positive(weight):
    with pytest.raises(UserError, match=r"CorpusConfig.weight must be positive and finite, got"):
        CorpusConfig(weight=weight)
