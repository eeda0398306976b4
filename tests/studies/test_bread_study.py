"""The BREAD study. Truth: the card's worked numbers, losses by hand, bytes as measured, and an uncut training run."""

import json
from pathlib import Path

import jsonschema
import pytest
import torch
from killing import TINY, killed_and_uncut

import gnomon
from gnomon.core.arithmetic import collate, encode, items
from gnomon.core.errors import GnomonError, UsageError
from gnomon.core.layers import linears
from gnomon.core.models import load
from gnomon.core.seeding import seeded
from gnomon.core.tiny import byte_tokenizer
from gnomon.core.train import next_token_loss
from gnomon.lab import StageContext, load_rival
from gnomon.lab.stage import Done
from gnomon.methods.optim.bread import state_bytes
from gnomon.studies.bread import HERE, REAL, BREADStudy
from gnomon.studies.bread_entrants import COMPETITORS, galore_rank, lora_rank, maker
from gnomon.studies.bread_stages import constructed, formula, gap, idle, one_pass, optimizer_of, whole
from gnomon.studies.finetuning import answer_batches, answer_loss, finetune, fitting, problems, read_items

FIGURES = {"learning", "bytes_and_loss", "idle_work", "memory"}
FINETUNE = {
    "seed": 3,
    "lr": 0.01,
    "model": "tiny:llama-10k",
    "base": "drawn",
    "items": "arithmetic",
    "kinds": ("sum",),
    "learnt": 16,
    "held_out": 4,
    "split": "valid",
    "answers": 0,
    "steps": TINY["steps"],
    "batch": 2,
    "longest": 200,
    "schedule": "cosine",
    "warmup": 0.1,
    "points": 5,
    "keep": True,
}
OPTIONS = BREADStudy.resolve("smoke")._options(HERE, {"lora": 3, "galore": 4})


def tuned(folder, make, **settings):
    """Value, records and weights of `finetune`, as `killing.trained` has those of `pretrain`."""
    folder.mkdir(exist_ok=True)
    arguments = {**FINETUNE, **settings}
    with seeded(arguments["seed"]):
        context = StageContext(folder, seed=arguments["seed"])
        value = finetune(context, method="m", make=make, **arguments)
    return value, context.snapshot(), load(str(folder / "model"), dtype="float32").model.state_dict()


def entered(name, **changes):
    """A fresh model and the competitor of that name on it."""
    with seeded(0):
        model = load("tiny:llama-10k", dtype="float32").model
        made = load_rival(maker(name))(
            model, lr=0.01, weight_decay=0.0, total_steps=4, **{**OPTIONS[name], **changes}
        )
    return model, made


def take_steps(model, optimizer, count=1):
    ids = torch.arange(24).view(1, 24)
    for _ in range(count):
        next_token_loss(model, ids).backward()
        optimizer.step()
        optimizer.zero_grad()


def recorded(folder, stage, **arguments):
    context = StageContext(folder, seed=0)
    stage(context, **arguments)
    return context.snapshot()


# --------------------------------------------------------------------------------------------------- runs


def test_smoke_run_has_every_claim_figure_and_competitor(tmp_path):
    result = gnomon.run("bread", profile="smoke", runs=tmp_path)
    schema = json.loads((Path(gnomon.__file__).parent / "lab" / "result.schema.json").read_text())
    jsonschema.validate(result.data, schema)
    assert {figure["name"] for figure in result.data["figures"]} == FIGURES
    assert set(result.verdicts) == {f"bread.{i}" for i in range(1, 5)}
    assert not [stage for stage in result.data["stages"] if stage["failed"]]
    table = result.frame()
    final = table[table["metric"] == "loss"].set_index("method")
    assert set(final.index) == set(COMPETITORS)
    assert final["value"].nunique() == len(final)  # no two competitors are the same computation
    assert final["budget.tokens"].nunique() == 1 and set(final["budget.trials"]) == {2}
    parts = {(c["id"], p["part"]): p["verdict"] for c in result.data["claims"] for p in c["parts"]}
    exact = [("bread.1", "a"), ("bread.1", "b"), ("bread.4", "formula"), ("bread.4", "bytes")]
    assert {parts[key] for key in exact} == {"holds"}  # at any size
    assert parts["bread.2", "trained"] == parts["bread.3", "trained"] == "undecided"  # one seed
    held = table[table["metric"] == "peak state bytes"].set_index("method")["value"]
    assert held["badam"] < held["bread-lora"] <= min(held["lora"], held["galore"]) < held["adamw"]
    assert held["lomo"] == 0 and held["bread-sgd"] == held["badam"]


