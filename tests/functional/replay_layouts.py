"""A training step of code written for RouterReplay, in every layout; and of one process without it.

Megatron is imported only inside the functions that a rank runs.

Shape suffixes (docs/glossary.md): L, T, K.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from megatron_r3 import MicrobatchRoutes, local_routers, replaying
from proof.fidelity.tiny import BATCH, EXPERTS, FULL, LAYERS, SEQUENCE, TOPK, VOCABULARY

MICROBATCHES = 4
RECOMPUTE: dict[str, dict[str, Any]] = {
    "none": {},
    "full": FULL,
    "moe": {"recompute_granularity": "selective", "recompute_modules": ["moe"]},
}
# ranks, and the sizes of the process groups
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "EP2": (2, {"expert_model_parallel_size": 2}),
    "TP2 SP": (2, {"tensor_model_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
}


@dataclass
class Data:
    """Micro-batches and their routes, which no live router would choose."""

    seed: int = 0
    tokens: list[torch.Tensor] = field(init=False)
    routes: list[torch.Tensor] = field(init=False)  # int64 [L, T, K], T in the order of a router

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(self.seed)
        shape = (BATCH, SEQUENCE + 1)
        self.tokens = [
            torch.randint(0, VOCABULARY, shape, generator=generator) for _ in range(MICROBATCHES)
        ]
        self.routes = [
            torch.rand(LAYERS, BATCH * SEQUENCE, EXPERTS, generator=generator).topk(TOPK).indices
            for _ in range(MICROBATCHES)
        ]


def own_rows(ids_LTK: torch.Tensor, chunk: Any) -> torch.Tensor:
    """The rows that this rank's routers see."""
    from megatron.core import parallel_state as mpu

    if not chunk.config.sequence_parallel:
        return ids_LTK
    size = mpu.get_tensor_model_parallel_world_size()
    return ids_LTK.chunk(size, 1)[mpu.get_tensor_model_parallel_rank()]


def replay_as_upstream_says(chunk: Any, ids_LTK: torch.Tensor, run: Callable[[], Any]) -> Any:
    """One forward pass as code for RouterReplay makes it: targets, action, pass, action."""
    from megatron.core.transformer.moe.router_replay import RouterReplay, RouterReplayAction

    routers = local_routers(chunk)
    ids = [ids_LTK[layer - 1] for layer in routers]
    hooks = [router.router_replay for router in routers.values()]
    if hooks == RouterReplay.global_router_replay_instances:
        RouterReplay.set_replay_data(ids)
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
        output = run()
        RouterReplay.set_global_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
        return output
    for hook, layer_ids in zip(hooks, ids, strict=True):
        hook.set_target_indices(layer_ids)
        hook.set_router_replay_action(RouterReplayAction.REPLAY_FORWARD)
    output = run()
    for hook in hooks:
        hook.set_router_replay_action(RouterReplayAction.REPLAY_BACKWARD)
    return output


def replay_natively(chunk: Any, ids_LTK: torch.Tensor, run: Callable[[], Any]) -> Any:
    """The same by `replaying`."""
    ids = {layer: ids_LTK[layer - 1] for layer in local_routers(chunk)}
    with replaying(MicrobatchRoutes(ids)):
        return run()


def live(chunk: Any, ids_LTK: torch.Tensor, run: Callable[[], Any]) -> Any:
    """Without replay."""
    return run()


@dataclass
class Step:
    """What one step did on one rank.

    Attributes:
        loss: summed over the micro-batches; None where the rank has no last stage.
        gradients: of every parameter, by its name.
        routers: the gradient of each router, by layer.
        maps: what each router did in each pass: layer, and its routing map.
    """

    loss: torch.Tensor | None = None
    gradients: dict[str, torch.Tensor] = field(default_factory=dict)
    routers: dict[int, torch.Tensor] = field(default_factory=dict)
    maps: list[tuple[int, torch.Tensor]] = field(default_factory=list)

    def wrong_passes(self, routes: list[torch.Tensor]) -> int:
        """How many passes did not take the routes of any micro-batch; routes are own rows."""
        return sum(
            not any(
                torch.equal(torch.zeros_like(seen).scatter(1, ids_LTK[layer - 1], True), seen)
                for ids_LTK in routes
            )
            for layer, seen in self.maps
        )


def run_step(
    chunks: list[Any],
    data: Data,
    way: Callable[..., Any],
    routes: list[torch.Tensor] | None = None,
    forward_only: bool = False,
) -> Step:
    """One step of Megatron's schedule for this layout, each forward pass by `way`."""
    from megatron.core.pipeline_parallel import get_forward_backward_func

    routes = data.routes if routes is None else routes
    step, losses = Step(), []
    handles = []
    for chunk in chunks:
        chunk.zero_grad(set_to_none=True)
        for router in local_routers(chunk).values():

            def keep(module: Any, _: Any, output: Any) -> None:
                step.maps.append((module.layer_number, output[1].detach().clone()))

            handles.append(router.register_forward_hook(keep))

    def loss_function(output: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        losses.append(output.sum().detach())
        return output.sum(), {}

    def forward_step(iterator: Any, chunk: Any) -> Any:
        tokens, ids_LTK = next(iterator)
        positions = torch.arange(SEQUENCE).expand(BATCH, -1)
        output = way(
            chunk,
            own_rows(ids_LTK, chunk),
            lambda: chunk(tokens[:, :-1], positions, None, labels=tokens[:, 1:]),
        )
        return output, loss_function

    iterators = [iter(zip(data.tokens, routes, strict=True)) for _ in chunks]
    get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iterators if len(chunks) > 1 else iterators[0],
        model=chunks if len(chunks) > 1 else chunks[0],
        num_microbatches=MICROBATCHES,
        seq_length=SEQUENCE,
        micro_batch_size=BATCH,
        forward_only=forward_only,
    )
    for handle in handles:
        handle.remove()
    step.loss = torch.stack(losses).sum() if losses else None
    for number, chunk in enumerate(chunks):
        for name, parameter in chunk.named_parameters():
            if parameter.grad is not None:
                step.gradients[f"{number} {name}"] = parameter.grad.clone()
        for layer, router in local_routers(chunk).items():
            if router.weight.grad is not None:
                step.routers[layer] = router.weight.grad.clone()
    return step


def same(one: Step, other: Step) -> bool:
    """Loss and every gradient bitwise equal."""
    if (one.loss is None) != (other.loss is None) or one.gradients.keys() != other.gradients.keys():
        return False
    return (one.loss is None or torch.equal(one.loss, other.loss)) and all(
        torch.equal(gradient, other.gradients[name]) for name, gradient in one.gradients.items()
    )
