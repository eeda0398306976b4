"""The one place that sets global random seeds.

Functions of Gnomon draw from a `torch.Generator` they are given. Library code that draws from global
state (weight initialisation, dropout) runs inside :func:`seeded`, which restores what it found.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Run a block with Python, NumPy and torch (CPU and CUDA) seeded, then restore their former states.

    Args:
        seed: any non-negative integer below 2**32 (NumPy's limit).

    Raises:
        ValueError: if the seed is out of range.
    """
    import numpy as np
    import torch

    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must lie in [0, 2**32), got {seed}.")
    python_state, numpy_state = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []  # type: ignore[no-untyped-call]
    try:
        with torch.random.fork_rng(devices=devices):
            torch.manual_seed(seed)
            yield
    finally:
        random.setstate(python_state)
        np.random.set_state(numpy_state)
