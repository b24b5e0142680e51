"""One rank of verl's own Megatron engine on a tiny model: batches, passes, controls.

`proof.fidelity.clients.verl_engine` says how the engine is made; what its `__init__` does for
replay is done here, in its order. Shims: the device is the CPU, and for interleaved stages all
sequences have one length, because gloo cannot exchange shapes there.

Shape suffixes (docs/glossary.md): E, K, T.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from replay_layouts import EXPERTS, LAYERS, TOPK, make_chunks

from megatron_r3 import local_routers
from proof.fidelity.clients.verl_engine import (
    ask_for_replay,
    bare_engine,
    jagged,
    put_on_cpu,
    trainer_batch,
)

LENGTHS, RESPONSES = [9, 14, 6, 11], [4, 6, 3, 5]  # of the samples; two in a micro-batch
LAYOUTS: dict[str, tuple[int, dict[str, int]]] = {
    "1": (1, {}),
    "EP2": (2, {"expert_model_parallel_size": 2}),
    "TP2 SP EP2": (2, {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    "PP2": (2, {"pipeline_model_parallel_size": 2}),
    "PP2 VPP2": (2, {"pipeline_model_parallel_size": 2, "virtual_pipeline_model_parallel_size": 2}),
    "CP2": (2, {"context_parallel_size": 2}),
    "CP2 EP2": (2, {"context_parallel_size": 2, "expert_model_parallel_size": 2}),
}


@dataclass
class Passes:
    """What the routers of this rank did in one call of the engine.

    Attributes:
        maps: layer, and routing map `[T, E]`, of every pass.
        loss: of each micro-batch; None where the rank has no last stage.
        routers: the gradient of each router, by layer.
        metrics: what verl would log.
    """

    maps: list[tuple[int, torch.Tensor]] = field(default_factory=list)
    loss: list[float] | None = None
    routers: dict[int, torch.Tensor] = field(default_factory=dict)
    metrics: dict[str, Any] = field(default_factory=dict)
    model_output: dict[str, Any] = field(default_factory=dict)


class Engine:
    """verl's engine on this rank, with what a test asks of it.

    Args:
        layout: a key of LAYOUTS.
        recompute: a key of `replay_layouts.RECOMPUTE`.
        mode: verl's `router_replay.mode`: R2 or R3.
        even: whether all sequences have one length, as interleaved stages need them.
        options: of the TransformerConfig.
    """

    def __init__(
        self, layout: str, recompute: str, mode: str, even: bool = False, **options: Any
    ) -> None:
        import verl
        from verl.workers.engine.megatron import transformer_impl as impl

        self.is_old = verl.__version__.startswith("0.8")
        self.sizes, self.impl = LAYOUTS[layout][1], impl
        self.num_chunks = self.sizes.get("virtual_pipeline_model_parallel_size", 1)
        self.lengths = [10] * 4 if even or self.num_chunks > 1 else LENGTHS
        self._shim()
        impl.apply_router_replay_patch()  # what the engine's __init__ does first
        self.chunks = make_chunks(
            self.sizes,
            recompute,
            self._as_the_engine_does,
            variable_seq_lengths=self.num_chunks == 1,
            moe_permute_fusion=False,
            **options,
        )
        context_parallel = self.sizes.get("context_parallel_size", 1)
        self.engine = bare_engine(impl, self.chunks, mode, context_parallel)
        generator = torch.Generator().manual_seed(11)
        self.tokens = [torch.randint(1, 64, (n,), generator=generator) for n in self.lengths]
        self.routes = [  # of each sample [T, L, K]; the last token has none
            torch.rand(n - 1, LAYERS, EXPERTS, generator=generator).topk(TOPK).indices
            for n in self.lengths
        ]

    def _shim(self) -> None:
        put_on_cpu(self.impl)
        if self.num_chunks > 1:
            schedule = self.impl.get_forward_backward_func

            def of_one_length() -> Any:
                run = schedule()
                return lambda **given: run(**{**given, "seq_length": 20, "micro_batch_size": 1})

            self.impl.get_forward_backward_func = of_one_length

    def _as_the_engine_does(self, config: Any) -> None:
        """Set what verl sets on the finished config (`_build_tf_config`)."""
        ask_for_replay(config)
        if self.num_chunks > 1:
            config.microbatch_group_size_per_vp_stage = 2

    def batch(self, routes: list[torch.Tensor] | None, replays: bool = True) -> Any:
        """A TensorDict as verl's trainer hands it to the engine."""
        return trainer_batch(self.tokens, RESPONSES, routes, 2, replays)

    def given(self, routes: list[torch.Tensor]) -> list[torch.Tensor]:
        """Routes as verl's rollout hands them over: 0.8 has a row of zeros for the last token."""
        if not self.is_old:
            return routes
        return [torch.cat([route, torch.zeros_like(route[:1])]) for route in routes]

    def run(self, data: Any, forward_only: bool = False) -> Passes:
        """One call of the engine."""
        passes, handles = Passes(), []
        for chunk in self.chunks:
            chunk.zero_grad(set_to_none=True)
            for router in local_routers(chunk).values():

                def keep(module: Any, _: Any, output: Any) -> None:
                    passes.maps.append((module.layer_number, output[1].detach().clone()))

                handles.append(router.register_forward_hook(keep))
        with torch.set_grad_enabled(not forward_only):
            output = self.engine.forward_backward_batch(data, self.loss, forward_only=forward_only)
        for handle in handles:
            handle.remove()
        if output:
            passes.loss, passes.metrics = output["loss"], output["metrics"]
            passes.model_output = output["model_output"]
        for chunk in self.chunks:
            for layer, router in local_routers(chunk).items():
                if router.weight.grad is not None:
                    passes.routers[layer] = router.weight.grad.clone()
        return passes

    def loss(self, model_output: Any, data: Any, dp_group: Any = None) -> Any:
        """A weight for each position of a sample, so that every log-prob counts differently."""
        log_probs, mask = model_output["log_probs"], data["loss_mask"].values()
        lengths = data["input_ids"].offsets().diff().tolist()
        weights = torch.cat([torch.cos(torch.arange(length)) for length in lengths])
        values = log_probs.values() if log_probs.is_nested else log_probs
        return (values.reshape(-1) * weights * mask.reshape(-1)).sum() / len(self.lengths), {}

    def wrong(self, passes: Passes, routes: list[torch.Tensor]) -> int:
        """Passes in which a token with a route went elsewhere, by verl's own packing of row ids."""
        missing = torch.full((1, LAYERS, TOPK), -1)
        each = zip(routes, self.lengths, strict=True)
        want = torch.cat([torch.cat([route, missing])[:length] for route, length in each])
        packed = [self._rows([0, 1]), self._rows([2, 3])]
        wrong = 0
        for layer, map_TE in passes.maps:
            fits = []
            for rows_T in packed:
                if len(rows_T) != len(map_TE):
                    continue
                ids_TK = want[rows_T.clamp(min=0), layer - 1]
                has_T = (rows_T >= 0) & (ids_TK[:, 0] >= 0)
                wanted_TE = torch.zeros_like(map_TE).scatter(1, ids_TK.clamp(min=0), True)
                fits.append(torch.equal(wanted_TE[has_T], map_TE[has_T]) and bool(has_T.any()))
            wrong += not any(fits)
        return wrong

    def _rows(self, samples: list[int]) -> torch.Tensor:
        """The row of each token that this rank's routers see for these samples; -1 for padding."""
        from megatron.core import mpu
        from verl.models.mcore.util import preprocess_thd_engine

        first = torch.tensor([0, *self.lengths]).cumsum(0)
        numbers = jagged([torch.arange(self.lengths[i]) + first[i] + 1 for i in samples])
        rows_T = preprocess_thd_engine(numbers, pre_process=True)[0].squeeze(0)
        if self.chunks[0].config.sequence_parallel:
            size = mpu.get_tensor_model_parallel_world_size()
            rows_T = rows_T.chunk(size)[mpu.get_tensor_model_parallel_rank()]
        return rows_T - 1
