"""What only the patches of 0.15 call, or of 0.15 and 0.16: later lines have it upstream.

`RouterReplay` is upstream's (megatron/core/transformer/moe/router_replay.py from 0.16 on), for code
that is written for that interface: a global list of routers in the order of construction, and an
action that the caller flips. It has the limits of the original; `megatron_r3.replay` does not use
it.

Shape suffixes (docs/glossary.md): T, E.
"""

from __future__ import annotations

from enum import Enum
from typing import ClassVar

import torch
from torch import Tensor

from megatron_r3.seams.load import RouterLoad
from megatron_r3.seams.router import TopK


def z_loss_of_real_tokens(
    load: RouterLoad, logits_TE: Tensor, coeff: float
) -> tuple[Tensor, int | Tensor]:
    """The z-loss of the real tokens, and how many these are; called by 0.15.

    From 0.16 on upstream's `z_loss_func` (megatron/core/transformer/moe/moe_utils.py) takes a
    padding mask and gives the same.
    """
    values_T = torch.logsumexp(logits_TE, dim=-1).square()
    num_tokens = load.real_tokens(logits_TE.shape[0])
    if isinstance(num_tokens, int):  # no token is padding
        return values_T.mean() * coeff, num_tokens
    values_T = load.without_padding(values_T[:, None])[:, 0]
    # A rank may have nothing but padding; its loss is 0, not 0 / 0.
    return values_T.sum() / num_tokens.clamp(min=1) * coeff, num_tokens


def keep_live(module: torch.nn.Module) -> None:
    """Tell the routers in an MTP layer to stay live; called by 0.15 and 0.16.

    From 0.17 on a router is told when it is made.
    """
    from megatron.core.transformer.moe.router import TopKRouter

    for router in module.modules():
        if isinstance(router, TopKRouter):
            router.router_replay.has_routes = False


class RouterReplayAction(Enum):
    """What every router does with its top-k."""

    RECORD = "record"
    REPLAY_FORWARD = "replay_forward"
    REPLAY_BACKWARD = "replay_backward"


class RouterReplay:
    """Records or replays the top-k of one router; the routers of a process are a global list."""

    global_router_replay_instances: ClassVar[list[RouterReplay]] = []
    target_topk_idx: Tensor | None
    recorded_topk_idx: Tensor | None
    replay_backward_list: list[Tensor]

    def __init__(self) -> None:
        """Joins the global list, in the order in which routers are built."""
        self.clear_router_replay_action()
        self.clear_indices()
        RouterReplay.global_router_replay_instances.append(self)

    @staticmethod
    def set_replay_data(all_layers_topk_indices: list[Tensor]) -> None:
        """Give each router its indices, in the order of the global list."""
        routers = RouterReplay.global_router_replay_instances
        if len(all_layers_topk_indices) != len(routers):
            raise ValueError(
                f"{len(all_layers_topk_indices)} replay tensors for {len(routers)} routers."
            )
        for router, topk_indices in zip(routers, all_layers_topk_indices, strict=True):
            router.set_target_indices(topk_indices)

    @staticmethod
    def get_recorded_data() -> list[Tensor | None]:
        """What each router has recorded."""
        return [r.get_recorded_indices() for r in RouterReplay.global_router_replay_instances]

    @staticmethod
    def clear_global_indices() -> None:
        """Forget what all routers have recorded and were given."""
        for router in RouterReplay.global_router_replay_instances:
            router.clear_indices()

    @staticmethod
    def set_global_router_replay_action(router_replay_action: RouterReplayAction) -> None:
        """Set the action of all routers."""
        for router in RouterReplay.global_router_replay_instances:
            router.set_router_replay_action(router_replay_action)

    @staticmethod
    def clear_global_router_replay_action() -> None:
        """Let all routers route live."""
        for router in RouterReplay.global_router_replay_instances:
            router.clear_router_replay_action()

    @staticmethod
    def clear_global_router_replay_instances() -> None:
        """Empty the global list."""
        RouterReplay.global_router_replay_instances.clear()

    def set_target_indices(self, topk_indices: Tensor) -> None:
        """Set what the next forward, and the recompute of it, replays."""
        self.target_topk_idx = topk_indices
        self.replay_backward_list.append(topk_indices)

    def get_recorded_indices(self) -> Tensor | None:
        """Return what was recorded last."""
        return self.recorded_topk_idx

    def record_indices(self, topk_indices: Tensor) -> None:
        """Keep the top-k of a pass."""
        self.recorded_topk_idx = topk_indices

    def clear_indices(self) -> None:
        """Forget what was recorded and given."""
        self.target_topk_idx = None
        self.recorded_topk_idx = None
        self.replay_backward_list = []

    def set_router_replay_action(self, router_replay_action: RouterReplayAction | None) -> None:
        """Set the action of this router; None lets it route live."""
        self.router_replay_action = router_replay_action

    def clear_router_replay_action(self) -> None:
        """Let this router route live."""
        self.set_router_replay_action(None)

    def get_replay_topk(
        self,
        scores: Tensor,
        topk: int,
        num_groups: int | None = None,
        group_topk: int | None = None,
        default_compute_topk: TopK | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the top-k, as the action says."""
        if self.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            assert self.target_topk_idx is not None, "no indices were set to replay"
            top_indices = self.target_topk_idx.to(scores.device)
        elif self.router_replay_action == RouterReplayAction.REPLAY_BACKWARD:
            top_indices = self.replay_backward_list.pop(0).to(scores.device)
        else:
            assert default_compute_topk is not None
            values, top_indices = default_compute_topk(scores, topk, num_groups, group_topk)
            if self.router_replay_action == RouterReplayAction.RECORD:
                self.record_indices(top_indices)
            return values, top_indices
        return scores.gather(1, top_indices), top_indices
