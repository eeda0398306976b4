"""When a kernel may be called directly, past torch's dispatcher.

A custom operator costs some 20 µs a call in eager mode, which two hundred linear layers a token turn into
milliseconds. It is needed where torch has to know the call: while compiling, exporting or tracing, for fake, meta
and subclassed tensors, and to refuse a gradient.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.utils._python_dispatch import _get_current_dispatch_mode


def is_plain(x: Tensor) -> bool:
    """Whether x holds its numbers at an address and no one traces, transforms or differentiates."""
    return (
        type(x) in (Tensor, torch.nn.Parameter)
        and x.device.type != "meta"
        and not (x.requires_grad and torch.is_grad_enabled())
        and not is_traced()
        and not _transforms()
        and not x.is_neg()  # a view that negates when it is read, which memory doesn't show
    )


def is_traced() -> bool:
    """Whether operations are recorded: torch.compile, torch.export, torch.jit.trace, a dispatch mode."""
    return (
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or _get_current_dispatch_mode() is not None
    )


def is_transformed() -> bool:
    """Whether torch.func or forward-mode AD is at work: tensors then carry more than their numbers.

    While compiling it is the compiler that sees to that.
    """
    return not torch.compiler.is_compiling() and _transforms()


def _transforms() -> bool:
    return torch._C._functorch.peek_interpreter_stack() is not None or forward_ad._current_level >= 0
