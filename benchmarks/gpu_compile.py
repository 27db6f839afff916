"""The MoBA kernels for NVIDIA GPUs, compiled for GPUs that are not here: no GPU, no driver.

python -m benchmarks.gpu_compile [--gpu h200 --gpu a100 --gpu rtx4090] [--case NAME] [--json FILE]

Needs `pip install "jax[cuda13]"` (about 3 GB). Each case is the choice, the forward and the
backward pass in one program; its line gives the temporary memory, the bytes of arguments and
results, how long the compiler took, and the most registers and spilled bytes of any kernel, as
ptxas reports them. Ends with status 1 if a case does not compile.

The sort of pairs is left out: for a GPU that is not here XLA cannot take the one that it takes
there, and compiles a slow one instead.
"""

import argparse
import importlib.util
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time
from unittest import mock

#        kind                    capability  SMs  shared memory an SM, a block  bytes/s  L2  memory
GPUS = {
    "h200": ("NVIDIA H200", (9, 0), 132, 233472, 232448, 4.8e12, 62914560, 150e9),
    "a100": ("NVIDIA A100", (8, 0), 108, 167936, 166912, 2.0e12, 41943040, 85e9),
    "rtx4090": ("NVIDIA GeForce RTX 4090", (8, 9), 128, 102400, 101376, 1.0e12, 75497472, 25e9),
}

# B, T, query heads, key heads, head width, block_size, top_k, dtype, documents
CASES = {
    "8K, 64 wide": (2, 8192, 16, 16, 64, 128, 8, "bfloat16", False),
    "8K": (2, 8192, 16, 16, 128, 128, 8, "bfloat16", False),
    "8K, blocks of 512": (2, 8192, 16, 4, 128, 512, 3, "bfloat16", False),
    "8K, packed": (2, 8192, 8, 2, 128, 512, 3, "bfloat16", True),
    "8K, 96 wide, blocks of 100": (1, 8192, 4, 2, 96, 100, 4, "bfloat16", True),
    "8K, 256 wide": (1, 8192, 8, 2, 256, 512, 3, "bfloat16", False),
    "8K, full": (1, 8192, 8, 2, 128, 512, 16, "bfloat16", False),
    "8K, float32": (1, 8192, 4, 1, 128, 128, 8, "float32", False),
    "8K, float32, 64 wide, packed": (1, 8192, 4, 4, 64, 512, 3, "float32", True),
    "8K, float32, 256 wide": (1, 8192, 2, 1, 256, 128, 8, "float32", False),
    "32K, blocks of 4096": (1, 32768, 8, 1, 128, 4096, 3, "bfloat16", False),
    "128K": (2, 131072, 16, 16, 128, 128, 8, "bfloat16", False),
    "128K, packed": (1, 131072, 32, 4, 128, 512, 4, "bfloat16", True),
}


def target_config(gpu: str) -> str:
    """What XLA wants to know of a GPU that it cannot ask."""
    kind, (major, minor), cores, smem_core, smem_block, bandwidth, l2, memory = GPUS[gpu]
    return f"""gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 shared_memory_per_block: 49152
  shared_memory_per_core: {smem_core} threads_per_core_limit: 2048 core_count: {cores}
  fpus_per_core: 128 block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535 memory_bandwidth: {bandwidth:.0f} l2_cache_size: {l2}
  clock_rate_ghz: 1.9 device_memory_size: {memory:.0f}
  shared_memory_per_block_optin: {smem_block}
  cuda_compute_capability {{ major: {major} minor: {minor} }}
  registers_per_core_limit: 65536 registers_per_block_limit: 65536
}}
platform_name: "CUDA" dnn_version_info {{ major: 9 minor: 8 }} device_description_str: "{kind}"
"""


def _both_passes(block_size, top_k):
    import jax

    from kernels_pallas import moba

    def both(q, k, v, do, segment_ids):
        def attend(q, k, v):
            return moba.moba_attention(
                q,
                k,
                v,
                block_size=block_size,
                top_k=top_k,
                segment_ids=segment_ids,
                implementation="pallas_gpu",
            )

        out, vjp = jax.vjp(attend, q, k, v)
        return out, vjp(do)

    return both


