"""How many instructions a kernel spends on a group of eight weights, counted in what the compiler made of it.

On a GPU (no GPU is needed: Triton compiles for a named one) the count is a difference: a kernel of one group per
lane that only loads and stores, the same one with the decode, and the same one with exceptions too. Loads,
stores and addresses are equal in the first two, so they cancel; moves between registers, control and the uniform
data path (once per warp, not per group) aren't counted. SASS is what runs; PTX is what Triton asked for.

On a CPU the loop is found in the control flow of the disassembly, and in it the way without exceptions. It can
be counted whole, loads and stores and all, or only where it computes.

Here:  counting.      Not here: the kernels (`triton_kernels.py`, `nf12.cpp`) and the verdict (the study).
"""

from __future__ import annotations

import re
import shutil
import subprocess
import tempfile
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from gnomon.core.errors import GnomonError, MissingExtra, UsageError, nearest
from gnomon.kernels.launch import interpreted

_PTX_WORK = (
    "abs add and bfe bfi cnot dp4a fma lop3 mad max min mul neg not or popc prmt rem selp setp shf shl shr slct sub "
    "vote xor"
).split()
_SASS_NO_WORK = (
    "LD",
    "ST",
    "S2R",
    "CS2R",
    "MOV",
    "IMAD.MOV",
    "BRA",
    "EXIT",
    "NOP",
    "BSSY",
    "BSYNC",
    "WARPSYNC",
    "BAR",
)


@dataclass(frozen=True, kw_only=True)
class GroupCost:
    """Instructions per group by their opcodes, address arithmetic, loads, stores and moves left out."""

    ptx: Counter[str]
    sass: Counter[str]


def gpu_decode(capability: int = 90, *, ptx_form: bool = True) -> dict[str, GroupCost]:
    """What the Triton kernels spend on a group, for an NVIDIA GPU of this compute capability.

    Args:
        capability: ten times major plus minor, such as 80 or 90.
        ptx_form: count the form with inline PTX, which runs on NVIDIA devices, not the portable one.

    Returns:
        "decode": the decode alone; "exceptions": test of the exponent word and address of the verbatim weights,
        which come on top.

    Raises:
        MissingExtra, GnomonError: no Triton, its interpreter is on, or it came without a disassembler.
    """
    counts = {stage: _compiled(stage, capability, ptx_form) for stage in ("loads", "decode", "exceptions")}
    return {
        stage: GroupCost(
            ptx=_difference(counts[stage].ptx, counts[before].ptx),
            sass=_difference(counts[stage].sass, counts[before].sass),
        )
        for before, stage in (("loads", "decode"), ("decode", "exceptions"))
    }


def _difference(more: Counter[str], fewer: Counter[str]) -> Counter[str]:
    return Counter({op: more[op] - fewer[op] for op in more | fewer if more[op] != fewer[op]})


def _compiled(stage: str, capability: int, ptx_form: bool) -> GroupCost:
    if interpreted():
        raise GnomonError(
            "Instructions can't be counted under TRITON_INTERPRET=1: nothing is compiled. Unset it."
        )
    try:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource
    except ImportError as error:
        raise MissingExtra("Triton", "gpu", "counting GPU instructions") from error
    from gnomon.kernels.nf12.triton_kernels import one_group

    pointers = {"sm": "*i64", "ex": "*i32", "esc": "*i32", "bases": "i32", "out": "*i32"}
    source = ASTSource(
        one_group,
        signature=pointers | {"STAGE": "constexpr", "PTX": "constexpr"},
        constexprs={"STAGE": stage, "PTX": ptx_form},
        attrs={(i,): [["tt.divisibility", 16]] for i in range(len(pointers))},
    )
    options = {"num_warps": 1, "enable_fp_fusion": False}
    kernel = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    return GroupCost(ptx=ptx_work(kernel.asm["ptx"]), sass=sass_work(_sass(kernel.asm["cubin"])))


def ptx_work(ptx: str) -> Counter[str]:
    """Arithmetic instructions of a PTX kernel by opcode, those of inline assembly included."""
    body = re.sub(r"//.*", "", ptx.partition(".entry")[2])
    statements = (re.sub(r"^\s*(\$\w+:|[{}]|@!?%\w+|\s)*", "", s) for s in re.split(r"[;\n]", body))
    opcodes = (s.split()[0].split(".") for s in statements if s)
    return Counter(
        ".".join(op[:2]) if op[0] in ("mad", "mul") else op[0] for op in opcodes if op[0] in _PTX_WORK
    )


def sass_work(sass: str) -> Counter[str]:
    """Arithmetic instructions of a disassembled kernel by opcode, without the uniform data path."""
    opcodes = re.findall(
        r"^\s*/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P[T\d]+\s+)?([A-Z][A-Z0-9_.]*)", sass, re.MULTILINE
    )
    work = [op for op in opcodes if not op.startswith((*_SASS_NO_WORK, "U"))]
    return Counter(op.split(".")[0] for op in work)


def _sass(cubin: bytes) -> str:
    import triton

    disassembler = triton.knobs.nvidia.nvdisasm.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(cubin)
        return _output([disassembler, "-c", str(path)])


@dataclass(frozen=True)
class Instruction:
    """One line of a disassembly."""

    address: int
    mnemonic: str
    operands: str


