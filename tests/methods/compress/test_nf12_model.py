"""Layers and whole models on planes: equal outputs bit for bit, shared weights, casts, copies, files, refusals."""

from __future__ import annotations

import copy
import logging
import math
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from family_models import FAMILIES, tiny_family
from nf12_oracle import gaussian, same_bits
from torch import Tensor, nn
from torch.nn import functional as F

from gnomon.core.errors import UsageError
from gnomon.methods.compress.nf12 import (
    NF12Config,
    NF12Conv1D,
    NF12Embedding,
    NF12Linear,
    NF12Weight,
    compress_model,
    decompress_model,
    encode,
    install,
    pack,
)

pytestmark = pytest.mark.usefixtures("torch_products")

EVERYTHING = NF12Config(min_elements=0, raw_share=1.0, fused_rows_cpu=0)
"""Tiny matrices too, and always the product that torch makes."""
TOKENS = torch.randint(3, 39, (2, 9), generator=torch.Generator().manual_seed(0))


def family(name: str = "llama", dtype: torch.dtype = torch.bfloat16, **settings: Any) -> Any:
    """A model whose weights are BF16 values, held in `dtype`."""
    return tiny_family(name, dtype=torch.bfloat16, **settings).to(dtype)


class Plain(nn.Module):
    """No Transformers: an embedding tied to the output layer, and one layer used in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(40, 16, padding_idx=3)
        self.body = nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16))
        self.again = self.body[0]
        self.out = nn.Linear(16, 40, bias=False)
        self.out.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        return self.out(self.again(self.body(self.embedding(tokens))))


def plain() -> Plain:
    torch.nn.init.normal_(
        (model := Plain()).embedding.weight, std=0.3, generator=torch.Generator().manual_seed(0)
    )
    return model.to(torch.bfloat16).eval()


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, logger="gnomon")


# ---- whole models


@pytest.mark.parametrize("name", sorted(FAMILIES))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_outputs_are_bit_for_bit_those_of_the_model(name: str, dtype: torch.dtype) -> None:
    model = family(name, dtype)
    state = copy.deepcopy(model.state_dict())
    expected = model(TOKENS).logits
    assert compress_model(model, config=EVERYTHING) is model
    assert sum(isinstance(m, NF12Weight) for m in model.modules()) > 10
    assert sum(type(m) is nn.Linear for m in model.modules()) == (name == "olmo")  # keeps a last parameter
    assert torch.equal(model(TOKENS).logits, expected)
    decompress_model(model)
    assert torch.equal(model(TOKENS).logits, expected)
    assert {key: value.dtype for key, value in model.state_dict().items()} == {
        key: value.dtype for key, value in state.items()
    }
    assert all(torch.equal(value, state[key]) for key, value in model.state_dict().items())


def test_fused_layers_are_close_and_generate_the_same_tokens() -> None:
    model = family(dtype=torch.float32)
    expected, tokens = model(TOKENS).logits, model.generate(TOKENS, max_new_tokens=5, do_sample=False)
    compress_model(model, config=NF12Config(min_elements=0, raw_share=1.0, fused_rows_cpu=1 << 30))
    layers = [m for m in model.modules() if isinstance(m, NF12Linear)]
    assert {(layer.mode, layer.config.fused_rows_cpu) for layer in layers} == {("auto", 1 << 30)}
    torch.testing.assert_close(model(TOKENS).logits, expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(model.generate(TOKENS, max_new_tokens=5, do_sample=False), tokens)


def test_gradients_reach_the_input_but_no_matrix() -> None:
    model, twin = family(dtype=torch.float32), family(dtype=torch.float32)
    compress_model(model, config=EVERYTHING)
    gradients = []
    for each in (model, twin):
        x = torch.randn(1, 5, 16, generator=torch.Generator().manual_seed(0)).requires_grad_()
        each(inputs_embeds=x).logits.square().sum().backward()
        gradients.append(x.grad)
    torch.testing.assert_close(*gradients)
    assert all(p.ndim == 1 for p in model.parameters())


def test_shared_weights_and_modules_stay_shared() -> None:
    model = plain()
    expected = model(TOKENS)
    compress_model(model, config=EVERYTHING)
    assert isinstance(model.embedding, NF12Embedding)
    assert model.embedding.weight is model.out.weight
    assert model.again is model.body[0]
    assert torch.equal(model(TOKENS), expected)
    twin = copy.deepcopy(model)
    assert twin.embedding.weight is twin.out.weight is not model.out.weight
    decompress_model(model)
    assert model.embedding.weight is model.out.weight
    assert model.again is model.body[0]
    assert model.embedding.padding_idx == 3
    assert torch.equal(model(TOKENS), expected)


def test_gpt2_keeps_its_orientation() -> None:
    """A `Conv1D` is stored as its file has it: inputs first."""
    model = family("gpt2")
    w = model.transformer.h[0].mlp.c_fc.weight.detach().clone()
    compress_model(model, config=EVERYTHING)
    layer = model.transformer.h[0].mlp.c_fc
    assert isinstance(layer, NF12Conv1D)
    assert same_bits(layer.weight.tensor.decode(), w)


def test_small_and_zero_matrices_stay_and_the_log_says_why(caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Sequential(nn.Linear(256, 256), nn.Linear(256, 255), nn.Linear(256, 256)).to(torch.bfloat16)
    model[0].weight.data = gaussian(256, 256)
    model[2].weight.data.zero_()
    compress_model(model)
    assert [type(m) for m in model] == [NF12Linear, nn.Linear, nn.Linear]
    assert "NF12: 1 matrices, 12." in caplog.text
    assert "1.weight: 65280 elements, fewer than 65536" in caplog.text
    assert "2.weight: its planes would take 175.0% of the BF16 bytes" in caplog.text


def test_skip_takes_names_and_patterns_of_any_user() -> None:
    model = plain()
    compress_model(model, skip="out", config=EVERYTHING)  # tied: the embedding is kept with it
    assert isinstance(model.body[0], NF12Linear)
    assert type(model.embedding) is nn.Embedding
    assert model.embedding.weight is model.out.weight
    model = family()
    compress_model(model, skip=["*.down_proj", "lm_head.weight"], config=EVERYTHING)
    kept = {name.rpartition(".")[2] for name, m in model.named_modules() if type(m) is nn.Linear}
    assert kept == {"down_proj", "lm_head"}
    with pytest.raises(UsageError, match=r"Unknown layer in skip 'lm_haed'. Did you mean 'lm_head.weight'"):
        compress_model(family(), skip="lm_haed")


class Scaled(nn.Embedding):
    def forward(self, tokens: Tensor) -> Tensor:
        return super().forward(tokens) * 3


def test_weights_that_somebody_else_uses_are_kept() -> None:
    model = plain()
    scaled = Scaled(40, 16).to(torch.bfloat16)
    scaled.weight = model.out.weight
    model.embedding = scaled
    expected = model(TOKENS)
    compress_model(model, config=EVERYTHING)
    assert model.embedding is scaled
    assert type(model.out) is nn.Linear
    assert torch.equal(model(TOKENS), expected)


def test_float32_with_other_values_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Nothing in LlamaForCausalLM .* no bfloat16 equals.*bfloat16"):
        compress_model(tiny_family("llama"), config=EVERYTHING)


def test_refused_models() -> None:
    with pytest.raises(UsageError, match=r"Nothing in LlamaForCausalLM .* 640 elements, fewer than 65536"):
        compress_model(family())
    with pytest.raises(UsageError, match="it has no linear layers"):
        compress_model(nn.Sequential(nn.LayerNorm(4)))
    with pytest.raises(UsageError, match=r"used by the model itself \(Linear\)"):
        compress_model(nn.Linear(16, 16), config=EVERYTHING)
    with pytest.raises(UsageError, match="meta device"):
        compress_model(plain().to("meta"), config=EVERYTHING)
    with pytest.raises(UsageError, match="Plain has no NF12 layers"):
        decompress_model(plain())


def test_a_model_of_which_only_a_part_is_loaded_is_left_as_it_is() -> None:
    """accelerate leaves layers of a device map on the meta device."""
    model = plain()
    model.out = nn.Linear(16, 40, device="meta")
    with pytest.raises(UsageError, match=r"out\.weight is on the meta device"):
        compress_model(model, config=EVERYTHING)
    assert not any(isinstance(m, NF12Weight) for m in model.modules())


@pytest.mark.parametrize(("inputs", "outputs"), [(0, 8), (8, 0)])
def test_an_empty_matrix_is_kept(inputs: int, outputs: int) -> None:
    model = plain()
    model.empty = nn.utils.skip_init(nn.Linear, inputs, outputs, dtype=torch.bfloat16)
    compress_model(model, config=EVERYTHING)
    assert type(model.empty) is nn.Linear


@pytest.mark.parametrize("tied", [True, False])
def test_a_transformers_model_keeps_one_parameter(tied: bool, caplog: pytest.LogCaptureFixture) -> None:
    """OLMo's norms have no weights, and `model.dtype` needs one. A module of somebody's own needn't have any."""
    caplog.set_level(logging.INFO, logger="gnomon")
    model = family("olmo", tie_word_embeddings=tied)
    before = model(TOKENS).logits
    compress_model(model, config=EVERYTHING)
    [(name, _)] = model.named_parameters()
    assert name.endswith("k_proj.weight")  # the smallest
    assert "k_proj.weight: the model's last parameter" in caplog.text
    assert (model.dtype, model.device.type) == (torch.bfloat16, "cpu")
    assert torch.equal(model(TOKENS).logits, before)
    own = compress_model(nn.Sequential(nn.Linear(16, 16, bias=False).bfloat16()), config=EVERYTHING)
    assert not list(own.parameters())


