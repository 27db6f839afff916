"""Kills a run again and again, and checks that it ends as if it had never been killed.

python -m tests.soak_kill [--kills 20] [--signal KILL TERM] [--directory DIR] [--seed 0]

For each signal: a run that nobody disturbs, then one that is killed at random moments, every other
time while a checkpoint is being written, and started again each time. It must go on from the newest
whole checkpoint, and end in the same parameters and optimizer state, bitwise, with the same lines
of metrics. Not part of the tests: on two busy cores it took 22 minutes.
"""

import argparse
import logging
import os
import pathlib
import random
import re
import signal
import subprocess
import sys
import tempfile
import time

import jax
import numpy as np

from modo import config as config_lib
from modo.config import Config, DataConfig, DepthConfig, MobaConfig, ModelConfig, TrainConfig
from modo.train import checkpoint
from modo.train.mesh import make_mesh
from modo.train.metrics import read_metrics
from modo.train.step import make_state
from tests.train.helpers import ROOT, subprocess_environment
from tests.train.test_resume import checkpoint_steps, timeless

STEPS = 1000
CONFIG = Config(
    model=ModelConfig(
        vocab_size=257,
        d_model=64,
        num_layers=4,
        num_heads=2,
        depth=DepthConfig(capacity=0.25, noise=0.1),
        moba=MobaConfig(block_size=8, top_k=2),
        scan_layers=True,
    ),
    data=DataConfig(source="text", path="text.txt", cache_dir="cache"),
    train=TrainConfig(
        steps=STEPS, batch_size=4, length=64, eval_every=50, checkpoint_every=10, log_every=1
    ),
)


