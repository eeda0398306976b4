"""The encoder: the card's examples by hand, a slow encoder from its text, its laws, what is refused."""

from __future__ import annotations

import sys
from typing import Any

import nf12_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nf12_oracle import gaussian, same_bits, to_tensor
from torch import Tensor

from gnomon.core.errors import UsageError
from gnomon.methods.compress.nf12 import NF12Tensor, Plan, encode, plan
from gnomon.methods.compress.nf12.encode import exponent_counts

EXAMPLE_A = [0x3CA4, 0xBC76, 0x3F00, 0xBFE0, 0x38D2, 0x3D00, 0xBE80, 0x3A83]
EVERY_PATTERN = np.arange(1 << 16, dtype=np.uint16)


def row(*bits: int) -> Tensor:
    return to_tensor(np.array([bits], np.uint16))


def words(t: NF12Tensor) -> list[int]:
    return [word & 0xFFFFFFFF for word in t.ex.flatten().tolist()]


def planes(t: NF12Tensor) -> oracle.Planes:
    return t.sm.numpy(), t.ex.numpy().view(np.uint32), oracle.patterns(t.esc)


def assert_as_oracle(bits: np.ndarray, t: NF12Tensor) -> None:
    for mine, theirs in zip(planes(t), oracle.encode(bits, t.base), strict=True):
        np.testing.assert_array_equal(mine, theirs)


# ---- the card's worked examples


def test_example_a() -> None:
    w = torch.tensor([[0.02, -0.015, 0.5, -1.75, 0.0001, 0.03125, -0.25, 0.001]]).to(torch.bfloat16)
    assert oracle.patterns(w)[0].tolist() == EXAMPLE_A
    t = encode(w, base=112)
    assert t.sm.tolist() == [[0x24, 0xF6, 0x00, 0xE0, 0x52, 0x00, 0x80, 0x03]]
    assert (words(t), len(t.esc)) == ([0x5AF8D1E9], 0)
    assert encode(w, base=108).exceptions == 1  # exponents 125 to 127 lie above 108 + 15


def test_example_b() -> None:
    bits = [*EXAMPLE_A[:3], 0, *EXAMPLE_A[4:]]
    t = encode(to_tensor(np.array([bits, bits], np.uint16)), base=112)
    assert t.sm.tolist() == [[0] * 8, [1] + [0] * 7]
    assert words(t) == [0, 0]
    assert oracle.patterns(t.esc).tolist() == [bits, bits]


def test_example_c() -> None:
    w = row(*[0x3800] * 8)
    assert encode(w, base=112).exceptions == 1  # all nibbles 0: the collision
    t = encode(w)
    assert (t.base, words(t), t.exceptions) == (97, [0xFFFFFFFF], 0)


# ---- every pattern under every base


@pytest.mark.parametrize("order", ["numeric", "permuted"])
def test_all_patterns_survive_every_base(order: str) -> None:
    bits = EVERY_PATTERN if order == "numeric" else np.random.default_rng(0).permutation(EVERY_PATTERN)
    w = to_tensor(bits.reshape(64, 1024))
    for base in range(1, 240):
        t = encode(w, base)
        assert same_bits(t.decode(), w)
        assert order == "permuted" or t.exceptions == 7712  # 512 groups in the window, 32 of them collide


def test_one_pattern_repeated_survives_every_base() -> None:
    w = to_tensor(EVERY_PATTERN.repeat(8).reshape(1 << 16, 8))
    for base in range(1, 240):
        t = encode(w, base)
        assert t.exceptions == (1 << 16) - 2 * 15 * 128  # sign, nibbles 1 to 15, mantissa
        assert same_bits(t.decode(), w)


def test_the_planes_are_those_of_the_card_for_all_patterns() -> None:
    bits = np.random.default_rng(1).permutation(EVERY_PATTERN)[: 1 << 12].reshape(64, 64)
    for base in (1, 97, 112, 239):
        assert_as_oracle(bits, encode(to_tensor(bits), base))


# ---- against the slow encoder


PATTERN = st.one_of(
    st.integers(0, 0xFFFF),
    st.builds(
        lambda s, e, m: s << 15 | e << 7 | m, st.integers(0, 1), st.integers(100, 118), st.integers(0, 127)
    ),
    st.sampled_from([0x0000, 0x8000, 0x0001, 0x807F, 0x7F80, 0xFF80, 0x7F81, 0xFFC1, 0x7F7F, 0x0080]),
)


@st.composite
def matrices(draw: Any) -> np.ndarray:
    rows, columns = draw(st.integers(0, 5)), draw(st.integers(0, 27))
    few = draw(st.lists(PATTERN, min_size=1, max_size=6))  # repeated values make collisions
    element = draw(st.sampled_from([PATTERN, st.sampled_from(few)]))
    values = draw(st.lists(element, min_size=rows * columns, max_size=rows * columns))
    return np.array(values, np.uint16).reshape(rows, columns)


