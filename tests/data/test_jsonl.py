import gzip
import json
import os
import time

import pytest

from modo.config import DataConfig
from modo.data import jsonl, open_data, split
from modo.data.source import open_corpus
from modo.errors import UserError


def lines(texts, field="text"):
    return "".join(json.dumps({"id": i, field: text}) + "\n" for i, text in enumerate(texts))


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    content = content if isinstance(content, bytes) else content.encode()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)
    return path


def config_of(path, **fields):
    return DataConfig(source="jsonl", path=str(path), **fields)


def documents(config):
    corpus = open_corpus(config)
    return list(corpus.train.documents()), list(corpus.validation.documents())


@pytest.mark.quick
def test_each_line_is_a_document(tmp_path):
    held_out = write(tmp_path / "held" / "out.json", lines(["held out"]))
    write(tmp_path / "b.jsonl", lines(["bee", "naïve 🎭\n"]) + "\n  \r\n" + lines([" \n", "", "d"]))
    write(tmp_path / "a" / "z.jsonl.gz", lines(["zed"]).rstrip())
    write(tmp_path / "a" / "n.txt", "no")

    def train(path):
        train, validation = documents(config_of(path, validation_path=str(held_out)))
        assert validation == [b"held out"]
        return train

    bees = [b"bee", "naïve 🎭\n".encode(), b"d"]
    assert train(tmp_path / "b.jsonl") == bees
    assert train(tmp_path) == [b"zed", *bees]
    assert train(tmp_path / "*" / "*.gz") == [b"zed"]
    path = write(tmp_path / "c", lines(["sea " * 30], "body"))
    assert b"".join(sum(documents(config_of(path, text_field="body")), [])) == b"sea " * 30


@pytest.mark.parametrize("size", [1, 7, 64, 1000])
def test_a_large_file_is_cut_at_line_starts(tmp_path, monkeypatch, size):
    monkeypatch.setattr(jsonl, "SHARD_BYTES", size)
    texts = ["x" * (37 * i % 90) + str(i) for i in range(40)]
    path = write(tmp_path / "a.jsonl", lines(texts[:20]) + "\n\n" + lines(texts[20:]).rstrip())
    shards = jsonl.jsonl_shards((str(path),), "text")
    assert sum(shard.size for shard in shards) == os.path.getsize(path)
    read = [text.decode() for shard in shards for text in shard.read()]
    assert read == texts
    ranges = jsonl._cut(str(path))
    assert len(ranges) == -(-os.path.getsize(path) // size)
    offsets = [offset for r in ranges for offset, _ in jsonl.read_lines(r, "text")]
    content = path.read_bytes()
    assert all(offset == 0 or content[offset - 1 :].startswith(b"\n{") for offset in offsets)


def test_large_files_make_several_shards_and_small_ones_share(tmp_path, monkeypatch):
    monkeypatch.setattr(jsonl, "SHARD_BYTES", 100)
    monkeypatch.setattr(split.grouped, "__defaults__", (100,))
    for i in range(9):
        write(tmp_path / f"{i}.jsonl", lines(["0123456789"] * 2))  # 62 bytes
    write(tmp_path / "large.jsonl", lines(["0123456789"] * 20))
    shards = jsonl.jsonl_shards(tuple(sorted(map(str, tmp_path.iterdir()))), "text")
    assert [len(list(shard.read())) for shard in shards[:4]] == [4, 4, 4, 4]
    assert len(shards) > 9 and sum(len(list(shard.read())) for shard in shards) == 38


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        (b'{"text": "a"', "not JSON: Expecting ',' delimiter at character 12"),
        (b'{"text": "a"} x', "not JSON: Extra data at character 14"),
        (b'["a"]', "not a JSON object but an array"),
        (b"1e5", "not a JSON object but a number"),
        (b'{"body": "a", "id": 1}', "no field 'text' (data.text_field); there are 'body', 'id'"),
        (b"{}", "no field 'text' (data.text_field); there are none"),
        (b'{"text": null}', "field 'text' is not a string but null"),
        (b'{"text": {"a": 1}}', "field 'text' is not a string but an object"),
        (b'{"text": true}', "field 'text' is not a string but a boolean"),
        (b'{"text": "\xff"}', "not UTF-8: byte 0xff at offset 10 of the line"),
        (rb'{"text": "ab\ud800"}', r"field 'text' has a lone surrogate \ud800 at character 2"),
        (b"[" * 100_000, "not JSON that can be read: nested too deeply"),
    ],
)
def test_a_bad_line_is_one_error_with_its_place(tmp_path, line, reason, monkeypatch):
    monkeypatch.setattr(jsonl, "SHARD_BYTES", 50)
    path = write(tmp_path / "a.jsonl", lines(["fine"] * 5).encode() + b"\n" + line + b"\n")
    packed = write(tmp_path / "a.jsonl.gz", path.read_bytes())
    for file in (path, packed):
        with pytest.raises(UserError) as error:
            open_data(config_of(file, cache_dir=str(tmp_path / "cache")), 16)
        assert str(error.value) == f"{file} line 7: {reason}"


