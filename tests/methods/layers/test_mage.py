"""Sources of truth: the card's examples and cost figures, softmax by loops in float64, sorting, masks by head.

Negative tests: a set that another head chose, a sparse commit and a re-indexed position must show.
"""

import doctest
import math
from typing import ClassVar

import pytest
import torch

import gnomon.methods.layers.block_diffusion as block_diffusion_package
import gnomon.methods.layers.block_diffusion.config as config_module
import gnomon.methods.layers.block_diffusion.masks as masks_module
import gnomon.methods.layers.mage as mage_package
import gnomon.methods.layers.mage.cost as cost_module
from gnomon.core.errors import UsageError
from gnomon.core.seeding import seeded
from gnomon.core.tiny import build
from gnomon.kernels.sparse_decode import block_reference
from gnomon.kernels.sparse_decode.block_reference import (
    block_decode,
    exact_with_importance,
    importance,
    query_importance,
    top_sets,
)
from gnomon.methods.layers.block_diffusion import BlockState, decoding, denoiser_logits, recall_and_mass
from gnomon.methods.layers.mage import (
    AvgQuery,
    BlockDiffusionConfig,
    Mage,
    Oracle,
    Quest,
    Random,
    SparseD,
    SparsePolicy,
    Window,
    attention_speedup,
    bounds,
    exact_reads,
    generate,
    mage_reads,
    observe,
    page_bounds,
    tile_sets,
    trajectory_nll,
)

MASK = 258
ALL = {
    "mage": Mage(6, 0),
    "mage tiles": Mage(6, 0, tile=2),
    "mage prefix": Mage(6, 0, normalise="prefix"),
    "oracle": Oracle(6, dense_layers=0),
    "average": AvgQuery(6, dense_layers=0),
    "quest": Quest(6, page=3, least=1, dense_layers=0),
    "sparsed": SparseD(0.2, 0.3, 3),
    "window": Window(6, sinks=1, dense_layers=0),
    "random": Random(6, dense_layers=0),
}


def config(block=4, **more):
    return BlockDiffusionConfig(**{"block_size": block, "mask_token_id": MASK, "strategy": "static", **more})


def model_of(family="llama", dtype=torch.float64, attn="sdpa"):
    with seeded(0):
        model = build(f"tiny:{family}-10k", attn=attn)
        for p in model.parameters():
            p.data += 0.2 * torch.randn(p.shape)
    return model.to(dtype)


@pytest.fixture(scope="module")
def model():
    return model_of()


def tokens(rows=2, length=16, seed=1):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def drawn(rows=2, heads=2, group=3, block=4, n=21, d=5, seed=0, dtype=torch.float64):
    g = torch.Generator().manual_seed(seed)

    def rand(*shape):
        return torch.randn(*shape, generator=g, dtype=torch.float64).to(dtype)

    q = rand(rows, heads * group, block, d)
    return (
        q,
        rand(rows, heads, n, d),
        rand(rows, heads, n, d),
        rand(rows, heads, block, d),
        rand(rows, heads, block, d),
    )


def state_of(block_keys, scaling=0.5, **more):
    rows, _, block, _ = block_keys.shape
    settings = {
        "block": 3,
        "steps": 5,
        "prompt": 10,
        "queries": torch.ones(rows, block, dtype=torch.bool),
        "scaling": scaling,
        "block_keys": block_keys,
    }
    return BlockState(**{**settings, **more})


# ---------------------------------------------------------------------------------- the card's examples

KEYS = torch.tensor([(2, 0), (0, 2), (1, 1), (-1, 0), (0, -2), (1.5, -1)]).view(1, 1, 6, 2)
BLOCK_KEYS = torch.tensor([(0.2, 0.1), (0.1, 0.3)]).view(1, 1, 2, 2)
QUERIES = torch.tensor([[(1, 0), (0.5, 0.5)], [(0, 1), (1, -1)]]).view(1, 2, 2, 2)


