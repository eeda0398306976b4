"""Model Shapley: time of a scoring pass beside the backward passes that it needs.

    python benchmarks/shapley.py [--threads 1] [--repeats 15] [--model M] [--tokens 128] [--json FILE] [--quick]

SmolLM2-135M by default, in float32: its weights alone are larger than most caches. Ratios are to one forward and
backward pass with the gradients of all weights, as training makes it; "activations only" is the same with frozen
weights, which is all that units need. The exact Hessian takes two backward passes, and its aim is held against twice
the time.

First-order scores are checked against autograd's gradients, and the second-order ones of neurons against the explicit
sum over sequences, before anything is timed. Exits 1 where one is wrong.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from common import Report, Work, parser_of, ratio, run
from torch import Tensor

from gnomon.core.layers import is_conv1d
from gnomon.core.models import load
from gnomon.core.scoring import token_nll
from gnomon.core.timing import threads_set
from gnomon.methods.compress.shapley import ModelShapley

QUICK = "tiny:llama-10k"
EQUAL = 1e-3
"""Largest relative difference from autograd, float32 sums over all tokens."""
AIM = 1.5
"""A scoring pass over the passes it needs."""
FORMS: dict[str, dict[str, Any]] = {
    "neurons, Fisher": {"units": "mlp_neuron"},
    "rows, Fisher": {"units": "row"},
    "heads, Fisher": {"units": "head"},
    "layers, Fisher": {"units": "layer"},
    "rows, Gram": {"units": "row", "curvature": "gram"},
    "parameters, Fisher": {"units": "param"},
    "neurons, exact Hessian": {"units": "mlp_neuron", "curvature": "hvp"},
}
AIMED = {
    "neurons, Fisher": 1,
    "rows, Fisher": 1,
    "heads, Fisher": 1,
    "layers, Fisher": 1,
    "neurons, exact Hessian": 2,
}
"""Forms with an aim, and how many backward passes each needs."""


def check(report: Report, model: Any, ids: Tensor) -> None:
    """Rows of every map by autograd; neurons' quadratic part from sequences one by one."""
    found = ModelShapley(model, "row", curvature="none", bias=False).fit([ids]).scores()
    names = list(found.first)
    maps = [model.get_submodule(name) for name in names]
    grads = torch.autograd.grad(token_nll(model, ids).mean(), [m.weight for m in maps])
    worst = 0.0
    for name, module, g in zip(names, maps, grads, strict=True):
        wanted = -(g * module.weight.detach()).double().sum(0 if is_conv1d(module) else 1).cpu()
        worst = max(worst, float((found.first[name].cpu() - wanted).abs().max() / wanted.abs().max()))
    report.check("first-order scores of rows are autograd's", worst < EQUAL, f"{worst:.1e}")
    whole = ModelShapley(model, "mlp_neuron").fit([ids]).scores()
    single = [ModelShapley(model, "mlp_neuron", curvature="none").fit([row[None]]).scores() for row in ids]
    worst = 0.0
    for name, second in whole.second.items():
        a = torch.stack([s.first[name] for s in single])  # (B, units); signs cancel in the product
        wanted = (ids.shape[1] - 1) * (a * a.sum(1, keepdim=True)).mean(0) / 2
        worst = max(worst, float((second - wanted).abs().max() / wanted.abs().max()))
    report.check("second-order scores of neurons are the sums over sequences", worst < EQUAL, f"{worst:.1e}")


def measure(report: Report, options: argparse.Namespace) -> None:
    """Everything in turn.

    Raises:
        Wrong: a check failed.
    """
    threads = report.begin(options, ["transformers"], small="a model")
    model: Any = load(QUICK if options.quick else options.model, dtype="float32").model
    device = next(model.parameters()).device
    length = 16 if options.quick else options.tokens
    ids = torch.randint(0, 200, (2, length), generator=torch.Generator().manual_seed(0)).to(device)
    check(report, model, ids)
    report.stop_if_wrong()
    weights = sum(p.numel() * p.element_size() for p in model.parameters())
    for number in threads:
        with threads_set(number):
            times(report, model, ids, weights, number, options.repeats)


def times(report: Report, model: Any, ids: Tensor, weights: int, threads: int, repeats: int) -> None:
    """Seconds of every form at one number of threads."""

    def training() -> None:
        token_nll(model, ids).mean().backward()
        model.zero_grad()

    def activations() -> None:
        embedded = model.get_input_embeddings()(ids).detach().requires_grad_()
        model.requires_grad_(False)
        logits = model(inputs_embeds=embedded).logits[:, :-1]
        torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
        model.requires_grad_(True)

    def scoring(options: dict[str, Any]) -> Callable[[], object]:
        found = ModelShapley(model, **options)
        return lambda: found.update(ids)

    def work(name: str, call: Callable[[], object], passes: int = 3) -> Work:
        return Work(
            name=name, calls=[call], bytes=passes * weights
        )  # weights read forward, read and written back

    contenders = [work("forward and backward", training), work("activations only", activations, 2)]
    contenders += [work(name, scoring(options)) for name, options in FORMS.items()]
    seconds = report.time(f"{ids.numel()} tokens", contenders, threads=threads, repeats=repeats)
    for name, passes in AIMED.items():
        needed = [passes * value for value in seconds["forward and backward"]]
        found = ratio(needed, seconds[name])
        report.target(f"{name}: time needed over time taken", found.value or 0.0, 1 / AIM, found.interval)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    parser = parser_of(__doc__, threads=[1], repeats=15)
    parser.add_argument("--model", default="smollm2-135m", help="default: smollm2-135m")
    parser.add_argument("--tokens", type=int, default=128, help="of each of two sequences, default: 128")
    options = parser.parse_args(arguments)
    if options.repeats < 1 or options.tokens < 2:
        parser.error(f"--repeats {options.repeats} --tokens {options.tokens}: at least 1 and 2")
    return run(measure, options)


if __name__ == "__main__":
    sys.exit(main())
