"""Functions of the package are checked while tests run, and checking changes nothing."""

from __future__ import annotations

import importlib
import random
from pathlib import Path
from types import ModuleType

import pytest
import torch
from jaxtyping import TypeCheckError, install_import_hook

SAMPLE = """
from __future__ import annotations
from dataclasses import dataclass
from typing import Literal, Self
from jaxtyping import Float
from numpy.typing import ArrayLike
from torch import Tensor

def outer(x: Float[Tensor, " n"], y: Float[Tensor, " n"]) -> Float[Tensor, "n n"]:
    return x[:, None] * y

def wrong(x: Float[Tensor, " n"]) -> Float[Tensor, "n n"]:
    return x

def first(values: list[float]) -> float:
    return values[0]

def anything(values: ArrayLike) -> int:
    return 1

@dataclass(frozen=True)
class Setting:
    kind: Literal["a", "b"] = "a"

    def __post_init__(self) -> None:
        if self.kind not in ("a", "b"):
            raise ValueError(f"kind={self.kind!r} must be a or b.")

    def same(self) -> Self:
        return self
"""


@pytest.fixture(scope="module")
def sample(tmp_path_factory: pytest.TempPathFactory) -> ModuleType:
    path: Path = tmp_path_factory.mktemp("sample") / "typechecked_sample.py"
    path.write_text(SAMPLE)
    with (
        pytest.MonkeyPatch.context() as patch,
        install_import_hook("typechecked_sample", "typecheck.checked"),
    ):
        patch.syspath_prepend(path.parent)
        return importlib.import_module("typechecked_sample")


def test_types_and_shapes_are_checked(sample: ModuleType) -> None:
    assert sample.outer(torch.ones(2), torch.ones(2)).shape == (2, 2)
    with pytest.raises(TypeCheckError):
        sample.outer(torch.ones(2), torch.ones(3))
    with pytest.raises(TypeCheckError):
        sample.wrong(torch.ones(2))
    with pytest.raises(TypeCheckError):
        sample.first(["a"])
    assert sample.first([1]) == 1


def test_checking_draws_no_random_numbers(sample: ModuleType) -> None:
    before = random.getstate()
    sample.first([1.0, 2.0, 3.0])
    assert random.getstate() == before


def test_what_cannot_be_checked_still_works(sample: ModuleType) -> None:
    assert sample.anything((1.0,)) == 1
    assert sample.Setting().same() == sample.Setting()
    with pytest.raises(ValueError, match="kind='c' must be a or b"):
        sample.Setting(kind="c")


def test_gnomon_is_checked() -> None:
    from gnomon.core.errors import nearest

    with pytest.raises(TypeCheckError):
        nearest(3, ["a"])  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
def test_checks_can_be_left_out(sample: ModuleType) -> None:
    assert sample.first(["a"]) == "a"
