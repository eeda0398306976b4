"""Compiled sparse decoding. Truth: bucket by bucket in float64, and torch's own attention.

Negative: a cache whose values outside of the kept positions are NaN, which a kernel that reads them would show.
"""

import pytest
import torch

from gnomon.core.errors import UsageError
from gnomon.core.timing import threads_set
from gnomon.kernels import native
from gnomon.kernels import sparse_decode as kernel
from gnomon.kernels.sparse_decode import cpu, dense_decode, reference, sparse_decode


def runs(isa):
    reason = native.why_not(isa)
    return pytest.param(isa, marks=pytest.mark.skipif(bool(reason), reason=reason or "runs"))


isas = pytest.mark.parametrize("isa", [runs(isa) for isa in native.ISAS])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1e-2}
SHAPES = [  # B, Hq, Hk, Hv, L, d, n, oversample
    (1, 4, 1, 2, 50, 8, 16, 1),
    (2, 9, 1, 3, 100, 64, 32, 2),
    (1, 8, 2, 4, 333, 40, 17, 1),  # buckets that aren't whole tiles
    (2, 6, 3, 3, 64, 33, 64, 1),  # an odd head dimension; as many buckets as positions
    (1, 12, 2, 3, 1111, 128, 48, 4),
    (1, 4, 2, 2, 3, 16, 8, 1),  # fewer positions than a tile
    (1, 4, 4, 1, 40, 16, 8, 1),  # fewer value heads than key heads
    (1, 1, 1, 1, 1, 1, 1, 1),
]


