"""What becomes of a pruned model: dense safetensors with a file of masks, or semi-structured tensors in memory.

Here:  a folder that any `from_pretrained` loads; masks as packed bits; 2:4 weights as torch's semi-structured tensors.
Not here: serving. vLLM no longer runs sparse configurations, so the folder is dense.
Limits: zeros take as many bytes as other numbers; a folder shrinks only when it is compressed.

The mask file is safetensors: of each matrix `name` a uint8 tensor [out, ⌈in/8⌉]; bit k of byte b (lowest first) is
input 8 b + k, 1 where the weight is kept. Its metadata holds `format`, `version`, `inputs` (JSON, name -> in) and
`pattern`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.files import written_folder
from gnomon.core.layers import is_conv1d, unwrap

from .quota import Pattern
from .report import PruneReport
from .targets import matrix, prunable

MASKS = "masks.safetensors"
"""Name of the mask file in a folder."""
FORMAT = "gnomon.masks"
ROWS, COLUMNS = 32, 64
"""What the sides of a semi-structured 16-bit matrix are multiples of."""

Masks = Mapping[str, Bool[Tensor, "_ _"]]


def save_pruned(
    model: nn.Module, folder: Path | str, report: PruneReport, *, tokenizer: Any = None, force: bool = False
) -> None:
    """Write dense weights (with the tokenizer, if given) and the mask file; beside and renamed, so never half.

    Args:
        force: replace a folder that is there.

    Raises:
        UsageError: weights that don't fit the masks, masks that break the report's pattern, a folder that is there.
    """
    root = unwrap(model)
    _require_fit(root, report.masks)
    if report.pattern is not None and len(set(_kept_of(report.masks, report.pattern.of).values())) == 1:
        require_pattern(report.masks, report.pattern)
    if not callable(getattr(root, "save_pretrained", None)):
        raise UsageError(
            f"{type(root).__name__} has no save_pretrained. Save its state_dict, and masks with save_masks."
        )
    with written_folder(Path(folder), force=force) as beside:
        root.save_pretrained(beside)  # type: ignore[operator]
        if tokenizer is not None:
            tokenizer.save_pretrained(beside)
        save_masks(report.masks, beside / MASKS, pattern=report.pattern)


def save_masks(masks: Masks, path: Path, *, pattern: Pattern | None = None) -> None:
    """Write the mask file."""
    packed = {name: _packed(mask) for name, mask in masks.items()}
    inputs = {name: mask.shape[1] for name, mask in masks.items()}
    metadata = {"format": FORMAT, "version": "1", "inputs": json.dumps(inputs), "pattern": str(pattern or "")}
    save_file(packed, path, metadata=metadata)


def load_masks(path: Path | str) -> dict[str, Bool[Tensor, "_ _"]]:
    """Read a mask file, or the one in a folder.

    Raises:
        GnomonError: no such file, or not one of these.
    """
    path = Path(path)
    path = path / MASKS if path.is_dir() else path
    if not path.is_file():
        raise GnomonError(
            f"There is no mask file {path.name} in {path.parent.name}. Was the model pruned here?"
        )
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            inputs = json.loads(metadata.get("inputs", "null"))
            packed = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, ValueError) as error:
        raise GnomonError(f"{path.name} is damaged: {error}.") from None
    if metadata.get("format") != FORMAT or metadata.get("version") != "1" or not isinstance(inputs, dict):
        raise GnomonError(f"{path.name} is no mask file of version 1, as gnomon writes it.")
    masks = {}
    for name, bits in packed.items():
        n = inputs.get(name)
        if type(n) is not int or bits.dtype != torch.uint8 or bits.ndim != 2 or bits.shape[1] != -(-n // 8):
            raise GnomonError(f"{path.name} is damaged: the mask of {name} doesn't fit its {n} inputs.")
        masks[name] = torch.from_numpy(
            np.unpackbits(bits.numpy(), axis=1, count=n, bitorder="little").astype(bool)
        )
    return masks


def require_pattern(masks: Masks, pattern: Pattern) -> None:
    """Refuse masks that keep more than N of some group of M.

    Raises:
        UsageError: naming the first.
    """
    for name, most in _kept_of(masks, pattern.of).items():
        if most > pattern.keep:
            raise UsageError(
                f"The mask of {name} keeps {most} of some {pattern.of} neighbouring weights, but {pattern} allows "
                f"{pattern.keep}. Prune with pattern='{pattern}' and a uniform allocation."
            )


def to_semi_structured(model: nn.Module, masks: Masks | None = None) -> list[str]:
    """Hold 2:4 weights as torch's semi-structured tensors, for inference on GPUs that multiply them; in place.

    Args:
        masks: of `PruneReport`; by default every prunable matrix whose zeros have the pattern.

    Returns:
        names of the layers that were changed.

    Raises:
        UsageError: before any change, where a matrix isn't on a GPU that can, isn't 16-bit, transposed (Conv1D), of
            odd sides, or not 2:4.
    """
    root = unwrap(model)
    matrices = prunable(root)
    pattern = Pattern(2, 4)
    if masks is None:
        fit = {
            name: matrix(module) != 0 for name, module in matrices.items() if matrix(module).shape[1] % 4 == 0
        }
        kept = _kept_of(fit, 4)
        masks = {name: mask for name, mask in fit.items() if kept[name] <= 2}
        if not masks:
            raise UsageError("No matrix of the model has a 2:4 pattern. Prune with pattern='2:4' first.")
    require_pattern(masks, pattern)
    _require_fit(root, masks)
    for name in masks:
        _require_sparse_kernels(name, matrices[name])
    for name in masks:
        module = matrices[name]
        sparse = torch.sparse.to_sparse_semi_structured(matrix(module).contiguous())
        module.weight = nn.Parameter(sparse, requires_grad=False)
    return list(masks)


def _require_sparse_kernels(name: str, module: nn.Module) -> None:
    weight = matrix(module)
    out, inputs = weight.shape
    if weight.device.type != "cuda" or torch.cuda.get_device_capability(weight.device) < (8, 0):
        raise UsageError(
            f"{name} is on {weight.device}, but semi-structured tensors need an NVIDIA GPU of compute capability "
            "8.0 or more. Keep the dense weights, or move the model there first."
        )
    if is_conv1d(module):
        raise UsageError(
            f"{name} stores its weight transposed (Conv1D), which the sparse product doesn't take."
        )
    if weight.dtype not in (torch.float16, torch.bfloat16):
        raise UsageError(f"{name} is {weight.dtype}. Convert the model to bfloat16 or float16 first.")
    if out % ROWS or inputs % COLUMNS:
        raise UsageError(
            f"{name} is {out} × {inputs}, not multiples of {ROWS} and {COLUMNS}. Pass masks= without it."
        )


def _require_fit(root: nn.Module, masks: Masks) -> None:
    """Refuse masks that aren't those of the model's weights."""
    for name, mask in masks.items():
        weight = matrix(root.get_submodule(name))
        if weight.shape != mask.shape:
            raise UsageError(f"The mask of {name} is {list(mask.shape)}, its matrix {list(weight.shape)}.")
        if bool((weight[~mask.to(weight.device)] != 0).any()):
            raise UsageError(
                f"{name} has weights where its mask has none: was it trained since it was pruned? Multiply the mask in "
                "again, or prune anew."
            )


def _kept_of(masks: Masks, m: int) -> dict[str, int]:
    """Most weights that a group of m keeps, by matrix; all m where the inputs don't divide into groups."""
    return {
        name: int(mask.reshape(len(mask), -1, m).sum(-1).max()) if mask.shape[1] % m == 0 else m
        for name, mask in masks.items()
    }


def _packed(mask: Tensor) -> Tensor:
    return torch.from_numpy(np.packbits(mask.cpu().numpy(), axis=1, bitorder="little"))
