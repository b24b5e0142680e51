"""LoRA adapters of Megatron-Bridge: a policy is written with their products added to the weights.

The adapter of a linear layer `W [out, in]` has `linear_in [r, in]` and `linear_out [out, r]`; the
layer computes what `W + alpha / r * linear_out @ linear_in` would (megatron/bridge/peft/lora.py,
releases 0.3.1 and 0.6.0). A model that has other tensors of adapters, as DoRA's, is refused.
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
        alpha: the factor of all of them.
        parts: linear_in and linear_out of each weight that has an adapter.
    """

    alpha: float
    parts: dict[Place, tuple[Place, Place]]

    def beside(self, dtypes: Dtypes) -> dict[Place, torch.dtype]:
        """These tensors and their adapters, with the dtypes in which to gather them."""
        adapted = [place for place in dtypes if place in self.parts]
        exact = (part for place in adapted for part in (place, *self.parts[place]))
        return {**dtypes, **dict.fromkeys(exact, torch.float32)}

    def merge(self, wholes: dict[Place, Tensor], dtypes: Dtypes) -> None:
        """Add each adapter's product to its weight in float32, and remove the adapter.

        Args:
            wholes: gathered tensors; none on a rank that writes none.
            dtypes: what each weight is rounded to afterwards.
        """
        for place in wholes.keys() & self.parts.keys():
            linear_in, linear_out = (wholes.pop(part) for part in self.parts[place])
            scale = self.alpha / len(linear_in)
            wholes[place] = (
                wholes[place].addmm_(linear_out, linear_in, alpha=scale).to(dtypes[place])
            )


def adapters_of(models: Sequence[torch.nn.Module], plan: Plan) -> Adapters:
    """The adapters of all ranks' models. All ranks call it.

    Args:
        models: this rank's model chunks.
        plan: every tensor of the whole model.

    Raises:
        ValueError: adapters differ in alpha, or are switched off. The same on every rank.
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
    if not found:  # tensors that look like adapters are then refused, as any that have no place
        return Adapters(0.0, {})
    parts = {place: _parts(place) for place in plan}
    held = {place: both for place, both in parts.items() if plan.keys() >= {*both}}
    return Adapters(found[0][0], held)


def _parts(weight: Place) -> tuple[Place, Place]:
    """Where linear_in and linear_out of a weight's adapter would be."""
    layer = weight.key.removesuffix(".weight") + ADAPTER
    return (
        Place(f"{layer}linear_in.weight", weight.layer, weight.expert),
        Place(f"{layer}linear_out.weight", weight.layer, weight.expert),
    )
