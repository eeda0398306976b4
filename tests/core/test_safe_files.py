"""Safetensors files by tensor. Source of truth: the format's own library, which reads and writes beside ours."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gnomon.core.errors import GnomonError
from gnomon.core.safe_files import DTYPES, header_room, read_header, writing

METADATA = {"format": "pt", "note": "ü"}


def examples() -> dict[str, torch.Tensor]:
    tensors = {
        f"of_{code}": torch.arange(6, dtype=torch.uint8)
        .repeat(8)[: 6 * dtype.itemsize]
        .view(dtype)
        .view(2, 3)
        for code, dtype in DTYPES.items()
        if code not in ("BOOL", "C64")
    }
    return tensors | {
        "mask": torch.tensor([True, False]),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 5, dtype=torch.bfloat16),
        "a “name”": torch.ones(3),
        "nan": torch.tensor([0x7F81, -1], dtype=torch.int16).view(torch.bfloat16),  # a signalling NaN
    }


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    raw = [tensor.contiguous().reshape(-1).view(torch.uint8) for tensor in (one, other)]
    return one.dtype == other.dtype and one.shape == other.shape and torch.equal(raw[0], raw[1])


def test_the_library_reads_what_we_write(tmp_path: Path) -> None:
    tensors = examples()
    with writing(tmp_path / "x.safetensors", header_room(dict.fromkeys(tensors, 1)), METADATA) as file:
        for name, tensor in tensors.items():
            file.add(name, tensor)
    found = load_file(tmp_path / "x.safetensors")
    assert found.keys() == tensors.keys()
    assert all(same(found[name], tensors[name]) for name in tensors)
    with safe_open(tmp_path / "x.safetensors", "pt") as opened:
        assert opened.metadata() == METADATA


def test_we_read_what_the_library_writes(tmp_path: Path) -> None:
    tensors = examples()
    save_file(tensors, tmp_path / "x.safetensors", METADATA)
    header = read_header(tmp_path / "x.safetensors")
    assert header.metadata == METADATA and header.entries.keys() == tensors.keys()
    for name, entry in header.entries.items():
        assert same(entry.read(), tensors[name])
        assert (entry.shape, entry.nbytes) == (tuple(tensors[name].shape), tensors[name].nbytes)


def test_a_written_tensor_keeps_its_order_not_its_strides(tmp_path: Path) -> None:
    tensor = torch.arange(6).view(2, 3).T
    with writing(tmp_path / "x", header_room({"t": 1}), {}) as file:
        file.add("t", tensor)
    assert torch.equal(read_header(tmp_path / "x").entries["t"].read(), tensor)


def test_a_failed_block_leaves_no_readable_file(tmp_path: Path) -> None:
    with pytest.raises(KeyError), writing(tmp_path / "x", 4096, {}) as file:
        file.add("t", torch.ones(3))
        raise KeyError
    with pytest.raises(GnomonError):
        read_header(tmp_path / "x")


def test_names_and_dtypes_that_can_not_be_written(tmp_path: Path) -> None:
    with writing(tmp_path / "x", 4096, {}) as file:
        file.add("t", torch.ones(3))
        with pytest.raises(GnomonError, match="Two tensors are called 't'"):
            file.add("t", torch.ones(3))
        with pytest.raises(GnomonError, match="complex128, which safetensors files can't hold"):
            file.add("z", torch.ones(3, dtype=torch.complex128))


def raw(path: Path, header: Any, data: bytes = b"", length: int | None = None) -> Path:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


def entry(shape: Any = (1,), offsets: Any = (0, 4), dtype: Any = "F32") -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": offsets}


@pytest.mark.parametrize(
    ("header", "data", "message"),
    [
        ({"t": entry()}, b"123", "tensors end at byte"),
        ({"t": entry()}, b"12345", "tensors end at byte"),
        ({"t": entry(), "u": entry()}, b"1234", "'u' begins at byte"),
        ({"t": entry(offsets=(4, 8))}, b"12345678", "'t' begins at byte"),
        ({"t": entry(shape=(2**40, 2**40))}, b"1234", r"has shape .* but offsets"),
        ({"t": entry(shape=(2**70,))}, b"1234", "no lists of sizes"),
        ({"t": entry(shape=(1,) * 99)}, b"1234", "no lists of sizes"),
        ({"t": entry(shape=(-1,), offsets=(0, -4))}, b"", "no lists of sizes"),
        ({"t": entry(shape=(True,))}, b"1234", "no lists of sizes"),
        ({"t": entry(offsets=(0,))}, b"1234", "no lists of sizes"),
        ({"t": entry(shape="12")}, b"1234", "no lists of sizes"),
        ({"t": entry(dtype="F4")}, b"1234", "unknown dtype 'F4'"),
        ({"t": entry(dtype=["F32"])}, b"1234", "unknown dtype"),
        ({"t": 5}, b"1234", "unknown dtype 5"),
        ({"__metadata__": {"a": 1}}, b"", "not a table of strings"),
        (b'{"t": 1, "t": 2}', b"", "a name stands twice"),
        (b"[" * 90_000, b"", "no valid JSON"),
        (b"[1, 2]", b"", "its JSON is no object"),
        (b"\xff\xfe{}", b"", "no valid JSON"),
    ],
)
def test_headers_that_their_file_does_not_bear_out(
    header: Any, data: bytes, message: str, tmp_path: Path
) -> None:
    with pytest.raises(GnomonError, match=message):
        read_header(raw(tmp_path / "x", header, data))


@pytest.mark.parametrize("length", [0, 1, 3, 10**6, 2**63])
def test_a_header_longer_than_its_file_is_not_allocated(length: int, tmp_path: Path) -> None:
    with pytest.raises(GnomonError, match="no whole safetensors file"):
        read_header(raw(tmp_path / "x", b"{}", length=length))


@pytest.mark.parametrize("content", [b"", b"1234567", b"version https://git-lfs.github.com/spec/v1\n"])
def test_files_that_are_none(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(content)
    with pytest.raises(GnomonError, match=r"damaged, cut off or a Git LFS pointer"):
        read_header(tmp_path / "x")
    with pytest.raises(GnomonError, match="is missing"):
        read_header(tmp_path / "y")


def test_a_file_cut_off_after_its_header_was_read(tmp_path: Path) -> None:
    save_file({"t": torch.ones(100)}, tmp_path / "x")
    found = read_header(tmp_path / "x").entries["t"]
    (tmp_path / "x").write_bytes((tmp_path / "x").read_bytes()[:-1])
    with pytest.raises(GnomonError, match="ends inside 't'"):
        found.read()
