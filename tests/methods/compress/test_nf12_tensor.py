"""NF12 tensors and statistics: sizes, row access, refusals; entropies against NumPy, closed forms, hand codes."""

from __future__ import annotations

import dataclasses
import doctest
import itertools
import math

import nf12_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from nf12_oracle import gaussian, same_bits
from torch import Tensor

from gnomon.core.errors import GnomonError, UsageError
from gnomon.methods.compress import nf12
from gnomon.methods.compress.nf12 import (
    Entropy,
    NF12Tensor,
    Patterns,
    encode,
    gaussian_exceptions,
    gaussian_in_window,
    huffman_lengths,
)


def with_zeros(rows: int, columns: int) -> Tensor:
    """Gaussian with a zero in every fifth row, so that there are exceptions in known places."""
    w = gaussian(rows, columns)
    w[::5, 3] = 0
    return w


def test_the_example_in_the_package() -> None:
    assert doctest.testmod(nf12) == doctest.TestResults(failed=0, attempted=7)


# ---- decoding


def test_rows_are_rows_of_the_whole() -> None:
    w = with_zeros(40, 61)
    index = torch.tensor([[39, 0, 5], [5, 7, 20]])
    for kind in (torch.int64, torch.int32):
        assert same_bits(encode(w).rows(index.to(kind)), w[index])
    assert encode(w).rows(torch.empty(2, 0, dtype=torch.int64)).shape == (2, 0, 61)


@pytest.mark.parametrize("index", [40, -1])
def test_rows_outside_are_refused(index: int) -> None:
    with pytest.raises(UsageError, match=r"outside 0 … 39"):
        encode(with_zeros(40, 8)).rows(torch.tensor([index]))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_decode_into_a_buffer(dtype: torch.dtype) -> None:
    w = with_zeros(12, 20)
    out = torch.full((12, 20), math.nan, dtype=dtype)
    assert encode(w).decode(out) is out
    assert torch.equal(out, w.to(dtype))


@pytest.mark.usefixtures("unchecked")
def test_a_wrong_buffer_is_refused() -> None:
    with pytest.raises(UsageError, match=r"contiguous \(12, 20\) on cpu, not \(20, 12\) on cpu"):
        encode(with_zeros(12, 20)).decode(torch.empty(20, 12, dtype=torch.bfloat16))


def test_to_keeps_everything() -> None:
    t = encode(with_zeros(12, 20))
    moved = t.to("cpu")
    assert (moved.base, moved.shape, moved.device) == (t.base, t.shape, torch.device("cpu"))
    assert t.to("meta").esc.shape == t.esc.shape


# ---- size


def test_size_is_12_bits_and_16_for_each_exceptional_share() -> None:
    t = encode(with_zeros(40, 64))
    f = t.exceptions / (40 * 8)
    assert t.exceptions == 8
    assert t.bits_per_weight == 12 + 16 * f
    assert t.nbytes == 40 * 64 * 3 // 2 + 16 * 8


def test_a_matrix_of_zeros_takes_28_bits() -> None:
    t = encode(torch.zeros(16, 32, dtype=torch.bfloat16))
    assert (t.bits_per_weight, t.stats()["exception_groups"]) == (28.0, 1.0)


# ---- statistics


def entropy(values: np.ndarray) -> tuple[float, float]:
    """Plug-in and Miller-Madow, from NumPy's own counting."""
    counts = np.unique(values, return_counts=True)[1]
    p = counts / counts.sum()
    h = float(-(p * np.log2(p)).sum())
    return h, h + (len(counts) - 1) / (2 * counts.sum() * math.log(2))


def test_stats_against_numpy() -> None:
    w = with_zeros(60, 50)
    bits, t = oracle.patterns(w), encode(w)
    stats, exponents = t.stats(), bits >> 7 & 0xFF
    joint, exponent = entropy(bits), entropy(exponents)
    assert stats["entropy_joint"] == pytest.approx(joint[0], rel=1e-12)
    assert stats["entropy_joint_corrected"] == pytest.approx(joint[1], rel=1e-12)
    assert stats["entropy_exponent"] == pytest.approx(exponent[0], rel=1e-12)
    assert stats["entropy_exponent_corrected"] == pytest.approx(exponent[1], rel=1e-12)
    assert (stats["base"], stats["scale_exp"]) == (t.base, 112 - t.base)
    assert stats["in_window"] == np.mean((exponents >= t.base) & (exponents <= t.base + 15))
    assert stats["exception_groups"] == t.exceptions / (60 * 7)
    assert stats["bits_per_weight"] == 8 * t.nbytes / 3000
    parts = Patterns.of(w)
    assert parts.sign_mantissa.plug_in == pytest.approx(entropy(bits & 0x807F)[0], rel=1e-12)
    assert torch.equal((parts + parts).counts, 2 * parts.counts)


def test_entropy_by_hand() -> None:
    fair = Entropy.of(torch.tensor([8, 0, 8]))
    assert fair.plug_in == 1
    assert fair.corrected == pytest.approx(1 + 1 / (32 * math.log(2)))
    assert Entropy.of(torch.tensor([5])).plug_in == 0
    assert math.isnan(Entropy.of(torch.zeros(4, dtype=torch.int64)).corrected)


def test_correction_removes_most_of_the_bias() -> None:
    """10,000 draws from 1,024 equal values: the truth is 10 bits."""
    draws = torch.randint(1024, (10_000,), generator=torch.Generator().manual_seed(0))
    measured = Entropy.of(torch.bincount(draws))
    assert measured.plug_in < 9.94
    assert measured.corrected == pytest.approx(10, abs=0.01)


