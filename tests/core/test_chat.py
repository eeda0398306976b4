"""Chat models against plain loops: one request, one token at a time, no cache, no batch; and budgets by counting."""

from __future__ import annotations

import doctest
import importlib
import itertools
import os
import random
import subprocess
import sys
import threading
from typing import Any

import pytest
import torch

from gnomon.core.chat import (
    BudgetExceeded,
    ChatModel,
    ChatRequest,
    Message,
    Metered,
    Tool,
    ToolCall,
    Usage,
    ask,
    total,
)
from gnomon.core.chat_local import LocalChat, choose
from gnomon.core.chat_simulated import SimulatedChat
from gnomon.core.errors import GnomonError, NumericalFailure, UsageError
from gnomon.core.generation import generate
from gnomon.core.models import Loaded, load
from gnomon.core.seeding import seeded

TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}"
    "{% for c in m.tool_calls or [] %}[{{ c.function.name }} {{ c.function.arguments }}]{% endfor %}{% endfor %}"
    "{% for t in tools or [] %}({{ t.function.name }}){% endfor %}{% if add_generation_prompt %}<a>{% endif %}"
)
SEARCH = Tool(name="search", description="looks it up")


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    torch.set_num_threads(1)
    with seeded(3):
        found = load("tiny:llama-10k")
        with torch.no_grad():  # far enough from uniform that replies differ
            for parameter in found.model.parameters():
                parameter.mul_(8 if parameter.ndim > 1 else 1)
    return found


@pytest.fixture
def local(loaded: Loaded) -> LocalChat:
    return LocalChat(loaded.model, loaded.tokenizer, name="tiny", batch_size=3)


@torch.no_grad()
def log_softmax(model: LocalChat, ids: list[int]) -> torch.Tensor:
    rows: torch.Tensor = model.model(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    return rows


def slowly(model: LocalChat, request: ChatRequest) -> str:
    """Greedy, without cache or batch."""
    ids = model.prompt(request)
    start = len(ids)
    for _ in range(request.max_tokens):
        ids.append(int(log_softmax(model, ids)[-1].argmax()))
        if ids[-1] == model.tokenizer.eos_token_id:
            break
    return str(model.tokenizer.decode(ids[start:], skip_special_tokens=True))


# ------------------------------------------------------------------------------------------------- the protocol


@pytest.mark.parametrize("module", ["chat", "chat_simulated", "chat_local"])
def test_the_examples_of_the_modules(module: str) -> None:
    found = doctest.testmod(
        importlib.import_module(f"gnomon.core.{module}"),
        optionflags=doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL,
    )
    assert found.failed == 0 and found.attempted >= 3


def test_all_three_are_chat_models(local: LocalChat) -> None:
    simulated = SimulatedChat(lambda request, draw: "yes")
    for model in (local, simulated, Metered(local)):
        assert isinstance(model, ChatModel)
    assert (local.simulated, simulated.simulated, Metered(simulated).simulated) == (False, True, True)


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"max_tokens": 0}, r"max_tokens=0 must be a whole number from 1 on"),
        ({"seed": -1}, r"seed=-1"),
        ({"temperature": float("nan")}, r"temperature=nan must be finite"),
        ({"top_p": 0.0}, r"top_p=0.0 must lie in"),
        ({"top_k": 0}, r"top_k=0 would keep no token"),
        ({"stop": ("x", "")}, r"empty stop text"),
        ({"choices": ("a", "a")}, r"must be different texts"),
        ({"choices": ("a",), "tools": (SEARCH,)}, r"can't both"),
        ({"tools": (SEARCH, SEARCH)}, r"Two tools have one name"),
    ],
)
def test_impossible_requests_are_refused(settings: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        ask("hello", **settings)


def test_impossible_messages_are_refused(unchecked: None) -> None:
    with pytest.raises(UsageError, match="asks nothing"):
        ChatRequest(messages=())
    with pytest.raises(UsageError, match=r"Unknown role 'usr'\. Did you mean 'user'"):
        Message(role="usr", content="")  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="only the assistant can"):
        Message(role="user", content="", tool_calls=(ToolCall(id="1", name="a", arguments={}),))
    with pytest.raises(UsageError, match="names the call"):
        Message(role="tool", content="42")


