"""Sources of truth: the card's numbers, masks and samplers in loops, full passes without a cache, a causal model.

Negative tests: a causal mask, a missing commit and a boolean mask in eager attention must show.
"""

import copy
import math
import subprocess
import sys

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama

import gnomon.methods.layers.block_diffusion.decoder as decoder_module
from gnomon.core.data import Batches
from gnomon.core.errors import GnomonError, NumericalFailure, UsageError
from gnomon.core.models import load
from gnomon.core.seeding import seeded
from gnomon.core.tiny import build
from gnomon.core.train import TrainConfig, train
from gnomon.methods.layers.block_diffusion import (
    STRATEGIES,
    BlockDiffusionCollator,
    BlockDiffusionConfig,
    DiffusionLoss,
    NoisyBatches,
    block_causal_mask,
    block_diff_mask,
    block_diffusion_loss,
    bounded,
    declare,
    declared,
    decoding,
    denoiser_logits,
    diffusion_terms,
    draw_times,
    generate,
    noise,
    propose,
    transfer,
    weighted_terms,
)

MASK = 258
FAMILIES = ("llama", "qwen2", "qwen3", "gemma", "olmo", "olmo2", "gpt2", "gpt_neox", "opt")


def config(block=4, **more):
    return BlockDiffusionConfig(block_size=block, mask_token_id=MASK, **more)


def model_of(family="llama", dtype=torch.float64, attn="sdpa"):
    with seeded(0):
        model = build(f"tiny:{family}-10k", attn=attn)
        for p in model.parameters():  # larger weights, so that what is seen shows
            p.data += 0.2 * torch.randn(p.shape)
    return model.to(dtype)


@pytest.fixture(scope="module")
def model():
    return model_of()


def tokens(rows=2, length=16, seed=1):
    return torch.randint(0, 256, (rows, length), generator=torch.Generator().manual_seed(seed))


