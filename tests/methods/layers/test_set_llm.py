"""Sources of truth: the card's examples, an attention written out in loops, all orders of small sets in float64.

Negative tests: the rungs below Set-LLM must show the order, and prefix + SetPE must fall into the exchange trap.
"""

import copy
import itertools
import math

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from gnomon.core.errors import NumericalFailure, UsageError
from gnomon.core.models import load
from gnomon.core.scoring import token_nll
from gnomon.methods.layers.set_llm import (
    MODES,
    OrderQuestion,
    Set,
    SetCollator,
    SetLLM,
    SetPrompt,
    additive,
    apply_chat_template,
    encode,
    order_sensitivity,
    orders_of,
    parse_set_markup,
    rung,
    set_attention_mask,
    set_positions,
)

OPTIONS = (" a rose", " the sea", " it", " green grass")
PROMPT = SetPrompt(["Which is red? ", Set(OPTIONS), " Answer:"])
INVARIANT = [name for name, one in MODES.items() if one.invariant]


@pytest.fixture(scope="module")
def tiny():
    loaded = load("tiny:llama-10k")
    g = torch.Generator().manual_seed(0)
    for p in loaded.model.parameters():  # larger weights, so that orders show where they can
        p.data += 0.3 * torch.randn(p.shape, generator=g)
    return loaded.model.double(), loaded.tokenizer


def ids_of(lengths):
    sets = [i for i, part in enumerate(lengths) for n in part for _ in range(n)]
    elements = [j for part in lengths for j, n in enumerate(part) for _ in range(n)]
    return torch.tensor(sets), torch.tensor(elements)


# ------------------------------------------------------------------------------- positions and masks


def test_example_a():
    positions, following = set_positions([[3], [2, 3], [1]])
    assert positions.tolist() == [0, 1, 2, 3, 4, 3, 4, 5, 8] and following == 9
    seen = set_attention_mask(*ids_of([[3], [2, 3], [1]]))[0, 0]
    assert int(seen.sum()) == 69 and torch.equal(seen, seen.T)
    assert not seen[3:5, 5:8].any() and seen[3:5, :5].all() and seen[3:5, 8].all()
    positions, following = set_positions([[6], [2, 1, 1, 2], [2]])
    assert positions.tolist() == [0, 1, 2, 3, 4, 5, 6, 7, 6, 6, 6, 7, 12, 13] and following == 14


@pytest.mark.parametrize("lengths", [[[2], [1, 1, 4], [3], [2, 2]], [[5]], [[1, 2]]])
def test_a_mask_loses_the_pairs_of_different_elements(lengths):
    seen = set_attention_mask(*ids_of(lengths), n_response=2)[0, 0]
    n = sum(map(sum, lengths))
    lost = sum(sum(part) ** 2 - sum(length**2 for length in part) for part in lengths)
    assert int(seen[:n, :n].sum()) == n * n - lost
    assert not seen[:n, n:].any() and seen[n:, :n].all()
    assert seen[n:, n:].tolist() == [[True, False], [True, True]]


def test_text_after_a_set_stands_where_it_would_without():
    ends = {
        tuple(set_positions([[2], split, [3]])[0][-3:].tolist()) for split in ([6], [1, 5], [3, 3], [2, 2, 2])
    }
    assert ends == {(8, 9, 10)}


def test_other_masks():
    sets, elements = ids_of([[2], [1, 2]])
    assert set_attention_mask(sets, elements, mask="prefix").all()
    causal = set_attention_mask(sets, elements, n_response=2, mask="causal")[0, 0]
    assert torch.equal(causal, torch.ones(7, 7, dtype=torch.bool).tril())


