"""The rivals: LOMO against torch's SGD in float64, LISA against a plain loop of AdamW over what it drew."""

from __future__ import annotations

import copy
import doctest
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.seeding import seeded
from gnomon.core.tiny import build
from gnomon.core.train import TrainConfig, train
from gnomon.methods.optim.baselines import lisa, lomo
from gnomon.methods.optim.baselines.lisa import LISA, Draws
from gnomon.methods.optim.baselines.lomo import LOMO

torch.set_num_threads(1)

TOKENS = torch.randint(0, 259, (8, 2, 12), generator=torch.Generator().manual_seed(1))


def llama(dtype: torch.dtype = torch.float32) -> Any:
    with seeded(0):
        return build("tiny:llama-10k").to(dtype)


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters()}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return all(torch.equal(a[name], b[name]) for name in a.keys() | b.keys())


def walk(model: Any, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> None:
    for t in range(first, first + steps):
        optimizer.zero_grad()
        x = TOKENS[t % len(TOKENS)]
        model(x, labels=x).loss.backward()
        optimizer.step()


# --------------------------------------------------------------------------------------------------- LOMO


@pytest.mark.parametrize("checkpointing", [False, True])
@pytest.mark.parametrize("sign", [False, True])
def test_lomo_is_sgd(checkpointing: bool, sign: bool) -> None:
    """The update of one weight doesn't reach another's gradient: equal to all gradients first, tied weights too."""
    ours, theirs = llama(torch.float64), llama(torch.float64)
    if checkpointing:
        ours.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        ours.train()
    rate = 1e-3 if sign else 0.1
    mine, plain = LOMO(ours, lr=rate, sign=sign), torch.optim.SGD(theirs.parameters(), lr=rate)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(o, 0.8) for o in (mine, plain)]
    for t in range(4):
        walk(ours, mine, 1, first=t)
        assert all(p.grad is None for p in ours.parameters())
        plain.zero_grad()
        theirs(TOKENS[t], labels=TOKENS[t]).loss.backward()
        for p in theirs.parameters() if sign else ():
            assert p.grad is not None
            p.grad.sign_()
        plain.step()
        for scheduler in schedulers:
            scheduler.step()
    for name, p in weights(theirs).items():
        torch.testing.assert_close(weights(ours)[name], p, rtol=1e-12, atol=1e-12)
    assert not same(weights(ours), weights(llama(torch.float64)))


def test_lomo_in_the_training_loop() -> None:
    """No gradient is left, which the loop must accept; it is plain SGD there too, with accumulated batches of one."""

    class Batches:
        def __init__(self) -> None:
            self.at = 0

        def __next__(self) -> Tensor:
            self.at += 1
            return TOKENS[self.at % len(TOKENS)]

        def state_dict(self) -> dict[str, Any]:
            return {}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    ours, theirs = llama(), llama()
    config = TrainConfig(steps=5, lr=0.05, clip=None)
    found = train(ours, Batches(), LOMO(ours, lr=0.05), config)
    expected = train(theirs, Batches(), torch.optim.SGD(theirs.parameters(), lr=0.05), config)
    assert found.losses == pytest.approx(expected.losses, rel=1e-6)
    torch.testing.assert_close(weights(ours), weights(theirs), rtol=1e-5, atol=1e-6)


def test_lomo_resumes_its_draws() -> None:
    """bfloat16 with stochastic rounding: bit for bit after a resume, other with another seed."""

    def fresh(seed: int = 0) -> tuple[Any, LOMO]:
        model = llama(torch.bfloat16)
        return model, LOMO(model, lr=1e-3, seed=seed)

    straight, optimizer = fresh()
    walk(straight, optimizer, 6)
    assert (share := optimizer.on_the_fly.changed()) is not None and 0 < share < 0.5
    cut, first = fresh()
    walk(cut, first, 3)
    state = copy.deepcopy((cut.state_dict(), first.state_dict()))
    again, second = fresh()
    again.load_state_dict(state[0])
    second.load_state_dict(state[1])
    walk(again, second, 3, first=3)
    assert same(weights(again), weights(straight))
    other, another = fresh(1)
    walk(other, another, 6)
    assert not same(weights(other), weights(straight))


def test_lomo_groups_and_close() -> None:
    slow, fast = (nn.Linear(3, 1, bias=False) for _ in range(2))
    begin = slow.weight.detach().clone(), fast.weight.detach().clone()
    optimizer = LOMO([{"params": list(slow.parameters()), "lr": 0.0}], lr=0.1)
    optimizer.add_param_group({"params": list(fast.parameters())})

    def closure() -> Tensor:
        loss = (slow(torch.ones(1, 3)) + fast(torch.ones(1, 3))).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).requires_grad
    assert torch.equal(slow.weight, begin[0])
    torch.testing.assert_close(fast.weight.detach(), begin[1] - 0.1)
    optimizer.close()
    closure()
    assert fast.weight.grad is not None and torch.equal(fast.weight, (begin[1] - 0.1))


