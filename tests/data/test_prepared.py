import shutil
import socket
import sys
import time

import pytest

from modo.config import Config, DataConfig, ModelConfig
from modo.data import open_data, prepared
from modo.data.source import open_corpus
from modo.errors import UserError
from modo.train.run_directory import with_absolute_paths
from tests.data.tfds_sets import write_set

FORMATS = ["array_record", "tfrecord"]
FILES = [["first", "", "dritté"], [], [" \n"], ["a", "b", "c", "d"]]
TEXTS = [b"first", "dritté".encode(), b"a", b"b", b"c", b"d"]


def config_of(root, name, **fields):
    return DataConfig(source="tfds", data_dir=root and str(root), name=name, **fields)


def documents(config):
    corpus = open_corpus(config)
    return list(corpus.train.documents()), list(corpus.validation.documents())


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    def refuse(*args, **kwargs):
        raise AssertionError("tried the network")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)


@pytest.mark.quick
@pytest.mark.parametrize("file_format", FORMATS)
def test_a_set_is_read_in_order_and_in_shards(tmp_path, monkeypatch, file_format):
    write_set(tmp_path, "a_set", {"train": FILES, "test": [["held out"]]}, file_format=file_format)
    config = config_of(tmp_path, "a_set")
    assert documents(config) == (TEXTS, [b"held out"])
    assert "tensorflow" not in sys.modules
    files = (tmp_path / "a_set" / "1.0.0").glob("*-train.*-0000[023]-*")  # file 1 is empty
    size = sum(path.stat().st_size for path in files)
    monkeypatch.setattr(prepared, "SHARD_BYTES", size // 4)
    shards = open_corpus(config).train.shards
    assert len(shards) > 2 and [text for s in shards for text in s.read()] == TEXTS
    assert len({shard.identify() for shard in shards}) == len(shards)
    assert abs(sum(shard.size for shard in shards) - size) <= len(shards)


@pytest.mark.parametrize("file_format", FORMATS)
def test_slices_of_splits(tmp_path, file_format):
    write_set(tmp_path, "a_set", {"train": FILES}, file_format=file_format)
    config = config_of(tmp_path, "a_set", train_split="train[:75%]", validation_split="train[-2:]")
    assert documents(config) == (TEXTS[:4], TEXTS[4:])
    with pytest.raises(UserError, match=r"train\[:75%\] and .* train\[5:\] share examples"):
        open_corpus(
            config_of(tmp_path, "a_set", train_split="train[:75%]", validation_split="train[5:]")
        )


def test_what_is_held_out(tmp_path):
    def held_out(name, splits, **fields):
        write_set(tmp_path, name, {split: [[f"{split}!"] * 3] for split in splits})
        return documents(config_of(tmp_path, name, **fields))[1]

    assert held_out("three", ["train", "test", "validation"]) == [b"validation!"] * 3
    assert held_out("two", ["train", "test"]) == [b"test!"] * 3
    assert held_out("chosen", ["train", "test", "dev"], validation_split="dev") == [b"dev!"] * 3
    trained = held_out("other", ["validation", "test"], train_split="validation")
    assert trained == [b"test!"] * 3
    # Nothing to hold out: by hash, or, of few documents, the end of each.
    texts = [f"document {i}" for i in range(1000)]
    write_set(tmp_path, "many", {"train": [texts[:600], texts[600:]]})
    train, validation = documents(config_of(tmp_path, "many"))
    assert not set(train) & set(validation) and 25 < len(validation) < 75
    assert sorted(train + validation) == sorted(text.encode() for text in texts)
    write_set(tmp_path, "few", {"train": [["line\n" * 20] * 2]})
    train, validation = documents(config_of(tmp_path, "few"))
    assert train == [b"line\n" * 19] * 2 and validation == [b"line\n"] * 2


def test_names_versions_configs_and_directories(tmp_path, monkeypatch):
    for name in ("plain", "one/en", "two/en", "two/de"):
        write_set(tmp_path, name, {"train": [[name]], "test": [[name]]})
    for version in ("2.0.0", "10.0.0"):
        shutil.copytree(tmp_path / "plain" / "1.0.0", tmp_path / "plain" / version)

    def found(name):
        return str(prepared.find_prepared(name, str(tmp_path)).relative_to(tmp_path))

    assert found("plain") == found("plain:10.0.0") == "plain/10.0.0"
    assert found("plain:1.0.0") == found("plain/1.0.0") == "plain/1.0.0"
    assert found("one") == found("one/en") == found("one/en:1.0.0") == "one/en/1.0.0"
    assert found("two/de") == found("two/de/1.0.0") == "two/de/1.0.0"
    there = tmp_path / "plain" / "1.0.0"
    assert prepared.find_prepared(None, str(there)) == there
    assert documents(config_of(there, None))[0] == [b"plain"]
    monkeypatch.setenv("TFDS_DATA_DIR", str(tmp_path))
    assert documents(config_of(None, "two/de"))[0] == [b"two/de"]


def test_a_run_keeps_the_directory_as_an_absolute_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = ModelConfig(vocab_size=257, d_model=8, num_layers=1, num_heads=1)
    config = Config(model=model, data=config_of("sets", "a_set"))
    assert with_absolute_paths(config).data.data_dir == str(tmp_path / "sets")


def refused(config):
    start = time.perf_counter()
    with pytest.raises(UserError) as error:
        open_data(config, 16)
    assert time.perf_counter() - start < 1
    message = str(error.value)
    assert "\n" not in message
    return message


def test_sets_that_are_not_there_say_what_to_run(tmp_path):
    assert refused(config_of(tmp_path, "pg19")) == (
        f"data.name pg19 is not prepared in {tmp_path}; run: python -m modo.prepare tfds pg19 "
        f"--data-dir {tmp_path}, or, for text of your own, python -m modo.prepare text "
        f"--name pg19 --path PATH --data-dir {tmp_path}"
    )
    for name in ("mine", "two/en", "two/de"):
        write_set(tmp_path, name, {"train": [["text"]]})
    assert refused(config_of(tmp_path, "mine:3.0.0")) == (
        f"data.name mine:3.0.0 is not prepared in {tmp_path} (there is 1.0.0); run: python -m "
        f"modo.prepare tfds mine:3.0.0 --data-dir {tmp_path}, or, for text of your own, python -m "
        f"modo.prepare text --name mine --path PATH --data-dir {tmp_path}"
    )
    assert "(there is mine, two); run" in refused(config_of(tmp_path, "pg19/x"))
    assert refused(config_of(tmp_path, "two")) == (
        f"data.name two in {tmp_path} has several configs: two/de, two/en; name one"
    )
    assert "holds no prepared set (dataset_info.json is not" in refused(config_of(tmp_path, None))
    # What tfds leaves when it is killed.
    (tmp_path / "mine" / "1.0.0").rename(tmp_path / "mine" / "incomplete.ABCDEF_1.0.0")
    assert "is not prepared" in refused(config_of(tmp_path, "mine"))


@pytest.mark.parametrize("file_format", FORMATS)
def test_sets_that_are_not_whole_or_lack_what_is_asked_for(tmp_path, file_format):
    splits = {"train": [["some text"] * 9, ["more"]]}
    directory = write_set(tmp_path, "a_set", splits, file_format=file_format)
    config = config_of(tmp_path, "a_set", cache_dir=str(tmp_path / "cache"))
    message = refused(config_of(tmp_path, "a_set", train_split="trian"))
    assert message.startswith(f"{directory} has no split 'trian' (")
    assert message.endswith("there are train")
    assert "has no split 'train[:'" in refused(config_of(tmp_path, "a_set", train_split="train[:"))
    assert "split train[10:] of" in refused(config_of(tmp_path, "a_set", train_split="train[10:]"))
    assert refused(config_of(tmp_path, "a_set", text_field="body")) == (
        f"data.text_field 'body' is not there in {directory}; texts are 'text'"
    )
    assert "'score' is not text but" in refused(config_of(tmp_path, "a_set", text_field="score"))
    file = directory / f"a_set-train.{file_format}-00000-of-00002"
    whole = file.read_bytes()
    file.write_bytes(whole[:-9])
    assert "in split train of" in refused(config) and "cannot be read" in refused(config)
    file.write_bytes(whole[: len(whole) // 9 * 4])
    assert "cannot be read" in refused(config)
    file.write_bytes(b"")
    assert refused(config) == (
        f"{directory} is not whole: {file.name} is missing or empty; prepare the set again"
    )
    file.unlink()
    assert f"{file.name} is missing or empty" in refused(config)
    file.write_bytes(whole)
    info = directory / "dataset_info.json"
    info.write_text(info.read_text()[:50])
    assert f"{directory} is not a whole tfds set: " in refused(config)
    (directory / "features.json").unlink()
    assert f"{directory} is not a whole tfds set: " in refused(config)


def test_text_that_is_not_utf8_and_other_formats(tmp_path):
    directory = write_set(tmp_path, "bad", {"train": [["fine", b"caf\xe9"], ["x"]]})
    assert refused(config_of(tmp_path, "bad", cache_dir=str(tmp_path / "cache"))) == (
        f"example 1 in split train of {directory} is not UTF-8: byte 0xe9 at offset 3"
    )
    directory = write_set(tmp_path, "other", {"train": [["x"]]}, fileFormat="parquet")
    assert refused(config_of(tmp_path, "other")) == (
        f"{directory} is in parquet files; array_record and tfrecord can be read"
    )
