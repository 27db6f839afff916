"""Mixture-of-Depths against the dense model of the same depth and width, one process, alternating.

python -m benchmarks.mod_step [--layers 4 --batch 2 --repeats 7] [--json FILE]

Both models have width 512 and rows of 2048 tokens; the MoD model routes every other block at
capacity 1/8. A training step is forward, backward and AdamW. The limit of either speed-up is the
ratio of the two models' FLOPs (modo.flops, which the tests hold equal to the jaxpr's).
"""

import argparse
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
from flax import nnx

from modo import flops
from modo.config import (
    Config,
    DepthConfig,
    MeshConfig,
    ModelConfig,
    OptimizerConfig,
    TrainConfig,
)
from modo.train.mesh import make_mesh
from modo.train.step import init_state, make_state, make_train_step


def make_config(depth: DepthConfig | None, layers: int, batch: int) -> Config:
    """A byte model of width 512 on rows of 2048 tokens."""
    return Config(
        model=ModelConfig(vocab_size=257, d_model=512, num_layers=layers, num_heads=8, depth=depth),
        optimizer=OptimizerConfig(name="adamw"),
        mesh=MeshConfig(),
        train=TrainConfig(batch_size=batch, length=2048, steps=1000),
    )


class Subject:
    """One model: its step and forward pass, compiled and run once."""

    def __init__(self, config: Config):
        self.config = config
        mesh = make_mesh(config.mesh)
        graphdef, abstract_state = make_state(config, mesh)
        self.state = init_state(config, abstract_state)
        shape = (config.train.batch_size, config.train.length)
        tokens = jax.random.randint(jax.random.key(0), shape, 0, config.model.vocab_size)
        self.batch = {
            "tokens_BT": tokens,
            "targets_BT": jnp.roll(tokens, -1, axis=1),
            "weights_BT": jnp.ones(shape, jnp.float32),
        }
        self._step = make_train_step(graphdef, config, mesh, abstract_state)
        self._forward = jax.jit(lambda params, x_BT: nnx.merge(graphdef, params)(x_BT)[0])
        self.step()
        self.forward()

    def step(self) -> float:
        """Seconds of one training step."""
        start = time.perf_counter()
        self.state, metrics = self._step(self.state, self.batch)
        jax.block_until_ready((self.state, metrics))
        return time.perf_counter() - start

    def forward(self) -> float:
        """Seconds of one forward pass."""
        start = time.perf_counter()
        jax.block_until_ready(self._forward(self.state.params, self.batch["tokens_BT"]))
        return time.perf_counter() - start


def measure(layers: int, batch: int, repeats: int) -> dict[str, float]:
    """Runs both models in turn; a speed-up is the median over rounds of dense time / MoD time."""
    dense = Subject(make_config(None, layers, batch))
    mod = Subject(make_config(DepthConfig(every=2, capacity=0.125), layers, batch))
    rounds = [(dense.step() / mod.step(), dense.forward() / mod.forward()) for _ in range(repeats)]
    step, forward = (statistics.median(ratios) for ratios in zip(*rounds, strict=True))
    length, models = dense.config.train.length, (dense.config.model, mod.config.model)
    step_limit = flops.train_step(models[0], batch, length) / flops.train_step(
        models[1], batch, length
    )
    forward_limit = flops.forward(models[0], length) / flops.forward(models[1], length)
    return {
        "speedup_step": step,
        "speedup_forward": forward,
        "flop_ratio": step_limit,
        "flop_ratio_forward": forward_limit,
        "step_of_limit": step / step_limit,
        "forward_of_limit": forward / forward_limit,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    result = measure(options.layers, options.batch, options.repeats)
    print(f"{options.layers} layers, width 512, batch {options.batch} x 2048, {jax.devices()[0]}")
    print(f"{'':<14}{'speed-up':>10}{'FLOP ratio':>12}{'of limit':>10}")
    for name, limit in (("step", "flop_ratio"), ("forward", "flop_ratio_forward")):
        speedup, bound = result[f"speedup_{name}"], result[limit]
        print(f"{name:<14}{speedup:>10.3f}{bound:>12.3f}{speedup / bound:>10.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=2) + "\n")


if __name__ == "__main__":
    main()
