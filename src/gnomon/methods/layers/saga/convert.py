"""Converting a pretrained model with grouped queries: fewer key heads, everything else as it was.

    aligned   the best shared keys of rank 1 per frequency, see `align`; the rest of the difference goes into W_Q
    mean      the mean of the heads that are merged, as GQA is made from multi-head attention
    first     the first of them

Values and output projection stay. What is lost is for training to recover (`distill`).

Here:  what a model must be, the new weights.
Not here: the algebra (`align`), the statistics of a model's keys (`calibrate`), model classes (`hf`).

Shapes: K new key heads, r old ones each, F = d/2.
"""

from __future__ import annotations

import copy
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from jaxtyping import Complex
from torch import Tensor, nn

from gnomon.core.errors import UsageError, unknown
from gnomon.core.layers import unwrap

from .align import align, first_keys, fold_queries, mean_keys, merge_keys, retained
from .calibrate import Calib, key_moments
from .config import SagaConfig
from .model import attentions, key_norm, narrow_keys, require_fit

__all__ = ["INITS", "Alignment", "align_model", "default_key_heads", "require_convertible", "to_saga"]

INITS = ("aligned", "mean", "first")

M = TypeVar("M", bound=nn.Module)


@dataclass(frozen=True)
class Alignment:
    """How the key heads of each layer are mixed."""

    u: tuple[Complex[Tensor, "K F r"], ...]
    energy: tuple[float, ...]
    """Share of the energy of a layer's keys that the shared heads keep: the diagnostic of the card."""
    tokens: int
    """Calibration tokens."""


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
        calibration: text for `aligned`, 10^4 to 10^6 tokens in batches, or a finished alignment. The weights alone
            won't do: with C = 1 the result is worse than the mean.
        init: one of `INITS`.
        inplace: change this model instead of a copy.

    Raises:
        UsageError: a model, head counts or an initialisation without a rule; bad batches.
        NumericalFailure: keys that aren't finite.
    """
    require_convertible(model, config, init)
    root: Any = unwrap(model)
    if any(parameter.is_meta for parameter in root.parameters()):
        raise UsageError(
            "Some weights are on the meta device and have no values. Load the whole model first."
        )
    groups = config.num_key_heads
    merges = root.config.get_text_config(decoder=True).num_key_value_heads > groups
    found = _alignment(root, groups, calibration) if merges and init == "aligned" else None
    if not inplace:
        root = copy.deepcopy(root)
    for depth, attn in enumerate(attentions(root)):
        if merges:
            _merge(attn, groups, init, None if found is None else found.u[depth])
    from .hf import adopt  # Transformers is loaded: the model is one of its own

    adopt(root, config)
    return root  # type: ignore[no-any-return]


def _alignment(root: Any, groups: int, calibration: Any) -> Alignment:
    """The given one, if it fits, or the one of the given text."""
    if calibration is None:
        raise UsageError(
            "init='aligned' needs text. Pass calibration=[ids, ...], token ids of shape (B, T), 10^4 to 10^6 tokens of "
            "the text that the model is for; or take init='mean'."
        )
    if not isinstance(calibration, Alignment):
        return align_model(root, groups, calibration)
    modules = attentions(root)
    held = root.config.get_text_config(decoder=True).num_key_value_heads
    wanted = [(groups, attn.head_dim // 2, held // groups) for attn in modules]
    if [tuple(u.shape) for u in calibration.u] != wanted:
        raise UsageError(
            f"The alignment is for {len(calibration.u)} layers of shape {tuple(calibration.u[0].shape)} (key heads, "
            f"pairs, heads merged), not for {len(wanted)} of {wanted[0]}. Make it with align_model of this model."
        )
    return calibration


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


def align_model(model: nn.Module, key_heads: int, calibration: Calib) -> Alignment:
    """The alignment of all layers, from the model's own keys on some text.

    Raises:
        UsageError: bad batches.
        NumericalFailure: keys that aren't finite.
    """
    sums, tokens = key_moments(model, key_heads, calibration)
    energy = []
    for s in sums:
        trace = s.diagonal(dim1=-2, dim2=-1).real.sum(-1)
        least = torch.finfo(trace.dtype).tiny
        energy.append(float((retained(s) * trace).sum() / trace.sum().clamp(min=least)))
    return Alignment(tuple(align(s) for s in sums), tuple(energy), tokens)
