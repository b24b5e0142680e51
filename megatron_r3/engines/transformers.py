"""Routes out of a transformers model: from its router logits, or from its routers as they run.

Shape suffixes: T tokens, L MoE layers, E experts, K top-k.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from megatron_r3.engines.shape import EngineError

_ROUTER = re.compile(r"top_?k_?router$", re.IGNORECASE)
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")


def routes_from_router_logits(
    router_logits: Sequence[Tensor],
    topk: int,
    *,
    score: str = "softmax",
    bias_LE: Sequence[Tensor] | None = None,
    num_groups: int = 1,
    topk_groups: int = 1,
) -> np.ndarray:
    """Ids `[L, T, K]` from what `output_router_logits=True` returns, chosen as the model does.

    Args:
        router_logits: one `[T, E]` tensor (or `[B, S, E]`) for each MoE layer. Probabilities, which
            transformers 5.0-5.4 returned under this name for Qwen3-MoE, give the same ids.
        topk: K.
        score: "softmax" in fp32 (Qwen3-MoE), or "sigmoid" (DeepSeek-V3).
        bias_LE: each layer's correction bias, added to the scores for the choice.
        num_groups, topk_groups: experts are chosen from the best groups (by their two best) only.

    Raises:
        EngineError: logits that do not fit together or an unknown score.
    """
    if not router_logits:
        raise EngineError("no router logits: was the model called with output_router_logits=True?")
    num_experts = router_logits[0].shape[-1]
    ids_LTK = []
    for layer, logits in enumerate(router_logits):
        if logits.shape != router_logits[0].shape or not 1 <= topk <= num_experts:
            raise EngineError(
                f"MoE layer {layer}: router logits {tuple(logits.shape)} for top-{topk}; "
                f"layer 0 has {tuple(router_logits[0].shape)}"
            )
        scores_TE = _scores(logits.detach().reshape(-1, num_experts).float(), score)
        if bias_LE is not None:
            scores_TE = scores_TE + bias_LE[layer].to(scores_TE)
        scores_TE = _keep_best_groups(scores_TE, num_groups, topk_groups)
        ids_LTK.append(torch.topk(scores_TE, topk, dim=-1).indices)
    return torch.stack(ids_LTK).cpu().numpy()


def _scores(logits_TE: Tensor, score: str) -> Tensor:
    if score == "softmax":
        return torch.softmax(logits_TE, -1)
    if score == "sigmoid":
        return torch.sigmoid(logits_TE)
    raise EngineError(f"router scores are softmax or sigmoid; got {score!r}")


def _keep_best_groups(scores_TE: Tensor, num_groups: int, topk_groups: int) -> Tensor:
    if num_groups == 1:
        return scores_TE
    grouped = scores_TE.unflatten(-1, (num_groups, -1))
    best = grouped.topk(2, dim=-1).values.sum(-1).topk(topk_groups, dim=-1).indices
    keep = torch.zeros(grouped.shape[:2], dtype=torch.bool, device=best.device)
    keep.scatter_(1, best, True)
    return grouped.masked_fill(~keep[..., None], float("-inf")).flatten(1)


class CapturedRoutes:
    """The ids that a model's routers chose, one entry for each forward call.

    Attributes:
        moe_layers: for each trace layer the 0-based hidden layer that it belongs to.
    """

    def __init__(self, moe_layers: tuple[int, ...]) -> None:
        self.moe_layers = moe_layers
        self._calls: list[list[Tensor]] = [[] for _ in moe_layers]

    def __len__(self) -> int:
        """How many forward calls are held."""
        return len(self._calls[0])

    def take(self) -> list[Tensor]:
        """`[L, T, K]` ids of every forward call since the last take, oldest first.

        T counts batch times sequence, as the routers see it.

        Raises:
            EngineError: a router that ran more or less often than the others.
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
    """Record the ids of the model's routers while the block runs, KV cache or not.

    Raises:
        EngineError: the model has no router that this can read, or two in one layer.
    """
    routers = _routers(model)
    captured = CapturedRoutes(tuple(routers))
    handles = []
    try:
        for index, router in enumerate(routers.values()):
            handles.append(router.register_forward_hook(captured._hook(index)))
        yield captured
    finally:
        for handle in handles:
            handle.remove()


def _routers(model: nn.Module) -> dict[int, nn.Module]:
    found: dict[int, nn.Module] = {}
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        if layer is None or not _ROUTER.search(type(module).__name__):
            continue
        if int(layer[1]) in found:
            raise EngineError(f"{name}: a second router in layer {layer[1]}")
        found[int(layer[1])] = module
    if not found:
        raise EngineError(
            f"{type(model).__name__} has no top-k router module; it takes transformers 5 and an "
            "MoE model"
        )
    return dict(sorted(found.items()))
