"""Stages of the Model Shapley study without a language model: exactness of the formulas, and what scoring costs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from gnomon.core.errors import NumericalFailure
from gnomon.lab import StageContext

if TYPE_CHECKING:
    from torch import Tensor, nn

ERROR, SUM, LOGISTIC = (
    "error against brute force",
    "error of the efficiency sum",
    "rank correlation with brute force, logistic loss",
)
SECONDS = "seconds of a scoring pass"
PASS, LIGHT = "forward and backward pass", "forward and backward pass, frozen weights"
EQUAL = 1e-3
"""Largest relative difference of the hooks' first-order scores from autograd's, in float32."""


def exactness(ctx: StageContext, *, players: Sequence[int], seed: int) -> None:
    """Random quadratic losses, and a logistic regression, against brute force over all coalitions."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    for n in players:
        root = torch.randn(n, n, generator=generator, dtype=torch.float64)
        hessian = (root + root.T) / 2
        star, theta = torch.randn(2, n, generator=generator, dtype=torch.float64)

        def loss(weight: Tensor, h: Tensor = hessian, star: Tensor = star) -> Tensor:
            away = weight - star
            return away @ h @ away / 2

        quadratic(ctx, n, theta, loss)
    logistic(ctx, max(players), generator)


def quadratic(ctx: StageContext, n: int, theta: Tensor, loss: Callable[[Tensor], Tensor]) -> None:
    """Errors of both signs, relative to the largest exact value and to the sum of absolute ones."""
    from gnomon.methods.compress.shapley import ModelShapley, exact_shapley

    exact = exact_shapley(lambda s: -loss(theta * s), n)
    worth = float(loss(0 * theta) - loss(theta))
    for method, sign in (("shapley", 1), ("printed sign", "paper")):
        found = ModelShapley(
            vector(theta),
            "param",
            curvature="hvp",
            curvature_sign=sign,  # type: ignore[arg-type]
            loss_fn=lambda m, _: loss(m.get_parameter("only.weight").view(-1)).view(1),
        ).fit([None])
        phi = found.scores().flat()
        values = {
            ERROR: float((phi - exact).abs().max() / exact.abs().max()),
            SUM: abs(float(phi.sum()) - worth) / float(exact.abs().sum()),
        }
        for metric, value in values.items():
            ctx.record(method=method, metric=metric, value=value, better="lower", tags={"players": n})
        for i in range(n):
            ctx.record(
                method=method,
                metric="value by formula",
                value=float(phi[i]),
                item=i,
                tags={"players": n, "exact": float(exact[i])},
            )


def vector(theta: Tensor) -> nn.Module:
    """A module that holds θ as the weight `only.weight` (1, n)."""
    import torch

    model = torch.nn.Module()
    model.only = torch.nn.Linear(len(theta), 1, bias=False, dtype=theta.dtype)
    model.only.weight.data.copy_(theta[None])
    return model.eval()


def logistic(ctx: StageContext, n: int, generator: Any, samples: int = 400) -> None:
    """A fitted logistic regression: its loss isn't quadratic, and its Fisher is near its Hessian."""
    import torch
    from torch.nn.functional import softplus

    from gnomon.methods.compress.shapley import ModelShapley, exact_shapley
    from gnomon.studies.shapley_games import rank_correlation

    truth = torch.randn(n, generator=generator, dtype=torch.float64)
    x = torch.randn(samples, n, generator=generator, dtype=torch.float64)
    x = x + 0.7 * x[:, :1]  # correlated, so that players cooperate
    y = (torch.rand(samples, generator=generator, dtype=torch.float64) < torch.sigmoid(x @ truth)).double()

    def losses(theta: Tensor) -> Tensor:
        return softplus((1 - 2 * y) * (x @ theta))

    theta = torch.zeros(n, dtype=torch.float64)
    for _ in range(30):  # Newton, with a little of the quadratic penalty
        p = torch.sigmoid(x @ theta)
        g = x.T @ (p - y) / samples + 1e-2 * theta
        h = (x.T * (p * (1 - p))) @ x / samples + 1e-2 * torch.eye(n, dtype=torch.float64)
        theta = theta - torch.linalg.solve(h, g)
    exact = exact_shapley(lambda s: -float(losses(theta * s).mean()), n)
    model = vector(theta)

    def loss_fn(m: Any, batch: Tensor) -> Tensor:
        return softplus((1 - 2 * y) * m.only(batch)[:, 0])

    for method, options in {
        "shapley, Fisher": {},
        "shapley, exact Hessian": {"curvature": "hvp"},
        "printed sign, exact Hessian": {"curvature": "hvp", "curvature_sign": "paper"},
        "released code": {"curvature": "gram", "curvature_sign": "paper"},
        "first order": {"curvature": "none"},
    }.items():
        found = ModelShapley(model, "param", loss_fn=loss_fn, **options).fit([x])  # type: ignore[arg-type]
        value = rank_correlation(found.scores().flat(), exact)
        ctx.record(method=method, metric=LOGISTIC, value=value, better="higher", tags={"players": n})


