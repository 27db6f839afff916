"""What the train step makes of routing: losses, gradients, accumulation, devices."""

import dataclasses
import functools
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modo import DepthConfig, MobaConfig, ModelConfig
from modo.config import Config, MeshConfig, OptimizerConfig, TrainConfig
from modo.nn import Decoder
from modo.ops import cross_entropy
from modo.train.evaluation import eval_sums
from modo.train.mesh import make_mesh, path_names
from modo.train.step import init_state, loss_and_gradients, make_state, make_train_step

V, T, B = 32, 16, 8
MODEL = ModelConfig(
    vocab_size=V, d_model=16, num_layers=2, num_heads=2, d_ff=24, depth=DepthConfig(capacity=0.25)
)
OPTIMIZER = OptimizerConfig(learning_rate=0.02, warmup_steps=1, clip_norm=0.1)


def experiment(
    *, optimizer="adamw", accumulation=1, z_loss=0.0, routing="top_k", **depth
) -> Config:
    return Config(
        dataclasses.replace(MODEL, depth=dataclasses.replace(MODEL.depth, **depth)),
        optimizer=dataclasses.replace(OPTIMIZER, name=optimizer),
        train=TrainConfig(
            steps=10,
            batch_size=B,
            length=T,
            accumulation=accumulation,
            z_loss=z_loss,
            routing=routing,
        ),
    )


def batch_of(seed=0) -> dict:
    """Rows with few and many tokens, and two with none."""
    rng = np.random.default_rng(seed)
    sizes_B = np.asarray([16, 3, 0, 9, 12, 1, 0, 7])
    valid_BT = np.arange(T) < sizes_B[:, None]
    segments_BT = np.where(np.arange(T) < sizes_B[:, None] // 2, 1, 2) * valid_BT
    return {
        "tokens_BT": rng.integers(0, V, (B, T)).astype(np.int32) * valid_BT,
        "targets_BT": rng.integers(0, V, (B, T)).astype(np.int32) * valid_BT,
        "weights_BT": (valid_BT & (rng.random((B, T)) < 0.8)).astype(np.float32),
        "positions_BT": np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)) * valid_BT,
        "segment_ids_BT": segments_BT.astype(np.int32),
    }


@functools.lru_cache
def start(config: Config):
    """(graphdef, parameters) before the first step."""
    model = nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0)))
    params = jax.jit(lambda: nnx.state(Decoder(config.model, rngs=nnx.Rngs(0))))()
    return nnx.split(model)[0], params


@functools.partial(jax.jit, static_argnames=("graphdef", "config"))
def _gradients(params, batch, key, graphdef, config):
    return loss_and_gradients(params, graphdef, batch, key, config)


def gradients(config: Config, batch: dict):
    """(metrics, {path: gradient})."""
    graphdef, params = start(config)
    metrics, grads = _gradients(params, batch, jax.random.key(0), graphdef, config)
    return metrics, by_path(grads)


def by_path(tree) -> dict[tuple[str, ...], np.ndarray]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_names(path): np.asarray(leaf) for path, leaf in leaves}


def same(a: dict, b: dict, *, scale=1.0, rtol=1e-4, atol=1e-6) -> None:
    assert set(a) == set(b)
    for path in a:
        np.testing.assert_allclose(
            a[path] * scale, b[path], rtol=rtol, atol=atol, err_msg=str(path)
        )


def is_predictor(path) -> bool:
    return "predictor" in path


@pytest.mark.quick
def test_reported_loss_is_language_modelling_alone():
    # Weights that would show: they make the objective a hundred times the loss.
    config = experiment(router_loss_weight=100.0, predictor_loss_weight=100.0, z_loss=1.0)
    batch = batch_of()
    metrics, _ = gradients(config, batch)
    graphdef, params = start(config)

    @jax.jit
    def forward(params):
        logits_BTV, aux = nnx.merge(graphdef, params)(
            batch["tokens_BT"],
            positions_BT=batch["positions_BT"],
            segment_ids_BT=batch["segment_ids_BT"],
        )
        return cross_entropy(logits_BTV, batch["targets_BT"])[0], aux

    nats_BT, aux = forward(params)
    weights_BT = batch["weights_BT"]
    np.testing.assert_allclose(
        metrics["loss"], np.sum(nats_BT * weights_BT) / weights_BT.sum(), rtol=1e-5
    )
    for name in ("router_loss", "predictor_loss"):
        np.testing.assert_allclose(metrics[name], getattr(aux, name), rtol=1e-5)
    for name, value in aux.statistics.items():
        np.testing.assert_allclose(metrics[f"routing_{name}"], value, rtol=1e-5)