def test_example_a():
    scale = 2**-0.5
    row = importance(QUERIES, KEYS, BLOCK_KEYS, scaling=scale)
    expected = (0.202263, 0.160749, 0.143502, 0.054603, 0.092993, 0.173776)
    torch.testing.assert_close(row[0, 0], torch.tensor(expected), atol=1e-6, rtol=0)
    prefix = importance(QUERIES, KEYS, BLOCK_KEYS, scaling=scale, normalise="prefix")
    expected = (0.242243, 0.201212, 0.176759, 0.067369, 0.108090, 0.204327)
    torch.testing.assert_close(prefix[0, 0], torch.tensor(expected), atol=1e-6, rtol=0)
    assert float(prefix.sum()) == pytest.approx(1) and float(row.sum()) < 1
    state = state_of(BLOCK_KEYS, scale)
    for normalise in ("row", "prefix"):
        mage = Mage(3, 0, normalise=normalise)
        assert mage.select(0, QUERIES, KEYS, 1, state) is None
        assert mage.select(0, QUERIES, KEYS, 2, state).tolist() == [[[0, 1, 5]]]
    average = AvgQuery(3, dense_layers=0)
    scores = torch.tensor((0.883883, 0.176777, 0.530330, -0.441942, -0.176777, 0.574524))
    torch.testing.assert_close(average.shared(QUERIES, KEYS, state)[0, 0], scores, atol=1e-6, rtol=0)
    assert average.select(0, QUERIES, KEYS, 1, state).tolist() == [[[0, 2, 5]]]


def test_example_b():
    q = torch.tensor([[1.0, -1.0]])
    low, high = page_bounds(KEYS, 2)
    assert bounds(q, low[0, 0], high[0, 0]).tolist() == [[2.0, 1.0, 3.5]]
    true = (KEYS[0, 0] @ q[0]).view(3, 2).amax(-1)
    assert true.tolist() == [2.0, 0.0, 2.5]


@pytest.mark.parametrize(
    "module", [mage_package, block_diffusion_package, config_module, masks_module, cost_module]
)
def test_examples_in_docstrings(module):
    found = doctest.testmod(module)
    assert found.attempted and not found.failed


def test_cost_of_the_card():
    for n, k, steps, expected in (
        (131072, 512, 32, 28.35),
        (8192, 512, 32, 10.49),
        (32768, 1024, 32, 16.02),
        (131072, 512, 8, 7.77),
    ):
        assert attention_speedup(n, 32, steps, k) == pytest.approx(expected, abs=0.005)
    assert attention_speedup(10**12, 32, 32, 512) == pytest.approx(32, rel=1e-6)
    assert attention_speedup(100, 32, 32, 512) == 1 and attention_speedup(8192, 32, 1, 512) == 1
    with pytest.raises(UsageError, match="k=0"):
        mage_reads(8, 4, 4, 0)
    with pytest.raises(UsageError, match="steps=0"):
        exact_reads(8, 4, 0)


# ------------------------------------------------------------------------------------------ reference


@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("normalise", ["row", "prefix"])
def test_importance_by_loops(normalise, softcap, monkeypatch):
    monkeypatch.setattr(block_reference, "CHUNK", 8)  # 21 keys in three pieces
    q, keys, _, own, _ = drawn()
    found = query_importance(q, keys, own, scaling=0.7, normalise=normalise, softcap=softcap)

    def score(a, b):
        s = 0.7 * sum(float(x) * float(y) for x, y in zip(a, b, strict=True))
        return s if softcap is None else softcap * math.tanh(s / softcap)

    for r, h, b in ((0, 0, 0), (1, 1, 3), (0, 1, 2)):
        expected = [0.0] * 21
        for g in range(3):
            one = q[r, 3 * h + g, b]
            weights = [math.exp(score(one, key)) for key in keys[r, h]]
            rest = sum(math.exp(score(one, key)) for key in own[r, h]) if normalise == "row" else 0.0
            expected = [e + w / (sum(weights) + rest) / 3 for e, w in zip(expected, weights, strict=True)]
        torch.testing.assert_close(found[r, h, b], torch.tensor(expected, dtype=torch.float64))
    counted = torch.tensor([[True, False, False, True], [False] * 4])
    mean = importance(q, keys, own, scaling=0.7, normalise=normalise, softcap=softcap, queries=counted)
    torch.testing.assert_close(mean[0], (found[0, :, 0] + found[0, :, 3]) / 2)
    torch.testing.assert_close(mean[1], found[1].mean(1))  # a row where none counts


@pytest.mark.parametrize("shape", [(40,), (2, 3, 100), (0, 5), (3, 1)])
def test_top_sets_are_a_stable_sorts(shape):
    g = torch.Generator().manual_seed(sum(shape))
    for scores in (
        torch.rand(shape, generator=g),
        torch.randint(0, 4, shape, generator=g).float(),  # ties at the border
        torch.zeros(shape),
        torch.full(shape, -math.inf),
        torch.where(torch.rand(shape, generator=g) < 0.2, math.nan, torch.rand(shape, generator=g)),
    ):
        for k in (1, 3, 17, 1000):
            order = scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]
            assert torch.equal(top_sets(scores, k), order.sort(-1).values)


