"""Adapters for code that is written for Megatron's `RouterReplay`, and for verl."""
