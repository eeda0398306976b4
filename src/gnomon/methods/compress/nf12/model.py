"""Whole models: find the matrices, put NF12 layers in their place, and back.

Taken are modules that are exactly `nn.Linear`, `nn.Embedding`, GPT-2's `Conv1D` or the scaled embedding of Gemma
and BART. Another subclass may do something else with its weight (adapt it, shift its rows), so it keeps it; and a
matrix that any other module uses as well is kept for all of them. Layers that shared a parameter share an
`NF12Weight` afterwards.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from typing import Any, NoReturn, TypeVar

import torch
from torch import nn

from gnomon.core.errors import UsageError, unknown
from gnomon.core.layers import is_conv1d

from .config import NF12Config
from .container import choose
from .modules import NF12Conv1D, NF12Embedding, NF12Linear, NF12ScaledEmbedding, NF12Weight
from .tensor import NF12Tensor

log = logging.getLogger(__name__)

Model = TypeVar("Model", bound=nn.Module)


@dataclass
class _Matrix:
    """A parameter and the modules that use it."""

    weight: nn.Parameter
    users: list[tuple[str, str, nn.Module]] = field(default_factory=list)
    """(dotted name of the module, name of the parameter in it, module) of each user."""

    @property
    def names(self) -> list[str]:
        """Dotted names of the parameter."""
        return [f"{module}.{key}" if module else key for module, key, _ in self.users]

    def why_kept(self) -> str:
        """Why its modules can't be replaced; "" if they can."""
        for name, key, module in self.users:
            if not name or key != "weight" or not _replaceable(module):
                return f"used by {name or 'the model itself'} ({type(module).__name__})"
        if len({is_conv1d(module) for _, _, module in self.users}) > 1:
            return "used both as it is and transposed"
        return ""


def compress_model(model: Model, skip: str | Sequence[str] = (), config: NF12Config | None = None) -> Model:
    """Put every matrix that is worth it into NF12, in place and one by one; not one bit of it changes.

    A float32 model is fine if its matrices hold bfloat16 values (a BF16 checkpoint loaded in float32): it goes on
    computing in float32. Matrices with other values are kept.

    Args:
        model: any Transformers decoder, or any module with linear layers and embeddings.
        skip: dotted names of modules or parameters to keep, or patterns such as "*.down_proj".
        config: thresholds.

    Returns:
        `model`. What was kept, and why, is logged under "gnomon". A Transformers model keeps one parameter: where
        everything could be encoded (OLMo's norms have no weights), the smallest matrix.

    Raises:
        UsageError: nothing to encode, a `skip` that matches nothing, weights on the meta device, or hooks on a
            layer that would be replaced.
    """
    config = config or NF12Config()
    matrices = _matrices(model)
    kept = _skipped(matrices, [skip] if isinstance(skip, str) else skip)
    for matrix in matrices:
        if matrix.names[0] not in kept and matrix.weight.numel() >= config.min_elements:
            _check_hooks(matrix)
            if matrix.weight.is_meta:
                raise UsageError(
                    f"{matrix.names[0]} is on the meta device and has no values. Load the whole model first, "
                    "without leaving layers to the disk."
                )
    if hasattr(model, "save_pretrained"):
        _smallest_last(matrices, kept)
    before = after = count = 0
    while matrices:
        matrix = matrices.pop(0)  # lets go of the parameter once its modules are replaced
        name = matrix.names[0]
        if name in kept:
            continue
        if hasattr(model, "save_pretrained") and all(one is matrix.weight for one in model.parameters()):
            kept[name] = "the model's last parameter: Transformers reads dtype and device of a model off one"
            continue
        encoded, why = choose(matrix.weight, config, float32=True)
        if encoded is None:
            kept[name] = why
            continue
        _replace(model, matrix, NF12Weight(encoded, matrix.weight.dtype), config)
        before, after, count = before + 2 * matrix.weight.numel(), after + encoded.nbytes, count + 1
    if not count:
        reasons = "; ".join(f"{name}: {why}" for name, why in list(kept.items())[:3])
        raise UsageError(
            f"Nothing in {type(model).__name__} was put into NF12 ({reasons or 'it has no linear layers'}"
            f"{', ...' if len(kept) > 3 else ''}). Load it in bfloat16, or lower min_elements or raise raw_share in "
            "NF12Config."
        )
    log.info(
        "NF12: %d matrices, %.2f bits a weight; %d kept%s",
        count,
        16 * after / before,
        len(kept),
        "".join(f"\n  {name}: {why}" for name, why in kept.items()),
    )
    _guard_saving(model)
    return model