def test_a_request_has_one_digest_in_every_process() -> None:
    """…which loads no torch for it. Everything a reply depends on is in it."""
    code = (
        "import sys; from gnomon.core.chat import ask; from gnomon.core.chat_simulated import SimulatedChat\n"
        "print(ask('é', seed=3).digest('x'))\n"
        "print(SimulatedChat(lambda r, d: str(d.random())).generate([ask('é')])[0].text, 'torch' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONHASHSEED": "7"},
    )
    here = SimulatedChat(lambda r, d: str(d.random())).generate([ask("é")])[0].text
    assert done.stdout.split() == [str(ask("é", seed=3).digest("x")), here, "False"]
    variants = [
        ask("é"),
        ask("e"),
        ask("é", seed=1),
        ask("é", temperature=1.0),
        ask("é", system="s"),
        ask("é", tools=(SEARCH,)),
    ]
    assert len({one.digest() for one in variants}) == len(variants)


def test_usages_add_up_and_stay_unknown() -> None:
    one = Usage(input_tokens=3, output_tokens=4)
    assert total([one, one]) == Usage(calls=2, input_tokens=6, output_tokens=8)
    assert total([one, Usage(output_tokens=1)]) == Usage(calls=2, input_tokens=None, output_tokens=5)
    assert total([]) == Usage(calls=0, input_tokens=0, output_tokens=0)


# ------------------------------------------------------------------------------------------------- a local model

MIXED = [
    ask("Hello", max_tokens=7),
    ask("A much longer question, which pads the others", max_tokens=7),
    ask("x", max_tokens=4),
    ask("Hello", max_tokens=7, temperature=1.0, seed=1),
    ask("Hello", max_tokens=7, temperature=1.0, seed=2),
    ask("pick", choices=("a", "bcd")),
    ask("?", system="Be brief.", max_tokens=7, temperature=1.0, top_k=20, top_p=0.9),
    ask("so", max_tokens=5, logprobs=True),
]


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_greedy_replies_equal_a_plain_loop(local: LocalChat, template: str | None, monkeypatch: Any) -> None:
    monkeypatch.setattr(local.tokenizer, "chat_template", template)
    requests = [request for request in MIXED if request.temperature == 0 and not request.choices]
    replies = local.generate(requests)
    assert [reply.text for reply in replies] == [slowly(local, request) for request in requests]
    assert [reply.usage.input_tokens for reply in replies] == [len(local.prompt(r)) for r in requests]
    start = "<user>Hello<a>" if template else "user: Hello\nassistant:"
    assert bytes(local.prompt(requests[0])).decode() == start


@pytest.mark.parametrize("batch_size", [1, 2, 8])
def test_order_and_company_change_nothing(loaded: Loaded, local: LocalChat, batch_size: int) -> None:
    alone = [local.generate([request])[0] for request in MIXED]
    assert len({reply.text for reply in alone}) == len(alone)
    other = LocalChat(loaded.model, loaded.tokenizer, name="tiny", batch_size=batch_size)
    order = random.Random(batch_size).sample(range(len(MIXED)), len(MIXED))
    replies = other.generate([MIXED[i] for i in order])
    for i, reply in zip(order, replies, strict=True):
        assert (reply.text, reply.usage, reply.stop) == (alone[i].text, alone[i].usage, alone[i].stop)
    assert local.generate([]) == []


def test_the_seed_decides(local: LocalChat) -> None:
    draws = [ask("Hello", max_tokens=5, temperature=1.5, seed=seed) for seed in range(6)]
    texts = [reply.text for reply in local.generate(draws)]
    assert texts == [reply.text for reply in local.generate(draws)] and len(set(texts)) == 6
    same = local.generate([ask("Hello", max_tokens=5, temperature=1.5)] * 3)
    assert len({reply.text for reply in same}) == 1


