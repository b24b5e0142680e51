"""The evidence that megatron-r3 is right, and what it costs: nothing here is installed."""
