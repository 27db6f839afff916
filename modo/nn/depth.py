"""Mixture-of-Depths: a block that computes only the tokens its router chooses.

Raposo et al. 2024, arXiv 2404.02258. Eq. 1: x_i <- r_i f_i(X~) + x_i for the k tokens with the
highest r = w . x, x_i <- x_i for the rest; f sees the chosen tokens alone.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, get_args

import jax
import jax.numpy as jnp
from flax import nnx
from jax import Array, lax

from modo.config import Gate, Routing
from modo.ops import routing as ops
from modo.ops.segments import document_runs


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class DepthAux:
    """What a routed block returns beside its output.

    Attributes:
      routed_BT: bool, the tokens that were computed.
      router_logits_BT: float32.
      predictor_logits_BT: float32, or None without a predictor.
      router_loss: float32 scalar, cross-entropy of the router's logits against the choice.
      predictor_loss: float32 scalar, likewise of the predictor's; 0 without one.
      statistics: float32 scalars by name, see `routing_statistics`.
    """

    routed_BT: Array
    router_logits_BT: Array
    predictor_logits_BT: Array | None
    router_loss: Array
    predictor_loss: Array
    statistics: dict[str, Array]


def apply_gate(gate: Gate, r: Array) -> Array:
    """The factor on a routed token's update: r, sigmoid(r) or 1 + 0.2 tanh(r), in float32."""
    r = r.astype(jnp.float32)
    if gate == "linear":
        return r
    return jax.nn.sigmoid(r) if gate == "sigmoid" else 1.0 + 0.2 * jnp.tanh(r)


