"""Native Rollout Routing Replay (R3) for Megatron-LM: everything that is not a seam in Megatron."""

__version__ = "0.1.0"
