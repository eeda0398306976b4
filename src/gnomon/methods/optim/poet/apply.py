"""POET on a whole model: wrapping its linear layers, the optimizer's groups, and the way back to plain layers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from gnomon.core.errors import UsageError, nearest, number
from gnomon.core.layers import linears, unwrap

from .config import POETConfig, blocks_of
from .layer import POETLinear, require_finite, why_not

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class POETReport:
    """What :func:`apply_poet` did."""

    replaced: tuple[str, ...]
    """Names of the wrapped layers."""
    skipped: Mapping[str, str]
    """Name -> reason, of linear layers that were wanted or lie in the decoder and stay as they are."""
    trainable: int
    """Numbers of all rotations."""
    frozen: int
    """Numbers of the weights between them."""
    other: int
    """Trainable numbers elsewhere: embeddings, norms, head, biases, skipped layers."""


def poet_layers(model: nn.Module) -> dict[str, POETLinear]:
    """Dotted name -> layer, in the model's order."""
    return {name: module for name, module in model.named_modules() if isinstance(module, POETLinear)}


def apply_poet(model: nn.Module, cfg: POETConfig) -> POETReport:
    """Wrap linear layers in place: those inside the decoder layers, or those that `cfg.target_modules` names.

    With `init="keep"` the model computes what it did before. Call it before the optimizer is built and before the
    model is wrapped for data parallelism.

    Raises:
        UsageError: nothing matches, a layer can't be wrapped or shares its weight, the model is wrapped already or
            inside a wrapper; the model is then as before.
        NumericalFailure: with init="keep", a weight that isn't finite.
    """
    if not isinstance(cfg, POETConfig):
        raise UsageError(f"cfg is {type(cfg).__name__}, not a POETConfig(block_size=…, …).")
    if unwrap(model) is not model and not callable(getattr(model, "get_base_model", None)):
        raise UsageError(
            f"The model is inside {type(model).__name__}, which has noted its parameters. Call apply_poet on the "
            "model itself, and wrap it afterwards."
        )
    if already := poet_layers(model):
        raise UsageError(
            f"The model is wrapped already ({len(already)} layers, first {next(iter(already))}). Use merge_poet(model) "
            "first, or wrap a fresh model."
        )
    wanted, skipped = _wanted(model, cfg)
    shared = _shared(model)
    chosen: dict[str, nn.Module] = {}
    for name, module in wanted.items():
        reason = why_not(module)
        if reason is None and id(module.weight) in shared:
            others = [other for other in shared[id(module.weight)] if other != f"{name}.weight"]
            reason = f"shares its weight with {others[0]}, which a rotation would turn, too"
        if reason is not None:
            raise UsageError(
                f"{name} {reason}. Leave it out with exclude_modules, such as ({name.rpartition('.')[2]!r},)."
            )
        try:
            weight = module.weight
            for d in weight.shape:  # type: ignore[union-attr]
                blocks_of(d, cfg)
        except UsageError as error:
            if cfg.on_indivisible == "error":
                raise UsageError(f"{name}, {tuple(weight.shape)}: {error}") from None  # type: ignore[arg-type]
            skipped[name] = str(error)
            continue
        chosen[name] = module
    if not chosen:
        raise UsageError(
            f"No layer of {type(model).__name__} was left to wrap: {len(skipped)} were skipped"
            f"{_first(skipped)}. POET would train nothing."
        )
    source = getattr(getattr(model, "config", None), "_name_or_path", None)
    if cfg.init != "keep" and source:
        logger.warning(
            "init=%r draws new weights for %d layers of a loaded model. Fine-tuning needs init='keep'.",
            cfg.init,
            len(chosen),
        )
    for name, module in chosen.items():
        require_finite(name, module, cfg)
    built: dict[str, POETLinear] = {}
    for i, (name, module) in enumerate(
        chosen.items()
    ):  # one by one, so that no second copy of all weights stands
        built[name] = POETLinear.from_linear(module, cfg, _generator(cfg, i))
        _put(model, name, built[name])
    model.register_load_state_dict_pre_hook(_check_states)  # type: ignore[no-untyped-call]
    trainable = sum(layer.q_out.numel() + layer.q_in.numel() for layer in built.values())
    report = POETReport(
        replaced=tuple(built),
        skipped=skipped,
        trainable=trainable,
        frozen=sum(layer.base_weight.numel() for layer in built.values()),
        other=sum(p.numel() for p in model.parameters() if p.requires_grad) - trainable,
    )
    logger.info(
        "POET: %d layers, %d numbers of rotations around %d frozen ones, %d other trainable ones%s",
        len(report.replaced),
        report.trainable,
        report.frozen,
        report.other,
        f"; {len(skipped)} linear layers skipped{_first(skipped)}" if skipped else "",
    )
    return report


