"""Adds Megatron-Bridge's LoRA adapters to the weights of a policy that is written.

The adapter of a linear layer with the weight `W [out, in]` has `linear_in [r, in]` and
`linear_out [out, r]`. The layer computes as if its weight were
`W + alpha / r * linear_out @ linear_in` (megatron/bridge/peft/lora.py, releases 0.3.1 and 0.6.0). A
model with other adapter tensors, for example DoRA's, is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_r3.weights.all_ranks import everyones
from megatron_r3.weights.gather import Dtypes, Plan
from megatron_r3.weights.pieces import ADAPTER, Place


@dataclass(frozen=True)
class Adapters:
    """The LoRA adapters of a model.

    Attributes:
        alpha: LoRA's alpha, the same for all adapters.
        parts: by weight that has an adapter, the adapter's linear_in and linear_out.
    """

    alpha: float
    parts: dict[Place, tuple[Place, Place]]

    def beside(self, dtypes: Dtypes) -> dict[Place, torch.dtype]:
        """The tensors of `dtypes` and their adapters, with the dtypes in which to gather them."""
        adapted = [place for place in dtypes if place in self.parts]
        exact = (part for place in adapted for part in (place, *self.parts[place]))
        return {**dtypes, **dict.fromkeys(exact, torch.float32)}

    def merge(self, wholes: dict[Place, Tensor], dtypes: Dtypes) -> None:
        """Add each adapter's product to its weight in float32, and remove the adapter.

        Args:
            wholes: gathered tensors; empty on a rank that writes no tensor.
            dtypes: the dtype of each weight after the addition.
        """
        for place in wholes.keys() & self.parts.keys():
            linear_in, linear_out = (wholes.pop(part) for part in self.parts[place])
            scale = self.alpha / len(linear_in)
            wholes[place] = (
                wholes[place].addmm_(linear_out, linear_in, alpha=scale).to(dtypes[place])
            )


def adapters_of(models: Sequence[torch.nn.Module], plan: Plan) -> Adapters:
    """The adapters of all ranks' models. All ranks must call this function.

    Args:
        models: this rank's model chunks.
        plan: every tensor of the whole model.

    Raises:
        ValueError: adapters differ in alpha, or are switched off. All ranks raise the same.
    """
    modules: list[Any] = [module for model in models for module in model.modules()]
    mine = {
        (float(module.adapter.alpha), bool(getattr(module, "_adapter_enabled", True)))
        for module in modules
        if hasattr(module, "to_wrap") and hasattr(getattr(module, "adapter", None), "alpha")
    }
    found = sorted({kind for of_rank in everyones(mine) for kind in of_rank})
    if any(not enabled for _, enabled in found):
        raise ValueError("the model's LoRA adapters are off: call enable_adapter_layers first")
    if len(found) > 1:
        alphas = [alpha for alpha, _ in found]
        raise ValueError(f"the model's LoRA adapters have the alphas {alphas}; give all the same")
    if not found:  # `write_policy` then refuses tensors of adapters, as any that it cannot map
        return Adapters(0.0, {})
    parts = {place: _parts(place) for place in plan}
    held = {place: both for place, both in parts.items() if plan.keys() >= {*both}}
    return Adapters(found[0][0], held)


def _parts(weight: Place) -> tuple[Place, Place]:
    """The places of linear_in and linear_out, if the weight has an adapter."""
    layer = weight.key.removesuffix(".weight") + ADAPTER
    return (
        Place(f"{layer}linear_in.weight", weight.layer, weight.expert),
        Place(f"{layer}linear_out.weight", weight.layer, weight.expert),
    )
