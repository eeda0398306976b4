"""Files: names and meta rows by hand, hostile headers refused before planes are read, mutations of whole files."""

from __future__ import annotations

import json
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nf12_oracle as oracle
import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from nf12_oracle import gaussian, same_bits
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from gnomon.core.errors import GnomonError
from gnomon.methods.compress.nf12 import (
    METADATA,
    Contents,
    Meta,
    NF12Config,
    NF12Tensor,
    choose,
    encode,
    inspect,
    is_plane,
    pack,
    unpack,
)


def example() -> Tensor:
    """6 x 20, with two exceptional groups, one of them at the padded end."""
    w = gaussian(6, 20)
    w[1, 3], w[4, 19] = 0, 9
    return w


def stored(**changes: Tensor | None) -> dict[str, Tensor]:
    """Tensors of a good file; `sm=tensor` replaces a plane, `None` removes it, other names are added."""
    tensors = {**pack("a.weight", encode(example())), "norm": torch.ones(4)}
    for key, value in changes.items():
        name = f"a.weight.nf12_{key}" if key in ("sm", "ex", "esc", "meta") else key.replace("__", ".")
        if value is None:
            del tensors[name]
        else:
            tensors[name] = value
    return tensors


def write(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str] | None = METADATA) -> Path:
    save_file(tensors, path, metadata=metadata)
    return path


def read(path: Path) -> tuple[Contents, dict[str, NF12Tensor]]:
    with safe_open(path, "pt") as file:
        contents = inspect(file)
        return contents, {name: unpack(name, file.get_tensor) for name in contents.encoded}


# ---- the form


def test_names_and_meta_row() -> None:
    tensors = pack("model.a.weight", encode(example()))
    assert list(tensors) == [f"model.a.weight.nf12_{plane}" for plane in ("sm", "ex", "esc", "meta")]
    sm, ex, esc, meta = tensors.values()
    assert meta.tolist() == [1, 108, 6, 20, 24, 2, 8, 1]
    assert (meta.dtype, sm.shape, ex.shape, esc.shape) == (torch.int32, (6, 24), (6, 3), (2, 8))
    assert all(is_plane(key) for key in tensors)
    assert not is_plane("model.nf12_a.weight")


@pytest.mark.parametrize("shape", [(6, 20), (1, 8), (0, 16), (3, 0), (64, 64)])
def test_files_round_trip(tmp_path: Path, shape: tuple[int, int]) -> None:
    w = gaussian(*shape)
    path = write(tmp_path / "x.safetensors", {**pack("x", encode(w)), "raw.weight": torch.ones(2)})
    contents, tensors = read(path)
    assert contents.raw == ("raw.weight",)
    assert contents.encoded["x"] == Meta.of(tensors["x"])
    assert contents.encoded["x"].nbytes == tensors["x"].nbytes
    assert same_bits(tensors["x"].decode(), w)
    tensors["x"].validate(strict=True)


def test_what_is_stored_is_what_the_card_says(tmp_path: Path) -> None:
    """The bytes of a file, decoded by the slow decoder without any of our code."""
    raw = write(tmp_path / "x.safetensors", stored()).read_bytes()
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])

    def plane(name: str, dtype: Any) -> np.ndarray:
        entry = header[f"a.weight.nf12_{name}"]
        first, last = entry["data_offsets"]
        return np.frombuffer(raw[8 + size + first : 8 + size + last], dtype).reshape(entry["shape"])

    assert header["__metadata__"] == {"format": "pt", "nf12": "planes-v1"}
    assert [header[f"a.weight.nf12_{p}"]["dtype"] for p in ("sm", "ex", "esc", "meta")] == [
        "U8",
        "I32",
        "BF16",
        "I32",
    ]
    planes = plane("sm", np.uint8), plane("ex", np.uint32), plane("esc", np.uint16)
    base, columns = plane("meta", np.int32)[[1, 3]]
    np.testing.assert_array_equal(oracle.decode(planes, int(base), int(columns)), oracle.patterns(example()))


# ---- headers nobody vouches for


