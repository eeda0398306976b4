"""Converting a pretrained model with grouped queries: fewer key heads, everything else as it was.

    aligned   the best shared keys of rank 1 per frequency, see `align`; the rest of the difference goes into W_Q
    mean      the mean of the heads that are merged, as GQA is made from multi-head attention
    first     the first of them

Values and output projection stay. What is lost is for training to recover (`distill`).

Here:  what a model must be, the statistics of its own keys, the new weights.
Not here: the algebra (`align`), model classes (`hf`).
Differs from the card: S_f = E[z zᴴ] is summed over the keys that the projections put out, not made from E[x xᵀ], which
        is the same (biases included) and takes r² numbers per frequency instead of D² per layer.

Shapes: B sequences, T tokens, K new key heads, r old ones each, F = d/2.
"""

from __future__ import annotations

import copy
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Complex
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError, unknown
from gnomon.core.layers import decoder_stack, unwrap
from gnomon.core.scoring import evaluating, position_ids

from .align import align, first_keys, fold_queries, mean_keys, merge_keys, moments, pairs, retained
from .config import SagaConfig
from .model import attentions, key_norm, narrow_keys, require_fit

__all__ = [
    "INITS",
    "Alignment",
    "align_model",
    "default_key_heads",
    "key_moments",
    "require_convertible",
    "to_saga",
]

INITS = ("aligned", "mean", "first")

Calib = Sequence[Tensor | Mapping[str, Tensor]]
"""Batches: token ids (B, T), or dictionaries with `input_ids` and perhaps `attention_mask`, both (B, T)."""

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Alignment:
    """How the key heads of each layer are mixed."""

    u: tuple[Complex[Tensor, "K F r"], ...]
    energy: tuple[float, ...]
    """Share of the energy of a layer's keys that the shared heads keep: the diagnostic of the card."""
    tokens: int
    """Calibration tokens; 0: from the weights alone."""