class Run:
    """train.py in a process of its own, in a workdir."""

    def __init__(self, directory: pathlib.Path, workdir: pathlib.Path):
        self.workdir, self.log = workdir, workdir.with_suffix(".log")
        self._file = self.log.open("w")
        command = [sys.executable, str(ROOT / "train.py"), "--config", "soak.py"]
        environment = subprocess_environment()
        environment["JAX_COMPILATION_CACHE_DIR"] = str(directory / "compiled")
        environment["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] = "0"
        self.process = subprocess.Popen(
            [*command, "--workdir", str(workdir)],
            cwd=directory,
            env=environment,
            stdout=self._file,
            stderr=subprocess.STDOUT,
        )

    def output(self) -> str:
        return self.log.read_text()

    def wait_for(self, condition) -> bool:
        """Polls until it holds; False where the process ended before."""
        while self.process.poll() is None:
            if condition():
                return True
            time.sleep(0.001)
        return False

    def steps(self) -> bool:
        """Whether this session has made a step."""
        return bool(re.search(r"^step \d+/", self.output(), re.MULTILINE))

    def saves(self) -> bool:
        """Whether a checkpoint is being written."""
        return any((self.workdir / "checkpoints").glob("*.orbax-checkpoint-tmp"))

    def end(self, number: signal.Signals) -> int:
        self.process.send_signal(number)
        code = self.process.wait()
        self._file.close()
        return code


def disturb(directory, workdir, number, kills: int, seconds: float, rng: random.Random) -> list:
    """Runs to the end through `kills` signals; returns what went wrong."""
    problems, last = [], None
    for kill in range(1, kills + 1):
        run = Run(directory, workdir)
        where = ("a save", "a step", "a save", "the start")[kill % 4]
        if where == "the start":
            time.sleep(rng.uniform(0, 6))
        elif run.wait_for(run.steps):
            time.sleep(rng.uniform(0, seconds / kills))
            if where == "a save" and run.wait_for(run.saves):
                time.sleep(rng.choice((0, 0.01, 0.03, 0.1)))  # early or late in it
        if run.process.poll() is not None:
            problems.append(f"signal {kill}: the run ended by itself before it")
        code = run.end(number)
        half = run.saves()
        problems += [f"signal {kill}: {p}" for p in _check_output(run, number, code, last)]
        steps = checkpoint_steps(workdir)
        last = steps[-1] if steps else 0
        left = ", a half-written checkpoint left" if half else ""
        print(f"{number.name} {kill} in {where}: exit {code}, newest {last}{left}", flush=True)
    run = Run(directory, workdir)
    code = run.process.wait()
    problems += [f"last run: {p}" for p in _check_output(run, None, code, last)]
    return problems


def _check_output(run: Run, number, code: int, newest: int | None):
    """What the output of a session says against what it must; newest: the checkpoint before it."""
    output = run.output()
    begun = re.search(r"^(starting|resuming at step (\d+)) in", output, re.MULTILINE)
    stopped = re.search(r"^stopped by SIGTERM (at step (\d+)|before its first step)", output, re.M)
    if begun and newest is not None and int(begun[2] or 0) != newest:
        yield f"it went on from step {begun[2]}, not from {newest}"
    if number is None and code != 0:
        yield f"exit {code}: {output.splitlines()[-1:]}"
    if number is signal.SIGTERM:
        # Before Python has installed the handler, SIGTERM ends a process as ever.
        if not (code == 0 and stopped) and not (code == -signal.SIGTERM and not begun):
            yield f"exit {code}: {output.splitlines()[-1:]}"
        steps = checkpoint_steps(run.workdir)
        if stopped and stopped[2] and int(stopped[2]) != (steps or [0])[-1]:
            yield f"it said step {stopped[2]}, but saved {steps}"
    if "Traceback" in output or "error:" in output:
        yield f"it printed an error: {output.splitlines()[-1]}"


def compare(one: pathlib.Path, other: pathlib.Path):
    """What differs between two finished runs."""
    _, abstract_state = make_state(CONFIG, make_mesh(CONFIG.mesh))
    states = [checkpoint.restore_newest(workdir, abstract_state) for workdir in (one, other)]
    if [int(state.step) for state in states] != [STEPS, STEPS]:
        yield f"steps {[int(state.step) for state in states]}"
    pairs = zip(*map(jax.tree.leaves, states), strict=True)
    different = sum(not np.array_equal(np.asarray(a), np.asarray(b)) for a, b in pairs)
    if different:
        yield f"{different} arrays of the state differ"
    if timeless(read_metrics(one)) != timeless(read_metrics(other)):
        yield "the lines of metrics.jsonl differ"
    best = [checkpoint_steps(workdir)[-2:] for workdir in (one, other)]
    if best[0] != best[1]:
        yield f"newest checkpoints {best}"


def soak(directory: pathlib.Path, kills: int, numbers, seed: int) -> bool:
    """Whether all went well."""
    letters = np.random.default_rng(0).choice(list("abcdefgh \n"), size=200_000)
    (directory / "text.txt").write_text("".join(letters))
    (directory / "soak.py").write_text(
        "from modo import config\n"
        "def get_config():\n"
        f"    return config.from_json({config_lib.to_json(CONFIG)!r})\n"
    )
    run = Run(directory, directory / "whole")
    run.wait_for(run.steps)
    begin = time.monotonic()
    if run.process.wait() != 0:
        print(f"FAIL: the undisturbed run failed: {run.output().splitlines()[-1:]}")
        return False
    seconds = time.monotonic() - begin
    print(f"undisturbed: {STEPS} steps in {seconds:.0f} s", flush=True)
    passed = True
    for number in numbers:
        workdir = directory / number.name
        problems = disturb(directory, workdir, number, kills, seconds, random.Random(seed))
        problems += compare(directory / "whole", workdir)
        for problem in problems:
            print(f"  {problem}")
        passed &= not problems
        print(f"{'FAIL' if problems else 'PASS'}: {kills} x {number.name}", flush=True)
    return passed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--kills", type=int, default=20, help="signals of each kind")
    parser.add_argument("--signal", nargs="+", choices=("KILL", "TERM"), default=["KILL", "TERM"])
    parser.add_argument("--directory", help="for the runs, kept; default: a temporary one")
    parser.add_argument("--seed", type=int, default=0, help="of the moments")
    options = parser.parse_args()
    numbers = [signal.Signals[f"SIG{name}"] for name in options.signal]
    os.environ["JAX_PLATFORMS"] = "cpu"
    logging.getLogger("absl").setLevel(logging.ERROR)
    if options.directory is None:
        with tempfile.TemporaryDirectory(prefix="modo-soak-") as temporary:
            passed = soak(pathlib.Path(temporary), options.kills, numbers, options.seed)
    else:
        directory = pathlib.Path(options.directory).absolute()
        directory.mkdir(parents=True)
        passed = soak(directory, options.kills, numbers, options.seed)
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()