def meta_with(**fields: int) -> Tensor:
    names = ("version", "base", "rows", "columns", "padded", "exceptions", "group", "layout")
    values = dict(zip(names, [1, 108, 6, 20, 24, 2, 8, 1], strict=True)) | fields
    return torch.tensor(list(values.values()), dtype=torch.int32)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sm": None}, r"a\.weight: a\.weight\.nf12_sm is missing"),
        ({"esc": None, "ex": None}, r"a\.weight\.nf12_esc, a\.weight\.nf12_ex is missing"),
        ({"a__weight": torch.ones(6, 20)}, "both as it is and encoded"),
        (
            {"a__weight__nf12_new": torch.ones(1)},
            r"holds a\.weight\.nf12_new, which is no plane of planes-v1",
        ),
        ({"meta": meta_with().long()}, r"meta row is I64 \[8\], not I32 \[8\]"),
        ({"meta": meta_with()[:7]}, r"meta row is I32 \[7\]"),
        ({"meta": meta_with(version=2)}, r"version 2, layout 1; this Gnomon reads version 1"),
        ({"meta": meta_with(layout=7)}, r"version 1, layout 7"),
        ({"meta": meta_with(base=0)}, r"base 0 lies outside \[1, 239\]"),
        ({"meta": meta_with(base=240)}, "base 240"),
        ({"meta": meta_with(group=16)}, "groups have 16 columns"),
        ({"meta": meta_with(rows=-6)}, "a size is negative: -6 x 20"),
        ({"meta": meta_with(padded=20)}, "20 columns fill up to 24, not to 20"),
        ({"meta": meta_with(exceptions=19)}, "19 exceptions are more than its 18 groups"),
        (
            {"meta": meta_with(exceptions=3)},
            r"nf12_esc is BF16 \[2, 8\]; its meta row asks for BF16 \[3, 8\]",
        ),
        ({"meta": meta_with(rows=2**31 - 1)}, r"nf12_sm is U8 \[6, 24\]; .* U8 \[2147483647, 24\]"),
        ({"sm": torch.zeros(6, 16, dtype=torch.uint8)}, r"nf12_sm is U8 \[6, 16\]"),
        ({"sm": torch.zeros(6, 24, dtype=torch.int8)}, r"nf12_sm is I8 \[6, 24\]"),
        ({"ex": torch.zeros(6, 3)}, r"nf12_ex is F32"),
        ({"esc": torch.zeros(2, 8, dtype=torch.float16)}, r"nf12_esc is F16"),
    ],
)
def test_headers_are_refused_before_planes_are_read(
    tmp_path: Path, change: dict[str, Any], message: str
) -> None:
    class MetaOnly:
        """The open file, in which nothing but meta rows may be read."""

        def __init__(self, file: Any) -> None:
            self.keys, self.metadata, self.get_slice = file.keys, file.metadata, file.get_slice
            self.file = file

        def get_tensor(self, name: str) -> Tensor:
            assert name.endswith(".nf12_meta")
            tensor: Tensor = self.file.get_tensor(name)
            assert tensor.numel() == 8
            return tensor

    path = write(tmp_path / "x.safetensors", stored(**change))
    with safe_open(path, "pt") as file, pytest.raises(GnomonError, match=message):
        inspect(MetaOnly(file))


@pytest.mark.parametrize(
    ("metadata", "message"),
    [
        (None, r"nf12=None; .* It is no NF12 file"),
        ({"format": "pt"}, r"nf12=None"),
        ({"nf12": "planes-v2"}, r"nf12='planes-v2'; .* Update Gnomon"),
    ],
)
def test_another_layout_is_refused(tmp_path: Path, metadata: dict[str, str] | None, message: str) -> None:
    with pytest.raises(GnomonError, match=message):
        read(write(tmp_path / "x.safetensors", stored(), metadata))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"sm": torch.full((6, 24), 255, dtype=torch.uint8)}, r"a\.weight: The slot .* holds bytes after"),
        ({"ex": torch.zeros(6, 3, dtype=torch.int32)}, r"a\.weight: The slot"),
        ({"meta": meta_with(exceptions=1)}, "has 2 verbatim rows, its meta row says 1"),
        ({"meta": meta_with(rows=5)}, r"a\.weight: Plane sm"),
        ({"meta": meta_with()[:7]}, "meta row"),
    ],
)
def test_unpacking_checks_what_it_read(change: dict[str, Any], message: str) -> None:
    with pytest.raises(GnomonError, match=message):
        unpack("a.weight", stored(**change).__getitem__)


