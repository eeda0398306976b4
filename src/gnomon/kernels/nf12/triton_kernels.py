"""NF12 on a GPU: the decode of one group, the reader under the shared GEMV, and the bulk decode.

One group of eight weights is 12 bytes: the exponent word and eight sm bytes, read as two little-endian words.
Its decode makes four packed words of two BF16 each; `unpack` has it in two forms with equal results:

    PTX        16 instructions for any base. PRMT copies each sm byte into both bytes of a half, LOP3 + LEA move a
               pair of nibbles to the exponent fields and add the base at once (LEA.HI where the move is to the
               right), LOP3 merges.
    portable   plain Triton, for the interpreter and other makers' devices; more instructions, because the
               compiler doesn't find PRMT and LEA in shifts and masks.

Indices of exceptions are trusted: they are checked once, when a matrix is loaded.
Imported only when called: this module needs Triton.
Source: the NF12 card, "Why 16 instructions" (inferred from the abstract).
"""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.kernels.gemv.triton_kernels import four

FIELDS = tl.constexpr(-0x7F807F81)  # 0x807F807F: sign and mantissa of two packed BF16

# The first and second pair of sm bytes of a word, each byte twice.
SPREAD_LOW = tl.constexpr("prmt.b32 $0, $1, 0, 0x1100;")
SPREAD_HIGH = tl.constexpr("prmt.b32 $0, $1, 0, 0x3322;")
# A pair of nibbles in the exponent fields, plus the base. A right shift is the high half of a product.
EXPONENTS_0 = tl.constexpr("{ .reg .b32 t; and.b32 t, $1, 0x000F000F; mad.lo.u32 $0, t, 0x80, $2; }")
EXPONENTS_1 = tl.constexpr("{ .reg .b32 t; and.b32 t, $1, 0x00F000F0; mad.lo.u32 $0, t, 0x8, $2; }")
EXPONENTS_2 = tl.constexpr("{ .reg .b32 t; and.b32 t, $1, 0x0F000F00; mad.hi.u32 $0, t, 0x80000000, $2; }")
EXPONENTS_3 = tl.constexpr("{ .reg .b32 t; and.b32 t, $1, 0xF000F000; mad.hi.u32 $0, t, 0x08000000, $2; }")


