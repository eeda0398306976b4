r"""MaskLLM: an N:M mask learned end to end, as a choice among the masks of each group.

Paper: "MaskLLM: Learnable Semi-Structured Sparsity for Large Language Models", read from its repository.
Here:  the masks of a group, logits with a prior, Gumbel softmax with its schedules, the loss, the training loop, the
       final choice.
Not here: where the prior comes from (`prune`), training over several devices.
Inferred: the optimizer is AdamW without weight decay; the prior's centre is N²/M, the mean of ⟨mask, prior⟩ over all
       masks (1 for 2:4); schedules are linear in the step; "std" is that of the logits as drawn.
Differs from the paper: steps and batches are what the caller gives; the paper's are 2000 × 256 × 4096 tokens.
Limits: every weight trains C(M, N)/M logits in float32 (1.5 for 2:4), with two moments each.

Shapes: G groups of M weights, K = C(M, N) masks.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn import functional as F

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.layers import is_conv1d, unwrap

from ..calibration import Batch, arguments, state_kept
from .quota import Pattern
from .targets import matrix

MOST = 300
"""Masks of a group: 2:4 has 6, 4:8 has 70."""


@dataclass(frozen=True, kw_only=True)
class MaskLLMConfig:
    """Settings of the training; defaults from the paper."""

    steps: int = 2000
    """One batch each, in turn."""
    lr: float = 5e-5
    """Of the logits, which enter multiplied by `scale`."""
    init_std: float = 0.01
    """Of the logits at the start."""
    prior_strength: float = 3.0
    """How far a prior mask moves the logits, in standard deviations."""
    temperature: tuple[float, float] = (4.0, 0.05)
    """Of the softmax, first and last."""
    scale: tuple[float, float] = (1e2, 5e2)
    """Of the logits, first and last."""
    weight_reg: float = 1e-5
    """Of − Σ ‖W ⊙ M‖², falling to zero: it keeps large weights, and with them gradients."""
    seed: int = 0
    """Of the start and the Gumbel noise."""

    def __post_init__(self) -> None:
        if self.steps < 0 or self.seed < 0:
            raise UsageError(f"steps={self.steps} and seed={self.seed} must be at least 0.")
        for name in ("lr", "init_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise UsageError(f"{name}={getattr(self, name)} must be positive and finite.")
        for name in ("temperature", "scale"):
            if not all(0 < end < math.inf for end in getattr(self, name)):
                raise UsageError(
                    f"{name}={getattr(self, name)} must be two positive numbers, first and last."
                )
        if not (0 <= self.prior_strength < math.inf and 0 <= self.weight_reg < math.inf):
            raise UsageError(
                f"prior_strength={self.prior_strength} and weight_reg={self.weight_reg} must be finite, 0 or more."
            )


def masks_of(pattern: Pattern) -> Float[Tensor, "K M"]:
    """All masks of a group that keep N of M, as 0 and 1.

    Raises:
        UsageError: more than `MOST`.
    """
    if (count := math.comb(pattern.of, pattern.keep)) > MOST:
        raise UsageError(
            f"Groups of {pattern} have {count:,} masks, each with a logit for every group; {MOST} are the most. Take a "
            "smaller M, such as 2:4 or 4:8."
        )
    chosen = itertools.combinations(range(pattern.of), pattern.keep)
    masks = torch.zeros(count, pattern.of)
    for row, kept in enumerate(chosen):
        masks[row, list(kept)] = 1
    return masks


def initial_logits(
    shape: tuple[int, int],
    pattern: Pattern,
    prior: Bool[Tensor, "out in"] | None,
    config: MaskLLMConfig,
    generator: torch.Generator,
) -> Float[Tensor, "out groups K"]:
    r"""Drawn from N(0, init_std), plus :math:`(\langle m, m_0 \rangle - N^2/M) \, \sigma \, strength` under a prior."""
    masks = masks_of(pattern)
    size = (shape[0], shape[1] // pattern.of, len(masks))
    logits = config.init_std * torch.randn(size, generator=generator)
    if prior is not None:
        alike = prior.cpu().float().view(*size[:2], pattern.of) @ masks.T
        logits += (alike - pattern.keep**2 / pattern.of) * logits.std(correction=0) * config.prior_strength
    return logits


def soft_mask(
    logits: Float[Tensor, "out groups K"],
    masks: Float[Tensor, "K M"],
    *,
    temperature: float,
    scale: float,
    noise: Float[Tensor, "out groups K"] | float = 0.0,
) -> Float[Tensor, "out in"]:
    r"""Expected mask under a sample: softmax((scale · logits + g) / τ) @ masks; the N of a group sum to N."""
    return (((scale * logits + noise) / temperature).softmax(-1) @ masks).flatten(1)


def hard_mask(logits: Float[Tensor, "out groups K"], masks: Float[Tensor, "K M"]) -> Bool[Tensor, "out in"]:
    """The mask with the highest logit."""
    return masks[logits.argmax(-1)].flatten(1) != 0


def learn_masks(
    model: nn.Module,
    matrices: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    patterns: Mapping[str, Pattern],
    config: MaskLLMConfig,
    prior: Mapping[str, Bool[Tensor, "_ _"]] | None = None,
) -> dict[str, Bool[Tensor, "_ _"]]:
    """Train the logits of all matrices together; the model is left as it was.

    Args:
        patterns: of each matrix; those that keep all or nothing have nothing to learn.
        prior: masks to start near.

    Raises:
        NumericalFailure: a loss that isn't finite.
    """
    root = unwrap(model)
    generator = torch.Generator().manual_seed(config.seed)
    logits: dict[str, nn.Parameter] = {}
    tables: dict[str, Tensor] = {}
    fixed: dict[str, Tensor] = {}
    for name, module in matrices.items():
        weight, pattern = matrix(module), patterns[name]
        if pattern.keep in (0, pattern.of):
            fixed[name] = torch.full(weight.shape, pattern.keep > 0, device=weight.device)
            continue
        shape = (weight.shape[0], weight.shape[1])
        start = initial_logits(shape, pattern, None if prior is None else prior[name], config, generator)
        logits[name] = nn.Parameter(start.to(weight.device))
        tables[name] = masks_of(pattern).to(weight.device)
    if logits and config.steps:
        _train(root, matrices, batches, logits, tables, fixed, config)
    learned = {name: hard_mask(values.detach(), tables[name]) for name, values in logits.items()}
    return {name: (learned | fixed)[name] for name in matrices}


def _train(
    root: nn.Module,
    matrices: Mapping[str, nn.Module],
    batches: Sequence[Batch],
    logits: Mapping[str, nn.Parameter],
    tables: Mapping[str, Tensor],
    fixed: Mapping[str, Tensor],
    config: MaskLLMConfig,
) -> None:
    optimizer = torch.optim.AdamW(list(logits.values()), lr=config.lr, weight_decay=0.0)
    noises = {values.device: torch.Generator(values.device) for values in logits.values()}
    for generator in noises.values():
        generator.manual_seed(config.seed + 1)
    at = next(root.parameters()).device
    with state_kept(root), torch.enable_grad():
        for step in range(config.steps):
            done = step / max(config.steps - 1, 1)
            temperature, scale = (_between(ends, done) for ends in (config.temperature, config.scale))
            batch = batches[step % len(batches)].to(at)
            weights = {f"{name}.weight": _stored(matrices[name], mask) for name, mask in fixed.items()}
            kept = torch.zeros((), device=at)
            for name, values in logits.items():
                noise = _gumbel(values, noises[values.device])
                mask = soft_mask(values, tables[name], temperature=temperature, scale=scale, noise=noise)
                masked = weights[f"{name}.weight"] = _stored(matrices[name], mask)
                kept = kept + masked.float().square().sum().to(at)
            loss = _loss(root, weights, batch) - config.weight_reg * (1 - done) * kept
            if not bool(torch.isfinite(loss)):
                raise NumericalFailure(
                    f"The loss is {float(loss.detach())} at step {step} of MaskLLM. Lower lr, or run in bfloat16 or "
                    "float32."
                )
            optimizer.zero_grad(set_to_none=True)
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()


def _loss(root: nn.Module, weights: Mapping[str, Tensor], batch: Batch) -> Tensor:
    """Mean next-token loss over real targets, nats, under masked weights."""
    logits = functional_call(root, dict(weights), args=(), kwargs=arguments(root, batch)).logits
    real = batch.real[:, 1:] & batch.real[:, :-1]
    return F.cross_entropy(logits[:, :-1][real].float(), batch.input_ids[:, 1:][real])


def _stored(module: nn.Module, mask: Tensor) -> Tensor:
    """The masked weight as the layer stores it."""
    masked = matrix(module) * mask.to(matrix(module).dtype)
    return masked.T if is_conv1d(module) else masked


def _gumbel(like: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.empty_like(like, requires_grad=False).exponential_(generator=generator)
    return -noise.clamp(min=torch.finfo(noise.dtype).tiny).log()


def _between(ends: tuple[float, float], done: float) -> float:
    return ends[0] + (ends[1] - ends[0]) * done
