"""What layers.py runs: slices of models as Megatron's MoE layers, and the ways to take a step.

Megatron is imported inside the functions, because the command line says from which tree.

Shape suffixes (docs/glossary.md): A, B, E, F, K, L, S, T.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_r3.cpu import CPU_CONFIG
from megatron_r3.replay.active import MicrobatchRoutes, recording, replaying
from megatron_r3.replay.plan import ExpertRanks, layer_sizes
from megatron_r3.replay.rows import count_tokens
from megatron_r3.replay.tally import Tally

SPECS = ("local", "te")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layers, and of the micro-batch that goes through them."""

    layers: int
    hidden: int
    heads: int
    experts: int
    topk: int
    ffn: int  # of one expert
    sequence: int
    batch: int
    vocabulary: int  # small, because the benchmark is about the layers


@dataclass(frozen=True)
class Model:
    """A slice of a model: its sizes, and the other fields of Megatron's config.

    Attributes:
        sizes: the sizes of a run on a GPU; every layer is a MoE layer.
        tiny: the sizes of a rehearsal, on a CPU.
        config: further fields of Megatron's config, the same in a rehearsal.
        large: further fields of a run on a GPU; a rehearsal has `small` in their place.
        latent: whether attention is multi-latent (MLA).
    """

    sizes: Sizes
    tiny: Sizes
    config: dict[str, Any]
    large: dict[str, Any]
    small: dict[str, Any]
    latent: bool = False


MODELS = {
    # https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json
    "Qwen3-30B-A3B": Model(
        Sizes(4, 2048, 32, 128, 8, 768, 4096, 1, 1024),
        Sizes(2, 32, 4, 8, 2, 16, 16, 2, 64),
        config={},
        large={"num_query_groups": 4, "kv_channels": 128},
        small={"num_query_groups": 2, "kv_channels": 8},
    ),
    # arXiv 2412.19437, section 4.2; its first three layers, which are dense, are not in the slice
    "DeepSeek-V3": Model(
        Sizes(2, 7168, 128, 256, 8, 2048, 4096, 1, 1024),
        Sizes(2, 32, 4, 16, 4, 16, 16, 2, 64),
        config={
            "moe_router_score_function": "sigmoid",
            "moe_router_enable_expert_bias": True,
            "moe_router_dtype": "fp32",
            "moe_router_topk_scaling_factor": 2.5,
            "rope_type": "rope",  # as before the context was extended with YaRN
        },
        large={
            **{"q_lora_rank": 1536, "kv_lora_rank": 512, "v_head_dim": 128},
            **{"qk_head_dim": 128, "qk_pos_emb_head_dim": 64},
            **{"moe_router_num_groups": 8, "moe_router_group_topk": 4},
            "moe_shared_expert_intermediate_size": 2048,
        },
        small={
            **{"q_lora_rank": 16, "kv_lora_rank": 8, "v_head_dim": 8},
            **{"qk_head_dim": 8, "qk_pos_emb_head_dim": 4},
            **{"moe_router_num_groups": 4, "moe_router_group_topk": 2},
            "moe_shared_expert_intermediate_size": 16,
        },
        latent=True,
    ),
}


def make_config(model: Model, sizes: Sizes, spec: str, cuda: bool) -> Any:
    """Megatron's config of the model, with full recompute, which `Stack.step` switches off and on.

    The local spec needs neither Transformer Engine nor apex. With Transformer Engine the options
    are those of a training script: grouped GEMMs, fused permutation, fused SwiGLU, fused rotary
    embedding (not for MLA, where Megatron calls it experimental). Weight gradients are not
    accumulated into `main_grad`, because there is no DDP here that would make that buffer.
    """
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    te = spec == "te"
    kernels = CPU_CONFIG | {"use_cpu_initialization": not cuda}
    kernels |= {"bias_activation_fusion": te, "apply_rope_fusion": te and not model.latent}
    kernels |= {"moe_permute_fusion": te, "moe_grouped_gemm": te}
    kind = MLATransformerConfig if model.latent else TransformerConfig
    fields = {
        "num_layers": sizes.layers,
        "hidden_size": sizes.hidden,
        "num_attention_heads": sizes.heads,
        "ffn_hidden_size": sizes.ffn,
        "num_moe_experts": sizes.experts,
        "moe_router_topk": sizes.topk,
        "moe_ffn_hidden_size": sizes.ffn,
        "moe_token_dispatcher_type": "alltoall",
        "moe_router_load_balancing_type": "none",
        "moe_router_replay": True,
        "moe_router_fusion": True,
        "qk_layernorm": True,
        "add_bias_linear": False,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "params_dtype": torch.bfloat16 if cuda else torch.float32,
        "bf16": cuda,
        "init_method_std": sizes.hidden**-0.5,  # large enough for the experts to matter to the loss
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        **kernels,
        **model.config,
        **(model.large if cuda else model.small),
    }
    return kind(**fields)


