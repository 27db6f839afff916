"""MoBA and Mixture-of-Depths on one NVIDIA GPU.

python -m benchmarks.gpu [--json FILE] [--budget 480] [--section attention ...]
python -m benchmarks.gpu --smoke          # the same code at tiny shapes, on any device

Needs jax with CUDA, flax and optax. Sections, in this order:
  correct    the kernels against NumPy in float64, and against "xla" at 8K; a tolerance that is
             passed ends with status 1
  attention  MoBA (batch 2, 16 heads of 128, bfloat16) beside cuDNN's causal flash attention, from
             8K to 512K tokens: the forward pass, and both passes
  step       a training step of a model of 370M parameters, with its share of the peak FLOP/s
  mod        a training step of Mixture-of-Depths beside the dense model
Each result is written to FILE as soon as it is there; what the budget of seconds leaves no time for
is left out and named. With --smoke, kernels are interpreted where there is no GPU, and XLA's
attention stands in for cuDNN's.
"""

import argparse
import dataclasses
import functools
import json
import math
import pathlib
import statistics
import sys
import time

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import modo
from kernels_pallas.moba import plan
from modo import flops
from modo.ops.losses import cross_entropy
from tests.kernels import moba_numpy

SETTINGS = ((128, 8), (512, 3))
# In order of what is most worth knowing, should the budget end.
LENGTHS = tuple(n * 1024 for n in (8, 32, 128, 512, 16, 64, 256))


@dataclasses.dataclass(frozen=True)
class Scale:
    """Shapes of a run, and what dense attention is."""

    lengths: tuple[int, ...] = LENGTHS
    settings: tuple[tuple[int, int], ...] = SETTINGS
    batch: int = 2
    heads: int = 16
    width: int = 128
    exact_length: int = 1000
    exact_block: int = 128
    large: tuple[int, int, int] = (8192, 512, 3)
    layers: int = 24
    d_model: int = 1024
    vocab_size: int = 32000
    model_length: int = 8192
    model_batch: int = 4
    mod_length: int = 2048
    mod_batch: int = 8
    dense: str = "cudnn"


SMOKE = Scale(
    lengths=(64,), settings=((16, 3),), batch=1, heads=2, width=16, exact_length=100,
    exact_block=16, large=(160, 32, 3), layers=2, d_model=32, vocab_size=64, model_length=64,
    model_batch=2, mod_length=64, mod_batch=2, dense="xla",
)  # fmt: skip


class Report:
    """Rows by section, written whenever there is a new one; and the clock."""

    def __init__(self, path: pathlib.Path | None, budget: float):
        self._path = path
        self._end = time.perf_counter() + budget
        self.rows: dict[str, list[dict]] = {}

    def add(self, section: str, **row) -> None:
        self.rows.setdefault(section, []).append(row)
        text = "  ".join(
            f"{name} {value:.4g}" if isinstance(value, float) else f"{name} {value}"
            for name, value in row.items()
        )
        print(f"{section:<10}{text}", flush=True)
        if self._path is not None:
            result = {"device": jax.devices()[0].device_kind, "jax": jax.__version__, **self.rows}
            self._path.write_text(json.dumps(result, indent=2) + "\n")

    def has_time(self, section: str, **row) -> bool:
        """Whether to go on; if not, says what is left out."""
        if time.perf_counter() < self._end:
            return True
        self.add(section, **row, left_out="no time")
        return False

    @property
    def passed(self) -> bool:
        return all(row["passed"] for row in self.rows.get("correct", ()))


def seconds(f, *args, most: int = 10, enough: float = 1.0) -> float:
    """Median time of a compiled function: of `most` runs, or of as many as take `enough`."""
    jax.block_until_ready(f(*args))
    times = []
    while len(times) < most and (sum(times) < enough or not times):
        start = time.perf_counter()
        jax.block_until_ready(f(*args))
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def _inputs(B, T, N, K, H, dtype, seed=0):
    """Queries, keys, values and the gradient of the output."""
    keys = jax.random.split(jax.random.key(seed), 4)
    normal = jax.jit(jax.random.normal, static_argnums=(1, 2))
    return [normal(key, (B, T, n, H), dtype) for key, n in zip(keys, (N, K, K, N), strict=True)]


def _both(attend):
    """The output and all gradients."""

    def both(q, k, v, do):
        out, vjp = jax.vjp(attend, q, k, v)
        return out, *vjp(do)

    return jax.jit(both)


def _moba(block_size, top_k, implementation="pallas_gpu", **options):
    return functools.partial(
        modo.moba_attention,
        block_size=block_size,
        top_k=top_k,
        implementation=implementation,
        **options,
    )


# --- Correctness ----------------------------------------------------------------------------------


