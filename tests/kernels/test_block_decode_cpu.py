"""Compiled attention of a block. Truth: masked softmax in float64, each query over all keys by itself.

Negative: caches whose keys and values outside of the sets are NaN, which a kernel that reads them would show, and sets
of another head, which must change the result.
"""

import pytest
import torch

from gnomon.core.errors import UsageError
from gnomon.core.timing import threads_set
from gnomon.kernels import native
from gnomon.kernels.sparse_decode import block, block_decode, block_reference, cpu, exact_with_importance


def runs(isa):
    reason = native.why_not(isa)
    return pytest.param(isa, marks=pytest.mark.skipif(bool(reason), reason=reason or "runs"))


isas = pytest.mark.parametrize("isa", [runs(isa) for isa in native.ISAS])
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
TOLERANCE = {torch.float32: 3e-5, torch.bfloat16: 1e-2}
SHAPES = [  # R, H, G, B, N, d, k
    (1, 2, 2, 8, 50, 16, 12),
    (2, 1, 3, 5, 100, 64, 33),  # a set that isn't whole tiles; an odd number of rows
    (1, 3, 1, 32, 64, 40, 64),  # the set is the whole prefix
    (1, 2, 4, 16, 33, 33, 1),  # an odd head dimension; a set of one
    (1, 1, 2, 17, 7, 8, 3),  # fewer keys than a tile, a block of more than one
    (1, 2, 1, 1, 4500, 16, 9),  # several chunks; a block of one
    (2, 2, 2, 4, 0, 8, 0),  # no prefix
]


def operands(shape, dtype):
    rows, heads, groups, size, n, d, k = shape
    g = torch.Generator().manual_seed(sum(shape))
    q = torch.randn(rows, heads * groups, size, d, generator=g)
    keys, values = (torch.randn(rows, heads, n, d, generator=g) for _ in range(2))
    own_k, own_v = (torch.randn(rows, heads, size, d, generator=g) for _ in range(2))
    idx = torch.rand(rows, heads, n, generator=g).argsort(-1)[..., :k]
    return [t.to(dtype) for t in (q, keys, values, own_k, own_v)], idx


def by_masks(q, keys, values, own_k, own_v, idx, scale):
    """(output, weights on the prefix (R, Hq, B, N), lse), every query over every key in float64."""
    q, keys, values, own_k, own_v = (t.double() for t in (q, keys, values, own_k, own_v))
    groups = q.shape[1] // keys.shape[1]
    seen = torch.ones(keys.shape[:3], dtype=torch.bool)
    if idx is not None:
        seen = torch.zeros_like(seen).scatter(2, idx, True)
    seen = torch.cat([seen, torch.ones(own_k.shape[:3], dtype=torch.bool)], 2).repeat_interleave(groups, 1)
    k, v = (torch.cat(pair, 2).repeat_interleave(groups, 1) for pair in ((keys, own_k), (values, own_v)))
    scores = (q @ k.transpose(-1, -2) * scale).masked_fill(~seen[:, :, None], -torch.inf)
    weights = scores.softmax(-1)
    return weights @ v, weights[..., : keys.shape[2]], scores.logsumexp(-1)


@isas
@dtypes
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("sparse", [False, True])
def test_it_is_the_softmax_over_the_set_and_the_block(isa, dtype, shape, sparse):
    given, idx = operands(shape, dtype)
    idx = idx if sparse else None
    expected, _, norm = by_masks(*given, idx, 0.3)
    found, lse = cpu.block_decode(*given, idx, 0.3, isa)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])
    torch.testing.assert_close(lse.double(), norm, atol=TOLERANCE[dtype], rtol=TOLERANCE[dtype])


@isas
@dtypes
@pytest.mark.parametrize("shape", SHAPES[:6])
def test_importance_is_the_mean_weight(isa, dtype, shape):
    given, _ = operands(shape, dtype)
    rows, heads, groups, size, n, *_ = shape
    counted = torch.rand(rows, size, generator=torch.Generator().manual_seed(1)) < 0.6
    counted[0, 0] = True
    counted[-1, -1] = True
    _, weights, _ = by_masks(*given, None, 0.3)
    split = weights.view(rows, heads, groups, size, n)
    expected = torch.stack([split[r, :, :, counted[r]].mean((1, 2)) for r in range(rows)])
    _, found = exact_with_importance(*given, scaling=0.3, queries=counted, backend=isa)
    torch.testing.assert_close(found.double(), expected, atol=TOLERANCE[dtype] / 10, rtol=TOLERANCE[dtype])
    every = exact_with_importance(*given, scaling=0.3, backend=isa)[1]
    torch.testing.assert_close(every.double(), split.mean((2, 3)), atol=1e-3, rtol=TOLERANCE[dtype])


