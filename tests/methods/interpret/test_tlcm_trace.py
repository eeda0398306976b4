"""Capturing contributions: against each family's own forward pass and padding-free runs."""

from __future__ import annotations

import doctest
import subprocess
import sys

import pytest
import torch
from family_models import FAMILIES, tiny_family
from torch import nn

from gnomon.core.errors import GnomonError, NumericalFailure, UsageError
from gnomon.core.layers import Sublayers, sublayers
from gnomon.methods.interpret import tlcm
from gnomon.methods.interpret.tlcm import capture

IDS = torch.tensor([[5, 9, 3, 22, 31, 7, 3, 14, 9], [8, 30, 4, 4, 17, 26, 11, 39, 6]])


@pytest.mark.parametrize("family", FAMILIES)
def test_residual_stream_is_the_models_own(family: str) -> None:
    """Source of truth: output_hidden_states, whose last entry is unusable because it is final-normed."""
    model = tiny_family(family)
    trace = capture(model, IDS)
    with torch.no_grad():
        hidden = model(IDS, output_hidden_states=True).hidden_states
    assert trace.attn.shape == trace.mlp.shape == (3, 2, 9, 16)
    for index in range(3):
        torch.testing.assert_close(trace.x[index], hidden[index])
    assert (trace.x[3] - hidden[3]).abs().max() > 0.01
    # invariant 1
    error = (trace.x[1:] - trace.x[:-1] - trace.contribution).norm(dim=-1)
    assert (error < 1e-5 * trace.x[1:].norm(dim=-1)).all()
    assert (trace.attn.norm(dim=-1) > 0).all()
    assert (trace.mlp.norm(dim=-1) > 0).all()


@pytest.mark.parametrize("family", FAMILIES)
def test_half_precision_is_measured_in_float32(family: str) -> None:
    """Parts are hooked, not differenced: they hold bfloat16 values exactly, their sum is taken in float32."""
    trace = capture(tiny_family(family, dtype=torch.bfloat16), IDS)
    assert trace.x.dtype == trace.contribution.dtype == torch.float32
    assert torch.equal(trace.mlp.bfloat16().float(), trace.mlp)
    exact = capture(tiny_family(family, dtype=torch.bfloat16).float(), IDS)
    assert (trace.contribution - exact.contribution).norm() < 0.05 * exact.contribution.norm()


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("family", FAMILIES)
def test_padding_changes_nothing(family: str, side: str) -> None:
    model = tiny_family(family, dtype=torch.float64)
    alone = capture(model, IDS[1:, :6])
    real = slice(3, 9) if side == "left" else slice(0, 6)
    ids, mask = IDS.clone(), torch.zeros_like(IDS)
    ids[1, real], mask[0], mask[1, real] = IDS[1, :6], 1, 1
    padded = capture(model, ids, mask)
    torch.testing.assert_close(
        padded.contribution[:, 1, real], alone.contribution[:, 0], rtol=1e-9, atol=1e-9
    )
    assert padded.counted.sum() == 8 + 5  # without padding and the two first tokens
    assert padded.position[1].tolist()[real] == list(range(6))
    assert torch.equal(padded.select(padded.input_ids), torch.cat([IDS[0, 1:], IDS[1, 1:6]]))


def test_first_token_can_be_counted() -> None:
    model = tiny_family("llama")
    assert capture(model, IDS, skip_first=False).counted.all()
    assert capture(model, IDS).counted.sum() == 2 * 8


def test_dropout_is_off_and_modes_are_given_back() -> None:
    model = tiny_family("gpt2", resid_pdrop=0.5, embd_pdrop=0.5)
    expected = capture(model, IDS)
    model.train()
    model.transformer.h[1].eval()
    assert torch.equal(capture(model, IDS).x, expected.x)
    assert model.training
    assert model.transformer.h[0].mlp.training
    assert not model.transformer.h[1].mlp.training


def test_wrapped_models() -> None:
    peft = pytest.importorskip("peft")
    model = tiny_family("llama")
    plain = capture(model, IDS)
    assert torch.equal(capture(nn.DataParallel(model), IDS).x, plain.x)
    config = peft.LoraConfig(r=2, target_modules=["down_proj"], init_lora_weights=False)
    adapted = peft.get_peft_model(model, config)
    assert not torch.equal(capture(adapted, IDS).mlp, plain.mlp)  # adapters act


def test_hooks_are_removed_even_after_an_error() -> None:
    model = tiny_family("llama")
    with pytest.raises(IndexError):
        capture(model, IDS + 1000)
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        ([[5, 6, 7], [5, 6, 0]], None, r"ends with the padding token 0 and there is no attention_mask"),
        ([[5, 6, 7], [0, 0, 6]], None, r"begins or ends with the padding token 0"),
        ([[5, 6, 7]], [[1, 1]], r"shape \(1, 2\), input_ids \(1, 3\)"),
        ([[5]], None, r"positions >= 2\], got shape \(1, 1\)"),
    ],
)
def test_bad_batches(ids: list[list[int]], mask: list[list[int]] | None, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        capture(tiny_family("llama"), torch.tensor(ids), None if mask is None else torch.tensor(mask))


def test_pad_token_may_be_text_if_the_mask_says_so() -> None:
    ids = torch.tensor([[5, 6, 0]])
    assert capture(tiny_family("llama"), ids, torch.ones_like(ids)).counted.sum() == 2


def test_an_additive_mask_is_refused() -> None:
    """Read as 1 and 0 it would count the padding and mask the text."""
    mask = torch.ones_like(IDS).float()
    mask[:, 0] = -1e9
    with pytest.raises(UsageError, match="additive"):
        capture(tiny_family("llama"), IDS, mask)


def test_numbers_that_left_the_numbers_are_said_to_be_that() -> None:
    model = tiny_family("llama")
    with torch.no_grad():
        next(model.parameters())[0, 0] = torch.nan  # of the embedding: token 0 reads it
    with pytest.raises(NumericalFailure, match="not finite"):
        capture(model, torch.zeros_like(IDS), torch.ones_like(IDS))


def test_residual_stream_with_a_norm_on_it_is_refused() -> None:
    """OPT-350m normalises after each addition, so contributions don't add up."""
    with pytest.raises(GnomonError, match=r"Layer 0 \(OPTDecoderLayer\): input \+ attention \+ MLP misses"):
        capture(tiny_family("opt", do_layer_norm_before=False), IDS)


@pytest.mark.parametrize("family", ["gemma2", "olmo2"])
def test_hook_before_the_post_norm_is_noticed(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def naive(layer: nn.Module) -> Sublayers:
        parts = sublayers(layer)
        return Sublayers(
            attn=parts.attn, mlp=parts.mlp, attn_out=parts.attn, mlp_out=parts.mlp, parallel=parts.parallel
        )

    monkeypatch.setattr("gnomon.methods.interpret.tlcm.trace.sublayers", naive)
    with pytest.raises(GnomonError, match="misreads its layout"):
        capture(tiny_family(family), IDS)


def test_import_is_light() -> None:
    heavy = ("transformers", "pandas", "scipy")
    code = f"import sys, gnomon.methods.interpret.tlcm; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_example_in_the_docstring() -> None:
    outcome = doctest.testmod(tlcm)
    assert outcome.attempted > 5
    assert outcome.failed == 0
