"""Causal measurements: against interventions on the whole model, central differences and planted layers."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_models import FAMILIES, tiny_family
from torch import Tensor, nn

from gnomon.core.errors import GnomonError, NumericalFailure, UsageError
from gnomon.core.layers import decoder_stack, hidden_of
from gnomon.methods.interpret.tlcm import (
    NextLayer,
    Trace,
    adjacent,
    alpha_sweep,
    capture,
    decompose,
    layer_jacobian,
    linearity_error,
    steering_resistance,
    surviving_gain,
    symmetric_spectrum,
    unresisted_part,
)

IDS = torch.tensor([[5, 9, 3, 22, 31, 7, 3, 14, 9], [8, 30, 4, 4, 17, 26, 11, 39, 6]])
LAYER, TOKEN, ROW = 1, 6, 1  # behind the sliding window of 4 that two of the families use
# Transformers' RMSNorm rounds to float32 inside a float64 model; nn.LayerNorm does not (OLMo 1 rounds too).
EXACT = {"phi", "gpt2", "neox", "neox-parallel", "opt"}


def by_intervention(model: Any, layer: int, token: int, row: int) -> Callable[[Tensor], Tensor]:
    """b'(D) from forward passes of the whole model: D is added by a hook, output minus input is read off."""
    first, second = decoder_stack(model).layers[layer : layer + 2]

    def contribution(moved: Tensor) -> Tensor:
        seen: dict[str, Tensor] = {}

        def add(_m: nn.Module, _a: Any, output: Any) -> Any:
            hidden = hidden_of(output).clone()
            hidden[row, token] += moved
            return (hidden, *output[1:]) if isinstance(output, tuple) else hidden

        def read(_m: nn.Module, inputs: Any, output: Any) -> None:
            seen["c"] = hidden_of(output)[row, token] - inputs[0][row, token]

        hooks = [first.register_forward_hook(add), second.register_forward_hook(read)]
        with torch.no_grad():
            model(IDS)
        for hook in hooks:
            hook.remove()
        return seen["c"]

    return contribution


@pytest.fixture(scope="module", params=FAMILIES)
def family(request: pytest.FixtureRequest) -> tuple[Any, Trace, bool]:
    """Model, trace, and whether all of it is computed in float64."""
    model = tiny_family(request.param, dtype=torch.float64)
    return model, capture(model, IDS), request.param in EXACT


def test_jacobian_matches_central_differences_of_the_whole_model(family: tuple[Any, Trace, bool]) -> None:
    """Invariant 3, for the fast path of every family. Errors: h^2 by truncation, eps / h by rounding."""
    model, trace, exact = family
    outside = by_intervention(model, LAYER, TOKEN, ROW)
    h, limit = (1e-5, 1e-7) if exact else (3e-3, 1e-3)
    jacobian = layer_jacobian(model, trace, LAYER, TOKEN, chunk=7, row=ROW, path="token")
    directions = torch.randn(3, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    for v in directions:
        difference = (outside(h * v) - outside(-h * v)) / (2 * h)
        assert (jacobian @ v - difference).norm() < limit * difference.norm()


def test_both_paths_and_both_modes_agree(family: tuple[Any, Trace, bool]) -> None:
    model, trace, exact = family
    first = layer_jacobian(model, trace, LAYER, TOKEN, row=ROW, path="token")
    for options in ({"path": "sequence"}, {"path": "token", "mode": "forward", "chunk": 5}):
        other = layer_jacobian(model, trace, LAYER, TOKEN, row=ROW, **options)  # type: ignore[arg-type]
        assert (first - other).norm() < (1e-12 if exact else 1e-6) * first.norm()


def test_sweep_matches_interventions_on_the_whole_model(family: tuple[Any, Trace, bool]) -> None:
    model, trace, _ = family
    outside, a = by_intervention(model, LAYER, TOKEN, ROW), trace.contribution[LAYER, ROW, TOKEN]
    alphas = [-1.0, -0.4, 0.0, 1.0, 3.0]
    expected = [torch.cosine_similarity(a, outside(alpha * a), dim=0) for alpha in alphas]
    for path in ("token", "sequence"):
        found = alpha_sweep(model, trace, LAYER, TOKEN, alphas, row=ROW, path=path)
        torch.testing.assert_close(found, torch.stack(expected))
    counted_before = ROW * 8 + TOKEN - 1  # first tokens don't count
    assert found[2] == pytest.approx(float(adjacent(trace)[LAYER, counted_before]))


def test_variants_at_different_tokens_do_not_see_each_other(family: tuple[Any, Trace, bool]) -> None:
    model, trace, _ = family
    function = NextLayer(model, trace, LAYER, ROW, "token")
    tokens = torch.tensor([3, 8, 3, 0])
    x = function.x[tokens] + torch.randn(
        4, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2)
    )
    with torch.no_grad():
        together = function(tokens, x)
        alone = torch.cat([function(tokens[k : k + 1], x[k : k + 1]) for k in range(4)])
    torch.testing.assert_close(together, alone)
    assert (together - function.b[tokens]).norm() > 0.1 * together.norm()


