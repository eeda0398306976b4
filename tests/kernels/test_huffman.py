"""The Huffman peer: the reference against the definition of its code, the compiled codec against the reference."""

from __future__ import annotations

import itertools
import math
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from planes import gaussian, patterns

from gnomon.core.errors import GnomonError, UsageError
from gnomon.kernels import native
from gnomon.kernels.huffman import cpu, reference
from gnomon.kernels.huffman.reference import Coded

compiled = pytest.mark.skipif(bool(native.problem()), reason=native.problem() or "compiled")
codecs = pytest.mark.parametrize("codec", [reference, pytest.param(cpu, marks=compiled)])


def bits(t: torch.Tensor) -> torch.Tensor:
    return t.view(torch.int16)


def from_bits(values: list[int]) -> torch.Tensor:
    return torch.from_numpy(np.array(values, dtype=np.uint16).view(np.int16)).view(torch.bfloat16)


def skewed(n: int) -> torch.Tensor:
    """Powers of two down to 2^-40, each half as frequent as the one before: codes up to the limit."""
    u = torch.rand(n, generator=torch.Generator().manual_seed(0))
    return (2.0 ** u.log2().ceil().clamp(-40)).bfloat16()


TENSORS: dict[str, Callable[[], torch.Tensor]] = {
    "every pattern": lambda: patterns("permuted"),
    "one exponent": lambda: torch.full((3, 50), -1.75, dtype=torch.bfloat16),
    "one weight": lambda: torch.tensor([0.02]).bfloat16(),
    "two exponents": lambda: torch.tensor([1.0, 2.0, 2.0]).bfloat16(),
    "empty": lambda: torch.zeros(0, 5).bfloat16(),
    "scalar": lambda: torch.tensor(0.5).bfloat16(),
    "a chunk": lambda: gaussian(64, 64),
    "a chunk and a weight": lambda: gaussian(1, 4097),
    "five chunks": lambda: gaussian(5, 4096),
    "a skewed code": lambda: skewed(20_000),
}


@codecs
@pytest.mark.parametrize("name", TENSORS)
def test_round_trip(codec: object, name: str) -> None:
    weight = TENSORS[name]()
    coded = codec.encode(weight)  # type: ignore[attr-defined]
    decoded = codec.decode(coded)  # type: ignore[attr-defined]
    assert decoded.shape == weight.shape
    assert torch.equal(bits(decoded), bits(weight))


@compiled
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", TENSORS)
def test_compiled_is_the_reference(name: str, threads: int) -> None:
    weight = TENSORS[name]()
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        coded = cpu.encode(weight)
        for part in ("sm", "lengths", "starts", "stream"):
            assert torch.equal(getattr(coded, part), getattr(reference.encode(weight), part)), part
        out = torch.full(weight.shape, torch.nan, dtype=torch.bfloat16)
        assert cpu.decode(coded, out=out) is out
    finally:
        torch.set_num_threads(before)
    assert torch.equal(bits(out), bits(weight))


@compiled
@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 65535), max_size=300), st.integers(1, 40))
def test_any_patterns(values: list[int], times: int) -> None:
    weight = from_bits(values * times)
    assert torch.equal(bits(cpu.decode(cpu.encode(weight))), bits(weight))


def test_by_hand() -> None:
    """Exponents 127 (twice), 128, 0: lengths 1, 2, 2; codes 0 (127), 10 (0), 11 (128), first bit lowest."""
    coded = reference.encode(from_bits([0x3F81, 0x4000, 0xBF80, 0x0003]))
    assert {e: int(coded.lengths[e]) for e in coded.lengths.nonzero().flatten().tolist()} == {
        0: 2,
        127: 1,
        128: 2,
    }
    assert coded.sm.tolist() == [0x01, 0x00, 0x80, 0x03]
    assert coded.stream.tolist() == [0b01_0_11_0] + [0] * 16
    assert coded.starts.tolist() == [0, 1]
    assert coded.nbytes == 4 + 256 + 16 + 17


@pytest.mark.parametrize("counts", [(5, 1, 1), (1, 1, 1, 1), (8, 4, 2, 1, 1), (13, 7, 5, 3, 2, 1)])
def test_lengths_are_the_best_prefix_code(counts: tuple[int, ...]) -> None:
    """Brute force: no lengths that satisfy Kraft's inequality cost less."""
    lengths = reference.code_lengths(torch.tensor([*counts] + [0] * (256 - len(counts))))
    assert lengths[len(counts) :].sum() == 0
    cost = sum(c * int(k) for c, k in zip(counts, lengths, strict=False))
    choices = itertools.product(range(1, 6), repeat=len(counts))
    best = min(
        sum(c * k for c, k in zip(counts, ks, strict=True)) for ks in choices if sum(2.0**-k for k in ks) <= 1
    )
    assert cost == best


def test_lengths_keep_to_the_limit() -> None:
    """Counts 1, 2, 4, ... would make an unlimited code as long as there are symbols."""
    lengths = reference.code_lengths(torch.tensor([2**i for i in range(40)] + [0] * 216))
    assert lengths.max() == 11
    assert math.isclose(sum(2.0 ** -int(k) for k in lengths if k), 1)


