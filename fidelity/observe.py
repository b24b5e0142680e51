"""What reached each expert, seen at the experts: hidden states and the expert that got them.

Neither the router, nor the dispatcher, nor the replay is asked. Megatron is imported only inside
the functions that ranks run.

Shape suffixes: P (token, expert) pairs that this rank's experts got, H hidden.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from megatron_r3.training.layers import local_moe_layers


@dataclass(frozen=True)
class Observed:
    """What one call of a layer's local experts got.

    Attributes:
        hidden_PH: float32.
        experts_P: global expert ids.
        shard: which part of each expert this rank holds (expert tensor parallelism).
        grad: False for the first pass of a recomputed layer, and for a forward-only pass.
    """

    layer: int
    hidden_PH: np.ndarray
    experts_P: np.ndarray
    shard: int
    grad: bool


class Observer:
    """Hooks in front of the experts of every decoder MoE layer of a rank.

    Attributes:
        seen: what the training passes of each phase brought; evaluation is left out.
    """

    def __init__(self) -> None:
        self.phase = ""
        self.seen: dict[str, list[Observed]] = {}

    def attach(self, models: list[torch.nn.Module]) -> list[torch.nn.Module]:
        """Watch these model chunks."""
        for model in models:
            for layer in local_moe_layers(model).values():
                layer.experts.register_forward_pre_hook(self._hook(layer))
        return models

    def _hook(self, layer: Any) -> Any:
        from megatron.core import mpu

        shard = mpu.get_expert_tensor_parallel_rank()

        def before_experts(experts: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
            if not experts.training:
                return
            hidden, counts = inputs[0].detach(), torch.as_tensor(inputs[1]).cpu().numpy()
            observed = Observed(
                layer=layer.layer_number,
                hidden_PH=hidden[: int(counts.sum())].float().cpu().numpy().copy(),
                experts_P=np.repeat(layer.local_expert_indices, counts),
                shard=shard,
                grad=torch.is_grad_enabled(),
            )
            self.seen.setdefault(self.phase, []).append(observed)

        return before_experts