def test_pads_see_themselves_and_nobody_sees_them():
    sets, elements = (torch.stack([ids, ids]) for ids in ids_of([[1], [1, 1]]))
    real = torch.tensor([[True] * 4, [False, True, True, False]])
    seen = set_attention_mask(sets, elements, 1, real)
    assert seen.shape == (2, 1, 4, 4) and seen.any(-1).all()
    assert torch.equal(seen[1, 0, 0], torch.tensor([True, False, False, False]))
    assert not seen[1, 0, 1:3, 0].any() and not seen[1, 0, :3, 3].any()


def rope(x, positions):
    out = torch.empty_like(x)
    for i, angle in enumerate(positions):
        c, s = math.cos(angle), math.sin(angle)
        out[i] = torch.stack([c * x[i, 0] - s * x[i, 1], s * x[i, 0] + c * x[i, 1]])
    return out


def attention(x, positions, seen):
    """One head, Q = K = RoPE(X), V = X, by loops."""
    rotated = rope(x, positions)
    out = torch.zeros_like(x)
    for i in range(len(x)):
        weights = [
            math.exp(float(rotated[i] @ rotated[j]) / math.sqrt(2)) * bool(seen[i, j]) for j in range(len(x))
        ]
        for j, weight in enumerate(weights):
            out[i] += weight / sum(weights) * x[j]
    return out


def test_example_b():
    a, b, c, d, e = (
        torch.tensor(v, dtype=torch.float64) for v in ((1, 0), (0, 1), (1, 1), (-1, 1), (0.5, -0.5))
    )
    outs = {}
    for name, rows, lengths in (("bc d", [a, b, c, d, e], [2, 1]), ("d bc", [a, d, b, c, e], [1, 2])):
        positions, _ = set_positions([[1], lengths, [1]])
        seen = set_attention_mask(*ids_of([[1], lengths, [1]]))[0, 0]
        outs[name] = attention(torch.stack(rows), positions.tolist(), seen)
        plain = attention(torch.stack(rows), range(5), torch.ones(5, 5))
        outs[f"{name}, plain"] = plain
    for name in ("bc d", "d bc"):
        torch.testing.assert_close(
            outs[name][-1], torch.tensor([0.162346, 0.631202]).double(), atol=1e-6, rtol=0
        )
        torch.testing.assert_close(
            outs[name][0], torch.tensor([0.593426, 0.256885]).double(), atol=1e-6, rtol=0
        )
    for name, expected in (("bc d, plain", (0.415713, 0.550812)), ("d bc, plain", (0.150029, 0.632044))):
        torch.testing.assert_close(outs[name][-1], torch.tensor(expected).double(), atol=1e-6, rtol=0)


# --------------------------------------------------------------------------------------------- models


def scores(model, tokenizer, mode, order, **more):
    return SetLLM(model, tokenizer, mode=mode, **more).score(PROMPT.reordered([order]), OPTIONS)


@pytest.mark.parametrize("mode", MODES)
def test_only_some_rungs_are_blind_to_order(tiny, mode):
    """Theorem 1 over all orders; the same test must fail where nothing promises it."""
    found = torch.stack([scores(*tiny, mode, order) for order in itertools.permutations(range(4))])
    spread = float((found - found[0]).abs().max())
    assert (spread < 1e-10) == (mode in INVARIANT), spread
    assert mode in INVARIANT or spread > 1e-3
    assert float(found[0].std()) > 1e-3  # options differ at all


def test_float32_keeps_log_probabilities_within_a_thousandth(tiny):
    model = tiny[0]
    loaded = AutoModelForCausalLM.from_config(copy.deepcopy(model.config), dtype=torch.float32)
    loaded.load_state_dict(model.float().state_dict())
    model.double()
    for attn in ("sdpa", "eager"):
        loaded.set_attn_implementation(attn)
        found = torch.stack(
            [scores(loaded, tiny[1], "setmask+setpe", o) for o in itertools.permutations(range(4))]
        )
        assert float((found - found[0]).abs().max()) < 1e-3


