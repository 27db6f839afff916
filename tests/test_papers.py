import dataclasses
import math
import re

import pytest
from jax.sharding import AbstractMesh

from modo import aot, flops, papers
from modo.hardware import HARDWARE
from modo.train import cli
from modo.train.mesh import AXES, check_divides

SIZES = {f"mod_{name}": size.parameters for name, size in papers.MOD_SIZES.items()}
SIZES |= {f"moba_{name}": size.parameters for name, size in papers.MOBA_SIZES.items()}
SIZES |= {"llama_8b": 8.03e9}
NAMES = [name for name in cli.config_names() if name not in ("tiny", "small")]


def docstring(name: str) -> str:
    [path] = [d / f"{name}.py" for d in cli._config_directories() if (d / f"{name}.py").exists()]
    return path.read_text()


@pytest.mark.parametrize("name", NAMES)
def test_size_and_slice(name):
    config, text = cli.load_config(name), docstring(name)
    [size] = [size for start, size in SIZES.items() if name.startswith(start)]
    assert abs(flops.parameter_count(config.model) / size - 1) < 0.03
    assert f"--config {name} --workdir runs/{name}\n" in text and "not run" in text
    # A mesh for exactly the slice that it names, and one that cuts the model and the batch.
    shape = re.search(r"TPU (?:v\w+):([\dx]+)", text)[1]
    sizes = dataclasses.astuple(config.mesh)
    assert math.prod(sizes) == math.prod(map(int, shape.split("x")))
    check_divides(config, AbstractMesh(sizes, AXES))


def test_every_size_has_its_twins():
    wanted = {f"mod_{size}{twin}" for size in papers.MOD_SIZES for twin in ("", "_baseline")}
    for size in papers.MOBA_SIZES:
        wanted |= {f"moba_{size}{row}{twin}" for row in ("", "_8k") for twin in ("", "_full")}
    assert wanted | {"llama_8b_1m"} == set(NAMES)


def test_what_the_papers_say():
    mod = cli.load_config("mod_3b")
    assert (mod.train.batch_size, mod.train.length) == (128, 2048)
    assert (mod.model.depth.capacity, mod.model.depth.every) == (0.125, 2)
    baseline = dataclasses.replace(mod.model, depth=None)
    assert cli.load_config("mod_3b_baseline").model == baseline
    for name, length in (("moba_2b", 32_768), ("moba_2b_8k", 8192)):
        moba = cli.load_config(name)
        assert moba.train.batch_size * moba.train.length == 1 << 22
        assert moba.train.length == length and moba.model.vocab_size == 65_536
        model = moba.model
        assert (model.num_layers, model.num_heads, model.d_model) == (22, 22, 2816)
        assert (model.moba.block_size, model.moba.top_k) == (512, 3)
        assert cli.load_config(f"{name}_full").model == dataclasses.replace(model, moba=None)
    llama = cli.load_config("llama_8b_1m")
    assert llama.train.length == 1 << 20 and llama.model.moba_layers == tuple(range(29))
    assert (llama.model.moba.block_size, llama.model.moba.top_k) == (4096, 12)


def test_hardware_agrees_with_the_counts_of_flops():
    for kind, hardware in HARDWARE.items():
        share = 2 if kind == "TPU7x" else 1  # devices a chip
        assert hardware.flops * share == flops.PEAK_FLOPS[kind]
    assert aot.of_device("TPU v5") is HARDWARE["TPU v5"]
    with pytest.raises(aot.UserError, match="no numbers for device 'TPU v9'"):
        aot.of_device("TPU v9")
