"""mbridge's names and conversions, tensor by tensor, as of release 0.15.1 on PyPI.

Names and values come from three methods that each of mbridge's models may override:
`_weight_name_mapping_mcore_to_hf`, `_weight_to_hf_format` and `_weight_to_mcore_format`. mbridge's
`export_weights` and `load_weights` are not called: megatron_r3.weights.bridge_family says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

# what mbridge raises for a tensor for which it has no name
_UNKNOWN = (NotImplementedError, KeyError, IndexError, AssertionError)


class Mbridge:
    """The translator (`megatron_r3.weights.bridge_family.Translator`) of one model.

    Megatron's process groups must exist.
    """

    module, field = "mbridge", "model_type"

    def __init__(self, title: str, hf_config: Any, config: Any) -> None:
        from mbridge import AutoBridge
        from mbridge.core.bridge import _MODEL_REGISTRY

        self.title = title
        # For a model with tied embeddings mbridge changes this table of the class. Later models
        # without tied embeddings would read the change, so the table is put back.
        names = _MODEL_REGISTRY[hf_config.model_type]._DIRECT_MAPPING
        before = dict(names)
        try:
            self._bridge = AutoBridge.from_config(hf_config)
            self._bridge._DIRECT_MAPPING = dict(names)
        finally:
            names.clear()
            names.update(before)
        self._bridge.dtype = None  # else mbridge rounds weights to bfloat16

    def built(self) -> Any:
        """The TransformerConfig that mbridge makes of config.json."""
        return self._bridge.config

    def names(self, name: str) -> tuple[str, ...] | None:
        """The transformers tensors of Megatron's tensor `name`; None if mbridge knows none."""
        try:
            return tuple(self._bridge._weight_name_mapping_mcore_to_hf(name))
        except _UNKNOWN:
            return None

    def to_hf(self, name: str, whole: Tensor) -> dict[str, Tensor]:
        """A whole Megatron tensor as transformers' tensors, by name."""
        names, tensors = self._bridge._weight_to_hf_format(name, whole)
        return dict(zip(names, tensors, strict=True))

    def to_megatron(self, name: str, parts: Sequence[Tensor]) -> Tensor:
        """The inverse of `to_hf`; `parts` are in the order of `names`."""
        whole: Tensor = self._bridge._weight_to_mcore_format(name, list(parts))
        return whole

    @staticmethod
    def known_models() -> set[str]:
        """See `Translator`."""
        from mbridge import AutoBridge

        return set(AutoBridge.list_supported_models())
