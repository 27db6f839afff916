"""MoBA's TPU kernels beside splash attention, by the compiler's own schedule: no TPU is needed.

python -m benchmarks.tpu_static [--generations v5e v6e] [--json FILE]

libtpu compiles for each generation and writes the final schedule of every kernel: its bundles are
about the cycles of one grid step when memory keeps up. A row compares one attended tile (queries x
keys, width 128, bfloat16) of modo's kernel, statistics and writes included, with the same tile of
splash attention; backward is modo's one pass against splash's dkv and dq passes together.

Below it, an estimate of a whole layer by row length from those bundles: `gather` is the time to
gather rows at an assumed 4 ns each, and `times faster` is splash's causal half over all of modo's
parts: the choice, the own block, the tiles and the gathers. These are estimates, not measurements.
"""

import argparse
import json
import os
import pathlib
import re
import shutil
import tempfile

# Read once, when libtpu is loaded.
os.environ["TPU_STATIC_DUMP"] = tempfile.mkdtemp(prefix="tpu-static-")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["LIBTPU_INIT_ARGS"] = (
    f"{os.environ.get('LIBTPU_INIT_ARGS', '')} --xla_jf_dump_to={os.environ['TPU_STATIC_DUMP']} "
    "--xla_jf_dump_llo_text=true --xla_jf_emit_annotations=true"
)

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel as splash
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask

from kernels_pallas import tpu_topology
from kernels_pallas.moba import plan, tpu, tpu_choose, tpu_interval, tpu_tiles

_DUMP = pathlib.Path(os.environ["TPU_STATIC_DUMP"])
# Cycles a nanosecond.
CLOCK = {"v5e": 1.5, "v5p": 1.75, "v6e": 1.75, "tpu7x": 1.9}
TILES = ((256, 512), (512, 512))
WIDTH = 128
GATHER_NS = 4
LENGTHS = [8192 << i for i in range(8)]
TOP_K = 3


def compile_for(generation: str, function, args):
    """Compiles for one chip."""
    sharding = tpu_topology.one_chip(generation)
    return jax.jit(function, in_shardings=sharding, out_shardings=sharding).lower(*args).compile()


def schedule(generation: str, function, args) -> dict[str, dict]:
    """Bundles and share of matrix slots used, by name of kernel, of all that gets compiled."""
    before = set(_DUMP.glob("*"))
    compile_for(generation, function, args)
    kernels = {}
    for path in sorted(set(_DUMP.glob("*")) - before):
        name = re.match(r"\d+-(.+?)-\d+-final_hlo-static-per-bundle-utilization\.txt", path.name)
        if not name:
            continue
        lines = path.read_text().splitlines()
        # A line of column names, one of what a bundle can hold, then one a bundle.
        head = next(i for i, line in enumerate(lines) if "VALU" in line)
        columns = [column.strip() for column in lines[head].split(",")]
        capacity = [int(number) for number in lines[head + 1].split()]
        used = [
            [int(number) for number in line.split()]
            for line in lines[head + 3 :]
            if re.fullmatch(r"[\d ]+", line)
        ]
        if used:
            at = columns.index("MATMUL" if "MATMUL" in columns else "MXU")
            share = sum(row[at] for row in used) / (capacity[at] * len(used))
            kernels[name[1]] = {"bundles": len(used), "mxu": round(share, 3)}
    for path in _DUMP.glob("*"):
        path.unlink()
    return kernels


def only(kernels: dict[str, dict], *parts: str) -> dict:
    """The one kernel whose name holds all of `parts`."""
    found = [value for name, value in kernels.items() if all(part in name for part in parts)]
    if len(found) != 1:
        raise RuntimeError(f"one kernel named {parts} expected, got {sorted(kernels)}")
    return found[0]


