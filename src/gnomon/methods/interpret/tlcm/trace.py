"""One forward pass, every layer's contribution to the residual stream.

Shapes: n layers, B sequences, T positions, d hidden width.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from gnomon.core.errors import GnomonError, NumericalFailure, UsageError
from gnomon.core.layers import DecoderStack, decoder_stack, hidden_of, sublayers
from gnomon.core.modes import evaluation_mode


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What each layer read and wrote, for every token of a batch (float32, or float64 for such a model).

    Built by :func:`capture`, or by :meth:`of` from any tensors with ``x[i+1] = x[i] + attn[i] + mlp[i]``.
    """

    x: Float[Tensor, "n_plus_1 B T d"]
    """Residual stream: `x[i]` enters layer i, `x[n]` leaves the last one (before the final norm)."""
    attn: Float[Tensor, "n B T d"]
    mlp: Float[Tensor, "n B T d"]
    position: Int[Tensor, "B T"]
    """Place of a token in its sequence, counted from 0; -1 marks padding."""
    counted: Bool[Tensor, "B T"]
    """The tokens that statistics are taken over: no padding, and by default no first token."""
    input_ids: Int[Tensor, "B T"] | None = None
    calls: tuple[Mapping[str, Any], ...] = field(default=(), repr=False)
    """Keyword arguments of each layer's call without the hidden state, to run a layer again."""

    @classmethod
    def of(
        cls,
        x: Float[Tensor, "n_plus_1 B T d"],
        attn: Float[Tensor, "n B T d"],
        mlp: Float[Tensor, "n B T d"],
    ) -> Trace:
        """A trace of given tensors in which every token counts."""
        position = torch.arange(x.shape[2], device=x.device).repeat(x.shape[1], 1)
        return cls(x=x, attn=attn, mlp=mlp, position=position, counted=position >= 0)

    @property
    def contribution(self) -> Float[Tensor, "n B T d"]:
        """c_i = Attn_i + MLP_i. Summed from the two parts: x_{i+1} - x_i cancels digits in half precision."""
        return self.attn + self.mlp

    def select(self, values: Shaped[Tensor, "*lead B T"]) -> Shaped[Tensor, "*lead tokens"]:
        """The counted tokens of any per-token quantity, sequence after sequence."""
        return values[..., self.counted]

    def vectors(self, values: Float[Tensor, "n B T d"]) -> Float[Tensor, "n tokens d"]:
        """The counted tokens of a per-layer, per-token vector."""
        return values[:, self.counted]


def capture(
    model: nn.Module,
    input_ids: Int[Tensor, "B T"],
    attention_mask: Shaped[Tensor, ...] | None = None,
    *,
    skip_first: bool = True,
    device: torch.device | str | None = None,
) -> Trace:
    """Run `model` once in evaluation mode and record residual stream, attention and MLP outputs by hooks.

    Works on any model that :mod:`gnomon.core.layers` can take apart. The language-model head isn't run.
    Memory: about 3 n B T d numbers. In parallel blocks (GPT-NeoX, Phi-2) attention and MLP read the same
    input; the contribution is their sum there too.

    Args:
        model: a decoder-only model, wrapped (DDP, peft) or not.
        input_ids: token ids.
        attention_mask: [B, T], 1 for tokens, 0 for padding; left and right padding both work.
        skip_first: leave the first token of each sequence out of `counted`. It is an attention sink with a
            huge norm and hardly any correction, and would dominate small averages.
        device: where the trace is kept (default: where each layer's output is).

    Raises:
        UsageError: if no mask is given and the batch looks padded, or the mask has another shape or values
            other than 0 and 1.
        NumericalFailure: if a layer reads or writes NaN or infinity.
        GnomonError: if a layer's output is not its input plus the two recorded parts (a layout this code
            misreads, or a model that normalises the residual stream itself, such as OPT-350m).
    """
    stack = decoder_stack(model)
    real = _real_tokens(stack.root, input_ids, attention_mask)
    position = torch.where(real, real.long().cumsum(1) - 1, -1)
    recording = _Recording(stack, tuple(input_ids.shape), device)
    arguments = {"input_ids": input_ids, "use_cache": False}
    if attention_mask is not None and not bool(real.all()):
        # Learned positions (GPT-2) must not count the padding on the left.
        arguments |= {"attention_mask": attention_mask, "position_ids": position.clamp_min(0)}
    with torch.no_grad(), evaluation_mode(stack.runner), recording:
        stack.runner(**_accepted(stack.runner, arguments))
    trace = Trace(
        x=recording.x,
        attn=recording.attn,
        mlp=recording.mlp,
        position=position.to(recording.x.device),
        counted=(position >= int(skip_first)).to(recording.x.device),
        input_ids=input_ids.to(recording.x.device),
        calls=tuple(recording.calls),
    )
    _check_additive(trace, stack, recording.dtype)
    return trace


def _accepted(runner: nn.Module, arguments: dict[str, Any]) -> dict[str, Any]:
    """The arguments that the module's forward pass takes by name."""
    named = inspect.signature(runner.forward).parameters
    if "attention_mask" in arguments and "attention_mask" not in named:
        raise UsageError(
            f"{type(runner).__name__}.forward takes no attention_mask, so padding can't be masked. "
            "Capture one unpadded sequence at a time."
        )
    return {name: value for name, value in arguments.items() if name in named}


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """The precision of all measurements: float32, or float64 if the model already has it."""
    return torch.promote_types(dtype, torch.float32)