@pytest.mark.parametrize("attn", ["sdpa", "eager"])
def test_later_tokens_do_not_matter(attn: str) -> None:
    """Invariant 5, and padding on the left changes nothing either."""
    model = tiny_family("qwen3", attn=attn)
    expected = layer_jacobian(model, capture(model, IDS), LAYER, TOKEN, row=ROW)
    changed, padded = IDS.clone(), torch.cat([torch.zeros(2, 2, dtype=torch.long), IDS], dim=1)
    changed[:, TOKEN + 1 :] = 33
    assert (
        layer_jacobian(model, capture(model, changed), LAYER, TOKEN, row=ROW) - expected
    ).abs().max() < 1e-5
    trace = capture(model, padded, padded != 0)
    assert (layer_jacobian(model, trace, LAYER, TOKEN + 2, row=ROW) - expected).abs().max() < 1e-5
    changed[:, TOKEN - 1] = 34  # an earlier one does
    assert (
        layer_jacobian(model, capture(model, changed), LAYER, TOKEN, row=ROW) - expected
    ).abs().max() > 1e-3


@pytest.mark.parametrize("family_name", ["llama", "gpt2", "neox-parallel"])
def test_half_precision_model(family_name: str) -> None:
    """The same weights in float32 give the same J, up to the rounding of the captured input."""
    half = tiny_family(family_name, dtype=torch.bfloat16)
    found = layer_jacobian(half, capture(half, IDS), LAYER, TOKEN)
    assert next(half.parameters()).dtype == torch.bfloat16
    exact = half.float()
    expected = layer_jacobian(exact, capture(exact, IDS), LAYER, TOKEN)
    assert (found - expected).norm() < 0.05 * expected.norm()


def test_quadratic_form_is_the_sum_over_eigendirections() -> None:
    """Invariant 4 on a real layer."""
    model = tiny_family("llama", dtype=torch.float64)
    trace = capture(model, IDS)
    jacobian, a = layer_jacobian(model, trace, 0, 4), trace.contribution[0, 0, 4]
    values, weights, strength = decompose(jacobian, a, top=16)
    assert strength.sum() == pytest.approx(float(a @ jacobian @ a), rel=1e-10)
    assert weights.sum() == pytest.approx(float(a @ a), rel=1e-10)
    assert (values * weights).equal(strength)
    assert (weights.diff() <= 0).all()
    assert torch.equal(decompose(jacobian, a, top=3).weights, weights[:3])


def test_example_b() -> None:
    jacobian, a = torch.tensor([[-1, 0.4, 0], [0, -0.5, 0.2], [0, 0.6, 0.5]]), torch.tensor([1.0, -1, 2])
    values, weights, strength = decompose(jacobian, a)
    assert values.tolist() == pytest.approx([0.643026, -1.083000, -0.560025], abs=1e-6)
    assert weights.tolist() == pytest.approx([2.516019, 2.230982, 1.252999], abs=1e-6)
    assert float(strength.sum()) == pytest.approx(-1.5, abs=1e-6)
    assert strength[0] > 0 > strength[1]


# --- Planted layers: the answer is known without running anything -------------------------------------------


