"""Tiny transformers models with random weights."""

from __future__ import annotations

from typing import Any

import torch
import transformers


def qwen(seed: int = 3, **change: Any) -> Any:
    """A Qwen3-MoE of three layers, eight experts, top-3; `change` is of its config."""
    torch.manual_seed(seed)
    config = transformers.Qwen3MoeConfig(
        **{
            "vocab_size": 64,
            "hidden_size": 32,
            "intermediate_size": 32,
            "moe_intermediate_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "num_key_value_heads": 1,
            "head_dim": 16,
            "num_experts": 8,
            "num_experts_per_tok": 3,
            "decoder_sparse_step": 1,
            "eos_token_id": 2,
            **change,
        }
    )
    config._experts_implementation = "eager"
    return transformers.Qwen3MoeForCausalLM(config).eval()
