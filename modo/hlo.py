"""What a compiled program does, read from its HLO text.

XLA's own cost analysis counts the body of a loop once and names no collective's bytes, so both are
counted here: every instruction as often as the loops around it run.
"""

import dataclasses
import math
import re
from collections.abc import Iterator

COLLECTIVES = (
    "all-gather",
    "reduce-scatter",
    "all-reduce",
    "all-to-all",
    "collective-permute",
)
# Instructions that move nothing: they name, or wait for, what others have made.
_FREE = {
    "parameter", "constant", "tuple", "get-tuple-element", "bitcast", "while", "conditional",
    "call", "async-start", "async-update", "async-done", "after-all", "partition-id",
    "replica-id", "opt-barrier", "optimization-barrier", "iota", "domain",
}  # fmt: skip
_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16, "f16": 16, "c64": 64, "c128": 128}


@dataclasses.dataclass(frozen=True)
class Instruction:
    """One line of HLO text.

    Attributes:
      shape: as printed, layouts included; a tuple in parentheses.
      operands: names.
      attributes: all that follows the operands.
    """

    name: str
    shape: str
    opcode: str
    operands: tuple[str, ...]
    attributes: str
    literal: str

    def called(self, attribute: str) -> list[str]:
        """Names of the computations that an attribute gives: one, or several in braces."""
        found = re.search(rf"\b{attribute}=(\{{[^}}]*\}}|%?[\w.\-]+)", self.attributes)
        return re.findall(r"[\w.\-]+", found[1]) if found else []


@dataclasses.dataclass(frozen=True)
class Computation:
    """Instructions by name, and the one whose value it returns."""

    name: str
    instructions: dict[str, Instruction]
    root: Instruction


@dataclasses.dataclass(frozen=True)
class Module:
    """Computations by name, callees before callers, and the name of the one that is run."""

    computations: dict[str, Computation]
    entry: str