def scoring_time(
    ctx: StageContext, *, model: str, batch: int, length: int, repeats: int, threads: int, seed: int
) -> dict[str, float]:
    """Seconds of one scoring pass beside those of one forward and backward pass; all take turns.

    Raises:
        NumericalFailure: the hooks' scores differ from autograd's, so there is nothing to time.
    """
    import statistics

    import torch

    from gnomon.core.models import load
    from gnomon.core.scoring import token_nll
    from gnomon.core.timing import Contender, interleaved, threads_set
    from gnomon.methods.compress.shapley import ModelShapley

    loaded = load(model, dtype="float32")
    network = loaded.model
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, 200, (batch, length), generator=generator).to(loaded.device)
    scorer = ModelShapley(network, "mlp_neuron")
    rows = ModelShapley(network, "row")

    def wait() -> None:
        if loaded.device.type == "cuda":
            torch.cuda.synchronize()

    def both(frozen: bool) -> None:
        if frozen:
            embedded = network.get_input_embeddings()(ids).detach().requires_grad_()
            logits = network(inputs_embeds=embedded).logits[:, :-1]
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), ids[:, 1:].flatten())
        else:
            loss = token_nll(network, ids).mean()
        loss.backward()  # type: ignore[no-untyped-call]
        network.zero_grad()
        wait()

    def light() -> None:
        network.requires_grad_(False)
        both(True)
        network.requires_grad_(True)

    def score(one: Any) -> None:
        one.update(ids)
        wait()

    check(network, ids)
    with threads_set(threads):
        seconds = interleaved(
            [
                Contender(name=PASS, calls=[lambda: both(False)]),
                Contender(name=LIGHT, calls=[light]),
                Contender(name="shapley", calls=[lambda: score(scorer)]),
                Contender(name="shapley, rows", calls=[lambda: score(rows)]),
            ],
            repeats=repeats,
        )
    for method, times in seconds.items():
        for i, value in enumerate(times):
            ctx.record(
                method=method,
                metric=SECONDS,
                value=value,
                unit="s",
                better="lower",
                item=i,
                tags={"model": model, "tokens": batch * length},
            )
    return {method: statistics.median(times) for method, times in seconds.items()}


def check(network: Any, ids: Tensor) -> None:
    """First-order scores of rows against autograd's."""
    import torch

    from gnomon.core.layers import is_conv1d
    from gnomon.core.scoring import token_nll
    from gnomon.methods.compress.shapley import ModelShapley

    scores = ModelShapley(network, "row", curvature="none", bias=False).fit([ids]).scores()
    name = list(scores.first)[-1]
    module = network.get_submodule(name)
    (g,) = torch.autograd.grad(token_nll(network, ids).mean(), [module.weight])
    contribution = (g * module.weight.detach()).double()
    found, wanted = scores.first[name].cpu(), -contribution.sum(0 if is_conv1d(module) else 1).cpu()
    error = float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1e-12))
    if not error < EQUAL:
        raise NumericalFailure(
            f"First-order scores of {name} differ from autograd's by {error:.1e}: nothing is timed."
        )
