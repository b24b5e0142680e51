"""What `benchmarks.layers` runs: a stack of Megatron's MoE layers, and the ways to take a step.

Megatron is imported inside the functions, because the command line says from which tree.

Shape suffixes (docs/glossary.md): E, K, L, T.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_r3.plan import ExpertRanks, count_tokens, layer_sizes
from megatron_r3.replay import MicrobatchRoutes, recording, replaying


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layers, and of the microbatch that goes through them."""

    layers: int = 4
    hidden: int = 2048
    heads: int = 32
    query_groups: int = 4
    head: int = 128
    experts: int = 128
    topk: int = 8
    ffn: int = 768
    sequence: int = 4096
    batch: int = 1
    vocabulary: int = 1024  # small, because the benchmark is about the layers


QWEN3_30B_A3B = Sizes()
TINY = Sizes(2, 32, 4, 2, 8, 8, 2, 16, 16, 2, 64)


@dataclass(frozen=True)
class Way:
    """How a step is routed, and which way it is compared with.

    Attributes:
        beside: the name of the way that it is compared with, whose steps stand next to its own.
        replays: the routers take the recorded routes. False: they are live.
        plan: the dispatcher takes its split sizes from a plan.
        fused: the routers try the fused gate.
        counted: the mismatch with live routing is measured for every token.
    """

    beside: str
    replays: bool = True
    plan: bool = False
    fused: bool = False
    counted: bool = False


# the way "live" is compared with itself: that is what two equal steps differ by
WAYS = {
    "live": Way("live", replays=False),
    "replay": Way("live"),
    "plan": Way("live", plan=True),
    "plan, fused": Way("live", plan=True, fused=True),
    "plan, counted": Way("plan", plan=True, counted=True),
    "fused, counted": Way("plan, fused", plan=True, fused=True, counted=True),
}


def start(cuda: bool) -> None:
    """Make process groups of one rank, and the random streams."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    if cuda:
        torch.cuda.set_device(0)
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)  # port 0: any free one
    backend = "nccl" if cuda else "gloo"
    torch.distributed.init_process_group(backend, store=store, rank=0, world_size=1)
    parallel_state.initialize_model_parallel(
        expert_tensor_parallel_size=1, create_gloo_process_groups=False
    )
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)


def _config(sizes: Sizes, cuda: bool) -> Any:
    """A config that needs neither Transformer Engine nor apex; each step sets its recompute."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    dtype = torch.bfloat16 if cuda else torch.float32
    unfused = ("bias_dropout_fusion", "masked_softmax_fusion", "gradient_accumulation_fusion")
    unfused += ("bias_activation_fusion", "apply_rope_fusion", "persist_layer_norm")
    return TransformerConfig(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
        num_query_groups=sizes.query_groups,
        kv_channels=sizes.head,
        ffn_hidden_size=sizes.ffn,
        num_moe_experts=sizes.experts,
        moe_router_topk=sizes.topk,
        moe_ffn_hidden_size=sizes.ffn,
        moe_token_dispatcher_type="alltoall",
        moe_router_load_balancing_type="none",
        moe_router_replay=True,
        moe_router_fusion=True,
        qk_layernorm=True,
        add_bias_linear=False,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        normalization="RMSNorm",
        hidden_dropout=0.0,
        attention_dropout=0.0,
        params_dtype=dtype,
        bf16=cuda,
        use_cpu_initialization=not cuda,
        init_method_std=sizes.hidden**-0.5,  # large enough for the experts to matter to the loss
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        **dict.fromkeys(unfused, False),
    )


def _model(sizes: Sizes, config: Any) -> Any:
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    model = GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=sizes.vocabulary,
        max_sequence_length=sizes.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return model.cuda().to(config.params_dtype)  # torch's norms are made in float32