def test_size_of_gaussian_weights() -> None:
    """Within a Huffman code's loss of the entropy: the card's exponent entropy of 2.545 bits."""
    weight = gaussian(512, 512)
    coded = reference.encode(weight)
    counts = torch.bincount(bits(weight).flatten() >> 7 & 0xFF, minlength=256).double()
    share = counts[counts > 0] / weight.numel()
    entropy = -(share * share.log2()).sum().item()
    assert entropy == pytest.approx(2.545, abs=0.01)
    bits_per_exponent = 8 * (int(coded.starts[-1])) / weight.numel()
    assert entropy < bits_per_exponent < entropy + 0.06


GOOD = reference.encode(gaussian(100, 100))
LENGTHS = GOOD.lengths.clone()
LENGTHS[int(LENGTHS.argmax())] = 0


@codecs
@pytest.mark.parametrize(
    ("bad", "reason"),
    [
        (replace(GOOD, lengths=LENGTHS), reference.BAD_CODE),
        (replace(GOOD, lengths=torch.full_like(GOOD.lengths, 12)), reference.BAD_CODE),
        (replace(GOOD, lengths=torch.zeros_like(GOOD.lengths)), reference.BAD_CODE),
        (replace(GOOD, starts=GOOD.starts.flip(0)), reference.BAD_STARTS),
        (replace(GOOD, starts=GOOD.starts + 1), reference.BAD_STARTS),
        (replace(GOOD, stream=GOOD.stream[:-1]), reference.BAD_STARTS),
        (replace(GOOD, starts=GOOD.starts[1:]), r"part starts is torch.int64 \(3,\).*\(4,\)"),
        (replace(GOOD, sm=GOOD.sm[1:]), r"part sm is torch.uint8 \(9999,\).*\(10000,\)"),
        (replace(GOOD, lengths=GOOD.lengths[:255]), r"part lengths is torch.uint8 \(255,\)"),
        (replace(GOOD, stream=GOOD.stream.float()), "part stream is torch.float32"),
        (
            replace(GOOD, starts=GOOD.starts.clone().fill_(0), stream=GOOD.stream[-16:].clone()),
            reference.BAD_STREAM,
        ),
    ],
)
def test_corrupt_tensors_are_refused(codec: object, bad: Coded, reason: str) -> None:
    with pytest.raises(GnomonError, match=rf"tensor \(100, 100\) is corrupt: .*{reason}"):
        codec.decode(bad)  # type: ignore[attr-defined]


@compiled
@settings(max_examples=100, deadline=None)
@given(st.data())
def test_corrupt_bytes_never_crash(data: st.DataObject) -> None:
    """Any bytes in the stream, the lengths and the starts: an error or some numbers, in bounds (see also the slow
    test under the address sanitizer)."""
    part = data.draw(st.sampled_from(["stream", "lengths", "starts"]))
    values = getattr(GOOD, part).clone()
    for _ in range(data.draw(st.integers(1, 8))):
        place = data.draw(st.integers(0, len(values) - 1))
        values[place] = data.draw(st.integers(0, 255) if part != "starts" else st.integers(-(2**40), 2**40))
    try:
        decoded = cpu.decode(replace(GOOD, **{part: values}))
    except GnomonError:
        return
    assert decoded.shape == (100, 100)


@codecs
def test_other_types_are_refused(codec: object, unchecked: None) -> None:
    with pytest.raises(UsageError, match=r"The weight is torch.float32, and this code is for bfloat16"):
        codec.encode(torch.zeros(3))  # type: ignore[attr-defined]


@compiled
def test_out_of_another_shape_is_refused() -> None:
    with pytest.raises(UsageError, match=r"out is torch.bfloat16 \(100, 99\).*\(100, 100\)"):
        cpu.decode(GOOD, out=torch.empty(100, 99, dtype=torch.bfloat16))


def test_without_the_library(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native, "problem", lambda: "there is no compiler")
    assert cpu.why_not() == "there is no compiler"
    with pytest.raises(
        GnomonError, match=r"codec can't run here: there is no compiler\. The reference runs anywhere"
    ):
        cpu.decode(GOOD)


@pytest.mark.slow
def test_mutated_streams_stay_in_bounds(tmp_path: Path) -> None:
    """20,000 mutated tensors under the address and undefined-behaviour sanitizers, each way to end among them."""
    compiler = shutil.which("c++") or shutil.which("g++")
    if compiler is None:
        pytest.skip("there is no C++ compiler")
    source = Path(reference.__file__).parent
    flags = ["-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", f"-I{source}"]
    command = [
        compiler,
        *flags,
        str(Path(__file__).with_name("huffman_fuzz.cpp")),
        "-o",
        str(tmp_path / "fuzz"),
    ]
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if "cannot find" in built.stderr:
        pytest.skip("the compiler has no sanitizers")
    assert built.returncode == 0, built.stderr
    done = subprocess.run([str(tmp_path / "fuzz"), "20000"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-4000:]
    assert all(int(count) > 100 for count in done.stdout.split()), done.stdout
