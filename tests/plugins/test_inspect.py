"""Inspect AI: the task against `order_sensitivity` without Inspect and numbers by hand; the adapters against what they
were given. Models are Inspect's mock, a tiny random Llama and simulations; nothing leaves the machine.
"""

from __future__ import annotations

import importlib.util
import itertools
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch

import gnomon.plugins.inspect as plugin
from gnomon.core.chat import ChatRequest, Message, Metered, Tool, ToolCall, Usage, ask
from gnomon.core.chat_local import LocalChat
from gnomon.core.chat_simulated import SimulatedChat
from gnomon.core.errors import GnomonError, MissingExtra, UsageError
from gnomon.core.models import Loaded, load
from gnomon.core.seeding import seeded
from gnomon.methods.layers.set_llm import Asking, OrderQuestion, SetChat, order_sensitivity, read_choice
from gnomon.methods.layers.set_llm.items import questions

inspect_ai = pytest.importorskip("inspect_ai", reason="the extra `agents` isn't installed")
anyio = pytest.importorskip("anyio")

from inspect_ai.model import (  # noqa: E402
    ChatCompletionChoice,
    ChatMessageAssistant,
    GenerateConfig,
    ModelOutput,
    ModelUsage,
    get_model,
)
from inspect_ai.tool import ToolCall as InspectToolCall  # noqa: E402

from gnomon.plugins.inspect.order_task import parts  # noqa: E402

SEARCH = Tool(name="search", description="looks it up")


@pytest.fixture(scope="module")
def loaded() -> Loaded:
    torch.set_num_threads(1)
    with seeded(3):
        found = load("tiny:llama-10k")
        with torch.no_grad():
            for parameter in found.model.parameters():
                parameter.mul_(8 if parameter.ndim > 1 else 1)
    return found


def said(text: str, **more: Any) -> ModelOutput:
    usage = ModelUsage(
        input_tokens=3, output_tokens=2, total_tokens=5
    )  # without one the mock asks the network
    return ModelOutput(
        model="mock",
        choices=[ChatCompletionChoice(message=ChatMessageAssistant(content=text, **more))],
        usage=usage,
    )


def mock(answer: Any) -> Any:
    """A mock that answers by a function of (messages, tools, config)."""
    plugin.registered  # noqa: B018  enters the provider
    outputs = lambda messages, tools, choice, config: answer(messages, tools, config)  # noqa: E731
    return get_model("mockllm/model", custom_outputs=outputs, memoize=False)


def run(model: Any, folder: Path, **arguments: Any) -> Any:
    """The finished log of the task, found by its name."""
    plugin.registered  # noqa: B018
    [log] = inspect_ai.eval(
        "gnomon/set_order",
        task_args=arguments,
        model=model,
        log_dir=str(folder),
        display="none",
        log_format="json",
    )
    return log


def metrics(log: Any) -> dict[str, float]:
    assert log.status == "success", log.error
    return {one.name: one.metrics["mean"].value for one in log.results.scores}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    rows = [
        {"question": "Which is red?", "choices": ["a rose", "the sea", "dark snow"], "answer": "a rose"},
        {"question": "Which is wet?", "choices": ["a rose", "the sea"], "answer": 1},
    ]
    path = tmp_path / "questions.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    return path


# ------------------------------------------------------------------------------------------------- the task


def test_the_entry_point_leads_to_what_is_registered() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    module, _, attribute = project["entry-points"]["inspect_ai"]["gnomon"].partition(":")
    assert set(getattr(importlib.import_module(module), attribute)) == {"set_order"}
    assert plugin.set_order is plugin.registered["set_order"]
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = plugin.nonsense


def test_without_inspect_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(MissingExtra, match=r"set_order needs Inspect AI.*pip install 'gnomon\[agents\]'"):
        _ = plugin.set_order