def _close(text: str, start: int) -> int:
    """The position after the bracket that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += (text[position] in "({[") - (text[position] in ")}]")
        if depth == 0:
            return position + 1
    raise ValueError(f"unbalanced HLO text: {text[:80]}")


def _instruction(line: str) -> tuple[Instruction, bool] | None:
    """(an instruction, whether it is the root), or None for any other line."""
    head = re.match(r"\s+(ROOT )?%?([\w.\-]+) = ", line)
    if head is None:
        return None
    at = head.end()
    end = _close(line, at) if line[at] == "(" else line.index(" ", at)
    opcode = re.compile(r"\s*([\w\-]+)\(").match(line, end)
    close = _close(line, opcode.end() - 1)
    inside = line[opcode.end() : close - 1]
    instruction = Instruction(
        name=head[2],
        shape=line[at:end],
        opcode=opcode[1],
        operands=tuple(re.findall(r"%([\w.\-]+)", inside)),
        attributes=line[close:],
        literal=inside if opcode[1] in ("constant", "parameter") else "",
    )
    return instruction, head[1] is not None


def parse(text: str) -> Module:
    """Reads what `compiled.as_text()` gives."""
    computations, entry, name = {}, "", None
    for line in text.splitlines():
        head = re.match(r"(ENTRY )?%?([\w.\-]+) \(.*\{$", line)
        if head is not None:
            name, instructions, root = head[2], {}, None
            entry = name if head[1] else entry
        elif line == "}" and name is not None:
            computations[name] = Computation(name, instructions, root)
            name = None
        elif name is not None and (found := _instruction(line)) is not None:
            instructions[found[0].name] = found[0]
            root = found[0] if found[1] or root is None else root
    return Module(computations, entry)


def array_bytes(shape: str, *, hbm_only: bool = False) -> int:
    """Bytes of a shape as printed, of all its parts where it is a tuple.

    Args:
      shape: such as "(bf16[8,128]{1,0:T(8,128)(2,1)}, u32[]{:S(2)})".
      hbm_only: leaves out what a TPU keeps in other memory, as S(n) in the layout says.
    """
    total = 0
    for dtype, sizes, layout in re.findall(r"\b([a-z]\w*)\[([\d,]*)\](\{[^}]*\})?", shape):
        if hbm_only and re.search(r"S\([1-9]", layout):
            continue
        bits = _BITS.get(dtype) or int((re.search(r"\d+", dtype) or ["0"])[0])
        total += math.prod(int(n) for n in sizes.split(",") if n) * bits
    return total // 8


def trip_count(module: Module, loop: Instruction) -> int | None:
    """How often a while loop runs; None: it depends on values.

    Read from XLA's known_trip_count, or else from a condition that compares a counter with a
    constant, and from what the body adds to it: 1 in the loops that JAX makes of a scan, 2 in those
    where XLA sends the next piece of an operand while it multiplies this one.
    """
    known = re.search(r'known_trip_count"?:\s*\{\s*"?n"?:\s*"?(\d+)', loop.attributes)
    if known:
        return int(known[1])
    [condition] = loop.called("condition")
    computation = module.computations[condition]
    compare, inner = computation.root, computation.instructions
    limits = compare.operands
    if compare.opcode == "fusion":
        compare = module.computations[compare.called("calls")[0]].root
    if compare.opcode != "compare" or "direction=LT" not in compare.attributes:
        return None
    ends = [inner[name] for name in limits if inner[name].opcode == "constant"]
    counters = [inner[name] for name in limits if inner[name].opcode == "get-tuple-element"]
    if len(ends) != 1 or len(counters) != 1:
        return None
    step = _added(module, loop, int(re.search(r"index=(\d+)", counters[0].attributes)[1]))
    return -(-int(ends[0].literal) // step) if step else None


def _added(module: Module, loop: Instruction, index: int) -> int | None:
    """The constant that a loop's body adds to one of the loop's values; None: something else."""
    [name] = loop.called("body")
    body = module.computations[name].instructions
    add = body[module.computations[name].root.operands[index]]
    operands = [body[operand] for operand in add.operands]
    if add.opcode == "fusion":
        inner = module.computations[add.called("calls")[0]]
        # Its parameters are the fusion's operands; constants may be on either side.
        outer = {
            i.name: operands[int(i.literal)]
            for i in inner.instructions.values()
            if i.opcode == "parameter"
        }
        add = inner.root
        operands = [outer.get(name, inner.instructions[name]) for name in add.operands]
    constants = [int(i.literal) for i in operands if i.opcode == "constant"]
    return constants[0] if add.opcode == "add" and len(constants) == 1 else None


@dataclasses.dataclass(frozen=True)
class Executions:
    """How often each computation runs in one call of the program.

    Attributes:
      times: by name of computation; those inside fusions are not here.
      unknown_loops: loops whose number of iterations depends on values: counted as one.
    """

    times: dict[str, int]
    unknown_loops: int


def executions(module: Module) -> Executions:
    """Follows calls, loops and branches from the entry; every branch counts as taken."""
    times, unknown = {module.entry: 1}, 0
    for name in reversed(module.computations):  # callers before callees
        if name not in times:
            continue
        for instruction in module.computations[name].instructions.values():
            number = 1
            if instruction.opcode == "while":
                number = trip_count(module, instruction)
                unknown += number is None
                number = 1 if number is None else number
                callees = instruction.called("body")
            elif instruction.opcode == "conditional":
                callees = instruction.called("branch_computations")
                callees += instruction.called("true_computation")
                callees += instruction.called("false_computation")
            elif instruction.opcode in ("call", "async-start"):
                callees = instruction.called("to_apply") or instruction.called("calls")
            else:
                continue
            for callee in callees:
                times[callee] = times.get(callee, 0) + number * times[name]
    return Executions(times, unknown)


def group_size(attributes: str) -> int | None:
    """Devices that take part in a collective together; None: all of them.

    Raises:
      ValueError: groups are written in a way that is not known here.
    """
    if listed := re.search(r"replica_groups=\{\{([\d,]*)\}", attributes):
        return len(listed[1].split(","))
    if tiled := re.search(r"replica_groups=\[(\d+),(\d+)\]<=", attributes):
        return int(tiled[2])
    if named := re.search(r"replica_groups=mesh\[([^\]]*)\][^{]*\{([^}]*)\}", attributes):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        axes = re.findall(r"'(\w+)'(?::\(\d+\)(\d+))?", named[2])
        return math.prod(int(part) if part else sizes[name] for name, part in axes)
    unread = re.search(r"replica_groups=(?!\{\}).{0,80}", attributes)
    if unread:
        raise ValueError(f"cannot read {unread[0]}")
    return None


@dataclasses.dataclass(frozen=True)
class Collective:
    """One collective of a program.

    Attributes:
      kind: of COLLECTIVES.
      sent_bytes: that a device sends (and receives) each time it runs.
      times: how often it runs.
      group: devices that take part together.
      shapes: of what it is given.
      op_name: where in the program it comes from.
    """

    kind: str
    sent_bytes: float
    times: int
    group: int
    shapes: tuple[str, ...]
    op_name: str


def _sent(kind: str, size: int, group: int) -> float:
    """Bytes that a device sends, with what it is given in `size` bytes, the rings' way."""
    if kind == "collective-permute":
        return size
    share = (group - 1) / group
    return {"all-gather": group * share, "all-reduce": 2 * share}.get(kind, share) * size


def _is_scattered(computation: Computation, all_reduce: Instruction) -> bool:
    """Whether a device keeps only its part of a sum: how a TPU writes a reduce-scatter."""
    users = [i for i in computation.instructions.values() if all_reduce.name in i.operands]
    return bool(users) and all(i.opcode == "dynamic-slice" for i in users)


def _counts(computation: Computation, instruction: Instruction) -> bool:
    """False for all but the first of the fusions that a TPU cuts an asynchronous one into."""
    if "async_collective_fusion_config" not in instruction.attributes:
        return True
    users = [i for i in computation.instructions.values() if instruction.name in i.operands]
    return any("AsyncCollectiveStart" in i.attributes for i in users)


