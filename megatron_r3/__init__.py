"""Native Rollout Routing Replay (R3) for Megatron-LM."""

__version__ = "0.1.0"
