"""Scoring against plain loops, brute force in float64, hand values and Transformers' own loss."""

from __future__ import annotations

import math
from itertools import pairwise
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gnomon.core import scoring
from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.scoring import Question, perplexity, score_choices, stream_nll, token_nll, windows

LAYOUTS = ["llama", "gpt2", "gpt_neox", "opt", "gemma2"]
CLOSE = {"rtol": 1e-5, "atol": 2e-6}  # float32 against float64: losses of order 1 to 10


def ids(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(3, 40, shape, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def slow_nll(model: Any, row: Tensor) -> Tensor:
    """Source of truth: one prefix at a time, unpadded, float64."""
    wide = model.double()
    losses = [
        -torch.log_softmax(wide(input_ids=row[None, :t]).logits[0, -1].double(), -1)[row[t]]
        for t in range(1, len(row))
    ]
    model.float()
    return torch.stack(losses)


class Bigram(nn.Module):
    """Logits that depend on the current token only, so that losses can be written down by hand."""

    config = SimpleNamespace(max_position_embeddings=64)

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, use_cache: bool = False
    ) -> Any:
        return SimpleNamespace(logits=self.table[input_ids])


# ------------------------------------------------------------------------------------------ token_nll


@pytest.mark.parametrize("layout", LAYOUTS)
def test_token_nll_equals_one_prefix_at_a_time(tiny_lm: Any, layout: str) -> None:
    model, row = tiny_lm(layout), ids(9)
    truth = slow_nll(model, row)
    assert truth.std() > 0.2 or layout == "gemma2"  # far from uniform, so that a shifted target shows
    torch.testing.assert_close(token_nll(model, row[None])[0].detach().double(), truth, **CLOSE)


def test_token_nll_mean_is_transformers_loss(tiny_llama: Any) -> None:
    x = ids(3, 11)
    torch.testing.assert_close(token_nll(tiny_llama, x).mean(), tiny_llama(input_ids=x, labels=x).loss)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_padding_changes_nothing(tiny_lm: Any, layout: str, side: str, attention: str) -> None:
    model = tiny_lm(layout, attn_implementation=attention)
    rows = [ids(n, seed=n) for n in (2, 5, 9)]
    batch, mask = torch.full((3, 9), 7), torch.zeros(3, 9, dtype=torch.long)
    for r, row in enumerate(rows):
        at = slice(9 - len(row), 9) if side == "left" else slice(0, len(row))
        batch[r, at], mask[r, at] = row, 1
    with torch.no_grad():
        padded = token_nll(model, batch, mask)
        for r, row in enumerate(rows):
            at = slice(9 - len(row), 8) if side == "left" else slice(0, len(row) - 1)
            torch.testing.assert_close(padded[r, at], token_nll(model, row[None])[0], **CLOSE)
            assert padded[r].count_nonzero() == len(row) - 1  # pads score 0


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_equal_whole_and_pass_gradients(
    tiny_lm: Any, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = tiny_lm(layout), ids(2, 9)
    whole = token_nll(model, x)
    gradients = torch.autograd.grad(whole.sum(), list(model.parameters()))
    monkeypatch.setattr(scoring, "LOGIT_BYTES", 4 * 2 * 40 * 3)  # three positions at a time
    widths: list[int] = []
    head = model.get_output_embeddings()
    handle = head.register_forward_hook(lambda _m, _a, out: widths.append(out.shape[1]))
    sliced = token_nll(model, x)
    handle.remove()
    torch.testing.assert_close(sliced, whole, **CLOSE)
    for a, b in zip(torch.autograd.grad(sliced.sum(), list(model.parameters())), gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)  # sums over positions in another order
    # Gemma 2 caps its logits after the head: found out, and run whole.
    assert (max(widths) == 9) if layout == "gemma2" else (max(widths) == 3)


def test_bfloat16_is_scored_in_float32(tiny_llama: Any) -> None:
    nll = token_nll(tiny_llama.bfloat16(), ids(1, 6))
    logits = tiny_llama(input_ids=ids(1, 6)).logits.float()
    assert nll.dtype == torch.float32
    torch.testing.assert_close(nll[0, 0], -logits[0, 0].log_softmax(-1)[ids(1, 6)[0, 1]])


def test_one_token_has_no_loss(tiny_llama: Any) -> None:
    assert token_nll(tiny_llama, ids(2, 1)).shape == (2, 0)


# ----------------------------------------------------------------------------------------- perplexity


def test_windows_by_hand() -> None:
    assert windows(10, window=4, stride=2) == [(0, 1, 4), (2, 4, 6), (4, 6, 8), (6, 8, 10)]
    assert windows(8, window=4, stride=3) == [(0, 1, 4), (3, 4, 7), (6, 7, 8)]
    assert windows(3, window=4, stride=1) == [(0, 1, 3)]
    assert windows(1, window=4, stride=1) == []


@pytest.mark.parametrize(("window", "stride"), [(2, 1), (5, 3), (7, 6), (16, 1), (64, 63)])
@pytest.mark.parametrize("length", [2, 7, 16, 33])
def test_windows_score_every_target_once_with_the_promised_context(
    length: int, window: int, stride: int
) -> None:
    spans = windows(length, window=window, stride=stride)
    assert [t for _, first, stop in spans for t in range(first, stop)] == list(range(1, length))
    for start, first, stop in spans:
        assert stop - start <= window
        assert first - start >= (window - stride if start else 1)


@pytest.mark.parametrize("batch_size", [1, 3])
def test_stream_nll_equals_brute_force(tiny_llama: Any, batch_size: int) -> None:
    stream, window, stride = ids(23), 8, 3
    truth: dict[int, Tensor] = {}
    for start in range(0, 23, stride):  # every window alone; a target keeps its first score
        for i, loss in enumerate(slow_nll(tiny_llama, stream[start : start + window])):
            truth.setdefault(start + i + 1, loss)
    expected = torch.stack([truth[t] for t in range(1, 23)])
    got = stream_nll(tiny_llama, stream, window=window, stride=stride, batch_size=batch_size)
    torch.testing.assert_close(got.double(), expected, **CLOSE)
    assert not torch.allclose(got, stream_nll(tiny_llama, stream, window=23, stride=1))  # the window matters


def test_perplexity_by_hand(letter_tokenizer: Any) -> None:
    """p = 1/2 for each step 'bos'->'a', 'a'->'b', 'b'->'é': perplexity 2, and 3 bits over 4 bytes."""
    tokenizer = letter_tokenizer()
    table = torch.full((len(tokenizer), len(tokenizer)), -torch.inf)
    chain = tokenizer.convert_tokens_to_ids(["<bos>", "a", "b", "é"])
    for here, there in pairwise(chain):
        table[here, [there, 0]] = 0.0
    result = perplexity(Bigram(table), "abé", tokenizer=tokenizer, window=4, stride=2)
    assert result.tokens == 3
    assert result.nll_per_token == pytest.approx(math.log(2))
    assert result.perplexity == pytest.approx(2)
    assert result.bits_per_byte == pytest.approx(3 / 4)
    bare = perplexity(Bigram(table), torch.tensor(chain[1:]), window=4, stride=2)
    assert (bare.tokens, bare.bits_per_byte) == (2, None)
    assert perplexity(Bigram(table), torch.tensor(chain[1:]), prefix=1, window=4, stride=2).tokens == 3


def test_perplexity_ignores_and_keeps_training_mode(tiny_lm: Any) -> None:
    model = tiny_lm("gpt2", resid_pdrop=0.5, embd_pdrop=0.5).train()
    first = perplexity(model, ids(20), window=8, stride=4)
    assert first == perplexity(model, ids(20), window=8, stride=4)
    assert model.training


def test_perplexity_refuses(tiny_llama: Any, letter_tokenizer: Any) -> None:
    with pytest.raises(UsageError, match=r"stride=8 with window=8.*1 <= stride <= 7"):
        perplexity(tiny_llama, ids(9), window=8, stride=8)
    with pytest.raises(UsageError, match="without a tokenizer"):
        perplexity(tiny_llama, "ab")
    with pytest.raises(UsageError, match=r"two tokens or more.*got 1"):
        perplexity(tiny_llama, ids(1))
    nameless = letter_tokenizer()
    nameless.bos_token = nameless.eos_token = None
    with pytest.raises(UsageError, match=r"neither a bos nor an eos.*prefix="):
        perplexity(tiny_llama, "ab", tokenizer=nameless)
    with pytest.raises(NumericalFailure, match=r"loss over 3 tokens is nan.*float32"):
        perplexity(Bigram(torch.full((40, 40), torch.nan)), ids(4))


# ------------------------------------------------------------------------------------ multiple choice


def conditional(model: Any, context: list[int], continuation: list[int]) -> float:
    """Source of truth: log p(continuation | context), float64, unpadded and unbatched."""
    losses = slow_nll(model, torch.tensor(context + continuation))
    return -losses[len(context) - 1 :].sum().item()


@pytest.mark.parametrize("batch_size", [1, 2, 7])
def test_choices_equal_unbatched_loop(tiny_llama: Any, letter_tokenizer: Any, batch_size: int) -> None:
    tokenizer = letter_tokenizer()
    questions = [
        Question(context="abc:", choices=("d", "de f", "é")),
        Question(context="hgfedcba", choices=("aaaa", "b")),
        Question(context="", choices=("ab", "c"), delimiter=""),
    ]
    for question, got in zip(
        questions, score_choices(tiny_llama, tokenizer, questions, batch_size=batch_size), strict=True
    ):
        context = tokenizer(question.context)["input_ids"] or [tokenizer.bos_token_id]
        for i, choice in enumerate(question.choices):
            continuation = tokenizer(question.delimiter + choice)["input_ids"]
            assert got.loglikelihood[i] == pytest.approx(
                conditional(tiny_llama, context, continuation), rel=1e-5
            )
            assert got.tokens[i] == len(continuation)
    assert score_choices(tiny_llama, tokenizer, questions[:1])[0].bytes == (1, 4, 2)
    assert score_choices(tiny_llama, tokenizer, questions[:1])[0].characters == (1, 4, 1)


def test_choices_with_a_merge_over_the_border(tiny_llama: Any, letter_tokenizer: Any) -> None:
    """'a'+'b' is one token, 'a'+'c' two: both choices are charged from before the 'a'."""
    tokenizer = letter_tokenizer((("a", "b"),))
    [d, a, c, ab] = tokenizer.convert_tokens_to_ids(["d", "a", "c", "ab"])
    question = Question(context="da", choices=("b", "c"), delimiter="")
    [got] = score_choices(tiny_llama, tokenizer, [question])
    assert got.loglikelihood[0] == pytest.approx(conditional(tiny_llama, [d], [ab]), rel=1e-5)
    assert got.loglikelihood[1] == pytest.approx(conditional(tiny_llama, [d], [a, c]), rel=1e-5)
    assert got.tokens == (1, 2)
    assert got.bytes == (1, 1)


def test_choices_keep_a_bos_that_the_tokenizer_adds(tiny_llama: Any, letter_tokenizer: Any) -> None:
    plain, adding = letter_tokenizer(), letter_tokenizer(bos=True)
    question = Question(context="ab", choices=("c",))
    context, continuation = plain("ab")["input_ids"], plain(" c")["input_ids"]
    for tokenizer, before in ((plain, []), (adding, [1])):
        [got] = score_choices(tiny_llama, tokenizer, [question])
        truth = conditional(tiny_llama, before + context, continuation)
        assert got.loglikelihood[0] == pytest.approx(truth, rel=1e-5)


def test_long_contexts_lose_their_beginning(tiny_llama: Any, letter_tokenizer: Any) -> None:
    tokenizer = letter_tokenizer()
    question = Question(context="abcdefgh", choices=("de",), delimiter="")
    [got] = score_choices(tiny_llama, tokenizer, [question], max_length=5)
    fgh, de = tokenizer("fgh")["input_ids"], tokenizer("de")["input_ids"]
    assert got.loglikelihood[0] == pytest.approx(conditional(tiny_llama, fgh, de), rel=1e-5)
    with pytest.raises(UsageError, match=r"takes 2 tokens.*model's 2 for context"):
        score_choices(tiny_llama, tokenizer, [question], max_length=2)
    with pytest.raises(UsageError, match="an empty one has no likelihood"):
        score_choices(tiny_llama, tokenizer, [Question(context="a", choices=("b", ""))])


def test_what_would_score_nothing_or_beyond_the_positions_is_refused(
    tiny_llama: Any, letter_tokenizer: Any
) -> None:
    tokenizer, question = letter_tokenizer(), Question(context="a", choices=("b",))
    for size in (0, -1):
        with pytest.raises(UsageError, match=f"batch_size={size}"):
            perplexity(tiny_llama, ids(20), window=8, stride=4, batch_size=size)
        with pytest.raises(UsageError, match=f"batch_size={size}"):
            score_choices(tiny_llama, tokenizer, [question], batch_size=size)
    limit = tiny_llama.config.max_position_embeddings
    with pytest.raises(UsageError, match=f"exceeds the {limit} positions"):
        perplexity(tiny_llama, ids(limit + 1), window=limit + 1, stride=4)
    with pytest.raises(UsageError, match=f"exceeds the {limit} positions"):
        score_choices(tiny_llama, tokenizer, [question], max_length=limit + 1)
    perplexity(tiny_llama, ids(9), window=limit + 1, stride=4)  # the text itself is short enough


def test_best_follows_the_harness_by_hand() -> None:
    scores = scoring.ChoiceScores(
        loglikelihood=(-4.0, -4.8, -5.0), tokens=(1, 1, 2), bytes=(2, 4, 4), characters=(2, 2, 4)
    )
    assert scores.best() == 0  # -4, -4.8, -5
    assert scores.best("token") == 2  # -4, -4.8, -2.5
    assert scores.best("byte") == 1  # -2, -1.2, -1.25
    assert scores.best("character") == 2  # -2, -2.4, -1.25
