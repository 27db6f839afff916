"""A run and its tokenizer file: a copy in the workdir, which alone counts from then on."""

import dataclasses
import json
import shutil

import numpy as np
import pytest

import modo
import modo.evaluate
import modo.sample
from modo.config import Config, DataConfig, ModelConfig, TrainConfig
from modo.data import get_tokenizer
from modo.errors import UserError
from modo.train.loop import run
from modo.train.metrics import read_metrics
from modo.train.run_directory import read_config
from modo.train_tokenizer import train_bpe
from tests.data import tokenizer_files
from tests.train.helpers import with_train

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def bpe_run(tmp_path_factory):
    """(config, workdir) of a finished run whose tokenizer file, text and cache are gone."""
    directory = tmp_path_factory.mktemp("bpe")
    original = directory / "mine.json"
    original.write_bytes(tokenizer_files.byte_bpe())
    (directory / "a.txt").write_bytes(tokenizer_files.TEXT)
    config = Config(
        model=ModelConfig(vocab_size=400, d_model=16, num_layers=1, num_heads=2, d_ff=32),
        data=DataConfig(
            source="text",
            path=str(directory / "a.txt"),
            tokenizer=str(original),
            cache_dir=str(directory / "cache"),
        ),
        train=TrainConfig(steps=2, batch_size=2, length=32, log_every=1),
    )
    run(config, directory / "run")
    original.unlink()
    shutil.rmtree(directory / "cache")
    return config, directory / "run"


def test_a_run_keeps_its_tokenizer(bpe_run):
    _, workdir = bpe_run
    assert (workdir / "tokenizer.json").read_bytes() == tokenizer_files.byte_bpe()
    assert modo.load_tokenizer(workdir).decode([0, *range(34, 40)]) == "BCDEFG"


def test_evaluation_uses_the_copy(bpe_run, tmp_path, capsys):
    _, workdir = bpe_run
    (recorded,) = (r["loss"] for r in read_metrics(workdir) if r["split"] == "eval")
    modo.evaluate.main(["--workdir", str(workdir), "--json", str(tmp_path / "e.json")])
    loss = json.loads((tmp_path / "e.json").read_text())["predictor"]["loss"]
    assert loss == pytest.approx(recorded, rel=1e-6)


def test_sampling_prints_the_text_of_all_tokens(bpe_run, capsys, monkeypatch):
    _, workdir = bpe_run
    prompt, drawn = " 🎭 The", []
    stream = modo.sample.stream

    def kept(model, tokens, *arguments, **options):
        drawn.extend(tokens[0].tolist())
        for piece_1N, cache in stream(model, tokens, *arguments, **options):
            drawn.extend(np.asarray(piece_1N[0]).tolist())
            yield piece_1N, cache

    monkeypatch.setattr(modo.sample, "stream", kept)
    arguments = ["--workdir", str(workdir), "--prompt", prompt, "--tokens", "40"]
    modo.sample.main([*arguments, "--temperature", "5"])  # bytes in any order
    text = modo.load_tokenizer(workdir).decode(drawn)
    assert text.startswith(prompt) and "\ufffd" in text
    assert capsys.readouterr().out == text + "\n"


def test_resuming_takes_the_same_tokenizer_from_anywhere_and_no_other(bpe_run, tmp_path):
    config, original = bpe_run
    workdir = tmp_path / "run"
    shutil.copytree(original, workdir)

    def with_tokenizer(content: bytes, name: str = "t.json") -> Config:
        path = tokenizer_files.write(tmp_path / name, content)
        return dataclasses.replace(config, data=dataclasses.replace(config.data, tokenizer=path))

    def resume(config: Config):
        return run(with_train(config, steps=3), workdir)

    before = (workdir / "config.json").read_bytes()
    other = train_bpe([tokenizer_files.TEXT[:9000]], 400).encode()
    for config_ in (
        with_tokenizer(other),
        with_tokenizer(tokenizer_files.sentence_piece(), "t.model"),
    ):
        with pytest.raises(
            UserError, match="differs from .*run/tokenizer.json, which this run was"
        ):
            resume(config_)
    to_bytes = dataclasses.replace(config.data, tokenizer="bytes")
    with pytest.raises(UserError, match="data.tokenizer was '.*mine.json', now 'bytes'"):
        resume(dataclasses.replace(config, data=to_bytes))
    with pytest.raises(UserError, match="cannot read the tokenizer .*mine.json: No such file"):
        resume(config)
    assert (workdir / "config.json").read_bytes() == before
    same = with_tokenizer(tokenizer_files.byte_bpe(), "moved.json")
    assert int(resume(same).step) == 3
    assert read_config(workdir).data.tokenizer == str(tmp_path / "moved.json")
    (workdir / "tokenizer.json").unlink()
    with pytest.raises(UserError, match="tokenizer.json, the run's copy .*moved.json, is missing"):
        resume(same)
    with pytest.raises(UserError, match="cannot read the tokenizer .*run/tokenizer.json: No such"):
        modo.load_tokenizer(workdir)


def test_a_file_of_that_name_is_not_overwritten(bpe_run, tmp_path):
    config, original = bpe_run
    (tmp_path / "tokenizer.json").write_text("mine")
    mine = dataclasses.replace(config.data, tokenizer=str(original / "tokenizer.json"))
    with pytest.raises(UserError, match="differs from .*tokenizer.json, which no run has put"):
        run(dataclasses.replace(config, data=mine), tmp_path)
    assert (tmp_path / "tokenizer.json").read_text() == "mine"
    assert not (tmp_path / "config.json").exists()


def test_a_model_too_small_for_its_tokenizer(bpe_run, tmp_path):
    config, original = bpe_run
    mine = dataclasses.replace(config.data, tokenizer=str(original / "tokenizer.json"))
    model = dataclasses.replace(config.model, vocab_size=399)
    small = dataclasses.replace(config, data=mine, model=model)
    with pytest.raises(UserError, match="vocab_size 399 is smaller than the tokenizer's 400"):
        run(small, tmp_path / "run")
    assert not (tmp_path / "run").exists()
    shutil.copytree(original, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(modo.config.to_json(small))
    with pytest.raises(UserError, match="tokenizer.json has 400 tokens, more than the model's 399"):
        modo.load_tokenizer(tmp_path / "run")


def test_a_sentencepiece_run(bpe_run, tmp_path):
    config, _ = bpe_run
    path = tokenizer_files.write(tmp_path / "sp.model", tokenizer_files.sentence_piece())
    data = dataclasses.replace(config.data, tokenizer=path)
    run(dataclasses.replace(config, data=data), tmp_path / "run")
    assert (tmp_path / "run" / "tokenizer.model").read_bytes() == get_tokenizer(path).content
    assert modo.load_tokenizer(tmp_path / "run").fingerprint == get_tokenizer(path).fingerprint
