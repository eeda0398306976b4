"""SAGA as Transformers models: for each class of a decoder one with its own number of key heads.

    SagaLlamaConfig, SagaLlamaModel, SagaLlamaForCausalLM, SagaQwen2ForCausalLM, ...

made from the class of the same name without "Saga", as attributes of this module. In the configuration
`num_key_value_heads` are the value heads, `num_key_heads` the key heads, `saga` the other fields of
:class:`SagaConfig`. The folders are of type `gnomon_saga` (`own_types`). `gnomon.plugins.hf_saga` registers them.

`attn_implementation` takes `sdpa` and `eager` as ever; they become `saga` and `saga_eager`, the functions that know
different head counts. The ordinary DynamicCache holds such keys and values as it is; a cache of fixed size is
:class:`SagaStaticCache`, which `generate(cache_implementation="static")` makes by itself.

Limits: no flash or flex attention, no paged cache, no tensor parallelism of attention (its plan would split keys and
values alike, so attention is left whole).
"""

from __future__ import annotations

import copy
import dataclasses
import functools
from typing import Any

import torch
from torch import Tensor
from transformers import AttentionInterface, PretrainedConfig, PreTrainedModel, StaticCache
from transformers.cache_utils import StaticLayer
from transformers.masking_utils import AttentionMaskInterface, eager_mask, sdpa_mask

from gnomon.core.checkpoints import GNOMON_TYPE
from gnomon.core.errors import GnomonError, UsageError

from .. import own_types
from ..own_types import OwnConfigMixin, OwnModelMixin
from .config import SagaConfig
from .interface import saga_attention, saga_attention_eager
from .model import attentions, narrow_keys, require_fit, stated

__all__ = ["TYPE", "SagaStaticCache", "adopt", "config_class", "model_class", "of_dict", "watch"]

TYPE = f"{GNOMON_TYPE}saga"
PREFIX = "Saga"
NAMES = {None: "saga", "sdpa": "saga", "eager": "saga_eager", "saga": "saga", "saga_eager": "saga_eager"}
"""What is asked for -> what runs."""

AttentionInterface.register("saga", saga_attention)
AttentionInterface.register("saga_eager", saga_attention_eager)
AttentionMaskInterface.register("saga", sdpa_mask)
AttentionMaskInterface.register("saga_eager", eager_mask)


class SagaConfigMixin(OwnConfigMixin):
    """What the configuration of a SAGA model adds to that of the ordinary one."""

    num_attention_heads: int
    num_key_value_heads: int
    num_key_heads: int | None
    """H_k; None is as many as value heads."""
    saga: dict[str, Any] | None
    """The fields of `SagaConfig` but the head counts."""

    @property
    def layers_config(self) -> SagaConfig:
        """The setting of the layers.

        Raises:
            GnomonError: fields that `SagaConfig` doesn't have.
            UsageError: head counts that don't divide each other.
        """
        fields = dict(self.saga or {})
        known = {field.name for field in dataclasses.fields(SagaConfig)} - {
            "num_key_heads",
            "num_value_heads",
        }
        if odd := fields.keys() - known:
            raise GnomonError(
                f"config.json states saga.{min(odd)}, which this version of Gnomon doesn't know."
            )
        held = self.num_key_value_heads
        keys = held if self.num_key_heads is None else self.num_key_heads
        found = SagaConfig(num_key_heads=keys, num_value_heads=held, **fields)
        found.require_queries(self.num_attention_heads)
        return found


@functools.cache
def config_class(base: Any) -> type[PretrainedConfig]:
    """The configuration class of SAGA models made from this one."""
    plan = base.base_model_tp_plan or {}
    return type(
        f"{PREFIX}{base.__name__}",
        (SagaConfigMixin, base),
        {
            "__module__": __name__,
            "__annotations__": {"num_key_heads": int | None, "saga": dict[str, Any] | None},
            "__doc__": f"{base.__name__} with the settings of SAGA.",
            "num_key_heads": None,
            "saga": None,
            "model_type": TYPE,
            "base_model_tp_plan": {key: how for key, how in plan.items() if ".self_attn." not in key},
        },
    )


