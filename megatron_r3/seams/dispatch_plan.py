"""Called by patch 3: a token dispatcher takes the sizes of its layer from the dispatch plan.

Shape suffixes (docs/glossary.md): T, E, H.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.replay.plan import LayerSizes, PlanError, pads


class PlanHook:
    """Answers a token dispatcher with the sizes of its layer, if the active microbatch has a plan.

    Args:
        router: the router of the same layer, which knows the layer number and whether it replays.
    """

    def __init__(self, router: Any) -> None:
        self.router = router
        self._comparing = False

    def preprocess(self, dispatcher: Any, routing_map_TE: Tensor) -> Tensor | None:
        """Set the sizes of an all-to-all dispatcher from the plan, without waiting for the device.

        Returns:
            int64: how many tokens each local expert receives, as the dispatcher's own `preprocess`
            returns. None if the dispatcher has to learn the sizes on the device.

        Raises:
            PlanError: as `sizes`.
        """
        sizes = self.sizes(dispatcher, routing_map_TE)
        dispatcher.planned = sizes is not None
        if sizes is None:
            return None
        dispatcher.num_out_tokens = routing_map_TE.size(0) * dispatcher.config.moe_router_topk
        if pads(dispatcher.config):  # the routing map has more pairs, which are padding
            dispatcher.num_out_tokens = int(sizes.input_splits.sum())
        if dispatcher.ep_size > 1 or dispatcher.tp_size > 1:
            dispatcher.input_splits = sizes.input_splits
            dispatcher.output_splits = sizes.output_splits
            dispatcher.output_splits_tp = sizes.output_splits_tp
        if dispatcher.num_local_experts > 1:
            dispatcher.num_global_tokens_per_local_expert = sizes.received
        return sizes.tokens_per_expert

    def permute(self, dispatcher: Any, hidden_TH: Tensor) -> tuple[Tensor, Tensor, Tensor] | None:
        """Sort the tokens of an all-gather dispatcher by expert, without waiting for the device.

        The dispatcher's own `dispatch_postprocess` waits twice: for the counts of its local
        experts, and in `masked_select` of the probabilities, because the size of the result is on
        the device. Here the probabilities are permuted together with the tokens.

        Returns:
            The sorted tokens, how many of them each local expert has, and their probabilities, as
            the dispatcher's own `dispatch_postprocess` returns. None if there is no plan.

        Raises:
            PlanError: as `sizes`.
        """
        sizes = self.sizes(dispatcher, dispatcher.local_map)
        if sizes is None:
            return None
        from megatron.core.transformer.moe.moe_utils import permute

        sorted_hidden, dispatcher.local_probs, mapping, *_ = permute(
            hidden_TH,
            dispatcher.local_map,
            probs=dispatcher.local_probs,
            num_out_tokens=int(sizes.tokens_per_expert.sum()),
            fused=dispatcher.config.moe_permute_fusion,
        )
        dispatcher.reversed_local_input_permutation_mapping = mapping
        dispatcher.routing_map = None
        return sorted_hidden, sizes.tokens_per_expert, dispatcher.local_probs

    def sizes(self, dispatcher: Any, routing_map: Tensor) -> LayerSizes | None:
        """The planned sizes of this layer; None if the dispatcher has to learn them on the device.

        Args:
            routing_map: what the dispatcher would count, `[T, E]` or its local part.

        Raises:
            PlanError: `verify_plan` is on, and the plan contradicts the routing map.
        """
        # No plan covers a router that stays live (MTP).
        microbatch = self.router.router_replay.replayed_microbatch()
        if self._comparing or microbatch is None or microbatch.plan is None:
            return None
        planned = microbatch.plan[self.router.layer_number]
        if microbatch.verify_plan:
            self._compare(planned, self._learn(dispatcher, routing_map))
        # With fused permutation the all-to-all dispatcher needs `received`, but no other size, on
        # the device.
        device = getattr(dispatcher, "permute_idx_device", "cpu")
        if torch.device(device).type == "cpu":
            return planned
        return replace(planned, received=planned.received.to(device, non_blocking=True))

    def _learn(self, dispatcher: Any, routing_map: Tensor) -> dict[str, Any]:
        """What the dispatcher learns without a plan, by the field of LayerSizes."""
        if not hasattr(dispatcher, "preprocess"):  # all-gather learns only the local counts
            return {"tokens_per_expert": routing_map.sum(dim=0)}
        # `preprocess` asks this hook again; with `_comparing` the hook answers None.
        self._comparing = True
        try:
            learned = {"tokens_per_expert": dispatcher.preprocess(routing_map)}
        finally:
            self._comparing = False
        if dispatcher.ep_size > 1 or dispatcher.tp_size > 1:
            names = ("input_splits", "output_splits", "output_splits_tp")
            learned |= {name: getattr(dispatcher, name) for name in names}
        if dispatcher.num_local_experts > 1:
            learned["received"] = dispatcher.num_global_tokens_per_local_expert
        return learned

    def _compare(self, planned: LayerSizes, learned: dict[str, Any]) -> None:
        for name, value in learned.items():
            in_plan = np.asarray(getattr(planned, name))
            in_map = torch.as_tensor(value).cpu().numpy()
            # The dispatcher keeps some sizes in another shape: only the numbers are compared.
            if not np.array_equal(in_plan.ravel(), in_map.ravel()):
                raise PlanError(
                    f"dispatch plan: layer {self.router.layer_number}, rank "
                    f"{torch.distributed.get_rank()}: {name} is {in_plan.tolist()} in the plan, "
                    f"{in_map.tolist()} in the routing map; both must be equal. Turn "
                    "moe_router_replay_dispatch_plan off, and report this"
                )
