import dataclasses
import os

import numpy as np
import pytest

from modo.config import DataConfig
from modo.data import open_data
from modo.data.files import find_files
from modo.data.held_out import tail_start
from modo.data.source import open_corpus, read_plays
from modo.errors import UserError


def text_config(path, **fields):
    return DataConfig(source="text", path=str(path), **fields)


def write(path, content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


@pytest.mark.quick
def test_the_built_in_corpus_is_38_plays_and_holds_out_the_tempest():
    plays = read_plays()
    assert len(plays) == 38 and list(plays) == sorted(plays)
    assert sum(map(len, plays.values())) == 4_969_986
    assert all(text.isascii() for text in plays.values())
    corpus = open_corpus(DataConfig())
    train = list(corpus.train.documents())
    assert len(train) == 37
    (held_out,) = corpus.validation.documents()
    assert len(held_out) == 96_240 and held_out.startswith(b"The Tempest\n")
    assert held_out not in train
    assert sorted([*train, held_out]) == sorted(plays.values())


def test_a_file_a_directory_and_a_glob_name_documents(tmp_path):
    for name, content in {
        "b.txt": "bee",
        "a/z.txt": "zed",
        "a/note.md": "no",
        "c.txt": "sea",
    }.items():
        write(tmp_path / name, content)
    held_out = write(tmp_path / "held" / "out.md", "held out")

    def train(path):
        config = text_config(path, validation_path=str(held_out))
        assert list(open_corpus(config).validation.documents()) == [b"held out"]
        return list(open_corpus(config).train.documents())

    assert train(tmp_path / "b.txt") == [b"bee"]
    assert train(tmp_path) == [b"zed", b"bee", b"sea"]
    assert train(tmp_path / "*.txt") == [b"bee", b"sea"]
    assert train(tmp_path / "**" / "*.md") == [b"no"]  # the held-out file left out
    assert train(tmp_path / "a" / "[mnz]*") == [b"no", b"zed"]


def test_a_path_with_glob_characters_in_its_name_is_taken_as_it_is(tmp_path):
    write(tmp_path / "[draft] a" / "x.txt", "in brackets\n" * 9)
    assert list(open_corpus(text_config(tmp_path / "[draft] a")).train.documents())
    assert list(open_corpus(text_config(tmp_path / "[draft] a" / "x.txt")).train.documents())


@pytest.mark.quick
def test_links_that_lead_back_up_are_followed_once(tmp_path):
    write(tmp_path / "text" / "a" / "x.txt", "in a loop " * 30)
    write(tmp_path / "text" / ".hidden" / "y.txt", "hidden " * 30)
    write(tmp_path / "elsewhere" / "z.txt", "linked " * 30)
    os.symlink(tmp_path / "elsewhere", tmp_path / "text" / "linked")
    for name in ("one", "two", "three"):  # three ways at every depth: 3 ** depth paths
        os.symlink(tmp_path / "text", tmp_path / "text" / "a" / name)
    paths = find_files(str(tmp_path / "text"), "data.path")
    assert [os.path.basename(path) for path in paths] == ["x.txt", "z.txt"]


def test_the_home_directory_is_expanded(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write(tmp_path / "x.txt", "home " * 30)
    assert list(open_corpus(text_config("~/x.txt")).train.documents())


@pytest.mark.parametrize("seed", range(20))
def test_the_tail_of_each_document_is_held_out(tmp_path, seed):
    rng = np.random.default_rng(seed)
    letters = list("abc é蔵🎭\n" if seed % 2 else "abcé🎭")
    texts = ["".join(rng.choice(letters, rng.integers(40, 400))) + "." for _ in range(5)]
    for i, text in enumerate(texts):
        write(tmp_path / f"{i}.txt", text)
    fraction = float(rng.uniform(0.05, 0.9))
    corpus = open_corpus(text_config(tmp_path, validation_fraction=fraction))
    pairs = list(zip(corpus.train.documents(), corpus.validation.documents(), strict=True))
    for text, (head, tail) in zip(texts, pairs, strict=True):
        assert head.decode() + tail.decode() == text  # decode: cut between characters
        wanted = len(text.encode()) * fraction
        assert wanted - 1 < len(tail) <= 1.5 * wanted + 4


def test_the_cut_prefers_a_line_start():
    text = b"one\ntwo two two\nthree three\n"
    assert text[tail_start(text, 0.4) :] == b"three three\n"
    assert text[tail_start(text, 12 / 28) :] == b"three three\n"  # already there
    assert text[tail_start(text, 0.1) :] == b"e\n"  # no line start near
    assert tail_start(b"short", 0.05) == 5


def refused(config):
    with pytest.raises(UserError) as error:
        open_data(config, 16)
    message = str(error.value)
    assert "\n" not in message
    return message


@pytest.fixture
def config(tmp_path):
    """Reads tmp_path/text, which each test fills."""
    return text_config(tmp_path / "text", cache_dir=str(tmp_path / "cache"))


@pytest.mark.quick
def test_paths_that_name_nothing_are_refused(tmp_path, config):
    path = str(tmp_path / "text")
    assert refused(config) == f"data.path {path} does not exist"
    os.mkdir(path)
    assert refused(config) == f"data.path {path} is a directory without *.txt or *.txt.gz files"
    glob = dataclasses.replace(config, path=path + "/*.md")
    assert refused(glob) == f"data.path {path}/*.md matches no files"
    write(tmp_path / "text" / "a.txt", "words " * 20)
    missing = dataclasses.replace(config, validation_path=path + "/b.txt")
    assert refused(missing) == f"data.validation_path {path}/b.txt does not exist"
    same = dataclasses.replace(config, validation_path=path + "/a.txt")
    assert refused(same) == (
        f"data.validation_path {path}/a.txt holds out every file of data.path {path}"
    )
    os.symlink(path + "/gone", path + "/link")
    broken = dataclasses.replace(config, path=path + "/link")
    assert refused(broken) == f"data.path {path}/link is not a file or directory that can be read"


@pytest.mark.quick
def test_files_that_hold_no_text_are_refused(tmp_path, config):
    write(tmp_path / "text" / "a.txt", "words " * 20)
    bad = write(tmp_path / "text" / "b.txt", b"")
    assert refused(config) == f"{bad} is empty"
    write(bad, b" \n\t\n")
    assert refused(config) == f"{bad} holds only white space (4 bytes)"
    write(bad, "naïve ".encode() + b"caf\xe9 noir")
    assert refused(config) == f"{bad} is not UTF-8 text: byte 0xe9 at offset 10"


def test_an_unreadable_file_is_refused(tmp_path, config, monkeypatch):
    bad = write(tmp_path / "text" / "b.txt", "words " * 20)
    really_open = open

    def denied(path, *args, **kwargs):  # permission bits do not stop root
        if path == str(bad):
            raise PermissionError(13, "Permission denied", path)
        return really_open(path, *args, **kwargs)

    monkeypatch.setattr("builtins.open", denied)
    assert refused(config) == f"cannot read {bad}: Permission denied"


@pytest.mark.quick
def test_too_little_text_is_refused(tmp_path, config):
    path = write(tmp_path / "text" / "a.txt", "elevenbytes")
    whole = dataclasses.replace(config, path=str(path), validation_path=__file__)
    assert refused(whole) == "training text has 12 tokens, a row of train.length 16 needs 17"
    write(path, "sixteen bytes...")
    assert len(open_data(whole, 16).train) == 1
    assert refused(config) == (
        f"data.validation_fraction 0.05 holds out nothing in {path}: too little text; change it "
        "or name what to hold out"
    )
    write(path, "🎭")
    assert refused(dataclasses.replace(config, validation_fraction=0.9)) == (
        f"data.validation_fraction 0.9 leaves nothing to train on in {path}: too little text; "
        "change it or name what to hold out"
    )
