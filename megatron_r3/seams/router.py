"""Other half of the router patch: the object that a TopKRouter asks for its top-k.

Shape suffixes: T tokens, E experts, K top-k.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from megatron_r3.replay import active_microbatch

__all__ = ["RouterHook"]


class RouterHook:
    """Speaks the protocol of Megatron's `RouterReplay` to `topk_routing_with_score_function`.

    Holds no state but its layer number, which `Router.set_layer_number` writes: the routes are
    those of the active microbatch.
    """

    def __init__(self, layer_number: int | None = None) -> None:
        self.layer_number = layer_number

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
        if microbatch is None:
            return live_topk()
        return microbatch.topk(self.layer_number, scores, topk, live_topk)