def full_logits(model, ids, cfg):
    """One pass without a cache over whole blocks, the last of which may hold masks; shift and −∞ by hand."""
    block = cfg.block_size
    at = [i // block for i in range(ids.shape[1])]
    seen = torch.tensor([[a >= b for b in at] for a in at])[None, None]
    with torch.no_grad():
        out = model(ids, attention_mask=seen, position_ids=torch.arange(ids.shape[1])[None]).logits
    if cfg.token_shift:
        out = torch.cat([torch.zeros_like(out[:, :1]), out[:, :-1]], 1)
    out = out.clone()
    out[..., cfg.mask_token_id] = -math.inf
    return out


# --------------------------------------------------------------------------------------------- masks


def test_mask_of_the_card():
    rows = [
        "11000000",
        "11000000",
        "00111100",
        "00111100",
        "00001100",
        "00001100",
        "00001111",
        "00001111",
    ]
    found = block_diff_mask(4, 2)
    assert ["".join(map(str, row)) for row in found.int().tolist()] == rows
    assert int(found.sum()) == 24


@pytest.mark.parametrize(("length", "block"), [(12, 3), (8, 8), (5, 1), (15, 5), (1, 1)])
def test_mask_by_its_definition(length, block):
    found = block_diff_mask(length, block)
    for i in range(2 * length):
        for j in range(2 * length):
            bi, bj = i % length // block, j % length // block
            noisy_i, noisy_j = i < length, j < length
            a = noisy_i == noisy_j and bi == bj
            b = noisy_i and not noisy_j and bi > bj
            c = not noisy_i and not noisy_j and bi >= bj
            assert bool(found[i, j]) == (a or b or c)
    nb = length // block
    assert (
        int(found.sum()) == length * block + length * block * (nb - 1) // 2 + length * block * (nb + 1) // 2
    )


def test_mask_limits():
    assert torch.equal(block_diff_mask(6, 6)[:6, :6], torch.ones(6, 6, dtype=torch.bool))
    assert not block_diff_mask(6, 6)[:6, 6:].any()
    one = block_diff_mask(6, 1)
    tril = torch.ones(6, 6, dtype=torch.bool).tril()
    assert torch.equal(one[6:, 6:], tril) and torch.equal(one[:6, 6:], tril & ~torch.eye(6, dtype=torch.bool))
    assert torch.equal(one[:6, :6], torch.eye(6, dtype=torch.bool))


@pytest.mark.parametrize(("length", "block"), [(10, 4), (0, 4), (3, 4)])
def test_partial_blocks_are_refused(length, block):
    with pytest.raises(UsageError, match=rf"{length} tokens aren't whole blocks of {block}"):
        block_diff_mask(length, block)


def test_block_causal_mask_in_pieces():
    whole = block_causal_mask(12, 3)
    assert torch.equal(whole, block_diff_mask(12, 3)[12:, 12:])
    assert torch.equal(block_causal_mask(6, 3, past=6), whole[6:])
    with pytest.raises(UsageError, match="5 tokens aren't whole blocks"):
        block_causal_mask(6, 3, past=5)


# ---------------------------------------------------------------------------------------------- loss


def test_example_c():
    logits = torch.zeros(1, 4, 5)
    logits[..., 4] = -math.inf  # the mask token, as in denoiser_logits
    logits[0, 2, :4] = torch.tensor([math.log(3), 0.0, 0.0, 0.0])  # p = 1/2 for token 0
    ids = torch.tensor([[1, 0, 0, 3]])
    weights = torch.tensor([[2.0, 0.0, 2.0, 0.0]])  # t = 1/2, positions 0 (p = 1/4) and 2 (p = 1/2)
    found = weighted_terms(logits, ids, weights)
    assert float(found.loss) == pytest.approx(1.039721, abs=1e-6)
    assert float(found.masked_nll) == pytest.approx((math.log(4) + math.log(2)) / 2) and found.masked == 2
    counted = torch.tensor([[True, True, True, False]])
    assert float(weighted_terms(logits, ids, weights, counted).loss) == pytest.approx(
        1.039721 * 4 / 3, abs=1e-6
    )


def test_noise_levels_are_stratified_and_no_block_has_a_stratum_of_its_own():
    g = torch.Generator().manual_seed(0)
    cfg = config(t_min=0.2, t_max=0.6)
    drawn = torch.stack([draw_times(3, 4, cfg, g).flatten() for _ in range(400)])
    strata = ((drawn - 0.2) / 0.4 * 12).floor().sort(-1).values
    assert torch.equal(strata, torch.arange(12.0).expand(400, -1))
    assert float((drawn.mean(0) - 0.4).abs().max()) < 0.025  # sd of a mean .0058


def test_noise_masks_a_share_t_and_weighs_it_with_its_inverse():
    ids = tokens(64, 64)
    drawn = noise(ids, config(8), torch.Generator().manual_seed(0))
    assert torch.equal(drawn.noisy_ids == MASK, drawn.masked)
    assert torch.equal(drawn.noisy_ids[~drawn.masked], ids[~drawn.masked])
    assert bool((drawn.weights[drawn.masked] >= 1).all()) and not drawn.weights[~drawn.masked].any()
    per_block = drawn.weights.view(64, 8, 8).amax(-1)
    assert bool(((drawn.weights.view(64, 8, 8) == per_block[..., None]) | ~drawn.masked.view(64, 8, 8)).all())
    times = torch.full((64, 8), 0.25)
    fixed = noise(ids, config(8), torch.Generator().manual_seed(0), times=times)
    assert float(fixed.masked.float().mean()) == pytest.approx(0.25, abs=0.03)  # 4.4 sd
    assert set(fixed.weights.unique().tolist()) == {0.0, 4.0}
    all_masked = noise(ids, config(8), times=torch.ones(64, 8))
    assert bool(all_masked.masked.all())


def test_noise_leaves_what_has_no_loss():
    ids = tokens(2, 16)
    keep = torch.arange(16).expand(2, -1) >= 6
    drawn = noise(ids, config(), times=torch.ones(2, 4), loss_mask=keep)
    assert torch.equal(drawn.masked, keep)
    shifted = noise(ids, config(token_shift=True), times=torch.ones(2, 4))
    assert not shifted.masked[:, 0].any() and bool(shifted.masked[:, 1:].all())


def test_noise_refuses():
    ids = tokens(1, 8)
    with pytest.raises(UsageError, match="the mask token 258"):
        noise(ids.index_fill(1, torch.tensor([3]), MASK), config())
    with pytest.raises(UsageError, match="6 tokens aren't whole blocks of 4"):
        noise(ids[:, :6], config())
    with pytest.raises(UsageError, match=r"must lie in \(0, 1\]"):
        noise(ids, config(), times=torch.zeros(1, 2))
    with pytest.raises(UsageError, match="leaves no token"):
        weighted_terms(torch.zeros(1, 8, 9), ids % 9, torch.zeros(1, 8), torch.zeros(1, 8, dtype=torch.bool))


def test_blocks_of_one_all_masked_are_an_autoregressive_model(model):
    ids = tokens(1, 6)
    noised = noise(ids, config(1), times=torch.ones(1, 6))
    found = block_diffusion_loss(model, ids, config(1), noised=noised)
    total = 0.0
    for i in range(6):  # the model's own causal mask, a mask token at the end
        row = torch.cat([ids[:, :i], torch.tensor([[MASK]])], 1)
        logits = model(row).logits[0, -1].detach()
        logits[MASK] = -math.inf
        total -= float(logits.log_softmax(-1)[ids[0, i]])
    assert float(found.detach()) == pytest.approx(total / 6, rel=1e-9)


def test_no_loss_where_nothing_is_masked_and_the_mean_counts_all(model):
    ids = tokens(1, 8)
    none = noise(ids, config(), loss_mask=torch.zeros(1, 8, dtype=torch.bool))
    found = diffusion_terms(model, ids, config(), noised=none)
    assert float(found.loss.detach()) == 0 and found.masked == 0 and float(found.masked_nll) == 0
    some = noise(ids, config(), torch.Generator().manual_seed(3))
    logits = denoiser_logits(model, some.noisy_ids, ids, config()).log_softmax(-1)
    by_hand = sum(
        -float(logits[0, i, ids[0, i]]) * float(some.weights[0, i]) for i in range(8) if some.masked[0, i]
    )
    loss = block_diffusion_loss(model, ids, config(), noised=some)
    assert float(loss) == pytest.approx(by_hand / 8, rel=1e-6) and loss.requires_grad


def test_a_broken_model_is_a_numerical_failure():
    broken = model_of()
    broken.model.norm.weight.data.fill_(math.nan)
    with pytest.raises(NumericalFailure, match="loss is nan"):
        block_diffusion_loss(
            broken, tokens(), config(), noised=noise(tokens(), config(), times=torch.ones(2, 4))
        )
    with pytest.raises(NumericalFailure, match="Logits of block 0"):
        generate(broken, tokens()[:, :3], config(), max_new_tokens=4, force=True)


# ----------------------------------------------------------------------------- one model, three readings


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("family", FAMILIES)
def test_training_logits_are_the_samplers(family, shift):
    """Invariant 7: ties mask, cache and positions together."""
    one, cfg = model_of(family), config(token_shift=shift)
    ids = tokens(2, 12)
    noised = noise(ids, cfg, torch.Generator().manual_seed(2), times=torch.full((2, 3), 0.6))
    with torch.no_grad():
        trained = denoiser_logits(one, noised.noisy_ids, ids, cfg)
    for b in range(3):
        here = slice(4 * b, 4 * b + 4)
        with decoding(one, cfg, total=12) as decoder:
            decoder.prefill(ids[:, : 4 * b])
            decoder.begin(noised.masked[:, here])
            sampled = decoder.denoise(noised.noisy_ids[:, here])
        skip = int(shift and b == 0)  # the first token of all has no predecessor
        torch.testing.assert_close(sampled[:, skip:], trained[:, here][:, skip:], atol=1e-5, rtol=1e-5)
        uncached = full_logits(one, torch.cat([ids[:, : 4 * b], noised.noisy_ids[:, here]], 1), cfg)
        torch.testing.assert_close(sampled[:, skip:], uncached[:, -4:][:, skip:], atol=1e-5, rtol=1e-5)


def test_positions_with_a_gap_are_those_of_a_prefix_with_a_hole(model):
    """Rotary attention knows distances alone: a common offset changes nothing, a gap between two pieces does."""
    cfg = config()
    ids = torch.arange(40, 56).view(1, 16)
    noisy = ids.clone()
    noisy[:, 9:11] = MASK
    plain = denoiser_logits(model, noisy, ids, cfg)[..., :MASK]
    at = torch.arange(16)[None]
    torch.testing.assert_close(denoiser_logits(model, noisy, ids, cfg, at)[..., :MASK], plain, rtol=0, atol=0)
    # Transformers computes angles in float32, whatever the model's dtype.
    near = {"rtol": 1e-4, "atol": 1e-4}
    torch.testing.assert_close(denoiser_logits(model, noisy, ids, cfg, at + 60)[..., :MASK], plain, **near)
    gap = denoiser_logits(model, noisy, ids, cfg, at + 60 * (at >= 8))[..., :MASK]
    torch.testing.assert_close(gap[:, :8], plain[:, :8], **near)
    assert (gap[:, 8:] - plain[:, 8:]).abs().max() > 1e-2
    batch = {"input_ids": ids, "noisy_ids": noisy, "weights": (noisy == MASK).double(),
             "loss_mask": torch.ones_like(ids), "position_ids": at + 60 * (at >= 8)}  # fmt: skip
    by_hand = -gap.log_softmax(-1).gather(-1, ids[..., None])[0, 9:11].sum() / 16
    torch.testing.assert_close(DiffusionLoss(cfg)(model, batch), by_hand)
    with pytest.raises(UsageError, match="position_ids are"):
        denoiser_logits(model, noisy, ids, cfg, at[:, :8])


def test_a_causal_mask_gives_other_logits(model):
    ids, cfg = tokens(1, 8), config()
    noisy = ids.masked_fill(torch.tensor([False, True] * 4), MASK)
    with torch.no_grad():
        trained = denoiser_logits(model, noisy, ids, cfg)[:, 4:]
        causal = model(torch.cat([ids[:, :4], noisy[:, 4:]], 1)).logits[:, 4:]
    causal[..., MASK] = -math.inf
    assert float((trained - causal)[..., :MASK].abs().max()) > 1e-2


def test_eager_attention_sees_the_same_and_a_boolean_mask_would_not(model):
    ids, cfg = tokens(1, 8), config()
    eager = model_of(attn="eager")
    noisy = ids.masked_fill(torch.tensor([False, True] * 4), MASK)
    with torch.no_grad():
        expected, found = (denoiser_logits(m, noisy, ids, cfg) for m in (model, eager))
        both = torch.cat([noisy, ids], 1)
        wrong = eager(
            both,
            attention_mask=block_diff_mask(8, 4)[None, None],
            position_ids=torch.arange(8).repeat(2)[None],
        )
    torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-4)  # eager's softmax is in float32
    assert float((wrong.logits[:, :8] - expected)[..., :MASK].abs().max()) > 1e-2
    one, two = (generate(m, ids[:, :6], cfg, max_new_tokens=10, force=True)[0] for m in (model, eager))
    assert torch.equal(one, two)


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_committed_blocks_equal_a_prefill_and_a_missing_commit_shows(attn, monkeypatch):
    one, ids, cfg = model_of(attn=attn), tokens(2, 12), config()

    def cache(decoder):
        return [layer.keys[:, :, : decoder.committed].clone() for layer in decoder.cache.layers]

    with decoding(one, cfg, total=12) as decoder:
        decoder.prefill(ids)
        expected = cache(decoder)
    monkeypatch.setattr(decoder_module, "PREFILL", 5)  # a block at a time
    with decoding(one, cfg, total=12) as decoder:
        decoder.prefill(ids)
        assert decoder.passes["prefill"] == 3 and decoder.committed == 12
        torch.testing.assert_close(cache(decoder), expected)
    for kept in (ids, ids.masked_fill(torch.arange(12) % 2 == 1, MASK)):
        with decoding(one, cfg, total=12) as decoder:
            for b in range(3):
                block = kept[:, 4 * b : 4 * b + 4]
                decoder.begin(block == MASK)
                decoder.denoise(torch.full_like(block, MASK))  # leaves nothing behind
                decoder.commit(block)
            same = all(torch.allclose(a, b, atol=1e-6) for a, b in zip(cache(decoder), expected, strict=True))
            assert same == (kept is ids)
            assert decoder.cache.bytes == sum(2 * k.numel() * 8 for k in expected)


