"""Counting instructions: parsers on listings written by hand, a compiled C function, and the card's 16."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from gnomon.core.errors import GnomonError, UsageError
from gnomon.kernels.nf12 import instructions
from gnomon.kernels.nf12.instructions import (
    Instruction,
    cpu_loop,
    innermost_loops,
    ptx_work,
    sass_work,
    vector_work,
)

needs_triton = pytest.mark.skipif(
    importlib.util.find_spec("triton") is None, reason="Triton is not installed"
)

COUNT = """
import json
from gnomon.kernels.nf12.instructions import gpu_decode
for ptx_form in (True, False):
    print(json.dumps({stage: [cost.sass, cost.ptx] for stage, cost in gpu_decode(CAP, ptx_form=ptx_form).items()}))
"""


@needs_triton
@pytest.mark.parametrize("capability", [pytest.param(80, marks=pytest.mark.slow), 90])
def test_the_decode_is_sixteen_instructions(capability: int) -> None:
    """The card: per pair of weights PRMT, LOP3, LOP3 and one shift; here the shift is LEA, which adds any base.

    In a process of its own: the run-time checker of this one would wrap the kernels.
    """
    env = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    command = [sys.executable, "-c", COUNT.replace("CAP", str(capability))]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    fast, portable = map(json.loads, done.stdout.splitlines())
    sass, ptx = fast["decode"]
    assert sass == {"PRMT": 4, "LOP3": 8, "LEA": 4}
    assert ptx == {"prmt": 4, "and": 8, "mad.lo": 2, "mad.hi": 2, "or": 4}
    sass, _ = fast["exceptions"]
    assert sass["ISETP"] == 1
    assert sum(sass.values()) <= 8
    assert sum(portable["decode"][0].values()) > 16  # why there is an inline form at all


def test_ptx_work() -> None:
    ptx = """
.visible .entry k(.param .b32 p) {
	.reg .b32 %r<9>;
	ld.param.b32 %r1, [p];
	@%p1 add.s32 %r2, %r1, 1; // add.s32 in a comment
	// begin inline asm
	{ .reg .b32 t; and.b32 t, %r1, 15; mad.hi.u32 %r3, t, 2, %r2; }
$L1: shl.b32 %r4, %r3, 2;
	mov.b32 %r5, %r4;
	bra $L1;
}"""
    assert ptx_work(ptx) == {"add": 1, "and": 1, "mad.hi": 1, "shl": 1}


def test_sass_work() -> None:
    sass = """
        /*0000*/                   LDC R1, c[0x0][0x28] ;
        /*0010*/              @!P0 LDG.E R4, desc[UR4][R2.64] ;
        /*0020*/                   UIMAD UR4, UR4, 0x800080, URZ ;
        /*0030*/                   IMAD.MOV.U32 R11, RZ, RZ, R8 ;
        /*0040*/               @P1 IMAD.SHL.U32 R6, R7.reuse, 0x80, RZ ;
        /*0050*/                   LOP3.LUT R0, R0, 0x1f, RZ, 0xc0, !PT ;
        /*0060*/                   PRMT R0, R2.reuse, 0x1100, RZ ;
        /*0070*/                   STG.E.128 desc[UR6][R6.64], R8 ;
        /*0080*/                   EXIT ;
"""
    assert sass_work(sass) == {"IMAD": 1, "LOP3": 1, "PRMT": 1}


def test_innermost_loops() -> None:
    """An outer loop 1..6 around 2..3 and 4..5, a jump to elsewhere, and a loop with a detour past the return."""
    listing = [
        *[("mov", "%rax,%rbx"), ("je", "7 <f+0x7>"), ("vaddps", "%ymm0,%ymm1,%ymm1"), ("jne", "2 <f+0x2>")],
        *[("add", "$1,%rax"), ("jb", "4 <f+0x4>"), ("jmp", "1 <f+0x1>"), ("je", "ff <g>")],
        *[("dec", "%rax"), ("je", "c <f+0xc>"), ("jne", "8 <f+0x8>"), ("ret", "")],
        *[("inc", "%rax"), ("jmp", "a <f+0xa>")],
    ]
    code = [Instruction(i, *line) for i, line in enumerate(listing)]
    assert innermost_loops(code) == [code[2:4], code[4:6], [code[8], code[9], code[10]]]
    assert innermost_loops(code[11:12]) == []


def test_vector_work_leaves_out_moves() -> None:
    loop = [
        Instruction(0, "vmovdqu", "(%rax),%ymm0"),
        Instruction(1, "vpmovzxbw", "(%rax),%ymm1"),
        Instruction(2, "vptestnmd", "%zmm0,%zmm0,%k1"),
        Instruction(3, "kmovw", "%k1,%eax"),
        Instruction(4, "vpaddw", "(%rbx),%zmm1,%zmm1"),
        Instruction(5, "add", "$64,%rax"),
        Instruction(6, "jne", "0 <f>"),
    ]
    assert vector_work(loop) == {"vpmovzxbw": 1, "vptestnmd": 1, "vpaddw": 1}


@pytest.fixture
def library(tmp_path: Path) -> Path:
    compiler = shutil.which("cc")
    if compiler is None or shutil.which("objdump") is None:
        pytest.skip("there is no C compiler or no objdump")
    (tmp_path / "f.c").write_text(
        "int ends(int x) { return 3 * x; }\n"
        "int sums(const int* a, int n) {\n"
        "  int s = 0;\n"
        '  for (int i = 0; i < n; ++i) { s ^= a[i]; __asm__ volatile("paddd %%xmm1, %%xmm0" ::: "xmm0"); }\n'
        "  return s;\n"
        "}\n"
    )
    built = subprocess.run(
        [compiler, "-O1", "-shared", "-fPIC", "f.c", "-o", "f.so"], cwd=tmp_path, check=False
    )
    if built.returncode:
        pytest.skip("the C compiler makes no x86-64 code")
    return tmp_path / "f.so"


def test_cpu_loop(library: Path) -> None:
    loop = cpu_loop(library, "sums")
    assert [i.mnemonic for i in loop].count("xor") == 1
    assert loop[-1].mnemonic.startswith("j")
    assert len(loop) <= 6
    assert vector_work(loop) == {"paddd": 1}


def test_cpu_loop_says_what_is_missing(library: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(GnomonError, match="ends has no loop"):
        cpu_loop(library, "ends")
    with pytest.raises(UsageError, match=r"f.so has no function 'sum'. Did you mean 'sums'"):
        cpu_loop(library, "sum")
    with pytest.raises(GnomonError, match="objdump failed"):
        cpu_loop(library.with_name("none.so"), "sums")
    monkeypatch.setattr(instructions.shutil, "which", lambda name: None)
    with pytest.raises(GnomonError, match="there is no objdump"):
        cpu_loop(library, "sums")