def test_a_pretrained_model_is_tuned_on_a_file_in_bfloat16_with_checkpointing(tmp_path):
    lines = [{"instruction": item.question, "output": item.worked} for item in items(60, kinds=("sum",))]
    file = tmp_path / "items.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    settings = {
        "competitors": "bread-lora,badam,lora,galore,adamw",
        "real_model": "tiny:llama-10k",
        "real_items": str(file),
        "real_train_items": 8,
        "real_test_items": 2,
        "real_rates": "0.01",
        "real_steps": 3,
        "real_rank": 2,
        "rates": "0.01",
        "steps": 2,
        "answers": 0,
        "real_dtype": "bfloat16",
        "real_checkpointing": "true",
    }
    result = gnomon.run("bread", profile="smoke", overrides=settings, runs=tmp_path)
    assert not [stage for stage in result.data["stages"] if stage["failed"]]
    table = result.frame()
    final = table[(table["metric"] == "loss") & (table["base"] == REAL)]
    assert sorted(final["method"]) == sorted(["bread-lora", "badam", "lora", "galore", "adamw"])
    notes = {(c["id"], p["part"]): p["note"] for c in result.data["claims"] for p in c["parts"]}
    assert "at least 3 are needed" in notes["bread.2", "real"]  # measured, with too few seeds


@pytest.mark.parametrize("name", ["bread-lora", "bread-sgd", "lisa"])
def test_training_that_was_killed_inside_a_block_goes_on_as_if_uncut(tmp_path, name):
    options = {**OPTIONS[name], "switch_every": 3}  # the checkpoint after step 4 lies inside the second turn
    killed_and_uncut(tmp_path, maker(name), after=6, train=tuned, options=options)


def test_what_is_kept_is_a_plain_model(tmp_path):
    _, curve, weights = tuned(tmp_path, maker("bread-lora"), options=OPTIONS["bread-lora"])
    assert not [name for name in weights if "bread" in name]
    losses = [r["value"] for r in curve if r["metric"] == "loss while training"]
    assert len(losses) == 5 and losses[-1] < losses[0]


# -------------------------------------------------------------------------------------------- competitors


@pytest.mark.parametrize("name", COMPETITORS)
def test_competitors_train_the_layers_and_lisa_the_rest_too(name):
    model, entrant = entered(name, **({"switch_every": 1} if "switch_every" in OPTIONS[name] else {}))
    with seeded(0):
        before = load("tiny:llama-10k", dtype="float32").model.state_dict()
    take_steps(model, entrant.optimizer, 6)
    after = entrant.finish(model).state_dict()
    assert set(after) <= set(before)  # merged, without hooks' leftovers
    moved = {key for key in after if not torch.equal(after[key], before[key])}
    assert any("layers" in key for key in moved)
    assert bool([key for key in moved if "layers" not in key]) == (name == "lisa")
    matrices = {key for key in after if key.endswith("proj.weight")}
    if name != "lisa":
        assert matrices <= moved  # three layers had two turns each


def test_ranks_are_the_smallest_that_take_as_many_bytes():
    model = load("tiny:llama-10k", dtype="float32").model
    for target in (12_000, 20_000):
        for name, rank in (("lora", lora_rank(model, target)), ("galore", galore_rank(model, target))):
            held = []
            for tried in (rank, rank - 1):
                network, entrant = entered(name, rank=tried)
                take_steps(network, entrant.optimizer)
                held.append(state_bytes(entrant.optimizer))
            assert held[1] - 400 < target <= held[0], (name, rank)  # counters of steps are 4 bytes each


def test_adamw_on_bfloat16_weights_has_float32_copies():
    with seeded(0):
        model = load("tiny:llama-10k", dtype="bfloat16").model
    wide = {name: p.detach().float().clone().requires_grad_() for name, p in model.named_parameters()}
    layers = {name: p for name, p in wide.items() if "layers" in name}
    reference = torch.optim.AdamW(layers.values(), lr=1e-3, weight_decay=0.0)
    entrant = load_rival(maker("adamw"))(model, lr=1e-3, weight_decay=0.0, total_steps=3)
    ids = torch.arange(24).view(1, 24)
    for _ in range(3):
        next_token_loss(model, ids).backward()
        for name, p in layers.items():
            p.grad = model.get_parameter(name).grad.float()
        entrant.optimizer.step()
        entrant.optimizer.zero_grad()
        reference.step()
    for name, p in model.named_parameters():
        assert torch.equal(p, wide[name].bfloat16()), name


