"""Other half of the dispatcher patch: the sizes of a planned microbatch.

Shape suffixes: T tokens of this rank, E experts.
"""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from megatron_r3.microbatch import Mode
from megatron_r3.plan import LayerSizes, PlanError
from megatron_r3.replay import active_microbatch


class PlanHook:
    """Answers a token dispatcher with the sizes of its layer, if the active microbatch has a plan.

    Args:
        router: the layer's own; it knows which layer it is, and whether it replays.
    """

    def __init__(self, router: Any) -> None:
        self.router = router
        self._comparing = False

    def sizes(self, dispatcher: Any, routing_map: Tensor) -> LayerSizes | None:
        """The planned sizes of this layer, or None: learn them on the device.

        Args:
            routing_map: what the dispatcher would count, `[T, E]` or its local part.

        Raises:
            PlanError: with `verify_plan`, the plan is not what the map says.
        """
        microbatch = active_microbatch()
        if self._comparing or microbatch is None or microbatch.plan is None:
            return None
        if microbatch.mode is not Mode.REPLAY or not self.router.router_replay.replays:
            return None
        sizes = microbatch.plan[self.router.layer_number]
        if microbatch.verify_plan:
            self._compare(sizes, self._ordinary(dispatcher, routing_map))
        device = getattr(dispatcher, "permute_idx_device", "cpu")
        if torch.device(device).type == "cpu":
            return sizes
        return replace(sizes, received=sizes.received.to(device, non_blocking=True))

    def _ordinary(self, dispatcher: Any, routing_map: Tensor) -> dict[str, Any]:
        """What the dispatcher learns without a plan, by the names of LayerSizes."""
        if not hasattr(dispatcher, "preprocess"):  # all-gather: nothing but the local counts
            return {"tokens_per_expert": routing_map.sum(dim=0)}
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

    def _compare(self, sizes: LayerSizes, learned: dict[str, Any]) -> None:
        for field in fields(sizes):
            if field.name not in learned:
                continue
            planned = np.asarray(getattr(sizes, field.name))
            really = torch.as_tensor(learned[field.name]).cpu().numpy()
            if not np.array_equal(planned.ravel(), really.ravel()):
                raise PlanError(
                    f"dispatch plan: layer {self.router.layer_number}, rank "
                    f"{torch.distributed.get_rank()}: {field.name} is {planned.tolist()} in the "
                    f"plan, {really.tolist()} in the routing map"
                )
