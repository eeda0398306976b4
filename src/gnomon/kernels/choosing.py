"""Which implementation of a kernel runs, and why: pure, so that `gnomon doctor` can print it.

Implementations are named alike everywhere, fastest first: `triton` on a GPU; on a CPU the instruction sets of
the compiled library; `reference`, plain torch, which runs everywhere.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import ParamSpec, TypeVar

import torch

from ..core.errors import UsageError, unknown
from . import launch, native

WhyNot = Callable[[], str | None]
"""What keeps an implementation from running here, or None."""


@dataclass(frozen=True)
class Choice:
    """An implementation and the reason for it."""

    name: str
    reason: str


def choose(kernel: str, device: str, impl: str, triton: WhyNot, *, lacks: tuple[str, ...] = ()) -> Choice:
    """What runs on a device (`cpu`, `cuda`, …). Launches nothing.

    Args:
        kernel: its name, for messages.
        device: type of the device that the tensors are on.
        impl: `auto`, or the name of an implementation to insist on.
        triton: what keeps its Triton kernel from running.
        lacks: instruction sets that it has no code for, or not for the dtype at hand.

    Raises:
        UsageError: unknown name; one that was asked for and can't run here.
    """
    order = ("triton", *reversed(native.ISAS), "reference")
    if impl not in ("auto", *order):
        raise unknown("implementation", impl, ["auto", *order])

    def why_not(name: str) -> str | None:
        if name == "reference":
            return None
        if name == "triton":
            return triton()
        if device != "cpu":
            return f"it reads CPU memory, not {device}"
        return f"{kernel} has no {name} code for this dtype" if name in lacks else native.why_not(name)

    if impl != "auto":
        if reason := why_not(impl):
            raise UsageError(f"{kernel}: impl={impl!r} was asked for, but {reason}. impl='auto' runs here.")
        return Choice(impl, "asked for")
    skipped: dict[str, str] = {}  # a reason that holds for several is said once
    for name in order if device != "cpu" else order[1:]:  # Triton's interpreter runs only when asked for
        reason = why_not(name)
        if reason is None:
            return Choice(name, "; ".join(skipped.values()) or "fastest")
        skipped.setdefault(reason, f"no {name}: {reason}")
    raise AssertionError("the reference always runs")


_caches: list[Callable[[], None]] = []
P = ParamSpec("P")
T = TypeVar("T")


def remembered(question: Callable[P, T]) -> Callable[P, T]:
    """A question about the machine, asked once: the machine doesn't change. See :func:`forget`."""
    asked = functools.cache(question)
    _caches.append(asked.cache_clear)
    return asked  # type: ignore[return-value]


_remembered = remembered(choose)


def matrix_vector(kernel: str, device: str, dtype: torch.dtype, impl: str) -> Choice:
    """What a matrix-vector kernel runs for an x of this dtype; remembered, as it is asked at every call."""
    lacks: tuple[str, ...] = ()
    if dtype not in native.DTYPES:
        lacks = native.ISAS
    elif dtype != torch.bfloat16:
        lacks = ("avx512_bf16",)
    return _remembered(kernel, device, impl, _no_triton, lacks=lacks)


def _no_triton() -> str | None:
    return launch.why_not(torch.device("cuda"))


def forget() -> None:
    """Ask anew: for tests that change what the machine seems to have."""
    for clear in _caches:
        clear()
