"""A run's own files: what stands in the way is named in one line, and nothing good is lost."""

import dataclasses
import json
import os

import pytest

from modo.config import Config, CorpusConfig, DataConfig, ModelConfig
from modo.data.files import find_files
from modo.errors import UserError
from modo.train.load import load
from modo.train.metrics import MetricsLog, read_metrics
from modo.train.run_directory import (
    check_same_data,
    check_same_training,
    locked,
    make_workdir,
    read_config,
    with_absolute_paths,
    write_config,
    write_data,
)

pytestmark = pytest.mark.quick

CONFIG = Config(model=ModelConfig(vocab_size=257, d_model=16, num_layers=2, num_heads=2))


@pytest.mark.parametrize("name", ["checkpoints", "figures"])
def test_a_file_in_the_place_of_a_directory(tmp_path, name):
    (tmp_path / name).write_text("mine")
    with pytest.raises(UserError, match=f"{name} is not a directory"):
        make_workdir(tmp_path)
    assert (tmp_path / name).read_text() == "mine"


def test_workdirs_that_cannot_be_written_to(tmp_path, monkeypatch):
    make_workdir(tmp_path / "fine")
    with pytest.raises(UserError, match="/proc/nothing: No such file"):
        make_workdir(tmp_path.__class__("/proc/nothing"))
    # Root may write anywhere but here, and finds out by trying.
    with pytest.raises(UserError, match="cannot lock /proc/.lock"), locked(type(tmp_path)("/proc")):
        pass
    monkeypatch.setattr(os, "access", lambda path, mode: False)
    with pytest.raises(UserError, match=f"{tmp_path} cannot be written to"):
        make_workdir(tmp_path)


def test_orbax_loses_checkpoints_below_a_bracket(tmp_path):
    with pytest.raises(UserError, match=r"has a '\[' in its path"):
        make_workdir(tmp_path / "run[1]")
    assert not (tmp_path / "run[1]").exists()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff", "is not UTF-8 text"),
        (b"{", "config is not JSON"),
        (b"{}", "config has no 'model'"),
        (b'{"model": {"d_model": 3}}', "ModelConfig lacks"),
        (None, "Is a directory"),
    ],
)
def test_errors_of_config_json_name_the_file(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is None:
        path.mkdir()
    else:
        path.write_bytes(content)
    for read in (read_config, load):
        with pytest.raises(UserError, match=f"^{path}.*{message}"):
            read(tmp_path)


def test_names_that_no_file_can_have(tmp_path):
    with pytest.raises(UserError, match="File name too long"):
        read_config(tmp_path / ("x" * 300))
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="holds no run"):
        read_config(tmp_path / "file")


@pytest.mark.parametrize("path", ["books", "./books/", "books/*.txt", "books/**/b?.txt"])
def test_data_paths_mean_the_same_from_elsewhere(tmp_path, monkeypatch, path):
    here = tmp_path / "here [1]"  # a pattern itself, were it read as one
    (here / "books").mkdir(parents=True)
    for name in ("b1.txt", "b2.txt"):
        (here / "books" / name).write_text("words")
    monkeypatch.chdir(here)
    data = DataConfig(source="text", path=path, validation_path="books/b1.txt", cache_dir="c")
    write_config(tmp_path, with_absolute_paths(dataclasses.replace(CONFIG, data=data)))
    monkeypatch.chdir(tmp_path)
    data = read_config(tmp_path).data
    assert find_files(data.path, "data.path") == tuple(
        str(here / "books" / name) for name in ("b1.txt", "b2.txt")
    )
    assert data.validation_path == str(here / "books" / "b1.txt")
    assert data.cache_dir == str(here / "c")
    again = dataclasses.replace(CONFIG, data=data)
    assert with_absolute_paths(again) == again


def test_unreadable_lines_of_metrics_are_dropped_and_no_others(tmp_path):
    good = [{"step": step, "split": "train", "loss": 5.0 - step} for step in (1, 2, 3, 4)]
    good[2] = {"step": 3, "note": "mine"}
    first, *rest = [json.dumps(record).encode() for record in good]
    bad = [b"", b"  ", b"[]", b"3", b"null", b'{"step": "3"}', b'{"step": true}', b'{"step": 2.5}']
    bad += [b'{"loss": 3}', b"\xff\xfe", b"\0\0\0", b"[" * 100_000, b'{"step": 4, "spl']
    (tmp_path / "metrics.jsonl").write_bytes(b"\n".join([first, *bad[:6], *rest, *bad[6:]]))
    assert read_metrics(tmp_path) == good
    log = MetricsLog(tmp_path, start_step=3, steps=9)
    log.write({"step": 4})
    log.close()
    lines = (tmp_path / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == [*good[:3], {"step": 4}]


def test_metrics_that_are_a_directory(tmp_path):
    (tmp_path / "metrics.jsonl").mkdir()
    with pytest.raises(UserError, match="metrics.jsonl: Is a directory"):
        MetricsLog(tmp_path, start_step=0, steps=1)


def test_data_that_changed_under_a_run(tmp_path):
    digests = {"train": "a1", "validation": "b2"}
    check_same_data(tmp_path, digests)  # nothing is there yet
    write_data(tmp_path, digests)
    write_data(tmp_path, {"train": "not written"})
    check_same_data(tmp_path, dict(reversed(digests.items())))
    written = (tmp_path / "data.json").read_bytes()
    for other, names in (
        ({"train": "a1", "validation": "c3"}, "validation"),
        ({"train": "x", "validation": "y"}, "train, validation"),
        ({"train": "a1"}, "validation"),
        ({**digests, "more": "d4"}, "more"),
    ):
        with pytest.raises(UserError, match=f"data changed since .*: {names} of .*data.json; put"):
            check_same_data(tmp_path, other)
        assert (tmp_path / "data.json").read_bytes() == written
    for damaged in (b"", b"[]", b"\xff"):
        (tmp_path / "data.json").write_bytes(damaged)
        with pytest.raises(UserError, match="data.json is damaged"):
            check_same_data(tmp_path, digests)
        assert (tmp_path / "data.json").read_bytes() == damaged


def test_data_may_move_where_their_digests_are_known(tmp_path):
    def at(place):
        local = {"source": "text", "path": place, "validation_path": place + "v"}
        corpora = (CorpusConfig(source="pysrc", data_dir=place), CorpusConfig(**local))
        return dataclasses.replace(CONFIG, data=DataConfig(**local, mixture=corpora))

    write_config(tmp_path, at("/here"))
    with pytest.raises(UserError, match="data.path was '/here', now '/there'"):
        check_same_training(tmp_path, at("/there"))
    write_data(tmp_path, {"train": "a1"})
    check_same_training(tmp_path, at("/there"))


def test_a_difference_in_a_mixture_is_named(tmp_path):
    def with_corpora(*corpora):
        return dataclasses.replace(CONFIG, data=DataConfig(mixture=corpora))

    write_config(tmp_path, with_corpora(CorpusConfig(weight=0.5)))
    check_same_training(tmp_path, with_corpora(CorpusConfig(weight=0.5)))
    with pytest.raises(UserError, match=r"run: data.mixture.0.weight was 0.5, now 2.0; use"):
        check_same_training(tmp_path, with_corpora(CorpusConfig(weight=2.0)))
    with pytest.raises(UserError, match=r"data.mixture(.1)? was "):
        check_same_training(tmp_path, with_corpora(CorpusConfig(weight=0.5), CorpusConfig()))