# ------------------------------------------------------------------------------------------- sampling


def test_schedules():
    assert config(32, steps=12).schedule == (3,) * 8 + (2,) * 4
    assert config(32).schedule == (1,) * 32 and config(7, steps=1).schedule == (7,)


LOGITS = torch.log(torch.tensor([[[0.6, 0.4], [0.95, 0.05], [0.2, 0.8], [0.5, 0.5]]]))


@pytest.mark.parametrize(
    ("settings", "masked", "expected"),
    [
        ({"strategy": "static", "steps": 2}, "1111", "0110"),
        ({"strategy": "static", "steps": 2}, "1001", "1001"),
        ({"strategy": "static", "steps": 2}, "0001", "0001"),
        ({"strategy": "sequential", "steps": 2}, "0111", "0110"),
        ({"strategy": "dynamic", "threshold": 0.7}, "1111", "0110"),
        ({"strategy": "dynamic", "threshold": 0.9}, "1111", "0100"),
        ({"strategy": "dynamic", "threshold": 0.99}, "1111", "0100"),
        ({"strategy": "dynamic", "threshold": 0.7, "steps": 1}, "1111", "1111"),
        ({"strategy": "entropy", "entropy_bound": 0.0}, "1111", "0100"),
        ({"strategy": "entropy", "entropy_bound": 0.2}, "1111", "0110"),  # H = .199, .500, .673, .693
        ({"strategy": "entropy", "entropy_bound": 0.7}, "1111", "1110"),
        ({"strategy": "entropy", "entropy_bound": 9.0}, "1011", "1011"),
        ({"strategy": "entropy", "entropy_bound": 0.0, "steps": 2}, "1111", "0110"),
    ],
)
def test_transfer_by_hand(settings, masked, expected):
    cfg = BlockDiffusionConfig(block_size=4, mask_token_id=9, **settings)
    chosen = transfer(LOGITS, torch.tensor([[c == "1" for c in masked]]), 1, cfg)[1]
    assert "".join(map(str, chosen[0].int().tolist())) == expected


