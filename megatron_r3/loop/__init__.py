"""Reinforcement learning without a framework: a sampler, a collector and a trainer in a loop."""
