"""Compiles a training step, or a step of generation, for accelerators that are not here.

python -m modo.aot --config tiny --topology v5e:2x2 [--decode] [--json FILE] [--mesh.fsdp 4 ...]

It says whether the program fits the memory, what it computes and sends, and how long a step would
take at the least. Needs libtpu (`pip install "jax[tpu]"`), but no TPU: nothing is allocated or run,
and no data is opened. Ends with status 0 where the program fits, 1 where it does not.
"""

import dataclasses
import functools
import json
import math
import pathlib
import re
import sys
import time
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import Mesh, NamedSharding

from kernels_pallas import tpu_topology
from modo import decode, flops, hlo
from modo.config import Config
from modo.errors import UserError
from modo.hardware import GIB, Hardware, of_device
from modo.nn.decoder import Decoder, layer_kinds
from modo.nn.partition import partition_spec
from modo.ops.routing import capacity_slots
from modo.train.cli import (
    LineParser,
    check_writable,
    config_names,
    load_config,
    not_empty,
    one_line_errors,
    override,
)
from modo.train.mesh import batch_sharding, check_divides, make_mesh, state_shardings
from modo.train.step import make_state, make_train_step


@dataclasses.dataclass(frozen=True)
class Report:
    """What is known of a program before it runs. Bytes and FLOPs are those of one step.

    Attributes:
      config, topology, mode: what was asked for; mode is "train" or "decode".
      device, devices: their kind and number.
      mesh: sizes by axis.
      fits: whether a device's memory holds the program.
      hbm_bytes: that it needs of a device: arguments + outputs - aliased + temporaries + code.
      hbm_available: that a program can have.
      memory: the parts of hbm_bytes; empty where the compiler refused the program.
      flops: of matrix products, by `modo.flops`, on all devices, without what is computed again.
      flops_device: a device's share of all that it computes, what remat repeats included.
      collectives: kind to the bytes that a device sends, and receives, by the rings' algorithms.
      least_bytes: likewise, the least for this mesh (see `least_bytes`).
      hbm_traffic: bytes that a device reads from and writes to its memory.
      square_arrays: shapes in the program with two axes of a row's length; None: not looked for,
        for a width of the model is the same number.
      unknown_loops: loops that were counted as one iteration, for it depends on values.
      compute_seconds, hbm_seconds, link_seconds: each part at the peak of the hardware.
      step_seconds: the longest of the three, as if they overlapped in full.
      mfu: model FLOPs utilisation at step_seconds: at most that.
      compile_seconds: on this machine, without tracing and lowering.
    """

    config: str
    topology: str
    mode: str
    device: str
    devices: int
    mesh: dict[str, int]
    fits: bool
    hbm_bytes: int
    hbm_available: int
    memory: dict[str, int]
    flops: int
    flops_device: float
    collectives: dict[str, float]
    least_bytes: dict[str, float]
    hbm_traffic: int
    square_arrays: list[str] | None
    unknown_loops: int
    compute_seconds: float
    hbm_seconds: float
    link_seconds: float
    step_seconds: float
    mfu: float
    compile_seconds: float


def topology_devices(topology: str) -> list[jax.Device]:
    """The devices of a slice such as "v5p:8x8x8".

    Raises:
      UserError: there is no such slice, or libtpu is not installed.
    """
    try:
        return tpu_topology.devices(topology)
    except ValueError as error:
        raise UserError(f"--topology: {error}") from None
    except RuntimeError as error:
        raise UserError(
            f'--topology {topology} needs libtpu: pip install "jax[tpu]" ({error})'
        ) from None


def lower_train_step(config: Config, mesh: Mesh):
    """The jitted training step, lowered from shapes.

    Raises:
      UserError: the mesh cannot cut the model or the batch.
    """
    check_divides(config, mesh)
    graphdef, state = make_state(config, mesh)
    shape, sharding = (config.train.batch_size, config.train.length), batch_sharding(mesh)
    dtypes = {"tokens_BT": jnp.int32, "targets_BT": jnp.int32, "weights_BT": jnp.float32}
    if config.data.separates_documents:
        dtypes |= {"positions_BT": jnp.int32, "segment_ids_BT": jnp.int32}
    batch = {
        name: jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
        for name, dtype in dtypes.items()
    }
    return make_train_step(graphdef, config, mesh, state).lower(state, batch)


