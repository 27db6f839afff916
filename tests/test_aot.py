"""libtpu may compile in one thread of a process only: what needs it is in this file alone."""

import dataclasses
import json
import re

import pytest
from jax.sharding import AbstractMesh

from modo import aot, flops
from modo.config import (
    Config,
    DataConfig,
    DepthConfig,
    MeshConfig,
    MobaConfig,
    ModelConfig,
    TrainConfig,
)
from modo.errors import UserError
from modo.hardware import GIB, HARDWARE
from modo.train.cli import _config_directories, config_names, load_config
from modo.train.mesh import AXES, make_mesh

MODEL = ModelConfig(
    vocab_size=512,
    d_model=256,
    num_layers=4,
    num_heads=2,
    compute_dtype="bfloat16",
    scan_layers=True,
    remat="block",
)
CONFIG = Config(
    model=MODEL,
    data=DataConfig(mask_documents=False),
    mesh=MeshConfig(data=1, fsdp=4),
    train=TrainConfig(batch_size=8, length=384),
)


def write_config(tmp_path, config: Config) -> str:
    path = tmp_path / "mine.py"
    path.write_text(f"from modo.config import *\n\n\ndef get_config():\n    return {config!r}\n")
    return str(path)


def run(tmp_path, config: Config, *arguments: str) -> tuple[int, dict]:
    """(exit status, report) of a command."""
    report = tmp_path / "report.json"
    status = aot.main(
        ["--config", write_config(tmp_path, config), *arguments, "--json", str(report)]
    )
    return status, json.loads(report.read_text())


def test_a_small_model_fits(tmp_path, capsys):
    status, report = run(tmp_path, CONFIG, "--topology", "v5e:2x2", "--train.batch_size", "16")
    assert status == 0 and report["fits"] is True
    assert (report["device"], report["devices"]) == ("TPU v5 lite", 4)
    assert report["mesh"] == {"data": 1, "fsdp": 4, "tensor": 1, "context": 1}
    memory = report["memory"]
    total = memory["arguments"] + memory["outputs"] + memory["temporaries"] + memory["code"]
    assert report["hbm_bytes"] == total - memory["aliased"] < report["hbm_available"]
    # Parameters and two moments, float32, cut in four.
    assert memory["arguments"] >= 12 * flops.parameter_count(MODEL) / 4
    assert memory["aliased"] >= 12 * flops.parameter_count(MODEL) / 4
    assert report["flops"] == flops.train_step(MODEL, 16, 384)
    again = flops.forward(MODEL, 384, batch=16)
    assert report["flops_device"] == (report["flops"] + again) / 4
    sent, least = report["collectives"], report["least_bytes"]
    assert 1 <= sent["all-gather"] / least["all-gather"] < 1.3
    hardware = HARDWARE["TPU v5 lite"]
    assert report["compute_seconds"] == report["flops_device"] / hardware.flops
    assert report["link_seconds"] == sum(sent.values()) / hardware.link_bandwidth
    parts = [report[f"{part}_seconds"] for part in ("compute", "hbm", "link")]
    assert report["step_seconds"] == max(parts) > 0 and min(parts) > 0
    assert 0 < report["mfu"] < 1 and report["compile_seconds"] > 0
    assert report["hbm_traffic"] > memory["arguments"] and report["unknown_loops"] == 0
    printed = capsys.readouterr().out
    assert "fits" in printed and "all-gather" in printed and "GiB" in printed


def test_a_model_too_large_is_said_with_numbers(tmp_path, capsys):
    model = dataclasses.replace(
        MODEL, vocab_size=10_000_000, num_layers=1, scan_layers=False, remat="none"
    )
    status, report = run(tmp_path, dataclasses.replace(CONFIG, model=model), "--topology", "v5e")
    error = capsys.readouterr().err
    assert status == 1 and report["fits"] is False
    needed, there = report["hbm_bytes"], report["hbm_available"]
    # The logits of two rows a device alone.
    assert needed > 2 * 384 * 10_000_000 * 4 > there == int(15.75 * GIB)
    assert f"{needed / GIB:.2f} GiB" in error and "15.75 GiB" in error and error.count("\n") == 1


def test_a_step_of_generation(tmp_path, capsys):
    model = dataclasses.replace(MODEL, num_layers=2, depth=DepthConfig(), moba=MobaConfig(64, 2))
    config = dataclasses.replace(CONFIG, model=model, mesh=MeshConfig(data=2, tensor=2))
    status, report = run(tmp_path, config, "--topology", "v5e:2x2", "--decode")
    assert status == 0 and report["mode"] == "decode"
    assert report["flops"] == flops.decode_step(model, 8, 384)
    # No optimizer; parameters cut in two; caches of keys and values in bfloat16, updated in place.
    cache = 8 * 384 * 256 * 2 * 2 / 4
    memory = report["memory"]
    assert memory["arguments"] < 4 * flops.parameter_count(model) * 0.8
    assert memory["aliased"] > cache
    assert "generation" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topology", "v9:2x2"], "'v9:2x2' is neither a generation of TPU"),
        (["--topology", "v5e:3x7"], "'v5e:3x7' is neither"),
        (["--topology", "v5e:2x4"], "does not fit 8 devices"),
        (["--topology", "v5e:2x2", "--mesh.fsdp", "1", "--mesh.tensor", "4"], "num_heads 2"),
        (["--topology", "v5e:2x2", "--train.batch_size", "6"], "a microbatch of 6 rows"),
        (["--topology", "v5e:2x2", "--train.batch_sise", "6"], "batch_sise"),
        (["--topology", "v5e:2x2", "--chips", "8"], "'v5e:2x2'"),
        (["--topology", "v5e", "--chips", "8,x"], "'8,x'"),
        (["--topology", "v5e", "--chips", "12"], "powers of two, got 12"),
        (
            ["--topology", "v5e", "--chips", "8", "--mesh.fsdp", "16", "--train.batch_size", "7"],
            "whole number",
        ),
        (["--topology", "v5e", "--chips", "8", "--mesh.data", "-1"], "-1"),
        ([], "--topology is needed"),
    ],
)
def test_bad_arguments_are_one_line(tmp_path, arguments, message):
    with pytest.raises(UserError) as error:
        aot.main(["--config", write_config(tmp_path, CONFIG), *arguments])
    assert message in str(error.value)