@pytest.mark.quick
def test_each_weight_reaches_its_own_parameters():
    batch = batch_of()
    _, plain = gradients(experiment(predictor_loss_weight=0.0), batch)
    _, predictor = gradients(experiment(predictor_loss_weight=1.0), batch)
    _, router = gradients(experiment(predictor_loss_weight=0.0, router_loss_weight=1.0), batch)
    for path in plain:
        if is_predictor(path):
            assert not plain[path].any() and not router[path].any()
        else:
            np.testing.assert_array_equal(plain[path], predictor[path])
    predictors = [path for path in plain if is_predictor(path)]
    assert any(predictor[path].any() for path in predictors)
    (kernel,) = (path for path in plain if "router" in path)
    assert plain[kernel].any() and not np.allclose(plain[kernel], router[kernel], atol=1e-3)


@pytest.mark.quick
def test_accumulation_of_uneven_microbatches_equals_one_batch():
    # Rows 2 and 6 are padding: with 4 microbatches they are one of their own.
    batch = batch_of()
    options = dict(router_loss_weight=0.5, predictor_loss_weight=0.5, z_loss=0.1)
    whole, whole_grads = gradients(experiment(**options), batch)
    for accumulation in (2, 4):
        parts, grads = gradients(experiment(accumulation=accumulation, **options), batch)
        same(grads, whole_grads)
        for name in (
            "loss",
            "router_loss",
            "predictor_loss",
            "routing_fraction",
            "routing_entropy",
        ):
            np.testing.assert_allclose(parts[name], whole[name], rtol=1e-5, err_msg=name)


def test_z_loss_is_the_mean_square_of_the_log_partition():
    batch = batch_of()
    graphdef, params = start(experiment())

    def z_loss(params):
        logits_BTV, _ = nnx.merge(graphdef, params)(
            batch["tokens_BT"],
            positions_BT=batch["positions_BT"],
            segment_ids_BT=batch["segment_ids_BT"],
        )
        square_BT = jax.nn.logsumexp(logits_BTV, axis=-1) ** 2
        return jnp.sum(square_BT * batch["weights_BT"]) / batch["weights_BT"].sum()

    expected = by_path(jax.jit(jax.grad(z_loss))(params))
    _, without = gradients(experiment(), batch)
    _, with_z = gradients(experiment(z_loss=2.0), batch)
    same({path: (with_z[path] - without[path]) / 2 for path in with_z}, expected, atol=1e-5)


def _train(config: Config, steps=3, mesh_config=None, devices=None):
    """(metrics of each step, parameters after the last, compilations)."""
    devices = jax.devices()[:1] if devices is None else devices
    mesh = make_mesh(mesh_config or MeshConfig(), devices)
    graphdef, abstract = make_state(config, mesh)
    state = init_state(config, abstract)
    step = make_train_step(graphdef, config, mesh, abstract)
    records = []
    for number in range(steps):
        state, metrics = step(state, batch_of(number))
        records.append({name: float(value) for name, value in metrics.items()})
    assert int(state.step) == steps
    return records, by_path(jax.device_get(state.params)), step._cache_size()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_is_bitwise_the_same_without_a_predictor(optimizer):
    records, params, compilations = _train(experiment(optimizer=optimizer))
    other_records, other_params, _ = _train(experiment(optimizer=optimizer, predictor=False))
    assert compilations == 1
    # The gradients are clipped, and the predictor's would count if they were looked at.
    assert records[0]["gradient_norm"] > OPTIMIZER.clip_norm
    assert [r["loss"] for r in records] == [r["loss"] for r in other_records]
    assert set(other_params) == {path for path in params if not is_predictor(path)}
    for path, leaf in other_params.items():
        np.testing.assert_array_equal(params[path], leaf, err_msg=str(path))
    _, first = start(experiment(optimizer=optimizer))
    moved = [not np.array_equal(leaf, params[path]) for path, leaf in by_path(first).items()]
    assert sum(moved) > len(moved) - 2