def lower_decode_step(config: Config, mesh: Mesh):
    """`modo.decode.step` for batch_size rows, into caches of length tokens, lowered from shapes."""
    # As generation takes it: a module a layer.
    model_config = dataclasses.replace(config.model, scan_layers=False)
    model = nnx.eval_shape(lambda: Decoder(model_config, rngs=nnx.Rngs(0)))
    graphdef, params = nnx.split(model)
    rows, length = config.train.batch_size, config.train.length
    cache = jax.eval_shape(lambda: decode.init_cache(model, rows, length))
    shardings = decode.cache_shardings(cache, mesh)
    rows_sharding = NamedSharding(mesh, partition_spec(mesh, (rows,), ("batch",)))

    def placed(tree, tree_shardings):
        return jax.tree.map(
            lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, tree_shardings
        )

    @functools.partial(jax.jit, donate_argnums=1, out_shardings=(None, shardings))
    def step(params, cache, tokens_B):
        return decode.step(nnx.merge(graphdef, params), cache, tokens_B)

    return step.lower(
        placed(params, state_shardings(params, mesh)),
        placed(cache, shardings),
        jax.ShapeDtypeStruct((rows,), jnp.int32, sharding=rows_sharding),
    )


def _size(text: str) -> int:
    """Bytes of what a compiler prints, such as "15.75G"."""
    number, unit = re.fullmatch(r"([\d.]+)([KMGT]?)i?B?", text).groups()
    return int(float(number) * 1024 ** " KMGT".index(unit or " "))


def refused_bytes(message: str) -> int | None:
    """The bytes that a program needs, from the compiler's refusal; None: it refused otherwise."""
    patterns = (
        r"Total hbm usage >= ([\d.]+[KMGT]?)",
        r"Used ([\d.]+[KMGT]?) of [\d.]+[KMGT]? hbm",
        r"total memory required for [\w ]+\(([\d.]+[KMGT]?)\) exceeds available HBM",
    )
    found = [match[1] for p in patterns if (match := re.search(p, message))]
    return _size(found[0]) if found else None


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]


def _memory(executable) -> dict[str, int]:
    memory = executable.memory_analysis()
    return {
        "arguments": memory.argument_size_in_bytes,
        "outputs": memory.output_size_in_bytes,
        "aliased": memory.alias_size_in_bytes,
        "temporaries": memory.temp_size_in_bytes,
        "code": memory.generated_code_size_in_bytes,
    }


def least_bytes(config: Config, mesh: Mesh, *, training: bool = True) -> dict[str, float]:
    """Kind of collective to the fewest bytes that a device sends in a step on this mesh.

    Parameters are gathered once for the forward pass and, those of blocks with remat, once more for
    the backward pass, in the compute dtype; their gradients are scattered once, likewise. Along the
    tensor axis activations are summed twice a block and pass. Along the context axis keys and
    values are gathered once a pass, and their gradients summed and scattered once, in float32. The
    optimizer, routers, norms and losses are left out; so is what Muon needs of whole matrices.
    """
    model = config.model
    width = jnp.dtype(model.compute_dtype).itemsize
    remat = model.remat != "none"
    least = dict.fromkeys(("all-gather", "reduce-scatter", "all-reduce"), 0.0)
    _, state = make_state(config, mesh)
    for path, leaf in jax.tree_util.tree_leaves_with_path(state.params):
        cut = {axis for part in leaf.sharding.spec if part for axis in _as_tuple(part)}
        parts = math.prod(mesh.shape[axis] for axis in cut - {"tensor"})
        others = math.prod(mesh.shape[axis] for axis in set(mesh.shape) - cut - {"tensor"})
        tensor = mesh.shape["tensor"] if "tensor" in cut else 1
        size = math.prod(leaf.shape) / tensor * width
        again = training and remat and "blocks" in jax.tree_util.keystr(path)
        passes = 2 if again else 1
        least["all-gather"] += passes * size * (parts - 1) / parts
        if training:
            least["reduce-scatter"] += size * (parts - 1) / parts
            least["all-reduce"] += 2 * size / parts * (others - 1) / others
    rows, length = config.train.batch_size, config.train.length if training else 1
    rows /= mesh.shape["data"] * mesh.shape["fsdp"]
    tensor, context = mesh.shape["tensor"], mesh.shape.get("context", 1)
    sums = (5 if remat else 4) if training else 2
    for kind in layer_kinds(model):
        tokens = length
        if kind.capacity is not None and training:
            tokens = capacity_slots(kind.capacity, length)
        one_sum = 2 * rows * tokens / context * model.d_model * width * (tensor - 1) / tensor
        least["all-reduce"] += sums * one_sum
        if training:
            keys = 2 * rows * tokens * model.kv_heads / tensor * model.head_width * width
            least["all-gather"] += (2 if remat else 1) * keys * (context - 1) / context
            least["reduce-scatter"] += keys / width * 4 * (context - 1) / context
    return {kind: size for kind, size in least.items() if size}


