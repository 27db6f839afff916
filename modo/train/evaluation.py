"""Held-out loss under a routing, and how well predictors match the top-k."""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import Array
from jax.sharding import Mesh

from modo.data.pipeline import Rows, eval_batches
from modo.nn.depth import prediction_counts, prediction_scores
from modo.train.mesh import batch_sharding, place_batch

HISTOGRAM_EDGES = np.linspace(-4.0, 4.0, 17)


@dataclasses.dataclass(frozen=True)
class Evaluation:
    """One pass over the held-out rows.

    Attributes:
      routing: how routed layers chose.
      loss: nats per counted token.
      bits_per_byte: the same loss over the bytes of the text: comparable between tokenizers.
      tokens: number of counted tokens.
      statistics: of the routing; empty without routed layers.
        "fraction": share of tokens that routed layers computed; "accuracy", "precision", "recall"
        and "always_skip_accuracy" of the predictor against the choice (routing "top_k" and
        "random" only); "above_half": share of router logits above 0; "layer_overlap": of the tokens
        that one of two consecutive routed layers computed, the share that both did;
        "position_share": how much of the choice the position alone explains, 0 (nothing) to 1.
      score_histogram: share of router logits in each bin of HISTOGRAM_EDGES, the outer bins open.
    """

    routing: str
    loss: float
    bits_per_byte: float
    tokens: int
    statistics: dict[str, float]
    score_histogram: list[float]


@functools.partial(jax.jit, static_argnames=("graphdef", "routing"))
def eval_sums(
    graphdef, params, batch: dict, key: Array, first_row: int = 0, *, routing: str
) -> dict[str, Array]:
    """Sums over one batch, so that means over a split do not depend on how it was batched.

    The random control of a row depends on the key and the row's number, `first_row` on.
    """
    rows_B = first_row + jnp.arange(batch["tokens_BT"].shape[0])
    keys_B = jax.vmap(lambda row: jax.random.fold_in(key, row))(rows_B)
    nats_BT, _, aux = nnx.merge(graphdef, params).token_losses(
        batch["tokens_BT"],
        batch["targets_BT"],
        positions_BT=batch["positions_BT"],
        segment_ids_BT=batch["segment_ids_BT"],
        routing=routing,
        key=keys_B if routing == "random" else None,  # elsewhere a key would add training's noise
    )
    sums = {
        # A row's nats fit float32; rows are added up in float64 outside.
        "nats_B": jnp.sum(nats_BT * batch["weights_BT"], axis=1),
        "tokens": jnp.sum(batch["weights_BT"]),
    }
    if not aux.routed_LBT.shape[0]:
        return sums
    valid_BT = batch["segment_ids_BT"] != 0
    routed_LBT, logits_LBT = aux.routed_LBT, aux.router_logits_LBT
    valid_LBT = jnp.broadcast_to(valid_BT, routed_LBT.shape)
    both, either = routed_LBT[:-1] & routed_LBT[1:], routed_LBT[:-1] | routed_LBT[1:]
    bins_LBT = jnp.searchsorted(jnp.asarray(HISTOGRAM_EDGES[1:-1], jnp.float32), logits_LBT)
    sums |= {
        "valid_T": jnp.sum(valid_BT, axis=0),
        "routed_LT": jnp.sum(routed_LBT, axis=1),
        "above_half": jnp.sum(valid_LBT & (logits_LBT > 0)),
        "both": jnp.sum(both),
        "either": jnp.sum(either),
        "histogram": jnp.sum(
            jax.nn.one_hot(bins_LBT, len(HISTOGRAM_EDGES) - 1) * valid_LBT[..., None],
            axis=(0, 1, 2),
        ),
    }
    if aux.predictor_logits_LBT is not None and routing in ("top_k", "random"):
        sums |= prediction_counts(routed_LBT, aux.predictor_logits_LBT > 0, valid_LBT)
    return sums


def evaluate(
    graphdef,
    params,
    rows: Rows,
    mesh: Mesh,
    *,
    routing: str,
    batch_size: int,
    most_rows: int | None = None,
    seed: int = 0,
    stop: Callable[[], bool] | None = None,
) -> Evaluation | None:
    """Evaluates on every row once, unless told fewer; every token with a weight counts once.

    Args:
      graphdef, params: of the Decoder, `nnx.split`.
      rows: held-out rows.
      mesh: the devices; rows are split over data and fsdp.
      routing: see `MixtureOfDepths`.
      batch_size: rows a batch, rounded up to a multiple of the devices that share them. It changes
        speed and memory, not the result.
      most_rows: of more rows than this, so many are read, evenly spaced.
      seed: of the random control.
      stop: asked before every batch; where it is true, the evaluation ends and is None.
    """
    shards = mesh.shape["data"] * mesh.shape["fsdp"]
    count = min(len(rows), most_rows or len(rows))
    batch_size = -(-min(batch_size, count) // shards) * shards
    sharding, key, total = batch_sharding(mesh), jax.random.key(seed), {}
    batches = eval_batches(
        rows,
        batch_size=batch_size,
        most_rows=most_rows,
        process_index=jax.process_index(),
        process_count=jax.process_count(),
    )
    for number, batch in enumerate(batches):
        if stop is not None and stop():
            return None
        batch = place_batch(batch, sharding)
        sums = eval_sums(graphdef, params, batch, key, number * batch_size, routing=routing)
        for name, value in jax.device_get(sums).items():
            value = np.asarray(value, np.float64)
            total[name] = total.get(name, 0.0) + (value.sum() if name == "nats_B" else value)
    statistics, histogram = _statistics(total) if "routed_LT" in total else ({}, [])
    loss = float(total["nats_B"] / total["tokens"])
    return Evaluation(
        routing=routing,
        loss=loss,
        bits_per_byte=loss / math.log(2) * rows.num_targets / rows.num_bytes,
        tokens=int(total["tokens"]),
        statistics=statistics,
        score_histogram=histogram,
    )


def _statistics(total: dict[str, np.ndarray]) -> tuple[dict[str, float], list[float]]:
    layers, valid = total["routed_LT"].shape[0], total["valid_T"].sum()
    fraction = total["routed_LT"].sum() / (layers * valid)
    statistics = {
        "fraction": fraction,
        "above_half": total["above_half"] / (layers * valid),
        "layer_overlap": total["both"] / max(total["either"], 1.0),
        "position_share": _position_share(total["routed_LT"], total["valid_T"]),
    }
    if "true_positive" in total:
        statistics |= prediction_scores(total)
    histogram = total["histogram"] / max(total["histogram"].sum(), 1.0)
    return {name: float(value) for name, value in statistics.items()}, histogram.tolist()


def _position_share(routed_LT: np.ndarray, valid_T: np.ndarray) -> float:
    """Variance of the share routed over positions, less chance's, over the most it can be."""
    positions = valid_T > 1
    if not positions.any():
        return math.nan
    count = valid_T[positions]
    share_LT = routed_LT[:, positions] / count
    mean_L1 = share_LT.mean(axis=1, keepdims=True)
    most = (mean_L1 * (1 - mean_L1)).mean()
    chance = most * (1 / count).mean()
    explained = ((share_LT - mean_L1) ** 2).mean() - chance
    return float(max(explained, 0.0) / (most - chance)) if most > chance else 0.0
