"""One thread and no network for every test, set before anything loads torch.

This file's presence also puts this folder on the import path, so that tests can share helper modules.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

os.environ.update(
    OMP_NUM_THREADS="1",
    OPENBLAS_NUM_THREADS="1",
    HF_HUB_OFFLINE="1",
    TOKENIZERS_PARALLELISM="false",
    MPLBACKEND="Agg",
)


@pytest.fixture
def unchecked() -> Iterator[None]:
    """Run-time type checks off: for the messages that a wrong type or shape gets where no checker runs."""
    import jaxtyping

    jaxtyping.config.update("jaxtyping_disable", True)
    yield
    jaxtyping.config.update("jaxtyping_disable", False)


@pytest.fixture
def torch_products(monkeypatch: pytest.MonkeyPatch) -> None:
    """NF12 layers leave more than four rows to torch's products, whose bits a test then compares with."""
    import importlib

    linear = importlib.import_module("gnomon.methods.compress.nf12.linear")
    monkeypatch.setattr(linear, "fused_rows", lambda: 4)
    monkeypatch.setattr(linear, "has_bfloat16_products", lambda: True)
    monkeypatch.setattr(linear, "_blocks", lambda x: False)
