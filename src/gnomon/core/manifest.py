"""`gnomon.json`: what was done to a model, step by step, and what its own tensors have to be.

```json
{"format_version": 1, "form": "nf12",
 "steps": [{"method": "nf12", "settings": {}, "input": {"name": "…", "sha256": "…"}, "version": "0.1.0"}],
 "tensors": {"model.norm.weight": {"dtype": "BF16", "shape": [576], "sha256": "…"}}}
```

`tensors` describes the model's own tensors as its form gives them back, so a lossless form is checked against
the very weights that went in. No paths, hosts or users are recorded. The file is untrusted when read.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .checkpoints import MANIFEST, checked, read_object
from .errors import GnomonError
from .files import dump_json
from .safe_files import DTYPES, damaged, is_sizes

FORMAT_VERSION = 1
_SHA256 = re.compile(r"[0-9a-f]{64}")


@dataclass(frozen=True)
class Digest:
    """What identifies a tensor."""

    dtype: str
    """Code of the safetensors format."""
    shape: tuple[int, ...]
    sha256: str
    """Of its bytes in row-major order."""

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.numel * DTYPES[self.dtype].itemsize

    def as_json(self) -> dict[str, Any]:
        return {"dtype": self.dtype, "shape": list(self.shape), "sha256": self.sha256}


@dataclass(frozen=True)
class Step:
    """One method that was applied."""

    method: str
    settings: Mapping[str, Any]
    input_name: str
    """Name of the model it was applied to; of a folder the last component."""
    input_sha256: str
    """`core.forms.combined` of that model's own tensors."""
    version: str
    """Gnomon's."""

    def as_json(self) -> dict[str, Any]:
        return {
            "method": self.method,
            "settings": dict(self.settings),
            "input": {"name": self.input_name, "sha256": self.input_sha256},
            "version": self.version,
        }


@dataclass(frozen=True)
class Manifest:
    """The content of `gnomon.json`."""

    form: str
    steps: tuple[Step, ...]
    tensors: Mapping[str, Digest]

    def dump(self) -> str:
        return dump_json(
            {
                "format_version": FORMAT_VERSION,
                "form": self.form,
                "steps": [step.as_json() for step in self.steps],
                "tensors": {name: digest.as_json() for name, digest in self.tensors.items()},
            }
        )


def find_manifest(folder: Path) -> Manifest | None:
    """The manifest of a folder, or None where there is no `gnomon.json`.

    Raises:
        GnomonError: a file of another format version, or one that is damaged.
    """
    folder = folder.resolve()
    path = checked(folder, MANIFEST)
    if not path.exists():
        return None
    content = read_object(path)
    version = content.get("format_version")
    if version != FORMAT_VERSION:
        raise GnomonError(
            f"{path} has format version {version!r}, this Gnomon reads {FORMAT_VERSION}. Use the version of Gnomon "
            "that wrote it, or a newer one."
        )
    try:
        steps = tuple(_step(one) for one in content["steps"])
        tensors = {name: _digest(one) for name, one in content["tensors"].items()}
        return Manifest(_text(content["form"]), steps, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise damaged(path, f"it is not as documented ({type(error).__name__}: {error})") from None


def read_manifest(folder: Path) -> Manifest:
    """As :func:`find_manifest`, but the file must be there."""
    found = find_manifest(folder)
    if found is None:
        raise GnomonError(f"{folder} holds no {MANIFEST}, so `gnomon apply` did not write it.")
    return found


def _step(value: Mapping[str, Any]) -> Step:
    settings = value["settings"]
    if not isinstance(settings, dict):
        raise TypeError("settings is no table")
    source = value["input"]
    return Step(
        _text(value["method"]),
        settings,
        _text(source["name"]),
        _sha256(source["sha256"]),
        _text(value["version"]),
    )


def _digest(value: Mapping[str, Any]) -> Digest:
    dtype, shape = value["dtype"], value["shape"]
    if dtype not in DTYPES:
        raise ValueError(f"unknown dtype {dtype!r}")
    if not is_sizes(shape):
        raise TypeError("shape is no list of sizes")
    digest = Digest(dtype, tuple(shape), _sha256(value["sha256"]))
    if digest.nbytes >= 2**63:
        raise ValueError(f"shape {shape} is beyond any memory")
    return digest


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


def _sha256(value: Any) -> str:
    if not isinstance(value, str) or not _SHA256.fullmatch(value):
        raise ValueError(f"{value!r} is no SHA-256")
    return value