def test_gaussian_closed_form() -> None:
    """The card's four numbers, and erf against numerical integration of the density."""
    assert gaussian_in_window(0.02, 108) == pytest.approx(0.999923907, abs=5e-10)
    assert gaussian_exceptions(0.02, 108) == pytest.approx(6.0858e-4, rel=1e-4)
    assert gaussian_in_window(0.02, 112) == pytest.approx(0.998782525, abs=5e-10)
    assert gaussian_exceptions(0.02, 112) == pytest.approx(9.698e-3, rel=1e-4)
    low, high = 2.0**-19, 2.0**-3
    x = np.linspace(low, high, 200_001)
    density = np.exp(-(x**2) / (2 * 0.02**2)) / (0.02 * math.sqrt(2 * math.pi))
    area = 2 * float(np.trapezoid(density, x))
    assert gaussian_in_window(0.02, 108) == pytest.approx(area, abs=1e-8)


def test_a_gaussian_matrix_meets_the_closed_form() -> None:
    """Both shares within five standard errors."""
    stats = encode(gaussian(1024, 1024)).stats()
    assert stats["base"] == 108
    p, f = gaussian_in_window(0.02, 108), gaussian_exceptions(0.02, 108)
    assert stats["in_window"] == pytest.approx(p, abs=5 * math.sqrt(p * (1 - p) / 2**20))
    assert stats["exception_groups"] == pytest.approx(f, abs=5 * math.sqrt(f / 2**17))
    assert stats["entropy_exponent"] == pytest.approx(2.545, abs=0.01)  # the card's 4096 x 4096
    assert stats["entropy_joint_corrected"] == pytest.approx(10.464, abs=0.01)


@pytest.mark.parametrize("sigma", [0.0, -1.0, math.inf, math.nan])
def test_an_impossible_sigma_is_refused(sigma: float) -> None:
    with pytest.raises(UsageError, match="positive, finite"):
        gaussian_in_window(sigma, 108)


def test_huffman_by_hand() -> None:
    assert huffman_lengths([1, 1, 2, 4]) == [3, 3, 2, 1]
    assert huffman_lengths([0, 7, 0]) == [0, 1, 0]
    assert huffman_lengths([0, 0]) == [0, 0]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 30), min_size=2, max_size=5))
def test_huffman_is_optimal(counts: list[int]) -> None:
    """Brute force over all code lengths that satisfy Kraft's inequality."""
    mine = huffman_lengths(counts)
    assert sum(2.0**-length for length in mine) == 1
    best = min(
        sum(c * length for c, length in zip(counts, lengths, strict=True))
        for lengths in itertools.product(range(1, len(counts) + 1), repeat=len(counts))
        if sum(2.0**-length for length in lengths) <= 1
    )
    assert sum(c * length for c, length in zip(counts, mine, strict=True)) == best


def test_huffman_bits_lie_next_to_the_entropy() -> None:
    parts = Patterns.of(gaussian(256, 256))
    assert 0 <= parts.huffman_bits - 8 - parts.exponent.plug_in < 1
    exponents = oracle.patterns(gaussian(256, 256)).flatten() >> 7 & 0xFF
    lengths = huffman_lengths(np.bincount(exponents, minlength=256).tolist())
    assert parts.huffman_bits == pytest.approx(8 + np.mean([lengths[e] for e in exponents]))


# ---- validation


def broken(t: NF12Tensor, **changes: object) -> NF12Tensor:
    return dataclasses.replace(t, **changes)


def damaged_slot(t: NF12Tensor, byte: int, value: int) -> NF12Tensor:
    sm = t.sm.clone()
    sm[0, byte] = value
    return broken(t, sm=sm)


@pytest.mark.usefixtures("unchecked")
def test_validation_refuses_what_decoders_must_not_see() -> None:
    t = encode(with_zeros(40, 64))  # group (0, 0) is exceptional
    t.validate(strict=True)
    cases = [
        (damaged_slot(t, 0, 8), r"group \(0, 0\) points to row 8 of 8"),
        (damaged_slot(t, 3, 0x80), r"points to row 2147483648 of 8"),
        (damaged_slot(t, 4, 1), r"group \(0, 0\) holds bytes after"),
        (damaged_slot(t, 7, 1), r"group \(0, 0\) holds bytes after its 4-byte index"),
        (broken(t, esc=t.esc[:-1]), r"points to row 7 of 7"),
        (broken(t, base=0), r"base=0 lies outside \[1, 239\]"),
        (broken(t, base=240), r"base=240"),
        (broken(t, shape=(40, 65)), r"Plane sm is torch\.uint8 \(40, 64\); .* 40 x 65 has .* \(40, 72\)"),
        (broken(t, shape=(39, 64)), r"Plane sm"),
        (broken(t, ex=t.ex[:, 1:]), r"Plane ex"),
        (broken(t, ex=t.ex.long()), r"Plane ex is torch\.int64"),
        (broken(t, esc=t.esc.float()), r"Plane esc is torch\.float32"),
        (broken(t, esc=t.esc[:, :4]), r"Plane esc"),
    ]
    for planes, message in cases:
        with pytest.raises(GnomonError, match=message):
            planes.validate()


@pytest.mark.parametrize("change", ["unreferenced", "shared", "unordered"])
def test_strict_validation_wants_what_the_encoder_writes(change: str) -> None:
    t = encode(with_zeros(40, 64))
    odd = {
        "unreferenced": broken(t, esc=torch.cat([t.esc, t.esc[:1]])),
        "shared": damaged_slot(t, 0, 1),
        "unordered": damaged_slot(broken(t, esc=t.esc.roll(1, 0)), 0, 7),
    }[change]
    odd.validate()
    with pytest.raises(GnomonError, match="not to each one once and in order"):
        odd.validate(strict=True)
