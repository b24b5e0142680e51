"""What the routers of a model do, and whether their layers have a dispatch plan, pass by pass.

Megatron is imported only inside the functions that a rank runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from megatron_r3 import local_routers


def maps_of(gpt: Any) -> list[tuple[int, torch.Tensor]]:
    """What each decoder router does from now on: layer, and routing map `[T, E]`.

    A recompute is a pass of its own.
    """
    seen: list[tuple[int, torch.Tensor]] = []

    def keep(router: Any, _: Any, output: Any) -> None:
        seen.append((router.layer_number, output[1].clone()))

    for router in local_routers(gpt).values():
        router.register_forward_hook(keep)
    return seen


@contextmanager
def watched_plans() -> Iterator[list[bool]]:
    """For each time that a token dispatcher asks in the block, whether there is a dispatch plan.

    With `moe_router_replay_verify_plan` the all-to-all dispatcher asks twice in each pass, and is
    told once that there is no plan: so the passes with a plan are the sum.
    """
    from megatron_r3.seams.dispatch_plan import PlanHook

    planned: list[bool] = []
    sizes = PlanHook.sizes

    def watched(self: PlanHook, *args: Any) -> Any:
        answer = sizes(self, *args)
        planned.append(answer is not None)
        return answer

    PlanHook.sizes = watched  # type: ignore[method-assign]
    try:
        yield planned
    finally:
        PlanHook.sizes = sizes  # type: ignore[method-assign]
