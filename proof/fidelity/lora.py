"""LoRA adapters in plain torch, for cases in which all other weights are frozen, the routers too.

An adapted linear layer computes with `W + B @ A` instead of its weight `W`. Every rank of a layout
has the whole `A` and `B`, and takes its own slice of their product. So the checkpoint of the
reference gives every layout the same adapters. Megatron is imported only inside the functions that
ranks run.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

RANK = 4


def with_adapters(rank: int, names: tuple[str, ...], run: Callable[..., Any], *args: Any) -> Any:
    """Call `run(rank, *args)` with adapters in each model that it builds.

    Args:
        names: the linear layers that get adapters. Empty: no model is changed.
    """
    from megatron.core.models.gpt import GPTModel

    build = GPTModel.__init__

    def built(model: Any, *args: Any, **kwargs: Any) -> None:
        build(model, *args, **kwargs)
        _adapt(model, names)

    if names:
        GPTModel.__init__ = built
    return run(rank, *args)


def _adapt(model: Any, names: tuple[str, ...]) -> None:
    """Freeze a model, and give adapters to the layers with these names."""
    model.requires_grad_(False)
    if model.pre_process:
        # Recomputed layers have gradients only if their input asks for one.
        model.embedding.register_forward_hook(lambda *call: call[-1].requires_grad_())
    found = set()
    for path, layer in [*model.named_modules()]:
        if (name := path.rpartition(".")[2]) in names:
            found.add(name)
            layer.halves = 2 if name == "linear_fc1" else 1  # SwiGLU: the gate, then the rest
            for matrix, shape in (
                ("lora_a", (RANK, layer.input_size)),
                ("lora_b", (layer.output_size, RANK)),
            ):
                # not 0, as a training begins with: then the gradient of the other matrix would be 0
                parameter = torch.nn.Parameter(0.2 * torch.randn(shape))
                parameter.allreduce = layer.weight.allreduce  # False for experts of this rank alone
                layer.register_parameter(matrix, parameter)
            layer.__class__ = type("Adapted", (_Adapted, type(layer)), {})
    assert found == {*names}, f"of {names} the model has only {found}"


class _Adapted:
    """The part of an adapted ColumnParallelLinear or RowParallelLinear that stands for its weight.

    Megatron's layer reads `weight` as before. Its checkpoint still has the frozen parameter `W`.
    """

    @property
    def weight(self: Any) -> torch.Tensor:
        """This rank's slice of `W + B @ A`, `[out, in]`."""
        from megatron.core.tensor_parallel import (
            ColumnParallelLinear,
            copy_to_tensor_model_parallel_region,
        )

        # Each rank uses one slice. So in the backward pass this call sums over the ranks.
        whole = copy_to_tensor_model_parallel_region(self.lora_b @ self.lora_a, self.tp_group)
        axis = 0 if isinstance(self, ColumnParallelLinear) else 1
        parts = whole.unflatten(axis, (self.halves, self.tp_group.size(), -1))
        mine = parts.select(axis + 1, self.tp_group.rank()).flatten(axis, axis + 1)
        return self._parameters["weight"] + mine