def merge_poet(model: nn.Module) -> nn.Module:
    """Put plain layers with the merged weights in place of all wrapped ones; the function stays the same.

    Returns:
        `model` itself, ready for `save_pretrained`.

    Raises:
        UsageError: nothing is wrapped.
        NumericalFailure: rotations that aren't finite.
    """
    layers = require_layers(model)
    with torch.no_grad():
        for name, layer in layers.items():
            _put(model, name, layer.to_linear())
    for module in model.modules():  # nothing of POET is left, so that a pickle of the model loads without it
        hooks = module._load_state_dict_pre_hooks
        for key in [key for key, hook in hooks.items() if getattr(hook, "hook", None) is _check_states]:
            del hooks[key]
    return model


def poet_param_groups(
    model: nn.Module, base_lr: float, poet_lr: float | None = None, weight_decay: float = 0.0
) -> list[dict[str, Any]]:
    """Groups for any optimizer: what is trained besides the rotations (`base_lr`, `weight_decay`), and the rotations.

    These get no decay, which would pull them to the identity and not the weight to zero.

    Args:
        poet_lr: None is the paper's 1e-3 at b = 256, inversely proportional to b. Multiplied by `cfg.lr_scale`.

    Raises:
        UsageError: nothing is wrapped, or rates out of range.
    """
    layers = require_layers(model)
    cfg = next(iter(layers.values())).cfg
    if poet_lr is None:
        # A fraction of 1/2 has the rate of b = 256 in the paper, 1/4 that of 128.
        poet_lr = 1e-3 * (256 / cfg.block_size if cfg.variant == "bs" else 0.5 / cfg.fraction)
    for name, value in (("base_lr", base_lr), ("poet_lr", poet_lr), ("weight_decay", weight_decay)):
        if not 0 <= number(value) < float("inf"):
            raise UsageError(f"{name}={value!r} must be finite and not negative.")
    rotations = [q for layer in layers.values() for q in (layer.q_out, layer.q_in)]
    known = {id(q) for q in rotations}
    base = [p for p in model.parameters() if p.requires_grad and id(p) not in known]
    groups = [
        {"params": base, "lr": base_lr, "weight_decay": weight_decay},
        {"params": rotations, "lr": poet_lr * cfg.lr_scale, "weight_decay": 0.0},
    ]
    return groups if base else groups[1:]


def require_layers(model: nn.Module) -> dict[str, POETLinear]:
    if not (layers := poet_layers(model)):
        raise UsageError(
            f"{type(model).__name__} has no POET layer: call apply_poet(model, cfg) first. A merged one has none left."
        )
    return layers


def _generator(cfg: POETConfig, index: int) -> torch.Generator:
    return torch.Generator().manual_seed((cfg.seed * 1_000_003 * 1_000_003 + index) % 2**63)


def _wanted(model: nn.Module, cfg: POETConfig) -> tuple[dict[str, nn.Module], dict[str, str]]:
    """The layers to wrap, by the model's own names, and those left out with the reason."""
    names = {id(module): name for name, module in model.named_modules()}
    everything = {names[id(m)]: m for m in model.modules() if isinstance(m, nn.Linear) or why_not(m) is None}
    if cfg.target_modules is None:
        try:
            found = {names[id(module)]: module for module in linears(model).values()}
        except UsageError as error:
            raise UsageError(
                f"{error} For another model name its linear layers in target_modules, such as ('*',) for all."
            ) from None
    else:
        found = {}
        for pattern in cfg.target_modules:
            hits = {name: module for name, module in everything.items() if _matches(name, pattern)}
            if not hits:
                ends = {name.rpartition(".")[2] for name in everything}
                raise UsageError(
                    f"target_modules: {pattern!r} matches no linear layer.{nearest(pattern, ends)}"
                )
            found |= hits
    wanted = {name: module for name, module in found.items() if not _any(name, cfg.exclude_modules)}
    if not wanted:
        raise UsageError(
            f"POET matches no layer of {type(model).__name__}: of {len(found)} linear layers exclude_modules="
            f"{cfg.exclude_modules} leaves out all."
        )
    left = {name: "excluded by exclude_modules" for name in found if name not in wanted}
    return wanted, left


def _matches(name: str, pattern: str) -> bool:
    return name == pattern or name.endswith(f".{pattern}") or fnmatchcase(name, pattern)


def _any(name: str, patterns: Sequence[str]) -> bool:
    return any(_matches(name, pattern) for pattern in patterns)


def _shared(model: nn.Module) -> dict[int, list[str]]:
    """Id of a parameter that has several names -> these names."""
    found: dict[int, list[str]] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        found.setdefault(id(p), []).append(name)
    return {key: names for key, names in found.items() if len(names) > 1}


def _put(model: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, leaf = name.rpartition(".")
    setattr(model.get_submodule(parent), leaf, module)


def _check_states(
    module: nn.Module, state_dict: Mapping[str, Tensor], prefix: str, *_: object, **__: object
) -> None:
    """Before anything is loaded, so that a refusal leaves the model as it was."""
    for name, layer in poet_layers(module).items():
        layer.check_state(state_dict, f"{prefix}{name}.")


def _first(skipped: Mapping[str, str]) -> str:
    return f" (first {next(iter(skipped))}: {next(iter(skipped.values()))})" if skipped else ""