def test_what_only_a_tensor_has_is_refused_with_the_way_out() -> None:
    weight = compress_model(plain(), config=EVERYTHING).out.weight
    for name in ("T", "size", "data"):
        with pytest.raises(AttributeError, match=r"the matrix is encoded\. Decode it"):
            getattr(weight, name)
    with pytest.raises(AttributeError, match="no attribute 'stranger'"):
        getattr(weight, "stranger")  # noqa: B009


def test_hooks_are_not_lost_silently() -> None:
    model = plain()
    hook = model.body[0].register_forward_hook(lambda *_: None)
    with pytest.raises(UsageError, match=r"body\.0 has hooks"):
        compress_model(model, config=EVERYTHING)
    assert not any(isinstance(m, NF12Weight) for m in model.modules())
    hook.remove()
    compress_model(model, config=EVERYTHING)


def test_saving_planes_under_a_plain_config_is_refused(tmp_path: Any) -> None:
    model = compress_model(family(), config=EVERYTHING)
    for each in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        with pytest.raises(UsageError, match=r"nf12\.save_nf12"):
            each.save_pretrained(tmp_path)
    assert not list(tmp_path.iterdir())
    decompress_model(model).save_pretrained(tmp_path)
    assert (tmp_path / "model.safetensors").exists()


