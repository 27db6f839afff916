"""Text from a trained run: python -m modo.sample --workdir runs/tiny --prompt "..." --tokens 200"""

import sys
from collections.abc import Sequence

import jax
import numpy as np

from modo.config import MAX_SEED
from modo.decode import generate
from modo.errors import UserError
from modo.train.cli import LineParser, not_empty, one_line_errors
from modo.train.load import load, load_tokenizer


def main(arguments: Sequence[str]) -> None:
    parser = LineParser(prog="python -m modo.sample", description=__doc__.split(":")[0])
    parser.add_argument("--workdir", type=not_empty, required=True, help="of a run of train.py")
    parser.add_argument("--prompt", default="", help="text to continue; may be empty")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add")
    parser.add_argument("--temperature", type=float, default=0.8, help="0: the likeliest token")
    parser.add_argument("--routing", choices=("predictor", "router"), default="predictor")
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    if options.tokens < 1:
        raise UserError(f"--tokens must be at least 1, got {options.tokens}")
    if not options.temperature >= 0:
        raise UserError(f"--temperature must not be negative, got {options.temperature}")
    if not 0 <= options.seed <= MAX_SEED:
        raise UserError(f"--seed must be in [0, {MAX_SEED}], got {options.seed}")
    model, tokenizer = load(options.workdir, step=options.step), load_tokenizer(options.workdir)
    depth = model.config.depth
    if options.routing == "predictor" and depth is not None and not depth.predictor:
        raise UserError(f"the model in {options.workdir} has no predictor; try --routing router")
    prompt = tokenizer.encode(options.prompt)
    prompt = np.concatenate([[tokenizer.bos_token], prompt]).astype(np.int32)
    new_1N = generate(
        model,
        prompt[None],
        np.array([len(prompt)]),
        max_new_tokens=options.tokens,
        routing=options.routing,
        temperature=options.temperature,
        key=jax.random.key(options.seed),
    )
    print(options.prompt + tokenizer.decode(np.asarray(new_1N[0])))


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
