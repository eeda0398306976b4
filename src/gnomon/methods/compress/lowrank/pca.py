"""Principal directions of row vectors that come batch by batch, without a mean (directions have no sign)."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from gnomon.core.errors import UsageError


class IncrementalPCA:
    """The top eigenvectors of Σ_batches RᵀR, holding no more than `width` × p numbers.

    Exact while `width` is at least the rank of all rows together; else what was cut after each batch is lost, as in
    any incremental PCA.

    >>> pca = IncrementalPCA(width=2)
    >>> pca.update(torch.tensor([[3.0, 0.0], [0.0, 1.0]]))
    >>> pca.components(1).abs()
    tensor([[1.],
            [0.]], dtype=torch.float64)
    """

    def __init__(self, width: int) -> None:
        if width < 1:
            raise UsageError(f"width={width} directions can't be kept; use at least 1.")
        self.width = width
        self._rows: Tensor | None = None

    def update(self, rows: Float[Tensor, "r p"]) -> None:
        """Take in further rows."""
        rows = rows.double()
        joined = rows if self._rows is None else torch.cat([self._rows, rows])
        if len(joined) > joined.shape[1]:  # through the smaller Gram matrix
            values, vectors = torch.linalg.eigh(joined.T @ joined)
            sigma, vt = values.flip(0).clamp(min=0).sqrt(), vectors.flip(1).T
        else:
            _, sigma, vt = torch.linalg.svd(joined, full_matrices=False)
        self._rows = (sigma[:, None] * vt)[: self.width]

    def components(self, k: int) -> Float[Tensor, "p k"]:
        """The first k directions, orthonormal, in columns."""
        if self._rows is None or not 1 <= k <= min(self.width, self._rows.shape[1]):
            held = 0 if self._rows is None else min(self.width, self._rows.shape[1])
            raise UsageError(f"components({k}) of a PCA that holds {held}.")
        vt: Tensor = torch.linalg.svd(self._rows, full_matrices=True).Vh  # full: fewer rows than k were seen
        return vt[:k].T.contiguous()
