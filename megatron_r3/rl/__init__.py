"""Replay in Megatron's RL loop: the trainer takes the routes that the loop's engine recorded."""