def test_block_decode_by_a_mask_for_each_head():
    q, keys, values, own, own_values = drawn()
    idx = torch.stack([torch.randperm(21, generator=torch.Generator().manual_seed(i))[:5] for i in range(4)])
    idx = idx.view(2, 2, 5).sort(-1).values
    seen = torch.zeros(2, 2, 21, dtype=torch.bool).scatter(-1, idx, True)
    seen = torch.cat([seen, torch.ones(2, 2, 4, dtype=torch.bool)], -1).repeat_interleave(3, 1)[:, :, None]
    whole = [torch.cat(pair, 2).repeat_interleave(3, 1) for pair in ((keys, own), (values, own_values))]
    expected = torch.nn.functional.scaled_dot_product_attention(q, *whole, attn_mask=seen, scale=0.7)
    found = block_decode(q, keys, values, own, own_values, idx, scaling=0.7)
    torch.testing.assert_close(found, expected)
    swapped = block_decode(q, keys, values, own, own_values, idx.flip(1), scaling=0.7)
    assert float((swapped - expected).abs().max()) > 1e-2
    exact, mass = exact_with_importance(q, keys, values, own, own_values, scaling=0.7)
    torch.testing.assert_close(exact, torch.nn.functional.scaled_dot_product_attention(q, *whole, scale=0.7))
    torch.testing.assert_close(mass, importance(q, keys, own, scaling=0.7))
    everything = torch.arange(21).expand(2, 2, -1)
    assert torch.equal(block_decode(q, keys, values, own, own_values, everything, scaling=0.7), exact)
    low = block_decode(*(x.bfloat16() for x in (q, keys, values, own, own_values)), idx, scaling=0.7)
    wide = [x.bfloat16().double() for x in (q, keys, values, own, own_values)]
    ideal = block_decode(*wide, idx, scaling=0.7)
    assert low.dtype == torch.bfloat16 and float((low.double() - ideal).norm() / ideal.norm()) < 5e-3
    with pytest.raises(UsageError, match="5 query heads can't be shared out among 2"):
        block_decode(q[:, :5], keys, values, own, own_values, None, scaling=0.7)


def test_top_sets_break_ties_by_index():
    assert top_sets(torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 1.0]), 2).tolist() == [1, 2]
    assert top_sets(torch.tensor([1.0, 3.0, 3.0, 0.0, 3.0, 1.0]), 4).tolist() == [0, 1, 2, 4]
    assert top_sets(torch.zeros(300), 5).tolist() == [0, 1, 2, 3, 4]
    assert top_sets(torch.tensor([2.0, 1.0]), 5).tolist() == [0, 1]
    scores = torch.randn(3, 2, 50, generator=torch.Generator().manual_seed(0))
    for row, found in zip(scores.view(6, 50).tolist(), top_sets(scores, 7).view(6, 7).tolist(), strict=True):
        assert found == sorted(sorted(range(50), key=lambda j: (-row[j], j))[:7])
    with pytest.raises(UsageError, match="k=0"):
        top_sets(scores, 0)


def test_recall_and_mass():
    exact = torch.tensor([0.4, 0.3, 0.2, 0.1])
    recall, mass = recall_and_mass(torch.tensor([0, 2]), exact)
    assert float(recall) == 0.5 and float(mass) == pytest.approx(0.6 / 0.7)
    assert [float(x) for x in recall_and_mass(torch.tensor([0, 1]), exact)] == [1.0, 1.0]


# ------------------------------------------------------------------------------------------- policies


@pytest.mark.parametrize("name", ["mage", "oracle", "average", "quest"])
def test_sets_do_not_depend_on_the_order_of_heads_or_positions(name):
    q, keys, _, own, _ = drawn()
    policy = ALL[name]

    def chosen(queries):
        state = state_of(own)
        policy.select(0, queries, keys, 1, state)
        return policy.select(0, queries, keys, 2, state)

    expected = chosen(q)
    heads, places = torch.tensor([2, 0, 1, 4, 5, 3]), torch.tensor([3, 1, 0, 2])
    assert torch.equal(chosen(q[:, heads]), expected) and torch.equal(chosen(q[:, :, places]), expected)
    assert not torch.equal(chosen(q.flip(1)), expected)  # heads of other groups