@settings(deadline=None, max_examples=150)
@given(matrices(), st.one_of(st.just("auto"), st.integers(1, 239)))
def test_planes_equal_the_slow_encoder(bits: np.ndarray, base: int | str) -> None:
    w = to_tensor(bits)
    t = encode(w, base)
    if base == "auto":
        assert t.base == oracle.search(bits)
        assert plan(w).exceptions == t.exceptions
    assert_as_oracle(bits, t)
    np.testing.assert_array_equal(oracle.decode(planes(t), t.base, bits.shape[1]), bits)
    assert same_bits(t.decode(), w)
    t.validate(strict=True)


@pytest.mark.parametrize(
    "shape", [(0, 16), (16, 0), (0, 0), (1, 1), (1, 7), (1, 8), (3, 9), (5, 63), (2, 129), (7, 1000)]
)
def test_odd_shapes(shape: tuple[int, int]) -> None:
    w = gaussian(*shape, sigma=1.0)
    t = encode(w)
    assert_as_oracle(oracle.patterns(w), t)
    assert same_bits(t.decode(), w)
    assert t.decode().is_contiguous()


def test_blocks_of_rows_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    w = gaussian(37, 45, sigma=1.0)
    w[::5, ::9] = 0
    whole, best = encode(w), plan(w)
    monkeypatch.setattr(sys.modules["gnomon.methods.compress.nf12.encode"], "BLOCK", 100)  # two rows
    parts = encode(w)
    assert plan(w) == best
    for mine, theirs in zip(planes(parts), planes(whole), strict=True):
        np.testing.assert_array_equal(mine, theirs)


def test_views_and_parameters_are_read_as_they_are() -> None:
    w = gaussian(24, 32)
    assert same_bits(encode(w.T).decode(), w.T.contiguous())
    assert same_bits(encode(w[::2, 1::3]).decode(), w[::2, 1::3].contiguous())
    assert same_bits(encode(torch.nn.Parameter(w)).decode(), w)


# ---- the choice of the base


def test_a_matrix_of_one_magnitude_gets_the_smallest_base() -> None:
    signs = torch.randint(0, 2, (64, 64), generator=torch.Generator().manual_seed(0)) * 2 - 1
    t = encode((signs * 0.125).to(torch.bfloat16))
    assert (t.base, t.bits_per_weight, t.exceptions) == (109, 12.0, 0)
    assert (
        encode((signs * 0.125).to(torch.bfloat16), base=124).bits_per_weight == 28.0
    )  # every group collides


def test_exact_counts_overrule_coverage() -> None:
    """Base 10 misses two weights in two groups, bases 11 and 12 miss three in one: fewer groups, smallest base."""
    e = np.array([[12, 25] * 4] * 4)
    e[0, 2:5] = 10
    e[1, 0] = e[2, 0] = 26
    assert plan(to_tensor((e << 7).astype(np.uint16))) == Plan(base=11, exceptions=1)


@pytest.mark.parametrize(("lowest", "chosen"), [(13, Plan(13, 1)), (14, Plan(10, 3))])
def test_four_windows_are_counted(lowest: int, chosen: Plan) -> None:
    """Base `lowest` misses seven weights in one group, each base from 10 up to it three in three groups."""
    e = np.array([[lowest, 25] * 4] * 5)
    e[0, :7] = lowest - 1
    e[1:4, 0] = lowest + 15
    assert plan(to_tensor((e << 7).astype(np.uint16))) == chosen


def test_collisions_are_counted_before_the_base_is_chosen() -> None:
    """Base 20 covers every weight, but under it three groups of nibbles 0 collide; base 5 loses one weight."""
    e = np.full((4, 8), 20)
    e[3, 0] = 35
    assert plan(to_tensor((e << 7).astype(np.uint16))) == Plan(base=5, exceptions=1)


@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (5, 8)])
def test_exponents_are_counted(shape: tuple[int, int]) -> None:
    bits = np.random.default_rng(0).integers(0, 1 << 16, shape).astype(np.uint16)
    counted = exponent_counts(to_tensor(bits)).numpy()
    np.testing.assert_array_equal(counted, np.bincount((bits >> 7 & 0xFF).flatten(), minlength=256))


def test_large_exponents_are_counted() -> None:
    """Weights of 2 and more, whose exponent fills the sign bit of a byte."""
    bits = np.random.default_rng(0).integers(126 << 7, 200 << 7, (9, 31)).astype(np.uint16)
    t = encode(to_tensor(bits))
    assert t.base == oracle.search(bits)
    assert_as_oracle(bits, t)


# ---- laws


