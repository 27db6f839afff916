"""Rows of Mixture-of-Depths in and out: bytes that XLA's form and the TPU kernel move.

python -m benchmarks.mod_routing [--generations v5e v6e] [--json FILE]

No TPU is needed: libtpu compiles either form for each generation, and the bytes are counted in the
compiled program. An array counts where an instruction reads or writes it in HBM, but of x

- gathers, and the kernels, move the chosen rows: in bfloat16 the pair of rows that share words;
- XLA's scatter moves all, both ways: its final schedule fetches x and writes it back in windows of
  4 MB (v5e) to 24 MB (v6e), each of which holds a chosen row, and waits for every one.

The least is each chosen row read once and written once, and for the combination the update read.
Times are bytes over the data sheet's bandwidth; they are estimates, not measurements.
"""

import argparse
import json
import math
import os
import pathlib
import re

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp

from kernels_pallas import mod, tpu_topology

# Bytes a second of a device; of tpu7x that is half a chip.
BANDWIDTH = {"v5e": 819e9, "v5p": 2765e9, "v6e": 1640e9, "tpu7x": 3690e9}
# B, T, D, C
SHAPES = [(8, 2048, 2048, 256), (8, 8192, 4096, 1024)]
_SIZES = {"bf16": 2, "f32": 4, "s32": 4, "u32": 4, "pred": 1}
_ARRAY = re.compile(r"(bf16|f32|s32|u32|pred)\[([\d,]*)\]\{([^}]*)\}")
_FREE = ("parameter", "bitcast", "constant", "get-tuple-element", "tuple", "call-done", "copy-done")


def compile_for(generation: str, function, args, donated=()):
    """Compiles for one chip."""
    sharding = tpu_topology.one_chip(generation)
    jitted = jax.jit(
        function, in_shardings=sharding, out_shardings=sharding, donate_argnums=donated
    )
    return jitted.lower(*args).compile()


def _arrays(text: str) -> list[int]:
    """Bytes of the arrays of a type that lie in HBM."""
    return [
        _SIZES[kind] * math.prod(int(n) for n in shape.split(",") if n)
        for kind, shape, layout in _ARRAY.findall(text)
        if not re.search(r"S\(\d\)", layout)
    ]


def count(text: str, x_bytes: int, rows_bytes: int) -> tuple[int, int]:
    """Bytes that a compiled program moves between HBM and the core, and its copies of all of x."""
    entry = text[text.index("\nENTRY") :].splitlines()[2:]
    types, moved, copies = {}, 0, 0
    for line in entry:
        found = re.match(r"\s+(?:ROOT )?%(\S+) = (.*?) ([a-z][\w-]*)\((.*?)\)(?:,|$)", line)
        if found is None:
            continue
        name, kind, operation, operands = found.groups()
        types[name] = kind
        if operation in _FREE:
            continue
        copies += operation in ("copy", "copy-start") and x_bytes in _arrays(kind)
        # The types of asynchronous operations name their operands as well.
        arrays = [] if operation == "copy-start" else _arrays(kind)
        if operation in ("call-start", "call-update"):
            operands = ""
        for operand in re.findall(r"%([^\s,)]+)", operands):
            arrays += _arrays(types.get(operand, ""))
        rows = "gather" in name or "mod_" in name
        moved += sum(rows_bytes if rows and n == x_bytes else n for n in arrays)
    return moved, copies


def compare(generation: str, shape, dtype) -> list[dict]:
    """A row for each operation."""
    B, T, D, C = shape
    x, delta = (jax.ShapeDtypeStruct((B, length, D), dtype) for length in (T, C))
    gate, index, filled = (
        jax.ShapeDtypeStruct((B, C), kind) for kind in (jnp.float32, jnp.int32, bool)
    )
    itemsize = jnp.dtype(dtype).itemsize
    x_bytes, slots = B * T * D * itemsize, B * C * D * itemsize
    rows = []
    for operation, args, donated, least in (
        ("dispatch", (x, index, filled), (), 2 * slots),
        ("combine", (x, delta, gate, index, filled), (0,), 3 * slots),
    ):
        row = {
            "generation": generation,
            "operation": operation,
            "shape": list(shape),
            "dtype": jnp.dtype(dtype).name,
            "least_bytes": least,
        }
        for name, implementation in (("xla", "xla"), ("kernel", "pallas_tpu")):

            def function(*args, operation=operation, implementation=implementation):
                return getattr(mod, operation)(*args, implementation=implementation)

            compiled = compile_for(generation, function, args, donated)
            moved, copies = count(compiled.as_text(), x_bytes, slots * 4 // itemsize)
            row |= {
                f"{name}_bytes": moved,
                f"{name}_copies": copies,
                f"{name}_temporary": compiled.memory_analysis().temp_size_in_bytes,
                f"{name}_us": moved / BANDWIDTH[generation] * 1e6,
            }
        rows.append(row | {"ratio": row["kernel_bytes"] / row["xla_bytes"]})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    generations = list(tpu_topology.TOPOLOGIES)
    parser.add_argument("--generations", nargs="+", choices=generations, default=generations)
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    rows = []
    print("MB moved (least, XLA, kernel), copies of x, MB of temporaries, us at full bandwidth")
    names = ("least", "XLA", "kernel", "ratio", "copies", "temporary", "us")
    print(f"{'':<6} {'B T D C':<20} {'':<9}{'':<9}" + "".join(f"{n:>12}" for n in names))
    for generation in options.generations:
        for shape in SHAPES:
            for dtype in (jnp.bfloat16, jnp.float32):
                rows += (new := compare(generation, shape, dtype))
                for row in new:
                    megabytes = (f"{row[f'{n}_bytes'] / 1e6:12.1f}" for n in
                                 ("least", "xla", "kernel"))  # fmt: skip
                    pairs = (
                        f"{row['xla_copies']}/{row['kernel_copies']}",
                        f"{row['xla_temporary'] / 1e6:.1f}/{row['kernel_temporary'] / 1e6:.1f}",
                        f"{row['xla_us']:.0f}/{row['kernel_us']:.0f}",
                    )
                    print(
                        f"{generation:<6} {' '.join(map(str, shape)):<20} {row['operation']:<9}"
                        f"{row['dtype']:<9}{''.join(megabytes)}{row['ratio']:>12.2f}"
                        + "".join(f"{p:>12}" for p in pairs),
                        flush=True,
                    )
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
