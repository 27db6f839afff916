import os
import pickle
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest

from modo.data.split import Shard, Split
from modo.data.text import text_shards
from modo.data.token_file import default_cache_dir, open_token_file
from modo.data.tokenizer import ByteTokenizer
from modo.errors import UserError
from tests.data.splits import split_of
from tests.train.helpers import ROOT, subprocess_environment

DOCUMENTS = [b"first", b"", "dritté".encode()]


class WideTokenizer(ByteTokenizer):
    """Bytes as tokens from 70000."""

    vocab_size = 70_257
    bos_token = 70_256
    fingerprint = "wide"

    def encode(self, text):
        return super().encode(text).astype(np.uint32) + 70_000


class NoTokenizer(ByteTokenizer):
    """Fails when asked to tokenise."""

    def encode(self, text):
        raise AssertionError("tokenised again")


def flat(documents):
    return [token for text in documents for token in (256, *text)]


@pytest.mark.quick
def test_a_split_becomes_one_flat_file(tmp_path):
    file = open_token_file(split_of(DOCUMENTS), ByteTokenizer(), str(tmp_path))
    assert file.tokens.dtype == np.uint16
    assert file.tokens.tolist() == flat(DOCUMENTS)
    assert file.offsets.tolist() == [0, 6, 7, 15]
    assert (file.num_tokens, file.num_documents) == (15, 3)
    assert np.fromfile(file.path, np.uint16).tolist() == flat(DOCUMENTS)
    assert sorted(os.listdir(tmp_path)) == sorted(
        os.path.basename(file.path).split(".")[0] + end
        for end in (".tokens", ".documents.npy", ".json")
    )


def test_a_large_vocabulary_takes_32_bits(tmp_path):
    file = open_token_file(split_of([b"AB"]), WideTokenizer(), str(tmp_path))
    assert file.tokens.dtype == np.uint32
    assert file.tokens.tolist() == [70_256, 70_065, 70_066]


@pytest.mark.quick
def test_the_second_opening_reads_what_the_first_wrote(tmp_path):
    first = open_token_file(split_of(DOCUMENTS), ByteTokenizer(), str(tmp_path))
    before = {entry.name: entry.stat() for entry in os.scandir(tmp_path)}
    second = open_token_file(split_of(DOCUMENTS), NoTokenizer(), str(tmp_path))
    after = {entry.name: entry.stat() for entry in os.scandir(tmp_path)}
    assert second.path == first.path and second.tokens.tolist() == flat(DOCUMENTS)
    assert {n: (s.st_ino, s.st_mtime_ns) for n, s in after.items()} == {
        n: (s.st_ino, s.st_mtime_ns) for n, s in before.items()
    }


@pytest.mark.quick
def test_other_contents_are_another_file(tmp_path):
    splits = [[b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"c", b"ab"], [b"ab", b"c", b""]]
    files = [open_token_file(split_of(split), ByteTokenizer(), str(tmp_path)) for split in splits]
    files.append(open_token_file(split_of(splits[0]), WideTokenizer(), str(tmp_path)))
    assert len({file.path for file in files}) == len(files)
    for split, file in zip(splits, files, strict=False):
        assert file.tokens.tolist() == flat(split)