# ---- layers


def layer(dtype: torch.dtype = torch.bfloat16) -> NF12Linear:
    w = gaussian(24, 40)
    w[::3, 2] = math.nan  # payloads in the verbatim rows would not survive a cast
    w.view(torch.int16)[3, 2] = 0x7F81
    bias = nn.Parameter(torch.ones(24, dtype=dtype))
    return NF12Linear(NF12Weight(encode(w), dtype), bias)


CASTS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "to float32": lambda m: m.to(torch.float32),
    "half": lambda m: m.half(),
    "double": lambda m: m.double(),
    "deepcopy": copy.deepcopy,
    "pickle": lambda m: pickle.loads(pickle.dumps(m)),
    "share_memory": lambda m: m.share_memory(),
    "inside another": lambda m: nn.Sequential(m).to("cpu", torch.float16)[0],
}


@pytest.mark.parametrize("cast", CASTS)
def test_planes_survive_casts_and_copies(cast: str) -> None:
    before = layer().weight.tensor
    after = CASTS[cast](layer())
    t = after.weight.tensor
    assert (t.sm.dtype, t.ex.dtype, t.esc.dtype) == (torch.uint8, torch.int32, torch.bfloat16)
    assert same_bits(t.decode(), before.decode())
    assert (t.base, t.shape) == (before.base, before.shape)
    assert after.weight.dtype == after.bias.dtype  # what is presented follows the cast