@pytest.mark.parametrize("name", ALL)
def test_sets_are_sorted_unique_and_kept_as_the_policy_says(name):
    policy, (q, keys, _, own, _) = ALL[name], drawn()
    assert isinstance(policy, SparsePolicy)
    state = state_of(own)
    sets = [policy.select(0, q * s, keys, s, state) for s in range(1, 5)]
    late = [idx for idx in sets[2:] if idx is not None]
    for idx in late:
        assert idx.shape[:2] == (2, 2) and idx.dtype == torch.long
        assert bool((idx[..., 1:] > idx[..., :-1]).all()) and int(idx.min()) >= 0 and int(idx.max()) < 21
    if name in ("oracle", "average", "quest"):
        assert sets[0] is not None
    else:
        assert late[0] is late[1]
    if name.startswith("mage"):
        assert sets[0] is None and sets[1] is late[0]
    commit = state_of(own, commit=True, kept=state.kept)
    assert policy.select(0, q, keys, 5, commit) is not None
    exact = type(policy)(commit="exact", dense_layers=0)
    assert exact.select(0, q, keys, 5, commit) is None


def test_small_prefixes_and_first_layers_are_dense():
    q, keys, _, own, _ = drawn()
    for policy in (Mage(21, 0), Oracle(21), AvgQuery(30), Quest(6, page=8), Window(21), Random(64)):
        assert all(policy.select(5, q, keys, step, state_of(own)) is None for step in (1, 2))
    for policy in (Mage(3), Oracle(3), AvgQuery(3), Quest(3, page=3), Window(3), Random(3)):
        found = []
        for layer in (1, 2):
            state = state_of(own)
            policy.select(layer, q, keys, 1, state)
            found.append(policy.select(layer, q, keys, 2, state))
        assert found[0] is None and found[1] is not None  # dense_layers is 2


def test_mage_averages_over_positions_that_were_masked():
    q, keys, _, own, _ = drawn()
    masked = torch.tensor([[False, False, True, True], [True] * 4])
    state = state_of(own, queries=masked)
    Mage(5, 0).select(0, q, keys, 1, state)
    each = query_importance(q, keys, own, scaling=0.5)
    expected = torch.stack([each[0, :, 2:].mean(1), each[1].mean(1)])
    assert torch.equal(state.kept[0], top_sets(expected, 5))
    some = Mage(5, 0, positions=(0, 3))
    state = state_of(own, queries=masked)
    some.select(0, q, keys, 1, state)
    expected = torch.stack([each[0, :, 3], (each[1, :, 0] + each[1, :, 3]) / 2])
    assert torch.equal(state.kept[0], top_sets(expected, 5))
    with pytest.raises(UsageError, match="a block has 4 tokens"):
        Mage(5, 0, positions=(4,)).select(0, q, keys, 1, state_of(own))


def test_tiles():
    scores = torch.tensor([0.1, 0.9, 0.5])
    assert tile_sets(scores, 6, 2, 2).tolist() == [2, 3, 4, 5]
    assert tile_sets(scores, 7, 2, 2).tolist() == [2, 3, 6]  # the incomplete tile counts as one
    assert tile_sets(scores, 7, 2, 1).tolist() == [2, 3, 6]  # one full tile at least
    assert tile_sets(scores, 7, 2, 9, first=10).tolist() == [10, 11, 12, 13, 14, 15, 16]
    q, keys, _, own, _ = drawn()
    state = state_of(own)
    Mage(6, 0, tile=2).select(0, q, keys, 1, state)
    mass = importance(q, keys, own, scaling=0.5)
    for r, h in ((0, 0), (1, 1)):
        sums = [float(mass[r, h, 2 * t : 2 * t + 2].sum()) for t in range(10)]
        best = sorted(sorted(range(10), key=lambda t: -sums[t])[:2])
        assert state.kept[0][r, h].tolist() == [x for t in best for x in (2 * t, 2 * t + 1)] + [20]


def test_quest_bounds_hold_and_grow_with_the_cache():
    q, keys, _, own, _ = drawn(n=27)
    low, high = page_bounds(keys, 4)
    found = bounds(q.view(2, 2, 3, 4, 5), low[:, :, None], high[:, :, None])  # (R, H, G, B, T)
    scores = torch.einsum("rhgbd,rhnd->rhgbn", q.view(2, 2, 3, 4, 5), keys)[..., :24]
    assert bool((found >= scores.view(2, 2, 3, 4, 6, 4).amax(-1) - 1e-9).all())
    by_loops = sum(
        max(float(q[1, 4, 2, c] * low[1, 1, 3, c]), float(q[1, 4, 2, c] * high[1, 1, 3, c])) for c in range(5)
    )
    assert float(found[1, 1, 1, 2, 3]) == pytest.approx(by_loops)
    policy, memory = Quest(8, page=4, least=1, dense_layers=0), {}
    for n in (10, 17, 18, 27):  # one sequence that grows
        growing = policy.select(0, q, keys[:, :, :n], 1, state_of(own, memory=memory))
        assert torch.equal(growing, policy.select(0, q, keys[:, :, :n], 1, state_of(own)))
    best = top_sets(found.mean((2, 3)), 1)
    assert torch.equal(growing[..., :4], best * 4 + torch.arange(4)) and growing[0, 0, 4:].tolist() == [
        24,
        25,
        26,
    ]
    assert Quest(32, page=16).pages == 3 and Quest(512).pages == 32 and policy.reads(27) == 27 / 4


