r"""The correcting layer as a function of its input at one token: :math:`b'_t(x)`.

:math:`b'_t(x) = \mathrm{Attn}(x)_t + \mathrm{MLP}(\cdot)_t` is the contribution of layer i+1 at token t when
its input there is x and every other token keeps its own (step 7 of the method). Attention is causal, so
earlier tokens don't see the change and their keys and values are constants: they are computed once. Any
number of variants is then evaluated together as extra positions behind the sequence, each with the rotary
phase of its token, seeing what the token saw and itself, but not the other variants. A Jacobian of d rows
costs about as much as a sequence of d tokens in one layer.

A layer without such a key-value interface (recurrent, fixed biases in attention) is run over the whole
sequence for each variant instead. Which path runs is decided by trying: a path is used if, at the unperturbed
input, it returns the contribution that was captured.
"""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.layers import decoder_stack, hidden_of, sublayers
from gnomon.core.modes import evaluation_mode

from .trace import Trace, working_dtype

log = logging.getLogger(__name__)

CACHE_ARGUMENTS = ("past_key_values", "layer_past", "past_key_value")
PATHS = ("auto", "token", "sequence")


class NextLayer:
    """Layer ``layer + 1`` of the model, prepared for one sequence of a trace.

    Half-precision layers are copied to float32 once, so that a derivative isn't rounding noise.

    Args:
        model: the model the trace was taken from, unchanged since.
        layer: index i of the corrected layer, 0 <= i < n - 1. The function is that of layer i + 1.
        row: which sequence of the batch.
        path: "token" (earlier keys and values fixed), "sequence" (run all tokens), or "auto": the first
            of the two that reproduces the captured contribution.

    Raises:
        UsageError: index out of range, or a trace made by hand (it holds no calls).
        GnomonError: if no path reproduces the trace, e.g. because the weights have changed since.
    """

    def __init__(self, model: nn.Module, trace: Trace, layer: int, row: int = 0, path: str = "auto") -> None:
        n, batch, length, width = trace.attn.shape
        if len(trace.calls) != n:
            raise UsageError(
                "This trace holds no layer calls. Only a trace made by capture() can be run again."
            )
        if not 0 <= layer < n - 1:
            raise UsageError(f"layer={layer} has no next layer in a model of {n}. Use 0 to {n - 2}.")
        if not 0 <= row < batch:
            raise UsageError(f"row={row} is outside the trace's batch of {batch}. Use 0 to {batch - 1}.")
        if path not in PATHS:
            raise UsageError(f"path={path!r} is unknown. Use one of {', '.join(PATHS)}.")
        self.index, self.width, self.length = layer, width, length
        self.position = trace.position[row]
        self.counted = trace.counted[row]
        block = decoder_stack(model).layers[layer + 1]
        parameter = next(block.parameters(), trace.x)
        self.device, self.dtype = parameter.device, working_dtype(parameter.dtype)
        self.half = parameter.dtype != self.dtype
        self.block = copy.deepcopy(block).to(self.dtype) if self.half else block
        self.parts = sublayers(self.block)
        self.x = trace.x[layer + 1, row].to(self.device, self.dtype)
        self.a = trace.contribution[layer, row].to(self.device, self.dtype)
        self.b = trace.contribution[layer + 1, row].to(self.device, self.dtype)
        self.call = {
            name: self._of_row(value, row, batch)
            for name, value in trace.calls[layer + 1].items()
            if name not in CACHE_ARGUMENTS
        }
        self._contribution = self._choose(path)

    def __call__(self, tokens: Int[Tensor, " K"], x: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        """b' for K variants, differentiable in x: variant k replaces the layer's input at `tokens[k]`."""
        # The plain attention kernel has both derivative modes; fused ones do not.
        with evaluation_mode(self.block), sdpa_kernel(SDPBackend.MATH):
            return self._contribution(tokens, x)

    def at(self, token: int, moved: Float[Tensor, "K d"]) -> Float[Tensor, "K d"]:
        """b'(D) at one token for K displacements D of its input."""
        return self(torch.full((len(moved),), token, device=self.device), self.x[token] + moved)

    def basis(self) -> Float[Tensor, "d d"]:
        """The coordinate axes of the residual stream, as rows."""
        return torch.eye(self.width, device=self.device, dtype=self.dtype)

    def token(self, token: int) -> int:
        """Check a token index and return it."""
        if not 0 <= token < self.length or int(self.position[token]) < 0:
            real = (self.position >= 0).nonzero()
            raise UsageError(
                f"token={token} is padding or outside the sequence, whose tokens are "
                f"{int(real.min())} to {int(real.max())}."
            )
        return token

    def _choose(self, path: str) -> Callable[[Tensor, Tensor], Tensor]:
        """The first path that reproduces the trace."""
        reasons = []
        for name in ("token", "sequence") if path == "auto" else (path,):
            try:
                function = self._token_path() if name == "token" else self._over_sequence
                error = self._error(function)
            except Exception as failure:  # a foreign layer may fail in any way when it is called in ours
                reasons.append(f"{name}: {type(failure).__name__}: {failure}")
                continue
            limit = 0.1 if self.half else 1e-4  # also in float64: RMSNorm rounds to float32 inside
            if error <= limit:
                if reasons:
                    log.info("layer %d runs over whole sequences (%s)", self.index + 1, "; ".join(reasons))
                return function
            reasons.append(
                f"{name}: differs from the captured contribution by {error:.1e} (limit {limit:.0e})"
            )
        raise GnomonError(
            f"Layer {self.index + 1} ({type(self.block).__name__}) can't be run again at one token. "
            f"{'; '.join(reasons)}. Were weights, dtype or attention implementation changed since capture()? "
            "Capturing with attn_implementation='sdpa' or 'eager' in float32 is the safest."
        )

    @torch.no_grad()
    def _error(self, function: Callable[[Tensor, Tensor], Tensor]) -> float:
        """Relative error of b'(x) at the last real token, beside a variant that must not leak into it."""
        last = int((self.position >= 0).nonzero().max())
        x = torch.stack([self.x[last] + self.a[last], self.x[last]])
        with evaluation_mode(self.block), sdpa_kernel(SDPBackend.MATH):
            found = function(torch.tensor([last, last], device=self.device), x)[1]
        return float((found - self.b[last]).norm() / self.b[last].norm().clamp_min(1e-30))

    def _run(self, hidden: Tensor, call: dict[str, Any]) -> Tensor:
        """Attn + MLP at every position of `hidden`, taken where they enter the residual stream."""
        added: list[Tensor] = []

        def collect(_module: nn.Module, _args: Any, output: Any) -> None:
            added.append(hidden_of(output).reshape(hidden.shape))

        hooks = [part.register_forward_hook(collect) for part in (self.parts.attn_out, self.parts.mlp_out)]
        try:
            self.block(hidden, **call)
        finally:
            for hook in hooks:
                hook.remove()
        return added[0] + added[1]

    def _token_path(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Compute keys and values of the sequence once; return the function that reuses them."""
        accepted = inspect.signature(self.block.forward).parameters
        cache_name = next((name for name in CACHE_ARGUMENTS if name in accepted), None)
        if cache_name is None:
            raise UsageError("the layer takes no key-value cache")
        recorder = _Keys()
        with torch.no_grad(), evaluation_mode(self.block):
            self._run(self.x[None], self.call | {cache_name: recorder})
        if len(recorder.seen) != 1:
            raise UsageError(f"the layer wrote {len(recorder.seen)} times to its key-value cache, not once")
        past = _Past(*recorder.seen[0])
        allowed = self._additive_mask()  # (1 or heads, T, T)
        blocked = torch.finfo(torch.float32).min  # in range of every dtype that scores may be computed in

        def contribution(tokens: Tensor, x: Tensor) -> Tensor:
            count = len(tokens)
            earlier = allowed[:, tokens].clone()  # (., K, T)
            earlier[:, torch.arange(count), tokens] = blocked  # its own old key is replaced by ...
            own = torch.full((count, count), blocked, device=x.device, dtype=x.dtype)
            own.fill_diagonal_(0.0)  # ... the new one, and variants don't see each other
            mask = torch.cat([earlier, own.expand(len(earlier), -1, -1)], dim=-1)[None]
            call = {name: self._at(value, tokens) for name, value in self.call.items()}
            call |= {"attention_mask": mask, cache_name: past}
            return self._run(x[None], call)[0]

        return contribution

    def _over_sequence(self, tokens: Tensor, x: Tensor) -> Tensor:
        """One full sequence per variant, cut behind the last token that is asked for."""
        end = int(tokens.max()) + 1
        variants = torch.arange(len(tokens), device=x.device)
        replaced = torch.zeros(len(tokens), end, 1, device=x.device, dtype=torch.bool)
        replaced[variants, tokens] = True
        hidden = torch.where(replaced, x[:, None], self.x[:end])  # (K, end, d)
        kept = torch.arange(end, device=x.device)
        call = {name: self._at(value, kept) for name, value in self.call.items()}
        mask = self.call.get("attention_mask")
        if isinstance(mask, Tensor):
            call["attention_mask"] = mask[..., :end, :end] if mask.ndim == 4 else mask[..., :end]
        return self._run(hidden, call)[variants, tokens]

    def _additive_mask(self) -> Tensor:
        """[1 or heads, T, T]: 0 where a query (row) may look at a key (column), very negative elsewhere."""
        mask = self.call.get("attention_mask")
        causal = torch.ones(self.length, self.length, dtype=torch.bool, device=self.device).tril()[None]
        if isinstance(mask, Tensor) and mask.ndim == 4 and mask.dtype != torch.bool:
            return mask[0].clamp_min(torch.finfo(torch.float32).min)
        if isinstance(mask, Tensor):
            causal = mask[0] if mask.ndim == 4 else causal & mask.bool()
        return torch.zeros_like(causal, dtype=self.dtype).masked_fill(~causal, torch.finfo(torch.float32).min)

    def _of_row(self, value: Any, row: int, batch: int) -> Any:
        """The part of a layer argument that belongs to one sequence, in the working precision."""
        if isinstance(value, tuple):
            return tuple(self._of_row(part, row, batch) for part in value)
        if not isinstance(value, Tensor):
            return value
        value = value[row : row + 1] if value.ndim > 1 and value.shape[0] == batch else value
        return value.to(self.device, self.dtype if value.is_floating_point() else value.dtype)

    def _at(self, value: Any, tokens: Tensor) -> Any:
        """A layer argument at the given positions: rotary tables [1, T, .] and position ids [1, T] or [T]."""
        if isinstance(value, tuple):
            return tuple(self._at(part, tokens) for part in value)
        if not isinstance(value, Tensor):
            return value
        axis = min(1, value.ndim - 1)
        return value.index_select(axis, tokens) if value.shape[axis] == self.length else value


class _Keys:
    """Stands in for an empty key-value cache and remembers what a layer writes to it."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, Tensor]] = []

    def update(self, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        self.seen.append((key, value))
        return key, value

    def get_seq_length(self, *_args: Any) -> int:
        return 0


class _Past:
    """Stands in for a filled key-value cache that is only read: `update` appends without storing."""

    def __init__(self, key: Tensor, value: Tensor) -> None:
        self.key, self.value = key, value  # (1, heads, T, head width)

    def update(self, key: Tensor, value: Tensor, *_args: Any, **_kwargs: Any) -> tuple[Tensor, Tensor]:
        return torch.cat([self.key, key], dim=-2), torch.cat([self.value, value], dim=-2)

    def get_seq_length(self, *_args: Any) -> int:
        return self.key.shape[-2]
