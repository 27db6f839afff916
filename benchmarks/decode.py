"""Decoding that skips against decoding that does not, one process, alternating.

python -m benchmarks.decode [--layers 8 --tokens 32 --repeats 5] [--json FILE]

Three comparisons of tokens a second, each in one compiled loop of greedy steps, caches nearly full:
a Mixture-of-Depths model (every other block, capacity 1/8) against the dense model of the same
depth and width with a context of 2048 tokens, at batch 1 and 16; and one MoBA layer of 32768 tokens
(blocks of 512, top-k 3), sparse against full. The predictors are planted: random, with a bias that
makes them route an eighth of random tokens; the realised share is printed.

The limits are ratios of what both sides must read (weights of blocks that are computed, keys and
values that are attended to) and of the FLOPs they must do. A step at batch 1 is bound by bytes, and
can pass the limit where more of the smaller model stays in the processor's caches. Few tokens or
layers may route nothing at all: then there is no speed-up to tell, and the run ends with an error.
"""

import argparse
import functools
import json
import pathlib
import statistics
import time

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax import lax

import modo
from modo.decode import init_cache, prefill, roll_back, step

WIDTH, HEADS, VOCAB = 512, 8, 257
CONTEXT, LONG_CONTEXT = 2048, 32_768
CAPACITY = 0.125
BLOCK, TOP_K = 512, 3


def make_model(layers: int, **options) -> modo.Decoder:
    config = modo.ModelConfig(
        vocab_size=VOCAB, d_model=WIDTH, num_layers=layers, num_heads=HEADS, **options
    )
    return modo.Decoder(config, rngs=nnx.Rngs(0))


def plant_predictors(model: modo.Decoder) -> None:
    """Makes each predictor route a share CAPACITY of random tokens, layer by layer."""
    tokens = jax.random.randint(jax.random.key(1), (4, 512), 0, VOCAB)
    for number, layer in enumerate(model.config.routed_layers):
        score = model.block(layer).predictor.score
        key = jax.random.fold_in(jax.random.key(2), layer)
        score.kernel[...] = jax.random.normal(key, score.kernel.shape)
        score.bias[...] = jnp.zeros_like(score.bias)
        _, aux = model(tokens, routing="predictor")
        score.bias[...] -= jnp.quantile(aux.predictor_logits_LBT[number], 1 - CAPACITY)


class Subject:
    """A model, and a cache that holds all but the last `tokens` of its context."""

    def __init__(self, model: modo.Decoder, batch: int, context: int, tokens: int, attention: str):
        self.model, self.tokens, self.held = model, tokens, context - tokens
        graphdef, self.params = nnx.split(model)
        prompt = jax.random.randint(jax.random.key(3), (batch, self.held), 0, VOCAB)
        cache = init_cache(model, batch, context)
        held_B = jnp.full(batch, self.held, jnp.int32)
        _, self.cache = prefill(model, cache, prompt, held_B, attention=attention, last_only=True)
        self.first_B = prompt[:, 0]

        @functools.partial(jax.jit, donate_argnums=1)
        def run(params, cache, token_B):
            model = nnx.merge(graphdef, params)

            def add(carry, _):
                cache, token_B = carry
                logits_BV, cache = step(model, cache, token_B, attention=attention)
                return (cache, jnp.argmax(logits_BV, axis=-1).astype(jnp.int32)), None

            return lax.scan(add, (cache, token_B), length=tokens)[0][0]

        self._run = run
        self.run()
        self.routed = np.asarray(self.cache.routed_LBT())[..., self.held :]

    def run(self) -> float:
        """Seconds of the loop."""
        held_B = jnp.full_like(self.cache.length_B, self.held)
        cache = jax.block_until_ready(roll_back(self.cache, held_B))
        start = time.perf_counter()
        self.cache = jax.block_until_ready(self._run(self.params, cache, self.first_B))
        return time.perf_counter() - start


