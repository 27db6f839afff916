"""The table at the end of a run, and its figures."""

import pathlib
import statistics
from collections.abc import Sequence

import jax

from modo import flops
from modo.config import Config
from modo.errors import UserError
from modo.train.evaluation import evaluate
from modo.train.figures import draw_figures
from modo.train.metrics import read_metrics, select


def write_report(
    config: Config,
    workdir: pathlib.Path,
    data,
    graphdef,
    state,
    mesh,
    log,
    step_seconds: Sequence[float],
) -> None:
    """Prints the table of a finished run and draws its figures.

    step_seconds are of this session's steps, compiled; empty where there were none.

    Raises:
      UserError: a figure cannot be written.
    """
    step = int(state.step)
    records = select(read_metrics(workdir), "eval")
    evaluations = {r["routing"]: r for r in records if r["step"] == step}
    depth = config.model.depth
    if depth is not None and depth.router_loss_weight > 0 and "router" not in evaluations:
        result = evaluate(
            graphdef,
            state.params,
            data.validation,
            mesh,
            routing="router",
            batch_size=config.train.eval_batch_size,
            most_rows=config.train.eval_rows,
        )
        evaluations["router"] = {"loss": result.loss, **result.statistics}
    log.say(_table(config, evaluations, step_seconds))
    if jax.process_index() == 0:
        try:
            paths = draw_figures(config, workdir, data, graphdef, state.params)
        except OSError as error:
            raise UserError(
                f"the run is finished and saved, but its figures cannot be written to "
                f"{workdir / 'figures'}: {error.strerror}; mend it and run again"
            ) from None
        log.say("figures: " + ", ".join(str(path) for path in paths))


def _table(config: Config, evaluations: dict[str, dict], step_seconds: Sequence[float]) -> str:
    """Losses under each routing, the predictor's scores, FLOPs a token and time a step."""
    lines = ["", f"{'routing':<12}{'held-out loss':>15}{'tokens computed':>18}"]
    for routing, result in evaluations.items():
        share = f"{result['fraction']:.1%}" if "fraction" in result else "100.0%"
        lines.append(f"{routing:<12}{result['loss']:>15.4f}{share:>18}")
    scores = evaluations.get("top_k", {})
    if "accuracy" in scores:
        lines.append(
            f"predictor against top_k: accuracy {scores['accuracy']:.3f} (always skip "
            f"{scores['always_skip_accuracy']:.3f}), precision {scores['precision']:.3f}, recall "
            f"{scores['recall']:.3f}"
        )
    length = config.train.length
    ours = flops.forward(config.model, length) / length
    dense = flops.forward(flops.dense_twin(config.model), length) / length
    lines.append(
        f"FLOPs a token, forward: {ours / 1e6:.3f} M, {ours / dense:.3f} of the dense model of the "
        f"same depth and width ({dense / 1e6:.3f} M)"
    )
    if step_seconds:
        lines.append(f"time a step: {1e3 * statistics.median(step_seconds):.1f} ms (median)")
    return "\n".join(lines) + "\n"