def _correct_exact(report: Report, scale: Scale, dtype, tolerance: float, documents: bool):
    """The largest error over the largest value, of the output and the three gradients."""
    T, M = scale.exact_length, scale.exact_block
    q, k, v, do = _inputs(1, T, 4, 2, scale.width, dtype)
    segments = None
    if documents:
        ends = (T // 10, T // 2, T - T // 7)
        segments = 1 + sum((np.arange(T) >= end).astype(np.int32) for end in ends)[None]
        segments[:, -3:] = 0
    truth = functools.partial(
        moba_numpy.moba, block_size=M, top_k=3, scale=scale.width**-0.5, segments=segments
    )
    *_, gap = truth(q, k, v, do)
    # Rows whose choice hangs on rounding are left out.
    clear = (gap > 1e-5)[..., None]
    do = jnp.where(clear, do, 0)
    out, gradients, *_ = truth(q, k, v, do)
    attend = _moba(M, 3, segment_ids=None if segments is None else jnp.asarray(segments))
    actual = [np.asarray(x).astype(np.float64) for x in _both(attend)(q, k, v, do)]
    actual[0] = np.where(clear, actual[0], 0)
    expected = (np.where(clear, out, 0), *gradients)
    errors = [
        np.max(np.abs(a - e)) / np.max(np.abs(e)) for a, e in zip(actual, expected, strict=True)
    ]
    report.add(
        "correct", against="float64", length=T, dtype=jnp.dtype(dtype).name, documents=documents,
        error=float(max(errors)), passed=bool(max(errors) < tolerance),
    )  # fmt: skip


def _correct_large(report: Report, scale: Scale):
    """Root mean square errors: a near-tie may be decided otherwise, and changes a row or two."""
    T, M, k = scale.large
    args = _inputs(1, T, 8, 2, scale.width, jnp.bfloat16)
    both = _both(_moba(M, k))
    actual, again, expected = (
        [np.asarray(x).astype(np.float64) for x in f(*args)]
        for f in (both, both, _both(_moba(M, k, "xla")))
    )
    errors = [
        np.linalg.norm(a - e) / np.linalg.norm(e) for a, e in zip(actual, expected, strict=True)
    ]
    repeats = all(np.array_equal(a, b) for a, b in zip(actual, again, strict=True))
    report.add(
        "correct", against="xla", length=T, dtype="bfloat16", error=float(max(errors)),
        repeats_bitwise=repeats, passed=bool(max(errors) < 1e-2 and repeats),
    )  # fmt: skip


def correct(report: Report, scale: Scale) -> None:
    for dtype, tolerance in ((jnp.float32, 2e-5), (jnp.bfloat16, 1e-2)):
        for documents in (False, True):
            _correct_exact(report, scale, dtype, tolerance, documents)
    _correct_large(report, scale)


# --- Attention ------------------------------------------------------------------------------------


def attended(length: int, block_size: int | None = None, top_k: int = 1) -> int:
    """Pairs of a query and a key of one head that MoBA needs; block_size None: causal attention."""
    if block_size is None:
        return length * (length + 1) // 2
    blocks = plan.num_candidates(length, block_size)
    whole, rest = divmod(length, block_size)
    own = whole * attended(block_size) + attended(rest)
    return own + plan.max_pairs(length, block_size, min(top_k - 1, blocks)) * block_size


def attention(report: Report, scale: Scale) -> None:
    def dense(q, k, v):
        return jax.nn.dot_product_attention(q, k, v, is_causal=True, implementation=scale.dense)

    for length in scale.lengths:
        if not report.has_time("attention", length=length):
            continue
        args = _inputs(scale.batch, length, scale.heads, scale.heads, scale.width, jnp.bfloat16)
        products = 4 * scale.batch * scale.heads * scale.width
        times = {}
        for setting in (None, *scale.settings):
            attend = dense if setting is None else _moba(*setting)
            row = {"length": length, "kind": scale.dense, "block_size": 0, "top_k": 0}
            if setting is not None:
                row |= {"kind": "moba", "block_size": setting[0], "top_k": setting[1]}
            if not report.has_time("attention", **row):
                continue
            try:
                forward = seconds(jax.jit(attend), *args[:3])
                both = seconds(_both(attend), *args)
            except (jax.errors.JaxRuntimeError, ValueError) as error:
                report.add("attention", **row, error=str(error).splitlines()[0][:200])
                continue
            times[setting] = forward, both
            needed = products * attended(length, *(setting or ()))
            row |= {
                "forward_ms": 1e3 * forward,
                "both_ms": 1e3 * both,
                "forward_tflops": needed / forward / 1e12,
                "both_tflops": 3.5 * needed / both / 1e12,
            }
            if setting is not None and None in times:
                row |= {
                    "forward_speedup": times[None][0] / forward,
                    "both_speedup": times[None][1] / both,
                }
            report.add("attention", **row)


# --- Training steps -------------------------------------------------------------------------------


def _train_step(config: modo.ModelConfig, batch: int, length: int):
    """A function of no arguments that takes one step, and waits for it."""
    model = modo.Decoder(config, rngs=nnx.Rngs(0))
    graphdef, params = nnx.split(model)
    optimizer = optax.adamw(1e-4)
    tokens = jax.random.randint(jax.random.key(0), (batch, length), 0, config.vocab_size)

    def loss(params):
        logits_BTV, aux = nnx.merge(graphdef, params)(tokens)
        total = jnp.mean(cross_entropy(logits_BTV, jnp.roll(tokens, -1, axis=1))[0])
        return total if config.depth is None else total + aux.predictor_loss

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def step(params, opt_state):
        value, gradients = jax.value_and_grad(loss)(params)
        updates, opt_state = optimizer.update(gradients, opt_state, params)
        return optax.apply_updates(params, updates), opt_state, value

    state = [params, jax.jit(optimizer.init)(params)]

    def run():
        *state[:], value = step(*state)
        return value

    return run


def _model_flops(config: modo.ModelConfig, batch: int, length: int) -> int:
    """Of the products that a step needs: weights' for every token, and attended pairs."""
    whole = 12 * batch * config.num_layers * config.num_heads * config.head_width
    moba = () if config.moba is None else (config.moba.block_size, config.moba.top_k)
    dense = flops.train_step(flops.dense_twin(config), batch, length)
    return dense - whole * length**2 + whole * attended(length, *moba)


def step(report: Report, scale: Scale) -> None:
    block_size, top_k = scale.settings[-1]
    for moba in (modo.MobaConfig(block_size, top_k, implementation="pallas_gpu"), None):
        kind = "dense" if moba is None else "moba"
        if not report.has_time("step", kind=kind):
            continue
        config = modo.ModelConfig(
            vocab_size=scale.vocab_size,
            d_model=scale.d_model,
            num_layers=scale.layers,
            num_heads=max(1, scale.d_model // 128),
            moba=moba,
            compute_dtype="bfloat16",
            scan_layers=True,
            remat="dots",
        )
        batch, length = scale.model_batch, scale.model_length
        if moba is None:
            # XLA's full attention keeps all scores: fewer tokens, in shorter rows.
            batch, length = 2 * batch, length // 4
        taken = seconds(_train_step(config, batch, length), most=10, enough=5.0)
        peak = flops.peak_flops(jax.devices()[0])
        report.add(
            "step", kind=kind, batch=batch, length=length, parameters=flops.parameter_count(config),
            seconds=taken, tokens_per_second=batch * length / taken,
            mfu=None if math.isnan(peak) else _model_flops(config, batch, length) / taken / peak,
        )  # fmt: skip


def mod(report: Report, scale: Scale) -> None:
    batch, length = scale.mod_batch, scale.mod_length
    configs = [
        modo.ModelConfig(
            vocab_size=scale.vocab_size,
            d_model=scale.d_model,
            num_layers=scale.layers // 2 * 2,
            num_heads=max(1, scale.d_model // 128),
            depth=depth,
            compute_dtype="bfloat16",
            scan_layers=True,
            remat="dots",
        )
        for depth in (None, modo.DepthConfig(every=2, capacity=0.125))
    ]
    if not report.has_time("mod"):
        return
    dense, routed = (
        seconds(_train_step(config, batch, length), most=10, enough=5.0) for config in configs
    )
    needed = [flops.train_step(config, batch, length) for config in configs]
    report.add(
        "mod", batch=batch, length=length, dense_seconds=dense, mod_seconds=routed,
        speedup=dense / routed, flop_ratio=needed[0] / needed[1],
    )  # fmt: skip


def _print_ratios(rows: list[dict]) -> None:
    rows = [row for row in rows if "both_speedup" in row]
    if not rows:
        return
    print(f"\n{'times faster than dense':<26}{'forward':>9}{'both':>9}")
    for row in sorted(rows, key=lambda row: (row["block_size"], row["length"])):
        name = f"{row['length']:>8}  B {row['block_size']}, k {row['top_k']}"
        print(f"{name:<26}{row['forward_speedup']:>9.2f}{row['both_speedup']:>9.2f}")


SECTIONS = {"correct": correct, "attention": attention, "step": step, "mod": mod}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--section", action="append", choices=SECTIONS, help="default: all")
    parser.add_argument("--budget", type=float, default=480.0, help="seconds")
    parser.add_argument("--smoke", action="store_true", help="tiny shapes, on any device")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if not options.smoke and jax.default_backend() != "gpu":
        print("benchmarks.gpu needs an NVIDIA GPU, or --smoke", file=sys.stderr)
        return 1
    scale = SMOKE if options.smoke else Scale()
    report = Report(options.json, options.budget)
    print(f"{jax.devices()[0].device_kind}, jax {jax.__version__}")
    for section in options.section or SECTIONS:
        if report.has_time(section):
            SECTIONS[section](report, scale)
    _print_ratios(report.rows.get("attention", []))
    return 0 if report.passed else 1


if __name__ == "__main__":
    sys.exit(main())
