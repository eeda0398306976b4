"""One function for the five pipelines: a dense model in, a model of thin factors out."""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import TypeVar

from torch import Tensor, nn

from gnomon.core.errors import UsageError, unknown
from gnomon.core.layers import unwrap

from ..calibration import Batch, Calib, gather, require_calib
from .asvd import search_ranks
from .config import ASVDConfig, DobiConfig, SVDConfig, SVDLLMConfig
from .dobi import dobi_bases, dobi_ranks, learn_positions
from .factors import asvd_scale, factor_asvd, factor_svd, factor_svd_llm, require_keep
from .layers import compressible, replace
from .linear import guard_saving
from .ranks import Shapes, fit_ranks, kept_share, require_reachable, uniform_ranks
from .svd_llm import lora_update

log = logging.getLogger(__name__)

METHODS = ("svd", "asvd", "svd_llm", "svd_llm_lora", "dobi")
Config = SVDConfig | ASVDConfig | SVDLLMConfig | DobiConfig
CONFIGS: dict[str, type[Config]] = {
    "svd": SVDConfig,
    "asvd": ASVDConfig,
    "svd_llm": SVDLLMConfig,
    "svd_llm_lora": SVDLLMConfig,
    "dobi": DobiConfig,
}
"""Name of a method -> the class of its settings."""

Model = TypeVar("Model", bound=nn.Module)


def compress_lowrank(
    model: Model,
    method: str = "svd",
    keep: float = 0.8,
    calib: Calib | None = None,
    *,
    config: Config | None = None,
    inplace: bool = False,
    update: Calib | None = None,
) -> Model:
    """Replace the linear layers of a decoder by :class:`LowRankLinear`, keeping the share `keep` of their numbers.

    Embeddings and head, tied or not, norms and biases stay. Factors are computed in float32 or better and stored in
    the weight's dtype. 1 leaves the model dense. `save_pretrained` of the result refuses: plain Transformers could
    not read it; `gnomon.hf.save_lowrank` writes it, `to_dense` makes it ordinary.

    Args:
        model: any Transformers decoder in floating point, on any device.
        method: one of `METHODS`.
        keep: κ in (0, 1]; the compression rate is 1 − κ.
        calib: batches of token ids (B, T), or dictionaries with input_ids and attention_mask; for all but "svd".
        config: the method's class in `CONFIGS`; its defaults if None.
        inplace: change `model` itself rather than a copy.
        update: batches that "svd_llm_lora" trains on; `calib` if None.

    Raises:
        UsageError: before any work, for whatever can't be done: see `compressible`, `require_calib`.
        NumericalFailure: weights or activations that aren't finite.
    """
    settings = _settings(method, config)
    require_keep(keep)
    layers = compressible(model)
    shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
    batches = [] if method == "svd" else require_calib(calib, model, f"method={method!r}")
    if update is not None:
        if method != "svd_llm_lora":
            raise UsageError(f"update= is text for method='svd_llm_lora', but the method is {method!r}.")
        require_calib(update, model, "update=")
    ranks = _early_ranks(settings, keep, shapes)
    if not inplace:
        model = copy.deepcopy(model)
        layers = compressible(model)
    if keep == 1:
        log.info("keep=1: the model stays dense.")
        return model
    if isinstance(settings, ASVDConfig):
        _asvd(model, layers, batches, keep, settings, ranks)
    elif isinstance(settings, DobiConfig):
        _dobi(model, layers, batches, keep, settings)
    elif isinstance(settings, SVDLLMConfig):
        _svd_llm(model, layers, batches, ranks, settings)
        if method == "svd_llm_lora":
            assert calib is not None
            lora_update(model, calib if update is None else update, settings.update)
    else:
        for name, layer in layers.items():
            replace(model, name, *factor_svd(layer.weight).cut(ranks[name]))
    guard_saving(model)
    log.info("%s: %.4f of the numbers in %d layers kept", method, kept_share(model), len(layers))
    return model


def _settings(method: str, config: Config | None) -> Config:
    if method not in CONFIGS:
        raise unknown("method", method, METHODS)
    kind = CONFIGS[method]
    if config is not None and not isinstance(config, kind):
        raise UsageError(
            f"method={method!r} takes a {kind.__name__}, but config is a {type(config).__name__}."
        )
    return kind() if config is None else config


def _early_ranks(settings: Config, keep: float, shapes: Shapes) -> dict[str, int]:
    """Ranks that need no data; those that do are checked for being possible at all."""
    if isinstance(settings, ASVDConfig) and settings.ranks == "sensitivity":
        if keep < 1:
            require_reachable(keep, shapes, settings.candidates)
        return {}
    fit = isinstance(settings, DobiConfig) or settings.ranks == "fit"
    return fit_ranks(keep, shapes) if fit else uniform_ranks(keep, shapes)


def _asvd(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    batches: Sequence[Batch],
    keep: float,
    config: ASVDConfig,
    ranks: dict[str, int],
) -> None:
    stats = gather(model, layers, batches, gram=False)
    scales = {
        name: asvd_scale(
            one.mean_abs if config.magnitude == "mean" else one.abs_max, config.alpha, config.eps
        )
        for name, one in stats.items()
    }
    if config.ranks == "sensitivity":
        ranks = search_ranks(
            unwrap(model), layers, scales, first_sequences(batches, config.samples), keep, config
        )
    for name, k in ranks.items():
        replace(model, name, *factor_asvd(layers[name].weight, scales[name]).cut(k))


def _svd_llm(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    batches: Sequence[Batch],
    ranks: Mapping[str, int],
    config: SVDLLMConfig,
) -> None:
    stats = gather(model, layers, batches, device=config.device)
    for name, layer in layers.items():
        gram = stats.pop(name).gram
        assert gram is not None
        replace(model, name, *factor_svd_llm(layer.weight, gram).cut(ranks[name]))


def _dobi(
    model: nn.Module,
    layers: Mapping[str, nn.Linear],
    batches: Sequence[Batch],
    keep: float,
    config: DobiConfig,
) -> None:
    root = unwrap(model)
    batches = first_sequences(batches, config.samples)
    shapes = {name: (layer.out_features, layer.in_features) for name, layer in layers.items()}
    ranks = dobi_ranks(learn_positions(root, layers, batches, keep, config), keep, shapes)
    bases = dobi_bases(root, layers, batches, ranks)
    for name, layer in layers.items():
        v = bases[name]
        replace(model, name, v, v.T @ layer.weight.detach().to(v.dtype))


def first_sequences(batches: Sequence[Batch], count: int) -> list[Batch]:
    """The first `count` sequences, in the same batches."""
    taken: list[Batch] = []
    for batch in batches:
        if count <= 0:
            break
        rows: Tensor = batch.input_ids[:count]
        taken.append(Batch(rows, None if batch.mask is None else batch.mask[:count]))
        count -= len(rows)
    return [batch for batch in taken if batch.targets]
