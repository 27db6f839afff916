"""The command that trains a tokenizer."""

import hashlib
import pathlib
import subprocess
import sys

import pytest

import modo.train_tokenizer
from modo.data import get_tokenizer
from modo.errors import UserError
from modo.train_tokenizer import train_bpe
from tests.data.tokenizer_files import TEXT
from tests.train.helpers import subprocess_environment

pytestmark = pytest.mark.quick


@pytest.fixture
def arguments(tmp_path) -> list[str]:
    (tmp_path / "a.txt").write_bytes(TEXT)
    data = ["--data.source", "text", "--data.path", str(tmp_path / "a.txt")]
    return [*data, "--vocab-size", "300", "--output", str(tmp_path / "t.json")]


def test_the_training_split_alone_decides(arguments, tmp_path, capsys):
    modo.train_tokenizer.main(arguments)
    out = capsys.readouterr().out
    assert "300 tokens, document start <|begin_of_text|>" in out
    first = (tmp_path / "t.json").read_text()
    tokenizer = get_tokenizer(str(tmp_path / "t.json"))
    assert tokenizer.vocab_size == 300 and tokenizer.bos_token == 0
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT.decode()
    held_out = TEXT[int(0.94 * len(TEXT)) :]
    (tmp_path / "a.txt").write_bytes(TEXT[: -len(held_out) // 2] + b"q" * (len(held_out) // 2))
    modo.train_tokenizer.main([*arguments, "--force"])
    assert (tmp_path / "t.json").read_text() == first
    assert not list(tmp_path.glob(".*"))


def test_the_same_documents_give_the_same_file_however_many_threads():
    program = (
        "import hashlib; from modo.train_tokenizer import train_bpe\n"
        "from tests.data.tokenizer_files import TEXT\n"
        "print(hashlib.sha256(train_bpe([TEXT], 1000).encode()).hexdigest())"
    )
    result = subprocess.run(
        [sys.executable, "-c", program],
        env={**subprocess_environment(), "RAYON_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    here = hashlib.sha256(train_bpe([TEXT], 1000).encode()).hexdigest()
    assert result.stdout.strip() == here


def test_every_text_can_be_written_and_pieces_do_not_matter():
    assert train_bpe([b"\xff\xfe", b""], 257) != ""
    lines = TEXT.splitlines(keepends=True)
    at = next(i for i in range(100, len(lines)) if lines[i - 1].strip() and lines[i][:1].isalpha())
    parts = [b"".join(lines[:at]), b"".join(lines[at:])]
    assert train_bpe(parts, 400) == train_bpe([TEXT], 400)


def test_too_little_text_is_said(arguments, tmp_path, capsys):
    (tmp_path / "a.txt").write_text("ab ab ab\n" * 3)
    modo.train_tokenizer.main([*arguments, "--data.validation_fraction", "0.4"])
    assert "259 tokens (the text has no more pairs)" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--vocab-size", "256"], r"--vocab-size must be in \[257, 16777216\], got 256"),
        (["--vocab-size", "many"], "--vocab-size: invalid int value: 'many'"),
        (["--output", "t.bin"], "--output t.bin must end with .json"),
        (["--output", "nowhere/t.json"], "nowhere/t.json: its directory does not exist"),
        (["--output", ""], "--output: is empty"),
        (["--output", "old.json"], "--output old.json exists; give --force to replace it"),
        (["--output", "d.json", "--force"], "--output d.json is a directory"),
        (["--data.path", "none.txt"], "none.txt does not exist"),
        (["--data.validation_fraction", "0.00001"], "holds out nothing in"),
        (["--data.pth", "none.txt"], "Unrecognized options: --data.pth"),
        (["--config", "nope"], "no config 'nope'"),
    ],
)
def test_bad_arguments_leave_everything_as_it_was(arguments, more, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    pathlib.Path("old.json").write_text("mine")
    pathlib.Path("d.json").mkdir()
    with pytest.raises(UserError, match=message) as caught:
        modo.train_tokenizer.main([*arguments, *more])
    assert "\n" not in str(caught.value)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.txt", "d.json", "old.json"]
    assert pathlib.Path("old.json").read_text() == "mine"


def test_a_full_disk_leaves_the_old_file(arguments, tmp_path, monkeypatch):
    (tmp_path / "t.json").write_text("mine")

    def no_space(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", no_space)
    with pytest.raises(UserError, match="--output .*t.json: No space left on device"):
        modo.train_tokenizer.main([*arguments, "--force"])
    assert (tmp_path / "t.json").read_text() == "mine" and not list(tmp_path.glob(".*"))


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UserError, match=r"pip install 'modo\[bpe\]'"):
        train_bpe([TEXT], 300)


def test_bytes_a_token_on_a_held_out_part(arguments, tmp_path, capsys):
    modo.train_tokenizer.main(arguments)
    line = capsys.readouterr().out.splitlines()[1]
    tokenizer = get_tokenizer(str(tmp_path / "t.json"))
    size = int(line.split()[-3].replace(",", ""))
    tokens = tokenizer.encode(TEXT[-size:])
    assert float(line.split()[0]) == pytest.approx(size / len(tokens), abs=5e-4)
