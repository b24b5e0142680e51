"""Adapters: Megatron's own `RouterReplay` interface on our hook, and verl."""
