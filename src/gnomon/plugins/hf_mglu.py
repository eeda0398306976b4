"""MGLU in Transformers: folders of type `gnomon_mglu`, whatever decoder they are made from.

The classes (`methods.layers.mglu.hf`) are made when the first folder with that decoder is opened, so that the import
loads no model code.
"""

from __future__ import annotations

from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    PretrainedConfig,
)

from gnomon.methods.layers.mglu import hf


class MGLUFolderConfig(PretrainedConfig):  # type: ignore[misc]
    """The configuration class of `gnomon_mglu`: what it makes of a `config.json` is that of an MGLU decoder."""

    model_type = hf.TYPE

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """The configuration; its model classes are known to the Auto classes from now on.

        Raises:
            GnomonError: a damaged `config.json`.
        """
        found, _ = hf.of_dict(config_dict, **kwargs)
        register_decoder(type(found[0] if isinstance(found, tuple) else found))
        return found


def register_decoder(config: type[PretrainedConfig]) -> None:
    """Make the Auto classes know the MGLU models of one configuration class."""
    for auto, mapping in ((AutoModelForCausalLM, MODEL_FOR_CAUSAL_LM_MAPPING), (AutoModel, MODEL_MAPPING)):
        base = config.__mro__[2]  # after the class itself and what MGLU adds
        if base in mapping:
            auto.register(config, hf.model_class(mapping[base]), exist_ok=True)


def register() -> None:
    """Make `from_pretrained` know MGLU's folders. A second call changes nothing."""
    AutoConfig.register(hf.TYPE, MGLUFolderConfig, exist_ok=True)
    hf.watch(register_decoder)