def operands(shape, dtype):
    b, hq, hk, hv, length, d, *_ = shape
    g = torch.Generator().manual_seed(sum(shape))
    q = torch.randn(b, hq, d, generator=g)
    k, v = (torch.randn(b, h, length, d, generator=g) for h in (hk, hv))
    visible = torch.rand(b, length, generator=g) < 0.7
    visible[:, : length // 3] = False
    visible[:, -1] = True
    return q.to(dtype), k.to(dtype), v.to(dtype), visible


def by_buckets(q, k, v, n, oversample, scale, visible):
    """(output, which positions are kept), one bucket after the other."""
    q, k, v = q.double(), k.double(), v.double()
    heads, buckets = q.shape[1], n * oversample
    scores = torch.einsum("bhd,bhld->bhl", q, k.repeat_interleave(heads // k.shape[1], 1)) * scale
    if visible is not None:
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
    kept = torch.zeros_like(scores, dtype=torch.bool)
    for b in range(len(q)):
        for h in range(heads):
            best = []
            for bucket in range(min(buckets, scores.shape[-1])):
                own = scores[b, h, bucket::buckets]
                if own.max() > -torch.inf:
                    best.append(bucket + buckets * int(own.argmax()))
            best.sort(key=lambda j, row=scores[b, h]: (-float(row[j]), j))
            kept[b, h, best[:n]] = True
    weights = scores.masked_fill(~kept, -torch.inf).softmax(-1)
    return torch.einsum("bhl,bhld->bhd", weights, v.repeat_interleave(heads // v.shape[1], 1)), kept


def positions(chosen, like):
    found = torch.zeros_like(like)
    for b in range(len(chosen)):
        for h in range(chosen.shape[1]):
            found[b, h, chosen[b, h][chosen[b, h] >= 0]] = True
    return found


@isas
@dtypes
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("masked", [False, True])
def test_it_is_the_softmax_over_the_buckets_winners(isa, dtype, shape, masked):
    q, k, v, visible = operands(shape, dtype)
    n, oversample = shape[-2:]
    given = visible if masked else None
    expected, kept = by_buckets(q, k, v, n, oversample, 0.3, given)
    found, chosen = cpu.sparse_decode(q, k, v, n, oversample, 0.3, given, isa)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    assert torch.equal(positions(chosen, kept), kept)
    assert int(kept.sum()) == int((chosen >= 0).sum())  # none twice


@isas
@dtypes
@pytest.mark.parametrize("masked", [False, True])
def test_dense_decoding_is_torch_s(isa, dtype, masked):
    for shape in SHAPES[:6]:
        q, k, v, visible = operands(shape, dtype)
        v = v[:, :1].expand_as(k)
        given = visible[:, None, None] if masked else None
        expected = torch.nn.functional.scaled_dot_product_attention(
            q.double()[:, :, None], k.double(), v.double(), attn_mask=given, scale=0.3, enable_gqa=True
        )[:, :, 0]
        found = cpu.dense_decode(q, k, v, 0.3, visible if masked else None, isa)
        torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@isas
def test_as_many_buckets_as_positions_are_dense(isa):
    q, k, v, _ = operands((1, 4, 2, 2, 37, 16), torch.float32)
    sparse, _ = cpu.sparse_decode(q, k, v, 37, 1, 0.25, None, isa)
    torch.testing.assert_close(sparse, cpu.dense_decode(q, k, v, 0.25, None, isa), atol=1e-6, rtol=1e-6)


@isas
@dtypes
def test_threads_and_views_change_no_bit(isa, dtype):
    q, k, v, _ = operands((2, 8, 1, 2, 9000, 16, 32, 2), dtype)
    apart = torch.cat([k, k], -1)[..., :16]  # rows 32 elements apart
    turned = v.transpose(1, 2).contiguous().transpose(1, 2)  # positions before heads
    results, dense = [], []
    for threads in (1, 2, 3):
        with threads_set(threads):
            results.append(cpu.sparse_decode(q, apart, turned, 32, 2, 0.25, None, isa))
            dense.append(cpu.dense_decode(q, k, v[:, :1], 0.25, None, isa))
    results.append(cpu.sparse_decode(q, k, v, 32, 2, 0.25, None, isa))
    assert all(torch.equal(a, results[0][0]) and torch.equal(b, results[0][1]) for a, b in results)
    assert all(torch.equal(one, dense[0]) for one in dense)


@isas
@dtypes
def test_values_that_are_not_kept_are_not_read(isa, dtype):
    q, k, v, _ = operands((1, 2, 1, 2, 200, 32, 16, 1), dtype)
    expected, chosen = cpu.sparse_decode(q, k, v, 16, 1, 0.25, None, isa)
    for h in range(2):
        others = torch.ones(200, dtype=torch.bool)
        others[chosen[0, h]] = False
        v[0, h, others] = torch.nan
    assert torch.equal(cpu.sparse_decode(q, k, v, 16, 1, 0.25, None, isa)[0], expected)


@isas
def test_ties_go_to_the_lower_position(isa):
    k = torch.ones(1, 1, 64, 4)
    v = torch.arange(64.0)[None, None, :, None].expand(1, 1, 64, 4).contiguous()
    for threads in (1, 2):
        with threads_set(threads):
            out, chosen = cpu.sparse_decode(torch.ones(1, 1, 4), k, v, 8, 1, 1.0, None, isa)
    assert chosen[0, 0].tolist() == list(range(8)) and float(out[0, 0, 0]) == 3.5


@isas
def test_nothing_visible_gives_zeros(isa):
    q, k, v, visible = operands((1, 4, 2, 2, 40, 8, 8, 1), torch.float32)
    visible[:] = False
    out, chosen = cpu.sparse_decode(q, k, v, 8, 1, 0.3, visible, isa)
    assert not out.any() and bool((chosen == -1).all())
    assert not cpu.dense_decode(q, k, v, 0.3, visible, isa).any()


@isas
@pytest.mark.parametrize("oversample", [1, 3])
def test_positions_come_in_the_reference_s_order(isa, oversample):
    q, k, v, visible = operands((2, 6, 2, 3, 101, 24, 16, oversample), torch.float32)
    for given in (None, visible):
        out, kept = sparse_decode(q, k, v, n=16, oversample=oversample, visible=given, backend=isa)
        expected, positions = reference.decode(q, k, v, 16, oversample, 24**-0.5, given)
        assert torch.equal(kept, positions)
        torch.testing.assert_close(out, expected, atol=3e-6, rtol=3e-6)


def test_gradients_and_traces_take_a_way_that_knows_them():
    q, k, v, _ = operands((1, 4, 2, 2, 40, 8, 8, 1), torch.float32)
    q.requires_grad_()
    out, _ = sparse_decode(q, k, v, n=8)
    assert torch.autograd.grad(out.sum(), q)[0].any()
    q = q.detach()
    torch.library.opcheck(kernel._sparse_op, (q, k, v, 8, 1, 0.3, None, "auto"))
    meta = [t.to("meta") for t in (q, k, v)]
    shapes = [tuple(t.shape) for t in sparse_decode(*meta, n=8)]
    assert shapes == [(1, 4, 8), (1, 4, 8)]


def test_choices_and_refusals():
    assert kernel.choice(dtype=torch.float16).name == "reference"
    assert kernel.choice("cuda").name == "reference"
    q, k, v, _ = operands((1, 4, 2, 2, 40, 8, 8, 1), torch.float32)
    with pytest.raises(UsageError, match="backend"):
        sparse_decode(q, k, v, n=8, backend="fast")
    with pytest.raises(UsageError, match="as many key heads"):
        dense_decode(q, k, v[:, :1])
    torch.testing.assert_close(
        dense_decode(q, k, v, backend="torch"), dense_decode(q, k, v), atol=3e-6, rtol=3e-6
    )
