"""Checkpoints of a training loop: written beside and renamed, so that one whole checkpoint always stands.

Layout: `<folder>/<name>-<step>/state.pt`, one `torch.save` of tensors, numbers, strings, lists and
dictionaries, read back with `weights_only=True`. The one before is removed only after the new one is in place.
"""

from __future__ import annotations

import pickle
import random
import shutil
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .errors import GnomonError
from .files import fsync_file, require_space, written_folder

_PLAIN = (bool, int, float, str, type(None), torch.dtype, torch.device)


def save(folder: Path, name: str, step: int, state: Mapping[str, Any]) -> None:
    """Write the state of `step` and remove older ones of the same name.

    Raises:
        GnomonError: if the disk lacks the space, or the state holds what `weights_only=True` would not load.
    """
    folder.mkdir(parents=True, exist_ok=True)
    require_space(folder, _size(state, "state") + (1 << 20))
    with written_folder(folder / f"{name}-{step:08d}", force=True) as beside:
        torch.save(dict(state), beside / "state.pt")
        fsync_file(beside / "state.pt")
    for old in _standing(folder, name)[:-1]:
        shutil.rmtree(old)


def load(folder: Path, name: str) -> dict[str, Any] | None:
    """The newest state of that name, on the CPU, or None if there is none.

    Raises:
        GnomonError: if the file is damaged.
    """
    standing = _standing(folder, name)
    if not standing:
        return None
    path = standing[-1] / "state.pt"
    try:
        state: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise GnomonError(
            f"{path} can't be read ({str(error).splitlines()[0]}). The file is damaged; remove "
            f"{path.parent} and training starts from its beginning."
        ) from None
    return state


def sweep(folder: Path, name: str) -> None:
    """Remove what a killed writer left half-written."""
    for left in folder.glob(f".{name}-*.tmp"):
        shutil.rmtree(left)


def _standing(folder: Path, name: str) -> list[Path]:
    """Whole checkpoints, oldest first."""
    return sorted(folder.glob(f"{name}-" + "[0-9]" * 8))


def _size(value: Any, where: str) -> int:
    """Bytes of all tensors in a nested state (shared ones count each time); refuses what can't be loaded back."""
    if isinstance(value, Tensor):
        return value.nbytes
    kind = type(value)  # exact: subclasses of float such as numpy.float64 are pickled by another way
    if kind in _PLAIN:
        return 0
    if kind in (dict, OrderedDict):
        return sum(_size(k, where) + _size(v, f"{where}[{k!r}]") for k, v in value.items())
    if kind in (list, tuple):
        return sum(_size(v, f"{where}[{i}]") for i, v in enumerate(value))
    raise GnomonError(
        f"{where} is a {kind.__module__}.{kind.__qualname__}, which a checkpoint can't hold: it is read back "
        "without running code. Give tensors, numbers, strings, lists and dictionaries in state_dict()."
    )


def random_states() -> dict[str, Any]:
    """States of the global generators of Python, NumPy and torch (CPU and every CUDA device in use)."""
    kind, keys, *rest = np.random.get_state(legacy=True)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    return {
        "python": random.getstate(),
        "numpy": (kind, keys.tolist(), *rest),  # type: ignore[union-attr]
        "torch": torch.get_rng_state(),
        "cuda": cuda,
    }


def set_random_states(states: Mapping[str, Any]) -> None:
    """Put back what :func:`random_states` gave; states of CUDA devices that aren't there are left out."""
    random.setstate(states["python"])
    kind, keys, *rest = states["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
    torch.set_rng_state(states["torch"].clone())
    for device, state in enumerate(states["cuda"][: torch.cuda.device_count()]):
        torch.cuda.set_rng_state(state.clone(), device)
