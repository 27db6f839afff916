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
from modo.train import run_directory
from modo.train.cli import LineParser, check_writable, not_empty, one_line_errors
from modo.train.evaluation import Evaluation, evaluate
from modo.train.load import load
from modo.train.mesh import make_mesh
from modo.train.run_tokenizer import own_tokenizer


def evaluate_run(
    workdir: str | pathlib.Path,
    routings: Sequence[Routing],
    *,
    step: int | None = None,
    batch_size: int | None = None,
) -> dict[str, Evaluation]:
    """Evaluates a checkpoint of a run on its held-out split, once a routing.

    Raises:
      UserError: there is no such run or checkpoint, a routing that its model cannot do, or other
        data than the run was begun on.
    """
    config = run_directory.read_config(pathlib.Path(workdir))
    depth = config.model.depth
    if "predictor" in routings and depth is not None and not depth.predictor:
        raise UserError(f"routing predictor: the model in {workdir} was trained without one")
    model = load(workdir, step=step)
    data = open_data(own_tokenizer(pathlib.Path(workdir), config.data), config.train.length)
    run_directory.check_same_data(pathlib.Path(workdir), data.digests)
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
    parser.add_argument("--workdir", type=not_empty, required=True, help="of a run of train.py")
    parser.add_argument(
        "--routing",
        nargs="+",
        choices=get_args(Routing),
        default=["predictor"],
        help="how routed layers choose; several are evaluated one after the other",
    )
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--batch-size", type=int, help="rows a batch; does not change the result")
    parser.add_argument("--json", type=not_empty, help="also write {routing: {loss, ...}} here")
    options = parser.parse_args(arguments)
    if options.batch_size is not None and options.batch_size < 1:
        raise UserError(f"--batch-size must be at least 1, got {options.batch_size}")
    if options.json is not None:
        check_writable(pathlib.Path(options.json))
    results = evaluate_run(
        options.workdir, options.routing, step=options.step, batch_size=options.batch_size
    )
    depth = run_directory.read_config(pathlib.Path(options.workdir)).model.depth
    for routing, result in results.items():
        print(
            f"{routing}: {result.loss:.4f} nats a token over {result.tokens:,} tokens, "
            f"{result.bits_per_byte:.4f} bits a byte"
        )
        for name, value in result.statistics.items():
            print(f"  {name} {value:.4f}")
        if routing == "router" and depth is not None and depth.router_loss_weight == 0:
            print(
                "  note: this router was trained without its auxiliary loss "
                "(router_loss_weight 0), so routing by it means little"
            )
    if options.json is not None:
        values = {
            routing: {
                "loss": r.loss,
                "bits_per_byte": r.bits_per_byte,
                "tokens": r.tokens,
                **r.statistics,
            }
            for routing, r in results.items()
        }
        try:
            pathlib.Path(options.json).write_text(json.dumps(values, indent=2) + "\n")
        except OSError as error:
            raise UserError(f"--json {options.json}: {error.strerror}") from None


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
