"""MaskLLM. Sources of truth: counts of subsets, sums by hand, gradients in float64, brute force over all masks."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from family_models import tiny_family
from torch import Tensor

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.methods.compress.calibration import mean_nll, require_calib
from gnomon.methods.compress.pruning import (
    MaskLLMConfig,
    Pattern,
    PruneConfig,
    collect_importance,
    hard_mask,
    initial_logits,
    learn_masks,
    masks_of,
    matrix,
    nm_mask,
    prunable,
    prune,
    soft_mask,
)


def ids(rows: int = 4, length: int = 16, seed: int = 0) -> Tensor:
    return torch.randint(3, 40, (rows, length), generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("text", "count"), [("2:4", 6), ("1:4", 4), ("4:8", 70), ("3:5", 10)])
def test_all_masks_of_a_group(text: str, count: int) -> None:
    pattern = Pattern.parse(text)
    masks = masks_of(pattern)
    assert masks.shape == (count, pattern.of) and bool((masks.sum(1) == pattern.keep).all())
    assert len({tuple(row) for row in masks.tolist()}) == count
    assert float((masks @ masks.T).mean()) == pytest.approx(
        pattern.keep**2 / pattern.of
    )  # the prior's centre


def test_a_prior_by_hand() -> None:
    """2:4: the prior itself gains 1 · std · 3, its complement loses as much, the four others stay."""
    prior = torch.tensor([[True, False, False, True]])
    config = MaskLLMConfig()
    plain, moved = (
        initial_logits((1, 4), Pattern(2, 4), which, config, torch.Generator().manual_seed(0))
        for which in (None, prior)
    )
    steps = ((moved - plain) / (3 * plain.std(correction=0)))[0, 0]
    expected = [float((mask * torch.tensor([1.0, 0, 0, 1])).sum()) - 1 for mask in masks_of(Pattern(2, 4))]
    torch.testing.assert_close(steps, torch.tensor(expected), rtol=0, atol=1e-5)
    assert sorted(expected) == [-1, 0, 0, 0, 0, 1]
    wide = initial_logits((200, 40), Pattern(2, 4), None, config, torch.Generator().manual_seed(0))
    assert wide.shape == (200, 10, 6) and float(wide.std()) == pytest.approx(0.01, rel=0.02)
    strong = initial_logits((1, 4), Pattern(2, 4), prior, MaskLLMConfig(prior_strength=9), torch.Generator())
    assert torch.equal(hard_mask(strong, masks_of(Pattern(2, 4))), prior)


def test_soft_masks_become_hard_ones() -> None:
    masks = masks_of(Pattern(2, 4))
    logits = torch.randn(3, 5, 6, generator=torch.Generator().manual_seed(0))
    soft = soft_mask(logits, masks, temperature=4.0, scale=1.0)
    assert soft.shape == (3, 20) and float(soft.min()) > 0 and float(soft.max()) < 1
    torch.testing.assert_close(soft.view(3, 5, 4).sum(-1), torch.full((3, 5), 2.0))
    cold = soft_mask(logits, masks, temperature=1e-4, scale=1.0)
    torch.testing.assert_close(cold, hard_mask(logits, masks).float())
    hand = soft_mask(torch.zeros(1, 1, 6), masks, temperature=1.0, scale=100.0)
    torch.testing.assert_close(hand, torch.full((1, 4), 0.5))
    noise = torch.zeros(1, 1, 6)
    noise[..., 0] = 50.0
    assert soft_mask(
        torch.zeros(1, 1, 6), masks, temperature=1.0, scale=1.0, noise=noise
    ).round().tolist() == [[1, 1, 0, 0]]


def test_gradients() -> None:
    masks = masks_of(Pattern(2, 4)).double()
    logits = torch.randn(
        2, 2, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64
    ).requires_grad_()
    w = torch.randn(2, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda a: (soft_mask(a, masks, temperature=0.7, scale=1.3) * w).square(), (logits,)
    )


def test_training_finds_better_masks_than_it_began_with() -> None:
    """Against magnitude's 2:4 masks on the same text; a loop that doesn't train, or climbs, fails."""
    model = tiny_family("llama", num_hidden_layers=2)
    batches = require_calib([ids(8)], model, "the test")
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    matrices = prunable(model)
    patterns = dict.fromkeys(matrices, Pattern(2, 4))
    scores = collect_importance(model, metric="magnitude")
    start = {name: nm_mask(scores[name], matrix(module), patterns[name]) for name, module in matrices.items()}

    def loss(masks: dict[str, Tensor]) -> float:
        for name, mask in masks.items():
            matrix(matrices[name]).mul_(mask)
        with torch.no_grad():
            found = float(mean_nll(model, batches))
        model.load_state_dict(before)
        return found

    settings: dict[str, Any] = {"steps": 60, "lr": 2e-3, "weight_reg": 0.0}
    learned = learn_masks(model, matrices, batches, patterns, MaskLLMConfig(**settings), start)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(p.requires_grad and p.grad is None for p in model.parameters())
    assert loss(learned) < loss(start) - 0.1
    again = learn_masks(model, matrices, batches, patterns, MaskLLMConfig(**settings), start)
    assert all(
        torch.equal(again[name], mask) for name, mask in learned.items()
    )  # the seed owns the randomness
    other = learn_masks(model, matrices, batches, patterns, MaskLLMConfig(seed=1, **settings), start)
    assert any(not torch.equal(other[name], mask) for name, mask in learned.items())
    still = learn_masks(model, matrices, batches, patterns, MaskLLMConfig(steps=0, prior_strength=9), start)
    assert all(torch.equal(still[name], mask) for name, mask in start.items())


def test_one_group_against_all_its_masks() -> None:
    """A single matrix of one output: of six masks the one with the lowest loss is learned."""
    model = tiny_family("llama", num_hidden_layers=1, intermediate_size=4)
    name = "model.layers.0.mlp.down_proj"
    module = prunable(model)[name]
    w = matrix(module)
    w[1:] = 0  # only the first output has weights, so its group alone matters
    w[0] = torch.tensor([3.0, -2.0, 2.5, 4.0])
    batches = require_calib([ids(8)], model, "the test")
    dense, losses = w.clone(), {}
    for kept in itertools.combinations(range(4), 2):
        mask = torch.zeros(4)
        mask[list(kept)] = 1
        w[0] = dense[0] * mask
        with torch.no_grad():
            losses[kept] = float(mean_nll(model, batches))
    w.copy_(dense)
    config = MaskLLMConfig(steps=150, lr=1e-3, weight_reg=0.0)
    learned = learn_masks(model, {name: module}, batches, {name: Pattern(2, 4)}, config)
    assert tuple(learned[name][0].nonzero()[:, 0].tolist()) == min(losses, key=losses.__getitem__)


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_other_layers(family: str) -> None:
    report = prune(
        tiny_family(family),
        "maskllm",
        pattern="1:4",
        calib=[ids()],
        config=PruneConfig(maskllm=MaskLLMConfig(steps=2)),
    )
    assert report.sparsity == 0.75 and report.off == 0
    for mask in report.masks.values():
        assert bool((mask.reshape(len(mask), -1, 4).sum(-1) == 1).all())


def test_refusals() -> None:
    for wrong, message in (
        ({"lr": 0.0}, "lr=0.0"),
        ({"steps": -1}, "steps=-1"),
        ({"temperature": (4.0, 0.0)}, "temperature"),
        ({"scale": (math.nan, 1.0)}, "scale"),
        ({"weight_reg": -1.0}, "weight_reg=-1.0"),
    ):
        with pytest.raises(UsageError, match=message):
            MaskLLMConfig(**wrong)  # type: ignore[arg-type]
    model = tiny_family("llama")
    model.model.norm.weight.data[0] = math.nan
    with pytest.raises(NumericalFailure, match="loss is nan at step 0"):
        prune(model, "maskllm", pattern="2:4", calib=[ids()], config=PruneConfig(prior=None))