def test_a_boolean_mask_would_mask_nothing_in_eager_attention(tiny):
    """The trap: eager attention adds 0 and 1. `additive` is what it must be given."""
    model, tokenizer = tiny
    of = encode(PROMPT, tokenizer)
    seen = set_attention_mask(of.set_id, of.elem_id)
    given = {"input_ids": of.input_ids[None], "position_ids": of.position_ids[None]}
    with torch.no_grad():
        expected = model(**given, attention_mask=seen).logits
        model.set_attn_implementation("eager")
        right = model(**given, attention_mask=additive(seen, torch.float64)).logits
        wrong = model(**given, attention_mask=seen).logits
        model.set_attn_implementation("sdpa")
    torch.testing.assert_close(right, expected, atol=1e-4, rtol=1e-3)  # its softmax is in float32
    assert float((wrong - expected).abs().max()) > 1e-3


@pytest.mark.parametrize("canonical", [False, True])
def test_canonical_order_is_blind_bit_for_bit_in_any_mode(tiny, canonical):
    model = tiny[0].bfloat16()
    found = [
        scores(model, tiny[1], "causal+pe", o, canonical=canonical) for o in itertools.permutations(range(4))
    ]
    tiny[0].double()
    assert all(torch.equal(one, found[0]) for one in found) == canonical


def states(model, of):
    with torch.no_grad():
        return model.model(
            input_ids=of.input_ids[None],
            position_ids=of.position_ids[None],
            attention_mask=set_attention_mask(of.set_id, of.elem_id),
        ).last_hidden_state[0]


def test_hidden_states_move_with_their_element(tiny):
    model, tokenizer = tiny
    order = (2, 0, 3, 1)
    one, two = encode(PROMPT, tokenizer), encode(PROMPT.reordered([order]), tokenizer)
    before, after = states(model, one), states(model, two)
    for new, old in enumerate(order):
        theirs = before[(one.set_id == 1) & (one.elem_id == old)]
        torch.testing.assert_close(after[(two.set_id == 1) & (two.elem_id == new)], theirs)
    torch.testing.assert_close(after[two.set_id != 1], before[one.set_id != 1])


def test_without_sets_it_is_a_prefix_mask_and_a_set_of_one_is_text(tiny):
    """Theorem 2."""
    model, tokenizer = tiny
    text, single = SetPrompt(["one two three"]), SetPrompt(["one", Set([" two"]), " three"])
    for mode in ("prefix+pe", "setmask+setpe"):
        expected = SetLLM(model, tokenizer, mode="prefix+pe").score(text, OPTIONS)
        torch.testing.assert_close(SetLLM(model, tokenizer, mode=mode).score(text, OPTIONS), expected)
    pieces = SetLLM(model, tokenizer).score(single, OPTIONS)
    torch.testing.assert_close(
        pieces, SetLLM(model, tokenizer).score(SetPrompt(["one", " two", " three"]), OPTIONS)
    )


def test_the_causal_rung_is_the_ordinary_model(tiny):
    model, tokenizer = tiny
    text = PROMPT.text() + OPTIONS[0]
    whole = torch.tensor([tokenizer(text, add_special_tokens=False).input_ids])
    tail = len(tokenizer(OPTIONS[0], add_special_tokens=False).input_ids)
    expected = -token_nll(model, whole)[0, -tail:].sum()
    found = SetLLM(model, tokenizer, mode="causal+pe", bos=False).score(PROMPT, OPTIONS[:1])[0]
    torch.testing.assert_close(found, expected.detach())


