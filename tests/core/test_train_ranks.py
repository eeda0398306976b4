"""Two gloo processes under the real launcher follow one process with the full batch."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("accelerate")
SCRIPT = Path(__file__).with_name("ranks_script.py")


def test_two_ranks_follow_one_process(tmp_path: Path) -> None:
    env = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    env = {key: value for key, value in env.items() if key not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    command = [sys.executable, *launch, str(SCRIPT), str(tmp_path)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    runpy.run_path(str(SCRIPT))["main"](tmp_path)
    alone, first, second = (torch.load(tmp_path / f"{name}.pt") for name in ("alone", "0", "1"))
    assert first["losses"] == second["losses"]
    assert torch.equal(first["weights"]["table.weight"], second["weights"]["table.weight"])
    # Float32 sums in another order, five steps: the trajectory bound of optimisers.
    torch.testing.assert_close(first["weights"], alone["weights"], rtol=1e-5, atol=1e-6)
    assert first["losses"] == pytest.approx(alone["losses"], rel=1e-5)
    assert first["tokens"] == second["tokens"] == alone["tokens"]
    assert [path.name for path in (tmp_path / "checkpoints-0").iterdir()] == ["train-00000004"]
    assert not (tmp_path / "checkpoints-1").exists()
    assert "3 rows can't be shared evenly among 2 processes" in first["refusal"]
    assert alone["refusal"] == ""
