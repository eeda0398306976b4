"""Stored forms of a model's weights: which stored tensors stand for which of its own.

The *own* tensors of a model are those of its ordinary checkpoint. In the ordinary form each is stored as
itself; a form such as NF12 stores several tensors in place of one and gives that one back, bit for bit.
A form is what makes one reader enough for converting back, checking and comparing. A method that changes the
model itself, such as low rank, has one too where Transformers alone must not load the result; there is no way
back from that one.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from .checkpoints import Checkpoint
from .files import canonical_json
from .manifest import Digest
from .safe_files import CODES, DTYPES, Entry, as_bytes

Groups = Mapping[str, tuple[str, ...]]
"""Name of an own tensor -> names of the stored tensors that stand for it."""


@dataclass(frozen=True, kw_only=True)
class Form:
    """How a model's own tensors are stored."""

    name: str
    group: Callable[[Checkpoint], Groups]
    """Finds the groups and refuses those whose headers don't fit together. Every stored tensor is in one."""
    decode: Callable[[str, Mapping[str, Tensor]], Tensor]
    """The own tensor of this name from its stored ones. Checks their values first, and raises GnomonError."""
    describe: Callable[[str, Mapping[str, Tensor]], Mapping[str, float]] = lambda name, stored: {}
    """Figures about one tensor that `gnomon check` prints."""
    own_name: Callable[[str], str] = lambda stored: stored
    """Name of the own tensor that a stored one belongs to."""
    parts: int = 1
    """Most stored tensors per own tensor."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """What the form adds to `config.json`."""
    metadata: Mapping[str, str] = field(default_factory=dict)
    """What it adds to the metadata of its safetensors files."""
    instead: str = ""
    """For a form of a model that was itself changed: what to do, as there are no former weights to go back to."""

    @property
    def lossless(self) -> bool:
        """The own tensors are those that went in; else they are the stored ones."""
        return not self.instead


PLAIN = Form(
    name="dense",
    group=lambda checkpoint: {name: (name,) for name in checkpoint.entries},
    decode=lambda name, stored: stored[name],
)
"""Every tensor as itself."""


class Weights:
    """A checkpoint's own tensors, read through its form."""

    def __init__(self, checkpoint: Checkpoint, form: Form, digests: Mapping[str, Digest]) -> None:
        """
        Args:
            digests: the manifest's, empty where there is none. A tensor recorded as float32 that a form stores
                in a narrower dtype is widened when it is read.

        Raises:
            GnomonError: if the stored tensors don't fit together.
        """
        self.form = form
        self._entries = checkpoint.entries
        self._digests = digests
        self.groups = form.group(checkpoint)
        self.shards = _shards(checkpoint, self.groups)
        """Names of the own tensors that lie in each shard, by the shard of the first stored one."""

    def stored(self, name: str) -> dict[str, Tensor]:
        """The stored tensors of one own tensor."""
        return {part: self._entries[part].read() for part in self.groups[name]}

    @property
    def nbytes(self) -> int:
        """Bytes of the own tensors; where the manifest is silent, of what stands for them."""
        return sum(
            self._digests[name].nbytes if name in self._digests else self.stored_bytes(name)
            for name in self.groups
        )

    def stored_bytes(self, name: str) -> int:
        return sum(self._entries[part].nbytes for part in self.groups[name])

    def decode(self, name: str, stored: Mapping[str, Tensor]) -> Tensor:
        tensor = self.form.decode(name, stored)
        recorded = self._digests.get(name)
        return tensor.to(DTYPES[recorded.dtype]) if recorded and recorded.dtype == "F32" else tensor

    def read(self, name: str) -> Tensor:
        """One own tensor."""
        return self.decode(name, self.stored(name))

    def entry(self, name: str) -> Entry | None:
        """Where the own tensor lies if it is stored as itself."""
        return self._entries[name] if self.groups[name] == (name,) else None


def _shards(checkpoint: Checkpoint, groups: Groups) -> list[list[str]]:
    first = {parts[0]: name for name, parts in groups.items()}
    return [[first[part] for part in shard.entries if part in first] for shard in checkpoint.shards]


def digest(tensor: Tensor) -> Digest:
    """What identifies a tensor: dtype, shape and the SHA-256 of its bytes."""
    return Digest(CODES[tensor.dtype], tuple(tensor.shape), hashlib.sha256(as_bytes(tensor)).hexdigest())


def combined(digests: Mapping[str, Digest]) -> str:
    """One SHA-256 for all weights of a model: equal weights under equal names give equal ones, however stored."""
    table = {name: one.as_json() for name, one in digests.items()}
    return hashlib.sha256(canonical_json(table).encode()).hexdigest()