def test_entropy_bound_by_brute_force():
    g = torch.Generator().manual_seed(0)
    entropy, masked = torch.rand(50, 6, generator=g), torch.rand(50, 6, generator=g) < 0.7
    for bound in (0.0, 0.3, 1.0):
        for row, kept, found in zip(entropy, masked, bounded(entropy, masked, bound).tolist(), strict=True):
            rising = sorted(row[kept].tolist())
            sums = [sum(rising[:n]) - max(rising[:n]) for n in range(1, len(rising) + 1)]
            assert found == sum(s <= bound for s in sums)


def test_proposals_are_drawn_from_the_tempered_softmax():
    logits = torch.tensor([0.0, 1.0, 2.0, -math.inf]).expand(1, 4000, 4)
    cfg = BlockDiffusionConfig(block_size=4, mask_token_id=3, temperature=2.0)
    drawn, confidence = propose(logits, cfg, torch.Generator().manual_seed(0))
    p = (torch.tensor([0.0, 1.0, 2.0]) / 2).softmax(-1)
    share = torch.bincount(drawn[0], minlength=4)[:3] / 4000
    assert float((share - p).abs().max()) < 0.031  # 3.9 sd
    torch.testing.assert_close(confidence[0], p[drawn[0]])
    again = propose(logits, cfg, torch.Generator().manual_seed(0))[0]
    assert torch.equal(drawn, again)