def compile_case(gpu: str, B, T, N, K, H, block_size, top_k, dtype, documents):
    """The executable of both passes for one GPU."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax._src.mesh import AbstractDevice
    from jax.experimental import topologies
    from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

    from kernels_pallas.moba import plan

    jax.devices()  # Loads the plugin.
    kind, _, cores, *_ = GPUS[gpu]
    topology = topologies.get_topology_desc(
        gpu, platform="cuda", target_config=target_config(gpu), topology="1x1x1"
    )
    sharding = NamedSharding(Mesh(np.array(topology.devices[:1]), ("x",)), PartitionSpec())
    device = AbstractDevice(device_kind=kind, num_cores=cores, platform="cuda")
    q, k = (jax.ShapeDtypeStruct((B, T, heads, H), dtype) for heads in (N, K))
    ids = jax.ShapeDtypeStruct((B, T), jnp.int32) if documents else None
    both = jax.jit(_both_passes(block_size, top_k), in_shardings=sharding, out_shardings=sharding)
    mesh = AbstractMesh((1,), ("x",), abstract_device=device)
    unsorted = mock.patch.object(plan, "_sort", lambda key_P, pair_P, largest: (key_P, pair_P))
    with jax.sharding.use_abstract_mesh(mesh), unsorted:
        lowered = both.lower(q, k, k, q, ids)
    return lowered.compile()


def _ptxas() -> str | None:
    package = importlib.util.find_spec("nvidia")
    for root in package.submodule_search_locations if package else ():
        for path in pathlib.Path(root).glob("*/bin/ptxas"):
            return str(path)
    return shutil.which("ptxas")


def kernel_resources(dump: pathlib.Path) -> dict[str, dict[str, int]]:
    """Registers and spilled bytes of each MoBA kernel whose PTX XLA wrote there."""
    kernels = {}
    ptxas = _ptxas()
    for path in dump.glob("*.ptx"):
        text = path.read_text()
        entry = re.search(r"\.entry (moba_\w+)", text)
        if entry is None or ptxas is None:
            continue
        target = re.search(r"\.target (\w+)", text)[1]
        command = [ptxas, "-v", "--gpu-name", target, "-o", os.devnull, str(path)]
        log = subprocess.run(command, capture_output=True, text=True, check=True).stderr
        kernels[entry[1]] = {
            "registers": int(re.search(r"Used (\d+) registers", log)[1]),
            "spilled": int(re.search(r"(\d+) bytes spill stores", log)[1]),
        }
    return kernels


def measure(gpu: str, case: str, dump: pathlib.Path) -> dict:
    """One row of the report."""
    for path in dump.iterdir():
        path.unlink()
    row = {"gpu": gpu, "case": case}
    start = time.perf_counter()
    try:
        memory = compile_case(gpu, *CASES[case]).memory_analysis()
    except Exception as error:  # Whatever the compiler raises is the row's result.
        return row | {"error": str(error).strip().splitlines()[0][:300]}
    return row | {
        "seconds": time.perf_counter() - start,
        "temporary_bytes": memory.temp_size_in_bytes,
        "io_bytes": memory.argument_size_in_bytes + memory.output_size_in_bytes,
        "kernels": kernel_resources(dump),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="append", choices=GPUS, help="default: all")
    parser.add_argument("--case", action="append", choices=CASES, help="default: all")
    parser.add_argument("--json", type=pathlib.Path)
    options = parser.parse_args()
    if importlib.util.find_spec("jax_cuda13_plugin") is None:
        print('benchmarks.gpu_compile needs pip install "jax[cuda13]"', file=sys.stderr)
        return 1
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["JAX_PLATFORMS"] = "cpu"
        os.environ["JAX_SKIP_CUDA_CONSTRAINTS_CHECK"] = "1"
        os.environ["XLA_FLAGS"] = (
            f"{os.environ.get('XLA_FLAGS', '')} --xla_dump_to={folder} "
            "--xla_gpu_dump_llvmir=true --xla_dump_emitter_re=ptx"
        )
        print(
            f"{'GPU':<9}{'case':<31}{'temp MiB':>9}{'io MiB':>8}{'seconds':>8}"
            f"{'registers':>10}{'spilled':>8}"
        )
        for gpu in options.gpu or GPUS:
            for case in options.case or CASES:
                rows.append(row := measure(gpu, case, pathlib.Path(folder)))
                if "error" in row:
                    print(f"{gpu:<9}{case:<31} {row['error']}", flush=True)
                    continue
                most = [
                    max((kernel.get(name, 0) for kernel in row["kernels"].values()), default=0)
                    for name in ("registers", "spilled")
                ]
                print(
                    f"{gpu:<9}{case:<31}{row['temporary_bytes'] / 2**20:>9.0f}"
                    f"{row['io_bytes'] / 2**20:>8.0f}{row['seconds']:>8.1f}"
                    f"{most[0]:>10}{most[1]:>8}",
                    flush=True,
                )
    if options.json is not None:
        options.json.write_text(json.dumps({"rows": rows}, indent=2) + "\n")
    failed = sum("error" in row for row in rows)
    print(f"{len(rows) - failed} of {len(rows)} compile")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