# ------------------------------------------------------------------------------------------------- stages


def test_the_card_s_case_and_random_ones(tmp_path):
    found = recorded(tmp_path, constructed, draws=30, seed=1)
    frozen = [r["value"] for r in found if r["metric"] == "best loss with a frozen head"]
    expanded = [r["value"] for r in found if r["metric"] == "loss after a rank-1 expansion"]
    assert frozen[0] == pytest.approx(1.0, abs=1e-12) and len(frozen) == 31
    assert min(frozen) > 1e-3 and max(expanded) < 1e-20


def test_the_formula_by_hand(tmp_path):
    found = recorded(tmp_path, formula, ranks=8)
    total = {
        (r["method"], r["tags"]["size"]): r["value"] for r in found if r["metric"] == "GB before activations"
    }
    assert total["badam", "8B"] == pytest.approx(2 * 8.030261248 + 16 * 0.218112)
    assert total["badam", "70B"] == pytest.approx(2 * 70.553706496 + 16 * 0.8556544)
    assert total["bread-lora", "8B"] - total["badam", "8B"] == pytest.approx(16 * 0.020971520)
    assert total["adamw", "8B"] == pytest.approx(18 * 8.030261248)
    parts = [r["value"] for r in found if r["method"] == "badam" and r["tags"].get("kind")]
    assert sum(parts) == pytest.approx(total["badam", "8B"] + total["badam", "70B"])


def test_block_descent_wastes_what_lies_above_the_active_block(tmp_path):
    found = recorded(tmp_path, idle, model="tiny:llama-10k", length=8, rank=2, forms=("badam", "bread-sgd"))
    shares = {
        (r["method"], r["item"]): r["value"] for r in found if r["metric"] == "idle share of input gradients"
    }
    for i in range(3):  # of three equal layers
        assert shares["badam", str(i)] == pytest.approx((2 - i) / (3 - i))
        assert shares["bread-sgd", str(i)] == 0


def test_one_pass_moves_everything_for_bread_and_one_block_for_badam(tmp_path):
    found = recorded(
        tmp_path, one_pass, model="tiny:llama-10k", rank=2, seed=0, forms=("badam", "bread-lora", "bread-sgd")
    )
    passes = {r["value"] for r in found if r["metric"] == "backward passes a step"}
    moved = {
        r["method"]: r["value"] for r in found if r["metric"] == "inactive matrices that the pass updates"
    }
    assert passes == {1.0} and moved == {"badam": 0.0, "bread-lora": 1.0, "bread-sgd": 1.0}


def test_a_whole_matrix_is_what_merging_makes_of_it():
    with seeded(0):
        model = load("tiny:llama-10k", dtype="float32").model
    optimizer = optimizer_of(model, "bread-lora", rank=2, lr=0.1)
    take_steps(model, optimizer, 2)
    expected = {f"{name}.weight": whole(model, f"{name}.weight") for name in linears(model)}
    optimizer.close()
    for name, weight in expected.items():
        torch.testing.assert_close(model.get_parameter(name).detach(), weight)


def done(folder, loss, steps=2):
    return Done(folder, {"loss": loss, "tokens": 8, "seconds": 1.0}, {"steps": steps, "lr": 0.1})


def test_the_share_of_the_gap_by_hand(tmp_path):
    low, high, mine = done(tmp_path, 2.0), done(tmp_path, 1.0), done(tmp_path, 1.25)
    (record,) = recorded(tmp_path, gap, of=mine, low=low, high=high, method="m", base="b")
    assert record["value"] == 0.75
    (folder := tmp_path / "none").mkdir()
    assert recorded(folder, gap, of=mine, low=high, high=low, method="m", base="b") == []
    with pytest.raises(UsageError, match="different numbers of steps"):
        recorded(folder, gap, of=mine, low=low, high=done(tmp_path, 1.0, 3), method="m", base="b")


# -------------------------------------------------------------------------------------- items and losses


