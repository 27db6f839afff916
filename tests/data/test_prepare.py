import gzip
import importlib.util
import json
import os
import sys
import types
import zipfile

import pytest
import tensorflow_datasets as tfds
from array_record.python import array_record_module

from modo import prepare
from modo.config import DataConfig
from modo.data import open_data, pysrc
from modo.data.prepared import PreparedSet
from modo.data.source import open_corpus
from modo.errors import UserError


def documents(config):
    corpus = open_corpus(config)
    return sorted(corpus.train.documents()), sorted(corpus.validation.documents())


@pytest.fixture
def sets(tmp_path):
    return tmp_path / "sets"


def prepare_text(sets, name, path, *options):
    prepare.main(["text", "--name", name, "--path", str(path), "--data-dir", str(sets), *options])


def contents(directory):
    """Every file below, with what it holds."""
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


def tfds_config(sets, name):
    return DataConfig(source="tfds", name=name, data_dir=str(sets))


@pytest.mark.quick
def test_text_files_become_a_set_with_the_same_splits(tmp_path, sets, capsys):
    books = tmp_path / "books"
    (books / "deep").mkdir(parents=True)
    (books / "a.txt").write_text("to be or not\n" * 80_000)  # 1 MB
    (books / "deep" / "b.txt.gz").write_bytes(gzip.compress("naïve\n".encode() * 100))
    (books / "c.txt").write_text("too short")
    prepare_text(sets, "books", books, "--validation-fraction", "0.1")
    plain = DataConfig(source="text", path=str(books), validation_fraction=0.1)
    assert documents(tfds_config(sets, "books")) == documents(plain)
    assert "tensorflow" not in sys.modules
    assert capsys.readouterr().out == (
        f"prepared {sets}/books/1.0.0: train 3, validation 2 documents\n"
        f"train from it with: --data.source tfds --data.name books --data.data_dir {sets}\n"
    )
    names = PreparedSet(sets / "books" / "1.0.0", "name").shards("train")
    assert {name for shard in names for name in shard.read()} == {
        os.fsencode(path) for path in books.rglob("*.*")
    }
    assert [path.name for path in sets.iterdir()] == ["books"]
    assert [path.name for path in (sets / "books").iterdir()] == ["1.0.0"]


def test_the_order_does_not_depend_on_where_the_files_are(tmp_path, sets):
    corpora = []
    for where in ("here", "there"):
        (tmp_path / where).mkdir()
        for i in range(9):
            (tmp_path / where / f"{i}.txt").write_text(f"document {i}\n" * 30)
        prepare_text(sets, where, tmp_path / where)
        corpora.append(list(open_corpus(tfds_config(sets, where)).train.documents()))
    assert corpora[0] == corpora[1] != sorted(corpora[0])


def test_json_lines_become_a_set_with_the_same_splits(tmp_path, sets):
    for count in (100, 600):
        lines = [json.dumps({"body": f"document {i} {'x' * 40}"}) + "\n" for i in range(count)]
        (tmp_path / "a.jsonl").write_text("".join(lines) + "\n" + lines[0])
        options = ["--jsonl", "--text-field", "body", "--overwrite"]
        prepare_text(sets, "lines", tmp_path / "*.jsonl", *options)
        plain = DataConfig(source="jsonl", path=str(tmp_path / "a.jsonl"), text_field="body")
        train, validation = documents(tfds_config(sets, "lines"))
        assert (train, validation) == documents(plain)
        assert (len(train) == count + 1) == (count == 100)  # parts of all, or whole ones


def refused(*arguments):
    with pytest.raises(UserError) as error:
        prepare.main(list(map(str, arguments)))
    message = str(error.value)
    assert "\n" not in message
    return message


def test_what_is_there_is_replaced_only_when_told_to_and_whole(tmp_path, sets):
    path = tmp_path / "a.txt"
    path.write_text("first words " * 20)
    prepare_text(sets, "books", path)
    before = contents(sets)
    arguments = ["text", "--name", "books", "--path", path, "--data-dir", sets]
    path.write_text("other words " * 20)
    assert refused(*arguments) == f"{sets}/books/1.0.0 is there already; --overwrite replaces it"
    path.write_bytes(b"caf\xe9 " * 20)
    assert "is not UTF-8 text" in refused(*arguments, "--overwrite")
    path.write_text("short")
    assert "0.05 holds out nothing: too little" in refused(*arguments, "--overwrite")
    assert contents(sets) == before
    assert [entry.name for entry in (sets / "books").iterdir()] == ["1.0.0"]
    path.write_text("other words " * 20)
    prepare_text(sets, "books", path, "--overwrite")
    assert documents(tfds_config(sets, "books"))[0][0].startswith(b"other")
    assert [entry.name for entry in (sets / "books").iterdir()] == ["1.0.0"]