def test_a_model_that_takes_the_first_option(file: Path, tmp_path: Path) -> None:
    """By hand: with k options it is right in 1/k of the orders, and flips in (k-1)/k of them."""

    def first(messages: Any, tools: Any, config: Any) -> ModelOutput:
        return said(messages[-1].text.split("\n- ")[1].partition("\n")[0].upper() + ".")

    log = run(mock(first), tmp_path, data=str(file))
    found = metrics(log)
    assert found["random"] == pytest.approx((1 / 3 + 1 / 2) / 2)
    assert found["flips"] == pytest.approx((2 / 3 + 1 / 2) / 2)
    assert found["first_place"] == pytest.approx((3 + 2) / 2)
    assert (found["adversarial"], found["unanswered"]) == (0, 0)
    assert log.eval.task_registry_name == "gnomon/set_order" and log.stats.model_usage[
        "mockllm/model"
    ].input_tokens == 3 * (6 + 2)
    assert [len(sample.store["replies"]) for sample in log.samples] == [6, 2]  # all orders, each kept
    _, order_sensitivity = parts()
    again = inspect_ai.score(log, order_sensitivity(answer="text"), action="overwrite", display="none")
    assert metrics(again) == found  # from the log alone
    del log.samples[1].store["replies"]  # as of a sample that a limit ended: left out, not wrong
    again = inspect_ai.score(log, order_sensitivity(answer="text"), action="overwrite", display="none")
    assert metrics(again)["flips"] == pytest.approx(2 / 3)


def test_a_model_that_knows_and_one_that_says_nothing(file: Path, tmp_path: Path) -> None:
    def knows(messages: Any, tools: Any, config: Any) -> ModelOutput:
        assert config.max_tokens == 32 and config.temperature == 0 and config.seed == 5
        return said("It must be a rose!" if "red" in messages[-1].text else "- The sea")

    found = metrics(run(mock(knows), tmp_path, data=str(file), seed=5))
    assert found == {
        "random": 1, "adversarial": 1, "majority": 1, "flips": 0, "first_place": 1, "unanswered": 0,
    }  # fmt: skip
    found = metrics(run(mock(lambda *_: said("a rose or the sea")), tmp_path, data=str(file), permutations=2))
    assert (found["random"], found["majority"], found["flips"], found["unanswered"]) == (0, 0, 0, 1)


def test_the_task_equals_the_function(loaded: Loaded, tmp_path: Path) -> None:
    """Log-likelihoods of a real, tiny model, once as it reads with order, once as a set."""
    asked = questions("words", "test", 3)
    asking = Asking(answer="likelihood")
    ordered = LocalChat(loaded.model, loaded.tokenizer, name="tiny")
    as_set = SetChat(loaded.model, loaded.tokenizer, name="tiny")
    for chat, how in ((ordered, asking), (as_set, Asking(answer="likelihood", markup=True))):
        plugin.registered  # noqa: B018
        model = get_model("gnomon/tiny", chat=chat, memoize=False)
        arguments = {"count": 3, "permutations": 6, "answer": "likelihood"}
        found = metrics(run(model, tmp_path, **arguments))
        truth = order_sensitivity(how.scorer(chat), asked, 6, seed=0)
        assert found["random"] == pytest.approx(truth.random_acc)
        assert found["adversarial"] == pytest.approx(truth.adversarial_acc)
        assert found["flips"] == pytest.approx(truth.flip_prob)
        assert found["first_place"] == pytest.approx(truth.first_place)
        spreads = [row["spread"] for row in truth.per_question]
        assert max(spreads) < 1e-3 if chat is as_set else min(spreads) > 1e-2
        assert found["flips"] == 0 or chat is ordered


def test_likelihoods_need_gnomons_provider(file: Path, tmp_path: Path) -> None:
    log = run(mock(lambda *_: said("")), tmp_path, data=str(file), answer="likelihood")
    assert log.status == "error" and "needs a model of Gnomon's provider" in log.error.message
    with pytest.raises(UsageError, match="answer='letter' must be"):
        plugin.set_order(answer="letter")
    with pytest.raises(UsageError, match="count=0 would ask nothing"):
        plugin.set_order(count=0)
    with pytest.raises(UsageError, match=r"There is no \.jsonl file"):
        plugin.set_order(data="absent.jsonl")


@pytest.mark.parametrize(
    ("reply", "choice"),
    [
        ("The SEA.", 1), ("- a rose", 0), ("It is 'a rose', clearly", 0), ("dark red", 3), ("It's dark red!", 3),
        ("red", 2), ("a rose and the sea", None), ("", None), ("rosemary", None), ("redder", None),
    ],
)  # fmt: skip
def test_reading_a_choice(reply: str, choice: int | None) -> None:
    assert read_choice(reply, ["a rose", "the sea", "red", "dark red"]) == choice


