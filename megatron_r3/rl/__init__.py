"""Megatron's own RL loop, with the routes that its engine sampled."""