def test_a_file_that_was_written_to_is_read_again(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("to be")
    cache = str(tmp_path / "cache")
    first = open_token_file(Split(text_shards((str(text),)), "no text"), ByteTokenizer(), cache)
    again = open_token_file(Split(text_shards((str(text),)), "no text"), NoTokenizer(), cache)
    assert again.path == first.path
    times = os.stat(text)
    text.write_text("or no")  # as long as before
    os.utime(text, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = open_token_file(Split(text_shards((str(text),)), "no text"), ByteTokenizer(), cache)
    assert changed.tokens.tolist() == flat([b"or no"])
    assert changed.digest != first.digest
    text.write_text("to be")
    back = open_token_file(Split(text_shards((str(text),)), "no text"), ByteTokenizer(), cache)
    assert back.digest == first.digest


@pytest.mark.quick
@pytest.mark.parametrize("end", [".tokens", ".documents.npy", ".json"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer", "zeros", "noise"])
def test_a_damaged_file_is_made_again(tmp_path, end, damage):
    file = open_token_file(split_of(DOCUMENTS), ByteTokenizer(), str(tmp_path))
    path = Path(file.path.removesuffix(".tokens") + end)
    content = path.read_bytes()
    if damage == "missing":
        path.unlink()
    else:
        contents = {
            "empty": b"",
            "truncated": content[:-2],
            "longer": content + b"\0\0",
            "zeros": bytes(len(content)),
            "noise": b"\x93NUMPY" + b"\x07" * len(content),
        }
        path.write_bytes(contents[damage])
    again = open_token_file(split_of(DOCUMENTS), ByteTokenizer(), str(tmp_path))
    assert again.tokens.tolist() == flat(DOCUMENTS) and again.offsets.tolist() == [0, 6, 7, 15]
    if (end, damage) != (".documents.npy", "longer"):  # what follows an array is harmless
        assert path.read_bytes() == content


def test_a_process_killed_half_way_is_gone_on_from(tmp_path):
    program = """if True:
        import sys, time
        from modo.data.token_file import open_token_file
        from modo.data.tokenizer import ByteTokenizer
        from tests.data.splits import split_of
        class Slow(ByteTokenizer):
            def encode(self, text):
                if text == b"two":
                    time.sleep(600)
                return super().encode(text)
        shards = [[b"one" * 100_000], [b"two"], [b"three"]]
        open_token_file(split_of(*shards), Slow(), sys.argv[1])
    """
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = ["00000.documents.npy", "00002.documents.npy"]
    with subprocess.Popen(command, cwd=ROOT, env=subprocess_environment()) as process:
        deadline = time.time() + 60
        while not all(list(tmp_path.glob(f"*.parts/{name}")) for name in done):
            assert process.poll() is None and time.time() < deadline
            time.sleep(0.05)
        process.kill()
    assert [path.suffix for path in tmp_path.iterdir()] == [".parts"]

    class Only(ByteTokenizer):
        def encode(self, text):
            assert text == b"two"
            return super().encode(text)

    shards = [[b"one" * 100_000], [b"two"], [b"three"]]
    file = open_token_file(split_of(*shards), Only(), str(tmp_path))
    assert file.tokens.tolist() == flat(sum(shards, []))
    assert file.num_bytes == 300_008 and not list(tmp_path.glob("*.parts"))


def test_a_failure_leaves_no_file(tmp_path):
    with pytest.raises(AssertionError, match="tokenised again"):
        open_token_file(split_of(DOCUMENTS), NoTokenizer(), str(tmp_path))
    assert [path.suffix for path in tmp_path.iterdir()] == [".parts"]
    assert open_token_file(split_of(DOCUMENTS), ByteTokenizer(), str(tmp_path)).num_documents == 3


@pytest.mark.quick
def test_shards_are_joined_in_order(tmp_path):
    """The first shard ends last, and there are more than threads."""
    first_may_go = threading.Event()

    def slow():
        assert first_may_go.wait(60)
        yield b"first"

    def last():
        first_may_go.set()
        yield b"last"

    middle = split_of(*([f"shard {i}".encode()] * (i % 3) for i in range(40))).shards
    shards = (Shard(lambda: "a", 5, slow), *middle, Shard(lambda: "z", 4, last))
    split = Split(shards, "there is no text")
    threads = os.cpu_count
    os.cpu_count = lambda: 3
    try:
        file = open_token_file(split, ByteTokenizer(), str(tmp_path))
    finally:
        os.cpu_count = threads
    wanted = [b"first", *(f"shard {i}".encode() for i in range(40) for _ in range(i % 3)), b"last"]
    assert file.tokens.tolist() == flat(wanted)
    one = open_token_file(split_of(wanted), ByteTokenizer(), str(tmp_path))
    assert one.path != file.path and one.digest == file.digest


@pytest.mark.quick
def test_no_document_at_all_is_refused(tmp_path):
    with pytest.raises(UserError, match="^there is no text$"):
        open_token_file(split_of([], []), ByteTokenizer(), str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_processes_may_make_the_same_file_at_once(tmp_path):
    program = """if True:
        import sys
        from modo.data.token_file import open_token_file
        from modo.data.tokenizer import ByteTokenizer
        from tests.data.splits import split_of
        class Telling(ByteTokenizer):
            def encode(self, text):
                print("tokenises", flush=True)
                return super().encode(text)
        print("ready", flush=True)
        sys.stdin.readline()
        documents = [bytes([i]) * 20_000 for i in range(100)]
        file = open_token_file(split_of(documents), Telling(), sys.argv[1])
        assert file.tokens.tolist() == [t for text in documents for t in (256, *text)]
    """
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [
        subprocess.Popen(command, cwd=ROOT, env=subprocess_environment(), **pipes) for _ in range(3)
    ]
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b"\n")
        process.stdin.flush()
    told = [process.communicate()[0].count(b"tokenises") for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sorted(told) == [0, 0, 100]  # the others waited for the first
    assert len(os.listdir(tmp_path)) == 3


def test_text_that_changes_while_it_is_read_is_refused(tmp_path):
    versions = iter(range(9))
    shard = Shard(lambda: f"version {next(versions)}", 4, lambda: iter([b"text"]))
    with pytest.raises(UserError, match="changed while they were read; run again"):
        open_token_file(Split((shard,), ""), ByteTokenizer(), str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.quick
def test_a_cache_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError) as error:
            open_token_file(split_of(DOCUMENTS), ByteTokenizer(), str(path))
        assert str(error.value).startswith(f"cannot write to data.cache_dir {path}: ")
        assert "\n" not in str(error.value)


def test_the_default_cache_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_cache_dir() == "/elsewhere/modo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == "/home/someone/.cache/modo"


def test_pickling_leaves_the_tokens_in_their_file(tmp_path):
    file = open_token_file(split_of([b"x" * 100_000]), ByteTokenizer(), str(tmp_path))
    assert len(file.tokens) == 100_001
    pickled = pickle.dumps(file)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).tokens, file.tokens)