def test_moving_to_meta_and_back_empty() -> None:
    moved = layer().to("meta")
    assert moved.weight.device.type == "meta"
    filled = moved.to_empty(device="cpu")
    filled.load_state_dict(layer().state_dict())
    assert same_bits(filled.weight.tensor.decode(), layer().weight.tensor.decode())


def test_embedding_rows_follow_the_dtype() -> None:
    w = gaussian(40, 24)
    tokens = torch.tensor([[0, 39], [7, 7]])
    embedding = NF12Embedding(NF12Weight(encode(w)), padding_idx=0)
    assert torch.equal(embedding(tokens), F.embedding(tokens, w, padding_idx=0))
    assert torch.equal(embedding.float()(tokens), F.embedding(tokens, w.float()))
    with pytest.raises(UsageError, match="outside 0 … 39"):
        embedding(torch.tensor([40]))


def test_scaled_embeddings_round_their_scale_as_transformers_does() -> None:
    """3.3 is 3.296875 in bfloat16; BART's scale is a plain number and isn't rounded."""
    from transformers.models.bart.modeling_bart import BartScaledWordEmbedding
    from transformers.models.gemma.modeling_gemma import GemmaTextScaledWordEmbedding

    for kind in (GemmaTextScaledWordEmbedding, BartScaledWordEmbedding):
        model = nn.Sequential(kind(40, 16, 3, embed_scale=3.3)).to(torch.float32)
        model[0].weight = nn.Parameter(gaussian(40, 16))
        expected = model(TOKENS)
        twin = pickle.loads(pickle.dumps(compress_model(model, config=EVERYTHING)))
        assert torch.equal(twin(TOKENS), expected)
        assert "embed_scale=3.3" in repr(twin)
        assert type(decompress_model(twin)[0]) is kind
        assert torch.equal(twin(TOKENS), expected)


def test_state_dict_keys_are_the_container_and_round_trip() -> None:
    model = layer()
    state = model.state_dict()
    assert set(state) == {*pack("weight", model.weight.tensor), "bias"}
    other = NF12Linear(NF12Weight(encode(gaussian(24, 40, seed=1), 112)), nn.Parameter(torch.zeros(24)))
    assert other.weight.base != model.weight.base
    assert len(other.weight.nf12_esc) != len(model.weight.nf12_esc)
    other.load_state_dict(state)
    assert same_bits(other.weight.tensor.decode(), model.weight.tensor.decode())
    assert other.weight.nf12_sm.data_ptr() != state["weight.nf12_sm"].data_ptr()
    other.load_state_dict(state, assign=True)
    assert other.weight.nf12_sm.data_ptr() == state["weight.nf12_sm"].data_ptr()
    alone = NF12Weight(encode(gaussian(24, 40)))
    alone.load_state_dict(model.weight.state_dict())
    assert alone.base == model.weight.base