def default_key_heads(value_heads: int) -> int:
    """The largest divisor of the value heads that is at most a quarter of them, or 1."""
    return max(h for h in range(1, max(1, value_heads // 4) + 1) if value_heads % h == 0)


def require_convertible(model: nn.Module, config: SagaConfig, init: str) -> None:
    """Refuse models, head counts and initialisations that have no rule, by classes and shapes alone.

    Raises:
        UsageError: with the reason and the way out.
    """
    if init not in INITS:
        raise unknown("initialisation", init, INITS)
    require_fit(model)
    root: Any = unwrap(model)
    modules = attentions(root)
    if any(getattr(attn, "saga", None) is not None for attn in modules):
        raise UsageError(f"{type(root).__name__} is a SAGA model already. Convert the original.")
    settings = root.config.get_text_config(decoder=True)
    held = settings.num_key_value_heads
    config.require_queries(settings.num_attention_heads)
    if config.num_value_heads != held:
        raise UsageError(
            f"num_value_heads={config.num_value_heads}, but the model has {held}, and its values are kept as they are."
        )
    if held % config.num_key_heads:
        raise UsageError(
            f"{held} key heads can't be merged into {config.num_key_heads}. Take a divisor of {held}."
        )
    for attn in modules:
        for part in (attn.q_proj, attn.k_proj):
            if type(part) is not nn.Linear:
                raise UsageError(
                    f"A projection is a {type(part).__name__}, not a plain nn.Linear. Merge adapters into the weights "
                    "first, or load the model unquantized."
                )
    if init == "aligned" and config.num_key_heads < held:
        _require_alignable(root, modules)


def _require_alignable(root: Any, modules: Sequence[Any]) -> None:
    other = "Use init='mean' or 'first', and train afterwards."
    for attn in modules:
        if key_norm(attn) is not None:
            raise UsageError(
                f"{type(attn).__name__} normalises its keys after the projection and weighs the dimensions of a pair "
                f"differently, so that no mix of heads can be folded into its queries. {other}"
            )
    if getattr(root.config, "clip_qkv", None) is not None:
        raise UsageError(f"clip_qkv={root.config.clip_qkv} cuts off keys after the projection. {other}")
    widths = {2 * len(m.inv_freq) for m in root.modules() if isinstance(getattr(m, "inv_freq", None), Tensor)}
    if widths != {modules[0].head_dim}:
        what = f"{min(widths)} of {modules[0].head_dim} dimensions" if widths else "none of its dimensions"
        raise UsageError(f"{type(root).__name__} rotates {what}; the alignment is for whole heads. {other}")
    rotate = getattr(sys.modules[type(modules[0]).__module__], "rotate_half", None)
    probe = torch.arange(1.0, 5.0)
    if rotate is None or rotate(probe).tolist() != [-3, -4, 1, 2]:
        raise UsageError(
            f"{type(root).__name__} doesn't rotate dimensions f and f + d/2 together, as the alignment needs. {other}"
        )


def to_saga(
    model: M,
    config: SagaConfig,
    calibration: Calib | Alignment | None = None,
    init: str = "aligned",
    *,
    inplace: bool = False,
) -> M:
    """The model with `config.num_key_heads` key heads, as one of type `gnomon_saga`.

    Args:
        model: a Transformers decoder with grouped queries, or with as many key heads as query heads.
        calibration: text for `aligned`, 10^4 to 10^6 tokens in batches, or a finished alignment. None takes the
            weights alone, as if inputs were white, which aligns worse.
        init: one of `INITS`.
        inplace: change this model instead of a copy.

    Raises:
        UsageError: a model, head counts or an initialisation without a rule; bad batches.
        NumericalFailure: keys that aren't finite.
    """
    require_convertible(model, config, init)
    root: Any = unwrap(model)
    if not inplace:
        root = copy.deepcopy(root)
    if any(parameter.is_meta for parameter in root.parameters()):
        raise UsageError(
            "Some weights are on the meta device and have no values. Load the whole model first."
        )
    groups = config.num_key_heads
    merges = root.config.get_text_config(decoder=True).num_key_value_heads > groups
    found: Alignment | None = None
    if merges and init == "aligned":
        found = calibration if isinstance(calibration, Alignment) else align_model(root, groups, calibration)
    for depth, attn in enumerate(attentions(root)):
        if merges:
            _merge(attn, groups, init, None if found is None else found.u[depth])
    from .hf import adopt  # Transformers is loaded: the model is one of its own

    adopt(root, config)
    return root  # type: ignore[no-any-return]


@torch.no_grad()
def _merge(attn: Any, groups: int, init: str, u: Tensor | None) -> None:
    """New key projection, and queries that fit it."""
    width, old = attn.head_dim, attn.k_proj
    needs = old.weight.requires_grad
    narrow_keys(attn, groups)
    for name in ("weight", "bias"):
        rows = getattr(old, name)
        if rows is None:
            continue
        if u is None:
            new = (mean_keys if init == "mean" else first_keys)(rows, groups, width)
        else:
            new = merge_keys(rows, u.to(rows.device), width)
        getattr(attn.k_proj, name).copy_(new)
    attn.k_proj.requires_grad_(needs)
    if u is not None:
        for rows in (attn.q_proj.weight, attn.q_proj.bias):
            if rows is not None:
                rows.copy_(fold_queries(rows, u.to(rows.device), width))


def align_model(model: nn.Module, key_heads: int, calibration: Calib | None = None) -> Alignment:
    """The alignment of all layers, from the model's own keys on some text, or from its weights alone.

    Raises:
        UsageError: bad batches.
        NumericalFailure: keys that aren't finite.
    """
    if calibration is None:
        sums, tokens = [_white(attn, key_heads) for attn in attentions(model)], 0
    else:
        sums, tokens = key_moments(model, key_heads, calibration)
    energy = []
    for s in sums:
        trace = s.diagonal(dim1=-2, dim2=-1).real.sum(-1)
        energy.append(
            float((retained(s) * trace).sum() / trace.sum().clamp(min=torch.finfo(trace.dtype).tiny))
        )
    return Alignment(tuple(align(s) for s in sums), tuple(energy), tokens)


def _white(attn: Any, groups: int) -> Tensor:
    """S of inputs with E[x xᵀ] = 1 and mean 0, the bias as one more input that is always 1."""
    rows = attn.k_proj.weight.detach()
    if attn.k_proj.bias is not None:
        rows = torch.cat([rows, attn.k_proj.bias.detach()[:, None]], 1)
    return moments(pairs(rows, attn.head_dim), groups).cpu()


def key_moments(
    model: nn.Module, key_heads: int, calibration: Calib
) -> tuple[list[Complex[Tensor, "K F r r"]], int]:
    """(S of each layer, tokens): mean of z zᴴ over real tokens, in one pass of the dense model.

    Raises:
        UsageError: no batches, or bad ones.
        NumericalFailure: keys that aren't finite; names the layer.
    """
    batches = list(_checked(calibration, model))
    modules = attentions(model)
    sums: list[Any] = [0.0] * len(modules)
    real: list[Tensor] = []

    def hook(depth: int, width: int) -> Any:
        def add(module: nn.Module, args: Any, keys: Tensor) -> None:
            rows = keys.detach().flatten(0, -2)[real[-1].flatten().to(keys.device)]
            if not bool(torch.isfinite(rows).all()):
                raise NumericalFailure(
                    f"The keys of layer {depth} hold NaN or infinity on the calibration text. Run the model in "
                    "bfloat16 or float32."
                )
            z = pairs(rows.T, width)  # (heads, F, N)
            sums[depth] = sums[depth] + moments(z, key_heads).cpu()

        return add

    handles = [attn.k_proj.register_forward_hook(hook(i, attn.head_dim)) for i, attn in enumerate(modules)]
    runner = decoder_stack(model).runner  # without the head, whose logits nobody needs here
    at = next(model.parameters()).device
    try:
        with evaluating(model):
            for ids, mask in batches:
                real.append(torch.ones_like(ids, dtype=torch.bool) if mask is None else mask != 0)
                runner(**_arguments(runner, ids.to(at), None if mask is None else mask.to(at)))
    finally:
        for handle in handles:
            handle.remove()
    tokens = int(sum(int(one.sum()) for one in real))
    return [s / tokens for s in sums], tokens


def _arguments(runner: nn.Module, ids: Tensor, mask: Tensor | None) -> dict[str, Any]:
    inputs: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if mask is not None:
        inputs["attention_mask"] = mask
        if "position_ids" in inspect.signature(runner.forward).parameters:
            inputs["position_ids"] = position_ids(mask)
    return inputs


def _checked(calibration: Any, model: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    if (
        isinstance(calibration, str | Mapping | Tensor)
        or not isinstance(calibration, Sequence)
        or not len(calibration)
    ):
        raise UsageError(
            "calibration must be a list of batches: token ids of shape (B, T), or dictionaries with input_ids and "
            "attention_mask. Pass calibration=[ids, ...]."
        )
    embedding = getattr(unwrap(model), "get_input_embeddings", lambda: None)()
    vocabulary = getattr(embedding, "num_embeddings", None)
    some = False
    for i, one in enumerate(calibration):
        ids = one.get("input_ids") if isinstance(one, Mapping) else one
        mask = one.get("attention_mask") if isinstance(one, Mapping) else None
        if not isinstance(ids, Tensor) or ids.ndim != 2 or ids.is_floating_point():
            raise UsageError(f"Batch {i} of calibration holds no token ids of shape (B, T).")
        if mask is not None and mask.shape != ids.shape:
            raise UsageError(
                f"Batch {i} has input_ids of {list(ids.shape)} and a mask of {list(mask.shape)}."
            )
        if ids.numel() and vocabulary is not None and not 0 <= int(ids.min()) <= int(ids.max()) < vocabulary:
            raise UsageError(
                f"Batch {i} holds ids from {int(ids.min())} to {int(ids.max())}, but the model knows 0 to "
                f"{vocabulary - 1}. Was it made with another tokenizer?"
            )
        some = some or bool(ids.numel() if mask is None else (mask != 0).any())
        yield ids, mask
    if not some:
        raise UsageError("The calibration text holds no tokens.")


@contextmanager
def only_trainable(model: nn.Module, parts: Sequence[str]) -> Iterator[None]:
    """Inside, only the attention projections of these names learn; each parameter gets its own setting back."""
    before = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    for parameter, _ in before:
        parameter.requires_grad_(False)
    for attn in attentions(model):
        for part in parts:
            getattr(attn, part).requires_grad_(True)
    try:
        yield
    finally:
        for parameter, needed in before:
            parameter.requires_grad_(needed)