def test_replies_end_at_stop_texts(local: LocalChat) -> None:
    asked = ("so", "x")
    free = local.generate([ask(q, max_tokens=12) for q in asked])
    first, other = (reply.text for reply in free)
    stop = next(a + b for a, b in itertools.pairwise(first) if "\ufffd" not in a + b)
    assert stop not in other  # one row goes on, and the other is padded
    requests = [ask(q, max_tokens=12, stop=(stop, "\x00never")) for q in asked]
    cut = local.generate(requests)
    assert [reply.text for reply in cut] == [first.partition(stop)[0], other]
    [row] = generate(local.model, [local.prompt(requests[0])], max_new_tokens=12)
    spent = next(i for i in range(1, 13) if stop in local.tokenizer.decode(row[:i]))
    assert [reply.usage.output_tokens for reply in cut] == [spent, 12]  # padding behind the end isn't counted
    assert [reply.stop for reply in cut] == ["stop", "length"] and free[0].stop == "length"


def test_a_reply_ends_by_itself(local: LocalChat, monkeypatch: Any) -> None:
    ids = local.prompt(ask("Hello"))
    for _ in range(3):
        ids.append(int(log_softmax(local, ids)[-1].argmax()))
    monkeypatch.setattr(local.model.generation_config, "eos_token_id", [ids[-1], 258])
    [ended] = local.generate([ask("Hello", max_tokens=6)])
    assert ended.stop == "stop" and ended.usage.output_tokens <= 3  # type: ignore[operator]


def test_log_probabilities_equal_a_plain_loop(local: LocalChat) -> None:
    request = ask("so", max_tokens=5, logprobs=True, temperature=1.0, seed=4)
    [reply] = local.generate([request])
    ids = local.prompt(request)
    settings: dict[str, Any] = {"max_new_tokens": 5, "temperature": 1.0, "generator": [request.digest()]}
    [row] = generate(local.model, [ids], **settings)
    by_hand = [float(log_softmax(local, ids + row[:i])[-1, token]) for i, token in enumerate(row)]
    assert reply.logprobs is not None
    assert [one.logprob for one in reply.logprobs] == pytest.approx(by_hand, abs=1e-4)
    assert [one.token for one in reply.logprobs] == [local.tokenizer.decode([token]) for token in row]


def test_the_likeliest_choice_is_taken(local: LocalChat) -> None:
    options = ("yes", "no", "perhaps, who knows")
    request = ask("Well?", choices=options, logprobs=True)
    [reply] = local.generate([request])
    prompt = local.prompt(request)
    by_hand = []
    for option in options:
        ids = [*prompt, *option.encode()]
        rows = log_softmax(local, ids)
        by_hand.append(sum(float(rows[t - 1, ids[t]]) for t in range(len(prompt), len(ids))))
    assert reply.choice_logprobs == pytest.approx(by_hand, abs=1e-3)
    assert reply.text == options[by_hand.index(max(by_hand))] and reply.stop == "choice"
    assert sum(one.logprob for one in reply.logprobs or ()) == pytest.approx(max(by_hand), abs=1e-3)


def test_choices_are_drawn_by_likelihood() -> None:
    """At temperature 2, weights e^0 and e^(2/2): the second in e/(1+e) = .731 of draws, within 5 standard errors."""
    drawn = [choose([0.0, 2.0], ask("?", choices=("a", "b"), temperature=2.0, seed=s)) for s in range(500)]
    assert abs(sum(drawn) / 500 - 0.7311) < 5 * (0.7311 * 0.2689 / 500) ** 0.5
    assert choose([0.0, 2.0], ask("?", choices=("a", "b"))) == 1


