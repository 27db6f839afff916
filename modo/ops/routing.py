"""Choosing tokens for a routed block, gathering them, and adding their updates back.

Expert-choice routing of Mixture-of-Depths (Raposo et al. 2024, arXiv 2404.02258, section 3):
every shape is static, a row takes at most C tokens, and rows are independent of each other.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name

from kernels_pallas import mod

# Rematerialisation must not choose again: policies keep arrays of this name.
ROUTED_TOKENS = "modo_routed_tokens"


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Route:
    """The tokens that a routed block computes.

    Attributes:
      index_BC: int32, positions of the routed tokens, ascending; unfilled slots come last and
        hold T - 1.
      weight_BC: float32, the routed tokens' logits; 0 in unfilled slots.
      filled_BC: bool, whether the slot holds a token.
      mask_BT: bool, whether the token is routed.
    """

    index_BC: Array
    weight_BC: Array
    filled_BC: Array
    mask_BT: Array


def capacity_slots(capacity: float, length: int) -> int:
    """C, the tokens that a row routes: clip(round(capacity * length), 1, length)."""
    return max(1, min(length, round(capacity * length)))


def row_slots(capacity: float, valid_BT: Array) -> Array:
    """Each row's own number of routed tokens [B] int32, from its valid tokens alone.

    Appending padding to a row does not change it; it is at least 1 and at most C.
    """
    length = valid_BT.shape[1]
    slots = [1, *(capacity_slots(capacity, n) for n in range(1, length + 1))]
    return jnp.asarray(slots, jnp.int32)[jnp.sum(valid_BT, axis=1)]


def _route(position_BC: Array, logits_BT: Array) -> Route:
    """A Route from ascending positions, where an unfilled slot holds T."""
    length = logits_BT.shape[1]
    position_BC = checkpoint_name(position_BC, ROUTED_TOKENS)
    filled_BC = position_BC < length
    index_BC = jnp.minimum(position_BC, length - 1)
    weight_BC = jnp.take_along_axis(logits_BT, index_BC, axis=1)
    mask_BT = jax.vmap(lambda i_C: jnp.zeros(length, bool).at[i_C].set(True, mode="drop"))(
        position_BC
    )
    return Route(index_BC, jnp.where(filled_BC, weight_BC, 0.0), filled_BC, mask_BT)


def route_top_k(
    logits_BT: Array, k: int, *, k_B: Array | None = None, valid_BT: Array | None = None
) -> Route:
    """Takes the k tokens with the highest logits of each row, ties to the lowest position.

    Args:
      logits_BT: router logits; compared and returned in float32. Gradients reach them through
        `weight_BC` alone.
      k: slots a row, C = k.
      k_B: int, at most k: tokens that each row takes.
      valid_BT: bool; tokens that are not valid are never taken.

    Raises:
      ValueError: k is not in [1, T].
    """
    length = logits_BT.shape[1]
    if not 1 <= k <= length:
        raise ValueError(f"k must be in [1, T], got k {k} and T {length}")
    logits_BT = logits_BT.astype(jnp.float32)
    order_BT = lax.stop_gradient(logits_BT)
    order_BT = jnp.where(jnp.isnan(order_BT), -jnp.inf, order_BT)
    # A total order puts -0.0 below 0.0, which would break ties; and a valid token stays above an
    # invalid one even at -inf.
    order_BT = jnp.where(order_BT == 0.0, 0.0, order_BT)
    order_BT = jnp.maximum(order_BT, jnp.finfo(jnp.float32).min)
    if valid_BT is not None:
        order_BT = jnp.where(valid_BT, order_BT, -jnp.inf)
    value_BC, index_BC = lax.top_k(order_BT, k)
    taken_BC = value_BC > -jnp.inf
    if k_B is not None:
        taken_BC &= jnp.arange(k) < k_B[:, None]
    position_BC = jnp.sort(jnp.where(taken_BC, index_BC, length).astype(jnp.int32), axis=1)
    return _route(position_BC, logits_BT)


def route_where(mask_BT: Array, logits_BT: Array) -> Route:
    """Takes every token where the mask is true, however many: C = T."""
    length = mask_BT.shape[1]
    position_BT = jnp.where(mask_BT, jnp.arange(length, dtype=jnp.int32), length)
    return _route(jnp.sort(position_BT, axis=1), logits_BT.astype(jnp.float32))


def best_of_each_document(logits_BT: Array, runs_BT: Array, capacity: float) -> Array:
    """The tokens [B, T] bool that are among the best of their own document.

    A document of n tokens takes clip(round(capacity * n), 1, n) of them, whatever else is in the
    row, as long as the row's C slots last: where rounding asks for more, the row's last documents
    take fewer.

    Args:
      logits_BT: float.
      runs_BT: int, as `document_runs` numbers them; 0 is padding.
      capacity: fraction of tokens.
    """
    length = logits_BT.shape[1]
    slots = capacity_slots(capacity, length)
    slots_of_size = jnp.asarray(
        [0, *(capacity_slots(capacity, n) for n in range(1, length + 1))], jnp.int32
    )

    def row(logits_T, runs_T):
        size_R = jnp.zeros(length + 1, jnp.int32).at[runs_T].add(1).at[0].set(0)
        wanted_R = slots_of_size[size_R]
        used_R = jnp.cumsum(wanted_R) - wanted_R
        wanted_R = jnp.clip(slots - used_R, 0, wanted_R)
        # Stable sorts: by logit, then by document, so ties keep the lowest position first.
        by_logit_T = jnp.argsort(-logits_T, stable=True)
        order_T = by_logit_T[jnp.argsort(runs_T[by_logit_T], stable=True)]
        first_R = jnp.cumsum(jnp.zeros(length + 1, jnp.int32).at[runs_T].add(1))
        first_R = jnp.pad(first_R[:-1], (1, 0))
        rank_T = jnp.zeros(length, jnp.int32).at[order_T].set(jnp.arange(length, dtype=jnp.int32))
        return (rank_T - first_R[runs_T] < wanted_R[runs_T]) & (runs_T > 0)

    order_BT = jnp.where(logits_BT == 0.0, 0.0, logits_BT.astype(jnp.float32))
    return jax.vmap(row)(lax.stop_gradient(order_BT), runs_BT)


def dispatch(x_BTD: Array, route: Route) -> Array:
    """The routed tokens' rows [B, C, D]; unfilled slots are zeros."""
    return mod.dispatch(x_BTD, route.index_BC, route.filled_BC)


def combine(x_BTD: Array, delta_BCD: Array, route: Route, *, gate_BC: Array | None = None) -> Array:
    """Adds the routed tokens' updates; every other token comes back bitwise as it was.

    `gate_BC`, float32, multiplies the updates in float32.
    """
    return mod.combine(x_BTD, delta_BCD, gate_BC, route.index_BC, route.filled_BC)


def membership_loss(logits_BT: Array, target_BT: Array, valid_BT: Array) -> Array:
    """Binary cross-entropy of logits against membership, averaged over valid tokens: float32.

    The auxiliary loss of routers and predictors (arXiv 2404.02258, section 3.5).
    """
    logits_BT = logits_BT.astype(jnp.float32)
    loss_BT = jax.nn.softplus(logits_BT) - jnp.where(target_BT, logits_BT, 0.0)
    return jnp.sum(jnp.where(valid_BT, loss_BT, 0.0)) / jnp.maximum(jnp.sum(valid_BT), 1)