def install(
    model: Model,
    weights: Mapping[str, NF12Tensor],
    dtype: torch.dtype = torch.bfloat16,
    config: NF12Config | None = None,
) -> Model:
    """Give a model its encoded matrices: what a loader does with the parameters that a file holds encoded.

    A matrix that :func:`compress_model` would have to keep because of who uses it is decoded instead.

    Args:
        model: may be on the meta device; the values of the parameters replaced are not looked at.
        weights: dotted name of a parameter -> its encoded matrix. Of a shared one any name does.
        dtype: of the weights as the model sees them; see `NF12Weight`.
        config: when the layers are fused.

    Raises:
        UsageError: a name that is no parameter of the model, another shape, or hooks on a layer to be replaced.
    """
    by_name = {name: matrix for matrix in _parameters(model) for name in matrix.names}
    for name, tensor in weights.items():
        if name not in by_name:
            raise unknown("parameter", name, by_name)
        if by_name[name].weight.shape != tensor.shape:
            raise UsageError(
                f"{name} is {tuple(by_name[name].weight.shape)} in the model, but the encoded matrix is "
                f"{tensor.shape}. Use the config that belongs to the file."
            )
        if not by_name[name].why_kept():
            _check_hooks(by_name[name])
    for name, tensor in weights.items():
        matrix = by_name[name]
        if not matrix.why_kept():
            _replace(model, matrix, NF12Weight(tensor, dtype), config)
            continue
        decoded = nn.Parameter(tensor.decode().to(dtype), requires_grad=matrix.weight.requires_grad)
        for _, key, module in matrix.users:
            module.register_parameter(key, decoded)
    _guard_saving(model)
    return model


def decompress_model(model: Model) -> Model:
    """Undo :func:`compress_model`, in place: plain layers with plain parameters, shared where they were.

    Raises:
        UsageError: the model has no NF12 layers.
    """
    parameters: dict[int, nn.Parameter] = {}
    plain: dict[int, nn.Module] = {}
    for name, module in list(model.named_modules(remove_duplicate=False)):
        if not isinstance(module, NF12Linear | NF12Conv1D | NF12Embedding):
            continue
        if id(module) not in plain:
            held = module.weight
            if id(held) not in parameters:
                parameters[id(held)] = nn.Parameter(held.tensor.decode().to(held.dtype))
            plain[id(module)] = _plain(module, parameters[id(held)]).train(module.training)
        _put(model, name, plain[id(module)])
    if not plain:
        raise UsageError(f"{type(model).__name__} has no NF12 layers. compress_model puts them in.")
    vars(model).pop("save_pretrained", None)
    return model


def replaceable(model: nn.Module) -> set[str]:
    """Dotted names of the parameters that NF12 layers could take over, by what uses them (values aren't looked at)."""
    return {name for matrix in _matrices(model) if not matrix.why_kept() for name in matrix.names}


def _parameters(model: nn.Module) -> list[_Matrix]:
    """Every parameter with everyone who uses it."""
    found: dict[int, _Matrix] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        for key, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            found.setdefault(id(parameter), _Matrix(parameter)).users.append((name, key, module))
    return list(found.values())


def _matrices(model: nn.Module) -> list[_Matrix]:
    """The parameters that at least one replaceable layer has as its weight."""
    return [
        matrix
        for matrix in _parameters(model)
        if any(key == "weight" and _replaceable(module) for _, key, module in matrix.users)
    ]


def _replaceable(module: nn.Module) -> bool:
    if type(module) is nn.Embedding or _is_scaled(module):
        return module.max_norm is None  # it would rewrite its rows
    return type(module) is nn.Linear or (is_conv1d(module) and type(module).__name__ == "Conv1D")