def test_tools_are_told_and_calls_are_read(local: LocalChat, monkeypatch: Any) -> None:
    request = ask("Where?", tools=(SEARCH,), max_tokens=3)
    with pytest.raises(UsageError, match="never hear of 'search'"):
        local.generate([request])
    monkeypatch.setattr(local.tokenizer, "chat_template", TEMPLATE)
    called = Message(
        role="assistant", content="", tool_calls=(ToolCall(id="1", name="search", arguments={"q": "x"}),)
    )
    result = Message(role="tool", content="here", tool_call_id="1")
    longer = ChatRequest(messages=(*request.messages, called, result), tools=(SEARCH,))
    text = bytes(local.prompt(longer)).decode()
    assert text == "<user>Where?<assistant>[search {'q': 'x'}]<tool>here(search)<a>"
    said = 'I look.<tool_call>{"name": "search", "arguments": {"q": "x"}}</tool_call><tool_call>{broken}</tool_call>'
    monkeypatch.setattr(local.tokenizer, "decode", lambda row, **options: said)
    [reply] = local.generate([request])
    assert reply.message.tool_calls == (ToolCall(id="call_0", name="search", arguments={"q": "x"}),)
    assert reply.text == "I look.<tool_call>{broken}</tool_call>" and reply.stop == "tool_calls"


def test_a_template_may_refuse(local: LocalChat, monkeypatch: Any) -> None:
    strict = "{% if messages[0].role == 'system' %}{{ raise_exception('no system message') }}{% endif %}x"
    monkeypatch.setattr(local.tokenizer, "chat_template", strict)
    assert bytes(local.prompt(ask("x"))).decode() == "x"
    with pytest.raises(UsageError, match="chat template of tiny refuses the conversation: no system message"):
        local.generate([ask("x", system="s")])


def test_what_does_not_fit_is_refused_before_any_work(local: LocalChat, monkeypatch: Any) -> None:
    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the model was run")

    monkeypatch.setattr(local.model, "forward", never)
    with pytest.raises(
        UsageError, match=r"256 positions, but a conversation takes \d+ tokens and max_tokens 250"
    ):
        local.generate([ask("fits", max_tokens=2), ask("Hello", max_tokens=250)])
    with pytest.raises(UsageError, match="and a choice 240"):
        local.generate([ask("Hello", choices=("a", "b" * 240))])
    with pytest.raises(UsageError, match="batch_size=0"):
        LocalChat(local.model, local.tokenizer, name="x", batch_size=0)


def test_a_broken_model_says_so(loaded: Loaded, local: LocalChat, monkeypatch: Any) -> None:
    forward = loaded.model.forward

    def broken(*args: Any, **kwargs: Any) -> Any:
        out = forward(*args, **kwargs)
        out.logits = out.logits * float("nan")
        return out

    monkeypatch.setattr(local.model, "forward", broken)
    with pytest.raises(NumericalFailure, match="not finite"):
        local.generate([ask("Hello", choices=("a", "b"))])


# ------------------------------------------------------------------------------------------------- a simulation


def test_competence_is_what_is_stated() -> None:
    """Within 5 standard errors over 500 questions; the same one is always answered alike."""
    pupil = SimulatedChat.of_competence(lambda request: ("right", ("wrong", "worse")), 0.7, name="pupil")
    replies = [reply.text for reply in pupil.generate([ask(str(i)) for i in range(500)])]
    assert abs(replies.count("right") / 500 - 0.7) < 5 * (0.21 / 500) ** 0.5
    assert abs(replies.count("wrong") / 500 - 0.15) < 5 * (0.1275 / 500) ** 0.5
    assert replies == [pupil.generate([ask(str(i))])[0].text for i in range(500)]
    assert pupil.name == "simulated, pupil, competence 0.7"
    for extreme, always in ((0.0, "wrong"), (1.0, "right")):
        sure = SimulatedChat.of_competence(lambda request: ("right", ("wrong",)), extreme)
        assert {reply.text for reply in sure.generate([ask(str(i)) for i in range(50)])} == {always}
    with pytest.raises(UsageError, match=r"competence=1\.1"):
        SimulatedChat.of_competence(lambda request: ("", ()), 1.1)
    with pytest.raises(UsageError, match="no wrong reply"):
        SimulatedChat.of_competence(lambda request: ("right", ()), 0.0).generate([ask("x")])