def needs(subject: Subject, attended: int | None = None) -> tuple[float, float]:
    """Bytes that a step must read and FLOPs it must do, means over the loop's steps.

    Args:
      attended: keys that a token attends to in a full layer; None: all that are held.
    """
    model, batch = subject.model, subject.cache.batch
    attended = subject.held + subject.tokens / 2 if attended is None else attended
    total_bytes = total_flops = 0.0
    routed_layers = list(model.config.routed_layers)
    for layer, cache in enumerate(subject.cache.layers):
        block = model.block(layer)
        rows, used, keys = float(batch), 1.0, attended
        if layer in routed_layers:
            routed_BT = subject.routed[routed_layers.index(layer)]
            rows = float(routed_BT.sum(axis=0).mean())
            used = float(routed_BT.any(axis=0).mean())
            block, keys = block.block, float(np.asarray(cache.count_B).mean())
        weights = sum(p.size for p in jax.tree.leaves(nnx.state(block, nnx.Param)))
        width = model.config.num_heads * model.config.head_width
        kv_width = model.config.kv_heads * model.config.head_width
        total_bytes += 4 * (used * weights + rows * 2 * keys * kv_width)
        total_flops += rows * (2 * weights + 4 * keys * width)
    return total_bytes, total_flops


def compare(slow: Subject, fast: Subject, repeats: int, attended: int | None = None) -> dict:
    """The median over rounds of slow time / fast time, beside both limits."""
    speedup = statistics.median(slow.run() / fast.run() for _ in range(repeats))
    (slow_bytes, slow_flops), (fast_bytes, fast_flops) = needs(slow), needs(fast, attended)
    return {
        "speedup": speedup,
        "byte_limit": slow_bytes / fast_bytes,
        "flop_limit": slow_flops / fast_flops,
    }


def measure(layers: int, tokens: int, repeats: int) -> dict:
    dense, mod = make_model(layers), make_model(layers, depth=modo.DepthConfig(capacity=CAPACITY))
    plant_predictors(mod)
    results: dict = {}
    for batch in (1, 16):
        subjects = [Subject(model, batch, CONTEXT, tokens, "sparse") for model in (dense, mod)]
        name = f"mod_speedup_batch_{batch}"
        if not subjects[1].routed.any():
            raise SystemExit(f"error: no token was routed at batch {batch}; use more --tokens")
        result = compare(*subjects, repeats)
        results |= {name: result["speedup"]}
        results |= {f"{name}_{limit}": result[limit] for limit in ("byte_limit", "flop_limit")}
        results[f"mod_share_routed_batch_{batch}"] = float(subjects[1].routed.mean())
        results[f"dense_tokens_per_second_batch_{batch}"] = batch * tokens / subjects[0].run()
    sizes = [init_cache(model, 1, CONTEXT).nbytes for model in (dense, mod)]
    results["mod_cache_bytes_ratio"] = sizes[1] / sizes[0]
    results["mod_cache_bytes_ratio_limit"] = (1 + CAPACITY) / 2
    layer = make_model(1, moba=modo.MobaConfig(block_size=BLOCK, top_k=TOP_K))
    full, sparse = (Subject(layer, 1, LONG_CONTEXT, tokens, kind) for kind in ("full", "sparse"))
    # The last block is half full in the mean, if the loop is short: count it as it is.
    own = sparse.held % BLOCK + tokens / 2
    result = compare(full, sparse, repeats, attended=(TOP_K - 1) * BLOCK + own)
    results["moba_layer_speedup_32k"] = result["speedup"]
    for limit in ("byte_limit", "flop_limit"):
        results[f"moba_layer_speedup_32k_{limit}"] = result[limit]
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=8, help="of both models")
    parser.add_argument("--tokens", type=int, default=32, help="steps of a loop")
    parser.add_argument("--repeats", type=int, default=5, help="rounds of both sides")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    results = measure(options.layers, options.tokens, options.repeats)
    print(f"{options.layers} layers of width {WIDTH}, float32, {jax.devices()[0]}")
    print(f"{'':<28}{'measured':>10}{'by bytes':>10}{'by FLOPs':>10}")
    for name in ("mod_speedup_batch_1", "mod_speedup_batch_16", "moba_layer_speedup_32k"):
        limits = (results[f"{name}_{limit}"] for limit in ("byte_limit", "flop_limit"))
        print(f"{name:<28}{results[name]:>10.2f}" + "".join(f"{x:>10.2f}" for x in limits))
    name = "mod_cache_bytes_ratio"
    print(f"{name:<28}{results[name]:>10.3f}{results[f'{name}_limit']:>10.3f}")
    for batch in (1, 16):
        share = results[f"mod_share_routed_batch_{batch}"]
        print(f"share of tokens routed at batch {batch}: {share:.3f}")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