def _is_scaled(module: nn.Module) -> bool:
    """One of Transformers' many copies of an embedding that multiplies its rows by `embed_scale`."""
    kind = type(module)
    return kind.__name__.endswith("ScaledWordEmbedding") and kind.__module__.startswith("transformers.")


def _skipped(matrices: list[_Matrix], skip: Sequence[str]) -> dict[str, str]:
    """First name of each matrix that is kept whatever it holds -> why."""
    kept = {matrix.names[0]: why for matrix in matrices if (why := matrix.why_kept())}
    for pattern in skip:
        hit = [
            matrix
            for matrix in matrices
            if any(
                fnmatchcase(name, pattern) or fnmatchcase(name.removesuffix(".weight"), pattern)
                for name in matrix.names
            )
        ]
        if not hit:
            raise unknown("layer in skip", pattern, (name for matrix in matrices for name in matrix.names))
        kept |= {matrix.names[0]: f"skip={pattern!r}" for matrix in hit}
    return kept


def _smallest_last(matrices: list[_Matrix], kept: Mapping[str, str]) -> None:
    """Move the smallest matrix that isn't kept anyway to the end: whoever has to stay, it is that one."""
    candidates = [matrix for matrix in matrices if matrix.names[0] not in kept]
    if candidates:
        smallest = min(candidates, key=lambda matrix: matrix.weight.numel())
        matrices.sort(key=lambda matrix: matrix is smallest)


def _check_hooks(matrix: _Matrix) -> None:
    for name, _, module in matrix.users:
        hooks = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
        if any(getattr(module, hook) for hook in hooks) or "forward" in vars(module):
            raise UsageError(
                f"{name} has hooks (or a patched forward), which an NF12 layer in its place would lose. Remove them "
                "first and add them to the compressed model."
            )


def _replace(model: nn.Module, matrix: _Matrix, weight: NF12Weight, config: NF12Config | None) -> None:
    made: dict[int, nn.Module] = {}  # the same module may stand in several places
    for name, _, module in matrix.users:
        if id(module) not in made:
            made[id(module)] = _on_planes(module, weight, config).train(module.training)
        _put(model, name, made[id(module)])


def _on_planes(module: Any, weight: NF12Weight, config: NF12Config | None) -> nn.Module:
    if _is_scaled(module):
        return NF12ScaledEmbedding(weight, module)
    if isinstance(module, nn.Embedding):
        return NF12Embedding(weight, module.padding_idx)
    if is_conv1d(module):
        return NF12Conv1D(weight, module.bias)
    return NF12Linear(weight, module.bias, config=config)


def _plain(module: NF12Linear | NF12Conv1D | NF12Embedding, weight: nn.Parameter) -> nn.Module:
    made: nn.Module
    with torch.device("meta"):  # neither memory nor random numbers for weights that are replaced at once
        if isinstance(module, NF12ScaledEmbedding):
            made = module.kind(  # type: ignore[call-arg]
                module.num_embeddings, module.embedding_dim, module.padding_idx, embed_scale=module.scalar
            )
        elif isinstance(module, NF12Embedding):
            made = nn.Embedding(module.num_embeddings, module.embedding_dim, module.padding_idx)
        elif isinstance(module, NF12Linear):
            made = nn.Linear(module.in_features, module.out_features, bias=False)
        else:
            from transformers.pytorch_utils import Conv1D

            made = Conv1D(module.nf, module.nx)
    made.register_parameter("weight", weight)
    if isinstance(module, NF12ScaledEmbedding):
        made.embed_scale = module.embed_scale
    if not isinstance(module, NF12Embedding):
        made.register_parameter("bias", module.bias)
    return made


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, module)


def _guard_saving(model: nn.Module) -> None:
    """Transformers would save planes under a plain config, and later fill the layers with random weights."""
    if hasattr(model, "save_pretrained"):
        vars(model)["save_pretrained"] = refuse_to_save


def refuse_to_save(*_: Any, **__: Any) -> NoReturn:
    """Stands in for `save_pretrained` of a model compressed in memory."""
    raise UsageError(
        "save_pretrained can't write a model compressed in memory: plain Transformers would load it with random "
        "weights. Call nf12.save_nf12(model, folder), or decompress_model first."
    )
