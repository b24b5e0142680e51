"""Called by patch 1: what happens when a config with moe_router_replay is made."""

from __future__ import annotations

import copy
import dataclasses
import functools
import logging
import os
from typing import Any

import torch

from megatron_r3.replay.replayable import (
    WITHOUT_ROUTER,
    field_of_modules,
    modules_without_router,
    refusals,
)
from megatron_r3.seams import deferred

_OF_GUESTS = "moe_router_replay_guest_"


def prepare_config(config: Any, was_made: bool = False) -> None:
    """Check a config, settle its fusion options, and have recomputes bound to their micro-batch.

    With moe_router_replay="graphs_without_router" the router is taken out of the CUDA graphs first.

    `__post_init__` of the config calls this function, and so does each router that is made with the
    config, because a framework may have set `moe_router_replay` after the config was made. A second
    call changes nothing.

    Args:
        config: a TransformerConfig, in which replay is on.
        was_made: whether the config's own `__post_init__` has returned.

    Raises:
        ValueError: as `take_router_out_of_graphs`, `check_config`.
    """
    if isinstance(config.moe_router_replay, str):
        take_router_out_of_graphs(config, was_made)
    check_config(config)
    settle_fusion(config)
    deferred.install()


def take_router_out_of_graphs(config: Any, was_made: bool = False) -> None:
    """Have CUDA graphs capture what remains without the router, and set the option to True.

        given: moe_router_replay="graphs_without_router", cuda_graph_impl="local",
               cuda_graph_modules=[attn, moe_router, moe_preprocess]
        after: moe_router_replay=True, cuda_graph_impl="transformer_engine",
               cuda_graph_modules=[attn]

    Where no graph captures the router, only the option changes. Where graphs capture nothing but
    the router, cuda_graph_impl becomes "none". Megatron has already checked the given graphs, so
    Megatron's checks run again, on a copy of the config with the graphs that remain. Example: full
    recompute is allowed only in a graph of the whole iteration.

    Args:
        config: a TransformerConfig in which moe_router_replay is a string.
        was_made: as in `prepare_config`. Then layers may have their graphs already.

    Raises:
        ValueError: the string is not "graphs_without_router"; the config was made before; or
            Megatron refuses the graphs that remain.
    """
    asked = f"moe_router_replay={config.moe_router_replay!r:.80}"
    if config.moe_router_replay != WITHOUT_ROUTER:
        raise ValueError(
            f'{asked}: give True, or "{WITHOUT_ROUTER}" to leave the router out of CUDA graphs'
        )
    if was_made:
        raise ValueError(f"{asked} came after the config was made; set it before")
    kept = modules_without_router(config)
    config.moe_router_replay = True
    if kept is None:
        return
    try:
        changed = _recapture(config, kept)
    except AssertionError as error:
        raise ValueError(
            f"{asked}: Megatron refuses graphs of transformer_engine with {kept}; give "
            f"cuda_graph_impl='none', or other graphs. Megatron says: {error}"
        ) from error
    _warn_once(f"{asked}: {', '.join(changed)}")


def _recapture(config: Any, modules: list[str]) -> list[str]:
    """Have graphs of Transformer Engine capture these modules; returns what was changed, in words.

    Without modules there are no graphs.

    Raises:
        AssertionError: of Megatron's own checks; the config is as it was.
    """
    # imported here: the class calls this module in its own `__post_init__`
    from megatron.core.transformer.transformer_config import TransformerConfig

    checked = copy.copy(config)
    graphs: dict[str, Any] = {"cuda_graph_impl": "transformer_engine" if modules else "none"}
    graphs[field_of_modules(config)] = modules
    # Megatron has already made cuda_graph_impl of the two deprecated fields. From 0.18 on, where
    # the graphs of inference are None, Megatron sets them to what cuda_graph_impl allows.
    graphs |= {"enable_cuda_graph": False, "external_cuda_graph": False}
    if hasattr(config, "inference_cuda_graph_scope"):
        graphs["inference_cuda_graph_scope"] = None
    for name, value in graphs.items():
        setattr(checked, name, value)
    TransformerConfig.__post_init__(checked)
    changed = []
    for name in graphs:
        before, after = _names(getattr(config, name)), _names(getattr(checked, name))
        if before != after:
            changed.append(f"{name}={before} became {after}")
        setattr(config, name, getattr(checked, name))
    return changed


def _names(value: Any) -> Any:
    """A field's value in words: an enum's member by its name, an empty list as "whole layers"."""
    if isinstance(value, list):
        return "+".join(_names(one) for one in value) or "whole layers"
    return getattr(value, "name", value)


def check_config(config: Any) -> None:
    """Refuse a config that would not replay exactly.

    Raises:
        ValueError: all reasons in one message.
    """
    # imported here: the class calls this function in its own `__post_init__`
    from megatron.core.transformer.transformer_config import TransformerConfig

    reasons = all_refusals(config, TransformerConfig)
    if replaced_by := _module_that_replaced_routing():
        reasons.append(
            f"{replaced_by} has replaced TopKRouter.routing, and what it put there asks for no "
            "recorded routes; leave that replacement out, or turn moe_router_replay off"
        )
    if reasons:
        raise ValueError("moe_router_replay: " + "; ".join(reasons))