@pytest.mark.parametrize("mode", MODES)
def test_cached_scores_are_those_of_one_pass(tiny, mode):
    model, tokenizer = tiny
    reader = SetLLM(model, tokenizer, mode=mode)
    of = reader.encode(PROMPT)
    for text, found in zip(OPTIONS, reader.score(PROMPT, OPTIONS), strict=True):
        row = tokenizer(text, add_special_tokens=False).input_ids
        n, r = len(of), len(row)
        after = (
            torch.arange(r) + of.next_position if rung(mode).positions != "none" else torch.zeros(r).long()
        )
        with torch.no_grad():
            logits = model(
                input_ids=torch.cat([of.input_ids, torch.tensor(row)])[None],
                position_ids=torch.cat([of.position_ids, after])[None],
                attention_mask=set_attention_mask(of.set_id, of.elem_id, r, mask=rung(mode).mask),
            ).logits[0]
        steps = logits.log_softmax(-1)[n - 1 : n + r - 1]
        torch.testing.assert_close(found, steps.gather(-1, torch.tensor(row)[:, None]).sum())


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_prompts_of_a_batch_change_nothing(tiny, attn):
    model, tokenizer = tiny
    model.set_attn_implementation(attn)
    prompts = [PROMPT, SetPrompt(["Shorter:", Set([" a", " b"]), "?"]), PROMPT.reordered([(3, 2, 1, 0)])]
    for mode in MODES:
        reader = SetLLM(model, tokenizer, mode=mode)
        alone = torch.stack([reader.score(p, OPTIONS) for p in prompts])
        torch.testing.assert_close(reader.score_many(prompts, OPTIONS), alone, atol=1e-5, rtol=1e-5)
    model.set_attn_implementation("sdpa")


def test_two_sets_keep_their_own_elements(tiny):
    reader = SetLLM(*tiny)
    prompt = SetPrompt(["A:", Set([" x", " yy"]), " B:", Set([" z", " ww"]), " End:"])
    base = reader.score(prompt, OPTIONS)
    for orders in itertools.product([(0, 1), (1, 0)], repeat=2):
        torch.testing.assert_close(reader.score(prompt.reordered(orders), OPTIONS), base)
    exchanged = SetPrompt(["A:", Set([" z", " yy"]), " B:", Set([" x", " ww"]), " End:"])
    assert float((reader.score(exchanged, OPTIONS) - base).abs().max()) > 1e-3


def test_the_exchange_trap_separates_the_mask_from_positions_alone(tiny):
    """Tokens exchanged between elements at equal positions: a full mask can't tell, SetMask can."""
    one = SetPrompt(["Q:", Set([" Paris is great", " Berne is awful"]), " A:"])
    two = SetPrompt(["Q:", Set([" Paris is awful", " Berne is great"]), " A:"])
    gap = {
        mode: float(
            (SetLLM(*tiny, mode=mode).score(one, OPTIONS) - SetLLM(*tiny, mode=mode).score(two, OPTIONS))
            .abs()
            .max()
        )
        for mode in ("prefix+setpe", "setmask+setpe")
    }
    assert gap["prefix+setpe"] < 1e-10 and gap["setmask+setpe"] > 1e-3


# ------------------------------------------------------------------------------------------ generation


@pytest.mark.parametrize("mode", MODES)
def test_generation_goes_on_from_the_set(tiny, mode):
    """Greedy tokens by full passes, without cache."""
    model, tokenizer = tiny
    reader = SetLLM(model, tokenizer, mode=mode)
    of = reader.encode(PROMPT)
    ids, new = of.input_ids, []
    for r in range(5):
        after = (
            torch.arange(r) + of.next_position if rung(mode).positions != "none" else torch.zeros(r).long()
        )
        with torch.no_grad():
            logits = model(
                input_ids=ids[None],
                position_ids=torch.cat([of.position_ids, after])[None],
                attention_mask=set_attention_mask(of.set_id, of.elem_id, r, mask=rung(mode).mask),
            ).logits[0, -1]
        new.append(int(logits.argmax()))
        ids = torch.cat([ids, torch.tensor(new[-1:])])
    told = reader.generate(PROMPT, max_new_tokens=5, do_sample=False, eos_token_id=None, pad_token_id=0)
    assert told == tokenizer.decode(new, skip_special_tokens=True)


