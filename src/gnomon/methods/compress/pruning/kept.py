"""The weights of a model as they were, so that a run that fails leaves them so."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType

import torch
from torch import Tensor, nn

from .targets import matrix


class Originals:
    """Copies of matrices on the CPU, made when each is first written. Leaving the block puts them back.

    With `on_error=True` only an exception does, an interruption by the keyboard too.
    """

    def __init__(self, matrices: Mapping[str, nn.Module], *, on_error: bool = False) -> None:
        self.matrices, self.on_error = matrices, on_error
        self._copies: dict[str, Tensor] = {}

    def of(self, name: str) -> Tensor:
        """A matrix [out, in] as it was, on the CPU where it was written already."""
        return self._copies[name] if name in self._copies else matrix(self.matrices[name])

    @torch.no_grad()
    def write(self, name: str, weight: Tensor) -> None:
        """Put new values into a matrix, in its own dtype and memory."""
        own = matrix(self.matrices[name])
        if name not in self._copies:
            self._copies[name] = own.to("cpu", copy=True)
        own.copy_(weight)

    @torch.no_grad()
    def restore(self) -> None:
        """Put everything back."""
        for name, copy in self._copies.items():
            matrix(self.matrices[name]).copy_(copy)
        self._copies.clear()

    def __enter__(self) -> Originals:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None or not self.on_error:
            self.restore()
        self._copies.clear()
