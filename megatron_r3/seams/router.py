"""Other half of the router patches: what a TopKRouter asks about its tokens.

Shape suffixes: T tokens of this rank, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from megatron_r3.microbatch import MicrobatchRoutes, Mode, ReplayError
from megatron_r3.replay import active_microbatch
from megatron_r3.seams.fused import fused_gate
from megatron_r3.seams.option import check_config


class RouterHook:
    """Answers a router from the active microbatch; without one the router is live.

    Speaks the protocol of Megatron's `RouterReplay` to `topk_routing_with_score_function`. The
    routes are those of the active microbatch: the hook only knows which layer it is, which
    `Router.set_layer_number` writes.

    Args:
        config: the router's TransformerConfig.
        replays: False for a router that has no recorded routes (MTP): it stays live, and still
            leaves padding out of its load.
        layer_number: Megatron's, from 1.

    Raises:
        ValueError: the config asks for replay and could not replay exactly. It may have been made
            before `moe_router_replay` was set on it.
    """

    def __init__(self, config: Any, replays: bool = True, layer_number: int | None = None) -> None:
        if getattr(config, "moe_router_replay", False):
            check_config(config)
        self.config = config
        self.replays = replays
        self.layer_number = layer_number
        self.fused = getattr(config, "moe_router_replay_fused_gate", False)
        self._live_TK: Tensor | None = None  # of the pass that is running

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Scores and expert ids `[T, K]` of `scores` `[T, E]`: replayed, or live without routes.

        Protocol: megatron/core/transformer/moe/moe_utils.py, `compute_topk`.
        """
        assert default_compute_topk is not None
        assert self.layer_number is not None, "the router has no layer number yet"

        def live_topk() -> tuple[Tensor, Tensor]:
            return default_compute_topk(scores, topk, num_groups=num_groups, group_topk=group_topk)

        microbatch = active_microbatch()
        if microbatch is None or not self.replays:
            return live_topk()
        if self._replaying() and self._bias_is_live() and torch.is_grad_enabled():
            with torch.no_grad():
                self._live_TK = live_topk()[1]
        return microbatch.topk(self.layer_number, scores, topk, live_topk)

    def route(
        self, upstream: Callable[..., tuple[Tensor, Tensor]]
    ) -> Callable[..., tuple[Tensor, Tensor]]:
        """What routes in place of `topk_routing_with_score_function`, which is given.

        Under `moe_router_fusion` a replayed microbatch goes through one kernel where there is one,
        else through the unfused function, which asks `get_replay_topk`; a live one goes where it
        would go without this project.
        """
        return partial(self._route_fused, upstream) if self.fused else upstream

    def _route_fused(
        self,
        upstream: Callable[..., tuple[Tensor, Tensor]],
        logits: Tensor,
        topk: int,
        **options: Any,
    ) -> tuple[Tensor, Tensor]:
        microbatch = active_microbatch()
        if microbatch is None or not self.replays:
            return upstream(logits, topk, **options)
        if microbatch.mode is Mode.REPLAY and not self._bias_is_live():
            assert self.layer_number is not None, "the router has no layer number yet"
            routed = fused_gate(microbatch, self.layer_number, logits, topk, options)
            if routed is not None:
                return routed
        return upstream(logits, topk, **{**options, "fused": False})

    def padding_mask(self, given_T: Tensor | None) -> Tensor | None:
        """Which tokens are padding, bool: as the active microbatch says, else what was given."""
        microbatch = active_microbatch()
        padding_T = None if microbatch is None else microbatch.padding_T
        return given_T if padding_T is None else padding_T

    def mean_tokens(self, local: int | Tensor) -> float | int | Tensor:
        """Real tokens of a rank, on average over the ranks that share this microbatch's sequences.

        Upstream scales the auxiliary loss by the rank's own count (router.py,
        `attach_and_log_load_balancing_loss`), which is the same where no token is padding.
        """
        microbatch = active_microbatch()
        if microbatch is None:
            return local
        if microbatch.mean_tokens is not None:
            return microbatch.mean_tokens
        return self._count(local) if isinstance(local, int) else local

    def map_for_aux_loss(
        self, routed_TE: Tensor, live_TE: Tensor, given_T: Tensor | None = None
    ) -> Tensor:
        """The routing map `[T, E]` whose load the auxiliary losses see.

        Args:
            routed_TE: where the tokens go.
            live_TE: what upstream would count.
            given_T: upstream's padding mask; 0.15 has none.
        """
        replayed = self.config.moe_router_replay_aux_loss == "replayed"
        return self.without_padding(
            routed_TE if replayed and self._replaying() else live_TE, given_T
        )

    def map_for_expert_bias(self, routed_TE: Tensor, given_T: Tensor | None = None) -> Tensor:
        """The routing map `[T, E]` whose load updates the expert bias."""
        live_TK, self._live_TK = self._live_TK, None
        if live_TK is not None:
            routed_TE = torch.zeros_like(routed_TE).scatter(1, live_TK, True)
        return self.without_padding(routed_TE, given_T)

    def without_padding(self, values_TE: Tensor, given_T: Tensor | None = None) -> Tensor:
        """A map or scores `[T, E]`, with the rows of padding tokens set to zero."""
        padding_T = self.padding_mask(given_T)
        return values_TE if padding_T is None else values_TE * ~padding_T[:, None]

    def z_loss(self, logits_TE: Tensor, coeff: float) -> tuple[Tensor, int | Tensor]:
        """The z-loss of the real tokens, and their number, for 0.15.

        From 0.16 on upstream's `z_loss_func` (megatron/core/transformer/moe/moe_utils.py) takes a
        padding mask and gives the same.
        """
        values_T = torch.logsumexp(logits_TE, dim=-1).square()
        num_tokens = self._count(logits_TE.shape[0])
        padding_T = self.padding_mask(None)
        if padding_T is None:
            return values_T.mean() * coeff, num_tokens
        total = torch.clamp(torch.as_tensor(num_tokens), min=1)
        return (values_T * ~padding_T).sum() / total * coeff, num_tokens

    def _count(self, num_tokens: int) -> int | Tensor:
        padding_T = self.padding_mask(None)
        return num_tokens if padding_T is None else (~padding_T).sum()

    def _bias_is_live(self) -> bool:
        config = self.config
        return config.moe_router_enable_expert_bias and (
            config.moe_router_replay_expert_bias == "live"
        )

    def _replaying(self) -> bool:
        microbatch: MicrobatchRoutes | None = active_microbatch()
        return self.replays and microbatch is not None and microbatch.mode is Mode.REPLAY


def check_hook(router: Any) -> None:
    """Refuse a router whose config was changed after the router was made.

    Called at every pass of a router whose config has `moe_router_replay`.

    Raises:
        ReplayError: the option was not set yet when the router was made, or upstream's own replay
            was turned on since.
    """
    if getattr(router.config, "moe_enable_routing_replay", False):
        raise ReplayError(
            "moe_router_replay and moe_enable_routing_replay are both set: they would compete for "
            "the router; choose one, before the model is made"
        )
    if not isinstance(router.router_replay, RouterHook):
        raise ReplayError(
            "moe_router_replay was set after this model was made, so its routers and recomputes "
            "do not know of it: set it in the TransformerConfig before the model is made"
        )


def keep_live(module: torch.nn.Module) -> None:
    """Tell the routers in an MTP layer to stay live; from 0.17 on they know when they are made."""
    from megatron.core.transformer.moe.router import TopKRouter

    for router in module.modules():
        if isinstance(router, TopKRouter):
            router.router_replay.replays = False