class _Recording(ExitStack):
    """Hooks on every layer for the length of a `with` block."""

    x: Tensor
    attn: Tensor
    mlp: Tensor
    dtype: torch.dtype

    def __init__(
        self, stack: DecoderStack, shape: tuple[int, ...], device: torch.device | str | None
    ) -> None:
        super().__init__()
        self.layers, self.shape, self.device = stack.layers, shape, device
        self.calls: list[Mapping[str, Any]] = []

    def __enter__(self) -> _Recording:
        for index, layer in enumerate(self.layers):
            parts = sublayers(layer)
            self._hook(layer.register_forward_pre_hook(self._entering, with_kwargs=True))
            self._hook(layer.register_forward_hook(self._into("x", index + 1)))
            self._hook(parts.attn_out.register_forward_hook(self._into("attn", index)))
            self._hook(parts.mlp_out.register_forward_hook(self._into("mlp", index)))
        return self

    def _hook(self, handle: torch.utils.hooks.RemovableHandle) -> None:
        self.callback(handle.remove)

    def _entering(self, layer: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        hidden, rest = bound_arguments(layer, args, kwargs)
        if not self.calls:  # the first layer: now width, precision and device are known
            self.dtype = hidden.dtype
            shape = (len(self.layers), *self.shape, hidden.shape[-1])
            self.attn = torch.empty(
                shape, device=self.device or hidden.device, dtype=working_dtype(hidden.dtype)
            )
            self.mlp = torch.empty_like(self.attn)
            self.x = self.attn.new_empty(shape[0] + 1, *shape[1:])
            self.x[0] = hidden
        self.calls.append(rest)

    def _into(self, name: str, index: int) -> Callable[[nn.Module, Any, Any], None]:
        def hook(_module: nn.Module, _args: Any, output: Any) -> None:
            # The reshape is for OPT, which flattens B and T before its MLP.
            getattr(self, name)[index] = hidden_of(output).reshape(*self.shape, -1)

        return hook


def bound_arguments(
    layer: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[Tensor, dict[str, Any]]:
    """A layer's call as (hidden state, all other arguments by name); GPT-2 passes some by position."""
    call = inspect.signature(layer.forward).bind(*args, **kwargs)
    named: dict[str, Any] = {}
    for name, value in call.arguments.items():
        if call.signature.parameters[name].kind is inspect.Parameter.VAR_KEYWORD:
            named.update(value)
        else:
            named[name] = value
    hidden = named.pop(next(iter(named)))
    return hidden, named


def _real_tokens(root: nn.Module, input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """[B, T] True for tokens that are no padding."""
    if input_ids.ndim != 2 or input_ids.shape[1] < 2:
        raise UsageError(
            f"input_ids must be [sequences, positions >= 2], got shape {tuple(input_ids.shape)}."
        )
    if mask is not None:
        if mask.shape != input_ids.shape:
            raise UsageError(
                f"attention_mask has shape {tuple(mask.shape)}, input_ids {tuple(input_ids.shape)}. "
                "They must be equal: 1 for tokens, 0 for padding."
            )
        if not bool(((mask == 0) | (mask == 1)).all()):
            raise UsageError(
                "attention_mask must hold 1 for tokens and 0 for padding. An additive mask (0 and large negative "
                "numbers) would count padding as text and text as padding."
            )
        return mask.bool()
    pad = getattr(getattr(root, "config", None), "pad_token_id", None)
    if pad is not None:
        padding = input_ids == pad
        if bool(padding[:, -1].any()) or bool(padding[:, :2].all(1).any()):
            raise UsageError(
                f"A sequence begins or ends with the padding token {pad} and there is no attention_mask, so "
                "padding would be counted as text. Pass attention_mask (all ones if these are real tokens)."
            )
    return torch.ones_like(input_ids, dtype=torch.bool)


def _check_additive(trace: Trace, stack: DecoderStack, dtype: torch.dtype) -> None:
    """Refuse a trace in which x[i+1] is not x[i] + attn[i] + mlp[i], up to the rounding of two additions."""
    tolerance = 4 * torch.finfo(dtype).eps
    for index, layer in enumerate(stack.layers):
        parts = (trace.x[index], trace.x[index + 1], trace.attn[index], trace.mlp[index])
        error = (parts[0] + parts[2] + parts[3] - parts[1]).norm(dim=-1)
        scale = torch.stack([part.norm(dim=-1) for part in parts]).amax(0)
        worst = torch.where(
            trace.position >= 0, error / scale.clamp_min(torch.finfo(scale.dtype).tiny), 0
        ).max()
        if not bool(worst.isfinite()):
            raise NumericalFailure(
                f"Layer {index} ({type(layer).__name__}) reads or writes numbers that are not finite. Check the "
                f"model's weights, or run it in float32 (now {dtype})."
            )
        if not bool(worst <= tolerance):
            raise GnomonError(
                f"Layer {index} ({type(layer).__name__}): input + attention + MLP misses its output by "
                f"{float(worst):.1e} of their norm (limit {tolerance:.0e}). Either the layer changes the "
                "residual stream in another way (a norm or a scale on it), or gnomon.core.layers.sublayers "
                "misreads its layout. The analysis needs an additive residual stream."
            )