def test_a_damaged_state_dict_is_refused() -> None:
    state = layer().state_dict()
    damaged = state | {"weight.nf12_esc": state["weight.nf12_esc"][:1]}
    with pytest.raises(RuntimeError, match=r"weight: it has 1 verbatim rows, its meta row says 8"):
        layer().load_state_dict(damaged)
    with pytest.raises(RuntimeError, match=r"\(24, 32\) in the state dict and \(24, 40\) in the model"):
        layer().load_state_dict(state | pack("weight", encode(gaussian(24, 32))))
    with pytest.raises(RuntimeError, match=r"Missing key.*weight\.nf12_ex"):
        layer().load_state_dict({key: value for key, value in state.items() if "nf12_ex" not in key})
    with pytest.raises(RuntimeError, match=r"Unexpected key.*weight\.nf12_new"):
        layer().load_state_dict(state | {"weight.nf12_new": torch.zeros(1)})


def test_repr_says_the_size() -> None:
    text = repr(nn.ModuleList([layer(), NF12Embedding(NF12Weight(encode(gaussian(40, 24))), 3)]))
    assert "in_features=40, out_features=24, bias=True, mode=auto" in text
    assert "24 x 40, " in text
    assert "bits a weight, base=108" in text
    assert "40, 24, padding_idx=3" in text


def test_an_unknown_mode_is_refused() -> None:
    with pytest.raises(UsageError, match="Unknown mode 'slow'"):
        NF12Linear(layer().weight, mode="slow")


# ---- loading


@pytest.mark.parametrize("name", ["llama", "gemma", "gpt2"])
def test_install_fills_a_skeleton(name: str) -> None:
    model = family(name)
    matrices = {key: value for key, value in model.named_parameters() if value.ndim == 2}  # tied ones once
    skeleton = copy.deepcopy(model)
    for key in matrices:
        skeleton.get_parameter(key).data.fill_(math.nan)
    install(skeleton, {key: encode(value) for key, value in matrices.items()}, config=EVERYTHING)
    assert all(m.config is EVERYTHING for m in skeleton.modules() if isinstance(m, NF12Linear))
    assert torch.equal(skeleton(TOKENS).logits, model(TOKENS).logits)
    assert all(parameter.ndim == 1 for parameter in skeleton.parameters())
    with pytest.raises(UsageError, match=r"nf12\.save_nf12"):
        skeleton.save_pretrained("nowhere")


def test_install_decodes_for_a_class_that_uses_its_weight_in_its_own_way() -> None:
    model = plain()
    model.embedding = Scaled(40, 16)
    model.embedding.weight = model.out.weight
    expected, t = model(TOKENS), encode(model.out.weight)
    model.out.weight.data.fill_(math.nan)
    model.embedding.register_forward_hook(lambda *_: None)  # of a layer that stays, so nothing is lost
    install(model, {"embedding.weight": t})
    assert torch.equal(model(TOKENS), expected)
    assert isinstance(model.out.weight, nn.Parameter)
    assert model.out.weight is model.embedding.weight


def test_install_refuses_strangers() -> None:
    t = encode(gaussian(16, 16))
    with pytest.raises(UsageError, match=r"Unknown parameter 'body\.1\.wieght'"):
        install(plain(), {"body.1.wieght": t})
    with pytest.raises(UsageError, match=r"out\.weight is \(40, 16\) in the model, but .* \(16, 16\)"):
        install(plain(), {"out.weight": t})


@pytest.mark.parametrize("mode", ["reverse", "forward"])
def test_jacobians_of_a_model_on_planes(mode: str) -> None:
    """`gnomon run tlcm --model D`: truth is the plain model. Forward mode is `torch.func.jvp`."""
    from gnomon.methods.interpret import tlcm

    found = []
    for model in (
        family(dtype=torch.float32),
        compress_model(family(dtype=torch.float32), config=EVERYTHING),
    ):
        trace = tlcm.capture(model, TOKENS)
        found.append(tlcm.layer_jacobian(model, trace, 0, 4, mode=mode))
    assert torch.equal(found[0], found[1])
    assert found[0].norm() > 0.1