def by_loops(model, prompt, cfg, new):
    """A sampler of one row without cache: transfer by sorting, block after block."""
    block, row, steps = cfg.block_size, prompt.tolist(), []
    end = len(row) + new
    while len(row) < end:
        start = len(row) // block * block
        current = row[start:] + [MASK] * (block - len(row) + start)
        taken = 0
        while MASK in current:
            logits = full_logits(model, torch.tensor([row[:start] + current]), cfg)[0, start:]
            p = logits.softmax(-1)
            open_ = [i for i in range(block) if current[i] == MASK]
            n = min(cfg.schedule[taken], len(open_))
            order = sorted(open_, key=lambda i: (-float(p[i].max()), i))
            sure = [i for i in open_ if float(p[i].max()) > cfg.threshold]
            if cfg.strategy == "sequential":
                chosen = open_[:n]
            elif cfg.strategy == "dynamic" and len(sure) >= n:
                chosen = sure
            elif cfg.strategy == "entropy":
                h = [-sum(float(x) * math.log(float(x)) for x in p[i] if x > 0) for i in range(block)]
                order = sorted(open_, key=lambda i: (h[i], i))
                fits = [
                    k
                    for k in range(1, len(order) + 1)
                    if sum(h[i] for i in order[: k - 1]) <= cfg.entropy_bound
                ]
                chosen = order[: max(n, *fits)]
            else:
                chosen = order[:n]
            for i in chosen:
                current[i] = int(p[i].argmax())
            taken += 1
        row = row[:start] + current
        steps.append(taken)
    return row[:end], steps


@pytest.mark.parametrize("shift", [False, True])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_generation_by_loops_without_a_cache(model, strategy, shift):
    cfg = config(4, strategy=strategy, steps=3, threshold=0.2, entropy_bound=4.0, token_shift=shift)
    for length in (6, 8):
        prompt = tokens(1, length, seed=length)
        ids, stats = generate(model, prompt, cfg, max_new_tokens=7, force=True)
        expected, steps = by_loops(model, prompt[0], cfg, 7)
        assert ids[0].tolist() == expected and list(stats.steps) == steps
        assert stats.nfe == sum(steps) + len(steps) - 1


def test_thresholds_decide_the_passes(model):
    ids = tokens(1, 8)
    assert generate(model, ids, config(threshold=0.0), max_new_tokens=8, force=True)[1].steps == (1, 1)
    assert generate(model, ids, config(threshold=1.0), max_new_tokens=8, force=True)[1].steps == (4, 4)
    static = generate(model, ids, config(strategy="static", steps=2), max_new_tokens=8, force=True)[1]
    assert static.steps == (2, 2) and static.nfe == 5 and static.active == 0 and static.recall is None
    assert static.kv_read == 2 * (8 + 4) + 2 * (12 + 4) and static.kv_read_commit == 12


