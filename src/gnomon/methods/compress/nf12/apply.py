"""`gnomon apply nf12`: a model folder whose matrices are NF12 planes, and the way back.

What is encoded: weights of plain linear and embedding layers, in bfloat16, where planes are worth it. Everything
else (norms, biases, position tables, layers with a product of their own) is kept as it is. The settings decide
about sizes only: the result is lossless whatever they are.

Here:  the rule for a checkpoint's tensors, the form as `core.forms` knows it.
Not here: streaming (`core.converting`), loading with Transformers (`gnomon.hf`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from gnomon.core.applying import TensorMethod
from gnomon.core.checkpoints import Checkpoint, Shard
from gnomon.core.converting import Convert
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.forms import Form, Groups
from gnomon.core.places import module_of, owners, skeleton
from gnomon.core.safe_files import Entry
from gnomon.kernels.nf12.reference import GROUP

from .config import NF12Config
from .container import LAYOUT, METADATA, PLANES, VERSION, choose, inspect, pack, unpack

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


def encodable(module: nn.Module) -> bool:
    """Whether NF12 has a layer in place of this one. A subclass may do something else with its weight."""
    return type(module) is nn.Linear or (type(module) is nn.Embedding and module.max_norm is None)


def prepare(checkpoint: Checkpoint, settings: NF12Settings) -> Convert:
    """The rule for the tensors of a checkpoint.

    Raises:
        GnomonError: a model that Transformers doesn't know; nothing to encode; weights of another dtype.
    """
    model = skeleton(checkpoint.config)
    places = owners(model, checkpoint.entries)
    matrices = {
        name: checkpoint.entries[name]
        for name, path in places.items()
        if encodable(module_of(model, path)) and len(checkpoint.entries[name].shape) == 2
    }
    matrices = {name: entry for name, entry in matrices.items() if entry.numel >= settings.min_elements}
    if not matrices:
        raise UsageError(
            f"No linear or embedding layer of this model has a matrix of {settings.min_elements:,} elements or "
            "more, so NF12 has nothing to do. Lower min_elements to encode smaller ones."
        )
    for name, entry in matrices.items():
        if entry.dtype not in ("BF16", "F32"):
            raise _not_bfloat16(name, entry.dtype)

    def convert(name: str, tensor: Tensor) -> Mapping[str, Tensor] | None:
        if name not in matrices:
            return None
        encoded, _ = choose(_bfloat16(name, tensor), settings.thresholds())
        return pack(name, encoded) if encoded is not None else None

    return convert


def _bfloat16(name: str, tensor: Tensor) -> Tensor:
    """The same values in bfloat16, if it has them all."""
    if tensor.dtype != torch.float32:
        return tensor
    bits = tensor.view(torch.int32)
    if bool((bits & 0xFFFF).any()):
        raise _not_bfloat16(name, "F32")
    return (bits >> 16).to(torch.int16).view(torch.bfloat16)


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
    parts=len(PLANES),
    config={"quantization_config": QUANTIZATION},
    metadata={key: text for key, text in METADATA.items() if key != "format"},
)

METHOD = TensorMethod(name="nf12", settings=NF12Settings, prepare=prepare, form=FORM)