def test_generation_by_beams_and_samples_is_blind_to_order(tiny):
    reader = SetLLM(*tiny)
    for options in ({"num_beams": 3}, {"do_sample": True, "temperature": 0.7}):
        found = set()
        for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
            torch.manual_seed(0)
            given = {"max_new_tokens": 6, "pad_token_id": 0, "do_sample": False, **options}
            found.add(reader.generate(PROMPT.reordered([order]), **given))
        assert len(found) == 1
    assert not tiny[0]._forward_pre_hooks


# ---------------------------------------------------------------------------------------------- batches


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_a_batch_has_the_losses_of_its_items(tiny, mode, attn):
    model, tokenizer = tiny
    model.set_attn_implementation(attn)
    prompts = [PROMPT, SetPrompt(["A much longer question than the other one:", Set([" b", " c"]), "?"])]
    items = [{"prompt": p, "response": t} for p, t in zip(prompts, (" a rose", " b"), strict=True)]
    collate = SetCollator(tokenizer, model=model, mode=mode, eos=False, dtype=torch.float64)
    batch = collate(items)
    with torch.no_grad():
        logits = model(**{k: v for k, v in batch.items() if k != "labels"}).logits.log_softmax(-1)
    reader = SetLLM(model, tokenizer, mode=mode)
    for i, item in enumerate(items):
        labels = batch["labels"][i]
        at = (labels != -100).nonzero()[:, 0]
        found = logits[i, at - 1].gather(-1, labels[at, None]).sum()
        torch.testing.assert_close(found, reader.score(item["prompt"], [item["response"]])[0])
    model.set_attn_implementation("sdpa")


def test_markup_items_and_eos(tiny):
    _, tokenizer = tiny
    batch = SetCollator(tokenizer)([{"prompt": "Q<set><el> a</el><el> b</el></set> A:", "response": " b"}])
    assert batch["labels"][0, -1] == tokenizer.eos_token_id
    assert batch["attention_mask"].dtype == torch.bool


# ---------------------------------------------------------------------------------------------- prompts


def test_markup():
    prompt = parse_set_markup("Pick:<set><el> a</el> \n<el> b<c></el></set> then<set><el>x</el></set>.")
    assert prompt == SetPrompt(["Pick:", Set([" a", " b<c>"]), " then", Set(["x"]), "."])


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("<set></set>", "without elements"),
        ("<set><el></el></set>", "empty element"),
        ("<set><el>a<set><el>b</el></set></el></set>", "sets in sets"),
        ("<set><set></set></set>", "sets in sets"),
        ("<set>a<el>b</el></set>", "in no element"),
        ("<el>a</el>", "outside of a set"),
        ("a</set>", "outside of a set"),
        ("<set><el>a</el>", "<set> isn't closed"),
        ("<set><el>a", "<el> isn't closed"),
        ("", "nothing to go on from"),
    ],
)
def test_markup_refusals(text, words):
    with pytest.raises(UsageError, match=words):
        parse_set_markup(text)


class Template:
    def apply_chat_template(self, messages, tokenize, add_generation_prompt):
        text = "".join(f"<|{m['role']}|>{m['content']}<|end|>" for m in messages)
        return text + ("<|assistant|>" if add_generation_prompt else "")


def test_chat_templates_come_around_the_parts():
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": SetPrompt(["Pick:", Set([" a", " b"]), "?"])},
    ]
    assert apply_chat_template(messages, Template()).parts == (
        "<|system|>Be brief.<|end|><|user|>Pick:",
        Set([" a", " b"]),
        "?<|end|><|assistant|>",
    )

    class Twice(Template):
        def apply_chat_template(self, messages, **options):
            return messages[-1]["content"] * 2

    with pytest.raises(UsageError, match="once as it is"):
        apply_chat_template(messages, Twice())