def test_rows_of_a_batch_are_what_they_are_alone(model):
    ids, cfg = tokens(3, 6), config(strategy="static", steps=2)
    whole = generate(model, ids, cfg, max_new_tokens=7, force=True)[0]
    alone = torch.cat(
        [generate(model, ids[i : i + 1], cfg, max_new_tokens=7, force=True)[0] for i in range(3)]
    )
    assert torch.equal(whole, alone) and whole.shape == (3, 13)


def test_generation_can_begin_from_nothing(model):
    ids, _ = generate(model, torch.empty(1, 0, dtype=torch.long), config(), max_new_tokens=5, force=True)
    assert ids[0].tolist() == by_loops(model, torch.empty(0, dtype=torch.long), config(), 5)[0]


def test_stop_tokens(model):
    prompt, cfg = tokens(2, 5), config(strategy="static", steps=2)
    free, long = generate(model, prompt, cfg, max_new_tokens=15, force=True)
    stop = int(free[0, 7])
    first = [row[5:].tolist().index(stop) if stop in row[5:].tolist() else 14 for row in free]
    ids, _ = generate(model, prompt, cfg, max_new_tokens=15, stop_ids=[stop], force=True)
    assert ids.shape[1] == 5 + max(first) + 1
    for row, whole, at in zip(ids, free, first, strict=True):
        assert torch.equal(row[: 5 + at + 1], whole[: 5 + at + 1])
        assert set(row[5 + at + 1 :].tolist()) <= {int(whole[5 + at])}
    one, short = generate(model, prompt[:1], cfg, max_new_tokens=15, stop_ids=[stop], force=True)
    assert one.shape[1] == 5 + first[0] + 1 and short.nfe < long.nfe and len(short.steps) == 1


def test_draws_follow_the_generator_and_the_model_is_left_as_it_was(model):
    cfg = config(temperature=1.5)
    model.train()
    draws = [
        generate(
            model,
            tokens(1, 5),
            cfg,
            max_new_tokens=12,
            generator=torch.Generator().manual_seed(s),
            force=True,
        )[0]
        for s in (0, 0, 1)
    ]
    assert torch.equal(draws[0], draws[1]) and not torch.equal(draws[0], draws[2])
    assert model.training and model.config._attn_implementation == "sdpa"
    model.eval()
    with pytest.raises(ZeroDivisionError), decoding(model, cfg, total=4):
        raise ZeroDivisionError
    assert model.config._attn_implementation == "sdpa"
    with pytest.raises(GnomonError, match="works inside of"):
        model.set_attn_implementation("gnomon_block")
        model(tokens(1, 4))
    model.set_attn_implementation("sdpa")


def test_bfloat16_stays_close():
    low, high, cfg = model_of(dtype=torch.bfloat16), model_of(dtype=torch.float32), config()
    high.load_state_dict(low.state_dict())
    ids = tokens(1, 8)
    noisy = ids.masked_fill(torch.tensor([False, True] * 4), MASK)
    with torch.no_grad():
        one, two = (denoiser_logits(m, noisy, ids, cfg)[..., :MASK] for m in (low, high))
    assert one.dtype == torch.float32
    assert float((one - two).norm() / two.norm()) < 3e-2  # three layers of bfloat16 rounding
    assert generate(low, ids, cfg, max_new_tokens=6, force=True)[0].shape == (1, 14)


# ------------------------------------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_size": 0}, "block_size=0"),
        ({"mask_token_id": -1}, "mask_token_id=-1"),
        ({"steps": 5}, r"steps=5 must lie in \[1, block_size=4\]"),
        ({"steps": 0}, "steps=0"),
        ({"strategy": "dynamics"}, "Did you mean 'dynamic'"),
        ({"threshold": math.nan}, "threshold=nan"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"entropy_bound": -0.1}, "entropy_bound=-0.1"),
        ({"t_min": 0.0}, "t_min=0.0"),
        ({"t_max": 1.5}, "t_max=1.5"),
    ],
)
def test_useless_settings_are_refused(settings, message):
    with pytest.raises(UsageError, match=message):
        BlockDiffusionConfig(**{"block_size": 4, "mask_token_id": MASK, **settings})


