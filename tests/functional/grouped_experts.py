"""Megatron's `TEGroupedMLP` without Transformer Engine: its grouped linear layers on the CPU.

Transformer Engine's need a GPU. These have their weights under the same names and take the same
arguments. Megatron is imported only inside the functions.

Shape suffixes (docs/glossary.md): H, P.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch


def install() -> None:
    """In this process `--moe-grouped-gemm` gives `TEGroupedMLP` to models with local layers."""
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

    local = LocalSpecProvider.grouped_mlp_modules

    def modules(self: Any, grouped: bool) -> Any:
        if not grouped:
            return local(self, grouped)
        linears = GroupedMLPSubmodules(linear_fc1=GroupedLinear, linear_fc2=GroupedLinear)
        return partial(TEGroupedMLP, submodules=linears)

    LocalSpecProvider.grouped_mlp_modules = modules


class GroupedLinear(torch.nn.Module):
    """What TEGroupedMLP asks of Transformer Engine's GroupedLinear, and no more."""

    def __init__(
        self,
        num_gemms: int,
        input_size: int,
        output_size: int,
        *,
        config: Any,
        init_method: Any,
        **_: Any,
    ) -> None:
        from megatron.core.tensor_parallel.random import (
            get_cuda_rng_tracker,
            get_expert_parallel_rng_tracker_name,
        )

        super().__init__()
        self.num_gemms = num_gemms
        with get_cuda_rng_tracker().fork(get_expert_parallel_rng_tracker_name()):
            for number in range(num_gemms):
                weight = torch.empty(output_size, input_size, dtype=config.params_dtype)
                init_method(weight)
                parameter = torch.nn.Parameter(weight)
                parameter.allreduce = config.expert_model_parallel_size == 1
                self.register_parameter(f"weight{number}", parameter)
                # as Transformer Engine's without bias
                setattr(self, f"bias{number}", torch.Tensor())

    def forward(
        self, hidden_PH: torch.Tensor, tokens_per_expert: list[int]
    ) -> tuple[torch.Tensor, None]:
        """Each expert's tokens by its weight; there is no bias."""
        if len(tokens_per_expert) != self.num_gemms:
            raise ValueError(f"{len(tokens_per_expert)} splits for {self.num_gemms} matrices")
        weights = [getattr(self, f"weight{number}") for number in range(self.num_gemms)]
        biases = [getattr(self, f"bias{number}") for number in range(self.num_gemms)]
        assert not any(bias.numel() for bias in biases)
        parts = hidden_PH.split(list(tokens_per_expert))
        outputs = [part @ weight.t() for part, weight in zip(parts, weights, strict=True)]
        return torch.cat(outputs), None
