"""Generation against a plain loop without cache or batch, a hand-made model, and exact probabilities."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GenerationConfig

from gnomon.core.errors import UsageError
from gnomon.core.generation import generate, inverse_cdf

PROMPTS = [[3, 9, 4], [5], [7, 8, 6, 10, 11, 12], [30, 4], [21, 22, 23, 24]]


@torch.no_grad()
def slow_greedy(model: Any, prompt: list[int], new: int) -> list[int]:
    row = list(prompt)
    for _ in range(new):
        row.append(int(model(input_ids=torch.tensor([row])).logits[0, -1].argmax()))
    return row[len(prompt) :]


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("layout", ["llama", "gpt2", "gpt_neox", "opt", "gemma2"])
def test_greedy_equals_a_plain_loop_in_any_batch(tiny_lm: Any, layout: str, batch_size: int) -> None:
    model = tiny_lm(layout)
    got = generate(model, PROMPTS, max_new_tokens=6, eos=(), batch_size=batch_size)
    assert got == [slow_greedy(model, prompt, 6) for prompt in PROMPTS]
    assert len({tuple(row) for row in got}) > 1


def test_rows_stop_at_their_own_eos(tiny_llama: Any) -> None:
    free = generate(tiny_llama, PROMPTS, max_new_tokens=6, eos=())
    stop = free[0][2]
    expected = [row[: row.index(stop) + 1] if stop in row else row for row in free]
    assert generate(tiny_llama, PROMPTS, max_new_tokens=6, eos=stop) == expected
    tiny_llama.generation_config = GenerationConfig(eos_token_id=[stop, 39])
    assert generate(tiny_llama, PROMPTS, max_new_tokens=6, eos=None)[0] == expected[0]


def test_settings_of_the_model_are_left_alone_and_unused(tiny_llama: Any) -> None:
    plain = generate(tiny_llama, PROMPTS, max_new_tokens=6, eos=())
    own = GenerationConfig(
        repetition_penalty=50.0, do_sample=True, temperature=9.0, suppress_tokens=[plain[0][0]]
    )
    tiny_llama.generation_config = own
    tiny_llama.train()
    assert generate(tiny_llama, PROMPTS, max_new_tokens=6, eos=()) == plain
    assert tiny_llama.generation_config is own
    assert tiny_llama.training


@pytest.mark.parametrize("cut", [{}, {"top_k": 5}, {"top_p": 0.8}, {"top_k": 7, "top_p": 0.5}])
def test_draws_depend_on_seed_and_row_only(tiny_llama: Any, cut: dict[str, Any]) -> None:
    def draw(prompts: list[list[int]], batch_size: int, generator: Any = 3) -> list[list[int]]:
        options = {"max_new_tokens": 8, "temperature": 1.3, "eos": (), **cut}
        return generate(tiny_llama, prompts, generator=generator, batch_size=batch_size, **options)

    got = draw(PROMPTS, 1)
    assert got == draw(PROMPTS, 2) == draw(PROMPTS, 5)
    assert draw([PROMPTS[0], [3, 3, 3, 3, 3, 3, 3, 3]], 2)[0] == got[0]  # another neighbour
    assert got != draw(PROMPTS, 5, generator=4)
    source = torch.Generator().manual_seed(3)
    assert draw(PROMPTS, 2, source) == got
    assert draw(PROMPTS, 2, source) != got  # a generator that was passed moves on


def test_sampling_follows_the_distribution(tiny_llama: Any) -> None:
    """Frequencies of 4,000 draws within a chi-square bound (p = 1e-4) of the exact cut distribution."""
    from scipy.stats import chi2

    n, k, temperature = 4000, 6, 0.7
    with torch.no_grad():
        logits = tiny_llama(input_ids=torch.tensor([PROMPTS[0]])).logits[0, -1].double() / temperature
    top = logits.topk(k)
    expected = torch.softmax(top.values, -1) * n
    rows = generate(
        tiny_llama, [PROMPTS[0]] * n, max_new_tokens=1, temperature=temperature, top_k=k, eos=(), batch_size=n
    )
    drawn = torch.tensor(rows).flatten()
    counts = torch.tensor([(drawn == token).sum() for token in top.indices]).double()
    assert counts.sum() == n  # nothing outside the cut
    assert ((counts - expected) ** 2 / expected).sum() < chi2.isf(1e-4, k - 1)


def test_inverse_cdf_by_hand() -> None:
    """Mass 0, 1/4, 0, 3/4: the first quarter of [0, 1) is token 1, the rest token 3."""
    scores = torch.tensor([[0.0, 0.25, 0.0, 0.75]]).log()
    for uniform, token in [(0.0, 1), (0.2499, 1), (0.25, 3), (0.9999999, 3)]:
        assert inverse_cdf(scores, torch.tensor([uniform], dtype=torch.float64)).item() == token


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"prompts": [[3], []]}, "Prompt 1 is empty"),
        ({"temperature": -1.0}, "temperature=-1.0 must be finite"),
        ({"temperature": float("nan")}, "temperature=nan must be finite"),
        ({"top_k": 0}, "top_k=0 would keep no token"),
        ({"top_p": 1.5}, r"top_p=1.5 must lie in \(0, 1\]"),
        ({"max_new_tokens": 0}, "max_new_tokens=0"),
    ],
)
def test_refuses(tiny_llama: Any, change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        generate(tiny_llama, **{"prompts": PROMPTS, "max_new_tokens": 2, **change})