class SagaModelMixin(OwnModelMixin):
    """What a SAGA model does otherwise than the ordinary one."""

    config: Any

    def __init__(self, config: PretrainedConfig, *inputs: Any, **kwargs: Any) -> None:
        settings = config.layers_config
        super().__init__(config, *inputs, **kwargs)  # type: ignore[call-arg]
        modules = attentions(self)  # type: ignore[arg-type]
        if all(
            getattr(attn, "saga", None) is None for attn in modules
        ):  # the headless model inside comes first
            require_fit(self)  # type: ignore[arg-type]
            for attn in modules:
                narrow_keys(attn, settings.num_key_heads)
                attn.saga = settings
                self._init_weights(attn.k_proj)  # type: ignore[attr-defined]

    def get_correct_attn_implementation(
        self, requested_attention: str | None, is_init_check: bool = False
    ) -> str:
        """The function that computes what was asked for with different head counts.

        Raises:
            UsageError: an implementation that has none.
        """
        if requested_attention not in NAMES:
            raise UsageError(
                f"attn_implementation={requested_attention!r} can't attend with different numbers of key and value "
                "heads. Use 'sdpa' or 'eager'."
            )
        return NAMES[requested_attention]

    def _get_static_cache_init_shape(self) -> None:
        """None: keys and values have different shapes, so the cache is made when the first ones come."""

    def _prepare_static_cache(self, *args: Any, **kwargs: Any) -> Any:
        cache = super()._prepare_static_cache(*args, **kwargs)  # type: ignore[misc]
        cache.layers = [SagaStaticLayer(layer.max_cache_len) for layer in cache.layers]
        return cache


@functools.cache
def model_class(base: Any) -> type[PreTrainedModel]:
    """The class of SAGA models made from this one."""
    made = type(
        f"{PREFIX}{base.__name__}",
        (SagaModelMixin, base),
        {
            "__module__": __name__,
            "__doc__": f"{base.__name__} whose keys have their own number of heads.",
            "config_class": config_class(base.config_class),
        },
    )
    return own_types.recording(made)


class SagaStaticLayer(StaticLayer):  # type: ignore[misc]
    """Slots of fixed number for keys and values of different head counts."""

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        super().lazy_initialization(key_states, value_states)
        if value_states.shape[1] != self.num_heads:
            shape = (self.batch_size, value_states.shape[1], self.max_cache_len, self.v_head_dim)
            self.values = torch.zeros(shape, dtype=value_states.dtype, device=self.device)
            if not torch.compiler.is_compiling():
                torch._dynamo.mark_static_address(self.values)


class SagaStaticCache(StaticCache):  # type: ignore[misc]
    """A StaticCache whose keys and values may have different head counts."""

    def __init__(self, config: PretrainedConfig, max_cache_len: int, **kwargs: Any) -> None:
        super().__init__(config, max_cache_len, **kwargs)
        self.layers: list[Any] = [SagaStaticLayer(max_cache_len) for _ in range(config.num_hidden_layers)]

    def early_initialization(self, *args: Any, **kwargs: Any) -> None:
        """
        Raises:
            UsageError: always: it knows one head count. The first forward pass makes the slots.
        """
        raise UsageError(
            "A SagaStaticCache makes its slots in the first forward pass; leave early_initialization out."
        )


_used = own_types.Used()
watch = _used.watch


def adopt(model: PreTrainedModel, config: SagaConfig) -> None:
    """Make a Transformers model whose key projections were narrowed one of type `gnomon_saga`, in place.

    Its configuration is copied first: others may share it.
    """
    old = model.config
    new = copy.deepcopy(old)
    new.__class__ = config_class(old.__class__)
    new.num_key_heads, new.saga = config.num_key_heads, stated(config)
    new._attn_implementation_internal = NAMES.get(old._attn_implementation, "saga")
    for module in model.modules():
        if getattr(module, "config", None) is old:
            module.config = new
    model.__class__ = model_class(model.__class__)
    _used.announce(type(new))
    for attn in attentions(model):
        attn.saga = config


def of_dict(config_dict: dict[str, Any], **kwargs: Any) -> Any:
    """The configuration of a `config.json` of type `gnomon_saga`; with unused arguments if asked for.

    Raises:
        GnomonError: no known base type.
    """
    return own_types.of_dict(config_dict, config_class, **kwargs)


def __getattr__(name: str) -> Any:
    """The SAGA class of a Transformers class, so that any of them can be imported and unpickled by its name."""
    return own_types.class_of_name(__name__, name, PREFIX, config_class, model_class, _used)
