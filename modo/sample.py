"""Text from a trained run: python -m modo.sample --workdir runs/tiny --prompt "..." --tokens 200"""

import sys
import time
from collections.abc import Sequence

import jax
import numpy as np

from modo.config import MAX_INT32, MAX_SEED
from modo.data.tokenizer import TextStream
from modo.decode import Cache, stream
from modo.decode.sampling import Sampling
from modo.errors import UserError
from modo.train.cli import LineParser, not_empty, one_line_errors
from modo.train.load import load, load_tokenizer


def main(arguments: Sequence[str]) -> None:
    parser = LineParser(prog="python -m modo.sample", description=__doc__.split(":")[0])
    parser.add_argument("--workdir", type=not_empty, required=True, help="of a run of train.py")
    parser.add_argument("--prompt", default="", help="text to continue; may be empty")
    parser.add_argument("--tokens", type=int, default=200, help="tokens to add; default: 200")
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0: the likeliest token; default: 0.8"
    )
    parser.add_argument("--top-k", type=int, help="draw from the k likeliest tokens")
    parser.add_argument(
        "--top-p", type=float, help="draw from the likeliest tokens that come to this probability"
    )
    parser.add_argument(
        "--routing",
        choices=("predictor", "router"),
        default="predictor",
        help="what decides which tokens a routed layer computes; default: predictor",
    )
    parser.add_argument(
        "--attention",
        choices=("sparse", "full"),
        default="sparse",
        help="of MoBA layers: to the blocks that each token chooses, or to all; default: sparse",
    )
    parser.add_argument("--step", type=int, help="which checkpoint; default: the newest")
    parser.add_argument("--seed", type=int, default=0, help="of the draws; default: 0")
    options = parser.parse_args(arguments)
    if not 1 <= options.tokens <= MAX_INT32:
        raise UserError(f"--tokens must be in [1, {MAX_INT32}], got {options.tokens}")
    if not 0 <= options.seed <= MAX_SEED:
        raise UserError(f"--seed must be in [0, {MAX_SEED}], got {options.seed}")
    try:
        Sampling(options.temperature, options.top_k, options.top_p)
    except ValueError as error:
        raise UserError("--" + str(error).replace("_", "-")) from None
    model, tokenizer = load(options.workdir, step=options.step), load_tokenizer(options.workdir)
    depth = model.config.depth
    if options.routing == "predictor" and depth is not None and not depth.predictor:
        raise UserError(f"the model in {options.workdir} has no predictor; try --routing router")
    prompt = tokenizer.encode(options.prompt)
    prompt = np.concatenate([[tokenizer.bos_token], prompt]).astype(np.int32)
    pieces = stream(
        model,
        prompt[None],
        np.array([len(prompt)]),
        max_new_tokens=options.tokens,
        routing=options.routing,
        attention=options.attention,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        key=jax.random.key(options.seed),
    )
    text = TextStream(tokenizer)
    print(text.add(prompt), end="", flush=True)
    count, times = 0, []
    for piece_1N, cache in pieces:
        count += piece_1N.shape[1]
        times.append((count, time.perf_counter()))
        print(text.add(np.asarray(piece_1N[0])), end="", flush=True)
        share = skipped_share(cache)
    print(text.add((), last=True))
    print(_report(times, share), file=sys.stderr)


def skipped_share(cache: Cache) -> float:
    """Of all blocks and tokens that a cache has seen, the share that was not computed."""
    routed_LBT, seen = np.asarray(cache.routed_LBT()), int(cache.length_B.sum())
    total = len(cache.layers) * seen
    return (len(routed_LBT) * seen - int(routed_LBT.sum())) / max(total, 1)


def _report(times: list[tuple[int, float]], share: float) -> str:
    report = f"{times[-1][0]} tokens"
    if len(times) > 2:
        # The first two pieces waited for the compiler.
        (first, start), (last, end) = times[1], times[-1]
        report += f", {(last - first) / (end - start):.0f} a second once compiled"
    return f"{report}; {share:.1%} of block computations skipped"


if __name__ == "__main__":
    with one_line_errors():
        main(sys.argv[1:])