def default_predictor_width(d_model: int) -> int:
    """Hidden units of a predictor where none are given."""
    return max(16, d_model // 4)


class Predictor(nnx.Module):
    """A two-layer MLP that guesses from a token alone whether the router will take it.

    It reads the token at unit scale together with the log of its root mean square, in float32,
    because the router reads the token unnormalised.

    Args:
      d_model: width of the tokens.
      width: hidden units.
      capacity: the share of tokens routed, its first guess.
    """

    def __init__(self, d_model: int, width: int, capacity: float, *, rngs: nnx.Rngs):
        capacity = min(capacity, 0.99)
        self.hidden = nnx.Linear(d_model + 1, width, dtype=jnp.float32, rngs=rngs)
        self.score = nnx.Linear(
            width,
            1,
            dtype=jnp.float32,
            kernel_init=nnx.initializers.zeros,
            bias_init=nnx.initializers.constant(math.log(capacity / (1 - capacity))),
            rngs=rngs,
        )

    def __call__(self, x_BTD: Array) -> Array:
        """Logits [B, T, 1] float32; positive: route."""
        x_BTD = x_BTD.astype(jnp.float32)
        mean_square_BT1 = jnp.mean(x_BTD * x_BTD, axis=-1, keepdims=True) + 1e-6
        features_BTD = jnp.concatenate(
            [x_BTD * lax.rsqrt(mean_square_BT1), 0.5 * jnp.log(mean_square_BT1)], axis=-1
        )
        return self.score(jax.nn.silu(self.hidden(features_BTD)))


def _normal(key: Array, shape: tuple[int, int]) -> Array:
    """Gaussian float32 [B, T] from one key, or from one a row."""
    if key.ndim == 0:
        return jax.random.normal(key, shape, jnp.float32)
    return jax.vmap(lambda row_key: jax.random.normal(row_key, shape[1:], jnp.float32))(key)


class MixtureOfDepths(nnx.Module):
    """Wraps a block so that only the tokens chosen by a router are computed.

    Args:
      block: an nnx.Module, or its parameters are not part of this one, called as
        `block(x_BCD, positions_BC=, segment_ids_BC=)`; returns the residual update
        [B, C, D] without the residual. Positions are the tokens' true ones, in ascending order.
        Segment ids number the documents 1, 2, ...; slots of id 0 are empty and to be ignored.
        With gate_on="mlp" it also gets `gate_BC=`, float32, to multiply its MLP's output with.
      d_model: width D.
      capacity: fraction of a row's tokens that are computed.
      gate: "linear" (Eq. 1), "sigmoid" or "tanh", see `apply_gate`.
      gate_on: "block": the gate multiplies the whole update; "mlp": the block's MLP output.
      predictor: whether to hold a predictor for causal routing. Everything else is bitwise the
        same without it.
      predictor_width: its hidden units; None: d_model // 4, at least 16.
      noise: standard deviation of Gaussian noise on the logits when the top-k is taken and a key
        is given.
      per_document: choose per document instead of per row.
      rngs: initialises router and predictor.

    Raises:
      ValueError: capacity is not in (0, 1], an unknown gate, negative noise, or a predictor_width
        below 1.
    """

    def __init__(
        self,
        block: Callable[..., Array],
        d_model: int,
        *,
        capacity: float = 0.125,
        gate: Gate = "linear",
        gate_on: str = "block",
        predictor: bool = True,
        predictor_width: int | None = None,
        noise: float = 0.0,
        per_document: bool = False,
        rngs: nnx.Rngs,
    ):
        if not 0 < capacity <= 1:
            raise ValueError(f"capacity must be in (0, 1], got {capacity}")
        if gate not in get_args(Gate):
            raise ValueError(f"gate must be one of {', '.join(get_args(Gate))}, got {gate!r}")
        if gate_on not in ("block", "mlp"):
            raise ValueError(f"gate_on must be block or mlp, got {gate_on!r}")
        if not 0 <= noise < math.inf:
            raise ValueError(f"noise must be finite and at least 0, got {noise}")
        if predictor_width is not None and predictor_width < 1:
            raise ValueError(f"predictor_width must be at least 1, got {predictor_width}")
        self.block = block
        self.capacity, self.gate, self.gate_on = capacity, gate, gate_on
        self.noise, self.per_document = noise, per_document
        self.router = nnx.Linear(
            d_model,
            1,
            use_bias=False,
            dtype=jnp.float32,
            precision=lax.Precision.HIGHEST,
            kernel_init=nnx.initializers.normal(d_model**-0.5),
            rngs=rngs,
        )
        # The key is drawn either way, so that what is initialised after stays the same.
        predictor_key = rngs.params()
        width = default_predictor_width(d_model) if predictor_width is None else predictor_width
        self.predictor = (
            Predictor(d_model, width, capacity, rngs=nnx.Rngs(predictor_key)) if predictor else None
        )

    def __call__(
        self,
        x_BTD: Array,
        *,
        positions_BT: Array | None = None,
        segment_ids_BT: Array | None = None,
        routing: Routing = "top_k",
        key: Array | None = None,
    ) -> tuple[Array, DepthAux]:
        """Computes the chosen tokens and adds their gated updates.

        Args:
          x_BTD: tokens.
          positions_BT: int, their positions; None: 0 .. T - 1.
          segment_ids_BT: int, documents as runs of equal values; 0 is padding, which is never
            chosen, nor read. None: one document.
          routing: "top_k" (training); "predictor" and "router": causal, every token whose logit is
            positive, however many; "random": top-k over Gaussian values, the control.
          key: for routing "random", and for noise; one, or one a row [B].

        Returns:
          (y_BTD, aux); tokens that were not chosen come back bitwise as they were.

        Raises:
          ValueError: unknown routing, "random" without a key, "predictor" without a predictor, an
            empty row, positions or segment ids of another shape or dtype, a block that returns
            another shape than it got.
        """
        if x_BTD.ndim != 3 or x_BTD.shape[1] == 0:
            raise ValueError(f"x_BTD must have axes [B, T, D] and a token, got {x_BTD.shape}")
        batch, length, _ = x_BTD.shape
        for name, ids_BT in (("positions_BT", positions_BT), ("segment_ids_BT", segment_ids_BT)):
            _check_ids(name, ids_BT, (batch, length))
        if routing not in get_args(Routing):
            raise ValueError(
                f"routing must be one of {', '.join(get_args(Routing))}, got {routing!r}"
            )
        if routing == "random" and key is None:
            raise ValueError("routing 'random' needs a key")
        if routing == "predictor" and self.predictor is None:
            raise ValueError("routing 'predictor' needs predictor=True")
        if positions_BT is None:
            positions_BT = jnp.broadcast_to(jnp.arange(length, dtype=jnp.int32), (batch, length))
        seen_BTD = x_BTD
        if segment_ids_BT is None:
            segment_ids_BT = jnp.ones((batch, length), jnp.int32)
        else:
            # Rubbish in padding would reach gradients as 0 * NaN.
            seen_BTD = jnp.where((segment_ids_BT != 0)[..., None], x_BTD, 0)
        runs_BT = document_runs(segment_ids_BT)
        valid_BT = runs_BT > 0

        logits_BT, predictor_BT = self.scores(seen_BTD)
        route = self._choose(logits_BT, predictor_BT, runs_BT, routing, key)

        gate_BC = jnp.where(route.filled_BC, apply_gate(self.gate, route.weight_BC), 0.0)
        runs_BC = jnp.take_along_axis(runs_BT, route.index_BC, axis=1)
        inputs: dict[str, Any] = dict(
            positions_BC=jnp.take_along_axis(positions_BT, route.index_BC, axis=1),
            segment_ids_BC=jnp.where(route.filled_BC, runs_BC, 0),
        )
        x_BCD = ops.dispatch(seen_BTD, route)
        if self.gate_on == "mlp":
            inputs["gate_BC"] = gate_BC
        delta_BCD = self.block(x_BCD, **inputs)
        if delta_BCD.shape != x_BCD.shape:
            raise ValueError(f"block must return shape {x_BCD.shape}, got {delta_BCD.shape}")
        y_BTD = ops.combine(
            x_BTD, delta_BCD, route, gate_BC=gate_BC if self.gate_on == "block" else None
        )

        predictor_loss = jnp.zeros((), jnp.float32)
        if predictor_BT is not None:
            predictor_loss = ops.membership_loss(predictor_BT, route.mask_BT, valid_BT)
        return y_BTD, DepthAux(
            routed_BT=route.mask_BT,
            router_logits_BT=logits_BT,
            predictor_logits_BT=predictor_BT,
            router_loss=ops.membership_loss(logits_BT, route.mask_BT, valid_BT),
            predictor_loss=predictor_loss,
            statistics=routing_statistics(
                route.mask_BT,
                logits_BT,
                predictor_BT if routing in ("top_k", "random") else None,
                valid_BT,
            ),
        )

    def scores(self, x_BTD: Array) -> tuple[Array, Array | None]:
        """The router's logits [B, T], and the predictor's or None, float32."""
        logits_BT = self.router(x_BTD)[..., 0]
        if self.predictor is None:
            return logits_BT, None
        return logits_BT, self.predictor(lax.stop_gradient(x_BTD))[..., 0]

    def _choose(self, logits_BT, predictor_BT, runs_BT, routing, key) -> ops.Route:
        valid_BT = runs_BT > 0
        if routing in ("predictor", "router"):
            score_BT = predictor_BT if routing == "predictor" else logits_BT
            return ops.route_where((score_BT > 0) & valid_BT, logits_BT)
        score_BT = lax.stop_gradient(logits_BT)
        if routing == "random":
            score_BT = _normal(key, logits_BT.shape)
        elif self.noise > 0 and key is not None:
            score_BT += self.noise * _normal(key, logits_BT.shape)
        slots_B = ops.row_slots(self.capacity, valid_BT)
        if self.per_document:
            valid_BT = ops.best_of_each_document(score_BT, runs_BT, self.capacity)
            slots_B = jnp.sum(valid_BT, axis=1)
        slots = ops.capacity_slots(self.capacity, logits_BT.shape[1])
        route = ops.route_top_k(score_BT, slots, k_B=slots_B, valid_BT=valid_BT)
        # The choice may rest on other values; the gate is always the router's own.
        weight_BC = jnp.take_along_axis(logits_BT, route.index_BC, axis=1)
        return dataclasses.replace(route, weight_BC=jnp.where(route.filled_BC, weight_BC, 0.0))


def _check_ids(name: str, ids_BT: Array | None, shape: tuple[int, int]) -> None:
    if ids_BT is None:
        return
    if ids_BT.shape != shape or not jnp.issubdtype(ids_BT.dtype, jnp.integer):
        raise ValueError(f"{name} must be integers {shape}, got {ids_BT.dtype} {ids_BT.shape}")


def prediction_counts(routed: Array, predicted: Array, valid: Array) -> dict[str, Array]:
    """How often prediction and choice agree: float32 sums over all valid tokens.

    Returns:
      "true_positive", "false_positive", "false_negative", "true_negative".
    """

    def count(condition):
        return jnp.sum((condition & valid).astype(jnp.float32))

    return {
        "true_positive": count(routed & predicted),
        "false_positive": count(~routed & predicted),
        "false_negative": count(routed & ~predicted),
        "true_negative": count(~routed & ~predicted),
    }


def prediction_scores(counts: dict[str, Array]) -> dict[str, Array]:
    """Accuracy, precision, recall, and the accuracy of always skipping, from the counts."""
    hit, false_alarm = counts["true_positive"], counts["false_positive"]
    miss, pass_by = counts["false_negative"], counts["true_negative"]
    total = jnp.maximum(hit + false_alarm + miss + pass_by, 1.0)
    return {
        "accuracy": (hit + pass_by) / total,
        "precision": hit / jnp.maximum(hit + false_alarm, 1.0),
        "recall": hit / jnp.maximum(hit + miss, 1.0),
        "always_skip_accuracy": (false_alarm + pass_by) / total,
    }


def routing_statistics(
    routed_BT: Array, logits_BT: Array, predictor_BT: Array | None, valid_BT: Array
) -> dict[str, Array]:
    """Scalars that show how a router does, and a collapse when there is one.

    Returns:
      "fraction": realised share of valid tokens routed; "logit_mean", "logit_std"; "above_half":
      share with sigmoid(logit) > 0.5; "entropy": mean binary entropy of sigmoid(logit), in nats (0
      when polarised); with a predictor "predictor_accuracy", "predictor_precision" and
      "predictor_recall" against the tokens routed.
    """
    logits_BT = lax.stop_gradient(logits_BT)
    count = jnp.maximum(jnp.sum(valid_BT), 1)

    def mean(x_BT):
        return jnp.sum(jnp.where(valid_BT, x_BT, 0.0)) / count

    p_BT = jax.nn.sigmoid(logits_BT)
    entropy_BT = jax.nn.softplus(logits_BT) - p_BT * logits_BT
    logit_mean = mean(logits_BT)
    statistics = {
        "fraction": mean(routed_BT),
        "logit_mean": logit_mean,
        "logit_std": jnp.sqrt(mean((logits_BT - logit_mean) ** 2)),
        "above_half": mean(logits_BT > 0),
        "entropy": mean(entropy_BT),
    }
    if predictor_BT is not None:
        scores = prediction_scores(prediction_counts(routed_BT, predictor_BT > 0, valid_BT))
        del scores["always_skip_accuracy"]
        statistics |= {f"predictor_{name}": value for name, value in scores.items()}
    return statistics
