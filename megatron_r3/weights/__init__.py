"""Weights between a transformers directory and a Megatron model; Qwen3-MoE is the only family."""
