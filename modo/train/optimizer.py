"""AdamW and Muon with warm-up and cosine decay."""

import jax
import jax.numpy as jnp
import optax
from optax.contrib import MuonDimensionNumbers

from modo.config import OptimizerConfig
from modo.nn.partition import path_names


def learning_rate_schedule(config: OptimizerConfig, peak: float, steps: int) -> optax.Schedule:
    """Linear warm-up (at most half the run), then cosine to the run's last step."""
    warmup = min(config.warmup_steps, steps // 2)
    return optax.warmup_cosine_decay_schedule(
        init_value=peak / (warmup + 1),
        peak_value=peak,
        warmup_steps=warmup,
        decay_steps=steps,
        end_value=peak * config.final_fraction,
    )


def _is_predictor(path) -> bool:
    return "predictor" in path_names(path)


def _is_matrix(path, leaf) -> bool:
    """Kernels and embeddings; with scanned layers they have a leading axis more."""
    return path_names(path)[-1] in ("kernel", "embedding") and leaf.ndim >= 2


def _muon_axes(path, leaf) -> MuonDimensionNumbers | None:
    """Muon takes the matrices inside blocks; embedding, head, router and norms go to Adam."""
    names = path_names(path)
    if names[0] != "blocks" or names[-1] != "kernel" or "router" in names:
        return None
    return MuonDimensionNumbers(leaf.ndim - 2, leaf.ndim - 1)


def _decay_mask(params):
    return jax.tree_util.tree_map_with_path(_is_matrix, params)


def _muon_dimension_numbers(params):
    return jax.tree_util.tree_map_with_path(_muon_axes, params)


def _kept_in(rule: optax.GradientTransformation, dtypes: dict[str, str]):
    """The same rule, its state's fields of these names kept in these dtypes between updates."""

    def cast(state, dtype_of):
        def cast_leaf(path, leaf):
            fields = {getattr(entry, "name", None) for entry in path} & set(dtypes)
            return leaf.astype(dtype_of(fields.pop())) if fields else leaf

        return jax.tree_util.tree_map_with_path(cast_leaf, state)

    def init(params):
        return cast(rule.init(params), dtypes.get)

    def update(updates, state, params=None):
        updates, state = rule.update(updates, cast(state, lambda _: jnp.float32), params)
        return updates, cast(state, dtypes.get)

    return optax.GradientTransformation(init, update)


def make_optimizer(config: OptimizerConfig, steps: int) -> optax.GradientTransformation:
    """The update rule for a run of `steps` updates.

    Predictors are clipped and updated apart from the rest, so that having one changes nothing
    else (arXiv 2404.02258, section 3.5: no effect on the language modelling loss).
    """
    adam_peak = config.adam_learning_rate
    adam_peak = config.learning_rate if adam_peak is None else adam_peak
    adam_schedule = learning_rate_schedule(config, adam_peak, steps)
    adamw = optax.adamw(
        adam_schedule,
        b1=config.b1,
        b2=config.b2,
        eps=config.eps,
        weight_decay=config.weight_decay,
        mask=_decay_mask,
    )
    rule = adamw
    if config.name == "muon":
        rule = optax.contrib.muon(
            learning_rate_schedule(config, config.learning_rate, steps),
            beta=config.momentum,
            eps=config.eps,
            weight_decay=config.weight_decay,
            weight_decay_mask=_decay_mask,
            adam_b1=config.b1,
            adam_b2=config.b2,
            adam_weight_decay=config.weight_decay,
            adam_learning_rate=adam_schedule,
            muon_weight_dimension_numbers=_muon_dimension_numbers,
        )
    clip = optax.identity()
    if config.clip_norm is not None:
        clip = optax.clip_by_global_norm(config.clip_norm)
    rule = optax.partition(
        {"model": optax.chain(clip, rule), "predictor": optax.chain(clip, adamw)},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda path, _: "predictor" if _is_predictor(path) else "model", params
        ),
    )
    return _kept_in(rule, {"mu": config.mu_dtype, "nu": config.nu_dtype})