# ---- mutations: refused, or a valid matrix of no more bytes than the file

Mutation = Callable[[bytearray, random.Random], bytearray]


def flip_bits(raw: bytearray, r: random.Random) -> bytearray:
    for _ in range(r.choice([1, 1, 2, 8])):
        raw[r.randrange(len(raw))] ^= 1 << r.randrange(8)
    return raw


def extreme_bytes(raw: bytearray, r: random.Random) -> bytearray:
    start, width = r.randrange(len(raw)), r.choice([1, 2, 4, 8])
    raw[start : start + width] = bytes([r.choice([0, 0x7F, 0x80, 0xFF])] * len(raw[start : start + width]))
    return raw


def cut(raw: bytearray, r: random.Random) -> bytearray:
    return raw[: r.randrange(len(raw))]


def insert(raw: bytearray, r: random.Random) -> bytearray:
    where = r.randrange(len(raw))
    return raw[:where] + r.randbytes(r.randrange(1, 9)) + raw[where:]


def edit_header(raw: bytearray, r: random.Random) -> bytearray:
    """Change a dtype, a shape, a name, the metadata or an entry, keeping the JSON and its length right."""
    size = struct.unpack("<Q", raw[:8])[0]
    header = json.loads(raw[8 : 8 + size])
    key = r.choice(sorted(header))
    entry = header[key]
    kind = r.randrange(6)
    if key == "__metadata__":
        header[key] = r.choice([{}, {"nf12": "planes-v2"}, {"format": "pt", "nf12": ""}])
    elif kind == 0:
        entry["dtype"] = r.choice(["U8", "I8", "I32", "F32", "BF16", "F16", "I64", "BOOL", "U32"])
    elif kind == 1:
        at = r.randrange(len(entry["shape"]) or 1)
        entry["shape"][at : at + 1] = [r.choice([0, 1, 2, 3, 6, 8, 24, 2**31 - 1, 2**31, 2**62, 2**64 - 1])]
    elif kind == 2:
        entry["shape"] = r.choice(
            [entry["shape"][::-1], [*entry["shape"], 1], [int(np.prod(entry["shape"]))], []]
        )
    elif kind == 3:
        header[r.choice([key + "x", "a.weight", "nf12_sm", ".nf12_sm", "a.weight.nf12_", key.upper()])] = (
            header.pop(key)
        )
    elif kind == 4:
        del header[key]
    else:
        entry["data_offsets"] = r.choice([entry["data_offsets"][::-1], [0, 2**63], [0, 0], [0, len(raw)]])
    text = json.dumps(header).encode()
    return bytearray(struct.pack("<Q", len(text)) + text + raw[8 + size :])


def edit_meta(raw: bytearray, r: random.Random) -> bytearray:
    """Put a number that means something into a field of the meta row."""
    size = struct.unpack("<Q", raw[:8])[0]
    at = (
        8 + size + json.loads(raw[8 : 8 + size])["a.weight.nf12_meta"]["data_offsets"][0] + 4 * r.randrange(8)
    )
    old = struct.unpack_from("<i", raw, at)[0]
    new = r.choice([0, 1, -1, 8, 16, old + 1, old - 1, old + 8, 2 * old, 239, 240, 2**31 - 1, -(2**31)])
    struct.pack_into("<i", raw, at, new)
    return raw


def swap_planes(raw: bytearray, r: random.Random) -> bytearray:
    """Two ranges of the data exchanged: plausible bytes in the wrong place."""
    size = struct.unpack("<Q", raw[:8])[0] + 8
    one, other = r.randrange(size, len(raw) - 16), r.randrange(size, len(raw) - 16)
    raw[one : one + 8], raw[other : other + 8] = raw[other : other + 8], raw[one : one + 8]
    return raw


MUTATIONS: list[Mutation] = [flip_bits, extreme_bytes, cut, insert, edit_header, edit_meta, swap_planes]


