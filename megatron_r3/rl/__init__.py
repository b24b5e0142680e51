"""Replays the routes that Megatron's inference engine recorded in Megatron's own RL loop."""
