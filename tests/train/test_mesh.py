"""Eight devices train as one, however they share the work."""

import json
import os
import subprocess
import sys

import pytest

from tests.train.helpers import ROOT, subprocess_environment


@pytest.mark.parametrize(
    ("model", "meshes"),
    [
        ("both", ["data", "fsdp", "tensor", "context", "mixed", "accumulated"]),
        ("dense", ["context", "mixed"]),
        ("mod", ["mixed"]),
        ("moba", ["accumulated"]),
    ],
)
def test_eight_devices_train_as_one(model, meshes):
    flags = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
    done = subprocess.run(
        [sys.executable, "-m", "tests.train.mesh", model, *meshes],
        env=subprocess_environment() | {"XLA_FLAGS": flags},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert list(report) == meshes
    for name, result in report.items():
        assert result["compilations"] == 1, name
        assert result["difference"] < 1e-5, name
        assert result["fell"] > 0.1, name  # or ten steps would show no more than one