def _array(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


def moba_tiles(generation: str, queries: int, keys: int) -> tuple[dict, dict]:
    """The tile kernels, forward and backward."""
    Z, S = 8, 4
    table, used = _array(Z, dtype=jnp.int32), _array(dtype=jnp.int32)
    block = _array(S, keys, WIDTH)
    sums = _array(S, keys, WIDTH, dtype=jnp.float32)

    def forward(*args):
        return tpu_tiles.forward(*args, soft_cap=None, interpret=False)

    def backward(*args):
        return tpu_tiles.backward(*args, soft_cap=None, interpret=False)

    rows = _array(Z, queries, 2 * WIDTH + tpu_tiles.LANES)
    args = (table, used, _array(Z, queries, WIDTH), block, block)
    return (
        only(schedule(generation, forward, args), "moba_tiles_forward"),
        only(
            schedule(generation, backward, (table, used, rows, block, block, sums, sums)),
            "moba_tiles_backward",
        ),
    )


def splash_tiles(generation: str, queries: int, keys: int) -> tuple[dict, dict]:
    """Splash attention's kernels; the backward pass is two."""
    T = 8192
    sizes = splash.BlockSizes(
        block_q=queries,
        block_kv=keys,
        block_kv_compute=keys,
        block_q_dkv=queries,
        block_kv_dkv=keys,
        block_kv_dkv_compute=keys,
        block_q_dq=queries,
        block_kv_dq=keys,
    )
    # A full mask: every tile is attended, as MoBA's are.
    kernel = splash.make_splash_mha(
        splash_mask.MultiHeadMask([splash_mask.FullMask((T, T))]),
        head_shards=1,
        q_seq_shards=1,
        block_sizes=sizes,
    )

    def both(q, k, v):
        return jax.grad(lambda *x: kernel(*x).astype(jnp.float32).sum(), (0, 1, 2))(q, k, v)

    args = [_array(1, T, WIDTH)] * 3
    # Without the statistics that training needs: the faster of its two forward kernels.
    forward = only(schedule(generation, lambda *x: kernel(*x), args), "splash")
    kernels = schedule(generation, both, args)
    dkv, dq = (only(kernels, "splash", part) for part in ("dkv", "dq_"))
    bundles = dkv["bundles"] + dq["bundles"]
    mxu = (dkv["bundles"] * dkv["mxu"] + dq["bundles"] * dq["mxu"]) / bundles
    return forward, {"bundles": bundles, "mxu": round(mxu, 3)}


def compare(generation: str) -> list[dict]:
    rows = []
    for queries, keys in TILES:
        pairs = zip(
            ("forward", "backward"),
            (4, 10),
            moba_tiles(generation, queries, keys),
            splash_tiles(generation, queries, keys),
            strict=True,
        )
        for name, products, ours, theirs in pairs:
            flops = products * queries * keys * WIDTH
            rows.append(
                {
                    "generation": generation,
                    "kernel": name,
                    "tile": f"{queries}x{keys}",
                    "bundles": ours["bundles"],
                    "splash_bundles": theirs["bundles"],
                    "flops_per_bundle": flops / ours["bundles"],
                    "splash_flops_per_bundle": flops / theirs["bundles"],
                    "ratio_to_splash": theirs["bundles"] / ours["bundles"],
                    "mxu": ours["mxu"],
                }
            )
    return rows


def other_bundles(generation: str, window: int, choices: int) -> dict[str, int]:
    """Bundles of a grid step of the choice (a tile of queries against a tile of blocks), and of
    the own block forward and backward."""
    T, S = 8192, 256
    low, q, k = _array(1, T, dtype=jnp.int32), _array(1, 1, T, WIDTH), _array(1, T, WIDTH)
    stat = _array(1, 1, T, dtype=jnp.float32)
    options = {"W": window, "reach": 1, "soft_cap": None, "interpret": False}

    def choose(*args):
        call = plan.make_call(T, T // S, choices + 1, aligned=True)
        return tpu_choose.choose(call, *args, tile=512, interpret=False)

    def forward(*args):
        return tpu_interval.forward(*args, **options)

    def backward(*args):
        return tpu_interval.backward(*args, **options)

    centroids = _array(1, S, WIDTH, dtype=jnp.float32)
    return {
        "choose": only(schedule(generation, choose, (low, low, q, centroids)), "choose")["bundles"],
        "forward": only(schedule(generation, forward, (low, q, k, k)), "interval")["bundles"],
        "backward": only(schedule(generation, backward, (low, q, k, k, q, stat, stat)), "interval")[
            "bundles"
        ],
    }


def estimate(generation: str, rows: list[dict], block_size: int, length: int, other) -> dict:
    """Milliseconds of one query head of a layer, forward and backward, by bundles and gathers."""
    tile = {row["kernel"]: row for row in rows if row["tile"] == f"256x{block_size}"}
    choices = TOP_K - 1
    call = plan.make_call(length, block_size, TOP_K, aligned=True)
    layout = tpu.make_layout(call, 1, length, 1, 1)
    pairs = plan.max_pairs(length, block_size, choices)
    tiles = pairs / layout.tile + call.candidates / 2
    # Blocks that lie behind all queries of a tile are not scored.
    scored = length / 512 * max(1, call.candidates / 256 / 2)
    bundles = {
        "choice": scored * other["choose"],
        "own": length / layout.window * (other["forward"] + other["backward"]),
        "tiles": tiles * (tile["forward"]["bundles"] + tile["backward"]["bundles"]),
    }
    # Queries to tiles and results back, in either pass.
    gathered = 2 * (tiles * layout.tile + pairs)
    dense = length**2 / 2 / (256 * 512)
    dense *= tile["forward"]["splash_bundles"] + tile["backward"]["splash_bundles"]
    ms = {name: value / CLOCK[generation] * 1e-6 for name, value in bundles.items()}
    ms["gather"] = gathered * GATHER_NS * 1e-6
    return {
        "generation": generation,
        "length": length,
        "rows_gathered_per_token": gathered / length,
        **{f"{name}_ms": value for name, value in ms.items()},
        "splash_ms": dense / CLOCK[generation] * 1e-6,
        "times_faster": dense / CLOCK[generation] * 1e-6 / sum(ms.values()),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    generations = list(tpu_topology.TOPOLOGIES)
    parser.add_argument("--generations", nargs="+", choices=generations, default=generations)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows, estimates = [], []
    print(f"{'':<7}{'kernel':<10}{'tile':<9}{'bundles':>8}{'splash':>8}{'ratio':>7}{'MXU':>7}")
    for generation in options.generations:
        rows += (new := compare(generation))
        for row in new:
            print(
                f"{generation:<7}{row['kernel']:<10}{row['tile']:<9}{row['bundles']:>8}"
                f"{row['splash_bundles']:>8}{row['ratio_to_splash']:>7.2f}{row['mxu']:>7.2f}",
                flush=True,
            )
        other = other_bundles(generation, 512, TOP_K - 1)
        estimates += [estimate(generation, new, 512, length, other) for length in LENGTHS]
    print(f"\nOne query head, blocks of 512, top_k {TOP_K}, both passes, estimated ms")
    parts = ("choice", "own", "tiles", "gather", "splash")
    print(f"{'':<7}{'T':>8}" + "".join(f"{part:>9}" for part in parts) + f"{'times faster':>14}")
    for row in estimates:
        print(
            f"{row['generation']:<7}{row['length']:>8}"
            + "".join(f"{row[f'{part}_ms']:>9.3f}" for part in parts)
            + f"{row['times_faster']:>14.2f}"
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows, "estimates": estimates}, indent=2) + "\n")
    shutil.rmtree(_DUMP)


if __name__ == "__main__":
    main()
