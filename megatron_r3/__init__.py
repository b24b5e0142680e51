"""Rollout Routing Replay (R3) for Megatron-LM: the names that a training loop imports.

    from megatron_r3 import ModelRoutes, RouteArrays, replaying

    model_routes = ModelRoutes(model)                      # once for each model chunk
    source = RouteArrays(ids_LTK, num_experts, moe_layers)  # or a RolloutStore
    with replaying(model_routes.microbatch(source, rows_BS)):
        loss = model(tokens, position_ids, attention_mask, labels=labels).mean()
    loss.backward()

R3 itself is four subpackages, each built on those before it: `replay`, `data` (rollouts), `train`
(training on rollouts), `seams` (what the patches call). Of these four only `seams` imports other
subpackages, in three files, where an option needs them.

Each name is imported when it is first used, so that `megatron-r3 --version` imports no torch.
docs/integrate.md shows how a training loop uses them.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from megatron_r3.replay.active import begin, end, recording, replaying
    from megatron_r3.replay.host_routes import RouteArrays, RouteSource
    from megatron_r3.replay.layers import local_routers, moe_layer_indices
    from megatron_r3.replay.microbatch import MicrobatchRoutes, Mode, ReplayError
    from megatron_r3.replay.model_routes import ModelRoutes, router_mismatch
    from megatron_r3.replay.rank_layout import RankLayout
    from megatron_r3.replay.tally import Tally

__version__ = "0.1.0"
__all__ = [
    "MicrobatchRoutes",
    "Mode",
    "ModelRoutes",
    "RankLayout",
    "ReplayError",
    "RouteArrays",
    "RouteSource",
    "Tally",
    "begin",
    "end",
    "local_routers",
    "moe_layer_indices",
    "recording",
    "replaying",
    "router_mismatch",
]
_MODULES = ("active", "host_routes", "layers", "microbatch", "model_routes", "rank_layout", "tally")


def __getattr__(name: str) -> Any:
    if name in __all__:
        for module in (import_module(f"{__name__}.replay.{module}") for module in _MODULES):
            if hasattr(module, name):
                return getattr(module, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
