"""Replay in Megatron's own RL loop of the routes that its engine recorded."""
