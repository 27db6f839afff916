"""Held-out loss of a trained run under one or several routings.

python -m modo.evaluate --workdir runs/tiny --routing predictor [--json FILE]
"""

import json
import pathlib
import sys
from collections.abc import Sequence
from typing import get_args

from flax import nnx

from modo.config import MeshConfig, Routing
from modo.data import open_data
from modo.errors import UserError
from modo.train import checkpoint
from modo.train.cli import LineParser, one_line_errors
from modo.train.evaluation import Evaluation, evaluate
from modo.train.load import load
from modo.train.mesh import make_mesh


def evaluate_run(
    workdir: str | pathlib.Path,
    routings: Sequence[Routing],
    *,
    step: int | None = None,
    batch_size: int | None = None,
) -> dict[str, Evaluation]:
    """Evaluates a checkpoint of a run on its held-out split, once a routing.

    Raises:
      UserError: there is no such run or checkpoint, or a routing that its model cannot do.
    """
    config = checkpoint.read_config(pathlib.Path(workdir))
    depth = config.model.depth
    if "predictor" in routings and depth is not None and not depth.predictor:
        raise UserError(f"routing predictor: the model in {workdir} was trained without one")
    model = load(workdir, step=step)
    data = open_data(config.data, config.train.length)
    graphdef, params = nnx.split(model)
    return {
        routing: evaluate(
            graphdef,
            params,
            data.validation,
            make_mesh(MeshConfig()),
            routing=routing,
            batch_size=batch_size or config.train.eval_batch_size,
        )
        for routing in routings
    }


def main(arguments: Sequence[str]) -> None:
    parser = LineParser(prog="python -m modo.evaluate", description=__doc__.splitlines()[0])
    parser.add_argument("--workdir", required=True, help="of a run of train.py")
    parser.add_argument(
        "--routing",
        nargs="+",
        choices=get_args(Routing),
        default=["predictor"],
        help="how routed layers choose; several are evaluated one after the other",
    )
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--batch-size", type=int, help="rows a batch; does not change the result")
    parser.add_argument("--json", type=pathlib.Path, help="also write {routing: {loss, ...}} here")
    options = parser.parse_args(arguments)
    if options.batch_size is not None and options.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {options.batch_size}")
    if options.json is not None and not options.json.absolute().parent.is_dir():
        raise UserError(f"--json {options.json}: its directory does not exist")
    results = evaluate_run(
        options.workdir, options.routing, step=options.step, batch_size=options.batch_size
    )
    depth = checkpoint.read_config(pathlib.Path(options.workdir)).model.depth
    for routing, result in results.items():
        print(f"{routing}: {result.loss:.4f} nats a token over {result.tokens:,} tokens")
        for name, value in result.statistics.items():
            print(f"  {name} {value:.4f}")
        if routing == "router" and depth is not None and depth.router_loss_weight == 0:
            print(
                "  note: this router was trained without its auxiliary loss "
                "(router_loss_weight 0), so routing by it means little"
            )
    if options.json is not None:
        values = {
            routing: {"loss": r.loss, "tokens": r.tokens, **r.statistics}
            for routing, r in results.items()
        }
        options.json.write_text(json.dumps(values, indent=2) + "\n")


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