def test_elements_are_tokenized_by_themselves(tiny):
    _, tokenizer = tiny
    of = encode(SetPrompt(["x", Set([" ab", " c"]), "y"]), tokenizer, bos=False)
    rows = [tokenizer(t, add_special_tokens=False).input_ids for t in ("x", " ab", " c", "y")]
    assert of.input_ids.tolist() == [token for row in rows for token in row]
    assert of.next_position == len(of)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: Set([]), "without elements"),
        (lambda: Set(["a", ""]), "empty element"),
        (lambda: Set("ab"), "list of texts"),
        (lambda: Set([Set(["a"])]), "not sets again"),
        (lambda: SetPrompt([""]), "nothing to go on"),
        (lambda: SetPrompt([1]), "parts of a prompt"),
        (lambda: Set(["a", "b"]).reordered([0, 0]), "no permutation"),
        (lambda: PROMPT.reordered([]), "0 orders"),
        (lambda: set_positions([[2], []]), "can't be empty"),
        (lambda: set_attention_mask(torch.zeros(3).int(), torch.zeros(2).int()), "must both be"),
        (
            lambda: set_attention_mask(torch.zeros(3).int(), torch.zeros(3).int(), 1, torch.ones(3).bool()),
            "pad_mask",
        ),
        (lambda: set_attention_mask(torch.zeros(3).int(), torch.zeros(3).int(), mask="full"), "mask"),
        (lambda: rung("causal"), "mode"),
    ],
)
def test_refusals(make, words):
    with pytest.raises((UsageError, TypeError), match=words):
        make()


def test_refusals_of_readers(tiny):
    model, tokenizer = tiny
    with pytest.raises(UsageError, match="ends in a set"):
        SetLLM(model, tokenizer).score(SetPrompt(["Pick", Set([" a", " b"])]), OPTIONS)
    with pytest.raises(UsageError, match="ends in a set"):
        SetCollator(tokenizer)([{"prompt": SetPrompt(["Pick", Set([" a", " b"])]), "response": "a"}])
    with pytest.raises(UsageError, match="no tokens"):
        SetLLM(model, tokenizer).score(PROMPT, [""])
    with pytest.raises(UsageError, match="no continuation"):
        SetLLM(model, tokenizer).score(PROMPT, [])
    with pytest.raises(UsageError, match="positions"):
        SetLLM(model, tokenizer).score(SetPrompt(["a" * 100_000]), OPTIONS)
    with pytest.raises(UsageError, match="depends on the order"):
        SetLLM(model, tokenizer, mode="prefix+pe", guarantee=True)
    with pytest.raises(UsageError, match="rounding"):
        SetLLM(model.bfloat16(), tokenizer, guarantee=True)
    model.double()
    SetLLM(model, tokenizer, guarantee=True)
    with pytest.raises(UsageError, match="one pass"):
        SetLLM(model, tokenizer).generate(PROMPT, attention_mask=torch.ones(1, 3))
    with pytest.raises(UsageError, match="max_length=3"):
        SetCollator(tokenizer, max_length=3)([{"prompt": PROMPT, "response": "a"}])
    with pytest.raises(UsageError, match="response=''"):
        SetCollator(tokenizer)([{"prompt": PROMPT, "response": ""}])


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("gpt2", {"n_embd": 8, "n_layer": 1, "n_head": 2, "vocab_size": 50}, "no rotary"),
        ("mistral", {"sliding_window": 8}, "window of 8"),
        ("gemma2", {"head_dim": 4}, "sliding_attention"),
        ("bloom", {"n_embed": 8, "n_layer": 1, "n_head": 2, "vocab_size": 50}, "ALiBi|no rotary"),
    ],
)
def test_models_that_look_at_places_are_refused(tiny, kind, settings, words):
    small = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "vocab_size": 50}  # fmt: skip
    config = AutoConfig.for_model(kind, **(settings if "n_layer" in settings else small | settings))
    with pytest.raises(UsageError, match=words):
        SetLLM(AutoModelForCausalLM.from_config(config), tiny[1])


