"""Layers whose weight stays in NF12 planes.

`NF12Weight` holds the planes of one matrix as buffers, so that a layer's `state_dict` keys are the names of the
container (`lm_head.weight.nf12_sm`, ...). Layers that share a matrix share the `NF12Weight` object. Moving and
casting a model moves the planes and never casts them.

Shapes: N rows of the matrix (outputs, or vocabulary), K columns (inputs, or width).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Self

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from gnomon.core.errors import GnomonError, unknown

from .config import NF12Config
from .container import PLANES, pack, unpack
from .linear import MODES, linear, linear_transposed
from .tensor import NF12Tensor


class NF12Weight(nn.Module):
    """The planes of one matrix, in the place where a layer has its `weight` parameter."""

    nf12_sm: Tensor
    nf12_ex: Tensor
    nf12_esc: Tensor
    nf12_meta: Tensor
    _like: Tensor

    def __init__(self, tensor: NF12Tensor, dtype: torch.dtype = torch.bfloat16) -> None:
        """Args:
        tensor: the encoded matrix.
        dtype: what decoded weights are presented in (an embedding's output, a decompressed layer). It follows
            `.to(dtype)` like the dtype of a parameter.
        """
        super().__init__()
        for plane in PLANES:
            self.register_buffer(plane, None)
        self.register_buffer("_like", torch.empty(0, dtype=dtype), persistent=False)
        self._hold(tensor)

    def _hold(self, tensor: NF12Tensor) -> None:
        for plane, value in pack("", tensor).items():
            setattr(self, plane.removeprefix("."), value)
        self._like = self._like.new_empty(0, device=tensor.device)
        self.base, self.shape = tensor.base, torch.Size(tensor.shape)

    @property
    def tensor(self) -> NF12Tensor:
        """The matrix; shares the planes. The same object until a plane is exchanged."""
        held: NF12Tensor | None = self.__dict__.get("_tensor")
        planes = self._buffers
        if (
            held is None
            or held.sm is not planes["nf12_sm"]
            or held.ex is not planes["nf12_ex"]
            or held.esc is not planes["nf12_esc"]
        ):
            shape = (self.shape[0], self.shape[1])
            held = NF12Tensor(self.nf12_sm, self.nf12_ex, self.nf12_esc, self.base, shape)
            self.__dict__["_tensor"] = held
        return held

    def __getattr__(self, name: str) -> Any:
        """As a module, but what only a tensor has is refused with the way to get one."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            if not hasattr(Tensor, name):
                raise
        raise AttributeError(
            f"NF12Weight has no {name!r}: the matrix is encoded. Decode it (weight.tensor.decode()), or the whole "
            "model (decompress_model, or model.dequantize() of a loaded one)."
        )

    @property
    def dtype(self) -> torch.dtype:
        return self._like.dtype

    @property
    def device(self) -> torch.device:
        return self.nf12_sm.device

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Let `.to`, `.half`, `.cuda` see the verbatim rows as integers, which no cast of floats touches."""
        self.nf12_esc = self.nf12_esc.view(torch.int16)
        try:
            super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        finally:
            self.nf12_esc = self.nf12_esc.view(torch.bfloat16)
        return self

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Take over checked planes; their number of verbatim rows and base may differ from those held now."""
        keys = [prefix + plane for plane in PLANES]
        if strict:
            unexpected_keys += [key for key in state_dict if key.startswith(prefix) and key not in keys]
        if absent := [key for key in keys if key not in state_dict]:
            missing_keys += absent
            return
        name = prefix.removesuffix(".")
        try:
            loaded = unpack(name, lambda key: state_dict[prefix + key.rpartition(".")[2]])
        except GnomonError as error:
            error_msgs.append(str(error))
            return
        if loaded.shape != tuple(self.shape):
            error_msgs.append(
                f"{name} is {loaded.shape} in the state dict and {tuple(self.shape)} in the model."
            )
            return
        device = loaded.device if self.device.type == "meta" else self.device
        if not local_metadata.get("assign_to_params_buffers", False):
            loaded = NF12Tensor(
                loaded.sm.clone(), loaded.ex.clone(), loaded.esc.clone(), loaded.base, loaded.shape
            )
        self._hold(loaded.to(device))

    def extra_repr(self) -> str:
        bits = self.tensor.bits_per_weight
        return f"{self.shape[0]} x {self.shape[1]}, {bits:.2f} bits a weight, base={self.base}"


class NF12Linear(nn.Module):
    """`nn.Linear` on an NF12 matrix (outputs x inputs). Trains nothing but its bias; passes gradients on."""

    bias: nn.Parameter | None

    def __init__(
        self,
        weight: NF12Weight,
        bias: nn.Parameter | None = None,
        mode: str = "auto",
        config: NF12Config | None = None,
    ) -> None:
        """Args as for :func:`linear`.

        Raises:
            UsageError: unknown mode.
        """
        super().__init__()
        if mode not in MODES:
            raise unknown("mode", mode, MODES)
        self.weight = weight
        self.register_parameter("bias", bias)
        self.mode, self.config = mode, config or NF12Config()
        self.out_features, self.in_features = weight.shape

    def forward(self, x: Float[Tensor, "*batch K"]) -> Float[Tensor, "*batch N"]:
        return linear(x, self.weight.tensor, self.bias, self.mode, config=self.config)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, "
            f"bias={self.bias is not None}, mode={self.mode}"
        )


