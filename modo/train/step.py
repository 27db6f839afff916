"""The training state and the jitted step: a pure function, state in and state out."""

import dataclasses

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from jax import Array
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from modo.config import Config
from modo.nn.decoder import Decoder
from modo.train.mesh import batch_sharding, state_shardings
from modo.train.optimizer import make_optimizer


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class TrainState:
    """All that a run carries from step to step.

    Attributes:
      step: int32 scalar, updates made.
      params: nnx.State of float32 parameters.
      opt_state: of the optimizer.
    """

    step: Array
    params: nnx.State
    opt_state: optax.OptState


def make_state(config: Config, mesh: Mesh) -> tuple[nnx.GraphDef, TrainState]:
    """The model's structure and its abstract state: shapes, dtypes and shardings, no values."""
    # One device needs no mesh: then attention is not cut, and kernels run as they are.
    model_mesh = mesh if mesh.size > 1 else None
    graphdef, params = nnx.split(_abstract_model(config, model_mesh))
    optimizer = make_optimizer(config.optimizer, config.train.steps)
    state = TrainState(
        step=jax.ShapeDtypeStruct((), jnp.int32),
        params=params,
        opt_state=jax.eval_shape(optimizer.init, params),
    )
    shardings = state_shardings(state, mesh)
    return graphdef, jax.tree.map(
        lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s), state, shardings
    )


def _abstract_model(config: Config, mesh: Mesh | None) -> Decoder:
    return nnx.eval_shape(
        lambda: Decoder(config.model, mesh=mesh, rngs=nnx.Rngs(config.train.seed))
    )


def init_state(config: Config, abstract_state: TrainState) -> TrainState:
    """A fresh state, initialised where it will lie."""
    optimizer = make_optimizer(config.optimizer, config.train.steps)

    def init():
        model = Decoder(config.model, rngs=nnx.Rngs(config.train.seed))
        params = nnx.state(model)
        return TrainState(jnp.zeros((), jnp.int32), params, optimizer.init(params))

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    return jax.jit(init, out_shardings=shardings)()


def microbatch_loss(
    params, graphdef, batch: dict, key: Array, config: Config, tokens: Array, valid: Array
) -> tuple[Array, dict[str, Array]]:
    """What one microbatch adds to the step's objective.

    Each token weighs the same whatever microbatch it is in: sums are divided by the whole step's
    counts, `tokens` for the language-modelling loss and `valid` for the routing losses.

    Returns:
      (objective, metrics that add up over microbatches).
    """
    model = nnx.merge(graphdef, params)
    nats_BT, log_z_BT, aux = model.token_losses(
        batch["tokens_BT"],
        batch["targets_BT"],
        positions_BT=batch.get("positions_BT"),
        segment_ids_BT=batch.get("segment_ids_BT"),
        routing=config.train.routing,
        key=key,
    )
    loss = jnp.sum(nats_BT * batch["weights_BT"]) / tokens
    share = _count_valid(batch) / valid
    objective = loss
    if config.train.z_loss > 0:
        z_loss = jnp.sum(log_z_BT**2 * batch["weights_BT"]) / tokens
        objective += config.train.z_loss * z_loss
    metrics = {"loss": loss}
    if config.model.depth is not None:
        depth = config.model.depth
        objective += depth.router_loss_weight * share * aux.router_loss
        objective += depth.predictor_loss_weight * share * aux.predictor_loss
        metrics |= {"router_loss": share * aux.router_loss}
        metrics |= {"predictor_loss": share * aux.predictor_loss}
        metrics |= {f"routing_{name}": share * s for name, s in aux.statistics.items()}
    return objective, metrics


def _count_valid(batch: dict) -> Array:
    if "segment_ids_BT" not in batch:
        return jnp.asarray(batch["tokens_BT"].size, jnp.float32)
    return jnp.sum(batch["segment_ids_BT"] != 0).astype(jnp.float32)


def _microbatches(batch: dict, number: int) -> dict:
    """[B, ...] to [number, B / number, ...], each taking every number-th row.

    So every device cuts its own rows, and none has to move.
    """
    return jax.tree.map(
        lambda x: x.reshape(x.shape[0] // number, number, *x.shape[1:]).swapaxes(0, 1), batch
    )


def loss_and_gradients(params, graphdef, batch: dict, key: Array, config: Config):
    """(metrics, gradients) of a whole batch, accumulated over its microbatches."""
    tokens = jnp.maximum(jnp.sum(batch["weights_BT"]), 1.0)
    number = config.train.accumulation
    micro = _microbatches(batch, number)
    valid = jnp.maximum(_count_valid(batch), 1.0)
    gradient = jax.grad(microbatch_loss, has_aux=True)

    def one(microbatch, index):
        grads, metrics = gradient(
            params, graphdef, microbatch, jax.random.fold_in(key, index), config, tokens, valid
        )
        return metrics, grads

    if number == 1:
        return one(batch, 0)

    def body(total, xs):
        return jax.tree.map(lambda sum_, x: (sum_ + x).astype(sum_.dtype), total, one(*xs)), None

    metrics, grads = jax.eval_shape(one, jax.tree.map(lambda x: x[0], micro), 0)
    dtype = jnp.dtype(config.train.accumulation_dtype)
    zeros = (
        jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), metrics),
        jax.tree.map(lambda x: jnp.zeros(x.shape, dtype), grads),
    )
    metrics, grads = jax.lax.scan(body, zeros, (micro, jnp.arange(number)))[0]
    return metrics, jax.tree.map(lambda grad, param: grad.astype(param.dtype), grads, params)


def make_train_step(graphdef, config: Config, mesh: Mesh, abstract_state: TrainState):
    """A jitted `step(state, batch) -> (state, metrics)`; the state it is given is consumed.

    batch holds tokens_BT, targets_BT, weights_BT and, where rows hold documents or padding,
    positions_BT and segment_ids_BT. metrics are float32 scalars: "loss" is the mean nats a
    counted token of language modelling alone; "finite" is 1 while loss and gradients are.
    """
    optimizer = make_optimizer(config.optimizer, config.train.steps)

    def step(state: TrainState, batch: dict) -> tuple[TrainState, dict[str, Array]]:
        key = jax.random.fold_in(jax.random.key(config.train.seed), state.step)
        metrics, grads = loss_and_gradients(state.params, graphdef, batch, key, config)
        updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
        params = optax.apply_updates(state.params, updates)
        metrics["gradient_norm"] = optax.tree.norm(grads)
        finite = jnp.isfinite(metrics["loss"]) & jnp.isfinite(metrics["gradient_norm"])
        metrics["finite"] = finite.astype(jnp.float32)
        return TrainState(state.step + 1, params, opt_state), metrics

    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract_state)
    return jax.jit(
        step,
        in_shardings=(shardings, batch_sharding(mesh)),
        out_shardings=(shardings, NamedSharding(mesh, PartitionSpec())),
        donate_argnums=0,
    )
