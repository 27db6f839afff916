"""What a finished run leaves behind, and the programs that open it."""

import dataclasses
import functools
import json
import math
import os
import re
import runpy
import shutil
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

import modo
import modo.evaluate
import modo.sample
from modo.config import MeshConfig
from modo.data import open_data
from modo.data.tokenizer import ByteTokenizer
from modo.errors import UserError
from modo.ops.losses import cross_entropy
from modo.train import figures
from modo.train.evaluation import evaluate
from modo.train.loop import run
from modo.train.mesh import make_mesh
from modo.train.metrics import read_metrics
from tests.train.helpers import ROOT, subprocess_environment, with_train

pytestmark = pytest.mark.quick


@pytest.fixture(scope="module")
def model(finished_run):
    return modo.load(finished_run[1])


def test_workdir_holds_what_it_promises(finished_run):
    config, workdir, _ = finished_run
    names = {path.name for path in workdir.iterdir()}
    assert names == {".lock", "config.json", "data.json", "metrics.jsonl", "checkpoints", "figures"}
    figure_names = {path.name for path in (workdir / "figures").iterdir()}
    assert figure_names == {"loss.png", "routing.png", "blocks.png"}
    records = read_metrics(workdir)
    assert [r["step"] for r in records if r["split"] == "train"] == [1, 2, 3, 4, 5, 6]
    assert [(r["step"], r["routing"]) for r in records if r["split"] == "eval"] == [
        (step, routing) for step in (3, 6) for routing in config.train.eval_routings
    ]


def test_load_gives_the_trained_parameters(finished_run, model):
    _, workdir, state = finished_run
    for mine, theirs in zip(
        jax.tree.leaves(nnx.state(model)), jax.tree.leaves(state.params), strict=True
    ):
        np.testing.assert_array_equal(mine, theirs)
    early = nnx.state(modo.load(workdir, step=3))
    assert any(
        (np.asarray(a) != np.asarray(b)).any()
        for a, b in zip(jax.tree.leaves(early), jax.tree.leaves(state.params), strict=True)
    )
    assert modo.load_tokenizer(workdir).vocab_size == 257


def test_load_names_what_is_missing(finished_run, tmp_path):
    _, workdir, _ = finished_run
    with pytest.raises(UserError, match="no checkpoint of step 4; there are 3, 6"):
        modo.load(workdir, step=4)
    with pytest.raises(UserError, match="holds no run"):
        modo.load(tmp_path)


def test_held_out_loss_counts_each_token_once(finished_run, model):
    """Against a plain float64 sum over the rows, and whatever the batch size."""
    config, workdir, _ = finished_run
    data = open_data(config.data, config.train.length)
    graphdef, params = nnx.split(model)
    results = {
        (routing, batch_size): evaluate(
            graphdef,
            params,
            data.validation,
            make_mesh(MeshConfig()),
            routing=routing,
            batch_size=batch_size,
        )
        for routing in ("predictor", "top_k")
        for batch_size in (1, 3, 64)
    }
    rows = data.validation[np.arange(len(data.validation))]
    for routing in ("predictor", "top_k"):
        logits, aux = jax.jit(
            lambda tokens, positions, segment_ids, routing=routing: model(
                tokens, positions_BT=positions, segment_ids_BT=segment_ids, routing=routing
            )
        )(rows["tokens"], rows["positions"], rows["segment_ids"])
        nats, _ = cross_entropy(logits, rows["targets"])
        weights = rows["weights"].astype(np.float64)
        expected = (np.asarray(nats, np.float64) * weights).sum() / weights.sum()
        for batch_size in (1, 3, 64):
            result = results[routing, batch_size]
            assert result.loss == pytest.approx(expected, rel=1e-6)
            assert result.tokens == weights.sum()
            # Two texts: a token a byte, and one for the end of the first.
            nats_a_byte = expected * weights.sum() / (weights.sum() - 1)
            assert result.bits_per_byte == pytest.approx(nats_a_byte / math.log(2))
            assert result.statistics == pytest.approx(results[routing, 1].statistics, abs=1e-6)
        valid = rows["segment_ids"] != 0
        share = np.asarray(aux.routed_LBT).sum() / (2 * valid.sum())
        assert results[routing, 1].statistics["fraction"] == pytest.approx(share)
        assert math.isclose(sum(results[routing, 1].score_histogram), 1.0, rel_tol=1e-6)
    recorded = {r["routing"]: r["loss"] for r in read_metrics(workdir) if r["split"] == "eval"}
    assert recorded["predictor"] == pytest.approx(results["predictor", 1].loss, rel=1e-6)