class NF12Conv1D(nn.Module):
    """GPT-2's `Conv1D`, whose matrix is stored inputs first; kept in that orientation, as its file has it.

    Always buffered: a fused product would have to sum across rows.
    """

    bias: nn.Parameter | None

    def __init__(self, weight: NF12Weight, bias: nn.Parameter | None) -> None:
        super().__init__()
        self.weight = weight
        self.register_parameter("bias", bias)
        self.nx, self.nf = weight.shape  # names of Conv1D

    def forward(self, x: Float[Tensor, "*batch N"]) -> Float[Tensor, "*batch K"]:
        return linear_transposed(x, self.weight.tensor, self.bias)

    def extra_repr(self) -> str:
        return f"nf={self.nf}, nx={self.nx}"


class NF12Embedding(nn.Module):
    """`nn.Embedding` on an NF12 matrix: decodes the rows that are asked for."""

    def __init__(self, weight: NF12Weight, padding_idx: int | None = None) -> None:
        """Args:
        weight: vocabulary x width.
        padding_idx: kept for those who ask; it concerns gradients only, and there are none.
        """
        super().__init__()
        self.weight, self.padding_idx = weight, padding_idx
        self.num_embeddings, self.embedding_dim = weight.shape

    def forward(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch K"]:
        return self.weight.tensor.rows(tokens).to(self.weight.dtype)

    def extra_repr(self) -> str:
        padding = "" if self.padding_idx is None else f", padding_idx={self.padding_idx}"
        return f"{self.num_embeddings}, {self.embedding_dim}{padding}"


class NF12ScaledEmbedding(NF12Embedding):
    """Rows times a constant: the `...ScaledWordEmbedding` that Gemma, BART and others have in Transformers."""

    def __init__(self, weight: NF12Weight, original: nn.Embedding) -> None:
        """Args:
        weight: vocabulary x width.
        original: has `embed_scale`, a number or a buffer of one (then with `scalar_embed_scale`, its number).
        """
        super().__init__(weight, original.padding_idx)
        self.kind = type(original)
        scale: Any = original.embed_scale
        self.scalar: float = getattr(original, "scalar_embed_scale", scale)
        if isinstance(scale, Tensor):
            scale = torch.tensor(self.scalar) if scale.is_meta else scale.detach().clone()
            self.register_buffer("embed_scale", scale, persistent=False)
        else:
            self.embed_scale = scale

    def forward(self, tokens: Int[Tensor, "*batch"]) -> Float[Tensor, "*batch K"]:
        rows, scale = super().forward(tokens), self.embed_scale
        return rows * (scale.to(rows.dtype) if isinstance(scale, Tensor) else scale)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, embed_scale={self.scalar}"
