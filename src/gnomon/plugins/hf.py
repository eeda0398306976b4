"""The table of what Gnomon adds to Transformers; :func:`register` enters it all, once.

A new stored form is one line in `FORMS`; a method that brings a model class or an attention function registers it
here, too.
"""

from __future__ import annotations

from transformers import AutoConfig
from transformers.quantizers.auto import (
    AUTO_QUANTIZATION_CONFIG_MAPPING,
    AUTO_QUANTIZER_MAPPING,
    HfQuantizer,
)
from transformers.utils.quantization_config import QuantizationConfigMixin

from gnomon.core.forms import Form
from gnomon.methods.compress.lowrank.stored import FORM as LOWRANK
from gnomon.methods.compress.nf12.apply import FORM as NF12

from . import hf_mglu, hf_saga
from .hf_forms import wrapped_config
from .hf_lowrank import LowRankConfig, LowRankQuantizer
from .hf_nf12 import NF12QuantizationConfig, NF12Quantizer

FORMS: tuple[tuple[Form, type[QuantizationConfigMixin], type[HfQuantizer]], ...] = (
    (NF12, NF12QuantizationConfig, NF12Quantizer),
    (LOWRANK, LowRankConfig, LowRankQuantizer),
)
"""Forms of models: the class of `quantization_config`, and the quantizer that puts the layers in."""


def register() -> None:
    """Make Transformers' Auto classes know Gnomon's folders. A second call changes nothing."""
    for form, config, quantizer in FORMS:
        wrapped = wrapped_config(form)
        AutoConfig.register(wrapped.model_type, wrapped, exist_ok=True)
        AUTO_QUANTIZATION_CONFIG_MAPPING[form.name] = config
        AUTO_QUANTIZER_MAPPING[form.name] = quantizer
    hf_mglu.register()
    hf_saga.register()
