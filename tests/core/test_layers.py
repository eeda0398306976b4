"""Layer finding, against hand-known module names and each model's own forward pass."""

from __future__ import annotations

import pytest
import torch
import transformers
from family_models import FAMILIES, PARALLEL, tiny_family
from torch import nn

from gnomon.core.errors import UsageError
from gnomon.core.layers import decoder_stack, hidden_of, is_conv1d, linears, sublayers, unwrap

# family -> (list of layers, final norm, attention output, MLP output, linear maps a layer): read off
EXPECTED = {
    "llama": ("model.layers", "norm", "self_attn", "mlp", 7),
    "mistral": ("model.layers", "norm", "self_attn", "mlp", 7),
    "qwen2": ("model.layers", "norm", "self_attn", "mlp", 7),
    "qwen3": ("model.layers", "norm", "self_attn", "mlp", 7),
    "gemma": ("model.layers", "norm", "self_attn", "mlp", 7),
    "gemma2": ("model.layers", "norm", "post_attention_layernorm", "post_feedforward_layernorm", 7),
    "olmo": ("model.layers", "norm", "self_attn", "mlp", 7),
    "olmo2": ("model.layers", "norm", "post_attention_layernorm", "post_feedforward_layernorm", 7),
    "phi3": ("model.layers", "norm", "self_attn", "mlp", 4),  # fused qkv and gate-up
    "phi": ("model.layers", "final_layernorm", "self_attn", "mlp", 6),
    "gpt2": ("transformer.h", "ln_f", "attn", "mlp", 4),
    "neox": ("gpt_neox.layers", "final_layer_norm", "attention", "mlp", 4),
    "neox-parallel": ("gpt_neox.layers", "final_layer_norm", "attention", "mlp", 4),
    "opt": ("model.decoder.layers", "final_layer_norm", "self_attn", "fc2", 6),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_parts_of_each_family(family: str) -> None:
    model = tiny_family(family)
    where, norm, attn_out, mlp_out, per_layer = EXPECTED[family]
    stack = decoder_stack(model)
    owner = model.get_submodule(where.rpartition(".")[0])
    assert stack.name == where
    assert stack.layers == list(model.get_submodule(where))
    assert stack.runner is owner
    assert stack.final_norm is getattr(owner, norm)
    assert stack.embedding is model.get_input_embeddings()
    assert stack.head is model.get_output_embeddings()
    for layer in stack.layers:
        parts = sublayers(layer)
        assert parts.attn_out is getattr(layer, attn_out)
        assert parts.mlp_out is getattr(layer, mlp_out)
        assert parts.parallel == (family in PARALLEL)
    assert len(linears(model)) == 3 * per_layer
    assert all(model.get_submodule(name) is module for name, module in linears(model).items())


@pytest.mark.parametrize("family", FAMILIES)
def test_what_is_added_is_what_the_model_adds(family: str) -> None:
    """Source of truth: silencing both outputs must turn the layer into the identity."""
    model = tiny_family(family)
    layer = decoder_stack(model).layers[1]
    parts = sublayers(layer)
    seen: dict[str, torch.Tensor] = {}

    def silence(_module: nn.Module, _inputs: object, output: object) -> object:
        return (0 * output[0], *output[1:]) if isinstance(output, tuple) else 0 * output  # type: ignore[operator]

    hooks = [part.register_forward_hook(silence) for part in (parts.attn_out, parts.mlp_out)]
    hooks.append(layer.register_forward_pre_hook(lambda _m, inputs: seen.update(before=inputs[0])))
    hooks.append(layer.register_forward_hook(lambda _m, _i, output: seen.update(after=hidden_of(output))))
    ids = torch.arange(3, 11)[None]
    with torch.no_grad():
        model(ids)
        assert torch.equal(seen["before"], seen["after"])
        for hook in hooks[:2]:
            hook.remove()
        model(ids)
    assert not torch.equal(seen["before"], seen["after"])


def test_conv1d_is_found_among_linears() -> None:
    kinds = {type(module).__name__ for module in linears(tiny_family("gpt2")).values()}
    assert kinds == {"Conv1D"}
    assert not is_conv1d(nn.Conv1d(2, 2, 1))


def test_wrappers_are_stripped() -> None:
    model = tiny_family("llama")
    for wrapped in (nn.DataParallel(model), torch.compile(model), nn.DataParallel(nn.DataParallel(model))):
        assert unwrap(wrapped) is model
        assert decoder_stack(wrapped).layers == list(model.model.layers)


def test_adapters_are_not_counted_as_linears() -> None:
    peft = pytest.importorskip("peft")
    plain = set(linears(tiny_family("llama")))
    adapted = peft.get_peft_model(
        tiny_family("llama"),
        peft.LoraConfig(r=2, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM"),
    )
    found = linears(adapted)
    assert {name.removesuffix(".base_layer") for name in found} == plain
    assert sum(name.endswith(".base_layer") for name in found) == 6
    assert decoder_stack(adapted).name == "model.layers"


def test_large_model_without_weights() -> None:
    """Only shapes exist on the meta device; Llama-3.1-8B has 32 layers with 7 linear maps."""
    config = transformers.LlamaConfig(
        hidden_size=4096, intermediate_size=14336, num_hidden_layers=32, num_attention_heads=32,
        num_key_value_heads=8, vocab_size=128256,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    assert len(decoder_stack(model).layers) == 32
    weights = sum(module.weight.numel() for module in linears(model).values())
    assert weights == 32 * (2 * 4096**2 + 2 * 4096 * 1024 + 3 * 4096 * 14336)


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attn, self.mlp = nn.Identity(), nn.Identity()


class _NanoGPT(nn.Module):
    """Layers inside a ModuleDict, which has no forward pass of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.transformer = nn.ModuleDict(
            {"wte": nn.Embedding(4, 2), "h": nn.ModuleList([_Block(), _Block()])}
        )

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return torch.zeros(input_ids.shape)


def test_plain_torch_model() -> None:
    model = _NanoGPT()
    stack = decoder_stack(model)
    assert stack.name == "transformer.h"
    assert stack.runner is model
    assert stack.final_norm is None
    assert stack.head is None


def test_vision_language_model_uses_its_language_part() -> None:
    """Two lists of layers with attention; Transformers itself says which is the decoder."""

    class TwoTowers(_NanoGPT):
        def __init__(self) -> None:
            super().__init__()
            self.vision = nn.ModuleList([_Block()])

    with pytest.raises(UsageError, match=r"several lists of layers \(transformer\.h, vision\)"):
        decoder_stack(TwoTowers())
    model = TwoTowers()
    object.__setattr__(model, "get_decoder", lambda: model.transformer)
    assert decoder_stack(model).name == "transformer.h"


def test_errors_name_the_cause() -> None:
    with pytest.raises(UsageError, match=r"Sequential holds no list of decoder layers.*self_attn"):
        decoder_stack(nn.Sequential(nn.Linear(2, 2)))
    block = _Block()
    del block.mlp
    with pytest.raises(UsageError, match=r"_Block has no MLP module called mlp.*it owns attn"):
        sublayers(block)
    with pytest.raises(UsageError, match="no attention module"):
        sublayers(nn.Linear(2, 2))
    with pytest.raises(UsageError, match="starts with one, got str"):
        hidden_of(("text",))
