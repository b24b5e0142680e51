"""Other half of the patch "load": which tokens and experts a router counts as its load.

The load-balancing losses, the z-loss and the expert bias are made from counts of tokens. Under
replay two things about them change: padding is left out, as the active microbatch knows it in every
layout, and the experts that are counted are the replayed ones or, on request, the live ones.

Shape suffixes (docs/glossary.md): T, E.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from megatron_r3.replay import active_microbatch


class RouterLoad:
    """The load of one router. A router that stays live (MTP) leaves padding out all the same.

    Args:
        router: the TopKRouter; its `router_replay` is a RouterHook.
    """

    def __init__(self, router: Any) -> None:
        self.router = router

    def padding_mask(self, given_T: Tensor | None) -> Tensor | None:
        """Which tokens are padding, bool: as the active microbatch says, else what was given."""
        # Megatron hands its own mask only to some layers and schedules; the microbatch is always
        # there, and its mask is in the order of this router's tokens.
        microbatch = active_microbatch()
        padding_T = None if microbatch is None else microbatch.padding_T
        return given_T if padding_T is None else padding_T

    def without_padding(self, values_TE: Tensor, given_T: Tensor | None = None) -> Tensor:
        """A map or scores `[T, E]`, with the rows of padding tokens set to zero."""
        padding_T = self.padding_mask(given_T)
        return values_TE if padding_T is None else values_TE * ~padding_T[:, None]

    def real_tokens(self, num_tokens: int) -> int | Tensor:
        """How many of this rank's `num_tokens` are not padding, counted on the device."""
        padding_T = self.padding_mask(None)
        return num_tokens if padding_T is None else (~padding_T).sum()

    def mean_tokens(self, local: int | Tensor) -> float | int | Tensor:
        """Real tokens of a rank, on average over the ranks that share this microbatch's sequences.

        Upstream scales the auxiliary loss by the rank's own count (router.py,
        `attach_and_log_load_balancing_loss`), which is the same where no token is padding. Example:
        of 8 tokens on two ranks the last 2 are padding. The ranks' own counts are 4 and 2, and both
        ranks scale by 3.

        Args:
            local: the rank's own count; used where the microbatch does not know the mean.
        """
        microbatch = active_microbatch()
        if microbatch is None:
            return local
        if microbatch.mean_tokens is not None:
            return microbatch.mean_tokens
        return self.real_tokens(local) if isinstance(local, int) else local

    def map_for_aux_loss(
        self, routed_TE: Tensor, live_TE: Tensor, given_T: Tensor | None = None
    ) -> Tensor:
        """The routing map `[T, E]` whose load the auxiliary losses see.

        Args:
            routed_TE: where the tokens go.
            live_TE: what upstream would count.
            given_T: upstream's padding mask, or None.
        """
        follows_live = self.router.config.moe_router_replay_aux_loss == "live"
        replayed = self.router.router_replay.replayed_microbatch() is not None
        return self.without_padding(
            routed_TE if replayed and not follows_live else live_TE, given_T
        )

    def map_for_expert_bias(self, logits_TE: Tensor, routed_TE: Tensor) -> Tensor:
        """The routing map `[T, E]` whose load updates the expert bias; padding is still in it.

        Call it where gradients are on or off as in the forward pass: inside `no_grad` it never
        follows the live load.

        Args:
            logits_TE: what the router routed by.
            routed_TE: where the tokens go.
        """
        config, hook = self.router.config, self.router.router_replay
        # Without an expert bias the map is counted for nobody, so the live one is not made.
        follows_live = config.moe_router_enable_expert_bias and (
            config.moe_router_replay_expert_bias == "live"
        )
        # A pass without gradients updates no bias (router.py, `_apply_expert_bias`).
        if not follows_live or not torch.is_grad_enabled() or hook.replayed_microbatch() is None:
            return routed_TE
        return self.live_map(logits_TE)

    @torch.no_grad()
    def live_map(self, logits_TE: Tensor) -> Tensor:
        """Where the tokens would go without replay, bool `[T, E]`."""
        from megatron.core.transformer.moe.moe_utils import topk_routing_with_score_function

        router = self.router
        return topk_routing_with_score_function(
            logits_TE,
            router.topk,
            use_pre_softmax=router.config.moe_router_pre_softmax,
            num_groups=router.config.moe_router_num_groups,
            group_topk=router.config.moe_router_group_topk,
            score_function=router.score_function,
            expert_bias=router.expert_bias,
        )[1]