def mutated(raw: bytes, r: random.Random) -> bytes:
    mutant = bytearray(raw)
    mutant = r.choice(MUTATIONS)(mutant, r)
    return bytes(flip_bits(mutant, r)) if mutant and r.random() < 0.2 else bytes(mutant)


def outcome(path: Path, raw: bytes) -> str:
    """Read a file as users do: what refused it, or "valid" after decoding each matrix."""
    path.write_bytes(raw)
    try:
        with safe_open(path, "pt") as file:
            contents = inspect(file)
            for name, meta in contents.encoded.items():
                assert meta.nbytes <= len(raw)  # nothing larger than the file is ever allocated ...
                assert meta.rows * meta.columns <= len(
                    raw
                )  # ... but the decoded matrix, at most twice as large
                t = unpack(name, file.get_tensor)
                assert t.decode().shape == (meta.rows, meta.columns)
                if min(t.shape):
                    bits = oracle.decode(
                        (t.sm.numpy(), t.ex.numpy().view(np.uint32), oracle.patterns(t.esc)),
                        t.base,
                        t.shape[1],
                    )
                    np.testing.assert_array_equal(oracle.patterns(t.decode()), bits)
    except SafetensorError:
        return "refused by safetensors"
    except GnomonError:
        return "refused by Gnomon"
    return "valid"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("good") / "x.safetensors", stored()).read_bytes()


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 2**32))
def test_mutated_files_are_refused_or_valid(good: bytes, tmp_path: Path, seed: int) -> None:
    outcome(tmp_path / "x.safetensors", mutated(good, random.Random(seed)))


@settings(deadline=None, max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(position=st.integers(0), value=st.integers(0, 255))
def test_a_changed_byte_is_refused_or_decodes(good: bytes, tmp_path: Path, position: int, value: int) -> None:
    raw = bytearray(good)
    raw[position % len(raw)] = value
    outcome(tmp_path / "x.safetensors", bytes(raw))


@pytest.mark.slow
def test_a_hundred_thousand_mutated_files(good: bytes, tmp_path: Path) -> None:
    """Each kind of end is reached often, and nothing but the two refusals is ever raised."""
    r, seen = random.Random(0), dict.fromkeys(("valid", "refused by safetensors", "refused by Gnomon"), 0)
    for _ in range(100_000):
        seen[outcome(tmp_path / "x.safetensors", mutated(good, r))] += 1
    assert outcome(tmp_path / "x.safetensors", good) == "valid"
    assert min(seen.values()) > 5_000, seen


# ---- what is encoded


def test_the_rule_for_tensors() -> None:
    w = gaussian(256, 256)
    encoded, why = choose(w)
    assert (why, same_bits(encoded.decode(), w)) == ("encoded", True)
    cases = [
        (w.float(), "float32, not bfloat16"),
        (w.half(), "float16, not bfloat16"),
        (w.flatten(), "1 axes, not 2"),
        (w[:255], "65280 elements, fewer than 65536"),
        (
            torch.zeros_like(w),
            r"175.0% of the BF16 bytes, at least 95% (100.0% of the groups are exceptions)",
        ),
        (gaussian(1 << 16, 1), "its planes would take 600.0%"),
    ]
    for tensor, message in cases:
        encoded, why = choose(tensor)
        assert encoded is None
        assert message in why
    assert choose(w[:255], NF12Config(min_elements=100))[0] is not None
    assert choose(w.float(), float32=True)[0] is not None
    assert choose(w.float() + 1e-9, float32=True) == (None, "float32 with values that no bfloat16 equals")


@pytest.mark.parametrize(("exceptions", "kept"), [(2047, False), (2048, True)])
def test_the_fallback_sets_in_at_20_percent_of_the_groups(exceptions: int, kept: bool) -> None:
    """12 + 16 f >= 0.95 * 16 from f = 0.2 on: 2048 of 10,240 groups."""
    w = torch.full((256, 320), 0.125, dtype=torch.bfloat16)
    w.view(-1, 8)[:exceptions, 0] = 0
    assert (choose(w)[0] is None) == kept