class _Silent(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.zeros_like(x)


class _Layer(nn.Module):
    def __init__(self, mlp: nn.Module) -> None:
        super().__init__()
        self.attn, self.mlp = _Silent(), mlp

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(x) + self.mlp(x)


class _Planted(nn.Module):
    """Layer 1 adds -gamma P x, P the projector on the first two of five axes. Layer 0 writes W x."""

    def __init__(self, gamma: float) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.wte = nn.Embedding(10, 5)
        self.h = nn.ModuleList(_Layer(nn.Linear(5, 5, bias=False)) for _ in range(2))
        self.wte.weight.data = torch.randn(10, 5, generator=generator)
        self.wte.weight.data[:, :2] = 0  # P x_0 = 0
        self.h[0].mlp.weight.data = torch.randn(5, 5, generator=generator)  # type: ignore[union-attr, operator]
        self.h[1].mlp.weight.data = -gamma * self.projector  # type: ignore[union-attr]
        self.double()

    @property
    def projector(self) -> Tensor:
        return torch.diag(torch.tensor([1.0, 1, 0, 0, 0])).double()

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.wte(input_ids)
        for layer in self.h:
            x = layer(x)
        return x


def planted(gamma: float = 0.7) -> tuple[_Planted, Trace, Tensor]:
    model = _Planted(gamma)
    trace = capture(model, IDS % 10)
    return model, trace, trace.contribution[0, 0, 4]


@pytest.mark.parametrize("gamma", [0.7, -0.4])
def test_planted_jacobian(gamma: float) -> None:
    """Invariant 6: S = -gamma P. Subtracting the unperturbed input would add 1 to each eigenvalue."""
    model, trace, _ = planted(gamma)
    jacobian = layer_jacobian(model, trace, 0, 4, chunk=2)
    assert torch.equal(jacobian, -gamma * model.projector)
    expected = sorted([-gamma, -gamma, 0, 0, 0])
    assert symmetric_spectrum(jacobian).values.tolist() == pytest.approx(expected, abs=1e-12)


def test_planted_sweep() -> None:
    """P x_0 = 0, so b'(alpha a) = -gamma (1 + alpha) P a: constant for alpha > -1, flipped below."""
    model, trace, a = planted()
    expected = float((model.projector @ a).norm() / a.norm())
    cosines = alpha_sweep(model, trace, 0, 4, torch.tensor([-0.9, 0, 1, 5]))
    assert cosines.tolist() == pytest.approx([-expected] * 4)
    assert alpha_sweep(model, trace, 0, 4, [-3.0]).item() == pytest.approx(expected)


def test_planted_steering() -> None:
    """Along P a push keeps 1 - gamma = 0.3 of its length at any strength, across P all of it."""
    model, trace, _ = planted()
    v = torch.tensor([[3.0, 4, 0, 0, 0], [0, 0, 2, 0, 0], [1, 0, 1, 0, 0]])
    expected = torch.tensor([-0.7, 0, -0.35], dtype=torch.float64)[:, None].expand(3, 8)
    assert torch.allclose(steering_resistance(model, trace, 0, v), expected)
    for strength in (0.0, 0.01, -2.0):
        assert torch.allclose(surviving_gain(model, trace, 0, v, strength=strength, row=1), 1 + expected)
    assert steering_resistance(model, trace, 0, v[0], tokens=[0, 3]).shape == (2,)
    jacobian = layer_jacobian(model, trace, 0, 4)
    kept = unresisted_part(torch.stack([jacobian, 3 * jacobian]), v)
    assert torch.allclose(kept, v * torch.tensor([0.0, 0, 1, 1, 1]), atol=1e-6)


def test_linearity_error() -> None:
    model, trace, _ = planted()
    jacobian = layer_jacobian(model, trace, 0, 4)
    assert linearity_error(model, trace, 0, 4, jacobian, [0.5, -1]).max() < 1e-12  # a linear layer
    assert linearity_error(model, trace, 0, 4, 0.9 * jacobian, [0.5]).item() == pytest.approx(0.1)
    real = tiny_family("gpt2", dtype=torch.float64)
    trace = capture(real, IDS)
    errors = linearity_error(real, trace, 0, 4, layer_jacobian(real, trace, 0, 4), [1e-3, 2e-3, 0.5])
    assert errors[1] / errors[0] == pytest.approx(
        2, rel=0.02
    )  # second-order remainder over first-order change
    assert errors[2] > 0.01
    with pytest.raises(UsageError, match="alpha=0 leaves nothing"):
        linearity_error(real, trace, 0, 4, jacobian, [0.1, 0])


@pytest.mark.parametrize("family_name", ["neox-parallel", "gpt2"])
def test_steering_agrees_with_the_jacobian(family_name: str) -> None:
    model = tiny_family(family_name, dtype=torch.float64)
    trace = capture(model, IDS)
    jacobian = layer_jacobian(model, trace, LAYER, TOKEN, row=ROW)
    values, vectors = symmetric_spectrum(jacobian)
    where: dict[str, Any] = {"tokens": [TOKEN], "row": ROW}
    resisted = steering_resistance(model, trace, LAYER, 5 * vectors.T, **where)
    torch.testing.assert_close(resisted[:, 0], values)
    gain = surviving_gain(model, trace, LAYER, vectors.T, strength=1e-5, **where)
    torch.testing.assert_close(gain[:, 0], 1 + values, rtol=1e-4, atol=1e-4)
    # several vectors and tokens at once: row v, column t
    grid = steering_resistance(model, trace, LAYER, vectors.T[:3], tokens=[2, TOKEN], row=ROW)
    assert torch.allclose(grid[:, 1], values[:3])
    assert torch.allclose(
        grid[1], steering_resistance(model, trace, LAYER, vectors[:, 1], tokens=[2, TOKEN], row=ROW)
    )
    # finite strength: against the intervention on the whole model
    push = 0.3 * trace.x[LAYER + 1, ROW, TOKEN].norm() * vectors[:, 0]
    outside = by_intervention(model, LAYER, TOKEN, ROW)
    change = outside(push) - outside(torch.zeros_like(push))
    expected = 1 + float(change @ push / push.square().sum())
    gain = surviving_gain(model, trace, LAYER, vectors[:, 0], strength=0.3, **where)
    assert gain.item() == pytest.approx(expected, rel=1e-9)


# --- Refusals and fallbacks ---------------------------------------------------------------------------------


def test_layer_without_cache_runs_over_the_sequence_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    model, trace, _ = planted()
    with caplog.at_level(logging.INFO):
        NextLayer(model, trace, 0)
    assert (
        "layer 1 runs over whole sequences (token: UsageError: the layer takes no key-value cache)"
        in caplog.text
    )
    with pytest.raises(GnomonError, match="takes no key-value cache"):
        NextLayer(model, trace, 0, path="token")


def test_changed_weights_are_noticed() -> None:
    model = tiny_family("llama")
    trace = capture(model, IDS)
    model.model.layers[1].mlp.down_proj.weight.data *= 1.1
    with pytest.raises(GnomonError, match=r"Layer 1 .*differs from the captured contribution.*changed since"):
        layer_jacobian(model, trace, 0, 4)


def test_a_width_above_8192_needs_consent() -> None:
    x = torch.empty(1, 1, 1, 8193)
    trace = Trace.of(x.expand(3, 1, 2, -1), x.expand(2, 1, 2, -1), x.expand(2, 1, 2, -1))
    with pytest.raises(UsageError, match=r"width 8193 takes 0.3 GB .*limit 8192.*allow_large=True"):
        layer_jacobian(nn.Identity(), trace, 0, 0)
    with pytest.raises(UsageError, match="holds no layer calls"):  # consent given: the next check speaks
        layer_jacobian(nn.Identity(), trace, 0, 0, allow_large=True)


def test_bad_arguments() -> None:
    model = tiny_family("llama")
    padded = torch.cat([torch.zeros(2, 2, dtype=torch.long), IDS], dim=1)
    trace = capture(model, padded, padded != 0)
    for arguments, message in [
        ({"layer": 2}, r"layer=2 has no next layer in a model of 3. Use 0 to 1"),
        ({"row": 2}, r"row=2 is outside the trace's batch of 2"),
        ({"token": 1}, r"token=1 is padding or outside the sequence, whose tokens are 2 to 10"),
        ({"token": 11}, "token=11 is padding or outside"),
        ({"mode": "both"}, "mode='both' is unknown"),
        ({"path": "fast"}, "path='fast' is unknown. Use one of auto, token, sequence"),
        ({"chunk": 0}, "chunk=0 must be at least 1"),
    ]:
        with pytest.raises(UsageError, match=message):
            layer_jacobian(**({"model": model, "trace": trace, "layer": 0, "token": 4} | arguments))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="v has 3 entries, the residual stream 16"):
        steering_resistance(model, trace, 0, torch.ones(3))
    with pytest.raises(UsageError, match="zero or not finite"):
        surviving_gain(model, trace, 0, torch.zeros(2, 16), strength=0.1)
    with pytest.raises(UsageError, match="no token to measure at"):
        steering_resistance(model, trace, 0, torch.ones(16), tokens=[])
    with pytest.raises(UsageError, match="top=0"):
        decompose(torch.eye(2), torch.ones(2), top=0)


def test_jacobian_that_is_not_finite() -> None:
    """sqrt has an infinite slope at 0, where its value is finite."""

    class Root(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x.clamp_min(0).sqrt()

    model, _, _ = planted()
    model.h[1].mlp = Root()
    model.wte.weight.data[:] = 0
    with pytest.raises(NumericalFailure, match="Jacobian of layer 1 at token 4 is not finite"):
        layer_jacobian(model, capture(model, IDS % 10), 0, 4)