def _with_fusions(module: Module, computation: Computation) -> Iterator[tuple]:
    """(computation, instruction, whether in a fusion) of all, those in fusions included."""
    for instruction in computation.instructions.values():
        yield computation, instruction, False
        if instruction.opcode == "fusion":
            for callee in instruction.called("calls"):
                for where, inner, _ in _with_fusions(module, module.computations[callee]):
                    yield where, inner, True


def collectives(module: Module, num_devices: int) -> list[Collective]:
    """All collectives that the program runs, an asynchronous one once."""
    found = []
    for name, times in executions(module).times.items():
        for where, instruction, fused in _with_fusions(module, module.computations[name]):
            kind = instruction.opcode.removesuffix("-start")
            kind = "all-to-all" if kind == "ragged-all-to-all" else kind
            if kind not in COLLECTIVES or (fused and not _counts(where, instruction)):
                continue
            if kind == "all-reduce" and fused and _is_scattered(where, instruction):
                kind = "reduce-scatter"
            shapes = tuple(where.instructions[operand].shape for operand in instruction.operands)
            group = group_size(instruction.attributes) or num_devices
            op_name = re.search(r'op_name="([^"]*)"', instruction.attributes)
            found.append(
                Collective(
                    kind=kind,
                    sent_bytes=_sent(kind, sum(map(array_bytes, shapes)), group),
                    times=times,
                    group=group,
                    shapes=tuple(re.sub(r"\{.*", "", shape) for shape in shapes),
                    op_name=op_name[1] if op_name else "",
                )
            )
    return found


def _read_by_fusion(computation: Computation, index: int, shape: str) -> int:
    """Bytes that a fusion reads of an operand: of one that it only cuts slices from, those."""
    [parameter] = [
        i
        for i in computation.instructions.values()
        if i.opcode == "parameter" and i.literal == str(index)
    ]
    users = [i for i in computation.instructions.values() if parameter.name in i.operands]
    if users and all(i.opcode in ("dynamic-slice", "slice", "gather") for i in users):
        return sum(array_bytes(i.shape) for i in users)
    if users and all(
        i.opcode == "dynamic-update-slice" and i.operands[0] == parameter.name for i in users
    ):
        return 0  # written in place
    return array_bytes(shape)


def _written_by_fusion(computation: Computation, shape: str) -> int:
    """Bytes that a fusion writes: of an array that it changes in place, the change."""
    roots = [computation.root]
    if computation.root.opcode == "tuple":
        roots = [computation.instructions[name] for name in computation.root.operands]
    parts = re.findall(r"\b[a-z]\w*\[[\d,]*\](?:\{[^}]*\})?", shape)
    if len(parts) != len(roots):
        return array_bytes(shape, hbm_only=True)
    total = 0
    for root, part in zip(roots, parts, strict=True):
        if array_bytes(part, hbm_only=True):
            changed = root.opcode == "dynamic-update-slice"
            part = computation.instructions[root.operands[1]].shape if changed else part
            total += array_bytes(part)
    return total


def _moved(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes that an instruction reads from and writes to HBM."""
    opcode, shape = instruction.opcode, instruction.shape
    if opcode in _FREE or opcode.endswith("-done"):
        return 0
    if opcode.endswith("-start"):
        return array_bytes(shape, hbm_only=True)  # where from and where to
    operands = [computation.instructions[name].shape for name in instruction.operands]
    if opcode == "dynamic-update-slice":
        return 2 * array_bytes(operands[1], hbm_only=True)
    written = array_bytes(shape, hbm_only=True)
    if opcode in ("dynamic-slice", "slice", "gather"):
        return written + (array_bytes(shape) if array_bytes(operands[0], hbm_only=True) else 0)
    if opcode == "fusion":
        inner = module.computations[instruction.called("calls")[0]]
        read = sum(
            _read_by_fusion(inner, index, operand)
            for index, operand in enumerate(operands)
            if array_bytes(operand, hbm_only=True)
        )
        return read + _written_by_fusion(inner, shape)
    return written + sum(array_bytes(operand, hbm_only=True) for operand in operands)


def traffic(module: Module) -> int:
    """Bytes that the program reads from and writes to HBM.

    Each instruction reads its operands and writes its results once; a kernel that reads some of
    them more often does so unseen.
    """
    total = 0
    for name, times in executions(module).times.items():
        computation = module.computations[name]
        for instruction in computation.instructions.values():
            total += times * _moved(module, computation, instruction)
    return total


def square_arrays(text: str, length: int, parts: int = 1) -> list[str]:
    """Shapes in the text that have two axes of all tokens of a row: memory that grows as T x T.

    Args:
      text: of the compiled program.
      length: tokens a row.
      parts: devices that share a row; one of the axes may then be a device's part.
    """
    shapes = set(re.findall(r"\b[a-z]\w*\[[\d,]*\]", text))
    found = []
    for shape in sorted(shapes):
        sizes = [int(n) for n in re.findall(r"\d+", shape[shape.index("[") :])]
        whole = sizes.count(length)
        part = sizes.count(length // parts) if parts > 1 else 0
        if whole >= 2 or (whole and part):
            found.append(shape)
    return found
