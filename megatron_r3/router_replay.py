"""Upstream's RouterReplay, for a release that lacks it: a global list of routers and an action.

For code that is written for that interface (megatron/core/transformer/moe/router_replay.py from
0.16 on), where a caller sets the indices of all routers, flips an action and runs the model. It has
the limits of the original: the list is in the order of construction, so another model in the
process shifts it, and recomputes take the indices in the order in which they were given.
`megatron_r3.replay` has none of this and does not use it.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import ClassVar

from torch import Tensor


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
        default_compute_topk: Callable[..., tuple[Tensor, Tensor]] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return scores and indices of the top-k, as the action says."""
        if self.router_replay_action == RouterReplayAction.REPLAY_FORWARD:
            assert self.target_topk_idx is not None, "no indices were set to replay"
            top_indices = self.target_topk_idx.to(scores.device)
        elif self.router_replay_action == RouterReplayAction.REPLAY_BACKWARD:
            # First in, first out: the recomputes must come in the order of the forward passes.
            top_indices = self.replay_backward_list.pop(0).to(scores.device)
        else:
            assert default_compute_topk is not None
            values, top_indices = default_compute_topk(scores, topk, num_groups, group_topk)
            if self.router_replay_action == RouterReplayAction.RECORD:
                self.record_indices(top_indices)
            return values, top_indices
        return scores.gather(1, top_indices), top_indices