@isas
@dtypes
def test_nothing_outside_of_the_sets_is_read(isa, dtype):
    given, idx = operands((1, 2, 2, 8, 200, 32, 40), dtype)
    expected = cpu.block_decode(*given, idx, 0.25, isa)[0]
    for head in range(2):
        others = torch.ones(200, dtype=torch.bool)
        others[idx[0, head]] = False
        for cache in given[1:3]:
            cache[0, head, others] = torch.nan
    assert torch.equal(cpu.block_decode(*given, idx, 0.25, isa)[0], expected)
    assert cpu.block_decode(*given, idx.flip(1), 0.25, isa)[0].isnan().any()  # another head's set


@isas
@dtypes
def test_threads_and_views_change_no_bit(isa, dtype):
    (q, keys, values, own_k, own_v), idx = operands((2, 2, 2, 8, 9000, 16, 70), dtype)
    whole = [torch.cat([cache, own], 2) for cache, own in ((keys, own_k), (values, own_v))]
    views = [whole[0][:, :, :9000], whole[1][:, :, :9000], whole[0][:, :, 9000:], whole[1][:, :, 9000:]]
    turned = [t.transpose(1, 2).contiguous().transpose(1, 2) for t in views]  # positions before heads
    for sets in (None, idx):
        results, weights = [], []
        for threads in (1, 2, 3):
            with threads_set(threads):
                results += [cpu.block_decode(q, *caches, sets, 0.25, isa)[0] for caches in (views, turned)]
                if sets is None:
                    weights.append(exact_with_importance(q, *turned, scaling=0.25, backend=isa)[1])
        results.append(cpu.block_decode(q, keys, values, own_k, own_v, sets, 0.25, isa)[0])
        assert all(torch.equal(one, results[0]) for one in results[1:])
        assert all(torch.equal(one, weights[0]) for one in weights)


@isas
def test_a_whole_prefix_by_index_is_the_exact_pass_bit_for_bit(isa):
    for dtype in (torch.float32, torch.bfloat16):
        given, _ = operands((1, 2, 2, 8, 5000, 24, 1), dtype)
        everything = torch.arange(5000).expand(1, 2, -1)
        exact = cpu.block_decode(*given, None, 0.25, isa)
        assert all(
            torch.equal(a, b)
            for a, b in zip(cpu.block_decode(*given, everything, 0.25, isa), exact, strict=True)
        )


def test_the_public_functions_are_the_reference_s():
    given, idx = operands(SHAPES[0], torch.float32)
    for sets in (None, idx):
        torch.testing.assert_close(
            block_decode(*given, sets, scaling=0.3),
            block_reference.block_decode(*given, sets, scaling=0.3),
            atol=1e-5,
            rtol=1e-5,
        )
    queries = torch.arange(8)[None] % 3 == 0
    for nobody in (queries, torch.zeros_like(queries)):
        found = exact_with_importance(*given, scaling=0.3, queries=nobody)
        expected = block_reference.exact_with_importance(*given, scaling=0.3, queries=nobody)
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


def test_gradients_caps_and_traces_take_a_way_that_knows_them():
    given, idx = operands(SHAPES[0], torch.float32)
    q = given[0].clone().requires_grad_()
    out = block_decode(q, *given[1:], idx, scaling=0.3)
    assert torch.autograd.grad(out.sum(), q)[0].any()
    capped = block_decode(*given, idx, scaling=0.3, softcap=1.0)
    assert torch.equal(capped, block_reference.block_decode(*given, idx, scaling=0.3, softcap=1.0))
    torch.library.opcheck(block._block_op, (*given, idx, 0.3, "auto"))
    meta = [t.to("meta") for t in (*given, idx)]
    assert tuple(block_decode(*meta, scaling=0.3).shape) == tuple(given[0].shape)


def test_refusals():
    given, idx = operands(SHAPES[0], torch.float32)
    q, keys, values, own_k, own_v = given
    for wrong, words in (
        ((q[0], *given[1:], idx), "must be q"),
        ((q[:, :3], *given[1:], idx), "must divide"),
        ((q, keys[:, :, :9], values, own_k, own_v, idx), "don't belong together"),
        ((q, keys, values, own_k[:, :, :3], own_v, idx), "don't belong together"),
        ((q.bfloat16(), *given[1:], idx), "one floating dtype"),
        ((*given, idx.int()), "must be int64"),
        ((*given, idx[:, :1]), "must be int64"),
        ((*given, idx + 50), "but the prefix has 50"),
        ((*given, idx - 50), "idx names keys"),
    ):
        with pytest.raises(UsageError, match=words):
            block_decode(*wrong, scaling=0.3)
    with pytest.raises(UsageError, match="but the prefix has 50"):
        block_decode(*given, idx + 50, scaling=0.3, backend="torch")
    with pytest.raises(UsageError, match="backend"):
        block_decode(*given, idx, scaling=0.3, backend="fast")