def test_lomo_and_gradients_that_are_no_numbers() -> None:
    model = llama()
    optimizer = LOMO(model, lr=0.1)
    begin = weights(model)
    (model(TOKENS[0], labels=TOKENS[0]).loss * math.nan).backward()
    with pytest.raises(NumericalFailure, match=r"of 29 of 29 .* first that of .*kept their values"):
        optimizer.step()
    assert same(weights(model), begin)
    (model(TOKENS[0], labels=TOKENS[0]).loss * math.nan).backward()
    optimizer.zero_grad()  # given up
    walk(model, optimizer, 1)


# --------------------------------------------------------------------------------------------------- LISA


def test_lisa_is_adamw_on_what_it_draws() -> None:
    """A plain loop: one AdamW on everything outside the layers throughout, a fresh one on two layers a turn."""
    ours, theirs = llama(), llama()
    options: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.0}
    optimizer = LISA(ours, layers=2, switch_every=2, **options)
    outside = [p for n, p in theirs.named_parameters() if ".layers." not in n]
    assert len(outside) == 2  # tied embeddings, final norm
    kept = torch.optim.AdamW(outside, **options)
    drawn = []
    for t in range(8):
        names = {block.name for block in optimizer.active_blocks()}
        if t % 2 == 0:
            drawn.append(frozenset(names))
            own = [
                p for n, p in theirs.named_parameters() if n.startswith(tuple(f"{name}." for name in names))
            ]
            fresh = torch.optim.AdamW(own, **options)
        assert len(names) == 2
        walk(ours, optimizer, 1, first=t)
        theirs.zero_grad()
        theirs(TOKENS[t], labels=TOKENS[t]).loss.backward()
        fresh.step()
        kept.step()
        assert same(weights(ours), weights(theirs))
    assert len(set(drawn)) > 1


def test_lisa_draws_without_memory() -> None:
    """Any two of four, equally likely each time: 1,200 draws, 200 of each pair; interval at 1e-4 over six."""
    draws = Draws(4, 2, torch.Generator().manual_seed(0))
    counts: dict[tuple[int, ...], int] = {}
    for _ in range(1200):
        counts[draws.active] = counts.get(draws.active, 0) + 1
        draws.advance()
    assert len(counts) == 6 and all(abs(count - 200) < 55 for count in counts.values())


def test_lisa_resumes_in_the_middle_of_a_turn() -> None:
    straight = llama(torch.bfloat16)
    walk(straight, LISA(straight, lr=1e-3, layers=1, switch_every=3), 9)
    cut = llama(torch.bfloat16)
    walk(cut, first := LISA(cut, lr=1e-3, layers=1, switch_every=3), 4)
    state = copy.deepcopy((cut.state_dict(), first.state_dict()))
    again = llama(torch.bfloat16)
    second = LISA(again, lr=1e-3, layers=1, switch_every=3)
    again.load_state_dict(state[0])
    second.load_state_dict(state[1])
    walk(again, second, 5, first=4)
    assert same(weights(again), weights(straight))
    with pytest.raises(UsageError, match="order='random, 1 together' there, 'random, 2 together' here"):
        LISA(llama(torch.bfloat16), layers=2, switch_every=3).load_state_dict(state[1])


BAD: list[tuple[Callable[[], object], str]] = [
    (lambda: LISA(llama(), layers=0), "layers=0 must lie in 1..3"),
    (lambda: LISA(llama(), layers=4), "layers=4 must lie in 1..3"),
    (lambda: LISA(llama(), blocks="matrix"), "blocks= is what makes LISA what it is"),
    (lambda: LISA(llama(), switch_every=0), "switch_every=0 must be a whole number"),
    (lambda: LISA(nn.Linear(2, 2)), "no list of decoder layers"),
    (lambda: LOMO(llama(), lr=math.nan), "lr=nan must be finite"),
    (lambda: LOMO(llama(), rounding="up"), "Unknown rounding 'up'"),  # type: ignore[arg-type]
    (lambda: LOMO(llama(), batches=0), "batches=0 must be at least 1"),
    (lambda: LOMO(llama(torch.float16)), "is float16, whose gradients need a loss scale"),
    (lambda: LOMO(nn.DataParallel(llama())), "wrapped in DataParallel, which reduces gradients after"),
    (lambda: LOMO(llama()).load_state_dict({"state": {}, "param_groups": []}), "isn't LOMO's"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("act", "message"), BAD)
def test_bad_input(act: Callable[[], object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        act()


def test_the_examples_of_the_docstrings() -> None:
    assert doctest.testmod(lomo) == doctest.TestResults(failed=0, attempted=7)
    assert doctest.testmod(lisa) == doctest.TestResults(failed=0, attempted=7)
