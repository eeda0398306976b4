"""kernels.memory: what is copied arrives, nothing beside it changes, and any size can be read."""

from __future__ import annotations

import ctypes

import pytest
import torch

from gnomon.core.errors import UsageError
from gnomon.kernels import memory, native

SIZES = [0, 1, 7, 63, 64, 65, 255, 256, 257, 4096, 4099, 100_003]
built = pytest.mark.skipif(bool(native.problem()), reason=native.problem())


@pytest.fixture(params=["compiled", "torch"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both with the library and as where there is none."""
    if request.param == "torch":
        monkeypatch.setattr(native, "problem", lambda: "no compiler")
    elif native.problem():
        pytest.skip(native.problem())
    return str(request.param)


def bytes_of(size: int, seed: int = 0) -> torch.Tensor:
    return torch.randint(256, (size,), generator=torch.Generator().manual_seed(seed), dtype=torch.uint8)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(("shift_from", "shift_to"), [(0, 0), (1, 0), (0, 3), (5, 17), (64, 63)])
def test_copies_and_nothing_else(path: str, size: int, shift_from: int, shift_to: int) -> None:
    source, room = bytes_of(size + 200), bytes_of(size + 200, seed=1)
    expected = room.clone()
    expected[shift_to : shift_to + size] = source[shift_from : shift_from + size]
    memory.copy(source[shift_from : shift_from + size], room[shift_to : shift_to + size])
    assert torch.equal(room, expected)


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_shares_of_threads_meet(path: str, threads: int) -> None:
    source, before = bytes_of(10_007), torch.get_num_threads()
    out = torch.zeros_like(source)
    torch.set_num_threads(threads)
    try:
        memory.copy(source, out)
        memory.read(source)
    finally:
        torch.set_num_threads(before)
    assert torch.equal(out, source)


def test_copies_between_dtypes_of_equal_size(path: str) -> None:
    source = bytes_of(64).view(torch.bfloat16)
    out = torch.zeros(16, dtype=torch.int32)
    memory.copy(source, out)
    assert torch.equal(out.view(torch.int16), source.view(torch.int16))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("shift", [0, 1, 13])
def test_reads_any_size_and_address(path: str, size: int, shift: int) -> None:
    memory.read(bytes_of(size + shift)[shift:])


@built
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("threads", [1, 2, 3, 64])
def test_every_byte_is_read_once(size: int, threads: int) -> None:
    """The result is the exclusive-or of all 16-byte words: a changed byte anywhere changes it."""
    read = native.library().gnomon_read
    read.restype = ctypes.c_uint64
    try:
        source = bytes_of(size)
        before = read(threads, source.data_ptr(), size)
        for at in {0, size // 3, size // 2, size - 1} if size else ():
            source[at] ^= 0x40
            assert read(threads, source.data_ptr(), size) != before
            source[at] ^= 0x40
        assert read(threads, source.data_ptr(), size) == before
    finally:
        read.restype = ctypes.c_int  # as ctypes has it without being told


def test_a_result_of_another_size_is_refused(path: str) -> None:
    room = bytes_of(64)
    expected = room.clone()
    with pytest.raises(UsageError, match="out holds 32 bytes, source 64"):
        memory.copy(bytes_of(64, seed=1), room[:32])
    assert torch.equal(room, expected)


@pytest.mark.parametrize("bad", ["strided", "elsewhere"])
def test_tensors_without_an_address_are_refused(path: str, bad: str) -> None:
    tensor = bytes_of(64)[::2] if bad == "strided" else torch.empty(32, dtype=torch.uint8, device="meta")
    with pytest.raises(UsageError, match=r"source is on .*; it has to be contiguous and on the CPU"):
        memory.read(tensor)
    with pytest.raises(UsageError, match=r"out is on .*; it has to be contiguous and on the CPU"):
        memory.copy(bytes_of(32), tensor)
