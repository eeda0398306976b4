"""SAGA's functions. Sources of truth: the card's worked numbers, attention written out in loops and float64, torch's
own scaled_dot_product_attention where head counts are equal, brute force, Monte Carlo.

Negative tests: contiguous buckets, a period of N, a conjugated phase and mean pooling must fail where the method holds.
"""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from gnomon.core.errors import UsageError
from gnomon.kernels import sparse_decode as kernel
from gnomon.kernels.sparse_decode import reference
from gnomon.methods.layers.saga import (
    SELECTORS,
    Asked,
    SagaConfig,
    choose,
    cost_model,
    dense_attention,
    exact,
    expected_recall,
    head_map,
    kept_mass,
    recall,
    select,
    sparse_attention,
    sparse_decode,
)
from gnomon.methods.layers.saga.align import (
    align,
    fold_queries,
    merge_keys,
    moments,
    pairs,
    retained,
    unpaired,
)
from gnomon.methods.layers.saga.attention import dense_weights, seen_and_bias

torch.set_num_threads(1)
CHOOSING = [name for name in SELECTORS if name not in ("dense", "window")]


def rng(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def qkv(
    h_q: int, h_k: int, h_v: int, rows: int, length: int, d: int = 8, batch: int = 2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    draw = rng(seed)
    shapes = ((batch, h_q, rows, d), (batch, h_k, length, d), (batch, h_v, length, d))
    q, k, v = (torch.randn(shape, generator=draw) for shape in shapes)
    return 2 * q, k, v


def settings(h_k: int, h_v: int, n: int, selector: str = "strided", **more: object) -> SagaConfig:
    return SagaConfig(num_key_heads=h_k, num_value_heads=h_v, top_n=n, selector=selector, **more)  # type: ignore[arg-type]


def by_loops(q: Tensor, k: Tensor, v: Tensor, kept: list[list[list[list[int]]]], scale: float) -> Tensor:
    """o_i in float64, one query at a time, over the positions kept[b][i][t]."""
    batch, heads, rows, d = q.shape
    out = torch.zeros(batch, heads, rows, d, dtype=torch.float64)
    for b in range(batch):
        for i in range(heads):
            keys, values = k[b, i * k.shape[1] // heads].double(), v[b, i * v.shape[1] // heads].double()
            for t in range(rows):
                places = kept[b][i][t]
                s = [scale * float(q[b, i, t].double() @ keys[j]) for j in places]
                weights = [math.exp(one - max(s)) for one in s]
                for w, j in zip(weights, places, strict=True):
                    out[b, i, t] += w / sum(weights) * values[j]
    return out


# ---------------------------------------------------------------------------------------------- worked numbers

A_Q = torch.tensor([[1.0, 0], [0, 1], [1, 1], [-1, 0]])[None, :, None]
A_K = torch.tensor([[1.0, 0], [0, 2], [-1, 1], [2, 1]])[None, None]
A_V = torch.tensor([[[1.0, 0], [0, 1], [2, 2], [3, -1]], [[0, 1], [1, 1], [-1, 0], [0.5, 2]]])[None]
A_DENSE = [[2.011152, -0.278621], [1.214963, 0.669762], [0.470457, 1.474191], [-0.240830, 0.525809]]
A_EXACT = [[2.339523, -0.669762], [0.660477, 1.330238], [0.665119, 1.669762], [-0.339523, 0.330238]]
A_ATOP = [*A_EXACT[:2], [0.402215, 1.804430], A_EXACT[3]]


@pytest.mark.parametrize(
    ("selector", "expected"), [("dense", A_DENSE), ("exact", A_EXACT), ("strided", A_ATOP)]
)
def test_example_a(selector: str, expected: list[list[float]]) -> None:
    scale = 2**-0.5
    if selector == "dense":
        out = dense_attention(A_Q, A_K, A_V, scale=scale)
    else:
        out, _ = sparse_attention(A_Q, A_K, A_V, settings(1, 2, 2, selector), scale=scale)
    torch.testing.assert_close(out[0, :, 0], torch.tensor(expected), atol=1e-6, rtol=0)
    assert head_map(4, 1) == [0, 0, 0, 0] and head_map(4, 2) == [0, 0, 1, 1]


def test_example_b_by_the_algebra() -> None:
    rows = torch.tensor([[1.0, 0], [0, 1], [0, -2], [2, 0]])
    s = moments(pairs(rows, 2), 1)
    assert torch.equal(s[0, 0], torch.tensor([[2, -4j], [4j, 8]], dtype=torch.complex128))
    assert torch.linalg.eigvalsh(s[0, 0]).tolist() == pytest.approx([0, 10], abs=1e-12)
    assert float(retained(s)) == pytest.approx(1)
    x, u = torch.tensor([0.5, -1.0]), align(s)
    merged, fold = merge_keys(rows, u, 2), fold_queries(torch.eye(2).repeat(2, 1), u, 2)
    turn = torch.tensor([[math.cos(0.3), -math.sin(0.3)], [math.sin(0.3), math.cos(0.3)]])
    for i, q in enumerate(torch.tensor([[0.3, -0.7], [1.1, 0.2]])):
        still, turned = ((0.85, 2.4)[i], (0.797260, 2.085943)[i])
        own = fold[2 * i : 2 * i + 2] @ q
        assert float(q @ (rows[2 * i : 2 * i + 2] @ x)) == pytest.approx(still)
        assert float(own @ (merged @ x)) == pytest.approx(still)
        for r in (turn, turn.T):
            before = float(q @ (r @ (rows[2 * i : 2 * i + 2] @ x)))
            assert float(own @ (r @ (merged @ x))) == pytest.approx(before, abs=1e-6)
        assert turned in [pytest.approx(float(own @ (r @ (merged @ x))), abs=2e-6) for r in (turn, turn.T)]
        mean = float(q @ ((rows[:2] + rows[2:]) @ x / 2))
        assert mean == pytest.approx((0.375, 1.375)[i])  # what plain pooling gives


def test_the_formulas() -> None:
    for heads, speedup in ((8, 1.969), (2, 7.529), (1, 14.222)):
        assert cost_model(32, heads, 8, 131072, 512, 128).speedup == pytest.approx(speedup, abs=5e-4)
    assert cost_model(9, 1, 3, 8192, 256, 64).speedup == pytest.approx(4.683, abs=5e-4)
    saga, gqa = cost_model(32, 2, 8, 65536, 512, 128), cost_model(32, 8, 8, 65536, 512, 128)
    mib = 2 / 2**20  # bfloat16
    assert (gqa.dense * mib, gqa.reads * mib, saga.reads * mib) == (256, 132, 36)
    assert (gqa.cache * mib, saga.cache * mib) == (256, 160) and saga.cache / saga.dense_cache == 0.625
    assert saga.cache > cost_model(32, 2, 2, 65536, 512, 128).cache  # larger than GQA-2
    assert cost_model(8, 8, 8, 10**9, 64, 64).speedup == pytest.approx(2, abs=1e-6)  # sparsity alone
    by_values = {cost_model(32, 2, h, 4096, 64, 64).reads for h in (2, 4, 8, 32)}
    assert by_values == {2 * 4096 * 64 + 32 * 64 * 64}  # value heads cost no traffic
    assert cost_model(32, 2, 8, 4096, 64, 64, dense_heads=4).dense == 2 * 4 * 4096 * 64
    assert cost_model(32, 2, 8, 4096, 64, 64, shared=True).values == 8 * 64 * 64
    assert saga.products == 32 * 65536 * 128
    assert [round(expected_recall(512, c), 3) for c in (1, 2, 4, 8)] == [0.632, 0.787, 0.885, 0.940]
    assert [round(expected_recall(64, c), 3) for c in (1, 2, 4)] == [0.635, 0.789, 0.886]
    assert expected_recall(1) == 1
    for bad in ({"N": 0}, {"L": 0}, {"dense_heads": 0}):
        with pytest.raises(UsageError, match="must be at least 1"):
            cost_model(**({"H_q": 4, "H_k": 1, "H_v": 2, "L": 8, "N": 2, "d": 4} | bad))  # type: ignore[arg-type]


@pytest.mark.parametrize("c", [1, 2, 4])
def test_recall_is_what_the_formula_says(c: int) -> None:
    scores = torch.randn(150, 4096, generator=rng(c))
    found = recall(scores, select(scores, 64, c), 64)
    assert float(found.mean()) == pytest.approx(expected_recall(64, c), abs=0.015)
    best = exact(scores, 64)
    assert float(recall(scores, best, 64).min()) == 1


# ------------------------------------------------------------------------------------------------- equivalences


@pytest.mark.parametrize(("h_k", "h_v"), [(6, 6), (2, 2), (1, 1)])
@pytest.mark.parametrize("rows", [1, 7])
def test_equal_head_counts_are_ordinary_attention(h_k: int, h_v: int, rows: int) -> None:
    q, k, v = qkv(6, h_k, h_v, rows, 7)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=rows > 1, enable_gqa=True)
    dense = dense_attention(q, k, v, scale=8**-0.5)
    torch.testing.assert_close(dense, expected, atol=1e-5, rtol=0)
    for selector in CHOOSING:
        out, _ = sparse_attention(q, k, v, settings(h_k, h_v, 7, selector), scale=8**-0.5)
        torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)  # N ≥ L
    other, _ = sparse_attention(q, k, v, settings(h_k, h_v, 3), scale=8**-0.5)
    assert not torch.allclose(other, expected, atol=1e-3)  # N < L is another function


HEADS = [(8, 1, 4), (8, 2, 4), (8, 4, 8), (6, 1, 6), (8, 4, 1)]


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("rows", [1, 5])
def test_asymmetric_heads_by_loops(heads: tuple[int, int, int], rows: int) -> None:
    h_q, h_k, h_v = heads
    q, k, v = qkv(*heads, rows, 13)
    mask = torch.ones(rows, 13, dtype=torch.bool).tril(13 - rows)[None, None]
    every = [[[list(range(13 - rows + t + 1)) for t in range(rows)]] * h_q] * 2
    expected = by_loops(q, k, v, every, 8**-0.5).float()
    torch.testing.assert_close(dense_attention(q, k, v, mask, scale=8**-0.5), expected, atol=1e-5, rtol=0)
    more = {"allow_fewer_values": True} if h_v % h_k else {}
    out, p = sparse_attention(q, k, v, settings(h_k, h_v, 4, **more), mask, scale=8**-0.5, weights=True)
    assert p is not None
    kept = [
        [[p[b, i, t].nonzero().flatten().tolist() for t in range(rows)] for i in range(h_q)] for b in range(2)
    ]
    torch.testing.assert_close(out, by_loops(q, k, v, kept, 8**-0.5).float(), atol=1e-5, rtol=0)
    assert all(len(one) <= 4 for b in kept for i in b for one in i)
    wide, _ = sparse_attention(q, k, v, settings(h_k, h_v, 20, **more), mask, scale=8**-0.5)
    torch.testing.assert_close(wide, expected, atol=1e-5, rtol=0)


def test_permuting_heads_that_share_both_changes_nothing() -> None:
    q, k, v = qkv(8, 2, 4, 3, 11)
    out_proj = torch.randn(5, 8, 8, generator=rng(1))  # (D, heads, d)

    def y(order: list[int]) -> Tensor:
        o, _ = sparse_attention(q[:, order], k, v, settings(2, 4, 4), scale=0.3)
        return torch.einsum("bhtd,ohd->bto", o, out_proj[:, order])

    whole = y([0, 1, 2, 3, 4, 5, 6, 7])
    torch.testing.assert_close(y([1, 0, 2, 3, 4, 5, 7, 6]), whole)
    assert not torch.allclose(y([2, 1, 0, 3, 4, 5, 6, 7]), whole, atol=1e-3)  # they share the key head only


def test_blocks_of_rows_change_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv(4, 1, 2, 9, 9)
    whole = {name: sparse_attention(q, k, v, settings(1, 2, 4, name), scale=0.4)[0] for name in CHOOSING}
    monkeypatch.setattr("gnomon.methods.layers.saga.attention.ROOM", 2 * 4 * 9 * 2)  # two rows at a time
    for name, expected in whole.items():
        out, _ = sparse_attention(q, k, v, settings(1, 2, 4, name), scale=0.4)
        torch.testing.assert_close(out, expected, atol=1e-6, rtol=0)


# ----------------------------------------------------------------------------------------------------- selectors


def asked(scores: Tensor, q: Tensor | None = None, k: Tensor | None = None) -> Asked:
    batch, heads, rows, length = scores.shape
    q = torch.zeros(batch, heads, rows, 2) if q is None else q
    return Asked(q=q, k=torch.zeros(batch, 1, length, 2) if k is None else k, scores=scores, visible=None)


def places(at: Tensor) -> list[int]:
    return sorted(int(j) for j in at.flatten() if j >= 0)


def test_strided_buckets_by_hand() -> None:
    s = torch.tensor([1.0, 5, 3, 2, 4, 3, 0])
    assert select(s, 3).tolist() == [3, 1, 2]  # buckets {0,3,6}, {1,4}, {2,5}; the tie of 3 goes to the lower
    assert places(select(s, 2, 2)) == [1, 4]  # buckets {0,4}, {1,5}, {2,6}, {3}: 4, 5, 3, 2
    assert select(torch.tensor([2.0, 1]), 3).tolist() == [0, 1, -1]
    assert select(torch.tensor([2.0, 1, 3]), 2, 10**12).tolist() == [2, 0]  # no room for so many is asked for
    assert select(torch.full((4,), -torch.inf), 2).tolist() == [-1, -1]
    assert select(torch.tensor([1.0, 1, 1, 1]), 1).tolist() == [0]
    assert places(select(torch.tensor([0.0, 1, 1, 1, 1, 0]), 2, 3)) == [1, 2]  # ties among winners


def test_exact_breaks_ties_downwards() -> None:
    assert exact(torch.tensor([1.0, 2, 2, 2, 0]), 2).tolist() == [1, 2]
    assert exact(torch.tensor([[3.0, 1, 2], [1, 1, 1]]), 2).tolist() == [[0, 2], [0, 1]]
    assert exact(torch.tensor([-torch.inf, 1.0]), 3).tolist() == [1, -1, -1]
    s = torch.randint(0, 5, (50, 40), generator=rng()).float()
    for row, at in zip(s.tolist(), exact(s, 7).tolist(), strict=True):
        assert at == sorted(range(40), key=lambda j: (-row[j], j))[:7]


@pytest.mark.parametrize("c", [1, 2, 4])
def test_strided_sets(c: int) -> None:
    s = torch.randn(60, 101, generator=rng(c))
    at = select(s, 8, c)
    for row, kept in zip(s, at.tolist(), strict=True):
        assert len(set(kept)) == 8 and all(0 <= j < 101 for j in kept)
        buckets = [j % (8 * c) for j in kept]
        assert len(set(buckets)) == 8  # each at most once
        assert int(row.argmax()) in kept
        for j in kept:
            assert row[j] == row[j % (8 * c) :: 8 * c].max()
    assert places(select(s[0], 26, 4)) == places(exact(s[0], 26))  # cN ≥ L: exactly top-N
    last = s.clone()
    last[:, -8:] += 100
    assert places(select(last, 8, c)[0]) == list(range(93, 101))  # the last N lie in distinct buckets


def test_neighbours_share_contiguous_buckets_only() -> None:
    peaks = torch.zeros(1, 1, 1, 64)
    peaks[..., 8:16] = torch.arange(8.0) + 1  # eight neighbouring peaks
    for name, found in (("strided", 8), ("contiguous", 1)):
        at = choose(asked(peaks), settings(1, 1, 8, name))
        assert sum(8 <= j < 16 for j in places(at)) == found
    periodic = torch.zeros(1, 1, 1, 64)
    periodic[..., ::8] = torch.arange(8.0) + 1  # the trap: period N
    assert float(recall(periodic, choose(asked(periodic), settings(1, 1, 8)), 8).mean()) == 1 / 8
    assert float(recall(periodic, choose(asked(periodic), settings(1, 1, 7)), 7).mean()) == 1


@pytest.mark.parametrize("selector", CHOOSING)
@pytest.mark.parametrize("always", [(0, 0), (2, 3)])
def test_what_every_selector_keeps(selector: str, always: tuple[int, int]) -> None:
    q, k, _ = qkv(6, 2, 2, 30, 30, seed=3)
    mask = torch.ones(30, 30, dtype=torch.bool).tril()[None, None].expand(2, 1, -1, -1).clone()
    mask[1, ..., :4] = False  # padding on the left
    s = (q @ k.repeat_interleave(3, 1).transpose(-1, -2)).masked_fill(~mask, -torch.inf)
    given = Asked(q=q, k=k, scores=s, visible=mask)
    at = choose(given, settings(2, 6, 11, selector, always_keep=always))
    assert at.shape[:3] == (2, 6, 30) and at.shape[-1] <= 11
    mass, top = kept_mass(s[..., 8:, :], at[..., 8:, :]), kept_mass(s[..., 8:, :], exact(s[..., 8:, :], 11))
    assert bool((mass <= top + 1e-6).all()) and bool((top <= 1 + 1e-6).all())
    for b in range(2):
        for t in range(4, 30):
            seen = set(range(4 * b, t + 1))
            for i in range(6):
                kept = [j for j in at[b, i, t].tolist() if j >= 0]
                assert len(kept) == len(set(kept)) <= 11 and set(kept) <= seen
                order = sorted(seen)
                assert {*order[: always[0]], *order[len(order) - always[1] :]} <= set(kept)
                best = int(s[b, i, t].argmax())
                if selector in ("strided", "exact", "threshold", "contiguous"):
                    assert best in kept
    assert not at[1, :, :4].ge(0).any()  # rows that see nothing


def test_threshold_finds_nearly_n() -> None:
    s = torch.randn(1, 1, 50, 300, generator=rng())
    at = choose(asked(s), settings(1, 1, 32, "threshold"))
    assert bool(((at >= 0).sum(-1) == 32).all())  # no ties: all of them
    assert places(at[0, 0, 0]) == places(exact(s[0, 0, 0], 32))
    flat = torch.zeros(1, 1, 1, 9)
    assert places(choose(asked(flat), settings(1, 1, 4, "threshold"))) == [0, 1, 2, 3]


def test_quest_takes_the_best_bound_and_the_newest_page() -> None:
    k = torch.zeros(1, 1, 64, 2)
    k[0, 0, 20] = torch.tensor([5.0, -5])  # page 1
    k[0, 0, 40] = torch.tensor([3.0, 3])  # page 2
    q = torch.tensor([1.0, 1]).view(1, 1, 1, 2)
    s = (q @ k.transpose(-1, -2)).view(1, 1, 1, 64)
    at = choose(asked(s, q, k), settings(1, 1, 32, "quest"))
    assert places(at) == [*range(32, 48), *range(48, 64)]  # bounds 0, 5 - 5 max…: page 1: 5, page 2: 6
    bounds = [float((q.flatten() * k[0, 0, p : p + 16]).clamp(min=0).amax(0).sum()) for p in range(0, 64, 16)]
    assert bounds == [0, 5, 6, 0]
    small = choose(asked(s, q, k), settings(1, 1, 4, "quest"))  # pages shrink to N
    assert places(small) == [60, 61, 62, 63]


def test_shared_sets_are_shared() -> None:
    q, k, _ = qkv(6, 2, 2, 1, 40, seed=4)
    s = q @ k.repeat_interleave(3, 1).transpose(-1, -2)
    for pool in ("max", "mean"):
        at = choose(asked(s, q, k), settings(2, 6, 8, f"shared_{pool}"))
        assert all(torch.equal(at[:, i], at[:, i // 3 * 3]) for i in range(6))
        pooled = getattr(torch, f"a{pool}" if pool == "max" else pool)(s.view(2, 2, 3, 40), 2)
        assert torch.equal(at[:, ::3, 0], select(pooled, 8))


def test_window() -> None:
    s = torch.randn(1, 1, 1, 20, generator=rng())
    assert places(choose(asked(s), settings(1, 1, 6, "window", always_keep=(2, 0)))) == [0, 1, 16, 17, 18, 19]


def test_early_rows_are_dense_in_a_causal_prompt() -> None:
    q, k, v = qkv(4, 1, 4, 24, 24)
    dense = dense_attention(q, k, v, scale=0.4)
    for name in ("strided", "exact"):
        out, _ = sparse_attention(q, k, v, settings(1, 4, 6, name), scale=0.4)
        torch.testing.assert_close(out[:, :, :6], dense[:, :, :6], atol=1e-5, rtol=0)
        assert not torch.allclose(out[:, :, 12:], dense[:, :, 12:], atol=1e-3)
    out, _ = sparse_attention(q, k, v, settings(1, 4, 6, "contiguous"), scale=0.4)
    assert not torch.allclose(out[:, :, :6], dense[:, :, :6], atol=1e-3)  # contiguous buckets lose this


def test_mass_bounds_the_error() -> None:
    q, k, v = qkv(4, 2, 4, 1, 64, seed=5)
    dense = dense_attention(q, k, v, scale=0.4)
    s = 0.4 * (q @ k.repeat_interleave(2, 1).transpose(-1, -2))
    found = []
    for c in (1, 2, 4, 8):
        at = select(s, 8, c)
        out, _ = sparse_attention(q, k, v, settings(2, 4, 8, oversample=c), scale=0.4)
        mass = kept_mass(s, at)
        bound = 2 * (1 - mass) * v.norm(dim=-1).amax(-1)[:, :, None]
        assert bool(((out - dense).norm(dim=-1) <= bound + 1e-5).all())
        found.append(float(mass.mean()))
    assert found[-1] == pytest.approx(float(kept_mass(s, exact(s, 8)).mean()))  # cN = L
    assert all(a <= b + 1e-6 for a, b in pairwise([found[0], found[-1], 1.0]))


def test_gradients_flow_through_kept_entries_only() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(4, 1, 2, 6, 6))
    out, p = sparse_attention(q, k, v, settings(1, 2, 2), scale=0.4, weights=True)
    out.sum().backward()
    assert q.grad is not None and v.grad is not None and bool(torch.isfinite(q.grad).all())
    assert p is not None and bool(((p.detach() > 0).sum(-1) <= 2).all())
    used = (p.detach() > 0).view(2, 2, 2, 6, 6).flatten(2, 3).any(2)  # (B, Hv, L): some head of it keeps j
    assert torch.equal(v.grad.abs().sum(-1) > 0, used)
    one = [x.detach().requires_grad_() for x in qkv(4, 1, 2, 1, 9)]
    sparse_attention(*one, settings(1, 2, 3), scale=0.4)[0].sum().backward()
    assert all(bool(x.grad.abs().sum() > 0) for x in one)  # type: ignore[union-attr]


def test_masks_of_both_kinds_and_rows_that_see_nothing() -> None:
    q, k, v = qkv(4, 1, 2, 5, 12)
    seen = torch.rand(2, 1, 5, 12, generator=rng()) < 0.7
    seen[0, 0, 2] = False
    added = torch.where(seen, 0.0, torch.finfo(torch.float32).min)
    for config in (settings(1, 2, 3), settings(1, 2, 3, "exact"), settings(1, 2, 3, always_keep=(1, 1))):
        a, _ = sparse_attention(q, k, v, config, seen, scale=0.4)
        b, _ = sparse_attention(q, k, v, config, added, scale=0.4)
        torch.testing.assert_close(a, b)
        assert not a[0, :, 2].any() and bool(torch.isfinite(a).all())
    assert not dense_weights(q, k, seen, scale=0.4)[0, :, 2].any()
    assert seen_and_bias(None) == (None, None)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_dtypes_sum_in_float32(dtype: torch.dtype) -> None:
    q, k, v = (x.to(dtype) for x in qkv(4, 1, 2, 1, 40, d=16))
    out, at = sparse_decode(q[:, :, 0], k, v, n=8)
    wide, there = sparse_decode(q[:, :, 0].float(), k.float(), v.float(), n=8)
    assert out.dtype == dtype and torch.equal(at, there)
    torch.testing.assert_close(out.float(), wide, atol=2e-2, rtol=2e-2)


# ------------------------------------------------------------------------------------------- the kernel's reference


@pytest.mark.parametrize("c", [1, 2])
@pytest.mark.parametrize("length", [1, 5, 8, 37])
def test_the_step_equals_rows_and_chunks(c: int, length: int) -> None:
    q, k, v = qkv(6, 2, 3, 1, length, seed=length)
    visible = torch.ones(2, length, dtype=torch.bool)
    visible[1, : length // 3] = False
    out, at = sparse_decode(q[:, :, 0], k, v, n=4, oversample=c, visible=visible)
    config = settings(1, 3, 4, oversample=c)  # its head counts don't matter here
    general, _ = sparse_attention(q, k, v, config, visible[:, None, None], scale=8**-0.5, weights=True)
    torch.testing.assert_close(out, general[:, :, 0], atol=1e-6, rtol=0)
    s = reference.scores(q[:, :, 0], k, 8**-0.5, visible)
    buckets, chunk = 4 * c, 8
    best, where = reference.winners(s[..., :chunk], buckets)
    for first in range(chunk, length, chunk):
        best, where = reference.join(
            best, where, *reference.winners(s[..., first : first + chunk], buckets, first)
        )
    assert torch.equal(reference.keep(best, where, 4), at)
    assert torch.equal(at, select(s, 4, c))


def test_a_cache_that_holds_nothing_gives_zero() -> None:
    q, k, v = qkv(4, 1, 2, 1, 6)
    out, at = sparse_decode(q[:, :, 0], k, v, n=3, visible=torch.zeros(2, 6, dtype=torch.bool))
    assert not out.any() and bool((at == -1).all())


def test_the_step_refuses_what_a_kernel_would_read_wrongly() -> None:
    q, k, v = qkv(4, 2, 2, 1, 6)
    q = q[:, :, 0]
    for bad, said in (
        ({"n": 0}, "n=0 and oversample=1"),
        ({"q": q[:, :3]}, "must divide the query heads"),
        ({"k": k[:, :, :5]}, "don't belong together"),
        ({"k": k[:, :, :0], "v": v[:, :, :0]}, "be filled"),
        ({"q": q[0]}, "must be"),
        ({"v": v.double()}, "of one floating dtype"),
        ({"visible": torch.ones(2, 5, dtype=torch.bool)}, "visible is"),
        ({"backend": "nonsense"}, "Unknown backend"),
    ):
        with pytest.raises(UsageError, match=said):
            kernel.sparse_decode(**({"q": q, "k": k, "v": v, "n": 2} | bad))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------ alignment


def rotated(x: Tensor, angles: Tensor) -> Tensor:
    """Rotary positions in the half-split layout, (…, d) by (…, d/2) angles."""
    a, b = x.chunk(2, -1)
    return torch.cat([a * angles.cos() - b * angles.sin(), a * angles.sin() + b * angles.cos()], -1)


def scores_of(w_q: Tensor, w_k: Tensor, x: Tensor, y: Tensor, angles: Tensor, d: int) -> Tensor:
    """(Hq,): scores of a query on x at relative angles against a key on y."""
    q, k = (w_q @ x).view(-1, d), (w_k @ y).view(-1, d)
    return (rotated(q, angles) * k.repeat_interleave(len(q) // len(k), 0)).sum(-1)


def test_heads_that_are_complex_multiples_merge_exactly() -> None:
    d, inputs = 6, 10
    base = pairs(torch.randn(2 * d, inputs, generator=rng(), dtype=torch.float64), d)  # two new heads
    draw = torch.randn(2, 3, 3, 2, generator=rng(1), dtype=torch.float64)
    factors = torch.view_as_complex(draw)  # (K, r, F)
    w_k = unpaired((factors[..., None] * base[:, None]).flatten(0, 1))
    w_q = torch.randn(12 * d, inputs, generator=rng(2), dtype=torch.float64)
    half = torch.randn(inputs, inputs, generator=rng(3), dtype=torch.float64)
    s = moments(pairs(w_k, d), 2, half @ half.T)
    u = align(s)
    assert retained(s).flatten().tolist() == pytest.approx([1] * 6)
    merged, folded = merge_keys(w_k, u, d), fold_queries(w_q, u, d)
    assert merged.shape == (2 * d, inputs)
    for seed in range(5):  # all relative positions
        x, y = torch.randn(2, inputs, generator=rng(seed), dtype=torch.float64)
        angles = torch.rand(3, generator=rng(seed), dtype=torch.float64) * 6.3
        before, after = (scores_of(*w, x, y, angles, d) for w in ((w_q, w_k), (folded, merged)))
        torch.testing.assert_close(after, before, atol=1e-9, rtol=1e-9)
        wrong = fold_queries(w_q, u.conj(), d)  # the sign of the phase matters
        assert not torch.allclose(scores_of(wrong, merged, x, y, angles, d), before, atol=1e-2)


def test_one_head_per_group_stays_what_it_was() -> None:
    w = torch.randn(12, 5, generator=rng())
    u = align(moments(pairs(w, 4), 3))
    assert torch.equal(u, torch.ones_like(u))
    torch.testing.assert_close(merge_keys(w, u, 4), w)
    torch.testing.assert_close(fold_queries(w, u, 4), w)
    zero = align(moments(pairs(torch.zeros(8, 5), 4), 1))
    assert torch.equal(zero, torch.tensor([1, 0], dtype=zero.dtype).expand(1, 2, 2))


def test_the_alignment_is_the_best_of_rank_one() -> None:
    """Against SVD in float64, and against any other unit vector."""
    z = pairs(torch.randn(12, 7, generator=rng(), dtype=torch.float64), 4)  # three heads, two pairs
    s = moments(z, 1)
    u = align(s)
    for f in range(2):
        singular = torch.linalg.svdvals(z[:, f])
        energy = float(singular[0] ** 2 / (singular**2).sum())
        assert float(retained(s)[0, f]) == pytest.approx(energy)
        left = (z[:, f] - u[0, f][:, None] * (u[0, f].conj() @ z[:, f])[None]).abs().square().sum()
        assert float(left / z[:, f].abs().square().sum()) == pytest.approx(1 - energy)


# -------------------------------------------------------------------------------------------------------- refusals

BAD = [
    ({"num_key_heads": 0}, "num_key_heads=0 must be a whole number of at least 1"),
    ({"num_key_heads": 3}, "3 key heads don't divide 4 value heads"),
    ({"num_key_heads": 8}, "8 key heads don't divide 4"),
    ({"num_key_heads": 3, "allow_fewer_values": True}, "Neither of 3 key heads and 4"),
    ({"top_n": 0}, "top_n=0"),
    ({"top_n": 2.5}, "top_n=2.5"),
    ({"oversample": 0}, "oversample=0"),
    ({"selector": "stridden"}, "Did you mean 'strided'"),
    ({"always_keep": (3, 5), "top_n": 8}, "leaves nothing of top_n=8"),
    ({"always_keep": (-1, 0)}, "two counts"),
    ({"always_keep": (8, 0), "top_n": 8, "selector": "window"}, "leaves none of top_n=8"),
    ({"dense_layers": -1}, "dense_layers=-1"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("bad", "said"), BAD)
def test_bad_settings_are_refused(bad: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        SagaConfig(**({"num_key_heads": 1, "num_value_heads": 4} | bad))  # type: ignore[arg-type]


def test_head_counts_of_the_queries() -> None:
    SagaConfig(num_key_heads=1, num_value_heads=4).require_queries(8)
    SagaConfig(num_key_heads=4, num_value_heads=1, allow_fewer_values=True).require_queries(8)
    with pytest.raises(UsageError, match="4 value heads don't divide 9 query heads"):
        SagaConfig(num_key_heads=1, num_value_heads=4).require_queries(9)
