"""A decoder layer by layer: each layer's inputs are held for all batches, and only they.

Here:  the inputs of the first layer, what else every layer is called with, and one layer at a time.
Not here: what is done to a layer between its two runs.
Limits: a model whose layers exchange more than the hidden state (values of earlier layers, per-layer embeddings made
       from it) is refused; prune it in one pass of the whole model (sequential=False).

The calls of the layers are learned by running the model with layers that hand their input on unchanged. That a call
doesn't depend on the hidden state is checked on the first batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.core.errors import UsageError
from gnomon.core.layers import DecoderStack, decoder_stack, hidden_of

from ..calibration import Batch, arguments

HIDDEN = "hidden_states"
Store = torch.device | None


@dataclass
class Call:
    """One layer's call on one batch, apart from the hidden state."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    by_name: bool
    """The hidden state is passed as `hidden_states=`, not first."""


@dataclass
class Step:
    """One decoder layer with what it reads on every batch."""

    index: int
    name: str
    """Dotted name inside the unwrapped model."""
    layer: nn.Module
    batches: Sequence[Batch]
    _inputs: list[Tensor]
    _calls: list[list[Call]]
    _store: Store

    @torch.no_grad()
    def run(self, each: Callable[[Batch], Any] | None = None, *, keep: bool = False) -> None:
        """Run the layer on all batches, as it is now.

        Args:
            each: makes the context in which a batch is run, such as `Collector.watching`.
            keep: its outputs become the inputs of the next step.
        """
        at = _device(self.layer)
        for i, batch in enumerate(self.batches):
            call = self._calls[i][self.index]
            x = self._inputs[i].to(at)
            moved = {k: _moved(v, at) for k, v in call.kwargs.items()}
            rest = tuple(_moved(v, at) for v in call.args)
            if each is None:
                y = self._call(call, x, rest, moved)
            else:
                with each(batch):
                    y = self._call(call, x, rest, moved)
            if keep:
                self._inputs[i] = y if self._store is None else y.to(self._store)

    def _call(self, call: Call, x: Tensor, rest: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        if call.by_name:
            return hidden_of(self.layer(*rest, **{HIDDEN: x}, **kwargs))
        return hidden_of(self.layer(x, *rest, **kwargs))


def layer_by_layer(
    model: nn.Module, batches: Sequence[Batch], *, store: torch.device | str | None = "cpu"
) -> Iterator[Step]:
    """The decoder layers in order; after each the consumer has to have called `run(keep=True)`, which feeds the next.

    The model should be in evaluation mode (`calibration.state_kept`).

    Args:
        store: where the inputs of the layer at hand lie; None: on the device that made them.

    Raises:
        UsageError: a model whose layers can't be run one after the other.
    """
    stack = decoder_stack(model)
    where = None if store is None else torch.device(store)
    inputs, calls = _calls_of(stack, batches, where)
    for index, layer in enumerate(stack.layers):
        yield Step(index, f"{stack.name}.{index}", layer, batches, inputs, calls, where)


@torch.no_grad()
def _calls_of(
    stack: DecoderStack, batches: Sequence[Batch], store: Store
) -> tuple[list[Tensor], list[list[Call]]]:
    inputs: list[Tensor] = []
    calls: list[list[Call]] = []
    at = next(stack.root.parameters()).device
    forms: list[Any] = []
    for i, batch in enumerate(batches):
        moved = batch.to(at)
        if i == 0:
            forms, dense = _dense(stack, moved)
        recorder = _Recorder(len(stack.layers), store)
        with _handing_on(stack.layers, recorder, forms):
            stack.runner(**arguments(stack.runner, moved))
        recorder.require_whole(stack)
        if i == 0 and not _equal(dense, recorder.calls):
            raise UsageError(
                f"The layers of {type(stack.root).__name__} are called with more than the hidden state of the layer "
                "before, so they can't be pruned one after the other. Pass sequential=False."
            )
        inputs.append(recorder.first)
        calls.append([call for call in recorder.calls if call is not None])
    return inputs, calls


def _dense(stack: DecoderStack, batch: Batch) -> tuple[list[Any], list[Call | None]]:
    """One ordinary pass: the forms of the layers' outputs, and their calls."""
    recorder = _Recorder(len(stack.layers), None)
    outputs: list[Any] = [None] * len(stack.layers)
    forms: list[Any] = [None] * len(stack.layers)
    chained = True

    def before(index: int) -> Any:
        def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            nonlocal chained
            x = recorder.note(index, args, kwargs)
            if index and outputs[index - 1] is not None:
                last = outputs[index - 1]
                chained &= x is last or (x.shape == last.shape and torch.equal(x.to(last.device), last))
                outputs[index - 1] = None

        return hook

    def after(index: int) -> Any:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            outputs[index] = hidden_of(output)
            forms[index] = None if isinstance(output, Tensor) else len(output)

        return hook

    hooks = []
    for index, layer in enumerate(stack.layers):
        hooks.append(layer.register_forward_pre_hook(before(index), with_kwargs=True))
        hooks.append(layer.register_forward_hook(after(index)))
    try:
        stack.runner(**arguments(stack.runner, batch))
    finally:
        for hook in hooks:
            hook.remove()
    recorder.require_whole(stack)
    if not chained:
        raise UsageError(
            f"Something in {type(stack.root).__name__} changes the hidden state between two layers, so they can't be "
            "pruned one after the other. Pass sequential=False."
        )
    return forms, recorder.calls


class _Recorder:
    """Notes calls; a tensor that several layers are given is held once."""

    def __init__(self, count: int, store: Store) -> None:
        self.store, self.kept = store, dict[int, tuple[Tensor, Tensor]]()
        self.calls: list[Call | None] = [None] * count
        self.times = [0] * count
        self.first = torch.empty(0)

    def note(self, index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
        """Record one call and give its hidden state."""
        self.times[index] += 1
        by_name = not args
        x = kwargs[HIDDEN] if by_name else args[0]
        if not isinstance(x, Tensor):
            raise UsageError(
                f"Decoder layer {index} isn't given a hidden state first. Pass sequential=False."
            )
        if index == 0:
            self.first = self._held(x)
        rest = {key: self._kept(value) for key, value in kwargs.items() if not (by_name and key == HIDDEN)}
        self.calls[index] = Call(tuple(self._kept(value) for value in args[1:]), rest, by_name)
        return x

    def require_whole(self, stack: DecoderStack) -> None:
        if self.times != [1] * len(self.times):
            raise UsageError(
                f"The layers of {type(stack.root).__name__} aren't run once each and in order. Pass sequential=False."
            )

    def _kept(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            if id(value) not in self.kept:
                self.kept[id(value)] = (value, self._held(value))  # the key's owner stays alive with it
            return self.kept[id(value)][1]
        if type(value) in (tuple, list):
            return type(value)(self._kept(one) for one in value)
        return value

    def _held(self, value: Tensor) -> Tensor:
        return value.detach() if self.store is None else value.detach().to(self.store)


@contextmanager
def _handing_on(layers: Sequence[nn.Module], recorder: _Recorder, forms: Sequence[Any]) -> Iterator[None]:
    """Layers that note how they are called and return their hidden state unchanged."""
    before = [layer.__dict__.get("forward") for layer in layers]

    def forward_of(index: int) -> Any:
        def forward(*args: Any, **kwargs: Any) -> Any:
            x = recorder.note(index, args, kwargs)
            return x if forms[index] is None else (x, *([None] * (forms[index] - 1)))

        return forward

    try:
        for index, layer in enumerate(layers):
            layer.__dict__["forward"] = forward_of(index)
        yield
    finally:
        for layer, own in zip(layers, before, strict=True):
            if own is None:
                layer.__dict__.pop("forward", None)
            else:
                layer.__dict__["forward"] = own


def _equal(one: Any, other: Any) -> bool:
    """Equal calls, tensor by tensor; other objects are taken as equal if they are of one type."""
    if isinstance(one, Call) and isinstance(other, Call):
        return (
            one.by_name == other.by_name and _equal(one.args, other.args) and _equal(one.kwargs, other.kwargs)
        )
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return one.shape == other.shape and torch.equal(one.cpu(), other.cpu())
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    if isinstance(one, tuple | list) and isinstance(other, tuple | list):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return type(one) is type(other)


def _moved(value: Any, at: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(at)
    if type(value) in (tuple, list):
        return type(value)(_moved(one, at) for one in value)
    return value


def _device(layer: nn.Module) -> torch.device:
    return next(layer.parameters()).device