def _as_tuple(part) -> tuple[str, ...]:
    return part if isinstance(part, tuple) else (part,)


def _device_flops(config: Config, devices: int, training: bool) -> tuple[int, float]:
    """(FLOPs of the model's step, those that a device computes)."""
    rows, length = config.train.batch_size, config.train.length
    if not training:
        total = flops.decode_step(config.model, rows, length)
        return total, total / devices
    segments = config.data.separates_documents
    total = flops.train_step(config.model, rows, length, segments=segments)
    again = 0
    if config.model.remat == "block":
        again = flops.forward(config.model, length, batch=rows, segments=segments)
    return total, (total + again) / devices


def _square_arrays(text: str, config: Config, mesh: Mesh) -> list[str] | None:
    model, length = config.model, config.train.length
    widths = {model.d_model, model.ff_width, model.vocab_size, model.num_heads * model.head_width}
    if length in widths:
        return None
    return hlo.square_arrays(text, length, mesh.shape.get("context", 1))


def estimate(name: str, config: Config, topology: str, *, training: bool = True) -> Report:
    """Compiles the step of a config for a topology and reads the program.

    Args:
      name: of the config, for the report.
      config: the experiment; its mesh must have as many devices as the topology.
      topology: as for `topology_devices`.
      training: the training step, or one of generation.

    Raises:
      UserError: config, mesh and topology do not fit together, or the compiler refuses the program
        for another reason than its size.
    """
    devices = topology_devices(topology)
    hardware = of_device(devices[0].device_kind)
    mesh = make_mesh(config.mesh, devices)
    lowered = (lower_train_step if training else lower_decode_step)(config, mesh)
    start = time.perf_counter()
    text, memory = "", {}
    try:
        executable = lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        needed = refused_bytes(str(error))
        if needed is None:
            raise UserError(f"{name} on {topology}: {_first_line(error)}") from None
    else:
        text, memory = executable.as_text(), _memory(executable)
        needed = sum(memory.values()) - 2 * memory["aliased"]
    seconds = time.perf_counter() - start
    program = _read_program(text, len(devices))
    model_flops, device_flops = _device_flops(config, len(devices), training)
    times = _times(hardware, device_flops, program)
    step_seconds = max(times.values())
    return Report(
        config=name,
        topology=topology,
        mode="train" if training else "decode",
        device=devices[0].device_kind,
        devices=len(devices),
        mesh=dict(mesh.shape),
        fits=bool(memory) and needed <= hardware.memory,
        hbm_bytes=needed,
        hbm_available=hardware.memory,
        memory=memory,
        flops=model_flops,
        flops_device=device_flops,
        least_bytes=least_bytes(config, mesh, training=training),
        square_arrays=_square_arrays(text, config, mesh),
        **program,
        **times,
        step_seconds=step_seconds,
        mfu=model_flops / len(devices) / hardware.flops / step_seconds,
        compile_seconds=seconds,
    )


def _read_program(text: str, devices: int) -> dict:
    """The report's fields that come from the program's text; of a refused program, zeros."""
    if not text:
        return {"collectives": {}, "hbm_traffic": 0, "unknown_loops": 0}
    module, sent = hlo.parse(text), {}
    for collective in hlo.collectives(module, devices):
        size = collective.times * collective.sent_bytes
        sent[collective.kind] = sent.get(collective.kind, 0) + size
    return {
        "collectives": sent,
        "hbm_traffic": hlo.traffic(module),
        "unknown_loops": hlo.executions(module).unknown_loops,
    }


