import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from modo.data.source import TextFiles
from modo.data.token_file import default_cache_dir, open_token_file
from modo.data.tokenizer import ByteTokenizer
from modo.errors import UserError

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
    file = open_token_file(DOCUMENTS, ByteTokenizer(), str(tmp_path))
    assert file.tokens.dtype == np.uint16
    assert file.tokens.tolist() == flat(DOCUMENTS)
    assert file.offsets.tolist() == [0, 6, 7, 15]
    assert (file.num_tokens, file.num_documents) == (15, 3)
    assert np.fromfile(file.path, np.uint16).tolist() == flat(DOCUMENTS)
    assert sorted(os.listdir(tmp_path)) == sorted(
        os.path.basename(file.path).split(".")[0] + end for end in (".tokens", ".documents.npy")
    )


def test_a_large_vocabulary_takes_32_bits(tmp_path):
    file = open_token_file([b"AB"], WideTokenizer(), str(tmp_path))
    assert file.tokens.dtype == np.uint32
    assert file.tokens.tolist() == [70_256, 70_065, 70_066]


@pytest.mark.quick
def test_the_second_opening_reads_what_the_first_wrote(tmp_path):
    first = open_token_file(DOCUMENTS, ByteTokenizer(), str(tmp_path))
    before = {entry.name: entry.stat() for entry in os.scandir(tmp_path)}
    second = open_token_file(DOCUMENTS, NoTokenizer(), str(tmp_path))
    after = {entry.name: entry.stat() for entry in os.scandir(tmp_path)}
    assert second.path == first.path and second.tokens.tolist() == flat(DOCUMENTS)
    assert {n: (s.st_ino, s.st_mtime_ns) for n, s in after.items()} == {
        n: (s.st_ino, s.st_mtime_ns) for n, s in before.items()
    }


@pytest.mark.quick
def test_other_contents_are_another_file(tmp_path):
    splits = [[b"ab", b"c"], [b"a", b"bc"], [b"abc"], [b"c", b"ab"], [b"ab", b"c", b""]]
    files = [open_token_file(split, ByteTokenizer(), str(tmp_path)) for split in splits]
    files.append(open_token_file(splits[0], WideTokenizer(), str(tmp_path)))
    assert len({file.path for file in files}) == len(files)
    for split, file in zip(splits, files, strict=False):
        assert file.tokens.tolist() == flat(split)


def test_local_files_are_known_by_their_contents_not_their_times(tmp_path):
    text = tmp_path / "a.txt"
    text.write_text("to be")
    cache = str(tmp_path / "cache")
    first = open_token_file(TextFiles((str(text),), "whole"), ByteTokenizer(), cache)
    os.utime(text, (1, 1))
    again = open_token_file(TextFiles((str(text),), "whole"), NoTokenizer(), cache)
    assert again.path == first.path
    times = os.stat(text)
    text.write_text("or no")  # as long as before
    os.utime(text, ns=(times.st_atime_ns, times.st_mtime_ns))
    changed = open_token_file(TextFiles((str(text),), "whole"), ByteTokenizer(), cache)
    assert changed.path != first.path and changed.tokens.tolist() == flat([b"or no"])


@pytest.mark.quick
@pytest.mark.parametrize("end", [".tokens", ".documents.npy"])
@pytest.mark.parametrize("damage", ["missing", "empty", "truncated", "longer", "zeros", "noise"])
def test_a_damaged_file_is_made_again(tmp_path, end, damage):
    file = open_token_file(DOCUMENTS, ByteTokenizer(), str(tmp_path))
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
    again = open_token_file(DOCUMENTS, ByteTokenizer(), str(tmp_path))
    assert again.tokens.tolist() == flat(DOCUMENTS) and again.offsets.tolist() == [0, 6, 7, 15]
    if (end, damage) != (".documents.npy", "longer"):  # what follows an array is harmless
        assert path.read_bytes() == content


def test_a_process_killed_half_way_leaves_nothing_that_is_taken_for_whole(tmp_path):
    program = """if True:
        import sys, time
        from modo.data.token_file import open_token_file
        from modo.data.tokenizer import ByteTokenizer
        class Slow(ByteTokenizer):
            def encode(self, text):
                if text == b"two":
                    print("half way", flush=True)
                    time.sleep(600)
                return super().encode(text)
        open_token_file([b"one" * 100_000, b"two"], Slow(), sys.argv[1])
    """
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"half way\n"
        process.kill()
    (leftover,) = os.listdir(tmp_path)
    assert leftover.endswith(".tmp")
    documents = [b"one" * 100_000, b"two"]
    file = open_token_file(documents, ByteTokenizer(), str(tmp_path))
    assert file.tokens.tolist() == flat(documents)


def test_a_failure_leaves_no_file(tmp_path):
    with pytest.raises(AssertionError, match="tokenised again"):
        open_token_file(DOCUMENTS, NoTokenizer(), str(tmp_path))
    assert os.listdir(tmp_path) == []


def test_processes_may_make_the_same_file_at_once(tmp_path):
    program = """if True:
        import sys
        from modo.data.token_file import open_token_file
        from modo.data.tokenizer import ByteTokenizer
        print("ready", flush=True)
        sys.stdin.readline()
        documents = [bytes([i]) * 20_000 for i in range(100)]
        file = open_token_file(documents, ByteTokenizer(), sys.argv[1])
        assert file.tokens.tolist() == [t for text in documents for t in (256, *text)]
    """
    command = [sys.executable, "-c", program, str(tmp_path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    processes = [subprocess.Popen(command, **pipes) for _ in range(3)]
    for process in processes:
        assert process.stdout.readline() == b"ready\n"
    for process in processes:
        process.stdin.write(b"\n")
        process.stdin.flush()
    for process in processes:
        process.communicate()
        assert process.returncode == 0
    assert len(os.listdir(tmp_path)) == 2


def test_text_that_changes_while_it_is_read_is_refused(tmp_path):
    class Changing:
        reads = 0

        def __iter__(self):
            self.reads += 1
            return iter([b"version %d" % self.reads])

    with pytest.raises(UserError, match="changed while they were read; run again"):
        open_token_file(Changing(), ByteTokenizer(), str(tmp_path))
    assert os.listdir(tmp_path) == []


@pytest.mark.quick
def test_a_cache_that_cannot_be_written_to_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(UserError) as error:
            open_token_file(DOCUMENTS, ByteTokenizer(), str(path))
        assert str(error.value).startswith(f"cannot write to data.cache_dir {path}: ")
        assert "\n" not in str(error.value)


def test_the_default_cache_follows_the_environment(monkeypatch):
    monkeypatch.setenv("HOME", "/home/someone")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert default_cache_dir() == "/elsewhere/modo"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache_dir() == "/home/someone/.cache/modo"


def test_pickling_leaves_the_tokens_in_their_file(tmp_path):
    file = open_token_file([b"x" * 100_000], ByteTokenizer(), str(tmp_path))
    assert len(file.tokens) == 100_001
    pickled = pickle.dumps(file)
    assert len(pickled) < 1000
    assert np.array_equal(pickle.loads(pickled).tokens, file.tokens)