def test_random_control_of_a_row_does_not_depend_on_its_batch(finished_run, model):
    config, _, _ = finished_run
    rows = open_data(config.data, config.train.length).validation
    graphdef, params = nnx.split(model)
    one, three, all_ = (
        evaluate(graphdef, params, rows, make_mesh(MeshConfig()), routing="random", batch_size=n)
        for n in (1, 3, 64)
    )
    assert one.loss == pytest.approx(three.loss, rel=1e-6)
    assert one.loss == pytest.approx(all_.loss, rel=1e-6)
    other = evaluate(
        graphdef, params, rows, make_mesh(MeshConfig()), routing="random", batch_size=64, seed=1
    )
    assert other.loss != pytest.approx(all_.loss, rel=1e-6)


def test_fewer_rows_are_evenly_spaced(finished_run, model):
    config, _, _ = finished_run
    rows = open_data(config.data, config.train.length).validation
    assert len(rows) == 14
    graphdef, params = nnx.split(model)

    def loss(rows, **options):
        return evaluate(graphdef, params, rows, make_mesh(MeshConfig()), routing="top_k", **options)

    few = loss(rows, batch_size=2, most_rows=3)
    wanted = loss(_Picked(rows, [0, 4, 9]), batch_size=3)
    assert few.tokens == wanted.tokens == 3 * 32
    assert few.loss == pytest.approx(wanted.loss, rel=1e-6)
    # Of these rows, a byte having as many tokens as one of the whole text has.
    share = rows.num_targets / rows.num_bytes
    assert few.bits_per_byte == pytest.approx(few.loss / math.log(2) * share)
    assert loss(rows, batch_size=5, most_rows=14) == loss(rows, batch_size=5)


class _Picked:
    """Some of the rows."""

    def __init__(self, rows, numbers):
        self.rows, self.numbers = rows, np.array(numbers)
        self.num_targets, self.num_bytes = rows.num_targets, rows.num_bytes

    def __len__(self):
        return len(self.numbers)

    def __getitem__(self, indices):
        return self.rows[self.numbers[indices]]


def test_a_finished_run_is_evaluated_by_other_routings(finished_run, tmp_path, capsys):
    config, workdir, _ = finished_run
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    config = with_train(config, eval_routings=("top_k", "random"), eval_rows=2)
    for _ in range(2):
        run(config, tmp_path)
        assert f"already trained, all 6 steps, in {tmp_path}" in capsys.readouterr().out
        last = [r for r in read_metrics(tmp_path) if r["split"] == "eval" and r["step"] == 6]
        assert [r["routing"] for r in last] == ["predictor", "top_k", "random"]
        assert last[0]["tokens"] > last[2]["tokens"] == 2 * 32


def test_evaluate_command(finished_run, tmp_path, capsys):
    _, workdir, _ = finished_run
    file = tmp_path / "evaluation.json"
    routings = ["predictor", "top_k", "router", "random"]
    modo.evaluate.main(["--workdir", str(workdir), "--routing", *routings, "--json", str(file)])
    values = json.loads(file.read_text())
    assert list(values) == routings
    recorded = {r["routing"]: r["loss"] for r in read_metrics(workdir) if r["split"] == "eval"}
    for routing in ("predictor", "top_k"):
        assert values[routing]["loss"] == pytest.approx(recorded[routing], rel=1e-6)
    assert "trained without its auxiliary loss" in capsys.readouterr().out


