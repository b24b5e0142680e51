"""The front door: all that a training loop or a framework imports to replay routes.

    from megatron_r3.integrations import ModelRoutes, RouteArrays, replaying

    model_routes = ModelRoutes(model)                      # once for each model chunk
    source = RouteArrays(ids_LTK, num_experts, moe_layers)  # or a RolloutStore
    with replaying(model_routes.microbatch(source, rows_BS)):
        loss = model(tokens, position_ids, attention_mask, labels=labels).mean()
    loss.backward()

The trainer of this project (`megatron_r3/training`) comes through the same door.
`router_replay` is for code that was written for Megatron's own `RouterReplay`, and `verl` for verl.
docs/integrate.md says how each is used; docs/frameworks has a page for each framework.
"""

from megatron_r3.integrations.host_routes import RouteArrays, RouteSource
from megatron_r3.integrations.layers import local_routers, moe_layer_indices
from megatron_r3.integrations.layout import RankLayout
from megatron_r3.integrations.model_routes import ModelRoutes, router_mismatch
from megatron_r3.replay import (
    MicrobatchRoutes,
    Mode,
    ReplayError,
    begin,
    end,
    recording,
    replaying,
)
from megatron_r3.store.reader import RolloutStore

__all__ = [
    "MicrobatchRoutes",
    "Mode",
    "ModelRoutes",
    "RankLayout",
    "ReplayError",
    "RolloutStore",
    "RouteArrays",
    "RouteSource",
    "begin",
    "end",
    "local_routers",
    "moe_layer_indices",
    "recording",
    "replaying",
    "router_mismatch",
]
