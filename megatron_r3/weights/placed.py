"""A model family whose Megatron experts are in another order than transformers' (a `Placement`).

Example with 2 experts that change places: transformers' `experts.0` is Megatron's expert 1, and row
1 of Megatron's router is row 0 of transformers' gate. Everything else is the family's.

Shape suffixes (docs/glossary.md): E.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_r3.integrations.layers import moe_layer_indices
from megatron_r3.placement import Placement
from megatron_r3.weights.family import Family, Mapped, ModelSettings
from megatron_r3.weights.pieces import Place

# Megatron's tensors with a row for each expert
_ROWS = tuple(f"decoder.layers.mlp.router.{name}" for name in ("weight", "bias", "expert_bias"))


class PlacedFamily:
    """The family (`megatron_r3.weights.family.Family`) of a model with placed experts.

    Args:
        family: of the model.
        placement: where its experts are.
        where: the placement, for errors.
    """

    def __init__(self, family: Family, placement: Placement, where: str) -> None:
        self._family, self._placement, self._where = family, placement, where
        self.model_type = family.model_type

    def check(self, config: Any, settings: ModelSettings) -> None:
        """Refuse a model that is not of this family, or not the placement's.

        Raises:
            ValueError: it says what the model lacks, or how the placement does not fit.
        """
        self._family.check(config, settings)
        layers = () if config.num_moe_experts is None else moe_layer_indices(config)
        self._placement.check_layers(self._where, layers, config.num_moe_experts)
        self._placement.check_groups(self._where, config.moe_router_num_groups)

    def tensors(self, config: Any) -> list[Mapped]:
        """All tensors of the model."""
        return [self._placed(entry) for entry in self._family.tensors(config)]

    def _placed(self, entry: Mapped) -> Mapped:
        places = tuple(self._moved(place) for place in entry.places)
        if entry.places[0].key not in _ROWS:
            return replace(entry, places=places)
        assert len(places) == 1, f"{entry.places} are more than the rows of a router"
        assert places[0].layer is not None
        rows_E = self._placement.of_layer(places[0].layer)
        assert rows_E is not None, f"{places[0]} is in no layer of the placement"
        to_place = torch.from_numpy(rows_E)
        to_expert = torch.argsort(to_place)

        def rows(tensor: Tensor, order: Tensor) -> Tensor:
            if len(tensor) != len(order):  # else a part of a longer tensor would be taken
                raise ValueError(
                    f"{list(entry.names)}: {len(tensor)} rows for the {len(order)} experts of "
                    f"{places[0]}: other model arguments"
                )
            return tensor.index_select(0, order)

        def to_hf(whole: list[Tensor]) -> list[Tensor]:
            # row e of transformers is what Megatron has at the place of expert e
            return entry.to_hf([rows(whole[0], to_place)])

        def to_megatron(parts: list[Tensor]) -> list[Tensor]:
            return [rows(tensor, to_expert) for tensor in entry.to_megatron(parts)]

        return replace(entry, places=places, to_hf=to_hf, to_megatron=to_megatron)

    def _moved(self, place: Place) -> Place:
        if place.expert is None or place.layer is None:
            return place
        # layers for prediction (mtp.layers) are in no placement
        is_decoder = place.key.startswith("decoder.")
        rows_E = self._placement.of_layer(place.layer) if is_decoder else None
        return place if rows_E is None else replace(place, expert=int(rows_E[place.expert]))

    def hf_config(self, config: Any, settings: ModelSettings) -> dict[str, Any]:
        """See `Family`."""
        return self._family.hf_config(config, settings)

    def arguments(self, hf_config: Mapping[str, Any]) -> list[str]:
        """See `Family`."""
        return self._family.arguments(hf_config)

    def is_left_out(self, name: str, config: Any) -> bool:
        """See `Family`."""
        return self._family.is_left_out(name, config)

    def compare(self, hf_config: Mapping[str, Any], config: Any, settings: ModelSettings) -> None:
        """See `Family`."""
        self._family.compare(hf_config, config, settings)


def placed(family: Family, placement: Placement | None, where: str) -> Family:
    """A family whose experts are where a placement says; the family itself without a placement."""
    return family if placement is None else PlacedFamily(family, placement, where)