def _times(hardware: Hardware, device_flops: float, program: dict) -> dict[str, float]:
    return {
        "compute_seconds": device_flops / hardware.flops,
        "hbm_seconds": program["hbm_traffic"] / hardware.memory_bandwidth,
        "link_seconds": sum(program["collectives"].values()) / hardware.link_bandwidth,
    }


def describe(report: Report) -> str:
    """The report as a table."""
    mesh = " x ".join(f"{axis} {size}" for axis, size in report.mesh.items())
    parts = ", ".join(f"{name} {size / GIB:.2f}" for name, size in report.memory.items())
    step = "a step of training" if report.mode == "train" else "a step of generation"
    fits = "fits" if report.fits else "does not fit"
    lines = [
        f"{report.config}, {step}, on {report.topology}: {report.devices} x {report.device}, mesh "
        f"{mesh}",
        f"  memory a device   {report.hbm_bytes / GIB:.2f} of {report.hbm_available / GIB:.2f} "
        f"GiB: {fits}" + (f" ({parts})" if parts else ""),
        f"  FLOPs             {report.flops:.4g}; a device computes {report.flops_device:.4g}",
    ]
    if not report.memory:
        return "\n".join(lines)
    lines.append("  a device sends    MB a step     least   ratio")
    all_kinds = [(kind, report.collectives, report.least_bytes) for kind in hlo.COLLECTIVES]
    total = {"all": sum(report.collectives.values())}
    all_kinds.append(("all", total, {"all": sum(report.least_bytes.values())}))
    for kind, sent, least in all_kinds:
        sent, least = sent.get(kind, 0), least.get(kind, 0)
        if sent or least:
            ratio = f"{sent / least:8.2f}" if least else "       -"
            lines.append(f"    {kind:<20}{sent / 1e6:>9.1f}{least / 1e6:>10.1f}{ratio}")
    lines += [
        f"  HBM traffic       {report.hbm_traffic / 1e9:.2f} GB a device",
        f"  step, at least    {report.step_seconds:.4g} s, MFU at most {report.mfu:.1%} "
        f"(arithmetic {report.compute_seconds:.4g}, HBM {report.hbm_seconds:.4g}, links "
        f"{report.link_seconds:.4g} s, each at its peak, overlapping in full)",
        f"  compiled in       {report.compile_seconds:.1f} s",
    ]
    if report.square_arrays:
        lines.append(f"  arrays as T x T   {', '.join(report.square_arrays)}")
    if report.unknown_loops:
        lines.append(
            f"  loops counted once {report.unknown_loops}, for their length depends on values"
        )
    return "\n".join(lines)