def test_generate_refuses(model):
    ids = tokens(1, 6)
    with pytest.raises(UsageError, match="doesn't say that it was trained"):
        generate(model, ids, config())
    with pytest.raises(UsageError, match="prompt holds the mask token 258"):
        generate(model, ids.index_fill(1, torch.tensor([2]), MASK), config(), force=True)
    with pytest.raises(UsageError, match="max_new_tokens=0"):
        generate(model, ids, config(), max_new_tokens=0, force=True)
    with pytest.raises(UsageError, match=r"more than the model's 256 positions"):
        generate(model, ids, config(), max_new_tokens=252, force=True)
    with pytest.raises(UsageError, match="has 259 embeddings"):
        generate(model, ids, BlockDiffusionConfig(block_size=4, mask_token_id=259), force=True)
    with pytest.raises(UsageError, match="never generated"):
        generate(model, ids, config(), stop_ids=[MASK], force=True)
    with pytest.raises(UsageError, match="first token is read off the one before"):
        generate(model, ids[:, :0], config(token_shift=True), force=True)


def small(kind, **more):
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_attention_heads": 2, "num_hidden_layers": 1}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **sizes, **more))


@pytest.mark.parametrize(
    ("kind", "more", "message"),
    [
        (
            "mistral",
            {"intermediate_size": 8, "num_key_value_heads": 1, "sliding_window": 8},
            "a window of 8 tokens",
        ),
        ("gemma2", {"intermediate_size": 8, "num_key_value_heads": 1, "head_dim": 8}, "sliding_attention"),
        ("bloom", {}, "takes no position ids"),
        ("mamba", {}, "linear_attention"),
    ],
)
def test_models_that_cannot_be_one(kind, more, message):
    with pytest.raises(UsageError, match=message):
        block_diffusion_loss(small(kind, **more), tokens(), config())


def test_attention_without_masks_is_refused(model):
    model.config._attn_implementation_internal = "flash_attention_2"
    try:
        with pytest.raises(UsageError, match="takes no mask of four dimensions"):
            block_diffusion_loss(model, tokens(), config())
    finally:
        model.config._attn_implementation_internal = "sdpa"
    with pytest.raises(UsageError, match="no language model of Transformers"):
        block_diffusion_loss(torch.nn.Linear(2, 2), tokens(), config())


def test_a_model_says_how_it_was_trained_and_keeps_it_when_saved(tmp_path):
    one, cfg = model_of(dtype=torch.float32), config(4, strategy="static")
    assert declared(one) is None
    declare(one, cfg)
    load("tiny:llama-10k").tokenizer.save_pretrained(tmp_path)
    one.save_pretrained(tmp_path)
    again = load(str(tmp_path)).model
    assert declared(again) == {"block_size": 4, "mask_token_id": MASK, "token_shift": False}
    ids = tokens(1, 6)
    assert torch.equal(
        generate(again, ids, cfg, max_new_tokens=8)[0], generate(one, ids, cfg, max_new_tokens=8)[0]
    )
    with pytest.raises(UsageError, match="trained with block_size=4, not block_size=8"):
        generate(again, ids, config(8))
    assert generate(again, ids, config(8), max_new_tokens=3, force=True)[0].shape == (1, 9)


