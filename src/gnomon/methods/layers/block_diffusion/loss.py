r"""The training loss: a bound on −log p(x) = −Σ_b log p(x^b | x^{<b}), per token.

.. math:: \frac1L \sum_b \mathbb E_{t_b}\Big[\frac1{t_b} \sum_{\ell \in b,\ x_t^\ell = m}
          -\log p_\theta(x^\ell \mid x_t^b, x^{<b})\Big]

Every token of block b is masked with probability t_b, independently. One pass over [x_t; x_0] with
:func:`block_diff_mask` gives all blocks' terms, each after its clean prefix.

Shapes: R rows, L tokens, nb = L / B blocks, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.layers import unwrap

from ..own_masks import as_given
from .config import BlockDiffusionConfig
from .fit import require_fit, takes
from .masks import block_diff_mask, require_blocks, sources


@dataclass(frozen=True)
class Noised:
    """Sequences after noise."""

    noisy_ids: Int[Tensor, "R L"]
    """x_t: the tokens, or the mask token."""
    masked: Bool[Tensor, "R L"]
    weights: Float[Tensor, "R L"]
    """1/t at masked tokens, 0 elsewhere; float32."""


@dataclass(frozen=True)
class DiffusionTerms:
    """The loss and what to log beside it, since 1/t makes it noisy."""

    loss: Float[Tensor, ""]
    """Nats per token, the bound's estimate."""
    masked_nll: Float[Tensor, ""]
    """Unweighted mean over masked tokens, in nats; without gradient, 0 where nothing is masked."""
    masked: int


def draw_times(
    rows: int, blocks: int, cfg: BlockDiffusionConfig, generator: torch.Generator | None = None
) -> Float[Tensor, "R nb"]:
    """Noise levels, one for each block, stratified: of n draws one falls into each n-th of [t_min, t_max].

    Which block gets which stratum is shuffled, or the first block of a single row would never be seen all masked.
    """
    n = rows * blocks
    v = (torch.rand(n, generator=generator) + torch.randperm(n, generator=generator)) / n
    return (cfg.t_min + (cfg.t_max - cfg.t_min) * v).view(rows, blocks)