def scaled(config: Config, chips: int) -> Config:
    """The same work a chip on another number of them.

    tensor, context and the number of microbatches stay, fsdp stays or shrinks, data takes the rest.

    Raises:
      UserError: the batch or the mesh does not scale to that.
    """
    sizes = dataclasses.asdict(config.mesh)
    if -1 in sizes.values():
        raise UserError("--chips needs a config whose mesh gives all sizes, none of them -1")
    before = math.prod(sizes.values())
    fixed = before // (sizes["data"] * sizes["fsdp"])
    rows = config.train.batch_size * chips
    if chips % fixed or rows % before:
        raise UserError(
            f"--chips {chips}: mesh axes beside data and fsdp take {fixed}, and "
            f"{config.train.batch_size} rows on {before} chips must come to a whole number"
        )
    fsdp = math.gcd(sizes["fsdp"], chips // fixed)
    mesh = dataclasses.replace(config.mesh, data=chips // fixed // fsdp, fsdp=fsdp)
    train = dataclasses.replace(config.train, batch_size=rows // before)
    return dataclasses.replace(config, mesh=mesh, train=train)


def slice_of(generation: str, chips: int) -> str:
    """The most cubic (v5p, tpu7x) or square (v5e, v6e) slice of so many chips, a power of two.

    Raises:
      UserError: not a power of two, or an unknown generation.
    """
    axes = {"v5e": 2, "v6e": 2, "v5p": 3, "tpu7x": 3}.get(generation)
    if axes is None:
        raise UserError(f"--chips needs --topology v5e, v5p, v6e or tpu7x, got {generation!r}")
    power = chips.bit_length() - 1
    if chips < 1 or chips != 1 << power:
        raise UserError(f"--chips must be powers of two, got {chips}")
    sizes = [1 << ((power + i) // axes) for i in range(axes)]
    return f"{generation}:{'x'.join(map(str, sizes))}"


def describe_growth(reports: Sequence[Report]) -> str:
    """How cost grows with chips, and what of it is lost to communication."""
    lines = [
        f"{'chips':>6}  {'mesh':<24}{'GiB':>7}{'arithmetic':>12}{'HBM':>9}{'links':>9}{'step':>9}"
        f"{'MFU':>7}{'lost':>7}{'at most':>9}{'compiled':>10}"
    ]
    for r in reports:
        mesh = " x ".join(map(str, r.mesh.values()))
        lost, most = lost_to_communication(r)
        lines.append(
            f"{r.devices:>6}  {mesh:<24}{r.hbm_bytes / GIB:>7.1f}{r.compute_seconds:>12.4f}"
            f"{r.hbm_seconds:>9.4f}{r.link_seconds:>9.4f}{r.step_seconds:>9.4f}{r.mfu:>7.1%}"
            f"{lost:>7.1%}{most:>9.1%}{r.compile_seconds:>9.0f}s"
        )
    lines.append(
        f"seconds a step; mesh {' x '.join(reports[0].mesh)}; lost to communication where it "
        "overlaps with all else, and at most, where none of it does"
    )
    return "\n".join(lines)


def lost_to_communication(report: Report) -> tuple[float, float]:
    """The share of a step that waits for links: where all overlaps, and where nothing does."""
    alone = max(report.compute_seconds, report.hbm_seconds)
    return 1 - alone / report.step_seconds, report.link_seconds / (alone + report.link_seconds)


def _write_json(path: str | None, value) -> None:
    if path is None:
        return
    try:
        pathlib.Path(path).write_text(json.dumps(value, indent=2) + "\n")
    except OSError as error:
        raise UserError(f"--json {path}: {error.strerror}") from None


def _chip_counts(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UserError(f"--chips takes numbers such as 8,64,256, got {text!r}") from None


def main(arguments: Sequence[str]) -> int:
    """Returns the exit status: 0 where all programs fit, else 1."""
    parser = LineParser(
        prog="python -m modo.aot",
        allow_abbrev=False,
        description=__doc__.splitlines()[0],
        epilog="Fields of the config are overridden as for train.py: --mesh.fsdp 8",
    )
    parser.add_argument("--config", help=f"one of {', '.join(config_names())}, or a .py file")
    parser.add_argument("--topology", help="a TPU slice: v5e:4x4, v5p:8x8x8, v6e:16x16, ...")
    parser.add_argument("--decode", action="store_true", help="a step of generation instead")
    parser.add_argument(
        "--chips",
        metavar="8,64,...",
        help="the same work a chip on other numbers of chips; --topology is then a generation",
    )
    parser.add_argument("--json", type=not_empty, help="also write the report here")
    options, overrides = parser.parse_known_args(arguments)
    for name in ("config", "topology"):
        if getattr(options, name) is None:
            raise UserError(f"--{name} is needed; see --help")
    if options.json is not None:
        check_writable(pathlib.Path(options.json))
    config = override(load_config(options.config), overrides, "python -m modo.aot")
    # A TPU or GPU that is here stays free for others.
    jax.config.update("jax_platforms", "cpu")
    training = not options.decode
    if options.chips is None:
        report = estimate(options.config, config, options.topology, training=training)
        print(describe(report))
        _write_json(options.json, dataclasses.asdict(report))
        reports = [report]
    else:
        reports = []
        counts = _chip_counts(options.chips)
        cases = [(slice_of(options.topology, chips), scaled(config, chips)) for chips in counts]
        for topology, case in cases:
            reports.append(estimate(options.config, case, topology, training=training))
            print(describe(reports[-1]), flush=True)
        print(describe_growth(reports))
        _write_json(options.json, {"reports": [dataclasses.asdict(r) for r in reports]})
    for report in reports:
        if not report.fits:
            print(
                f"error: {report.config} needs {report.hbm_bytes / GIB:.2f} GiB a device of "
                f"{report.topology}, and {report.hbm_available / GIB:.2f} GiB are there",
                file=sys.stderr,
            )
    return 0 if all(report.fits for report in reports) else 1


if __name__ == "__main__":
    with one_line_errors():
        status = main(sys.argv[1:])
    raise SystemExit(status)
