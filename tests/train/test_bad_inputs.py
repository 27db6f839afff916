"""Bad inputs: one line that names the thing, a status that is not zero, nothing lost.

One table for all of them: a case says what is damaged and what is typed.
"""

import contextlib
import dataclasses
import gc
import importlib.util
import os
import pathlib
import re
import runpy
import shutil
import sys
from collections.abc import Callable

import pytest

import modo.evaluate
import modo.sample
from modo import config as config_lib
from modo.train.cli import one_line_errors
from modo.train.run_directory import locked
from tests.train.helpers import ROOT, contents, full_disk

pytestmark = [pytest.mark.quick, pytest.mark.usefixtures("as_a_program")]


@dataclasses.dataclass(frozen=True)
class Place:
    """Where a case happens.

    Attributes:
      workdir: a copy of a finished run of six steps.
      config_file: its config.
      directory: holds both, and may hold more.
      patch: of the process.
      open: closed after the case.
    """

    workdir: pathlib.Path
    config_file: pathlib.Path
    directory: pathlib.Path
    patch: pytest.MonkeyPatch
    open: contextlib.ExitStack


@dataclasses.dataclass(frozen=True)
class Case:
    """A bad input.

    Attributes:
      name: of the test.
      message: a regular expression that the line must match.
      arguments: of the command line, after --config (of train.py) and --workdir.
      command: which program.
      damage: what happens to the place first.
      config, workdir: in place of the place's own.
    """

    name: str
    message: str
    arguments: str = ""
    command: str = "train"
    damage: Callable[[Place], object] = lambda place: None
    config: str = "{place.config_file}"
    workdir: str = "{place.workdir}"


def _write_config(text: str) -> Callable[[Place], object]:
    return lambda place: place.config_file.write_text(text)


def _in_workdir(name: str, content: bytes | None) -> Callable[[Place], object]:
    """The file holds this instead; None: it is a directory."""

    def damage(place: Place) -> None:
        path = place.workdir / name
        if path.is_dir():
            shutil.rmtree(path)
        elif path.exists():
            path.unlink()
        if content is None:
            path.mkdir()
        else:
            path.write_bytes(content)

    return damage


def _truncate(item: str) -> Callable[[Place], object]:
    """The largest file of a part of the newest checkpoint loses its end."""

    def damage(place: Place) -> None:
        files = (place.workdir / "checkpoints" / "6" / item).rglob("d/*")
        os.truncate(max(files, key=lambda path: path.stat().st_size), 100)

    return damage


def _edit_config(place: Place) -> None:
    """config.json and the config are of another model than the checkpoints."""
    for path in (place.workdir / "config.json", place.config_file):
        path.write_text(path.read_text().replace('"d_ff": 32', '"d_ff": 48'))


def _without_tensorboard(place: Place) -> None:
    place.patch.setattr(importlib.util, "find_spec", lambda name: None)


def _beside(name: str, content: bytes) -> Callable[[Place], None]:
    """Puts a file beside the workdir."""
    return lambda place: (place.directory / name).write_bytes(content) and None