class Stack:
    """A model, one batch, and the routes that its live routers take for it.

    One model serves all ways, because two do not fit on every GPU. A step changes only what is read
    at each pass: full recompute in the config, and whether the hook of a router tries the fused
    gate.

    Attributes:
        route_bytes: how many bytes the ids of one microbatch take on the device.
    """

    def __init__(self, sizes: Sizes, cuda: bool) -> None:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        self.sizes, self.config = sizes, _config(sizes, cuda)
        assert self.config.moe_router_replay_fused_gate
        # else live routers would take Transformer Engine's fused gate, where it is installed
        self.config.moe_router_fusion = False
        self.gpt = _model(sizes, self.config)
        self.layers = [m for m in self.gpt.modules() if isinstance(m, MoELayer)]
        self.routers = [layer.router for layer in self.layers]
        assert len(self.routers) == sizes.layers
        assert all(router.router_replay.fused for router in self.routers)
        self._batch = _batch(sizes)

    def record(self) -> None:
        """Keep what the live routers choose. Call it once, before the first replayed step."""
        tokens, positions, labels = self._batch
        with torch.no_grad(), recording() as recorded:
            self.gpt(tokens, positions, None, labels=labels)
        self._numbers = sorted(recorded.ids)
        ids_LTK = torch.stack([recorded.ids[number] for number in self._numbers]).cpu()
        # one byte for an id, as in a store, if there are so few experts
        ids_LTK = ids_LTK.to(torch.uint8 if self.sizes.experts <= 256 else torch.int16)
        self._ids_LTK = ids_LTK.pin_memory()  # only pinned memory is copied without waiting
        self._all_T = torch.ones(ids_LTK.shape[1], dtype=torch.bool).cuda()
        self.route_bytes = sum(ids.nbytes for ids in self._on_device().values())
        self.plan()

    def plan(self) -> None:
        """Work out the dispatch plan from the routes, as a training does ahead of a step."""
        # one rank has all experts: the counts of its own tokens are the counts of all ranks
        counts_LE = count_tokens(self._ids_LTK.numpy(), self.sizes.experts)
        alone = ExpertRanks(expert_size=1, expert_rank=0, tensor_size=1, tensor_rank=0)
        self._plan = layer_sizes(counts_LE[None], alone, self._numbers)

    def _on_device(self) -> dict[int, Tensor]:
        """The ids by layer, moved in one copy as `HostRoutes.on_device` moves them.

        That function is not called, because it needs the packages of the store.
        """
        moved = self._ids_LTK.to(torch.device("cuda"), non_blocking=True, copy=True)
        return dict(zip(self._numbers, moved, strict=True))

    def microbatch(self, way: Way) -> MicrobatchRoutes | None:
        """New routes of one microbatch, still being copied to the device, as in a training."""
        if not way.replays:
            return None
        microbatch = MicrobatchRoutes(
            self._on_device(),
            counted_T=self._all_T if way.counted else None,
            padding_T=~self._all_T,
            mean_tokens=float(len(self._all_T)),
        )
        microbatch.plan = self._plan if way.plan else None
        return microbatch

    def step(self, way: Way, recompute: bool) -> tuple[Tensor, MicrobatchRoutes | None]:
        """Run forward and backward; return the loss, on the device, and the microbatch.

        The microbatch is None for a live way. After the step it holds what was counted.
        """
        self.config.recompute_granularity = "full" if recompute else None
        for router in self.routers:
            router.router_replay.fused = way.fused
        self.gpt.zero_grad(set_to_none=True)
        tokens, positions, labels = self._batch
        microbatch = self.microbatch(way)
        with replaying(microbatch):
            loss: Tensor = self.gpt(tokens, positions, None, labels=labels).mean()
        loss.backward()
        return loss.detach(), microbatch

    def gradient(self) -> Tensor:
        """The gradients of all routers' weights, after a step."""
        return torch.stack([router.weight.grad.float() for router in self.routers])

    def described(self) -> dict[str, Any]:
        """What the record of a run says of the model."""
        parameters = sum(parameter.numel() for parameter in self.gpt.parameters())
        experts = type(self.layers[0].experts).__name__
        dtype = str(self.config.params_dtype).removeprefix("torch.")
        sizes = {**asdict(self.sizes), "dtype": dtype, "parameters": parameters}
        return {"sizes": sizes, "experts_module": experts, "route_bytes": self.route_bytes}


def _batch(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """tokens, position ids, labels `[B, S]`."""
    generator = torch.Generator().manual_seed(5)
    shape = (sizes.batch, sizes.sequence + 1)
    ids = torch.randint(0, sizes.vocabulary, shape, generator=generator).cuda()
    positions = torch.arange(sizes.sequence).expand(sizes.batch, -1).cuda()
    return ids[:, :-1].contiguous(), positions, ids[:, 1:].contiguous()
