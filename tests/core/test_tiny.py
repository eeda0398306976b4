"""Tiny models and the byte-level tokenizer. Truth: hand counts of parameters, causality, Python's UTF-8 codec."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer
from transformers.convert_slow_tokenizer import bytes_to_unicode

from gnomon.core import tiny
from gnomon.core.errors import UsageError
from gnomon.core.seeding import seeded

torch.set_num_threads(1)
TOKENIZER = tiny.byte_tokenizer()


def test_llama_has_the_parameters_of_the_table() -> None:
    for name, size in tiny.SIZES.items():
        h, kv = size.hidden, size.hidden * size.kv_heads // size.heads
        layer = 2 * h * h + 2 * h * kv + 3 * h * size.inner + 2 * h  # q, o; k, v; gate, up, down; two norms
        expected = 259 * h + size.layers * layer + h  # tied embedding, layers, last norm
        with torch.device("meta"):
            model = tiny.build(f"tiny:llama-{name}")
        assert model.num_parameters() == expected
        assert f"{expected:,}" in (tiny.__doc__ or "")


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_every_family_is_a_causal_model_of_the_stated_shape(architecture: str) -> None:
    size = tiny.SIZES["10k"]
    with seeded(1):
        model = tiny.build(f"tiny:{architecture}-10k")
    config = model.config
    assert config.model_type == architecture and not model.training
    assert (config.num_hidden_layers, config.hidden_size, config.num_attention_heads) == (3, 16, 4)
    assert model.get_output_embeddings().weight is model.get_input_embeddings().weight  # tied
    x = torch.arange(40).view(1, -1)
    changed = torch.cat([x[:, :-1], torch.tensor([[200]])], dim=1)
    with torch.no_grad():
        a, b = model(x).logits, model(changed).logits
    assert a.shape == (1, 40, 259)
    torch.testing.assert_close(a[:, :-1], b[:, :-1], rtol=0, atol=1e-6)  # the past doesn't see the last token
    assert (a[:, -1] - b[:, -1]).abs().max() > 1e-3
    with torch.no_grad():  # no dropout anywhere: training mode computes the same
        torch.testing.assert_close(model.train()(x).logits, a, rtol=0, atol=1e-6)
    assert model(x[:, :1].expand(1, size.positions)).logits.isfinite().all()


@pytest.mark.parametrize("architecture", tiny.ARCHITECTURES)
def test_families_of_a_size_have_equal_feed_forward_layers(architecture: str) -> None:
    """10 h^2 numbers a layer in every family at the two larger sizes, biases aside (a gated layer has 3 matrices)."""
    with torch.device("meta"):
        model = tiny.build(f"tiny:{architecture}-0.5m")
    inner = ("gate", "up_proj", "down_proj", "fc", "mlp", "h_to_4h")
    named = [(n, p) for n, p in model.named_parameters() if any(i in n for i in inner) and p.ndim == 2]
    assert sum(p.numel() for _, p in named) == 4 * 10 * 96 * 96


def test_weights_come_from_the_ambient_random_state() -> None:
    def first_weights(seed: int) -> torch.Tensor:
        with seeded(seed):
            return tiny.build("tiny:llama-10k").get_input_embeddings().weight

    assert torch.equal(first_weights(0), first_weights(0))
    assert not torch.equal(first_weights(0), first_weights(1))


@pytest.mark.parametrize("name", ["tiny:gpt_neox-10k", "tiny:gpt-neox-10k", "tiny:GPT-NeoX_10k".lower()])
def test_dash_and_underscore_are_equal(name: str) -> None:
    assert tiny.parse(name) == ("gpt_neox", "10k")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("tiny:lama-10k", "architecture of a tiny model 'lama'. Did you mean 'llama'"),
        ("tiny:llama-1m", "size of tiny:llama '1m'. Did you mean '3m'"),
        ("tiny:llama", "not of the form tiny:<architecture>-<size>"),
        ("tiny:", "not of the form"),
    ],
)
def test_unknown_names_are_refused_with_the_nearest(name: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        tiny.build(name)


@settings(max_examples=50, deadline=None)
@given(st.text(st.characters(exclude_categories=["Cs"])))
def test_every_text_round_trips_and_its_tokens_are_its_bytes(text: str) -> None:
    encoded = TOKENIZER(text, return_offsets_mapping=True)
    assert encoded["input_ids"] == list(text.encode())
    assert TOKENIZER.decode(encoded["input_ids"]) == text
    per_character = [(i, i + 1) for i, letter in enumerate(text) for _ in letter.encode()]
    assert encoded["offset_mapping"] == per_character


@pytest.mark.parametrize(
    "text", ["", " \t\r\n\n x", "it 's a , b .", "é日🙂\u200d\0", "\ufeff<pad>", "e\u0301"]
)
def test_awkward_texts_round_trip(text: str) -> None:
    assert (
        TOKENIZER(text)["input_ids"] == list(text.encode())
        and TOKENIZER.decode(TOKENIZER(text)["input_ids"]) == text
    )


def test_bytes_have_the_letters_that_byte_level_tokenizers_share() -> None:
    assert tiny._byte_letters() == [bytes_to_unicode()[byte] for byte in range(256)]


def test_tokenizer_survives_a_folder(tmp_path: Path) -> None:
    TOKENIZER.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    ids = [TOKENIZER.bos_token_id, *b"a\xc3\xa9", TOKENIZER.eos_token_id]
    assert again("<|bos|>aé<|eos|>")["input_ids"] == ids == [256, 97, 195, 169, 257]
    assert (again.pad_token_id, len(again)) == (258, 259) == (TOKENIZER.pad_token_id, len(TOKENIZER))
    assert again.decode(ids, skip_special_tokens=True) == "aé"
    padded = again(["a", "bcd"], padding=True, return_tensors="pt")
    assert padded["input_ids"].tolist() == [[97, 258, 258], [98, 99, 100]]
