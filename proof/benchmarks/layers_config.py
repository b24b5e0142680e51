"""The slices of models that `proof.benchmarks.layers` runs, and their configs in Megatron's terms.

Megatron is imported inside the functions, because the command line says from which tree.

Shape suffixes (docs/glossary.md): S, B, A, F.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_r3.cpu import CPU_CONFIG

SPECS = ("local", "te")


@dataclass(frozen=True)
class Sizes:
    """Sizes of the layers, and of the microbatch that goes through them."""

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
    """A slice of a model: its sizes, and what Megatron calls the rest of it.

    Attributes:
        sizes: those of a run on a GPU; every layer is a MoE layer.
        tiny: those of a rehearsal, on a CPU.
        config: further fields of the config, the same in a rehearsal.
        large: further fields that a rehearsal replaces by `small`.
        latent: the attention is multi-latent (MLA).
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
    """A config of Megatron; each step sets its recompute.

    The local spec needs neither Transformer Engine nor apex. With Transformer Engine the options
    are those of a training script: grouped GEMMs, fused permutation, fused SwiGLU, fused rotary
    embedding (not for MLA, where Megatron calls it experimental). Weight gradients are not
    accumulated into `main_grad`, because there is no DDP here that would make it.
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
    return kind(
        num_layers=sizes.layers,
        hidden_size=sizes.hidden,
        num_attention_heads=sizes.heads,
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
        params_dtype=torch.bfloat16 if cuda else torch.float32,
        bf16=cuda,
        init_method_std=sizes.hidden**-0.5,  # large enough for the experts to matter to the loss
        recompute_granularity="full",
        recompute_method="uniform",
        recompute_num_layers=1,
        **kernels,
        **model.config,
        **(model.large if cuda else model.small),
    )


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
    """The core of MLA on the local spec, by torch's own scaled_dot_product_attention.

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
