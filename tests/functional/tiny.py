"""A tiny GPT MoE in the ranks of a worker. Megatron is imported only inside the functions."""

from __future__ import annotations

from typing import Any

import torch

from megatron_r3.cpu import CPU_CONFIG

VOCABULARY, SEQUENCE, BATCH = 64, 16, 2


def start(**sizes: int) -> None:
    """Process groups and random streams, deterministic."""
    from megatron.core import parallel_state
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    torch.use_deterministic_algorithms(True)
    torch.distributed.init_process_group("gloo")
    parallel_state.initialize_model_parallel(**{"expert_tensor_parallel_size": 1, **sizes})
    model_parallel_cuda_manual_seed(1)
    torch.manual_seed(1)


# a GPT MoE that trains on the CPU, on any tree
SHAPE: dict[str, Any] = {
    "hidden_size": 32,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 64,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 16,
    "moe_token_dispatcher_type": "alltoall",
    "add_bias_linear": False,
    "gated_linear_unit": True,
    "normalization": "RMSNorm",
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    **CPU_CONFIG,
}


def config(**options: Any) -> Any:
    """Four layers, eight experts, top-2, replay on. With replay off any tree takes it."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    options = {"moe_router_replay": True, **options}
    if not options["moe_router_replay"]:  # off is the default, and an unpatched tree has no field
        del options["moe_router_replay"]
    return TransformerConfig(
        **{
            **SHAPE,
            "num_layers": 4,
            "kv_channels": 8,
            "qk_layernorm": True,
            "moe_router_load_balancing_type": "none",
            "activation_func": torch.nn.functional.silu,
            **options,
        }
    )


def model(config: Any) -> Any:
    """A whole GPTModel with Megatron's local layers; the same weights for the same shape."""
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    torch.manual_seed(3)
    return GPTModel(
        config,
        get_gpt_decoder_block_spec(config, use_transformer_engine=False),
        vocab_size=VOCABULARY,
        max_sequence_length=SEQUENCE,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=False,
    )


def batch(seed: int = 5) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """tokens, position ids, labels `[B, S]`."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, VOCABULARY, (BATCH, SEQUENCE + 1), generator=generator)
    return ids[:, :-1], torch.arange(SEQUENCE).expand(BATCH, -1), ids[:, 1:]


def loss_and_gradients(gpt: Any, context: Any) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """One forward pass inside `context` and its backward pass outside, as a schedule does it."""
    gpt.zero_grad(set_to_none=True)
    tokens, positions, labels = batch()
    with context:
        loss = gpt(tokens, positions, None, labels=labels).sum()
    loss.backward()
    gradients = {n: p.grad.clone() for n, p in gpt.named_parameters() if p.grad is not None}
    return loss.detach(), gradients
