"""`gnomon check`: does a folder that `gnomon apply` wrote still hold what it says, bit for bit?"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from .applying import Source
from .errors import GnomonError
from .files import dump_json
from .forms import PLAIN, Weights, digest
from .manifest import Digest, Step, find_manifest, read_manifest

MOST_LISTED = 10


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What a check read and found; a check that finds a difference raises instead."""

    folder: str
    form: str
    steps: tuple[Step, ...]
    tensors: int
    """The model's own."""
    converted: int
    """Those that are not stored as themselves; where the method changed the model, those that it put in."""
    weights: int
    stored_bytes: int
    bits_per_weight: float
    against: str | None
    """A model whose own tensors were found equal, bit for bit."""
    per_tensor: Mapping[str, Mapping[str, float]]
    """Figures of the form about each converted tensor."""
    seconds: float

    def to_json(self) -> str:
        return dump_json(asdict(self))

    def rows(self) -> list[tuple[str, str]]:
        """A table of two columns."""
        kept = self.tensors - self.converted
        table = [
            ("folder", self.folder),
            ("steps", " -> ".join(step.method for step in self.steps)),
            ("tensors", f"{self.tensors:,} ({self.converted:,} in {self.form}, {kept:,} as they were)"),
            ("weights", f"{self.weights:,} in {self.stored_bytes:,} bytes"),
            ("bits per weight", f"{self.bits_per_weight:.3f}"),
            ("SHA-256", f"all {self.tensors:,} as recorded"),
        ]
        for name in dict.fromkeys(key for figures in self.per_tensor.values() for key in figures):
            values = [figures[name] for figures in self.per_tensor.values() if name in figures]
            spread = f"{min(values):.4g} to {max(values):.4g}, median {statistics.median(values):.4g}"
            table.append((f"{self.form} {name.replace('_', ' ')}", spread))
        if self.against is not None:
            table.append(("against", f"{self.against}: equal, bit for bit"))
        return table


def check_folder(
    source: Source, against: Source | None = None, progress: Callable[[str], None] = lambda line: None
) -> CheckReport:
    """Read every tensor of a folder, decode it and compare it with what `gnomon.json` records.

    Args:
        against: a model whose own tensors must be equal, too (the one that went in, for a lossless form).

    Raises:
        GnomonError: a tensor that is missing, unknown, undecodable or different; the first ten are named.
    """
    began = time.perf_counter()
    manifest = read_manifest(source.folder)
    form = source.form or PLAIN
    weights = Weights(source.checkpoint, form, manifest.tensors)
    wrong = _unpaired(weights.groups, manifest.tensors, "gnomon.json")
    if manifest.form != form.name:
        wrong.append(f"stored as {form.name}, but gnomon.json says {manifest.form!r}")
    if against is not None:
        recorded = find_manifest(against.folder)
        theirs = Weights(against.checkpoint, against.form or PLAIN, recorded.tensors if recorded else {})
        wrong += _unpaired(weights.groups, theirs.groups, against.name)
    figures = dict[str, Mapping[str, float]]()
    for name in weights.groups:
        stored = weights.stored(name)
        try:
            found = digest(weights.decode(name, stored))
            if weights.entry(name) is None or not form.lossless:
                figures[name] = form.describe(name, stored)
        except GnomonError as error:
            wrong.append(f"{name}: {error}")
            continue
        if name in manifest.tensors and found != manifest.tensors[name]:
            wrong.append(f"{name}: {_difference(manifest.tensors[name], found)} in gnomon.json")
        if against is not None and name in theirs.groups and (other := digest(theirs.read(name))) != found:
            wrong.append(f"{name}: {_difference(other, found)} in {against.name}")
        progress(name)
    if wrong:
        rest = f"\n  and {len(wrong) - MOST_LISTED} more" if len(wrong) > MOST_LISTED else ""
        raise GnomonError(
            f"{source.folder} is not what it should be:\n  " + "\n  ".join(wrong[:MOST_LISTED]) + rest
        )
    count, nbytes = sum(one.numel for one in manifest.tensors.values()), source.checkpoint.nbytes
    return CheckReport(
        folder=source.name,
        form=form.name,
        steps=manifest.steps,
        tensors=len(weights.groups),
        converted=sum(weights.entry(name) is None or bool(found) for name, found in figures.items()),
        weights=count,
        stored_bytes=nbytes,
        bits_per_weight=8 * nbytes / max(count, 1),
        against=against.name if against is not None else None,
        per_tensor=figures,
        seconds=time.perf_counter() - began,
    )


def _unpaired(ours: Mapping[str, Any], theirs: Mapping[str, Any], where: str) -> list[str]:
    return [f"{name}: not in {where}" for name in ours if name not in theirs] + [
        f"{name}: in {where}, but not here" for name in theirs if name not in ours
    ]


def _difference(expected: Digest, found: Digest) -> str:
    if (expected.dtype, expected.shape) != (found.dtype, found.shape):
        return f"{found.dtype} {list(found.shape)} here, {expected.dtype} {list(expected.shape)}"
    return f"SHA-256 {found.sha256[:12]}… here, {expected.sha256[:12]}…"