def test_sparsed_is_exact_first_and_ranks_prompt_and_answer_apart():
    q, keys, _, own, _ = drawn(n=30)
    policy, state = SparseD(skip=0.4, select=0.5, block=4), state_of(own, steps=5, prompt=18)
    assert [policy.select(0, q, keys, s, state) is None for s in (1, 2, 3)] == [True] * 3
    found = policy.select(0, q, keys, 4, state)
    mass = importance(q, keys, own, scaling=0.5)
    for r, h in ((0, 0), (1, 1)):
        expected = []
        for first, end, full, take in (
            (0, 18, 4, 2),
            (18, 30, 3, 2),
        ):  # 5 tiles, 3 kept, one of which is cut; 3, 2
            sums = [float(mass[r, h, first + 4 * t : first + 4 * t + 4].sum()) for t in range(full)]
            best = sorted(sorted(range(full), key=lambda t: -sums[t])[:take])
            expected += [first + 4 * t + i for t in best for i in range(4)] + list(
                range(first + 4 * full, end)
            )
        assert found[r, h].tolist() == expected
    early = state_of(own, steps=5, commit=True)
    assert policy.select(0, q, keys, 3, early) is None  # the block ended before the sets were made
    everything, state = SparseD(0.0, 1.0, 4), state_of(own)
    everything.select(0, q, keys, 1, state)
    assert everything.select(0, q, keys, 2, state) is None


def test_window_and_chance():
    q, keys, _, own, _ = drawn()
    assert Window(4, dense_layers=0).select(0, q, keys, 1, state_of(own))[1, 0].tolist() == [17, 18, 19, 20]
    sinks = Window(4, sinks=3, dense_layers=0).select(0, q, keys, 1, state_of(own))
    assert sinks[0, 1].tolist() == [0, 1, 2, 20]

    def chosen(seed=0, layer=0, block=3):
        return Random(4, seed=seed, dense_layers=0).select(layer, q, keys, 1, state_of(own, block=block))

    assert torch.equal(chosen(), chosen())
    assert not any(torch.equal(chosen(), other) for other in (chosen(1), chosen(layer=1), chosen(block=4)))
    assert len({tuple(row) for row in chosen().view(4, 4).tolist()}) > 1
    counts = torch.zeros(21)
    for block in range(400):
        counts += torch.bincount(chosen(block=block).flatten(), minlength=21)
    assert float((counts / 1600 - 4 / 21).abs().max()) < 0.04  # 4 sd


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Mage(0), "Mage: k=0 would read no token"),
        (lambda: Quest(-1), "Quest: k=-1"),
        (lambda: Mage(4, -1), "dense_layers=-1"),
        (lambda: Oracle(4, commit="exakt"), "Did you mean 'exact'"),
        (lambda: Mage(4, normalise="rows"), "Did you mean 'row'"),
        (lambda: Mage(4, tile=5), r"tile=5 must lie in \[1, k=4\]"),
        (lambda: Mage(4, positions=()), r"positions=\(\)"),
        (lambda: Quest(4, page=0), "page=0"),
        (lambda: SparseD(skip=1.0), "skip=1.0"),
        (lambda: SparseD(select=0.0), "select=0.0"),
        (lambda: SparseD(dense_layers=-1), "SparseD: dense_layers=-1"),
        (lambda: Window(4, sinks=5), "sinks=5"),
    ],
)
def test_useless_settings_are_refused(make, message):
    with pytest.raises(UsageError, match=message):
        make()


# ------------------------------------------------------------------------------------------- decoding


class Fixed:
    """The same sets, different for each head, in all layers and passes."""

    keep_block: ClassVar[bool] = True

    def __init__(self, idx):
        self.idx = idx

    def select(self, layer, q, k_prefix, step, state):
        return self.idx


