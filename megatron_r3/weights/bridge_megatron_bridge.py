"""Megatron-Bridge's names and conversions, tensor by tensor, as of release 0.3.1 on PyPI.

Names and values come from the mappings of a model's `mapping_registry()`, and from what the model's
bridge changes before or after a mapping. `export_hf_weights` and `load_hf_weights` of
Megatron-Bridge are not called: megatron_r3.weights.bridge_family says why.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor


class MegatronBridge:
    """The translator (`megatron_r3.weights.bridge_family.Translator`) of one model."""

    module, field = "megatron.bridge", "architectures"

    def __init__(self, title: str, hf_config: Any, config: Any) -> None:
        from megatron.bridge import AutoBridge

        self.title = title
        self._auto = AutoBridge.from_hf_config(hf_config)
        self._bridge = self._auto._model_bridge
        self._bridge.hf_config = hf_config
        with _alone():
            self._registry = self._bridge.mapping_registry()
        self._module = _Whole(config)

    def built(self) -> Any:
        """The provider that Megatron-Bridge makes of config.json, with TransformerConfig's fields.

        The provider is not finalized: a field that Megatron derives from other fields is None.
        """
        return self._auto.to_megatron_provider(load_weights=False)

    def names(self, name: str) -> tuple[str, ...] | None:
        """The transformers tensors of Megatron's tensor `name`; None if there is no mapping."""
        mapping = self._mapping(name)
        if mapping is None:
            return None
        theirs = mapping.hf_param
        return (theirs,) if isinstance(theirs, str) else tuple(theirs.values())

    def to_hf(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """A whole Megatron tensor as transformers' tensors, by name."""
        from megatron.bridge.models.conversion.model_bridge import WeightConversionTask

        mapping = self._mapping(name)
        task = WeightConversionTask(name, name, mapping, 0, 0, self._module, whole)
        with _alone():
            converted = mapping.megatron_to_hf(whole, self._module)
            return dict(self._bridge.maybe_modify_converted_hf_weight(task, converted, {}))

    def to_megatron(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `to_hf`; `parts` are in the order of `names`."""
        mapping = self._mapping(name)
        state = dict(zip(self.names(name) or (), parts, strict=True))
        with _alone():
            read = self._bridge.maybe_modify_loaded_hf_weight(mapping.hf_param, state)
            whole: Tensor = mapping.hf_to_megatron(read, self._module)
        return whole

    @staticmethod
    def known_models() -> set[str]:
        """See `Translator`. The import needs Transformer Engine."""
        from megatron.bridge import AutoBridge

        return set(AutoBridge.list_supported_models())

    def _mapping(self, name: str) -> Any:
        with _alone():
            return self._registry.megatron_to_hf_lookup(name)


class _Whole(torch.nn.Module):
    """Stands for the Megatron module of a tensor that is whole and on the host.

    A mapping asks the module for the config, for how the weight is split, and for the device.
    """

    tensor_model_parallel = False

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


@contextmanager
def _alone() -> Iterator[None]:
    """Inside the block a mapping converts whole tensors, and sends nothing to other ranks.

    A mapping's constructor looks up Megatron's process groups; without groups the mapping assumes
    one rank. But even then the mapping gathers an expert's tensor over the group None, which torch
    takes for all ranks, and the gather drops each axis of size 1. So the gather is replaced too.
    """
    from megatron.bridge.models.conversion import param_mapping

    groups, base = param_mapping.mpu, param_mapping.MegatronParamMapping
    gather = base.gather_from_ep_ranks
    param_mapping.mpu = SimpleNamespace(is_initialized=lambda: False)
    base.gather_from_ep_ranks = lambda mapping, tensor, module, name: {str(name): tensor}
    try:
        yield
    finally:
        param_mapping.mpu, base.gather_from_ep_ranks = groups, gather
