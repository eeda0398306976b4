"""What importing costs and needs, each seen in a fresh process."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "gnomon"

HIDE_EXTRAS = """
import sys
HIDDEN = {"accelerate", "datasets", "peft", "trl", "inspect_ai", "triton", "starlette", "vllm"}

class Hiding:
    '''A finder that no longer finds the optional libraries.'''
    def __init__(self, finder): self.finder = finder
    def __getattr__(self, name): return getattr(self.finder, name)
    def find_spec(self, name, path=None, target=None):
        return None if name.partition(".")[0] in HIDDEN else self.finder.find_spec(name, path, target)

sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
"""


def in_fresh_process(code: str) -> str:
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize(
    ("module", "absent"),
    [
        ("gnomon", ("torch", "transformers", "numpy", "pandas")),
        ("gnomon.cli", ("torch", "transformers", "numpy", "pandas")),
        ("gnomon.systems", ("torch", "numpy", "gnomon.lab", "gnomon.core")),
    ],
)
def test_light_modules_load_nothing_heavy(module: str, absent: tuple[str, ...]) -> None:
    loaded = in_fresh_process(f"import sys, {module}; print(*sys.modules)").split()
    assert not set(absent) & set(loaded)


NO_MODULES = ("__init__.py", "__main__.py", "triton_kernels.py")


def test_every_module_imports_without_extras_network_or_gpu() -> None:
    code = (
        HIDE_EXTRAS
        + (
            "import importlib, pkgutil, socket\n"
            "import gnomon\n"
            "def refuse(*a, **k): raise OSError('an import opened a connection')\n"
            "socket.socket.connect = refuse\n"
            "for module in pkgutil.walk_packages(gnomon.__path__, 'gnomon.'):\n"
            "    leaf = module.name.rpartition('.')[2]\n"  # a C library is no module; Triton's language needs Triton
            "    if leaf not in ('__main__', '_native', 'triton_kernels'):\n"
            "        importlib.import_module(module.name); print(module.name)\n"
            "torch = sys.modules.get('torch')\n"
            "assert torch is None or not torch.cuda.is_initialized()\n"
            "assert not HIDDEN & set(sys.modules)\n"
        )
    )
    imported = set(in_fresh_process(code).split())
    files = {f for f in PACKAGE.rglob("*.py") if f.name not in NO_MODULES}
    expected = {".".join(f.relative_to(PACKAGE.parent).with_suffix("").parts) for f in files}
    assert expected <= imported


def test_hiding_works() -> None:
    assert "hidden" in in_fresh_process(
        HIDE_EXTRAS + "\ntry: import accelerate\nexcept ModuleNotFoundError: print('hidden')"
    )


@pytest.mark.parametrize("study", sorted((PACKAGE / "studies").glob("*.py")), ids=lambda path: path.stem)
def test_a_copied_study_still_imports(study: Path) -> None:
    """`gnomon cp` puts the file elsewhere, so it may not import relatively."""
    imports = [node for node in ast.walk(ast.parse(study.read_text())) if isinstance(node, ast.ImportFrom)]
    assert [node.module for node in imports if node.level] == []
