"""NF12 in safetensors: names, the meta row, the rule for what is encoded, and checks on files nobody vouches for.

A matrix `X.weight` is stored as four tensors in one file, whose metadata holds {"format": "pt", "nf12": "planes-v1"}:

    X.weight.nf12_sm    U8   [N, K_pad]
    X.weight.nf12_ex    I32  [N, K_pad / 8]
    X.weight.nf12_esc   BF16 [E, 8]
    X.weight.nf12_meta  I32  [8] = version, base, N, K, K_pad, E, G, layout id

Reading happens in three steps. :func:`inspect` looks at names, dtypes, shapes and the 32-byte meta rows only, so
that a file is refused before anything large is allocated; :func:`unpack` reads the planes of one matrix; it ends
with `NF12Tensor.validate`, which looks at every index.

Source: the NF12 card, "Interface" (the layout is this project's own).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import astuple, dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from gnomon.core.errors import GnomonError
from gnomon.kernels.nf12.reference import GROUP

from .config import NF12Config
from .encode import Plan, check_matrix, emit, holds_bf16, plan
from .tensor import BASES, NF12Tensor, padded

VERSION = 1
LAYOUT = "planes-v1"
LAYOUT_ID = 1
"""What the last field of the meta row says for planes-v1."""
METADATA = {"format": "pt", "nf12": LAYOUT}
"""`__metadata__` of every file with NF12 planes."""
PLANES = ("nf12_sm", "nf12_ex", "nf12_esc", "nf12_meta")
_PREFIX = "nf12_"


@runtime_checkable
class Slice(Protocol):
    """What safetensors tells about a tensor without reading it."""

    def get_dtype(self) -> str: ...
    def get_shape(self) -> Sequence[int]: ...


@runtime_checkable
class File(Protocol):
    """An open safetensors file (`safetensors.safe_open`)."""

    def keys(self) -> Iterable[str]: ...
    def metadata(self) -> Mapping[str, str] | None: ...
    def get_slice(self, name: str) -> Any: ...  # a Slice, in a form the type checker can't see
    def get_tensor(self, name: str) -> Tensor: ...


@dataclass(frozen=True)
class Meta:
    """The meta row, in its order. Every field but `base`, `rows`, `columns` and `exceptions` follows from them."""

    version: int
    base: int
    rows: int
    columns: int
    padded: int
    exceptions: int
    group: int
    layout: int

    @classmethod
    def of(cls, t: NF12Tensor) -> Meta:
        return cls(VERSION, t.base, *t.shape, padded(t.shape[1]), len(t.esc), GROUP, LAYOUT_ID)

    @classmethod
    def parse(cls, name: str, row: Tensor) -> Meta:
        """From the stored row of matrix `name`.

        Raises:
            GnomonError: not eight int32, or a field that no encoder of this version writes.
        """
        if row.dtype != torch.int32 or tuple(row.shape) != (8,):
            raise _damaged(name, f"its meta row is {row.dtype} {tuple(row.shape)}, not torch.int32 (8,)")
        meta = cls(*row.tolist())
        if meta.version != VERSION or meta.layout != LAYOUT_ID:
            raise GnomonError(
                f"{name} has NF12 version {meta.version}, layout {meta.layout}; this Gnomon reads version "
                f"{VERSION}, layout {LAYOUT_ID} ({LAYOUT}). Read it with the Gnomon that wrote it, or update."
            )
        if meta.base not in BASES:
            raise _damaged(name, f"base {meta.base} lies outside [{BASES.start}, {BASES.stop - 1}]")
        if meta.group != GROUP:
            raise _damaged(name, f"its groups have {meta.group} columns, not {GROUP}")
        if min(meta.rows, meta.columns, meta.exceptions) < 0:
            raise _damaged(
                name, f"a size is negative: {meta.rows} x {meta.columns}, {meta.exceptions} exceptions"
            )
        if meta.padded != padded(meta.columns):
            raise _damaged(
                name, f"{meta.columns} columns fill up to {padded(meta.columns)}, not to {meta.padded}"
            )
        if meta.exceptions > (groups := meta.rows * meta.padded // GROUP):
            raise _damaged(name, f"{meta.exceptions} exceptions are more than its {groups} groups")
        return meta

    @property
    def row(self) -> Tensor:
        return torch.tensor(astuple(self), dtype=torch.int32)

    @property
    def forms(self) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Plane -> (dtype as safetensors spells it, shape)."""
        return {
            "nf12_sm": ("U8", (self.rows, self.padded)),
            "nf12_ex": ("I32", (self.rows, self.padded // GROUP)),
            "nf12_esc": ("BF16", (self.exceptions, GROUP)),
            "nf12_meta": ("I32", (8,)),
        }

    @property
    def nbytes(self) -> int:
        """Bytes of the three planes."""
        return planes_nbytes((self.rows, self.columns), self.exceptions)


@dataclass(frozen=True)
class Contents:
    """What a file holds, known from its header and meta rows."""

    encoded: dict[str, Meta]
    """Name of each encoded matrix -> its meta row."""
    raw: tuple[str, ...]
    """Names of tensors stored as they are."""


def pack(name: str, t: NF12Tensor) -> dict[str, Tensor]:
    """The four tensors that a file stores for matrix `name`."""
    planes = (t.sm, t.ex, t.esc, Meta.of(t).row.to(t.device))
    return {f"{name}.{plane}": tensor for plane, tensor in zip(PLANES, planes, strict=True)}


def unpack(name: str, get: Callable[[str], Tensor]) -> NF12Tensor:
    """The matrix `name`, with every index checked.

    Args:
        name: as passed to :func:`pack`.
        get: gives a stored tensor by its full name, such as `get_tensor` of an open file or `dict.__getitem__`.

    Raises:
        GnomonError: planes that contradict the meta row or each other, or an index beyond the verbatim rows.
    """
    meta = Meta.parse(name, get(f"{name}.nf12_meta"))
    sm, ex, esc = (get(f"{name}.{plane}") for plane in PLANES[:3])
    t = NF12Tensor(sm, ex, esc, meta.base, (meta.rows, meta.columns))
    if len(t.esc) != meta.exceptions:
        raise _damaged(name, f"it has {len(t.esc)} verbatim rows, its meta row says {meta.exceptions}")
    try:
        t.validate()
    except GnomonError as error:
        raise GnomonError(f"{name}: {error}") from None
    return t


def inspect(file: File) -> Contents:
    """What an open file holds; reads its header and 32 bytes for each encoded matrix.

    Args:
        file: from `safetensors.safe_open`, which itself refuses headers that point outside the file.

    Raises:
        GnomonError: another layout; planes missing, unknown, of the wrong dtype or shape; a matrix that is there
            both raw and encoded.
    """
    keys = set(file.keys())
    planes = {key for key in keys if is_plane(key)}
    stated = (file.metadata() or {}).get("nf12")
    if stated != LAYOUT:
        raise GnomonError(
            f"The file's metadata says nf12={stated!r}; this Gnomon reads {LAYOUT!r}. "
            + ("Update Gnomon, or convert again from the original." if stated else "It is no NF12 file.")
        )
    encoded: dict[str, Meta] = {}
    for name in sorted({key.rpartition(".")[0] for key in planes}):
        own = {f"{name}.{plane}" for plane in PLANES}
        if missing := sorted(own - keys):
            raise _damaged(name, f"{', '.join(missing)} is missing")
        if name in keys:
            raise _damaged(name, "it is stored both as it is and encoded")
        found = {plane: _form(file, f"{name}.{plane}") for plane in PLANES}
        if found["nf12_meta"] != ("I32", (8,)):
            raise _damaged(name, f"its meta row is {_spelled(found['nf12_meta'])}, not I32 [8]")
        meta = encoded[name] = Meta.parse(name, file.get_tensor(f"{name}.nf12_meta"))
        for plane, form in meta.forms.items():
            if found[plane] != form:
                raise _damaged(
                    name, f"{plane} is {_spelled(found[plane])}; its meta row asks for {_spelled(form)}"
                )
        planes -= own
    if planes:
        raise GnomonError(
            f"The file holds {sorted(planes)[0]}, which is no plane of {LAYOUT} ({', '.join(PLANES)}). The file is "
            "damaged or from a newer Gnomon."
        )
    return Contents(encoded, tuple(sorted(key for key in keys if not is_plane(key))))


def is_plane(key: str) -> bool:
    """Whether a stored name belongs to an encoded matrix."""
    return key.rpartition(".")[2].startswith(_PREFIX)


def choose(
    w: Tensor, config: NF12Config | None = None, *, float32: bool = False
) -> tuple[NF12Tensor | None, str]:
    """(the encoded matrix, or None for one to keep as it is; why): the rule for every tensor of a checkpoint.

    The size is known before anything is encoded, so keeping a matrix costs no memory.

    Args:
        w: any tensor.
        config: thresholds.
        float32: also take a float32 matrix if its values are all bfloat16. Its dtype isn't stored.
    """
    config = config or NF12Config()
    if reason := why_raw(
        w.shape, torch.bfloat16 if float32 and w.dtype == torch.float32 else w.dtype, config
    ):
        return None, reason
    check_matrix(w)
    if w.dtype == torch.float32 and not holds_bf16(w):
        return None, "float32 with values that no bfloat16 equals"
    best = plan(w)
    if reason := why_not_worth(tuple(w.shape), best, config):
        return None, reason
    return emit(w, best.base), "encoded"


def why_raw(shape: Sequence[int], dtype: torch.dtype, config: NF12Config) -> str:
    """Why a tensor of this form is never encoded; "" for one whose values have to decide."""
    if dtype != torch.bfloat16:
        return f"{str(dtype).removeprefix('torch.')}, not bfloat16"
    if len(shape) != 2:
        return f"{len(shape)} axes, not 2"
    if (elements := shape[0] * shape[1]) < max(1, config.min_elements):
        return f"{elements} elements, fewer than {max(1, config.min_elements)}"
    return ""


def why_not_worth(shape: tuple[int, ...], best: Plan, config: NF12Config) -> str:
    """Why planes of this size are not worth storing; "" if they are."""
    share = planes_nbytes(shape, best.exceptions) / (2 * shape[0] * shape[1])
    if share < config.raw_share:
        return ""
    groups = shape[0] * padded(shape[1]) // GROUP
    return (
        f"its planes would take {share:.1%} of the BF16 bytes, at least {config.raw_share:.0%} "
        f"({best.exceptions / groups:.1%} of the groups are exceptions)"
    )


def planes_nbytes(shape: tuple[int, ...], exceptions: int) -> int:
    """Bytes of the planes: 12 bits a padded weight, 16 bytes an exception."""
    return shape[0] * padded(shape[1]) * 3 // 2 + 2 * GROUP * exceptions


def _form(file: File, key: str) -> tuple[str, tuple[int, ...]]:
    part: Slice = file.get_slice(key)
    return part.get_dtype(), tuple(part.get_shape())


def _spelled(form: tuple[str, tuple[int, ...]]) -> str:
    return f"{form[0]} {list(form[1])}"


def _damaged(name: str, what: str) -> GnomonError:
    return GnomonError(f"{name}: {what}. The file is damaged or hostile; fetch or convert it again.")