def test_options_have_to_differ() -> None:
    with pytest.raises(UsageError, match="differ in spaces only"):
        Asking().request(OrderQuestion("Which?", (" a", "a"), 0), (0, 1))


# ------------------------------------------------------------------------------------------------- adapters


def test_requests_reach_the_provider_and_replies_come_in_order() -> None:
    seen: list[GenerateConfig] = []

    async def answer(messages: Any, tools: Any, config: Any) -> ModelOutput:
        seen.append(config)
        number = int(messages[-1].text)
        await anyio.sleep(0.02 * (5 - number))  # the last one is ready first
        return said(f"reply {number} to {messages[0].role}, {len(tools)} tools")

    model = Metered(plugin.InspectChat(mock(answer)), calls=6)
    requests = [ask(str(i), system="s", temperature=0.5, top_p=0.9, seed=i, stop=("x",)) for i in range(5)]
    replies = model.generate(requests)  # in a plain script
    assert [reply.text for reply in replies] == [f"reply {i} to system, 0 tools" for i in range(5)]
    assert model.usage == Usage(calls=5, input_tokens=15, output_tokens=10)
    assert (model.name, model.simulated) == ("mockllm/model", True)
    assert sorted(config.seed for config in seen) == [0, 1, 2, 3, 4]
    assert all((c.temperature, c.top_p, c.max_tokens, c.stop_seqs) == (0.5, 0.9, 256, ["x"]) for c in seen)
    with pytest.raises(GnomonError, match="5 of 6 calls"):
        model.generate(requests[:2])

    async def as_in_a_solver() -> list[str]:
        with pytest.raises(UsageError, match=r"needs a thread of its own"):
            model.generate(requests[:1])
        return [reply.text for reply in await anyio.to_thread.run_sync(plugin_chat.generate, requests[:3])]

    plugin_chat = plugin.InspectChat(mock(answer))
    assert anyio.run(as_in_a_solver) == [f"reply {i} to system, 0 tools" for i in range(3)]


def test_tools_and_their_results_travel() -> None:
    def answer(messages: Any, tools: Any, config: Any) -> ModelOutput:
        assert [tool.name for tool in tools] == ["search"]
        assert [message.role for message in messages] == ["user", "assistant", "tool"]
        assert messages[1].tool_calls[0].arguments == {"q": "x"} and messages[2].tool_call_id == "1"
        return said("", tool_calls=[InspectToolCall(id="2", function="search", arguments={"q": "y"})])

    called = (ToolCall(id="1", name="search", arguments={"q": "x"}),)
    history = (
        Message(role="user", content="Where?"),
        Message(role="assistant", content="", tool_calls=called),
        Message(role="tool", content="here", tool_call_id="1"),
    )
    [reply] = plugin.InspectChat(mock(answer)).generate([ChatRequest(messages=history, tools=(SEARCH,))])
    assert reply.message.tool_calls == (ToolCall(id="2", name="search", arguments={"q": "y"}),)


def test_failures_reach_the_engine() -> None:
    def broken(messages: Any, tools: Any, config: Any) -> ModelOutput:
        return ModelOutput(model="mock", error="over capacity", usage=ModelUsage())

    with pytest.raises(GnomonError, match=r"mockllm/model gave no reply: over capacity"):
        plugin.InspectChat(mock(broken)).generate([ask("x")])
    with pytest.raises(UsageError, match="can't be asked how likely given texts are"):
        plugin.InspectChat(mock(broken)).generate([ask("x", choices=("a", "b"))])


def test_there_and_back_is_the_same_model(loaded: Loaded) -> None:
    """A local model through Inspect and back gives what it gives without."""
    local = LocalChat(loaded.model, loaded.tokenizer, name="tiny")
    requests = [
        ask("Hello", max_tokens=5),
        ask("Hello", max_tokens=5, temperature=1.0, seed=2, top_k=50),
        ask("so", max_tokens=3, logprobs=True),
        ask("pick", choices=("a", "bcd")),
    ]
    back = plugin.InspectChat(get_model("gnomon/tiny", chat=local, memoize=False))
    for there, direct in zip(back.generate(requests), local.generate(requests), strict=True):
        assert (there.text, there.model, there.usage) == (direct.text, "tiny", direct.usage)
        for name in ("logprobs", "choice_logprobs"):
            a, b = getattr(there, name), getattr(direct, name)
            assert (a is None) == (b is None)
            if name == "choice_logprobs" and a:
                assert a == pytest.approx(b, abs=1e-3)
    assert not back.simulated
    pupil = SimulatedChat(lambda request, draw: "yes")
    assert plugin.InspectChat(get_model("gnomon/pupil", chat=pupil, memoize=False)).simulated


