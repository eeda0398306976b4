"""Checks of sparse decoding's Triton kernels, run by test_sparse_triton.py in a process of their own: Triton reads
TRITON_INTERPRET once, when kernels are defined. On a machine with a GPU the same checks run compiled.

Truth: bucket by bucket in float64, and torch's own attention (as for the compiled library, test_sparse_decode_cpu.py).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from test_sparse_decode_cpu import SHAPES, by_buckets, operands, positions

from gnomon.kernels.launch import interpreted
from gnomon.kernels.sparse_decode import dense_decode, reference, sparse_decode, triton

DEVICE = "cpu" if interpreted() else "cuda"
# the interpreter cuts bfloat16 results off instead of rounding them: twice the error
TOLERANCE = {torch.float32: 3e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def there(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [t.to(DEVICE) for t in tensors]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_softmax_over_the_buckets_winners(
    shape: tuple[int, ...], masked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v, visible = operands(shape, torch.float32)
    n, oversample = shape[-2:]
    seen = visible if masked else None
    exact, chosen = by_buckets(q, k, v, n, oversample, 0.3, seen)
    for runs in (1, 3):  # of positions, joined afterwards
        monkeypatch.setattr(triton, "_wanted", lambda *_, runs=runs: runs)
        given: dict[str, Any] = {"n": n, "oversample": oversample, "scale": 0.3}
        given["visible"] = None if seen is None else seen.to(DEVICE)
        out, kept = sparse_decode(*there(q, k, v), **given, backend="triton")
        assert torch.equal(positions(kept.cpu(), chosen), chosen)
        torch.testing.assert_close(out.cpu().double(), exact, atol=3e-5, rtol=3e-5)
    assert torch.equal(
        kept.cpu(), reference.decode(q, k, v, n, oversample, 0.3, seen)[1]
    )  # in the same order


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_in_half_precision(dtype: torch.dtype) -> None:
    for shape in (SHAPES[1], SHAPES[2]):
        q, k, v, visible = operands(shape, dtype)
        n, oversample = shape[-2:]
        exact, _ = by_buckets(q, k, v, n, oversample, 0.3, visible)
        out, _ = sparse_decode(
            *there(q, k, v),
            n=n,
            oversample=oversample,
            scale=0.3,
            visible=visible.to(DEVICE),
            backend="triton",
        )
        assert out.dtype == dtype
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(out.cpu().double(), exact, atol=bound, rtol=bound)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masked", [False, True])
def test_dense_decoding_is_torch_s(dtype: torch.dtype, masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v, visible = operands((2, 6, 3, 3, 200, 40), dtype)
    seen = visible if masked else None
    exact = torch.nn.functional.scaled_dot_product_attention(
        q.double()[:, :, None],
        k.double(),
        v.double(),
        attn_mask=None if seen is None else seen[:, None, None],
        enable_gqa=True,
    )[:, :, 0]
    for shares in (1, 3):
        monkeypatch.setattr(triton, "_wanted", lambda *_, shares=shares: shares)
        out = dense_decode(
            *there(q, k, v), visible=None if seen is None else seen.to(DEVICE), backend="triton"
        )
        bound = TOLERANCE[dtype]
        torch.testing.assert_close(out.cpu().double(), exact, atol=bound, rtol=bound)
        again = dense_decode(
            *there(q, k, v), visible=None if seen is None else seen.to(DEVICE), backend="triton"
        )
        assert torch.equal(out, again)


def test_values_that_are_not_kept_are_not_read() -> None:
    """A cache inside a larger one, and NaN wherever nothing may be read."""
    q, k, v, visible = operands((1, 4, 2, 2, 96, 16), torch.float32)
    _, chosen = by_buckets(q, k, v, 16, 1, 0.25, visible)
    unread = ~chosen.view(1, 2, 2, 96).any(2)
    out, _ = sparse_decode(*there(q, k, v), n=16, visible=visible.to(DEVICE), backend="triton")
    larger = [torch.full((1, 2, 128, 24), torch.nan) for _ in range(2)]
    larger[0][:, :, :96, :16] = k.masked_fill(~visible[:, None, :, None], torch.nan)
    larger[1][:, :, :96, :16] = v.masked_fill(unread[..., None], torch.nan)
    views = [t.to(DEVICE)[:, :, :96, :16] for t in larger]
    again, _ = sparse_decode(q.to(DEVICE), *views, n=16, visible=visible.to(DEVICE), backend="triton")
    assert torch.equal(out, again) and not out.isnan().any()
    k[0, 0, 5] = torch.nan  # a score that is no number shows
    out, kept = sparse_decode(*there(q, k, v), n=16, backend="triton")
    assert out[0, :2].isnan().all() and not out[0, 2:].isnan().any()
    assert kept[0, 0, 5] == 5


def test_ties_and_nothing() -> None:
    q, k, v = torch.zeros(1, 2, 8), torch.randn(1, 1, 40, 8), torch.randn(1, 1, 40, 8)
    _, kept = sparse_decode(*there(q, k, v), n=4, backend="triton")
    assert kept.cpu().tolist() == [[[0, 1, 2, 3]] * 2]
    _, kept = sparse_decode(*there(q, k, v), n=4, oversample=2, backend="triton")
    assert kept.cpu().tolist() == [[[0, 1, 2, 3]] * 2]
    nothing = torch.zeros(1, 40, dtype=torch.bool, device=DEVICE)
    for oversample in (1, 2):
        out, kept = sparse_decode(
            *there(q, k, v), n=4, oversample=oversample, visible=nothing, backend="triton"
        )
        assert not out.any() and (kept == -1).all()
    assert not dense_decode(*there(q, k, v), visible=nothing, backend="triton").any()
