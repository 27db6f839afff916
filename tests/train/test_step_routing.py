"""What the train step makes of routing: losses, gradients, accumulation, devices."""

import contextlib
import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from modo import DepthConfig, ModelConfig
from modo.config import Config, MeshConfig, OptimizerConfig, TrainConfig
from modo.nn import Decoder
from modo.nn.partition import path_names
from modo.ops import cross_entropy
from modo.train.evaluation import eval_sums
from modo.train.mesh import make_mesh
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


def short(config: Config) -> Config:
    """The same with one layer, routed."""
    depth = dataclasses.replace(config.model.depth, layers=(0,))
    model = dataclasses.replace(config.model, num_layers=1, depth=depth)
    return dataclasses.replace(config, model=model)


def batch_of(seed=0) -> dict:
    """Rows with few and many tokens, and two with none."""
    rng = np.random.default_rng(seed)
    sizes_B = np.asarray([16, 3, 0, 9, 12, 1, 0, 7])
    valid_BT = np.arange(T) < sizes_B[:, None]
    segments_BT = np.where(np.arange(T) < sizes_B[:, None] // 2, 1, 2) * valid_BT
    # No token twice in a row: alike ones have scores that only rounding tells apart.
    tokens_BT = rng.permuted(np.tile(np.arange(V, dtype=np.int32), (B, 1)), axis=1)[:, :T]
    return {
        "tokens_BT": tokens_BT * valid_BT,
        "targets_BT": rng.integers(0, V, (B, T)).astype(np.int32) * valid_BT,
        "weights_BT": (valid_BT & (rng.random((B, T)) < 0.8)).astype(np.float32),
        "positions_BT": np.broadcast_to(np.arange(T, dtype=np.int32), (B, T)) * valid_BT,
        "segment_ids_BT": segments_BT.astype(np.int32),
    }


# Most of the time here goes into compiling small programs.
QUICK_COMPILE = {"xla_backend_optimization_level": 0, "xla_llvm_disable_expensive_passes": True}
quick_jit = functools.partial(jax.jit, compiler_options=QUICK_COMPILE)


@functools.lru_cache
def _start(model: ModelConfig):
    abstract = nnx.eval_shape(lambda: Decoder(model, rngs=nnx.Rngs(0)))
    return nnx.split(abstract)[0], quick_jit(lambda: nnx.state(Decoder(model, rngs=nnx.Rngs(0))))()


def start(config: Config):
    """(graphdef, parameters) of a fresh model: the weights of losses make no other."""
    depth = dataclasses.replace(
        config.model.depth, router_loss_weight=0.0, predictor_loss_weight=0.01
    )
    params = _start(dataclasses.replace(config.model, depth=depth))[1]
    return nnx.split(nnx.eval_shape(lambda: Decoder(config.model, rngs=nnx.Rngs(0))))[0], params


@functools.partial(quick_jit, static_argnames=("graphdef", "config"))
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


# Every term counts: the objective is far from the reported loss.
ALL_LOSSES = dict(router_loss_weight=0.5, predictor_loss_weight=0.5, z_loss=0.1)


def _forward(graphdef, params, batch):
    return nnx.merge(graphdef, params)(
        batch["tokens_BT"],
        positions_BT=batch["positions_BT"],
        segment_ids_BT=batch["segment_ids_BT"],
    )


@pytest.mark.quick
def test_reported_loss_is_language_modelling_alone():
    config, batch = experiment(**ALL_LOSSES), batch_of()
    metrics, _ = gradients(config, batch)
    graphdef, params = start(config)

    @quick_jit
    def nats_and_aux(params):
        logits_BTV, aux = _forward(graphdef, params, batch)
        return cross_entropy(logits_BTV, batch["targets_BT"])[0], aux

    nats_BT, aux = nats_and_aux(params)
    weights_BT = batch["weights_BT"]
    np.testing.assert_allclose(
        metrics["loss"], np.sum(nats_BT * weights_BT) / weights_BT.sum(), rtol=1e-5
    )
    for name in ("router_loss", "predictor_loss"):
        np.testing.assert_allclose(metrics[name], getattr(aux, name), rtol=1e-5)
    for name, value in aux.statistics.items():
        np.testing.assert_allclose(metrics[f"routing_{name}"], value, rtol=1e-5)


def test_each_weight_reaches_its_own_parameters():
    batch = batch_of()
    _, plain = gradients(experiment(predictor_loss_weight=0.0), batch)
    _, predictor = gradients(experiment(predictor_loss_weight=1.0), batch)
    _, every = gradients(experiment(**ALL_LOSSES), batch)
    predictors = [path for path in plain if is_predictor(path)]
    for path in plain:
        if path in predictors:
            assert not plain[path].any()
            np.testing.assert_allclose(every[path], predictor[path] / 2, rtol=1e-4, atol=1e-7)
        else:
            np.testing.assert_array_equal(plain[path], predictor[path])
    assert any(predictor[path].any() for path in predictors)
    (router,) = (path for path in plain if "router" in path)
    assert plain[router].any() and not np.allclose(plain[router], every[router], atol=1e-3)


def test_accumulation_of_uneven_microbatches_equals_one_batch():
    # Rows 2 and 6 are padding, and a microbatch of their own.
    batch = batch_of()
    whole, whole_grads = gradients(experiment(**ALL_LOSSES), batch)
    parts, grads = gradients(experiment(accumulation=4, **ALL_LOSSES), batch)
    same(grads, whole_grads)
    for name in ("loss", "router_loss", "predictor_loss", "routing_fraction", "routing_entropy"):
        np.testing.assert_allclose(parts[name], whole[name], rtol=1e-5, err_msg=name)


def test_z_loss_is_the_mean_square_of_the_log_partition():
    batch = batch_of()
    graphdef, params = start(experiment())

    def z_loss(params):
        square_BT = jax.nn.logsumexp(_forward(graphdef, params, batch)[0], axis=-1) ** 2
        return jnp.sum(square_BT * batch["weights_BT"]) / batch["weights_BT"].sum()

    expected = by_path(quick_jit(jax.grad(z_loss))(params))
    _, without = gradients(experiment(predictor_loss_weight=0.0), batch)
    _, with_z = gradients(experiment(predictor_loss_weight=0.0, z_loss=2.0), batch)
    same({path: (with_z[path] - without[path]) / 2 for path in with_z}, expected, atol=1e-5)


@contextlib.contextmanager
def quick_compilation():
    before = jax.config.read("jax_disable_most_optimizations")
    jax.config.update("jax_disable_most_optimizations", True)
    try:
        yield
    finally:
        jax.config.update("jax_disable_most_optimizations", before)


@functools.lru_cache
def _prepare(config: Config, mesh_config=MeshConfig(), count=1):  # noqa: B008
    mesh = make_mesh(mesh_config, jax.devices()[:count])
    graphdef, abstract = make_state(config, mesh)
    with quick_compilation():
        first = jax.device_get(init_state(config, abstract))
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    return first, shardings, make_train_step(graphdef, config, mesh, abstract)


def train(config: Config, *mesh, steps=3):
    """(metrics of each step, parameters before the first and after the last, compilations)."""
    first, shardings, step = _prepare(config, *mesh)
    state, records = jax.device_put(first, shardings), []
    for number in range(steps):
        state, metrics = step(state, batch_of(number))
        records.append({name: float(value) for name, value in metrics.items()})
    assert int(state.step) == steps
    return records, by_path(first.params), by_path(state.params), step._cache_size()


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_training_is_bitwise_the_same_without_a_predictor(optimizer):
    config = short(experiment(optimizer=optimizer, noise=2.0))
    without = short(experiment(optimizer=optimizer, noise=2.0, predictor=False))
    # One of the two as it runs, the other as it compiles in half the time.
    with quick_compilation() if optimizer == "muon" else contextlib.nullcontext():
        records, first, params, compilations = train(config)
        other_records, _, other_params, _ = train(without)
    assert compilations == 1
    # Gradients are clipped, and a predictor's would have a part in the norm.
    assert records[0]["gradient_norm"] > OPTIMIZER.clip_norm
    assert [r["loss"] for r in records] == [r["loss"] for r in other_records]
    assert set(other_params) == {path for path in params if not is_predictor(path)}
    for path, leaf in other_params.items():
        np.testing.assert_array_equal(params[path], leaf, err_msg=str(path))
        assert not np.array_equal(first[path], leaf)
    assert any(not np.array_equal(first[p], params[p]) for p in params if is_predictor(p))


def test_a_run_with_noise_runs_again_the_same():
    config = short(experiment(noise=2.0))
    records, _, params, _ = train(config)
    again, _, params_again, compilations = train(config)
    assert records == again and compilations == 1
    for path, leaf in params.items():
        np.testing.assert_array_equal(params_again[path], leaf)


def test_random_routing_of_a_step_follows_its_key():
    batch, config = batch_of(), short(experiment(routing="random"))
    graphdef, params = start(config)
    keys = jax.random.split(jax.random.key(0), 3)
    losses = [
        float(_gradients(params, batch, key, graphdef, config)[0]["loss"])
        for key in (*keys, keys[0])
    ]
    assert losses[0] == losses[3] and len(set(losses)) == 3


_eval_sums = quick_jit(eval_sums.__wrapped__, static_argnames=("graphdef", "routing"))


def test_evaluation_reports_each_routing_as_it_is():
    config = experiment(noise=2.0)
    graphdef, params = start(config)
    batch, nats = batch_of(), {}
    for routing in ("top_k", "router", "predictor", "random"):
        first, again, other = (
            np.asarray(_eval_sums(graphdef, params, batch, key, routing=routing)["nats_B"])
            for key in map(jax.random.key, (0, 0, 1))
        )
        np.testing.assert_array_equal(first, again)
        # Noise is for training: only the random control draws.
        assert np.array_equal(first, other) == (routing != "random")
        nats[routing] = tuple(first.tolist())
    # A fresh predictor takes no token, so it stands apart too.
    assert len(set(nats.values())) == 4
    quiet = start(experiment())[0]
    without = _eval_sums(quiet, params, batch, jax.random.key(0), routing="top_k")["nats_B"]
    assert nats["top_k"] == tuple(np.asarray(without).tolist())
