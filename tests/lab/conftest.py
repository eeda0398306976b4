from pathlib import Path

import pytest

from gnomon.lab.config import StudyConfig
from gnomon.lab.engine import Lab
from gnomon.lab.run import Study, find_study

TOY = Path(__file__).with_name("toy.py")


@pytest.fixture
def toy() -> Study:
    return find_study(str(TOY))


@pytest.fixture
def make_lab(toy, tmp_path):
    """A lab of the toy study in its own folder: `make_lab("a", steps=2)`; nothing has run yet."""

    def make(name: str = "run", *, jobs: int = 1, **settings) -> Lab:
        config: StudyConfig = toy.config.resolve("cpu", settings)
        lab = Lab(config, tmp_path / name, reference=toy.reference, jobs=jobs)
        config.run(lab)
        return lab

    return make
