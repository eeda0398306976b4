r"""What calibration leaves of a matrix's inputs: ‖X_j‖² per input, and Σ x xᵀ where a pruner needs it.

Here:  sums by hooks, padding left out, shared between layers that read the same tensor.
Not here: batches and their checks (`compress.calibration`), how the layers are run (`walk`).

Shapes: n inputs of a matrix.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError

from ..calibration import Batch, real_rows
from .targets import matrix


@dataclass(eq=False)
class InputSums:
    """Of one input tensor, over the real tokens; layers that read the same tensor share one of these."""

    squares: Float[Tensor, " n"]
    """Σ_t x_tj², float64."""
    gram: Float[Tensor, "n n"] | None
    """Σ_t x_t x_tᵀ, float64, of products in float32; None if nothing needs it."""
    tokens: int = 0

    @property
    def norms(self) -> Float[Tensor, " n"]:
        """√(Σ_t x_tj² / tokens): ‖X_j‖₂ but for a factor that all inputs of the layer share; zero without tokens."""
        return (self.squares / max(self.tokens, 1)).sqrt()

    def require_used(self, name: str) -> None:
        """Refuse sums over nothing.

        Raises:
            UsageError: no token came, as to an expert that nothing was sent to.
        """
        if not self.tokens:
            raise UsageError(
                f"No calibration token reached {name}, so its weights have no scores. Give more text, or leave it out "
                "with exclude=."
            )


class Collector:
    """Sums of the inputs of `layers`; hooks stand only inside :meth:`watching`."""

    def __init__(
        self, layers: Mapping[str, nn.Module], *, gram: bool, device: torch.device | str | None
    ) -> None:
        self.layers, self.gram = dict(layers), gram
        self.device = None if device is None else torch.device(device)
        self.sums: dict[str, InputSums] = {}
        self._batch: Batch | None = None
        self._last: tuple[Tensor, str] | None = None
        self._leader: dict[str, str] = {}

    @contextmanager
    def watching(self, batch: Batch) -> Iterator[None]:
        """Add what the layers read inside the block."""
        self._batch, self._last = batch, None
        hooks = [
            layer.register_forward_pre_hook(self._hook(name), prepend=True)
            for name, layer in self.layers.items()
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
            self._batch = self._last = None

    def of(self, name: str) -> InputSums:
        """The sums of one layer.

        Raises:
            UsageError: no token came.
        """
        if name not in self.sums:
            n = matrix(self.layers[name]).shape[1]
            InputSums(torch.zeros(n, dtype=torch.float64), None).require_used(name)
        self.sums[name].require_used(name)
        return self.sums[name]

    def _hook(self, name: str) -> Any:
        def add(module: nn.Module, args: tuple[Any, ...]) -> None:  # a value returned would replace the input
            self._add(name, args[0])

        return add

    def _add(self, name: str, x: Tensor) -> None:
        assert self._batch is not None
        follows = self._last[1] if self._last is not None and self._last[0] is x else name
        leader = self._leader.setdefault(name, follows)
        if leader != name and follows == leader:
            self.sums[name] = self.sums[leader]
            return
        if leader not in (follows, name):  # shared so far and no longer: go on apart
            self._leader[name] = name
            raise UsageError(
                f"{name} doesn't read the same tensor as {leader} in every batch, as it did in the first. Pass batches "
                "of one shape."
            )
        rows = real_rows(x.detach(), self._batch, name)
        rows = rows if rows.dtype == torch.float64 else rows.float()
        squares = rows.square().sum(0, dtype=torch.float64)
        if not bool(torch.isfinite(squares).all()):
            raise NumericalFailure(
                f"The input of {name} holds NaN or infinity on the calibration text. Run the model in bfloat16 or "
                "float32, or look for the batch."
            )
        where = x.device if self.device is None else self.device
        sums = self.sums.get(name)
        if sums is None:
            gram = (
                torch.zeros(x.shape[-1], x.shape[-1], dtype=torch.float64, device=where)
                if self.gram
                else None
            )
            sums = self.sums[name] = InputSums(torch.zeros_like(squares, device=where), gram)
        sums.tokens += len(rows)
        sums.squares += squares.to(where)
        if sums.gram is not None:
            sums.gram += (rows.T @ rows).to(where)
        self._last = (x, name)