def test_waiting_requests_share_a_batch() -> None:
    sizes: list[int] = []

    class Slow(SimulatedChat):
        def generate(self, requests: Any) -> Any:
            sizes.append(len(requests))
            if any(request.messages[-1].content == "bad" for request in requests):
                raise UsageError("bad was asked")
            return super().generate(requests)

    slow = Slow(lambda request, draw: request.messages[-1].content * 2)
    back = plugin.InspectChat(get_model("gnomon/slow", chat=slow, memoize=False))
    replies = back.generate([ask(str(i)) for i in range(20)])
    assert [reply.text for reply in replies] == [str(i) * 2 for i in range(20)]
    assert sum(sizes) == 20 and len(sizes) <= 3
    with pytest.raises(UsageError, match="bad was asked"):
        back.generate([ask("bad"), ask("worse")])
    assert back.generate([ask("good")])[0].text == "goodgood"  # it goes on


def test_the_provider_loads_by_name_and_refuses_what_it_does_not_know() -> None:
    model = get_model("gnomon/tiny:llama-10k", mode="causal+pe", batch_size=2, memoize=False)
    assert isinstance(model.api.chat, SetChat) and model.api.chat.name == "tiny:llama-10k, causal+pe"
    assert isinstance(get_model("gnomon/tiny:llama-10k", memoize=False).api.chat, LocalChat)
    with pytest.raises(UsageError, match=r"doesn't know 'colour'"):
        get_model("gnomon/tiny:llama-10k", colour="red", memoize=False)
    with pytest.raises(UsageError, match="num_choices=2"):
        anyio.run(lambda: model.generate("x", config=GenerateConfig(num_choices=2)))


# ------------------------------------------------------------------------------------------------- reading sets


@pytest.mark.parametrize(
    "template", [None, "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}<a>"]
)
def test_a_set_chat_is_blind_to_order(
    loaded: Loaded, template: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loaded.tokenizer, "chat_template", template)
    cities = ["Rome", "Oslo", "Bonn"]

    def content(order: Any) -> str:
        return "Which?" + f"<set>{''.join(f'<el> {cities[i]}</el>' for i in order)}</set> Answer:"

    requests = [ask(content(order), choices=tuple(cities)) for order in itertools.permutations(range(3))]
    for mode, blind in (("setmask+setpe", True), ("causal+pe", False)):
        chat = SetChat(loaded.model, loaded.tokenizer, name="tiny", mode=mode, batch_size=4)
        rows = torch.tensor([reply.choice_logprobs for reply in chat.generate(requests)])
        assert (float((rows - rows[0]).abs().max()) < 1e-3) == blind
        said = chat.generate([ask(content(order), max_tokens=6) for order in ((0, 1, 2), (2, 0, 1))])
        assert (said[0].text == said[1].text) == blind
    wanted = (
        "<user>Which? Rome Oslo Bonn Answer:<a>"
        if template
        else "user: Which? Rome Oslo Bonn Answer:\nassistant:"
    )
    assert chat.prompt(requests[0]).text() == wanted
    with pytest.raises(UsageError, match="knows neither tools nor"):
        chat.generate([ask("x", logprobs=True)])
    with pytest.raises(UsageError, match="isn't closed"):
        chat.generate([ask("<set><el>a</el>")])


def test_a_set_chat_samples_by_the_seed_and_stops(loaded: Loaded) -> None:
    chat = SetChat(loaded.model, loaded.tokenizer, name="tiny")
    [free, other, again] = chat.generate(
        [ask("Hi", max_tokens=8, temperature=1.0, seed=s) for s in (0, 1, 0)]
    )
    assert free.text == again.text != other.text and free.usage.input_tokens == len("user: Hi\nassistant:")
    [greedy] = chat.generate([ask("Hi", max_tokens=8)])
    stop = greedy.text[2:4]
    [cut] = chat.generate([ask("Hi", max_tokens=8, stop=(stop,))])
    assert cut.text == greedy.text.partition(stop)[0]
