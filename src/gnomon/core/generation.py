"""Greedy and sampled generation in which a row never depends on its neighbours.

`model.generate` does the work (cache, positions, stopping). Sampling is made a deterministic choice: a
logits processor draws one uniform number per row and step from that row's own generator, and puts all mass
on the token it selects, so that batch size and the other rows change nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from .errors import UsageError


def generate(
    model: nn.Module,
    prompts: Sequence[Sequence[int]] | Int[Tensor, "B T"],
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    generator: torch.Generator | int | Sequence[int] = 0,
    eos: int | Iterable[int] | None = None,
    stopping: Any = None,
    batch_size: int = 8,
) -> list[list[int]]:
    """Continue prompts of token ids; returns the new tokens of each row, with the closing eos if it came.

    Prompts are padded on the left. The settings in the model's own `generation_config` are not used, except
    its eos tokens.

    Args:
        temperature: 0 is greedy; otherwise logits are divided by it, then cut by `top_k`, then by `top_p`.
        top_k: keep the k likeliest tokens.
        top_p: keep the likeliest tokens whose mass reaches p.
        generator: source of one seed per row, in order; an int seeds a fresh one, several are the rows' own seeds.
            Unused when greedy.
        eos: tokens that end a row; None takes the model's own, () never stops early.
        stopping: Transformers' stopping criteria, by which rows end, too. What follows the end of such a row in its
            batch is padding, which the caller has to cut off.
        batch_size: rows per pass; changes no result beyond rounding.

    Raises:
        UsageError: on an empty prompt, a setting out of range, or another number of seeds than of prompts.
    """
    from transformers import GenerationConfig

    rows = prompts.tolist() if isinstance(prompts, Tensor) else [list(prompt) for prompt in prompts]
    _check(rows, max_new_tokens, temperature, top_k, top_p, batch_size)
    if eos is None:
        eos = model.generation_config.eos_token_id  # type: ignore[union-attr, assignment]
    stop = {eos} if isinstance(eos, int) else set(eos or ())
    config = GenerationConfig(
        max_new_tokens=max_new_tokens, do_sample=False, eos_token_id=sorted(stop) or None, pad_token_id=0
    )
    seeds: list[int] = []
    if temperature > 0:
        seeds = _seeds(generator, len(rows))
    device = next(model.parameters()).device
    own, was_training = model.generation_config, model.training
    # What a config leaves open, `generate` fills from the model's own one (repetition penalty, ...).
    model.generation_config = GenerationConfig()
    model.eval()
    new: list[list[int]] = []
    try:
        for begin in range(0, len(rows), batch_size):
            group = rows[begin : begin + batch_size]
            width = max(map(len, group))
            ids = torch.tensor([[0] * (width - len(row)) + row for row in group], device=device)
            mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in group], device=device)
            steps = _sampling_steps(temperature, top_k, top_p, seeds[begin : begin + batch_size])
            out = model.generate(  # type: ignore[operator]
                ids,
                attention_mask=mask,
                generation_config=config,
                logits_processor=steps,
                stopping_criteria=stopping,
            )
            new += [_until(row, stop) for row in out[:, width:].tolist()]
    finally:
        model.generation_config = own
        model.train(was_training)
    return new


def _seeds(generator: torch.Generator | int | Sequence[int], count: int) -> list[int]:
    """A seed for each row."""
    if isinstance(generator, Sequence):
        if len(generator) != count:
            raise UsageError(f"{len(generator)} seeds were given for {count} prompts.")
        return list(generator)
    source = torch.Generator().manual_seed(generator) if isinstance(generator, int) else generator
    found: list[int] = torch.randint(2**62, (count,), generator=source, device=source.device).tolist()
    return found


def _sampling_steps(temperature: float, top_k: int | None, top_p: float | None, seeds: Sequence[int]) -> Any:
    from transformers import LogitsProcessorList, TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

    steps = LogitsProcessorList()
    if temperature == 0:
        return steps
    steps.append(TemperatureLogitsWarper(temperature))
    if top_k is not None:
        steps.append(TopKLogitsWarper(top_k))
    if top_p is not None:
        steps.append(TopPLogitsWarper(top_p))
    generators = [torch.Generator().manual_seed(seed) for seed in seeds]

    def draw(_: Int[Tensor, "B T"], scores: Float[Tensor, "B V"]) -> Float[Tensor, "B V"]:
        uniform = torch.stack([torch.rand((), dtype=torch.float64, generator=g) for g in generators])
        chosen = inverse_cdf(scores, uniform.to(scores.device))
        return torch.full_like(scores, -torch.inf).scatter(1, chosen[:, None], 0.0)

    steps.append(draw)
    return steps


def inverse_cdf(scores: Float[Tensor, "B V"], uniform: Float[Tensor, " B"]) -> Int[Tensor, " B"]:
    """Token of each row whose slice of softmax(scores), laid out in vocabulary order, holds `uniform`."""
    mass = scores.double().softmax(-1).cumsum(-1)
    # Scaled by the last sum, which rounding leaves beside 1; `right` skips tokens of zero mass.
    return torch.searchsorted(mass, uniform[:, None] * mass[:, -1:], right=True).squeeze(-1)


def _until(row: list[int], stop: set[int]) -> list[int]:
    """The row up to and with its first stop token (what follows is padding)."""
    return next((row[: i + 1] for i, token in enumerate(row) if token in stop), row)


def _check(
    rows: Sequence[Sequence[int]],
    max_new_tokens: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    batch_size: int,
) -> None:
    for i, row in enumerate(rows):
        if not row:
            raise UsageError(
                f"Prompt {i} is empty: the model needs a token to start from. Give it the bos token."
            )
    if max_new_tokens < 1 or batch_size < 1:
        raise UsageError(
            f"max_new_tokens={max_new_tokens} and batch_size={batch_size} must both be at least 1."
        )
    if not 0 <= temperature < float("inf"):
        raise UsageError(f"temperature={temperature} must be finite and at least 0 (0 is greedy).")
    if top_k is not None and top_k < 1:
        raise UsageError(f"top_k={top_k} would keep no token. Use 1 or more, or None to keep all.")
    if top_p is not None and not 0 < top_p <= 1:
        raise UsageError(f"top_p={top_p} must lie in (0, 1]. Use None to keep all tokens.")