def test_damaged_gzip_files_are_refused(tmp_path):
    text = lines([f"{i} words" for i in range(300)])
    path = write(tmp_path / "a.jsonl.gz", text)
    whole = path.read_bytes()
    for damaged in (text.encode(), whole[:-30], whole[:50] + b"\0" * 20 + whole[70:]):
        path.write_bytes(damaged)
        with pytest.raises(UserError, match="a.jsonl.gz: not a whole gzip file") as error:
            documents(config_of(path))
        assert "\n" not in str(error.value)


@pytest.mark.quick
def test_gzip_text(tmp_path):
    write(tmp_path / "text" / "a.txt", "plain\n" * 50)
    write(tmp_path / "text" / "deep" / "b.txt.gz", "packed\n" * 50)
    config = DataConfig(source="text", path=str(tmp_path / "text"), validation_fraction=0.1)
    train, validation = documents(config)
    assert train == [b"plain\n" * 45, b"packed\n" * 45]
    assert validation == [b"plain\n" * 5, b"packed\n" * 5]


def test_whole_documents_are_held_out_and_more_never_move_one(tmp_path):
    texts = [f"document {i}" for i in range(1000)]
    config = config_of(tmp_path / "a.jsonl")
    write(tmp_path / "a.jsonl", lines(texts[:400]))
    before = documents(config)
    write(tmp_path / "a.jsonl", lines(texts[400:] + texts[:400] + texts[:10]))
    train, validation = documents(config)
    assert not set(train) & set(validation)
    assert sorted(train + validation) == sorted(t.encode() for t in texts + texts[:10])
    assert set(before[0]) <= set(train) and set(before[1]) <= set(validation)
    assert 25 < len(validation) < 75


def test_the_ends_of_few_documents_are_held_out(tmp_path):
    texts = [f"document {i}\n" * 20 for i in range(199)]  # 200 are 10 / 0.05
    write(tmp_path / "a.jsonl", lines(["", *texts, " "]))
    train, validation = documents(config_of(tmp_path / "a.jsonl"))
    assert [a + b for a, b in zip(train, validation, strict=True)] == [t.encode() for t in texts]
    write(tmp_path / "b.jsonl", lines(["one more\n" * 20]))
    train, validation = documents(config_of(tmp_path))
    assert sorted(train + validation) == sorted(t.encode() for t in [*texts, "one more\n" * 20])


def test_nothing_held_out_or_no_text_is_refused(tmp_path):
    config = config_of(tmp_path / "a.jsonl", cache_dir=str(tmp_path / "cache"))
    write(tmp_path / "a.jsonl", lines(["same"] * 500))
    with pytest.raises(UserError, match="holds out nothing in .*a.jsonl: too little text"):
        open_data(config, 16)
    write(tmp_path / "a.jsonl", lines([""] * 500))
    with pytest.raises(UserError, match="leaves nothing to train on in .*a.jsonl: too little text"):
        open_data(config, 16)
    with pytest.raises(UserError, match=r"is a directory without \*.jsonl or \*.jsonl.gz files"):
        open_corpus(config_of(tmp_path / "cache"))


def test_a_line_is_found_fast_in_a_large_file(tmp_path):
    """An error's line number is counted, not parsed."""
    path = write(tmp_path / "a.jsonl", lines(["x" * 100]) * 50_000 + "bad\n")
    start = time.perf_counter()
    with pytest.raises(UserError, match="line 50001: not JSON"):
        list(jsonl.read_lines((str(path), os.path.getsize(path) - 4, None), "text"))
    assert time.perf_counter() - start < 1