def test_sample_command(finished_run, capsys):
    _, workdir, _ = finished_run
    arguments = ["--workdir", str(workdir), "--prompt", "the ", "--tokens", "5"]
    modo.sample.main(arguments)
    first, report = capsys.readouterr()
    modo.sample.main(arguments)
    assert first.startswith("the ") and capsys.readouterr().out == first
    assert re.fullmatch(r"5 tokens; \d+\.\d% of block computations skipped\n", report)
    modo.sample.main([*arguments, "--tokens", "40", "--top-k", "5", "--top-p", "0.9"])
    assert re.match(r"40 tokens, \d+ a second once compiled; ", capsys.readouterr().err)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tokens", "0"], r"--tokens must be in \[1, 2147483647\], got 0"),
        (["--tokens", "3000000000"], r"--tokens must be in \[1, 2147483647\]"),
        (["--top-k", "2147483648"], "--top-k must be at most 2147483647"),
        (["--temperature", "1e-40"], "--temperature must be 0 or in"),
        (["--temperature", "-1"], "--temperature must be finite and not negative, got -1"),
        (["--temperature", "nan"], "--temperature must be finite and not negative, got nan"),
        (["--top-k", "0"], "--top-k must be at least 1, got 0"),
        (["--top-p", "2"], r"--top-p must be in \(0, 1\], got 2"),
        (["--seed", "-1"], r"--seed must be in \[0, 4294967295\], got -1"),
        (["--seed", "4294967296"], r"--seed must be in \[0, 4294967295\], got 4294967296"),
        (["--workdir", ""], "--workdir: is empty"),
        (["--step", "5"], "no checkpoint of step 5"),
        (["--routing", "top_k"], "invalid choice"),
    ],
)
def test_sample_command_on_bad_input(finished_run, arguments, message):
    with pytest.raises(UserError, match=message):
        modo.sample.main(["--workdir", str(finished_run[1]), *arguments])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--workdir", ""], "--workdir: is empty"),
        (["--json", ""], "--json: is empty"),
        (["--json", "."], "--json . is a directory"),
        (["--json", "nowhere/x.json"], "its directory does not exist"),
        (["--batch-size", "0"], "at least 1, got 0"),
    ],
)
def test_evaluate_command_on_bad_input(finished_run, arguments, message, monkeypatch):
    monkeypatch.setattr(modo.evaluate, "evaluate_run", None)  # it is refused before that
    with pytest.raises(UserError, match=message):
        modo.evaluate.main(["--workdir", str(finished_run[1]), *arguments])


def test_sample_into_what_cannot_take_it(finished_run):
    """A pipe that nobody reads, and an output that knows no character but ASCII."""
    command = [sys.executable, "-m", "modo.sample", "--workdir", str(finished_run[1])]
    command += ["--tokens", "3", "--prompt", "\u00e9t\u00e9"]
    reader, writer = os.pipe()
    os.close(reader)
    result = subprocess.run(
        command, env=subprocess_environment(), stdout=writer, stderr=subprocess.PIPE, text=True
    )
    os.close(writer)
    assert result.returncode == 1 and result.stderr == ""
    environment = {**subprocess_environment(), "PYTHONIOENCODING": "ascii"}
    result = subprocess.run(command, env=environment, capture_output=True, check=True)
    assert result.stdout.startswith(b"?t?")


def test_prediction_scores_against_counting(finished_run, model):
    config, _, _ = finished_run
    data = open_data(config.data, config.train.length)
    graphdef, params = nnx.split(model)
    # A predictor that is neither always right nor always silent.
    params = jax.tree_util.tree_map_with_path(
        lambda path, p: (
            jax.random.normal(jax.random.key(0), p.shape) if "score" in str(path) else p
        ),
        params,
    )
    result = evaluate(
        graphdef, params, data.validation, make_mesh(MeshConfig()), routing="top_k", batch_size=4
    )
    rows = data.validation[np.arange(len(data.validation))]
    _, aux = nnx.merge(graphdef, params)(
        jnp.asarray(rows["tokens"]),
        positions_BT=jnp.asarray(rows["positions"]),
        segment_ids_BT=jnp.asarray(rows["segment_ids"]),
    )
    valid = np.broadcast_to(rows["segment_ids"] != 0, aux.routed_LBT.shape)
    routed = np.asarray(aux.routed_LBT)[valid]
    predicted = (np.asarray(aux.predictor_logits_LBT) > 0)[valid]
    hits = (routed & predicted).sum()
    assert 0 < hits < routed.sum()
    statistics = result.statistics
    assert statistics["accuracy"] == pytest.approx((routed == predicted).mean())
    assert statistics["precision"] == pytest.approx(hits / predicted.sum())
    assert statistics["recall"] == pytest.approx(hits / routed.sum())
    assert statistics["always_skip_accuracy"] == pytest.approx(1 - routed.mean())


