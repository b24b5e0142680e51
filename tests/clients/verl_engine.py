"""One rank of verl's own Megatron engine on a tiny model: batches, passes, controls.

`MegatronEngineWithLMHead.forward_backward_batch` and all that it calls are verl's. The engine is
made without its `__init__`, which would load a Hugging Face checkpoint and start an optimizer; what
`__init__` does for replay is done here, in its order. Shims: the device is the CPU, and for
interleaved stages all sequences have one length, because gloo cannot exchange shapes there.

Shape suffixes (docs/glossary.md): E, K, T.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import torch
from replay_layouts import RECOMPUTE

from megatron_r3 import local_routers
from proof.fidelity.tiny import EXPERTS, LAYERS, TOPK, make_chunks

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


def jagged(tensors: list[torch.Tensor]) -> torch.Tensor:
    """A nested tensor that holds tensors of different lengths, without padding."""
    return torch.nested.as_nested_tensor(tensors, layout=torch.jagged)


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
            self._as_the_engine_does,
            variable_seq_lengths=self.num_chunks == 1,
            moe_permute_fusion=False,
            **RECOMPUTE[recompute],
            **options,
        )
        self.engine = self._without_init(mode)
        generator = torch.Generator().manual_seed(11)
        self.tokens = [torch.randint(1, 64, (n,), generator=generator) for n in self.lengths]
        self.routes = [  # of each sample [T, L, K]; the last token has none
            torch.rand(n - 1, LAYERS, EXPERTS, generator=generator).topk(TOPK).indices
            for n in self.lengths
        ]

    def _without_init(self, mode: str) -> Any:
        """verl's engine of this rank, with the fields that its methods read."""
        engine = object.__new__(self.impl.MegatronEngineWithLMHead)
        engine.engine_config = SimpleNamespace(
            router_replay=SimpleNamespace(mode=mode),
            use_fused_kernels=False,
            context_parallel_size=self.sizes.get("context_parallel_size", 1),
            dynamic_context_parallel=False,
            pad_bshd_to_minibatch_max=False,
            use_remove_padding=True,
            pad_to_length=False,
            pad_to_length_bucket=512,
            entropy_from_logits_with_chunking=False,
            virtual_pipeline_model_parallel_size=self.num_chunks if self.num_chunks > 1 else None,
        )
        engine.model_config = SimpleNamespace(
            mtp=SimpleNamespace(enable=False, enable_train=False),
            hf_config=SimpleNamespace(architectures=["Qwen3MoeForCausalLM"]),
            tokenizer=SimpleNamespace(pad_token_id=0),
        )
        engine.tf_config, engine.module = self.chunks[0].config, self.chunks
        engine.enable_routing_replay, engine.mini_layer_topk_idx_list = True, []
        return engine

    def _shim(self) -> None:
        from verl.utils.megatron import router_replay_utils

        self.impl.get_device_id = lambda: "cpu"
        router_replay_utils.device_name = "cpu"
        if self.num_chunks > 1:
            schedule = self.impl.get_forward_backward_func

            def of_one_length() -> Any:
                run = schedule()
                return lambda **given: run(**{**given, "seq_length": 20, "micro_batch_size": 1})

            self.impl.get_forward_backward_func = of_one_length

    def _as_the_engine_does(self, config: Any) -> None:
        """Set what verl sets on the finished config (`_build_tf_config`)."""
        name = "enable_routing_replay" if self.is_old else "moe_enable_routing_replay"
        setattr(config, name, True)
        if self.num_chunks > 1:
            config.microbatch_group_size_per_vp_stage = 2

    def batch(self, routes: list[torch.Tensor] | None, replays: bool = True) -> Any:
        """A TensorDict as verl's trainer hands it to the engine.

        Args:
            routes: of each sample, as `given` returns them; None: the batch has no routes.
            replays: whether this call of the engine replays.
        """
        from verl.utils import tensordict_utils as tu

        response_mask = torch.zeros(len(self.tokens), max(RESPONSES))
        loss_mask = []
        for index, (ids, length) in enumerate(zip(self.tokens, RESPONSES, strict=True)):
            response_mask[index, :length] = 1
            before = torch.zeros(len(ids) - length - 1)
            loss_mask.append(torch.cat([before, torch.ones(length), torch.zeros(1)]))
        tensors = {
            "input_ids": jagged(self.tokens),
            "loss_mask": jagged(loss_mask),
            "response_mask": response_mask,
            "temperature": torch.ones(len(self.tokens)),
        }
        settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2}
        settings["enable_routing_replay"] = replays
        data = tu.get_tensordict(tensors, non_tensor_dict=settings)
        if routes is not None:
            data["routed_experts"] = jagged(routes)
        return data

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