def noise(
    input_ids: Int[Tensor, "R L"],
    cfg: BlockDiffusionConfig,
    generator: torch.Generator | None = None,
    *,
    loss_mask: Bool[Tensor, "R L"] | None = None,
    times: Float[Tensor, "R nb"] | None = None,
) -> Noised:
    """Mask tokens at random.

    Args:
        generator: on the CPU; None draws from the ambient random state.
        loss_mask: tokens that may be masked, such as those of a response; all by default. With token shift the first
            token of a sequence never is, since nothing comes before it.
        times: noise levels; drawn by default.

    Raises:
        UsageError: L isn't whole blocks; the mask token among the tokens; times outside (0, 1].
    """
    rows, length = input_ids.shape
    require_blocks(length, cfg.block_size)
    if bool((input_ids == cfg.mask_token_id).any()):
        raise UsageError(
            f"The texts hold the mask token {cfg.mask_token_id}, which can't be told from noise. Use a token that "
            "texts never hold."
        )
    t = draw_times(rows, length // cfg.block_size, cfg, generator) if times is None else times.float().cpu()
    if not bool(((t > 0) & (t <= 1)).all()):
        raise UsageError("Noise levels must lie in (0, 1]: the weight is 1/t.")
    t = t.repeat_interleave(cfg.block_size, 1)
    masked = (torch.rand(rows, length, generator=generator) < t).to(input_ids.device)
    t = t.to(input_ids.device)
    if loss_mask is not None:
        masked &= loss_mask
    if cfg.token_shift:
        masked[:, 0] = False
    return Noised(input_ids.masked_fill(masked, cfg.mask_token_id), masked, masked / t)


def denoiser_logits(
    model: nn.Module,
    noisy_ids: Int[Tensor, "R L"],
    input_ids: Int[Tensor, "R L"],
    cfg: BlockDiffusionConfig,
    position_ids: Int[Tensor, "_ _"] | None = None,
) -> Float[Tensor, "R L V"]:
    """Logits of every token given its noisy block and the clean blocks before; −∞ for the mask token.

    Args:
        position_ids: (R, L) of the tokens, the same in both halves; 0 to L − 1 by default. Others let short rows stand
            for long texts of which blocks were left out.

    Raises:
        UsageError: L isn't whole blocks, positions of another shape, or a model that can't be one.
    """
    rows, length = input_ids.shape
    require_blocks(length, cfg.block_size)
    require_fit(model, cfg)
    device = input_ids.device
    at = torch.arange(length, device=device).expand(rows, -1) if position_ids is None else position_ids
    if at.shape != input_ids.shape:
        raise UsageError(f"position_ids are {list(at.shape)}, but the tokens {list(input_ids.shape)}.")
    seen = block_diff_mask(length, cfg.block_size, device)[None, None]
    keep = sources(length, cfg.block_size, shift=cfg.token_shift, device=device)
    less = takes(unwrap(model), "logits_to_keep")
    logits = model(
        input_ids=torch.cat([noisy_ids, input_ids], 1),
        position_ids=torch.cat([at, at], 1).to(device),
        attention_mask=as_given(seen, model),
        use_cache=False,
        **({"logits_to_keep": keep} if less else {}),
    ).logits
    return without_mask(logits if less else logits[:, keep], cfg)


def without_mask(logits: Float[Tensor, "*rest V"], cfg: BlockDiffusionConfig) -> Float[Tensor, "*rest V"]:
    """The logits in float32 at least, −∞ for the mask token."""
    wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
    column = torch.tensor([cfg.mask_token_id], device=logits.device)
    return wide.index_fill(-1, column, -torch.inf)


def weighted_terms(
    logits: Float[Tensor, "R L V"],
    input_ids: Int[Tensor, "R L"],
    weights: Float[Tensor, "R L"],
    loss_mask: Bool[Tensor, "R L"] | None = None,
) -> DiffusionTerms:
    """The loss of given logits: Σ weights · nll, over the tokens that count (masked or not).

    Raises:
        UsageError: `loss_mask` leaves no token.
    """
    counted = input_ids.numel() if loss_mask is None else int(loss_mask.sum())
    if counted == 0:
        raise UsageError("loss_mask leaves no token with a loss. Leave such batches out.")
    masked = weights > 0
    nll = F.cross_entropy(logits[masked], input_ids[masked], reduction="none")
    total = (nll * weights[masked].to(nll.dtype)).sum() / counted
    plain = nll.detach().sum() / max(len(nll), 1)
    return DiffusionTerms(total, plain, len(nll))


def diffusion_terms(
    model: nn.Module,
    input_ids: Int[Tensor, "R L"],
    cfg: BlockDiffusionConfig,
    loss_mask: Bool[Tensor, "R L"] | None = None,
    *,
    generator: torch.Generator | None = None,
    noised: Noised | None = None,
) -> DiffusionTerms:
    """:func:`block_diffusion_loss` with the unweighted loss of masked tokens beside it."""
    if noised is None:
        noised = noise(input_ids, cfg, generator, loss_mask=loss_mask)
    logits = denoiser_logits(model, noised.noisy_ids, input_ids, cfg)
    return weighted_terms(logits, input_ids, noised.weights, loss_mask)


def block_diffusion_loss(
    model: nn.Module,
    input_ids: Int[Tensor, "R L"],
    cfg: BlockDiffusionConfig,
    loss_mask: Bool[Tensor, "R L"] | None = None,
    *,
    generator: torch.Generator | None = None,
    noised: Noised | None = None,
) -> Float[Tensor, ""]:
    """One draw of the bound, in nats per token that counts.

    Args:
        loss_mask: tokens that are masked and have a loss; the others are given. All by default.
        generator: draws noise levels and masks, on the CPU; None takes the ambient random state.
        noised: noise that was drawn already.

    Raises:
        UsageError: as :func:`noise` and :func:`denoiser_logits`.
        NumericalFailure: the loss isn't finite.
    """
    loss = diffusion_terms(model, input_ids, cfg, loss_mask, generator=generator, noised=noised).loss
    if not bool(torch.isfinite(loss)):
        raise NumericalFailure(
            f"The block-diffusion loss is {float(loss)}. A lower learning rate, or float32, may help."
        )
    return loss