def test_position_share_tells_position_from_chance():
    from modo.train.evaluation import _position_share

    valid_T = np.full(64, 100)
    by_position_LT = np.zeros((1, 64))
    by_position_LT[0, ::8] = 100
    assert _position_share(by_position_LT, valid_T) == pytest.approx(1.0)
    by_chance_LT = np.random.default_rng(0).binomial(100, 0.125, (1, 64))
    assert _position_share(by_chance_LT, valid_T) < 0.01


def test_figures_show_what_was_routed(tmp_path):
    from matplotlib.image import imread

    routed_LT = np.zeros((2, 64), bool)
    empty = imread(figures.routing_map(routed_LT, ["a"] * 64, (1, 3), "top_k", tmp_path / "a.png"))
    routed_LT[0, :32] = True
    half = imread(figures.routing_map(routed_LT, ["a"] * 64, (1, 3), "top_k", tmp_path / "b.png"))
    blue_empty, blue_half = ((image[..., 0] < 0.3).mean() for image in (empty, half))
    assert blue_half > blue_empty + 0.1


def _captured_figure(monkeypatch) -> list:
    """The figures that are drawn from here on."""
    drawn, make = [], figures._new_figure

    def make_and_keep(*arguments):
        drawn.append(make(*arguments))
        return drawn[-1]

    monkeypatch.setattr(figures, "_new_figure", make_and_keep)
    return drawn


def test_routing_map_says_what_it_counts(tmp_path, monkeypatch):
    drawn = _captured_figure(monkeypatch)
    routed_LT = np.zeros((2, 512), bool)  # four lines of 64 are drawn
    routed_LT[0, :64] = True
    routed_LT[:, 256:] = True
    figures.routing_map(routed_LT, ["a"] * 512, (1, 3), "predictor", tmp_path / "a.png")
    title = drawn[0][0].get_suptitle()
    assert "in these lines, predictor routing: 12.5%" in title


@pytest.mark.filterwarnings("error")
def test_every_token_can_be_drawn(tmp_path):
    characters = [ByteTokenizer().decode([token]) for token in range(257)]
    for start in (0, 1):
        part = characters[start : start + 256]
        figures.routing_map(np.zeros((1, 256), bool), part, (1,), "top_k", tmp_path / "a.png")
    words = [" the", "$^$", "\n\n", "", "蔵🎭", "\ufffd", "\r\n\t\x85", "wonderfully", "é"]
    figures.routing_map(np.zeros((1, 9), bool), words, (1,), "top_k", tmp_path / "a.png")


@pytest.mark.parametrize("heads", [1, 4])
def test_block_map_is_not_clipped(tmp_path, heads):
    from matplotlib.image import imread

    start_TNJ, valid_TNJ = np.zeros((64, heads, 1), int), np.zeros((64, heads, 1), bool)
    image = imread(figures.block_map(start_TNJ, valid_TNJ, 8, 0, tmp_path / "b.png"))
    assert (image[:3] == 1).all() and (image[-3:] == 1).all()


def test_block_map_of_a_top_k_without_bound(finished_run):
    config, _, _ = finished_run
    moba = modo.MobaConfig(block_size=8, top_k=2**31 - 1)
    model_config = dataclasses.replace(config.model, moba=moba)
    graphdef, params = nnx.split(
        nnx.eval_shape(lambda: modo.Decoder(model_config, rngs=nnx.Rngs(0)))
    )
    row_1T = jax.ShapeDtypeStruct((1, 32), jnp.int32)
    chosen_blocks = functools.partial(figures._chosen_blocks, graphdef, layer=0)
    start_1TNJ, _ = jax.eval_shape(chosen_blocks, params, row_1T, row_1T, row_1T)
    assert start_1TNJ.shape[-1] <= 32