def all_refusals(config: Any, upstream: Any) -> list[str]:
    """The reasons to refuse a config: of replay, of patches that this tree lacks, and of guests.

    Args:
        config: a TransformerConfig, or Megatron's parsed arguments.
        upstream: the class TransformerConfig.
    """
    reasons = refusals(config, upstream) + absent_patches(config)
    # seams/guests.py is imported only if one of the guests' options is set
    of_guests = [f for f in dataclasses.fields(upstream) if f.name.startswith(_OF_GUESTS)]
    if any(getattr(config, field.name, field.default) != field.default for field in of_guests):
        from megatron_r3.seams.guests import guest_refusals

        reasons += guest_refusals(config)
    return reasons


def absent_patches(config: Any) -> list[str]:
    """Why this config needs patches that this tree lacks; empty if the tree lacks none of them.

    From 0.17 on, the group engine lets Megatron's inference engine record routes in a process that
    replays too. Before 0.17, moe_enable_routing_replay is upstream's own replay and nothing else.

    Args:
        config: a TransformerConfig, or Megatron's parsed arguments.
    """

    def given(name: str) -> Any:
        return getattr(config, name, None)

    # HybridEP reads the routing map itself
    takes_topk = given("moe_token_dispatcher_type") == "flex" and (
        given("moe_enable_deepep") or given("moe_flex_dispatcher_backend") != "hybridep"
    )
    checks = [
        (
            given("moe_enable_routing_replay") and not engine_records(),
            "moe_enable_routing_replay is Megatron's own replay and would compete for the router: "
            "without the patches of the group engine (0.17 to main) no inference engine records "
            "beside replay; turn one of the two off",
        ),
        (
            takes_topk and not _flex_keeps_the_map(),
            "this tree has no patches of the group fixes, so its flex dispatcher would send a "
            "token to another expert where a recorded expert has weight 0; apply the patches, or "
            "use the dispatcher alltoall",
        ),
    ]
    return [reason for refused, reason in checks if refused]


def engine_records() -> bool:
    """Whether this tree has the patch "Record the routing of the model that samples"."""
    from megatron.core.transformer.moe.router_replay import RouterReplay

    return getattr(RouterReplay, "recorded_by_model", False)


def _flex_keeps_the_map() -> bool:
    """Whether flex takes the experts of the routing map and not those of the largest weights."""
    from megatron.core.transformer.moe.token_dispatcher import _DeepepManager

    # Example of one token: the routing map has expert 1, with weight 0, and expert 0 has weight
    # 0.5. The method is called, because its source may have another fix than our patch.
    manager = object.__new__(_DeepepManager)
    manager.num_experts, manager.router_topk, manager.capacity_factor = 2, 1, None
    with torch.device("cpu"):  # a model may be made on the device "meta"
        manager.setup_metadata(torch.tensor([[False, True]]), torch.tensor([[0.5, 0.0]]))
    return manager.token_indices.tolist() == [[1]]


def _module_that_replaced_routing() -> str | None:
    """The module of a `TopKRouter.routing` that is not Megatron's own; None if it is its own."""
    from megatron.core.transformer.moe import router

    # Example: verl's apply_router_replay_patch replaces it by a function of verl's own module.
    module = getattr(router.TopKRouter.routing, "__module__", router.__name__)
    return None if module == router.__name__ else str(module)


def settle_fusion(config: Any) -> None:
    """Turn `moe_router_fusion` off where upstream could not use it, and note that it was on.

    If Transformer Engine has no fused router, upstream would raise at the first live pass or
    auxiliary loss. An inference engine that records refuses a fused router, which would not call
    the recorder. The replayed gate has a kernel of its own and stays fused. Example:

        given: moe_router_fusion=True,  moe_router_replay_fused_gate=None
        after: moe_router_fusion=False, moe_router_replay_fused_gate=True   (no Transformer Engine)

    Both options are fields, so a config that is rebuilt from its fields keeps these values. A
    `moe_router_replay_fused_gate` that the user has set stays.
    """
    if not config.moe_router_fusion:
        return
    if config.moe_router_replay_fused_gate is None:
        config.moe_router_replay_fused_gate = True
    if getattr(config, "moe_enable_routing_replay", False):
        why = "a fused router would not call the engine's recorder"
    elif not _upstream_fuses():
        why = "no Transformer Engine with a fused router here"
    else:
        return
    config.moe_router_fusion = False
    _warn_once(
        f"moe_router_fusion: {why}; the router is unfused, except in replayed layers on a CUDA "
        "device with Triton"
    )


def _upstream_fuses() -> bool:
    try:
        from megatron.core.extensions.transformer_engine import fused_topk_with_score_function
    except ImportError:
        return False
    return fused_topk_with_score_function is not None


@functools.cache
def _warn_once(message: str) -> None:
    """Log a warning on the first rank; because of the cache each message is logged once."""
    if os.environ.get("RANK", "0") == "0":
        logging.getLogger(__name__).warning(message)
