"""Whether Triton kernels can run on a device, and if not, why: asked by choosers, launching nothing.

Here:  the reasons, without importing Triton unless it is installed.
Not here: the choice between kernels (each kernel's folder).
"""

from __future__ import annotations

import importlib.util

import torch

from gnomon.core.errors import GnomonError, MissingExtra

OLDEST = (8, 0)  # the first NVIDIA generation with BF16 arithmetic


def interpreted() -> bool:
    """Whether Triton runs its kernels in Python (TRITON_INTERPRET=1, read once, when kernels are defined)."""
    if importlib.util.find_spec("triton") is None:
        return False
    import triton

    return bool(triton.knobs.runtime.interpret)


def why_not(device: torch.device) -> str | None:
    """Why Triton kernels can't run on tensors of this device, or None if they can."""
    if importlib.util.find_spec("triton") is None:
        return "Triton is not installed (pip install 'gnomon[gpu]')"
    if interpreted():
        return None
    if device.type != "cuda":
        return f"the tensors are on {device.type}, and Triton kernels run on CUDA devices"
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    capability = torch.cuda.get_device_capability(device)
    if torch.version.hip is None and capability < OLDEST:
        return f"the device has compute capability {capability[0]}.{capability[1]}; BF16 needs 8.0"
    return None


def require(device: torch.device, kernel: str) -> None:
    """Raise the reason if Triton kernels can't run on this device.

    Raises:
        MissingExtra: Triton is not installed.
        GnomonError: it is, but not for this device.
    """
    if importlib.util.find_spec("triton") is None:
        raise MissingExtra("Triton", "gpu", kernel)
    if reason := why_not(device):
        raise GnomonError(
            f"{kernel} can't run here: {reason}. The CPU kernels and the reference run anywhere."
        )