@pytest.mark.parametrize("power", [-60, -3, 1, 40])
def test_scaling_moves_the_base_and_nothing_else(power: int) -> None:
    w = gaussian(32, 64)
    w[3, 5], w[20, 0] = 7.0, 0.0
    t, scaled = encode(w), encode((w.double() * 2.0**power).to(torch.bfloat16))
    assert t.exceptions == 2
    assert scaled.base == t.base + power
    assert torch.equal(t.sm, scaled.sm)
    assert torch.equal(t.ex, scaled.ex)


def test_negation_flips_sign_bits_and_verbatim_rows() -> None:
    w = gaussian(32, 64, sigma=0.5)
    t, negated = encode(w, 112), encode(-w, 112)
    coded = (t.ex != 0).repeat_interleave(8, 1)
    assert 0 < t.exceptions < t.ex.numel()
    assert torch.equal(negated.ex, t.ex)
    assert torch.equal(negated.sm, torch.where(coded, t.sm ^ 0x80, t.sm))
    assert same_bits(negated.esc, -t.esc)


def test_permuting_rows_permutes_planes_and_renumbers_exceptions() -> None:
    w = gaussian(32, 64, sigma=0.5)
    order = torch.randperm(32, generator=torch.Generator().manual_seed(0))
    t, moved = encode(w, 112), encode(w[order], 112)
    coded = (moved.ex != 0).repeat_interleave(8, 1)
    assert torch.equal(moved.ex, t.ex[order])
    assert torch.equal(moved.sm[coded], t.sm[order][coded])
    assert sorted(oracle.patterns(moved.esc).tolist()) == sorted(oracle.patterns(t.esc).tolist())


# ---- traps


def test_signalling_nans_and_float32() -> None:
    """Arithmetic would quieten 0x7F81; float32 input keeps it as well."""
    bits = [0x7F81, 0xFFA5, 0x7FC0, 0x0001, 0x8000, 0xFF80, 0x0000, 0x3F80]
    wide = torch.tensor([[b << 16 for b in bits]], dtype=torch.int64).to(torch.int32).view(torch.float32)
    assert oracle.patterns(encode(wide).decode()).tolist() == [bits]


def test_a_wrong_decoder_is_seen() -> None:
    """What the round trips above can tell apart: each bit of each plane of a coded group matters."""
    w = row(*EXAMPLE_A)
    t = encode(w, 112)
    for bit in range(64):
        sm = t.sm.clone()
        sm[0, bit // 8] ^= 1 << bit % 8
        assert not same_bits(NF12Tensor(sm, t.ex, t.esc, t.base, t.shape).decode(), w)
    for bit in range(32):
        ex = t.ex ^ torch.tensor(1 << bit).to(torch.int32)
        assert not same_bits(NF12Tensor(t.sm, ex, t.esc, t.base, t.shape).decode(), w)
    assert not same_bits(NF12Tensor(t.sm, t.ex, t.esc, t.base + 1, t.shape).decode(), w)


# ---- refusals


@pytest.mark.parametrize(
    ("w", "message"),
    [
        (torch.zeros(8, 8, dtype=torch.float16), r"is float16; .* w\.to\(torch\.bfloat16\)"),
        (torch.zeros(8, 8, dtype=torch.int8), "is int8"),
        (torch.zeros(8, dtype=torch.bfloat16), r"shape \(8,\); NF12 stores matrices"),
        (torch.zeros(2, 8, 8, dtype=torch.bfloat16), r"shape \(2, 8, 8\)"),
        (torch.zeros(8, 8, dtype=torch.bfloat16, device="meta"), "meta device"),
        (torch.zeros(8, 8, dtype=torch.bfloat16).to_sparse(), r"sparse_coo; .*w\.to_dense\(\)"),
        (torch.tensor([[1.0, 0.1]]), r"is 0\.10000000\d*, which no bfloat16 equals"),
    ],
    ids=["fp16", "int8", "vector", "3-D", "meta", "sparse", "inexact"],
)
def test_refused_matrices(w: Tensor, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        encode(w)
    with pytest.raises(UsageError, match=message):
        encode(w, 112)


@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_quantized_tensors_are_refused() -> None:
    with pytest.raises(UsageError, match=r"quantized; .*w\.dequantize\(\)"):
        encode(torch.quantize_per_tensor(torch.ones(8, 8), 0.1, 0, torch.qint8))


@pytest.mark.parametrize("base", [0, 240, -1, "best", True])
def test_refused_bases(base: Any) -> None:
    with pytest.raises(UsageError, match=r"must be an integer from 1 to 239"):
        encode(gaussian(8, 8), base)


def test_more_than_31_bits_of_index_are_refused() -> None:
    with pytest.raises(UsageError, match=r"must stay below 2\^31"):
        encode(torch.zeros(1, 1, dtype=torch.bfloat16).expand(1 << 31, 1))