CASES = [
    # Configs.
    Case("unknown config", "no config 'nope'; there are .*small, tiny", config="nope"),
    Case(
        "missing config file",
        "config file .*no.py does not exist",
        config="{place.directory}/no.py",
    ),
    Case("syntax error", "config.py: SyntaxError", damage=_write_config("def get_config(:")),
    Case("no get_config", "config.py: .*no attribute 'get_config'", damage=_write_config("x = 1")),
    Case("not a config", "returned int", damage=_write_config("def get_config(): return 3")),
    Case(
        "bad value in a config",
        "vocab_size must be int, got 'a'",
        damage=_write_config(
            "import modo\ndef get_config(): return modo.ModelConfig('a', 1, 1, 1)"
        ),
    ),
    # Flags.
    Case("unknown flag", "d_modl.*perhaps you meant --model.d-model", "--model.d_modl 3"),
    Case("not a number", "train.steps: invalid literal.*abc", "--train.steps abc"),
    Case("no steps", "error: --train.steps must be .*at least 1, got 0", "--train.steps 0"),
    Case("capacity", "error: --model.depth.capacity is a fraction", "--model.depth.capacity 3"),
    Case(
        "glob without quotes",
        r"Unrecognized options: \S+/config.py; put a glob in quotes",
        "--data.path config.py {place.directory}/config.py",
    ),
    Case("no rows", "batch_size must be .*at least 1, got -4", "--train.batch_size -4"),
    Case("microbatches", "accumulation 3 does not divide batch_size 4", "--train.accumulation 3"),
    Case("too many devices", "mesh data 3 .*does not fit 1 devices", "--mesh.data 3"),
    Case("heads", "num_heads 3 does not divide d_model 16", "--model.num_heads 3"),
    Case("vocabulary", "vocab_size 256 is smaller than .*257", "--model.vocab_size 256"),
    Case("late profile", "end at step 7, past steps 6", "--train.profile_start 5"),
    Case(
        "no tensorboard",
        r"needs the package tensorboardX: pip install 'modo\[tensorboard\]'",
        "--train.tensorboard True",
        damage=_without_tensorboard,
    ),
    # Data sets.
    Case("no text", "data.path .*gone does not exist", "--data.path {place.directory}/gone"),
    Case(
        "no text files",
        "run/figures is a directory without",
        "--data.path {place.workdir}/figures",
    ),
    Case(
        "not UTF-8",
        "bad.txt is not UTF-8 text: byte 0xff at offset 3",
        "--data.path {place.directory}/bad.txt",
        damage=_beside("bad.txt", b"abc\xff"),
    ),
    Case(
        "empty text",
        "empty.txt is empty",
        "--data.path {place.directory}/empty.txt",
        damage=_beside("empty.txt", b""),
    ),
    Case(
        "too little text",
        "training text has 23 tokens, a row of train.length 32 needs 33",
        "--data.path {place.directory}/short.txt --data.validation_fraction 0.1",
        damage=_beside("short.txt", b"twenty-four bytes of it."),
    ),
    Case(
        "not JSON",
        "bad.jsonl line 2: not JSON: .* at character",
        "--data.source jsonl --data.path {place.directory}/bad.jsonl",
        damage=_beside("bad.jsonl", b'{"text": "good"}\n{"text": "bad"\n'),
    ),
    Case(
        "no such field",
        "line 1: no field 'body' .data.text_field.; there are 'text'",
        "--data.source jsonl --data.text_field body --data.path {place.directory}/x.jsonl",
        damage=_beside("x.jsonl", b'{"text": "good"}\n'),
    ),
    Case(
        "not prepared",
        "data.name lm1b is not prepared in .*; run: python -m modo.prepare tfds lm1b --data-dir",
        "--data.source tfds --data.path None --data.name lm1b --data.data_dir {place.directory}",
    ),
    Case(
        "half prepared",
        "lm1b is not prepared",
        "--data.source tfds --data.path None --data.name lm1b --data.data_dir {place.directory}",
        damage=lambda p: (p.directory / "lm1b/1.1.0.incompleteXYZ").mkdir(parents=True),
    ),
    Case(
        "no pysrc",
        "pysrc is not in .*; run: python -m modo.prepare pysrc --data-dir",
        "--data.source pysrc --data.path None --data.data_dir {place.directory}",
    ),
    Case("a field of others", "path is .*but source 'pysrc' does not use", "--data.source pysrc"),
    Case("fraction", r"validation_fraction must be in \(0, 1\)", "--data.validation_fraction 1.5"),
    Case("weight", "weight must be positive and finite, got -1.0", "--data.weight -1"),
    # Tokenizers.
    Case(
        "no tokenizer",
        "cannot read the tokenizer .*gone.json: No such file",
        "--data.tokenizer {place.directory}/gone.json",
    ),
    Case("which tokenizer", "'words'", "--data.tokenizer words"),
    Case(
        "damaged tokenizer",
        "bad.json: is no file of Hugging Face tokenizers, or a damaged one",
        "--data.tokenizer {place.directory}/bad.json",
        damage=_beside("bad.json", b'{"model": '),
    ),
    Case(
        "damaged sentencepiece",
        "bad.model: is no file of sentencepiece, or a damaged one",
        "--data.tokenizer {place.directory}/bad.model",
        damage=_beside("bad.model", b"\0\1"),
    ),
    Case("bos of bytes", "bos_token", "--data.bos_token <s>"),
    # Workdirs.
    Case("past its end", "step 6, past train.steps 5; set --train.steps to 6", "--train.steps 5"),
    Case("another seed", "holds another run: train.seed was 0, now 1", "--train.seed 1"),
    Case("another model", "model.d_ff was 32, now 64; use another", "--model.d_ff 64"),
    Case("a file", "workdir .*config.py: .*", workdir="{place.config_file}"),
    Case("no such place", "workdir /proc/nothing: No such file", workdir="/proc/nothing"),
    Case("empty name", "--workdir: is empty", workdir=""),
    Case("bracket", r"run\[1\] has a '\[' in its path", workdir="{place.directory}/run[1]"),
    Case(
        "locked",
        "another run is writing to",
        damage=lambda p: p.open.enter_context(locked(p.workdir)),
    ),
    Case(
        "damaged config.json", "config.json: config is not", damage=_in_workdir("config.json", b"{")
    ),
    Case("metrics directory", "metrics.jsonl: Is a dir", damage=_in_workdir("metrics.jsonl", None)),
    *[
        Case(f"{name} file", f"{name} is not a directory", damage=_in_workdir(name, b"mine"))
        for name in ("checkpoints", "figures", "tensorboard", "profile")
    ],
    Case("no run", "holds no run", command="evaluate", workdir="{place.directory}"),
    # Checkpoints.
    Case("damaged parameters", "6 cannot be read .*from step 3, move", damage=_truncate("params")),
    Case("damaged optimizer", "6 cannot be read .*from step 3, move", damage=_truncate("rest")),
    Case("foreign checkpoint", "6 cannot be read .*shape", damage=_edit_config),
    Case(
        "damaged, to evaluate", "6 cannot be read", command="evaluate", damage=_truncate("params")
    ),
    Case("no such step", "no checkpoint of step 5; there are 3, 6", "--step 5", command="evaluate"),
    Case(
        "no checkpoint",
        "has no whole checkpoint",
        command="sample",
        damage=_in_workdir("checkpoints", None),
    ),
    # Disks.
    Case(
        "full disk",
        "metrics.jsonl: File too large",
        "--train.steps 7",
        damage=lambda place: place.open.enter_context(full_disk(100)),
    ),
    Case(
        "full cache",
        "data.cache_dir .*empty: File too large",
        "--data.cache_dir {place.directory}/empty",
        damage=lambda place: place.open.enter_context(full_disk(100)),
    ),
    Case("json in no directory", "nowhere/x.json: its dir", "--json nowhere/x.json", "evaluate"),
    Case("json directory", "--json /proc is a directory", "--json /proc", "evaluate"),
    Case(
        "json that cannot be", "x.json cannot be written to: No", "--json /proc/x.json", "evaluate"
    ),
]