def test_the_configs_of_the_papers_have_a_mesh_on_their_slices():
    cases = {}
    for name in set(config_names()) - {"tiny", "small"}:
        [path] = [d / f"{name}.py" for d in _config_directories() if (d / f"{name}.py").exists()]
        for topology in re.findall(r"TPU (v\w+:[\dx]+)", path.read_text()):
            mesh = load_config(name).mesh
            cases[topology, dataclasses.astuple(mesh)] = mesh
    assert len(cases) > 5
    for (topology, sizes), mesh in cases.items():
        made = make_mesh(mesh, aot.topology_devices(topology))
        assert made.devices.shape == sizes
        assert len({device.id for device in made.devices.flat}) == made.devices.size


def test_unknown_config_and_unwritable_report(tmp_path):
    with pytest.raises(UserError, match="no config 'nano'"):
        aot.main(["--config", "nano", "--topology", "v5e"])
    with pytest.raises(UserError, match="its directory does not exist"):
        aot.main(["--config", "tiny", "--topology", "v5e", "--json", str(tmp_path / "no" / "f")])


@pytest.mark.parametrize(
    ("message", "size"),
    [
        ("RESOURCE_EXHAUSTED: Ran out of memory on HBM, the total memory required for HLO "
         "temporaries (608.00G) exceeds available HBM (15.75G).", 608 << 30),
        ("Ran out of memory in memory space hbm. Used 20.50G of 15.75G hbm. Exceeded hbm capacity "
         "by 4.75G.\n\nTotal hbm usage >= 21.00G:\n  reserved 258.00M", 21 << 30),
        ("Ran out of memory in memory space hbm. Used 1.5M of 1.0M hbm.", 3 << 19),
        ("INTERNAL: Mosaic failed to compile TPU kernel", None),
        ("Ran out of memory in memory space vmem. Used 200M of 128M vmem", None),
    ],
)  # fmt: skip
def test_refusals(message, size):
    assert aot.refused_bytes(message) == size


def test_least_bytes():
    model = dataclasses.replace(
        MODEL, num_kv_heads=2, d_ff=512, moba=MobaConfig(64, 2), tied_embeddings=True
    )
    config = dataclasses.replace(CONFIG, model=model)
    blocks = 4 * (4 * 256 * 256 + 3 * 256 * 512)
    matrices = blocks + 512 * 256
    norms = 4 * 2 * 256 + 256

    def least(*sizes, **options):
        return aot.least_bytes(config, AbstractMesh(sizes, AXES), **options)

    assert least(1, 1, 1, 1) == {}
    found = least(1, 4, 1, 1)
    assert found["all-gather"] == (matrices + blocks) * 2 * 3 / 4  # in bfloat16
    assert found["reduce-scatter"] == matrices * 2 * 3 / 4
    assert found["all-reduce"] == 2 * norms * 2 * 3 / 4
    found = least(2, 2, 1, 1)
    assert found["all-gather"] == (matrices + blocks) * 2 / 2
    assert found["all-reduce"] == (matrices / 2 + norms * 2 * 3 / 4) * 2
    keys = 2 * 8 * 384 * 256  # keys and values, all rows
    found = least(1, 1, 1, 4)
    assert found["all-gather"] == 4 * 2 * keys * 2 * 3 / 4  # layers, passes, bytes
    assert found["reduce-scatter"] == 4 * keys * 4 * 3 / 4  # summed in float32
    found = least(1, 1, 2, 1)
    assert found == {"all-reduce": 4 * 5 * 8 * 384 * 256 * 2}
    found = least(1, 2, 2, 1, training=False)
    assert found["all-gather"] == matrices / 2 * 2 / 2
    assert found["all-reduce"] == 4 * 2 * 4 * 256 * 2


def test_the_same_work_a_chip():
    config = dataclasses.replace(
        CONFIG,
        mesh=MeshConfig(data=1, fsdp=8, tensor=2, context=4),
        train=TrainConfig(batch_size=16, length=384),
    )
    for chips, mesh, rows in (
        (8, (1, 1, 2, 4), 2),
        (64, (1, 8, 2, 4), 16),
        (256, (4, 8, 2, 4), 64),
        (4096, (64, 8, 2, 4), 1024),
    ):
        scaled = aot.scaled(config, chips)
        assert dataclasses.astuple(scaled.mesh) == mesh and scaled.train.batch_size == rows
    with pytest.raises(UserError, match="take 8"):
        aot.scaled(config, 4)


def test_slices():
    assert aot.slice_of("v5p", 8) == "v5p:2x2x2"
    assert aot.slice_of("v5p", 1024) == "v5p:8x8x16"
    assert aot.slice_of("v5p", 4096) == "v5p:16x16x16"
    assert aot.slice_of("v6e", 8) == "v6e:2x4" and aot.slice_of("v5e", 256) == "v5e:16x16"
    with pytest.raises(UserError, match="'h200'"):
        aot.slice_of("h200", 8)
