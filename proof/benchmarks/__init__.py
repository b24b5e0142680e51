"""Benchmarks: what replay, the rollout store and guests cost in time, memory, bytes and waits."""