def test_loss_curve_shows_every_step_and_whole_ticks(tmp_path, monkeypatch):
    drawn = _captured_figure(monkeypatch)
    lines = [{"step": s, "split": "train", "loss": loss} for s, loss in ((1, 5.5), (2, 1.5))]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(r) + "\n" for r in lines))
    figures.loss_curve(tmp_path, tmp_path / "loss.png")
    axis = drawn[0][1][0, 0]
    assert axis.get_ylim()[1] > 5.5
    assert all(tick == round(tick) for tick in axis.get_xticks())


def test_time_a_step_is_of_this_session_without_compilation(finished_run, tmp_path, capsys):
    """The lines of earlier sessions, as slow as can be, and the first step do not count."""
    config, workdir, _ = finished_run
    shutil.copytree(workdir, tmp_path, dirs_exist_ok=True)
    text = (tmp_path / "metrics.jsonl").read_text()
    (tmp_path / "metrics.jsonl").write_text(
        re.sub(r'"step_seconds": [^,}]*', '"step_seconds": 1e6', text)
    )
    run(config, tmp_path)
    assert "time a step" not in capsys.readouterr().out
    run(with_train(config, steps=7), tmp_path)
    out = capsys.readouterr().out
    assert "time a step" not in out
    assert re.search("step 7/7 .*includes compilation", out)
    run(with_train(config, steps=9, eval_every=0), tmp_path)
    out = capsys.readouterr().out
    last = float(re.search(r"step 9/9 .* (\d+) ms/step", out)[1])
    assert float(re.search(r"time a step: ([\d.]+) ms", out)[1]) == pytest.approx(last, abs=0.51)
    assert out.count("includes compilation") == 1


def test_train_program(finished_run, tmp_path):
    """The entry point end to end, in a process of its own, from another directory."""
    config, _, _ = finished_run
    (tmp_path / "mine.py").write_text(
        "from modo import config\n"
        "def get_config():\n"
        f"    return config.from_json({modo.config.to_json(config)!r})\n"
    )
    command = [sys.executable, str(ROOT / "train.py"), "--config", "mine.py", "--workdir", "run"]
    result = subprocess.run(
        [*command, "--train.steps", "2", "--model.moba.top_k", "1"],
        env=subprocess_environment(),
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=True,
    )
    assert "step 2/2" in result.stdout and "predictor against top_k" in result.stdout
    saved = json.loads((tmp_path / "run" / "config.json").read_text())
    assert saved["model"]["moba"]["top_k"] == 1 and saved["train"]["steps"] == 2


def test_importing_modo_starts_nothing():
    program = (
        "import sys, modo\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends, xla_bridge._backends\n"
        "heavy = {'tensorflow', 'tensorflow_datasets', 'grain', 'matplotlib'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", program], env=subprocess_environment(), check=True)


@pytest.mark.quick
def test_a_mistake_is_told_before_anything_slow_is_imported(tmp_path):
    program = (
        "import runpy, sys\n"
        "sys.argv = ['train.py', '--config', 'tiny', '--workdir', sys.argv[1], '--data.source',\n"
        "            'tfds', '--data.name', 'lm1b', '--data.data_dir', sys.argv[1]]\n"
        "try:\n"
        "    runpy.run_path('train.py', run_name='__main__')\n"
        "except SystemExit as stop:\n"
        "    assert stop.code == 2, stop.code\n"
        "slow = {'jax', 'flax', 'grain', 'orbax', 'tensorflow_datasets'} & set(sys.modules)\n"
        "assert not slow, slow\n"
    )
    command = [sys.executable, "-c", program, str(tmp_path)]
    done = subprocess.run(
        command, env=subprocess_environment(), cwd=ROOT, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert "run: python -m modo.prepare tfds lm1b" in done.stderr


def test_every_public_name_is_there():
    for name in modo.__all__:
        assert getattr(modo, name) is not None
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = modo.nothing


def test_mod_step_benchmark_compares_twins():
    module = runpy.run_path(str(ROOT / "benchmarks" / "mod_step.py"))
    dense = module["make_config"](None, 4, 1)
    mod = module["make_config"](modo.DepthConfig(), 4, 1)
    assert dataclasses.replace(mod.model, depth=None) == dense.model
