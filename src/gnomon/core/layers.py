"""Find the decoder layers of a Transformers-style model, and what each adds to the residual stream.

Nothing here knows a model class by name. A decoder layer is a module that owns an attention module; the
stack is the outermost list made of such layers only. One table of attribute names (below) covers Llama,
Mistral, Qwen 2/3, Gemma 1-3, OLMo 1/2, Phi 1-3, GPT-2, GPT-J, GPT-NeoX, OPT, Falcon, MPT and their relatives.

Notation: B sequences, T positions, d hidden width.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from torch import Tensor, nn

from .errors import UsageError

ATTENTION = ("self_attn", "attn", "attention", "self_attention")
MLP = ("mlp", "feed_forward", "ffn", "block_sparse_moe")
LAST_MLP_LINEAR = ("fc2",)  # OPT has no MLP module: its second linear layer writes to the residual stream
FINAL_NORM = ("norm", "ln_f", "final_layer_norm", "final_layernorm", "norm_f")
# A norm that sits between a sublayer and the residual addition, as (after attention, after the MLP). Only the
# second name decides: Llama also owns a `post_attention_layernorm`, but there it is the norm before the MLP.
POST_NORMS = (
    ("post_self_attn_layernorm", "post_mlp_layernorm"),  # GLM-4
    ("post_attention_layernorm", "post_feedforward_layernorm"),  # Gemma 2/3, OLMo 2/3
)


@dataclass(frozen=True)
class DecoderStack:
    """The decoder of a language model and the parts around it."""

    root: nn.Module
    """The model without wrappers (DDP, torch.compile, peft)."""
    name: str
    """Dotted name of the list of layers inside `root`."""
    layers: Sequence[nn.Module]
    runner: nn.Module
    """The smallest module whose forward pass runs all layers (no language-model head)."""
    embedding: nn.Module | None
    final_norm: nn.Module | None
    head: nn.Module | None
    """Projection to the vocabulary; None on a headless model."""


@dataclass(frozen=True)
class Sublayers:
    """The two halves of a decoder layer.

    `attn_out` and `mlp_out` are the modules whose output is what is *added* to the residual stream: the
    post-norm where there is one (Gemma 2, OLMo 2), the last linear layer where the MLP is no module (OPT).
    Dropout between them and the addition is not included; it does nothing in evaluation mode.
    """

    attn: nn.Module
    mlp: nn.Module
    attn_out: nn.Module
    mlp_out: nn.Module
    parallel: bool
    """Attention and MLP read the same input (GPT-J, GPT-NeoX, Phi-1/2, Cohere), not one after the other."""


def unwrap(model: nn.Module) -> nn.Module:
    """Strip wrappers: one-child modules such as DataParallel, DDP, FSDP or a compiled module, and peft.

    Adapters stay active: peft injects them into the model that is returned.
    """
    while True:
        children = dict(model.named_children())
        base = getattr(model, "get_base_model", None)
        if len(children) == 1 and (inner := children.get("module", children.get("_orig_mod"))) is not None:
            model = inner
        elif callable(base):
            model = cast(nn.Module, base())
        else:
            return model


def decoder_stack(model: nn.Module) -> DecoderStack:
    """Locate the decoder layers of `model`.

    Raises:
        UsageError: if there is no list of decoder layers, or more than one and the model does not say which
            of them is its decoder.
    """
    root = unwrap(model)
    found = _layer_lists(root)
    if len(found) > 1 and callable(get_decoder := getattr(root, "get_decoder", None)):
        inside = {id(module) for module in get_decoder().modules()}
        found = {name: layers for name, layers in found.items() if id(layers) in inside}
    if len(found) != 1:
        problem = f"several lists of layers ({', '.join(found)})" if found else "no list of decoder layers"
        raise UsageError(
            f"{type(root).__name__} holds {problem}. A decoder layer is expected to own an attention module "
            f"called {', '.join(ATTENTION)}. Pass a decoder-only language model, or the part of the model "
            "that is one."
        )
    name, layers = next(iter(found.items()))
    runner = _runner(root, name)
    owner = root.get_submodule(name.rpartition(".")[0])
    return DecoderStack(
        root=root,
        name=name,
        layers=list(layers.children()),
        runner=runner,
        embedding=_call(root, "get_input_embeddings") or _first_child(runner, nn.Embedding),
        final_norm=_first_named(owner, FINAL_NORM),
        head=_call(root, "get_output_embeddings"),
    )


def sublayers(layer: nn.Module) -> Sublayers:
    """Split a decoder layer into attention and MLP.

    Raises:
        UsageError: if the layer has no attention or no MLP under the known names.
    """
    attn, mlp = _first_named(layer, ATTENTION), _first_named(layer, MLP + LAST_MLP_LINEAR)
    if attn is None or mlp is None:
        missing, names = ("attention", ATTENTION) if attn is None else ("MLP", MLP + LAST_MLP_LINEAR)
        children = ", ".join(name for name, _ in layer.named_children())
        raise UsageError(
            f"{type(layer).__name__} has no {missing} module called {', '.join(names)}; "
            f"it owns {children or 'nothing'}. "
            "Rename the module or add its name to the table in gnomon.core.layers."
        )
    attn_out, mlp_out = attn, mlp
    for after_attention, after_mlp in POST_NORMS:
        if (post := _first_named(layer, (after_mlp,))) is not None:
            attn_out, mlp_out = _first_named(layer, (after_attention,)) or attn, post
            break
    return Sublayers(attn=attn, mlp=mlp, attn_out=attn_out, mlp_out=mlp_out, parallel=_is_parallel(layer))


def hidden_of(output: Tensor | Sequence[Any]) -> Tensor:
    """The hidden state in a module's output: the tensor itself (Transformers 5) or a tuple's first entry."""
    hidden = output if isinstance(output, Tensor) else output[0]
    if not isinstance(hidden, Tensor):
        raise UsageError(f"Expected a tensor or a tuple that starts with one, got {type(hidden).__name__}.")
    return hidden


def linears(model: nn.Module) -> dict[str, nn.Module]:
    """Dotted name (inside the unwrapped model) -> linear map, for every one inside the decoder layers.

    Holds `nn.Linear` (and subclasses) and GPT-2's `Conv1D`, whose weight is stored transposed: [in, out].
    Of a layer with an adapter only the `base_layer` counts.
    """
    stack = decoder_stack(model)
    found: dict[str, nn.Module] = {}
    for name, module in stack.root.get_submodule(stack.name).named_modules(prefix=stack.name):
        adapted, base, _ = name.rpartition(".base_layer")
        inside_adapter = any(
            hasattr(parent, "base_layer") for parent in _parents(stack.root, adapted if base else name)
        )
        if (isinstance(module, nn.Linear) or is_conv1d(module)) and not inside_adapter:
            found[name] = module
    return found


def is_conv1d(module: nn.Module) -> bool:
    """Whether this is Transformers' `Conv1D` (told by name, so that nothing needs to be imported)."""
    return any(
        kind.__name__ == "Conv1D" and "transformers" in kind.__module__ for kind in type(module).__mro__
    )


