"""Training over eight devices beside training on one; run by test_mesh.py as a program."""

import dataclasses
import json
import sys

import jax
import numpy as np

from modo.config import Config, DepthConfig, MeshConfig, MobaConfig, ModelConfig, TrainConfig
from modo.nn.partition import path_names
from modo.train.mesh import batch_sharding, make_mesh, place_batch
from modo.train.step import init_state, loss_and_gradients, make_state

V, T, B = 64, 32, 8
# Most of the time here goes into compiling.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
DEPTH = DepthConfig(capacity=0.25, noise=0.1, router_loss_weight=0.1)
MOBA = MobaConfig(block_size=4, top_k=3)
MODELS = {
    "dense": dict(),
    "mod": dict(depth=DEPTH),
    "moba": dict(moba=MOBA),
    "both": dict(depth=DEPTH, moba=dataclasses.replace(MOBA, key_convolution=3)),
}
MESHES = {
    "data": MeshConfig(data=8),
    "fsdp": MeshConfig(data=1, fsdp=8),
    "tensor": MeshConfig(data=4, tensor=2),
    "context": MeshConfig(data=1, context=8),
    "mixed": MeshConfig(data=1, fsdp=2, tensor=2, context=2),
    "accumulated": MeshConfig(data=2, fsdp=2, context=2),
}


def experiment(model: str, mesh: MeshConfig, accumulation: int = 1) -> Config:
    options = dict(scan_layers=True, remat="block") if accumulation > 1 else {}
    return Config(
        ModelConfig(
            vocab_size=V, d_model=32, num_layers=2, num_heads=4, num_kv_heads=2, d_ff=48,
            loss_chunk=8 if accumulation > 1 else None, **MODELS[model], **options,
        ),
        mesh=mesh,
        train=TrainConfig(steps=10, batch_size=B, length=T, accumulation=accumulation),
    )  # fmt: skip


def batch_of(step: int) -> dict:
    """Rows of documents and padding."""
    rng = np.random.default_rng(step)
    valid_BT = np.arange(T) < rng.integers(T // 2, T + 1, (B, 1))
    starts_BT = (rng.random((B, T)) < 0.1) | (np.arange(T) == 0)
    first_BT = np.maximum.accumulate(np.where(starts_BT, np.arange(T), 0), axis=1)
    batch = {
        "tokens_BT": rng.integers(0, V, (B, T)),
        "targets_BT": rng.integers(0, V, (B, T)),
        "positions_BT": np.arange(T) - first_BT,
        "segment_ids_BT": np.cumsum(starts_BT, axis=1),
    }
    batch = {name: (x * valid_BT).astype(np.int32) for name, x in batch.items()}
    return batch | {"weights_BT": valid_BT.astype(np.float32)}


def train(config: Config, devices: list) -> dict:
    """Gradients of the first step, metrics of ten steps of SGD, and how often it was compiled."""
    mesh = make_mesh(config.mesh, devices)
    graphdef, abstract_state = make_state(config, mesh)
    params = init_state(config, abstract_state).params
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state.params)

    def sgd(params, batch):
        metrics, grads = loss_and_gradients(params, graphdef, batch, jax.random.key(0), config)
        params = jax.tree.map(lambda p, g: p - 0.5 * g, params, grads)
        return params, grads, metrics

    step = jax.jit(
        sgd,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, shardings, None),
        compiler_options=QUICK_COMPILE,
    )
    records, first = [], None
    for number in range(10):
        # The same rows again and again, so that the loss falls far.
        batch = place_batch(batch_of(number % 2), batch_sharding(mesh))
        params, grads, metrics = step(params, batch)
        records.append({name: float(value) for name, value in metrics.items()})
        first = grads if first is None else first
    for grad, sharding in zip(jax.tree.leaves(first), jax.tree.leaves(shardings), strict=True):
        assert grad.sharding.is_equivalent_to(sharding, grad.ndim)
    leaves = jax.tree_util.tree_leaves_with_path(first)
    return {
        "records": records,
        "gradients": {"/".join(path_names(path)): np.asarray(leaf) for path, leaf in leaves},
        "compilations": step._cache_size(),
    }


def largest_difference(one: dict, many: dict) -> float:
    """Of any gradient, over the largest entry of its array; of any metric, over its size."""
    differences = []
    for ours, theirs in zip(one["records"], many["records"], strict=True):
        differences += [abs(a - theirs[name]) / max(abs(a), 0.1) for name, a in ours.items()]
    for name, grad in one["gradients"].items():
        scale = max(float(np.abs(grad).max()), 1e-3)
        differences.append(float(np.abs(grad - many["gradients"][name]).max()) / scale)
    return max(differences)


def main(model: str, *meshes: str) -> None:
    assert len(jax.devices()) == 8
    report, one = {}, {}
    for name in meshes:
        accumulation = 2 if name == "accumulated" else 1
        if accumulation not in one:
            alone = experiment(model, MeshConfig(), accumulation)
            one[accumulation] = train(alone, jax.devices()[:1])
        many = train(experiment(model, MESHES[name], accumulation), jax.devices())
        losses = [record["loss"] for record in one[accumulation]["records"]]
        report[name] = {
            "difference": largest_difference(one[accumulation], many),
            "compilations": many["compilations"],
            "fell": losses[0] - losses[-1],
        }
    print(json.dumps(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
