"""Bad input: one line that names the value, a non-zero exit, nothing written."""

import dataclasses
import subprocess
import sys

import pytest

from modo.errors import UserError
from modo.train.cli import config_names, load_config, override, parse_train_arguments
from modo.train.loop import eval_routings, run
from tests.train.helpers import ROOT, subprocess_environment

pytestmark = pytest.mark.quick


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("--config nope --workdir w", "no config 'nope'; there are"),
        ("--config nope.py --workdir w", "nope.py does not exist"),
        ("--workdir w", "--config is needed"),
        ("--config tiny", "--workdir is needed"),
        ("--config tiny --workdir w --model.d_modl 3", "d_modl, 3; perhaps you meant"),
        ("--config tiny --workdir w --train.steps abc", "--train.steps: invalid literal"),
        ("--config tiny --workdir w --train.steps 1.5", "--train.steps: invalid literal"),
        ("--config tiny --workdir w --train.steps", "Missing value for argument"),
        ("--config tiny --workdir w --train.steps 0", "steps must be .*at least 1, got 0"),
        ("--config tiny --workdir w --model.depth.capacity 0", r"\(0, 1\], got 0"),
        ("--config tiny --workdir w --model.depth.capacity 2", r"\(0, 1\], got 2"),
        ("--config tiny --workdir w --model.depth.gate softmax", "invalid choice 'softmax'"),
        ("--config tiny --workdir w --model.moba.top_k 0", "top_k must be .*at least 1, got 0"),
        ("--config tiny --workdir w --model.num_heads 3", "num_heads 3 does not divide"),
        ("--config tiny --workdir w --model.num_kv_heads 3", "num_kv_heads 3 does not divide"),
        ("--config tiny --workdir w --data.source text", "--data.path must name"),
        ("--config tiny --workdir w stray", "stray"),
        ("--config tiny --workdir=", "--workdir: is empty"),
        ("--config tiny --workdir w --train.seed 4294967296", "4294967295.*got 4294967296"),
        ("--config tiny --workdir w --model.depth.capacity 3", "^--model.depth.capa"),
    ],
)
def test_bad_arguments(arguments, message):
    with pytest.raises(UserError, match=message) as caught:
        parse_train_arguments(arguments.split())
    assert "\n" not in str(caught.value)


def test_a_long_path_is_not_broken_into_lines():
    path = "/" + "directory/" * 30
    with pytest.raises(UserError, match=f"Unrecognized options: {path}$"):
        override(load_config("tiny"), ["--data.path", "a", path], "train.py")


def test_good_arguments():
    arguments = "--config tiny --workdir w --train.steps 7 --model.moba.top_k 4"
    arguments += " --model.depth.capacity 0.25 --model.depth.layers 1 2 --data.mask-documents True"
    config, workdir = parse_train_arguments(arguments.split())
    assert workdir == "w" and config.train.steps == 7 and config.model.moba.top_k == 4
    assert config.model.depth.capacity == 0.25 and config.model.routed_layers == (1, 2)
    assert config.data.mask_documents


@pytest.mark.parametrize("name", config_names())
def test_configs_load(name):
    assert override(load_config(name), [], "train.py") == load_config(name)


def test_config_files_with_mistakes(tmp_path):
    for text, message in (
        ("x = 1", "has no attribute 'get_config'"),
        ("def get_config(): return 3", "returned int"),
        ("def get_config(:", "SyntaxError"),
        ("import modo\ndef get_config(): return modo.ModelConfig('a', 1, 1, 1)", "vocab_size"),
    ):
        path = tmp_path / "c.py"
        path.write_text(text)
        with pytest.raises(UserError, match=message):
            load_config(str(path))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--mesh.data", "3"], "does not fit 1 devices"),
        (["--model.vocab_size", "256"], "vocab_size 256 is smaller than the tokenizer's 257"),
        (["--data.source", "text", "--data.path", "nothing.txt"], "nothing.txt does not exist"),
        (["--data.source", "text", "--data.path", "empty.txt"], "empty.txt"),
        (["--data.tokenizer", "none.json"], "cannot read the tokenizer none.json: No such file"),
        (["--data.tokenizer", "gpt2"], "unknown tokenizer 'gpt2'; there is 'bytes', or the path"),
        (["--data.bos_token", "<s>"], "bos_token is '<s>', but the tokenizer 'bytes' has its own"),
        (["--train.length", "10000000"], "10000000|10,000,000|10000001"),
    ],
)
def test_runs_that_cannot_start(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    config = override(load_config("tiny"), [*arguments, "--data.cache_dir", "cache"], "train.py")
    with pytest.raises(UserError, match=message):
        run(config, tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_workdir_that_is_a_file(tmp_path):
    (tmp_path / "file").write_text("mine")
    config = override(load_config("tiny"), ["--data.cache_dir", str(tmp_path / "c")], "train.py")
    with pytest.raises(UserError, match="file"):
        run(config, tmp_path / "file")
    assert (tmp_path / "file").read_text() == "mine"


def test_exit_status_and_one_line():
    result = subprocess.run(
        [sys.executable, str(ROOT / "train.py"), "--config", "tiny", "--workdir", "/dev/null/x"],
        env=subprocess_environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2
    assert result.stderr.startswith("error: ") and result.stderr.count("\n") == 1
    result = subprocess.run(
        [sys.executable, "-m", "modo.sample", "--workdir", "/nonexistent"],
        env=subprocess_environment(),
        capture_output=True,
        text=True,
    )
    assert result.returncode == 2 and "holds no run" in result.stderr


def test_only_routings_that_the_model_can_do_are_evaluated():
    config = load_config("tiny")
    assert eval_routings(config) == ("predictor", "top_k")
    without = override(config, ["--model.depth.predictor", "False"], "train.py")
    assert eval_routings(without) == ("top_k",)
    dense = dataclasses.replace(config, model=dataclasses.replace(config.model, depth=None))
    assert eval_routings(dense) == ("predictor",)
    alone = override(without, ["--train.eval_routings", "predictor"], "train.py")
    with pytest.raises(UserError, match="predictor alone"):
        eval_routings(alone)