def disassemble(library: Path | str, symbol: str) -> list[Instruction]:
    """The instructions of one function of a shared library or object file (x86-64).

    Raises:
        GnomonError: there is no objdump.
        UsageError: the file has no such function.
    """
    objdump = shutil.which("objdump")
    if objdump is None:
        raise GnomonError(
            "Instructions can't be counted: there is no objdump (Debian: apt install binutils)."
        )
    listing = _output([objdump, "-d", "-w", "--no-show-raw-insn", str(library)])
    found = re.search(
        rf"^[0-9a-f]+ <{re.escape(symbol)}>:\n(.*?)(?:\n\n|\Z)", listing, re.MULTILINE | re.DOTALL
    )
    if found is None:
        known = re.findall(r"^[0-9a-f]+ <([^>@]+)>:", listing, re.MULTILINE)
        raise UsageError(f"{Path(library).name} has no function {symbol!r}.{nearest(symbol, set(known))}")
    lines = re.findall(
        r"^\s*([0-9a-f]+):\t(?:(?:bnd|notrack|rep|repz|lock) )*(\S+) *(.*?)$", found[1], re.MULTILINE
    )
    return [Instruction(int(address, 16), mnemonic, operands) for address, mnemonic, operands in lines]


def innermost_loops(instructions: Sequence[Instruction]) -> list[list[Instruction]]:
    """The shortest way around each loop that holds no other loop, in the order of execution.

    A loop is a strongly connected part of the control flow; what remains connected without the instruction that
    it is entered by is a loop inside it. The shortest way leaves out what is done for exceptions only.
    """
    where = {instruction.address: i for i, instruction in enumerate(instructions)}
    edges = set()
    for i, instruction in enumerate(instructions):
        if instruction.mnemonic.startswith("j") and (
            target := re.match(r"([0-9a-f]+)\b", instruction.operands)
        ):
            edges.add((i, where.get(int(target[1], 16), -1)))
        if not re.match(r"jmp|ret|ud2|hlt", instruction.mnemonic):
            edges.add((i, i + 1))
    edges = {(a, b) for a, b in edges if 0 <= b < len(instructions)}  # a jump elsewhere is a call
    loops = _innermost(set(range(len(instructions))), edges)
    ways = sorted(min((_way_around(start, loop, edges) for start in sorted(loop)), key=len) for loop in loops)
    return [[instructions[i] for i in way] for way in ways]


def _way_around(start: int, loop: set[int], edges: set[tuple[int, int]]) -> list[int]:
    """The shortest way from an instruction of a loop back to itself."""
    after: dict[int, list[int]] = {}
    for a, b in sorted(edges):
        if a in loop and b in loop:
            after.setdefault(a, []).append(b)
    ways = deque([[start]])
    seen: set[int] = set()
    while True:
        way = ways.popleft()
        for step in after[way[-1]]:
            if step == start:
                return way
            if step not in seen:
                seen.add(step)
                ways.append([*way, step])


def _innermost(nodes: set[int], edges: set[tuple[int, int]]) -> list[set[int]]:
    inside = [(a, b) for a, b in edges if a in nodes and b in nodes]
    loops = []
    for cycle in _cycles(inside):
        entries = {b for a, b in edges if b in cycle and a not in cycle} or {min(cycle)}
        loops += _innermost(cycle - entries, edges) or [cycle]
    return loops


def _cycles(edges: list[tuple[int, int]]) -> list[set[int]]:
    """Strongly connected parts of a graph that have an edge."""
    import numpy as np
    from scipy.sparse import coo_array
    from scipy.sparse.csgraph import connected_components

    if not edges:
        return []
    heads, tails = np.array(edges).T
    size = max(heads.max(), tails.max()) + 1
    graph = coo_array((np.ones(len(heads)), (heads, tails)), shape=(size, size))
    _, part = connected_components(graph, connection="strong")
    cycles: dict[int, set[int]] = {}
    for head, tail in edges:
        if part[head] == part[tail]:
            cycles.setdefault(int(part[head]), set()).update((head, tail))
    return list(cycles.values())


def cpu_loop(library: Path | str, symbol: str) -> list[Instruction]:
    """The innermost loop of a compiled function; the longest, if it has several.

    Raises:
        GnomonError: there is no objdump, or the function has no loop.
        UsageError: the library has no such function.
    """
    loops = innermost_loops(disassemble(library, symbol))
    if not loops:
        raise GnomonError(f"{symbol} has no loop; was it inlined into its caller? Count that one.")
    return max(loops, key=len)


def vector_work(loop: Sequence[Instruction]) -> Counter[str]:
    """Instructions of a loop that compute with vector or mask registers, by mnemonic: no loads, stores, moves.

    An instruction that takes an operand from memory counts: it computes.
    """
    return Counter(
        i.mnemonic
        for i in loop
        if re.search(r"%([xyz]mm|k)\d", i.operands)
        and not re.match(r"v?(mov|lddqu)|kmov|prefetch", i.mnemonic)
    )


def _output(command: list[str]) -> str:
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        said = getattr(error, "stderr", "") or error
        raise GnomonError(
            f"Instructions can't be counted: {Path(command[0]).name} failed ({said})."
        ) from error