@pytest.mark.quick
def test_noise_is_a_function_of_seed_and_step():
    config = experiment(noise=2.0)
    records, params, _ = _train(config)
    again, params_again, _ = _train(config)
    assert records == again
    for path, leaf in params.items():
        np.testing.assert_array_equal(params_again[path], leaf)
    other_seed = dataclasses.replace(config, train=dataclasses.replace(config.train, seed=1))
    graphdef, first = start(config)
    batch = batch_of()
    keys = [
        jax.random.fold_in(jax.random.key(seed), step) for seed, step in ((0, 0), (0, 1), (1, 0))
    ]
    losses = {float(_gradients(first, batch, key, graphdef, config)[0]["loss"]) for key in keys}
    assert len(losses) == 3 and other_seed != config


@pytest.mark.quick
def test_evaluation_reports_each_routing_as_it_is():
    config = experiment(noise=2.0, router_loss_weight=1.0)
    graphdef, params = start(config)
    params = jax.tree.map(lambda leaf: leaf, params)
    batch, key = batch_of(), jax.random.key(0)
    run = functools.partial(eval_sums, graphdef, params, batch)
    nats = {}
    for routing in ("top_k", "router", "predictor", "random"):
        sums = run(key, routing=routing)
        nats[routing] = np.asarray(sums["nats_B"])
        np.testing.assert_array_equal(run(key, routing=routing)["nats_B"], nats[routing])
        moved = np.array_equal(run(jax.random.key(1), routing=routing)["nats_B"], nats[routing])
        # Noise is for training: only the random control draws.
        assert moved == (routing != "random")
    assert len({tuple(value.tolist()) for value in nats.values()}) == 4


WORKER = """
import json, sys
import jax
sys.path[:0] = sys.argv[1:]
from test_step_routing import device_report
print(json.dumps(device_report()))
"""


def device_report() -> dict:
    """Losses, gradient norms and parameters of short runs on meshes of eight devices and of one."""
    model = dataclasses.replace(
        MODEL,
        num_layers=2,
        num_kv_heads=2,
        moba=MobaConfig(block_size=4, top_k=2, layers=(1,)),
        depth=DepthConfig(capacity=0.25, noise=1.0, router_loss_weight=0.1),
    )
    config = dataclasses.replace(experiment(), model=model)
    meshes = {
        "one": (MeshConfig(data=1), 1),
        "data": (MeshConfig(data=8), 8),
        "fsdp": (MeshConfig(data=2, fsdp=4), 8),
        "tensor": (MeshConfig(data=-1, tensor=2), 8),
    }
    report = {"devices": len(jax.devices())}
    for name, (mesh, count) in meshes.items():
        records, params, compilations = _train(config, 2, mesh, jax.devices()[:count])
        report[name] = {
            "records": records,
            "params": {"/".join(path): leaf.ravel().tolist() for path, leaf in params.items()},
            "compilations": compilations,
        }
    return report


def test_eight_devices_train_as_one():
    here = pathlib.Path(__file__).parent
    environment = os.environ | {
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "JAX_PLATFORMS": "cpu",
    }
    done = subprocess.run(
        [sys.executable, "-c", WORKER, str(here), str(here.parents[1])],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout.splitlines()[-1])
    assert report["devices"] == 8
    one = report["one"]
    for name in ("data", "fsdp", "tensor"):
        many = report[name]
        assert many["compilations"] == 1
        for ours, theirs in zip(many["records"], one["records"], strict=True):
            for metric, value in theirs.items():
                np.testing.assert_allclose(
                    ours[metric], value, rtol=2e-4, atol=1e-5, err_msg=metric
                )
        for path, leaf in one["params"].items():
            np.testing.assert_allclose(many["params"][path], leaf, atol=2e-3, err_msg=path)
