"""Where a checkpoint's tensors end up in a model, known from its configuration alone.

Transformers renames, merges and splits tensors while it loads a checkpoint, and adds or strips the prefix of
the base model. A method that stores a weight in another form has to know which parameter it becomes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from .checkpoints import model_type
from .errors import GnomonError


def skeleton(config: Mapping[str, Any]) -> PreTrainedModel:
    """The model of a `config.json` on the meta device: all modules, no memory.

    The class is the first of `architectures` (a causal language model where that is silent). Code beside the
    checkpoint is never run.

    Raises:
        GnomonError: a type or architecture that Transformers doesn't have, or values that it rejects.
    """
    try:
        known = transformers.AutoConfig.for_model(model_type(config))
        built: PretrainedConfig = type(known).from_dict(dict(config))
        names = config.get("architectures") or []
        kind = getattr(transformers, names[0], None) if names else None
        with torch.device("meta"):
            if isinstance(kind, type) and issubclass(kind, PreTrainedModel):
                return kind(built)
            return AutoModelForCausalLM.from_config(built)
    except Exception as error:  # a hostile config.json raises anything
        said = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise GnomonError(
            f"Transformers can't build a model of type {model_type(config)!r} from this config.json: {said}"
        ) from error


def parameters(model: PreTrainedModel, names: Iterable[str]) -> dict[str, str]:
    """Stored name -> dotted name of the parameter that it becomes, unchanged but for its name.

    Tensors that are merged or split on loading, and those that the model has no place for, are left out.
    """
    transforms = get_model_conversion_mapping(model)
    renamings = [one for one in transforms if isinstance(one, WeightRenaming)]
    converters = [one for one in transforms if isinstance(one, WeightConverter)]
    prefix, known = model.base_model_prefix, model.state_dict()
    found = {}
    for name in names:
        renamed, merged = rename_source_key(name, renamings, converters, prefix, known)
        if (
            renamed not in known and name in known
        ):  # as the loader does: a renaming that leads nowhere is undone
            renamed, merged = rename_source_key(name, [], [], prefix, known)
        if merged is None and renamed in known:
            found[name] = renamed
    return found
