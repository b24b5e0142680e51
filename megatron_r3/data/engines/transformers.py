"""Captures the routes of a transformers model: the ids that its routers choose.

Ids are `[T, K]` for one router and `[L, T, K]` for a model (docs/glossary.md).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from megatron_r3.data.engines.shape import EngineError

# Class names of transformers 5: Qwen3MoeTopKRouter, DeepseekV3TopkRouter, GptOssTopKRouter, ...;
# module names: model.layers.3.mlp.gate
_ROUTER = re.compile(r"top_?k_?router$", re.IGNORECASE)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


class CapturedRoutes:
    """The ids that a model's routers chose, one entry for each forward call.

    Attributes:
        moe_layers: the 0-based hidden layers that have a router, ascending.
    """

    def __init__(self, moe_layers: tuple[int, ...]) -> None:
        self.moe_layers = moe_layers
        self._calls: list[list[Tensor]] = [[] for _ in moe_layers]

    def take(self) -> list[Tensor]:
        """The ids `[L, T, K]` of each forward call since the last `take`, oldest first.

        T is batch size times sequence length, as the routers see it.

        Raises:
            EngineError: a router ran more or less often than another one.
        """
        counts = [len(calls) for calls in self._calls]
        if len(set(counts)) > 1:
            raise EngineError(
                f"the routers of layers {list(self.moe_layers)} ran {counts} times; a forward call "
                "runs each once"
            )
        forwards = [torch.stack(layers) for layers in zip(*self._calls, strict=True)]
        for calls in self._calls:
            calls.clear()
        return forwards

    def _hook(self, layer: int) -> Any:
        def keep(module: nn.Module, args: Any, output: Any) -> None:
            # a router returns (logits, weights, ids), or ids alone, depending on the model
            ids = output[-1] if isinstance(output, tuple) else output
            if not isinstance(ids, Tensor) or ids.is_floating_point() or ids.ndim != 2:
                raise EngineError(
                    f"{type(module).__name__} of layer {self.moe_layers[layer]} does not return "
                    "expert ids [T, K] last"
                )
            self._calls[layer].append(ids.detach())

        return keep


@contextmanager
def capture_routes(model: nn.Module) -> Iterator[CapturedRoutes]:
    """Record the ids that the model's routers choose while the block runs.

    Raises:
        EngineError: the model has no router (a module of a class `...TopKRouter`), or has two
            routers in one layer.
    """
    routers = routers_of(model)
    captured = CapturedRoutes(tuple(routers))
    handles = []
    try:
        for index, router in enumerate(routers.values()):
            handles.append(router.register_forward_hook(captured._hook(index)))
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def routers_of(model: nn.Module) -> dict[int, nn.Module]:
    """The router of each MoE layer, by the 0-based number of its hidden layer, ascending.

    Raises:
        EngineError: as in `capture_routes`.
    """
    routers: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        if layer is None or not _ROUTER.search(type(module).__name__):
            continue
        if int(layer[1]) in routers:
            raise EngineError(f"{name}: a second router in layer {layer[1]}")
        routers[int(layer[1])] = module
    if not routers:
        raise EngineError(
            f"{type(model).__name__} has no top-k router module; the model must be an MoE model of "
            "transformers 5"
        )
    return dict(sorted(routers.items()))