def test_a_set_that_could_not_be_made_is_not_there(tmp_path, sets, monkeypatch):
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "fine"}\nnot JSON\n')
    arguments = ["text", "--name", "lines", "--path", path, "--data-dir", sets]
    assert f"{path} line 2: not JSON" in refused(*arguments, "--jsonl")
    assert contents(sets) == {} and list((sets / "lines").iterdir()) == []
    path.write_text("words " * 50)

    def full(*args):
        raise RuntimeError("write() failed: No space left on device\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(array_record_module.ArrayRecordWriter, "write", full, raising=False)
        assert "write() failed: No space left on device" in refused(*arguments)
    assert contents(sets) == {} and list((sets / "lines").iterdir()) == []
    sets.joinpath("file").write_text("")
    arguments[-1] = sets / "file"
    assert f"cannot make {sets}/file/lines/1.0.0: Not a directory" in refused(*arguments)


def test_bad_arguments(tmp_path, sets, monkeypatch):
    path = tmp_path / "a.txt"
    path.write_text("words " * 50)
    arguments = ["text", "--name", "books", "--path", path, "--data-dir", sets]
    assert "arguments are required: --name" in refused("text", "--path", path)
    assert "invalid choice: 'txt'" in refused("txt")
    assert "small letters, digits and _, a letter first" in refused(*arguments, "--name", "My-Set")
    message = "--validation-fraction must be in (0, 1), got 1.5"
    assert refused(*arguments, "--validation-fraction", "1.5") == message
    assert "invalid float value: 'x'" in refused(*arguments, "--validation-fraction", "x")
    assert "--text-field is of JSON lines" in refused(*arguments, "--text-field", "body")
    assert refused(*arguments, "--path", "gone") == "--path gone does not exist"
    assert "without *.jsonl or *.jsonl.gz" in refused(*arguments, "--path", tmp_path, "--jsonl")
    monkeypatch.setattr(prepare, "MOST_TEXT_BYTES", 200)
    assert "needs TensorFlow for more than" in refused(*arguments)
    assert not sets.exists()


def test_help(capsys):
    for arguments in ([], ["text"], ["tfds"], ["pysrc"]):
        with pytest.raises(SystemExit) as stop:
            prepare.main([*arguments, "--help"])
        assert stop.value.code == 0 and "--data-dir" in capsys.readouterr().out or not arguments


class ModoTestSet(tfds.core.GeneratorBasedBuilder):
    """Stands for a public set."""

    VERSION = tfds.core.Version("1.0.0")
    needs = None

    def _info(self):
        features = tfds.features.FeaturesDict({"text": tfds.features.Text()})
        return tfds.core.DatasetInfo(builder=self, features=features)

    def _split_generators(self, dl_manager):
        if self.needs:
            importlib.import_module(self.needs)
        return {"train": self._generate_examples("a"), "test": self._generate_examples("b")}

    def _generate_examples(self, letter):
        for i in range(3):
            yield i, {"text": letter * i}


def test_a_public_set_is_prepared_once(sets, monkeypatch, capsys):
    arguments = ["tfds", "modo_test_set", "--data-dir", str(sets)]
    assert refused(*arguments).startswith("preparing modo_test_set needs TensorFlow: in an env")
    monkeypatch.setattr(prepare, "_is_installed", lambda module: True)
    monkeypatch.setattr(ModoTestSet, "needs", "no_such_module")
    assert refused(*arguments) == (
        "preparing modo_test_set needs no_such_module: pip install 'modo[prepare]'"
    )
    monkeypatch.setattr(ModoTestSet, "needs", "")
    monkeypatch.setattr(ModoTestSet, "_generate_examples", lambda self, letter: iter(()))
    assert refused(*arguments).startswith("cannot prepare modo_test_set: AssertionError: Failed")
    monkeypatch.undo()
    monkeypatch.setattr(prepare, "_is_installed", lambda module: True)
    prepare.main(arguments)
    assert documents(tfds_config(sets, "modo_test_set")) == ([b"a", b"aa"], [b"b", b"bb"])
    before = contents(sets)
    capsys.readouterr()
    prepare.main(arguments)
    assert capsys.readouterr().out == f"already prepared: {sets}/modo_test_set/1.0.0\n"
    assert contents(sets) == before
    assert "tfds has no set modo_tst_set; perhaps you meant modo_test_set" in refused(
        "tfds", "modo_tst_set"
    )


def source(text):
    return f"# {text}\n".encode() * 200


@pytest.fixture
def wheels(tmp_path):
    """Two small wheels, and what of them is kept, by directory."""
    files = {f"one/d{i:02}/{name}.py": source(f"{i} {name}") for i in range(60) for name in "ba"}
    files["one/d00/aa/inner.py"] = source("between a.py and b.py of the directory above")
    others = {
        "one/__config__.py": source("generated"),
        "one/_version.py": source("generated"),
        "one/p_lextab.py": source("generated"),
        "one/_antlr/parser.py": source("generated"),
        "one/short.py": b"pass\n",
        "one/note.txt": source("text"),
        "one/latin.py": b"\xe9" * 600,
    }
    wheels = [tmp_path / "one-1-py3-none-any.whl", tmp_path / "two-1-py3-none-any.whl"]
    with zipfile.ZipFile(wheels[0], "w") as archive:
        for name, text in {**others, **files}.items():
            archive.writestr(name, text)
    with zipfile.ZipFile(wheels[1], "w") as archive:
        archive.writestr("two/copy.py", files["one/d00/a.py"])
        archive.writestr("two/own.py", source("own"))
    kept = {}
    for name, text in sorted({**files, "two/own.py": source("own")}.items()):
        kept.setdefault(os.path.dirname(name), []).append(text)
    return list(map(str, wheels)), kept


@pytest.fixture
def small_pysrc(wheels, monkeypatch):
    """pysrc made of the small wheels; a tenth of the directories for each held-out split."""
    monkeypatch.setattr(pysrc, "download", lambda directory: wheels[0])
    monkeypatch.setattr(pysrc, "HELD_OUT", 0.1)
    monkeypatch.setattr(pysrc, "SHARD_BYTES", 9000)
    monkeypatch.setattr(pysrc, "SHA256", pysrc.digest(pysrc.extract(wheels[0])))
    return wheels[1]


def pysrc_config(directory, **fields):
    return DataConfig(source="pysrc", data_dir=str(directory), **fields)


@pytest.mark.quick
def test_pysrc(small_pysrc, tmp_path, capsys):
    where = tmp_path / "made"
    prepare.main(["pysrc", "--data-dir", str(where)])
    wholes, files = {}, {}
    for name in ("validation", "test"):
        files["train"], files[name] = documents(pysrc_config(where, validation_split=name))
        whole = pysrc_config(where, validation_split=name, documents="directories")
        wholes["train"], wholes[name] = documents(whole)
    directories = {b"".join(texts): texts for texts in small_pysrc.values()}
    assert sorted(sum(wholes.values(), [])) == sorted(directories)  # each in one of the splits
    for name, texts in wholes.items():
        assert 0 < len(texts) < (12 if name != "train" else 60)
        assert files[name] == sorted(sum((directories[text] for text in texts), []))
    shards = open_corpus(pysrc_config(where)).train.shards
    assert len(shards) > 2 and all(shard.size > 0 for shard in shards)
    assert f"  test: {2 * len(wholes['test'])} files" in capsys.readouterr().out
    prepare.main(["pysrc", "--data-dir", str(where)])
    assert capsys.readouterr().out.startswith("already made: ")


def test_pysrc_that_is_not_there_or_not_as_it_was(small_pysrc, tmp_path, monkeypatch):
    where = tmp_path / "made"
    with pytest.raises(UserError) as error:
        open_data(pysrc_config(where), 16)
    assert str(error.value) == (
        f"pysrc is not in {where}; run: python -m modo.prepare pysrc --data-dir {where}"
    )
    monkeypatch.setattr(pysrc, "SHA256", "0" * 64)
    assert "hold other sources than pysrc is made of: SHA-256" in refused(
        "pysrc", "--data-dir", where
    )
    assert contents(where) == {}


def test_pysrc_that_is_damaged(small_pysrc, tmp_path):
    where = tmp_path / "made"
    prepare.main(["pysrc", "--data-dir", str(where)])
    (directory,) = where.iterdir()
    part = directory / "train-0.jsonl.gz"
    whole = part.read_bytes()

    def message():
        with pytest.raises(UserError) as error:
            open_data(DataConfig(source="pysrc", data_dir=str(where), cache_dir=str(tmp_path)), 16)
        return str(error.value)

    part.unlink()
    assert message() == f"cannot read {part}: No such file or directory"
    part.write_bytes(whole[:-20])
    assert message().startswith(f"cannot read {part}: not a whole gzip file (")
    part.write_bytes(gzip.compress(b'{"name": "x"}\n'))
    again = "make it again: python -m modo.prepare pysrc --overwrite"
    assert message() == f"{part} is damaged; {again}"
    (directory / "pysrc.json").write_text("{")
    assert message() == f"{directory / 'pysrc.json'} is damaged; {again}"
    prepare.main(["pysrc", "--data-dir", str(where), "--overwrite"])
    assert part.read_bytes() == whole and len(documents(pysrc_config(where))[0]) > 9


def test_pip_that_fails_is_one_line(tmp_path, monkeypatch):
    fail = types.SimpleNamespace(
        returncode=1, stderr="WARNING: x\nERROR: No such thing\nERROR: y\n"
    )
    monkeypatch.setattr(pysrc.subprocess, "run", lambda command, **options: fail)
    assert refused("pysrc", "--data-dir", tmp_path / "made") == (
        "pip download failed: ERROR: No such thing"
    )
    assert contents(tmp_path) == {}