def _run(case: Case, place: Place) -> None:
    workdir = case.workdir.format(place=place)
    arguments = [f"--workdir={workdir}", *case.arguments.format(place=place).split()]
    if case.command == "train":
        arguments = ["--config", case.config.format(place=place), *arguments]
        place.patch.setattr(sys, "argv", ["train.py", *arguments])
        runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        return
    with one_line_errors():
        {"evaluate": modo.evaluate, "sample": modo.sample}[case.command].main(arguments)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_bad_input(case, finished_run, tmp_path, monkeypatch, capsys):
    config, finished, _ = finished_run
    workdir, config_file = tmp_path / "run", tmp_path / "config.py"
    shutil.copytree(finished, workdir)
    config_file.write_text(
        f"from modo import config\nTEXT = '''{config_lib.to_json(config)}'''\n"
        "def get_config():\n    return config.from_json(TEXT)\n"
    )
    with contextlib.ExitStack() as stack:
        place = Place(workdir, config_file, tmp_path, monkeypatch, stack)
        case.damage(place)
        before = contents(workdir)
        gc.collect()  # or what an earlier case left behind speaks up now
        capsys.readouterr()
        with pytest.raises(SystemExit) as stopped:
            _run(case, place)
    error = capsys.readouterr().err
    assert stopped.value.code not in (0, None)
    assert error.startswith("error: ") and error.count("\n") == 1
    assert re.search(case.message, error), error
    assert contents(workdir) == before
    assert not (tmp_path / "run[1]").exists()
