"""The evidence that megatron-r3 is right, and what it costs. Nothing here is installed."""
