"""MoBA's TPU kernels beside splash attention, by the compiler's own schedule: no TPU is needed.

python -m benchmarks.tpu_static [--generations v5e v6e] [--json FILE] [--costs]

libtpu compiles for each generation and writes the final schedule of every kernel: its bundles are
about the cycles of one grid step when memory keeps up. A row compares one attended tile (queries x
keys, width 128, bfloat16) of modo's kernel, statistics and writes included, with the same tile of
splash attention; backward is modo's one pass against splash's dkv and dq passes together.

Below it, an estimate of a whole layer by row length from those bundles: `gather` is the time to
gather rows at an assumed 4 ns each, `dense` that of the dense path, which takes the place of own
block, tiles and gathers where the rule in kernels_pallas/moba/tpu_costs.py says so (a star), and
`times faster` is splash's causal half over all parts of the path taken, the choice among them.
These are estimates, not measurements.

--costs prints the numbers that the rule rests on instead.
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
from kernels_pallas.moba import (
    plan,
    tpu,
    tpu_choose,
    tpu_costs,
    tpu_dense,
    tpu_interval,
    tpu_tiles,
)
from kernels_pallas.moba.tpu_costs import CLOCK, GATHER_NS

_DUMP = pathlib.Path(os.environ["TPU_STATIC_DUMP"])
TILES = ((256, 512), (512, 512))
WIDTH = 128
LENGTHS = [2048 << i for i in range(10)]
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


def moba_tiles(generation: str, queries: int, keys: int, dtype=jnp.bfloat16) -> tuple[dict, dict]:
    """The tile kernels, forward and backward."""
    Z, S = 8, 4
    table, used = _array(Z, dtype=jnp.int32), _array(dtype=jnp.int32)
    block = _array(S, keys, WIDTH, dtype=dtype)
    sums = _array(S, keys, WIDTH, dtype=jnp.float32)

    def forward(*args):
        return tpu_tiles.forward(*args, soft_cap=None, interpret=False)

    def backward(*args):
        return tpu_tiles.backward(*args, soft_cap=None, interpret=False)

    rows = _array(Z, queries, 2 * WIDTH + tpu_tiles.LANES, dtype=dtype)
    args = (table, used, _array(Z, queries, WIDTH, dtype=dtype), block, block)
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


def choose_bundles(generation: str, choices: int) -> int:
    """Of a tile of queries against a tile of blocks."""
    T, S = 8192, 256
    call = plan.make_call(T, T // S, choices + 1, aligned=True)

    def choose(*args):
        return tpu_choose.choose(call, *args, tile=512, interpret=False)

    tokens = _array(1, T, dtype=jnp.int32)
    args = (tokens, tokens, _array(1, 1, T, WIDTH), _array(1, S, WIDTH, dtype=jnp.float32))
    return only(schedule(generation, choose, args), "choose")["bundles"]


def own_bundles(generation: str, dtype=jnp.bfloat16) -> tuple[int, int]:
    """Of the own block, forward and backward."""
    T, W = 8192, tpu_costs.WINDOW
    options = {"W": W, "reach": 1, "soft_cap": None, "interpret": False}
    low = _array(1, T, dtype=jnp.int32)
    q, k = _array(1, 1, T, WIDTH, dtype=dtype), _array(1, T, WIDTH, dtype=dtype)
    stat = _array(1, 1, T, dtype=jnp.float32)

    def forward(*args):
        return tpu_interval.forward(*args, **options)

    def backward(*args):
        return tpu_interval.backward(*args, **options)

    return tuple(
        only(schedule(generation, function, args), "interval")["bundles"]
        for function, args in ((forward, (low, q, k, k)), (backward, (low, q, k, k, q, stat, stat)))
    )


def dense_bundles(generation: str, aligned: bool, dtype=jnp.bfloat16) -> tuple[float, float]:
    """Of a pair of tiles of the dense path, forward and backward.

    A kernel holds the code for pairs before a query's own tile and for the own tile, about as long.
    """
    T, W = 4096, tpu_costs.WINDOW
    options = {"W": W, "size": 512, "aligned": aligned, "soft_cap": None, "interpret": False}
    start = _array(1, 1, TOP_K, T, dtype=jnp.int32)
    table = _array(1, tpu_dense.num_pairs(T // W, 0), dtype=jnp.int32)
    used = _array(dtype=jnp.int32)
    q, k = _array(1, 1, T, WIDTH, dtype=dtype), _array(1, T, WIDTH, dtype=dtype)
    stat = _array(1, 1, T, dtype=jnp.float32)
    args = (table, used, start, q, k, k)

    def forward(*args):
        return tpu_dense.forward(*args, **options)

    def backward(*args):
        return tpu_dense.backward(*args, **options)

    return tuple(
        only(schedule(generation, function, args), "dense")["bundles"] / 2
        for function, args in ((forward, args), (backward, (*args, q, stat, stat)))
    )


def costs(generation: str, dtype) -> tpu_costs.Bundles:
    """What `tpu_costs.BUNDLES` should hold."""

    def tile(keys):
        parts = moba_tiles(generation, tpu_costs.TILE, keys, dtype)
        return sum(part["bundles"] for part in parts)

    return tpu_costs.Bundles(
        dense=sum(dense_bundles(generation, True, dtype)),
        dense_any=sum(dense_bundles(generation, False, dtype)),
        tile_128=tile(128),
        tile_512=tile(512),
        own=sum(own_bundles(generation, dtype)),
    )


def estimate(
    generation: str, rows: list[dict], block_size: int, length: int, choose: int, own: int
) -> dict:
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
        "choice": scored * choose,
        "own": length / layout.window * own,
        "tiles": tiles * (tile["forward"]["bundles"] + tile["backward"]["bundles"]),
    }
    # Queries to tiles and results back, in either pass.
    gathered = 2 * (tiles * layout.tile + pairs)
    splash_ms = length**2 / 2 / (256 * 512) / CLOCK[generation] * 1e-6
    splash_ms *= tile["forward"]["splash_bundles"] + tile["backward"]["splash_bundles"]
    dense_ms = tpu_costs.dense_ns(call, length, length, generation, 2) * 1e-6
    dense = tpu_costs.is_dense(
        call,
        queries=length,
        length=length,
        groups=1,
        rows=1,
        key_width=WIDTH,
        value_width=WIDTH,
        itemsize=2,
        device_kind=tpu_topology.devices(generation)[0].device_kind,
    )
    ms = {name: value / CLOCK[generation] * 1e-6 for name, value in bundles.items()}
    ms["gather"] = gathered * GATHER_NS * 1e-6
    return {
        "generation": generation,
        "length": length,
        "rows_gathered_per_token": gathered / length,
        **{f"{name}_ms": value for name, value in ms.items()},
        "dense_ms": dense_ms,
        "dense": dense,
        "splash_ms": splash_ms,
        "times_faster": splash_ms / (ms["choice"] + dense_ms if dense else sum(ms.values())),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    generations = list(tpu_topology.TOPOLOGIES)
    parser.add_argument("--generations", nargs="+", choices=generations, default=generations)
    parser.add_argument("--json", type=pathlib.Path)
    parser.add_argument("--costs", action="store_true", help="what the choice of a path rests on")
    options = parser.parse_args()
    if options.costs:
        for generation in options.generations:
            for dtype in (jnp.bfloat16, jnp.float32):
                print(generation, dtype.__name__, costs(generation, dtype), flush=True)
        shutil.rmtree(_DUMP)
        return
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
        parts = choose_bundles(generation, TOP_K - 1), sum(own_bundles(generation))
        estimates += [estimate(generation, new, 512, length, *parts) for length in LENGTHS]
    print(f"\nOne query head, blocks of 512, top_k {TOP_K}, both passes, estimated ms")
    parts = ("choice", "own", "tiles", "gather", "dense", "splash")
    print(f"{'':<7}{'T':>8}" + "".join(f"{part:>9}" for part in parts) + f"{'times faster':>14}")
    for row in estimates:
        print(
            f"{row['generation']:<7}{row['length']:>8}"
            + "".join(f"{row[f'{part}_ms']:>9.3f}" for part in parts)
            + f"{row['times_faster']:>14.2f}"
            + " *" * row["dense"]
        )
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows, "estimates": estimates}, indent=2) + "\n")
    shutil.rmtree(_DUMP)


if __name__ == "__main__":
    main()
