"""Run code of RL frameworks, unchanged, on CPU tensors, for tests and benchmarks."""