def test_a_simulation_keeps_the_rules() -> None:
    def rule(request: ChatRequest, draw: random.Random) -> str | Message:
        if request.tools:
            return Message(
                role="assistant", content="", tool_calls=(ToolCall(id="1", name="search", arguments={}),)
            )
        return "one two three four"

    model = SimulatedChat(rule)
    long, short, stopped, called = model.generate(
        [ask("a b"), ask("a", max_tokens=2), ask("a", stop=(" three",)), ask("a", tools=(SEARCH,))]
    )
    assert (long.text, long.stop, long.usage) == (
        "one two three four",
        "stop",
        Usage(input_tokens=2, output_tokens=4),
    )
    assert (short.text, short.stop, stopped.text, stopped.stop) == ("one two", "length", "one two", "stop")
    assert called.stop == "tool_calls"
    with pytest.raises(GnomonError, match="none of the request's tools"):
        model.generate([ask("a", tools=(Tool(name="other", description=""),))])
    with pytest.raises(GnomonError, match="none of the choices"):
        model.generate([ask("a", choices=("yes", "no"))])
    with pytest.raises(UsageError, match="has no log-probabilities"):
        model.generate([ask("a", logprobs=True)])


# ------------------------------------------------------------------------------------------------- budgets


class Counting(SimulatedChat):
    """Counts the calls that reach it."""

    def __init__(self, reply: str = "one two") -> None:
        super().__init__(lambda request, draw: reply)
        self.reached = 0

    def generate(self, requests: Any) -> Any:
        self.reached += len(requests)
        return super().generate(requests)


def test_a_budget_is_held_before_the_call() -> None:
    inner = Counting()
    metered = Metered(inner, calls=3)
    metered.generate([ask("a b c"), ask("b")])
    assert metered.calls_left == 1 and metered.usage == Usage(calls=2, input_tokens=4, output_tokens=4)
    with pytest.raises(BudgetExceeded, match=r"2 of 3 calls to simulated are used, and 2 more are asked for"):
        metered.generate([ask("c"), ask("d")])
    assert inner.reached == 2 and metered.usage.calls == 2  # nothing was asked, nothing counted
    metered.generate([ask("c")])
    with pytest.raises(BudgetExceeded, match="1 more is asked"):
        metered.generate([ask("d")])
    assert inner.reached == 3 and metered.generate([]) == []
    with pytest.raises(UsageError, match="calls=-1"):
        Metered(inner, calls=-1)


def test_a_budget_of_tokens_holds_in_the_worst_case() -> None:
    inner = Counting()
    metered = Metered(inner, output_tokens=10)
    metered.generate([ask("a", max_tokens=8)])  # answers two
    metered.generate([ask("a", max_tokens=8)])  # hence eight are left
    with pytest.raises(BudgetExceeded, match="4 of 10 output tokens to simulated are used, and 7 more"):
        metered.generate([ask("a", max_tokens=7)])
    assert inner.reached == 2 and metered.calls_left is None


def test_failures_count_and_lost_replies_are_noticed() -> None:
    class Failing(Counting):
        def generate(self, requests: Any) -> Any:
            super().generate(requests)
            raise GnomonError("the line is dead")

    class Losing(Counting):
        def generate(self, requests: Any) -> Any:
            return super().generate(requests)[1:]

    failing = Metered(Failing(), calls=2)
    with pytest.raises(GnomonError, match="the line is dead"):
        failing.generate([ask("a")])
    assert failing.calls_left == 1
    with pytest.raises(GnomonError, match="0 replies to 1 requests"):
        Metered(Losing()).generate([ask("a")])


def test_threads_share_a_budget() -> None:
    inner = Counting()
    metered, refused = Metered(Metered(inner, calls=50), calls=60), []

    def work() -> None:
        for i in range(20):
            try:
                metered.generate([ask(str(i))])
            except BudgetExceeded:
                refused.append(i)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert inner.reached == 50 and len(refused) == 30  # the outer one counts refusals of the inner one, too
    assert metered.usage.calls == 60