def test_the_loss_counts_every_answer_token_alike():
    with seeded(0):
        model = load("tiny:llama-10k", dtype="float32").model
    tokenizer = byte_tokenizer()
    some = items(20, kinds=("sum", "three-days"))
    total, count = 0.0, 0
    for item in some:  # one by one, without padding
        prompt, answer = encode(item, tokenizer)
        ids = torch.tensor([[*prompt, *answer]])
        with torch.no_grad():
            logs = model(ids).logits[0].log_softmax(-1)
        total -= sum(float(logs[len(prompt) + i - 1, token]) for i, token in enumerate(answer))
        count += len(answer)
    assert answer_loss(model, answer_batches(some, tokenizer)) == pytest.approx(total / count, rel=1e-5)
    pairs = [encode(item, tokenizer) for item in some]
    padded = collate(pairs, pad=tokenizer.pad_token_id)
    assert answer_loss(model, [padded]) == pytest.approx(total / count, rel=1e-5)


def test_items_come_from_files_and_parts_are_disjoint(tmp_path):
    rows = [{"instruction": f"What is {i}?", "output": f"It is {i}. The answer is {i}."} for i in range(60)]
    rows.append({"instruction": "Double it.", "input": "21", "output": "42"})
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows[:40])))
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows[40:])) + "\n\n")
    found = read_items(str(tmp_path))
    assert len(found) == 61 and found[3].answer == 3
    assert found[-1].question == "Double it.\n21" and found[-1].worked == "42"
    sets = [{item.key for item in problems(str(tmp_path), s, 100)} for s in ("train", "valid", "test")]
    assert sum(map(len, sets)) == len(set().union(*sets)) == 61
    assert problems(str(tmp_path), "train", 5) == problems(str(tmp_path), "train", 50)[:5]


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.jsonl", "{", "line 1, is no JSON"),
        (
            "a.jsonl",
            '{"instruction": "x", "output": "y"}\n{"question": "x"}',
            "line 2, needs an `instruction`",
        ),
        ("a.jsonl", '{"instruction": "x", "output": " "}', "aren't empty"),
        ("a.jsonl", "[1]", "line 1, needs"),
        ("a.json", "[]", "jq -c"),
    ],
)
def test_files_of_another_form_are_refused(tmp_path, name, text, message):
    (tmp_path / name).write_text(text)
    with pytest.raises(UsageError, match=message):
        read_items(str(tmp_path / name))


def test_missing_items_are_refused(tmp_path):
    with pytest.raises(UsageError, match="no file or folder"):
        read_items(str(tmp_path / "none.jsonl"))
    with pytest.raises(UsageError, match="Did you mean 'arithmetic'"):
        read_items("arithmetics")
    with pytest.raises(UsageError, match="holds none"):
        read_items(str(tmp_path))
    (tmp_path / "one.jsonl").write_text('{"instruction": "x", "output": "y"}')
    with pytest.raises(UsageError, match="no item in its"):
        for split in ("train", "valid", "test"):
            problems(str(tmp_path / "one.jsonl"), split, 1)
    with pytest.raises(UsageError, match="longest=10"):
        fitting(items(3), byte_tokenizer(), 10)


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"competitors": "bread-lora,badam"}, "must hold lora, galore, adamw"),
        ({"real_competitors": "bread-lora,badam,lora,galor,adamw"}, "Did you mean 'galore'"),
        ({"rates": "-1"}, "positive learning rates"),
        ({"switch_every": "0"}, "switch_every must be at least 1"),
        ({"counted": "9B"}, "8B"),
        ({"sgd_scale": "0"}, "positive factors"),
        ({"answers": "-1"}, "can't be negative"),
        ({"warmup": "1"}, "share of the run"),
    ],
)
def test_settings_that_make_no_sense_are_refused(setting, message):
    with pytest.raises(UsageError, match=message):
        BREADStudy.resolve("cpu", setting)


def test_what_is_missing_is_refused_before_any_work(tmp_path, monkeypatch):
    monkeypatch.setenv("GNOMON_CACHE", str(tmp_path))
    with pytest.raises(GnomonError, match="gnomon fetch smollm2-135m"):
        BREADStudy.resolve("full").check()
    smoke = {"real_model": "tiny:llama-10k", "real_items": "./mathinstruct.jsonl"}
    with pytest.raises(UsageError, match="no file or folder"):
        BREADStudy.resolve("smoke", smoke).check()
    with pytest.raises(UsageError, match="Ask for fewer"):
        BREADStudy.resolve("smoke", {"train_items": "200000"}).check()