@triton.jit
def _asm1(code: tl.constexpr, a):
    return tl.inline_asm_elementwise(code, "=r,r", [a], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _asm2(code: tl.constexpr, a, b):
    return tl.inline_asm_elementwise(code, "=r,r,r", [a, b], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def _spread(two):
    """The sm bytes at bits 0..7 and 8..15 as sign and mantissa of two packed BF16."""
    apart = (two & 0xFF) | ((two & 0xFF00) << 8)
    return ((apart & 0x00800080) << 8) | (apart & 0x007F007F)


@triton.jit
def unpack(ex, low, high, bases, PTX: tl.constexpr):
    """Four words of two BF16 each of a group that is no exception.

    Args:
        ex, low, high: int32; the exponent word, sm bytes 0..3 and sm bytes 4..7.
        bases: base * 0x00800080, the base in both exponent fields. Multiplied by the caller: a multiple of 128
            for every base, so that Triton, which specialises on divisibility, compiles once.
    """
    if PTX:
        w0 = (_asm1(SPREAD_LOW, low) & FIELDS) | _asm2(EXPONENTS_0, ex, bases)
        w1 = (_asm1(SPREAD_HIGH, low) & FIELDS) | _asm2(EXPONENTS_1, ex, bases)
        w2 = (_asm1(SPREAD_LOW, high) & FIELDS) | _asm2(EXPONENTS_2, ex, bases)
        w3 = (_asm1(SPREAD_HIGH, high) & FIELDS) | _asm2(EXPONENTS_3, ex, bases)
    else:  # shifts keep the sign, so every mask comes after its shift
        w0 = _spread(low) | (((ex << 7) & 0x07800780) + bases)
        w1 = _spread(low >> 16) | (((ex << 3) & 0x07800780) + bases)
        w2 = _spread(high) | (((ex >> 1) & 0x07800780) + bases)
        w3 = _spread(high >> 16) | (((ex >> 5) & 0x07800780) + bases)
    return w0, w1, w2, w3


@triton.jit
def read_group(sm, ex, esc, bases, place, inside, LANES: tl.constexpr, PTX: tl.constexpr):
    """The (LANES, 4) words of the groups at these places, exceptions among them: no traffic where there is none."""
    word = tl.load(ex + place, mask=inside, other=1)  # not 0: nothing lies outside, so no exception either
    slot = tl.load(sm + place, mask=inside, other=0)
    low, high = slot.to(tl.int32), (slot >> 32).to(tl.int32)
    w0, w1, w2, w3 = unpack(word, low, high, bases, PTX)
    words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [LANES, 4])
    index = low.to(tl.uint32, bitcast=True).to(tl.int64)
    verbatim = esc + index[:, None] * 4 + tl.arange(0, 4)[None, :]
    return tl.load(verbatim, mask=(word == 0)[:, None], other=words)


@triton.jit
def _read(weight, row, group, inside, groups, PTX: tl.constexpr):
    sm, ex, esc, bases = weight
    return four(read_group(sm, ex, esc, bases, row * groups + group, inside, 32, PTX))


@triton.jit
def read_portable(weight, row, group, inside, groups):
    """Reader for `gemv.triton`; weight = (sm as int64, ex, esc as int32 words, bases)."""
    return _read(weight, row, group, inside, groups, False)


@triton.jit
def read_ptx(weight, row, group, inside, groups):
    """`read_portable` for NVIDIA devices."""
    return _read(weight, row, group, inside, groups, True)


@triton.jit
def decode(
    sm,
    ex,
    esc,
    bases,
    out,
    count,
    groups,
    columns,
    ALIGNED: tl.constexpr,
    PTX: tl.constexpr,
    UNROLL: tl.constexpr,
):
    """Groups 0..count - 1 to BF16, one group per thread and UNROLL of them in turn, 128 threads.

    Args:
        sm: int64, one word per group.
        out: int32 words of a flat matrix if ALIGNED (columns a multiple of 8), else int16.
        groups, columns: per row of the matrix.
    """
    for turn in tl.static_range(UNROLL):
        group = (tl.program_id(0).to(tl.int64) * UNROLL + turn) * 128 + tl.arange(0, 128)
        inside = group < count
        words = read_group(sm, ex, esc, bases, group, inside, 128, PTX)
        if ALIGNED:
            tl.store(out + group[:, None] * 4 + tl.arange(0, 4)[None, :], words, mask=inside[:, None])
        else:
            halves = tl.reshape(tl.join(words.to(tl.int16), (words >> 16).to(tl.int16)), [128, 8])
            column = (group % groups)[:, None] * 8 + tl.arange(0, 8)[None, :]
            place = (group // groups)[:, None] * columns + column
            tl.store(out + place, halves, mask=inside[:, None] & (column < columns))


@triton.jit
def one_group(sm, ex, esc, bases, out, STAGE: tl.constexpr, PTX: tl.constexpr):
    """One group per lane of one warp, for counting instructions: loads and stores, with the decode, or all of it."""
    place = tl.program_id(0) * 32 + tl.arange(0, 32)
    inside = place >= 0  # a mask that the compiler can't see through, as in the other kernels
    if STAGE == "exceptions":
        words = read_group(sm, ex, esc, bases, place, inside, 32, PTX)
    else:
        word = tl.load(ex + place, mask=inside, other=1)
        slot = tl.load(sm + place, mask=inside, other=0)
        low, high = slot.to(tl.int32), (slot >> 32).to(tl.int32)
        w0, w1, w2, w3 = word, low, high, word
        if STAGE == "decode":
            w0, w1, w2, w3 = unpack(word, low, high, bases, PTX)
        words = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), [32, 4])
    tl.store(out + place[:, None] * 4 + tl.arange(0, 4)[None, :], words)