@pytest.mark.parametrize("kind", ["qwen2", "qwen3", "olmo2", "phi3", "gemma", "mistral"])
def test_other_families_are_blind_to_order_too(tiny, kind):
    config = AutoConfig.for_model(
        kind, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, vocab_size=300, pad_token_id=0, bos_token_id=None, eos_token_id=None,
        **({"sliding_window": None} if kind in ("mistral", "phi3") else {}),
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).double().eval()
    for p in model.parameters():
        p.data += 0.2 * torch.randn_like(p)
    for mode, blind in (("setmask+setpe", True), ("causal+pe", False)):
        found = torch.stack([scores(model, tiny[1], mode, order) for order in ((0, 1, 2, 3), (3, 2, 0, 1))])
        assert (float((found[0] - found[1]).abs().max()) < 1e-10) == blind


# ------------------------------------------------------------------------------------------ sensitivity


def test_example_c():
    right = [[1, 1], [1, 0], [0, 0]]
    questions = [OrderQuestion(str(i), ("a", "b"), 0) for i in range(3)]

    def scorer(question, orders):
        hits = [right[int(question.before)][order[0]] for order in orders]
        return [(1.0, 0.0) if hit else (0.0, 1.0) for hit in hits]

    found = order_sensitivity(scorer, questions)
    assert found.random_acc == 0.5 and found.adversarial_acc == pytest.approx(1 / 3)
    assert found.flip_prob == pytest.approx(0.5 / 3) and found.orders == 2


def test_one_that_takes_the_first_option_shows_it():
    questions = [OrderQuestion("q", tuple("abc"), 1)]
    found = order_sensitivity(
        lambda q, orders: [[-o.index(i) for i in range(3)] for o in orders], questions, seed=3
    )
    assert (found.first_place, found.adversarial_acc) == (3.0, 0.0)
    assert found.random_acc == pytest.approx(1 / 3) and found.flip_prob == pytest.approx(2 / 3)


def test_orders():
    assert orders_of(3, "all", None) == list(itertools.permutations(range(3)))
    assert orders_of(5, 24, None) == list(itertools.islice(itertools.permutations(range(5)), 24))
    drawn = orders_of(5, 24, 7)
    assert len(set(drawn)) == 24 and drawn == orders_of(5, 24, 7) != orders_of(5, 24, 8)
    assert len(orders_of(2, 24, 0)) == 2
    for bad in ((9, "all"), (3, 0), (3, "some")):
        with pytest.raises(UsageError):
            orders_of(*bad, None)


def test_refusals_of_questions():
    with pytest.raises(UsageError, match="two options"):
        OrderQuestion("q", ("a",), 0)
    with pytest.raises(UsageError, match="same text"):
        OrderQuestion("q", ("a", "a"), 0)
    with pytest.raises(UsageError, match="no question"):
        order_sensitivity(lambda q, o: [], [])
    with pytest.raises(NumericalFailure, match="one number each"):
        order_sensitivity(lambda q, o: [[math.nan, 1.0]] * len(o), [OrderQuestion("q", ("a", "b"), 0)])
    with pytest.raises(NumericalFailure, match="0 rows"):
        order_sensitivity(lambda q, o: [], [OrderQuestion("q", ("a", "b"), 0)])


def test_set_llm_never_flips(tiny):
    questions = [OrderQuestion("Which?", OPTIONS, 2), OrderQuestion("And which?", OPTIONS[:3], 0)]
    found = order_sensitivity(SetLLM(*tiny).ask, questions, permutations=6)
    assert found.flip_prob == 0 and found.random_acc == found.adversarial_acc == found.majority_acc
    assert max(row["spread"] for row in found.per_question) < 1e-10
    assert order_sensitivity(SetLLM(*tiny, mode="causal+pe").ask, questions).per_question[0]["spread"] > 1e-3
