"""Moves weights between a transformers directory and a Megatron model, in any parallel layout."""