@pytest.mark.slow  # a process of its own
def test_a_saved_model_generates_the_same_in_a_fresh_process(tmp_path):
    one, cfg = model_of(dtype=torch.float32), config()
    declare(one, cfg)
    one.save_pretrained(tmp_path)
    code = (
        "import sys, torch\n"
        "from transformers import AutoModelForCausalLM\n"
        "from gnomon.methods.layers.block_diffusion import BlockDiffusionConfig, generate\n"
        "model = AutoModelForCausalLM.from_pretrained(sys.argv[1])\n"
        "cfg = BlockDiffusionConfig(block_size=4, mask_token_id=258)\n"
        "print(generate(model, torch.tensor([[1, 2, 3, 4, 5]]), cfg, max_new_tokens=7)[0].tolist())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    expected = generate(one, torch.tensor([[1, 2, 3, 4, 5]]), cfg, max_new_tokens=7)[0]
    assert done.stdout.strip() == str(expected.tolist())


# ------------------------------------------------------------------------------------------- training


def test_collator():
    collate = BlockDiffusionCollator(config(), pad_token_id=257, generator=torch.Generator().manual_seed(0))
    items = [
        {"input_ids": list(range(9)), "labels": [-100] * 3 + list(range(3, 9))},
        {"input_ids": [5, 6], "loss_mask": [0, 1]},
        {"input_ids": torch.tensor([1, 2, 3, 4])},
    ]
    batch = collate(items)
    assert batch["input_ids"].shape == (3, 12) and batch["input_ids"][1, 2:].tolist() == [257] * 10
    counted = ["".join(map(str, row)) for row in batch["loss_mask"].int().tolist()]
    assert counted == ["000111111111", "011100000000", "111100000000"]
    assert not batch["weights"][~batch["loss_mask"]].any()
    assert torch.equal(batch["noisy_ids"] == MASK, batch["weights"] > 0)
    for wrong, message in (
        ([], "an item or more"),
        ([{"input_ids": []}], "one token or more"),
        ([{"input_ids": [1, 2], "labels": [1]}], "2 tokens, but"),
    ):
        with pytest.raises(UsageError, match=message):
            collate(wrong)
    with pytest.raises(UsageError, match="above max_length=3"):
        BlockDiffusionCollator(config(), pad_token_id=257, max_length=3)(items)
    with pytest.raises(UsageError, match="is the mask token"):
        BlockDiffusionCollator(config(), pad_token_id=MASK)


def test_pads_behind_a_row_change_nothing(model):
    collate = BlockDiffusionCollator(config(), pad_token_id=257, generator=torch.Generator().manual_seed(0))
    batch = collate([{"input_ids": [1, 2, 3, 4]}, {"input_ids": list(range(12))}])
    loss = torch.no_grad()(DiffusionLoss(config()))
    both = DiffusionLoss(config()).terms(model, batch)
    short = {name: value[:1, :4] for name, value in batch.items()}
    long = {name: value[1:] for name, value in batch.items()}
    apart = (float(loss(model, short)) * 4 + float(loss(model, long)) * 12) / 16
    assert float(both.loss.detach()) == pytest.approx(apart, rel=1e-6)


def test_noisy_batches_go_on_where_they_were():
    def source():
        stream = torch.arange(200) % 256
        g = torch.Generator().manual_seed(1)
        return NoisyBatches(
            Batches(stream, batch=2, length=8, generator=g),
            config(),
            generator=torch.Generator().manual_seed(2),
        )

    one, two = source(), source()
    next(one)
    two.load_state_dict(copy.deepcopy(one.state_dict()))
    first, second = next(one), next(two)
    assert all(torch.equal(first[name], second[name]) for name in first) and set(first) == set(second)


def test_training_learns_to_repeat_and_generation_does():
    """The whole way through: `core.train`, then decoding in fewer passes than tokens."""
    cfg = config(4, steps=4, threshold=0.8)
    with seeded(0):
        one = build("tiny:llama-10k")
    declare(one, cfg)
    stream = torch.tensor([7, 3, 9, 1]).repeat_interleave(40).repeat(2)
    batches = NoisyBatches(
        Batches(stream, batch=8, length=12, generator=torch.Generator().manual_seed(0)),
        cfg,
        generator=torch.Generator().manual_seed(1),
    )
    prompts = torch.tensor([7, 3, 9, 1])[:, None].expand(-1, 9)
    before, _ = generate(one, prompts, cfg, max_new_tokens=12)
    optimizer = torch.optim.AdamW(one.parameters(), lr=1e-2)
    settings = TrainConfig(steps=60, schedule="constant")
    done = train(one, batches, optimizer, settings, loss_fn=DiffusionLoss(cfg))
    assert done.tokens == 60 * 8 * 12 and sum(done.losses[-20:]) < 0.4 * sum(done.losses[:20])
    after, stats = generate(one, prompts, cfg, max_new_tokens=12)
    assert torch.equal(after, prompts[:, :1].expand(-1, 21)) and not torch.equal(before, after)
    assert sum(stats.steps) < 12


def test_trainer_of_transformers(tmp_path):
    pytest.importorskip("accelerate")
    from transformers import TrainingArguments

    from gnomon.methods.layers.block_diffusion import BlockDiffusionTrainer

    with seeded(0):
        one = build("tiny:llama-10k")
    items = [{"input_ids": [7, 3, 9, 1] * 4} for _ in range(16)]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        max_steps=6,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        learning_rate=1e-2,
        report_to=[],
        save_strategy="no",
        logging_steps=1,
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = BlockDiffusionTrainer(
        one, arguments, cfg=config(), pad_token_id=257, train_dataset=items, eval_dataset=items
    )
    before = trainer.evaluate()["eval_loss"]
    trainer.train()
    logged = [row["loss"] for row in trainer.state.log_history if "loss" in row]
    assert len(logged) == 6 and 3 < logged[0] < 8  # nats of 258 tokens, not twice as many: ln 258 = 5.6
    assert trainer.evaluate()["eval_loss"] < before
    assert declared(one) == {"block_size": 4, "mask_token_id": MASK, "token_shift": False}
    with pytest.raises(UsageError, match="Give pad_token_id"):
        BlockDiffusionTrainer(one, arguments, cfg=config())


def test_upstream_surface():
    """What is relied on: masks of four dimensions and positions are handed on, and the cache's `update` is called."""
    assert hasattr(modeling_llama, "eager_attention_forward")
