"""The reader of plain BF16 rows under the shared Triton GEMV. Imported only when called: needs Triton."""

from __future__ import annotations

import triton
import triton.language as tl

from gnomon.kernels.gemv.triton_kernels import four


@triton.jit
def read(weight, row, group, inside, groups):
    """Reader for `gemv.triton`; weight = (words,), int32 words of two BF16, 16 bytes a lane."""
    (words,) = weight
    place = (row * groups + group)[:, None] * 4 + tl.arange(0, 4)[None, :]
    return four(tl.load(words + place, mask=inside[:, None], other=0))