def _layer_lists(root: nn.Module) -> dict[str, nn.Module]:
    """Outermost lists that consist of decoder layers only."""
    found: dict[str, nn.Module] = {}
    for name, module in root.named_modules():  # parents come before their children
        if not isinstance(module, nn.ModuleList | nn.Sequential) or not len(module):
            continue
        nested = any(name.startswith(f"{outer}.") for outer in found)
        if not nested and all(_first_named(layer, ATTENTION) is not None for layer in module):
            found[name] = module
    return found


def _runner(root: nn.Module, name: str) -> nn.Module:
    """The innermost ancestor of the list that has a forward pass (nanoGPT's ModuleDict has none)."""
    for parent in reversed([root, *_parents(root, name)]):
        if type(parent).forward is not nn.Module.forward:
            return parent
    raise UsageError(f"No module above {name!r} in {type(root).__name__} has a forward pass.")


def _parents(root: nn.Module, name: str) -> Iterator[nn.Module]:
    """The modules strictly between `root` and `name`, outermost first."""
    parts = name.split(".")
    return (root.get_submodule(".".join(parts[:k])) for k in range(1, len(parts)))


def _is_parallel(layer: nn.Module) -> bool:
    stated = getattr(layer, "use_parallel_residual", None)  # GPT-NeoX has both norms and a switch
    if stated is None:
        stated = getattr(getattr(layer, "config", None), "parallel_attn", None)  # Falcon
    if stated is not None:
        return bool(stated)
    # A sequential layer normalises twice. With a single norm, both sublayers must share its output.
    return sum("norm" in name or name.startswith("ln_") for name, _ in layer.named_children()) == 1


def _first_named(module: nn.Module, names: Sequence[str]) -> nn.Module | None:
    return next(
        (child for name in names if isinstance(child := getattr(module, name, None), nn.Module)), None
    )


def _first_child(module: nn.Module, kind: type[nn.Module]) -> nn.Module | None:
    return next((child for child in module.children() if isinstance(child, kind)), None)


def _call(module: nn.Module, method: str) -> nn.Module | None:
    function = getattr(module, method, None)
    result = function() if callable(function) else None
    return result if isinstance(result, nn.Module) else None
