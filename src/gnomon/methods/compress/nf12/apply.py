"""`gnomon apply nf12`: a model folder whose matrices are NF12 planes, and the way back.

What is encoded: weights of plain linear and embedding layers (and GPT-2's `Conv1D`), in bfloat16, where planes
are worth it. Everything else (norms, biases, layers with a product of their own, experts that Transformers
merges when it loads them) is kept as it is. Nothing is lost, whatever the settings.

Here:  the rule for a checkpoint's tensors, the form as `core.forms` knows it.
Not here: streaming (`core.converting`), loading with Transformers (`gnomon.hf`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from gnomon.core.applying import TensorMethod
from gnomon.core.checkpoints import Checkpoint, Shard
from gnomon.core.converting import Convert
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.forms import Form, Groups
from gnomon.core.places import parameters, skeleton
from gnomon.core.safe_files import Entry
from gnomon.kernels.nf12.reference import GROUP

from .config import NF12Config
from .container import LAYOUT, METADATA, PLANES, VERSION, choose, inspect, is_plane, pack, unpack
from .encode import holds_bf16
from .model import replaceable

QUANT_METHOD = "nf12"
QUANTIZATION = {"quant_method": QUANT_METHOD, "version": VERSION, "layout": LAYOUT, "group_size": GROUP}
"""`quantization_config` in `config.json`."""


@dataclass(frozen=True, kw_only=True)
class NF12Settings:
    """Which matrices are encoded; defaults as in `NF12Config`."""

    min_elements: int = NF12Config.min_elements
    """Matrices with fewer elements stay as they are."""
    raw_share: float = NF12Config.raw_share
    """A matrix stays as it is when its planes would take this share of its BF16 bytes or more."""

    def __post_init__(self) -> None:
        self.thresholds()

    def thresholds(self) -> NF12Config:
        return NF12Config(min_elements=self.min_elements, raw_share=self.raw_share)


def prepare(checkpoint: Checkpoint, settings: NF12Settings) -> Convert:
    """The rule for the tensors of a checkpoint.

    Raises:
        GnomonError: a model that Transformers doesn't know; nothing to encode; weights of another dtype.
    """
    model = skeleton(checkpoint.config)
    known, entries = replaceable(model), checkpoint.entries
    matrices = {
        name: entries[name]
        for name, parameter in parameters(model, entries).items()
        if parameter in known and entries[name].numel >= settings.min_elements
    }
    if not matrices:
        raise UsageError(
            f"No linear or embedding layer of this model has a matrix of {settings.min_elements:,} elements or "
            "more, so NF12 has nothing to do. Lower min_elements to encode smaller ones."
        )
    for name, entry in matrices.items():
        if entry.dtype not in ("BF16", "F32"):
            raise _not_bfloat16(name, entry.dtype)

    if matrices.keys() == entries.keys():  # norms without weights, as in OLMo
        # Transformers reads the dtype and device of a model off its parameters, so one has to remain.
        del matrices[min(matrices, key=lambda name: matrices[name].numel)]

    def convert(name: str, tensor: Tensor) -> Mapping[str, Tensor] | None:
        if name not in matrices:
            return None
        if tensor.dtype == torch.float32 and not holds_bf16(tensor):
            raise _not_bfloat16(name, "F32")
        encoded, _ = choose(tensor, settings.thresholds(), float32=True)
        return pack(name, encoded) if encoded is not None else None

    return convert


def _not_bfloat16(name: str, dtype: str) -> GnomonError:
    return UsageError(
        f"{name} is {dtype} with values that bfloat16 doesn't have, and NF12 stores bfloat16 only. If rounding is "
        "acceptable, convert first: AutoModelForCausalLM.from_pretrained(M, dtype='bfloat16').save_pretrained(E)"
    )


@dataclass(frozen=True)
class _File:
    """A shard as `container.inspect` wants to see it."""

    shard: Shard

    def keys(self) -> Iterable[str]:
        return self.shard.entries.keys()

    def metadata(self) -> Mapping[str, str]:
        return self.shard.metadata

    def get_slice(self, name: str) -> _Slice:
        return _Slice(self.shard.entries[name])

    def get_tensor(self, name: str) -> Tensor:
        return self.shard.entries[name].read()


@dataclass(frozen=True)
class _Slice:
    entry: Entry

    def get_dtype(self) -> str:
        return self.entry.dtype

    def get_shape(self) -> tuple[int, ...]:
        return self.entry.shape


def group(checkpoint: Checkpoint) -> Groups:
    """The planes that belong together, and every other tensor by itself.

    Raises:
        GnomonError: as `container.inspect`.
    """
    found: dict[str, tuple[str, ...]] = {}
    for shard in checkpoint.shards:
        contents = inspect(_File(shard))
        found |= {name: (name,) for name in contents.raw}
        found |= {name: tuple(f"{name}.{plane}" for plane in PLANES) for name in contents.encoded}
    return found


def own_name(stored: str) -> str:
    """The tensor that a plane belongs to; any other name is its own."""
    return stored.rpartition(".")[0] if is_plane(stored) else stored


def decode(name: str, stored: Mapping[str, Tensor]) -> Tensor:
    """A tensor of the original checkpoint, from its planes or as it was kept."""
    return stored[name] if name in stored else unpack(name, stored.__getitem__).decode()


def describe(name: str, stored: Mapping[str, Tensor]) -> Mapping[str, float]:
    """Size, window and entropies of an encoded matrix."""
    stats = unpack(name, stored.__getitem__).stats()
    return {key: float(value) for key, value in stats.items() if isinstance(value, int | float)}


FORM = Form(
    name="nf12",
    group=group,
    decode=decode,
    describe=describe,
    own_name=own_name,
    parts=len(PLANES),
    config={"quantization_config": QUANTIZATION},
    metadata={key: text for key, text in METADATA.items() if key != "format"},
)

METHOD = TensorMethod(name="nf12", settings=NF12Settings, prepare=prepare, form=FORM)