def make_model(model: Model, sizes: Sizes, config: Any, spec: str) -> Any:
    """A GPTModel on the device."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    block = get_gpt_decoder_block_spec(config, use_transformer_engine=spec == "te")
    if model.latent and spec == "local":
        for layer in block.layer_specs:
            layer.submodules.self_attention.submodules.core_attention = CausalAttention
    gpt = GPTModel(
        config,
        block,
        vocab_size=sizes.vocabulary,
        max_sequence_length=sizes.sequence,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )
    return gpt.cuda().to(config.params_dtype)  # torch's norms are made in float32


class CausalAttention(torch.nn.Module):
    """The core attention of MLA on the local spec: torch's scaled_dot_product_attention.

    Megatron's local core attention (megatron/core/transformer/dot_product_attention.py, 0.19) does
    not take heads whose keys are wider than their values.
    """

    def __init__(self, softmax_scale: float | None = None, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(
        self, query_SBAF: Tensor, key_SBAF: Tensor, value_SBAF: Tensor, *_: Any, **__: Any
    ) -> Tensor:
        """The attention of each position to those before it and itself, `[S, B, A * F]`."""
        query, key, value = (t.permute(1, 2, 0, 3) for t in (query_SBAF, key_SBAF, value_SBAF))
        out = torch.nn.functional.scaled_dot_product_attention(
            query, key, value, is_causal=True, scale=self.scale
        )
        return out.permute(2, 0, 1, 3).flatten(2)


@dataclass(frozen=True)
class Way:
    """How a step is routed, and with which way it is compared.

    Attributes:
        beside: the name of the way that this one is compared with; their steps are neighbours.
        replays: whether the routers take the recorded routes, or are live.
        plan: whether the dispatcher takes its split sizes from a plan.
        fused: whether routers try the fused gate; in a live way, Transformer Engine's fused top-k.
        counted: whether the mismatch with live routing is measured, for every token.
    """

    beside: str
    replays: bool = True
    plan: bool = False
    fused: bool = False
    counted: bool = False


# "live" stands beside itself: that ratio shows how much the times of two equal steps differ.
WAYS = {
    "live": Way("live", replays=False),
    "replay": Way("live"),
    "plan": Way("live", plan=True),
    "plan, fused": Way("live", plan=True, fused=True),
    "plan, counted": Way("plan", plan=True, counted=True),
    "fused, counted": Way("plan, fused", plan=True, fused=True, counted=True),
}
# what a training with Transformer Engine and --moe-router-fusion runs without replay
LIVE_FUSED = "live, fused"
TE_WAYS = {
    LIVE_FUSED: Way("live", replays=False, fused=True),
    "plan, fused": Way(LIVE_FUSED, plan=True, fused=True),
}


def ways_of(config: Any, spec: str) -> tuple[dict[str, Way], dict[str, str]]:
    """The ways that a model can run, and why it cannot run the others, by name."""
    ways, skipped = dict(WAYS), {}
    if spec == "te":
        ways |= TE_WAYS
    else:
        skipped[LIVE_FUSED] = "the fused live router is Transformer Engine's"
    if config.moe_router_group_topk:
        del ways["fused, counted"]
        skipped["fused, counted"] = "the fused gate counts over all experts, without groups"
    return ways, skipped


def start(cuda: bool) -> None:
    """Make process groups of this one rank, and seed the random streams.

    Args:
        cuda: whether the rank has a GPU.
    """
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


class Stack:
    """A model, one batch, and the routes that its live routers take for it.

    One model serves all ways, because two do not fit on every GPU. A step sets only what Megatron
    reads in each pass: full recompute and the fused live router in the config, and whether the hook
    of a router tries the fused gate.

    Attributes:
        ways: the ways that the model can run, by name.
        skipped: for each way that the model cannot run, the reason.
        route_bytes: how many bytes the ids of one micro-batch take on the device: uint8, or int16
            above 256 experts.
        route_bytes_measured: by how much the ids raised the memory that CUDA's allocator has given
            out, which rounds up to 512 bytes; None on a CPU.
    """

    def __init__(self, model: Model, sizes: Sizes, spec: str, cuda: bool) -> None:
        from megatron.core.transformer.moe.moe_layer import MoELayer

        self.sizes, self.spec, self.cuda = sizes, spec, cuda
        self.config = make_config(model, sizes, spec, cuda)
        assert self.config.moe_router_replay_fused_gate
        # if this stayed True, live routers would take Transformer Engine's fused gate
        self.config.moe_router_fusion = False
        self.ways, self.skipped = ways_of(self.config, spec)
        self.gpt = make_model(model, sizes, self.config, spec)
        self.layers = [m for m in self.gpt.modules() if isinstance(m, MoELayer)]
        self.routers = [layer.router for layer in self.layers]
        assert len(self.routers) == sizes.layers
        assert all(router.router_replay.fused for router in self.routers)
        grouped = type(self.layers[0].experts).__name__ == "TEGroupedMLP"
        assert grouped == (spec == "te"), (
            f"--spec {spec}: the experts are {type(self.layers[0].experts).__name__}"
        )
        self._batch = _batch(sizes)

    def record(self) -> None:
        """Keep the routes that the live routers choose; called once, before the first replay."""
        tokens, positions, labels = self._batch
        with torch.no_grad(), recording() as recorded:
            self.gpt(tokens, positions, None, labels=labels)
        self._numbers = sorted(recorded.ids)
        ids_LTK = torch.stack([recorded.ids[number] for number in self._numbers]).cpu()
        # one byte for an id if there are at most 256 experts, as in a store
        ids_LTK = ids_LTK.to(torch.uint8 if self.sizes.experts <= 256 else torch.int16)
        self._ids_LTK = ids_LTK.pin_memory()  # only pinned memory is copied without waiting
        self._all_T = torch.ones(ids_LTK.shape[1], dtype=torch.bool).cuda()
        before = torch.cuda.memory_allocated() if self.cuda else 0
        moved = self._on_device()
        self.route_bytes = sum(ids.nbytes for ids in moved.values())
        self.route_bytes_measured = torch.cuda.memory_allocated() - before if self.cuda else None
        self.plan()

    def plan(self) -> None:
        """Work out the dispatch plan from the routes, as a training does ahead of a step."""
        # one rank has all experts: the counts of its own tokens are the counts of all ranks
        counts_LE = count_tokens(self._ids_LTK.numpy(), self.sizes.experts)
        alone = ExpertRanks(expert_size=1, expert_rank=0, tensor_size=1, tensor_rank=0)
        self._plan = layer_sizes(counts_LE, counts_LE[None], alone, self._numbers)

    def _on_device(self) -> dict[int, Tensor]:
        """The ids by layer, moved in one copy.

        `HostRoutes.on_device` also moves the masks of the tokens, which here are on the device.
        """
        moved = self._ids_LTK.to(torch.device("cuda"), non_blocking=True, copy=True)
        return dict(zip(self._numbers, moved, strict=True))

    def microbatch(self, way: Way) -> MicrobatchRoutes | None:
        """New routes of one micro-batch; their copy to the device may still run, as in training."""
        if not way.replays:
            return None
        return MicrobatchRoutes(
            self._on_device(),
            tally=Tally(self._all_T) if way.counted else None,
            padding_T=~self._all_T,
            mean_tokens=float(len(self._all_T)),
            checked=True,  # as in training, where the reader of the store has checked the ids
            plan=self._plan if way.plan else None,
        )

    def step(self, way: Way, recompute: bool) -> tuple[Tensor, MicrobatchRoutes | None]:
        """Run forward and backward; return the loss, on the device, and the micro-batch's routes.

        The routes are None for a live way. After the step their tally has what was counted.
        """
        self.config.recompute_granularity = "full" if recompute else None
        self.config.moe_router_fusion = way.fused and not way.replays
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
        """The model's part of the record of a run."""
        parameters = sum(parameter.numel() for parameter in self.gpt.parameters())
        experts = type(self.layers[0].experts).__name__
        dtype = str(self.config.params_dtype).removeprefix("torch.")
        sizes = {**asdict(self.sizes), "dtype": dtype, "parameters": parameters}
        tokens = self.sizes.sequence * self.sizes.batch
        routes = {
            "measured bytes": self.route_bytes_measured,
            "bytes per token": self.route_bytes / tokens,
            # not measured: int64 would take 8 bytes for each id
            "int64 bytes per token": 8 * self.sizes.layers * self.sizes.topk,
        }
        about = {"spec": self.spec, "experts_module": experts, "attention": self._attention()}
        return {
            "sizes": sizes,
            **about,
            "route_bytes": self.route_bytes,
            "routes": routes,
            "ways_skipped": self.skipped,
        }

    def _attention(self) -> dict[str, str] | str:
        """The class of the attention; with Transformer Engine, the attention backends by name."""
        if self.spec == "local":
            return type(self.gpt.decoder.layers[0].self_attention.core_attention).__name__
        from transformer_engine.pytorch.attention.dot_product_attention import _attention_backends

        return {n: str(v) for n, v in _attention_backends.items() if n != "attention_params"}


def _batch(sizes: Sizes) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, position ids and labels, each `[B, S]`, the same in every run."""
    generator = torch.Generator().manual_seed(5)
    shape = (sizes.batch, sizes.sequence + 1)
    ids = torch.randint(0, sizes.vocabulary, shape, generator=generator).cuda()
    positions = torch.arange(sizes.sequence).expand(sizes.batch, -1).cuda()
    return ids[:, :-1].contiguous(), positions, ids[:, 1:].contiguous()