@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3"])
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_sparse_passes_equal_a_mask_for_each_head(family, attn):
    """Positions are the original ones, and each head reads its own set: seen against one pass without a cache."""
    one, ids = model_of(family, attn=attn), tokens(1, 12)
    plain = model_of(family)
    kv = getattr(one.config, "num_key_value_heads", None) or one.config.num_attention_heads
    heads = one.config.num_attention_heads
    idx = torch.tensor([[0, 3, 6], [1, 2, 7], [0, 1, 2], [4, 5, 6]])[:kv][None]
    block = torch.tensor([[5, MASK, MASK, 9]])
    with decoding(one, config(), total=12, sparse=Fixed(idx)) as decoder:
        decoder.prefill(ids[:, :8])
        decoder.begin(block == MASK)
        decoder.denoise(torch.full_like(block, MASK))
        found = decoder.denoise(block)  # from the buffer, whose block part must be new
    at = torch.arange(12) // 4
    seen = (at[:, None] >= at[None]).expand(heads, -1, -1).clone()
    kept = torch.zeros(kv, 8, dtype=torch.bool).scatter(-1, idx[0], True).repeat_interleave(heads // kv, 0)
    seen[:, 8:, :8] = kept[:, None]
    whole = torch.cat([ids[:, :8], block], 1)
    with torch.no_grad():
        expected = plain(whole, attention_mask=seen[None], position_ids=torch.arange(12)[None]).logits[:, 8:]
    torch.testing.assert_close(found[..., :MASK], expected[..., :MASK], atol=2e-5, rtol=1e-4)
    with torch.no_grad():
        dense = plain(whole, attention_mask=(at[:, None] >= at[None])[None, None]).logits[:, 8:]
    assert float((dense - expected).abs().max()) > 1e-2


@pytest.mark.parametrize("name", ALL)
def test_reading_everything_is_exact_bit_for_bit(model, name):
    ids, cfg = tokens(2, 10), config(steps=2)
    exact, dense = generate(model, ids, cfg, max_new_tokens=10, force=True)
    policy = ALL[name]
    wide = {"select": 1.0, "block": 3} if name == "sparsed" else {"k": 20}
    same, stats = generate(
        model, ids, cfg, type(policy)(**wide, dense_layers=0), max_new_tokens=10, force=True
    )
    assert torch.equal(same, exact) and stats.active == 0 and stats.kv_read == dense.kv_read
    _, stats = generate(model, ids, cfg, policy, max_new_tokens=10, force=True, measure=True)
    assert stats.active > 0 and stats.kv_read < dense.kv_read and stats.nfe == dense.nfe
    assert all(0 <= one.recall <= 1 and 0 < one.mass <= 1 + 1e-9 for one in stats.selections)
    if name == "oracle":
        assert stats.recall == 1 and stats.mass == pytest.approx(1)
        assert stats.kv_read_selecting == (8 * 1 + 12 * 2 + 16 * 2) / 2  # passes of each block
    if name == "random":
        assert stats.recall < 0.9


def test_one_step_is_exact_and_so_is_a_first_block(model):
    ids, policy = tokens(1, 12), Mage(4, 0, commit="exact")
    cfg = config(strategy="dynamic", threshold=0.0)
    exact = generate(model, ids, cfg, max_new_tokens=12, force=True)[0]
    found, stats = generate(model, ids, cfg, policy, max_new_tokens=12, force=True)
    assert torch.equal(found, exact) and set(stats.steps) == {1} and stats.active == 0
    none = ids[:, :0]
    exact = generate(model, none, config(), max_new_tokens=4, force=True)[0]
    assert torch.equal(generate(model, none, config(), Mage(1, 0), max_new_tokens=4, force=True)[0], exact)


def test_reads_are_the_cost_model(model):
    ids, cfg = tokens(1, 16), config(steps=4)
    _, dense = generate(model, ids, cfg, max_new_tokens=8, force=True)
    _, sparse = generate(model, ids, cfg, Mage(6, 0), max_new_tokens=8, force=True)
    assert dense.kv_read == exact_reads(16, 4, 4) + exact_reads(20, 4, 4)
    assert sparse.kv_read == mage_reads(16, 4, 4, 6) + mage_reads(20, 4, 4, 6)
    assert (dense.kv_read_commit, sparse.kv_read_commit) == (20, 10)
    _, half = generate(model, ids, cfg, Mage(6, 1, commit="exact"), max_new_tokens=8, force=True)
    assert half.kv_read == pytest.approx(
        (dense.kv_read + 2 * sparse.kv_read) / 3
    )  # one of three layers is dense
    assert half.kv_read_commit == 20


def test_a_sparse_commit_changes_the_cache_and_an_exact_one_does_not(model):
    ids = tokens(1, 12)
    kept = {}
    for commit in ("dense", "exact", "sparse"):
        policy = None if commit == "dense" else Mage(2, 0, commit=commit)
        with decoding(model, config(), total=12, sparse=policy) as decoder:
            decoder.prefill(ids[:, :8])
            decoder.begin(torch.ones(1, 4, dtype=torch.bool))
            decoder.denoise(torch.full((1, 4), MASK))
            decoder.commit(ids[:, 8:])
            kept[commit] = torch.stack([layer.values[:, :, :12].clone() for layer in decoder.cache.layers])
    assert torch.equal(kept["exact"], kept["dense"])
    assert torch.equal(kept["sparse"][:, :, :, :8], kept["dense"][:, :, :, :8])
    assert float((kept["sparse"] - kept["dense"])[1:, :, :, 8:].abs().max()) > 1e-3


def test_mage_chooses_from_the_first_pass_and_anew_for_each_block(model):
    class Spy(Mage):
        def select(self, layer, q, k_prefix, step, state):
            idx = super().select(layer, q, k_prefix, step, state)
            if step == 1 and layer == 1:
                scores = importance(q, k_prefix, state.block_keys, scaling=state.scaling)
                log.append((state.block, top_sets(scores, self.k)))
            elif layer == 1:
                log.append((state.block, idx))
            return idx

    log: list = []
    generate(model, tokens(1, 16), config(steps=3), Spy(5, 0), max_new_tokens=8, force=True)
    by_block = {b: [idx for block, idx in log if block == b] for b in (4, 5)}
    for sets in by_block.values():
        assert all(torch.equal(idx, sets[0]) for idx in sets) and len(sets) >= 3
    assert not torch.equal(by_block[4][0], by_block[5][0])


def test_wrong_policies_are_refused(model):
    with pytest.raises(UsageError, match=r"Fixed.select gave indices of shape \[1, 3\]"):
        generate(
            model, tokens(1, 8), config(), Fixed(torch.tensor([[0, 1, 2]])), max_new_tokens=4, force=True
        )
    blind = Fixed(None)
    blind.keep_block = False
    with pytest.raises(UsageError, match="a block must see itself"):
        generate(model, tokens(1, 8), config(), blind, max_new_tokens=4, force=True)
    latent = model_of()
    latent.config.kv_lora_rank = 4
    with pytest.raises(UsageError, match="latent attention"):
        generate(latent, tokens(1, 8), config(), Mage(4), max_new_tokens=4, force=True)
    assert generate(latent, tokens(1, 8), config(), max_new_tokens=4, force=True)[0].shape == (1, 12)


@pytest.mark.parametrize("shift", [False, True])
def test_bfloat16_batches_and_token_shift(shift):
    one, cfg = model_of(dtype=torch.bfloat16), config(token_shift=shift, steps=2)
    ids, stats = generate(one, tokens(3, 18), cfg, Mage(8, 1), max_new_tokens=9, force=True, measure=True)
    assert ids.shape == (3, 27) and stats.active == 1 and not bool((ids == MASK).any())
    alone, _ = generate(one, tokens(3, 18)[1:2], cfg, Mage(8, 1), max_new_tokens=9, force=True)
    assert alone.shape == (1, 27)


def test_made_up_prefixes_for_timing(model):
    """Random keys and values stand in the cache, and a block is denoised after them as after any others."""
    with decoding(model, config(), total=64, sparse=Mage(8, 0), measure=True) as decoder:
        decoder.pretend(60, rows=2, generator=torch.Generator().manual_seed(0))
        assert decoder.committed == 60
        kept = torch.stack([layer.keys[:, :, :60] for layer in decoder.cache.layers])
        assert abs(float(kept.mean())) < 0.05 and float(kept.std()) == pytest.approx(1, abs=0.05)
        decoder.begin(torch.ones(2, 4, dtype=torch.bool))
        for _ in range(3):
            decoder.denoise(torch.full((2, 4), MASK))
        assert decoder.session.reads.denoise == 3 * mage_reads(60, 4, 3, 8)
        with pytest.raises(UsageError, match="holds 60 tokens already"):
            decoder.pretend(4)


# ------------------------------------------------------------------------------------------ observing


def test_observation_leaves_decoding_exact_and_measures_each_policy(model):
    ids, cfg = tokens(2, 22), config(steps=3)
    seen = observe(model, ids, cfg, ALL, max_new_tokens=6, force=True)
    _, dense = generate(model, ids, cfg, max_new_tokens=6, force=True)
    assert seen.stats.kv_read == dense.kv_read and seen.stats.active == 0
    table = seen.table()
    assert set(table) == set(ALL)
    assert table["oracle"]["recall"] == 1 and table["oracle"]["own_recall"] == 1
    assert table["oracle"]["mass"] == pytest.approx(1)
    for name, row in table.items():
        assert 0 <= row["recall"] <= 1 and 0 < row["mass"] <= 1 + 1e-9 and row["shared_recall"] <= 1
        assert ("own_recall" in row) == (name not in ("window", "random", "sparsed"))
        assert row["shared_recall"] <= table["oracle"]["shared_recall"] + 1e-9 or name in (
            "sparsed",
            "quest",
            "mage tiles",
        )
    first = [one for one in seen.aligned if one.step == 1]
    assert all(one.block_average == pytest.approx(1) and one.single == pytest.approx(1) for one in first)
    assert {one.block for one in seen.seen} == {5, 6}
    average, single = seen.alignment()
    assert -1 <= single < 1 and -1 <= average < 1
    # the sets it measures are those that a sparse run makes in its first block, where nothing differs yet
    ran = generate(model, ids, cfg, ALL["average"], max_new_tokens=1, force=True, measure=True)[1].selections
    here = [one for one in seen.seen if one.selector == "average" and one.step == 1 and one.block == 5]
    assert here[0].recall == pytest.approx(next(one for one in ran if one.layer == 0).recall)


def test_own_and_shared_recall_by_loops():
    """One layer's numbers for the average query, by sorting."""
    from gnomon.methods.layers.mage import Watch

    q, keys, _, own, _ = drawn(rows=1)
    watch = Watch({"average": AvgQuery(4, dense_layers=0)})
    assert watch.select(0, q, keys, 1, state_of(own)) is None
    (row,) = watch.seen
    exact = query_importance(q, keys, own, scaling=0.5)
    scores = torch.einsum("hgbd,hnd->hgbn", q[0].view(2, 3, 4, 5), keys[0]).mean(1)  # (H, B, N)

    def best(x):
        return set(sorted(range(21), key=lambda j: -float(x[j]))[:4])

    mine, ours, block = [], [], []
    for h in range(2):
        together = best(scores[h].mean(0))
        block.append(len(together & best(exact[0, h].mean(0))) / 4)
        for b in range(4):
            mine.append(len(best(scores[h, b]) & best(exact[0, h, b])) / 4)
            ours.append(len(together & best(exact[0, h, b])) / 4)
    assert row.own_recall == pytest.approx(sum(mine) / 8) and row.shared_recall == pytest.approx(
        sum(ours) / 8
    )
    assert row.recall == pytest.approx(sum(block) / 2) and row.tokens == 4


def test_losses_along_a_trajectory(model):
    ids, cfg = tokens(2, 16), config(steps=2)
    order = torch.tensor([[2, 0, 3, 1], [1, 2, 0, 3]])
    dense, read = trajectory_nll(model, ids, cfg, None, order)
    assert dense.shape == (2, 2) and float(read) == exact_reads(12, 4, 2)
    for s, shown in enumerate((0, 2)):
        masked = torch.ones(2, 16, dtype=torch.bool)
        masked[:, :12] = False
        for r in range(2):
            masked[r, 12 + order[r, :shown]] = False
        with torch.no_grad():
            logits = denoiser_logits(model, ids.masked_fill(masked, MASK), ids, cfg).log_softmax(-1)
        nll = -logits.gather(-1, ids[..., None])[..., 0]
        expected = (nll * masked).sum(-1) / masked.sum(-1)
        torch.testing.assert_close(dense[:, s], expected, atol=1e-6, rtol=1e-6)
    all_read, _ = trajectory_nll(model, ids, cfg, Mage(12, 0), order)
    assert torch.equal(all_read, dense)
    sparse, read = trajectory_nll(model, ids, cfg, Mage(4, 0), order)
    assert torch.equal(sparse[:, 0], dense[:, 0]) and not torch.equal(sparse[:, 1], dense[:, 1])
    assert float(read) == mage_reads(12, 4, 2, 4)
    with pytest.raises(UsageError, match="order must be a permutation"):
        trajectory_nll(model, ids, cfg, None, order * 0)
    with pytest.raises(UsageError, match="two or more"):
        trajectory_nll(model, ids[:, :4], cfg, None, order)
    with pytest.raises(UsageError, match="no policy"):
        observe(model, ids, cfg, {}, force=True)


@pytest.mark.parametrize("policy", [Window(4), Random(4)], ids=["window", "random"])
def test_policies_that_look_at_no_queries_say_so(policy: Window | Random) -> None:
    with pytest.raises(UsageError, match="doesn't look at queries"):
        policy.per_query(QUERIES, KEYS, state_of(BLOCK_KEYS))
